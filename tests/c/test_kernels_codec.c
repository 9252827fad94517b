/* test_kernels_codec.c - scan, encode and decode: compares every kernel set with the scalar one, bit for
 * bit, and the scalar one with a model. */
#include "core/base/status.h"
#include "kernel_data.h"

#define N_MAX 70000u

static const size_t widths[] = {1, 2, 4, 8};

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

/* Set the highest bit of half of the elements: -0.0 among the zeros, and negative values. */
static void add_signs(uint8_t *x, size_t n, size_t bytes)
{
    for (size_t i = 0; i < n; i++)
        x[(i + 1) * bytes - 1] ^= test_rand() % 2 != 0 ? 0x80 : 0;
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
    bool has_base, ignores_sign;
    sp_scan_args scan[2];
};
static const char *case_text(const struct codec_case *c)
{
    static char text[160];
    snprintf(text, sizeof text, "%s n=%zu bytes=%zu shift=%zu %s density=%g base=%d sign=%d at_end=%d",
             c->k->name, c->n, c->bytes, c->shift, pattern_names[c->pattern], c->density, c->has_base,
             !c->ignores_sign, at_end);
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
    if (c->ignores_sign)
        add_signs(x, c->n, c->bytes);
    for (int who = 0; who < 2; who++) {
        sp_scan_args *s = &c->scan[who];
        *s = (sp_scan_args){.x = x,
                            .base = base,
                            .n_elems = c->n,
                            .elem_bytes = c->bytes,
                            .ignores_sign = c->ignores_sign,
                            .nnz = 77777777};
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
    c.ignores_sign = !c.has_base && test_rand() % 2 != 0;
    at_end = (int)(test_rand() % 2);
    c.shift = test_rand() % 3 == 0 ? 0 : test_rand() % 64;
    check_codec(&c, all_adds);
}

static void codec_every_set(void)
{
    static const double densities[] = {0, 0.001, 0.01, 0.1, 0.3, 0.5, 0.9, 1};
    const sp_kernels *k;
    size_t share = (size_t)test_share;
    for (size_t s = 0; (k = sp_kernels_at(s)) != NULL; s++) {
        for (size_t w = 0; w < 4; w++) {
            for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
                for (size_t d = (i + w) % share; d < sizeof densities / sizeof densities[0]; d += share)
                    run_codec(k, sizes[i], widths[w], RANDOM, densities[d], true);
                for (int p = ONE_BLOCK; p < N_PATTERNS; p++)
                    run_codec(k, sizes[i], widths[w], (enum pattern)p, 0, true);
            }
            for (int i = 0; i < share_of(40, 10); i++) {
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
    add_signs(x, n, bytes);
    for (int all_bits = 0; all_bits < 2; all_bits++) {
        uint64_t wanted = ~UINT64_C(0) >> (64 - 8 * bytes + (all_bits == 0));
        s.ignores_sign = all_bits == 0;
        k->scan(&s);
        nnz = 0;
        for (size_t i = 0; i < n; i++) {
            uint64_t v = 0;
            memcpy(&v, x + i * bytes, bytes);
            CHECK((mask[i / 64] >> (i % 64) & 1) == ((v & wanted) != 0), "mask of element %zu", i);
            nnz += (v & wanted) != 0;
        }
        CHECK(s.nnz == nnz, "nnz %zu, model %zu", s.nnz, nnz);
    }
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

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {
        {"pici_by_hand", pici_by_hand},
        {"codec_model", codec_model},
        {"codec_every_set", codec_every_set},
        {NULL, NULL},
    };
    arenas_make();
    return test_main(cases, argc, argv);
}
