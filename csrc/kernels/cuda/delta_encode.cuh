// delta_encode.cuh - how a CTA encodes a slice of a delta (docs/FORMAT.md, section 11): it reads x and base once and lists
// the changes in shared memory; then it writes the slice's sections. The bytes are those of the host (delta_rule.h).
#ifndef SP_DELTA_ENCODE_CUH
#define SP_DELTA_ENCODE_CUH

#include "core/base/delta_rule.h"
#include "kernels/cuda/elem.cuh"

#define SP_DELTA_ENCODE_THREADS 256u
#define SP_DELTA_ENCODE_WARPS (SP_DELTA_ENCODE_THREADS / 32)
#define SP_DELTA_ENCODE_CTAS 4 // of an SM, which leaves each thread 64 registers

// Changes of a slice that the lists hold, and elements of which they can hold every change.
template <int E> static constexpr uint32_t sp_delta_list_cap = E == 8 ? 2048 : 4096;

// Each warp has a list of its own: entry i of warp w is place[w * LIST + i], and so on. Entries are in any order. An entry's
// number among the changes in order of the places, its rank, follows from `bits`.
template <int E> struct sp_delta_shared {
    typedef typename sp_unsigned<E>::type U;
    static constexpr uint32_t CAP = sp_delta_list_cap<E>, LIST = CAP / SP_DELTA_ENCODE_WARPS;
    static constexpr uint32_t CODE_BITS = E == 1 ? 4 : E == 2 ? 8 : 16, LOW_BITS = E == 8 ? 5 : 4;
    static_assert(SP_DELTA_SLICE_ELEMS >> LOW_BITS == CAP, "low takes at most LOW_BITS * CAP bits");

    // What clear() sets to 0: bits has one bit per element, then the sections, then which ranks are escaped.
    uint64_t bits[SP_DELTA_SLICE_ELEMS / 64];
    uint32_t low[CAP * LOW_BITS / 32 + 4], high[3 * CAP / 32 + 4], codes[CAP * CODE_BITS / 32 + 4];
    uint32_t escaped[CAP / 32];

    uint16_t before[SP_DELTA_SLICE_ELEMS / 64]; // bits set in earlier words of `bits`
    uint16_t escaped_before[CAP / 32];
    U now[CAP];
    U old[CAP];
    uint16_t place[CAP];
    uint64_t sum_change[SP_DELTA_ENCODE_WARPS];
    uint32_t count[SP_DELTA_ENCODE_WARPS][SP_DELTA_N_CODES]; // [0]: changes; [code]: escaped by it
    uint32_t n_listed[SP_DELTA_ENCODE_WARPS];
    uint32_t warp_bits[SP_DELTA_ENCODE_WARPS];
    uint32_t is_dense; // a list was too short
    uint64_t at;       // of the kernel that uses this

    __device__ __forceinline__ void clear()
    {
        constexpr uint32_t N = (sizeof bits + sizeof low + sizeof high + sizeof codes + sizeof escaped) / 16;
        uint4 *p = (uint4 *)bits;
#pragma unroll
        for (uint32_t i = 0; i < N; i += SP_DELTA_ENCODE_THREADS)
            if (i + threadIdx.x < N)
                p[i + threadIdx.x] = make_uint4(0, 0, 0, 0);
        if (threadIdx.x == 0)
            is_dense = 0;
    }
};

// A slice, or what is left of an array at its end.
struct sp_delta_piece {
    const uint8_t *x, *base; // of its first element
    uint32_t n_elems;
    bool is_aligned;     // both to 16 bytes
    bool advances;       // what a list holds is written to the base at once, while its lines are in L2
    uint64_t first, key; // place of its first element in the tensor
};

// ---- reading ----

// 16 bytes of the base, and the elements of x there, rounded to the same dtype.
template <int E, int CAST> struct sp_delta_unit {
    static constexpr uint32_t N = 16 / E, X_BYTES = CAST != 0 ? 4 : E, X_UNITS = X_BYTES / E;
    typedef typename sp_unsigned<E>::type U;
    typedef typename sp_unsigned<X_BYTES>::type XU;
    uint4 x[X_UNITS], old;

    __device__ __forceinline__ void load(const sp_delta_piece &p, uint32_t unit)
    {
#pragma unroll
        for (uint32_t i = 0; i < X_UNITS; i++)
            x[i] = sp_load16_once(p.x + ((size_t)unit * X_UNITS + i) * 16);
        old = sp_load16_once(p.base + (size_t)unit * 16);
    }
    // At the end of an array, or where it is not aligned. Elements from `end` on are 0 in both.
    __device__ __forceinline__ void load_elements(const sp_delta_piece &p, uint32_t unit, uint32_t end)
    {
        uint32_t words[4 * X_UNITS] = {}, words_old[4] = {};
#pragma unroll
        for (uint32_t i = 0; i < N; i++)
            if (unit * N + i < end) {
                put<XU>(words, i, ((const XU *)p.x)[unit * N + i]);
                put<U>(words_old, i, ((const U *)p.base)[unit * N + i]);
            }
#pragma unroll
        for (uint32_t i = 0; i < X_UNITS; i++)
            x[i] = make_uint4(words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]);
        old = make_uint4(words_old[0], words_old[1], words_old[2], words_old[3]);
    }
    template <class T> static __device__ __forceinline__ void put(uint32_t *words, uint32_t i, T v)
    {
        constexpr uint32_t EACH = sizeof(T) < 4 ? 4 / sizeof(T) : 1;
        words[i * sizeof(T) / 4] |= (uint32_t)v << i % EACH * 8 * sizeof(T) % 32;
        if (sizeof(T) == 8)
            words[i * 2 + 1] = (uint32_t)((uint64_t)v >> 32);
    }
    __device__ __forceinline__ uint4 now() const
    {
        if constexpr (CAST == 0) {
            return x[0];
        } else {
            const float a[8] = {__uint_as_float(x[0].x), __uint_as_float(x[0].y), __uint_as_float(x[0].z),
                                __uint_as_float(x[0].w), __uint_as_float(x[1].x), __uint_as_float(x[1].y),
                                __uint_as_float(x[1].z), __uint_as_float(x[1].w)};
            uint32_t r[4];
            sp_narrow_each<sp_elem<CAST>, 8>(a, r);
            return make_uint4(r[0], r[1], r[2], r[3]);
        }
    }
};

// A bit for each element of E bytes in w that is not 0.
template <int E> __device__ __forceinline__ uint32_t sp_delta_nonzero(uint32_t w)
{
    if constexpr (E == 1) {
        uint32_t top = (((w & 0x7f7f7f7fu) + 0x7f7f7f7fu) | w) & 0x80808080u;
        return ((top >> 7) * 0x204081u) >> 21 & 0xf;
    } else if constexpr (E == 2) {
        return ((w & 0xffffu) != 0 ? 1u : 0u) | (w >> 16 != 0 ? 2u : 0u);
    } else {
        return w != 0 ? 1u : 0u;
    }
}
template <int E> __device__ __forceinline__ uint32_t sp_delta_mask(const uint4 &a, const uint4 &b)
{
    const uint32_t x = a.x ^ b.x, y = a.y ^ b.y, z = a.z ^ b.z, w = a.w ^ b.w;
    if constexpr (E == 8) {
        return sp_delta_nonzero<8>(x | y) | sp_delta_nonzero<8>(z | w) << 1;
    } else {
        constexpr uint32_t EACH = 4 / E;
        return sp_delta_nonzero<E>(x) | sp_delta_nonzero<E>(y) << EACH | sp_delta_nonzero<E>(z) << 2 * EACH |
               sp_delta_nonzero<E>(w) << 3 * EACH;
    }
}
// Element i of the 16 bytes.
template <int E>
__device__ __forceinline__ typename sp_unsigned<E>::type sp_delta_elem(const uint4 &v, uint32_t i)
{
    typedef typename sp_unsigned<E>::type U;
    if constexpr (E == 8) {
        return i != 0 ? (uint64_t)v.w << 32 | v.z : (uint64_t)v.y << 32 | v.x;
    } else {
        constexpr uint32_t EACH = 4 / E;
        const uint32_t low = (i & EACH) != 0 ? v.y : v.x, high = (i & EACH) != 0 ? v.w : v.z;
        return (U)(((i & 2 * EACH) != 0 ? high : low) >> (i & (EACH - 1)) * 8 * E);
    }
}

// The base gets back what n entries of this warp's list were.
template <int E>
__device__ __forceinline__ void sp_delta_take_back(const sp_delta_shared<E> &s, const sp_delta_piece &p,
                                                   uint32_t n)
{
    typedef typename sp_unsigned<E>::type U;
    const uint32_t begin = threadIdx.x / 32 * s.LIST;

    __syncwarp();
    for (uint32_t i = begin + threadIdx.x % 32; i < begin + n; i += 32)
        ((U *)p.base)[s.place[i]] = s.old[i];
}

// This warp's list has n entries: add up the change of the checksum, count what codes escape.
template <int E>
__device__ __forceinline__ void sp_delta_close_list(sp_delta_shared<E> &s, const sp_delta_piece &p,
                                                    uint32_t n)
{
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, begin = warp * s.LIST;
    uint32_t escaped[SP_DELTA_N_CODES] = {};
    uint64_t sum = 0;

    __syncwarp();
    for (uint32_t i = begin + lane; i < begin + n; i += 32) {
        const uint64_t now = s.now[i], old = s.old[i], at = p.first + s.place[i];
        const uint64_t number = sp_delta_number(now, old, E);
        sum += sp_delta_hash(p.key, at, now) - sp_delta_hash(p.key, at, old);
#pragma unroll
        for (uint32_t code = 1; code < SP_DELTA_N_CODES; code++)
            escaped[code] += number >= sp_delta_code_escape(code) ? 1 : 0;
    }
    escaped[0] = lane == 0 ? n : 0;
#pragma unroll
    for (uint32_t by = 16; by != 0; by /= 2)
        sum += __shfl_xor_sync(~0u, sum, by);
#pragma unroll
    for (uint32_t code = 0; code < SP_DELTA_N_CODES; code++)
        escaped[code] = __reduce_add_sync(~0u, escaped[code]);
    if (lane == 0) {
        s.sum_change[warp] += sum;
#pragma unroll
        for (uint32_t code = 0; code < SP_DELTA_N_CODES; code++)
            s.count[warp][code] += escaped[code];
    }
    __syncwarp();
}

// Put the changes of one unit per lane, elements `at` and on of the part that is scanned, into bits and lists. *n: entries of
// the list. *advances becomes false when the list is too short: then the base has the old elements of this warp's part again,
// and the rest stays. is_whole: all 32 units may
// be written, two at a time: a sector of 32 bytes that is written whole need not be read.
template <int E>
__device__ __forceinline__ void sp_delta_list_unit(sp_delta_shared<E> &s, const sp_delta_piece &p,
                                                   const uint4 &now, const uint4 &old, uint32_t from,
                                                   uint32_t at, bool is_whole, uint32_t *n, bool *advances)
{
    typedef typename sp_unsigned<E>::type U;
    const uint32_t begin = threadIdx.x / 32 * s.LIST, changed = sp_delta_mask<E>(now, old);
    uint32_t mask = changed, vote;

    if (mask != 0) {
        if constexpr (E == 1)
            ((uint16_t *)s.bits)[at / 16] = (uint16_t)mask;
        else if constexpr (E == 2)
            ((uint8_t *)s.bits)[at / 8] = (uint8_t)mask;
        else
            atomicOr((uint32_t *)s.bits + at / 32, mask << at % 32);
    }
    while ((vote = __ballot_sync(~0u, mask != 0)) != 0) {
        if (*n + (uint32_t)__popc(vote) > s.LIST) {
            if (*advances)
                sp_delta_take_back(s, p, *n);
            *advances = false;
            sp_delta_close_list(s, p, *n);
            *n = 0;
            s.is_dense = 1;
        }
        if (mask != 0) {
            uint32_t i = (uint32_t)__ffs((int)mask) - 1,
                     to = begin + *n + (uint32_t)__popc(vote & sp_lanes_below());
            const U v = sp_delta_elem<E>(now, i);
            s.place[to] = (uint16_t)(from + at + i);
            s.now[to] = v;
            s.old[to] = sp_delta_elem<E>(old, i);
            if (*advances && !is_whole)
                ((U *)p.base)[from + at + i] = v;
            mask &= mask - 1;
        }
        *n += (uint32_t)__popc(vote);
    }
    if (*advances && is_whole && (changed | __shfl_xor_sync(~0u, changed, 1)) != 0)
        *(uint4 *)((uint8_t *)p.base + (from + at) * E) = now;
}

// List what changed in elements [from, from + n) of the piece; from is a multiple of CAP. s is clear, and all threads know.
template <int E, int CAST>
__device__ __forceinline__ void sp_delta_scan(sp_delta_shared<E> &s, const sp_delta_piece &p, uint32_t from,
                                              uint32_t n)
{
    typedef sp_delta_unit<E, CAST> unit;
    constexpr uint32_t UNROLL = CAST != 0 ? 2 : 4, STEP = UNROLL * SP_DELTA_ENCODE_THREADS;
    const uint32_t first = from / unit::N, n_units = (n + unit::N - 1) / unit::N, warp = threadIdx.x / 32;
    const uint32_t n_whole = p.is_aligned ? n / unit::N : 0; // units that can be read at once
    uint32_t n_listed = 0;
    bool advances = p.advances;

    if (threadIdx.x % 32 < SP_DELTA_N_CODES)
        s.count[warp][threadIdx.x % 32] = 0;
    if (threadIdx.x % 32 == 0)
        s.sum_change[warp] = 0;
    for (uint32_t begin = 0; begin < n_units; begin += STEP) {
        unit u[UNROLL];
        if (begin + STEP <= n_whole) {
#pragma unroll
            for (uint32_t q = 0; q < UNROLL; q++)
                u[q].load(p, first + begin + q * SP_DELTA_ENCODE_THREADS + threadIdx.x);
        } else {
#pragma unroll
            for (uint32_t q = 0; q < UNROLL; q++) {
                uint32_t at = begin + q * SP_DELTA_ENCODE_THREADS + threadIdx.x;
                if (at < n_whole)
                    u[q].load(p, first + at);
                else
                    u[q].load_elements(p, first + at, at < n_units ? from + n : 0);
            }
        }
#pragma unroll
        for (uint32_t q = 0; q < UNROLL; q++) {
            const uint4 now = u[q].now(), old = u[q].old;
            uint32_t any = (now.x ^ old.x) | (now.y ^ old.y) | (now.z ^ old.z) | (now.w ^ old.w);
            if (__any_sync(~0u, any != 0))
                sp_delta_list_unit<E>(s, p, now, old, from,
                                      (begin + q * SP_DELTA_ENCODE_THREADS + threadIdx.x) * unit::N,
                                      begin + STEP <= n_whole, &n_listed, &advances);
        }
    }
    sp_delta_close_list(s, p, n_listed);
    if (threadIdx.x % 32 == 0)
        s.n_listed[warp] = n_listed;
}

// ---- ranks ----

// Fill `before` for n words of bits. All threads call it. Returns the number of bits that are set.
template <int E> __device__ __forceinline__ uint32_t sp_delta_rank(sp_delta_shared<E> &s, uint32_t n)
{
    constexpr uint32_t EACH = SP_DELTA_SLICE_ELEMS / 64 / SP_DELTA_ENCODE_THREADS;
    const uint32_t begin = threadIdx.x * EACH, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint32_t own[EACH], sum = 0, scanned, total = 0;

#pragma unroll
    for (uint32_t i = 0; i < EACH; i++) {
        own[i] = sum;
        sum += begin + i < n ? (uint32_t)__popcll(s.bits[begin + i]) : 0;
    }
    scanned = sum;
#pragma unroll
    for (uint32_t by = 1; by < 32; by *= 2) {
        uint32_t lower = __shfl_up_sync(~0u, scanned, by);
        scanned += lane >= by ? lower : 0;
    }
    if (lane == 31)
        s.warp_bits[warp] = scanned;
    __syncthreads();
    scanned -= sum;
#pragma unroll
    for (uint32_t w = 0; w < SP_DELTA_ENCODE_WARPS; w++) {
        scanned += w < warp ? s.warp_bits[w] : 0;
        total += s.warp_bits[w];
    }
#pragma unroll
    for (uint32_t i = 0; i < EACH; i++)
        s.before[begin + i] = (uint16_t)(scanned + own[i]);
    __syncthreads();
    return total;
}
// Bits set before bit `at`.
template <int E>
__device__ __forceinline__ uint32_t sp_delta_rank_of(const sp_delta_shared<E> &s, uint32_t at)
{
    return s.before[at / 64] + (uint32_t)__popcll(s.bits[at / 64] & ((UINT64_C(1) << at % 64) - 1));
}

// ---- writing ----

// Where the sections of a slice lie, and what is written of it. It is written in one part, or in parts of CAP elements.
struct sp_delta_sections {
    uint32_t *low, *high, *codes;
    uint8_t *values;
    sp_delta_index index;
    uint32_t k, code;

    __device__ __forceinline__ sp_delta_sections(uint8_t *dst, sp_delta_index at, uint32_t n_changes,
                                                 uint32_t code_of)
        : low((uint32_t *)dst), high((uint32_t *)(dst + at.low_bytes)),
          codes((uint32_t *)(dst + at.low_bytes + at.high_bytes)),
          values(dst + at.low_bytes + at.high_bytes +
                 sp_delta_section_bytes(n_changes * sp_delta_code_bits(code_of))),
          index(at), k(n_changes), code(code_of)
    {
    }
};
struct sp_delta_part {
    bool is_whole;          // else others write the words at its ends too, and all words were 0 before
    uint32_t from, n_elems; // of the slice; changes and escaped values before:
    uint32_t rank, escaped;
    uint32_t n; // changes
};

__device__ __forceinline__ void sp_delta_or_bits(uint32_t *words, uint32_t at, uint32_t v, uint32_t n_bits)
{
    atomicOr(&words[at / 32], v << at % 32);
    if (at % 32 + n_bits > 32)
        atomicOr(&words[at / 32 + 1], v >> (32 - at % 32));
}

// Write bits [from, to) of a section; words[0] has bit `from`. All threads call it.
__device__ __forceinline__ void sp_delta_flush(uint32_t *section, const uint32_t *words, uint32_t from,
                                               uint32_t to, bool is_whole)
{
    const uint32_t begin = from / 32, end = (to + 31) / 32;
    for (uint32_t i = begin + threadIdx.x; i < end; i += SP_DELTA_ENCODE_THREADS)
        if (!is_whole && (i == begin || i + 1 == end))
            atomicOr(&section[i], words[i - begin]);
        else
            section[i] = words[i - begin];
}

// Place, code and "escaped" of each entry of the warp's list, into the words in shared memory.
template <int E>
__device__ __forceinline__ void sp_delta_set_bits(sp_delta_shared<E> &s, const sp_delta_sections &to,
                                                  const sp_delta_part &part)
{
    const uint32_t warp = threadIdx.x / 32, begin = warp * s.LIST, l = to.index.low_bits;
    const uint32_t w = sp_delta_code_bits(to.code), escape = to.code == 0 ? 0 : sp_delta_code_escape(to.code);
    const uint32_t low_from = part.rank * l / 32 * 32, high_from = (part.rank + (part.from >> l)) / 32 * 32;
    const uint32_t codes_from = part.rank * w / 32 * 32;

    for (uint32_t i = begin + threadIdx.x % 32; i < begin + s.n_listed[warp]; i += 32) {
        const uint32_t place = s.place[i], here = sp_delta_rank_of(s, place - part.from),
                       j = part.rank + here;
        if (!to.index.is_bitmap) {
            sp_delta_or_bits(s.low, j * l - low_from, place & ((1u << l) - 1), l);
            sp_delta_or_bits(s.high, j + (place >> l) - high_from, 1, 1);
        }
        if (to.code != 0) {
            const uint64_t found = sp_delta_number(s.now[i], s.old[i], E);
            const uint32_t number = found < escape ? (uint32_t)found : escape;
            sp_delta_or_bits(s.codes, j * w - codes_from, number, w);
            if (number == escape)
                atomicOr(&s.escaped[here / 32], 1u << here % 32);
        }
    }
}

// Fill escaped_before, by one warp.
template <int E> __device__ __forceinline__ void sp_delta_rank_escaped(sp_delta_shared<E> &s)
{
    constexpr uint32_t EACH = sp_delta_shared<E>::CAP / 32 / 32;
    const uint32_t lane = threadIdx.x % 32;
    uint32_t sum = 0, scanned;
#pragma unroll
    for (uint32_t i = 0; i < EACH; i++)
        sum += (uint32_t)__popc(s.escaped[lane * EACH + i]);
    scanned = sum;
#pragma unroll
    for (uint32_t by = 1; by < 32; by *= 2) {
        uint32_t lower = __shfl_up_sync(~0u, scanned, by);
        scanned += lane >= by ? lower : 0;
    }
    scanned -= sum;
#pragma unroll
    for (uint32_t i = 0; i < EACH; i++) {
        s.escaped_before[lane * EACH + i] = (uint16_t)scanned;
        scanned += (uint32_t)__popc(s.escaped[lane * EACH + i]);
    }
}

template <int E>
__device__ __forceinline__ void sp_delta_write_value(uint8_t *values, uint32_t i,
                                                     typename sp_unsigned<E>::type v)
{
    typedef typename sp_unsigned<E>::type U;
    if constexpr (E == 8) { // values is aligned to 4 bytes
        ((uint32_t *)values)[2 * i] = (uint32_t)v;
        ((uint32_t *)values)[2 * i + 1] = (uint32_t)(v >> 32);
    } else {
        ((U *)values)[i] = v;
    }
}
// The raw or escaped values of each warp's list.
template <int E>
__device__ __forceinline__ void sp_delta_write_values(const sp_delta_shared<E> &s,
                                                      const sp_delta_sections &to, const sp_delta_part &part)
{
    const uint32_t warp = threadIdx.x / 32, begin = warp * s.LIST;
    const uint32_t escape = to.code == 0 ? 0 : sp_delta_code_escape(to.code);
    for (uint32_t i = begin + threadIdx.x % 32; i < begin + s.n_listed[warp]; i += 32)
        if (sp_delta_number(s.now[i], s.old[i], E) >= escape) {
            uint32_t here = sp_delta_rank_of(s, s.place[i] - part.from), at;
            if (to.code == 0)
                at = part.rank + here;
            else
                at = part.escaped + s.escaped_before[here / 32] +
                     (uint32_t)__popc(s.escaped[here / 32] & ((1u << here % 32) - 1));
            sp_delta_write_value<E>(to.values, at, s.now[i]);
        }
}

// Write a part of a slice that was scanned and ranked. All threads call it. The caller fills `values` up to 4 bytes.
template <int E>
__device__ __forceinline__ void sp_delta_write_part(sp_delta_shared<E> &s, const sp_delta_sections &to,
                                                    const sp_delta_part &part)
{
    const uint32_t l = to.index.low_bits, w = sp_delta_code_bits(to.code), end = part.rank + part.n;

    sp_delta_set_bits(s, to, part);
    __syncthreads();
    if (to.index.is_bitmap) {
        sp_delta_flush(to.high, (const uint32_t *)s.bits, part.from, part.from + part.n_elems, true);
    } else {
        sp_delta_flush(to.low, s.low, part.rank * l, end * l, part.is_whole);
        sp_delta_flush(to.high, s.high, part.rank + (part.from >> l),
                       end + ((part.from + part.n_elems - 1) >> l) + 1, part.is_whole);
    }
    sp_delta_flush(to.codes, s.codes, part.rank * w, end * w, part.is_whole);
    if (to.code != 0) {
        if (threadIdx.x < 32)
            sp_delta_rank_escaped(s);
        __syncthreads();
    }
    sp_delta_write_values(s, to, part);
}

#endif
