/* transport.h - the contract between core and the ways bytes move between two ranks: sp_transport.
 * Implemented in csrc/transport; core sees only `const sp_transport *`. A transport knows no formats
 * and no schedules: it carries messages of any bytes.
 *
 * An endpoint is one rank's end of one communicator in one transport. Between two ranks there are
 * `n_queues` queues each way. A queue is an ordered, bounded, reliable queue of messages; a full queue
 * never holds up another queue (schedules rely on that to be free of deadlock).
 * The sender reserves room in the queue and writes the message there; the receiver reads it in place
 * and releases it. Nothing here blocks, but `close`, which may wait a short bounded time (docs/TRANSPORTS.md)
 * until what was sent has arrived. One thread at a time per endpoint, except wake-ups by peers. */
#ifndef SP_TRANSPORT_H
#define SP_TRANSPORT_H

#include "spccl.h"

#include <stdbool.h>

#define SP_ADDRESS_BYTES_MAX 512u /* one endpoint's address, as published in the store */
#define SP_SECRET_BYTES 32u
#define SP_ABORT_TEXT_CAP 400u
#define SP_QUEUES_MAX 4

typedef struct sp_endpoint_config {
    int rank, world_size;
    uint8_t secret[SP_SECRET_BYTES]; /* every connection proves that it knows this */
    uint64_t group_tag;              /* hash of the group's name: keeps groups of one job apart */
    int n_queues;                    /* 1 .. SP_QUEUES_MAX */
    size_t queue_bytes;              /* room of one queue in one direction; a power of two */
    uint32_t n_sockets;              /* tcp: sockets per peer and queue, 1 .. 16 */
    int64_t deadline_ns;             /* connecting must be over by then (clock.h) */
} sp_endpoint_config;

/* Opaque: each transport casts it to its own struct. */
typedef struct sp_endpoint sp_endpoint;

typedef struct sp_transport {
    const char *name; /* "shm" */
    /* What a byte costs on its way to the peer, beside encode and decode: the choice of format weighs it.
     * Each table says where its number comes from. */
    double ns_per_byte;

    /* Make an endpoint that peers can find; *out is zero-initialised by the caller. Borrows config until
     * return. */
    spccl_status (*open)(const sp_endpoint_config *config, sp_endpoint **out);
    /* This endpoint's address for its peers: *bytes <= SP_ADDRESS_BYTES_MAX. */
    spccl_status (*address)(sp_endpoint *ep, uint8_t *out, size_t *bytes);
    /* Can a pair (this endpoint, that address) use this transport? Must give the same answer at both
     * ends. `why` gets one clause either way: "same host", "other host". */
    bool (*can_reach)(sp_endpoint *ep, const uint8_t *address, size_t bytes, char *why, size_t why_cap);
    /* The pair (this rank, peer) will use this transport. Called before the first connect_step. */
    spccl_status (*add_peer)(sp_endpoint *ep, int peer, const uint8_t *address, size_t bytes);
    /* Go on connecting: SPCCL_AGAIN until every added peer is up in both directions. A stranger (wrong
     * secret, noise, silence) is dropped and logged, and does not disturb the others. When the deadline
     * passes: SPCCL_ERR_TIMEOUT with the ranks still missing; SPCCL_ERR_AUTH if a peer refused our secret. */
    spccl_status (*connect_step)(sp_endpoint *ep);

    /* Largest message that reserve accepts. At least queue_bytes / 4. */
    size_t (*message_max)(sp_endpoint *ep);
    /* Room for a message of exactly `bytes` (> 0) at the end of the queue to `peer`, 16-byte aligned.
     * SPCCL_AGAIN if there is none now; SPCCL_ERR_PEER if the peer is gone. Nothing happens until commit:
     * reserving again before that replaces the reservation (so a caller may first ask for the worst case, and
     * then, for a smaller message, again for its exact size: that never fails). */
    spccl_status (*reserve)(sp_endpoint *ep, int peer, int queue, size_t bytes, void **out);
    /* The reserved message is written: send it. */
    spccl_status (*commit)(sp_endpoint *ep, int peer, int queue);
    /* The oldest message not released, 16-byte aligned; it stays where it is until released. SPCCL_AGAIN if
     * none is there; SPCCL_ERR_PEER if none is there and the peer is gone (what a peer sent before it went is
     * still delivered). */
    spccl_status (*peek)(sp_endpoint *ep, int peer, int queue, const void **out, size_t *bytes);
    spccl_status (*release)(sp_endpoint *ep, int peer, int queue);
    /* True when the first n messages that were committed on this queue have left this process: they reach the
     * peer even if this process exits now. Also true if the peer is gone. */
    bool (*flushed)(sp_endpoint *ep, int peer, int queue, uint64_t n);

    /* Move bytes and take note of peers that left. SPCCL_ERR_ABORTED if a peer sent an abort: its
     * rank and text then go to *peer and text[SP_ABORT_TEXT_CAP]. A peer that is merely gone is no error
     * here. */
    spccl_status (*progress)(sp_endpoint *ep, int *peer, char *text);
    /* A file descriptor that becomes readable when calling progress may change something, provided
     * that `arm` returned SPCCL_OK and disarm was not called since. For epoll, level-triggered. */
    int (*wait_fd)(sp_endpoint *ep);
    /* About to sleep on wait_fd: SPCCL_OK, or SPCCL_AGAIN (then do not sleep; disarm is not needed) if
     * something has happened that peek, reserve and progress have not shown yet; each change is told once. A
     * queue wakes its rank for room only if the last reserve on it came back SPCCL_AGAIN. */
    spccl_status (*arm)(sp_endpoint *ep);
    void (*disarm)(sp_endpoint *ep);
    /* Tell every peer, best effort, out of band (also when queues are full), that this rank gives up. */
    void (*abort_peers)(sp_endpoint *ep, const char *text);

    /* Memory held for queues, in bytes, counted once (shared memory at the rank that made it). */
    size_t (*memory_bytes)(sp_endpoint *ep);
    /* Close; accepts NULL and half-open endpoints. Leaves no file, segment, socket or thread behind. */
    void (*close)(sp_endpoint *ep);
} sp_transport;

/* registry.c: the transports of this build in the order in which pairs try them; NULL-terminated. */
extern const sp_transport *const sp_transports[];
/* By name; NULL if there is none. */
const sp_transport *sp_transport_find(const char *name);
/* A comma list ("shm,tcp"; spaces are allowed) as transports in its order: out[*n], *n <= cap.
 * Errors: SETTING (an unknown name, a name twice, an empty list, more than cap). */
spccl_status sp_transport_parse_list(const char *text, const sp_transport **out, size_t cap, size_t *n);

#endif
