/* cuda_test.h - for tests on a GPU: options, waits with a deadline, arrays with zeros in many patterns. A
 * test's main calls cuda_test_start before all else. */
#ifndef SP_CUDA_TEST_H
#define SP_CUDA_TEST_H

#include "spccl.h"
#include "test.h"

#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <time.h>
#include <unistd.h>

#define N_DTYPES 10
#define GUARD_BYTES 256u
#define POISON 0xa5

/* --small: few cases, for sanitizers. --long: many, for soak tests. --slow: for the GPU in software, all
 * cases but those with large arrays. SPCCL_TEST_ROUNDS=n: n times as many random cases. */
static bool is_small, is_long, is_slow;
static int n_rounds = 1, n_gpus;

/* A failed CUDA call ends the test, as nothing that follows could be trusted. */
#define CUDA_OK(x)                                                                                           \
    do {                                                                                                     \
        cudaError_t e_ = (x);                                                                                \
        if (e_ != cudaSuccess) {                                                                             \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #x, cudaGetErrorName(e_));                \
            _exit(1);                                                                                        \
        }                                                                                                    \
    } while (0)

/* The longest time that any GPU work here may take. A sanitizer makes it a hundred times slower, and
 * threads of other tests may have the core of a GPU in software. */
static inline int wait_ms(void)
{
    return is_small || is_slow ? 240000 : 10000;
}

/* Wait for the stream. A kernel that hangs ends the test, as the GPU cannot be used any more. */
static inline void sync_stream(cudaStream_t stream)
{
    int64_t until = now_ms() + wait_ms();
    cudaError_t e;
    while ((e = cudaStreamQuery(stream)) == cudaErrorNotReady) {
        if (now_ms() > until) {
            fprintf(stderr, "the GPU is not done after %d ms: a kernel hangs\n", wait_ms());
            _exit(1);
        }
    }
    CUDA_OK(e);
}

/* Pinned host memory of zeros; memory of the current GPU. Neither is ever freed. */
static inline uint8_t *pinned_alloc(size_t bytes)
{
    void *p = NULL;
    CUDA_OK(cudaHostAlloc(&p, bytes, cudaHostAllocPortable));
    memset(p, 0, bytes);
    return p;
}
static inline uint8_t *device_alloc(size_t bytes)
{
    void *p = NULL;
    CUDA_OK(cudaMalloc(&p, bytes));
    return p;
}

/* Take the options out of argv. Sets two variables before CUDA starts, as ranks that are threads of one
 * process wait for each other's kernels: no module may be loaded while kernels run, and each stream needs its
 * own hardware queue. */
static inline void cuda_test_options(int *argc, char **argv)
{
    const char *rounds = getenv("SPCCL_TEST_ROUNDS");
    int kept = 1;
    setenv("CUDA_MODULE_LOADING", "EAGER", 1);
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
    for (int i = 1; i < *argc; i++) {
        if (strcmp(argv[i], "--small") == 0)
            is_small = true;
        else if (strcmp(argv[i], "--long") == 0)
            is_long = true;
        else if (strcmp(argv[i], "--slow") == 0)
            is_slow = true;
        else
            argv[kept++] = argv[i];
    }
    *argc = kept;
    n_rounds = rounds != NULL && atoi(rounds) > 0 ? atoi(rounds) : is_long ? 10 : 1;
}

/* Reads the options and counts the GPUs. Exits with 77 if there is none. */
static inline void cuda_test_start(int *argc, char **argv)
{
    cuda_test_options(argc, argv);
    n_gpus = spccl_cuda_device_count();
    if (n_gpus == 0) {
        printf("skipped: no GPU that CUDA can use\n");
        exit(77);
    }
}

/* ---- random arrays; each thread has its own state ---- */

static inline uint64_t next_rand(uint64_t *rng)
{
    uint64_t z = (*rng += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* 0 <= result < n, n < 2^32 */
static inline uint32_t rand_below(uint64_t *rng, uint32_t n)
{
    return (uint32_t)((next_rand(rng) >> 32) * n >> 32);
}

typedef enum array_kind {
    KIND_ZERO,
    KIND_ONE, /* one nonzero */
    KIND_PERMILLE_1,
    KIND_PERCENT_1,
    KIND_PERCENT_10,
    KIND_PERCENT_50,
    KIND_PERCENT_90,
    KIND_FULL,
    KIND_ONE_BLOCK,  /* all nonzeros in one block of 256 */
    KIND_ONE_SLICE,  /* all nonzeros in one slice of 2048, half of which they fill */
    KIND_FULL_BLOCK, /* 1%, and one block of 256 without zeros, which format tile cannot encode */
    KIND_ALTERNATING,
    KIND_SPECIAL,     /* every third element: NaNs with payload, -0.0, denormals, infinities */
    KIND_FEW_SPECIAL, /* 1%, all of them such values */
    KIND_PER_UNIT,    /* one nonzero in each 16 bytes */
    KIND_LANE,        /* only 32 bytes of each 1024, which one lane of a warp has */
    KIND_VARYING,     /* each block of 2048 elements has its own density, up to 30% */
    KIND_MASKED,      /* 1%, and half of the others have the highest bit alone: -0.0 of floats */
    N_KINDS
} array_kind;

static const char *const kind_names[N_KINDS] = {
    "zero",    "one element", "0.1%",      "1%",        "10%",        "50%",
    "90%",     "100%",        "one block", "one slice", "full block", "alternating",
    "special", "few special", "per unit",  "lane",      "varying",    "masked"};

/* -0.0, quiet and signalling NaNs with payload, infinities, denormals; of integers the extreme values. */
static inline uint64_t special_bits(spccl_dtype dtype, uint32_t i)
{
    static const uint64_t f32[8] = {0x80000000, 0x7fc00123, 0x7f800001, 0xffabcdef,
                                    0x7f800000, 0xff800000, 1,          0x807fffff};
    static const uint64_t f16[8] = {0x8000, 0x7e12, 0x7c01, 0xfdef, 0x7c00, 0xfc00, 1, 0x83ff};
    static const uint64_t bf16[8] = {0x8000, 0x7fc5, 0x7f81, 0xffab, 0x7f80, 0xff80, 1, 0x807f};
    static const uint64_t f64[8] = {0x8000000000000000,
                                    0x7ff8000000000123,
                                    0x7ff0000000000001,
                                    0xfff0abcdef012345,
                                    0x7ff0000000000000,
                                    0xfff0000000000000,
                                    1,
                                    0x800fffffffffffff};
    static const uint64_t ints[8] = {0x8080808080808080, 0x7f, 0xff,      ~UINT64_C(0), 0x8000,
                                     0x7fffffff,         1,    0x80000000};
    switch (dtype) {
    case SPCCL_FLOAT32:
        return f32[i];
    case SPCCL_FLOAT16:
        return f16[i];
    case SPCCL_BFLOAT16:
        return bf16[i];
    case SPCCL_FLOAT64:
        return f64[i];
    default:
        return ints[i];
    }
}

/* Set element i to random bits that are not all 0. One in eight, or with `special` each, is special. */
static inline void put_value(uint8_t *x, size_t i, spccl_dtype dtype, uint64_t *rng, bool special)
{
    size_t e = spccl_dtype_bytes(dtype);
    uint64_t v = next_rand(rng), mask = e == 8 ? ~UINT64_C(0) : (UINT64_C(1) << (8 * e)) - 1;
    if (special || v % 8 == 0)
        v = special_bits(dtype, (uint32_t)(v >> 8) % 8);
    v &= mask;
    if (v == 0)
        v = 1;
    memcpy(x + i * e, &v, e);
}

/* Set about permille / 1000 of the elements x[from, to), at random indices. */
static inline void scatter(uint8_t *x, size_t from, size_t to, uint32_t permille, spccl_dtype dtype,
                           uint64_t *rng)
{
    if (permille >= 100) {
        for (size_t i = from; i < to; i++)
            if (rand_below(rng, 1000) < permille)
                put_value(x, i, dtype, rng, false);
        return;
    }
    for (size_t i = from + rand_below(rng, 2000 / permille); i < to;
         i += 1 + rand_below(rng, 2000 / permille))
        put_value(x, i, dtype, rng, false);
}

/* The patterns that lie against the way in which a warp looks at a slice. */
static inline void fill_against_warps(uint8_t *x, size_t n, spccl_dtype dtype, array_kind kind, uint64_t *rng)
{
    size_t e = spccl_dtype_bytes(dtype), unit = 16 / e, lane = rand_below(rng, 32);
    for (size_t i = 0; kind == KIND_FEW_SPECIAL && i < n; i++)
        if (rand_below(rng, 100) == 0)
            put_value(x, i, dtype, rng, true);
    for (size_t i = 0; kind == KIND_PER_UNIT && i < n; i += unit)
        if (i + unit <= n)
            put_value(x, i + rand_below(rng, (uint32_t)unit), dtype, rng, false);
    for (size_t i = 0; kind == KIND_LANE && i < n; i++)
        if (i * e / 32 % 32 == lane)
            put_value(x, i, dtype, rng, false);
    for (size_t i = 0; kind == KIND_VARYING && i < n; i += 2048)
        scatter(x, i, i + 2048 < n ? i + 2048 : n, 1 + rand_below(rng, 300), dtype, rng);
}

/* Set the highest bit of half of the zeros. */
static inline void set_signs_of_zeros(uint8_t *x, size_t n, spccl_dtype dtype, uint64_t *rng)
{
    static const uint8_t zero[8];
    size_t e = spccl_dtype_bytes(dtype);
    for (size_t i = 0; i < n; i++)
        if (memcmp(x + i * e, zero, e) == 0 && rand_below(rng, 2) == 0)
            x[(i + 1) * e - 1] = 0x80;
}

/* Fill x [n] of dtype with zeros and values in the pattern `kind`. */
static inline void fill_array(uint8_t *x, size_t n, spccl_dtype dtype, array_kind kind, uint64_t *rng)
{
    static const uint32_t permille[N_KINDS] = {
        [KIND_PERMILLE_1] = 1,   [KIND_PERCENT_1] = 10, [KIND_PERCENT_10] = 100, [KIND_PERCENT_50] = 500,
        [KIND_PERCENT_90] = 900, [KIND_FULL] = 1000,    [KIND_FULL_BLOCK] = 10,  [KIND_MASKED] = 10};
    size_t block = kind == KIND_ONE_SLICE ? 2048 : 256, from, to;
    memset(x, 0, n * spccl_dtype_bytes(dtype));
    if (n == 0)
        return;
    from = next_rand(rng) % ((n + block - 1) / block) * block;
    to = from + block < n ? from + block : n;
    if (permille[kind] != 0)
        scatter(x, 0, n, permille[kind], dtype, rng);
    if (kind == KIND_ONE)
        put_value(x, next_rand(rng) % n, dtype, rng, false);
    if (kind == KIND_ONE_BLOCK || kind == KIND_ONE_SLICE)
        scatter(x, from, to, 500, dtype, rng);
    if (kind == KIND_FULL_BLOCK)
        for (size_t i = from; i < to; i++)
            put_value(x, i, dtype, rng, false);
    if (kind == KIND_ALTERNATING || kind == KIND_SPECIAL)
        for (size_t i = 0; i < n; i += kind == KIND_SPECIAL ? 3 : 2)
            put_value(x, i, dtype, rng, kind == KIND_SPECIAL);
    if (kind == KIND_MASKED)
        set_signs_of_zeros(x, n, dtype, rng);
    fill_against_warps(x, n, dtype, kind, rng);
}

/* The first byte at which a and b [bytes] differ; `bytes` if they are equal. */
static inline size_t first_difference(const uint8_t *a, const uint8_t *b, size_t bytes)
{
    size_t i = 0;
    if (memcmp(a, b, bytes) == 0)
        return bytes;
    while (a[i] == b[i])
        i++;
    return i;
}

#endif
