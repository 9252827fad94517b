/* test_delta.c - deltas, frames of version 2: golden data, round trips, boxes, casts, hostile frames, and the kernels of
 * each set against the scalar ones. tests/py/test_delta.py has the Python face. */
#include "core/base/mem.h"
#include "core/format/delta.h"
#include "records.h"
#include "test.h"

#define GOLDEN SPCCL_TEST_SOURCE_DIR "/tests/golden/"
#define KEY UINT64_C(0x123456789abcdef1)

static const spccl_dtype dtypes[] = {SPCCL_FLOAT32, SPCCL_BFLOAT16, SPCCL_FLOAT64, SPCCL_FLOAT8, SPCCL_INT64};

static spccl_delta_place whole(void *dst, uint64_t n)
{
    return (spccl_delta_place){dst, n != 0 ? n : 1, 0, 1, 0, n, 0};
}
static spccl_delta_target target_of(const uint8_t *frame, size_t bytes, uint64_t n, spccl_dtype dtype,
                                    const spccl_delta_place *places, size_t n_places)
{
    return (spccl_delta_target){frame, bytes, n, 0, places, n_places, KEY, dtype, 0};
}
static uint64_t checksum(const void *x, uint64_t n, spccl_dtype dtype, uint64_t first)
{
    uint64_t sum = 0;
    CHECK_OK(spccl_delta_checksum(x, n, dtype, first, KEY, &sum));
    return sum;
}

/* ---- golden data: what tests/ref/delta_ref.py wrote ---- */

static struct record frame, base;
static size_t n_golden;

static struct record copy_of(const struct record *r)
{
    struct record c = {strdup(r->name), malloc(r->bytes + 1), r->bytes};
    memcpy(c.p, r->p, r->bytes);
    return c;
}
static void drop(struct record *r)
{
    free(r->name), free(r->p);
}

/* Frame, base and array come in this order. The library must read the frame, and write the same if it may choose. */
static void check_good(const struct record *r)
{
    spccl_frame_info info = {.struct_bytes = sizeof info};
    if (strstr(r->name, ".base") != NULL) {
        base = copy_of(r);
        return;
    }
    if (strstr(r->name, ".x") == NULL) {
        frame = copy_of(r);
        return;
    }
    CHECK_OK(spccl_frame_inspect(frame.p, frame.bytes, &info));
    CHECK(info.version == 2 && info.format == SPCCL_FORMAT_DELTA && info.frame_bytes == frame.bytes, "%s",
          frame.name);
    spccl_delta_place place = whole(base.p, info.n_elems);
    spccl_delta_target t = target_of(frame.p, frame.bytes, info.n_elems, info.dtype, &place, 1);
    bool is_raw = strstr(frame.name, "_0") != NULL;
    if (strstr(frame.name, "codes_") == NULL || is_raw) {
        spccl_delta_options o = {sizeof o, is_raw && strstr(frame.name, "0.") == NULL, NULL, 0};
        spccl_delta_source s = {r->p, base.p, info.n_elems, 0, info.dtype, info.dtype, KEY};
        uint8_t *dst = malloc(spccl_delta_bound(info.n_elems, info.dtype));
        spccl_delta_frame f = {0};
        size_t bytes = 0;
        CHECK_OK(spccl_delta_encode(&s, 1, &o, dst, spccl_delta_bound(info.n_elems, info.dtype), &f, &bytes));
        CHECK(bytes == frame.bytes && memcmp(dst, frame.p, bytes) == 0, "%s: other bytes", frame.name);
        free(dst);
    }
    CHECK_OK(spccl_delta_apply(&t, 1));
    CHECK(memcmp(base.p, r->p, r->bytes) == 0, "%s", frame.name);
    n_golden++;
    drop(&frame), drop(&base);
}

static void check_bad(const struct record *r)
{
    spccl_status want = strncmp(r->name, "r03", 3) == 0 ? SPCCL_ERR_VERSION : SPCCL_ERR_FORMAT;
    spccl_frame_info info = {.struct_bytes = sizeof info};
    bool is_u8 = r->bytes >= 16 && r->p[6] == SPCCL_UINT8;
    uint64_t n = is_u8 ? sp_load_le64(r->p + 8) : 300;
    spccl_delta_target t = target_of(r->p, r->bytes, n, is_u8 ? SPCCL_UINT8 : SPCCL_BFLOAT16, NULL, 0);
    spccl_status st = spccl_delta_check(&t, 1, NULL, 0, NULL, NULL);
    CHECK(st == want, "%s: %s: %s", r->name, spccl_status_name(st), spccl_last_error());
    st = spccl_delta_apply(&t, 1);
    CHECK(st == want, "%s: %s: %s", r->name, spccl_status_name(st), spccl_last_error());
    CHECK(spccl_frame_inspect(r->p, r->bytes, &info) != SPCCL_OK, "%s", r->name);
}

static void test_golden(void)
{
    size_t n = each_record(GOLDEN "delta_good.hex", check_good);
    CHECK(n == 3 * n_golden && n_golden >= 30, "%zu records, %zu frames", n, n_golden);
    CHECK(each_record(GOLDEN "delta_bad.hex", check_bad) >= 40, "few bad frames");
}

/* ---- round trips ---- */

/* A base, and an array in which about that density differs by a small step, or by any number if `wild`. */
static void fill(uint8_t *old, uint8_t *x, uint64_t n, size_t e, double density, bool wild)
{
    for (uint64_t i = 0; i < n; i++) {
        uint64_t v = test_rand(), w = v;
        if ((double)(test_rand() >> 11) * 0x1p-53 < density)
            w += wild ? test_rand() : (test_rand() % 4 < 2 ? 1 : UINT64_MAX) * (1 + test_rand() % 3);
        memcpy(old + i * e, &v, e);
        memcpy(x + i * e, &w, e);
    }
}

/* Three arrays of different lengths in one call; check, apply, undo, apply. */
static void round_trip(spccl_dtype dtype, uint64_t n, double density, bool wild, bool raw)
{
    const size_t e = sp_dtype_bytes(dtype);
    const uint64_t lengths[3] = {n, 0, n / 3 + 1};
    size_t cap = 0, bytes = 0, old_bytes = 0;
    spccl_delta_options o = {sizeof o, raw, NULL, 0};
    spccl_delta_source s[3];
    spccl_delta_target t[3];
    spccl_delta_place p[3];
    spccl_delta_frame f[3];
    uint8_t *x[3], *was[3], *dst, *old;
    uint64_t sums[3];

    for (int i = 0; i < 3; i++) {
        x[i] = malloc(lengths[i] * e + 1), was[i] = malloc(lengths[i] * e + 1);
        fill(was[i], x[i], lengths[i], e, density, wild);
        s[i] = (spccl_delta_source){x[i], was[i], lengths[i], 1000u * (unsigned)i, dtype, dtype, KEY};
        cap += spccl_delta_bound(lengths[i], dtype);
    }
    dst = malloc(cap);
    CHECK_OK(spccl_delta_encode(s, 3, &o, dst, cap, f, &bytes));
    CHECK(f[2].offset + f[2].bytes == bytes && bytes <= cap, "%zu bytes", bytes);
    if (bytes > 8)
        CHECK_FAILS(spccl_delta_encode(s, 3, &o, dst, bytes - 8, f, &bytes), SPCCL_ERR_DST_SMALL,
                    "in sources[2]");
    for (int i = 0; i < 3; i++) {
        p[i] = (spccl_delta_place){was[i], 5000 + n, 0, 1, s[i].first, lengths[i], 0};
        t[i] = target_of(dst + f[i].offset, f[i].bytes, lengths[i], dtype, &p[i], 1);
        t[i].first = s[i].first;
        CHECK(f[i].offset % 8 == 0 && f[i].sum_change == checksum(x[i], lengths[i], dtype, s[i].first) -
                                                             checksum(was[i], lengths[i], dtype, s[i].first),
              "source %d", i);
    }
    CHECK_OK(spccl_delta_check(t, 3, NULL, 0, NULL, &old_bytes));
    old = malloc(old_bytes + 1);
    CHECK_OK(spccl_delta_check(t, 3, old, old_bytes, sums, NULL));
    for (int i = 0; i < 3; i++) {
        uint64_t before = checksum(was[i], lengths[i], dtype, s[i].first);
        CHECK(sums[i] == f[i].sum_change, "target %d", i);
        CHECK_OK(spccl_delta_apply(&t[i], 1));
        CHECK(memcmp(was[i], x[i], lengths[i] * e) == 0, "%s, %llu elements, %g, %d, %d",
              sp_dtype_name(dtype), (unsigned long long)n, density, wild, raw);
        if (i == 0) { /* undone before target 2 was applied */
            CHECK_OK(spccl_delta_undo(t, 3, old, old_bytes));
            CHECK(checksum(was[0], n, dtype, 0) == before, "undo");
        }
    }
    for (int i = 0; i < 3; i++)
        free(x[i]), free(was[i]);
    free(dst), free(old);
}

/* Two parts of a tensor, float32 that is rounded to bfloat16; bases that advance, and what undoes it. */
static void test_advance(void)
{
    enum { N = 70000 };
    static uint16_t now[2 * N], was[2 * N];
    static uint8_t old[4 * N + 16], dst[8 * N];
    static float x[2 * N];
    spccl_delta_options o = {sizeof o, 0, old, 0};
    spccl_delta_source s[2];
    spccl_delta_target t[2];
    spccl_delta_place p[2];
    spccl_delta_frame f[2];
    size_t bytes;
    for (size_t i = 0; i < 2 * N; i++) {
        now[i] = was[i] = (uint16_t)(0x3c00 + test_rand() % 0x400);
        x[i] = sp_bf16_to_f32((uint16_t)(now[i] + (test_rand() % 20 == 0 ? test_rand() % 9 : 0)));
    }
    s[0] = (spccl_delta_source){x, now, N, 0, SPCCL_FLOAT32, SPCCL_BFLOAT16, KEY};
    s[1] = (spccl_delta_source){x + N, now + N, N, N, SPCCL_FLOAT32, SPCCL_BFLOAT16, KEY};
    CHECK_FAILS(spccl_delta_encode(s, 2, &o, dst, sizeof dst, f, &bytes), SPCCL_ERR_DST_SMALL, "old_cap 0");
    o.old_cap = sizeof old;
    CHECK_FAILS(spccl_delta_encode(s, 2, &o, dst, 5000, f, &bytes), SPCCL_ERR_DST_SMALL, "dst_cap 5000");
    CHECK(memcmp(now, was, sizeof now) == 0, "a base advanced in a call that failed");
    CHECK_OK(spccl_delta_encode(s, 2, &o, dst, sizeof dst, f, &bytes));
    for (size_t i = 0; i < 2 * N; i++)
        CHECK(now[i] == sp_bf16_from_f32(x[i]), "element %zu", i);
    for (size_t i = 0; i < 2; i++) {
        p[i] = (spccl_delta_place){now + i * N, 2 * N, 0, 1, i * N, N, N};
        t[i] = target_of(dst + f[i].offset, f[i].bytes, N, SPCCL_BFLOAT16, &p[i], 1);
        t[i].first = i * N;
    }
    CHECK_OK(spccl_delta_undo(t, 2, old, (f[0].nnz * 2 + 7) / 8 * 8 + (f[1].nnz * 2 + 7) / 8 * 8));
    CHECK(memcmp(now, was, sizeof now) == 0, "undo");
}

static void test_round_trips(void)
{
    static const uint64_t lengths[] = {1, 31, 33, 257, 65535, 65536, 65537, 140000};
    static const double densities[] = {0, 0.0003, 0.01, 0.2, 0.26, 0.9, 1};
    for (size_t d = 0; d < sizeof dtypes / sizeof *dtypes; d++)
        for (size_t n = 0; n < sizeof lengths / sizeof *lengths; n++)
            for (size_t k = 0; k < sizeof densities / sizeof *densities; k++)
                if (test_rand() % (unsigned)test_share == 0)
                    round_trip(dtypes[d], lengths[n], densities[k], test_rand() % 2, test_rand() % 2);
}

/* Numbers next to the escapes of each code, and the differences of largest magnitude. */
static void test_escapes(void)
{
    static const uint64_t numbers[] = {0, 1, 2, 3, 14, 15, 254, 255, 65534, 65535, 65536};
    for (size_t d = 0; d < sizeof dtypes / sizeof *dtypes; d++) {
        const uint32_t e = (uint32_t)sp_dtype_bytes(dtypes[d]);
        const uint64_t most = UINT64_MAX >> (64 - 8 * e);
        for (size_t i = 0; i <= sizeof numbers / sizeof *numbers; i++) {
            uint64_t number = i == sizeof numbers / sizeof *numbers ? most : numbers[i];
            bool exists = number <= most && number != most - 1;
            uint64_t was = test_rand() & most, now = (was + sp_delta_difference(number)) & most;
            if (exists)
                CHECK(sp_delta_number(now, was, e) == number && now != was, "number %llu of %u bytes",
                      (unsigned long long)number, e);
            for (int raw = 0; raw < 2 && exists; raw++) { /* 40 of them, so that a code pays */
                uint8_t x[41 * 8], old[41 * 8], dst[1024];
                spccl_delta_options o = {sizeof o, (uint64_t)raw, NULL, 0};
                spccl_delta_source s = {x, old, 41, 0, dtypes[d], dtypes[d], KEY};
                spccl_delta_place p = whole(old, 41);
                spccl_delta_frame f;
                size_t bytes;
                for (size_t k = 0; k < 41; k++)
                    memcpy(old + k * e, &was, e), memcpy(x + k * e, k == 7 ? &was : &now, e);
                CHECK_OK(spccl_delta_encode(&s, 1, &o, dst, sizeof dst, &f, &bytes));
                spccl_delta_target t = target_of(dst, bytes, 41, dtypes[d], &p, 1);
                CHECK_OK(spccl_delta_apply(&t, 1));
                CHECK(memcmp(x, old, 41 * e) == 0, "number %llu", (unsigned long long)number);
            }
        }
    }
}

/* ---- casts ---- */

static void test_casts(void)
{
    static float x[70001];
    static uint16_t rounded[70001], old[70001];
    uint8_t *dst = malloc(spccl_delta_bound(70001, SPCCL_BFLOAT16));
    for (int f16 = 0; f16 < 2; f16++) {
        spccl_dtype dtype = f16 ? SPCCL_FLOAT16 : SPCCL_BFLOAT16;
        spccl_delta_source s = {x, old, 70001, 0, SPCCL_FLOAT32, dtype, KEY};
        spccl_delta_place p = whole(old, 70001);
        spccl_delta_frame f;
        uint64_t n_changed = 0;
        size_t bytes;
        for (size_t i = 0; i < 70001; i++) {
            uint64_t r = test_rand();
            uint32_t bits =
                r % 16 == 0 ? 0x7f800000u | (uint32_t)(r >> 32) : (uint32_t)(r >> 32); /* NaN, inf */
            bits = r % 64 == 1 ? bits & 0x80000000u : bits;                            /* -0 */
            memcpy(&x[i], &bits, 4);
            rounded[i] = f16 ? sp_f16_from_f32(x[i]) : sp_bf16_from_f32(x[i]);
            old[i] = r % 3 == 0 ? (uint16_t)(rounded[i] + 1) : rounded[i];
            n_changed += old[i] != rounded[i];
        }
        CHECK_OK(spccl_delta_encode(&s, 1, NULL, dst, spccl_delta_bound(70001, dtype), &f, &bytes));
        spccl_delta_target t = target_of(dst, bytes, 70001, dtype, &p, 1);
        CHECK_OK(spccl_delta_apply(&t, 1));
        CHECK(f.nnz == n_changed && memcmp(old, rounded, sizeof old) == 0, "%s", sp_dtype_name(dtype));
    }
    free(dst);
}

/* ---- boxes ---- */

static void test_boxes(void)
{
    enum { N = 150000 };
    static uint16_t was[N], x[N], mine[4 * N], model[4 * N];
    uint8_t *dst = malloc(spccl_delta_bound(N, SPCCL_INT16)), *old = malloc(2 * N + 8);
    for (int round = 0; round < share_of(60, 10); round++) {
        uint64_t first = test_rand() % 3 == 0 ? test_rand() % 1000 : 0, n = 1 + test_rand() % (N - first);
        uint64_t cols = 1 + test_rand() % (test_rand() % 2 ? 40 : 2 * N), c0 = test_rand() % cols;
        uint64_t nc = 1 + test_rand() % (cols - c0), r0 = test_rand() % (N / cols + 1);
        uint64_t nr = 1 + test_rand() % (N / cols + 1), pitch = nc + test_rand() % 3, sum = 0, change = 0;
        spccl_delta_options o = {sizeof o, test_rand() % 2, NULL, 0};
        spccl_delta_frame f;
        size_t bytes, old_bytes;
        if (test_rand() % 3 == 0)
            c0 = 0, nc = pitch = cols;
        if (nr * pitch > 4 * N)
            nr = 1;
        if (pitch > 4 * N)
            continue;
        fill((uint8_t *)was, (uint8_t *)x, N, 2, 0.05, test_rand() % 2);
        for (size_t i = 0; i < 4 * N; i++)
            mine[i] = (uint16_t)i;
        for (uint64_t r = r0; r < r0 + nr; r++) /* what the receiver has of the base */
            for (uint64_t c = c0; c < c0 + nc; c++)
                if (r * cols + c < N)
                    mine[(r - r0) * pitch + c - c0] = was[r * cols + c];
        memcpy(model, mine, sizeof model);
        for (uint64_t i = first; i < first + n; i++) {
            uint64_t r = i / cols, c = i % cols;
            if (r >= r0 && r < r0 + nr && c >= c0 && c < c0 + nc) {
                model[(r - r0) * pitch + c - c0] = x[i];
                change += sp_delta_hash(KEY, i, x[i]) - sp_delta_hash(KEY, i, was[i]);
            }
        }
        spccl_delta_source s = {x + first, was + first, n, first, SPCCL_INT16, SPCCL_INT16, KEY};
        CHECK_OK(spccl_delta_encode(&s, 1, &o, dst, spccl_delta_bound(N, SPCCL_INT16), &f, &bytes));
        spccl_delta_place p = {mine, cols, r0, nr, c0, nc, pitch};
        spccl_delta_target t = target_of(dst, bytes, n, SPCCL_INT16, &p, 1);
        t.first = first;
        CHECK_OK(spccl_delta_check(&t, 1, old, 2 * N + 8, &sum, &old_bytes));
        CHECK(sum == change, "first %llu, n %llu, rows of %llu", (unsigned long long)first,
              (unsigned long long)n, (unsigned long long)cols);
        CHECK_OK(spccl_delta_apply(&t, 1));
        CHECK(memcmp(mine, model, sizeof mine) == 0, "rows of %llu from %llu + %llu, columns %llu + %llu",
              (unsigned long long)cols, (unsigned long long)r0, (unsigned long long)nr,
              (unsigned long long)c0, (unsigned long long)nc);
        CHECK_OK(spccl_delta_undo(&t, 1, old, old_bytes));
        for (uint64_t i = first; i < first + n; i++)
            if (i / cols >= r0 && i / cols < r0 + nr && i % cols >= c0 && i % cols < c0 + nc)
                CHECK(mine[(i / cols - r0) * pitch + i % cols - c0] == was[i], "undo of element %llu",
                      (unsigned long long)i);
    }
    free(dst), free(old);
}

/* ---- what is refused ---- */

static void test_arguments(void)
{
    float x[100] = {[3] = 1}, old[100] = {0};
    uint8_t dst[1024], kept[64];
    spccl_delta_source s = {x, old, 100, 0, SPCCL_FLOAT32, SPCCL_FLOAT32, KEY}, bad = s;
    spccl_delta_options o = {sizeof o, 2, NULL, 0};
    spccl_delta_place p = whole(old, 100), q = p;
    spccl_delta_frame f;
    size_t bytes, old_bytes;
    uint64_t sum;
    CHECK_OK(spccl_delta_encode(&s, 1, NULL, dst, sizeof dst, &f, &bytes));
    CHECK_FAILS(spccl_delta_encode(&s, 1, &o, dst, sizeof dst, &f, &bytes), SPCCL_ERR_ARG, "raw 2");
    CHECK_FAILS(spccl_delta_encode(NULL, 1, NULL, dst, sizeof dst, &f, &bytes), SPCCL_ERR_ARG, "is NULL");
    bad.dtype = SPCCL_FLOAT64;
    CHECK_FAILS(spccl_delta_encode(&bad, 1, NULL, dst, sizeof dst, &f, &bytes), SPCCL_ERR_DTYPE,
                "sources[0]: x_dtype float32, dtype float64");
    bad = s, bad.base = NULL;
    CHECK_FAILS(spccl_delta_encode(&bad, 1, NULL, dst, sizeof dst, &f, &bytes), SPCCL_ERR_ARG,
                "base is NULL");
    bad = s, bad.n_elems = UINT64_C(1) << 41;
    CHECK_FAILS(spccl_delta_encode(&bad, 1, NULL, dst, sizeof dst, &f, &bytes), SPCCL_ERR_ARG,
                "at most 2^40");
    CHECK(spccl_delta_bound(bad.n_elems, SPCCL_INT8) == 0 && spccl_delta_bound(1, (spccl_dtype)11) == 0,
          "bound");
    CHECK_FAILS(spccl_delta_encode(&s, 1, NULL, x, sizeof x, &f, &bytes), SPCCL_ERR_ALIAS, "sources[0]");

    spccl_delta_target t[2] = {target_of(dst, f.bytes, 100, SPCCL_FLOAT32, &p, 1)};
    t[1] = t[0];
#define REFUSED(status, text)                                                                                \
    CHECK_FAILS(spccl_delta_check(t, 2, NULL, 0, NULL, NULL), status, "delta_check: targets[1]: " text);     \
    CHECK_FAILS(spccl_delta_apply(t, 2), status, "delta_apply: targets[1]: " text);                          \
    CHECK(old[3] == 0, "written before the refusal: " text);                                                 \
    t[1] = t[0], q = p
    t[1].n_elems = 99;
    REFUSED(SPCCL_ERR_FRAME, "the frame has 100 elements of float32, wanted 99");
    t[1].dtype = SPCCL_INT32;
    REFUSED(SPCCL_ERR_FRAME, "the frame has 100 elements of float32, wanted 100 of int32");
    t[1].frame_bytes = f.bytes + 8;
    REFUSED(SPCCL_ERR_FRAME, "");
    t[1].places = &q, q.n_cols = 101;
    REFUSED(SPCCL_ERR_ARG, "places[0]: columns 0 + 101");
    t[1].places = &q, q.n_rows = 2;
    REFUSED(SPCCL_ERR_ARG, "places[0]: dst_row_elems 0");
    t[1].places = &q, q.n_rows = UINT64_MAX / 16, q.dst_row_elems = 100;
    REFUSED(SPCCL_ERR_ARG, "places[0]: its size overflows");
    t[1].places = &q, q.dst = dst;
    REFUSED(SPCCL_ERR_ALIAS, "places[0]");
    t[1].places = NULL;
    REFUSED(SPCCL_ERR_ARG, "places is NULL");
    CHECK_FAILS(spccl_delta_check(t, 2, kept, 15, NULL, NULL), SPCCL_ERR_DST_SMALL, "old_cap 15, wanted 16");
    CHECK_OK(spccl_delta_check(t, 2, kept, 16, NULL, &old_bytes));
    CHECK_FAILS(spccl_delta_undo(t, 2, kept, 8), SPCCL_ERR_ARG, "old_bytes 8, wanted the 16");
    CHECK_FAILS(spccl_decode(dst, f.bytes, SPCCL_OVERWRITE, old, 100, SPCCL_FLOAT32), SPCCL_ERR_VERSION,
                "spccl_delta_apply reads it");
    CHECK_FAILS(spccl_delta_checksum(NULL, 1, SPCCL_INT8, 0, 0, &sum), SPCCL_ERR_ARG, "x is NULL");
}

/* Two places of one element must agree; it counts once. */
static void test_two_places(void)
{
    uint32_t x[50] = {[7] = 9}, old[50] = {0}, a[50] = {0}, b[50] = {0};
    spccl_delta_source s = {x, old, 50, 0, SPCCL_INT32, SPCCL_INT32, KEY};
    spccl_delta_place p[2] = {whole(a, 50), whole(b, 50)};
    uint8_t dst[1024];
    spccl_delta_frame f;
    uint64_t sum = 0;
    size_t bytes;
    CHECK_OK(spccl_delta_encode(&s, 1, NULL, dst, sizeof dst, &f, &bytes));
    spccl_delta_target t = target_of(dst, bytes, 50, SPCCL_INT32, p, 2);
    b[7] = 1;
    CHECK_FAILS(spccl_delta_check(&t, 1, NULL, 0, &sum, NULL), SPCCL_ERR_FRAME,
                "targets[0]: element 7 has other bits in places[1]");
    b[7] = 0;
    CHECK_OK(spccl_delta_check(&t, 1, NULL, 0, &sum, NULL));
    CHECK(sum == f.sum_change, "an element at two places counts once");
    CHECK_OK(spccl_delta_apply(&t, 1));
    CHECK(a[7] == 9 && b[7] == 9, "both are written");
}

/* Frames with any byte changed, or cut off: they are refused or applied, and nothing outside of dst is written. */
static void test_mutated(void)
{
    static uint16_t x[66000], old[66000], guarded[66000 + 16];
    uint8_t *dst = malloc(spccl_delta_bound(66000, SPCCL_FLOAT16)), *mutated;
    spccl_delta_place p = whole(guarded + 8, 66000);
    size_t n_applied = 0, bytes;
    fill((uint8_t *)old, (uint8_t *)x, 66000, 2, 0.004, false);
    spccl_delta_source s = {x, old, 66000, 0, SPCCL_FLOAT16, SPCCL_FLOAT16, KEY};
    spccl_delta_frame f;
    CHECK_OK(spccl_delta_encode(&s, 1, NULL, dst, spccl_delta_bound(66000, SPCCL_FLOAT16), &f, &bytes));
    for (int i = 0; i < share_of(4000, 500); i++) {
        size_t n = test_rand() % 4 == 0 ? test_rand() % bytes : bytes,
               at = test_rand() % (i % 2 ? 48 : bytes);
        mutated = malloc(n + 1); /* exactly: sanitizers find reads behind it */
        memcpy(mutated, dst, n);
        if (at < n)
            mutated[at] ^= (uint8_t)(1u << test_rand() % 8);
        spccl_delta_target t = target_of(mutated, n, 66000, SPCCL_FLOAT16, &p, 1);
        spccl_status st = spccl_delta_check(&t, 1, NULL, 0, NULL, NULL);
        CHECK(n == bytes || st != SPCCL_OK, "%zu of %zu bytes accepted", n, bytes);
        CHECK((spccl_delta_apply(&t, 1) == SPCCL_OK) == (st == SPCCL_OK), "check and apply agree");
        n_applied += st == SPCCL_OK;
        free(mutated);
    }
    CHECK(n_applied > 0, "every mutation was refused: values may be any");
    for (int i = 0; i < 8; i++)
        CHECK(guarded[i] == 0 && guarded[66000 + 8 + i] == 0, "written outside of dst");
    free(dst);
}

/* ---- kernels ---- */

/* Everything that the encoder takes of a kernel set, of one slice, as one sum. */
static uint64_t digest(const sp_kernels *k, sp_delta_slice *s, uint8_t *dst)
{
    uint64_t h = 1469598103934665603u;
    s->kernels = k;
    sp_delta_scan(s);
    memset(dst, 0xee, s->bytes + 8u);
    sp_delta_write_slice(s, dst);
    for (uint32_t i = 0; i < s->bytes + 8; i++) /* and nothing is written behind it */
        h = (h ^ dst[i]) * 1099511628211u;
    h += s->sum_change + s->bytes;
    return h + k->delta_sum(s->x, s->n_elems, s->elem_bytes, s->first, s->key);
}

static void test_kernels(void)
{
    sp_delta_slice *s = sp_alloc64(sp_align_up(sizeof *s, 64));
    uint8_t *x = malloc(65536 * 8 + 1), *old = malloc(65536 * 8 + 1), *dst = malloc(65536 * 9 + 64);
    for (int round = 0; round < share_of(200, 40); round++) {
        const uint32_t e = 1u << test_rand() % 4;
        const double density = (double[]){0.001, 0.02, 0.1, 0.5, 1}[test_rand() % 5];
        s->n_elems = test_rand() % 2 ? 65536 : 1 + (uint32_t)(test_rand() % 65536);
        s->elem_bytes = e;
        s->first = test_rand();
        s->key = test_rand();
        s->raw = test_rand() % 2;
        s->x = x + 1, s->base = old + 1; /* not aligned */
        fill(old + 1, x + 1, s->n_elems, e, density, test_rand() % 2);
        uint64_t wanted = digest(sp_kernels_at(0), s, dst);
        for (size_t k = 1; sp_kernels_at(k) != NULL; k++)
            CHECK(digest(sp_kernels_at(k), s, dst) == wanted, "%s: %u elements of %u bytes, %g",
                  sp_kernels_at(k)->name, s->n_elems, e, density);
    }
    sp_free(s), free(x), free(old), free(dst);
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {{"golden", test_golden},
                                             {"round_trips", test_round_trips},
                                             {"escapes", test_escapes},
                                             {"casts", test_casts},
                                             {"boxes", test_boxes},
                                             {"arguments", test_arguments},
                                             {"two_places", test_two_places},
                                             {"mutated", test_mutated},
                                             {"kernels", test_kernels},
                                             {"advance", test_advance},
                                             {NULL, NULL}};
    return test_main(cases, argc, argv);
}
