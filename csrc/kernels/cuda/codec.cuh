// codec.cuh - what encode_cuda.cu and decode_cuda.cu share: how a CTA divides a slice, and the size of the
// grid.
//
// A slice takes 16 KiB of shared memory, so about ten slices fit on an SM. With one warp per slice most issue
// slots of the SM would stay empty. Each slice therefore has a CTA of SP_CODEC_WARPS warps, and each warp has
// a part of the elements.
#ifndef SP_CODEC_CUH
#define SP_CODEC_CUH

#include "kernels/cuda/decode.cuh"
#include "kernels/cuda/kernels_cuda.h"
#include "kernels/cuda/launch.cuh"

#define SP_CODEC_WARPS 2u
#define SP_CODEC_THREADS (SP_CODEC_WARPS * 32)
#define SP_PART_BYTES (SP_GPU_SLICE_BYTES / SP_CODEC_WARPS)

// This warp and lane in the CTA of a slice.
struct sp_codec_cta {
    uint32_t warp, lane; // warp: the shuffle tells the compiler that it is the same in all lanes

    __device__ __forceinline__ sp_codec_cta()
        : warp(__shfl_sync(~0u, threadIdx.x / 32, 0)), lane(threadIdx.x % 32)
    {
    }
    // True for one thread of the CTA.
    __device__ __forceinline__ bool is_first() const
    {
        return threadIdx.x == 0;
    }
    // True for the last warp.
    __device__ __forceinline__ bool is_last() const
    {
        return warp + 1 == SP_CODEC_WARPS;
    }
    // Afterwards all threads see what each of them has written to shared memory.
    __device__ __forceinline__ void sync() const
    {
        __syncthreads();
    }
    // Is v true in all threads? Synchronizes like sync().
    __device__ __forceinline__ bool all(bool v) const
    {
        return __syncthreads_and(v) != 0;
    }
};

// Shapes of a slice of elements of BYTES bytes (G), and of a warp's part of it (P).
template <int BYTES> struct sp_codec_geometry {
    typedef typename sp_unsigned<BYTES>::type U;
    typedef sp_geometry<U, SP_GPU_SLICE_BYTES> G;
    typedef sp_geometry<U, SP_PART_BYTES> P;
    // Elements of part `part` in a slice of n elements.
    static __device__ __forceinline__ uint32_t elems(uint32_t n, uint32_t part)
    {
        return n > part * P::MAX_ELEMS ? min(n - part * P::MAX_ELEMS, P::MAX_ELEMS) : 0;
    }
};

// Set *status, unless it holds an earlier error.
__device__ __forceinline__ void sp_set_status(uint32_t *status, spccl_status st)
{
    atomicCAS(status, 0u, (uint32_t) - (int)st);
}

// Index of an element size (1, 2, 4, 8 bytes) in a table of kernels.
static inline int sp_width_index(spccl_dtype dtype)
{
    size_t bytes = sp_dtype_bytes(dtype);
    return bytes == 1 ? 0 : bytes == 2 ? 1 : bytes == 4 ? 2 : 3;
}

// *out = CTAs of SP_CODEC_THREADS threads and `shared` bytes that fill the current device, at most n_slices.
static inline spccl_status sp_codec_grid(const void *kernel, size_t shared, uint64_t n_slices, uint32_t *out)
{
    int n_resident = 0;
    SP_TRY(sp_resident_ctas(kernel, SP_CODEC_THREADS, shared, &n_resident));
    *out = (uint32_t)sp_min_size((size_t)n_slices, (size_t)n_resident);
    return SPCCL_OK;
}

#endif
