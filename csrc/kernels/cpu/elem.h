/* elem.h - access to one element at any alignment, and the arithmetic of each dtype.
 * Every kernel file includes this file: vector kernels use it for heads, tails and rare cases. All kernel
 * sets must give the same bits as the scalar C here.
 *
 * NaN rule of addition and multiplication:
 *   - If the left operand is a NaN, the result is that NaN made quiet.
 *   - Else, if the right operand is a NaN, the result is that NaN made quiet.
 *   - If neither operand is a NaN (inf - inf, 0 * inf), the result is SP_NAN_F32 or SP_NAN_F64.
 * The code applies the rule itself, for two reasons. The CPU returns the NaN of the first operand, but a
 * compiler may swap the operands of + and *. The NaN of inf - inf differs between architectures. */
#ifndef SP_ELEM_H
#define SP_ELEM_H

#include "core/base/dtype.h"
#include "core/format/kernel_table.h"

#define SP_UNLIKELY(x) __builtin_expect(!!(x), 0)
#define SP_LIKELY(x) __builtin_expect(!!(x), 1)

/* sp_get_u32(p, i) and sp_put_u32(p, i, v) load and store element i of an array at any alignment.
 * sp_elem_u32 is the type of the element. The access goes through a type with alignment 1 that may alias
 * anything. memcpy would be slower: gcc 12 moves a float that memcpy copies through an integer register. */
#define SP_ELEM_ACCESS(NAME, T)                                                                              \
    typedef T sp_elem_##NAME;                                                                                \
    typedef T sp_anywhere_##NAME __attribute__((may_alias, aligned(1)));                                     \
    static inline T sp_get_##NAME(const void *p, size_t i)                                                   \
    {                                                                                                        \
        return *(const sp_anywhere_##NAME *)(const void *)((const uint8_t *)p + i * sizeof(T));              \
    }                                                                                                        \
    static inline void sp_put_##NAME(void *p, size_t i, T v)                                                 \
    {                                                                                                        \
        *(sp_anywhere_##NAME *)(void *)((uint8_t *)p + i * sizeof(T)) = v;                                   \
    }
SP_ELEM_ACCESS(u8, uint8_t)
SP_ELEM_ACCESS(u16, uint16_t)
SP_ELEM_ACCESS(u32, uint32_t)
SP_ELEM_ACCESS(u64, uint64_t)
SP_ELEM_ACCESS(i8, int8_t)
SP_ELEM_ACCESS(i16, int16_t)
SP_ELEM_ACCESS(i32, int32_t)
SP_ELEM_ACCESS(i64, int64_t)
SP_ELEM_ACCESS(f32, float)
SP_ELEM_ACCESS(f64, double)

/* Call FN_u8, FN_u16, FN_u32 or FN_u64: that of elements of `bytes`. */
#define SP_BY_WIDTH(BYTES, FN, ...)                                                                          \
    do {                                                                                                     \
        if ((BYTES) == 4)                                                                                    \
            FN##_u32(__VA_ARGS__);                                                                           \
        else if ((BYTES) == 2)                                                                               \
            FN##_u16(__VA_ARGS__);                                                                           \
        else if ((BYTES) == 8)                                                                               \
            FN##_u64(__VA_ARGS__);                                                                           \
        else                                                                                                 \
            FN##_u8(__VA_ARGS__);                                                                            \
    } while (0)

/* ---- bits of float64 ---- */

static inline double sp_f64_from_bits(uint64_t u)
{
    double d;
    memcpy(&d, &u, sizeof d);
    return d;
}
static inline uint64_t sp_f64_to_bits(double d)
{
    uint64_t u;
    memcpy(&u, &d, sizeof u);
    return u;
}

/* ---- addition and multiplication ---- */

#define SP_INT_ADD(NAME)                                                                                     \
    static inline sp_elem_##NAME sp_add_##NAME(sp_elem_##NAME a, sp_elem_##NAME b)                           \
    {                                                                                                        \
        return (sp_elem_##NAME)(a + b);                                                                      \
    }
SP_INT_ADD(u8)
SP_INT_ADD(u16)
SP_INT_ADD(u32)
SP_INT_ADD(u64)
/* sp_nan_<type>: the result of a op b by the NaN rule, where a op b is a NaN. */
#define SP_FLOAT_ARITHMETIC(NAME, T, QUIET_BIT, NAN_BITS)                                                    \
    static inline T sp_nan_##NAME(T a, T b)                                                                  \
    {                                                                                                        \
        if (a != a)                                                                                          \
            return sp_##NAME##_from_bits(sp_##NAME##_to_bits(a) | QUIET_BIT);                                \
        if (b != b)                                                                                          \
            return sp_##NAME##_from_bits(sp_##NAME##_to_bits(b) | QUIET_BIT);                                \
        return sp_##NAME##_from_bits(NAN_BITS);                                                              \
    }                                                                                                        \
    static inline T sp_add_##NAME(T a, T b)                                                                  \
    {                                                                                                        \
        T r = a + b;                                                                                         \
        return SP_UNLIKELY(r != r) ? sp_nan_##NAME(a, b) : r;                                                \
    }                                                                                                        \
    static inline T sp_mul_##NAME(T a, T b)                                                                  \
    {                                                                                                        \
        T r = a * b;                                                                                         \
        return SP_UNLIKELY(r != r) ? sp_nan_##NAME(a, b) : r;                                                \
    }
SP_FLOAT_ARITHMETIC(f32, float, 0x00400000u, SP_NAN_F32)
SP_FLOAT_ARITHMETIC(f64, double, 0x0008000000000000u, SP_NAN_F64)
static inline uint16_t sp_add_f16(uint16_t a, uint16_t b)
{
    return sp_f16_from_f32(sp_add_f32(sp_f16_to_f32(a), sp_f16_to_f32(b)));
}
static inline uint16_t sp_add_bf16(uint16_t a, uint16_t b)
{
    return sp_bf16_from_f32(sp_add_f32(sp_bf16_to_f32(a), sp_bf16_to_f32(b)));
}
static inline float sp_add_f16_f32(float a, uint16_t b)
{
    return sp_add_f32(a, sp_f16_to_f32(b));
}
static inline float sp_add_bf16_f32(float a, uint16_t b)
{
    return sp_add_f32(a, sp_bf16_to_f32(b));
}

/* acc[i] += x[i], float32. With `listed`, an x with all bits zero is absent and leaves acc as it is. */
static inline void sp_sum_f32(void *acc, const void *x, size_t n, bool listed)
{
    for (size_t i = 0; i < n; i++) {
        float v = sp_get_f32(x, i);
        if (!listed || sp_f32_to_bits(v) != 0)
            sp_put_f32(acc, i, sp_add_f32(sp_get_f32(acc, i), v));
    }
}

/* ---- what decoding does with a listed element: SET and OVERWRITE go by width, ADD by dtype ---- */

/* new dst = value, whatever dst held. */
#define SP_TAKE(NAME)                                                                                        \
    static inline sp_elem_##NAME sp_take_##NAME(sp_elem_##NAME d, sp_elem_##NAME v)                          \
    {                                                                                                        \
        (void)d;                                                                                             \
        return v;                                                                                            \
    }
SP_TAKE(u8)
SP_TAKE(u16)
SP_TAKE(u32)
SP_TAKE(u64)

/* X(name, access of the value, access of dst, function: new dst = f(old dst, value)).
 * Signed integers use the unsigned functions of their width, so that sums wrap. */
#define SP_APPLY_OPS(X)                                                                                      \
    X(take_u8, u8, u8, sp_take_u8)                                                                           \
    X(take_u16, u16, u16, sp_take_u16)                                                                       \
    X(take_u32, u32, u32, sp_take_u32)                                                                       \
    X(take_u64, u64, u64, sp_take_u64)                                                                       \
    X(add_u8, u8, u8, sp_add_u8)                                                                             \
    X(add_u16, u16, u16, sp_add_u16)                                                                         \
    X(add_u32, u32, u32, sp_add_u32)                                                                         \
    X(add_u64, u64, u64, sp_add_u64)                                                                         \
    X(add_f32, f32, f32, sp_add_f32)                                                                         \
    X(add_f64, f64, f64, sp_add_f64)                                                                         \
    X(add_f16, u16, u16, sp_add_f16)                                                                         \
    X(add_bf16, u16, u16, sp_add_bf16)                                                                       \
    X(add_f16_f32, u16, f32, sp_add_f16_f32)                                                                 \
    X(add_bf16_f32, u16, f32, sp_add_bf16_f32)

#define SP_APPLY_ENUM(NAME, V, D, F) SP_APPLY_##NAME,
enum sp_apply_op { SP_APPLY_OPS(SP_APPLY_ENUM) SP_N_APPLY_OPS };
#undef SP_APPLY_ENUM

/* The operation that adds values of `dtype` to a dst of `dst_dtype`. sp_decode_args lists the valid pairs. */
static inline enum sp_apply_op sp_apply_add_op(spccl_dtype dtype, spccl_dtype dst_dtype)
{
    switch (dtype) {
    case SPCCL_FLOAT32:
        return SP_APPLY_add_f32;
    case SPCCL_FLOAT64:
        return SP_APPLY_add_f64;
    case SPCCL_FLOAT16:
        return dst_dtype == SPCCL_FLOAT32 ? SP_APPLY_add_f16_f32 : SP_APPLY_add_f16;
    case SPCCL_BFLOAT16:
        return dst_dtype == SPCCL_FLOAT32 ? SP_APPLY_add_bf16_f32 : SP_APPLY_add_bf16;
    case SPCCL_INT16:
        return SP_APPLY_add_u16;
    case SPCCL_INT32:
        return SP_APPLY_add_u32;
    case SPCCL_INT64:
        return SP_APPLY_add_u64;
    case SPCCL_INT8:
    case SPCCL_UINT8:
    case SPCCL_FLOAT8: /* not reached: the codec refuses ADD of float8 */
        return SP_APPLY_add_u8;
    }
    return SP_APPLY_add_u8;
}
static inline enum sp_apply_op sp_apply_take_op(size_t elem_bytes)
{
    return elem_bytes == 1   ? SP_APPLY_take_u8
           : elem_bytes == 2 ? SP_APPLY_take_u16
           : elem_bytes == 4 ? SP_APPLY_take_u32
                             : SP_APPLY_take_u64;
}

#endif
