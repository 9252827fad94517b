/* pici_avx2.c - the pici format in AVX2: pici.inc over simd_avx2.h. */
#include "kernels.h"
#include "simd_avx2.h"

/* No transpose of whole tiles: AVX2 has neither compress nor expand, every tile goes through its list. */
static inline bool simd_pici_takes(size_t n_listed, size_t elem_bytes)
{
    (void)n_listed;
    (void)elem_bytes;
    return false;
}
static inline void simd_pici_pack(uint8_t *values, const uint8_t *x, const uint8_t *meta, size_t elem_bytes,
                                  size_t n_after)
{
    (void)values, (void)x, (void)meta, (void)elem_bytes, (void)n_after;
}
static inline size_t simd_pici_unpack(uint8_t *dst, const uint8_t *values, const uint8_t *meta,
                                      size_t elem_bytes, size_t n_left, bool stream)
{
    (void)dst, (void)values, (void)meta, (void)elem_bytes, (void)n_left, (void)stream;
    return 0;
}

#include "pici.inc"
