// gather_cuda.cu - all-gather and broadcast in one launch (docs/ALGORITHMS.md: The direct schedule on a GPU).
// Dtypes of the same size share a kernel, as elements are moved but never added.
//
// Least traffic of GPU memory: an all-gather reads a shard and writes the array. While frames are small, the
// rings stay in the L2 cache.
#include "kernels/cuda/gather.cuh"

sp_fused_kernel sp_gather_kernel_of(size_t elem_bytes)
{
    switch (elem_bytes) {
    case 1:
        return sp_gather_kernel<1, false>;
    case 2:
        return sp_gather_kernel<2, false>;
    case 4:
        return sp_gather_kernel<4, false>;
    default:
        return sp_gather_kernel<8, false>;
    }
}
