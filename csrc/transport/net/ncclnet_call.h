/* ncclnet_call.h - calls into the plugin, on the thread of an ncclnet endpoint: ncclnet_thread.c, ncclnet_put_thread.c. */
#ifndef SP_NCCLNET_CALL_H
#define SP_NCCLNET_CALL_H

#include "core/base/clock.h"
#include "transport/net/ncclnet.h"

/* Before and after each call into the plugin. After it the thread may have been abandoned: it then ends, and
 * touches nothing any more. */
static inline void sp_nn_enter(struct sp_ncclnet *ep, enum sp_nn_slot slot, int peer,
                               const struct sp_nn_queue *q)
{
    if (atomic_load(&ep->abandoned))
        pthread_exit(NULL);
    atomic_store_explicit(&ep->call_slot, (int)slot, memory_order_relaxed);
    atomic_store_explicit(&ep->call_peer, peer, memory_order_relaxed);
    atomic_store_explicit(&ep->call_device, q->device, memory_order_relaxed);
    atomic_store_explicit(&ep->call_queue, (int)q->ring.queue, memory_order_relaxed);
    atomic_store_explicit(&ep->call_since_ns, sp_now_ns(), memory_order_release);
}

static inline void sp_nn_leave(struct sp_ncclnet *ep)
{
    if (atomic_load(&ep->abandoned))
        pthread_exit(NULL);
    atomic_store_explicit(&ep->call_since_ns, 0, memory_order_release);
}

/* result = call, which is `slot` of the plugin, for queue q of the peer. */
#define SP_NN_CALL(ep, slot, peer, q, result, call)                                                          \
    do {                                                                                                     \
        sp_nn_enter((ep), (slot), (peer), (q));                                                              \
        (result) = (call);                                                                                   \
        sp_nn_leave(ep);                                                                                     \
    } while (0)

/* ncclnet_thread.c */
/* Tell the caller that something changed. */
void sp_nn_signal_caller(struct sp_ncclnet *ep);
/* The first failure is the one that errors name. */
void sp_nn_fail_peer(struct sp_ncclnet *ep, int peer, const char *text);
/* A call for a queue failed: the peer fails, with device, call and result in the text. Its other queues go on: what a
 * peer sent before it left must arrive. */
void sp_nn_fail_call(struct sp_ncclnet *ep, int peer, struct sp_nn_queue *q, enum sp_nn_slot slot,
                     int result);
/* Close a connection of the plugin: slot SP_NN_CLOSE_SEND, _RECV or _LISTEN. Accepts NULL; *comm = NULL. Returns what the
 * plugin returned: 0 is success. */
int sp_nn_close_comm(struct sp_ncclnet *ep, int peer, const struct sp_nn_queue *q, enum sp_nn_slot slot,
                     void **comm);

/* ncclnet_put_thread.c. True if something moved. */
bool sp_nn_serve_puts(struct sp_ncclnet *ep, int peer);
bool sp_nn_do_job(struct sp_ncclnet *ep);
/* The caller has asked for something since the last look. */
bool sp_nn_puts_wait(struct sp_ncclnet *ep);

#endif
