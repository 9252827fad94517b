// weights_chunk.cuh - sending weights by chunks on GPU memory. The rule is in chunk_rule.h; the bits are those of the
// host.
#ifndef SP_WEIGHTS_CHUNK_CUH
#define SP_WEIGHTS_CHUNK_CUH

#include "core/base/chunk_rule.h"
#include "core/base/weights_rule.h"
#include "kernels/cuda/prune_sample.cuh"

#define SP_CHUNK_THREADS 512u

// Shared memory of a CTA, of one chunk.
struct sp_chunk_smem {
    uint32_t counters[SP_SAMPLE_COUNTERS]; // of the selection
    uint32_t n_above, n_equal;             // magnitudes above `least`, and equal to it
    uint32_t n_sent, n_high;               // and those of the upper level
    unsigned long long units, units_high;  // sums of what is sent, and of its upper level
    uint32_t cut;
    uint32_t tops[SP_CHUNK_THREADS / 32]; // largest exponent, by warp
    uint32_t equal[SP_CHUNK_MOST / 32];   // a bit an element: equal to `least`
};

// Thread t has elements t, t + SP_CHUNK_THREADS, ... of a chunk.
template <class S> struct sp_chunk_part {
    static constexpr uint32_t EACH = SP_CHUNK_MOST / SP_CHUNK_THREADS; // a CTA has a chunk in registers
    S w[EACH], z[EACH];
    sp_prune_magnitudes<SP_CHUNK_THREADS, EACH> magnitudes;
    uint32_t n_elems; // of the chunk

    static __device__ __forceinline__ uint32_t place(uint32_t k)
    {
        return threadIdx.x + k * SP_CHUNK_THREADS;
    }
    static __device__ __forceinline__ uint32_t magnitude(float d, bool finite)
    {
        return finite ? sp_f32_to_bits(fabsf(d)) : 0;
    }
    static __device__ __forceinline__ uint32_t magnitude(double d, bool finite)
    {
        return sp_prune_magnitude(d, finite);
    }
    static __device__ __forceinline__ bool is_finite(float d)
    {
        return sp_f32_is_finite(d);
    }
    static __device__ __forceinline__ bool is_finite(double d)
    {
        return sp_f64_is_finite(d);
    }
    static __device__ __forceinline__ float keep(float w, float z, float s, float leak)
    {
        return sp_chunk_keep_f32(w, z, s, leak);
    }
    static __device__ __forceinline__ double keep(double w, double z, double s, double leak)
    {
        return sp_chunk_keep_f64(w, z, s, leak);
    }

    // Load n elements. Where the difference is not finite, w = z. Returns how many those are.
    __device__ __forceinline__ uint32_t load(const S *own, const S *shared, uint32_t n)
    {
        uint32_t n_nonfinite = 0;
        n_elems = n;
        magnitudes.n_more = 0;
#pragma unroll
        for (uint32_t k = 0; k < EACH; k++) {
            w[k] = place(k) < n ? own[place(k)] : S(0);
            z[k] = place(k) < n ? shared[place(k)] : S(0);
        }
#pragma unroll
        for (uint32_t k = 0; k < EACH; k++) {
            S d = w[k] - z[k];
            bool finite = is_finite(d);
            magnitudes.mine[k] = magnitude(d, finite);
            n_nonfinite += finite ? 0 : 1;
        }
        return n_nonfinite;
    }
    // Returns the element after the n_ties-th element equal to `least`; later equal elements are not sent. All threads
    // call it.
    __device__ __forceinline__ uint32_t find_cut(uint32_t least, uint32_t n_ties, sp_chunk_smem &m) const
    {
#pragma unroll
        for (uint32_t k = 0; k < EACH; k++) {
            uint32_t bits = __ballot_sync(~0u, magnitudes.mine[k] == least);
            if (threadIdx.x % 32 == 0)
                m.equal[place(k) / 32] = bits;
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            uint32_t word = 0, bits;
            for (; (uint32_t)__popc(m.equal[word]) < n_ties; word++)
                n_ties -= (uint32_t)__popc(m.equal[word]);
            for (bits = m.equal[word]; n_ties > 1; n_ties--)
                bits &= bits - 1;
            m.cut = word * 32 + (uint32_t)__ffs((int)bits);
        }
        __syncthreads();
        return m.cut;
    }
    // m is zeros, which all threads have seen.
    __device__ __forceinline__ sp_chunk_pick pick(uint32_t wanted, sp_chunk_smem &m) const
    {
        sp_chunk_pick p;
        uint32_t n_above = 0, n_equal = 0;
        p.least = magnitudes.select(wanted, m.counters);
        p.cut = n_elems;
#pragma unroll
        for (uint32_t k = 0; k < EACH; k++) {
            n_above += magnitudes.mine[k] > p.least ? 1 : 0;
            n_equal += magnitudes.mine[k] == p.least ? 1 : 0;
        }
        n_above = __reduce_add_sync(~0u, n_above);
        n_equal = __reduce_add_sync(~0u, n_equal);
        if (threadIdx.x % 32 == 0) {
            atomicAdd(&m.n_above, n_above);
            atomicAdd(&m.n_equal, n_equal);
        }
        __syncthreads();
        if (p.least != 0 && m.n_above + m.n_equal > wanted)
            p.cut = find_cut(p.least, wanted - m.n_above, m);
        return p;
    }
    // Add up over the CTA. Units have 24 bits. Their low and high 12 bits are summed apart, so that a warp's sums fit
    // into 32 bits.
    static __device__ __forceinline__ void add_up(const uint32_t (&units)[EACH], uint32_t n, uint32_t *count,
                                                  unsigned long long *sum)
    {
        uint32_t low = 0, high = 0;
#pragma unroll
        for (uint32_t k = 0; k < EACH; k++) {
            low += units[k] & 0xfffu;
            high += units[k] >> 12;
        }
        low = __reduce_add_sync(~0u, low);
        high = __reduce_add_sync(~0u, high);
        n = __reduce_add_sync(~0u, n);
        if (threadIdx.x % 32 == 0 && n != 0) {
            atomicAdd(sum, ((unsigned long long)high << 12) + low);
            atomicAdd(count, n);
        }
    }
    // The largest exponent of what is sent.
    __device__ __forceinline__ uint32_t find_top(sp_chunk_pick p, sp_chunk_smem &m) const
    {
        uint32_t top = 1;
#pragma unroll
        for (uint32_t k = 0; k < EACH; k++) {
            uint32_t e = sp_chunk_exponent(magnitudes.mine[k]);
            top = sp_chunk_is_sent(magnitudes.mine[k], place(k), p) && e > top ? e : top;
        }
#pragma unroll
        for (uint32_t by = 16; by > 0; by /= 2) {
            uint32_t other = __shfl_xor_sync(~0u, top, by);
            top = other > top ? other : top;
        }
        if (threadIdx.x % 32 == 0)
            m.tops[threadIdx.x / 32] = top;
        __syncthreads();
        for (uint32_t i = 0; i < SP_CHUNK_THREADS / 32; i++)
            top = m.tops[i] > top ? m.tops[i] : top;
        return top;
    }
    // What is sent of each element, rounded to the two levels.
    __device__ __forceinline__ void level(sp_chunk_pick p, S (&s)[EACH], sp_chunk_smem &m) const
    {
        uint32_t units[EACH], high[EACH], n_sent = 0, n_high = 0, top = find_top(p, m);
#pragma unroll
        for (uint32_t k = 0; k < EACH; k++) {
            bool sent = sp_chunk_is_sent(magnitudes.mine[k], place(k), p);
            units[k] = sent ? sp_chunk_units(magnitudes.mine[k], top) : 0;
            n_sent += sent ? 1 : 0;
        }
        add_up(units, n_sent, &m.n_sent, &m.units);
        __syncthreads();
        if (m.n_sent == 0)
            return;
        uint32_t middle = sp_chunk_middle(m.units, m.n_sent);
#pragma unroll
        for (uint32_t k = 0; k < EACH; k++) {
            bool is_high = units[k] >= middle && sp_chunk_is_sent(magnitudes.mine[k], place(k), p);
            high[k] = is_high ? units[k] : 0;
            n_high += is_high ? 1 : 0;
        }
        add_up(high, n_high, &m.n_high, &m.units_high);
        __syncthreads();
        S levels[2] = {S(sp_chunk_level(m.units - m.units_high, m.n_sent - m.n_high, top)),
                       S(sp_chunk_level(m.units_high, m.n_high, top))};
#pragma unroll
        for (uint32_t k = 0; k < EACH; k++) {
            S value = units[k] >= middle ? levels[1] : levels[0];
            s[k] = s[k] == 0 ? S(0) : s[k] < 0 ? -value : value;
        }
    }
};

// One chunk, or a part of a segment that is sent whole. Both weights are read once, `out` is written once, own weights
// where they change. Returns what it has sent and what was not finite.
template <class S>
__device__ __forceinline__ uint2 sp_chunk_send(const spccl_weights_options &o,
                                               const spccl_weights_segment &seg, S *buffer, uint64_t from,
                                               uint32_t n, sp_chunk_smem &m)
{
    sp_chunk_part<S> part;
    constexpr uint32_t EACH = sp_chunk_part<S>::EACH;
    S s[EACH], *out = buffer + seg.begin + from, *own = (S *)seg.own + from;
    bool whole = sp_weights_whole(&o, &seg);
    sp_chunk_pick p = {0, 0};
    uint2 count = {0, 0};
    for (uint32_t i = threadIdx.x; i < sizeof m / 4; i += SP_CHUNK_THREADS)
        ((uint32_t *)&m)[i] = 0;
    count.y = part.load(own, (const S *)seg.shared + from, n);
    __syncthreads();
    if (!whole)
        p = part.pick((uint32_t)sp_prune_rank(n, o.density), m);
#pragma unroll
    for (uint32_t k = 0; k < EACH; k++) {
        S d = part.w[k] - part.z[k];
        bool finite = sp_chunk_part<S>::is_finite(d);
        bool sent = whole ? finite : sp_chunk_is_sent(part.magnitudes.mine[k], part.place(k), p);
        s[k] = sent ? d : S(0);
        part.w[k] = finite ? part.w[k] : part.z[k];
        if (!finite && part.place(k) < n)
            own[part.place(k)] = part.w[k];
    }
    if (o.levels != 0 && !whole)
        part.level(p, s, m);
#pragma unroll
    for (uint32_t k = 0; k < EACH; k++)
        if (part.place(k) < n) {
            S w = sp_chunk_part<S>::keep(part.w[k], part.z[k], s[k], (S)o.leak);
            out[part.place(k)] = s[k] != 0 ? s[k] * (S)o.scale : S(0);
            if (s[k] != 0 || o.leak != 1)
                own[part.place(k)] = w;
            count.x += whole || s[k] != 0 ? 1 : 0;
        }
    __syncthreads(); // before m is written again
    return count;
}

#endif
