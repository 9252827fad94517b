// all_pairs_kernel.cu - a kernel that adds the arrays of all ranks, with packets: for small arrays, where latency counts.
#include "all_pairs_kernel.h"

#include <spccl_device.cuh>

constexpr unsigned N_BLOCKS = 4, N_THREADS = 256;

struct all_pairs_args {
    spccl_memory_channel channels[ALL_PAIRS_RANKS_MAX];
    all_pairs_job job;
};

// One thread of the kernel: what it takes part in.
struct part {
    uint32_t flag;
    uint64_t half;          // where this use's half of every window begins
    uint64_t shard, packet; // packets of a shard; first packet of this rank's shard
    uint32_t thread, n_threads;
};

// Bytes of the elements in rank p's shard.
__device__ static uint64_t bytes_of(const all_pairs_job &j, const part &x, int p)
{
    uint64_t n = j.n_elems / 2, first = (uint64_t)p * x.shard;
    return first >= n ? 0 : (n - first < x.shard ? n - first : x.shard) * 8;
}

// Where in a window the part of rank r of the owner's shard comes, and the sum of owner r.
__device__ static uint64_t part_off(const part &x, int r)
{
    return x.half + (uint64_t)r * x.shard * 16;
}
__device__ static uint64_t sum_off(const all_pairs_job &j, const part &x, int r)
{
    return part_off(x, j.world_size + r);
}

// Give each owner this rank's part of its shard.
__device__ static bool give_parts(const all_pairs_args &a, const part &x)
{
    bool ok = true;
    for (int p = 0; p < a.job.world_size; p++)
        if (p != a.job.rank)
            ok &= spccl_put_packets(a.channels[p], part_off(x, a.job.rank),
                                    a.job.in + (uint64_t)p * x.shard * 2, bytes_of(a.job, x, p), x.thread,
                                    x.n_threads, x.flag);
    return ok;
}

// Add packet i of this rank's shard over all ranks, in their order.
__device__ static bool add(const all_pairs_args &a, const part &x, uint64_t i, uint2 *sum)
{
    float low = 0, high = 0;
    for (int r = 0; r < a.job.world_size; r++) {
        uint2 v = ((const uint2 *)a.job.in)[x.packet + i];
        if (r != a.job.rank && !spccl_get_packet(a.channels[r], &v, part_off(x, r) + i * 16, x.flag))
            return false;
        low += __uint_as_float(v.x);
        high += __uint_as_float(v.y);
    }
    sum->x = __float_as_uint(low);
    sum->y = __float_as_uint(high);
    return true;
}

// Add this rank's shard, and give the sum to all.
__device__ static bool add_shard(const all_pairs_args &a, const part &x)
{
    for (uint64_t i = x.thread; i < bytes_of(a.job, x, a.job.rank) / 8; i += x.n_threads) {
        uint2 sum;
        if (!add(a, x, i, &sum))
            return false;
        ((uint2 *)a.job.out)[x.packet + i] = sum;
        for (int p = 0; p < a.job.world_size; p++)
            if (p != a.job.rank &&
                !spccl_put_packet(a.channels[p], sum_off(a.job, x, a.job.rank) + i * 16, sum, x.flag))
                return false;
    }
    return true;
}

__device__ static bool take_sums(const all_pairs_args &a, const part &x)
{
    bool ok = true;
    for (int p = 0; p < a.job.world_size && ok; p++)
        if (p != a.job.rank)
            ok = spccl_get_packets(a.channels[p], a.job.out + (uint64_t)p * x.shard * 2, sum_off(a.job, x, p),
                                   bytes_of(a.job, x, p), x.thread, x.n_threads, x.flag);
    return ok;
}

// A rank that has all packets of a use knows that each peer it puts to has ended the use before. So two halves suffice,
// and nobody signals that a half may be overwritten.
__global__ static void all_pairs(const __grid_constant__ all_pairs_args a)
{
    const all_pairs_job &j = a.job;
    uint32_t uses = *j.uses;
    part x;
    x.flag = uses + 1; // never 0
    x.shard = ALL_PAIRS_SHARD(j.n_elems, j.world_size);
    x.packet = (uint64_t)j.rank * x.shard;
    x.half = uses % 2 * ALL_PAIRS_WINDOW_BYTES(j.n_elems, j.world_size) / 2;
    x.thread = blockIdx.x * blockDim.x + threadIdx.x;
    x.n_threads = gridDim.x * blockDim.x;
    if (x.thread == 0)
        *j.ok = 0;
    bool ok = give_parts(a, x) && add_shard(a, x) && take_sums(a, x);
    // All blocks have read *uses. Other blocks that wait here for one that has failed end too.
    if (!__syncthreads_and(ok) || !spccl_sync_blocks(a.channels[j.rank == 0], gridDim.x))
        return;
    if (x.thread == 0) {
        *j.uses = uses == 0xfffffffdu ? 0 : uses + 1; // an even number of uses: a flag keeps its half
        *j.ok = 1;
    }
}

extern "C" cudaError_t all_pairs_all_reduce(const spccl_memory_channel *channels,
                                            const struct all_pairs_job *job, cudaStream_t stream)
{
    all_pairs_args args = {};
    void *params[] = {&args};
    for (int p = 0; p < job->world_size; p++)
        if (p != job->rank)
            args.channels[p] = channels[p];
    args.job = *job;
    return cudaLaunchKernel(all_pairs, dim3(N_BLOCKS), dim3(N_THREADS), params, 0, stream);
}
