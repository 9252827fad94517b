// delta_open_cuda.cu - deltas in GPU memory (docs/FORMAT.md 11): the kernels that check headers and tables, and checksums of
// arrays.
#include "core/format/format.h"
#include "kernels/cuda/delta.cuh"
#include "kernels/cuda/kernels_cuda.h"
#include "kernels/cuda/launch.cuh"

#define SP_OPEN_THREADS 512u
#define SP_OPEN_CTAS 4096u
#define SP_SUM_THREADS 256u
#define SP_SUM_TURNS 4u

// ---- headers and tables ----

__device__ __forceinline__ uint64_t sp_delta_word(uint2 w)
{
    return (uint64_t)w.y << 32 | w.x;
}

// The first of the rules 1 to 10 that the header breaks, or 0.
__device__ __forceinline__ uint32_t sp_delta_header_rule(const sp_gpu_delta_row &r)
{
    const uint2 *words = (const uint2 *)r.frame;
    if (r.frame_bytes < SP_DELTA_HEADER_BYTES)
        return 1;
    uint32_t kind = words[0].y, dtype = kind >> 16 & 0xff;
    uint64_t n = sp_delta_word(words[1]), bytes = sp_delta_word(words[3]);
    if (words[0].x != SP_FRAME_MAGIC)
        return 2;
    if ((kind & 0xff) != SP_DELTA_VERSION)
        return 3;
    if ((kind >> 8 & 0xff) != SPCCL_FORMAT_DELTA)
        return 4;
    if (dtype == 0 || dtype >= SP_N_DTYPES)
        return 5;
    if (kind >> 24 != SP_FRAME_FLAG_DELTA)
        return 6;
    if (n > SP_DELTA_ELEMS_MAX)
        return 7;
    if (sp_delta_word(words[2]) > n)
        return 8;
    if (bytes % SP_DELTA_ALIGN != 0 || bytes > SP_DELTA_BYTES_MAX ||
        bytes < SP_DELTA_HEADER_BYTES + SP_DELTA_ENTRY_BYTES * sp_delta_n_slices(n))
        return 9;
    if (bytes > r.frame_bytes)
        return 10;
    return bytes != r.frame_bytes               ? SP_DELTA_RULE_OTHER_BYTES
           : dtype != r.dtype || n != r.n_elems ? SP_DELTA_RULE_OTHER_ARRAY
                                                : 0;
}

// Bytes of a slice with no value escaped.
__device__ __forceinline__ uint32_t sp_delta_least_bytes(uint32_t c, uint32_t k, uint32_t code,
                                                         uint32_t elem_bytes)
{
    if (k == 0)
        return 0;
    sp_delta_index at = sp_delta_index_of(c, k);
    return at.low_bytes + at.high_bytes + sp_delta_value_bytes(code, k, 0, elem_bytes);
}

// The first of the rules 11 to 13 that an entry breaks, or 15: its slice does not lie in [at, end), or that not in the
// frame; or 0.
__device__ __forceinline__ uint32_t sp_delta_entry_rule(const sp_gpu_delta_row &r, uint64_t s, uint2 entry,
                                                        uint64_t end)
{
    uint32_t k = entry.x & SP_DELTA_COUNT_MASK, code = entry.x >> SP_DELTA_CODE_SHIFT & 0xf;
    uint32_t c = sp_delta_slice_elems(r.n_elems, s);
    uint64_t at = (uint64_t)entry.y * 4;
    if (k > c)
        return 11;
    if (!sp_delta_code_fits(code, r.elem_bytes) || (k == 0 && code != 0))
        return 12;
    if ((entry.x & ~SP_DELTA_ENTRY_MASK) != 0)
        return 13;
    if (end > r.frame_bytes || at > end || end - at < sp_delta_least_bytes(c, k, code, r.elem_bytes) ||
        (s == 0 && at != SP_DELTA_HEADER_BYTES + SP_DELTA_ENTRY_BYTES * sp_delta_n_slices(r.n_elems)))
        return 15;
    return 0;
}

// A CTA has a target: it checks header and table, copies the table, and counts the changes before each slice.
__device__ __forceinline__ void sp_delta_open_target(const sp_gpu_delta_args &a, uint32_t target,
                                                     uint32_t *shared)
{
    sp_gpu_delta_row &r = a.rows[target];
    const uint2 *table = (const uint2 *)(r.frame + SP_DELTA_HEADER_BYTES);
    uint64_t n_slices = sp_delta_n_slices(r.n_elems), sum = 0;
    uint32_t rule = sp_delta_header_rule(r);
    if (rule == 0 && n_slices == 0 && r.frame_bytes != SP_DELTA_HEADER_BYTES)
        rule = 15;
    // Each thread reads the header again, so another's may have changed: all agree on whether to go on.
    if (!__syncthreads_and(rule == 0)) {
        sp_delta_report(a, target, SP_DELTA_NO_SLICE, rule);
        return;
    }
    for (uint64_t from = 0; from < n_slices; from += SP_OPEN_THREADS) {
        uint64_t s = from + threadIdx.x;
        uint32_t k = 0, n = 0;
        uint2 entry = {0, 0};
        if (s < n_slices) {
            entry = table[s];
            uint64_t end = s + 1 < n_slices ? (uint64_t)table[s + 1].y * 4 : r.frame_bytes;
            rule = sp_delta_entry_rule(r, s, entry, end);
            sp_delta_report(a, target, s, rule);
            k = entry.x & SP_DELTA_COUNT_MASK;
        }
        uint32_t before = sp_block_scan<SP_OPEN_THREADS>(k, shared, &n);
        if (s < n_slices)
            a.slices[r.first_slice + s] = {sum + before, entry.x, entry.y};
        sum += n;
        __syncthreads();
    }
    if (threadIdx.x == 0) {
        uint64_t nnz = sp_delta_word(((const uint2 *)r.frame)[2]);
        r.nnz = sum;
        sp_delta_report(a, target, SP_DELTA_NO_SLICE, sum != nnz ? 14 : 0);
    }
}

__global__ void __launch_bounds__(SP_OPEN_THREADS)
    sp_delta_open_kernel(const __grid_constant__ sp_gpu_delta_args a)
{
    uint32_t *shared = (uint32_t *)sp_block_shared();
    for (uint32_t target = blockIdx.x; target < a.n_targets; target += gridDim.x)
        sp_delta_open_target(a, target, shared);
}

// One warp: where the old values of each target begin.
__global__ void __launch_bounds__(32) sp_delta_old_kernel(const __grid_constant__ sp_gpu_delta_args a)
{
    uint64_t sum = 0;
    for (uint32_t from = 0; from < a.n_targets; from += 32) {
        uint32_t i = from + threadIdx.x;
        uint64_t bytes = i < a.n_targets ? sp_delta_old_bytes(a.rows[i]) : 0, scan = sp_warp_scan(bytes);
        if (i < a.n_targets)
            a.rows[i].old_at = sum + scan - bytes;
        sum += __shfl_sync(~0u, scan, 31);
    }
    if (threadIdx.x == 0)
        a.head->old_bytes = sum;
}

// ---- checksums ----

// Groups of 16 bytes, and what lies before the first and behind the last one.
template <int BYTES>
__global__ void __launch_bounds__(SP_SUM_THREADS)
    sp_delta_sum_kernel(const __grid_constant__ sp_gpu_delta_sum_args a)
{
    typedef typename sp_unsigned<BYTES>::type U;
    constexpr uint32_t EACH = 16 / BYTES;
    union group {
        U e[EACH];
        uint4 whole;
    };
    const U *x = (const U *)a.x;
    uint64_t lead = (16 - (uintptr_t)x % 16) % 16 / BYTES;
    lead = lead < a.n_elems ? lead : a.n_elems;
    uint64_t n = (a.n_elems - lead) / EACH, n_threads = (uint64_t)gridDim.x * SP_SUM_THREADS, sum = 0;
    uint64_t thread = (uint64_t)blockIdx.x * SP_SUM_THREADS + threadIdx.x, tail = lead + n * EACH;
    const group *groups = (const group *)(x + lead);
    for (uint64_t from = thread; from < n; from += n_threads * SP_SUM_TURNS) {
        group v[SP_SUM_TURNS];
#pragma unroll
        for (uint32_t turn = 0; turn < SP_SUM_TURNS; turn++)
            if (from + turn * n_threads < n)
                v[turn].whole = groups[from + turn * n_threads].whole;
#pragma unroll
        for (uint32_t turn = 0; turn < SP_SUM_TURNS; turn++)
            if (from + turn * n_threads < n)
#pragma unroll
                for (uint32_t e = 0; e < EACH; e++)
                    sum += sp_delta_hash(a.key, a.first + lead + (from + turn * n_threads) * EACH + e,
                                         v[turn].e[e]);
    }
    if (thread < lead)
        sum += sp_delta_hash(a.key, a.first + thread, x[thread]);
    if (thread < a.n_elems - tail)
        sum += sp_delta_hash(a.key, a.first + tail + thread, x[tail + thread]);
    sum = sp_warp_sum64(sum);
    if (threadIdx.x % 32 == 0)
        atomicAdd((unsigned long long *)a.out, (unsigned long long)sum);
}

// ---- launching ----

extern "C" spccl_status sp_delta_open_cuda(const sp_gpu_delta_args *a, void *stream)
{
    uint32_t n_ctas = a->n_targets < SP_OPEN_CTAS ? a->n_targets : SP_OPEN_CTAS;
    SP_TRY(sp_launch(sp_delta_open_kernel, {n_ctas, SP_OPEN_THREADS, SP_OPEN_THREADS / 32 * sizeof(uint32_t)},
                     a, stream, "launch of a kernel that reads the tables of deltas"));
    return sp_launch(sp_delta_old_kernel, {1, 32, 0}, a, stream,
                     "launch of a kernel that reads the tables of deltas");
}

extern "C" spccl_status sp_delta_sum_cuda(const sp_gpu_delta_sum_args *a, void *stream)
{
    typedef void (*sum_fn)(const sp_gpu_delta_sum_args);
    static const sum_fn kernels[] = {nullptr,
                                     sp_delta_sum_kernel<1>,
                                     sp_delta_sum_kernel<2>,
                                     nullptr,
                                     sp_delta_sum_kernel<4>,
                                     nullptr,
                                     nullptr,
                                     nullptr,
                                     sp_delta_sum_kernel<8>};
    sum_fn kernel = kernels[a->elem_bytes];
    uint64_t n_ctas = (a->n_elems * a->elem_bytes / 16 + SP_SUM_THREADS - 1) / SP_SUM_THREADS + 1;
    int n_resident = 0;
    SP_TRY(sp_resident_ctas((const void *)kernel, SP_SUM_THREADS, 0, &n_resident));
    SP_TRY_CUDA(cudaMemsetAsync(a->out, 0, sizeof *a->out, (cudaStream_t)stream));
    n_ctas = n_ctas < (uint64_t)n_resident ? n_ctas : (uint64_t)n_resident;
    return sp_launch(kernel, {(uint32_t)n_ctas, SP_SUM_THREADS, 0}, a, stream,
                     "launch of a kernel that sums hashes");
}
