/* rendezvous.c - the client of the rendezvous: blocking calls with deadlines. See rendezvous.h.
 * rendezvous_wire.h has the bytes. */
#include "core/contract/rendezvous.h"

#include "core/base/clock.h"
#include "core/base/log.h"
#include "core/base/mem.h"
#include "core/base/status.h"
#include "transport/common/handshake.h"
#include "transport/common/ip.h"
#include "transport/start/rendezvous_wire.h"

#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define DONE_MS 5000

#define CONNECT_MS 1000 /* time for connect() to one address, in the first round */
#define PROVE_MS 10000  /* time for the handshake */
#define DOUBLINGS_MAX 4 /* both times double from round to round, at most this often */
#define ADDRESSES_TEXT_CAP 400

struct session {
    int fd;
    char at[SP_SOCK_TEXT_CAP];          /* the address that answered */
    char addresses[ADDRESSES_TEXT_CAP]; /* all of the id */
    bool waited_in_vain;                /* a get has timed out */
};

static spccl_status wait_fd(int fd, short events, int64_t deadline_ns)
{
    struct pollfd p = {.fd = fd, .events = events};
    while (poll(&p, 1, sp_deadline_left_ms(deadline_ns, 1000)) <= 0)
        if (sp_deadline_passed(deadline_ns))
            return SP_FAIL(SPCCL_ERR_TIMEOUT, "no answer");
    return SPCCL_OK;
}

/* buf is written only if reading. */
static spccl_status move_all(int fd, const void *buf, size_t bytes, bool reading, int64_t deadline_ns)
{
    size_t done = 0;
    for (;;) {
        spccl_status st = reading ? sp_sock_read(fd, (void *)(uintptr_t)buf, bytes, &done)
                                  : sp_sock_write(fd, buf, bytes, &done);
        if (st != SPCCL_AGAIN)
            return st;
        SP_TRY(wait_fd(fd, reading ? POLLIN : POLLOUT, deadline_ns));
    }
}

/* Put the rendezvous into the text of a failed call. */
static spccl_status at_rendezvous(const struct session *s, const char *doing, spccl_status st)
{
    if (st == SPCCL_OK)
        return st;
    return SP_FAIL(st, "rendezvous at %s: %s: %s: is the process that made the unique id alive?", s->at,
                   doing, spccl_last_error());
}

/* Send one request and read its reply. `out` gets at most cap bytes of the reply's data. */
static spccl_status call(struct session *s, uint32_t op, const char *key, const void *data, size_t bytes,
                         int64_t timeout_ms, void *out, size_t cap, size_t *out_bytes)
{
    uint8_t buf[SP_RDV_REQUEST_BYTES + SP_RDV_KEY_MAX], rest[256];
    size_t key_bytes = strlen(key), n, left;
    int64_t deadline_ns = sp_deadline_in_ms(timeout_ms < INT32_MAX - 5000 ? timeout_ms + 5000 : timeout_ms);
    if (key_bytes == 0 || key_bytes > SP_RDV_KEY_MAX || bytes > SP_RDV_DATA_MAX)
        return SP_FAIL(SPCCL_ERR_ARG, "key of %zu bytes and value of %zu: at most %u and %u", key_bytes,
                       bytes, SP_RDV_KEY_MAX, SP_RDV_DATA_MAX);
    sp_store_le32(buf, op);
    sp_store_le32(buf + 4, (uint32_t)key_bytes);
    sp_store_le32(buf + 8, (uint32_t)bytes);
    sp_store_le32(buf + 12, (uint32_t)(timeout_ms < INT32_MAX ? timeout_ms : INT32_MAX));
    memcpy(buf + SP_RDV_REQUEST_BYTES, key, key_bytes);
    SP_TRY(move_all(s->fd, buf, SP_RDV_REQUEST_BYTES + key_bytes, false, deadline_ns));
    SP_TRY(move_all(s->fd, data, bytes, false, deadline_ns));
    SP_TRY(move_all(s->fd, buf, SP_RDV_REPLY_BYTES, true, deadline_ns));
    left = sp_load_le32(buf + 4);
    n = sp_min_size(left, cap);
    SP_TRY(move_all(s->fd, out, n, true, deadline_ns));
    *out_bytes = n;
    for (left -= n; left > 0; left -= n) {
        n = sp_min_size(left, sizeof rest);
        SP_TRY(move_all(s->fd, rest, n, true, deadline_ns));
    }
    switch ((spccl_status)(int32_t)sp_load_le32(buf)) {
    case SPCCL_OK:
        return SPCCL_OK;
    case SPCCL_ERR_TIMEOUT:
        return SP_FAIL(SPCCL_ERR_TIMEOUT, "nobody set \"%s\" within %lld ms", key, (long long)timeout_ms);
    case SPCCL_ERR_NOMEM:
        return SP_FAIL(SPCCL_ERR_NOMEM, "its store is full");
    default:
        return SP_FAIL(SPCCL_ERR_PEER, "status %d", (int)(int32_t)sp_load_le32(buf));
    }
}

static spccl_status client_set(void *ctx, const char *key, const void *data, size_t bytes)
{
    struct session *s = ctx;
    uint8_t none;
    size_t n;
    return at_rendezvous(s, "set", call(s, SP_RDV_SET, key, data, bytes, 30000, &none, 0, &n));
}

static spccl_status client_get(void *ctx, const char *key, void *buf, size_t cap, int64_t timeout_ms,
                               size_t *out_bytes)
{
    struct session *s = ctx;
    spccl_status st = call(s, SP_RDV_GET, key, NULL, 0, timeout_ms, buf, cap, out_bytes);
    s->waited_in_vain = s->waited_in_vain || st == SPCCL_ERR_TIMEOUT;
    return at_rendezvous(s, "get", st);
}

void sp_rendezvous_done(const spccl_store *store, int world_size)
{
    struct session *s = store->ctx;
    uint8_t data[4], none;
    size_t n;
    spccl_status st;
    sp_store_le32(data, (uint32_t)world_size);
    st = call(s, SP_RDV_DONE, "group", data, sizeof data, DONE_MS, &none, 0, &n);
    if (st != SPCCL_OK)
        sp_log(SP_LOG_DEBUG, -1, "rendezvous at %s: the message that the group is complete failed: %s", s->at,
               spccl_last_error());
}

spccl_status sp_rendezvous_explain(const spccl_store *store, spccl_status st)
{
    const struct session *s = store->ctx;
    if (!s->waited_in_vain)
        return st;
    return SP_FAIL(
        st,
        "%s: is every rank started, each with this unique id and a number of its own? can the hosts of "
        "all ranks reach one of %s (a firewall; SPCCL_RENDEZVOUS_ADDR chooses the address)?",
        spccl_last_error(), s->addresses);
}

/* ---- connecting ---- */

static spccl_status read_id(const spccl_unique_id *id, sp_ips *to)
{
    size_t at = SP_RDV_IPS_AT;
    int n = (uint8_t)id->bytes[10];
    if (sp_load_le32(id->bytes) != SP_RDV_ID_MAGIC ||
        sp_load_le32(id->bytes + SP_RDV_CHECKSUM_AT) != sp_rdv_checksum(id->bytes))
        return SP_FAIL(SPCCL_ERR_ARG, "these 128 bytes are not a unique id, or they are damaged");
    if (sp_load_le32(id->bytes + 4) != SP_RDV_ID_VERSION)
        return SP_FAIL(SPCCL_ERR_VERSION, "unique id of version %u, this library reads %u",
                       sp_load_le32(id->bytes + 4), SP_RDV_ID_VERSION);
    for (to->n = 0; to->n < n && to->n < SP_IPS_MAX; to->n++) {
        size_t ip_bytes = id->bytes[at] == 4 ? 4 : 16;
        if ((id->bytes[at] != 4 && id->bytes[at] != 6) || at + 1 + ip_bytes > SP_RDV_CHECKSUM_AT)
            break;
        sp_ip_set(&to->at[to->n], id->bytes[at] == 4 ? AF_INET : AF_INET6, id->bytes + at + 1,
                  sp_load_le16(id->bytes + 8));
        at += 1 + ip_bytes;
    }
    if (to->n == 0 || to->n != n)
        return SP_FAIL(SPCCL_ERR_ARG, "unique id: it has %d good addresses, wanted %d: is it damaged?", to->n,
                       n);
    return SPCCL_OK;
}

static spccl_status prove(int fd, const spccl_unique_id *id, int64_t connect_ns, int64_t prove_ns)
{
    sp_hs_hello hello = {.kind = SP_HS_RENDEZVOUS};
    sp_hs hs;
    spccl_status st;
    while ((st = sp_sock_connected(fd)) == SPCCL_AGAIN)
        SP_TRY(wait_fd(fd, POLLOUT, connect_ns));
    SP_TRY(st);
    memcpy(hello.to_id, id->bytes + SP_RDV_NAME_AT, sizeof hello.to_id);
    SP_TRY(sp_hs_connect(&hs, fd, &hello, (const uint8_t *)id->bytes + SP_RDV_SECRET_AT));
    while ((st = sp_hs_step(&hs)) == SPCCL_AGAIN)
        SP_TRY(wait_fd(fd, POLLIN, prove_ns));
    return st;
}

static int64_t sooner(int64_t deadline_ns, int64_t ms)
{
    int64_t limit_ns = sp_deadline_in_ms(ms);
    return limit_ns < deadline_ns ? limit_ns : deadline_ns;
}

/* The search for an address at which the server answers. */
struct search {
    const spccl_unique_id *id;
    sp_ips ips;
    int64_t deadline_ns;
    int round;
    bool silent;      /* in this round an address did not answer, so another round can help */
    char causes[600]; /* why each address failed in this round */
};

/* Try each address once. Errors: of the address that says most: AUTH or VERSION before TIMEOUT before PEER. */
static spccl_status try_addresses(struct search *search, struct session *s)
{
    const sp_ips *ips = &search->ips;
    int times = 1 << (search->round < DOUBLINGS_MAX ? search->round : DOUBLINGS_MAX);
    spccl_status worst = SPCCL_OK;
    search->silent = false;
    search->causes[0] = '\0';
    for (int i = 0; i < ips->n; i++) {
        size_t used = strlen(search->causes);
        spccl_status st = sp_sock_connect(&ips->at[i], &s->fd);
        sp_sock_text(&ips->at[i], s->at, sizeof s->at);
        if (st == SPCCL_OK)
            st = prove(s->fd, search->id, sooner(search->deadline_ns, CONNECT_MS * times),
                       sooner(search->deadline_ns, PROVE_MS * times));
        if (st == SPCCL_OK)
            return st;
        sp_sock_close(&s->fd);
        snprintf(search->causes + used, sizeof search->causes - used, "%s%s: %.100s", i == 0 ? "" : "; ",
                 s->at, spccl_last_error());
        search->silent = search->silent || st == SPCCL_ERR_TIMEOUT;
        if (worst == SPCCL_OK || worst == SPCCL_ERR_PEER ||
            (worst == SPCCL_ERR_TIMEOUT && st != SPCCL_ERR_PEER))
            worst = st;
    }
    return worst;
}

static spccl_status connect_session(struct search *search, struct session *s)
{
    spccl_status st;
    for (int i = 0; i < search->ips.n; i++) {
        char at[SP_SOCK_TEXT_CAP];
        size_t used = strlen(s->addresses);
        sp_sock_text(&search->ips.at[i], at, sizeof at);
        snprintf(s->addresses + used, sizeof s->addresses - used, "%s%s", i == 0 ? "" : ", ", at);
    }
    for (;; search->round++) {
        st = try_addresses(search, s);
        if (st == SPCCL_OK)
            return st;
        if (!search->silent || sp_deadline_passed(search->deadline_ns))
            return SP_FAIL(
                st,
                "no rendezvous at the addresses of the unique id: %s: is the process that made the id alive? "
                "is the id new (it serves one group; unused, it ends after SPCCL_TIMEOUT_MS)? can this host "
                "reach an address (a firewall; SPCCL_RENDEZVOUS_ADDR of the process that makes the id)?",
                search->causes);
    }
}

spccl_status sp_rendezvous_connect(const spccl_unique_id *id, int64_t timeout_ms, spccl_store *out_store,
                                   uint8_t secret[SP_SECRET_BYTES])
{
    struct search search = {.id = id, .deadline_ns = sp_deadline_in_ms(timeout_ms)};
    struct session *s;
    spccl_status st;
    SP_TRY(read_id(id, &search.ips));
    s = sp_calloc(1, sizeof *s);
    if (s == NULL)
        return SP_FAIL(SPCCL_ERR_NOMEM, "rendezvous: session");
    s->fd = -1;
    st = connect_session(&search, s);
    if (st != SPCCL_OK) {
        sp_free(s);
        return st;
    }
    memcpy(secret, id->bytes + SP_RDV_SECRET_AT, SP_SECRET_BYTES);
    *out_store =
        (spccl_store){.struct_bytes = sizeof *out_store, .ctx = s, .set = client_set, .get = client_get};
    return SPCCL_OK;
}

void sp_rendezvous_disconnect(spccl_store *store)
{
    struct session *s = store->ctx;
    if (s != NULL) {
        close(s->fd);
        sp_free(s);
    }
    *store = (spccl_store){0};
}
