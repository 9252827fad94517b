/* pici_avx512.c - the pici format in AVX-512: pici.inc over simd_avx512.h. */
#include "simd_avx512.h"

#include "pici.inc"
