/* test_cuda_pruned_sum.c - spccl_cuda_prune_all_reduce gives the bits of spccl_cuda_prune and spccl_cuda_all_reduce:
 * random segments, values and numbers of ranks, calls without a wait in between, captured graphs. Lists without room:
 * nothing is lost, and a nan reaches all ranks. Calls that cannot use lists, ranks with other calls, a peer that does not
 * call. Ranks are
 * threads. --small: for sanitizers. */
#include "cuda_sums.h"

#include <math.h>

#define N_STATES 16
#define RANKS_MAX 9
#define LIST_BYTES "16M"
#define MANY (is_small || is_slow ? 50000u : 1000000u) /* elements */
#define CAP ((size_t)4 * 1100000 * 6)

/* What a rank keeps for one way of calling: addresses on its GPU. */
struct side {
    float *grad;
    uint8_t *residual, *velocity;
    spccl_prune_state *states;
    spccl_prune_plan *plan;
};

struct scene {
    uint64_t seed;
    size_t n, n_segments;
    bool odd, staged, no_residual; /* staged: thresholds in a call of their own */
    spccl_redop op;
    int n_steps;
    spccl_prune_options options;
};

static size_t round_up(size_t n)
{
    return (n + 15) / 16 * 16;
}

/* Where the two sides lie: gradients in in_d and out_d, the rest in spare_d. */
static struct side side_of(const struct rank_ctx *c, const struct scene *s, int which)
{
    const struct rank_buffer *m = &rank_buffers[c->rank];
    size_t state_bytes = round_up((s->n + 16 * N_STATES) * 4), each = 2 * state_bytes + 4096;
    uint8_t *base = m->spare_d + (size_t)which * each;
    return (struct side){.grad = (float *)(void *)(which == 0 ? m->in_d : m->out_d),
                         .residual = base + 4096,
                         .velocity = base + 4096 + state_bytes,
                         .states = (spccl_prune_state *)(void *)base};
}

/* The same segments on all ranks and both sides. */
static void make_plan(const struct rank_ctx *c, const struct scene *s, struct side *side)
{
    spccl_prune_segment segments[N_STATES];
    uint64_t rng = s->seed;
    size_t at = 0;
    for (size_t i = 0; i < s->n_segments; i++) {
        size_t left = s->n - at, n = left;
        size_t offset = round_up(at * 4 + 32 * i);
        bool has_r = next_rand(&rng) % 4 != 0 && !s->no_residual, has_u = next_rand(&rng) % 2 != 0;
        if (i + 1 != s->n_segments) {
            n = 1 + next_rand(&rng) % (2 * left / (s->n_segments - i));
            n = n > left - (s->n_segments - i - 1) ? left - (s->n_segments - i - 1) : n;
        }
        segments[i] = (spccl_prune_segment){
            .begin = at,
            .n_elems = n,
            .residual = has_r || (!s->odd && !s->no_residual) ? side->residual + offset : NULL,
            .velocity = has_u && s->odd ? side->velocity + offset : NULL,
            .state = side->states + i,
            .key = (uint32_t)i,
            .whole = next_rand(&rng) % 5 == 0 && s->odd};
        at += n;
    }
    CHECK_OK(spccl_prune_plan_create(segments, s->n_segments, s->n, SPCCL_FLOAT32,
                                     rank_buffers[c->rank].device, &side->plan));
}

static float random_value(uint64_t *rng, bool odd)
{
    uint32_t bits = (uint32_t)next_rand(rng);
    float f;
    if (odd && next_rand(rng) % 300 == 0) { /* NaN with a payload, inf, -0, denormal */
        static const uint32_t special[] = {0x7f800001u, 0xffc12345u, 0x7f800000u,
                                           0xff800000u, 0x80000000u, 3u};
        bits = special[bits % 6];
        memcpy(&f, &bits, 4);
        return f;
    }
    return ldexpf((float)(int32_t)bits, -30 - (int)(next_rand(rng) % 4));
}

/* Fill a gradient on the host with what rank and step determine, and copy it to both sides. */
static void load_gradient(const struct rank_ctx *c, const struct scene *s, int step, struct side *sides)
{
    const struct rank_buffer *m = &rank_buffers[c->rank];
    uint64_t rng = s->seed + 1000003u * (uint64_t)c->rank + 7919u * (uint64_t)step;
    float *x = (float *)(void *)m->in;
    bool zeros = next_rand(&rng) % 4 == 0;
    for (size_t i = 0; i < s->n; i++)
        x[i] = zeros && i < s->n / 2 ? 0 : random_value(&rng, s->odd);
    for (int k = 0; k < 2; k++)
        CUDA_OK(cudaMemcpyAsync(sides[k].grad, x, s->n * 4, cudaMemcpyHostToDevice, m->on));
    sync_stream(m->on);
}

static void clear_state(const struct rank_ctx *c, const struct scene *s, struct side *side)
{
    const struct rank_buffer *m = &rank_buffers[c->rank];
    spccl_prune_state *states = (spccl_prune_state *)(void *)m->plain;
    uint64_t rng = s->seed + 5;
    size_t bytes = (s->n + 16 * N_STATES) * 4;
    memset(states, 0, N_STATES * sizeof *states);
    for (size_t i = 0; i < s->n_segments; i++)
        states[i].threshold = (double)(float)((double)(next_rand(&rng) % 6) * 0.4);
    CUDA_OK(cudaMemcpyAsync(side->states, states, N_STATES * sizeof *states, cudaMemcpyHostToDevice, m->on));
    CUDA_OK(cudaMemsetAsync(side->residual, 0, bytes, m->on));
    CUDA_OK(cudaMemsetAsync(side->velocity, 0, bytes, m->on));
    sync_stream(m->on);
}

static void check_bytes(const struct rank_ctx *c, const struct scene *s, const char *what, const void *a,
                        const void *b, size_t bytes)
{
    const struct rank_buffer *m = &rank_buffers[c->rank];
    size_t at;
    CUDA_OK(cudaMemcpyAsync(m->got, a, bytes, cudaMemcpyDeviceToHost, m->on));
    CUDA_OK(cudaMemcpyAsync(m->want, b, bytes, cudaMemcpyDeviceToHost, m->on));
    CHECK_OK(spccl_cuda_wait(c->comm, m->on, wait_ms()));
    at = first_difference(m->got, m->want, bytes);
    CHECK(at == bytes, "rank %d of %d: %s differs at byte %zu of %zu (seed %llu)", c->rank, c->n_ranks, what,
          at, bytes, (unsigned long long)s->seed);
}

static void compare_sides(const struct rank_ctx *c, const struct scene *s, const struct side *sides)
{
    size_t bytes = (s->n + 16 * N_STATES) * 4;
    check_bytes(c, s, "the sum", sides[0].grad, sides[1].grad, s->n * 4);
    check_bytes(c, s, "the residual", sides[0].residual, sides[1].residual, bytes);
    check_bytes(c, s, "the velocity", sides[0].velocity, sides[1].velocity, bytes);
    check_bytes(c, s, "the states", sides[0].states, sides[1].states,
                s->n_segments * sizeof *sides[0].states);
}

static spccl_status call_lists(const struct rank_ctx *c, const struct scene *s, const struct side *side)
{
    cudaStream_t on = rank_buffers[c->rank].on;
    spccl_prune_options o = s->options;
    if (s->staged) {
        spccl_status st;
        o.stage = 1;
        st = spccl_cuda_prune(side->plan, side->grad, &o, on);
        if (st != SPCCL_OK)
            return st;
        o.stage = 2;
    }
    return spccl_cuda_prune_all_reduce(c->comm, side->plan, side->grad, s->op, &o, on);
}
static spccl_status call_both(const struct rank_ctx *c, const struct scene *s, const struct side *side)
{
    cudaStream_t on = rank_buffers[c->rank].on;
    spccl_status st = spccl_cuda_prune(side->plan, side->grad, &s->options, on);
    return st != SPCCL_OK
               ? st
               : spccl_cuda_all_reduce(c->comm, side->grad, side->grad, s->n, SPCCL_FLOAT32, s->op, on);
}

/* ---- the same bits ---- */

static void begin(struct rank_ctx *c, const struct scene *s, struct side *sides)
{
    for (int k = 0; k < 2; k++) {
        sides[k] = side_of(c, s, k);
        make_plan(c, s, &sides[k]);
        clear_state(c, s, &sides[k]);
    }
    (void)all_here(c->comm); /* plans allocate: see cuda_ranks.h */
}
static void end(struct rank_ctx *c, struct side *sides)
{
    (void)all_here(c->comm);
    for (int k = 0; k < 2; k++)
        spccl_prune_plan_destroy(sides[k].plan);
}

static void one_scene(struct rank_ctx *c, const struct scene *s)
{
    struct side sides[2];
    begin(c, s, sides);
    for (int step = 0; step < s->n_steps; step++) {
        load_gradient(c, s, step, sides);
        CHECK_OK(call_lists(c, s, &sides[0]));
        CHECK_OK(call_both(c, s, &sides[1]));
        compare_sides(c, s, sides);
    }
    end(c, sides);
}

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
    spccl_cuda_stats stats = {.struct_bytes = sizeof stats};
    uint64_t frames;
    struct side sides[2];
    struct scene s = {.seed = 77, .n = 20000, .n_segments = 3, .op = SPCCL_SUM};
    if (!attach_gpu(c->comm, c->rank, 0))
        return;
    s.options = (spccl_prune_options)SPCCL_PRUNE_OPTIONS_INIT;
    s.options.density = 0.1;
    begin(c, &s, sides);
    load_gradient(c, &s, 0, sides);
    CHECK_OK(spccl_cuda_prune_all_reduce(c->comm, sides[0].plan, NULL, s.op, &s.options, m->on)); /* asks */
    for (int k = 0; k < 2; k++)
        for (int step = 0; step < 20; step++) {
            CHECK_OK(k == 0 ? call_lists(c, &s, &sides[k]) : call_both(c, &s, &sides[k]));
            if (step % 3 == c->rank % 3 && c->rank != 0)
                sync_stream(m->on);
            if (step % 5 == 0)
                CHECK_OK(
                    spccl_cuda_broadcast(c->comm, (uint8_t *)sides[k].grad, 700, SPCCL_FLOAT32, 1, m->on));
        }
    compare_sides(c, &s, sides);
    CHECK_OK(spccl_cuda_get_stats(c->comm, &stats));
    CHECK(stats.n_collectives == 48, "%llu collectives", (unsigned long long)stats.n_collectives);
    frames = stats.wire_bytes_sent;
    CHECK_OK(call_lists(c, &s, &sides[0]));
    CHECK_OK(spccl_cuda_wait(c->comm, m->on, wait_ms()));
    CHECK_OK(spccl_cuda_get_stats(c->comm, &stats));
    CHECK(stats.wire_bytes_sent == frames, "frames were sent in place of lists");
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
            load_gradient(c, &s, step, sides);
            CUDA_OK(cudaGraphLaunch(exec, m->on));
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

/* ---- no room ---- */

/* Thresholds of 0 send everything, more than there is room for. Sum and residuals are then together what was to be
 * sent; small integers add up exactly. */
static void no_room(struct rank_ctx *c)
{
    const struct rank_buffer *m = &rank_buffers[c->rank];
    struct scene s = {.seed = 3, .n = 400000, .n_segments = 1, .op = SPCCL_SUM};
    struct side side = side_of(c, &s, 0);
    float *x = (float *)(void *)m->in, *sum = (float *)(void *)m->got, *residual = (float *)(void *)m->want;
    float *first = (float *)(void *)m->plain;
    size_t kept = 0, i = 0;
    if (!attach_gpu(c->comm, c->rank, 0))
        return;
    s.options = (spccl_prune_options)SPCCL_PRUNE_OPTIONS_INIT;
    s.options.keep_thresholds = 1;
    make_plan(c, &s, &side);
    clear_state(c, &s, &side);
    CUDA_OK(cudaMemsetAsync(side.states, 0, sizeof *side.states, m->on));
    for (i = 0; i < s.n; i++)
        x[i] = (float)(i % 1000 + (size_t)c->rank + 1);
    CUDA_OK(cudaMemcpyAsync(side.grad, x, s.n * 4, cudaMemcpyHostToDevice, m->on));
    CHECK_OK(call_lists(c, &s, &side));
    CUDA_OK(cudaMemcpyAsync(sum, side.grad, s.n * 4, cudaMemcpyDeviceToHost, m->on));
    CUDA_OK(cudaMemcpyAsync(residual, side.residual, s.n * 4, cudaMemcpyDeviceToHost, m->on));
    CHECK_OK(spccl_cuda_wait(c->comm, m->on, wait_ms()));
    for (i = 0; i < s.n; i++)
        kept += residual[i] != 0;
    CHECK(kept > 0 && kept < s.n, "rank %d: %zu of %zu stayed", c->rank, kept, s.n);
    CHECK_OK(spccl_all_reduce(c->comm, residual, residual, s.n, SPCCL_FLOAT32, SPCCL_SUM, NULL));
    memcpy(first, sum, s.n * 4);
    CHECK_OK(spccl_broadcast(c->comm, first, s.n, SPCCL_FLOAT32, 0, NULL));
    i = first_difference((uint8_t *)first, (uint8_t *)sum, s.n * 4);
    CHECK(i == s.n * 4, "rank %d has another sum than rank 0 at byte %zu", c->rank, i);
    for (i = 0; i < s.n; i++)
        if (sum[i] + residual[i] !=
            (float)((i % 1000) * (size_t)c->n_ranks) + (float)(c->n_ranks * (c->n_ranks + 1) / 2))
            break;
    CHECK(i == s.n, "rank %d: element %zu: sum %g, residuals %g", c->rank, i, i < s.n ? (double)sum[i] : 0,
          i < s.n ? (double)residual[i] : 0);
    for (i = 0; i < s.n; i++)
        x[i] = c->rank == 2 ? NAN : 1;
    CUDA_OK(cudaMemcpyAsync(side.grad, x, s.n * 4, cudaMemcpyHostToDevice, m->on));
    CHECK_OK(call_lists(c, &s, &side));
    CUDA_OK(cudaMemcpyAsync(sum, side.grad, 4, cudaMemcpyDeviceToHost, m->on));
    CHECK_OK(spccl_cuda_wait(c->comm, m->on, wait_ms()));
    CHECK(sum[0] != sum[0], "rank %d: no nan came, but %g", c->rank, (double)sum[0]);
    (void)all_here(c->comm);
    spccl_prune_plan_destroy(side.plan);
}

static void test_no_room(void)
{
    setenv("SPCCL_PRUNE_LIST_BYTES", "4M", 1);
    run_scene(3, no_room, NULL);
    setenv("SPCCL_PRUNE_LIST_BYTES", LIST_BYTES, 1);
}

/* ---- calls that take the all-reduce, and wrong calls ---- */

static void without_lists(struct rank_ctx *c)
{
    struct side sides[2];
    struct scene s = {.seed = 21, .n = 12345, .n_segments = 4, .op = SPCCL_SUM, .n_steps = 2};
    if (!attach_gpu(c->comm, c->rank, 0))
        return;
    for (int i = 0; i < 4; i++) {
        s.options = (spccl_prune_options)SPCCL_PRUNE_OPTIONS_INIT;
        s.options.scale = i == 0 ? 0.5 : 1;
        s.options.warmup_steps = i == 1 ? 3 : 0;
        s.options.dense_steps = i == 2 ? 1 : 0;
        s.options.density = i == 3 ? 1 : 0.1;
        one_scene(c, &s);
    }
    begin(c, &s, sides);
    s.options.scale = 0.5;
    CHECK(spccl_cuda_prune_all_reduce(c->comm, sides[0].plan, NULL, s.op, &s.options, NULL) ==
                  SPCCL_ERR_UNSUPPORTED &&
              strstr(spccl_last_error(), "options.scale is not 1") != NULL,
          "%s", spccl_last_error());
    s.options.scale = 1;
    CHECK(spccl_cuda_prune_all_reduce(c->comm, NULL, sides[0].grad, SPCCL_SUM, NULL, NULL) == SPCCL_ERR_ARG &&
              strstr(spccl_last_error(), "plan is NULL") != NULL,
          "%s", spccl_last_error());
    CHECK(spccl_cuda_prune_all_reduce(c->comm, sides[0].plan, rank_buffers[c->rank].in, SPCCL_SUM, NULL,
                                      NULL) == SPCCL_ERR_ARG &&
              strstr(spccl_last_error(), "host memory") != NULL,
          "%s", spccl_last_error());
    s.options.stage = 1;
    CHECK(call_lists(c, &s, &sides[0]) == SPCCL_ERR_ARG && strstr(spccl_last_error(), "stage is 1") != NULL,
          "%s", spccl_last_error());
    end(c, sides);
}

static void test_without_lists(void)
{
    run_scene(3, without_lists, NULL);
    setenv("SPCCL_PRUNE_LIST_BYTES", "0", 1);
    run_scene(2, without_lists, NULL);
    setenv("SPCCL_PRUNE_LIST_BYTES", LIST_BYTES, 1);
}

/* Rank 1 does not call: the others get an error that names it. */
static void one_missing(struct rank_ctx *c)
{
    struct side sides[2];
    struct scene s = {.seed = 21, .n = 12345, .n_segments = 4, .op = SPCCL_SUM};
    if (!attach_gpu(c->comm, c->rank, 0))
        return;
    s.options = (spccl_prune_options)SPCCL_PRUNE_OPTIONS_INIT;
    begin(c, &s, sides);
    load_gradient(c, &s, 0, sides);
    CHECK_OK(call_lists(c, &s, &sides[0]));
    CHECK_OK(spccl_cuda_wait(c->comm, rank_buffers[c->rank].on, wait_ms()));
    CHECK_OK(spccl_comm_set_timeout(c->comm, 1500));
    if (c->rank != 1) {
        spccl_status st;
        CHECK_OK(call_lists(c, &s, &sides[0]));
        st = spccl_cuda_wait(c->comm, rank_buffers[c->rank].on, wait_ms());
        CHECK(st != SPCCL_OK && strstr(spccl_last_error(),
                                       "prune_all_reduce number 2 waited for what rank 1 sends") != NULL,
              "rank %d: %s", c->rank, st != SPCCL_OK ? spccl_last_error() : "no error");
    } else {
        while (spccl_comm_async_error(c->comm) == SPCCL_OK)
            sleep_ms(1);
    }
    sync_stream(rank_buffers[c->rank].on);
    for (int k = 0; k < 2; k++)
        spccl_prune_plan_destroy(sides[k].plan);
}

/* Rank 1 gives a gradient of another size: MISMATCH on the ranks that find out first, an error on all. */
static void other_sizes(struct rank_ctx *c)
{
    struct side sides[2];
    struct scene s = {.seed = 21, .n = c->rank == 1 ? 12000 : 12345, .n_segments = 1, .op = SPCCL_SUM};
    spccl_status st;
    if (!attach_gpu(c->comm, c->rank, 0))
        return;
    s.options = (spccl_prune_options)SPCCL_PRUNE_OPTIONS_INIT;
    begin(c, &s, sides);
    load_gradient(c, &s, 0, sides);
    CHECK_OK(call_lists(c, &s, &sides[0]));
    st = spccl_cuda_wait(c->comm, rank_buffers[c->rank].on, wait_ms());
    CHECK(st == SPCCL_ERR_MISMATCH && strstr(spccl_last_error(), "wanted the same segments") != NULL,
          "rank %d: %s", c->rank, st != SPCCL_OK ? spccl_last_error() : "no error");
    sync_stream(rank_buffers[c->rank].on);
    for (int k = 0; k < 2; k++)
        spccl_prune_plan_destroy(sides[k].plan);
}

static void test_other_sizes(void)
{
    run_scene(2, other_sizes, NULL);
}

static void test_one_missing(void)
{
    run_scene(3, one_missing, NULL);
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {{"same_bits", test_same_bits},
                                             {"in_a_row", test_in_a_row},
                                             {"graph", test_graph},
                                             {"no_room", test_no_room},
                                             {"without_lists", test_without_lists},
                                             {"one_missing", test_one_missing},
                                             {"other_sizes", test_other_sizes},
                                             {NULL, NULL}};
    cuda_test_start(&argc, argv);
    setenv("SPCCL_PRUNE_LIST_BYTES", LIST_BYTES, 1);
    make_rank_buffers(RANKS_MAX, CAP);
    return test_main(cases, argc, argv);
}
