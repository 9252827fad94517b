/* sock.h - non-blocking sockets: connect, partial reads and writes, addresses as text. */
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

/* Read or write `bytes` bytes in one or more calls. *done counts those done: set it to 0 before the first
 * call. SPCCL_OK: all are done. SPCCL_AGAIN: call again later. Errors: PEER (the connection was closed or
 * broke). The text names no rank: the caller knows it. */
spccl_status sp_sock_read(int fd, void *buf, size_t bytes, size_t *done);
spccl_status sp_sock_write(int fd, const void *buf, size_t bytes, size_t *done);

/* Start connecting. *out is non-blocking and close-on-exec. Then call sp_sock_connected until it returns
 * something other than SPCCL_AGAIN. Errors: SYSTEM (no socket), PEER (refused, unreachable). */
spccl_status sp_sock_connect(const sp_sock_address *to, int *out);
spccl_status sp_sock_connected(int fd);
/* Close *fd unless it is -1, and set it to -1. */
void sp_sock_close(int *fd);
/* Set the TCP options: no delay, keep-alive. */
void sp_sock_tune_tcp(int fd);

/* "192.0.2.1:80", "[::1]:80", "local socket". */
void sp_sock_text(const sp_sock_address *address, char *out, size_t cap);
/* The address of a connection's other end, as text. */
void sp_sock_peer_text(int fd, char *out, size_t cap);
/* The IP address of this end of a connection, and of the other end, without ports: "192.0.2.1". */
void sp_sock_ip_texts(int fd, char *mine, char *theirs, size_t cap);

#endif
