/* test_collectives.c - compares every collective, dtype and op with plain scalar code. 1 to 17 ranks are
 * threads, over inproc, shm, tcp and ncclnet. The cases have edge sizes, all densities, in place or not, forced
 * formats and schedules, and several collectives in flight. */
#include "cases.h"

static void test_every_dtype_and_op(void)
{
    every_dtype_and_op(3);
}

static void test_ranks_1_to_17(void)
{
    for (int n = 1; n <= 17; n++)
        random_plan(n, n <= 4 ? 96 : 24, 20000, "inproc");
}

/* Elements of large arrays: more than the queues hold. TSan makes a collective ten times as slow or more. */
#ifdef __SANITIZE_THREAD__
#define ALL_LARGE_N 300000u
#else
#define ALL_LARGE_N 1500000u
#endif
#define LARGE_N ((size_t)share_of(ALL_LARGE_N, 300000))

/* Ranks on several hosts: results are relayed. */
static void test_hosts(void)
{
    for (int n = 2; n <= 17; n++) {
        test_ranks_per_host = 1 + n / 3;
        setenv("SPCCL_TCP_ADDR", "127.0.0.1", 1); /* hosts that differ by name alone may have no other */
        random_plan(n, 12, n % 4 == 0 ? LARGE_N / 5 : 5000, n == 8 ? "tcp" : "inproc");
    }
    unsetenv("SPCCL_TCP_ADDR");
    test_ranks_per_host = 0;
}

static void test_shm(void)
{
    for (int n = 2; n <= 5; n++)
        random_plan(n, 96, 20000, "shm");
}

static void test_tcp(void)
{
    for (int n = 2; n <= 5; n++)
        random_plan(n, 48, 20000, "tcp");
}

/* Over the NCCL net plugin of net_plugin/: on CPUs of one host, because it is named. */
static void test_ncclnet(void)
{
    setenv("SPCCL_NET_PLUGIN", NET_PLUGIN_FOLDER "/libnccl-net-test_all.so", 1);
    for (int n = 2; n <= 4; n += 2)
        random_plan(n, 48, 20000, "ncclnet");
    unsetenv("SPCCL_NET_PLUGIN");
}

/* Arrays larger than the queues: flow control, many slices, every format. */
static void test_large(void)
{
    static const int densities[] = {0, 1, 10, 50, 100};
    struct one_case cases[32];
    for (int n_ranks = 2; n_ranks <= 4; n_ranks += 2) {
        int n = 0;
        for (int coll = 0; coll < N_COLLS; coll++)
            for (int d = 0; d < 5; d++)
                cases[n++] = (struct one_case){.coll = coll,
                                               .root = 1,
                                               .dtype = d % 2 ? SPCCL_FLOAT32 : SPCCL_BFLOAT16,
                                               .n = LARGE_N + (size_t)d * 77,
                                               .density_pct = densities[d],
                                               .in_place = d % 2,
                                               .async = d % 3 == 0,
                                               .seed = test_rand()};
        run_plan(cases, n, n_ranks, "inproc");
        run_plan(cases, n, n_ranks, "shm");
        if (n_ranks == 2)
            run_plan(cases, n, n_ranks, "tcp");
    }
}

/* A forced format, schedule or slice size must not change a bit: all runs are compared with scalar code. */
static void test_forced(void)
{
    static const char *const formats[] = {"tile", "pici", "coo", "dense"};
    static const char *const schedules[] = {"direct", "oneshot", "relayed"};
    for (int i = 0; i < 4; i++) {
        setenv("SPCCL_FORMAT", formats[i], 1);
        random_plan(3, 48, 70000, "inproc");
    }
    unsetenv("SPCCL_FORMAT");
    for (int i = 0; i < 3; i++) {
        setenv("SPCCL_SCHEDULE", schedules[i], 1);
        random_plan(4, 48, 70000, "inproc");
    }
    unsetenv("SPCCL_SCHEDULE");
    setenv("SPCCL_DEBUG_SLICE_BYTES", "32768", 1);
    random_plan(3, 48, 70000, "inproc");
    unsetenv("SPCCL_DEBUG_SLICE_BYTES");
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {
        {"every_dtype_and_op", test_every_dtype_and_op},
        {"ranks_1_to_17", test_ranks_1_to_17},
        {"forced", test_forced},
        {"large", test_large},
        {"hosts", test_hosts},
        {"shm", test_shm},
        {"tcp", test_tcp},
        {"ncclnet", test_ncclnet},
        {NULL, NULL},
    };
    return test_main(cases, argc, argv);
}
