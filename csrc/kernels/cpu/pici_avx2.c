/* pici_avx2.c - the pici format in AVX2: pici.inc over simd_avx2.h. AVX2 has no compress or expand
 * instruction, so every tile uses its offset list. */
#include "kernels/cpu/simd_avx2.h"

#define SP_PICI_TILES 0
#include "kernels/cpu/pici.inc"
