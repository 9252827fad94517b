/* test_cuda_collectives.c - collectives on GPU memory must give the same bits as the host's, on every rank.
 * Covers all collectives, dtypes and operations, sizes from 0 to 30 MiB, and all patterns of zeros, also
 * different ones on different ranks. Formats are forced, CTAs are few, calls are in place, arrays are
 * unaligned. Only the output may be written. Ranks are threads; several may share a GPU. --small: for
 * sanitizers. --long: 8 ranks; SPCCL_TEST_ROUNDS=n: more cases. */
#include "cuda_plans.h"

/* ---- cases ---- */

static void test_ranks(void)
{
    for (int n = 1; n <= (is_small ? 2 : is_long || is_slow ? 8 : 4); n += is_slow && n == 5 ? 3 : 1) {
        struct group g = {
            .n_ranks = n, .format = SPCCL_FORMAT_AUTO, .every_op = !is_small, .n_random = is_small ? 10 : 40};
        run_group(&g);
    }
}

static void test_formats(void)
{
    for (int format = SPCCL_FORMAT_TILE; format < SPCCL_N_FORMATS; format++) {
        struct group g = {.n_ranks = is_small ? 2 : 2 + format % 2, .format = (spccl_format)format};
        g.n_random = is_small ? 4 : 40;
        run_group(&g);
        g.n_ranks = 5; /* so each frame has less shared memory */
        g.n_random = 15;
        if (!is_small)
            run_group(&g);
    }
}

static void test_few_blocks(void)
{
    static const struct group groups[] = {{2, SPCCL_FORMAT_AUTO, 1, false, 30, 0, NULL},
                                          {3, SPCCL_FORMAT_AUTO, 3, false, 30, 0, NULL},
                                          {4, SPCCL_FORMAT_AUTO, 1, false, 20, 0, NULL},
                                          {2, SPCCL_FORMAT_PICI, 3, false, 20, 0, NULL}};
    for (size_t i = 0; i < sizeof groups / sizeof *groups && !is_small; i++)
        run_group(&groups[i]);
}

/* One hop, also with many slices per worker; then as the size decides. */
static void test_schedules(void)
{
    static const struct group groups[] = {{2, SPCCL_FORMAT_AUTO, 0, false, 20, 0, "oneshot"},
                                          {2, SPCCL_FORMAT_AUTO, 1, false, 20, 0, "oneshot"},
                                          {4, SPCCL_FORMAT_AUTO, 2, false, 20, 0, "oneshot"},
                                          {3, SPCCL_FORMAT_AUTO, 0, false, 20, 0, "auto"},
                                          {2, SPCCL_FORMAT_AUTO, 1, false, 20, 0, "auto"}};
    for (size_t i = 0; i < (is_small ? 1 : sizeof groups / sizeof *groups); i++) {
        struct group g = groups[i];
        g.n_random = is_small ? 5 : g.n_random;
        run_group(&g);
    }
}

/* Plans from files: only here owners are not the ranks in their order. */
static void test_plans(void)
{
    static const struct owned plans[] = {{.n_ranks = 2, .n_chunks = 5}, /* --small has buffers for 2 ranks */
                                         {.n_ranks = 3, .n_chunks = 7},
                                         {.n_ranks = 2, .n_chunks = 5, .one_hop = true},
                                         {.n_ranks = 4, .n_chunks = 1},
                                         {.n_ranks = 5, .n_chunks = 40}};
    for (size_t i = 0; i < (is_small ? 1 : sizeof plans / sizeof *plans); i++)
        run_owned(1, plans[i], (struct group){.format = SPCCL_FORMAT_AUTO, .n_random = is_small ? 6 : 25});
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {{"ranks", test_ranks},           {"formats", test_formats},
                                             {"few_blocks", test_few_blocks}, {"schedules", test_schedules},
                                             {"plans", test_plans},           {NULL, NULL}};
    cuda_test_start(&argc, argv);
    make_rank_buffers(is_small ? 2 : is_long || is_slow ? 8 : 5, total_bytes() + 4 * GUARD_BYTES);
    return test_main(cases, argc, argv);
}
