// reduce_int_remote_cuda.cu - the kernels of reduce.cuh for int32, int64, in groups on several hosts.
#include "kernels/cuda/reduce.cuh"

sp_fused_kernel sp_reduce_remote_kernel_of_ints(spccl_dtype dtype)
{
    switch (dtype) {
    case SPCCL_INT32:
        return sp_reduce_kernel<SPCCL_INT32, true>;
    case SPCCL_INT64:
        return sp_reduce_kernel<SPCCL_INT64, true>;
    default:
        return nullptr;
    }
}
