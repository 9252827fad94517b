/* prune_avx2.c - pruning with AVX2; see prune.inc. */
#include "kernels/cpu/simd_avx2.h"

#include "kernels/cpu/prune.inc"
