// encode.cuh - a slice on chip becomes a frame. Three steps, with one exchange between the warps of the
// worker:
//   sp_encode_scan    each warp: which elements are listed, and where they come in its run; its counts to the
//   others (barrier) sp_encode_sum     counts of the whole slice; the caller chooses format and place
//   sp_encode_body    header and sections
// Values are taken from shared memory by index, not from registers: at 99% sparsity only one in a hundred is
// touched.
#ifndef SP_ENCODE_CUH
#define SP_ENCODE_CUH

#include "frame.cuh"

// What the warps of a worker tell each other. Two sets in turn, so that one barrier per slice is enough.
struct sp_encode_shared {
    uint32_t total[2][SP_WORKER_WARPS]; // listed elements; bit 31: has a full 256-block
};
// Scratch of format pici: the rows' bits, and where each column's values start.
template <class G> struct sp_pici_scratch {
    uint64_t rows[G::TILES * 64];
    uint16_t starts[G::TILES * 64]; // a slice has at most 16384 elements
};

template <class G> struct sp_scan {
    uint64_t mask;     // bit i: element i of this lane's ROWS * K is listed
    uint32_t before;   // listed elements of the run before this lane's
    uint32_t in_block; // lane b < G::BLOCKS: listed elements of the run's block b
    uint32_t warp_nnz; // of the run
};

// Inclusive sum over the lanes.
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

// run: this warp's elements; base_run, with BASE: the same of the base. Loaded by the warp: __syncwarp
// before.
template <class G, bool BASE>
__device__ __forceinline__ sp_scan<G> sp_encode_scan(const sp_worker &w, const typename G::U *run,
                                                     const typename G::U *base_run)
{
    constexpr uint32_t BLOCK_LANES = SP_TILE_ELEMS / G::LANE_ELEMS;
    sp_scan<G> s;
    uint32_t count, upto, block, last, first = w.lane * G::ROWS;
    s.mask = 0;
#pragma unroll
    for (uint32_t r = 0; r < G::ROWS; r++) {
        uint32_t at = sp_unit_at(first) ^ r; // = sp_unit_at(w.lane * G::ROWS + r)
        uint4 v = ((const uint4 *)run)[at];
        if (BASE) {
            uint4 b = ((const uint4 *)base_run)[at];
            v = make_uint4(v.x ^ b.x, v.y ^ b.y, v.z ^ b.z, v.w ^ b.w);
        }
        if (G::LANE_ELEMS > 32)
            s.mask |= (uint64_t)sp_unit_mask<G::E>(v) << (r * G::K);
        else
            s.mask = (uint32_t)s.mask | sp_unit_mask<G::E>(v) << (r * G::K);
    }
    count = G::LANE_ELEMS > 32 ? __popcll(s.mask) : __popc((uint32_t)s.mask);
    upto = sp_warp_sum(count, w.lane);
    s.before = upto - count;
    s.warp_nnz = __shfl_sync(~0u, upto, 31);
    block = min(w.lane, G::BLOCKS - 1);
    last = __shfl_sync(~0u, upto, block * BLOCK_LANES + BLOCK_LANES - 1);
    count = __shfl_sync(~0u, s.before, block * BLOCK_LANES);
    s.in_block = last - count;
    return s;
}

// Tell the others; a barrier of the worker must follow before sp_encode_sum.
template <class G>
__device__ __forceinline__ void sp_encode_tell(const sp_worker &w, const sp_scan<G> &s,
                                               sp_encode_shared *shared, uint32_t parity)
{
    bool full = __any_sync(~0u, s.in_block == SP_TILE_ELEMS);
    if (w.lane == 0)
        shared->total[parity][w.warp] = s.warp_nnz | (full ? 1u << 31 : 0u);
}

struct sp_counts {
    uint32_t nnz, before; // of the slice; of the runs before this warp's
    bool full_block;
};

__device__ __forceinline__ sp_counts sp_encode_sum(const sp_worker &w, const sp_encode_shared *shared,
                                                   uint32_t parity)
{
    sp_counts c;
    uint32_t t = w.lane < SP_WORKER_WARPS ? shared->total[parity][w.lane] : 0, n = t & 0x7fffffffu;
    c.nnz = __reduce_add_sync(~0u, n);
    c.before = __reduce_add_sync(~0u, w.lane < w.warp ? n : 0);
    c.full_block = __any_sync(~0u, t >> 31);
    return c;
}

// A lane's elements as bits, in one register where they fit.
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

// Tile and coo: the listed elements in order, each by its own lane.
template <class G>
__device__ __forceinline__ void sp_encode_flat(const sp_worker &w, const typename G::U *run,
                                               const sp_scan<G> &s, uint32_t format, uint32_t n,
                                               uint32_t before, const sp_layout &at, uint8_t *frame)
{
    typedef typename G::U U;
    typedef typename sp_lane_mask<G::LANE_ELEMS>::type MASK;
    uint32_t k = before + s.before, block = w.warp * G::BLOCKS + w.lane, first = w.lane * G::LANE_ELEMS;
    U *value = (U *)(frame + at.values) + k;
    if (format == SPCCL_FORMAT_TILE) {
        uint8_t *place = frame + at.meta + k;
        if (w.lane < G::BLOCKS && block < (n + 255) / 256)
            frame[at.index + block] = (uint8_t)s.in_block;
        for (MASK left = (MASK)s.mask; left != 0; left &= left - 1) {
            uint32_t i = first + sp_lowest(left);
            *value++ = run[sp_elem_at<G>(i)];
            *place++ = (uint8_t)i;
        }
    } else {
        uint32_t *index = (uint32_t *)(frame + at.index) + k;
        for (MASK left = (MASK)s.mask; left != 0; left &= left - 1) {
            uint32_t i = first + sp_lowest(left);
            *value++ = run[sp_elem_at<G>(i)];
            *index++ = w.warp * G::WARP_ELEMS + i;
        }
    }
}

// Pici, whole worker. Bits by column: the rows' bytes, transposed by ballots.
template <class G>
__device__ __forceinline__ void
sp_encode_pici(const sp_worker &w, const typename G::U *run, const sp_scan<G> &s, uint32_t n, uint32_t nnz,
               const sp_layout &at, uint8_t *frame, sp_pici_scratch<G> *scratch)
{
    typedef typename G::U U;
    U *values = (U *)(frame + at.values);
    uint64_t *words = (uint64_t *)(frame + at.meta);
    uint8_t *bytes = (uint8_t *)scratch->rows + w.warp * (G::WARP_ELEMS / 8) + w.lane * (G::LANE_ELEMS / 8);
    uint32_t n_tiles = (n + 4095) / 4096;
    if (G::LANE_ELEMS == 64)
        *(uint64_t *)bytes = s.mask;
    else if (G::LANE_ELEMS == 32)
        *(uint32_t *)bytes = (uint32_t)s.mask;
    else if (G::LANE_ELEMS == 16)
        *(uint16_t *)bytes = (uint16_t)s.mask;
    else
        *bytes = (uint8_t)s.mask;
    sp_bar_sync(w.bar);
    for (uint32_t t = 0; t < n_tiles; t++) {
        const uint8_t *rows = (const uint8_t *)&scratch->rows[t * 64];
        bool upper = t * 4096 + 2048 < G::MAX_ELEMS;
        uint32_t lo = rows[w.lane * 8 + w.warp], hi = upper ? rows[(w.lane + 32) * 8 + w.warp] : 0;
        uint64_t mine = 0;
#pragma unroll
        for (uint32_t c = 0; c < 8; c++) {
            uint64_t word = __ballot_sync(~0u, lo >> c & 1) | (uint64_t)__ballot_sync(~0u, hi >> c & 1) << 32;
            if (w.lane == c)
                mine = word;
        }
        if (w.lane < 8)
            words[t * 64 + w.warp * 8 + w.lane] = mine;
    }
    sp_bar_sync(w.bar);
    if (w.warp < n_tiles) { // starts of the columns of one tile; the tiles before it are counted again
        uint32_t prefix = 0, a, b, sum;
        for (uint32_t t = 0; t < w.warp; t++)
            prefix += __reduce_add_sync(~0u, __popcll(words[t * 64 + w.lane]) +
                                                 __popcll(words[t * 64 + 32 + w.lane]));
        a = __popcll(words[w.warp * 64 + 2 * w.lane]);
        b = __popcll(words[w.warp * 64 + 2 * w.lane + 1]);
        sum = sp_warp_sum(a + b, w.lane);
        scratch->starts[w.warp * 64 + 2 * w.lane] = (uint16_t)(prefix + sum - a - b);
        scratch->starts[w.warp * 64 + 2 * w.lane + 1] = (uint16_t)(prefix + sum - b);
        if (w.lane == 0)
            ((uint32_t *)(frame + at.index))[w.warp] = prefix;
    }
    sp_bar_sync(w.bar);
    for (uint64_t left = s.mask; left != 0; left &= left - 1) {
        uint32_t i = w.lane * G::LANE_ELEMS + __ffsll((long long)left) - 1;
        uint32_t e = w.warp * G::WARP_ELEMS + i, word = e / 4096 * 64 + e % 64, row = e % 4096 / 64;
        uint64_t below = words[word] & (((uint64_t)1 << row) - 1);
        values[scratch->starts[word] + __popcll(below)] = run[sp_elem_at<G>(i)];
    }
    (void)nnz;
}

// Header and sections of a frame of any format but dense with its values, which the caller moves straight
// from the run. frame: shared or global memory, aligned to 16. A barrier must follow before the frame is
// read.
template <class G>
__device__ __forceinline__ void sp_encode_body(const sp_worker &w, const typename G::U *run,
                                               const sp_scan<G> &s, const sp_counts &c, uint32_t format,
                                               uint32_t dtype, bool is_delta, uint32_t n, const sp_layout &at,
                                               uint8_t *frame, sp_pici_scratch<G> *scratch)
{
    if (w.warp == 0 && w.lane < 4)
        ((uint4 *)frame)[w.lane] = sp_header_unit(w.lane, format, dtype, is_delta, n, c.nnz, at);
    if (w.warp < 3)
        sp_padding_write<G::E>(w, frame, format, n, c.nnz, at);
    if (format == SPCCL_FORMAT_TILE || format == SPCCL_FORMAT_COO)
        sp_encode_flat<G>(w, run, s, format, n, c.before, at, frame);
    else if (format == SPCCL_FORMAT_PICI)
        sp_encode_pici<G>(w, run, s, n, c.nnz, at, frame, scratch);
}

#endif
