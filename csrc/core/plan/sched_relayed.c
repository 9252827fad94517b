/* sched_relayed.c - the relayed schedule, for ranks on several hosts. Contributions go straight to their owners,
 * as in the direct schedule. A result crosses to each other host once: its owner sends it to one rank there, the
 * relay, which passes the message on to the other ranks of that host. Additions have the order of the direct
 * schedule, so the results have the same bits.
 *
 * The results of sums are the larger part of the traffic. With 32 ranks and 1% of nonzeros in each input, 27% of the
 * elements of a sum are nonzero. On 4 hosts, the direct schedule sends each sum to 24 ranks of other hosts, this one
 * to 3.
 *
 * Two queues are enough against deadlock: a relay waits only for space in queues to ranks of its own host. Those
 * ranks relay nothing that arrives in these queues. */
#include "core/plan/sched_build.h"

int sp_relay_of(const sp_hosts *h, int owner, int host, int except)
{
    int size = sp_hosts_size(h, host), i = h->place[owner] % size;
    const int *ranks = h->ranks + h->first[host];
    if (ranks[i] == except)
        i = (i + 1) % size;
    return ranks[i] == except ? -1 : ranks[i];
}

/* Send to the other ranks of this rank's host, beginning with the next one. */
static void to_own_host(sp_plan_builder *b, const sp_plan_args *a, sp_step *s, int except)
{
    const sp_hosts *h = a->hosts;
    int host = h->host_of[a->rank], size = sp_hosts_size(h, host);
    for (int i = 1; i < size; i++) {
        int r = h->ranks[h->first[host] + (h->place[a->rank] + i) % size];
        if (r != except)
            sp_step_to(b, s, SP_QUEUE_RESULT, r);
    }
}

void sp_relayed_to_everyone(sp_plan_builder *b, const sp_plan_args *a, sp_step *s, int except)
{
    const sp_hosts *h = a->hosts;
    for (int i = 1; i < h->n_hosts; i++) {
        int relay = sp_relay_of(h, a->rank, (h->host_of[a->rank] + i) % h->n_hosts, except);
        if (relay >= 0)
            sp_step_to(b, s, SP_QUEUE_RESULT, relay);
    }
    to_own_host(b, a, s, except);
}

/* Receive the shard of `owner`, and relay it if that is this rank's task. */
static void receive(sp_plan_builder *b, const sp_plan_args *a, int owner, size_t off, size_t len, int except)
{
    const int *host_of = a->hosts->host_of;
    int from =
        host_of[owner] == host_of[a->rank] ? owner : sp_relay_of(a->hosts, owner, host_of[a->rank], except);
    sp_step *s = sp_plan_add(b, SP_STEP_RECV, owner, 0, off, len);
    if (s == NULL)
        return;
    sp_step_from(b, s, SP_QUEUE_RESULT, from == a->rank ? owner : from);
    if (from == a->rank)
        to_own_host(b, a, s, except);
}

static void all_gather(sp_plan_builder *b, const sp_plan_args *a)
{
    sp_step *s;
    for (int i = 1; i < a->world_size; i++) {
        int owner = (a->rank + i) % a->world_size;
        receive(b, a, owner, (size_t)owner * a->n_elems, a->n_elems, -1);
    }
    s = sp_plan_add(b, SP_STEP_SEND, a->rank, 0, 0, a->n_elems);
    if (s != NULL)
        sp_relayed_to_everyone(b, a, s, -1);
    sp_plan_add(b, SP_STEP_COPY, a->rank, 0, (size_t)a->rank * a->n_elems, a->n_elems);
}

void sp_relayed_results(sp_plan_builder *b, const sp_plan_args *a)
{
    for (int i = 1; i < a->world_size; i++) {
        int owner = (a->rank + i) % a->world_size;
        size_t off, len;
        sp_part_range(a->n_elems, a->world_size, owner, &off, &len);
        receive(b, a, owner, off, len, -1);
    }
}

static void all_reduce(sp_plan_builder *b, const sp_plan_args *a)
{
    sp_step *reduce;
    sp_relayed_results(b, a);
    reduce = sp_direct_contributions(b, a, true);
    if (reduce != NULL)
        sp_relayed_to_everyone(b, a, reduce, -1);
}

/* As in the direct schedule, the root sends one shard to each other rank. */
static void broadcast(sp_plan_builder *b, const sp_plan_args *a)
{
    for (int i = 1; i < a->world_size; i++) {
        int owner = (a->root + i) % a->world_size;
        size_t off, len;
        sp_step *s;
        sp_part_range(a->n_elems, a->world_size - 1, i - 1, &off, &len);
        if (a->rank != a->root && a->rank != owner) {
            receive(b, a, owner, off, len, a->root);
            continue;
        }
        s = sp_plan_add(b, a->rank == a->root ? SP_STEP_SEND : SP_STEP_RECV, owner, off, off, len);
        if (s == NULL)
            continue;
        if (a->rank == a->root) {
            sp_step_to(b, s, SP_QUEUE_INPUT, owner);
        } else {
            sp_step_from(b, s, SP_QUEUE_INPUT, a->root);
            sp_relayed_to_everyone(b, a, s, a->root);
        }
    }
}

bool sp_sched_relayed(sp_plan_builder *b, const sp_plan_args *a)
{
    /* On one host, and in a reduce-scatter, there is nothing to relay. */
    if (a->n_elems == 0 || a->hosts == NULL || a->coll == SP_REDUCE_SCATTER)
        return sp_sched_direct(b, a);
    if (a->coll == SP_ALL_GATHER)
        all_gather(b, a);
    else if (a->coll == SP_ALL_REDUCE)
        all_reduce(b, a);
    else
        broadcast(b, a);
    return true;
}
