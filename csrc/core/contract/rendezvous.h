/* rendezvous.h - contract: a key-value rendezvous for callers without a store (behind spccl_unique_id).
 * Implemented in csrc/transport/start/rendezvous.c. */
#ifndef SP_RENDEZVOUS_H
#define SP_RENDEZVOUS_H

#include "core/contract/transport.h"

/* Start serving on `listen_addr` in this process, until it exits; the id holds address, port and secret.
 * Errors: SYSTEM, ARG (address). */
spccl_status sp_rendezvous_start(const char *listen_addr, spccl_unique_id *out);
/* Connect to it. `out_store` is freed with sp_rendezvous_disconnect.  Errors: ARG (not an id), VERSION,
 * TIMEOUT, AUTH, PEER (nobody listens there, or another rendezvous), SYSTEM. */
spccl_status sp_rendezvous_connect(const spccl_unique_id *id, int64_t timeout_ms, spccl_store *out_store,
                                   uint8_t secret[SP_SECRET_BYTES]);
void sp_rendezvous_disconnect(spccl_store *store);

#endif
