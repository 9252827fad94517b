/* sched_hier.c - the hierarchical schedule, for ranks on several hosts. The contributions to a shard are added inside
 * each host first. One rank of each host, the one that relays the shard's result, sends the host's sum to the owner,
 * which adds the sums of the hosts. Results go the way of the relayed schedule. Where the nonzeros of a host's ranks
 * coincide, a host's sum is not much larger than one contribution.
 *
 * A sum is: the contributions of the owner's host in rank order, then the sums of the other hosts in the order of
 * hosts, each added in rank order. That is not rank order, so this schedule runs only when it is asked for.
 *
 * Two ranks of one host exchange contributions to several shards over one queue. The senders take turns by (slice, host
 * of the shard), beginning with the next host, the same on all ranks of a host: so no two ranks wait for shards of each
 * other in different orders. Sums for other hosts need contributions of the own host only, so they come first: else they
 * would stand behind a shard that waits for other hosts. docs/ALGORITHMS.md, "Why no rank waits for ever", has the proof. */
#include "core/plan/sched_build.h"

typedef struct shard {
    int owner;
    size_t off, len; /* in the input */
} shard;

/* The rank of this rank's host that adds the host's contributions to the shard of `owner`. */
static int adder_of(const sp_plan_args *a, int owner)
{
    const sp_hosts *h = a->hosts;
    int host = h->host_of[a->rank];
    return h->host_of[owner] == host ? owner : sp_relay_of(h, owner, host, -1);
}

/* The senders of a step: the other ranks of this rank's host. */
static void from_own_host(sp_plan_builder *b, const sp_plan_args *a, sp_step *s)
{
    const sp_hosts *h = a->hosts;
    int host = h->host_of[a->rank];
    for (int i = h->first[host]; i < h->first[host + 1]; i++)
        if (h->ranks[i] != a->rank)
            sp_step_from(b, s, SP_QUEUE_INPUT, h->ranks[i]);
    s->own_before = h->place[a->rank];
}

/* Send this rank's contribution to the rank of its host that adds it. */
static void contribute(sp_plan_builder *b, const sp_plan_args *a, const shard *x, int to)
{
    sp_step *s = sp_plan_add(b, SP_STEP_SEND, x->owner, x->off, 0, x->len);
    if (s == NULL)
        return;
    sp_step_to(b, s, SP_QUEUE_INPUT, to);
    if (to != x->owner || a->hosts->host_of[to] == a->hosts->host_of[a->rank])
        s->turn = a->hosts->place[to];
}

/* Send the sum of this rank's host to the owner, which is on another host. */
static void add_host(sp_plan_builder *b, const sp_plan_args *a, const shard *x)
{
    sp_step *s;
    if (sp_hosts_size(a->hosts, a->hosts->host_of[a->rank]) == 1) { /* the contribution is the sum */
        contribute(b, a, x, x->owner);
        return;
    }
    s = sp_plan_add(b, SP_STEP_REDUCE, x->owner, x->off, 0, x->len);
    if (s == NULL)
        return;
    from_own_host(b, a, s);
    s->gives_sum = true;
    sp_step_to(b, s, SP_QUEUE_INPUT, x->owner);
}

/* Add the own host's contributions and the sums of the others. NULL if the shard is empty. */
static sp_step *add_all(sp_plan_builder *b, const sp_plan_args *a, const shard *x)
{
    const sp_hosts *h = a->hosts;
    bool is_all_reduce = a->coll == SP_ALL_REDUCE;
    sp_step *s = sp_plan_add(b, SP_STEP_REDUCE, a->rank, x->off, is_all_reduce ? x->off : 0, x->len);
    if (s == NULL)
        return NULL;
    from_own_host(b, a, s);
    for (int host = 0; host < h->n_hosts; host++)
        if (host != h->host_of[a->rank])
            sp_step_from(b, s, SP_QUEUE_INPUT, sp_relay_of(h, a->rank, host, -1));
    s->adds_sums = true;
    return s;
}

/* The step of this rank for the shard of `owner`. */
static void add_shard(sp_plan_builder *b, const sp_plan_args *a, int owner)
{
    shard x = {owner, (size_t)owner * a->n_elems, a->n_elems};
    int adder = adder_of(a, owner);
    if (a->coll == SP_ALL_REDUCE)
        sp_part_range(a->n_elems, a->world_size, owner, &x.off, &x.len);
    if (owner == a->rank) {
        sp_step *s = add_all(b, a, &x);
        if (s != NULL && a->coll == SP_ALL_REDUCE)
            sp_relayed_to_everyone(b, a, s, -1);
    } else if (adder == a->rank) {
        add_host(b, a, &x);
    } else {
        contribute(b, a, &x, adder);
    }
}

static void reduce(sp_plan_builder *b, const sp_plan_args *a)
{
    const sp_hosts *h = a->hosts;
    int host = h->host_of[a->rank];
    b->plan->n_turns = sp_hosts_size(h, host);
    if (a->coll == SP_ALL_REDUCE)
        sp_relayed_results(b, a);
    for (int i = 1; i <= h->n_hosts; i++) { /* the order of turns: the own host is the last */
        int to = (host + i) % h->n_hosts;
        for (int j = h->first[to]; j < h->first[to + 1]; j++)
            add_shard(b, a, h->ranks[j]);
    }
}

bool sp_sched_hier(sp_plan_builder *b, const sp_plan_args *a)
{
    if (a->n_elems == 0 || a->hosts == NULL)
        return sp_sched_direct(b, a);
    if (a->coll != SP_ALL_REDUCE && a->coll != SP_REDUCE_SCATTER)
        return sp_sched_relayed(b, a);
    reduce(b, a);
    return true;
}
