/* proxy_direct.c - rings between hosts in GPU memory, which network devices read and write; see proxy.h.
 *
 * The memory with which a rank sends is a second outbox, in its GPU's memory; only its rings are used. Peers write the
 * rings of its inbox, and no other memory of it. Tails, credits and change counters lie in pinned memory as always.
 * Every rank decides once what its GPU and its devices can do, and says it to all others. Rings of two ranks lie in GPU
 * memory if both can do it. */
#include "core/gpu/proxy/proxy.h"

#include "core/base/env.h"
#include "core/base/log.h"
#include "core/base/mem.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* What a rank tells all others. */
struct note {
    uint64_t peers; /* a bit for each rank with which it could have rings in GPU memory */
    char why[200];  /* peers is 0: the reason; else how */
    uint8_t links[SP_GPU_RANKS_MAX][SP_INBOX_QUEUES]; /* by sender: numbers of its links in the inbox */
    uint8_t handles[SP_PROXIES_MAX][SP_REGION_HANDLE_BYTES]; /* by proxy: of the inbox */
};
_Static_assert(SP_GPU_RANKS_MAX <= 64, "note.peers");

static size_t rings_bytes(const sp_ring_area *a)
{
    return sp_area_ring_off(a, sp_area_links(a), 0);
}

/* ---- what this rank can do ---- */

/* One decision for all devices of the endpoints: NO if one of them cannot, or two need different ways. */
static spccl_status choose(sp_proxies *r)
{
    const sp_gpu_comm *g = r->g;
    const sp_transport_puts *puts = r->transport->puts;
    sp_gpu_direct_facts f = {.path = SP_PCI_UNKNOWN};
    sp_gpu_direct its;
    char gpu_path[256] = "";
    if (puts == NULL) {
        snprintf(r->direct.why, sizeof r->direct.why, "transport %s has no way", r->transport->name);
        return SPCCL_OK;
    }
    SP_TRY(sp_gpu_direct_find_gpu(g->ops, g->device.ordinal, &f, gpu_path));
    snprintf(r->direct.why, sizeof r->direct.why, "no device is known");
    for (size_t i = 0; puts->device(r->proxies[0].ep, i, &f.device); i++) {
        f.path = sp_pci_path_between(gpu_path, f.device.pci_path);
        sp_gpu_direct_choose(sp_env_text(SP_ENV_GPU_DIRECT), &f, &its);
        if (i != 0 && its.how != SP_DIRECT_NO && its.how != r->direct.how) {
            its.how = SP_DIRECT_NO;
            snprintf(its.why, sizeof its.why, "no: another way than the device before");
        }
        its.flush = its.flush || (i != 0 && r->direct.flush);
        r->direct.how = its.how;
        r->direct.flush = its.flush;
        snprintf(r->direct.why, sizeof r->direct.why, "device %s: %.240s", f.device.name, its.why);
        if (its.how == SP_DIRECT_NO)
            break;
    }
    return SPCCL_OK;
}

/* Register the rings at the start of `memory` with all devices of a proxy. */
static spccl_status open_region(const sp_proxy *x, const sp_gpu_memory *memory, sp_region_config c,
                                sp_region **out, uint8_t *handle)
{
    const sp_proxies *r = x->r;
    spccl_status st;
    c.address = r->g->ops->memory_address(memory);
    c.dmabuf = -1;
    if (r->direct.how == SP_DIRECT_DMABUF)
        SP_TRY(r->g->ops->memory_dmabuf(memory, c.bytes, &c.dmabuf, &c.dmabuf_offset));
    st = r->transport->puts->open_region(x->ep, &c, out, handle);
    if (c.dmabuf >= 0)
        close(c.dmabuf);
    return st;
}

static spccl_status open_regions(sp_proxies *r, struct note *mine)
{
    sp_region_config outbox = {.bytes = rings_bytes(&r->area.pinned)};
    sp_region_config inbox = {
        .bytes = rings_bytes(&r->area.inbox), .peers_write = true, .flush = r->direct.flush};
    uint8_t unused[SP_REGION_HANDLE_BYTES];
    SP_TRY(r->g->ops->memory_create(r->g->device.ordinal, outbox.bytes, "ipc", true, &r->gpu_outbox));
    for (uint32_t k = 0; k < r->n_proxies; k++) {
        sp_proxy *x = &r->proxies[k];
        SP_TRY(open_region(x, r->gpu_outbox, outbox, &x->outbox_region, unused));
        SP_TRY(open_region(x, r->g->own, inbox, &x->inbox_region, mine->handles[k]));
    }
    return SPCCL_OK;
}

void sp_proxy_close_regions(sp_proxy *x)
{
    const sp_transport *t = x->r->transport;
    if (t == NULL || t->puts == NULL || x->ep == NULL)
        return;
    t->puts->close_region(x->ep, x->inbox_region);
    t->puts->close_region(x->ep, x->outbox_region);
    x->inbox_region = x->outbox_region = NULL;
}

/* All rings lie in pinned memory. */
static void close_direct(sp_proxies *r)
{
    for (uint32_t k = 0; k < r->n_proxies; k++)
        sp_proxy_close_regions(&r->proxies[k]);
    r->g->ops->memory_destroy(r->gpu_outbox);
    r->gpu_outbox = NULL;
}

static bool puts_reach(const sp_proxies *r, int peer)
{
    for (uint32_t k = 0; k < r->n_proxies; k++)
        if (!r->transport->puts->reaches(r->proxies[k].ep, peer))
            return false;
    return true;
}

static void find_mine(sp_proxies *r, struct note *mine)
{
    spccl_status st = choose(r);
    if (st == SPCCL_OK && r->direct.how != SP_DIRECT_NO)
        st = open_regions(r, mine);
    if (st != SPCCL_OK) {
        r->direct.how = SP_DIRECT_NO;
        snprintf(r->direct.why, sizeof r->direct.why, "%.*s", (int)sizeof r->direct.why - 1,
                 sp_without_rank(spccl_last_error(), r->g->comm->rank));
    }
    snprintf(mine->why, sizeof mine->why, "%.*s", (int)sizeof mine->why - 1, r->direct.why);
    for (int i = 0; r->direct.how != SP_DIRECT_NO && i < r->n_peers; i++) {
        const sp_proxy_peer *p = &r->proxies[0].peers[i];
        if (puts_reach(r, p->rank))
            mine->peers |= UINT64_C(1) << p->rank;
        for (uint32_t q = 0; q < p->at.n_queues; q++)
            mine->links[p->rank][q] = r->area.inbox_link[p->link[q]];
    }
}

/* ---- what both can do ---- */

/* Errors: FORMAT (the peer's numbers of links). */
static spccl_status use_direct(sp_proxies *r, int i, const struct note *its)
{
    uint32_t rank = (uint32_t)r->g->comm->rank;
    for (uint32_t k = 0; k < r->n_proxies; k++) {
        sp_proxy_peer *p = &r->proxies[k].peers[i];
        p->at.direct = true;
        memcpy(p->handle, its->handles[k], sizeof p->handle);
        for (uint32_t q = 0; q < p->at.n_queues; q++) {
            p->link_there[q] = its->links[rank][q];
            if (p->link_there[q] >= sp_area_links(&r->area.inbox))
                return SP_FAIL(SPCCL_ERR_FORMAT, "rank %d: rank %d sent link %u of %u links of its inbox",
                               r->g->comm->rank, p->rank, p->link_there[q], sp_area_links(&r->area.inbox));
            r->area.direct[p->link[q] / 32] |= 1u << p->link[q] % 32;
        }
    }
    r->n_direct++;
    return SPCCL_OK;
}

/* The reason why the rings of this rank and peer number i lie in pinned memory. */
static void say_pinned(const sp_proxies *r, int i, const struct note *mine, const struct note *its, char *out,
                       size_t cap)
{
    int peer = r->proxies[0].peers[i].rank;
    if (mine->peers == 0)
        snprintf(out, cap, "%s", mine->why);
    else if (its->peers == 0)
        snprintf(out, cap, "rank %d: %.*s", peer, (int)sizeof its->why - 1, its->why);
    else
        snprintf(out, cap, "no puts reach rank %d: its link is not over %s", peer, r->transport->name);
}

static spccl_status decide(sp_proxies *r, const struct note *all)
{
    const spccl_comm *comm = r->g->comm;
    const struct note *mine = &all[comm->rank];
    char pinned[280] = "";
    for (int i = 0; i < r->n_peers; i++) {
        int peer = r->proxies[0].peers[i].rank;
        if ((mine->peers >> peer & 1) != 0 && (all[peer].peers >> comm->rank & 1) != 0)
            SP_TRY(use_direct(r, i, &all[peer]));
        else if (pinned[0] == '\0')
            say_pinned(r, i, mine, &all[peer], pinned, sizeof pinned);
    }
    if (r->n_direct == 0)
        close_direct(r);
    sp_log(r->n_direct < (uint32_t)r->n_peers && sp_gpu_direct_is_on() ? SP_LOG_WARN : SP_LOG_INFO,
           comm->rank, "group \"%s\": rings with %u of %d ranks on other hosts lie in GPU memory%s%s%s%s",
           comm->name, r->n_direct, r->n_peers, r->n_direct != 0 ? ": " : "",
           r->n_direct != 0 ? mine->why : "", pinned[0] != '\0' ? "; in pinned memory: " : "", pinned);
    return SPCCL_OK;
}

spccl_status sp_proxies_agree_direct(sp_proxies *r)
{
    const spccl_comm *comm = r->g->comm;
    struct note *mine = sp_calloc((size_t)comm->world_size + 1, sizeof *mine), *all;
    spccl_status st;
    if (mine == NULL)
        return SP_FAIL(SPCCL_ERR_NOMEM, "rank %d: notes of %d ranks", comm->rank, comm->world_size);
    all = mine + 1;
    find_mine(r, mine);
    st = spccl_all_gather(r->g->comm, mine, all, sizeof *mine, SPCCL_UINT8, NULL);
    for (int p = 0; p < comm->world_size; p++)
        all[p].why[sizeof all[p].why - 1] = '\0';
    if (st == SPCCL_OK)
        st = decide(r, all);
    sp_free(mine);
    return st;
}

void sp_proxies_find_rings(sp_proxies *r)
{
    const sp_gpu_comm *g = r->g;
    memcpy(r->area.rings, g->inboxes, sizeof r->area.rings);
    for (int i = 0; i < r->n_peers; i++)
        if (r->proxies[0].peers[i].at.direct)
            r->area.rings[r->proxies[0].peers[i].rank] = g->ops->memory_address(r->gpu_outbox);
}

/* ---- sending ---- */

static spccl_status put_span(sp_proxy *x, const sp_proxy_peer *p, const sp_proxy_entry *e)
{
    const sp_transport_puts *puts = x->r->transport->puts;
    size_t from = sp_area_ring_off(&x->r->area.pinned, p->link[e->queue], e->worker);
    size_t to = sp_area_ring_off(&x->r->area.inbox, p->link_there[e->queue], e->worker);
    uint32_t off = (uint32_t)(e->position % p->at.ring_bytes), left = p->at.ring_bytes - off;
    sp_put put = {.from = x->outbox_region,
                  .to = p->handle,
                  .from_off = from + off,
                  .to_off = to + off,
                  .bytes = e->bytes < left ? e->bytes : left};
    SP_TRY(puts->put(x->ep, p->rank, 0, &put));
    if (e->bytes > left) {
        put.from_off = from;
        put.to_off = to;
        put.bytes = e->bytes - left;
        SP_TRY(puts->put(x->ep, p->rank, 0, &put));
    }
    x->n_bytes_put += e->bytes;
    return SPCCL_OK;
}

spccl_status sp_proxy_put_spans(sp_proxy *x, const sp_proxy_peer *p, const sp_proxy_entry *spans, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        SP_TRY(put_span(x, p, &spans[i]));
    return SPCCL_OK;
}
