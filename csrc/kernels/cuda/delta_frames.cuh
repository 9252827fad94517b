// delta_frames.cuh - the frames that a list of arrays is encoded to: what the kernels share, the sums that say where frames and
// slices lie, and the kernel that moves the slices there. delta_encode_cuda.cu has the order of the kernels.
#ifndef SP_DELTA_FRAMES_CUH
#define SP_DELTA_FRAMES_CUH

#include "core/base/delta_rule.h"
#include "kernels/cuda/elem.cuh"

#define SP_DELTA_FRAMES_THREADS 1024u
#define SP_DELTA_PLACE_THREADS 256u
#define SP_DELTA_NOT_STAGED UINT64_MAX
#define SP_DELTA_NO_TABLES UINT32_MAX // a status: frames reach into the tables behind them

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
    uint64_t before; // changes of the array in earlier slices; where bases advance
    uint64_t staged; // byte of dst; SP_DELTA_NOT_STAGED: it is to be encoded in place
};
struct sp_delta_encode_totals {
    uint64_t staged;    // bytes at the end of dst
    uint64_t bytes;     // of all frames
    uint64_t n_again;   // slices that are to be encoded in place
    uint32_t status;    // 0, or -spccl_status
    uint32_t source;    // of which the frame did not fit
    uint64_t wanted;    // bytes, up to the end of that frame
    uint64_t is_moved;  // 0: frames reach into the staged slices, so all are encoded in place
    uint64_t old_bytes; // of all old values, if they do not fit; else 0
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
    uint64_t room;        // of dst, for frames and staged slices: a multiple of 16
    uint64_t tables_from; // byte of dst at which the tables begin; UINT64_MAX: they are not in dst
    uint8_t *dst;         // aligned to 8 bytes
    uint8_t *old;         // aligned to 8 bytes; nullptr: bases stay
    uint64_t *old_at;     // [n_rows]: byte of `old`
    uint64_t old_cap;
    uint32_t n_rows, raw;
};

__device__ __forceinline__ uint32_t sp_delta_elem_bytes(uint32_t kind) // of kinds[] in delta_encode_cuda.cu
{
    return kind < 4 ? 1u << kind : 2;
}
// Where bases advance, a staged slice has more behind its sections: the old elements, then their places, in order.
struct sp_delta_staged {
    uint32_t old, places, end; // bytes of what is staged

    __device__ __forceinline__ sp_delta_staged(uint32_t section_bytes, uint32_t k, uint32_t elem_bytes)
        : old((section_bytes + 7) / 8 * 8), places(old + (k * elem_bytes + 7) / 8 * 8), end(places + 2 * k)
    {
    }
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
    uint64_t at = SP_DELTA_HEADER_BYTES + n * SP_DELTA_ENTRY_BYTES, total, nnz = 0, sum_change = 0,
             n_before = 0;

    for (uint64_t from = 0; from < n; from += SP_DELTA_FRAMES_THREADS) {
        uint64_t i = from + threadIdx.x, before;
        sp_delta_encode_slice slice = {};
        if (i < n)
            slice = a.slices[begin + i];
        before = scan_block(slice.bytes, warps, &total);
        if (i < n)
            a.slices[begin + i].at = (uint32_t)((at + before) / 4);
        if (a.old != nullptr) {
            uint64_t more, earlier = scan_block(slice.entry & SP_DELTA_COUNT_MASK, warps, &more);
            if (i < n)
                a.slices[begin + i].before = n_before + earlier;
            n_before += more;
        }
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

// Where the old values of arrays lie, and whether they do. One CTA.
static __device__ __forceinline__ void place_old(const sp_delta_encode_job &a, uint64_t *warps)
{
    uint64_t at = 0, total;
    for (uint32_t from = 0; from < a.n_rows; from += SP_DELTA_FRAMES_THREADS) {
        const uint32_t i = from + threadIdx.x;
        uint64_t bytes = i < a.n_rows ? a.frames[i].nnz * sp_delta_elem_bytes(a.rows[i].kind) : 0;
        const uint64_t filled = (bytes + 7) / 8 * 8, begin = at + scan_block(filled, warps, &total);
        if (i < a.n_rows)
            a.old_at[i] = begin;
        at += total;
    }
    if (threadIdx.x == 0 && a.totals->status == 0 && at > a.old_cap) {
        a.totals->status = (uint32_t)-SPCCL_ERR_DST_SMALL;
        a.totals->old_bytes = at; // of all
    }
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
        const uint64_t staged = min(t->staged, a.room / 2);
        t->bytes = at;
        t->is_moved = at + staged <= a.room ? 1 : 0;
        if (t->status == 0 && at > a.tables_from)
            t->status = SP_DELTA_NO_TABLES;
    }
    if (a.old != nullptr) {
        __syncthreads();
        place_old(a, warps);
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
// The k old elements of a staged slice. A warp calls it. is_restored: back to the base; else to `old`.
template <class U>
static __device__ __forceinline__ void put_old(const sp_delta_encode_job &a, uint32_t row, uint64_t number,
                                               const sp_delta_encode_slice &slice, bool is_restored)
{
    const uint32_t k = slice.entry & SP_DELTA_COUNT_MASK;
    const sp_delta_staged more(slice.bytes, k, sizeof(U));
    const U *was = (const U *)(a.dst + slice.staged + more.old);
    const uint16_t *place = (const uint16_t *)(a.dst + slice.staged + more.places);
    U *base = (U *)a.rows[row].base + (number - a.first_slice[row]) * SP_DELTA_SLICE_ELEMS;

    if (is_restored) {
        for (uint32_t i = threadIdx.x % 32; i < k; i += 32)
            base[place[i]] = was[i];
    } else {
        U *old = (U *)(a.old + a.old_at[row]) + slice.before;
        for (uint32_t i = threadIdx.x % 32; i < k; i += 32)
            old[i] = was[i];
    }
}
static __device__ __forceinline__ void put_any_old(const sp_delta_encode_job &a, uint32_t row,
                                                   uint64_t number, const sp_delta_encode_slice &slice,
                                                   bool is_restored)
{
    switch (sp_delta_elem_bytes(a.rows[row].kind)) {
    case 1:
        return put_old<uint8_t>(a, row, number, slice, is_restored);
    case 2:
        return put_old<uint16_t>(a, row, number, slice, is_restored);
    case 4:
        return put_old<uint32_t>(a, row, number, slice, is_restored);
    default:
        return put_old<uint64_t>(a, row, number, slice, is_restored);
    }
}

// The scan advanced the bases of staged slices, but the call fails or encodes them again: bases become what they were.
static __global__ void __launch_bounds__(SP_DELTA_PLACE_THREADS)
    sp_delta_restore_kernel(const __grid_constant__ sp_delta_encode_job a)
{
    const uint64_t n_warps = (uint64_t)gridDim.x * (SP_DELTA_PLACE_THREADS / 32);
    if (a.totals->status == 0 && a.totals->is_moved != 0)
        return;
    for (uint64_t i = blockIdx.x * (SP_DELTA_PLACE_THREADS / 32) + threadIdx.x / 32; i < a.n_slices;
         i += n_warps) {
        const sp_delta_encode_slice slice = a.slices[i];
        if (slice.bytes != 0 && slice.staged != SP_DELTA_NOT_STAGED)
            put_any_old(a, sp_delta_find_row(a.first_slice, a.n_rows, i), i, slice, true);
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
        if (is_moved && slice.bytes != 0 && slice.staged != SP_DELTA_NOT_STAGED) {
            copy_words((uint32_t *)(frame + (uint64_t)slice.at * 4), (const uint32_t *)(a.dst + slice.staged),
                       slice.bytes / 4);
            if (a.old != nullptr)
                put_any_old(a, row, i, slice, false);
        }
    }
}

#endif
