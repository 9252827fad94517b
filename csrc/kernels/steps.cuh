// steps.cuh - the steps of a fused collective that move elements and add nothing: loading, sending
// contributions, passing on results, gathering. direct_cuda.cu says what a step is, adds the reductions, and
// launches.
#ifndef SP_STEPS_CUH
#define SP_STEPS_CUH

#include "decode.cuh"
#include "link.cuh"

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

#endif
