/* tile_avx2.c - the tile format in AVX2: tile.inc over simd_avx2.h. */
#include "kernels/cpu/simd_avx2.h"

#include "kernels/cpu/tile.inc"
