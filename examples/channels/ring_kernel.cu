// ring_kernel.cu - a kernel that gathers the blocks of all ranks around a ring, with one-sided channels.
#include "ring_kernel.h"

#include <spccl_device.cuh>

template <class CHANNEL> struct ring_args {
    CHANNEL next, previous;
    ring_job job;
};

// Copy by all threads of the CTA.
__device__ static void copy(uint8_t *to, const uint8_t *from, uint64_t bytes)
{
    for (uint64_t i = threadIdx.x; i < bytes / 16; i += blockDim.x)
        ((uint4 *)to)[i] = ((const uint4 *)from)[i];
}

// Thread 0 waits; then all threads may read what was put before the signal.
template <class CHANNEL> __device__ static bool wait_together(const CHANNEL &c)
{
    bool ok = threadIdx.x != 0 || spccl_wait(c);
    return __syncthreads_and(ok);
}

// Thread 0 signals what all threads have put and read.
template <class CHANNEL> __device__ static void signal_together(const CHANNEL &c)
{
    __syncthreads();
    if (threadIdx.x == 0)
        spccl_signal(c);
}

// Send a block to offset `half` of the next rank's window. All threads call it.
__device__ static bool send(const spccl_memory_channel &next, uint64_t half, const uint8_t *block,
                            uint64_t bytes)
{
    return spccl_put(next, half, block, bytes, threadIdx.x, blockDim.x);
}

// A port channel sends from this rank's window: its third and fourth quarters.
__device__ static bool send(const spccl_port_channel &next, uint64_t half, const uint8_t *block,
                            uint64_t bytes)
{
    uint64_t from = 2 * bytes + half;
    copy(next.base.window + from, block, bytes);
    __syncthreads();
    return __syncthreads_and(threadIdx.x != 0 || spccl_put(next, half, from, bytes));
}

// One CTA. In step s a rank sends on the block that it got in step s - 1, first its own. Windows have two halves that
// take turns. The receiver of a half signals back when it has read the half, and the sender waits for that.
template <class CHANNEL> __global__ static void all_gather(const __grid_constant__ ring_args<CHANNEL> a)
{
    int n = a.job.world_size, rank = a.next.base.rank;
    uint64_t bytes = a.job.block_bytes;
    uint8_t *out = (uint8_t *)a.job.out;
    copy(out + (uint64_t)rank * bytes, (const uint8_t *)a.job.block, bytes);
    for (int s = 0; s + 1 < n; s++) {
        uint64_t half = (uint64_t)(s % 2) * bytes;
        int sent = (rank - s + n) % n, came = (rank - s - 1 + n) % n;
        __syncthreads(); // the block was copied to out
        if (s >= 2 && !wait_together(a.next))
            return;
        if (!send(a.next, half, out + (uint64_t)sent * bytes, bytes))
            return;
        signal_together(a.next);
        if (!wait_together(a.previous))
            return;
        copy(out + (uint64_t)came * bytes, a.previous.base.window + half, bytes);
        signal_together(a.previous); // the half may be overwritten
    }
    // Take the last signals, so that the next launch starts with none.
    for (int s = n - 1 < 2 ? n - 1 : 2; s > 0; s--)
        if (!wait_together(a.next))
            return;
}

template <class CHANNEL>
static cudaError_t launch(CHANNEL next, CHANNEL previous, const ring_job *job, cudaStream_t stream)
{
    ring_args<CHANNEL> args = {next, previous, *job};
    void *params[] = {&args};
    return cudaLaunchKernel(all_gather<CHANNEL>, dim3(1), dim3(256), params, 0, stream);
}

extern "C" cudaError_t ring_all_gather_memory(spccl_memory_channel next, spccl_memory_channel previous,
                                              const struct ring_job *job, cudaStream_t stream)
{
    return launch(next, previous, job, stream);
}

extern "C" cudaError_t ring_all_gather_port(spccl_port_channel next, spccl_port_channel previous,
                                            const struct ring_job *job, cudaStream_t stream)
{
    return launch(next, previous, job, stream);
}
