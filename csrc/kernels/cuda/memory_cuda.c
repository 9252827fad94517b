/* memory_cuda.c - GPU memory that peers map: VMM allocations, which travel as file descriptors, or cudaMalloc
 * with CUDA IPC handles. See sp_gpu_ops in gpu.h.
 *
 * Bytes of a handle, SP_GPU_HANDLE_BYTES in all:
 *    0  u32  kind                          16  u64  address in the owner's process
 *    4  i32  ordinal at the owner          24  u64  token of the owner's process
 *    8  u64  bytes                         32  cudaIpcMemHandle_t
 *                                          96  u64  offset of the address in the allocation, for CUDA IPC
 *                                         104  u64  bytes of the allocation, for CUDA IPC */
#include "kernels/cuda/device_cuda.h"

#include "core/base/bits.h"
#include "core/base/mem.h"
#include "kernels/cuda/kernels_cuda.h"

#include <pthread.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

enum { KIND_FD = 1, KIND_IPC = 2 };
#define IPC_AT 32u
#define OFFSET_AT 96u
#define ALLOCATED_AT 104u
_Static_assert(IPC_AT + sizeof(cudaIpcMemHandle_t) == OFFSET_AT && ALLOCATED_AT + 8 <= SP_GPU_HANDLE_BYTES,
               "the IPC handle fits");

struct sp_gpu_memory {
    int kind;
    int ordinal;      /* the GPU for which the memory is mapped */
    bool is_peer;     /* imported from a peer */
    bool is_plain;    /* the address of another thread of this process: there is nothing to unmap */
    bool is_borrowed; /* allocated by the caller */
    bool is_mapped;
    size_t bytes; /* allocated or mapped; for KIND_FD a multiple of the granularity */
    CUdeviceptr address;
    CUdeviceptr base; /* of the allocation; only borrowed memory begins elsewhere */
    size_t allocated; /* of KIND_IPC: bytes from base */
    CUmemGenericAllocationHandle handle;
    bool has_handle;
};

/* Where memory comes from, beside what its record says. */
struct given {
    bool for_network;      /* new memory */
    const uint8_t *handle; /* a peer's memory, with fd or -1 */
    int fd;
};

/* A random number that tells this process from all others, also from those in other pid namespaces. */
static uint64_t token;
static pthread_once_t token_once = PTHREAD_ONCE_INIT;
static void make_token(void)
{
    if (getrandom(&token, sizeof token, 0) != (ssize_t)sizeof token)
        token = 0; /* no random bytes: 0 means unknown and matches no process */
}
static uint64_t process_token(void)
{
    pthread_once(&token_once, make_token);
    return token;
}

static CUmemAllocationProp properties(int ordinal)
{
    return (CUmemAllocationProp){.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                 .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                 .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = ordinal}};
}

bool sp_cuda_can_share_fd(int ordinal)
{
    static const CUdevice_attribute wanted[] = {
        CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
        CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED};
    const sp_cuda_driver *d;
    if (sp_cuda_driver_get(&d) != SPCCL_OK)
        return false;
    for (size_t i = 0; i < sizeof wanted / sizeof wanted[0]; i++) {
        int yes = 0;
        if (d->device_get_attribute(&yes, wanted[i], ordinal) != CUDA_SUCCESS || yes == 0)
            return false;
    }
    return true;
}

/* ---- work on a stream of its own: the default stream would wait for kernels that wait for peers ---- */

static spccl_status with_own_stream(cudaError_t (*work)(cudaStream_t stream, void *ctx), void *ctx,
                                    const char *what)
{
    cudaStream_t stream;
    cudaError_t e;
    SP_TRY(sp_cuda_check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate"));
    e = work(stream, ctx);
    if (e == cudaSuccess)
        e = cudaStreamSynchronize(stream);
    (void)cudaStreamDestroy(stream);
    return sp_cuda_check(e, what);
}

static cudaError_t fill_zero(cudaStream_t stream, void *ctx)
{
    const sp_gpu_memory *m = ctx;
    return cudaMemsetAsync((void *)m->address, 0, m->bytes, stream);
}

struct copy {
    void *to;
    const void *from;
    size_t bytes;
    enum cudaMemcpyKind kind;
};
static cudaError_t copy(cudaStream_t stream, void *ctx)
{
    const struct copy *c = ctx;
    return cudaMemcpyAsync(c->to, c->from, c->bytes, c->kind, stream);
}

spccl_status sp_cuda_read(void *host, const void *device, size_t bytes)
{
    struct copy c = {.to = host, .from = device, .bytes = bytes, .kind = cudaMemcpyDeviceToHost};
    return with_own_stream(copy, &c, "cudaMemcpyAsync");
}

spccl_status sp_cuda_upload(int ordinal, const void *host, size_t bytes, size_t capacity, void **out)
{
    struct copy c = {.from = host, .bytes = bytes, .kind = cudaMemcpyHostToDevice};
    spccl_status st;
    int before;
    SP_TRY(sp_cuda_enter(ordinal, &before));
    st = sp_cuda_check(cudaMalloc(&c.to, capacity), "cudaMalloc");
    if (st == SPCCL_OK) {
        st = with_own_stream(copy, &c, "cudaMemcpyAsync");
        if (st == SPCCL_OK)
            *out = c.to;
        else
            (void)cudaFree(c.to);
    }
    sp_cuda_leave(before);
    return st;
}

/* ---- VMM ---- */

/* Reserve addresses for m->handle and map it for GPU m->ordinal. */
static spccl_status map_handle(const sp_cuda_driver *d, sp_gpu_memory *m)
{
    CUmemAccessDesc access = {.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = m->ordinal},
                              .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    SP_TRY(sp_cu_check(d->address_reserve(&m->address, m->bytes, 0, 0, 0), "cuMemAddressReserve"));
    SP_TRY(sp_cu_check(d->mem_map(m->address, m->bytes, 0, m->handle, 0), "cuMemMap"));
    m->is_mapped = true;
    return sp_cu_check(d->mem_set_access(m->address, m->bytes, &access, 1), "cuMemSetAccess");
}

static spccl_status create_fd(sp_gpu_memory *m, bool for_network)
{
    const sp_cuda_driver *d;
    CUmemAllocationProp prop = properties(m->ordinal);
    size_t granularity = 0;
    int capable = 0;
    SP_TRY(sp_cuda_driver_get(&d));
    if (for_network)
        SP_TRY(sp_cu_check(
            d->device_get_attribute(&capable, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED,
                                    m->ordinal),
            "cuDeviceGetAttribute"));
    prop.allocFlags.gpuDirectRDMACapable = capable != 0;
    SP_TRY(sp_cu_check(d->mem_granularity(&granularity, &prop, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
                       "cuMemGetAllocationGranularity"));
    m->bytes = sp_align_up(m->bytes, granularity);
    SP_TRY(sp_cu_check(d->mem_create(&m->handle, m->bytes, &prop, 0), "cuMemCreate"));
    m->has_handle = true;
    return map_handle(d, m);
}

static spccl_status import_fd(sp_gpu_memory *m, int fd)
{
    const sp_cuda_driver *d;
    SP_TRY(sp_cuda_driver_get(&d));
    if (fd < 0)
        return SP_FAIL(SPCCL_ERR_DEVICE, "the handle of a peer's GPU memory came without a file descriptor");
    /* The driver wants the descriptor as the value of a pointer. */
    SP_TRY(sp_cu_check(
        d->mem_import(&m->handle, (void *)(uintptr_t)fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
        "cuMemImportFromShareableHandle"));
    m->has_handle = true;
    return map_handle(d, m);
}

static void destroy_fd(sp_gpu_memory *m)
{
    const sp_cuda_driver *d;
    if (sp_cuda_driver_get(&d) != SPCCL_OK)
        return;
    if (m->is_mapped)
        (void)d->mem_unmap(m->address, m->bytes);
    if (m->address != 0)
        (void)d->address_free(m->address, m->bytes);
    if (m->has_handle)
        (void)d->mem_release(m->handle);
}

/* ---- CUDA IPC ---- */

static spccl_status create_ipc(sp_gpu_memory *m)
{
    void *p = NULL;
    m->allocated = m->bytes;
    SP_TRY(sp_cuda_check(cudaMalloc(&p, m->bytes), "cudaMalloc"));
    m->address = m->base = (CUdeviceptr)p;
    return SPCCL_OK;
}

/* m->address and m->bytes are the caller's. */
static spccl_status borrow_ipc(sp_gpu_memory *m, const struct given *given)
{
    struct cudaPointerAttributes a;
    cudaIpcMemHandle_t ipc;
    const sp_cuda_driver *d;
    (void)given;
    SP_TRY(sp_cuda_check(cudaPointerGetAttributes(&a, (void *)m->address), "cudaPointerGetAttributes"));
    if (a.type != cudaMemoryTypeDevice || a.device != m->ordinal)
        return SP_FAIL(SPCCL_ERR_ARG, "%p is not memory of GPU %d: wanted memory from cudaMalloc on this GPU",
                       (void *)m->address, m->ordinal);
    SP_TRY(sp_cuda_driver_get(&d));
    SP_TRY(sp_cu_check(d->mem_address_range(&m->base, &m->allocated, m->address), "cuMemGetAddressRange"));
    if (m->bytes > m->allocated - (m->address - m->base))
        return SP_FAIL(SPCCL_ERR_ARG, "%zu bytes at %p: the allocation has %zu bytes from there", m->bytes,
                       (void *)m->address, m->allocated - (size_t)(m->address - m->base));
    if (cudaIpcGetMemHandle(&ipc, (void *)m->base) == cudaSuccess)
        return SPCCL_OK;
    (void)cudaGetLastError();
    return SP_FAIL(
        SPCCL_ERR_UNREACHABLE,
        "the memory at %p cannot be shared with other processes: wanted memory from cudaMalloc. Memory of "
        "cudaMallocAsync, of cuMemMap and of PyTorch with expandable_segments has no CUDA IPC handle",
        (void *)m->address);
}

/* m->bytes are to be mapped. */
static spccl_status import_ipc(sp_gpu_memory *m, const uint8_t *handle)
{
    int peer = (int)sp_load_le32(handle + 4);
    uint64_t off = sp_load_le64(handle + OFFSET_AT), allocated = sp_load_le64(handle + ALLOCATED_AT);
    cudaIpcMemHandle_t ipc;
    void *p = NULL;
    cudaError_t e;
    if (off > allocated || m->bytes > allocated - off)
        return SP_FAIL(
            SPCCL_ERR_MISMATCH,
            "a peer's GPU memory: got a handle for %zu bytes at offset %llu of an allocation of %llu",
            m->bytes, (unsigned long long)off, (unsigned long long)allocated);
    if (process_token() != 0 && sp_load_le64(handle + 24) == process_token()) {
        m->is_plain = true; /* a process cannot open its own IPC handle; it has the address */
        m->address = (CUdeviceptr)sp_load_le64(handle + 16);
        if (peer == m->ordinal)
            return SPCCL_OK;
        e = cudaDeviceEnablePeerAccess(peer, 0);
        if (e == cudaErrorPeerAccessAlreadyEnabled) {
            (void)cudaGetLastError();
            e = cudaSuccess;
        }
        return sp_cuda_check(e, "cudaDeviceEnablePeerAccess");
    }
    memcpy(&ipc, handle + IPC_AT, sizeof ipc);
    SP_TRY(
        sp_cuda_check(cudaIpcOpenMemHandle(&p, ipc, cudaIpcMemLazyEnablePeerAccess), "cudaIpcOpenMemHandle"));
    m->base = (CUdeviceptr)p;
    m->address = m->base + off;
    return SPCCL_OK;
}

static void destroy_ipc(sp_gpu_memory *m)
{
    cudaError_t e = cudaSuccess;
    if (m->is_peer && !m->is_plain && m->base != 0)
        e = cudaIpcCloseMemHandle((void *)m->base);
    else if (!m->is_peer && !m->is_borrowed)
        e = cudaFree((void *)m->address);
    if (e != cudaSuccess)
        (void)cudaGetLastError();
}

/* ---- both kinds ---- */

void sp_cuda_memory_destroy(sp_gpu_memory *m)
{
    int before;
    if (m == NULL)
        return;
    if (sp_cuda_enter(m->ordinal, &before) == SPCCL_OK) {
        if (m->kind == KIND_FD)
            destroy_fd(m);
        else
            destroy_ipc(m);
        sp_cuda_leave(before);
    }
    sp_free(m);
}

static spccl_status fill_new(sp_gpu_memory *m, const struct given *given)
{
    SP_TRY(m->kind == KIND_FD ? create_fd(m, given->for_network) : create_ipc(m));
    return with_own_stream(fill_zero, m, "cudaMemsetAsync");
}

static spccl_status fill_peers(sp_gpu_memory *m, const struct given *given)
{
    return m->kind == KIND_FD ? import_fd(m, given->fd) : import_ipc(m, given->handle);
}

/* Make a record like `m`, and let `fill` allocate or map its memory with GPU m.ordinal current. */
static spccl_status make(sp_gpu_memory m, spccl_status (*fill)(sp_gpu_memory *, const struct given *),
                         const struct given *given, sp_gpu_memory **out)
{
    spccl_status st;
    sp_gpu_memory *made = sp_calloc(1, sizeof *made);
    int before;
    if (made == NULL)
        return SP_FAIL(SPCCL_ERR_NOMEM, "GPU memory: no host memory for its %zu-byte record", sizeof *made);
    *made = m;
    st = sp_cuda_enter(m.ordinal, &before);
    if (st == SPCCL_OK) {
        st = fill(made, given);
        sp_cuda_leave(before);
    }
    if (st == SPCCL_OK)
        *out = made;
    else
        sp_cuda_memory_destroy(made);
    return st;
}

spccl_status sp_cuda_memory_create(int ordinal, size_t bytes, const char *handles, bool for_network,
                                   sp_gpu_memory **out)
{
    int kind = strcmp(handles, "fd") == 0 ? KIND_FD : KIND_IPC;
    return make((sp_gpu_memory){.kind = kind, .ordinal = ordinal, .bytes = bytes}, fill_new,
                &(struct given){.for_network = for_network}, out);
}

spccl_status sp_cuda_memory_borrow(int ordinal, void *p, size_t bytes, sp_gpu_memory **out)
{
    return make((sp_gpu_memory){.kind = KIND_IPC,
                                .ordinal = ordinal,
                                .is_borrowed = true,
                                .bytes = bytes,
                                .address = (CUdeviceptr)p},
                borrow_ipc, NULL, out);
}

/* The driver wants whole pages of the host. */
spccl_status sp_cuda_memory_dmabuf(const sp_gpu_memory *m, size_t bytes, int *fd, uint64_t *offset)
{
    const sp_cuda_driver *d;
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    CUdeviceptr first = m->address / page * page;
    SP_TRY(sp_cuda_driver_get(&d));
    if (d->mem_range_handle == NULL)
        return SP_FAIL(SPCCL_ERR_DEVICE, "the CUDA driver has no cuMemGetHandleForAddressRange");
    SP_TRY(sp_cu_check(d->mem_range_handle(fd, first, sp_align_up(m->address + bytes - first, page),
                                           CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0),
                       "cuMemGetHandleForAddressRange"));
    *offset = m->address - first;
    return SPCCL_OK;
}

spccl_status sp_cuda_memory_export(sp_gpu_memory *m, uint8_t *handle, int *fd)
{
    const sp_cuda_driver *d;
    cudaIpcMemHandle_t ipc;
    memset(handle, 0, SP_GPU_HANDLE_BYTES);
    sp_store_le32(handle, (uint32_t)m->kind);
    sp_store_le32(handle + 4, (uint32_t)m->ordinal);
    sp_store_le64(handle + 8, m->bytes);
    sp_store_le64(handle + 16, m->address);
    sp_store_le64(handle + 24, process_token());
    *fd = -1;
    if (m->kind == KIND_FD) {
        SP_TRY(sp_cuda_driver_get(&d));
        return sp_cu_check(d->mem_export(fd, m->handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
                           "cuMemExportToShareableHandle");
    }
    SP_TRY(sp_cuda_check(cudaIpcGetMemHandle(&ipc, (void *)m->base), "cudaIpcGetMemHandle"));
    memcpy(handle + IPC_AT, &ipc, sizeof ipc);
    sp_store_le64(handle + OFFSET_AT, m->address - m->base);
    sp_store_le64(handle + ALLOCATED_AT, m->allocated);
    return SPCCL_OK;
}

spccl_status sp_cuda_memory_import(int ordinal, const uint8_t *handle, int fd, size_t bytes,
                                   sp_gpu_memory **out)
{
    uint32_t kind = sp_load_le32(handle);
    uint64_t mapped = sp_load_le64(handle + 8);
    if ((kind != KIND_FD && kind != KIND_IPC) || mapped < bytes)
        return SP_FAIL(SPCCL_ERR_MISMATCH,
                       "a peer's GPU memory: got a handle of kind %u for %llu bytes, wanted kind 1 (fd) "
                       "or 2 (ipc) and at least %zu bytes",
                       kind, (unsigned long long)mapped, bytes);
    return make((sp_gpu_memory){.kind = (int)kind, .ordinal = ordinal, .is_peer = true, .bytes = mapped},
                fill_peers, &(struct given){.handle = handle, .fd = fd}, out);
}

void *sp_cuda_memory_address(const sp_gpu_memory *m)
{
    return (void *)m->address;
}
