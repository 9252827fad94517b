/* coo_scalar.c - the coo format (FORMAT.md 3.4): a u32 index and a value per listed element.
 * The vector kernels must give the same bytes as this code. */
#include "kernels/cpu/scalar.h"

#define COO_ENCODE(NAME)                                                                                     \
    static void coo_encode_##NAME(const sp_encode_args *a)                                                   \
    {                                                                                                        \
        size_t k = 0;                                                                                        \
        for (size_t w = 0; w * 64 < a->n_elems; w++) {                                                       \
            for (uint64_t bits = a->mask[w]; bits != 0; bits &= bits - 1) {                                  \
                size_t i = w * 64 + sp_ctz64(bits);                                                          \
                sp_put_u32(a->index, k, (uint32_t)i);                                                        \
                sp_put_##NAME(a->values, k, sp_get_##NAME(a->x, i));                                         \
                k++;                                                                                         \
            }                                                                                                \
        }                                                                                                    \
    }
COO_ENCODE(u8)
COO_ENCODE(u16)
COO_ENCODE(u32)
COO_ENCODE(u64)

void sp_coo_encode_scalar(const sp_encode_args *a)
{
    SP_BY_WIDTH(a->elem_bytes, coo_encode, a);
}

#define COO_APPLY(NAME, V, D, F)                                                                             \
    static void coo_##NAME(const sp_decode_args *a)                                                          \
    {                                                                                                        \
        for (size_t k = 0; k < a->nnz; k++) {                                                                \
            size_t i = sp_get_u32(a->index, k);                                                              \
            sp_put_##D(a->dst, i, F(sp_get_##D(a->dst, i), sp_get_##V(a->values, k)));                       \
        }                                                                                                    \
    }
SP_APPLY_OPS(COO_APPLY)
#define COO_ENTRY(NAME, V, D, F) [SP_APPLY_##NAME] = coo_##NAME,
SP_SCALAR_DECODERS(coo, SP_APPLY_OPS(COO_ENTRY))
