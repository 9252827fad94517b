/* test_cuda_graph.c - many collectives at once on the GPU: on one stream, on two streams of a communicator,
 * on two communicators; and captured into a CUDA graph, which is replayed with other inputs and with calls
 * outside of it in between. All must give the same bits as the host's collectives. Ranks are threads.
 * --small: for sanitizers. */
#include "cuda_ranks.h"

/* Each call has a region of its own in the buffers. */
#define REGION_BYTES ((size_t)512 << 10)
#define N_REGIONS 24

/* The calls that are in flight at once. All ranks have the same ones, with other inputs. */
struct flight {
    int n_calls;
    struct call calls[N_REGIONS];
};

static void draw_flight(struct flight *f, int n_calls, int n_ranks, uint64_t seed)
{
    uint64_t rng = seed;
    f->n_calls = n_calls;
    for (int i = 0; i < n_calls; i++) {
        struct call *c = &f->calls[i];
        *c = (struct call){.coll = (enum coll)rand_below(&rng, N_COLLS),
                           .dtype = (spccl_dtype)(1 + rand_below(&rng, N_DTYPES)),
                           .root = (int)rand_below(&rng, (uint32_t)n_ranks)};
        if (call_reduces(c) && c->dtype == SPCCL_FLOAT8)
            c->dtype = SPCCL_FLOAT16;
        if (call_reduces(c))
            c->op = (spccl_redop)rand_below(&rng, N_OPS);
        c->n = 1 +
               rand_below(&rng, (uint32_t)(REGION_BYTES / 2 / spccl_dtype_bytes(c->dtype) / (size_t)n_ranks));
        if (rand_below(&rng, 4) == 0)
            c->n = c->n % 300 + 1;
    }
}

/* Fill n_calls regions: `in` with inputs, `want` with the expected outputs; poison lies around both. */
static bool prepare(const struct flight *f, const struct rank_ctx *ctx, uint64_t seed, uint8_t *in,
                    uint8_t *want)
{
    uint64_t rng = seed + (uint64_t)ctx->rank * 1000003;
    memset(want, POISON, (size_t)f->n_calls * REGION_BYTES);
    for (int i = 0; i < f->n_calls; i++) {
        const struct call *c = &f->calls[i];
        uint8_t *x = in + (size_t)i * REGION_BYTES;
        spccl_status st;
        fill_array(x, in_bytes(c, ctx->n_ranks) / spccl_dtype_bytes(c->dtype), c->dtype,
                   (array_kind)rand_below(&rng, N_KINDS), &rng);
        st = host_call(ctx->comm, c, x, want + (size_t)i * REGION_BYTES);
        CHECK(st == SPCCL_OK, "the host: %s", spccl_last_error());
        if (st != SPCCL_OK)
            return false;
    }
    return true;
}

/* Copy the inputs to the GPU and fill the outputs with poison; the output of a broadcast gets the input. */
static void upload(const struct flight *f, const struct rank_ctx *ctx, const uint8_t *in_d)
{
    struct rank_buffer *m = &rank_buffers[ctx->rank];
    CUDA_OK(cudaMemsetAsync(m->out_d, POISON, (size_t)f->n_calls * REGION_BYTES, m->on));
    for (int i = 0; i < f->n_calls; i++)
        if (f->calls[i].coll == BROADCAST)
            CUDA_OK(cudaMemcpyAsync(m->out_d + (size_t)i * REGION_BYTES, in_d + (size_t)i * REGION_BYTES,
                                    block_bytes(&f->calls[i]), cudaMemcpyDeviceToDevice, m->on));
}

static bool issue(const struct flight *f, int i, const struct rank_ctx *ctx, spccl_comm *comm,
                  cudaStream_t stream)
{
    struct rank_buffer *m = &rank_buffers[ctx->rank];
    size_t at = (size_t)i * REGION_BYTES;
    spccl_status st = gpu_call(comm, &f->calls[i], m->in_d + at, m->out_d + at, stream);
    CHECK(st == SPCCL_OK, "rank %d, call %d: %s", ctx->rank, i, spccl_last_error());
    return st == SPCCL_OK;
}

static bool wait_for(const struct rank_ctx *ctx, spccl_comm *comm, cudaStream_t stream)
{
    spccl_status st = spccl_cuda_wait(comm, stream, wait_ms());
    CHECK(st == SPCCL_OK, "rank %d: waiting: %s", ctx->rank, spccl_last_error());
    return st == SPCCL_OK;
}

/* Wait, and compare out_d with want. */
static void compare(const struct flight *f, const struct rank_ctx *ctx, const uint8_t *want, const char *what)
{
    struct rank_buffer *m = &rank_buffers[ctx->rank];
    size_t all = (size_t)f->n_calls * REGION_BYTES, at;
    CUDA_OK(cudaMemcpyAsync(m->got, m->out_d, all, cudaMemcpyDeviceToHost, m->on));
    sync_stream(m->on);
    at = first_difference(want, m->got, all);
    if (at < all) {
        const struct call *c = &f->calls[at / REGION_BYTES];
        CHECK(false,
              "%s: rank %d of %d, call %zu: %s of %zu %s, %s: byte %zu of the output is %#x, wanted %#x",
              what, ctx->rank, ctx->n_ranks, at / REGION_BYTES, coll_names[c->coll], c->n,
              spccl_dtype_name(c->dtype), op_names[c->op], at % REGION_BYTES, m->got[at], want[at]);
    }
    CHECK(at == all, "%s", what);
}

/* ---- several in flight ---- */

struct scene {
    uint64_t seed;
    bool two_streams, two_comms;
};

static bool second_comm(struct rank_ctx *ctx, spccl_comm **out)
{
    spccl_store store = {
        .struct_bytes = sizeof store, .ctx = ctx->store, .set = mem_store_set, .get = mem_store_get};
    spccl_config config = *ctx->config;
    spccl_status st;
    config.name = "second";
    st = spccl_comm_create(&store, ctx->rank, ctx->n_ranks, &config, out);
    CHECK(st == SPCCL_OK, "second communicator: %s", spccl_last_error());
    return st == SPCCL_OK && attach_gpu(*out, ctx->rank, 8);
}

static void fly(struct rank_ctx *ctx, const struct scene *scene, spccl_comm *second)
{
    struct rank_buffer *m = &rank_buffers[ctx->rank];
    struct flight f;
    for (int round = 0; round < (is_small ? 1 : is_slow ? 2 : 6 * n_rounds); round++) {
        uint64_t seed = scene->seed + (uint64_t)round * 31;
        draw_flight(&f, is_small ? 6 : N_REGIONS, ctx->n_ranks, seed);
        if (!prepare(&f, ctx, seed, m->in, m->want))
            return;
        CUDA_OK(
            cudaMemcpyAsync(m->in_d, m->in, (size_t)f.n_calls * REGION_BYTES, cudaMemcpyHostToDevice, m->on));
        upload(&f, ctx, m->in_d);
        sync_stream(m->on); /* inputs are there before the other stream starts */
        for (int i = 0; i < f.n_calls; i++) {
            bool other = i % 3 == 1 && (scene->two_streams || scene->two_comms);
            if (!issue(&f, i, ctx, other && scene->two_comms ? second : ctx->comm, other ? m->on2 : m->on))
                return;
        }
        if (!wait_for(ctx, ctx->comm, m->on) || !wait_for(ctx, scene->two_comms ? second : ctx->comm, m->on2))
            return;
        compare(&f, ctx, m->want, "in flight");
    }
}

static void in_flight(struct rank_ctx *ctx)
{
    const struct scene *scene = ctx->arg;
    spccl_comm *second = NULL;
    /* Two communicators run at once: kernels of both must fit on a GPU, for all ranks that share it. */
    bool ok = attach_gpu(ctx->comm, ctx->rank, scene->two_comms ? 8 : 0);
    if (ok && (!scene->two_comms || second_comm(ctx, &second)))
        fly(ctx, scene, second);
    (void)all_here(ctx->comm); /* destroy frees memory, which may not happen while a peer's kernel runs */
    spccl_comm_destroy(second);
}

static void run_scene(void (*fn)(struct rank_ctx *), bool two_streams, bool two_comms)
{
    struct rank_ctx ctx[RANKS_CAP];
    spccl_config config = SPCCL_CONFIG_INIT;
    config.timeout_ms = is_small || is_slow ? 60000 : 5000;
    for (int n = is_small ? 2 : 1; n <= (is_small ? 2 : is_long ? 8 : 4); n += is_slow ? 3 : 1) {
        struct scene scene = {.seed = test_rand(), .two_streams = two_streams, .two_comms = two_comms};
        run_ranks(n, &config, fn, &scene, ctx);
        for (int r = 0; r < n; r++)
            CHECK(ctx[r].created == SPCCL_OK, "rank %d: %s", r, ctx[r].error);
    }
}

static void test_one_stream(void)
{
    run_scene(in_flight, false, false);
}
static void test_two_streams(void)
{
    run_scene(in_flight, true, false);
}
static void test_two_communicators(void)
{
    run_scene(in_flight, false, true);
}

/* ---- graphs ---- */

#define N_VARIANTS 4
#define N_GRAPH_CALLS 3
/* The variants of inputs take N_VARIANTS * N_GRAPH_CALLS regions of spare_d and of want. A call outside of
 * the graph uses the region after those of the graph. */
_Static_assert((N_VARIANTS + 1) * (N_GRAPH_CALLS + 1) <= N_REGIONS, "all variants fit");

static const struct flight graph_flight = {
    .n_calls = N_GRAPH_CALLS + 1,
    .calls = {{ALL_GATHER, SPCCL_FLOAT32, SPCCL_SUM, 5000, 0},
              {REDUCE_SCATTER, SPCCL_BFLOAT16, SPCCL_AVG, 3001, 0},
              {ALL_REDUCE, SPCCL_FLOAT32, SPCCL_SUM, 40009, 0},
              {ALL_REDUCE, SPCCL_INT32, SPCCL_MAX, 777, 0}}}; /* the call outside of the graph */

#define VARIANT_BYTES ((N_GRAPH_CALLS + 1) * REGION_BYTES)

/* Capture the first calls on m->on into a graph that can be launched. */
static cudaGraphExec_t capture(const struct rank_ctx *ctx)
{
    struct rank_buffer *m = &rank_buffers[ctx->rank];
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;
    bool ok = true;
    CUDA_OK(cudaStreamBeginCapture(m->on, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; ok && i < N_GRAPH_CALLS; i++)
        ok = issue(&graph_flight, i, ctx, ctx->comm, m->on);
    CUDA_OK(cudaStreamEndCapture(m->on, &graph));
    if (ok) {
        CUDA_OK(cudaGraphInstantiate(&exec, graph, 0));
        CUDA_OK(cudaGraphUpload(exec, m->on));
        sync_stream(m->on);
    }
    CUDA_OK(cudaGraphDestroy(graph));
    return exec;
}

/* Replay i, with variant v of the inputs. Every seventh replay is followed by a call outside of the graph. */
static bool replay(const struct rank_ctx *ctx, cudaGraphExec_t exec, int i, int v)
{
    struct rank_buffer *m = &rank_buffers[ctx->rank];
    bool outside = i % 7 == 3;
    const uint8_t *want = m->want + (size_t)v * VARIANT_BYTES;
    struct flight seen = graph_flight;
    seen.n_calls -= !outside;
    CUDA_OK(cudaMemcpyAsync(m->in_d, m->spare_d + (size_t)v * VARIANT_BYTES, VARIANT_BYTES,
                            cudaMemcpyDeviceToDevice, m->on));
    CUDA_OK(cudaMemsetAsync(m->out_d, POISON, VARIANT_BYTES, m->on));
    CUDA_OK(cudaGraphLaunch(exec, m->on));
    if (outside && !issue(&graph_flight, N_GRAPH_CALLS, ctx, ctx->comm, m->on))
        return false;
    if (!wait_for(ctx, ctx->comm, m->on))
        return false;
    if (i < 20 || i % 5 == 0)
        compare(&seen, ctx, want, "replay");
    return true;
}

static void graphs(struct rank_ctx *ctx)
{
    const struct scene *scene = ctx->arg;
    struct rank_buffer *m = &rank_buffers[ctx->rank];
    cudaGraphExec_t exec = NULL;
    uint64_t rng = scene->seed;
    bool ok = attach_gpu(ctx->comm, ctx->rank, 0);
    for (int v = 0; ok && v < N_VARIANTS; v++) {
        ok = prepare(&graph_flight, ctx, scene->seed + (uint64_t)v, m->in,
                     m->want + (size_t)v * VARIANT_BYTES);
        CUDA_OK(cudaMemcpyAsync(m->spare_d + (size_t)v * VARIANT_BYTES, m->in, VARIANT_BYTES,
                                cudaMemcpyHostToDevice, m->on));
        sync_stream(m->on);
    }
    exec = ok ? capture(ctx) : NULL;
    /* instantiating allocates memory, which may not happen while a peer's kernel runs */
    if (all_here(ctx->comm) && exec != NULL)
        for (int i = 0; ok && i < (is_small ? 10 : is_slow ? 100 : 1000); i++)
            ok = replay(ctx, exec, i, (int)rand_below(&rng, N_VARIANTS));
    (void)all_here(ctx->comm);
    if (exec != NULL)
        CUDA_OK(cudaGraphExecDestroy(exec));
}

static void test_graphs(void)
{
    run_scene(graphs, false, false);
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {{"one_stream", test_one_stream},
                                             {"two_streams", test_two_streams},
                                             {"two_communicators", test_two_communicators},
                                             {"graphs", test_graphs},
                                             {NULL, NULL}};
    cuda_test_start(&argc, argv);
    setenv("SPCCL_SCHEDULE", "direct", 1); /* so that both queues are used */
    make_rank_buffers(is_small ? 2 : is_long ? 8 : 4, N_REGIONS * REGION_BYTES);
    return test_main(cases, argc, argv);
}
