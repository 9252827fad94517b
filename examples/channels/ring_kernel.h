/* ring_kernel.h - starts the kernel of ring_kernel.cu from C. */
#ifndef RING_KERNEL_H
#define RING_KERNEL_H

#include <cuda_runtime_api.h>
#include <spccl_channel.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Bytes of a window for blocks of this size: two halves for what comes; of port channels two more, to send from. */
#define RING_WINDOW_BYTES(block_bytes) (2 * (uint64_t)(block_bytes))
#define RING_PORT_WINDOW_BYTES(block_bytes) (4 * (uint64_t)(block_bytes))

/* A ring all-gather: out [world_size * block_bytes] gets the blocks of all ranks in rank order. All pointers are
 * memory of the current GPU. */
struct ring_job {
    const void *block;
    void *out;
    uint64_t block_bytes; /* a multiple of 16 */
    int world_size;
};

/* next, previous: channels to rank + 1 and rank - 1, with windows of RING_WINDOW_BYTES(block_bytes). Both ranks of a
 * link use the same number, and no other link has it: of two ranks, both links join the same pair. If a wait of
 * the kernel fails, spccl_cuda_wait returns the error, and `out` has no result. */
cudaError_t ring_all_gather_memory(spccl_memory_channel next, spccl_memory_channel previous,
                                   const struct ring_job *job, cudaStream_t stream);
/* The same over port channels, with windows of RING_PORT_WINDOW_BYTES(block_bytes). */
cudaError_t ring_all_gather_port(spccl_port_channel next, spccl_port_channel previous,
                                 const struct ring_job *job, cudaStream_t stream);

#ifdef __cplusplus
}
#endif
#endif
