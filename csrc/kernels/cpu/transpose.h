/* transpose.h - 64x64 bit transpose in plain C: swaps off-diagonal blocks of 32, 16, ... 1. Warren, Hacker's
 * Delight, 2nd edition, section 7-3, has it for 32x32. */
#ifndef SP_TRANSPOSE_H
#define SP_TRANSPOSE_H

#include "core/base/bits.h"

/* Bit r of word c at out = bit c of in[r]. The words at out are little-endian. */
static inline void sp_transpose64(const uint64_t in[64], uint8_t *out)
{
    uint64_t rows[64];
    memcpy(rows, in, sizeof rows);
    for (unsigned width = 32; width != 0; width >>= 1) {
        uint64_t low = ~UINT64_C(0) / ((UINT64_C(1) << width) + 1); /* the low half of each pair of blocks */
        for (unsigned first = 0; first < 64; first += 2 * width) {
            for (unsigned r = first; r < first + width; r++) {
                uint64_t swap = ((rows[r] >> width) ^ rows[r + width]) & low;
                rows[r] ^= swap << width;
                rows[r + width] ^= swap;
            }
        }
    }
    memcpy(out, rows, sizeof rows);
}

#endif
