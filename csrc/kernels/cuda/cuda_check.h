/* cuda_check.h - turns a CUDA error into an spccl_status. For C and CUDA files. */
#ifndef SP_CUDA_CHECK_H
#define SP_CUDA_CHECK_H

#include "core/base/status.h"

#include <cuda_runtime_api.h>

#ifdef __cplusplus
extern "C"
#endif
    /* SPCCL_OK; or NOMEM if CUDA has no memory, else DEVICE, with the call and CUDA's name and text of the
     * error. Clears the runtime's last error, so that the caller's own checks do not see it. */
    spccl_status
    sp_cuda_check(cudaError_t e, const char *call);

#define SP_TRY_CUDA(call) SP_TRY(sp_cuda_check((call), #call))

#endif
