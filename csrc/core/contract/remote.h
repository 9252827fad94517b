/* remote.h - what a kernel knows of peers on other hosts. A contract for host and device, in C and CUDA.
 *
 * For all peers on other hosts the entry of sp_fused_args.inboxes is one area of this host's memory, the outbox. It
 * has the layout of an inbox, and each peer's slots in it are those of its own inbox: so no two peers share any. The
 * host sends what kernels write there. What these peers send, the host writes into another area, the host inbox,
 * which has the layout of this rank's inbox: frames, then the tail or credit, then the change counter of the worker.
 * A copy warp (kernels/cuda/copy_warp.cuh) copies it to the inbox. Both areas are pinned memory.
 *
 * Relays: if all hosts have the same number of ranks, two or more, a rank sends its results only to the ranks of its
 * host and to one rank of each other host: that of the same place. The place of a rank is its number among the ranks of
 * its host. That rank relays them to the other ranks of its host, in queue SP_INBOX_RELAYED. */
#ifndef SP_REMOTE_AREA_H
#define SP_REMOTE_AREA_H

#include "core/contract/inbox.h"

/* Workers that share a change counter: worker q has number q / SP_REMOTE_COUNTER_WORKERS. */
#define SP_REMOTE_COUNTER_WORKERS 8u

/* The hosts of a group with relays. */
typedef struct sp_fused_relays {
    uint32_t n_hosts;                /* 0: no relays, and nothing else here is used */
    uint32_t host, place;            /* of this rank */
    uint8_t ranks[SP_GPU_RANKS_MAX]; /* index: host * shape.n_here + place */
} sp_fused_relays;

/* All addresses are device addresses. */
typedef struct sp_fused_remote {
    uint32_t slots; /* a bit for each peer slot on another host; 0: none, and nothing else here is used */
    uint32_t result_slots; /* a bit for each peer slot to which this rank sends its results */
    sp_fused_relays relays;
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
    return sp_inbox_pair_bytes(s);
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
