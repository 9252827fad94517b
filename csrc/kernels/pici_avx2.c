/* pici_avx2.c - the pici format in AVX2: pici.inc over simd_avx2.h. */
#include "simd_avx2.h"

#include "pici.inc"
