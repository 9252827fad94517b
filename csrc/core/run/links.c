/* links.c - opening endpoints, and the links of a group after start-up: each function goes over all endpoints. See
 * boot.h. */
#include "core/base/clock.h"
#include "core/base/mem.h"
#include "core/base/status.h"
#include "core/run/boot_links.h"

#include <string.h>

#define NOTES_NS                                                                                             \
    10000 /* a rank that polls looks this often at links without messages: it costs a system call */

/* ---- opening ---- */

spccl_status sp_links_open_tcp(void *links, const sp_endpoint_config *config, sp_endpoint **out)
{
    sp_links *l = links;
    spccl_status st = l->tcp != NULL ? SPCCL_OK : sp_transport_find("tcp")->open(config, &l->tcp);
    *out = l->tcp;
    return st;
}

spccl_status sp_links_add(sp_links *links, const sp_transport *t, const sp_endpoint_config *config)
{
    sp_endpoint *ep = NULL;
    SP_TRY(t == sp_transport_find("tcp") ? sp_links_open_tcp(links, config, &ep) : t->open(config, &ep));
    links->transports[links->n_endpoints] = t;
    links->endpoints[links->n_endpoints++] = ep;
    return SPCCL_OK;
}

bool sp_links_reach(const sp_links *links, int i, const sp_published_transport *its,
                    const sp_published_transport *control, char *why, size_t cap)
{
    return links->transports[i]->can_reach(links->endpoints[i], its->address, its->address_bytes, why, cap) &&
           (!sp_has_control(links->transports[i], links->endpoints[i]) ||
            sp_transport_find("tcp")->can_reach(links->tcp, control->address, control->address_bytes, why,
                                                cap));
}

spccl_status sp_links_add_peer(sp_links *links, int peer, int i, const sp_published_transport *its,
                               const sp_published_transport *control)
{
    sp_link *link = &links->peers[peer];
    link->transport = links->transports[i];
    link->ep = links->endpoints[i];
    if (sp_has_control(link->transport, link->ep)) {
        const sp_transport *tcp = sp_transport_find("tcp");
        SP_TRY(tcp->add_peer(links->tcp, peer, control->address, control->address_bytes));
        tcp->set_control(links->tcp, peer, true);
    }
    return link->transport->add_peer(link->ep, peer, its->address, its->address_bytes);
}

/* ---- after start-up ---- */

void sp_links_close(sp_links *links)
{
    for (int i = 0; i < links->n_endpoints; i++)
        if (links->transports[i]->leave != NULL)
            links->transports[i]->leave(links->endpoints[i]);
    sp_transport_find("tcp")->close(links->tcp);
    for (int i = 0; i < links->n_endpoints; i++)
        if (links->endpoints[i] != links->tcp)
            links->transports[i]->close(links->endpoints[i]);
    sp_free(links->peers);
    sp_free(links->hosts);
    explicit_bzero(links->secret, sizeof links->secret);
    *links = (sp_links){0};
}

spccl_status sp_links_progress(sp_links *links)
{
    int64_t now_ns = links->notes_only ? sp_now_ns() : 0;
    bool skip_notes = links->notes_only && now_ns - links->notes_ns < NOTES_NS;
    links->notes_ns = skip_notes ? links->notes_ns : now_ns;
    for (int i = 0; i < links->n_endpoints; i++) {
        int peer = -1;
        char text[SP_ABORT_TEXT_CAP] = "";
        spccl_status st;
        if (skip_notes && links->endpoints[i] == links->tcp)
            continue;
        st = links->transports[i]->progress(links->endpoints[i], &peer, text);
        if (st == SPCCL_ERR_ABORTED)
            return SP_FAIL(st, "rank %d gave up: %s", peer, sp_without_rank(text, peer));
        if (st != SPCCL_OK)
            return st;
    }
    return SPCCL_OK;
}

/* disarm may follow a successful arm only: ncclnet takes any other for a change, and then never sleeps. */
static void disarm_first(sp_links *links, int n)
{
    for (int i = 0; i < n; i++)
        links->transports[i]->disarm(links->endpoints[i]);
}

spccl_status sp_links_arm(sp_links *links)
{
    for (int i = 0; i < links->n_endpoints; i++) {
        spccl_status st = links->transports[i]->arm(links->endpoints[i]);
        if (st != SPCCL_OK) {
            disarm_first(links, i);
            return st;
        }
    }
    return SPCCL_OK;
}

void sp_links_disarm(sp_links *links)
{
    disarm_first(links, links->n_endpoints);
    links->notes_ns = 0; /* what woke this rank may have come over a control link */
}

void sp_links_abort_peers(sp_links *links, const char *text)
{
    for (int i = 0; i < links->n_endpoints; i++)
        if (links->transports[i]->abort_peers != NULL)
            links->transports[i]->abort_peers(links->endpoints[i], text);
}

size_t sp_links_memory_bytes(sp_links *links)
{
    size_t bytes = 0;
    for (int i = 0; i < links->n_endpoints; i++)
        bytes += links->transports[i]->memory_bytes(links->endpoints[i]);
    return bytes;
}
