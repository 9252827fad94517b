/* proxy_wire.c - see proxy_wire.h. */
#include "core/gpu/proxy/proxy_wire.h"

#include "core/base/bits.h"
#include "core/format/format.h"

#include <inttypes.h>
#include <string.h>

#define MAGIC 0x58525053u /* "SPRX" */
/* All positions are multiples of this: frames and rings have whole units of 16 bytes. */
#define UNIT 16u

void sp_proxy_put_head(uint8_t *message, uint32_t n_credits, uint32_t n_spans)
{
    sp_store_le32(message, MAGIC);
    sp_store_le32(message + 4, n_credits);
    sp_store_le32(message + 8, n_spans);
    sp_store_le32(message + 12, 0);
}

void sp_proxy_put_entry(uint8_t *message, uint32_t i, const sp_proxy_entry *e)
{
    uint8_t *at = message + SP_PROXY_HEAD_BYTES + (size_t)i * SP_PROXY_ENTRY_BYTES;
    sp_store_le32(at, e->queue);
    sp_store_le32(at + 4, e->worker);
    sp_store_le64(at + 8, e->position);
    sp_store_le32(at + 16, e->is_span ? e->bytes : 0);
    sp_store_le32(at + 20, e->is_span ? e->skipped : 0);
}

spccl_status sp_proxy_open_message(sp_proxy_reader *r, const uint8_t *message, size_t bytes)
{
    uint64_t n_credits, n_spans, data_off;
    if (bytes < SP_PROXY_HEAD_BYTES || sp_load_le32(message) != MAGIC || sp_load_le32(message + 12) != 0)
        return SP_FAIL(SPCCL_ERR_FORMAT, "%zu bytes without the head of a message of rings", bytes);
    n_credits = sp_load_le32(message + 4);
    n_spans = sp_load_le32(message + 8);
    data_off = SP_PROXY_HEAD_BYTES + (n_credits + n_spans) * SP_PROXY_ENTRY_BYTES;
    data_off = (data_off + 15) / 16 * 16;
    if (data_off > bytes)
        return SP_FAIL(SPCCL_ERR_FORMAT,
                       "a message of %zu bytes, too short for %" PRIu64 " credits and %" PRIu64 " runs",
                       bytes, n_credits, n_spans);
    *r = (sp_proxy_reader){.message = message,
                           .data = message + data_off,
                           .data_bytes = bytes - data_off,
                           .n_credits = (uint32_t)n_credits,
                           .n_entries = (uint32_t)(n_credits + n_spans)};
    return SPCCL_OK;
}

/* From a position to the end of its ring. */
static uint32_t bytes_left(uint32_t ring_bytes, uint64_t position)
{
    return ring_bytes - (uint32_t)(position % ring_bytes);
}

uint64_t sp_proxy_credit_max(uint64_t end, uint32_t ring_bytes)
{
    uint32_t left = ring_bytes - (uint32_t)(end % ring_bytes);
    return left < SP_FRAME_HEADER_BYTES ? end + left : end;
}

bool sp_proxy_find_skip(const uint8_t *ring, uint32_t ring_bytes, const sp_proxy_entry *span,
                        uint32_t *skipped)
{
    uint32_t left = bytes_left(ring_bytes, span->position);
    *skipped = 0;
    if (span->bytes <= left) /* a skip and the frame behind it are announced together */
        return true;
    while (left >= SP_FRAME_HEADER_BYTES) {
        const uint8_t *frame = ring + ring_bytes - left;
        uint64_t bytes = sp_load_le64(frame + 24);
        if (sp_load_le32(frame) == SP_INBOX_WRAP)
            break;
        if (sp_load_le32(frame) != SP_FRAME_MAGIC || bytes < SP_FRAME_HEADER_BYTES || bytes % UNIT != 0 ||
            bytes > left)
            return false;
        left -= (uint32_t)bytes;
    }
    *skipped = left;
    return true;
}

/* Bytes that travel before the end of the ring. */
static uint32_t bytes_before_end(uint32_t ring_bytes, const sp_proxy_entry *span)
{
    uint32_t left = bytes_left(ring_bytes, span->position);
    return span->bytes <= left ? span->bytes : left - span->skipped;
}

void sp_proxy_read_span(uint8_t *to, const uint8_t *ring, uint32_t ring_bytes, const sp_proxy_entry *span)
{
    uint32_t first = bytes_before_end(ring_bytes, span);
    memcpy(to, ring + span->position % ring_bytes, first);
    memcpy(to + first, ring, span->bytes - span->skipped - first);
}

void sp_proxy_write_span(uint8_t *ring, uint32_t ring_bytes, const sp_proxy_entry *span, const uint8_t *from)
{
    uint32_t first = bytes_before_end(ring_bytes, span);
    memcpy(ring + span->position % ring_bytes, from, first);
    if (span->skipped >= SP_FRAME_HEADER_BYTES)
        sp_store_le32(ring + ring_bytes - span->skipped, SP_INBOX_WRAP);
    memcpy(ring, from + first, span->bytes - span->skipped - first);
}

size_t sp_proxy_span_max(uint32_t ring_bytes)
{
    return (size_t)ring_bytes + SP_FRAME_HEADER_BYTES - UNIT;
}

const char *sp_proxy_queue_name(uint32_t queue)
{
    return queue == SP_INBOX_INPUT ? "inputs" : "results";
}

static spccl_status check_credit(const sp_proxy_entry *e, const sp_proxy_positions *at, uint32_t ring)
{
    uint64_t most = sp_proxy_credit_max(at->sent[ring], at->ring_bytes);
    if (e->bytes == 0 && e->skipped == 0 && e->position % UNIT == 0 && e->position >= at->free_to[ring] &&
        e->position <= most)
        return SPCCL_OK;
    return SP_FAIL(SPCCL_ERR_FORMAT,
                   "a credit for %s of worker %u up to %" PRIu64 "; wanted %" PRIu64 " to %" PRIu64
                   ", as frames up to %" PRIu64 " were sent",
                   sp_proxy_queue_name(e->queue), e->worker, e->position, at->free_to[ring], most,
                   at->sent[ring]);
}

static spccl_status check_run(const sp_proxy_entry *e, const sp_proxy_positions *at, uint32_t ring,
                              size_t data_bytes)
{
    uint64_t space = at->freed[ring] + at->ring_bytes - at->arrived[ring];
    uint32_t left = bytes_left(at->ring_bytes, e->position);
    if (e->position != at->arrived[ring])
        return SP_FAIL(SPCCL_ERR_FORMAT, "%s of worker %u from position %" PRIu64 " on; wanted %" PRIu64,
                       sp_proxy_queue_name(e->queue), e->worker, e->position, at->arrived[ring]);
    if (e->bytes == 0 || e->bytes % UNIT != 0 || e->bytes > space)
        return SP_FAIL(SPCCL_ERR_FORMAT,
                       "%u bytes of %s of worker %u at position %" PRIu64 "; its credit allows %" PRIu64
                       ", in units of %u",
                       e->bytes, sp_proxy_queue_name(e->queue), e->worker, e->position, space, UNIT);
    if (at->direct && e->skipped != 0)
        return SP_FAIL(SPCCL_ERR_FORMAT, "%u skipped bytes of %s of worker %u in a ring in GPU memory",
                       e->skipped, sp_proxy_queue_name(e->queue), e->worker);
    if (e->skipped != 0 && (e->skipped % UNIT != 0 || e->skipped > left || e->bytes <= left))
        return SP_FAIL(SPCCL_ERR_FORMAT,
                       "%u skipped bytes in a span of %u with %u to the end of its ring (%s of worker %u)",
                       e->skipped, e->bytes, left, sp_proxy_queue_name(e->queue), e->worker);
    if (!at->direct && e->bytes - e->skipped > data_bytes)
        return SP_FAIL(SPCCL_ERR_FORMAT, "a span of %u bytes in a message with %zu left",
                       e->bytes - e->skipped, data_bytes);
    return SPCCL_OK;
}

static sp_proxy_entry read_entry(const sp_proxy_reader *r, uint32_t i)
{
    const uint8_t *from = r->message + SP_PROXY_HEAD_BYTES + (size_t)i * SP_PROXY_ENTRY_BYTES;
    return (sp_proxy_entry){.is_span = i >= r->n_credits,
                            .queue = sp_load_le32(from),
                            .worker = sp_load_le32(from + 4),
                            .position = sp_load_le64(from + 8),
                            .bytes = sp_load_le32(from + 16),
                            .skipped = sp_load_le32(from + 20)};
}

bool sp_proxy_peek_entry(const sp_proxy_reader *r, const sp_proxy_positions *at, uint32_t i,
                         sp_proxy_entry *out)
{
    if (i >= r->n_entries)
        return false;
    *out = read_entry(r, i);
    return out->queue < at->n_queues && out->worker < at->n_workers;
}

spccl_status sp_proxy_next_entry(sp_proxy_reader *r, const sp_proxy_positions *at, sp_proxy_entry *out,
                                 const uint8_t **data)
{
    uint32_t ring;
    if (r->next == r->n_entries) {
        if (r->data_bytes != 0)
            return SP_FAIL(SPCCL_ERR_FORMAT, "%zu bytes behind the last span of a message", r->data_bytes);
        return SPCCL_AGAIN;
    }
    *out = read_entry(r, r->next);
    if (out->queue >= at->n_queues || out->worker >= at->n_workers)
        return SP_FAIL(SPCCL_ERR_FORMAT, "a ring of queue %u, worker %u; wanted queue 0%s, worker 0 to %u",
                       out->queue, out->worker, at->n_queues == 2 ? " or 1" : "", at->n_workers - 1);
    if (sp_proxy_of(out->worker, at->n_proxies) != at->proxy)
        return SP_FAIL(SPCCL_ERR_FORMAT, "a ring of worker %u, which proxy %u of %u serves, to proxy %u",
                       out->worker, sp_proxy_of(out->worker, at->n_proxies), at->n_proxies, at->proxy);
    ring = out->queue * at->n_workers + out->worker;
    r->next++;
    if (!out->is_span)
        return check_credit(out, at, ring);
    SP_TRY(check_run(out, at, ring, r->data_bytes));
    if (at->direct)
        return SPCCL_OK;
    *data = r->data;
    r->data += out->bytes - out->skipped;
    r->data_bytes -= out->bytes - out->skipped;
    return SPCCL_OK;
}
