/* engine.c - decides which thread runs the executor (the driver), when it sleeps, and breaks a communicator.
 * See comm.h. */
#include "core/run/comm.h"
#include "core/run/exec_steps.h"

#include "core/base/log.h"
#include "core/base/thread.h"

#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <sys/epoll.h>
#include <unistd.h>

#define SLEEP_MAX_MS 1000 /* a lost wake-up would delay a collective by this time, and not for ever */

void sp_comm_wake(spccl_comm *comm)
{
    uint64_t one = 1;
    if (write(comm->wake_fd, &one, sizeof one) < 0 && errno != EAGAIN)
        sp_log(SP_LOG_ERROR, comm->rank, "writing to the wake-up eventfd failed: errno %d", errno);
}

/* Complete an op's request, and free the op. The caller does not hold mu, because the callback runs here. report: as
 * for sp_request_complete. */
static void complete(spccl_comm *comm, sp_op *op, spccl_status status, const char *error, bool report)
{
    spccl_request *req = op->owner;
    sp_op_destroy(op);
    sp_request_complete(req, status, error, report);
    pthread_mutex_lock(&comm->mu);
    comm->n_under_way--;
    pthread_cond_broadcast(&comm->cv); /* blocking callers and sp_comm_stop wait */
    pthread_mutex_unlock(&comm->mu);
}

/* End every wait of this group's kernels. */
static void stop_gpu_locked(spccl_comm *comm)
{
    if (comm->gpu_abort != NULL)
        __atomic_store_n(comm->gpu_abort, 1, __ATOMIC_RELEASE);
}

/* Record an error if it is the first. Returns true if it is. */
static bool record_error(spccl_comm *comm, spccl_status status, const char *text)
{
    bool first;
    pthread_mutex_lock(&comm->mu);
    first = comm->broken == SPCCL_OK;
    if (first) {
        comm->broken = status;
        snprintf(comm->error, sizeof comm->error, "%s", text);
        stop_gpu_locked(comm);
    }
    pthread_mutex_unlock(&comm->mu);
    return first;
}

/* Take the oldest op that waits to become active; NULL: there is none. The caller holds mu. */
static sp_op *pop_queue_locked(spccl_comm *comm)
{
    sp_op *op = comm->queue_head;
    if (op != NULL && (comm->queue_head = op->next) == NULL)
        comm->queue_tail = &comm->queue_head;
    return op;
}

/* Called by the driver: break the communicator, abort the peers with the same text, and complete every
 * collective under way with the first error. Their callers print it, or the request that no caller looks at.
 * text: may be this thread's last error. */
static void fail_all(spccl_comm *comm, spccl_status status, const char *text)
{
    sp_op *op;
    bool report = record_error(comm, status, text);
    if (report) {
        char note[SP_ABORT_TEXT_CAP];
        snprintf(note, sizeof note, "%.*s", (int)sizeof note - 1, text);
        sp_log(SP_LOG_INFO, comm->rank, "group \"%s\" is broken: %s", comm->name, text);
        sp_exec_log_events(&comm->exec);
        sp_links_abort_peers(&comm->links, note);
    }
    while (comm->exec.n_ops > 0) {
        op = comm->exec.active[0];
        comm->exec.n_ops--;
        memmove(comm->exec.active, comm->exec.active + 1, (size_t)comm->exec.n_ops * sizeof op);
        complete(comm, op, comm->broken, comm->error, report);
        report = false;
    }
    for (;;) {
        pthread_mutex_lock(&comm->mu);
        op = pop_queue_locked(comm);
        pthread_mutex_unlock(&comm->mu);
        if (op == NULL)
            return;
        complete(comm, op, comm->broken, comm->error, report);
        report = false;
    }
}

/* Hand submitted ops to the executor while it has room for them. The caller holds mu. */
static void take_queue_locked(spccl_comm *comm)
{
    while (comm->queue_head != NULL && comm->exec.n_ops < SP_EXEC_ACTIVE_MAX)
        sp_exec_add(&comm->exec, pop_queue_locked(comm));
}

/* Called when no slice can be done: poll for spin_ns, then sleep until a peer, a caller or a deadline ends
 * the sleep. */
static spccl_status wait_for_work(spccl_comm *comm, int64_t idle_since_ns)
{
    struct epoll_event events[SP_TRANSPORTS_MAX + 1];
    int64_t deadline_ns;
    spccl_status st;
    int n;
    SP_TRY(sp_links_progress(&comm->links));
    if (sp_now_ns() - idle_since_ns < comm->spin_ns) {
        sched_yield(); /* the peer may need this core: there can be more ranks than cores */
        return SPCCL_OK;
    }
    SP_TRY(sp_exec_check_heads(&comm->exec));
    /* `sleeping` is set before the look at the queue, and sp_comm_submit fills the queue before it reads
     * `sleeping`. So either this thread sees the new op, or the submitter sees `sleeping`. */
    atomic_store(&comm->sleeping, true);
    pthread_mutex_lock(&comm->mu);
    n = comm->queue_head != NULL && comm->exec.n_ops < SP_EXEC_ACTIVE_MAX;
    deadline_ns = sp_exec_deadline(&comm->exec, comm->queue_head);
    st = sp_exec_check_deadlines(&comm->exec, comm->queue_head);
    pthread_mutex_unlock(&comm->mu);
    if (st == SPCCL_OK && n == 0 && !atomic_load(&comm->abort_asked) &&
        sp_links_arm(&comm->links) == SPCCL_OK) {
        n = epoll_wait(comm->epoll_fd, events, SP_TRANSPORTS_MAX + 1,
                       sp_deadline_left_ms(deadline_ns, SLEEP_MAX_MS));
        sp_links_disarm(&comm->links);
        for (int i = 0; i < n; i++)
            if (events[i].data.fd == comm->wake_fd) {
                uint64_t count;
                if (read(comm->wake_fd, &count, sizeof count) < 0 && errno != EAGAIN)
                    sp_log(SP_LOG_ERROR, comm->rank, "reading the wake-up eventfd failed: errno %d", errno);
            }
    } else {
        /* There is work; or a transport waits for a peer's abort, and that peer may need this core. */
        sched_yield();
    }
    atomic_store(&comm->sleeping, false);
    return st;
}

/* Run the executor, as the driver, until `until` is done. NULL: until no op is left. */
static void drive(spccl_comm *comm, spccl_request *until)
{
    int64_t idle_since_ns = sp_now_ns();
    for (;;) {
        bool progressed = false, over;
        spccl_status st = SPCCL_OK;
        sp_op *op;
        pthread_mutex_lock(&comm->mu);
        take_queue_locked(comm);
        over = until != NULL ? atomic_load(&until->done) : comm->exec.n_ops == 0;
        pthread_mutex_unlock(&comm->mu);
        if (over)
            return;
        if (atomic_load(&comm->abort_asked))
            st = SP_FAIL(comm->asked_status, "%s", comm->asked_text);
        if (st == SPCCL_OK)
            st = sp_exec_pass(&comm->exec, &progressed);
        if (st == SPCCL_OK && progressed)
            st = sp_links_progress(&comm->links);
        while (st == SPCCL_OK && (st = sp_exec_retire(&comm->exec, &op)) == SPCCL_OK && op != NULL) {
            complete(comm, op, SPCCL_OK, "", false);
            progressed = true;
        }
        if (st == SPCCL_OK && !progressed)
            st = wait_for_work(comm, idle_since_ns);
        if (st != SPCCL_OK)
            fail_all(comm, st, spccl_last_error());
        if (progressed)
            idle_since_ns = sp_now_ns();
    }
}

/* Stop being the driver. sp_comm_break leaves an abort to the driver. If drive() ended before it saw the
 * abort, the abort happens here. */
static void stop_driving(spccl_comm *comm)
{
    for (;;) {
        pthread_mutex_lock(&comm->mu);
        if (!atomic_load(&comm->abort_asked) || comm->broken != SPCCL_OK)
            break;
        pthread_mutex_unlock(&comm->mu);
        fail_all(comm, comm->asked_status, comm->asked_text);
    }
    comm->driver = SP_DRIVER_NONE;
    pthread_cond_broadcast(&comm->cv);
    pthread_mutex_unlock(&comm->mu);
}

/* Drive whenever there is no driver: for a blocking call until its request is done; with req NULL, as the progress thread,
 * until the communicator stops, and only while collectives are under way. A driver (the progress thread, another caller,
 * a caller that polls) may stop before the request is done. */
static void drive_in_turns(spccl_comm *comm, spccl_request *req)
{
    pthread_mutex_lock(&comm->mu);
    while (req != NULL ? !atomic_load(&req->done) : !comm->stop) {
        if (comm->driver != SP_DRIVER_NONE || (req == NULL && comm->n_under_way == 0)) {
            pthread_cond_wait(&comm->cv, &comm->mu);
            continue;
        }
        comm->driver = req != NULL ? SP_DRIVER_CALLER : SP_DRIVER_THREAD;
        pthread_mutex_unlock(&comm->mu);
        drive(comm, req);
        stop_driving(comm);
        pthread_mutex_lock(&comm->mu);
    }
    pthread_mutex_unlock(&comm->mu);
}

static void *progress_thread(void *comm)
{
    drive_in_turns(comm, NULL);
    return NULL;
}

static spccl_status start_thread_locked(spccl_comm *comm)
{
    if (comm->thread_started)
        return SPCCL_OK;
    SP_TRY(sp_thread_start("spccl", progress_thread, comm, &comm->thread));
    comm->thread_started = true;
    return SPCCL_OK;
}

/* Wait until the request of a blocking call is done, and free it. */
static spccl_status wait_and_drive(spccl_comm *comm, spccl_request *req)
{
    spccl_status st;
    drive_in_turns(comm, req);
    st = spccl_request_wait(req, -1);
    spccl_request_free(req);
    return st;
}

spccl_status sp_comm_call_failed(spccl_comm *comm, const sp_coll_args *a, spccl_status st)
{
    char text[sizeof comm->error];
    uint32_t seq;
    pthread_mutex_lock(&comm->mu);
    seq = comm->next_seq;
    pthread_mutex_unlock(&comm->mu);
    st = sp_call_error(comm->rank, a, seq, st);
    snprintf(text, sizeof text, "%s", spccl_last_error());
    (void)sp_comm_break(comm, st, text);
    sp_set_error(text);
    return st;
}

spccl_status sp_comm_submit(spccl_comm *comm, sp_op *op, spccl_request **out)
{
    spccl_request *req = NULL;
    spccl_status st;
    bool wake, broken = false;
    op->submitted_ns = sp_now_ns();
    op->deadline_ns =
        op->a.deadline_ns != 0 ? op->a.deadline_ns : sp_deadline_after_ms(op->submitted_ns, op->a.timeout_ms);
    SP_TRY_TO(fail, st, sp_request_create(op, &req));
    op->owner = req;
    pthread_mutex_lock(&comm->mu);
    broken = comm->broken != SPCCL_OK;
    if (broken)
        st = SP_FAIL(comm->broken, "rank %d: group \"%s\" is broken since: %s", comm->rank, comm->name,
                     sp_without_rank(comm->error, comm->rank));
    else if (out != NULL || comm->driver != SP_DRIVER_NONE) /* else this thread becomes the driver */
        st = start_thread_locked(comm);
    if (st != SPCCL_OK) {
        pthread_mutex_unlock(&comm->mu);
        goto fail;
    }
    op->seq = comm->next_seq++;
    sp_op_describe(op, req->what, sizeof req->what);
    op->next = NULL;
    *comm->queue_tail = op;
    comm->queue_tail = &op->next;
    comm->n_under_way++;
    if (out != NULL)
        pthread_cond_broadcast(&comm->cv);
    wake = comm->driver != SP_DRIVER_NONE;
    pthread_mutex_unlock(&comm->mu);
    if (wake && atomic_load(&comm->sleeping))
        sp_comm_wake(comm);
    if (out == NULL)
        return wait_and_drive(comm, req);
    *out = req;
    return SPCCL_OK;
fail:
    if (req != NULL) {
        spccl_request_free(req);
        spccl_request_free(req);
    }
    if (!broken)
        st = sp_comm_call_failed(comm, &op->a, st);
    sp_op_destroy(op);
    return st;
}

bool sp_comm_break(spccl_comm *comm, spccl_status status, const char *text)
{
    bool first, mine = false;
    pthread_mutex_lock(&comm->mu);
    first = !atomic_load(&comm->abort_asked);
    if (first) {
        stop_gpu_locked(comm); /* now: the driver may be busy for a while */
        comm->asked_status = status;
        snprintf(comm->asked_text, sizeof comm->asked_text, "%s", text);
        atomic_store(&comm->abort_asked, true);
    }
    if (first && comm->driver == SP_DRIVER_NONE) {
        comm->driver = SP_DRIVER_CALLER;
        mine = true;
    }
    pthread_mutex_unlock(&comm->mu);
    if (!first)
        return false;
    if (!mine) {
        sp_comm_wake(comm);
        return true;
    }
    fail_all(comm, status, text);
    stop_driving(comm);
    return true;
}

spccl_status sp_comm_broken(spccl_comm *comm)
{
    spccl_status st;
    pthread_mutex_lock(&comm->mu);
    st = comm->broken;
    if (st != SPCCL_OK) {
        sp_set_error(comm->error);
    } else if (atomic_load(&comm->abort_asked)) { /* the driver has not broken the communicator yet */
        st = comm->asked_status;
        sp_set_error(comm->asked_text);
    }
    pthread_mutex_unlock(&comm->mu);
    return st;
}

/* Become the driver for one look at the network. False if there is a driver, which looks by itself, or if the
 * communicator is broken. */
static bool start_driving(spccl_comm *comm)
{
    bool mine = false;
    pthread_mutex_lock(&comm->mu);
    if (comm->driver == SP_DRIVER_NONE && comm->broken == SPCCL_OK) {
        comm->driver = SP_DRIVER_CALLER;
        mine = true;
    }
    pthread_mutex_unlock(&comm->mu);
    return mine;
}

/* Move what the network has. An error breaks the communicator. */
static spccl_status progress_links(spccl_comm *comm)
{
    spccl_status st = sp_links_progress(&comm->links);
    if (st != SPCCL_OK)
        fail_all(comm, st, spccl_last_error());
    return st;
}

void sp_comm_poll(spccl_comm *comm)
{
    if (!start_driving(comm))
        return;
    (void)progress_links(comm);
    stop_driving(comm);
}

spccl_status sp_comm_poll_peers(spccl_comm *comm)
{
    spccl_status found = SPCCL_OK;
    if (!start_driving(comm))
        return SPCCL_OK;
    if (progress_links(comm) == SPCCL_OK)
        for (int r = 0; r < comm->world_size && found == SPCCL_OK; r++)
            for (int queue = 0; queue < SP_N_QUEUES && r != comm->rank && found == SPCCL_OK; queue++) {
                const void *message;
                size_t bytes;
                spccl_status st = sp_link_peek(&comm->links, r, queue, &message, &bytes);
                if (st == SPCCL_ERR_PEER)
                    found = st;
            }
    stop_driving(comm);
    return found;
}

void sp_comm_stop(spccl_comm *comm)
{
    pthread_mutex_lock(&comm->mu);
    while (comm->n_under_way != 0 || comm->driver != SP_DRIVER_NONE)
        pthread_cond_wait(&comm->cv, &comm->mu); /* ends: the last op has a deadline */
    comm->stop = true;
    pthread_cond_broadcast(&comm->cv);
    pthread_mutex_unlock(&comm->mu);
    if (comm->thread_started)
        pthread_join(comm->thread, NULL);
}
