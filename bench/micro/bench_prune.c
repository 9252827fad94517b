/* bench_prune.c - one thread: spccl_prune against a plain copy of the same run.
 *
 *     spccl_bench_prune             SPCCL_DEBUG_CPU_ISA picks the kernel set
 *
 * 16 Mi elements in segments of 1 Mi, 1% sent; medians of 9. Bytes moved: gradient and state read and
 * written. Rates in GB/s (1e9 bytes); the last column is the rate over that of memcpy, read plus written. */
#include "bench_host.h"

#include "core/base/dtype.h"

#include <string.h>

#define N ((size_t)16 << 20)
#define N_SEGMENTS 16u

static void fill(float *x)
{
    uint64_t state = 1;
    for (size_t i = 0; i < N; i++) {
        float sum = -2;
        for (int k = 0; k < 4; k++) {
            state = state * 6364136223846793005u + 1442695040888963407u;
            sum += (float)(state >> 40) * 0x1p-24f;
        }
        x[i] = sum;
    }
}

static double copy_gbs(uint8_t *to, const uint8_t *from)
{
    double t[ROUNDS];
    for (int i = 0; i < ROUNDS; i++) {
        int64_t start = sp_now_ns();
        memcpy(to, from, N * 4);
        t[i] = (double)(sp_now_ns() - start);
    }
    return 2.0 * 4 * (double)N / median(t);
}

static void run(spccl_dtype dtype, const float *source, uint8_t *grad, float *residual, float *velocity,
                double copy)
{
    static spccl_prune_state states[N_SEGMENTS];
    spccl_prune_segment segments[N_SEGMENTS];
    spccl_prune_options o = SPCCL_PRUNE_OPTIONS_INIT;
    spccl_prune_plan *plan = NULL;
    double t[ROUNDS], bytes, rate;
    size_t e = sp_dtype_bytes(dtype);
    uint64_t n_sent = 0;
    memset(states, 0, sizeof states);
    memset(residual, 0, N * 4);
    for (size_t i = 0; i < N_SEGMENTS; i++)
        segments[i] =
            (spccl_prune_segment){.begin = i * (N / N_SEGMENTS),
                                  .n_elems = N / N_SEGMENTS,
                                  .residual = residual + i * (N / N_SEGMENTS),
                                  .velocity = velocity != NULL ? velocity + i * (N / N_SEGMENTS) : NULL,
                                  .state = &states[i],
                                  .key = (uint32_t)i};
    o.momentum = velocity != NULL ? 0.9 : 0;
    if (velocity != NULL)
        memset(velocity, 0, N * 4);
    ok(spccl_prune_plan_create(segments, N_SEGMENTS, N, dtype, -1, &plan));
    for (int i = -2; i < ROUNDS; i++) {
        int64_t start;
        for (size_t k = 0; k < N; k++)
            if (e == 4)
                memcpy(grad + k * 4, source + k, 4);
            else
                memcpy(grad + k * 2, &(uint16_t){sp_bf16_from_f32(source[k])}, 2);
        start = sp_now_ns();
        ok(spccl_prune(plan, grad, &o));
        if (i >= 0)
            t[i] = (double)(sp_now_ns() - start);
    }
    for (size_t i = 0; i < N_SEGMENTS; i++)
        n_sent += states[i].n_sent;
    bytes = 2.0 * (double)N * ((double)e + 4 + (velocity != NULL ? 4 : 0));
    rate = bytes / median(t);
    printf("prune %-8s %-22s %7.2f ms  %6.2f GB/s  %5.2f of copy  density %.4f\n", spccl_dtype_name(dtype),
           velocity != NULL ? "residual and velocity" : "residual", bytes / rate / 1e6, rate, rate / copy,
           (double)n_sent / (double)N);
    spccl_prune_plan_destroy(plan);
}

int main(void)
{
    float *source = malloc(N * 4), *residual = malloc(N * 4), *velocity = malloc(N * 4);
    uint8_t *grad = malloc(N * 4);
    double copy;
    if (source == NULL || residual == NULL || velocity == NULL || grad == NULL)
        return 1;
    fill(source);
    memset(grad, 1, N * 4);
    copy = copy_gbs(grad, (const uint8_t *)source);
    printf("copy, read plus written %6.2f GB/s\n", copy);
    run(SPCCL_FLOAT32, source, grad, residual, NULL, copy);
    run(SPCCL_FLOAT32, source, grad, residual, velocity, copy);
    run(SPCCL_BFLOAT16, source, grad, residual, NULL, copy);
    free(source), free(residual), free(velocity), free(grad);
    return 0;
}
