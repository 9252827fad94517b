// ptx.cuh - the only inline PTX of the project: barriers of a worker, ordered loads and stores between GPUs,
// asynchronous copies into shared memory, the clock. Base of the CUDA files; includes nothing of ours.
#ifndef SP_PTX_CUH
#define SP_PTX_CUH

#include <stdint.h>

// ---- barriers of 256 threads; `bar` is 1 to 15 and the same for all of them ----

__device__ __forceinline__ void sp_bar_sync(uint32_t bar)
{
    asm volatile("bar.sync %0, 256;" ::"r"(bar) : "memory");
}
// Every thread's `ok`?
__device__ __forceinline__ bool sp_bar_and(uint32_t bar, bool ok)
{
    int all;
    asm volatile("{\n\t.reg .pred p, q;\n\tsetp.ne.s32 p, %2, 0;\n\tbar.red.and.pred q, %1, 256, p;\n\t"
                 "selp.s32 %0, 1, 0, q;\n\t}"
                 : "=r"(all)
                 : "r"(bar), "r"((int)ok)
                 : "memory");
    return all != 0;
}

// ---- between GPUs, and between GPU and host ----

// What this thread has seen or written before is there for whoever acquires this value.
__device__ __forceinline__ void sp_store_release_sys(uint64_t *p, uint64_t v)
{
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
__device__ __forceinline__ uint64_t sp_load_acquire_sys(const uint64_t *p)
{
    uint64_t v;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ uint64_t sp_load_relaxed_sys(const uint64_t *p)
{
    uint64_t v;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ uint32_t sp_load_relaxed_sys(const uint32_t *p)
{
    uint32_t v;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ void sp_store_relaxed_sys(uint32_t *p, uint32_t v)
{
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

__device__ __forceinline__ void sp_fence_sys()
{
    asm volatile("fence.acq_rel.sys;" ::: "memory");
}
__device__ __forceinline__ void sp_store_relaxed_sys(uint64_t *p, uint64_t v)
{
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}

// ---- between warps of a block, through shared memory ----

__device__ __forceinline__ void sp_store_release_cta(uint64_t *shared, uint64_t v)
{
    asm volatile("st.release.cta.shared.u64 [%0], %1;" ::"r"((uint32_t)__cvta_generic_to_shared(shared)),
                 "l"(v)
                 : "memory");
}
__device__ __forceinline__ uint64_t sp_load_acquire_cta(const uint64_t *shared)
{
    uint64_t v;
    asm volatile("ld.acquire.cta.shared.u64 %0, [%1];"
                 : "=l"(v)
                 : "r"((uint32_t)__cvta_generic_to_shared(shared))
                 : "memory");
    return v;
}

// ---- inside one GPU: a word that carries its own flag needs no other order ----

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

// Past L1: frames in an inbox are read once, and an old line in L1 must never be taken for a new frame.
__device__ __forceinline__ uint4 sp_load16_l2(const void *p)
{
    uint4 v;
    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p)
                 : "memory");
    return v;
}
// Written once and not read again here: leave the caches to others.
__device__ __forceinline__ void sp_store16_stream(void *p, uint4 v)
{
    asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z),
                 "r"(v.w)
                 : "memory");
}
__device__ __forceinline__ void sp_store16(void *p, uint4 v)
{
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
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
// Until at most N of this thread's groups are under way.
template <int N> __device__ __forceinline__ void sp_copy_wait()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// ---- time ----

__device__ __forceinline__ uint64_t sp_clock_ns()
{
    uint64_t t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
}

#endif
