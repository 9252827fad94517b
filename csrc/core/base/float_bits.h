/* float_bits.h - finds float values that arithmetic treats in a special way: NaNs, and values whose bits
 * change when 0 is added. `values` may have any alignment. elem_bytes is 4 (float32) or 8 (float64). */
#ifndef SP_FLOAT_BITS_H
#define SP_FLOAT_BITS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* True if one of values [n] is a NaN. */
bool sp_floats_any_nan(const uint8_t *values, size_t n, size_t elem_bytes);
/* True if 0 + v has other bits than v for one of values [n]. These are -0.0, which becomes +0.0, and
 * signalling NaNs, which become quiet. */
bool sp_floats_any_changed_by_zero(const uint8_t *values, size_t n, size_t elem_bytes);
/* values[i] = 0 + values[i], with the bits that an addition gives. */
void sp_floats_add_zero(uint8_t *values, size_t n, size_t elem_bytes);

#endif
