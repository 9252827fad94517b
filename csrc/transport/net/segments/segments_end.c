/* segments_end.c - how a peer of a network that moves segments ends: it sends a FIN over the control link, it is lost, or
 * the network fails for it. See segments.h. */
#include "core/base/bits.h"
#include "core/base/clock.h"
#include "transport/net/segments/segments.h"

#include <stdio.h>

/* After the network failed for a peer, or the peer is gone, this rank waits this long: for the reason, which comes over
 * the control link, and for segments that are still on their way. The same as ABORT_WAIT_NS of tcp.c. */
#define END_WAIT_NS (INT64_C(600) * 1000000)
#define FIN_MAGIC 0x464e7073u /* "spNF" */

static const sp_transport *const tcp = &sp_transport_tcp;

void sp_segments_write_fin(const sp_segments_fin *f, int n_queues, uint8_t out[SP_SEGMENTS_FIN_BYTES])
{
    sp_store_le32(out, FIN_MAGIC);
    sp_store_le32(out + 4, (uint32_t)n_queues);
    for (size_t i = 0; i < SP_QUEUES_MAX; i++)
        sp_store_le64(out + 8 + 8 * i, i < (size_t)n_queues ? f->n_segments[i] : 0);
}

bool sp_segments_read_fin(const uint8_t *bytes, size_t n, int n_queues, sp_segments_fin *out)
{
    if (n != SP_SEGMENTS_FIN_BYTES || sp_load_le32(bytes) != FIN_MAGIC ||
        sp_load_le32(bytes + 4) != (uint32_t)n_queues)
        return false;
    for (size_t i = 0; i < SP_QUEUES_MAX; i++)
        out->n_segments[i] = sp_load_le64(bytes + 8 + 8 * i);
    return true;
}

static void start_ending(sp_segments *s, sp_segments_peer *p)
{
    if (p->ended_ns != 0)
        return;
    p->ended_ns = sp_now_ns();
    s->changed = s->ending = true;
}

/* A clause: what the network failed for. */
static void write_failure(const sp_segments_peer *p, char *out, size_t cap)
{
    snprintf(out, cap, "%s: %s",
             p->failed_status == SPCCL_ERR_FORMAT ? "sent something that is not a message"
                                                  : "cannot be reached any more",
             p->failure);
}

void sp_segments_fail(sp_segments *s, int peer)
{
    s->peers[peer].failed = true;
    start_ending(s, &s->peers[peer]);
}

static void set_gone(sp_segments *s, sp_segments_peer *p, const char *text)
{
    if (p->gone)
        return;
    snprintf(p->gone_text, sizeof p->gone_text, "%s", text);
    p->gone = s->changed = true;
    start_ending(s, p);
    p->ended_ns = sp_now_ns(); /* segments may still be on their way */
}

void sp_segments_lose(sp_segments *s, int peer, const char *text)
{
    sp_segments_peer *p = &s->peers[peer];
    snprintf(p->failure, sizeof p->failure, "%s", text);
    p->failed_status = SPCCL_ERR_PEER;
    write_failure(p, p->gone_text, sizeof p->gone_text);
    p->failed = p->gone = p->over = s->changed = true;
}

/* The peer is gone because the network failed for it. */
static void set_gone_failed(sp_segments *s, sp_segments_peer *p)
{
    char text[sizeof p->gone_text];
    write_failure(p, text, sizeof text);
    set_gone(s, p, text);
}

void sp_segments_renew_text(sp_segments_peer *p)
{
    write_failure(p, p->gone_text, sizeof p->gone_text);
}

spccl_status sp_segments_lost(const sp_segments *s, int peer)
{
    const sp_segments_peer *p = &s->peers[peer];
    char text[sizeof p->gone_text];
    write_failure(p, text, sizeof text);
    return SP_FAIL(p->failed_status != SPCCL_OK ? p->failed_status : SPCCL_ERR_PEER, "rank %d: rank %d %s",
                   s->config.rank, peer, p->gone ? p->gone_text : text);
}

void sp_segments_hear_end(sp_segments *s, int peer)
{
    sp_segments_peer *p = &s->peers[peer];
    const void *note = NULL;
    size_t bytes = 0;
    spccl_status st;
    while (!p->gone && (st = tcp->peek(s->tcp, peer, 0, &note, &bytes)) != SPCCL_AGAIN) {
        if (st == SPCCL_ERR_PEER && p->failed_status == SPCCL_ERR_FORMAT) {
            set_gone_failed(s, p); /* what it sent says more than that it left */
        } else if (st == SPCCL_ERR_PEER) {
            set_gone(s, p, "is gone: its process ended or left the group; see its output");
        } else if (st == SPCCL_OK && !p->has_fin &&
                   sp_segments_read_fin(note, bytes, s->config.n_queues, &p->fin)) {
            p->has_fin = true;
            (void)sp_segments_heard(s, peer);
        } else {
            set_gone(s, p, "sent something that is not a message over its tcp link");
        }
    }
}

/* True if all segments that the peer sent are here, or no more can come. */
static bool all_arrived(const sp_segments *s, sp_segments_peer *p)
{
    uint64_t n = 0;
    bool complete = p->has_fin;
    for (int i = 0; i < s->config.n_queues; i++) {
        uint64_t done = atomic_load_explicit(&p->rx[i].done, memory_order_relaxed);
        n += done;
        complete = complete && done >= p->fin.n_segments[i];
    }
    if (n != p->n_arrived)
        p->ended_ns = sp_now_ns();
    p->n_arrived = n;
    return complete || p->rx_ended || sp_now_ns() - p->ended_ns > END_WAIT_NS;
}

void sp_segments_decide_end(sp_segments *s, int peer)
{
    sp_segments_peer *p = &s->peers[peer];
    if (p->over || p->ended_ns == 0)
        return;
    if (p->gone) {
        p->over = all_arrived(s, p);
        s->changed = s->changed || p->over;
    } else if (sp_now_ns() - p->ended_ns > END_WAIT_NS) {
        set_gone_failed(s, p);
    }
}
