/* rendezvous.c - the client of the rendezvous: blocking calls with deadlines. See rendezvous.h.
 * rendezvous_wire.h has the bytes. */
#include "core/contract/rendezvous.h"

#include "core/base/clock.h"
#include "core/base/log.h"
#include "core/base/mem.h"
#include "core/base/status.h"
#include "transport/common/handshake.h"
#include "transport/start/rendezvous_wire.h"

#include <netinet/in.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define DONE_MS 5000

struct session {
    int fd;
    char at[SP_SOCK_TEXT_CAP];
};

static spccl_status wait_fd(int fd, short events, int64_t deadline_ns)
{
    struct pollfd p = {.fd = fd, .events = events};
    while (poll(&p, 1, sp_deadline_left_ms(deadline_ns, 1000)) <= 0)
        if (sp_deadline_passed(deadline_ns))
            return SP_FAIL(SPCCL_ERR_TIMEOUT, "no answer in time");
    return SPCCL_OK;
}

static spccl_status move_all(int fd, uint8_t *buf, size_t bytes, bool reading, int64_t deadline_ns)
{
    size_t done = 0;
    for (;;) {
        spccl_status st =
            reading ? sp_sock_read(fd, buf, bytes, &done) : sp_sock_write(fd, buf, bytes, &done);
        if (st != SPCCL_AGAIN)
            return st;
        SP_TRY(wait_fd(fd, reading ? POLLIN : POLLOUT, deadline_ns));
    }
}

/* Put the rendezvous into the text of a failed call. */
static spccl_status at_rendezvous(const char *at, const char *doing, spccl_status st)
{
    char cause[400];
    if (st == SPCCL_OK)
        return st;
    snprintf(cause, sizeof cause, "%s", spccl_last_error());
    return SP_FAIL(st,
                   "rendezvous at %s: %s: %s: is the process that made the unique id alive? is the id new? "
                   "(a rendezvous serves one group; unused, it ends after SPCCL_TIMEOUT_MS) can this host "
                   "reach its address "
                   "(SPCCL_RENDEZVOUS_ADDR)?",
                   at, doing, cause);
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
    if (bytes != 0) {
        uint8_t copy[1024];
        for (size_t at = 0; at < bytes; at += n) {
            n = sp_min_size(bytes - at, sizeof copy);
            memcpy(copy, (const uint8_t *)data + at, n);
            SP_TRY(move_all(s->fd, copy, n, false, deadline_ns));
        }
    }
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
    return at_rendezvous(s->at, "set", call(s, SP_RDV_SET, key, data, bytes, 30000, &none, 0, &n));
}

static spccl_status client_get(void *ctx, const char *key, void *buf, size_t cap, int64_t timeout_ms,
                               size_t *out_bytes)
{
    struct session *s = ctx;
    return at_rendezvous(s->at, "get", call(s, SP_RDV_GET, key, NULL, 0, timeout_ms, buf, cap, out_bytes));
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

static spccl_status read_id(const spccl_unique_id *id, sp_sock_address *to)
{
    struct sockaddr_in in = {.sin_family = AF_INET, .sin_port = htons(sp_load_le16(id->bytes + 8))};
    struct sockaddr_in6 in6 = {.sin6_family = AF_INET6, .sin6_port = htons(sp_load_le16(id->bytes + 8))};
    if (sp_load_le32(id->bytes) != SP_RDV_ID_MAGIC ||
        sp_load_le32(id->bytes + SP_RDV_CHECKSUM_AT) != sp_rdv_checksum(id->bytes) ||
        (id->bytes[10] != 4 && id->bytes[10] != 6))
        return SP_FAIL(SPCCL_ERR_ARG, "these 128 bytes are not a unique id, or they are damaged");
    if (sp_load_le32(id->bytes + 4) != SP_RDV_ID_VERSION)
        return SP_FAIL(SPCCL_ERR_VERSION, "unique id of version %u, this library reads %u",
                       sp_load_le32(id->bytes + 4), SP_RDV_ID_VERSION);
    memset(to, 0, sizeof *to);
    if (id->bytes[10] == 4) {
        memcpy(&in.sin_addr, id->bytes + 12, sizeof in.sin_addr);
        memcpy(&to->storage, &in, sizeof in);
        to->bytes = sizeof in;
    } else {
        memcpy(&in6.sin6_addr, id->bytes + 12, sizeof in6.sin6_addr);
        memcpy(&to->storage, &in6, sizeof in6);
        to->bytes = sizeof in6;
    }
    return SPCCL_OK;
}

static spccl_status prove(int fd, const spccl_unique_id *id, const uint8_t *secret, int64_t deadline_ns)
{
    sp_hs_hello hello = {.kind = SP_HS_RENDEZVOUS};
    sp_hs hs;
    spccl_status st;
    while ((st = sp_sock_connected(fd)) == SPCCL_AGAIN)
        SP_TRY(wait_fd(fd, POLLOUT, deadline_ns));
    SP_TRY(st);
    memcpy(hello.to_id, id->bytes + 28, sizeof hello.to_id);
    SP_TRY(sp_hs_connect(&hs, fd, &hello, secret));
    while ((st = sp_hs_step(&hs)) == SPCCL_AGAIN)
        SP_TRY(wait_fd(fd, POLLIN, deadline_ns));
    return st;
}

spccl_status sp_rendezvous_connect(const spccl_unique_id *id, int64_t timeout_ms, spccl_store *out_store,
                                   uint8_t secret[SP_SECRET_BYTES])
{
    int64_t deadline_ns = sp_deadline_in_ms(timeout_ms);
    sp_sock_address to;
    struct session *s;
    spccl_status st;
    SP_TRY(read_id(id, &to));
    s = sp_calloc(1, sizeof *s);
    if (s == NULL)
        return SP_FAIL(SPCCL_ERR_NOMEM, "rendezvous: session");
    s->fd = -1;
    sp_sock_text(&to, s->at, sizeof s->at);
    memcpy(secret, id->bytes + 44, SP_SECRET_BYTES);
    SP_TRY_TO(fail, st, sp_sock_connect(&to, &s->fd));
    SP_TRY_TO(fail, st, prove(s->fd, id, secret, deadline_ns));
    *out_store =
        (spccl_store){.struct_bytes = sizeof *out_store, .ctx = s, .set = client_set, .get = client_get};
    return SPCCL_OK;
fail:
    st = at_rendezvous(s->at, "connecting", st);
    if (s->fd >= 0)
        close(s->fd);
    sp_free(s);
    return st;
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
