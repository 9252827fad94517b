/* plan_cost.c - see plan_cost.h. docs/ALGORITHMS.md has the same sums as formulas. */
#include "core/plan/plan_cost.h"

#define REMOTE_NS_PER_BYTE 0.8 /* until it is known: 10 Gbit/s between hosts (tcp_window.h) */
/* Time from the end of one stage to the start of the next: a thread wakes up. */
#define LOCAL_HOP_NS 1100.0
#define REMOTE_HOP_NS 40000.0
/* Time of one message without its bytes, at both ends. Both local numbers: bench/notes/cpu-collectives.md. */
#define LOCAL_MESSAGE_NS 600.0
#define REMOTE_MESSAGE_NS 1000.0
/* Time of one dense byte that a rank scans, clears or writes, in cache. */
#define PASS_NS_PER_BYTE 0.04

void sp_cost_group_init(sp_cost_group *g, int world_size, const sp_hosts *hosts)
{
    double n = world_size, pairs = 0;
    *g = (sp_cost_group){.hosts = hosts,
                         .world_size = world_size,
                         .n_hosts = 1,
                         .host_ranks_min = world_size,
                         .host_ranks_max = world_size,
                         .local_ns = SP_COST_LOCAL_NS};
    for (int h = 0; hosts != NULL && h < hosts->n_hosts; h++) {
        int size = sp_hosts_size(hosts, h);
        g->host_ranks_min = size < g->host_ranks_min ? size : g->host_ranks_min;
        g->host_ranks_max = h == 0 || size > g->host_ranks_max ? size : g->host_ranks_max;
        pairs += size * (n - size);
    }
    if (hosts != NULL)
        g->n_hosts = hosts->n_hosts;
    if (world_size > 1)
        g->remote_share = pairs / (n * (n - 1));
    g->remote_ns = REMOTE_NS_PER_BYTE * g->host_ranks_max;
}

/* Density of a slice, and the link for which its format is chosen. */
struct spread {
    double density, link_ns;
};

/* What is sent for some slices. */
struct sent {
    double bytes, messages, encode_ns, decode_ns;
};

/* Add the means of `times` slices of n elements. */
static void add_slices(const sp_cost_call *c, size_t n, double times, const struct spread *at,
                       struct sent *out)
{
    sp_slice_kind kind = {c->elem_bytes, c->format, at->density, at->link_ns};
    sp_slice_bytes slice;
    if (n == 0)
        return;
    slice = sp_slice_bytes_of(&kind, n);
    out->bytes += times * slice.bytes;
    out->messages += times;
    out->encode_ns += times * slice.encode_ns;
    out->decode_ns += times * slice.decode_ns;
    if (slice.format == SPCCL_FORMAT_DENSE) /* the costs of formats leave out the pass over the slice */
        out->decode_ns += times * (double)(n * c->elem_bytes) * PASS_NS_PER_BYTE;
}

/* Add a range of elements, `times` times: slices of slice_elems, and a shorter last one. */
static void add_range(const sp_cost_call *c, size_t n_elems, double times, const struct spread *at,
                      struct sent *out)
{
    add_slices(c, c->slice_elems, times * (double)(n_elems / c->slice_elems), at, out);
    add_slices(c, n_elems % c->slice_elems, times, at, out);
}

/* One copy of all parts of a stage. */
static struct sent one_copy(const sp_cost_call *c, const sp_cost_stage *s, double link_ns)
{
    struct spread at = {.density = s->density, .link_ns = link_ns};
    struct sent out = {0};
    size_t off, each;
    sp_part_range(s->n_elems, s->n_parts, 0, &off, &each);
    if (each == 0)
        return out;
    add_range(c, each, (double)(s->n_elems / each), &at, &out);
    add_range(c, s->n_elems % each, 1, &at, &out);
    return out;
}

void sp_cost_add(const sp_cost_group *g, const sp_cost_call *c, const sp_cost_stage *s, sp_plan_cost *out)
{
    double n = g->world_size, busiest, encodings = s->messages;
    struct sent local = {0}, remote = {0};
    if (s->remote > 0)
        remote = one_copy(c, s, g->remote_ns);
    if (s->local > 0)
        local = s->messages != 0 && s->remote > 0 ? remote : one_copy(c, s, g->local_ns);
    busiest = remote.bytes * s->remote / n * s->busiest;
    out->local_bytes += local.bytes * s->local;
    out->local_messages += local.messages * s->local;
    out->remote_bytes += remote.bytes * s->remote;
    out->remote_messages += remote.messages * s->remote;
    out->host_bytes += busiest * g->host_ranks_max;
    out->ns +=
        (local.bytes * g->local_ns + local.decode_ns + local.messages * LOCAL_MESSAGE_NS) * s->local / n +
        (remote.decode_ns + remote.messages * REMOTE_MESSAGE_NS) * s->remote / n + busiest * g->remote_ns;
    if (encodings != 0)
        out->ns += encodings * (s->remote > 0 ? remote : local).encode_ns / n;
    else
        out->ns += (local.encode_ns * s->local + remote.encode_ns * s->remote) / n;
}

/* A stage in which the sender of a part is any rank, and each of its receivers any other. */
static sp_cost_stage pairs(const sp_cost_group *g, size_t n_elems, int n_parts, double density,
                           double receivers)
{
    double mean = (g->world_size - 1) * g->remote_share;
    return (sp_cost_stage){.n_elems = n_elems,
                           .n_parts = n_parts,
                           .density = density,
                           .local = receivers * (1 - g->remote_share),
                           .remote = receivers * g->remote_share,
                           .busiest = mean > 0 ? (g->world_size - g->host_ranks_min) / mean : 1};
}

/* Results of owners: to all ranks, or, relayed, to one rank of each other host and from there to the rest. */
static sp_cost_stage results(const sp_cost_group *g, const sp_cost_call *c, bool relayed, size_t n_elems)
{
    double density = c->coll == SP_ALL_REDUCE ? c->sum_density : c->density;
    sp_cost_stage s = pairs(g, n_elems, g->world_size, density, g->world_size - 1);
    s.messages = 1;
    if (relayed) {
        s.local = g->world_size - g->n_hosts;
        s.remote = g->n_hosts - 1;
        s.busiest = 1;
    }
    return s;
}

void sp_cost_add_results(const sp_cost_group *g, const sp_cost_call *c, bool relayed, sp_plan_cost *out)
{
    sp_cost_stage s = results(g, c, relayed, c->n_elems);
    sp_cost_add(g, c, &s, out);
}

void sp_cost_add_fixed(const sp_cost_group *g, int n_hops, bool relayed, double pass_bytes, sp_plan_cost *out)
{
    bool several = g->n_hosts > 1;
    out->ns += n_hops * (several ? REMOTE_HOP_NS : LOCAL_HOP_NS) + pass_bytes * PASS_NS_PER_BYTE;
    if (several && relayed)
        out->ns += LOCAL_HOP_NS;
}

/* The root sends one part to each other rank, which passes it on to the rest. */
static void scattered_broadcast(const sp_cost_group *g, const sp_cost_call *c, bool relayed,
                                sp_plan_cost *out)
{
    int n_parts = g->world_size - 1;
    sp_cost_stage s = pairs(g, c->n_elems, n_parts, c->density, 1);
    double bytes = (double)(c->n_elems * c->elem_bytes);
    double root_share = g->world_size; /* the root alone sends this stage */
    s.busiest = root_share;
    sp_cost_add(g, c, &s, out);
    s = pairs(g, c->n_elems, n_parts, c->density, g->world_size - 2);
    s.messages = 1;
    if (relayed && g->n_hosts > 1) {
        double hosts = g->n_hosts - 1;
        s.remote = hosts < s.remote ? hosts : s.remote;
        s.local = g->world_size - 2 - s.remote;
        s.busiest = 1;
    }
    sp_cost_add(g, c, &s, out);
    sp_cost_add_fixed(g, n_parts > 1 ? 2 : 1, relayed, 2 * bytes, out);
}

/* Both schedules are the same but for the results. */
static bool two_hops(const sp_cost_group *g, const sp_cost_call *c, bool relayed, sp_plan_cost *out)
{
    size_t block = c->n_elems * c->elem_bytes, all = c->n_elems * (size_t)g->world_size;
    sp_cost_stage s;
    relayed = relayed && g->n_hosts > 1;
    switch (c->coll) {
    case SP_ALL_GATHER:
        /* Blocks of n_elems: sp_part_range would cut an array of all blocks at multiples of 64. */
        s = results(g, c, relayed, c->n_elems);
        s.n_parts = 1;
        s.messages = g->world_size;
        s.local *= g->world_size;
        s.remote *= g->world_size;
        sp_cost_add(g, c, &s, out);
        sp_cost_add_fixed(g, 1, relayed, (double)(block + all * c->elem_bytes), out);
        return true;
    case SP_REDUCE_SCATTER:
        s = pairs(g, c->n_elems, 1, c->density, (double)g->world_size * (g->world_size - 1));
        sp_cost_add(g, c, &s, out);
        sp_cost_add_fixed(g, 1, false, (double)(all * c->elem_bytes + 2 * block), out);
        return true;
    case SP_ALL_REDUCE:
        s = pairs(g, c->n_elems, g->world_size, c->density, g->world_size - 1);
        sp_cost_add(g, c, &s, out);
        sp_cost_add_results(g, c, relayed, out);
        sp_cost_add_fixed(g, 2, relayed, 2 * (double)block, out);
        return true;
    case SP_BROADCAST:
        scattered_broadcast(g, c, relayed, out);
        return true;
    case SP_N_COLLS:
        break;
    }
    return false;
}

static bool direct(const sp_cost_group *g, const sp_cost_call *c, sp_plan_cost *out)
{
    return two_hops(g, c, false, out);
}

static bool relayed(const sp_cost_group *g, const sp_cost_call *c, sp_plan_cost *out)
{
    return two_hops(g, c, true, out);
}

static bool oneshot(const sp_cost_group *g, const sp_cost_call *c, sp_plan_cost *out)
{
    double bytes = (double)(c->n_elems * c->elem_bytes);
    double senders = c->coll == SP_ALL_REDUCE ? g->world_size : 1;
    sp_cost_stage s;
    if (c->coll != SP_ALL_REDUCE && c->coll != SP_BROADCAST)
        return false;
    s = pairs(g, c->n_elems, 1, c->density, senders * (g->world_size - 1));
    s.messages = senders;
    if (c->coll == SP_BROADCAST)
        s.busiest = g->world_size; /* the root alone sends */
    sp_cost_add(g, c, &s, out);
    sp_cost_add_fixed(g, 1, false, (c->coll == SP_ALL_REDUCE ? 3 : 2) * bytes, out);
    return true;
}

typedef bool (*cost_fn)(const sp_cost_group *g, const sp_cost_call *c, sp_plan_cost *out);

static const cost_fn costs[SP_N_SCHEDULES] = {
    [SP_SCHED_DIRECT] = direct,
    [SP_SCHED_ONESHOT] = oneshot,
    [SP_SCHED_RELAYED] = relayed,
};

bool sp_plan_cost_of(sp_schedule schedule, const sp_cost_group *g, const sp_cost_call *c, sp_plan_cost *out)
{
    *out = (sp_plan_cost){0};
    if (costs[schedule] == NULL)
        return false;
    return g->world_size == 1 || c->n_elems == 0 || costs[schedule](g, c, out);
}
