/* remote.h - groups of GPUs on several hosts: where their rings lie, and what a kernel knows of peers on other hosts. A
 * contract for host and device, in C and CUDA. contract/inbox.h says what rings, tails, credits and positions are.
 *
 * A rank has three areas of rings. Each has rings, then tails, then credits, for the links that are used, and no others:
 * - inbox: GPU memory, with the links to all peers. Peers on the same host map it and write there.
 * - outbox: pinned memory, with the links to peers on other hosts. Kernels write frames, tails and credits for these
 *   peers there, as they write into the inbox of a peer on the same host. Proxies read it.
 * - host inbox: pinned memory, with the same links. Proxies write what these peers sent: frames, then the tail or
 *   credit, then the change counter of the worker. A copy warp (kernels/cuda/copy_warp.cuh) copies it to the inbox.
 * With some peers the rings lie in GPU memory (GPUDirect RDMA): kernels write frames to rings there, with the offsets of
 * the outbox, and the network device writes them into the peer's inbox. Tails and credits go as above.
 *
 * Relays: if all hosts have the same number of ranks, two or more, a rank sends its results only to the ranks of its
 * host and to one rank of each other host: that of the same place. The place of a rank is its number among the ranks of
 * its host. That rank relays them to the other ranks of its host, in queue SP_INBOX_RELAYED.
 *
 * The links of a queue have an index:
 * - inputs: the peer slot;
 * - results: without relays the peer slot. With relays the local slots of the peers on this host, then the other hosts,
 *   from the next one on;
 * - relayed results: the local slot. A local slot counts the other places as a peer slot counts the other ranks. */
#ifndef SP_REMOTE_AREA_H
#define SP_REMOTE_AREA_H

#include "core/contract/inbox.h"

#define SP_REMOTE_QUEUES 3
/* With more than SP_GPU_HOST_RANKS_MAX ranks a group has relays, at most so many hosts, and so many ranks on each. A
 * rank then has at most SP_GPU_HOST_RANKS_MAX - 1 links of results, as in a smaller group. */
#define SP_REMOTE_HOSTS_MAX 8u
#define SP_REMOTE_HERE_MAX 8u
/* The most links of a worker, in all queues. */
#define SP_REMOTE_LINKS_MAX                                                                                  \
    (SP_GPU_RANKS_MAX - 1 + SP_GPU_HOST_RANKS_MAX - 1 + (uint32_t)SP_REMOTE_HERE_MAX - 1)

/* Workers that share a change counter: worker q has number q / SP_REMOTE_COUNTER_WORKERS. */
#define SP_REMOTE_COUNTER_WORKERS 8u

/* ---- areas of rings ---- */

typedef struct sp_ring_area {
    uint32_t n_workers, ring_bytes;
    uint32_t first[SP_REMOTE_QUEUES + 1]; /* the first link of each queue; last: how many there are */
} sp_ring_area;

static inline SP_HD uint32_t sp_area_links(const sp_ring_area *a)
{
    return a->first[SP_REMOTE_QUEUES];
}
/* A ring: [link][worker]. */
static inline SP_HD size_t sp_area_ring_off(const sp_ring_area *a, uint32_t link, uint32_t worker)
{
    return ((size_t)link * a->n_workers + worker) * a->ring_bytes;
}
/* Tails: u64, [link][worker], after the rings. */
static inline SP_HD size_t sp_area_tail_off(const sp_ring_area *a, uint32_t link, uint32_t worker)
{
    return sp_area_ring_off(a, sp_area_links(a), 0) + ((size_t)link * a->n_workers + worker) * 8;
}
/* Credits: u64, [link][worker], after the tails. */
static inline SP_HD size_t sp_area_credit_off(const sp_ring_area *a, uint32_t link, uint32_t worker)
{
    return sp_area_tail_off(a, sp_area_links(a) + link, worker);
}
static inline SP_HD size_t sp_area_bytes(const sp_ring_area *a)
{
    return sp_area_tail_off(a, 2 * sp_area_links(a), 0);
}

/* The rings of an inbox. */
static inline sp_ring_area sp_remote_inbox_area(sp_inbox_shape s)
{
    uint32_t n_peers = s.world_size - 1;
    sp_ring_area a = {.n_workers = s.n_workers, .ring_bytes = sp_inbox_ring_bytes(s), .first = {0}};
    a.first[SP_INBOX_RESULT] = n_peers;
    a.first[SP_INBOX_RELAYED] = n_peers + n_peers;
    if (s.n_here >= 2)
        a.first[SP_INBOX_RELAYED] = n_peers + s.n_here - 1 + s.world_size / s.n_here - 1;
    a.first[SP_REMOTE_QUEUES] = a.first[SP_INBOX_RELAYED] + (s.n_here >= 2 ? s.n_here - 1 : 0);
    return a;
}
/* The rings of an outbox or a host inbox of a rank with so many peers on other hosts. These peers have numbers in the
 * order of their slots. The link of inputs has that number; the link of results too, without relays. With relays the
 * index is that of the host. */
static inline sp_ring_area sp_remote_pinned_area(sp_inbox_shape s, uint32_t n_remote)
{
    uint32_t n_results = s.n_here >= 2 ? s.world_size / s.n_here - 1 : n_remote;
    sp_ring_area a = {.n_workers = s.n_workers, .ring_bytes = sp_inbox_ring_bytes(s), .first = {0}};
    a.first[SP_INBOX_RESULT] = n_remote;
    a.first[SP_INBOX_RELAYED] = a.first[SP_REMOTE_QUEUES] = n_remote + n_results;
    return a;
}

/* ---- the inbox: rings, then states ---- */

/* One worker's positions, by number of the link in the inbox; as in sp_inbox_state. */
typedef struct sp_remote_state {
    uint64_t sent[SP_REMOTE_LINKS_MAX], taken[SP_REMOTE_LINKS_MAX];
    uint64_t told[SP_REMOTE_LINKS_MAX]; /* the position last written to the peer's tail */
    uint32_t sent_off[SP_REMOTE_LINKS_MAX], taken_off[SP_REMOTE_LINKS_MAX];
    uint64_t frame_bytes;
    uint64_t n_frames[5];
    uint32_t claimed;
    uint32_t first_bytes[SP_REMOTE_LINKS_MAX]; /* recv_side.cuh; 0: no frame has come */
} sp_remote_state;

static inline SP_HD size_t sp_remote_state_off(const sp_ring_area *inbox, uint32_t worker)
{
    return sp_area_bytes(inbox) + (size_t)worker * sizeof(sp_remote_state);
}
/* Bytes of an inbox. All of them are zero before the first launch. */
static inline size_t sp_remote_inbox_bytes(sp_inbox_shape s)
{
    sp_ring_area a = sp_remote_inbox_area(s);
    return sp_remote_state_off(&a, s.n_workers);
}

/* ---- the host inbox: rings, tails and credits, then change counters, then `ended` ---- */

static inline uint32_t sp_remote_n_counters(sp_inbox_shape s)
{
    return (s.n_workers + SP_REMOTE_COUNTER_WORKERS - 1) / SP_REMOTE_COUNTER_WORKERS;
}
/* A tail or credit of the host inbox: [worker][link], as a copy warp reads those of all links of a worker. */
static inline SP_HD size_t sp_host_tail_off(const sp_ring_area *a, uint32_t link, uint32_t worker)
{
    return sp_area_tail_off(a, 0, 0) + ((size_t)worker * sp_area_links(a) + link) * 8;
}
static inline SP_HD size_t sp_host_credit_off(const sp_ring_area *a, uint32_t link, uint32_t worker)
{
    return sp_area_credit_off(a, 0, 0) + ((size_t)worker * sp_area_links(a) + link) * 8;
}
static inline size_t sp_remote_counters_off(const sp_ring_area *pinned)
{
    return sp_area_bytes(pinned);
}
static inline size_t sp_remote_ended_off(sp_inbox_shape s, const sp_ring_area *pinned)
{
    return sp_remote_counters_off(pinned) + ((size_t)sp_remote_n_counters(s) * 4 + 63) / 64 * 64;
}
static inline size_t sp_remote_host_inbox_bytes(sp_inbox_shape s, const sp_ring_area *pinned)
{
    return sp_remote_ended_off(s, pinned) + 64;
}
/* Pinned memory of a rank with so many peers on other hosts: outbox and host inbox. */
static inline size_t sp_remote_pinned_bytes(sp_inbox_shape s, uint32_t n_remote)
{
    sp_ring_area a = sp_remote_pinned_area(s, n_remote);
    return sp_area_bytes(&a) + sp_remote_host_inbox_bytes(s, &a);
}

/* ---- what kernels get ---- */

/* The hosts of a group with relays. */
typedef struct sp_fused_relays {
    uint32_t n_hosts;                /* 0: no relays, and nothing else here is used */
    uint32_t host, place;            /* of this rank */
    uint8_t ranks[SP_GPU_RANKS_MAX]; /* index: host * shape.n_here + place */
} sp_fused_relays;

/* All addresses are device addresses. */
typedef struct sp_fused_remote {
    uint64_t slots; /* a bit for each peer slot on another host; 0: none, and nothing else here is used */
    sp_fused_relays relays;
    sp_ring_area inbox, pinned;
    uint8_t
        inbox_link[SP_REMOTE_LINKS_MAX]; /* by number of the link in the pinned areas: that in the inbox */
    uint8_t *inboxes[SP_GPU_RANKS_MAX];  /* by rank; of a peer on another host: the outbox */
    uint32_t n_counters;                 /* sp_remote_n_counters */
    const uint8_t *host_inbox;           /* host memory: what the peers sent */
    /* host memory: change counters, [n_counters]; the host adds 1 after a tail or credit */
    const uint32_t *counters;
    /* GPU memory: [n_counters] change counters as last seen, then: CTAs of this launch that ended */
    uint32_t *seen;
    uint32_t *ended;                  /* host memory: sp_fused_args.seq + 1 of the last launch that ended */
    uint8_t *rings[SP_GPU_RANKS_MAX]; /* by rank: as `inboxes`, or the rings in GPU memory */
    /* a bit for each link of the pinned areas: the network device writes its frames into the inbox */
    uint32_t direct[SP_REMOTE_LINKS_MAX / 32 + 1];
} sp_fused_remote;

#endif
