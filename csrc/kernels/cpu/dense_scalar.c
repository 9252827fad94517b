/* dense_scalar.c - the dense format (FORMAT.md 3.5), copy and zero.
 * The vector kernels must give the same bytes as this code. */
#include "kernels/cpu/elem.h"
#include "kernels/cpu/kernels.h"

/* glibc copies 2 KiB and more with `rep movsb`. On an AMD EPYC that takes 16 times as long if dst lies 16 bytes behind
 * src, modulo the page size (128 KiB: 43 us in place of 2.7). In pieces of 1 KiB it takes 9 us. Arrays of malloc and
 * the executor's buffers can lie like that. */
#define PIECE_BYTES ((size_t)1024)
void sp_copy_scalar(void *dst, const void *src, size_t bytes, bool non_temporal)
{
    size_t behind = ((uintptr_t)dst - (uintptr_t)src) % 4096;
    size_t piece = behind > 0 && behind < 64 ? PIECE_BYTES : bytes;
    (void)non_temporal; /* memcpy decides */
    for (size_t i = 0; i < bytes; i += piece)
        memcpy((uint8_t *)dst + i, (const uint8_t *)src + i, sp_min_size(piece, bytes - i));
}
void sp_zero_scalar(void *dst, size_t bytes, bool non_temporal)
{
    (void)non_temporal;
    if (bytes != 0)
        memset(dst, 0, bytes);
}

void sp_dense_encode_scalar(const sp_encode_args *a)
{
    sp_copy_scalar(a->values, a->x, a->n_elems * a->elem_bytes, false);
}
void sp_dense_set_scalar(const sp_decode_args *a)
{
    sp_copy_scalar(a->dst, a->values, a->n_elems * sp_dtype_bytes(a->dtype), a->non_temporal);
}

/* ADD and OVERWRITE of a value with all bits zero leave dst as it is (FORMAT.md 3.5). The sparse formats do
 * not list such a value, and the result must not depend on the format. ADD needs the rule for a dst of -0.0
 * or a signalling NaN: adding 0 would change their bits. */
#define DENSE_OVERWRITE(T)                                                                                   \
    static void dense_overwrite_##T(const sp_decode_args *a)                                                 \
    {                                                                                                        \
        for (size_t i = 0; i < a->n_elems; i++)                                                              \
            sp_put_##T(a->dst, i,                                                                            \
                       sp_get_##T(a->values, i) != 0 ? sp_get_##T(a->values, i) : sp_get_##T(a->dst, i));    \
    }
DENSE_OVERWRITE(u8)
DENSE_OVERWRITE(u16)
DENSE_OVERWRITE(u32)
DENSE_OVERWRITE(u64)

void sp_dense_overwrite_scalar(const sp_decode_args *a)
{
    SP_BY_WIDTH(sp_dtype_bytes(a->dtype), dense_overwrite, a);
}

#define DENSE_APPLY(NAME, V, D, F)                                                                           \
    static void dense_##NAME(const sp_decode_args *a)                                                        \
    {                                                                                                        \
        static const uint8_t zero[8];                                                                        \
        const size_t v_bytes = sizeof(sp_get_##V(NULL, 0));                                                  \
        for (size_t i = 0; i < a->n_elems; i++)                                                              \
            if (memcmp(a->values + i * v_bytes, zero, v_bytes) != 0)                                         \
                sp_put_##D(a->dst, i, F(sp_get_##D(a->dst, i), sp_get_##V(a->values, i)));                   \
    }
SP_APPLY_OPS(DENSE_APPLY)
#define DENSE_ENTRY(NAME, V, D, F) [SP_APPLY_##NAME] = dense_##NAME,
static void (*const dense_apply[SP_N_APPLY_OPS])(const sp_decode_args *a) = {SP_APPLY_OPS(DENSE_ENTRY)};

void sp_dense_add_scalar(const sp_decode_args *a)
{
    dense_apply[sp_apply_add_op(a->dtype, a->dst_dtype)](a);
}
