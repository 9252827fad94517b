/* acceptor.h - a listening socket and its unproven connections. A connection that does not prove the job
 * secret (wrong secret, noise, silence) is closed with a log line. There are at most SP_ACCEPTOR_PENDING
 * unproven connections, each for a limited time, and none delays the others. */
#ifndef SP_ACCEPTOR_H
#define SP_ACCEPTOR_H

#include "core/base/rank_list.h"
#include "transport/common/handshake.h"

#define SP_ACCEPTOR_PENDING 64

typedef struct sp_acceptor_config {
    int rank;              /* for log lines; -1: no rank */
    const uint8_t *secret; /* borrowed */
    bool tcp;              /* set TCP options on accepted connections */
    void *ctx;
    /* See sp_hs.check. */
    spccl_status (*check)(void *ctx, const sp_hs_hello *hello);
    /* Called with each proven connection, which the callee then owns. A status other than SPCCL_OK ends the
     * step with that status. */
    spccl_status (*ready)(void *ctx, int fd, const sp_hs_hello *hello);
} sp_acceptor_config;

typedef struct sp_acceptor {
    sp_acceptor_config config;
    int listen_fd; /* owned; -1: closed */
    int n_pending, n_dropped;
    int64_t short_since_ns; /* when the process began to lack descriptors; 0: it does not */
    struct sp_pending {
        int64_t since_ns;
        sp_hs hs;
    } * pending; /* [SP_ACCEPTOR_PENDING] */
} sp_acceptor;

/* Takes over listen_fd, on failure too. It listens and is non-blocking. Errors: NOMEM. */
spccl_status sp_acceptor_init(sp_acceptor *a, int listen_fd, const sp_acceptor_config *config);
/* Accept new connections and continue all handshakes, without blocking. Errors: SYSTEM (no descriptor for a
 * connection, for 3 s), what `ready` returned, MISMATCH (`check` refused a proven rank because its settings differ;
 * that rank gets the same text). */
spccl_status sp_acceptor_step(sp_acceptor *a);
/* How its owner connects to peers. */
typedef struct sp_acceptor_peers {
    int world_size;
    void *ctx;
    spccl_status (*step)(void *ctx, int rank); /* continue with one; SPCCL_OK: connected, or not a peer */
    const char *before, *after;                /* of the peer in error texts: "connecting to", " over shm" */
} sp_acceptor_peers;
/* Accept connections, unless the acceptor is closed, and continue with all peers. AGAIN: `missing` lists those that are
 * not connected. Errors: those of both; they name the peer. */
spccl_status sp_acceptor_step_peers(sp_acceptor *a, const sp_acceptor_peers *peers, sp_rank_list *missing);
/* Accepts a zeroed or closed acceptor. */
void sp_acceptor_close(sp_acceptor *a);
/* Close the descriptors and free nothing: for a child of fork (forks.h). */
void sp_acceptor_close_descriptors(sp_acceptor *a);

#endif
