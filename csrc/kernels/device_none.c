/* device_none.c - stands in for device_cuda.c in a build without CUDA. */
#include "gpu.h"

#include <stddef.h>

const sp_gpu_ops *sp_gpu_ops_get(void)
{
    return NULL;
}
