/* host.h - the identity of a host. Two processes with the same identity have the same kernel and the same
 * network namespace. So they reach each other over loopback and over abstract local sockets. */
#ifndef SP_HOST_H
#define SP_HOST_H

#include "spccl.h"

#include <stdbool.h>

#define SP_HOST_BOOT_BYTES 36u /* the kernel's boot id */
#define SP_HOST_ID_BYTES 44u   /* boot id, u64 network namespace */

/* Identity of the host of this process. `name`: NULL or "" for the network namespace that it is in. Else processes
 * with another name count as on another host, whatever their namespaces. Errors: SYSTEM. */
spccl_status sp_host_identity(const char *name, uint8_t out[SP_HOST_ID_BYTES]);
/* True if two hosts are one kernel: with other namespaces, or with other names. */
bool sp_host_same_kernel(const uint8_t *a, const uint8_t *b);

#endif
