// work_split.cuh - which transfers a collective consists of, and which slices of the array a worker has.
#ifndef SP_WORK_SPLIT_CUH
#define SP_WORK_SPLIT_CUH

#include "core/contract/gpu.h"

// True if n_elems counts a whole array of which each rank owns a shard or none (all-reduce, broadcast). Otherwise
// each rank owns n_elems elements: its block, or in ALL_REDUCE_ONESHOT the whole array.
__device__ __forceinline__ bool sp_is_sharded(const sp_fused_args &a)
{
    return a.op == SP_FUSED_ALL_REDUCE || a.op == SP_FUSED_BROADCAST;
}
// True if this rank sends contributions. In a broadcast only the root does: it sends its array.
__device__ __forceinline__ bool sp_sends_inputs(const sp_fused_args &a)
{
    return a.op != SP_FUSED_ALL_GATHER && (a.op != SP_FUSED_BROADCAST || a.rank == a.root);
}
// True if all peers get the same contribution.
__device__ __forceinline__ bool sp_one_input(const sp_fused_args &a)
{
    return a.op == SP_FUSED_ALL_REDUCE_ONESHOT;
}
// True if owners send results to the other ranks.
__device__ __forceinline__ bool sp_has_results(const sp_fused_args &a)
{
    return a.op == SP_FUSED_ALL_GATHER || sp_is_sharded(a);
}

// Patching: an all-reduce in place writes only what changes. The feeder sets the elements that it has sent to
// zero in the array. The gatherer then writes only the elements that a result lists. This pays for slices
// with at most SP_PATCH_SENT(n) and results with at most SP_PATCH_RESULT(n) elements: most memory is then not
// touched.
#define SP_PATCH_SENT(n) ((n) / 256)
#define SP_PATCH_RESULT(n) ((n) / 32)
__device__ __forceinline__ bool sp_patches(const sp_fused_args &a)
{
    return a.op == SP_FUSED_ALL_REDUCE && a.in == a.out;
}

// A slice: its first element in its buffer, and its number of elements.
struct sp_range {
    uint64_t start;
    uint32_t n;
};

// A shard in the buffer that holds all shards.
struct sp_shard {
    uint64_t base, left; // its first element, and the elements from there to the end of the array
};

// The slices of worker q of n: slices q, q + n, q + 2n ... of every shard.
struct sp_work_split {
    const sp_fused_args &a;
    uint32_t n_slices;    // of this worker, in the longest shard
    uint32_t first, pace; // in elements: start of its first slice in a shard; distance to the next

    __device__ __forceinline__ sp_work_split(const sp_fused_args &args, uint32_t q) : a(args)
    {
        uint32_t n_q = a.n_ctas * a.workers_per_cta;
        n_slices = q < a.shard_slices ? (uint32_t)((a.shard_slices - q + n_q - 1) / n_q) : 0;
        first = q * a.slice_elems;
        pace = n_q * a.slice_elems;
    }
    // Where the shard of a rank begins in the buffer that holds all shards, in elements.
    __device__ __forceinline__ uint64_t shard_base(uint32_t rank) const
    {
        return a.shards[rank] * a.shard_stride;
    }
    __device__ __forceinline__ sp_shard shard(uint32_t rank) const
    {
        uint64_t base = shard_base(rank), before = sp_is_sharded(a) ? base : 0;
        return {base, a.n_elems > before ? a.n_elems - before : 0};
    }
    // Where slice t starts in its shard, in elements.
    __device__ __forceinline__ uint64_t start(uint32_t t) const
    {
        return (uint64_t)t * pace + first;
    }
    // Elements of slice t of a shard. The last slice may be short; slices past the end have none.
    __device__ __forceinline__ uint32_t elems(const sp_shard &s, uint32_t t) const
    {
        uint64_t at = start(t);
        return t >= n_slices || at >= s.left ? 0 : (uint32_t)min(s.left - at, (uint64_t)a.slice_elems);
    }
    // Slice t in the buffer that holds all shards.
    __device__ __forceinline__ sp_range range(const sp_shard &s, uint32_t t) const
    {
        return {s.base + start(t), elems(s, t)};
    }
    // Where slice t starts in the owner's output, which in a reduce-scatter holds only the owner's shard.
    __device__ __forceinline__ uint64_t own_start(const sp_shard &s, uint32_t t) const
    {
        return (sp_is_sharded(a) ? s.base : 0) + start(t);
    }
};

#endif
