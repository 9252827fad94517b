// codec.cuh - what encode_cuda.cu and decode_cuda.cu share: the team of warps that has a slice, launching.
//
// A slice is 16 KiB on chip, so a multiprocessor has room for about ten; one warp for each would leave most
// of its issue slots empty. So each slice is a team's: a block of SP_CODEC_WARPS warps, each with a part of
// the elements.
#ifndef SP_CODEC_CUH
#define SP_CODEC_CUH

#include "kernels/cuda/cuda_check.h"
#include "kernels/cuda/decode.cuh"
#include "kernels/cuda/kernels_cuda.h"

#define SP_CODEC_WARPS 2u
#define SP_CODEC_THREADS (SP_CODEC_WARPS * 32)
#define SP_PART_BYTES (SP_GPU_SLICE_BYTES / SP_CODEC_WARPS)

// A warp's place in its team, which is its block.
struct sp_codec_cta {
    uint32_t warp, lane; // warp: the same in all lanes, and the compiler is told so

    __device__ __forceinline__ sp_codec_cta()
        : warp(__shfl_sync(~0u, threadIdx.x / 32, 0)), lane(threadIdx.x % 32)
    {
    }
    __device__ __forceinline__ bool is_first() const // one thread of all
    {
        return threadIdx.x == 0;
    }
    __device__ __forceinline__ bool is_last() const // the last warp
    {
        return warp + 1 == SP_CODEC_WARPS;
    }
    // What all have written to shared memory is there for all.
    __device__ __forceinline__ void sync() const
    {
        __syncthreads();
    }
    __device__ __forceinline__ bool all(bool v) const // and sync
    {
        return __syncthreads_and(v) != 0;
    }
};

// Shapes of a slice of elements of BYTES bytes and of a warp's part of it.
template <int BYTES> struct sp_codec_geometry {
    typedef typename sp_unsigned<BYTES>::type U;
    typedef sp_geometry<U, SP_GPU_SLICE_BYTES> G;
    typedef sp_geometry<U, SP_PART_BYTES> P;
    // Of a slice of n elements, those of a part.
    static __device__ __forceinline__ uint32_t elems(uint32_t n, uint32_t part)
    {
        return n > part * P::MAX_ELEMS ? min(n - part * P::MAX_ELEMS, P::MAX_ELEMS) : 0;
    }
};

// The first fault that is seen stays.
__device__ __forceinline__ void sp_set_status(uint32_t *status, spccl_status st)
{
    atomicCAS(status, 0u, (uint32_t) - (int)st);
}

// Index of a width in a table of kernels: 1, 2, 4, 8 bytes.
static inline int sp_width_index(spccl_dtype dtype)
{
    size_t bytes = sp_dtype_bytes(dtype);
    return bytes == 1 ? 0 : bytes == 2 ? 1 : bytes == 4 ? 2 : 3;
}

// Blocks of SP_CODEC_THREADS threads and `shared` bytes that fill the current device, no more than slices.
static inline spccl_status sp_codec_grid(const void *kernel, size_t shared, uint64_t n_slices, unsigned *out)
{
    int device = 0, n_sms = 0, each = 0;
    SP_TRY_CUDA(cudaGetDevice(&device));
    SP_TRY_CUDA(cudaDeviceGetAttribute(&n_sms, cudaDevAttrMultiProcessorCount, device));
    SP_TRY_CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, kernel, (int)SP_CODEC_THREADS, shared));
    if (each == 0)
        return SP_FAIL(SPCCL_ERR_UNSUPPORTED,
                       "GPU %d has too little shared memory for the codec (%zu bytes a block)", device,
                       shared);
    *out = (unsigned)sp_min_size((size_t)n_slices, (size_t)n_sms * (size_t)each);
    return SPCCL_OK;
}

#endif
