/* coo_avx512.c - the coo format in AVX-512: coo.inc over simd_avx512.h. */
#include "kernels/cpu/simd_avx512.h"

#include "kernels/cpu/coo.inc"
