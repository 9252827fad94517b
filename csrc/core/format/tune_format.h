/* tune_format.h - which format a slice takes: pure functions of their arguments. No I/O, no clock, no device.
 * Each constant stands in tune_format.c with its source. */
#ifndef SP_TUNE_FORMAT_H
#define SP_TUNE_FORMAT_H

#include "core/format/codec.h"

/* The format for a slice: the one with the least encode + link + decode time among those that the slice
 * allows and that are no larger than sp_tune_frame_bound. Never AUTO.
 *   link_ns_per_byte   what a byte costs on its way to the next rank (sp_transport says it), beside encode
 *                      and decode; INFINITY: the smallest frame, of equal sizes dense, then pici, coo, tile
 */
spccl_format sp_tune_format(const sp_slice_stats *stats, bool is_delta, double link_ns_per_byte);
/* Bytes that suffice for every choice of sp_tune_format: the dense frame; for deltas, which cannot be dense,
 * the pici frame with everything listed.  n_elems <= SP_FRAME_ELEMS_MAX. */
size_t sp_tune_frame_bound(size_t n_elems, size_t elem_bytes, bool is_delta);

/* "auto", "tile", "pici", "coo", "dense" -> format (SPCCL_FORMAT and options given as text).
 * Errors: SETTING. */
spccl_status sp_tune_parse_format(const char *text, spccl_format *out);

#endif
