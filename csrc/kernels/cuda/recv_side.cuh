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
#include "kernels/cuda/link.cuh"

// Report the frame in a slot of `queue`: its header is not that of a frame of n elements.
template <uint32_t E, bool REMOTE>
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
    sp_report<REMOTE>(a, q, wrong.rule == 7 && header[3].w == 0 ? SP_GPU_OTHER_LIMIT : SP_GPU_BAD_FRAME,
                      queue, slot, slice, wrong.wanted, wrong.seen, wrong.rule);
}

static_assert(SP_GPU_HOST_RANKS_MAX <= 16, "with REMOTE lane 31 has no link");

// Of a link in a group on several hosts: its number, its peer's slot, and where this rank writes credit.
struct sp_taken_link {
    uint32_t number, slot;
    uint64_t *credit;
};

// What a receive side has only in groups on several hosts. In groups on one host it has no members, so that the machine code
// of these kernels does not change with them.
template <bool REMOTE> struct sp_recv_links {
};
template <> struct sp_recv_links<true> {
    uint32_t n_entries_given;
    uint32_t first_k;   // number of the peer in rank order that has entry 0; the caller of open_link sets it
    bool linked;        // L: this lane has a link
    uint32_t entry;     // L
    sp_taken_link link; // L
};

// Bytes to copy of the first frame of a launch, or in a group on several hosts of the first that comes over a link.
#define SP_FIRST_BYTES 512u

// The frames of a slice that are taken together have entries in the pool. In groups on one host the entry of a frame is
// the slot of its sender.
//
// BULK: use bulk copies where the GPU has them. REMOTE: for groups on several hosts. The caller then gives the links to
// lanes (`open_link`), and an entry to each. At most one lane of an entry awaits a frame at a time.
template <class G, bool BULK, bool REMOTE> struct sp_recv_side {
    const sp_warp_context<REMOTE> &ctx;
    uint8_t *pool;      // in shared memory, aligned to 16
    uint64_t *barriers; // [2] in shared memory: one per half
    uint32_t phases;    // bit i: of barrier i
    uint32_t half;      // bytes of one half
    uint32_t area;      // bytes of a half for one entry
    uint32_t queue;     // INPUT or RESULT; with REMOTE L
    uint32_t ring_bytes;
    uint32_t parity;      // the half that holds this slice's frames
    uint32_t prefetched;  // 0, or 1 + the half into which the next slice's frames are being copied
    bool one_by_one;      // this slice has a long frame
    bool next_prefetched; // with one_by_one: the next frame is being copied
    const uint8_t *from;  // L: the ring in this rank's inbox
    uint64_t taken;       // L: position of the next frame to take
    // L: its offset in the ring; how many of its bytes to copy before its size is known: a little more than the frame
    // before had, as sizes of neighbours are alike.
    uint32_t taken_off, first_bytes;
    int32_t arrived_bytes; // L: bytes after position `taken` that have arrived, as last seen
    uint32_t n, bytes;     // L: elements and bytes of this slice's frame; bytes 0: none
    sp_recv_links<REMOTE> links;
    uint32_t frame_off; // L: offset of that frame in the ring
    // Continues at the positions of the last launch. pool_bytes: at least 192 for each entry. entries: with REMOTE.
    __device__ __forceinline__ sp_recv_side(const sp_warp_context<REMOTE> &context, uint32_t from_queue,
                                            uint8_t *shared, uint32_t pool_bytes, uint64_t *shared_barriers,
                                            uint32_t entries = 0)
        : ctx(context), pool(shared), barriers(shared_barriers), phases(0),
          half((pool_bytes - (REMOTE ? entries : context.n_peers) * SP_FRAME_HEADER_BYTES) / 2 & ~15u),
          area((REMOTE ? entries : context.n_peers) == 0
                   ? 0
                   : half / (REMOTE ? entries : context.n_peers) & ~15u),
          queue(from_queue), ring_bytes(sp_inbox_ring_bytes(context.a.shape)), parity(0), prefetched(0),
          one_by_one(false), next_prefetched(false), from(nullptr), taken(0), taken_off(0), first_bytes(0),
          arrived_bytes(0), n(0), bytes(0), frame_off(0)
    {
        if constexpr (REMOTE) {
            links.n_entries_given = entries;
            links.first_k = ~0u;
            links.linked = false;
            links.entry = 0;
            links.link = {0, 0, nullptr};
        } else {
            if (ctx.is_mine(queue)) {
                taken = ctx.state(ctx.q)->taken[queue][ctx.slot()];
                taken_off = ctx.state(ctx.q)->taken_off[queue][ctx.slot()];
                first_bytes = min(SP_FIRST_BYTES, area);
                from = ctx.inbox() + sp_inbox_ring_off(ctx.a.shape, queue, ctx.slot(), ctx.q);
            }
        }
#if SP_HAS_BULK
        if (BULK && ctx.lane < 2)
            sp_barrier_init(barriers + ctx.lane);
#endif
        __syncwarp();
    }
    __device__ __forceinline__ uint32_t n_entries() const
    {
        if constexpr (REMOTE)
            return links.n_entries_given;
        return ctx.n_peers;
    }
    // With REMOTE, L: from now on this lane has this link, and the frames that come over it have this entry.
    __device__ __forceinline__ void open_link(uint32_t which_queue, uint32_t index, uint32_t its_entry)
    {
        sp_remote_link its(ctx.a, which_queue, index);
        links.linked = true;
        queue = which_queue;
        links.entry = its_entry;
        links.link = {its.number, its.slot, its.credit(ctx.q)};
        taken = ctx.state(ctx.q)->taken[links.link.number];
        taken_off = ctx.state(ctx.q)->taken_off[links.link.number];
        from = ctx.inbox() + sp_area_ring_off(&ctx.a.remote.inbox, links.link.number, ctx.q);
        first_bytes = ctx.state(ctx.q)->first_bytes[links.link.number];
        first_bytes = min(first_bytes != 0 ? first_bytes : SP_FIRST_BYTES, area);
        arrived_bytes = 0;
    }
    // With REMOTE, L: save the positions.
    __device__ __forceinline__ void close_link() const
    {
        if (!links.linked)
            return;
        ctx.state(ctx.q)->taken[links.link.number] = taken;
        ctx.state(ctx.q)->taken_off[links.link.number] = taken_off;
        ctx.state(ctx.q)->first_bytes[links.link.number] = first_bytes;
    }
    // With REMOTE: entry i = the contribution of the i-th peer after peer number k in rank order, for all entries. The
    // frames of the links before must have been taken, and nothing is prefetched.
    __device__ __forceinline__ void select(uint32_t k)
    {
        if (k == links.first_k)
            return;
        close_link();
        links.first_k = k;
        links.linked = false;
        if (ctx.lane < n_entries() && k + ctx.lane < ctx.n_peers)
            open_link(SP_INBOX_INPUT, slot_of(k + ctx.lane), ctx.lane);
        __syncwarp();
    }
    __device__ __forceinline__ bool is_linked() const // L; without REMOTE false
    {
        if constexpr (REMOTE)
            return links.linked;
        return false;
    }
    // L: has this lane a ring?
    __device__ __forceinline__ bool has_ring() const
    {
        return (!REMOTE && ctx.is_mine(queue)) || is_linked();
    }
    // L: the slot of the peer at the other end, and the entry of its frames.
    __device__ __forceinline__ uint32_t ring_slot() const
    {
        if constexpr (REMOTE)
            return links.link.slot;
        return ctx.slot();
    }
    __device__ __forceinline__ uint32_t ring_entry() const
    {
        if constexpr (REMOTE)
            return links.entry;
        return ctx.slot();
    }
    // The lane that takes the frame of an entry.
    __device__ __forceinline__ uint32_t lane_of(uint32_t its_entry, bool takes) const
    {
        if constexpr (REMOTE) {
            uint32_t lanes = __ballot_sync(~0u, takes && links.linked && links.entry == its_entry);
            return lanes != 0 ? (uint32_t)__ffs((int)lanes) - 1 : 31; // lane 31 has no link
        }
        return queue * 16 + its_entry;
    }
    // Must be called last. ok: no error; the positions are saved for the next launch.
    __device__ __forceinline__ void close(bool ok)
    {
        if (prefetched != 0) // no copy may still be under way when the warp ends
            wait_copied(prefetched - 1, false);
        if constexpr (REMOTE) {
            if (ok)
                close_link();
        } else if (ok && ctx.is_mine(queue)) {
            ctx.state(ctx.q)->taken[queue][ctx.slot()] = taken;
            ctx.state(ctx.q)->taken_off[queue][ctx.slot()] = taken_off;
        }
    }
    __device__ __forceinline__ const uint64_t *tail_word() const // L
    {
        if constexpr (REMOTE)
            return ctx.word(sp_area_tail_off(&ctx.a.remote.inbox, links.link.number, ctx.q));
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
    __device__ __forceinline__ uint4 *header_of(uint32_t its_entry) const
    {
        return (uint4 *)(pool + its_entry * SP_FRAME_HEADER_BYTES);
    }
    __device__ __forceinline__ uint8_t *half_of(uint32_t i) const
    {
        return pool + n_entries() * SP_FRAME_HEADER_BYTES + i * half;
    }
    __device__ __forceinline__ uint8_t *start_of(uint32_t to, uint32_t its_entry) const
    {
        return half_of(to) + its_entry * area;
    }
    // Start copies of the first bytes of the next frames into half `to`, for all lanes with n_there (L) != 0.
    __device__ __forceinline__ void fetch(uint32_t to, uint32_t n_there)
    {
        uint32_t wanted = n_there != 0 ? min(first_bytes, ring_bytes - taken_off) : 0;
#if SP_HAS_BULK
        if (BULK) {
            if (wanted != 0) {
                sp_fence_bulk_global();
                sp_bulk_load(start_of(to, ring_entry()), from + taken_off, wanted, barriers + to);
            }
            __syncwarp();
            if (ctx.lane == 0)
                sp_barrier_arrive(barriers + to);
        } else
#endif
        {
            for (uint32_t e = 0; e < n_entries(); e++) {
                uint32_t owner = lane_of(e, wanted != 0), n_bytes = __shfl_sync(~0u, wanted, owner);
                const uint8_t *src = (const uint8_t *)__shfl_sync(
                    ~0u, (unsigned long long)(uintptr_t)(from + taken_off), owner);
#pragma unroll 1
                for (uint32_t i = ctx.lane * 16; i < n_bytes; i += 512)
                    sp_copy16_async(start_of(to, e) + i, src + i);
            }
            sp_copy_commit();
        }
    }
    // Start to copy the frame of an entry to the start of half `to`.
    __device__ __forceinline__ void copy_frame(uint32_t its_entry, uint32_t n_bytes, uint32_t to) const
    {
        uint32_t owner = lane_of(its_entry, n != 0);
        const uint8_t *whole =
            (const uint8_t *)__shfl_sync(~0u, (unsigned long long)(uintptr_t)(from + frame_off), owner);
#if SP_HAS_BULK
        if (BULK) {
            if (ctx.lane == owner) {
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
        const uint4 *header = (const uint4 *)start_of(parity, ring_entry());
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

    // For every lane with n_wanted (L) != 0: wait for its next frame, copy its first bytes into shared memory
    // and check its header. The frame must have n_wanted elements. False: a wait failed or a header is
    // broken; a report was written, or the abort flag is set.
    __device__ __forceinline__ bool take(uint32_t slice, uint32_t n_wanted)
    {
        bool ok = true;
        n = has_ring() ? n_wanted : 0;
        if (prefetched == 0) {
            if (n != 0 && !has_arrived()) {
                uint64_t tail = sp_wait<REMOTE>(ctx.a, ctx.q, tail_word(), taken + 1, SP_GPU_NO_DATA, queue,
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
            const uint4 *header = (const uint4 *)start_of(parity, ring_entry());
            uint32_t most = min(SP_INBOX_FRAME_BYTES, ring_bytes - taken_off);
            bytes = sp_open_plain<G::E>(header, most, ctx.a.tag, n);
            ok = bytes != 0;
            if (!ok)
                sp_report_header<G::E, REMOTE>(ctx.a, ctx.q, queue, ring_slot(), slice, header, most, n);
            frame_off = taken_off;
            one_by_one = bytes > first_bytes; // nothing past the end of the ring was fetched
            taken += bytes;
            arrived_bytes -= (int32_t)bytes;
            taken_off += bytes;
            first_bytes = min((bytes + 255) & ~127u, area);
        }
        for (uint32_t i = ctx.lane; i < n_entries() * 4; i += 32)
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
    __device__ __forceinline__ uint32_t entry_of(uint32_t k) const
    {
        if constexpr (REMOTE)
            return k - links.first_k;
        return slot_of(k);
    }
    __device__ __forceinline__ uint32_t k_end() const
    {
        if constexpr (REMOTE)
            return links.first_k + n_entries();
        return ctx.n_peers;
    }
    __device__ __forceinline__ uint32_t elems_of(uint32_t its_entry) const
    {
        return __shfl_sync(~0u, n, lane_of(its_entry, n != 0));
    }
    // The frame of the k-th peer in rank order, for all lanes. (With REMOTE: of entry k - first_k.) Must be called with k
    // in ascending order. n is 0 if no frame of this peer was awaited.
    __device__ __forceinline__ sp_view view(uint32_t k)
    {
        uint32_t at = entry_of(k);
        const uint4 *header = header_of(at);
        const uint8_t *smem = start_of(parity, at), *p = smem;
        uint4 a = header[0], b = header[1], c = header[2];
        sp_view v;
        v.n = elems_of(at);
        v.format = a.y >> 8 & 0xff;
        v.nnz = b.x;
        v.is_delta = 0;
        v.at = {c.x, c.z, header[3].x, b.z};
        if (one_by_one && v.n != 0) {
            bool fits = v.at.bytes <= half, alone = !fits && v.at.bytes <= 2 * half;
            uint32_t to = fits ? k & 1 : 0;
            __syncwarp(); // all lanes have read the frames before
            if (!next_prefetched && (fits || alone))
                copy_frame(at, v.at.bytes, to);
            next_prefetched = false;
            if (fits && k + 1 < k_end()) {
                uint32_t next = entry_of(k + 1);
                next_prefetched = elems_of(next) != 0 && header_of(next)[1].z <= half;
                if (next_prefetched)
                    copy_frame(next, header_of(next)[1].z, to ^ 1);
            }
            if (fits || alone)
                wait_copied(to, next_prefetched);
            smem = p = half_of(to);
            if (!fits && !alone)
                p = (const uint8_t *)__shfl_sync(~0u, (unsigned long long)(uintptr_t)(from + frame_off),
                                                 lane_of(at, n != 0));
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
        if constexpr (REMOTE)
            credit = links.link.credit;
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
                sp_report<REMOTE>(ctx.a, ctx.q, SP_GPU_BAD_FRAME, bad_queue, bad - 1, slice, 0, 0,
                                  SP_GPU_RULE_INDEX);
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
