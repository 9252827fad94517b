/* ib.h - the data of transport ib, a network that moves segments (segments.h). ib.c: the network's functions.
 * ib_address.c: addresses and rails. ib_start.c: start-up. ib_open.c: devices, queue pairs and rings. ib_move.c: writes
 * and completions. ib_put.c: puts.
 *
 * Two ranks have 1 to 4 rails: a rail joins two devices. Each rail has SPCCL_DEBUG_IB_QPS RC queue pairs. For each queue both
 * ends have a ring of segments (segment_ring.h). Each queue pair has a part of the places in a ring, one after the other,
 * registers that part, and carries the segments that lie there. A queue pair delivers in order; the receiver passes a
 * segment on when all before it are here (struct sp_ib_order).
 *
 * Segment k is written with immediate into the same place of the receiver's ring. The receiver gives credits: a
 * segment is written only if its place is free and a receive is posted for it. So a full queue cannot delay another. */
#ifndef SP_IB_H
#define SP_IB_H

#include "core/contract/transport.h"
#include "transport/common/forks.h"
#include "transport/common/nics.h"
#include "transport/net/ib/ib_wire.h"

#include <sys/types.h>

#define SP_IB_CREDIT_STEP (SP_SEGMENTS / 4) /* credits are sent for so many segments at once */
/* Most writes and receives of a queue that can be under way on a queue pair: its segments, and its credits. */
#define SP_IB_PER_QUEUE (SP_SEGMENTS + SP_SEGMENTS / SP_IB_CREDIT_STEP)
#define SP_IB_SPARE 12 /* the probe, and writes whose completion was not asked for */
#define SP_IB_WRITES_CAP 256u
_Static_assert(SP_QUEUES_MAX *SP_IB_PER_QUEUE + SP_IB_SPARE + SP_PUTS_MAX <= SP_IB_WRITES_CAP,
               "owners[] holds them all");

/* Start-up of a pair of ranks: in each stage but the last both send a note, which says what they could do. */
enum sp_ib_stage { SP_IB_STAGE_INFO, SP_IB_STAGE_READY, SP_IB_STAGE_PROBE, SP_IB_STAGE_DONE };
enum { SP_IB_OWNER_PUT = 0xfd, SP_IB_OWNER_CREDIT = 0xfe, SP_IB_OWNER_PROBE = 0xff };

/* Segments that arrived, or that were sent, on each queue pair in order. */
struct sp_ib_order {
    uint64_t next[SP_IB_QPS_MAX]; /* the queue pair's next segment */
    uint32_t here;                /* bit k % SP_SEGMENTS: segment k is here, and one before it is not */
};

struct sp_ib_tx {
    sp_segment_ring *ring;              /* of sp_segments_peer */
    sp_ib_memory memory[SP_IB_QPS_MAX]; /* the part of each queue pair */
    struct sp_ib_order order;
    uint64_t n_posted, credit; /* segments that were written; those below `credit` may be */
};

struct sp_ib_rx {
    sp_segment_ring *ring;              /* of sp_segments_peer */
    sp_ib_memory memory[SP_IB_QPS_MAX]; /* the part of each queue pair */
    struct sp_ib_order order;
    uint64_t announced; /* the last credit */
    /* Segments that were here when the last flush began, and when the last one that ended began. */
    uint64_t flushing, flushed;
};

struct sp_ib_qp {
    sp_ib_link *link;
    int device, their_device; /* of sp_ib.devices, here and at the peer */
    /* Writes in the order of posting; completions come in the same order. */
    uint32_t n_writes, n_completed, n_unsignalled, n_puts; /* n_puts: of those under way */
    uint8_t owners[SP_IB_WRITES_CAP]; /* of write n, at n % SP_IB_WRITES_CAP: a queue, or SP_IB_OWNER_.. */
    bool probe_sent, probe_left, probe_here;
    bool failed; /* at start-up */
};

struct sp_ib_peer {
    sp_segments_peer *base;
    uint32_t n_qps, n_ports; /* n_ports: usable devices of the peer */
    struct sp_ib_qp qps[SP_IB_QPS_MAX];
    struct sp_ib_tx tx[SP_QUEUES_MAX];
    struct sp_ib_rx rx[SP_QUEUES_MAX];
    /* start-up (ib_start.c) */
    enum sp_ib_stage stage;
    uint32_t round; /* counts the tries; each has fewer queue pairs than the one before */
    sp_ib_connect_info mine, theirs;
    bool note_sent, note_here; /* of this stage */
    uint32_t my_usable;        /* queue pairs, a bit each: what this rank's note said */
    uint32_t their_usable;     /* and the peer's */
    int64_t probe_deadline_ns;
    bool fewer; /* some queue pairs did not work, and were left out */
};

/* Memory that devices read or write for puts. */
struct sp_ib_region {
    sp_region_config config;
    sp_ib_memory memory[SP_IB_RAILS_MAX]; /* by device */
};

/* A flush: each device reads a byte of the region over a queue pair that is connected with itself. */
struct sp_ib_flush {
    struct sp_ib_region *region; /* NULL: there is none */
    sp_ib_link *links[SP_IB_RAILS_MAX];
    sp_ib_memory memory[SP_IB_RAILS_MAX]; /* of `word` */
    uint64_t word;
    uint32_t reading;                                    /* devices that are reading now, a bit each */
    char failure[SP_NET_TEXT_CAP + SP_IB_NAME_CAP + 40]; /* "": none */
};

struct sp_ib {
    sp_segments base;
    int n_devices; /* 0: none is usable */
    sp_ib_device devices[SP_IB_RAILS_MAX];
    char device_why[600]; /* how the devices were chosen, or why there is none */
    sp_ib_address address;
    sp_ib_context *contexts[SP_IB_RAILS_MAX]; /* owned, of devices; NULL until start-up */
    bool taken[SP_IB_RAILS_MAX];              /* the cards of the devices (nics.h) */
    sp_nic nics[SP_IB_RAILS_MAX];
    struct sp_ib_peer *peers; /* [world_size] */
    sp_fork_guard guard;
    char failures[SP_IB_RAILS_MAX]
                 [SP_NET_TEXT_CAP]; /* start-up: why this rank cannot use a device; "": it can */
    struct sp_ib_flush flush;
};

static inline struct sp_ib *sp_ib_self(sp_endpoint *ep)
{
    return (struct sp_ib *)ep;
}

static inline struct sp_ib *sp_ib_of(sp_segments *base)
{
    return (struct sp_ib *)base;
}

/* The queue pair of segment k, its first segment, and the segment after k on the same one. */
static inline uint32_t sp_ib_qp_of(uint32_t n_qps, uint64_t k)
{
    return (uint32_t)(k % SP_SEGMENTS) * n_qps / SP_SEGMENTS;
}

static inline uint64_t sp_ib_qp_first(uint32_t n_qps, uint32_t qp)
{
    return ((uint64_t)qp * SP_SEGMENTS + n_qps - 1) / n_qps;
}

static inline uint64_t sp_ib_qp_next(uint32_t n_qps, uint64_t k)
{
    uint32_t qp = sp_ib_qp_of(n_qps, k);
    if ((k + 1) % SP_SEGMENTS != 0 && sp_ib_qp_of(n_qps, k + 1) == qp)
        return k + 1;
    return k - k % SP_SEGMENTS + SP_SEGMENTS + sp_ib_qp_first(n_qps, qp);
}

/* Bits of the id of a write or receive (ib_move.c). */
#define SP_IB_ROUND_MASK 0x1fu
#define SP_IB_PEER_MASK 0x3fffffu
static inline uint64_t sp_ib_id(const struct sp_ib_peer *p, int peer, uint32_t qp)
{
    return (uint64_t)qp << 59 | (uint64_t)(p->round & SP_IB_ROUND_MASK) << 54 |
           ((uint64_t)(uint32_t)peer & SP_IB_PEER_MASK) << 32;
}

/* ib_address.c. As in transport.h. */
uint32_t sp_ib_rate_mbps(sp_endpoint *ep);
uint32_t sp_ib_pair_mbps(sp_endpoint *ep, const uint8_t *address, size_t bytes, uint32_t its_mbps);
/* As in segments.h. */
size_t sp_ib_write_own(const sp_segments *base, uint8_t *out);
bool sp_ib_reach(const sp_segments *base, const uint8_t *address, size_t bytes, char *why, size_t why_cap);
void sp_ib_add_peer(sp_segments *base, int peer, const uint8_t *address, size_t bytes);
void sp_ib_describe(sp_segments *base, int peer, char *out, size_t cap);

/* ib_start.c. As in segments.h. */
spccl_status sp_ib_start_step(sp_segments *base);

/* ib_open.c */
/* As in segments.h: devices, and queue pairs and rings for each peer, as far as that works. */
spccl_status sp_ib_prepare(sp_segments *base);
/* Open the queue pairs of a peer, as far as that works; in the first round its rings too. */
void sp_ib_open_peer(struct sp_ib *ep, int peer);
/* Close the queue pairs of a peer, and the registrations of its rings. */
void sp_ib_close_qps(struct sp_ib_peer *p);

#define SP_IB_FLUSH_PEER SP_IB_PEER_MASK /* in the id of a flush; its queue pair is the device */

/* ib_put.c */
extern const sp_transport_puts sp_ib_puts;
/* The read of a device has ended; error NULL: well. */
void sp_ib_flush_ended(struct sp_ib *ep, uint32_t device, const char *error);

/* ib_move.c */
int sp_ib_n_writes(const struct sp_ib *ep);
int sp_ib_n_receives(const struct sp_ib *ep);
/* Post one write. AGAIN: too many are under way. On failure the peer has failed. */
spccl_status sp_ib_post(struct sp_ib *ep, int peer, uint32_t qp, sp_ib_write *w, uint8_t owner);
/* A device failed: so do all peers that use it. */
void sp_ib_fail_device(struct sp_ib *ep, int device, const char *text);
/* As in segments.h: write what may be written to a peer: segments, then credits that are due. */
void sp_ib_send(sp_segments *base, int peer);
/* Write the probe of a queue pair. False if that failed: the queue pair has failed then. */
bool sp_ib_send_probe(struct sp_ib *ep, int peer, uint32_t qp);
/* As in segments.h: handle all completions. */
void sp_ib_poll(sp_segments *base);
/* A queue pair failed, and after start-up with it the peer: `text` is a clause. The first failure counts. */
void sp_ib_fail_peer(struct sp_ib *ep, int peer, uint32_t qp, spccl_status status, const char *text);
/* After start-up: fail the peer if a queue pair has failed, also since this rank's result. */
void sp_ib_fail_started(struct sp_ib *ep, int peer);

#endif
