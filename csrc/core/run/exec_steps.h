/* exec_steps.h - one slice of one step; between exec.c (when) and exec_steps.c (how). Private to the
 * executor. */
#ifndef SP_EXEC_STEPS_H
#define SP_EXEC_STEPS_H

#include "core/run/exec.h"

/* The slice a step is at. */
typedef struct sp_slice {
    const sp_op *op;
    const sp_step *step;
    int op_idx, step_idx;
    uint32_t k;
    size_t off, n;      /* within the part, in elements */
    const uint8_t *src; /* this rank's values */
    uint8_t *dst;
} sp_slice;

/* plan->ranks[i] of the slice's op. */
int sp_slice_rank(const sp_slice *s, int i);
/* Worst case of this slice's message, so that the room is there before the slice is scanned. */
size_t sp_slice_bound(const sp_slice *s);
/* Is there room for `bytes` towards every receiver of the step, and is it this op's turn there? OK or AGAIN.
 */
spccl_status sp_slice_space(sp_exec *x, const sp_slice *s, size_t bytes);
/* The message from the i-th sender of the step, if it is there: OK or AGAIN. Not looked into yet. */
spccl_status sp_slice_message(sp_exec *x, const sp_slice *s, int i, const uint8_t **msg, size_t *bytes);
/* Check that message completely and open its frame: it is the one the slice wants. */
spccl_status sp_slice_open(const sp_exec *x, const sp_slice *s, int peer, const uint8_t *msg, size_t bytes,
                           sp_frame *frame);
spccl_status sp_slice_release(sp_exec *x, const sp_slice *s, int i, size_t bytes);

/* A slice encoded in the queues of all receivers, not yet sent. */
typedef struct sp_encoded {
    uint8_t *message; /* in the first receiver's queue: envelope and frame */
    size_t bytes, nnz;
    spccl_format format;
    sp_frame_layout layout;
} sp_encoded;

/* Choose the format of `data` [n] and encode it towards every receiver; room was checked. Encoding again
 * before the commit replaces what was there. */
spccl_status sp_slice_encode(sp_exec *x, const sp_slice *s, const void *data, sp_encoded *out);
spccl_status sp_slice_commit(sp_exec *x, const sp_slice *s, const sp_encoded *e);

/* exec_reduce.c: one slice of a REDUCE step. */
spccl_status sp_reduce_run(sp_exec *x, const sp_slice *s);

/* Try the next slice of step `step_idx` of window[op_idx]: OK done, AGAIN not ready, else the communicator is
 * broken. */
spccl_status sp_step_run(sp_exec *x, int op_idx, int step_idx);
/* Which ranks that slice waits for, and what for. */
void sp_step_describe_wait(sp_exec *x, int op_idx, int step_idx, char *text, size_t cap);
/* May window[op_idx] use that queue now? Earlier collectives go first, so that both ends see one order. dir:
 * 0 send, 1 receive. */
bool sp_op_owns_queue(const sp_exec *x, int op_idx, int dir, int queue, int peer);
/* MISMATCH if a peer sent more for this finished op, or for an older one, than the op takes. */
spccl_status sp_exec_check_surplus(sp_exec *x, const sp_op *op);
sp_call sp_op_call(const sp_op *op);
/* "all_reduce #12 (1048576 float32, sum)" */
void sp_call_describe(const sp_call *call, char *text, size_t cap);

#endif
