/* host.h - the identity of a host. Two processes with the same identity have the same kernel and the same
 * network namespace. So they reach each other over loopback and over abstract local sockets. */
#ifndef SP_HOST_H
#define SP_HOST_H

#include "spccl.h"

#include <stdbool.h>

#define SP_HOST_BOOT_BYTES 36u /* the kernel's boot id */
#define SP_HOST_ID_BYTES 44u   /* boot id, u64 network namespace, and the name if there is one */

/* Identity of the host of this process. `name`: NULL or "" for none. Processes with different names count as on
 * different hosts. The same name in two network namespaces is two hosts. Errors: SYSTEM; `out` is then unchanged. */
spccl_status sp_host_identity(const char *name, uint8_t out[SP_HOST_ID_BYTES]);
/* True if both processes run on the same kernel, even in different namespaces or under different names. */
bool sp_host_same_kernel(const uint8_t *a, const uint8_t *b);

#endif
