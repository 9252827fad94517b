// fused.cuh - a CTA of a fused collective: its warps and its shared memory. CMake makes gather_cuda.cu and
// reduce_*_cuda.cu from kernels_cuda.cu.in, with the kernels of a few dtypes in each. launch_cuda.cu launches them.
#ifndef SP_FUSED_CUH
#define SP_FUSED_CUH

#include "kernels/cuda/notifier.cuh"
#include "kernels/cuda/roles.cuh"

// The most warps of a CTA: those of its workers, then the notifier. In groups on several hosts a copy warp follows
// (copy_warp.cuh). One CTA runs on an SM.
#define SP_CTA_WARPS 16u
#define SP_CTA_THREADS (SP_CTA_WARPS * 32)
#define SP_CTA_WORKERS 10u // at most

// How many warps of a CTA of n workers have each role, if a feeder serves n_served workers.
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

template <bool CONDITION, class A, class B> struct sp_if {
    typedef A type;
};
template <class A, class B> struct sp_if<false, A, B> {
    typedef B type;
};

// The number of this warp in its CTA. The shuffle tells the compiler that the value is the same in all lanes.
// Branches on it then need no divergence handling, and it can be kept in uniform registers.
__device__ __forceinline__ uint32_t sp_warp_index()
{
    return __shfl_sync(~0u, threadIdx.x / 32, 0);
}

// Shared memory of a CTA: the progress tables, then the shared memory of each role's warps.
template <bool REMOTE> struct sp_block_smem {
    typedef typename sp_progress_of<REMOTE>::type progress_table;
    progress_table *progress;
    sp_feed_smem *feed;
    sp_own_smem *own;
    sp_gather_smem *gather;

    __device__ __forceinline__ sp_block_smem(const sp_warp_counts &counts, uint32_t n)
    {
        progress = (progress_table *)sp_block_shared();
        feed = (sp_feed_smem *)(progress + n);
        own = (sp_own_smem *)(feed + counts.n_feed);
        gather = (sp_gather_smem *)(own + counts.n_own);
    }
};
static_assert(sizeof(sp_progress) % 16 == 0 && sizeof(sp_remote_progress) % 16 == 0,
              "the parts after the tables stay aligned to 16");

// The first call of every warp but the copy warp: initializes the tables in shared memory. The last of them becomes the
// notifier; it returns true when all workers are done. All others return false at once.
template <bool REMOTE>
__device__ __forceinline__ bool sp_block_begin(const sp_fused_args &a, const sp_warp_counts &counts,
                                               const sp_block_smem<REMOTE> &smem)
{
    typedef typename sp_if<REMOTE, sp_remote_notifier, sp_notifier<SP_CTA_WORKERS>>::type notifier_type;
    sp_progress_init(a, smem.progress, counts.n_own != 0, counts.n_gather != 0);
    if (threadIdx.x / 32 + 1 == counts.total()) {
        notifier_type notifier(a);
        __syncthreads();
        notifier.run(smem.progress);
        return true;
    }
    __syncthreads();
    return false;
}

typedef void (*sp_fused_kernel)(const sp_fused_args);

#endif
