/* links.c - the links of a group after start-up: each function goes over all endpoints. See boot.h. */
#include "core/base/mem.h"
#include "core/base/status.h"
#include "core/run/boot.h"

#include <string.h>

void sp_links_close(sp_links *links)
{
    for (int i = 0; i < links->n_endpoints; i++)
        links->transports[i]->close(links->endpoints[i]);
    sp_free(links->peers);
    sp_free(links->hosts);
    explicit_bzero(links->secret, sizeof links->secret);
    *links = (sp_links){0};
}

spccl_status sp_links_progress(sp_links *links)
{
    for (int i = 0; i < links->n_endpoints; i++) {
        int peer = -1;
        char text[SP_ABORT_TEXT_CAP] = "";
        spccl_status st = links->transports[i]->progress(links->endpoints[i], &peer, text);
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
}

void sp_links_abort_peers(sp_links *links, const char *text)
{
    for (int i = 0; i < links->n_endpoints; i++)
        links->transports[i]->abort_peers(links->endpoints[i], text);
}

size_t sp_links_memory_bytes(sp_links *links)
{
    size_t bytes = 0;
    for (int i = 0; i < links->n_endpoints; i++)
        bytes += links->transports[i]->memory_bytes(links->endpoints[i]);
    return bytes;
}
