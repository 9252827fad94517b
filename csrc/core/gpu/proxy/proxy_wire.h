/* proxy_wire.h - the messages between proxies, and the checks of what a peer sends. Pure
 * functions. proxy.h says what the positions mean.
 *
 * A message (little-endian): u32 "SPRX", u32 number of credits, u32 number of spans, u32 zero; then one entry of
 * 24 bytes for each credit and after these for each span: u32 queue, u32 worker, u64 position, u32 bytes, u32 skipped
 * bytes (both 0 in a credit); then the bytes of the spans without skipped ones, in the order of their entries. Between
 * ranks whose rings lie in GPU memory no bytes of spans follow. */
#ifndef SP_PROXY_WIRE_H
#define SP_PROXY_WIRE_H

#include "core/base/status.h"
#include "core/contract/remote.h"

#include <stdbool.h>

#define SP_PROXY_HEAD_BYTES 16u
#define SP_PROXY_ENTRY_BYTES 24u

/* The rings to and from one peer, [n_queues * n_workers] each: index queue * n_workers + worker. */
typedef struct sp_proxy_positions {
    uint64_t *sent;    /* of frames for the peer: up to here they were sent */
    uint64_t *free_to; /* the credit that the peer gave for them */
    uint64_t *arrived; /* of frames of the peer: up to here they have arrived */
    uint64_t *freed;   /* the credit that this rank gave for them */
    uint32_t n_queues; /* 2; 1 if this pair of ranks exchanges no results */
    uint32_t n_workers, ring_bytes;
    uint32_t proxy, n_proxies; /* the workers of which proxy */
    bool direct; /* frames are put into the rings: a message has positions alone, and nothing is skipped */
} sp_proxy_positions;

/* The proxy that serves a worker: all workers of a change counter have the same one. */
static inline uint32_t sp_proxy_of(uint32_t worker, uint32_t n_proxies)
{
    return worker / SP_REMOTE_COUNTER_WORKERS % n_proxies;
}

/* A run: `bytes` of a ring from `position` on; its bytes may go past the end of the ring to offset 0. Its end is a
 * position that the sender's kernel announced. The last `skipped` bytes before the end of the ring hold no frame: they
 * count, but do not travel. A credit: the ring is free up to `position`. */
typedef struct sp_proxy_entry {
    bool is_span;
    uint32_t queue, worker;
    uint64_t position;
    uint32_t bytes, skipped;
} sp_proxy_entry;

/* Write a header, and entry number i of a message. */
void sp_proxy_put_head(uint8_t *message, uint32_t n_credits, uint32_t n_spans);
void sp_proxy_put_entry(uint8_t *message, uint32_t i, const sp_proxy_entry *e);
/* The largest credit of a receiver that has taken all frames up to `end`: the position at which the next frame
 * starts. Where no header fits before the end of the ring, that is the ring's start. The receiver gives credit for
 * the bytes between before the sender has skipped them. */
uint64_t sp_proxy_credit_max(uint64_t end, uint32_t ring_bytes);
/* Credits may wait for frames that go the same way, at most so long. The messages of a call then carry the credits of
 * the call before. */
#define SP_PROXY_CREDIT_WAIT_NS INT64_C(100000)
/* May credits wait, that were first seen waited_ns ago? most_bytes: the most that one of them frees. The sender can
 * use nearly all of its rings meanwhile. */
static inline bool sp_proxy_may_wait(uint64_t most_bytes, uint32_t ring_bytes, int64_t waited_ns)
{
    return most_bytes < ring_bytes / 8 && waited_ns < SP_PROXY_CREDIT_WAIT_NS;
}
/* "inputs" or "results", for error texts. */
const char *sp_proxy_queue_name(uint32_t queue);
/* How many bytes a span skips at the end of the ring. False: what lies in the ring is no row of frames. */
bool sp_proxy_find_skip(const uint8_t *ring, uint32_t ring_bytes, const sp_proxy_entry *span,
                        uint32_t *skipped);
/* Copy the bytes of a span that travel out of its ring, or into it. Copied in, skipped bytes start with
 * SP_INBOX_WRAP where a header would fit. */
void sp_proxy_read_span(uint8_t *to, const uint8_t *ring, uint32_t ring_bytes, const sp_proxy_entry *span);
void sp_proxy_write_span(uint8_t *ring, uint32_t ring_bytes, const sp_proxy_entry *span, const uint8_t *from);
/* The longest run: bytes that are skipped at the end of a ring, and a whole ring. */
size_t sp_proxy_span_max(uint32_t ring_bytes);
static inline size_t sp_proxy_data_off(uint32_t n_entries)
{
    return sp_align_up(SP_PROXY_HEAD_BYTES + (size_t)n_entries * SP_PROXY_ENTRY_BYTES, 16);
}

/* Reads the entries of a message in order. */
typedef struct sp_proxy_reader {
    const uint8_t *message, *data; /* data: of the next run */
    size_t data_bytes;             /* from there to the end */
    uint32_t n_credits, n_entries, next;
} sp_proxy_reader;

/* Errors: FORMAT (not a message). */
spccl_status sp_proxy_open_message(sp_proxy_reader *r, const uint8_t *message, size_t bytes);
/* Read entry number i, wherever the reader is: false if there is none or its ring does not exist. Nothing else is
 * checked. */
bool sp_proxy_peek_entry(const sp_proxy_reader *r, const sp_proxy_positions *at, uint32_t i,
                         sp_proxy_entry *out);
/* The next entry; of a span, *data = its bytes. Checks every number against `at`, which it does not change: a span
 * starts where the last one ended and fits into what this rank freed; a credit does not go back, and goes at most to
 * sp_proxy_credit_max of what was sent. Returns AGAIN after the last entry. Errors: FORMAT (with what was wanted and what came). */
spccl_status sp_proxy_next_entry(sp_proxy_reader *r, const sp_proxy_positions *at, sp_proxy_entry *out,
                                 const uint8_t **data);

#endif
