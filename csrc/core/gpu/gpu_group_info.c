/* gpu_group_info.c - what groups on GPUs take: the way of each pair's frames, for spccl_comm_describe_link, and the
 * memory of groups of some sizes, for spccl_info. See gpu_comm.h. */
#include "core/gpu/proxy.h"

#include "core/base/env.h"

#include <stdio.h>

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
             r->n_proxies == 1 ? "y" : "ies", r->transport->name, direct ? "GPU" : "pinned");
}

void sp_gpu_group_write_links(sp_gpu_comm *g)
{
    for (int p = 0; p < g->comm->world_size; p++)
        if (p != g->comm->rank)
            write_link(g, p, g->links[p], sizeof g->links[p]);
}

const char *sp_gpu_group_link(spccl_comm *comm, int peer)
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

void sp_gpu_group_describe_memory(spccl_info_entry *out)
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
