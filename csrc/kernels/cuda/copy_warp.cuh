// copy_warp.cuh - the copy warp: one more warp of each CTA, in groups with peers on other hosts (contract/remote.h).
// It copies what these peers sent from host memory to this GPU's inbox: frames, tails, credits. Frames that the network
// device wrote into the inbox are there already (sp_fused_remote.direct). All other warps read and poll the inbox
// alone, as in groups of one host.
//
// Many threads that poll host memory slow each other down: their reads queue up in front of PCIe. There are two cases.
// - Many rings: only the copy warp of CTA 0 polls host memory: the change counters of this launch's workers, 32 bytes
//   for 64 workers. It copies those that changed to GPU memory, where the other copy warps poll them. A copy warp reads
//   positions from host memory when it starts, and after a change counter of its workers changed.
// - Few rings: every copy warp polls the positions of its own workers in host memory, and nobody reads change counters.
//   A frame then comes a few microseconds earlier.
#ifndef SP_COPY_WARP_CUH
#define SP_COPY_WARP_CUH

#include "kernels/cuda/fused.cuh"

// The case of few rings: at most so many in a launch. With 32 rings (2 ranks, 64 KiB) both cases took the same time.
#define SP_FEW_RINGS 32u

// A comment that starts with L: the member's value differs from lane to lane (wait.cuh). Lane i serves the links i, i + 32 ... of the pinned areas.
template <uint32_t WORKERS> struct sp_copy_warp {
    const sp_fused_args &a;
    uint32_t lane, n, q0; // n: workers of this CTA; q0: the first one's number
    uint32_t n_links;     // to peers on other hosts
    bool few_rings;       // the copy warps poll positions
    uint32_t n_polled;    // change counters that CTA 0 polls: those of the workers of this launch, or none
    uint32_t counted;     // L: change counter number q0 / SP_REMOTE_COUNTER_WORKERS + lane, as last seen

    __device__ __forceinline__ explicit sp_copy_warp(const sp_fused_args &args)
        : a(args), lane(threadIdx.x % 32), n(args.workers_per_cta), q0(blockIdx.x * args.workers_per_cta),
          n_links(sp_area_links(&args.remote.pinned)),
          few_rings(args.n_ctas * args.workers_per_cta * n_links <= SP_FEW_RINGS),
          n_polled(few_rings ? 0
                             : (args.n_ctas * args.workers_per_cta + SP_REMOTE_COUNTER_WORKERS - 1) /
                                   SP_REMOTE_COUNTER_WORKERS),
          counted(0)
    {
    }
    __device__ __forceinline__ uint8_t *inbox() const
    {
        return sp_own_memory<true>::inbox(a);
    }
    __device__ __forceinline__ uint64_t *word(size_t off) const
    {
        return (uint64_t *)(inbox() + off);
    }
    __device__ __forceinline__ const uint64_t *host_word(size_t off) const
    {
        return (const uint64_t *)(a.remote.host_inbox + off);
    }
    // In CTA 0: copy the change counters that differ from host to GPU memory. A read of host memory takes more than a
    // microsecond, so a lane has several under way.
    __device__ __forceinline__ void poll_host() const
    {
        const uint32_t AT_ONCE = 4;
        for (uint32_t first = lane; first < n_polled; first += 32 * AT_ONCE) {
            uint32_t counter[AT_ONCE], seen[AT_ONCE];
            bool changed = false;
#pragma unroll
            for (uint32_t k = 0; k < AT_ONCE; k++) {
                uint32_t i = first + 32 * k;
                counter[k] = i < n_polled ? sp_load_relaxed_sys(a.remote.counters + i) : 0;
                seen[k] = i < n_polled ? sp_load_relaxed_sys(a.remote.seen + i) : 0;
            }
#pragma unroll
            for (uint32_t k = 0; k < AT_ONCE; k++)
                changed |= counter[k] != seen[k];
            if (!changed)
                continue;
            sp_fence_sys(); // who sees the counter there also sees what the host wrote before it
#pragma unroll
            for (uint32_t k = 0; k < AT_ONCE; k++)
                if (counter[k] != seen[k])
                    sp_store_relaxed_sys(a.remote.seen + first + 32 * k, counter[k]);
        }
        __syncwarp();
    }
    // Has a change counter of this CTA's workers changed?
    __device__ __forceinline__ bool has_changed()
    {
        uint32_t first = q0 / SP_REMOTE_COUNTER_WORKERS, last = (q0 + n - 1) / SP_REMOTE_COUNTER_WORKERS,
                 now = counted;
        bool changed;
        if (first + lane <= last)
            now = sp_load_relaxed_sys(a.remote.seen + first + lane);
        changed = __any_sync(~0u, now != counted);
        counted = now;
        return changed;
    }
    // Copy the frames from position `from` to `to` of one ring from host memory to the inbox. link: in the pinned areas.
    __device__ __forceinline__ void copy(uint32_t link, uint32_t w, uint64_t from, uint64_t to) const
    {
        uint32_t ring_bytes = a.remote.inbox.ring_bytes, off = (uint32_t)(from % ring_bytes);
        uint32_t bytes = (uint32_t)(to - from);
        const uint8_t *src = a.remote.host_inbox + sp_area_ring_off(&a.remote.pinned, link, q0 + w);
        uint8_t *dst = inbox() + sp_area_ring_off(&a.remote.inbox, a.remote.inbox_link[link], q0 + w);
        for (uint32_t i = lane * 16; i < bytes; i += 4 * 512) {
            uint4 v[4];
#pragma unroll
            for (uint32_t k = 0; k < 4; k++) {
                uint32_t at = off + i + k * 512;
                if (i + k * 512 < bytes)
                    v[k] = sp_load16_sys(src + (at < ring_bytes ? at : at - ring_bytes));
            }
#pragma unroll
            for (uint32_t k = 0; k < 4; k++) {
                uint32_t at = off + i + k * 512;
                if (i + k * 512 < bytes)
                    *(uint4 *)(dst + (at < ring_bytes ? at : at - ring_bytes)) = v[k];
            }
        }
    }
    // Copy everything that has come for this CTA's workers over the links row, row + 1 ... row + 31. Has any frame come?
    __device__ __forceinline__ bool bring(uint32_t row)
    {
        uint32_t link = row + lane, here = link < n_links ? a.remote.inbox_link[link] : 0;
        uint64_t *tails = word(sp_area_tail_off(&a.remote.inbox, here, q0));
        uint64_t *credits = word(sp_area_credit_off(&a.remote.inbox, here, q0));
        uint64_t now[WORKERS], arrived[WORKERS], credit[WORKERS], given[WORKERS];
        bool new_tails = false, new_credits = false;
        bool direct = link < n_links && (a.remote.direct[row / 32] >> lane & 1) != 0;
        // All reads are under way before the first is needed.
#pragma unroll
        for (uint32_t w = 0; w < WORKERS; w++) {
            now[w] = arrived[w] = credit[w] = given[w] = 0;
            if (link < n_links && w < n) {
                now[w] = sp_load_relaxed_sys(host_word(sp_host_tail_off(&a.remote.pinned, link, q0 + w)));
                credit[w] =
                    sp_load_relaxed_sys(host_word(sp_host_credit_off(&a.remote.pinned, link, q0 + w)));
                arrived[w] = sp_load_relaxed_sys(tails + w); // no other warp writes tails and credits
                given[w] = sp_load_relaxed_sys(credits + w);
            }
        }
#pragma unroll
        for (uint32_t w = 0; w < WORKERS; w++) {
            new_tails |= now[w] != arrived[w];
            new_credits |= credit[w] != given[w];
        }
        if (!__any_sync(~0u, new_tails || new_credits))
            return false;
        sp_fence_sys(); // positions were read before frames are, and before others see the credits
        __syncwarp();
#pragma unroll
        for (uint32_t w = 0; w < WORKERS; w++)
            if (credit[w] != given[w])
                sp_store_relaxed_sys(credits + w, credit[w]);
        if (!__any_sync(~0u, new_tails))
            return false;
#pragma unroll
        for (uint32_t w = 0; w < WORKERS; w++) {
            uint32_t lanes = __ballot_sync(~0u, now[w] != arrived[w] && !direct);
            while (lanes != 0) {
                uint32_t from = (uint32_t)__ffs((int)lanes) - 1;
                lanes &= lanes - 1;
                copy(row + from, w, __shfl_sync(~0u, arrived[w], from), __shfl_sync(~0u, now[w], from));
                if (blockIdx.x == 0) // a long copy must not delay the other CTAs
                    poll_host();
            }
        }
        __syncwarp();
        sp_fence_sys();
#pragma unroll
        for (uint32_t w = 0; w < WORKERS; w++)
            if (now[w] != arrived[w])
                sp_store_relaxed_sys(tails + w, now[w]);
        return true;
    }
    __device__ __forceinline__ bool bring_all()
    {
        bool any = false;
        if (!few_rings)
            sp_fence_sys(); // the counter was seen before what follows
        for (uint32_t row = 0; row < n_links; row += 32)
            any |= bring(row);
        return any;
    }
    // CTA 0 goes on copying change counters, if there are many rings, until the copy warps of all CTAs have ended. Then
    // it tells the host.
    __device__ __forceinline__ void end() const
    {
        uint32_t *n_ended = a.remote.seen + a.remote.n_counters;
        __syncwarp();
        if (lane == 0) {
            sp_fence_sys();
            atomicAdd(n_ended, 1u);
        }
        if (blockIdx.x != 0)
            return;
        while (__shfl_sync(~0u, lane == 0 ? sp_load_relaxed_sys(n_ended) : 0, 0) != a.n_ctas) {
            poll_host();
            __nanosleep(200);
        }
        if (lane == 0) {
            sp_store_relaxed_sys(n_ended, 0);
            sp_fence_sys();
            sp_store_relaxed_sys(a.remote.ended, a.seq + 1);
        }
    }
    // Until all warps of this CTA that wait for frames or space have ended. Each of their waits has a deadline.
    __device__ __forceinline__ void run(const sp_remote_progress *progress)
    {
        bool look = true; // something may have come since the last launch
        while (!sp_all_done(progress, n, lane)) {
            bool moved = false;
            if (blockIdx.x == 0)
                poll_host();
            if (few_rings || has_changed() || look)
                moved = bring_all();
            if (!moved)
                __nanosleep(few_rings ? 50 : 200);
            look = false;
        }
        end();
    }
};

inline __device__ __noinline__ void sp_copy_warp_run(const sp_fused_args &a,
                                                     const sp_remote_progress *progress)
{
    sp_copy_warp<SP_CTA_WORKERS> copy_warp(a);
    copy_warp.run(progress);
}

// The first call of every warp of a kernel for groups on several hosts. The last warp becomes the copy warp; it returns
// true when all workers of the CTA are done. All other warps return false at once.
__device__ __forceinline__ bool sp_is_copy_warp(const sp_fused_args &a)
{
    sp_warp_counts counts(a.op, a.workers_per_cta, a.n_served);
    if (threadIdx.x / 32 != counts.total())
        return false;
    __syncthreads(); // that of sp_block_begin
    sp_copy_warp_run(a, sp_block_smem<true>(counts, a.workers_per_cta).progress);
    return true;
}

#endif
