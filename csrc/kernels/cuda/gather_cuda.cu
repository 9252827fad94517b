// gather_cuda.cu - all-gather and broadcast in one launch (docs/ALGORITHMS.md: The direct schedule on a GPU).
// Dtypes of the same size share a kernel, as elements are moved but never added.
//
// Least traffic of GPU memory: an all-gather reads a shard and writes the array. While frames are small, the
// rings stay in the L2 cache.
#include "kernels/cuda/fused.cuh"

// All-gather and broadcast of elements of BYTES bytes. A CTA has feeders (in a broadcast: or relays) and
// gatherers.
template <int BYTES>
__global__ void __launch_bounds__(SP_CTA_THREADS, 1) sp_gather_kernel(const __grid_constant__ sp_fused_args a)
{
    typedef sp_geometry<typename sp_unsigned<BYTES>::type, SP_INBOX_SLICE_BYTES> G;
    uint32_t n = a.workers_per_cta, warp = sp_warp_index();
    sp_warp_counts counts(a.op, n, a.n_served);
    sp_block_smem smem(counts, n);
    if (sp_block_begin(a, counts, smem.progress))
        return;
    if (warp < counts.n_feed) {
        uint32_t w = warp * a.n_served, n_served = min(a.n_served, n - w);
        sp_warp_context ctx(a, blockIdx.x * n + w);
        if (a.op == SP_FUSED_BROADCAST && a.rank != a.root)
            sp_relay<G>(ctx, smem.feed[warp], smem.progress[w]);
        else
            sp_feed<G, false>(ctx, n_served, smem.feed[warp], smem.progress + w);
        for (uint32_t i = 0; i < n_served; i++)
            sp_role_done(smem.progress[w + i], SP_ROLE_FEED);
    } else {
        uint32_t w = warp - counts.n_feed;
        sp_gather<G, false>(sp_warp_context(a, blockIdx.x * n + w), smem.gather[w], smem.progress[w],
                            smem.progress[w].taken);
        sp_role_done(smem.progress[w], SP_ROLE_GATHER);
    }
}

sp_fused_kernel sp_gather_kernel_of(size_t elem_bytes)
{
    switch (elem_bytes) {
    case 1:
        return sp_gather_kernel<1>;
    case 2:
        return sp_gather_kernel<2>;
    case 4:
        return sp_gather_kernel<4>;
    default:
        return sp_gather_kernel<8>;
    }
}
