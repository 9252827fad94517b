/* tcp.c - transport "tcp": ranks on any hosts. Each queue has n_sockets connections of its own, so that a
 * full queue cannot delay another. Message n of a queue goes over its socket n % n_sockets. One more
 * connection per peer, the control connection, carries aborts (u32 "SPAB", text[SP_ABORT_TEXT_CAP]), and its
 * end shows that the peer is gone. commit writes a message to the socket (tcp_send.c); `progress` writes what
 * the socket did not take then. tcp_socket.h has the bytes, tcp_connect.c the start-up. */
#include "transport/net/tcp/tcp.h"

#include "core/base/bits.h"
#include "core/base/clock.h"
#include "core/base/log.h"
#include "core/base/mem.h"
#include "core/base/status.h"
#include "transport/common/auth.h"
#include "transport/common/transports.h"

#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <time.h>

#define ABORT_MAGIC 0x42415053u /* "SPAB" */
#define N_EVENTS 64
/* close waits at most this long until what was sent arrives. A peer that reads needs one round trip. */
#define CLOSE_NS (INT64_C(500) * 1000000)
/* A peer that gives up sends an abort on its control connection, and then closes all its connections. What
 * arrives over different connections has no order. So after the end of a socket this rank waits this long for
 * the abort. Otherwise the error would name the peer that gave up, and not the reason that its abort gives.
 * It is longer than CLOSE_NS, because a peer that leaves first ends its sockets. */
#define ABORT_WAIT_NS (INT64_C(600) * 1000000)

static size_t tcp_message_max(sp_endpoint *opaque)
{
    return sp_tcp_self(opaque)->config.queue_bytes / 4;
}

static void set_gone(struct sp_tcp *ep, struct sp_tcp_peer *p, const char *text)
{
    if (p->gone)
        return;
    if (p->ended_ns != 0)
        ep->n_ending--;
    snprintf(p->gone_text, sizeof p->gone_text, "%s", text);
    p->gone = ep->changed = true;
}

void sp_tcp_note_end(struct sp_tcp *ep, int peer)
{
    struct sp_tcp_peer *p = &ep->peers[peer];
    if (p->gone || p->ended_ns != 0)
        return;
    p->ended_ns = sp_now_ns();
    ep->n_ending++;
    ep->changed = true;
}

static spccl_status peer_gone(const struct sp_tcp *ep, int peer)
{
    return SP_FAIL(SPCCL_ERR_PEER, "rank %d: rank %d %s", ep->config.rank, peer, ep->peers[peer].gone_text);
}

/* ---- messages ---- */

static struct sp_tcp_socket *socket_of(const struct sp_tcp_peer *p, int queue, uint64_t n)
{
    return &p->sockets[(uint32_t)queue * p->n_sockets + n % p->n_sockets];
}

static spccl_status tcp_reserve(sp_endpoint *opaque, int peer, int queue, size_t bytes, void **out)
{
    struct sp_tcp *ep = sp_tcp_self(opaque);
    struct sp_tcp_peer *p = &ep->peers[peer];
    struct sp_tcp_queue *l = &p->queues[queue];
    void *space;
    if (bytes == 0 || bytes > tcp_message_max(opaque))
        return SP_FAIL(SPCCL_ERR_BUG, "rank %d: message of %zu bytes to rank %d; wanted 1 to %zu",
                       ep->config.rank, bytes, peer, tcp_message_max(opaque));
    if (p->gone)
        return peer_gone(ep, peer);
    space = socket_of(p, queue, l->n_sent)->cut
                ? NULL /* AGAIN until it is known whether the peer is gone */
                : sp_tcp_socket_reserve(socket_of(p, queue, l->n_sent), bytes);
    l->blocked = space == NULL;
    l->reserved = space == NULL ? 0 : bytes;
    if (space == NULL)
        return SPCCL_AGAIN;
    *out = space;
    return SPCCL_OK;
}

static spccl_status tcp_commit(sp_endpoint *opaque, int peer, int queue, uint32_t call)
{
    struct sp_tcp *ep = sp_tcp_self(opaque);
    struct sp_tcp_peer *p = &ep->peers[peer];
    struct sp_tcp_queue *l = &p->queues[queue];
    struct sp_tcp_socket *s = socket_of(p, queue, l->n_sent);
    if (l->reserved == 0)
        return SP_FAIL(SPCCL_ERR_BUG, "rank %d: commit to rank %d, queue %d, without reserve",
                       ep->config.rank, peer, queue);
    sp_tcp_commit(ep, peer, queue, s, call);
    return SPCCL_OK;
}

static spccl_status tcp_peek(sp_endpoint *opaque, int peer, int queue, const void **out, size_t *bytes)
{
    struct sp_tcp *ep = sp_tcp_self(opaque);
    const struct sp_tcp_peer *p = &ep->peers[peer];
    const struct sp_tcp_socket *s = socket_of(p, queue, p->queues[queue].n_received);
    sp_record_expected want = {.queue = (uint32_t)queue,
                               .sequence = (uint32_t)p->queues[queue].n_received,
                               .bytes_max = tcp_message_max(opaque)};
    spccl_status st = sp_tcp_socket_peek(s, &want, out, bytes);
    if (st == SPCCL_ERR_FORMAT)
        return SP_FAIL(st, "rank %d: rank %d sent something that is not a message: %s", ep->config.rank, peer,
                       spccl_last_error());
    return st == SPCCL_AGAIN && s->ended && p->gone ? peer_gone(ep, peer) : st;
}

static spccl_status tcp_release(sp_endpoint *opaque, int peer, int queue)
{
    struct sp_tcp *ep = sp_tcp_self(opaque);
    struct sp_tcp_peer *p = &ep->peers[peer];
    const void *message;
    size_t bytes;
    if (tcp_peek(opaque, peer, queue, &message, &bytes) != SPCCL_OK)
        return SP_FAIL(SPCCL_ERR_BUG, "rank %d: release of rank %d, queue %d, without peek", ep->config.rank,
                       peer, queue);
    sp_tcp_socket_release(socket_of(p, queue, p->queues[queue].n_received++), bytes);
    return SPCCL_OK;
}

static bool tcp_flushed(sp_endpoint *opaque, int peer, int queue, uint64_t n)
{
    const struct sp_tcp_peer *p = &sp_tcp_self(opaque)->peers[peer];
    n += p->queues[queue].n_notes;
    for (uint32_t k = 0; !p->gone && k < p->n_sockets;
         k++) /* of the first n messages, socket k carries those with number k modulo n_sockets */
        if (socket_of(p, queue, k)->n_left < n / p->n_sockets + (k < n % p->n_sockets))
            return false;
    return true;
}

static void tcp_set_control(sp_endpoint *opaque, int peer, bool is_control)
{
    struct sp_tcp_peer *p = &sp_tcp_self(opaque)->peers[peer];
    p->is_control = is_control;
    p->queues[0].n_notes = p->queues[0].n_sent;
    if (!is_control)
        sp_tcp_limit_window(sp_tcp_self(opaque));
}

/* ---- progress ---- */

void sp_tcp_look_at_control(struct sp_tcp *ep, int peer)
{
    struct sp_tcp_peer *p = &ep->peers[peer];
    spccl_status st = SPCCL_OK;
    while (p->control >= 0 && st == SPCCL_OK) {
        st = sp_sock_read(p->control, p->abort_bytes, sizeof p->abort_bytes, &p->abort_done);
        if (st == SPCCL_AGAIN)
            return;
        if (st == SPCCL_OK && sp_load_le32(p->abort_bytes) != ABORT_MAGIC) {
            set_gone(ep, p, "sent something other than an abort over its control connection");
            return;
        }
        if (st == SPCCL_OK && ep->abort_rank < 0) {
            ep->abort_rank = peer;
            memcpy(ep->abort_text, p->abort_bytes + 4, SP_ABORT_TEXT_CAP);
            ep->abort_text[SP_ABORT_TEXT_CAP - 1] = '\0';
        }
        p->abort_done = 0;
    }
    if (st != SPCCL_OK)
        set_gone(ep, p, "is gone: its process ended or left the group; see its output");
}

static void read_socket(struct sp_tcp *ep, int peer, struct sp_tcp_socket *s)
{
    if (sp_tcp_socket_fill(s)) {
        ep->changed = ep->changed || s->ended || sp_tcp_socket_has_message(s);
        if (s->ended)
            sp_tcp_note_end(ep, peer);
    }
    ep->unread = ep->unread || (s->readable && !s->ended);
}

static void handle_event(struct sp_tcp *ep, const struct epoll_event *e)
{
    int peer = (int)(e->data.u64 >> 32);
    uint32_t index = (uint32_t)e->data.u64;
    struct sp_tcp_peer *p;
    struct sp_tcp_socket *s;
    if (e->data.u64 == SP_TCP_TIMER_EVENT) {
        sp_tcp_end_timer(ep);
        return;
    }
    p = &ep->peers[peer];
    if (index == 0) {
        sp_tcp_look_at_control(ep, peer);
        return;
    }
    s = &p->sockets[index - 1];
    if ((e->events & (EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0) {
        s->hung_up = s->hung_up || (e->events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0;
        s->readable = true;
        read_socket(ep, peer, s);
    }
    if ((e->events & EPOLLOUT) != 0) {
        s->writable = !s->cut;
        sp_tcp_flush(ep, peer, (int)((index - 1) / p->n_sockets), s);
    }
}

/* Read sockets again that an earlier read did not empty, because the buffer was full or a read has a limit.
 * The kernel sends no further event for them. */
static void read_again(struct sp_tcp *ep)
{
    ep->unread = false;
    for (int i = 0; i < ep->config.world_size; i++)
        if (ep->peers[i].state == SP_TCP_UP)
            for (uint32_t k = 0; k < sp_tcp_n_sockets(ep, &ep->peers[i]); k++)
                read_socket(ep, i, &ep->peers[i].sockets[k]);
}

/* Read the control connections of peers with an ended socket. After ABORT_WAIT_NS such a peer is gone. */
static void check_ending_peers(struct sp_tcp *ep)
{
    for (int i = 0; i < ep->config.world_size; i++) {
        struct sp_tcp_peer *p = &ep->peers[i];
        if (p->ended_ns == 0 || p->gone)
            continue;
        sp_tcp_look_at_control(ep, i);
        if (sp_now_ns() - p->ended_ns > ABORT_WAIT_NS)
            set_gone(ep, p, "is gone: its connection broke");
    }
}

static spccl_status tcp_progress(sp_endpoint *opaque, int *peer, char *text)
{
    struct sp_tcp *ep = sp_tcp_self(opaque);
    struct epoll_event events[N_EVENTS];
    int64_t now_ns;
    int n;
    if (ep->unread)
        read_again(ep);
    n = epoll_wait(ep->epoll_fd, events, N_EVENTS, 0);
    for (int i = 0; i < n; i++)
        handle_event(ep, &events[i]);
    if (ep->n_ending != 0)
        check_ending_peers(ep);
    if (ep->resend)
        sp_tcp_resend(ep);
    now_ns = sp_now_ns();
    if (sp_tcp_window_due(&ep->window, now_ns))
        sp_tcp_update_window(ep, now_ns);
    if (sp_tcp_drain_due(&ep->drain, now_ns))
        sp_tcp_learn_rate(ep, now_ns);
    if (ep->abort_rank < 0)
        return SPCCL_OK;
    *peer = ep->abort_rank;
    memcpy(text, ep->abort_text, SP_ABORT_TEXT_CAP);
    return SP_FAIL(SPCCL_ERR_ABORTED, "rank %d: rank %d gave up: %s", ep->config.rank, ep->abort_rank,
                   ep->abort_text);
}

/* ---- sleeping: events stay in the epoll set until progress takes them, so none is lost ---- */

static int tcp_wait_fd(sp_endpoint *opaque)
{
    return sp_tcp_self(opaque)->epoll_fd;
}

static bool can_read_more(const struct sp_tcp *ep)
{
    for (int i = 0; ep->unread && i < ep->config.world_size; i++) {
        const struct sp_tcp_peer *p = &ep->peers[i];
        for (uint32_t k = 0; p->state == SP_TCP_UP && k < sp_tcp_n_sockets(ep, p); k++)
            if (p->sockets[k].readable && !p->sockets[k].ended && sp_mirror_space(&p->sockets[k].in) != 0)
                return true;
    }
    return false;
}

static spccl_status tcp_arm(sp_endpoint *opaque)
{
    struct sp_tcp *ep = sp_tcp_self(opaque);
    bool changed = ep->changed;
    ep->changed = false;
    return changed || ep->n_ending != 0 || can_read_more(ep) ? SPCCL_AGAIN : SPCCL_OK;
}

static void tcp_disarm(sp_endpoint *opaque)
{
    (void)opaque;
}

/* Loopback took 0.53 ns per byte on two cores of an AMD EPYC (Zen 4). */
static double tcp_ns_per_byte(sp_endpoint *opaque, int peer)
{
    const struct sp_tcp *ep = sp_tcp_self(opaque);
    return ep->peers[peer].same_host ? 0.53 : sp_tcp_window_ns_per_byte(&ep->window);
}

static void tcp_abort_peers(sp_endpoint *opaque, const char *text)
{
    struct sp_tcp *ep = sp_tcp_self(opaque);
    uint8_t note[SP_TCP_ABORT_BYTES] = {0};
    sp_store_le32(note, ABORT_MAGIC);
    snprintf((char *)note + 4, SP_ABORT_TEXT_CAP, "%s", text);
    for (int i = 0; i < ep->config.world_size; i++) {
        struct sp_tcp_peer *p = &ep->peers[i];
        size_t done = 0;
        if (p->control >= 0 && !p->gone && sp_sock_write(p->control, note, sizeof note, &done) != SPCCL_OK)
            sp_log(SP_LOG_INFO, ep->config.rank, "the abort could not be sent to rank %d", i);
    }
}

static size_t tcp_memory_bytes(sp_endpoint *opaque)
{
    struct sp_tcp *ep = sp_tcp_self(opaque);
    size_t bytes = 0;
    for (int i = 0; i < ep->config.world_size; i++)
        for (uint32_t k = 0; ep->peers[i].sockets != NULL && k < sp_tcp_n_sockets(ep, &ep->peers[i]); k++)
            bytes += ep->peers[i].sockets[k].in.cap + ep->peers[i].sockets[k].out.cap;
    return bytes;
}

/* ---- opening and closing ---- */

/* Wait up to CLOSE_NS until the peers' kernels have all that was sent. If a socket is closed while it has
 * unread bytes, the kernel drops what is not sent yet. */
static void finish_sending(struct sp_tcp *ep)
{
    int64_t deadline_ns = sp_now_ns() + CLOSE_NS;
    bool busy = true;
    while (busy) {
        busy = false;
        for (int i = 0; i < ep->config.world_size; i++) {
            struct sp_tcp_peer *p = &ep->peers[i];
            for (uint32_t k = 0; p->state == SP_TCP_UP && k < sp_tcp_n_sockets(ep, p); k++)
                busy = sp_tcp_socket_finish(&p->sockets[k]) || busy;
        }
        if (!busy)
            return;
        if (sp_deadline_passed(deadline_ns)) {
            sp_log(SP_LOG_DEBUG, ep->config.rank, "tcp: closed before all peers had received what was sent");
            return;
        }
        nanosleep(&(struct timespec){.tv_nsec = 200000}, NULL);
    }
}

static void close_peer(struct sp_tcp *ep, struct sp_tcp_peer *p)
{
    sp_tcp_end_connecting(ep, p);
    sp_sock_close(&p->control);
    for (uint32_t k = 0; p->sockets != NULL && k < sp_tcp_n_sockets(ep, p); k++)
        sp_tcp_socket_close(&p->sockets[k]);
    sp_free(p->sockets);
}

static void close_in_child(void *owner)
{
    struct sp_tcp *ep = owner;
    for (int i = 0; i < ep->config.world_size; i++) {
        struct sp_tcp_peer *p = &ep->peers[i];
        uint32_t n = sp_tcp_n_sockets(ep, p);
        sp_sock_close(&p->control);
        for (uint32_t k = 0; p->sockets != NULL && k < n; k++)
            sp_sock_close(&p->sockets[k].fd);
        for (uint32_t k = 0; p->connecting != NULL && k < 1 + n; k++)
            sp_sock_close(&p->connecting[k].fd);
    }
    sp_sock_close(&ep->timer_fd);
    sp_acceptor_close_descriptors(&ep->acceptor);
}

static void tcp_close(sp_endpoint *opaque)
{
    struct sp_tcp *ep = sp_tcp_self(opaque);
    if (ep == NULL)
        return;
    if (ep->peers != NULL)
        finish_sending(ep);
    sp_fork_unwatch(&ep->guard);
    for (int i = 0; ep->peers != NULL && i < ep->config.world_size; i++)
        close_peer(ep, &ep->peers[i]);
    sp_acceptor_close(&ep->acceptor);
    sp_sock_close(&ep->timer_fd);
    sp_sock_close(&ep->epoll_fd);
    explicit_bzero(ep->config.secret, sizeof ep->config.secret);
    sp_free(ep->peers);
    sp_free(ep);
}

static spccl_status tcp_open(const sp_endpoint_config *config, sp_endpoint **out)
{
    spccl_status st;
    int listen_fd = -1;
    struct sp_tcp *ep = sp_calloc(1, sizeof *ep);
    if (ep == NULL)
        return SP_FAIL(SPCCL_ERR_NOMEM, "tcp: an endpoint of %zu bytes", sizeof *ep);
    ep->config = *config;
    ep->epoll_fd = ep->timer_fd = ep->acceptor.listen_fd = ep->abort_rank = -1;
    ep->peers = sp_calloc((size_t)config->world_size, sizeof *ep->peers);
    if (ep->peers == NULL) {
        st = SP_FAIL(SPCCL_ERR_NOMEM, "tcp: tables for %d ranks", config->world_size);
        goto fail;
    }
    for (int i = 0; i < config->world_size; i++)
        ep->peers[i].control = -1;
    SP_TRY_TO(fail, st, sp_random_bytes(ep->self.id, sizeof ep->self.id));
    ep->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    if (ep->epoll_fd < 0) {
        st = SP_FAIL_ERRNO(SPCCL_ERR_SYSTEM, "rank %d: tcp: epoll", config->rank);
        goto fail;
    }
    SP_TRY_TO(fail, st, sp_tcp_open_timer(ep));
    SP_TRY_TO(fail, st, sp_tcp_listen(ep, &listen_fd));
    SP_TRY_TO(fail, st, sp_tcp_start_acceptor(ep, listen_fd));
    SP_TRY_TO(fail, st, sp_fork_watch(&ep->guard, close_in_child, ep));
    *out = (sp_endpoint *)ep;
    return SPCCL_OK;
fail:
    tcp_close((sp_endpoint *)ep);
    return st;
}

const sp_transport sp_transport_tcp = {
    .name = "tcp",
    .ns_per_byte = tcp_ns_per_byte,
    .rate_mbps = sp_tcp_rate_mbps,
    .inform = sp_tcp_inform,
    .open = tcp_open,
    .address = sp_tcp_write_address,
    .can_reach = sp_tcp_can_reach,
    .describe = sp_tcp_describe,
    .local_ip = sp_tcp_local_ip,
    .add_peer = sp_tcp_add_peer,
    .set_control = tcp_set_control,
    .connect_step = sp_tcp_connect_step,
    .message_max = tcp_message_max,
    .reserve = tcp_reserve,
    .commit = tcp_commit,
    .peek = tcp_peek,
    .release = tcp_release,
    .flushed = tcp_flushed,
    .progress = tcp_progress,
    .wait_fd = tcp_wait_fd,
    .arm = tcp_arm,
    .disarm = tcp_disarm,
    .abort_peers = tcp_abort_peers,
    .memory_bytes = tcp_memory_bytes,
    .close = tcp_close,
};
