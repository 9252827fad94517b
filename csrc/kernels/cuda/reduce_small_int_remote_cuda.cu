// reduce_small_int_remote_cuda.cu - the kernels of reduce.cuh for int8, int16, uint8, in groups on several hosts.
#include "kernels/cuda/reduce.cuh"

sp_fused_kernel sp_reduce_remote_kernel_of_small_ints(spccl_dtype dtype)
{
    switch (dtype) {
    case SPCCL_INT8:
        return sp_reduce_kernel<SPCCL_INT8, true>;
    case SPCCL_INT16:
        return sp_reduce_kernel<SPCCL_INT16, true>;
    case SPCCL_UINT8:
        return sp_reduce_kernel<SPCCL_UINT8, true>;
    default:
        return nullptr;
    }
}
