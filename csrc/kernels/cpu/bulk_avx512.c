/* bulk_avx512.c - dense frames, copy, zero, combine, finish in AVX-512: bulk.inc over simd_avx512.h. */
#include "kernels/cpu/simd_avx512.h"

#include "kernels/cpu/bulk.inc"
