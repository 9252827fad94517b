// reduce_float_remote_cuda.cu - the kernels of reduce.cuh for float32, float64, in groups on several hosts.
#include "kernels/cuda/reduce.cuh"

sp_fused_kernel sp_reduce_remote_kernel_of_floats(spccl_dtype dtype)
{
    switch (dtype) {
    case SPCCL_FLOAT32:
        return sp_reduce_kernel<SPCCL_FLOAT32, true>;
    case SPCCL_FLOAT64:
        return sp_reduce_kernel<SPCCL_FLOAT64, true>;
    default:
        return nullptr;
    }
}
