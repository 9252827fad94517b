/* plan_cost_sums.c - what the schedules cost that send sums of some ranks: ring and hierarchical. See plan_cost.h. The
 * library never chooses these two (choose.h); test_plan_cost.c compares this with the bytes that run. */
#include "plan_cost_sums.h"

/* The call for messages that hold sums. */
static sp_cost_call of_sums(const sp_cost_call *c)
{
    sp_cost_call sums = *c;
    sums.elem_bytes = c->sum_bytes != 0 ? c->sum_bytes : c->elem_bytes;
    return sums;
}

/* Every shard goes to `local` ranks of the sender's host and to `remote` ranks of others: means over the shards. */
static sp_cost_stage shards(const sp_cost_group *g, const sp_cost_call *c, double density, double local,
                            double remote)
{
    bool cut = c->coll == SP_ALL_REDUCE; /* else each shard is a block of n_elems */
    double times = cut ? 1 : g->world_size;
    return (sp_cost_stage){.n_elems = c->n_elems,
                           .n_parts = cut ? g->world_size : 1,
                           .density = density,
                           .local = local * times,
                           .remote = remote * times,
                           .busiest = 1};
}

/* ---- ring ---- */

/* The ranks of a ring that send to their own host, or those that send to another one. */
typedef struct senders {
    bool remote;
    double share; /* of all ranks */
    sp_hop hop;
    sp_densities seen;
} senders;

/* Note what a step sends at that density. True if its threshold makes it dense. */
static bool step_is_dense(senders *s, const sp_cost_call *c, sp_hop hop, double density)
{
    sp_thresholds t = sp_thresholds_of(c->format);
    const size_t n = (size_t)1 << 24; /* elements: any large number */
    if (sp_density_says_dense(&s->seen, hop, &t)) {
        sp_density_extrapolate(&s->seen);
        return true;
    }
    sp_density_count(&s->seen, (size_t)(density * (double)n + 0.5), n);
    return false;
}

/* On each host the one rank at its end sends to the next host, with the host's whole rate. */
static double busiest(const sp_cost_group *g)
{
    return (double)g->world_size / g->n_hosts / g->host_ranks_max;
}

static void ring_sums(const sp_cost_group *g, const sp_cost_call *c, senders *s, sp_plan_cost *out)
{
    for (int n_added = 1; n_added < g->world_size; n_added++) {
        double density = sp_cost_partial_density(c->density, c->sum_density, g->world_size, n_added);
        sp_cost_call call = n_added == 1 ? *c : of_sums(c);
        sp_cost_stage stage = shards(g, c, density, s->remote ? 0 : s->share, s->remote ? s->share : 0);
        if (step_is_dense(s, c, s->hop, density))
            call.format = SPCCL_FORMAT_DENSE;
        stage.busiest = busiest(g);
        sp_cost_add(g, &call, &stage, out);
    }
}

/* What these ranks own goes round the ring, in the format that its owner chose. */
static void ring_results(const sp_cost_group *g, const sp_cost_call *c, senders *s, double remote_share,
                         sp_plan_cost *out)
{
    double hops = (g->world_size - 1) * s->share;
    double density = c->coll == SP_ALL_REDUCE ? c->sum_density : c->density;
    sp_cost_call call = *c;
    sp_cost_stage stage = shards(g, c, density, hops * (1 - remote_share), hops * remote_share);
    if (c->coll == SP_ALL_REDUCE && step_is_dense(s, c, SP_HOP_GATHER, density))
        call.format = SPCCL_FORMAT_DENSE;
    stage.messages = s->share * (c->coll == SP_ALL_REDUCE ? 1 : g->world_size);
    stage.busiest = busiest(g);
    sp_cost_add(g, &call, &stage, out);
}

static bool ring(const sp_cost_group *g, const sp_cost_call *c, sp_plan_cost *out)
{
    double n = g->world_size, remote_share = g->n_hosts > 1 ? g->n_hosts / n : 0;
    senders both[2] = {{.hop = SP_HOP_IN_HOST, .share = 1 - remote_share},
                       {.remote = true, .hop = SP_HOP_BETWEEN_HOSTS, .share = remote_share}};
    size_t bytes = c->n_elems * c->elem_bytes * (c->coll == SP_ALL_REDUCE ? 1 : (size_t)g->world_size);
    if (c->coll == SP_BROADCAST)
        return false;
    for (int i = 0; i < 2; i++) {
        if (both[i].share <= 0)
            continue;
        if (c->coll != SP_ALL_GATHER)
            ring_sums(g, c, &both[i], out);
        if (c->coll != SP_REDUCE_SCATTER)
            ring_results(g, c, &both[i], remote_share, out);
    }
    sp_cost_add_fixed(g, (g->world_size - 1) * (c->coll == SP_ALL_REDUCE ? 2 : 1), false, 2 * (double)bytes,
                      out);
    return true;
}

/* ---- hierarchical ---- */

/* One host sends its sums to the owners on other hosts. */
static void host_sums(const sp_cost_group *g, const sp_cost_call *c, int size, sp_plan_cost *out)
{
    double n = g->world_size;
    sp_cost_call call = size == 1 ? *c : of_sums(c);
    sp_cost_stage stage = shards(
        g, c, sp_cost_partial_density(c->density, c->sum_density, g->world_size, size), 0, (n - size) / n);
    stage.busiest = (double)g->n_hosts;
    sp_cost_add(g, &call, &stage, out);
}

static bool hierarchical(const sp_cost_group *g, const sp_cost_call *c, sp_plan_cost *out)
{
    size_t bytes = c->n_elems * c->elem_bytes * (c->coll == SP_ALL_REDUCE ? 1 : (size_t)g->world_size);
    sp_cost_stage inside;
    if (g->hosts == NULL)
        return sp_plan_cost_of(SP_SCHED_DIRECT, g, c, out);
    if (c->coll != SP_ALL_REDUCE && c->coll != SP_REDUCE_SCATTER)
        return sp_plan_cost_of(SP_SCHED_RELAYED, g, c, out);
    inside = shards(g, c, c->density, g->world_size - g->n_hosts, 0);
    sp_cost_add(g, c, &inside, out);
    for (int h = 0; h < g->n_hosts; h++)
        host_sums(g, c, sp_hosts_size(g->hosts, h), out);
    if (c->coll == SP_ALL_REDUCE)
        sp_cost_add_results(g, c, true, out);
    sp_cost_add_fixed(g, c->coll == SP_ALL_REDUCE ? 3 : 2, false, 2 * (double)bytes, out);
    return true;
}

bool cost_of(sp_schedule schedule, const sp_cost_group *g, const sp_cost_call *c, sp_plan_cost *out)
{
    if (schedule != SP_SCHED_RING && schedule != SP_SCHED_HIERARCHICAL)
        return sp_plan_cost_of(schedule, g, c, out);
    *out = (sp_plan_cost){0};
    return g->world_size == 1 || c->n_elems == 0 ||
           (schedule == SP_SCHED_RING ? ring : hierarchical)(g, c, out);
}
