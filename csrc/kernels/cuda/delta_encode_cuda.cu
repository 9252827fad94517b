// delta_encode_cuda.cu - encoding of deltas on GPU memory. A scan reads x and base once. It writes the sections of slices
// with few changes to the end of dst, in any order. When it is known where each slice belongs, these are copied there. Slices
// with many changes are read a second time and written in place.
#include "core/contract/delta_gpu.h"
#include "kernels/cuda/delta_encode.cuh"
#include "kernels/cuda/kernels_cuda.h"
#include "kernels/cuda/launch.cuh"

#include <stdlib.h>
#include <string.h>

#define SP_DELTA_FRAMES_THREADS 1024u
#define SP_DELTA_PLACE_THREADS 256u
#define SP_DELTA_NOT_STAGED UINT64_MAX

// ---- what the kernels share, in GPU memory ----

struct sp_delta_encode_row {
    const uint8_t *x, *base;
    uint64_t n_elems, first, key;
    uint32_t kind, dtype;
};
struct sp_delta_encode_slice {
    uint32_t entry; // of the table: count and code
    uint32_t bytes;
    uint32_t at; // in its frame, in units of 4 bytes
    uint32_t reserved;
    uint64_t sum_change;
    uint64_t staged; // byte of dst; SP_DELTA_NOT_STAGED: it is to be encoded in place
};
struct sp_delta_encode_totals {
    uint64_t staged;   // bytes at the end of dst
    uint64_t bytes;    // of all frames
    uint64_t n_again;  // slices that are to be encoded in place
    uint32_t status;   // 0, or -spccl_status
    uint32_t source;   // of which the frame did not fit
    uint64_t wanted;   // bytes, up to the end of that frame
    uint64_t is_moved; // 0: frames reach into the staged slices, so all are encoded in place
};

struct sp_delta_encode_job {
    const sp_delta_encode_row *rows; // [n_rows]
    const uint64_t *first_slice;     // [n_rows]: of each row, among the slices of all
    // The rows of the kind that a kernel works on, and their first slices among those of this kind.
    const uint32_t *kind_rows;
    const uint64_t *kind_first;
    uint32_t n_kind_rows, kind;
    uint64_t n_kind_slices;
    sp_delta_encode_slice *slices; // [n_slices]
    uint32_t *again;               // [n_slices]
    sp_delta_encode_totals *totals;
    spccl_delta_frame *frames; // [n_rows]
    uint64_t n_slices, dst_cap;
    uint8_t *dst; // aligned to 16 bytes
    uint32_t n_rows, raw;
};

// The last i < n with first[i] <= at; first[0] <= at. A whole warp calls it, with the same arguments.
__device__ __forceinline__ uint32_t sp_delta_find_row(const uint64_t *first, uint32_t n, uint64_t at)
{
    uint32_t begin = 0;
    while (n > 1) {
        uint32_t step = (n + 31) / 32, i = threadIdx.x % 32 * step;
        bool is_at_or_before = i < n && first[begin + i] <= at;
        uint32_t last = (uint32_t)__popc(__ballot_sync(~0u, is_at_or_before)) - 1;
        begin += last * step;
        n = min(step, n - last * step);
    }
    return begin;
}

template <int E, int CAST>
static __device__ __forceinline__ sp_delta_piece piece_of(const sp_delta_encode_row &row, uint64_t slice)
{
    const uint64_t from = slice * SP_DELTA_SLICE_ELEMS;
    sp_delta_piece p;
    p.x = row.x + from * (CAST != 0 ? 4 : E);
    p.base = row.base + from * E;
    p.n_elems = sp_delta_slice_elems(row.n_elems, slice);
    p.is_aligned = ((uintptr_t)p.x | (uintptr_t)p.base) % 16 == 0;
    p.first = row.first + from;
    p.key = row.key;
    return p;
}

// ---- scan: what changed, and the sections of slices with few changes ----

// Room for so many bytes at the end of dst, at most the latter half of it.
static __device__ __forceinline__ uint64_t stage(const sp_delta_encode_job &a, uint32_t bytes)
{
    const uint64_t most = a.dst_cap / 32 * 16, wanted = (bytes + 15u) / 16 * 16;
    const uint64_t end =
        atomicAdd((unsigned long long *)&a.totals->staged, (unsigned long long)wanted) + wanted;
    return end <= most ? a.dst_cap / 16 * 16 - end : SP_DELTA_NOT_STAGED;
}

// Bytes from n to the next multiple of 4 become 0. One thread calls it.
static __device__ __forceinline__ void fill_up(uint8_t *p, uint32_t n)
{
    for (; n % 4 != 0; n++)
        p[n] = 0;
}

// The slice that the CTA has scanned. Thread 0 notes it; the sections are written if there is room for them.
template <int E>
static __device__ __forceinline__ void finish_slice(const sp_delta_encode_job &a, sp_delta_shared<E> &s,
                                                    const sp_delta_piece &p, uint64_t number)
{
    uint32_t count[SP_DELTA_N_CODES] = {}, code = 0, bytes = 0;
    uint64_t sum_change = 0;
    sp_delta_index index = {false, 0, 0, 0};

    for (uint32_t w = 0; w < SP_DELTA_ENCODE_WARPS; w++) {
        sum_change += s.sum_change[w];
#pragma unroll
        for (uint32_t i = 0; i < SP_DELTA_N_CODES; i++)
            count[i] += s.count[w][i];
    }
    const uint32_t k = count[0];
    if (k != 0) {
        code = a.raw != 0 ? 0 : sp_delta_choose(k, count, E);
        index = sp_delta_index_of(p.n_elems, k);
        bytes = index.low_bytes + index.high_bytes + sp_delta_value_bytes(code, k, count[code], E);
    }
    if (threadIdx.x == 0) {
        uint64_t staged = SP_DELTA_NOT_STAGED;
        if (k != 0 && s.is_dense == 0)
            staged = stage(a, bytes);
        if (k != 0 && staged == SP_DELTA_NOT_STAGED)
            a.again[atomicAdd((unsigned long long *)&a.totals->n_again, 1ull)] = (uint32_t)number;
        a.slices[number] = {k | code << SP_DELTA_CODE_SHIFT, bytes, 0, 0, sum_change, staged};
        s.at = staged;
    }
    if (k == 0 || s.is_dense != 0)
        return;
    sp_delta_rank(s, (p.n_elems + 63) / 64); // a barrier: all threads see s.at
    if (s.at == SP_DELTA_NOT_STAGED)
        return;
    const sp_delta_sections to(a.dst + s.at, index, k, code);
    sp_delta_write_part(s, to, {true, 0, p.n_elems, 0, 0, k});
    if (threadIdx.x == 0)
        fill_up(to.values, (code == 0 ? k : count[code]) * E);
}

template <int E, int CAST>
__global__ void __launch_bounds__(SP_DELTA_ENCODE_THREADS)
    sp_delta_scan_kernel(const __grid_constant__ sp_delta_encode_job a)
{
    sp_delta_shared<E> &s = *(sp_delta_shared<E> *)sp_block_shared();
    for (uint64_t i = blockIdx.x; i < a.n_kind_slices; i += gridDim.x) {
        const uint32_t at = sp_delta_find_row(a.kind_first, a.n_kind_rows, i), row = a.kind_rows[at];
        const uint64_t slice = i - a.kind_first[at];
        const sp_delta_piece p = piece_of<E, CAST>(a.rows[row], slice);
        s.clear();
        __syncthreads();
        sp_delta_scan<E, CAST>(s, p, 0, p.n_elems);
        __syncthreads();
        finish_slice(a, s, p, a.first_slice[row] + slice);
        __syncthreads();
    }
}

// ---- offsets ----

// The sum of v over the threads before this one. All threads of a CTA of FRAMES_THREADS call it. *total: over all.
static __device__ __forceinline__ uint64_t scan_block(uint64_t v, uint64_t *warps, uint64_t *total)
{
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint64_t scanned = v, lower;
    for (uint32_t by = 1; by < 32; by *= 2) {
        lower = __shfl_up_sync(~0u, scanned, by);
        scanned += lane >= by ? lower : 0;
    }
    __syncthreads(); // `warps` may hold sums that others still read
    if (lane == 31)
        warps[warp] = scanned;
    __syncthreads();
    uint64_t of_warp = warps[lane], all = of_warp;
    for (uint32_t by = 1; by < 32; by *= 2) {
        lower = __shfl_up_sync(~0u, all, by);
        all += lane >= by ? lower : 0;
    }
    *total = __shfl_sync(~0u, all, 31);
    return scanned - v + __shfl_sync(~0u, all - of_warp, warp);
}

// Where the slices of a frame lie in it, and its sums. frames[].bytes is not filled up to 8 yet.
static __device__ __forceinline__ void sum_frame(const sp_delta_encode_job &a, uint32_t row, uint64_t *warps)
{
    const uint64_t begin = a.first_slice[row], n = sp_delta_n_slices(a.rows[row].n_elems);
    uint64_t at = SP_DELTA_HEADER_BYTES + n * SP_DELTA_ENTRY_BYTES, total, nnz = 0, sum_change = 0;

    for (uint64_t from = 0; from < n; from += SP_DELTA_FRAMES_THREADS) {
        uint64_t i = from + threadIdx.x, before;
        sp_delta_encode_slice slice = {};
        if (i < n)
            slice = a.slices[begin + i];
        before = scan_block(slice.bytes, warps, &total);
        if (i < n)
            a.slices[begin + i].at = (uint32_t)((at + before) / 4);
        nnz += slice.entry & SP_DELTA_COUNT_MASK;
        sum_change += slice.sum_change;
        at += total;
    }
    (void)scan_block(nnz, warps, &nnz);
    (void)scan_block(sum_change, warps, &sum_change);
    if (threadIdx.x == 0)
        a.frames[row] = {0, at, nnz, sum_change};
}
static __global__ void __launch_bounds__(SP_DELTA_FRAMES_THREADS)
    sp_delta_offsets_kernel(const __grid_constant__ sp_delta_encode_job a)
{
    for (uint32_t row = blockIdx.x; row < a.n_rows; row += gridDim.x)
        sum_frame(a, row, (uint64_t *)sp_block_shared());
}

// One CTA: where frames lie, and whether they do.
static __global__ void __launch_bounds__(SP_DELTA_FRAMES_THREADS)
    sp_delta_frames_kernel(const __grid_constant__ sp_delta_encode_job a)
{
    uint64_t *warps = (uint64_t *)sp_block_shared(), at = 0, total;
    sp_delta_encode_totals *t = a.totals;

    for (uint32_t from = 0; from < a.n_rows; from += SP_DELTA_FRAMES_THREADS) {
        const uint32_t i = from + threadIdx.x;
        uint64_t bytes = i < a.n_rows ? a.frames[i].bytes : 0, filled = (bytes + 7) / 8 * 8;
        const bool is_long = bytes > SP_DELTA_BYTES_MAX - SP_DELTA_ALIGN;
        const uint64_t begin = at + scan_block(filled, warps, &total);
        const bool is_bad = is_long || begin + filled > a.dst_cap;
        uint64_t n_bad, bad_before = scan_block(is_bad ? 1 : 0, warps, &n_bad);
        if (is_bad && bad_before == 0 && t->status == 0) {
            t->status = is_long ? (uint32_t)-SPCCL_ERR_UNSUPPORTED : (uint32_t)-SPCCL_ERR_DST_SMALL;
            t->source = i;
            t->wanted = begin + filled;
        }
        if (i < a.n_rows) {
            a.frames[i].offset = begin;
            a.frames[i].bytes = filled;
        }
        at += total;
        __syncthreads(); // t->status
    }
    if (threadIdx.x == 0) {
        const uint64_t staged = min(t->staged, a.dst_cap / 32 * 16);
        t->bytes = at;
        t->is_moved = at <= a.dst_cap / 16 * 16 - staged ? 1 : 0;
    }
}

// ---- frames ----

static __device__ __forceinline__ void copy_words(uint32_t *to, const uint32_t *from, uint32_t n)
{
    constexpr uint32_t UNROLL = 4;
    for (uint32_t begin = 0; begin < n; begin += UNROLL * 32) {
        uint32_t v[UNROLL];
#pragma unroll
        for (uint32_t q = 0; q < UNROLL; q++)
            v[q] = begin + q * 32 + threadIdx.x % 32 < n ? from[begin + q * 32 + threadIdx.x % 32] : 0;
#pragma unroll
        for (uint32_t q = 0; q < UNROLL; q++)
            if (begin + q * 32 + threadIdx.x % 32 < n)
                to[begin + q * 32 + threadIdx.x % 32] = v[q];
    }
}
// The header, and zeros after the last slice. One thread calls it.
static __device__ __forceinline__ void write_header(const sp_delta_encode_job &a, uint32_t row)
{
    const sp_delta_encode_row &r = a.rows[row];
    const spccl_delta_frame f = a.frames[row];
    const uint64_t n = sp_delta_n_slices(r.n_elems), last = a.first_slice[row] + n - 1;
    uint64_t *head = (uint64_t *)(a.dst + f.offset);
    uint64_t end = SP_DELTA_HEADER_BYTES;
    head[0] = 0x46435053u | (uint64_t)SP_DELTA_VERSION << 32 | (uint64_t)SPCCL_FORMAT_DELTA << 40 |
              (uint64_t)r.dtype << 48 | UINT64_C(1) << 56;
    head[1] = r.n_elems;
    head[2] = f.nnz;
    head[3] = f.bytes;
    if (n != 0)
        end = (uint64_t)a.slices[last].at * 4 + a.slices[last].bytes;
    if (end != f.bytes)
        *(uint32_t *)(a.dst + f.offset + end) = 0;
}

// A warp per slice or header: moves the sections of staged slices to where they belong, and writes tables.
static __global__ void __launch_bounds__(SP_DELTA_PLACE_THREADS)
    sp_delta_place_kernel(const __grid_constant__ sp_delta_encode_job a)
{
    const uint64_t n_warps = (uint64_t)gridDim.x * (SP_DELTA_PLACE_THREADS / 32);
    const bool is_moved = a.totals->is_moved != 0;
    if (a.totals->status != 0)
        return;
    for (uint64_t i = blockIdx.x * (SP_DELTA_PLACE_THREADS / 32) + threadIdx.x / 32;
         i < a.n_slices + a.n_rows; i += n_warps) {
        if (i >= a.n_slices) {
            if (threadIdx.x % 32 == 0)
                write_header(a, (uint32_t)(i - a.n_slices));
            continue;
        }
        const uint32_t row = sp_delta_find_row(a.first_slice, a.n_rows, i);
        const sp_delta_encode_slice slice = a.slices[i];
        uint8_t *frame = a.dst + a.frames[row].offset;
        if (threadIdx.x % 32 == 0)
            ((uint64_t *)(frame + SP_DELTA_HEADER_BYTES))[i - a.first_slice[row]] =
                slice.entry | (uint64_t)slice.at << 32;
        if (is_moved && slice.bytes != 0 && slice.staged != SP_DELTA_NOT_STAGED)
            copy_words((uint32_t *)(frame + (uint64_t)slice.at * 4), (const uint32_t *)(a.dst + slice.staged),
                       slice.bytes / 4);
    }
}

// Encode a slice again, where it belongs, in parts of which the lists hold every change.
template <int E, int CAST>
static __device__ __forceinline__ void encode_in_place(sp_delta_shared<E> &s, const sp_delta_piece &p,
                                                       const sp_delta_encode_slice &slice, uint8_t *dst)
{
    constexpr uint32_t CAP = sp_delta_shared<E>::CAP;
    const uint32_t k = slice.entry & SP_DELTA_COUNT_MASK, code = slice.entry >> SP_DELTA_CODE_SHIFT;
    const sp_delta_sections to(dst, sp_delta_index_of(p.n_elems, k), k, code);
    sp_delta_part part = {false, 0, 0, 0, 0, 0};

    for (uint32_t i = threadIdx.x; i < slice.bytes / 4; i += SP_DELTA_ENCODE_THREADS)
        ((uint32_t *)dst)[i] = 0;
    for (; part.from < p.n_elems; part.from += CAP) {
        part.n_elems = min(CAP, p.n_elems - part.from);
        s.clear();
        __syncthreads();
        sp_delta_scan<E, CAST>(s, p, part.from, part.n_elems);
        __syncthreads();
        part.n = sp_delta_rank(s, CAP / 64);
        sp_delta_write_part(s, to, part);
        part.rank += part.n;
        if (code != 0)
            for (uint32_t w = 0; w < SP_DELTA_ENCODE_WARPS; w++)
                part.escaped += s.count[w][code];
        __syncthreads();
    }
}

template <int E, int CAST>
__global__ void __launch_bounds__(SP_DELTA_ENCODE_THREADS)
    sp_delta_again_kernel(const __grid_constant__ sp_delta_encode_job a)
{
    sp_delta_shared<E> &s = *(sp_delta_shared<E> *)sp_block_shared();
    const bool is_moved = a.totals->is_moved != 0;
    const uint64_t n = is_moved ? a.totals->n_again : a.n_slices;
    if (a.totals->status != 0)
        return;
    for (uint64_t i = blockIdx.x; i < n; i += gridDim.x) {
        const uint64_t number = is_moved ? a.again[i] : i;
        const uint32_t row = sp_delta_find_row(a.first_slice, a.n_rows, number);
        const sp_delta_encode_slice slice = a.slices[number];
        if (a.rows[row].kind == a.kind && slice.bytes != 0)
            encode_in_place<E, CAST>(s, piece_of<E, CAST>(a.rows[row], number - a.first_slice[row]), slice,
                                     a.dst + a.frames[row].offset + (uint64_t)slice.at * 4);
    }
}

// ---- launching ----

typedef void (*sp_delta_encode_fn)(const sp_delta_encode_job);
struct sp_delta_kind {
    sp_delta_encode_fn scan, again;
    size_t shared_bytes;
};
template <int E, int CAST = 0> static constexpr sp_delta_kind kind_for()
{
    return {sp_delta_scan_kernel<E, CAST>, sp_delta_again_kernel<E, CAST>, sizeof(sp_delta_shared<E>)};
}
static const sp_delta_kind kinds[] = {kind_for<1>(),
                                      kind_for<2>(),
                                      kind_for<4>(),
                                      kind_for<8>(),
                                      kind_for<2, SPCCL_BFLOAT16>(),
                                      kind_for<2, SPCCL_FLOAT16>()};
static const uint32_t N_KINDS = sizeof kinds / sizeof *kinds;

static uint32_t kind_of(const spccl_delta_source *s)
{
    const size_t e = sp_dtype_bytes(s->dtype);
    if (s->x_dtype != s->dtype)
        return s->dtype == SPCCL_BFLOAT16 ? 4 : 5;
    return e == 1 ? 0 : e == 2 ? 1 : e == 4 ? 2 : 3;
}

// One block of GPU memory. Its parts: totals and frames, which come back; the tables, which the host fills; slices.
struct sp_delta_space {
    sp_delta_encode_job job;
    uint64_t kind_slices[N_KINDS];
    uint32_t kind_begin[N_KINDS + 1]; // in kind_rows
    size_t results_bytes, tables_bytes, bytes;
    uint8_t *host; // results and tables
    uint8_t *device;
};

static size_t part(size_t *at, size_t bytes)
{
    size_t begin = *at;
    *at = (begin + bytes + 15) / 16 * 16;
    return begin;
}

static spccl_status space_init(sp_delta_space *m, const sp_gpu_delta_encode_args *a)
{
    const size_t n = a->n_sources;
    uint64_t n_slices = 0;
    size_t at = 0, totals, frames, rows, first, kind_first, kind_rows, slices, again;
    for (size_t i = 0; i < n; i++)
        n_slices += sp_delta_n_slices(a->sources[i].n_elems);
    totals = part(&at, sizeof(sp_delta_encode_totals));
    frames = part(&at, n * sizeof(spccl_delta_frame));
    m->results_bytes = at;
    rows = part(&at, n * sizeof(sp_delta_encode_row));
    first = part(&at, n * 8);
    kind_first = part(&at, n * 8);
    kind_rows = part(&at, n * 4);
    m->tables_bytes = at;
    slices = part(&at, n_slices * sizeof(sp_delta_encode_slice));
    again = part(&at, n_slices * 4);
    m->bytes = at;
    m->host = (uint8_t *)calloc(1, m->tables_bytes);
    if (m->host == NULL)
        return SP_FAIL(SPCCL_ERR_NOMEM, "cuda_delta_encode: %zu bytes of tables", m->tables_bytes);
    SP_TRY_CUDA(cudaMalloc((void **)&m->device, m->bytes));
    m->job = {};
    m->job.totals = (sp_delta_encode_totals *)(m->device + totals);
    m->job.frames = (spccl_delta_frame *)(m->device + frames);
    m->job.rows = (sp_delta_encode_row *)(m->device + rows);
    m->job.first_slice = (uint64_t *)(m->device + first);
    m->job.kind_first = (uint64_t *)(m->device + kind_first);
    m->job.kind_rows = (uint32_t *)(m->device + kind_rows);
    m->job.slices = (sp_delta_encode_slice *)(m->device + slices);
    m->job.again = (uint32_t *)(m->device + again);
    m->job.n_slices = n_slices;
    m->job.n_rows = (uint32_t)n;
    m->job.dst = a->dst;
    m->job.dst_cap = a->dst_cap;
    m->job.raw = a->raw ? 1 : 0;
    return SPCCL_OK;
}
// Free it. Work on it is done, or was never begun.
static void space_fini(sp_delta_space *m)
{
    free(m->host);
    if (m->device != NULL && cudaFree(m->device) != cudaSuccess)
        (void)cudaGetLastError();
}
template <class T> static T *host_part(const sp_delta_space *m, const T *device)
{
    return (T *)(m->host + ((const uint8_t *)device - m->device));
}

static void fill_tables(sp_delta_space *m, const sp_gpu_delta_encode_args *a)
{
    sp_delta_encode_row *rows = host_part(m, m->job.rows);
    uint64_t *first = host_part(m, m->job.first_slice), *kind_first = host_part(m, m->job.kind_first);
    uint32_t *kind_rows = host_part(m, m->job.kind_rows), n = 0;
    uint64_t slices = 0;
    for (size_t i = 0; i < a->n_sources; i++) {
        const spccl_delta_source *s = &a->sources[i];
        rows[i] = {(const uint8_t *)s->x, (const uint8_t *)s->base, s->n_elems, s->first, s->key, kind_of(s),
                   (uint32_t)s->dtype};
        first[i] = slices;
        slices += sp_delta_n_slices(s->n_elems);
    }
    for (uint32_t kind = 0; kind < N_KINDS; kind++) {
        m->kind_begin[kind] = n;
        m->kind_slices[kind] = 0;
        for (size_t i = 0; i < a->n_sources; i++)
            if (rows[i].kind == kind && rows[i].n_elems != 0) {
                kind_first[n] = m->kind_slices[kind];
                kind_rows[n++] = (uint32_t)i;
                m->kind_slices[kind] += sp_delta_n_slices(rows[i].n_elems);
            }
    }
    m->kind_begin[N_KINDS] = n;
}

static const char launching[] = "launch of a kernel that encodes deltas";

// *n_ctas = as many as run at once, but not more than `wanted`.
static spccl_status ctas_for(const void *kernel, uint32_t n_threads, size_t shared_bytes, uint64_t wanted,
                             uint32_t *n_ctas)
{
    int resident = 0;
    SP_TRY(sp_resident_ctas(kernel, n_threads, shared_bytes, &resident));
    *n_ctas = wanted < (uint64_t)resident ? (uint32_t)wanted : (uint32_t)resident;
    return SPCCL_OK;
}

// Launch the kernel that `fn` says for each kind of array that is there.
static spccl_status launch_kinds(const sp_delta_space *m, sp_delta_encode_fn sp_delta_kind::*fn, void *stream)
{
    for (uint32_t kind = 0; kind < N_KINDS; kind++) {
        const sp_delta_kind &k = kinds[kind];
        sp_delta_encode_job job = m->job;
        sp_launch_shape shape = {0, SP_DELTA_ENCODE_THREADS, k.shared_bytes};
        if (m->kind_slices[kind] == 0)
            continue;
        job.kind = kind;
        job.kind_rows += m->kind_begin[kind];
        job.kind_first += m->kind_begin[kind];
        job.n_kind_rows = m->kind_begin[kind + 1] - m->kind_begin[kind];
        job.n_kind_slices = m->kind_slices[kind];
        SP_TRY_CUDA(cudaFuncSetAttribute((const void *)(k.*fn), cudaFuncAttributeMaxDynamicSharedMemorySize,
                                         (int)k.shared_bytes));
        SP_TRY(ctas_for((const void *)(k.*fn), shape.n_threads, shape.shared_bytes, job.n_kind_slices,
                        &shape.n_ctas));
        SP_TRY(sp_launch(k.*fn, shape, &job, stream, launching));
    }
    return SPCCL_OK;
}

static spccl_status launch_all(sp_delta_space *m, void *stream)
{
    const sp_delta_encode_job *job = &m->job;
    const uint64_t n_warps = job->n_slices + job->n_rows, each = SP_DELTA_PLACE_THREADS / 32;
    sp_launch_shape sums = {0, SP_DELTA_FRAMES_THREADS, SP_DELTA_FRAMES_THREADS / 32 * 8},
                    frames = {1, sums.n_threads, sums.shared_bytes}, places = {0, SP_DELTA_PLACE_THREADS, 0};
    SP_TRY(ctas_for((const void *)sp_delta_offsets_kernel, sums.n_threads, sums.shared_bytes, job->n_rows,
                    &sums.n_ctas));
    SP_TRY(ctas_for((const void *)sp_delta_place_kernel, places.n_threads, 0, (n_warps + each - 1) / each,
                    &places.n_ctas));
    SP_TRY_CUDA(
        cudaMemcpyAsync(m->device, m->host, m->tables_bytes, cudaMemcpyHostToDevice, (cudaStream_t)stream));
    SP_TRY(launch_kinds(m, &sp_delta_kind::scan, stream));
    SP_TRY(sp_launch(sp_delta_offsets_kernel, sums, job, stream, launching));
    SP_TRY(sp_launch(sp_delta_frames_kernel, frames, job, stream, launching));
    SP_TRY(sp_launch(sp_delta_place_kernel, places, job, stream, launching));
    SP_TRY(launch_kinds(m, &sp_delta_kind::again, stream));
    return sp_cuda_check(
        cudaMemcpyAsync(m->host, m->device, m->results_bytes, cudaMemcpyDeviceToHost, (cudaStream_t)stream),
        "cudaMemcpyAsync");
}

static spccl_status read_results(const sp_delta_space *m, const sp_gpu_delta_encode_args *a)
{
    const sp_delta_encode_totals *t = host_part(m, m->job.totals);
    if (t->status == (uint32_t)-SPCCL_ERR_UNSUPPORTED)
        return SP_FAIL(SPCCL_ERR_UNSUPPORTED,
                       "cuda_delta_encode: sources[%u]: the frame exceeds 16 GiB: split the array into parts",
                       t->source);
    if (t->status != 0)
        return SP_FAIL(SPCCL_ERR_DST_SMALL,
                       "cuda_delta_encode: dst_cap %llu, wanted %llu more in sources[%u]: the sum of "
                       "spccl_delta_bound of all sources always suffices",
                       (unsigned long long)a->dst_cap, (unsigned long long)(t->wanted - a->dst_cap),
                       t->source);
    memcpy(a->frames, host_part(m, m->job.frames), a->n_sources * sizeof *a->frames);
    *a->out_bytes = (size_t)t->bytes;
    return SPCCL_OK;
}

extern "C" spccl_status sp_delta_encode_cuda(const sp_gpu_delta_encode_args *a, void *stream)
{
    sp_delta_space m = {};
    spccl_status st = space_init(&m, a), waited;
    if (st == SPCCL_OK) {
        fill_tables(&m, a);
        st = launch_all(&m, stream);
        // After a failed launch too: kernels before it use the memory.
        waited = sp_cuda_check(cudaStreamSynchronize((cudaStream_t)stream), "cudaStreamSynchronize");
        if (st == SPCCL_OK)
            st = waited;
        if (st == SPCCL_OK)
            st = read_results(&m, a);
    }
    space_fini(&m);
    return st;
}
