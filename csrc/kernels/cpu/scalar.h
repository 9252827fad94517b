/* scalar.h - what the scalar kernels of the sparse formats share. */
#ifndef SP_SCALAR_H
#define SP_SCALAR_H

#include "kernels/cpu/elem.h"
#include "kernels/cpu/kernels.h"

/* The three decoders of FORMAT. The table has a function for each operation of SP_APPLY_OPS. */
#define SP_SCALAR_DECODERS(FORMAT, ...)                                                                      \
    static void (*const FORMAT##_apply[SP_N_APPLY_OPS])(const sp_decode_args *a) = {__VA_ARGS__};            \
    void sp_##FORMAT##_set_scalar(const sp_decode_args *a)                                                   \
    {                                                                                                        \
        sp_zero_scalar(a->dst, a->n_elems *sp_dtype_bytes(a->dtype), a->non_temporal);                       \
        sp_##FORMAT##_overwrite_scalar(a);                                                                   \
    }                                                                                                        \
    void sp_##FORMAT##_overwrite_scalar(const sp_decode_args *a)                                             \
    {                                                                                                        \
        FORMAT##_apply[sp_apply_take_op(sp_dtype_bytes(a->dtype))](a);                                       \
    }                                                                                                        \
    void sp_##FORMAT##_add_scalar(const sp_decode_args *a)                                                   \
    {                                                                                                        \
        FORMAT##_apply[sp_apply_add_op(a->dtype, a->dst_dtype)](a);                                          \
    }

#endif
