/* proxy_wire.c - see proxy_wire.h. */
#include "core/gpu/proxy_wire.h"

#include "core/base/bits.h"
#include "core/format/format.h"

#include <inttypes.h>

#define MAGIC 0x58525053u /* "SPRX" */
/* All positions are multiples of this: frames and rings have whole units of 16 bytes. */
#define UNIT 16u

void sp_proxy_put_head(uint8_t *message, uint32_t n_credits, uint32_t n_runs)
{
    sp_store_le32(message, MAGIC);
    sp_store_le32(message + 4, n_credits);
    sp_store_le32(message + 8, n_runs);
    sp_store_le32(message + 12, 0);
}

void sp_proxy_put_entry(uint8_t *message, uint32_t i, const sp_proxy_entry *e)
{
    uint8_t *at = message + SP_PROXY_HEAD_BYTES + (size_t)i * SP_PROXY_ENTRY_BYTES;
    sp_store_le32(at, e->queue);
    sp_store_le32(at + 4, e->worker);
    sp_store_le64(at + 8, e->position);
    sp_store_le64(at + 16, e->is_run ? e->bytes : 0);
}

spccl_status sp_proxy_open_message(sp_proxy_reader *r, const uint8_t *message, size_t bytes)
{
    uint64_t n_credits, n_runs, data_off;
    if (bytes < SP_PROXY_HEAD_BYTES || sp_load_le32(message) != MAGIC || sp_load_le32(message + 12) != 0)
        return SP_FAIL(SPCCL_ERR_FORMAT, "%zu bytes without the head of a message of rings", bytes);
    n_credits = sp_load_le32(message + 4);
    n_runs = sp_load_le32(message + 8);
    data_off = SP_PROXY_HEAD_BYTES + (n_credits + n_runs) * SP_PROXY_ENTRY_BYTES;
    data_off = (data_off + 15) / 16 * 16;
    if (data_off > bytes)
        return SP_FAIL(SPCCL_ERR_FORMAT,
                       "a message of %zu bytes, too short for %" PRIu64 " credits and %" PRIu64 " runs",
                       bytes, n_credits, n_runs);
    *r = (sp_proxy_reader){.message = message,
                           .data = message + data_off,
                           .data_bytes = bytes - data_off,
                           .n_credits = (uint32_t)n_credits,
                           .n_entries = (uint32_t)(n_credits + n_runs)};
    return SPCCL_OK;
}

uint64_t sp_proxy_credit_max(uint64_t end, uint32_t ring_bytes)
{
    uint32_t left = ring_bytes - (uint32_t)(end % ring_bytes);
    return left < SP_FRAME_HEADER_BYTES ? end + left : end;
}

size_t sp_proxy_run_max(uint32_t ring_bytes)
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
    if (e->bytes == 0 && e->position % UNIT == 0 && e->position >= at->free_to[ring] && e->position <= most)
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
    if (e->position != at->arrived[ring])
        return SP_FAIL(SPCCL_ERR_FORMAT, "%s of worker %u from position %" PRIu64 " on; wanted %" PRIu64,
                       sp_proxy_queue_name(e->queue), e->worker, e->position, at->arrived[ring]);
    if (e->bytes == 0 || e->bytes % UNIT != 0 || e->bytes > space)
        return SP_FAIL(SPCCL_ERR_FORMAT,
                       "%" PRIu64 " bytes of %s of worker %u at position %" PRIu64
                       "; its credit allows %" PRIu64 ", in units of %u",
                       e->bytes, sp_proxy_queue_name(e->queue), e->worker, e->position, space, UNIT);
    if (e->bytes > data_bytes)
        return SP_FAIL(SPCCL_ERR_FORMAT, "a run of %" PRIu64 " bytes in a message with %zu left", e->bytes,
                       data_bytes);
    return SPCCL_OK;
}

static sp_proxy_entry read_entry(const sp_proxy_reader *r, uint32_t i)
{
    const uint8_t *from = r->message + SP_PROXY_HEAD_BYTES + (size_t)i * SP_PROXY_ENTRY_BYTES;
    return (sp_proxy_entry){.is_run = i >= r->n_credits,
                            .queue = sp_load_le32(from),
                            .worker = sp_load_le32(from + 4),
                            .position = sp_load_le64(from + 8),
                            .bytes = sp_load_le64(from + 16)};
}

bool sp_proxy_peek_entry(const sp_proxy_reader *r, const sp_proxy_positions *at, uint32_t i,
                         sp_proxy_entry *out)
{
    if (i >= r->n_entries)
        return false;
    *out = read_entry(r, i);
    return out->queue < SP_INBOX_QUEUES && out->worker < at->n_workers;
}

spccl_status sp_proxy_next_entry(sp_proxy_reader *r, const sp_proxy_positions *at, sp_proxy_entry *out,
                                 const uint8_t **data)
{
    uint32_t ring;
    if (r->next == r->n_entries) {
        if (r->data_bytes != 0)
            return SP_FAIL(SPCCL_ERR_FORMAT, "%zu bytes behind the last run of a message", r->data_bytes);
        return SPCCL_AGAIN;
    }
    *out = read_entry(r, r->next);
    if (out->queue >= SP_INBOX_QUEUES || out->worker >= at->n_workers)
        return SP_FAIL(SPCCL_ERR_FORMAT, "a ring of queue %u, worker %u; wanted queue 0 or 1, worker 0 to %u",
                       out->queue, out->worker, at->n_workers - 1);
    if (sp_proxy_of(out->worker, at->n_proxies) != at->proxy)
        return SP_FAIL(SPCCL_ERR_FORMAT, "a ring of worker %u, which proxy %u of %u serves, to proxy %u",
                       out->worker, sp_proxy_of(out->worker, at->n_proxies), at->n_proxies, at->proxy);
    ring = out->queue * at->n_workers + out->worker;
    r->next++;
    if (!out->is_run)
        return check_credit(out, at, ring);
    SP_TRY(check_run(out, at, ring, r->data_bytes));
    *data = r->data;
    r->data += out->bytes;
    r->data_bytes -= out->bytes;
    return SPCCL_OK;
}
