/* test_cuda_pruned_sum.c - spccl_cuda_prune_all_reduce gives the bits of spccl_cuda_prune and spccl_cuda_all_reduce:
 * random segments, values and numbers of ranks, calls without a wait in between, captured graphs. Ranks are threads.
 * --small: for sanitizers. */
#include "cuda_pruned.h"

#define RANKS_MAX 9

/* n_sizes: fewer for many ranks, as each thread of a CTA needs memory on a GPU in software. */
static struct scene random_scene(uint64_t seed, uint64_t n_sizes)
{
    static const size_t sizes[] = {1, 5, 4095, 4096, 4097, 12345, 30000};
    uint64_t rng = seed;
    struct scene s = {.seed = seed, .options = SPCCL_PRUNE_OPTIONS_INIT, .n_steps = 3};
    s.n = next_rand(&rng) % 6 == 0 && n_sizes == 7 ? MANY : sizes[next_rand(&rng) % n_sizes];
    s.n_segments = s.n < 40 ? 1 : 1 + next_rand(&rng) % (n_sizes < 7 ? 2 : is_small || is_slow ? 3 : 12);
    s.odd = next_rand(&rng) % 2 == 0;
    s.staged = next_rand(&rng) % 3 == 0;
    s.no_residual = next_rand(&rng) % 8 == 0;
    s.clips = next_rand(&rng) % 2 == 0;
    s.op = next_rand(&rng) % 2 == 0 ? SPCCL_SUM : SPCCL_AVG;
    s.options.keep_thresholds = next_rand(&rng) % 2 == 0;
    s.options.density = next_rand(&rng) % 2 == 0 ? 0.01 : 0.2;
    s.options.momentum = next_rand(&rng) % 2 == 0 ? 0.9 : 0;
    s.options.leak = next_rand(&rng) % 2 == 0 ? 0.99 : 1;
    s.options.skip_zeros = next_rand(&rng) % 2 == 0;
    s.options.seed = (uint32_t)seed;
    s.options.residual_bf16 = next_rand(&rng) % 3 == 0;
    return s;
}

static void random_scenes(struct rank_ctx *c)
{
    uint64_t seed = *(const uint64_t *)c->arg;
    int n_scenes = is_small ? 3 : is_slow ? 6 : 40 * n_rounds;
    if (!attach_gpu(c->comm, c->rank, c->n_ranks > 3 ? 1 : 0)) /* few threads for GPUs in software */
        return;
    for (int i = 0; i < n_scenes; i++) {
        struct scene s = random_scene(seed + (uint64_t)i, c->n_ranks > 3 ? 5 : 7);
        one_scene(c, &s);
    }
}

static void test_same_bits(void)
{
    static const int n_ranks[] = {2, 3, 5, 9};
    for (int i = 0; i < (is_small ? 2 : 4); i++) {
        uint64_t seed = test_rand() % 1000000;
        run_scene(n_ranks[i], random_scenes, &seed);
    }
}

/* Calls that follow each other without a wait: a rank may be ahead of its peers. Each side prunes what the call before
 * has left in its gradient. Collectives of other kinds lie in between. */
static void in_a_row(struct rank_ctx *c)
{
    const struct rank_buffer *m = &rank_buffers[c->rank];
    spccl_cuda_stats stats;
    struct side sides[2];
    struct scene s = {.seed = 77, .n = 20000, .n_segments = 3, .op = SPCCL_SUM};
    const int n_steps = is_small ? 6 : 20; /* rank 0 waits for all of them at once */
    if (!attach_gpu(c->comm, c->rank, 0))
        return;
    s.options = (spccl_prune_options)SPCCL_PRUNE_OPTIONS_INIT;
    s.options.density = 0.1;
    begin(c, &s, sides);
    load_gradient(c, &s, 0, sides);
    for (int k = 0; k < 2; k++)
        for (int step = 0; step < n_steps; step++) {
            CHECK_OK(k == 0 ? call_lists(c, &s, &sides[k]) : call_both(c, &s, &sides[k]));
            if (step % 3 == c->rank % 3 && c->rank != 0)
                sync_stream(m->on);
            if (step % 5 == 0)
                CHECK_OK(
                    spccl_cuda_broadcast(c->comm, (uint8_t *)sides[k].grad, 700, SPCCL_FLOAT32, 1, m->on));
        }
    compare_sides(c, &s, sides);
    stats = stats_now(c);
    CHECK(stats.n_collectives == 2 * (uint64_t)(n_steps + (n_steps + 4) / 5), "%llu collectives",
          (unsigned long long)stats.n_collectives);
    CHECK_OK(call_lists(c, &s, &sides[0]));
    check_route(c, BY_LISTS, &stats, true);
    end(c, sides);
}

static void test_in_a_row(void)
{
    run_scene(4, in_a_row, NULL);
}

/* A replayed graph does what calls do. Its first call would have to allocate, so there was one before. */
static void captured(struct rank_ctx *c)
{
    const struct rank_buffer *m = &rank_buffers[c->rank];
    struct side sides[2];
    struct scene s = {.seed = 9, .n = 30000, .n_segments = 3, .op = SPCCL_AVG};
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;
    if (!attach_gpu(c->comm, c->rank, 0))
        return;
    s.options = (spccl_prune_options)SPCCL_PRUNE_OPTIONS_INIT;
    s.options.density = 0.05;
    begin(c, &s, sides);
    for (int before = 0; before < 2; before++) { /* a capture without and with windows for lists */
        CUDA_OK(cudaStreamBeginCapture(m->on, cudaStreamCaptureModeThreadLocal));
        CHECK_OK(call_lists(c, &s, &sides[0]));
        CUDA_OK(cudaStreamEndCapture(m->on, &graph));
        CUDA_OK(cudaGraphInstantiate(&exec, graph, 0));
        for (int step = 0; step < (is_small ? 3 : 10); step++) {
            spccl_cuda_stats stats = stats_now(c);
            load_gradient(c, &s, step, sides);
            CUDA_OK(cudaGraphLaunch(exec, m->on));
            check_route(c, before == 0 ? BY_FRAMES : BY_LISTS, &stats, false);
            CHECK_OK(call_both(c, &s, &sides[1]));
            compare_sides(c, &s, sides);
        }
        (void)all_here(c->comm);
        CUDA_OK(cudaGraphExecDestroy(exec));
        CUDA_OK(cudaGraphDestroy(graph));
        load_gradient(c, &s, 100, sides);
        CHECK_OK(call_lists(c, &s, &sides[0]));
        CHECK_OK(call_both(c, &s, &sides[1]));
        compare_sides(c, &s, sides);
    }
    end(c, sides);
}

static void test_graph(void)
{
    run_scene(2, captured, NULL);
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {
        {"same_bits", test_same_bits}, {"in_a_row", test_in_a_row}, {"graph", test_graph}, {NULL, NULL}};
    cuda_test_start(&argc, argv);
    setenv("SPCCL_PRUNE_LIST_BYTES", LIST_BYTES, 1);
    make_rank_buffers(RANKS_MAX, CAP);
    return test_main(cases, argc, argv);
}
