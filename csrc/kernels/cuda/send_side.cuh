// send_side.cuh - the sending end of a worker's links: it waits for space in the peers' rings and writes
// frames there; the notifier (notifier.cuh) then writes the tails. contract/inbox.h says how rings, tails and credits work.
#ifndef SP_SEND_SIDE_CUH
#define SP_SEND_SIDE_CUH

#include "kernels/cuda/encode.cuh"
#include "kernels/cuda/link.cuh"
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
    uint32_t cleared[SP_GPU_HOST_RANKS_MAX];
};
// The same in groups on several hosts. [number of the link in the inbox]
struct sp_remote_progress {
    uint32_t posted[SP_REMOTE_LINKS_MAX];
    uint32_t told[SP_REMOTE_LINKS_MAX]; // of the notifier: the low 32 bits of the position that it announces
    uint32_t done[SP_ROLES], fed, taken, gathered;
    uint32_t cleared[SP_GPU_RANKS_MAX];
};
template <bool REMOTE> struct sp_progress_of {
    typedef sp_progress type;
};
template <> struct sp_progress_of<true> {
    typedef sp_remote_progress type;
};

// Shared memory of a send side, beside the staging buffer.
struct sp_send_smem {
    uint8_t *dst[SP_GPU_HOST_RANKS_MAX]; // where the next frame to a peer goes
    uint8_t counts[SP_BLOCKS_MAX];       // of sp_encode_scan
};

// Where a frame goes: through `queue`, to the peers in n_slots slots from slot `first` on, as a frame of
// worker `worker` (0 or 1: which of the workers that the send side serves).
struct sp_route {
    uint32_t queue, worker, first, n_slots;
};

// What a send side has only in groups on several hosts: see sp_recv_links.
template <bool REMOTE> struct sp_send_links {
};
template <> struct sp_send_links<true> {
    uint32_t first_link = 0;
};

// The links of one worker, or of two workers that send through the same queue only. With one worker, the
// lower half of the warp has the links of queue INPUT, the upper half those of RESULT. With two workers, the
// lower half has the links of the first worker, the upper half those of the second.
//
// REMOTE: for groups on several hosts. A route of queue RESULT then has all links of that queue. Lane j of a half has the
// link of index j, in queue INPUT of index first_link + j. A route of queue INPUT has all links, of at most 16, or one.
template <bool REMOTE> struct sp_send_side : sp_send_links<REMOTE> {
    typedef typename sp_progress_of<REMOTE>::type progress_table;
    const sp_warp_context<REMOTE> &ctx;
    sp_send_smem &s;
    progress_table *progress; // [n_workers]
    uint32_t n_workers;       // 1 or 2
    uint32_t only_queue;      // with two workers: their queue
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
    __device__ __forceinline__ sp_send_side(const sp_warp_context<REMOTE> &context, sp_send_smem &shared,
                                            progress_table *their_progress, uint32_t n = 1,
                                            uint32_t queue = 0)
        : ctx(context), s(shared), progress(their_progress), n_workers(n), only_queue(queue),
          ring_bytes(sp_inbox_ring_bytes(context.a.shape)), to(nullptr),
          posted(their_progress[link_worker()].posted + link_queue() * 16 + context.slot()), sent(0), off(0),
          free_bytes(0), paced(false), n_frames(0), frame_units(0)
    {
        if constexpr (REMOTE) {
            open_link();
        } else if (ctx.slot() < ctx.n_peers) {
            sent = ctx.state(q())->sent[link_queue()][ctx.slot()];
            off = ctx.state(q())->sent_off[link_queue()][ctx.slot()];
            free_bytes = (uint32_t)(sp_load_acquire_sys(credit_word()) + ring_bytes - sent);
            to = ctx.a.inboxes[ctx.peer(ctx.slot())] +
                 sp_inbox_ring_off(ctx.a.shape, link_queue(), ctx.slot_there(ctx.slot()), q());
        }
    }
    // With REMOTE, L: the index of this lane's link in its queue, and its number.
    __device__ __forceinline__ uint32_t link_index() const
    {
        return ctx.slot() + (link_queue() == SP_INBOX_INPUT ? this->first_link : 0);
    }
    __device__ __forceinline__ uint32_t link_number() const
    {
        return ctx.a.remote.inbox.first[link_queue()] + link_index();
    }
    // With REMOTE: continue at this lane's link; leave it for another one.
    __device__ __forceinline__ void open_link()
    {
        if (link_index() >= sp_n_links(ctx.a, link_queue()))
            return;
        sp_remote_link link(ctx.a, link_queue(), link_index());
        sent = ctx.state(q())->sent[link.number];
        off = ctx.state(q())->sent_off[link.number];
        free_bytes = (uint32_t)(sp_load_acquire_sys(credit_word()) + ring_bytes - sent);
        to = link.ring(q());
        posted = progress[link_worker()].posted + link.number;
    }
    __device__ __forceinline__ void close_link() const
    {
        if (link_index() >= sp_n_links(ctx.a, link_queue()))
            return;
        ctx.state(q())->sent[link_number()] = sent;
        ctx.state(q())->sent_off[link_number()] = off;
    }
    // With REMOTE: give the lanes the links of the route.
    __device__ __forceinline__ void select(const sp_route &r)
    {
        uint32_t first = r.first / 16 * 16;
        if (r.queue != SP_INBOX_INPUT || first == this->first_link)
            return;
        if (link_queue() == SP_INBOX_INPUT)
            close_link();
        this->first_link = first;
        if (link_queue() == SP_INBOX_INPUT)
            open_link();
        __syncwarp();
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
            return ctx.lane / 16 == (n_workers == 2 ? r.worker : r.queue) &&
                   link_index() < sp_n_links(ctx.a, r.queue) &&
                   (r.queue == SP_INBOX_RESULT || link_index() - r.first < r.n_slots);
        return ctx.lane - (n_workers == 2 ? r.worker : r.queue) * 16 - r.first < r.n_slots;
    }
    // Peers on the route.
    __device__ __forceinline__ uint32_t n_on(const sp_route &r) const
    {
        if constexpr (REMOTE)
            if (r.queue == SP_INBOX_RESULT)
                return sp_n_links(ctx.a, SP_INBOX_RESULT);
        return r.n_slots;
    }
    // The first index in s.dst of the peers on the route.
    __device__ __forceinline__ uint32_t first_dst(const sp_route &r) const
    {
        if constexpr (REMOTE)
            return r.first % 16;
        return r.first;
    }
    // Save the positions for the next launch. queues: a bit for each queue that this warp has sent through.
    __device__ __forceinline__ void close(uint32_t queues) const
    {
        if constexpr (REMOTE) {
            if (queues >> link_queue() & 1)
                close_link();
        } else if (ctx.slot() < ctx.n_peers && (queues >> link_queue() & 1)) {
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
        if constexpr (REMOTE)
            return ctx.word(sp_area_credit_off(&ctx.a.remote.inbox, link_number(), q()));
        return ctx.word(sp_inbox_credit_off(ctx.a.shape, link_queue(), ctx.slot(), q()));
    }

    __device__ __forceinline__ uint32_t peer_slot() const // L
    {
        if constexpr (REMOTE)
            return sp_remote_link(ctx.a, link_queue(), link_index()).slot;
        return ctx.slot();
    }

    // Wait until a frame of so many bytes fits into each ring on the route; s.dst = where it goes.
    __device__ __forceinline__ bool wait_for_space(uint32_t bytes, const sp_route &r, uint32_t slice)
    {
        bool ok = true;
        if constexpr (REMOTE)
            select(r);
        if (is_on(r)) {
            uint32_t left = ring_bytes - off, skip = left < bytes ? left : 0;
            if (skip + bytes > free_bytes) {
                uint64_t credit = sp_wait<REMOTE>(ctx.a, q(), credit_word(), sent + skip + bytes - ring_bytes,
                                                  SP_GPU_NO_SPACE, r.queue, peer_slot(), slice);
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
            s.dst[ctx.slot()] = to + off;
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
    __device__ __forceinline__ void keep_pace(const progress_table &progress, uint32_t slice) const
    {
        while (sp_load_acquire_cta(&progress.taken) < slice &&
               (sp_load_acquire_cta(&progress.done[SP_ROLE_OWN]) == 0 ||
                sp_load_acquire_cta(&progress.done[SP_ROLE_GATHER]) == 0))
            __nanosleep(200);
        __syncwarp();
    }
    // Tell the gatherer whether slice `slice` of the shard of the peer in `slot` holds only zeros now.
    __device__ __forceinline__ void mark(progress_table &progress, uint32_t slot, uint32_t slice,
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
            write(s.dst[first_dst(r) + k]);
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

#endif
