/* delta_gpu.h - deltas on GPU memory: what core passes to the kernels. A contract. docs/FORMAT.md 11 has the frames,
 * core/base/delta_rule.h the sizes of their sections. */
#ifndef SP_DELTA_GPU_H
#define SP_DELTA_GPU_H

#include "core/base/delta_rule.h"
#include "spccl.h"

#include <stdbool.h>

/* ---- receiving ---- */

/* The memory of a plan, one allocation of the GPU: head, sums [n_targets], rows [n_targets], places [n_places], slices
 * [n_slices]. The host clears all but the slices, and fills in what it knows of targets and places. The slices are
 * uninitialised until `open` writes them. It writes all of a target, or finds a fault, and then there is no plan. */

#define SP_DELTA_NO_SLICE 0xffffffu /* of a fault: of the whole frame. Slices are below */
/* What kernels found wrong: 0, or UINT64_MAX less the smallest of target << 32 | slice of the target << 8 | rule. rule: of
 * docs/FORMAT.md 11.3, or one of these. */
enum {
    SP_DELTA_RULE_OTHER_BYTES = 30, /* the frame is shorter than frame_bytes of the target */
    SP_DELTA_RULE_OTHER_ARRAY = 31, /* another dtype or length than the target */
    SP_DELTA_RULE_PLACES = 32       /* an element has different bits in two places */
};
static inline SP_HD uint64_t sp_gpu_delta_fault(uint32_t target, uint64_t slice, uint32_t rule)
{
    return UINT64_MAX - ((uint64_t)target << 32 | slice << 8 | rule);
}

typedef struct sp_gpu_delta_head {
    uint64_t fault;
    uint64_t old_bytes; /* of all targets */
} sp_gpu_delta_head;

/* A target. Rows are in the order of the targets. */
typedef struct sp_gpu_delta_row {
    const uint8_t *frame;
    uint64_t frame_bytes, n_elems, first, key;
    uint64_t first_slice; /* of those of all targets; a target without elements has none */
    uint64_t first_place, n_places;
    uint32_t dtype, elem_bytes;
    /* The kernels write these. */
    uint64_t nnz;    /* `open` */
    uint64_t old_at; /* `open`: where its old values begin, in bytes */
} sp_gpu_delta_row;

/* A slice, as `open` has accepted its entry of the table: its bytes lie within the frame. */
typedef struct sp_gpu_delta_slice {
    uint64_t before;    /* changes of the target in the slices before */
    uint32_t entry, at; /* as in the frame */
} sp_gpu_delta_slice;

typedef struct sp_gpu_delta_args {
    sp_gpu_delta_head *head;
    uint64_t *sums; /* look: the sum change of each target */
    sp_gpu_delta_row *rows;
    const spccl_delta_place *places;
    sp_gpu_delta_slice *slices;
    uint64_t n_slices;
    uint32_t n_targets;
    uint32_t widths; /* bit i: a target has elements of 2^i bytes */
    uint8_t *old;    /* look: written, NULL: not; undo: read */
} sp_gpu_delta_args;

/* What to do with the changes; looking comes first. */
enum { SP_DELTA_LOOK, SP_DELTA_APPLY, SP_DELTA_UNDO };

typedef struct sp_gpu_delta_sum_args {
    const void *x;
    uint64_t n_elems, first, key;
    uint32_t elem_bytes;
    uint64_t *out; /* in GPU memory; the sum */
} sp_gpu_delta_sum_args;

/* ---- sending ---- */

typedef struct sp_gpu_delta_encode_args {
    const spccl_delta_source *sources; /* [n_sources], in host memory, checked; at least one */
    size_t n_sources;
    bool raw;
    uint8_t *dst; /* aligned to 8 bytes */
    uint64_t dst_cap;
    uint8_t *old; /* aligned to 8 bytes: gets old values, and bases advance; NULL: bases stay */
    uint64_t old_cap;
    spccl_delta_frame *frames; /* [n_sources], in host memory; written on success */
    size_t *out_bytes;
    int device;                                     /* the current one */
    spccl_status (*wait)(int device, void *stream); /* until the stream is done, or TIMEOUT */
} sp_gpu_delta_encode_args;

#endif
