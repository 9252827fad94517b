/* gpu_attach.c - gives a communicator its GPU: spccl_cuda_attach. See gpu_comm.h.
 *
 * All ranks must return the same status, so all decide from the same data. (1) A host all-gather exchanges
 * facts about each rank's GPU, and every rank evaluates them by the same pure function. (2) Each rank
 * allocates its inbox, and all exchange whether it worked. (3) Each rank maps the peers' inboxes, and all
 * exchange whether it worked. Only after that may any rank launch a collective. */
#include "core/gpu/proxy.h"

#include "core/base/abi.h"
#include "core/base/clock.h"
#include "core/base/env.h"
#include "core/base/log.h"
#include "core/base/mem.h"
#include "core/contract/gpu_share.h"

#include <stdio.h>
#include <unistd.h>

#define FACTS_MAGIC 0x46475053u /* "SPGF" */

enum { HANDLES_AUTO, HANDLES_FD, HANDLES_IPC };
static const char *const handles_names[] = {"auto", "fd", "ipc"};

/* What a rank tells the others. The struct is sent as it is; ranks of another version are refused first. */
struct facts {
    uint32_t magic, n_bytes;
    char version[16];
    int32_t status; /* not SPCCL_OK: this rank cannot take part; `error` is the reason */
    int32_t ordinal, pid, format;
    uint32_t n_sms;
    uint8_t workers[SP_FUSED_SERVED_MAX][6]; /* as in sp_gpu_limits; the rest is zero */
    uint32_t max_ctas, handles, can_share_fd;
    uint8_t address[SP_GPU_SHARE_ADDRESS_BYTES];
    uint8_t uuid[16];
    uint64_t inbox_bytes, free_bytes;
    uint32_t fallback;
    char name[64];
    uint32_t hops; /* as in sp_gpu_limits */
    char error[448];
    uint32_t between_hosts;
    uint32_t n_proxies; /* that this rank would like */
};
_Static_assert(SP_FUSED_OPS <= 6, "facts.workers");
_Static_assert(sizeof(struct facts) == 688, "no padding, and the same for every compiler");

struct attach {
    spccl_comm *comm;
    sp_gpu_comm *g;
    sp_gpu_share *share;
    struct facts mine, all[SP_GPU_RANKS_MAX];
    bool spans_hosts;
    int64_t deadline_ns;
};

/* ---- the facts of this rank ---- */

static spccl_status read_settings(const spccl_cuda_config *config, struct facts *f)
{
    const char *handles = sp_env_text(SP_ENV_NVLINK_HANDLES);
    const char *inbox = sp_env_text(SP_ENV_INBOX_BYTES);
    int64_t n;
    SP_TRY(sp_env_number(SP_ENV_MAX_CTAS, &n));
    f->max_ctas = n != 0 ? (uint32_t)n : config->max_ctas;
    SP_TRY(sp_env_number(SP_ENV_BETWEEN_HOSTS, &n));
    f->between_hosts = (uint32_t)n;
    SP_TRY(sp_env_number(SP_ENV_INBOX_BYTES, &n));
    f->inbox_bytes = (uint64_t)n;
    /* The setting wins only if it differs from its default. */
    if (config->inbox_bytes != 0 && strcmp(inbox, sp_env_describe(SP_ENV_INBOX_BYTES)->default_text) == 0)
        f->inbox_bytes = config->inbox_bytes;
    for (f->handles = HANDLES_AUTO; f->handles <= HANDLES_IPC; f->handles++)
        if (strcmp(handles, handles_names[f->handles]) == 0)
            return SPCCL_OK;
    return SP_FAIL(SPCCL_ERR_SETTING, "SPCCL_NVLINK_HANDLES=\"%s\": wanted auto, fd or ipc", handles);
}

static spccl_status pick_device(struct attach *a, const spccl_cuda_config *config)
{
    sp_gpu_comm *g = a->g;
    int n = 0, ordinal = config->device;
    if (g->ops == NULL)
        return SP_FAIL(SPCCL_ERR_UNSUPPORTED, "this build of spccl has no CUDA (`spccl info` says why)");
    SP_TRY(g->ops->device_count(&n));
    if (n == 0)
        return SP_FAIL(SPCCL_ERR_DEVICE, "no GPU that CUDA can use: no driver, no device, or all hidden by "
                                         "CUDA_VISIBLE_DEVICES");
    if (ordinal == -1)
        SP_TRY(g->ops->current_device(&ordinal));
    if (ordinal < 0 || ordinal >= n)
        return SP_FAIL(SPCCL_ERR_ARG, "GPU %d: wanted 0 to %d, or -1 for the current one", ordinal, n - 1);
    return g->ops->describe(ordinal, &g->device);
}

static spccl_status ask_device(struct attach *a)
{
    sp_gpu_comm *g = a->g;
    struct facts *f = &a->mine;
    uint32_t workers[SP_FUSED_OPS] = {0}, world_size = (uint32_t)a->comm->world_size;
    size_t free_bytes = 0;
    spccl_status st;
    int before;
    f->ordinal = g->device.ordinal;
    f->n_sms = g->device.n_sms;
    f->can_share_fd = g->device.can_share_fd;
    memcpy(f->uuid, g->device.uuid, sizeof f->uuid);
    snprintf(f->name, sizeof f->name, "%s", g->device.name);
    SP_TRY(g->ops->enter(g->device.ordinal, &before));
    st = g->ops->memory_free(&free_bytes);
    for (uint32_t served = 1; st == SPCCL_OK && served <= SP_FUSED_SERVED_MAX; served++) {
        st = g->ops->fused_workers_per_cta(g->device.ordinal, world_size, served,
                                           a->comm->links.hosts != NULL, workers);
        for (int op = 0; op < SP_FUSED_OPS; op++)
            f->workers[served - 1][op] = (uint8_t)workers[op];
    }
    g->ops->leave(before);
    f->free_bytes = free_bytes;
    return st;
}

static spccl_status still_whole(void *ctx)
{
    spccl_comm *comm = ctx;
    SP_TRY(sp_comm_poll_peers(comm));
    return sp_comm_broken(comm);
}

static spccl_status gather_facts(struct attach *a, const spccl_cuda_config *config)
{
    spccl_comm *comm = a->comm;
    sp_gpu_share_config sc = {.rank = comm->rank,
                              .world_size = comm->world_size,
                              .secret = comm->links.secret,
                              .host = comm->links.host,
                              .group_tag = comm->links.group_tag,
                              .ops = a->g->ops,
                              .deadline_ns = a->deadline_ns,
                              .still = still_whole,
                              .ctx = comm};
    a->mine.magic = FACTS_MAGIC;
    a->mine.n_bytes = sizeof a->mine;
    a->mine.pid = (int32_t)getpid();
    a->mine.format = (int32_t)comm->format;
    snprintf(a->mine.version, sizeof a->mine.version, "%s", SPCCL_VERSION_TEXT);
    a->mine.fallback = config->fallback;
    a->mine.hops = !comm->schedule_forced ? 0 : comm->schedule == SP_SCHED_ONESHOT ? 1 : 2;
    if (config->reserved != 0)
        return SP_FAIL(SPCCL_ERR_ARG, "spccl_cuda_config.reserved is %u, wanted 0", config->reserved);
    if (config->decline)
        return SP_FAIL(SPCCL_ERR_UNREACHABLE,
                       "GPU collectives are turned off on this rank (spccl_cuda_config.decline; in torch "
                       "SPCCL_CUDA_ENGINE=0 or cuda_engine=False), and they need the GPUs of all ranks: to "
                       "use them, enable "
                       "them on every rank");
    SP_TRY(read_settings(config, &a->mine));
    SP_TRY(sp_proxies_count(comm, &a->mine.n_proxies));
    SP_TRY(pick_device(a, config));
    SP_TRY(ask_device(a));
    sc.ordinal = a->g->device.ordinal;
    SP_TRY(sp_gpu_share_open(&sc, &a->share));
    return sp_gpu_share_address(a->share, a->mine.address);
}

/* ---- the decision from the facts: every rank comes to the same result ---- */

static const char *hops_name(uint32_t hops)
{
    return hops == 0 ? "auto" : hops == 1 ? "oneshot" : "direct";
}

static spccl_status compare_with_first(const struct facts *all, int r)
{
    const struct facts *f = &all[r], *first = &all[0];
    if (f->magic != FACTS_MAGIC || f->n_bytes != sizeof *f || f->version[sizeof f->version - 1] != '\0' ||
        f->error[sizeof f->error - 1] != '\0' || f->name[sizeof f->name - 1] != '\0' ||
        strcmp(f->version, first->version) != 0)
        return SP_FAIL(SPCCL_ERR_MISMATCH,
                       "rank %d has spccl %.16s, rank 0 has %.16s: install the same on all", r, f->version,
                       first->version);
    if (f->fallback != first->fallback)
        return SP_FAIL(
            SPCCL_ERR_MISMATCH,
            "rank 0 and rank %d would move CUDA tensors by different means where GPUs cannot map each "
            "other's memory (config.fallback %u and %u): in torch set SPCCL_CUDA_FALLBACK alike "
            "on all, and install the same torch",
            r, first->fallback, f->fallback);
    if (f->status != SPCCL_OK)
        return SP_FAIL((spccl_status)f->status, "rank %d: %s", r, f->error);
    if (f->handles != first->handles || f->handles > HANDLES_IPC)
        return SP_FAIL(SPCCL_ERR_MISMATCH,
                       "SPCCL_NVLINK_HANDLES differs between rank 0 and rank %d: set it alike on all", r);
    if (f->format != first->format)
        return SP_FAIL(SPCCL_ERR_MISMATCH,
                       "rank 0 forces format %s, rank %d %s: set SPCCL_FORMAT alike on all",
                       first->format < 0 ? "auto" : spccl_format_name((spccl_format)first->format), r,
                       f->format < 0 ? "auto" : spccl_format_name((spccl_format)f->format));
    if (f->hops != first->hops)
        return SP_FAIL(SPCCL_ERR_MISMATCH, "rank 0 has SPCCL_SCHEDULE=%s, rank %d %s: set it alike on all",
                       hops_name(first->hops), r, hops_name(f->hops));
    if (f->handles == HANDLES_FD && !f->can_share_fd)
        return SP_FAIL(SPCCL_ERR_SETTING,
                       "SPCCL_NVLINK_HANDLES=fd: GPU %d '%s' of rank %d cannot export memory as descriptors",
                       f->ordinal, f->name, r);
    return SPCCL_OK;
}

/* Which ranks are on other hosts than this one? Such groups are allowed if all ranks say so. */
static spccl_status find_remote(struct attach *a)
{
    int n = a->comm->world_size, other = 0, refuses = -1;
    for (int r = 0; r < n; r++) {
        a->g->is_remote[r] = !sp_gpu_share_same_host(a->all[r].address, a->mine.address);
        if (other == 0 && !sp_gpu_share_same_host(a->all[r].address, a->all[0].address))
            other = r;
        if (refuses < 0 && a->all[r].between_hosts == 0)
            refuses = r;
    }
    a->spans_hosts = other != 0;
    if (other == 0 || refuses < 0)
        return SPCCL_OK;
    return SP_FAIL(SPCCL_ERR_UNREACHABLE,
                   "rank 0 (GPU %d '%s') and rank %d (GPU %d '%s') are on different hosts, or in different "
                   "network namespaces of one: their GPUs cannot map each other's memory, and rank %d has "
                   "SPCCL_CUDA_BETWEEN_HOSTS=0",
                   a->all[0].ordinal, a->all[0].name, other, a->all[other].ordinal, a->all[other].name,
                   refuses);
}

static uint32_t n_sharing(const struct facts *all, int n_ranks, int r)
{
    uint32_t n = 0;
    for (int i = 0; i < n_ranks; i++)
        n += memcmp(all[i].uuid, all[r].uuid, sizeof all[r].uuid) == 0;
    return n;
}

static uint32_t least_not_zero(uint32_t a, uint32_t b)
{
    return a == 0 || (b != 0 && b < a) ? b : a;
}

static void find_limits(const struct facts *all, int n_ranks, sp_gpu_limits *l)
{
    *l = (sp_gpu_limits){.world_size = (uint32_t)n_ranks,
                         .n_sms = UINT32_MAX,
                         .inbox_bytes = all[0].inbox_bytes,
                         .hops = all[0].hops};
    for (int r = 0; r < n_ranks; r++) {
        uint32_t n_sms = all[r].n_sms / n_sharing(all, n_ranks, r);
        if (n_sms < l->n_sms)
            l->n_sms = n_sms;
        for (uint32_t served = 0; served < SP_FUSED_SERVED_MAX; served++)
            for (int op = 0; op < SP_FUSED_OPS; op++)
                if (r == 0 || all[r].workers[served][op] < l->workers_per_cta[served][op])
                    l->workers_per_cta[served][op] = all[r].workers[served][op];
        if (all[r].inbox_bytes < l->inbox_bytes)
            l->inbox_bytes = all[r].inbox_bytes;
        l->max_ctas = least_not_zero(l->max_ctas, all[r].max_ctas);
        l->n_proxies = least_not_zero(l->n_proxies, all[r].n_proxies);
    }
}

static spccl_status decide(struct attach *a)
{
    sp_gpu_comm *g = a->g;
    int n = a->comm->world_size;
    bool all_fd = true;
    for (int r = 0; r < n; r++) {
        SP_TRY(compare_with_first(a->all, r));
        all_fd = all_fd && a->all[r].can_share_fd;
    }
    g->handles = a->all[0].handles == HANDLES_IPC || !all_fd ? "ipc" : "fd";
    SP_TRY(find_remote(a));
    find_limits(a->all, n, &g->limits);
    if (a->spans_hosts && g->limits.inbox_bytes > SP_PROXIES_INBOX_MAX)
        g->limits.inbox_bytes = SP_PROXIES_INBOX_MAX;
    SP_TRY(sp_tune_gpu_shape(&g->limits, &g->shape));
    for (int r = 0; r < n; r++) {
        const struct facts *f = &a->all[r];
        uint64_t needed = (uint64_t)sp_inbox_bytes(g->shape) * n_sharing(a->all, n, r);
        if (needed > f->free_bytes)
            return SP_FAIL(
                SPCCL_ERR_NOMEM,
                "rank %d: GPU %d '%s' has %llu bytes free, the inbox needs %llu: free some, or set "
                "SPCCL_INBOX_BYTES or SPCCL_MAX_CTAS lower",
                r, f->ordinal, f->name, (unsigned long long)f->free_bytes, (unsigned long long)needed);
    }
    return SPCCL_OK;
}

/* ---- one status for all ranks ---- */

struct verdict {
    int32_t status;
    char text[508];
};

/* How much a rank's status explains. AGAIN: it is not done. A rank that timed out or lost a peer did so because another rank failed;
 * the status of that other rank explains more. */
static int weight(int32_t status)
{
    switch (status) {
    case SPCCL_OK:
        return 0;
    case SPCCL_AGAIN:
        return 1;
    case SPCCL_ERR_TIMEOUT:
    case SPCCL_ERR_PEER:
        return 2;
    default:
        return 3;
    }
}

/* Exchange each rank's status. All return the same: OK, or the status of greatest weight, of the lowest such
 * rank. */
static spccl_status agree(struct attach *a, spccl_status st)
{
    struct verdict mine = {.status = st}, all[SP_GPU_RANKS_MAX];
    int worst = 0;
    if (st != SPCCL_OK)
        snprintf(mine.text, sizeof mine.text, "%s", spccl_last_error());
    SP_TRY(spccl_all_gather(a->comm, &mine, all, sizeof mine, SPCCL_UINT8, NULL));
    for (int r = 1; r < a->comm->world_size; r++)
        if (weight(all[r].status) > weight(all[worst].status))
            worst = r;
    if (all[worst].status == SPCCL_OK)
        return SPCCL_OK;
    all[worst].text[sizeof all[worst].text - 1] = '\0';
    return SP_FAIL((spccl_status)all[worst].status, "%s", all[worst].text);
}

/* ---- memory ---- */

/* Has this rank's GPU access to those of the peers? A GPU that this process cannot see is not checked:
 * mapping its memory fails if there is no access. */
static spccl_status check_access(const struct attach *a)
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

static spccl_status make_memory(struct attach *a)
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
              g->ops->memory_create(g->device.ordinal, sp_inbox_bytes(g->shape), g->handles, &g->own));
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
                           a->comm->rank, 2 * sp_inbox_bytes(g->shape), why);
        return SP_FAIL(st, "rank %d: an inbox of %zu bytes on GPU %d '%s' with %llu bytes free: %s",
                       a->comm->rank, sp_inbox_bytes(g->shape), g->device.ordinal, g->device.name,
                       (unsigned long long)a->mine.free_bytes, why);
    }
    return SPCCL_OK;
}

static spccl_status map_memory(struct attach *a)
{
    sp_gpu_comm *g = a->g;
    uint8_t addresses[SP_GPU_RANKS_MAX * SP_GPU_SHARE_ADDRESS_BYTES];
    spccl_status st;
    for (int r = 0; r < a->comm->world_size; r++)
        memcpy(addresses + (size_t)r * SP_GPU_SHARE_ADDRESS_BYTES, a->all[r].address,
               SP_GPU_SHARE_ADDRESS_BYTES);
    st = sp_gpu_share_exchange(a->share, g->own, sp_inbox_bytes(g->shape), addresses, g->peers);
    sp_gpu_share_close(a->share); /* so that no peer waits for a rank that failed */
    a->share = NULL;
    SP_TRY(st);
    for (int r = 0; r < a->comm->world_size; r++)
        g->inboxes[r] = g->is_remote[r] ? g->proxies->outbox_device
                                        : g->ops->memory_address(r == a->comm->rank ? g->own : g->peers[r]);
    return SPCCL_OK;
}

/* ---- the call ---- */

/* The last steps that can fail. After them the ranks exchange their status, and any rank may launch. */
static spccl_status map_and_watch(struct attach *a)
{
    SP_TRY(map_memory(a));
    return sp_gpu_watchdog_add(a->g);
}

/* Connect the proxies. All ranks compare their status every SP_PROXIES_CONNECT_NS: a rank that fails could not tell the
 * others otherwise, and they would wait for its connections until their deadline. */
static spccl_status connect_hosts(struct attach *a)
{
    spccl_status st;
    SP_TRY(agree(a, sp_proxies_meet(a->g->proxies)));
    do
        st = agree(a, sp_proxies_connect(a->g->proxies, a->deadline_ns));
    while (st == SPCCL_AGAIN);
    SP_TRY(st);
    return agree(a, sp_proxies_start(a->g->proxies));
}

static spccl_status run(struct attach *a, const spccl_cuda_config *config)
{
    spccl_status st = gather_facts(a, config);
    a->mine.status = (int32_t)st;
    if (st != SPCCL_OK)
        snprintf(a->mine.error, sizeof a->mine.error, "%s", spccl_last_error());
    SP_TRY(spccl_all_gather(a->comm, &a->mine, a->all, sizeof a->mine, SPCCL_UINT8, NULL));
    SP_TRY(decide(a));
    SP_TRY(agree(a, make_memory(a)));
    if (a->spans_hosts)
        SP_TRY(connect_hosts(a));
    st = agree(a, map_and_watch(a));
    if (st != SPCCL_OK)
        sp_gpu_watchdog_remove(a->g);
    if (st != SPCCL_OK && sp_comm_broken(a->comm) == SPCCL_OK) {
        /* No rank may free an inbox that a peer still has mapped. */
        char text[600];
        snprintf(text, sizeof text, "%s", spccl_last_error());
        for (int r = 0; r < a->comm->world_size; r++) {
            a->g->ops->memory_destroy(a->g->peers[r]);
            a->g->peers[r] = NULL;
        }
        (void)agree(a, SPCCL_OK);
        return SP_FAIL(st, "%s", text);
    }
    return st;
}

static void start(spccl_comm *comm, sp_gpu_comm *g)
{
    pthread_mutex_lock(&comm->mu);
    comm->gpu_abort = &g->control->abort;
    pthread_mutex_unlock(&comm->mu);
    atomic_store(&comm->gpu, g);
    sp_log(SP_LOG_INFO, comm->rank,
           "group \"%s\": GPU %d (%s), %u workers on %u multiprocessors, inbox of %zu bytes shared by %s",
           comm->name, g->device.ordinal, g->device.name, g->shape.n_workers,
           sp_tune_gpu_ctas(&g->limits, g->shape), sp_inbox_bytes(g->shape), g->handles);
}

static spccl_status check_call(const spccl_comm *comm)
{
    if (comm == NULL)
        return SP_FAIL(SPCCL_ERR_ARG, "spccl_cuda_attach: comm is NULL");
    SP_TRY(sp_comm_check_process(comm, "spccl_cuda_attach"));
    if (atomic_load(&comm->gpu) != NULL)
        return SP_FAIL(SPCCL_ERR_STATE, "spccl_cuda_attach: rank %d of group \"%s\" has its GPU already",
                       comm->rank, comm->name);
    if (comm->world_size > SP_GPU_RANKS_MAX)
        return SP_FAIL(SPCCL_ERR_UNSUPPORTED,
                       "spccl_cuda_attach: group \"%s\" has %d ranks, GPU collectives take at most %d",
                       comm->name, comm->world_size, SP_GPU_RANKS_MAX);
    return SPCCL_OK;
}

spccl_status spccl_cuda_attach(spccl_comm *comm, const spccl_cuda_config *given)
{
    spccl_cuda_config config = SPCCL_CUDA_CONFIG_INIT;
    struct attach *a;
    char text[1024];
    spccl_status st;
    SP_TRY(check_call(comm));
    SP_TRY(sp_options_copy("spccl_cuda_config", given, &config, sizeof config));
    a = sp_calloc(1, sizeof *a);
    if (a == NULL || (a->g = sp_calloc(1, sizeof *a->g)) == NULL) {
        sp_free(a);
        return SP_FAIL(SPCCL_ERR_NOMEM, "spccl_cuda_attach: %zu bytes", sizeof *a + sizeof *a->g);
    }
    a->comm = a->g->comm = comm;
    a->g->ops = sp_gpu_ops_here();
    a->g->caller_orders = config.caller_orders != 0;
    a->deadline_ns = sp_deadline_in_ms(comm->timeout_ms);
    pthread_mutex_init(&a->g->mu, NULL);
    pthread_mutex_init(&a->g->look_mu, NULL);
    SP_TRY_TO(fail, st, run(a, &config));
    start(comm, a->g);
    sp_free(a);
    return SPCCL_OK;
fail:
    snprintf(text, sizeof text, "%s", spccl_last_error());
    sp_gpu_share_close(a->share);
    sp_gpu_comm_free(a->g);
    sp_free(a);
    sp_set_error(text); /* freeing may have overwritten it */
    return st;
}
