/* tcp.h - what the files of transport tcp share: tcp_connect.c (start-up), tcp_stripe.c (one socket's buffers), tcp.c. */
#ifndef SP_TCP_H
#define SP_TCP_H

#include "acceptor.h"
#include "transport.h"

#include <unistd.h>

#define SP_TCP_RECORD_BYTES 16u /* in front of every message; see tcp_stripe.c */
#define SP_TCP_ABORT_BYTES (4u + SP_ABORT_TEXT_CAP)
#define SP_TCP_ABORT_MAGIC 0x41545053u /* "SPTA" */
#define SP_TCP_ADDRESSES_MAX 12
#define SP_TCP_SOCKETS_MAX 16

/* ---- one data socket: messages of one lane, both ways ---- */
typedef struct sp_tcp_stripe {
    int fd;              /* -1: not connected, or closed */
    int lane;
    bool ended;          /* nothing more can be read */
    bool broken;         /* nothing more can be written */
    uint32_t interest;   /* in the epoll set */
    size_t cap;          /* of each buffer */
    /* Out: records lie whole in the buffer; [sent, head) or, after a wrap, [sent, wrap) and [0, head). */
    uint8_t *out;
    size_t head, sent, wrap; /* wrap 0: none */
    size_t reserved_at, reserved_bytes; /* bytes 0: nothing is reserved */
    /* In: [read_at, filled) holds records as they came. */
    uint8_t *in;
    size_t read_at, filled;
} sp_tcp_stripe;

/* Buffers of `cap` bytes each, at least twice the largest record. Errors: NOMEM. */
spccl_status sp_tcp_stripe_init(sp_tcp_stripe *s, int lane, size_t cap);
void sp_tcp_stripe_fini(sp_tcp_stripe *s);
/* As reserve in transport.h, but for the texts. */
spccl_status sp_tcp_stripe_reserve(sp_tcp_stripe *s, size_t bytes, void **out);
void sp_tcp_stripe_commit(sp_tcp_stripe *s, uint64_t seq);
/* The oldest whole message: AGAIN if there is none, PEER if there will be none, FORMAT if its record is not what
 * must come (bytes beyond bytes_max, another lane or number). */
spccl_status sp_tcp_stripe_peek(sp_tcp_stripe *s, uint64_t seq, size_t bytes_max, const void **out, size_t *bytes);
void sp_tcp_stripe_release(sp_tcp_stripe *s);
/* Move bytes as far as the kernel lets us. */
void sp_tcp_stripe_read(sp_tcp_stripe *s);
void sp_tcp_stripe_write(sp_tcp_stripe *s);
bool sp_tcp_stripe_has_output(const sp_tcp_stripe *s);
bool sp_tcp_stripe_has_room(const sp_tcp_stripe *s);

/* ---- a connection being made ---- */
typedef enum sp_tcp_dial_state { SP_TCP_IDLE, SP_TCP_CONNECT, SP_TCP_PROVE, SP_TCP_DONE } sp_tcp_dial_state;
typedef struct sp_tcp_dial {
    sp_tcp_dial_state state;
    int fd;
    int64_t since_ns;
    sp_hs hs;
} sp_tcp_dial;

typedef struct sp_tcp_peer {
    bool added, up, gone, same_host;
    char gone_text[160];
    uint8_t id[SP_HS_ID_BYTES];
    int n_addresses, address; /* being tried, or found to work */
    sp_sock_address addresses[SP_TCP_ADDRESSES_MAX];
    bool auth_failed;      /* at some address */
    uint32_t n_sockets;    /* per lane */
    int control;           /* -1: not there */
    size_t abort_done;
    uint8_t abort_bytes[SP_TCP_ABORT_BYTES];
    sp_tcp_dial *dials;    /* while connecting, at the lower rank: [1 + n_lanes * n_sockets], control first */
    sp_tcp_stripe *stripes; /* [n_lanes * n_sockets], by lane */
    uint64_t next_send[SP_LANES_MAX], next_recv[SP_LANES_MAX]; /* message numbers: message k is on stripe k % n_sockets */
} sp_tcp_peer;

typedef struct sp_tcp {
    sp_endpoint_config config;
    uint8_t id[SP_HS_ID_BYTES];
    int epoll_fd;
    uint16_t port;
    sp_acceptor acceptor;
    sp_tcp_peer *peers; /* [world_size] */
    bool abort_seen;
    int abort_rank;
    char abort_text[SP_ABORT_TEXT_CAP];
    pid_t pid;
} sp_tcp;

static inline sp_tcp *sp_tcp_self(sp_endpoint *ep)
{
    return (sp_tcp *)ep;
}
static inline size_t sp_tcp_message_bytes_max(const sp_tcp *ep)
{
    return ep->config.lane_bytes / 4;
}
static inline void sp_tcp_close_fd(int *fd)
{
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
}

/* As in transport.h. */
spccl_status sp_tcp_address(sp_endpoint *ep, uint8_t *out, size_t *bytes);
bool sp_tcp_can_reach(sp_endpoint *ep, const uint8_t *address, size_t bytes, char *why, size_t why_cap);
spccl_status sp_tcp_add_peer(sp_endpoint *ep, int peer, const uint8_t *address, size_t bytes);
spccl_status sp_tcp_connect_step(sp_endpoint *ep);
/* Listen where SPCCL_TCP_ADDR says. Errors: SETTING, SYSTEM, NOMEM. */
spccl_status sp_tcp_listen(sp_tcp *ep);

#endif
