// delta_apply_cuda.cu - deltas in GPU memory (docs/FORMAT.md 11): the kernels that look at, apply and undo changes. A warp
// has a slice. The bits are those of the host.
#include "kernels/cuda/delta.cuh"
#include "kernels/cuda/kernels_cuda.h"
#include "kernels/cuda/launch.cuh"

#define SP_DELTA_WARPS 8u
#define SP_DELTA_CTAS(WHAT) ((WHAT) == SP_DELTA_LOOK ? 3 : 4) // of an SM: threads have 80 or 64 registers
#define SP_DELTA_TURNS 4u                                     // changes that a lane has under way at once
#define SP_DELTA_BITS 1024u  // of section high that a warp lists at a time: a word per lane
#define SP_DELTA_NO_PLACE -1 // before the first place of a slice

// ---- places ----

// A place and a slice, whose element 0 is element `first` of the tensor. Elements of a box of whole rows, or of one row,
// lie one after the other: no row is computed.
struct sp_delta_box {
    uint8_t *dst;
    uint64_t begin, size; // of the tensor's elements, from the first row of the box to its last
    bool is_flat, meets;  // meets: an element of the slice may lie in the box
    uint64_t row;         // of element `first`, less row_first; mod 2^64
    uint64_t col;         // of element `first`
    const spccl_delta_place *p;

    // exists: there is a place. Else no element lies in it.
    __device__ __forceinline__ sp_delta_box(const spccl_delta_place *place, bool exists, uint64_t first,
                                            uint32_t c)
        : dst(nullptr), begin(0), size(0), is_flat(true), meets(false), row(0), col(0), p(place)
    {
        if (!exists || p->n_rows == 0 || p->n_cols == 0)
            return;
        dst = (uint8_t *)p->dst;
        begin = p->row_first * p->row_elems;
        size = p->n_rows * p->row_elems;
        is_flat = p->n_rows == 1 || (p->n_cols == p->row_elems && p->dst_row_elems == p->row_elems);
        if (p->n_rows == 1) {
            begin += p->col_first;
            size = p->n_cols;
        }
        // [first, first + c) and [begin, begin + size) have an element in common
        meets = first >= begin ? first - begin < size : begin - first < c;
        if (meets && !is_flat) {
            row = first / p->row_elems;
            col = first - row * p->row_elems;
            row -= p->row_first;
        }
    }
    // *to: where element `place` of the slice lies, in elements behind dst. False: not in the box.
    __device__ __forceinline__ bool find(uint64_t first, uint32_t place, uint64_t *to) const
    {
        if (is_flat) {
            *to = first + place - begin;
            return *to < size;
        }
        uint64_t at = col + place, rows;
        if (p->row_elems <= UINT32_MAX / 2) // at is below row_elems + 2^17
            rows = (uint32_t)at / (uint32_t)p->row_elems;
        else
            rows = at >= p->row_elems ? 1 : 0;
        at -= rows * p->row_elems + p->col_first;
        *to = (row + rows) * p->dst_row_elems + at;
        return row + rows < p->n_rows && at < p->n_cols;
    }
};

// ---- a slice ----

// Where the sections of a slice of a frame lie, and what its entry says.
template <int BYTES> struct sp_delta_view {
    typedef typename sp_unsigned<BYTES>::type U;
    uint32_t k, c, code, code_bits, room; // room: raw values that have space in the slice
    sp_delta_index at;
    uint64_t from, end; // bytes of the frame
    const uint32_t *low, *high, *codes;
    const uint8_t *values;

    __device__ __forceinline__ sp_delta_view(const sp_gpu_delta_args &a, const sp_gpu_delta_row &r,
                                             uint64_t s)
    {
        const sp_gpu_delta_slice slice = a.slices[r.first_slice + s];
        bool is_last = s + 1 == sp_delta_n_slices(r.n_elems);
        k = slice.entry & SP_DELTA_COUNT_MASK;
        c = sp_delta_slice_elems(r.n_elems, s);
        code = slice.entry >> SP_DELTA_CODE_SHIFT & 0xf;
        code_bits = sp_delta_code_bits(code);
        from = (uint64_t)slice.at * 4;
        end = is_last ? r.frame_bytes : (uint64_t)a.slices[r.first_slice + s + 1].at * 4;
        at = {false, 0, 0, 0};
        if (k != 0)
            at = sp_delta_index_of(c, k);
        low = (const uint32_t *)(r.frame + from);
        high = low + at.low_bytes / 4;
        codes = high + at.high_bytes / 4;
        values = (const uint8_t *)codes + sp_delta_section_bytes(k * code_bits);
        uint64_t values_at = (uint64_t)(values - r.frame);
        room = end > values_at ? (uint32_t)((end - values_at) / BYTES) : 0;
    }
    __device__ __forceinline__ uint32_t high_bits() const
    {
        return at.is_bitmap ? c : k + ((c - 1) >> at.low_bits) + 1;
    }
    // Place of change j, whose bit in high is `bit`.
    __device__ __forceinline__ uint32_t place(uint32_t j, uint32_t bit) const
    {
        if (at.is_bitmap)
            return bit;
        uint32_t part = 0, from_bit = j * at.low_bits, word = from_bit / 32;
        if (at.low_bits != 0) {
            uint64_t two = low[word];
            if (from_bit % 32 + at.low_bits > 32)
                two |= (uint64_t)low[word + 1] << 32;
            part = (uint32_t)(two >> from_bit % 32) & ((1u << at.low_bits) - 1);
        }
        return (bit - j) << at.low_bits | part;
    }
    __device__ __forceinline__ uint32_t number(uint32_t j) const
    {
        uint32_t bit = j * code_bits;
        return codes[bit / 32] >> bit % 32 & sp_delta_code_escape(code);
    }
    __device__ __forceinline__ U raw(uint32_t r) const
    {
        if constexpr (BYTES == 8) { // aligned to 4 bytes
            const uint32_t *p = (const uint32_t *)values + 2 * r;
            return (U)p[1] << 32 | p[0];
        } else {
            return ((const U *)values)[r];
        }
    }
    static __device__ __forceinline__ bool pads(const void *section, uint32_t n_bits)
    {
        return n_bits % 32 == 0 || ((const uint32_t *)section)[n_bits / 32] >> n_bits % 32 == 0;
    }
    // The rules 15, 16 and 20, once the number of raw values is known: the first that is broken, or 0.
    __device__ __forceinline__ uint32_t end_rule(const sp_gpu_delta_row &r, uint32_t n_raw,
                                                 bool is_last) const
    {
        uint64_t stop = from;
        if (k != 0) {
            stop = (uint64_t)(values - r.frame) + sp_delta_section_bytes(8 * BYTES * n_raw);
            if (stop > end)
                return 15;
            if (!pads(low, k * at.low_bits) || !pads(high, high_bits()) || !pads(codes, k * code_bits) ||
                !pads(values, 8 * BYTES * n_raw))
                return 20;
        }
        if ((is_last ? (stop + SP_DELTA_ALIGN - 1) / SP_DELTA_ALIGN * SP_DELTA_ALIGN : stop) != end)
            return 15;
        return stop != end && *(const uint32_t *)(r.frame + stop) != 0 ? 16 : 0;
    }
};

// A warp that goes through the changes of a slice. WHAT: SP_DELTA_LOOK, SP_DELTA_APPLY, SP_DELTA_UNDO.
template <int BYTES, int WHAT> struct sp_delta_runner {
    typedef typename sp_unsigned<BYTES>::type U;
    const sp_gpu_delta_args &a;
    const sp_gpu_delta_row &r;
    const sp_delta_view<BYTES> &v;
    const sp_delta_box &box; // of the first place
    uint16_t *bits;          // [SP_DELTA_BITS] in shared memory: bits of high that are set
    uint64_t first;          // place of the slice's element 0 in its tensor
    U *old;                  // of the slice, or nullptr
    // L: the smallest number of a rule that is broken.
    uint32_t lane, rule;
    int32_t last;    // place of the change before
    uint32_t n_raw;  // raw values so far
    uint64_t change; // L: of the checksum

    __device__ __forceinline__ sp_delta_runner(const sp_gpu_delta_args &args, const sp_gpu_delta_row &row,
                                               const sp_delta_view<BYTES> &view, const sp_delta_box &b,
                                               uint16_t *shared)
        : a(args), r(row), v(view), box(b), bits(shared), lane(threadIdx.x % 32), rule(0),
          last(SP_DELTA_NO_PLACE), n_raw(0), change(0)
    {
    }
    __device__ __forceinline__ void broken(bool is_broken, uint32_t number)
    {
        if (WHAT == SP_DELTA_LOOK && is_broken && (rule == 0 || rule > number))
            rule = number;
    }

    // Changes j to j + 32 * SP_DELTA_TURNS of the slice, at most up to `stop`. A lane has every 32nd.
    struct some {
        uint32_t place[SP_DELTA_TURNS];
        U value[SP_DELTA_TURNS];     // the new bits, what is added to the old ones, or the old bits
        uint32_t is_there, is_added; // bit per turn
    };

    // Values of the turn. All lanes call it, as raw values are counted in order.
    __device__ __forceinline__ void value(some &x, uint32_t turn, uint32_t j, bool there)
    {
        if (v.code == 0) {
            x.value[turn] = there ? v.raw(j) : 0;
            return;
        }
        uint32_t number = there ? v.number(j) : 0;
        bool escaped = there && number == sp_delta_code_escape(v.code);
        uint32_t all = __ballot_sync(~0u, escaped), mine = n_raw + __popc(all & sp_lanes_below());
        n_raw += __popc(all);
        if (!escaped) {
            x.value[turn] = (U)sp_delta_difference(number);
            x.is_added |= 1u << turn;
        } else if (mine < v.room) {
            x.value[turn] = v.raw(mine);
        } else {
            x.value[turn] = 0;
            x.is_there &= ~(1u << turn);
            broken(true, 15);
        }
    }
    // The rules 18 and 19. All lanes call it.
    __device__ __forceinline__ void order(uint32_t place, bool there, uint32_t n)
    {
        int32_t below = __shfl_up_sync(~0u, (int32_t)place, 1);
        below = lane == 0 ? last : below;
        last = __shfl_sync(~0u, (int32_t)place, n < 32 ? n - 1 : 31);
        broken(there && (int32_t)place <= below, 18);
        broken(there && place >= v.c, 19);
    }
    // base: bits of high before `bits`; begin: number of the change that bits[0] is.
    __device__ __forceinline__ void read(some &x, uint32_t base, uint32_t begin, uint32_t at, uint32_t n)
    {
        x.is_there = x.is_added = 0;
#pragma unroll
        for (uint32_t turn = 0; turn < SP_DELTA_TURNS; turn++) {
            uint32_t i = at + turn * 32 + lane, j = begin + i;
            bool there = i < n;
            x.place[turn] = there ? v.place(j, base + bits[i]) : 0;
            x.is_there |= there && x.place[turn] < v.c ? 1u << turn : 0;
            if constexpr (WHAT == SP_DELTA_UNDO)
                x.value[turn] = there ? old[j] : 0;
            else
                value(x, turn, j, there);
            if (WHAT == SP_DELTA_LOOK && at + turn * 32 < n)
                order(x.place[turn], there, n - at - turn * 32);
        }
    }
    // The new bits of the turn, where the old ones are `was`.
    static __device__ __forceinline__ U now(const some &x, uint32_t turn, U was)
    {
        return (U)((x.is_added >> turn & 1 ? was : 0) + x.value[turn]);
    }
    __device__ __forceinline__ void write(const some &x, const sp_delta_box &to)
    {
        U *at[SP_DELTA_TURNS], was[SP_DELTA_TURNS];
#pragma unroll
        for (uint32_t turn = 0; turn < SP_DELTA_TURNS; turn++) {
            uint64_t offset = 0;
            bool in = (x.is_there >> turn & 1) != 0 && to.find(first, x.place[turn], &offset);
            at[turn] = in ? (U *)to.dst + offset : nullptr;
            was[turn] = in && (x.is_added >> turn & 1) != 0 ? *at[turn] : 0;
        }
#pragma unroll
        for (uint32_t turn = 0; turn < SP_DELTA_TURNS; turn++)
            if (at[turn] != nullptr)
                *at[turn] = now(x, turn, was[turn]);
    }
    // seen: what lies at the places that were looked at before, where is_seen says so.
    __device__ __forceinline__ void look(const some &x, const sp_delta_box &to, U *seen, uint32_t &is_seen)
    {
        U was[SP_DELTA_TURNS];
        uint32_t in = 0;
#pragma unroll
        for (uint32_t turn = 0; turn < SP_DELTA_TURNS; turn++) {
            uint64_t offset = 0;
            bool here = (x.is_there >> turn & 1) != 0 && to.find(first, x.place[turn], &offset);
            was[turn] = here ? ((const U *)to.dst)[offset] : 0;
            in |= here ? 1u << turn : 0;
        }
#pragma unroll
        for (uint32_t turn = 0; turn < SP_DELTA_TURNS; turn++) {
            if ((in >> turn & 1) == 0)
                continue;
            broken((is_seen >> turn & 1) != 0 && seen[turn] != was[turn], SP_DELTA_RULE_PLACES);
            if ((is_seen >> turn & 1) == 0) {
                uint64_t i = first + x.place[turn];
                change +=
                    sp_delta_hash(r.key, i, now(x, turn, was[turn])) - sp_delta_hash(r.key, i, was[turn]);
                seen[turn] = was[turn];
            }
        }
        is_seen |= in;
    }
    __device__ __forceinline__ void some_changes(uint32_t base, uint32_t begin, uint32_t at, uint32_t n)
    {
        some x;
        U seen[SP_DELTA_TURNS];
        uint32_t is_seen = 0;
        read(x, base, begin, at, n);
#pragma unroll
        for (uint32_t turn = 0; turn < SP_DELTA_TURNS; turn++)
            seen[turn] = 0;
        for (uint64_t p = 0; p < r.n_places; p++) { // the same in all lanes
            const sp_delta_box to =
                p == 0 ? box : sp_delta_box(a.places + r.first_place + p, true, first, v.c);
            if (!to.meets)
                continue;
            if constexpr (WHAT == SP_DELTA_LOOK)
                look(x, to, seen, is_seen);
            else
                write(x, to);
        }
        if (WHAT == SP_DELTA_LOOK && old != nullptr)
#pragma unroll
            for (uint32_t turn = 0; turn < SP_DELTA_TURNS; turn++)
                if (at + turn * 32 + lane < n)
                    old[begin + at + turn * 32 + lane] = seen[turn];
    }
    // List the bits that are set in the words of high from `word` on, a word per lane. Returns how many.
    __device__ __forceinline__ uint32_t list(uint32_t word, uint32_t n_words)
    {
        uint32_t w = word + lane < n_words ? v.high[word + lane] : 0;
        uint32_t n = __popc(w), upto = sp_warp_scan(n);
        __syncwarp(); // no lane still reads the list
        for (uint32_t at = upto - n; w != 0; w &= w - 1)
            bits[at++] = (uint16_t)(lane * 32 + __ffs((int)w) - 1);
        __syncwarp();
        return __shfl_sync(~0u, upto, 31);
    }
    __device__ __forceinline__ void run()
    {
        uint32_t n_words = v.at.high_bytes / 4, done = 0;
        for (uint32_t word = 0; word < n_words; word += 32) {
            uint32_t n = list(word, n_words);
            broken(n > v.k - done, 17);
            n = n < v.k - done ? n : v.k - done; // more have no values
            for (uint32_t at = 0; at < n; at += 32 * SP_DELTA_TURNS)
                some_changes(word * 32, done, at, n);
            done += n;
        }
        broken(done != v.k, 17);
    }
};

// A warp has slice `s` of all.
template <int BYTES, int WHAT>
__device__ __forceinline__ void sp_delta_slice_run(const sp_gpu_delta_args &a, uint64_t s, uint16_t *shared)
{
    typedef typename sp_unsigned<BYTES>::type U;
    uint32_t target = sp_find_row(a.rows, a.n_targets, &sp_gpu_delta_row::first_slice, s);
    const sp_gpu_delta_row r = a.rows[target];
    if (r.elem_bytes != BYTES)
        return;
    uint64_t number = s - r.first_slice, before = a.slices[s].before;
    const sp_delta_view<BYTES> v(a, r, number);
    uint64_t first = r.first + number * SP_DELTA_SLICE_ELEMS;
    const sp_delta_box box(a.places + r.first_place, r.n_places != 0, first, v.c);
    sp_delta_runner<BYTES, WHAT> runner(a, r, v, box, shared);
    runner.first = first;
    runner.old = a.old != nullptr ? (U *)(a.old + r.old_at) + before : nullptr;
    runner.run();
    if constexpr (WHAT == SP_DELTA_LOOK) {
        bool is_last = number + 1 == sp_delta_n_slices(r.n_elems);
        uint32_t rule = v.end_rule(r, v.code == 0 ? v.k : runner.n_raw, is_last);
        uint64_t change = sp_warp_sum64(runner.change);
        runner.broken(rule != 0, rule);
        sp_delta_report(a, target, number, runner.rule);
        if (runner.lane == 0 && change != 0)
            atomicAdd((unsigned long long *)&a.sums[target], (unsigned long long)change);
        uint64_t at = r.nnz * BYTES + runner.lane; // old values are filled up with zeros
        if (is_last && a.old != nullptr && at < sp_delta_old_bytes(r))
            a.old[r.old_at + at] = 0;
    }
}

// The grid has as many CTAs as run at once. The warps of a CTA have slices next to each other; if there are few slices, those
// of as many CTAs as possible have one each.
template <int BYTES, int WHAT>
__global__ void __launch_bounds__(SP_DELTA_WARPS * 32, SP_DELTA_CTAS(WHAT))
    sp_delta_kernel(const __grid_constant__ sp_gpu_delta_args a)
{
    uint32_t warp = __shfl_sync(~0u, threadIdx.x / 32, 0), n_warps = gridDim.x * SP_DELTA_WARPS;
    uint16_t *shared = (uint16_t *)sp_block_shared() + warp * SP_DELTA_BITS;
    uint64_t s = a.n_slices < n_warps ? warp * gridDim.x + blockIdx.x : blockIdx.x * SP_DELTA_WARPS + warp;
    for (; s < a.n_slices; s += n_warps)
        sp_delta_slice_run<BYTES, WHAT>(a, s, shared);
}

// ---- launching ----

typedef void (*sp_delta_fn)(const sp_gpu_delta_args);
#define SP_DELTA_KERNELS(BYTES)                                                                              \
    {                                                                                                        \
        sp_delta_kernel<BYTES, SP_DELTA_LOOK>, sp_delta_kernel<BYTES, SP_DELTA_APPLY>,                       \
            sp_delta_kernel<BYTES, SP_DELTA_UNDO>                                                            \
    }

// A launch for each size of elements that the targets have. Before it looks, it asks for all kernels, as they will follow:
// the first question about a kernel loads it, which may wait for kernels that run.
extern "C" spccl_status sp_delta_run_cuda(const sp_gpu_delta_args *a, int what, void *stream)
{
    static const sp_delta_fn kernels[][3] = {SP_DELTA_KERNELS(1), SP_DELTA_KERNELS(2), SP_DELTA_KERNELS(4),
                                             SP_DELTA_KERNELS(8)};
    const uint32_t n_threads = SP_DELTA_WARPS * 32;
    const size_t shared = SP_DELTA_WARPS * SP_DELTA_BITS * sizeof(uint16_t);
    if (what == SP_DELTA_LOOK) {
        SP_TRY_CUDA(cudaMemsetAsync(&a->head->fault, 0, sizeof a->head->fault, (cudaStream_t)stream));
        SP_TRY_CUDA(cudaMemsetAsync(a->sums, 0, a->n_targets * sizeof *a->sums, (cudaStream_t)stream));
    }
    for (int width = 0; width < 4; width++) {
        int n_resident = 0;
        if ((a->widths >> width & 1) == 0 || a->n_slices == 0)
            continue;
        for (int k = what == SP_DELTA_LOOK ? SP_DELTA_UNDO : what; k >= what; k--)
            SP_TRY(sp_resident_ctas((const void *)kernels[width][k], n_threads, shared, &n_resident));
        uint32_t n_ctas = (uint32_t)sp_min_size((size_t)n_resident, a->n_slices);
        SP_TRY(sp_launch(kernels[width][what], {n_ctas, n_threads, shared}, a, stream,
                         "launch of a kernel that receives deltas"));
    }
    return SPCCL_OK;
}
