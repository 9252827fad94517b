/* acceptor.h - a listening socket and the connections on it that have not proven themselves yet.
 * Strangers (wrong secret, noise, silence) are dropped with a log line; they hold at most
 * SP_ACCEPTOR_PENDING places for a bounded time and never hold up the others. */
#ifndef SP_ACCEPTOR_H
#define SP_ACCEPTOR_H

#include "transport/common/handshake.h"

#define SP_ACCEPTOR_PENDING 64

typedef struct sp_acceptor_config {
    int rank;              /* for log lines; -1: none */
    const uint8_t *secret; /* borrowed */
    bool tcp;              /* set TCP options on what is accepted */
    void *ctx;
    /* See sp_hs.check. */
    spccl_status (*check)(void *ctx, const sp_hs_hello *hello);
    /* A proven connection, now owned by the callee. What it returns, if not SPCCL_OK, ends the step. */
    spccl_status (*ready)(void *ctx, int fd, const sp_hs_hello *hello);
} sp_acceptor_config;

typedef struct sp_acceptor {
    sp_acceptor_config config;
    int listen_fd; /* owned; -1: closed */
    int n_pending, n_dropped;
    struct sp_pending {
        int64_t since_ns;
        sp_hs hs;
    } * pending; /* [SP_ACCEPTOR_PENDING] */
} sp_acceptor;

/* Owns listen_fd (non-blocking, listening) from here on, also on failure. Errors: NOMEM. */
spccl_status sp_acceptor_init(sp_acceptor *a, int listen_fd, const sp_acceptor_config *config);
/* Accept and go on with what is there; never blocks. Errors: SYSTEM (no descriptor for a connection); what `ready` returned; MISMATCH if a proven
 * dialler was refused for that (both ends then know why). */
spccl_status sp_acceptor_step(sp_acceptor *a);
/* Accepts a zeroed or closed one. */
void sp_acceptor_close(sp_acceptor *a);
/* Only the descriptors: what a child of fork may do (forks.h). */
void sp_acceptor_close_descriptors(sp_acceptor *a);

#endif
