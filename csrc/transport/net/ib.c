/* ib.c - transport "ib": ranks on hosts with InfiniBand or RoCE. See ib.h. */
#include "transport/net/ib.h"

#include "core/base/clock.h"
#include "core/base/env.h"
#include "core/base/log.h"
#include "core/base/mem.h"
#include "transport/common/transports.h"

#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <time.h>
#include <unistd.h>

#define MS INT64_C(1000000)
#define CLOSE_NS (500 * MS)     /* close waits at most this long until what was sent has arrived */
#define UNKNOWN_NS_PER_BYTE 0.8 /* 10 Gbit/s, where a device gives no speed */
#define NS_MBPS_PER_BYTE 8000.0
/* While this rank polls, it looks at the tcp links, which costs a system call, once in so many calls of progress. */
#define TCP_EVERY 16

static const sp_transport *const tcp = &sp_transport_tcp;

static bool by_tcp(const struct sp_ib_peer *p)
{
    return p->route == SP_IB_BY_TCP;
}

static bool ib_is_rdma(sp_endpoint *opaque, int peer)
{
    return !by_tcp(&sp_ib_self(opaque)->peers[peer]);
}

static double ib_ns_per_byte(sp_endpoint *opaque, int peer)
{
    struct sp_ib *ep = sp_ib_self(opaque);
    const struct sp_ib_peer *p = &ep->peers[peer];
    int mbps = 0;
    if (by_tcp(p))
        return tcp->ns_per_byte(ep->tcp, peer);
    for (uint32_t i = 0; i < p->n_qps; i++)
        if (i == 0 || p->qps[i].device != p->qps[i - 1].device) /* those of a device follow each other */
            mbps += ep->devices[p->qps[i].device].speed_mbps;
    return mbps > 0 ? NS_MBPS_PER_BYTE / mbps : UNKNOWN_NS_PER_BYTE;
}

/* ---- messages ---- */

static size_t ib_message_max(sp_endpoint *opaque)
{
    return sp_ib_self(opaque)->config.queue_bytes / 4;
}

static spccl_status ib_reserve(sp_endpoint *opaque, int peer, int queue, size_t bytes, void **out)
{
    struct sp_ib *ep = sp_ib_self(opaque);
    struct sp_ib_peer *p = &ep->peers[peer];
    void *space;
    if (by_tcp(p))
        return tcp->reserve(ep->tcp, peer, queue, bytes, out);
    if (bytes == 0 || bytes > ib_message_max(opaque))
        return SP_FAIL(SPCCL_ERR_BUG, "rank %d: message of %zu bytes to rank %d; wanted 1 to %zu",
                       ep->config.rank, bytes, peer, ib_message_max(opaque));
    if (p->gone)
        return sp_ib_lost(ep, peer);
    space = sp_segment_ring_reserve(&p->tx[queue].ring, bytes);
    if (space == NULL)
        return SPCCL_AGAIN;
    *out = space;
    return SPCCL_OK;
}

/* Messages to a peer leave in the order of their commits: `call` matters over tcp only. */
static spccl_status ib_commit(sp_endpoint *opaque, int peer, int queue, uint32_t call)
{
    struct sp_ib *ep = sp_ib_self(opaque);
    struct sp_ib_peer *p = &ep->peers[peer];
    if (by_tcp(p))
        return tcp->commit(ep->tcp, peer, queue, call);
    if (p->tx[queue].ring.reserved == 0)
        return SP_FAIL(SPCCL_ERR_BUG, "rank %d: commit to rank %d, queue %d, without reserve",
                       ep->config.rank, peer, queue);
    if (sp_segment_ring_commit(&p->tx[queue].ring))
        sp_ib_send(ep, peer);
    return SPCCL_OK;
}

static spccl_status ib_peek(sp_endpoint *opaque, int peer, int queue, const void **out, size_t *bytes)
{
    struct sp_ib *ep = sp_ib_self(opaque);
    struct sp_ib_peer *p = &ep->peers[peer];
    spccl_status st;
    if (by_tcp(p))
        return tcp->peek(ep->tcp, peer, queue, out, bytes);
    st = sp_segment_ring_peek(&p->rx[queue].ring, ib_message_max(opaque), out, bytes);
    if (st == SPCCL_ERR_FORMAT) {
        char text[300];
        snprintf(text, sizeof text, "%s", spccl_last_error());
        return SP_FAIL(st, "rank %d: rank %d sent something that is not a message: %s", ep->config.rank, peer,
                       text);
    }
    return st == SPCCL_AGAIN && p->over ? sp_ib_lost(ep, peer) : st;
}

static spccl_status ib_release(sp_endpoint *opaque, int peer, int queue)
{
    struct sp_ib *ep = sp_ib_self(opaque);
    struct sp_ib_peer *p = &ep->peers[peer];
    const void *message;
    size_t bytes;
    if (by_tcp(p))
        return tcp->release(ep->tcp, peer, queue);
    if (ib_peek(opaque, peer, queue, &message, &bytes) != SPCCL_OK)
        return SP_FAIL(SPCCL_ERR_BUG, "rank %d: release of rank %d, queue %d, without peek", ep->config.rank,
                       peer, queue);
    (void)sp_segment_ring_release(&p->rx[queue].ring, bytes);
    sp_ib_send(ep, peer); /* a credit may be due */
    return SPCCL_OK;
}

static bool ib_flushed(sp_endpoint *opaque, int peer, int queue, uint64_t n)
{
    struct sp_ib *ep = sp_ib_self(opaque);
    struct sp_ib_peer *p = &ep->peers[peer];
    if (by_tcp(p))
        return tcp->flushed(ep->tcp, peer, queue, queue == 0 ? n + p->n_notes : n);
    return p->gone || sp_segment_ring_left(&p->tx[queue].ring) >= n;
}

/* ---- progress ---- */

static void serve_peer(struct sp_ib *ep, int peer)
{
    struct sp_ib_peer *p = &ep->peers[peer];
    if (p->route != SP_IB_BY_IB)
        return;
    for (int i = 0; i < ep->config.n_queues; i++)
        (void)sp_segment_ring_push(&p->tx[i].ring);
    sp_ib_send(ep, peer);
    sp_ib_look_at_tcp(ep, peer);
    sp_ib_look_at_end(ep, peer);
}

static bool any_by_tcp(const struct sp_ib *ep)
{
    for (int i = 0; i < ep->config.world_size; i++)
        if (by_tcp(&ep->peers[i]))
            return true;
    return false;
}

static spccl_status ib_progress(sp_endpoint *opaque, int *peer, char *text)
{
    struct sp_ib *ep = sp_ib_self(opaque);
    spccl_status st = SPCCL_OK;
    if (ep->n_progress++ % TCP_EVERY == 0 || ep->ending || ep->aborted || any_by_tcp(ep)) {
        st = tcp->progress(ep->tcp, peer, text);
        ep->aborted = st == SPCCL_ERR_ABORTED;
    }
    sp_ib_poll(ep);
    for (int i = 0; i < ep->config.world_size; i++)
        serve_peer(ep, i);
    return st;
}

/* ---- sleeping ---- */

static int ib_wait_fd(sp_endpoint *opaque)
{
    return sp_ib_self(opaque)->epoll_fd;
}

/* True if a peer ends: it is not known yet whether more will arrive. */
static bool is_ending(const struct sp_ib *ep)
{
    for (int i = 0; ep->ending && i < ep->config.world_size; i++)
        if (ep->peers[i].route == SP_IB_BY_IB && ep->peers[i].ended_ns != 0 && !ep->peers[i].over)
            return true;
    return false;
}

/* Changes of the tcp links count if one carries messages. Otherwise they are notes, which are looked at here. */
static spccl_status arm_tcp(struct sp_ib *ep)
{
    spccl_status st = tcp->arm(ep->tcp);
    for (int i = 0; st != SPCCL_OK && !any_by_tcp(ep) && i < ep->config.world_size; i++)
        if (ep->peers[i].route == SP_IB_BY_IB)
            sp_ib_look_at_tcp(ep, i);
    if (st != SPCCL_OK && !any_by_tcp(ep) && !ep->changed)
        st = tcp->arm(ep->tcp);
    return st;
}

static spccl_status ib_arm(sp_endpoint *opaque)
{
    struct sp_ib *ep = sp_ib_self(opaque);
    bool changed;
    spccl_status st = arm_tcp(ep);
    for (int d = 0; d < ep->n_devices; d++)
        if (ep->contexts[d] != NULL && sp_ib_context_notify(ep->contexts[d]) != SPCCL_OK)
            ep->changed = true; /* it cannot sleep: the caller polls */
    sp_ib_poll(ep);             /* completions before the request make no event */
    for (int i = 0; i < ep->config.world_size; i++)
        if (ep->peers[i].route == SP_IB_BY_IB)
            sp_ib_send(ep, i); /* one may have been a credit that segments wait for */
    changed = ep->changed || is_ending(ep);
    ep->changed = false;
    if (st == SPCCL_OK && !changed)
        return SPCCL_OK;
    if (st == SPCCL_OK)
        tcp->disarm(ep->tcp);
    return SPCCL_AGAIN;
}

static void ib_disarm(sp_endpoint *opaque)
{
    struct sp_ib *ep = sp_ib_self(opaque);
    tcp->disarm(ep->tcp);
    for (int d = 0; d < ep->n_devices; d++)
        if (ep->contexts[d] != NULL) {
            sp_ib_context_forget(ep->contexts[d]);
            sp_ib_context_log_events(ep->contexts[d], ep->config.rank);
        }
    ep->n_progress = 0; /* what woke this rank may have come over tcp */
}

static void ib_abort_peers(sp_endpoint *opaque, const char *text)
{
    struct sp_ib *ep = sp_ib_self(opaque);
    if (ep->tcp != NULL)
        tcp->abort_peers(ep->tcp, text);
}

static size_t ib_memory_bytes(sp_endpoint *opaque)
{
    struct sp_ib *ep = sp_ib_self(opaque);
    size_t bytes = ep->tcp != NULL ? tcp->memory_bytes(ep->tcp) : 0;
    for (int i = 0; i < ep->config.world_size; i++)
        for (int k = 0; k < ep->config.n_queues; k++)
            bytes += ep->peers[i].tx[k].ring.memory.cap + ep->peers[i].rx[k].ring.memory.cap;
    return bytes;
}

/* ---- opening and closing ---- */

/* Wait up to CLOSE_NS until everything has arrived at the peers' devices. */
static void finish_sending(struct sp_ib *ep)
{
    int64_t deadline_ns = sp_now_ns() + CLOSE_NS;
    bool busy = true;
    while (busy && !sp_deadline_passed(deadline_ns)) {
        char text[SP_ABORT_TEXT_CAP];
        int peer;
        busy = false;
        (void)ib_progress((sp_endpoint *)ep, &peer, text);
        for (int i = 0; i < ep->config.world_size; i++) {
            struct sp_ib_peer *p = &ep->peers[i];
            if (p->route != SP_IB_BY_IB || p->gone || p->failed)
                continue;
            for (int k = 0; k < ep->config.n_queues; k++)
                busy = busy || sp_segment_ring_left(&p->tx[k].ring) < p->tx[k].ring.n_messages;
        }
        if (busy)
            nanosleep(&(struct timespec){.tv_nsec = 200000}, NULL);
    }
}

static void say_fin(struct sp_ib *ep, int peer)
{
    const struct sp_ib_peer *p = &ep->peers[peer];
    sp_segments_fin f = {{0}};
    void *space = NULL;
    if (p->route != SP_IB_BY_IB || p->gone)
        return;
    for (int k = 0; k < ep->config.n_queues; k++)
        f.n_segments[k] = p->tx[k].n_posted;
    if (tcp->reserve(ep->tcp, peer, 0, SP_SEGMENTS_FIN_BYTES, &space) == SPCCL_OK) {
        sp_segments_write_fin(&f, ep->config.n_queues, space);
        (void)tcp->commit(ep->tcp, peer, 0, 0);
    }
}

static void close_peer(struct sp_ib *ep, struct sp_ib_peer *p)
{
    if (ep->pid == getpid())
        sp_ib_close_qps(p);
    for (int k = 0; k < SP_QUEUES_MAX; k++) {
        sp_segment_ring_close(&p->tx[k].ring);
        sp_segment_ring_close(&p->rx[k].ring);
    }
}

static void close_in_child(void *owner)
{
    struct sp_ib *ep = owner;
    for (int d = 0; d < ep->n_devices; d++)
        if (ep->contexts[d] != NULL)
            sp_ib_context_close_descriptors(ep->contexts[d]);
}

static void ib_close(sp_endpoint *opaque)
{
    struct sp_ib *ep = sp_ib_self(opaque);
    bool here;
    if (ep == NULL)
        return;
    here = ep->pid == getpid();
    if (here && ep->up)
        finish_sending(ep);
    for (int i = 0; here && ep->up && i < ep->config.world_size; i++)
        say_fin(ep, i);
    sp_fork_unwatch(&ep->guard);
    tcp->close(ep->tcp);
    for (int i = 0; ep->peers != NULL && i < ep->config.world_size; i++)
        close_peer(ep, &ep->peers[i]);
    for (int d = 0; here && d < ep->n_devices; d++)
        sp_ib_context_close(ep->contexts[d]);
    for (int d = 0; here && d < ep->n_devices; d++)
        if (ep->taken[d])
            sp_nic_give_back("ib", &ep->nics[d]);
    if (ep->epoll_fd >= 0)
        close(ep->epoll_fd);
    explicit_bzero(ep->config.secret, sizeof ep->config.secret);
    sp_free(ep->peers);
    sp_free(ep);
}

static spccl_status open_beside(struct sp_ib *ep)
{
    struct epoll_event e = {.events = EPOLLIN};
    SP_TRY(tcp->open(&ep->config, &ep->tcp));
    SP_TRY(sp_fork_watch(&ep->guard, close_in_child, ep));
    ep->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    if (ep->epoll_fd < 0 || epoll_ctl(ep->epoll_fd, EPOLL_CTL_ADD, tcp->wait_fd(ep->tcp), &e) != 0)
        return SP_FAIL_ERRNO(SPCCL_ERR_SYSTEM, "rank %d: ib: epoll", ep->config.rank);
    return SPCCL_OK;
}

static spccl_status ib_open(const sp_endpoint_config *config, sp_endpoint **out)
{
    spccl_status st = SPCCL_OK;
    sp_ib_choice choice;
    int64_t n_qps;
    struct sp_ib *ep = sp_calloc(1, sizeof *ep);
    if (ep == NULL)
        return SP_FAIL(SPCCL_ERR_NOMEM, "ib: an endpoint of %zu bytes", sizeof *ep);
    ep->config = *config;
    ep->config.gpu = NULL; /* valid until return */
    ep->epoll_fd = -1;
    ep->pid = getpid();
    ep->peers = sp_calloc((size_t)config->world_size, sizeof *ep->peers);
    if (ep->peers == NULL) {
        st = SP_FAIL(SPCCL_ERR_NOMEM, "ib: tables for %d ranks", config->world_size);
        goto fail;
    }
    sp_ib_choose(config->rank, config->gpu != NULL ? config->gpu : "", &choice);
    ep->n_devices = choice.n;
    memcpy(ep->devices, choice.devices, sizeof ep->devices);
    memcpy(ep->device_why, choice.why, sizeof ep->device_why);
    ep->address.n = (uint32_t)ep->n_devices;
    SP_TRY_TO(fail, st, sp_env_number(SP_ENV_IB_QPS, &n_qps));
    ep->address.n_qps = (uint32_t)n_qps;
    for (int i = 0; i < ep->n_devices; i++) {
        ep->address.ports[i].network = sp_ib_network(&ep->devices[i]);
        ep->address.ports[i].near = ep->devices[i].near;
        memcpy(ep->address.ports[i].gid, ep->devices[i].gid, SP_IB_GID_BYTES);
    }
    if (ep->n_devices > 0 && choice.refused[0] != '\0')
        sp_log(SP_LOG_WARN, config->rank, "ib: SPCCL_IB_DEVICE: not used: %s", choice.refused);
    if (ep->n_devices > 0)
        SP_TRY_TO(fail, st, open_beside(ep));
    else if (sp_env_text(SP_ENV_IB_DEVICE)[0] != '\0')
        sp_log(SP_LOG_WARN, config->rank, "ib: %s", ep->device_why);
    *out = (sp_endpoint *)ep;
    return SPCCL_OK;
fail:
    ib_close((sp_endpoint *)ep);
    return st;
}

static void ib_local_ip(sp_endpoint *opaque, int peer, char *out, size_t cap)
{
    tcp->local_ip(sp_ib_self(opaque)->tcp, peer, out, cap);
}

const sp_transport sp_transport_ib = {
    .name = "ib",
    .is_rdma = ib_is_rdma,
    .ns_per_byte = ib_ns_per_byte,
    .rate_mbps = sp_ib_rate_mbps,
    .pair_mbps = sp_ib_pair_mbps,
    .inform = sp_ib_inform,
    .device = sp_ib_net_device,
    .open = ib_open,
    .address = sp_ib_address_of,
    .can_reach = sp_ib_can_reach,
    .describe = sp_ib_describe,
    .local_ip = ib_local_ip,
    .add_peer = sp_ib_add_peer,
    .has_next = sp_ib_has_next,
    .failed = sp_ib_failed,
    .connect_step = sp_ib_connect_step,
    .message_max = ib_message_max,
    .reserve = ib_reserve,
    .commit = ib_commit,
    .peek = ib_peek,
    .release = ib_release,
    .flushed = ib_flushed,
    .progress = ib_progress,
    .wait_fd = ib_wait_fd,
    .arm = ib_arm,
    .disarm = ib_disarm,
    .abort_peers = ib_abort_peers,
    .puts = &sp_ib_puts,
    .memory_bytes = ib_memory_bytes,
    .close = ib_close,
};
