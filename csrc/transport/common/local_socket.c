/* local_socket.c - see local_socket.h. */
#include "transport/common/local_socket.h"

#include "core/base/mem.h"
#include "core/base/status.h"
#include "transport/common/auth.h"

#include <errno.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/un.h>
#include <unistd.h>

static void name_of(const uint8_t id[SP_HS_ID_BYTES], sp_sock_address *out)
{
    struct sockaddr_un un = {.sun_family = AF_UNIX};
    size_t n = 1; /* a leading zero byte: an abstract name */
    n += (size_t)snprintf(un.sun_path + 1, sizeof un.sun_path - 1, "spccl-");
    for (size_t i = 0; i < SP_HS_ID_BYTES; i++)
        n += (size_t)snprintf(un.sun_path + n, sizeof un.sun_path - n, "%02x", id[i]);
    memset(out, 0, sizeof *out);
    memcpy(&out->storage, &un, sizeof un);
    out->bytes = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + n);
}

/* ---- listening ---- */

/* Check that the proven connecting side is a lower rank of this group, and that this rank expects it. */
static spccl_status check_hello(void *ctx, const sp_hs_hello *h)
{
    const sp_local_listener *l = ctx;
    const sp_local_config *c = &l->config;
    if (h->kind != c->kind || h->group_tag != c->group_tag || h->to != c->rank ||
        memcmp(h->to_id, l->id, SP_HS_ID_BYTES) != 0)
        return SP_FAIL(SPCCL_ERR_PEER, "rank %d is not the rank that this connection is for", c->rank);
    if (h->world_size != c->world_size)
        return SP_FAIL(
            SPCCL_ERR_MISMATCH,
            "rank %d is in a group of %d ranks, but rank %d in one of %d: give every rank the same "
            "world size",
            h->from, h->world_size, c->rank, c->world_size);
    if (h->n_queues != c->n_queues || h->queue_bytes != c->queue_bytes)
        return SP_FAIL(SPCCL_ERR_MISMATCH,
                       "rank %d has %u queues of %llu bytes, but rank %d has %u queues of %llu bytes: give "
                       "every rank the same settings",
                       h->from, h->n_queues, (unsigned long long)h->queue_bytes, c->rank, c->n_queues,
                       (unsigned long long)c->queue_bytes);
    if (h->from < 0 || h->from >= c->rank || l->peers[h->from].state != SP_LOCAL_EXPECTED)
        return SP_FAIL(SPCCL_ERR_PEER, "rank %d does not expect rank %d", c->rank, h->from);
    return SPCCL_OK;
}

static spccl_status take_connection(void *ctx, int fd, const sp_hs_hello *hello)
{
    sp_local_peer *p = &((sp_local_listener *)ctx)->peers[hello->from];
    p->sock = fd;
    p->state = SP_LOCAL_EXCHANGE;
    return SPCCL_OK;
}

spccl_status sp_local_listen(sp_local_listener *l, const sp_local_config *config)
{
    sp_acceptor_config ac = {.rank = config->rank,
                             .secret = config->secret,
                             .ctx = l,
                             .check = check_hello,
                             .ready = take_connection};
    sp_sock_address name;
    int fd;
    l->config = *config;
    l->peers = sp_calloc((size_t)config->world_size, sizeof *l->peers);
    if (l->peers == NULL)
        return SP_FAIL(SPCCL_ERR_NOMEM, "%s: tables for %d ranks", config->transport, config->world_size);
    for (int i = 0; i < config->world_size; i++)
        l->peers[i].sock = -1;
    SP_TRY(sp_random_bytes(l->id, sizeof l->id));
    fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    name_of(l->id, &name);
    if (fd < 0 || bind(fd, (const struct sockaddr *)&name.storage, name.bytes) != 0 || listen(fd, 128) != 0) {
        spccl_status st = SP_FAIL_ERRNO(SPCCL_ERR_SYSTEM, "rank %d: %s: listening on a local socket",
                                        config->rank, config->transport);
        sp_sock_close(&fd);
        return st;
    }
    return sp_acceptor_init(&l->acceptor, fd, &ac);
}

void sp_local_close_descriptors(sp_local_listener *l)
{
    for (int i = 0; i < l->config.world_size; i++) {
        sp_sock_close(&l->peers[i].sock);
        sp_local_message_close(&l->peers[i].received);
    }
    sp_acceptor_close_descriptors(&l->acceptor);
}

void sp_local_close(sp_local_listener *l)
{
    for (int i = 0; l->peers != NULL && i < l->config.world_size; i++)
        if (l->peers[i].sock >= 0)
            (void)shutdown(l->peers[i].sock, SHUT_RDWR);
    if (l->peers != NULL)
        sp_local_close_descriptors(l);
    sp_acceptor_close(&l->acceptor);
    sp_free(l->peers);
}

/* ---- connecting ---- */

static spccl_status start_connecting(sp_local_connect *c, const char *what, const uint8_t id[SP_HS_ID_BYTES],
                                     int *fd)
{
    sp_sock_address name;
    spccl_status st;
    name_of(id, &name);
    st = sp_sock_connect(&name, fd);
    if (st == SPCCL_ERR_PEER && errno == EAGAIN)
        return SPCCL_AGAIN; /* the listener's queue of connections is full */
    if (st == SPCCL_ERR_PEER)
        return SP_FAIL(SPCCL_ERR_PEER, "it stopped listening before it passed its %s", what);
    SP_TRY(st);
    c->state = SP_LOCAL_CONNECTING;
    return SPCCL_OK;
}

static spccl_status start_proof(const sp_local_listener *l, sp_local_connect *c, int peer,
                                const uint8_t id[SP_HS_ID_BYTES], int fd)
{
    sp_hs_hello h = {.group_tag = l->config.group_tag,
                     .queue_bytes = l->config.queue_bytes,
                     .kind = l->config.kind,
                     .from = l->config.rank,
                     .to = peer,
                     .world_size = l->config.world_size,
                     .n_queues = l->config.n_queues};
    SP_TRY(sp_sock_connected(fd));
    memcpy(h.to_id, id, SP_HS_ID_BYTES);
    SP_TRY(sp_hs_connect(&c->hs, fd, &h, l->config.secret));
    c->state = SP_LOCAL_PROVING;
    return SPCCL_OK;
}

spccl_status sp_local_connect_step(const sp_local_listener *l, sp_local_connect *c, int peer,
                                   const uint8_t id[SP_HS_ID_BYTES], int *fd)
{
    switch (c->state) {
    case SP_LOCAL_UNCONNECTED:
        SP_TRY(start_connecting(c, l->config.what, id, fd)); /* fall through */
    case SP_LOCAL_CONNECTING:
        SP_TRY(start_proof(l, c, peer, id, *fd)); /* fall through */
    case SP_LOCAL_PROVING:
        SP_TRY(sp_hs_step(&c->hs));
        c->state = SP_LOCAL_PROVEN;
        return SPCCL_OK;
    case SP_LOCAL_PROVEN:
        return SPCCL_OK;
    }
    return SP_FAIL(SPCCL_ERR_BUG, "local socket: state %d", (int)c->state);
}

/* ---- messages ---- */

union control {
    struct cmsghdr align;
    char bytes[CMSG_SPACE(SP_LOCAL_FDS_MAX * sizeof(int))];
};

spccl_status sp_local_send(const sp_local_config *config, int fd, const void *message, size_t bytes,
                           const int *fds, int n_fds)
{
    size_t fds_bytes = (size_t)n_fds * sizeof *fds;
    union control control = {.bytes = {0}};
    struct iovec iov = {.iov_base = (void *)(uintptr_t)message, .iov_len = bytes};
    struct msghdr m = {.msg_iov = &iov, .msg_iovlen = 1};
    if (n_fds > 0) {
        struct cmsghdr *c = &control.align;
        m.msg_control = &control;
        m.msg_controllen = CMSG_SPACE(fds_bytes);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(fds_bytes);
        memcpy(CMSG_DATA(c), fds, fds_bytes);
    }
    /* So few bytes fit into the empty buffer of a connection. So either all of them are sent or none. */
    if (sendmsg(fd, &m, MSG_DONTWAIT | MSG_NOSIGNAL) != (ssize_t)bytes)
        return errno == EAGAIN ? SPCCL_AGAIN : SP_FAIL_ERRNO(SPCCL_ERR_PEER, "passing its %s", config->what);
    return SPCCL_OK;
}

/* Keep the descriptors that came with a part of the message. */
static spccl_status take_descriptors(const sp_local_config *config, struct msghdr *h, int fds_max,
                                     sp_local_message *m)
{
    struct cmsghdr *c = CMSG_FIRSTHDR(h);
    size_t n = 0;
    bool fine = true;
    if (c != NULL && c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS && c->cmsg_len >= CMSG_LEN(0))
        n = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    else
        fine = c == NULL;
    for (size_t i = 0; i < n; i++) {
        int fd;
        memcpy(&fd, CMSG_DATA(c) + i * sizeof(int), sizeof fd);
        fine = fine && m->n_fds < fds_max;
        if (fine)
            m->fds[m->n_fds++] = fd;
        else
            sp_sock_close(&fd);
    }
    if (!fine || (n == SP_LOCAL_FDS_MAX && (h->msg_flags & MSG_CTRUNC) != 0))
        return SP_FAIL(SPCCL_ERR_PEER, "it passed something that is not its %s", config->what);
    if ((h->msg_flags & MSG_CTRUNC) != 0)
        return SP_FAIL(SPCCL_ERR_SYSTEM,
                       "the descriptors of its %s were lost: this process may open no more files (ulimit -n)",
                       config->what);
    return SPCCL_OK;
}

spccl_status sp_local_receive(const sp_local_config *config, int fd, void *buf, size_t bytes, int fds_max,
                              sp_local_message *m)
{
    while (m->n_bytes < bytes) {
        union control control;
        struct iovec iov = {.iov_base = (uint8_t *)buf + m->n_bytes, .iov_len = bytes - m->n_bytes};
        struct msghdr h = {
            .msg_iov = &iov, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
        ssize_t n = recvmsg(fd, &h, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
        if (n < 0 && (errno == EAGAIN || errno == EINTR))
            return SPCCL_AGAIN;
        if (n <= 0)
            return n == 0 ? SP_FAIL(SPCCL_ERR_PEER, "the connection was closed")
                          : SP_FAIL_ERRNO(SPCCL_ERR_PEER, "the connection broke");
        SP_TRY(take_descriptors(config, &h, fds_max, m));
        m->n_bytes += (size_t)n;
    }
    return SPCCL_OK;
}

void sp_local_message_close(sp_local_message *m)
{
    while (m->n_fds > 0)
        sp_sock_close(&m->fds[--m->n_fds]);
}

/* ---- the exchange with all peers ---- */

spccl_status sp_local_exchange(sp_local_listener *l, int rank, const uint8_t id[SP_HS_ID_BYTES],
                               const sp_local_outgoing *out, int fds_max)
{
    sp_local_peer *p = &l->peers[rank];
    if (p->state == SP_LOCAL_EXPECTED)
        return SPCCL_AGAIN;
    if (p->state == SP_LOCAL_CONNECT)
        SP_TRY(sp_local_connect_step(l, &p->connect, rank, id, &p->sock));
    p->state = SP_LOCAL_EXCHANGE;
    if (!p->sent)
        SP_TRY(sp_local_send(&l->config, p->sock, out->message, out->bytes, out->fds, out->n_fds));
    p->sent = true;
    SP_TRY(sp_local_receive(&l->config, p->sock, p->message, out->bytes, fds_max, &p->received));
    p->state = SP_LOCAL_DONE;
    return SPCCL_OK;
}
