/* tcp_connect.c - start-up of transport tcp. See tcp.h.
 *
 * Of two ranks the lower one connects. First it connects the control connection: it tries the peer's IP
 * addresses in turn until one answers with the right secret. The hello says how many sockets each queue has.
 * Then it connects every socket of every queue to the same IP address. The time that it waits for an IP
 * address doubles from round to round. */
#include "core/base/bits.h"
#include "core/base/clock.h"
#include "core/base/mem.h"
#include "core/base/status.h"
#include "transport/common/transports.h"
#include "transport/net/tcp/tcp.h"

#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>

#define MS INT64_C(1000000)
#define CONNECT_NS (1000 * MS) /* time for connect() to an IP address, in the first round */
#define PROVE_NS (10000 * MS)  /* time for the handshake; the peer may still wait for other ranks */
#define FEW_RANKS 4            /* up to so many ranks have two sockets per queue between hosts */
#define RETRY_NS (50 * MS)
#define DOUBLINGS_MAX 4 /* both times double at most this often */

static void connecting_reset(struct sp_tcp_connecting *d, int64_t wait_ns)
{
    sp_sock_close(&d->fd);
    d->proving = false;
    d->not_before_ns = sp_now_ns() + wait_ns;
}

void sp_tcp_end_connecting(struct sp_tcp *ep, struct sp_tcp_peer *p)
{
    for (uint32_t i = 0; p->connecting != NULL && i < 1 + sp_tcp_n_sockets(ep, p); i++)
        connecting_reset(&p->connecting[i], 0);
    sp_free(p->connecting);
    sp_free(p->address);
    p->connecting = NULL;
    p->address = NULL;
}

/* Bytes of each buffer of a socket: the queue's capacity divided by its sockets, but at least the largest
 * message. */
static size_t buffer_bytes(const struct sp_tcp *ep, const struct sp_tcp_peer *p)
{
    size_t queue_bytes = ep->config.queue_bytes;
    return sp_max_size(queue_bytes / p->n_sockets, queue_bytes / 4 + SP_TCP_HEAD_BYTES);
}

/* Allocate the table of the sockets to this peer: n_sockets per queue. Errors: NOMEM. */
static spccl_status prepare_sockets(const struct sp_tcp *ep, struct sp_tcp_peer *p, uint32_t n_sockets)
{
    p->n_sockets = n_sockets;
    p->sockets = sp_calloc(sp_tcp_n_sockets(ep, p), sizeof *p->sockets);
    if (p->sockets == NULL)
        return SP_FAIL(SPCCL_ERR_NOMEM, "tables for %u sockets", sp_tcp_n_sockets(ep, p));
    for (uint32_t i = 0; i < sp_tcp_n_sockets(ep, p); i++)
        p->sockets[i].fd = -1;
    return SPCCL_OK;
}

/* Add fd to the epoll set, edge-triggered (see tcp_socket.h). index: 0 for control, i + 1 for socket i. */
static spccl_status watch(const struct sp_tcp *ep, int fd, uint32_t peer, uint32_t index)
{
    struct epoll_event e = {.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET,
                            .data = {.u64 = (uint64_t)peer << 32 | index}};
    if (epoll_ctl(ep->epoll_fd, EPOLL_CTL_ADD, fd, &e) != 0)
        return SP_FAIL_ERRNO(SPCCL_ERR_SYSTEM, "epoll_ctl");
    return SPCCL_OK;
}

/* Make a proven connection the peer's socket i, or its control connection if i < 0. Takes over fd if it
 * succeeds. */
static spccl_status adopt(struct sp_tcp *ep, int peer, int i, int fd)
{
    spccl_status st;
    struct sp_tcp_peer *p = &ep->peers[peer];
    SP_TRY(watch(ep, fd, (uint32_t)peer, (uint32_t)(i + 1)));
    if (i < 0) {
        p->control = fd;
        return SPCCL_OK;
    }
    st = sp_tcp_socket_open(&p->sockets[i], fd, buffer_bytes(ep, p));
    if (st != SPCCL_OK) {
        sp_tcp_socket_close(&p->sockets[i]);
        return st;
    }
    p->n_up++;
    ep->unread = true;
    return SPCCL_OK;
}

static bool all_up(const struct sp_tcp *ep, const struct sp_tcp_peer *p)
{
    return p->n_up == sp_tcp_n_sockets(ep, p);
}

static void enter_up(struct sp_tcp *ep, struct sp_tcp_peer *p)
{
    p->state = SP_TCP_UP;
    sp_tcp_end_connecting(ep, p);
}

/* ---- listening ---- */

/* Check that a proven connecting side belongs to this group and has the same settings. */
static spccl_status check_group(const struct sp_tcp *ep, const sp_hs_hello *h)
{
    const sp_endpoint_config *c = &ep->config;
    if (h->group_tag != c->group_tag || h->to != c->rank ||
        memcmp(h->to_id, ep->self.id, SP_HS_ID_BYTES) != 0)
        return SP_FAIL(SPCCL_ERR_PEER, "rank %d is not the rank that this connection is for", c->rank);
    if (h->world_size != c->world_size || (int)h->n_queues != c->n_queues || h->queue_bytes != c->queue_bytes)
        return SP_FAIL(
            SPCCL_ERR_MISMATCH,
            "rank %d has %d ranks, %u queues of %llu bytes, but rank %d has %d ranks, %d queues of %zu "
            "bytes: give every rank the same settings",
            h->from, h->world_size, h->n_queues, (unsigned long long)h->queue_bytes, c->rank, c->world_size,
            c->n_queues, c->queue_bytes);
    if (h->n_sockets < 1 || h->n_sockets > SP_TCP_SOCKETS_MAX)
        return SP_FAIL(SPCCL_ERR_MISMATCH, "rank %d wants %u sockets per queue; wanted 1 to %u", h->from,
                       h->n_sockets, SP_TCP_SOCKETS_MAX);
    return SPCCL_OK;
}

static spccl_status check_hello(void *ctx, const sp_hs_hello *h)
{
    struct sp_tcp *ep = ctx;
    const struct sp_tcp_peer *p;
    SP_TRY(check_group(ep, h));
    if (h->from >= 0 && h->from < ep->config.rank) {
        p = &ep->peers[h->from];
        if (h->kind == SP_HS_TCP_CONTROL && p->state == SP_TCP_EXPECT_CONTROL)
            return SPCCL_OK;
        if (h->kind == SP_HS_TCP_QUEUE && p->state == SP_TCP_EXPECT_QUEUES && h->n_sockets == p->n_sockets &&
            h->queue < (uint32_t)ep->config.n_queues && h->socket_idx < p->n_sockets &&
            p->sockets[h->queue * p->n_sockets + h->socket_idx].fd < 0)
            return SPCCL_OK;
    }
    return SP_FAIL(SPCCL_ERR_PEER,
                   "rank %d does not expect rank %d (connection of kind %u, queue %u, socket %u)",
                   ep->config.rank, h->from, h->kind, h->queue, h->socket_idx);
}

static spccl_status take_connection(void *ctx, int fd, const sp_hs_hello *h)
{
    struct sp_tcp *ep = ctx;
    struct sp_tcp_peer *p = &ep->peers[h->from];
    spccl_status st;
    int i = h->kind == SP_HS_TCP_CONTROL ? -1 : (int)(h->queue * p->n_sockets + h->socket_idx);
    /* Two connections may pass check_hello for the same socket. The second is closed. */
    if (i < 0 ? p->state != SP_TCP_EXPECT_CONTROL : p->sockets[i].fd >= 0) {
        close(fd);
        return SPCCL_OK;
    }
    if (i < 0)
        SP_TRY_TO(fail, st, prepare_sockets(ep, p, h->n_sockets));
    SP_TRY_TO(fail, st, adopt(ep, h->from, i, fd));
    if (i < 0)
        p->state = SP_TCP_EXPECT_QUEUES;
    if (all_up(ep, p))
        enter_up(ep, p);
    return SPCCL_OK;
fail:
    close(fd);
    return st;
}

spccl_status sp_tcp_start_acceptor(struct sp_tcp *ep, int listen_fd)
{
    sp_acceptor_config ac = {.rank = ep->config.rank,
                             .secret = ep->config.secret,
                             .tcp = true,
                             .ctx = ep,
                             .check = check_hello,
                             .ready = take_connection};
    return sp_acceptor_init(&ep->acceptor, listen_fd, &ac);
}

/* Sockets per queue. Two carry more than one where a network limits each TCP connection. With many peers there are
 * enough connections anyway, and more of them make the window of each too small: 4 emulated hosts of 2 ranks took
 * 1.4 of the wire's time with two, and 1.04 with one (all-reduce, 90% zeros). */
static uint32_t default_sockets(const struct sp_tcp *ep, const struct sp_tcp_peer *p)
{
    return p->same_host || ep->config.world_size > FEW_RANKS ? 1 : 2;
}

static spccl_status add_peer(struct sp_tcp *ep, int peer, const uint8_t *address, size_t bytes)
{
    struct sp_tcp_peer *p;
    if (peer < 0 || peer >= ep->config.world_size || peer == ep->config.rank ||
        ep->peers[peer].state != SP_TCP_ABSENT)
        return SP_FAIL(SPCCL_ERR_BUG, "rank %d: tcp: add_peer(%d, %zu bytes)", ep->config.rank, peer, bytes);
    p = &ep->peers[peer];
    p->address = sp_calloc(1, sizeof *p->address);
    if (p->address == NULL)
        return SP_FAIL(SPCCL_ERR_NOMEM, "rank %d: tcp: the address of rank %d", ep->config.rank, peer);
    if (!sp_tcp_parse_address(address, bytes, p->address))
        return SP_FAIL(SPCCL_ERR_BUG, "rank %d: tcp: %zu bytes are not an address of rank %d",
                       ep->config.rank, bytes, peer);
    memcpy(p->host, p->address->host, sizeof p->host);
    p->same_host = sp_tcp_same_host(&ep->self, p->address);
    p->use_loopback = p->same_host || sp_tcp_only_loopback(&ep->self, p->address);
    if (peer < ep->config.rank) {
        p->state = SP_TCP_EXPECT_CONTROL;
        return SPCCL_OK;
    }
    SP_TRY(prepare_sockets(ep, p, ep->config.n_sockets != 0 ? ep->config.n_sockets : default_sockets(ep, p)));
    p->connecting = sp_calloc(1 + sp_tcp_n_sockets(ep, p), sizeof *p->connecting);
    if (p->connecting == NULL)
        return SP_FAIL(SPCCL_ERR_NOMEM, "rank %d: tcp: tables to connect to rank %d", ep->config.rank, peer);
    for (uint32_t i = 0; i < 1 + sp_tcp_n_sockets(ep, p); i++)
        p->connecting[i].fd = -1;
    p->state = SP_TCP_CONNECT_CONTROL;
    return SPCCL_OK;
}

spccl_status sp_tcp_add_peer(sp_endpoint *opaque, int peer, const uint8_t *address, size_t bytes)
{
    struct sp_tcp *ep = sp_tcp_self(opaque);
    spccl_status st;
    pthread_mutex_lock(&ep->guard.lock);
    st = add_peer(ep, peer, address, bytes);
    pthread_mutex_unlock(&ep->guard.lock);
    return st;
}

/* ---- connecting ---- */

/* The IP address for try number n. Loopback comes first where it is used. Elsewhere it is skipped: NULL. */
static const sp_sock_address *ip_of(const struct sp_tcp_peer *p, int n)
{
    int i = n % p->address->ips.n;
    if (p->use_loopback)
        return &p->address->ips.at[p->address->ips.n - 1 - i];
    return sp_ip_is_loopback(&p->address->ips.at[i]) ? NULL : &p->address->ips.at[i];
}

static sp_hs_hello make_hello(const struct sp_tcp *ep, const struct sp_tcp_peer *p, int i)
{
    const sp_endpoint_config *c = &ep->config;
    sp_hs_hello h = {.group_tag = c->group_tag,
                     .queue_bytes = c->queue_bytes,
                     .kind = i < 0 ? SP_HS_TCP_CONTROL : SP_HS_TCP_QUEUE,
                     .from = c->rank,
                     .to = (int32_t)(p - ep->peers),
                     .world_size = c->world_size,
                     .queue = i < 0 ? 0 : (uint32_t)i / p->n_sockets,
                     .socket_idx = i < 0 ? 0 : (uint32_t)i % p->n_sockets,
                     .n_queues = (uint32_t)c->n_queues,
                     .n_sockets = p->n_sockets};
    memcpy(h.to_id, p->address->id, sizeof h.to_id);
    return h;
}

/* AGAIN while it makes sense to wait. A wrong host may have this IP address, so the wait has a limit. It has
 * none once the peer has proved the secret, or during the handshake with a rank of this host. */
static spccl_status wait_on(const struct sp_tcp_peer *p, const struct sp_tcp_connecting *d)
{
    int round = p->attempt / p->address->ips.n;
    int64_t limit_ns = (d->proving ? PROVE_NS : CONNECT_NS)
                       << (round < DOUBLINGS_MAX ? round : DOUBLINGS_MAX);
    if ((d->proving && (p->same_host || sp_hs_connect_trusted(&d->hs))) ||
        sp_now_ns() - d->since_ns < limit_ns)
        return SPCCL_AGAIN;
    return SP_FAIL(SPCCL_ERR_PEER, "no answer for %lld ms", (long long)(limit_ns / MS));
}

/* Continue one connection: i < 0 is control. OK: it is proven and taken over. AGAIN: call again. Any other
 * status: this try failed. */
static spccl_status connect_one(struct sp_tcp *ep, struct sp_tcp_peer *p, int i, const sp_sock_address *to)
{
    struct sp_tcp_connecting *d = &p->connecting[i + 1];
    spccl_status st;
    if (d->fd < 0) {
        if (sp_now_ns() < d->not_before_ns)
            return SPCCL_AGAIN;
        d->since_ns = sp_now_ns();
        SP_TRY(sp_sock_connect(to, &d->fd));
    }
    if (!d->proving) {
        sp_hs_hello hello = make_hello(ep, p, i);
        st = sp_sock_connected(d->fd);
        if (st == SPCCL_AGAIN)
            return wait_on(p, d);
        SP_TRY(st);
        SP_TRY(sp_hs_connect(&d->hs, d->fd, &hello, ep->config.secret));
        d->proving = true;
        d->since_ns = sp_now_ns();
    }
    st = sp_hs_step(&d->hs);
    if (st == SPCCL_AGAIN)
        return wait_on(p, d);
    SP_TRY(st);
    SP_TRY(adopt(ep, (int)(p - ep->peers), i, d->fd));
    d->fd = -1;
    return SPCCL_OK;
}

/* True if neither another IP address nor another try can help. */
static bool is_final(spccl_status st)
{
    return st == SPCCL_ERR_MISMATCH || st == SPCCL_ERR_SYSTEM || st == SPCCL_ERR_NOMEM;
}

static spccl_status connect_control(struct sp_tcp *ep, struct sp_tcp_peer *p)
{
    const sp_sock_address *to = ip_of(p, p->attempt);
    char at[SP_SOCK_TEXT_CAP];
    bool last = p->attempt % p->address->ips.n == p->address->ips.n - 1;
    spccl_status st;
    if (to != NULL) {
        st = connect_one(ep, p, -1, to);
        if (st == SPCCL_OK)
            p->state = SP_TCP_CONNECT_QUEUES;
        if (st == SPCCL_OK || st == SPCCL_AGAIN)
            return st;
        sp_sock_text(to, at, sizeof at);
        snprintf(p->cause, sizeof p->cause, "at %s: %.110s", at, spccl_last_error());
        if (is_final(st))
            return st;
        /* Another job may answer at this IP address. The right one may come later in the list. */
        p->refused = p->refused || st == SPCCL_ERR_AUTH || st == SPCCL_ERR_VERSION;
        if (last && p->refused)
            return SP_FAIL(st == SPCCL_ERR_VERSION ? st : SPCCL_ERR_AUTH, "%s", p->cause);
    }
    p->attempt++;
    connecting_reset(&p->connecting[0], last ? RETRY_NS : 0);
    return SPCCL_AGAIN;
}

static spccl_status connect_queues(struct sp_tcp *ep, struct sp_tcp_peer *p)
{
    const sp_sock_address *to = ip_of(p, p->attempt);
    for (uint32_t i = 0; i < sp_tcp_n_sockets(ep, p); i++) {
        spccl_status st;
        if (p->sockets[i].fd >= 0)
            continue;
        st = connect_one(ep, p, (int)i, to);
        if (st == SPCCL_OK || st == SPCCL_AGAIN)
            continue;
        snprintf(p->cause, sizeof p->cause, "%.180s", spccl_last_error());
        if (is_final(st) || st == SPCCL_ERR_AUTH)
            return st;
        connecting_reset(&p->connecting[i + 1], RETRY_NS);
    }
    if (!all_up(ep, p))
        return SPCCL_AGAIN;
    enter_up(ep, p);
    return SPCCL_OK;
}

static spccl_status connect_peer(void *ctx, int peer)
{
    struct sp_tcp *ep = ctx;
    struct sp_tcp_peer *p = &ep->peers[peer];
    if (p->state == SP_TCP_ABSENT)
        return SPCCL_OK;
    if (p->state == SP_TCP_CONNECT_CONTROL)
        SP_TRY(connect_control(ep, p));
    /* The peer may have set up all connections, sent messages and left before this rank has seen them all.
     * These messages must still be delivered. So first look for the peer's end, then for connections. The end
     * counts only if a connection is still missing after that. */
    if (p->state == SP_TCP_CONNECT_QUEUES || p->state == SP_TCP_EXPECT_QUEUES)
        sp_tcp_look_at_control(ep, peer);
    if (p->state == SP_TCP_CONNECT_QUEUES) {
        spccl_status st = connect_queues(ep, p);
        if (st != SPCCL_AGAIN)
            return st;
    } else if (p->state == SP_TCP_EXPECT_QUEUES && p->gone) {
        SP_TRY(sp_acceptor_step(&ep->acceptor));
    }
    if (p->state == SP_TCP_UP)
        return SPCCL_OK;
    if (p->gone)
        return SP_FAIL(SPCCL_ERR_PEER, "it closed its endpoint before the group was up");
    return SPCCL_AGAIN;
}

static spccl_status connect_all(struct sp_tcp *ep)
{
    const sp_acceptor_peers peers = {ep->config.world_size, ep, connect_peer, "connecting to", " over tcp"};
    sp_rank_list missing = {0};
    const char *cause = "";
    spccl_status st;
    if (ep->acceptor.listen_fd < 0)
        return SPCCL_OK; /* all peers have connected */
    st = sp_acceptor_step_peers(&ep->acceptor, &peers, &missing);
    if (st == SPCCL_OK) {
        sp_acceptor_close(&ep->acceptor);
        sp_tcp_limit_window(ep);
    }
    if (st != SPCCL_AGAIN || !sp_deadline_passed(ep->config.deadline_ns))
        return st;
    for (int i = 0; i < ep->config.world_size && cause[0] == '\0'; i++)
        if (ep->peers[i].state != SP_TCP_UP)
            cause = ep->peers[i].cause;
    return SP_FAIL(SPCCL_ERR_TIMEOUT, "rank %d: no tcp connection with rank %s before the deadline%s%s",
                   ep->config.rank, missing.text, cause[0] != '\0' ? "; last try: " : "", cause);
}

spccl_status sp_tcp_connect_step(sp_endpoint *opaque)
{
    struct sp_tcp *ep = sp_tcp_self(opaque);
    spccl_status st;
    pthread_mutex_lock(&ep->guard.lock);
    st = connect_all(ep);
    pthread_mutex_unlock(&ep->guard.lock);
    return st;
}
