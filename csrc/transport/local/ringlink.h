/* ringlink.h - a link of inproc and shm: the queues between two ranks in memory that both see (spsc.h), and
 * wake-ups. The transports make that memory, and notice a dead peer; a link does neither.
 *
 * Each direction has one block of memory, which the producer makes: flags, indices, then the data of each
 * queue. Untouched pages cost nothing. A wake-up is a write to the peer's eventfd. It is written only if the
 * peer has said that it sleeps. */
#ifndef SP_RINGLINK_H
#define SP_RINGLINK_H

#include "core/contract/transport.h"
#include "transport/local/spsc.h"

#define SP_RING_DATA_OFFSET 4096u

/* ns_per_byte of sp_transport, for inproc and shm. */
double sp_local_ns_per_byte(sp_endpoint *ep, int peer);

/* The start of a block. Zeroed memory is a valid block with empty queues. */
typedef struct sp_ring_block {
    /* The consumer sets it in arm and clears it in disarm. The producer that wakes it clears it. */
    _Alignas(128) _Atomic uint32_t consumer_sleeps;
    _Alignas(128) _Atomic uint32_t producer_waits; /* mask of the queues whose producer waits for space */
    _Alignas(128) _Atomic uint32_t signal;         /* set: look for an abort, or for the peer's end */
    sp_spsc_ctl queues[SP_QUEUES_MAX];
} sp_ring_block;
_Static_assert(sizeof(sp_ring_block) <= SP_RING_DATA_OFFSET, "indices fit before the data");

typedef struct sp_ring_link {
    int rank, peer, n_queues;
    int wake_fd;             /* the peer's, borrowed */
    sp_ring_block *out, *in; /* borrowed */
    sp_spsc_tx tx[SP_QUEUES_MAX];
    sp_spsc_rx rx[SP_QUEUES_MAX];
    uint64_t armed_head[SP_QUEUES_MAX]; /* rx[i].head at the last arm */
    uint32_t blocked;                   /* mask of the queues whose last reserve found no space */
    bool up, gone;
    bool gone_is_new;    /* `gone` is set, and arm has not reported it yet */
    bool broken;         /* the peer wrote an impossible number; never cleared */
    char gone_text[160]; /* a clause for error texts: "closed its endpoint" */
} sp_ring_link;

/* Bytes of a block for these queues; queue_bytes is a power of two. */
size_t sp_ring_block_bytes(int n_queues, size_t queue_bytes);
/* `out` and `in` are blocks of sp_ring_block_bytes; the link borrows them. Sets `up`. */
void sp_ring_link_init(sp_ring_link *link, int rank, int peer, int n_queues, size_t queue_bytes, void *out,
                       void *in, int wake_fd);
/* Note that the peer is gone. What it sent is still delivered. `text` becomes gone_text. */
void sp_ring_link_set_gone(sp_ring_link *link, const char *text);

/* The start of an endpoint of inproc or shm. */
typedef struct sp_ring_endpoint {
    const sp_endpoint_config *config;
    sp_ring_link *links;  /* [world_size] */
    int wake_fd, wait_fd; /* this rank's; the descriptor to sleep on */
} sp_ring_endpoint;

/* Functions of sp_transport. */
#define SP_RING_FUNCTIONS                                                                                    \
    .ns_per_byte = sp_local_ns_per_byte, .message_max = sp_ring_message_max, .reserve = sp_ring_reserve,     \
    .commit = sp_ring_commit, .peek = sp_ring_peek, .release = sp_ring_release, .flushed = sp_ring_flushed,  \
    .wait_fd = sp_ring_wait_fd, .disarm = sp_ring_disarm
size_t sp_ring_message_max(sp_endpoint *ep);
spccl_status sp_ring_reserve(sp_endpoint *ep, int peer, int queue, size_t bytes, void **out);
spccl_status sp_ring_commit(sp_endpoint *ep, int peer, int queue, uint32_t call);
spccl_status sp_ring_peek(sp_endpoint *ep, int peer, int queue, const void **out, size_t *bytes);
spccl_status sp_ring_release(sp_endpoint *ep, int peer, int queue);
bool sp_ring_flushed(sp_endpoint *ep, int peer, int queue, uint64_t n);
int sp_ring_wait_fd(sp_endpoint *ep);
spccl_status sp_ring_arm(sp_endpoint *ep);
void sp_ring_disarm(sp_endpoint *ep);

/* Ask the peer to look for an abort or for this rank's end, and wake it. */
void sp_ring_signal(sp_ring_link *link);
/* True once per sp_ring_signal of the peer. */
bool sp_ring_take_signal(sp_ring_link *link);

/* Open an eventfd for wake-ups (non-blocking, close-on-exec). Errors: SYSTEM. */
spccl_status sp_wake_open(int *out);
/* Make wake_fd readable. */
void sp_wake_signal(int wake_fd);
/* Take all wake-ups that are pending: wake_fd is not readable afterwards. */
void sp_wake_drain(int wake_fd);

#endif
