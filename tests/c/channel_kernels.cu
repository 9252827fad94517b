// channel_kernels.cu - see channel_kernels.h.
#include "channel_kernels.h"

#include <spccl_device.cuh>

#define THREADS 96

__device__ static uint32_t word_of(uint32_t seed, int round, uint64_t i)
{
    return (seed + (uint32_t)round * 2654435761u) ^ (uint32_t)i * 40503u;
}

template <class ITEM> struct exchange_args {
    const ITEM *items;
    uint64_t bytes;
    int rounds;
    uint32_t *n_wrong;
};

template <class CHANNEL> __device__ static bool take(const CHANNEL &c)
{
    return __syncthreads_and(threadIdx.x != 0 || spccl_wait(c));
}
template <class CHANNEL> __device__ static bool give(const CHANNEL &c)
{
    __syncthreads();
    return __syncthreads_and(threadIdx.x != 0 || spccl_signal(c));
}

__device__ static uint32_t *source_of(const exchange_item &it)
{
    return (uint32_t *)it.source;
}
__device__ static uint32_t *source_of(const port_item &it)
{
    return (uint32_t *)(it.channel.base.window + it.src_off);
}
__device__ static bool put(const exchange_item &it, uint64_t bytes)
{
    return spccl_put(it.channel, it.dst_off, it.source, bytes, threadIdx.x, blockDim.x);
}
// In two parts, and with a flush, to have both in the tests.
__device__ static bool put(const port_item &it, uint64_t bytes)
{
    bool ok = threadIdx.x != 0 || (spccl_put(it.channel, it.dst_off, it.src_off, 16) &&
                                   spccl_put(it.channel, it.dst_off + 16, it.src_off + 16, bytes - 16) &&
                                   spccl_flush(it.channel));
    return __syncthreads_and(ok);
}

template <class ITEM> __device__ static bool send(const ITEM &it, uint64_t bytes)
{
    return put(it, bytes) && give(it.channel);
}
__device__ static bool send(const port_item &it, uint64_t bytes)
{
    if (it.one_trigger == 0)
        return put(it, bytes) && give(it.channel);
    bool ok =
        threadIdx.x != 0 ||
        (it.one_trigger == 1 ? spccl_put_with_signal(it.channel, it.dst_off, it.src_off, bytes)
                             : spccl_put_with_signal_and_flush(it.channel, it.dst_off, it.src_off, bytes));
    return __syncthreads_and(ok);
}

__device__ static const uint32_t *got_of(const exchange_item &it)
{
    return (const uint32_t *)(it.channel.base.window + it.own_off);
}
__device__ static const uint32_t *got_of(const port_item &it)
{
    return (const uint32_t *)(it.in != nullptr ? it.in : it.channel.base.window + it.own_off);
}

template <class ITEM>
__device__ static bool exchange_round(const ITEM &it, uint64_t bytes, int round, uint32_t *n_wrong)
{
    uint32_t *source = source_of(it);
    const uint32_t *got = got_of(it);
    for (uint64_t i = threadIdx.x; i < bytes / 4; i += blockDim.x)
        source[i] = word_of(it.seed_out, round, i);
    __syncthreads();
    if (!send(it, bytes) || !take(it.channel))
        return false;
    for (uint64_t i = threadIdx.x; i < bytes / 4; i += blockDim.x)
        if (got[i] != word_of(it.seed_in, round, i))
            atomicAdd(n_wrong, 1u);
    return give(it.channel) && take(it.channel); // the peer may overwrite what was read
}

template <class ITEM> __global__ static void exchange(const __grid_constant__ exchange_args<ITEM> a)
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
    case MISUSE_NO_THREADS:
        ok = spccl_put(a.c, 0, b.window, 16, thread, 0);
        break;
    case MISUSE_FAR_THREAD:
        ok = spccl_put(a.c, 0, b.window, 16, n + 3, n);
        break;
    }
    ok = __syncthreads_and(ok);
    if (thread == 0)
        *a.failed = !ok;
}

struct port_args {
    spccl_port_channel c;
    port_misuse what;
    uint64_t n;
    uint32_t *failed;
};

// Post a trigger without the checks of spccl_put.
__device__ static bool post_bad(const spccl_port_channel &c, port_misuse what)
{
    spccl_trigger t = {SPCCL_TRIGGER_PUT, 0, 0, c.number, 0, 0, 16};
    t.op = what == PORT_BAD_OP ? 7 : what == PORT_BAD_SIGNAL ? (uint16_t)SPCCL_TRIGGER_SIGNAL : t.op;
    t.number += what == PORT_BAD_NUMBER;
    t.src_memory = what == PORT_BAD_MEMORY ? 3 : 0;
    t.dst_off = what == PORT_BAD_RANGE ? c.base.window_bytes : 0;
    c.fifo[0] = t;
    __threadfence_system();
    *(volatile uint64_t *)c.posted = what == PORT_TOO_MANY ? c.fifo_triggers + 1 : 1;
    return spccl_wait(c);
}

__global__ static void port_misuse_kernel(const __grid_constant__ port_args a)
{
    const spccl_channel_base &b = a.c.base;
    bool ok = true;
    if (threadIdx.x != 0)
        return;
    switch (a.what) {
    case PORT_NO_SIGNAL:
        ok = spccl_wait(a.c);
        break;
    case PORT_PAST_END:
        ok = spccl_put(a.c, b.window_bytes - 16, 0, 32);
        break;
    case PORT_SOURCE_PAST_END:
        ok = spccl_put_with_signal(a.c, 0, b.window_bytes, 16);
        break;
    default:
        ok = post_bad(a.c, a.what);
    }
    *a.failed = !ok;
}

__global__ static void put_many(const __grid_constant__ port_args a)
{
    bool ok = threadIdx.x != 0 || spccl_flush(a.c); // without triggers it returns at once
    for (uint64_t i = 0; threadIdx.x == 0 && ok && i < a.n; i++)
        ok = spccl_put(a.c, 0, 0, 16) && spccl_put(a.c, 0, 0, 0);
    if (threadIdx.x == 0)
        *a.failed = !(ok && spccl_flush(a.c));
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
    return launch(exchange<exchange_item>, exchange_args<exchange_item>{items, bytes, rounds, n_wrong},
                  n_items, n_wrong, stream);
}

extern "C" cudaError_t channel_do_wrong(spccl_memory_channel channel, enum channel_misuse what,
                                        uint32_t *failed, cudaStream_t stream)
{
    return launch(misuse, misuse_args{channel, what, failed}, 1, failed, stream);
}

extern "C" cudaError_t port_exchange(const struct port_item *items, unsigned n_items, uint64_t bytes,
                                     int rounds, uint32_t *n_wrong, cudaStream_t stream)
{
    return launch(exchange<port_item>, exchange_args<port_item>{items, bytes, rounds, n_wrong}, n_items,
                  n_wrong, stream);
}

extern "C" cudaError_t port_do_wrong(spccl_port_channel channel, enum port_misuse what, uint32_t *failed,
                                     cudaStream_t stream)
{
    return launch(port_misuse_kernel, port_args{channel, what, 0, failed}, 1, failed, stream);
}

extern "C" cudaError_t port_put_many(spccl_port_channel channel, uint64_t n, uint32_t *failed,
                                     cudaStream_t stream)
{
    return launch(put_many, port_args{channel, PORT_NO_SIGNAL, n, failed}, 1, failed, stream);
}
