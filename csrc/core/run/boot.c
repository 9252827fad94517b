/* boot.c - see boot.h and boot_links.h. */
#include "core/run/boot_links.h"

#include "core/base/bits.h"
#include "core/base/clock.h"
#include "core/base/log.h"
#include "core/base/mem.h"
#include "core/plan/tune_coll.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>

#define BOOT_MAGIC 0x54425053u   /* "SPBT" */
#define BOOT_REFUSAL 0x46525053u /* "SPRF": u32 magic, u32 status, zeros to SP_BOOT_HEAD_BYTES, text */
#define WIRE_VERSION 10u
#define REFUSAL_CAP 600u
#define REFUSAL_BYTES (SP_BOOT_HEAD_BYTES + REFUSAL_CAP)
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
                       peer, (int)REFUSAL_CAP, (const char *)blob + SP_BOOT_HEAD_BYTES);
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
    size_t n = 0, n_opened = 0;
    SP_TRY(sp_transport_parse_list(c->transports, list, SP_TRANSPORTS_MAX, &n));
    for (size_t i = 0; i < n; i++) {
        spccl_status st = sp_links_add(links, list[i], ec);
        links->tcp_too = links->tcp_too || list[i] == sp_transport_find("tcp");
        n_opened += st == SPCCL_OK;
        if (st == SPCCL_OK)
            continue;
        /* Without descriptors each rank may be left with another transport, and none in common. */
        if (n == 1 || sp_error_is_descriptors())
            return st;
        sp_log(SP_LOG_WARN, c->rank, "transport %s is left out: %s", list[i]->name, spccl_last_error());
        snprintf(tried + strlen(tried), sizeof tried - strlen(tried), "%s%s: %.180s", i != 0 ? "; " : "",
                 list[i]->name, sp_without_rank(spccl_last_error(), c->rank));
    }
    if (n_opened == 0)
        return SP_FAIL(SPCCL_ERR_UNREACHABLE, "rank %d: no transport could be opened: %s", c->rank, tried);
    return links->tcp == NULL || links->tcp_too ? SPCCL_OK
                                                : sp_links_add(links, sp_transport_find("tcp"), ec);
}

static spccl_status open_endpoints(sp_links *links, const sp_boot_config *c)
{
    sp_endpoint_config ec = {.rank = c->rank,
                             .rates_decide = c->rates_decide,
                             .world_size = c->world_size,
                             .group_tag = links->group_tag,
                             .n_queues = 2,
                             .queue_bytes = c->queue_bytes,
                             .n_sockets = c->n_sockets,
                             .deadline_ns = c->deadline_ns,
                             .open_control = sp_links_open_tcp,
                             .owner = links};
    spccl_status st;
    links->rates_decide = c->rates_decide;
    memcpy(ec.secret, links->secret, SP_SECRET_BYTES);
    memcpy(ec.host, links->host, SP_HOST_ID_BYTES);
    st = open_all(links, c, &ec);
    explicit_bzero(&ec, sizeof ec); /* the copy of the secret */
    return st;
}

static spccl_status publish(sp_links *links, const spccl_store *store, const sp_boot_config *c)
{
    uint8_t blob[SP_BOOT_BLOB_CAP];
    size_t n = SP_BOOT_HEAD_BYTES;
    char key[KEY_CAP];
    sp_store_le32(blob, BOOT_MAGIC);
    sp_store_le32(blob + 4, WIRE_VERSION);
    sp_store_le32(blob + 8, (uint32_t)c->world_size);
    sp_store_le32(blob + 12, c->slice_bytes);
    sp_store_le32(blob + 16, (uint32_t)links->n_endpoints);
    memcpy(blob + SP_BOOT_HOST_AT, links->host, SP_HOST_ID_BYTES);
    sp_store_le32(blob + SP_BOOT_SCHEDULE_AT, c->schedule);
    sp_store_le32(blob + SP_BOOT_RATES_AT, c->rates_decide ? 1 : 0);
    sp_store_le64(blob + SP_BOOT_PLANS_AT, c->plans_hash);
    for (size_t i = 0; i < SP_PROFILE_HASHES; i++)
        sp_store_le64(blob + SP_BOOT_PROFILE_AT + 8 * i, c->profile_hashes[i]);
    sp_store_le32(blob + SP_BOOT_FORCED_AT, c->forces);
    for (int i = 0; i < links->n_endpoints; i++) {
        const sp_transport *t = links->transports[i];
        bool is_listed = links->endpoints[i] != links->tcp || links->tcp_too;
        const char *name = is_listed ? t->name : "control";
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
    memcpy(blob + SP_BOOT_HEAD_BYTES, text, strlen(text));
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

static const char *schedule_text(uint32_t published)
{
    return published == 0               ? "auto"
           : published == SP_BOOT_TUNES ? SP_TUNE_ON
                                        : sp_schedule_name((sp_schedule)(published - 1));
}

spccl_status sp_published_check(const sp_boot_config *c, int peer, const sp_published *p)
{
    const uint8_t *blob = p->blob;
    size_t bytes = p->bytes;
    SP_TRY(check_refusal(c, peer, blob, bytes));
    if (bytes < SP_BOOT_HEAD_BYTES || sp_load_le32(blob) != BOOT_MAGIC)
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
        return SP_FAIL(
            SPCCL_ERR_MISMATCH,
            "rank %d: slice size is %u bytes here, %u at rank %d: set the same SPCCL_DEBUG_SLICE_BYTES "
            "on all ranks",
            c->rank, c->slice_bytes, sp_load_le32(blob + 12), peer);
    if (sp_load_le32(blob + SP_BOOT_SCHEDULE_AT) != c->schedule)
        return SP_FAIL(SPCCL_ERR_MISMATCH,
                       "rank %d: the schedule is %s here, %s at rank %d: set the same SPCCL_SCHEDULE on all "
                       "ranks",
                       c->rank, schedule_text(c->schedule),
                       schedule_text(sp_load_le32(blob + SP_BOOT_SCHEDULE_AT)), peer);
    if (sp_load_le64(blob + SP_BOOT_PLANS_AT) != c->plans_hash)
        return SP_FAIL(SPCCL_ERR_MISMATCH,
                       "rank %d: the plan file of SPCCL_SCHEDULE has hash %016" PRIx64 " here, %016" PRIx64
                       " at rank %d: give all ranks the same file",
                       c->rank, c->plans_hash, sp_load_le64(blob + SP_BOOT_PLANS_AT), peer);
    return SPCCL_OK;
}

static const uint8_t *host_of_rank(const sp_links *links, const sp_published *all, int rank)
{
    return rank == links->rank ? links->host : all[rank].blob + SP_BOOT_HOST_AT;
}

/* Number the hosts. Every rank gets the same numbers. */
static spccl_status number_hosts(sp_links *links, const sp_published *all)
{
    int n = links->world_size, *host_of = sp_calloc((size_t)n, sizeof *host_of);
    bool one_host = true;
    spccl_status st = SPCCL_OK;
    if (host_of == NULL)
        return SP_FAIL(SPCCL_ERR_NOMEM, "table of hosts for %d ranks", n);
    for (int r = 0; r < n; r++) {
        const uint8_t *host = host_of_rank(links, all, r);
        int first = 0;
        while (memcmp(host_of_rank(links, all, first), host, SP_HOST_ID_BYTES) != 0)
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
static spccl_status read_peers(const spccl_store *store, const sp_boot_config *c, sp_published *all)
{
    for (int peer = 0; peer < c->world_size; peer++) {
        sp_published *p = &all[peer];
        if (peer == c->rank)
            continue;
        SP_TRY(store_get(store, c, "address", peer, p->blob, sizeof p->blob, &p->bytes));
        SP_TRY(sp_published_check(c, peer, p));
    }
    return SPCCL_OK;
}

/* What all ranks decide alike from what all published: whether they have the same profile for this group, and whether any
 * forces a format. The hosts have numbers. */
static void compare_settings(sp_links *links, const sp_boot_config *c, const sp_published *all)
{
    int at = sp_profile_hash_at(links->hosts != NULL ? links->hosts->n_hosts : 1, c->world_size);
    links->any_forces = c->forces;
    for (int peer = c->world_size - 1; peer >= 0; peer--) {
        if (peer == c->rank)
            continue;
        links->any_forces |= sp_load_le32(all[peer].blob + SP_BOOT_FORCED_AT);
        if (sp_load_le64(all[peer].blob + SP_BOOT_PROFILE_AT + 8 * at) != c->profile_hashes[at])
            links->other_profile = peer;
    }
}

/* Read what the peers published, number the hosts, and connect. */
static spccl_status meet_peers(sp_links *links, const spccl_store *store, const sp_boot_config *c)
{
    sp_published *all = sp_calloc((size_t)c->world_size, sizeof *all);
    spccl_status st;
    if (all == NULL)
        return SP_FAIL(SPCCL_ERR_NOMEM, "addresses of %d ranks", c->world_size);
    st = read_peers(store, c, all);
    if (st == SPCCL_OK)
        st = number_hosts(links, all);
    if (st == SPCCL_OK)
        compare_settings(links, c, all);
    if (st == SPCCL_OK)
        st = sp_boot_connect(links, c, all);
    sp_free(all);
    return st;
}

static spccl_status open_links(sp_links *links, const spccl_store *store, const sp_boot_config *c)
{
    spccl_status st;
    links->rank = c->rank;
    links->world_size = c->world_size;
    links->message_max = SIZE_MAX;
    links->other_profile = -1;
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
    return meet_peers(links, store, c);
}

spccl_status sp_links_open(sp_links *links, const spccl_store *store, const sp_boot_config *c)
{
    spccl_status st = open_links(links, store, c);
    sp_wipe_stack();
    return st;
}
