/* sock.h - non-blocking sockets: partial read and write, address text. Knows no protocol. */
#ifndef SP_SOCK_H
#define SP_SOCK_H

#include "spccl.h"

#include <stdbool.h>
#include <sys/socket.h>

#define SP_SOCK_TEXT_CAP 80 /* "[ffff:...]:65535" and more */

typedef struct sp_sock_address {
    struct sockaddr_storage storage;
    socklen_t bytes;
} sp_sock_address;

/* SPCCL_OK: all of `bytes` are done; SPCCL_AGAIN: *done of them so far, call again later; SPCCL_ERR_PEER: the
 * other end closed or broke the connection (text set, names nobody: the caller knows who it was).
 * *done starts at 0 and is kept between the calls. */
spccl_status sp_sock_read(int fd, void *buf, size_t bytes, size_t *done);
spccl_status sp_sock_write(int fd, const void *buf, size_t bytes, size_t *done);

/* Start connecting: *out is non-blocking and close-on-exec. Then sp_sock_connected until it is not
 * SPCCL_AGAIN. Errors: SYSTEM (no socket), PEER (refused, unreachable). */
spccl_status sp_sock_connect(const sp_sock_address *to, int *out);
spccl_status sp_sock_connected(int fd);
/* Close *fd unless it is -1, and set it to -1. */
void sp_sock_close(int *fd);
/* Non-blocking, close-on-exec; TCP: no delay, keep-alive. */
void sp_sock_tune_tcp(int fd);

/* "192.0.2.1:80", "[::1]:80", "local socket". */
void sp_sock_text(const sp_sock_address *address, char *out, size_t cap);
/* The other end of a connection. */
void sp_sock_peer_text(int fd, char *out, size_t cap);

#endif
