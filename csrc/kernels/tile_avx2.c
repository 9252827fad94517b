/* tile_avx2.c - the tile format in AVX2: tile.inc over simd_avx2.h. */
#include "simd_avx2.h"

#include "tile.inc"
