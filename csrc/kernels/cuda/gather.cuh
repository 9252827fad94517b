// gather.cuh - the kernel of all-gathers and broadcasts in one launch (docs/ALGORITHMS.md: The direct schedule on a
// GPU). Dtypes of the same size share a kernel, as elements are moved but never added.
//
// Least traffic of GPU memory: an all-gather reads a shard and writes the array. While frames are small, the
// rings stay in the L2 cache.
#ifndef SP_GATHER_CUH
#define SP_GATHER_CUH

#include "kernels/cuda/copy_warp.cuh"
#include "kernels/cuda/gather_hosts.cuh"

// All-gather and broadcast of elements of BYTES bytes. A CTA has feeders (in a broadcast: or relays) and
// gatherers. REMOTE: for groups on several hosts; the last warp is then the copy warp.
template <int BYTES, bool REMOTE>
__global__ void __launch_bounds__(SP_CTA_THREADS, 1) sp_gather_kernel(const __grid_constant__ sp_fused_args a)
{
    typedef sp_geometry<typename sp_unsigned<BYTES>::type, SP_INBOX_SLICE_BYTES> G;
    if constexpr (REMOTE)
        if (sp_is_copy_warp(a))
            return;
    uint32_t n = a.workers_per_cta, warp = sp_warp_index();
    sp_warp_counts counts(a.op, n, a.n_served);
    sp_block_smem<REMOTE> smem(counts, n);
    if (sp_block_begin<REMOTE>(a, counts, smem))
        return;
    if (warp < counts.n_feed) {
        uint32_t w = warp * a.n_served, n_served = min(a.n_served, n - w);
        sp_warp_context<REMOTE> ctx(a, blockIdx.x * n + w);
        if (a.op == SP_FUSED_BROADCAST && a.rank != a.root)
            sp_relay<G, REMOTE>(ctx, smem.feed[warp], smem.progress[w]);
        else
            sp_feed<G, false, REMOTE>(ctx, n_served, smem.feed[warp], smem.progress + w);
        for (uint32_t i = 0; i < n_served; i++)
            sp_role_done(smem.progress[w + i], SP_ROLE_FEED);
    } else {
        uint32_t w = warp - counts.n_feed;
        if constexpr (REMOTE) {
            sp_warp_context<REMOTE> ctx(a, blockIdx.x * n + w);
            sp_host_gatherer<G, false>(ctx, smem.gather[w], smem.progress[w]).run(smem.progress[w].taken);
        } else {
            sp_gather<G, false>(sp_warp_context<false>(a, blockIdx.x * n + w), smem.gather[w],
                                smem.progress[w], smem.progress[w].taken);
        }
        sp_role_done(smem.progress[w], SP_ROLE_GATHER);
    }
}

#endif
