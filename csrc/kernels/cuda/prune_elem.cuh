// prune_elem.cuh - one element of a gradient on the GPU: dtypes of gradient, residual and velocity, and the rule of
// prune_rule.h on them. It also has the table of segments that the kernels read.
#ifndef SP_PRUNE_ELEM_CUH
#define SP_PRUNE_ELEM_CUH

#include "core/contract/gpu.h"
#include "kernels/cuda/elem.cuh"

#define SP_PRUNE_THREADS 256u // of a CTA, except for the sampling kernel

// ---- dtypes: U is the gradient's bits, S the state. What `narrow` makes of a NaN is never used. ----

// as_is: the bits of a float32 gradient that is sent as it is.
template <int DTYPE> struct sp_prune_dtype;
template <> struct sp_prune_dtype<SPCCL_FLOAT32> : sp_elem<SPCCL_FLOAT32> {
    typedef float S;
};
template <> struct sp_prune_dtype<SPCCL_FLOAT64> : sp_elem<SPCCL_FLOAT64> {
    typedef double S;
};
template <> struct sp_prune_dtype<SPCCL_FLOAT16> : sp_elem<SPCCL_FLOAT16> {
    typedef float S;
    static __device__ __forceinline__ uint16_t narrow(float v)
    {
        return (uint16_t)sp_pack_f16(v > SP_F16_MAX ? SP_F16_MAX : v < -SP_F16_MAX ? -SP_F16_MAX : v, 0);
    }
    static __device__ __forceinline__ uint16_t as_is(uint32_t g)
    {
        return sp_prune_as_is_f16(__uint_as_float(g));
    }
};
template <> struct sp_prune_dtype<SPCCL_BFLOAT16> : sp_elem<SPCCL_BFLOAT16> {
    typedef float S;
    static __device__ __forceinline__ uint16_t narrow(float v)
    {
        return (uint16_t)sp_pack_bf16(v > SP_BF16_MAX ? SP_BF16_MAX : v < -SP_BF16_MAX ? -SP_BF16_MAX : v, 0);
    }
    static __device__ __forceinline__ uint16_t as_is(uint32_t g)
    {
        return sp_prune_as_is_bf16(__uint_as_float(g));
    }
};

// A residual as wide as the state, or bfloat16 (RES_BF16), which is rounded at random.
template <class S, bool RES_BF16> struct sp_prune_residual {
    typedef S R;
    static __device__ __forceinline__ S smallest() // above 0
    {
        return sizeof(S) == 4 ? S(0x1p-149) : S(0x1p-1074);
    }
    static __device__ __forceinline__ S largest()
    {
        return sizeof(S) == 4 ? S(0x1.fffffep127) : S(0x1.fffffffffffffp1023);
    }
    static __device__ __forceinline__ S widen(S r)
    {
        return r;
    }
    static __device__ __forceinline__ S narrow(S r, sp_prune_random, uint64_t)
    {
        return r;
    }
};
template <> struct sp_prune_residual<float, true> {
    typedef uint16_t R;
    static __device__ __forceinline__ float widen(uint16_t r)
    {
        return sp_bf16_to_f32(r);
    }
    static __device__ __forceinline__ uint16_t narrow(float r, sp_prune_random random, uint64_t index)
    {
        return sp_bf16_round_randomly(r, sp_prune_random_bits(random, index));
    }
};

__device__ __forceinline__ sp_prune_f32 sp_prune_elem(float g, float r, float u, bool has_r, bool has_u,
                                                      const sp_prune_factors_f32 &f)
{
    return sp_prune_elem_f32(g, r, u, has_r, has_u, &f);
}
__device__ __forceinline__ sp_prune_f64 sp_prune_elem(double g, double r, double u, bool has_r, bool has_u,
                                                      const sp_prune_factors_f64 &f)
{
    return sp_prune_elem_f64(g, r, u, has_r, has_u, &f);
}
__device__ __forceinline__ float sp_prune_rescaled(float kept, const sp_prune_factors_f32 &f)
{
    return sp_prune_rescaled_f32(kept, &f);
}
__device__ __forceinline__ double sp_prune_rescaled(double kept, const sp_prune_factors_f64 &f)
{
    return sp_prune_rescaled_f64(kept, &f);
}
__device__ __forceinline__ float sp_prune_abs(float v)
{
    return fabsf(v);
}
__device__ __forceinline__ double sp_prune_abs(double v)
{
    return fabs(v);
}
template <class S> struct sp_prune_factors_as;
template <> struct sp_prune_factors_as<float> {
    typedef sp_prune_factors_f32 type;
    static __device__ __forceinline__ type of(const sp_prune_factors &f)
    {
        return sp_prune_factors_of_f32(&f);
    }
};
template <> struct sp_prune_factors_as<double> {
    typedef sp_prune_factors_f64 type;
    static __device__ __forceinline__ type of(const sp_prune_factors &f)
    {
        return sp_prune_factors_of_f64(&f);
    }
};

template <class ARGS> __device__ __forceinline__ sp_gpu_prune_row *sp_prune_rows(const ARGS &a)
{
    return (sp_gpu_prune_row *)(a.table + 1);
}

__device__ __forceinline__ bool sp_prune_skips(const sp_gpu_prune_args &a, const sp_gpu_prune_row &row)
{
    return a.options.skip_zeros != 0 && *(volatile const uint64_t *)&row.has_nonzero == 0;
}

// What a thread has counted in its segment.
struct sp_prune_tally {
    uint32_t n_sent, n_nonfinite;
    __device__ __forceinline__ void flush(sp_gpu_prune_row &row)
    {
        n_sent = __reduce_add_sync(~0u, n_sent);
        n_nonfinite = __reduce_add_sync(~0u, n_nonfinite);
        if (threadIdx.x % 32 == 0 && n_sent != 0)
            atomicAdd((unsigned long long *)&row.n_sent, (unsigned long long)n_sent);
        if (threadIdx.x % 32 == 0 && n_nonfinite != 0)
            atomicAdd((unsigned long long *)&row.n_nonfinite, (unsigned long long)n_nonfinite);
        n_sent = n_nonfinite = 0;
    }
};

// Take what a call has counted in a row to the state of its segment.
__device__ __forceinline__ void sp_prune_take_counts(const sp_gpu_prune_args &a, const sp_gpu_prune_row &row)
{
    if (sp_prune_skips(a, row))
        sp_prune_advance_skipped(row.segment.state);
    else
        sp_prune_advance(&a.options, row.segment.state, *(volatile const uint64_t *)&row.n_sent,
                         *(volatile const uint64_t *)&row.n_nonfinite);
}

__device__ __forceinline__ void sp_prune_take_counts(const sp_gpu_weights_args &, const sp_gpu_prune_row &row)
{
    sp_prune_count(row.weights.state, *(volatile const uint64_t *)&row.n_sent,
                   *(volatile const uint64_t *)&row.n_nonfinite);
}

// The end of a CTA of THREADS threads: is it the last one? Each has added its counts; it passes a fence, then counts itself
// as done. So the last one sees all counts. It writes the states of all segments, and zeros for the next call.
// is_last: a word of shared memory.
template <uint32_t THREADS, class ARGS>
__device__ __forceinline__ bool sp_prune_end(const ARGS &a, uint32_t *is_last)
{
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0)
        *is_last = atomicAdd((unsigned long long *)&a.table->n_ctas_done, 1ull) + 1 == gridDim.x ? 1 : 0;
    __syncthreads();
    if (*is_last == 0)
        return false;
    __threadfence();
    for (uint32_t i = threadIdx.x; i < a.n_segments; i += THREADS) {
        sp_gpu_prune_row &row = sp_prune_rows(a)[i];
        sp_prune_take_counts(a, row);
        row.n_sent = row.n_nonfinite = row.has_nonzero = 0;
    }
    if (threadIdx.x == 0)
        a.table->n_ctas_done = a.table->n_taken = 0;
    return true;
}

#endif
