/* gpu_facts.c - what each rank tells the others when GPUs are attached, and what all ranks decide from it; see
 * gpu_attach.h. */
#include "core/gpu/gpu_attach.h"
#include "core/gpu/gpu_direct.h"
#include "core/gpu/proxy/proxy.h"

#include "core/base/abi.h"
#include "core/base/env.h"

#include <stdio.h>
#include <unistd.h>

#define FACTS_MAGIC 0x46475053u /* "SPGF" */

enum { HANDLES_AUTO, HANDLES_FD, HANDLES_IPC };
static const char *const handles_names[] = {"auto", "fd", "ipc"};

/* ---- the facts of this rank ---- */

/* By default a group leaves RDMA networks to the fallback: NCCL may use GPUDirect RDMA there, and the proxies have not
 * been compared with that. The setting counts before the program's number. */
static sp_between_hosts between_hosts(const spccl_comm *comm, uint32_t wanted)
{
    const char *route = sp_env_text(SP_ENV_CUDA_ROUTE);
    if (strcmp(route, sp_env_describe(SP_ENV_CUDA_ROUTE)->default_text) != 0)
        wanted = strncmp(route, "auto", 4) == 0 ? 0 : strncmp(route, "spccl", 5) == 0 ? 1 : 2;
    if (wanted != 0)
        return wanted == 1 ? SP_BETWEEN_HOSTS_ON : SP_BETWEEN_HOSTS_OFF;
    for (int p = 0; p < comm->world_size; p++) {
        const sp_link *link = &comm->links.peers[p];
        if (link->transport != NULL && link->transport->is_rdma)
            return SP_BETWEEN_HOSTS_RDMA;
    }
    return SP_BETWEEN_HOSTS_ON;
}

static spccl_status read_settings(const spccl_comm *comm, const spccl_cuda_config *config, sp_gpu_facts *f)
{
    const char *handles = sp_env_text(SP_ENV_NVLINK_HANDLES);
    const char *inbox = sp_env_text(SP_ENV_INBOX_BYTES);
    int64_t n;
    SP_TRY(sp_env_number(SP_ENV_MAX_CTAS, &n));
    f->max_ctas = n != 0 ? (uint32_t)n : config->max_ctas;
    f->between_hosts = between_hosts(comm, config->between_hosts);
    f->direct = sp_gpu_direct_is_on();
    SP_TRY(sp_env_number(SP_ENV_INBOX_BYTES, &n));
    f->inbox_bytes = (uint64_t)n;
    /* The setting wins only if it differs from its default. */
    if (config->inbox_bytes != 0 && strcmp(inbox, sp_env_describe(SP_ENV_INBOX_BYTES)->default_text) == 0)
        f->inbox_bytes = config->inbox_bytes;
    for (f->handles = HANDLES_AUTO; f->handles <= HANDLES_IPC; f->handles++)
        if (strcmp(handles, handles_names[f->handles]) == 0)
            return SPCCL_OK;
    return SP_FAIL(SPCCL_ERR_SETTING, "SPCCL_DEBUG_NVLINK_HANDLES=\"%s\": wanted auto, fd or ipc", handles);
}

static spccl_status pick_device(sp_attach *a, const spccl_cuda_config *config)
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

static spccl_status ask_device(sp_attach *a)
{
    sp_gpu_comm *g = a->g;
    sp_gpu_facts *f = &a->mine;
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

spccl_status sp_attach_gather_facts(sp_attach *a, const spccl_cuda_config *given)
{
    spccl_comm *comm = a->comm;
    spccl_cuda_config values = SPCCL_CUDA_CONFIG_INIT, *config = &values;
    const char *route = sp_env_text(SP_ENV_CUDA_ROUTE);
    a->mine.magic = FACTS_MAGIC;
    a->mine.n_bytes = sizeof a->mine;
    a->mine.pid = (int32_t)getpid();
    a->mine.format = (int32_t)comm->format;
    snprintf(a->mine.version, sizeof a->mine.version, "%s", SPCCL_VERSION_TEXT);
    SP_TRY(sp_options_copy("spccl_cuda_config", given, config, sizeof *config));
    a->mine.fallback = config->fallback;
    if (a->g == NULL)
        return SP_FAIL(SPCCL_ERR_NOMEM, "out of memory: %zu bytes of host memory", sizeof *a->g);
    a->g->caller_orders = config->caller_orders != 0;
    a->mine.hops = !comm->schedule_forced || comm->plans != NULL ? 0
                   : comm->schedule == SP_SCHED_ONESHOT          ? 1
                                                                 : 2;
    if (config->between_hosts > 2)
        return SP_FAIL(SPCCL_ERR_ARG, "spccl_cuda_config.between_hosts is %u, wanted 0 to 2",
                       config->between_hosts);
    if (config->decline || strcmp(route, "nccl") == 0 || strcmp(route, "stage") == 0)
        return SP_FAIL(
            SPCCL_ERR_UNREACHABLE,
            "GPU collectives are turned off on this rank (SPCCL_CUDA_ROUTE=nccl or stage, cuda_route of "
            "backend.Options, or spccl_cuda_config.decline), and they need the GPUs of all ranks: to "
            "use them, enable them on every rank");
    SP_TRY(read_settings(comm, config, &a->mine));
    SP_TRY(sp_proxies_count(comm, &a->mine.n_proxies));
    SP_TRY(pick_device(a, config));
    SP_TRY(ask_device(a));
    return sp_gpu_share_begin(a->g, "spccl_cuda_attach", "an inbox", a->deadline_ns, &a->share,
                              a->mine.address);
}

/* ---- the decision from the facts: every rank comes to the same result ---- */

static const char *hops_name(uint32_t hops)
{
    return hops == 0 ? "auto" : hops == 1 ? "oneshot" : "direct";
}

static spccl_status compare_with_first(const sp_gpu_facts *all, int r)
{
    const sp_gpu_facts *f = &all[r], *first = &all[0];
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
            "other's memory (config.fallback %u and %u): in torch set SPCCL_CUDA_ROUTE alike "
            "on all, and install the same torch",
            r, first->fallback, f->fallback);
    if (f->status != SPCCL_OK)
        return SP_FAIL((spccl_status)f->status, "rank %d: %s", r, f->error);
    if (f->handles != first->handles || f->handles > HANDLES_IPC)
        return SP_FAIL(SPCCL_ERR_MISMATCH,
                       "SPCCL_DEBUG_NVLINK_HANDLES differs between rank 0 and rank %d: set it alike on all",
                       r);
    if (f->format != first->format)
        return SP_FAIL(SPCCL_ERR_MISMATCH,
                       "rank 0 forces format %s, rank %d %s: set SPCCL_FORMAT alike on all",
                       first->format < 0 ? "auto" : spccl_format_name((spccl_format)first->format), r,
                       f->format < 0 ? "auto" : spccl_format_name((spccl_format)f->format));
    if (f->hops != first->hops)
        return SP_FAIL(SPCCL_ERR_MISMATCH, "rank 0 has SPCCL_SCHEDULE=%s, rank %d %s: set it alike on all",
                       hops_name(first->hops), r, hops_name(f->hops));
    if (f->handles == HANDLES_FD && !f->can_share_fd)
        return SP_FAIL(
            SPCCL_ERR_SETTING,
            "SPCCL_DEBUG_NVLINK_HANDLES=fd: GPU %d '%s' of rank %d cannot export memory as descriptors",
            f->ordinal, f->name, r);
    return SPCCL_OK;
}

/* Which ranks are on other hosts than this one? Such groups are allowed if all ranks take part. */
static spccl_status find_remote(sp_attach *a)
{
    int n = a->comm->world_size, other = 0, refuses = -1;
    for (int r = 0; r < n; r++) {
        a->g->is_remote[r] = !sp_gpu_share_same_host(a->all[r].address, a->mine.address);
        if (other == 0 && !sp_gpu_share_same_host(a->all[r].address, a->all[0].address))
            other = r;
        if (refuses < 0 && a->all[r].between_hosts != SP_BETWEEN_HOSTS_ON)
            refuses = r;
    }
    a->spans_hosts = other != 0;
    if (other == 0 || refuses < 0)
        return SPCCL_OK;
    return SP_FAIL(SPCCL_ERR_UNREACHABLE,
                   "rank 0 (GPU %d '%s') and rank %d (GPU %d '%s') are on different hosts, or in different "
                   "network namespaces of one: their GPUs cannot map each other's memory, and rank %d has "
                   "SPCCL_CUDA_ROUTE=%s",
                   a->all[0].ordinal, a->all[0].name, other, a->all[other].ordinal, a->all[other].name,
                   refuses,
                   a->all[refuses].between_hosts == SP_BETWEEN_HOSTS_RDMA
                       ? "auto and a link over RDMA (ib or ncclnet): spccl on all ranks makes spccl use it"
                       : "one-host");
}

/* Which host each rank is on, and its place there. */
struct hosts {
    uint32_t of[SP_GPU_RANKS_MAX], places[SP_GPU_RANKS_MAX], sizes[SP_GPU_RANKS_MAX]; /* sizes: by host */
    uint32_t n_hosts, least, most; /* least, most: ranks of a host */
};

static void find_hosts(const sp_attach *a, struct hosts *h)
{
    uint32_t n = (uint32_t)a->comm->world_size;
    *h = (struct hosts){.least = UINT32_MAX};
    for (uint32_t r = 0; r < n; r++) {
        uint32_t first = 0; /* rank of its host */
        while (!sp_gpu_share_same_host(a->all[r].address, a->all[first].address))
            first++;
        h->of[r] = first == r ? h->n_hosts++ : h->of[first];
        h->places[r] = h->sizes[h->of[r]]++;
    }
    for (uint32_t i = 0; i < h->n_hosts; i++) {
        h->least = h->sizes[i] < h->least ? h->sizes[i] : h->least;
        h->most = h->sizes[i] > h->most ? h->sizes[i] : h->most;
    }
}

/* More than SP_GPU_HOST_RANKS_MAX ranks need relays: without them a gatherer has a link to each. */
static spccl_status check_size(const sp_attach *a, const struct hosts *h)
{
    int n = a->comm->world_size;
    if (n <= SP_GPU_HOST_RANKS_MAX)
        return SPCCL_OK;
    if (h->n_hosts == 1)
        return SP_FAIL(SPCCL_ERR_UNSUPPORTED,
                       "group \"%s\" has %d ranks on one host, GPU collectives take at most %d there: make "
                       "smaller groups",
                       a->comm->name, n, SP_GPU_HOST_RANKS_MAX);
    if (h->n_hosts > SP_REMOTE_HOSTS_MAX || h->most > SP_REMOTE_HERE_MAX || h->least != h->most)
        return SP_FAIL(SPCCL_ERR_UNSUPPORTED,
                       "group \"%s\" has %d ranks on %u hosts, %u to %u on each; GPU collectives of more "
                       "than %d ranks take at most %u hosts with the same number of ranks, at most %u on "
                       "each: change the ranks of the group",
                       a->comm->name, n, h->n_hosts, h->least, h->most, SP_GPU_HOST_RANKS_MAX,
                       SP_REMOTE_HOSTS_MAX, SP_REMOTE_HERE_MAX);
    if (a->comm->schedule_forced &&
        (a->comm->schedule == SP_SCHED_DIRECT || a->comm->schedule == SP_SCHED_ONESHOT))
        return SP_FAIL(SPCCL_ERR_UNSUPPORTED,
                       "group \"%s\" has %d ranks: GPU collectives of more than %d ranks relay results and "
                       "take two hops, which schedule %s (SPCCL_SCHEDULE) forbids: set SPCCL_SCHEDULE=auto",
                       a->comm->name, n, SP_GPU_HOST_RANKS_MAX,
                       a->comm->schedule == SP_SCHED_DIRECT ? "direct" : "oneshot");
    return SPCCL_OK;
}

/* The way of results that plans of a file ask for, on GPUs that can relay them: relays count before others. */
static void find_way(void *ctx, const sp_written_plan *plan)
{
    sp_results *way = ctx;
    if (plan->owners.why_not[0] == '\0' && plan->owners.results > *way)
        *way = plan->owners.results;
}

static bool wants_no_relays(const spccl_comm *comm)
{
    sp_results way = SP_RESULTS_NONE;
    if (comm->plans != NULL)
        sp_plan_set_each(comm->plans, find_way, &way);
    return way == SP_RESULTS_DIRECT || (comm->schedule_forced && comm->schedule == SP_SCHED_DIRECT);
}

/* If all hosts have the same number of ranks, two or more, the ranks of a host relay results to each other. */
static void find_relays(sp_attach *a, const struct hosts *h)
{
    sp_fused_relays *relays = &a->g->relays;
    a->g->limits.n_remote = (uint32_t)a->comm->world_size - h->least;
    if (h->least != h->most || h->least < 2 || wants_no_relays(a->comm))
        return;
    relays->n_hosts = h->n_hosts;
    relays->host = h->of[a->comm->rank];
    relays->place = h->places[a->comm->rank];
    for (uint32_t r = 0; r < (uint32_t)a->comm->world_size; r++)
        relays->ranks[h->of[r] * h->least + h->places[r]] = (uint8_t)r;
    a->g->limits.n_here = h->least;
}

static uint32_t n_sharing(const sp_gpu_facts *all, int n_ranks, int r)
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

static void find_limits(const sp_gpu_facts *all, int n_ranks, sp_gpu_limits *l)
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

spccl_status sp_attach_decide(sp_attach *a)
{
    sp_gpu_comm *g = a->g;
    int n = a->comm->world_size;
    struct hosts hosts;
    bool all_fd = true;
    for (int r = 0; r < n; r++) {
        SP_TRY(compare_with_first(a->all, r));
        a->direct = a->direct || a->all[r].direct != 0;
        all_fd = all_fd && a->all[r].can_share_fd;
    }
    g->handles = a->all[0].handles == HANDLES_IPC || !all_fd ? "ipc" : "fd";
    SP_TRY(find_remote(a));
    find_limits(a->all, n, &g->limits);
    find_hosts(a, &hosts);
    SP_TRY(check_size(a, &hosts));
    if (a->spans_hosts)
        find_relays(a, &hosts);
    SP_TRY(sp_tune_gpu_shape(&g->limits, &g->shape));
    for (int r = 0; r < n; r++) {
        const sp_gpu_facts *f = &a->all[r];
        uint64_t needed = (uint64_t)sp_tune_gpu_inbox_bytes(&g->limits, g->shape) * n_sharing(a->all, n, r);
        if (needed > f->free_bytes)
            return SP_FAIL(
                SPCCL_ERR_NOMEM,
                "rank %d: GPU %d '%s' has %llu bytes free, the inbox needs %llu: free some, or set "
                "SPCCL_INBOX_BYTES or SPCCL_MAX_CTAS lower",
                r, f->ordinal, f->name, (unsigned long long)f->free_bytes, (unsigned long long)needed);
    }
    return SPCCL_OK;
}
