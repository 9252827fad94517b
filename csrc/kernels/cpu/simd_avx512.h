/* simd_avx512.h - the primitives that offset_list.h, tile.inc, pici.inc, coo.inc and bulk.inc need, in
 * AVX-512 (f, bw, dq, vl, vbmi, vbmi2). The code compresses into a register and then stores: on Zen 4
 * vpcompress to memory is microcoded. */
#ifndef SP_SIMD_AVX512_H
#define SP_SIMD_AVX512_H

#include "kernels/cpu/elem.h"

#include <immintrin.h>

#define SP_ISA_NAME(x) x##_avx512
#define SP_SIMD_BYTES 64u
#define SIMD_LANES 16u

/* ---- bulk ---- */

static inline void simd_nt_end(void)
{
    _mm_sfence();
}
/* Number of bytes from dst to the next cache line, at most `bytes`. */
static inline size_t simd_head(const void *dst, size_t bytes)
{
    return sp_min_size((size_t)(-(uintptr_t)dst & 63u), bytes);
}
/* Mask of the first n < 64 bytes. */
static inline __mmask64 simd_low64(size_t n)
{
    return _bzhi_u64(~UINT64_C(0), (unsigned)n);
}
/* Copy with non-temporal stores. Bytes before the first and after the last whole cache line use masked
 * stores. */
static inline void simd_store_nt(uint8_t *dst, const uint8_t *src, size_t bytes)
{
    size_t i = simd_head(dst, bytes);
    if (i != 0) {
        __mmask64 m = simd_low64(i);
        _mm512_mask_storeu_epi8(dst, m, _mm512_maskz_loadu_epi8(m, src));
    }
    for (; i + 256 <= bytes; i += 256) {
        __m512i v0 = _mm512_loadu_si512(src + i), v1 = _mm512_loadu_si512(src + i + 64);
        __m512i v2 = _mm512_loadu_si512(src + i + 128), v3 = _mm512_loadu_si512(src + i + 192);
        _mm512_stream_si512((void *)(dst + i), v0);
        _mm512_stream_si512((void *)(dst + i + 64), v1);
        _mm512_stream_si512((void *)(dst + i + 128), v2);
        _mm512_stream_si512((void *)(dst + i + 192), v3);
    }
    for (; i + 64 <= bytes; i += 64)
        _mm512_stream_si512((void *)(dst + i), _mm512_loadu_si512(src + i));
    if (i < bytes) {
        __mmask64 m = simd_low64(bytes - i);
        _mm512_mask_storeu_epi8(dst + i, m, _mm512_maskz_loadu_epi8(m, src + i));
    }
}
static inline void simd_nt_zero(uint8_t *dst, size_t bytes)
{
    const __m512i zero = _mm512_setzero_si512();
    size_t i = simd_head(dst, bytes);
    _mm512_mask_storeu_epi8(dst, simd_low64(i), zero);
    for (; i + 64 <= bytes; i += 64)
        _mm512_stream_si512((void *)(dst + i), zero);
    _mm512_mask_storeu_epi8(dst + i, simd_low64(bytes - i), zero);
}

/* ---- float16. As dtype.h demands, vcvtph2ps and vcvtps2ph make NaNs quiet and keep the upper payload bits.
 */

static inline void simd_f16_vector(float *out, const uint8_t *in)
{
    _mm512_storeu_ps(out, _mm512_cvtph_ps(_mm256_loadu_si256((const void *)in)));
}
static inline void simd_to_f16_vector(uint8_t *out, const float *in)
{
    _mm256_storeu_si256((void *)out,
                        _mm512_cvtps_ph(_mm512_loadu_ps(in), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

/* ---- bfloat16 and float32 sums ---- */

static inline void simd_bf16_vector(float *out, const uint8_t *in)
{
    __m512i v = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)in));
    _mm512_storeu_si512(out, _mm512_slli_epi32(v, 16));
}
static inline void simd_to_bf16_vector(uint8_t *out, const float *in)
{
    const __m512i half = _mm512_set1_epi32(0x7fff), one = _mm512_set1_epi32(1),
                  quiet = _mm512_set1_epi32(0x40);
    __m512i u = _mm512_loadu_si512(in), up = _mm512_srli_epi32(u, 16);
    __m512i odd = _mm512_and_si512(up, one);
    __m512i r = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(u, half), odd), 16);
    __mmask16 nan = _mm512_cmp_ps_mask(_mm512_castsi512_ps(u), _mm512_castsi512_ps(u), _CMP_UNORD_Q);
    r = _mm512_mask_or_epi32(r, nan, up, quiet);
    _mm256_storeu_si256((void *)out, _mm512_cvtepi32_epi16(r));
}
static inline bool simd_sum_vector(uint8_t *to, const uint8_t *from, bool listed)
{
    __m512 a = _mm512_loadu_ps(to), v = _mm512_loadu_ps(from), sum = _mm512_add_ps(a, v);
    if (SP_UNLIKELY(_mm512_cmp_ps_mask(sum, sum, _CMP_UNORD_Q) != 0))
        return false;
    if (listed)
        sum = _mm512_mask_mov_ps(a, _mm512_test_epi32_mask(_mm512_castps_si512(v), _mm512_castps_si512(v)),
                                 sum);
    _mm512_storeu_ps(to, sum);
    return true;
}

#include "kernels/cpu/simd_arrays.inc"

/* ---- offset lists: both functions write whole vectors, up to 64 entries past the end ---- */

static inline __m512i simd_iota8(void)
{
    return _mm512_set_epi8(63, 62, 61, 60, 59, 58, 57, 56, 55, 54, 53, 52, 51, 50, 49, 48, 47, 46, 45, 44, 43,
                           42, 41, 40, 39, 38, 37, 36, 35, 34, 33, 32, 31, 30, 29, 28, 27, 26, 25, 24, 23, 22,
                           21, 20, 19, 18, 17, 16, 15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
}
/* offs[j] = (position of the j-th set bit << shift) + add. Returns the number of set bits.
 * With `dense`, both halves of 32 entries are always written: near 32 set bits, a branch would be
 * mispredicted every other time. Writing 16 entries at a time was a third slower; we do not know why. */
static inline unsigned simd_bits_to_offs(uint64_t bits, unsigned shift, unsigned add, bool dense,
                                         uint16_t *offs)
{
    const __m512i positions = _mm512_maskz_compress_epi8(bits, simd_iota8());
    const __m512i plus = _mm512_set1_epi16((short)add), by = _mm512_set1_epi16((short)shift);
    unsigned n = sp_popcount64(bits);
    __m512i lo = _mm512_cvtepu8_epi16(_mm512_castsi512_si256(positions));
    _mm512_storeu_si512(offs, _mm512_add_epi16(_mm512_sllv_epi16(lo, by), plus));
    if (dense || SP_UNLIKELY(n > 32)) {
        __m512i hi = _mm512_cvtepu8_epi16(_mm512_extracti64x4_epi64(positions, 1));
        _mm512_storeu_si512(offs + 32, _mm512_add_epi16(_mm512_sllv_epi16(hi, by), plus));
    }
    return n;
}
/* The same without shift, for words with few set bits. */
static inline unsigned simd_few_bits_to_offs(uint64_t bits, unsigned add, bool many, uint16_t *offs)
{
    return simd_bits_to_offs(bits, 0, add, many, offs);
}
/* offs[j] = bytes[j] + add for n <= 255 bytes. `readable` is the number of bytes that may be read. */
static inline void simd_bytes_to_offs(const uint8_t *bytes, size_t n, size_t readable, unsigned add,
                                      uint16_t *offs)
{
    const __m512i plus = _mm512_set1_epi16((short)add);
    if (n <= 16 && SP_LIKELY(readable >= 16)) {
        __m256i v = _mm256_cvtepu8_epi16(_mm_loadu_si128((const void *)bytes));
        _mm256_storeu_si256((void *)offs, _mm256_add_epi16(v, _mm512_castsi512_si256(plus)));
        return;
    }
    for (size_t j = 0; j < n; j += 32) {
        __m256i v =
            SP_LIKELY(j + 32 <= readable)
                ? _mm256_loadu_si256((const void *)(bytes + j))
                : _mm256_maskz_loadu_epi8((__mmask32)_bzhi_u32(~0u, (unsigned)(readable - j)), bytes + j);
        _mm512_storeu_si512(offs + j, _mm512_add_epi16(_mm512_cvtepu8_epi16(v), plus));
    }
}

/* ---- bits ---- */

/* Transpose a 64x64 bit matrix: bit r of out[c] = bit c of in[r]. First, byte g of every row is gathered into
 * one vector. Then one test per bit of that byte gives a column. */
static inline void simd_transpose64(const uint64_t in[64], uint8_t *out)
{
    /* In a vector of 8 rows: moves byte g of all 8 rows side by side. */
    const __m512i gather8 =
        _mm512_set_epi8(63, 55, 47, 39, 31, 23, 15, 7, 62, 54, 46, 38, 30, 22, 14, 6, 61, 53, 45, 37, 29, 21,
                        13, 5, 60, 52, 44, 36, 28, 20, 12, 4, 59, 51, 43, 35, 27, 19, 11, 3, 58, 50, 42, 34,
                        26, 18, 10, 2, 57, 49, 41, 33, 25, 17, 9, 1, 56, 48, 40, 32, 24, 16, 8, 0);
    _Alignas(64) uint64_t by8[8][8]; /* [rows 8i..8i+7][g] */
    for (size_t i = 0; i < 8; i++)
        _mm512_store_si512(by8[i], _mm512_permutexvar_epi8(gather8, _mm512_loadu_si512(in + 8 * i)));
    for (size_t g = 0; g < 8; g++) {
        __m512i v = _mm512_set_epi64((long long)by8[7][g], (long long)by8[6][g], (long long)by8[5][g],
                                     (long long)by8[4][g], (long long)by8[3][g], (long long)by8[2][g],
                                     (long long)by8[1][g], (long long)by8[0][g]);
        for (unsigned b = 0; b < 8; b++)
            sp_put_u64(out, g * 8 + b, _mm512_test_epi8_mask(v, _mm512_set1_epi8((char)(1u << b))));
    }
}

#endif
