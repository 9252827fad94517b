// slice.cuh - a slice on chip: which thread of a worker holds which elements, loading and storing.
//
// A worker is 256 threads, 8 warps. A slice is cut into units of 16 bytes. Each warp has one run of them, and
// in it each lane ROWS neighbours, so that elements come in the order of the lanes. Whole 256-blocks of
// format tile and whole rows of a pici tile fall to one warp: warps encode and decode their own run without
// meeting the others, but for one exchange of counts. In shared memory the units of a run are permuted
// (sp_unit_at), so that the lanes meet no bank conflict whether each reads its own units or all read
// neighbours.
#ifndef SP_SLICE_CUH
#define SP_SLICE_CUH

#include "../core/format.h"
#include "../core/inbox.h"
#include "elem.cuh"
#include "ptx.cuh"

#define SP_WORKER_WARPS (SP_GPU_WORKER_THREADS / 32)

// This thread's place in its worker.
struct sp_worker {
    uint32_t tid, lane, warp; // 0..255, 0..31, 0..7
    uint32_t bar;             // its named barrier
};

__device__ __forceinline__ sp_worker sp_worker_here()
{
    uint32_t tid = threadIdx.x % SP_GPU_WORKER_THREADS;
    return {tid, tid % 32, tid / 32, 1 + threadIdx.x / SP_GPU_WORKER_THREADS};
}

// Shape of a slice of elements of type U. ROWS: 4 for 16 KiB; 2 where an accumulator twice as wide must fit
// as well.
template <class UINT, int N_ROWS> struct sp_geometry {
    typedef UINT U;
    static constexpr uint32_t E = sizeof(UINT);
    static constexpr uint32_t K = 16 / E; // elements per unit
    static constexpr uint32_t ROWS = N_ROWS;
    static constexpr uint32_t LANE_ELEMS = ROWS * K;
    static constexpr uint32_t WARP_ELEMS = 32 * LANE_ELEMS;
    static constexpr uint32_t WARP_BYTES = 512 * ROWS;
    static constexpr uint32_t MAX_ELEMS = SP_WORKER_WARPS * WARP_ELEMS;
    static constexpr uint32_t BLOCKS = WARP_ELEMS / SP_TILE_ELEMS; // tile blocks per warp
    static constexpr uint32_t TILES = (MAX_ELEMS + 4095) / 4096;   // pici tiles per slice
    static constexpr uint32_t TILE_ROWS = WARP_ELEMS / 64;         // rows of a pici tile per warp
    static constexpr uint32_t TILE_WARPS = 4096 / WARP_ELEMS;      // warps per pici tile
    static_assert(ROWS == 2 || ROWS == 4, "rows");
    static_assert(WARP_ELEMS % SP_TILE_ELEMS == 0 && 4096 % WARP_ELEMS == 0,
                  "blocks and tiles must not straddle warps");
};

// Where unit u of a run lies in shared memory: the lowest two bits turned by the bits from 8 units on.
__device__ __forceinline__ uint32_t sp_unit_at(uint32_t u)
{
    return u ^ (u >> 3 & 3);
}
// Where element i of a run lies.
template <class G> __device__ __forceinline__ uint32_t sp_elem_at(uint32_t i)
{
    return sp_unit_at(i / G::K) * G::K + i % G::K;
}

// Elements of this warp's run that exist, given n in the slice.
template <class G> __device__ __forceinline__ uint32_t sp_warp_elems(const sp_worker &w, uint32_t n)
{
    uint32_t first = w.warp * G::WARP_ELEMS;
    return n <= first ? 0 : min(n - first, G::WARP_ELEMS);
}

// Start to load this warp's run of src [n] into run [WARP_ELEMS] in shared memory, with zeros behind the last
// element. One group of asynchronous copies; before use: sp_copy_wait, __syncwarp.
template <class G>
__device__ __forceinline__ void sp_slice_load(const sp_worker &w, typename G::U *run, const void *src,
                                              uint32_t n)
{
    typedef typename G::U U;
    const U *from = (const U *)src + w.warp * G::WARP_ELEMS;
    uint32_t left = sp_warp_elems<G>(w, n);
    if (((uintptr_t)src & 15) == 0 && left == G::WARP_ELEMS) {
        // A row of 32 units is permuted like any other: whole addresses, and rows as offsets.
        const uint4 *unit = (const uint4 *)from + w.lane;
        uint4 *to = (uint4 *)run + sp_unit_at(w.lane);
#pragma unroll
        for (uint32_t r = 0; r < G::ROWS; r++)
            sp_copy16_async(to + r * 32, unit + r * 32);
    } else {
        for (uint32_t i = w.lane; i < G::WARP_ELEMS; i += 32)
            run[sp_elem_at<G>(i)] = i < left ? from[i] : (U)0;
    }
    sp_copy_commit();
}

// Write this warp's run to dst [n] in global memory. The run has been written by the whole warp: __syncwarp
// before.
template <class G>
__device__ __forceinline__ void sp_slice_store(const sp_worker &w, const typename G::U *run, void *dst,
                                               uint32_t n)
{
    typedef typename G::U U;
    U *to = (U *)dst + w.warp * G::WARP_ELEMS;
    uint32_t left = sp_warp_elems<G>(w, n);
    if (((uintptr_t)dst & 15) == 0 && left == G::WARP_ELEMS) {
        const uint4 *unit = (const uint4 *)run + sp_unit_at(w.lane);
#pragma unroll
        for (uint32_t r = 0; r < G::ROWS; r++)
            sp_store16_stream((uint4 *)to + w.lane + r * 32, unit[r * 32]);
    } else {
        for (uint32_t i = w.lane; i < left; i += 32)
            to[i] = run[sp_elem_at<G>(i)];
    }
}

// This warp's part of dst [n] becomes zero.
template <class G>
__device__ __forceinline__ void sp_slice_store_zero(const sp_worker &w, void *dst, uint32_t n)
{
    typedef typename G::U U;
    U *to = (U *)dst + w.warp * G::WARP_ELEMS;
    uint32_t left = sp_warp_elems<G>(w, n);
    if (((uintptr_t)dst & 15) == 0 && left == G::WARP_ELEMS) {
#pragma unroll
        for (uint32_t r = 0; r < G::ROWS; r++)
            sp_store16_stream((uint4 *)to + w.lane + r * 32, make_uint4(0, 0, 0, 0));
    } else {
        for (uint32_t i = w.lane; i < left; i += 32)
            to[i] = 0;
    }
}

// This warp's UNITS units of 16 bytes in shared memory become zero.
template <uint32_t UNITS> __device__ __forceinline__ void sp_run_zero(const sp_worker &w, void *run)
{
#pragma unroll
    for (uint32_t i = 0; i < UNITS; i += 32)
        ((uint4 *)run)[i + w.lane] = make_uint4(0, 0, 0, 0);
}

// Which of the K elements of a unit have a bit set: bit c for element c.
template <int E> __device__ __forceinline__ uint32_t sp_unit_mask(uint4 v);
template <> __device__ __forceinline__ uint32_t sp_unit_mask<8>(uint4 v)
{
    return ((v.x | v.y) != 0 ? 1u : 0u) | ((v.z | v.w) != 0 ? 2u : 0u);
}
template <> __device__ __forceinline__ uint32_t sp_unit_mask<4>(uint4 v)
{
    return (v.x != 0 ? 1u : 0u) | (v.y != 0 ? 2u : 0u) | (v.z != 0 ? 4u : 0u) | (v.w != 0 ? 8u : 0u);
}
// The top bit of each half (byte) of a word says whether it is not zero: adding 0x7f.. to the lower bits
// carries into it unless they are all zero.
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
