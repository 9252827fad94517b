/* tile_scalar.c - the tile format (FORMAT.md 3.2): a count per block of 256, one offset byte per listed
 * element, then values. The vector kernels must give the same bytes as this code. */
#include "kernels/cpu/scalar.h"

#define TILE_ENCODE(NAME)                                                                                    \
    static void tile_encode_##NAME(const sp_encode_args *a)                                                  \
    {                                                                                                        \
        size_t k = 0;                                                                                        \
        for (size_t w = 0; w * 64 < a->n_elems; w++) {                                                       \
            for (uint64_t bits = a->mask[w]; bits != 0; bits &= bits - 1) {                                  \
                size_t i = w * 64 + sp_ctz64(bits);                                                          \
                a->meta[k] = (uint8_t)(i % SP_TILE_ELEMS);                                                   \
                sp_put_##NAME(a->values, k, sp_get_##NAME(a->x, i));                                         \
                k++;                                                                                         \
            }                                                                                                \
        }                                                                                                    \
    }
TILE_ENCODE(u8)
TILE_ENCODE(u16)
TILE_ENCODE(u32)
TILE_ENCODE(u64)

void sp_tile_encode_scalar(const sp_encode_args *a)
{
    for (size_t tile = 0; tile * SP_TILE_ELEMS < a->n_elems; tile++)
        a->index[tile] = (uint8_t)a->tile_nnz[tile];
    SP_BY_WIDTH(a->elem_bytes, tile_encode, a);
}

#define TILE_APPLY(NAME, V, D, F)                                                                            \
    static void tile_##NAME(const sp_decode_args *a)                                                         \
    {                                                                                                        \
        size_t k = 0;                                                                                        \
        for (size_t tile = 0; tile * SP_TILE_ELEMS < a->n_elems; tile++) {                                   \
            for (size_t end = k + a->index[tile]; k < end; k++) {                                            \
                size_t i = tile * SP_TILE_ELEMS + a->meta[k];                                                \
                sp_put_##D(a->dst, i, F(sp_get_##D(a->dst, i), sp_get_##V(a->values, k)));                   \
            }                                                                                                \
        }                                                                                                    \
    }
SP_APPLY_OPS(TILE_APPLY)
#define TILE_ENTRY(NAME, V, D, F) [SP_APPLY_##NAME] = tile_##NAME,
SP_SCALAR_DECODERS(tile, SP_APPLY_OPS(TILE_ENTRY))
