// direct_cuda.cu - a whole collective in one launch over mapped inboxes: the direct schedule
// (docs/ALGORITHMS.md), fused. Each worker does its slices of every shard in steps; in step t it
//   sends its contribution to slice t of every other shard to the shard's owner          (lane INPUT)
//   takes the contributions to slice t-1 of its own shard, adds them in rank order,
//     writes the result to the output and sends it to everyone                            (lane RESULT)
//   takes the results of slice t-2 of the other shards and writes them to the output
// so that reading, the wire and writing go on at the same time, and every message has a step to arrive.
//
// Bytes of GPU memory moved, floor: all-reduce reads and writes the array once; reduce-scatter reads it and
// writes a shard; all-gather reads a shard and writes the array; the rings stay in L2 while frames are small.
#include "cuda_check.h"
#include "decode.cuh"
#include "kernels_cuda.h"
#include "link.cuh"

// Workers in a block, which has a multiprocessor to itself. With four there would be 64 registers a thread,
// and what does not fit would go to memory.
#ifndef SP_CTA_WORKERS
#define SP_CTA_WORKERS 3u
#endif

// What a collective is made of.
__device__ __forceinline__ bool
sp_is_sharded(const sp_fused_args &a) // the array is cut into a shard per rank
{
    return a.op == SP_FUSED_ALL_REDUCE || a.op == SP_FUSED_BROADCAST;
}
__device__ __forceinline__ bool sp_has_inputs(const sp_fused_args &a) // contributions travel
{
    return a.op != SP_FUSED_ALL_GATHER;
}
__device__ __forceinline__ bool sp_sends_inputs(const sp_fused_args &a)
{
    return sp_has_inputs(a) && (a.op != SP_FUSED_BROADCAST || a.rank == a.root);
}
__device__ __forceinline__ bool sp_one_input(const sp_fused_args &a) // the same contribution goes to all
{
    return a.op == SP_FUSED_ALL_REDUCE_ONESHOT;
}
__device__ __forceinline__ bool sp_has_results(const sp_fused_args &a) // results travel
{
    return a.op == SP_FUSED_ALL_GATHER || sp_is_sharded(a);
}
__device__ __forceinline__ uint32_t sp_result_delay(const sp_fused_args &a) // steps
{
    return sp_has_inputs(a) ? 1 : 0;
}
__device__ __forceinline__ uint32_t sp_gather_delay(const sp_fused_args &a)
{
    return sp_result_delay(a) + 1;
}

// A slice: where it starts in its buffer, and how many elements it has.
struct sp_range {
    uint64_t start;
    uint32_t n;
};

// Elements of slice t of a shard that may be short or not there at all.
__device__ __noinline__ uint32_t sp_short_elems(const sp_fused_args &a, const sp_link_shared &s,
                                                uint32_t shard, uint32_t t)
{
    uint64_t before = (sp_is_sharded(a) ? shard * s.shard_stride : 0) + s.first + t * s.step;
    return before >= a.n_elems ? 0 : (uint32_t)min(a.n_elems - before, (uint64_t)a.slice_elems);
}

// The loads of a worker, one after the other: the next one is always under way.
struct sp_job {
    uint32_t t, k; // step; number in the step: the sends, then this rank's own slice
};

template <class G> struct sp_fused {
    typedef typename G::U U;
    sp_link l;
    uint32_t cur; // buffer of the job that is next
    sp_job job;

    // Elements of slice t of a shard. Asked for often: almost always it is a whole slice.
    __device__ __forceinline__ uint32_t elems(uint32_t shard, uint32_t t) const
    {
        return t < l.s.n_whole ? l.a.slice_elems : sp_short_elems(l.a, l.s, shard, t);
    }
    // The same slice in the buffer that holds all shards.
    __device__ __forceinline__ sp_range range(uint32_t shard, uint32_t t) const
    {
        return {shard * l.s.shard_stride + l.s.first + t * l.s.step, elems(shard, t)};
    }
    // In a buffer that holds this rank's shard alone, where the other has all: all-gather's in,
    // reduce-scatter's out.
    __device__ __forceinline__ uint64_t own_start(uint32_t t) const
    {
        return (sp_is_sharded(l.a) ? l.me() * l.s.shard_stride : 0) + l.s.first + t * l.s.step;
    }
    __device__ __forceinline__ U *run(uint32_t i) const
    {
        return (U *)(l.s.buf[i] + l.w.warp * (SP_GPU_SLICE_BYTES / SP_WORKER_WARPS));
    }
    __device__ __forceinline__ uint32_t n_sends(uint32_t t) const
    {
        return t < l.s.n_slices && sp_sends_inputs(l.a)
                   ? (sp_one_input(l.a) ? min(1u, l.n_peers()) : l.n_peers())
                   : 0;
    }
    __device__ __forceinline__ bool has_own(uint32_t t) const
    {
        bool mine = l.a.op != SP_FUSED_BROADCAST || l.a.rank == l.a.root;
        return mine && has_result(t);
    }
    __device__ __forceinline__ bool has_result(uint32_t t) const
    {
        return t >= sp_result_delay(l.a) && t - sp_result_delay(l.a) < l.s.n_slices;
    }
    __device__ __forceinline__ void settle(sp_job *j) const
    {
        while (j->t < l.s.n_steps && j->k >= n_sends(j->t) + (has_own(j->t) ? 1 : 0)) {
            j->t++;
            j->k = 0;
        }
    }
    __device__ __forceinline__ void start_load(sp_job j, uint32_t buffer) const
    {
        if (j.t >= l.s.n_steps) {
            sp_copy_commit(); // an empty group keeps the count
            return;
        }
        bool own = j.k >= n_sends(j.t);
        uint32_t shard = own || sp_one_input(l.a) ? l.me() : l.peer(j.k);
        uint32_t t = own ? j.t - sp_result_delay(l.a) : j.t;
        // All-gather: `in` is this rank's block alone.
        uint64_t start = l.a.op == SP_FUSED_ALL_GATHER ? own_start(t) : range(shard, t).start;
        sp_slice_load<G>(l.w, run(buffer), (const U *)l.a.in + start, elems(shard, t));
    }
    // Step 1 of t.
    __device__ __forceinline__ bool send_inputs(uint32_t t)
    {
        uint32_t n = n_sends(t);
        for (uint32_t k = 0; k < n; k++) {
            uint32_t n_elems = elems(sp_one_input(l.a) ? l.me() : l.peer(k), t);
            job.k++;
            settle(&job);
            start_load(job, cur ^ 1);
            sp_copy_wait<1>();
            __syncwarp();
            if (n_elems != 0 &&
                !sp_link_send<G>(l, run(cur), n_elems, SP_INBOX_INPUT, sp_one_input(l.a) ? 0 : k,
                                 sp_one_input(l.a) ? l.n_peers() : 1, t))
                return false;
            __syncwarp();
            cur ^= 1;
        }
        if (n != 0)
            sp_link_publish(l, SP_INBOX_INPUT, l.n_peers());
        return true;
    }
    // The results of slice t of the other shards.
    __device__ __forceinline__ bool gather(uint32_t t)
    {
        U *scratch = run(cur ^ 1);
        uint32_t bad = 0;
        auto n_of = [&](uint32_t slot) { return elems(l.peer(slot), t); };
        if (l.n_peers() == 0)
            return true;
        if (!sp_link_take<G>(l, SP_INBOX_RESULT, t, n_of))
            return false;
        for (uint32_t slot = 0; slot < l.n_peers(); slot++) {
            sp_range r = range(l.peer(slot), t);
            if (r.n != 0 && !write(l.s.view[slot], scratch, (U *)l.a.out + r.start))
                bad = slot + 1;
        }
        return sp_link_taken(l, SP_INBOX_RESULT, t, bad, n_of);
    }
    // A frame becomes this warp's part of dst [v.n]; scratch: this warp's run.
    __device__ __forceinline__ bool write(const sp_view &v, U *scratch, U *dst) const
    {
        bool ok = true;
        if (v.format == SPCCL_FORMAT_EMPTY) {
            sp_slice_store_zero<G>(l.w, dst, v.n);
            return true;
        }
        if (v.format == SPCCL_FORMAT_DENSE) {
            const uint4 *from = (const uint4 *)(v.p + v.at.values + l.w.warp * G::WARP_BYTES);
#pragma unroll
            for (uint32_t r = 0; r < G::ROWS; r++)
                if (l.w.warp * G::WARP_ELEMS + (r * 32 + l.w.lane) * G::K < v.n)
                    ((uint4 *)scratch)[sp_unit_at(r * 32 + l.w.lane)] = from[r * 32 + l.w.lane];
        } else {
            sp_run_zero<G::WARP_BYTES / 16>(l.w, scratch);
            __syncwarp();
            ok = sp_decode<G>(l.w, v, [&](uint32_t i, U x) { scratch[sp_elem_at<G>(i)] = x; });
        }
        __syncwarp();
        sp_slice_store<G>(l.w, scratch, dst, v.n);
        __syncwarp();
        return ok;
    }
    // Send the result in the warps' runs to everyone.
    __device__ __forceinline__ bool send_result(const U *result, uint32_t n, uint32_t t)
    {
        if (l.n_peers() == 0)
            return true;
        if (!sp_link_send<G>(l, result, n, SP_INBOX_RESULT, 0, l.n_peers(), t))
            return false;
        sp_link_publish(l, SP_INBOX_RESULT, l.n_peers());
        return true;
    }
    // All-gather, and the root of a broadcast: the own slice goes to everyone as it is.
    __device__ __forceinline__ bool result_own(uint32_t t)
    {
        sp_range r = range(l.me(), t);
        uint32_t mine = cur;
        U *dst = (U *)l.a.out + r.start;
        const U *src = (const U *)l.a.in + (l.a.op == SP_FUSED_ALL_GATHER ? own_start(t) : r.start);
        job.k++;
        settle(&job);
        start_load(job, cur ^ 1);
        sp_copy_wait<1>();
        __syncwarp();
        cur ^= 1;
        if (r.n == 0)
            return true;
        if (dst != src)
            sp_slice_store<G>(l.w, run(mine), dst, r.n);
        if (!send_result(run(mine), r.n, t))
            return false;
        __syncwarp();
        return true;
    }
    // Broadcast, not the root: root's slice of the own shard, to the output and on to the others.
    __device__ __forceinline__ bool result_relayed(uint32_t t)
    {
        sp_range r = range(l.me(), t);
        U *scratch = run(cur ^ 1);
        uint32_t root = sp_inbox_slot(l.me(), (uint32_t)l.a.root, (uint32_t)l.a.world_size);
        auto elems = [&](uint32_t slot) { return slot == root ? r.n : 0; };
        bool ok;
        if (r.n == 0)
            return true;
        if (!sp_link_take<G>(l, SP_INBOX_INPUT, t, elems))
            return false;
        const sp_view v = l.s.view[root];
        if (v.format == SPCCL_FORMAT_EMPTY)
            sp_run_zero<G::WARP_BYTES / 16>(l.w, scratch);
        ok = write(v, scratch, (U *)l.a.out + r.start);
        if (v.format == SPCCL_FORMAT_DENSE &&
            l.w.warp * G::WARP_ELEMS + G::WARP_ELEMS > v.n) { // a short last slice
            for (uint32_t i = sp_warp_elems<G>(l.w, v.n) + l.w.lane; i < G::WARP_ELEMS; i += 32)
                scratch[sp_elem_at<G>(i)] = 0;
            __syncwarp();
        }
        if (!sp_link_taken(l, SP_INBOX_INPUT, t, ok ? 0 : root + 1, elems))
            return false;
        return send_result(scratch, r.n, t);
    }
    // The worker's share, its positions, its first load.
    __device__ __forceinline__ void begin()
    {
        if (l.w.tid == 0) {
            uint64_t slices = (l.a.n_elems + l.a.slice_elems - 1) / l.a.slice_elems,
                     p = (uint64_t)l.a.world_size;
            uint32_t delay =
                sp_has_results(l.a) && l.n_peers() != 0 ? sp_gather_delay(l.a) : sp_result_delay(l.a);
            uint64_t shard = sp_is_sharded(l.a) ? (slices + p - 1) / p : slices;
            bool blocks = l.a.op == SP_FUSED_ALL_GATHER || l.a.op == SP_FUSED_REDUCE_SCATTER;
            // Slices of the last shard that are whole; those before it have at least as many.
            uint64_t whole = l.a.n_elems / l.a.slice_elems, rest = sp_is_sharded(l.a) ? (p - 1) * shard : 0;
            whole = whole > rest ? whole - rest : 0;
            l.s.n_whole = l.q() < whole ? (uint32_t)((whole - l.q() + l.n_q() - 1) / l.n_q()) : 0;
            l.s.shard_stride = sp_is_sharded(l.a) ? shard * l.a.slice_elems : blocks ? l.a.n_elems : 0;
            l.s.first = (uint64_t)l.q() * l.a.slice_elems;
            l.s.step = (uint64_t)l.n_q() * l.a.slice_elems;
            l.s.n_slices = l.q() < shard ? (uint32_t)((shard - l.q() + l.n_q() - 1) / l.n_q()) : 0;
            l.s.n_steps = l.s.n_slices == 0 ? 0 : l.s.n_slices + delay;
            l.s.area = l.n_peers() == 0 ? SP_FETCH_BYTES : SP_FETCH_BYTES / l.n_peers() & ~15u;
        }
        sp_bar_sync(l.w.bar);
        settle(&job);
        start_load(job, cur);
        sp_link_open(l);
    }
    __device__ __forceinline__ void end(bool ok) const
    {
        sp_copy_wait<0>();
        sp_bar_sync(l.w.bar);
        if (ok)
            sp_link_close(l);
        sp_bar_sync(l.w.bar);
        if (l.w.tid == 0)
            sp_link_done(l);
    }
};

extern __shared__ __align__(16) uint8_t sp_dynamic_shared[];

__device__ __forceinline__ sp_link_shared &sp_shared_here()
{
    return ((sp_link_shared *)sp_dynamic_shared)[threadIdx.x / SP_GPU_WORKER_THREADS];
}

// All-gather and broadcast of elements of BYTES bytes.
template <int BYTES>
__global__ void __launch_bounds__(SP_CTA_WORKERS *SP_GPU_WORKER_THREADS + 32, 1)
    sp_gather_kernel(const __grid_constant__ sp_fused_args a)
{
    typedef sp_geometry<typename sp_unsigned<BYTES>::type, 4> G;
    if (threadIdx.x >= a.workers_per_cta * SP_GPU_WORKER_THREADS) {
        sp_herald<SP_CTA_WORKERS>(a, (sp_link_shared *)sp_dynamic_shared);
        return;
    }
    sp_fused<G> f = {{a, sp_shared_here(), sp_worker_here(), 0}, 0, {0, 0}};
    bool ok = true;
    f.begin();
    for (uint32_t t = 0; ok && t < f.l.s.n_steps; t++) {
        ok = f.send_inputs(t);
        if (ok && f.has_own(t))
            ok = f.result_own(t - sp_result_delay(a));
        else if (ok && f.has_result(t))
            ok = f.result_relayed(t - sp_result_delay(a));
        if (ok && t >= sp_gather_delay(a))
            ok = f.gather(t - sp_gather_delay(a));
    }
    f.end(ok);
}

// ---- reductions ----

template <int DTYPE> struct sp_reduce_geometry {
    typedef sp_elem<DTYPE> T;
    // 16-bit floats accumulate in twice the room: half the slice.
    typedef sp_geometry<typename T::U, (sizeof(typename T::A) > sizeof(typename T::U) ? 2 : 4)> G;
};

// acc op x of MIN, MAX and PROD.
template <class T>
__device__ __forceinline__ typename T::A sp_combine(spccl_redop op, typename T::A acc, typename T::A x)
{
    return op == SPCCL_MIN ? T::min(acc, x) : op == SPCCL_MAX ? T::max(acc, x) : T::mul(acc, x);
}

// One rank's contribution into the accumulators of this warp, acc [WARP_ELEMS]. own: its run, or null: the
// frame v.
template <class T, class G>
__device__ __forceinline__ bool sp_accumulate(const sp_link &l, typename T::A *acc, const typename G::U *own,
                                              const sp_view &v, bool first)
{
    typedef typename G::U U;
    typedef typename T::A A;
    bool sums = l.a.redop == SPCCL_SUM || l.a.redop == SPCCL_AVG, ok = true;
    const U *values = own;
    if (sums && own == nullptr && v.format == SPCCL_FORMAT_DENSE) {
        // Adding +0.0 changes nothing: a sum that began at +0.0 is never -0.0, and its NaNs are quiet.
        uint32_t left = sp_warp_elems<G>(l.w, v.n);
        const uint4 *from = (const uint4 *)(v.p + v.at.values) + l.w.warp * G::ROWS * 32 + l.w.lane;
        union {
            uint4 v;
            U e[G::K];
        } x[G::ROWS];
#pragma unroll
        for (uint32_t r = 0; r < G::ROWS; r++)
            x[r].v = (r * 32 + l.w.lane) * G::K < left ? from[r * 32] : make_uint4(0, 0, 0, 0);
#pragma unroll
        for (uint32_t r = 0; r < G::ROWS; r++) {
            A *to = acc + sp_unit_at(r * 32 + l.w.lane) * G::K;
#pragma unroll
            for (uint32_t c = 0; c < G::K; c++)
                to[c] = T::add(to[c], T::widen(x[r].e[c]));
        }
        return true;
    }
    if (sums && own == nullptr)
        return sp_decode<G>(l.w, v, [&](uint32_t i, U x) {
            A *at = acc + sp_elem_at<G>(i);
            *at = T::add(*at, T::widen(x));
        });
    if (own == nullptr) { // absent elements count as zeros: spread them out
        U *spread = (U *)(l.s.frame + l.w.warp * (SP_GPU_SLICE_BYTES / SP_WORKER_WARPS));
        sp_run_zero<G::WARP_BYTES / 16>(l.w, spread);
        __syncwarp();
        ok = sp_decode<G>(l.w, v, [&](uint32_t i, U x) { spread[sp_elem_at<G>(i)] = x; });
        __syncwarp();
        values = spread;
    }
    // acc, own and spread have their elements in the same places: no need to know which.
    constexpr uint32_t N = 16 / sizeof(A); // of an accumulator unit
    for (uint32_t u = l.w.lane; u < G::WARP_ELEMS / N; u += 32) {
        union {
            uint4 v;
            A e[N];
        } to;
        union {
            uint4 v;
            uint2 half;
            U e[N];
        } x;
        to.v = ((const uint4 *)acc)[u];
        if (sizeof(A) == sizeof(U))
            x.v = ((const uint4 *)values)[u];
        else
            x.half = ((const uint2 *)values)[u];
#pragma unroll
        for (uint32_t i = 0; i < N; i++) {
            A e = T::widen(x.e[i]);
            to.e[i] = sums ? T::add(to.e[i], e) : first ? e : sp_combine<T>(l.a.redop, to.e[i], e);
        }
        ((uint4 *)acc)[u] = to.v;
    }
    return ok;
}

// acc [WARP_ELEMS] of this warp becomes values of the dtype, at the same address.
template <class T, class G> __device__ __forceinline__ void sp_finish(const sp_link &l, typename T::A *acc)
{
    typedef typename G::U U;
    constexpr uint32_t EACH = G::WARP_ELEMS / 32;
    bool avg = l.a.redop == SPCCL_AVG;
    if (sizeof(typename T::A) == sizeof(U) && !avg)
        return;
    if (sizeof(typename T::A) == sizeof(U)) {
        for (uint32_t i = l.w.lane; i < G::WARP_ELEMS; i += 32)
            acc[i] = T::div(acc[i], l.a.world_size);
    } else { // all are read before the first is written
        U mine[sizeof(typename T::A) == sizeof(U) ? 1 : EACH];
#pragma unroll
        for (uint32_t i = 0; i < (sizeof(typename T::A) == sizeof(U) ? 1 : EACH); i++) {
            typename T::A x = acc[i * 32 + l.w.lane];
            mine[i] = T::narrow(avg ? T::div(x, l.a.world_size) : x);
        }
        __syncwarp();
#pragma unroll
        for (uint32_t i = 0; i < (sizeof(typename T::A) == sizeof(U) ? 1 : EACH); i++)
            ((U *)acc)[i * 32 + l.w.lane] = mine[i];
    }
    __syncwarp();
}

// Slice t of the own shard: everyone's contributions in rank order.
template <class T, class G> __device__ __forceinline__ bool sp_reduce(sp_fused<G> &f, uint32_t t)
{
    typedef typename G::U U;
    typedef typename T::A A;
    sp_link &l = f.l;
    sp_range r = f.range(l.me(), t);
    const U *own = f.run(f.cur);
    A *acc = (A *)f.run(f.cur ^ 1);
    uint32_t bad = 0;
    auto elems = [&](uint32_t) { return r.n; };
    U *dst = (U *)l.a.out + (l.a.op == SP_FUSED_REDUCE_SCATTER ? f.own_start(t) : r.start);
    if (r.n != 0 && l.n_peers() != 0 && !sp_link_take<G>(l, SP_INBOX_INPUT, t, elems))
        return false;
    sp_copy_wait<0>();
    sp_run_zero<G::WARP_ELEMS * sizeof(A) / 16>(l.w, acc);
    __syncwarp();
    for (uint32_t rank = 0; r.n != 0 && rank < (uint32_t)l.a.world_size; rank++) {
        bool mine = rank == l.me();
        uint32_t slot = mine ? 0 : sp_inbox_slot(l.me(), rank, (uint32_t)l.a.world_size);
        if (!sp_accumulate<T, G>(l, acc, mine ? own : nullptr, l.s.view[slot], rank == 0))
            bad = slot + 1;
        __syncwarp();
    }
    f.job.k++;
    f.settle(&f.job);
    f.start_load(f.job, f.cur);
    if (r.n == 0)
        return true;
    sp_finish<T, G>(l, acc);
    // Elements past the end may not be zero (0 / 0 and the like): the frame must not list them.
    for (uint32_t i = sp_warp_elems<G>(l.w, r.n) + l.w.lane; i < G::WARP_ELEMS; i += 32)
        ((U *)acc)[sp_elem_at<G>(i)] = 0;
    __syncwarp();
    sp_slice_store<G>(l.w, (const U *)acc, dst, r.n);
    if (l.n_peers() != 0 && !sp_link_taken(l, SP_INBOX_INPUT, t, bad, elems))
        return false;
    if (sp_has_results(l.a) && !f.send_result((const U *)acc, r.n, t))
        return false;
    __syncwarp();
    return true;
}

// Reduce-scatter and all-reduce.
template <int DTYPE>
__global__ void __launch_bounds__(SP_CTA_WORKERS *SP_GPU_WORKER_THREADS + 32, 1)
    sp_reduce_kernel(const __grid_constant__ sp_fused_args a)
{
    typedef sp_elem<DTYPE> T;
    typedef typename sp_reduce_geometry<DTYPE>::G G;
    if (threadIdx.x >= a.workers_per_cta * SP_GPU_WORKER_THREADS) {
        sp_herald<SP_CTA_WORKERS>(a, (sp_link_shared *)sp_dynamic_shared);
        return;
    }
    sp_fused<G> f = {{a, sp_shared_here(), sp_worker_here(), 0}, 0, {0, 0}};
    bool ok = true;
    f.begin();
    for (uint32_t t = 0; ok && t < f.l.s.n_steps; t++) {
        ok = f.send_inputs(t);
        if (ok && f.has_result(t))
            ok = sp_reduce<T, G>(f, t - sp_result_delay(a));
        if (ok && sp_has_results(a) && t >= sp_gather_delay(a))
            ok = f.gather(t - sp_gather_delay(a));
    }
    f.end(ok);
}

// ---- launching ----

typedef void (*sp_fused_kernel)(const sp_fused_args);

static const sp_fused_kernel gather_kernels[] = {sp_gather_kernel<1>, sp_gather_kernel<2>,
                                                 sp_gather_kernel<4>, sp_gather_kernel<8>};
// By dtype; float8 is carried, never reduced: refused above.
static const sp_fused_kernel reduce_kernels[SP_N_DTYPES] = {nullptr,
                                                            sp_reduce_kernel<SPCCL_FLOAT32>,
                                                            sp_reduce_kernel<SPCCL_FLOAT16>,
                                                            sp_reduce_kernel<SPCCL_BFLOAT16>,
                                                            sp_reduce_kernel<SPCCL_FLOAT64>,
                                                            nullptr,
                                                            sp_reduce_kernel<SPCCL_INT8>,
                                                            sp_reduce_kernel<SPCCL_INT16>,
                                                            sp_reduce_kernel<SPCCL_INT32>,
                                                            sp_reduce_kernel<SPCCL_INT64>,
                                                            sp_reduce_kernel<SPCCL_UINT8>};

static sp_fused_kernel kernel_of(const sp_fused_args *a)
{
    size_t bytes = sp_dtype_bytes(a->dtype);
    if (a->op == SP_FUSED_ALL_GATHER || a->op == SP_FUSED_BROADCAST)
        return gather_kernels[bytes == 1 ? 0 : bytes == 2 ? 1 : bytes == 4 ? 2 : 3];
    return sp_dtype_ok(a->dtype) ? reduce_kernels[a->dtype] : nullptr;
}

// Load a kernel on the current device now: the first launch would otherwise do it, and loading waits for
// kernels that may be waiting for the one to be launched.
static spccl_status prepare(sp_fused_kernel kernel, uint32_t workers)
{
    if (kernel == nullptr)
        return SPCCL_OK;
    return sp_cuda_check(cudaFuncSetAttribute((const void *)kernel,
                                              cudaFuncAttributeMaxDynamicSharedMemorySize,
                                              (int)(workers * sizeof(sp_link_shared))),
                         "cudaFuncSetAttribute of a collective's kernel");
}

extern "C" spccl_status sp_fused_cuda_workers_per_cta(int ordinal, uint32_t *out)
{
    int shared = 0;
    SP_TRY_CUDA(cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, ordinal));
    *out = (uint32_t)shared / (uint32_t)sizeof(sp_link_shared);
    if (*out > SP_CTA_WORKERS)
        *out = SP_CTA_WORKERS;
    if (*out == 0)
        return SP_FAIL(SPCCL_ERR_UNSUPPORTED,
                       "GPU %d has %d bytes of shared memory per block, a worker needs %zu", ordinal, shared,
                       sizeof(sp_link_shared));
    for (sp_fused_kernel kernel : gather_kernels)
        SP_TRY(prepare(kernel, *out));
    for (sp_fused_kernel kernel : reduce_kernels)
        SP_TRY(prepare(kernel, *out));
    return SPCCL_OK;
}

extern "C" spccl_status sp_fused_cuda(const sp_fused_args *a, void *stream)
{
    sp_fused_kernel kernel = kernel_of(a);
    size_t shared = a->workers_per_cta * sizeof(sp_link_shared);
    void *params[] = {const_cast<sp_fused_args *>(a)};
    if (kernel == nullptr)
        return SP_FAIL(SPCCL_ERR_BUG, "fused kernel of dtype %d, operation %d", (int)a->dtype, (int)a->op);
    SP_TRY_CUDA(
        cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared));
    SP_TRY_CUDA(cudaLaunchKernel((const void *)kernel, dim3(a->n_ctas),
                                 dim3(a->workers_per_cta * SP_GPU_WORKER_THREADS + 32), params, shared,
                                 (cudaStream_t)stream));
    return SPCCL_OK;
}
