/* ib_start.c - start-up of transport ib. See ib.h.
 *
 * Two ranks first connect over tcp. Then each sends the other
 *   connect info  its end of the queue pair and where its receive rings are, or why it has none;
 *   ready       whether it could connect its queue pair to the peer's;
 *   a result   whether a probe that it wrote left, and the peer's probe came.
 * ib carries the pair if both results say so. Otherwise both ends use the tcp link. */
#include "core/base/clock.h"
#include "core/base/log.h"
#include "transport/common/transports.h"
#include "transport/net/ib.h"

#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>

#define MS INT64_C(1000000)
#define PROBE_NS (60000 * MS) /* most time for the probes */

static const sp_transport *const tcp = &sp_transport_tcp;

/* ib does not carry this peer. The first reason stays. */
static void take_tcp(struct sp_ib_peer *p, const char *why)
{
    if (p->reason[0] == '\0')
        snprintf(p->reason, sizeof p->reason, "%.*s", (int)sizeof p->reason - 1, why);
}

/* ---- this rank's end ---- */

static spccl_status watch_context(struct sp_ib *ep, const sp_ib_context *context)
{
    struct epoll_event e = {.events = EPOLLIN};
    if (epoll_ctl(ep->epoll_fd, EPOLL_CTL_ADD, sp_ib_context_fd(context), &e) != 0 ||
        epoll_ctl(ep->epoll_fd, EPOLL_CTL_ADD, sp_ib_context_event_fd(context), &e) != 0)
        return SP_FAIL_ERRNO(SPCCL_ERR_SYSTEM, "ib: epoll_ctl");
    return SPCCL_OK;
}

/* Register the parts of a queue's rings that a rail carries. */
static spccl_status register_part(struct sp_ib *ep, struct sp_ib_peer *p, uint32_t rail, int queue)
{
    struct sp_ib_tx *tx = &p->tx[queue];
    struct sp_ib_rx *rx = &p->rx[queue];
    sp_ib_context *context = ep->contexts[p->rails[rail].device];
    uint64_t first = sp_ib_rail_first(p->n_rails, rail);
    size_t bytes = tx->ring.memory.cap / p->n_rails;
    SP_TRY(sp_ib_memory_open(context, sp_nn_ring_segment(&tx->ring, first), bytes, &tx->memory[rail]));
    SP_TRY(sp_ib_memory_open(context, sp_nn_ring_segment(&rx->ring, first), bytes, &rx->memory[rail]));
    tx->order.next[rail] = rx->order.next[rail] = first;
    p->mine.rings[queue].rkey[rail] = rx->memory[rail].rkey;
    return SPCCL_OK;
}

static spccl_status open_peer(struct sp_ib *ep, int peer)
{
    struct sp_ib_peer *p = &ep->peers[peer];
    for (uint32_t r = 0; r < p->n_rails; r++)
        SP_TRY(sp_ib_link_open(ep->contexts[p->rails[r].device], sp_ib_n_writes(ep), sp_ib_n_receives(ep),
                               &p->rails[r].link, &p->mine.ends[r]));
    for (int i = 0; i < ep->config.n_queues; i++) {
        struct sp_ib_tx *tx = &p->tx[i];
        struct sp_ib_rx *rx = &p->rx[i];
        SP_TRY(sp_nn_ring_open(&tx->ring, ep->config.queue_bytes, (uint32_t)i, false));
        SP_TRY(sp_nn_ring_open(&rx->ring, ep->config.queue_bytes, (uint32_t)i, true));
        for (uint32_t r = 0; r < p->n_rails; r++)
            SP_TRY(register_part(ep, p, r, i));
        tx->credit = rx->announced = SP_NN_SEGMENTS;
        p->mine.rings[i].address = (uintptr_t)rx->ring.memory.data;
    }
    for (uint32_t r = 0; r < p->n_rails; r++)
        SP_TRY(sp_ib_link_receive(p->rails[r].link, UINT64_C(1) << 63 | sp_ib_id(peer, r),
                                  sp_ib_n_receives(ep)));
    return SPCCL_OK;
}

static spccl_status open_all(struct sp_ib *ep)
{
    int n_peers = 0;
    for (int i = 0; i < ep->config.world_size; i++)
        n_peers += ep->peers[i].added;
    for (int d = 0; d < ep->n_devices; d++) {
        SP_TRY(sp_ib_context_open(&ep->devices[d], n_peers * (sp_ib_n_writes(ep) + sp_ib_n_receives(ep)) + 1,
                                  &ep->contexts[d]));
        SP_TRY(watch_context(ep, ep->contexts[d]));
    }
    for (int i = 0; i < ep->config.world_size; i++)
        if (ep->peers[i].added)
            SP_TRY(open_peer(ep, i));
    return SPCCL_OK;
}

/* Open the device, and a queue pair and rings for each peer. If that fails, tcp carries all peers. */
static void prepare(struct sp_ib *ep)
{
    pthread_mutex_lock(&ep->guard.lock);
    if (open_all(ep) != SPCCL_OK)
        snprintf(ep->failure, sizeof ep->failure, "%.*s", (int)sizeof ep->failure - 1,
                 sp_without_rank(spccl_last_error(), ep->config.rank));
    pthread_mutex_unlock(&ep->guard.lock);
    ep->prepared = true;
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

static spccl_status send_connect_info(struct sp_ib *ep, int peer)
{
    struct sp_ib_peer *p = &ep->peers[peer];
    uint8_t note[SP_IB_CONNECT_INFO_BYTES];
    p->mine.usable = ep->failure[0] == '\0';
    p->mine.n_rails = p->n_rails;
    p->mine.n_queues = (uint32_t)ep->config.n_queues;
    p->mine.segment_bytes = (uint32_t)(ep->config.queue_bytes / SP_NN_SEGMENTS);
    snprintf(p->mine.why, sizeof p->mine.why, "%s", ep->failure);
    sp_ib_write_connect_info(&p->mine, note);
    p->connect_info_sent = true;
    return send_note(ep, peer, note, sizeof note);
}

/* "ready" or a result: good unless there is a reason to take tcp. */
static spccl_status send_result(struct sp_ib *ep, int peer)
{
    struct sp_ib_peer *p = &ep->peers[peer];
    sp_nn_result v = {.fine = p->reason[0] == '\0'};
    uint8_t note[SP_NN_RESULT_BYTES];
    snprintf(v.why, sizeof v.why, "%s", p->reason);
    sp_nn_write_result(&v, note);
    return send_note(ep, peer, note, sizeof note);
}

/* ---- notes from a peer ---- */

/* Both sides' connect info is known: connect the queue pair, or not. */
static spccl_status judge_connect_info(struct sp_ib *ep, int peer)
{
    struct sp_ib_peer *p = &ep->peers[peer];
    char text[SP_NN_TEXT_CAP + 40] = "";
    if (!p->mine.usable)
        snprintf(text, sizeof text, "%s", p->mine.why);
    else if (!p->theirs.usable)
        snprintf(text, sizeof text, "rank %d: %s", peer, p->theirs.why);
    else if (p->mine.n_queues != p->theirs.n_queues || p->mine.segment_bytes != p->theirs.segment_bytes ||
             p->mine.n_rails != p->theirs.n_rails || p->mine.ends[0].ethernet != p->theirs.ends[0].ethernet)
        snprintf(text, sizeof text, "other queues or network at rank %d: another version of spccl", peer);
    if (text[0] != '\0') {
        take_tcp(p, text);
        return SPCCL_OK;
    }
    for (uint32_t r = 0; r < p->n_rails; r++)
        if (sp_ib_link_connect(p->rails[r].link, &p->mine.ends[r], &p->theirs.ends[r]) != SPCCL_OK)
            take_tcp(p, spccl_last_error());
    p->ready_sent = true;
    return send_result(ep, peer);
}

static spccl_status bad_note(const struct sp_ib *ep, int peer, size_t bytes, const char *what)
{
    return SP_FAIL(SPCCL_ERR_FORMAT, "rank %d: ib: rank %d sent %zu bytes that are no %s", ep->config.rank,
                   peer, bytes, what);
}

/* Take the next note of a peer, if it is here. */
static spccl_status take_note(struct sp_ib *ep, int peer)
{
    struct sp_ib_peer *p = &ep->peers[peer];
    const void *note = NULL;
    size_t bytes = 0;
    sp_nn_result v;
    spccl_status st = tcp->peek(ep->tcp, peer, 0, &note, &bytes);
    if (st == SPCCL_ERR_PEER)
        return SP_FAIL(st, "rank %d: rank %d closed its endpoint before the group was up", ep->config.rank,
                       peer);
    SP_TRY(st);
    if (!p->connect_info_here) {
        if (!sp_ib_read_connect_info(note, bytes, &p->theirs))
            return bad_note(ep, peer, bytes, "connect info");
        p->connect_info_here = true;
        SP_TRY(tcp->release(ep->tcp, peer, 0));
        return judge_connect_info(ep, peer);
    }
    if (!sp_nn_read_result(note, bytes, &v))
        return bad_note(ep, peer, bytes, "result");
    if (p->ready_here)
        p->result_here = true;
    p->ready_here = true;
    if (!v.fine) {
        char text[SP_NN_TEXT_CAP + 40];
        snprintf(text, sizeof text, "rank %d: %s", peer, v.why);
        take_tcp(p, text);
    }
    return tcp->release(ep->tcp, peer, 0);
}

/* ---- probing ---- */

static bool all_probes_sent(const struct sp_ib_peer *p)
{
    bool sent = true;
    for (uint32_t r = 0; r < p->n_rails; r++)
        sent = sent && p->rails[r].probe_sent;
    return sent;
}

/* The first rail whose probe did not leave, or did not come; n_rails if there is none. */
static uint32_t first_silent_rail(const struct sp_ib_peer *p)
{
    uint32_t r = 0;
    while (r < p->n_rails && p->rails[r].probe_left && p->rails[r].probe_here)
        r++;
    return r;
}

/* The queue pairs are connected at both ends: probe. Once it is known what comes of it, send the result. */
static spccl_status probe(struct sp_ib *ep, int peer)
{
    struct sp_ib_peer *p = &ep->peers[peer];
    uint32_t silent;
    for (uint32_t r = 0; r < p->n_rails; r++)
        if (!p->rails[r].probe_sent)
            (void)sp_ib_send_probe(ep, peer, r);
    silent = first_silent_rail(p);
    if (p->failed) {
        take_tcp(p, p->failure);
    } else if (silent < p->n_rails && p->reason[0] == '\0') {
        char device[SP_IB_NAME_CAP + 24], text[SP_NN_TEXT_CAP];
        if (!sp_deadline_passed(ep->probe_deadline_ns))
            return SPCCL_OK;
        sp_ib_device_text(&ep->devices[p->rails[silent].device], device, sizeof device);
        snprintf(text, sizeof text, "%s: nothing came from rank %d's device in time", device, peer);
        take_tcp(p, text);
    }
    p->result_sent = true;
    return send_result(ep, peer);
}

static bool both_ready(const struct sp_ib_peer *p)
{
    return p->ready_sent && p->ready_here && (p->reason[0] == '\0' || all_probes_sent(p));
}

/* Continue with one peer. AGAIN: it is not ready. */
static spccl_status step_peer(struct sp_ib *ep, int peer)
{
    struct sp_ib_peer *p = &ep->peers[peer];
    spccl_status st = SPCCL_OK;
    if (!p->connect_info_sent)
        SP_TRY(send_connect_info(ep, peer));
    while (st == SPCCL_OK && (!p->connect_info_here || (p->ready_sent && !p->ready_here) ||
                              (both_ready(p) && all_probes_sent(p) && !p->result_here)))
        st = take_note(ep, peer);
    if (st != SPCCL_OK && st != SPCCL_AGAIN)
        return st;
    if (both_ready(p) && !p->result_sent)
        SP_TRY(probe(ep, peer));
    if (!p->connect_info_here || (p->ready_sent && !p->ready_here))
        return SPCCL_AGAIN;
    return !both_ready(p) || (p->result_sent && p->result_here) ? SPCCL_OK : SPCCL_AGAIN;
}

/* ---- the end of start-up ---- */

/* One warning for all pairs that use tcp in place of ib, and one for those with fewer rails. Errors: UNREACHABLE (tcp is
 * not allowed). */
static spccl_status decide_routes(struct sp_ib *ep)
{
    sp_rank_list failed = {0}, fewer = {0};
    const char *why = "";
    for (int i = 0; i < ep->config.world_size; i++) {
        struct sp_ib_peer *p = &ep->peers[i];
        if (!p->added)
            continue;
        p->route = p->reason[0] == '\0' ? SP_IB_BY_IB : SP_IB_BY_TCP;
        if (p->route == SP_IB_BY_IB && p->n_ports < (uint32_t)ep->n_devices)
            sp_rank_list_add(&fewer, i);
        if (p->route == SP_IB_BY_IB)
            continue;
        sp_rank_list_add(&failed, i);
        why = why[0] == '\0' ? p->reason : why;
    }
    if (fewer.n != 0)
        sp_log(SP_LOG_WARN, ep->config.rank,
               "ib: this rank has %d usable devices, rank %s fewer: not all carry messages to it",
               ep->n_devices, fewer.text);
    if (failed.n == 0)
        return SPCCL_OK;
    if (!ep->config.tcp_too)
        return SP_FAIL(SPCCL_ERR_UNREACHABLE,
                       "rank %d: no ib connection with rank %s, and tcp is not among the transports: %s",
                       ep->config.rank, failed.text, why);
    sp_log(SP_LOG_WARN, ep->config.rank, "ib: tcp is used in place of ib with rank %s: %s", failed.text, why);
    return SPCCL_OK;
}

/* What the start-up itself changed is nothing that a first `arm` should report. */
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
        spccl_status st = ep->peers[i].added ? step_peer(ep, i) : SPCCL_OK;
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

/* Half of the time that is left is for the probes, so that the results come in time. */
static void set_deadline(struct sp_ib *ep)
{
    int64_t now_ns = sp_now_ns(), left_ns = PROBE_NS;
    if (ep->config.deadline_ns != SP_NEVER && (ep->config.deadline_ns - now_ns) / 2 < left_ns)
        left_ns = (ep->config.deadline_ns - now_ns) / 2;
    ep->probe_deadline_ns = now_ns + left_ns;
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
        prepare(ep);
    if (!ep->tcp_up) {
        SP_TRY(tcp->connect_step(ep->tcp));
        ep->tcp_up = true;
        set_deadline(ep);
    }
    return start_pairs(ep);
}
