/* ncclnet.h - the data of transport ncclnet. ncclnet.c: messages. ncclnet_start.c: start-up, on the caller's
 * thread. ncclnet_thread.c: the thread that calls the plugin. ncclnet_stop.c: the end of that thread.
 * ncclnet_end.c: how peers end. ncclnet_put.c: puts, on the caller's thread. ncclnet_put_thread.c: on the other one.
 *
 * Each endpoint has an endpoint of transport tcp beside it. Its link to a peer proves the job secret, carries what
 * both must know to connect (ncclnet_wire.h), aborts, and shows when the peer is gone: a plugin cannot. If the
 * plugin fails for a peer at start-up, the messages to that peer take the tcp link too.
 *
 * A plugin has sends and receives, but no puts. So the bytes of puts travel over a connection of their own, in the order of
 * the puts. The message that follows them ends with a list of where they go (ncclnet_wire.h). When it is here the receiver
 * posts a receive for each put, and shows the message once all are done.
 *
 * A region is closed while its pieces are under way only if the peer is lost or the group ends. Its connection is then
 * closed too, so that the plugin leaves the memory alone. If the plugin fails to close it, or hangs, memory_in_use says
 * so. */
#ifndef SP_NCCLNET_H
#define SP_NCCLNET_H

#include "core/contract/transport.h"
#include "transport/net/ncclnet_load.h"
#include "transport/net/ncclnet_ring.h"
#include "transport/net/ncclnet_wire.h"

#include <pthread.h>
#include <stdatomic.h>

/* A peer is IDLE until the caller sets CONNECTING. Then the thread sets CONNECTED or FAILED. */
enum sp_nn_state { SP_NN_IDLE, SP_NN_CONNECTING, SP_NN_CONNECTED, SP_NN_FAILED };

/* One queue to, or from, one peer: a connection of the plugin. */
struct sp_nn_queue {
    sp_nn_ring ring;
    /* the thread's */
    void *listener; /* receiver */
    void *comm, *mr;
    atomic_bool failed; /* a call for this queue failed: the plugin is not called for it any more */
    int device;
    uint64_t n_seen;    /* ring.allowed at the last look */
    uint64_t n_started; /* segments given to the plugin */
    void *requests[SP_NN_SEGMENTS];
};

/* Memory that a plugin reads or writes for puts. */
struct sp_nn_region {
    sp_region_config config;
    void **mr; /* [world_size] by peer, the thread's; NULL: not registered for it */
};

/* A put: under way to, or from, a peer. */
struct sp_nn_piece {
    const struct sp_nn_region *region;
    uint64_t off;
    uint32_t bytes;
};

/* The puts to, or from, a peer. Of q.ring only `queue`, `allowed` and `done` are used: they count pieces. */
struct sp_nn_puts {
    struct sp_nn_queue q;
    struct sp_nn_piece pieces[SP_PUTS_MAX]; /* piece n at n % SP_PUTS_MAX */
};

/* A flush of the last piece that came. */
enum { SP_NN_FLUSH_NONE, SP_NN_FLUSH_ASKED, SP_NN_FLUSH_RUNS, SP_NN_FLUSH_DONE };

/* What the caller asks of the thread: register a region, or take its registrations back. */
enum { SP_NN_JOB_NONE, SP_NN_JOB_OPEN, SP_NN_JOB_CLOSE, SP_NN_JOB_DONE };

enum sp_nn_route { SP_NN_UNDECIDED, SP_NN_BY_PLUGIN, SP_NN_BY_TCP };

struct sp_nn_peer {
    bool added;
    enum sp_nn_route route;
    struct sp_nn_queue tx[SP_QUEUES_MAX], rx[SP_QUEUES_MAX];
    _Atomic int state;                  /* enum sp_nn_state */
    bool connected;                     /* the thread's: was connected, even if a queue failed since */
    atomic_bool cancelled;              /* asks the thread to give up connecting */
    char failure[SP_NN_TEXT_CAP + 120]; /* valid with SP_NN_FAILED */
    sp_nn_connect_info mine, theirs;
    /* start-up, the caller's */
    bool connect_info_sent, connect_info_here, result_sent, result_here;
    char reason[SP_NN_TEXT_CAP]; /* why the route is tcp */
    bool tcp_faster;             /* because tcp has the higher rate */
    /* the peer's end */
    bool gone, over; /* no more can be sent to it; nothing more will arrive */
    bool has_fin;
    sp_nn_fin fin;
    int64_t
        ended_ns; /* since when this rank knows that it is gone, or that the plugin failed; 0: it is not */
    uint64_t n_arrived; /* segments, at the last look */
    char gone_text[SP_NN_TEXT_CAP + 160];
    /* puts: both ranks want them */
    bool puts;
    struct sp_nn_puts put_tx, put_rx;
    uint32_t n_pending; /* puts of the reserved message, and where they go */
    sp_nn_target targets[SP_PUTS_MAX];
    bool puts_due;                     /* the last look at the oldest message: its puts are to come */
    bool announced;                    /* the receives for the puts of the oldest message are allowed */
    uint64_t flush_asked, flush_ended; /* messages: the last for which a flush was asked; that is flushed */
    _Atomic int flush;                 /* SP_NN_FLUSH_NONE .. */
    void *flush_request;               /* the thread's */
    uint64_t n_closed;                 /* likewise: pieces that came into regions which are closed now */
};

enum { SP_NN_LOAD_RUNS, SP_NN_LOAD_FINE, SP_NN_LOAD_FAILED };

struct sp_ncclnet {
    sp_endpoint_config config;
    sp_nn_found found;
    sp_endpoint *tcp; /* owned; NULL: there is no plugin */
    int epoll_fd, event_fd;
    struct sp_nn_peer *peers; /* [world_size] */
    int64_t call_limit_ns;    /* how long a call into the plugin may take */
    /* start-up */
    bool tcp_up, started, results_due, up;
    int64_t load_deadline_ns, connect_deadline_ns;
    /* The thread. If it hangs in the plugin it is abandoned. Then this struct is never freed, and the thread uses no
     * other memory of ours. */
    pthread_t thread;
    pid_t pid; /* of the process that started the thread: a child of fork has none */
    atomic_bool stop, exited, abandoned;
    bool thread_lost;
    _Atomic int load;                     /* SP_NN_LOAD_RUNS .. */
    char load_text[SP_NN_TEXT_CAP + 100]; /* the thread's; valid with SP_NN_LOAD_FAILED */
    char lost_text[SP_NN_TEXT_CAP + 100]; /* the caller's; valid with thread_lost */
    int n_used, used[SP_NN_DEVICES_MAX];  /* likewise: the devices whose cards this endpoint takes (nics.h) */
    atomic_bool has_cards;                /* it has taken them: `used` and `plugin` are valid */
    const sp_nn_plugin *plugin;    /* the thread's; valid with SP_NN_LOAD_FINE, and while it is in a call */
    _Atomic int64_t call_since_ns; /* 0: it is not in the plugin */
    _Atomic int call_slot, call_peer, call_device, call_queue;
    int64_t slow_call_ns,
        slow_seen_ns;           /* the caller's: start of a call that takes too long; when it saw that */
    struct sp_nn_region *inbox; /* the region that peers write; NULL: none */
    int n_regions; /* the caller's: the thread was asked to register them, and has not closed them */
    atomic_bool memory_lost; /* the plugin may still use the memory of a region that was closed */
    _Atomic int job;         /* SP_NN_JOB_NONE .. */
    struct sp_nn_region *job_region;
    bool job_fine;                       /* the thread's; valid with SP_NN_JOB_DONE */
    char job_text[SP_NN_TEXT_CAP + 100]; /* likewise: why not */
    pthread_mutex_t lock;
    pthread_cond_t wake;
    atomic_int asleep;
    /* wake-ups of the caller */
    atomic_uint n_events;
    unsigned n_events_seen;
    atomic_bool armed;
    bool changed;
    struct sp_ncclnet *next_lost; /* list of those that are kept */
};

static inline struct sp_ncclnet *sp_nn_self(sp_endpoint *ep)
{
    return (struct sp_ncclnet *)ep;
}

/* ncclnet_thread.c */
/* Start the thread. It loads the plugin, listens for every added peer, then sets `load`. Errors: SYSTEM. */
spccl_status sp_nn_thread_start(struct sp_ncclnet *ep);
/* There is something to send or to fill, or a peer to connect. */
void sp_nn_thread_kick(struct sp_ncclnet *ep);
/* "device eth0 port 1" of a queue. */
void sp_nn_device_text(const struct sp_ncclnet *ep, int device, char *out, size_t cap);
/* "queue 1" or "puts": what a connection of that number carries. */
void sp_nn_queue_text(const struct sp_ncclnet *ep, int queue, char *out, size_t cap);

/* ncclnet_stop.c */
/* Give back the cards that this endpoint has taken, if it still has them. Any thread may call it. */
void sp_nn_give_back_cards(struct sp_ncclnet *ep);
/* True if two looks found the thread in the same call, for longer than it may. One look is not enough: the process may
 * have been stopped (SIGSTOP) with the thread in a call. `out` gets "connect for rank 3 ...". */
bool sp_nn_thread_hangs(struct sp_ncclnet *ep, char *out, size_t cap);
/* Give the thread up: it will never be joined, and what it may touch is never freed. */
void sp_nn_thread_abandon(struct sp_ncclnet *ep, const char *why);
/* End the thread, which closes what it opened. Waits a bounded time. */
void sp_nn_thread_stop(struct sp_ncclnet *ep);

/* ncclnet_end.c */
/* The peer ends, or the plugin failed for it: what follows is decided by sp_nn_look_at_end. */
void sp_nn_start_ending(struct sp_ncclnet *ep, struct sp_nn_peer *p);
/* Read what the peer says over tcp after start-up: its FIN, then its end. */
void sp_nn_look_at_tcp(struct sp_ncclnet *ep, int peer);
/* Decide whether the peer is gone, and whether more can arrive from it. */
void sp_nn_look_at_end(struct sp_ncclnet *ep, int peer);
/* Abandon the thread if it hangs. All peers of the plugin are then gone. */
void sp_nn_check_thread(struct sp_ncclnet *ep);
/* The thread was abandoned, because of `text`: all peers of the plugin are gone. */
void sp_nn_lose_peers(struct sp_ncclnet *ep, const char *text);

/* ncclnet_put.c */
extern const sp_transport_puts sp_nn_puts;
/* How many connections a pair has each way. */
static inline int sp_nn_n_connections(const struct sp_ncclnet *ep, const struct sp_nn_peer *p)
{
    return ep->config.n_queues + (p->puts ? 1 : 0);
}
/* Its i-th connection: the side that sends, the side that receives. The one for puts is the last. */
static inline void sp_nn_connection(const struct sp_ncclnet *ep, struct sp_nn_peer *p, int i,
                                    struct sp_nn_queue *sides[2])
{
    sides[0] = i < ep->config.n_queues ? &p->tx[i] : &p->put_tx.q;
    sides[1] = i < ep->config.n_queues ? &p->rx[i] : &p->put_rx.q;
}
/* This rank wants puts: it listens for them. */
static inline bool sp_nn_wants_puts(const struct sp_ncclnet *ep)
{
    return ep->config.n_puts != 0 && ep->config.n_queues == 1;
}
/* Room behind a message for the list of its puts. */
static inline size_t sp_nn_list_room(const struct sp_nn_peer *p)
{
    return p->puts ? SP_NN_LIST_ROOM((size_t)SP_PUTS_MAX) : 0;
}
/* Write the list of puts behind the reserved message, and let the puts go. */
void sp_nn_commit_puts(struct sp_ncclnet *ep, int peer);
/* `message` of *bytes bytes is the oldest from the peer. OK: its puts are here, and *bytes is without the list. AGAIN: not
 * yet. Errors: FORMAT. */
spccl_status sp_nn_take_puts(struct sp_ncclnet *ep, int peer, const void *message, size_t *bytes);

/* ncclnet_start.c */
spccl_status sp_nn_connect_step(sp_endpoint *ep);

#endif
