/* dtype.h - size and name of each dtype, and the conversions of float16 and bfloat16.
 * Every kernel set must give the same bits as the conversions here. */
#ifndef SP_DTYPE_H
#define SP_DTYPE_H

#include "core/base/bits.h"
#include "spccl.h"

#include <stdbool.h>

#define SP_N_DTYPES 11 /* table size: dtypes are 1..10 */

static inline bool sp_dtype_ok(spccl_dtype t)
{
    return (int)t >= SPCCL_FLOAT32 && (int)t <= SPCCL_UINT8;
}
static inline size_t sp_dtype_bytes(spccl_dtype t)
{
    static const uint8_t bytes[SP_N_DTYPES] = {0, 4, 2, 2, 8, 1, 1, 2, 4, 8, 1};
    return sp_dtype_ok(t) ? bytes[t] : 0;
}
static inline const char *sp_dtype_name(spccl_dtype t)
{
    static const char *const names[SP_N_DTYPES] = {"?",       "float32", "float16", "bfloat16",
                                                   "float64", "float8",  "int8",    "int16",
                                                   "int32",   "int64",   "uint8"};
    return sp_dtype_ok(t) ? names[t] : "?";
}
/* float8 values are moved as bytes; there is no arithmetic on them. */
static inline bool sp_dtype_can_reduce(spccl_dtype t)
{
    return sp_dtype_ok(t) && t != SPCCL_FLOAT8;
}
/* True if the dtype has a -0.0 that can be added. */
static inline bool sp_dtype_is_float(spccl_dtype t)
{
    return t == SPCCL_FLOAT32 || t == SPCCL_FLOAT64 || t == SPCCL_FLOAT16 || t == SPCCL_BFLOAT16;
}
/* Dtype of the accumulator of a reduction: float32 for the 16-bit floats, else the dtype itself. */
static inline spccl_dtype sp_acc_dtype(spccl_dtype t)
{
    return t == SPCCL_FLOAT16 || t == SPCCL_BFLOAT16 ? SPCCL_FLOAT32 : t;
}

/* The result of inf - inf, 0 * inf and the like: the default NaN of x86, with the sign bit set. aarch64 and
 * GPUs make a NaN without the sign bit, so our code replaces it by this one. */
#define SP_NAN_F32 UINT32_C(0xffc00000)
#define SP_NAN_F64 UINT64_C(0xfff8000000000000)

static inline SP_HD float sp_f32_from_bits(uint32_t u)
{
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}
static inline SP_HD uint32_t sp_f32_to_bits(float f)
{
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    return u;
}

static inline SP_HD float sp_bf16_to_f32(uint16_t h)
{
    return sp_f32_from_bits((uint32_t)h << 16);
}
/* Rounds to nearest, ties to even. A NaN becomes quiet and keeps its sign and upper payload bits. */
static inline SP_HD uint16_t sp_bf16_from_f32(float f)
{
    uint32_t u = sp_f32_to_bits(f);
    if ((u & 0x7fffffffu) > 0x7f800000u)
        return (uint16_t)((u >> 16) | 0x0040u);
    return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

static inline SP_HD float sp_f16_to_f32(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16;
    uint32_t exp = (h >> 10) & 0x1fu;
    uint32_t man = h & 0x3ffu;
    if (exp == 0x1f) /* infinity or NaN; a NaN becomes quiet, as in the hardware conversion */
        return sp_f32_from_bits(sign | 0x7f800000u | (man << 13) | (man != 0 ? 0x00400000u : 0u));
    if (exp == 0) { /* zero or denormal: man * 2^-24 is exact */
        float v = (float)man * 0x1p-24f;
        return sign != 0 ? -v : v;
    }
    return sp_f32_from_bits(sign | ((exp + 112u) << 23) | (man << 13));
}
/* Rounds to nearest, ties to even; overflow gives infinity. A NaN becomes quiet and keeps its sign and upper
 * payload bits. */
static inline SP_HD uint16_t sp_f16_from_f32(float f)
{
    uint32_t u = sp_f32_to_bits(f);
    uint32_t sign = (u >> 16) & 0x8000u;
    uint32_t mag = u & 0x7fffffffu;
    if (mag > 0x7f800000u)
        return (uint16_t)(sign | 0x7e00u | ((mag >> 13) & 0x3ffu));
    if (mag >= 0x477ff000u) /* 65520 and above round to infinity */
        return (uint16_t)(sign | 0x7c00u);
    if (mag < 0x38800000u) { /* below 2^-14: adding 0.5 makes the FPU round at 2^-24 */
        float r = sp_f32_from_bits(mag) + 0.5f;
        return (uint16_t)(sign | (sp_f32_to_bits(r) - 0x3f000000u));
    }
    mag += 0xfffu + ((mag >> 13) & 1u);
    return (uint16_t)(sign | ((mag - 0x38000000u) >> 13));
}

#endif
