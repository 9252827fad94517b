/* delta_rule.h - deltas (docs/FORMAT.md, section 11): sizes of a slice's sections, codes of differences, the hash of
 * checksums. The host and the GPU compile this file and write the same bytes. */
#ifndef SP_DELTA_RULE_H
#define SP_DELTA_RULE_H

#include "core/base/bits.h"

#include <stdbool.h>

#define SP_DELTA_VERSION 2u
#define SP_DELTA_HEADER_BYTES 32u
#define SP_DELTA_ENTRY_BYTES 8u /* of the table, one entry per slice */
#define SP_DELTA_ALIGN 8u       /* of frames */
#define SP_DELTA_SLICE_ELEMS 65536u
#define SP_DELTA_ELEMS_MAX (UINT64_C(1) << 40)
#define SP_DELTA_BYTES_MAX (UINT64_C(1) << 34) /* offsets are u32, in units of 4 bytes */

/* ---- an entry of the table ---- */

#define SP_DELTA_COUNT_MASK 0x1ffffu
#define SP_DELTA_CODE_SHIFT 20
#define SP_DELTA_ENTRY_MASK (SP_DELTA_COUNT_MASK | 0xfu << SP_DELTA_CODE_SHIFT)

static inline SP_HD uint64_t sp_delta_n_slices(uint64_t n_elems)
{
    return (n_elems + SP_DELTA_SLICE_ELEMS - 1) / SP_DELTA_SLICE_ELEMS;
}
/* Elements of slice s. */
static inline SP_HD uint32_t sp_delta_slice_elems(uint64_t n_elems, uint64_t s)
{
    uint64_t left = n_elems - s * SP_DELTA_SLICE_ELEMS;
    return left < SP_DELTA_SLICE_ELEMS ? (uint32_t)left : SP_DELTA_SLICE_ELEMS;
}

/* ---- sizes of the sections of a slice of c elements, of which k > 0 changed ---- */

/* Bytes of a section of so many bits: whole words of 4 bytes. */
static inline SP_HD uint32_t sp_delta_section_bytes(uint32_t n_bits)
{
    return (n_bits + 31) / 32 * 4;
}

typedef struct sp_delta_index {
    bool is_bitmap;    /* there is no low, and high has one bit per element */
    uint32_t low_bits; /* l: of each place in low */
    uint32_t low_bytes, high_bytes;
} sp_delta_index;

static inline SP_HD sp_delta_index sp_delta_index_of(uint32_t c, uint32_t k)
{
    sp_delta_index at = {false, 0, 0, 0};
    uint32_t bitmap_bytes = sp_delta_section_bytes(c);
    while ((uint64_t)k << (at.low_bits + 1) <= c)
        at.low_bits++;
    at.low_bytes = sp_delta_section_bytes(k * at.low_bits);
    at.high_bytes = sp_delta_section_bytes(k + ((c - 1) >> at.low_bits) + 1);
    if (at.low_bytes + at.high_bytes >= bitmap_bytes) {
        at.is_bitmap = true;
        at.low_bits = at.low_bytes = 0;
        at.high_bytes = bitmap_bytes;
    }
    return at;
}

/* ---- codes of values ---- */

#define SP_DELTA_N_CODES 5u
#define SP_DELTA_CODE_MOST 0xffffu /* what a code of 16 bits has for "escaped" */

/* Bits of one entry of the section codes: 0, 2, 4, 8, 16. */
static inline SP_HD uint32_t sp_delta_code_bits(uint32_t code)
{
    return code == 0 ? 0 : 1u << code;
}
static inline SP_HD bool sp_delta_code_fits(uint32_t code, uint32_t elem_bytes)
{
    return code < SP_DELTA_N_CODES && sp_delta_code_bits(code) < 8 * elem_bytes;
}
static inline SP_HD uint32_t sp_delta_code_escape(uint32_t code)
{
    return (1u << sp_delta_code_bits(code)) - 1;
}
/* The number of the difference of two elements that differ: 0, 1, 2, 3 for +1, -1, +2, -2, mod 2^(8 elem_bytes). */
static inline SP_HD uint64_t sp_delta_number(uint64_t now, uint64_t old, uint32_t elem_bytes)
{
    uint32_t unused = 64 - 8 * elem_bytes;
    int64_t d = (int64_t)((now - old) << unused) >> unused;
    return (uint64_t)(d > 0 ? d - 1 : ~d) << 1 | (d < 0 ? 1 : 0);
}
/* The difference with that number, mod 2^64. */
static inline SP_HD uint64_t sp_delta_difference(uint64_t number)
{
    return (number & 1) != 0 ? ~(number >> 1) : (number >> 1) + 1;
}
/* Bytes of the sections codes and values. `escaped`: values that are raw; code 0: all k. */
static inline SP_HD uint32_t sp_delta_value_bytes(uint32_t code, uint32_t k, uint32_t escaped,
                                                  uint32_t elem_bytes)
{
    return sp_delta_section_bytes(k * sp_delta_code_bits(code)) +
           sp_delta_section_bytes(8 * elem_bytes * (code == 0 ? k : escaped));
}
/* The code of fewest bytes, of equal ones the first. escaped[code] values have no number below sp_delta_code_escape. */
static inline SP_HD uint32_t sp_delta_choose(uint32_t k, const uint32_t escaped[SP_DELTA_N_CODES],
                                             uint32_t elem_bytes)
{
    uint32_t best = 0, best_bytes = sp_delta_value_bytes(0, k, k, elem_bytes);
    for (uint32_t code = 1; sp_delta_code_fits(code, elem_bytes); code++) {
        uint32_t bytes = sp_delta_value_bytes(code, k, escaped[code], elem_bytes);
        if (bytes < best_bytes) {
            best = code;
            best_bytes = bytes;
        }
    }
    return best;
}

/* ---- checksums ---- */

#define SP_DELTA_STEP UINT64_C(0x9e3779b97f4a7c15)
#define SP_DELTA_MIX UINT64_C(0xd6e8feb86659fd93)

/* Of element i of a tensor, zero-extended. */
static inline SP_HD uint64_t sp_delta_hash(uint64_t key, uint64_t i, uint64_t bits)
{
    uint64_t x = ((i + 1) * SP_DELTA_STEP + key) ^ bits * SP_DELTA_MIX;
    x = (x ^ x >> 32) * SP_DELTA_MIX;
    return x ^ x >> 32;
}

#endif
