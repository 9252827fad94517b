// launch.cuh - launching a kernel that takes one struct, with as many CTAs as run at once.
#ifndef SP_LAUNCH_CUH
#define SP_LAUNCH_CUH

#include "kernels/cuda/cuda_check.h"

#include <stdint.h>

// *out = CTAs of a kernel that run at once on the current GPU.
static inline spccl_status sp_resident_ctas(const void *kernel, uint32_t n_threads, size_t shared_bytes,
                                            int *out)
{
    int device = 0, n_sms = 0, each = 0;
    SP_TRY_CUDA(cudaGetDevice(&device));
    SP_TRY_CUDA(cudaDeviceGetAttribute(&n_sms, cudaDevAttrMultiProcessorCount, device));
    SP_TRY_CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, kernel, (int)n_threads, shared_bytes));
    if (each == 0)
        return SP_FAIL(SPCCL_ERR_UNSUPPORTED,
                       "GPU %d has too little shared memory: a CTA of a kernel needs %zu bytes", device,
                       shared_bytes);
    *out = n_sms * each;
    return SPCCL_OK;
}

struct sp_launch_shape {
    uint32_t n_ctas, n_threads;
    size_t shared_bytes;
};
// what: for the text of an error.
template <class ARGS>
static spccl_status sp_launch(void (*kernel)(ARGS), const sp_launch_shape &shape, const ARGS *a, void *stream,
                              const char *what)
{
    void *params[] = {const_cast<ARGS *>(a)};
    return sp_cuda_check(cudaLaunchKernel(kernel, dim3(shape.n_ctas), dim3(shape.n_threads), params,
                                          shape.shared_bytes, (cudaStream_t)stream),
                         what);
}

#endif
