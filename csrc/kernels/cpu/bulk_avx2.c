/* bulk_avx2.c - dense frames, copy, zero, combine, finish in AVX2: bulk.inc over simd_avx2.h. */
#include "kernels/cpu/simd_avx2.h"

#include "kernels/cpu/bulk.inc"
