// encode.cuh - one warp turns a slice in shared memory into a frame, in two steps:
//   sp_encode_scan   finds which elements are listed, how many, and where each lane's elements come among
//                    them. The caller then chooses the format and where the frame goes.
//   sp_encode_*      writes header and sections. Tile and coo frames are put together in one buffer. Pici and
//                    dense frames leave in units of 16 bytes through `out(offset, unit)`, so that a frame of
//                    any size needs little shared memory.
// Values are read from shared memory by index and not kept in registers: at 99% sparsity only one in a
// hundred is needed. In the codec each warp of a CTA scans its part of a slice as if it were a slice; then
// they write one frame together.
#ifndef SP_ENCODE_CUH
#define SP_ENCODE_CUH

#include "kernels/cuda/frame.cuh"

// Shared memory that sp_encode_pici needs.
#define SP_PICI_STAGE_BYTES 2064u

// The type for one bit per element that a lane has in a stripe.
template <uint32_t N> struct sp_lane_mask {
    typedef uint32_t type;
};
template <> struct sp_lane_mask<64> {
    typedef uint64_t type;
};
__device__ __forceinline__ uint32_t sp_lowest(uint32_t v)
{
    return (uint32_t)__ffs((int)v) - 1;
}
__device__ __forceinline__ uint32_t sp_lowest(uint64_t v)
{
    return (uint32_t)__ffsll((long long)v) - 1;
}
__device__ __forceinline__ uint32_t sp_count(uint32_t v)
{
    return (uint32_t)__popc(v);
}
__device__ __forceinline__ uint32_t sp_count(uint64_t v)
{
    return (uint32_t)__popcll(v);
}

// Rotate the lowest BITS bits of v to the left.
template <uint32_t BITS, class MASK> __device__ __forceinline__ MASK sp_rotate(MASK v, uint32_t by)
{
    if (BITS == 32)
        return (MASK)__funnelshift_l((uint32_t)v, (uint32_t)v, by);
    MASK high = by == 0 ? 0 : v >> (BITS - by);
    v = v << by | high;
    return BITS == sizeof(MASK) * 8 ? v : v & (((MASK)1 << BITS % (sizeof(MASK) * 8)) - 1);
}

// Inclusive prefix sum over the lanes.
__device__ __forceinline__ uint32_t sp_warp_sum(uint32_t v, uint32_t lane)
{
#pragma unroll
    for (uint32_t d = 1; d < 32; d <<= 1) {
        uint32_t o = __shfl_up_sync(~0u, v, d);
        if (lane >= d)
            v += o;
    }
    return v;
}

template <class G> struct sp_scan {
    typedef typename sp_lane_mask<G::LANE_ELEMS>::type mask_type;
    mask_type mask[G::STRIPES]; // bit i: element i of this lane's part of the stripe is listed
    uint32_t
        start[G::STRIPES / 2]; // listed before this lane's part; low half: even stripe, high half: odd stripe
    uint32_t nnz;              // of the slice
    bool full_block;           // some block of format tile has all its elements listed
};

// Scan a slice.
//   buf      the slice [n], filled up with zeros to sp_filled(n)
//   base     with BASE: the base, filled up likewise
//   counts   [SP_BLOCKS_MAX] in shared memory: gets the index section of format tile
//   AT_ONCE  units of a lane and stripe whose code is unrolled. In fused collectives more unrolled code would
//            crowd out the code of the other roles
// __syncwarp must separate writes to the buffers from this call, and this call from reads of counts.
template <class G, bool BASE, uint32_t AT_ONCE = 4>
__device__ __forceinline__ sp_scan<G> sp_encode_scan(uint32_t lane, const typename G::U *buf,
                                                     const typename G::U *base, uint32_t n, uint8_t *counts)
{
    typedef typename sp_scan<G>::mask_type MASK;
    sp_scan<G> s;
    uint32_t sum = 0;
    bool full = false;
#pragma unroll
    for (uint32_t r = 0; r < G::STRIPES; r += 2) {
        MASK m[2] = {0, 0};
        if (r * G::STRIPE_ELEMS < n) {
            uint32_t upto, before, total, in_block;
#pragma unroll 1
            for (uint32_t j0 = 0; j0 < G::ROWS; j0 += AT_ONCE) {
                MASK part[2] = {0, 0};
#pragma unroll
                for (uint32_t j = 0; j < AT_ONCE; j++)
#pragma unroll
                    for (uint32_t i = 0; i < 2; i++) {
                        uint32_t at = ((r + i) * 32 + lane) * G::ROWS + sp_row_of<G>(lane, j0 + j);
                        uint4 v = ((const uint4 *)buf)[at];
                        if (BASE) {
                            uint4 b = ((const uint4 *)base)[at];
                            v = make_uint4(v.x ^ b.x, v.y ^ b.y, v.z ^ b.z, v.w ^ b.w);
                        }
                        part[i] |= (MASK)sp_unit_mask<G::E>(v) << (j * G::K);
                    }
                m[0] |= part[0] << (j0 * G::K);
                m[1] |= part[1] << (j0 * G::K);
            }
#pragma unroll
            for (uint32_t i = 0; i < 2; i++) // lanes start at different units: restore the order
                m[i] = sp_rotate<G::LANE_ELEMS>(m[i], sp_row_of<G>(lane, 0) * G::K);
            // Two stripes share a word, as a stripe has at most 2048 elements.
            before = sp_count(m[0]) | sp_count(m[1]) << 16;
            upto = sp_warp_sum(before, lane);
            before = upto - before;
            total = __shfl_sync(~0u, upto, 31);
            in_block = __shfl_up_sync(~0u, upto, G::BLOCK_LANES);
            in_block = upto - (lane >= G::BLOCK_LANES ? in_block : 0);
            if (lane % G::BLOCK_LANES == G::BLOCK_LANES - 1) {
                counts[r * G::STRIPE_BLOCKS + lane / G::BLOCK_LANES] = (uint8_t)in_block;
                counts[(r + 1) * G::STRIPE_BLOCKS + lane / G::BLOCK_LANES] = (uint8_t)(in_block >> 16);
                full |= (in_block & 0xffff) == SP_TILE_ELEMS || in_block >> 16 == SP_TILE_ELEMS;
            }
            s.start[r / 2] = before + (sum | (sum + (total & 0xffff)) << 16);
            sum += (total & 0xffff) + (total >> 16);
        } else {
            s.start[r / 2] = 0;
        }
        s.mask[r] = m[0];
        s.mask[r + 1] = m[1];
    }
    s.nnz = sum;
    s.full_block = __any_sync(~0u, full);
    return s;
}

// Write what a scan has found as entries of a tile or coo frame: entries from number first_k on, for elements
// from index first_i on. frame, clear: as in sp_encode_listed.
template <class G>
__device__ __forceinline__ void sp_encode_entries(uint32_t lane, const typename G::U *buf,
                                                  const sp_scan<G> &s, uint32_t format, const sp_layout &at,
                                                  uint8_t *frame, uint32_t first_k, uint32_t first_i,
                                                  typename G::U *clear = nullptr)
{
    typedef typename G::U U;
    typedef typename sp_scan<G>::mask_type MASK;
    U *values = (U *)(frame + at.values);
    uint8_t *offsets = frame + at.meta;
    uint32_t *index = (uint32_t *)(frame + at.index);
#pragma unroll
    for (uint32_t r = 0; r < G::STRIPES; r++) {
        uint32_t k = first_k + (s.start[r / 2] >> r % 2 * 16 & 0xffff);
        for (MASK left = s.mask[r]; left != 0; left &= left - 1, k++) {
            uint32_t i = r * G::STRIPE_ELEMS + lane * G::LANE_ELEMS + sp_lowest(left);
            values[k] = buf[i];
            if (clear != nullptr)
                clear[i] = 0;
            if (format == SPCCL_FORMAT_TILE)
                offsets[k] = (uint8_t)i; // first_i is a multiple of SP_TILE_ELEMS
            else
                index[k] = first_i + i;
        }
    }
}

// Write a whole frame of format empty, tile or coo.
//   frame  shared or global memory, aligned to 16
//   clear  nullptr, or a slice [n] in global memory whose listed elements become zero
// __syncwarp must come between writes to counts and this call, and between this call and reads of the frame.
template <class G>
__device__ __forceinline__ void sp_encode_listed(uint32_t lane, const typename G::U *buf, const sp_scan<G> &s,
                                                 uint32_t format, uint32_t tag, uint32_t n,
                                                 const sp_layout &at, uint8_t *frame, const uint8_t *counts,
                                                 typename G::U *clear = nullptr)
{
    if (lane < 4)
        ((uint4 *)frame)[lane] = sp_header_unit(lane, format, tag, false, n, s.nnz, at);
    if (format == SPCCL_FORMAT_EMPTY)
        return;
    sp_padding_write(lane, frame, at);
    if (format == SPCCL_FORMAT_TILE)
#pragma unroll 1
        for (uint32_t b = lane; b < (n + SP_TILE_ELEMS - 1) / SP_TILE_ELEMS; b += 32)
            frame[at.index + b] = counts[b];
    sp_encode_entries<G>(lane, buf, s, format, at, frame, 0, 0, clear);
}

// 16 bytes as elements.
template <class G> union sp_unit {
    uint4 v;
    typename G::U e[G::K];
};

// Collects the values of a pici frame, ordered by column, and lets them out in whole units. Its staging
// buffer has SP_PICI_STAGE_BYTES in shared memory.
template <class G> struct sp_column_stage {
    typedef typename G::U U;
    U *stage;
    uint32_t fill, sent, below; // elements in the buffer; elements let out; mask of lower lanes

    __device__ __forceinline__ explicit sp_column_stage(U *shared)
        : stage(shared), fill(0), sent(0), below(sp_lanes_below())
    {
    }
    // Append the value x of each lane whose bit is set in `bits`, in the order of the lanes.
    __device__ __forceinline__ void add(uint32_t bits, bool mine, U x)
    {
        if (mine)
            stage[fill + __popc(bits & below)] = x;
        fill += __popc(bits);
    }
    // If there are many, let out the whole units. A unit that is not full stays.
    template <class OUT> __device__ __forceinline__ void drain(uint32_t lane, uint32_t values_at, OUT out)
    {
        uint32_t units = fill / G::K;
        uint4 rest;
        if (fill * G::E < 1024)
            return;
        __syncwarp();
        for (uint32_t i = lane; i < units; i += 32)
            out(values_at + sent * G::E + i * 16, ((const uint4 *)stage)[i]);
        rest = ((const uint4 *)stage)[units];
        __syncwarp();
        if (lane == 0)
            ((uint4 *)stage)[0] = rest;
        __syncwarp();
        sent += units * G::K;
        fill -= units * G::K;
    }
    // Let out the rest, with its padding.
    template <class OUT> __device__ __forceinline__ void end(uint32_t lane, uint32_t values_at, OUT out)
    {
        __syncwarp();
        if (lane < (G::K - fill % G::K) % G::K)
            stage[fill + lane] = 0;
        __syncwarp();
        for (uint32_t i = lane; i < (fill + G::K - 1) / G::K; i += 32)
            out(values_at + sent * G::E + i * 16, ((const uint4 *)stage)[i]);
    }
};

// Write a pici frame. A lane has rows `lane` and `lane + 32` of a tile. All lanes look at the same column: a
// ballot gives the column's bits, and its values are appended in order. (The codec has more shared memory per
// slice and needs no ballots: columns.cuh.) stage: [SP_PICI_STAGE_BYTES] in shared memory, aligned to 16.
template <class G, class OUT>
__device__ __forceinline__ void sp_encode_pici(uint32_t lane, const typename G::U *buf, uint32_t tag,
                                               uint32_t n, uint32_t nnz, const sp_layout &at,
                                               typename G::U *stage, OUT out)
{
    constexpr uint32_t ROW_UNITS = 64 / G::K;
    constexpr bool TWO_ROWS = G::TILE_ROWS == 64;
    sp_column_stage<G> values(stage);
    uint32_t n_tiles = (n + 4095) / 4096, filled = sp_filled<G>(n), prefix = 0;
    for (uint32_t t = 0; t < n_tiles; t++) {
        uint64_t word_a = 0, word_b = 0; // columns 2 * lane and 2 * lane + 1
        bool has_lo = t * 4096 + lane * 64 < filled,
             has_hi = TWO_ROWS && t * 4096 + 2048 + lane * 64 < filled;
        if (lane == t)
            prefix = values.sent + values.fill;
        for (uint32_t g = 0; g < ROW_UNITS; g++) {
            uint32_t u = (t * 64 + lane) * ROW_UNITS + g;
            sp_unit<G> lo, hi;
            lo.v = has_lo ? ((const uint4 *)buf)[u] : make_uint4(0, 0, 0, 0);
            hi.v = has_hi ? ((const uint4 *)buf)[u + 32 * ROW_UNITS] : make_uint4(0, 0, 0, 0);
#pragma unroll
            for (uint32_t c = 0; c < G::K; c++) {
                uint32_t bits_lo = __ballot_sync(~0u, lo.e[c] != 0),
                         bits_hi = TWO_ROWS ? __ballot_sync(~0u, hi.e[c] != 0) : 0;
                if (lane == (g * G::K + c) / 2) {
                    uint64_t word = bits_lo | (uint64_t)bits_hi << 32;
                    if (c % 2 == 0)
                        word_a = word;
                    else
                        word_b = word;
                }
                values.add(bits_lo, lo.e[c] != 0, lo.e[c]);
                values.add(bits_hi, hi.e[c] != 0, hi.e[c]);
            }
            values.drain(lane, at.values, out);
        }
        out(at.meta + t * 512 + lane * 16, make_uint4((uint32_t)word_a, (uint32_t)(word_a >> 32),
                                                      (uint32_t)word_b, (uint32_t)(word_b >> 32)));
    }
    values.end(lane, at.values, out);
    // The index section is one unit, as a slice has at most 4 tiles; its padding is zero.
    uint4 index = make_uint4(__shfl_sync(~0u, prefix, 0), __shfl_sync(~0u, prefix, 1),
                             __shfl_sync(~0u, prefix, 2), __shfl_sync(~0u, prefix, 3));
    if (lane < 4)
        out(lane * 16, sp_header_unit(lane, SPCCL_FORMAT_PICI, tag, false, n, nnz, at));
    else if (lane == 4)
        out(at.index, index);
}

// Write part `part` of the elements of a dense frame; part 0 also writes the header.
template <class G, uint32_t PARTS = 1, class OUT>
__device__ __forceinline__ void sp_encode_dense(uint32_t lane, const typename G::U *buf, uint32_t tag,
                                                uint32_t n, const sp_layout &at, OUT out, uint32_t part = 0)
{
    uint32_t end = min((n + G::K - 1) / G::K, (part + 1) * (G::UNITS / PARTS));
    if (part == 0 && lane < 4)
        out(lane * 16, sp_header_unit(lane, SPCCL_FORMAT_DENSE, tag, false, n, n, at));
#pragma unroll 8
    for (uint32_t u = part * (G::UNITS / PARTS) + lane; u < end; u += 32)
        out(SP_FRAME_HEADER_BYTES + u * 16, ((const uint4 *)buf)[u]);
}

#endif
