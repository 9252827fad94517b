// direct_cuda.cu - a whole collective in one launch over mapped inboxes: the direct schedule
// (docs/ALGORITHMS.md), fused. Each worker does its slices of every shard in steps; in step t it
//   sends its contribution to slice t of every other shard to the shard's owner          (lane INPUT)
//   takes the contributions to slice t-1 of its own shard, adds them in rank order,
//     writes the result to the output and sends it to everyone                            (lane RESULT)
//   takes the results of slice t-2 of the other shards and writes them to the output
// so that reading, the wire and writing go on at the same time, and every message has a step to arrive.
//
// Bytes of GPU memory moved, floor: all-reduce reads and writes the array once; reduce-scatter reads it and
// writes a shard; all-gather reads a shard and writes the array; the rings stay in L2 while frames are small.
#include "cuda_check.h"
#include "kernels_cuda.h"
#include "steps.cuh"

// Workers in a block, which has a multiprocessor to itself. With four there would be 64 registers a thread,
// and what does not fit would go to memory.
#ifndef SP_CTA_WORKERS
#define SP_CTA_WORKERS 3u
#endif

extern __shared__ __align__(16) uint8_t sp_dynamic_shared[];

__device__ __forceinline__ sp_link_shared &sp_shared_here()
{
    return ((sp_link_shared *)sp_dynamic_shared)[threadIdx.x / SP_GPU_WORKER_THREADS];
}

// All-gather and broadcast of elements of BYTES bytes.
template <int BYTES>
__global__ void __launch_bounds__(SP_CTA_WORKERS *SP_GPU_WORKER_THREADS + 32, 1)
    sp_gather_kernel(const __grid_constant__ sp_fused_args a)
{
    typedef sp_geometry<typename sp_unsigned<BYTES>::type, 4> G;
    if (threadIdx.x >= a.workers_per_cta * SP_GPU_WORKER_THREADS) {
        sp_herald<SP_CTA_WORKERS>(a, (sp_link_shared *)sp_dynamic_shared);
        return;
    }
    sp_fused<G> f = {{a, sp_shared_here(), sp_worker_here(), 0}, 0, {0, 0}};
    bool ok = true;
    f.begin();
    for (uint32_t t = 0; ok && t < f.l.s.n_steps; t++) {
        ok = f.send_inputs(t);
        if (ok && f.has_own(t))
            ok = f.result_own(t - sp_result_delay(a));
        else if (ok && f.has_result(t))
            ok = f.result_relayed(t - sp_result_delay(a));
        if (ok && t >= sp_gather_delay(a))
            ok = f.gather(t - sp_gather_delay(a));
    }
    f.end(ok);
}

// ---- reductions ----

template <int DTYPE> struct sp_reduce_geometry {
    typedef sp_elem<DTYPE> T;
    // 16-bit floats accumulate in twice the room: half the slice.
    typedef sp_geometry<typename T::U, (sizeof(typename T::A) > sizeof(typename T::U) ? 2 : 4)> G;
};

// acc op x of MIN, MAX and PROD.
template <class T>
__device__ __forceinline__ typename T::A sp_combine(spccl_redop op, typename T::A acc, typename T::A x)
{
    return op == SPCCL_MIN ? T::min(acc, x) : op == SPCCL_MAX ? T::max(acc, x) : T::mul(acc, x);
}

// A dense frame into the accumulators of this warp.
template <class T, class G>
__device__ __forceinline__ void sp_add_dense(const sp_worker &w, typename T::A *acc, const sp_view &v)
{
    typedef typename G::U U;
    typedef typename T::A A;

    // Adding +0.0 changes nothing: a sum that began at +0.0 is never -0.0, and its NaNs are quiet.
    uint32_t left = sp_warp_elems<G>(w, v.n);
    const uint4 *from = (const uint4 *)(v.p + v.at.values) + w.warp * G::ROWS * 32 + w.lane;
    union {
        uint4 v;
        U e[G::K];
    } x[G::ROWS];
#pragma unroll
    for (uint32_t r = 0; r < G::ROWS; r++)
        x[r].v = (r * 32 + w.lane) * G::K < left ? from[r * 32] : make_uint4(0, 0, 0, 0);
#pragma unroll
    for (uint32_t r = 0; r < G::ROWS; r++) {
        A *to = acc + sp_unit_at(r * 32 + w.lane) * G::K;
#pragma unroll
        for (uint32_t c = 0; c < G::K; c++)
            to[c] = T::add(to[c], T::widen(x[r].e[c]));
    }
}

// One rank's contribution into the accumulators of this warp, acc [WARP_ELEMS]. own: its run, or null: the
// frame v.
template <class T, class G>
__device__ __forceinline__ bool sp_accumulate(const sp_link &l, typename T::A *acc, const typename G::U *own,
                                              const sp_view &v, bool first)
{
    typedef typename G::U U;
    typedef typename T::A A;
    bool sums = l.a.redop == SPCCL_SUM || l.a.redop == SPCCL_AVG, ok = true;
    const U *values = own;
    if (sums && own == nullptr && v.format == SPCCL_FORMAT_DENSE) {
        sp_add_dense<T, G>(l.w, acc, v);
        return true;
    }
    if (sums && own == nullptr)
        return sp_decode<G>(l.w, v, [&](uint32_t i, U x) {
            A *at = acc + sp_elem_at<G>(i);
            *at = T::add(*at, T::widen(x));
        });
    if (own == nullptr) { // absent elements count as zeros: spread them out
        U *spread = (U *)(l.s.frame + l.w.warp * (SP_GPU_SLICE_BYTES / SP_WORKER_WARPS));
        sp_run_zero<G::WARP_BYTES / 16>(l.w, spread);
        __syncwarp();
        ok = sp_decode<G>(l.w, v, [&](uint32_t i, U x) { spread[sp_elem_at<G>(i)] = x; });
        __syncwarp();
        values = spread;
    }
    // acc, own and spread have their elements in the same places: no need to know which.
    constexpr uint32_t N = 16 / sizeof(A); // of an accumulator unit
    for (uint32_t u = l.w.lane; u < G::WARP_ELEMS / N; u += 32) {
        union {
            uint4 v;
            A e[N];
        } to;
        union {
            uint4 v;
            uint2 half;
            U e[N];
        } x;
        to.v = ((const uint4 *)acc)[u];
        if (sizeof(A) == sizeof(U))
            x.v = ((const uint4 *)values)[u];
        else
            x.half = ((const uint2 *)values)[u];
#pragma unroll
        for (uint32_t i = 0; i < N; i++) {
            A e = T::widen(x.e[i]);
            to.e[i] = sums ? T::add(to.e[i], e) : first ? e : sp_combine<T>(l.a.redop, to.e[i], e);
        }
        ((uint4 *)acc)[u] = to.v;
    }
    return ok;
}

// acc [WARP_ELEMS] of this warp becomes values of the dtype, at the same address.
template <class T, class G> __device__ __forceinline__ void sp_finish(const sp_link &l, typename T::A *acc)
{
    typedef typename G::U U;
    constexpr uint32_t EACH = G::WARP_ELEMS / 32;
    bool avg = l.a.redop == SPCCL_AVG;
    if (sizeof(typename T::A) == sizeof(U) && !avg)
        return;
    if (sizeof(typename T::A) == sizeof(U)) {
        for (uint32_t i = l.w.lane; i < G::WARP_ELEMS; i += 32)
            acc[i] = T::div(acc[i], l.a.world_size);
    } else { // all are read before the first is written
        U mine[sizeof(typename T::A) == sizeof(U) ? 1 : EACH];
#pragma unroll
        for (uint32_t i = 0; i < (sizeof(typename T::A) == sizeof(U) ? 1 : EACH); i++) {
            typename T::A x = acc[i * 32 + l.w.lane];
            mine[i] = T::narrow(avg ? T::div(x, l.a.world_size) : x);
        }
        __syncwarp();
#pragma unroll
        for (uint32_t i = 0; i < (sizeof(typename T::A) == sizeof(U) ? 1 : EACH); i++)
            ((U *)acc)[i * 32 + l.w.lane] = mine[i];
    }
    __syncwarp();
}

// Slice t of the own shard: everyone's contributions in rank order.
template <class T, class G> __device__ __forceinline__ bool sp_reduce(sp_fused<G> &f, uint32_t t)
{
    typedef typename G::U U;
    typedef typename T::A A;
    sp_link &l = f.l;
    sp_range r = f.range(l.me(), t);
    const U *own = f.run(f.cur);
    A *acc = (A *)f.run(f.cur ^ 1);
    uint32_t bad = 0;
    auto elems = [&](uint32_t) { return r.n; };
    U *dst = (U *)l.a.out + (l.a.op == SP_FUSED_REDUCE_SCATTER ? f.own_start(t) : r.start);
    if (r.n != 0 && l.n_peers() != 0 && !sp_link_take<G>(l, SP_INBOX_INPUT, t, elems))
        return false;
    sp_copy_wait<0>();
    sp_run_zero<G::WARP_ELEMS * sizeof(A) / 16>(l.w, acc);
    __syncwarp();
    for (uint32_t rank = 0; r.n != 0 && rank < (uint32_t)l.a.world_size; rank++) {
        bool mine = rank == l.me();
        uint32_t slot = mine ? 0 : sp_inbox_slot(l.me(), rank, (uint32_t)l.a.world_size);
        if (!sp_accumulate<T, G>(l, acc, mine ? own : nullptr, l.s.view[slot], rank == 0))
            bad = slot + 1;
        __syncwarp();
    }
    f.job.k++;
    f.settle(&f.job);
    f.start_load(f.job, f.cur);
    if (r.n == 0)
        return true;
    sp_finish<T, G>(l, acc);
    // Elements past the end may not be zero (0 / 0 and the like): the frame must not list them.
    for (uint32_t i = sp_warp_elems<G>(l.w, r.n) + l.w.lane; i < G::WARP_ELEMS; i += 32)
        ((U *)acc)[sp_elem_at<G>(i)] = 0;
    __syncwarp();
    sp_slice_store<G>(l.w, (const U *)acc, dst, r.n);
    if (l.n_peers() != 0 && !sp_link_taken(l, SP_INBOX_INPUT, t, bad, elems))
        return false;
    if (sp_has_results(l.a) && !f.send_result((const U *)acc, r.n, t))
        return false;
    __syncwarp();
    return true;
}

// Reduce-scatter and all-reduce.
template <int DTYPE>
__global__ void __launch_bounds__(SP_CTA_WORKERS *SP_GPU_WORKER_THREADS + 32, 1)
    sp_reduce_kernel(const __grid_constant__ sp_fused_args a)
{
    typedef sp_elem<DTYPE> T;
    typedef typename sp_reduce_geometry<DTYPE>::G G;
    if (threadIdx.x >= a.workers_per_cta * SP_GPU_WORKER_THREADS) {
        sp_herald<SP_CTA_WORKERS>(a, (sp_link_shared *)sp_dynamic_shared);
        return;
    }
    sp_fused<G> f = {{a, sp_shared_here(), sp_worker_here(), 0}, 0, {0, 0}};
    bool ok = true;
    f.begin();
    for (uint32_t t = 0; ok && t < f.l.s.n_steps; t++) {
        ok = f.send_inputs(t);
        if (ok && f.has_result(t))
            ok = sp_reduce<T, G>(f, t - sp_result_delay(a));
        if (ok && sp_has_results(a) && t >= sp_gather_delay(a))
            ok = f.gather(t - sp_gather_delay(a));
    }
    f.end(ok);
}

// ---- launching ----

typedef void (*sp_fused_kernel)(const sp_fused_args);

static const sp_fused_kernel gather_kernels[] = {sp_gather_kernel<1>, sp_gather_kernel<2>,
                                                 sp_gather_kernel<4>, sp_gather_kernel<8>};
// By dtype; float8 is carried, never reduced: refused above.
static const sp_fused_kernel reduce_kernels[SP_N_DTYPES] = {nullptr,
                                                            sp_reduce_kernel<SPCCL_FLOAT32>,
                                                            sp_reduce_kernel<SPCCL_FLOAT16>,
                                                            sp_reduce_kernel<SPCCL_BFLOAT16>,
                                                            sp_reduce_kernel<SPCCL_FLOAT64>,
                                                            nullptr,
                                                            sp_reduce_kernel<SPCCL_INT8>,
                                                            sp_reduce_kernel<SPCCL_INT16>,
                                                            sp_reduce_kernel<SPCCL_INT32>,
                                                            sp_reduce_kernel<SPCCL_INT64>,
                                                            sp_reduce_kernel<SPCCL_UINT8>};

static sp_fused_kernel kernel_of(const sp_fused_args *a)
{
    size_t bytes = sp_dtype_bytes(a->dtype);
    if (a->op == SP_FUSED_ALL_GATHER || a->op == SP_FUSED_BROADCAST)
        return gather_kernels[bytes == 1 ? 0 : bytes == 2 ? 1 : bytes == 4 ? 2 : 3];
    return sp_dtype_ok(a->dtype) ? reduce_kernels[a->dtype] : nullptr;
}

// Load a kernel on the current device now: the first launch would otherwise do it, and loading waits for
// kernels that may be waiting for the one to be launched.
static spccl_status prepare(sp_fused_kernel kernel, uint32_t workers)
{
    if (kernel == nullptr)
        return SPCCL_OK;
    return sp_cuda_check(cudaFuncSetAttribute((const void *)kernel,
                                              cudaFuncAttributeMaxDynamicSharedMemorySize,
                                              (int)(workers * sizeof(sp_link_shared))),
                         "cudaFuncSetAttribute of a collective's kernel");
}

extern "C" spccl_status sp_fused_cuda_workers_per_cta(int ordinal, uint32_t *out)
{
    int shared = 0;
    SP_TRY_CUDA(cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, ordinal));
    *out = (uint32_t)shared / (uint32_t)sizeof(sp_link_shared);
    if (*out > SP_CTA_WORKERS)
        *out = SP_CTA_WORKERS;
    if (*out == 0)
        return SP_FAIL(SPCCL_ERR_UNSUPPORTED,
                       "GPU %d has %d bytes of shared memory per block, a worker needs %zu", ordinal, shared,
                       sizeof(sp_link_shared));
    for (sp_fused_kernel kernel : gather_kernels)
        SP_TRY(prepare(kernel, *out));
    for (sp_fused_kernel kernel : reduce_kernels)
        SP_TRY(prepare(kernel, *out));
    return SPCCL_OK;
}

extern "C" spccl_status sp_fused_cuda(const sp_fused_args *a, void *stream)
{
    sp_fused_kernel kernel = kernel_of(a);
    size_t shared = a->workers_per_cta * sizeof(sp_link_shared);
    void *params[] = {const_cast<sp_fused_args *>(a)};
    if (kernel == nullptr)
        return SP_FAIL(SPCCL_ERR_BUG, "fused kernel of dtype %d, operation %d", (int)a->dtype, (int)a->op);
    SP_TRY_CUDA(
        cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared));
    SP_TRY_CUDA(cudaLaunchKernel((const void *)kernel, dim3(a->n_ctas),
                                 dim3(a->workers_per_cta * SP_GPU_WORKER_THREADS + 32), params, shared,
                                 (cudaStream_t)stream));
    return SPCCL_OK;
}
