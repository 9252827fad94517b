/* test_plan_cost.c - compares the bytes of the simulator, of every schedule, with those of real collectives; and bytes and
 * messages of sp_plan_cost_of, which has the schedules that the library chooses. `test_plan_cost bytes` prints the table of docs/ALGORITHMS.md. With BYTES_CSV=FILE in the environment it
 * also writes all values to that file, for bench/schedule_bytes.py. */
#include "core/base/mem.h"
#include "core/format/density_rule.h"
#include "core/plan/tune_coll.h"
#include "core/run/comm.h"
#include "ranks.h"
#include "spccl_experimental.h"

#define N_ELEMS ((size_t)(256 << 10) + 7700) /* of all ranks together */
#define N_SPARSEST (4 * N_ELEMS)             /* with 99.9% zeros: a few listed elements are no mean */
#define N_ZEROS 6
#define N_PAIRS 15
#define TOLERANCE 0.02

static const size_t every[N_ZEROS] = {1000, 100, 20, 10, 2, 1}; /* 99.9% zeros to none */
static const struct {
    sp_coll coll;
    sp_schedule schedule;
} pairs[N_PAIRS] = {
    {SP_ALL_GATHER, SP_SCHED_DIRECT},       {SP_ALL_GATHER, SP_SCHED_RELAYED},
    {SP_REDUCE_SCATTER, SP_SCHED_DIRECT},   {SP_ALL_REDUCE, SP_SCHED_DIRECT},
    {SP_ALL_REDUCE, SP_SCHED_ONESHOT},      {SP_ALL_REDUCE, SP_SCHED_RELAYED},
    {SP_BROADCAST, SP_SCHED_DIRECT},        {SP_BROADCAST, SP_SCHED_ONESHOT},
    {SP_BROADCAST, SP_SCHED_RELAYED},       {SP_ALL_GATHER, SP_SCHED_RING},
    {SP_REDUCE_SCATTER, SP_SCHED_RING},     {SP_ALL_REDUCE, SP_SCHED_RING},
    {SP_ALL_GATHER, SP_SCHED_HIERARCHICAL}, {SP_REDUCE_SCATTER, SP_SCHED_HIERARCHICAL},
    {SP_ALL_REDUCE, SP_SCHED_HIERARCHICAL},
};

static size_t elems_of(sp_coll coll, int n_ranks, int z)
{
    size_t n = z == 0 ? N_SPARSEST : N_ELEMS;
    return coll == SP_ALL_GATHER || coll == SP_REDUCE_SCATTER ? n / (size_t)n_ranks : n;
}

/* What one group measured. */
struct measured {
    int ranks_per_host;
    spccl_format format; /* not AUTO: of the ring alone */
    sp_cost_group group;
    size_t slice_elems;
    _Atomic uint64_t wire_bytes[N_ZEROS][N_PAIRS];
};

/* Of `one_in` elements one is not zero, at a random place. So each part of an array has nearly the same
 * density. */
static float element(int rank, size_t i, size_t one_in)
{
    uint64_t z = ((uint64_t)rank << 40) + i / one_in * 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    z ^= z >> 31;
    return i % one_in == (z >> 32) % one_in ? 1.0f + (float)(z & 1023) : 0;
}

static void call(struct rank_ctx *c, int pair, int z, float *in, float *out)
{
    size_t n = elems_of(pairs[pair].coll, c->n_ranks, z);
    c->comm->schedule_forced = true; /* as SPCCL_SCHEDULE does */
    c->comm->schedule = pairs[pair].schedule;
    switch (pairs[pair].coll) {
    case SP_ALL_GATHER:
        CHECK_OK(spccl_all_gather(c->comm, in, out, n, SPCCL_FLOAT32, NULL));
        return;
    case SP_REDUCE_SCATTER:
        CHECK_OK(spccl_reduce_scatter(c->comm, in, out, n, SPCCL_FLOAT32, SPCCL_SUM, NULL));
        return;
    case SP_ALL_REDUCE:
        CHECK_OK(spccl_all_reduce(c->comm, in, out, n, SPCCL_FLOAT32, SPCCL_SUM, NULL));
        return;
    case SP_BROADCAST:
        memcpy(out, in, n * sizeof *in);
        CHECK_OK(spccl_broadcast(c->comm, out, n, SPCCL_FLOAT32, 0, NULL));
        return;
    case SP_N_COLLS:
        break;
    }
}

static uint64_t wire_bytes(struct rank_ctx *c)
{
    spccl_stats stats = {.struct_bytes = sizeof stats};
    CHECK_OK(spccl_comm_stats(c->comm, &stats));
    return stats.wire_bytes_sent;
}

static void measure(struct rank_ctx *c)
{
    struct measured *m = c->arg;
    c->comm->format = m->format; /* as SPCCL_FORMAT does */
    float *in = malloc(N_SPARSEST * sizeof *in), *out = malloc(N_SPARSEST * sizeof *out);
    for (int z = 0; z < N_ZEROS; z++) {
        for (size_t i = 0; i < N_SPARSEST; i++)
            in[i] = element(c->rank, i, every[z]);
        for (int p = 0; p < N_PAIRS; p++) {
            if (m->format != SPCCL_FORMAT_AUTO && pairs[p].schedule != SP_SCHED_RING)
                continue;
            uint64_t before = wire_bytes(c);
            call(c, p, z, in, out);
            m->wire_bytes[z][p] += wire_bytes(c) - before;
        }
    }
    if (c->rank == 0) {
        sp_cost_group_init(&m->group, c->n_ranks, c->comm->links.hosts);
        m->group.remote_ns = m->group.local_ns; /* inproc has one rate, whatever the hosts */
        m->slice_elems =
            sp_tune_slice_elems(c->comm->slice_bytes, sizeof(float), m->format, c->comm->links.message_max);
    }
    free(in);
    free(out);
}

/* Densities of what the ranks contribute, and of its sum. All-gather and broadcast have other elements, of the
 * same density. */
static void count(int n_ranks, size_t one_in, double *density, double *sum_density)
{
    size_t n = 0, n_sums = 0;
    for (size_t i = 0; i < N_ELEMS; i++) {
        size_t here = 0;
        for (int r = 0; r < n_ranks; r++)
            here += element(r, i, one_in) != 0;
        n += here;
        n_sums += here != 0;
    }
    *density = (double)n / (double)N_ELEMS / n_ranks;
    *sum_density = (double)n_sums / (double)N_ELEMS;
}

/* The bytes of the simulator. inproc has one rate, whatever the hosts: link_ns is such that a rank's part of it is that. */
static double simulated(const struct measured *m, int z, int p, double density, double sum_density)
{
    int n = m->group.world_size, per_host = m->ranks_per_host != 0 ? m->ranks_per_host : n;
    double most = sp_cost_sum_density(density, n);
    spccl_simulate_options o = {.struct_bytes = sizeof o,
                                .collective = sp_coll_name(pairs[p].coll),
                                .schedule = sp_schedule_name(pairs[p].schedule),
                                .format = spccl_format_name(m->format),
                                .n_elems = elems_of(pairs[p].coll, n, z),
                                .dtype = SPCCL_FLOAT32,
                                .n_ranks = n,

                                .ranks_per_host = per_host,
                                .message_max = 512 << 10, /* of inproc: half of a queue */
                                .density = density,
                                .overlap = most > density ? (most - sum_density) / (most - density) : 0,
                                .link_ns =
                                    m->group.local_ns / (pairs[p].schedule == SP_SCHED_RING ? 1 : per_host)};
    spccl_simulated out = {.struct_bytes = sizeof out};
    o.overlap = o.overlap < 0 ? 0 : o.overlap;
    CHECK_OK(spccl_simulate(&o, &out));
    return out.wire_bytes;
}

/* The bytes of the model that chooses; 0: it never chooses this. */
static double modelled(const struct measured *m, int z, int p, double density, double sum_density)
{
    sp_cost_call call = {.coll = pairs[p].coll,
                         .n_elems = elems_of(pairs[p].coll, m->group.world_size, z),
                         .elem_bytes = sizeof(float),
                         .slice_elems = m->slice_elems,
                         .format = m->format,
                         .density = density,
                         .sum_density = sum_density};
    sp_plan_cost cost;
    if (!sp_plan_cost_of(pairs[p].schedule, &m->group, &call, &cost))
        return 0;
    return cost.local_bytes + cost.remote_bytes;
}

/* How far bytes are from what was measured: 0.01 is 1% too much. */
static double error_of(const struct measured *m, int z, int p, double bytes, const char *whose)
{
    double e = bytes / (double)m->wire_bytes[z][p] - 1;
    CHECK(e <= TOLERANCE && e >= -TOLERANCE,
          "%s %s, %d ranks, %d per host, 1 of %zu not zero: %s is %+.1f%% off", sp_coll_name(pairs[p].coll),
          sp_schedule_name(pairs[p].schedule), m->group.world_size, m->ranks_per_host, every[z], whose,
          100 * e);
    return e;
}

static void compare(const struct measured *m, double worst[N_ZEROS][N_PAIRS], FILE *csv)
{
    for (int z = 0; z < N_ZEROS; z++) {
        double density, sum_density;
        count(m->group.world_size, every[z], &density, &sum_density);
        for (int p = 0; p < N_PAIRS; p++) {
            if (m->wire_bytes[z][p] == 0)
                continue;
            double model = modelled(m, z, p, density, sum_density);
            double e = error_of(m, z, p, simulated(m, z, p, density, sum_density), "the simulator");
            double size = e < 0 ? -e : e;
            if (model > 0)
                error_of(m, z, p, model, "the model that chooses");
            if (csv != NULL)
                fprintf(csv, "%s,%s,%d,%d,%zu,%zu,%llu,%.1f\n", sp_coll_name(pairs[p].coll),
                        sp_schedule_name(pairs[p].schedule), m->group.world_size, m->ranks_per_host, every[z],
                        elems_of(pairs[p].coll, m->group.world_size, z) * sizeof(float),
                        (unsigned long long)m->wire_bytes[z][p], (1 + e) * (double)m->wire_bytes[z][p]);
            if (size > (worst[z][p] < 0 ? -worst[z][p] : worst[z][p]))
                worst[z][p] = e;
        }
    }
}

struct group {
    int n_ranks, per_host;
    spccl_format format;
};

static void measure_group(const struct group *g, double worst[N_ZEROS][N_PAIRS], FILE *csv)
{
    struct rank_ctx ctx[RANKS_CAP];
    struct measured m = {.ranks_per_host = g->per_host, .format = g->format};
    spccl_config config = SPCCL_CONFIG_INIT;
    sp_hosts *hosts = NULL;
    int host_of[RANKS_CAP];
    config.transports = "inproc";
    test_ranks_per_host = g->per_host;
    run_ranks(g->n_ranks, &config, measure, &m, ctx);
    test_ranks_per_host = 0;
    for (int r = 0; r < g->n_ranks; r++)
        host_of[r] = g->per_host != 0 ? r / g->per_host : 0;
    CHECK_OK(sp_hosts_create(host_of, g->n_ranks, &hosts));
    m.group.hosts = m.group.n_hosts > 1 ? hosts : NULL; /* those of the communicator are gone */
    compare(&m, worst, csv);
    sp_free(hosts);
}

static void test_bytes(void)
{
    static const struct group groups[] = {{2, 0, SPCCL_FORMAT_AUTO}, {3, 0, SPCCL_FORMAT_AUTO},
                                          {4, 2, SPCCL_FORMAT_AUTO}, {5, 2, SPCCL_FORMAT_AUTO},
                                          {8, 2, SPCCL_FORMAT_AUTO}, {8, 0, SPCCL_FORMAT_AUTO},
                                          {16, 4, SPCCL_FORMAT_AUTO}};
    double worst[N_ZEROS][N_PAIRS] = {{0}};
    const char *path = getenv("BYTES_CSV");
    FILE *csv = path == NULL ? NULL : fopen(path, "w");
    CHECK(path == NULL || csv != NULL, "cannot write %s", path);
    if (csv != NULL)
        fprintf(csv,
                "collective,schedule,ranks,ranks_per_host,one_in,array_bytes,measured_bytes,model_bytes\n");
    for (size_t i = 0; i < sizeof groups / sizeof groups[0]; i++)
        measure_group(&groups[i], worst, csv);
    if (csv != NULL)
        CHECK(fclose(csv) == 0, "cannot write %s", path);
    printf("| collective, schedule |");
    for (int z = 0; z < N_ZEROS; z++)
        printf(" 1 of %zu not zero |", every[z]);
    for (int p = 0; p < N_PAIRS; p++) {
        printf("\n| %s, %s |", sp_coll_name(pairs[p].coll), sp_schedule_name(pairs[p].schedule));
        for (int z = 0; z < N_ZEROS; z++)
            printf(" %+.1f%% |", 100 * worst[z][p]);
    }
    printf("\n");
}

/* The ring with the paper's formats, whose thresholds make some steps dense. The groups are such that no density lies
 * at a threshold, where chance decides slice by slice. */
static void test_ring_thresholds(void)
{
    static const struct group groups[] = {{8, 0, SPCCL_FORMAT_PICI}, {6, 2, SPCCL_FORMAT_COO}};
    double worst[N_ZEROS][N_PAIRS] = {{0}};
    for (size_t i = 0; i < sizeof groups / sizeof groups[0]; i++)
        measure_group(&groups[i], worst, NULL);
}

/* Counted and extrapolated densities, and the thresholds of Hough et al., section IV. */
static void test_density_rule(void)
{
    sp_thresholds pici = sp_thresholds_of(SPCCL_FORMAT_PICI), coo = sp_thresholds_of(SPCCL_FORMAT_COO);
    sp_densities d = {0};
    CHECK(pici.intra == 0.6f && pici.inter == 0.5f && pici.gather == 0.1f, "pici");
    CHECK(coo.intra == 0.7f && coo.inter == 0.6f && coo.gather == 0.5f, "coo");
    CHECK(!sp_density_says_dense(&d, SP_HOP_IN_HOST, &pici), "dense before any count");
    sp_density_count(&d, 25, 100);
    CHECK(!sp_density_says_dense(&d, SP_HOP_IN_HOST, &pici), "75%% zeros are above 0.6");
    sp_density_count(&d, 44, 100);
    CHECK(sp_density_says_dense(&d, SP_HOP_IN_HOST, &pici) &&
              !sp_density_says_dense(&d, SP_HOP_BETWEEN_HOSTS, &pici) &&
              sp_density_says_dense(&d, SP_HOP_BETWEEN_HOSTS, &coo),
          "56%% zeros: at most 0.6, above 0.5");
    sp_density_extrapolate(&d); /* equation 7: 1 - (1 - 0.44) (1 - 0.25) = 0.58 */
    CHECK(d.last > 0.5799f && d.last < 0.5801f, "extrapolated to %g", (double)d.last);
    CHECK(!sp_density_says_dense(&d, SP_HOP_GATHER, &pici) && sp_density_says_dense(&d, SP_HOP_GATHER, &coo),
          "42%% zeros");
    sp_density_count(&d, 40, 100); /* a count replaces what was extrapolated */
    CHECK(d.last == 0.4f && d.first == 0.25f && sp_density_says_dense(&d, SP_HOP_IN_HOST, &pici), "%g %g",
          (double)d.last, (double)d.first);
    CHECK(!sp_density_says_dense(&d, SP_HOP_PLAIN, &pici), "no rule");
}

/* Sums of 16-bit floats travel with 4 bytes an element, contributions and results with 2. */
static void test_bytes_of_sums(void)
{
    spccl_simulate_options o = {.struct_bytes = sizeof o,
                                .collective = "all_reduce",
                                .schedule = "ring",
                                .format = "dense",
                                .n_elems = 4 << 20,
                                .dtype = SPCCL_BFLOAT16,
                                .n_ranks = 4,
                                .ranks_per_host = 4,
                                .density = 1};
    spccl_simulated out = {.struct_bytes = sizeof out};
    double want = (double)o.n_elems * (2 + 4 + 4 + 3 * 2); /* 3 hops of each shard there, 3 hops back */
    CHECK_OK(spccl_simulate(&o, &out));
    CHECK(out.wire_bytes > want && out.wire_bytes < 1.01 * want, "%g bytes, wanted %g", out.wire_bytes, want);
}

/* Messages of all plans of a call, inside hosts and between hosts. */
static void count_messages(const sp_hosts *hosts, int pair, size_t slice_elems, double out[2])
{
    out[0] = out[1] = 0;
    for (int r = 0; r < hosts->world_size; r++) {
        sp_plan_args a = {.coll = pairs[pair].coll,
                          .rank = r,
                          .world_size = hosts->world_size,
                          .n_elems = elems_of(pairs[pair].coll, hosts->world_size, 1),
                          .hosts = hosts};
        sp_plan *plan = NULL;
        CHECK_OK(sp_plan_create(pairs[pair].schedule, &a, &plan));
        for (int i = 0; i < plan->n_steps; i++) {
            const sp_step *s = &plan->steps[i];
            for (int j = 0; j < s->n_to; j++)
                out[hosts->host_of[plan->ranks[s->to + j]] != hosts->host_of[r]] +=
                    (double)sp_ceil_div(s->n_elems, slice_elems);
        }
        sp_plan_destroy(plan);
    }
}

/* Which messages stay inside a host: exact for hosts of equal size. For others the model takes means. In a
 * broadcast it takes means over all roots, which on hosts of other sizes says little of one root. */
static void test_links(void)
{
    static const int layouts[][17] = {
        {4, 1, 1, 1, 1}, {2, 2, 2}, {3, 4, 4, 4}, {4, 4, 4, 4, 4}, {3, 1, 2, 5}};
    for (size_t l = 0; l < sizeof layouts / sizeof layouts[0]; l++) {
        int host_of[17], n = 0;
        bool equal = true;
        sp_hosts *hosts = NULL;
        sp_cost_group g;
        for (int h = 0; h < layouts[l][0]; h++) {
            equal = equal && layouts[l][1 + h] == layouts[l][1];
            for (int i = 0; i < layouts[l][1 + h]; i++)
                host_of[n++] = h;
        }
        CHECK_OK(sp_hosts_create(host_of, n, &hosts));
        sp_cost_group_init(&g, n, hosts);
        for (int p = 0; p < N_PAIRS; p++) {
            double tolerance = equal && pairs[p].coll != SP_BROADCAST ? 1e-9 : 0.1, want[2];
            sp_cost_call c = {.coll = pairs[p].coll,
                              .n_elems = elems_of(pairs[p].coll, n, 1),
                              .elem_bytes = 4,
                              .slice_elems = 4096,
                              .format = SPCCL_FORMAT_AUTO,
                              .density = 1,
                              .sum_density = 1};
            sp_plan_cost cost;
            if ((pairs[p].coll == SP_BROADCAST && !equal) ||
                !sp_plan_cost_of(pairs[p].schedule, &g, &c, &cost))
                continue;
            count_messages(hosts, p, c.slice_elems, want);
            for (int kind = 0; kind < 2; kind++) {
                double got = kind == 0 ? cost.local_messages : cost.remote_messages;
                CHECK(got >= want[kind] * (1 - tolerance) - n && got <= want[kind] * (1 + tolerance) + n,
                      "%s %s, layout %zu: %g messages %s hosts, wanted %g", sp_coll_name(pairs[p].coll),
                      sp_schedule_name(pairs[p].schedule), l, got, kind == 0 ? "inside" : "between",
                      want[kind]);
            }
        }
        sp_free(hosts);
    }
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {
        {"bytes", test_bytes},
        {"ring_thresholds", test_ring_thresholds},
        {"density_rule", test_density_rule},
        {"bytes_of_sums", test_bytes_of_sums},
        {"links", test_links},
        {NULL, NULL},
    };
    return test_main(cases, argc, argv);
}
