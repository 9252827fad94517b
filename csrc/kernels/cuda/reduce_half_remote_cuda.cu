// reduce_half_remote_cuda.cu - the kernels of reduce.cuh for float16, bfloat16, in groups on several hosts.
#include "kernels/cuda/reduce.cuh"

sp_fused_kernel sp_reduce_remote_kernel_of_halves(spccl_dtype dtype)
{
    switch (dtype) {
    case SPCCL_FLOAT16:
        return sp_reduce_kernel<SPCCL_FLOAT16, true>;
    case SPCCL_BFLOAT16:
        return sp_reduce_kernel<SPCCL_BFLOAT16, true>;
    default:
        return nullptr;
    }
}
