/* test_kernels.c - compares every kernel set with the scalar one, bit for bit, and the scalar one with a
 * model. Every buffer ends or starts at an unreadable page, and has poison on the other side. A read past the
 * end of an input faults, and a write past the end of an output changes the poison. More than 500 lines: all
 * cases use the same buffers and data, and all kernels are tested here. */
#include "core/base/dtype.h"
#include "core/base/status.h"
#include "core/format/kernel_table.h"
#include "test.h"

#include <sys/mman.h>
#include <unistd.h>

#define N_MAX 70000u
#define ARENA_BYTES ((size_t)1 << 20)
#define POISON_BYTES 192u

/* ---- buffers ---- */

struct arena {
    uint8_t *lo, *hi; /* readable bytes [lo, hi); unreadable pages on both sides */
    uint8_t *p;       /* the current buffer */
    size_t bytes;
    uint8_t poison;
};
enum role { X, BASE, MASK, TILE_NNZ, INDEX, META, VALUES, DST, N_ROLES };
/* [0]: output of the scalar set, and inputs. [1]: output of the other set. */
static struct arena arenas[N_ROLES][2];
static int at_end; /* true: buffers end at the second unreadable page; false: they start at the first */

static void arenas_make(void)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    for (int i = 0; i < N_ROLES * 2; i++) {
        struct arena *a = &arenas[i / 2][i % 2];
        uint8_t *map = mmap(NULL, ARENA_BYTES + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (map == MAP_FAILED || mprotect(map + page, ARENA_BYTES, PROT_READ | PROT_WRITE) != 0) {
            perror("test arena");
            exit(1);
        }
        a->lo = map + page;
        a->hi = a->lo + ARENA_BYTES;
    }
}

/* Make a buffer of `bytes` in an arena, `shift` bytes from the unreadable page, surrounded by poison. */
static uint8_t *take(enum role role, int who, size_t bytes, size_t shift)
{
    struct arena *a = &arenas[role][who];
    a->p = at_end ? a->hi - shift - bytes : a->lo + shift;
    a->bytes = bytes;
    a->poison = (uint8_t)(0x51 + 16 * who);
    uint8_t *from = a->p - a->lo > POISON_BYTES ? a->p - POISON_BYTES : a->lo;
    uint8_t *to = a->hi - (a->p + bytes) > POISON_BYTES ? a->p + bytes + POISON_BYTES : a->hi;
    memset(from, a->poison, (size_t)(to - from));
    return a->p;
}
static int guards_whole(enum role role, int who)
{
    const struct arena *a = &arenas[role][who];
    for (const uint8_t *q = a->p; q > a->lo && a->p - q < POISON_BYTES; q--)
        if (q[-1] != a->poison)
            return 0;
    for (const uint8_t *q = a->p + a->bytes; q < a->hi && q - (a->p + a->bytes) < POISON_BYTES; q++)
        if (*q != a->poison)
            return 0;
    return 1;
}
/* True if both sets wrote the same bytes, and none outside the buffer. */
static int same(enum role role, size_t bytes)
{
    return guards_whole(role, 0) && guards_whole(role, 1) &&
           (bytes == 0 || memcmp(arenas[role][0].p, arenas[role][1].p, bytes) == 0);
}

/* ---- data ---- */

static const size_t sizes[] = {0, 1, 31, 32, 33, 63, 64, 65, 255, 256, 257, 4095, 4096, 4097, 3 * 4096 + 7};
static const size_t widths[] = {1, 2, 4, 8};

/* A random value of `bytes`: ordinary, tiny, -0.0, infinity, quiet or signalling NaN. Never all zero. */
static uint64_t rand_value(size_t bytes)
{
    static const uint64_t f32s[] = {0x80000000u, 0x7f800000u, 0xff800000u, 0x7fc01234u,
                                    0xffc00001u, 0x7f800001u, 0xffa0beefu, 1u,
                                    0x80000001u, 0x007fffffu, 0x7f7fffffu, 0x477ff000u};
    static const uint16_t f16s[] = {0x8000, 0x7c00, 0xfc00, 0x7e12, 0x7c01,
                                    0xfd0f, 0x0001, 0x8001, 0x03ff, 0x7bff};
    static const uint16_t bf16s[] = {0x8000, 0x7f80, 0xff80, 0x7fc1, 0x7f81,
                                     0xff8f, 0x0001, 0x8001, 0x007f, 0x7f7f};
    uint64_t r = test_rand(), v = test_rand(),
             mask = bytes == 8 ? UINT64_MAX : (UINT64_C(1) << (8 * bytes)) - 1;
    if (r % 4 == 0 && bytes == 4)
        v = f32s[(r >> 8) % (sizeof f32s / sizeof f32s[0])];
    else if (r % 4 == 0 && bytes == 8)
        v = (f32s[(r >> 8) % (sizeof f32s / sizeof f32s[0])] << 32) | ((r >> 20) & 1);
    else if (r % 4 == 0 && bytes == 2)
        v = (r >> 30) & 1 ? f16s[(r >> 8) % (sizeof f16s / sizeof f16s[0])]
                          : bf16s[(r >> 8) % (sizeof bf16s / sizeof bf16s[0])];
    else if (r % 4 == 1 && bytes == 4) /* near 1: sums that round and cancel */
        v = 0x3f000000u | (v & 0x80ffffffu);
    else if (r % 4 == 1 && bytes == 8)
        v = 0x3fe0000000000000u | (v & 0x801fffffffffffffu);
    else if (r % 4 == 1 && bytes == 2)
        v = 0x3c00u | (v & 0x83ffu);
    v &= mask;
    return v != 0 ? v : 1;
}

enum pattern { RANDOM, ONE_BLOCK, ALTERNATING, BLOCKS, LAST, N_PATTERNS };
static const char *const pattern_names[] = {"random", "one-block", "alternating", "blocks", "last"};

/* True if element i shall be listed. */
static int wants(enum pattern pattern, double density, size_t i, size_t n)
{
    switch (pattern) {
    case RANDOM:
        return (double)(test_rand() >> 11) * 0x1p-53 < density;
    case ONE_BLOCK:
        return i / 256 == n / 512;
    case ALTERNATING:
        return (i & 1) != 0;
    case BLOCKS: /* runs of empty, nearly full and sparse blocks */
        return i / 256 % 4 == 0 ? i % 256 != 17 : i / 256 % 4 == 2 && test_rand() % 16 == 0;
    case LAST:
    case N_PATTERNS:
        break;
    }
    return i + 1 == n || i % 64 == 63;
}
static void fill(uint8_t *x, const uint8_t *base, size_t n, size_t bytes, enum pattern pattern,
                 double density)
{
    for (size_t i = 0; i < n; i++) {
        uint64_t v = 0;
        if (base != NULL)
            memcpy(&v, base + i * bytes, bytes);
        if (wants(pattern, density, i, n)) {
            uint64_t old = v;
            do /* with a base a listed element may be zero */
                v = base != NULL && test_rand() % 8 == 0 ? 0 : rand_value(bytes);
            while (v == old);
        }
        memcpy(x + i * bytes, &v, bytes);
    }
}
static void fill_any(uint8_t *x, size_t n, size_t bytes)
{
    for (size_t i = 0; i < n; i++) {
        uint64_t v = test_rand() % 8 == 0 ? 0 : rand_value(bytes);
        memcpy(x + i * bytes, &v, bytes);
    }
}

/* ---- one case: scan, encode, decode ---- */

static const struct {
    spccl_dtype dtype, dst_dtype;
} adds[] = {
    {SPCCL_FLOAT32, SPCCL_FLOAT32}, {SPCCL_FLOAT16, SPCCL_FLOAT16},   {SPCCL_FLOAT16, SPCCL_FLOAT32},
    {SPCCL_INT8, SPCCL_INT8},       {SPCCL_BFLOAT16, SPCCL_BFLOAT16}, {SPCCL_BFLOAT16, SPCCL_FLOAT32},
    {SPCCL_INT16, SPCCL_INT16},     {SPCCL_FLOAT64, SPCCL_FLOAT64},   {SPCCL_INT32, SPCCL_INT32},
    {SPCCL_INT64, SPCCL_INT64},     {SPCCL_UINT8, SPCCL_UINT8},
};
#define N_ADDS (sizeof adds / sizeof adds[0])

struct codec_case {
    const sp_kernels *ref, *k;
    size_t n, bytes, shift;
    enum pattern pattern;
    double density;
    bool has_base;
    sp_scan_args scan[2];
};
static const char *case_text(const struct codec_case *c)
{
    static char text[160];
    snprintf(text, sizeof text, "%s n=%zu bytes=%zu shift=%zu %s density=%g base=%d at_end=%d", c->k->name,
             c->n, c->bytes, c->shift, pattern_names[c->pattern], c->density, c->has_base, at_end);
    return text;
}

static void check_scan(struct codec_case *c)
{
    size_t n_words = sp_ceil_div(c->n, 64), n_blocks = sp_ceil_div(c->n, SP_TILE_ELEMS);
    uint8_t *x = take(X, 0, c->n * c->bytes, c->shift);
    uint8_t *base = c->has_base ? take(BASE, 0, c->n * c->bytes, c->shift / 2) : NULL;
    if (base != NULL)
        fill_any(base, c->n, c->bytes);
    fill(x, base, c->n, c->bytes, c->pattern, c->density);
    for (int who = 0; who < 2; who++) {
        sp_scan_args *s = &c->scan[who];
        *s = (sp_scan_args){.x = x, .base = base, .n_elems = c->n, .elem_bytes = c->bytes, .nnz = 77777777};
        s->mask = (uint64_t *)(void *)take(MASK, who, n_words * 8, 0);
        s->tile_nnz = (uint16_t *)(void *)take(TILE_NNZ, who, n_blocks * 2, n_blocks % 2 * 2);
        s->has_full_tile = who == 0;
        (who == 0 ? c->ref : c->k)->scan(s);
    }
    CHECK(same(MASK, n_words * 8), "%s", case_text(c));
    CHECK(same(TILE_NNZ, n_blocks * 2), "%s", case_text(c));
    CHECK(c->scan[0].nnz == c->scan[1].nnz, "%s: %zu, %zu", case_text(c), c->scan[0].nnz, c->scan[1].nnz);
    CHECK(c->scan[0].has_full_tile == c->scan[1].has_full_tile, "%s", case_text(c));
}

static void section_bytes(spccl_format format, size_t n, size_t nnz, size_t bytes, size_t out[3])
{
    size_t n_tiles = sp_ceil_div(n, SP_PICI_TILE_ELEMS);
    out[0] = format == SPCCL_FORMAT_TILE   ? sp_ceil_div(n, SP_TILE_ELEMS)
             : format == SPCCL_FORMAT_PICI ? n_tiles * 4
             : format == SPCCL_FORMAT_COO  ? nnz * 4
                                           : 0;
    out[1] = format == SPCCL_FORMAT_TILE ? nnz : format == SPCCL_FORMAT_PICI ? n_tiles * 512 : 0;
    out[2] = format == SPCCL_FORMAT_DENSE ? n * bytes : nnz * bytes;
}

/* Encode with both sets. The frame stays in the arenas, for check_decode. */
static void check_encode(const struct codec_case *c, spccl_format format)
{
    size_t s[3];
    section_bytes(format, c->n, c->scan[0].nnz, c->bytes, s);
    for (int who = 0; who < 2; who++) {
        sp_encode_args a = {.x = c->scan[0].x,
                            .n_elems = c->n,
                            .elem_bytes = c->bytes,
                            .mask = c->scan[0].mask,
                            .tile_nnz = c->scan[0].tile_nnz,
                            .nnz = format == SPCCL_FORMAT_DENSE ? c->n : c->scan[0].nnz};
        a.index = take(INDEX, who, s[0], c->shift);
        a.meta = take(META, who, s[1], c->shift);
        a.values = take(VALUES, who, s[2], c->shift);
        (who == 0 ? c->ref : c->k)->encode[format](&a);
    }
    CHECK(same(INDEX, s[0]), "format %d index: %s", (int)format, case_text(c));
    CHECK(same(META, s[1]), "format %d meta: %s", (int)format, case_text(c));
    CHECK(same(VALUES, s[2]), "format %d values: %s", (int)format, case_text(c));
}

static void check_decode(const struct codec_case *c, spccl_format format, spccl_verb verb, spccl_dtype dtype,
                         spccl_dtype dst_dtype, bool non_temporal)
{
    size_t dst_bytes = sp_dtype_bytes(dst_dtype), shift = (c->shift * 5 + c->n) % 64;
    for (int who = 0; who < 2; who++) {
        sp_decode_args a = {.index = arenas[INDEX][0].p,
                            .meta = arenas[META][0].p,
                            .values = arenas[VALUES][0].p,
                            .n_elems = c->n,
                            .nnz = format == SPCCL_FORMAT_DENSE ? c->n : c->scan[0].nnz,
                            .dtype = dtype,
                            .dst_dtype = dst_dtype,
                            .non_temporal = non_temporal};
        a.dst = take(DST, who, c->n * dst_bytes, shift);
        if (who == 0)
            fill_any(a.dst, c->n, dst_bytes);
        else
            memcpy(a.dst, arenas[BASE][1].p, c->n * dst_bytes);
        if (who == 0) /* keep the initial contents for the other set */
            memcpy(take(BASE, 1, c->n * dst_bytes, 0), a.dst, c->n * dst_bytes);
        (who == 0 ? c->ref : c->k)->decode[format][verb](&a);
    }
    CHECK(same(DST, c->n * dst_bytes), "format %d verb %d %s -> %s non_temporal=%d: %s", (int)format,
          (int)verb, sp_dtype_name(dtype), sp_dtype_name(dst_dtype), non_temporal, case_text(c));
}

static void check_codec(struct codec_case *c, bool all_adds)
{
    static const spccl_dtype by_width[] = {0, SPCCL_FLOAT8, SPCCL_BFLOAT16, 0, SPCCL_FLOAT32, 0, 0,
                                           0, SPCCL_INT64};
    check_scan(c);
    if (c->n == 0)
        return;
    for (int f = SPCCL_FORMAT_TILE; f <= SPCCL_FORMAT_DENSE; f++) {
        spccl_dtype t = by_width[c->bytes];
        if (f == SPCCL_FORMAT_TILE && c->scan[0].has_full_tile)
            continue;
        check_encode(c, (spccl_format)f);
        for (int non_temporal = 0; non_temporal < 2; non_temporal++) {
            check_decode(c, (spccl_format)f, SPCCL_SET, t, t, non_temporal != 0);
            check_decode(c, (spccl_format)f, SPCCL_OVERWRITE, t, t, non_temporal != 0);
        }
        for (size_t i = 0; i < N_ADDS; i++)
            if (sp_dtype_bytes(adds[i].dtype) == c->bytes && (all_adds || test_rand() % 4 == 0))
                check_decode(c, (spccl_format)f, SPCCL_ADD, adds[i].dtype, adds[i].dst_dtype,
                             test_rand() % 2 != 0);
    }
}

static void run_codec(const sp_kernels *k, size_t n, size_t bytes, enum pattern pattern, double density,
                      bool all_adds)
{
    struct codec_case c = {.ref = sp_kernels_at(0),
                           .k = k,
                           .n = n,
                           .bytes = bytes,
                           .pattern = pattern,
                           .density = density,
                           .has_base = test_rand() % 3 == 0};
    at_end = (int)(test_rand() % 2);
    c.shift = test_rand() % 3 == 0 ? 0 : test_rand() % 64;
    check_codec(&c, all_adds);
}

static void codec_every_set(void)
{
    static const double densities[] = {0, 0.001, 0.01, 0.1, 0.3, 0.5, 0.9, 1};
    const sp_kernels *k;
    for (size_t s = 0; (k = sp_kernels_at(s)) != NULL; s++) {
        for (size_t w = 0; w < 4; w++) {
            for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
                for (size_t d = 0; d < sizeof densities / sizeof densities[0]; d++)
                    run_codec(k, sizes[i], widths[w], RANDOM, densities[d], true);
                for (int p = ONE_BLOCK; p < N_PATTERNS; p++)
                    run_codec(k, sizes[i], widths[w], (enum pattern)p, 0, true);
            }
            for (int i = 0; i < 40; i++) {
                size_t n = (size_t)(test_rand() % (test_rand() % 2 != 0 ? 700 : 20000));
                double density = (double)(test_rand() % 1000) / 999;
                run_codec(k, n, widths[w], RANDOM,
                          test_rand() % 2 != 0 ? density : density * density * density, false);
            }
            run_codec(k, 65536, widths[w], RANDOM, 0.02, false);
            run_codec(k, N_MAX - (size_t)(test_rand() % 5000), widths[w], BLOCKS, 0, false);
        }
    }
}

/* ---- the scalar set and a model of the formats: every frame is valid, and decodes to the input ---- */

static void model_one(const sp_kernels *k, spccl_format format, size_t n, size_t bytes, double density)
{
    static const spccl_dtype by_width[] = {0, SPCCL_UINT8, SPCCL_INT16, 0, SPCCL_INT32, 0, 0, 0, SPCCL_INT64};
    spccl_dtype dtype = by_width[bytes];
    uint8_t *x = calloc(n, bytes), *out = malloc(n * bytes), *buf;
    uint64_t *mask = calloc(n / 64 + 1, 8);
    uint16_t *tile_nnz = calloc(n / 256 + 1, 2);
    sp_scan_args s = {.x = x, .n_elems = n, .elem_bytes = bytes, .mask = mask, .tile_nnz = tile_nnz};
    sp_frame_layout lay;
    sp_frame fr;
    size_t nnz = 0;
    fill(x, NULL, n, bytes, RANDOM, density);
    k->scan(&s);
    for (size_t i = 0; i < n; i++) {
        uint64_t v = 0;
        memcpy(&v, x + i * bytes, bytes);
        CHECK((mask[i / 64] >> (i % 64) & 1) == (v != 0), "mask of element %zu", i);
        nnz += v != 0;
    }
    CHECK(s.nnz == nnz, "nnz %zu, model %zu", s.nnz, nnz);
    if (format == SPCCL_FORMAT_DENSE)
        nnz = n;
    sp_frame_layout_of(format, n, nnz, bytes, &lay);
    buf = calloc(1, lay.frame_bytes);
    sp_frame_write_header(buf, format, dtype, false, n, nnz, &lay);
    sp_encode_args e = {
        .x = x, .n_elems = n, .elem_bytes = bytes, .mask = mask, .tile_nnz = tile_nnz, .nnz = nnz};
    e.index = buf + lay.index_off;
    e.meta = buf + lay.meta_off;
    e.values = buf + lay.values_off;
    if (format != SPCCL_FORMAT_TILE || !s.has_full_tile) {
        k->encode[format](&e);
        CHECK_OK(sp_frame_validate(buf, lay.frame_bytes, &fr));
        sp_decode_args d = {.index = fr.index,
                            .meta = fr.meta,
                            .values = fr.values,
                            .n_elems = n,
                            .nnz = fr.nnz,
                            .dtype = dtype,
                            .dst_dtype = dtype,
                            .dst = out};
        memset(out, 0x5a, n * bytes);
        k->decode[format][SPCCL_SET](&d);
        CHECK(memcmp(out, x, n * bytes) == 0, "format %d n=%zu bytes=%zu: not what went in", (int)format, n,
              bytes);
    }
    free(x);
    free(out);
    free(buf);
    free(mask);
    free(tile_nnz);
}
static void codec_model(void)
{
    const sp_kernels *k;
    for (size_t s = 0; (k = sp_kernels_at(s)) != NULL; s++)
        for (int f = SPCCL_FORMAT_TILE; f <= SPCCL_FORMAT_DENSE; f++)
            for (size_t w = 0; w < 4; w++)
                for (size_t i = 1; i < sizeof sizes / sizeof sizes[0]; i++)
                    model_one(k, (spccl_format)f, sizes[i], widths[w], (double)(i % 4) / 4 + 0.01);
}

/* The layout of the paper, computed here: one listed element at each index of a 64x64 tile. */
static void pici_by_hand(void)
{
    const sp_kernels *k;
    for (size_t s = 0; (k = sp_kernels_at(s)) != NULL; s++) {
        size_t n = 2 * 4096, at = 4096 + (size_t)(test_rand() % 4096);
        uint32_t *x = calloc(n, 4), value = 0, index[2] = {9, 9};
        uint64_t meta[128], mask[128] = {0};
        uint16_t tile_nnz[32] = {0};
        x[at] = 0x80000000u;
        mask[at / 64] = UINT64_C(1) << at % 64;
        tile_nnz[at / 256] = 1;
        sp_encode_args a = {.x = x,
                            .n_elems = n,
                            .elem_bytes = 4,
                            .mask = mask,
                            .tile_nnz = tile_nnz,
                            .nnz = 1,
                            .index = (uint8_t *)index,
                            .meta = (uint8_t *)meta,
                            .values = (uint8_t *)&value};
        k->encode[SPCCL_FORMAT_PICI](&a);
        CHECK(index[0] == 0 && index[1] == 0 && value == 0x80000000u, "%s", k->name);
        for (size_t c = 0; c < 128; c++)
            CHECK(meta[c] == (c == 64 + at % 64 ? UINT64_C(1) << (at - 4096) / 64 : 0), "%s word %zu",
                  k->name, c);
        free(x);
    }
}

/* ---- combine, finish ---- */

static void check_combine(const sp_kernels *k, spccl_dtype dtype, spccl_redop op, bool first, size_t n)
{
    size_t bytes = sp_dtype_bytes(dtype), acc_bytes = sp_dtype_bytes(sp_acc_dtype(dtype)),
           shift = test_rand() % 64;
    uint8_t *x, *was;
    at_end = (int)(test_rand() % 2);
    x = take(X, 0, n * bytes, test_rand() % 64);
    fill_any(x, n, bytes);
    was = take(BASE, 0, n * acc_bytes, 0);
    fill_any(was, n, acc_bytes);
    for (int who = 0; who < 2; who++) {
        sp_combine_args a = {.acc = take(DST, who, n * acc_bytes, shift),
                             .x = x,
                             .n_elems = n,
                             .dtype = dtype,
                             .op = op,
                             .first = first};
        memcpy(a.acc, was, n * acc_bytes);
        (who == 0 ? sp_kernels_at(0) : k)->combine(&a);
    }
    CHECK(same(DST, n * acc_bytes), "%s combine %s op %d first=%d n=%zu shift=%zu", k->name,
          sp_dtype_name(dtype), (int)op, first, n, shift);
}
static void check_finish(const sp_kernels *k, spccl_dtype dtype, spccl_redop op, int world_size, size_t n)
{
    size_t bytes = sp_dtype_bytes(dtype), acc_bytes = sp_dtype_bytes(sp_acc_dtype(dtype)),
           shift = test_rand() % 64;
    bool in_place = bytes == acc_bytes && test_rand() % 2 != 0, non_temporal = test_rand() % 2 != 0;
    uint8_t *acc;
    at_end = (int)(test_rand() % 2);
    acc = take(X, 0, n * acc_bytes, test_rand() % 64);
    fill_any(acc, n, acc_bytes);
    for (int who = 0; who < 2; who++) {
        sp_finish_args a = {.acc = acc,
                            .dst = take(DST, who, n * bytes, shift),
                            .n_elems = n,
                            .dtype = dtype,
                            .op = op,
                            .world_size = world_size,
                            .non_temporal = non_temporal};
        if (in_place) {
            memcpy(a.dst, acc, n * bytes);
            a.acc = a.dst;
        }
        (who == 0 ? sp_kernels_at(0) : k)->finish(&a);
    }
    CHECK(same(DST, n * bytes), "%s finish %s op %d world=%d n=%zu shift=%zu in_place=%d", k->name,
          sp_dtype_name(dtype), (int)op, world_size, n, shift, in_place);
}
static void reduce_every_set(void)
{
    static const int worlds[] = {1, 2, 3, 7, 300};
    const sp_kernels *k;
    for (size_t s = 0; (k = sp_kernels_at(s)) != NULL; s++)
        for (int t = SPCCL_FLOAT32; t <= SPCCL_UINT8; t++)
            for (int op = SPCCL_SUM; op <= SPCCL_PROD; op++)
                for (size_t i = 0; i < sizeof sizes / sizeof sizes[0] && t != SPCCL_FLOAT8; i++) {
                    check_combine(k, (spccl_dtype)t, (spccl_redop)op, false, sizes[i]);
                    check_combine(k, (spccl_dtype)t, (spccl_redop)op, true, sizes[i]);
                    check_finish(k, (spccl_dtype)t, (spccl_redop)op, worlds[i % 5], sizes[i]);
                }
}

/* The rules of spccl.h. Sums start from +0.0. MIN returns a NaN if there is one, and of equal zeros that of
 * the lowest rank. Integers wrap, and division rounds toward zero. */
static void reduce_rules(void)
{
    const sp_kernels *k;
    for (size_t s = 0; (k = sp_kernels_at(s)) != NULL; s++) {
        float x[3] = {-0.0f, sp_f32_from_bits(0x7fc00123u), 1.0f}, acc[3];
        sp_combine_args a = {
            .acc = acc, .x = x, .n_elems = 3, .dtype = SPCCL_FLOAT32, .op = SPCCL_SUM, .first = true};
        k->combine(&a);
        CHECK(sp_f32_to_bits(acc[0]) == 0 && sp_f32_to_bits(acc[1]) == 0x7fc00123u && acc[2] == 1.0f, "%s",
              k->name);
        float lo[3] = {0.0f, 5.0f, 2.0f};
        a.acc = lo;
        a.op = SPCCL_MIN;
        a.first = false;
        k->combine(&a);
        CHECK(sp_f32_to_bits(lo[0]) == 0 && lo[1] != lo[1] && lo[2] == 1.0f, "%s: MIN", k->name);
        int8_t i8[2] = {127, -7}, one[2] = {1, 0}, avg[2];
        sp_combine_args b = {.acc = i8, .x = one, .n_elems = 2, .dtype = SPCCL_INT8, .op = SPCCL_SUM};
        k->combine(&b);
        CHECK(i8[0] == -128, "%s: int8 wraps", k->name);
        sp_finish_args f = {
            .acc = i8, .dst = avg, .n_elems = 2, .dtype = SPCCL_INT8, .op = SPCCL_AVG, .world_size = 2};
        k->finish(&f);
        CHECK(avg[0] == -64 && avg[1] == -3, "%s: %d %d", k->name, avg[0], avg[1]);
    }
}

/* ---- copy, zero ---- */

static void bulk_every_set(void)
{
    const sp_kernels *k;
    for (size_t s = 0; (k = sp_kernels_at(s)) != NULL; s++) {
        for (int i = 0; i < 400; i++) {
            size_t bytes = (size_t)(test_rand() % (i % 8 == 0 ? 600000 : i % 2 == 0 ? 300 : 20000));
            size_t shift = test_rand() % 80;
            bool non_temporal = test_rand() % 2 != 0;
            at_end = (int)(test_rand() % 2);
            uint8_t *src = take(X, 0, bytes, test_rand() % 80), *dst = take(DST, 0, bytes, shift);
            for (size_t j = 0; j < bytes; j++)
                src[j] = (uint8_t)(j % 251);
            k->copy(dst, src, bytes, non_temporal);
            CHECK(guards_whole(DST, 0) && memcmp(src, dst, bytes) == 0, "%s copy %zu shift %zu", k->name,
                  bytes, shift);
            k->zero(dst, bytes, non_temporal);
            size_t j = 0;
            while (j < bytes && dst[j] == 0)
                j++;
            CHECK(guards_whole(DST, 0) && j == bytes, "%s zero %zu shift %zu: byte %zu", k->name, bytes,
                  shift, j);
        }
    }
}

/* ---- choosing ---- */

static void choosing(void)
{
    const sp_kernels *k = NULL, *last = NULL, *kept;
    sp_kernels_info info;
    size_t n_usable = 0;
    for (size_t i = 0; (k = sp_kernels_at(i)) != NULL; i++)
        last = k;
    CHECK(sp_kernels_at(0) != NULL && strcmp(sp_kernels_at(0)->name, "scalar") == 0, "first set");
    unsetenv("SPCCL_CPU_ISA");
    CHECK_OK(sp_kernels_pick(&k));
    CHECK(k == last, "auto is %s, wanted %s", k->name, last->name);
    for (size_t i = 0; sp_kernels_describe(i, &info); i++) {
        setenv("SPCCL_CPU_ISA", info.name, 1);
        kept = k;
        spccl_status st = sp_kernels_pick(&k);
        n_usable += info.usable;
        printf("set %s: %s (%s)\n", info.name, info.usable ? "usable" : "absent", info.why);
        if (info.usable) {
            CHECK(st == SPCCL_OK && strcmp(k->name, info.name) == 0, "forcing %s", info.name);
        } else {
            CHECK(st == SPCCL_ERR_SETTING && k == kept, "forcing %s", info.name);
            CHECK(strstr(spccl_last_error(), info.why) != NULL, "text: %s", spccl_last_error());
        }
    }
    CHECK(sp_kernels_at(n_usable) == NULL && sp_kernels_at(n_usable - 1) == last, "%zu usable", n_usable);
    setenv("SPCCL_CPU_ISA", "sse9", 1);
    CHECK(sp_kernels_pick(&k) == SPCCL_ERR_SETTING, "an unknown set was accepted");
    CHECK(strstr(spccl_last_error(), "sse9") != NULL && strstr(spccl_last_error(), "scalar") != NULL,
          "text: %s", spccl_last_error());
    unsetenv("SPCCL_CPU_ISA");
}

static void no_entry_missing(void)
{
    const sp_kernels *k;
    for (size_t s = 0; (k = sp_kernels_at(s)) != NULL; s++) {
        CHECK(k->scan && k->combine && k->finish && k->copy && k->zero, "%s", k->name);
        for (int f = SPCCL_FORMAT_TILE; f <= SPCCL_FORMAT_DENSE; f++)
            CHECK(k->encode[f] && k->decode[f][0] && k->decode[f][1] && k->decode[f][2], "%s format %d",
                  k->name, f);
        CHECK(!k->encode[0] && !k->decode[0][0] && !k->decode[0][1] && !k->decode[0][2], "%s: empty",
              k->name);
    }
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {
        {"choosing", choosing},
        {"no_entry_missing", no_entry_missing},
        {"pici_by_hand", pici_by_hand},
        {"codec_model", codec_model},
        {"codec_every_set", codec_every_set},
        {"reduce_rules", reduce_rules},
        {"reduce_every_set", reduce_every_set},
        {"bulk_every_set", bulk_every_set},
        {NULL, NULL},
    };
    arenas_make();
    return test_main(cases, argc, argv);
}
