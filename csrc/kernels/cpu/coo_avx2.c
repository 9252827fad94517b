/* coo_avx2.c - the coo format in AVX2: coo.inc over simd_avx2.h. */
#include "kernels/cpu/simd_avx2.h"

#include "kernels/cpu/coo.inc"
