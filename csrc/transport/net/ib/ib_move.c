/* ib_move.c - writes to the peers' rings, and what comes of them. See ib.h. */
#include "transport/common/transports.h"
#include "transport/net/ib/ib.h"

#include <stdio.h>
#include <string.h>

/* The id of a write or receive: receive 1 bit, queue pair 4 bits, round of start-up 5 bits, peer 22 bits,
 * number of the write 32 bits. */
#define RECEIVE_ID (UINT64_C(1) << 63)
/* Every so many writes one asks for a completion, and the last of those that are written at once. */
#define SIGNAL_EVERY 8
#define N_COMPLETIONS 32

int sp_ib_n_writes(const struct sp_ib *ep)
{
    return ep->base.config.n_queues * (int)SP_IB_PER_QUEUE + SP_IB_SPARE + (int)ep->base.config.n_puts;
}

int sp_ib_n_receives(const struct sp_ib *ep)
{
    return ep->base.config.n_queues * (int)SP_IB_PER_QUEUE + 1;
}

/* ---- failing ---- */

void sp_ib_fail_peer(struct sp_ib *ep, int peer, uint32_t qp, spccl_status status, const char *text)
{
    struct sp_ib_peer *p = &ep->peers[peer];
    char device[SP_IB_NAME_CAP + 24];
    if (p->base->failed)
        return;
    p->qps[qp].failed = true;
    if (p->base->failure[0] == '\0') {
        sp_ib_device_text(&ep->devices[p->qps[qp].device], device, sizeof device);
        snprintf(p->base->failure, sizeof p->base->failure, "%s to rank %d: %.*s", device, peer,
                 SP_NET_TEXT_CAP, text);
        p->base->failed_status = status;
        if (p->base->gone && status == SPCCL_ERR_FORMAT) /* the end of the control link was seen first */
            sp_segments_renew_text(p->base);
    }
    sp_ib_fail_started(ep, peer);
}

void sp_ib_fail_started(struct sp_ib *ep, int peer)
{
    struct sp_ib_peer *p = &ep->peers[peer];
    if (p->stage != SP_IB_STAGE_DONE || p->base->none || p->base->failure[0] == '\0')
        return;
    sp_segments_fail(&ep->base, peer);
}

/* ---- writing ---- */

spccl_status sp_ib_post(struct sp_ib *ep, int peer, uint32_t qp, sp_ib_write *w, uint8_t owner)
{
    struct sp_ib_qp *p = &ep->peers[peer].qps[qp];
    spccl_status st;
    if (p->n_writes - p->n_completed >= (uint32_t)sp_ib_n_writes(ep))
        return SPCCL_AGAIN;
    w->signal = w->signal || p->n_unsignalled + 1 == SIGNAL_EVERY;
    w->id = sp_ib_id(&ep->peers[peer], peer, qp) | (uint32_t)(p->n_writes + 1);
    st = sp_ib_link_write(p->link, w);
    if (st != SPCCL_OK) {
        char text[SP_NET_TEXT_CAP];
        snprintf(text, sizeof text, "%.*s", (int)sizeof text - 1, spccl_last_error());
        sp_ib_fail_peer(ep, peer, qp, SPCCL_ERR_PEER, text);
        return st;
    }
    p->n_writes++;
    p->owners[p->n_writes % SP_IB_WRITES_CAP] = owner;
    p->n_unsignalled = w->signal ? 0 : p->n_unsignalled + 1;
    return SPCCL_OK;
}

static spccl_status send_segments(struct sp_ib *ep, int peer, uint32_t queue)
{
    struct sp_ib_peer *p = &ep->peers[peer];
    struct sp_ib_tx *q = &p->tx[queue];
    uint64_t limit = atomic_load_explicit(&q->ring->allowed, memory_order_relaxed);
    limit = limit < q->credit ? limit : q->credit;
    while (q->n_posted < limit) {
        uint64_t k = q->n_posted;
        uint32_t qp = sp_ib_qp_of(p->n_qps, k);
        const uint8_t *from = sp_segment_ring_segment(q->ring, k);
        sp_ib_write w = {.from = from,
                         .bytes = q->ring->bytes[k % SP_SEGMENTS],
                         .lkey = q->memory[qp].lkey,
                         .rkey = p->theirs.rings[queue].rkey[qp],
                         .imm = sp_ib_imm(SP_IB_DATA, queue, k),
                         .to = p->theirs.rings[queue].address + (uint64_t)(from - q->ring->memory.data),
                         .signal = k + 1 == limit || sp_ib_qp_of(p->n_qps, k + 1) != qp};
        SP_TRY(sp_ib_post(ep, peer, qp, &w, (uint8_t)queue));
        q->n_posted++;
    }
    return SPCCL_OK;
}

/* Credits take queue pair 0. There are never more than SP_IB_PER_QUEUE - SP_SEGMENTS credits of a queue that the peer has
 * not taken: it must use one before this rank can release the segments for the next. */
static spccl_status send_credit(struct sp_ib *ep, int peer, uint32_t queue)
{
    struct sp_ib_rx *q = &ep->peers[peer].rx[queue];
    uint64_t allowed = atomic_load_explicit(&q->ring->allowed, memory_order_relaxed);
    sp_ib_write w = {.imm = sp_ib_imm(SP_IB_CREDIT, queue, allowed)};
    if (allowed - q->announced < SP_IB_CREDIT_STEP)
        return SPCCL_OK;
    SP_TRY(sp_ib_post(ep, peer, 0, &w, SP_IB_OWNER_CREDIT));
    q->announced = allowed;
    return SPCCL_OK;
}

void sp_ib_send(sp_segments *base, int peer)
{
    struct sp_ib *ep = sp_ib_of(base);
    struct sp_ib_peer *p = &ep->peers[peer];
    for (int i = 0; i < ep->base.config.n_queues && !p->base->failed && !p->base->gone; i++)
        if (send_segments(ep, peer, (uint32_t)i) != SPCCL_OK ||
            send_credit(ep, peer, (uint32_t)i) != SPCCL_OK)
            return;
}

bool sp_ib_send_probe(struct sp_ib *ep, int peer, uint32_t qp)
{
    struct sp_ib_peer *p = &ep->peers[peer];
    uint64_t at = sp_ib_qp_first(p->n_qps, qp) * p->theirs.segment_bytes;
    /* The peer's first segment is as long as the largest packet, so a network whose MTU is smaller shows here. */
    uint32_t bytes = p->theirs.segment_bytes < 4096 ? p->theirs.segment_bytes : 4096;
    sp_ib_write w = {.from = p->tx[0].ring->memory.data + at,
                     .bytes = bytes,
                     .lkey = p->tx[0].memory[qp].lkey,
                     .rkey = p->theirs.rings[0].rkey[qp],
                     .imm = sp_ib_imm(SP_IB_PROBE, 0, SP_IB_PROBE_NUMBER),
                     .to = p->theirs.rings[0].address + at,
                     .signal = true};
    p->qps[qp].probe_sent = true;
    return sp_ib_post(ep, peer, qp, &w, SP_IB_OWNER_PROBE) == SPCCL_OK;
}

/* ---- completions ---- */

/* The next segment of a queue pair is done. The ring counts it when all before it are done too. */
static void advance(struct sp_ib_order *o, uint32_t n_qps, uint32_t qp, sp_segment_ring *ring)
{
    uint64_t done = atomic_load_explicit(&ring->done, memory_order_relaxed);
    o->here |= 1u << o->next[qp] % SP_SEGMENTS;
    o->next[qp] = sp_ib_qp_next(n_qps, o->next[qp]);
    for (; (o->here >> done % SP_SEGMENTS & 1) != 0; done++)
        o->here &= ~(1u << done % SP_SEGMENTS);
    atomic_store_explicit(&ring->done, done, memory_order_release);
}

/* All writes of a queue pair up to number n are done. */
static void complete_writes(struct sp_ib *ep, struct sp_ib_peer *p, uint32_t qp, uint32_t n)
{
    struct sp_ib_qp *r = &p->qps[qp];
    while (r->n_completed != n) {
        uint8_t owner = r->owners[++r->n_completed % SP_IB_WRITES_CAP];
        if (owner == SP_IB_OWNER_PROBE)
            r->probe_left = true;
        else if (owner == SP_IB_OWNER_PUT)
            r->n_puts--;
        else if (owner != SP_IB_OWNER_CREDIT)
            advance(&p->tx[owner].order, p->n_qps, qp, p->tx[owner].ring);
    }
    ep->base.changed = true;
}

static sp_ib_expected expected(const struct sp_ib *ep, const struct sp_ib_peer *p, uint32_t qp)
{
    sp_ib_expected want = {.n_queues = (uint32_t)ep->base.config.n_queues,
                           .segment_bytes = (uint32_t)(ep->base.config.queue_bytes / SP_SEGMENTS),
                           .probe = !p->qps[qp].probe_here};
    for (int i = 0; i < ep->base.config.n_queues; i++) {
        want.queues[i].next = p->rx[i].order.next[qp];
        want.queues[i].announced = p->rx[i].announced;
        want.queues[i].credit = p->tx[i].credit;
        want.queues[i].n_posted = p->tx[i].n_posted;
    }
    return want;
}

/* A write of the peer has arrived. */
static void take_write(struct sp_ib *ep, int peer, uint32_t qp, const sp_ib_completion *c)
{
    struct sp_ib_peer *p = &ep->peers[peer];
    sp_ib_expected want = expected(ep, p, qp);
    sp_ib_arrival a = {.kind = SP_IB_PROBE};
    char text[SP_NET_TEXT_CAP];
    spccl_status st = c->immediate ? sp_ib_read_imm(&want, c->imm, c->bytes, &a)
                                   : SP_FAIL(SPCCL_ERR_FORMAT, "something other than a write with immediate");
    if (st == SPCCL_OK)
        st = sp_ib_link_receive(p->qps[qp].link, RECEIVE_ID | sp_ib_id(&ep->peers[peer], peer, qp), 1);
    if (st != SPCCL_OK) {
        snprintf(text, sizeof text, "%.*s", (int)sizeof text - 1, spccl_last_error());
        sp_ib_fail_peer(ep, peer, qp, st == SPCCL_ERR_FORMAT ? st : SPCCL_ERR_PEER, text);
        return;
    }
    switch (a.kind) {
    case SP_IB_DATA:
        p->rx[a.queue].ring->bytes[want.queues[a.queue].next % SP_SEGMENTS] = c->bytes;
        advance(&p->rx[a.queue].order, p->n_qps, qp, p->rx[a.queue].ring);
        ep->base.changed = true;
        break;
    case SP_IB_CREDIT:
        p->tx[a.queue].credit = a.credit;
        break;
    case SP_IB_PROBE:
        p->qps[qp].probe_here = true;
        break;
    }
}

static void handle_completion(struct sp_ib *ep, const sp_ib_completion *c)
{
    int peer = (int)(c->id >> 32 & SP_IB_PEER_MASK);
    uint32_t qp = (uint32_t)(c->id >> 59 & 0xf);
    struct sp_ib_peer *p;
    if (peer == (int)SP_IB_FLUSH_PEER) {
        sp_ib_flush_ended(ep, qp, c->error);
        return;
    }
    p = &ep->peers[peer];
    /* Completions of a queue pair that was closed may still come. */
    if (p->base->failed || p->qps[qp].failed || p->qps[qp].link == NULL ||
        (c->id >> 54 & SP_IB_ROUND_MASK) != (p->round & SP_IB_ROUND_MASK))
        return;
    if (c->error != NULL) {
        char text[SP_NET_TEXT_CAP];
        snprintf(text, sizeof text, "a %s failed: %s", c->id & RECEIVE_ID ? "receive" : "write", c->error);
        sp_ib_fail_peer(ep, peer, qp, SPCCL_ERR_PEER, text);
    } else if ((c->id & RECEIVE_ID) != 0) {
        take_write(ep, peer, qp, c);
    } else {
        complete_writes(ep, p, qp, (uint32_t)c->id);
    }
}

void sp_ib_fail_device(struct sp_ib *ep, int device, const char *text)
{
    for (int i = 0; i < ep->base.config.world_size; i++)
        for (uint32_t r = 0; r < ep->peers[i].n_qps; r++)
            if (ep->peers[i].qps[r].link != NULL && ep->peers[i].qps[r].device == device)
                sp_ib_fail_peer(ep, i, r, SPCCL_ERR_PEER, text);
}

void sp_ib_poll(sp_segments *base)
{
    struct sp_ib *ep = sp_ib_of(base);
    sp_ib_completion list[N_COMPLETIONS];
    for (int d = 0; d < ep->n_devices; d++) {
        int n = ep->contexts[d] != NULL ? N_COMPLETIONS : 0;
        while (n == N_COMPLETIONS) {
            n = sp_ib_context_poll(ep->contexts[d], list, N_COMPLETIONS);
            for (int i = 0; i < n; i++)
                handle_completion(ep, &list[i]);
        }
        if (n < 0)
            sp_ib_fail_device(ep, d, "the completion queue failed");
    }
}
