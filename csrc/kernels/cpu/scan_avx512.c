/* scan_avx512.c - finds the listed elements of a slice: one pass, one mask word per 64 elements. */
#include "kernels/cpu/kernels.h"
#include "kernels/cpu/simd_avx512.h"

/* Distance of the software prefetch. The hardware prefetcher stops at the end of a 4 KiB page. */
#define SCAN_AHEAD_BYTES 4096u

/* scan_vector_<bits>: compare the SP_SIMD_BYTES at x with those at base; if base is NULL, find elements with any of
 * the bits `wanted`. scan_part_<bits> does the same, but reads only the first n elements. */
#define SCAN_VECTOR(BITS, MASK, TYPE)                                                                        \
    static inline uint64_t scan_vector_##BITS(const uint8_t *x, const uint8_t *base, __m512i wanted)         \
    {                                                                                                        \
        __m512i v = _mm512_loadu_si512(x);                                                                   \
        return base == NULL ? _mm512_test_epi##BITS##_mask(v, wanted)                                        \
                            : _mm512_cmpneq_epi##BITS##_mask(v, _mm512_loadu_si512(base));                   \
    }                                                                                                        \
    static inline uint64_t scan_part_##BITS(const uint8_t *x, const uint8_t *base, __m512i wanted, size_t n) \
    {                                                                                                        \
        __mmask64 m = simd_low64(n);                                                                         \
        __m512i v = _mm512_maskz_loadu_epi##BITS((MASK)m, x);                                                \
        return base == NULL                                                                                  \
                   ? _mm512_test_epi##BITS##_mask(v, wanted)                                                 \
                   : _mm512_cmpneq_epi##BITS##_mask(v, _mm512_maskz_loadu_epi##BITS((MASK)m, base));         \
    }                                                                                                        \
    /* The mask word of 64 elements. */                                                                      \
    static inline uint64_t scan_word_##BITS(const uint8_t *x, const uint8_t *base, __m512i wanted)           \
    {                                                                                                        \
        uint64_t bits = 0;                                                                                   \
        for (unsigned i = 0; i < (BITS) / 8; i++)                                                            \
            bits |= scan_vector_##BITS(x + i * 64, base == NULL ? NULL : base + i * 64, wanted)              \
                    << i * (512 / (BITS));                                                                   \
        return bits;                                                                                         \
    }                                                                                                        \
    /* The mask word of the last n < 64 elements. */                                                         \
    static inline uint64_t scan_tail_##BITS(const uint8_t *x, const uint8_t *base, __m512i wanted, size_t n) \
    {                                                                                                        \
        const size_t per = 512 / (BITS);                                                                     \
        uint64_t bits = 0;                                                                                   \
        for (size_t i = 0; i * per < n; i++)                                                                 \
            bits |= scan_part_##BITS(x + i * 64, base == NULL ? NULL : base + i * 64, wanted,                \
                                     sp_min_size(per, n - i * per))                                          \
                    << i * per;                                                                              \
        return bits;                                                                                         \
    }                                                                                                        \
    static inline void scan_all_##BITS(sp_scan_args *a, const uint8_t *x, const uint8_t *base)               \
    {                                                                                                        \
        const size_t word_bytes = 8 * (BITS), n_words = a->n_elems / 64;                                     \
        const uint64_t ones = ~UINT64_C(0) >> (64 - (BITS) + (a->ignores_sign ? 1 : 0));                     \
        const __m512i wanted = _mm512_set1_epi##BITS((TYPE)ones);                                            \
        size_t nnz = 0, w = 0;                                                                               \
        bool full = false;                                                                                   \
        for (; w + 4 <= n_words; w += 4) {                                                                   \
            unsigned in_tile = 0;                                                                            \
            for (size_t i = 0; i < 4; i++) {                                                                 \
                for (size_t j = 0; j < word_bytes; j += 64)                                                  \
                    _mm_prefetch((const char *)x + (w + i) * word_bytes + j + SCAN_AHEAD_BYTES,              \
                                 _MM_HINT_T1);                                                               \
                uint64_t bits = scan_word_##BITS(x + (w + i) * word_bytes,                                   \
                                                 base == NULL ? NULL : base + (w + i) * word_bytes, wanted); \
                a->mask[w + i] = bits;                                                                       \
                in_tile += sp_popcount64(bits);                                                              \
            }                                                                                                \
            a->tile_nnz[w / 4] = (uint16_t)in_tile;                                                          \
            full |= in_tile == SP_TILE_ELEMS;                                                                \
            nnz += in_tile;                                                                                  \
        }                                                                                                    \
        if (w * 64 < a->n_elems) { /* a last block of fewer than 256 elements */                             \
            unsigned in_tile = 0;                                                                            \
            for (; w * 64 < a->n_elems; w++) {                                                               \
                const uint8_t *b = base == NULL ? NULL : base + w * word_bytes;                              \
                uint64_t bits = w < n_words                                                                  \
                                    ? scan_word_##BITS(x + w * word_bytes, b, wanted)                        \
                                    : scan_tail_##BITS(x + w * word_bytes, b, wanted, a->n_elems % 64);      \
                a->mask[w] = bits;                                                                           \
                in_tile += sp_popcount64(bits);                                                              \
            }                                                                                                \
            a->tile_nnz[(w - 1) / 4] = (uint16_t)in_tile;                                                    \
            nnz += in_tile;                                                                                  \
        }                                                                                                    \
        a->nnz = nnz;                                                                                        \
        a->has_full_tile = full;                                                                             \
    }
SCAN_VECTOR(8, __mmask64, char)
SCAN_VECTOR(16, __mmask32, short)
SCAN_VECTOR(32, __mmask16, int)
SCAN_VECTOR(64, __mmask8, long long)

/* The compiler makes two copies of the loop: without base, and with base. */
#define SCAN_CALL(BITS)                                                                                      \
    do {                                                                                                     \
        if (a->base == NULL)                                                                                 \
            scan_all_##BITS(a, a->x, NULL);                                                                  \
        else                                                                                                 \
            scan_all_##BITS(a, a->x, a->base);                                                               \
    } while (0)

void sp_scan_avx512(sp_scan_args *a)
{
    if (a->elem_bytes == 4)
        SCAN_CALL(32);
    else if (a->elem_bytes == 2)
        SCAN_CALL(16);
    else if (a->elem_bytes == 8)
        SCAN_CALL(64);
    else
        SCAN_CALL(8);
}
