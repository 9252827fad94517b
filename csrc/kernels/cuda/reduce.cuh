// reduce.cuh - reduce-scatter and all-reduce in one launch (docs/ALGORITHMS.md: The direct schedule on a
// GPU): the owners, which add contributions, and the kernel.
//
// Least traffic of GPU memory: a reduce-scatter reads the array and writes a shard; an all-reduce writes the
// whole array, or, if it patches, only what changes. While frames are small, the rings stay in the L2 cache.
#ifndef SP_REDUCE_CUH
#define SP_REDUCE_CUH

#include "kernels/cuda/copy_warp.cuh"
#include "kernels/cuda/gather_hosts.cuh"

template <int DTYPE> struct sp_reduce_geometry {
    typedef sp_elem<DTYPE> T;
    // The accumulator of a 16-bit float is twice as large, so a slice has half as many elements.
    typedef sp_geometry<typename T::U, SP_INBOX_SLICE_BYTES * sizeof(typename T::U) / sizeof(typename T::A)>
        G;
};

// acc op x, for MIN, MAX and PROD.
template <class T>
__device__ __forceinline__ typename T::A sp_combine(spccl_redop op, typename T::A acc, typename T::A x)
{
    return op == SPCCL_MIN ? T::min(acc, x) : op == SPCCL_MAX ? T::max(acc, x) : T::mul(acc, x);
}

// *acc = add(*acc, x); the second function does it for the K elements of a unit. Only NaNs come here. Not
// inlined, so that this rare code stays out of the common path.
template <class T> __device__ __noinline__ void sp_add_one_rare(typename T::A *acc, typename T::U x)
{
    *acc = T::add(*acc, T::widen(x));
}
template <class T, class G> __device__ __noinline__ void sp_add_rare(typename T::A *acc, uint4 v)
{
    sp_unit<G> x;
    x.v = v;
#pragma unroll
    for (uint32_t c = 0; c < G::K; c++)
        acc[c] = T::add(acc[c], T::widen(x.e[c]));
}

// SUM and AVG. Elements that are +0.0 need not be skipped: a sum that starts at +0.0 is never -0.0, and its
// NaNs are quiet, so adding +0.0 does not change it.
template <class T, class G> struct sp_sink_add {
    typedef typename T::A A;
    A *acc;
    __device__ __forceinline__ void put(uint32_t i, typename G::U x) const
    {
        A sum = T::add_plain(acc[i], T::widen_plain(x));
        if (__builtin_expect(T::is_float && sum != sum, 0))
            sp_add_one_rare<T>(acc + i, x);
        else
            acc[i] = sum;
    }
    __device__ __forceinline__ void unit(uint32_t u, uint32_t, const sp_unit<G> &x) const
    {
        constexpr uint32_t N = sizeof(A) * G::K / 16;
        uint4 *at = (uint4 *)acc + u * N;
        union {
            uint4 v[N];
            A e[G::K];
        } sum;
        bool nan = false; // one test for all elements of the unit
#pragma unroll
        for (uint32_t i = 0; i < N; i++)
            sum.v[i] = at[i];
#pragma unroll
        for (uint32_t c = 0; c < G::K; c++) {
            sum.e[c] = T::add_plain(sum.e[c], T::widen_plain(x.e[c]));
            nan |= T::is_float && sum.e[c] != sum.e[c];
        }
        if (__builtin_expect(nan, 0)) {
            sp_add_rare<T, G>(acc + u * G::K, x.v);
            return;
        }
#pragma unroll
        for (uint32_t i = 0; i < N; i++)
            at[i] = sum.v[i];
    }
};

// Apply element i of a contribution for MIN, MAX or PROD, and set its bit in `listed`. The first contribution
// replaces the value. Not inlined, as it would be inlined in a hundred places.
template <class T>
__device__ __noinline__ void sp_combine_one(spccl_redop op, bool first, typename T::A *acc, uint32_t *listed,
                                            uint32_t i, typename T::U x)
{
    typename T::A e = T::widen(x);
    acc[i] = first ? e : sp_combine<T>(op, acc[i], e);
    atomicOr(listed + i / 32, 1u << i % 32);
}

// MIN, MAX and PROD. Elements that a contribution does not list count as zeros: `rest` combines them at the
// end.
template <class T, class G> struct sp_sink_combine {
    typedef typename T::A A;
    A *acc;
    uint32_t *listed; // [MAX_ELEMS / 32]
    spccl_redop op;
    bool first; // this is the first contribution, which replaces the value
    __device__ __forceinline__ void put(uint32_t i, typename G::U x) const
    {
        sp_combine_one<T>(op, first, acc, listed, i, x);
    }
    __device__ __forceinline__ void unit(uint32_t u, uint32_t bits, const sp_unit<G> &x) const
    {
#pragma unroll
        for (uint32_t c = 0; c < G::K; c++)
            if (bits >> c & 1)
                put(u * G::K + c, x.e[c]);
    }
    __device__ __forceinline__ void rest(uint32_t lane, uint32_t n) const
    {
        __syncwarp();
        for (uint32_t i = lane; i < n && !first; i += 32)
            if ((listed[i / 32] >> i % 32 & 1) == 0) {
                A *at = acc + i;
                *at = sp_combine<T>(op, *at, T::widen(0));
            }
        __syncwarp();
    }
};
#define SP_LISTED_BYTES (SP_INBOX_SLICE_BYTES / 8) // a bit per element of a slice
static_assert(SP_OWN_POOL_BYTES - SP_LISTED_BYTES >= SP_POOL_BYTES_MIN, "listed frames fit into the pool");

// Feed this rank's own contribution, src [n] in global memory, to the sink as if it were a dense frame.
template <class G, class SINK>
__device__ __forceinline__ void sp_decode_own(uint32_t lane, const typename G::U *src, uint32_t n, SINK &sink)
{
    sp_view v = {};
    v.values = (const uint8_t *)src;
    if (((uintptr_t)src & 15) != 0) {
        for (uint32_t i = lane; i < n; i += 32)
            sink.put(i, src[i]);
        return;
    }
    v.n = n / G::K * G::K; // whole units only: nothing past the end of the array is read
    sp_decode_dense<G>(lane, v, sink);
    if (lane < n - v.n)
        sink.put(v.n + lane, src[v.n + lane]);
}

// AVG: divide the sums acc [n] one by one. Zeros stay as they are. Not inlined, like the next two functions, so
// that SUM, which needs none of them, has its code close together.
template <class T>
__device__ __noinline__ void sp_divide_sums(uint32_t lane, typename T::A *acc, uint32_t n, int by)
{
#pragma unroll 1
    for (uint32_t i = lane; i < n; i += 32)
        if (acc[i] != 0)
            acc[i] = T::div(acc[i], by);
    __syncwarp();
}
// AVG where the reciprocal `by` is exact, and sums have the size of elements.
template <class A, uint32_t UNITS>
__device__ __noinline__ void sp_scale_sums(uint32_t lane, uint4 *sums, A by)
{
    constexpr uint32_t N = 64 / sizeof(A);
    static_assert(UNITS % 128 == 0, "four units per lane and turn");
#pragma unroll 1
    for (uint32_t u = lane; u < UNITS; u += 128) {
        union {
            uint4 v[4];
            A e[N];
        } sum, x;
        bool nan = false; // one test for four units
#pragma unroll
        for (uint32_t i = 0; i < 4; i++)
            sum.v[i] = sums[u + 32 * i];
#pragma unroll
        for (uint32_t c = 0; c < N; c++) {
            x.e[c] = sum.e[c] * by;
            nan |= x.e[c] != x.e[c];
        }
        if (__builtin_expect(nan, 0)) {
            x = sum;
            sp_scale_each<A, N>(x.e, by);
        }
#pragma unroll
        for (uint32_t i = 0; i < 4; i++)
            sums[u + 32 * i] = x.v[i];
    }
}

// The same for 16-bit floats: multiply the sums by `by` and round them, in ascending order as
// sp_owner::narrow does.
template <class T, class G>
__device__ __noinline__ void sp_scale_and_narrow(uint32_t lane, uint4 *sums, float by)
{
    constexpr uint32_t N = G::K * sizeof(float) / 16;
#pragma unroll 1
    for (uint32_t u = lane; u < G::UNITS; u += 64) {
        union {
            uint4 v;
            uint32_t w[4];
        } x[2];
        union {
            uint4 v[N];
            float e[G::K];
        } sum[2];
#pragma unroll
        for (uint32_t i = 0; i < 2; i++)
#pragma unroll
            for (uint32_t j = 0; j < N; j++)
                sum[i].v[j] = sums[(u + 32 * i) * N + j];
#pragma unroll
        for (uint32_t i = 0; i < 2; i++) {
            sp_scale_each<float, G::K>(sum[i].e, by);
            sp_narrow_each<T, G::K>(sum[i].e, x[i].w);
        }
        __syncwarp();
        sums[u] = x[0].v;
        sums[u + 32] = x[1].v;
        __syncwarp();
    }
}

// Where the output has the accumulator's dtype: divide n sums, and store them. Not inlined, so that the code of other
// calls stays close together. It takes values: a pointer to the caller's state would keep that in local memory.
template <class T>
__device__ __noinline__ void sp_store_wide(uint32_t lane, typename T::A *sums, typename T::A *out, uint32_t n,
                                           int by)
{
    if (by != 1)
        sp_divide_sums<T>(lane, sums, n, by);
#pragma unroll 1
    for (uint32_t i = lane; i < n; i += 32)
        out[i] = sums[i];
    __syncwarp();
}

// An owner. It goes through the slices of its shard, one at a time.
template <class T, class G, bool REMOTE> struct sp_owner {
    typedef typename G::U U;
    typedef typename T::A A;
    typedef typename sp_progress_of<REMOTE>::type progress_table;
    const sp_warp_context<REMOTE> &ctx;
    sp_work_split split;
    sp_shard mine;
    sp_own_smem &smem;
    progress_table &progress;
    sp_send_side<REMOTE> send_side;
    sp_recv_side<G, false, REMOTE>
        recv_side; // with bulk copies it was slower: they queue up behind the feeders'

    __device__ __forceinline__ sp_owner(const sp_warp_context<REMOTE> &context, sp_own_smem &r,
                                        progress_table &b)
        : ctx(context), split(context.a, context.q), mine(split.shard(context.me())), smem(r), progress(b),
          send_side(context, r.send_side, &b),
          recv_side(context, SP_INBOX_INPUT, r.pool,
                    is_sum() ? SP_OWN_POOL_BYTES : SP_OWN_POOL_BYTES - SP_LISTED_BYTES, nullptr,
                    sp_batch_links(context.n_peers))
    {
    }
    __device__ __forceinline__ bool is_sum() const
    {
        return ctx.a.redop == SPCCL_SUM || ctx.a.redop == SPCCL_AVG;
    }
    __device__ __forceinline__ const U *own(uint32_t t) const
    {
        return (const U *)ctx.a.in + mine.base + split.start(t);
    }
    // Ask for the own contribution to slice t, so that it lies in L2 when it is added.
    __device__ __forceinline__ void prefetch_own(uint32_t t) const
    {
        uint32_t bytes = split.elems(mine, t) * (uint32_t)sizeof(U);
#pragma unroll 1
        for (uint32_t i = ctx.lane * 128; i < bytes; i += 32 * 128) // one bulk prefetch was slower
            sp_prefetch_l2((const uint8_t *)own(t) + i);
    }
    // In a oneshot all-reduce the output may be the feeder's input: wait until the feeder has loaded slice t.
    // False: the feeder ended without it.
    __device__ __forceinline__ bool is_fed(uint32_t t) const
    {
        bool ended = false;
        if (!sp_one_input(ctx.a) || ctx.n_peers == 0)
            return true;
        for (;;) {
            if (sp_load_acquire_cta(&progress.fed) > t)
                return true;
            if (ended)
                return false;
            ended = sp_load_acquire_cta(&progress.done[SP_ROLE_FEED]) != 0;
            __nanosleep(50);
        }
    }
    // Does this warp take all contributions of a slice at once? Otherwise as many as there are entries at a time.
    __device__ __forceinline__ bool takes_all() const
    {
        return !REMOTE || recv_side.n_entries() == ctx.n_peers;
    }
    // With REMOTE: before the contribution of `rank` is added. Take the next contributions, if it is not among those that
    // were taken last, and give credit for these. bad: as in recv_side.give_credit. False: there is a report.
    __device__ __forceinline__ bool take_next(uint32_t t, uint32_t n, uint32_t rank, uint32_t bad)
    {
        uint32_t k = rank - (rank > ctx.me() ? 1 : 0);
        if (takes_all() || rank == ctx.me() || k == 0 || k % recv_side.n_entries() != 0)
            return true;
        if (!recv_side.give_credit(t, bad, recv_side.queue))
            return false;
        recv_side.select(k);
        return recv_side.take(t, n);
    }
    // Add one rank's contribution to slice t of n elements. 0, or 1 + the slot whose frame this lane found
    // broken.
    template <class SINK>
    __device__ __forceinline__ uint32_t accumulate(uint32_t t, uint32_t n, uint32_t rank, SINK &sink)
    {
        uint32_t k = rank - (rank > ctx.me() ? 1 : 0);
        if (rank != ctx.me())
            return sp_decode<G>(ctx.lane, recv_side.view(k), sink) ? 0 : recv_side.slot_of(k) + 1;
        sp_decode_own<G>(ctx.lane, own(t), n, sink);
        return 0;
    }
    // Add all contributions, in rank order. *worst = 0, or 1 + the slot of a broken frame. False: there is a report.
    __device__ __forceinline__ bool accumulate_all(uint32_t t, uint32_t n, uint32_t *worst)
    {
        uint32_t bad = 0;
        if (is_sum()) {
            sp_sink_add<T, G> sink = {(A *)smem.sums};
            for (uint32_t rank = 0; rank < (uint32_t)ctx.a.world_size; rank++) {
                if constexpr (REMOTE)
                    if (!take_next(t, n, rank, bad))
                        return false;
                bad = max(bad, accumulate(t, n, rank, sink));
                __syncwarp();
            }
            *worst = bad;
            return true;
        }
        uint32_t *listed = (uint32_t *)(smem.pool + SP_OWN_POOL_BYTES - SP_LISTED_BYTES);
        sp_sink_combine<T, G> sink = {(A *)smem.sums, listed, ctx.a.redop, true};
        for (uint32_t rank = 0; rank < (uint32_t)ctx.a.world_size; rank++, sink.first = false) {
            if constexpr (REMOTE)
                if (!take_next(t, n, rank, bad))
                    return false;
            sp_zero_units(ctx.lane, listed, SP_LISTED_BYTES / 16);
            __syncwarp();
            bad = max(bad, accumulate(t, n, rank, sink));
            sink.rest(ctx.lane, n);
        }
        *worst = bad;
        return true;
    }
    // AVG by a power of two: 1 / world size, which is exact. The product then has the bits of the quotient, as
    // both round the same number once. Otherwise 0.
    __device__ __forceinline__ A reciprocal() const
    {
        int by = ctx.a.world_size;
        return T::is_float && ctx.a.redop == SPCCL_AVG && (by & (by - 1)) == 0 ? (A)1 / (A)by : (A)0;
    }
    // Round the sums to 16-bit floats. In ascending order: results are smaller than sums, so none overwrites a
    // sum that is still needed.
    __device__ __forceinline__ void narrow(uint32_t n) const
    {
        constexpr uint32_t N = G::K * sizeof(A) / 16;
        for (uint32_t u = ctx.lane; u < sp_filled<G>(n) / G::K; u += 32) {
            union {
                uint4 v;
                uint32_t w[4];
            } x;
            union {
                uint4 v[N];
                A e[G::K];
            } sum;
#pragma unroll
            for (uint32_t j = 0; j < N; j++)
                sum.v[j] = ((const uint4 *)smem.sums)[u * N + j];
            sp_narrow_each<T, G::K>(sum.e, x.w);
            __syncwarp();
            ((uint4 *)smem.sums)[u] = x.v;
            __syncwarp();
        }
    }
    // Divide (AVG) and round the sums to the dtype, in place; zeros follow up to sp_filled(n).
    __device__ __forceinline__ void finish(uint32_t n) const
    {
        A by = reciprocal();
        if (ctx.a.redop == SPCCL_AVG && by == 0)
            sp_divide_sums<T>(ctx.lane, (A *)smem.sums, n, ctx.a.world_size);
        if constexpr (sizeof(A) != sizeof(U)) {
            if (by != 0)
                sp_scale_and_narrow<T, G>(ctx.lane, (uint4 *)smem.sums, by);
            else
                narrow(n);
        } else if constexpr (T::is_float) {
            if (by != 0)
                sp_scale_sums<A, G::UNITS>(ctx.lane, (uint4 *)smem.sums, by);
        }
        __syncwarp();
        sp_fill<G>(ctx.lane, (U *)smem.sums, n);
        __syncwarp();
    }
    __device__ __forceinline__ bool slice(uint32_t t)
    {
        sp_range r = split.range(mine, t);
        uint32_t bad, parity;
        bool sends = ctx.n_peers != 0 && sp_has_results(ctx.a);
        prefetch_own(t + 1);
        sp_slice_stored(ctx.lane);
        sp_zero_units(ctx.lane, smem.sums, G::UNITS * sizeof(A) / sizeof(U));
        if (ctx.n_peers != 0) {
            if constexpr (REMOTE)
                recv_side.select(0);
            if (!recv_side.take(t, r.n))
                return false;
            if (is_sum() && takes_all()) // else the pool is too small for two slices
                recv_side.prefetch(split.elems(mine, t + 1));
        }
        if (!is_fed(t))
            return false;
        __syncwarp();
        if (!accumulate_all(t, r.n, &bad))
            return false;
        if (sizeof(A) != sizeof(U) && ctx.a.wide != 0) {
            if constexpr (sizeof(A) != sizeof(U))
                sp_store_wide<T>(ctx.lane, (A *)smem.sums, (A *)ctx.a.out + split.own_start(mine, t), r.n,
                                 ctx.a.redop == SPCCL_AVG ? ctx.a.world_size : 1);
        } else {
            finish(r.n);
            sp_slice_store<G>(ctx.lane, (const U *)smem.sums, (U *)ctx.a.out + split.own_start(mine, t), r.n);
        }
        parity = is_sum() ? recv_side.parity : 0;
        if (ctx.n_peers != 0 && !recv_side.give_credit(t, bad, recv_side.queue))
            return false;
        if (ctx.lane == 0)
            sp_store_release_cta(&progress.taken, t + 1);
        // The half of the pool that held the contributions is the staging buffer of the result.
        return !sends || send_side.template send<G>((const U *)smem.sums, r.n, recv_side.half_of(parity),
                                                    {SP_INBOX_RESULT, 0, 0, ctx.n_peers}, t);
    }
    __device__ __forceinline__ void run()
    {
        prefetch_own(0);
        bool ok = true;
        for (uint32_t t = 0; ok && t < split.n_slices && split.elems(mine, t) != 0; t++)
            ok = slice(t);
        recv_side.close(ok);
        if (ok)
            send_side.close(sp_has_results(ctx.a) ? 1u << SP_INBOX_RESULT : 0);
    }
};

// Reduce-scatter and all-reduce. A oneshot all-reduce runs like a reduce-scatter in which the array is every
// rank's shard. REMOTE: for groups on several hosts; the last warp is then the copy warp.
template <int DTYPE, bool REMOTE>
__global__ void __launch_bounds__(SP_CTA_THREADS, 1) sp_reduce_kernel(const __grid_constant__ sp_fused_args a)
{
    if constexpr (REMOTE)
        if (sp_is_copy_warp(a))
            return;
    typedef sp_elem<DTYPE> T;
    typedef typename sp_reduce_geometry<DTYPE>::G G;
    uint32_t n = a.workers_per_cta, warp = sp_warp_index();
    sp_warp_counts counts(a.op, n, a.n_served);
    sp_block_smem<REMOTE> smem(counts, n);
    if (sp_block_begin<REMOTE>(a, counts, smem))
        return;
    if (warp < counts.n_feed) {
        uint32_t w = warp * a.n_served, n_served = min(a.n_served, n - w);
        sp_feed<G, true, REMOTE>(sp_warp_context<REMOTE>(a, blockIdx.x * n + w), n_served, smem.feed[warp],
                                 smem.progress + w);
        for (uint32_t i = 0; i < n_served; i++)
            sp_role_done(smem.progress[w + i], SP_ROLE_FEED);
    } else if (warp - counts.n_feed < counts.n_own) {
        uint32_t w = warp - counts.n_feed;
        sp_warp_context<REMOTE> ctx(a, blockIdx.x * n + w);
        sp_owner<T, G, REMOTE>(ctx, smem.own[w], smem.progress[w]).run();
        sp_role_done(smem.progress[w], SP_ROLE_OWN);
    } else {
        uint32_t w = warp - counts.n_feed - counts.n_own;
        if constexpr (REMOTE) {
            sp_warp_context<REMOTE> ctx(a, blockIdx.x * n + w);
            sp_host_gatherer<G, true>(ctx, smem.gather[w], smem.progress[w]).run(smem.progress[w].gathered);
        } else {
            sp_gather<G, true>(sp_warp_context<false>(a, blockIdx.x * n + w), smem.gather[w],
                               smem.progress[w], smem.progress[w].gathered);
        }
        sp_role_done(smem.progress[w], SP_ROLE_GATHER);
    }
}

#endif
