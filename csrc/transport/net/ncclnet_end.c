/* ncclnet_end.c - how a peer of transport ncclnet ends: it sends a FIN over tcp, it is lost, or the plugin fails.
 * See ncclnet.h. */
#include "core/base/clock.h"
#include "transport/common/transports.h"
#include "transport/net/ncclnet.h"

#include <stdio.h>

#define MS INT64_C(1000000)
/* After the plugin failed for a peer, or the peer is gone, this rank waits this long: for the reason, which comes
 * over tcp, and for segments that are still on their way. The same as ABORT_WAIT_NS of tcp.c. */
#define END_WAIT_NS (600 * MS)

static const sp_transport *const tcp = &sp_transport_tcp;

void sp_plugin_start_ending(struct sp_plugin_endpoint *ep, struct sp_plugin_peer *p)
{
    if (p->ended_ns != 0)
        return;
    p->ended_ns = sp_now_ns();
    ep->changed = true;
}

static void set_gone(struct sp_plugin_endpoint *ep, struct sp_plugin_peer *p, const char *text)
{
    if (p->gone)
        return;
    snprintf(p->gone_text, sizeof p->gone_text, "%s", text);
    p->gone = ep->changed = true;
    sp_plugin_start_ending(ep, p);
    p->ended_ns = sp_now_ns(); /* segments may still be on their way */
}

/* What the peer says over tcp after start-up: its FIN, then its end. */
void sp_plugin_look_at_tcp(struct sp_plugin_endpoint *ep, int peer)
{
    struct sp_plugin_peer *p = &ep->peers[peer];
    const void *note = NULL;
    size_t bytes = 0;
    spccl_status st;
    while (!p->gone && (st = tcp->peek(ep->tcp, peer, 0, &note, &bytes)) != SPCCL_AGAIN) {
        if (st == SPCCL_ERR_PEER) {
            set_gone(ep, p, "is gone: its process ended or left the group; see its output");
        } else if (st == SPCCL_OK && !p->has_fin &&
                   sp_segments_read_fin(note, bytes, ep->config.n_queues, &p->fin)) {
            p->has_fin = true;
            (void)tcp->release(ep->tcp, peer, 0);
        } else {
            set_gone(ep, p, "sent something that is not a message over its tcp link");
        }
    }
}

/* True if all segments that the peer sent are here, or no more can come. */
static bool all_arrived(struct sp_plugin_endpoint *ep, struct sp_plugin_peer *p)
{
    uint64_t n = 0;
    bool complete = p->has_fin, ended = true;
    for (int i = 0; i < ep->config.n_queues; i++) {
        uint64_t done = atomic_load(&p->rx[i].ring.done);
        n += done;
        complete = complete && done >= p->fin.n_segments[i];
        ended = ended && atomic_load(&p->rx[i].failed);
    }
    if (n != p->n_arrived)
        p->ended_ns = sp_now_ns();
    p->n_arrived = n;
    return complete || ended || sp_now_ns() - p->ended_ns > END_WAIT_NS;
}

void sp_plugin_look_at_end(struct sp_plugin_endpoint *ep, int peer)
{
    struct sp_plugin_peer *p = &ep->peers[peer];
    char text[sizeof p->gone_text];
    if (p->over || p->ended_ns == 0)
        return;
    if (p->gone) {
        p->over = all_arrived(ep, p);
        ep->changed = ep->changed || p->over;
    } else if (sp_now_ns() - p->ended_ns > END_WAIT_NS) {
        snprintf(text, sizeof text, "cannot be reached any more: %s", p->failure);
        set_gone(ep, p, text);
    }
}

void sp_plugin_check_thread(struct sp_plugin_endpoint *ep)
{
    char text[SP_NET_TEXT_CAP];
    if (ep->thread_lost || !sp_plugin_thread_hangs(ep, text, sizeof text))
        return;
    sp_plugin_thread_abandon(ep, text);
    for (int i = 0; i < ep->config.world_size; i++) {
        struct sp_plugin_peer *p = &ep->peers[i];
        if (p->route != SP_PLUGIN_BY_PLUGIN)
            continue;
        /* The thread may still write to `failure`, so the text goes where only this thread writes. */
        snprintf(p->gone_text, sizeof p->gone_text, "cannot be reached any more: %s", text);
        p->gone = p->over = ep->changed = true;
    }
}
