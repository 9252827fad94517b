/* remote.h - what a kernel knows of peers on other hosts. A contract for host and device, in C and CUDA.
 *
 * For all peers on other hosts the entry of sp_fused_args.inboxes is one area of this host's memory, the outbox. It
 * has the layout of an inbox, and each peer's slots in it are those of its own inbox: so no two peers share any. The
 * host sends what kernels write there. What these peers send, the host writes into another area, the host inbox,
 * which has the layout of this rank's inbox: frames, then the tail or credit, then the change counter of the worker.
 * A copy warp (kernels/cuda/copy_warp.cuh) copies it to the inbox. Both areas are pinned memory. */
#ifndef SP_REMOTE_AREA_H
#define SP_REMOTE_AREA_H

#include "core/contract/inbox.h"

/* Workers that share a change counter: worker q has number q / SP_REMOTE_COUNTER_WORKERS. */
#define SP_REMOTE_COUNTER_WORKERS 8u

/* All addresses are device addresses. */
typedef struct sp_fused_remote {
    uint32_t slots; /* a bit for each peer slot on another host; 0: none, and nothing else here is used */
    uint32_t n_counters;       /* sp_remote_n_counters */
    const uint8_t *host_inbox; /* host memory: what the peers sent */
    const uint32_t
        *counters; /* host memory: change counters, [n_counters]; the host adds 1 after a tail or credit */
    uint32_t *
        seen; /* GPU memory: [n_counters] change counters as last seen, then: CTAs of this launch that ended */
    uint32_t *ended; /* host memory: sp_fused_args.seq + 1 of the last launch that ended */
} sp_fused_remote;

static inline SP_HD uint32_t sp_remote_n_counters(sp_inbox_shape s)
{
    return (s.n_workers + SP_REMOTE_COUNTER_WORKERS - 1) / SP_REMOTE_COUNTER_WORKERS;
}
/* The host inbox: the layout of an inbox, then the change counters, then `ended`. */
static inline SP_HD size_t sp_remote_counters_off(sp_inbox_shape s)
{
    return sp_inbox_bytes(s);
}
static inline SP_HD size_t sp_remote_ended_off(sp_inbox_shape s)
{
    return sp_remote_counters_off(s) + ((size_t)sp_remote_n_counters(s) * 4 + 63) / 64 * 64;
}
static inline SP_HD size_t sp_remote_host_inbox_bytes(sp_inbox_shape s)
{
    return sp_remote_ended_off(s) + 64;
}

#endif
