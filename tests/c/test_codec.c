/* test_codec.c - core/format/codec.c, array_codec.c and tune_format.c. Round trips of every dtype, format and
 * verb, with and without base; errors. The choice of format never changes a decoded bit. */
#include "core/base/dtype.h"
#include "core/format/codec.h"
#include "test.h"

static const size_t sizes[] = {0, 1, 31, 32, 33, 63, 64, 65, 255, 256, 257, 4095, 4096, 4097, 3 * 4096 + 7};
#define N_SIZES (sizeof sizes / sizeof *sizes)

/* ---- arrays ---- */

/* Bit patterns that arithmetic or a wrong comparison with zero would change. An element is the low bytes of
 * such a word. */
static uint64_t special_bits(void)
{
    static const uint64_t words[] = {0x8000000000000000u, /* -0.0 of float64 */
                                     0x7ff0000000000001u,
                                     0x7ff8000000000000u,
                                     0xfff0000000000000u,
                                     0x0000000000000001u,
                                     0x80000000u,
                                     0x7f800001u,
                                     0x7fc00000u,
                                     0xff800000u,
                                     0x807fffffu,
                                     0x8000u,
                                     0x7c01u,
                                     0x7e00u,
                                     0x83ffu,
                                     0x7f81u,
                                     0x80u};
    return words[test_rand() % (sizeof words / sizeof *words)];
}

/* An array [n] of elements of eb bytes, in memory of exactly that size. About one element in `every` is
 * nonzero (0: none, 1: all). One nonzero in eight is a special pattern. */
static uint8_t *random_array(size_t n, size_t eb, unsigned every)
{
    uint8_t *x = malloc(n * eb != 0 ? n * eb : 1);
    memset(x, 0, n * eb);
    for (size_t i = 0; i < n && every != 0; i++) {
        uint64_t v = test_rand() % 8 == 0 ? special_bits() : test_rand();
        if (every != 1 && test_rand() % every != 0)
            continue;
        memcpy(x + i * eb, &v, eb);
        if (every == 1)
            x[i * eb] |= 1;
    }
    return x;
}

static uint8_t *copy_of(const void *p, size_t bytes)
{
    uint8_t *c = malloc(bytes != 0 ? bytes : 1);
    memcpy(c, p, bytes);
    return c;
}

static uint8_t *poison(size_t bytes)
{
    uint8_t *p = malloc(bytes != 0 ? bytes : 1);
    for (size_t i = 0; i < bytes; i++)
        p[i] = (uint8_t)(i % 251 + 1);
    return p;
}

static int is_listed(const uint8_t *x, const uint8_t *base, size_t i, size_t eb)
{
    static const uint8_t zero[8];
    return memcmp(x + i * eb, base != NULL ? base + i * eb : zero, eb) != 0;
}

/* ---- encode, with checks of what must hold for any data ---- */

struct encoded {
    uint8_t *p;
    size_t bytes;
    spccl_status st;
};

static struct encoded encode(const void *x, size_t n, spccl_dtype dtype, const spccl_encode_options *o)
{
    struct encoded s = {NULL, SIZE_MAX, SPCCL_OK};
    size_t cap = spccl_encode_bound(n, dtype, o), again = SIZE_MAX;
    uint8_t *tmp = malloc(cap);

    CHECK(cap >= 64, "bound %zu", cap);
    memset(tmp, 0xa5, cap);
    s.st = spccl_encode(x, n, dtype, o, tmp, cap, &s.bytes);
    if (s.st != SPCCL_OK) {
        CHECK(s.bytes == SIZE_MAX, "out_bytes touched on failure");
        free(tmp);
        return s;
    }
    CHECK(s.bytes <= cap, "%zu of %zu bytes", s.bytes, cap);
    s.p = malloc(s.bytes); /* a dst of exactly this size must be enough */
    CHECK_OK(spccl_encode(x, n, dtype, o, s.p, s.bytes, &again));
    CHECK(again == s.bytes && memcmp(s.p, tmp, s.bytes) == 0, "the second call gave other bytes");
    again = SIZE_MAX;
    CHECK(spccl_encode(x, n, dtype, o, tmp, s.bytes - 1, &again) == SPCCL_ERR_DST_SMALL && again == SIZE_MAX,
          "one byte less: %s", spccl_last_error());
    free(tmp);
    return s;
}

/* What decoding makes of dst, element by element (FORMAT.md 5). ADD works for integers only. */
static void apply_plain(spccl_verb verb, uint8_t *dst, const uint8_t *x, const uint8_t *base, size_t n,
                        size_t eb)
{
    for (size_t i = 0; i < n; i++) {
        uint64_t a = 0, b = 0;
        if (!is_listed(x, base, i, eb)) {
            if (verb == SPCCL_SET)
                memset(dst + i * eb, 0, eb);
            continue;
        }
        memcpy(&a, dst + i * eb, eb);
        memcpy(&b, x + i * eb, eb);
        b += verb == SPCCL_ADD ? a : 0;
        memcpy(dst + i * eb, &b, eb);
    }
}

static int is_integer(spccl_dtype t)
{
    return t >= SPCCL_INT8;
}

static void check_decodes(const struct encoded *s, const uint8_t *x, const uint8_t *base, size_t n,
                          spccl_dtype dtype)
{
    size_t eb = sp_dtype_bytes(dtype), bytes = n * eb;
    uint8_t *got, *want;

    for (int v = SPCCL_SET; v <= SPCCL_OVERWRITE; v++) {
        spccl_verb verb = (spccl_verb)v;
        if ((verb == SPCCL_SET && base != NULL) || (verb == SPCCL_ADD && !is_integer(dtype)))
            continue;
        got = poison(bytes);
        want = poison(bytes);
        apply_plain(verb, want, x, base, n, eb);
        CHECK_OK(spccl_decode(s->p, s->bytes, verb, got, n, dtype));
        CHECK(memcmp(got, want, bytes) == 0, "verb %d, %s, n %zu: other bytes", v, sp_dtype_name(dtype), n);
        free(got);
        free(want);
    }
    got = copy_of(base != NULL ? base : x, bytes);
    CHECK_OK(spccl_decode(s->p, s->bytes, SPCCL_OVERWRITE, got, n, dtype));
    CHECK(memcmp(got, x, bytes) == 0, "overwrite on a copy of the base, %s, n %zu", sp_dtype_name(dtype), n);
    free(got);
}

static void check_formats(const struct encoded *s, spccl_format want, int is_delta, size_t n)
{
    size_t total = 0;
    for (size_t at = 0; at < s->bytes;) {
        spccl_frame_info info = {.struct_bytes = sizeof info};
        CHECK_OK(spccl_frame_inspect(s->p + at, s->bytes - at, &info));
        CHECK(want == SPCCL_FORMAT_AUTO || info.format == want || info.n_elems == 0, "format %s",
              spccl_format_name(info.format));
        CHECK(info.version == 1 && info.is_delta == (uint32_t)is_delta, "version %u, delta %u", info.version,
              info.is_delta);
        at += info.frame_bytes;
        total += info.n_elems;
    }
    CHECK(total == n, "%zu elements in the frames, wanted %zu", total, n);
}

/* True if every slice of x can take this format. */
static int fits(spccl_format format, const uint8_t *x, const uint8_t *base, size_t n, size_t eb)
{
    size_t listed = 0, in_block = 0;
    int full = 0;
    for (size_t i = 0; i < n; i++) {
        in_block = i % 256 == 0 ? 0 : in_block;
        in_block += (size_t)is_listed(x, base, i, eb);
        listed += (size_t)is_listed(x, base, i, eb);
        full |= in_block == 256;
    }
    switch (format) {
    case SPCCL_FORMAT_EMPTY:
        return listed == 0;
    case SPCCL_FORMAT_TILE:
        return !full;
    case SPCCL_FORMAT_DENSE:
        return base == NULL || n == 0;
    case SPCCL_FORMAT_AUTO:
    case SPCCL_FORMAT_DELTA:
    case SPCCL_FORMAT_PICI:
    case SPCCL_FORMAT_COO:
        break;
    }
    return 1;
}

static void round_trip(size_t n, spccl_dtype dtype, unsigned every, int with_base)
{
    size_t eb = sp_dtype_bytes(dtype);
    uint8_t *x = random_array(n, eb, every), *base = NULL;

    if (with_base) { /* base: x with some elements changed */
        base = copy_of(x, n * eb);
        for (size_t i = 0; i < n; i++)
            base[i * eb + test_rand() % eb] ^=
                (uint8_t)(test_rand() % (every + 1) == 0 ? 1 + test_rand() % 255 : 0);
    }
    for (int f = SPCCL_FORMAT_AUTO; f < SPCCL_N_FORMATS; f++) {
        spccl_encode_options o = SPCCL_ENCODE_OPTIONS_INIT;
        struct encoded s;
        o.format = (spccl_format)f;
        o.base = base;
        o.slice_elems = test_rand() % 2 == 0 ? 4096 : 0;
        s = encode(x, n, dtype, &o);
        if (!fits(o.format, x, base, n, eb)) {
            CHECK(s.st == SPCCL_ERR_UNSUPPORTED &&
                      strstr(spccl_last_error(), spccl_format_name(o.format)) != NULL,
                  "%s forced: %s: %s", spccl_format_name(o.format), spccl_status_name(s.st),
                  spccl_last_error());
            continue;
        }
        CHECK(s.st == SPCCL_OK, "%s, n %zu, 1/%u: %s", spccl_format_name(o.format), n, every,
              spccl_last_error());
        if (s.st != SPCCL_OK)
            continue;
        check_formats(&s, o.format, with_base, n);
        check_decodes(&s, x, base, n, dtype);
        free(s.p);
    }
    free(base);
    free(x);
}

static void test_round_trips(void)
{
    static const unsigned everies[] = {0, 1, 2, 9, 100};
    size_t share = (size_t)test_share;
    for (size_t i = 0; i < N_SIZES; i++) {
        for (unsigned t = SPCCL_FLOAT32; t <= SPCCL_UINT8; t++) {
            for (size_t e = (i + t) % share; e < sizeof everies / sizeof *everies; e += share) {
                round_trip(sizes[i], (spccl_dtype)t, everies[e], 0);
                round_trip(sizes[i], (spccl_dtype)t, everies[e], 1);
            }
        }
    }
    round_trip(65536 * 2 + 4097, SPCCL_FLOAT32, 50, 0); /* several default slices */
    round_trip(65536 * 2 + 4097, SPCCL_BFLOAT16, 50, 1);
}

/* ---- the format never changes a bit of the result, also when floats are added ---- */

static void check_same_bits(size_t n, spccl_dtype dtype, unsigned every, spccl_verb verb)
{
    size_t eb = sp_dtype_bytes(dtype);
    uint8_t *x = random_array(n, eb, every), *first = NULL;

    for (size_t i = 0; i < n; i += 251)
        memset(x + i * eb, 0, eb); /* a zero in each block of 256, so that tile is possible */
    for (int f = SPCCL_FORMAT_AUTO; f < SPCCL_N_FORMATS; f++) {
        spccl_encode_options o = SPCCL_ENCODE_OPTIONS_INIT;
        uint8_t *dst = poison(n * eb);
        struct encoded s;
        if (f == SPCCL_FORMAT_EMPTY) {
            free(dst);
            continue;
        }
        o.format = (spccl_format)f;
        s = encode(x, n, dtype, &o);
        CHECK_OK(spccl_decode(s.p, s.bytes, verb, dst, n, dtype));
        free(s.p);
        if (first == NULL)
            first = copy_of(dst, n * eb);
        CHECK(memcmp(first, dst, n * eb) == 0, "format %d, verb %d, %s, n %zu: other bits", f, (int)verb,
              sp_dtype_name(dtype), n);
        free(dst);
    }
    free(first);
    free(x);
}

static void test_format_never_changes_bits(void)
{
    int n = (int)(test_rand() % 1000);
    for (size_t i = 1; i < N_SIZES; i++) {
        for (unsigned t = SPCCL_FLOAT32; t <= SPCCL_UINT8; t++) {
            for (unsigned every = 1; every <= 64; every *= 4) {
                if ((n++ + (int)(i + t)) % test_share != 0)
                    continue;
                check_same_bits(sizes[i], (spccl_dtype)t, every, SPCCL_SET);
                check_same_bits(sizes[i], (spccl_dtype)t, every, SPCCL_OVERWRITE);
                if (sp_dtype_can_reduce((spccl_dtype)t))
                    check_same_bits(sizes[i], (spccl_dtype)t, every, SPCCL_ADD);
            }
        }
    }
}

/* ---- alignment ---- */

/* x, encoded array and dst start at odd addresses. */
static void test_alignment(void)
{
    enum { N = 5000 };
    for (unsigned t = SPCCL_FLOAT32; t <= SPCCL_UINT8; t++) {
        spccl_dtype dtype = (spccl_dtype)t;
        size_t bytes = N * sp_dtype_bytes(dtype);
        uint8_t *x = random_array(N, sp_dtype_bytes(dtype), 7), *odd_x = malloc(bytes + 1),
                *odd = malloc(bytes + 1);
        memcpy(odd_x + 1, x, bytes);
        for (int f = SPCCL_FORMAT_TILE; f < SPCCL_N_FORMATS; f++) {
            spccl_encode_options o = SPCCL_ENCODE_OPTIONS_INIT;
            struct encoded s, plain;
            uint8_t *moved;
            o.format = (spccl_format)f;
            s = encode(odd_x + 1, N, dtype, &o);
            plain = encode(x, N, dtype, &o);
            CHECK(s.bytes == plain.bytes && memcmp(s.p, plain.p, s.bytes) == 0,
                  "alignment of x changes the encoded array");
            moved = malloc(s.bytes + 1);
            memcpy(moved + 1, s.p, s.bytes);
            CHECK_OK(spccl_decode(moved + 1, s.bytes, SPCCL_SET, odd + 1, N, dtype));
            CHECK(memcmp(odd + 1, x, bytes) == 0, "format %d, %s: other bytes", f, sp_dtype_name(dtype));
            free(moved);
            free(plain.p);
            free(s.p);
        }
        free(odd);
        free(odd_x);
        free(x);
    }
}

/* ---- the internal codec: 16-bit floats added to a float32 accumulator ---- */

static void test_add_into_float32(void)
{
    enum { N = 4096 + 300 };
    static const spccl_dtype dtypes[] = {SPCCL_FLOAT16, SPCCL_BFLOAT16};
    const sp_kernels *k;

    CHECK_OK(sp_kernels_pick(&k));
    for (int c = 0; c < 2 * SPCCL_N_FORMATS; c++) {
        spccl_dtype dtype = dtypes[c % 2];
        uint16_t *x = calloc(N, 2);
        float *acc = calloc(N, 4);
        spccl_encode_options o = SPCCL_ENCODE_OPTIONS_INIT;
        struct encoded s;
        sp_frame f;
        o.format = (spccl_format)(c / 2);
        o.slice_elems = 8192;
        for (size_t i = 0; i < N; i++) {
            x[i] = o.format != SPCCL_FORMAT_EMPTY && i % 3 == 0 ? (uint16_t)(0x3c00 + i % 500) : 0;
            acc[i] = (float)i;
        }
        s = encode(x, N, dtype, &o);
        CHECK_OK(sp_frame_validate(s.p, s.bytes, &f));
        CHECK_OK(sp_codec_apply(k, &f, SPCCL_ADD, acc, SPCCL_FLOAT32, false));
        for (size_t i = 0; i < N; i++) {
            float v = dtype == SPCCL_FLOAT16 ? sp_f16_to_f32(x[i]) : sp_bf16_to_f32(x[i]);
            CHECK(acc[i] == (float)i + v, "format %d, element %zu", c / 2, i);
        }
        CHECK(sp_codec_apply(k, &f, SPCCL_SET, acc, SPCCL_FLOAT32, false) == SPCCL_ERR_BUG,
              "set into float32");
        free(s.p);
        free(acc);
        free(x);
    }
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {
        {"round_trips", test_round_trips},
        {"format_never_changes_bits", test_format_never_changes_bits},
        {"alignment", test_alignment},
        {"add_into_float32", test_add_into_float32},
        {NULL, NULL},
    };
    return test_main(cases, argc, argv);
}
