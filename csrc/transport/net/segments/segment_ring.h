/* segment_ring.h - the bytes of one queue on one side, as a ring of SP_SEGMENTS segments, for transports ncclnet
 * and ib. A plugin, or a device, moves segments: segment k of the sender's ring arrives as segment k of the receiver's ring, at the same offset. So the
 * receiver's ring is a copy of the sender's, and a message that spans segments is contiguous in both (mirror.h).
 *
 * A segment may be sent before it is full. The next message then begins at the next segment. In memory a message
 * is a record (record.h).
 *
 * Two threads may use a ring: the endpoint's caller, and the thread that calls the plugin. (Transport ib has no thread:
 * its caller does both.) `allowed` and `done` pass
 * segments between them; the rest belongs to one of the two. */
#ifndef SP_SEGMENT_RING_H
#define SP_SEGMENT_RING_H

#include "core/base/status.h"
#include "transport/common/mirror.h"
#include "transport/common/record.h"

#include <stdatomic.h>

#define SP_SEGMENTS 16u /* plugins take 32 requests per connection */

typedef struct sp_segment_ring {
    sp_mirror memory;
    size_t segment_bytes;
    uint32_t queue;
    /* Sender: the caller allows segments < allowed to be sent, the thread has sent those < done.
     * Receiver: the caller allows segments < allowed to be filled, the thread has filled those < done. */
    _Atomic uint64_t allowed, done;
    uint32_t bytes[SP_SEGMENTS]; /* of segment k, at k % SP_SEGMENTS; set by whoever passes it */
    /* the caller's */
    uint64_t
        at; /* sender: end of the last message; receiver: the next message. It counts from the first byte ever sent; never wraps */
    uint64_t n_messages;      /* committed, or released */
    uint64_t left_at, n_left; /* sender: messages that have left, and where the first that has not begins */
    uint64_t reserved_at;
    size_t reserved; /* payload bytes; 0: nothing is reserved */
    bool blocked;    /* the last reserve found no space */
} sp_segment_ring;

/* bytes: a power of two, at least SP_SEGMENTS pages. Errors: NOMEM. */
spccl_status sp_segment_ring_open(sp_segment_ring *r, size_t bytes, uint32_t queue, bool receiver);
void sp_segment_ring_close(sp_segment_ring *r);

/* Sender. NULL: no space now. A second reserve replaces the first; it never fails if it asks for less. */
void *sp_segment_ring_reserve(sp_segment_ring *r, size_t bytes);
/* True if segments may now be sent that could not before. */
bool sp_segment_ring_commit(sp_segment_ring *r);
/* Allow the last segment to be sent although it is not full, if few others are under way. True if it did so. */
bool sp_segment_ring_push(sp_segment_ring *r);
/* Messages that have left. */
uint64_t sp_segment_ring_left(sp_segment_ring *r);

/* Receiver. AGAIN: no whole message yet. Errors: FORMAT (the text is a clause). */
spccl_status sp_segment_ring_peek(const sp_segment_ring *r, size_t bytes_max, const void **out,
                                  size_t *bytes);
/* Drop the message that peek returned, which has `bytes` bytes. True if the thread may fill more segments and
 * had few left. */
bool sp_segment_ring_release(sp_segment_ring *r, size_t bytes);

/* Where segment k is. */
static inline uint8_t *sp_segment_ring_segment(const sp_segment_ring *r, uint64_t k)
{
    return r->memory.data + (size_t)(k % SP_SEGMENTS) * r->segment_bytes;
}

#endif
