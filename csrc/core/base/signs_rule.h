/* signs_rule.h - one bit per element (spccl_weights_send_signs, spccl_signs_sum, spccl_signs_decode): what a chunk sends.
 * The host and the GPU give the same bits. The layout of a row is in docs/FORMAT.md, section 10.
 *
 * A chunk has up to SPCCL_SIGNS_CHUNK values v. Its row has one magnitude m, the mean of |v|, and the sign bit of each v.
 * So of a value is sent s = m or -m; a value that is 0 counts as its sign bit says. What is kept is v - s:
 *     sending   v = w - z                                w = leak (v - s) + z
 *     owner     v = kept + s_0 share + s_1 share + ...   kept = v - s
 * where s_r is what rank r sent, share = 1 / ranks, and additions are made in the order of the ranks. A v that is not
 * finite counts as +0.
 *
 * The sum of all |v| is made by halves, of a whole chunk, in which what lies past the end is 0:
 *     a[i] = a[i] + a[i + h] for i < h, where h = 2048, 1024, ..., 1.
 * m is that sum over the number of values; a sum that is infinite makes m the largest finite float32.
 *
 * Source: Tang et al. 2021, "1-bit Adam" (signs, error feedback on both sides). */
#ifndef SP_SIGNS_RULE_H
#define SP_SIGNS_RULE_H

#include "core/base/prune_rule.h"
#include "spccl_experimental.h"

#define SP_SIGNS_BIT 0x80000000u
#define SP_SIGNS_WORDS (SPCCL_SIGNS_CHUNK / 32u) /* of the signs of a row, which follow the magnitude */

static inline SP_HD float sp_signs_magnitude(float sum, uint32_t n)
{
    float mean = sum / (float)n;
    return mean <= FLT_MAX ? mean : FLT_MAX;
}
/* What is sent of v. */
static inline SP_HD float sp_signs_sent(float v, float magnitude)
{
    return sp_f32_from_bits(sp_f32_to_bits(magnitude) | (sp_f32_to_bits(v) & SP_SIGNS_BIT));
}
/* The value of bit i of a word of signs. Damaged rows have any magnitude. */
static inline SP_HD float sp_signs_value(uint32_t word, uint32_t i, float magnitude)
{
    return sp_f32_from_bits(sp_f32_to_bits(magnitude) ^ (word << (31 - i) & SP_SIGNS_BIT));
}
/* The own weight after v = w - z was sent as s. */
static inline SP_HD float sp_signs_keep(float v, float s, float z, float leak)
{
    return leak * (v - s) + z;
}

#endif
