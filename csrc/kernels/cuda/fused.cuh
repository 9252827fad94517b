// fused.cuh - a block of a fused collective: its warps and its shared memory. The kernels lie in
// gather_cuda.cu and, a few dtypes in each, in reduce_*_cuda.cu, so that they are compiled side by side;
// launch_cuda.cu launches them.
#ifndef SP_FUSED_CUH
#define SP_FUSED_CUH

#include "kernels/cuda/roles.cuh"

// Warps of a block, which has a multiprocessor to itself: those of its workers and, the last, the notifier.
#define SP_CTA_WARPS 16u
#define SP_CTA_THREADS (SP_CTA_WARPS * 32)
#define SP_CTA_WORKERS 10u // at most

// Warps of each role in a block of n workers, of which a feeder serves n_served.
struct sp_warp_counts {
    uint32_t n_feed, n_own, n_gather;

    __host__ __device__ __forceinline__ sp_warp_counts(sp_fused_op op, uint32_t n, uint32_t n_served)
        : n_feed((n + n_served - 1) / n_served),
          n_own(op == SP_FUSED_ALL_GATHER || op == SP_FUSED_BROADCAST ? 0 : n),
          n_gather(op == SP_FUSED_REDUCE_SCATTER || op == SP_FUSED_ALL_REDUCE_ONESHOT ? 0 : n)
    {
    }
    __host__ __device__ __forceinline__ uint32_t total() const
    {
        return n_feed + n_own + n_gather + 1;
    }
};

// The number of this warp in its block. The shuffle says that it is the same in all lanes: what depends on it
// needs no branches of single lanes, and registers of the warp instead of the lanes'.
__device__ __forceinline__ uint32_t sp_warp_index()
{
    return __shfl_sync(~0u, threadIdx.x / 32, 0);
}

// Shared memory of a block: progress, then the smem of each role.
struct sp_block_smem {
    sp_progress *progress;
    sp_feed_smem *feed;
    sp_own_smem *own;
    sp_gather_smem *gather;

    __device__ __forceinline__ sp_block_smem(const sp_warp_counts &counts, uint32_t n)
    {
        progress = (sp_progress *)sp_block_shared();
        feed = (sp_feed_smem *)(progress + n);
        own = (sp_own_smem *)(feed + counts.n_feed);
        gather = (sp_gather_smem *)(own + counts.n_own);
    }
};
static_assert(sizeof(sp_progress) % 16 == 0, "smem are aligned to 16");

// First thing in a block: the progress, and the last warp becomes the notifier. True: this warp was it, and all
// is done.
__device__ __forceinline__ bool sp_block_begin(const sp_fused_args &a, const sp_warp_counts &counts,
                                               sp_progress *progress)
{
    sp_progress_init(a, progress, counts.n_own != 0, counts.n_gather != 0);
    if (threadIdx.x / 32 + 1 == counts.total()) {
        sp_notifier<SP_CTA_WORKERS> notifier(a);
        __syncthreads();
        notifier.run(progress);
        return true;
    }
    __syncthreads();
    return false;
}

typedef void (*sp_fused_kernel)(const sp_fused_args);

// gather_cuda.cu: all-gather and broadcast of elements of so many bytes.
sp_fused_kernel sp_gather_kernel_of(size_t elem_bytes);
// reduce_*_cuda.cu: reductions of a dtype, nullptr if it is none of the file's.
sp_fused_kernel sp_reduce_kernel_of_floats(spccl_dtype dtype);
sp_fused_kernel sp_reduce_kernel_of_halves(spccl_dtype dtype);
sp_fused_kernel sp_reduce_kernel_of_ints(spccl_dtype dtype);
sp_fused_kernel sp_reduce_kernel_of_small_ints(spccl_dtype dtype);

#endif
