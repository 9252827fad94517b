/* sock.c - see sock.h. */
#include "transport/common/sock.h"

#include "core/base/status.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static bool would_block(int err)
{
    return err == EAGAIN || err == EWOULDBLOCK;
}

spccl_status sp_sock_read(int fd, void *buf, size_t bytes, size_t *done)
{
    while (*done < bytes) {
        ssize_t n = recv(fd, (uint8_t *)buf + *done, bytes - *done, MSG_DONTWAIT);
        if (n > 0)
            *done += (size_t)n;
        else if (n == 0)
            return SP_FAIL(SPCCL_ERR_PEER, "the connection was closed");
        else if (would_block(errno))
            return SPCCL_AGAIN;
        else if (errno != EINTR)
            return SP_FAIL_ERRNO(SPCCL_ERR_PEER, "the connection broke");
    }
    return SPCCL_OK;
}

spccl_status sp_sock_write(int fd, const void *buf, size_t bytes, size_t *done)
{
    while (*done < bytes) {
        ssize_t n = send(fd, (const uint8_t *)buf + *done, bytes - *done, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (n >= 0)
            *done += (size_t)n;
        else if (would_block(errno))
            return SPCCL_AGAIN;
        else if (errno != EINTR)
            return SP_FAIL_ERRNO(SPCCL_ERR_PEER, "the connection broke");
    }
    return SPCCL_OK;
}

spccl_status sp_sock_connect(const sp_sock_address *to, int *out)
{
    char text[SP_SOCK_TEXT_CAP];
    int family = to->storage.ss_family;
    int fd = socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return SP_FAIL_ERRNO(SPCCL_ERR_SYSTEM, "socket");
    if (family != AF_UNIX)
        sp_sock_tune_tcp(fd);
    /* A local socket gives EAGAIN if the listener's backlog is full. That ends this try; EINPROGRESS does
     * not. */
    if (connect(fd, (const struct sockaddr *)&to->storage, to->bytes) != 0 && errno != EINPROGRESS) {
        int err = errno;
        sp_sock_text(to, text, sizeof text);
        errno = err;
        (void)SP_FAIL_ERRNO(SPCCL_ERR_PEER, "connecting to %s", text);
        close(fd);
        errno = err; /* callers look for EAGAIN */
        return SPCCL_ERR_PEER;
    }
    *out = fd;
    return SPCCL_OK;
}

spccl_status sp_sock_connected(int fd)
{
    struct pollfd p = {.fd = fd, .events = POLLOUT};
    int err = 0;
    socklen_t n = sizeof err;
    if (poll(&p, 1, 0) <= 0)
        return SPCCL_AGAIN;
    if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &err, &n) != 0)
        return SP_FAIL_ERRNO(SPCCL_ERR_SYSTEM, "getsockopt");
    if (err != 0) {
        errno = err;
        return SP_FAIL_ERRNO(SPCCL_ERR_PEER, "connecting");
    }
    return SPCCL_OK;
}

void sp_sock_close(int *fd)
{
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
}

void sp_sock_tune_tcp(int fd)
{
    /* A lost host is noticed after about 30 s although nothing is sent. A dead process is noticed at once. */
    static const struct {
        int level, name, value;
    } options[] = {{IPPROTO_TCP, TCP_NODELAY, 1},
                   {SOL_SOCKET, SO_KEEPALIVE, 1},
                   {IPPROTO_TCP, TCP_KEEPIDLE, 10},
                   {IPPROTO_TCP, TCP_KEEPINTVL, 5},
                   {IPPROTO_TCP, TCP_KEEPCNT, 4}};
    for (size_t i = 0; i < sizeof options / sizeof *options; i++)
        (void)setsockopt(fd, options[i].level, options[i].name, &options[i].value, sizeof options[i].value);
}

void sp_sock_text(const sp_sock_address *address, char *out, size_t cap)
{
    char host[INET6_ADDRSTRLEN] = "?";
    if (address->storage.ss_family == AF_INET) {
        struct sockaddr_in in;
        memcpy(&in, &address->storage, sizeof in);
        inet_ntop(AF_INET, &in.sin_addr, host, sizeof host);
        snprintf(out, cap, "%s:%u", host, (unsigned)ntohs(in.sin_port));
    } else if (address->storage.ss_family == AF_INET6) {
        struct sockaddr_in6 in6;
        memcpy(&in6, &address->storage, sizeof in6);
        if (IN6_IS_ADDR_V4MAPPED(&in6.sin6_addr)) { /* IPv4, accepted by an IPv6 socket */
            inet_ntop(AF_INET, (const uint8_t *)&in6.sin6_addr + 12, host, sizeof host);
            snprintf(out, cap, "%s:%u", host, (unsigned)ntohs(in6.sin6_port));
            return;
        }
        inet_ntop(AF_INET6, &in6.sin6_addr, host, sizeof host);
        snprintf(out, cap, "[%s]:%u", host, (unsigned)ntohs(in6.sin6_port));
    } else {
        snprintf(out, cap, "local socket");
    }
}

void sp_sock_peer_text(int fd, char *out, size_t cap)
{
    sp_sock_address address = {.bytes = sizeof address.storage};
    if (getpeername(fd, (struct sockaddr *)&address.storage, &address.bytes) == 0)
        sp_sock_text(&address, out, cap);
    else
        snprintf(out, cap, "unknown address");
}

/* sp_sock_text without brackets and port. */
static void ip_text(const sp_sock_address *a, char *out, size_t cap)
{
    char text[SP_SOCK_TEXT_CAP];
    const char *start = text;
    size_t n;
    sp_sock_text(a, text, sizeof text);
    n = strrchr(text, ':') != NULL ? (size_t)(strrchr(text, ':') - text) : strlen(text);
    if (text[0] == '[') {
        start = text + 1;
        n -= 2;
    }
    snprintf(out, cap, "%.*s", (int)n, start);
}

void sp_sock_ip_texts(int fd, char *mine, char *theirs, size_t cap)
{
    sp_sock_address a = {.bytes = sizeof a.storage}, b = {.bytes = sizeof b.storage};
    mine[0] = theirs[0] = '\0';
    if (getsockname(fd, (struct sockaddr *)&a.storage, &a.bytes) == 0)
        ip_text(&a, mine, cap);
    if (getpeername(fd, (struct sockaddr *)&b.storage, &b.bytes) == 0)
        ip_text(&b, theirs, cap);
}
