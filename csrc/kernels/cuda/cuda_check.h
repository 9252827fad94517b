/* cuda_check.h - CUDA error -> spccl_status, with the call's text. For C and CUDA files. */
#ifndef SP_CUDA_CHECK_H
#define SP_CUDA_CHECK_H

#include "core/base/status.h"

#include <cuda_runtime_api.h>

#ifdef __cplusplus
extern "C"
#endif
    /* SPCCL_OK, or an error with the call and CUDA's name and text for it: NOMEM for want of memory, else
     * DEVICE. Clears the runtime's last error, so that the caller's own checks do not find ours. */
    spccl_status
    sp_cuda_check(cudaError_t e, const char *call);

#define SP_TRY_CUDA(call) SP_TRY(sp_cuda_check((call), #call))

#endif
