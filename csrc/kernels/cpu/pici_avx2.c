/* pici_avx2.c - the pici format in AVX2: pici.inc over simd_avx2.h. AVX2 has neither compress nor expand, so
 * every tile goes through its list. */
#include "kernels/cpu/simd_avx2.h"

#define SP_PICI_TILES 0
#include "kernels/cpu/pici.inc"
