/* test_array_codec.c - core/format/array_codec.c: arguments, errors and slices of the public codec functions.
 * test_codec.c and test_format.c test the bytes. */
#include "core/format/format.h"
#include "test.h"

struct encoded {
    uint8_t *p;
    size_t bytes;
};

/* Encode x to memory of exactly the size of the encoded array. */
static struct encoded encode(const void *x, size_t n, spccl_dtype dtype, const spccl_encode_options *o)
{
    size_t cap = spccl_encode_bound(n, dtype, o);
    struct encoded s = {malloc(cap), 0};
    CHECK_OK(spccl_encode(x, n, dtype, o, s.p, cap, &s.bytes));
    s.p = realloc(s.p, s.bytes);
    return s;
}

/* ---- slices ---- */

static void test_slices(void)
{
    enum { N = 5 * 4096 + 100 };
    static float x[N];
    static const spccl_format want[] = {SPCCL_FORMAT_EMPTY, SPCCL_FORMAT_TILE,  SPCCL_FORMAT_PICI,
                                        SPCCL_FORMAT_DENSE, SPCCL_FORMAT_EMPTY, SPCCL_FORMAT_COO};
    spccl_encode_options o = SPCCL_ENCODE_OPTIONS_INIT;
    struct encoded s;
    size_t at = 0;

    for (int i = 0; i < 4096; i++) {
        x[4096 + i] = i % 50 == 0 ? 1.0f : 0.0f; /* 2%: tile */
        x[8192 + i] = i % 2 == 0 ? 1.0f : 0.0f;  /* 50%: pici */
        x[12288 + i] = (float)(i + 1);           /* all: dense */
    }
    x[N - 1] = 3.0f; /* one of 100: tile takes 16 + 16 + 16 bytes, coo 16 + 16 */
    o.slice_elems = 4096;
    s = encode(x, N, SPCCL_FLOAT32, &o);
    for (size_t i = 0; i < 6; i++) {
        spccl_frame_info info = {.struct_bytes = sizeof info};
        CHECK_OK(spccl_frame_inspect(s.p + at, s.bytes - at, &info));
        CHECK(info.format == want[i], "slice %zu: %s, wanted %s", i, spccl_format_name(info.format),
              spccl_format_name(want[i]));
        CHECK(info.n_elems == (i < 5 ? 4096 : 100), "slice %zu: %llu elements", i,
              (unsigned long long)info.n_elems);
        at += info.frame_bytes;
    }
    CHECK(at == s.bytes, "%zu of %zu bytes", at, s.bytes);
    free(s.p);
}

/* The third frame is bad: decode writes the elements of the first two frames, and no others. */
static void test_bad_frame_in_an_array(void)
{
    enum { N = 3 * 4096 + 50 };
    static int16_t x[N], dst[N];
    spccl_encode_options o = SPCCL_ENCODE_OPTIONS_INIT;
    struct encoded s;
    size_t at = 0;

    for (int i = 0; i < N; i++) {
        x[i] = (int16_t)(test_rand() % 3 == 0 ? i + 1 : 0);
        dst[i] = -7;
    }
    o.slice_elems = 4096;
    o.format = SPCCL_FORMAT_COO;
    s = encode(x, N, SPCCL_INT16, &o);
    for (int i = 0; i < 2; i++) {
        spccl_frame_info info = {.struct_bytes = sizeof info};
        CHECK_OK(spccl_frame_inspect(s.p + at, s.bytes - at, &info));
        at += info.frame_bytes;
    }
    sp_store_le32(s.p + at + 64 + 4, UINT32_MAX);
    CHECK_FAILS(spccl_decode(s.p, s.bytes, SPCCL_SET, dst, N, SPCCL_INT16), SPCCL_ERR_FORMAT,
                "after 4294967295");
    CHECK(memcmp(dst, x, 2 * 8192) == 0, "the frames before the bad one");
    for (int i = 8192; i < N; i++)
        CHECK(dst[i] == -7, "element %d: the bad frame and what follows", i);
    free(s.p);
}

/* ---- arguments and errors ---- */

static void test_encode_arguments(void)
{
    float x[300] = {[7] = 1.0f};
    uint8_t dst[4096];
    size_t bytes = 77, huge = SIZE_MAX / 4 + 1;
    spccl_encode_options o = SPCCL_ENCODE_OPTIONS_INIT;

    CHECK_FAILS(spccl_encode(NULL, 1, SPCCL_FLOAT32, NULL, dst, 4096, &bytes), SPCCL_ERR_ARG, "x is NULL");
    CHECK_FAILS(spccl_encode(x, 300, SPCCL_FLOAT32, NULL, NULL, 4096, &bytes), SPCCL_ERR_ARG, "dst is NULL");
    CHECK_FAILS(spccl_encode(x, 300, SPCCL_FLOAT32, NULL, dst, 4096, NULL), SPCCL_ERR_ARG,
                "out_bytes is NULL");
    CHECK_FAILS(spccl_encode(x, 300, (spccl_dtype)0, NULL, dst, 4096, &bytes), SPCCL_ERR_DTYPE, "dtype 0");
    CHECK_FAILS(spccl_encode(x, 300, (spccl_dtype)11, NULL, dst, 4096, &bytes), SPCCL_ERR_DTYPE, "dtype 11");
    CHECK_FAILS(spccl_encode(x, huge, SPCCL_FLOAT32, NULL, dst, 4096, &bytes), SPCCL_ERR_ARG, "overflow");
    CHECK_FAILS(spccl_encode(x, 300, SPCCL_FLOAT32, NULL, (uint8_t *)x + 1199, 4096, &bytes), SPCCL_ERR_ALIAS,
                "x (");
    o.base = dst + 16;
    CHECK_FAILS(spccl_encode(x, 300, SPCCL_FLOAT32, &o, dst, 4096, &bytes), SPCCL_ERR_ALIAS, "base (");
    o.base = NULL;
    o.format = (spccl_format)5;
    CHECK_FAILS(spccl_encode(x, 300, SPCCL_FLOAT32, &o, dst, 4096, &bytes), SPCCL_ERR_ARG, "format 5");
    CHECK(spccl_encode_bound(300, SPCCL_FLOAT32, &o) == 0, "bound of format 5");
    o.format = (spccl_format)-2;
    CHECK_FAILS(spccl_encode(x, 300, SPCCL_FLOAT32, &o, dst, 4096, &bytes), SPCCL_ERR_ARG, "format -2");
    o.format = SPCCL_FORMAT_AUTO;
    o.slice_elems = 4095;
    CHECK_FAILS(spccl_encode(x, 300, SPCCL_FLOAT32, &o, dst, 4096, &bytes), SPCCL_ERR_ARG,
                "slice_elems 4095");
    o.slice_elems = (1u << 31) + 4096;
    CHECK_FAILS(spccl_encode(x, 300, SPCCL_FLOAT32, &o, dst, 4096, &bytes), SPCCL_ERR_ARG,
                "slice_elems 2147487744");
    CHECK(bytes == 77, "out_bytes touched on failure");
    CHECK(spccl_encode_bound(huge, SPCCL_FLOAT32, NULL) == 0, "bound of too many");
    CHECK(spccl_encode_bound(SIZE_MAX, SPCCL_UINT8, NULL) == 0, "bound of SIZE_MAX");
    CHECK(spccl_encode_bound(1, (spccl_dtype)0, NULL) == 0, "bound of dtype 0");
    CHECK_OK(spccl_encode(NULL, 0, SPCCL_FLOAT32, NULL, dst, 64, &bytes));
    CHECK(bytes == 64, "%zu bytes for no elements", bytes);
}

static void test_inspect_arguments(void)
{
    uint8_t dst[256];
    size_t bytes = 0;
    spccl_frame_info info = {.struct_bytes = sizeof info};

    CHECK_OK(spccl_encode(NULL, 0, SPCCL_FLOAT32, NULL, dst, sizeof dst, &bytes));
    CHECK_FAILS(spccl_frame_inspect(NULL, bytes, &info), SPCCL_ERR_ARG, "encoded is NULL");
    CHECK_FAILS(spccl_frame_inspect(dst, bytes, NULL), SPCCL_ERR_ARG, "out is NULL");
}

static void test_decode_arguments(void)
{
    float x[300] = {[7] = 1.0f}, y[300], base[300] = {0};
    struct encoded s = encode(x, 300, SPCCL_FLOAT32, NULL), delta;
    spccl_encode_options o = SPCCL_ENCODE_OPTIONS_INIT;
    uint8_t *p = s.p;
    size_t b = s.bytes, huge = SIZE_MAX / 4 + 1;

    CHECK_FAILS(spccl_decode(NULL, b, SPCCL_SET, y, 300, SPCCL_FLOAT32), SPCCL_ERR_ARG, "encoded is NULL");
    CHECK_FAILS(spccl_decode(p, b, SPCCL_SET, NULL, 300, SPCCL_FLOAT32), SPCCL_ERR_ARG, "dst is NULL");
    CHECK_FAILS(spccl_decode(p, b, (spccl_verb)3, y, 300, SPCCL_FLOAT32), SPCCL_ERR_ARG, "verb 3");
    CHECK_FAILS(spccl_decode(p, b, (spccl_verb)-1, y, 300, SPCCL_FLOAT32), SPCCL_ERR_ARG, "verb -1");
    CHECK_FAILS(spccl_decode(p, b, SPCCL_SET, y, 300, (spccl_dtype)99), SPCCL_ERR_DTYPE, "dtype 99");
    CHECK_FAILS(spccl_decode(p, b, SPCCL_SET, y, huge, SPCCL_FLOAT32), SPCCL_ERR_ARG, "overflow");
    CHECK_FAILS(spccl_decode(p, b, SPCCL_SET, p + b - 1, 300, SPCCL_FLOAT32), SPCCL_ERR_ALIAS, "overlap");
    CHECK_FAILS(spccl_decode(p, b, SPCCL_SET, y, 300, SPCCL_INT32), SPCCL_ERR_FRAME, "float32, wanted int32");
    CHECK_FAILS(spccl_decode(p, b, SPCCL_SET, y, 299, SPCCL_FLOAT32), SPCCL_ERR_FRAME,
                "encoded has 300 elements, out has 299");
    CHECK_FAILS(spccl_decode(p, b, SPCCL_SET, y, 301, SPCCL_FLOAT32), SPCCL_ERR_FRAME,
                "encoded has 300 elements, out has 301");
    CHECK_FAILS(spccl_decode(p, 0, SPCCL_SET, y, 0, SPCCL_FLOAT32), SPCCL_ERR_FORMAT, "0 bytes");
    CHECK_FAILS(spccl_decode(p, b - 1, SPCCL_SET, y, 300, SPCCL_FLOAT32), SPCCL_ERR_FORMAT, "at byte 0");
    CHECK_FAILS(spccl_decode(p, b, SPCCL_ADD, y, 300, SPCCL_FLOAT8), SPCCL_ERR_UNSUPPORTED, "float8");
    o.base = base;
    delta = encode(x, 300, SPCCL_FLOAT32, &o);
    CHECK_FAILS(spccl_decode(delta.p, delta.bytes, SPCCL_SET, y, 300, SPCCL_FLOAT32), SPCCL_ERR_FRAME,
                "delta");
    free(delta.p);
    free(p);
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {
        {"slices", test_slices},
        {"encode_arguments", test_encode_arguments},
        {"inspect_arguments", test_inspect_arguments},
        {"decode_arguments", test_decode_arguments},
        {"bad_frame_in_an_array", test_bad_frame_in_an_array},
        {NULL, NULL},
    };
    return test_main(cases, argc, argv);
}
