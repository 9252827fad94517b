/* rendezvous.h - a key-value server for callers that have no store. spccl_unique_id names such a server.
 * csrc/transport/start/rendezvous.c implements it. */
#ifndef SP_RENDEZVOUS_H
#define SP_RENDEZVOUS_H

#include "core/contract/transport.h"

/* Start a server in this process. The id holds its addresses, its port and a secret. The server is a thread and
 * a port. It ends when all ranks of the group have called sp_rendezvous_done and have disconnected, or when no
 * client was connected for idle_ms.
 *   listen_addr   as SPCCL_RENDEZVOUS_ADDR: an address or an interface of this host; empty: all
 * Errors: SYSTEM, NOMEM, SETTING (listen_addr). */
spccl_status sp_rendezvous_start(const char *listen_addr, int64_t idle_ms, spccl_unique_id *out);
/* Connect to the server of an id: try its addresses in turn until the server answers at one. The caller frees
 * `out_store` with sp_rendezvous_disconnect.
 * Errors: ARG (not an id), VERSION, TIMEOUT, AUTH, SYSTEM, PEER (no server listens there, or another one). */
spccl_status sp_rendezvous_connect(const spccl_unique_id *id, int64_t timeout_ms, spccl_store *out_store,
                                   uint8_t secret[SP_SECRET_BYTES]);
/* Call it when the group could not be made, with its status. If a rank did not come, the last error gets the
 * addresses of the server and what to check. Returns `st`. */
spccl_status sp_rendezvous_explain(const spccl_store *store, spccl_status st);
/* Tell the server that this rank has joined its group of world_size. Best effort: if it fails, the server
 * ends by idle_ms. */
void sp_rendezvous_done(const spccl_store *store, int world_size);
void sp_rendezvous_disconnect(spccl_store *store);

#endif
