/* gpu_share.h - how the ranks of one host hand each other their GPU memory: a listener on a local socket,
 * proof of the job secret, a handle and a descriptor each way. A contract between core and
 * transport/nvlink.c, which moves bytes and descriptors; what they mean is for sp_gpu_ops. */
#ifndef SP_GPU_SHARE_H
#define SP_GPU_SHARE_H

#include "core/contract/gpu.h"
#include "core/contract/transport.h"

/* Where a rank listens, and on which host: 16 bytes of socket id, 44 of the host's identity. */
#define SP_GPU_SHARE_ADDRESS_BYTES 60u

typedef struct sp_gpu_share_config {
    int rank, world_size;
    const uint8_t *secret; /* [SP_SECRET_BYTES], borrowed until close */
    uint64_t group_tag;
    const sp_gpu_ops *ops; /* of the device `ordinal` that memory is mapped for */
    int ordinal;
    int64_t deadline_ns; /* of swap */
    /* Asked now and then while waiting: anything but SPCCL_OK ends the wait with it (a peer died). May be
     * NULL. */
    spccl_status (*still)(void *ctx);
    void *ctx;
} sp_gpu_share_config;

typedef struct sp_gpu_share sp_gpu_share; /* one rank's end */

/* Listen. Errors: SYSTEM, NOMEM. */
spccl_status sp_gpu_share_open(const sp_gpu_share_config *config, sp_gpu_share **out);
/* For the peers, which must all have it before anybody calls swap. Errors: SYSTEM. */
spccl_status sp_gpu_share_address(const sp_gpu_share *s, uint8_t out[SP_GPU_SHARE_ADDRESS_BYTES]);
/* Are two addresses on one host (the same kernel and network namespace)? */
bool sp_gpu_share_same_host(const uint8_t *a, const uint8_t *b);

/* Give every peer `own`, map theirs.
 *   own        `bytes` of this rank; stays the caller's
 *   addresses  [world_size][SP_GPU_SHARE_ADDRESS_BYTES]
 *   out        [world_size], zeroed by the caller: the peers' memory, freed by the caller with
 *              ops->memory_destroy, after a failure too; the own entry stays NULL
 * Errors: PEER (names it), AUTH, MISMATCH, SYSTEM, NOMEM, TIMEOUT (names who is missing), UNREACHABLE (a
 * peer's memory cannot be mapped, with the device's reason), or what `still` said. */
spccl_status sp_gpu_share_exchange(sp_gpu_share *s, sp_gpu_memory *own, size_t bytes,
                                   const uint8_t *addresses, sp_gpu_memory **out);
/* Accepts NULL. Leaves no socket behind. */
void sp_gpu_share_close(sp_gpu_share *s);

#endif
