/* local_socket.h - connections between two ranks of one host over a local socket (AF_UNIX), on which ranks
 * pass each other memory as file descriptors: name, listening, connecting, messages. Both shm.c and nvlink.c
 * use it.
 *
 * Of two ranks the lower one connects. Both prove the job secret (handshake.h); after that each end sends one
 * message of a fixed length, and with it a fixed number of descriptors. The socket has an abstract name made
 * of the listener's random id, so no file is left behind. Nothing here blocks. */
#ifndef SP_LOCAL_SOCKET_H
#define SP_LOCAL_SOCKET_H

#include "transport/common/acceptor.h"

#define SP_LOCAL_FDS_MAX 2 /* descriptors of a message */
#define SP_LOCAL_MESSAGE_MAX 256u

typedef struct sp_local_config {
    const char *transport; /* "shm", "nvlink": for texts */
    const char *what;      /* what ranks pass each other, for texts: "queues" */
    uint32_t kind;         /* SP_HS_SHM, SP_HS_GPU */
    int rank, world_size;
    const uint8_t *secret; /* [SP_HS_SECRET_BYTES], borrowed until the listener is closed */
    uint64_t group_tag;
    uint32_t n_queues; /* both ends must have the same number of queues of the same length; 0: has none */
    uint64_t queue_bytes;
} sp_local_config;

/* One connection under way to a higher rank. Starts zeroed. */
typedef struct sp_local_connect {
    enum { SP_LOCAL_UNCONNECTED, SP_LOCAL_CONNECTING, SP_LOCAL_PROVING, SP_LOCAL_PROVEN } state;
    sp_hs hs;
} sp_local_connect;

/* Bytes and descriptors of a message received so far. Starts zeroed. */
typedef struct sp_local_message {
    size_t n_bytes;
    int n_fds, fds[SP_LOCAL_FDS_MAX]; /* owned: whoever takes one over lowers n_fds */
} sp_local_message;

typedef struct sp_local_peer {
    enum {
        SP_LOCAL_ABSENT,   /* nothing is exchanged with it */
        SP_LOCAL_CONNECT,  /* this rank connects to it */
        SP_LOCAL_EXPECTED, /* it connects to this rank */
        SP_LOCAL_EXCHANGE, /* connected; messages travel */
        SP_LOCAL_DONE
    } state;  /* the owner sets the first one */
    int sock; /* -1: none */
    sp_local_connect connect;
    bool sent;
    sp_local_message received;
    uint8_t message[SP_LOCAL_MESSAGE_MAX]; /* as received */
} sp_local_peer;

typedef struct sp_local_listener {
    sp_local_config config;
    uint8_t id[SP_HS_ID_BYTES]; /* random: the name of the socket */
    /* Before sp_local_listen: listen_fd is -1, all else zero. */
    sp_acceptor acceptor;
    sp_local_peer *peers; /* [world_size] */
} sp_local_listener;

/* Make the table of peers, draw an id and listen. Errors: SYSTEM, NOMEM; then call sp_local_close. */
spccl_status sp_local_listen(sp_local_listener *l, const sp_local_config *config);
/* Close all connections and free the table. */
void sp_local_close(sp_local_listener *l);
/* Close the descriptors and free nothing: for a child of fork (forks.h). */
void sp_local_close_descriptors(sp_local_listener *l);

/* The message that this rank sends to a peer. */
typedef struct sp_local_outgoing {
    const void *message;
    size_t bytes; /* at most SP_LOCAL_MESSAGE_MAX; the peer's has as many */
    int n_fds, fds[SP_LOCAL_FDS_MAX];
} sp_local_outgoing;
/* Go on exchanging messages with a peer, whose listener has `id`. SPCCL_OK: its message is in l->peers[rank], with at most
 * fds_max descriptors. Errors: as of the three functions below. */
spccl_status sp_local_exchange(sp_local_listener *l, int rank, const uint8_t id[SP_HS_ID_BYTES],
                               const sp_local_outgoing *out, int fds_max);

/* Go on connecting to `peer`, whose listener has `id`. SPCCL_AGAIN: not yet; SPCCL_OK: proven.
 *   fd   -1 at first; the caller's to close
 * Errors: PEER (it does not listen any more), SYSTEM, AUTH, or what the peer's listener says. The texts are
 * clauses: the caller names the ranks. */
spccl_status sp_local_connect_step(const sp_local_listener *l, sp_local_connect *c, int peer,
                                   const uint8_t id[SP_HS_ID_BYTES], int *fd);

/* Send a message of at most SP_LOCAL_MESSAGE_MAX bytes into an empty connection: all of it or nothing (SPCCL_AGAIN).
 *   fds   [n_fds <= SP_LOCAL_FDS_MAX]; the receiver gets copies
 * Errors: PEER. */
spccl_status sp_local_send(const sp_local_config *config, int fd, const void *message, size_t bytes,
                           const int *fds, int n_fds);

/* Receive a message of `bytes` bytes with at most `fds_max` descriptors into `buf`; SPCCL_AGAIN: not all is
 * there. Errors: PEER (closed, broke, or sent too many descriptors), SYSTEM (this process may open no
 * more). */
spccl_status sp_local_receive(const sp_local_config *config, int fd, void *buf, size_t bytes, int fds_max,
                              sp_local_message *m);
/* Close the descriptors that nobody took over. */
void sp_local_message_close(sp_local_message *m);

#endif
