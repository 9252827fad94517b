// delta_encode_cuda.cu - encoding of deltas on GPU memory. A scan reads x and base once. It writes the sections of slices
// with few changes to the end of dst, in any order. When it is known where each slice belongs, these are copied there. Slices
// with many changes are read a second time and written in place. Where bases advance, the scan writes them. The base
// of a slice that is not staged gets its old elements back at once, all bases get them back if the call fails.
#include "core/contract/delta_gpu.h"
#include "kernels/cuda/delta_encode.cuh"
#include "kernels/cuda/delta_frames.cuh"
#include "kernels/cuda/kernels_cuda.h"
#include "kernels/cuda/launch.cuh"

#include <stdlib.h>
#include <string.h>

template <int E, int CAST>
static __device__ __forceinline__ sp_delta_piece piece_of(const sp_delta_encode_row &row, uint64_t slice,
                                                          bool advances)
{
    const uint64_t from = slice * SP_DELTA_SLICE_ELEMS;
    sp_delta_piece p;
    p.x = row.x + from * (CAST != 0 ? 4 : E);
    p.base = row.base + from * E;
    p.n_elems = sp_delta_slice_elems(row.n_elems, slice);
    p.is_aligned = ((uintptr_t)p.x | (uintptr_t)p.base) % 16 == 0;
    p.advances = advances;
    p.first = row.first + from;
    p.key = row.key;
    return p;
}

// ---- scan: what changed, and the sections of slices with few changes ----

// Room for so many bytes at the end of dst, at most the latter half of it.
static __device__ __forceinline__ uint64_t stage(const sp_delta_encode_job &a, uint32_t bytes)
{
    const uint64_t most = a.room / 2, wanted = (bytes + 15u) / 16 * 16;
    const uint64_t end =
        atomicAdd((unsigned long long *)&a.totals->staged, (unsigned long long)wanted) + wanted;
    return end <= most ? a.room - end : SP_DELTA_NOT_STAGED;
}

// Bytes from n to the next multiple of 4 become 0. One thread calls it.
static __device__ __forceinline__ void fill_up(uint8_t *p, uint32_t n)
{
    for (; n % 4 != 0; n++)
        p[n] = 0;
}

// What the base was, in order, behind the staged sections.
template <int E>
static __device__ __forceinline__ void stage_changes(const sp_delta_shared<E> &s, uint8_t *staged,
                                                     const sp_delta_staged &more)
{
    typedef typename sp_unsigned<E>::type U;
    const uint32_t warp = threadIdx.x / 32, begin = warp * s.LIST;
    for (uint32_t i = begin + threadIdx.x % 32; i < begin + s.n_listed[warp]; i += 32) {
        const uint32_t rank = sp_delta_rank_of(s, s.place[i]);
        ((U *)(staged + more.old))[rank] = s.old[i];
        ((uint16_t *)(staged + more.places))[rank] = s.place[i];
    }
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
            staged = stage(a, a.old == nullptr ? bytes : sp_delta_staged(bytes, k, E).end);
        if (k != 0 && staged == SP_DELTA_NOT_STAGED)
            a.again[atomicAdd((unsigned long long *)&a.totals->n_again, 1ull)] = (uint32_t)number;
        a.slices[number] = {k | code << SP_DELTA_CODE_SHIFT, bytes, 0, 0, sum_change, 0, staged};
        s.at = staged;
    }
    if (k == 0)
        return;
    if (s.is_dense == 0)
        sp_delta_rank(s, (p.n_elems + 63) / 64); // a barrier: all threads see s.at
    if (s.is_dense != 0 || s.at == SP_DELTA_NOT_STAGED) {
        if (p.advances)
            sp_delta_take_back(s, p, s.n_listed[threadIdx.x / 32]);
        return;
    }
    const sp_delta_sections to(a.dst + s.at, index, k, code);
    sp_delta_write_part(s, to, {true, 0, p.n_elems, 0, 0, k});
    if (threadIdx.x == 0)
        fill_up(to.values, (code == 0 ? k : count[code]) * E);
    if (a.old != nullptr)
        stage_changes(s, a.dst + s.at, sp_delta_staged(bytes, k, E));
}

// Slices that a CTA takes one after the other. Most lie in the same row, which is then looked up once.
#define SP_DELTA_RUN 4u

template <int E> struct sp_delta_scan_shared {
    sp_delta_shared<E> lists;
    sp_delta_encode_row row;
    uint64_t first_slice;          // of the row
    uint64_t kind_first, kind_end; // its slices among those of this kind
};
// Look up the row of slice i of this kind. The first warp calls it.
template <int E>
static __device__ __forceinline__ void look_up(const sp_delta_encode_job &a, sp_delta_scan_shared<E> &s,
                                               uint64_t i)
{
    const uint32_t at = sp_delta_find_row(a.kind_first, a.n_kind_rows, i), row = a.kind_rows[at];
    __syncwarp();
    if (threadIdx.x == 0) {
        s.row = a.rows[row];
        s.first_slice = a.first_slice[row];
        s.kind_first = a.kind_first[at];
        s.kind_end = s.kind_first + sp_delta_n_slices(s.row.n_elems);
    }
    __syncwarp();
}

template <int E, int CAST>
static __device__ __forceinline__ void scan_slice(const sp_delta_encode_job &a, sp_delta_scan_shared<E> &s,
                                                  uint64_t i)
{
    if (threadIdx.x < 32 && i >= s.kind_end)
        look_up(a, s, i);
    s.lists.clear();
    __syncthreads();
    const uint64_t slice = i - s.kind_first;
    const sp_delta_piece p = piece_of<E, CAST>(s.row, slice, a.old != nullptr);
    sp_delta_scan<E, CAST>(s.lists, p, 0, p.n_elems);
    __syncthreads();
    finish_slice(a, s.lists, p, s.first_slice + slice);
    __syncthreads();
}

template <int E, int CAST>
__global__ void __launch_bounds__(SP_DELTA_ENCODE_THREADS, SP_DELTA_ENCODE_CTAS)
    sp_delta_scan_kernel(const __grid_constant__ sp_delta_encode_job a)
{
    sp_delta_scan_shared<E> &s = *(sp_delta_scan_shared<E> *)sp_block_shared();
    if (threadIdx.x == 0)
        s.kind_end = 0;
    __syncthreads();
    for (uint64_t from = (uint64_t)blockIdx.x * SP_DELTA_RUN; from < a.n_kind_slices;
         from += (uint64_t)gridDim.x * SP_DELTA_RUN) {
        const uint64_t end = min(from + SP_DELTA_RUN, a.n_kind_slices);
        for (uint64_t i = from; i < end; i++)
            scan_slice<E, CAST>(a, s, i);
    }
}

// The base becomes what x is in this part; `old`, of the slice, gets what it was. All threads have read the part.
template <int E>
static __device__ __forceinline__ void advance_part(const sp_delta_shared<E> &s, const sp_delta_piece &p,
                                                    uint8_t *old, const sp_delta_part &part)
{
    typedef typename sp_unsigned<E>::type U;
    const uint32_t warp = threadIdx.x / 32, begin = warp * s.LIST;
    for (uint32_t i = begin + threadIdx.x % 32; i < begin + s.n_listed[warp]; i += 32) {
        ((U *)old)[part.rank + sp_delta_rank_of(s, s.place[i] - part.from)] = s.old[i];
        ((U *)p.base)[s.place[i]] = s.now[i];
    }
}

// Encode a slice again, where it belongs, in parts of which the lists hold every change.
template <int E, int CAST>
static __device__ __forceinline__ void encode_in_place(sp_delta_shared<E> &s, const sp_delta_piece &p,
                                                       const sp_delta_encode_slice &slice, uint8_t *dst,
                                                       uint8_t *old)
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
        if (old != nullptr)
            advance_part(s, p, old, part);
        part.rank += part.n;
        if (code != 0)
            for (uint32_t w = 0; w < SP_DELTA_ENCODE_WARPS; w++)
                part.escaped += s.count[w][code];
        __syncthreads();
    }
}

template <int E, int CAST>
__global__ void __launch_bounds__(SP_DELTA_ENCODE_THREADS, SP_DELTA_ENCODE_CTAS)
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
            encode_in_place<E, CAST>(s, piece_of<E, CAST>(a.rows[row], number - a.first_slice[row], false),
                                     slice, a.dst + a.frames[row].offset + (uint64_t)slice.at * 4,
                                     a.old == nullptr ? nullptr : a.old + a.old_at[row] + slice.before * E);
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
    return {sp_delta_scan_kernel<E, CAST>, sp_delta_again_kernel<E, CAST>, sizeof(sp_delta_scan_shared<E>)};
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

// One block of GPU memory: totals and frames, which come back; the tables, which the host fills; slices. It lies at the end
// of dst, as allocating and freeing it would take a part of the time, unless dst is small or frames need that end too.
struct sp_delta_space {
    sp_delta_encode_job job;
    uint64_t kind_slices[N_KINDS];
    uint32_t kind_begin[N_KINDS + 1]; // in kind_rows
    size_t results_bytes, tables_bytes, bytes;
    uint8_t *host;               // results and tables
    uint8_t *device, *allocated; // allocated: nullptr, or device
};

static size_t part(size_t *at, size_t bytes)
{
    size_t begin = *at;
    *at = (begin + bytes + 15) / 16 * 16;
    return begin;
}

static spccl_status space_init(sp_delta_space *m, const sp_gpu_delta_encode_args *a, bool in_dst)
{
    const size_t n = a->n_sources;
    uint64_t n_slices = 0;
    size_t at = 0, totals, frames, rows, first, kind_first, kind_rows, slices, again, old_at;
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
    old_at = part(&at, n * 8);
    m->bytes = at;
    m->host = (uint8_t *)calloc(1, m->tables_bytes);
    if (m->host == NULL)
        return SP_FAIL(SPCCL_ERR_NOMEM, "cuda_delta_encode: %zu bytes of tables", m->tables_bytes);
    m->job = {};
    m->job.room = a->dst_cap / 16 * 16;
    m->job.tables_from = UINT64_MAX;
    if (in_dst && m->bytes <= m->job.room / 16) {
        m->job.room = m->job.tables_from = m->job.room - m->bytes;
        m->device = a->dst + m->job.room;
    } else {
        SP_TRY_CUDA(cudaMalloc((void **)&m->allocated, m->bytes));
        m->device = m->allocated;
    }
    m->job.totals = (sp_delta_encode_totals *)(m->device + totals);
    m->job.frames = (spccl_delta_frame *)(m->device + frames);
    m->job.rows = (sp_delta_encode_row *)(m->device + rows);
    m->job.first_slice = (uint64_t *)(m->device + first);
    m->job.kind_first = (uint64_t *)(m->device + kind_first);
    m->job.kind_rows = (uint32_t *)(m->device + kind_rows);
    m->job.slices = (sp_delta_encode_slice *)(m->device + slices);
    m->job.again = (uint32_t *)(m->device + again);
    m->job.old_at = (uint64_t *)(m->device + old_at);
    m->job.n_slices = n_slices;
    m->job.n_rows = (uint32_t)n;
    m->job.dst = a->dst;
    m->job.dst_cap = a->dst_cap;
    m->job.raw = a->raw ? 1 : 0;
    m->job.old = a->old;
    m->job.old_cap = a->old_cap;
    return SPCCL_OK;
}
// Free it. Work on it is done, or was never begun.
static void space_fini(sp_delta_space *m)
{
    free(m->host);
    if (m->allocated != NULL && cudaFree(m->allocated) != cudaSuccess)
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
    if (job->old != nullptr)
        SP_TRY(sp_launch(sp_delta_restore_kernel, places, job, stream, launching));
    SP_TRY(sp_launch(sp_delta_place_kernel, places, job, stream, launching));
    return launch_kinds(m, &sp_delta_kind::again, stream);
}

// AGAIN: the tables must not lie in dst.
static spccl_status read_results(const sp_delta_space *m, const sp_gpu_delta_encode_args *a)
{
    const sp_delta_encode_totals *t = host_part(m, m->job.totals);
    if (t->status == SP_DELTA_NO_TABLES)
        return SPCCL_AGAIN;
    if (t->status == (uint32_t)-SPCCL_ERR_UNSUPPORTED)
        return SP_FAIL(SPCCL_ERR_UNSUPPORTED,
                       "cuda_delta_encode: sources[%u]: the frame exceeds 16 GiB: split the array into parts",
                       t->source);
    if (t->old_bytes != 0)
        return SP_FAIL(SPCCL_ERR_DST_SMALL, "cuda_delta_encode: options->old_cap %llu, wanted %llu",
                       (unsigned long long)a->old_cap, (unsigned long long)t->old_bytes);
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

// Copying from and to host memory waits for what the stream has, however long that takes. So this waits first.
static spccl_status encode(const sp_gpu_delta_encode_args *a, bool in_dst, void *stream)
{
    sp_delta_space m = {};
    spccl_status waited;
    SP_TRY(a->wait(a->device, stream)); // before there is memory to free, which waits too
    spccl_status st = space_init(&m, a, in_dst);
    if (st == SPCCL_OK) {
        fill_tables(&m, a);
        st = launch_all(&m, stream);
        waited = a->wait(a->device, stream); // after a failed launch too: kernels before it use the memory
        if (waited == SPCCL_ERR_TIMEOUT)
            m.allocated = NULL; // they may still use it, and freeing it would wait for them
        if (st == SPCCL_OK)
            st = waited;
        if (st == SPCCL_OK)
            st = sp_cuda_read(m.host, m.device, m.results_bytes);
        if (st == SPCCL_OK)
            st = read_results(&m, a);
    }
    space_fini(&m);
    return st;
}

extern "C" spccl_status sp_delta_encode_cuda(const sp_gpu_delta_encode_args *a, void *stream)
{
    spccl_status st = encode(a, true, stream);
    return st == SPCCL_AGAIN ? encode(a, false, stream) : st;
}
