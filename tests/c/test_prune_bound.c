/* test_prune_bound.c - the bound on what spccl_prune sends of equal elements. */
#include "prune_arrays.h"

/* 1 / 3 is no float32: a threshold in float32 must not lie above equal float64 elements. */
static void test_ties_are_cut(void)
{
    for (int round = 0; round < 4; round++) {
        spccl_dtype dtype = round % 2 != 0 ? SPCCL_FLOAT64 : SPCCL_FLOAT32;
        spccl_prune_options o = SPCCL_PRUNE_OPTIONS_INIT;
        struct run run = start(dtype, MAX_N, round >= 2, false);
        for (int step = 0; step < 10; step++) {
            size_t n;
            for (size_t i = 0; i < MAX_N; i++)
                put(dtype, got.grad, i, 1.0 / 3);
            CHECK_OK(spccl_prune(run.plan, got.grad, &o));
            n = count_nonzero(dtype, got.grad, MAX_N);
            CHECK(n > 0 && (double)n <= 5 * o.density * MAX_N, "%zu of equal elements sent", n);
        }
        spccl_prune_plan_destroy(run.plan);
    }
}

/* Elements that are not finite do not count towards the bound. */
static void test_bound_without_nonfinite(void)
{
    spccl_prune_options o = SPCCL_PRUNE_OPTIONS_INIT;
    struct run run = start(SPCCL_FLOAT32, MAX_N, true, false);
    size_t n = 0;
    for (size_t i = 0; i < MAX_N; i++)
        put(SPCCL_FLOAT32, got.grad, i, i < 65536 ? NAN : 1);
    CHECK_OK(spccl_prune(run.plan, got.grad, &o));
    for (size_t i = 65536; i < MAX_N; i++)
        n += get(SPCCL_FLOAT32, got.grad, i) != 0;
    CHECK(n > 2700 && n < 2900, "%zu finite elements sent, wanted 4 times 1%%", n);
    spccl_prune_plan_destroy(run.plan);
}

#define N ((size_t)4 << 20) /* 64 blocks */

/* The wanted number is less than one element of each block. */
static void test_ties_at_low_density(void)
{
    spccl_prune_options o = SPCCL_PRUNE_OPTIONS_INIT;
    spccl_prune_state state = {0};
    spccl_prune_segment s = {.n_elems = N, .state = &state};
    spccl_prune_plan *plan = NULL;
    float *grad = malloc(N * sizeof *grad);
    o.density = 2e-6; /* about 8 elements */
    for (size_t i = 0; i < N; i++)
        grad[i] = 1;
    CHECK_OK(spccl_prune_plan_create(&s, 1, N, SPCCL_FLOAT32, -1, &plan));
    CHECK_OK(spccl_prune(plan, grad, &o));
    CHECK(state.n_sent > 0 && (double)state.n_sent <= ceil(5 * o.density * (double)N),
          "%llu of equal elements sent", (unsigned long long)state.n_sent);
    spccl_prune_plan_destroy(plan);
    free(grad);
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {{"ties_are_cut", test_ties_are_cut},
                                             {"bound_without_nonfinite", test_bound_without_nonfinite},
                                             {"ties_at_low_density", test_ties_at_low_density},
                                             {NULL, NULL}};
    return test_main(cases, argc, argv);
}
