/* pici_scalar.c - the pici format (FORMAT.md 3.3; Hough et al., section III.B). It has 64x64 tiles, one bit
 * word per column, an exclusive prefix per tile, and values in the order of the bits.
 * The vector kernels must give the same bytes as this code. */
#include "kernels/cpu/scalar.h"

/* Write prefixes and bit words. Bit r of a tile's word c is bit c of the scan's word r: a transpose. */
static void pici_encode_bits(const sp_encode_args *a)
{
    size_t n_words = sp_ceil_div(a->n_elems, 64), n_blocks = sp_ceil_div(a->n_elems, SP_TILE_ELEMS);
    uint32_t prefix = 0;
    for (size_t tile = 0; tile * SP_PICI_TILE_ELEMS < a->n_elems; tile++) {
        uint64_t words[SP_PICI_TILE_WORDS] = {0};
        for (size_t r = 0; r < 64 && tile * 64 + r < n_words; r++)
            for (uint64_t bits = a->mask[tile * 64 + r]; bits != 0; bits &= bits - 1)
                words[sp_ctz64(bits)] |= (uint64_t)1 << r;
        memcpy(a->meta + tile * sizeof words, words, sizeof words);
        sp_put_u32(a->index, tile, prefix);
        for (size_t b = tile * 16; b < sp_min_size(tile * 16 + 16, n_blocks); b++)
            prefix += a->tile_nnz[b];
    }
}

/* Run BODY for each listed element, in order. i is its index in the slice, k its index in the values. */
#define PICI_EACH(META, BODY)                                                                                \
    do {                                                                                                     \
        size_t k = 0;                                                                                        \
        for (size_t w = 0; w < sp_ceil_div(a->n_elems, SP_PICI_TILE_ELEMS) * SP_PICI_TILE_WORDS; w++) {      \
            for (uint64_t bits = sp_get_u64(META, w); bits != 0; bits &= bits - 1) {                         \
                size_t i = w / 64 * SP_PICI_TILE_ELEMS + sp_ctz64(bits) * (size_t)64 + w % 64;               \
                BODY;                                                                                        \
                k++;                                                                                         \
            }                                                                                                \
        }                                                                                                    \
    } while (0)

#define PICI_ENCODE(NAME)                                                                                    \
    static void pici_encode_##NAME(const sp_encode_args *a)                                                  \
    {                                                                                                        \
        PICI_EACH(a->meta, sp_put_##NAME(a->values, k, sp_get_##NAME(a->x, i)));                             \
    }
PICI_ENCODE(u8)
PICI_ENCODE(u16)
PICI_ENCODE(u32)
PICI_ENCODE(u64)

void sp_pici_encode_scalar(const sp_encode_args *a)
{
    pici_encode_bits(a);
    SP_BY_WIDTH(a->elem_bytes, pici_encode, a);
}

#define PICI_APPLY(NAME, V, D, F)                                                                            \
    static void pici_##NAME(const sp_decode_args *a)                                                         \
    {                                                                                                        \
        PICI_EACH(a->meta, sp_put_##D(a->dst, i, F(sp_get_##D(a->dst, i), sp_get_##V(a->values, k))));       \
    }
SP_APPLY_OPS(PICI_APPLY)
#define PICI_ENTRY(NAME, V, D, F) [SP_APPLY_##NAME] = pici_##NAME,
SP_SCALAR_DECODERS(pici, SP_APPLY_OPS(PICI_ENTRY))
