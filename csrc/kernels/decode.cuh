// decode.cuh - a frame becomes elements: each warp finds those of its own run, whatever the format, and hands
// them to `put(i, value)`, i counted from the start of the run; at most once per i. Checks what
// docs/FORMAT.md section 4 asks of the index sections on the way; whatever a frame says, nothing outside of
// it is read and put is called with i < the run's elements only.
#ifndef SP_DECODE_CUH
#define SP_DECODE_CUH

#include "encode.cuh"

// Rules 20 to 22. Lane b of the warps of tile blocks; places rise inside a block.
template <class G, class PUT>
__device__ __forceinline__ bool sp_decode_tile(const sp_worker &w, const sp_view &v, PUT put)
{
    typedef typename G::U U;
    const uint8_t *counts = v.p + v.at.index, *places = v.p + v.at.meta;
    const U *values = (const U *)(v.p + v.at.values);
    constexpr uint32_t ALL = G::MAX_ELEMS / SP_TILE_ELEMS, EACH = (ALL + 31) / 32; // blocks; per lane
    uint32_t n_blocks = (v.n + 255) / 256, first = w.warp * G::BLOCKS, have = sp_warp_elems<G>(w, v.n);
    uint32_t before = 0, all = 0, sum = 0, mine[G::BLOCKS], seen[EACH];
    bool ok = true;
#pragma unroll
    for (uint32_t i = 0; i < EACH; i++) {
        uint32_t b = i * 32 + w.lane;
        seen[i] = b < n_blocks ? counts[b] : 0;
        all += seen[i];
        before += b < first ? seen[i] : 0;
    }
    before = __reduce_add_sync(~0u, before);
    all = __reduce_add_sync(~0u, all);
    if (all != v.nnz) // then no place among the values can be trusted
        return false;
#pragma unroll
    for (uint32_t b = 0; b < G::BLOCKS; b++) {
        mine[b] = sum; // start of block b among the run's
        sum += __shfl_sync(~0u, EACH > 1 && first >= 32 ? seen[EACH - 1] : seen[0], (first + b) % 32);
    }
    for (uint32_t k = w.lane; k < sum; k += 32) {
        uint32_t block = 0, i;
#pragma unroll
        for (uint32_t b = 1; b < G::BLOCKS; b++)
            block += k >= mine[b] ? 1 : 0;
        i = block * 256 + places[before + k];
        bool starts = false;
#pragma unroll
        for (uint32_t b = 0; b < G::BLOCKS; b++)
            starts |= k == mine[b];
        ok &= starts || places[before + k] > places[before + k - 1];
        if (i < have)
            put(i, values[before + k]);
        ok &= i < have;
    }
    return ok;
}

// Rules 23 to 25. A lane takes two columns, and of these the rows of the warp.
template <class G, class PUT>
__device__ __forceinline__ bool sp_decode_pici(const sp_worker &w, const sp_view &v, PUT put)
{
    typedef typename G::U U;
    const uint32_t *prefixes = (const uint32_t *)(v.p + v.at.index);
    const ulonglong2 *pairs = (const ulonglong2 *)(v.p + v.at.meta);
    const U *values = (const U *)(v.p + v.at.values);
    uint32_t n_tiles = (v.n + 4095) / 4096, tile = w.warp * G::WARP_ELEMS / 4096, sum = 0, start = 0;
    uint32_t row0 = w.warp * G::WARP_ELEMS % 4096 / 64, col = 2 * w.lane;
    uint64_t a = 0, b = 0;
    bool ok = true;
    for (uint32_t t = 0; t < n_tiles; t++) {
        ulonglong2 x = pairs[t * 32 + w.lane];
        uint32_t have = min(v.n - t * 4096, 4096u); // elements of the tile that exist
        uint32_t rows_a = have > col ? (have - col + 63) / 64 : 0,
                 rows_b = have > col + 1 ? (have - col + 62) / 64 : 0;
        uint32_t count = __popcll(x.x) + __popcll(x.y);
        ok &= rows_a >= 64 || x.x >> rows_a == 0;
        ok &= rows_b >= 64 || x.y >> rows_b == 0;
        ok &= prefixes[t] == sum;
        if (t == tile) {
            a = x.x;
            b = x.y;
            start = sum + sp_warp_sum(count, w.lane) - count;
        }
        sum += __reduce_add_sync(~0u, count);
    }
    if (!__all_sync(~0u, ok) || sum != v.nnz)
        return false;
    uint64_t below = ((uint64_t)1 << row0) - 1;
    uint32_t at_a = start + __popcll(a & below), at_b = start + __popcll(a) + __popcll(b & below);
    a >>= row0;
    b >>= row0;
#pragma unroll 4
    for (uint32_t r = 0; r < G::TILE_ROWS; r++) {
        if (a >> r & 1)
            put(r * 64 + col, values[at_a++]);
        if (b >> r & 1)
            put(r * 64 + col + 1, values[at_b++]);
    }
    return true;
}

// Rules 26 and 27. The run's entries are found by bisection, or, if there are few, by looking at all of them;
// each warp checks the order of a share of all entries.
template <class G, class PUT>
__device__ __forceinline__ bool sp_decode_coo(const sp_worker &w, const sp_view &v, PUT put)
{
    typedef typename G::U U;
    const uint32_t *index = (const uint32_t *)(v.p + v.at.index);
    const U *values = (const U *)(v.p + v.at.values);
    uint32_t from = w.warp * G::WARP_ELEMS, have = sp_warp_elems<G>(w, v.n);
    constexpr uint32_t FEW = 256;
    uint32_t wanted = w.lane == 0 ? from : from + G::WARP_ELEMS, lo = 0, hi = v.nnz;
    bool ok = v.nnz == 0 || index[v.nnz - 1] < v.n;
    for (uint32_t k = w.tid; k < v.nnz; k += SP_GPU_WORKER_THREADS)
        ok &= k == 0 || index[k] > index[k - 1];
    if (v.nnz <= FEW) {
        for (uint32_t k = w.lane; k < v.nnz; k += 32) {
            uint32_t i = index[k] - from;
            if (i < have && (k == 0 || index[k] > index[k - 1]))
                put(i, values[k]);
        }
        return ok;
    }
    while (lo < hi) { // first entry that is not below `wanted`
        uint32_t mid = (lo + hi) / 2;
        if (index[mid] < wanted)
            lo = mid + 1;
        else
            hi = mid;
    }
    __syncwarp();
    hi = __shfl_sync(~0u, lo, 1);
    lo = __shfl_sync(~0u, lo, 0);
    for (uint32_t k = lo + w.lane; k < hi; k += 32) {
        uint32_t i = index[k] - from;
        if (i < have && (k == 0 || index[k] > index[k - 1]))
            put(i, values[k]);
    }
    return ok;
}

// Elements of a dense frame that are not all zero bits.
template <class G, class PUT>
__device__ __forceinline__ void sp_decode_dense(const sp_worker &w, const sp_view &v, PUT put)
{
    typedef typename G::U U;
    const U *values = (const U *)(v.p + v.at.values) + w.warp * G::WARP_ELEMS;
    uint32_t have = sp_warp_elems<G>(w, v.n);
    for (uint32_t i = w.lane; i < have; i += 32) {
        U x = values[i];
        if (x != 0)
            put(i, x);
    }
}

// All formats. False: a rule is broken (for this thread; the worker's threads must agree by a barrier).
template <class G, class PUT>
__device__ __forceinline__ bool sp_decode(const sp_worker &w, const sp_view &v, PUT put)
{
    if (v.format == SPCCL_FORMAT_TILE)
        return sp_decode_tile<G>(w, v, put);
    if (v.format == SPCCL_FORMAT_PICI)
        return sp_decode_pici<G>(w, v, put);
    if (v.format == SPCCL_FORMAT_COO)
        return sp_decode_coo<G>(w, v, put);
    if (v.format == SPCCL_FORMAT_DENSE)
        sp_decode_dense<G>(w, v, put);
    return true;
}

#endif
