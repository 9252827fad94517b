/* shm.h - the data of transport shm. shm_connect.c has the start-up, shm.c the rest; ringlink.c moves messages. */
#ifndef SP_SHM_H
#define SP_SHM_H

#include "transport/common/forks.h"
#include "transport/common/local_socket.h"
#include "transport/local/ringlink.h"

#include <unistd.h>

#define SP_SHM_ABORT_BYTES (4u + SP_ABORT_TEXT_CAP)

struct sp_shm_peer {
    uint8_t id[SP_HS_ID_BYTES];
    int out_fd, wake_fd; /* wake_fd is the peer's; -1: none */
    void *out, *in;      /* blocks of the link, mapped */
    size_t abort_done;   /* bytes read of abort_bytes */
    uint8_t abort_bytes[SP_SHM_ABORT_BYTES];
};

struct sp_shm {
    sp_ring_endpoint base; /* its wait_fd is an epoll set of wake_fd and all local sockets */
    sp_endpoint_config config;
    sp_local_listener listener;
    struct sp_shm_peer *peers; /* [world_size] */
    int64_t looked_ns;         /* when all sockets were last read */
    bool look_now;             /* read all sockets at the next progress */
    int abort_rank;            /* -1: none */
    char abort_text[SP_ABORT_TEXT_CAP];
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
/* Listen on a local socket. Errors: SYSTEM, NOMEM. */
spccl_status sp_shm_listen(struct sp_shm *ep);
/* Add fd to the endpoint's epoll set. Errors: SYSTEM. */
spccl_status sp_shm_watch(struct sp_shm *ep, int fd);

#endif
