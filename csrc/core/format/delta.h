/* delta.h - frames of version 2: header, table and slices, as in docs/FORMAT.md, section 11. */
#ifndef SP_DELTA_H
#define SP_DELTA_H

#include "core/base/delta_rule.h"
#include "core/base/dtype.h"
#include "core/base/status.h"
#include "core/format/kernel_table.h"

/* ---- reading ---- */

/* A frame whose header and table sp_delta_read_header accepted. */
typedef struct sp_delta_frame {
    const uint8_t *bytes; /* the caller's */
    uint64_t frame_bytes, n_elems, nnz, n_slices;
    spccl_dtype dtype;
    uint32_t elem_bytes;
} sp_delta_frame;

/* What changed in one slice, in order of the places: entry j is element place[j] of the slice. */
typedef struct sp_delta_changes {
    uint32_t n;
    uint32_t place[SP_DELTA_SLICE_ELEMS];
    uint64_t value[SP_DELTA_SLICE_ELEMS]; /* the new bits; or, mod 2^64, what to add to the old ones */
    uint8_t is_added[SP_DELTA_SLICE_ELEMS];
} sp_delta_changes;

/* Is this a frame of version 2? If so, other functions than those of format.h read it. */
bool sp_delta_is_frame(const void *buf, size_t bytes);
/* Check rules 1 to 14 of docs/FORMAT.md 11, and 15 and 16 as far as they follow from the table. The frame then lies
 * within `bytes`, and so does each slice but for the end of its values. Errors: FORMAT, VERSION. */
spccl_status sp_delta_read_header(const void *buf, size_t bytes, sp_delta_frame *out);
/* Check all rules on slice s < n_slices of a frame, and list its changes. It does not trust what sp_delta_read_header
 * saw: the bytes may have changed since. Errors: FORMAT. */
spccl_status sp_delta_read_slice(const sp_delta_frame *f, uint64_t s, sp_delta_changes *out);

/* Check all of a target but its frame. call, number: of the target, for texts. Errors: ARG, DTYPE, ALIAS. */
spccl_status sp_delta_check_target(const char *call, size_t number, const spccl_delta_target *t);

/* ---- writing ---- */

/* Check a source of spccl_delta_encode, or of another `call`. number: of the source, for texts. Errors: ARG, DTYPE, ALIAS. */
spccl_status sp_delta_check_source(const char *call, size_t number, const spccl_delta_source *s,
                                   const void *dst, size_t dst_cap, const spccl_delta_options *o);
/* Bases that advance overlap no other base and no x. Errors: ALIAS (names both), NOMEM. */
spccl_status sp_delta_check_apart(const char *call, const spccl_delta_source *sources, size_t n);
/* *out = the caller's options, with defaults. Errors: ARG. */
spccl_status sp_delta_read_options(const char *call, const spccl_delta_options *given,
                                   spccl_delta_options *out);

/* One slice, found by a scan, and memory for writing it. */
typedef struct sp_delta_slice {
    const sp_kernels *kernels;
    const void *x, *base; /* [n_elems] of elem_bytes */
    uint32_t n_elems, elem_bytes;
    uint64_t first, key; /* for the sum change */
    bool raw;
    /* Out: */
    uint32_t nnz, code;
    uint64_t sum_change;
    sp_delta_index index;
    uint32_t bytes;
    /* Scratch: */
    uint64_t mask[SP_DELTA_SLICE_ELEMS / 64];
    uint16_t tile_nnz[SP_DELTA_SLICE_ELEMS / SP_TILE_ELEMS];
    uint16_t place[SP_DELTA_SLICE_ELEMS + SP_DELTA_LIST_SLACK];
    uint16_t number[SP_DELTA_SLICE_ELEMS]; /* see sp_delta_list_args */
    uint8_t packed[SP_DELTA_SLICE_ELEMS * 2 + SP_DELTA_PACK_SLACK];
    _Alignas(64) uint8_t value[SP_DELTA_SLICE_ELEMS * 8]; /* new elements, packed */
} sp_delta_slice;

/* Find what changed, and how many bytes the slice takes: 0 if nothing did. */
void sp_delta_scan(sp_delta_slice *s);
/* Write the sections of the slice that the last scan found, s->bytes at dst. */
void sp_delta_write_slice(sp_delta_slice *s, uint8_t *dst);
/* The entry of a slice that starts at byte `at` of the frame. */
void sp_delta_write_entry(uint8_t *frame, uint64_t s, uint32_t nnz, uint32_t code, uint64_t at);
void sp_delta_write_header(uint8_t *frame, spccl_dtype dtype, uint64_t n_elems, uint64_t nnz,
                           uint64_t frame_bytes);

#endif
