/* plugin.h - the data of transport ncclnet, a network that moves segments (segments.h). plugin.c: the network's
 * functions. plugin_start.c: start-up, on the caller's thread. plugin_thread.c: the thread that calls the plugin.
 * plugin_stop.c: the end of that thread. */
#ifndef SP_PLUGIN_H
#define SP_PLUGIN_H

#include "core/contract/transport.h"
#include "transport/net/plugin/plugin_load.h"
#include "transport/net/plugin/plugin_wire.h"
#include "transport/net/segments/segments.h"

#include <pthread.h>
#include <stdatomic.h>

/* A peer is IDLE until the caller sets CONNECTING. Then the thread sets CONNECTED or FAILED. */
enum sp_plugin_state { SP_PLUGIN_IDLE, SP_PLUGIN_CONNECTING, SP_PLUGIN_CONNECTED, SP_PLUGIN_FAILED };

/* One queue to, or from, one peer: a connection of the plugin. */
struct sp_plugin_queue {
    sp_segment_ring *ring; /* of sp_segments_peer */
    /* the thread's */
    void *listener; /* receiver */
    void *comm, *mr;
    atomic_bool failed; /* a call for this queue failed: the plugin is not called for it any more */
    int device;
    uint64_t n_seen;    /* ring.allowed at the last look */
    uint64_t n_started; /* segments given to the plugin */
    void *requests[SP_SEGMENTS];
};

struct sp_plugin_peer {
    sp_segments_peer *base;
    struct sp_plugin_queue tx[SP_QUEUES_MAX], rx[SP_QUEUES_MAX];
    _Atomic int state;                   /* enum sp_plugin_state */
    bool connected;                      /* the thread's: was connected, even if a queue failed since */
    atomic_bool cancelled;               /* asks the thread to give up connecting */
    char failure[SP_NET_TEXT_CAP + 120]; /* valid with SP_PLUGIN_FAILED */
    sp_plugin_connect_info mine, theirs;
    /* start-up, the caller's */
    bool connect_info_sent, connect_info_here, result_sent, result_here;
};

enum { SP_PLUGIN_LOAD_RUNS, SP_PLUGIN_LOAD_FINE, SP_PLUGIN_LOAD_FAILED };

struct sp_plugin_endpoint {
    sp_segments base;
    sp_plugin_found found;
    int event_fd;
    struct sp_plugin_peer *peers; /* [world_size] */
    int64_t call_limit_ns;        /* how long a call into the plugin may take */
    /* start-up */
    bool started, results_due;
    int64_t load_deadline_ns, connect_deadline_ns;
    /* The thread. If it hangs in the plugin it is abandoned. Then this struct is never freed, and the thread uses no
     * other memory of ours. */
    pthread_t thread;
    atomic_bool stop, exited, abandoned;
    bool thread_lost;
    _Atomic int load;                      /* SP_PLUGIN_LOAD_RUNS .. */
    char load_text[SP_NET_TEXT_CAP + 100]; /* the thread's; valid with SP_PLUGIN_LOAD_FAILED */
    char lost_text[SP_NET_TEXT_CAP + 100]; /* the caller's; valid with thread_lost */
    int n_used,
        used[SP_PLUGIN_DEVICES_MAX]; /* likewise: the devices whose cards this endpoint takes (nics.h) */
    atomic_bool has_cards;           /* it has taken them: `used` and `plugin` are valid */
    const sp_plugin *plugin; /* the thread's; valid with SP_PLUGIN_LOAD_FINE, and while it is in a call */
    _Atomic int64_t call_since_ns; /* 0: it is not in the plugin */
    _Atomic int call_fn, call_peer, call_device, call_queue;
    int64_t slow_call_ns,
        slow_seen_ns; /* the caller's: start of a call that takes too long; when it saw that */
    pthread_mutex_t lock;
    pthread_cond_t wake;
    atomic_int asleep;
    /* wake-ups of the caller */
    atomic_uint n_events;
    unsigned n_events_seen;
    atomic_bool armed;
    struct sp_plugin_endpoint *next_lost; /* list of those that are kept */
};

static inline struct sp_plugin_endpoint *sp_plugin_self(sp_endpoint *ep)
{
    return (struct sp_plugin_endpoint *)ep;
}

static inline struct sp_plugin_endpoint *sp_plugin_of(sp_segments *base)
{
    return (struct sp_plugin_endpoint *)base;
}

/* plugin_thread.c */
/* Start the thread. It loads the plugin, listens for every added peer, then sets `load`. Errors: SYSTEM. */
spccl_status sp_plugin_thread_start(struct sp_plugin_endpoint *ep);
/* There is something to send or to fill, or a peer to connect. */
void sp_plugin_thread_kick(struct sp_plugin_endpoint *ep);
/* "device eth0 port 1" of a queue. */
void sp_plugin_device_text(const struct sp_plugin_endpoint *ep, int device, char *out, size_t cap);

/* plugin_stop.c */
/* Give back the cards that this endpoint has taken, if it still has them. Any thread may call it. */
void sp_plugin_give_back_cards(struct sp_plugin_endpoint *ep);
/* True if two looks found the thread in the same call, for longer than it may. One look is not enough: the process may
 * have been stopped (SIGSTOP) with the thread in a call. `out` gets "connect for rank 3 ...". */
bool sp_plugin_thread_hangs(struct sp_plugin_endpoint *ep, char *out, size_t cap);
/* Give the thread up: it will never be joined, and what it may touch is never freed. */
void sp_plugin_thread_abandon(struct sp_plugin_endpoint *ep, const char *why);
/* End the thread, which closes what it opened. Waits a bounded time. */
void sp_plugin_thread_stop(struct sp_plugin_endpoint *ep);

/* plugin_start.c. As in segments.h. */
spccl_status sp_plugin_prepare(sp_segments *base);
spccl_status sp_plugin_start_step(sp_segments *base);

#endif
