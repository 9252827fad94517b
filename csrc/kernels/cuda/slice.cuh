// slice.cuh - a slice in shared memory: which lane has which elements, loading and storing.
//
// One warp has a slice or, in the codec, a part of one. Nothing here waits for another warp. A slice lies in
// shared memory in the order of the array, in units of 16 bytes. For scanning it is divided into stripes. In a
// stripe each lane has ROWS neighbouring units, so that elements are ordered by lane. Each lane starts with
// another one of its units (sp_row_of), so that all banks are used. A stripe holds whole tile blocks and whole
// pici rows.
#ifndef SP_SLICE_CUH
#define SP_SLICE_CUH

#include "core/contract/inbox.h"
#include "core/format/format.h"
#include "kernels/cuda/elem.cuh"
#include "kernels/cuda/ptx.cuh"

// Shape of a slice of BYTES bytes with elements of type UINT.
template <class UINT, uint32_t BYTES> struct sp_geometry {
    typedef UINT U;
    static constexpr uint32_t E = sizeof(UINT);
    static constexpr uint32_t K = 16 / E;                            // elements per unit
    static constexpr uint32_t ROWS = E > 1 && BYTES >= 8192 ? 8 : 4; // units per lane and stripe
    static constexpr uint32_t UNITS = BYTES / 16;
    static constexpr uint32_t STRIPES = UNITS / (32 * ROWS);
    static constexpr uint32_t LANE_ELEMS = ROWS * K;
    static constexpr uint32_t STRIPE_ELEMS = 32 * LANE_ELEMS;
    static constexpr uint32_t MAX_ELEMS = STRIPES * STRIPE_ELEMS;
    static constexpr uint32_t STRIPE_BLOCKS = STRIPE_ELEMS / SP_TILE_ELEMS;       // tile blocks per stripe
    static constexpr uint32_t N_BLOCKS = MAX_ELEMS / SP_TILE_ELEMS;               // at most 64
    static constexpr uint32_t BLOCK_LANES = SP_TILE_ELEMS / LANE_ELEMS;           // lanes that share a block
    static constexpr uint32_t PICI_TILES = (MAX_ELEMS + 4095) / 4096;             // pici tiles
    static constexpr uint32_t TILE_ROWS = MAX_ELEMS < 4096 ? MAX_ELEMS / 64 : 64; // rows of a pici tile
    static_assert(STRIPES % 2 == 0, "stripes are scanned in pairs");
    static_assert(STRIPE_ELEMS % SP_TILE_ELEMS == 0 && STRIPE_ELEMS % 64 == 0,
                  "blocks and rows must not straddle stripes");
};

// The most tile blocks that a slice has.
#define SP_BLOCKS_MAX (SP_GPU_SLICE_BYTES / SP_TILE_ELEMS)

// Number of elements after filling up a slice of n elements: a multiple of two stripes.
template <class G> __device__ __forceinline__ uint32_t sp_filled(uint32_t n)
{
    return (n + 2 * G::STRIPE_ELEMS - 1) / (2 * G::STRIPE_ELEMS) * (2 * G::STRIPE_ELEMS);
}
// Write zeros after the last element of buf [n] in shared memory, up to sp_filled(n). One warp.
template <class G> __device__ __forceinline__ void sp_fill(uint32_t lane, typename G::U *buf, uint32_t n)
{
    uint32_t whole = (n + G::K - 1) / G::K; // units
    if (n + lane < whole * G::K)
        buf[n + lane] = 0;
#pragma unroll 1
    for (uint32_t u = whole + lane; u < sp_filled<G>(n) / G::K; u += 32)
        ((uint4 *)buf)[u] = make_uint4(0, 0, 0, 0);
}

// Copy the elements of slice src [n] from number `have` on to buf, and fill up with zeros: the elements that
// a copy of whole units left out. One warp. Not inlined, so that this rare code stays out of the common path.
template <class G>
__device__ __noinline__ void sp_slice_load_rest(uint32_t lane, typename G::U *buf, const typename G::U *src,
                                                uint32_t have, uint32_t n)
{
    for (uint32_t k = have + lane; k < n; k += 32)
        buf[k] = src[k];
    sp_fill<G>(lane, buf, n);
}

// The unit of a stripe that a lane reads in turn j: its number among the lane's units. Eight neighbouring lanes
// then read from different banks.
template <class G> __device__ __forceinline__ uint32_t sp_row_of(uint32_t lane, uint32_t j)
{
    return (j + (G::ROWS == 8 ? lane : lane >> 1)) % G::ROWS;
}

// Can a slice of n elements at p be moved by a bulk copy?
template <class G> __device__ __forceinline__ bool sp_is_bulk(const void *p, uint32_t n)
{
    return SP_HAS_BULK && ((uintptr_t)p & 15) == 0 && n % G::K == 0;
}

// Loads slices into buffers in shared memory ahead of their use. Call start for each slice, and finish in the
// same order. Between the start and the finish of a slice come at most PENDING other starts. One warp.
template <class G, uint32_t PENDING> struct sp_loader {
    typedef typename G::U U;
    uint64_t *barriers; // [PENDING + 1] in shared memory
    uint32_t phases;    // bit i: of barrier i

    __device__ __forceinline__ sp_loader(uint32_t lane, uint64_t *shared) : barriers(shared), phases(0)
    {
#if SP_HAS_BULK
        if (lane <= PENDING)
            sp_barrier_init(barriers + lane);
        __syncwarp();
#endif
    }
    // Start to load slice src [n] into buf, the buffer with number i. No lane may still read it. n == 0: no
    // slice.
    __device__ __forceinline__ void start(uint32_t lane, uint32_t i, U *buf, const U *src, uint32_t n) const
    {
#if SP_HAS_BULK
        if (n != 0 && lane == 0 && sp_is_bulk<G>(src, n)) {
            sp_bulk_load(buf, src, n * G::E, barriers + i);
            sp_barrier_arrive(barriers + i);
        }
#else
        if (((uintptr_t)src & 15) == 0)
            for (uint32_t u = lane; u < n / G::K; u += 32)
                sp_copy16_async((uint4 *)buf + u, (const uint4 *)src + u);
        sp_copy_commit();
#endif
    }
    // Wait until that slice is there, and fill up with zeros to sp_filled(n).
    __device__ __forceinline__ void finish(uint32_t lane, uint32_t i, U *buf, const U *src, uint32_t n)
    {
        uint32_t have = 0;
#if SP_HAS_BULK
        if (n != 0 && sp_is_bulk<G>(src, n)) {
            sp_barrier_wait(barriers + i, phases >> i & 1);
            phases ^= 1u << i;
            have = n;
        }
#else
        sp_copy_wait<PENDING>();
        have = ((uintptr_t)src & 15) == 0 ? n / G::K * G::K : 0;
#endif
        if (have != n || n % (2 * G::STRIPE_ELEMS) != 0)
            sp_slice_load_rest<G>(lane, buf, src, have, n);
        __syncwarp();
    }
};

// As sp_slice_store, without bulk copies: for GPUs before sm_90, and for unaligned arrays. Not inlined, so
// that this rare code stays out of the common path.
template <class G>
__device__ __noinline__ void sp_slice_store_units(uint32_t lane, const typename G::U *buf, typename G::U *dst,
                                                  uint32_t n)
{
    uint32_t have = 0;
    if (((uintptr_t)dst & 15) == 0) {
        for (uint32_t u = lane; u < n / G::K; u += 32)
            sp_store16_non_temporal((uint4 *)dst + u, ((const uint4 *)buf)[u]);
        have = n / G::K * G::K;
    }
    for (uint32_t i = have + lane; i < n; i += 32)
        dst[i] = buf[i];
}

// Write buf to dst [n] in global memory. The warp may still read buf. Before it writes to buf again, it must
// call sp_slice_stored; before another warp writes there, a barrier must follow as well.
template <class G>
__device__ __forceinline__ void sp_slice_store(uint32_t lane, const typename G::U *buf, void *dst, uint32_t n)
{
#if SP_HAS_BULK
    sp_fence_bulk();
    __syncwarp();
    if (n != 0 && sp_is_bulk<G>(dst, n)) {
        if (lane == 0)
            sp_bulk_store(dst, buf, n * G::E);
        return;
    }
#else
    __syncwarp();
#endif
    sp_slice_store_units<G>(lane, buf, (typename G::U *)dst, n);
}
// Lets another warp store what this lane has written to a buffer, after the next barrier.
__device__ __forceinline__ void sp_slice_written()
{
#if SP_HAS_BULK
    sp_fence_bulk();
#endif
}
// Wait until this warp's stores have read their buffers.
__device__ __forceinline__ void sp_slice_stored(uint32_t lane)
{
#if SP_HAS_BULK
    sp_fence_bulk(); // this lane's accesses come before a bulk load into the buffer
    if (lane == 0)
        sp_bulk_stores_read();
#endif
    __syncwarp();
}

// Set dst [n] to zero.
template <class G> __device__ __forceinline__ void sp_slice_store_zero(uint32_t lane, void *dst, uint32_t n)
{
    typedef typename G::U U;
    const uint4 zero = make_uint4(0, 0, 0, 0);
    uint32_t have = 0;
    if (((uintptr_t)dst & 15) == 0) {
        for (uint32_t u = lane; u < n / G::K; u += 32)
            sp_store16_non_temporal((uint4 *)dst + u, zero);
        have = n / G::K * G::K;
    }
    for (uint32_t i = have + lane; i < n; i += 32)
        ((U *)dst)[i] = 0;
}

// Set `units` units, a multiple of 32, in shared memory to zero.
__device__ __forceinline__ void sp_zero_units(uint32_t lane, void *shared, uint32_t units)
{
#pragma unroll 8
    for (uint32_t i = 0; i < units; i += 32)
        ((uint4 *)shared)[i + lane] = make_uint4(0, 0, 0, 0);
}

// Which of the K elements of a unit are not zero: bit c for element c.
template <int E> __device__ __forceinline__ uint32_t sp_unit_mask(uint4 v);
template <> __device__ __forceinline__ uint32_t sp_unit_mask<8>(uint4 v)
{
    return sp_any_bit(v.x | v.y) + 2 * sp_any_bit(v.z | v.w);
}
template <> __device__ __forceinline__ uint32_t sp_unit_mask<4>(uint4 v)
{
    return ((sp_any_bit(v.w) * 2 + sp_any_bit(v.z)) * 2 + sp_any_bit(v.y)) * 2 + sp_any_bit(v.x);
}
// The top bit of each half (byte) of the result says whether that half (byte) of w is not zero. Adding 0x7f..
// to its lower bits carries into the top bit unless they are all zero.
__device__ __forceinline__ uint32_t sp_tops16(uint32_t w)
{
    return (((w & 0x7fff7fffu) + 0x7fff7fffu) | w) & 0x80008000u;
}
__device__ __forceinline__ uint32_t sp_tops8(uint32_t w)
{
    return (((w & 0x7f7f7f7fu) + 0x7f7f7f7fu) | w) & 0x80808080u;
}
template <> __device__ __forceinline__ uint32_t sp_unit_mask<2>(uint4 v)
{
    uint32_t z =
        (sp_tops16(v.x) >> 15) | (sp_tops16(v.y) >> 13) | (sp_tops16(v.z) >> 11) | (sp_tops16(v.w) >> 9);
    return (z | (z >> 15)) & 0xffu;
}
__device__ __forceinline__ uint32_t sp_word_mask8(uint32_t w)
{
    return ((sp_tops8(w) >> 7) * 0x10204080u) >> 28;
}
template <> __device__ __forceinline__ uint32_t sp_unit_mask<1>(uint4 v)
{
    return sp_word_mask8(v.x) | (sp_word_mask8(v.y) << 4) | (sp_word_mask8(v.z) << 8) |
           (sp_word_mask8(v.w) << 12);
}

#endif
