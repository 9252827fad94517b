/* test_format.c - core/format/format.c: layout, header, every rule of FORMAT.md 4 about one frame, and the
 * hex examples of FORMAT.md. test_format_mutated.c has mutated frames. */
#include "frames.h"

/* ---- layout, sizes, header ---- */

static void check_layout(spccl_format format, size_t n, size_t nnz, size_t eb)
{
    size_t blocks = (n + 255) / 256, tiles = (n + 4095) / 4096, at = 64;
    size_t bytes[3] = {0, 0, 0};
    int has[3] = {0, 0, 0};
    sp_frame_layout l;
    size_t got[3];

    if (format == SPCCL_FORMAT_TILE || format == SPCCL_FORMAT_PICI || format == SPCCL_FORMAT_COO)
        has[0] = has[2] = 1;
    has[1] = format == SPCCL_FORMAT_TILE || format == SPCCL_FORMAT_PICI;
    has[2] |= format == SPCCL_FORMAT_DENSE;
    bytes[0] = format == SPCCL_FORMAT_TILE ? blocks : format == SPCCL_FORMAT_PICI ? 4 * tiles : 4 * nnz;
    bytes[1] = format == SPCCL_FORMAT_TILE ? nnz : 512 * tiles;
    bytes[2] = (format == SPCCL_FORMAT_DENSE ? n : nnz) * eb;
    sp_frame_layout_of(format, n, nnz, eb, &l);
    got[0] = l.index_off;
    got[1] = l.meta_off;
    got[2] = l.values_off;
    for (int s = 0; s < 3; s++) {
        size_t want = has[s] ? at : 0;
        CHECK(got[s] == want, "%s n %zu nnz %zu eb %zu: section %d at %zu, wanted %zu",
              spccl_format_name(format), n, nnz, eb, s, got[s], want);
        if (has[s])
            at = (at + bytes[s] + 15) / 16 * 16;
    }
    CHECK(l.frame_bytes == at, "%s n %zu nnz %zu eb %zu: %zu bytes, wanted %zu", spccl_format_name(format), n,
          nnz, eb, l.frame_bytes, at);
    CHECK(sp_frame_bytes(format, n, nnz, eb) == at, "sp_frame_bytes differs");
    CHECK(at <= sp_frame_bound_forced(format, n, eb), "bound of %s too small", spccl_format_name(format));
}

static void test_layout(void)
{
    static const size_t ns[] = {1,   2,   15,   16,   17,   31,    32,    33,      255,
                                256, 257, 4095, 4096, 4097, 12295, 65536, 1 << 20, (size_t)1 << 31};
    for (size_t f = 0; f < N_FORMATS; f++) {
        for (size_t i = 0; i < sizeof ns / sizeof *ns; i++) {
            for (size_t eb = 1; eb <= 8; eb *= 2) {
                size_t n = ns[i], nnz[] = {0, 1, n / 100, n / 3, n - 1, n};
                for (size_t k = 0; k < 6; k++)
                    check_layout(formats[f], n, nnz[k], eb);
                CHECK(sp_frame_bound(n, eb) == sp_frame_bytes(SPCCL_FORMAT_DENSE, n, n, eb), "bound");
            }
        }
    }
    CHECK(sp_frame_bytes(SPCCL_FORMAT_EMPTY, 0, 0, 4) == 64, "empty frame of nothing");
    CHECK(sp_frame_bound(0, 4) == 64, "bound of nothing");
}

static void test_header(void)
{
    uint8_t b[256];
    sp_frame_layout l;
    static const uint8_t want[64] = {'S', 'P', 'C', 'F', 1, 1, 4, 1, 44, 1, 0, 0,  0, 0, 0, 0, 3, 0, 0, 0, 0,
                                     0,   0,   0,   128, 0, 0, 0, 0, 0,  0, 0, 64, 0, 0, 0, 0, 0, 0, 0, 80};

    sp_frame_layout_of(SPCCL_FORMAT_TILE, 300, 3, 8, &l); /* 2 counts, 3 offsets, 24 bytes of values */
    CHECK(l.frame_bytes == 128, "%zu", l.frame_bytes);
    memset(b, 0xee, sizeof b);
    sp_frame_write_header(b, SPCCL_FORMAT_TILE, SPCCL_FLOAT64, true, 300, 3, &l);
    CHECK(memcmp(b, want, 48) == 0 && b[48] == 96 && b[49] == 0, "header bytes");
    for (size_t i = 49; i < 64; i++)
        CHECK(b[i] == 0, "header byte %zu", i);
    for (size_t i = 64; i < sizeof b; i++) {
        int is_padding = (i >= 66 && i < 80) || (i >= 83 && i < 96) || (i >= 120 && i < 128);
        CHECK(b[i] == (is_padding ? 0 : 0xee), "byte %zu is 0x%02x", i, b[i]);
    }
}

/* ---- good frames ---- */

static void check_good(spccl_format format, size_t n, spccl_dtype dtype, unsigned every)
{
    struct buf b = sparse_frame(format, n, dtype, every);
    uint8_t *odd = malloc(b.bytes + 1);
    sp_frame f, g;

    CHECK_OK(sp_frame_validate(b.p, b.bytes, &f));
    CHECK(f.format == format && f.dtype == dtype && f.n_elems == n && f.frame_bytes == b.bytes && !f.is_delta,
          "fields of %s n %zu", spccl_format_name(format), n);
    memcpy(odd + 1, b.p, b.bytes);
    CHECK_OK(sp_frame_validate(odd + 1, b.bytes, &g)); /* any alignment */
    CHECK_OK(sp_frame_validate_header(b.p, b.bytes, &g));
    CHECK(g.nnz == f.nnz && g.index == f.index && g.meta == f.meta && g.values == f.values,
          "header check differs");
    free(odd);
    free(b.p);
}

static void test_good(void)
{
    static const size_t ns[] = {1, 2, 63, 64, 65, 255, 256, 257, 4095, 4096, 4097, 3 * 4096 + 7, 65536};
    static const unsigned everies[] = {1, 2, 10, 100, 5000};

    for (size_t f = 0; f < N_FORMATS; f++) {
        for (size_t i = 0; i < sizeof ns / sizeof *ns; i++) {
            for (size_t e = 0; e < sizeof everies / sizeof *everies; e++)
                check_good(formats[f], ns[i], (spccl_dtype)(1 + test_rand() % 10), everies[e]);
        }
    }
    check_good(SPCCL_FORMAT_EMPTY, 0, SPCCL_FLOAT32, 1);
}

/* A fall is an offset that is not larger than the one before it. Most falls: each of 600 blocks lists one
 * element, all at the same offset. Fewest falls: each block lists 255 elements with rising offsets. */
static void test_good_extremes(void)
{
    enum { N = 600 * 256 };
    for (int full = 0; full < 2; full++) {
        uint8_t *x = calloc(N, 1);
        struct buf b;
        sp_frame f;
        for (size_t i = 0; i < N; i++)
            x[i] = full ? i % 256 != 255 : i % 256 == 9;
        b = encode(SPCCL_FORMAT_TILE, x, N, SPCCL_UINT8, NULL);
        CHECK_OK(sp_frame_validate(b.p, b.bytes, &f));
        CHECK(f.nnz == (full ? N / 256 * 255 : N / 256), "nnz %zu", f.nnz);
        b.p[64 + 608 + 300]--; /* offset 45 of block 1 if full: now equal to the offset before it */
        CHECK((sp_frame_validate(b.p, b.bytes, &f) == SPCCL_OK) == !full, "an offset that is one lower");
        free(b.p);
        free(x);
    }
}

/* ---- every rule: change one field of a good frame ---- */

struct broken {
    int rule;
    spccl_format format;
    size_t at;        /* offset of the field in the frame */
    size_t bytes;     /* size of the field */
    uint64_t value;   /* its new value, little-endian */
    const char *text; /* part of the error text */
};

/* All frames hold the same array: float32, n_elems 300, listed elements 3, 66, 258. Offsets of the sections
 * and size of the frame, in bytes: tile 64, 80, 96 of 112; pici 64, 80, 592 of 608; coo 64, 80 of 96; dense
 * 64 of 1264. */
static const struct broken broken[] = {
    {2, SPCCL_FORMAT_TILE, 0, 1, 'X', "magic"},
    {2, SPCCL_FORMAT_TILE, 3, 1, 'f', "magic"},
    {4, SPCCL_FORMAT_TILE, 5, 1, 5, "format 5"},
    {4, SPCCL_FORMAT_TILE, 5, 1, 255, "format 255"},
    {5, SPCCL_FORMAT_TILE, 6, 1, 0, "dtype 0"},
    {5, SPCCL_FORMAT_TILE, 6, 1, 11, "dtype 11"},
    {6, SPCCL_FORMAT_TILE, 7, 1, 2, "flags 0x02"},
    {6, SPCCL_FORMAT_TILE, 7, 1, 0x81, "flags 0x81"},
    {7, SPCCL_FORMAT_TILE, 56, 1, 1, "reserved"},
    {7, SPCCL_FORMAT_TILE, 63, 1, 0x80, "reserved"},
    {8, SPCCL_FORMAT_TILE, 8, 8, (UINT64_C(1) << 31) + 1, "n_elems 2147483649"},
    {8, SPCCL_FORMAT_EMPTY, 8, 8, UINT64_MAX, "n_elems"},
    {9, SPCCL_FORMAT_COO, 16, 8, 301, "nnz 301"},
    {9, SPCCL_FORMAT_COO, 16, 8, UINT64_MAX, "nnz"},
    {10, SPCCL_FORMAT_TILE, 8, 16, 0, "n_elems 0"},
    {10, SPCCL_FORMAT_DENSE, 8, 16, 0, "n_elems 0"},
    {11, SPCCL_FORMAT_EMPTY, 16, 8, 1, "nnz 1"},
    {12, SPCCL_FORMAT_DENSE, 16, 8, 299, "nnz 299"},
    {13, SPCCL_FORMAT_DENSE, 7, 1, 1, "delta"},
    {14, SPCCL_FORMAT_TILE, 32, 8, 80, "index_off 80"},
    {14, SPCCL_FORMAT_DENSE, 32, 8, 64, "index_off 64"},
    {15, SPCCL_FORMAT_TILE, 40, 8, 96, "meta_off 96"},
    {15, SPCCL_FORMAT_COO, 40, 8, 80, "meta_off 80"},
    {16, SPCCL_FORMAT_TILE, 48, 8, UINT64_MAX, "values_off"},
    {16, SPCCL_FORMAT_EMPTY, 48, 8, 64, "values_off 64"},
    {16, SPCCL_FORMAT_COO, 16, 8, 5, "values_off 80"}, /* with nnz 5 the values would start later */
    {17, SPCCL_FORMAT_TILE, 24, 8, 96, "frame_bytes 96"},
    {17, SPCCL_FORMAT_TILE, 24, 8, 128, "frame_bytes 128"},
    {26, SPCCL_FORMAT_COO, 16, 8, 4,
     "index 0 after 258"}, /* nnz 4 has the same layout: padding becomes index */
    {17, SPCCL_FORMAT_EMPTY, 24, 8, 80, "frame_bytes 80"},
    {19, SPCCL_FORMAT_TILE, 66, 1, 1, "padding byte 66"},
    {19, SPCCL_FORMAT_TILE, 95, 1, 0x80, "padding byte 95"},
    {19, SPCCL_FORMAT_TILE, 111, 1, 1, "padding byte 111"},
    {19, SPCCL_FORMAT_PICI, 68, 1, 1, "padding byte 68"},
    {20, SPCCL_FORMAT_TILE, 64, 1, 3, "counts sum to 4"},
    {20, SPCCL_FORMAT_TILE, 65, 1, 0, "counts sum to 2"},
    {20, SPCCL_FORMAT_TILE, 64, 2, 0xffff, "counts sum to 510"},
    {21, SPCCL_FORMAT_TILE, 80, 1, 66, "offset 66 after 66"},
    {21, SPCCL_FORMAT_TILE, 80, 1, 255, "offset 66 after 255"},
    {21, SPCCL_FORMAT_TILE, 64, 2, 0x0201, "offset 2 after 66"},
    {22, SPCCL_FORMAT_TILE, 82, 1, 44, "offset 44, wanted below 44"},
    {22, SPCCL_FORMAT_TILE, 82, 1, 255, "offset 255"},
    {23, SPCCL_FORMAT_PICI, 64, 4, 1, "prefix of tile 0 is 1"},
    {23, SPCCL_FORMAT_PICI, 64, 4, UINT32_MAX, "prefix"},
    {24, SPCCL_FORMAT_PICI, 80 + 8 * 2, 8, 2, "2 bits set"},
    {24, SPCCL_FORMAT_PICI, 80 + 8 * 9, 8, 1, "4 bits set"},
    {25, SPCCL_FORMAT_PICI, 80 + 8 * 3, 8, 32, "word 3"}, /* element 5*64+3 */
    {25, SPCCL_FORMAT_PICI, 80 + 8 * 3, 8, 1ull << 63, "word 3"},
    {26, SPCCL_FORMAT_COO, 64, 4, 66, "index 66 after 66"},
    {26, SPCCL_FORMAT_COO, 64, 4, 299, "index 66 after 299"},
    {26, SPCCL_FORMAT_COO, 72, 4, 5, "index 5 after 66"},
    {27, SPCCL_FORMAT_COO, 72, 4, 300, "index 300"},
    {27, SPCCL_FORMAT_COO, 72, 4, UINT32_MAX, "index 4294967295"},
};

static struct buf example_frame(spccl_format format)
{
    float x[300] = {0};
    if (format != SPCCL_FORMAT_EMPTY) {
        x[3] = 1.0f;
        x[66] = -2.0f;
        x[258] = 0.5f;
    }
    return encode(format, x, 300, SPCCL_FLOAT32, NULL);
}

static void check_refused(const struct buf *b, spccl_status want, const char *text, int rule)
{
    sp_frame f;
    spccl_status st;
    memset(&f, 0x5a, sizeof f);
    st = sp_frame_validate(b->p, b->bytes, &f);
    CHECK(st == want, "rule %d: %s, wanted %s", rule, spccl_status_name(st), spccl_status_name(want));
    CHECK(strstr(spccl_last_error(), text) != NULL, "rule %d: \"%s\" without \"%s\"", rule,
          spccl_last_error(), text);
    CHECK(((uint8_t *)&f)[0] == 0x5a, "rule %d: out was touched", rule);
}

static void test_refused(void)
{
    for (size_t i = 0; i < sizeof broken / sizeof *broken; i++) {
        const struct broken *k = &broken[i];
        struct buf b = example_frame(k->format);
        for (size_t j = 0; j < k->bytes; j++) {
            uint64_t v = j < 8 ? k->value >> (8 * j) : 0;
            b.p[k->at + j] = (uint8_t)v;
        }
        check_refused(&b, SPCCL_ERR_FORMAT, k->text, k->rule);
        free(b.p);
    }
}

static void test_version(void)
{
    struct buf b = example_frame(SPCCL_FORMAT_TILE);
    b.p[4] = 2;
    b.p[5] = 99; /* the version is checked before fields that a later version may change */
    check_refused(&b, SPCCL_ERR_VERSION, "version 2", 3);
    b.p[4] = 0;
    check_refused(&b, SPCCL_ERR_VERSION, "version 0", 3);
    free(b.p);
}

/* Rules 1 and 18: the frame is cut to every shorter length, in memory of exactly that size. */
static void test_cut_off(void)
{
    for (size_t f = 0; f < N_FORMATS; f++) {
        struct buf b = example_frame(formats[f]);
        for (size_t bytes = 0; bytes < b.bytes; bytes += bytes < 128 ? 1 : 16) {
            struct buf cut = {malloc(bytes != 0 ? bytes : 1), bytes};
            memcpy(cut.p, b.p, bytes);
            check_refused(&cut, SPCCL_ERR_FORMAT, bytes < 64 ? "wanted a header" : "cut off",
                          bytes < 64 ? 1 : 18);
            free(cut.p);
        }
        free(b.p);
    }
}

/* A header without sections whose counts have the largest values. */
static void test_huge_claims(void)
{
    for (int f = SPCCL_FORMAT_TILE; f < SPCCL_N_FORMATS; f++) {
        for (unsigned t = SPCCL_FLOAT32; t <= SPCCL_UINT8; t++) {
            struct buf b = {malloc(64), 64};
            sp_frame_layout l;
            size_t n = (size_t)1 << 31;
            sp_frame_layout_of((spccl_format)f, n, n, sp_dtype_bytes((spccl_dtype)t), &l);
            /* Not with sp_frame_write_header: it would zero the padding, which is outside of these 64
             * bytes. */
            memset(b.p, 0, 64);
            memcpy(b.p, "SPCF\1", 5);
            b.p[5] = (uint8_t)f;
            b.p[6] = (uint8_t)t;
            sp_store_le64(b.p + 8, n);
            sp_store_le64(b.p + 16, n);
            sp_store_le64(b.p + 24, l.frame_bytes);
            sp_store_le64(b.p + 32, l.index_off);
            sp_store_le64(b.p + 40, l.meta_off);
            sp_store_le64(b.p + 48, l.values_off);
            check_refused(&b, SPCCL_ERR_FORMAT, "cut off", 18);
            free(b.p);
        }
    }
}

/* ---- the examples of docs/FORMAT.md, section 7 ---- */

/* A hex dump as in FORMAT.md: each line has the offset and 16 bytes. "*" stands for lines equal to the one
 * before. */
static void dump(const struct buf *b, char *out, size_t cap)
{
    size_t used = 0;
    int starred = 0;
    for (size_t at = 0; at < b->bytes; at += 16) {
        int same = at >= 16 && memcmp(b->p + at, b->p + at - 16, 16) == 0;
        if (same && starred)
            continue;
        starred = same;
        used += (size_t)snprintf(out + used, cap - used, same ? "*\n" : "%04zx ", at);
        for (size_t i = 0; !same && i < 16; i++)
            used += (size_t)snprintf(out + used, cap - used, " %02x%s", b->p[at + i], i == 15 ? "\n" : "");
    }
    snprintf(out + used, cap - used, "%04zx\n", b->bytes);
}

static void check_example(const char *doc, const char *name, const struct buf *b)
{
    char fence[64], want[8192];
    const char *at;

    snprintf(fence, sizeof fence, "```hex %s\n", name);
    dump(b, want, sizeof want);
    at = strstr(doc, fence);
    CHECK(at != NULL && strncmp(at + strlen(fence), want, strlen(want)) == 0,
          "docs/FORMAT.md, example %s: wanted\n%s", name, want);
}

static void test_examples(void)
{
    static char doc[1 << 16];
    float base[300] = {0}, x[300] = {0};
    struct buf b;
    FILE *f = fopen(SPCCL_TEST_SOURCE_DIR "/docs/FORMAT.md", "rb");
    CHECK(f != NULL, "cannot open docs/FORMAT.md");
    if (f == NULL)
        return;
    doc[fread(doc, 1, sizeof doc - 1, f)] = '\0';
    fclose(f);
    for (size_t i = 0; i < N_FORMATS; i++) {
        b = example_frame(formats[i]);
        check_example(doc, spccl_format_name(formats[i]), &b);
        free(b.p);
    }
    base[3] = base[66] = 1.0f;
    x[66] = 1.0f; /* element 3 became zero, element 258 became 0.5 */
    x[258] = 0.5f;
    b = encode(SPCCL_FORMAT_COO, x, 300, SPCCL_FLOAT32, base);
    check_example(doc, "delta", &b);
    free(b.p);
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {
        {"layout", test_layout},     {"header", test_header},
        {"good", test_good},         {"good_extremes", test_good_extremes},
        {"refused", test_refused},   {"version", test_version},
        {"cut_off", test_cut_off},   {"huge_claims", test_huge_claims},
        {"examples", test_examples}, {NULL, NULL},
    };
    return test_main(cases, argc, argv);
}
