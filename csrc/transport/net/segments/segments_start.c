/* segments_start.c - start-up of a network that moves segments: what the network does over the control links. See
 * segments.h. */
#include "core/base/bits.h"
#include "core/base/clock.h"
#include "transport/net/segments/segments.h"

#include <stdio.h>
#include <string.h>

#define STAGE_NS (60000 * INT64_C(1000000)) /* most time for a stage */

static const sp_transport *const tcp = &sp_transport_tcp;

void sp_segments_note_reason(sp_segments_peer *p, const char *why)
{
    if (p->reason[0] == '\0')
        snprintf(p->reason, sizeof p->reason, "%.*s", (int)sizeof p->reason - 1, why);
}

spccl_status sp_segments_open_rings(sp_segments *s, int peer)
{
    sp_segments_peer *p = &s->peers[peer];
    for (int i = 0; i < s->config.n_queues; i++) {
        SP_TRY(sp_segment_ring_open(&p->tx[i], s->config.queue_bytes, (uint32_t)i, false));
        SP_TRY(sp_segment_ring_open(&p->rx[i], s->config.queue_bytes, (uint32_t)i, true));
    }
    return SPCCL_OK;
}

int64_t sp_segments_stage_deadline(const sp_segments *s)
{
    int64_t now_ns = sp_now_ns(), left_ns = STAGE_NS;
    if (s->config.deadline_ns != SP_NEVER && (s->config.deadline_ns - now_ns) / 2 < left_ns)
        left_ns = (s->config.deadline_ns - now_ns) / 2;
    return now_ns + left_ns;
}

/* ---- addresses ---- */

spccl_status sp_segments_address(sp_endpoint *opaque, uint8_t *out, size_t *bytes)
{
    const sp_segments *s = sp_segments_self(opaque);
    *bytes = s->net->write_address(s, out);
    return SPCCL_OK;
}

bool sp_segments_can_reach(sp_endpoint *opaque, const uint8_t *address, size_t bytes, char *why,
                           size_t why_cap)
{
    const sp_segments *s = sp_segments_self(opaque);
    return s->net->reach(s, address, bytes, why, why_cap);
}

spccl_status sp_segments_add_peer(sp_endpoint *opaque, int peer, const uint8_t *address, size_t bytes)
{
    sp_segments *s = sp_segments_self(opaque);
    char why[200];
    if (!s->net->reach(s, address, bytes, why, sizeof why))
        return SP_FAIL(SPCCL_ERR_BUG, "rank %d: %s: add_peer(%d, %zu bytes): %s", s->config.rank,
                       s->net->name, peer, bytes, why);
    if (s->net->add_peer != NULL)
        s->net->add_peer(s, peer, address, bytes);
    s->peers[peer].added = true;
    return SPCCL_OK;
}

/* ---- notes ---- */

spccl_status sp_segments_say(sp_segments *s, int peer, const uint8_t *note, size_t bytes)
{
    void *space = NULL;
    SP_TRY(tcp->reserve(s->tcp, peer, 0, bytes, &space));
    memcpy(space, note, bytes);
    return tcp->commit(s->tcp, peer, 0, 0);
}

spccl_status sp_segments_hear(sp_segments *s, int peer, const void **note, size_t *bytes)
{
    spccl_status st = tcp->peek(s->tcp, peer, 0, note, bytes);
    if (st == SPCCL_ERR_PEER)
        return SP_FAIL(st, "rank %d: rank %d closed its endpoint before the group was up", s->config.rank,
                       peer);
    return st;
}

spccl_status sp_segments_heard(sp_segments *s, int peer)
{
    return tcp->release(s->tcp, peer, 0);
}

spccl_status sp_segments_bad_note(const sp_segments *s, int peer, size_t bytes, const char *what)
{
    return SP_FAIL(SPCCL_ERR_FORMAT, "rank %d: %s: rank %d sent %zu bytes that are no %s", s->config.rank,
                   s->net->name, peer, bytes, what);
}

bool sp_segments_read_text(const uint8_t *from, char *out, size_t cap)
{
    size_t n = strnlen((const char *)from, cap);
    if (n == cap)
        return false;
    for (size_t i = 0; i < n; i++)
        out[i] = from[i] >= 32 && from[i] < 127 ? (char)from[i] : '?';
    memset(out + n, 0, cap - n);
    return true;
}

void sp_segments_write_text(const char *text, uint8_t *out, size_t cap)
{
    size_t n = strnlen(text, cap - 1);
    memset(out, 0, cap);
    memcpy(out, text, n);
}

void sp_segments_write_result(const sp_segments_result *r, uint32_t magic,
                              uint8_t out[SP_SEGMENTS_RESULT_BYTES])
{
    sp_store_le32(out, magic);
    sp_store_le32(out + 4, r->value);
    sp_segments_write_text(r->why, out + 8, SP_NET_TEXT_CAP);
}

bool sp_segments_read_result(const uint8_t *bytes, size_t n, uint32_t magic, uint32_t value_max,
                             sp_segments_result *out)
{
    if (n != SP_SEGMENTS_RESULT_BYTES || sp_load_le32(bytes) != magic || sp_load_le32(bytes + 4) > value_max)
        return false;
    out->value = sp_load_le32(bytes + 4);
    return sp_segments_read_text(bytes + 8, out->why, SP_NET_TEXT_CAP);
}

/* ---- the end of start-up ---- */

bool sp_segments_failed(sp_endpoint *opaque, int peer, sp_pair_failure *out)
{
    const sp_segments *s = sp_segments_self(opaque);
    const sp_segments_peer *p = &s->peers[peer];
    *out = (sp_pair_failure){p->reason, p->tcp_faster ? NULL : s->net->what,
                             p->tcp_faster || (s->net->is_expected != NULL && s->net->is_expected(s))};
    return p->none;
}

spccl_status sp_segments_connect_step(sp_endpoint *opaque)
{
    sp_segments *s = sp_segments_self(opaque);
    char text[SP_ABORT_TEXT_CAP];
    bool any = false;
    int peer = -1;
    for (int i = 0; i < s->config.world_size; i++)
        any = any || s->peers[i].added;
    if (s->up || !any)
        return SPCCL_OK;
    if (!s->prepared)
        SP_TRY(s->net->prepare(s));
    s->prepared = true;
    SP_TRY(tcp->connect_step(s->tcp));
    SP_TRY(tcp->progress(s->tcp, &peer, text));
    SP_TRY(s->net->start_step(s));
    for (int i = 0; i < s->config.world_size; i++)
        s->peers[i].carried = s->peers[i].added && !s->peers[i].none;
    s->up = s->changed = true; /* a peer may be gone already, or have sent */
    return SPCCL_OK;
}
