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

// The sending end of a worker's rings of relayed results. Lane `place slot` has the ring in that peer's inbox.
struct sp_relay_side {
    const sp_warp_context &ctx;
    uint32_t *posted; // [SP_GPU_RANKS_MAX] of the worker's sp_relay_posts
    uint32_t ring_bytes;
    bool linked;         // L: this lane has a ring
    uint32_t peer;       // L: its rank
    uint8_t *to;         // L: the ring
    uint64_t sent;       // L: position of the next frame
    uint32_t off;        // L: offset of that position in the ring
    uint32_t free_bytes; // L: free bytes of the ring, as last seen
    uint32_t units;      // 16-byte units of all frames sent
    uint32_t n_frames;   // L: frames sent in format number `lane`

    // Continues at the positions of the last launch.
    __device__ __forceinline__ sp_relay_side(const sp_warp_context &context, sp_relay_posts &posts)
        : ctx(context), posted(posts.posted), ring_bytes(sp_inbox_ring_bytes(context.a.shape)),
          linked(context.a.shape.n_here >= 2 && context.lane < context.a.shape.n_here - 1), peer(0),
          to(nullptr), sent(0), off(0), free_bytes(0), units(0), n_frames(0)
    {
        const sp_fused_relays &relays = ctx.a.remote.relays;
        uint32_t n = ctx.a.shape.n_here;
        if (linked) {
            peer = relays.ranks[relays.host * n + sp_inbox_peer(relays.place, ctx.lane, n)];
            sent = state()->sent[ctx.lane];
            off = state()->sent_off[ctx.lane];
            free_bytes = (uint32_t)(sp_load_acquire_sys(credit_word()) + ring_bytes - sent);
            to = ctx.a.inboxes[peer] + sp_relayed_ring_off(ctx.a.shape, n - 2 - ctx.lane, ctx.q);
        }
    }
    __device__ __forceinline__ sp_relayed_state *state() const
    {
        return (sp_relayed_state *)(ctx.inbox() + sp_relayed_state_off(ctx.a.shape, ctx.q));
    }
    __device__ __forceinline__ const uint64_t *credit_word() const // L
    {
        return ctx.word(sp_relayed_credit_off(ctx.a.shape, ctx.lane, ctx.q));
    }
    // Save the positions for the next launch.
    __device__ __forceinline__ void close() const
    {
        if (linked) {
            state()->sent[ctx.lane] = sent;
            state()->sent_off[ctx.lane] = off;
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
                uint64_t credit = sp_wait(ctx.a, ctx.q, credit_word(), sent + skip + bytes - ring_bytes,
                                          SP_GPU_NO_SPACE, SP_INBOX_RELAYED,
                                          sp_inbox_slot(ctx.me(), peer, (uint32_t)ctx.a.world_size), slice);
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
        uint32_t n_peers = ctx.a.shape.n_here - 1;
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
            sp_store_release_cta(posted + ctx.lane, (uint32_t)sent);
        }
        units += bytes / 16 * n_peers;
        n_frames += ctx.lane == format ? n_peers : 0;
        return true;
    }
};

// The gatherer. Lane 16 + slot has the ring of results of that peer, lane `place slot` the ring of what it relays.
template <class G, bool REDUCES> struct sp_host_gatherer {
    typedef typename G::U U;
    static constexpr uint32_t NEVER = ~0u;
    const sp_warp_context &ctx;
    const sp_fused_relays &relays;
    sp_gather_smem &smem;
    sp_progress &progress;
    sp_work_split split;
    sp_recv_side<G, true, true> recv_side;
    sp_relay_side relay_side;
    uint32_t n_stages;
    uint32_t
        stage; // L: in which this lane's peer's own result is taken; NEVER: it does not send it to this rank
    sp_shard shard; // L: of this lane's peer
    bool patches;

    __device__ __forceinline__ sp_host_gatherer(const sp_warp_context &context, sp_gather_smem &shared,
                                                sp_progress &table, sp_relay_posts &posts)
        : ctx(context), relays(context.a.remote.relays), smem(shared), progress(table),
          split(context.a, context.q),
          recv_side(context, SP_INBOX_RESULT, shared.pool, SP_GATHER_POOL_BYTES, shared.barriers),
          relay_side(context, posts), n_stages(relays.n_hosts != 0 ? relays.n_hosts : 1),
          stage(NEVER), shard{0, 0}, patches(REDUCES && sp_patches(context.a))
    {
        if (!ctx.is_mine(SP_INBOX_RESULT))
            return;
        shard = split.shard(ctx.peer(ctx.slot()));
        if (relays.n_hosts == 0 || (ctx.a.remote.slots >> ctx.slot() & 1) == 0)
            stage = 0;
        for (uint32_t s = 1; s < relays.n_hosts; s++)
            if (owner(s, relays.place) == ctx.peer(ctx.slot()))
                stage = s - 1;
    }
    // The rank of a place on the s-th next host.
    __device__ __forceinline__ uint32_t owner(uint32_t s, uint32_t place) const
    {
        uint32_t host = relays.host + s < relays.n_hosts ? relays.host + s : relays.host + s - relays.n_hosts;
        return relays.ranks[host * ctx.a.shape.n_here + place];
    }
    // L: the owner of the relayed result that this lane takes in stage s > 0.
    __device__ __forceinline__ uint32_t relayed_owner(uint32_t s) const
    {
        return owner(s, sp_inbox_peer(relays.place, ctx.lane, ctx.a.shape.n_here));
    }
    // L: elements of the frame that this lane takes in stage s of slice t; 0: none.
    __device__ __forceinline__ uint32_t wanted(uint32_t t, uint32_t s) const
    {
        if (recv_side.is_relayed())
            return s == 0 ? 0 : split.elems(split.shard(relayed_owner(s)), t);
        return s == stage ? split.elems(shard, t) : 0;
    }
    // Write the frames that were taken in stage s. *bad = 1 + the slot of a frame that this lane found broken, or 0.
    __device__ __forceinline__ void write(uint32_t t, uint32_t s, uint32_t *bad, uint32_t *bad_queue)
    {
        for (uint32_t k = 0; k < ctx.n_peers; k++) {
            uint32_t slot = recv_side.slot_of(k), link = recv_side.link_of(slot, recv_side.n != 0), rank;
            if (__shfl_sync(~0u, recv_side.n, link) == 0)
                continue;
            rank = ctx.peer(slot);
            if (link < 16)
                rank = owner(s, sp_inbox_peer(relays.place, link, ctx.a.shape.n_here));
            sp_view v = recv_side.view(k);
            U *dst = (U *)ctx.a.out + rank * ctx.a.shard_stride + split.start(t);
            bool zeros = false;
            if (patches) {
                uint32_t owner_slot = sp_inbox_slot(ctx.me(), rank, (uint32_t)ctx.a.world_size);
                zeros = (sp_load_acquire_cta(progress.cleared + owner_slot) >> t % 32 & 1) != 0;
            }
            if (!sp_result_store<G>(ctx.lane, v, (U *)smem.buf, dst, zeros)) {
                *bad = slot + 1;
                *bad_queue = link < 16 ? SP_INBOX_RELAYED : SP_INBOX_RESULT;
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
            bool mine = relays.n_hosts != 0 && !recv_side.is_relayed() && s == stage &&
                        (ctx.a.remote.slots >> ctx.slot() & 1) != 0;
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
