/* segments.c - messages, sleeping and closing of a network that moves segments. See segments.h. */
#include "transport/net/segments/segments.h"

#include "core/base/clock.h"
#include "core/base/mem.h"

#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <time.h>
#include <unistd.h>

#define CLOSE_NS (INT64_C(500) * 1000000) /* close waits at most this long until what was sent has arrived */
#define UNKNOWN_NS_PER_BYTE 0.8           /* 10 Gbit/s, where a device gives no speed */
#define NS_MBPS_PER_BYTE 8000.0
/* While this rank polls, it looks at the control links, which costs a system call, once in so many calls of progress. */
#define TCP_EVERY 16

static const sp_transport *const tcp = &sp_transport_tcp;

static bool by_tcp(const sp_segments *s, int peer)
{
    return s->peers[peer].route == SP_BY_TCP;
}

static bool any_by_tcp(const sp_segments *s)
{
    for (int i = 0; i < s->config.world_size; i++)
        if (by_tcp(s, i))
            return true;
    return false;
}

bool sp_segments_is_rdma(sp_endpoint *opaque, int peer)
{
    return !by_tcp(sp_segments_self(opaque), peer);
}

double sp_segments_ns_per_byte(sp_endpoint *opaque, int peer)
{
    sp_segments *s = sp_segments_self(opaque);
    int64_t mbps;
    if (by_tcp(s, peer))
        return tcp->ns_per_byte(s->tcp, peer);
    mbps = s->net->mbps(s, peer);
    return mbps > 0 ? NS_MBPS_PER_BYTE / (double)mbps : UNKNOWN_NS_PER_BYTE;
}

void sp_segments_describe(sp_endpoint *opaque, int peer, char *out, size_t cap)
{
    sp_segments *s = sp_segments_self(opaque);
    const sp_segments_peer *p = &s->peers[peer];
    if (!by_tcp(s, peer))
        s->net->describe(s, peer, out, cap);
    else if (p->tcp_faster)
        snprintf(out, cap, "%s", p->reason);
    else
        snprintf(out, cap, "tcp, as %s failed: %s", s->net->what, p->reason);
}

void sp_segments_local_ip(sp_endpoint *opaque, int peer, char *out, size_t cap)
{
    tcp->local_ip(sp_segments_self(opaque)->tcp, peer, out, cap);
}

/* ---- messages ---- */

size_t sp_segments_message_max(sp_endpoint *opaque)
{
    return sp_segments_self(opaque)->config.queue_bytes / 4;
}

spccl_status sp_segments_reserve(sp_endpoint *opaque, int peer, int queue, size_t bytes, void **out)
{
    sp_segments *s = sp_segments_self(opaque);
    void *space;
    if (by_tcp(s, peer))
        return tcp->reserve(s->tcp, peer, queue, bytes, out);
    if (bytes == 0 || bytes > sp_segments_message_max(opaque))
        return SP_FAIL(SPCCL_ERR_BUG, "rank %d: message of %zu bytes to rank %d; wanted 1 to %zu",
                       s->config.rank, bytes, peer, sp_segments_message_max(opaque));
    if (s->peers[peer].gone)
        return sp_segments_lost(s, peer);
    space = sp_segment_ring_reserve(&s->peers[peer].tx[queue], bytes);
    if (space == NULL)
        return SPCCL_AGAIN;
    *out = space;
    return SPCCL_OK;
}

/* The messages of a network leave in the order of their commits: `call` matters over tcp only. */
spccl_status sp_segments_commit(sp_endpoint *opaque, int peer, int queue, uint32_t call)
{
    sp_segments *s = sp_segments_self(opaque);
    sp_segment_ring *ring = &s->peers[peer].tx[queue];
    if (by_tcp(s, peer))
        return tcp->commit(s->tcp, peer, queue, call);
    if (ring->reserved == 0)
        return SP_FAIL(SPCCL_ERR_BUG, "rank %d: commit to rank %d, queue %d, without reserve", s->config.rank,
                       peer, queue);
    if (sp_segment_ring_commit(ring))
        s->net->send(s, peer);
    return SPCCL_OK;
}

spccl_status sp_segments_peek(sp_endpoint *opaque, int peer, int queue, const void **out, size_t *bytes)
{
    sp_segments *s = sp_segments_self(opaque);
    spccl_status st;
    if (by_tcp(s, peer))
        return tcp->peek(s->tcp, peer, queue, out, bytes);
    st = sp_segment_ring_peek(&s->peers[peer].rx[queue], sp_segments_message_max(opaque), out, bytes);
    if (st == SPCCL_ERR_FORMAT)
        return SP_FAIL(st, "rank %d: rank %d sent something that is not a message: %s", s->config.rank, peer,
                       spccl_last_error());
    return st == SPCCL_AGAIN && s->peers[peer].over ? sp_segments_lost(s, peer) : st;
}

spccl_status sp_segments_release(sp_endpoint *opaque, int peer, int queue)
{
    sp_segments *s = sp_segments_self(opaque);
    const void *message;
    size_t bytes;
    if (by_tcp(s, peer))
        return tcp->release(s->tcp, peer, queue);
    if (sp_segments_peek(opaque, peer, queue, &message, &bytes) != SPCCL_OK)
        return SP_FAIL(SPCCL_ERR_BUG, "rank %d: release of rank %d, queue %d, without peek", s->config.rank,
                       peer, queue);
    s->net->released(s, peer, sp_segment_ring_release(&s->peers[peer].rx[queue], bytes));
    return SPCCL_OK;
}

bool sp_segments_flushed(sp_endpoint *opaque, int peer, int queue, uint64_t n)
{
    sp_segments *s = sp_segments_self(opaque);
    sp_segments_peer *p = &s->peers[peer];
    if (by_tcp(s, peer))
        return tcp->flushed(s->tcp, peer, queue, queue == 0 ? n + p->n_notes : n);
    return p->gone || sp_segment_ring_left(&p->tx[queue]) >= n;
}

/* ---- progress ---- */

static void serve_peer(sp_segments *s, int peer)
{
    sp_segments_peer *p = &s->peers[peer];
    bool pushed = false;
    if (p->route != SP_BY_NET)
        return;
    for (int i = 0; i < s->config.n_queues; i++)
        pushed = sp_segment_ring_push(&p->tx[i]) || pushed;
    if (pushed || s->net->credits)
        s->net->send(s, peer);
    sp_segments_hear_end(s, peer);
    sp_segments_decide_end(s, peer);
}

spccl_status sp_segments_progress(sp_endpoint *opaque, int *peer, char *text)
{
    sp_segments *s = sp_segments_self(opaque);
    spccl_status st = SPCCL_OK;
    if (s->n_progress++ % TCP_EVERY == 0 || s->ending || s->aborted || any_by_tcp(s)) {
        st = tcp->progress(s->tcp, peer, text);
        s->aborted = st == SPCCL_ERR_ABORTED;
    }
    s->net->poll(s);
    for (int i = 0; i < s->config.world_size; i++)
        serve_peer(s, i);
    return st;
}

/* ---- sleeping ---- */

int sp_segments_wait_fd(sp_endpoint *opaque)
{
    return sp_segments_self(opaque)->epoll_fd;
}

/* True if a peer ends: it is not known yet whether more will arrive. */
static bool is_ending(const sp_segments *s)
{
    for (int i = 0; s->ending && i < s->config.world_size; i++)
        if (s->peers[i].route == SP_BY_NET && s->peers[i].ended_ns != 0 && !s->peers[i].over)
            return true;
    return false;
}

/* Changes of the control links count if one carries messages. Otherwise they are notes, which are looked at here. */
static spccl_status arm_tcp(sp_segments *s)
{
    spccl_status st = tcp->arm(s->tcp);
    for (int i = 0; st != SPCCL_OK && !any_by_tcp(s) && i < s->config.world_size; i++)
        if (s->peers[i].route == SP_BY_NET)
            sp_segments_hear_end(s, i);
    if (st != SPCCL_OK && !any_by_tcp(s) && !s->changed)
        st = tcp->arm(s->tcp);
    return st;
}

spccl_status sp_segments_arm(sp_endpoint *opaque)
{
    sp_segments *s = sp_segments_self(opaque);
    spccl_status st = arm_tcp(s);
    bool changed = !s->net->arm(s);
    changed = changed || s->changed || is_ending(s);
    s->changed = false;
    if (st == SPCCL_OK && !changed)
        return SPCCL_OK;
    s->net->disarm(s, false);
    if (st == SPCCL_OK)
        tcp->disarm(s->tcp);
    return SPCCL_AGAIN;
}

void sp_segments_disarm(sp_endpoint *opaque)
{
    sp_segments *s = sp_segments_self(opaque);
    tcp->disarm(s->tcp);
    s->net->disarm(s, true);
    s->n_progress = 0; /* what woke this rank may have come over a control link */
}

void sp_segments_abort_peers(sp_endpoint *opaque, const char *text)
{
    sp_segments *s = sp_segments_self(opaque);
    if (s->tcp != NULL)
        tcp->abort_peers(s->tcp, text);
}

size_t sp_segments_memory_bytes(sp_endpoint *opaque)
{
    sp_segments *s = sp_segments_self(opaque);
    size_t bytes = s->tcp != NULL ? tcp->memory_bytes(s->tcp) : 0;
    for (int i = 0; i < s->config.world_size; i++)
        for (int k = 0; k < s->config.n_queues; k++)
            bytes += s->peers[i].tx[k].memory.cap + s->peers[i].rx[k].memory.cap;
    return bytes;
}

/* ---- opening and closing ---- */

spccl_status sp_segments_open(sp_segments *s, const sp_segments_net *net, const sp_endpoint_config *config)
{
    s->net = net;
    s->config = *config;
    s->config.gpu = NULL; /* valid until open returns */
    s->epoll_fd = -1;
    s->pid = getpid();
    s->peers = sp_calloc((size_t)config->world_size, sizeof *s->peers);
    return s->peers != NULL
               ? SPCCL_OK
               : SP_FAIL(SPCCL_ERR_NOMEM, "rank %d: tables for %d ranks", config->rank, config->world_size);
}

spccl_status sp_segments_watch(const sp_segments *s, int fd)
{
    struct epoll_event e = {.events = EPOLLIN};
    if (epoll_ctl(s->epoll_fd, EPOLL_CTL_ADD, fd, &e) != 0)
        return SP_FAIL_ERRNO(SPCCL_ERR_SYSTEM, "rank %d: epoll_ctl", s->config.rank);
    return SPCCL_OK;
}

spccl_status sp_segments_open_tcp(sp_segments *s)
{
    SP_TRY(tcp->open(&s->config, &s->tcp));
    s->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    if (s->epoll_fd < 0)
        return SP_FAIL_ERRNO(SPCCL_ERR_SYSTEM, "rank %d: epoll", s->config.rank);
    return sp_segments_watch(s, tcp->wait_fd(s->tcp));
}

/* Wait up to CLOSE_NS until the network has sent everything. */
static void finish_sending(sp_segments *s)
{
    int64_t deadline_ns = sp_now_ns() + CLOSE_NS;
    bool busy = true;
    while (busy && !sp_deadline_passed(deadline_ns)) {
        char text[SP_ABORT_TEXT_CAP];
        int peer;
        busy = false;
        (void)sp_segments_progress((sp_endpoint *)s, &peer, text);
        for (int i = 0; i < s->config.world_size; i++) {
            sp_segments_peer *p = &s->peers[i];
            for (int k = 0; p->route == SP_BY_NET && !p->gone && !p->failed && k < s->config.n_queues; k++)
                busy = busy || sp_segment_ring_left(&p->tx[k]) < p->tx[k].n_messages;
        }
        if (busy)
            nanosleep(&(struct timespec){.tv_nsec = 200000}, NULL);
    }
}

static void say_fin(sp_segments *s, int peer)
{
    sp_segments_fin f = {{0}};
    uint8_t note[SP_SEGMENTS_FIN_BYTES];
    if (s->peers[peer].route != SP_BY_NET || s->peers[peer].gone)
        return;
    for (int k = 0; k < s->config.n_queues; k++)
        f.n_segments[k] = s->net->n_sent(s, peer, k);
    sp_segments_write_fin(&f, s->config.n_queues, note);
    (void)sp_segments_say(s, peer, note, sizeof note);
}

void sp_segments_close(sp_endpoint *opaque)
{
    sp_segments *s = sp_segments_self(opaque);
    bool here;
    if (s == NULL)
        return;
    here = s->up && s->pid == getpid();
    if (here)
        finish_sending(s);
    for (int i = 0; here && i < s->config.world_size; i++)
        say_fin(s, i);
    tcp->close(s->tcp);
    s->tcp = NULL;
    explicit_bzero(s->config.secret, sizeof s->config.secret);
    here = s->net->close(s);
    if (s->epoll_fd >= 0)
        close(s->epoll_fd);
    if (!here)
        return; /* the rest may still be in use */
    for (int i = 0; s->peers != NULL && i < s->config.world_size; i++)
        for (int k = 0; k < SP_QUEUES_MAX; k++) {
            sp_segment_ring_close(&s->peers[i].tx[k]);
            sp_segment_ring_close(&s->peers[i].rx[k]);
        }
    sp_free(s->peers);
    sp_free(s);
}
