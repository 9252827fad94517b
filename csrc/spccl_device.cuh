// spccl_device.cuh - the functions of one-sided channels for kernels (CUDA C++17). spccl_channel.h has the structs,
// and the functions that make them; docs/CHANNELS.md has examples.
//
// Threads. A channel has two directions. In each, one thread at a time may signal, wait, flush, or put to a port
// channel. Different channels of a pair may be used at the same time, for example one by each thread block. Any number
// of threads may carry out one put to a memory channel together.
//
// Order. signal releases, wait acquires, both at system scope. A thread whose wait took a signal sees all that the
// peer's thread stored before it signalled. To pass on what other threads of the block put, call __syncthreads() before
// one thread signals (of a warp: __syncwarp()). After one thread has waited, call __syncthreads(); then all threads may
// read. Read a window with plain loads: not with __ldg, const __restrict__ or ld.global.nc.
//
// Failures. A function that returns false has failed, or the communicator is broken: the kernel should return. Every
// wait has a deadline (spccl_channels_get_memory). After a failure later waits of this rank end too, within some ms.
#ifndef SPCCL_DEVICE_CUH
#define SPCCL_DEVICE_CUH

#include "spccl_channel.h"

// ---- the primitives, which the kernels of the library use too (kernels/cuda/ptx.cuh). Not for users ----

// Tests define SPCCL_DEVICE_PRIMITIVES and bring their own, for GPUs in software.
#ifndef SPCCL_DEVICE_PRIMITIVES
namespace spccl_detail
{
__device__ __forceinline__ uint64_t sp_load_acquire_sys(const uint64_t *p)
{
    uint64_t v;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ uint64_t sp_load_relaxed_sys(const uint64_t *p)
{
    uint64_t v;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ uint32_t sp_load_relaxed_sys(const uint32_t *p)
{
    uint32_t v;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ void sp_store_relaxed_sys(uint32_t *p, uint32_t v)
{
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
__device__ __forceinline__ void sp_store_relaxed_sys(uint64_t *p, uint64_t v)
{
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
__device__ __forceinline__ void sp_fence_sys()
{
    asm volatile("fence.acq_rel.sys;" ::: "memory");
}
__device__ __forceinline__ void sp_store16(void *p, uint4 v)
{
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}
__device__ __forceinline__ uint64_t sp_clock_ns()
{
    uint64_t t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
}
} // namespace spccl_detail
#endif

namespace spccl_detail
{

// How often a wait reads the abort flag. The flag is in host memory, where the reads of many threads queue up in front
// of PCIe. SP_ABORT_POLL_NS of kernels/cuda/wait.cuh has what was measured.
constexpr uint64_t sp_abort_poll_ns = 2000000;

// Wait until *word >= wanted and return *word. One thread, which pauses for pause_ns between two loads. Returns 0 if the
// abort flag is set. Calls late(*word) and returns 0 after timeout() ns.
template <class TIMEOUT, class LATE>
__device__ __forceinline__ uint64_t sp_poll(const uint64_t *word, uint64_t wanted, const uint32_t *abort,
                                            uint32_t pause_ns, TIMEOUT timeout, LATE late)
{
    uint64_t start = 0, looked = 0;
    for (uint32_t i = 1;; i++) {
        // Poll with relaxed loads, and acquire only once the value is there: each acquire empties the L1
        // cache.
        uint64_t v = sp_load_relaxed_sys(word), now;
        if (v >= wanted)
            return sp_load_acquire_sys(word);
        if (pause_ns != 0)
            __nanosleep(pause_ns);
        if (i % 64 != 0)
            continue;
        now = sp_clock_ns();
        if (start == 0)
            start = looked = now;
        if (now - looked < sp_abort_poll_ns)
            continue;
        looked = now;
        if (sp_load_relaxed_sys(abort) != 0)
            return 0;
        if (now - start > timeout()) {
            late(v);
            return 0;
        }
    }
}

// Report a failure, unless this rank has reported one, and end all waits of this rank.
inline __device__ __noinline__ void sp_channel_fail(const spccl_channel_base &c, uint32_t fault,
                                                    uint64_t wanted, uint64_t seen)
{
    if (atomicCAS(c.claimed, 0u, 1u) == 0) {
        c.report->peer = c.peer;
        c.report->index = c.index;
        c.report->wanted = wanted;
        c.report->seen = seen;
        sp_fence_sys();
        sp_store_relaxed_sys(&c.report->fault, fault);
    }
    sp_store_relaxed_sys(c.abort, 1);
}

inline __device__ __noinline__ bool sp_channel_wait(const spccl_channel_base &c, const uint64_t *word,
                                                    uint64_t wanted, uint32_t fault, uint32_t pause_ns)
{
    return wanted == 0 || sp_poll(
                              word, wanted, c.abort, pause_ns, [&] { return c.timeout_ns; },
                              [&](uint64_t seen) { sp_channel_fail(c, fault, wanted, seen); }) != 0;
}

__device__ __forceinline__ bool sp_channel_check(const spccl_channel_base &c, uint64_t dst_off,
                                                 uint64_t bytes, bool aligned, bool reports)
{
    if (dst_off <= c.window_bytes && bytes <= c.window_bytes - dst_off && aligned && dst_off % 16 == 0 &&
        bytes % 16 == 0)
        return true;
    if (reports) // an end beyond 2^64 is reported as 2^64 - 1
        sp_channel_fail(c, SPCCL_CHANNEL_BAD_PUT, dst_off, bytes > ~dst_off ? ~(uint64_t)0 : dst_off + bytes);
    return false;
}

__device__ __forceinline__ bool sp_channel_take(const spccl_channel_base &c, uint32_t pause_ns)
{
    uint64_t wanted = c.state->signals_taken + 1;
    if (!sp_channel_wait(c, c.signals, wanted, SPCCL_CHANNEL_NO_SIGNAL, pause_ns))
        return false;
    c.state->signals_taken = wanted;
    return true;
}

// Words of port channels are in host memory: a thread that waits leaves PCIe to others.
constexpr uint32_t sp_port_pause_ns = 500;

// Write a trigger into the FIFO and tell the proxy.
inline __device__ __noinline__ bool sp_port_post(const spccl_port_channel &c, spccl_trigger trigger)
{
    spccl_channel_state *state = c.base.state;
    uint64_t n = state->triggers_posted;
    if (n - state->triggers_done >= c.fifo_triggers) {
        if (!sp_channel_wait(c.base, c.done, n + 1 - c.fifo_triggers, SPCCL_CHANNEL_NO_PROXY,
                             sp_port_pause_ns))
            return false;
        state->triggers_done = sp_load_relaxed_sys(c.done);
    }
    c.fifo[n % c.fifo_triggers] = trigger;
    state->triggers_posted = n + 1;
    sp_fence_sys(); // trigger and window first
    sp_store_relaxed_sys(c.posted, n + 1);
    return true;
}

} // namespace spccl_detail

// ---- memory channels ----

// Wait for the next signal of the peer; the first call waits for its first one, and each call takes one. One thread.
__device__ __forceinline__ bool spccl_wait(const spccl_memory_channel &c)
{
    return spccl_detail::sp_channel_take(c.base, 0);
}

// Copy `bytes` from `src`, any memory that this GPU can read, to offset dst_off of the peer's window. Threads number
// 0 to n_threads - 1 call it together and copy a part each; for a block: threadIdx.x and blockDim.x. src, dst_off and
// bytes are multiples of 16. Fails if thread is not below n_threads. src may be overwritten once all of them have
// returned and met at a barrier.
__device__ __forceinline__ bool spccl_put(const spccl_memory_channel &c, uint64_t dst_off, const void *src,
                                          uint64_t bytes, uint32_t thread, uint32_t n_threads)
{
    const uint4 *from = (const uint4 *)src;
    if (thread >= n_threads) { // with n_threads 0 the loops below would not end
        spccl_detail::sp_channel_fail(c.base, SPCCL_CHANNEL_BAD_THREAD, thread, n_threads);
        return false;
    }
    if (!spccl_detail::sp_channel_check(c.base, dst_off, bytes, (uintptr_t)src % 16 == 0, thread == 0))
        return false;
    uint8_t *to = c.peer_window + dst_off;
    uint64_t n = bytes / 16, i = thread, step = n_threads;
    // Four loads are under way before the first store: the compiler moves no load over a volatile store.
    for (; i + 3 * step < n; i += 4 * step) {
        uint4 v[4];
        for (int k = 0; k < 4; k++)
            v[k] = from[i + k * step];
        for (int k = 0; k < 4; k++)
            spccl_detail::sp_store16(to + (i + k * step) * 16, v[k]);
    }
    for (; i < n; i += step)
        spccl_detail::sp_store16(to + i * 16, from[i]);
    return true;
}

// Signal the peer: all that was put and stored before is there when its wait returns. One thread. Always true.
__device__ __forceinline__ bool spccl_signal(const spccl_memory_channel &c)
{
    uint64_t n = c.base.state->signals_sent + 1;
    c.base.state->signals_sent = n;
    spccl_detail::sp_fence_sys();
    spccl_detail::sp_store_relaxed_sys(c.peer_signals, n);
    return true;
}

// Let what was put before be seen before all that this thread stores later, by any means. One thread. signal does
// this too. Always true.
__device__ __forceinline__ bool spccl_flush(const spccl_memory_channel &)
{
    spccl_detail::sp_fence_sys();
    return true;
}

// ---- port channels ----

// As of a memory channel. It polls host memory over PCIe: let one thread of a block wait, not all.
__device__ __forceinline__ bool spccl_wait(const spccl_port_channel &c)
{
    return spccl_detail::sp_channel_take(c.base, spccl_detail::sp_port_pause_ns);
}

// Ask the proxy to copy `bytes` from offset src_off of this rank's window to offset dst_off of the peer's. One thread.
// Returns before the copy: do not write to the source until flush returns, or until the peer has signalled that it has
// the data. All three numbers are multiples of 16. Waits only if the FIFO is full.
__device__ __forceinline__ bool spccl_put(const spccl_port_channel &c, uint64_t dst_off, uint64_t src_off,
                                          uint64_t bytes)
{
    if (!spccl_detail::sp_channel_check(c.base, dst_off, bytes, true, true) ||
        !spccl_detail::sp_channel_check(c.base, src_off, bytes, true, true))
        return false;
    return bytes == 0 ||
           spccl_detail::sp_port_post(c, {SPCCL_TRIGGER_PUT, c.number, dst_off, src_off, bytes});
}

// Signal the peer: all puts of this channel before are in its window when its wait returns. One thread.
__device__ __forceinline__ bool spccl_signal(const spccl_port_channel &c)
{
    return spccl_detail::sp_port_post(c, {SPCCL_TRIGGER_SIGNAL, c.number, 0, 0, 0});
}

// Wait until the proxy has read the sources of all puts of this channel. They may then be overwritten. One thread.
__device__ __forceinline__ bool spccl_flush(const spccl_port_channel &c)
{
    return spccl_detail::sp_channel_wait(c.base, c.done, c.base.state->triggers_posted,
                                         SPCCL_CHANNEL_NO_PROXY, spccl_detail::sp_port_pause_ns);
}

#endif
