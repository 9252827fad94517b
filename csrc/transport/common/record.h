/* record.h - a message of a queue in a stream of bytes, as tcp and ncclnet send it. A head of 16 bytes, little-endian
 *   0 u32 payload bytes   4 u32 sequence number in its queue   8 u32 queue   12 u32 "SPMS"
 * then the payload, then zeros up to a multiple of 16. */
#ifndef SP_RECORD_H
#define SP_RECORD_H

#include "core/base/bits.h"
#include "core/base/status.h"

#include <string.h>

#define SP_RECORD_HEAD_BYTES 16u
#define SP_RECORD_MAGIC 0x534d5053u /* "SPMS" */

/* What the next message must be. */
typedef struct sp_record_expected {
    uint32_t queue, sequence;
    size_t bytes_max;
} sp_record_expected;

/* Bytes of a record with that payload. */
static inline size_t sp_record_bytes(size_t payload)
{
    return SP_RECORD_HEAD_BYTES + sp_align_up(payload, 16);
}

/* Write the head, and the zeros after the payload. */
static inline void sp_record_write(uint8_t *record, uint32_t queue, uint32_t sequence, size_t payload)
{
    sp_store_le32(record, (uint32_t)payload);
    sp_store_le32(record + 4, sequence);
    sp_store_le32(record + 8, queue);
    sp_store_le32(record + 12, SP_RECORD_MAGIC);
    memset(record + SP_RECORD_HEAD_BYTES + payload, 0,
           sp_record_bytes(payload) - SP_RECORD_HEAD_BYTES - payload);
}

/* Get the size of the payload. Errors: FORMAT (the head differs from `want`; the text is a clause). */
static inline spccl_status sp_record_check(const uint8_t *record, const sp_record_expected *want,
                                           size_t *payload)
{
    uint32_t n = sp_load_le32(record), sequence = sp_load_le32(record + 4), queue = sp_load_le32(record + 8),
             magic = sp_load_le32(record + 12);
    if (magic != SP_RECORD_MAGIC || n == 0 || n > want->bytes_max || sequence != want->sequence ||
        queue != want->queue)
        return SP_FAIL(SPCCL_ERR_FORMAT,
                       "magic %08x, message %u of queue %u, %u bytes; wanted magic %08x, message %u of queue "
                       "%u, 1 to %zu bytes",
                       magic, sequence, queue, n, SP_RECORD_MAGIC, want->sequence, want->queue,
                       want->bytes_max);
    *payload = n;
    return SPCCL_OK;
}

#endif
