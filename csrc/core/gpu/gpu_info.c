/* gpu_info.c - what users are told of GPUs: counters of a group, how each pair's frames go, the entries of spccl_info.
 * And the table of what core/run calls (gpu_part.h). */
#include "core/gpu/gpu_attach.h"
#include "core/gpu/gpu_direct.h"
#include "core/gpu/proxy/proxy.h"
#include "spccl_channel.h"

#include "core/base/abi.h"
#include "core/base/env.h"
#include "core/base/mem.h"

#include <stdio.h>

/* ---- the counters of a group ---- */

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
        s.n_pruned_by_lists = g->n_by_lists;
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

/* ---- the pairs of a group ---- */

static void write_link(const sp_gpu_comm *g, int peer, char *text, size_t cap)
{
    const sp_proxies *r = g->proxies;
    const char *link = g->comm->links.peers[peer].text;
    bool direct = false;
    if (!g->is_remote[peer]) {
        snprintf(text, cap, "%s; GPU: writes to mapped memory of the peer (%s)", link, g->handles);
        return;
    }
    for (int i = 0; i < r->n_peers; i++)
        direct = direct || (r->proxies[0].peers[i].rank == peer && r->proxies[0].peers[i].at.direct);
    snprintf(text, cap, "%s; GPU: %u prox%s over %s, rings in %s memory", link, r->n_proxies,
             r->n_proxies == 1 ? "y" : "ies", r->proxies[0].thread.links.peers[peer].transport->name,
             direct ? "GPU" : "pinned");
}

void sp_gpu_info_write_links(sp_gpu_comm *g)
{
    for (int p = 0; p < g->comm->world_size; p++)
        if (p != g->comm->rank)
            write_link(g, p, g->links[p], sizeof g->links[p]);
}

static const char *describe_link(spccl_comm *comm, int peer)
{
    const sp_gpu_comm *g = atomic_load(&comm->gpu);
    return g != NULL ? g->links[peer] : NULL;
}

/* ---- the memory of groups of some sizes ---- */

/* What an H200 has: SMs, and the most workers of a CTA. */
#define H200_SMS 132u
#define H200_WORKERS 10u

/* Bytes of a group's rings on each rank. False: the settings are wrong or too small for it. */
static bool estimate(uint32_t n_hosts, uint32_t n_here, size_t *gpu_bytes, size_t *pinned_bytes)
{
    sp_gpu_limits l = {.world_size = n_hosts * n_here,
                       .n_sms = H200_SMS,
                       .workers_per_cta = {{H200_WORKERS}},
                       .n_here = n_hosts > 1 && n_here > 1 ? n_here : 0,
                       .n_remote = (n_hosts - 1) * n_here};
    sp_inbox_shape shape;
    int64_t inbox_bytes, max_ctas;
    if (sp_env_number(SP_ENV_INBOX_BYTES, &inbox_bytes) != SPCCL_OK ||
        sp_env_number(SP_ENV_MAX_CTAS, &max_ctas) != SPCCL_OK)
        return false;
    l.inbox_bytes = (size_t)inbox_bytes;
    l.max_ctas = (uint32_t)max_ctas;
    if (sp_tune_gpu_shape(&l, &shape) != SPCCL_OK)
        return false;
    *gpu_bytes = sp_tune_gpu_inbox_bytes(&l, shape);
    *pinned_bytes = sp_tune_gpu_pinned_bytes(&l, shape);
    return true;
}

static void describe_memory(spccl_info_entry *out)
{
    static const uint32_t groups[][2] = {{1, 8}, {2, 1}, {2, 8}, {4, 8}, {8, 8}}; /* hosts, ranks of each */
    static _Thread_local char text[300];
    size_t used = 0, gpu_bytes, pinned_bytes;
    text[0] = '\0';
    for (size_t i = 0; i < sizeof groups / sizeof *groups; i++) {
        if (!estimate(groups[i][0], groups[i][1], &gpu_bytes, &pinned_bytes)) {
            snprintf(text + used, sizeof text - used, "%s%u x %u: none fits the settings", i == 0 ? "" : "; ",
                     groups[i][0], groups[i][1]);
        } else {
            snprintf(text + used, sizeof text - used, "%s%u x %u: %zuM", i == 0 ? "" : "; ", groups[i][0],
                     groups[i][1], gpu_bytes >> 20);
            used = strlen(text);
            if (pinned_bytes != 0)
                snprintf(text + used, sizeof text - used, " and %zuM pinned", pinned_bytes >> 20);
        }
        used = strlen(text);
    }
    *out = (spccl_info_entry){
        .kind = "part",
        .name = "GPU ring memory",
        .value = text,
        .why = "hosts x ranks of each: at most so much per rank on GPUs like H200 (132 SMs), with "
               "SPCCL_INBOX_BYTES and SPCCL_MAX_CTAS; of a running group: spccl.backend.describe_group, "
               "spccl_cuda_get_stats, SPCCL_LOG=info"};
}

/* ---- the GPU part ---- */

/* How groups on several hosts are served: for a rank that is alone on its host. */
static const char *describe_proxies(void)
{
    static _Thread_local char text[200];
    uint32_t n = 0;
    const char *route = sp_env_text(SP_ENV_CUDA_ROUTE);
    bool is_auto = strncmp(route, "auto", 4) == 0;
    if (!is_auto && strncmp(route, "spccl", 5) != 0)
        return "fallback (SPCCL_CUDA_ROUTE)";
    if (sp_proxies_count(NULL, &n) != SPCCL_OK)
        return "SPCCL_DEBUG_CUDA_PROXIES is no number from 0 to 16";
    snprintf(text, sizeof text, "%s%u prox%s (%s) and at most 512M of pinned memory each",
             is_auto ? "over ib and ncclnet the fallback; over tcp " : "", n, n == 1 ? "y" : "ies",
             strcmp(sp_env_text(SP_ENV_PROXIES), "0") != 0
                 ? "SPCCL_DEBUG_CUDA_PROXIES"
                 : "by the usable cores, for a rank alone on its host");
    return text;
}

/* The GPU part: what it was built with, and which GPUs it finds. The text is valid until this thread's next
 * call. */
static void describe_cuda(spccl_info_entry *out)
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

/* ---- GPUs and network devices: gathered once ---- */

#define GPUS_MAX 16

struct row {
    char name[16], value[64], why[2000];
};
static struct row rows[GPUS_MAX];
static size_t n_rows;
static pthread_once_t once = PTHREAD_ONCE_INIT;

/* Add "; NAME (ib): ..." for each device of a transport. */
static void add_devices(const sp_transport *t, sp_gpu_direct_facts *f, const char *gpu_path, struct row *row,
                        int counts[2])
{
    for (size_t i = 0; t->device != NULL && t->device(i, &f->device); i++) {
        sp_gpu_direct decision;
        size_t used = strlen(row->why);
        f->path = sp_pci_path_between(gpu_path, f->device.pci_path);
        sp_gpu_direct_decide(f, &decision);
        counts[0]++;
        counts[1] += decision.how != SP_DIRECT_NO;
        snprintf(row->why + used, sizeof row->why - used, "; %s (%s): %s", f->device.name, t->name,
                 decision.why);
    }
}

static void add_gpu(const sp_gpu_ops *ops, int ordinal)
{
    struct row *row = &rows[n_rows];
    sp_gpu_direct_facts f = {.path = SP_PCI_UNKNOWN};
    const char *setting = sp_env_text(SP_ENV_GPU_DIRECT);
    int counts[2] = {0, 0}; /* devices; those for which it is possible */
    char path[256] = "";
    snprintf(row->name, sizeof row->name, "GPU %d", ordinal);
    if (sp_gpu_direct_is_on())
        snprintf(row->why, sizeof row->why,
                 "SPCCL_DEBUG_GPU_DIRECT=%s: rings between hosts over ib lie in GPU memory where all devices "
                 "of both "
                 "ranks can do that; a group logs its choice",
                 setting);
    else
        snprintf(row->why, sizeof row->why,
                 "rings between hosts lie in pinned memory: SPCCL_DEBUG_GPU_DIRECT=off");
    if (sp_gpu_direct_find_gpu(ops, ordinal, &f, path) != SPCCL_OK) {
        snprintf(row->value, sizeof row->value, "unknown");
        snprintf(row->why, sizeof row->why, "%s", spccl_last_error());
        n_rows++;
        return;
    }
    for (int t = 0; sp_transports[t] != NULL; t++)
        add_devices(sp_transports[t], &f, path, row, counts);
    snprintf(row->value, sizeof row->value, "%s, possible with %d of %d devices",
             sp_gpu_direct_is_on() ? setting : "not used", counts[1], counts[0]);
    n_rows += counts[0] != 0;
}

static void gather(void)
{
    const sp_gpu_ops *ops = sp_gpu_ops_here();
    int n = 0;
    if (ops == NULL || ops->device_count(&n) != SPCCL_OK)
        return;
    for (int i = 0; i < n && i < GPUS_MAX; i++)
        add_gpu(ops, i);
}

static bool describe_direct(size_t i, spccl_info_entry *out)
{
    pthread_once(&once, gather);
    if (i >= n_rows)
        return false;
    *out = (spccl_info_entry){
        .kind = "GPUDirect", .name = rows[i].name, .value = rows[i].value, .why = rows[i].why};
    return true;
}

const sp_gpu_part sp_gpu_part_here = {.find_errors = sp_gpu_comm_find_errors,
                                      .detach = sp_gpu_comm_detach,
                                      .describe = describe_cuda,
                                      .describe_memory = describe_memory,
                                      .describe_link = describe_link,
                                      .describe_direct = describe_direct};
