/* device_cuda.h - what device_cuda.c and memory_cuda.c share: errors, the driver's functions, memory. Needs
 * the CUDA headers. */
#ifndef SP_DEVICE_CUDA_H
#define SP_DEVICE_CUDA_H

#include "core/contract/gpu.h"
#include "kernels/cuda/cuda_check.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

/* As sp_cuda_check, for calls of the driver. */
spccl_status sp_cu_check(CUresult e, const char *call);

/* The driver's functions, found at run time: the library is not linked to libcuda, so it loads without it. */
typedef struct sp_cuda_driver {
    CUresult (*ctx_get_current)(CUcontext *ctx);
    CUresult (*ctx_set_current)(CUcontext ctx);
    CUresult (*get_error_name)(CUresult e, const char **text);
    CUresult (*device_get_attribute)(int *value, CUdevice_attribute attribute, CUdevice device);
    CUresult (*mem_address_range)(CUdeviceptr *base, size_t *bytes, CUdeviceptr p);
    CUresult (*mem_granularity)(size_t *bytes, const CUmemAllocationProp *prop,
                                CUmemAllocationGranularity_flags option);
    CUresult (*mem_create)(CUmemGenericAllocationHandle *handle, size_t bytes,
                           const CUmemAllocationProp *prop, unsigned long long flags);
    CUresult (*mem_release)(CUmemGenericAllocationHandle handle);
    CUresult (*mem_export)(void *out, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type,
                           unsigned long long flags);
    CUresult (*mem_import)(CUmemGenericAllocationHandle *handle, void *in, CUmemAllocationHandleType type);
    CUresult (*address_reserve)(CUdeviceptr *p, size_t bytes, size_t align, CUdeviceptr near,
                                unsigned long long flags);
    CUresult (*address_free)(CUdeviceptr p, size_t bytes);
    CUresult (*mem_map)(CUdeviceptr p, size_t bytes, size_t off, CUmemGenericAllocationHandle handle,
                        unsigned long long flags);
    CUresult (*mem_unmap)(CUdeviceptr p, size_t bytes);
    CUresult (*mem_set_access)(CUdeviceptr p, size_t bytes, const CUmemAccessDesc *desc, size_t n);
    /* NULL: the driver is older than CUDA 11.7 */
    CUresult (*mem_range_handle)(void *out, CUdeviceptr p, size_t bytes, CUmemRangeHandleType type,
                                 unsigned long long flags);
} sp_cuda_driver;

/* *out = the functions, valid for ever. Errors: DEVICE (no driver, or a function is missing; the text names
 * it). */
spccl_status sp_cuda_driver_get(const sp_cuda_driver **out);

/* memory_cuda.c: the entries of sp_gpu_ops for memory; see gpu.h. */
bool sp_cuda_can_share_fd(int ordinal);
spccl_status sp_cuda_memory_create(int ordinal, size_t bytes, const char *handles, bool for_network,
                                   sp_gpu_memory **out);
spccl_status sp_cuda_memory_dmabuf(const sp_gpu_memory *m, size_t bytes, int *fd, uint64_t *offset);
spccl_status sp_cuda_memory_borrow(int ordinal, void *p, size_t bytes, sp_gpu_memory **out);
spccl_status sp_cuda_memory_export(sp_gpu_memory *m, uint8_t *handle, int *fd);
spccl_status sp_cuda_memory_import(int ordinal, const uint8_t *handle, int fd, size_t bytes,
                                   sp_gpu_memory **out);
void *sp_cuda_memory_address(const sp_gpu_memory *m);
void sp_cuda_memory_destroy(sp_gpu_memory *m);
spccl_status sp_cuda_upload(int ordinal, const void *host, size_t bytes, size_t capacity, void **out);

/* device_cuda.c */
spccl_status sp_cuda_enter(int ordinal, int *before);
void sp_cuda_leave(int before);

#endif
