// decode.cuh - one warp turns a frame into elements. It hands the listed elements to a sink:
// - sink.put(i, value): element i of the slice; at most once per i, unless the frame breaks a rule.
// - sink.unit(u, bits, x), formats pici and dense: unit u, each unit of the slice at most once.
//   x.e[c] is element c of the unit where bit c of bits is set, else 0. In dense frames bit c is set if
//   element c is not zero: ADD and OVERWRITE skip zeros.
// Decoding also checks the index sections (docs/FORMAT.md section 4). Whatever a frame contains, nothing
// outside it is read, and the sink gets elements of the slice only.
//
// In decode_cuda.cu PARTS warps decode a frame together. Warp `part` has its part of the elements of a tile
// or dense frame, and every PARTS-th group of 32 entries of a coo frame. Elsewhere PARTS is 1 and `part` 0.
#ifndef SP_DECODE_CUH
#define SP_DECODE_CUH

#include "kernels/cuda/encode.cuh"

// Entries [from, to) of a tile frame at p; they lie in the blocks from `base` on. block_of(k): the block of
// entry k, counted from `base`. block_of never decreases. So checking that element numbers grow also checks
// the offsets inside each block.
template <class G, class SINK, class BLOCK_OF>
__device__ __forceinline__ bool sp_decode_entries(uint32_t lane, const sp_view &v, const uint8_t *p,
                                                  SINK &sink, uint32_t from, uint32_t to, uint32_t base,
                                                  BLOCK_OF block_of)
{
    typedef typename G::U U;
    const uint8_t *offsets = p + v.at.meta;
    const U *values = (const U *)(p + v.at.values);
    uint32_t least = 0; // the next element must not come before this one
    bool ok = true;
#pragma unroll 1
    for (uint32_t k0 = from; k0 < to; k0 += 32) {
        uint32_t k = k0 + lane, offset = 0, i, before;
        U x = 0;
        if (k < to) {
            offset = offsets[k];
            x = values[k];
        }
        i = (base + block_of(k)) * SP_TILE_ELEMS + offset;
        before = __shfl_up_sync(~0u, i + 1, 1);
        before = lane == 0 ? least : before;
        least = __shfl_sync(~0u, i + 1, 31);
        if (k < to) {
            ok &= i < v.n && i >= before;
            if (i < v.n)
                sink.put(i, x);
        }
    }
    return ok;
}

// *before = entries of a tile frame in blocks before `base`. False: the counts of all blocks do not add up to
// nnz.
template <class G>
__device__ __forceinline__ bool sp_tile_before(uint32_t lane, const uint8_t *counts, uint32_t n_blocks,
                                               uint32_t base, uint32_t nnz, uint32_t *before)
{
    uint32_t sum = 0;
    *before = 0;
#pragma unroll
    for (uint32_t h = 0; h < G::N_BLOCKS; h += 32) {
        uint32_t b = h + lane, count = b < n_blocks ? counts[b] : 0;
        sum += __reduce_add_sync(~0u, count);
        *before += __reduce_add_sync(~0u, b < base ? count : 0);
    }
    return sum == nnz;
}

// Check rules 20 to 22. Each lane looks up the block of its entry. p: the frame.
template <class G, uint32_t PARTS = 1, class SINK>
__device__ __forceinline__ bool sp_decode_tile(uint32_t lane, const sp_view &v, const uint8_t *p, SINK &sink,
                                               uint32_t part = 0)
{
    constexpr uint32_t BLOCKS = G::N_BLOCKS / PARTS, GROUPS = (BLOCKS + 31) / 32; // groups of 32 blocks
    const uint8_t *counts = p + v.at.index;
    uint32_t n_blocks = (v.n + SP_TILE_ELEMS - 1) / SP_TILE_ELEMS, base = part * BLOCKS, before = 0;
    if (PARTS > 1 && !sp_tile_before<G>(lane, counts, n_blocks, base, v.nnz, &before))
        return false;
    static_assert(BLOCKS >= 4, "whole words of counts");
    if constexpr (BLOCKS <= 8) { // each lane holds all counts
        uint2 w =
            BLOCKS == 8 ? *(const uint2 *)(counts + base) : uint2{*(const uint32_t *)(counts + base), 0};
        uint64_t all = w.x | (uint64_t)w.y << 32;
        uint32_t first[8], upto = before, have = n_blocks > base ? n_blocks - base : 0;
        if (have < 8)
            all &= ((uint64_t)1 << 8 * have) - 1;
#pragma unroll
        for (uint32_t j = 0; j < BLOCKS; j++) {
            first[j] = upto;
            upto += (uint32_t)(all >> 8 * j) & 0xff;
        }
        if (PARTS == 1 && upto != v.nnz) // then no entry's index is reliable
            return false;
        return sp_decode_entries<G>(lane, v, p, sink, before, upto, base, [&](uint32_t k) {
            uint32_t b = 0;
#pragma unroll
            for (uint32_t j = 1; j < BLOCKS; j++) // the last block that starts at entry k or before
                b += first[j] <= k ? 1 : 0;
            return b;
        });
    } else {
        uint32_t start[GROUPS], first[GROUPS + 1]; // each lane holds the count of one block per group
        bool ok = true;
        first[0] = before;
#pragma unroll
        for (uint32_t h = 0; h < GROUPS; h++) {
            uint32_t j = h * 32 + lane, count = j < BLOCKS && base + j < n_blocks ? counts[base + j] : 0,
                     upto = sp_warp_sum(count, lane);
            start[h] = first[h] + upto - count;
            first[h + 1] = first[h] + __shfl_sync(~0u, upto, 31);
        }
        if (PARTS == 1 && first[GROUPS] != v.nnz)
            return false;
#pragma unroll
        for (uint32_t h = 0; h < GROUPS; h++)
            ok &= sp_decode_entries<G>(lane, v, p, sink, first[h], first[h + 1], base + h * 32,
                                       [&](uint32_t k) {
                                           uint32_t b = 0;
#pragma unroll
                                           for (uint32_t step = 16; step != 0; step >>= 1)
                                               b += __shfl_sync(~0u, start[h], b + step) <= k ? step : 0;
                                           return b;
                                       });
        return ok;
    }
}

// Load the masks of a pici frame and check them by rules 23 to 25 of docs/FORMAT.md 4. word[t]: columns 2 *
// lane and 2 * lane + 1 of tile t, one bit per row; 0 if the slice has no tile t.
template <class G>
__device__ __forceinline__ bool sp_pici_words(uint32_t lane, const sp_view &v,
                                              uint64_t word[G::PICI_TILES][2])
{
    const uint32_t *prefixes = (const uint32_t *)(v.p + v.at.index);
    const ulonglong2 *pairs = (const ulonglong2 *)(v.p + v.at.meta);
    uint32_t n_tiles = (v.n + 4095) / 4096, sum = 0;
    bool ok = true;
#pragma unroll
    for (uint32_t t = 0; t < G::PICI_TILES; t++) {
        word[t][0] = word[t][1] = 0;
        if (t < n_tiles) {
            ulonglong2 x = pairs[t * 32 + lane];
            uint32_t have = v.n - t * 4096, col = 2 * lane; // have: elements from the start of this tile on
            uint32_t rows_a = have > col ? (have - col + 63) / 64 : 0,
                     rows_b = have > col + 1 ? (have - col + 62) / 64 : 0;
            ok &= rows_a >= 64 || x.x >> rows_a == 0;
            ok &= rows_b >= 64 || x.y >> rows_b == 0;
            ok &= prefixes[t] == sum;
            sum += __reduce_add_sync(~0u, (uint32_t)(__popcll(x.x) + __popcll(x.y)));
            word[t][0] = x.x;
            word[t][1] = x.y;
        }
    }
    return __all_sync(~0u, ok) && sum == v.nnz;
}

// A lane has rows `lane` and `lane + 32` of a tile. Values are ordered by column.
template <class G, class SINK>
__device__ __forceinline__ bool sp_decode_pici(uint32_t lane, const sp_view &v, SINK &sink)
{
    typedef typename G::U U;
    // AHEAD: units of a row that are loaded before the first is used. A long frame is read from L2, which is
    // slow.
    constexpr uint32_t ROW_UNITS = 64 / G::K, AHEAD = G::K <= 4 ? 16 / G::K : G::K == 8 ? 2 : 1;
    constexpr bool TWO_ROWS = G::TILE_ROWS == 64;
    const U *values = (const U *)v.values;
    uint32_t k = 0, below = sp_lanes_below();
    uint64_t word[G::PICI_TILES][2];
    if (!sp_pici_words<G>(lane, v, word))
        return false;
#pragma unroll
    for (uint32_t t = 0; t < G::PICI_TILES; t++) {
        if (t * 4096 >= v.n)
            break;
        for (uint32_t g = 0; g < ROW_UNITS; g += AHEAD) {
            sp_unit<G> lo[AHEAD], hi[AHEAD];
            uint32_t bits_lo[AHEAD], bits_hi[AHEAD];
#pragma unroll
            for (uint32_t i = 0; i < AHEAD; i++) {
                bits_lo[i] = bits_hi[i] = 0;
#pragma unroll
                for (uint32_t c = 0; c < G::K; c++) {
                    uint64_t mine = word[t][c % 2];
                    uint32_t from = ((g + i) * G::K + c) / 2, w_lo = __shfl_sync(~0u, (uint32_t)mine, from),
                             w_hi = TWO_ROWS ? __shfl_sync(~0u, (uint32_t)(mine >> 32), from) : 0;
                    lo[i].e[c] = w_lo >> lane & 1 ? values[k + __popc(w_lo & below)] : (U)0;
                    bits_lo[i] |= (w_lo >> lane & 1) << c;
                    k += __popc(w_lo);
                    hi[i].e[c] = w_hi >> lane & 1 ? values[k + __popc(w_hi & below)] : (U)0;
                    bits_hi[i] |= (w_hi >> lane & 1) << c;
                    k += __popc(w_hi);
                }
            }
#pragma unroll
            for (uint32_t i = 0; i < AHEAD; i++) {
                if (lane < G::TILE_ROWS)
                    sink.unit((t * 64 + lane) * ROW_UNITS + g + i, bits_lo[i], lo[i]);
                if (TWO_ROWS)
                    sink.unit((t * 64 + 32 + lane) * ROW_UNITS + g + i, bits_hi[i], hi[i]);
            }
        }
    }
    return true;
}

// Check rules 26 and 27.
template <class G, uint32_t PARTS = 1, class SINK>
__device__ __forceinline__ bool sp_decode_coo(uint32_t lane, const sp_view &v, const uint8_t *p, SINK &sink,
                                              uint32_t part = 0)
{
    typedef typename G::U U;
    const uint32_t *index = (const uint32_t *)(p + v.at.index);
    const U *values = (const U *)(p + v.at.values);
    bool ok = true;
    for (uint32_t k = part * 32 + lane; k < v.nnz; k += 32 * PARTS) {
        uint32_t i = index[k];
        bool good = i < v.n && (k == 0 || i > index[k - 1]);
        if (good)
            sink.put(i, values[k]);
        ok &= good;
    }
    return ok;
}

// Pass each unit of a dense frame to the sink. In the last, partial unit the missing elements are 0.
template <class G, uint32_t PARTS = 1, class SINK>
__device__ __forceinline__ void sp_decode_dense(uint32_t lane, const sp_view &v, SINK &sink,
                                                uint32_t part = 0)
{
    constexpr uint32_t AHEAD = G::K > 4 ? 4 : 8; // more would spill registers
    constexpr uint32_t PART_UNITS = G::UNITS / PARTS;
    const uint4 *units = (const uint4 *)v.values;
    uint32_t whole = v.n / G::K, end = PARTS == 1 ? whole : min(whole, (part + 1) * PART_UNITS),
             u = part * PART_UNITS + lane;
    for (; u + 32 * (AHEAD - 1) < end; u += 32 * AHEAD) {
        sp_unit<G> x[AHEAD];
#pragma unroll
        for (uint32_t i = 0; i < AHEAD; i++)
            x[i].v = units[u + 32 * i];
#pragma unroll
        for (uint32_t i = 0; i < AHEAD; i++)
            sink.unit(u + 32 * i, sp_unit_mask<G::E>(x[i].v), x[i]);
    }
#pragma unroll 1
    for (; u < end; u += 32) {
        sp_unit<G> x;
        x.v = units[u];
        sink.unit(u, sp_unit_mask<G::E>(x.v), x);
    }
    if (lane == 0 && v.n % G::K != 0 && (PARTS == 1 || part == whole / PART_UNITS)) {
        sp_unit<G> x;
        x.v = units[whole];
#pragma unroll
        for (uint32_t c = 0; c < G::K; c++)
            if (c >= v.n % G::K)
                x.e[c] = 0;
        sink.unit(whole, sp_unit_mask<G::E>(x.v), x);
    }
}

// Decode any format in a fused collective, where v.smem is set. False: this lane found a broken rule; the
// caller must combine the lanes.
template <class G, class SINK>
__device__ __forceinline__ bool sp_decode(uint32_t lane, const sp_view &v, SINK &sink)
{
    if (v.format == SPCCL_FORMAT_TILE)
        return sp_decode_tile<G>(lane, v, v.smem, sink);
    if (v.format == SPCCL_FORMAT_PICI)
        return sp_decode_pici<G>(lane, v, sink);
    if (v.format == SPCCL_FORMAT_COO)
        return sp_decode_coo<G>(lane, v, v.smem, sink);
    if (v.format == SPCCL_FORMAT_DENSE)
        sp_decode_dense<G>(lane, v, sink);
    return true;
}

// ---- a frame as a whole slice ----

// Writes to a slice in shared memory; for tile and coo frames the slice must hold zeros.
template <class G> struct sp_sink_smem {
    typename G::U *buf;
    __device__ __forceinline__ void put(uint32_t i, typename G::U x) const
    {
        buf[i] = x;
    }
    __device__ __forceinline__ void unit(uint32_t u, uint32_t, const sp_unit<G> &x) const
    {
        ((uint4 *)buf)[u] = x.v;
    }
};
// Writes to a slice in global memory that holds zeros.
template <class G> struct sp_sink_zeros {
    typename G::U *dst;
    __device__ __forceinline__ void put(uint32_t i, typename G::U x) const
    {
        dst[i] = x;
    }
};

// Write a frame as slice dst [v.n] in global memory, with zeros where it lists nothing. buf: shared memory
// for a slice; the function first waits until earlier stores from buf have read it. False: as sp_decode; dst
// then has undefined content.
template <class G>
__device__ __forceinline__ bool sp_decode_store(uint32_t lane, const sp_view &v, typename G::U *buf,
                                                typename G::U *dst)
{
    sp_sink_smem<G> sink = {buf};
    bool good;
    if (v.format == SPCCL_FORMAT_EMPTY) {
        sp_slice_store_zero<G>(lane, dst, v.n);
        return true;
    }
    sp_slice_stored(lane);
    if (sp_is_listed(v.format)) {
        sp_zero_units(lane, buf, G::UNITS);
        __syncwarp();
    }
    good = sp_decode<G>(lane, v, sink);
    sp_slice_store<G>(lane, buf, dst, v.n);
    return good;
}

#endif
