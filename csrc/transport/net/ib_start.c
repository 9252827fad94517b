/* ib_start.c - start-up of transport ib: the stages. ib_open.c opens what they need. See ib.h.
 *
 * Two ranks first connect over tcp. Then both go through the same stages, and each sends the other
 *   connect info  its ends of the queue pairs and where its receive rings are;
 *   ready         which queue pairs it could connect to the peer's;
 *   a result      over which queue pairs a probe that it wrote left, and the peer's probe came.
 * After each stage both know which queue pairs work at both ends. If all do, the next stage follows. If some do, both
 * close all and try again with those. If none does, ib has failed for this pair. */
#include "core/base/clock.h"
#include "core/base/log.h"
#include "transport/common/transports.h"
#include "transport/net/ib.h"

#include <stdio.h>
#include <string.h>

#define MS INT64_C(1000000)
#define PROBE_NS (60000 * MS) /* most time for the probes */
#define SLOW_NS (100 * MS)    /* a step that took so long is the last one for now */

static const sp_transport *const tcp = &sp_transport_tcp;

static uint32_t all_qps(const struct sp_ib_peer *p)
{
    return (1u << p->n_qps) - 1;
}

/* ---- notes to a peer ---- */

static spccl_status send_note(struct sp_ib *ep, int peer, const uint8_t *note, size_t bytes)
{
    void *space = NULL;
    SP_TRY(tcp->reserve(ep->tcp, peer, 0, bytes, &space));
    memcpy(space, note, bytes);
    ep->peers[peer].n_notes++;
    return tcp->commit(ep->tcp, peer, 0, 0);
}

/* Say which queue pairs are usable: in the stage INFO as part of a connect info, else as a result. */
static spccl_status say_usable(struct sp_ib *ep, int peer, uint32_t usable)
{
    struct sp_ib_peer *p = &ep->peers[peer];
    uint8_t note[SP_IB_CONNECT_INFO_BYTES];
    sp_ib_result r = {.usable = usable};
    p->my_usable = usable;
    p->note_sent = true;
    if (p->stage != SP_IB_STAGE_INFO) {
        snprintf(r.why, sizeof r.why, "%s", usable != all_qps(p) ? p->reason : "");
        sp_ib_write_result(&r, note);
        return send_note(ep, peer, note, SP_IB_RESULT_BYTES);
    }
    p->mine.n_qps = p->n_qps;
    p->mine.n_queues = (uint32_t)ep->config.n_queues;
    p->mine.segment_bytes = (uint32_t)(ep->config.queue_bytes / SP_SEGMENTS);
    snprintf(p->mine.why, sizeof p->mine.why, "%s", usable != all_qps(p) ? p->reason : "");
    sp_ib_write_connect_info(&p->mine, note);
    return send_note(ep, peer, note, SP_IB_CONNECT_INFO_BYTES);
}

/* ---- what each stage does ---- */

/* Is queue pair q between the same two devices as one of `others`, a bit each? */
static bool shares_rail(const struct sp_ib_peer *p, uint32_t q, uint32_t others)
{
    for (uint32_t k = 0; k < q; k++)
        if ((others >> k & 1) != 0 && p->qps[k].device == p->qps[q].device &&
            p->qps[k].their_device == p->qps[q].their_device)
            return true;
    return false;
}

/* Connect the queue pairs to the peer's. Returns which could be. A driver may take seconds to find that there is no way
 * to the peer's address: that is tried once for each rail, and not after the deadline. */
static uint32_t connect_qps(const struct sp_ib *ep, struct sp_ib_peer *p)
{
    uint32_t usable = 0, failed = 0;
    for (uint32_t q = 0; q < p->n_qps; q++) {
        if (shares_rail(p, q, failed))
            continue;
        if (sp_deadline_passed(ep->config.deadline_ns))
            sp_ib_note_reason(p, "the time for making the group ended before all queue pairs were connected");
        else if (sp_ib_link_connect(p->qps[q].link, &p->mine.ends[q], &p->theirs.ends[q]) == SPCCL_OK)
            usable |= 1u << q;
        else
            sp_ib_note_reason(p, spccl_last_error());
        failed |= ~usable & 1u << q;
    }
    return usable;
}

/* AGAIN: it is not known of all queue pairs what comes of the probes. */
static spccl_status probe_qps(struct sp_ib *ep, int peer, uint32_t *usable)
{
    struct sp_ib_peer *p = &ep->peers[peer];
    bool late = sp_deadline_passed(p->probe_deadline_ns);
    *usable = 0;
    /* All probes leave before the first wait: a probe that is lost must not use up the time of the others. */
    for (uint32_t q = 0; q < p->n_qps; q++)
        if (!p->qps[q].probe_sent)
            (void)sp_ib_send_probe(ep, peer, q);
    for (uint32_t q = 0; q < p->n_qps; q++) {
        struct sp_ib_qp *qp = &p->qps[q];
        char device[SP_IB_NAME_CAP + 24], text[SP_NET_TEXT_CAP];
        if (qp->failed) {
            sp_ib_note_reason(p, p->failure);
        } else if (qp->probe_left && qp->probe_here) {
            *usable |= 1u << q;
        } else if (!late) {
            return SPCCL_AGAIN;
        } else {
            sp_ib_device_text(&ep->devices[qp->device], device, sizeof device);
            snprintf(text, sizeof text, "%s: nothing came from rank %d's device in time", device, peer);
            sp_ib_note_reason(p, text);
        }
    }
    return SPCCL_OK;
}

/* Half of the time that is left is for the probes, so that the results come in time. */
static int64_t probe_deadline(const struct sp_ib *ep)
{
    int64_t now_ns = sp_now_ns(), left_ns = PROBE_NS;
    if (ep->config.deadline_ns != SP_NEVER && (ep->config.deadline_ns - now_ns) / 2 < left_ns)
        left_ns = (ep->config.deadline_ns - now_ns) / 2;
    return now_ns + left_ns;
}

/* Do what the stage asks of this rank, and say what came of it. AGAIN: it takes more time. */
static spccl_status do_stage(struct sp_ib *ep, int peer)
{
    struct sp_ib_peer *p = &ep->peers[peer];
    uint32_t usable = p->mine.usable;
    switch (p->stage) {
    case SP_IB_STAGE_INFO:
        break;
    case SP_IB_STAGE_READY:
        usable = connect_qps(ep, p);
        break;
    case SP_IB_STAGE_PROBE:
        SP_TRY(probe_qps(ep, peer, &usable));
        break;
    case SP_IB_STAGE_DONE:
        return SPCCL_OK;
    }
    return say_usable(ep, peer, usable);
}

/* ---- notes from a peer ---- */

static spccl_status bad_note(const struct sp_ib *ep, int peer, size_t bytes, const char *what)
{
    return SP_FAIL(SPCCL_ERR_FORMAT, "rank %d: ib: rank %d sent %zu bytes that are no %s", ep->config.rank,
                   peer, bytes, what);
}

static void take_connect_info(struct sp_ib *ep, int peer)
{
    struct sp_ib_peer *p = &ep->peers[peer];
    char text[SP_NET_TEXT_CAP];
    p->their_usable = p->theirs.usable;
    if (p->theirs.n_qps == p->n_qps && p->theirs.n_queues == (uint32_t)ep->config.n_queues &&
        p->theirs.segment_bytes == ep->config.queue_bytes / SP_SEGMENTS)
        return;
    snprintf(text, sizeof text, "other queues at rank %d: another version of spccl", peer);
    sp_ib_note_reason(p, text);
    p->their_usable = 0; /* the peer finds the same */
}

/* Take the note of this stage, if it is here. */
static spccl_status take_note(struct sp_ib *ep, int peer)
{
    struct sp_ib_peer *p = &ep->peers[peer];
    const void *note = NULL;
    size_t bytes = 0;
    sp_ib_result r = {.usable = 0};
    spccl_status st = tcp->peek(ep->tcp, peer, 0, &note, &bytes);
    if (st == SPCCL_ERR_PEER)
        return SP_FAIL(st, "rank %d: rank %d closed its endpoint before the group was up", ep->config.rank,
                       peer);
    SP_TRY(st);
    if (p->stage == SP_IB_STAGE_INFO) {
        if (!sp_ib_read_connect_info(note, bytes, &p->theirs))
            return bad_note(ep, peer, bytes, "connect info");
        snprintf(r.why, sizeof r.why, "%s", p->theirs.why);
        take_connect_info(ep, peer);
    } else {
        if (!sp_ib_read_result(note, bytes, &r))
            return bad_note(ep, peer, bytes, "result");
        p->their_usable = r.usable & all_qps(p);
    }
    if (r.why[0] != '\0') {
        char text[SP_NET_TEXT_CAP + 40];
        snprintf(text, sizeof text, "rank %d: %s", peer, r.why);
        sp_ib_note_reason(p, text);
    }
    p->note_here = true;
    return tcp->release(ep->tcp, peer, 0);
}

/* ---- from stage to stage ---- */

/* Try again with the queue pairs of `usable`. Both ranks know the same ones. */
static void start_round(struct sp_ib *ep, int peer, uint32_t usable)
{
    struct sp_ib_peer *p = &ep->peers[peer];
    uint32_t n = 0;
    sp_ib_close_qps(p);
    for (uint32_t q = 0; q < p->n_qps; q++)
        if ((usable >> q & 1) != 0)
            p->qps[n++] =
                (struct sp_ib_qp){.device = p->qps[q].device, .their_device = p->qps[q].their_device};
    p->n_qps = n;
    p->failure[0] = '\0';
    p->gone_status = SPCCL_OK;
    p->round++;
    p->stage = SP_IB_STAGE_INFO;
    sp_ib_open_peer(ep, peer);
}

/* Both notes of the stage are known. */
static void end_stage(struct sp_ib *ep, int peer)
{
    struct sp_ib_peer *p = &ep->peers[peer];
    uint32_t usable = p->my_usable & p->their_usable;
    p->note_sent = p->note_here = false;
    if (usable == 0) {
        p->stage = SP_IB_STAGE_DONE;
        p->none = true;
    } else if (usable != all_qps(p)) {
        p->fewer = true;
        start_round(ep, peer, usable);
    } else {
        p->stage++;
        p->probe_deadline_ns = probe_deadline(ep);
    }
    sp_ib_fail_started(ep, peer);
}

/* Continue with one peer. AGAIN: it is not ready. */
static spccl_status step_peer(struct sp_ib *ep, int peer)
{
    struct sp_ib_peer *p = &ep->peers[peer];
    while (p->stage != SP_IB_STAGE_DONE) {
        spccl_status mine = p->note_sent ? SPCCL_OK : do_stage(ep, peer);
        spccl_status theirs = p->note_here ? SPCCL_OK : SPCCL_AGAIN;
        if (mine != SPCCL_OK && mine != SPCCL_AGAIN)
            return mine;
        if (theirs == SPCCL_AGAIN)
            theirs = take_note(ep, peer);
        if (mine != SPCCL_OK || theirs != SPCCL_OK)
            return theirs != SPCCL_OK ? theirs : mine;
        end_stage(ep, peer);
    }
    return SPCCL_OK;
}

/* ---- the end of start-up ---- */

struct pairs {
    sp_rank_list ranks;
    const char *why; /* of the first */
};

static void add_pair(struct pairs *list, int peer, const char *why)
{
    if (list->ranks.n == 0)
        list->why = why;
    sp_rank_list_add(&list->ranks, peer);
}

/* One warning for all pairs that use tcp in place of ib, and one for those with fewer devices. Errors: UNREACHABLE (tcp
 * is not allowed). */
static spccl_status decide_routes(struct sp_ib *ep)
{
    struct pairs failed = {.why = ""}, fewer = {.why = ""};
    for (int i = 0; i < ep->config.world_size; i++) {
        struct sp_ib_peer *p = &ep->peers[i];
        if (!p->added)
            continue;
        p->route = !p->none ? SP_IB_BY_IB : p->has_next ? SP_IB_FAILED : SP_IB_BY_TCP;
        if (p->route != SP_IB_BY_IB)
            sp_ib_close_qps(p);
        if (p->route == SP_IB_BY_TCP)
            add_pair(&failed, i, p->reason);
        else if (p->route == SP_IB_FAILED)
            continue;
        else if (p->fewer)
            add_pair(&fewer, i, p->reason);
        else if (p->n_ports < (uint32_t)ep->n_devices)
            add_pair(&fewer, i, "it has fewer usable devices");
    }
    if (fewer.ranks.n != 0)
        sp_log(SP_LOG_WARN, ep->config.rank,
               "ib: not all of this rank's %d devices carry messages to rank %s: %s", ep->n_devices,
               fewer.ranks.text, fewer.why);
    if (failed.ranks.n == 0)
        return SPCCL_OK;
    if (!ep->config.tcp_too)
        return SP_FAIL(SPCCL_ERR_UNREACHABLE,
                       "rank %d: no ib connection with rank %s, and tcp is not among the transports: %s",
                       ep->config.rank, failed.ranks.text, failed.why);
    sp_log(SP_LOG_WARN, ep->config.rank, "ib: tcp is used in place of ib with rank %s: %s", failed.ranks.text,
           failed.why);
    return SPCCL_OK;
}

/* Discard wake-ups caused by start-up. */
static void forget_changes(struct sp_ib *ep)
{
    for (int i = 0; i < ep->config.world_size; i++)
        if (ep->peers[i].route == SP_IB_BY_TCP)
            return;
    for (int i = 0; i < 100; i++)
        if (tcp->arm(ep->tcp) == SPCCL_OK) {
            tcp->disarm(ep->tcp);
            break;
        }
    ep->changed = true; /* a peer may be gone already, or have sent */
}

static spccl_status start_pairs(struct sp_ib *ep)
{
    sp_rank_list missing = {0};
    char text[SP_ABORT_TEXT_CAP];
    int peer = -1;
    SP_TRY(tcp->progress(ep->tcp, &peer, text));
    sp_ib_poll(ep);
    for (int i = 0; i < ep->config.world_size; i++) {
        int64_t began_ns = sp_now_ns();
        spccl_status st = ep->peers[i].added ? step_peer(ep, i) : SPCCL_OK;
        if ((st == SPCCL_OK || st == SPCCL_AGAIN) && sp_now_ns() - began_ns > SLOW_NS)
            return SPCCL_AGAIN; /* the driver took its time: serve the tcp links in between */
        if (st == SPCCL_AGAIN)
            sp_rank_list_add(&missing, i);
        else if (st != SPCCL_OK)
            return st;
    }
    if (missing.n != 0 && sp_deadline_passed(ep->config.deadline_ns))
        return SP_FAIL(SPCCL_ERR_TIMEOUT, "rank %d: ib: rank %s did not say in time whether its device works",
                       ep->config.rank, missing.text);
    if (missing.n != 0)
        return SPCCL_AGAIN;
    SP_TRY(decide_routes(ep));
    forget_changes(ep);
    ep->up = true;
    return SPCCL_OK;
}

void sp_ib_has_next(sp_endpoint *opaque, int peer)
{
    sp_ib_self(opaque)->peers[peer].has_next = true;
}

const char *sp_ib_failed(sp_endpoint *opaque, int peer)
{
    const struct sp_ib_peer *p = &sp_ib_self(opaque)->peers[peer];
    return p->route == SP_IB_FAILED ? p->reason : NULL;
}

spccl_status sp_ib_connect_step(sp_endpoint *opaque)
{
    struct sp_ib *ep = sp_ib_self(opaque);
    bool any = false;
    for (int i = 0; i < ep->config.world_size; i++)
        any = any || ep->peers[i].added;
    if (ep->up || !any)
        return SPCCL_OK;
    if (!ep->prepared)
        sp_ib_prepare(ep);
    if (!ep->tcp_up) {
        SP_TRY(tcp->connect_step(ep->tcp));
        ep->tcp_up = true;
    }
    return start_pairs(ep);
}
