/* tune_format.h - every choice that depends on data, size or link: pure functions of their arguments.
 * Place in the map: planning. No I/O, no clock, no device. Each constant is in tune.c with its source. */
#ifndef SP_TUNE_H
#define SP_TUNE_H

#include "core/format/codec.h"

/* What a byte costs on its way from one rank to the next, beside encode and decode. */
typedef struct sp_link_cost {
    double ns_per_byte;
    const char *name;
} sp_link_cost;

extern const sp_link_cost sp_link_shm; /* shared memory of one host */
extern const sp_link_cost sp_link_tcp; /* sockets */
/* The smallest frame wins; of equal sizes dense, then pici, coo, tile. */
extern const sp_link_cost sp_link_size_only;

/* The format for a slice: the one with the least encode + link + decode time among those that the slice
 * allows and that are no larger than sp_tune_frame_bound. Never AUTO. */
spccl_format sp_tune_format(const sp_slice_stats *stats, bool is_delta, const sp_link_cost *link);
/* Bytes that suffice for every choice of sp_tune_format: the dense frame; for deltas, which cannot be dense,
 * the pici frame with everything listed.  n_elems <= SP_FRAME_ELEMS_MAX. */
size_t sp_tune_frame_bound(size_t n_elems, size_t elem_bytes, bool is_delta);

/* "auto", "tile", "pici", "coo", "dense" -> format (SPCCL_FORMAT and options given as text).
 * Errors: SETTING. */
spccl_status sp_tune_parse_format(const char *text, spccl_format *out);

#endif
