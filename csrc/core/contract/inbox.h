/* inbox.h - the layout of a rank's inbox: GPU memory in which its peers write during fused collectives.
 * A contract for host and device, in C and CUDA: where each part lies, and who may write it. Of formats it
 * knows the largest size of a frame, and nothing else. In groups on several hosts inboxes have other offsets
 * (contract/remote.h); rings, tails and credits are the same.
 *
 * Each rank has one inbox in its GPU's memory. All its peers map it. The work of a collective is split over
 * `n_workers` workers of a few warps each. Worker q of one rank exchanges frames with worker q of every other
 * rank, and with no other worker. Each ordered pair of ranks has two queues per worker: contributions travel
 * in queue INPUT, results in queue RESULT. Each queue is one ring of bytes in the receiver's inbox.
 *
 * - ring: frames in order; each starts where the last one ended. A frame never wraps. If it does not fit into
 *   the bytes before the end, the sender skips them, and the frame starts at offset 0. If a header would fit
 *   into the skipped bytes, they start with SP_INBOX_WRAP.
 * - tail: in the receiver's inbox, written by the sender after the frames and after a system-scope fence. It
 *   is the position up to which frames are there. Positions only grow; skipped bytes count.
 * - credit: in the sender's inbox, written by the receiver: the position up to which the ring is free again.
 *   Where no header fits before the end of the ring, the credit may include these bytes before they are skipped.
 * - state of a worker: read and written by its own rank only. Positions survive from launch to launch, so
 *   that a captured CUDA graph can be replayed.
 *
 * A receiver writes a credit after each frame that it has taken. A sender waits until its frame fits. When
 * all earlier frames have been taken, skipped bytes and a frame of any size must fit together. A ring
 * therefore holds at least SP_INBOX_RING_FRAMES_MIN frames.
 * docs/ALGORITHMS.md has the proof that no rank waits for ever. */
#ifndef SP_INBOX_H
#define SP_INBOX_H

#include "core/base/bits.h"

#define SP_GPU_RANKS_MAX 64      /* of a group */
#define SP_GPU_HOST_RANKS_MAX 16 /* of a group on one host */
/* The most bytes of a slice before encoding: in the codec, and in a fused collective. Smaller slices let more
 * workers run on one SM. */
#define SP_GPU_SLICE_BYTES 16384u
#define SP_INBOX_SLICE_BYTES 8192u
/* The largest frame of a slice: a header and all values. A forced pici frame may be longer: its index may take
 * more bytes than the zeros that it leaves out. (A pici tile has a whole index even if the slice covers half
 * of the tile or less.)
 * When format tile or coo is forced, slices are smaller. */
#define SP_INBOX_FRAME_BYTES (SP_INBOX_SLICE_BYTES + 640u)
#define SP_INBOX_RING_FRAMES_MIN 2u
#define SP_INBOX_RING_FRAMES_MAX 4u
/* Stands where a header would stand and says that the next frame starts at offset 0. The first word of a
 * frame is SP_FRAME_MAGIC instead. */
#define SP_INBOX_WRAP 0x50415257u /* "WRAP" */
/* Size of the staging buffer in shared memory for frames of formats tile and coo. A receiver refuses longer
 * frames of these formats. */
#define SP_GPU_STAGE_BYTES 2192u

enum sp_inbox_queue {
    SP_INBOX_INPUT = 0,
    SP_INBOX_RESULT = 1,
    SP_INBOX_QUEUES = 2, /* that each pair of ranks of one host has */
    SP_INBOX_RELAYED = 2 /* only in groups on several hosts (contract/remote.h) */
};

typedef struct sp_inbox_shape {
    uint32_t world_size;
    uint32_t n_workers;   /* the same on all ranks */
    uint32_t ring_frames; /* the same on all ranks: a ring holds this many of the largest frames */
    uint32_t n_here; /* in a group with relays (contract/remote.h): the ranks of each host; otherwise 0 */
} sp_inbox_shape;

static inline SP_HD uint32_t sp_inbox_ring_bytes(sp_inbox_shape s)
{
    return s.ring_frames * SP_INBOX_FRAME_BYTES;
}

/* One worker's positions, [queue][peer slot]. */
typedef struct sp_inbox_state {
    uint64_t sent[SP_INBOX_QUEUES][SP_GPU_HOST_RANKS_MAX];  /* sender: position of the next frame to send */
    uint64_t taken[SP_INBOX_QUEUES][SP_GPU_HOST_RANKS_MAX]; /* receiver: position of the next frame to take */
    /* The same positions as offsets in the ring, so that a kernel need not divide. Such an offset may equal
     * the length of the ring; that means offset 0. */
    uint32_t sent_off[SP_INBOX_QUEUES][SP_GPU_HOST_RANKS_MAX],
        taken_off[SP_INBOX_QUEUES][SP_GPU_HOST_RANKS_MAX];
    uint64_t frame_bytes; /* statistics: bytes of frames sent */
    uint64_t n_frames[5]; /* statistics: frames sent, by format */
    uint32_t claimed; /* in worker 0's state: 1 + the worker that writes the report; 0 = no worker does yet */
    uint32_t pad;
} sp_inbox_state;

/* The tag of a frame: its dtype, and the max_ctas of the call (0: no limit). Ranks that give different limits
 * split the work differently. So the frames in inboxes hold max_ctas, in the header's field `reserved`. The
 * frames of the codec hold 0 there. */
static inline SP_HD uint32_t sp_frame_tag(uint32_t dtype, uint32_t max_ctas)
{
    return dtype | max_ctas << 8;
}
static inline SP_HD uint32_t sp_tag_dtype(uint32_t tag)
{
    return tag & 0xffu;
}
static inline SP_HD uint32_t sp_tag_max_ctas(uint32_t tag)
{
    return tag >> 8;
}

/* A peer's number among the other ranks, 0 to world_size - 2, seen from `rank`: rank + 1 has slot 0. */
static inline SP_HD uint32_t sp_inbox_slot(uint32_t rank, uint32_t peer, uint32_t world_size)
{
    return peer > rank ? peer - rank - 1 : peer + world_size - rank - 1;
}
/* The peer in a slot. */
static inline SP_HD uint32_t sp_inbox_peer(uint32_t rank, uint32_t slot, uint32_t world_size)
{
    return rank + 1 + slot < world_size ? rank + 1 + slot : rank + 1 + slot - world_size;
}

/* A ring of an inbox: [queue][slot of the sender][worker]. */
static inline SP_HD size_t sp_inbox_index(sp_inbox_shape s, uint32_t queue, uint32_t slot, uint32_t worker)
{
    return ((size_t)queue * (s.world_size - 1) + slot) * s.n_workers + worker;
}
static inline SP_HD size_t sp_inbox_n_rings(sp_inbox_shape s)
{
    return (size_t)SP_INBOX_QUEUES * (s.world_size - 1) * s.n_workers;
}
static inline SP_HD size_t sp_inbox_ring_off(sp_inbox_shape s, uint32_t queue, uint32_t slot, uint32_t worker)
{
    return sp_inbox_index(s, queue, slot, worker) * sp_inbox_ring_bytes(s);
}
/* Tails: u64, [queue][slot of the sender][worker], after the rings. */
static inline SP_HD size_t sp_inbox_tail_off(sp_inbox_shape s, uint32_t queue, uint32_t slot, uint32_t worker)
{
    return sp_inbox_n_rings(s) * sp_inbox_ring_bytes(s) + sp_inbox_index(s, queue, slot, worker) * 8;
}
/* Credits: u64, [queue][slot of the receiver][worker], after the tails. */
static inline SP_HD size_t sp_inbox_credit_off(sp_inbox_shape s, uint32_t queue, uint32_t slot,
                                               uint32_t worker)
{
    return sp_inbox_n_rings(s) * ((size_t)sp_inbox_ring_bytes(s) + 8) +
           sp_inbox_index(s, queue, slot, worker) * 8;
}
/* State: sp_inbox_state, [worker], after the credits. */
static inline SP_HD size_t sp_inbox_state_off(sp_inbox_shape s, uint32_t worker)
{
    return sp_inbox_n_rings(s) * ((size_t)sp_inbox_ring_bytes(s) + 16) +
           (size_t)worker * sizeof(sp_inbox_state);
}
/* Bytes of an inbox. All of them are zero before the first launch. */
static inline SP_HD size_t sp_inbox_bytes(sp_inbox_shape s)
{
    return sp_inbox_state_off(s, s.n_workers);
}

#endif
