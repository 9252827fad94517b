/* test_cuda_prune.c - pruning on a GPU: the bits of the host at given thresholds, every dtype, misaligned
 * gradients, many segments; the threshold that a sample gives; the density over many steps; a captured graph against
 * eager calls; bad input. */
#include "core/base/prune_rule.h"
#include "cuda_test.h"

#include <math.h>

#define CAP_BYTES ((size_t)8 << 20)

static struct {
    uint8_t *grad, *residual, *velocity;       /* pinned host memory */
    uint8_t *grad_d, *residual_d, *velocity_d; /* on the GPU */
    uint8_t *want_grad, *want_residual, *want_velocity;
    uint8_t *sent, *sent_d, *want_sent; /* in 16 bits, of a float32 gradient */
    spccl_prune_state *states, *states_d, *want_states;
    double *clip, *clip_d;  /* a norm and three squares; on the host followed by a copy */
    float *scale, *scale_d; /* GradScaler's */
    cudaStream_t on;
} g;
static uint64_t rng;

#define N_STATES 64

static void make_arrays(void)
{
    size_t cap = is_small || is_slow ? CAP_BYTES / 8 : CAP_BYTES;
    g.grad = pinned_alloc(cap), g.residual = pinned_alloc(cap), g.velocity = pinned_alloc(cap);
    g.want_grad = pinned_alloc(cap), g.want_residual = pinned_alloc(cap), g.want_velocity = pinned_alloc(cap);
    g.grad_d = device_alloc(cap), g.residual_d = device_alloc(cap), g.velocity_d = device_alloc(cap);
    g.sent = pinned_alloc(cap), g.sent_d = device_alloc(cap), g.want_sent = pinned_alloc(cap);
    g.states = (spccl_prune_state *)pinned_alloc(N_STATES * sizeof *g.states);
    g.want_states = (spccl_prune_state *)pinned_alloc(N_STATES * sizeof *g.states);
    g.states_d = (spccl_prune_state *)device_alloc(N_STATES * sizeof *g.states);
    g.clip = (double *)(void *)pinned_alloc(8 * sizeof *g.clip);
    g.clip_d = (double *)(void *)device_alloc(4 * sizeof *g.clip_d);
    g.scale = (float *)(void *)pinned_alloc(sizeof *g.scale);
    g.scale_d = (float *)(void *)device_alloc(sizeof *g.scale_d);
    CUDA_OK(cudaStreamCreateWithFlags(&g.on, cudaStreamNonBlocking));
}

static void copy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind)
{
    CUDA_OK(cudaMemcpyAsync(to, from, bytes, kind, g.on));
}

static double normal(void)
{
    double sum = -6;
    for (int i = 0; i < 12; i++)
        sum += (double)(next_rand(&rng) >> 11) * 0x1p-53;
    return sum;
}

static void put_float(spccl_dtype dtype, void *x, size_t i, float f)
{
    double d = (double)f;
    uint32_t u;
    memcpy(&u, &f, 4);
    if (dtype == SPCCL_FLOAT64)
        memcpy((uint8_t *)x + i * 8, &d, 8);
    else if (dtype == SPCCL_FLOAT32)
        memcpy((uint8_t *)x + i * 4, &f, 4);
    else { /* any 16 bits will do; most are finite */
        uint16_t h = dtype == SPCCL_BFLOAT16 ? (uint16_t)(u >> 16) : (uint16_t)(next_rand(&rng) & 0xbfff);
        memcpy((uint8_t *)x + i * 2, &h, 2);
    }
}

struct shape {
    spccl_dtype dtype;
    size_t n, n_segments, skew; /* elements; skew: of the gradient off an aligned address */
    bool residual_bf16;
    spccl_prune_segment host[N_STATES], device[N_STATES];
};

/* Segments of random lengths that fill [0, n); each with or without residual and velocity. */
static void cut(struct shape *s)
{
    size_t at = 0, state_bytes = s->dtype == SPCCL_FLOAT64 ? 8 : 4;
    memset(s->host, 0, sizeof s->host);
    for (size_t i = 0; i < s->n_segments; i++) {
        size_t left = s->n - at,
               n = i + 1 == s->n_segments ? left : 1 + next_rand(&rng) % (2 * left / (s->n_segments - i));
        size_t offset = at * state_bytes; /* 16-byte aligned below */
        bool has_r = next_rand(&rng) % 4 != 0, has_u = next_rand(&rng) % 2 != 0;
        if (n > left - (s->n_segments - i - 1))
            n = left - (s->n_segments - i - 1);
        offset = (offset + 64 * i + 15) / 16 * 16;
        s->host[i] = (spccl_prune_segment){.begin = at,
                                           .n_elems = n,
                                           .residual = has_r ? g.want_residual + offset : NULL,
                                           .velocity = has_u ? g.want_velocity + offset : NULL,
                                           .state = g.want_states + i,
                                           .key = (uint32_t)i,
                                           .whole = next_rand(&rng) % 8 == 0};
        s->device[i] = s->host[i];
        s->device[i].residual = has_r ? g.residual_d + offset : NULL;
        s->device[i].velocity = has_u ? g.velocity_d + offset : NULL;
        s->device[i].state = g.states_d + i;
        at += n;
    }
}

static size_t cap_bytes(void)
{
    return is_small || is_slow ? CAP_BYTES / 8 : CAP_BYTES;
}

static void fill(const struct shape *s, bool odd)
{
    size_t e = spccl_dtype_bytes(s->dtype), state_elems = s->n + 32 * s->n_segments;
    spccl_dtype st = s->dtype == SPCCL_FLOAT64 ? SPCCL_FLOAT64 : SPCCL_FLOAT32;
    memset(g.grad, POISON, cap_bytes());
    for (size_t i = 0; i < s->n; i++)
        put_float(s->dtype, g.grad + s->skew * e, i, (float)normal());
    for (size_t i = 0; i < state_elems; i++) {
        float r = (float)normal();
        put_float(st, g.residual, i, r); /* the upper half of a float32 is a bfloat16 */
        if (s->residual_bf16)
            put_float(SPCCL_BFLOAT16, g.residual, 2 * i, -r);
        put_float(st, g.velocity, i, (float)normal());
    }
    for (size_t i = 0; odd && i < s->n; i += 1 + next_rand(&rng) % 50)
        put_value(g.grad + s->skew * e, i, s->dtype, &rng, true);
    for (size_t i = 0; i < s->n_segments; i++) /* all zero: 0 and -0 */
        if (next_rand(&rng) % 4 == 0)
            for (size_t k = 0; k < s->host[i].n_elems; k++)
                put_float(s->dtype == SPCCL_FLOAT16 ? SPCCL_BFLOAT16 : s->dtype, g.grad + s->skew * e,
                          s->host[i].begin + k, k % 2 != 0 ? -0.0f : 0);
    memcpy(g.want_grad, g.grad, cap_bytes());
    memcpy(g.want_residual, g.residual, cap_bytes());
    memcpy(g.want_velocity, g.velocity, cap_bytes());
    memset(g.want_sent, POISON, cap_bytes());
    copy(g.sent_d, g.want_sent, cap_bytes(), cudaMemcpyHostToDevice);
    memset(g.want_states, 0, N_STATES * sizeof *g.states);
    for (size_t i = 0; i < s->n_segments; i++)
        g.want_states[i].threshold = (double)(float)(0.5 + (double)(i % 5) * 0.6);
    copy(g.grad_d, g.grad, cap_bytes(), cudaMemcpyHostToDevice);
    copy(g.residual_d, g.residual, cap_bytes(), cudaMemcpyHostToDevice);
    copy(g.velocity_d, g.velocity, cap_bytes(), cudaMemcpyHostToDevice);
    copy(g.states_d, g.want_states, N_STATES * sizeof *g.states, cudaMemcpyHostToDevice);
    sync_stream(g.on); /* the host goes on to change what is copied */
}

static void compare(const struct shape *s, const char *what)
{
    size_t at;
    copy(g.grad, g.grad_d, cap_bytes(), cudaMemcpyDeviceToHost);
    copy(g.residual, g.residual_d, cap_bytes(), cudaMemcpyDeviceToHost);
    copy(g.velocity, g.velocity_d, cap_bytes(), cudaMemcpyDeviceToHost);
    copy(g.sent, g.sent_d, cap_bytes(), cudaMemcpyDeviceToHost);
    copy(g.states, g.states_d, N_STATES * sizeof *g.states, cudaMemcpyDeviceToHost);
    sync_stream(g.on);
    at = first_difference(g.grad, g.want_grad, cap_bytes());
    CHECK(at == cap_bytes(), "%s: gradient, byte %zu of %zu %s, skew %zu", what, at, s->n,
          spccl_dtype_name(s->dtype), s->skew);
    at = first_difference(g.residual, g.want_residual, cap_bytes());
    CHECK(at == cap_bytes(), "%s: residual, byte %zu of %zu %s", what, at, s->n, spccl_dtype_name(s->dtype));
    at = first_difference(g.velocity, g.want_velocity, cap_bytes());
    CHECK(at == cap_bytes(), "%s: velocity, byte %zu of %zu %s", what, at, s->n, spccl_dtype_name(s->dtype));
    at = first_difference(g.sent, g.want_sent, cap_bytes());
    CHECK(at == cap_bytes(), "%s: what is sent, byte %zu of %zu %s", what, at, s->n,
          spccl_dtype_name(s->dtype));
    for (size_t i = 0; i < s->n_segments; i++)
        CHECK(g.states[i].n_sent == g.want_states[i].n_sent && g.states[i].step == g.want_states[i].step &&
                  g.states[i].n_sent_all == g.want_states[i].n_sent_all &&
                  g.states[i].n_nonfinite_all == g.want_states[i].n_nonfinite_all,
              "%s: segment %zu: %llu sent in step %llu, wanted %llu in %llu", what, i,
              (unsigned long long)g.states[i].n_sent, (unsigned long long)g.states[i].step,
              (unsigned long long)g.want_states[i].n_sent, (unsigned long long)g.want_states[i].step);
}

/* Let half of the calls clip, by a norm that is finite or not. clip_d [4] on the GPU: the norm, then squares [3]; clip
 * holds the same for the host. */
static bool choose_clipping(const struct shape *s, double *clip, double *clip_d, spccl_prune_options *host,
                            spccl_prune_options *device)
{
    double norm = next_rand(&rng) % 4 == 0 ? (double)NAN : 100;
    float narrow = (float)norm;
    if (next_rand(&rng) % 2 == 0)
        return false;
    memcpy(clip, s->dtype == SPCCL_FLOAT64 ? (void *)&norm : (void *)&narrow,
           s->dtype == SPCCL_FLOAT64 ? sizeof norm : sizeof narrow);
    clip[1] = 5, clip[2] = 0.1, clip[3] = 1e4;
    copy(clip_d, clip, 4 * sizeof *clip, cudaMemcpyHostToDevice);
    sync_stream(g.on);
    host->norm = clip, host->squares = clip + 1;
    host->n_squares = 3, host->square = (uint32_t)(next_rand(&rng) % 3);
    host->max_norm = next_rand(&rng) % 2 == 0 ? 7 : (double)INFINITY;
    *device = *host;
    device->norm = clip_d, device->squares = clip_d + 1;
    return true;
}

/* Let two in three of the calls that can send in 16 bits, beside the gradient. */
static void choose_sent(const struct shape *s, spccl_prune_options *host, spccl_prune_options *device)
{
    static const spccl_dtype dtypes[] = {SPCCL_FLOAT32, SPCCL_FLOAT16, SPCCL_BFLOAT16};
    spccl_dtype dtype = dtypes[next_rand(&rng) % 3];
    size_t offset = 2 * (next_rand(&rng) % 5);
    if (s->dtype != SPCCL_FLOAT32 || s->residual_bf16 || dtype == SPCCL_FLOAT32)
        return;
    host->sent = g.want_sent + offset;
    device->sent = g.sent_d + offset;
    host->sent_dtype = device->sent_dtype = dtype;
}

/* A new loss scale, on host and GPU. */
static void change_scale(void)
{
    static const float scales[] = {1024, 512, 4096, 3};
    *g.scale = scales[next_rand(&rng) % 4];
    copy(g.scale_d, g.scale, sizeof *g.scale, cudaMemcpyHostToDevice);
    sync_stream(g.on);
}

/* At given thresholds the GPU gives the bits of the host. */
static void test_same_bits(void)
{
    static const spccl_dtype dtypes[] = {SPCCL_FLOAT32, SPCCL_FLOAT16, SPCCL_BFLOAT16, SPCCL_FLOAT64};
    static const size_t sizes[] = {1, 3, 4, 5, 255, 1023, 4095, 4096, 4097, 12345, 65536 + 7};
    int rounds = is_small ? 8 : is_slow ? 24 : 200 * n_rounds;
    double *clip = g.clip, *got = g.clip + 4;
    for (int round = 0; round < rounds; round++) {
        struct shape s = {.dtype = dtypes[round % 4],
                          .n = sizes[next_rand(&rng) % (is_small || is_slow ? 10 : 11)],
                          .skew = next_rand(&rng) % 5};
        spccl_prune_options o = SPCCL_PRUNE_OPTIONS_INIT, on_gpu;
        spccl_prune_plan *host = NULL, *device = NULL;
        bool clips;
        size_t e = spccl_dtype_bytes(s.dtype);
        s.n_segments = 1 + next_rand(&rng) % (s.n < 40 ? 1 : 12);
        s.residual_bf16 = s.dtype != SPCCL_FLOAT64 && next_rand(&rng) % 2 != 0;
        o.residual_bf16 = s.residual_bf16;
        o.seed = (uint32_t)next_rand(&rng);
        o.keep_thresholds = 1;
        o.momentum = round % 3 != 0 ? 0.9 : 0;
        o.leak = round % 5 != 0 ? 1 : 0.99;
        o.skip_zeros = round % 4 < 2;
        o.scale = round % 7 != 0 ? 1 : 0.25;
        cut(&s);
        fill(&s, round % 2 != 0);
        CHECK_OK(spccl_prune_plan_create(s.host, s.n_segments, s.n, s.dtype, -1, &host));
        CHECK_OK(spccl_prune_plan_create(s.device, s.n_segments, s.n, s.dtype, 0, &device));
        on_gpu = o;
        clips = choose_clipping(&s, clip, g.clip_d, &o, &on_gpu);
        choose_sent(&s, &o, &on_gpu);
        o.loss_scale = round % 8 < 5 ? g.scale : NULL;
        on_gpu.loss_scale = o.loss_scale != NULL ? g.scale_d : NULL;
        for (int step = 0; step < 3; step++) {
            change_scale();
            CHECK_OK(spccl_prune(host, g.want_grad + s.skew * e, &o));
            CHECK_OK(spccl_cuda_prune(device, g.grad_d + s.skew * e, &on_gpu, g.on));
        }
        compare(&s, clips ? "given thresholds, clipping" : "given thresholds");
        if (clips) {
            copy(got, g.clip_d, 4 * sizeof *got, cudaMemcpyDeviceToHost);
            sync_stream(g.on);
            CHECK(memcmp(got, clip, 4 * sizeof *got) == 0, "squares %g %g %g, wanted %g %g %g", got[1],
                  got[2], got[3], clip[1], clip[2], clip[3]);
        }
        spccl_prune_plan_destroy(host);
        spccl_prune_plan_destroy(device);
    }
}

static spccl_prune_plan *one_segment(size_t n, bool has_u)
{
    spccl_prune_plan *plan = NULL;
    spccl_prune_segment s = {.n_elems = n,
                             .residual = g.residual_d,
                             .velocity = has_u ? g.velocity_d : NULL,
                             .state = g.states_d,
                             .key = 5};
    CUDA_OK(cudaMemsetAsync(g.residual_d, 0, cap_bytes(), g.on));
    CUDA_OK(cudaMemsetAsync(g.velocity_d, 0, cap_bytes(), g.on));
    CUDA_OK(cudaMemsetAsync(g.states_d, 0, N_STATES * sizeof *g.states, g.on));
    CHECK_OK(spccl_prune_plan_create(&s, 1, n, SPCCL_FLOAT32, 0, &plan));
    return plan;
}

static int larger_first(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;
    return (x < y) - (x > y);
}

/* The threshold of a first step is exactly the wanted quantile of the sample that prune_rule.h defines: samples that
 * fit the registers of the sampling kernel, that just do not, and the largest. */
static void test_threshold(void)
{
    static const size_t sizes[] = {1, 31, 1000, 4097, 12288, 12289, 20000, 40000, 100003};
    static float sample[SP_PRUNE_SAMPLES_MAX];
    for (int round = 0; round < (is_small || is_slow ? 9 : 36); round++) {
        size_t n = sizes[round % 9];
        spccl_prune_options o = SPCCL_PRUNE_OPTIONS_INIT;
        spccl_prune_plan *plan = one_segment(n, false);
        sp_prune_sample p;
        float want;
        o.density = round % 2 == 0 ? 0.001 : 0.05;
        o.sample = round % 4 < 2 ? 1 : 0.001;
        o.seed = (uint32_t)next_rand(&rng);
        for (size_t i = 0; i < n; i++)
            put_float(SPCCL_FLOAT32, g.grad, i, (float)normal());
        copy(g.grad_d, g.grad, n * 4, cudaMemcpyHostToDevice);
        CHECK_OK(spccl_cuda_prune(plan, g.grad_d, &o, g.on));
        copy(g.states, g.states_d, sizeof *g.states, cudaMemcpyDeviceToHost);
        sync_stream(g.on);
        p = sp_prune_sample_of(n, (float)o.density, o.sample, o.seed, 5, 0);
        for (uint64_t i = 0; i < p.n; i++)
            sample[i] = fabsf(((const float *)(const void *)g.grad)[p.start + i * p.stride]);
        qsort(sample, p.n, sizeof *sample, larger_first);
        want = sample[sp_prune_rank(p.n, (double)(float)o.density) - 1];
        CHECK(g.states[0].threshold == (double)want,
              "threshold %.9g of %zu elements, %llu sampled, wanted %.9g", g.states[0].threshold, n,
              (unsigned long long)p.n, (double)want);
        spccl_prune_plan_destroy(plan);
    }
}

static void test_density(void)
{
    static const double densities[] = {0.1, 0.01, 0.001};
    size_t n = is_small || is_slow ? 20000 : 1000000;
    for (int d = 0; d < (is_small || is_slow ? 2 : 3); d++) {
        spccl_prune_options o = SPCCL_PRUNE_OPTIONS_INIT;
        spccl_prune_plan *plan = one_segment(n, d == 1);
        double sum = 0;
        int steps = is_small || is_slow ? 20 : 60;
        o.density = densities[d];
        o.momentum = d == 1 ? 0.9 : 0;
        for (int step = 0; step < steps; step++) {
            for (size_t i = 0; i < n; i++)
                put_float(SPCCL_FLOAT32, g.grad, i, (float)normal());
            copy(g.grad_d, g.grad, n * 4, cudaMemcpyHostToDevice);
            CHECK_OK(spccl_cuda_prune(plan, g.grad_d, &o, g.on));
            copy(g.states, g.states_d, sizeof *g.states, cudaMemcpyDeviceToHost);
            sync_stream(g.on);
            sum += step >= 10 ? (double)g.states[0].n_sent / (double)n : 0;
        }
        sum /= steps - 10;
        double slack = steps < 60 ? 0.4 : 0.2;
        CHECK(fabs(sum / o.density - 1) < slack, "density %g, wanted %g", sum, o.density);
        spccl_prune_plan_destroy(plan);
    }
}

/* A graph that holds one call, replayed n times, does what n calls do, across the warm-up and changes of loss
 * scale. */
static void test_graph(void)
{
    size_t n = is_small || is_slow ? 6000 : 20000;
    int n_warmup = is_small ? 5 : 20,
        n_steps = is_small ? 10 : 100; /* the last steps lie behind the warm-up */
    float scale = 8, *scale_d = (float *)(void *)device_alloc(4);
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;
    for (int graphed = 0; graphed < 2; graphed++) {
        spccl_prune_options o = SPCCL_PRUNE_OPTIONS_INIT;
        spccl_prune_plan *plan = one_segment(n, true);
        o.momentum = 0.5;
        o.dense_steps = 2;
        o.warmup_steps = (uint32_t)n_warmup;
        o.loss_scale = scale_d;
        rng = 77;
        if (graphed != 0) {
            CUDA_OK(cudaStreamBeginCapture(g.on, cudaStreamCaptureModeThreadLocal));
            CHECK_OK(spccl_cuda_prune(plan, g.grad_d, &o, g.on));
            CUDA_OK(cudaStreamEndCapture(g.on, &graph));
            CUDA_OK(cudaGraphInstantiate(&exec, graph, 0));
        }
        for (int step = 0; step < n_steps; step++) {
            scale = step % 7 == 6 ? scale / 2 : scale;
            for (size_t i = 0; i < n; i++)
                put_float(SPCCL_FLOAT32, g.grad, i, (float)normal());
            copy(g.grad_d, g.grad, n * 4, cudaMemcpyHostToDevice);
            copy(scale_d, &scale, 4, cudaMemcpyHostToDevice);
            if (graphed != 0)
                CUDA_OK(cudaGraphLaunch(exec, g.on));
            else
                CHECK_OK(spccl_cuda_prune(plan, g.grad_d, &o, g.on));
            sync_stream(g.on);
        }
        scale = 8;
        copy(graphed != 0 ? g.residual : g.want_residual, g.residual_d, n * 4, cudaMemcpyDeviceToHost);
        copy(graphed != 0 ? g.velocity : g.want_velocity, g.velocity_d, n * 4, cudaMemcpyDeviceToHost);
        copy(graphed != 0 ? g.states : g.want_states, g.states_d, sizeof *g.states, cudaMemcpyDeviceToHost);
        sync_stream(g.on);
        spccl_prune_plan_destroy(plan);
    }
    CHECK(memcmp(g.residual, g.want_residual, n * 4) == 0, "residual of the replayed graph");
    CHECK(memcmp(g.velocity, g.want_velocity, n * 4) == 0, "velocity of the replayed graph");
    CHECK(memcmp(g.states, g.want_states, sizeof *g.states) == 0,
          "state of the replayed graph: step %llu, wanted %llu", (unsigned long long)g.states[0].step,
          (unsigned long long)g.want_states[0].step);
    CHECK(g.states[0].step == (uint64_t)n_steps, "%llu steps", (unsigned long long)g.states[0].step);
    CUDA_OK(cudaGraphExecDestroy(exec));
    CUDA_OK(cudaGraphDestroy(graph));
}

/* A plan refuses segments and memory that do not fit, before any launch. */
static void test_bad_plans(void)
{
    spccl_prune_segment s[2] = {{.n_elems = 10, .state = g.states_d}, {.begin = 10, .n_elems = 6}};
    spccl_prune_plan *plan = NULL;
    void *elsewhere = NULL;
    s[1].state = g.states_d + 1;
    s[0].residual = g.grad; /* pinned host memory */
    CHECK_FAILS(spccl_prune_plan_create(s, 2, 16, SPCCL_FLOAT32, 0, &plan), SPCCL_ERR_ARG,
                "residual of the segment at element 0");
    s[0].residual = g.residual_d + 4;
    CHECK_FAILS(spccl_prune_plan_create(s, 2, 16, SPCCL_FLOAT32, 0, &plan), SPCCL_ERR_ARG, "aligned to 16");
    s[0].residual = NULL;
    s[0].velocity = g.velocity;
    CHECK_FAILS(spccl_prune_plan_create(s, 2, 16, SPCCL_FLOAT32, 0, &plan), SPCCL_ERR_ARG,
                "velocity of the segment at element 0");
    s[0].velocity = NULL;
    s[1].state = g.states;
    CHECK_FAILS(spccl_prune_plan_create(s, 2, 16, SPCCL_FLOAT32, 0, &plan), SPCCL_ERR_ARG,
                "state of the segment at element 10");
    if (n_gpus > 1) {
        CUDA_OK(cudaSetDevice(1));
        elsewhere = device_alloc(sizeof *g.states);
        CUDA_OK(cudaSetDevice(0));
        s[1].state = elsewhere; /* the threshold is part of the state */
        CHECK_FAILS(spccl_prune_plan_create(s, 2, 16, SPCCL_FLOAT32, 0, &plan), SPCCL_ERR_ARG,
                    "is memory of GPU 1, the plan is for GPU 0");
        CUDA_OK(cudaFree(elsewhere));
    }
    s[1].state = g.states_d + 1;
    s[1].begin = 9;
    CHECK_FAILS(spccl_prune_plan_create(s, 2, 16, SPCCL_FLOAT32, 0, &plan), SPCCL_ERR_ARG, "overlap by 1");
    s[1].begin = 11;
    CHECK_FAILS(spccl_prune_plan_create(s, 2, 16, SPCCL_FLOAT32, 0, &plan), SPCCL_ERR_ARG,
                "leaves the gradient");
    CHECK(plan == NULL, "after a failure out is unchanged");
}

/* A call with a wrong argument changes nothing: neither the gradient nor the state. */
static void test_bad_calls(void)
{
    size_t n = 1000;
    spccl_prune_options o = SPCCL_PRUNE_OPTIONS_INIT;
    spccl_prune_plan *plan = one_segment(n, true);
    float *host = (float *)(void *)g.grad;
    for (size_t i = 0; i < n; i++)
        host[i] = (float)normal();
    copy(g.grad_d, g.grad, n * 4, cudaMemcpyHostToDevice);
    CHECK_FAILS(spccl_cuda_prune(plan, host, NULL, g.on), SPCCL_ERR_ARG, "host memory");
    o.factor = host;
    CHECK_FAILS(spccl_cuda_prune(plan, g.grad_d, &o, g.on), SPCCL_ERR_ARG, "options.factor");
    o.factor = NULL;
    o.loss_scale = host;
    CHECK_FAILS(spccl_cuda_prune(plan, g.grad_d, &o, g.on), SPCCL_ERR_ARG, "options.loss_scale");
    o.loss_scale = NULL;
    o.norm = g.states_d, o.squares = (double *)(void *)host, o.n_squares = 1, o.max_norm = 1;
    CHECK_FAILS(spccl_cuda_prune(plan, g.grad_d, &o, g.on), SPCCL_ERR_ARG, "options.squares");
    o.norm = host;
    CHECK_FAILS(spccl_cuda_prune(plan, g.grad_d, &o, g.on), SPCCL_ERR_ARG, "options.norm");
    o.square = 1;
    CHECK_FAILS(spccl_cuda_prune(plan, g.grad_d, &o, g.on), SPCCL_ERR_ARG, "square is 1");
    CHECK_FAILS(spccl_cuda_prune(plan, g.grad_d + 1, NULL, g.on), SPCCL_ERR_ARG, "aligned to 4");
    CHECK_FAILS(spccl_prune(plan, g.grad, NULL), SPCCL_ERR_ARG, "for GPU 0");
    copy(g.want_grad, g.grad_d, n * 4, cudaMemcpyDeviceToHost);
    copy(g.states, g.states_d, sizeof *g.states, cudaMemcpyDeviceToHost);
    sync_stream(g.on);
    CHECK(memcmp(g.grad, g.want_grad, n * 4) == 0, "a refused call changed the gradient");
    CHECK(g.states[0].step == 0, "a refused call counted a step");
    spccl_prune_plan_destroy(plan);
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {{"same_bits", test_same_bits},
                                             {"threshold", test_threshold},
                                             {"density", test_density},
                                             {"graph", test_graph},
                                             {"bad_plans", test_bad_plans},
                                             {"bad_calls", test_bad_calls},
                                             {NULL, NULL}};
    cuda_test_start(&argc, argv);
    make_arrays();
    rng = (uint64_t)now_ms();
    return test_main(cases, argc, argv);
}
