/* tune_coll.h - chooses the slice size of a collective, and the slices that need no scan.
 * The functions depend on their arguments alone. The constants are in tune_coll.c. */
#ifndef SP_TUNE_COLL_H
#define SP_TUNE_COLL_H

#include "core/plan/sched.h"

/* Parse "auto", "tune", "tune:PATH", the name of a schedule, or "file:PATH". *forced is false for the first three; then
 * *out stays as it is. Errors: SETTING. */
#define SP_TUNE_FILE "file:"
#define SP_TUNE_ON "tune"       /* auto with the tuner */
#define SP_TUNE_PROFILE "tune:" /* the same, with a profile */
spccl_status sp_tune_parse_schedule(const char *text, bool *forced, sp_schedule *out);
/* The smallest slice: one pici tile of 8-byte elements. */
#define SP_SLICE_BYTES_MIN 32768u
/* Capacity of one queue, unless a setting forces another number: a power of two. The more ranks, the smaller
 * it is, so that a rank's queues to all others together stay below a bound that does not depend on them. */
size_t sp_tune_queue_bytes(int world_size);
/* Dense bytes per slice for queues of queue_bytes, unless a setting forces another number. */
size_t sp_tune_slice_bytes(size_t queue_bytes);
/* Elements per slice: a multiple of a pici tile. A slice then has at most slice_bytes (>=
 * SP_SLICE_BYTES_MIN), and its largest message at most message_max bytes. */
size_t sp_tune_slice_elems(size_t slice_bytes, size_t elem_bytes, spccl_format forced, size_t message_max);
/* Elements of the largest slice that the tuner may try, at least `slice_elems`, the size by default. All ranks get the
 * same: every transport takes messages of a quarter of a queue. */
size_t sp_tune_slice_elems_max(size_t slice_elems, size_t elem_bytes, size_t queue_bytes);
/* True if this slice may be sent dense without a scan. The n_dense slices before it were dense (at least
 * one), and a probe of this slice finds no zero. Every 16th slice is scanned in any case. ignores_sign: -0.0 is a
 * zero, too. */
bool sp_tune_skip_scan(const void *x, size_t n_elems, size_t elem_bytes, bool ignores_sign, uint32_t n_dense);

#endif
