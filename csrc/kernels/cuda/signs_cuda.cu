// signs_cuda.cu - one bit per element on GPU memory (signs_rule.h): sending, the owner's sum, decoding. The bits are those
// of the host.
#include "core/base/signs_rule.h"
#include "kernels/cuda/kernels_cuda.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/prune_elem.cuh"

#define SP_SIGNS_THREADS 256u
#define SP_SIGNS_CTAS 4 // of an SM, which leaves each thread 64 registers
#define SP_SIGNS_GROUPS 4u
#define SP_SIGNS_QUARTER (SPCCL_SIGNS_CHUNK / SP_SIGNS_GROUPS)
#define SP_SIGNS_SHARED_BYTES (2 * SP_SIGNS_THREADS * sizeof(uint4) + 16)
static_assert(SP_SIGNS_QUARTER == 4 * SP_SIGNS_THREADS,
              "a thread has 4 neighbours of each quarter of a chunk");
static_assert(SP_GPU_PRUNE_TILE(4) == SPCCL_SIGNS_CHUNK, "a tile of a plan is a chunk");

// A CTA has a chunk in registers. Thread t has elements 4t to 4t + 3 of each quarter: in[g][k] is element
// SP_SIGNS_QUARTER g + 4 t + k.
struct sp_signs_part {
    union {
        float e[4];
        uint4 whole;
    } in[SP_SIGNS_GROUPS];

    static __device__ __forceinline__ uint32_t place(uint32_t g)
    {
        return g * SP_SIGNS_QUARTER + threadIdx.x * 4;
    }
    // x is aligned to 16 bytes. What lies past element n becomes 0.
    __device__ __forceinline__ void load(const float *x, uint32_t n)
    {
#pragma unroll
        for (uint32_t g = 0; g < SP_SIGNS_GROUPS; g++)
            if (place(g) + 4 <= n)
                in[g].whole = *(const uint4 *)(x + place(g));
            else {
#pragma unroll
                for (uint32_t k = 0; k < 4; k++)
                    in[g].e[k] = place(g) + k < n ? x[place(g) + k] : 0;
            }
    }
    __device__ __forceinline__ void store(float *x, uint32_t n) const
    {
#pragma unroll
        for (uint32_t g = 0; g < SP_SIGNS_GROUPS; g++)
            if (place(g) + 4 <= n)
                *(uint4 *)(x + place(g)) = in[g].whole;
            else {
#pragma unroll
                for (uint32_t k = 0; k < 4; k++)
                    if (place(g) + k < n)
                        x[place(g) + k] = in[g].e[k];
            }
    }
    // The sum of all magnitudes, by halves; the same in all threads. `half`: which half of the shared memory is written;
    // calls take turns, so that one barrier each is enough.
    __device__ __forceinline__ float sum(uint4 *half) const
    {
        float a[4];
        sp_signs_part w;
#pragma unroll
        for (uint32_t k = 0; k < 4; k++)
            a[k] = (fabsf(in[0].e[k]) + fabsf(in[2].e[k])) + (fabsf(in[1].e[k]) + fabsf(in[3].e[k]));
        half[threadIdx.x] = {sp_f32_to_bits(a[0]), sp_f32_to_bits(a[1]), sp_f32_to_bits(a[2]),
                             sp_f32_to_bits(a[3])};
        __syncthreads();
        const uint4 *lane = half + threadIdx.x % 32;
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) { // warp i and warp i + 4
            w.in[0].whole = lane[i * 32];
            w.in[1].whole = lane[i * 32 + 128];
#pragma unroll
            for (uint32_t k = 0; k < 4; k++) {
                float both = w.in[0].e[k] + w.in[1].e[k];
                if (i < 2)
                    w.in[2 + i].e[k] = both;
                else
                    w.in[i].e[k] = w.in[i].e[k] + both;
            }
        }
#pragma unroll
        for (uint32_t k = 0; k < 4; k++) {
            a[k] = w.in[2].e[k] + w.in[3].e[k];
#pragma unroll
            for (uint32_t by = 16; by > 0; by /= 2)
                a[k] = a[k] + __shfl_xor_sync(~0u, a[k], by);
        }
        return (a[0] + a[2]) + (a[1] + a[3]);
    }
    // What is not finite becomes 0. Returns how many those were.
    __device__ __forceinline__ uint32_t drop_nonfinite()
    {
        uint32_t n = 0;
#pragma unroll
        for (uint32_t g = 0; g < SP_SIGNS_GROUPS; g++)
#pragma unroll
            for (uint32_t k = 0; k < 4; k++)
                if (!sp_f32_is_finite(in[g].e[k])) {
                    in[g].e[k] = 0;
                    n++;
                }
        return n;
    }
    __device__ __forceinline__ void put_signs(uint8_t *signs) const
    {
        uint32_t nibbles = 0, all;
#pragma unroll
        for (uint32_t g = 0; g < SP_SIGNS_GROUPS; g++)
#pragma unroll
            for (uint32_t k = 0; k < 4; k++)
                nibbles |= sp_f32_to_bits(in[g].e[k]) >> 31 << (8 * g + k);
        all = nibbles | __shfl_xor_sync(~0u, nibbles, 1) << 4;
        if (threadIdx.x % 2 == 0)
#pragma unroll
            for (uint32_t g = 0; g < SP_SIGNS_GROUPS; g++)
                signs[place(g) / 8] = (uint8_t)(all >> 8 * g);
    }
    // Write the row of n values. Returns the magnitude.
    __device__ __forceinline__ float encode(uint32_t n, uint8_t *row, uint32_t &turn, uint32_t &n_nonfinite)
    {
        uint4 *shared = (uint4 *)sp_block_shared();
        float all = sum(shared + (turn++ % 2) * SP_SIGNS_THREADS), magnitude;
        if (!sp_f32_is_finite(all)) { // the same in all threads
            n_nonfinite += drop_nonfinite();
            all = sum(shared + (turn++ % 2) * SP_SIGNS_THREADS);
        }
        magnitude = sp_signs_magnitude(all, n);
        if (threadIdx.x == 0)
            *(uint32_t *)row = sp_f32_to_bits(magnitude);
        put_signs(row + 4);
        return magnitude;
    }
    // Add what a row says, times share.
    __device__ __forceinline__ void add(const uint8_t *row, float share)
    {
        float magnitude = sp_f32_from_bits(*(const uint32_t *)row) * share;
#pragma unroll
        for (uint32_t g = 0; g < SP_SIGNS_GROUPS; g++) {
            uint32_t bits = row[4 + place(g) / 8] >> place(g) % 8;
#pragma unroll
            for (uint32_t k = 0; k < 4; k++)
                in[g].e[k] = in[g].e[k] + sp_signs_value(bits, k, magnitude);
        }
    }
};

__device__ __forceinline__ void sp_signs_send(const spccl_weights_segment &s, uint64_t from, uint8_t *row,
                                              float leak, uint32_t &turn, sp_prune_tally &tally)
{
    sp_signs_part v, z;
    float *own = (float *)s.own + from, magnitude;
    uint32_t n = s.n_elems - from < SPCCL_SIGNS_CHUNK ? (uint32_t)(s.n_elems - from) : SPCCL_SIGNS_CHUNK;
    v.load(own, n);
    z.load((const float *)s.shared + from, n);
#pragma unroll
    for (uint32_t g = 0; g < SP_SIGNS_GROUPS; g++)
#pragma unroll
        for (uint32_t k = 0; k < 4; k++)
            v.in[g].e[k] = v.in[g].e[k] - z.in[g].e[k];
    magnitude = v.encode(n, row, turn, tally.n_nonfinite);
#pragma unroll
    for (uint32_t g = 0; g < SP_SIGNS_GROUPS; g++)
#pragma unroll
        for (uint32_t k = 0; k < 4; k++)
            v.in[g].e[k] =
                sp_signs_keep(v.in[g].e[k], sp_signs_sent(v.in[g].e[k], magnitude), z.in[g].e[k], leak);
    v.store(own, n);
    tally.n_sent += threadIdx.x == 0 ? n : 0;
}

// The grid has as many CTAs as run at once. CTA b has chunks b, b + gridDim.x, ...
__global__ void __launch_bounds__(SP_SIGNS_THREADS, SP_SIGNS_CTAS)
    sp_signs_send_kernel(const __grid_constant__ sp_gpu_weights_args a)
{
    sp_gpu_prune_row *rows = sp_prune_rows(a);
    sp_prune_tally tally = {0, 0};
    uint64_t tile = blockIdx.x;
    uint32_t index = sp_find_row(rows, a.n_segments, &sp_gpu_prune_row::first_tile, tile), turn = 0;
    while (tile < a.n_tiles) { // one segment each time
        uint64_t first = rows[index].first_tile, last = rows[index].end_tile;
        const spccl_weights_segment s = rows[index].weights;
        uint8_t *out = (uint8_t *)a.buffer + s.begin / SPCCL_SIGNS_CHUNK * SPCCL_SIGNS_ROW_BYTES;
        for (; tile < last; tile += gridDim.x)
            sp_signs_send(s, (tile - first) * SPCCL_SIGNS_CHUNK, out + (tile - first) * SPCCL_SIGNS_ROW_BYTES,
                          (float)a.options.leak, turn, tally);
        tally.flush(rows[index]);
        while (tile < a.n_tiles && rows[index].end_tile <= tile)
            index++;
    }
    sp_prune_end<SP_SIGNS_THREADS>(a, (uint32_t *)((uint4 *)sp_block_shared() + 2 * SP_SIGNS_THREADS));
}

__device__ __forceinline__ void sp_signs_sum_chunk(const sp_gpu_signs_args &a, uint64_t chunk, uint32_t n,
                                                   uint32_t &turn)
{
    sp_signs_part v;
    float *kept = a.values + chunk * SPCCL_SIGNS_CHUNK, magnitude;
    const uint8_t *row = a.parts + chunk * SPCCL_SIGNS_ROW_BYTES;
    uint32_t n_nonfinite = 0;
    v.load(kept, n);
#pragma unroll 4
    for (uint32_t r = 0; r < a.n_parts; r++)
        v.add(row + r * a.n_chunks * SPCCL_SIGNS_ROW_BYTES, a.share);
#pragma unroll
    for (uint32_t g = 0; n < SPCCL_SIGNS_CHUNK && g < SP_SIGNS_GROUPS; g++)
#pragma unroll
        for (uint32_t k = 0; k < 4; k++)
            v.in[g].e[k] = sp_signs_part::place(g) + k < n ? v.in[g].e[k] : 0;
    magnitude = v.encode(n, a.rows + chunk * SPCCL_SIGNS_ROW_BYTES, turn, n_nonfinite);
#pragma unroll
    for (uint32_t g = 0; g < SP_SIGNS_GROUPS; g++)
#pragma unroll
        for (uint32_t k = 0; k < 4; k++)
            v.in[g].e[k] = v.in[g].e[k] - sp_signs_sent(v.in[g].e[k], magnitude);
    v.store(kept, n);
}

__global__ void __launch_bounds__(SP_SIGNS_THREADS, SP_SIGNS_CTAS)
    sp_signs_sum_kernel(const __grid_constant__ sp_gpu_signs_args a)
{
    uint32_t turn = 0;
    for (uint64_t chunk = blockIdx.x; chunk < a.n_chunks; chunk += gridDim.x) {
        uint32_t n = a.lengths != NULL ? a.lengths[chunk] : SPCCL_SIGNS_CHUNK;
        if (n != 0)
            sp_signs_sum_chunk(a, chunk, n < SPCCL_SIGNS_CHUNK ? n : SPCCL_SIGNS_CHUNK, turn);
        else if (threadIdx.x < SPCCL_SIGNS_ROW_BYTES / 4)
            ((uint32_t *)(a.rows + chunk * SPCCL_SIGNS_ROW_BYTES))[threadIdx.x] = 0;
    }
}

__global__ void __launch_bounds__(SP_SIGNS_THREADS)
    sp_signs_decode_kernel(const __grid_constant__ sp_gpu_signs_args a)
{
    for (uint64_t chunk = blockIdx.x; chunk < a.n_chunks; chunk += gridDim.x) {
        const uint8_t *row = a.parts + chunk * SPCCL_SIGNS_ROW_BYTES;
        float magnitude = sp_f32_from_bits(*(const uint32_t *)row);
        sp_signs_part v;
#pragma unroll
        for (uint32_t g = 0; g < SP_SIGNS_GROUPS; g++) {
            uint32_t bits = row[4 + sp_signs_part::place(g) / 8] >> sp_signs_part::place(g) % 8;
#pragma unroll
            for (uint32_t k = 0; k < 4; k++)
                v.in[g].e[k] = sp_signs_value(bits, k, magnitude);
        }
        v.store(a.values + chunk * SPCCL_SIGNS_CHUNK, SPCCL_SIGNS_CHUNK);
    }
}

// ---- launching ----

static_assert(SPCCL_SIGNS_ROW_BYTES / 4 <= SP_SIGNS_THREADS,
              "a thread writes at most a word of a row of zeros");

// As many CTAs as run at once, at most one a chunk.
template <class ARGS>
static spccl_status launch(void (*kernel)(const ARGS), uint64_t n_chunks, const ARGS *a, void *stream)
{
    int n_resident = 0;
    SP_TRY(sp_resident_ctas((const void *)kernel, SP_SIGNS_THREADS, SP_SIGNS_SHARED_BYTES, &n_resident));
    return sp_launch(
        kernel,
        {(uint32_t)sp_min_size((size_t)n_resident, n_chunks), SP_SIGNS_THREADS, SP_SIGNS_SHARED_BYTES}, a,
        stream, "launch of a kernel for one bit per element");
}

extern "C" spccl_status sp_signs_send_cuda(const sp_gpu_weights_args *a, void *stream)
{
    return launch(sp_signs_send_kernel, a->n_tiles, a, stream);
}

extern "C" spccl_status sp_signs_sum_cuda(const sp_gpu_signs_args *a, void *stream)
{
    return launch(sp_signs_sum_kernel, a->n_chunks, a, stream);
}

extern "C" spccl_status sp_signs_decode_cuda(const sp_gpu_signs_args *a, void *stream)
{
    return launch(sp_signs_decode_kernel, a->n_chunks, a, stream);
}
