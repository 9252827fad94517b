// gather_hosts.cuh - the gatherer in groups on several hosts. If the group has relays (contract/remote.h), it takes the
// results of a slice in stages, one for each host:
// - stage 0: the results of the ranks of this host;
// - stage s: the results of the s-th next host. The rank of the same place there has sent its result to this rank; the
//   other ranks of this host relay the rest.
// The result that a stage needs from the other host is taken in the stage before and relayed at once. So in stage s the
// gatherer takes results from stage s on, and relays what the other ranks of this host need in stage s + 1.
// docs/ALGORITHMS.md says why no gatherer waits for ever. Without relays there is one stage.
#ifndef SP_GATHER_HOSTS_CUH
#define SP_GATHER_HOSTS_CUH

#include "kernels/cuda/roles.cuh"

// The sending end of a worker's rings of relayed results. Lane `local slot` has the ring in that peer's inbox.
struct sp_relay_side {
    const sp_warp_context<true> &ctx;
    uint32_t *posted; // L: the link's entry of the worker's progress table
    uint32_t ring_bytes;
    bool linked;         // L: this lane has a ring
    uint32_t number;     // L: of the link in the inbox
    uint32_t slot;       // L: of the peer
    uint8_t *to;         // L: the ring
    uint64_t sent;       // L: position of the next frame
    uint32_t off;        // L: offset of that position in the ring
    uint32_t free_bytes; // L: free bytes of the ring, as last seen
    uint32_t units;      // 16-byte units of all frames sent
    uint32_t n_frames;   // L: frames sent in format number `lane`

    // Continues at the positions of the last launch.
    __device__ __forceinline__ sp_relay_side(const sp_warp_context<true> &context,
                                             sp_remote_progress &progress)
        : ctx(context), posted(nullptr), ring_bytes(sp_inbox_ring_bytes(context.a.shape)),
          linked(context.lane < sp_n_links(context.a, SP_INBOX_RELAYED)), number(0), slot(0), to(nullptr),
          sent(0), off(0), free_bytes(0), units(0), n_frames(0)
    {
        if (!linked)
            return;
        sp_remote_link link(ctx.a, SP_INBOX_RELAYED, ctx.lane);
        number = link.number;
        slot = link.slot;
        posted = progress.posted + number;
        sent = ctx.state(ctx.q)->sent[number];
        off = ctx.state(ctx.q)->sent_off[number];
        free_bytes = (uint32_t)(sp_load_acquire_sys(credit_word()) + ring_bytes - sent);
        to = link.ring(ctx.q);
    }
    __device__ __forceinline__ const uint64_t *credit_word() const // L
    {
        return ctx.word(sp_area_credit_off(&ctx.a.remote.inbox, number, ctx.q));
    }
    // Save the positions for the next launch.
    __device__ __forceinline__ void close() const
    {
        if (linked) {
            ctx.state(ctx.q)->sent[number] = sent;
            ctx.state(ctx.q)->sent_off[number] = off;
        }
        if (ctx.lane < SPCCL_N_FORMATS && n_frames != 0)
            atomicAdd((unsigned long long *)&ctx.state(ctx.q)->n_frames[ctx.lane], n_frames);
        if (ctx.lane == 0 && units != 0)
            atomicAdd((unsigned long long *)&ctx.state(ctx.q)->frame_bytes, (uint64_t)units * 16);
    }
    // Wait until a frame of so many bytes fits into each ring.
    __device__ __forceinline__ bool wait_for_space(uint32_t bytes, uint32_t slice)
    {
        bool ok = true;
        if (linked) {
            uint32_t left = ring_bytes - off, skip = left < bytes ? left : 0;
            if (skip + bytes > free_bytes) {
                uint64_t credit = sp_wait<true>(ctx.a, ctx.q, credit_word(), sent + skip + bytes - ring_bytes,
                                                SP_GPU_NO_SPACE, SP_INBOX_RELAYED, slot, slice);
                ok = credit != 0;
                free_bytes = (uint32_t)(credit + ring_bytes - sent);
            }
            if (left < bytes) {
                if (ok && left >= SP_FRAME_HEADER_BYTES)
                    sp_store16(to + off, make_uint4(SP_INBOX_WRAP, 0, 0, 0));
                sent += left;
                free_bytes -= left;
                off = 0;
            }
        }
        ok = __all_sync(~0u, ok);
        __syncwarp();
        return ok;
    }
    // Copy a frame of this rank's inbox to all ranks of this host.
    __device__ __forceinline__ bool send(const uint8_t *frame, uint32_t bytes, uint32_t format,
                                         uint32_t slice)
    {
        if (!wait_for_space(bytes, slice))
            return false;
        uint32_t n_peers = sp_n_links(ctx.a, SP_INBOX_RELAYED);
#pragma unroll 1
        for (uint32_t base = 0; base < bytes; base += 2048) {
            uint4 v[4];
#pragma unroll
            for (uint32_t k = 0; k < 4; k++)
                if (base + k * 512 + ctx.lane * 16 < bytes)
                    v[k] = *(const uint4 *)(frame + base + k * 512 + ctx.lane * 16);
#pragma unroll 1
            for (uint32_t p = 0; p < n_peers; p++) {
                uint8_t *dst = (uint8_t *)__shfl_sync(~0u, (unsigned long long)(uintptr_t)(to + off), p);
#pragma unroll
                for (uint32_t k = 0; k < 4; k++)
                    if (base + k * 512 + ctx.lane * 16 < bytes)
                        sp_store16(dst + base + k * 512 + ctx.lane * 16, v[k]);
            }
        }
        __syncwarp();
        if (linked) {
            sent += bytes;
            off += bytes;
            free_bytes -= bytes;
            sp_store_release_cta(posted, (uint32_t)sent);
        }
        units += bytes / 16 * n_peers;
        n_frames += ctx.lane == format ? n_peers : 0;
        return true;
    }
};

// The gatherer. Lane 16 + i has the link of results of index i, lane i < 16 that of relayed results of index i.
// Entries of the receive side: without relays the index. With relays the local slot of the peer on this host whose frame it
// is, and one more for the result of another host.
template <class G, bool REDUCES> struct sp_host_gatherer {
    typedef typename G::U U;
    static constexpr uint32_t NEVER = ~0u;
    const sp_warp_context<true> &ctx;
    const sp_fused_relays &relays;
    sp_gather_smem &smem;
    sp_remote_progress &progress;
    sp_work_split split;
    sp_recv_side<G, true, true> recv_side;
    sp_relay_side relay_side;
    uint32_t n_stages;
    uint32_t stage; // L: in which the result of this lane's link is taken; NEVER: the lane has none
    bool crosses;   // L: that result is relayed here
    sp_shard shard; // L: of this lane's peer
    bool patches;

    __device__ __forceinline__ sp_host_gatherer(const sp_warp_context<true> &context, sp_gather_smem &shared,
                                                sp_remote_progress &table)
        : ctx(context), relays(context.a.remote.relays), smem(shared), progress(table),
          split(context.a, context.q),
          recv_side(context, SP_INBOX_RESULT, shared.pool, SP_GATHER_POOL_BYTES, shared.barriers,
                    context.a.remote.relays.n_hosts != 0 ? context.a.shape.n_here : context.n_peers),
          relay_side(context, table), n_stages(relays.n_hosts != 0 ? relays.n_hosts : 1), stage(NEVER),
          crosses(false), shard{0, 0}, patches(REDUCES && sp_patches(context.a))
    {
        uint32_t index = ctx.slot(), n_here = relays.n_hosts != 0 ? ctx.a.shape.n_here - 1 : ctx.n_peers;
        recv_side.links.first_k = 0;
        if (relays.n_hosts != 0 && ctx.lane < n_here)
            recv_side.open_link(SP_INBOX_RELAYED, ctx.lane, ctx.lane);
        if (ctx.lane < 16 || index >= sp_n_links(ctx.a, SP_INBOX_RESULT))
            return;
        crosses = index >= n_here;
        stage = crosses ? index - n_here : 0;
        recv_side.open_link(SP_INBOX_RESULT, index, crosses ? n_here : index);
        shard = split.shard(ctx.peer(recv_side.links.link.slot));
    }
    // The rank of a place on the s-th next host.
    __device__ __forceinline__ uint32_t owner(uint32_t s, uint32_t place) const
    {
        uint32_t host = relays.host + s < relays.n_hosts ? relays.host + s : relays.host + s - relays.n_hosts;
        return relays.ranks[host * ctx.a.shape.n_here + place];
    }
    // L: has this lane a link of relayed results?
    __device__ __forceinline__ bool is_relayed() const
    {
        return recv_side.links.linked && ctx.lane < 16;
    }
    // L: the owner of the relayed result that this lane takes in stage s > 0.
    __device__ __forceinline__ uint32_t relayed_owner(uint32_t s) const
    {
        return owner(s, sp_inbox_peer(relays.place, ctx.lane, ctx.a.shape.n_here));
    }
    // L: elements of the frame that this lane takes in stage s of slice t; 0: none.
    __device__ __forceinline__ uint32_t wanted(uint32_t t, uint32_t s) const
    {
        if (is_relayed())
            return s == 0 ? 0 : split.elems(split.shard(relayed_owner(s)), t);
        return s == stage ? split.elems(shard, t) : 0;
    }
    // Write the frames that were taken in stage s. *bad = 1 + the slot of a frame that this lane found broken, or 0.
    __device__ __forceinline__ void write(uint32_t t, uint32_t s, uint32_t *bad, uint32_t *bad_queue)
    {
        uint32_t slot_here = recv_side.links.link.slot;                                       // L
        uint32_t rank_here = is_relayed() && s != 0 ? relayed_owner(s) : ctx.peer(slot_here); // L
        for (uint32_t e = 0; e < recv_side.n_entries(); e++) {
            uint32_t lane = recv_side.lane_of(e, recv_side.n != 0);
            if (__shfl_sync(~0u, recv_side.n, lane) == 0)
                continue;
            uint32_t rank = __shfl_sync(~0u, rank_here, lane), slot = __shfl_sync(~0u, slot_here, lane);
            sp_view v = recv_side.view(e);
            U *dst = (U *)ctx.a.out + split.shard_base(rank) + split.start(t);
            bool zeros = false;
            if (patches) {
                uint32_t owner_slot = sp_inbox_slot(ctx.me(), rank, (uint32_t)ctx.a.world_size);
                zeros = (sp_load_acquire_cta(progress.cleared + owner_slot) >> t % 32 & 1) != 0;
            }
            if (!sp_result_store<G>(ctx.lane, v, (U *)smem.buf, dst, zeros)) {
                *bad = slot + 1;
                *bad_queue = lane < 16 ? SP_INBOX_RELAYED : SP_INBOX_RESULT;
            }
        }
    }
    // Relay the result of the next host that was taken in stage s.
    __device__ __forceinline__ bool relay(uint32_t t, bool mine)
    {
        uint32_t links = __ballot_sync(~0u, mine && recv_side.bytes != 0), link, bytes;
        const uint8_t *frame;
        if (links == 0) // this rank's place has no part in the slice
            return true;
        link = (uint32_t)__ffs((int)links) - 1;
        bytes = __shfl_sync(~0u, recv_side.bytes, link);
        frame = (const uint8_t *)__shfl_sync(
            ~0u, (unsigned long long)(uintptr_t)(recv_side.from + recv_side.frame_off), link);
        bool ok = relay_side.send(frame, bytes, ((const uint4 *)frame)->y >> 8 & 0xff, t);
        if (ok && mine && recv_side.bytes != 0)
            recv_side.write_credit();
        return ok;
    }
    __device__ __forceinline__ bool slice(uint32_t t)
    {
        for (uint32_t s = 0; s < n_stages; s++) {
            uint32_t bad = 0, bad_queue = 0;
            // L: this lane's frame is to be relayed. Its credit comes last: the frame is read in the ring.
            bool mine = crosses && s == stage;
            bool last = s + 1 == n_stages;
            if (!recv_side.take(t, wanted(t, s)))
                return false;
            recv_side.prefetch(wanted(last ? t + 1 : t, last ? 0 : s + 1));
            write(t, s, &bad, &bad_queue);
            // Relayed results must get their credit before this gatherer waits for space: docs/ALGORITHMS.md.
            if (!recv_side.give_credit(t, bad, bad_queue, mine) || !relay(t, mine))
                return false;
        }
        return true;
    }
    __device__ __forceinline__ void run(uint32_t &taken)
    {
        bool ok = true;
        for (uint32_t t = 0; ok && t < split.n_slices; t++) {
            ok = slice(t);
            if (ctx.lane == 0)
                sp_store_release_cta(&taken, t + 1);
        }
        recv_side.close(ok);
        if (ok)
            relay_side.close();
    }
};

#endif
