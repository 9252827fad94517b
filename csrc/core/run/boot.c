/* boot.c - see boot.h. A rank puts this into the store under "spccl/<name>/address/<rank>" (little-endian):
 *   u32 magic, u32 wire version, u32 world size, u32 slice bytes, u32 number of transports, u8 host[44],
 *   u32 schedule, u32 whether rates may change the order, then for each transport
 *   u32 name bytes, name, u32 rate in Mbit/s (0: unknown), u32 address bytes, address */
#include "core/run/boot.h"

#include "core/base/bits.h"
#include "core/base/clock.h"
#include "core/base/log.h"
#include "core/base/mem.h"
#include "core/contract/link_rate.h"
#include "core/plan/sched.h"

#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>

#define BOOT_MAGIC 0x54425053u   /* "SPBT" */
#define BOOT_REFUSAL 0x46525053u /* "SPRF": u32 magic, u32 status, zeros to BOOT_HEAD_BYTES, text */
#define WIRE_VERSION 5u
#define BOOT_SCHEDULE_AT (20u + SP_HOST_ID_BYTES)
#define BOOT_RATES_AT (BOOT_SCHEDULE_AT + 4u)
#define BOOT_HEAD_BYTES (BOOT_RATES_AT + 4u)
#define REFUSAL_CAP 600u
#define REFUSAL_BYTES (BOOT_HEAD_BYTES + REFUSAL_CAP)
#define BLOB_CAP (BOOT_HEAD_BYTES + SP_TRANSPORTS_MAX * (12u + 16u + SP_ADDRESS_BYTES_MAX))
#define KEY_CAP 200

static void make_key(char key[KEY_CAP], const sp_boot_config *c, const char *what, int rank)
{
    if (rank >= 0)
        snprintf(key, KEY_CAP, "spccl/%s/%s/%d", c->name, what, rank);
    else
        snprintf(key, KEY_CAP, "spccl/%s/%s", c->name, what);
}

/* Get a key. The text of a time-out names the missing rank. */
static spccl_status store_get(const spccl_store *store, const sp_boot_config *c, const char *what, int rank,
                              void *buf, size_t cap, size_t *bytes)
{
    char key[KEY_CAP];
    spccl_status st;
    make_key(key, c, what, rank);
    st = store->get(store->ctx, key, buf, cap, sp_deadline_left_ms(c->deadline_ns, INT32_MAX), bytes);
    if (st == SPCCL_OK && *bytes > cap)
        return SP_FAIL(SPCCL_ERR_MISMATCH,
                       "rank %d: group \"%s\": the store gave %zu bytes for %s, asked for at most %zu",
                       c->rank, c->name, *bytes, key, cap);
    if (st == SPCCL_ERR_TIMEOUT)
        return SP_FAIL(
            st, "rank %d: group \"%s\": rank %d of %d did not join in time (waited for its %s in the store)",
            c->rank, c->name, rank < 0 ? 0 : rank, c->world_size, what);
    return st;
}

/* Check whether a rank published, in place of a secret or an address, why it cannot join. */
static spccl_status check_refusal(const sp_boot_config *c, int peer, const uint8_t *blob, size_t bytes)
{
    if (bytes == REFUSAL_BYTES && sp_load_le32(blob) == BOOT_REFUSAL)
        return SP_FAIL(SPCCL_ERR_PEER, "rank %d: group \"%s\": rank %d cannot join: %.*s", c->rank, c->name,
                       peer, (int)REFUSAL_CAP, (const char *)blob + BOOT_HEAD_BYTES);
    return SPCCL_OK;
}

/* Get the secret that rank 0 published. */
static spccl_status get_secret(const spccl_store *store, const sp_boot_config *c,
                               uint8_t secret[SP_SECRET_BYTES])
{
    uint8_t blob[REFUSAL_BYTES];
    size_t bytes = 0;
    SP_TRY(store_get(store, c, "secret", -1, blob, sizeof blob, &bytes));
    SP_TRY(check_refusal(c, 0, blob, bytes));
    if (bytes != SP_SECRET_BYTES)
        return SP_FAIL(SPCCL_ERR_MISMATCH,
                       "rank %d: group \"%s\": secret in the store has %zu bytes, wanted %u", c->rank,
                       c->name, bytes, SP_SECRET_BYTES);
    memcpy(secret, blob, SP_SECRET_BYTES);
    explicit_bzero(blob, sizeof blob);
    return SPCCL_OK;
}

static spccl_status agree_secret(const spccl_store *store, const sp_boot_config *c,
                                 uint8_t secret[SP_SECRET_BYTES])
{
    char key[KEY_CAP];
    if (c->secret != NULL) {
        memcpy(secret, c->secret, SP_SECRET_BYTES);
        return SPCCL_OK;
    }
    if (c->rank != 0)
        return get_secret(store, c, secret);
    if (getrandom(secret, SP_SECRET_BYTES, 0) != (ssize_t)SP_SECRET_BYTES)
        return SP_FAIL_ERRNO(SPCCL_ERR_SYSTEM, "rank 0: getrandom for the job secret");
    make_key(key, c, "secret", -1);
    return store->set(store->ctx, key, secret, SP_SECRET_BYTES);
}

/* Open every transport of the list. Those that cannot be opened are left out with a log line. It is an error
 * if none is left. */
static spccl_status open_all(sp_links *links, const sp_boot_config *c, const sp_endpoint_config *ec)
{
    const sp_transport *list[SP_TRANSPORTS_MAX];
    char tried[600] = "";
    size_t n = 0;
    SP_TRY(sp_transport_parse_list(c->transports, list, SP_TRANSPORTS_MAX, &n));
    for (size_t i = 0; i < n; i++) {
        sp_endpoint *ep = NULL;
        spccl_status st = list[i]->open(ec, &ep);
        if (st != SPCCL_OK) {
            char reason[512];
            bool no_descriptors = sp_error_is_descriptors();
            snprintf(reason, sizeof reason, "%s", spccl_last_error()); /* close may set another */
            list[i]->close(ep);
            sp_set_error(reason);
            /* Without descriptors each rank may be left with another transport, and none in common. */
            if (n == 1 || no_descriptors)
                return st;
            sp_log(SP_LOG_WARN, c->rank, "transport %s is left out: %s", list[i]->name, spccl_last_error());
            snprintf(tried + strlen(tried), sizeof tried - strlen(tried), "%s%s: %.180s", i != 0 ? "; " : "",
                     list[i]->name, sp_without_rank(spccl_last_error(), c->rank));
            continue;
        }
        links->transports[links->n_endpoints] = list[i];
        links->endpoints[links->n_endpoints++] = ep;
    }
    if (links->n_endpoints == 0)
        return SP_FAIL(SPCCL_ERR_UNREACHABLE, "rank %d: no transport could be opened: %s", c->rank, tried);
    return SPCCL_OK;
}

/* True if tcp is among the transports. */
static bool lists_tcp(const sp_boot_config *c)
{
    const sp_transport *list[SP_TRANSPORTS_MAX], *tcp = sp_transport_find("tcp");
    size_t n = 0;
    bool found = false;
    if (sp_transport_parse_list(c->transports, list, SP_TRANSPORTS_MAX, &n) != SPCCL_OK)
        return false;
    for (size_t i = 0; i < n; i++)
        found = found || list[i] == tcp;
    return found;
}

static spccl_status open_endpoints(sp_links *links, const sp_boot_config *c)
{
    sp_endpoint_config ec = {.rank = c->rank,
                             .tcp_too = links->tcp_too = lists_tcp(c),
                             .rates_decide = links->rates_decide = c->rates_decide,
                             .world_size = c->world_size,
                             .group_tag = links->group_tag,
                             .n_queues = 2,
                             .queue_bytes = c->queue_bytes,
                             .n_sockets = c->n_sockets,
                             .deadline_ns = c->deadline_ns};
    spccl_status st;
    memcpy(ec.secret, links->secret, SP_SECRET_BYTES);
    memcpy(ec.host, links->host, SP_HOST_ID_BYTES);
    st = open_all(links, c, &ec);
    explicit_bzero(&ec, sizeof ec); /* the copy of the secret */
    return st;
}

static spccl_status publish(sp_links *links, const spccl_store *store, const sp_boot_config *c)
{
    uint8_t blob[BLOB_CAP];
    size_t n = BOOT_HEAD_BYTES;
    char key[KEY_CAP];
    sp_store_le32(blob, BOOT_MAGIC);
    sp_store_le32(blob + 4, WIRE_VERSION);
    sp_store_le32(blob + 8, (uint32_t)c->world_size);
    sp_store_le32(blob + 12, c->slice_bytes);
    sp_store_le32(blob + 16, (uint32_t)links->n_endpoints);
    memcpy(blob + 20, links->host, SP_HOST_ID_BYTES);
    sp_store_le32(blob + BOOT_SCHEDULE_AT, c->schedule);
    sp_store_le32(blob + BOOT_RATES_AT, c->rates_decide ? 1 : 0);
    for (int i = 0; i < links->n_endpoints; i++) {
        const sp_transport *t = links->transports[i];
        const char *name = t->name;
        size_t name_bytes = strlen(name), address_bytes = 0;
        sp_store_le32(blob + n, (uint32_t)name_bytes);
        memcpy(blob + n + 4, name, name_bytes);
        n += 4 + name_bytes;
        links->rates_mbps[i] = t->rate_mbps != NULL ? t->rate_mbps(links->endpoints[i]) : 0;
        sp_store_le32(blob + n, links->rates_mbps[i]);
        n += 4;
        SP_TRY(t->address(links->endpoints[i], blob + n + 4, &address_bytes));
        sp_store_le32(blob + n, (uint32_t)address_bytes);
        n += 4 + address_bytes;
    }
    make_key(key, c, "address", c->rank);
    return store->set(store->ctx, key, blob, n);
}

void sp_boot_refuse(const spccl_store *store, const sp_boot_config *c, spccl_status st)
{
    uint8_t blob[REFUSAL_BYTES] = {0};
    char key[KEY_CAP], error[1024], text[REFUSAL_CAP];
    spccl_status stored = SPCCL_OK;
    if (c->world_size == 1)
        return;
    snprintf(error, sizeof error, "%s", spccl_last_error());
    snprintf(text, sizeof text, "%.*s", (int)sizeof text - 1, sp_without_rank(error, c->rank));
    sp_store_le32(blob, BOOT_REFUSAL);
    sp_store_le32(blob + 4, (uint32_t)st);
    memcpy(blob + BOOT_HEAD_BYTES, text, strlen(text));
    if (c->rank == 0) { /* the others wait for the secret first */
        make_key(key, c, "secret", -1);
        stored = store->set(store->ctx, key, blob, sizeof blob);
    }
    make_key(key, c, "address", c->rank);
    if (store->set(store->ctx, key, blob, sizeof blob) != SPCCL_OK || stored != SPCCL_OK)
        sp_log(SP_LOG_INFO, c->rank, "group \"%s\": the peers could not be informed: %s", c->name,
               spccl_last_error());
    sp_set_error(error);
}

/* What one rank published. */
struct published {
    size_t bytes;
    uint8_t blob[BLOB_CAP];
};

/* A transport that both ranks offer and that reaches the peer. */
struct candidate {
    int i, position; /* in sp_links.transports, and in the order of the lower rank */
    uint32_t mbps;
    const uint8_t *address; /* the peer's */
    size_t address_bytes;
    char why[256];
};

/* Find a transport in what a peer published: its address, its rate, and its position in the peer's order. False if the
 * peer does not offer it, or if the bytes end too early. */
static bool find_address(const uint8_t *blob, size_t bytes, const char *name, struct candidate *out)
{
    uint32_t n = sp_load_le32(blob + 16);
    size_t at = BOOT_HEAD_BYTES, name_bytes = strlen(name);
    for (uint32_t i = 0; i < n; i++) {
        const uint8_t *its_name;
        size_t its_name_bytes, its_bytes;
        if (bytes - at < 4 || (its_name_bytes = sp_load_le32(blob + at)) > bytes - at - 4)
            return false;
        its_name = blob + at + 4;
        at += 4 + its_name_bytes;
        if (bytes - at < 8 || (its_bytes = sp_load_le32(blob + at + 4)) > bytes - at - 8)
            return false;
        at += 8;
        if (its_name_bytes == name_bytes && memcmp(its_name, name, name_bytes) == 0) {
            out->mbps = sp_load_le32(blob + at - 8);
            out->address = blob + at;
            out->address_bytes = its_bytes;
            out->position = (int)i;
            return true;
        }
        at += its_bytes;
    }
    return false;
}

static const char *schedule_text(uint32_t published)
{
    return published == 0 ? "auto" : sp_schedule_name((sp_schedule)(published - 1));
}

/* Check what a peer published. Ranks with different settings would wait for each other for ever. */
static spccl_status check_blob(const sp_boot_config *c, int peer, const uint8_t *blob, size_t bytes)
{
    SP_TRY(check_refusal(c, peer, blob, bytes));
    if (bytes < BOOT_HEAD_BYTES || sp_load_le32(blob) != BOOT_MAGIC)
        return SP_FAIL(
            SPCCL_ERR_MISMATCH,
            "rank %d: group \"%s\": rank %d published something that is not an spccl address (%zu bytes)",
            c->rank, c->name, peer, bytes);
    if (sp_load_le32(blob + 4) != WIRE_VERSION)
        return SP_FAIL(
            SPCCL_ERR_MISMATCH,
            "rank %d: rank %d has wire version %u, this rank has %u: install the same spccl on all ranks",
            c->rank, peer, sp_load_le32(blob + 4), WIRE_VERSION);
    if (sp_load_le32(blob + 8) != (uint32_t)c->world_size)
        return SP_FAIL(SPCCL_ERR_MISMATCH, "rank %d: group \"%s\" has world size %d here, %u at rank %d",
                       c->rank, c->name, c->world_size, sp_load_le32(blob + 8), peer);
    if (sp_load_le32(blob + 12) != c->slice_bytes)
        return SP_FAIL(SPCCL_ERR_MISMATCH,
                       "rank %d: slice size is %u bytes here, %u at rank %d: set the same SPCCL_SLICE_BYTES "
                       "on all ranks",
                       c->rank, c->slice_bytes, sp_load_le32(blob + 12), peer);
    if (sp_load_le32(blob + BOOT_SCHEDULE_AT) != c->schedule)
        return SP_FAIL(SPCCL_ERR_MISMATCH,
                       "rank %d: the schedule is %s here, %s at rank %d: set the same SPCCL_SCHEDULE on all "
                       "ranks",
                       c->rank, schedule_text(c->schedule),
                       schedule_text(sp_load_le32(blob + BOOT_SCHEDULE_AT)), peer);
    return SPCCL_OK;
}

/* Find the transports that both ranks offer and that reach the peer, in the order of the lower rank. `tried` gets why the
 * others do not. Returns their number. */
static int find_candidates(const sp_links *links, int peer, const struct published *p, struct candidate *out,
                           char tried[600])
{
    int n = 0;
    for (int i = 0; i < links->n_endpoints; i++) {
        const sp_transport *t = links->transports[i];
        struct candidate c = {.i = i};
        size_t used = strlen(tried);
        int at = n;
        if (!find_address(p->blob, p->bytes, t->name, &c)) {
            snprintf(tried + used, 600 - used, "%s%s: the peer does not offer it", used != 0 ? "; " : "",
                     t->name);
            continue;
        }
        if (!t->can_reach(links->endpoints[i], c.address, c.address_bytes, c.why, sizeof c.why)) {
            snprintf(tried + used, 600 - used, "%s%s: %s", used != 0 ? "; " : "", t->name, c.why);
            continue;
        }
        c.mbps = sp_rate_of_pair(c.mbps, links->rates_mbps[i]); /* as published: the peer computes the same */
        if (links->rank < peer)
            c.position = i;
        for (; at > 0 && out[at - 1].position > c.position; at--)
            out[at] = out[at - 1];
        out[at] = c;
        n++;
    }
    return n;
}

/* Choose the transport of a pair: the first in the order of the lower rank, unless rates change that order. Both ends
 * know the same facts, so both choose the same one even if their settings differ. */
static spccl_status pick(sp_links *links, const sp_boot_config *c, int peer, const struct published *p)
{
    struct candidate found[SP_TRANSPORTS_MAX];
    uint32_t mbps[SP_TRANSPORTS_MAX];
    char tried[600] = "", faster[64] = "";
    sp_link *link = &links->peers[peer];
    int n = find_candidates(links, peer, p, found, tried), best;
    if (n == 0)
        return SP_FAIL(SPCCL_ERR_UNREACHABLE,
                       "rank %d: no transport reaches rank %d (%s): see SPCCL_TRANSPORTS and `spccl info`",
                       c->rank, peer, tried);
    for (int i = 0; i < n; i++)
        mbps[i] = found[i].mbps;
    best = sp_rate_choose(mbps, n, c->rates_decide && sp_load_le32(p->blob + BOOT_RATES_AT) == 1);
    if (best != 0)
        snprintf(faster, sizeof faster, ", %.1f Gbit/s; %s has %.1f", mbps[best] / 1e3,
                 links->transports[found[0].i]->name, mbps[0] / 1e3);
    link->transport = links->transports[found[best].i];
    link->ep = links->endpoints[found[best].i];
    snprintf(link->text, sizeof link->text, "%s: %.*s%s", link->transport->name, best != 0 ? 80 : 140,
             found[best].why, faster);
    return link->transport->add_peer(link->ep, peer, found[best].address, found[best].address_bytes);
}

/* Close the endpoints that no link uses. */
static void drop_unused(sp_links *links)
{
    int n = 0;
    for (int i = 0; i < links->n_endpoints; i++) {
        bool used = false;
        for (int r = 0; r < links->world_size; r++)
            used = used || links->peers[r].ep == links->endpoints[i];
        if (!used) {
            links->transports[i]->close(links->endpoints[i]);
            continue;
        }
        links->transports[n] = links->transports[i];
        links->endpoints[n++] = links->endpoints[i];
    }
    links->n_endpoints = n;
}

static spccl_status connect_all(sp_links *links)
{
    for (;;) {
        bool again = false;
        for (int i = 0; i < links->n_endpoints; i++) {
            spccl_status st = links->transports[i]->connect_step(links->endpoints[i]);
            if (st == SPCCL_AGAIN)
                again = true;
            else if (st != SPCCL_OK)
                return st;
        }
        if (!again)
            return SPCCL_OK;
        nanosleep(&(struct timespec){.tv_nsec = 200000}, NULL); /* start-up only */
    }
}

/* Number the hosts. hosts: [world_size][SP_HOST_ID_BYTES]; every rank gets the same numbers. */
static spccl_status number_hosts(sp_links *links, const uint8_t *hosts)
{
    int n = links->world_size, *host_of = sp_calloc((size_t)n, sizeof *host_of);
    bool one_host = true;
    spccl_status st = SPCCL_OK;
    if (host_of == NULL)
        return SP_FAIL(SPCCL_ERR_NOMEM, "table of hosts for %d ranks", n);
    for (int r = 0; r < n; r++) {
        const uint8_t *host = hosts + (size_t)r * SP_HOST_ID_BYTES;
        int first = 0;
        while (memcmp(hosts + (size_t)first * SP_HOST_ID_BYTES, host, SP_HOST_ID_BYTES) != 0)
            first++;
        host_of[r] = first;
        one_host = one_host && first == 0;
    }
    if (!one_host)
        st = sp_hosts_create(host_of, n, &links->hosts);
    sp_free(host_of);
    return st;
}

/* Read what the peers published. A rank that cannot join has published its reason. All ranks read it here,
 * before any of them can fail because of another. */
static spccl_status read_peers(const spccl_store *store, const sp_boot_config *c, struct published *all)
{
    for (int peer = 0; peer < c->world_size; peer++) {
        struct published *p = &all[peer];
        if (peer == c->rank)
            continue;
        SP_TRY(store_get(store, c, "address", peer, p->blob, sizeof p->blob, &p->bytes));
        SP_TRY(check_blob(c, peer, p->blob, p->bytes));
    }
    return SPCCL_OK;
}

/* Read what the peers published, and choose the transport of each link. hosts: [world_size][SP_HOST_ID_BYTES]. */
static spccl_status meet_peers(sp_links *links, const spccl_store *store, const sp_boot_config *c,
                               uint8_t *hosts)
{
    struct published *all = sp_calloc((size_t)c->world_size, sizeof *all);
    spccl_status st;
    if (all == NULL)
        return SP_FAIL(SPCCL_ERR_NOMEM, "addresses of %d ranks", c->world_size);
    st = read_peers(store, c, all);
    memcpy(hosts + (size_t)c->rank * SP_HOST_ID_BYTES, links->host, SP_HOST_ID_BYTES);
    for (int peer = 0; peer < c->world_size && st == SPCCL_OK; peer++) {
        if (peer == c->rank)
            continue;
        st = pick(links, c, peer, &all[peer]);
        memcpy(hosts + (size_t)peer * SP_HOST_ID_BYTES, all[peer].blob + 20, SP_HOST_ID_BYTES);
    }
    sp_free(all);
    return st == SPCCL_OK ? number_hosts(links, hosts) : st;
}

static spccl_status open_links(sp_links *links, const spccl_store *store, const sp_boot_config *c)
{
    spccl_status st;
    uint8_t *hosts;
    links->rank = c->rank;
    links->world_size = c->world_size;
    links->message_max = SIZE_MAX;
    links->peers = sp_calloc((size_t)c->world_size, sizeof *links->peers);
    if (links->peers == NULL)
        return SP_FAIL(SPCCL_ERR_NOMEM, "links to %d ranks", c->world_size);
    if (c->world_size == 1)
        return SPCCL_OK;
    links->group_tag = sp_hash_text(c->name);
    st = agree_secret(store, c, links->secret);
    links->peers_know = st != SPCCL_OK && c->rank != 0;
    if (st == SPCCL_OK)
        st = sp_host_identity(c->host_id, links->host);
    if (st == SPCCL_OK)
        st = open_endpoints(links, c);
    if (st == SPCCL_OK)
        st = publish(links, store, c);
    if (st != SPCCL_OK)
        return st;
    links->peers_know = true;
    hosts = sp_calloc((size_t)c->world_size, SP_HOST_ID_BYTES);
    if (hosts == NULL)
        return SP_FAIL(SPCCL_ERR_NOMEM, "hosts of %d ranks", c->world_size);
    st = meet_peers(links, store, c, hosts);
    sp_free(hosts);
    if (st != SPCCL_OK)
        return st;
    drop_unused(links);
    SP_TRY(connect_all(links));
    for (int r = 0; r < c->world_size; r++) {
        sp_link *link = &links->peers[r];
        if (link->transport != NULL && link->transport->describe != NULL)
            link->transport->describe(link->ep, r, link->text, sizeof link->text);
    }
    for (int i = 0; i < links->n_endpoints; i++)
        links->message_max =
            sp_min_size(links->message_max, links->transports[i]->message_max(links->endpoints[i]));
    return SPCCL_OK;
}

spccl_status sp_links_open(sp_links *links, const spccl_store *store, const sp_boot_config *c)
{
    spccl_status st = open_links(links, store, c);
    sp_wipe_stack();
    return st;
}
