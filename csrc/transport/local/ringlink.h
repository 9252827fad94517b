/* ringlink.h - what inproc and shm share: the queues between two ranks as spsc queues in memory that both
 * see, and the bells that wake a sleeping rank. A link knows nothing of how that memory came about or
 * how a dead peer is noticed.
 *
 * One block of memory per direction, made by the producer: flags, indices, then the data of each queue.
 * Untouched pages cost nothing. A bell is an eventfd; it is rung only for a rank that says it sleeps. */
#ifndef SP_RINGLINK_H
#define SP_RINGLINK_H

#include "core/contract/transport.h"
#include "transport/local/spsc.h"

#define SP_RING_DATA_OFFSET 4096u

/* sp_transport.ns_per_byte of inproc and shm. Measured on an AMD EPYC (Zen 4, 2 cores of a virtual machine,
 * L2 1 MiB): 64 KiB chunks through a ring between two threads take 0.11 ns/byte. 0.04 of these are the copies
 * in and out, which encode and decode count themselves. The rest is rounded up, because several pairs share
 * the memory. */
#define SP_LOCAL_NS_PER_BYTE 0.10

/* Start of a block. Zeroed memory is a valid, empty one. */
typedef struct sp_ring_block {
    _Alignas(128) _Atomic uint32_t consumer_sleeps; /* set by a consumer that arms, taken by who rings */
    _Alignas(128) _Atomic uint32_t producer_waits;  /* mask of queues; the same for a producer without room */
    _Alignas(128) _Atomic uint32_t signal;          /* producer -> consumer: look at the side channel */
    sp_spsc_ctl queues[SP_QUEUES_MAX];
} sp_ring_block;
_Static_assert(sizeof(sp_ring_block) <= SP_RING_DATA_OFFSET, "indices fit before the data");

typedef struct sp_ring_link {
    int rank, peer, n_queues, wake_fd; /* bell: the peer's, borrowed */
    sp_ring_block *out, *in;           /* borrowed */
    sp_spsc_tx tx[SP_QUEUES_MAX];
    sp_spsc_rx rx[SP_QUEUES_MAX];
    uint64_t armed_head[SP_QUEUES_MAX]; /* rx[i].head as of the last arm: what came before it is no news */
    uint32_t blocked;                   /* queues whose last reserve found no room */
    bool up, gone;
    bool gone_is_new;    /* `gone` is not yet told by arm */
    bool broken;         /* the peer wrote what cannot be; sticky */
    char gone_text[160]; /* why it is gone, for error texts */
} sp_ring_link;

/* Bytes of a block for these queues; queue_bytes is a power of two. */
size_t sp_ring_block_bytes(int n_queues, size_t queue_bytes);
/* Both blocks hold sp_ring_block_bytes; borrowed as long as the link is used. Sets `up`. */
void sp_ring_link_init(sp_ring_link *link, int rank, int peer, int n_queues, size_t queue_bytes, void *out,
                       void *in, int wake_fd);
/* The peer is gone: what it sent is still delivered. `text` is a clause: "closed its endpoint". */
void sp_ring_link_set_gone(sp_ring_link *link, const char *text);

/* As in transport.h. */
spccl_status sp_ring_reserve(sp_ring_link *link, int queue, size_t bytes, void **out);
spccl_status sp_ring_commit(sp_ring_link *link, int queue);
spccl_status sp_ring_peek(sp_ring_link *link, int queue, const void **out, size_t *bytes);
spccl_status sp_ring_release(sp_ring_link *link, int queue);
spccl_status sp_ring_arm(sp_ring_link *link);
void sp_ring_disarm(sp_ring_link *link);

/* Wake the peer whatever it does: it shall look at the side channel. */
void sp_ring_signal(sp_ring_link *link);
/* True once per sp_ring_signal of the peer. */
bool sp_ring_take_signal(sp_ring_link *link);

/* A non-blocking eventfd; ring it; take all rings. */
spccl_status sp_wake_open(int *out);
void sp_wake_signal(int wake_fd);
void sp_wake_drain(int wake_fd);

#endif
