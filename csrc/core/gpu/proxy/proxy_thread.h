/* proxy_thread.h - a thread that serves kernels over a network: connecting, polling, sleep, wake, failure, end. The
 * proxies of collectives (proxy.h) and of port channels (channel_port.h) are such threads. Their owners say what a
 * round does, and how to know that no kernel can need the thread. */
#ifndef SP_PROXY_THREAD_H
#define SP_PROXY_THREAD_H

#include "core/contract/transport.h"
#include "core/gpu/gpu_comm.h"

/* After so long all ranks compare their status, so that the failure of one ends the start on all. */
#define SP_PROXY_CONNECT_NS (INT64_C(50) * 1000000)
/* A thread that nothing wakes, although a kernel may need it, looks for work this often. */
#define SP_PROXY_POLL_NS 1000000
/* As above, once nothing has moved for SP_PROXY_QUIET_NS and no call says when a kernel may need it. */
#define SP_PROXY_QUIET_POLL_NS 10000000
#define SP_PROXY_QUIET_NS INT64_C(1000000000)

typedef struct sp_proxy_thread {
    /* set by the owner before start */
    sp_gpu_comm *g;
    const char *name; /* of the thread */
    char what[24];    /* for texts, before a rank: "channels to" */
    void *ctx;        /* for the two functions */
    /* Do what there is to do, without waiting. *moved = true if anything moved. An error breaks the communicator. */
    spccl_status (*round)(void *ctx, bool *moved);
    /* Can no kernel need the thread before the next sp_proxy_thread_wake? NULL: that is never known. */
    bool (*is_idle)(const void *ctx);
    sp_links links; /* to `peers`, a bit for each rank; messages from them end a sleep */
    uint64_t peers;

    /* used by proxy_thread.c */
    int wake_fd; /* eventfd */
    pthread_t thread;
    bool started;
    /* It polls for so long after something moved, while a kernel may need it and while none can. */
    int64_t busy_spin_ns, idle_spin_ns;
    atomic_bool sleeping, stop;
    atomic_uint n_wakes;
} sp_proxy_thread;

/* For ranks of `comm` on this host, itself among them; 1 if comm is NULL. */
uint32_t sp_proxy_ranks_here(const spccl_comm *comm);

/* Make t, zeroed before, ready for the calls below. Errors: SYSTEM, NOMEM. */
spccl_status sp_proxy_thread_open(sp_proxy_thread *t, sp_gpu_comm *g);
/* Open the endpoints for the peers whose bits are set: of the transports of the communicator's links to them. Of config,
 * group_tag tells them from others of the communicator; n_queues, gpu and what the communicator knows are set here.
 * Errors: those of the transports. */
spccl_status sp_proxy_thread_add(sp_proxy_thread *t, uint64_t peers, const sp_endpoint_config *config);
/* All ranks call it together: exchange the addresses of the endpoints of n threads, and add the peers. Errors: UNREACHABLE (names the pair), NOMEM, and those of the transports. */
spccl_status sp_proxy_threads_meet(sp_proxy_thread *const *threads, uint32_t n, int64_t deadline_ns);
/* Connect the endpoints of n threads for at most SP_PROXY_CONNECT_NS. what: for the error text. AGAIN: some peers are
 * not connected yet; call it again. Errors: TIMEOUT (deadline_ns has passed), PEER, AUTH, SYSTEM. */
spccl_status sp_proxy_threads_connect(sp_proxy_thread *const *threads, uint32_t n, const char *what,
                                      int64_t deadline_ns);
/* Errors: SYSTEM. */
spccl_status sp_proxy_thread_start(sp_proxy_thread *t);
/* How long a thread may sleep that has been idle for so long. For tests. */
int64_t sp_proxy_thread_sleep_ns(const sp_proxy_thread *t, int64_t idle_ns);
/* There may be work: end its sleep, or keep it from sleeping. Threads: any. */
void sp_proxy_thread_wake(sp_proxy_thread *t);
/* End the thread and wait for its end. t may not have been started. It can be closed only. */
void sp_proxy_thread_stop(sp_proxy_thread *t);
/* After stop; closes the endpoints too. */
void sp_proxy_thread_close(sp_proxy_thread *t);

#endif
