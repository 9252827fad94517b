/* coll_check.h - checks the arguments of a collective, on host and GPU alike. */
#ifndef SP_COLL_CHECK_H
#define SP_COLL_CHECK_H

#include "core/run/comm.h"

/* Check handle, dtype, reduce op, root, sizes, NULL, alignment and overlap.
 *   total_bytes  bytes of the larger of the two buffers
 * Errors: ARG, DTYPE, ALIAS. */
spccl_status sp_coll_check(const spccl_comm *comm, const sp_coll_args *a, size_t *total_bytes);

#endif
