/* gpu_watchdog.c - one thread per process looks for failures on the GPUs of all communicators; see
 * gpu_comm.h. The report of a kernel that gave up becomes the communicator's error. The other direction is
 * not here: when a communicator breaks, sp_comm_break and the engine set the abort flag that its kernels
 * read. */
#include "core/gpu/channels/channels.h"

#include "core/base/clock.h"
#include "core/base/dtype.h"
#include "core/base/log.h"
#include "core/base/process.h"
#include "core/base/thread.h"

#include <inttypes.h>
#include <stdio.h>

#define PERIOD_NS (20 * 1000000)
/* A lost peer may have sent all that it had to send. Kernels get this long to take it. */
#define GRACE_NS (INT64_C(200) * 1000000)

static pthread_mutex_t list_mu = PTHREAD_MUTEX_INITIALIZER;
static sp_gpu_comm *list, *visited; /* visited: the watchdog looks at it just now */
static bool thread_runs;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static int install_error;

/* A child of fork has no watchdog thread, and the groups in the list belong to its parent. */
static void before_fork(void)
{
    pthread_mutex_lock(&list_mu);
}
static void in_parent(void)
{
    pthread_mutex_unlock(&list_mu);
}
static void in_child(void)
{
    list = visited = NULL;
    thread_runs = false;
    pthread_mutex_unlock(&list_mu);
}
static void install_fork_handlers(void)
{
    install_error = pthread_atfork(before_fork, in_parent, in_child);
}

/* text: the collective of a report. waited: its timeout, such as " 30 s", or "" if the launch is too old. */
static void describe_launch(sp_gpu_comm *g, const sp_gpu_report *r, char *text, size_t cap, char *waited,
                            size_t waited_cap)
{
    sp_gpu_launch l;
    uint32_t seq = r->seq;
    pthread_mutex_lock(&g->mu);
    l = g->history[seq % SP_GPU_HISTORY];
    pthread_mutex_unlock(&g->mu);
    waited[0] = '\0';
    if (l.seq != seq || l.n_elems == 0) {
        snprintf(text, cap, "collective no. %" PRIu32, seq);
        return;
    }
    snprintf(waited, waited_cap, " %.3g s",
             (double)sp_gpu_wait_ns(l.timeout_ns, (sp_gpu_fault)r->fault, r->queue) / 1e9);
    snprintf(text, cap, "%s no. %" PRIu32 " (%" PRIu64 " %s)", sp_coll_name(l.coll), seq, l.n_elems,
             sp_dtype_name(l.dtype));
}

/* text: a report in words. Returns the status that belongs to it. */
static spccl_status describe_report(sp_gpu_comm *g, const sp_gpu_report *r, char *text, size_t cap)
{
    const spccl_comm *comm = g->comm;
    const char *what = r->queue == SP_INBOX_INPUT     ? "inputs"
                       : r->queue == SP_INBOX_RELAYED ? "relayed results"
                                                      : "results";
    char launch[120], where[320], waited[32];
    describe_launch(g, r, launch, sizeof launch, waited, sizeof waited);
    snprintf(where, sizeof where, "rank %d, group \"%s\", GPU %d: %s:", comm->rank, comm->name,
             g->device.ordinal, launch);
    switch ((sp_gpu_fault)r->fault) {
    case SP_GPU_NO_DATA:
        snprintf(text, cap,
                 "%s waited%s for %s of rank %u (worker %u, slice %u: its frame starts at %" PRIu64
                 ", sent is up to %" PRIu64 "): rank %u died, is too slow, or called another collective",
                 where, waited, what, r->peer, r->worker, r->slice, r->wanted, r->seen, r->peer);
        return SPCCL_ERR_TIMEOUT;
    case SP_GPU_NO_SPACE:
        snprintf(text, cap,
                 "%s waited%s for rank %u to take %s (worker %u, slice %u: wanted up to %" PRIu64
                 ", taken is up to %" PRIu64 "): rank %u died, is too slow, or called another collective",
                 where, waited, r->peer, what, r->worker, r->slice, r->wanted, r->seen, r->peer);
        return SPCCL_ERR_TIMEOUT;
    case SP_GPU_BAD_FRAME:
        if (r->detail == SP_GPU_RULE_INDEX) {
            snprintf(
                text, cap,
                "%s the list of elements in a frame of rank %u is broken (%s, worker %u, slice %u; rules 20 "
                "to 27 of docs/FORMAT.md): do all ranks run the same version of spccl?",
                where, r->peer, what, r->worker, r->slice);
            return SPCCL_ERR_FORMAT;
        }
        snprintf(
            text, cap,
            "%s a frame of rank %u breaks rule %u of docs/FORMAT.md 4 (%s, worker %u, slice %u: got %" PRIu64
            ", wanted %" PRIu64 "): do all ranks call the same collective with the same size and dtype?",
            where, r->peer, r->detail, what, r->worker, r->slice, r->seen, r->wanted);
        return SPCCL_ERR_FORMAT;
    case SP_GPU_OTHER_LIMIT:
        snprintf(text, cap,
                 "%s ranks disagree: rank %u called it with max_ctas %" PRIu64
                 ", rank %d with max_ctas %" PRIu64 " (0: no limit): all ranks must give the same "
                 "(spccl_cuda_set_options)",
                 where, r->peer, r->seen, comm->rank, r->wanted);
        return SPCCL_ERR_MISMATCH;
    case SP_GPU_NO_FAULT:
        break;
    }
    snprintf(text, cap, "%s a report with the unknown fault %u", where, r->fault);
    return SPCCL_ERR_BUG;
}

static void read_report(sp_gpu_comm *g)
{
    spccl_comm *comm = g->comm;
    sp_gpu_report r;
    char text[sizeof comm->error];
    spccl_status st;
    if (__atomic_load_n(&g->control->report.fault, __ATOMIC_ACQUIRE) == SP_GPU_NO_FAULT)
        return;
    if (atomic_load(&comm->abort_asked) || sp_comm_broken(comm) != SPCCL_OK)
        return; /* kernels ended because of the abort */
    r = g->control->report;
    st = describe_report(g, &r, text, sizeof text);
    if (sp_comm_break(comm, st, text)) /* another thread may have done it already */
        sp_log(SP_LOG_ERROR, comm->rank, "%s", text);
}

static void poll_peers(sp_gpu_comm *g)
{
    spccl_comm *comm = g->comm;
    char text[sizeof comm->error];
    if (sp_comm_poll_peers(comm) == SPCCL_OK)
        return;
    if (g->gone_since_ns == 0)
        g->gone_since_ns = sp_now_ns();
    if (sp_now_ns() - g->gone_since_ns < GRACE_NS)
        return;
    snprintf(text, sizeof text, "rank %d, group \"%s\", GPU %d: %.700s", comm->rank, comm->name,
             g->device.ordinal, spccl_last_error());
    sp_comm_break(comm, SPCCL_ERR_PEER, text);
}

void sp_gpu_comm_find_errors(spccl_comm *comm)
{
    sp_gpu_comm *g = atomic_load(&comm->gpu);
    if (g == NULL)
        return;
    /* Every caller reads the report, even while another thread does. Otherwise a caller that has seen a
     * kernel end could miss that the kernel gave up. */
    read_report(g);
    sp_channels_find_errors(g);
    if (comm->world_size > 1 && pthread_mutex_trylock(&g->poll_mu) == 0) {
        poll_peers(g);
        pthread_mutex_unlock(&g->poll_mu);
    }
}

/* ---- the thread ---- */

static void *watch(void *arg)
{
    (void)arg;
    pthread_mutex_lock(&list_mu);
    while (list != NULL) {
        for (visited = list; visited != NULL; visited = visited->next) {
            pthread_mutex_unlock(&list_mu);
            sp_gpu_comm_find_errors(visited->comm);
            pthread_mutex_lock(&list_mu);
        }
        pthread_mutex_unlock(&list_mu);
        nanosleep(&(struct timespec){.tv_nsec = PERIOD_NS}, NULL);
        pthread_mutex_lock(&list_mu);
    }
    thread_runs = false; /* the list is empty: the next group that is added starts a new thread */
    pthread_mutex_unlock(&list_mu);
    return NULL;
}

static spccl_status start_locked(void)
{
    if (thread_runs)
        return SPCCL_OK;
    SP_TRY(sp_thread_start("spccl-gpu", watch, NULL, NULL));
    thread_runs = true;
    return SPCCL_OK;
}

spccl_status sp_gpu_watchdog_add(sp_gpu_comm *g)
{
    spccl_status st;
    pthread_once(&once, install_fork_handlers);
    SP_TRY(sp_atfork_status(install_error));
    pthread_mutex_lock(&list_mu);
    g->next = list;
    list = g;
    st = start_locked();
    if (st != SPCCL_OK)
        list = g->next;
    pthread_mutex_unlock(&list_mu);
    return st;
}

void sp_gpu_watchdog_remove(sp_gpu_comm *g)
{
    pthread_mutex_lock(&list_mu);
    while (visited == g) {
        /* The watchdog goes on to g->next, so g must stay in the list until then. */
        pthread_mutex_unlock(&list_mu);
        nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
        pthread_mutex_lock(&list_mu);
    }
    for (sp_gpu_comm **at = &list; *at != NULL; at = &(*at)->next)
        if (*at == g) {
            *at = g->next;
            break;
        }
    pthread_mutex_unlock(&list_mu);
}
