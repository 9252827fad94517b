/* prune_avx512.c - pruning with AVX-512; see prune.inc. */
#include "kernels/cpu/simd_avx512.h"

#include "kernels/cpu/prune.inc"
