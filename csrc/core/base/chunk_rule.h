/* chunk_rule.h - sending of weights by chunks: exactly the largest k of each chunk of a segment, and the two
 * levels to which they are rounded if the caller wants that. The host and the GPU give the same bits.
 *
 * A chunk is `chunk` neighbouring elements of a segment; the last one may be shorter. Its k is the density times
 * its length, rounded, at least 1. Elements are ranked by the magnitude of d = w - z as a float32 (rounded down);
 * of equal elements the first ones are sent. Zeros are not sent.
 *
 * With two levels, what is sent is the sign of d times one of two magnitudes per chunk: the mean of those below
 * the mean, and the mean of the others, rounded to bfloat16. All sums are of integers, so their order does not
 * matter: a magnitude counts in units of 2^(e - 150), rounded down, where e is the largest exponent field of what
 * the chunk sends.
 *
 * Sources: Sarfi et al. 2025, "SparseLoCo" (top k of chunks of 4096, values of two bits, error feedback). The
 * levels are ours. */
#ifndef SP_CHUNK_RULE_H
#define SP_CHUNK_RULE_H

#include "core/base/prune_rule.h"

#define SP_CHUNK_LEAST 256u
#define SP_CHUNK_MOST 4096u

/* What a chunk sends: magnitudes above `least`, and those equal to it before element `cut` of the chunk. */
typedef struct sp_chunk_pick {
    uint32_t least, cut;
} sp_chunk_pick;

static inline SP_HD bool sp_chunk_is_sent(uint32_t magnitude, uint32_t i, sp_chunk_pick p)
{
    return magnitude != 0 && (magnitude > p.least || (magnitude == p.least && i < p.cut));
}

/* The exponent field, as the units count it: that of a denormal is 1. */
static inline SP_HD uint32_t sp_chunk_exponent(uint32_t magnitude)
{
    return magnitude >> 23 != 0 ? magnitude >> 23 : 1;
}
/* A magnitude in units of 2^(top - 150), rounded down: below 2^24. */
static inline SP_HD uint32_t sp_chunk_units(uint32_t magnitude, uint32_t top)
{
    uint32_t mantissa = (magnitude & 0x7fffffu) | (magnitude >> 23 != 0 ? 0x800000u : 0);
    uint32_t shift = top - sp_chunk_exponent(magnitude);
    return shift < 24 ? mantissa >> shift : 0;
}
/* From this many units on an element has the upper level: the mean of n > 0 elements, rounded up. */
static inline SP_HD uint32_t sp_chunk_middle(uint64_t units, uint32_t n)
{
    return (uint32_t)((units + n - 1) / n);
}
/* The level of n elements: their mean, a value that bfloat16 holds. 0 if n is 0. */
static inline SP_HD float sp_chunk_level(uint64_t units, uint32_t n, uint32_t top)
{
    float mean = n == 0 ? 0 : ldexpf((float)(uint32_t)(units / n), (int)top - 150);
    uint32_t bits = sp_f32_to_bits(mean), rounded = bits + 0x7fffu + (bits >> 16 & 1);
    return sp_f32_from_bits(rounded >= 0x7f800000u ? 0x7f7f0000u : rounded & 0xffff0000u);
}

/* sp_chunk_keep_NAME: the own weight after s of d = w - z was sent. As in weights_rule.h, a weight whose d is 0 or
 * was not sent stays as it is with a leak of 1. */
#define SP_CHUNK_KEEP(NAME, TYPE)                                                                            \
    static inline SP_HD TYPE sp_chunk_keep_##NAME(TYPE w, TYPE z, TYPE s, TYPE leak)                         \
    {                                                                                                        \
        TYPE d = w - z, rest = d - s;                                                                        \
        return d == 0 || (s == 0 && leak == 1) ? w : rest == 0 ? z : leak * rest + z;                        \
    }
SP_CHUNK_KEEP(f32, float)
SP_CHUNK_KEEP(f64, double)

#endif
