// notifier.cuh - the last warp of a CTA (in groups on several hosts the one before the copy warp) tells the peers how far
// frames have been written.
//
// A fence between GPUs takes microseconds, so the workers do not wait for it. The notifier reads from the
// progress tables how far the workers have written. One fence then orders the writes of all workers of the
// CTA before the tails, which the notifier writes to the peers.
#ifndef SP_NOTIFIER_CUH
#define SP_NOTIFIER_CUH

#include "kernels/cuda/send_side.cuh"

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
        if (lane < SP_GPU_HOST_RANKS_MAX)
            progress[w].cleared[lane] = 0;
        if (lane == 0)
            progress[w].fed = progress[w].taken = progress[w].gathered = 0;
    }
}

__device__ __forceinline__ void sp_progress_init(const sp_fused_args &a, sp_remote_progress *progress,
                                                 bool owns, bool gathers)
{
    uint32_t lane = threadIdx.x % 32, n_links = sp_area_links(&a.remote.inbox);
    for (uint32_t w = threadIdx.x / 32; w < a.workers_per_cta; w += blockDim.x / 32) {
        const sp_remote_state *state = sp_own_memory<true>::state(a, blockIdx.x * a.workers_per_cta + w);
        for (uint32_t link = lane; link < n_links; link += 32)
            progress[w].posted[link] = progress[w].told[link] = (uint32_t)state->told[link];
        if (lane < SP_ROLES)
            progress[w].done[lane] = (lane == SP_ROLE_OWN && !owns) || (lane == SP_ROLE_GATHER && !gathers);
        for (uint32_t slot = lane; slot < (uint32_t)a.world_size; slot += 32)
            progress[w].cleared[slot] = 0;
        if (lane == 0)
            progress[w].fed = progress[w].taken = progress[w].gathered = 0;
    }
}

// A fence that takes longer than this shows a busy link.
#define SP_FENCE_LONG_NS 4000u

// Have all roles of the CTA ended?
template <class PROGRESS>
__device__ __forceinline__ bool sp_all_done(const PROGRESS *progress, uint32_t n_workers, uint32_t lane)
{
    bool done = true;
    for (uint32_t i = lane; i < n_workers * SP_ROLES; i += 32)
        done &= sp_load_acquire_cta(&progress[i / SP_ROLES].done[i % SP_ROLES]) != 0;
    done = __all_sync(~0u, done);
    __syncwarp(); // orders all lanes' reads of `done` before the next reads of `posted`
    return done;
}

// WORKERS: the most workers of a CTA.
template <uint32_t WORKERS> struct sp_notifier {
    const sp_fused_args &a;
    uint32_t lane;
    bool linked;
    uint64_t *tails;             // L: the peer's tail of the CTA's first worker
    uint64_t announced[WORKERS]; // L: the position last written to the peer's tail

    // Before any warp posts a position; __syncthreads must follow.
    __device__ __forceinline__ explicit sp_notifier(const sp_fused_args &args)
        : a(args), lane(threadIdx.x % 32), linked(lane % 16 < (uint32_t)args.world_size - 1), tails(nullptr)
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
    // Until all warps have posted their last position and the peers know it.
    __device__ __forceinline__ void run(const sp_progress *progress)
    {
        uint32_t now[WORKERS];
        bool quiet = true; // no position changed in the last round
        for (;;) {
            bool last = quiet && sp_all_done(progress, a.workers_per_cta, lane), changed = false;
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
            // Wait, so that the next fence serves more frames.
            if (took > SP_FENCE_LONG_NS)
                __nanosleep(min(took, 8000u));
        }
    }
};

// The same in groups on several hosts. Lane i has the links i, i + 32, i + 64.
struct sp_remote_notifier {
    static constexpr uint32_t ROWS = (SP_REMOTE_LINKS_MAX + 31) / 32;
    const sp_fused_args &a;
    uint32_t lane, n_links, q0; // q0: the CTA's first worker
    uint64_t *tails[ROWS];      // L: the peer's tail of worker q0
    uint32_t changed[ROWS];     // L: a bit for each worker whose position is to be announced

    __device__ __forceinline__ explicit sp_remote_notifier(const sp_fused_args &args)
        : a(args), lane(threadIdx.x % 32), n_links(sp_area_links(&args.remote.inbox)),
          q0(blockIdx.x * args.workers_per_cta)
    {
#pragma unroll
        for (uint32_t row = 0; row < ROWS; row++) {
            uint32_t link = row * 32 + lane, queue = 0;
            tails[row] = nullptr;
            changed[row] = 0;
            if (link >= n_links)
                continue;
            while (link >= a.remote.inbox.first[queue + 1])
                queue++;
            tails[row] = sp_remote_link(a, queue, link - a.remote.inbox.first[queue]).tail(q0);
        }
    }
    // Note in `told` and `changed` what was posted since the last call. True if there is anything.
    __device__ __forceinline__ bool look(sp_remote_progress *progress)
    {
        bool any = false;
#pragma unroll
        for (uint32_t row = 0; row < ROWS; row++) {
            uint32_t link = row * 32 + lane;
            for (uint32_t w = 0; link < n_links && w < a.workers_per_cta; w++) {
                uint32_t now = sp_load_acquire_cta(&progress[w].posted[link]);
                if (now == progress[w].told[link])
                    continue;
                progress[w].told[link] = now;
                changed[row] |= 1u << w;
                any = true;
            }
        }
        return __any_sync(~0u, any);
    }
    // After `look` and a fence.
    __device__ __forceinline__ void announce(const sp_remote_progress *progress)
    {
#pragma unroll
        for (uint32_t row = 0; row < ROWS; row++) {
            uint32_t link = row * 32 + lane;
            for (; changed[row] != 0; changed[row] &= changed[row] - 1) {
                uint32_t w = (uint32_t)__ffs((int)changed[row]) - 1;
                uint64_t *told = &sp_own_memory<true>::state(a, q0 + w)->told[link];
                uint64_t now = *told + (progress[w].told[link] - (uint32_t)*told);
                *told = now; // positions grow by less than 4 GiB at a time
                sp_store_relaxed_sys(tails[row] + w, now);
            }
        }
        __syncwarp();
    }
    // Until all warps have posted their last position and the peers know it.
    __device__ __forceinline__ void run(sp_remote_progress *progress)
    {
        bool quiet = true; // no position changed in the last round
        for (;;) {
            bool last = quiet && sp_all_done(progress, a.workers_per_cta, lane);
            quiet = !look(progress);
            if (quiet) {
                if (last)
                    return;
                __nanosleep(50);
                continue;
            }
            uint64_t before = sp_clock_ns();
            sp_fence_sys();
            uint32_t took = (uint32_t)(sp_clock_ns() - before);
            announce(progress);
            if (took > SP_FENCE_LONG_NS) // wait, so that the next fence serves more frames
                __nanosleep(min(took, 8000u));
        }
    }
};

#endif
