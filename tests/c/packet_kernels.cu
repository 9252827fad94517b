// packet_kernels.cu - see packet_kernels.h.
#include "packet_kernels.h"

#include <spccl_device.cuh>

#define THREADS 96

__device__ static uint32_t word_of(uint32_t seed, int round, uint64_t i)
{
    return (seed + (uint32_t)round * 2654435761u) ^ (uint32_t)i * 40503u;
}

struct exchange_args {
    const packet_job *jobs;
    packet_rounds rounds;
    uint32_t *n_wrong;
};

__device__ static void fill(uint32_t *to, const packet_job &j, uint32_t seed, int round)
{
    for (uint64_t i = threadIdx.x; i < j.bytes / 4; i += blockDim.x)
        to[i] = word_of(seed, round, i);
    __syncthreads();
}

__device__ static void compare(const uint32_t *got, const packet_job &j, int round, uint32_t *n_wrong)
{
    __syncthreads();
    for (uint64_t i = threadIdx.x; i < j.bytes / 4; i += blockDim.x)
        if (got[i] != word_of(j.seed_in, round, i))
            atomicAdd(n_wrong, 1u);
    __syncthreads();
}

// Two places take turns: who has all packets of a round knows that the peer has read those of the round before.
template <class DATA> __device__ static bool packets_of(const packet_job &j, int round, uint32_t *n_wrong)
{
    uint32_t *source = (uint32_t *)j.scratch, *got = (uint32_t *)(j.scratch + j.bytes),
             flag = (uint32_t)round + 1;
    uint64_t turn = (uint64_t)(round % 2) * 2 * j.bytes;
    fill(source, j, j.seed_out, round);
    bool ok =
        spccl_put_packets<DATA>(j.channel, j.out_off + turn, source, j.bytes, threadIdx.x, blockDim.x,
                                flag) &&
        spccl_get_packets<DATA>(j.channel, got, j.in_off + turn, j.bytes, threadIdx.x, blockDim.x, flag);
    compare(got, j, round, n_wrong);
    return __syncthreads_and(ok);
}

__device__ static bool meet_peer(const spccl_memory_channel &c)
{
    __syncthreads();
    return __syncthreads_and(threadIdx.x != 0 || (spccl_signal(c) && spccl_wait(c)));
}

__device__ static bool get_of(const packet_job &j, int round, uint32_t *n_wrong)
{
    uint8_t *got = j.scratch + j.bytes;
    fill((uint32_t *)(j.channel.base.window + j.in_off), j, j.seed_out, round);
    if (!meet_peer(j.channel) || !spccl_get(j.channel, got, j.out_off, j.bytes, threadIdx.x, blockDim.x))
        return false;
    compare((const uint32_t *)got, j, round, n_wrong);
    return meet_peer(j.channel); // the window may be overwritten
}

template <class ROUND> __device__ static void run_rounds(const exchange_args &a, ROUND round_of)
{
    for (int round = a.rounds.first; round < a.rounds.first + a.rounds.n; round++)
        if (!round_of(a.jobs[blockIdx.x], round)) {
            if (threadIdx.x == 0)
                atomicAdd(a.n_wrong, 1u << 20);
            return;
        }
}

template <class DATA> __global__ static void exchange_packets(const __grid_constant__ exchange_args a)
{
    run_rounds(a, [&](const packet_job &j, int round) { return packets_of<DATA>(j, round, a.n_wrong); });
}

__global__ static void exchange_gets(const __grid_constant__ exchange_args a)
{
    run_rounds(a, [&](const packet_job &j, int round) { return get_of(j, round, a.n_wrong); });
}

struct meet_args {
    spccl_memory_channel c;
    int rounds;
    uint8_t *slots;
    uint32_t *n_wrong;
};

// Thread 1 of a block stores, thread 0 meets the others, thread 2 reads: the barrier passes on what other threads stored.
__global__ static void meet(const __grid_constant__ meet_args a)
{
    for (int round = 0; round < a.rounds; round++) {
        uint32_t value = (uint32_t)round * 1000 + 1;
        if (threadIdx.x == 1)
            spccl_detail::sp_store16(a.slots + blockIdx.x * 16, make_uint4(value, 0, 0, value + blockIdx.x));
        bool ok = spccl_sync_blocks(a.c, gridDim.x);
        for (unsigned b = 0; threadIdx.x == 2 && b < gridDim.x; b++)
            if (((const volatile uint32_t *)(a.slots + b * 16))[3] != value + b)
                atomicAdd(a.n_wrong, 1u);
        if (!ok || !spccl_sync_blocks(a.c, gridDim.x)) {
            if (threadIdx.x == 0)
                atomicAdd(a.n_wrong, 1u << 20);
            return;
        }
    }
}

struct misuse_args {
    spccl_memory_channel c;
    packet_misuse what;
    uint32_t *failed;
};

__device__ static bool do_wrong(const spccl_memory_channel &c, packet_misuse what)
{
    const spccl_channel_base &b = c.base;
    uint8_t *w = b.window;
    uint32_t thread = threadIdx.x, n = blockDim.x;
    uint2 v = {1, 2};
    switch (what) {
    case PACKET_LATE:
        return spccl_get_packets<uint32_t>(c, w + 1024, 64, 32, thread, n, 5);
    case PACKET_HALF:
        if (thread == 0)
            spccl_detail::sp_store_relaxed_sys((uint64_t *)(w + 32), (uint64_t)5 << 32 | 1);
        return spccl_get_packet(c, &v, 32, 5);
    case PACKET_PAST_END:
        return spccl_put_packets(c, b.peer_bytes - 32, w, 24, thread, n, 5);
    case PACKET_ODD_OFFSET:
        return spccl_put_packet(c, 8, v, 5);
    case PACKET_ODD_DATA:
        return spccl_put_packets(c, 0, w, 12, thread, n, 5);
    case PACKET_NO_FLAG:
        return spccl_get_packets(c, w + 1024, 0, 16, thread, n, 0);
    case PACKET_GET_OUTSIDE:
        return spccl_get_packets(c, w, UINT64_MAX - 15, 16, thread, n, 5);
    case GET_PAST_END:
        return spccl_get(c, w, b.peer_bytes - 16, 32, thread, n);
    case GET_ODD_ADDRESS:
        return spccl_get(c, w + 8, 0, 16, thread, n);
    case BLOCKS_MISSING:
        return spccl_sync_blocks(c, 3);
    }
    return true;
}

__global__ static void misuse(const __grid_constant__ misuse_args a)
{
    bool ok = __syncthreads_and(do_wrong(a.c, a.what));
    if (threadIdx.x == 0 && !ok)
        *a.failed = 1;
}

template <class ARGS>
static cudaError_t launch(void (*kernel)(ARGS), ARGS args, unsigned n_ctas, uint32_t *result,
                          cudaStream_t stream)
{
    void *params[] = {&args};
    cudaError_t e = cudaMemsetAsync(result, 0, sizeof *result, stream);
    return e != cudaSuccess ? e : cudaLaunchKernel(kernel, dim3(n_ctas), dim3(THREADS), params, 0, stream);
}

extern "C" cudaError_t packet_exchange(const struct packet_job *jobs, unsigned n_jobs, uint32_t packet_bytes,
                                       struct packet_rounds rounds, uint32_t *n_wrong, cudaStream_t stream)
{
    return launch(packet_bytes == 8 ? exchange_packets<uint32_t> : exchange_packets<uint2>,
                  exchange_args{jobs, rounds, n_wrong}, n_jobs, n_wrong, stream);
}

extern "C" cudaError_t get_exchange(const struct packet_job *jobs, unsigned n_jobs,
                                    struct packet_rounds rounds, uint32_t *n_wrong, cudaStream_t stream)
{
    return launch(exchange_gets, exchange_args{jobs, rounds, n_wrong}, n_jobs, n_wrong, stream);
}

extern "C" cudaError_t blocks_meet(spccl_memory_channel channel, unsigned n_blocks, int rounds,
                                   uint8_t *slots, uint32_t *n_wrong, cudaStream_t stream)
{
    return launch(meet, meet_args{channel, rounds, slots, n_wrong}, n_blocks, n_wrong, stream);
}

extern "C" cudaError_t packet_do_wrong(spccl_memory_channel channel, enum packet_misuse what,
                                       uint32_t *failed, cudaStream_t stream)
{
    return launch(misuse, misuse_args{channel, what, failed}, what == BLOCKS_MISSING ? 2 : 1, failed, stream);
}
