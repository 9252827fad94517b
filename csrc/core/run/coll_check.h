/* coll_check.h - what a collective's arguments must fulfil, on host and GPU alike. Place in the map: running.
 */
#ifndef SP_COLL_CHECK_H
#define SP_COLL_CHECK_H

#include "core/run/comm.h"

/* Handle, dtype, reduce op, root, sizes, NULL, alignment, overlap.
 *   total_bytes  of the larger buffer
 * Errors: ARG, DTYPE, ALIAS. */
spccl_status sp_coll_check(const spccl_comm *comm, const sp_coll_args *a, size_t *total_bytes);

#endif
