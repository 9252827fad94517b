/* reduce.h - the arithmetic of combine and finish for one element, by dtype. reduce_scalar.c and bulk.inc use
 * it. */
#ifndef SP_REDUCE_H
#define SP_REDUCE_H

#include "kernels/cpu/elem.h"

#define SP_AS_IS(x) (x)

/* ---- acc op x. Integer sums and products are computed in the unsigned type U, so that they wrap ---- */
#define SP_SUM_INT(T, U, acc, x) ((T)((U)(acc) + (U)(x)))
#define SP_PROD_INT(T, U, acc, x) ((T)((U)(acc) * (U)(x)))
#define SP_MIN_INT(acc, x) ((x) < (acc) ? (x) : (acc))
#define SP_MAX_INT(acc, x) ((x) > (acc) ? (x) : (acc))
#define SP_MIN_FLOAT(acc, x) ((x) < (acc) || (x) != (x) ? (x) : (acc))
#define SP_MAX_FLOAT(acc, x) ((x) > (acc) || (x) != (x) ? (x) : (acc))

/* X(name of the access functions, type, unsigned type for arithmetic that wraps). */
#define SP_INT_KINDS(X)                                                                                      \
    X(i8, int8_t, uint32_t)                                                                                  \
    X(i16, int16_t, uint32_t)                                                                                \
    X(i32, int32_t, uint32_t)                                                                                \
    X(i64, int64_t, uint64_t)                                                                                \
    X(u8, uint8_t, uint32_t)
/* X(name, access of x, access of acc, type of acc, conversion of x to the type of acc). */
#define SP_FLOAT_KINDS(X)                                                                                    \
    X(f32, f32, f32, float, SP_AS_IS)                                                                        \
    X(f64, f64, f64, double, SP_AS_IS)                                                                       \
    X(f16, u16, f32, float, sp_f16_to_f32)                                                                   \
    X(bf16, u16, f32, float, sp_bf16_to_f32)

enum sp_reduce_op {
    SP_REDUCE_SUM,
    SP_REDUCE_MIN,
    SP_REDUCE_MAX,
    SP_REDUCE_PROD,
    SP_REDUCE_SUM_FIRST,
    SP_REDUCE_FIRST,
    SP_N_REDUCE
};

static inline enum sp_reduce_op sp_reduce_op_of(spccl_redop op, bool first)
{
    switch (op) {
    case SPCCL_SUM:
    case SPCCL_AVG:
        return first ? SP_REDUCE_SUM_FIRST : SP_REDUCE_SUM;
    case SPCCL_MIN:
        return first ? SP_REDUCE_FIRST : SP_REDUCE_MIN;
    case SPCCL_MAX:
        return first ? SP_REDUCE_FIRST : SP_REDUCE_MAX;
    case SPCCL_PROD:
        return first ? SP_REDUCE_FIRST : SP_REDUCE_PROD;
    }
    return SP_REDUCE_FIRST;
}

#endif
