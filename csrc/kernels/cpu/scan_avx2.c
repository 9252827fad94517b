/* scan_avx2.c - finds the listed elements of a slice in AVX2: scan.inc. */
#include "kernels/cpu/simd_avx2.h"

#include "kernels/cpu/scan.inc"

static inline __m256i load32(const uint8_t *p)
{
    return _mm256_loadu_si256((const void *)p);
}
/* Vector i of x. Elements that are not listed become -1, others 0. With ignores_sign one compare after packing is
 * faster than one for each vector: elements that are not listed become 0, others not. */
#define SCAN_VECTOR(BITS, NO_SIGN)                                                                           \
    static inline __m256i vector_##BITS(const uint8_t *x, struct compared with, size_t i)                    \
    {                                                                                                        \
        __m256i v = load32(x + i * 32);                                                                      \
        if (with.ignores_sign)                                                                               \
            return _mm256_and_si256(v, NO_SIGN);                                                             \
        return _mm256_cmpeq_epi##BITS(v, with.base == NULL ? _mm256_setzero_si256()                          \
                                                           : load32(with.base + i * 32));                    \
    }
SCAN_VECTOR(8, _mm256_set1_epi8(INT8_MAX))
SCAN_VECTOR(16, _mm256_set1_epi16(INT16_MAX))
SCAN_VECTOR(32, _mm256_set1_epi32(INT32_MAX))
SCAN_VECTOR(64, _mm256_set1_epi64x(INT64_MAX))

/* The mask of 32 elements, packed to bytes. Packing saturates, so what is not zero stays so. */
static inline uint64_t mask8(__m256i bytes, struct compared with)
{
    if (with.ignores_sign)
        bytes = _mm256_cmpeq_epi8(bytes, _mm256_setzero_si256());
    return ~(uint32_t)_mm256_movemask_epi8(bytes);
}
/* The mask of the 16-bit elements of lo, then of hi. */
static inline uint64_t mask16(__m256i lo, __m256i hi, struct compared with)
{
    return mask8(_mm256_permute4x64_epi64(_mm256_packs_epi16(lo, hi), 0xd8), with);
}
/* scan_word_u<bits>: the mask word of 64 elements. They are packed to bytes, because movemask takes one bit per
 * byte. */
static inline uint64_t scan_word_u8(const uint8_t *x, struct compared with)
{
    return mask8(vector_8(x, with, 0), with) | mask8(vector_8(x, with, 1), with) << 32;
}
static inline uint64_t scan_word_u16(const uint8_t *x, struct compared with)
{
    uint64_t lo = mask16(vector_16(x, with, 0), vector_16(x, with, 1), with);
    return lo | mask16(vector_16(x, with, 2), vector_16(x, with, 3), with) << 32;
}
static inline uint64_t scan_word_u32(const uint8_t *x, struct compared with)
{
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    uint64_t bits = 0;
    for (size_t h = 0; h < 2; h++) {
        __m256i lo = _mm256_packs_epi32(vector_32(x, with, h * 4), vector_32(x, with, h * 4 + 1));
        __m256i hi = _mm256_packs_epi32(vector_32(x, with, h * 4 + 2), vector_32(x, with, h * 4 + 3));
        bits |= mask8(_mm256_permutevar8x32_epi32(_mm256_packs_epi16(lo, hi), order), with) << h * 32;
    }
    return bits;
}
static inline uint64_t scan_word_u64(const uint8_t *x, struct compared with)
{
    uint64_t bits = 0;
    for (size_t i = 0; i < 16; i++) {
        __m256i v = vector_64(x, with, i);
        if (with.ignores_sign)
            v = _mm256_cmpeq_epi64(v, _mm256_setzero_si256());
        bits |= (uint64_t)(unsigned)_mm256_movemask_pd(_mm256_castsi256_pd(v)) << i * 4;
    }
    return ~bits;
}

#define SCAN_TAIL(NAME, BITS)                                                                                \
    static inline uint64_t scan_tail_##NAME(const uint8_t *x, struct compared with, size_t n)                \
    {                                                                                                        \
        const sp_elem_##NAME wanted = (sp_elem_##NAME)(~UINT64_C(0) >> (64 - (BITS) + with.ignores_sign));   \
        uint64_t bits = 0;                                                                                   \
        for (size_t i = 0; i < n; i++)                                                                       \
            bits |= (uint64_t)((sp_get_##NAME(x, i) & wanted) !=                                             \
                               (with.base == NULL ? 0 : sp_get_##NAME(with.base, i)))                        \
                    << i;                                                                                    \
        return bits;                                                                                         \
    }
SCAN_TAIL(u8, 8)
SCAN_TAIL(u16, 16)
SCAN_TAIL(u32, 32)
SCAN_TAIL(u64, 64)
