/* bench_signs.c - one thread: one bit per element against a plain read of the weights.
 *
 *     spccl_bench_signs             SPCCL_DEBUG_CPU_ISA picks the kernel set
 *
 * 16 Mi float32 in segments of 1 Mi; medians of 9. Bytes moved: what is read and what is written, each once. Rates in
 * GB/s (1e9 bytes); the last column is the rate over that of the read. */
#include "bench_host.h"

#include "core/base/mem.h"
#include "spccl_experimental.h"

#include <string.h>

#define N ((size_t)16 << 20)
#define N_CHUNKS (N / SPCCL_SIGNS_CHUNK)
#define N_SEGMENTS 16u
#define MOST_PARTS 16u

static struct arrays {
    float *own, *shared;
    uint8_t *parts, *rows;
    spccl_weights_plan *plan;
    uint32_t n_parts;
} a;
static uint64_t sink;

static void read_weights(void)
{
    uint64_t sums[32] = {0}, v[32];
    for (size_t i = 0; i < N * 4; i += sizeof v) {
        memcpy(v, (const uint8_t *)a.own + i, sizeof v);
        for (int k = 0; k < 32; k++)
            sums[k] |= v[k];
    }
    for (int k = 0; k < 32; k++)
        sink += sums[k];
}

static void send_signs(void)
{
    ok(spccl_weights_send_signs(a.plan, a.rows, 1, NULL));
}

static void sum_parts(void)
{
    const spccl_signs_sum_options o = {sizeof o, a.parts, a.own, a.rows, NULL, N_CHUNKS, a.n_parts, -1};
    ok(spccl_signs_sum(&o, NULL));
}

static void decode(void)
{
    ok(spccl_signs_decode(a.rows, N_CHUNKS, a.own, -1, NULL));
}

static void make(void)
{
    static spccl_prune_state states[N_SEGMENTS];
    spccl_weights_segment segments[N_SEGMENTS];
    uint64_t state = 1;
    a.own = malloc(N * 4), a.shared = malloc(N * 4);
    a.parts = malloc(MOST_PARTS * N_CHUNKS * SPCCL_SIGNS_ROW_BYTES);
    a.rows = malloc(N_CHUNKS * SPCCL_SIGNS_ROW_BYTES);
    if (a.own == NULL || a.shared == NULL || a.parts == NULL || a.rows == NULL)
        exit(1);
    for (size_t i = 0; i < N; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        a.own[i] = (float)(state >> 40) * 0x1p-24f - 0.5f;
        a.shared[i] = 0;
    }
    for (size_t i = 0; i < N_SEGMENTS; i++)
        segments[i] = (spccl_weights_segment){.begin = i * (N / N_SEGMENTS),
                                              .n_elems = N / N_SEGMENTS,
                                              .own = a.own + i * (N / N_SEGMENTS),
                                              .shared = a.shared + i * (N / N_SEGMENTS),
                                              .state = &states[i]};
    ok(spccl_weights_plan_create(segments, N_SEGMENTS, N, SPCCL_FLOAT32, -1, &a.plan));
    send_signs();
    for (size_t r = 0; r < MOST_PARTS; r++)
        memcpy(a.parts + r * N_CHUNKS * SPCCL_SIGNS_ROW_BYTES, a.rows, N_CHUNKS * SPCCL_SIGNS_ROW_BYTES);
}

int main(void)
{
    static const uint32_t n_parts[] = {1, 4, MOST_PARTS};
    const double rows = (double)(N_CHUNKS * SPCCL_SIGNS_ROW_BYTES), weights = 4 * (double)N;
    double read;
    make();
    read = measure("read", weights, 0, read_weights);
    measure("send", 3 * weights + rows, read, send_signs);
    for (size_t i = 0; i < sizeof n_parts / sizeof *n_parts; i++) {
        char name[32];
        a.n_parts = n_parts[i];
        snprintf(name, sizeof name, "sum of %u parts", a.n_parts);
        measure(name, 2 * weights + (a.n_parts + 1) * rows, read, sum_parts);
    }
    measure("decode", weights + rows, read, decode);
    spccl_weights_plan_destroy(a.plan);
    free(a.own), free(a.shared), free(a.parts), free(a.rows);
    return sink == 1;
}
