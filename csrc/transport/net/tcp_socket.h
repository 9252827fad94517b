/* tcp_socket.h - one socket that carries messages of one queue, with its two bounded buffers. Knows no ranks:
 * its user deals messages over sockets and says who is at the other end.
 *
 * On the wire a message is a head of 16 bytes, little-endian
 *   0 u32 payload bytes   4 u32 sequence number in its queue   8 u32 queue   12 u32 "SPMS"
 * then the payload, then zeros up to a multiple of 16. Head and payload lie one after the other in the
 * buffer and leave in one call; so do several messages when the socket was full.
 *
 * `readable` and `writable` mirror edge-triggered events: true until a call found nothing, so an idle or
 * full socket costs no call. */
#ifndef SP_TCP_SOCKET_H
#define SP_TCP_SOCKET_H

#include "transport/common/mirror.h"

#define SP_TCP_HEAD_BYTES 16u

typedef struct sp_tcp_socket {
    int fd; /* owned; -1: not connected */
    sp_mirror in, out;
    uint64_t n_left;   /* messages of which every byte was handed to the kernel, ever */
    size_t first_left; /* bytes up to the end of the first message in `out`; 0: it is empty */
    bool readable, writable;
    bool hung_up; /* the kernel said that the end is near: read until it is there */
    bool ended;   /* nothing more will come */
    bool cut;     /* nothing more can be sent */
    bool shut;    /* we said that nothing more will come */
} sp_tcp_socket;

/* What a message must be: the next of its queue. */
typedef struct sp_tcp_expected {
    uint32_t queue, sequence;
    size_t bytes_max;
} sp_tcp_expected;

/* Owns fd from here on, if it succeeds. Errors: NOMEM. */
spccl_status sp_tcp_socket_open(sp_tcp_socket *s, int fd, size_t buffer_bytes);
/* Accepts one that is not open. */
void sp_tcp_socket_close(sp_tcp_socket *s);

/* Where a payload of `bytes` goes; NULL if there is no room now. */
void *sp_tcp_socket_reserve(sp_tcp_socket *s, size_t bytes);
/* The reserved payload is written: queue it. */
void sp_tcp_socket_commit(sp_tcp_socket *s, uint32_t queue, uint32_t sequence, size_t bytes);
/* Write what the socket takes. True if bytes left the buffer, or the socket was cut. */
bool sp_tcp_socket_flush(sp_tcp_socket *s);

/* Read what is there, a bounded amount. True if something came, or the end. */
bool sp_tcp_socket_fill(sp_tcp_socket *s);
/* The first message. SPCCL_AGAIN if it is not all there; SPCCL_ERR_FORMAT, with a clause as the text, if its
 * head is not what it must be. */
spccl_status sp_tcp_socket_peek(const sp_tcp_socket *s, const sp_tcp_expected *want, const void **out,
                                size_t *bytes);
/* Drop the first message, `bytes` long. */
void sp_tcp_socket_release(sp_tcp_socket *s, size_t bytes);
/* Is a whole message there, or a head that cannot be? */
bool sp_tcp_socket_has_message(const sp_tcp_socket *s);

/* On the way to closing: send what is left, say that it was all, throw away what comes. True while the other
 * end's kernel does not have it all. */
bool sp_tcp_socket_wind_up(sp_tcp_socket *s);

#endif
