// pruned_sum.cuh - the exchange of pruned gradients between the GPUs of a host: lists of what each rank sends, written
// by the pruning kernel, and the kernel that sums them. pruned_lists.h has the memory, docs/ALGORITHMS.md why no rank
// overwrites what a peer still reads.
#ifndef SP_PRUNED_SUM_CUH
#define SP_PRUNED_SUM_CUH

#include "core/contract/pruned_lists.h"
#include "kernels/cuda/elem.cuh"
#include "kernels/cuda/prune_pass.cuh"
#include "spccl_device.cuh"

static_assert(SP_PRUNE_THREADS == 32 * SP_LISTS_PER_TILE, "one list for each warp");

// What this rank's channels share: its window, the word `claimed`, and how many signals each has sent.
__device__ __forceinline__ const spccl_channel_base &sp_pruned_own(const sp_pruned_sum_args &x)
{
    return x.channels[x.rank == 0 ? 1 : 0].base;
}
// Signals that this rank has sent to each peer: one for each call. Calls use the areas of the windows in turn.
__device__ __forceinline__ uint64_t sp_pruned_calls(const sp_pruned_sum_args &x)
{
    return sp_pruned_own(x).state->signals_sent;
}
// Has a wait of this rank failed?
__device__ __forceinline__ bool sp_pruned_failed(const sp_pruned_sum_args &x)
{
    return *(volatile const uint32_t *)sp_pruned_own(x).claimed != 0;
}
// The area of rank p for a call.
__device__ __forceinline__ uint8_t *sp_pruned_area(const sp_pruned_sum_args &x, uint32_t p, uint64_t call)
{
    uint8_t *window = p == (uint32_t)x.rank ? sp_pruned_own(x).window : x.channels[p].peer_window;
    return window + (call & 1) * x.area_bytes;
}

// ---- lists: written by the pruning kernel ----

// The lists that a warp writes.
struct sp_pruned_lists {
    static constexpr bool ON = true;
    const sp_pruned_sum_args &x;
    sp_pruned_list *lists;
    sp_pruned_entry *entries;
    uint32_t next, end; // what is left of the entries that the warp has taken
    uint32_t at;        // L: where this lane's next entry goes

    __device__ __forceinline__ sp_pruned_lists(const sp_pruned_sum_args &args)
        : x(args), next(0), end(0), at(0)
    {
        uint8_t *area = sp_pruned_area(x, (uint32_t)x.rank, sp_pruned_calls(x));
        lists = (sp_pruned_list *)(area + SP_LISTS_OFF);
        entries = (sp_pruned_entry *)(area + x.entries_off);
    }
    // The first of `total` entries in a row, or false if the area has no room.
    __device__ __forceinline__ bool take(uint32_t total, bool whole, uint32_t &first)
    {
        sp_gpu_prune_table *table = x.prune.table;
        uint32_t n = whole || total > SP_LISTS_CLAIM / 4 ? total : SP_LISTS_CLAIM;
        unsigned long long *taken = (unsigned long long *)(whole ? &table->n_listed_whole : &table->n_listed);
        uint64_t from = 0;
        first = next;
        if (whole || end - next < total) {
            if (threadIdx.x % 32 == 0)
                from = atomicAdd(taken, (unsigned long long)n);
            from = __shfl_sync(~0u, from, 0);
            if (!whole)
                from += x.n_whole;
            if (from + total > x.n_entries)
                return false;
            first = (uint32_t)from;
            if (whole)
                return true;
            end = (uint32_t)(from + n < x.n_entries ? from + n : x.n_entries);
        }
        next = first + total;
        return true;
    }
    // Begin the warp's list of a tile: this lane will put n_mine entries. False: there is no room, the list is empty.
    __device__ __forceinline__ bool claim(uint64_t tile, uint32_t n_mine, bool whole)
    {
        uint32_t lane = threadIdx.x % 32, before = n_mine, total, first = 0;
#pragma unroll
        for (uint32_t by = 1; by < 32; by *= 2) {
            uint32_t other = __shfl_up_sync(~0u, before, by);
            before += lane >= by ? other : 0;
        }
        total = __shfl_sync(~0u, before, 31);
        bool fits = total == 0 || take(total, whole, first);
        at = first + before - n_mine;
        if (lane == 0)
            lists[tile * SP_LISTS_PER_TILE + threadIdx.x / 32] = {first, fits ? total : 0};
        return fits;
    }
    // An element that is inf or nan was not listed.
    __device__ __forceinline__ void lose_nonfinite()
    {
        *(volatile uint64_t *)&x.prune.table->lost_nonfinite = 1;
    }
    __device__ __forceinline__ void put(uint32_t index, uint32_t bits)
    {
        if (bits != 0)
            entries[at++] = {index, bits};
    }
    // A tile of which nothing is sent.
    __device__ __forceinline__ void none(uint64_t tile)
    {
        if (threadIdx.x % 32 == 0)
            lists[tile * SP_LISTS_PER_TILE + threadIdx.x / 32] = {0, 0};
    }
    // The last CTA, after all others: tell the peers.
    __device__ __forceinline__ void finish()
    {
        sp_gpu_prune_table *table = x.prune.table;
        if (threadIdx.x == 0) {
            sp_pruned_head *head = (sp_pruned_head *)((uint8_t *)lists - SP_LISTS_OFF);
            *head = {x.n_elems, x.n_whole, x.average ? 1u : 0u,
                     (uint32_t) * (volatile uint64_t *)&table->lost_nonfinite, 0};
            table->n_listed_whole = table->n_listed = table->lost_nonfinite = 0;
        }
        __threadfence();
        __syncthreads();
        if (threadIdx.x < (uint32_t)x.world_size && threadIdx.x != (uint32_t)x.rank)
            (void)spccl_signal(x.channels[threadIdx.x]);
    }
};

template <bool RES_BF16>
__global__ void __launch_bounds__(SP_PRUNE_THREADS, SP_PRUNE_CTAS)
    sp_prune_list_kernel(const __grid_constant__ sp_pruned_sum_args x)
{
    // After a wait that failed, a peer may still read what this call would overwrite.
    if (__syncthreads_and(!sp_pruned_failed(x)) == 0)
        return;
    sp_prune_pass<SPCCL_FLOAT32, RES_BF16>(x.prune, sp_pruned_lists(x));
}

// ---- sums ----

#define SP_SUM_WARPS 4u // of a CTA
#define SP_SUM_CTAS 3   // of an SM: their shared memory fits

// A warp sums a tile. Its shared memory:
struct sp_sum_tile {
    static constexpr uint32_t TILE = SP_GPU_PRUNE_TILE(sizeof(float));
    float sum[TILE];            // of elements that are listed
    uint32_t listed[TILE / 32]; // a bit each

    __device__ __forceinline__ void clear()
    {
        for (uint32_t i = threadIdx.x % 32; i < TILE / 32; i += 32)
            listed[i] = 0;
        __syncwarp();
    }
    // Add an entry. No other lane adds one of the same element.
    __device__ __forceinline__ void add(sp_pruned_entry e)
    {
        uint32_t i = e.index % TILE, bit = 1u << i % 32, before = atomicOr(&listed[i / 32], bit);
        sum[i] = sp_add((before & bit) != 0 ? sum[i] : 0.0f, __uint_as_float(e.bits));
    }
    // Write the sums over the gradient, of which `out` is the tile's part.
    __device__ __forceinline__ void write(float *out, bool average, int world_size) const
    {
        for (uint32_t w = threadIdx.x % 32; w < TILE / 32; w += 32)
            for (uint32_t bits = listed[w]; bits != 0; bits &= bits - 1) {
                uint32_t i = w * 32 + (uint32_t)__ffs((int)bits) - 1;
                out[i] = average ? sp_div(sum[i], (float)world_size) : sum[i];
            }
        __syncwarp();
    }
};
#define SP_SUM_SHARED_BYTES (SP_SUM_WARPS * sizeof(sp_sum_tile))

// The lists of a tile, of up to MOST ranks, and the first entries of each: lane 4 * k + j has entries j, j + 4, ... of
// list k.
template <uint32_t MOST> struct sp_sum_lists {
    // Entries of a list that a lane loads at once.
    static constexpr uint32_t EACH = MOST > 8 ? 1 : MOST > 4 ? 2 : 4;
    sp_pruned_list list[MOST];           // L
    sp_pruned_entry entries[MOST][EACH]; // L
    static_assert(SP_LISTS_PER_TILE * 4 == 32, "four lanes for each list");

    __device__ __forceinline__ void load_lists(const sp_pruned_sum_args &x, uint8_t *const *areas,
                                               uint64_t tile)
    {
        uint32_t k = threadIdx.x % 32 / 4;
#pragma unroll
        for (uint32_t p = 0; p < MOST; p++)
            if (p < (uint32_t)x.world_size)
                list[p] = ((const sp_pruned_list *)(areas[p] + SP_LISTS_OFF))[tile * SP_LISTS_PER_TILE + k];
    }
    __device__ __forceinline__ void load_entries(const sp_pruned_sum_args &x, uint8_t *const *areas)
    {
        uint32_t j = threadIdx.x % 4;
#pragma unroll
        for (uint32_t p = 0; p < MOST; p++)
            if (p < (uint32_t)x.world_size) {
                const sp_pruned_entry *e =
                    (const sp_pruned_entry *)(areas[p] + x.entries_off) + list[p].first;
#pragma unroll
                for (uint32_t t = 0; t < EACH; t++)
                    if (j + 4 * t < list[p].n)
                        entries[p][t] = e[j + 4 * t];
            }
    }
    // Add rank p's entries: first those that are loaded. Of a list that has more, the whole warp adds the others.
    __device__ __forceinline__ void add(sp_sum_tile &tile, const sp_pruned_entry *all, uint32_t p) const
    {
        uint32_t lane = threadIdx.x % 32;
#pragma unroll
        for (uint32_t t = 0; t < EACH; t++)
            if (lane % 4 + 4 * t < list[p].n)
                tile.add(entries[p][t]);
        uint32_t longer = __ballot_sync(~0u, lane % 4 == 0 && list[p].n > 4 * EACH);
        for (; longer != 0; longer &= longer - 1) {
            uint32_t from = (uint32_t)__ffs((int)longer) - 1;
            uint32_t n = __shfl_sync(~0u, list[p].n, from);
            const sp_pruned_entry *e = all + __shfl_sync(~0u, list[p].first, from);
#pragma unroll 4
            for (uint32_t i = 4 * EACH + lane; i < n; i += 32)
                tile.add(e[i]);
        }
        __syncwarp();
    }
};

// Wait until all peers have signalled their lists of this call, and compare their calls with this rank's. False: the
// kernel ends, a report was written. *lost: some rank found no room for inf or nan.
__device__ __forceinline__ bool sp_pruned_wait(const sp_pruned_sum_args &x, bool *lost)
{
    bool here = !sp_pruned_failed(x), loses = false;
    if (here && threadIdx.x < (uint32_t)x.world_size) {
        bool is_peer = threadIdx.x != (uint32_t)x.rank;
        const spccl_channel_base &c = is_peer ? x.channels[threadIdx.x].base : sp_pruned_own(x);
        if (is_peer)
            here = spccl_detail::sp_channel_wait(c, c.signals, c.state->signals_sent, SPCCL_CHANNEL_NO_SIGNAL,
                                                 0);
        if (here) {
            const sp_pruned_head &head =
                *(const sp_pruned_head *)sp_pruned_area(x, threadIdx.x, sp_pruned_calls(x) - 1);
            loses = head.lost_nonfinite != 0;
            here = head.n_elems == x.n_elems && head.n_whole == x.n_whole &&
                   head.average == (x.average ? 1u : 0u);
            if (!here)
                spccl_detail::sp_channel_fail(c, SPCCL_CHANNEL_OTHER_CALL, x.n_elems, head.n_elems);
        } else {
            atomicCAS(c.claimed, 0u, 1u); // also if the wait was aborted: the next call must not write
        }
    }
    here = __syncthreads_and(here) != 0;
    *lost = __syncthreads_and(!loses) == 0;
    return here;
}

// Sums in rank order, as a collective computes them: a sum starts at +0. MOST: ranks, at most.
template <uint32_t MOST>
__global__ void __launch_bounds__(SP_SUM_WARPS * 32, MOST > 8 ? 2 : SP_SUM_CTAS)
    sp_pruned_sum_kernel(const __grid_constant__ sp_pruned_sum_args x)
{
    bool lost;
    if (!sp_pruned_wait(x, &lost))
        return;
    const sp_gpu_prune_row *rows = sp_prune_rows(x.prune);
    sp_sum_tile &tile = ((sp_sum_tile *)sp_block_shared())[threadIdx.x / 32];
    uint32_t row = 0;
    uint64_t now = blockIdx.x * SP_SUM_WARPS + threadIdx.x / 32, step = gridDim.x * SP_SUM_WARPS;
    uint64_t call = sp_pruned_calls(x) - 1;
    uint8_t *areas[MOST];
#pragma unroll
    for (uint32_t p = 0; p < MOST; p++)
        areas[p] = p < (uint32_t)x.world_size ? sp_pruned_area(x, p, call) : nullptr;
    // A tile's entries are loaded while the tile before is summed, its lists one tile earlier.
    sp_sum_lists<MOST> lists, next;
    if (now < x.prune.n_tiles)
        lists.load_lists(x, areas, now);
    if (now + step < x.prune.n_tiles)
        next.load_lists(x, areas, now + step);
    if (now < x.prune.n_tiles)
        lists.load_entries(x, areas);
    for (; now < x.prune.n_tiles; now += step) {
        if (now + step < x.prune.n_tiles)
            next.load_entries(x, areas);
        while (rows[row].end_tile <= now)
            row++;
        float *out = (float *)x.prune.grad + rows[row].segment.begin +
                     (now - rows[row].first_tile) * sp_sum_tile::TILE;
        tile.clear();
#pragma unroll
        for (uint32_t p = 0; p < MOST; p++)
            if (p < (uint32_t)x.world_size)
                lists.add(tile, (const sp_pruned_entry *)(areas[p] + x.entries_off), p);
        lists = next;
        if (now + 2 * step < x.prune.n_tiles)
            next.load_lists(x, areas, now + 2 * step);
        tile.write(out, x.average, x.world_size);
        if (lost && now == 0 && threadIdx.x % 32 == 0)
            out[0] = __uint_as_float(SP_NAN_F32); // so that GradScaler sees it, on every rank
    }
}

#endif
