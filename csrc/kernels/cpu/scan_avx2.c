/* scan_avx2.c - finds the listed elements of a slice: one pass, one mask word per 64 elements. */
#include "kernels/cpu/kernels.h"
#include "kernels/cpu/simd_avx2.h"

/* Distance of the software prefetch. The hardware prefetcher stops at the end of a 4 KiB page. */
#define SCAN_AHEAD_BYTES 4096u

static inline __m256i load32(const uint8_t *p)
{
    return _mm256_loadu_si256((const void *)p);
}
/* Compare vector i: all bits are set in elements that equal base. If base is NULL, compare with zero. */
#define SCAN_EQ(BITS)                                                                                        \
    static inline __m256i equal_##BITS(const uint8_t *x, const uint8_t *base, size_t i)                      \
    {                                                                                                        \
        return _mm256_cmpeq_epi##BITS(load32(x + i * 32),                                                    \
                                      base == NULL ? _mm256_setzero_si256() : load32(base + i * 32));        \
    }
SCAN_EQ(8)
SCAN_EQ(16)
SCAN_EQ(32)
SCAN_EQ(64)

/* One bit per 16-bit element of lo, then of hi. */
static inline uint64_t pack16(__m256i lo, __m256i hi)
{
    __m256i bytes = _mm256_permute4x64_epi64(_mm256_packs_epi16(lo, hi), 0xd8);
    return (uint32_t)_mm256_movemask_epi8(bytes);
}
/* scan_word_<bits>: the mask word of 64 elements, with a bit set for each element that differs. The results
 * of the compares are packed to bytes, because movemask takes one bit per byte. */
static inline uint64_t scan_word_8(const uint8_t *x, const uint8_t *base)
{
    uint64_t lo = (uint32_t)_mm256_movemask_epi8(equal_8(x, base, 0));
    uint64_t hi = (uint32_t)_mm256_movemask_epi8(equal_8(x, base, 1));
    return ~(lo | hi << 32);
}
static inline uint64_t scan_word_16(const uint8_t *x, const uint8_t *base)
{
    uint64_t lo = pack16(equal_16(x, base, 0), equal_16(x, base, 1));
    return ~(lo | pack16(equal_16(x, base, 2), equal_16(x, base, 3)) << 32);
}
static inline uint64_t scan_word_32(const uint8_t *x, const uint8_t *base)
{
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    uint64_t bits = 0;
    for (size_t h = 0; h < 2; h++) {
        __m256i lo = _mm256_packs_epi32(equal_32(x, base, h * 4), equal_32(x, base, h * 4 + 1));
        __m256i hi = _mm256_packs_epi32(equal_32(x, base, h * 4 + 2), equal_32(x, base, h * 4 + 3));
        __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(lo, hi), order);
        bits |= (uint64_t)(uint32_t)_mm256_movemask_epi8(bytes) << h * 32;
    }
    return ~bits;
}
static inline uint64_t scan_word_64(const uint8_t *x, const uint8_t *base)
{
    uint64_t bits = 0;
    for (size_t i = 0; i < 16; i++)
        bits |= (uint64_t)(unsigned)_mm256_movemask_pd(_mm256_castsi256_pd(equal_64(x, base, i))) << i * 4;
    return ~bits;
}

#define SCAN_ALL(BITS, NAME)                                                                                 \
    static inline void scan_all_##BITS(sp_scan_args *a, const uint8_t *x, const uint8_t *base)               \
    {                                                                                                        \
        const size_t word_bytes = 8 * (BITS), n_words = a->n_elems / 64;                                     \
        size_t nnz = 0, w = 0;                                                                               \
        bool full = false;                                                                                   \
        while (w * 64 < a->n_elems) {                                                                        \
            size_t first = w;                                                                                \
            unsigned in_tile = 0;                                                                            \
            for (; w < sp_min_size(first + 4, n_words); w++) {                                               \
                for (size_t j = 0; j < word_bytes; j += 64)                                                  \
                    _mm_prefetch((const char *)x + w * word_bytes + j + SCAN_AHEAD_BYTES, _MM_HINT_T1);      \
                a->mask[w] =                                                                                 \
                    scan_word_##BITS(x + w * word_bytes, base == NULL ? NULL : base + w * word_bytes);       \
                in_tile += sp_popcount64(a->mask[w]);                                                        \
            }                                                                                                \
            if (w < first + 4 && w * 64 < a->n_elems) { /* a last word of fewer than 64 elements */          \
                uint64_t bits = 0;                                                                           \
                for (size_t i = w * 64; i < a->n_elems; i++)                                                 \
                    bits |= (uint64_t)(sp_get_##NAME(x, i) != (base == NULL ? 0 : sp_get_##NAME(base, i)))   \
                            << i % 64;                                                                       \
                a->mask[w++] = bits;                                                                         \
                in_tile += sp_popcount64(bits);                                                              \
            }                                                                                                \
            a->tile_nnz[first / 4] = (uint16_t)in_tile;                                                      \
            full |= in_tile == SP_TILE_ELEMS;                                                                \
            nnz += in_tile;                                                                                  \
        }                                                                                                    \
        a->nnz = nnz;                                                                                        \
        a->has_full_tile = full;                                                                             \
    }
SCAN_ALL(8, u8)
SCAN_ALL(16, u16)
SCAN_ALL(32, u32)
SCAN_ALL(64, u64)

/* The compiler makes two copies of the loop: without base, and with base. */
#define SCAN_CALL(BITS)                                                                                      \
    do {                                                                                                     \
        if (a->base == NULL)                                                                                 \
            scan_all_##BITS(a, a->x, NULL);                                                                  \
        else                                                                                                 \
            scan_all_##BITS(a, a->x, a->base);                                                               \
    } while (0)

void sp_scan_avx2(sp_scan_args *a)
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
