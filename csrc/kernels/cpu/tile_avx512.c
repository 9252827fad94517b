/* tile_avx512.c - the tile format in AVX-512: tile.inc over simd_avx512.h. */
#include "kernels/cpu/simd_avx512.h"

#include "kernels/cpu/tile.inc"
