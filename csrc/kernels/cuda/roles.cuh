// roles.cuh - the roles of a worker's warps that do no arithmetic: feeder, relay, gatherer. reduce.cuh has
// the owner and the kernels of reductions.
//
// A worker has one warp per role (one feeder may serve two workers). The roles share only the worker's
// progress table. Memory is thus read, links are used and results are written at the same time, each at its
// own speed. A role waits for frames and for space in rings. Beside that:
// - a feeder with dense frames does not run ahead of its own worker (keep_pace);
// - a feeder that patches stays less than 32 slices ahead of its gatherer (sp_follow);
// - an owner in a oneshot all-reduce does not overtake its feeder (is_fed).
// The roles:
// - feeder: loads this rank's slices, one or more ahead, and sends them. Contributions go to the owners of
//   their shards through queue INPUT; its own shard goes to all peers through queue RESULT. It may clear what
//   it has sent (sp_patches).
// - owner, in reductions: takes the contributions to its shard, adds them and writes the result. In an
//   all-reduce it also sends the result to all peers through queue RESULT.
// - gatherer: takes the results of the other shards and writes them: a whole slice, or only what a result
//   lists.
// - relay: in a broadcast the feeder of every rank but the root. It takes the root's slices of its own shard,
//   writes them and sends them on through queue RESULT.
#ifndef SP_ROLES_CUH
#define SP_ROLES_CUH

#include "kernels/cuda/recv_side.cuh"
#include "kernels/cuda/send_side.cuh"
#include "kernels/cuda/work_split.cuh"

// ---- shared memory by role ----

#define SP_FEED_BYTES (2 * SP_INBOX_SLICE_BYTES) // bytes of the buffers for slices that are loaded and sent
#define SP_OWN_POOL_BYTES 5376u
#define SP_GATHER_POOL_BYTES 5024u

// The pool of a receive side holds a header per entry, and in its two halves the longest listed frame.
#define SP_POOL_BYTES_MIN ((SP_GPU_HOST_RANKS_MAX - 1) * SP_FRAME_HEADER_BYTES + SP_GPU_STAGE_BYTES + 32)
static_assert(SP_GATHER_POOL_BYTES >= SP_POOL_BYTES_MIN && SP_INBOX_SLICE_BYTES >= SP_POOL_BYTES_MIN,
              "listed frames fit into the pool");
static_assert((SP_OWN_POOL_BYTES - (SP_GPU_HOST_RANKS_MAX - 1) * SP_FRAME_HEADER_BYTES) / 2 >=
                  SP_GPU_STAGE_BYTES,
              "half of an owner's pool serves as its staging buffer");

struct __align__(16) sp_feed_smem
{
    uint8_t buf[SP_FEED_BYTES];
    uint8_t stage[SP_GPU_STAGE_BYTES];
    sp_send_smem send_side;
    uint64_t barriers[4]; // one per buffer
    sp_range ranges[4];   // the slice in each buffer
};
struct __align__(16) sp_own_smem
{
    uint8_t sums[SP_INBOX_SLICE_BYTES];
    uint8_t pool[SP_OWN_POOL_BYTES];
    sp_send_smem send_side;
};
struct __align__(16) sp_gather_smem
{
    uint8_t buf[SP_INBOX_SLICE_BYTES];
    uint8_t pool[SP_GATHER_POOL_BYTES];
    uint64_t barriers[2]; // of the receive side
};

// In groups on several hosts: how many contributions an owner takes at a time. All of them if the pool has an entry for
// each; otherwise 8, so that each has more space in the pool.
__device__ __forceinline__ uint32_t sp_batch_links(uint32_t n_peers)
{
    return n_peers < SP_GPU_HOST_RANKS_MAX ? n_peers : 8;
}

// This warp will post no more positions.
template <class PROGRESS> __device__ __forceinline__ void sp_role_done(PROGRESS &progress, sp_role role)
{
    sp_slice_stored(threadIdx.x % 32);
    if (threadIdx.x % 32 == 0)
        sp_store_release_cta(&progress.done[role], 1);
}

// ---- feed ----

// What a feeder sends, and in which order. For each slice number t and each worker that it serves: first the
// contributions to the other shards, from the next rank's shard on; then, in an all-gather and at the root of
// a broadcast, the slice of its own shard.
struct sp_feed_list {
    const sp_fused_args &a;
    uint32_t n_served; // workers
    uint32_t n_inputs; // contributions per t and worker
    uint32_t n_each;   // items per t and worker: contributions, and the own slice if it is sent

    __device__ __forceinline__ sp_feed_list(const sp_fused_args &args, uint32_t served)
        : a(args), n_served(served)
    {
        uint32_t n_peers = (uint32_t)a.world_size - 1;
        n_inputs = n_peers == 0 || !sp_sends_inputs(a) ? 0 : sp_one_input(a) ? 1 : n_peers;
        n_each = n_inputs + (a.op == SP_FUSED_ALL_GATHER || a.op == SP_FUSED_BROADCAST ? 1 : 0);
    }
    struct item {
        uint32_t t, worker, k; // k < n_inputs: contribution k; else the slice of the own shard
    };
    __device__ __forceinline__ void next(item &i) const
    {
        if (++i.k < n_each)
            return;
        i.k = 0;
        if (++i.worker < n_served)
            return;
        i.worker = 0;
        i.t++;
    }
    __device__ __forceinline__ bool is_own(const item &i) const
    {
        return i.k >= n_inputs;
    }
    __device__ __forceinline__ sp_route route(const item &i) const
    {
        uint32_t n_peers = (uint32_t)a.world_size - 1, queue = SP_INBOX_INPUT;
        if (is_own(i))
            queue = SP_INBOX_RESULT;
        return is_own(i) || sp_one_input(a) ? sp_route{queue, i.worker, 0, n_peers}
                                            : sp_route{queue, i.worker, i.k, 1};
    }
};

// Where the items of a list lie in the input. It counts slices of the array, whose number fits in 32 bits.
struct sp_feed_ranges {
    const sp_feed_list &list;
    uint32_t worker, k;
    uint32_t first, owner; // ranks: owner of contribution 0, owner of this item (unused if stride is 0)
    uint32_t slice;        // its number in the shard
    uint32_t step;         // slices from the last worker's to the first worker's next one
    uint32_t cut;          // slices per shard; 0 if the input is no array of shards
    uint64_t stride;       // elements from one shard to the next in the input

    __device__ __forceinline__ sp_feed_ranges(const sp_feed_list &l, uint32_t q)
        : list(l), worker(0), k(0), first(0), owner(0), slice(q),
          step(l.a.n_ctas * l.a.workers_per_cta - l.n_served + 1),
          cut(sp_is_sharded(l.a) ? (uint32_t)l.a.shard_slices : 0),
          stride(l.a.op == SP_FUSED_ALL_GATHER ? 0 : l.a.shard_stride)
    {
        if (list.n_inputs != 0)
            first = sp_inbox_peer((uint32_t)l.a.rank, 0, (uint32_t)l.a.world_size);
        owner = first;
    }
    // The range of this item; it has no elements if the item lies past the end. Goes on to the next item.
    __device__ __forceinline__ sp_range next()
    {
        const sp_fused_args &a = list.a;
        uint32_t shard = a.shards[owner], i = shard * cut + slice;
        sp_range r = {shard * stride + (uint64_t)slice * a.slice_elems, i < a.whole_slices    ? a.slice_elems
                                                                        : i == a.whole_slices ? a.rest_elems
                                                                                              : 0};
        if (slice >= (uint32_t)a.shard_slices) // here the next shard begins
            r.n = 0;
        if (++k < list.n_each) {
            owner = owner + 1 < (uint32_t)a.world_size ? owner + 1 : 0;
            return r;
        }
        k = 0;
        owner = first;
        worker = worker + 1 < list.n_served ? worker + 1 : 0;
        slice += worker != 0 ? 1 : step;
        return r;
    }
};

// Wait until the feeder is less than 32 slices ahead of the gatherer. Otherwise two slices would share one
// bit of `cleared`.
template <class PROGRESS> __device__ __forceinline__ void sp_follow(const PROGRESS &progress, uint32_t slice)
{
    while (slice >= sp_load_acquire_cta(&progress.gathered) + 32 &&
           sp_load_acquire_cta(&progress.done[SP_ROLE_GATHER]) == 0)
        __nanosleep(200);
    __syncwarp();
}

// Wait for the copies that have been started, buffer i first: none may still be under way when the warp ends.
template <class G, uint32_t DEPTH, bool REMOTE>
__device__ __forceinline__ void sp_feed_drain(const sp_warp_context<REMOTE> &ctx, sp_feed_smem &smem,
                                              sp_loader<G, DEPTH - 1> &loader, uint32_t i)
{
    typedef typename G::U U;
    __syncwarp();
#pragma unroll 1
    for (uint32_t b = 0; b < DEPTH; b++, i = (i + 1) % DEPTH) {
        sp_range r = smem.ranges[i];
        loader.finish(ctx.lane, i, (U *)smem.buf + i * G::MAX_ELEMS, (const U *)ctx.a.in + r.start, r.n);
    }
    sp_copy_wait<0>();
}

// Serves worker ctx.q and, with n_served 2, the next worker too. progress: tables of these workers. REDUCES:
// the kernel is one of reductions, and may patch.
template <class G, bool REDUCES, bool REMOTE>
__device__ __forceinline__ void sp_feed(const sp_warp_context<REMOTE> &ctx, uint32_t n_served,
                                        sp_feed_smem &smem, typename sp_progress_of<REMOTE>::type *progress)
{
    typedef typename G::U U;
    constexpr uint32_t DEPTH = SP_FEED_BYTES / (G::UNITS * 16);
    static_assert(DEPTH >= 2 && DEPTH <= 4, "each buffer has a barrier");
    sp_work_split split(ctx.a, ctx.q);
    sp_feed_list list(ctx.a, n_served);
    sp_feed_ranges ranges(list, ctx.q);
    sp_loader<G, DEPTH - 1> loader(ctx.lane, smem.barriers);
    sp_feed_list::item now = {0, 0, 0};
    uint32_t i = 0; // number of the buffer
    bool ok = true, patches = REDUCES && sp_patches(ctx.a);
    // Offset between the input and the same slice in the output.
    uint64_t own_at = ctx.a.op == SP_FUSED_ALL_GATHER ? ctx.me() * ctx.a.shard_stride : 0;
    auto buf_of = [&](uint32_t b) { return (U *)smem.buf + b * G::MAX_ELEMS; };
    auto start = [&](uint32_t b) {
        sp_range r = ranges.next();
        if (ctx.lane == 0)
            smem.ranges[b] = r;
        loader.start(ctx.lane, b, buf_of(b), (const U *)ctx.a.in + r.start, r.n);
    };
    if (list.n_each == 0)
        return;
    // With two workers all items go through the same queue.
    sp_send_side<REMOTE> send_side(ctx, smem.send_side, progress, n_served,
                                   list.n_inputs != 0 ? SP_INBOX_INPUT : SP_INBOX_RESULT);
    for (uint32_t b = 0; b < DEPTH; b++)
        start(b);
    // Not in an all-reduce, where pacing was slower, and not in a broadcast, where the warp that takes
    // contributions, the relay, also sends.
    send_side.paced =
        ctx.n_peers != 0 && (ctx.a.op == SP_FUSED_ALL_GATHER || ctx.a.op == SP_FUSED_REDUCE_SCATTER);
    while (ok && now.t < split.n_slices) {
        __syncwarp(); // the range has been written by lane 0
        sp_range r = smem.ranges[i];
        loader.finish(ctx.lane, i, buf_of(i), (const U *)ctx.a.in + r.start, r.n);
        if (patches)
            sp_follow(progress[now.worker], now.t);
        if (sp_one_input(ctx.a) && ctx.lane == 0)
            sp_store_release_cta(&progress[now.worker].fed, now.t + 1);
        if (r.n != 0) {
            U *to = (U *)ctx.a.out + own_at + r.start;
            if (list.is_own(now) && to != (const U *)ctx.a.in + r.start)
                sp_slice_store<G>(ctx.lane, buf_of(i), to, r.n);
            if (ctx.n_peers != 0)
                ok = send_side.template send<G>(buf_of(i), r.n, smem.stage, list.route(now), now.t,
                                                patches ? (U *)ctx.a.out + r.start : nullptr);
        }
        sp_slice_stored(ctx.lane);
        start(i);
        i = (i + 1) % DEPTH;
        list.next(now);
    }
    sp_feed_drain<G, DEPTH>(ctx, smem, loader, i);
    if (ok)
        send_side.close((list.n_inputs != 0 ? 1u << SP_INBOX_INPUT : 0) |
                        (list.n_inputs != list.n_each ? 1u << SP_INBOX_RESULT : 0));
}

// ---- relay: in a broadcast, the slices of the own shard go from the root to the output and to the others
// ----

template <class G, bool REMOTE>
__device__ __forceinline__ void sp_relay(const sp_warp_context<REMOTE> &ctx, sp_feed_smem &smem,
                                         typename sp_progress_of<REMOTE>::type &progress)
{
    typedef typename G::U U;
    sp_work_split split(ctx.a, ctx.q);
    U *buf = (U *)smem.buf;
    uint32_t root = (uint32_t)ctx.a.root, slot = sp_inbox_slot(ctx.me(), root, (uint32_t)ctx.a.world_size);
    sp_shard own = split.shard(ctx.me());
    sp_send_side<REMOTE> send_side(ctx, smem.send_side, &progress);
    sp_recv_side<G, true, REMOTE> recv_side(ctx, SP_INBOX_INPUT, smem.buf + SP_INBOX_SLICE_BYTES,
                                            SP_INBOX_SLICE_BYTES, smem.barriers, sp_batch_links(ctx.n_peers));
    bool ok = true;
    if constexpr (REMOTE) {
        uint32_t k = root - (root > ctx.me() ? 1 : 0);
        recv_side.select(k - k % recv_side.n_entries());
    }
    for (uint32_t t = 0; ok && t < split.n_slices; t++) {
        sp_range r = split.range(own, t);
        sp_sink_smem<G> sink = {buf};
        uint32_t k = root - (root > ctx.me() ? 1 : 0); // root's number among the peers in rank order
        bool good;
        if (r.n == 0)
            continue;
        ok = recv_side.take(t, recv_side.ring_slot() == slot ? r.n : 0);
        if (!ok)
            break;
        recv_side.prefetch(recv_side.ring_slot() == slot ? split.elems(own, t + 1) : 0);
        sp_slice_stored(ctx.lane);
        sp_zero_units(ctx.lane, buf, G::UNITS);
        __syncwarp();
        good = sp_decode<G>(ctx.lane, recv_side.view(k), sink);
        sp_slice_store<G>(ctx.lane, buf, (U *)ctx.a.out + r.start, r.n);
        ok = recv_side.give_credit(t, good ? 0 : slot + 1, recv_side.queue) &&
             send_side.template send<G>(buf, r.n, smem.stage, {SP_INBOX_RESULT, 0, 0, ctx.n_peers}, t);
    }
    recv_side.close(ok);
    if (ok)
        send_side.close(1u << SP_INBOX_RESULT);
}

// ---- gather ----

// Write the frame of a result to slice dst [v.n] of the output. zeros: dst holds only zeros now.
template <class G>
__device__ __forceinline__ bool sp_result_store(uint32_t lane, const sp_view &v, typename G::U *buf,
                                                typename G::U *dst, bool zeros)
{
    sp_sink_zeros<G> sink = {dst};
    if (zeros && v.nnz <= SP_PATCH_RESULT(v.n)) {
        if (v.format == SPCCL_FORMAT_EMPTY)
            return true;
        if (v.format == SPCCL_FORMAT_TILE)
            return sp_decode_tile<G>(lane, v, v.smem, sink);
        if (v.format == SPCCL_FORMAT_COO)
            return sp_decode_coo<G>(lane, v, v.smem, sink);
    }
    return sp_decode_store<G>(lane, v, buf, dst);
}

// taken: the counter of the progress table that gets the number of taken slices. REDUCES: as in sp_feed.
template <class G, bool REDUCES>
__device__ __forceinline__ void sp_gather(const sp_warp_context<false> &ctx, sp_gather_smem &smem,
                                          sp_progress &progress, uint32_t &taken)
{
    typedef typename G::U U;
    sp_work_split split(ctx.a, ctx.q);
    sp_recv_side<G, true, false> recv_side(ctx, SP_INBOX_RESULT, smem.pool, SP_GATHER_POOL_BYTES,
                                           smem.barriers);
    bool ok = true, patches = REDUCES && sp_patches(ctx.a);
    sp_shard mine = split.shard(ctx.peer(min(ctx.slot(), ctx.n_peers - 1))); // L: shard of this lane's peer
    if (ctx.n_peers == 0)
        return;
    for (uint32_t t = 0; ok && t < split.n_slices; t++) {
        uint32_t bad = 0;
        ok = recv_side.take(t, split.elems(mine, t));
        if (!ok)
            break;
        recv_side.prefetch(split.elems(mine, t + 1));
        for (uint32_t k = 0; k < ctx.n_peers; k++) {
            sp_view v = recv_side.view(k);
            U *dst = (U *)ctx.a.out + split.shard_base(k + (k >= ctx.me() ? 1 : 0)) + split.start(t);
            bool zeros =
                patches && (sp_load_acquire_cta(progress.cleared + recv_side.slot_of(k)) >> t % 32 & 1) != 0;
            if (v.n != 0 && !sp_result_store<G>(ctx.lane, v, (U *)smem.buf, dst, zeros))
                bad = recv_side.slot_of(k) + 1;
        }
        ok = recv_side.give_credit(t, bad, recv_side.queue);
        if (ctx.lane == 0)
            sp_store_release_cta(&taken, t + 1);
    }
    recv_side.close(ok);
}

#endif
