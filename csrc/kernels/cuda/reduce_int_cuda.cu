// reduce_int_cuda.cu - the kernels of reduce.cuh for int32, int64.
#include "kernels/cuda/reduce.cuh"

sp_fused_kernel sp_reduce_kernel_of_ints(spccl_dtype dtype)
{
    switch (dtype) {
    case SPCCL_INT32:
        return sp_reduce_kernel<SPCCL_INT32, false>;
    case SPCCL_INT64:
        return sp_reduce_kernel<SPCCL_INT64, false>;
    default:
        return nullptr;
    }
}
