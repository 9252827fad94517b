/* device_cuda.c - fills the table sp_gpu_ops with CUDA: devices, streams, events, functions of the driver.
 * The runtime is linked statically and the driver is looked up on first use, so the library also loads on
 * machines without either. memory_cuda.c has the memory that peers map. */
#include "kernels/cuda/device_cuda.h"

#include "kernels/cuda/kernels_cuda.h"

#include <ctype.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

/* ---- errors, driver ---- */

static sp_cuda_driver driver;
static char driver_lacks[160]; /* the first function that the driver lacks; "" = none */
static pthread_once_t driver_once = PTHREAD_ONCE_INIT;

spccl_status sp_cuda_check(cudaError_t e, const char *call)
{
    if (e == cudaSuccess)
        return SPCCL_OK;
    (void)cudaGetLastError();
    return SP_FAIL(e == cudaErrorMemoryAllocation ? SPCCL_ERR_NOMEM : SPCCL_ERR_DEVICE, "%s: %s (%s)", call,
                   cudaGetErrorName(e), cudaGetErrorString(e));
}

spccl_status sp_cu_check(CUresult e, const char *call)
{
    const char *name = NULL;
    if (e == CUDA_SUCCESS)
        return SPCCL_OK;
    if (driver.get_error_name == NULL || driver.get_error_name(e, &name) != CUDA_SUCCESS || name == NULL)
        name = "unknown error";
    return SP_FAIL(e == CUDA_ERROR_OUT_OF_MEMORY ? SPCCL_ERR_NOMEM : SPCCL_ERR_DEVICE, "%s: %s (%d)", call,
                   name, (int)e);
}

static void *find_function(const char *name)
{
    void *p = NULL;
    enum cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    cudaError_t e;
#if CUDART_VERSION >= 12050
    /* Ask for the interface that this file was written for; newer drivers still have it. */
    e = cudaGetDriverEntryPointByVersion(name, &p, 12000, cudaEnableDefault, &found);
#else
    e = cudaGetDriverEntryPoint(name, &p, cudaEnableDefault, &found);
#endif
    if (e != cudaSuccess || found != cudaDriverEntryPointSuccess) {
        (void)cudaGetLastError();
        return NULL;
    }
    return p;
}

static void load_driver(void)
{
    static const struct {
        const char *name;
        size_t at;
    } wanted[] = {
        {"cuCtxGetCurrent", offsetof(sp_cuda_driver, ctx_get_current)},
        {"cuCtxSetCurrent", offsetof(sp_cuda_driver, ctx_set_current)},
        {"cuGetErrorName", offsetof(sp_cuda_driver, get_error_name)},
        {"cuDeviceGetAttribute", offsetof(sp_cuda_driver, device_get_attribute)},
        {"cuMemGetAddressRange", offsetof(sp_cuda_driver, mem_address_range)},
        {"cuMemGetAllocationGranularity", offsetof(sp_cuda_driver, mem_granularity)},
        {"cuMemCreate", offsetof(sp_cuda_driver, mem_create)},
        {"cuMemRelease", offsetof(sp_cuda_driver, mem_release)},
        {"cuMemExportToShareableHandle", offsetof(sp_cuda_driver, mem_export)},
        {"cuMemImportFromShareableHandle", offsetof(sp_cuda_driver, mem_import)},
        {"cuMemAddressReserve", offsetof(sp_cuda_driver, address_reserve)},
        {"cuMemAddressFree", offsetof(sp_cuda_driver, address_free)},
        {"cuMemMap", offsetof(sp_cuda_driver, mem_map)},
        {"cuMemUnmap", offsetof(sp_cuda_driver, mem_unmap)},
        {"cuMemSetAccess", offsetof(sp_cuda_driver, mem_set_access)},
    };
    void *optional = find_function("cuMemGetHandleForAddressRange");
    memcpy(&driver.mem_range_handle, &optional, sizeof optional);
    for (size_t i = 0; i < sizeof wanted / sizeof wanted[0]; i++) {
        void *p = find_function(wanted[i].name);
        memcpy((char *)&driver + wanted[i].at, &p, sizeof p);
        if (p == NULL && driver_lacks[0] == '\0')
            snprintf(driver_lacks, sizeof driver_lacks, "%s", wanted[i].name);
    }
}

spccl_status sp_cuda_driver_get(const sp_cuda_driver **out)
{
    pthread_once(&driver_once, load_driver);
    if (driver_lacks[0] != '\0')
        return SP_FAIL(SPCCL_ERR_DEVICE,
                       "the CUDA driver of this machine has no %s: is it installed, and of "
                       "CUDA 12 or newer?",
                       driver_lacks);
    *out = &driver;
    return SPCCL_OK;
}

/* ---- devices ---- */

static spccl_status device_count(int *out)
{
    int n = 0, version = 0;
    cudaError_t e = cudaGetDeviceCount(&n);
    if (e != cudaSuccess)
        (void)cudaGetLastError();
    if (e == cudaErrorNoDevice ||
        (e == cudaErrorInsufficientDriver && cudaDriverGetVersion(&version) == cudaSuccess && version == 0)) {
        *out = 0;
        return SPCCL_OK;
    }
    if (e == cudaErrorInsufficientDriver)
        return SP_FAIL(SPCCL_ERR_DEVICE,
                       "the CUDA driver of this machine is for CUDA %d.%d, this build of spccl for %d.%d: "
                       "install a newer driver",
                       version / 1000, version % 1000 / 10, CUDART_VERSION / 1000,
                       CUDART_VERSION % 1000 / 10);
    SP_TRY(sp_cuda_check(e, "cudaGetDeviceCount"));
    *out = n;
    return SPCCL_OK;
}

static spccl_status current_device(int *out)
{
    return sp_cuda_check(cudaGetDevice(out), "cudaGetDevice");
}

spccl_status sp_cuda_enter(int ordinal, int *before)
{
    const sp_cuda_driver *d;
    CUcontext ctx = NULL;
    int now = -1;
    SP_TRY(sp_cuda_driver_get(&d));
    SP_TRY(sp_cu_check(d->ctx_get_current(&ctx), "cuCtxGetCurrent"));
    /* A thread without a context is on no GPU yet. "Restoring" the default GPU would create a context there,
     * which takes hundreds of MB of its memory. */
    if (ctx != NULL)
        SP_TRY(current_device(&now));
    if (now != ordinal)
        SP_TRY(sp_cuda_check(cudaSetDevice(ordinal), "cudaSetDevice"));
    *before = now;
    return SPCCL_OK;
}

void sp_cuda_leave(int before)
{
    int now = -1;
    if (before < 0)
        (void)driver.ctx_set_current(NULL);
    else if (cudaGetDevice(&now) != cudaSuccess || now != before)
        (void)cudaSetDevice(before);
}

static spccl_status describe_device(int ordinal, sp_gpu_device *out)
{
    struct cudaDeviceProp p;
    SP_TRY(sp_cuda_check(cudaGetDeviceProperties(&p, ordinal), "cudaGetDeviceProperties"));
    *out = (sp_gpu_device){.ordinal = ordinal,
                           .n_sms = (uint32_t)p.multiProcessorCount,
                           .can_share_fd = sp_cuda_can_share_fd(ordinal)};
    snprintf(out->name, sizeof out->name, "%.*s", (int)sizeof out->name - 1, p.name);
    memcpy(out->uuid, p.uuid.bytes, sizeof out->uuid);
    return SPCCL_OK;
}

static spccl_status net_facts(int ordinal, sp_gpu_net_facts *out)
{
    const sp_cuda_driver *d;
    int dmabuf = 0, ordering = CU_GPU_DIRECT_RDMA_WRITES_ORDERING_NONE;
    *out = (sp_gpu_net_facts){.dmabuf = false};
    SP_TRY(sp_cuda_driver_get(&d));
    SP_TRY(sp_cuda_check(cudaDeviceGetPCIBusId(out->pci, (int)sizeof out->pci, ordinal),
                         "cudaDeviceGetPCIBusId"));
    SP_TRY(sp_cu_check(d->device_get_attribute(&dmabuf, CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED, ordinal),
                       "cuDeviceGetAttribute"));
    SP_TRY(sp_cu_check(
        d->device_get_attribute(&ordering, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING, ordinal),
        "cuDeviceGetAttribute"));
    out->dmabuf = dmabuf != 0;
    out->writes_ordered = ordering >= CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER;
    for (char *c = out->pci; *c != '\0'; c++)
        *c = (char)tolower((unsigned char)*c); /* as sysfs writes it */
    return SPCCL_OK;
}

static spccl_status device_of(const void *p, int *ordinal)
{
    struct cudaPointerAttributes a;
    SP_TRY(sp_cuda_check(cudaPointerGetAttributes(&a, p), "cudaPointerGetAttributes"));
    *ordinal = a.type == cudaMemoryTypeDevice || a.type == cudaMemoryTypeManaged ? a.device : -1;
    return SPCCL_OK;
}

static spccl_status can_access(int ordinal, int peer_ordinal, bool *out)
{
    int yes = 1;
    if (ordinal != peer_ordinal)
        SP_TRY(
            sp_cuda_check(cudaDeviceCanAccessPeer(&yes, ordinal, peer_ordinal), "cudaDeviceCanAccessPeer"));
    *out = yes != 0;
    return SPCCL_OK;
}

static spccl_status memory_free(size_t *out_bytes)
{
    size_t total;
    return sp_cuda_check(cudaMemGetInfo(out_bytes, &total), "cudaMemGetInfo");
}

/* ---- memory that both host and GPU write ---- */

static spccl_status pinned_create(size_t bytes, void **host, void **device)
{
    void *h = NULL, *d = NULL;
    spccl_status st;
    SP_TRY(sp_cuda_check(cudaHostAlloc(&h, bytes, cudaHostAllocMapped | cudaHostAllocPortable),
                         "cudaHostAlloc"));
    memset(h, 0, bytes);
    st = sp_cuda_check(cudaHostGetDevicePointer(&d, h, 0), "cudaHostGetDevicePointer");
    if (st != SPCCL_OK) {
        (void)cudaFreeHost(h);
        return st;
    }
    *host = h;
    *device = d;
    return SPCCL_OK;
}

static void pinned_destroy(void *host)
{
    if (host != NULL && cudaFreeHost(host) != cudaSuccess)
        (void)cudaGetLastError();
}

static bool is_pinned(const void *p)
{
    struct cudaPointerAttributes of;
    if (cudaPointerGetAttributes(&of, p) == cudaSuccess)
        return of.type == cudaMemoryTypeHost;
    (void)cudaGetLastError();
    return false;
}

static spccl_status pinned_find(void *host, size_t bytes, void **device)
{
    if (!is_pinned(host) || !is_pinned((const uint8_t *)host + bytes - 1))
        return SP_FAIL(SPCCL_ERR_ARG,
                       "%zu bytes at %p are not pinned host memory: wanted memory from cudaHostAlloc or "
                       "cudaHostRegister (PyTorch: pin_memory=True)",
                       bytes, host);
    return sp_cuda_check(cudaHostGetDevicePointer(device, host, 0), "cudaHostGetDevicePointer");
}

static spccl_status control_create(sp_gpu_control **host, sp_gpu_control **device)
{
    void *h = NULL, *d = NULL;
    SP_TRY(pinned_create(sizeof **host, &h, &d));
    *host = h;
    *device = d;
    return SPCCL_OK;
}

static void control_destroy(sp_gpu_control *host)
{
    pinned_destroy(host);
}

/* ---- streams and events ---- */

static spccl_status event_create(void **out)
{
    cudaEvent_t e = NULL;
    SP_TRY(sp_cuda_check(cudaEventCreateWithFlags(&e, cudaEventDisableTiming), "cudaEventCreateWithFlags"));
    *out = e;
    return SPCCL_OK;
}

static spccl_status event_record(void *event, void *stream)
{
    return sp_cuda_check(cudaEventRecord(event, stream), "cudaEventRecord");
}

/* cudaErrorNotReady is no failure, but the runtime keeps it as its last error unless it is cleared. */
static spccl_status ready(cudaError_t e, const char *call)
{
    if (e == cudaErrorNotReady) {
        (void)cudaGetLastError();
        return SPCCL_AGAIN;
    }
    return sp_cuda_check(e, call);
}

static spccl_status event_query(void *event)
{
    return ready(cudaEventQuery(event), "cudaEventQuery");
}

static spccl_status stream_wait(void *stream, void *event)
{
    return sp_cuda_check(cudaStreamWaitEvent(stream, event, 0), "cudaStreamWaitEvent");
}

static void event_destroy(void *event)
{
    if (event != NULL && cudaEventDestroy(event) != cudaSuccess)
        (void)cudaGetLastError();
}

static spccl_status stream_query(void *stream)
{
    return ready(cudaStreamQuery(stream), "cudaStreamQuery");
}

static spccl_status capture_id(void *stream, unsigned long long *id)
{
    enum cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    unsigned long long found = 0;
    cudaError_t e;
    *id = 0;
    if (stream == NULL) /* cannot be captured; the question fails while a blocking stream is being captured */
        return SPCCL_OK;
#if CUDART_VERSION >= 13000
    e = cudaStreamGetCaptureInfo(stream, &status, &found, NULL, NULL, NULL, NULL);
#else
    e = cudaStreamGetCaptureInfo_v2(stream, &status, &found, NULL, NULL, NULL);
#endif
    SP_TRY(sp_cuda_check(e, "cudaStreamGetCaptureInfo"));
    if (status == cudaStreamCaptureStatusInvalidated)
        return SP_FAIL(SPCCL_ERR_DEVICE, "the capture of this stream was invalidated by an earlier error");
    *id = status == cudaStreamCaptureStatusActive ? found : 0;
    return SPCCL_OK;
}

static spccl_status stream_id(void *stream, unsigned long long *id)
{
    return sp_cuda_check(cudaStreamGetId(stream, id), "cudaStreamGetId");
}

static void unload(int ordinal, void *device)
{
    int before;
    if (device == NULL || sp_cuda_enter(ordinal, &before) != SPCCL_OK)
        return;
    if (cudaFree(device) != cudaSuccess)
        (void)cudaGetLastError();
    sp_cuda_leave(before);
}

/* ---- the table ---- */

static const sp_gpu_ops ops = {
    .name = "cuda",
    .about = "CUDA " SPCCL_CUDA_VERSION ", compiled for " SPCCL_CUDA_ARCHS,
    .device_count = device_count,
    .current_device = current_device,
    .describe = describe_device,
    .net_facts = net_facts,
    .enter = sp_cuda_enter,
    .leave = sp_cuda_leave,
    .device_of = device_of,
    .can_access = can_access,
    .memory_free = memory_free,
    .memory_create = sp_cuda_memory_create,
    .memory_dmabuf = sp_cuda_memory_dmabuf,
    .memory_borrow = sp_cuda_memory_borrow,
    .memory_export = sp_cuda_memory_export,
    .memory_import = sp_cuda_memory_import,
    .memory_address = sp_cuda_memory_address,
    .memory_destroy = sp_cuda_memory_destroy,
    .control_create = control_create,
    .control_destroy = control_destroy,
    .pinned_create = pinned_create,
    .pinned_destroy = pinned_destroy,
    .pinned_find = pinned_find,
    .read = sp_cuda_read,
    .event_create = event_create,
    .event_record = event_record,
    .event_query = event_query,
    .stream_wait = stream_wait,
    .event_destroy = event_destroy,
    .stream_query = stream_query,
    .capture_id = capture_id,
    .stream_id = stream_id,
    .fused_workers_per_cta = sp_fused_cuda_workers_per_cta,
    .fused = sp_fused_cuda,
    .encode_scratch_bytes = sp_encode_cuda_scratch_bytes,
    .encode = sp_encode_cuda,
    .decode = sp_decode_cuda,
    .prune = sp_prune_cuda,
    .pruned_sum = sp_pruned_sum_cuda,
    .weights_send = sp_weights_send_cuda,
    .weights_receive = sp_weights_receive_cuda,
    .signs_send = sp_signs_send_cuda,
    .signs_sum = sp_signs_sum_cuda,
    .signs_decode = sp_signs_decode_cuda,
    .delta_open = sp_delta_open_cuda,
    .delta_run = sp_delta_run_cuda,
    .delta_sum = sp_delta_sum_cuda,
    .delta_encode = sp_delta_encode_cuda,
    .upload = sp_cuda_upload,
    .unload = unload,
};

const sp_gpu_ops *sp_gpu_ops_get(const char **why_none)
{
    if (why_none != NULL)
        *why_none = NULL;
    return &ops;
}
