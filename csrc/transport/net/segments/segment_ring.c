/* segment_ring.c - see segment_ring.h. */
#include "transport/net/segments/segment_ring.h"

#include "core/base/bits.h"

/* A segment that is not full is sent if fewer than this many are under way. Otherwise it waits, and may fill. */
#define FEW 2

static uint8_t *place(const sp_segment_ring *r, uint64_t at)
{
    return r->memory.data + (size_t)(at % r->memory.cap);
}

spccl_status sp_segment_ring_open(sp_segment_ring *r, size_t bytes, uint32_t queue, bool receiver)
{
    *r = (sp_segment_ring){.queue = queue, .segment_bytes = bytes / SP_SEGMENTS};
    SP_TRY(sp_mirror_open(&r->memory, bytes));
    atomic_init(&r->done, 0);
    atomic_init(&r->allowed, receiver ? SP_SEGMENTS : 0);
    return SPCCL_OK;
}

void sp_segment_ring_close(sp_segment_ring *r)
{
    sp_mirror_close(&r->memory);
}

/* ---- sender ---- */

/* Count the messages that have left. Returns the end of the free space: a segment is free when every message that
 * begins in it has left, as the count reads the heads. */
static uint64_t count_left(sp_segment_ring *r)
{
    uint64_t end = atomic_load_explicit(&r->done, memory_order_acquire) * r->segment_bytes;
    while (r->left_at < end) {
        uint64_t k = r->left_at / r->segment_bytes;
        size_t n;
        if (r->left_at % r->segment_bytes >= r->bytes[k % SP_SEGMENTS]) {
            r->left_at = (k + 1) * r->segment_bytes;
            continue;
        }
        n = sp_record_bytes(sp_load_le32(place(r, r->left_at)));
        if (r->left_at + n > end)
            break;
        r->left_at += n;
        r->n_left++;
    }
    return r->left_at / r->segment_bytes * r->segment_bytes + r->memory.cap;
}

uint64_t sp_segment_ring_left(sp_segment_ring *r)
{
    (void)count_left(r);
    return r->n_left;
}

void *sp_segment_ring_reserve(sp_segment_ring *r, size_t bytes)
{
    uint64_t limit = count_left(r);
    r->blocked = r->at + sp_record_bytes(bytes) > limit;
    r->reserved = r->blocked ? 0 : bytes;
    r->reserved_at = r->at;
    return r->blocked ? NULL : place(r, r->at) + SP_RECORD_HEAD_BYTES;
}

/* The last segment is not full, and waits for others to leave or for more messages. */
static bool waits(const sp_segment_ring *r)
{
    return r->at > atomic_load_explicit(&r->allowed, memory_order_relaxed) * r->segment_bytes;
}

bool sp_segment_ring_push(sp_segment_ring *r)
{
    uint64_t allowed = atomic_load_explicit(&r->allowed, memory_order_relaxed);
    uint64_t limit = count_left(r), next = (allowed + 1) * r->segment_bytes;
    if (!waits(r) || allowed - atomic_load_explicit(&r->done, memory_order_relaxed) >= FEW)
        return false;
    if (r->reserved != 0 && next + sp_record_bytes(r->reserved) > limit)
        return false; /* the reserved message must still fit */
    r->bytes[allowed % SP_SEGMENTS] = (uint32_t)(r->at % r->segment_bytes);
    r->at = next;
    atomic_store_explicit(&r->allowed, allowed + 1, memory_order_release);
    return true;
}

bool sp_segment_ring_commit(sp_segment_ring *r)
{
    uint64_t before = atomic_load_explicit(&r->allowed, memory_order_relaxed), full;
    uint8_t *from = place(r, r->reserved_at), *head = from + (r->at - r->reserved_at);
    if (head != from) /* a push ended the segment in which the message was to begin */
        memmove(head + SP_RECORD_HEAD_BYTES, from + SP_RECORD_HEAD_BYTES, r->reserved);
    sp_record_write(head, r->queue, (uint32_t)r->n_messages, r->reserved);
    r->at += sp_record_bytes(r->reserved);
    r->n_messages++;
    r->reserved = 0;
    full = r->at / r->segment_bytes;
    for (uint64_t k = before; k < full; k++)
        r->bytes[k % SP_SEGMENTS] = (uint32_t)r->segment_bytes;
    atomic_store_explicit(&r->allowed, full, memory_order_release);
    return sp_segment_ring_push(r) || full != before;
}

/* ---- receiver ---- */

spccl_status sp_segment_ring_peek(const sp_segment_ring *r, size_t bytes_max, const void **out, size_t *bytes)
{
    uint64_t done = atomic_load_explicit(&r->done, memory_order_acquire), first = r->at / r->segment_bytes;
    const uint8_t *head = place(r, r->at);
    const sp_record_expected want = {
        .queue = r->queue, .sequence = (uint32_t)r->n_messages, .bytes_max = bytes_max};
    uint64_t end;
    size_t n = 0;
    if (first >= done)
        return SPCCL_AGAIN;
    SP_TRY(sp_record_check(head, &want, &n));
    end = r->at + sp_record_bytes(n);
    for (uint64_t k = first; k * r->segment_bytes < end; k++) {
        uint64_t part = sp_min_size((size_t)(end - k * r->segment_bytes), r->segment_bytes);
        if (k >= done)
            return SPCCL_AGAIN;
        if (r->bytes[k % SP_SEGMENTS] < part)
            return SP_FAIL(SPCCL_ERR_FORMAT,
                           "message %u of queue %u is cut: segment %llu has %u bytes, wanted %llu",
                           (uint32_t)r->n_messages, r->queue, (unsigned long long)k,
                           r->bytes[k % SP_SEGMENTS], (unsigned long long)part);
    }
    *out = head + SP_RECORD_HEAD_BYTES;
    *bytes = n;
    return SPCCL_OK;
}

bool sp_segment_ring_release(sp_segment_ring *r, size_t bytes)
{
    uint64_t done = atomic_load_explicit(&r->done, memory_order_acquire), allowed;
    uint64_t before = atomic_load_explicit(&r->allowed, memory_order_relaxed);
    r->at += sp_record_bytes(bytes);
    r->n_messages++;
    if (r->at % r->segment_bytes != 0) {
        uint64_t k = r->at / r->segment_bytes;
        if (r->at % r->segment_bytes == r->bytes[k % SP_SEGMENTS])
            r->at = (k + 1) * r->segment_bytes;
    }
    allowed = r->at / r->segment_bytes + SP_SEGMENTS;
    atomic_store_explicit(&r->allowed, allowed, memory_order_release);
    return allowed != before && before - done <= SP_SEGMENTS / 2;
}
