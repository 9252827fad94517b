// send_side.cuh - the sending end of a worker's links: it waits for space in the peers' rings and writes
// frames there; the notifier then writes the tails. contract/inbox.h says how rings, tails and credits work.
#ifndef SP_SEND_SIDE_CUH
#define SP_SEND_SIDE_CUH

#include "kernels/cuda/encode.cuh"
#include "kernels/cuda/wait.cuh"
#include "kernels/cuda/work_split.cuh"

static_assert(SP_GPU_STAGE_BYTES >= SP_PICI_STAGE_BYTES, "the staging buffer also serves pici");

enum sp_role { SP_ROLE_FEED, SP_ROLE_OWN, SP_ROLE_GATHER, SP_ROLES };

// The progress table of a worker, in shared memory: counters by which the worker's warps and the notifier
// tell each other how far they are.
struct sp_progress {
    uint32_t posted[32];     // by link: the low 32 bits of the position up to which frames have been written
    uint32_t done[SP_ROLES]; // 1: this role will post nothing more
    uint32_t fed;            // slices that the feeder has in shared memory (oneshot all-reduce only)
    uint32_t taken;          // slices whose frames the owner has taken; in an all-gather: the gatherer
    uint32_t gathered;       // slices whose results the gatherer has taken
    uint32_t pad[2];
    // [peer slot], bit t % 32: slice t of that peer's shard holds only zeros, as the feeder has cleared it.
    uint32_t cleared[SP_GPU_RANKS_MAX];
};

// Shared memory of a send side, beside the staging buffer.
struct sp_send_smem {
    uint8_t *dst[SP_GPU_RANKS_MAX]; // where the next frame to a peer goes
    uint8_t counts[SP_BLOCKS_MAX];  // of sp_encode_scan
};

// Where a frame goes: through `queue`, to the peers in n_slots slots from slot `first` on, as a frame of
// worker `worker` (0 or 1: which of the workers that the send side serves).
struct sp_route {
    uint32_t queue, worker, first, n_slots;
};

// REMOTE: for groups on several hosts. There, frames of queue RESULT go to the slots in remote.result_slots only.
//
// The links of one worker, or of two workers that send through the same queue only. With one worker, the
// lower half of the warp has the links of queue INPUT, the upper half those of RESULT. With two workers, the
// lower half has the links of the first worker, the upper half those of the second.
template <bool REMOTE> struct sp_send_side {
    const sp_warp_context &ctx;
    sp_send_smem &s;
    sp_progress *progress; // [n_workers]
    uint32_t n_workers;    // 1 or 2
    uint32_t only_queue;   // with two workers: their queue
    uint32_t ring_bytes;
    uint8_t *to;          // L: the ring in the peer's inbox
    uint32_t *posted;     // L: the link's entry of the worker's progress table
    uint64_t sent;        // L: position of the next frame
    uint32_t off;         // L: offset of that position in the ring
    uint32_t free_bytes;  // L: free bytes of the ring, as last seen
    bool paced;           // before a dense frame, keep_pace is called
    uint32_t n_frames;    // L: frames sent in format number `lane`
    uint32_t frame_units; // 16-byte units of all frames sent

    // Serves n workers, 1 or 2, from worker context.q on. With two workers, all frames go through `queue`.
    // Continues at the positions of the last launch.
    __device__ __forceinline__ sp_send_side(const sp_warp_context &context, sp_send_smem &shared,
                                            sp_progress *their_progress, uint32_t n = 1, uint32_t queue = 0)
        : ctx(context), s(shared), progress(their_progress), n_workers(n), only_queue(queue),
          ring_bytes(sp_inbox_ring_bytes(context.a.shape)), to(nullptr),
          posted(their_progress[link_worker()].posted + link_queue() * 16 + context.slot()), sent(0), off(0),
          free_bytes(0), paced(false), n_frames(0), frame_units(0)
    {
        if (ctx.slot() < ctx.n_peers) {
            sent = ctx.state(q())->sent[link_queue()][ctx.slot()];
            off = ctx.state(q())->sent_off[link_queue()][ctx.slot()];
            free_bytes = (uint32_t)(sp_load_acquire_sys(credit_word()) + ring_bytes - sent);
            to = ctx.a.inboxes[ctx.peer(ctx.slot())] +
                 sp_inbox_ring_off(ctx.a.shape, link_queue(), ctx.slot_there(ctx.slot()), q());
        }
    }
    // Of this lane's link: its queue, its worker (0 or 1), and that worker's number.
    __device__ __forceinline__ uint32_t link_queue() const // L
    {
        return n_workers == 2 ? only_queue : ctx.queue();
    }
    __device__ __forceinline__ uint32_t link_worker() const // L
    {
        return n_workers == 2 ? ctx.lane / 16 : 0;
    }
    __device__ __forceinline__ uint32_t q() const // L
    {
        return ctx.q + link_worker();
    }
    __device__ __forceinline__ bool is_on(const sp_route &r) const // L
    {
        if constexpr (REMOTE)
            if (r.queue == SP_INBOX_RESULT && (ctx.a.remote.result_slots >> ctx.slot() & 1) == 0)
                return false;
        return ctx.lane - (n_workers == 2 ? r.worker : r.queue) * 16 - r.first < r.n_slots;
    }
    // Peers on the route.
    __device__ __forceinline__ uint32_t n_on(const sp_route &r) const
    {
        if constexpr (REMOTE)
            if (r.queue == SP_INBOX_RESULT)
                return __popc(ctx.a.remote.result_slots);
        return r.n_slots;
    }
    // L: index in s.dst of this lane's peer, which is on the route.
    __device__ __forceinline__ uint32_t dst_index(const sp_route &r) const
    {
        if constexpr (REMOTE)
            if (r.queue == SP_INBOX_RESULT)
                return __popc(ctx.a.remote.result_slots & ((1u << ctx.slot()) - 1));
        return ctx.slot();
    }
    // Save the positions for the next launch. queues: a bit for each queue that this warp has sent through.
    __device__ __forceinline__ void close(uint32_t queues) const
    {
        if (ctx.slot() < ctx.n_peers && (queues >> link_queue() & 1)) {
            ctx.state(q())->sent[link_queue()][ctx.slot()] = sent;
            ctx.state(q())->sent_off[link_queue()][ctx.slot()] = off;
        }
        if (ctx.lane < SPCCL_N_FORMATS && n_frames != 0)
            atomicAdd((unsigned long long *)&ctx.state(ctx.q)->n_frames[ctx.lane], n_frames);
        if (ctx.lane == 0)
            atomicAdd((unsigned long long *)&ctx.state(ctx.q)->frame_bytes, (uint64_t)frame_units * 16);
    }
    __device__ __forceinline__ const uint64_t *credit_word() const // L
    {
        return ctx.word(sp_inbox_credit_off(ctx.a.shape, link_queue(), ctx.slot(), q()));
    }

    // Wait until a frame of so many bytes fits into each ring on the route; s.dst = where it goes.
    __device__ __forceinline__ bool wait_for_space(uint32_t bytes, const sp_route &r, uint32_t slice)
    {
        bool ok = true;
        if (is_on(r)) {
            uint32_t left = ring_bytes - off, skip = left < bytes ? left : 0;
            if (skip + bytes > free_bytes) {
                uint64_t credit = sp_wait(ctx.a, q(), credit_word(), sent + skip + bytes - ring_bytes,
                                          SP_GPU_NO_SPACE, r.queue, ctx.slot(), slice);
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
            s.dst[dst_index(r)] = to + off;
        }
        ok = __all_sync(~0u, ok);
        __syncwarp();
        return ok;
    }
    // The format of a slice that goes over NVLink: the smallest, but dense if that format saves less than a
    // sixteenth. (The codec may choose otherwise: a frame of format tile or coo must here fit into the
    // staging buffer.)
    template <class G>
    __device__ __forceinline__ uint32_t choose(uint32_t n, uint32_t nnz, bool full_block) const
    {
        uint32_t f = (uint32_t)ctx.a.format, tiles = (n + 4095) / 4096,
                 values = SP_FRAME_HEADER_BYTES + sp_up16(nnz * G::E);
        uint32_t pici = 16 + tiles * 512, best = pici, coo = sp_up16(nnz * 4),
                 tile = sp_up16((n + SP_TILE_ELEMS - 1) / SP_TILE_ELEMS) + sp_up16(nnz),
                 dense = SP_FRAME_HEADER_BYTES + n * G::E;
        if (nnz == 0)
            return SPCCL_FORMAT_EMPTY;
        if (ctx.a.format != SPCCL_FORMAT_AUTO && sp_allows(f, nnz, full_block, false) &&
            (f == SPCCL_FORMAT_PICI || f == SPCCL_FORMAT_DENSE ||
             sp_layout_cuda<G::E>(f, n, nnz).bytes <= SP_GPU_STAGE_BYTES))
            return f;
        f = SPCCL_FORMAT_PICI;
        if (coo < best) {
            f = SPCCL_FORMAT_COO;
            best = coo;
        }
        if (!full_block && tile < best) {
            f = SPCCL_FORMAT_TILE;
            best = tile;
        }
        if (best + values > SP_GPU_STAGE_BYTES && f != SPCCL_FORMAT_PICI) {
            f = SPCCL_FORMAT_PICI;
            best = pici;
        }
        return best + values > dense - dense / 16 ? (uint32_t)SPCCL_FORMAT_DENSE : f;
    }
    // Wait until this worker has taken the frames of all earlier slices. All ranks are about equally far. A
    // feeder that runs ahead with dense frames fills the rings; then all ranks wait for frames and for space
    // in turns. (Without this wait dense frames were a tenth slower.) The wait also ends when both the owner
    // and the gatherer have ended.
    __device__ __forceinline__ void keep_pace(const sp_progress &progress, uint32_t slice) const
    {
        while (sp_load_acquire_cta(&progress.taken) < slice &&
               (sp_load_acquire_cta(&progress.done[SP_ROLE_OWN]) == 0 ||
                sp_load_acquire_cta(&progress.done[SP_ROLE_GATHER]) == 0))
            __nanosleep(200);
        __syncwarp();
    }
    // Tell the gatherer whether slice `slice` of the shard of the peer in `slot` holds only zeros now.
    __device__ __forceinline__ void mark(sp_progress &progress, uint32_t slot, uint32_t slice,
                                         bool cleared) const
    {
        uint32_t bit = 1u << slice % 32, *word = progress.cleared + slot;
        if (ctx.lane == 0) // no other lane or warp writes this word
            sp_store_release_cta(word, cleared ? *word | bit : *word & ~bit);
    }
    // Call write(dst) for each peer on the route in turn; it writes the frame to that peer's ring.
    template <class WRITE> __device__ __forceinline__ void write_each(const sp_route &r, WRITE write) const
    {
#pragma unroll 1
        for (uint32_t k = 0; k < n_on(r); k++)
            write(s.dst[r.first + k]);
    }
    // Encode the slice buf [n] and write the frame to the peers on the route.
    //   stage  [SP_GPU_STAGE_BYTES] in shared memory, aligned to 16
    //   clear  nullptr; or where the slice came from, if the route has one slot. If the slice lists few
    //          elements, they become zero there. The progress table then says whether that was done.
    // Ends with __syncwarp: buf and stage may then be written again.
    template <class G>
    __device__ __forceinline__ bool send(const typename G::U *buf, uint32_t n, uint8_t *stage,
                                         const sp_route &r, uint32_t slice, typename G::U *clear = nullptr)
    {
        sp_scan<G> scan = sp_encode_scan<G, false>(ctx.lane, buf, nullptr, n, s.counts);
        uint32_t format = choose<G>(n, scan.nnz, scan.full_block);
        sp_layout layout = sp_layout_cuda<G::E>(format, n, scan.nnz);
        bool few =
            scan.nnz <= SP_PATCH_SENT(n) && format != SPCCL_FORMAT_DENSE && format != SPCCL_FORMAT_PICI;
        if (paced && format == SPCCL_FORMAT_DENSE)
            keep_pace(progress[r.worker], slice);
        if (!wait_for_space(layout.bytes, r, slice))
            return false;
        if (format == SPCCL_FORMAT_DENSE) {
            write_each(r, [&](uint8_t *dst) {
                sp_encode_dense<G>(ctx.lane, buf, ctx.a.tag, n, layout,
                                   [&](uint32_t i, uint4 v) { sp_store16(dst + i, v); });
            });
        } else if (format == SPCCL_FORMAT_PICI) {
            sp_encode_pici<G>(
                ctx.lane, buf, ctx.a.tag, n, scan.nnz, layout, (typename G::U *)stage,
                [&](uint32_t i, uint4 v) { write_each(r, [&](uint8_t *dst) { sp_store16(dst + i, v); }); });
        } else {
            sp_encode_listed<G>(ctx.lane, buf, scan, format, ctx.a.tag, n, layout, stage, s.counts,
                                few ? clear : nullptr);
            __syncwarp();
            write_each(r, [&](uint8_t *dst) {
#pragma unroll 1
                for (uint32_t i = ctx.lane * 16; i < layout.bytes; i += 512)
                    sp_store16(dst + i, *(const uint4 *)(stage + i));
            });
        }
        if (clear != nullptr)
            mark(progress[r.worker], r.first, slice, few);
        __syncwarp();
        if (is_on(r)) {
            sent += layout.bytes;
            off += layout.bytes;
            free_bytes -= layout.bytes;
            sp_store_release_cta(posted, (uint32_t)sent);
        }
        frame_units += layout.bytes / 16 * n_on(r);
        n_frames += ctx.lane == format ? n_on(r) : 0;
        return true;
    }
};

// ---- the notifier: the last warp of a CTA ----
//
// A fence between GPUs takes microseconds, so the workers do not wait for it. The notifier reads from the
// progress tables how far the workers have written. One fence then orders the writes of all workers of the
// CTA before the tails, which the notifier writes to the peers.

// By place slot: the low 32 bits of the position up to which relayed results have been written.
struct sp_relay_posts {
    uint32_t posted[SP_GPU_RANKS_MAX];
};

// Initialize the tables of relays of a CTA. All its threads call this; __syncthreads must follow.
__device__ __forceinline__ void sp_relay_posts_init(const sp_fused_args &a, sp_relay_posts *posts)
{
    if (a.shape.n_here < 2)
        return;
    for (uint32_t i = threadIdx.x; i < a.workers_per_cta * (a.shape.n_here - 1); i += blockDim.x) {
        uint32_t w = i / (a.shape.n_here - 1), slot = i % (a.shape.n_here - 1);
        const uint8_t *state =
            a.inboxes[a.rank] + sp_relayed_state_off(a.shape, blockIdx.x * a.workers_per_cta + w);
        posts[w].posted[slot] = (uint32_t)((const sp_relayed_state *)state)->sent[slot];
    }
}

// Initialize the progress tables of a CTA. All its threads call this; __syncthreads must follow.
__device__ __forceinline__ void sp_progress_init(const sp_fused_args &a, sp_progress *progress, bool owns,
                                                 bool gathers)
{
    uint32_t lane = threadIdx.x % 32, queue = lane / 16, slot = lane % 16;
    for (uint32_t w = threadIdx.x / 32; w < a.workers_per_cta; w += blockDim.x / 32) {
        const sp_inbox_state *state =
            (const sp_inbox_state *)(a.inboxes[a.rank] +
                                     sp_inbox_state_off(a.shape, blockIdx.x * a.workers_per_cta + w));
        progress[w].posted[lane] = slot < (uint32_t)a.world_size - 1 ? (uint32_t)state->sent[queue][slot] : 0;
        if (lane < SP_ROLES)
            progress[w].done[lane] = (lane == SP_ROLE_OWN && !owns) || (lane == SP_ROLE_GATHER && !gathers);
        if (lane < SP_GPU_RANKS_MAX)
            progress[w].cleared[lane] = 0;
        if (lane == 0)
            progress[w].fed = progress[w].taken = progress[w].gathered = 0;
    }
}

// A fence that takes longer than this shows a busy link.
#define SP_FENCE_LONG_NS 4000u

// The notifier's part for relayed results. Lane `place slot` serves that peer.
template <uint32_t WORKERS> struct sp_relay_notifier {
    uint64_t *tails;             // L: the peer's tail of the CTA's first worker; nullptr: no peer
    uint64_t announced[WORKERS]; // L: the position last written to the peer's tail
    uint32_t now[WORKERS];       // L: as last posted

    __device__ __forceinline__ explicit sp_relay_notifier(const sp_fused_args &a) : tails(nullptr)
    {
        uint32_t slot = threadIdx.x % 32, q0 = blockIdx.x * a.workers_per_cta, n = a.shape.n_here;
        const sp_fused_relays &relays = a.remote.relays;
        if (n >= 2 && slot < n - 1) {
            uint32_t peer = relays.ranks[relays.host * n + sp_inbox_peer(relays.place, slot, n)];
            tails = (uint64_t *)(a.inboxes[peer] + sp_relayed_tail_off(a.shape, n - 2 - slot, q0));
        }
#pragma unroll
        for (uint32_t w = 0; w < WORKERS; w++) {
            const uint8_t *state = a.inboxes[a.rank] + sp_relayed_state_off(a.shape, q0 + w);
            announced[w] =
                tails != nullptr && w < a.workers_per_cta ? ((const sp_relayed_state *)state)->sent[slot] : 0;
        }
    }
    // L: has a position changed?
    __device__ __forceinline__ bool look(const sp_relay_posts *posts, uint32_t n_workers)
    {
        bool changed = false;
#pragma unroll
        for (uint32_t w = 0; w < WORKERS; w++) {
            now[w] = (uint32_t)announced[w];
            if (tails != nullptr && w < n_workers)
                now[w] = sp_load_acquire_cta(&posts[w].posted[threadIdx.x % 32]);
            changed |= now[w] != (uint32_t)announced[w];
        }
        return changed;
    }
    // After look and a fence.
    __device__ __forceinline__ void announce()
    {
#pragma unroll
        for (uint32_t w = 0; w < WORKERS; w++)
            if (now[w] != (uint32_t)announced[w]) {
                announced[w] += now[w] - (uint32_t)announced[w];
                sp_store_relaxed_sys(tails + w, announced[w]);
            }
    }
};
struct sp_no_relay_notifier {
    __device__ __forceinline__ explicit sp_no_relay_notifier(const sp_fused_args &)
    {
    }
    __device__ __forceinline__ bool look(const sp_relay_posts *, uint32_t)
    {
        return false;
    }
    __device__ __forceinline__ void announce()
    {
    }
};

// WORKERS: the most workers of a CTA. RELAYS: sp_relay_notifier or sp_no_relay_notifier.
template <uint32_t WORKERS, class RELAYS> struct sp_notifier {
    const sp_fused_args &a;
    uint32_t lane;
    bool linked;
    uint64_t *tails;             // L: the peer's tail of the CTA's first worker
    uint64_t announced[WORKERS]; // L: the position last written to the peer's tail
    RELAYS relays;

    // Before any warp posts a position; __syncthreads must follow.
    __device__ __forceinline__ explicit sp_notifier(const sp_fused_args &args)
        : a(args), lane(threadIdx.x % 32), linked(lane % 16 < (uint32_t)args.world_size - 1), tails(nullptr),
          relays(args)
    {
        uint32_t n_peers = (uint32_t)a.world_size - 1, queue = lane / 16, slot = lane % 16;
        uint32_t q0 = blockIdx.x * a.workers_per_cta;
        if (linked)
            tails = (uint64_t *)(a.inboxes[sp_inbox_peer((uint32_t)a.rank, slot, (uint32_t)a.world_size)] +
                                 sp_inbox_tail_off(a.shape, queue, n_peers - 1 - slot, q0));
#pragma unroll
        for (uint32_t w = 0; w < WORKERS; w++) {
            const uint8_t *state = a.inboxes[a.rank] + sp_inbox_state_off(a.shape, q0 + w);
            announced[w] =
                linked && w < a.workers_per_cta ? ((const sp_inbox_state *)state)->sent[queue][slot] : 0;
        }
    }
    __device__ __forceinline__ bool all_done(const sp_progress *progress) const
    {
        bool done = true;
        for (uint32_t i = lane; i < a.workers_per_cta * SP_ROLES; i += 32)
            done &= sp_load_acquire_cta(&progress[i / SP_ROLES].done[i % SP_ROLES]) != 0;
        done = __all_sync(~0u, done);
        __syncwarp(); // orders all lanes' reads of `done` before the next reads of `posted`
        return done;
    }
    // Until all warps have posted their last position and the peers know it.
    __device__ __forceinline__ void run(const sp_progress *progress, const sp_relay_posts *posts)
    {
        uint32_t now[WORKERS];
        bool quiet = true; // no position changed in the last round
        for (;;) {
            bool last = quiet && all_done(progress), changed = relays.look(posts, a.workers_per_cta);
#pragma unroll
            for (uint32_t w = 0; w < WORKERS; w++) {
                now[w] = (uint32_t)announced[w];
                if (linked && w < a.workers_per_cta)
                    now[w] = sp_load_acquire_cta(&progress[w].posted[lane]);
                changed |= now[w] != (uint32_t)announced[w];
            }
            quiet = !__any_sync(~0u, changed);
            if (quiet) {
                if (last)
                    return;
                __nanosleep(50);
                continue;
            }
            uint64_t before = sp_clock_ns();
            sp_fence_sys();
            uint32_t took = (uint32_t)(sp_clock_ns() - before);
#pragma unroll
            for (uint32_t w = 0; w < WORKERS; w++)
                if (now[w] != (uint32_t)announced[w]) {
                    // Positions grow by less than 4 GiB at a time.
                    announced[w] += now[w] - (uint32_t)announced[w];
                    sp_store_relaxed_sys(tails + w, announced[w]);
                }
            relays.announce();
            // Wait, so that the next fence serves more frames.
            if (took > SP_FENCE_LONG_NS)
                __nanosleep(min(took, 8000u));
        }
    }
};

#endif
