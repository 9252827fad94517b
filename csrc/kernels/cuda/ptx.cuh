// ptx.cuh - the inline PTX of the project: ordered loads and stores between GPUs, asynchronous copies into
// shared memory, conversions, the clock. The base of the CUDA files: of ours it includes the public header alone.
#ifndef SP_PTX_CUH
#define SP_PTX_CUH

#include "spccl_device.cuh"

#include <stdint.h>

// The dynamic shared memory of the CTA.
__device__ __forceinline__ uint8_t *sp_block_shared()
{
    extern __shared__ __align__(16) uint8_t sp_dynamic_shared[];
    return sp_dynamic_shared;
}

// ---- between GPUs, and between GPU and host ----

// They are in the public header for kernels of users (csrc/spccl_device.cuh).
using spccl_detail::sp_fence_sys;
using spccl_detail::sp_load_acquire_sys;
using spccl_detail::sp_load_relaxed_sys;
using spccl_detail::sp_store16;
using spccl_detail::sp_store_relaxed_sys;

// ---- between warps of a CTA, through shared memory ----

__device__ __forceinline__ void sp_store_release_cta(uint32_t *shared, uint32_t v)
{
    asm volatile("st.release.cta.shared.u32 [%0], %1;" ::"r"((uint32_t)__cvta_generic_to_shared(shared)),
                 "r"(v)
                 : "memory");
}
__device__ __forceinline__ uint32_t sp_load_acquire_cta(const uint32_t *shared)
{
    uint32_t v;
    asm volatile("ld.acquire.cta.shared.u32 %0, [%1];"
                 : "=r"(v)
                 : "r"((uint32_t)__cvta_generic_to_shared(shared))
                 : "memory");
    return v;
}

// ---- inside one GPU, for words on which no other data depends: relaxed order is enough ----

__device__ __forceinline__ void sp_store_relaxed_gpu(uint64_t *p, uint64_t v)
{
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
__device__ __forceinline__ uint64_t sp_load_relaxed_gpu(const uint64_t *p)
{
    uint64_t v;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}

// ---- 16 bytes at a time ----

// For data that is not read again soon: leave the caches to other data.
__device__ __forceinline__ void sp_store16_non_temporal(void *p, uint4 v)
{
    asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z),
                 "r"(v.w)
                 : "memory");
}

// From data that is read once, before anybody writes it: leave the L1 cache to other data. It may return what the bytes
// were when the kernel began.
__device__ __forceinline__ uint4 sp_load16_once(const void *p)
{
    uint4 v;
    asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
        : "l"(p));
    return v;
}

// From host memory that the host writes to: never from a cache.
__device__ __forceinline__ uint4 sp_load16_sys(const void *p)
{
    uint4 v;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p)
                 : "memory");
    return v;
}
__device__ __forceinline__ void sp_store8(void *p, uint2 v)
{
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(p), "r"(v.x), "r"(v.y) : "memory");
}

// Fetch the line at p into L2.
__device__ __forceinline__ void sp_prefetch_l2(const void *p)
{
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

// ---- asynchronous copies of 16 bytes from global into shared memory (sm_80 and up) ----

__device__ __forceinline__ void sp_copy16_async(void *shared, const void *global)
{
    asm volatile(
        "cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((uint32_t)__cvta_generic_to_shared(shared)),
        "l"(global)
        : "memory");
}
__device__ __forceinline__ void sp_copy_commit()
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}
// Wait until at most N of this thread's groups are under way.
template <int N> __device__ __forceinline__ void sp_copy_wait()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// ---- bulk copies: one thread copies a contiguous range of bytes; addresses and size are multiples of 16
// (sm_90 and up; other GPUs never call these) ----

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define SP_HAS_BULK 1
#else
#define SP_HAS_BULK 0
#endif

#if SP_HAS_BULK
// Cache policy for data that is used once: first to leave L2.
__device__ __forceinline__ uint64_t sp_policy_once()
{
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
// Initialize a barrier in shared memory at which one lane arrives. __syncwarp must follow before use.
__device__ __forceinline__ void sp_barrier_init(uint64_t *shared)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\n\tfence.proxy.async.shared::cta;" ::"r"(
                     (uint32_t)__cvta_generic_to_shared(shared))
                 : "memory");
}
// Start to copy. The barrier's phase ends when all bytes are there and sp_barrier_arrive has been called.
__device__ __forceinline__ void sp_bulk_load(void *shared, const void *global, uint32_t bytes,
                                             uint64_t *barrier)
{
    uint32_t bar = (uint32_t)__cvta_generic_to_shared(barrier);
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(bytes)
                 : "memory");
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, "
        "[%3], %4;" ::"r"((uint32_t)__cvta_generic_to_shared(shared)),
        "l"(global), "r"(bytes), "r"(bar), "l"(sp_policy_once())
        : "memory");
}
__device__ __forceinline__ void sp_barrier_arrive(uint64_t *barrier)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"((uint32_t)__cvta_generic_to_shared(barrier))
                 : "memory");
}
__device__ __forceinline__ void sp_barrier_wait(uint64_t *barrier, uint32_t parity)
{
    uint32_t done = 0;
    while (done == 0)
        asm volatile("{\n\t.reg .pred p;\n\tmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\t"
                     "selp.u32 %0, 1, 0, p;\n\t}"
                     : "=r"(done)
                     : "r"((uint32_t)__cvta_generic_to_shared(barrier)), "r"(parity)
                     : "memory");
}
// Makes what this thread has acquired from other GPUs visible to its bulk copies.
__device__ __forceinline__ void sp_fence_bulk_global()
{
    asm volatile("fence.proxy.async.global;" ::: "memory");
}
// Makes what this thread has written to shared memory visible to its bulk copies.
__device__ __forceinline__ void sp_fence_bulk()
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// Start to copy `bytes` of shared memory to global memory. Call sp_bulk_stores_read before writing to
// `shared` again.
__device__ __forceinline__ void sp_bulk_store(void *global, const void *shared, uint32_t bytes)
{
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;\n\t"
                 "cp.async.bulk.commit_group;" ::"l"(global),
                 "r"((uint32_t)__cvta_generic_to_shared(shared)), "r"(bytes), "l"(sp_policy_once())
                 : "memory");
}
// Wait until this thread's bulk stores have read shared memory.
__device__ __forceinline__ void sp_bulk_stores_read()
{
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
#endif

// ---- 16-bit floats: the hardware converts as dtype.h does, except that it drops the payload of a NaN ----

// Two 16-bit floats in a word, `low` in the lower half. Rounds to nearest, ties to even. A NaN becomes some
// NaN.
__device__ __forceinline__ uint32_t sp_pack_f16(float low, float high)
{
    uint32_t r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
__device__ __forceinline__ uint32_t sp_pack_bf16(float low, float high)
{
    uint32_t r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
__device__ __forceinline__ float sp_unpack_f16(uint16_t u)
{
    float r;
    asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(u));
    return r;
}

// ---- code that the compiler must not rewrite ----

// 1 if any bit is set. In PTX, because from C++ the compiler makes a comparison and a selection.
__device__ __forceinline__ uint32_t sp_any_bit(uint32_t w)
{
    uint32_t r;
    asm("min.u32 %0, %1, 1;" : "=r"(r) : "r"(w));
    return r;
}
// first ? x : a, bit for bit. In PTX, because from C++ the compiler makes a minimum or maximum where the
// floats are compared, and its NaN has other bits.
__device__ __forceinline__ float sp_choose(bool first, float x, float a)
{
    float r;
    asm("{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %3, 0;\n\tselp.b32 %0, %1, %2, p;\n\t}"
        : "=f"(r)
        : "f"(x), "f"(a), "r"((uint32_t)first));
    return r;
}
__device__ __forceinline__ double sp_choose(bool first, double x, double a)
{
    double r;
    asm("{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %3, 0;\n\tselp.b64 %0, %1, %2, p;\n\t}"
        : "=d"(r)
        : "d"(x), "d"(a), "r"((uint32_t)first));
    return r;
}

// Leaves v as it is, but hides from the compiler where the value came from.
__device__ __forceinline__ void sp_opaque(uint64_t &v)
{
    asm("" : "+l"(v));
}

// A mask of the lanes below this one.
__device__ __forceinline__ uint32_t sp_lanes_below()
{
    uint32_t below;
    asm("mov.u32 %0, %%lanemask_lt;" : "=r"(below));
    return below;
}

// ---- time ----

using spccl_detail::sp_clock_ns;

#endif
