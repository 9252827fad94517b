// reduce_half_cuda.cu - the kernels of reduce.cuh for float16, bfloat16.
#include "kernels/cuda/reduce.cuh"

sp_fused_kernel sp_reduce_kernel_of_halves(spccl_dtype dtype)
{
    switch (dtype) {
    case SPCCL_FLOAT16:
        return sp_reduce_kernel<SPCCL_FLOAT16, false>;
    case SPCCL_BFLOAT16:
        return sp_reduce_kernel<SPCCL_BFLOAT16, false>;
    default:
        return nullptr;
    }
}
