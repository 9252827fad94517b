/* plan_owners.c - see plan_owners.h. The plans are checked: each output is written once, from the data that belongs
 * there. So it is enough to look at who adds what, and from whom each rank takes results. */
#include "core/plan/plan_owners.h"

#include "core/contract/inbox.h"
#include "core/plan/sched_build.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

typedef struct finder {
    const sp_plan_head *head;
    sp_plan *const *plans;
    const sp_hosts *hosts; /* NULL: no relays */
    sp_owners *out;
} finder;

/* Looks at one step. False: it does not fit, and `why_not` says why. */
typedef bool (*look)(const finder *f, int rank, const sp_step *s);

static bool differs(const finder *f, int rank, const sp_step *s, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));

static bool differs(const finder *f, int rank, const sp_step *s, const char *fmt, ...)
{
    char *text = f->out->why_not;
    size_t cap = sizeof f->out->why_not;
    int n = snprintf(text, cap, "rank %d, step %d: ", rank, (int)(s - f->plans[rank]->steps));
    va_list args;
    va_start(args, fmt);
    vsnprintf(text + n, cap - (size_t)n, fmt, args);
    va_end(args);
    return false;
}

static bool each_step(const finder *f, sp_step_kind kind, look at)
{
    f->out->why_not[0] = '\0';
    for (int r = 0; r < f->head->n_ranks; r++)
        for (int i = 0; i < f->plans[r]->n_steps; i++)
            if (f->plans[r]->steps[i].kind == kind && !at(f, r, &f->plans[r]->steps[i]))
                return false;
    return true;
}

static bool adds_as_owner(const finder *f, int rank, const sp_step *s)
{
    if (s->gives_sum)
        return differs(
            f, rank, s,
            "it makes a sum of chunk %d that is not finished; on GPUs the owner of a chunk adds all",
            s->chunk);
    if (s->adds_sums)
        return differs(f, rank, s,
                       "it does not add what all ranks have of chunk %d in rank order, as GPUs do", s->chunk);
    return true;
}

/* ---- who owns a chunk ----------------------------------------------------------------------------- */

/* Of an all_reduce: the ranks that add each chunk. False: neither one rank adds each chunk, nor all ranks all. */
static bool find_adders(const finder *f)
{
    int n_adders[SP_PLAN_CHUNKS_MAX] = {0}, n = f->head->n_ranks;
    for (int r = 0; r < n; r++)
        for (int i = 0; i < f->plans[r]->n_steps; i++) {
            const sp_step *s = &f->plans[r]->steps[i];
            if (s->kind != SP_STEP_REDUCE)
                continue;
            n_adders[s->chunk]++;
            f->out->of[s->chunk] = (uint8_t)r;
        }
    f->out->one_hop = n > 1 && n_adders[0] == n;
    f->out->n_chunks = f->out->one_hop ? 0 : f->head->n_chunks;
    for (int r = 0; r < n; r++)
        for (int i = 0; i < f->plans[r]->n_steps; i++) {
            const sp_step *s = &f->plans[r]->steps[i];
            if (s->kind == SP_STEP_REDUCE && n_adders[s->chunk] != (f->out->one_hop ? n : 1))
                return differs(
                    f, r, s,
                    "%d of %d ranks add chunk %d; on GPUs one rank adds a chunk, or all ranks add all",
                    n_adders[s->chunk], n, s->chunk);
        }
    return true;
}

/* Of a broadcast: a chunk that the root sends to one rank only is owned by that rank, others by the root. */
static void find_first_receivers(const finder *f)
{
    int n_from_root[SP_PLAN_CHUNKS_MAX] = {0}, n = f->head->n_ranks, root = f->head->root;
    f->out->n_chunks = f->head->n_chunks;
    memset(f->out->of, root, sizeof f->out->of);
    for (int r = 0; r < n; r++)
        for (int i = 0; i < f->plans[r]->n_steps; i++) {
            const sp_step *s = &f->plans[r]->steps[i];
            if (s->kind == SP_STEP_RECV && f->plans[r]->ranks[s->from] == root)
                f->out->of[s->chunk] = (uint8_t)(++n_from_root[s->chunk] == 1 && n > 2 ? r : root);
        }
}

/* ---- the way of results --------------------------------------------------------------------------- */

/* From whom a rank takes the chunk. */
static int sender_of(const finder *f, int rank, int chunk)
{
    int owner = f->out->n_chunks == 0 ? chunk / f->head->n_chunks : f->out->of[chunk], relay;
    if (rank == owner)
        return f->head->root; /* of a broadcast; else an owner receives nothing */
    if (f->hosts == NULL || f->hosts->host_of[rank] == f->hosts->host_of[owner])
        return owner;
    relay = sp_relay_of(f->hosts, owner, f->hosts->host_of[rank], -1);
    return rank == relay ? owner : relay;
}

static bool takes_result(const finder *f, int rank, const sp_step *s)
{
    int from = f->plans[rank]->ranks[s->from], wanted = sender_of(f, rank, s->chunk);
    /* The CPUs' relayed broadcast takes another relay there, as the root has the data. */
    if (from != wanted && f->hosts != NULL && wanted == f->head->root && wanted != f->out->of[s->chunk])
        return differs(
            f, rank, s,
            "it takes chunk %d from rank %d; on GPUs rank %d relays it, although it is the root: it has "
            "the place of the chunk's owner, rank %d",
            s->chunk, from, wanted, f->out->of[s->chunk]);
    return from == wanted || differs(f, rank, s, "it takes chunk %d from rank %d; on GPUs rank %d sends it",
                                     s->chunk, from, wanted);
}

static bool has_results(const finder *f)
{
    for (int r = 0; r < f->head->n_ranks; r++)
        for (int i = 0; i < f->plans[r]->n_steps; i++)
            if (f->plans[r]->steps[i].kind == SP_STEP_RECV)
                return true;
    return false;
}

/* Can GPUs relay results in this group? The rule of find_relays in gpu_facts.c. */
static bool has_relays(const sp_hosts *h)
{
    for (int i = 0; h != NULL && i < h->n_hosts; i++)
        if (sp_hosts_size(h, i) != sp_hosts_size(h, 0))
            return false;
    return h != NULL && h->n_hosts > 1 && sp_hosts_size(h, 0) > 1;
}

static bool find_way(finder *f, const sp_hosts *hosts)
{
    if (!has_results(f))
        return true;
    f->out->results = SP_RESULTS_DIRECT;
    if (each_step(f, SP_STEP_RECV, takes_result))
        return true;
    if (!has_relays(hosts))
        return false;
    f->hosts = hosts;
    f->out->results = SP_RESULTS_RELAYED;
    return each_step(f, SP_STEP_RECV, takes_result);
}

void sp_plan_find_owners(const sp_plan_head *head, sp_plan *const *plans, const sp_hosts *hosts,
                         sp_owners *out)
{
    finder f = {.head = head, .plans = plans, .out = out};
    int n = head->n_ranks;
    *out = (sp_owners){.results = SP_RESULTS_NONE};
    if (!each_step(&f, SP_STEP_REDUCE, adds_as_owner))
        return;
    if (head->coll == SP_ALL_REDUCE && !find_adders(&f))
        return;
    if (head->coll == SP_BROADCAST)
        find_first_receivers(&f);
    if (!find_way(&f, hosts) || n <= SP_GPU_HOST_RANKS_MAX)
        return;
    if (out->one_hop || out->results == SP_RESULTS_DIRECT)
        snprintf(out->why_not, sizeof out->why_not,
                 "it has %d ranks; on GPUs groups of more than %d ranks relay results", n,
                 SP_GPU_HOST_RANKS_MAX);
}

int sp_owners_most(const sp_owners *o)
{
    int n_owned[SP_PLAN_RANKS_MAX] = {0}, most = 1;
    for (int c = 0; c < o->n_chunks; c++)
        if (++n_owned[o->of[c]] > most)
            most = n_owned[o->of[c]];
    return most;
}
