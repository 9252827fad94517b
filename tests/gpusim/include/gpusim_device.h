// gpusim_device.h - the parts of CUDA C++ that the kernels use, as plain C++, for GPUs in software. Included
// before all else in a .cu file (-include). A thread of the GPU is a fiber, which runs until it waits for
// other threads.
#ifndef SP_GPUSIM_DEVICE_H
#define SP_GPUSIM_DEVICE_H

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>

#include "cuda_runtime_api.h"

struct dim3 {
    unsigned x, y, z;
    dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c)
    {
    }
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) ulonglong2 {
    unsigned long long x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w)
{
    return {x, y, z, w};
}

// ---- the running thread ----

struct gpusim_index {
    dim3 thread, block, block_dim, grid_dim;
    unsigned lane;
};
extern const gpusim_index *gpusim_here; // the thread that runs now
#define threadIdx (gpusim_here->thread)
#define blockIdx (gpusim_here->block)
#define blockDim (gpusim_here->block_dim)
#define gridDim (gpusim_here->grid_dim)

// ---- operations in which a thread waits; all of them let other threads run ----

enum gpusim_exchange { GPUSIM_SYNC, GPUSIM_SHUFFLE, GPUSIM_VOTE, GPUSIM_SUM };
// A warp operation: waits until all 32 lanes of the warp have called it. Returns `value` of each lane, [32],
// valid until the lane's next call but one. If lanes wait at different calls, the program ends with a text.
const uint64_t *gpusim_warp_exchange(gpusim_exchange what, uint64_t value, uint32_t mask, const char *file,
                                     int line);
// __syncthreads (with_vote 0) or __syncthreads_and (1). All threads of the CTA must call the same one.
bool gpusim_sync_block(int with_vote, bool vote);
void gpusim_yield();

// ---- memory ----

uint8_t *gpusim_shared(); // of the CTA
// A store of 16 bytes that others see late. They see it at a random time. At the latest they see it when the
// kernel ends, or at a fence in the CTA after a release in this warp.
void gpusim_store_late(void *p, uint4 v);
void gpusim_release(); // releases this lane's stores, and the warp's before its last __syncwarp
void gpusim_fence(); // releases, and lets all see what the CTA's warps have released; __syncthreads releases too
void gpusim_copy16(void *shared, const void *global); // cp.async, into this thread's open group
void gpusim_copy_commit();
void gpusim_copy_wait(int n);
// A bulk copy, which lands at a random time. barrier: counts the bytes that have landed; may be nullptr.
void gpusim_bulk(void *to, const void *from, uint32_t bytes, uint64_t *barrier);
void gpusim_bulk_wait(); // waits until this thread's bulk copies without a barrier have landed
void gpusim_barrier_init(uint64_t *barrier);
void gpusim_barrier_arrive(uint64_t *barrier);
bool gpusim_barrier_passed(const uint64_t *barrier, uint32_t parity);
uint64_t gpusim_clock_ns();

// ---- launches ----

cudaError_t gpusim_launch(std::function<void()> thread, dim3 grid, dim3 block, size_t shared, cudaStream_t s);
template <class ARGS>
cudaError_t cudaLaunchKernel(void (*kernel)(ARGS), dim3 grid, dim3 block, void **params, size_t shared,
                             cudaStream_t s)
{
    ARGS args = *static_cast<const ARGS *>(params[0]);
    return gpusim_launch([kernel, args] { kernel(args); }, grid, block, shared, s);
}
template <class ARGS>
cudaError_t cudaLaunchCooperativeKernel(void (*kernel)(ARGS), dim3 grid, dim3 block, void **params,
                                        size_t shared, cudaStream_t s)
{
    return cudaLaunchKernel(kernel, grid, block, params, shared, s); // all CTAs of any kernel run at once
}

// ---- intrinsics ----

template <class T> T min(T a, T b)
{
    return b < a ? b : a;
}
template <class T> T max(T a, T b)
{
    return a < b ? b : a;
}
template <class TO, class FROM> TO gpusim_bits(FROM from)
{
    static_assert(sizeof(TO) == sizeof(FROM), "both types have the same size");
    TO to;
    memcpy(&to, &from, sizeof to);
    return to;
}
inline uint32_t __float_as_uint(float v)
{
    return gpusim_bits<uint32_t>(v);
}
inline float __uint_as_float(uint32_t v)
{
    return gpusim_bits<float>(v);
}
inline long long __double_as_longlong(double v)
{
    return gpusim_bits<long long>(v);
}
inline double __longlong_as_double(long long v)
{
    return gpusim_bits<double>(v);
}
inline int __popc(uint32_t v)
{
    return __builtin_popcount(v);
}
inline int __popcll(unsigned long long v)
{
    return __builtin_popcountll(v);
}
inline int __ffs(int v)
{
    return __builtin_ffs(v);
}
inline int __ffsll(long long v)
{
    return __builtin_ffsll(v);
}
inline uint32_t __funnelshift_l(uint32_t lo, uint32_t hi, uint32_t by)
{
    return (uint32_t)(((uint64_t)hi << 32 | lo) << by % 32 >> 32);
}
template <class T> T atomicCAS(T *p, T expected, T v)
{
    __atomic_compare_exchange_n(p, &expected, v, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    return expected;
}
template <class T, class V> T atomicAdd(T *p, V v)
{
    return __atomic_fetch_add(p, (T)v, __ATOMIC_RELAXED);
}
template <class T> T atomicMax(T *p, T v)
{
    T seen = __atomic_load_n(p, __ATOMIC_RELAXED);
    while (seen < v && !__atomic_compare_exchange_n(p, &seen, v, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
        ;
    return seen;
}
template <class T> T atomicOr(T *p, T v)
{
    return __atomic_fetch_or(p, v, __ATOMIC_RELAXED);
}
inline void __threadfence_system()
{
    gpusim_fence();
}
inline void __threadfence()
{
    gpusim_fence();
}
inline void __nanosleep(unsigned)
{
    gpusim_yield();
}

template <class T> uint64_t gpusim_word(T v)
{
    uint64_t word = 0;
    static_assert(sizeof v <= 8, "shuffles move up to 8 bytes");
    memcpy(&word, &v, sizeof v);
    return word;
}
template <class T> T gpusim_value(uint64_t word)
{
    T v;
    memcpy(&v, &word, sizeof v);
    return v;
}
#define GPUSIM_EXCHANGE(what, v, mask) gpusim_warp_exchange(GPUSIM_##what, gpusim_word(v), mask, file, line)
#define GPUSIM_WHERE const char *file = __builtin_FILE(), int line = __builtin_LINE()
inline void __syncwarp(uint32_t mask = ~0u, GPUSIM_WHERE)
{
    GPUSIM_EXCHANGE(SYNC, 0, mask);
}
inline void __syncthreads()
{
    gpusim_sync_block(0, true);
}
inline int __syncthreads_and(int v)
{
    return gpusim_sync_block(1, v != 0);
}
template <class T> T __shfl_sync(uint32_t mask, T v, uint32_t from, GPUSIM_WHERE)
{
    return gpusim_value<T>(GPUSIM_EXCHANGE(SHUFFLE, v, mask)[from % 32]);
}
template <class T> T __shfl_up_sync(uint32_t mask, T v, uint32_t by, GPUSIM_WHERE)
{
    const uint64_t *all = GPUSIM_EXCHANGE(SHUFFLE, v, mask);
    return gpusim_here->lane >= by ? gpusim_value<T>(all[gpusim_here->lane - by]) : v;
}
template <class T> T __shfl_xor_sync(uint32_t mask, T v, uint32_t by, GPUSIM_WHERE)
{
    return gpusim_value<T>(GPUSIM_EXCHANGE(SHUFFLE, v, mask)[(gpusim_here->lane ^ by) % 32]);
}
inline uint32_t __ballot_sync(uint32_t mask, bool v, GPUSIM_WHERE)
{
    const uint64_t *all = GPUSIM_EXCHANGE(VOTE, v, mask);
    uint32_t bits = 0;
    for (int i = 0; i < 32; i++)
        bits |= (uint32_t)all[i] << i;
    return bits;
}
inline bool __any_sync(uint32_t mask, bool v, GPUSIM_WHERE)
{
    return __ballot_sync(mask, v, file, line) != 0;
}
inline bool __all_sync(uint32_t mask, bool v, GPUSIM_WHERE)
{
    return __ballot_sync(mask, v, file, line) == ~0u;
}
inline uint32_t __reduce_add_sync(uint32_t mask, uint32_t v, GPUSIM_WHERE)
{
    const uint64_t *all = GPUSIM_EXCHANGE(SUM, v, mask);
    uint32_t sum = 0;
    for (int i = 0; i < 32; i++)
        sum += (uint32_t)all[i];
    return sum;
}

// ---- keywords of CUDA C++; no header of the C++ library may be included after this ----

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
#define __CUDACC__ 1

#include "gpusim_ptx.h"

#endif
