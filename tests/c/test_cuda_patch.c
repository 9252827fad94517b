/* test_cuda_patch.c - all-reduces in place of very sparse slices, which write only what changes (patching).
 * Each worker has hundreds of slices, by turns sparse enough to be patched and not. Many elements become
 * zero: they cancel, or MAX and PROD combine them with an absent one. Ranks are threads; one of them comes
 * late, so that feeders run ahead. The host's result is the reference. --small: for sanitizers. */
#include "cuda_ranks.h"

#define N_RANKS 3
#define WORKERS 6 /* per CTA in an all-reduce, at most; fewer workers have more slices each */
#define SLICES_PER_WORKER 100
#define SLICES_PER_WORKER_SMALL 40 /* more than the 32 for which a worker has bits */

struct scene {
    struct call call;
    size_t slice_elems;
    uint64_t seed;
    bool graph;
};

/* Draw a number of nonzeros for a slice. A slice is cleared after it was sent if at most 1 element in 256 is
 * nonzero; a result is patched if at most 1 in 32 is (csrc/kernels/cuda/work_split.cuh). */
static size_t draw_count(size_t slice_elems, uint64_t *rng)
{
    size_t counts[] = {0,
                       0,
                       0,
                       1,
                       1,
                       2,
                       slice_elems / 256,
                       slice_elems / 256,
                       slice_elems / 256 + 1,
                       slice_elems / 64,
                       slice_elems / 32 + 1,
                       slice_elems / 3,
                       slice_elems};
    return counts[rand_below(rng, sizeof counts / sizeof *counts)];
}

/* Give some slices -0.0 (of integers: the smallest number): a few, which are sent, or half of the zeros. */
static void add_negative_zeros(uint8_t *slice, size_t n, size_t e, uint64_t *rng)
{
    static const uint8_t zero[8];
    uint32_t kind = rand_below(rng, 6), one_in = kind == 0 ? 2 : kind == 1 ? 500 : 0;
    for (size_t i = 0; one_in != 0 && i < n; i++)
        if (memcmp(slice + i * e, zero, e) == 0 && rand_below(rng, one_in) == 0)
            slice[(i + 1) * e - 1] = 0x80;
}

/* Most values are 1 and -1, so that they cancel; a few are random. All ranks use the same few indices of a
 * slice, so that their elements are combined. */
static void fill(uint8_t *x, const struct scene *s, uint64_t rng)
{
    size_t n = s->call.n, e = spccl_dtype_bytes(s->call.dtype);
    uint64_t ones[2];
    switch (s->call.dtype) {
    case SPCCL_FLOAT32:
        ones[0] = 0x3f800000, ones[1] = 0xbf800000;
        break;
    case SPCCL_BFLOAT16:
        ones[0] = 0x3f80, ones[1] = 0xbf80;
        break;
    default:
        ones[0] = 1, ones[1] = UINT64_MAX;
    }
    memset(x, 0, n * e);
    for (size_t from = 0; from < n; from += s->slice_elems) {
        size_t here = n - from < s->slice_elems ? n - from : s->slice_elems;
        size_t count = draw_count(s->slice_elems, &rng);
        for (size_t k = 0; k < count; k++) {
            size_t at = count == s->slice_elems ? k : rand_below(&rng, (uint32_t)(2 * count + 3)) * 31;
            at = from + at % here;
            if (rand_below(&rng, 10) == 0)
                put_value(x, at, s->call.dtype, &rng, false);
            else
                memcpy(x + at * e, &ones[rand_below(&rng, 2)], e);
        }
        add_negative_zeros(x + from * e, here, e, &rng);
    }
}

static cudaGraphExec_t capture(const struct rank_ctx *ctx, const struct scene *s, uint8_t *at)
{
    struct rank_buffer *m = &rank_buffers[ctx->rank];
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;
    spccl_status st;
    CUDA_OK(cudaStreamBeginCapture(m->on, cudaStreamCaptureModeThreadLocal));
    st = gpu_call(ctx->comm, &s->call, at, at, m->on);
    CUDA_OK(cudaStreamEndCapture(m->on, &graph));
    CHECK(st == SPCCL_OK, "rank %d: capture: %s", ctx->rank, spccl_last_error());
    if (st == SPCCL_OK)
        CUDA_OK(cudaGraphInstantiate(&exec, graph, 0));
    CUDA_OK(cudaGraphDestroy(graph));
    return exec;
}

/* All-reduce new inputs in place at out_d + lead. exec: a graph of the call, or NULL. False: the test must
 * end. */
static bool round_of(const struct rank_ctx *ctx, const struct scene *s, int round, size_t lead,
                     cudaGraphExec_t exec)
{
    struct rank_buffer *m = &rank_buffers[ctx->rank];
    size_t e = spccl_dtype_bytes(s->call.dtype), bytes = block_bytes(&s->call),
           all = lead + bytes + GUARD_BYTES, differs;
    spccl_status st;
    fill(m->plain, s, s->seed + (uint64_t)round * 101 + (uint64_t)ctx->rank * 7919);
    memset(m->out, POISON, all);
    memcpy(m->out + lead, m->plain, bytes);
    memcpy(m->want, m->out, all);
    st = host_call(ctx->comm, &s->call, m->plain, m->want + lead);
    CHECK(st == SPCCL_OK, "the host: %s", spccl_last_error());
    if (st != SPCCL_OK)
        return false;
    CUDA_OK(cudaMemcpyAsync(m->out_d, m->out, all, cudaMemcpyHostToDevice, m->on));
    sync_stream(m->on);
    if (ctx->rank == round % ctx->n_ranks)
        sleep_ms(3); /* meanwhile the feeders of the other ranks run ahead */
    if (exec != NULL)
        CUDA_OK(cudaGraphLaunch(exec, m->on));
    else
        st = gpu_call(ctx->comm, &s->call, m->out_d + lead, m->out_d + lead, m->on);
    if (st == SPCCL_OK)
        st = spccl_cuda_wait(ctx->comm, m->on, wait_ms());
    CHECK(st == SPCCL_OK, "rank %d: %s", ctx->rank, spccl_last_error());
    if (st != SPCCL_OK)
        return false;
    CUDA_OK(cudaMemcpyAsync(m->got, m->out_d, all, cudaMemcpyDeviceToHost, m->on));
    sync_stream(m->on);
    differs = first_difference(m->want, m->got, all);
    CHECK(differs == all,
          "rank %d of %d, round %d%s, %zu %s, %s: byte %td (slice %td) is %#x, wanted %#x, was %#x",
          ctx->rank, ctx->n_ranks, round, exec != NULL ? " (graph)" : "", s->call.n,
          spccl_dtype_name(s->call.dtype), op_names[s->call.op], (ptrdiff_t)differs - (ptrdiff_t)lead,
          ((ptrdiff_t)differs - (ptrdiff_t)lead) / (ptrdiff_t)(s->slice_elems * e), m->got[differs],
          m->want[differs], m->out[differs]);
    return differs == all;
}

static void rank_fn(struct rank_ctx *ctx)
{
    const struct scene *s = ctx->arg;
    size_t e = spccl_dtype_bytes(s->call.dtype);
    bool ok = attach_gpu(ctx->comm, ctx->rank, 1);
    for (int aligned = 1; ok && aligned >= 0; aligned--) {
        size_t lead = GUARD_BYTES + (aligned ? 0 : e);
        cudaGraphExec_t exec = NULL;
        ok = all_here(ctx->comm); /* no peer may still be attaching during a capture */
        if (ok && s->graph)
            ok = (exec = capture(ctx, s, rank_buffers[ctx->rank].out_d + lead)) != NULL;
        for (int round = 0; ok && round < (is_small || is_slow ? 1 : 3 * n_rounds); round++)
            ok = round_of(ctx, s, round, lead, exec);
        if (exec != NULL && ok && all_here(ctx->comm))
            CUDA_OK(cudaGraphExecDestroy(exec));
        if (is_small)
            break;
    }
}

static void run_scene(int n_ranks, spccl_dtype dtype, spccl_redop op, bool graph)
{
    struct rank_ctx ctx[RANKS_CAP];
    struct scene s = {.call = {.coll = ALL_REDUCE, .dtype = dtype, .op = op}, .graph = graph};
    spccl_config config = SPCCL_CONFIG_INIT;
    size_t e = spccl_dtype_bytes(dtype), per_worker = is_small ? SLICES_PER_WORKER_SMALL : SLICES_PER_WORKER;
    s.slice_elems = dtype == SPCCL_BFLOAT16 ? 2048 : 8192 / e;
    s.call.n = s.slice_elems * per_worker * WORKERS * (size_t)n_ranks - 3;
    s.seed = test_rand();
    config.timeout_ms = is_small || is_slow ? 60000 : 10000;
    run_ranks(n_ranks, &config, rank_fn, &s, ctx);
    for (int r = 0; r < n_ranks; r++)
        CHECK(ctx[r].created == SPCCL_OK, "rank %d: %s", r, ctx[r].error);
}

static void test_launches(void)
{
    static const spccl_dtype dtypes[] = {SPCCL_FLOAT32, SPCCL_BFLOAT16, SPCCL_INT64};
    static const spccl_redop ops[] = {SPCCL_MAX, SPCCL_SUM, SPCCL_PROD};
    for (int i = 0; i < (is_small ? 1 : 3); i++)
        for (int k = 0; k < (is_small ? 2 : 3); k++)
            run_scene(is_small || (i + k) % 3 == 0 ? 2 : N_RANKS, dtypes[i], ops[k], false);
    if (!is_small) /* feeders serve two workers */
        run_scene(2, SPCCL_BFLOAT16, SPCCL_SUM, false);
}

static void test_graphs(void)
{
    if (!is_small)
        run_scene(N_RANKS, SPCCL_FLOAT32, SPCCL_MAX, true);
    run_scene(2, SPCCL_BFLOAT16, SPCCL_SUM, true);
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {
        {"launches", test_launches}, {"graphs", test_graphs}, {NULL, NULL}};
    cuda_test_start(&argc, argv);
    setenv("SPCCL_SCHEDULE", "direct", 1); /* in one hop there are no results, so nothing is patched */
    make_rank_buffers(is_small ? 2 : N_RANKS,
                      (size_t)8192 * (is_small ? SLICES_PER_WORKER_SMALL : SLICES_PER_WORKER) * WORKERS *
                              (is_small ? 2 : N_RANKS) +
                          4 * GUARD_BYTES);
    return test_main(cases, argc, argv);
}
