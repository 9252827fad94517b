/* rendezvous_server.c - the key-value server behind spccl_unique_id. See rendezvous.h; rendezvous_wire.h has
 * the bytes. One thread serves all clients. It ends when the group has formed, or when no client was
 * connected for a time. The number of clients and the stored bytes are limited. */
#include "core/base/clock.h"
#include "core/base/mem.h"
#include "core/base/status.h"
#include "core/base/thread.h"
#include "core/contract/rendezvous.h"
#include "transport/common/acceptor.h"
#include "transport/common/auth.h"
#include "transport/common/forks.h"
#include "transport/common/ip.h"
#include "transport/start/rendezvous_wire.h"

#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define STORE_MAX ((size_t)64 << 20)
#define CLIENTS_MAX 4096

struct entry {
    struct entry *next;
    size_t bytes;
    uint8_t *data;
    char key[SP_RDV_KEY_MAX + 1];
};

enum client_state { READ_HEAD, READ_BODY, WAIT_KEY, WRITE_REPLY };

struct client {
    int fd;
    enum client_state state;
    size_t done, want;
    int64_t deadline_ns;
    uint8_t head[SP_RDV_REQUEST_BYTES];
    uint8_t *body; /* key, then data; or the reply */
    char key[SP_RDV_KEY_MAX + 1];
};

struct server {
    sp_acceptor acceptor;
    uint8_t id[SP_HS_ID_BYTES], secret[SP_SECRET_BYTES];
    struct entry *entries;
    size_t stored_bytes;
    uint64_t n_sets; /* requests of op set, ever */
    struct client *clients;
    struct pollfd *polls; /* [CLIENTS_MAX + SP_ACCEPTOR_PENDING + 1] */
    int n_clients;
    int64_t idle_ns;             /* the server ends when no client was connected for this time */
    int64_t used_ns;             /* when a client was last connected */
    uint32_t n_done, world_size; /* ranks that have joined, of this many; world_size 0: not known yet */
    sp_fork_guard guard;
};

/* ---- server ---- */

static spccl_status check_hello(void *ctx, const sp_hs_hello *h)
{
    const struct server *s = ctx;
    if (h->kind != SP_HS_RENDEZVOUS || memcmp(h->to_id, s->id, sizeof s->id) != 0)
        return SP_FAIL(SPCCL_ERR_PEER, "this rendezvous belongs to another unique id");
    if (s->n_clients == CLIENTS_MAX)
        return SP_FAIL(SPCCL_ERR_PEER, "this rendezvous serves %d clients already", CLIENTS_MAX);
    return SPCCL_OK;
}

static spccl_status take_client(void *ctx, int fd, const sp_hs_hello *hello)
{
    struct server *s = ctx;
    (void)hello;
    s->clients[s->n_clients++] = (struct client){.fd = fd, .want = SP_RDV_REQUEST_BYTES};
    return SPCCL_OK;
}

static struct entry *find_entry(const struct server *s, const char *key)
{
    for (struct entry *e = s->entries; e != NULL; e = e->next)
        if (strcmp(e->key, key) == 0)
            return e;
    return NULL;
}

/* Set a key. Errors: NOMEM (the store is full). */
static spccl_status put_entry(struct server *s, const char *key, const uint8_t *data, size_t bytes)
{
    struct entry *e = find_entry(s, key);
    uint8_t *copy = sp_calloc(bytes, 1);
    if (copy == NULL || s->stored_bytes + bytes + sizeof *e > STORE_MAX) {
        sp_free(copy);
        return SPCCL_ERR_NOMEM;
    }
    if (e == NULL) {
        e = sp_calloc(1, sizeof *e);
        if (e == NULL) {
            sp_free(copy);
            return SPCCL_ERR_NOMEM;
        }
        snprintf(e->key, sizeof e->key, "%s", key);
        e->next = s->entries;
        s->entries = e;
        s->stored_bytes += sizeof *e;
    }
    memcpy(copy, data, bytes);
    s->stored_bytes += bytes - e->bytes;
    sp_free(e->data);
    e->data = copy;
    e->bytes = bytes;
    return SPCCL_OK;
}

/* Prepare a reply. False: no memory, and the caller drops the client. */
static bool reply(struct client *c, spccl_status status, const uint8_t *data, size_t bytes)
{
    uint8_t *out = sp_calloc(SP_RDV_REPLY_BYTES + bytes, 1);
    if (out == NULL)
        return false;
    sp_store_le32(out, (uint32_t)status);
    sp_store_le32(out + 4, (uint32_t)bytes);
    if (bytes != 0)
        memcpy(out + SP_RDV_REPLY_BYTES, data, bytes);
    sp_free(c->body);
    c->body = out;
    c->done = 0;
    c->want = SP_RDV_REPLY_BYTES + bytes;
    c->state = WRITE_REPLY;
    return true;
}

static bool handle_head(struct client *c)
{
    size_t key_bytes = sp_load_le32(c->head + 4), data_bytes = sp_load_le32(c->head + 8);
    if (key_bytes == 0 || key_bytes > SP_RDV_KEY_MAX || data_bytes > SP_RDV_DATA_MAX)
        return false;
    c->body = sp_calloc(key_bytes + data_bytes, 1);
    c->done = 0;
    c->want = key_bytes + data_bytes;
    c->state = READ_BODY;
    return c->body != NULL;
}

static bool handle_request(struct server *s, struct client *c)
{
    size_t key_bytes = sp_load_le32(c->head + 4), data_bytes = sp_load_le32(c->head + 8);
    memset(c->key, 0, sizeof c->key);
    memcpy(c->key, c->body, key_bytes);
    switch (sp_load_le32(c->head)) {
    case SP_RDV_SET:
        s->n_sets++;
        return reply(c, put_entry(s, c->key, c->body + key_bytes, data_bytes), NULL, 0);
    case SP_RDV_GET:
        c->deadline_ns = sp_deadline_in_ms((int64_t)sp_load_le32(c->head + 12));
        c->state = WAIT_KEY;
        return true;
    case SP_RDV_DONE:
        if (data_bytes != 4)
            return false;
        s->world_size = sp_load_le32(c->body + key_bytes);
        s->n_done++;
        return reply(c, SPCCL_OK, NULL, 0);
    default:
        return false;
    }
}

static bool try_answer(const struct server *s, struct client *c)
{
    const struct entry *e = find_entry(s, c->key);
    if (e != NULL)
        return reply(c, SPCCL_OK, e->data, e->bytes);
    return !sp_deadline_passed(c->deadline_ns) || reply(c, SPCCL_ERR_TIMEOUT, NULL, 0);
}

/* Continue with one client until it must wait. False: the caller drops it. */
static bool step_client(struct server *s, struct client *c)
{
    for (;;) {
        spccl_status st = SPCCL_OK;
        if (c->state == READ_HEAD)
            st = sp_sock_read(c->fd, c->head, c->want, &c->done);
        else if (c->state == READ_BODY)
            st = sp_sock_read(c->fd, c->body, c->want, &c->done);
        else if (c->state == WRITE_REPLY)
            st = sp_sock_write(c->fd, c->body, c->want, &c->done);
        if (st != SPCCL_OK)
            return st == SPCCL_AGAIN;
        switch (c->state) {
        case READ_HEAD:
            if (!handle_head(c))
                return false;
            break;
        case READ_BODY:
            if (!handle_request(s, c))
                return false;
            break;
        case WAIT_KEY:
            if (!try_answer(s, c))
                return false;
            if (c->state == WAIT_KEY)
                return true;
            break;
        case WRITE_REPLY:
            sp_free(c->body);
            c->body = NULL;
            c->done = 0;
            c->want = SP_RDV_REQUEST_BYTES;
            c->state = READ_HEAD;
            break;
        }
    }
}

/* Sleep until a socket is ready, a new connection comes, or the deadline of a waiting client passes. While the process
 * lacks descriptors, a connection that cannot be accepted would end each sleep at once: look again after 20 ms. */
static void wait_for_events(struct server *s)
{
    const bool is_short = s->acceptor.short_since_ns != 0;
    int n = 0, timeout_ms = is_short ? 20 : 1000;
    s->polls[n++] = (struct pollfd){.fd = s->acceptor.listen_fd, .events = is_short ? 0 : POLLIN};
    for (int i = 0; i < s->acceptor.n_pending; i++)
        s->polls[n++] = (struct pollfd){.fd = s->acceptor.pending[i].hs.fd, .events = POLLIN};
    for (int i = 0; i < s->n_clients; i++) {
        const struct client *c = &s->clients[i];
        s->polls[n++] = (struct pollfd){.fd = c->fd, .events = c->state == WRITE_REPLY ? POLLOUT : POLLIN};
        if (c->state == WAIT_KEY) {
            int left_ms = sp_deadline_left_ms(c->deadline_ns, timeout_ms);
            timeout_ms = left_ms < timeout_ms ? left_ms : timeout_ms;
        }
    }
    (void)poll(s->polls, (nfds_t)n, timeout_ms);
}

/* True if a client that waits for a key has left or sends. Such a client sends nothing, so its socket is
 * readable only at its end. If it stayed, poll would return at once for ever. */
static bool has_left(const struct client *c)
{
    uint8_t byte;
    return c->state == WAIT_KEY && recv(c->fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT) >= 0;
}

static void step_all_clients(struct server *s)
{
    uint64_t n_sets;
    do { /* again after a set, which may answer an earlier client of the loop */
        n_sets = s->n_sets;
        for (int i = 0; i < s->n_clients;) {
            struct client *c = &s->clients[i];
            if (!has_left(c) && step_client(s, c)) {
                i++;
                continue;
            }
            close(c->fd);
            sp_free(c->body);
            *c = s->clients[--s->n_clients];
        }
    } while (n_sets != s->n_sets);
}

/* A child of fork has no server thread. It closes its copies: when the parent ends, clients then get an error
 * and do not wait. */
static void close_in_child(void *owner)
{
    struct server *s = owner;
    for (int i = 0; i < s->n_clients; i++)
        close(s->clients[i].fd);
    s->n_clients = 0;
    sp_acceptor_close_descriptors(&s->acceptor);
}

static void server_free(struct server *s)
{
    sp_fork_unwatch(&s->guard);
    sp_acceptor_close(&s->acceptor);
    for (int i = 0; i < s->n_clients; i++) {
        close(s->clients[i].fd);
        sp_free(s->clients[i].body);
    }
    while (s->entries != NULL) {
        struct entry *e = s->entries;
        s->entries = e->next;
        sp_free(e->data);
        sp_free(e);
    }
    explicit_bzero(s->secret, sizeof s->secret);
    sp_free(s->clients);
    sp_free(s->polls);
    sp_free(s);
}

/* True if no client needs the server any more. */
static bool is_over(struct server *s)
{
    if (s->n_clients != 0) {
        s->used_ns = sp_now_ns();
        return false;
    }
    return (s->world_size != 0 && s->n_done >= s->world_size) || sp_now_ns() - s->used_ns > s->idle_ns;
}

static void *serve(void *arg)
{
    struct server *s = arg;
    while (!is_over(s)) {
        wait_for_events(s);
        pthread_mutex_lock(&s->guard.lock);
        (void)sp_acceptor_step(&s->acceptor); /* an error does not end the server */
        step_all_clients(s);
        pthread_mutex_unlock(&s->guard.lock);
    }
    server_free(s);
    return NULL;
}

/* ---- start ---- */

enum { OUTSIDE_IPV4, OUTSIDE_IPV6, LOOPBACK, N_CLASSES };

static int class_of(const sp_sock_address *a)
{
    return sp_ip_is_loopback(a) ? LOOPBACK : a->storage.ss_family == AF_INET ? OUTSIDE_IPV4 : OUTSIDE_IPV6;
}

static size_t id_bytes(const sp_sock_address *a)
{
    return a->storage.ss_family == AF_INET ? 5 : 17;
}

/* Write the addresses into an id. The first address of each class is always in; of the others, outside addresses
 * while there is room. */
static void write_ips(const sp_ips *ips, spccl_unique_id *out)
{
    int first[N_CLASSES] = {-1, -1, -1};
    size_t taken = 0, used = 0;
    for (int i = 0; i < ips->n; i++)
        if (first[class_of(&ips->at[i])] < 0) {
            first[class_of(&ips->at[i])] = i;
            taken += id_bytes(&ips->at[i]);
        }
    for (int i = 0; i < ips->n; i++) {
        const sp_sock_address *ip = &ips->at[i];
        char *entry = out->bytes + SP_RDV_IPS_AT + used;
        uint8_t raw[16];
        uint16_t port;
        if (first[class_of(ip)] != i) {
            if (class_of(ip) == LOOPBACK || taken + id_bytes(ip) > SP_RDV_CHECKSUM_AT - SP_RDV_IPS_AT)
                continue;
            taken += id_bytes(ip);
        }
        sp_ip_get(ip, raw, &port);
        sp_store_le16(out->bytes + 8, port);
        entry[0] = ip->storage.ss_family == AF_INET ? 4 : 6;
        memcpy(entry + 1, raw, id_bytes(ip) - 1);
        used += id_bytes(ip);
        out->bytes[10]++;
    }
}

static void write_id(const struct server *s, const sp_ips *ips, spccl_unique_id *out)
{
    memset(out, 0, sizeof *out);
    sp_store_le32(out->bytes, SP_RDV_ID_MAGIC);
    sp_store_le32(out->bytes + 4, SP_RDV_ID_VERSION);
    memcpy(out->bytes + SP_RDV_NAME_AT, s->id, sizeof s->id);
    memcpy(out->bytes + SP_RDV_SECRET_AT, s->secret, sizeof s->secret);
    write_ips(ips, out);
    sp_store_le32(out->bytes + SP_RDV_CHECKSUM_AT, sp_rdv_checksum(out->bytes));
}

spccl_status sp_rendezvous_start(const char *listen_addr, int64_t idle_ms, spccl_unique_id *out)
{
    spccl_unique_id id;
    spccl_status st = SPCCL_OK;
    sp_ips ips;
    int fd = -1;
    struct server *s;
    s = sp_calloc(1, sizeof *s);
    if (s == NULL)
        return SP_FAIL(SPCCL_ERR_NOMEM, "rendezvous: %zu bytes", sizeof *s);
    s->acceptor.listen_fd = -1;
    s->idle_ns = idle_ms < INT64_MAX / 1000000 ? idle_ms * 1000000 : INT64_MAX;
    s->used_ns = sp_now_ns();
    s->clients = sp_calloc(CLIENTS_MAX, sizeof *s->clients);
    s->polls = sp_calloc(CLIENTS_MAX + SP_ACCEPTOR_PENDING + 1, sizeof *s->polls);
    if (s->clients == NULL || s->polls == NULL) {
        st = SP_FAIL(SPCCL_ERR_NOMEM, "rendezvous: tables for %d clients", CLIENTS_MAX);
        goto fail;
    }
    SP_TRY_TO(fail, st, sp_random_bytes(s->id, sizeof s->id));
    SP_TRY_TO(fail, st, sp_random_bytes(s->secret, sizeof s->secret));
    SP_TRY_TO(fail, st, sp_ip_listen("rendezvous", "SPCCL_RENDEZVOUS_ADDR", listen_addr, &ips, &fd));
    SP_TRY_TO(fail, st,
              sp_acceptor_init(&s->acceptor, fd,
                               &(sp_acceptor_config){.rank = -1,
                                                     .secret = s->secret,
                                                     .tcp = true,
                                                     .ctx = s,
                                                     .check = check_hello,
                                                     .ready = take_client}));
    write_id(s, &ips, &id);
    SP_TRY_TO(fail, st, sp_fork_watch(&s->guard, close_in_child, s));
    SP_TRY_TO(fail, st, sp_thread_start("spccl-rdv", serve, s, NULL));
    *out = id;
fail:
    explicit_bzero(&id, sizeof id); /* it holds the secret */
    sp_wipe_stack();
    if (st != SPCCL_OK)
        server_free(s);
    return st;
}
