/* test_sum_order.c - the schedules that do not add in rank order, which run only when asked for. A plain model in each
 * test says in which order they add; every output must have the bits of that model, on all ranks. */
#include "cases.h"

#include "core/plan/sched.h"

/* Elements of a large array, and of smaller ones. TSan makes a collective ten times as slow or more. */
#ifdef __SANITIZE_THREAD__
#define LARGE_N ((size_t)70000)
#define MIDDLE_N ((size_t)5000)
#define RANDOM_N ((size_t)5000)
#define PATTERN_N ((size_t)3000)
#else
#define LARGE_N ((size_t)share_of(200000, 70000))
#define MIDDLE_N ((size_t)share_of(50000, 5000))
#define RANDOM_N ((size_t)share_of(20000, 5000))
#define PATTERN_N ((size_t)share_of(9000, 3000))
#endif

/* The rank that owns element i of the input. */
static int owner_of(const struct one_case *c, int n_ranks, size_t i)
{
    size_t off, len;
    if (c->coll == REDUCE_SCATTER)
        return (int)(i / c->n);
    for (int r = 0; r < n_ranks; r++) {
        sp_part_range(c->n, n_ranks, r, &off, &len);
        if (i < off + len)
            return r;
    }
    return 0;
}

/* A sum starts at the rank after the owner, goes round the ring, and ends at the owner. Ranks of a host are
 * neighbours, and hosts of neighbouring ranks keep rank order. */
static void ring_order(const struct one_case *c, int n_ranks, size_t i, struct sum_order *o)
{
    int owner = owner_of(c, n_ranks, i);
    for (int k = 0; k < n_ranks; k++)
        o->rank[k] = (owner + 1 + k) % n_ranks;
}

/* The contributions of the owner's host, then the sums of the other hosts. Host h has the ranks from
 * h * test_ranks_per_host on. */
static void hierarchical_order(const struct one_case *c, int n_ranks, size_t i, struct sum_order *o)
{
    int per_host = test_ranks_per_host != 0 ? test_ranks_per_host : n_ranks;
    int n_hosts = (n_ranks + per_host - 1) / per_host, own = owner_of(c, n_ranks, i) / per_host, at = 0;
    o->n_groups = 0;
    for (int k = 0; k < n_hosts; k++) {
        int host = k == 0 ? own : k <= own ? k - 1 : k;
        for (int r = host * per_host; r < n_ranks && r < (host + 1) * per_host; r++)
            o->rank[at++] = r;
        o->end[o->n_groups++] = at;
    }
}

/* One schedule, and the model of its sums. */
struct schedule {
    const char *name;
    void (*order)(const struct one_case *c, int n_ranks, size_t i, struct sum_order *o);
};

static const struct schedule ring = {"ring", ring_order};
static const struct schedule hierarchical = {"hierarchical", hierarchical_order};

static void use(const struct schedule *s)
{
    setenv("SPCCL_SCHEDULE", s->name, 1);
    test_sum_order = s->order;
}

/* The inputs make the order of additions visible: the model of one schedule does not fit another. */
static void test_model_sees_order(void)
{
    struct one_case c = {.coll = ALL_REDUCE, .dtype = SPCCL_FLOAT32, .n = 5000, .density_pct = 90, .seed = 7};
    int n_differ = 0;
    uint64_t bits;
    for (size_t i = 0; i < c.n; i++) {
        test_sum_order = NULL;
        bits = reduced(&c, 5, i);
        test_sum_order = ring_order;
        n_differ += bits != reduced(&c, 5, i);
    }
    CHECK(n_differ > 500, "rank order and ring order differ in %d of %zu sums", n_differ, c.n);
}

static void dtypes_and_ops(const struct schedule *s)
{
    use(s);
    for (int n = 2; n <= 4; n++)
        every_dtype_and_op(n);
}

static void ranks_1_to_17(const struct schedule *s)
{
    use(s);
    for (int n = 1; n <= 17; n++)
        random_plan(n, n <= 4 ? 60 : 12, RANDOM_N, "inproc");
}

static void patterns(const struct schedule *s)
{
    static const spccl_dtype dtypes[] = {SPCCL_FLOAT32, SPCCL_BFLOAT16, SPCCL_FLOAT64, SPCCL_FLOAT16,
                                         SPCCL_INT32};
    struct one_case cases[2 * N_PATTERNS * 5];
    use(s);
    for (int n_ranks = 3; n_ranks <= 6; n_ranks += 3) {
        int n = 0;
        for (int coll = REDUCE_SCATTER; coll <= ALL_REDUCE; coll++)
            for (int pattern = 0; pattern < N_PATTERNS; pattern++)
                for (int t = 0; t < 5; t++)
                    cases[n++] = (struct one_case){.coll = coll,
                                                   .pattern = pattern,
                                                   .dtype = dtypes[t],
                                                   .op = (spccl_redop)(test_rand() % 5),
                                                   .n = PATTERN_N + (size_t)t,
                                                   .density_pct = 1 + (int)(test_rand() % 100),
                                                   .in_place = test_rand() % 2,
                                                   .wide = coll == REDUCE_SCATTER && pattern % 2 == 1,
                                                   .async = test_rand() % 2,
                                                   .seed = test_rand()};
        run_plan(cases, n, n_ranks, "inproc");
    }
}

/* Many slices and blocks of slices, and every transport. */
static void large(const struct schedule *s)
{
    static const int densities[] = {0, 1, 10, 50, 100};
    struct one_case cases[16];
    use(s);
    setenv("SPCCL_DEBUG_SLICE_BYTES", "32768", 1);
    setenv("SPCCL_TCP_ADDR", "127.0.0.1", 1);
    for (int n_ranks = 2; n_ranks <= 4; n_ranks++) {
        int n = 0;
        for (int coll = 0; coll < BROADCAST; coll++)
            for (int d = 0; d < 5; d++)
                cases[n++] = (struct one_case){.coll = coll,
                                               .dtype = d % 2 ? SPCCL_FLOAT32 : SPCCL_BFLOAT16,
                                               .n = LARGE_N + (size_t)d * 77,
                                               .density_pct = densities[d],
                                               .in_place = d % 2,
                                               .wide = coll == REDUCE_SCATTER && d % 2 == 0,
                                               .async = d % 3 == 0,
                                               .seed = test_rand()};
        run_plan(cases, n, n_ranks, n_ranks == 2 ? "shm" : n_ranks == 3 ? "tcp" : "inproc");
    }
    unsetenv("SPCCL_DEBUG_SLICE_BYTES");
    unsetenv("SPCCL_TCP_ADDR");
}

static void forced(const struct schedule *s)
{
    static const char *const formats[] = {"tile", "pici", "coo", "dense"};
    use(s);
    for (int i = 0; i < 4; i++) {
        setenv("SPCCL_FORMAT", formats[i], 1);
        random_plan(4, 24, MIDDLE_N, "inproc");
    }
    unsetenv("SPCCL_FORMAT");
}

static void hosts(const struct schedule *s)
{
    use(s);
    for (int n = 2; n <= 16; n++) {
        test_ranks_per_host = 1 + n / 3;
        random_plan(n, 12, n % 4 == 0 ? MIDDLE_N : 5000, "inproc");
    }
    test_ranks_per_host = 0;
}

static void test_ring(void)
{
    dtypes_and_ops(&ring);
    ranks_1_to_17(&ring);
    patterns(&ring);
    forced(&ring);
    hosts(&ring);
}

static void test_hierarchical(void)
{
    hosts(&hierarchical);
    test_ranks_per_host = 2;
    dtypes_and_ops(&hierarchical);
    patterns(&hierarchical);
    forced(&hierarchical);
    test_ranks_per_host = 0;
}

static void test_hierarchical_large(void)
{
    test_ranks_per_host = 2;
    large(&hierarchical);
    test_ranks_per_host = 0;
}

static void test_ring_large(void)
{
    large(&ring);
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {
        {"model_sees_order", test_model_sees_order},
        {"ring", test_ring},
        {"ring_large", test_ring_large},
        {"hierarchical", test_hierarchical},
        {"hierarchical_large", test_hierarchical_large},
        {NULL, NULL},
    };
    return test_main(cases, argc, argv);
}
