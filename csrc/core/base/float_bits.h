/* float_bits.h - bits of arrays of floats that arithmetic treats in a special way: NaNs, and values that
 * change when 0 is added. Values may lie at any address. elem_bytes is 4 (float32) or 8 (float64). */
#ifndef SP_FLOAT_BITS_H
#define SP_FLOAT_BITS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Is one of values [n] a NaN? */
bool sp_floats_any_nan(const uint8_t *values, size_t n, size_t elem_bytes);
/* Would 0 + v have other bits than v for one of values [n]? That holds for -0.0, which becomes +0.0, and for
 * a signalling NaN, which becomes quiet. */
bool sp_floats_any_changed_by_zero(const uint8_t *values, size_t n, size_t elem_bytes);
/* values[i] = 0 + values[i], bit for bit as an addition would give. */
void sp_floats_add_zero(uint8_t *values, size_t n, size_t elem_bytes);

#endif
