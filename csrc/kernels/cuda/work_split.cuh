// work_split.cuh - what a collective is made of, and which slices of it a worker has.
#ifndef SP_WORK_SPLIT_CUH
#define SP_WORK_SPLIT_CUH

#include "core/contract/gpu.h"

// What a collective is made of.
__device__ __forceinline__ bool
sp_is_sharded(const sp_fused_args &a) // the array is cut into a shard per rank
{
    return a.op == SP_FUSED_ALL_REDUCE || a.op == SP_FUSED_BROADCAST;
}
__device__ __forceinline__ bool sp_sends_inputs(const sp_fused_args &a) // contributions, or root's array
{
    return a.op != SP_FUSED_ALL_GATHER && (a.op != SP_FUSED_BROADCAST || a.rank == a.root);
}
__device__ __forceinline__ bool sp_one_input(const sp_fused_args &a) // the same contribution goes to all
{
    return a.op == SP_FUSED_ALL_REDUCE_ONESHOT;
}
__device__ __forceinline__ bool sp_has_results(const sp_fused_args &a) // results travel
{
    return a.op == SP_FUSED_ALL_GATHER || sp_is_sharded(a);
}

// In place, an all-reduce need not write zeros where there are zeros: the feeder clears what it has sent, and
// the gatherer writes what a result lists. Worth it for slices and results with so few elements that most of
// memory is not touched (docs/PERFORMANCE.md).
#define SP_PATCH_SENT(n) ((n) / 256)
#define SP_PATCH_RESULT(n) ((n) / 32)
__device__ __forceinline__ bool sp_patches(const sp_fused_args &a)
{
    return a.op == SP_FUSED_ALL_REDUCE && a.in == a.out;
}

// A slice: where it starts in its buffer, and how many elements it has.
struct sp_range {
    uint64_t start;
    uint32_t n;
};

// A shard in the buffer that holds all.
struct sp_shard {
    uint64_t base, left; // where it starts, and elements from there to the end
};

// The slices of worker q: q, q + workers, ... of every shard.
struct sp_work_split {
    const sp_fused_args &a;
    uint32_t n_slices;    // of this worker, in the longest shard
    uint32_t first, pace; // elements: where its first slice starts in a shard, and from one to the next

    __device__ __forceinline__ sp_work_split(const sp_fused_args &args, uint32_t q) : a(args)
    {
        uint32_t n_q = a.n_ctas * a.workers_per_cta;
        n_slices = q < a.shard_slices ? (uint32_t)((a.shard_slices - q + n_q - 1) / n_q) : 0;
        first = q * a.slice_elems;
        pace = n_q * a.slice_elems;
    }
    __device__ __forceinline__ sp_shard shard(uint32_t rank) const
    {
        uint64_t base = rank * a.shard_stride, before = sp_is_sharded(a) ? base : 0;
        return {base, a.n_elems > before ? a.n_elems - before : 0};
    }
    // Where slice t starts in its shard.
    __device__ __forceinline__ uint64_t start(uint32_t t) const
    {
        return (uint64_t)t * pace + first;
    }
    // Elements of slice t of a shard; the last may be short or not there at all.
    __device__ __forceinline__ uint32_t elems(const sp_shard &s, uint32_t t) const
    {
        uint64_t at = start(t);
        return t >= n_slices || at >= s.left ? 0 : (uint32_t)min(s.left - at, (uint64_t)a.slice_elems);
    }
    // The same slice in the buffer that holds all shards.
    __device__ __forceinline__ sp_range range(const sp_shard &s, uint32_t t) const
    {
        return {s.base + start(t), elems(s, t)};
    }
    // In the output of the shard's owner, which may hold this shard alone (reduce-scatter).
    __device__ __forceinline__ uint64_t own_start(const sp_shard &s, uint32_t t) const
    {
        return (sp_is_sharded(a) ? s.base : 0) + start(t);
    }
};

#endif
