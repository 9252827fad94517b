// prune_sample.cuh - the kernels that run before the pruning kernel: one finds segments of zeros, one takes thresholds
// from samples.
#ifndef SP_PRUNE_SAMPLE_CUH
#define SP_PRUNE_SAMPLE_CUH

#include "kernels/cuda/prune_elem.cuh"

#define SP_SAMPLE_THREADS 1024u
#define SP_SAMPLE_EACH 12u // samples that a thread keeps in registers
#define SP_SAMPLE_BATCH 4u // samples whose loads a thread starts together
#define SP_SAMPLE_IN_REGISTERS (SP_SAMPLE_THREADS * SP_SAMPLE_EACH)
#define SP_SAMPLE_COUNTERS 32u
// Shared memory of the sampling kernel for n samples. A CTA may use 99 KiB on compute capability 8.6, 8.9 and 12.0,
// 163 KiB on 8.0, and 227 KiB on 9.0 and 10.0.
#define SP_SAMPLE_SHARED_BYTES(n)                                                                            \
    ((SP_SAMPLE_COUNTERS + ((n) > SP_SAMPLE_IN_REGISTERS ? (n)-SP_SAMPLE_IN_REGISTERS : 0)) *                \
     sizeof(uint32_t))
static_assert(SP_SAMPLE_SHARED_BYTES(SP_PRUNE_SAMPLES_MAX) <= 99 * 1024,
              "the sampling kernel runs on every supported GPU");

// ---- segments of zeros ----

// With skip_zeros, before the other kernels: which segments have an element that is not zero. Reads the gradient.
template <int DTYPE>
__global__ void __launch_bounds__(SP_PRUNE_THREADS)
    sp_prune_nonzero_kernel(const __grid_constant__ sp_gpu_prune_args a)
{
    typedef sp_prune_dtype<DTYPE> T;
    sp_gpu_prune_row *rows = sp_prune_rows(a);
    for (uint64_t tile = blockIdx.x; tile < a.n_tiles; tile += gridDim.x) {
        sp_gpu_prune_row &row = rows[sp_find_row(rows, a.n_segments, &sp_gpu_prune_row::first_tile, tile)];
        constexpr uint32_t TILE = SP_GPU_PRUNE_TILE(sizeof(typename T::S));
        uint64_t from = (tile - row.first_tile) * TILE, left = row.segment.n_elems - from;
        uint32_t n = left < TILE ? (uint32_t)left : TILE;
        const typename T::U *grad = (const typename T::U *)a.grad + row.segment.begin + from;
        bool nonzero = false;
#pragma unroll 4
        for (uint32_t i = threadIdx.x; i < n; i += SP_PRUNE_THREADS)
            nonzero = T::widen(grad[i]) != 0 || nonzero;
        if (nonzero)
            *(volatile uint64_t *)&row.has_nonzero = 1;
    }
}

// ---- thresholds ----

// Magnitudes of a CTA of THREADS threads: of each thread the first EACH in registers, further ones in shared memory.
template <uint32_t THREADS, uint32_t EACH> struct sp_prune_magnitudes {
    uint32_t mine[EACH];
    const uint32_t *more; // [n_more]
    uint32_t n_more;

    __device__ __forceinline__ uint32_t count_from(uint32_t least) const
    {
        uint32_t n = 0;
#pragma unroll
        for (uint32_t k = 0; k < EACH; k++)
            n += mine[k] >= least ? 1 : 0;
        for (uint32_t i = threadIdx.x; i < n_more; i += THREADS)
            n += more[i] >= least ? 1 : 0;
        return n;
    }
    // The rank-th largest magnitude; rank 1 is the largest. All threads of the CTA call this and get the same result.
    // The result is built from its highest bit down: a bit is set if at least `rank` magnitudes reach the value with
    // this bit. Each of the 31 bits has its own counter, so one barrier per bit is enough.
    // counters [SP_SAMPLE_COUNTERS] must be 0, written before a barrier.
    __device__ __forceinline__ uint32_t select(uint32_t rank, uint32_t *counters) const
    {
        uint32_t found = 0;
        for (uint32_t bit = 31; bit-- > 0;) {
            uint32_t least = found | 1u << bit, n = __reduce_add_sync(~0u, count_from(least));
            if (threadIdx.x % 32 == 0 && n != 0)
                atomicAdd(counters + bit, n);
            __syncthreads();
            if (counters[bit] >= rank)
                found = least;
        }
        return found;
    }
};

// As sp_prune_magnitude gives it; a float32 needs no rounding.
__device__ __forceinline__ uint32_t sp_prune_magnitude_of(const sp_prune_f32 &e)
{
    return e.finite ? sp_f32_to_bits(fabsf(e.v)) : 0;
}
__device__ __forceinline__ uint32_t sp_prune_magnitude_of(const sp_prune_f64 &e)
{
    return sp_prune_magnitude(e.v, e.finite);
}

// Magnitudes of samples i, i + SP_SAMPLE_THREADS, ..., to out [EACH]: all are loaded before the first is used. Those
// behind the last are 0.
template <int DTYPE, uint32_t EACH>
__device__ __forceinline__ void sp_prune_take(const sp_gpu_prune_args &a, const spccl_prune_segment &s,
                                              const sp_prune_sample &p, const sp_prune_factors &factors,
                                              uint32_t i, uint32_t *out)
{
    typedef sp_prune_dtype<DTYPE> T;
    typedef typename T::S S;
    const typename T::U *g = (const typename T::U *)a.grad + s.begin;
    const S *r = (const S *)s.residual, *u = (const S *)s.velocity;
    const uint16_t *r16 = (const uint16_t *)s.residual;
    const bool residual_bf16 = a.options.residual_bf16 != 0;
    typename sp_prune_factors_as<S>::type f = sp_prune_factors_as<S>::of(factors);
    typename T::U g_now[EACH] = {};
    S r_now[EACH] = {}, u_now[EACH] = {};
#pragma unroll
    for (uint32_t k = 0; k < EACH; k++) {
        uint64_t at = p.start + (i + k * SP_SAMPLE_THREADS) * p.stride;
        if (i + k * SP_SAMPLE_THREADS < p.n) {
            g_now[k] = g[at];
            r_now[k] = r == nullptr ? S(0) : residual_bf16 ? S(sp_bf16_to_f32(r16[at])) : r[at];
            u_now[k] = u == nullptr ? S(0) : u[at];
        }
    }
#pragma unroll
    for (uint32_t k = 0; k < EACH; k++) {
        auto e = sp_prune_elem(T::widen(g_now[k]), r_now[k], u_now[k], r != nullptr, u != nullptr, f);
        out[k] = i + k * SP_SAMPLE_THREADS < p.n ? sp_prune_magnitude_of(e) : 0;
    }
}

// One CTA per segment. Writes the segment's factors; its threshold comes from a sample unless the caller keeps
// thresholds. Each sampled element costs 32 bytes of gradient, residual and velocity each.
template <int DTYPE>
__global__ void __launch_bounds__(SP_SAMPLE_THREADS)
    sp_prune_sample_kernel(const __grid_constant__ sp_gpu_prune_args a)
{
    sp_gpu_prune_row &row = sp_prune_rows(a)[blockIdx.x];
    const spccl_prune_segment &s = row.segment;
    uint32_t *counters = (uint32_t *)sp_block_shared(), *more = counters + SP_SAMPLE_COUNTERS;
    constexpr bool NORM_IS_F64 = DTYPE == SPCCL_FLOAT64;
    sp_prune_factors factors = sp_prune_factors_now(&a.options, &s, NORM_IS_F64);
    if (threadIdx.x == 0)
        row.factors = factors;
    if (a.options.norm != nullptr && threadIdx.x == 0 && blockIdx.x == 0)
        a.options.squares[a.options.square] = sp_prune_square_now(&a.options, NORM_IS_F64);
    if (factors.whole || a.options.keep_thresholds != 0 || sp_prune_skips(a, row))
        return;
    float density = sp_prune_density(&a.options, s.state->step);
    sp_prune_sample p =
        sp_prune_sample_of(s.n_elems, density, a.options.sample, a.options.seed, s.key, s.state->step);
    sp_prune_magnitudes<SP_SAMPLE_THREADS, SP_SAMPLE_EACH> magnitudes;
    if (threadIdx.x < SP_SAMPLE_COUNTERS)
        counters[threadIdx.x] = 0;
#pragma unroll
    for (uint32_t k = 0; k < SP_SAMPLE_EACH; k += SP_SAMPLE_BATCH)
        sp_prune_take<DTYPE, SP_SAMPLE_BATCH>(a, s, p, factors, threadIdx.x + k * SP_SAMPLE_THREADS,
                                              magnitudes.mine + k);
    for (uint32_t i = SP_SAMPLE_IN_REGISTERS + threadIdx.x; i < p.n;
         i += SP_SAMPLE_BATCH * SP_SAMPLE_THREADS) {
        uint32_t batch[SP_SAMPLE_BATCH];
        sp_prune_take<DTYPE, SP_SAMPLE_BATCH>(a, s, p, factors, i, batch);
#pragma unroll
        for (uint32_t k = 0; k < SP_SAMPLE_BATCH; k++)
            if (i + k * SP_SAMPLE_THREADS < p.n)
                more[i + k * SP_SAMPLE_THREADS - SP_SAMPLE_IN_REGISTERS] = batch[k];
    }
    magnitudes.more = more;
    magnitudes.n_more = p.n > SP_SAMPLE_IN_REGISTERS ? (uint32_t)p.n - SP_SAMPLE_IN_REGISTERS : 0;
    __syncthreads();
    uint32_t least = magnitudes.select((uint32_t)sp_prune_rank(p.n, (double)density), counters);
    if (threadIdx.x == 0)
        s.state->threshold = row.factors.threshold = (double)sp_f32_from_bits(least);
}

#endif
