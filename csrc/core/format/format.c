/* format.c - layout, sizes and header of frames, and the check of received frames. See format.h and
 * docs/FORMAT.md. sp_frame_validate runs on every received slice, so the compiler must vectorise its loops.
 * They collect errors without a branch, and one branch follows at the end. */
#include "core/format/format.h"

#include "core/base/dtype.h"
#include "core/base/status.h"

#include <assert.h>

_Static_assert(sizeof(size_t) == 8, "frame sizes are 64-bit");
_Static_assert(SP_PICI_TILE_WORDS * 64 == SP_PICI_TILE_ELEMS, "one bit per element of a tile");
_Static_assert(SP_FRAME_ELEMS_MAX - 1 <= UINT32_MAX, "every index fits u32");
_Static_assert(SP_FRAME_HEADER_BYTES % SP_FRAME_ALIGN == 0,
               "the first section starts right after the header");

/* Offsets of the header's fields (FORMAT.md 2). */
enum {
    AT_MAGIC = 0,
    AT_VERSION = 4,
    AT_FORMAT = 5,
    AT_DTYPE = 6,
    AT_FLAGS = 7,
    AT_N_ELEMS = 8,
    AT_NNZ = 16,
    AT_FRAME_BYTES = 24,
    AT_INDEX_OFF = 32,
    AT_META_OFF = 40,
    AT_VALUES_OFF = 48,
    AT_RESERVED = 56
};
_Static_assert(AT_RESERVED + 8 == SP_FRAME_HEADER_BYTES, "header is 64 bytes");

/* ---- layout and sizes ---- */

#define NO_SECTION SIZE_MAX

/* Where index, meta and values of a frame lie: [off, end), and padding up to a multiple of SP_FRAME_ALIGN. A frame
 * without one of them has 0 there. */
struct sections {
    size_t off[3], end[3], frame_bytes;
};

static struct sections sections_of(spccl_format format, size_t n_elems, size_t nnz, size_t elem_bytes)
{
    struct sections s = {.frame_bytes = SP_FRAME_HEADER_BYTES};
    size_t n_tiles = sp_ceil_div(n_elems, SP_PICI_TILE_ELEMS), values_bytes = nnz * elem_bytes;
    size_t index_bytes = NO_SECTION, meta_bytes = NO_SECTION;

    assert(format != SPCCL_FORMAT_AUTO);
    if (format == SPCCL_FORMAT_EMPTY) {
        values_bytes = NO_SECTION;
    } else if (format == SPCCL_FORMAT_TILE) {
        index_bytes = sp_ceil_div(n_elems, SP_TILE_ELEMS);
        meta_bytes = nnz;
    } else if (format == SPCCL_FORMAT_PICI) {
        index_bytes = n_tiles * 4;
        meta_bytes = n_tiles * SP_PICI_TILE_WORDS * 8;
    } else if (format == SPCCL_FORMAT_COO) {
        index_bytes = nnz * 4;
    } else {
        values_bytes = n_elems * elem_bytes;
    }
    const size_t bytes[3] = {index_bytes, meta_bytes, values_bytes};
    for (int i = 0; i < 3; i++)
        if (bytes[i] != NO_SECTION) {
            s.off[i] = s.frame_bytes;
            s.end[i] = s.off[i] + bytes[i];
            s.frame_bytes = sp_align_up(s.end[i], SP_FRAME_ALIGN);
        }
    return s;
}

void sp_frame_layout_of(spccl_format format, size_t n_elems, size_t nnz, size_t elem_bytes,
                        sp_frame_layout *out)
{
    struct sections s = sections_of(format, n_elems, nnz, elem_bytes);
    *out = (sp_frame_layout){s.off[0], s.off[1], s.off[2], s.frame_bytes};
}

size_t sp_frame_bytes(spccl_format format, size_t n_elems, size_t nnz, size_t elem_bytes)
{
    sp_frame_layout layout;
    sp_frame_layout_of(format, n_elems, nnz, elem_bytes, &layout);
    return layout.frame_bytes;
}

size_t sp_frame_bound(size_t n_elems, size_t elem_bytes)
{
    return sp_frame_bytes(SPCCL_FORMAT_DENSE, n_elems, n_elems, elem_bytes);
}

size_t sp_frame_bound_forced(spccl_format format, size_t n_elems, size_t elem_bytes)
{
    if (format == SPCCL_FORMAT_AUTO)
        return sp_frame_bound(n_elems, elem_bytes);
    return sp_frame_bytes(format, n_elems, n_elems, elem_bytes);
}

/* ---- writing ---- */

void sp_frame_write_header(void *dst, spccl_format format, spccl_dtype dtype, bool is_delta, size_t n_elems,
                           size_t nnz, const sp_frame_layout *layout)
{
    uint8_t *p = dst;
    struct sections s = sections_of(format, n_elems, nnz, sp_dtype_bytes(dtype));

    sp_store_le32(p + AT_MAGIC, SP_FRAME_MAGIC);
    p[AT_VERSION] = SP_FRAME_VERSION;
    p[AT_FORMAT] = (uint8_t)format;
    p[AT_DTYPE] = (uint8_t)dtype;
    p[AT_FLAGS] = is_delta ? SP_FRAME_FLAG_DELTA : 0;
    sp_store_le64(p + AT_N_ELEMS, n_elems);
    sp_store_le64(p + AT_NNZ, format == SPCCL_FORMAT_DENSE ? n_elems : nnz);
    sp_store_le64(p + AT_FRAME_BYTES, layout->frame_bytes);
    sp_store_le64(p + AT_INDEX_OFF, layout->index_off);
    sp_store_le64(p + AT_META_OFF, layout->meta_off);
    sp_store_le64(p + AT_VALUES_OFF, layout->values_off);
    sp_store_le64(p + AT_RESERVED, 0);
    for (int i = 0; i < 3; i++)
        memset(p + s.end[i], 0, sp_align_up(s.end[i], SP_FRAME_ALIGN) - s.end[i]);
}

/* ---- checking: header. The comments use the rule numbers of FORMAT.md 4 ---- */

#define REFUSE(...) SP_FAIL(SPCCL_ERR_FORMAT, "frame: " __VA_ARGS__)

/* Rules 1 to 7: fields that do not depend on a count. A frame of version 2 may be shorter than a header of version 1. */
static spccl_status check_fixed_fields(const uint8_t *p, size_t bytes)
{
    if (bytes > AT_VERSION && sp_load_le32(p + AT_MAGIC) == SP_FRAME_MAGIC && p[AT_VERSION] == 2)
        return SP_FAIL(SPCCL_ERR_VERSION,
                       "frame: version 2, a delta, wanted version 1: spccl_delta_apply reads it");
    if (bytes < SP_FRAME_HEADER_BYTES)
        return REFUSE("%zu bytes left, wanted a header of %u", bytes, SP_FRAME_HEADER_BYTES);
    if (sp_load_le32(p + AT_MAGIC) != SP_FRAME_MAGIC)
        return REFUSE("magic %02x %02x %02x %02x, wanted 53 50 43 46 (\"SPCF\"): not a frame", p[0], p[1],
                      p[2], p[3]);
    if (p[AT_VERSION] != SP_FRAME_VERSION)
        return SP_FAIL(SPCCL_ERR_VERSION,
                       "frame: version %u, this library reads version %u: update the older side",
                       p[AT_VERSION], SP_FRAME_VERSION);
    if (p[AT_FORMAT] >= SPCCL_N_FORMATS)
        return REFUSE("format %u, wanted 0..%d", p[AT_FORMAT], SPCCL_N_FORMATS - 1);
    if (!sp_dtype_ok((spccl_dtype)p[AT_DTYPE]))
        return REFUSE("dtype %u, wanted 1..%d", p[AT_DTYPE], SP_N_DTYPES - 1);
    if ((p[AT_FLAGS] & ~SP_FRAME_FLAG_DELTA) != 0)
        return REFUSE("flags 0x%02x, wanted 0 or 1", p[AT_FLAGS]);
    if (sp_load_le64(p + AT_RESERVED) != 0)
        return REFUSE("reserved field 0x%llx, wanted 0", (unsigned long long)sp_load_le64(p + AT_RESERVED));
    return SPCCL_OK;
}

/* Rules 8 to 13: the counts, and whether they fit the format. */
static spccl_status check_counts(spccl_format format, bool is_delta, uint64_t n_elems, uint64_t nnz)
{
    unsigned long long n = n_elems, k = nnz;

    if (n_elems > SP_FRAME_ELEMS_MAX)
        return REFUSE("n_elems %llu, wanted at most %llu", n, (unsigned long long)SP_FRAME_ELEMS_MAX);
    if (nnz > n_elems)
        return REFUSE("nnz %llu, wanted at most n_elems %llu", k, n);
    if (n_elems == 0 && format != SPCCL_FORMAT_EMPTY)
        return REFUSE("n_elems 0 in format %s, wanted at least 1", spccl_format_name(format));
    if (format == SPCCL_FORMAT_EMPTY && nnz != 0)
        return REFUSE("nnz %llu in format empty, wanted 0", k);
    if (format == SPCCL_FORMAT_DENSE && nnz != n_elems)
        return REFUSE("nnz %llu in format dense, wanted n_elems %llu", k, n);
    if (format == SPCCL_FORMAT_DENSE && is_delta)
        return REFUSE("delta flag in format dense, wanted 0 (dense cannot say which elements differ)");
    return SPCCL_OK;
}

static spccl_status check_off(const char *field, uint64_t got, size_t wanted)
{
    if (got == wanted)
        return SPCCL_OK;
    return REFUSE("%s %llu, wanted %zu for this format, n_elems and nnz", field, (unsigned long long)got,
                  wanted);
}

/* Rules 14 to 19: offsets and sizes follow from the counts, no bytes are missing, padding is zero. */
static spccl_status check_layout(const uint8_t *p, size_t bytes, const sp_frame *f,
                                 const sp_frame_layout *want)
{
    struct sections s = sections_of(f->format, f->n_elems, f->nnz, sp_dtype_bytes(f->dtype));

    SP_TRY(check_off("index_off", sp_load_le64(p + AT_INDEX_OFF), want->index_off));
    SP_TRY(check_off("meta_off", sp_load_le64(p + AT_META_OFF), want->meta_off));
    SP_TRY(check_off("values_off", sp_load_le64(p + AT_VALUES_OFF), want->values_off));
    SP_TRY(check_off("frame_bytes", sp_load_le64(p + AT_FRAME_BYTES), want->frame_bytes));
    if (want->frame_bytes > bytes)
        return REFUSE("cut off: %zu bytes left, wanted frame_bytes %zu", bytes, want->frame_bytes);
    for (int i = 0; i < 3; i++)
        for (size_t at = s.end[i]; at % SP_FRAME_ALIGN != 0; at++)
            if (p[at] != 0)
                return REFUSE("padding byte %zu is 0x%02x, wanted 0", at, p[at]);
    return SPCCL_OK;
}

spccl_status sp_frame_validate_header(const void *buf, size_t bytes, sp_frame *out)
{
    const uint8_t *p = buf;
    sp_frame f = {0};
    sp_frame_layout layout;
    uint64_t n_elems, nnz;

    SP_TRY(check_fixed_fields(p, bytes));
    n_elems = sp_load_le64(p + AT_N_ELEMS);
    nnz = sp_load_le64(p + AT_NNZ);
    f.format = (spccl_format)p[AT_FORMAT];
    f.dtype = (spccl_dtype)p[AT_DTYPE];
    f.is_delta = (p[AT_FLAGS] & SP_FRAME_FLAG_DELTA) != 0;
    SP_TRY(check_counts(f.format, f.is_delta, n_elems, nnz));
    f.n_elems = n_elems;
    f.nnz = nnz;
    sp_frame_layout_of(f.format, f.n_elems, f.nnz, sp_dtype_bytes(f.dtype), &layout);
    SP_TRY(check_layout(p, bytes, &f, &layout));
    f.frame_bytes = layout.frame_bytes;
    f.index = layout.index_off != 0 ? p + layout.index_off : NULL;
    f.meta = layout.meta_off != 0 ? p + layout.meta_off : NULL;
    f.values = layout.values_off != 0 ? p + layout.values_off : NULL;
    *out = f;
    return SPCCL_OK;
}

/* ---- checking: index sections ---- */

static size_t sum_u8(const uint8_t *p, size_t n)
{
    size_t sum = 0;
    for (size_t i = 0; i < n; i++)
        sum += p[i];
    return sum;
}

/* Number of falls: the i in [1, n) with p[i] <= p[i-1]. Runs of 255 let the compiler count in bytes. */
static size_t count_falls_u8(const uint8_t *p, size_t n)
{
    size_t falls = 0;
    for (size_t i = 1; i < n;) {
        size_t end = i + sp_min_size(255, n - i);
        uint8_t run = 0;
        for (; i < end; i++)
            run = (uint8_t)(run + (p[i] <= p[i - 1]));
        falls += run;
    }
    return falls;
}

/* Number of falls at the first offset of a block that is not empty. The counts sum to nnz >= 1. There is no
 * branch on a count: at the densities of this format, about every other block is empty, and a branch would be
 * mispredicted. */
static size_t count_border_falls(const uint8_t *counts, size_t n_blocks, const uint8_t *offsets, size_t nnz)
{
    size_t falls = 0, off = 0;
    for (size_t b = 0; b < n_blocks; b++) {
        size_t at = off < nnz ? off : nnz - 1;
        size_t before = at - (at != 0);
        falls += (size_t)((counts[b] != 0) & (off != 0) & (offsets[at] <= offsets[before]));
        off += counts[b];
    }
    return falls;
}

/* Slow path, only for the error text: find the first offset that does not rise within its block. */
static spccl_status refuse_tile_order(const sp_frame *f)
{
    size_t off = 0, n_blocks = sp_ceil_div(f->n_elems, SP_TILE_ELEMS);
    for (size_t b = 0; b < n_blocks; b++) {
        for (size_t i = 1; i < f->index[b]; i++) {
            if (f->meta[off + i] <= f->meta[off + i - 1])
                return REFUSE("tile: block %zu: offset %u after %u, wanted strictly rising", b,
                              f->meta[off + i], f->meta[off + i - 1]);
        }
        off += f->index[b];
    }
    return SP_FAIL(SPCCL_ERR_BUG,
                   "frame: tile: the fast check found a wrong order of offsets, the slow one none");
}

/* Rules 20 to 22. A fall inside a block is an error. A fall from one block to the next is allowed. So the
 * number of all falls must equal the number of falls at block starts. */
static spccl_status check_tile(const sp_frame *f)
{
    size_t n_blocks = sp_ceil_div(f->n_elems, SP_TILE_ELEMS);
    size_t sum = sum_u8(f->index, n_blocks), rest = f->n_elems % SP_TILE_ELEMS;

    if (sum != f->nnz)
        return REFUSE("tile: counts sum to %zu, wanted nnz %zu", sum, f->nnz);
    if (f->nnz == 0)
        return SPCCL_OK;
    if (count_falls_u8(f->meta, f->nnz) != count_border_falls(f->index, n_blocks, f->meta, f->nnz))
        return refuse_tile_order(f);
    /* Offsets rise, so the last offset of the last block is its largest. */
    if (rest != 0 && f->index[n_blocks - 1] != 0 && f->meta[f->nnz - 1] >= rest)
        return REFUSE("tile: block %zu: offset %u, wanted below %zu (n_elems %zu)", n_blocks - 1,
                      f->meta[f->nnz - 1], rest, f->n_elems);
    return SPCCL_OK;
}

/* Number of set bits in one tile's 64 words. The loop adds bit counts per byte: it needs no popcount
 * instruction, which the portable build lacks, and it vectorises. 16 words give at most 128 per byte. */
static unsigned count_tile_bits(const uint8_t *words)
{
    const uint64_t m1 = 0x5555555555555555u, m2 = 0x3333333333333333u, m4 = 0x0f0f0f0f0f0f0f0fu;
    const uint64_t low = 0x00ff00ff00ff00ffu;
    uint64_t total = 0;

    for (size_t from = 0; from < SP_PICI_TILE_WORDS; from += 16) {
        uint64_t bytes = 0;
        for (size_t i = from; i < from + 16; i++) {
            uint64_t v = sp_load_le64(words + i * 8);
            v -= (v >> 1) & m1;
            v = (v & m2) + ((v >> 2) & m2);
            bytes += (v + (v >> 4)) & m4;
        }
        total += (bytes & low) + ((bytes >> 8) & low);
    }
    return (unsigned)((total * 0x0001000100010001u) >> 48);
}

/* Mask of the bits of word `col` that stand for an element, in a partial tile of n elements. */
static uint64_t pici_word_mask(size_t n, size_t col)
{
    size_t rows = n > col ? sp_ceil_div(n - col, 64) : 0;
    return rows >= 64 ? UINT64_MAX : (UINT64_C(1) << rows) - 1;
}

/* Rules 23 to 25. */
static spccl_status check_pici(const sp_frame *f)
{
    size_t n_tiles = sp_ceil_div(f->n_elems, SP_PICI_TILE_ELEMS), rest = f->n_elems % SP_PICI_TILE_ELEMS;
    uint64_t sum = 0;

    for (size_t t = 0; t < n_tiles; t++) {
        uint32_t prefix = sp_load_le32(f->index + t * 4);
        if (prefix != sum)
            return REFUSE("pici: prefix of tile %zu is %u, wanted %llu", t, prefix, (unsigned long long)sum);
        sum += count_tile_bits(f->meta + t * SP_PICI_TILE_WORDS * 8);
    }
    if (sum != f->nnz)
        return REFUSE("pici: %llu bits set, wanted nnz %zu", (unsigned long long)sum, f->nnz);
    for (size_t col = 0; rest != 0 && col < SP_PICI_TILE_WORDS; col++) {
        size_t w = (n_tiles - 1) * SP_PICI_TILE_WORDS + col;
        if ((sp_load_le64(f->meta + w * 8) & ~pici_word_mask(rest, col)) != 0)
            return REFUSE("pici: word %zu has bits of elements past n_elems %zu", w, f->n_elems);
    }
    return SPCCL_OK;
}

/* Rules 26 and 27. */
static spccl_status check_coo(const sp_frame *f)
{
    unsigned falls = 0;
    uint32_t last;

    if (f->nnz == 0)
        return SPCCL_OK;
    for (size_t i = 1; i < f->nnz; i++)
        falls |= sp_load_le32(f->index + i * 4) <= sp_load_le32(f->index + i * 4 - 4);
    for (size_t i = 1; falls != 0 && i < f->nnz; i++) {
        uint32_t a = sp_load_le32(f->index + i * 4 - 4), b = sp_load_le32(f->index + i * 4);
        if (b <= a)
            return REFUSE("coo: index %u after %u at entry %zu, wanted strictly rising", b, a, i);
    }
    last = sp_load_le32(f->index + (f->nnz - 1) * 4);
    if (last >= f->n_elems)
        return REFUSE("coo: index %u, wanted below n_elems %zu", last, f->n_elems);
    return SPCCL_OK;
}

static spccl_status check_index(const sp_frame *f)
{
    switch (f->format) {
    case SPCCL_FORMAT_EMPTY:
    case SPCCL_FORMAT_DENSE:
        return SPCCL_OK;
    case SPCCL_FORMAT_TILE:
        return check_tile(f);
    case SPCCL_FORMAT_PICI:
        return check_pici(f);
    case SPCCL_FORMAT_COO:
        return check_coo(f);
    case SPCCL_FORMAT_AUTO:
    case SPCCL_FORMAT_DELTA:
        break;
    }
    return SP_FAIL(SPCCL_ERR_BUG, "frame: format %d after the header check", (int)f->format);
}

spccl_status sp_frame_validate(const void *buf, size_t bytes, sp_frame *out)
{
    sp_frame f;

    SP_TRY(sp_frame_validate_header(buf, bytes, &f));
    SP_TRY(check_index(&f));
    *out = f;
    return SPCCL_OK;
}
