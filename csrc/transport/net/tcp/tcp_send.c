/* tcp_send.c - writes messages to sockets. Sockets to other hosts share a wire, and send in the order of calls
 * (tcp_priority.h). Sockets within a host are not held. See tcp.h. */
#include "core/base/clock.h"
#include "core/base/status.h"
#include "transport/net/tcp/tcp.h"

#include <errno.h>
#include <sys/epoll.h>
#include <sys/timerfd.h>

spccl_status sp_tcp_open_timer(struct sp_tcp *ep)
{
    struct epoll_event e = {.events = EPOLLIN, .data = {.u64 = SP_TCP_TIMER_EVENT}};
    ep->timer_fd = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
    if (ep->timer_fd < 0 || epoll_ctl(ep->epoll_fd, EPOLL_CTL_ADD, ep->timer_fd, &e) != 0)
        return SP_FAIL_ERRNO(SPCCL_ERR_SYSTEM, "rank %d: tcp: timer", ep->config.rank);
    return SPCCL_OK;
}

/* Wake this rank when the held sockets may send in any case. */
static void start_timer(struct sp_tcp *ep)
{
    int64_t at_ns = ep->priority.moved_ns + ep->priority.hold_timeout_ns;
    struct itimerspec when = {.it_value = {.tv_sec = at_ns / 1000000000, .tv_nsec = at_ns % 1000000000}};
    if (!ep->timer_runs)
        ep->timer_runs = timerfd_settime(ep->timer_fd, TFD_TIMER_ABSTIME, &when, NULL) == 0;
}

void sp_tcp_end_timer(struct sp_tcp *ep)
{
    uint64_t n_expired;
    if (read(ep->timer_fd, &n_expired, sizeof n_expired) < 0 && errno != EAGAIN)
        return;
    ep->timer_runs = false;
    ep->resend = true;
}

/* Find the earliest call again among all sockets to other hosts. */
static void find_earliest(struct sp_tcp *ep, int64_t now_ns)
{
    sp_tcp_priority_forget(&ep->priority);
    for (int i = 0; i < ep->config.world_size; i++) {
        struct sp_tcp_peer *p = &ep->peers[i];
        for (uint32_t k = 0; p->state == SP_TCP_UP && !p->same_host && k < sp_tcp_n_sockets(ep, p); k++)
            if (p->sockets[k].out.used != 0)
                sp_tcp_priority_begin(&ep->priority, sp_tcp_socket_call(&p->sockets[k]), now_ns);
    }
    /* Sockets of the call that is the earliest now may be held. */
    ep->resend = ep->resend || ep->n_held != 0;
    ep->changed = ep->changed || ep->resend;
}

/* Write to the socket, and note new space, messages that have left, and the socket's end. */
static void flush(struct sp_tcp *ep, int peer, int queue, struct sp_tcp_socket *s)
{
    struct sp_tcp_peer *p = &ep->peers[peer];
    uint64_t n_left_before = s->n_left;
    size_t used_before = s->out.used;
    if (sp_tcp_socket_flush(s) && p->queues[queue].blocked) {
        p->queues[queue].blocked = false;
        ep->changed = true;
    }
    ep->changed = ep->changed || s->n_left != n_left_before; /* `flushed` may have become true */
    if (s->cut)
        sp_tcp_note_end(ep, peer);
    else if (!p->same_host && !p->is_control) {
        ep->window.n_bytes += used_before - s->out.used;
        s->in_flight = true;
    }
}

void sp_tcp_flush(struct sp_tcp *ep, int peer, int queue, struct sp_tcp_socket *s)
{
    size_t used = s->out.used;
    uint32_t call = sp_tcp_socket_call(s);
    int64_t now_ns;
    if (ep->peers[peer].same_host || used == 0) {
        flush(ep, peer, queue, s);
        return;
    }
    now_ns = sp_now_ns();
    ep->n_held -= s->held;
    s->held = !sp_tcp_priority_may_send(&ep->priority, call, now_ns);
    ep->n_held += s->held;
    if (s->held) {
        start_timer(ep);
        return;
    }
    flush(ep, peer, queue, s);
    if (s->out.used == used)
        return;
    sp_tcp_priority_moved(&ep->priority, call, now_ns);
    if (s->out.used != 0 && sp_tcp_socket_call(s) == call)
        return;
    if (sp_tcp_priority_end(&ep->priority, call))
        find_earliest(ep, now_ns); /* counts this socket too, if it waits */
    else if (s->out.used != 0)
        sp_tcp_priority_begin(&ep->priority, sp_tcp_socket_call(s), now_ns);
}

void sp_tcp_commit(struct sp_tcp *ep, int peer, int queue, struct sp_tcp_socket *s, uint32_t call)
{
    struct sp_tcp_queue *l = &ep->peers[peer].queues[queue];
    bool waited = s->out.used != 0;
    sp_tcp_socket_commit(s, (uint32_t)queue, (uint32_t)l->n_sent, l->reserved, call);
    l->reserved = 0;
    l->n_sent++;
    if (!waited && !ep->peers[peer].same_host)
        sp_tcp_priority_begin(&ep->priority, sp_tcp_socket_call(s), sp_now_ns());
    sp_tcp_flush(ep, peer, queue, s);
}

void sp_tcp_resend(struct sp_tcp *ep)
{
    ep->resend = false;
    for (int i = 0; ep->n_held != 0 && i < ep->config.world_size; i++) {
        struct sp_tcp_peer *p = &ep->peers[i];
        for (uint32_t k = 0; p->state == SP_TCP_UP && k < sp_tcp_n_sockets(ep, p); k++)
            if (p->sockets[k].held)
                sp_tcp_flush(ep, i, (int)(k / p->n_sockets), &p->sockets[k]);
    }
}
