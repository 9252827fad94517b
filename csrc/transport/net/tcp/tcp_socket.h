/* tcp_socket.h - one socket that carries messages of one queue, with two bounded buffers. It knows no ranks:
 * tcp.c chooses the socket of a message, and knows who is at the other end.
 *
 * On the wire a message is a record (record.h). Head and payload are contiguous in the buffer and leave in one
 * call. After the socket was full, several messages leave in one call.
 *
 * `readable` and `writable` belong to edge-triggered events: an event sets them, and a call that finds
 * nothing clears them. So an idle or full socket costs no call. */
#ifndef SP_TCP_SOCKET_H
#define SP_TCP_SOCKET_H

#include "transport/common/mirror.h"
#include "transport/common/record.h"

#define SP_TCP_HEAD_BYTES SP_RECORD_HEAD_BYTES
/* Calls whose messages in one socket are told apart. The executor works on as many collectives. If there are
 * more, messages of later calls count as the last of these. */
#define SP_TCP_CALL_RANGES 8

/* Neighbouring messages of one call. */
typedef struct sp_tcp_call_range {
    uint32_t call;
    uint64_t end; /* messages committed on this socket up to the end of the range, ever */
} sp_tcp_call_range;

typedef struct sp_tcp_socket {
    int fd; /* owned; -1: not connected */
    sp_mirror in, out;
    uint64_t n_left; /* messages that the kernel has taken completely, ever */
    uint64_t n_committed;
    sp_tcp_call_range ranges[SP_TCP_CALL_RANGES]; /* of the messages in `out` */
    int n_ranges;
    size_t first_left;     /* bytes up to the end of the first message in `out`; 0: `out` is empty */
    uint64_t peer_full_us; /* of sp_tcp_drain_add_facts */
    bool in_flight;        /* the kernel may have bytes that the peer has not acknowledged: tcp_limit.c */
    bool readable, writable;
    bool held;    /* messages of earlier calls go first: tcp_send.c */
    bool hung_up; /* the peer closed its end: read on until `ended` */
    bool ended;   /* no more bytes will arrive */
    bool cut;     /* no more bytes can be sent */
    bool shut;    /* shutdown was called: this end sends no more */
} sp_tcp_socket;

/* Takes over fd if it succeeds. Errors: NOMEM. */
spccl_status sp_tcp_socket_open(sp_tcp_socket *s, int fd, size_t buffer_bytes);
/* Accepts a socket that is not open. */
void sp_tcp_socket_close(sp_tcp_socket *s);

/* Reserve space for a payload. Returns where to write it; NULL if there is no space now. */
void *sp_tcp_socket_reserve(sp_tcp_socket *s, size_t bytes);
/* Add the reserved payload, which the caller has written, to the bytes to send. */
void sp_tcp_socket_commit(sp_tcp_socket *s, uint32_t queue, uint32_t sequence, size_t bytes, uint32_t call);
/* The call of the first bytes to send. 0 if there are none. */
static inline uint32_t sp_tcp_socket_call(const sp_tcp_socket *s)
{
    return s->n_ranges != 0 ? s->ranges[0].call : 0;
}
/* Send what the kernel takes. True if bytes left the buffer, or if the socket is now `cut`. */
bool sp_tcp_socket_flush(sp_tcp_socket *s);

/* Read once, a bounded number of bytes. True if bytes or the end arrived. */
bool sp_tcp_socket_fill(sp_tcp_socket *s);
/* Get the first message. AGAIN: it is not complete yet. Errors: FORMAT (its head differs from `want`; the
 * text is a clause). */
spccl_status sp_tcp_socket_peek(const sp_tcp_socket *s, const sp_record_expected *want, const void **out,
                                size_t *bytes);
/* Drop the first message, which has `bytes` bytes. */
void sp_tcp_socket_release(sp_tcp_socket *s, size_t bytes);
/* True if a complete message is there, or an impossible head. */
bool sp_tcp_socket_has_message(const sp_tcp_socket *s);

/* Call repeatedly before closing. Sends what is left, then shuts the socket down for sending; drops what
 * arrives. True while the other end's kernel does not have all bytes. */
bool sp_tcp_socket_finish(sp_tcp_socket *s);

#endif
