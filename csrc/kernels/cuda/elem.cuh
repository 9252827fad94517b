// elem.cuh - one element on the GPU: access by size, and the arithmetic of each dtype; the array of a slice or tile. The
// counterpart of the CPU's elem.h and reduce.h, with the same bits. The NaN rule is written out. float16 and bfloat16 are
// converted by the functions of dtype.h, or by the hardware where no NaN occurs.
#ifndef SP_ELEM_CUH
#define SP_ELEM_CUH

#include "core/base/dtype.h"
#include "kernels/cuda/ptx.cuh"

// ---- addition and multiplication: the NaN rule of elem.h ----

__device__ __forceinline__ float sp_nan2(float a, float b)
{
    uint32_t u = __float_as_uint(a), v = __float_as_uint(b);
    if ((u & 0x7fffffffu) > 0x7f800000u)
        return __uint_as_float(u | 0x00400000u);
    if ((v & 0x7fffffffu) > 0x7f800000u)
        return __uint_as_float(v | 0x00400000u);
    return __uint_as_float(SP_NAN_F32);
}
__device__ __forceinline__ double sp_nan2(double a, double b)
{
    if (a != a)
        return __longlong_as_double(__double_as_longlong(a) | 0x0008000000000000ll);
    if (b != b)
        return __longlong_as_double(__double_as_longlong(b) | 0x0008000000000000ll);
    return __longlong_as_double((long long)SP_NAN_F64);
}
// Never contracted to an fma, and with IEEE 754's division: -fmad=false, -prec-div=true.
template <class F> __device__ __forceinline__ F sp_add(F a, F b)
{
    F r = a + b;
    return r != r ? sp_nan2(a, b) : r;
}
template <class F> __device__ __forceinline__ F sp_mul(F a, F b)
{
    F r = a * b;
    return r != r ? sp_nan2(a, b) : r;
}
template <class F> __device__ __forceinline__ F sp_div(F a, F b)
{
    F r = a / b;
    return r != r ? sp_nan2(a, b) : r;
}

// ---- tables of arrays: slices and tiles are numbered over all rows ----

// The row among n > 0 rows that has number `at`. first: the member with a row's first number; the rows are sorted by it.
template <class ROW>
__device__ __forceinline__ uint32_t sp_find_row(const ROW *rows, uint32_t n, uint64_t ROW::*first,
                                                uint64_t at)
{
    uint32_t low = 0, high = n - 1;
    while (low < high) {
        uint32_t middle = (low + high + 1) / 2;
        if (rows[middle].*first <= at)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

// ---- elements by size, as formats see them ----

template <int BYTES> struct sp_unsigned;
template <> struct sp_unsigned<1> {
    typedef uint8_t type;
};
template <> struct sp_unsigned<2> {
    typedef uint16_t type;
};
template <> struct sp_unsigned<4> {
    typedef uint32_t type;
};
template <> struct sp_unsigned<8> {
    typedef uint64_t type;
};

// ---- elements by dtype, as reductions see them. U: the bits; A: the accumulator ----

// The *_plain functions give the same results, except that a NaN result may be any NaN.
template <class T, class BITS> struct sp_int_elem {
    typedef BITS U;
    typedef T A;
    typedef uint64_t W; // unsigned, so that sums wrap
    static constexpr bool is_float = false;
    static __device__ __forceinline__ A widen(U u)
    {
        return (A)u;
    }
    static __device__ __forceinline__ A widen_plain(U u)
    {
        return (A)u;
    }
    static __device__ __forceinline__ U narrow(A a)
    {
        return (U)a;
    }
    static __device__ __forceinline__ A add(A a, A b)
    {
        return (A)((W)a + (W)b);
    }
    static __device__ __forceinline__ A add_plain(A a, A b)
    {
        return add(a, b);
    }
    static __device__ __forceinline__ A mul(A a, A b)
    {
        return (A)((W)a * (W)b);
    }
    static __device__ __forceinline__ A min(A a, A x)
    {
        return x < a ? x : a;
    }
    static __device__ __forceinline__ A max(A a, A x)
    {
        return x > a ? x : a;
    }
    static __device__ __forceinline__ A div(A a, int by)
    {
        return (A)(a / (A)by);
    }
};

template <class T, class BITS> struct sp_float_elem {
    typedef BITS U;
    typedef T A;
    static constexpr bool is_float = true;
    static __device__ __forceinline__ A add(A a, A b)
    {
        return sp_add(a, b);
    }
    static __device__ __forceinline__ A add_plain(A a, A b)
    {
        return a + b;
    }
    static __device__ __forceinline__ A mul(A a, A b)
    {
        return sp_mul(a, b);
    }
    static __device__ __forceinline__ A min(A a, A x)
    {
        return sp_choose(x < a || x != x, x, a);
    }
    static __device__ __forceinline__ A max(A a, A x)
    {
        return sp_choose(x > a || x != x, x, a);
    }
    static __device__ __forceinline__ A div(A a, int by)
    {
        return sp_div(a, (A)by);
    }
};

// x[c] = narrow(a[c]) for N 16-bit floats, two in a word; N is even. One test finds out whether any is a NaN.
template <class T, uint32_t N> __device__ __forceinline__ void sp_narrow_each(const float *a, uint32_t *x)
{
    bool nan = false;
#pragma unroll
    for (uint32_t c = 0; c < N; c++)
        nan |= a[c] != a[c];
#pragma unroll
    for (uint32_t c = 0; c < N; c += 2)
        x[c / 2] = T::narrow_plain(a[c], a[c + 1]);
    if (nan) {
#pragma unroll
        for (uint32_t c = 0; c < N; c += 2)
            x[c / 2] = T::narrow(a[c]) | (uint32_t)T::narrow(a[c + 1]) << 16;
    }
}

// a[c] *= by for N sums. A NaN stays as it is: the NaNs of sums are quiet, and a product would lose the payload.
template <class A, uint32_t N> __device__ __forceinline__ void sp_scale_each(A *a, A by)
{
#pragma unroll
    for (uint32_t c = 0; c < N; c++) {
        A x = a[c] * by;
        a[c] = sp_choose(x != x, a[c], x);
    }
}

template <int DTYPE> struct sp_elem;
template <> struct sp_elem<SPCCL_FLOAT32> : sp_float_elem<float, uint32_t> {
    static __device__ __forceinline__ float widen(uint32_t u)
    {
        return __uint_as_float(u);
    }
    static __device__ __forceinline__ float widen_plain(uint32_t u)
    {
        return widen(u);
    }
    static __device__ __forceinline__ uint32_t narrow(float a)
    {
        return __float_as_uint(a);
    }
};
template <> struct sp_elem<SPCCL_FLOAT64> : sp_float_elem<double, uint64_t> {
    static __device__ __forceinline__ double widen(uint64_t u)
    {
        return __longlong_as_double((long long)u);
    }
    static __device__ __forceinline__ double widen_plain(uint64_t u)
    {
        return widen(u);
    }
    static __device__ __forceinline__ uint64_t narrow(double a)
    {
        return (uint64_t)__double_as_longlong(a);
    }
};
template <> struct sp_elem<SPCCL_FLOAT16> : sp_float_elem<float, uint16_t> {
    static __device__ __forceinline__ float widen(uint16_t u)
    {
        return sp_f16_to_f32(u);
    }
    static __device__ __forceinline__ float widen_plain(uint16_t u)
    {
        return sp_unpack_f16(u);
    }
    static __device__ __forceinline__ uint32_t narrow_plain(float low, float high)
    {
        return sp_pack_f16(low, high);
    }
    static __device__ __forceinline__ uint16_t narrow(float a)
    {
        return sp_f16_from_f32(a);
    }
};
template <> struct sp_elem<SPCCL_BFLOAT16> : sp_float_elem<float, uint16_t> {
    static __device__ __forceinline__ float widen(uint16_t u)
    {
        return sp_bf16_to_f32(u);
    }
    static __device__ __forceinline__ float widen_plain(uint16_t u)
    {
        return widen(u);
    }
    static __device__ __forceinline__ uint32_t narrow_plain(float low, float high)
    {
        return sp_pack_bf16(low, high);
    }
    static __device__ __forceinline__ uint16_t narrow(float a)
    {
        return sp_bf16_from_f32(a);
    }
};
template <> struct sp_elem<SPCCL_INT8> : sp_int_elem<int8_t, uint8_t> {
};
template <> struct sp_elem<SPCCL_INT16> : sp_int_elem<int16_t, uint16_t> {
};
template <> struct sp_elem<SPCCL_INT32> : sp_int_elem<int32_t, uint32_t> {
};
template <> struct sp_elem<SPCCL_INT64> : sp_int_elem<int64_t, uint64_t> {
};
template <> struct sp_elem<SPCCL_UINT8> : sp_int_elem<uint8_t, uint8_t> {
};

#endif
