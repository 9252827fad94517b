// prune_cuda.cu - pruning on GPU memory: one kernel takes thresholds from samples, the next prunes in one pass
// over gradient and state. For given thresholds the bits are those of the host (prune_rule.h).
#include "core/base/prune_rule.h"
#include "kernels/cuda/cuda_check.h"
#include "kernels/cuda/kernels_cuda.h"
#include "kernels/cuda/ptx.cuh"

#define SP_PRUNE_THREADS 256u
#define SP_PRUNE_EACH 4u // neighbouring elements that a thread loads at once
#define SP_PRUNE_TURNS (SP_GPU_PRUNE_TILE / SP_PRUNE_THREADS / SP_PRUNE_EACH)
#define SP_PRUNE_CTAS 4 // of an SM, which leaves each thread 64 registers
#define SP_SAMPLE_THREADS 512u
// Shared memory of the sampling kernel: a word for each warp, then the samples. A CTA may use 99 KiB on compute
// capability 8.6, 8.9 and 12.0, 163 KiB on 8.0, and 227 KiB on 9.0 and 10.0.
#define SP_SAMPLE_SHARED_BYTES ((SP_SAMPLE_THREADS / 32 + SP_PRUNE_SAMPLES_MAX) * sizeof(uint32_t))
static_assert(SP_SAMPLE_SHARED_BYTES <= 99 * 1024, "the sampling kernel runs on every supported GPU");

// ---- dtypes: U is the gradient's bits, S the state ----

template <int DTYPE> struct sp_prune_dtype;
template <> struct sp_prune_dtype<SPCCL_FLOAT32> {
    typedef uint32_t U;
    typedef float S;
    static __device__ __forceinline__ float widen(uint32_t u)
    {
        return sp_f32_from_bits(u);
    }
    static __device__ __forceinline__ uint32_t narrow(float v)
    {
        return sp_f32_to_bits(v);
    }
};
template <> struct sp_prune_dtype<SPCCL_FLOAT64> {
    typedef uint64_t U;
    typedef double S;
    static __device__ __forceinline__ double widen(uint64_t u)
    {
        return __longlong_as_double((long long)u);
    }
    static __device__ __forceinline__ uint64_t narrow(double v)
    {
        return (uint64_t)__double_as_longlong(v);
    }
};
template <> struct sp_prune_dtype<SPCCL_FLOAT16> {
    typedef uint16_t U;
    typedef float S;
    static __device__ __forceinline__ float widen(uint16_t u)
    {
        return sp_f16_to_f32(u);
    }
    static __device__ __forceinline__ uint16_t narrow(float v)
    {
        return sp_f16_from_f32(v > SP_F16_MAX ? SP_F16_MAX : v < -SP_F16_MAX ? -SP_F16_MAX : v);
    }
};
template <> struct sp_prune_dtype<SPCCL_BFLOAT16> {
    typedef uint16_t U;
    typedef float S;
    static __device__ __forceinline__ float widen(uint16_t u)
    {
        return sp_bf16_to_f32(u);
    }
    static __device__ __forceinline__ uint16_t narrow(float v)
    {
        return sp_bf16_from_f32(v > SP_BF16_MAX ? SP_BF16_MAX : v < -SP_BF16_MAX ? -SP_BF16_MAX : v);
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

__device__ __forceinline__ sp_gpu_prune_row *sp_prune_rows(const sp_gpu_prune_args &a)
{
    return (sp_gpu_prune_row *)(a.table + 1);
}

__device__ __forceinline__ bool sp_prune_skips(const sp_gpu_prune_args &a, const sp_gpu_prune_row &row)
{
    return a.options.skip_zeros != 0 && *(volatile const uint64_t *)&row.has_nonzero == 0;
}

// The row that `tile` belongs to.
__device__ __forceinline__ uint32_t sp_prune_find(const sp_gpu_prune_row *rows, uint32_t n_rows,
                                                  uint64_t tile)
{
    uint32_t low = 0, high = n_rows - 1;
    while (low < high) {
        uint32_t middle = (low + high + 1) / 2;
        if (rows[middle].first_tile <= tile)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

// ---- segments of zeros ----

// With skip_zeros, before the other kernels: which segments have an element that is not zero. Reads the gradient.
template <int DTYPE>
__global__ void __launch_bounds__(SP_PRUNE_THREADS)
    sp_prune_nonzero_kernel(const __grid_constant__ sp_gpu_prune_args a)
{
    typedef sp_prune_dtype<DTYPE> T;
    sp_gpu_prune_row *rows = sp_prune_rows(a);
    for (uint64_t tile = blockIdx.x; tile < a.n_tiles; tile += gridDim.x) {
        sp_gpu_prune_row &row = rows[sp_prune_find(rows, a.n_segments, tile)];
        uint64_t from = (tile - row.first_tile) * SP_GPU_PRUNE_TILE, left = row.segment.n_elems - from;
        uint32_t n = left < SP_GPU_PRUNE_TILE ? (uint32_t)left : SP_GPU_PRUNE_TILE;
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

// Sum of v over the threads of the CTA, in all of them. shared [SP_SAMPLE_THREADS / 32].
__device__ __forceinline__ uint32_t sp_block_sum(uint32_t v, uint32_t *shared)
{
    uint32_t warp = threadIdx.x / 32;
    v = __reduce_add_sync(~0u, v);
    if (threadIdx.x % 32 == 0)
        shared[warp] = v;
    __syncthreads();
    v = 0;
    for (uint32_t i = 0; i < SP_SAMPLE_THREADS / 32; i++)
        v += shared[i];
    __syncthreads();
    return v;
}

// The rank-th largest of x [n], 1 = the largest: the largest value that at least `rank` of x are not below.
__device__ __forceinline__ uint32_t sp_block_select(const uint32_t *x, uint32_t n, uint32_t rank,
                                                    uint32_t *shared)
{
    uint32_t found = 0;
    for (uint32_t bit = 1u << 30; bit != 0; bit >>= 1) {
        uint32_t n_here = 0;
        for (uint32_t i = threadIdx.x; i < n; i += SP_SAMPLE_THREADS)
            n_here += x[i] >= (found | bit) ? 1 : 0;
        if (sp_block_sum(n_here, shared) >= rank)
            found |= bit;
    }
    return found;
}

// One CTA per segment. Writes the segment's factors; its threshold comes from a sample unless the caller keeps
// thresholds. Each sampled element costs 32 bytes of gradient, residual and velocity each.
template <int DTYPE>
__global__ void __launch_bounds__(SP_SAMPLE_THREADS)
    sp_prune_sample_kernel(const __grid_constant__ sp_gpu_prune_args a)
{
    typedef sp_prune_dtype<DTYPE> T;
    typedef typename T::S S;
    sp_gpu_prune_row &row = sp_prune_rows(a)[blockIdx.x];
    const spccl_prune_segment &s = row.segment;
    uint32_t *shared = (uint32_t *)sp_block_shared(), *magnitudes = shared + SP_SAMPLE_THREADS / 32;
    sp_prune_factors factors = sp_prune_factors_now(&a.options, &s);
    if (threadIdx.x == 0)
        row.factors = factors;
    if (factors.whole || a.options.keep_thresholds != 0 || sp_prune_skips(a, row))
        return;
    float density = sp_prune_density(&a.options, s.state->step);
    sp_prune_sample p =
        sp_prune_sample_of(s.n_elems, density, a.options.sample, a.options.seed, s.key, s.state->step);
    typename sp_prune_factors_as<S>::type f = sp_prune_factors_as<S>::of(factors);
    const S *r = (const S *)s.residual, *u = (const S *)s.velocity;
    for (uint32_t i = threadIdx.x; i < p.n; i += SP_SAMPLE_THREADS) {
        uint64_t at = p.start + i * p.stride;
        S g = T::widen(((const typename T::U *)a.grad)[s.begin + at]);
        auto e = sp_prune_elem(g, r != nullptr ? r[at] : S(0), u != nullptr ? u[at] : S(0), r != nullptr,
                               u != nullptr, f);
        magnitudes[i] = sp_prune_magnitude((double)e.v, e.finite);
    }
    __syncthreads();
    uint32_t least =
        sp_block_select(magnitudes, (uint32_t)p.n, (uint32_t)sp_prune_rank(p.n, (double)density), shared);
    if (threadIdx.x == 0)
        s.state->threshold = row.factors.threshold = (double)sp_f32_from_bits(least);
}

// ---- the pass ----

// Four neighbouring elements: one load and one store if they are aligned, else four. The stores are PTX, because
// the compiler merged both branches into four stores of 4 bytes.
template <class E> union sp_four {
    E e[SP_PRUNE_EACH];
    uint2 half; // of 2-byte elements
    uint4 whole[sizeof(E) < 4 ? 1 : sizeof(E) / 4];

    __device__ __forceinline__ sp_four()
    {
    }
    // The address of an aligned group is a multiple of this.
    static constexpr uint32_t ALIGN = sizeof(E) == 2 ? 8 : 16;
    __device__ __forceinline__ void load(const E *p, uint32_t n, bool aligned)
    {
        if (n == SP_PRUNE_EACH && aligned) {
            if constexpr (sizeof(E) == 2)
                half = *(const uint2 *)p;
            else
#pragma unroll
                for (uint32_t i = 0; i < sizeof(E) / 4; i++)
                    whole[i] = ((const uint4 *)p)[i];
            return;
        }
#pragma unroll
        for (uint32_t i = 0; i < SP_PRUNE_EACH; i++)
            e[i] = i < n ? p[i] : E(0);
    }
    __device__ __forceinline__ void store(E *p, uint32_t n, bool aligned) const
    {
        if (n == SP_PRUNE_EACH && aligned) {
            if constexpr (sizeof(E) == 2)
                sp_store8(p, half);
            else
#pragma unroll
                for (uint32_t i = 0; i < sizeof(E) / 4; i++)
                    sp_store16((uint4 *)p + i, whole[i]);
            return;
        }
#pragma unroll
        for (uint32_t i = 0; i < SP_PRUNE_EACH; i++)
            if (i < n)
                p[i] = e[i];
    }
};

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

// Prune one tile: elements [from, from + n) of a segment. A thread has SP_PRUNE_TURNS groups of four neighbours
// and loads all of them before it uses the first. Gradient, residual and velocity are read and written once.
template <int DTYPE>
__device__ __forceinline__ void
sp_prune_tile(const sp_gpu_prune_args &a, const spccl_prune_segment &s, uint64_t from, uint32_t n,
              const typename sp_prune_factors_as<typename sp_prune_dtype<DTYPE>::S>::type &f,
              sp_prune_tally &tally)
{
    typedef sp_prune_dtype<DTYPE> T;
    typedef typename T::U U;
    typedef typename T::S S;
    U *grad = (U *)a.grad + s.begin + from;
    S *residual = (S *)s.residual, *velocity = (S *)s.velocity;
    bool has_r = residual != nullptr, has_u = velocity != nullptr;
    bool aligned = (uintptr_t)grad % sp_four<U>::ALIGN == 0;
    sp_four<U> g[SP_PRUNE_TURNS];
    sp_four<S> r[SP_PRUNE_TURNS], u[SP_PRUNE_TURNS];
#pragma unroll
    for (uint32_t k = 0; k < SP_PRUNE_TURNS; k++) {
        uint32_t i = (k * SP_PRUNE_THREADS + threadIdx.x) * SP_PRUNE_EACH, rest = i < n ? n - i : 0;
        rest = rest < SP_PRUNE_EACH ? rest : SP_PRUNE_EACH;
        g[k].load(grad + i, rest, aligned);
        if (has_r)
            r[k].load(residual + from + i, rest, true);
        if (has_u)
            u[k].load(velocity + from + i, rest, true);
    }
#pragma unroll
    for (uint32_t k = 0; k < SP_PRUNE_TURNS; k++) {
        uint32_t i = (k * SP_PRUNE_THREADS + threadIdx.x) * SP_PRUNE_EACH, rest = i < n ? n - i : 0;
        rest = rest < SP_PRUNE_EACH ? rest : SP_PRUNE_EACH;
#pragma unroll
        for (uint32_t c = 0; c < SP_PRUNE_EACH; c++) {
            S r_now = has_r ? r[k].e[c] : S(0), u_now = has_u ? u[k].e[c] : S(0), sent = S(0);
            auto e = sp_prune_elem(T::widen(g[k].e[c]), r_now, u_now, has_r, has_u, f);
            bool counts = c < rest;
            tally.n_sent += counts && (e.sent || !e.finite) ? 1 : 0;
            tally.n_nonfinite += counts && !e.finite ? 1 : 0;
            if (e.sent)
                sent = T::widen(T::narrow(e.v));
            g[k].e[c] = e.finite ? T::narrow(f.scale == S(1) ? sent : sent * f.scale) : g[k].e[c];
            r[k].e[c] = e.finite ? e.v - sent : r_now;
            u[k].e[c] = e.finite ? e.u : u_now;
        }
        g[k].store(grad + i, rest, aligned);
        if (has_r)
            r[k].store(residual + from + i, rest, true);
        if (has_u)
            u[k].store(velocity + from + i, rest, true);
    }
}

// The last CTA: states of all segments, and zeros for the next call.
__device__ __forceinline__ void sp_prune_finish(const sp_gpu_prune_args &a)
{
    for (uint32_t i = threadIdx.x; i < a.n_segments; i += SP_PRUNE_THREADS) {
        sp_gpu_prune_row &row = sp_prune_rows(a)[i];
        if (sp_prune_skips(a, row))
            sp_prune_advance_skipped(row.segment.state);
        else
            sp_prune_advance(&a.options, row.segment.state, *(volatile uint64_t *)&row.n_sent,
                             *(volatile uint64_t *)&row.n_nonfinite);
        row.n_sent = row.n_nonfinite = row.has_nonzero = 0;
    }
    if (threadIdx.x == 0)
        a.table->n_ctas_done = 0;
}

// The grid has as many CTAs as run at once. CTA b prunes tiles b, b + gridDim.x, ...: at any time all CTAs work on
// neighbouring tiles.
template <int DTYPE>
__global__ void __launch_bounds__(SP_PRUNE_THREADS, SP_PRUNE_CTAS)
    sp_prune_kernel(const __grid_constant__ sp_gpu_prune_args a)
{
    typedef typename sp_prune_dtype<DTYPE>::S S;
    sp_gpu_prune_row *rows = sp_prune_rows(a);
    sp_prune_tally tally = {0, 0};
    uint64_t tile = blockIdx.x;
    uint32_t index = sp_prune_find(rows, a.n_segments, tile);
    while (tile < a.n_tiles) { // one segment each time
        uint64_t first = rows[index].first_tile, end = rows[index].end_tile;
        const spccl_prune_segment s = rows[index].segment;
        typename sp_prune_factors_as<S>::type f = sp_prune_factors_as<S>::of(rows[index].factors);
        if (sp_prune_skips(a, rows[index]))
            tile += (end - tile + gridDim.x - 1) / gridDim.x * gridDim.x;
        for (; tile < end; tile += gridDim.x) {
            uint64_t from = (tile - first) * SP_GPU_PRUNE_TILE;
            uint64_t n = s.n_elems - from < SP_GPU_PRUNE_TILE ? s.n_elems - from : SP_GPU_PRUNE_TILE;
            sp_prune_tile<DTYPE>(a, s, from, (uint32_t)n, f, tally);
        }
        tally.flush(rows[index]);
        while (tile < a.n_tiles && rows[index].end_tile <= tile)
            index++;
    }
    // A CTA adds its counts, then passes a fence, then counts itself as done. So the last one sees all counts.
    uint32_t *is_last = (uint32_t *)sp_block_shared();
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0)
        *is_last = atomicAdd((unsigned long long *)&a.table->n_ctas_done, 1ull) + 1 == gridDim.x ? 1 : 0;
    __syncthreads();
    if (*is_last != 0) {
        __threadfence();
        sp_prune_finish(a);
    }
}

// ---- launching ----

typedef void (*sp_prune_fn)(const sp_gpu_prune_args);

static int dtype_index(spccl_dtype dtype)
{
    return dtype == SPCCL_FLOAT32 ? 0 : dtype == SPCCL_FLOAT16 ? 1 : dtype == SPCCL_BFLOAT16 ? 2 : 3;
}

// CTAs that run at once, at most one a tile.
static spccl_status grid_of(sp_prune_fn kernel, uint64_t n_tiles, dim3 *out)
{
    int device = 0, n_sms = 0, n_ctas = 0;
    uint64_t n;
    SP_TRY_CUDA(cudaGetDevice(&device));
    SP_TRY_CUDA(cudaDeviceGetAttribute(&n_sms, cudaDevAttrMultiProcessorCount, device));
    SP_TRY_CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&n_ctas, (const void *)kernel,
                                                              (int)SP_PRUNE_THREADS, 16));
    n = (uint64_t)n_sms * (uint64_t)(n_ctas > 0 ? n_ctas : 1);
    *out = dim3((unsigned)(n < n_tiles ? n : n_tiles));
    return SPCCL_OK;
}

extern "C" spccl_status sp_prune_cuda(const sp_gpu_prune_args *a, void *stream)
{
    static const sp_prune_fn nonzero[] = {
        sp_prune_nonzero_kernel<SPCCL_FLOAT32>, sp_prune_nonzero_kernel<SPCCL_FLOAT16>,
        sp_prune_nonzero_kernel<SPCCL_BFLOAT16>, sp_prune_nonzero_kernel<SPCCL_FLOAT64>};
    static const sp_prune_fn samplers[] = {
        sp_prune_sample_kernel<SPCCL_FLOAT32>, sp_prune_sample_kernel<SPCCL_FLOAT16>,
        sp_prune_sample_kernel<SPCCL_BFLOAT16>, sp_prune_sample_kernel<SPCCL_FLOAT64>};
    static const sp_prune_fn passes[] = {sp_prune_kernel<SPCCL_FLOAT32>, sp_prune_kernel<SPCCL_FLOAT16>,
                                         sp_prune_kernel<SPCCL_BFLOAT16>, sp_prune_kernel<SPCCL_FLOAT64>};
    int d = dtype_index(a->dtype);
    void *params[] = {const_cast<sp_gpu_prune_args *>(a)};
    dim3 grid, threads(SP_PRUNE_THREADS);
    SP_TRY(grid_of(passes[d], a->n_tiles, &grid));
    SP_TRY_CUDA(cudaFuncSetAttribute((const void *)samplers[d], cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     (int)SP_SAMPLE_SHARED_BYTES));
    if (a->options.skip_zeros != 0)
        SP_TRY(sp_cuda_check(cudaLaunchKernel(nonzero[d], grid, threads, params, 0, (cudaStream_t)stream),
                             "launch of the kernel that looks for zeros"));
    SP_TRY(sp_cuda_check(cudaLaunchKernel(samplers[d], dim3(a->n_segments), dim3(SP_SAMPLE_THREADS), params,
                                          SP_SAMPLE_SHARED_BYTES, (cudaStream_t)stream),
                         "launch of the sampling kernel"));
    return sp_cuda_check(cudaLaunchKernel(passes[d], grid, threads, params, 16, (cudaStream_t)stream),
                         "launch of the pruning kernel");
}
