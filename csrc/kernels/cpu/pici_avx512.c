/* pici_avx512.c - the pici format in AVX-512: pici.inc over simd_avx512.h, tiles with many listed elements
 * through transpose_avx512.h. */
#include "kernels/cpu/kernels.h"
#include "kernels/cpu/transpose_avx512.h"

/* From so many listed elements in a tile of 4096 on the transpose beats the list (EPYC 9004, Zen 4; slice in
 * L2). Unpacking gains earlier: a list clears, scatters and copies; unpacking and then adding later. */
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

/* Pack one whole tile; n_after: values of the frame behind this tile's, room for a last vector to run over.
 */
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

/* Unpack one whole tile, of n_left values from here to the frame's end; returns how many it took. With
 * `non_temporal` dst is aligned to 64 bytes and bypasses the cache. */
static size_t simd_pici_unpack(uint8_t *dst, const uint8_t *values, const uint8_t *meta, size_t elem_bytes,
                               size_t n_left, bool non_temporal)
{
    /* A tile takes at most 4096: with that much and a vector more left, nothing can run over. */
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
