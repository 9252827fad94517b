/* host.h - which host this is: two processes with the same identity share a kernel and a network namespace,
 * so they reach each other over loopback and abstract local sockets. */
#ifndef SP_HOST_H
#define SP_HOST_H

#include "spccl.h"

#define SP_HOST_BOOT_BYTES 36u /* the kernel's boot id */
#define SP_HOST_ID_BYTES 44u   /* boot id, u64 network namespace */

/* Errors: SYSTEM. */
spccl_status sp_host_identity(uint8_t out[SP_HOST_ID_BYTES]);

#endif
