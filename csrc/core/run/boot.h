/* boot.h - start-up: the ranks swap addresses through a store, pick a transport for each pair and connect.
 * Place in the map: running. The result, sp_links, is all that the executor knows of the network. */
#ifndef SP_BOOT_H
#define SP_BOOT_H

#include "core/contract/transport.h"

#include <stdint.h>

#define SP_TRANSPORTS_MAX 8
#define SP_LINK_TEXT_CAP 160

/* One peer: which endpoint reaches it. */
typedef struct sp_link {
    const sp_transport *transport;
    sp_endpoint *ep;
    char text[SP_LINK_TEXT_CAP]; /* "shm: same host" */
} sp_link;

typedef struct sp_links {
    int rank, world_size;
    sp_link *peers; /* [world_size]; the own entry is empty */
    int n_endpoints;
    const sp_transport *transports[SP_TRANSPORTS_MAX];
    sp_endpoint *endpoints[SP_TRANSPORTS_MAX]; /* those in use */
    size_t message_max;                        /* smallest over the endpoints */
    uint8_t secret[SP_SECRET_BYTES];           /* for connections made later: GPU memory */
    uint64_t group_tag;
} sp_links;

typedef struct sp_boot_config {
    int rank, world_size;
    const char *name;       /* group name: part of the keys */
    const uint8_t *secret;  /* [SP_SECRET_BYTES] or NULL: rank 0 makes one and publishes it in the store */
    const char *transports; /* comma list, in order */
    uint32_t n_sockets;     /* 0 = default */
    size_t queue_bytes;
    uint32_t slice_bytes; /* published, so that ranks with other settings are told at once */
    int64_t deadline_ns;
} sp_boot_config;

/* Swap, pick, connect; returns when every link is up. `links` is zeroed by the caller; on failure too it is
 * freed with sp_links_close.  Errors: SETTING, MISMATCH (ranks with other settings), TIMEOUT (names the ranks
 * that are missing), UNREACHABLE, AUTH, and the store's own. */
spccl_status sp_links_open(sp_links *links, const spccl_store *store, const sp_boot_config *config);
void sp_links_close(sp_links *links);

/* Each of these walks over the endpoints in use. */
spccl_status sp_links_progress(sp_links *links); /* ABORTED with the peer's text */
spccl_status sp_links_arm(sp_links *links);
void sp_links_disarm(sp_links *links);
void sp_links_abort_peers(sp_links *links, const char *text);
size_t sp_links_memory_bytes(sp_links *links);

/* The queue calls of transport.h, by peer; a failure's text starts with the peer. */
static inline spccl_status sp_link_reserve(sp_links *l, int peer, int queue, size_t bytes, void **out)
{
    return l->peers[peer].transport->reserve(l->peers[peer].ep, peer, queue, bytes, out);
}
static inline spccl_status sp_link_commit(sp_links *l, int peer, int queue)
{
    return l->peers[peer].transport->commit(l->peers[peer].ep, peer, queue);
}
static inline bool sp_link_flushed(sp_links *l, int peer, int queue, uint64_t n)
{
    return l->peers[peer].transport->flushed(l->peers[peer].ep, peer, queue, n);
}
static inline spccl_status sp_link_peek(sp_links *l, int peer, int queue, const void **out, size_t *bytes)
{
    return l->peers[peer].transport->peek(l->peers[peer].ep, peer, queue, out, bytes);
}
static inline spccl_status sp_link_release(sp_links *l, int peer, int queue)
{
    return l->peers[peer].transport->release(l->peers[peer].ep, peer, queue);
}

#endif
