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
#include "transport/net/ib/ib.h"

#include <stdio.h>
#include <string.h>

#define MS INT64_C(1000000)
#define SLOW_NS (100 * MS) /* a step that took so long is the last one for now */

static uint32_t all_qps(const struct sp_ib_peer *p)
{
    return (1u << p->n_qps) - 1;
}

/* Say which queue pairs are usable: in the stage INFO as part of a connect info, else as a result. */
static spccl_status say_usable(struct sp_ib *ep, int peer, uint32_t usable)
{
    struct sp_ib_peer *p = &ep->peers[peer];
    uint8_t note[SP_IB_CONNECT_INFO_BYTES];
    sp_segments_result r = {.value = usable};
    p->my_usable = usable;
    p->note_sent = true;
    if (p->stage != SP_IB_STAGE_INFO) {
        snprintf(r.why, sizeof r.why, "%s", usable != all_qps(p) ? p->base->reason : "");
        sp_segments_write_result(&r, SP_IB_RESULT_MAGIC, note);
        return sp_segments_say(&ep->base, peer, note, SP_SEGMENTS_RESULT_BYTES);
    }
    p->mine.n_qps = p->n_qps;
    p->mine.n_queues = (uint32_t)ep->base.config.n_queues;
    p->mine.segment_bytes = (uint32_t)(ep->base.config.queue_bytes / SP_SEGMENTS);
    snprintf(p->mine.why, sizeof p->mine.why, "%s", usable != all_qps(p) ? p->base->reason : "");
    sp_ib_write_connect_info(&p->mine, note);
    return sp_segments_say(&ep->base, peer, note, SP_IB_CONNECT_INFO_BYTES);
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
        if (sp_deadline_passed(ep->base.config.deadline_ns))
            sp_segments_note_reason(
                p->base, "the time for making the group ended before all queue pairs were connected");
        else if (sp_ib_link_connect(p->qps[q].link, &p->mine.ends[q], &p->theirs.ends[q]) == SPCCL_OK)
            usable |= 1u << q;
        else
            sp_segments_note_reason(p->base, spccl_last_error());
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
            sp_segments_note_reason(p->base, p->base->failure);
        } else if (qp->probe_left && qp->probe_here) {
            *usable |= 1u << q;
        } else if (!late) {
            return SPCCL_AGAIN;
        } else {
            sp_ib_device_text(&ep->devices[qp->device], device, sizeof device);
            snprintf(text, sizeof text, "%s: nothing came from rank %d's device in time", device, peer);
            sp_segments_note_reason(p->base, text);
        }
    }
    return SPCCL_OK;
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

static void take_connect_info(struct sp_ib *ep, int peer)
{
    struct sp_ib_peer *p = &ep->peers[peer];
    char text[SP_NET_TEXT_CAP];
    p->their_usable = p->theirs.usable;
    if (p->theirs.n_qps == p->n_qps && p->theirs.n_queues == (uint32_t)ep->base.config.n_queues &&
        p->theirs.segment_bytes == ep->base.config.queue_bytes / SP_SEGMENTS)
        return;
    snprintf(text, sizeof text, "other queues at rank %d: another version of spccl", peer);
    sp_segments_note_reason(p->base, text);
    p->their_usable = 0; /* the peer finds the same */
}

/* Take the note of this stage, if it is here. */
static spccl_status take_note(struct sp_ib *ep, int peer)
{
    struct sp_ib_peer *p = &ep->peers[peer];
    const void *note = NULL;
    size_t bytes = 0;
    sp_segments_result r = {.value = 0};
    SP_TRY(sp_segments_hear(&ep->base, peer, &note, &bytes));
    if (p->stage == SP_IB_STAGE_INFO) {
        if (!sp_ib_read_connect_info(note, bytes, &p->theirs))
            return sp_segments_bad_note(&ep->base, peer, bytes, "connect info");
        snprintf(r.why, sizeof r.why, "%s", p->theirs.why);
        take_connect_info(ep, peer);
    } else {
        if (!sp_segments_read_result(note, bytes, SP_IB_RESULT_MAGIC, (1u << SP_IB_QPS_MAX) - 1, &r))
            return sp_segments_bad_note(&ep->base, peer, bytes, "result");
        p->their_usable = r.value & all_qps(p);
    }
    if (r.why[0] != '\0') {
        char text[SP_NET_TEXT_CAP + 40];
        snprintf(text, sizeof text, "rank %d: %s", peer, r.why);
        sp_segments_note_reason(p->base, text);
    }
    p->note_here = true;
    return sp_segments_heard(&ep->base, peer);
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
    p->base->failure[0] = '\0';
    p->base->failed_status = SPCCL_OK;
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
        p->base->none = true;
    } else if (usable != all_qps(p)) {
        p->fewer = true;
        start_round(ep, peer, usable);
    } else {
        p->stage++;
        p->probe_deadline_ns = sp_segments_stage_deadline(&ep->base);
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

/* One warning for all pairs with fewer devices than this rank has. */
static void log_fewer(const struct sp_ib *ep)
{
    sp_rank_list fewer = {0};
    const char *why = "";
    for (int i = 0; i < ep->base.config.world_size; i++) {
        const struct sp_ib_peer *p = &ep->peers[i];
        if (!p->base->added || p->base->none || (!p->fewer && p->n_ports >= (uint32_t)ep->n_devices))
            continue;
        if (fewer.n == 0)
            why = p->fewer ? p->base->reason : "it has fewer usable devices";
        sp_rank_list_add(&fewer, i);
    }
    if (fewer.n != 0)
        sp_log(SP_LOG_WARN, ep->base.config.rank,
               "ib: not all of this rank's %d devices carry messages to rank %s: %s", ep->n_devices,
               fewer.text, why);
}

spccl_status sp_ib_start_step(sp_segments *base)
{
    struct sp_ib *ep = sp_ib_of(base);
    sp_rank_list missing = {0};
    sp_ib_poll(base);
    for (int i = 0; i < base->config.world_size; i++) {
        int64_t began_ns = sp_now_ns();
        spccl_status st = base->peers[i].added ? step_peer(ep, i) : SPCCL_OK;
        if ((st == SPCCL_OK || st == SPCCL_AGAIN) && sp_now_ns() - began_ns > SLOW_NS)
            return SPCCL_AGAIN; /* the driver took its time: serve the control links in between */
        if (st == SPCCL_AGAIN)
            sp_rank_list_add(&missing, i);
        else if (st != SPCCL_OK)
            return st;
    }
    if (missing.n != 0 && sp_deadline_passed(base->config.deadline_ns))
        return SP_FAIL(SPCCL_ERR_TIMEOUT, "rank %d: ib: rank %s did not say in time whether its device works",
                       base->config.rank, missing.text);
    if (missing.n != 0)
        return SPCCL_AGAIN;
    for (int i = 0; i < base->config.world_size; i++)
        if (base->peers[i].none)
            sp_ib_close_qps(&ep->peers[i]);
    log_fewer(ep);
    return SPCCL_OK;
}
