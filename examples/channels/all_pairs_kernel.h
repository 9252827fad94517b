/* all_pairs_kernel.h - starts the kernel of all_pairs_kernel.cu from C. */
#ifndef ALL_PAIRS_KERNEL_H
#define ALL_PAIRS_KERNEL_H

#include <cuda_runtime_api.h>
#include <spccl_channel.h>

#ifdef __cplusplus
extern "C" {
#endif

#define ALL_PAIRS_RANKS_MAX 8
#define ALL_PAIRS_BLOCKS_MAX 32

/* Bytes of a window: two halves that take turns. A half has a place for each rank's array as packets, two elements in 16
 * bytes. */
#define ALL_PAIRS_WINDOW_BYTES(n_elems, n_ranks) (2 * (uint64_t)(n_ranks) * ((n_elems) / 2) * 16)

/* An all-reduce: out = the sum of all ranks' `in`, added in rank order from +0.0. All pointers are memory of the current
 * GPU, in and out multiples of 8; they may be the same. */
struct all_pairs_job {
    const float *in;
    float *out;
    uint64_t n_elems;     /* an even number, at least 2 */
    int rank, world_size; /* 2 to ALL_PAIRS_RANKS_MAX ranks */
    uint32_t *uses;       /* [ALL_PAIRS_BLOCKS_MAX] 0 at first; the kernel counts uses of each block; wraps */
};

/* channels: by rank, number 0 to each peer; that of this rank is not read. Their windows have
 * ALL_PAIRS_WINDOW_BYTES(n_elems, world_size). All launches with a set have the same n_elems and `uses`, and
 * do not overlap. If a wait of the kernel fails, spccl_cuda_wait returns the error, and `out` has no result. */
cudaError_t all_pairs_all_reduce(const spccl_memory_channel *channels, const struct all_pairs_job *job,
                                 cudaStream_t stream);

#ifdef __cplusplus
}
#endif
#endif
