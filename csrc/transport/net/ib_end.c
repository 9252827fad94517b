/* ib_end.c - how a peer of transport ib ends: it sends a FIN over tcp, it is lost, or ib fails for it. See ib.h. */
#include "core/base/clock.h"
#include "transport/common/transports.h"
#include "transport/net/ib.h"

#include <stdio.h>

#define MS INT64_C(1000000)
/* After ib failed for a peer, or the peer is gone, this rank waits this long: for the reason, which comes over tcp,
 * and for segments that are still on their way. As in tcp.c. */
#define END_WAIT_NS (600 * MS)

static const sp_transport *const tcp = &sp_transport_tcp;

static void start_ending(struct sp_ib *ep, struct sp_ib_peer *p)
{
    if (p->ended_ns != 0)
        return;
    p->ended_ns = sp_now_ns();
    ep->changed = ep->ending = true;
}

/* A clause: what ib failed for. */
static void write_failure(const struct sp_ib_peer *p, char *out, size_t cap)
{
    snprintf(out, cap, "%s: %s",
             p->gone_status == SPCCL_ERR_FORMAT ? "sent something that is not a message"
                                                : "cannot be reached any more",
             p->failure);
}

void sp_ib_fail_peer(struct sp_ib *ep, int peer, uint32_t qp, spccl_status status, const char *text)
{
    struct sp_ib_peer *p = &ep->peers[peer];
    char device[SP_IB_NAME_CAP + 24];
    if (p->failed)
        return;
    p->qps[qp].failed = true;
    if (p->failure[0] == '\0') {
        sp_ib_device_text(&ep->devices[p->qps[qp].device], device, sizeof device);
        snprintf(p->failure, sizeof p->failure, "%s to rank %d: %.*s", device, peer, SP_NET_TEXT_CAP, text);
        p->gone_status = status;
        if (p->gone && status == SPCCL_ERR_FORMAT) /* the end of the tcp link was seen first */
            write_failure(p, p->gone_text, sizeof p->gone_text);
    }
    sp_ib_fail_started(ep, peer);
}

void sp_ib_fail_started(struct sp_ib *ep, int peer)
{
    struct sp_ib_peer *p = &ep->peers[peer];
    if (p->stage != SP_IB_STAGE_DONE || p->none || p->failure[0] == '\0')
        return;
    p->failed = true;
    start_ending(ep, p);
}

static void set_gone(struct sp_ib *ep, struct sp_ib_peer *p, const char *text)
{
    if (p->gone)
        return;
    snprintf(p->gone_text, sizeof p->gone_text, "%s", text);
    p->gone = ep->changed = true;
    start_ending(ep, p);
    p->ended_ns = sp_now_ns(); /* segments may still be on their way */
}

/* The peer is gone because ib failed for it. */
static void set_gone_failed(struct sp_ib *ep, struct sp_ib_peer *p)
{
    char text[sizeof p->gone_text];
    write_failure(p, text, sizeof text);
    set_gone(ep, p, text);
}

spccl_status sp_ib_lost(const struct sp_ib *ep, int peer)
{
    const struct sp_ib_peer *p = &ep->peers[peer];
    char text[sizeof p->gone_text];
    write_failure(p, text, sizeof text);
    return SP_FAIL(p->gone_status != SPCCL_OK ? p->gone_status : SPCCL_ERR_PEER, "rank %d: rank %d %s",
                   ep->config.rank, peer, p->gone ? p->gone_text : text);
}

void sp_ib_look_at_tcp(struct sp_ib *ep, int peer)
{
    struct sp_ib_peer *p = &ep->peers[peer];
    const void *note = NULL;
    size_t bytes = 0;
    spccl_status st;
    while (!p->gone && (st = tcp->peek(ep->tcp, peer, 0, &note, &bytes)) != SPCCL_AGAIN) {
        if (st == SPCCL_ERR_PEER && p->gone_status == SPCCL_ERR_FORMAT) {
            set_gone_failed(ep, p); /* what it sent says more than that it left */
        } else if (st == SPCCL_ERR_PEER) {
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
static bool all_arrived(struct sp_ib *ep, struct sp_ib_peer *p)
{
    uint64_t n = 0;
    bool complete = p->has_fin;
    for (int i = 0; i < ep->config.n_queues; i++) {
        uint64_t done = atomic_load_explicit(&p->rx[i].ring.done, memory_order_relaxed);
        n += done;
        complete = complete && done >= p->fin.n_segments[i];
    }
    if (n != p->n_arrived)
        p->ended_ns = sp_now_ns();
    p->n_arrived = n;
    return complete || sp_now_ns() - p->ended_ns > END_WAIT_NS;
}

void sp_ib_look_at_end(struct sp_ib *ep, int peer)
{
    struct sp_ib_peer *p = &ep->peers[peer];
    if (p->over || p->ended_ns == 0)
        return;
    if (p->gone) {
        p->over = all_arrived(ep, p);
        ep->changed = ep->changed || p->over;
    } else if (sp_now_ns() - p->ended_ns > END_WAIT_NS) {
        set_gone_failed(ep, p);
    }
}
