// gpusim_ptx.h - the functions of csrc/kernels/cuda/ptx.cuh for GPUs in software. It defines the include
// guard of that file, and so replaces it.
#ifndef SP_PTX_CUH
#define SP_PTX_CUH

#include "core/base/dtype.h"

#ifndef GPUSIM_BULK
#define GPUSIM_BULK 1 // 0: as compiled for GPUs before sm_90
#endif
#define SP_HAS_BULK GPUSIM_BULK

inline uint8_t *sp_block_shared()
{
    return gpusim_shared();
}

// ---- between GPUs, and between GPU and host. A load lets other threads run: else a polling loop never ends
// ----

inline uint64_t sp_load_acquire_sys(const uint64_t *p)
{
    return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}
inline uint64_t sp_load_relaxed_sys(const uint64_t *p)
{
    gpusim_yield();
    return __atomic_load_n(p, __ATOMIC_RELAXED);
}
inline uint32_t sp_load_relaxed_sys(const uint32_t *p)
{
    gpusim_yield();
    return __atomic_load_n(p, __ATOMIC_RELAXED);
}
inline void sp_store_relaxed_sys(uint32_t *p, uint32_t v)
{
    __atomic_store_n(p, v, __ATOMIC_RELAXED);
}
inline void sp_store_relaxed_sys(uint64_t *p, uint64_t v)
{
    __atomic_store_n(p, v, __ATOMIC_RELAXED);
}
inline ulonglong2 sp_load_relaxed2_sys(const void *p)
{
    const uint64_t *words = (const uint64_t *)p;
    ulonglong2 v;
    v.x = sp_load_relaxed_sys(words);
    v.y = sp_load_relaxed_sys(words + 1);
    return v;
}
inline void sp_store_relaxed2_sys(void *p, ulonglong2 v)
{
    uint64_t *words = (uint64_t *)p;
    bool second_first = (uintptr_t)p / 16 % 2 != 0;
    __atomic_store_n(words + second_first, second_first ? v.y : v.x, __ATOMIC_RELAXED);
    gpusim_yield(); // others may see one half
    __atomic_store_n(words + !second_first, second_first ? v.x : v.y, __ATOMIC_RELAXED);
}
inline void sp_fence_sys()
{
    gpusim_fence();
}

// ---- between warps of a CTA ----

inline void sp_store_release_cta(uint32_t *shared, uint32_t v)
{
    gpusim_release();
    *shared = v;
}
inline uint32_t sp_load_acquire_cta(const uint32_t *shared)
{
    return *(const volatile uint32_t *)shared;
}

// ---- inside one GPU ----

inline void sp_store_relaxed_gpu(uint64_t *p, uint64_t v)
{
    *(volatile uint64_t *)p = v;
}
inline uint64_t sp_load_relaxed_gpu(const uint64_t *p)
{
    return *(const volatile uint64_t *)p;
}

// ---- 16 bytes at a time ----

inline void sp_store16_non_temporal(void *p, uint4 v)
{
    *(uint4 *)p = v;
}
inline void sp_store16(void *p, uint4 v)
{
    gpusim_store_late(p, v);
}
inline uint4 sp_load16_once(const void *p)
{
    return *(const uint4 *)p;
}
inline uint4 sp_load16_sys(const void *p)
{
    return *(const uint4 *)p;
}
inline void sp_store8(void *p, uint2 v)
{
    *(uint2 *)p = v;
}
inline void sp_prefetch_l2(const void *)
{
}

// ---- asynchronous copies ----

inline void sp_copy16_async(void *shared, const void *global)
{
    gpusim_copy16(shared, global);
}
inline void sp_copy_commit()
{
    gpusim_copy_commit();
}
template <int N> inline void sp_copy_wait()
{
    gpusim_copy_wait(N);
}
#if SP_HAS_BULK
inline void sp_barrier_init(uint64_t *shared)
{
    gpusim_barrier_init(shared);
}
inline void sp_bulk_load(void *shared, const void *global, uint32_t bytes, uint64_t *barrier)
{
    gpusim_bulk(shared, global, bytes, barrier);
}
inline void sp_barrier_arrive(uint64_t *barrier)
{
    gpusim_barrier_arrive(barrier);
}
inline void sp_barrier_wait(uint64_t *barrier, uint32_t parity)
{
    while (!gpusim_barrier_passed(barrier, parity))
        gpusim_yield();
}
inline void sp_fence_bulk_global()
{
}
inline void sp_fence_bulk()
{
}
inline void sp_bulk_store(void *global, const void *shared, uint32_t bytes)
{
    gpusim_bulk(global, shared, bytes, nullptr);
}
inline void sp_bulk_stores_read()
{
    gpusim_bulk_wait();
}
#endif

// ---- 16-bit floats: as in dtype.h, but all NaNs become one ----

inline uint32_t sp_pack_f16(float low, float high)
{
    return (low != low ? 0x7fffu : sp_f16_from_f32(low)) |
           (high != high ? 0x7fffu : (uint32_t)sp_f16_from_f32(high)) << 16;
}
inline uint32_t sp_pack_bf16(float low, float high)
{
    return (low != low ? 0x7fffu : sp_bf16_from_f32(low)) |
           (high != high ? 0x7fffu : (uint32_t)sp_bf16_from_f32(high)) << 16;
}
inline float sp_unpack_f16(uint16_t u)
{
    float v = sp_f16_to_f32(u);
    return v != v ? __uint_as_float(0x7fffffff) : v;
}

// ---- the rest ----

inline uint32_t sp_any_bit(uint32_t w)
{
    return w != 0;
}
inline float sp_choose(bool first, float x, float a)
{
    return __uint_as_float(first ? __float_as_uint(x) : __float_as_uint(a));
}
inline double sp_choose(bool first, double x, double a)
{
    return __longlong_as_double(first ? __double_as_longlong(x) : __double_as_longlong(a));
}
inline void sp_opaque(uint64_t &)
{
}
inline uint32_t sp_lanes_below()
{
    return (1u << gpusim_here->lane) - 1;
}
inline uint64_t sp_clock_ns()
{
    return gpusim_clock_ns();
}

// ---- the same for csrc/spccl_device.cuh, whose own it replaces ----

#define SPCCL_DEVICE_PRIMITIVES
namespace spccl_detail
{
using ::sp_clock_ns;
using ::sp_fence_sys;
using ::sp_load_acquire_sys;
using ::sp_load_relaxed2_sys;
using ::sp_load_relaxed_sys;
using ::sp_store16;
using ::sp_store_relaxed2_sys;
using ::sp_store_relaxed_sys;
} // namespace spccl_detail
#include "spccl_device.cuh"

// The code in library common serves both libraries of kernels, so it must not ask.
#ifdef GPUSIM_BOTH
#undef SP_HAS_BULK
#pragma GCC poison SP_HAS_BULK
#endif

#endif
