// weights_cuda.cu - sending and receiving changes of weights on GPU memory (weights_rule.h): one kernel takes
// thresholds from samples, one sends, one sends by chunks, one receives. For given thresholds the bits are those of
// the host.
#include "kernels/cuda/kernels_cuda.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/weights_chunk.cuh"

#define SP_WEIGHTS_THREADS 256u
#define SP_WEIGHTS_CTAS 4     // of an SM, which leaves each thread 64 registers
#define SP_WEIGHTS_PART 2048u // elements of a tile that a CTA has in registers at a time
#define SP_WEIGHTS_SAMPLE_THREADS 512u
// Shared memory of the sampling kernel: counters, then the samples.
#define SP_WEIGHTS_SHARED_BYTES ((SP_SAMPLE_COUNTERS + SP_PRUNE_SAMPLES_MAX) * sizeof(uint32_t))
static_assert(SP_WEIGHTS_SHARED_BYTES <= 99 * 1024, "the sampling kernel runs on every supported GPU");

template <class S> struct sp_weights_of;
template <> struct sp_weights_of<float> {
    static constexpr uint32_t EACH = 4; // neighbours that a thread loads at once: 16 bytes
    static __device__ __forceinline__ sp_weights_f32 elem(float w, float z, float threshold, float leak,
                                                          bool whole)
    {
        return sp_weights_elem_f32(w, z, threshold, leak, whole);
    }
};
template <> struct sp_weights_of<double> {
    static constexpr uint32_t EACH = 2;
    static __device__ __forceinline__ sp_weights_f64 elem(double w, double z, double threshold, double leak,
                                                          bool whole)
    {
        return sp_weights_elem_f64(w, z, threshold, leak, whole);
    }
};

// ---- thresholds ----

// One CTA per segment: its threshold from a sample. Each sampled element costs 32 bytes of each of the two weights.
template <class S>
__global__ void __launch_bounds__(SP_WEIGHTS_SAMPLE_THREADS)
    sp_weights_sample_kernel(const __grid_constant__ sp_gpu_weights_args a)
{
    const spccl_weights_segment &s = sp_prune_rows(a)[blockIdx.x].weights;
    uint32_t *counters = (uint32_t *)sp_block_shared(), *samples = counters + SP_SAMPLE_COUNTERS;
    float density = (float)a.options.density;
    if (sp_weights_whole(&a.options, &s))
        return;
    sp_prune_sample p =
        sp_prune_sample_of(s.n_elems, density, a.options.sample, a.options.seed, s.key, s.state->step);
    const S *w = (const S *)s.own, *z = (const S *)s.shared;
    if (threadIdx.x < SP_SAMPLE_COUNTERS)
        counters[threadIdx.x] = 0;
#pragma unroll 4
    for (uint32_t i = threadIdx.x; i < p.n; i += SP_WEIGHTS_SAMPLE_THREADS) {
        uint64_t at = p.start + i * p.stride;
        double d = (double)(w[at] - z[at]);
        samples[i] = sp_prune_magnitude(d, sp_f64_is_finite(d));
    }
    __syncthreads();
    sp_prune_magnitudes<SP_WEIGHTS_SAMPLE_THREADS, 1> magnitudes = {{0}, samples, (uint32_t)p.n};
    uint32_t least = magnitudes.select((uint32_t)sp_prune_rank(p.n, (double)density), counters);
    if (threadIdx.x == 0)
        s.state->threshold = (double)sp_f32_from_bits(least);
}

// ---- groups of 16 bytes ----

// Neighbouring elements: one load and one store if they are aligned, else one each. The stores are PTX,
// because the compiler merged both branches into single ones.
template <class S> union sp_weights_group {
    static constexpr uint32_t EACH = sp_weights_of<S>::EACH;
    S e[EACH];
    uint4 whole;

    __device__ __forceinline__ sp_weights_group()
    {
    }
    __device__ __forceinline__ void load(const S *p, uint32_t n, bool aligned)
    {
        if (n == EACH && aligned) {
            whole = *(const uint4 *)p;
            return;
        }
#pragma unroll
        for (uint32_t i = 0; i < EACH; i++)
            e[i] = i < n ? p[i] : S(0);
    }
    __device__ __forceinline__ void store(S *p, uint32_t n, bool aligned) const
    {
        if (n == EACH && aligned) {
            sp_store16((uint4 *)p, whole);
            return;
        }
#pragma unroll
        for (uint32_t i = 0; i < EACH; i++)
            if (i < n)
                p[i] = e[i];
    }
};

// Elements of the group that thread `threadIdx.x` has in turn k of a tile of n.
template <class S> struct sp_weights_place {
    uint32_t first, n;
    __device__ __forceinline__ sp_weights_place(uint32_t k, uint32_t n_tile)
    {
        constexpr uint32_t EACH = sp_weights_of<S>::EACH;
        first = (k * SP_WEIGHTS_THREADS + threadIdx.x) * EACH;
        n = first < n_tile ? n_tile - first : 0;
        n = n < EACH ? n : EACH;
    }
};
template <class S>
static constexpr uint32_t sp_weights_turns = SP_WEIGHTS_PART / SP_WEIGHTS_THREADS / sp_weights_of<S>::EACH;

// Call part(segment, from, n) for each part of this CTA's tiles: elements [from, from + n) of the segment; and
// end(row) after its last tile of a segment. The grid has as many CTAs as run at once. CTA b has tiles b,
// b + gridDim.x, ...
template <class S, class PART, class END>
__device__ __forceinline__ void sp_weights_each_part(const sp_gpu_weights_args &a, PART part, END end)
{
    sp_gpu_prune_row *rows = sp_prune_rows(a);
    uint64_t tile = blockIdx.x;
    uint32_t index = sp_find_row(rows, a.n_segments, &sp_gpu_prune_row::first_tile, tile);
    while (tile < a.n_tiles) { // one segment each time
        uint64_t first = rows[index].first_tile, last = rows[index].end_tile;
        const spccl_weights_segment s = rows[index].weights;
        for (; tile < last; tile += gridDim.x) {
            uint64_t from = (tile - first) * SP_GPU_PRUNE_TILE(sizeof(S));
            uint64_t to = from + SP_GPU_PRUNE_TILE(sizeof(S));
            for (to = to < s.n_elems ? to : s.n_elems; from < to; from += SP_WEIGHTS_PART)
                part(s, from, to - from < SP_WEIGHTS_PART ? (uint32_t)(to - from) : SP_WEIGHTS_PART);
        }
        end(rows[index]);
        while (tile < a.n_tiles && rows[index].end_tile <= tile)
            index++;
    }
}

// ---- sending ----

// Part of a tile: elements [from, from + n) of a segment. Both weights are read and `out` is written once. Own
// weights are written in groups where one changes.
template <class S>
__device__ __forceinline__ void sp_weights_send_tile(const sp_gpu_weights_args &a,
                                                     const spccl_weights_segment &s, uint64_t from,
                                                     uint32_t n, sp_prune_tally &tally)
{
    constexpr uint32_t TURNS = sp_weights_turns<S>, EACH = sp_weights_of<S>::EACH;
    S *out = (S *)a.buffer + s.begin + from, *own = (S *)s.own + from;
    const S *shared = (const S *)s.shared + from;
    bool aligned = (uintptr_t)out % 16 == 0, whole = sp_weights_whole(&a.options, &s);
    S leak = (S)a.options.leak, scale = (S)a.options.scale, threshold = (S)s.state->threshold;
    sp_weights_group<S> w[TURNS], z[TURNS];
#pragma unroll
    for (uint32_t k = 0; k < TURNS; k++) {
        sp_weights_place<S> place(k, n);
        w[k].load(own + place.first, place.n, true);
        z[k].load(shared + place.first, place.n, true);
    }
#pragma unroll
    for (uint32_t k = 0; k < TURNS; k++) {
        sp_weights_place<S> place(k, n);
        bool writes = leak != S(1);
#pragma unroll
        for (uint32_t c = 0; c < EACH; c++) {
            auto e = sp_weights_of<S>::elem(w[k].e[c], z[k].e[c], threshold, leak, whole);
            tally.n_sent += c < place.n && e.sent ? 1 : 0;
            tally.n_nonfinite += c < place.n && !e.finite ? 1 : 0;
            writes = writes || e.sent || !e.finite;
            w[k].e[c] = e.w;
            z[k].e[c] = scale == S(1) ? e.s : e.s * scale;
        }
        z[k].store(out + place.first, place.n, aligned);
        if (writes)
            w[k].store(own + place.first, place.n, true);
    }
}

template <class S>
__global__ void __launch_bounds__(SP_WEIGHTS_THREADS, SP_WEIGHTS_CTAS)
    sp_weights_send_kernel(const __grid_constant__ sp_gpu_weights_args a)
{
    sp_prune_tally tally = {0, 0};
    sp_weights_each_part<S>(
        a,
        [&](const spccl_weights_segment &s, uint64_t from, uint32_t n) {
            sp_weights_send_tile<S>(a, s, from, n, tally);
        },
        [&](sp_gpu_prune_row &row) { tally.flush(row); });
    sp_prune_end<SP_WEIGHTS_THREADS>(a, (uint32_t *)sp_block_shared());
}

// ---- sending by chunks ----

// The grid has as many CTAs as run at once. CTA b has tiles b, b + gridDim.x, ...; where a chunk is longer than a tile
// it has the chunks that begin in them. A CTA has a chunk at a time.
template <class S>
__global__ void __launch_bounds__(SP_CHUNK_THREADS, sizeof(S) == 4 ? 2 : 1)
    sp_weights_chunk_kernel(const __grid_constant__ sp_gpu_weights_args a)
{
    constexpr uint32_t TILE = SP_GPU_PRUNE_TILE(sizeof(S));
    sp_gpu_prune_row *rows = sp_prune_rows(a);
    sp_chunk_smem &m = *(sp_chunk_smem *)sp_block_shared();
    uint32_t chunk = a.options.chunk, unit = chunk > TILE ? chunk : TILE;
    for (uint64_t tile = blockIdx.x; tile < a.n_tiles; tile += gridDim.x) {
        sp_gpu_prune_row &row = rows[sp_find_row(rows, a.n_segments, &sp_gpu_prune_row::first_tile, tile)];
        const spccl_weights_segment seg = row.weights;
        uint64_t from = (tile - row.first_tile) * TILE,
                 to = from + unit < seg.n_elems ? from + unit : seg.n_elems;
        sp_prune_tally tally = {0, 0};
        if (from % unit != 0)
            continue;
        for (; from < to; from += chunk) {
            uint32_t n = to - from < chunk ? (uint32_t)(to - from) : chunk;
            uint2 count = sp_chunk_send<S>(a.options, seg, (S *)a.buffer, from, n, m);
            tally.n_sent += count.x;
            tally.n_nonfinite += count.y;
        }
        tally.flush(row);
    }
    sp_prune_end<SP_CHUNK_THREADS>(a, (uint32_t *)sp_block_shared());
}

// ---- receiving ----

// Part of a tile. The change is read once. Groups of both weights are read and written where it is not zero.
template <class S>
__device__ __forceinline__ void sp_weights_receive_tile(const sp_gpu_weights_args &a,
                                                        const spccl_weights_segment &s, uint64_t from,
                                                        uint32_t n)
{
    constexpr uint32_t TURNS = sp_weights_turns<S>, EACH = sp_weights_of<S>::EACH;
    const S *change = (const S *)a.buffer + s.begin + from;
    S *own = (S *)s.own + from, *shared = (S *)s.shared + from;
    bool aligned = (uintptr_t)change % 16 == 0;
    sp_weights_group<S> d[TURNS];
#pragma unroll
    for (uint32_t k = 0; k < TURNS; k++) {
        sp_weights_place<S> place(k, n);
        d[k].load(change + place.first, place.n, aligned);
    }
#pragma unroll
    for (uint32_t k = 0; k < TURNS; k++) {
        sp_weights_place<S> place(k, n);
        bool any = false;
#pragma unroll
        for (uint32_t c = 0; c < EACH; c++)
            any = any || d[k].e[c] != 0;
        if (!any)
            continue;
        sp_weights_group<S> w, z;
        w.load(own + place.first, place.n, true);
        z.load(shared + place.first, place.n, true);
#pragma unroll
        for (uint32_t c = 0; c < EACH; c++)
            if (d[k].e[c] != 0) {
                w.e[c] = w.e[c] + d[k].e[c];
                z.e[c] = z.e[c] + d[k].e[c];
            }
        w.store(own + place.first, place.n, true);
        z.store(shared + place.first, place.n, true);
    }
}

template <class S>
__global__ void __launch_bounds__(SP_WEIGHTS_THREADS, SP_WEIGHTS_CTAS)
    sp_weights_receive_kernel(const __grid_constant__ sp_gpu_weights_args a)
{
    sp_weights_each_part<S>(
        a,
        [&](const spccl_weights_segment &s, uint64_t from, uint32_t n) {
            sp_weights_receive_tile<S>(a, s, from, n);
        },
        [](sp_gpu_prune_row &) {});
}

// ---- launching ----

typedef void (*sp_weights_fn)(const sp_gpu_weights_args);

// As many CTAs as run at once, at most one a tile.
static spccl_status launch(sp_weights_fn kernel, uint32_t n_threads, size_t shared_bytes,
                           const sp_gpu_weights_args *a, void *stream)
{
    int n_resident = 0;
    SP_TRY(sp_resident_ctas((const void *)kernel, n_threads, shared_bytes, &n_resident));
    return sp_launch(kernel, {(uint32_t)sp_min_size((size_t)n_resident, a->n_tiles), n_threads, shared_bytes},
                     a, stream, "launch of a kernel that sends or receives weights");
}

extern "C" spccl_status sp_weights_send_cuda(const sp_gpu_weights_args *a, void *stream)
{
    bool wide = a->dtype == SPCCL_FLOAT64;
    if (a->options.chunk != 0)
        return launch(wide ? sp_weights_chunk_kernel<double> : sp_weights_chunk_kernel<float>,
                      SP_CHUNK_THREADS, sizeof(sp_chunk_smem), a, stream);
    if (a->options.keep_thresholds == 0) {
        sp_weights_fn sampler = wide ? sp_weights_sample_kernel<double> : sp_weights_sample_kernel<float>;
        SP_TRY_CUDA(cudaFuncSetAttribute((const void *)sampler, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                         (int)SP_WEIGHTS_SHARED_BYTES));
        SP_TRY(sp_launch(sampler, {a->n_segments, SP_WEIGHTS_SAMPLE_THREADS, SP_WEIGHTS_SHARED_BYTES}, a,
                         stream, "launch of the kernel that samples weights"));
    }
    return launch(wide ? sp_weights_send_kernel<double> : sp_weights_send_kernel<float>, SP_WEIGHTS_THREADS,
                  16, a, stream);
}

extern "C" spccl_status sp_weights_receive_cuda(const sp_gpu_weights_args *a, void *stream)
{
    return launch(a->dtype == SPCCL_FLOAT64 ? sp_weights_receive_kernel<double>
                                            : sp_weights_receive_kernel<float>,
                  SP_WEIGHTS_THREADS, 16, a, stream);
}
