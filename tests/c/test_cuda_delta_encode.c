/* test_cuda_delta_encode.c - spccl_cuda_delta_encode must write the same bytes as spccl_delta_encode, and find the same
 * numbers. If it advances bases, these and the old values must be the same too. Covers every dtype, casts with NaNs,
 * densities, lengths around slices, lists of arrays, starts that are not aligned, and each room in dst: for staging, just
 * enough, too little. Nothing may be written past dst_cap. */
#include "core/base/delta_rule.h"
#include "core/base/dtype.h"
#include "cuda_test.h"

#define KEY UINT64_C(0x123456789abcdef1)
#define SLICE SP_DELTA_SLICE_ELEMS
#define N_MOST 40u

static cudaStream_t on;

/* How x differs from the base. */
typedef enum change {
    STEPS,
    WILD,
    SPECIAL,
    N_CHANGES
} change; /* by 1 to 300; to any bits; to NaNs, -0.0 and the like */
static const char *const change_names[N_CHANGES] = {"steps", "wild", "special"};

/* An array of a list. Members that end in _d are on the GPU. was: the base before the host advances it. */
struct array {
    uint64_t n;
    spccl_dtype x_dtype, dtype;
    uint8_t *x, *base, *was, *x_d, *base_d;
};
static struct array arrays[N_MOST];
static spccl_delta_source host[N_MOST], device[N_MOST];
static size_t n_arrays;

static void add(uint64_t n, spccl_dtype x_dtype, spccl_dtype dtype, unsigned skew)
{
    const size_t e = sp_dtype_bytes(dtype), xe = sp_dtype_bytes(x_dtype);
    struct array *a = &arrays[n_arrays];
    *a = (struct array){n,    x_dtype, dtype, malloc(n * xe + 1), malloc(n * e + 1), malloc(n * e + 1),
                        NULL, NULL};
    a->x_d = device_alloc(n * xe + 64), a->base_d = device_alloc(n * e + 64);
    const uint64_t first = 3 * n_arrays * SLICE + 5;
    host[n_arrays] = (spccl_delta_source){a->x, a->base, n, first, x_dtype, dtype, KEY + n_arrays};
    device[n_arrays] = host[n_arrays];
    device[n_arrays].x = a->x_d + skew * xe;
    device[n_arrays].base = a->base_d + skew * e;
    n_arrays++;
}

static void drop(void)
{
    for (size_t i = 0; i < n_arrays; i++) {
        free(arrays[i].x), free(arrays[i].base), free(arrays[i].was);
        CUDA_OK(cudaFree(arrays[i].x_d));
        CUDA_OK(cudaFree(arrays[i].base_d));
    }
    n_arrays = 0;
}

/* Bits of element i of x in x_dtype that round to `bits`, or of a NaN with any payload. */
static uint64_t master_of(const struct array *a, uint64_t bits, bool special)
{
    uint32_t noise = (uint32_t)next_rand(&test_rng_state), u;
    float f = a->dtype == SPCCL_BFLOAT16 ? sp_bf16_to_f32((uint16_t)bits) : sp_f16_to_f32((uint16_t)bits);
    if (a->x_dtype == a->dtype)
        return bits;
    u = sp_f32_to_bits(f);
    if (special || f != f)
        return (u & 0x80000000u) | (noise % 4 == 0 ? 0x7f800001u | noise % 0x7fffffu : u | noise % 0x1fffu);
    return noise % 4 == 0 ? u + noise % 0x7ffu : u;
}

/* Fill base and x, of which about permille / 1000 differ, of all or in some 100s of elements. */
static void fill(const struct array *a, uint32_t permille, change how)
{
    const size_t e = sp_dtype_bytes(a->dtype), xe = sp_dtype_bytes(a->x_dtype);
    for (uint64_t i = 0; i < a->n; i++) {
        uint64_t old = next_rand(&test_rng_state), now;
        if (a->dtype == SPCCL_BFLOAT16 && i % 8 == 0)
            old = 0x7fff; /* what the hardware rounds NaNs to */
        now = old;
        if (rand_below(&test_rng_state, 1000) < permille)
            now = how == STEPS ? old + 1 -
                                     rand_below(&test_rng_state, 3) *
                                         (i % 16 == 0 ? rand_below(&test_rng_state, 300) : 1)
                  : how == WILD ? next_rand(&test_rng_state)
                                : special_bits(a->dtype, rand_below(&test_rng_state, 8));
        now = master_of(a, now, how == SPECIAL && permille > rand_below(&test_rng_state, 1000));
        memcpy(a->x + i * xe, &now, xe);
        memcpy(a->base + i * e, &old, e);
    }
}

static void copy_base(size_t i, uint8_t *to, const uint8_t *from, enum cudaMemcpyKind kind)
{
    CUDA_OK(cudaMemcpyAsync(to, from, arrays[i].n * sp_dtype_bytes(arrays[i].dtype), kind, on));
}
static void upload(void)
{
    for (size_t i = 0; i < n_arrays; i++) {
        const struct array *a = &arrays[i];
        memcpy(a->was, a->base, a->n * sp_dtype_bytes(a->dtype));
        CUDA_OK(cudaMemcpyAsync((void *)(uintptr_t)device[i].x, a->x, a->n * sp_dtype_bytes(a->x_dtype),
                                cudaMemcpyHostToDevice, on));
        copy_base(i, (uint8_t *)(uintptr_t)device[i].base, a->was, cudaMemcpyHostToDevice);
    }
    sync_stream(on);
}

/* What the host wrote. */
struct wanted {
    const char *what; /* for texts */
    bool raw;
    const uint8_t *p;
    size_t bytes;
    spccl_delta_frame frames[N_MOST];
    const uint8_t *old; /* NULL: bases stay */
    size_t old_bytes;
};

static void compare_results(const struct wanted *w, const spccl_delta_frame *found, const uint8_t *got,
                            size_t bytes)
{
    CHECK(bytes == w->bytes, "%s: %zu bytes, wanted %zu", w->what, bytes, w->bytes);
    for (size_t i = 0; i < n_arrays; i++)
        CHECK(memcmp(&found[i], &w->frames[i], sizeof found[i]) == 0,
              "%s: source %zu: at %llu, %llu bytes, %llu changes, sum %llx; wanted %llu, %llu, %llu, %llx",
              w->what, i, (unsigned long long)found[i].offset, (unsigned long long)found[i].bytes,
              (unsigned long long)found[i].nnz, (unsigned long long)found[i].sum_change,
              (unsigned long long)w->frames[i].offset, (unsigned long long)w->frames[i].bytes,
              (unsigned long long)w->frames[i].nnz, (unsigned long long)w->frames[i].sum_change);
    if (bytes == w->bytes)
        CHECK(memcmp(got, w->p, bytes) == 0, "%s: byte %zu of %zu differs", w->what,
              first_difference(got, w->p, bytes), bytes);
}

/* Bases must be the host's, or after a failure as before. Puts them back. */
static void compare_bases(const struct wanted *w, bool is_advanced, const uint8_t *old_d)
{
    uint8_t *old = malloc(w->old_bytes + GUARD_BYTES + 8);
    for (size_t i = 0; i < n_arrays; i++) {
        const struct array *a = &arrays[i];
        const size_t bytes = a->n * sp_dtype_bytes(a->dtype);
        uint8_t *got = malloc(bytes + 1);
        copy_base(i, got, device[i].base, cudaMemcpyDeviceToHost);
        sync_stream(on);
        CHECK(memcmp(got, is_advanced ? a->base : a->was, bytes) == 0, "%s: base %zu differs at byte %zu",
              w->what, i, first_difference(got, is_advanced ? a->base : a->was, bytes));
        copy_base(i, (uint8_t *)(uintptr_t)device[i].base, a->was, cudaMemcpyHostToDevice);
        sync_stream(on);
        free(got);
    }
    CUDA_OK(cudaMemcpyAsync(old, old_d, w->old_bytes + GUARD_BYTES, cudaMemcpyDeviceToHost, on));
    sync_stream(on);
    for (size_t i = 0; i < n_arrays && is_advanced; i++) { /* what fills up to 8 bytes has any value */
        const size_t bytes = w->frames[i].nnz * sp_dtype_bytes(arrays[i].dtype);
        size_t at = 0;
        for (size_t k = 0; k < i; k++)
            at += (w->frames[k].nnz * sp_dtype_bytes(arrays[k].dtype) + 7) / 8 * 8;
        CHECK(memcmp(old + at, w->old + at, bytes) == 0, "%s: old values of source %zu differ", w->what, i);
    }
    for (size_t i = 0; i < GUARD_BYTES; i++)
        CHECK(old[w->old_bytes + i] == POISON, "%s: byte %zu past old_cap was written", w->what, i);
    free(old);
}

/* Encode on the GPU into room of so many bytes; compare status, results and bytes. */
static void compare(const struct wanted *w, size_t cap, spccl_status want_st)
{
    spccl_delta_options o = {sizeof o, w->raw, NULL, 0};
    spccl_delta_frame found[N_MOST];
    uint8_t *block = device_alloc(cap + GUARD_BYTES + 8), *dst_d = block + 8,
            *got = malloc(cap + GUARD_BYTES);
    uint8_t *old_d = device_alloc(w->old_bytes + GUARD_BYTES);
    size_t bytes = 0;
    spccl_status st;
    if (w->old != NULL)
        o.old = old_d, o.old_cap = w->old_bytes;
    CUDA_OK(cudaMemsetAsync(old_d, POISON, w->old_bytes + GUARD_BYTES, on));
    CUDA_OK(cudaMemsetAsync(dst_d, POISON, cap + GUARD_BYTES, on));
    st = spccl_cuda_delta_encode(device, n_arrays, &o, dst_d, cap, found, &bytes, on);
    CHECK(st == want_st, "%s: %s: %s", w->what, spccl_status_name(st),
          st == SPCCL_OK ? "" : spccl_last_error());
    CUDA_OK(cudaMemcpyAsync(got, dst_d, cap + GUARD_BYTES, cudaMemcpyDeviceToHost, on));
    sync_stream(on);
    for (size_t i = cap; i < cap + GUARD_BYTES; i++)
        CHECK(got[i] == POISON, "%s: byte %zu past dst_cap %zu was written", w->what, i - cap, cap);
    if (st == SPCCL_OK && want_st == SPCCL_OK)
        compare_results(w, found, got, bytes);
    compare_bases(w, w->old != NULL && want_st == SPCCL_OK, old_d);
    CUDA_OK(cudaFree(block));
    CUDA_OK(cudaFree(old_d));
    free(got);
}

/* Fill the arrays, encode them on the host, and on the GPU with several sizes of dst. */
static void run(uint32_t permille, change how, bool raw)
{
    spccl_delta_options o = {sizeof o, raw, NULL, 0};
    static unsigned n_runs;
    struct wanted w = {.raw = raw};
    const bool advances = n_runs++ % 2 == 0;
    size_t cap = 0;
    uint8_t *want, *old = NULL;
    char what[160];

    for (size_t i = 0; i < n_arrays; i++) {
        fill(&arrays[i], permille, how);
        cap += spccl_delta_bound(arrays[i].n, arrays[i].dtype);
    }
    snprintf(what, sizeof what, "%zu arrays, first: %llu %s of %s, %u/1000, %s%s", n_arrays,
             (unsigned long long)arrays[0].n, sp_dtype_name(arrays[0].dtype),
             sp_dtype_name(arrays[0].x_dtype), permille, change_names[how], raw ? ", raw" : "");
    upload();
    want = malloc(cap);
    CHECK_OK(spccl_delta_encode(host, n_arrays, &o, want, cap, w.frames, &w.bytes));
    if (advances) {
        for (size_t i = 0; i < n_arrays; i++)
            w.old_bytes += (w.frames[i].nnz * sp_dtype_bytes(arrays[i].dtype) + 7) / 8 * 8;
        old = malloc(w.old_bytes + 1);
        o.old = old, o.old_cap = w.old_bytes;
        CHECK_OK(spccl_delta_encode(host, n_arrays, &o, want, cap, w.frames, &w.bytes));
    }
    w.what = what, w.p = want, w.old = old;
    compare(&w, 2 * cap + 24, SPCCL_OK); /* room for staging */
    compare(&w, w.bytes, SPCCL_OK);
    compare(&w, w.bytes + w.bytes / 2, SPCCL_OK); /* for a part of it */
    compare(&w, w.bytes - 8, SPCCL_ERR_DST_SMALL);
    if (w.old_bytes != 0) {
        w.old_bytes--;
        compare(&w, 2 * cap, SPCCL_ERR_DST_SMALL);
    }
    free(want), free(old);
}

static const struct {
    spccl_dtype x, wire;
} kinds[] = {
    {SPCCL_BFLOAT16, SPCCL_BFLOAT16}, {SPCCL_FLOAT32, SPCCL_BFLOAT16}, {SPCCL_FLOAT32, SPCCL_FLOAT16},
    {SPCCL_FLOAT32, SPCCL_FLOAT32},   {SPCCL_FLOAT8, SPCCL_FLOAT8},    {SPCCL_FLOAT64, SPCCL_FLOAT64},
    {SPCCL_FLOAT16, SPCCL_FLOAT16},   {SPCCL_INT8, SPCCL_INT8},        {SPCCL_INT64, SPCCL_INT64},
    {SPCCL_INT16, SPCCL_INT16},       {SPCCL_INT32, SPCCL_INT32},      {SPCCL_UINT8, SPCCL_UINT8}};
#define N_KINDS (sizeof kinds / sizeof *kinds)

/* Lengths around units of 16 bytes, lists and slices; densities on both sides of what the lists hold (62/1000). */
static void test_lengths(void)
{
    static const uint64_t lengths[] = {1,    7,         33,    1000,      4095,
                                       4097, SLICE - 1, SLICE, SLICE + 1, 2 * SLICE + 4099};
    static const uint32_t permille[] = {0, 1, 10, 45, 61, 64, 120, 400, 1000};
    const size_t n_kinds = is_small ? 6 : N_KINDS;
    for (size_t k = 0; k < n_kinds; k++)
        for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
            const bool is_long_array = lengths[i] > 1000;
            if (is_small && lengths[i] != 1 && (i + k) % 2 == 0)
                continue;
            add(lengths[i], kinds[k].x, kinds[k].wire, 0);
            /* On the GPU in software some densities, others for each dtype and length. */
            const size_t step = is_small ? (is_long_array ? 9 : 3) : is_slow ? (is_long_array ? 6 : 3) : 1;
            for (size_t d = (k + i) % step; d < sizeof permille / sizeof *permille; d += step)
                run(permille[d], (change)((i + d) % N_CHANGES), (i + d) % 5 == 4);
            drop();
        }
}

/* A list of arrays of all dtypes, some without elements; starts that are not aligned to 16 bytes. */
static void test_lists(void)
{
    for (int round = 0; round < (is_small ? 1 : is_slow ? 3 : 6) * n_rounds; round++) {
        for (size_t i = 0; i < N_MOST; i++) {
            const size_t k = rand_below(&test_rng_state, N_KINDS);
            const uint64_t n =
                i % 9 == 4 ? 0 : rand_below(&test_rng_state, i % 5 == 0 && !is_small ? 2 * SLICE : 5000);
            add(n, kinds[k].x, kinds[k].wire, i % 3 == 0 ? rand_below(&test_rng_state, 8) : 0);
        }
        run(round % 2 == 0 ? 10 : 1 + rand_below(&test_rng_state, 300), (change)(round % N_CHANGES),
            round % 4 == 3);
        drop();
    }
}

/* Changes that lie together: one warp's list is full while the others are empty; a slice with one change at its end. */
static void test_clusters(void)
{
    for (size_t k = 0; k < (is_small ? 2 : N_KINDS); k++) {
        const size_t e = sp_dtype_bytes(kinds[k].wire);
        add(2 * SLICE, kinds[k].wire, kinds[k].wire, 0);
        fill(&arrays[0], 0, STEPS);
        for (size_t i = 0; i < 3000; i++)
            arrays[0].x[(i / 512 * 4096 + i % 512 + 7) * e] ^= 1;
        arrays[0].x[(2 * SLICE - 1) * e] ^= 3;
        upload();
        size_t cap = spccl_delta_bound(2 * SLICE, kinds[k].wire);
        uint8_t *want = malloc(cap);
        struct wanted w = {.what = "clusters", .p = want};
        CHECK_OK(spccl_delta_encode(host, 1, NULL, want, cap, w.frames, &w.bytes));
        compare(&w, cap, SPCCL_OK);
        w.old_bytes = (w.frames[0].nnz * e + 7) / 8 * 8;
        spccl_delta_options o = {sizeof o, 0, malloc(w.old_bytes), w.old_bytes};
        CHECK_OK(spccl_delta_encode(host, 1, &o, want, cap, w.frames, &w.bytes));
        w.old = o.old, w.what = "clusters, bases advanced";
        compare(&w, 2 * cap, SPCCL_OK);
        compare(&w, w.bytes + w.bytes / 4, SPCCL_OK);
        compare(&w, w.bytes - 8, SPCCL_ERR_DST_SMALL);
        free(o.old);
        free(want);
        drop();
    }
}

/* Bases that advance overlap no other array with elements, on the host as on a GPU. */
static void test_apart(void)
{
    static uint8_t memory[512], old[512], dst[1024];
    spccl_delta_source pair[2] = {{memory, memory + 64, 64, 0, SPCCL_INT8, SPCCL_INT8, 1},
                                  {memory + 128, memory + 192, 64, 0, SPCCL_INT8, SPCCL_INT8, 2}};
    spccl_delta_options o = {sizeof o, 0, old, sizeof old};
    spccl_delta_frame two[2];
    size_t bytes;
#define PAIR() spccl_delta_encode(pair, 2, &o, dst, sizeof dst, two, &bytes)
    CHECK_OK(PAIR());
    pair[1].base = memory + 129;
    CHECK_FAILS(PAIR(), SPCCL_ERR_ALIAS, "sources[1].base and sources[1].x overlap");
    pair[1].base = memory + 100;
    CHECK_FAILS(PAIR(), SPCCL_ERR_ALIAS, "sources[1].base and sources[0].base overlap");
    pair[1].base = memory + 192, pair[0].x = memory + 200;
    CHECK_FAILS(PAIR(), SPCCL_ERR_ALIAS, "sources[0].x and sources[1].base overlap");
    pair[0].x = memory, pair[1].base = memory + 80, pair[1].n_elems = 0;
    CHECK_OK(PAIR());
#undef PAIR
}

static void test_refusals(void)
{
    spccl_delta_options o = {sizeof o, 2, NULL, 0};
    spccl_delta_frame frame;
    size_t bytes = 7;
    uint8_t *dst = device_alloc(4096);
    cudaGraph_t graph;

    CHECK_OK(spccl_cuda_delta_encode(NULL, 0, NULL, NULL, 0, NULL, &bytes, on));
    CHECK(bytes == 0, "%zu bytes of no source", bytes);
    add(100, SPCCL_BFLOAT16, SPCCL_BFLOAT16, 0);
#define ENCODE(source, options, to)                                                                          \
    spccl_cuda_delta_encode(&(source), 1, options, to, 4096, &frame, &bytes, on)
    CHECK_FAILS(ENCODE(device[0], &o, dst), SPCCL_ERR_ARG, "raw 2");
    CHECK_FAILS(ENCODE(host[0], NULL, dst), SPCCL_ERR_ARG, "sources[0].x");
    CHECK_FAILS(ENCODE(device[0], NULL, arrays[0].x), SPCCL_ERR_ARG, "dst");
    CHECK_FAILS(ENCODE(device[0], NULL, dst + 4), SPCCL_ERR_ARG, "aligned to 8");
    o = (spccl_delta_options){sizeof o, 0, dst + 64, 64};
    CHECK_FAILS(ENCODE(device[0], &o, dst), SPCCL_ERR_ALIAS, "options->old");
    device[0].base = device[0].x;
    o.old = dst + 2048;
    CHECK_FAILS(spccl_cuda_delta_encode(device, 1, &o, dst, 1024, &frame, &bytes, on), SPCCL_ERR_ALIAS,
                "overlap, and options->old advances bases");
    device[0].base = arrays[0].base_d;
    o.old = arrays[0].base;
    CHECK_FAILS(ENCODE(device[0], &o, dst), SPCCL_ERR_ARG, "options->old");
    CHECK_FAILS(ENCODE(device[0], NULL, (uint8_t *)(uintptr_t)device[0].x), SPCCL_ERR_ALIAS, "overlap");
    device[0].base = (const uint8_t *)device[0].base + 1;
    CHECK_FAILS(ENCODE(device[0], NULL, dst), SPCCL_ERR_ARG, "sources[0].base");
    device[0].base = arrays[0].base_d;
    device[0].x_dtype = SPCCL_FLOAT64;
    CHECK_FAILS(ENCODE(device[0], NULL, dst), SPCCL_ERR_DTYPE, "sources[0]: x_dtype float64");
    device[0].x_dtype = SPCCL_BFLOAT16;
    CUDA_OK(cudaStreamBeginCapture(on, cudaStreamCaptureModeThreadLocal));
    CHECK_FAILS(ENCODE(device[0], NULL, dst), SPCCL_ERR_UNSUPPORTED, "captured");
    CUDA_OK(cudaStreamEndCapture(on, &graph));
    CUDA_OK(cudaGraphDestroy(graph));
    drop();
    CUDA_OK(cudaFree(dst));
}

/* Only this finds a wait of the encoder without a deadline: its stream has work that takes longer. */
static void test_deadline(void)
{
    enum { BYTES = 256 << 20, N_WRITES = 64 }; /* 4 ms of the fastest GPU */
    uint8_t *dst = device_alloc(4096), *busy = device_alloc(BYTES);
    spccl_delta_frame frame;
    size_t bytes;

    add(100, SPCCL_BFLOAT16, SPCCL_BFLOAT16, 0);
    CUDA_OK(cudaMemsetAsync(arrays[0].x_d, 0, 200, on));
    CUDA_OK(cudaMemsetAsync(arrays[0].base_d, 0, 200, on));
    CHECK(setenv("SPCCL_TIMEOUT_MS", "1", 1) == 0, "setenv");
    for (int i = 0; i < N_WRITES; i++)
        CUDA_OK(cudaMemsetAsync(busy, i, BYTES, on));
    CHECK_FAILS(ENCODE(device[0], NULL, dst), SPCCL_ERR_TIMEOUT, "still had work after 1 ms");
    CHECK(unsetenv("SPCCL_TIMEOUT_MS") == 0, "unsetenv");
    CHECK_OK(ENCODE(device[0], NULL, dst)); /* waits for that work */
    CHECK(frame.nnz == 0, "%llu changes", (unsigned long long)frame.nnz);
    drop();
    CUDA_OK(cudaFree(busy));
    CUDA_OK(cudaFree(dst));
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {{"refusals", test_refusals},
                                             {"apart", test_apart},
                                             {"deadline", test_deadline},
                                             {"lists", test_lists},
                                             {"clusters", test_clusters},
                                             {"lengths", test_lengths},
                                             {NULL, NULL}};
    cuda_test_start(&argc, argv);
    CUDA_OK(cudaStreamCreateWithFlags(&on, cudaStreamNonBlocking));
    return test_main(cases, argc, argv);
}
