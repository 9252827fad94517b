/* codec.h - one dense slice <-> one frame, through a kernel table. Owns scratch memory; never sends.
 * Place in the map: running. Knows no ranks, schedules or transports. */
#ifndef SP_CODEC_H
#define SP_CODEC_H

#include "core/base/mem.h"
#include "core/format/kernel_table.h"

typedef struct sp_codec sp_codec;

/* Scratch for slices of up to max_elems <= SP_FRAME_ELEMS_MAX (mask and counts: about max_elems * 9/64
 * bytes). */
spccl_status sp_codec_create(const sp_kernels *kernels, size_t max_elems, sp_codec **out);
void sp_codec_destroy(sp_codec *codec);
const sp_kernels *sp_codec_kernels(const sp_codec *codec);

/* Scan x against base (NULL = zeros); the codec keeps the mask for the sp_codec_write that follows. */
void sp_codec_scan(sp_codec *codec, const void *x, const void *base, size_t n_elems, spccl_dtype dtype,
                   sp_slice_stats *out);
/* Can this slice take that format? (EMPTY: nnz == 0; TILE: no full block; DENSE: not for deltas; a slice of
 * no elements takes EMPTY alone; AUTO: never) */
bool sp_codec_allows(const sp_slice_stats *stats, spccl_format format, bool is_delta);

/* Write header and body of x at dst, in sp_frame_bytes(format, ...) bytes. After sp_codec_scan of the same
 * slice; DENSE needs no scan. `format` must be allowed. */
void sp_codec_write(sp_codec *codec, const void *x, size_t n_elems, spccl_dtype dtype, spccl_format format,
                    bool is_delta, size_t nnz, void *dst);

/* Apply a validated frame to dst.  dst_dtype: see sp_decode_args. `non_temporal`: dst bypasses the cache.
 * Errors: FRAME (SET of a delta), UNSUPPORTED (ADD of float8). */
spccl_status sp_codec_apply(const sp_kernels *kernels, const sp_frame *frame, spccl_verb verb, void *dst,
                            spccl_dtype dst_dtype, bool non_temporal);

#endif
