/* bench_delta.c - one thread: deltas of weights against a plain read of both arrays.
 *
 *     spccl_bench_delta             SPCCL_DEBUG_CPU_ISA picks the kernel set
 *
 * 32 Mi elements; uniform places; changed weights take a neighbouring value. Medians of 9. Rates in GB/s (1e9 bytes): of
 * encode and checksum what is read of the arrays; of check and apply the bytes of the weights, of which only the changed
 * ones are touched. The last column is the rate over that of the read. */
#include "bench_host.h"

#include <string.h>

#define N ((size_t)32 << 20)

static struct arrays {
    float *masters;     /* [N] */
    uint16_t *x, *base; /* [N] bfloat16 */
    uint16_t *live;
    uint8_t *dst, *old;
    size_t dst_cap, bytes;
    spccl_delta_source source;
    spccl_delta_options options;
    spccl_delta_frame frame;
    spccl_delta_place place;
    spccl_delta_target target;
} a;
static uint64_t sink;

static void read_one(const void *p, size_t bytes)
{
    uint64_t sums[32] = {0}, v[32];
    for (size_t i = 0; i < bytes; i += sizeof v) {
        for (size_t line = 0; line < sizeof v;
             line += 64) /* as the scan does; without it the read is slower */
            __builtin_prefetch((const uint8_t *)p + i + line + 4096, 0, 2);
        memcpy(v, (const uint8_t *)p + i, sizeof v);
        for (int k = 0; k < 32; k++)
            sums[k] |= v[k];
    }
    for (int k = 0; k < 32; k++)
        sink += sums[k];
}

/* Both arrays in turns, 128 KiB at a time, as a comparison reads them. */
static void read_both(void)
{
    for (size_t at = 0; at < N; at += 65536) {
        read_one(a.x + at, 131072);
        read_one(a.base + at, 131072);
    }
}
static void read_masters(void)
{
    for (size_t at = 0; at < N; at += 65536) {
        read_one(a.masters + at, 262144);
        read_one(a.base + at, 131072);
    }
}

static void encode(void)
{
    ok(spccl_delta_encode(&a.source, 1, &a.options, a.dst, a.dst_cap, &a.frame, &a.bytes));
}
static void check(void)
{
    uint64_t sum;
    ok(spccl_delta_check(&a.target, 1, a.old, a.dst_cap, &sum, NULL));
    sink += sum;
}
static void apply(void)
{
    ok(spccl_delta_apply(&a.target, 1));
}
static void checksum(void)
{
    uint64_t sum;
    ok(spccl_delta_checksum(a.x, N, SPCCL_BFLOAT16, 0, 1, &sum));
    sink += sum;
}

static uint64_t next(uint64_t *state)
{
    return *state = *state * 6364136223846793005u + 1442695040888963407u;
}

static void make(double density)
{
    uint64_t state = 1;
    for (size_t i = 0; i < N; i++) {
        uint64_t r = next(&state);
        a.base[i] = (uint16_t)(0x3c00 + (r >> 40 & 0x3ff) + (r >> 63 << 15));
        a.x[i] = a.base[i];
        if ((double)(next(&state) >> 11) * 0x1p-53 < density)
            a.x[i] = (uint16_t)(a.x[i] + ((r >> 60 & 1) != 0 ? 1 : -1));
        uint32_t bits = (uint32_t)a.x[i] << 16;
        memcpy(&a.masters[i], &bits, sizeof bits);
        a.live[i] = a.base[i];
    }
}

static void run(double density, double read, double read_m)
{
    make(density);
    printf("%g%% changed\n", 100 * density);
    a.source = (spccl_delta_source){a.x, a.base, N, 0, SPCCL_BFLOAT16, SPCCL_BFLOAT16, 1};
    a.options = (spccl_delta_options)SPCCL_DELTA_OPTIONS_INIT;
    measure("encode", 4 * (double)N, read, encode);
    printf("  %-26s %.3f\n", "bytes per change", (double)a.bytes / (double)a.frame.nnz);
    a.source.x = a.masters;
    a.source.x_dtype = SPCCL_FLOAT32;
    measure("encode from float32", 6 * (double)N, read_m, encode);
    a.source.x = a.x;
    a.source.x_dtype = SPCCL_BFLOAT16;
    a.options.raw = 1;
    measure("encode, raw", 4 * (double)N, read, encode);
    printf("  %-26s %.3f\n", "bytes per change, raw", (double)a.bytes / (double)a.frame.nnz);
    a.place = (spccl_delta_place){a.live, N, 0, 1, 0, N, N};
    a.target = (spccl_delta_target){a.dst, a.bytes, N, 0, &a.place, 1, 1, SPCCL_BFLOAT16, 0};
    measure("check, raw", 2 * (double)N, 0, check);
    measure("apply, raw", 2 * (double)N, 0, apply);
}

int main(void)
{
    static const double densities[] = {0.0003, 0.01, 0.045};
    double read, read_m;
    a.dst_cap = spccl_delta_bound(N, SPCCL_BFLOAT16);
    a.masters = malloc(4 * N), a.x = malloc(2 * N), a.base = malloc(2 * N), a.live = malloc(2 * N);
    a.dst = malloc(a.dst_cap), a.old = malloc(a.dst_cap);
    if (!a.masters || !a.x || !a.base || !a.live || !a.dst || !a.old)
        return 1;
    make(0);
    memset(a.dst, 0, a.dst_cap), memset(a.old, 0, a.dst_cap);
    read = measure("read of both", 4 * (double)N, 0, read_both);
    read_m = measure("read, x float32", 6 * (double)N, 0, read_masters);
    measure("checksum", 2 * (double)N, 0, checksum);
    for (size_t i = 0; i < sizeof densities / sizeof *densities; i++)
        run(densities[i], read, read_m);
    free(a.masters), free(a.x), free(a.base), free(a.live), free(a.dst), free(a.old);
    return sink == 1;
}
