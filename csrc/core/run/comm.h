/* comm.h - spccl_comm: one rank's handle on its group. comm.c creates and destroys it, engine.c runs its
 * collectives, request.c is the caller's handle on one collective.
 *
 * At any time at most one thread, the driver, runs the executor. A blocking call is the driver itself if
 * there is no other: it has the lowest latency, as no thread must wake up. Collectives with a request are run
 * by the progress thread. The first of them starts it, and it sleeps while there is nothing to do. */
#ifndef SP_COMM_H
#define SP_COMM_H

#include "core/base/process.h"
#include "core/plan/plan_file.h"
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
    bool seen, report; /* a caller has got the outcome; if none does, the error is logged */
    char *error;       /* owned; NULL = none */
    int64_t timeout_ms;
    char what[160];
    uint32_t process_stamp; /* process.h */
    void (*fn)(void *ctx, spccl_status status);
    void *fn_ctx;
};

struct spccl_comm {
    int rank, world_size;
    uint32_t process_stamp; /* process.h */
    pid_t pid;              /* of the process that made the communicator, for texts */
    char name[96];
    _Atomic int64_t timeout_ms; /* of later collectives; any thread may set it */
    int64_t spin_ns;
    spccl_format format;
    bool schedule_forced;
    sp_schedule schedule;
    sp_plan_set *plans;              /* owned; of SP_SCHED_FILE, else NULL */
    bool tunes, tunes_slices;        /* tuner.h: schedules, and slice sizes */
    struct sp_profile_file *profile; /* owned; NULL: none (profile_file.h) */
    size_t slice_bytes, queue_bytes;
    char schedule_text[700]; /* of spccl_comm_describe_schedule */
    char local_ip[80];       /* of spccl_comm_local_ip */
    const sp_kernels *kernels;
    sp_links links;
    sp_exec exec; /* only the driver uses it */
    int epoll_fd; /* what the driver sleeps on: every endpoint, and wake_fd */
    int wake_fd;  /* eventfd; a write wakes the driver */

    pthread_mutex_t mu; /* guards what follows */
    pthread_cond_t cv;  /* signals a new collective, a finished one, and that there is no driver any more */
    sp_driver driver;
    sp_op *queue_head, **queue_tail; /* submitted, not yet active in the executor */
    int n_under_way;                 /* submitted, not completed */
    uint32_t next_seq;
    bool stop, thread_started;
    pthread_t thread;
    spccl_status broken; /* SPCCL_OK, or the first error */
    char error[1024];
    atomic_bool abort_asked; /* set once: the driver must break the communicator, with the next two */
    spccl_status asked_status;
    char asked_text[1024];
    uint32_t *gpu_abort;             /* abort flag of the kernels: the first error sets it; NULL = no GPU */
    struct sp_gpu_comm *_Atomic gpu; /* gpu_comm.h; NULL = no GPU attached */
    atomic_bool sleeping;            /* the driver sleeps in epoll_wait and needs a wake-up */
};

/* comm.c */
/* Errors: ARG (rank, world size, an option out of range). */
spccl_status sp_comm_check_config(int rank, int world_size, const spccl_config *config);
/* The error of sp_comm_check. */
spccl_status sp_comm_refuse(const spccl_comm *comm, const char *call);
/* Errors: ARG (NULL), STATE (this process is a child of fork of the one that made the communicator). Every public
 * call checks this first. A child has the parent's descriptors and shared memory, but none of its threads. Threads
 * that the child does not have may hold locks. */
static inline spccl_status sp_comm_check(const spccl_comm *comm, const char *call)
{
    return comm == NULL || sp_process_forked(comm->process_stamp) ? sp_comm_refuse(comm, call) : SPCCL_OK;
}

/* request.c */
/* The request starts with two references: the caller's and the executor's. Errors: NOMEM. */
spccl_status sp_request_create(const sp_op *op, spccl_request **out);
/* Set the outcome, call the callback, and release the executor's reference. report: log the error if the request is
 * freed and no caller has got its outcome. One request of each failure has it. */
void sp_request_complete(spccl_request *req, spccl_status status, const char *error, bool report);

/* coll.c */
/* How long a call inside the library may take. Without a deadline the group cannot be stopped before all ranks have
 * made the call, or a later call breaks the group. */
typedef struct sp_time_limit {
    int64_t deadline_ns; /* SP_NEVER: none */
    int64_t timeout_ms;  /* what error texts call its timeout; 0: the communicator's */
} sp_time_limit;
/* All-gather of bytes with a limit of its own. */
spccl_status sp_comm_all_gather(spccl_comm *comm, const void *in, void *out, size_t bytes,
                                sp_time_limit limit, spccl_request **req);

/* engine.c */
/* A call with right arguments cannot start on this rank, and the peers wait for it: break the communicator, which
 * tells them. Returns st, with its text. */
spccl_status sp_comm_call_failed(spccl_comm *comm, const sp_coll_args *a, spccl_status st);
/* Queue an op, and take over its ownership. req NULL: wait until it is done. */
spccl_status sp_comm_submit(spccl_comm *comm, sp_op *op, spccl_request **req);
/* Break the communicator with an error from outside the executor (an abort, the GPU). Only the first call has
 * an effect; later ones return false. Threads: any. */
bool sp_comm_break(spccl_comm *comm, spccl_status status, const char *text);
/* SPCCL_OK, or the error that broke the communicator or is about to break it, with its text. Threads: any. */
spccl_status sp_comm_broken(spccl_comm *comm);
/* Wake the driver if it sleeps. */
void sp_comm_wake(spccl_comm *comm);
/* Wait until no collective is under way and there is no driver, then stop the progress thread. */
void sp_comm_stop(spccl_comm *comm);
/* If there is no driver, look at the network once, so that an idle communicator notices a peer's abort. */
void sp_comm_poll(spccl_comm *comm);
/* The same. Errors: PEER (a peer is gone). This does not break the communicator: a peer may leave while no
 * collective needs it. */
spccl_status sp_comm_poll_peers(spccl_comm *comm);

#endif
