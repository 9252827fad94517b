/* delta.c - reading and writing of frames of version 2. See delta.h. The comments use the rule numbers of docs/FORMAT.md,
 * section 11. */
#include "core/format/delta.h"

#include "core/format/format.h"

#include <assert.h>

/* Offsets of the header's fields. */
enum {
    AT_MAGIC = 0,
    AT_VERSION = 4,
    AT_FORMAT = 5,
    AT_DTYPE = 6,
    AT_FLAGS = 7,
    AT_N_ELEMS = 8,
    AT_NNZ = 16,
    AT_FRAME_BYTES = 24
};
_Static_assert(AT_FRAME_BYTES + 8 == SP_DELTA_HEADER_BYTES, "header is 32 bytes");
_Static_assert(SP_DELTA_SLICE_ELEMS - 1 <= UINT16_MAX, "places fit u16");

typedef unsigned long long ull;
#define REFUSE(...) SP_FAIL(SPCCL_ERR_FORMAT, "delta: " __VA_ARGS__)

/* ---- reading: header and table ---- */

bool sp_delta_is_frame(const void *buf, size_t bytes)
{
    const uint8_t *p = buf;
    return bytes > AT_VERSION && sp_load_le32(p) == SP_FRAME_MAGIC && p[AT_VERSION] == SP_DELTA_VERSION;
}

/* Rules 1 to 6. */
static spccl_status check_fixed_fields(const uint8_t *p, size_t bytes)
{
    if (bytes < SP_DELTA_HEADER_BYTES)
        return REFUSE("%zu bytes left, wanted a header of %u", bytes, SP_DELTA_HEADER_BYTES);
    if (sp_load_le32(p + AT_MAGIC) != SP_FRAME_MAGIC)
        return REFUSE("magic %02x %02x %02x %02x, wanted 53 50 43 46 (\"SPCF\"): not a frame", p[0], p[1],
                      p[2], p[3]);
    if (p[AT_VERSION] != SP_DELTA_VERSION)
        return SP_FAIL(
            SPCCL_ERR_VERSION, "delta: frame of version %u, wanted %u%s", p[AT_VERSION], SP_DELTA_VERSION,
            p[AT_VERSION] == SP_FRAME_VERSION ? ": spccl_decode reads it" : ": update the older side");
    if (p[AT_FORMAT] != SPCCL_FORMAT_DELTA)
        return REFUSE("format %u, wanted %d", p[AT_FORMAT], SPCCL_FORMAT_DELTA);
    if (!sp_dtype_ok((spccl_dtype)p[AT_DTYPE]))
        return REFUSE("dtype %u, wanted 1..%d", p[AT_DTYPE], SP_N_DTYPES - 1);
    if (p[AT_FLAGS] != SP_FRAME_FLAG_DELTA)
        return REFUSE("flags 0x%02x, wanted 1", p[AT_FLAGS]);
    return SPCCL_OK;
}

/* Rules 7 to 10. */
static spccl_status check_counts(const sp_delta_frame *f, size_t bytes)
{
    if (f->n_elems > SP_DELTA_ELEMS_MAX)
        return REFUSE("n_elems %llu, wanted at most %llu", (ull)f->n_elems, (ull)SP_DELTA_ELEMS_MAX);
    if (f->nnz > f->n_elems)
        return REFUSE("nnz %llu, wanted at most n_elems %llu", (ull)f->nnz, (ull)f->n_elems);
    if (f->frame_bytes % SP_DELTA_ALIGN != 0 || f->frame_bytes > SP_DELTA_BYTES_MAX ||
        f->frame_bytes < SP_DELTA_HEADER_BYTES + SP_DELTA_ENTRY_BYTES * f->n_slices)
        return REFUSE("frame_bytes %llu, wanted a multiple of 8 from %llu to 2^34", (ull)f->frame_bytes,
                      (ull)(SP_DELTA_HEADER_BYTES + SP_DELTA_ENTRY_BYTES * f->n_slices));
    if (f->frame_bytes > bytes)
        return REFUSE("cut off: %zu bytes left, wanted frame_bytes %llu", bytes, (ull)f->frame_bytes);
    return SPCCL_OK;
}

/* Where a slice lies, and what its entry says. */
struct entry {
    uint32_t k, code, c; /* changed; elements */
    uint64_t at, end;    /* bytes of the frame: [at, end). Of the last slice the end is that of the frame */
    sp_delta_index index;
    uint32_t least_bytes; /* with no value escaped */
};

/* Rules 11 to 13 on the entry of slice s, and that the slice ends within the frame. */
static spccl_status read_entry(const sp_delta_frame *f, uint64_t s, struct entry *e)
{
    const uint8_t *p = f->bytes + SP_DELTA_HEADER_BYTES + s * SP_DELTA_ENTRY_BYTES;
    uint32_t word = sp_load_le32(p);

    *e = (struct entry){.k = word & SP_DELTA_COUNT_MASK,
                        .code = word >> SP_DELTA_CODE_SHIFT & 0xf,
                        .c = sp_delta_slice_elems(f->n_elems, s),
                        .at = (uint64_t)sp_load_le32(p + 4) * 4,
                        .end = f->frame_bytes};
    if (s + 1 < f->n_slices)
        e->end = (uint64_t)sp_load_le32(p + SP_DELTA_ENTRY_BYTES + 4) * 4;
    if (e->k > e->c)
        return REFUSE("slice %llu: count %u, wanted at most %u", (ull)s, e->k, e->c);
    if (!sp_delta_code_fits(e->code, f->elem_bytes) || (e->k == 0 && e->code != 0))
        return REFUSE("slice %llu: code %u with count %u, which %s does not have", (ull)s, e->code, e->k,
                      sp_dtype_name(f->dtype));
    if ((word & ~SP_DELTA_ENTRY_MASK) != 0)
        return REFUSE("slice %llu: entry 0x%08x, wanted zeros in bits 17 to 19 and 24 to 31", (ull)s, word);
    if (e->k != 0) {
        e->index = sp_delta_index_of(e->c, e->k);
        e->least_bytes =
            e->index.low_bytes + e->index.high_bytes + sp_delta_value_bytes(e->code, e->k, 0, f->elem_bytes);
    }
    if (e->end > f->frame_bytes || e->at > e->end || e->end - e->at < e->least_bytes)
        return REFUSE("slice %llu: from byte %llu to %llu of %llu, wanted at least %u bytes", (ull)s,
                      (ull)e->at, (ull)e->end, (ull)f->frame_bytes, e->least_bytes);
    return SPCCL_OK;
}

/* Rule 14, and where slices lie. */
static spccl_status check_table(const sp_delta_frame *f)
{
    uint64_t sum = 0, first = SP_DELTA_HEADER_BYTES + SP_DELTA_ENTRY_BYTES * f->n_slices;
    struct entry e;

    if (f->n_slices == 0 && f->frame_bytes != first)
        return REFUSE("frame_bytes %llu, wanted %llu", (ull)f->frame_bytes, (ull)first);
    for (uint64_t s = 0; s < f->n_slices; s++) {
        SP_TRY(read_entry(f, s, &e));
        if (s == 0 && e.at != first)
            return REFUSE("slice 0 starts at byte %llu, wanted %llu", (ull)e.at, (ull)first);
        sum += e.k;
    }
    if (sum != f->nnz)
        return REFUSE("counts sum to %llu, wanted nnz %llu", (ull)sum, (ull)f->nnz);
    return SPCCL_OK;
}

spccl_status sp_delta_read_header(const void *buf, size_t bytes, sp_delta_frame *out)
{
    const uint8_t *p = buf;
    sp_delta_frame f = {.bytes = p};

    SP_TRY(check_fixed_fields(p, bytes));
    f.dtype = (spccl_dtype)p[AT_DTYPE];
    f.elem_bytes = (uint32_t)sp_dtype_bytes(f.dtype);
    f.n_elems = sp_load_le64(p + AT_N_ELEMS);
    f.nnz = sp_load_le64(p + AT_NNZ);
    f.frame_bytes = sp_load_le64(p + AT_FRAME_BYTES);
    f.n_slices = f.n_elems <= SP_DELTA_ELEMS_MAX ? sp_delta_n_slices(f.n_elems) : 0;
    SP_TRY(check_counts(&f, bytes));
    SP_TRY(check_table(&f));
    *out = f;
    return SPCCL_OK;
}

/* ---- reading: slices ---- */

/* Bits [at, at + n) of a section of whole words, n <= 16. */
static inline uint32_t bits_at(const uint8_t *section, uint32_t at, uint32_t n)
{
    uint64_t word = sp_load_le32(section + at / 32 * 4);
    if (at % 32 + n > 32)
        word |= (uint64_t)sp_load_le32(section + at / 32 * 4 + 4) << 32;
    return (uint32_t)(word >> at % 32) & ((1u << n) - 1);
}

/* Bits from `n_bits` on of a section of `bytes` bytes are zero. */
static bool padding_is_zero(const uint8_t *section, uint32_t n_bits, uint32_t bytes)
{
    return n_bits % 32 == 0 || sp_load_le32(section + bytes - 4) >> n_bits % 32 == 0;
}

/* Rules 17 to 20 on the sections low and high. */
static spccl_status read_places(const struct entry *e, const uint8_t *low, uint64_t s, sp_delta_changes *out)
{
    const sp_delta_index *at = &e->index;
    const uint8_t *high = low + at->low_bytes;
    const uint32_t high_bits = at->is_bitmap ? e->c : e->k + ((e->c - 1) >> at->low_bits) + 1;
    uint32_t j = 0;

    for (uint32_t w = 0; w < at->high_bytes / 4; w++)
        for (uint32_t word = sp_load_le32(high + 4 * w); word != 0; word &= word - 1) {
            uint32_t bit = 32 * w + sp_ctz64(word);
            if (j == e->k)
                return REFUSE("slice %llu: more bits than its count %u", (ull)s, e->k);
            out->place[j] = at->is_bitmap ? bit : (bit - j) << at->low_bits;
            if (at->low_bits != 0)
                out->place[j] |= bits_at(low, j * at->low_bits, at->low_bits);
            j++;
        }
    if (j != e->k)
        return REFUSE("slice %llu: %u bits, wanted its count %u", (ull)s, j, e->k);
    for (j = 1; j < e->k; j++)
        if (out->place[j] <= out->place[j - 1])
            return REFUSE("slice %llu: place %u after %u, wanted strictly rising", (ull)s, out->place[j],
                          out->place[j - 1]);
    if (out->place[e->k - 1] >= e->c)
        return REFUSE("slice %llu: place %u, wanted below %u", (ull)s, out->place[e->k - 1], e->c);
    if (!padding_is_zero(low, e->k * at->low_bits, at->low_bytes) ||
        !padding_is_zero(high, high_bits, at->high_bytes))
        return REFUSE("slice %llu: a padding bit of its places is set", (ull)s);
    return SPCCL_OK;
}

static uint64_t load_elem(const uint8_t *p, uint32_t elem_bytes)
{
    return elem_bytes == 1   ? *p
           : elem_bytes == 2 ? sp_load_le16(p)
           : elem_bytes == 4 ? sp_load_le32(p)
                             : sp_load_le64(p);
}

/* Fill out->is_added and the differences. Returns how many values are escaped, or raw. */
static uint32_t read_codes(const struct entry *e, const uint8_t *codes, sp_delta_changes *out)
{
    const uint32_t w = sp_delta_code_bits(e->code), escape = sp_delta_code_escape(e->code);
    uint32_t n = 0;

    if (e->code == 0) {
        memset(out->is_added, 0, e->k);
        return e->k;
    }
    for (uint32_t j = 0; j < e->k; j++) {
        uint32_t number = bits_at(codes, j * w, w);
        out->is_added[j] = number != escape;
        out->value[j] = sp_delta_difference(number);
        n += number == escape;
    }
    return n;
}

spccl_status sp_delta_read_slice(const sp_delta_frame *f, uint64_t s, sp_delta_changes *out)
{
    const uint8_t *p, *values;
    uint32_t n_raw, codes_bytes;
    uint64_t end;
    struct entry e;

    SP_TRY(read_entry(f, s, &e));
    out->n = e.k;
    p = f->bytes + e.at;
    end = e.at;
    if (e.k != 0) {
        SP_TRY(read_places(&e, p, s, out));
        p += e.index.low_bytes + e.index.high_bytes;
        n_raw = read_codes(&e, p, out);
        codes_bytes = sp_delta_section_bytes(e.k * sp_delta_code_bits(e.code));
        values = p + codes_bytes;
        end = (uint64_t)(values - f->bytes) + sp_delta_section_bytes(8 * f->elem_bytes * n_raw);
        if (end > e.end)
            return REFUSE("slice %llu: its values end at byte %llu, wanted %llu", (ull)s, (ull)end,
                          (ull)e.end);
        if (!padding_is_zero(p, e.k * sp_delta_code_bits(e.code), codes_bytes) ||
            !padding_is_zero(values, 8 * f->elem_bytes * n_raw, (uint32_t)(f->bytes + end - values)))
            return REFUSE("slice %llu: a padding bit of its values is set", (ull)s);
        for (uint32_t j = 0; j < e.k; j++)
            if (!out->is_added[j]) {
                out->value[j] = load_elem(values, f->elem_bytes);
                values += f->elem_bytes;
            }
    }
    if ((s + 1 < f->n_slices ? end : sp_align_up(end, SP_DELTA_ALIGN)) != e.end)
        return REFUSE("slice %llu: ends at byte %llu, wanted %llu", (ull)s, (ull)end, (ull)e.end);
    for (; end != e.end; end++)
        if (f->bytes[end] != 0)
            return REFUSE("padding byte %llu is 0x%02x, wanted 0", (ull)end, f->bytes[end]);
    return SPCCL_OK;
}

/* ---- writing ---- */

void sp_delta_scan(sp_delta_slice *s)
{
    sp_scan_args scan = {.x = s->x,
                         .base = s->base,
                         .n_elems = s->n_elems,
                         .elem_bytes = s->elem_bytes,
                         .mask = s->mask,
                         .tile_nnz = s->tile_nnz};
    sp_delta_list_args list = {.x = s->x,
                               .base = s->base,
                               .n_elems = s->n_elems,
                               .elem_bytes = s->elem_bytes,
                               .mask = s->mask,
                               .tile_nnz = s->tile_nnz,
                               .first = s->first,
                               .key = s->key,
                               .place = s->place,
                               .number = s->number,
                               .values = s->value};

    s->kernels->scan(&scan);
    s->nnz = (uint32_t)scan.nnz;
    s->code = s->bytes = 0;
    s->sum_change = 0;
    if (s->nnz == 0)
        return;
    list.nnz = s->nnz;
    s->kernels->delta_list(&list);
    s->sum_change = list.sum_change;
    if (!s->raw)
        s->code = sp_delta_choose(s->nnz, list.escaped, s->elem_bytes);
    s->index = sp_delta_index_of(s->n_elems, s->nnz);
    s->bytes = s->index.low_bytes + s->index.high_bytes +
               sp_delta_value_bytes(s->code, s->nnz, list.escaped[s->code], s->elem_bytes);
}

/* A section of numbers at dst. Returns its end. */
static uint8_t *pack(sp_delta_slice *s, uint8_t *dst, const uint16_t *numbers, uint32_t bits, uint32_t most)
{
    const uint32_t bytes = sp_delta_section_bytes(s->nnz * bits);
    s->kernels->delta_pack(s->packed, numbers, s->nnz, bits, (uint16_t)most);
    memcpy(dst, s->packed, bytes);
    return dst + bytes;
}

static uint8_t *write_places(sp_delta_slice *s, uint8_t *dst)
{
    const sp_delta_index at = s->index;

    if (at.is_bitmap) {
        memcpy(dst, s->mask, at.high_bytes);
        return dst + at.high_bytes;
    }
    if (at.low_bits != 0)
        dst = pack(s, dst, s->place, at.low_bits, UINT16_MAX);
    memset(dst, 0, at.high_bytes);
    for (uint32_t j = 0; j < s->nnz;
         j++) { /* faster than words put together in a register: no mispredicted branch */
        uint32_t bit = j + ((uint32_t)s->place[j] >> at.low_bits);
        dst[bit / 8] |= (uint8_t)(1u << bit % 8);
    }
    return dst + at.high_bytes;
}

void sp_delta_write_slice(sp_delta_slice *s, uint8_t *dst)
{
    uint8_t *const end = dst + s->bytes;
    const uint32_t e = s->elem_bytes;

    if (s->bytes == 0)
        return;
    dst = write_places(s, dst);
    if (s->code == 0) {
        memcpy(dst, s->value, s->nnz * e);
        dst += s->nnz * e;
    } else {
        uint32_t escape = sp_delta_code_escape(s->code);
        dst = pack(s, dst, s->number, sp_delta_code_bits(s->code), escape);
        for (uint32_t j = 0; j < s->nnz; j++)
            if (s->number[j] >= escape) {
                memcpy(dst, s->value + j * e, e);
                dst += e;
            }
    }
    assert(end - dst >= 0 && end - dst < 4);
    memset(dst, 0, (size_t)(end - dst));
}

void sp_delta_write_entry(uint8_t *frame, uint64_t s, uint32_t nnz, uint32_t code, uint64_t at)
{
    uint8_t *p = frame + SP_DELTA_HEADER_BYTES + s * SP_DELTA_ENTRY_BYTES;
    sp_store_le32(p, nnz | code << SP_DELTA_CODE_SHIFT);
    sp_store_le32(p + 4, (uint32_t)(at / 4));
}

void sp_delta_write_header(uint8_t *frame, spccl_dtype dtype, uint64_t n_elems, uint64_t nnz,
                           uint64_t frame_bytes)
{
    sp_store_le32(frame + AT_MAGIC, SP_FRAME_MAGIC);
    frame[AT_VERSION] = SP_DELTA_VERSION;
    frame[AT_FORMAT] = SPCCL_FORMAT_DELTA;
    frame[AT_DTYPE] = (uint8_t)dtype;
    frame[AT_FLAGS] = SP_FRAME_FLAG_DELTA;
    sp_store_le64(frame + AT_N_ELEMS, n_elems);
    sp_store_le64(frame + AT_NNZ, nnz);
    sp_store_le64(frame + AT_FRAME_BYTES, frame_bytes);
}
