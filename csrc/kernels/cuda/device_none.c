/* device_none.c - replaces device_cuda.c in a build without CUDA. */
#include "core/contract/gpu.h"
#include "no_cuda_why.h" /* written by cuda.cmake */

#include <stddef.h>

const sp_gpu_ops *sp_gpu_ops_get(const char **why_none)
{
    if (why_none != NULL)
        *why_none = SPCCL_NO_CUDA_WHY;
    return NULL;
}
