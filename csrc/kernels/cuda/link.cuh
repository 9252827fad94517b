// link.cuh - the links of a worker in groups on several hosts (contract/remote.h): which peer a link leads to, and where
// its ring, tail and credit lie at that peer's end. In groups on one host all of this follows from the peer slot (contract/inbox.h).
//
// A group may have more links of queue INPUT than a warp has lanes. The lanes of a feeder or owner then have some of them
// at a time; the positions of the others are in the worker's state.
#ifndef SP_LINK_CUH
#define SP_LINK_CUH

#include "kernels/cuda/wait.cuh"

// Links of a queue.
__device__ __forceinline__ uint32_t sp_n_links(const sp_fused_args &a, uint32_t queue)
{
    return a.remote.inbox.first[queue + 1] - a.remote.inbox.first[queue];
}

struct sp_remote_link {
    uint32_t number; // in the inbox of this rank
    uint32_t slot;   // of the peer
    // The memory at the peer's end: its inbox, or the outbox; the area of rings in it, and the number of the link there.
    uint8_t *memory, *rings; // rings: as memory, or GPU memory of this rank
    const sp_ring_area *area;
    uint32_t there;

    __device__ __forceinline__ sp_remote_link(const sp_fused_args &a, uint32_t queue, uint32_t index)
    {
        const sp_fused_remote &r = a.remote;
        uint32_t n = a.shape.n_here, world_size = (uint32_t)a.world_size, peer, index_there;
        bool remote = false;
        number = r.inbox.first[queue] + index;
        if (queue == SP_INBOX_INPUT || n < 2) {
            uint64_t bit = (uint64_t)1 << index;
            peer = sp_inbox_peer((uint32_t)a.rank, index, world_size);
            remote = (r.slots & bit) != 0;
            index_there = remote ? (uint32_t)__popcll(r.slots & (bit - 1)) : world_size - 2 - index;
        } else if (index < n - 1) {
            peer = r.relays.ranks[r.relays.host * n + sp_inbox_peer(r.relays.place, index, n)];
            index_there = n - 2 - index;
        } else {
            index_there = index - (n - 1);
            peer =
                r.relays
                    .ranks[sp_inbox_peer(r.relays.host, index_there, r.relays.n_hosts) * n + r.relays.place];
            remote = true;
        }
        slot = sp_inbox_slot((uint32_t)a.rank, peer, world_size);
        memory = r.inboxes[peer];
        rings = r.rings[peer];
        area = remote ? &r.pinned : &r.inbox;
        there = area->first[queue] + index_there;
    }
    __device__ __forceinline__ uint8_t *ring(uint32_t worker) const
    {
        return rings + sp_area_ring_off(area, there, worker);
    }
    __device__ __forceinline__ uint64_t *tail(uint32_t worker) const
    {
        return (uint64_t *)(memory + sp_area_tail_off(area, there, worker));
    }
    __device__ __forceinline__ uint64_t *credit(uint32_t worker) const
    {
        return (uint64_t *)(memory + sp_area_credit_off(area, there, worker));
    }
};

#endif
