/* comm.h - spccl_comm: one rank's membership of a group; its queue, its progress thread, its first error.
 * Place in the map: running. comm.c makes and breaks it, engine.c drives it, request.c is the caller's
 * handle.
 *
 * Who drives: at any time at most one thread runs the executor. A blocking call drives by itself when nobody
 * else does (no hand-over, lowest latency); collectives issued with a request are driven by the progress
 * thread, which is started by the first of them and sleeps while there is nothing to do. */
#ifndef SP_COMM_H
#define SP_COMM_H

#include "core/base/process.h"
#include "core/run/exec.h"

#include <pthread.h>
#include <sys/types.h>

typedef enum sp_driver { SP_DRIVER_NONE, SP_DRIVER_THREAD, SP_DRIVER_CALLER } sp_driver;

struct spccl_request {
    atomic_int refs;
    pthread_mutex_t mu;
    pthread_cond_t done_cv;
    atomic_bool done; /* set once, under mu */
    spccl_status status;
    char *error; /* owned; NULL = none */
    int64_t timeout_ms;
    char what[160];
    uint32_t process_stamp; /* process.h */
    void (*fn)(void *ctx, spccl_status status);
    void *fn_ctx;
};

struct spccl_comm {
    int rank, world_size;
    uint32_t process_stamp; /* process.h */
    pid_t pid;              /* of the process that made it, for texts */
    char name[96];
    _Atomic int64_t timeout_ms; /* of collectives issued from now on; set by any thread */
    int64_t spin_ns;
    spccl_format format;
    bool schedule_forced;
    sp_schedule schedule;
    size_t slice_bytes;
    const sp_kernels *kernels;
    sp_links links;
    sp_trace trace;
    sp_exec exec; /* belongs to whoever drives */
    int epoll_fd, wake_fd;

    pthread_mutex_t mu; /* guards what follows */
    pthread_cond_t cv;  /* work for the thread; the driver's role became free; the queue became empty */
    sp_driver driver;
    sp_op *queue_head, **queue_tail; /* issued, not yet in the executor */
    int n_under_way;                 /* issued and not completed */
    uint32_t next_seq;
    bool stop, thread_started;
    pthread_t thread;
    spccl_status broken; /* SPCCL_OK, or the first error */
    char error[1024];
    atomic_bool abort_asked; /* the driver shall break it, with asked_status and asked_text; set once */
    spccl_status asked_status;
    char asked_text[1024];
    uint32_t *gpu_abort; /* the abort flag of the GPU's kernels, set with the first error; NULL = no GPU */
    struct sp_gpu_comm *_Atomic gpu; /* gpu_comm.h; NULL = no GPU attached */
    atomic_bool sleeping;            /* the driver sleeps in epoll_wait: kick it */
};

/* comm.c */
/* Errors: ARG (rank, world size, an option out of range). */
spccl_status sp_comm_check_config(int rank, int world_size, const spccl_config *config);
/* Sets the text of SPCCL_ERR_STATE and returns it: this process is a child of fork. */
spccl_status sp_comm_refuse_child(const spccl_comm *comm, const char *call);
/* STATE in a child of fork of the process that made the communicator. Every public call asks this first: the
 * child has the parent's descriptors and shared memory, but none of its threads, and locks may be held. */
static inline spccl_status sp_comm_check_process(const spccl_comm *comm, const char *call)
{
    return sp_process_forked(comm->process_stamp) ? sp_comm_refuse_child(comm, call) : SPCCL_OK;
}

/* request.c */
spccl_status sp_request_create(const sp_op *op,
                               spccl_request **out); /* two references: caller and executor */
void sp_request_complete(spccl_request *req, spccl_status status,
                         const char *error); /* gives the executor's back */

/* engine.c */
/* Queue an op and, without a request handle wanted, see it through.  Takes over the op. */
spccl_status sp_comm_submit(spccl_comm *comm, sp_op *op, spccl_request **req);
/* Break the communicator with an error seen outside the executor (abort, the GPU). Once: later ones are
 * ignored, and false. Threads: any. */
bool sp_comm_break(spccl_comm *comm, spccl_status status, const char *text);
/* SPCCL_OK, or the error that broke it, or that it was asked to break with, with its text. Threads: any. */
spccl_status sp_comm_broken(spccl_comm *comm);
/* Wake the driver if it sleeps. */
void sp_comm_wake(spccl_comm *comm);
/* Wait until nothing is under way and nobody drives, then stop the thread. */
void sp_comm_stop(spccl_comm *comm);
/* Look at the network once if nobody drives: an idle communicator learns of a peer's abort. */
void sp_comm_poll(spccl_comm *comm);
/* The same, and PEER (with text) if a peer is gone, which is no fault as long as nobody needs it. Breaks
 * nothing for that. */
spccl_status sp_comm_poll_peers(spccl_comm *comm);

#endif
