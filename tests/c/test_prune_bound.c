/* test_prune_bound.c - the bound on what spccl_prune sends, where the share of a block is below one element. */
#include "spccl.h"
#include "test.h"

#include <math.h>

#define N ((size_t)4 << 20) /* 64 blocks */

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
    static const struct test_case cases[] = {{"ties_at_low_density", test_ties_at_low_density}, {NULL, NULL}};
    return test_main(cases, argc, argv);
}
