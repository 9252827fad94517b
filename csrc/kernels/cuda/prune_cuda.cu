// prune_cuda.cu - pruning on GPU memory: one kernel takes thresholds from samples, the next prunes in one pass
// over gradient and state. For given thresholds the bits are those of the host (prune_rule.h).
#include "kernels/cuda/cuda_check.h"
#include "kernels/cuda/kernels_cuda.h"
#include "kernels/cuda/prune_sample.cuh"

#include <atomic>

#define SP_PRUNE_CTAS 2                              // of an SM: more are slower (bench/notes/prune.md)
#define SP_PRUNE_SHARED_BYTES (3 * sizeof(uint32_t)) // sp_prune_tiles; whether this is the last CTA
#define SP_PRUNE_GPUS 64                             // GPUs of which the launcher remembers what it asked

// ---- the pass ----

// EACH neighbouring elements: one load and one store if ALIGNED, else EACH of them. The stores are PTX, because the
// compiler merged both branches into stores of one element.
template <class E, uint32_t EACH> union sp_prune_vector {
    static constexpr uint32_t BYTES = EACH * sizeof(E);
    E e[EACH];
    uint2 half; // of 8 bytes
    uint4 whole;

    __device__ __forceinline__ sp_prune_vector()
    {
    }
    template <bool ALIGNED> __device__ __forceinline__ void load(const E *p)
    {
        if constexpr (ALIGNED && BYTES == 8)
            half = *(const uint2 *)p;
        else if constexpr (ALIGNED)
            whole = *(const uint4 *)p;
        else
#pragma unroll
            for (uint32_t c = 0; c < EACH; c++)
                e[c] = p[c];
    }
    template <bool ALIGNED> __device__ __forceinline__ void store(E *p) const
    {
        if constexpr (ALIGNED && BYTES == 8)
            sp_store8(p, half);
        else if constexpr (ALIGNED)
            sp_store16(p, whole);
        else
#pragma unroll
            for (uint32_t c = 0; c < EACH; c++)
                p[c] = e[c];
    }
};

// What a thread has counted in its segment.
struct sp_prune_tally {
    uint32_t n_sent, n_nonfinite;
    __device__ __forceinline__ void flush(sp_gpu_prune_row &row)
    {
        n_sent = __reduce_add_sync(~0u, n_sent);
        n_nonfinite = __reduce_add_sync(~0u, n_nonfinite);
        if (threadIdx.x % 32 == 0 && n_sent != 0)
            atomicAdd((unsigned long long *)&row.n_sent, (unsigned long long)n_sent);
        if (threadIdx.x % 32 == 0 && n_nonfinite != 0)
            atomicAdd((unsigned long long *)&row.n_nonfinite, (unsigned long long)n_nonfinite);
        n_sent = n_nonfinite = 0;
    }
};

// The tiles that a CTA prunes. CTAs take them in order from a counter. So at any time all CTAs are at neighbouring
// tiles, and the memory finds neighbouring requests close together; with a fixed assignment CTAs drift apart. The CTA
// asks for the next tile before it prunes one.
struct sp_prune_tiles {
    uint64_t now;
    unsigned long long *n_taken;
    uint32_t ahead, turn;

    __device__ __forceinline__ sp_prune_tiles(const sp_gpu_prune_args &a)
        : now(blockIdx.x), n_taken((unsigned long long *)&a.table->n_taken), ahead(0), turn(0)
    {
    }
    __device__ __forceinline__ void ask()
    {
        if (threadIdx.x == 0)
            ahead = (uint32_t)atomicAdd(n_taken, 1ull);
    }
    __device__ __forceinline__ void step()
    {
        uint32_t *slots = (uint32_t *)sp_block_shared(); // two, so that one barrier a tile is enough
        if (threadIdx.x == 0)
            slots[turn] = ahead;
        __syncthreads();
        now = gridDim.x + (uint64_t)slots[turn];
        turn ^= 1;
    }
};

// One segment, as the pass sees it.
template <int DTYPE, bool RES_BF16> struct sp_prune_segment {
    typedef sp_prune_dtype<DTYPE> T;
    typedef typename T::U U;
    typedef typename T::S S;
    typedef sp_prune_residual<S, RES_BF16> Residual;
    typedef typename Residual::R R;
    static constexpr uint32_t EACH = 16 / sizeof(S); // a thread's neighbouring elements: 16 bytes of velocity
    static constexpr uint32_t TILE = SP_GPU_PRUNE_TILE(sizeof(S));
    static constexpr uint32_t TURNS = TILE / SP_PRUNE_THREADS / EACH;

    U *grad;
    R *residual;
    S *velocity;
    uint64_t n_elems, first_tile, end_tile;
    typename sp_prune_factors_as<S>::type f;
    S least; // what is sent has this magnitude or more
    sp_prune_random random;

    __device__ __forceinline__ sp_prune_segment(const sp_gpu_prune_args &a, const sp_gpu_prune_row &row)
        : grad((U *)a.grad + row.segment.begin), residual((R *)row.segment.residual),
          velocity((S *)row.segment.velocity), n_elems(row.segment.n_elems), first_tile(row.first_tile),
          end_tile(row.end_tile), f(sp_prune_factors_as<S>::of(row.factors))
    {
        least = f.whole ? S(-1) : f.threshold > 0 ? f.threshold : sp_prune_residual<S, false>::smallest();
        if (RES_BF16)
            random = sp_prune_random_of(a.options.seed, row.segment.key, row.segment.state->step);
    }

    // One element, by sp_prune_elem. Replaces g, r and u by their new values. If g or v is not finite, all three stay.
    __device__ __forceinline__ void prune_one(U &g, R &r, S &u, uint64_t index, sp_prune_tally &tally) const
    {
        auto e =
            sp_prune_elem(T::widen(g), Residual::widen(r), u, residual != nullptr, velocity != nullptr, f);
        tally.n_sent += e.sent || !e.finite ? 1 : 0;
        tally.n_nonfinite += !e.finite ? 1 : 0;
        if (!e.finite)
            return;
        S sent = e.sent ? T::widen(T::narrow(e.v)) : S(0);
        g = T::narrow(sent * f.scale);
        r = Residual::narrow(e.v - sent, random, index);
        u = e.u;
    }

    // Elements [from, from + n) of the segment, one by one: the rest of a segment; or without a residual.
    __device__ __forceinline__ void prune_few(uint64_t from, uint32_t n, sp_prune_tally &tally) const
    {
        for (uint64_t i = from + threadIdx.x; i < from + n; i += SP_PRUNE_THREADS) {
            U g = grad[i];
            R r = residual != nullptr ? residual[i] : R(0);
            S u = velocity != nullptr ? velocity[i] : S(0);
            prune_one(g, r, u, i, tally);
            grad[i] = g;
            if (residual != nullptr)
                residual[i] = r;
            if (velocity != nullptr)
                velocity[i] = u;
        }
    }

    typedef sp_prune_vector<U, EACH> Grad;
    typedef sp_prune_vector<R, EACH> Res;
    typedef sp_prune_vector<S, EACH> Vel;

    // EACH elements. If v is finite, then g is, as inf and nan last through products and sums. So one test an
    // element is enough, and a thread with another value takes the slow way.
    template <bool HAS_U>
    __device__ __forceinline__ void prune_vector(Grad &g, Res &r, Vel &u, uint64_t index,
                                                 sp_prune_tally &tally) const
    {
        S v[EACH], now[EACH];
        bool finite = true;
#pragma unroll
        for (uint32_t c = 0; c < EACH; c++) {
            S x = T::widen(g.e[c]) * f.gradient;
            now[c] = HAS_U ? f.momentum * u.e[c] + x : x;
            v[c] = f.leak * Residual::widen(r.e[c]) + now[c];
            finite = finite && sp_prune_abs(v[c]) <= sp_prune_residual<S, false>::largest();
        }
        if (!finite) {
            S none = S(0);
#pragma unroll
            for (uint32_t c = 0; c < EACH; c++)
                prune_one(g.e[c], r.e[c], HAS_U ? u.e[c] : none, index + c, tally);
            return;
        }
#pragma unroll
        for (uint32_t c = 0; c < EACH; c++) {
            bool sends = !(sp_prune_abs(v[c]) < least);
            U bits = T::narrow(sends ? v[c] : S(0));
            S sent = T::widen(bits);
            tally.n_sent += sends ? 1 : 0;
            g.e[c] = bits;
            r.e[c] = Residual::narrow(v[c] - sent, random, index + c);
            if (HAS_U)
                u.e[c] = sends && !f.whole ? S(0) : now[c];
        }
        if (f.scale != S(1))
#pragma unroll
            for (uint32_t c = 0; c < EACH; c++)
                g.e[c] = T::narrow(T::widen(g.e[c]) * f.scale);
    }

    // The TILE elements from `from` on. A thread loads all its elements before it uses the first.
    template <bool HAS_U, bool ALIGNED>
    __device__ __forceinline__ void prune_tile(uint64_t from, sp_prune_tally &tally) const
    {
        constexpr uint32_t APART = SP_PRUNE_THREADS * EACH;
        uint64_t at = from + threadIdx.x * EACH;
        Grad g[TURNS];
        Res r[TURNS];
        Vel u[TURNS];
#pragma unroll
        for (uint32_t k = 0; k < TURNS; k++) {
            g[k].template load<ALIGNED>(grad + at + k * APART);
            r[k].template load<true>(residual + at + k * APART);
            if (HAS_U)
                u[k].template load<true>(velocity + at + k * APART);
        }
#pragma unroll
        for (uint32_t k = 0; k < TURNS; k++) {
            prune_vector<HAS_U>(g[k], r[k], u[k], at + k * APART, tally);
            g[k].template store<ALIGNED>(grad + at + k * APART);
            r[k].template store<true>(residual + at + k * APART);
            if (HAS_U)
                u[k].template store<true>(velocity + at + k * APART);
        }
    }

    // The tiles of the segment that `tiles` has now and next.
    template <bool HAS_U, bool ALIGNED>
    __device__ __forceinline__ void prune_tiles(sp_prune_tiles &tiles, sp_prune_tally &tally) const
    {
        while (tiles.now < end_tile) {
            uint64_t from = (tiles.now - first_tile) * TILE, left = n_elems - from;
            tiles.ask();
            if (left >= TILE && residual != nullptr)
                prune_tile<HAS_U, ALIGNED>(from, tally);
            else
                prune_few(from, left < TILE ? (uint32_t)left : TILE, tally);
            tiles.step();
        }
    }
    __device__ __forceinline__ void prune(sp_prune_tiles &tiles, sp_prune_tally &tally) const
    {
        bool aligned = (uintptr_t)grad % (EACH * sizeof(U)) == 0;
        if (velocity != nullptr && aligned)
            prune_tiles<true, true>(tiles, tally);
        else if (velocity != nullptr)
            prune_tiles<true, false>(tiles, tally);
        else if (aligned)
            prune_tiles<false, true>(tiles, tally);
        else
            prune_tiles<false, false>(tiles, tally);
    }
};

// The last CTA: states of all segments, and zeros for the next call.
__device__ __forceinline__ void sp_prune_finish(const sp_gpu_prune_args &a)
{
    for (uint32_t i = threadIdx.x; i < a.n_segments; i += SP_PRUNE_THREADS) {
        sp_gpu_prune_row &row = sp_prune_rows(a)[i];
        if (sp_prune_skips(a, row))
            sp_prune_advance_skipped(row.segment.state);
        else
            sp_prune_advance(&a.options, row.segment.state, *(volatile uint64_t *)&row.n_sent,
                             *(volatile uint64_t *)&row.n_nonfinite);
        row.n_sent = row.n_nonfinite = row.has_nonzero = 0;
    }
    if (threadIdx.x == 0)
        a.table->n_ctas_done = a.table->n_taken = 0;
}

// The grid has as many CTAs as run at once.
template <int DTYPE, bool RES_BF16>
__global__ void __launch_bounds__(SP_PRUNE_THREADS, SP_PRUNE_CTAS)
    sp_prune_kernel(const __grid_constant__ sp_gpu_prune_args a)
{
    sp_gpu_prune_row *rows = sp_prune_rows(a);
    sp_prune_tally tally = {0, 0};
    sp_prune_tiles tiles(a);
    uint32_t index = sp_prune_find(rows, a.n_segments, tiles.now);
    while (tiles.now < a.n_tiles) { // one segment each time
        while (rows[index].end_tile <= tiles.now)
            index++;
        const sp_prune_segment<DTYPE, RES_BF16> segment(a, rows[index]);
        if (sp_prune_skips(a, rows[index])) {
            while (tiles.now < segment.end_tile) {
                tiles.ask();
                tiles.step();
            }
        } else {
            segment.prune(tiles, tally);
        }
        tally.flush(rows[index]);
    }
    // A CTA adds its counts, then passes a fence, then counts itself as done. So the last one sees all counts.
    uint32_t *is_last = (uint32_t *)sp_block_shared() + 2;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0)
        *is_last = atomicAdd((unsigned long long *)&a.table->n_ctas_done, 1ull) + 1 == gridDim.x ? 1 : 0;
    __syncthreads();
    if (*is_last != 0) {
        __threadfence();
        sp_prune_finish(a);
    }
}

// ---- launching ----

typedef void (*sp_prune_fn)(const sp_gpu_prune_args);

struct sp_prune_kernels {
    sp_prune_fn nonzero, sample, prune;
    size_t prune_shared_bytes;
};
template <int DTYPE, bool RES_BF16> static constexpr sp_prune_kernels kernels_for()
{
    return {sp_prune_nonzero_kernel<DTYPE>, sp_prune_sample_kernel<DTYPE>, sp_prune_kernel<DTYPE, RES_BF16>,
            SP_PRUNE_SHARED_BYTES};
}
static const sp_prune_kernels kernels[] = {
    kernels_for<SPCCL_FLOAT32, false>(),  kernels_for<SPCCL_FLOAT32, true>(),
    kernels_for<SPCCL_FLOAT16, false>(),  kernels_for<SPCCL_FLOAT16, true>(),
    kernels_for<SPCCL_BFLOAT16, false>(), kernels_for<SPCCL_BFLOAT16, true>(),
    kernels_for<SPCCL_FLOAT64, false>(),
};
static const int N_KERNELS = sizeof kernels / sizeof *kernels;

static int kernels_index(const sp_gpu_prune_args *a)
{
    int dtype = a->dtype == SPCCL_FLOAT32    ? 0
                : a->dtype == SPCCL_FLOAT16  ? 1
                : a->dtype == SPCCL_BFLOAT16 ? 2
                                             : 3;
    return 2 * dtype + (a->options.residual_bf16 != 0 ? 1 : 0);
}

// *out = CTAs of the pruning kernel that run at once on GPU `device`, which is current. Prepares the kernels.
static spccl_status prepare(int device, const sp_prune_kernels &k, int *out)
{
    int n_sms = 0, n_ctas = 0;
    SP_TRY_CUDA(cudaFuncSetAttribute((const void *)k.sample, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     (int)SP_SAMPLE_SHARED_BYTES(SP_PRUNE_SAMPLES_MAX)));
    SP_TRY_CUDA(cudaFuncSetAttribute((const void *)k.prune, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     (int)k.prune_shared_bytes));
    SP_TRY_CUDA(cudaDeviceGetAttribute(&n_sms, cudaDevAttrMultiProcessorCount, device));
    SP_TRY_CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&n_ctas, (const void *)k.prune,
                                                              (int)SP_PRUNE_THREADS, k.prune_shared_bytes));
    *out = n_sms * (n_ctas > 0 ? n_ctas : 1);
    return SPCCL_OK;
}

// As `prepare`, which runs once for each GPU and set of kernels.
static spccl_status prepare_once(int index, int *out)
{
    static std::atomic<int> known[SP_PRUNE_GPUS][N_KERNELS];
    int device = 0;
    SP_TRY_CUDA(cudaGetDevice(&device));
    *out = device < SP_PRUNE_GPUS ? known[device][index].load(std::memory_order_relaxed) : 0;
    if (*out != 0)
        return SPCCL_OK;
    SP_TRY(prepare(device, kernels[index], out));
    if (device < SP_PRUNE_GPUS)
        known[device][index].store(*out, std::memory_order_relaxed);
    return SPCCL_OK;
}

static spccl_status launch(sp_prune_fn kernel, uint32_t n_ctas, uint32_t n_threads, size_t shared_bytes,
                           const sp_gpu_prune_args *a, void *stream)
{
    void *params[] = {const_cast<sp_gpu_prune_args *>(a)};
    return sp_cuda_check(
        cudaLaunchKernel(kernel, dim3(n_ctas), dim3(n_threads), params, shared_bytes, (cudaStream_t)stream),
        "launch of a pruning kernel");
}

extern "C" spccl_status sp_prune_cuda(const sp_gpu_prune_args *a, void *stream)
{
    int index = kernels_index(a), n_resident = 0;
    const sp_prune_kernels &k = kernels[index];
    uint64_t n_samples = sp_prune_samples_most(a->most_elems, (float)a->options.density, a->options.sample);
    uint32_t n_ctas;
    SP_TRY(prepare_once(index, &n_resident));
    n_ctas = (uint32_t)sp_min_size((size_t)n_resident, a->n_tiles);
    if (a->options.skip_zeros != 0)
        SP_TRY(launch(k.nonzero, n_ctas, SP_PRUNE_THREADS, 0, a, stream));
    SP_TRY(launch(k.sample, a->n_segments, SP_SAMPLE_THREADS, SP_SAMPLE_SHARED_BYTES(n_samples), a, stream));
    return launch(k.prune, n_ctas, SP_PRUNE_THREADS, k.prune_shared_bytes, a, stream);
}
