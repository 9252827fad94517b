/* scan_scalar.c - finds the listed elements of a slice: mask words, and a count per block of 256.
 * The vector kernels must give the same results as this code. */
#include "kernels/cpu/elem.h"
#include "kernels/cpu/kernels.h"

/* The mask word of the n <= 64 elements from `first` on. */
#define SCAN_WORD(NAME)                                                                                      \
    static uint64_t scan_word_##NAME(const sp_scan_args *a, size_t first, size_t n)                          \
    {                                                                                                        \
        const unsigned left_out = a->ignores_sign ? 1 : 0;                                                   \
        uint64_t bits = 0;                                                                                   \
        for (size_t i = 0; i < n; i++) {                                                                     \
            bool listed = a->base == NULL                                                                    \
                              ? (sp_elem_##NAME)(sp_get_##NAME(a->x, first + i) << left_out) != 0            \
                              : sp_get_##NAME(a->x, first + i) != sp_get_##NAME(a->base, first + i);         \
            bits |= (uint64_t)listed << i;                                                                   \
        }                                                                                                    \
        return bits;                                                                                         \
    }
SCAN_WORD(u8)
SCAN_WORD(u16)
SCAN_WORD(u32)
SCAN_WORD(u64)

void sp_scan_scalar(sp_scan_args *a)
{
    uint64_t (*word)(const sp_scan_args *, size_t, size_t) = a->elem_bytes == 1   ? scan_word_u8
                                                             : a->elem_bytes == 2 ? scan_word_u16
                                                             : a->elem_bytes == 4 ? scan_word_u32
                                                                                  : scan_word_u64;
    size_t nnz = 0;
    bool has_full_tile = false;
    for (size_t tile = 0; tile * SP_TILE_ELEMS < a->n_elems; tile++) {
        unsigned in_tile = 0;
        for (size_t i = tile * SP_TILE_ELEMS; i < sp_min_size((tile + 1) * SP_TILE_ELEMS, a->n_elems);
             i += 64) {
            uint64_t bits = word(a, i, sp_min_size(64, a->n_elems - i));
            a->mask[i / 64] = bits;
            in_tile += sp_popcount64(bits);
        }
        a->tile_nnz[tile] = (uint16_t)in_tile;
        has_full_tile |= in_tile == SP_TILE_ELEMS;
        nnz += in_tile;
    }
    a->nnz = nnz;
    a->has_full_tile = has_full_tile;
}
