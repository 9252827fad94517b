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

static const sp_transport *const tcp = &sp_transport_tcp;

bool sp_segments_has_control(sp_endpoint *opaque)
{
    return sp_segments_self(opaque)->tcp != NULL;
}

double sp_segments_ns_per_byte(sp_endpoint *opaque, int peer)
{
    const sp_segments *s = sp_segments_self(opaque);
    int64_t mbps = s->net->mbps(s, peer);
    return mbps > 0 ? NS_MBPS_PER_BYTE / (double)mbps : UNKNOWN_NS_PER_BYTE;
}

void sp_segments_describe(sp_endpoint *opaque, int peer, char *out, size_t cap)
{
    sp_segments_self(opaque)->net->describe(sp_segments_self(opaque), peer, out, cap);
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

/* Messages leave in the order of their commits, whatever their call. */
spccl_status sp_segments_commit(sp_endpoint *opaque, int peer, int queue, uint32_t call)
{
    sp_segments *s = sp_segments_self(opaque);
    sp_segment_ring *ring = &s->peers[peer].tx[queue];
    (void)call;
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
    spccl_status st =
        sp_segment_ring_peek(&s->peers[peer].rx[queue], sp_segments_message_max(opaque), out, bytes);
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
    if (sp_segments_peek(opaque, peer, queue, &message, &bytes) != SPCCL_OK)
        return SP_FAIL(SPCCL_ERR_BUG, "rank %d: release of rank %d, queue %d, without peek", s->config.rank,
                       peer, queue);
    s->net->released(s, peer, sp_segment_ring_release(&s->peers[peer].rx[queue], bytes));
    return SPCCL_OK;
}

bool sp_segments_flushed(sp_endpoint *opaque, int peer, int queue, uint64_t n)
{
    sp_segments_peer *p = &sp_segments_self(opaque)->peers[peer];
    return p->gone || sp_segment_ring_left(&p->tx[queue]) >= n;
}

/* ---- progress ---- */

static void serve_peer(sp_segments *s, int peer)
{
    sp_segments_peer *p = &s->peers[peer];
    bool pushed = false;
    if (!p->carried)
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
    (void)peer;
    (void)text;
    s->net->poll(s);
    for (int i = 0; i < s->config.world_size; i++)
        serve_peer(s, i);
    return SPCCL_OK;
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
        if (s->peers[i].carried && s->peers[i].ended_ns != 0 && !s->peers[i].over)
            return true;
    return false;
}

spccl_status sp_segments_arm(sp_endpoint *opaque)
{
    sp_segments *s = sp_segments_self(opaque);
    bool changed = !s->net->arm(s);
    changed = changed || s->changed || is_ending(s);
    s->changed = false;
    if (!changed)
        return SPCCL_OK;
    s->net->disarm(s, false);
    return SPCCL_AGAIN;
}

void sp_segments_disarm(sp_endpoint *opaque)
{
    sp_segments *s = sp_segments_self(opaque);
    s->net->disarm(s, true);
}

size_t sp_segments_memory_bytes(sp_endpoint *opaque)
{
    const sp_segments *s = sp_segments_self(opaque);
    size_t bytes = 0;
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

spccl_status sp_segments_open_control(sp_segments *s)
{
    SP_TRY(s->config.open_control(s->config.owner, &s->config, &s->tcp));
    s->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    if (s->epoll_fd < 0)
        return SP_FAIL_ERRNO(SPCCL_ERR_SYSTEM, "rank %d: epoll", s->config.rank);
    return SPCCL_OK;
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
        (void)tcp->progress(s->tcp, &peer, text); /* a peer may be gone */
        (void)sp_segments_progress((sp_endpoint *)s, &peer, text);
        for (int i = 0; i < s->config.world_size; i++) {
            sp_segments_peer *p = &s->peers[i];
            for (int k = 0; p->carried && !p->gone && !p->failed && k < s->config.n_queues; k++)
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
    if (!s->peers[peer].carried || s->peers[peer].gone)
        return;
    for (int k = 0; k < s->config.n_queues; k++)
        f.n_segments[k] = s->net->n_sent(s, peer, k);
    sp_segments_write_fin(&f, s->config.n_queues, note);
    (void)sp_segments_say(s, peer, note, sizeof note);
}

void sp_segments_leave(sp_endpoint *opaque)
{
    sp_segments *s = sp_segments_self(opaque);
    if (!s->up || s->pid != getpid())
        return;
    finish_sending(s);
    for (int i = 0; i < s->config.world_size; i++)
        say_fin(s, i);
}

void sp_segments_close(sp_endpoint *opaque)
{
    sp_segments *s = sp_segments_self(opaque);
    bool is_closed;
    if (s == NULL)
        return;
    explicit_bzero(s->config.secret, sizeof s->config.secret);
    is_closed = s->net->close(s);
    if (s->epoll_fd >= 0)
        close(s->epoll_fd);
    if (!is_closed)
        return; /* the rest may still be in use */
    for (int i = 0; s->peers != NULL && i < s->config.world_size; i++)
        for (int k = 0; k < SP_QUEUES_MAX; k++) {
            sp_segment_ring_close(&s->peers[i].tx[k]);
            sp_segment_ring_close(&s->peers[i].rx[k]);
        }
    sp_free(s->peers);
    sp_free(s);
}
