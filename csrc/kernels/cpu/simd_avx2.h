/* simd_avx2.h - the primitives that offset_list.h, tile.inc, pici.inc, coo.inc and bulk.inc need, in AVX2
 * (with bmi1, bmi2, popcnt, lzcnt, f16c). */
#ifndef SP_SIMD_AVX2_H
#define SP_SIMD_AVX2_H

#include "kernels/cpu/elem.h"
#include "kernels/cpu/transpose.h"

#include <immintrin.h>

#define SP_ISA_NAME(x) x##_avx2
#define SIMD_LANES 8u

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
/* Copy with non-temporal stores. Bytes before the first and after the last whole cache line use memcpy. */
static inline void simd_store_nt(uint8_t *dst, const uint8_t *src, size_t bytes)
{
    size_t i = simd_head(dst, bytes);
    memcpy(dst, src, i);
    for (; i + 64 <= bytes; i += 64) {
        __m256i v0 = _mm256_loadu_si256((const void *)(src + i)),
                v1 = _mm256_loadu_si256((const void *)(src + i + 32));
        _mm256_stream_si256((void *)(dst + i), v0);
        _mm256_stream_si256((void *)(dst + i + 32), v1);
    }
    memcpy(dst + i, src + i, bytes - i);
}
static inline void simd_nt_zero(uint8_t *dst, size_t bytes)
{
    size_t i = simd_head(dst, bytes);
    memset(dst, 0, i);
    for (; i + 64 <= bytes; i += 64) {
        _mm256_stream_si256((void *)(dst + i), _mm256_setzero_si256());
        _mm256_stream_si256((void *)(dst + i + 32), _mm256_setzero_si256());
    }
    memset(dst + i, 0, bytes - i);
}

/* ---- float16. As dtype.h demands, vcvtph2ps and vcvtps2ph make NaNs quiet and keep the upper payload bits.
 */

static inline void simd_f16_vector(float *out, const uint8_t *in)
{
    _mm256_storeu_ps(out, _mm256_cvtph_ps(_mm_loadu_si128((const void *)in)));
}
static inline void simd_to_f16_vector(uint8_t *out, const float *in)
{
    _mm_storeu_si128((void *)out, _mm256_cvtps_ph(_mm256_loadu_ps(in), _MM_FROUND_TO_NEAREST_INT));
}

/* ---- bfloat16 and float32 sums ---- */

static inline void simd_bf16_vector(float *out, const uint8_t *in)
{
    __m256i v = _mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)in));
    _mm256_storeu_si256((void *)out, _mm256_slli_epi32(v, 16));
}
static inline void simd_to_bf16_vector(uint8_t *out, const float *in)
{
    const __m256i half = _mm256_set1_epi32(0x7fff), one = _mm256_set1_epi32(1),
                  quiet = _mm256_set1_epi32(0x40);
    __m256i u = _mm256_loadu_si256((const void *)in), up = _mm256_srli_epi32(u, 16);
    __m256i odd = _mm256_and_si256(up, one);
    __m256i r = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(u, half), odd), 16);
    __m256 nan = _mm256_cmp_ps(_mm256_castsi256_ps(u), _mm256_castsi256_ps(u), _CMP_UNORD_Q);
    r = _mm256_blendv_epi8(r, _mm256_or_si256(up, quiet), _mm256_castps_si256(nan));
    r = _mm256_permute4x64_epi64(_mm256_packus_epi32(r, r), 0x08);
    _mm_storeu_si128((void *)out, _mm256_castsi256_si128(r));
}
static inline bool simd_sum_vector(uint8_t *to, const uint8_t *from, bool listed)
{
    __m256 a = _mm256_loadu_ps((const void *)to), v = _mm256_loadu_ps((const void *)from);
    __m256 sum = _mm256_add_ps(a, v);
    if (SP_UNLIKELY(_mm256_movemask_ps(_mm256_cmp_ps(sum, sum, _CMP_UNORD_Q)) != 0))
        return false;
    if (listed) {
        __m256i zero = _mm256_cmpeq_epi32(_mm256_castps_si256(v), _mm256_setzero_si256());
        sum = _mm256_blendv_ps(sum, a, _mm256_castsi256_ps(zero));
    }
    _mm256_storeu_ps((void *)to, sum);
    return true;
}

#include "kernels/cpu/simd_arrays.inc"

/* ---- offset lists: both functions write whole groups, up to 64 entries past the end ---- */

/* offs[j] = (position of the j-th set bit << shift) + add. Returns the number of set bits.
 * Groups of 8 entries are written without a test per bit: a mispredicted branch costs more. After the last
 * bit tzcnt returns 64, and the next call overwrites those entries. `dense` is for AVX-512; not used here. */
static inline unsigned simd_bits_to_offs(uint64_t bits, unsigned shift, unsigned add, bool dense,
                                         uint16_t *offs)
{
    unsigned n = sp_popcount64(bits), j = 0;
    (void)dense;
    do {
        for (unsigned i = 0; i < 8; i++) {
            offs[j + i] = (uint16_t)((_tzcnt_u64(bits) << shift) + add);
            bits = _blsr_u64(bits);
        }
        j += 8;
    } while (SP_UNLIKELY(j < n));
    return n;
}
/* Four entries of the list, of bits without shift. After the last bit come 64s; a carry spoils only what lies behind. */
static inline uint64_t simd_four_offs(uint64_t *bits)
{
    uint64_t four = 0;
    for (unsigned i = 0; i < 4; i++) {
        four |= (uint64_t)_tzcnt_u64(*bits) << (16 * i);
        *bits = _blsr_u64(*bits);
    }
    return four;
}
/* simd_bits_to_offs without shift for words with few bits: groups of 4, with `many` of 8, put together in registers. */
static inline unsigned simd_few_bits_to_offs(uint64_t bits, unsigned add, bool many, uint16_t *offs)
{
    const uint64_t plus = add * UINT64_C(0x0001000100010001);
    unsigned n = sp_popcount64(bits), j = 0;
    do {
        sp_store_le64(offs + j, simd_four_offs(&bits) + plus);
        if (many)
            sp_store_le64(offs + j + 4, simd_four_offs(&bits) + plus);
        j += many ? 8 : 4;
    } while (SP_UNLIKELY(j < n));
    return n;
}
/* offs[j] = bytes[j] + add for n <= 255 bytes. `readable` is the number of bytes that may be read. */
static inline void simd_bytes_to_offs(const uint8_t *bytes, size_t n, size_t readable, unsigned add,
                                      uint16_t *offs)
{
    const __m256i plus = _mm256_set1_epi16((short)add);
    for (size_t j = 0; j < n; j += 16) {
        if (SP_LIKELY(j + 16 <= readable)) {
            __m256i v = _mm256_cvtepu8_epi16(_mm_loadu_si128((const void *)(bytes + j)));
            _mm256_storeu_si256((void *)(offs + j), _mm256_add_epi16(v, plus));
        } else {
            for (size_t i = j; i < n; i++)
                offs[i] = (uint16_t)(bytes[i] + add);
        }
    }
}

/* ---- bits ---- */

static inline void simd_transpose64(const uint64_t in[64], uint8_t *out)
{
    sp_transpose64(in, out);
}

#endif
