/* transpose_avx512.h - converts a full 64x64 pici tile between row order and packed column order, for
 * elements of 4 or 2 bytes. It transposes blocks of 16x16 32-bit words in registers. The cost does not depend
 * on the density, so this is faster when many elements are listed; pici_avx512.c holds the thresholds. For
 * 2-byte elements, two rows are interleaved into rows of 32-bit words, and the same transpose is used. */
#ifndef SP_TRANSPOSE_AVX512_H
#define SP_TRANSPOSE_AVX512_H

#include "kernels/cpu/simd_avx512.h"

/* Swap word j of v[i] with word i of v[j], for all i and j. */
static inline void transpose16(__m512i v[16])
{
    __m512i t[16], u[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        u[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        u[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        u[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        u[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    } /* 128-bit quarter q of u[i + j] holds column 4q + j of rows i .. i+3 */
    for (int j = 0; j < 4; j++) {
        __m512i a = _mm512_shuffle_i32x4(u[j], u[4 + j], 0x88),
                b = _mm512_shuffle_i32x4(u[j], u[4 + j], 0xdd);
        __m512i c = _mm512_shuffle_i32x4(u[8 + j], u[12 + j], 0x88);
        __m512i d = _mm512_shuffle_i32x4(u[8 + j], u[12 + j], 0xdd);
        v[j] = _mm512_shuffle_i32x4(a, c, 0x88);
        v[4 + j] = _mm512_shuffle_i32x4(b, d, 0x88);
        v[8 + j] = _mm512_shuffle_i32x4(a, c, 0xdd);
        v[12 + j] = _mm512_shuffle_i32x4(b, d, 0xdd);
    }
}

/* ---- 4-byte elements. With `exact`, each of the four functions below touches no byte after the listed
 * values: the caller sets it near the end of the frame. */

/* Pack the listed elements of x [64][64] at out, by column. Returns the end of what was written. */
static inline uint8_t *pack_tile_u32(const uint8_t *x, const uint8_t *meta, uint8_t *out, bool exact)
{
    _Alignas(64) uint32_t cols[16][64];
    for (size_t g = 0; g < 4; g++) {
        for (size_t q = 0; q < 4; q++) {
            __m512i v[16];
            for (size_t r = 0; r < 16; r++)
                v[r] = _mm512_loadu_si512(x + ((q * 16 + r) * 64 + g * 16) * 4);
            transpose16(v);
            for (size_t c = 0; c < 16; c++)
                _mm512_store_si512(cols[c] + q * 16, v[c]);
        }
        for (size_t c = 0; c < 16; c++) {
            uint64_t bits = sp_get_u64(meta, g * 16 + c);
            for (size_t q = 0; q < 4; q++) {
                __mmask16 m = (__mmask16)(bits >> q * 16);
                unsigned n = sp_popcount64(m);
                __m512i v = _mm512_maskz_compress_epi32(m, _mm512_load_si512(cols[c] + q * 16));
                if (exact)
                    _mm512_mask_storeu_epi32(out, (__mmask16)_bzhi_u32(0xffff, n), v);
                else
                    _mm512_storeu_si512(out, v);
                out += n * 4;
            }
        }
    }
    return out;
}

/* Unpack the values, which are ordered by column, to dst [64][64]. Absent elements become zero. Returns the
 * end of the values. */
static inline const uint8_t *unpack_tile_u32(const uint8_t *in, const uint8_t *meta, uint8_t *dst, bool exact,
                                             bool non_temporal)
{
    _Alignas(64) uint32_t cols[16][64];
    for (size_t g = 0; g < 4; g++) {
        for (size_t c = 0; c < 16; c++) {
            uint64_t bits = sp_get_u64(meta, g * 16 + c);
            for (size_t q = 0; q < 4; q++) {
                __mmask16 m = (__mmask16)(bits >> q * 16);
                unsigned n = sp_popcount64(m);
                __m512i v = exact ? _mm512_maskz_loadu_epi32((__mmask16)_bzhi_u32(0xffff, n), in)
                                  : _mm512_loadu_si512(in);
                _mm512_store_si512(cols[c] + q * 16, _mm512_maskz_expand_epi32(m, v));
                in += n * 4;
            }
        }
        for (size_t q = 0; q < 4; q++) {
            __m512i v[16];
            for (size_t c = 0; c < 16; c++)
                v[c] = _mm512_load_si512(cols[c] + q * 16);
            transpose16(v);
            for (size_t r = 0; r < 16; r++) {
                uint8_t *to = dst + ((q * 16 + r) * 64 + g * 16) * 4;
                if (non_temporal)
                    _mm512_stream_si512((void *)to, v[r]);
                else
                    _mm512_storeu_si512(to, v[r]);
            }
        }
    }
    return in;
}

/* ---- 2-byte elements ---- */

/* The column (of 32) of word i after unpacklo_epi16 (hi 0) or unpackhi_epi16 (hi 1) of two rows.
 * unpacklo gives columns 0-3, 8-11, 16-19 and 24-27; unpackhi gives the others. */
static inline size_t column_of_word(size_t i, size_t hi)
{
    return i / 4 * 8 + i % 4 + hi * 4;
}

static inline uint8_t *pack_tile_u16(const uint8_t *x, const uint8_t *meta, uint8_t *out, bool exact)
{
    _Alignas(64) uint16_t cols[32][64];
    for (size_t g = 0; g < 2; g++) {
        for (size_t q = 0; q < 2; q++) {
            for (size_t hi = 0; hi < 2; hi++) {
                __m512i v[16];
                for (size_t r = 0; r < 16; r++) {
                    const uint8_t *two = x + ((q * 32 + r * 2) * 64 + g * 32) * 2;
                    __m512i a = _mm512_loadu_si512(two), b = _mm512_loadu_si512(two + 128);
                    v[r] = hi ? _mm512_unpackhi_epi16(a, b) : _mm512_unpacklo_epi16(a, b);
                }
                transpose16(v);
                for (size_t i = 0; i < 16; i++)
                    _mm512_store_si512(cols[column_of_word(i, hi)] + q * 32, v[i]);
            }
        }
        for (size_t c = 0; c < 32; c++) {
            uint64_t bits = sp_get_u64(meta, g * 32 + c);
            for (size_t q = 0; q < 2; q++) {
                __mmask32 m = (__mmask32)(bits >> q * 32);
                unsigned n = sp_popcount64(m);
                __m512i v = _mm512_maskz_compress_epi16(m, _mm512_load_si512(cols[c] + q * 32));
                if (exact)
                    _mm512_mask_storeu_epi16(out, (__mmask32)_bzhi_u32(~0u, n), v);
                else
                    _mm512_storeu_si512(out, v);
                out += n * 2;
            }
        }
    }
    return out;
}

static inline const uint8_t *unpack_tile_u16(const uint8_t *in, const uint8_t *meta, uint8_t *dst, bool exact,
                                             bool non_temporal)
{
    const __m512i low = _mm512_set1_epi32(0xffff);
    _Alignas(64) uint16_t cols[32][64];
    for (size_t g = 0; g < 2; g++) {
        for (size_t c = 0; c < 32; c++) {
            uint64_t bits = sp_get_u64(meta, g * 32 + c);
            for (size_t q = 0; q < 2; q++) {
                __mmask32 m = (__mmask32)(bits >> q * 32);
                unsigned n = sp_popcount64(m);
                __m512i v = exact ? _mm512_maskz_loadu_epi16((__mmask32)_bzhi_u32(~0u, n), in)
                                  : _mm512_loadu_si512(in);
                _mm512_store_si512(cols[c] + q * 32, _mm512_maskz_expand_epi16(m, v));
                in += n * 2;
            }
        }
        for (size_t q = 0; q < 2; q++) {
            _Alignas(64) __m512i pairs[2][16]; /* [lo, hi columns][pair of rows] */
            for (size_t hi = 0; hi < 2; hi++) {
                __m512i v[16];
                for (size_t i = 0; i < 16; i++)
                    v[i] = _mm512_load_si512(cols[column_of_word(i, hi)] + q * 32);
                transpose16(v);
                for (size_t r = 0; r < 16; r++)
                    pairs[hi][r] = v[r];
            }
            for (size_t r = 0; r < 16; r++) {
                uint8_t *to = dst + ((q * 32 + r * 2) * 64 + g * 32) * 2;
                __m512i l = pairs[0][r], h = pairs[1][r];
                __m512i even = _mm512_packus_epi32(_mm512_and_si512(l, low), _mm512_and_si512(h, low));
                __m512i odd = _mm512_packus_epi32(_mm512_srli_epi32(l, 16), _mm512_srli_epi32(h, 16));
                if (non_temporal) {
                    _mm512_stream_si512((void *)to, even);
                    _mm512_stream_si512((void *)(to + 128), odd);
                } else {
                    _mm512_storeu_si512(to, even);
                    _mm512_storeu_si512(to + 128, odd);
                }
            }
        }
    }
    return in;
}

#endif
