/* scan_avx2.c - finds the listed elements of a slice: one pass, one mask word per 64 elements. */
#include "kernels/cpu/kernels.h"
#include "kernels/cpu/simd_avx2.h"

/* Distance of the software prefetch. The hardware prefetcher stops at the end of a 4 KiB page. */
#define SCAN_AHEAD_BYTES 4096u

static inline __m256i load32(const uint8_t *p)
{
    return _mm256_loadu_si256((const void *)p);
}
/* Which elements are listed: those that differ from a base, or from zero; with ignores_sign, in a bit other than the
 * highest. */
struct compared {
    const uint8_t *base; /* or NULL */
    bool ignores_sign;
};
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
/* scan_word_<bits>: the mask word of 64 elements. They are packed to bytes, because movemask takes one bit per
 * byte. */
static inline uint64_t scan_word_8(const uint8_t *x, struct compared with)
{
    return mask8(vector_8(x, with, 0), with) | mask8(vector_8(x, with, 1), with) << 32;
}
static inline uint64_t scan_word_16(const uint8_t *x, struct compared with)
{
    uint64_t lo = mask16(vector_16(x, with, 0), vector_16(x, with, 1), with);
    return lo | mask16(vector_16(x, with, 2), vector_16(x, with, 3), with) << 32;
}
static inline uint64_t scan_word_32(const uint8_t *x, struct compared with)
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
static inline uint64_t scan_word_64(const uint8_t *x, struct compared with)
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

#define SCAN_ALL(BITS, NAME)                                                                                 \
    static inline void scan_all_##BITS(sp_scan_args *a, const uint8_t *x, struct compared with)              \
    {                                                                                                        \
        const size_t word_bytes = 8 * (BITS), n_words = a->n_elems / 64;                                     \
        const sp_elem_##NAME wanted = (sp_elem_##NAME)(~UINT64_C(0) >> (64 - (BITS) + with.ignores_sign));   \
        size_t nnz = 0, w = 0;                                                                               \
        bool full = false;                                                                                   \
        while (w * 64 < a->n_elems) {                                                                        \
            size_t first = w;                                                                                \
            unsigned in_tile = 0;                                                                            \
            for (; w < sp_min_size(first + 4, n_words); w++) {                                               \
                for (size_t j = 0; j < word_bytes; j += 64)                                                  \
                    _mm_prefetch((const char *)x + w * word_bytes + j + SCAN_AHEAD_BYTES, _MM_HINT_T1);      \
                struct compared here = with;                                                                 \
                if (with.base != NULL)                                                                       \
                    here.base += w * word_bytes;                                                             \
                a->mask[w] = scan_word_##BITS(x + w * word_bytes, here);                                     \
                in_tile += sp_popcount64(a->mask[w]);                                                        \
            }                                                                                                \
            if (w < first + 4 && w * 64 < a->n_elems) { /* a last word of fewer than 64 elements */          \
                uint64_t bits = 0;                                                                           \
                for (size_t i = w * 64; i < a->n_elems; i++)                                                 \
                    bits |= (uint64_t)((sp_get_##NAME(x, i) & wanted) !=                                     \
                                       (with.base == NULL ? 0 : sp_get_##NAME(with.base, i)))                \
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

/* The compiler makes three copies of the loop. */
#define SCAN_CALL(BITS)                                                                                      \
    do {                                                                                                     \
        if (a->base != NULL)                                                                                 \
            scan_all_##BITS(a, a->x, (struct compared){a->base, false});                                     \
        else if (a->ignores_sign)                                                                            \
            scan_all_##BITS(a, a->x, (struct compared){NULL, true});                                         \
        else                                                                                                 \
            scan_all_##BITS(a, a->x, (struct compared){NULL, false});                                        \
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
