/* plugin.c - transport "ncclnet": ranks on hosts whose network has an NCCL net plugin. Each queue has a connection
 * of the plugin in each direction, so that a full queue cannot delay another. See plugin.h. */
#include "transport/net/plugin/plugin.h"

#include "core/base/env.h"
#include "core/base/log.h"
#include "core/base/mem.h"
#include "transport/common/transports.h"

#include <stdio.h>
#include <sys/eventfd.h>
#include <unistd.h>

/* ---- addresses ---- */

static size_t plugin_write_address(const sp_segments *base, uint8_t *out)
{
    bool found = ((const struct sp_plugin_endpoint *)base)->found.found;
    return found ? sp_plugin_write_address(out) : 0;
}

static bool plugin_reach(const sp_segments *base, const uint8_t *address, size_t bytes, char *why,
                         size_t why_cap)
{
    const struct sp_plugin_endpoint *ep = (const struct sp_plugin_endpoint *)base;
    bool its = sp_plugin_is_address(address, bytes);
    if (!ep->found.found)
        snprintf(why, why_cap, "no NCCL net plugin: %s", ep->found.why);
    else if (!its)
        snprintf(why, why_cap, "the peer has no NCCL net plugin");
    else
        snprintf(why, why_cap, "plugin %.80s", ep->found.path);
    return ep->found.found && its;
}

static void plugin_describe(sp_segments *base, int peer, char *out, size_t cap)
{
    struct sp_plugin_endpoint *ep = sp_plugin_of(base);
    char device[80];
    sp_plugin_device_text(ep, ep->peers[peer].tx[0].device, device, sizeof device);
    snprintf(out, cap, "ncclnet: plugin %s v%d, %s, %s", ep->plugin->name, ep->plugin->version, device,
             ep->found.why);
}

static int64_t plugin_mbps(const sp_segments *base, int peer)
{
    const struct sp_plugin_endpoint *ep = (const struct sp_plugin_endpoint *)base;
    return ep->plugin->devices[ep->peers[peer].tx[0].device].speed_mbps;
}

/* A plugin that nobody named and that this host cannot use. */
static bool plugin_is_expected(const sp_segments *base)
{
    const struct sp_plugin_endpoint *ep = (const struct sp_plugin_endpoint *)base;
    return !ep->found.named && (ep->thread_lost || atomic_load(&ep->load) != SP_PLUGIN_LOAD_FINE);
}

/* ---- segments ---- */

static void plugin_send(sp_segments *base, int peer)
{
    (void)peer;
    sp_plugin_thread_kick(sp_plugin_of(base));
}

static void plugin_released(sp_segments *base, int peer, bool few)
{
    if (few)
        plugin_send(base, peer);
}

static uint64_t plugin_n_sent(const sp_segments *base, int peer, int queue)
{
    return atomic_load(&base->peers[peer].tx[queue].allowed);
}

/* Abandon the thread if it hangs. All peers of the plugin are then lost. */
static void check_thread(struct sp_plugin_endpoint *ep)
{
    char text[SP_NET_TEXT_CAP];
    if (ep->thread_lost || !sp_plugin_thread_hangs(ep, text, sizeof text))
        return;
    sp_plugin_thread_abandon(ep, text);
    for (int i = 0; i < ep->base.config.world_size; i++)
        if (ep->base.peers[i].carried)
            sp_segments_lose(&ep->base, i, text);
}

static bool all_failed(const struct sp_plugin_endpoint *ep, const struct sp_plugin_peer *p)
{
    for (int k = 0; k < ep->base.config.n_queues; k++)
        if (!atomic_load(&p->rx[k].failed))
            return false;
    return true;
}

static void plugin_poll(sp_segments *base)
{
    struct sp_plugin_endpoint *ep = sp_plugin_of(base);
    check_thread(ep);
    for (int i = 0; i < base->config.world_size; i++) {
        struct sp_plugin_peer *p = &ep->peers[i];
        if (!p->base->carried)
            continue;
        if (!p->base->failed && atomic_load(&p->state) == SP_PLUGIN_FAILED) {
            snprintf(p->base->failure, sizeof p->base->failure, "%s", p->failure);
            p->base->failed_status = SPCCL_ERR_PEER;
            sp_segments_fail(base, i);
        }
        p->base->rx_ended = p->base->ended_ns != 0 && all_failed(ep, p);
    }
}

/* ---- sleeping ---- */

static bool plugin_arm(sp_segments *base)
{
    struct sp_plugin_endpoint *ep = sp_plugin_of(base);
    unsigned n, before = ep->n_events_seen;
    atomic_store(&ep->armed, true);
    n = ep->n_events_seen = atomic_load(&ep->n_events);
    return n == before;
}

static void plugin_disarm(sp_segments *base, bool slept)
{
    struct sp_plugin_endpoint *ep = sp_plugin_of(base);
    uint64_t count;
    bool is_told = !atomic_exchange(&ep->armed, false);
    /* Read in any case: the thread may have written after an arm that returned AGAIN. */
    if (slept && read(ep->event_fd, &count, sizeof count) < 0 && is_told)
        base->changed = true; /* the thread is about to write: the next sleep ends at once, and reads it */
}

/* ---- opening and closing ---- */

static bool plugin_close(sp_segments *base)
{
    struct sp_plugin_endpoint *ep = sp_plugin_of(base);
    sp_plugin_thread_stop(ep);
    if (base->pid == getpid())
        sp_plugin_give_back_cards(ep);
    if (ep->thread_lost)
        return false;
    if (ep->event_fd >= 0)
        close(ep->event_fd);
    sp_free(ep->peers);
    return true;
}

static const sp_segments_net plugin_net = {
    .name = "ncclnet",
    .what = "the plugin",
    .write_address = plugin_write_address,
    .reach = plugin_reach,
    .prepare = sp_plugin_prepare,
    .start_step = sp_plugin_start_step,
    .is_expected = plugin_is_expected,
    .describe = plugin_describe,
    .mbps = plugin_mbps,
    .send = plugin_send,
    .released = plugin_released,
    .poll = plugin_poll,
    .arm = plugin_arm,
    .disarm = plugin_disarm,
    .n_sent = plugin_n_sent,
    .close = plugin_close,
};

static spccl_status open_peers(struct sp_plugin_endpoint *ep)
{
    int n = ep->base.config.world_size;
    ep->peers = sp_calloc((size_t)n, sizeof *ep->peers);
    if (ep->peers == NULL)
        return SP_FAIL(SPCCL_ERR_NOMEM, "ncclnet: tables for %d ranks", n);
    for (int i = 0; i < n; i++) {
        struct sp_plugin_peer *p = &ep->peers[i];
        p->base = &ep->base.peers[i];
        for (int k = 0; k < SP_QUEUES_MAX; k++) {
            p->tx[k].ring = &p->base->tx[k];
            p->rx[k].ring = &p->base->rx[k];
        }
    }
    return SPCCL_OK;
}

static spccl_status open_control(struct sp_plugin_endpoint *ep)
{
    SP_TRY(sp_segments_open_control(&ep->base));
    ep->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (ep->event_fd < 0)
        return SP_FAIL_ERRNO(SPCCL_ERR_SYSTEM, "rank %d: ncclnet: eventfd", ep->base.config.rank);
    return sp_segments_watch(&ep->base, ep->event_fd);
}

static spccl_status plugin_open(const sp_endpoint_config *config, sp_endpoint **out)
{
    spccl_status st;
    int64_t limit_ms;
    struct sp_plugin_endpoint *ep = sp_calloc(1, sizeof *ep);
    if (ep == NULL)
        return SP_FAIL(SPCCL_ERR_NOMEM, "ncclnet: an endpoint of %zu bytes", sizeof *ep);
    ep->event_fd = -1;
    SP_TRY_TO(fail, st, sp_segments_open(&ep->base, &plugin_net, config));
    SP_TRY_TO(fail, st, open_peers(ep));
    SP_TRY_TO(fail, st, sp_env_number(SP_ENV_NET_PLUGIN_MS, &limit_ms));
    ep->call_limit_ns = limit_ms * 1000000;
    sp_plugin_find(&ep->found);
    if (ep->found.found)
        SP_TRY_TO(fail, st, open_control(ep));
    else if (ep->found.named)
        sp_log(SP_LOG_WARN, config->rank, "ncclnet: %s", ep->found.why);
    *out = (sp_endpoint *)ep;
    return SPCCL_OK;
fail:
    sp_segments_close((sp_endpoint *)ep);
    return st;
}

const sp_transport sp_transport_ncclnet = {
    .name = "ncclnet",
    .inform = sp_plugin_inform,
    .device = sp_plugin_net_device,
    .open = plugin_open,
    SP_SEGMENTS_FUNCTIONS,
};
