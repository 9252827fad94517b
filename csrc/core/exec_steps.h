/* exec_steps.h - one slice of one step; between exec.c (when) and exec_steps.c (how). Private to the
 * executor. */
#ifndef SP_EXEC_STEPS_H
#define SP_EXEC_STEPS_H

#include "exec.h"

/* Try the next slice of step `step_idx` of window[op_idx]: OK done, AGAIN not ready, else the communicator is
 * broken. */
spccl_status sp_step_run(sp_exec *x, int op_idx, int step_idx);
/* Which ranks that slice waits for, and what for. */
void sp_step_describe_wait(sp_exec *x, int op_idx, int step_idx, char *text, size_t cap);
/* May window[op_idx] use that lane now? Earlier collectives go first, so that both ends see one order. dir: 0
 * send, 1 receive. */
bool sp_op_owns_lane(const sp_exec *x, int op_idx, int dir, int lane, int peer);
/* MISMATCH if a peer sent more for this finished op, or for an older one, than the op takes. */
spccl_status sp_exec_check_surplus(sp_exec *x, const sp_op *op);
/* "all_reduce #12 (1048576 float32, sum)" */
void sp_coll_describe(char *text, size_t cap, uint32_t seq, sp_coll coll, uint64_t n_elems, spccl_dtype dtype,
                      spccl_redop redop, int root);

#endif
