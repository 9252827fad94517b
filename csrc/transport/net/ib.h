/* ib.h - the data of transport ib. ib.c: messages. ib_start.c: start-up. ib_move.c: writes and completions.
 * ib_end.c: how peers end.
 *
 * Between two ranks there is one RC queue pair, and for each queue a ring of segments at both ends (ncclnet_ring.h).
 * Segment k is written with immediate into the same place of the receiver's ring. The receiver gives credits: a
 * segment is written only if its place is free and a receive is posted for it. So a full queue cannot delay another.
 *
 * Each endpoint has an endpoint of transport tcp beside it, as ncclnet has: its link to a peer proves the job secret,
 * carries what both must know to connect (ib_wire.h), aborts, and shows when the peer is gone. If ib fails for a peer
 * at start-up, the messages to that peer take the tcp link too. */
#ifndef SP_IB_H
#define SP_IB_H

#include "core/contract/transport.h"
#include "transport/common/forks.h"
#include "transport/net/ib_wire.h"

#include <sys/types.h>

#define SP_IB_CREDIT_STEP (SP_NN_SEGMENTS / 4) /* credits are sent for so many segments at once */
/* Most writes and receives of a queue that can be under way: its segments, and its credits. */
#define SP_IB_PER_QUEUE (SP_NN_SEGMENTS + SP_NN_SEGMENTS / SP_IB_CREDIT_STEP)
#define SP_IB_SPARE 12 /* the probe, and writes whose completion was not asked for */
#define SP_IB_WRITES_CAP 128u
_Static_assert(SP_QUEUES_MAX *SP_IB_PER_QUEUE + SP_IB_SPARE <= SP_IB_WRITES_CAP, "sent[] holds them all");

enum sp_ib_route { SP_IB_UNDECIDED, SP_IB_BY_IB, SP_IB_BY_TCP };
enum { SP_IB_OWNER_CREDIT = 0xfe, SP_IB_OWNER_PROBE = 0xff };

struct sp_ib_tx {
    sp_nn_ring ring;
    sp_ib_memory memory;
    uint64_t n_posted, credit; /* segments that were written; those below `credit` may be */
};

struct sp_ib_rx {
    sp_nn_ring ring;
    sp_ib_memory memory;
    uint64_t announced; /* the last credit */
};

struct sp_ib_peer {
    bool added;
    enum sp_ib_route route;
    sp_ib_link *link;
    struct sp_ib_tx tx[SP_QUEUES_MAX];
    struct sp_ib_rx rx[SP_QUEUES_MAX];
    /* Writes in the order of posting; completions come in the same order. */
    uint32_t n_writes, n_completed, n_unsignalled;
    uint8_t owners[SP_IB_WRITES_CAP]; /* of write n, at n % SP_IB_WRITES_CAP: a queue, or SP_IB_OWNER_.. */
    /* start-up */
    sp_ib_connect_info mine, theirs;
    uint32_t n_notes; /* sent over tcp */
    bool connect_info_sent, connect_info_here, ready_sent, ready_here, result_sent, result_here;
    bool probe_sent, probe_left, probe_here;
    char reason[SP_NN_TEXT_CAP]; /* why the route is tcp */
    /* the peer's end */
    bool failed;              /* no more is written or taken */
    spccl_status gone_status; /* FORMAT: it sent what it must not; else PEER */
    char failure[SP_NN_TEXT_CAP + 120];
    bool gone, over; /* no more can be sent to it; nothing more will arrive */
    bool has_fin;
    sp_nn_fin fin;
    int64_t ended_ns;   /* since when this rank knows that it is gone, or that ib failed; 0: it does not */
    uint64_t n_arrived; /* segments, at the last look */
    char gone_text[SP_NN_TEXT_CAP + 160];
};

struct sp_ib {
    sp_endpoint_config config;
    bool has_device;
    sp_ib_device device;
    char device_why[400];   /* how the device was chosen, or why there is none */
    sp_endpoint *tcp;       /* owned; NULL: there is no device */
    sp_ib_context *context; /* owned; NULL until start-up */
    int epoll_fd;
    struct sp_ib_peer *peers; /* [world_size] */
    pid_t pid;                /* of the process that opened it: a child of fork calls no library */
    sp_fork_guard guard;
    /* start-up */
    bool prepared, tcp_up, up;
    char failure[SP_NN_TEXT_CAP]; /* why this rank cannot use its device; "": it can */
    int64_t probe_deadline_ns;
    /* running */
    uint32_t n_progress;
    bool changed; /* there is a change that arm has not reported yet */
    bool ending;  /* some peer ends */
    bool aborted;
};

static inline struct sp_ib *sp_ib_self(sp_endpoint *ep)
{
    return (struct sp_ib *)ep;
}

/* ib_start.c */
spccl_status sp_ib_connect_step(sp_endpoint *ep);

/* ib_move.c */
int sp_ib_n_writes(const struct sp_ib *ep);
int sp_ib_n_receives(const struct sp_ib *ep);
/* Write what may be written to a peer: segments, then credits that are due. */
void sp_ib_send(struct sp_ib *ep, int peer);
/* Write the probe. False if that failed: the peer has failed then. */
bool sp_ib_send_probe(struct sp_ib *ep, int peer);
/* Handle all completions. */
void sp_ib_poll(struct sp_ib *ep);

/* ib_end.c */
/* ib failed for the peer: `text` is a clause. The first failure counts. */
void sp_ib_fail_peer(struct sp_ib *ep, int peer, spccl_status status, const char *text);
/* Read what the peer says over tcp after start-up: its FIN, then its end. */
void sp_ib_look_at_tcp(struct sp_ib *ep, int peer);
/* Decide whether the peer is gone, and whether more can arrive from it. */
void sp_ib_look_at_end(struct sp_ib *ep, int peer);

#endif
