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
    uint64_t mask;     // bit r * K + c: element c of this lane's unit in row r is listed
    uint64_t places;   // 16 bits per row: listed elements of the run before this lane's unit in row r
    uint32_t in_block; // lane b < G::BLOCKS: listed elements of the run's block b
    uint32_t warp_nnz; // of the run
};

// Inclusive sum over the lanes; two 16-bit numbers in one word.
__device__ __forceinline__ uint32_t sp_warp_sum2(uint32_t v, uint32_t lane)
{
#pragma unroll
    for (uint32_t d = 1; d < 32; d <<= 1) {
        uint32_t o = __shfl_up_sync(~0u, v, d);
        if (lane >= d)
            v += o;
    }
    return v;
}

// run: this warp's elements, loaded by its lanes; base_run: the same of the base, or null.
template <class G>
__device__ __forceinline__ sp_scan<G> sp_encode_scan(const sp_worker &w, const typename G::U *run,
                                                     const typename G::U *base_run)
{
    sp_scan<G> s;
    uint32_t sums[G::ROWS / 2], counts[G::ROWS], before = 0;
    s.mask = 0;
    s.places = 0;
    s.in_block = 0;
#pragma unroll
    for (uint32_t r = 0; r < G::ROWS; r++) {
        uint4 v = ((const uint4 *)run)[r * 32 + w.lane];
        if (base_run != nullptr) {
            uint4 b = ((const uint4 *)base_run)[r * 32 + w.lane];
            v = make_uint4(v.x ^ b.x, v.y ^ b.y, v.z ^ b.z, v.w ^ b.w);
        }
        uint32_t m = sp_unit_mask<G::E>(v);
        s.mask |= (uint64_t)m << (r * G::K);
        counts[r] = __popc(m);
    }
#pragma unroll
    for (uint32_t i = 0; i < G::ROWS / 2; i++)
        sums[i] = sp_warp_sum2(counts[2 * i] | counts[2 * i + 1] << 16, w.lane);
#pragma unroll
    for (uint32_t r = 0; r < G::ROWS; r++) {
        uint32_t in_row = sums[r / 2] >> (r % 2 * 16) & 0xffff;
        uint32_t row = __shfl_sync(~0u, in_row, 31);
        s.places |= (uint64_t)(before + in_row - counts[r]) << (r * 16);
        before += row;
        if constexpr (G::K == 16) { // two blocks in a row
            uint32_t half = __shfl_sync(~0u, in_row, 15);
            if (w.lane == 2 * r)
                s.in_block = half;
            if (w.lane == 2 * r + 1)
                s.in_block = row - half;
        } else { // 8 / K rows in a block
            if (w.lane == r / (8 / G::K))
                s.in_block += row;
        }
    }
    s.warp_nnz = before;
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
    sp_counts c = {0, 0, false};
#pragma unroll
    for (uint32_t i = 0; i < SP_WORKER_WARPS; i++) {
        uint32_t t = shared->total[parity][i];
        if (i == w.warp)
            c.before = c.nnz;
        c.nnz += t & 0x7fffffffu;
        c.full_block |= t >> 31 != 0;
    }
    return c;
}

// Tile and coo: the listed elements in order, each by its own lane.
template <class G>
__device__ __forceinline__ void sp_encode_flat(const sp_worker &w, const typename G::U *run,
                                               const sp_scan<G> &s, uint32_t format, uint32_t n,
                                               uint32_t before, const sp_layout &at, uint8_t *frame)
{
    typedef typename G::U U;
    U *values = (U *)(frame + at.values);
    uint64_t left = s.mask, places = s.places;
    if (format == SPCCL_FORMAT_TILE && w.lane < G::BLOCKS && w.warp * G::BLOCKS + w.lane < (n + 255) / 256)
        frame[at.index + w.warp * G::BLOCKS + w.lane] = (uint8_t)s.in_block;
    while (left != 0) {
        uint32_t bit = __ffsll((long long)left) - 1, r = bit / G::K;
        uint32_t i = (r * 32 + w.lane) * G::K + bit % G::K;
        uint32_t k = before + (uint32_t)(places >> (r * 16) & 0xffff);
        left &= left - 1;
        places += (uint64_t)1 << (r * 16);
        values[k] = run[i];
        if (format == SPCCL_FORMAT_TILE)
            frame[at.meta + k] = (uint8_t)i;
        else
            ((uint32_t *)(frame + at.index))[k] = w.warp * G::WARP_ELEMS + i;
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
    uint8_t *bytes = (uint8_t *)scratch->rows + w.warp * (G::WARP_ELEMS / 8);
    uint32_t n_tiles = (n + 4095) / 4096;
#pragma unroll
    for (uint32_t r = 0; r < G::ROWS; r++) {
        uint32_t m = (uint32_t)(s.mask >> (r * G::K)) & ((1u << G::K) - 1), unit = r * 32 + w.lane;
        if (G::K == 16)
            ((uint16_t *)bytes)[unit] = (uint16_t)m;
        if (G::K <= 2)
            m |= __shfl_down_sync(~0u, m, 2) << 4, m |= __shfl_down_sync(~0u, m, 1) << 2;
        if (G::K == 4)
            m |= __shfl_down_sync(~0u, m, 1) << 4;
        if (G::K <= 8 && w.lane % (8 / min(G::K, 8u)) == 0)
            bytes[unit * G::K / 8] = (uint8_t)m;
    }
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
        sum = sp_warp_sum2(a + b, w.lane);
        scratch->starts[w.warp * 64 + 2 * w.lane] = (uint16_t)(prefix + sum - a - b);
        scratch->starts[w.warp * 64 + 2 * w.lane + 1] = (uint16_t)(prefix + sum - b);
        if (w.lane == 0)
            ((uint32_t *)(frame + at.index))[w.warp] = prefix;
    }
    sp_bar_sync(w.bar);
    for (uint64_t left = s.mask; left != 0; left &= left - 1) {
        uint32_t bit = __ffsll((long long)left) - 1, i = (bit / G::K * 32 + w.lane) * G::K + bit % G::K;
        uint32_t e = w.warp * G::WARP_ELEMS + i, word = e / 4096 * 64 + e % 64, row = e % 4096 / 64;
        uint64_t below = words[word] & (((uint64_t)1 << row) - 1);
        values[scratch->starts[word] + __popcll(below)] = run[i];
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
    if (w.tid < 4)
        ((uint4 *)frame)[w.tid] = sp_header_unit(w.tid, format, dtype, is_delta, n, c.nnz, at);
    sp_padding_write<G::E>(w, frame, format, n, c.nnz, at);
    if (format == SPCCL_FORMAT_TILE || format == SPCCL_FORMAT_COO)
        sp_encode_flat<G>(w, run, s, format, n, c.before, at, frame);
    else if (format == SPCCL_FORMAT_PICI)
        sp_encode_pici<G>(w, run, s, n, c.nnz, at, frame, scratch);
}

#endif
