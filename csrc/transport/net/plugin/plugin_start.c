/* plugin_start.c - start-up of transport ncclnet, on the caller's thread. See plugin.h.
 *
 * The control links connect first. Meanwhile each rank loads its plugin, and listens once per peer and queue. Then it
 * sends each peer
 *   a connect info    the plugin's name and the handles of its listeners, or why it has none;
 *   a result   whether all queues between the two are connected. A rank sends it to all peers at once, when no
 *               connection of its own is still under way: so no pair relies on a thread that hangs.
 * The plugin carries the pair if both results say so. Otherwise the owner of the links decides what does. */
#include "core/base/clock.h"
#include "core/base/log.h"
#include "core/base/status.h"
#include "core/contract/link_rate.h"
#include "transport/common/transports.h"
#include "transport/net/plugin/plugin.h"

#include <stdio.h>
#include <string.h>

#define MS INT64_C(1000000)
#define LOAD_MARGIN_NS (500 * MS)

static const sp_transport *const tcp = &sp_transport_tcp;

/* The plugin does not carry this peer. */
static void give_up(struct sp_plugin_peer *p, const char *why)
{
    p->base->none = true;
    sp_segments_note_reason(p->base, why);
}

/* ---- the thread's part ---- */

/* False while the thread still loads the plugin. */
static bool loading_ended(struct sp_plugin_endpoint *ep)
{
    char text[sizeof ep->lost_text];
    if (ep->thread_lost || atomic_load(&ep->load) != SP_PLUGIN_LOAD_RUNS)
        return true;
    if (!sp_deadline_passed(ep->load_deadline_ns + LOAD_MARGIN_NS))
        return false;
    snprintf(text, sizeof text, "NCCL net plugin %.60s: it did not load, or did not listen, in time",
             sp_plugin_file_name(ep->found.path));
    sp_plugin_thread_abandon(ep, text);
    return true;
}

static bool is_loaded(struct sp_plugin_endpoint *ep)
{
    return !ep->thread_lost && atomic_load(&ep->load) == SP_PLUGIN_LOAD_FINE;
}

/* ---- connect info ---- */

/* Of all devices that the plugin's queues share. */
static uint32_t plugin_mbps(const struct sp_plugin_endpoint *ep)
{
    uint64_t mbps = 0;
    for (int i = 0; i < ep->n_used; i++) {
        int64_t its = ep->plugin->devices[ep->used[i]].speed_mbps; /* what the plugin says */
        mbps += its > 0 ? (uint64_t)its : 0;
    }
    return mbps < UINT32_MAX ? (uint32_t)mbps : UINT32_MAX;
}

/* True if the rates say that tcp carries the pair. Both ranks get the same answer: both know the same facts. */
static bool tcp_is_faster(struct sp_plugin_peer *p, char *text, size_t cap)
{
    uint32_t mbps[2] = {sp_rate_of_pair(p->mine.plugin_mbps, p->theirs.plugin_mbps),
                        sp_rate_of_pair(p->mine.tcp_mbps, p->theirs.tcp_mbps)};
    if (sp_rate_choose(mbps, 2, p->mine.rates_decide && p->theirs.rates_decide) == 0)
        return false;
    snprintf(text, cap, "tcp: %.1f Gbit/s; plugin %s has %.1f", mbps[1] / 1e3, p->mine.name, mbps[0] / 1e3);
    return true;
}

static spccl_status send_connect_info(struct sp_plugin_endpoint *ep, int peer)
{
    struct sp_plugin_peer *p = &ep->peers[peer];
    uint8_t note[SP_PLUGIN_CONNECT_INFO_BYTES];
    p->mine.usable = is_loaded(ep);
    p->mine.n_queues = (uint32_t)ep->base.config.n_queues;
    p->mine.segment_bytes = (uint32_t)(ep->base.config.queue_bytes / SP_SEGMENTS);
    p->mine.rates_decide = ep->base.config.rates_decide;
    p->mine.tcp_mbps = tcp->rate_mbps(ep->base.tcp);
    p->mine.plugin_mbps = p->mine.usable ? plugin_mbps(ep) : 0;
    if (p->mine.usable)
        snprintf(p->mine.name, sizeof p->mine.name, "%s", ep->plugin->name);
    else
        snprintf(p->mine.why, sizeof p->mine.why, "%.*s", (int)sizeof p->mine.why - 1,
                 ep->thread_lost ? ep->lost_text : ep->load_text);
    sp_plugin_write_connect_info(&p->mine, note);
    SP_TRY(sp_segments_say(&ep->base, peer, note, sizeof note));
    p->connect_info_sent = true;
    return SPCCL_OK;
}

/* Both sides' connect info is known: connect, or not. */
static spccl_status judge_connect_info(struct sp_plugin_endpoint *ep, int peer)
{
    struct sp_plugin_peer *p = &ep->peers[peer];
    char text[SP_NET_TEXT_CAP + 40] = "";
    if (!p->mine.usable)
        snprintf(text, sizeof text, "%s", p->mine.why);
    else if (!p->theirs.usable)
        snprintf(text, sizeof text, "rank %d: %s", peer, p->theirs.why);
    else if (strcmp(p->mine.name, p->theirs.name) != 0)
        snprintf(text, sizeof text, "other plugins: %s here, %s at rank %d", p->mine.name, p->theirs.name,
                 peer);
    else if (p->mine.n_queues != p->theirs.n_queues || p->mine.segment_bytes != p->theirs.segment_bytes)
        snprintf(text, sizeof text, "other queues at rank %d: another version of spccl", peer);
    else
        p->base->tcp_faster = tcp_is_faster(p, text, sizeof text);
    if (text[0] != '\0') {
        give_up(p, text);
        return SPCCL_OK;
    }
    SP_TRY(sp_segments_open_rings(&ep->base, peer));
    atomic_store(&p->state, SP_PLUGIN_CONNECTING);
    sp_plugin_thread_kick(ep);
    return SPCCL_OK;
}

/* ---- results ---- */

static bool both_usable(const struct sp_plugin_peer *p)
{
    return atomic_load(&p->state) != SP_PLUGIN_IDLE;
}

static spccl_status send_result(struct sp_plugin_endpoint *ep, int peer)
{
    struct sp_plugin_peer *p = &ep->peers[peer];
    sp_segments_result v = {.value = p->base->reason[0] == '\0'};
    uint8_t note[SP_SEGMENTS_RESULT_BYTES];
    snprintf(v.why, sizeof v.why, "%s", p->base->reason);
    sp_segments_write_result(&v, SP_PLUGIN_RESULT_MAGIC, note);
    SP_TRY(sp_segments_say(&ep->base, peer, note, sizeof note));
    p->result_sent = true;
    return SPCCL_OK;
}

/* Decide what this rank says about each peer, once nothing is under way or the time is over. */
static void decide_results(struct sp_plugin_endpoint *ep)
{
    char hang[SP_NET_TEXT_CAP];
    bool late = sp_deadline_passed(ep->connect_deadline_ns);
    bool hangs = !ep->thread_lost && sp_plugin_thread_hangs(ep, hang, sizeof hang);
    for (int i = 0; i < ep->base.config.world_size; i++)
        if (atomic_load(&ep->peers[i].state) == SP_PLUGIN_CONNECTING && !late && !hangs)
            return;
    if (hangs)
        sp_plugin_thread_abandon(ep, hang);
    for (int i = 0; i < ep->base.config.world_size; i++) {
        struct sp_plugin_peer *p = &ep->peers[i];
        int state = atomic_load(&p->state);
        char text[SP_NET_TEXT_CAP];
        if (!p->base->added || state == SP_PLUGIN_IDLE)
            continue;
        if (hangs) {
            give_up(p, hang);
        } else if (state == SP_PLUGIN_FAILED) {
            give_up(p, p->failure);
        } else if (state == SP_PLUGIN_CONNECTING) {
            char device[80];
            sp_plugin_device_text(ep, p->tx[0].device, device, sizeof device);
            snprintf(text, sizeof text, "%s: plugin %s: no connection with rank %d in time", device,
                     ep->plugin->name, i);
            give_up(p, text);
            atomic_store(&p->cancelled, true);
        }
    }
    ep->results_due = true;
}

/* ---- notes from peers ---- */

/* Take the next note of a peer, if it is here. */
static spccl_status take_note(struct sp_plugin_endpoint *ep, int peer)
{
    struct sp_plugin_peer *p = &ep->peers[peer];
    const void *note = NULL;
    size_t bytes = 0;
    SP_TRY(sp_segments_hear(&ep->base, peer, &note, &bytes));
    if (!p->connect_info_here) {
        if (!sp_plugin_read_connect_info(note, bytes, &p->theirs))
            return sp_segments_bad_note(&ep->base, peer, bytes, "connect info");
        p->connect_info_here = true;
        SP_TRY(sp_segments_heard(&ep->base, peer));
        return judge_connect_info(ep, peer);
    }
    sp_segments_result v;
    if (!sp_segments_read_result(note, bytes, SP_PLUGIN_RESULT_MAGIC, 1, &v))
        return sp_segments_bad_note(&ep->base, peer, bytes, "result");
    p->result_here = true;
    if (v.value == 0) {
        char text[SP_NET_TEXT_CAP + 40];
        snprintf(text, sizeof text, "rank %d: %s", peer, v.why);
        give_up(p, text);
        atomic_store(&p->cancelled, true);
    }
    return sp_segments_heard(&ep->base, peer);
}

/* ---- the end of start-up ---- */

/* Continue with one peer. AGAIN: it is not ready. */
static spccl_status step_peer(struct sp_plugin_endpoint *ep, int peer)
{
    struct sp_plugin_peer *p = &ep->peers[peer];
    spccl_status st = SPCCL_OK;
    if (!p->connect_info_sent)
        SP_TRY(send_connect_info(ep, peer));
    if (!p->connect_info_here || (both_usable(p) && !p->result_here))
        st = take_note(ep, peer);
    if (st != SPCCL_OK)
        return st;
    if (!p->connect_info_here)
        return SPCCL_AGAIN;
    if (!both_usable(p))
        return SPCCL_OK;
    return p->result_sent && p->result_here ? SPCCL_OK : SPCCL_AGAIN;
}

/* Step every peer. AGAIN: some are not ready; `missing` has them. */
static spccl_status step_peers(struct sp_plugin_endpoint *ep, sp_rank_list *missing, bool *all_connect_info)
{
    *all_connect_info = true;
    for (int i = 0; i < ep->base.config.world_size; i++) {
        struct sp_plugin_peer *p = &ep->peers[i];
        spccl_status st;
        if (!p->base->added)
            continue;
        st = step_peer(ep, i);
        *all_connect_info = *all_connect_info && p->connect_info_here;
        if (st == SPCCL_AGAIN)
            sp_rank_list_add(missing, i);
        else if (st != SPCCL_OK)
            return st;
    }
    return missing->n != 0 ? SPCCL_AGAIN : SPCCL_OK;
}

static spccl_status send_results(struct sp_plugin_endpoint *ep)
{
    for (int i = 0; i < ep->base.config.world_size; i++)
        if (ep->base.peers[i].added && both_usable(&ep->peers[i]) && !ep->peers[i].result_sent)
            SP_TRY(send_result(ep, i));
    return SPCCL_OK;
}

spccl_status sp_plugin_prepare(sp_segments *base)
{
    struct sp_plugin_endpoint *ep = sp_plugin_of(base);
    ep->load_deadline_ns = sp_segments_stage_deadline(&ep->base);
    return sp_plugin_thread_start(ep);
}

spccl_status sp_plugin_start_step(sp_segments *base)
{
    struct sp_plugin_endpoint *ep = sp_plugin_of(base);
    sp_rank_list missing = {0};
    bool all_connect_info;
    spccl_status st;
    if (!loading_ended(ep))
        return SPCCL_AGAIN;
    st = step_peers(ep, &missing, &all_connect_info);
    if (st != SPCCL_OK && st != SPCCL_AGAIN)
        return st;
    if (all_connect_info && ep->connect_deadline_ns == 0)
        ep->connect_deadline_ns = sp_segments_stage_deadline(&ep->base);
    if (all_connect_info && !ep->results_due)
        decide_results(ep);
    if (ep->results_due)
        SP_TRY(send_results(ep));
    if (st == SPCCL_AGAIN && sp_deadline_passed(base->config.deadline_ns))
        return SP_FAIL(SPCCL_ERR_TIMEOUT,
                       "rank %d: ncclnet: rank %s did not say in time whether its plugin works",
                       base->config.rank, missing.text);
    return st == SPCCL_AGAIN || !(all_connect_info && ep->results_due) ? SPCCL_AGAIN : SPCCL_OK;
}
