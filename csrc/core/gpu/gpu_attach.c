/* gpu_attach.c - gives a communicator its GPU, and takes it away again when the communicator ends. See gpu_comm.h.
 *
 * All ranks must return the same status, so all decide from the same data. (1) A host all-gather exchanges
 * facts about each rank's GPU, and every rank evaluates them by the same pure function. (2) Each rank
 * allocates its inbox, and all exchange whether it worked. (3) Each rank maps the peers' inboxes, and all
 * exchange whether it worked. Only after that may any rank launch a collective. */
#include "core/gpu/gpu_attach.h"
#include "core/gpu/channels/channels.h"
#include "core/gpu/proxy/proxy.h"

#include "core/base/clock.h"
#include "core/base/log.h"
#include "core/base/mem.h"

#include <stdio.h>

/* How long destroy waits for the peers to call destroy too. */
#define BARRIER_MS 10000
/* How long destroy waits for kernels to end after it has set the abort flag. */
#define ABORT_MS 10000

/* ---- memory ---- */

/* Has this rank's GPU access to those of the peers? A GPU that this process cannot see is not checked:
 * mapping its memory fails if there is no access. */
static spccl_status check_access(const sp_attach *a)
{
    const sp_gpu_comm *g = a->g;
    int n = 0;
    SP_TRY(g->ops->device_count(&n));
    for (int d = 0; d < n; d++) {
        sp_gpu_device seen;
        SP_TRY(g->ops->describe(d, &seen));
        for (int r = 0; r < a->comm->world_size; r++) {
            bool yes = true;
            if (!g->is_remote[r] && memcmp(seen.uuid, a->all[r].uuid, sizeof seen.uuid) == 0)
                SP_TRY(g->ops->can_access(g->device.ordinal, d, &yes));
            if (!yes)
                return SP_FAIL(
                    SPCCL_ERR_UNREACHABLE,
                    "no peer access between GPU %d '%s' of rank %d and GPU %d '%s' of rank %d%s: they "
                    "have neither NVLink nor PCIe peer access",
                    g->device.ordinal, g->device.name, a->comm->rank, a->all[r].ordinal, a->all[r].name, r,
                    a->all[r].pid == a->mine.pid ? " (of the same process)" : "");
        }
    }
    return SPCCL_OK;
}

static spccl_status make_memory(sp_attach *a)
{
    sp_gpu_comm *g = a->g;
    spccl_status st;
    int before;
    SP_TRY(check_access(a));
    SP_TRY(g->ops->enter(g->device.ordinal, &before));
    SP_TRY_TO(out, st, g->ops->control_create(&g->control, &g->control_device));
    SP_TRY_TO(out, st, g->ops->event_create(&g->event));
    SP_TRY_TO(out, st, g->ops->event_create(&g->capture_event));
    SP_TRY_TO(out, st,
              g->ops->memory_create(g->device.ordinal, sp_tune_gpu_inbox_bytes(&g->limits, g->shape),
                                    g->handles, a->spans_hosts && a->mine.direct != 0, &g->own));
    if (a->spans_hosts)
        st = sp_proxies_open(g);
out:
    g->ops->leave(before);
    if (st != SPCCL_OK) {
        char why[300];
        snprintf(why, sizeof why, "%s", spccl_last_error());
        if (g->own != NULL)
            return SP_FAIL(st,
                           "rank %d: %zu bytes of pinned memory and a proxy, for peers on other hosts: %s",
                           a->comm->rank, sp_tune_gpu_pinned_bytes(&g->limits, g->shape), why);
        return SP_FAIL(st, "rank %d: an inbox of %zu bytes on GPU %d '%s' with %llu bytes free: %s",
                       a->comm->rank, sp_tune_gpu_inbox_bytes(&g->limits, g->shape), g->device.ordinal,
                       g->device.name, (unsigned long long)a->mine.free_bytes, why);
    }
    return SPCCL_OK;
}

static spccl_status map_memory(sp_attach *a)
{
    sp_gpu_comm *g = a->g;
    spccl_status st = sp_gpu_share_exchange(a->share, g->own, sp_tune_gpu_inbox_bytes(&g->limits, g->shape),
                                            a->all[0].address, sizeof a->all[0], g->peers);
    sp_gpu_share_close(a->share); /* so that no peer waits for a rank that failed */
    a->share = NULL;
    SP_TRY(st);
    for (int r = 0; r < a->comm->world_size; r++)
        g->inboxes[r] = g->is_remote[r] ? g->proxies->outbox_device
                                        : g->ops->memory_address(r == a->comm->rank ? g->own : g->peers[r]);
    if (g->proxies != NULL)
        sp_proxies_find_rings(g->proxies);
    return SPCCL_OK;
}

/* ---- freeing ---- */

static void free_imports(sp_gpu_comm *g)
{
    sp_channels_unmap(g);
    for (int r = 0; r < SP_GPU_RANKS_MAX; r++) {
        g->ops->memory_destroy(g->peers[r]);
        g->peers[r] = NULL;
    }
}

/* Frees what there is and waits for nothing; accepts NULL. An inbox shared by ipc may be freed only once the
 * peers have closed their mappings of it. */
static void free_comm(sp_gpu_comm *g)
{
    int before;
    if (g == NULL)
        return;
    if (g->control != NULL && g->ops->enter(g->device.ordinal, &before) == SPCCL_OK) {
        sp_proxies_close(g->proxies, false);
        sp_channels_free_all(g, false);
        free_imports(g);
        g->ops->memory_destroy(g->own);
        g->ops->event_destroy(g->event);
        g->ops->event_destroy(g->capture_event);
        g->ops->control_destroy(g->control);
        g->ops->leave(before);
    } else { /* the memory of a GPU that cannot be entered stays */
        sp_channels_free_all(g, true);
        sp_proxies_close(g->proxies, true);
    }
    pthread_mutex_destroy(&g->mu);
    pthread_mutex_destroy(&g->poll_mu);
    pthread_mutex_destroy(&g->channels_mu);
    sp_free(g);
}

/* ---- the call ---- */

/* The last steps that can fail. After them the ranks exchange their status, and any rank may launch. */
static spccl_status map_and_watch(sp_attach *a)
{
    SP_TRY(map_memory(a));
    return sp_gpu_watchdog_add(a->g);
}

/* Connect the proxies. All ranks compare their status every SP_PROXIES_CONNECT_NS: a rank that fails could not tell the
 * others otherwise, and they would wait for its connections until their deadline. */
static spccl_status connect_hosts(sp_attach *a)
{
    spccl_status st;
    SP_TRY(sp_gpu_agree(a->comm, sp_proxies_meet(a->g->proxies)));
    do
        st = sp_gpu_agree(a->comm, sp_proxies_connect(a->g->proxies, a->deadline_ns));
    while (st == SPCCL_AGAIN);
    SP_TRY(st);
    if (a->direct)
        SP_TRY(sp_gpu_agree(a->comm, sp_proxies_agree_direct(a->g->proxies)));
    return sp_gpu_agree(a->comm, sp_proxies_start(a->g->proxies));
}

static spccl_status run(sp_attach *a, const spccl_cuda_config *given)
{
    spccl_status st = sp_attach_gather_facts(a, given);
    a->mine.status = (int32_t)st;
    if (st != SPCCL_OK)
        snprintf(a->mine.error, sizeof a->mine.error, "%s", spccl_last_error());
    SP_TRY(spccl_all_gather(a->comm, &a->mine, a->all, sizeof a->mine, SPCCL_UINT8, NULL));
    SP_TRY(sp_attach_decide(a));
    SP_TRY(sp_gpu_agree(a->comm, make_memory(a)));
    if (a->spans_hosts)
        SP_TRY(connect_hosts(a));
    st = sp_gpu_agree(a->comm, map_and_watch(a));
    if (st != SPCCL_OK)
        sp_gpu_watchdog_remove(a->g);
    if (st != SPCCL_OK && sp_comm_broken(a->comm) == SPCCL_OK) {
        /* No rank may free an inbox that a peer still has mapped. */
        char text[600];
        snprintf(text, sizeof text, "%s", spccl_last_error());
        free_imports(a->g);
        (void)sp_gpu_agree(a->comm, SPCCL_OK);
        return SP_FAIL(st, "%s", text);
    }
    return st;
}

static void start(spccl_comm *comm, sp_gpu_comm *g)
{
    sp_gpu_info_write_links(g);
    pthread_mutex_lock(&comm->mu);
    comm->gpu_abort = &g->control->abort;
    pthread_mutex_unlock(&comm->mu);
    atomic_store(&comm->gpu, g);
    sp_log(SP_LOG_INFO, comm->rank,
           "group \"%s\": GPU %d (%s), %u workers on %u multiprocessors, inbox of %zu bytes shared by %s",
           comm->name, g->device.ordinal, g->device.name, g->shape.n_workers,
           sp_tune_gpu_ctas(&g->limits, g->shape), sp_tune_gpu_inbox_bytes(&g->limits, g->shape), g->handles);
}

static spccl_status check_call(const spccl_comm *comm)
{
    SP_TRY(sp_comm_check(comm, __func__));
    if (atomic_load(&comm->gpu) != NULL)
        return SP_FAIL(SPCCL_ERR_STATE, "spccl_cuda_attach: rank %d of group \"%s\" has its GPU already",
                       comm->rank, comm->name);
    if (comm->world_size > SP_GPU_RANKS_MAX)
        return SP_FAIL(SPCCL_ERR_UNSUPPORTED,
                       "spccl_cuda_attach: group \"%s\" has %d ranks, GPU collectives take at most %d",
                       comm->name, comm->world_size, SP_GPU_RANKS_MAX);
    return SPCCL_OK;
}

/* NULL: out of memory. */
static sp_gpu_comm *make_comm(spccl_comm *comm)
{
    sp_gpu_comm *g = sp_calloc(1, sizeof *g);
    if (g == NULL)
        return NULL;
    g->comm = comm;
    g->ops = sp_gpu_ops_here();
    pthread_mutex_init(&g->mu, NULL);
    pthread_mutex_init(&g->poll_mu, NULL);
    pthread_mutex_init(&g->channels_mu, NULL);
    return g;
}

spccl_status spccl_cuda_attach(spccl_comm *comm, const spccl_cuda_config *given)
{
    sp_attach a = {.comm = comm}; /* on the stack: a rank without memory must tell the others */
    char text[1024];
    spccl_status st;
    SP_TRY(check_call(comm));
    a.deadline_ns = sp_deadline_in_ms(comm->timeout_ms);
    a.g = make_comm(comm);
    st = run(&a, given);
    if (st == SPCCL_OK) {
        start(comm, a.g);
        return SPCCL_OK;
    }
    snprintf(text, sizeof text, "%s", spccl_last_error());
    sp_gpu_share_close(a.share);
    free_comm(a.g);
    sp_set_error(text); /* freeing may have overwritten it */
    return st;
}

/* ---- the end ---- */

/* Has the last launch outside of captures ended? SPCCL_AGAIN: not yet. */
static spccl_status query_last(const sp_gpu_comm *g)
{
    if (g->end_event != NULL)
        return g->ops->event_query(g->end_event);
    return g->launched ? g->ops->event_query(g->event) : SPCCL_OK;
}

/* Wait until the last launch has ended. False: it has not ended, although the abort flag is set. */
static bool drain(sp_gpu_comm *g)
{
    spccl_comm *comm = g->comm;
    int64_t start_ns = sp_now_ns(), deadline_ns = sp_deadline_in_ms(comm->timeout_ms);
    bool flagged = false;
    for (;;) {
        spccl_status st = query_last(g);
        if (st != SPCCL_AGAIN)
            return true; /* done, or the GPU is lost and runs nothing */
        sp_gpu_comm_find_errors(comm);
        if (!flagged && (sp_comm_broken(comm) != SPCCL_OK || sp_deadline_passed(deadline_ns))) {
            __atomic_store_n(&g->control->abort, 1, __ATOMIC_RELEASE);
            deadline_ns = sp_deadline_in_ms(ABORT_MS);
            flagged = true;
        }
        if (flagged && sp_deadline_passed(deadline_ns))
            return false;
        sp_gpu_pause(start_ns);
    }
}

/* Wait for the other ranks, at most BARRIER_MS. After that the group is broken: it ends anyway. */
static void wait_for_peers(spccl_comm *comm)
{
    uint8_t mine = 1, all[SP_GPU_RANKS_MAX];
    sp_time_limit limit = {.timeout_ms = comm->timeout_ms}; /* read once: any thread may set it */
    if (comm->world_size == 1 || sp_comm_broken(comm) != SPCCL_OK)
        return;
    if (limit.timeout_ms > BARRIER_MS)
        limit.timeout_ms = BARRIER_MS;
    limit.deadline_ns = sp_deadline_in_ms(limit.timeout_ms);
    if (sp_comm_all_gather(comm, &mine, all, 1, limit, NULL) != SPCCL_OK)
        sp_log(SP_LOG_INFO, comm->rank, "group \"%s\": destroy does not wait for the other ranks: %s",
               comm->name, spccl_last_error());
}

void sp_gpu_comm_detach(spccl_comm *comm)
{
    sp_gpu_comm *g = atomic_load(&comm->gpu);
    bool drained = true; /* a GPU that cannot be entered runs nothing */
    int before;
    if (g == NULL)
        return;
    if (g->ops->enter(g->device.ordinal, &before) == SPCCL_OK) {
        drained = drain(g);
        g->ops->leave(before);
    } else {
        sp_log(SP_LOG_ERROR, comm->rank, "group \"%s\": GPU %d cannot be entered: its memory stays: %s",
               comm->name, g->device.ordinal, spccl_last_error());
    }
    sp_gpu_watchdog_remove(g); /* before the barrier: after it the peers may leave at any time */
    atomic_store(&comm->gpu, NULL);
    sp_proxies_leave(g->proxies);
    sp_channels_drain(g);
    wait_for_peers(comm);
    pthread_mutex_lock(&comm->mu);
    comm->gpu_abort = NULL;
    pthread_mutex_unlock(&comm->mu);
    if (!drained) {
        /* If memory that a kernel still uses were freed, the process would lose its GPU. */
        sp_log(SP_LOG_ERROR, comm->rank,
               "group \"%s\": a kernel on GPU %d does not end: the inbox of %zu bytes stays allocated",
               comm->name, g->device.ordinal, sp_tune_gpu_inbox_bytes(&g->limits, g->shape));
        sp_channels_stop(g);
        sp_proxies_close(g->proxies, true);
        return;
    }
    if ((strcmp(g->handles, "ipc") == 0 || sp_channels_use_ipc(g)) && comm->world_size > 1) {
        if (g->ops->enter(g->device.ordinal, &before) == SPCCL_OK) {
            free_imports(g);
            g->ops->leave(before);
        }
        if (sp_comm_broken(comm) == SPCCL_OK)
            wait_for_peers(comm); /* until they have closed their mappings too */
        else
            sp_gpu_comm_wait_broken();
    } else if (g->channels != NULL && sp_comm_broken(comm) != SPCCL_OK) {
        sp_gpu_comm_wait_broken(); /* kernels of users, which may still wait, see that too */
    }
    free_comm(g);
}
