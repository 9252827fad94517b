// reduce_small_int_cuda.cu - the kernels of reduce.cuh for int8, int16, uint8.
#include "kernels/cuda/reduce.cuh"

sp_fused_kernel sp_reduce_kernel_of_small_ints(spccl_dtype dtype)
{
    switch (dtype) {
    case SPCCL_INT8:
        return sp_reduce_kernel<SPCCL_INT8, false>;
    case SPCCL_INT16:
        return sp_reduce_kernel<SPCCL_INT16, false>;
    case SPCCL_UINT8:
        return sp_reduce_kernel<SPCCL_UINT8, false>;
    default:
        return nullptr;
    }
}
