// prune_pass.cuh - the pruning kernel: one pass over gradient and state. It may list what it sends (pruned_lists.h).
#ifndef SP_PRUNE_PASS_CUH
#define SP_PRUNE_PASS_CUH

#include "kernels/cuda/prune_elem.cuh"

#define SP_PRUNE_CTAS 2                              // of an SM: more are slower (bench/notes/prune.md)
#define SP_PRUNE_SHARED_BYTES (3 * sizeof(uint32_t)) // sp_prune_tiles; whether this is the last CTA

// spccl_cuda_prune makes no lists.
struct sp_no_lists {
    static constexpr bool ON = false;
};

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

// One segment, as the pass sees it. SENT: the dtype of what is sent; unless it is DTYPE, it goes to options.sent.
template <int DTYPE, bool RES_BF16, int SENT> struct sp_prune_segment {
    typedef sp_prune_dtype<DTYPE> T;
    typedef sp_prune_dtype<SENT> To;
    typedef typename T::U U;
    typedef typename To::U O;
    typedef typename T::S S;
    typedef sp_prune_residual<S, RES_BF16> Residual;
    typedef typename Residual::R R;
    static constexpr uint32_t EACH = 16 / sizeof(S); // a thread's neighbouring elements: 16 bytes of velocity
    static constexpr uint32_t TILE = SP_GPU_PRUNE_TILE(sizeof(S));
    static constexpr uint32_t TURNS = TILE / SP_PRUNE_THREADS / EACH;

    const U *grad;
    O *sent;
    R *residual;
    S *velocity;
    uint64_t n_elems, first_tile, end_tile;
    typename sp_prune_factors_as<S>::type f;
    S least; // what is sent has this magnitude or more
    sp_prune_random random;

    __device__ __forceinline__ sp_prune_segment(const sp_gpu_prune_args &a, const sp_gpu_prune_row &row)
        : grad((const U *)a.grad + row.segment.begin),
          sent((O *)(SENT == DTYPE ? a.grad : a.options.sent) + row.segment.begin),
          residual((R *)row.segment.residual), velocity((S *)row.segment.velocity),
          n_elems(row.segment.n_elems), first_tile(row.first_tile), end_tile(row.end_tile),
          f(sp_prune_factors_as<S>::of(row.factors))
    {
        least = f.whole ? S(-1) : f.threshold > 0 ? f.threshold : sp_prune_residual<S, false>::smallest();
        if (RES_BF16)
            random = sp_prune_random_of(a.options.seed, row.segment.key, row.segment.state->step);
    }

    // What is sent of a g that is not finite, or whose v is not.
    static __device__ __forceinline__ O as_is(U g)
    {
        if constexpr (SENT == DTYPE)
            return g;
        else
            return To::as_is(g);
    }

    // One element, by sp_prune_elem. Replaces r and u by their new values; to: what is sent.
    __device__ __forceinline__ void prune_one(U g, O &to, R &r, S &u, uint64_t index,
                                              sp_prune_tally &tally) const
    {
        auto e =
            sp_prune_elem(T::widen(g), Residual::widen(r), u, residual != nullptr, velocity != nullptr, f);
        tally.n_sent += e.sent || !e.finite ? 1 : 0;
        tally.n_nonfinite += !e.finite ? 1 : 0;
        if (!e.finite) {
            to = as_is(g);
            r = Residual::narrow(sp_prune_rescaled(Residual::widen(r), f), random, index);
            u = sp_prune_rescaled(u, f);
            return;
        }
        S now = e.sent ? To::widen(To::narrow(e.v)) : S(0);
        to = To::narrow(now * f.scale);
        r = Residual::narrow(e.v - now, random, index);
        u = e.u;
    }

    // Elements [from, from + n) of the segment, one by one: the rest of a segment; or without a residual.
    template <class LISTS>
    __device__ __forceinline__ void prune_few(uint64_t from, uint32_t n, sp_prune_tally &tally, LISTS &lists,
                                              uint64_t tile) const
    {
        for (uint64_t i = from + threadIdx.x; i < from + n; i += SP_PRUNE_THREADS) {
            O to;
            R r = residual != nullptr ? residual[i] : R(0);
            S u = velocity != nullptr ? velocity[i] : S(0);
            prune_one(grad[i], to, r, u, i, tally);
            sent[i] = to;
            if (residual != nullptr)
                residual[i] = r;
            if (velocity != nullptr)
                velocity[i] = u;
        }
        if constexpr (LISTS::ON)
            list_few(from, n, tally, lists, tile);
    }

    // An element that has no place in a list: what would be sent goes back to the residual, if there is one.
    template <class LISTS>
    __device__ __forceinline__ void hold_back(O &to, R *r, uint64_t index, sp_prune_tally &tally,
                                              LISTS &lists) const
    {
        S value = To::widen(to);
        if (to == 0)
            return;
        to = 0;
        tally.n_sent--;
        if (!(sp_prune_abs(value) <= sp_prune_residual<S, false>::largest())) {
            lists.lose_nonfinite();
        } else if (r != nullptr) {
            S back = Residual::widen(*r) + value;
            if (sp_prune_abs(back) <= sp_prune_residual<S, false>::largest())
                *r = Residual::narrow(back, random, index);
        }
    }
    // List what prune_few has written.
    template <class LISTS>
    __device__ __forceinline__ void list_few(uint64_t from, uint32_t n, sp_prune_tally &tally, LISTS &lists,
                                             uint64_t tile) const
    {
        uint32_t n_mine = 0;
        for (uint32_t i = threadIdx.x; i < n; i += SP_PRUNE_THREADS)
            n_mine += sent[from + i] != 0 ? 1 : 0;
        bool fits = lists.claim(tile, n_mine, f.whole);
        for (uint32_t i = threadIdx.x; i < n; i += SP_PRUNE_THREADS)
            if (fits)
                lists.put(i, sent[from + i]);
            else
                hold_back(sent[from + i], residual != nullptr ? residual + from + i : nullptr, from + i,
                          tally, lists);
    }

    typedef sp_prune_vector<U, EACH> Grad;
    typedef sp_prune_vector<O, EACH> Sent;
    typedef sp_prune_vector<R, EACH> Res;
    typedef sp_prune_vector<S, EACH> Vel;

    // EACH elements. If v is finite, then g is, as inf and nan last through products and sums. So one test an
    // element is enough, and a thread with another value takes the slow way.
    template <bool HAS_U>
    __device__ __forceinline__ void prune_vector(const Grad &g, Sent &to, Res &r, Vel &u, uint64_t index,
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
                prune_one(g.e[c], to.e[c], r.e[c], HAS_U ? u.e[c] : none, index + c, tally);
            return;
        }
#pragma unroll
        for (uint32_t c = 0; c < EACH; c++) {
            bool sends = !(sp_prune_abs(v[c]) < least);
            O bits = To::narrow(sends ? v[c] : S(0));
            tally.n_sent += sends ? 1 : 0;
            to.e[c] = bits;
            r.e[c] = Residual::narrow(v[c] - To::widen(bits), random, index + c);
            if (HAS_U)
                u.e[c] = sends && !f.whole ? S(0) : now[c];
        }
        if (f.scale != S(1))
#pragma unroll
            for (uint32_t c = 0; c < EACH; c++)
                to.e[c] = To::narrow(To::widen(to.e[c]) * f.scale);
    }

    // The TILE elements from `from` on. A thread loads all its elements before it uses the first.
    template <bool HAS_U, bool ALIGNED, class LISTS>
    __device__ __forceinline__ void prune_tile(uint64_t from, sp_prune_tally &tally, LISTS &lists,
                                               uint64_t tile) const
    {
        constexpr uint32_t APART = SP_PRUNE_THREADS * EACH;
        uint64_t at = from + threadIdx.x * EACH;
        Grad g[TURNS];
        Sent to[TURNS];
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
            prune_vector<HAS_U>(g[k], to[k], r[k], u[k], at + k * APART, tally);
            to[k].template store<ALIGNED>(sent + at + k * APART);
            r[k].template store<true>(residual + at + k * APART);
            if (HAS_U)
                u[k].template store<true>(velocity + at + k * APART);
        }
        if constexpr (LISTS::ON)
            list_tile<ALIGNED>(to, r, from, tally, lists, tile);
    }

    // List what prune_tile has written: `to` and r.
    template <bool ALIGNED, class LISTS>
    __device__ __forceinline__ void list_tile(Sent *to, Res *r, uint64_t from, sp_prune_tally &tally,
                                              LISTS &lists, uint64_t tile) const
    {
        constexpr uint32_t APART = SP_PRUNE_THREADS * EACH;
        uint32_t n_mine = 0, first = threadIdx.x * EACH;
#pragma unroll
        for (uint32_t k = 0; k < TURNS; k++)
#pragma unroll
            for (uint32_t c = 0; c < EACH; c++)
                n_mine += to[k].e[c] != 0 ? 1 : 0;
        if (lists.claim(tile, n_mine, f.whole)) {
#pragma unroll
            for (uint32_t k = 0; k < TURNS; k++)
#pragma unroll
                for (uint32_t c = 0; c < EACH; c++)
                    lists.put(first + k * APART + c, to[k].e[c]);
            return;
        }
#pragma unroll
        for (uint32_t k = 0; k < TURNS; k++) {
#pragma unroll
            for (uint32_t c = 0; c < EACH; c++)
                hold_back(to[k].e[c], &r[k].e[c], from + first + k * APART + c, tally, lists);
            to[k].template store<ALIGNED>(sent + from + first + k * APART);
            r[k].template store<true>(residual + from + first + k * APART);
        }
    }

    // The tiles of the segment that `tiles` has now and next.
    template <bool HAS_U, bool ALIGNED, class LISTS>
    __device__ __forceinline__ void prune_tiles(sp_prune_tiles &tiles, sp_prune_tally &tally,
                                                LISTS &lists) const
    {
        while (tiles.now < end_tile) {
            uint64_t from = (tiles.now - first_tile) * TILE, left = n_elems - from;
            tiles.ask();
            if (left >= TILE && residual != nullptr)
                prune_tile<HAS_U, ALIGNED>(from, tally, lists, tiles.now);
            else
                prune_few(from, left < TILE ? (uint32_t)left : TILE, tally, lists, tiles.now);
            tiles.step();
        }
    }
    // Of a segment that is skipped: its gradient is 0.
    __device__ __forceinline__ void send_nothing(uint64_t tile) const
    {
        uint64_t from = (tile - first_tile) * TILE, left = n_elems - from;
        for (uint64_t i = from + threadIdx.x; i < from + (left < TILE ? left : TILE); i += SP_PRUNE_THREADS)
            sent[i] = 0;
    }
    template <class LISTS>
    __device__ __forceinline__ void prune(sp_prune_tiles &tiles, sp_prune_tally &tally, LISTS &lists) const
    {
        bool aligned = (uintptr_t)grad % (EACH * sizeof(U)) == 0 && (uintptr_t)sent % (EACH * sizeof(O)) == 0;
        if (velocity != nullptr && aligned)
            prune_tiles<true, true>(tiles, tally, lists);
        else if (velocity != nullptr)
            prune_tiles<true, false>(tiles, tally, lists);
        else if (aligned)
            prune_tiles<false, true>(tiles, tally, lists);
        else
            prune_tiles<false, false>(tiles, tally, lists);
    }
};

// The kernel: what a CTA does. The grid has as many CTAs as run at once. LISTS: sp_no_lists or sp_pruned_lists.
template <int DTYPE, bool RES_BF16, class LISTS, int SENT = DTYPE>
__device__ __forceinline__ void sp_prune_pass(const sp_gpu_prune_args &a, LISTS lists)
{
    sp_gpu_prune_row *rows = sp_prune_rows(a);
    sp_prune_tally tally = {0, 0};
    sp_prune_tiles tiles(a);
    uint32_t index = sp_find_row(rows, a.n_segments, &sp_gpu_prune_row::first_tile, tiles.now);
    while (tiles.now < a.n_tiles) { // one segment each time
        while (rows[index].end_tile <= tiles.now)
            index++;
        const sp_prune_segment<DTYPE, RES_BF16, SENT> segment(a, rows[index]);
        if (sp_prune_skips(a, rows[index])) {
            while (tiles.now < segment.end_tile) {
                if constexpr (LISTS::ON)
                    lists.none(tiles.now);
                if constexpr (SENT != DTYPE)
                    segment.send_nothing(tiles.now);
                tiles.ask();
                tiles.step();
            }
        } else {
            segment.prune(tiles, tally, lists);
        }
        tally.flush(rows[index]);
    }
    if (sp_prune_end<SP_PRUNE_THREADS>(a, (uint32_t *)sp_block_shared() + 2))
        if constexpr (LISTS::ON)
            lists.finish();
}

#endif
