/* plugin_thread.c - the thread of an ncclnet endpoint: the only one that calls the plugin. See plugin.h.
 *
 * A plugin offers no descriptor to sleep on, so the thread asks it again and again. After some time without
 * success it sleeps between two rounds, longer the longer nothing happens. New segments to send wake it. */
#include "core/base/clock.h"
#include "core/base/log.h"
#include "core/base/mem.h"
#include "core/base/thread.h"
#include "transport/net/plugin/plugin.h"

#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define US INT64_C(1000)
#define SPIN_NS (50 * US)

/* Before and after each call into the plugin. After it the thread may have been abandoned: it then ends, and
 * touches nothing any more. */
static void enter(struct sp_plugin_endpoint *ep, enum sp_plugin_fn fn, int peer,
                  const struct sp_plugin_queue *q)
{
    if (atomic_load(&ep->abandoned))
        pthread_exit(NULL);
    atomic_store_explicit(&ep->call_fn, (int)fn, memory_order_relaxed);
    atomic_store_explicit(&ep->call_peer, peer, memory_order_relaxed);
    atomic_store_explicit(&ep->call_device, q->device, memory_order_relaxed);
    atomic_store_explicit(&ep->call_queue, (int)q->ring->queue, memory_order_relaxed);
    atomic_store_explicit(&ep->call_since_ns, sp_now_ns(), memory_order_release);
}

static void leave(struct sp_plugin_endpoint *ep)
{
    if (atomic_load(&ep->abandoned))
        pthread_exit(NULL);
    atomic_store_explicit(&ep->call_since_ns, 0, memory_order_release);
}

/* result = call, which is `fn` of the plugin, for queue q of the peer. */
#define SP_PLUGIN_CALL(ep, fn, peer, q, result, call)                                                        \
    do {                                                                                                     \
        enter((ep), (fn), (peer), (q));                                                                      \
        (result) = (call);                                                                                   \
        leave(ep);                                                                                           \
    } while (0)

/* ---- what the caller learns ---- */

/* Tell the caller that something changed. */
static void signal_caller(struct sp_plugin_endpoint *ep)
{
    uint64_t one = 1;
    atomic_fetch_add(&ep->n_events, 1);
    if (atomic_exchange(&ep->armed, false) && write(ep->event_fd, &one, sizeof one) < 0 && errno != EAGAIN)
        sp_log(SP_LOG_ERROR, ep->base.config.rank, "ncclnet: writing to an eventfd failed: errno %d", errno);
}

void sp_plugin_device_text(const struct sp_plugin_endpoint *ep, int device, char *out, size_t cap)
{
    const sp_plugin_device *c = &ep->plugin->devices[device];
    snprintf(out, cap, "device %s port %d", c->name, c->port);
}

/* The first failure is the one that errors name. */
static void fail_peer(struct sp_plugin_endpoint *ep, int peer, const char *text)
{
    struct sp_plugin_peer *p = &ep->peers[peer];
    if (atomic_load(&p->state) != SP_PLUGIN_FAILED)
        snprintf(p->failure, sizeof p->failure, "%s", text);
    atomic_store(&p->state, SP_PLUGIN_FAILED);
    signal_caller(ep);
}

/* A call for a queue failed: the peer fails, with device, call and result in the text. Its other queues go on: what a
 * peer sent before it left must arrive. */
static void fail_call(struct sp_plugin_endpoint *ep, int peer, struct sp_plugin_queue *q,
                      enum sp_plugin_fn fn, int result)
{
    char device[80], text[SP_NET_TEXT_CAP];
    sp_plugin_device_text(ep, q->device, device, sizeof device);
    snprintf(text, sizeof text, "%s: plugin %s: %s for rank %d, queue %u, returned %d (%s)", device,
             ep->plugin->name, sp_plugin_fn_name(fn), peer, q->ring->queue, result,
             sp_plugin_result_text(result));
    fail_peer(ep, peer, text); /* first: who sees `failed` finds the text */
    atomic_store(&q->failed, true);
}

/* ---- start-up ---- */

/* The device of a queue between two ranks: the same number on both hosts, if they have as many devices. */
static int device_of(const struct sp_plugin_endpoint *ep, int peer, int queue)
{
    return ep->used[(ep->base.config.rank + peer + queue) % ep->n_used];
}

/* False: *text says what failed. */
static bool listen_for(struct sp_plugin_endpoint *ep, int peer, char *text, size_t cap)
{
    struct sp_plugin_peer *p = &ep->peers[peer];
    for (int i = 0; i < ep->base.config.n_queues; i++) {
        int result, device = device_of(ep, peer, i);
        p->tx[i].device = p->rx[i].device = device;
        SP_PLUGIN_CALL(ep, SP_PLUGIN_LISTEN, peer, &p->rx[i], result,
                       sp_plugin_listen(ep->plugin, device, p->mine.handles[i], &p->rx[i].listener));
        if (result == 0 && p->rx[i].listener != NULL)
            continue;
        snprintf(text, cap, "device %s: plugin %s: listen for rank %d returned %d (%s)",
                 ep->plugin->devices[device].name, ep->plugin->name, peer, result,
                 result != 0 ? sp_plugin_result_text(result) : "but no listener");
        return false;
    }
    return true;
}

/* False if the plugin allows fewer connections than the group needs. */
static bool allows_all(const struct sp_plugin_endpoint *ep, char *text, size_t cap)
{
    const sp_plugin *p = ep->plugin;
    int64_t most = 0, needed = 0;
    for (int i = 0; i < ep->n_used; i++)
        most += p->devices[ep->used[i]].max_comms > 0 ? p->devices[ep->used[i]].max_comms : INT32_MAX;
    for (int i = 0; i < ep->base.config.world_size; i++)
        needed += ep->base.peers[i].added ? 2 * ep->base.config.n_queues : 0;
    if (needed <= most)
        return true;
    snprintf(text, cap, "plugin %s allows %lld connections, the group needs %lld", p->name, (long long)most,
             (long long)needed);
    return false;
}

/* Take the cards of the plugin's fastest devices. False: another transport of this process uses them all. */
static bool take_cards(struct sp_plugin_endpoint *ep, char *text, size_t cap)
{
    const sp_plugin *p = ep->plugin;
    const char *holder = "";
    for (int i = 0; i < p->n_used; i++) {
        const sp_plugin_device *device = &p->devices[p->used[i]];
        if (sp_nic_take("ncclnet", &device->nic, &holder))
            ep->used[ep->n_used++] = p->used[i];
        else
            snprintf(text, cap, "device %s: transport %s of this process uses this card", device->name,
                     holder);
    }
    atomic_store(&ep->has_cards, ep->n_used > 0);
    if (atomic_load(&ep->abandoned)) /* then the endpoint may be closed already */
        sp_plugin_give_back_cards(ep);
    return ep->n_used > 0;
}

static bool load(struct sp_plugin_endpoint *ep, char *text, size_t cap)
{
    const sp_plugin_limits limits = {.deadline_ns = ep->load_deadline_ns, .call_ns = ep->call_limit_ns};
    if (sp_plugin_load(ep->found.path, &limits, &ep->plugin) != SPCCL_OK) {
        snprintf(text, cap, "%s", spccl_last_error());
        return false;
    }
    if (!take_cards(ep, text, cap) || !allows_all(ep, text, cap))
        return false;
    for (int i = 0; i < ep->base.config.world_size; i++)
        if (ep->base.peers[i].added && !listen_for(ep, i, text, cap))
            return false;
    return true;
}

/* 1: connected and registered. 0: not yet. -1: failed. */
static int connect_send(struct sp_plugin_endpoint *ep, int peer, struct sp_plugin_queue *q)
{
    int result;
    if (q->comm == NULL) {
        SP_PLUGIN_CALL(ep, SP_PLUGIN_CONNECT, peer, q, result,
                       sp_plugin_connect(ep->plugin, q->device,
                                         ep->peers[peer].theirs.handles[q->ring->queue], &q->comm));
        if (result != 0) {
            fail_call(ep, peer, q, SP_PLUGIN_CONNECT, result);
            return -1;
        }
    }
    return q->comm != NULL;
}

static int connect_receive(struct sp_plugin_endpoint *ep, int peer, struct sp_plugin_queue *q)
{
    int result;
    if (q->comm == NULL) {
        SP_PLUGIN_CALL(ep, SP_PLUGIN_ACCEPT, peer, q, result,
                       sp_plugin_accept(ep->plugin, q->listener, &q->comm));
        if (result != 0) {
            fail_call(ep, peer, q, SP_PLUGIN_ACCEPT, result);
            return -1;
        }
    }
    return q->comm != NULL;
}

static int register_ring(struct sp_plugin_endpoint *ep, int peer, struct sp_plugin_queue *q)
{
    int result;
    if (q->mr != NULL || q->comm == NULL)
        return q->mr != NULL;
    SP_PLUGIN_CALL(
        ep, SP_PLUGIN_REG_MR, peer, q, result,
        sp_plugin_reg_host(ep->plugin, q->comm, q->ring->memory.data, q->ring->memory.cap, &q->mr));
    if (result != 0) {
        fail_call(ep, peer, q, SP_PLUGIN_REG_MR, result);
        return -1;
    }
    if (q->mr == NULL)
        q->mr = q; /* plugins that need no registration give NULL; deregMr then gets NULL back */
    return 1;
}

/* Continue connecting. True if something happened. */
static bool connect_peer(struct sp_plugin_endpoint *ep, int peer)
{
    struct sp_plugin_peer *p = &ep->peers[peer];
    int n_ready = 0, n = ep->base.config.n_queues;
    for (int i = 0; i < n; i++) {
        struct sp_plugin_queue *sides[2] = {&p->tx[i], &p->rx[i]};
        for (int s = 0; s < 2; s++) {
            int got = s == 0 ? connect_send(ep, peer, sides[s]) : connect_receive(ep, peer, sides[s]);
            if (got > 0)
                got = register_ring(ep, peer, sides[s]);
            if (got < 0)
                return true;
            n_ready += got;
        }
    }
    if (n_ready < 2 * n) {
        if (atomic_load(&p->cancelled))
            fail_peer(ep, peer, "given up");
        return false;
    }
    p->connected = true;
    atomic_store(&p->state, SP_PLUGIN_CONNECTED);
    signal_caller(ep);
    return true;
}

/* ---- segments ---- */

static sp_plugin_transfer transfer_of(const struct sp_plugin_queue *q, uint64_t k, size_t bytes)
{
    return (sp_plugin_transfer){.comm = q->comm,
                                .data = sp_segment_ring_segment(q->ring, k),
                                .mr = q->mr == q ? NULL : q->mr,
                                .bytes = bytes,
                                .tag = (int)q->ring->queue};
}

/* Ask whether the oldest request is done. True: *bytes is its size. A failure changes the peer's state. */
static bool test_oldest(struct sp_plugin_endpoint *ep, int peer, struct sp_plugin_queue *q, int *bytes)
{
    uint64_t done = atomic_load_explicit(&q->ring->done, memory_order_relaxed);
    bool is_done = false;
    int result;
    if (done == q->n_started)
        return false;
    SP_PLUGIN_CALL(ep, SP_PLUGIN_TEST, peer, q, result,
                   sp_plugin_test(ep->plugin, q->requests[done % SP_SEGMENTS], &is_done, bytes));
    if (result != 0)
        fail_call(ep, peer, q, SP_PLUGIN_TEST, result);
    return result == 0 && is_done;
}

static bool send_segments(struct sp_plugin_endpoint *ep, int peer, struct sp_plugin_queue *q)
{
    uint64_t allowed = atomic_load_explicit(&q->ring->allowed, memory_order_acquire);
    bool moved = q->n_seen != allowed; /* what is new is tried again soon, not after a long pause */
    int bytes, result = 0;
    q->n_seen = allowed;
    while (q->n_started < allowed && result == 0) {
        void **request = &q->requests[q->n_started % SP_SEGMENTS];
        sp_plugin_transfer t = transfer_of(q, q->n_started, q->ring->bytes[q->n_started % SP_SEGMENTS]);
        SP_PLUGIN_CALL(ep, SP_PLUGIN_ISEND, peer, q, result, sp_plugin_isend(ep->plugin, &t, request));
        if (result == 0 && *request == NULL)
            break;
        q->n_started += result == 0;
        moved = true;
    }
    if (result != 0) {
        fail_call(ep, peer, q, SP_PLUGIN_ISEND, result);
        return true;
    }
    while (test_oldest(ep, peer, q, &bytes)) {
        atomic_fetch_add_explicit(&q->ring->done, 1, memory_order_release);
        signal_caller(ep);
        moved = true;
    }
    return moved;
}

static bool receive_segments(struct sp_plugin_endpoint *ep, int peer, struct sp_plugin_queue *q)
{
    uint64_t allowed = atomic_load_explicit(&q->ring->allowed, memory_order_acquire);
    bool moved = false;
    int bytes, result = 0;
    while (q->n_started < allowed && result == 0) {
        void **request = &q->requests[q->n_started % SP_SEGMENTS];
        sp_plugin_transfer t = transfer_of(q, q->n_started, q->ring->segment_bytes);
        SP_PLUGIN_CALL(ep, SP_PLUGIN_IRECV, peer, q, result, sp_plugin_irecv(ep->plugin, &t, request));
        if (result == 0 && *request == NULL)
            break;
        q->n_started += result == 0;
    }
    if (result != 0) {
        fail_call(ep, peer, q, SP_PLUGIN_IRECV, result);
        return true;
    }
    while (test_oldest(ep, peer, q, &bytes)) {
        uint64_t done = atomic_load_explicit(&q->ring->done, memory_order_relaxed);
        if (bytes < (int)SP_RECORD_HEAD_BYTES || (size_t)bytes > q->ring->segment_bytes || bytes % 16 != 0) {
            char text[SP_NET_TEXT_CAP];
            snprintf(text, sizeof text,
                     "plugin %s: a segment of %d bytes came from rank %d; wanted 16 to %zu, a "
                     "multiple of 16",
                     ep->plugin->name, bytes, peer, q->ring->segment_bytes);
            fail_peer(ep, peer, text); /* first: who sees `failed` finds the text */
            atomic_store(&q->failed, true);
            return true;
        }
        q->ring->bytes[done % SP_SEGMENTS] = (uint32_t)bytes;
        atomic_store_explicit(&q->ring->done, done + 1, memory_order_release);
        signal_caller(ep);
        moved = true;
    }
    return moved;
}

static bool serve_peer(struct sp_plugin_endpoint *ep, int peer)
{
    struct sp_plugin_peer *p = &ep->peers[peer];
    int state = atomic_load_explicit(&p->state, memory_order_acquire);
    bool moved = false;
    if (state == SP_PLUGIN_CONNECTING)
        return connect_peer(ep, peer);
    for (int i = 0; i < ep->base.config.n_queues && p->connected; i++) {
        if (!atomic_load_explicit(&p->tx[i].failed, memory_order_relaxed))
            moved = send_segments(ep, peer, &p->tx[i]) || moved;
        if (!atomic_load_explicit(&p->rx[i].failed, memory_order_relaxed))
            moved = receive_segments(ep, peer, &p->rx[i]) || moved;
    }
    return moved;
}

/* ---- the thread ---- */

/* True if the caller has allowed something since the last look. What the plugin did not take then waits for the next
 * round. */
static bool has_work(struct sp_plugin_endpoint *ep)
{
    for (int i = 0; i < ep->base.config.world_size; i++) {
        struct sp_plugin_peer *p = &ep->peers[i];
        for (int k = 0; p->connected && k < ep->base.config.n_queues; k++)
            if (atomic_load(&p->tx[k].ring->allowed) != p->tx[k].n_seen && !atomic_load(&p->tx[k].failed))
                return true;
    }
    return false;
}

/* How long to sleep between two rounds after `idle_ns` without success. */
static int64_t pause_ns(int64_t idle_ns)
{
    if (idle_ns < 1000 * US)
        return 20 * US;
    return idle_ns < 100000 * US ? 100 * US : 1000 * US;
}

static void rest(struct sp_plugin_endpoint *ep, int64_t idle_ns)
{
    struct timespec until;
    int64_t ns;
    if (idle_ns < SPIN_NS) {
        sched_yield();
        return;
    }
    clock_gettime(CLOCK_MONOTONIC, &until);
    ns = until.tv_nsec + pause_ns(idle_ns);
    until.tv_sec += ns / 1000000000;
    until.tv_nsec = ns % 1000000000;
    /* `asleep` is set before the last look; the caller allows segments before it reads `asleep`. */
    pthread_mutex_lock(&ep->lock);
    (void)atomic_exchange(&ep->asleep, 1);
    if (!has_work(ep) && !atomic_load(&ep->stop))
        (void)pthread_cond_timedwait(&ep->wake, &ep->lock, &until);
    atomic_store(&ep->asleep, 0);
    pthread_mutex_unlock(&ep->lock);
}

static void close_comm(struct sp_plugin_endpoint *ep, int peer, const struct sp_plugin_queue *q,
                       enum sp_plugin_fn fn, void **comm)
{
    int result;
    if (*comm == NULL)
        return;
    SP_PLUGIN_CALL(ep, fn, peer, q, result, sp_plugin_close(ep->plugin, fn, *comm));
    if (result != 0)
        sp_log(SP_LOG_INFO, ep->base.config.rank, "plugin %s: %s for rank %d returned %d (%s)",
               ep->plugin->name, sp_plugin_fn_name(fn), peer, result, sp_plugin_result_text(result));
    *comm = NULL;
}

static void close_queue(struct sp_plugin_endpoint *ep, int peer, struct sp_plugin_queue *q,
                        enum sp_plugin_fn fn)
{
    int result = 0;
    if (q->comm != NULL && q->mr != NULL)
        SP_PLUGIN_CALL(ep, SP_PLUGIN_DEREG_MR, peer, q, result,
                       sp_plugin_dereg(ep->plugin, q->comm, q->mr == q ? NULL : q->mr));
    if (result != 0)
        sp_log(SP_LOG_INFO, ep->base.config.rank, "plugin %s: deregMr for rank %d returned %d (%s)",
               ep->plugin->name, peer, result, sp_plugin_result_text(result));
    q->mr = NULL;
    close_comm(ep, peer, q, fn, &q->comm);
    close_comm(ep, peer, q, SP_PLUGIN_CLOSE_LISTEN, &q->listener);
}

static void *thread_main(void *arg)
{
    struct sp_plugin_endpoint *ep = arg;
    int64_t busy_ns = sp_now_ns();
    bool fine = load(ep, ep->load_text, sizeof ep->load_text);
    atomic_store(&ep->load, fine ? SP_PLUGIN_LOAD_FINE : SP_PLUGIN_LOAD_FAILED);
    signal_caller(ep);
    while (!atomic_load(&ep->stop)) {
        bool moved = false;
        int64_t now_ns;
        for (int i = 0; i < ep->base.config.world_size; i++)
            moved = serve_peer(ep, i) || moved;
        now_ns = sp_now_ns();
        if (moved)
            busy_ns = now_ns;
        else
            rest(ep, now_ns - busy_ns);
    }
    for (int i = 0; i < ep->base.config.world_size; i++)
        for (int k = 0; ep->plugin != NULL && k < ep->base.config.n_queues; k++) {
            close_queue(ep, i, &ep->peers[i].tx[k], SP_PLUGIN_CLOSE_SEND);
            close_queue(ep, i, &ep->peers[i].rx[k], SP_PLUGIN_CLOSE_RECV);
        }
    atomic_store(&ep->exited, true);
    return NULL;
}

spccl_status sp_plugin_thread_start(struct sp_plugin_endpoint *ep)
{
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_mutex_init(&ep->lock, NULL);
    pthread_cond_init(&ep->wake, &attr);
    pthread_condattr_destroy(&attr);
    SP_TRY(sp_thread_start("spccl-net", thread_main, ep, &ep->thread));
    ep->started = true;
    ep->base.pid = getpid();
    return SPCCL_OK;
}

void sp_plugin_thread_kick(struct sp_plugin_endpoint *ep)
{
    /* A read-modify-write, as the thread's exchange is: whichever comes second sees what the other did before. */
    if (atomic_fetch_add(&ep->asleep, 0) == 0)
        return;
    pthread_mutex_lock(&ep->lock);
    pthread_cond_signal(&ep->wake);
    pthread_mutex_unlock(&ep->lock);
}
