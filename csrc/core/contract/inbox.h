/* inbox.h - the memory of the fused GPU collectives: where a rank's peers write to, and who may write what.
 * A contract: the same offsets on host and device, in C and CUDA. Knows no formats beyond a frame's largest
 * size.
 *
 * A rank has one inbox in its GPU's memory, mapped by all its peers. Work is cut over `n_workers` workers
 * (a few warps each); worker q of one rank talks with worker q of the others and with nobody else. For each
 * pair of ranks, each worker and each of two kinds there is one ring of bytes in the receiver's inbox:
 *
 * - ring: frames in order, each starting where the last ended. A frame never wraps: if fewer bytes are left
 *   before the end than it needs, the rest is skipped and it starts at 0. If a header would fit there, its
 *   place holds SP_INBOX_WRAP.
 * - tail: in the receiver's inbox, written by the sender after the frame (release, system scope): how far the
 *   sender has come, as a position that only grows (skipped bytes count).
 * - credit: in the sender's inbox, written by the receiver: the position up to which the ring is free again.
 * - state of a worker, private to the rank: positions survive from launch to launch, so that a captured CUDA
 *   graph replays.
 *
 * A receiver reports each frame that it has taken. A sender waits until its frame fits; when all before
 * it has been taken, a skip and a frame of any size must fit: a ring has at least SP_INBOX_RING_FRAMES_MIN.
 * docs/ALGORITHMS.md has the proof that no rank waits for ever. */
#ifndef SP_INBOX_H
#define SP_INBOX_H

#include "core/base/bits.h"

#define SP_GPU_RANKS_MAX 16
/* Dense bytes of a slice, at most: of the codec, and of a fused collective, where smaller ones let more
 * workers share a multiprocessor. */
#define SP_GPU_SLICE_BYTES 16384u
#define SP_INBOX_SLICE_BYTES 8192u
/* The largest frame of a slice: dense, with its header, or pici where the index is longer than what it saves
 * (a tile's index is whole even if the slice is half a tile or less). Forced formats tile and coo take
 * smaller slices. */
#define SP_INBOX_FRAME_BYTES (SP_INBOX_SLICE_BYTES + 640u)
#define SP_INBOX_RING_FRAMES_MIN 2u
#define SP_INBOX_RING_FRAMES_MAX 4u
/* The first word of what is no frame (whose first word is SP_FRAME_MAGIC): the next one starts at 0. */
#define SP_INBOX_WRAP 0x50415257u /* "WRAP" */
/* Frames of formats tile and coo are put together on chip in so many bytes; a receiver refuses longer ones.
 */
#define SP_GPU_STAGE_BYTES 2192u

enum sp_inbox_queue { SP_INBOX_INPUT = 0, SP_INBOX_RESULT = 1, SP_INBOX_QUEUES = 2 };

typedef struct sp_inbox_shape {
    uint32_t world_size;  /* 1 to SP_GPU_RANKS_MAX */
    uint32_t n_workers;   /* the same on all ranks, as is the next */
    uint32_t ring_frames; /* the largest frames that a ring holds */
} sp_inbox_shape;

static inline SP_HD uint32_t sp_inbox_ring_bytes(sp_inbox_shape s)
{
    return s.ring_frames * SP_INBOX_FRAME_BYTES;
}

/* One worker's positions, by queue and peer slot. */
typedef struct sp_inbox_state {
    uint64_t sent[SP_INBOX_QUEUES][SP_GPU_RANKS_MAX];  /* as sender: next frame goes here */
    uint64_t taken[SP_INBOX_QUEUES][SP_GPU_RANKS_MAX]; /* as receiver: next frame is here */
    /* The same as places in the ring, 0 to its length (which means 0), so that a kernel need not divide. */
    uint32_t sent_off[SP_INBOX_QUEUES][SP_GPU_RANKS_MAX], taken_off[SP_INBOX_QUEUES][SP_GPU_RANKS_MAX];
    uint64_t frame_bytes; /* statistics: bytes of frames sent */
    uint64_t n_frames[5]; /* statistics: frames sent, by format */
    uint32_t claimed;     /* of worker 0: 1 + the worker that writes the report; 0 = none yet */
    uint32_t pad;
} sp_inbox_state;

/* A peer's place among the others, 0 to world_size - 2, seen from `rank`: the one behind it first. */
static inline SP_HD uint32_t sp_inbox_slot(uint32_t rank, uint32_t peer, uint32_t world_size)
{
    return peer > rank ? peer - rank - 1 : peer + world_size - rank - 1;
}
/* The peer in a slot. */
static inline SP_HD uint32_t sp_inbox_peer(uint32_t rank, uint32_t slot, uint32_t world_size)
{
    return rank + 1 + slot < world_size ? rank + 1 + slot : rank + 1 + slot - world_size;
}

/* Rings of an inbox: [queue][slot of the sender][worker]. */
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
/* Tails: u64, [queue][slot of the sender][worker], behind the rings. */
static inline SP_HD size_t sp_inbox_tail_off(sp_inbox_shape s, uint32_t queue, uint32_t slot, uint32_t worker)
{
    return sp_inbox_n_rings(s) * sp_inbox_ring_bytes(s) + sp_inbox_index(s, queue, slot, worker) * 8;
}
/* Credits: u64, [queue][slot of the receiver][worker], behind the tails. */
static inline SP_HD size_t sp_inbox_credit_off(sp_inbox_shape s, uint32_t queue, uint32_t slot,
                                               uint32_t worker)
{
    return sp_inbox_n_rings(s) * ((size_t)sp_inbox_ring_bytes(s) + 8) +
           sp_inbox_index(s, queue, slot, worker) * 8;
}
/* State: sp_inbox_state, [worker], behind the credits. */
static inline SP_HD size_t sp_inbox_state_off(sp_inbox_shape s, uint32_t worker)
{
    return sp_inbox_n_rings(s) * ((size_t)sp_inbox_ring_bytes(s) + 16) +
           (size_t)worker * sizeof(sp_inbox_state);
}
/* Bytes of an inbox; all zero before the first launch. */
static inline SP_HD size_t sp_inbox_bytes(sp_inbox_shape s)
{
    return sp_inbox_state_off(s, s.n_workers);
}

#endif
