/* host.h - the identity of a host. Two processes with the same identity have the same kernel and the same
 * network namespace. So they reach each other over loopback and over abstract local sockets. */
#ifndef SP_HOST_H
#define SP_HOST_H

#include "spccl.h"

#define SP_HOST_BOOT_BYTES 36u /* the kernel's boot id */
#define SP_HOST_ID_BYTES 44u   /* boot id, u64 network namespace */

/* Identity of the host of this process. Errors: SYSTEM. */
spccl_status sp_host_identity(uint8_t out[SP_HOST_ID_BYTES]);

#endif
