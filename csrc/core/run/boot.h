/* boot.h - start-up: the ranks exchange addresses through a store, choose a transport for each pair, and
 * connect. The executor sees the network only through the result, sp_links. */
#ifndef SP_BOOT_H
#define SP_BOOT_H

#include "core/contract/transport.h"
#include "core/plan/hosts.h"
#include "core/plan/profile.h"

#include <stdint.h>

#define SP_TRANSPORTS_MAX 8
#define SP_LINK_TEXT_CAP 320

/* How this rank reaches one peer. */
typedef struct sp_link {
    const sp_transport *transport;
    sp_endpoint *ep;
    char text[SP_LINK_TEXT_CAP]; /* "shm: same host" */
} sp_link;

/* Endpoints of one thread, and which of them reaches each peer. Proxies and port channels have sp_links of their own. */
typedef struct sp_links {
    int rank, world_size;
    sp_hosts *hosts;                /* owned; NULL if all ranks are on one host */
    uint8_t host[SP_HOST_ID_BYTES]; /* this rank's */
    sp_link *peers;                 /* [world_size]; this rank's entry is empty */
    int n_endpoints;                /* endpoints in use */
    const sp_transport *transports[SP_TRANSPORTS_MAX];
    sp_endpoint *endpoints[SP_TRANSPORTS_MAX];
    /* Of transport tcp, among `endpoints`: it has tcp's messages, and the control links (transport.h). NULL: none. */
    sp_endpoint *tcp;
    bool notes_only;                        /* no messages take it */
    int64_t notes_ns;                       /* the last look at its notes; 0: none since the last sleep */
    uint32_t rates_mbps[SP_TRANSPORTS_MAX]; /* of the endpoints, as published; 0: unknown */
    size_t message_max;                     /* smallest over the endpoints */
    uint8_t secret[SP_SECRET_BYTES];        /* for later connections, which exchange GPU memory */
    uint64_t group_tag;
    bool tcp_too, rates_decide; /* tcp is among the transports; as in sp_endpoint_config: for proxies too */
    int other_profile;          /* a rank that has another profile than this one; -1: none */
    uint32_t any_forces;        /* what some rank forces: SP_BOOT_FORCES_* */
    bool peers_know; /* this rank's address is in the store, or its failure came from there or from peers */
} sp_links;

#define SP_BOOT_FORCES_FORMAT                                                                                \
    1u /* the format: frames of the same slice may have another bound than on other ranks */
#define SP_BOOT_FORCES_SLICES 2u /* the slice size */
#define SP_BOOT_TUNES 100u       /* sp_boot_config.schedule: automatic, with the tuner */

typedef struct sp_boot_config {
    int rank, world_size;
    const char *name;       /* of the group; part of the keys in the store */
    const uint8_t *secret;  /* [SP_SECRET_BYTES]; NULL: rank 0 draws one and puts it into the store */
    const char *transports; /* names with commas, preferred first */
    bool rates_decide;      /* the order is the default, and may be changed by rates (link_rate.h) */
    const char *host_id;    /* name of this rank's host; NULL or "": found */
    uint32_t n_sockets;     /* 0 = default */
    size_t queue_bytes;
    uint32_t slice_bytes; /* published, so that ranks with another slice size fail at once */
    uint32_t schedule;    /* likewise: 0 = automatic, SP_BOOT_TUNES, else 1 + sp_schedule */
    uint64_t plans_hash;  /* likewise: of the plan file; 0: none */
    const char *profile;  /* its path; NULL: none */
    uint64_t profile_hashes[SP_PROFILE_HASHES]; /* published: of the profile. Ranks with others use none */
    uint32_t forces;                            /* published: SP_BOOT_FORCES_* */
    int64_t deadline_ns;
} sp_boot_config;

/* Exchange addresses, choose transports, connect. Returns when every link is up. The caller zeroes `links`
 * before, and calls sp_links_close after, on failure too. Errors: SETTING, MISMATCH (ranks have other
 * settings), TIMEOUT (names the missing ranks), UNREACHABLE, AUTH, and those of the store. */
spccl_status sp_links_open(sp_links *links, const spccl_store *store, const sp_boot_config *config);
void sp_links_close(sp_links *links);
/* This rank failed with `st` before it published anything. Publish the last error's text in place of its
 * address, so that no peer waits until the deadline. Keeps the last error. */
void sp_boot_refuse(const spccl_store *store, const sp_boot_config *config, spccl_status st);

/* Proxies and port channels set rank, world_size, peers and tcp_too, and call these and sp_links_add_peer. */
/* Open an endpoint. config->open_control is sp_links_open_tcp, with the links. Errors: those of the transport. (links.c) */
spccl_status sp_links_add(sp_links *links, const sp_transport *t, const sp_endpoint_config *config);
spccl_status sp_links_open_tcp(void *links, const sp_endpoint_config *config, sp_endpoint **out);
/* Continue connecting. At the end pairs whose transport failed take their control link, with one warning. Errors: AGAIN,
 * UNREACHABLE (a pair failed, and tcp is not among the transports), and those of connect_step. (boot_links.c) */
spccl_status sp_links_connect_step(sp_links *links);

/* Each calls the function of that name (transport.h) of every endpoint in use. */
spccl_status sp_links_progress(sp_links *links); /* ABORTED with the peer's text */
spccl_status sp_links_arm(sp_links *links);
void sp_links_disarm(sp_links *links);
void sp_links_abort_peers(sp_links *links, const char *text);
size_t sp_links_memory_bytes(sp_links *links);

static inline bool sp_has_control(const sp_transport *t, sp_endpoint *ep)
{
    return ep != NULL && t->has_control != NULL && t->has_control(ep);
}

/* The queue functions of transport.h, for the endpoint that reaches `peer`. */
static inline spccl_status sp_link_reserve(sp_links *l, int peer, int queue, size_t bytes, void **out)
{
    return l->peers[peer].transport->reserve(l->peers[peer].ep, peer, queue, bytes, out);
}
static inline spccl_status sp_link_commit(sp_links *l, int peer, int queue, uint32_t call)
{
    return l->peers[peer].transport->commit(l->peers[peer].ep, peer, queue, call);
}
static inline bool sp_link_flushed(sp_links *l, int peer, int queue, uint64_t n)
{
    return l->peers[peer].transport->flushed(l->peers[peer].ep, peer, queue, n);
}
static inline spccl_status sp_link_peek(sp_links *l, int peer, int queue, const void **out, size_t *bytes)
{
    return l->peers[peer].transport->peek(l->peers[peer].ep, peer, queue, out, bytes);
}
static inline double sp_link_ns_per_byte(const sp_links *l, int peer)
{
    return l->peers[peer].transport->ns_per_byte(l->peers[peer].ep, peer);
}
static inline spccl_status sp_link_release(sp_links *l, int peer, int queue)
{
    return l->peers[peer].transport->release(l->peers[peer].ep, peer, queue);
}

#endif
