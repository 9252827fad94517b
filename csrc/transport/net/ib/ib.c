/* ib.c - transport "ib": ranks on hosts with InfiniBand or RoCE. See ib.h. */
#include "transport/net/ib/ib.h"

#include "core/base/env.h"
#include "core/base/log.h"
#include "core/base/mem.h"
#include "transport/common/transports.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

static int64_t ib_mbps(const sp_segments *base, int peer)
{
    const struct sp_ib *ep = (const struct sp_ib *)base;
    const struct sp_ib_peer *p = &ep->peers[peer];
    int mbps = 0;
    for (uint32_t i = 0; i < p->n_qps; i++)
        if (i == 0 || p->qps[i].device != p->qps[i - 1].device) /* those of a device follow each other */
            mbps += ep->devices[p->qps[i].device].speed_mbps;
    return mbps;
}

static void ib_released(sp_segments *base, int peer, bool few)
{
    (void)few;
    sp_ib_send(base, peer); /* a credit may be due */
}

static uint64_t ib_n_sent(const sp_segments *base, int peer, int queue)
{
    return ((const struct sp_ib *)base)->peers[peer].tx[queue].n_posted;
}

/* ---- sleeping ---- */

static bool ib_arm(sp_segments *base)
{
    struct sp_ib *ep = sp_ib_of(base);
    bool can_sleep = true;
    for (int d = 0; d < ep->n_devices; d++)
        if (ep->contexts[d] != NULL && sp_ib_context_notify(ep->contexts[d]) != SPCCL_OK)
            can_sleep = false; /* the caller polls */
    sp_ib_poll(base);          /* completions before the request make no event */
    for (int i = 0; i < base->config.world_size; i++)
        if (base->peers[i].carried)
            sp_ib_send(base, i); /* one may have been a credit that segments wait for */
    return can_sleep;
}

static void ib_disarm(sp_segments *base, bool slept)
{
    struct sp_ib *ep = sp_ib_of(base);
    for (int d = 0; slept && d < ep->n_devices; d++)
        if (ep->contexts[d] != NULL) {
            sp_ib_context_forget(ep->contexts[d]);
            sp_ib_context_log_events(ep->contexts[d], base->config.rank);
        }
}

/* ---- opening and closing ---- */

static void close_in_child(void *owner)
{
    struct sp_ib *ep = owner;
    for (int d = 0; d < ep->n_devices; d++)
        if (ep->contexts[d] != NULL)
            sp_ib_context_close_descriptors(ep->contexts[d]);
}

static bool ib_close(sp_segments *base)
{
    struct sp_ib *ep = sp_ib_of(base);
    bool here = base->pid == getpid();
    sp_fork_unwatch(&ep->guard);
    for (int i = 0; here && ep->peers != NULL && i < base->config.world_size; i++)
        sp_ib_close_qps(&ep->peers[i]);
    for (int d = 0; here && d < ep->n_devices; d++)
        sp_ib_context_close(ep->contexts[d]);
    for (int d = 0; here && d < ep->n_devices; d++)
        if (ep->taken[d])
            sp_nic_give_back("ib", &ep->nics[d]);
    sp_free(ep->peers);
    return true;
}

static const sp_segments_net ib_net = {
    .name = "ib",
    .what = "ib",
    .write_address = sp_ib_write_own,
    .reach = sp_ib_reach,
    .add_peer = sp_ib_add_peer,
    .credits = true,
    .prepare = sp_ib_prepare,
    .start_step = sp_ib_start_step,
    .describe = sp_ib_describe,
    .mbps = ib_mbps,
    .send = sp_ib_send,
    .released = ib_released,
    .poll = sp_ib_poll,
    .arm = ib_arm,
    .disarm = ib_disarm,
    .n_sent = ib_n_sent,
    .close = ib_close,
};

static spccl_status open_peers(struct sp_ib *ep)
{
    int n = ep->base.config.world_size;
    ep->peers = sp_calloc((size_t)n, sizeof *ep->peers);
    if (ep->peers == NULL)
        return SP_FAIL(SPCCL_ERR_NOMEM, "ib: tables for %d ranks", n);
    for (int i = 0; i < n; i++) {
        struct sp_ib_peer *p = &ep->peers[i];
        p->base = &ep->base.peers[i];
        for (int k = 0; k < SP_QUEUES_MAX; k++) {
            p->tx[k].ring = &p->base->tx[k];
            p->rx[k].ring = &p->base->rx[k];
        }
    }
    return SPCCL_OK;
}

static void take_choice(struct sp_ib *ep, const sp_ib_choice *choice, uint32_t n_qps)
{
    ep->n_devices = choice->n;
    memcpy(ep->devices, choice->devices, sizeof ep->devices);
    memcpy(ep->device_why, choice->why, sizeof ep->device_why);
    ep->address = (sp_ib_address){.n = (uint32_t)choice->n, .n_qps = n_qps};
    for (int i = 0; i < ep->n_devices; i++) {
        ep->address.ports[i].network = sp_ib_network(&ep->devices[i]);
        ep->address.ports[i].near = ep->devices[i].near;
        memcpy(ep->address.ports[i].gid, ep->devices[i].gid, SP_IB_GID_BYTES);
    }
}

static spccl_status ib_open(const sp_endpoint_config *config, sp_endpoint **out)
{
    spccl_status st = SPCCL_OK;
    sp_ib_choice choice;
    int64_t n_qps;
    struct sp_ib *ep = sp_calloc(1, sizeof *ep);
    if (ep == NULL)
        return SP_FAIL(SPCCL_ERR_NOMEM, "ib: an endpoint of %zu bytes", sizeof *ep);
    SP_TRY_TO(fail, st, sp_segments_open(&ep->base, &ib_net, config));
    SP_TRY_TO(fail, st, open_peers(ep));
    SP_TRY_TO(fail, st, sp_env_number(SP_ENV_IB_QPS, &n_qps));
    sp_ib_choose(config->rank, config->gpu != NULL ? config->gpu : "", &choice);
    take_choice(ep, &choice, (uint32_t)n_qps);
    if (ep->n_devices > 0 && choice.refused[0] != '\0')
        sp_log(SP_LOG_WARN, config->rank, "ib: SPCCL_IB_DEVICE: not used: %s", choice.refused);
    if (ep->n_devices > 0) {
        SP_TRY_TO(fail, st, sp_segments_open_control(&ep->base));
        SP_TRY_TO(fail, st, sp_fork_watch(&ep->guard, close_in_child, ep));
    } else if (sp_env_text(SP_ENV_IB_DEVICE)[0] != '\0') {
        sp_log(SP_LOG_WARN, config->rank, "ib: %s", ep->device_why);
    }
    *out = (sp_endpoint *)ep;
    return SPCCL_OK;
fail:
    sp_segments_close((sp_endpoint *)ep);
    return st;
}

const sp_transport sp_transport_ib = {
    .name = "ib",
    .rate_mbps = sp_ib_rate_mbps,
    .pair_mbps = sp_ib_pair_mbps,
    .inform = sp_ib_inform,
    .device = sp_ib_net_device,
    .open = ib_open,
    .puts = &sp_ib_puts,
    SP_SEGMENTS_FUNCTIONS,
};
