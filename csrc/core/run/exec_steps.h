/* exec_steps.h - one slice of one step. exec.c decides which slice runs. exec_steps.c and exec_reduce.c run
 * it. Private to the executor. */
#ifndef SP_EXEC_STEPS_H
#define SP_EXEC_STEPS_H

#include "core/run/exec.h"

/* The slice that a step does next. */
typedef struct sp_slice {
    const sp_op *op;
    const sp_step *step;
    int op_idx, step_idx;
    uint32_t k;             /* number of the slice within the part */
    size_t off, n;          /* elements [off, off + n) of the part */
    const uint8_t *src;     /* what is sent or added of this rank's */
    uint8_t *dst;           /* where its output goes */
    sp_kept *kept;          /* the buffer in which the step keeps the slice; NULL: none */
    sp_kept *read;          /* the buffer that it sends or adds; NULL: none */
    spccl_dtype out_dtype;  /* of what is sent: the accumulator's for a sum that is not finished */
    uint64_t n_contributed; /* REDUCE: listed elements of the contributions from other ranks */
} sp_slice;

/* plan->ranks[i] of the slice's op. */
int sp_slice_rank(const sp_slice *s, int i);
/* Largest size of this slice's message. A sender reserves it before the slice is scanned. */
size_t sp_slice_bound(const sp_slice *s);
/* OK if every receiver's queue has space for `bytes`, and it is this op's turn on that queue. Else AGAIN. */
spccl_status sp_slice_space(sp_exec *x, const sp_slice *s, size_t bytes);
/* Get the message from the i-th sender of the step, unchecked. AGAIN: it has not arrived, or an earlier
 * collective still uses this queue. */
spccl_status sp_slice_message(sp_exec *x, const sp_slice *s, int i, const uint8_t **msg, size_t *bytes);
/* Check that the message is a valid one for this slice, and open its frame. */
spccl_status sp_slice_open(const sp_exec *x, const sp_slice *s, int peer, const uint8_t *msg, size_t bytes,
                           sp_frame *frame);
spccl_status sp_slice_release(sp_exec *x, const sp_slice *s, int i, size_t bytes);

/* A slice that is encoded in the queue of the first receiver, and not yet sent. */
typedef struct sp_encoded {
    uint8_t *message; /* envelope and frame */
    size_t bytes, nnz;
    spccl_format format;
    sp_frame_layout layout;
} sp_encoded;

/* Choose the format of `data` [n], and encode it into the first receiver's queue. The caller has checked for
 * space (sp_slice_space). A second call before the commit replaces the message. */
spccl_status sp_slice_encode(sp_exec *x, const sp_slice *s, const void *data, sp_encoded *out);
/* Copy the message to the queues of the other receivers, and send it to all. */
spccl_status sp_slice_commit(sp_exec *x, const sp_slice *s, const sp_encoded *e);

/* Choose the format of `data` (exec_format.c). Unless it is DENSE, the codec then holds the scan of `data`, and *nnz
 * its count. */
spccl_status sp_slice_choose_format(sp_exec *x, const sp_slice *s, const void *data, spccl_format *format,
                                    size_t *nnz);

/* ---- exec_turns.c: which steps may run, and the slices that a rank keeps ---- */

/* Allocate what an op needs for turns, kept slices and densities. Errors: NOMEM. */
spccl_status sp_op_order_init(sp_op *op);
/* True if the step may run its next slice as far as this rank's other steps go. */
bool sp_step_is_due(const sp_op *op, int step_idx);
/* The step has done a slice: pass the turn on if its block is done. */
void sp_op_slice_done(sp_op *op, int step_idx);
/* The buffer for slice k in a slot. */
sp_kept *sp_op_kept(const sp_op *op, int slot, uint32_t k);

/* ---- exec_measure.c: densities, rates and times for the choice of later schedules (choose.h) ---- */

/* Write bytes 32 to 47 of an envelope. */
void sp_measure_write(uint8_t *envelope, sp_exec *x, const sp_slice *s);
/* Count a message that every rank of the group sends or receives: a result of an all-reduce, an input of a
 * oneshot one, or data of an all-gather or broadcast. nnz: of its frame. In a reduce-scatter nothing is counted. */
void sp_measure_message(sp_exec *x, const sp_slice *s, const uint8_t *msg, size_t nnz);
/* Count a message of a SEND step, if it goes to every other rank or is passed on to them. */
void sp_measure_sent(sp_exec *x, const sp_slice *s, const sp_encoded *e);

/* What this rank tells in the envelopes of a carrier (tuner.h): the code of its time of an earlier one. */
uint32_t sp_measure_told(const sp_exec *x, uint32_t carrier);
/* The op has ended now. Its time began when the call was made, or when the call before it ended. */
void sp_measure_time(sp_exec *x, const sp_op *op, int64_t now_ns);

/* exec_choose.c: choose the schedule of an op, unless it is forced, and note why. Errors: BUG. */
spccl_status sp_exec_choose(sp_exec *x, sp_op *op);
/* Keep an event of the op. choice: of its schedule, or NULL. (exec_choose.c) */
void sp_exec_note(sp_exec *x, const sp_op *op, const char *what, const sp_choice *choice);

/* Run one slice of a REDUCE step (exec_reduce.c). */
spccl_status sp_reduce_run(sp_exec *x, sp_slice *s);

/* Try the next slice of step `step_idx` of active[op_idx]. OK: it is done. AGAIN: it must wait. Any other
 * status breaks the communicator. */
spccl_status sp_step_run(sp_exec *x, int op_idx, int step_idx);
/* Write which ranks that slice waits for, and for what. */
void sp_step_describe_wait(sp_exec *x, int op_idx, int step_idx, char *text, size_t cap);
/* True if no earlier active collective still uses that queue. Both ends then use it in the same order.
 *   dir   0: send, 1: receive */
bool sp_op_owns_queue(const sp_exec *x, int op_idx, int dir, int queue, int peer);
/* Errors: MISMATCH (a peer sent more for this finished op, or for an older one, than the op takes). */
spccl_status sp_exec_check_surplus(sp_exec *x, const sp_op *op);
sp_call sp_op_call(const sp_op *op);
/* "all_reduce #12 (1048576 float32, sum)" */
void sp_call_describe(const sp_call *call, char *text, size_t cap);
/* This rank cannot start a call: put its rank and the call in front of the last error's text. Returns st. */
spccl_status sp_call_error(int rank, const sp_coll_args *a, uint32_t seq, spccl_status st);

#endif
