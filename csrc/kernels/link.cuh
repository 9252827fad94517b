// link.cuh - one worker's links to the same worker of the other ranks: room in their rings, frames in its
// own, and the only waiting loop on the GPU. How rings, tails and credits work: core/inbox.h.
#ifndef SP_LINK_CUH
#define SP_LINK_CUH

#include "../core/gpu.h"
#include "encode.cuh"

#define SP_PEERS_MAX (SP_GPU_RANKS_MAX - 1)
// Bytes of all awaited frames that are copied into shared memory before their sizes are known.
#define SP_FETCH_BYTES 2816u
// Reported for a frame whose index section breaks one of the rules 20 to 27.
#define SP_RULE_INDEX 20u

// Shared memory of one worker.
struct __align__(16) sp_link_shared
{
    uint8_t buf[2][SP_GPU_SLICE_BYTES]; // slices; each warp has its own 2 KiB of both
    uint8_t frame[SP_INBOX_FRAME_BYTES];
    uint8_t fetch[SP_FETCH_BYTES]; // starts of awaited frames, and scratch of pici encoding
    sp_encode_shared encode;
    uint64_t sent[SP_INBOX_LANES][SP_PEERS_MAX], taken[SP_INBOX_LANES][SP_PEERS_MAX];
    uint64_t credit[SP_INBOX_LANES][SP_PEERS_MAX], reported[SP_INBOX_LANES][SP_PEERS_MAX];
    uint32_t sent_off[SP_INBOX_LANES][SP_PEERS_MAX], taken_off[SP_INBOX_LANES][SP_PEERS_MAX]; // in the ring
    uint32_t guess[SP_INBOX_LANES][SP_PEERS_MAX];  // bytes of the next frame to copy unseen
    sp_view view[SP_PEERS_MAX];                    // the frames that were taken
    uint8_t *dst[SP_PEERS_MAX];                    // where the next frame to a peer goes
    const uint8_t *src[SP_PEERS_MAX];              // where the awaited frame of a peer is
    uint64_t posted[SP_INBOX_LANES][SP_PEERS_MAX]; // how far has been sent, for the herald to tell the peers
    uint64_t done;                                 // 1: nothing more will be posted
    uint64_t frame_bytes, n_frames[SPCCL_N_FORMATS];
    uint64_t shard_stride, first, step;  // elements from shard to shard, to the first slice, to the next one
    uint32_t n_slices, n_whole, n_steps; // of this worker; n_whole: all shards have them whole
    uint32_t area;                       // bytes of `fetch` per peer
};
static_assert(sizeof(sp_link_shared) <= 55600, "three workers of a block must fit into the 163 KiB of sm_80");
static_assert(sizeof(sp_pici_scratch<sp_geometry<uint8_t, 4>>) <= SP_FETCH_BYTES,
              "pici encoding needs its scratch");

// What does not change in a launch stays in the arguments (constant memory) or in shared memory: registers
// are short.
struct sp_link {
    const sp_fused_args &a;
    sp_link_shared &s;
    sp_worker w;
    uint32_t parity; // of sp_encode_shared

    __device__ __forceinline__ uint32_t n_peers() const
    {
        return (uint32_t)a.world_size - 1;
    }
    __device__ __forceinline__ uint32_t me() const
    {
        return (uint32_t)a.rank;
    }
    __device__ __forceinline__ uint32_t q() const // number of this worker
    {
        return blockIdx.x * a.workers_per_cta + threadIdx.x / SP_GPU_WORKER_THREADS;
    }
    __device__ __forceinline__ uint32_t n_q() const
    {
        return a.n_ctas * a.workers_per_cta;
    }
    __device__ __forceinline__ uint32_t peer(uint32_t slot) const
    {
        return sp_inbox_peer((uint32_t)a.rank, slot, (uint32_t)a.world_size);
    }
    // The slot of this rank, as its peer in `slot` counts.
    __device__ __forceinline__ uint32_t slot_there(uint32_t slot) const
    {
        return (uint32_t)a.world_size - 2 - slot;
    }
    __device__ __forceinline__ uint8_t *arena() const
    {
        return a.arenas[a.rank];
    }
};

// Leave word of what went wrong, the first worker only, and end all waits of this rank.
__device__ __noinline__ void sp_report(const sp_fused_args &a, uint32_t q, sp_gpu_trouble trouble,
                                       uint32_t lane, uint32_t slot, uint32_t slice, uint64_t wanted,
                                       uint64_t seen, uint32_t detail)
{
    sp_gpu_report *r = &a.control->report;
    sp_inbox_state *first = (sp_inbox_state *)(a.arenas[a.rank] + sp_inbox_state_off(a.shape, 0));
    if (atomicCAS(&first->claimed, 0u, 1 + q) == 0) {
        r->claimed = 1 + q;
        r->worker = q;
        r->peer = sp_inbox_peer((uint32_t)a.rank, slot, (uint32_t)a.world_size);
        r->lane = lane;
        r->detail = detail;
        r->seq = a.seq;
        r->slice = slice;
        r->wanted = wanted;
        r->seen = seen;
        __threadfence_system();
        sp_store_relaxed_sys(&r->trouble, (uint32_t)trouble);
    }
    sp_store_relaxed_sys(&a.control->abort, 1);
}

// The host's word to abort is looked at this often while waiting: it lies behind PCIe, and a thousand workers
// that wait at once would queue up there for longer than the wait (measured: 300 us each on 4 GPUs).
#define SP_LOOK_AT_HOST_NS 2000000ull

// Until *word >= wanted (> 0): what it says. 0: aborted, or the deadline passed and a report was left. One
// thread.
__device__ __noinline__ uint64_t sp_wait(const sp_fused_args &a, uint32_t q, const uint64_t *word,
                                         uint64_t wanted, sp_gpu_trouble trouble, uint32_t lane,
                                         uint32_t slot, uint32_t slice)
{
    uint64_t start = 0, looked = 0, first = sp_load_acquire_sys(word);
    if (first >= wanted) // mostly it is there
        return first;
    for (uint32_t i = 1;; i++) {
        // Only the look that succeeds acquires: acquiring empties L1.
        uint64_t v = sp_load_relaxed_sys(word), now;
        if (v >= wanted)
            return sp_load_acquire_sys(word);
        if (i % 64 != 0)
            continue;
        now = sp_clock_ns();
        if (start == 0)
            start = looked = now;
        if (now - looked < SP_LOOK_AT_HOST_NS)
            continue;
        looked = now;
        if (sp_load_relaxed_sys(&a.control->abort) != 0)
            return 0;
        if (now - start > a.timeout_ns) {
            sp_report(a, q, trouble, lane, slot, slice, wanted, v, 0);
            return 0;
        }
    }
}

// Positions from the last launch.
__device__ __forceinline__ void sp_link_open(sp_link &l)
{
    const sp_inbox_state *state = (const sp_inbox_state *)(l.arena() + sp_inbox_state_off(l.a.shape, l.q()));
    for (uint32_t i = l.w.tid; i < SP_INBOX_LANES * l.n_peers(); i += SP_GPU_WORKER_THREADS) {
        uint32_t lane = i / l.n_peers(), slot = i % l.n_peers();
        uint64_t sent = state->sent[lane][slot], taken = state->taken[lane][slot];
        l.s.sent[lane][slot] = sent;
        l.s.taken[lane][slot] = l.s.reported[lane][slot] = taken;
        l.s.credit[lane][slot] = 0; // looked up when it is needed
        l.s.posted[lane][slot] = sent;
        l.s.sent_off[lane][slot] = (uint32_t)(sent % SP_INBOX_RING_BYTES);
        l.s.taken_off[lane][slot] = (uint32_t)(taken % SP_INBOX_RING_BYTES);
        l.s.guess[lane][slot] = min(512u, l.s.area);
    }
    if (l.w.tid < SPCCL_N_FORMATS)
        l.s.n_frames[l.w.tid] = 0;
    if (l.w.tid == 0)
        l.s.frame_bytes = l.s.done = 0;
    __syncthreads(); // with the herald
}

// Tell a peer how far its frames have been taken.
__device__ __forceinline__ void sp_link_credit(const sp_link &l, uint32_t lane, uint32_t slot)
{
    // No fence: what was read there has been used before the barrier, so no read is still under way.
    uint8_t *to = l.a.arenas[l.peer(slot)] + sp_inbox_credit_off(l.a.shape, lane, l.slot_there(slot), l.q());
    sp_store_relaxed_sys((uint64_t *)to, l.s.taken[lane][slot]);
    l.s.reported[lane][slot] = l.s.taken[lane][slot];
}

// Positions for the next launch, and the last credits. After a barrier.
__device__ __forceinline__ void sp_link_close(const sp_link &l)
{
    sp_inbox_state *state = (sp_inbox_state *)(l.arena() + sp_inbox_state_off(l.a.shape, l.q()));
    for (uint32_t i = l.w.tid; i < SP_INBOX_LANES * l.n_peers(); i += SP_GPU_WORKER_THREADS) {
        uint32_t lane = i / l.n_peers(), slot = i % l.n_peers();
        if (l.s.reported[lane][slot] != l.s.taken[lane][slot])
            sp_link_credit(l, lane, slot);
        state->sent[lane][slot] = l.s.sent[lane][slot];
        state->taken[lane][slot] = l.s.taken[lane][slot];
    }
    if (l.w.tid < SPCCL_N_FORMATS)
        state->n_frames[l.w.tid] += l.s.n_frames[l.w.tid];
    if (l.w.tid == 0)
        state->frame_bytes += l.s.frame_bytes;
}

// Nothing more will be posted. After a barrier; one thread.
__device__ __forceinline__ void sp_link_done(const sp_link &l)
{
    sp_store_release_cta(&l.s.done, 1);
}

// The herald: the last warp of a block. A fence between GPUs takes microseconds, so it is not the workers
// that wait for it: the herald looks at what they have posted, waits once for all of them until what they
// wrote before is there, then tells the peers. WORKERS: at most so many in the block.
template <uint32_t WORKERS>
__device__ __forceinline__ void sp_herald(const sp_fused_args &a, sp_link_shared *workers)
{
    static_assert(SP_INBOX_LANES * SP_PEERS_MAX <= 32, "a lane for each post of a worker");
    uint32_t lane = threadIdx.x % 32, n_peers = (uint32_t)a.world_size - 1;
    uint32_t ring = n_peers != 0 ? lane / n_peers : SP_INBOX_LANES, slot = n_peers != 0 ? lane % n_peers : 0;
    uint64_t told[WORKERS], now[WORKERS];
    __syncthreads(); // the workers have filled in where they begin
    for (bool first = true;; first = false) {
        bool all_done = true, news = false;
        for (uint32_t w = 0; w < a.workers_per_cta;
             w++) // before the posts: what was posted last is then seen
            all_done &= sp_load_acquire_cta(&workers[w].done) != 0;
#pragma unroll
        for (uint32_t w = 0; w < WORKERS; w++) {
            if (w >= a.workers_per_cta || ring >= SP_INBOX_LANES)
                continue;
            now[w] = sp_load_acquire_cta(&workers[w].posted[ring][slot]);
            if (first)
                told[w] = 0; // telling a peer again what it knows does no harm
            news |= now[w] != told[w];
        }
        if (!__any_sync(~0u, news)) {
            if (all_done && !first)
                return;
            __nanosleep(100);
            continue;
        }
        sp_fence_sys();
#pragma unroll
        for (uint32_t w = 0; w < WORKERS; w++) {
            if (w >= a.workers_per_cta || ring >= SP_INBOX_LANES || now[w] == told[w])
                continue;
            uint8_t *arena = a.arenas[sp_inbox_peer((uint32_t)a.rank, slot, (uint32_t)a.world_size)];
            size_t off =
                sp_inbox_tail_off(a.shape, ring, n_peers - 1 - slot, blockIdx.x * a.workers_per_cta + w);
            sp_store_relaxed_sys((uint64_t *)(arena + off), now[w]);
            told[w] = now[w];
        }
    }
}

// ---- sending ----

// Where the next frame to the peer in `slot` goes; waits until any frame fits. One thread per slot.
__device__ __forceinline__ bool sp_link_room(const sp_link &l, uint32_t lane, uint32_t slot, uint32_t slice)
{
    uint32_t off = l.s.sent_off[lane][slot];
    uint64_t at = l.s.sent[lane][slot];
    if (SP_INBOX_RING_BYTES - off < SP_INBOX_FRAME_BYTES) {
        at += SP_INBOX_RING_BYTES - off;
        off = 0;
        l.s.sent[lane][slot] = at;
        l.s.sent_off[lane][slot] = 0;
    }
    if (at + SP_INBOX_FRAME_BYTES > l.s.credit[lane][slot] + SP_INBOX_RING_BYTES) {
        const uint64_t *credit =
            (const uint64_t *)(l.arena() + sp_inbox_credit_off(l.a.shape, lane, slot, l.q()));
        uint64_t seen = sp_wait(l.a, l.q(), credit, at + SP_INBOX_FRAME_BYTES - SP_INBOX_RING_BYTES,
                                SP_GPU_NO_ROOM, lane, slot, slice);
        if (seen == 0)
            return false;
        l.s.credit[lane][slot] = seen;
    }
    l.s.dst[slot] =
        l.a.arenas[l.peer(slot)] + sp_inbox_ring_off(l.a.shape, lane, l.slot_there(slot), l.q()) + off;
    return true;
}

// Have the peers in n slots told of the frames written so far. After a barrier; threads of the last warp.
__device__ __forceinline__ void sp_link_publish(const sp_link &l, uint32_t lane, uint32_t n_slots)
{
    if (l.w.warp == SP_WORKER_WARPS - 1 && l.w.lane < n_slots)
        sp_store_release_cta(&l.s.posted[lane][l.w.lane], l.s.sent[lane][l.w.lane]);
    __syncwarp();
}

// The format of a slice on NVLink: the smallest, but dense where the others save less than a sixteenth.
template <class G>
__device__ __forceinline__ uint32_t sp_link_format(const sp_link &l, uint32_t n, const sp_counts &c)
{
    uint32_t f = (uint32_t)l.a.format, dense;
    if (c.nnz == 0)
        return SPCCL_FORMAT_EMPTY;
    if (l.a.format != SPCCL_FORMAT_AUTO && sp_allows(f, c.nnz, c.full_block, false))
        return f;
    f = sp_choose_smallest<G::E>(n, c.nnz, c.full_block, false);
    dense = SP_FRAME_HEADER_BYTES + n * G::E;
    return sp_layout_cuda<G::E>(f, n, c.nnz).bytes > dense - dense / 16 ? (uint32_t)SPCCL_FORMAT_DENSE : f;
}

// Encode the slice in the warps' runs and write it to the peers in slots [first, first + n_slots). Whole
// worker; ends with a barrier. sp_link_publish must follow.
template <class G>
__device__ __forceinline__ bool sp_link_send(sp_link &l, const typename G::U *run, uint32_t n, uint32_t lane,
                                             uint32_t first, uint32_t n_slots, uint32_t slice)
{
    sp_scan<G> scan = sp_encode_scan<G, false>(l.w, run, nullptr);
    bool ok = true;
    sp_encode_tell<G>(l.w, scan, &l.s.encode, l.parity);
    if (l.w.warp == SP_WORKER_WARPS - 1 && l.w.lane < n_slots)
        ok = sp_link_room(l, lane, first + l.w.lane, slice);
    __syncwarp();
    if (!sp_bar_and(l.w.bar, ok))
        return false;
    sp_counts c = sp_encode_sum(l.w, &l.s.encode, l.parity);
    uint32_t format = sp_link_format<G>(l, n, c);
    sp_layout at = sp_layout_cuda<G::E>(format, n, c.nnz);
    l.parity ^= 1;
    if (format == SPCCL_FORMAT_DENSE) {
        if (l.w.tid < 4) {
            uint4 h = sp_header_unit(l.w.tid, format, l.a.dtype, false, n, c.nnz, at);
            for (uint32_t k = 0; k < n_slots; k++)
                sp_store16(l.s.dst[first + k] + l.w.tid * 16, h);
        }
#pragma unroll
        for (uint32_t r = 0; r < G::ROWS; r++) {
            uint32_t off = SP_FRAME_HEADER_BYTES + l.w.warp * G::WARP_BYTES + (r * 32 + l.w.lane) * 16;
            uint4 v = ((const uint4 *)run)[sp_unit_at(r * 32 + l.w.lane)];
            if (off < at.bytes)
                for (uint32_t k = 0; k < n_slots; k++)
                    sp_store16(l.s.dst[first + k] + off, v);
        }
    } else {
        sp_encode_body<G>(l.w, run, scan, c, format, l.a.dtype, false, n, at, l.s.frame,
                          (sp_pici_scratch<G> *)l.s.fetch);
        sp_bar_sync(l.w.bar);
        for (uint32_t i = l.w.tid; i < at.bytes / 16; i += SP_GPU_WORKER_THREADS) {
            uint4 v = ((const uint4 *)l.s.frame)[i];
            for (uint32_t k = 0; k < n_slots; k++)
                sp_store16(l.s.dst[first + k] + i * 16, v);
        }
    }
    sp_bar_sync(l.w.bar);
    if (l.w.warp == SP_WORKER_WARPS - 1 && l.w.lane < n_slots) {
        l.s.sent[lane][first + l.w.lane] += at.bytes;
        l.s.sent_off[lane][first + l.w.lane] += at.bytes;
    }
    if (l.w.tid == 0) {
        l.s.frame_bytes += (uint64_t)at.bytes * n_slots;
        l.s.n_frames[format] += n_slots;
    }
    __syncwarp();
    return true;
}

// ---- receiving ----

// Wait for the next frame of every peer for which elems(slot) is not 0, copy their starts on chip and check
// their headers: a frame must have elems(slot) elements. Whole worker. False: the wait ended without, or a
// header is broken, and a report was left.
template <class G, class ELEMS>
__device__ __forceinline__ bool sp_link_take(const sp_link &l, uint32_t lane, uint32_t slice, ELEMS elems)
{
    bool ok = true;
    if (l.w.warp == 0 && l.w.lane < l.n_peers() && elems(l.w.lane) != 0) {
        uint32_t slot = l.w.lane, off = l.s.taken_off[lane][slot];
        uint64_t at = l.s.taken[lane][slot];
        if (SP_INBOX_RING_BYTES - off < SP_INBOX_FRAME_BYTES) {
            at += SP_INBOX_RING_BYTES - off;
            off = 0;
            l.s.taken[lane][slot] = at;
            l.s.taken_off[lane][slot] = 0;
        }
        l.s.src[slot] = l.arena() + sp_inbox_ring_off(l.a.shape, lane, slot, l.q()) + off;
        ok = sp_wait(l.a, l.q(),
                     (const uint64_t *)(l.arena() + sp_inbox_tail_off(l.a.shape, lane, slot, l.q())), at + 1,
                     SP_GPU_NO_DATA, lane, slot, slice) != 0;
    }
    __syncwarp();
    if (!sp_bar_and(l.w.bar, ok))
        return false;
    for (uint32_t slot = l.w.warp; slot < l.n_peers(); slot += SP_WORKER_WARPS) {
        uint32_t n = elems(slot), guess = l.s.guess[lane][slot];
        const uint8_t *src = l.s.src[slot];
        uint8_t *start = l.s.fetch + slot * l.s.area;
        uint4 unit = make_uint4(0, 0, 0, 0);
        sp_view v;
        sp_wrong wrong;
        if (n == 0)
            continue;
        if (l.w.lane < guess / 16)
            unit = sp_load16_l2(src + l.w.lane * 16);
        for (uint32_t i = l.w.lane + 32; i < guess / 16; i += 32)
            ((uint4 *)start)[i] = sp_load16_l2(src + i * 16);
        if (l.w.lane < guess / 16)
            ((uint4 *)start)[l.w.lane] = unit;
        ok &= sp_open<G::E>(unit, SP_INBOX_FRAME_BYTES, l.a.dtype, n, &v, &wrong) && v.is_delta == 0;
        if (l.w.lane == 0) {
            if (!ok)
                sp_report(l.a, l.q(), SP_GPU_BAD_FRAME, lane, slot, slice, wrong.wanted, wrong.seen,
                          wrong.rule);
            v.p = v.at.bytes <= guess ? start : src;
            l.s.view[slot] = v;
        }
    }
    __syncwarp();
    return sp_bar_and(l.w.bar, ok);
}

// Done with the frames of sp_link_take. Whole worker; bad: 1 + the slot whose frame this thread found broken,
// or 0.
template <class ELEMS>
__device__ __forceinline__ bool sp_link_taken(const sp_link &l, uint32_t lane, uint32_t slice, uint32_t bad,
                                              ELEMS elems)
{
    if (!sp_bar_and(l.w.bar, bad == 0)) {
        if (bad != 0)
            sp_report(l.a, l.q(), SP_GPU_BAD_FRAME, lane, bad - 1, slice, 0, 0, SP_RULE_INDEX);
        return false;
    }
    if (l.w.warp == 0 && l.w.lane < l.n_peers() && elems(l.w.lane) != 0) {
        uint32_t slot = l.w.lane, bytes = l.s.view[slot].at.bytes;
        l.s.taken[lane][slot] += bytes;
        l.s.taken_off[lane][slot] += bytes;
        l.s.guess[lane][slot] = min((bytes + 255) & ~127u, l.s.area);
        if (l.s.taken[lane][slot] - l.s.reported[lane][slot] >= SP_INBOX_CREDIT_BYTES)
            sp_link_credit(l, lane, slot);
    }
    __syncwarp();
    return true;
}

#endif
