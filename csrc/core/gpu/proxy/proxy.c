/* proxy.c - start and end of the proxies; see proxy.h. */
#include "core/gpu/proxy/proxy.h"

#include "core/base/clock.h"
#include "core/base/cores.h"
#include "core/base/env.h"
#include "core/base/log.h"
#include "core/base/mem.h"
#include "core/gpu/gpu_direct.h"

#include <stdio.h>

/* Capacity of the queue to a peer, at least. */
#define QUEUE_BYTES ((size_t)2 << 20)
/* Proxies by cores: one for each CORES_PER_PROXY cores of a rank, at most PROXIES_BY_CORES. Besides polling they
 * copy each byte twice and run the kernel's TCP, so one core carries 1 to 2 GB/s. */
#define CORES_PER_PROXY 4u
#define PROXIES_BY_CORES 8u

/* ---- how many ---- */

spccl_status sp_proxies_count(const spccl_comm *comm, uint32_t *out)
{
    uint32_t by_cores = sp_usable_cores() / CORES_PER_PROXY / sp_proxy_ranks_here(comm);
    int64_t forced;
    SP_TRY(sp_env_number(SP_ENV_PROXIES, &forced));
    by_cores = by_cores < 1 ? 1 : by_cores > PROXIES_BY_CORES ? PROXIES_BY_CORES : by_cores;
    *out = forced != 0 ? (uint32_t)forced : by_cores;
    return SPCCL_OK;
}

/* ---- where the links to peers on other hosts lie (contract/remote.h) ---- */

/* The index of the link of results of peer number i on other hosts, in the pinned areas. UINT32_MAX: these two ranks
 * exchange no results. */
static uint32_t result_index(const sp_gpu_comm *g, int rank, int i)
{
    const sp_fused_relays *relays = &g->relays;
    uint32_t n = g->shape.n_here;
    if (relays->n_hosts == 0)
        return (uint32_t)i;
    for (uint32_t h = 0; h + 1 < relays->n_hosts; h++)
        if (relays->ranks[sp_inbox_peer(relays->host, h, relays->n_hosts) * n + relays->place] ==
            (uint32_t)rank)
            return h;
    return UINT32_MAX;
}

/* Set r->n_peers and of r->area: relays, slots, inbox, pinned, inbox_link. */
static void find_links(sp_proxies *r)
{
    const sp_gpu_comm *g = r->g;
    uint32_t rank = (uint32_t)g->comm->rank, world_size = (uint32_t)g->comm->world_size, n_here, first;
    sp_fused_remote *a = &r->area;
    a->relays = g->relays;
    for (uint32_t slot = 0; slot + 1 < world_size; slot++)
        if (g->is_remote[sp_inbox_peer(rank, slot, world_size)]) {
            a->slots |= UINT64_C(1) << slot;
            a->inbox_link[r->n_peers++] = (uint8_t)slot;
        }
    a->inbox = sp_remote_inbox_area(g->shape);
    a->pinned = sp_remote_pinned_area(g->shape, (uint32_t)r->n_peers);
    first = a->pinned.first[SP_INBOX_RESULT];
    n_here = g->relays.n_hosts != 0 ? g->shape.n_here - 1 : 0;
    for (uint32_t i = 0; first + i < sp_area_links(&a->pinned); i++)
        a->inbox_link[first + i] = (uint8_t)(a->inbox.first[SP_INBOX_RESULT] +
                                             (g->relays.n_hosts != 0 ? n_here + i : a->inbox_link[i]));
}

/* ---- opening ---- */

static spccl_status make_peer(sp_proxy *x, uint32_t index, int i, int rank)
{
    const sp_proxies *r = x->r;
    sp_proxy_peer *p = &x->peers[i];
    uint32_t result = result_index(r->g, rank, i), n_queues = result == UINT32_MAX ? 1 : 2;
    uint32_t n = n_queues * r->g->shape.n_workers;
    p->memory = sp_calloc(4 * (size_t)n, sizeof *p->memory);
    if (p->memory == NULL)
        return SP_FAIL(SPCCL_ERR_NOMEM, "positions of %u rings", n);
    p->rank = rank;
    p->link[SP_INBOX_INPUT] = (uint32_t)i;
    p->link[SP_INBOX_RESULT] = r->area.pinned.first[SP_INBOX_RESULT] + result;
    p->at = (sp_proxy_positions){.sent = p->memory,
                                 .free_to = p->memory + n,
                                 .arrived = p->memory + 2 * (size_t)n,
                                 .freed = p->memory + 3 * (size_t)n,
                                 .n_queues = n_queues,
                                 .n_workers = r->g->shape.n_workers,
                                 .ring_bytes = sp_inbox_ring_bytes(r->g->shape),
                                 .proxy = index,
                                 .n_proxies = r->n_proxies};
    sp_proxy_find_words(x, i);
    return SPCCL_OK;
}

static spccl_status open_endpoints(sp_proxy *x, uint32_t index)
{
    sp_proxies *r = x->r;
    sp_endpoint_config ec = {.group_tag = UINT64_C(0x5350525847505573) + index,
                             .queue_bytes = QUEUE_BYTES,
                             /* 0: the transport's default. A thread fills one socket. */
                             .n_sockets = r->n_proxies == 1 ? 0 : 1,
                             .n_sharing = r->n_proxies,
                             .n_puts = sp_gpu_direct_is_on() ? SP_PUTS_MAX : 0,
                             .deadline_ns = sp_deadline_in_ms(r->g->comm->timeout_ms)};
    uint64_t peers = 0;
    for (int i = 0; i < r->n_peers; i++)
        peers |= UINT64_C(1) << x->peers[i].rank;
    while (ec.queue_bytes / 4 <
           sp_proxies_message_max(r)) /* a transport takes messages of a quarter of a queue */
        ec.queue_bytes *= 2;
    snprintf(x->thread.what, sizeof x->thread.what, "proxy %u of", index);
    SP_TRY(sp_proxy_thread_open(&x->thread, r->g));
    SP_TRY(sp_proxy_thread_add(&x->thread, peers, &ec));
    for (int i = 0; i < x->thread.links.n_endpoints; i++)
        if (i == 0 || x->thread.links.transports[i]->puts != NULL) {
            r->transport = x->thread.links.transports[i];
            x->ep = x->thread.links.endpoints[i];
        }
    return SPCCL_OK;
}

/* After the memory: a peer knows where its words lie. */
static spccl_status open_proxy(sp_proxies *r, uint32_t index)
{
    sp_proxy *x = &r->proxies[index];
    const sp_gpu_comm *g = r->g;
    int i = 0;
    x->workers = sp_calloc(g->shape.n_workers, sizeof *x->workers);
    x->entries = sp_calloc(2 * SP_INBOX_QUEUES * (size_t)g->shape.n_workers, sizeof *x->entries);
    if (x->workers == NULL || x->entries == NULL)
        return SP_FAIL(SPCCL_ERR_NOMEM, "a proxy: entries for %u workers", g->shape.n_workers);
    for (uint32_t w = 0; w < g->shape.n_workers; w++)
        if (sp_proxy_of(w, r->n_proxies) == index)
            x->workers[x->n_workers++] = w;
    for (int slot = 0; slot + 1 < g->comm->world_size; slot++) {
        uint32_t p = sp_inbox_peer((uint32_t)g->comm->rank, (uint32_t)slot, (uint32_t)g->comm->world_size);
        if (g->is_remote[p])
            SP_TRY(make_peer(x, index, i++, (int)p));
    }
    return open_endpoints(x, index);
}

static spccl_status open_memory(sp_proxies *r)
{
    sp_gpu_comm *g = r->g;
    size_t seen_bytes = ((size_t)sp_remote_n_counters(g->shape) + 1) * sizeof *r->area.seen;
    void *host = NULL, *device = NULL, *zeros = NULL;
    spccl_status st;
    SP_TRY(g->ops->pinned_create(sp_area_bytes(&r->area.pinned), &host, &device));
    r->outbox = host;
    r->outbox_device = device;
    SP_TRY(g->ops->pinned_create(sp_remote_host_inbox_bytes(g->shape, &r->area.pinned), &host, &device));
    r->host_inbox = host;
    r->area.host_inbox = device;
    r->area.n_counters = sp_remote_n_counters(g->shape);
    r->area.counters =
        (const uint32_t *)(const void *)(r->area.host_inbox + sp_remote_counters_off(&r->area.pinned));
    r->area.ended = (uint32_t *)(void *)((uint8_t *)device + sp_remote_ended_off(g->shape, &r->area.pinned));
    zeros = sp_calloc(1, seen_bytes);
    if (zeros == NULL)
        return SP_FAIL(SPCCL_ERR_NOMEM, "%zu bytes", seen_bytes);
    st = g->ops->upload(g->device.ordinal, zeros, seen_bytes, seen_bytes, &device);
    sp_free(zeros);
    if (st == SPCCL_OK)
        r->area.seen = device;
    return st;
}

spccl_status sp_proxies_open(sp_gpu_comm *g)
{
    sp_proxies *r = sp_calloc(1, sizeof *r);
    uint32_t n_proxies = g->limits.n_proxies;
    if (r == NULL)
        return SP_FAIL(SPCCL_ERR_NOMEM, "the proxies: %zu bytes", sizeof *r);
    g->proxies = r;
    r->g = g;
    if (n_proxies < 1 || n_proxies > SP_PROXIES_MAX)
        return SP_FAIL(SPCCL_ERR_BUG, "%u proxies; wanted 1 to %u", n_proxies, SP_PROXIES_MAX);
    r->n_proxies = n_proxies;
    for (uint32_t k = 0; k < n_proxies; k++)
        r->proxies[k].r = r;
    find_links(r);
    SP_TRY(open_memory(r));
    for (uint32_t k = 0; k < n_proxies; k++)
        SP_TRY(open_proxy(r, k));
    return SPCCL_OK;
}

/* ---- connecting ---- */

static void list_threads(sp_proxies *r, sp_proxy_thread *threads[SP_PROXIES_MAX])
{
    for (uint32_t k = 0; k < r->n_proxies; k++)
        threads[k] = &r->proxies[k].thread;
}

spccl_status sp_proxies_meet(sp_proxies *r)
{
    sp_proxy_thread *threads[SP_PROXIES_MAX];
    list_threads(r, threads);
    return sp_proxy_threads_meet(threads, r->n_proxies, sp_deadline_in_ms(r->g->comm->timeout_ms));
}

spccl_status sp_proxies_connect(sp_proxies *r, int64_t deadline_ns)
{
    sp_proxy_thread *threads[SP_PROXIES_MAX];
    list_threads(r, threads);
    return sp_proxy_threads_connect(threads, r->n_proxies, "proxies", deadline_ns);
}

/* ---- the threads ---- */

/* No kernel of the group can be running: the last launch writes its number to the host inbox when it ends. A graph may
 * be replayed without a call of this library, so a group that was captured is never idle. */
static bool is_idle(const void *ctx)
{
    const sp_proxies *r = ((const sp_proxy *)ctx)->r;
    const uint32_t *ended =
        (const uint32_t *)(const void *)(r->host_inbox + sp_remote_ended_off(r->g->shape, &r->area.pinned));
    return !atomic_load(&r->captured) &&
           __atomic_load_n(ended, __ATOMIC_ACQUIRE) == atomic_load(&r->n_launches);
}

static spccl_status round_of(void *ctx, bool *moved)
{
    return sp_proxy_round(ctx, moved);
}

spccl_status sp_proxies_start(sp_proxies *r)
{
    for (uint32_t k = 0; k < r->n_proxies; k++) {
        sp_proxy_thread *t = &r->proxies[k].thread;
        t->name = "spccl-proxy";
        t->ctx = &r->proxies[k];
        t->round = round_of;
        t->is_idle = is_idle;
        SP_TRY(sp_proxy_thread_start(t));
    }
    sp_log(SP_LOG_INFO, r->g->comm->rank,
           "group \"%s\": %u proxies serve %d ranks on other hosts over %s; %zu bytes of "
           "pinned memory; %s",
           r->g->comm->name, r->n_proxies, r->n_peers, r->transport->name,
           sp_remote_pinned_bytes(r->g->shape, (uint32_t)r->n_peers),
           r->area.relays.n_hosts != 0 ? "each result crosses to each host once and is relayed there"
                                       : "results go straight to every rank");
    return SPCCL_OK;
}

void sp_proxies_wake(sp_proxies *r, bool captured)
{
    if (r == NULL)
        return;
    if (captured)
        atomic_store(&r->captured, true);
    atomic_fetch_add(&r->n_launches, 1);
    for (uint32_t k = 0; k < r->n_proxies; k++)
        sp_proxy_thread_wake(&r->proxies[k].thread);
}

void sp_proxies_leave(sp_proxies *r)
{
    if (r != NULL)
        atomic_store(&r->leaving, true);
}

/* ---- the end ---- */

static void close_proxy(sp_proxy *x)
{
    sp_proxy_close_regions(x);
    sp_proxy_thread_close(&x->thread);
    for (int i = 0; i < SP_GPU_RANKS_MAX; i++)
        sp_free(x->peers[i].memory);
    sp_free(x->workers);
    sp_free(x->entries);
}

void sp_proxies_close(sp_proxies *r, bool keep_memory)
{
    const sp_gpu_ops *ops;
    if (r == NULL)
        return;
    for (uint32_t k = 0; k < r->n_proxies; k++)
        sp_proxy_thread_stop(&r->proxies[k].thread);
    for (uint32_t k = 0; k < r->n_proxies; k++)
        close_proxy(&r->proxies[k]);
    ops = r->g->ops;
    if (!keep_memory) {
        ops->unload(r->g->device.ordinal, r->area.seen);
        ops->memory_destroy(r->gpu_outbox);
        ops->pinned_destroy(r->outbox);
        ops->pinned_destroy(r->host_inbox);
    }
    sp_free(r);
}
