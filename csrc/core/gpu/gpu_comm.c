/* gpu_comm.c - a communicator's GPU: waiting for streams, statistics, the end. See gpu_comm.h. */
#include "core/gpu/channels.h"
#include "core/gpu/gpu_direct.h"
#include "core/gpu/proxy.h"

#include "core/base/abi.h"
#include "core/base/clock.h"
#include "core/base/env.h"
#include "core/base/log.h"
#include "core/base/mem.h"

#include <sched.h>
#include <stdio.h>

/* How long destroy waits for the peers to call destroy too. */
#define BARRIER_MS 10000
/* How long destroy waits for kernels to end after it has set the abort flag. */
#define ABORT_MS 10000
/* How long a broken communicator keeps ipc memory: peers may still use it, and cannot be asked. */
#define BROKEN_IPC_MS 1000
#define WAIT_SPIN_NS 50000

/* Tests link this table, a GPU made of host memory. In all other programs the symbol is absent. */
extern const sp_gpu_ops sp_gpu_ops_fake __attribute__((weak, visibility("hidden")));

const sp_gpu_ops *sp_gpu_ops_here(void)
{
    return &sp_gpu_ops_fake != NULL ? &sp_gpu_ops_fake : sp_gpu_ops_get(NULL);
}

int spccl_cuda_device_count(void)
{
    const sp_gpu_ops *ops = sp_gpu_ops_here();
    int n = 0;
    return ops != NULL && ops->device_count(&n) == SPCCL_OK ? n : 0;
}

spccl_status sp_gpu_comm_get(spccl_comm *comm, const char *call, sp_gpu_comm **out)
{
    sp_gpu_comm *g = NULL;
    if (comm == NULL)
        return SP_FAIL(SPCCL_ERR_ARG, "%s: comm is NULL", call);
    SP_TRY(sp_comm_check_process(comm, call));
    g = atomic_load(&comm->gpu);
    if (g == NULL)
        return SP_FAIL(SPCCL_ERR_STATE,
                       "%s: rank %d of group \"%s\" has no GPU: call spccl_cuda_attach first", call,
                       comm->rank, comm->name);
    *out = g;
    return SPCCL_OK;
}

/* ---- waiting ---- */

static void pause_ns(int64_t since_ns)
{
    if (sp_now_ns() - since_ns < WAIT_SPIN_NS)
        sched_yield();
    else
        nanosleep(&(struct timespec){.tv_nsec = 50000}, NULL);
}

/* The caller has made the GPU current. */
static spccl_status wait_stream(sp_gpu_comm *g, void *stream, int64_t timeout_ms)
{
    int64_t start_ns = sp_now_ns(), deadline_ns = sp_deadline_in_ms(timeout_ms);
    for (;;) {
        spccl_status st = g->ops->stream_query(stream);
        sp_gpu_comm_look(g->comm); /* after success too: a kernel that gives up ends as well */
        SP_TRY(sp_comm_broken(g->comm));
        if (st != SPCCL_AGAIN)
            return st;
        if (sp_deadline_passed(deadline_ns))
            return SP_FAIL(SPCCL_ERR_TIMEOUT,
                           "rank %d, group \"%s\", GPU %d: the stream still had work after %lld ms",
                           g->comm->rank, g->comm->name, g->device.ordinal, (long long)timeout_ms);
        pause_ns(start_ns);
    }
}

spccl_status spccl_cuda_wait(spccl_comm *comm, void *stream, int64_t timeout_ms)
{
    sp_gpu_comm *g = NULL;
    spccl_status st;
    int before;
    SP_TRY(sp_gpu_comm_get(comm, "spccl_cuda_wait", &g));
    SP_TRY(g->ops->enter(g->device.ordinal, &before));
    st = wait_stream(g, stream, timeout_ms >= 0 ? timeout_ms : comm->timeout_ms);
    g->ops->leave(before);
    return st;
}

/* ---- counting ---- */

/* states: of all workers, sp_inbox_state, or in a group on several hosts sp_remote_state. */
static spccl_status read_states(const sp_gpu_comm *g, void *states, size_t state_bytes)
{
    sp_ring_area area = sp_remote_inbox_area(g->shape);
    size_t off = g->proxies == NULL ? sp_inbox_state_off(g->shape, 0) : sp_remote_state_off(&area, 0);
    spccl_status st;
    int before;
    SP_TRY(g->ops->enter(g->device.ordinal, &before));
    st = g->ops->read(states, g->inboxes[g->comm->rank] + off, g->shape.n_workers * state_bytes);
    g->ops->leave(before);
    return st;
}

static void add_counts(spccl_cuda_stats *s, uint64_t frame_bytes, const uint64_t *n_frames)
{
    s->wire_bytes_sent += frame_bytes;
    for (int f = 0; f < SPCCL_N_FORMATS; f++)
        s->n_frames_sent[f] += n_frames[f];
}

spccl_status spccl_cuda_get_stats(spccl_comm *comm, spccl_cuda_stats *out)
{
    sp_gpu_comm *g = NULL;
    spccl_cuda_stats s;
    size_t state_bytes;
    spccl_status st;
    void *states;
    SP_TRY(sp_gpu_comm_get(comm, "spccl_cuda_get_stats", &g));
    state_bytes = g->proxies == NULL ? sizeof(sp_inbox_state) : sizeof(sp_remote_state);
    states = sp_calloc(g->shape.n_workers, state_bytes);
    if (states == NULL)
        return SP_FAIL(SPCCL_ERR_NOMEM, "spccl_cuda_get_stats: %u workers", g->shape.n_workers);
    st = read_states(g, states, state_bytes);
    if (st == SPCCL_OK) {
        s = (spccl_cuda_stats){.device = g->device.ordinal,
                               .n_ctas = sp_tune_gpu_ctas(&g->limits, g->shape),
                               .inbox_bytes = sp_tune_gpu_inbox_bytes(&g->limits, g->shape)};
        if (g->proxies != NULL) {
            s.n_proxies = g->proxies->n_proxies;
            s.n_remote = (uint32_t)g->proxies->n_peers;
            s.pinned_bytes = sp_remote_pinned_bytes(g->shape, s.n_remote);
        }
        pthread_mutex_lock(&g->mu);
        s.n_collectives = g->n_launches;
        pthread_mutex_unlock(&g->mu);
        for (uint32_t w = 0; w < g->shape.n_workers; w++) {
            const sp_inbox_state *local = (const sp_inbox_state *)states + w;
            const sp_remote_state *remote = (const sp_remote_state *)states + w;
            if (g->proxies == NULL)
                add_counts(&s, local->frame_bytes, local->n_frames);
            else
                add_counts(&s, remote->frame_bytes, remote->n_frames);
        }
        st = sp_result_copy("spccl_cuda_stats", &s, sizeof s, out);
    }
    sp_free(states);
    return st;
}

/* ---- ending ---- */

static void free_imports(sp_gpu_comm *g)
{
    sp_channels_unmap(g);
    for (int r = 0; r < SP_GPU_RANKS_MAX; r++) {
        g->ops->memory_destroy(g->peers[r]);
        g->peers[r] = NULL;
    }
}

/* Memory that is kept until the process ends. Nothing reads the list: it makes the memory reachable, so that leak
 * checkers do not report it. */
static struct kept {
    sp_gpu_memory *memory;
    struct kept *next;
} * kept;
static pthread_mutex_t kept_lock = PTHREAD_MUTEX_INITIALIZER;

void sp_gpu_memory_end(const sp_gpu_ops *ops, sp_gpu_memory *m, bool in_use)
{
    struct kept *k;
    if (!in_use)
        ops->memory_destroy(m);
    if (!in_use || m == NULL)
        return;
    k = sp_calloc(1, sizeof *k);
    if (k == NULL)
        return;
    pthread_mutex_lock(&kept_lock);
    *k = (struct kept){.memory = m, .next = kept};
    kept = k;
    pthread_mutex_unlock(&kept_lock);
}

void sp_gpu_comm_free(sp_gpu_comm *g)
{
    int before;
    bool in_use;
    if (g == NULL)
        return;
    if (g->control != NULL && g->ops->enter(g->device.ordinal, &before) == SPCCL_OK) {
        in_use = !sp_proxies_close(g->proxies);
        sp_channels_free_all(g);
        free_imports(g);
        sp_gpu_memory_end(g->ops, g->own, in_use);
        if (in_use)
            sp_log(SP_LOG_WARN, g->comm->rank,
                   "group \"%s\": the net plugin that an earlier warning names may still use rings in the "
                   "memory of GPU %d: they stay allocated until the process ends",
                   g->comm->name, g->device.ordinal);
        g->ops->event_destroy(g->event);
        g->ops->event_destroy(g->capture_event);
        g->ops->control_destroy(g->control);
        g->ops->leave(before);
    } else { /* the memory of a GPU that cannot be entered stays */
        sp_channels_abandon(g);
        sp_proxies_abandon(g->proxies);
    }
    pthread_mutex_destroy(&g->mu);
    pthread_mutex_destroy(&g->look_mu);
    pthread_mutex_destroy(&g->channels_mu);
    sp_free(g);
}

spccl_status spccl_cuda_set_end_event(spccl_comm *comm, void *event)
{
    sp_gpu_comm *g = NULL;
    SP_TRY(sp_gpu_comm_get(comm, "spccl_cuda_set_end_event", &g));
    if (event == NULL || !g->caller_orders)
        return SP_FAIL(SPCCL_ERR_ARG, "spccl_cuda_set_end_event: %s",
                       event == NULL ? "event is NULL"
                                     : "config.caller_orders was 0: the library has events of its own");
    pthread_mutex_lock(&g->mu);
    g->end_event = event;
    pthread_mutex_unlock(&g->mu);
    return SPCCL_OK;
}

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
        sp_gpu_comm_look(comm);
        if (!flagged && (sp_comm_broken(comm) != SPCCL_OK || sp_deadline_passed(deadline_ns))) {
            __atomic_store_n(&g->control->abort, 1, __ATOMIC_RELEASE);
            deadline_ns = sp_deadline_in_ms(ABORT_MS);
            flagged = true;
        }
        if (flagged && sp_deadline_passed(deadline_ns))
            return false;
        pause_ns(start_ns);
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

void sp_gpu_comm_wait_broken(void)
{
    nanosleep(&(struct timespec){.tv_sec = BROKEN_IPC_MS / 1000}, NULL);
}

static void detach(spccl_comm *comm)
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
        sp_proxies_abandon(g->proxies);
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
    }
    sp_gpu_comm_free(g);
}

/* How groups on several hosts are served: for a rank that is alone on its host. */
static const char *describe_proxies(void)
{
    static _Thread_local char text[200];
    uint32_t n = 0;
    const char *setting = sp_env_text(SP_ENV_BETWEEN_HOSTS);
    if (strcmp(setting, "0") == 0)
        return "fallback (SPCCL_CUDA_BETWEEN_HOSTS=0)";
    if (sp_proxies_count(NULL, &n) != SPCCL_OK)
        return "SPCCL_CUDA_PROXIES is no number from 0 to 16";
    snprintf(text, sizeof text, "%s%u prox%s (%s) and at most 512M of pinned memory each",
             strcmp(setting, "auto") == 0 ? "over ib and ncclnet the fallback; over tcp " : "", n,
             n == 1 ? "y" : "ies",
             strcmp(sp_env_text(SP_ENV_PROXIES), "0") != 0
                 ? "SPCCL_CUDA_PROXIES"
                 : "by the usable cores, for a rank alone on its host");
    return text;
}

/* The GPU part: what it was built with, and which GPUs it finds. The text is valid until this thread's next
 * call. */
static void describe(spccl_info_entry *out)
{
    static _Thread_local char why[500];
    const sp_gpu_ops *ops = sp_gpu_ops_here();
    const char *why_none = NULL;
    int n = 0;
    if (ops == NULL) {
        (void)sp_gpu_ops_get(&why_none);
        snprintf(why, sizeof why, "not in this build: %s", why_none);
        *out = (spccl_info_entry){.kind = "part", .name = "cuda", .value = "absent", .why = why};
        return;
    }
    if (ops->device_count(&n) != SPCCL_OK)
        snprintf(why, sizeof why, "%s; no GPU can be used: %.200s", ops->about, spccl_last_error());
    else
        snprintf(
            why, sizeof why,
            "%s; %d GPU%s here; at most %s bytes of GPU memory of each group for peers; groups on several "
            "hosts: %s; channels: layout %u, memory as each set asks",
            ops->about, n, n == 1 ? "" : "s", sp_env_text(SP_ENV_INBOX_BYTES), describe_proxies(),
            SPCCL_CHANNEL_LAYOUT);
    *out = (spccl_info_entry){.kind = "part", .name = "cuda", .value = "in", .why = why};
}

const sp_gpu_part sp_gpu_part_here = {.look = sp_gpu_comm_look,
                                      .detach = detach,
                                      .describe = describe,
                                      .describe_memory = sp_gpu_group_describe_memory,
                                      .describe_link = sp_gpu_group_link,
                                      .describe_direct = sp_gpu_direct_describe};
