// wait.cuh - the only loop on the GPU that waits for another GPU, and the report that a kernel writes when it
// gives up.
#ifndef SP_WAIT_CUH
#define SP_WAIT_CUH

#include "core/contract/gpu.h"
#include "kernels/cuda/ptx.cuh"

// What every role of a worker knows: the arguments, the worker, and which link belongs to which lane. Lane
// 16 * queue + slot of the warp has the link to the peer in `slot` through that queue. (The lanes of a send
// side of two workers are divided otherwise: send_side.cuh.) In these files a comment that starts with L
// marks a member whose value differs from lane to lane. All other members are the same in all lanes.
static_assert(SP_INBOX_QUEUES == 2 && SP_GPU_HOST_RANKS_MAX == 16, "each link has a lane of the warp");

// This rank's inbox, and the state of one of its workers. REMOTE: in a group on several hosts.
template <bool REMOTE> struct sp_own_memory {
    typedef sp_inbox_state state_type;
    __device__ __forceinline__ static uint8_t *inbox(const sp_fused_args &a)
    {
        return a.inboxes[a.rank];
    }
    __device__ __forceinline__ static sp_inbox_state *state(const sp_fused_args &a, uint32_t worker)
    {
        return (sp_inbox_state *)(inbox(a) + sp_inbox_state_off(a.shape, worker));
    }
};
template <> struct sp_own_memory<true> {
    typedef sp_remote_state state_type;
    __device__ __forceinline__ static uint8_t *inbox(const sp_fused_args &a)
    {
        return a.remote.inboxes[a.rank];
    }
    __device__ __forceinline__ static sp_remote_state *state(const sp_fused_args &a, uint32_t worker)
    {
        return (sp_remote_state *)(inbox(a) + sp_remote_state_off(&a.remote.inbox, worker));
    }
};

template <bool REMOTE> struct sp_warp_context {
    const sp_fused_args &a;
    uint32_t lane, q, n_peers; // q: number of the worker

    __device__ __forceinline__ sp_warp_context(const sp_fused_args &args, uint32_t worker)
        : a(args), lane(threadIdx.x % 32), q(worker), n_peers((uint32_t)args.world_size - 1)
    {
    }
    __device__ __forceinline__ uint32_t me() const
    {
        return (uint32_t)a.rank;
    }
    __device__ __forceinline__ uint32_t peer(uint32_t slot) const
    {
        return sp_inbox_peer((uint32_t)a.rank, slot, (uint32_t)a.world_size);
    }
    // This rank's slot, seen from the peer in `slot`.
    __device__ __forceinline__ uint32_t slot_there(uint32_t slot) const
    {
        return n_peers - 1 - slot;
    }
    __device__ __forceinline__ uint8_t *inbox() const
    {
        return sp_own_memory<REMOTE>::inbox(a);
    }
    __device__ __forceinline__ typename sp_own_memory<REMOTE>::state_type *state(uint32_t worker) const
    {
        return sp_own_memory<REMOTE>::state(a, worker);
    }
    __device__ __forceinline__ uint32_t queue() const // L
    {
        return lane / 16;
    }
    __device__ __forceinline__ uint32_t slot() const // L
    {
        return lane % 16;
    }
    // L: does this lane have a link of queue `which`?
    __device__ __forceinline__ bool is_mine(uint32_t which) const
    {
        return queue() == which && slot() < n_peers;
    }
    __device__ __forceinline__ uint64_t *word(size_t off) const
    {
        return (uint64_t *)(inbox() + off);
    }
};

// Report what went wrong, and end all waits of this rank. Only the first worker that fails writes a report.
template <bool REMOTE>
__device__ __noinline__ void sp_report(const sp_fused_args &a, uint32_t q, sp_gpu_fault fault, uint32_t queue,
                                       uint32_t slot, uint32_t slice, uint64_t wanted, uint64_t seen,
                                       uint32_t detail)
{
    sp_gpu_report *r = &a.control->report;
    auto *first = sp_own_memory<REMOTE>::state(a, 0);
    if (atomicCAS(&first->claimed, 0u, 1 + q) == 0) {
        r->claimed = 1 + q;
        r->worker = q;
        r->peer = sp_inbox_peer((uint32_t)a.rank, slot, (uint32_t)a.world_size);
        r->queue = queue;
        r->detail = detail;
        r->seq = a.seq;
        r->slice = slice;
        r->wanted = wanted;
        r->seen = seen;
        __threadfence_system();
        sp_store_relaxed_sys(&r->fault, (uint32_t)fault);
    }
    sp_store_relaxed_sys(&a.control->abort, 1);
}

// How often a wait reads the abort flag. The flag is in host memory, behind PCIe. When a thousand workers
// waited at once, their reads queued up for longer than the wait itself (measured: 300 us each on 4 GPUs).
#define SP_ABORT_POLL_NS 2000000ull

// Wait until *word >= wanted (> 0) and return *word. One thread. Returns 0 if the abort flag is set or the
// deadline has passed; in the latter case a report was written.
template <bool REMOTE>
__device__ __noinline__ uint64_t sp_wait(const sp_fused_args &a, uint32_t q, const uint64_t *word,
                                         uint64_t wanted, sp_gpu_fault fault, uint32_t queue, uint32_t slot,
                                         uint32_t slice)
{
    uint64_t start = 0, looked = 0;
    for (uint32_t i = 1;; i++) {
        // Poll with relaxed loads, and acquire only once the value is there: each acquire empties the L1
        // cache.
        uint64_t v = sp_load_relaxed_sys(word), now;
        if (v >= wanted)
            return sp_load_acquire_sys(word);
        if (i % 64 != 0)
            continue;
        now = sp_clock_ns();
        if (start == 0)
            start = looked = now;
        if (now - looked < SP_ABORT_POLL_NS)
            continue;
        looked = now;
        if (sp_load_relaxed_sys(&a.control->abort) != 0)
            return 0;
        if (now - start > sp_gpu_wait_ns(a.timeout_ns, fault, queue)) {
            sp_report<REMOTE>(a, q, fault, queue, slot, slice, wanted, v, 0);
            return 0;
        }
    }
}

#endif
