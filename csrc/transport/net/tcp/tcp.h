/* tcp.h - the data of transport tcp. tcp_address.c: listening, and addresses as bytes. tcp_connect.c:
 * start-up. tcp.c: messages. tcp_send.c: whose messages leave first. tcp_limit.c: bytes in flight. */
#ifndef SP_TCP_H
#define SP_TCP_H

#include "core/contract/transport.h"
#include "transport/common/acceptor.h"
#include "transport/common/forks.h"
#include "transport/common/ip.h"
#include "transport/net/tcp/tcp_drain.h"
#include "transport/net/tcp/tcp_priority.h"
#include "transport/net/tcp/tcp_socket.h"
#include "transport/net/tcp/tcp_window.h"

#include <unistd.h>

#define SP_TCP_SOCKETS_MAX 16u
#define SP_TCP_ABORT_BYTES (4u + SP_ABORT_TEXT_CAP)
#define SP_TCP_TIMER_EVENT UINT64_MAX /* epoll's data of the timer; no socket has it */

enum sp_tcp_state {
    SP_TCP_ABSENT,          /* not added */
    SP_TCP_CONNECT_CONTROL, /* this rank connects the control connection, and so finds an IP that works */
    SP_TCP_CONNECT_QUEUES,  /* this rank connects the sockets of the queues */
    SP_TCP_EXPECT_CONTROL,  /* the peer connects the control connection */
    SP_TCP_EXPECT_QUEUES,   /* the peer connects the sockets of the queues */
    SP_TCP_UP
};

/* The address of an endpoint, parsed. */
typedef struct sp_tcp_address {
    uint8_t id[SP_HS_ID_BYTES], host[SP_HOST_ID_BYTES];
    sp_ips ips; /* with the port */
} sp_tcp_address;

/* One connection that this rank is connecting. */
struct sp_tcp_connecting {
    int fd;                          /* -1: not started */
    bool proving;                    /* connected; the handshake runs */
    int64_t since_ns, not_before_ns; /* when this phase began; when the next try may start */
    sp_hs hs;
};

struct sp_tcp_queue {
    uint64_t n_sent, n_received; /* messages; n % n_sockets is the next one's socket */
    uint64_t n_notes;            /* sent before the link carried messages (set_control) */
    size_t reserved;             /* payload bytes; 0: nothing is reserved */
    bool blocked;                /* the last reserve found no space */
};

struct sp_tcp_peer {
    enum sp_tcp_state state;
    bool gone;
    char gone_text[160];
    int64_t ended_ns;              /* when this rank saw a socket of the peer end; 0: none has */
    int control;                   /* control connection; -1: none */
    uint32_t n_sockets, n_up;      /* sockets per queue; sockets connected in all */
    struct sp_tcp_socket *sockets; /* [n_queues * n_sockets], queue by queue */
    struct sp_tcp_queue queues[SP_QUEUES_MAX];
    size_t abort_done;
    uint8_t abort_bytes[SP_TCP_ABORT_BYTES];
    uint8_t host[SP_HOST_ID_BYTES];
    bool same_host;
    bool is_control; /* it carries notes, not messages */
    bool use_loopback;
    /* while connecting */
    bool refused; /* at some IP the secret or the version was another */
    sp_tcp_address *address;
    int attempt;                          /* number of the try; picks the IP (ip_of) */
    struct sp_tcp_connecting *connecting; /* [1 + n_queues * n_sockets] control, sockets */
    char cause[200];                      /* why the last try failed */
};

struct sp_tcp {
    sp_endpoint_config config;
    sp_tcp_address self;
    int epoll_fd, timer_fd;
    sp_acceptor acceptor;
    struct sp_tcp_peer *peers; /* [world_size] */
    sp_tcp_window window;      /* of the sockets to other hosts */
    sp_tcp_drain drain;        /* of the sockets to other hosts */
    sp_tcp_priority priority;  /* of the sockets to other hosts */
    uint32_t n_held;           /* sockets that are `held` */
    bool resend;               /* held sockets may send now: progress looks */
    bool timer_runs;
    bool changed;   /* there is a change that arm has not reported yet */
    bool unread;    /* a socket may have more to read, without a further event */
    int n_ending;   /* peers that are not `gone` yet although a socket ended */
    int abort_rank; /* -1: none */
    char abort_text[SP_ABORT_TEXT_CAP];
    sp_fork_guard guard;
};

static inline struct sp_tcp *sp_tcp_self(sp_endpoint *ep)
{
    return (struct sp_tcp *)ep;
}
static inline uint32_t sp_tcp_n_sockets(const struct sp_tcp *ep, const struct sp_tcp_peer *p)
{
    return (uint32_t)ep->config.n_queues * p->n_sockets;
}

/* tcp_address.c */
/* Listen where SPCCL_TCP_ADDR says, and fill ep->self. Errors: SETTING, SYSTEM. */
spccl_status sp_tcp_listen(struct sp_tcp *ep, int *listen_fd);
/* False if the bytes are not the address of an endpoint. */
bool sp_tcp_parse_address(const uint8_t *bytes, size_t n_bytes, sp_tcp_address *out);
bool sp_tcp_same_host(const sp_tcp_address *a, const sp_tcp_address *b);
/* True if both ranks are in one kernel and publish nothing but loopback: hosts that differ by name alone. */
bool sp_tcp_only_loopback(const sp_tcp_address *a, const sp_tcp_address *b);
/* As in transport.h. */
spccl_status sp_tcp_write_address(sp_endpoint *ep, uint8_t *out, size_t *bytes);
bool sp_tcp_can_reach(sp_endpoint *ep, const uint8_t *address, size_t bytes, char *why, size_t why_cap);

void sp_tcp_describe(sp_endpoint *ep, int peer, char *out, size_t cap);
void sp_tcp_local_ip(sp_endpoint *ep, int peer, char *out, size_t cap);

/* tcp_rate.c. As in transport.h. */
uint32_t sp_tcp_rate_mbps(sp_endpoint *ep);
void sp_tcp_inform(const char **value, const char **why);

/* tcp_connect.c */
spccl_status sp_tcp_start_acceptor(struct sp_tcp *ep, int listen_fd);
spccl_status sp_tcp_add_peer(sp_endpoint *ep, int peer, const uint8_t *address, size_t bytes);
spccl_status sp_tcp_connect_step(sp_endpoint *ep);
/* Free what only start-up needs. */
void sp_tcp_end_connecting(struct sp_tcp *ep, struct sp_tcp_peer *p);

/* tcp_limit.c */
/* Call when all peers are connected: limit what the sockets to other hosts may have in flight. */
void sp_tcp_limit_window(struct sp_tcp *ep);
/* Call when sp_tcp_window_due: measure, and apply a new limit if it has changed. */
void sp_tcp_update_window(struct sp_tcp *ep, int64_t now_ns);
/* Call when sp_tcp_drain_due: the same for calls that are too short for sp_tcp_update_window. */
void sp_tcp_learn_rate(struct sp_tcp *ep, int64_t now_ns);

/* tcp_send.c */
/* Make the timer that ends the holding of sockets. Errors: SYSTEM. */
spccl_status sp_tcp_open_timer(struct sp_tcp *ep);
/* The timer's event came. */
void sp_tcp_end_timer(struct sp_tcp *ep);
/* Send the message that the caller has written, over a socket of this queue. */
void sp_tcp_commit(struct sp_tcp *ep, int peer, int queue, struct sp_tcp_socket *s, uint32_t call);
/* Write what the kernel takes, unless the socket is held. */
void sp_tcp_flush(struct sp_tcp *ep, int peer, int queue, struct sp_tcp_socket *s);
/* Call when ep->resend: write to the sockets that were held and may send now. */
void sp_tcp_resend(struct sp_tcp *ep);

/* tcp.c */
/* A socket of the peer ended. The peer counts as gone when its control connection ends too, or when nothing
 * comes over that connection for some time. */
void sp_tcp_note_end(struct sp_tcp *ep, int peer);
/* Read the control connection: an abort, or the peer's end. */
void sp_tcp_look_at_control(struct sp_tcp *ep, int peer);

#endif
