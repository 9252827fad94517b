/* proxy_links.c - where the links to peers on other hosts lie; see proxy.h and contract/remote.h. */
#include "core/gpu/proxy.h"

uint32_t sp_proxies_result_index(const sp_gpu_comm *g, int rank, int i)
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

void sp_proxies_find_links(sp_proxies *r)
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
