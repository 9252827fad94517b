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
// Two words of 8 bytes, each of which is read or written whole.
__device__ __forceinline__ ulonglong2 sp_load_relaxed2_sys(const void *p)
{
    ulonglong2 v;
    asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];" : "=l"(v.x), "=l"(v.y) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ void sp_store_relaxed2_sys(void *p, ulonglong2 v)
{
    asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(p), "l"(v.x), "l"(v.y) : "memory");
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
                                                    uint64_t wanted, uint64_t seen, uint64_t limit = 0)
{
    if (atomicCAS(c.claimed, 0u, 1u) == 0) {
        c.report->peer = c.peer;
        c.report->index = c.index;
        c.report->wanted = wanted;
        c.report->seen = seen;
        c.report->limit = limit;
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

// An end beyond 2^64 is reported as 2^64 - 1.
__device__ __forceinline__ uint64_t sp_channel_end(uint64_t off, uint64_t bytes)
{
    return bytes > ~off ? ~(uint64_t)0 : off + bytes;
}

// Are bytes off to off + bytes inside a memory of `limit` bytes, all in multiples of 16?
__device__ __forceinline__ bool sp_channel_check(const spccl_channel_base &c, uint64_t off, uint64_t bytes,
                                                 uint64_t limit, bool aligned, bool reports)
{
    if (off <= limit && bytes <= limit - off && aligned && off % 16 == 0 && bytes % 16 == 0)
        return true;
    if (reports)
        sp_channel_fail(c, SPCCL_CHANNEL_BAD_PUT, off, sp_channel_end(off, bytes), limit);
    return false;
}

// Is this one of the threads that copy together? With n_threads 0 their loops would not end.
__device__ __forceinline__ bool sp_channel_has(const spccl_channel_base &c, uint32_t thread,
                                               uint32_t n_threads)
{
    if (thread < n_threads)
        return true;
    sp_channel_fail(c, SPCCL_CHANNEL_BAD_THREAD, thread, n_threads);
    return false;
}

// The copy of put and get, by threads 0 to n_threads - 1. Four loads are under way before the first store: the compiler
// moves no load over a store that may be to the same place.
template <class STORE>
__device__ __forceinline__ void sp_channel_copy(uint8_t *to, const uint4 *from, uint64_t bytes,
                                                uint32_t thread, uint32_t n_threads, STORE store)
{
    uint64_t n = bytes / 16, i = thread, step = n_threads;
    for (; i + 3 * step < n; i += 4 * step) {
        uint4 v[4];
        for (int k = 0; k < 4; k++)
            v[k] = from[i + k * step];
        for (int k = 0; k < 4; k++)
            store(to + (i + k * step) * 16, v[k]);
    }
    for (; i < n; i += step)
        store(to + i * 16, from[i]);
}

__device__ __forceinline__ bool sp_channel_take(const spccl_channel_base &c, uint32_t pause_ns)
{
    uint64_t wanted = c.state->signals_taken + 1;
    if (!sp_channel_wait(c, c.signals, wanted, SPCCL_CHANNEL_NO_SIGNAL, pause_ns))
        return false;
    c.state->signals_taken = wanted;
    return true;
}

// One thread of each block: wait until n_blocks have come. The last one lets the others go.
inline __device__ __noinline__ bool sp_channel_meet(const spccl_channel_base &c, uint32_t n_blocks)
{
    spccl_channel_state *s = c.state;
    uint64_t met = sp_load_relaxed_sys(&s->blocks_met); // does not change before this block has come
    __threadfence();
    uint32_t here = atomicAdd(&s->blocks_here, 1u) + 1;
    if (here == n_blocks) {
        __threadfence();
        sp_store_relaxed_sys(&s->blocks_here, 0);
        __threadfence();
        sp_store_relaxed_sys(&s->blocks_met, met + 1);
        return true;
    }
    return sp_poll(
               &s->blocks_met, met + 1, c.abort, 0, [&] { return c.timeout_ns; },
               [&](uint64_t) {
                   sp_channel_fail(c, SPCCL_CHANNEL_NO_BLOCK, n_blocks, sp_load_relaxed_sys(&s->blocks_here));
               }) != 0;
}

// ---- packets. DATA is what one holds: uint2 in 16 bytes, uint32_t in 8 ----

__device__ __forceinline__ void sp_packet_store(uint8_t *at, uint2 v, uint32_t flag)
{
    uint64_t upper = (uint64_t)flag << 32;
    ulonglong2 words;
    words.x = upper | v.x;
    words.y = upper | v.y;
    sp_store_relaxed2_sys(at, words);
}
__device__ __forceinline__ void sp_packet_store(uint8_t *at, uint32_t v, uint32_t flag)
{
    sp_store_relaxed_sys((uint64_t *)at, (uint64_t)flag << 32 | v);
}

// Load a packet; *seen: a flag in it, that of the half which has not come if there is one.
__device__ __forceinline__ void sp_packet_load(const uint8_t *at, uint32_t flag, uint2 *v, uint32_t *seen)
{
    ulonglong2 words = sp_load_relaxed2_sys(at);
    uint32_t first = (uint32_t)(words.x >> 32), second = (uint32_t)(words.y >> 32);
    v->x = (uint32_t)words.x;
    v->y = (uint32_t)words.y;
    *seen = first == flag ? second : first;
}
__device__ __forceinline__ void sp_packet_load(const uint8_t *at, uint32_t, uint32_t *v, uint32_t *seen)
{
    uint64_t word = sp_load_relaxed_sys((const uint64_t *)at);
    *v = (uint32_t)word;
    *seen = (uint32_t)(word >> 32);
}

// Wait for the packet at byte `off` of this rank's memory. Any thread, also many at the same time.
template <class DATA>
__device__ __forceinline__ bool sp_packet_wait(const spccl_channel_base &c, uint64_t off, uint32_t flag,
                                               DATA *out)
{
    uint64_t start = 0, looked = 0;
    for (uint32_t i = 1;; i++) {
        uint32_t seen;
        sp_packet_load(c.window + off, flag, out, &seen);
        if (seen == flag)
            return true;
        if (i % 64 != 0)
            continue;
        uint64_t now = sp_clock_ns();
        if (start == 0)
            start = looked = now;
        if (now - looked < sp_abort_poll_ns)
            continue;
        looked = now;
        if (sp_load_relaxed_sys(c.abort) != 0)
            return false;
        if (now - start > c.timeout_ns) {
            sp_channel_fail(c, SPCCL_CHANNEL_NO_PACKET, flag, seen, off);
            return false;
        }
    }
}

// Are `bytes` of data as packets from byte `off` on inside a memory of `limit` bytes? Twice as many as the data.
template <class DATA>
__device__ __forceinline__ bool sp_packet_check(const spccl_channel_base &c, uint64_t off, const void *data,
                                                uint64_t bytes, uint64_t limit, uint32_t flag, bool reports)
{
    constexpr uint64_t unit = sizeof(DATA);
    if (off <= limit && bytes <= (limit - off) / 2 && off % (2 * unit) == 0 && bytes % unit == 0 &&
        (uintptr_t)data % unit == 0 && flag != 0)
        return true;
    if (reports)
        sp_channel_fail(c, SPCCL_CHANNEL_BAD_PACKETS, off,
                        sp_channel_end(off, bytes > ~(uint64_t)0 / 2 ? ~(uint64_t)0 : 2 * bytes), limit);
    return false;
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

// Post a put, or a put with a signal.
__device__ __forceinline__ bool sp_port_put(const spccl_port_channel &c, uint16_t op, uint64_t dst_off,
                                            uint64_t src_off, uint64_t bytes)
{
    if (!sp_channel_check(c.base, dst_off, bytes, c.base.peer_bytes, true, true) ||
        !sp_channel_check(c.base, src_off, bytes, c.base.window_bytes, true, true))
        return false;
    if (bytes == 0)
        return op == SPCCL_TRIGGER_PUT || sp_port_post(c, {SPCCL_TRIGGER_SIGNAL, 0, 0, c.number, 0, 0, 0});
    return sp_port_post(
        c, {op, (uint8_t)c.dst_memory, (uint8_t)c.src_memory, c.number, dst_off, src_off, bytes});
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
    if (!spccl_detail::sp_channel_has(c.base, thread, n_threads) ||
        !spccl_detail::sp_channel_check(c.base, dst_off, bytes, c.base.peer_bytes, (uintptr_t)src % 16 == 0,
                                        thread == 0))
        return false;
    spccl_detail::sp_channel_copy(c.peer_window + dst_off, (const uint4 *)src, bytes, thread, n_threads,
                                  spccl_detail::sp_store16);
    return true;
}

// Copy `bytes` from offset src_off of the peer's window to `dst`, any memory that this GPU can write. Threads, units and
// failures as of spccl_put. The peer's data is there after a wait that took its signal and a barrier. The peer may
// overwrite the data once all threads have returned, have met at a barrier, and one has signalled.
__device__ __forceinline__ bool spccl_get(const spccl_memory_channel &c, void *dst, uint64_t src_off,
                                          uint64_t bytes, uint32_t thread, uint32_t n_threads)
{
    if (!spccl_detail::sp_channel_has(c.base, thread, n_threads) ||
        !spccl_detail::sp_channel_check(c.base, src_off, bytes, c.base.peer_bytes, (uintptr_t)dst % 16 == 0,
                                        thread == 0))
        return false;
    spccl_detail::sp_channel_copy((uint8_t *)dst, (const uint4 *)(c.peer_window + src_off), bytes, thread,
                                  n_threads, [](uint8_t *to, uint4 v) { *(uint4 *)to = v; });
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

// ---- packets of memory channels: each store carries its flag, so nobody signals, waits or fences ----

// A packet says that its own data is there, and nothing of other stores. flag: not 0, and another than the last one at
// this place. So nothing is reset between two uses. Before it is used again, the receiver must have read it.

// Put one packet at offset dst_off of the peer's window. Any thread. v: uint2 for 16 bytes, uint32_t for 8, and dst_off
// is a multiple of that.
template <class DATA>
__device__ __forceinline__ bool spccl_put_packet(const spccl_memory_channel &c, uint64_t dst_off, DATA v,
                                                 uint32_t flag)
{
    if (!spccl_detail::sp_packet_check<DATA>(c.base, dst_off, nullptr, sizeof v, c.base.peer_bytes, flag,
                                             true))
        return false;
    spccl_detail::sp_packet_store(c.peer_window + dst_off, v, flag);
    return true;
}

// Wait for the packet at offset src_off of this rank's window, and store its data in *v. Any thread.
template <class DATA>
__device__ __forceinline__ bool spccl_get_packet(const spccl_memory_channel &c, DATA *v, uint64_t src_off,
                                                 uint32_t flag)
{
    return spccl_detail::sp_packet_check<DATA>(c.base, src_off, nullptr, sizeof *v, c.base.window_bytes, flag,
                                               true) &&
           spccl_detail::sp_packet_wait(c.base, src_off, flag, v);
}

// Put `bytes` of data from `src` as packets, which fill 2 * bytes from offset dst_off of the peer's window on. Threads as
// of spccl_put. DATA: uint2, packets of 16 bytes: src and bytes are multiples of 8, dst_off of 16. uint32_t, packets of 8
// bytes: multiples of 4 and 8.
template <class DATA = uint2>
__device__ __forceinline__ bool spccl_put_packets(const spccl_memory_channel &c, uint64_t dst_off,
                                                  const void *src, uint64_t bytes, uint32_t thread,
                                                  uint32_t n_threads, uint32_t flag)
{
    if (!spccl_detail::sp_channel_has(c.base, thread, n_threads) ||
        !spccl_detail::sp_packet_check<DATA>(c.base, dst_off, src, bytes, c.base.peer_bytes, flag,
                                             thread == 0))
        return false;
    for (uint64_t i = thread; i < bytes / sizeof(DATA); i += n_threads)
        spccl_detail::sp_packet_store(c.peer_window + dst_off + i * 2 * sizeof(DATA), ((const DATA *)src)[i],
                                      flag);
    return true;
}

// Wait for the packets of a put with the same DATA, bytes and flag, from offset src_off of this rank's window on, and
// store their data to `dst`. Each thread waits for its own packets: other threads see their data after a barrier.
template <class DATA = uint2>
__device__ __forceinline__ bool spccl_get_packets(const spccl_memory_channel &c, void *dst, uint64_t src_off,
                                                  uint64_t bytes, uint32_t thread, uint32_t n_threads,
                                                  uint32_t flag)
{
    if (!spccl_detail::sp_channel_has(c.base, thread, n_threads) ||
        !spccl_detail::sp_packet_check<DATA>(c.base, src_off, dst, bytes, c.base.window_bytes, flag,
                                             thread == 0))
        return false;
    for (uint64_t i = thread; i < bytes / sizeof(DATA); i += n_threads) {
        DATA v;
        if (!spccl_detail::sp_packet_wait(c.base, src_off + i * 2 * sizeof(DATA), flag, &v))
            return false;
        ((DATA *)dst)[i] = v;
    }
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
    return spccl_detail::sp_port_put(c, SPCCL_TRIGGER_PUT, dst_off, src_off, bytes);
}

// Signal the peer: all puts of this channel before are in its window when its wait returns. One thread.
__device__ __forceinline__ bool spccl_signal(const spccl_port_channel &c)
{
    return spccl_detail::sp_port_post(c, {SPCCL_TRIGGER_SIGNAL, 0, 0, c.number, 0, 0, 0});
}

// spccl_put and spccl_signal in one trigger. One thread.
__device__ __forceinline__ bool spccl_put_with_signal(const spccl_port_channel &c, uint64_t dst_off,
                                                      uint64_t src_off, uint64_t bytes)
{
    return spccl_detail::sp_port_put(c, SPCCL_TRIGGER_PUT_SIGNAL, dst_off, src_off, bytes);
}

// Wait until the proxy has read the sources of all puts of this channel. They may then be overwritten. One thread.
__device__ __forceinline__ bool spccl_flush(const spccl_port_channel &c)
{
    return spccl_detail::sp_channel_wait(c.base, c.done, c.base.state->triggers_posted,
                                         SPCCL_CHANNEL_NO_PROXY, spccl_detail::sp_port_pause_ns);
}

// spccl_put_with_signal, one trigger, and then spccl_flush. One thread.
__device__ __forceinline__ bool spccl_put_with_signal_and_flush(const spccl_port_channel &c, uint64_t dst_off,
                                                                uint64_t src_off, uint64_t bytes)
{
    return spccl_put_with_signal(c, dst_off, src_off, bytes) && spccl_flush(c);
}

// ---- blocks of one kernel ----

// A barrier of n_blocks blocks of this rank's kernel: all threads of each of them call it, with the same channel, of any
// kind. Blocks are one-dimensional. What a thread stored before it is seen by all threads of these blocks after it. The
// blocks must all fit on the GPU at the same time. False on all threads of a block if the others do not come in time.
template <class CHANNEL>
__device__ __forceinline__ bool spccl_sync_blocks(const CHANNEL &c, uint32_t n_blocks)
{
    __syncthreads();
    return __syncthreads_and(threadIdx.x != 0 || spccl_detail::sp_channel_meet(c.base, n_blocks));
}

#endif
