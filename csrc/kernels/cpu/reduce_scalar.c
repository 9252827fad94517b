/* reduce_scalar.c - combine and finish: add one contribution at a time, round once at the end.
 * The vector kernels must give the same bytes as this code. */
#include "kernels/cpu/kernels.h"
#include "kernels/cpu/reduce.h"

#define EACH(X, ACC, T, NAME, EXPR)                                                                          \
    for (size_t i = 0; i < n; i++) {                                                                         \
        T x = X;                                                                                             \
        T acc = ACC;                                                                                         \
        sp_put_##NAME(dst, i, EXPR);                                                                         \
    }
#define COMBINE_BODY(X, T, NAME, SUM, SUM_FIRST, MIN, MAX, PROD)                                             \
    void *dst = a->acc;                                                                                      \
    size_t n = a->n_elems;                                                                                   \
    switch (sp_reduce_op_of(a->op, a->first)) {                                                              \
    case SP_REDUCE_SUM:                                                                                      \
        EACH(X, sp_get_##NAME(dst, i), T, NAME, SUM) return;                                                 \
    case SP_REDUCE_MIN:                                                                                      \
        EACH(X, sp_get_##NAME(dst, i), T, NAME, MIN) return;                                                 \
    case SP_REDUCE_MAX:                                                                                      \
        EACH(X, sp_get_##NAME(dst, i), T, NAME, MAX) return;                                                 \
    case SP_REDUCE_PROD:                                                                                     \
        EACH(X, sp_get_##NAME(dst, i), T, NAME, PROD) return;                                                \
    case SP_REDUCE_SUM_FIRST:                                                                                \
        EACH(X, 0, T, NAME, ((void)acc, SUM_FIRST)) return;                                                  \
    case SP_REDUCE_FIRST:                                                                                    \
        EACH(X, 0, T, NAME, ((void)acc, x)) return;                                                          \
    case SP_N_REDUCE:                                                                                        \
        return;                                                                                              \
    }

#define COMBINE_INT(NAME, T, U)                                                                              \
    static void combine_##NAME(const sp_combine_args *a)                                                     \
    {                                                                                                        \
        COMBINE_BODY(sp_get_##NAME(a->x, i), T, NAME, SP_SUM_INT(T, U, acc, x), x, SP_MIN_INT(acc, x),       \
                     SP_MAX_INT(acc, x), SP_PROD_INT(T, U, acc, x))                                          \
    }
#define COMBINE_FLOAT(NAME, X, ACC, T, CONVERT)                                                              \
    static void combine_##NAME(const sp_combine_args *a)                                                     \
    {                                                                                                        \
        COMBINE_BODY(CONVERT(sp_get_##X(a->x, i)), T, ACC, sp_add_##ACC(acc, x), sp_add_##ACC((T)0, x),      \
                     SP_MIN_FLOAT(acc, x), SP_MAX_FLOAT(acc, x), sp_mul_##ACC(acc, x))                       \
    }
SP_INT_KINDS(COMBINE_INT)
SP_FLOAT_KINDS(COMBINE_FLOAT)

void sp_combine_scalar(const sp_combine_args *a)
{
    static void (*const by_dtype[SP_N_DTYPES])(const sp_combine_args *) = {
        [SPCCL_FLOAT32] = combine_f32, [SPCCL_FLOAT16] = combine_f16, [SPCCL_BFLOAT16] = combine_bf16,
        [SPCCL_FLOAT64] = combine_f64, [SPCCL_INT8] = combine_i8,     [SPCCL_INT16] = combine_i16,
        [SPCCL_INT32] = combine_i32,   [SPCCL_INT64] = combine_i64,   [SPCCL_UINT8] = combine_u8};
    if (by_dtype[a->dtype] != NULL) /* float8: the callers of the kernel refuse it */
        by_dtype[a->dtype](a);
}

/* finish_<dtype> rounds acc to dtype; finish_avg_<dtype> first divides acc by world_size. Operations other
 * than AVG do not divide: a division by 1.0 would make a signalling NaN quiet. */
#define FINISH(NAME, ACC, DST, T, EXPR)                                                                      \
    static void finish_##NAME(const sp_finish_args *a)                                                       \
    {                                                                                                        \
        const T by = (T)a->world_size;                                                                       \
        (void)by;                                                                                            \
        for (size_t i = 0; i < a->n_elems; i++) {                                                            \
            T acc = (T)sp_get_##ACC(a->acc, i);                                                              \
            sp_put_##DST(a->dst, i, EXPR);                                                                   \
        }                                                                                                    \
    }
FINISH(f16, f32, u16, float, sp_f16_from_f32(acc))
FINISH(bf16, f32, u16, float, sp_bf16_from_f32(acc))
FINISH(avg_f16, f32, u16, float, sp_f16_from_f32(acc / by))
FINISH(avg_bf16, f32, u16, float, sp_bf16_from_f32(acc / by))
FINISH(avg_f32, f32, f32, float, acc / by)
FINISH(avg_f64, f64, f64, double, acc / by)
FINISH(avg_i8, i8, i8, int32_t, (int8_t)(acc / by))
FINISH(avg_i16, i16, i16, int32_t, (int16_t)(acc / by))
FINISH(avg_i32, i32, i32, int32_t, acc / by)
FINISH(avg_i64, i64, i64, int64_t, acc / by)
FINISH(avg_u8, u8, u8, int32_t, (uint8_t)(acc / by))

void sp_finish_scalar(const sp_finish_args *a)
{
    static void (*const means[SP_N_DTYPES])(const sp_finish_args *) = {
        [SPCCL_FLOAT32] = finish_avg_f32,   [SPCCL_FLOAT16] = finish_avg_f16,
        [SPCCL_BFLOAT16] = finish_avg_bf16, [SPCCL_FLOAT64] = finish_avg_f64,
        [SPCCL_INT8] = finish_avg_i8,       [SPCCL_INT16] = finish_avg_i16,
        [SPCCL_INT32] = finish_avg_i32,     [SPCCL_INT64] = finish_avg_i64,
        [SPCCL_UINT8] = finish_avg_u8};
    if (a->op == SPCCL_AVG && a->dtype != SPCCL_FLOAT8)
        means[a->dtype](a);
    else if (a->dtype == SPCCL_FLOAT16)
        finish_f16(a);
    else if (a->dtype == SPCCL_BFLOAT16)
        finish_bf16(a);
    else if (a->op != SPCCL_AVG && a->dst != a->acc)
        sp_copy_scalar(a->dst, a->acc, a->n_elems * sp_dtype_bytes(a->dtype), a->non_temporal);
}
