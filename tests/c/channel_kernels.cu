// channel_kernels.cu - see channel_kernels.h.
#include "channel_kernels.h"

#include <spccl_device.cuh>

#define THREADS 96

__device__ static uint32_t word_of(uint32_t seed, int round, uint64_t i)
{
    return (seed + (uint32_t)round * 2654435761u) ^ (uint32_t)i * 40503u;
}

struct exchange_args {
    const exchange_item *items;
    uint64_t bytes;
    int rounds;
    uint32_t *n_wrong;
};

__device__ static bool take(const spccl_memory_channel &c)
{
    return __syncthreads_and(threadIdx.x != 0 || spccl_wait(c));
}
__device__ static void give(const spccl_memory_channel &c)
{
    __syncthreads();
    if (threadIdx.x == 0)
        spccl_signal(c);
}

__device__ static bool exchange_round(const exchange_item &it, uint64_t bytes, int round, uint32_t *n_wrong)
{
    uint32_t *source = (uint32_t *)it.source;
    const uint32_t *got = (const uint32_t *)(it.channel.base.window + it.own_off);
    for (uint64_t i = threadIdx.x; i < bytes / 4; i += blockDim.x)
        source[i] = word_of(it.seed_out, round, i);
    __syncthreads();
    if (!spccl_put(it.channel, it.dst_off, it.source, bytes, threadIdx.x, blockDim.x))
        return false;
    give(it.channel);
    if (!take(it.channel))
        return false;
    for (uint64_t i = threadIdx.x; i < bytes / 4; i += blockDim.x)
        if (got[i] != word_of(it.seed_in, round, i))
            atomicAdd(n_wrong, 1u);
    give(it.channel); // the peer may overwrite what was read
    return take(it.channel);
}

__global__ static void exchange(const __grid_constant__ exchange_args a)
{
    for (int round = 0; round < a.rounds; round++)
        if (!exchange_round(a.items[blockIdx.x], a.bytes, round, a.n_wrong)) {
            if (threadIdx.x == 0)
                atomicAdd(a.n_wrong, 1u << 20);
            return;
        }
    if (threadIdx.x == 0)
        spccl_flush(a.items[blockIdx.x].channel);
}

struct misuse_args {
    spccl_memory_channel c;
    channel_misuse what;
    uint32_t *failed;
};

__global__ static void misuse(const __grid_constant__ misuse_args a)
{
    const spccl_channel_base &b = a.c.base;
    uint32_t thread = threadIdx.x, n = blockDim.x;
    bool ok = true;
    switch (a.what) {
    case MISUSE_NO_SIGNAL:
        ok = thread != 0 || spccl_wait(a.c);
        break;
    case MISUSE_PAST_END:
        ok = spccl_put(a.c, b.window_bytes - 16, b.window, 32, thread, n);
        break;
    case MISUSE_FAR_OFFSET: // where offset + size is small again
        ok = spccl_put(a.c, UINT64_MAX - 15, b.window, 32, thread, n);
        break;
    case MISUSE_ODD_SIZE:
        ok = spccl_put(a.c, 0, b.window, 24, thread, n);
        break;
    case MISUSE_ODD_SOURCE:
        ok = spccl_put(a.c, 0, b.window + 4, 16, thread, n);
        break;
    }
    ok = __syncthreads_and(ok);
    if (thread == 0)
        *a.failed = !ok;
}

template <class ARGS>
static cudaError_t launch(void (*kernel)(ARGS), ARGS args, unsigned n_ctas, uint32_t *result,
                          cudaStream_t stream)
{
    void *params[] = {&args};
    cudaError_t e = cudaMemsetAsync(result, 0, sizeof *result, stream);
    return e != cudaSuccess ? e : cudaLaunchKernel(kernel, dim3(n_ctas), dim3(THREADS), params, 0, stream);
}

extern "C" cudaError_t channel_exchange(const struct exchange_item *items, unsigned n_items, uint64_t bytes,
                                        int rounds, uint32_t *n_wrong, cudaStream_t stream)
{
    return launch(exchange, exchange_args{items, bytes, rounds, n_wrong}, n_items, n_wrong, stream);
}

extern "C" cudaError_t channel_do_wrong(spccl_memory_channel channel, enum channel_misuse what,
                                        uint32_t *failed, cudaStream_t stream)
{
    return launch(misuse, misuse_args{channel, what, failed}, 1, failed, stream);
}
