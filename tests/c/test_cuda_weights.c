/* test_cuda_weights.c - spccl_weights_send and spccl_weights_receive on a GPU: the bits of the host, with given and with
 * sampled thresholds; misaligned buffers, many segments; one bit per element; bad input. */
#include "cuda_test.h"

#include <math.h>

#define CAP_BYTES ((size_t)2 << 20)
#define N_STATES 64

/* Of each array one on the host, on which the host's kernels work, and one on the GPU. */
struct memory {
    uint8_t *host, *gpu;
};
static struct {
    struct memory own, common, buffer, states;
    uint8_t *back; /* what came back from the GPU */
    cudaStream_t on;
} g;
static uint64_t rng;

static void make_arrays(void)
{
    struct memory *all[] = {&g.own, &g.common, &g.buffer, &g.states};
    for (int i = 0; i < 4; i++) {
        all[i]->host = pinned_alloc(CAP_BYTES);
        all[i]->gpu = device_alloc(CAP_BYTES);
    }
    g.back = pinned_alloc(CAP_BYTES);
    CUDA_OK(cudaStreamCreateWithFlags(&g.on, cudaStreamNonBlocking));
}

static void upload(const struct memory *m)
{
    CUDA_OK(cudaMemcpyAsync(m->gpu, m->host, CAP_BYTES, cudaMemcpyHostToDevice, g.on));
    sync_stream(g.on);
}

static void compare(const struct memory *m, const char *what, size_t n, spccl_dtype dtype)
{
    size_t at;
    CUDA_OK(cudaMemcpyAsync(g.back, m->gpu, CAP_BYTES, cudaMemcpyDeviceToHost, g.on));
    sync_stream(g.on);
    at = first_difference(g.back, m->host, CAP_BYTES);
    CHECK(at == CAP_BYTES, "%s: byte %zu, of %zu elements of %s", what, at, n, spccl_dtype_name(dtype));
}

static double normal(void)
{
    double sum = -6;
    for (int i = 0; i < 12; i++)
        sum += (double)(next_rand(&rng) >> 11) * 0x1p-53;
    return sum;
}

static void put(spccl_dtype dtype, uint8_t *x, size_t i, double v)
{
    float f = (float)v;
    if (dtype == SPCCL_FLOAT64)
        memcpy(x + i * 8, &v, 8);
    else
        memcpy(x + i * 4, &f, 4);
}

/* With few magnitudes many elements are equal to the smallest that a chunk sends. Equal weights lie at random
 * places: a sample with too many of them would have a threshold of 0. Then the host would bound what is sent, and
 * the GPU, which has no such bound, would not. */
static void fill(spccl_dtype dtype, bool equal_magnitudes)
{
    size_t n = CAP_BYTES / 2 / spccl_dtype_bytes(dtype);
    memset(g.buffer.host, POISON, CAP_BYTES);
    memset(g.states.host, 0, CAP_BYTES);
    for (size_t i = 0; i < n; i++) {
        double z = equal_magnitudes ? 0 : normal();
        double w = equal_magnitudes ? (double)(next_rand(&rng) % 5) - 2 : normal();
        put(dtype, g.common.host, i, z);
        put(dtype, g.own.host, i, next_rand(&rng) % 7 == 0 ? z : w);
        if (next_rand(&rng) % 500 == 0)
            put(dtype, g.own.host, i, next_rand(&rng) % 2 != 0 ? INFINITY : -INFINITY);
        if (next_rand(&rng) % 100 == 0) { /* a quarter of the difference is 0 */
            put(dtype, g.common.host, i, 0);
            put(dtype, g.own.host, i, dtype == SPCCL_FLOAT64 ? 0x1p-1074 : 0x1p-149);
        }
    }
    for (size_t i = 0; i < N_STATES; i++)
        ((spccl_prune_state *)(void *)g.states.host)[i].threshold =
            (double)(float)(0.5 + (double)(i % 5) * 0.6);
    upload(&g.own), upload(&g.common), upload(&g.buffer), upload(&g.states);
}

/* The same segments twice: in host memory, and in GPU memory. The weights of each begin at a multiple of 16
 * bytes. */
static size_t cut(spccl_dtype dtype, size_t n, spccl_weights_segment *host, spccl_weights_segment *gpu)
{
    size_t n_segments = 1 + next_rand(&rng) % (n < 40 ? 1 : 12), begin = 0, offset = 0;
    for (size_t i = 0; i < n_segments; i++) {
        size_t left = n - begin - (n_segments - i - 1);
        size_t here = i + 1 == n_segments ? left : 1 + next_rand(&rng) % (1 + left / 2);
        host[i] = (spccl_weights_segment){.begin = begin,
                                          .n_elems = here,
                                          .own = g.own.host + offset,
                                          .shared = g.common.host + offset,
                                          .state = (spccl_prune_state *)(void *)g.states.host + i,
                                          .key = (uint32_t)i,
                                          .whole = next_rand(&rng) % 8 == 0};
        gpu[i] = host[i];
        gpu[i].own = g.own.gpu + offset;
        gpu[i].shared = g.common.gpu + offset;
        gpu[i].state = (spccl_prune_state *)(void *)g.states.gpu + i;
        begin += here;
        offset += (here * spccl_dtype_bytes(dtype) + 15) / 16 * 16;
    }
    return n_segments;
}

static void test_same_bits(void)
{
    static const size_t sizes[] = {1, 3, 4, 5, 255, 1023, 2048, 4095, 4097, 12345, 65536 + 7};
    int rounds = is_small ? 8 : is_slow ? 24 : 200 * n_rounds;
    for (int round = 0; round < rounds; round++) {
        spccl_dtype dtype = round % 3 == 2 ? SPCCL_FLOAT64 : SPCCL_FLOAT32;
        size_t n = sizes[next_rand(&rng) % (is_small || is_slow ? 10 : 11)], n_segments;
        size_t skew = next_rand(&rng) % 5 * spccl_dtype_bytes(dtype);
        spccl_weights_segment on_host[N_STATES], on_gpu[N_STATES];
        spccl_weights_options o = SPCCL_WEIGHTS_OPTIONS_INIT;
        spccl_weights_plan *host = NULL, *gpu = NULL;
        fill(dtype, round % 8 == 6);
        n_segments = cut(dtype, n, on_host, on_gpu);
        CHECK_OK(spccl_weights_plan_create(on_host, n_segments, n, dtype, -1, &host));
        CHECK_OK(spccl_weights_plan_create(on_gpu, n_segments, n, dtype, 0, &gpu));
        o.chunk = round % 4 < 2 ? 0 : 256u << next_rand(&rng) % 5;
        o.levels = o.chunk != 0 && next_rand(&rng) % 2 != 0 ? 2 : 0;
        o.keep_thresholds = o.chunk == 0 && round % 2 == 0;
        o.density = round % 4 == 1 ? 1 : 0.2;
        o.leak = round % 5 != 0 ? 1 : 0.99;
        o.scale = round % 7 != 0 ? 1 : 0.25;
        for (int step = 0; step < 3; step++) {
            CHECK_OK(spccl_weights_send(host, g.buffer.host + skew, &o, NULL));
            CHECK_OK(spccl_weights_send(gpu, g.buffer.gpu + skew, &o, g.on));
            compare(&g.buffer, "what is sent", n, dtype);
            CHECK_OK(spccl_weights_receive(host, g.buffer.host + skew, NULL));
            CHECK_OK(spccl_weights_receive(gpu, g.buffer.gpu + skew, g.on));
        }
        compare(&g.own, "own weights", n, dtype);
        compare(&g.common, "common weights", n, dtype);
        compare(&g.states, "states", n, dtype);
        spccl_weights_plan_destroy(host);
        spccl_weights_plan_destroy(gpu);
    }
}

/* ---- one bit per element ---- */

/* Segments of any length, each at the chunk after the one before. Returns how many chunks they have. */
static size_t cut_chunks(size_t most, size_t *n_segments, spccl_weights_segment *host,
                         spccl_weights_segment *gpu)
{
    static const size_t sizes[] = {1, 5, 1023, 4095, 4096, 4097, 3 * 4096, 9000};
    size_t n_chunks = 0;
    for (*n_segments = 0; *n_segments < 8; ++*n_segments) {
        size_t n = sizes[next_rand(&rng) % 8], begin = n_chunks * SPCCL_SIGNS_CHUNK, i = *n_segments;
        if (n_chunks + (n + 4095) / 4096 > most)
            break;
        host[i] = (spccl_weights_segment){.begin = begin,
                                          .n_elems = n,
                                          .own = g.own.host + begin * 4,
                                          .shared = g.common.host + begin * 4,
                                          .state = (spccl_prune_state *)(void *)g.states.host + i};
        gpu[i] = host[i];
        gpu[i].own = g.own.gpu + begin * 4;
        gpu[i].shared = g.common.gpu + begin * 4;
        gpu[i].state = (spccl_prune_state *)(void *)g.states.gpu + i;
        n_chunks += (n + 4095) / 4096;
    }
    return n_chunks;
}

/* The rows of several ranks are those of several steps of one. Kept parts lie in `common`, lengths and results in the
 * second half of the buffer. */
static void check_owner(size_t n_chunks, uint32_t n_parts)
{
    size_t rows = n_chunks * SPCCL_SIGNS_ROW_BYTES, half = CAP_BYTES / 2, at_lengths = CAP_BYTES - 4096;
    for (size_t c = 0; c < n_chunks; c++)
        ((uint32_t *)(void *)(g.buffer.host + at_lengths))[c] =
            next_rand(&rng) % 4 == 0 ? (uint32_t)(next_rand(&rng) % 4097) : 4096;
    upload(&g.buffer);
    for (int on_gpu = 0; on_gpu < 2; on_gpu++) {
        uint8_t *buffer = on_gpu != 0 ? g.buffer.gpu : g.buffer.host;
        float *kept = (float *)(void *)(on_gpu != 0 ? g.common.gpu : g.common.host);
        spccl_signs_sum_options o = SPCCL_SIGNS_SUM_OPTIONS_INIT;
        o.parts = buffer, o.kept = kept, o.rows = buffer + half;
        o.lengths = (uint32_t *)(void *)(buffer + at_lengths);
        o.n_chunks = n_chunks, o.n_parts = n_parts, o.device = on_gpu - 1;
        CHECK_OK(spccl_signs_sum(&o, on_gpu != 0 ? g.on : NULL));
        CHECK_OK(spccl_signs_decode(buffer + half, n_chunks, (float *)(void *)buffer, on_gpu - 1,
                                    on_gpu != 0 ? g.on : NULL));
    }
    compare(&g.buffer, "results of the owner, and what they say", n_chunks, SPCCL_FLOAT32);
    compare(&g.common, "what the owner keeps", n_chunks, SPCCL_FLOAT32);
    CHECK(n_parts * rows <= half, "the parts fit");
}

static void test_signs(void)
{
    int rounds = is_small ? 4 : is_slow ? 12 : 100 * n_rounds;
    for (int round = 0; round < rounds; round++) {
        spccl_weights_segment on_host[8], on_gpu[8];
        spccl_weights_plan *host = NULL, *gpu = NULL;
        uint32_t n_parts = (uint32_t)(next_rand(&rng) % 6);
        size_t n_segments, n_chunks;
        double leak = round % 3 != 0 ? 1 : 0.9;
        fill(SPCCL_FLOAT32, round % 4 == 3);
        n_chunks = cut_chunks(20, &n_segments, on_host, on_gpu);
        CHECK_OK(spccl_weights_plan_create(on_host, n_segments, CAP_BYTES / 4, SPCCL_FLOAT32, -1, &host));
        CHECK_OK(spccl_weights_plan_create(on_gpu, n_segments, CAP_BYTES / 4, SPCCL_FLOAT32, 0, &gpu));
        for (uint32_t r = 0; r < (n_parts > 0 ? n_parts : 1); r++) {
            size_t at = r * n_chunks * SPCCL_SIGNS_ROW_BYTES;
            CHECK_OK(spccl_weights_send_signs(host, g.buffer.host + at, leak, NULL));
            CHECK_OK(spccl_weights_send_signs(gpu, g.buffer.gpu + at, leak, g.on));
        }
        compare(&g.buffer, "rows", n_chunks, SPCCL_FLOAT32);
        compare(&g.own, "own weights", n_chunks, SPCCL_FLOAT32);
        compare(&g.states, "states", n_chunks, SPCCL_FLOAT32);
        check_owner(n_chunks, n_parts);
        spccl_weights_plan_destroy(host);
        spccl_weights_plan_destroy(gpu);
    }
}

static void test_bad_input(void)
{
    float *kept = (float *)(void *)(g.own.gpu + 4);
    spccl_signs_sum_options o = SPCCL_SIGNS_SUM_OPTIONS_INIT;
    spccl_weights_segment s = {.n_elems = 10,
                               .own = g.own.gpu,
                               .shared = g.common.gpu,
                               .state = (spccl_prune_state *)(void *)g.states.gpu};
    spccl_weights_plan *plan = NULL;
    float *host = (float *)malloc(64);
    CHECK_OK(spccl_weights_plan_create(&s, 1, 10, SPCCL_FLOAT32, 0, &plan));
    CHECK_FAILS(spccl_weights_send(plan, host, NULL, g.on), SPCCL_ERR_ARG, "host memory");
    CHECK_FAILS(spccl_weights_receive(plan, host, g.on), SPCCL_ERR_ARG, "the plan is for GPU 0");
    CHECK_FAILS(spccl_weights_send_signs(plan, host, 1, g.on), SPCCL_ERR_ARG, "the plan is for GPU 0");
    spccl_weights_plan_destroy(plan);
    o.kept = kept, o.rows = g.buffer.gpu, o.n_chunks = 1, o.device = 0;
    CHECK_FAILS(spccl_signs_sum(&o, g.on), SPCCL_ERR_ARG, "aligned to 16 bytes");
    o.kept = host;
    CHECK_FAILS(spccl_signs_sum(&o, g.on), SPCCL_ERR_ARG, "the call is for GPU 0");
    free(host);
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {
        {"same_bits", test_same_bits}, {"signs", test_signs}, {"bad_input", test_bad_input}, {NULL, NULL}};
    cuda_test_start(&argc, argv);
    make_arrays();
    rng = (uint64_t)now_ms();
    return test_main(cases, argc, argv);
}
