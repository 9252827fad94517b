/* codec.h - turns one dense slice into one frame and back, with the functions of a kernel set. */
#ifndef SP_CODEC_H
#define SP_CODEC_H

#include "core/base/mem.h"
#include "core/format/kernel_table.h"

typedef struct sp_codec sp_codec;

/* Allocate scratch memory (a mask and counts) for slices of up to max_elems <= SP_FRAME_ELEMS_MAX.
 * Errors: NOMEM. */
spccl_status sp_codec_create(const sp_kernels *kernels, size_t max_elems, sp_codec **out);
void sp_codec_destroy(sp_codec *codec);

/* Find the elements of x that differ from base; if base is NULL, from zero. The codec keeps mask and counts
 * for the sp_codec_write that follows. */
void sp_codec_scan(sp_codec *codec, const void *x, const void *base, size_t n_elems, spccl_dtype dtype,
                   sp_slice_stats *out);
/* The same without base, for a contribution to a sum of floats: -0.0 is not listed, as it adds what +0.0 does. */
void sp_codec_scan_contribution(sp_codec *codec, const void *x, size_t n_elems, spccl_dtype dtype,
                                sp_slice_stats *out);
/* True if a frame of that format can hold this slice.
 *   EMPTY      only if nnz is 0
 *   TILE       not if all 256 elements of a block are listed
 *   DENSE      not for a delta
 *   AUTO       never
 * A slice of 0 elements can only be EMPTY. */
bool sp_codec_allows(const sp_slice_stats *stats, spccl_format format, bool is_delta);

/* Write the frame of x at dst: sp_frame_bytes(format, ...) bytes. sp_codec_allows must be true for `format`.
 * The last scan must have scanned the same slice; DENSE needs no scan. */
void sp_codec_write(sp_codec *codec, const void *x, size_t n_elems, spccl_dtype dtype, spccl_format format,
                    bool is_delta, size_t nnz, void *dst);

/* Apply a validated frame to dst. sp_decode_args explains dst_dtype. With `non_temporal`, stores to dst may
 * bypass the cache. Errors: FRAME (SET of a delta), UNSUPPORTED (ADD of float8). */
spccl_status sp_codec_apply(const sp_kernels *kernels, const sp_frame *frame, spccl_verb verb, void *dst,
                            spccl_dtype dst_dtype, bool non_temporal);

#endif
