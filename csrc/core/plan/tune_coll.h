/* tune_coll.h - choices made per collective: schedule, slice size, and when a scan is not worth it.
 * Planning part of the map: pure functions; each constant is in tune_coll.c with its reason. */
#ifndef SP_TUNE_COLL_H
#define SP_TUNE_COLL_H

#include "core/plan/sched.h"

/* "auto", "direct", "oneshot" -> *forced and *out.  Errors: SETTING. */
spccl_status sp_tune_parse_schedule(const char *text, bool *forced, sp_schedule *out);
/* The schedule for a collective of `bytes` dense bytes (the whole buffer) over world_size ranks. The same on
 * every rank: it depends on nothing else. */
sp_schedule sp_tune_schedule(sp_coll coll, size_t bytes, int world_size);
/* The smallest slice: one pici tile of 8-byte elements. */
#define SP_SLICE_BYTES_MIN 32768u
/* Dense bytes per slice when nothing is forced. */
size_t sp_tune_slice_bytes(void);
/* Elements per slice so that a slice of elem_bytes fits slice_bytes (>= SP_SLICE_BYTES_MIN) and its largest
 * message fits message_max.
 */
size_t sp_tune_slice_elems(size_t slice_bytes, size_t elem_bytes, spccl_format forced, size_t message_max);
/* May this slice be sent dense without a scan? True if the slices before it were dense (dense_run in a row)
 * and a sample of this one has no zero. Every 16th slice is scanned all the same. */
bool sp_tune_skip_scan(const void *x, size_t n_elems, size_t elem_bytes, uint32_t dense_run);

#endif
