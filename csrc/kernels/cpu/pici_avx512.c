/* pici_avx512.c - the pici format in AVX-512: pici.inc over simd_avx512.h. Tiles with many listed elements
 * use transpose_avx512.h. */
#include "kernels/cpu/kernels.h"
#include "kernels/cpu/transpose_avx512.h"

/* For each operation: the number of listed elements in a tile of 4096 from which the transpose is faster than
 * the list. Measured on EPYC 9004 (Zen 4) with the slice in L2. Unpacking has the lowest threshold, because
 * SET with a list clears, scatters and copies. Unpacking and then adding has the highest. */
static inline bool simd_pici_packs(size_t n_listed, size_t elem_bytes)
{
    return (elem_bytes == 4 && n_listed >= 820) || (elem_bytes == 2 && n_listed >= 410);
}
static inline bool simd_pici_unpacks(size_t n_listed, size_t elem_bytes)
{
    return (elem_bytes == 4 && n_listed >= 330) || (elem_bytes == 2 && n_listed >= 160);
}

static inline bool simd_pici_applies(size_t n_listed, size_t elem_bytes)
{
    return (elem_bytes == 4 && n_listed >= 1400) || (elem_bytes == 2 && n_listed >= 900);
}

/* Pack one whole tile. n_after is the number of values of later tiles in the frame. If they fill a vector,
 * the last store may write past this tile's values. */
static void simd_pici_pack(uint8_t *values, const uint8_t *x, const uint8_t *meta, size_t elem_bytes,
                           size_t n_after)
{
    bool exact = n_after * elem_bytes < SP_SIMD_BYTES;
    if (elem_bytes == 4 && exact)
        pack_tile_u32(x, meta, values, true);
    else if (elem_bytes == 4)
        pack_tile_u32(x, meta, values, false);
    else if (exact)
        pack_tile_u16(x, meta, values, true);
    else
        pack_tile_u16(x, meta, values, false);
}

/* Unpack one whole tile and return its number of values. The frame has n_left values from `values` to its
 * end. With `non_temporal`, dst is aligned to 64 bytes. */
static size_t simd_pici_unpack(uint8_t *dst, const uint8_t *values, const uint8_t *meta, size_t elem_bytes,
                               size_t n_left, bool non_temporal)
{
    /* A tile has at most 4096 values: with that many and one vector more left, no load passes the end. */
    bool exact = n_left < SP_PICI_TILE_ELEMS + SP_SIMD_BYTES;
    const uint8_t *end;
    if (elem_bytes == 4)
        end = exact          ? unpack_tile_u32(values, meta, dst, true, non_temporal)
              : non_temporal ? unpack_tile_u32(values, meta, dst, false, true)
                             : unpack_tile_u32(values, meta, dst, false, false);
    else
        end = exact          ? unpack_tile_u16(values, meta, dst, true, non_temporal)
              : non_temporal ? unpack_tile_u16(values, meta, dst, false, true)
                             : unpack_tile_u16(values, meta, dst, false, false);
    return (size_t)(end - values) / elem_bytes;
}

#define SP_PICI_TILES 1
#include "kernels/cpu/pici.inc"
