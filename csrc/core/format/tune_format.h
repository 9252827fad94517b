/* tune_format.h - chooses the format of a slice. The functions depend on their arguments alone. The constants
 * are in tune_format.c, each with its source. */
#ifndef SP_TUNE_FORMAT_H
#define SP_TUNE_FORMAT_H

#include "core/format/codec.h"

/* The format with the least time of encode, link and decode. Only formats that the slice allows and whose
 * frame is at most sp_tune_frame_bound are compared. Never AUTO.
 *   link_ns_per_byte   time to move one byte to the next rank (sp_transport has it). INFINITY chooses the
 *                      smallest frame; of equal sizes dense, then pici, coo, tile */
spccl_format sp_tune_format(const sp_slice_stats *stats, bool is_delta, double link_ns_per_byte);
/* Time of encoding and of decoding a slice in a format, in ns, as sp_tune_format counts it. */
double sp_tune_encode_ns(spccl_format format, const sp_slice_stats *stats);
double sp_tune_decode_ns(spccl_format format, const sp_slice_stats *stats);
/* Largest frame that sp_tune_format can choose: the dense frame. A delta cannot be dense: for a delta it is
 * the pici frame with all elements listed. n_elems <= SP_FRAME_ELEMS_MAX. */
size_t sp_tune_frame_bound(size_t n_elems, size_t elem_bytes, bool is_delta);

/* Parse "auto", "tile", "pici", "coo" or "dense". Errors: SETTING. */
spccl_status sp_tune_parse_format(const char *text, spccl_format *out);

#endif
