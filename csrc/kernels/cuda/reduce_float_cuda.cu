// reduce_float_cuda.cu - the kernels of reduce.cuh for float32, float64.
#include "kernels/cuda/reduce.cuh"

sp_fused_kernel sp_reduce_kernel_of_floats(spccl_dtype dtype)
{
    switch (dtype) {
    case SPCCL_FLOAT32:
        return sp_reduce_kernel<SPCCL_FLOAT32, false>;
    case SPCCL_FLOAT64:
        return sp_reduce_kernel<SPCCL_FLOAT64, false>;
    default:
        return nullptr;
    }
}
