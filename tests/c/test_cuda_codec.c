/* test_cuda_codec.c - spccl_cuda_encode must write the same bytes as spccl_encode, and spccl_cuda_decode the
 * same as spccl_decode. Covers every dtype, format, verb and density, edge sizes, with and without base, and
 * unaligned arrays. Nothing may be written past the end. --small: a few sizes, for sanitizers. --long or
 * SPCCL_TEST_ROUNDS=n: more cases. */
#include "cuda_test.h"

/* Bytes of the largest array. An encoded array has up to a quarter more, and up to five times as much where
 * small arrays of bytes are forced to coo. */
#define BIG_BYTES ((size_t)160 << 20)
#define SMALL_BYTES ((size_t)1 << 20)

/* Members that end in _d are on the GPU, the others are pinned host memory. */
static struct {
    size_t array_cap, encoded_cap;
    uint8_t *x, *base, *dst, *want, *got;
    uint8_t *x_d, *base_d, *dst_d;
    uint8_t *encoded, *encoded_got, *encoded_d;
    uint64_t *offsets, *offsets_d;
    size_t offsets_cap;
    uint8_t *scratch_d;
    uint32_t *status, *status_d;
    cudaStream_t on;
} g;

static void make_buffers(void)
{
    size_t array = (is_small ? SMALL_BYTES * 2 : BIG_BYTES) + 4 * GUARD_BYTES;
    g.array_cap = array;
    g.encoded_cap = array + array / 4 + (is_small ? 8 : 48) * SMALL_BYTES;
    g.offsets_cap = array / 2048 + 64;
    g.x = pinned_alloc(array), g.base = pinned_alloc(array), g.dst = pinned_alloc(array);
    g.want = pinned_alloc(array), g.got = pinned_alloc(array);
    g.x_d = device_alloc(array), g.base_d = device_alloc(array), g.dst_d = device_alloc(array);
    g.encoded = pinned_alloc(g.encoded_cap), g.encoded_got = pinned_alloc(g.encoded_cap);
    g.encoded_d = device_alloc(g.encoded_cap);
    g.offsets = (uint64_t *)pinned_alloc(g.offsets_cap * 8);
    g.offsets_d = (uint64_t *)device_alloc(g.offsets_cap * 8);
    g.scratch_d = device_alloc(g.offsets_cap * 16);
    g.status = (uint32_t *)pinned_alloc(4);
    g.status_d = (uint32_t *)device_alloc(4);
    CUDA_OK(cudaStreamCreateWithFlags(&g.on, cudaStreamNonBlocking));
}

static void upload(void *to, const void *from, size_t bytes)
{
    CUDA_OK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, g.on));
}
static void download(void *to, const void *from, size_t bytes)
{
    CUDA_OK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, g.on));
}

/* One array in g.x, with its base in g.base, and how to encode it. */
struct shot {
    spccl_dtype dtype;
    size_t n;
    array_kind kind;
    spccl_format format;
    uint32_t slice_elems; /* never 0 */
    bool has_base;
    unsigned skew; /* elements between an aligned address and x, base and dst */
};

static const char *shot_text(const struct shot *s)
{
    static char text[200];
    snprintf(text, sizeof text, "%zu %s, %s, format %s, slices of %u, %s base, skew %u", s->n,
             spccl_dtype_name(s->dtype), kind_names[s->kind], spccl_format_name(s->format), s->slice_elems,
             s->has_base ? "with" : "no", s->skew);
    return text;
}

static size_t n_slices(const struct shot *s)
{
    return (s->n + s->slice_elems - 1) / s->slice_elems;
}

/* Encode on the CPU, into g.encoded. */
static spccl_status cpu_encode(const struct shot *s, size_t *bytes)
{
    spccl_encode_options o = SPCCL_ENCODE_OPTIONS_INIT;
    o.format = s->format;
    o.slice_elems = s->slice_elems;
    o.base = s->has_base ? g.base : NULL;
    return spccl_encode(g.x, s->n, s->dtype, &o, g.encoded, g.encoded_cap, bytes);
}

/* Encode on the GPU. Copies back g.status, g.offsets, and the first `bytes` bytes to g.encoded_got. */
static void gpu_encode(const struct shot *s, size_t dst_cap, size_t bytes)
{
    spccl_encode_options o = SPCCL_ENCODE_OPTIONS_INIT;
    size_t e = spccl_dtype_bytes(s->dtype), skew = s->skew * e;
    size_t offsets_bytes = (n_slices(s) + 3) * 8;
    o.format = s->format;
    o.slice_elems = s->slice_elems;
    o.base = s->has_base ? g.base_d + skew : NULL;
    CUDA_OK(cudaMemsetAsync(g.encoded_d, POISON, bytes, g.on));
    CUDA_OK(cudaMemsetAsync(g.offsets_d, POISON, offsets_bytes, g.on));
    CUDA_OK(cudaMemsetAsync(g.status_d, POISON, 4, g.on));
    CHECK_OK(spccl_cuda_encode(g.x_d + skew, s->n, s->dtype, &o, g.encoded_d, dst_cap, g.offsets_d + 1,
                               g.scratch_d, g.status_d, g.on));
    download(g.status, g.status_d, 4);
    download(g.offsets, g.offsets_d, offsets_bytes);
    download(g.encoded_got, g.encoded_d, bytes);
    sync_stream(g.on);
}

/* Does [from, to) of what was copied back hold only poison? */
static bool untouched(const uint8_t *p, size_t from, size_t to)
{
    for (size_t i = from; i < to; i++)
        if (p[i] != POISON)
            return false;
    return true;
}

static void check_offsets(const struct shot *s, size_t bytes)
{
    uint64_t at = 0, frame_bytes;
    for (size_t i = 0; i < n_slices(s); i++) {
        CHECK(g.offsets[1 + i] == at, "%s: offsets[%zu] is %llu, wanted %llu", shot_text(s), i,
              (unsigned long long)g.offsets[1 + i], (unsigned long long)at);
        memcpy(&frame_bytes, g.encoded + at + 24, 8);
        at += frame_bytes;
    }
    CHECK(at == bytes && g.offsets[1 + n_slices(s)] == bytes, "%s: the last offset is %llu, wanted %zu",
          shot_text(s), (unsigned long long)g.offsets[1 + n_slices(s)], bytes);
    CHECK(untouched((uint8_t *)g.offsets, 0, 8) && untouched((uint8_t *)(g.offsets + n_slices(s) + 2), 0, 8),
          "%s: memory beside the offsets was written", shot_text(s));
}

/* Encode with a dst_cap that is too small for the encoded array of so many bytes. */
static void check_cut(const struct shot *s, size_t bytes, size_t dst_cap)
{
    gpu_encode(s, dst_cap, bytes + GUARD_BYTES);
    CHECK(g.status[0] == (uint32_t)-SPCCL_ERR_DST_SMALL, "%s: dst_cap %zu of %zu: status %u", shot_text(s),
          dst_cap, bytes, g.status[0]);
    CHECK(untouched(g.encoded_got, dst_cap, bytes + GUARD_BYTES), "%s: written past dst_cap %zu of %zu",
          shot_text(s), dst_cap, bytes);
}

/* Encode g.x_d, with base g.base_d, and compare. True: the encoded array is in g.encoded and on the GPU. */
static bool check_encode(const struct shot *s, size_t *bytes)
{
    spccl_status st = cpu_encode(s, bytes);
    size_t at;
    if (st != SPCCL_OK) {
        CHECK(st == SPCCL_ERR_UNSUPPORTED, "%s: the CPU says %s: %s", shot_text(s), spccl_status_name(st),
              spccl_last_error());
        gpu_encode(s, g.encoded_cap, GUARD_BYTES);
        CHECK(g.status[0] == (uint32_t)-st, "%s: status %u, the CPU says %d", shot_text(s), g.status[0],
              (int)st);
        return false;
    }
    if (*bytes > 64 && s->skew != 0) {
        check_cut(s, *bytes, *bytes - 1);
        check_cut(s, *bytes, test_rand() % *bytes);
    }
    gpu_encode(s, s->skew != 0 ? *bytes : g.encoded_cap, *bytes + GUARD_BYTES);
    CHECK(g.status[0] == 0, "%s: status %u", shot_text(s), g.status[0]);
    check_offsets(s, *bytes);
    at = first_difference(g.encoded, g.encoded_got, *bytes);
    CHECK(at == *bytes, "%s: byte %zu of %zu is %#x, the CPU's %#x", shot_text(s), at, *bytes,
          at < *bytes ? g.encoded_got[at] : 0, at < *bytes ? g.encoded[at] : 0);
    CHECK(untouched(g.encoded_got, *bytes, *bytes + GUARD_BYTES),
          "%s: bytes past the %zu of the encoded array were written", shot_text(s), *bytes);
    return at == *bytes;
}

/* Decode g.encoded_d with g.offsets_d to g.dst, which has guards around it, and compare. */
static void check_decode(const struct shot *s, size_t bytes, spccl_verb verb)
{
    size_t e = spccl_dtype_bytes(s->dtype), lead = GUARD_BYTES + s->skew * e;
    size_t all = lead + s->n * e + GUARD_BYTES, at;
    spccl_status cpu, call;
    memcpy(g.want, g.dst, all);
    upload(g.dst_d, g.dst, all);
    CUDA_OK(cudaMemsetAsync(g.status_d, POISON, 4, g.on));
    cpu = spccl_decode(g.encoded, bytes, verb, g.want + lead, s->n, s->dtype);
    call = spccl_cuda_decode(g.encoded_d, bytes, g.offsets_d + 1, verb, g.dst_d + lead, s->n, s->dtype,
                             s->slice_elems, g.status_d, g.on);
    if (verb == SPCCL_ADD && s->dtype == SPCCL_FLOAT8) {
        CHECK(call == SPCCL_ERR_UNSUPPORTED, "add of float8: %s", spccl_status_name(call));
        sync_stream(g.on);
        return;
    }
    CHECK(call == SPCCL_OK, "%s: %s", shot_text(s), spccl_last_error());
    download(g.status, g.status_d, 4);
    download(g.got, g.dst_d, all);
    sync_stream(g.on);
    CHECK(g.status[0] == (uint32_t)-cpu, "%s, verb %d: status %u, the CPU says %d", shot_text(s), (int)verb,
          g.status[0], (int)cpu);
    at = first_difference(g.want, g.got, all);
    CHECK(at == all, "%s, verb %d: byte %td of dst (element %td) is %#x, the CPU's %#x", shot_text(s),
          (int)verb, (ptrdiff_t)at - (ptrdiff_t)lead, ((ptrdiff_t)at - (ptrdiff_t)lead) / (ptrdiff_t)e,
          at < all ? g.got[at] : 0, at < all ? g.want[at] : 0);
}

/* Make x, and a base that differs from x in the pattern of the kind, on CPU and GPU. */
static void make_arrays(const struct shot *s)
{
    size_t e = spccl_dtype_bytes(s->dtype), bytes = s->n * e;
    fill_array(g.x, s->n, s->dtype, s->kind, &test_rng_state);
    if (s->has_base) { /* base is random; x equals it where the kind has zeros */
        fill_array(g.base, s->n, s->dtype, (array_kind)(test_rand() % N_KINDS), &test_rng_state);
        for (size_t i = 0; i < bytes; i++)
            g.x[i] ^= g.base[i];
        upload(g.base_d + s->skew * e, g.base, bytes);
    }
    upload(g.x_d + s->skew * e, g.x, bytes);
    /* The content of dst before decoding: values of all kinds. */
    fill_array(g.dst, (2 * GUARD_BYTES + bytes) / e + 1, s->dtype, KIND_PERCENT_50, &test_rng_state);
}

static void check_shot(const struct shot *s)
{
    size_t bytes = 0;
    if (check_encode(s, &bytes))
        for (int verb = SPCCL_SET; verb <= SPCCL_OVERWRITE; verb++)
            check_decode(s, bytes, (spccl_verb)verb);
}

/* Test one array in every format. */
static void check_formats(struct shot s)
{
    make_arrays(&s);
    for (int format = SPCCL_FORMAT_AUTO; format < SPCCL_N_FORMATS; format++) {
        s.format = (spccl_format)format;
        if (s.has_base && s.format == SPCCL_FORMAT_DENSE)
            continue; /* refused at the call: test_arguments */
        check_shot(&s);
    }
}

/* ---- cases ---- */

static void test_edges(void)
{
    static const size_t edges[] = {1,   2,    31,   32,   33,   255,  256,  257,  511,
                                   513, 2047, 2048, 2049, 4095, 4096, 4097, 12289};
    for (int round = 0; round < n_rounds; round++)
        for (int d = 1; d <= N_DTYPES; d++) {
            for (size_t i = 0; i < sizeof edges / sizeof *edges; i += is_small ? 4 : 1)
                for (int kind = is_slow ? (int)(i + (size_t)d) % 2 : 0; kind < N_KINDS; kind += is_small ? 3
                                                                                                : is_slow
                                                                                                    ? 2
                                                                                                    : 1) {
                    struct shot s = {.dtype = (spccl_dtype)d, .n = edges[i], .kind = (array_kind)kind};
                    s.slice_elems = spccl_cuda_slice_elems(s.dtype, i % 2 == 0 ? 0 : 2048);
                    s.has_base = test_rand() % 2 == 0;
                    s.skew = (unsigned)test_rand() % 2;
                    check_formats(s);
                }
        }
}

static void test_slices(void)
{
    for (int d = 1; d <= N_DTYPES; d += is_small ? 3 : 1)
        for (uint32_t wanted = 0; wanted <= 16384; wanted += is_small || is_slow ? 8192 : 2048) {
            uint32_t slice = spccl_cuda_slice_elems((spccl_dtype)d, wanted);
            const size_t edges[] = {slice - 1, slice, slice + 1, 3 * (size_t)slice + 7,
                                    40 * (size_t)slice + 1};
            for (size_t i = 0; slice != 0 && i < sizeof edges / sizeof *edges; i++) {
                struct shot s = {.dtype = (spccl_dtype)d, .n = edges[i], .slice_elems = slice};
                s.kind = (array_kind)(test_rand() % N_KINDS);
                s.has_base = test_rand() % 3 == 0;
                s.skew = (unsigned)test_rand() % 3;
                if (!is_small || i < 4)
                    check_formats(s);
            }
        }
}

/* So many slices that all CTAs run and the look-back sums cover many groups. */
static void test_million(void)
{
    for (int d = 1; d <= N_DTYPES; d += is_small ? 5 : 1)
        for (int kind = 0; kind < N_KINDS; kind += is_small ? 6 : is_slow ? 3 : 1) {
            struct shot s = {.dtype = (spccl_dtype)d, .kind = (array_kind)kind};
            s.n = (is_small || is_slow ? 50000 : 1000000) + test_rand() % 5000;
            s.slice_elems = spccl_cuda_slice_elems(s.dtype, kind % 2 == 0 ? 0 : 2048);
            s.has_base = kind % 3 == 1;
            s.skew = (unsigned)test_rand() % 2;
            check_formats(s);
        }
}

static void test_forty_million(void)
{
    static const struct {
        spccl_dtype dtype;
        array_kind kind;
    } big[] = {{SPCCL_FLOAT32, KIND_PERCENT_1},
               {SPCCL_BFLOAT16, KIND_PERCENT_10},
               {SPCCL_INT8, KIND_FULL_BLOCK},
               {SPCCL_FLOAT32, KIND_PERCENT_90}};
    for (size_t i = 0; i < sizeof big / sizeof *big && !is_small && !is_slow; i++) {
        struct shot s = {.dtype = big[i].dtype, .kind = big[i].kind, .format = SPCCL_FORMAT_AUTO, .skew = 1};
        s.n = 40000000 + test_rand() % 9999;
        s.slice_elems = spccl_cuda_slice_elems(s.dtype, 0);
        s.has_base = i == 1;
        make_arrays(&s);
        check_shot(&s);
    }
}

/* Calls that are refused and do nothing: the status word keeps its poison. */
static void test_arguments(void)
{
    spccl_encode_options o = SPCCL_ENCODE_OPTIONS_INIT, delta = o, odd = o, unknown = o;
    uint8_t *x = g.x_d, *dst = g.encoded_d;
    uint64_t *at = g.offsets_d;
    uint32_t *status = g.status_d;
    const spccl_dtype f32 = SPCCL_FLOAT32;
    delta.base = g.base_d;
    delta.format = SPCCL_FORMAT_DENSE;
    odd.slice_elems = 1000;
    unknown.format = (spccl_format)9;
    CUDA_OK(cudaMemsetAsync(status, POISON, 4, g.on));
#define ENCODE(x, n, t, o, dst, cap, at, s) spccl_cuda_encode(x, n, t, o, dst, cap, at, s, status, g.on)
#define WANT(wanted, call)                                                                                   \
    do {                                                                                                     \
        spccl_status got_ = (call);                                                                          \
        CHECK(got_ == (wanted), "%s: %s", spccl_status_name(got_), spccl_last_error());                      \
    } while (0)
    WANT(SPCCL_ERR_ARG, ENCODE(x, 0, f32, &o, dst, 4096, at, g.scratch_d));
    WANT(SPCCL_ERR_ARG, ENCODE(NULL, 9, f32, &o, dst, 4096, at, g.scratch_d));
    WANT(SPCCL_ERR_ARG, ENCODE(x + 1, 9, f32, &o, dst, 4096, at, g.scratch_d));
    WANT(SPCCL_ERR_ARG, ENCODE(x, 9, f32, &o, dst + 8, 4096, at, g.scratch_d));
    WANT(SPCCL_ERR_ARG, ENCODE(x, 9, f32, &o, dst, 4096, NULL, g.scratch_d));
    WANT(SPCCL_ERR_ARG, ENCODE(x, 9, f32, &o, dst, 4096, at, NULL));
    WANT(SPCCL_ERR_ARG, ENCODE(g.x, 9, f32, &unknown, dst, 4096, at, g.scratch_d));
    WANT(SPCCL_ERR_DTYPE, ENCODE(x, 9, (spccl_dtype)11, &o, dst, 4096, at, g.scratch_d));
    WANT(SPCCL_ERR_UNSUPPORTED, ENCODE(x, 9, f32, &odd, dst, 4096, at, g.scratch_d));
    WANT(SPCCL_ERR_UNSUPPORTED, ENCODE(x, 9, f32, &delta, dst, 4096, at, g.scratch_d));
    WANT(SPCCL_ERR_ALIAS, ENCODE(dst + 64, 9, f32, &o, dst, 4096, at, g.scratch_d));
    WANT(SPCCL_ERR_ARG, spccl_cuda_decode(dst, 64, at, (spccl_verb)3, x, 9, f32, 0, status, g.on));
    WANT(SPCCL_ERR_ARG, spccl_cuda_decode(dst + 4, 64, at, SPCCL_SET, x, 9, f32, 0, status, g.on));
    WANT(SPCCL_ERR_ARG, spccl_cuda_decode(dst, 64, at, SPCCL_SET, x + 2, 9, f32, 0, status, g.on));
    WANT(SPCCL_ERR_ARG, spccl_cuda_decode(dst, 64, NULL, SPCCL_SET, x, 9, f32, 0, status, g.on));
    WANT(SPCCL_ERR_DTYPE, spccl_cuda_decode(dst, 64, at, SPCCL_SET, x, 9, (spccl_dtype)0, 0, status, g.on));
    WANT(SPCCL_ERR_UNSUPPORTED, spccl_cuda_decode(dst, 64, at, SPCCL_SET, x, 9, f32, 100, status, g.on));
    WANT(SPCCL_ERR_ALIAS, spccl_cuda_decode(dst, 64, at, SPCCL_SET, dst + 32, 9, f32, 0, status, g.on));
#undef ENCODE
    download(g.status, status, 4);
    sync_stream(g.on);
    CHECK(untouched((const uint8_t *)g.status, 0, 4), "a refused call has written its status word");
    {
        uint8_t plain[256]; /* host memory that CUDA does not know */
        WANT(SPCCL_ERR_ARG,
             spccl_cuda_decode(dst, 64, at, SPCCL_SET, plain, 9, SPCCL_UINT8, 0, status, g.on));
    }
#undef WANT
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {{"arguments", test_arguments},
                                             {"edges", test_edges},
                                             {"slices", test_slices},
                                             {"million", test_million},
                                             {"forty_million", test_forty_million},
                                             {NULL, NULL}};
    cuda_test_start(&argc, argv);
    make_buffers();
    return test_main(cases, argc, argv);
}
