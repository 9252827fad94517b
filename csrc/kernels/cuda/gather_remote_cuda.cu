// gather_remote_cuda.cu - the kernels of gather.cuh for groups on several hosts.
#include "kernels/cuda/gather.cuh"

sp_fused_kernel sp_gather_remote_kernel_of(size_t elem_bytes)
{
    switch (elem_bytes) {
    case 1:
        return sp_gather_kernel<1, true>;
    case 2:
        return sp_gather_kernel<2, true>;
    case 4:
        return sp_gather_kernel<4, true>;
    default:
        return sp_gather_kernel<8, true>;
    }
}
