// ring_kernel.cu - a kernel that gathers the blocks of all ranks around a ring, with one-sided channels.
#include "ring_kernel.h"

#include <spccl_device.cuh>

struct ring_args {
    spccl_memory_channel next, previous;
    const uint8_t *block;
    uint8_t *out;
    uint64_t bytes; // of a block
    int world_size;
    uint32_t *ok;
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

// One CTA. In step s a rank sends on the block that it got in step s - 1, first its own. Windows have two halves that
// take turns. The receiver of a half signals back when it has read the half, and the sender waits for that.
__global__ static void all_gather_memory(const __grid_constant__ ring_args a)
{
    int n = a.world_size, rank = a.next.base.rank;
    copy(a.out + (uint64_t)rank * a.bytes, a.block, a.bytes);
    for (int s = 0; s + 1 < n; s++) {
        uint64_t half = (uint64_t)(s % 2) * a.bytes;
        int sent = (rank - s + n) % n, came = (rank - s - 1 + n) % n;
        __syncthreads(); // the block was copied to out
        if (s >= 2 && !wait_together(a.next))
            return;
        if (!spccl_put(a.next, half, a.out + (uint64_t)sent * a.bytes, a.bytes, threadIdx.x, blockDim.x))
            return;
        signal_together(a.next);
        if (!wait_together(a.previous))
            return;
        copy(a.out + (uint64_t)came * a.bytes, a.previous.base.window + half, a.bytes);
        signal_together(a.previous); // the half may be overwritten
    }
    // Take the last signals, so that the next launch starts with none.
    for (int s = n - 1 < 2 ? n - 1 : 2; s > 0; s--)
        if (!wait_together(a.next))
            return;
    if (threadIdx.x == 0)
        *a.ok = 1;
}

template <class ARGS>
static cudaError_t launch(void (*kernel)(ARGS), ARGS args, uint32_t *ok, cudaStream_t stream)
{
    void *params[] = {&args};
    cudaError_t e = cudaMemsetAsync(ok, 0, sizeof *ok, stream);
    return e != cudaSuccess ? e : cudaLaunchKernel(kernel, dim3(1), dim3(256), params, 0, stream);
}

extern "C" cudaError_t ring_all_gather_memory(spccl_memory_channel next, spccl_memory_channel previous,
                                              const void *block, void *out, uint64_t block_bytes,
                                              int world_size, uint32_t *ok, cudaStream_t stream)
{
    ring_args a = {next, previous, (const uint8_t *)block, (uint8_t *)out, block_bytes, world_size, ok};
    return launch(all_gather_memory, a, ok, stream);
}
