/* scan_avx512.c - finds the listed elements of a slice in AVX-512: scan.inc. */
#include "kernels/cpu/simd_avx512.h"

#include "kernels/cpu/scan.inc"

#define SCAN_VECTOR(BITS, MASK, TYPE)                                                                        \
    /* The mask bits of the first n elements of vector i of x. */                                            \
    static inline uint64_t vector_##BITS(const uint8_t *x, struct compared with, size_t i, size_t n)         \
    {                                                                                                        \
        const TYPE ones = (TYPE)(~UINT64_C(0) >> (64 - (BITS) + with.ignores_sign));                         \
        const bool whole = n >= 512 / (BITS);                                                                \
        const MASK m = whole ? (MASK)-1 : (MASK)simd_low64(n);                                               \
        __m512i v = whole ? _mm512_loadu_si512(x + i * 64) : _mm512_maskz_loadu_epi##BITS(m, x + i * 64);    \
        if (with.base == NULL)                                                                               \
            return _mm512_test_epi##BITS##_mask(v, _mm512_set1_epi##BITS(ones));                             \
        return _mm512_cmpneq_epi##BITS##_mask(v, whole                                                       \
                                                     ? _mm512_loadu_si512(with.base + i * 64)                \
                                                     : _mm512_maskz_loadu_epi##BITS(m, with.base + i * 64)); \
    }                                                                                                        \
    static inline uint64_t scan_word_u##BITS(const uint8_t *x, struct compared with)                         \
    {                                                                                                        \
        uint64_t bits = 0;                                                                                   \
        for (size_t i = 0; i < (BITS) / 8; i++)                                                              \
            bits |= vector_##BITS(x, with, i, 512 / (BITS)) << i * (512 / (BITS));                           \
        return bits;                                                                                         \
    }                                                                                                        \
    static inline uint64_t scan_tail_u##BITS(const uint8_t *x, struct compared with, size_t n)               \
    {                                                                                                        \
        const size_t per = 512 / (BITS);                                                                     \
        uint64_t bits = 0;                                                                                   \
        for (size_t i = 0; i * per < n; i++)                                                                 \
            bits |= vector_##BITS(x, with, i, n - i * per) << i * per;                                       \
        return bits;                                                                                         \
    }
SCAN_VECTOR(8, __mmask64, char)
SCAN_VECTOR(16, __mmask32, short)
SCAN_VECTOR(32, __mmask16, int)
SCAN_VECTOR(64, __mmask8, long long)
