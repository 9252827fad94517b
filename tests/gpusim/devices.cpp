// devices.cpp - the part of the CUDA runtime and driver that concerns devices, memory and errors, for GPUs in
// software. GPUSIM_GPUS is their number; the default is 4.
#include "runtime.h"

#include <cuda.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>

#include <sys/mman.h>

namespace
{

constexpr int MULTIPROCESSORS = 3, BLOCKS_EACH = 2; // BLOCKS_EACH: CTAs of the codec per SM
constexpr size_t MEMORY_BYTES = (size_t)8 << 30;

std::mutex &mu = *new std::mutex;                                     // never destroyed; runtime.cpp says why
auto &allocations = *new std::map<uintptr_t, std::pair<size_t, int>>; // start -> bytes, device
auto &pinned = *new std::map<uintptr_t, size_t>;                      // start -> bytes
auto &of_pools = *new std::set<uintptr_t>; // starts of those that have no IPC handle
size_t allocated;
thread_local int device_now = -1;
thread_local cudaError_t last_error = cudaSuccess;

int n_devices()
{
    const char *text = getenv("GPUSIM_GPUS");
    return text != nullptr ? atoi(text) : 4;
}

} // namespace

cudaError_t gpusim_fail(cudaError_t e)
{
    last_error = e;
    return e;
}

extern "C" {

// ---- errors, driver ----

const char *cudaGetErrorName(cudaError_t e)
{
    static const char *const names[] = {"cudaSuccess",
                                        "cudaErrorInvalidValue",
                                        "cudaErrorMemoryAllocation",
                                        "cudaErrorInsufficientDriver",
                                        "cudaErrorInvalidDevice",
                                        "cudaErrorNoDevice",
                                        "cudaErrorNotReady",
                                        "cudaErrorNotSupported",
                                        "cudaErrorPeerAccessAlreadyEnabled",
                                        "cudaErrorStreamCaptureInvalidated"};
    return names[e];
}
const char *cudaGetErrorString(cudaError_t e)
{
    return cudaGetErrorName(e);
}
cudaError_t cudaGetLastError(void)
{
    cudaError_t e = last_error;
    last_error = cudaSuccess;
    return e;
}
cudaError_t cudaDriverGetVersion(int *version)
{
    *version = CUDART_VERSION;
    return cudaSuccess;
}

static CUresult get_context(CUcontext *out)
{
    *out = device_now < 0 ? nullptr : (CUcontext)(uintptr_t)(device_now + 1);
    return CUDA_SUCCESS;
}
static CUresult set_context(CUcontext c)
{
    device_now = (int)(uintptr_t)c - 1;
    return CUDA_SUCCESS;
}
static CUresult get_attribute(int *value, CUdevice_attribute, CUdevice)
{
    *value = 0; // no VMM: inboxes are shared by ipc, within the process as plain pointers
    return CUDA_SUCCESS;
}
static CUresult get_address_range(CUdeviceptr *base, size_t *bytes, CUdeviceptr p)
{
    std::lock_guard<std::mutex> lock(mu);
    auto after = allocations.upper_bound((uintptr_t)p);
    if (after == allocations.begin() || p - (--after)->first >= after->second.first)
        return CUDA_ERROR_NOT_SUPPORTED;
    *base = after->first;
    *bytes = after->second.first;
    return CUDA_SUCCESS;
}
// A descriptor that is no dmabuf: no driver of a network device registers it.
static CUresult get_range_handle(void *out, CUdeviceptr, size_t, CUmemRangeHandleType, unsigned long long)
{
    *(int *)out = memfd_create("gpusim", MFD_CLOEXEC);
    return *(int *)out >= 0 ? CUDA_SUCCESS : CUDA_ERROR_NOT_SUPPORTED;
}
static CUresult not_supported(void)
{
    return CUDA_ERROR_NOT_SUPPORTED;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **p, unsigned, unsigned long long,
                                             enum cudaDriverEntryPointQueryResult *found)
{
    *found = cudaDriverEntryPointSuccess;
    *p = strcmp(name, "cuCtxGetCurrent") == 0                 ? (void *)get_context
         : strcmp(name, "cuCtxSetCurrent") == 0               ? (void *)set_context
         : strcmp(name, "cuDeviceGetAttribute") == 0          ? (void *)get_attribute
         : strcmp(name, "cuMemGetAddressRange") == 0          ? (void *)get_address_range
         : strcmp(name, "cuMemGetHandleForAddressRange") == 0 ? (void *)get_range_handle
                                                              : (void *)not_supported;
    return cudaSuccess;
}

// ---- devices ----

cudaError_t cudaGetDeviceCount(int *n)
{
    *n = n_devices();
    return *n > 0 ? cudaSuccess : gpusim_fail(cudaErrorNoDevice);
}
cudaError_t cudaGetDevice(int *device)
{
    *device = device_now < 0 ? 0 : device_now;
    return cudaSuccess;
}
cudaError_t cudaSetDevice(int device)
{
    if (device < 0 || device >= n_devices())
        return gpusim_fail(cudaErrorInvalidDevice);
    device_now = device;
    return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *out, int device)
{
    if (device < 0 || device >= n_devices())
        return gpusim_fail(cudaErrorInvalidDevice);
    *out = {};
    snprintf(out->name, sizeof out->name, "GPU in software");
    out->uuid.bytes[0] = (char)(device + 1);
    out->major = 9;
    out->multiProcessorCount = MULTIPROCESSORS;
    out->totalGlobalMem = MEMORY_BYTES;
    out->sharedMemPerBlockOptin = GPUSIM_SHARED_BYTES;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int)
{
    *value = attribute == cudaDevAttrMultiProcessorCount ? MULTIPROCESSORS : (int)GPUSIM_SHARED_BYTES;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char *out, int cap, int device)
{
    snprintf(out, (size_t)cap, "FFFF:%02X:00.0", device); // no such device
    return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int *yes, int, int)
{
    *yes = 1;
    return cudaSuccess;
}
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned)
{
    return cudaSuccess;
}

// ---- memory ----

cudaError_t cudaMalloc(void **p, size_t bytes)
{
    std::lock_guard<std::mutex> lock(mu);
    if (bytes == 0 || allocated + bytes > MEMORY_BYTES)
        return gpusim_fail(cudaErrorMemoryAllocation);
    if (posix_memalign(p, 256, bytes) != 0) // exactly `bytes`, so that sanitizers see accesses past the end
        return gpusim_fail(cudaErrorMemoryAllocation);
    memset(*p, 0xa5, bytes);
    allocated += bytes;
    allocations[(uintptr_t)*p] = {bytes, device_now < 0 ? 0 : device_now};
    return cudaSuccess;
}
cudaError_t cudaMallocAsync(void **p, size_t bytes, cudaStream_t)
{
    cudaError_t e = cudaMalloc(p, bytes);
    std::lock_guard<std::mutex> lock(mu);
    if (e == cudaSuccess)
        of_pools.insert((uintptr_t)*p);
    return e;
}
// As on GPUs, this waits for all work of the device, also of other threads.
cudaError_t cudaFree(void *p)
{
    struct cudaPointerAttributes of;
    cudaPointerGetAttributes(&of, p);
    if (of.type == cudaMemoryTypeDevice)
        gpusim_wait_for_device(of.device);
    std::lock_guard<std::mutex> lock(mu);
    of_pools.erase((uintptr_t)p);
    auto found = allocations.find((uintptr_t)p);
    if (p == nullptr)
        return cudaSuccess;
    if (found == allocations.end())
        return gpusim_fail(cudaErrorInvalidValue);
    allocated -= found->second.first;
    allocations.erase(found);
    free(p);
    return cudaSuccess;
}
cudaError_t cudaHostAlloc(void **p, size_t bytes, unsigned)
{
    if (posix_memalign(p, 256, bytes) != 0)
        return gpusim_fail(cudaErrorMemoryAllocation);
    std::lock_guard<std::mutex> lock(mu);
    pinned[(uintptr_t)*p] = bytes;
    return cudaSuccess;
}
cudaError_t cudaFreeHost(void *p)
{
    if (p != nullptr)
        gpusim_wait_for_device(device_now < 0 ? 0 : device_now);
    std::lock_guard<std::mutex> lock(mu);
    pinned.erase((uintptr_t)p);
    free(p);
    return cudaSuccess;
}
cudaError_t cudaHostGetDevicePointer(void **device, void *host, unsigned)
{
    *device = host;
    return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *out, const void *p)
{
    std::lock_guard<std::mutex> lock(mu);
    auto after = allocations.upper_bound((uintptr_t)p);
    *out = {cudaMemoryTypeUnregistered, -1};
    if (after != allocations.begin()) {
        auto &a = *--after;
        if ((uintptr_t)p - a.first < a.second.first)
            *out = {cudaMemoryTypeDevice, a.second.second};
    }
    auto host = pinned.upper_bound((uintptr_t)p);
    if (host != pinned.begin() && (uintptr_t)p - (--host)->first < host->second)
        *out = {cudaMemoryTypeHost, -1};
    return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total)
{
    std::lock_guard<std::mutex> lock(mu);
    *total = MEMORY_BYTES;
    *free_bytes = MEMORY_BYTES - allocated;
    return cudaSuccess;
}
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *out, void *p)
{
    std::lock_guard<std::mutex> lock(mu);
    if (of_pools.count((uintptr_t)p) != 0)
        return gpusim_fail(cudaErrorInvalidValue);
    memset(out, 0, sizeof *out); // within a process the library uses the pointer itself
    return cudaSuccess;
}
cudaError_t cudaIpcOpenMemHandle(void **, cudaIpcMemHandle_t, unsigned)
{
    return gpusim_fail(cudaErrorNotSupported);
}
cudaError_t cudaIpcCloseMemHandle(void *)
{
    return gpusim_fail(cudaErrorNotSupported);
}

// ---- kernels ----

cudaError_t cudaFuncSetAttribute(const void *, enum cudaFuncAttribute, int value)
{
    return (size_t)value <= GPUSIM_SHARED_BYTES ? cudaSuccess : gpusim_fail(cudaErrorInvalidValue);
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *out, const void *, int, size_t shared)
{
    *out = shared * BLOCKS_EACH <= GPUSIM_SHARED_BYTES ? BLOCKS_EACH : 1;
    return cudaSuccess;
}
}
