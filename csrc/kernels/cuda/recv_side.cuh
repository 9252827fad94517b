// recv_side.cuh - the receiving end of a worker's links: it waits for frames, checks their headers, brings
// them into shared memory and gives credit. contract/inbox.h says how rings, tails and credits work.
//
// The pool in shared memory holds the headers of a slice's frames and two halves for their contents:
// - Short frames: one half holds all frames of a slice. While they are decoded, the frames of the next slice,
//   if they have arrived, are copied into the other half.
// - Long frames: each half holds one frame. While it is decoded, the next frame of the same slice is copied.
// - Frames longer than a half use both halves; frames longer than the pool are read in the ring.
#ifndef SP_RECV_SIDE_CUH
#define SP_RECV_SIDE_CUH

#include "kernels/cuda/decode.cuh"
#include "kernels/cuda/wait.cuh"

// Report the frame in a slot of `queue`: its header is not that of a frame of n elements.
template <uint32_t E>
__device__ __noinline__ void sp_report_header(const sp_fused_args &a, uint32_t q, uint32_t queue,
                                              uint32_t slot, uint32_t slice, const uint4 *header,
                                              uint32_t most, uint32_t n)
{
    sp_view v;
    sp_wrong wrong;
    // The frame is well formed, but no collective sends it: it is a delta, or too long for its format.
    if (sp_open<E>(header, most, a.tag, n, &v, &wrong))
        wrong = v.is_delta != 0 ? sp_wrong{6, v.is_delta, 0} : sp_wrong{17, v.at.bytes, SP_GPU_STAGE_BYTES};
    // Rule 7 is about the field that holds max_ctas here.
    sp_report(a, q, wrong.rule == 7 && header[3].w == 0 ? SP_GPU_OTHER_LIMIT : SP_GPU_BAD_FRAME, queue, slot,
              slice, wrong.wanted, wrong.seen, wrong.rule);
}

// BULK: use bulk copies where the GPU has them. RELAYS: of a gatherer in a group on several hosts; queue is RESULT. Lane
// 16 + slot then has the ring of results, as always. Lane `place slot` has the ring of relayed results of that peer of
// this host, if there are relays. No slot has a frame in both rings at a time.
template <class G, bool BULK, bool RELAYS = false> struct sp_recv_side {
    const sp_warp_context &ctx;
    uint8_t *pool;      // in shared memory, aligned to 16
    uint64_t *barriers; // [2] in shared memory: one per half
    uint32_t phases;    // bit i: of barrier i
    uint32_t half;      // bytes of one half
    uint32_t area;      // bytes of a half for one peer's frame
    uint32_t queue;     // INPUT or RESULT
    uint32_t ring_bytes;
    uint32_t parity;      // the half that holds this slice's frames
    uint32_t prefetched;  // 0, or 1 + the half into which the next slice's frames are being copied
    bool one_by_one;      // this slice has a long frame
    bool next_prefetched; // with one_by_one: the next frame is being copied
    const uint8_t *from;  // L: the ring in this rank's inbox
    uint64_t taken;       // L: position of the next frame to take
    // L: its offset in the ring; bytes of the next frame to copy before its size is known.
    uint32_t taken_off, guess;
    int32_t arrived_bytes; // L: bytes after position `taken` that have arrived, as last seen
    uint32_t n, bytes;     // L: elements and bytes of this slice's frame; bytes 0: none
    uint32_t frame_off;    // L: offset of that frame in the ring
    uint32_t relay_slot;   // L: with RELAYS: peer slot of this lane's ring

    // Continues at the positions of the last launch. pool_bytes: at least 192 for each peer.
    __device__ __forceinline__ sp_recv_side(const sp_warp_context &context, uint32_t from_queue,
                                            uint8_t *shared, uint32_t pool_bytes, uint64_t *shared_barriers)
        : ctx(context), pool(shared), barriers(shared_barriers), phases(0),
          half((pool_bytes - context.n_peers * SP_FRAME_HEADER_BYTES) / 2 & ~15u),
          area(context.n_peers == 0 ? 0 : half / context.n_peers & ~15u), queue(from_queue),
          ring_bytes(sp_inbox_ring_bytes(context.a.shape)), parity(0), prefetched(0), one_by_one(false),
          next_prefetched(false), from(nullptr), taken(0), taken_off(0), guess(0), arrived_bytes(0), n(0),
          bytes(0), frame_off(0), relay_slot(context.slot())
    {
        if constexpr (RELAYS)
            if (is_relayed()) {
                const sp_relayed_state *state = relayed_state();
                relay_slot = sp_inbox_slot(ctx.me(), relayed_peer(), (uint32_t)ctx.a.world_size);
                taken = state->taken[ctx.lane];
                taken_off = state->taken_off[ctx.lane];
                guess = min(512u, area);
                from = ctx.inbox() + sp_relayed_ring_off(ctx.a.shape, ctx.lane, ctx.q);
            }
        if (ctx.is_mine(queue)) {
            taken = ctx.state(ctx.q)->taken[queue][ctx.slot()];
            taken_off = ctx.state(ctx.q)->taken_off[queue][ctx.slot()];
            guess = min(512u, area);
            from = ctx.inbox() + sp_inbox_ring_off(ctx.a.shape, queue, ctx.slot(), ctx.q);
        }
#if SP_HAS_BULK
        if (BULK && ctx.lane < 2)
            sp_barrier_init(barriers + ctx.lane);
#endif
        __syncwarp();
    }
    // L: has this lane a ring of relayed results?
    __device__ __forceinline__ bool is_relayed() const
    {
        return RELAYS && ctx.a.shape.n_here >= 2 && ctx.lane < ctx.a.shape.n_here - 1;
    }
    // L: the peer that relays them, and this rank's place slot, seen from there.
    __device__ __forceinline__ uint32_t relayed_peer() const
    {
        const sp_fused_relays &relays = ctx.a.remote.relays;
        uint32_t n = ctx.a.shape.n_here;
        return relays.ranks[relays.host * n + sp_inbox_peer(relays.place, ctx.lane, n)];
    }
    __device__ __forceinline__ uint32_t place_slot_there() const
    {
        return ctx.a.shape.n_here - 2 - ctx.lane;
    }
    __device__ __forceinline__ sp_relayed_state *relayed_state() const
    {
        return (sp_relayed_state *)(ctx.inbox() + sp_relayed_state_off(ctx.a.shape, ctx.q));
    }
    // L: has this lane a ring?
    __device__ __forceinline__ bool has_ring() const
    {
        return ctx.is_mine(queue) || is_relayed();
    }
    // L: peer slot of this lane's ring.
    __device__ __forceinline__ uint32_t ring_slot() const
    {
        if constexpr (RELAYS)
            return relay_slot;
        return ctx.slot();
    }
    // L: for reports.
    __device__ __forceinline__ uint32_t ring_queue() const
    {
        return is_relayed() ? (uint32_t)SP_INBOX_RELAYED : queue;
    }
    // The lane with the ring of this slot from which a frame is taken.
    __device__ __forceinline__ uint32_t link_of(uint32_t slot, bool takes) const
    {
        if constexpr (RELAYS) {
            uint32_t links = __ballot_sync(~0u, takes && ring_slot() == slot && has_ring());
            return links != 0 ? (uint32_t)__ffs((int)links) - 1 : queue * 16 + slot;
        }
        return queue * 16 + slot;
    }
    // Must be called last. ok: no error; the positions are saved for the next launch.
    __device__ __forceinline__ void close(bool ok)
    {
        if (prefetched != 0) // no copy may still be under way when the warp ends
            wait_copied(prefetched - 1, false);
        if constexpr (RELAYS)
            if (ok && is_relayed()) {
                relayed_state()->taken[ctx.lane] = taken;
                relayed_state()->taken_off[ctx.lane] = taken_off;
            }
        if (ok && ctx.is_mine(queue)) {
            ctx.state(ctx.q)->taken[queue][ctx.slot()] = taken;
            ctx.state(ctx.q)->taken_off[queue][ctx.slot()] = taken_off;
        }
    }
    __device__ __forceinline__ const uint64_t *tail_word() const // L
    {
        if constexpr (RELAYS)
            if (is_relayed())
                return ctx.word(sp_relayed_tail_off(ctx.a.shape, ctx.lane, ctx.q));
        return ctx.word(sp_inbox_tail_off(ctx.a.shape, queue, ctx.slot(), ctx.q));
    }
    // Has the next frame arrived, or the mark SP_INBOX_WRAP in its stead?
    __device__ __forceinline__ bool has_arrived() // L
    {
        if (ring_bytes - taken_off < SP_FRAME_HEADER_BYTES)
            wrap();
        return arrived_bytes > 0;
    }
    __device__ __forceinline__ void wrap() // L
    {
        taken += ring_bytes - taken_off;
        arrived_bytes -= (int32_t)(ring_bytes - taken_off);
        taken_off = 0;
    }
    __device__ __forceinline__ uint4 *header_of(uint32_t slot) const
    {
        return (uint4 *)(pool + slot * SP_FRAME_HEADER_BYTES);
    }
    __device__ __forceinline__ uint8_t *half_of(uint32_t i) const
    {
        return pool + ctx.n_peers * SP_FRAME_HEADER_BYTES + i * half;
    }
    __device__ __forceinline__ uint8_t *start_of(uint32_t to, uint32_t slot) const
    {
        return half_of(to) + slot * area;
    }
    // Start copies of the first bytes of the next frames into half `to`, for all peers with n_there (L) != 0.
    __device__ __forceinline__ void fetch(uint32_t to, uint32_t n_there)
    {
        uint32_t wanted = n_there != 0 ? min(guess, ring_bytes - taken_off) : 0;
#if SP_HAS_BULK
        if (BULK) {
            if (wanted != 0) {
                sp_fence_bulk_global();
                sp_bulk_load(start_of(to, ring_slot()), from + taken_off, wanted, barriers + to);
            }
            __syncwarp();
            if (ctx.lane == 0)
                sp_barrier_arrive(barriers + to);
        } else
#endif
        {
            for (uint32_t slot = 0; slot < ctx.n_peers; slot++) {
                uint32_t link = link_of(slot, wanted != 0), n_bytes = __shfl_sync(~0u, wanted, link);
                const uint8_t *src = (const uint8_t *)__shfl_sync(
                    ~0u, (unsigned long long)(uintptr_t)(from + taken_off), link);
#pragma unroll 1
                for (uint32_t i = ctx.lane * 16; i < n_bytes; i += 512)
                    sp_copy16_async(start_of(to, slot) + i, src + i);
            }
            sp_copy_commit();
        }
    }
    // Start to copy the frame of a slot to the start of half `to`.
    __device__ __forceinline__ void copy_frame(uint32_t slot, uint32_t n_bytes, uint32_t to) const
    {
        uint32_t link = link_of(slot, n != 0);
        const uint8_t *whole =
            (const uint8_t *)__shfl_sync(~0u, (unsigned long long)(uintptr_t)(from + frame_off), link);
#if SP_HAS_BULK
        if (BULK) {
            if (ctx.lane == link) {
                sp_bulk_load(half_of(to), whole, n_bytes, barriers + to);
                sp_barrier_arrive(barriers + to);
            }
        } else
#endif
        {
#pragma unroll 1
            for (uint32_t i = ctx.lane * 16; i < n_bytes; i += 512)
                sp_copy16_async(half_of(to) + i, whole + i);
            sp_copy_commit();
        }
    }
    // Wait until all copies into half `to` are done. another: a copy into the other half may still be under
    // way.
    __device__ __forceinline__ void wait_copied(uint32_t to, bool another)
    {
#if SP_HAS_BULK
        if (BULK) {
            sp_barrier_wait(barriers + to, phases >> to & 1);
            phases ^= 1u << to;
        } else
#endif
            if (another)
            sp_copy_wait<1>();
        else
            sp_copy_wait<0>();
        __syncwarp();
    }
    // Wait until the fetched bytes are there. Where they are a mark SP_INBOX_WRAP, fetch the frame at offset
    // 0.
    __device__ __forceinline__ void wait_starts()
    {
        const uint4 *header = (const uint4 *)start_of(parity, ring_slot());
        bool wraps;
        wait_copied(parity, false);
        wraps = n != 0 && header->x == SP_INBOX_WRAP;
        if (!__any_sync(~0u, wraps))
            return;
        if (wraps)
            wrap();
        fetch(parity, wraps ? n : 0);
        wait_copied(parity, false);
    }

    // For every peer with n_wanted (L) != 0: wait for its next frame, copy its first bytes into shared memory
    // and check its header. The frame must have n_wanted elements. False: a wait failed or a header is
    // broken; a report was written, or the abort flag is set.
    __device__ __forceinline__ bool take(uint32_t slice, uint32_t n_wanted)
    {
        bool ok = true;
        n = has_ring() ? n_wanted : 0;
        if (prefetched == 0) {
            if (n != 0 && !has_arrived()) {
                uint64_t tail = sp_wait(ctx.a, ctx.q, tail_word(), taken + 1, SP_GPU_NO_DATA, ring_queue(),
                                        ring_slot(), slice);
                ok = tail != 0;
                arrived_bytes = (int32_t)(tail - taken);
            }
            if (!__all_sync(~0u, ok))
                return false;
            __syncwarp();
            fetch(parity, n);
        }
        prefetched = 0;
        wait_starts();
        bytes = 0;
        one_by_one = false;
        if (n != 0) {
            const uint4 *header = (const uint4 *)start_of(parity, ring_slot());
            uint32_t most = min(SP_INBOX_FRAME_BYTES, ring_bytes - taken_off);
            bytes = sp_open_plain<G::E>(header, most, ctx.a.tag, n);
            ok = bytes != 0;
            if (!ok)
                sp_report_header<G::E>(ctx.a, ctx.q, ring_queue(), ring_slot(), slice, header, most, n);
            frame_off = taken_off;
            one_by_one = bytes > guess; // nothing past the end of the ring was fetched
            taken += bytes;
            arrived_bytes -= (int32_t)bytes;
            taken_off += bytes;
            guess = min((bytes + 255) & ~127u, area);
        }
        for (uint32_t i = ctx.lane; i < ctx.n_peers * 4; i += 32)
            header_of(i / 4)[i % 4] = ((const uint4 *)start_of(parity, i / 4))[i % 4];
        one_by_one = __any_sync(~0u, one_by_one);
        next_prefetched = false;
        __syncwarp();
        return __all_sync(~0u, ok);
    }
    // If the frames of the next slice, of n_wanted (L) elements, have all arrived, start to copy them.
    __device__ __forceinline__ void prefetch(uint32_t n_wanted)
    {
        bool ready = true;
        if (one_by_one) // both halves are needed
            return;
        if (has_ring() && n_wanted != 0 && !has_arrived()) {
            arrived_bytes = (int32_t)(sp_load_acquire_sys(tail_word()) - taken);
            ready = arrived_bytes > 0;
        }
        ready = __all_sync(~0u, ready);
        __syncwarp();
        if (!ready)
            return;
        prefetched = 1 + (parity ^ 1);
        fetch(parity ^ 1, has_ring() ? n_wanted : 0);
    }
    // Slot of the k-th peer in rank order, k < n_peers.
    __device__ __forceinline__ uint32_t slot_of(uint32_t k) const
    {
        return sp_inbox_slot(ctx.me(), k + (k >= ctx.me() ? 1 : 0), (uint32_t)ctx.a.world_size);
    }
    __device__ __forceinline__ uint32_t elems_of(uint32_t slot) const
    {
        return __shfl_sync(~0u, n, link_of(slot, n != 0));
    }
    // The frame of the k-th peer in rank order, for all lanes. Must be called with k in ascending order. n is
    // 0 if no frame of this peer was awaited.
    __device__ __forceinline__ sp_view view(uint32_t k)
    {
        uint32_t slot = slot_of(k);
        const uint4 *header = header_of(slot);
        const uint8_t *smem = start_of(parity, slot), *p = smem;
        uint4 a = header[0], b = header[1], c = header[2];
        sp_view v;
        v.n = elems_of(slot);
        v.format = a.y >> 8 & 0xff;
        v.nnz = b.x;
        v.is_delta = 0;
        v.at = {c.x, c.z, header[3].x, b.z};
        if (one_by_one && v.n != 0) {
            bool fits = v.at.bytes <= half, alone = !fits && v.at.bytes <= 2 * half;
            uint32_t to = fits ? k & 1 : 0;
            __syncwarp(); // all lanes have read the frames before
            if (!next_prefetched && (fits || alone))
                copy_frame(slot, v.at.bytes, to);
            next_prefetched = false;
            if (fits && k + 1 < ctx.n_peers) {
                uint32_t next = slot_of(k + 1);
                next_prefetched = elems_of(next) != 0 && header_of(next)[1].z <= half;
                if (next_prefetched)
                    copy_frame(next, header_of(next)[1].z, to ^ 1);
            }
            if (fits || alone)
                wait_copied(to, next_prefetched);
            smem = p = half_of(to);
            if (!fits && !alone)
                p = (const uint8_t *)__shfl_sync(~0u, (unsigned long long)(uintptr_t)(from + frame_off),
                                                 link_of(slot, n != 0));
        }
        v.p = p;
        v.values = p + v.at.values;
        v.smem = smem; // listed frames fit into two halves, as SP_GPU_STAGE_BYTES does
        return v;
    }
    // Tell the peer that its frame was taken.
    __device__ __forceinline__ void write_credit() const // L
    {
        uint64_t *credit;
        if (is_relayed())
            credit = (uint64_t *)(ctx.a.inboxes[relayed_peer()] +
                                  sp_relayed_credit_off(ctx.a.shape, place_slot_there(), ctx.q));
        else
            credit = (uint64_t *)(ctx.a.inboxes[ctx.peer(ctx.slot())] +
                                  sp_inbox_credit_off(ctx.a.shape, queue, ctx.slot_there(ctx.slot()), ctx.q));
        // The next frame starts here or later. No fence is needed: what was read has been used, so no
        // read is still under way.
        sp_store_relaxed_sys(credit, taken);
    }
    // Give credit for the frames of `take`. bad: 1 + the slot whose frame this lane found broken, or 0; bad_queue: its
    // queue. held (L): the caller calls write_credit later.
    __device__ __forceinline__ bool give_credit(uint32_t slice, uint32_t bad, uint32_t bad_queue,
                                                bool held = false)
    {
        if (__any_sync(~0u, bad != 0)) {
            if (bad != 0)
                sp_report(ctx.a, ctx.q, SP_GPU_BAD_FRAME, bad_queue, bad - 1, slice, 0, 0, SP_GPU_RULE_INDEX);
            return false;
        }
#if SP_HAS_BULK
        if (BULK)
            sp_fence_bulk(); // this lane's reads come before the next bulk copy into this half
#endif
        __syncwarp();
        if (bytes != 0 && !held)
            write_credit();
        parity ^= 1;
        return true;
    }
};

#endif
