// launch_cuda.cu - picks and launches the kernel of a fused collective (docs/ALGORITHMS.md: The direct
// schedule on a GPU). roles.cuh says what a worker is and what its warps do.
#include "kernels/cuda/cuda_check.h"
#include "kernels/cuda/fused.cuh"
#include "kernels/cuda/kernels_cuda.h"

// In the files made from kernels_cuda.cu.in: the kernel for a dtype or a size of elements; nullptr: not in that file.
#define SP_DECLARE_KERNELS(name) sp_fused_kernel sp_##name##_kernel_of(int), sp_##name##_remote_kernel_of(int)
SP_DECLARE_KERNELS(gather);
SP_DECLARE_KERNELS(reduce_float);
SP_DECLARE_KERNELS(reduce_half);
SP_DECLARE_KERNELS(reduce_int);
SP_DECLARE_KERNELS(reduce_small_int);

// nullptr: float8. Callers have refused it, as float8 is only moved, never reduced.
static sp_fused_kernel reduce_kernel_of(int dtype, bool remote)
{
    static sp_fused_kernel (*const files[][2])(int) = {
        {sp_reduce_float_kernel_of, sp_reduce_float_remote_kernel_of},
        {sp_reduce_half_kernel_of, sp_reduce_half_remote_kernel_of},
        {sp_reduce_int_kernel_of, sp_reduce_int_remote_kernel_of},
        {sp_reduce_small_int_kernel_of, sp_reduce_small_int_remote_kernel_of}};
    for (auto &of : files)
        if (of[remote](dtype) != nullptr)
            return of[remote](dtype);
    return nullptr;
}

static sp_fused_kernel gather_kernel_of(int elem_bytes, bool remote)
{
    return remote ? sp_gather_remote_kernel_of(elem_bytes) : sp_gather_kernel_of(elem_bytes);
}

static sp_fused_kernel kernel_of(const sp_fused_args *a)
{
    if (!sp_dtype_ok(a->dtype))
        return nullptr;
    return a->op == SP_FUSED_ALL_GATHER || a->op == SP_FUSED_BROADCAST
               ? gather_kernel_of((int)sp_dtype_bytes(a->dtype), a->remote.slots != 0)
               : reduce_kernel_of(a->dtype, a->remote.slots != 0);
}

// Load a kernel on the current device now. Otherwise the first launch would load it. Loading waits for
// kernels that run, and these may wait for the kernel that is to be launched.
static spccl_status prepare(sp_fused_kernel kernel, int shared)
{
    if (kernel == nullptr)
        return SPCCL_OK;
    return sp_cuda_check(
        cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared),
        "cudaFuncSetAttribute of a collective's kernel");
}

// Shared memory of a CTA of n workers.
static size_t block_bytes(sp_fused_op op, uint32_t n, uint32_t n_served, bool remote)
{
    sp_warp_counts counts(op, n, n_served);
    return n * (remote ? sizeof(sp_remote_progress) : sizeof(sp_progress)) +
           counts.n_feed * sizeof(sp_feed_smem) + counts.n_own * sizeof(sp_own_smem) +
           counts.n_gather * sizeof(sp_gather_smem);
}

// May a feeder serve n_served workers? It may where it has little to do compared with the other roles: one
// frame per slice in an all-gather, one contribution per slice between two ranks. All its frames must go
// through one queue (sp_send_side).
static bool may_serve(sp_fused_op op, uint32_t world_size, uint32_t n_served)
{
    return n_served == 1 || op == SP_FUSED_ALL_GATHER || (op != SP_FUSED_BROADCAST && world_size == 2);
}

// Warps of a CTA; in a group on several hosts one of them is the copy warp.
static uint32_t n_warps(sp_fused_op op, uint32_t n, uint32_t n_served, bool remote)
{
    return sp_warp_counts(op, n, n_served).total() + (remote ? 1 : 0);
}

extern "C" spccl_status sp_fused_cuda_workers_per_cta(int ordinal, uint32_t world_size, uint32_t n_served,
                                                      bool remote, uint32_t out[SP_FUSED_OPS])
{
    int shared = 0;
    SP_TRY_CUDA(cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, ordinal));
    for (int op = 0; op < SP_FUSED_OPS; op++) {
        uint32_t n = may_serve((sp_fused_op)op, world_size, n_served) ? SP_CTA_WORKERS : 0;
        while (n != 0 && (block_bytes((sp_fused_op)op, n, n_served, remote) > (size_t)shared ||
                          n_warps((sp_fused_op)op, n, n_served, remote) > SP_CTA_WARPS))
            n--;
        if (n == 0 && n_served == 1)
            return SP_FAIL(SPCCL_ERR_UNSUPPORTED,
                           "GPU %d has %d bytes of shared memory per CTA, a worker needs %zu", ordinal,
                           shared, block_bytes((sp_fused_op)op, 1, 1, remote));
        out[op] = n;
    }
    for (int bytes = 1; bytes <= 8; bytes *= 2)
        SP_TRY(prepare(gather_kernel_of(bytes, remote), shared));
    for (int dtype = 0; dtype < SP_N_DTYPES; dtype++)
        SP_TRY(prepare(reduce_kernel_of(dtype, remote), shared));
    return SPCCL_OK;
}

extern "C" spccl_status sp_fused_cuda(const sp_fused_args *a, void *stream)
{
    sp_fused_kernel kernel = kernel_of(a);
    size_t shared = block_bytes(a->op, a->workers_per_cta, a->n_served, a->remote.slots != 0);
    uint64_t slices = (a->n_elems + a->slice_elems - 1) / a->slice_elems, n = a->n_shards;
    bool sharded = a->op == SP_FUSED_ALL_REDUCE || a->op == SP_FUSED_BROADCAST;
    sp_fused_args args = *a;
    void *params[] = {&args};
    args.shard_slices = sharded ? (slices + n - 1) / n : slices;
    args.shard_stride = sharded                                ? args.shard_slices * a->slice_elems
                        : a->op == SP_FUSED_ALL_REDUCE_ONESHOT ? 0
                                                               : a->n_elems;
    args.whole_slices = (uint32_t)(a->n_elems / a->slice_elems);
    args.rest_elems = (uint32_t)(a->n_elems % a->slice_elems);
    if (kernel == nullptr)
        return SP_FAIL(SPCCL_ERR_BUG, "fused kernel of dtype %d, operation %d", (int)a->dtype, (int)a->op);
    return sp_cuda_check(
        cudaLaunchKernel(kernel, dim3(a->n_ctas),
                         dim3(n_warps(a->op, a->workers_per_cta, a->n_served, a->remote.slots != 0) * 32),
                         params, shared, (cudaStream_t)stream),
        "launch of a collective's kernel");
}
