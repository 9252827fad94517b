/* spsc.h - a one-producer one-consumer queue of messages in shared memory, C11 atomics.
 * Contract of the map: includes nothing of ours. Both ends may live in different processes.
 *
 * The data is a ring of `cap` bytes (a power of two); positions count bytes for ever and never wrap in
 * practice (2^64). A record is 16 bytes of head {u32 bytes, u32 kind, 8 unused} and the payload, rounded
 * up to 16, and never crosses the end of the ring: a skip record covers what is left there. head and tail
 * live on cache lines of their own, and each side keeps its last look at the other's, so that a queue that
 * is neither full nor empty costs no cache miss for the indices.
 *
 * Ordering: head and tail are stored and, before a sleep, loaded with seq_cst, and so is the flag that a
 * sleeper sets (ringlink.c). Then either the sleeper sees the new index or the other side sees the flag
 * (Dekker); fences are not used because ThreadSanitizer does not understand them.
 *
 * A consumer trusts no number that it reads: what cannot be is SP_SPSC_BROKEN, never an access outside
 * the ring. Broken stays broken only by the caller's will: stop using the queue. */
#ifndef SP_SPSC_H
#define SP_SPSC_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#define SP_SPSC_HEAD_BYTES 16u
/* A drained queue starts again at its beginning once it has come this far, and SP_SPSC_HOT_RECORDS records of
 * the largest kind so far: the pages and the cache lines touched stay few while the consumer keeps up. What
 * is skipped counts as used until the consumer has passed it, so a queue that starts again too early has no
 * room left for the producer to run ahead, and both sides sleep in turns at every message. */
#define SP_SPSC_HOT_BYTES (64u * 1024u)
#define SP_SPSC_HOT_RECORDS 8u

enum { SP_SPSC_MESSAGE = 0x53500001, SP_SPSC_SKIP = 0x53500002 };
typedef enum sp_spsc_result { SP_SPSC_OK, SP_SPSC_AGAIN, SP_SPSC_BROKEN } sp_spsc_result;

_Static_assert(ATOMIC_LLONG_LOCK_FREE == 2 && ATOMIC_INT_LOCK_FREE == 2,
               "atomics must work between processes");

/* 128: neighbouring lines are fetched in pairs. */
typedef struct sp_spsc_ctl {
    _Alignas(128) _Atomic uint64_t head; /* bytes ever committed; the producer writes it */
    _Alignas(128) _Atomic uint64_t tail; /* bytes ever released; the consumer writes it */
} sp_spsc_ctl;

/* Each side's private state; zeroed, then ctl, data and cap set. */
typedef struct sp_spsc_tx {
    sp_spsc_ctl *ctl;
    uint8_t *data;
    uint64_t cap, head, tail; /* tail: last look */
    uint64_t next;            /* head after commit; equal to head: nothing is reserved */
    uint64_t largest;         /* record so far */
} sp_spsc_tx;
typedef struct sp_spsc_rx {
    sp_spsc_ctl *ctl;
    uint8_t *data;
    uint64_t cap, tail, head; /* head: last look */
    uint64_t next;            /* tail after release; equal to tail: nothing is peeked */
    const void *message;      /* the peeked one */
    size_t message_bytes;
} sp_spsc_rx;

/* The largest message that fits whatever the position: a skip and the message need at most the ring. */
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

/* Look at tail again: OK if it moved, AGAIN if not. */
static inline sp_spsc_result sp_spsc_tx_look(sp_spsc_tx *q)
{
    uint64_t tail = atomic_load_explicit(&q->ctl->tail, memory_order_seq_cst);
    if (tail == q->tail)
        return SP_SPSC_AGAIN;
    if (q->head - tail > q->head - q->tail) /* went back, or past head */
        return SP_SPSC_BROKEN;
    q->tail = tail;
    return SP_SPSC_OK;
}

/* Room for `bytes` (1 .. sp_spsc_message_max): AGAIN if there is none now. A reservation that was not
 * committed is given up by the next one. */
static inline sp_spsc_result sp_spsc_reserve(sp_spsc_tx *q, size_t bytes, void **out)
{
    uint64_t total = sp_spsc_record_bytes(bytes), pos = q->head & (q->cap - 1), rest = q->cap - pos, skip = 0;
    if (total > q->largest)
        q->largest = total;
    if (pos >= SP_SPSC_HOT_BYTES && pos >= SP_SPSC_HOT_RECORDS * q->largest) {
        if (q->tail != q->head && (pos & (SP_SPSC_HOT_BYTES - 1)) < total &&
            sp_spsc_tx_look(q) == SP_SPSC_BROKEN)
            return SP_SPSC_BROKEN;
        if (q->tail == q->head)
            skip = rest;
    }
    if (rest < total)
        skip = rest;
    if (q->cap - (q->head - q->tail) < skip + total) {
        if (sp_spsc_tx_look(q) == SP_SPSC_BROKEN)
            return SP_SPSC_BROKEN;
        if (q->cap - (q->head - q->tail) < skip + total)
            return SP_SPSC_AGAIN;
    }
    if (skip != 0) {
        sp_spsc_put_head(q->data + pos, 0, SP_SPSC_SKIP);
        pos = 0;
    }
    sp_spsc_put_head(q->data + pos, (uint32_t)bytes, SP_SPSC_MESSAGE);
    q->next = q->head + skip + total;
    *out = q->data + pos + SP_SPSC_HEAD_BYTES;
    return SP_SPSC_OK;
}

/* Publish the reservation; AGAIN if there is none. */
static inline sp_spsc_result sp_spsc_commit(sp_spsc_tx *q)
{
    if (q->next == q->head)
        return SP_SPSC_AGAIN;
    q->head = q->next;
    atomic_store_explicit(&q->ctl->head, q->head, memory_order_seq_cst);
    return SP_SPSC_OK;
}

/* Look at head again: OK if it moved, AGAIN if not. */
static inline sp_spsc_result sp_spsc_rx_look(sp_spsc_rx *q)
{
    uint64_t head = atomic_load_explicit(&q->ctl->head, memory_order_seq_cst);
    if (head == q->head)
        return SP_SPSC_AGAIN;
    if (head - q->tail > q->cap || head - q->tail < q->head - q->tail || (head & 15u) != 0)
        return SP_SPSC_BROKEN;
    q->head = head;
    return SP_SPSC_OK;
}

/* The oldest message: AGAIN if there is none. It stays until sp_spsc_release. */
static inline sp_spsc_result sp_spsc_peek(sp_spsc_rx *q, const void **out, size_t *bytes)
{
    uint64_t at = q->tail, pos;
    const volatile uint32_t *record;
    uint32_t n, kind;
    if (q->next == q->tail) {
        if (q->head == q->tail) {
            sp_spsc_result r = sp_spsc_rx_look(q);
            if (r != SP_SPSC_OK)
                return r;
        }
        pos = at & (q->cap - 1);
        record = (const volatile uint32_t *)(const void *)(q->data + pos);
        kind = record[1];
        if (kind == SP_SPSC_SKIP) {
            at += q->cap - pos;
            if (q->head - at > q->cap || q->head == at) /* a message must follow */
                return SP_SPSC_BROKEN;
            pos = 0;
            record = (const volatile uint32_t *)(const void *)q->data;
            kind = record[1];
        }
        n = record[0];
        if (kind != SP_SPSC_MESSAGE || n == 0 || sp_spsc_record_bytes(n) > q->head - at ||
            sp_spsc_record_bytes(n) > q->cap - pos)
            return SP_SPSC_BROKEN;
        q->message = q->data + pos + SP_SPSC_HEAD_BYTES;
        q->message_bytes = n;
        q->next = at + sp_spsc_record_bytes(n);
    }
    *out = q->message;
    *bytes = q->message_bytes;
    return SP_SPSC_OK;
}

/* Give the peeked message's room back; AGAIN if nothing was peeked. */
static inline sp_spsc_result sp_spsc_release(sp_spsc_rx *q)
{
    if (q->next == q->tail)
        return SP_SPSC_AGAIN;
    q->tail = q->next;
    atomic_store_explicit(&q->ctl->tail, q->tail, memory_order_seq_cst);
    return SP_SPSC_OK;
}

#endif
