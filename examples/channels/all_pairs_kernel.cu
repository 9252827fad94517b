// all_pairs_kernel.cu - a kernel that adds the arrays of all ranks, with packets: for small arrays, where latency counts.
#include "all_pairs_kernel.h"

#include <spccl_device.cuh>

constexpr unsigned N_THREADS = 256;

struct all_pairs_args {
    spccl_memory_channel channels[ALL_PAIRS_RANKS_MAX];
    all_pairs_job job;
};

// Where packet i of a rank comes in the windows of its peers.
__device__ static uint64_t place(const all_pairs_job &j, uint32_t uses, int rank, uint64_t i)
{
    uint64_t half = uses % 2;
    return ((half * j.world_size + rank) * (j.n_elems / 2) + i) * 16;
}

// Put packet i of this rank to all peers.
__device__ static bool put(const all_pairs_args &a, uint32_t uses, uint64_t i)
{
    const all_pairs_job &j = a.job;
    uint2 v = ((const uint2 *)j.in)[i];
    bool ok = true;
    for (int p = 0; p < j.world_size; p++)
        if (p != j.rank)
            ok &= spccl_put_packet(a.channels[p], place(j, uses, j.rank, i), v, uses + 1); // never 0
    return ok;
}

// Add packet i of all ranks, in their order.
__device__ static bool add(const all_pairs_args &a, uint32_t uses, uint64_t i)
{
    const all_pairs_job &j = a.job;
    float low = 0, high = 0;
    for (int r = 0; r < j.world_size; r++) {
        uint2 v;
        if (r == j.rank)
            v = ((const uint2 *)j.in)[i];
        else if (!spccl_get_packet(a.channels[r], &v, place(j, uses, r, i), uses + 1))
            return false;
        low += __uint_as_float(v.x);
        high += __uint_as_float(v.y);
    }
    ((uint2 *)j.out)[i] = {__float_as_uint(low), __float_as_uint(high)};
    return true;
}

// Launches of a set are in the order of a stream. On every rank the same thread of the grid puts and reads packet i. In
// use n + 1 it overwrites what it put in use n - 1.
// By then it has read all peers' packets of use n, which their threads put after they had read those of use n - 1. So two
// halves suffice, and nobody signals that a half may be overwritten. Blocks do not meet, so each counts its own uses.
__global__ static void all_pairs(const __grid_constant__ all_pairs_args a)
{
    uint64_t n = a.job.n_elems / 2, step = gridDim.x * blockDim.x;
    uint64_t first = blockIdx.x * blockDim.x + threadIdx.x;
    uint32_t *counter = &a.job.uses[blockIdx.x], uses = *counter;
    bool ok = true;
    for (uint64_t i = first; i < n; i += step)
        ok &= put(a, uses, i);
    for (uint64_t i = first; i < n && ok; i += step)
        ok = add(a, uses, i);
    // All threads of the block have read the counter. The counter takes an even number of values: a flag keeps its half.
    if (__syncthreads_and(ok) && threadIdx.x == 0)
        *counter = uses == 0xfffffffdu ? 0 : uses + 1;
}

extern "C" cudaError_t all_pairs_all_reduce(const spccl_memory_channel *channels,
                                            const struct all_pairs_job *job, cudaStream_t stream)
{
    all_pairs_args args = {};
    void *params[] = {&args};
    uint64_t n_blocks = (job->n_elems / 2 + N_THREADS - 1) / N_THREADS;
    if (n_blocks > ALL_PAIRS_BLOCKS_MAX)
        n_blocks = ALL_PAIRS_BLOCKS_MAX;
    for (int p = 0; p < job->world_size; p++)
        if (p != job->rank)
            args.channels[p] = channels[p];
    args.job = *job;
    return cudaLaunchKernel(all_pairs, dim3((unsigned)n_blocks), dim3(N_THREADS), params, 0, stream);
}
