// delta.cuh - what the kernels of deltas share (docs/FORMAT.md 11): scans, bits of sections.
#ifndef SP_DELTA_CUH
#define SP_DELTA_CUH

#include "core/contract/delta_gpu.h"
#include "kernels/cuda/elem.cuh"

// Sum of v over this lane and those below it.
template <class T> __device__ __forceinline__ T sp_warp_scan(T v)
{
    uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (uint32_t by = 1; by < 32; by *= 2) {
        T below = __shfl_up_sync(~0u, v, by);
        v += lane >= by ? below : 0;
    }
    return v;
}

// Sum of v over the threads before this one in a CTA of THREADS; *total: over all. shared: THREADS / 32 words, which no
// thread may still use. All threads call it.
template <uint32_t THREADS>
__device__ __forceinline__ uint32_t sp_block_scan(uint32_t v, uint32_t *shared, uint32_t *total)
{
    static_assert(THREADS % 32 == 0 && THREADS <= 1024, "the totals of all warps fit in one warp");
    uint32_t warp = threadIdx.x / 32, sum = sp_warp_scan(v), before = 0, all = 0;
    if (threadIdx.x % 32 == 31)
        shared[warp] = sum;
    __syncthreads();
#pragma unroll
    for (uint32_t w = 0; w < THREADS / 32; w++) {
        before += w < warp ? shared[w] : 0;
        all += shared[w];
    }
    *total = all;
    return before + sum - v;
}

// Sum of v over a warp, in all lanes.
__device__ __forceinline__ uint64_t sp_warp_sum64(uint64_t v)
{
#pragma unroll
    for (uint32_t by = 16; by != 0; by /= 2)
        v += __shfl_xor_sync(~0u, v, by);
    return v;
}

// ---- receiving ----

__device__ __forceinline__ void sp_delta_report(const sp_gpu_delta_args &a, uint32_t target, uint64_t slice,
                                                uint32_t rule)
{
    if (rule != 0)
        atomicMax((unsigned long long *)&a.head->fault,
                  (unsigned long long)sp_gpu_delta_fault(target, slice, rule));
}

__device__ __forceinline__ uint64_t sp_delta_old_bytes(const sp_gpu_delta_row &r)
{
    return (r.nnz * r.elem_bytes + SP_DELTA_ALIGN - 1) / SP_DELTA_ALIGN * SP_DELTA_ALIGN;
}

#endif
