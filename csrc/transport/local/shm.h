/* shm.h - what the two halves of transport shm share: shm_connect.c (start-up) and shm.c (moving messages).
 */
#ifndef SP_SHM_H
#define SP_SHM_H

#include "transport/common/forks.h"
#include "transport/common/host.h"
#include "transport/common/local_socket.h"
#include "transport/local/ringlink.h"

#include <unistd.h>

#define SP_SHM_ABORT_BYTES (4u + SP_ABORT_TEXT_CAP)
#define SP_SHM_MESSAGE_BYTES 16u /* that passes the descriptors: shm_connect.c */

enum sp_shm_state {
    SP_SHM_ABSENT,   /* not added */
    SP_SHM_CONNECT,  /* this rank connects to it */
    SP_SHM_EXPECTED, /* it connects to this rank */
    SP_SHM_EXCHANGE, /* connected; descriptors travel */
    SP_SHM_UP,
    SP_SHM_GONE
};

struct sp_shm_peer {
    enum sp_shm_state state;
    uint8_t id[SP_HS_ID_BYTES];
    int sock, out_fd, wake_fd; /* bell: the peer's; -1: none */
    sp_local_connect connect;
    bool sent;
    sp_local_message received;
    uint8_t message[SP_SHM_MESSAGE_BYTES]; /* as received */
    void *out, *in;
    size_t abort_done;
    uint8_t abort_bytes[SP_SHM_ABORT_BYTES];
    sp_ring_link link;
};

struct sp_shm {
    sp_endpoint_config config;
    int wake_fd, epoll_fd;
    sp_local_listener listener;
    uint8_t host[SP_HOST_ID_BYTES]; /* this host, read once: both ends must find the same answer later */
    struct sp_shm_peer *peers;      /* [world_size] */
    int64_t looked_ns;
    bool look_now;
    int abort_rank; /* -1: none */
    char abort_text[SP_ABORT_TEXT_CAP];
    pid_t pid; /* a child of fork must leave its parent's connections alone */
    sp_fork_guard guard;
};

static inline struct sp_shm *sp_shm_self(sp_endpoint *ep)
{
    return (struct sp_shm *)ep;
}
static inline size_t sp_shm_block_bytes(const struct sp_shm *ep)
{
    return sp_ring_block_bytes(ep->config.n_queues, ep->config.queue_bytes);
}

/* As in transport.h. */
spccl_status sp_shm_address(sp_endpoint *ep, uint8_t *out, size_t *bytes);
bool sp_shm_can_reach(sp_endpoint *ep, const uint8_t *address, size_t bytes, char *why, size_t why_cap);
spccl_status sp_shm_add_peer(sp_endpoint *ep, int peer, const uint8_t *address, size_t bytes);
spccl_status sp_shm_connect_step(sp_endpoint *ep);
/* Listen on the local socket that the endpoint's id names. Errors: SYSTEM, NOMEM. */
spccl_status sp_shm_listen(struct sp_shm *ep);
/* Add to the endpoint's epoll set. Errors: SYSTEM. */
spccl_status sp_shm_watch(struct sp_shm *ep, int fd);

#endif
