/* gpu_share.h - how the ranks of one host give each other access to their GPU memory. Each rank listens on a
 * local socket; every pair proves the job secret and exchanges a handle and a descriptor each way. A contract
 * between core and transport/local/nvlink.c, which moves these bytes. sp_gpu_ops knows what they mean. */
#ifndef SP_GPU_SHARE_H
#define SP_GPU_SHARE_H

#include "core/contract/gpu.h"
#include "core/contract/transport.h"

/* Address of a rank's listener: 16 bytes of socket id, 44 bytes that identify the host. */
#define SP_GPU_SHARE_ADDRESS_BYTES 60u

typedef struct sp_gpu_share_config {
    int rank, world_size;
    const uint8_t *secret; /* [SP_SECRET_BYTES], borrowed until close */
    const uint8_t *host;   /* [SP_HOST_ID_BYTES] this rank's host, borrowed until close */
    uint64_t group_tag;
    const char *call, *what; /* for error texts: the public call, and what is shared: "an inbox" */
    const sp_gpu_ops *ops;   /* the table that maps memory on GPU `ordinal` */
    int ordinal;
    int64_t deadline_ns; /* when sp_gpu_share_exchange gives up */
    /* Called now and then during a wait. The wait ends with any status but SPCCL_OK (for example when a peer
     * died). May be NULL. */
    spccl_status (*still)(void *ctx);
    void *ctx;
} sp_gpu_share_config;

typedef struct sp_gpu_share sp_gpu_share; /* one rank's listener and connections */

/* Listen. Errors: SYSTEM, NOMEM. */
spccl_status sp_gpu_share_open(const sp_gpu_share_config *config, sp_gpu_share **out);
/* This rank's address. All peers must have it before any rank calls exchange. Errors: SYSTEM. */
spccl_status sp_gpu_share_address(const sp_gpu_share *s, uint8_t out[SP_GPU_SHARE_ADDRESS_BYTES]);
/* Are two addresses on one host, that is, in one kernel and one network namespace? */
bool sp_gpu_share_same_host(const uint8_t *a, const uint8_t *b);

/* Give every peer on this host access to `own`, and map these peers' memory.
 *   own        `bytes` of this rank; the caller keeps it
 *   addresses  [world_size], of SP_GPU_SHARE_ADDRESS_BYTES each, `stride` bytes apart
 *   out        [world_size], zeroed by the caller: the peers' memory. This rank's entry and those of other hosts stay NULL.
 *              The caller frees the others with ops->memory_destroy, after a failure too
 * Errors: PEER (names it), AUTH, MISMATCH, SYSTEM, NOMEM, TIMEOUT (names who is missing), UNREACHABLE (a
 * peer's memory cannot be mapped; the text has the device's reason), or what `still` returned. */
spccl_status sp_gpu_share_exchange(sp_gpu_share *s, sp_gpu_memory *own, size_t bytes,
                                   const uint8_t *addresses, size_t stride, sp_gpu_memory **out);
/* Accepts NULL. Removes the socket. */
void sp_gpu_share_close(sp_gpu_share *s);

#endif
