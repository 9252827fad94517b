/* spsc.h - a queue of messages in shared memory, with one producer and one consumer. The two may be in
 * different processes.
 *
 * The data is a ring of `cap` bytes, a power of two. Positions are numbers of bytes since the start; they
 * only grow, and 64 bits do not overflow in practice. A record is a head of 16 bytes {u32 bytes, u32 kind, 8
 * unused} and the payload, rounded up to 16 bytes. No record crosses the end of the ring: a skip record fills
 * the rest.
 *
 * The indices head and tail have a cache line each, and each side keeps the last value that it read of the
 * other's index. It reads that index again only when the queue seems full or empty, so other accesses cost no
 * cache miss for the indices.
 *
 * Ordering: stores of head and tail are seq_cst, and so are loads before a sleep and the flag that a sleeper
 * sets (ringlink.c). So either the sleeper sees the new index, or the other side sees the flag (as in
 * Dekker's algorithm). Fences are not used, because ThreadSanitizer does not understand them.
 *
 * The consumer checks every number that it reads. An impossible one gives SPCCL_ERR_FORMAT, and never an access
 * outside the ring. The queue does not remember that: the caller must stop using it. */
#ifndef SP_SPSC_H
#define SP_SPSC_H

#include "spccl.h"

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#define SP_SPSC_HEAD_BYTES 16u
/* An empty queue starts again at the beginning of the ring once it is SP_SPSC_HOT_BYTES and
 * SP_SPSC_HOT_RECORDS of its largest records into the ring. Few pages and cache lines are then touched while
 * the consumer keeps up. The skipped bytes count as used until the consumer has passed them. If a queue
 * started again too early, the producer would lack space to run ahead. Then both sides sleep in turns at
 * every message. */
#define SP_SPSC_HOT_BYTES (64u * 1024u)
#define SP_SPSC_HOT_RECORDS 8u

enum { SP_SPSC_MESSAGE = 0x53500001, SP_SPSC_SKIP = 0x53500002 };

_Static_assert(ATOMIC_LLONG_LOCK_FREE == 2 && ATOMIC_INT_LOCK_FREE == 2,
               "atomics must work between processes");

/* Aligned to 128 bytes: the CPU fetches cache lines of 64 bytes in pairs. */
typedef struct sp_spsc_ctl {
    _Alignas(128) _Atomic uint64_t head; /* bytes ever committed; the producer writes it */
    _Alignas(128) _Atomic uint64_t tail; /* bytes ever released; the consumer writes it */
} sp_spsc_ctl;

/* Private state of the producer (tx) and of the consumer (rx). Starts zeroed but for ctl, data and cap. */
typedef struct sp_spsc_tx {
    sp_spsc_ctl *ctl;
    uint8_t *data;
    uint64_t cap, head, tail; /* tail: as last read */
    uint64_t next;            /* head after the commit; equal to head: nothing is reserved */
    uint64_t largest;         /* bytes of the largest record so far */
} sp_spsc_tx;
typedef struct sp_spsc_rx {
    sp_spsc_ctl *ctl;
    uint8_t *data;
    uint64_t cap, tail, head; /* head: as last read */
    uint64_t next;            /* tail after the release; equal to tail: nothing is peeked */
    const void *message;      /* the peeked message */
    size_t message_bytes;
} sp_spsc_rx;

/* Largest message that fits at any position: a skip record and the message fill the ring at most. */
static inline size_t sp_spsc_message_max(uint64_t cap)
{
    return (size_t)(cap / 2 - SP_SPSC_HEAD_BYTES);
}
static inline uint64_t sp_spsc_record_bytes(uint64_t bytes)
{
    return SP_SPSC_HEAD_BYTES + ((bytes + 15u) & ~(uint64_t)15);
}
static inline void sp_spsc_put_head(uint8_t *at, uint32_t bytes, uint32_t kind)
{
    volatile uint32_t *p = (volatile uint32_t *)(void *)at;
    p[0] = bytes;
    p[1] = kind;
}

/* Read tail again. OK if it moved, AGAIN if not. */
static inline spccl_status sp_spsc_tx_look(sp_spsc_tx *q)
{
    uint64_t tail = atomic_load_explicit(&q->ctl->tail, memory_order_seq_cst);
    if (tail == q->tail)
        return SPCCL_AGAIN;
    if (q->head - tail > q->head - q->tail) /* tail went back, or past head */
        return SPCCL_ERR_FORMAT;
    q->tail = tail;
    return SPCCL_OK;
}

/* Reserve space for `bytes` (1 to sp_spsc_message_max). AGAIN if there is none now. Replaces a reservation
 * that was not committed. */
static inline spccl_status sp_spsc_reserve(sp_spsc_tx *q, size_t bytes, void **out)
{
    uint64_t total = sp_spsc_record_bytes(bytes), pos = q->head & (q->cap - 1), rest = q->cap - pos, skip = 0;
    if (total > q->largest)
        q->largest = total;
    if (pos >= SP_SPSC_HOT_BYTES && pos >= SP_SPSC_HOT_RECORDS * q->largest) {
        if (q->tail != q->head && (pos & (SP_SPSC_HOT_BYTES - 1)) < total &&
            sp_spsc_tx_look(q) == SPCCL_ERR_FORMAT)
            return SPCCL_ERR_FORMAT;
        if (q->tail == q->head)
            skip = rest;
    }
    if (rest < total)
        skip = rest;
    if (q->cap - (q->head - q->tail) < skip + total) {
        if (sp_spsc_tx_look(q) == SPCCL_ERR_FORMAT)
            return SPCCL_ERR_FORMAT;
        if (q->cap - (q->head - q->tail) < skip + total)
            return SPCCL_AGAIN;
    }
    if (skip != 0) {
        sp_spsc_put_head(q->data + pos, 0, SP_SPSC_SKIP);
        pos = 0;
    }
    sp_spsc_put_head(q->data + pos, (uint32_t)bytes, SP_SPSC_MESSAGE);
    q->next = q->head + skip + total;
    *out = q->data + pos + SP_SPSC_HEAD_BYTES;
    return SPCCL_OK;
}

/* Publish the reserved message. AGAIN if there is none. */
static inline spccl_status sp_spsc_commit(sp_spsc_tx *q)
{
    if (q->next == q->head)
        return SPCCL_AGAIN;
    q->head = q->next;
    atomic_store_explicit(&q->ctl->head, q->head, memory_order_seq_cst);
    return SPCCL_OK;
}

/* Read head again. OK if it moved, AGAIN if not. */
static inline spccl_status sp_spsc_rx_look(sp_spsc_rx *q)
{
    uint64_t head = atomic_load_explicit(&q->ctl->head, memory_order_seq_cst);
    if (head == q->head)
        return SPCCL_AGAIN;
    if (head - q->tail > q->cap || head - q->tail < q->head - q->tail || (head & 15u) != 0)
        return SPCCL_ERR_FORMAT;
    q->head = head;
    return SPCCL_OK;
}

/* Get the oldest message, which stays until sp_spsc_release. AGAIN if there is none. */
static inline spccl_status sp_spsc_peek(sp_spsc_rx *q, const void **out, size_t *bytes)
{
    uint64_t at = q->tail, pos;
    const volatile uint32_t *record;
    uint32_t n, kind;
    if (q->next == q->tail) {
        if (q->head == q->tail) {
            spccl_status r = sp_spsc_rx_look(q);
            if (r != SPCCL_OK)
                return r;
        }
        pos = at & (q->cap - 1);
        record = (const volatile uint32_t *)(const void *)(q->data + pos);
        kind = record[1];
        if (kind == SP_SPSC_SKIP) {
            at += q->cap - pos;
            if (q->head - at > q->cap || q->head == at) /* a message must follow */
                return SPCCL_ERR_FORMAT;
            pos = 0;
            record = (const volatile uint32_t *)(const void *)q->data;
            kind = record[1];
        }
        n = record[0];
        if (kind != SP_SPSC_MESSAGE || n == 0 || sp_spsc_record_bytes(n) > q->head - at ||
            sp_spsc_record_bytes(n) > q->cap - pos)
            return SPCCL_ERR_FORMAT;
        q->message = q->data + pos + SP_SPSC_HEAD_BYTES;
        q->message_bytes = n;
        q->next = at + sp_spsc_record_bytes(n);
    }
    *out = q->message;
    *bytes = q->message_bytes;
    return SPCCL_OK;
}

/* Give the space of the peeked message back. AGAIN if nothing was peeked. */
static inline spccl_status sp_spsc_release(sp_spsc_rx *q)
{
    if (q->next == q->tail)
        return SPCCL_AGAIN;
    q->tail = q->next;
    atomic_store_explicit(&q->ctl->tail, q->tail, memory_order_seq_cst);
    return SPCCL_OK;
}

#endif
