/* all_pairs_kernel.h - starts the kernel of all_pairs_kernel.cu from C. */
#ifndef ALL_PAIRS_KERNEL_H
#define ALL_PAIRS_KERNEL_H

#include <cuda_runtime_api.h>
#include <spccl_channel.h>

#ifdef __cplusplus
extern "C" {
#endif

#define ALL_PAIRS_RANKS_MAX 8

/* Each rank owns a shard of the array: this many packets of two elements. The last shards may have fewer, or none. */
#define ALL_PAIRS_SHARD(n_elems, n_ranks) (((uint64_t)(n_elems) / 2 + (n_ranks)-1) / (n_ranks))
/* Bytes of a window: two halves that take turns. A half has a place for each rank's part of the shard, and one for each
 * rank's sum. */
#define ALL_PAIRS_WINDOW_BYTES(n_elems, n_ranks) (2 * 2 * (n_ranks)*ALL_PAIRS_SHARD(n_elems, n_ranks) * 16)

/* An all-reduce: out = the sum of all ranks' `in`, added in rank order from +0.0. All pointers are memory of the current
 * GPU, in and out multiples of 8. */
struct all_pairs_job {
    const float *in;
    float *out;
    uint64_t n_elems; /* an even number */
    int rank, world_size;
    uint32_t *
        uses; /* 0 at first, and then the kernel's: how often the channels were used. The same for all launches */
    uint32_t *ok; /* the kernel sets 1, or 0 if a wait failed */
};

/* channels: by rank, number 0 to each peer; that of this rank is not read. Their windows have
 * ALL_PAIRS_WINDOW_BYTES(n_elems, world_size). All launches with a set have the same n_elems. */
cudaError_t all_pairs_all_reduce(const spccl_memory_channel *channels, const struct all_pairs_job *job,
                                 cudaStream_t stream);

#ifdef __cplusplus
}
#endif
#endif
