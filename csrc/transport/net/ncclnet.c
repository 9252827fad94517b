/* ncclnet.c - transport "ncclnet": ranks on hosts whose network has an NCCL net plugin. Each queue has a connection
 * of the plugin in each direction, so that a full queue cannot delay another. See ncclnet.h. */
#include "transport/net/ncclnet.h"

#include "core/base/bits.h"
#include "core/base/clock.h"
#include "core/base/env.h"
#include "core/base/log.h"
#include "core/base/mem.h"
#include "core/base/status.h"
#include "transport/common/transports.h"

#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#define MS INT64_C(1000000)
#define CLOSE_NS (500 * MS)     /* close waits at most this long until what was sent has left */
#define UNKNOWN_NS_PER_BYTE 0.8 /* 10 Gbit/s, where a plugin gives no speed */
#define NS_MBPS_PER_BYTE 8000.0

static const sp_transport *const tcp = &sp_transport_tcp;

static bool by_tcp(const struct sp_plugin_peer *p)
{
    return p->route == SP_PLUGIN_BY_TCP;
}

static bool plugin_is_rdma(sp_endpoint *opaque, int peer)
{
    return !by_tcp(&sp_plugin_self(opaque)->peers[peer]);
}

static double plugin_ns_per_byte(sp_endpoint *opaque, int peer)
{
    struct sp_plugin_endpoint *ep = sp_plugin_self(opaque);
    int speed;
    if (by_tcp(&ep->peers[peer]))
        return tcp->ns_per_byte(ep->tcp, peer);
    speed = ep->plugin->devices[ep->peers[peer].tx[0].device].speed_mbps;
    return speed > 0 ? NS_MBPS_PER_BYTE / speed : UNKNOWN_NS_PER_BYTE;
}

/* ---- addresses ---- */

static spccl_status plugin_address(sp_endpoint *opaque, uint8_t *out, size_t *bytes)
{
    struct sp_plugin_endpoint *ep = sp_plugin_self(opaque);
    *bytes = sp_plugin_write_address(out);
    if (ep->tcp != NULL) {
        size_t n = 0;
        SP_TRY(tcp->address(ep->tcp, out + *bytes, &n));
        *bytes += n;
    }
    return SPCCL_OK;
}

static bool plugin_can_reach(sp_endpoint *opaque, const uint8_t *address, size_t bytes, char *why,
                             size_t why_cap)
{
    struct sp_plugin_endpoint *ep = sp_plugin_self(opaque);
    const uint8_t *its_tcp;
    size_t its_bytes, used;
    if (ep->tcp == NULL) {
        snprintf(why, why_cap, "no NCCL net plugin: %s", ep->found.why);
        return false;
    }
    if (!sp_plugin_read_address(address, bytes, &its_tcp, &its_bytes)) {
        snprintf(why, why_cap, "the peer has no NCCL net plugin");
        return false;
    }
    used = (size_t)snprintf(why, why_cap, "plugin %.80s, ", ep->found.path);
    if (used >= why_cap)
        used = why_cap - 1;
    return tcp->can_reach(ep->tcp, its_tcp, its_bytes, why + used, why_cap - used);
}

static spccl_status plugin_add_peer(sp_endpoint *opaque, int peer, const uint8_t *address, size_t bytes)
{
    struct sp_plugin_endpoint *ep = sp_plugin_self(opaque);
    const uint8_t *its_tcp;
    size_t its_bytes;
    if (ep->tcp == NULL || !sp_plugin_read_address(address, bytes, &its_tcp, &its_bytes))
        return SP_FAIL(SPCCL_ERR_BUG, "rank %d: ncclnet: add_peer(%d, %zu bytes)", ep->config.rank, peer,
                       bytes);
    SP_TRY(tcp->add_peer(ep->tcp, peer, its_tcp, its_bytes));
    ep->peers[peer].added = true;
    return SPCCL_OK;
}

static void plugin_describe(sp_endpoint *opaque, int peer, char *out, size_t cap)
{
    struct sp_plugin_endpoint *ep = sp_plugin_self(opaque);
    const struct sp_plugin_peer *p = &ep->peers[peer];
    char device[80];
    if (by_tcp(p)) {
        snprintf(out, cap, "%s%s", p->tcp_faster ? "" : "tcp, as the plugin failed: ", p->reason);
        return;
    }
    sp_plugin_device_text(ep, p->tx[0].device, device, sizeof device);
    snprintf(out, cap, "ncclnet: plugin %s v%d, %s, %s", ep->plugin->name, ep->plugin->version, device,
             ep->found.why);
}

static void plugin_local_ip(sp_endpoint *opaque, int peer, char *out, size_t cap)
{
    tcp->local_ip(sp_plugin_self(opaque)->tcp, peer, out, cap);
}

/* ---- messages ---- */

static size_t plugin_message_max(sp_endpoint *opaque)
{
    return sp_plugin_self(opaque)->config.queue_bytes / 4;
}

static spccl_status peer_gone(const struct sp_plugin_endpoint *ep, int peer)
{
    return SP_FAIL(SPCCL_ERR_PEER, "rank %d: rank %d %s", ep->config.rank, peer, ep->peers[peer].gone_text);
}

static spccl_status plugin_reserve(sp_endpoint *opaque, int peer, int queue, size_t bytes, void **out)
{
    struct sp_plugin_endpoint *ep = sp_plugin_self(opaque);
    struct sp_plugin_peer *p = &ep->peers[peer];
    void *space;
    if (by_tcp(p))
        return tcp->reserve(ep->tcp, peer, queue, bytes, out);
    if (bytes == 0 || bytes > plugin_message_max(opaque))
        return SP_FAIL(SPCCL_ERR_BUG, "rank %d: message of %zu bytes to rank %d; wanted 1 to %zu",
                       ep->config.rank, bytes, peer, plugin_message_max(opaque));
    if (p->gone)
        return peer_gone(ep, peer);
    space = sp_segment_ring_reserve(&p->tx[queue].ring, bytes);
    if (space == NULL)
        return SPCCL_AGAIN;
    *out = space;
    return SPCCL_OK;
}

/* The plugin's connections share the wire as the network decides: `call` matters over tcp only. */
static spccl_status plugin_commit(sp_endpoint *opaque, int peer, int queue, uint32_t call)
{
    struct sp_plugin_endpoint *ep = sp_plugin_self(opaque);
    struct sp_plugin_peer *p = &ep->peers[peer];
    if (by_tcp(p))
        return tcp->commit(ep->tcp, peer, queue, call);
    if (p->tx[queue].ring.reserved == 0)
        return SP_FAIL(SPCCL_ERR_BUG, "rank %d: commit to rank %d, queue %d, without reserve",
                       ep->config.rank, peer, queue);
    if (sp_segment_ring_commit(&p->tx[queue].ring))
        sp_plugin_thread_kick(ep);
    return SPCCL_OK;
}

static spccl_status plugin_peek(sp_endpoint *opaque, int peer, int queue, const void **out, size_t *bytes)
{
    struct sp_plugin_endpoint *ep = sp_plugin_self(opaque);
    struct sp_plugin_peer *p = &ep->peers[peer];
    spccl_status st;
    if (by_tcp(p))
        return tcp->peek(ep->tcp, peer, queue, out, bytes);
    st = sp_segment_ring_peek(&p->rx[queue].ring, plugin_message_max(opaque), out, bytes);
    if (st == SPCCL_ERR_FORMAT) {
        char text[300];
        snprintf(text, sizeof text, "%s", spccl_last_error());
        return SP_FAIL(st, "rank %d: rank %d sent something that is not a message: %s", ep->config.rank, peer,
                       text);
    }
    return st == SPCCL_AGAIN && p->over ? peer_gone(ep, peer) : st;
}

static spccl_status plugin_release(sp_endpoint *opaque, int peer, int queue)
{
    struct sp_plugin_endpoint *ep = sp_plugin_self(opaque);
    struct sp_plugin_peer *p = &ep->peers[peer];
    const void *message;
    size_t bytes;
    if (by_tcp(p))
        return tcp->release(ep->tcp, peer, queue);
    if (plugin_peek(opaque, peer, queue, &message, &bytes) != SPCCL_OK)
        return SP_FAIL(SPCCL_ERR_BUG, "rank %d: release of rank %d, queue %d, without peek", ep->config.rank,
                       peer, queue);
    if (sp_segment_ring_release(&p->rx[queue].ring, bytes))
        sp_plugin_thread_kick(ep);
    return SPCCL_OK;
}

static bool plugin_flushed(sp_endpoint *opaque, int peer, int queue, uint64_t n)
{
    struct sp_plugin_endpoint *ep = sp_plugin_self(opaque);
    struct sp_plugin_peer *p = &ep->peers[peer];
    if (by_tcp(p))
        return tcp->flushed(ep->tcp, peer, queue, queue == 0 ? n + p->connect_info_sent + p->result_sent : n);
    return p->gone || (sp_segment_ring_left(&p->tx[queue].ring) >= n);
}

/* ---- progress ---- */

static void serve_peer(struct sp_plugin_endpoint *ep, int peer)
{
    struct sp_plugin_peer *p = &ep->peers[peer];
    bool pushed = false;
    if (p->route != SP_PLUGIN_BY_PLUGIN)
        return;
    for (int i = 0; i < ep->config.n_queues; i++)
        pushed = sp_segment_ring_push(&p->tx[i].ring) || pushed;
    if (pushed)
        sp_plugin_thread_kick(ep);
    if (atomic_load(&p->state) == SP_PLUGIN_FAILED)
        sp_plugin_start_ending(ep, p);
    sp_plugin_look_at_tcp(ep, peer);
    sp_plugin_look_at_end(ep, peer);
}

static spccl_status plugin_progress(sp_endpoint *opaque, int *peer, char *text)
{
    struct sp_plugin_endpoint *ep = sp_plugin_self(opaque);
    spccl_status st = tcp->progress(ep->tcp, peer, text);
    sp_plugin_check_thread(ep);
    for (int i = 0; i < ep->config.world_size; i++)
        serve_peer(ep, i);
    return st;
}

/* ---- sleeping ---- */

static int plugin_wait_fd(sp_endpoint *opaque)
{
    return sp_plugin_self(opaque)->epoll_fd;
}

/* True if a peer ends: it is not known yet whether more will arrive. */
static bool is_ending(const struct sp_plugin_endpoint *ep)
{
    for (int i = 0; i < ep->config.world_size; i++)
        if (ep->peers[i].ended_ns != 0 && !ep->peers[i].over)
            return true;
    return false;
}

static bool any_by_tcp(const struct sp_plugin_endpoint *ep)
{
    for (int i = 0; i < ep->config.world_size; i++)
        if (by_tcp(&ep->peers[i]))
            return true;
    return false;
}

/* Changes of the tcp links count if one carries messages. Otherwise they are notes, which are looked at here. */
static spccl_status arm_tcp(struct sp_plugin_endpoint *ep)
{
    spccl_status st = tcp->arm(ep->tcp);
    for (int i = 0; st != SPCCL_OK && !any_by_tcp(ep) && i < ep->config.world_size; i++)
        if (ep->peers[i].route == SP_PLUGIN_BY_PLUGIN)
            sp_plugin_look_at_tcp(ep, i);
    if (st != SPCCL_OK && !any_by_tcp(ep) && !ep->changed)
        st = tcp->arm(ep->tcp);
    return st;
}

static spccl_status plugin_arm(sp_endpoint *opaque)
{
    struct sp_plugin_endpoint *ep = sp_plugin_self(opaque);
    unsigned n;
    bool changed;
    spccl_status st = arm_tcp(ep);
    atomic_store(&ep->armed, true);
    n = atomic_load(&ep->n_events);
    changed = ep->changed || n != ep->n_events_seen || is_ending(ep);
    ep->changed = false;
    ep->n_events_seen = n;
    if (st == SPCCL_OK && !changed)
        return SPCCL_OK;
    atomic_store(&ep->armed, false);
    if (st == SPCCL_OK)
        tcp->disarm(ep->tcp);
    return SPCCL_AGAIN;
}

static void plugin_disarm(sp_endpoint *opaque)
{
    struct sp_plugin_endpoint *ep = sp_plugin_self(opaque);
    uint64_t count;
    bool is_told;
    tcp->disarm(ep->tcp);
    is_told = !atomic_exchange(&ep->armed, false);
    /* Read in any case: the thread may have written after an arm that returned AGAIN. */
    if (read(ep->event_fd, &count, sizeof count) < 0 && is_told)
        ep->changed = true; /* the thread is about to write: the next sleep ends at once, and reads it */
}

static void plugin_abort_peers(sp_endpoint *opaque, const char *text)
{
    struct sp_plugin_endpoint *ep = sp_plugin_self(opaque);
    if (ep->tcp != NULL)
        tcp->abort_peers(ep->tcp, text);
}

static size_t plugin_memory_bytes(sp_endpoint *opaque)
{
    struct sp_plugin_endpoint *ep = sp_plugin_self(opaque);
    size_t bytes = ep->tcp != NULL ? tcp->memory_bytes(ep->tcp) : 0;
    for (int i = 0; i < ep->config.world_size; i++)
        for (int k = 0; k < ep->config.n_queues; k++)
            bytes += ep->peers[i].tx[k].ring.memory.cap + ep->peers[i].rx[k].ring.memory.cap;
    return bytes;
}

/* ---- opening and closing ---- */

/* Wait up to CLOSE_NS until the plugin has sent everything. */
static void finish_sending(struct sp_plugin_endpoint *ep)
{
    int64_t deadline_ns = sp_now_ns() + CLOSE_NS;
    bool busy = true;
    while (busy && !sp_deadline_passed(deadline_ns)) {
        char text[SP_ABORT_TEXT_CAP];
        int peer;
        busy = false;
        (void)plugin_progress((sp_endpoint *)ep, &peer, text);
        for (int i = 0; i < ep->config.world_size; i++) {
            struct sp_plugin_peer *p = &ep->peers[i];
            if (p->route != SP_PLUGIN_BY_PLUGIN || p->gone || atomic_load(&p->state) == SP_PLUGIN_FAILED)
                continue;
            for (int k = 0; k < ep->config.n_queues; k++)
                busy = busy || sp_segment_ring_left(&p->tx[k].ring) < p->tx[k].ring.n_messages;
        }
        if (busy)
            nanosleep(&(struct timespec){.tv_nsec = 200000}, NULL);
    }
}

static void say_fin(struct sp_plugin_endpoint *ep, int peer)
{
    const struct sp_plugin_peer *p = &ep->peers[peer];
    sp_segments_fin f = {{0}};
    void *space = NULL;
    if (p->route != SP_PLUGIN_BY_PLUGIN || p->gone)
        return;
    for (int k = 0; k < ep->config.n_queues; k++)
        f.n_segments[k] = atomic_load(&p->tx[k].ring.allowed);
    if (tcp->reserve(ep->tcp, peer, 0, SP_SEGMENTS_FIN_BYTES, &space) == SPCCL_OK) {
        sp_segments_write_fin(&f, ep->config.n_queues, space);
        (void)tcp->commit(ep->tcp, peer, 0, 0);
    }
}

static void plugin_close(sp_endpoint *opaque)
{
    struct sp_plugin_endpoint *ep = sp_plugin_self(opaque);
    bool here;
    if (ep == NULL)
        return;
    here = ep->up && ep->pid == getpid();
    if (here && !ep->thread_lost)
        finish_sending(ep);
    for (int i = 0; here && i < ep->config.world_size; i++)
        say_fin(ep, i);
    sp_plugin_thread_stop(ep);
    tcp->close(ep->tcp);
    ep->tcp = NULL;
    if (ep->epoll_fd >= 0)
        close(ep->epoll_fd);
    explicit_bzero(ep->config.secret, sizeof ep->config.secret);
    if (ep->pid == getpid())
        sp_plugin_give_back_cards(ep);
    if (ep->thread_lost)
        return; /* the rest may still be in use */
    if (ep->event_fd >= 0)
        close(ep->event_fd);
    for (int i = 0; ep->peers != NULL && i < ep->config.world_size; i++)
        for (int k = 0; k < SP_QUEUES_MAX; k++) {
            sp_segment_ring_close(&ep->peers[i].tx[k].ring);
            sp_segment_ring_close(&ep->peers[i].rx[k].ring);
        }
    sp_free(ep->peers);
    sp_free(ep);
}

static spccl_status open_descriptors(struct sp_plugin_endpoint *ep)
{
    struct epoll_event e = {.events = EPOLLIN};
    int fds[2];
    ep->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    ep->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    if (ep->event_fd < 0 || ep->epoll_fd < 0)
        return SP_FAIL_ERRNO(SPCCL_ERR_SYSTEM, "rank %d: ncclnet: epoll and eventfd", ep->config.rank);
    fds[0] = ep->event_fd;
    fds[1] = tcp->wait_fd(ep->tcp);
    for (int i = 0; i < 2; i++)
        if (epoll_ctl(ep->epoll_fd, EPOLL_CTL_ADD, fds[i], &e) != 0)
            return SP_FAIL_ERRNO(SPCCL_ERR_SYSTEM, "rank %d: ncclnet: epoll_ctl", ep->config.rank);
    return SPCCL_OK;
}

static spccl_status plugin_open(const sp_endpoint_config *config, sp_endpoint **out)
{
    spccl_status st;
    int64_t limit_ms;
    struct sp_plugin_endpoint *ep = sp_calloc(1, sizeof *ep);
    if (ep == NULL)
        return SP_FAIL(SPCCL_ERR_NOMEM, "ncclnet: an endpoint of %zu bytes", sizeof *ep);
    ep->config = *config;
    ep->epoll_fd = ep->event_fd = -1;
    ep->peers = sp_calloc((size_t)config->world_size, sizeof *ep->peers);
    if (ep->peers == NULL) {
        st = SP_FAIL(SPCCL_ERR_NOMEM, "ncclnet: tables for %d ranks", config->world_size);
        goto fail;
    }
    SP_TRY_TO(fail, st, sp_env_number(SP_ENV_NET_PLUGIN_MS, &limit_ms));
    ep->call_limit_ns = limit_ms * MS;
    sp_plugin_find(&ep->found);
    if (ep->found.found) {
        SP_TRY_TO(fail, st, tcp->open(config, &ep->tcp));
        SP_TRY_TO(fail, st, open_descriptors(ep));
    } else if (ep->found.named) {
        sp_log(SP_LOG_WARN, config->rank, "ncclnet: %s", ep->found.why);
    }
    *out = (sp_endpoint *)ep;
    return SPCCL_OK;
fail:
    plugin_close((sp_endpoint *)ep);
    return st;
}

const sp_transport sp_transport_ncclnet = {
    .name = "ncclnet",
    .is_rdma = plugin_is_rdma,
    .ns_per_byte = plugin_ns_per_byte,
    .inform = sp_plugin_inform,
    .device = sp_plugin_net_device,
    .open = plugin_open,
    .address = plugin_address,
    .can_reach = plugin_can_reach,
    .describe = plugin_describe,
    .local_ip = plugin_local_ip,
    .add_peer = plugin_add_peer,
    .connect_step = sp_plugin_connect_step,
    .message_max = plugin_message_max,
    .reserve = plugin_reserve,
    .commit = plugin_commit,
    .peek = plugin_peek,
    .release = plugin_release,
    .flushed = plugin_flushed,
    .progress = plugin_progress,
    .wait_fd = plugin_wait_fd,
    .arm = plugin_arm,
    .disarm = plugin_disarm,
    .abort_peers = plugin_abort_peers,
    .memory_bytes = plugin_memory_bytes,
    .close = plugin_close,
};
