// frame.cuh - frames on the GPU: layout, choice of the format, header. The counterpart of
// core/format/format.c (docs/FORMAT.md). Sizes have 32 bits here, because a slice has at most 16 KiB.
#ifndef SP_FRAME_CUH
#define SP_FRAME_CUH

#include "kernels/cuda/slice.cuh"

struct sp_layout {
    uint32_t index, meta, values, bytes; // offsets; 0 = no such section
};

__device__ __forceinline__ uint32_t sp_up16(uint32_t v)
{
    return (v + 15u) & ~15u;
}

// Sections of a frame: FORMAT.md 2 and 3. E: bytes of an element.
template <uint32_t E>
__device__ __forceinline__ sp_layout sp_layout_cuda(uint32_t format, uint32_t n, uint32_t nnz)
{
    uint32_t tiles = (n + 4095) / 4096, blocks = (n + 255) / 256, at = SP_FRAME_HEADER_BYTES;
    sp_layout l = {0, 0, 0, SP_FRAME_HEADER_BYTES};
    if (format == SPCCL_FORMAT_EMPTY)
        return l;
    if (format == SPCCL_FORMAT_TILE) {
        l.index = at;
        l.meta = at = sp_up16(at + blocks);
        at = sp_up16(at + nnz);
    } else if (format == SPCCL_FORMAT_PICI) {
        l.index = at;
        l.meta = at = sp_up16(at + tiles * 4);
        at += tiles * 512;
    } else if (format == SPCCL_FORMAT_COO) {
        l.index = at;
        at = sp_up16(at + nnz * 4);
    }
    l.values = at;
    l.bytes = sp_up16(at + (format == SPCCL_FORMAT_DENSE ? n : nnz) * E);
    return l;
}

// The format of the smallest frame. Among equal ones the order is dense, pici, coo, tile. sp_tune_format
// chooses the same for a link of infinite cost.
template <uint32_t E>
__device__ __forceinline__ uint32_t sp_choose_smallest(uint32_t n, uint32_t nnz, bool full_block,
                                                       bool is_delta)
{
    // What follows leaves out the header and, except in dense, the values with their padding: these are
    // equal.
    uint32_t values = sp_up16(nnz * E), tiles = (n + 4095) / 4096;
    uint32_t pici = sp_up16(tiles * 4) + tiles * 512, coo = sp_up16(nnz * 4),
             tile = sp_up16((n + 255) / 256) + sp_up16(nnz);
    uint32_t best = SPCCL_FORMAT_PICI, bytes = pici;
    if (nnz == 0)
        return SPCCL_FORMAT_EMPTY;
    if (!is_delta && sp_up16(n * E) <= pici + values) {
        best = SPCCL_FORMAT_DENSE;
        bytes = sp_up16(n * E) - values; // nnz <= n
    }
    if (coo < bytes) {
        best = SPCCL_FORMAT_COO;
        bytes = coo;
    }
    return !full_block && tile < bytes ? (uint32_t)SPCCL_FORMAT_TILE : best;
}

// Can a slice of n > 0 elements take this format? As sp_codec_allows.
__device__ __forceinline__ bool sp_allows(uint32_t format, uint32_t nnz, bool full_block, bool is_delta)
{
    return format == SPCCL_FORMAT_EMPTY   ? nnz == 0
           : format == SPCCL_FORMAT_TILE  ? !full_block
           : format == SPCCL_FORMAT_DENSE ? !is_delta
                                          : true;
}

// Unit i, 0 to 3, of the header. tag: sp_frame_tag; outside of fused collectives simply the dtype.
__device__ __forceinline__ uint4 sp_header_unit(uint32_t i, uint32_t format, uint32_t tag, bool is_delta,
                                                uint32_t n, uint32_t nnz, const sp_layout &l)
{
    if (i == 0)
        return make_uint4(SP_FRAME_MAGIC,
                          SP_FRAME_VERSION | format << 8 | sp_tag_dtype(tag) << 16 |
                              (is_delta ? SP_FRAME_FLAG_DELTA << 24 : 0u),
                          n, 0);
    if (i == 1)
        return make_uint4(format == SPCCL_FORMAT_DENSE ? n : nnz, 0, l.bytes, 0);
    if (i == 2)
        return make_uint4(l.index, 0, l.meta, 0);
    return make_uint4(l.values, 0, sp_tag_max_ctas(tag), 0);
}

// Formats that list elements one by one, each with its value. In a fused collective such a frame is put
// together in shared memory, sent, and copied into shared memory before it is decoded.
__device__ __forceinline__ bool sp_is_listed(uint32_t format)
{
    return format == SPCCL_FORMAT_TILE || format == SPCCL_FORMAT_COO;
}

// A frame whose header has been checked.
struct __align__(16) sp_view
{
    sp_layout at;
    uint32_t format, n, nnz, is_delta;
    const uint8_t *p; // header, index and meta: global or shared memory, aligned to 16
    // Listed frames of a fused collective: p, known to be shared memory; else undefined.
    const uint8_t *smem;
    const uint8_t *values; // global or shared memory, aligned to 16
};

// What was wrong with a frame: the number of the rule in FORMAT.md section 4, what was seen and what was
// wanted.
struct sp_wrong {
    uint32_t rule, seen, wanted;
};

// Check the header [4] of a frame of at most `bytes` bytes that must have wanted_n elements: rules 1 to 18,
// 29 and 30. One lane. Sets *v, but for p and values, or *wrong.
template <uint32_t E>
__device__ __forceinline__ bool sp_open(const uint4 *header, uint32_t bytes, uint32_t tag, uint32_t wanted_n,
                                        sp_view *v, sp_wrong *wrong)
{
    uint4 a = header[0], b = header[1], c = header[2], d = header[3];
    *wrong = {1, bytes, SP_FRAME_HEADER_BYTES};
    if (bytes < SP_FRAME_HEADER_BYTES)
        return false;
    v->format = a.y >> 8 & 0xff;
    v->is_delta = a.y >> 24 & SP_FRAME_FLAG_DELTA;
    v->n = a.z;
    v->nnz = b.x;
    *wrong = {2, a.x, SP_FRAME_MAGIC};
    if (a.x != SP_FRAME_MAGIC)
        return false;
    *wrong = {3, a.y & 0xff, SP_FRAME_VERSION};
    if ((a.y & 0xff) != SP_FRAME_VERSION)
        return false;
    *wrong = {4, v->format, SPCCL_N_FORMATS - 1};
    if (v->format >= SPCCL_N_FORMATS)
        return false;
    *wrong = {7, d.z, sp_tag_max_ctas(tag)};
    if (d.z != sp_tag_max_ctas(tag))
        return false;
    *wrong = {29, a.y >> 16 & 0xff, sp_tag_dtype(tag)};
    if ((a.y >> 16 & 0xff) != sp_tag_dtype(tag))
        return false;
    *wrong = {6, a.y >> 24, 1};
    if ((a.y >> 24 & ~SP_FRAME_FLAG_DELTA) != 0)
        return false;
    *wrong = {7, d.w, 0};
    if (d.w != 0)
        return false;
    *wrong = {30, v->n, wanted_n};
    if (v->n != wanted_n || a.w != 0)
        return false;
    *wrong = {9, v->nnz, v->n};
    if (v->nnz > v->n || b.y != 0 || (v->n == 0 && v->format != SPCCL_FORMAT_EMPTY))
        return false;
    if ((v->format == SPCCL_FORMAT_EMPTY && v->nnz != 0) ||
        (v->format == SPCCL_FORMAT_DENSE && v->nnz != v->n) ||
        (v->format == SPCCL_FORMAT_DENSE && v->is_delta != 0))
        return false;
    v->at = sp_layout_cuda<E>(v->format, v->n, v->nnz);
    *wrong = {14, c.x, v->at.index};
    if (c.x != v->at.index || c.y != 0)
        return false;
    *wrong = {15, c.z, v->at.meta};
    if (c.z != v->at.meta || c.w != 0)
        return false;
    *wrong = {16, d.x, v->at.values};
    if (d.x != v->at.values || d.y != 0)
        return false;
    *wrong = {17, b.z, v->at.bytes};
    if (b.z != v->at.bytes || b.w != 0)
        return false;
    *wrong = {18, bytes, v->at.bytes};
    return bytes >= v->at.bytes;
}

// Does a header [4] equal, bit for bit, the one that belongs to these values?
__device__ __forceinline__ bool sp_header_is(const uint4 *header, uint32_t format, uint32_t tag,
                                             bool is_delta, uint32_t n, uint32_t nnz, const sp_layout &at)
{
    uint32_t wrong = 0;
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) {
        uint4 is = header[i], must = sp_header_unit(i, format, tag, is_delta, n, nnz, at);
        wrong |= (is.x ^ must.x) | (is.y ^ must.y) | (is.z ^ must.z) | (is.w ^ must.w);
    }
    return wrong == 0;
}
// Can a frame of n > 0 elements have this format and nnz?
__device__ __forceinline__ bool sp_header_fits(uint32_t format, uint32_t n, uint32_t nnz)
{
    return format == SPCCL_FORMAT_EMPTY ? nnz == 0 : format < SPCCL_N_FORMATS && nnz <= n;
}

// Check the header [4] of a frame of n > 0 elements, as a fused collective sends it: without delta. Bytes of
// the frame; 0 if the header is not exactly the one expected or the frame exceeds `bytes`. (sp_report_header
// then finds the reason.) One lane.
template <uint32_t E>
__device__ __forceinline__ uint32_t sp_open_plain(const uint4 *header, uint32_t bytes, uint32_t tag,
                                                  uint32_t n)
{
    uint32_t format = header[0].y >> 8 & 0xff, nnz = header[1].x;
    sp_layout at = sp_layout_cuda<E>(format, n, nnz);
    bool fits = sp_header_fits(format, n, nnz) && sp_header_is(header, format, tag, false, n, nnz, at);
    if (sp_is_listed(format)) // such a frame was put together in a staging buffer
        bytes = min(bytes, SP_GPU_STAGE_BYTES);
    return fits && at.bytes <= bytes ? at.bytes : 0;
}

// Where padding starts, of at most 15 bytes: gap 0 after the index, 1 after meta, 2 after the values.
template <uint32_t E>
__device__ __forceinline__ uint32_t sp_padding_from(uint32_t gap, uint32_t format, uint32_t n, uint32_t nnz,
                                                    const sp_layout &at)
{
    if (gap == 0)
        return format == SPCCL_FORMAT_TILE   ? at.index + (n + 255) / 256
               : format == SPCCL_FORMAT_PICI ? at.index + (n + 4095) / 4096 * 4
               : format == SPCCL_FORMAT_COO  ? at.index + nnz * 4
                                             : at.values;
    if (gap == 1)
        return format == SPCCL_FORMAT_TILE ? at.meta + nnz : at.values;
    return at.values + (format == SPCCL_FORMAT_DENSE ? n : nnz) * E;
}

// Check rule 19: padding is zero. One warp; each lane returns what it has seen.
template <uint32_t E> __device__ __forceinline__ bool sp_padding_is_zero(uint32_t lane, const sp_view &v)
{
    bool ok = true;
    if (v.format == SPCCL_FORMAT_EMPTY)
        return true;
#pragma unroll
    for (uint32_t gap = 0; gap < 3; gap++) {
        uint32_t from = sp_padding_from<E>(gap, v.format, v.n, v.nnz, v.at);
        ok &= from + lane >= sp_up16(from) || v.p[from + lane] == 0;
    }
    return ok;
}

// Set the last unit of each section to zero, as it may end in padding. Comes before the sections are written.
// One warp; ends with __syncwarp.
__device__ __forceinline__ void sp_padding_write(uint32_t lane, uint8_t *p, const sp_layout &at)
{
    uint32_t end = lane == 0 && at.meta != 0 ? at.meta : lane < 2 ? at.values : at.bytes;
    if (lane < 3 && end > SP_FRAME_HEADER_BYTES) // else the section does not exist
        *(uint4 *)(p + end - 16) = make_uint4(0, 0, 0, 0);
    __syncwarp();
}

// Set exactly the bytes of padding to zero, as other warps write the sections at the same time.
template <uint32_t E>
__device__ __forceinline__ void sp_padding_write_bytes(uint32_t lane, uint8_t *p, uint32_t format, uint32_t n,
                                                       uint32_t nnz, const sp_layout &at)
{
#pragma unroll
    for (uint32_t gap = 0; gap < 3; gap++) {
        uint32_t from = sp_padding_from<E>(gap, format, n, nnz, at);
        if (from + lane < sp_up16(from))
            p[from + lane] = 0;
    }
}

#endif
