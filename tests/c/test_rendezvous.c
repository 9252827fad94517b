/* test_rendezvous.c - the key-value server behind unique ids: keys in any order, time-outs, wrong secrets,
 * damaged ids, several addresses, unproven connections, many clients at once. */
#include "core/contract/rendezvous.h"
#include "test.h"
#include "transport/start/rendezvous_wire.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <pthread.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static void refresh_checksum(spccl_unique_id *id)
{
    sp_store_le32(id->bytes + SP_RDV_CHECKSUM_AT, sp_rdv_checksum(id->bytes));
}

static void set_and_get(const char *listen_addr)
{
    spccl_unique_id id;
    spccl_store a, b;
    uint8_t secret[2][SP_SECRET_BYTES], big[60000], out[60000];
    size_t n = 0;
    CHECK_OK(sp_rendezvous_start(listen_addr, 600000, &id));
    CHECK_OK(sp_rendezvous_connect(&id, 5000, &a, secret[0]));
    CHECK_OK(sp_rendezvous_connect(&id, 5000, &b, secret[1]));
    CHECK(memcmp(secret[0], secret[1], SP_SECRET_BYTES) == 0, "two secrets");
    for (size_t i = 0; i < sizeof big; i++)
        big[i] = (uint8_t)test_rand();
    CHECK_OK(a.set(a.ctx, "k", big, sizeof big));
    CHECK_OK(a.set(a.ctx, "empty", big, 0));
    CHECK_OK(b.get(b.ctx, "k", out, sizeof out, 1000, &n));
    CHECK(n == sizeof big && memcmp(big, out, n) == 0, "%zu bytes came back", n);
    CHECK_OK(b.get(b.ctx, "k", out, 7, 1000, &n)); /* the value is cut, and the connection stays usable */
    CHECK_OK(b.get(b.ctx, "empty", out, sizeof out, 1000, &n));
    CHECK(n == 0, "%zu bytes of nothing", n);
    CHECK_OK(b.set(b.ctx, "k", "new", 3));
    CHECK_OK(a.get(a.ctx, "k", out, sizeof out, 1000, &n));
    CHECK(n == 3 && memcmp(out, "new", 3) == 0, "%zu bytes, wanted the new value", n);
    CHECK(a.set(a.ctx, "", "x", 1) == SPCCL_ERR_ARG, "an empty key");
    sp_rendezvous_disconnect(&a);
    sp_rendezvous_disconnect(&b);
    CHECK(a.ctx == NULL, "not cleared");
    sp_rendezvous_disconnect(&a); /* the second call does nothing */
}

static void test_set_and_get(void)
{
    set_and_get("127.0.0.1");
    set_and_get("::1");
}

static void test_timeout(void)
{
    spccl_unique_id id;
    spccl_store s;
    uint8_t secret[SP_SECRET_BYTES], out[8];
    size_t n;
    int64_t start = now_ms();
    CHECK_OK(sp_rendezvous_start("127.0.0.1", 600000, &id));
    CHECK_OK(sp_rendezvous_connect(&id, 5000, &s, secret));
    CHECK(s.get(s.ctx, "nobody sets it", out, sizeof out, 200, &n) == SPCCL_ERR_TIMEOUT,
          "a key that is not there");
    CHECK(now_ms() - start >= 190 && now_ms() - start < 30000, "%lld ms", (long long)(now_ms() - start));
    CHECK(strstr(spccl_last_error(), "nobody sets it") != NULL &&
              strstr(spccl_last_error(), "127.0.0.1:") != NULL,
          "\"%s\"", spccl_last_error());
    CHECK_OK(s.set(s.ctx, "x", "y", 1)); /* the connection is still usable */
    sp_rendezvous_disconnect(&s);
}

static void test_bad_ids(void)
{
    spccl_unique_id id, bad;
    spccl_store s;
    uint8_t secret[SP_SECRET_BYTES];
    CHECK(sp_rendezvous_start("nowhere", 600000, &id) == SPCCL_ERR_SETTING, "an address");
    CHECK(strstr(spccl_last_error(), "nowhere") != NULL, "\"%s\"", spccl_last_error());
    CHECK(sp_rendezvous_start("203.0.113.7", 600000, &id) == SPCCL_ERR_SETTING,
          "not an address of this host");
    CHECK_OK(sp_rendezvous_start("127.0.0.1", 600000, &id));
    for (int i = 0; i < 128; i += 3) {
        bad = id;
        bad.bytes[i] = (char)(bad.bytes[i] ^ 0x10);
        CHECK(sp_rendezvous_connect(&bad, 1000, &s, secret) == SPCCL_ERR_ARG, "byte %d flipped", i);
    }
    bad = id;
    bad.bytes[4] = 99;
    refresh_checksum(&bad);
    CHECK(sp_rendezvous_connect(&bad, 1000, &s, secret) == SPCCL_ERR_VERSION, "version 99");
    bad = id;
    bad.bytes[SP_RDV_SECRET_AT] ^= 1;
    refresh_checksum(&bad);
    CHECK(sp_rendezvous_connect(&bad, 2000, &s, secret) == SPCCL_ERR_AUTH, "%s", spccl_last_error());
    bad = id;
    bad.bytes[SP_RDV_NAME_AT] ^= 1;
    refresh_checksum(&bad);
    CHECK(sp_rendezvous_connect(&bad, 2000, &s, secret) == SPCCL_ERR_PEER, "%s", spccl_last_error());
    bad = id;
    sp_store_le16(bad.bytes + 8, 1); /* a port on which nobody listens */
    refresh_checksum(&bad);
    CHECK(sp_rendezvous_connect(&bad, 2000, &s, secret) == SPCCL_ERR_PEER, "%s", spccl_last_error());
    CHECK(strstr(spccl_last_error(), "127.0.0.1:1") != NULL, "\"%s\"", spccl_last_error());
}

/* Each address of an id, as text. Returns their number. */
static int list_ips(const spccl_unique_id *id, char out[][INET6_ADDRSTRLEN])
{
    const char *at = id->bytes + SP_RDV_IPS_AT;
    int n = 0;
    for (; n < id->bytes[10]; n++) {
        CHECK(inet_ntop(*at == 4 ? AF_INET : AF_INET6, at + 1, out[n], INET6_ADDRSTRLEN) != NULL, "entry %d",
              n);
        at += *at == 4 ? 5 : 17;
    }
    return n;
}

/* By default the server listens on every address of this host. The id has them, and loopback last. */
static void test_all_addresses(void)
{
    char ips[SP_RDV_CHECKSUM_AT][INET6_ADDRSTRLEN];
    spccl_unique_id id, one;
    spccl_store s;
    uint8_t secret[SP_SECRET_BYTES];
    int n;
    CHECK_OK(sp_rendezvous_start("", 600000, &id));
    n = list_ips(&id, ips);
    CHECK(n >= 1 && strcmp(ips[n - 1], "127.0.0.1") == 0, "%d addresses, the last is %s", n, ips[n - 1]);
    for (int i = 0; i < n; i++) {
        size_t used = SP_RDV_IPS_AT;
        for (int k = 0; k < i; k++)
            used += id.bytes[used] == 4 ? 5 : 17;
        one = id;
        one.bytes[10] = 1;
        memmove(one.bytes + SP_RDV_IPS_AT, id.bytes + used, SP_RDV_CHECKSUM_AT - used);
        refresh_checksum(&one);
        CHECK(sp_rendezvous_connect(&one, 5000, &s, secret) == SPCCL_OK, "at %s: %s", ips[i],
              spccl_last_error());
        sp_rendezvous_disconnect(&s);
    }
}

/* The server does not listen on the id's first address: the second is taken, and an error names both. */
static void test_next_address(void)
{
    static const char entries[] = {4, 127, 0, 0, 2, 4, 127, 0, 0, 1};
    spccl_unique_id id;
    spccl_store s;
    uint8_t secret[SP_SECRET_BYTES], out[8];
    size_t n;
    CHECK_OK(sp_rendezvous_start("127.0.0.1", 600000, &id));
    id.bytes[10] = 2;
    memcpy(id.bytes + SP_RDV_IPS_AT, entries, sizeof entries);
    refresh_checksum(&id);
    CHECK_OK(sp_rendezvous_connect(&id, 5000, &s, secret));
    CHECK(s.get(s.ctx, "k", out, sizeof out, 1, &n) == SPCCL_ERR_TIMEOUT, "nobody set it");
    CHECK(sp_rendezvous_explain(&s, SPCCL_ERR_TIMEOUT) == SPCCL_ERR_TIMEOUT &&
              strstr(spccl_last_error(), "127.0.0.2:") != NULL &&
              strstr(spccl_last_error(), "firewall") != NULL,
          "\"%s\"", spccl_last_error());
    sp_rendezvous_disconnect(&s);
    sp_store_le16(id.bytes + 8, 1);
    refresh_checksum(&id);
    CHECK(sp_rendezvous_connect(&id, 5000, &s, secret) == SPCCL_ERR_PEER, "nobody listens");
    CHECK(strstr(spccl_last_error(), "127.0.0.2:1: ") != NULL &&
              strstr(spccl_last_error(), "127.0.0.1:1: ") != NULL,
          "\"%s\"", spccl_last_error());
    id.bytes[SP_RDV_IPS_AT] = 5;
    refresh_checksum(&id);
    CHECK(sp_rendezvous_connect(&id, 5000, &s, secret) == SPCCL_ERR_ARG, "family 5");
    memset(id.bytes + SP_RDV_IPS_AT, 6, SP_RDV_CHECKSUM_AT - SP_RDV_IPS_AT);
    for (int k = 0; k < 4; k++) { /* three addresses of IPv6 fit */
        id.bytes[10] = (char)"\0\x04\x80\xff"[k];
        refresh_checksum(&id);
        CHECK(sp_rendezvous_connect(&id, 5000, &s, secret) == SPCCL_ERR_ARG, "%d addresses", id.bytes[10]);
    }
}

/* The process that made the id is killed, but its child lives on with copies of its descriptors. A client
 * that waits and a client that connects later must get an error, not a time-out. */
static void test_forked(void)
{
    spccl_unique_id id = {{0}};
    spccl_store s, late;
    uint8_t secret[SP_SECRET_BYTES];
    char value[8];
    size_t n;
    int64_t start;
    int from[2], stop[2];
    pid_t server;
    CHECK(pipe(from) == 0 && pipe(stop) == 0, "pipe");
    fflush(stdout);
    if ((server = fork()) == 0) {
        close(stop[1]);
        if (sp_rendezvous_start("127.0.0.1", 600000, &id) != SPCCL_OK ||
            write(from[1], &id, sizeof id) != sizeof id ||
            read(stop[0], value, 1) != 1) /* until the client below is connected */
            _exit(1);
        if (fork() == 0) {
            ssize_t got = write(from[1], "c", 1);
            while ((got = read(stop[0], value, 1)) > 0) /* until the test ends */
                continue;
            _exit(got != 0);
        }
        for (;;)
            pause();
    }
    close(stop[0]);
    CHECK(read(from[0], &id, sizeof id) == sizeof id, "the server did not start");
    CHECK_OK(sp_rendezvous_connect(&id, 5000, &s, secret));
    CHECK_OK(s.set(s.ctx, "k", "v", 1));
    CHECK(write(stop[1], "x", 1) == 1 && read(from[0], value, 1) == 1, "the child does not live");
    CHECK_OK(s.get(s.ctx, "k", value, sizeof value, 5000, &n)); /* the parent still serves */
    kill(server, SIGKILL);
    CHECK(waitpid(server, NULL, 0) == server, "waitpid");
    start = now_ms();
    CHECK(s.get(s.ctx, "later", value, sizeof value, 60000, &n) == SPCCL_ERR_PEER, "%s", spccl_last_error());
    CHECK(sp_rendezvous_connect(&id, 60000, &late, secret) == SPCCL_ERR_PEER, "%s", spccl_last_error());
    CHECK(now_ms() - start < 30000, "the error came after %lld ms", (long long)(now_ms() - start));
    sp_rendezvous_disconnect(&s);
    close(stop[1]); /* the child ends */
    close(from[0]);
    close(from[1]);
}

static int connect_raw(const spccl_unique_id *id)
{
    struct sockaddr_in in = {.sin_family = AF_INET, .sin_port = htons(sp_load_le16(id->bytes + 8))};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    in.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    CHECK(connect(fd, (const struct sockaddr *)&in, sizeof in) == 0, "connect: errno %d", errno);
    return fd;
}

/* More unproven connections than the server keeps, silent and noisy: real clients still connect. */
static void test_unproven_connections(void)
{
    enum { N = 100 };
    spccl_unique_id id;
    spccl_store s;
    uint8_t secret[SP_SECRET_BYTES];
    int fds[N];
    int64_t start = now_ms();
    CHECK_OK(sp_rendezvous_start("127.0.0.1", 600000, &id));
    for (int i = 0; i < N; i++) {
        fds[i] = connect_raw(&id);
        if (i % 2 == 1)
            CHECK(send(fds[i], "GET / HTTP/1.1\r\n\r\n", 18, MSG_NOSIGNAL) == 18, "noise");
    }
    CHECK_OK(sp_rendezvous_connect(&id, 20000, &s, secret));
    CHECK_OK(s.set(s.ctx, "x", "y", 1));
    CHECK(now_ms() - start < 10000, "%lld ms", (long long)(now_ms() - start));
    sp_rendezvous_disconnect(&s);
    for (int i = 0; i < N; i++)
        close(fds[i]);
}

#define N_CLIENTS 24
struct client {
    const spccl_unique_id *id;
    int rank;
    pthread_t thread;
};

/* Each client sets its key and gets the keys of all. A get waits until the key is set. */
static void *run_client(void *arg)
{
    struct client *c = arg;
    uint8_t secret[SP_SECRET_BYTES];
    spccl_store s;
    char key[32];
    int value;
    size_t n;
    if (sp_rendezvous_connect(c->id, 10000, &s, secret) != SPCCL_OK) {
        CHECK(false, "client %d: %s", c->rank, spccl_last_error());
        return NULL;
    }
    snprintf(key, sizeof key, "k%d", c->rank);
    CHECK_OK(s.set(s.ctx, key, &c->rank, sizeof c->rank));
    for (int i = 0; i < N_CLIENTS; i++) {
        int k = (c->rank + i) % N_CLIENTS;
        snprintf(key, sizeof key, "k%d", k);
        CHECK_OK(s.get(s.ctx, key, &value, sizeof value, 10000, &n));
        CHECK(n == sizeof value && value == k, "key %d holds %d", k, value);
    }
    sp_rendezvous_disconnect(&s);
    return NULL;
}

static void test_many_clients(void)
{
    spccl_unique_id id;
    struct client c[N_CLIENTS];
    CHECK_OK(sp_rendezvous_start("127.0.0.1", 600000, &id));
    for (int i = 0; i < N_CLIENTS; i++) {
        c[i] = (struct client){.id = &id, .rank = i};
        CHECK(pthread_create(&c[i].thread, NULL, run_client, &c[i]) == 0, "thread");
    }
    for (int i = 0; i < N_CLIENTS; i++)
        pthread_join(c[i].thread, NULL);
}

static void *run_rank(void *arg)
{
    const struct client *c = arg;
    spccl_config config = SPCCL_CONFIG_INIT;
    spccl_comm *comm = NULL;
    const char *ip = "";
    float x = (float)(c->rank + 1);
    config.timeout_ms = 20000;
    CHECK_OK(spccl_comm_init_rank(c->id, c->rank, 3, &config, &comm));
    if (comm == NULL)
        return NULL;
    CHECK_OK(spccl_comm_local_ip(comm, &ip));
    CHECK(strcmp(ip, "127.0.0.1") == 0, "%s, and all ranks are on this host", ip);
    CHECK_OK(spccl_all_reduce(comm, &x, &x, 1, SPCCL_FLOAT32, SPCCL_SUM, NULL));
    CHECK(x == 6, "%f", (double)x);
    CHECK_OK(spccl_comm_destroy(comm));
    return NULL;
}

static void test_group(void)
{
    spccl_unique_id id;
    struct client c[3];
    CHECK(spccl_get_unique_id(NULL) == SPCCL_ERR_ARG, "NULL");
    CHECK_OK(spccl_get_unique_id(&id));
    for (int i = 0; i < 3; i++) {
        c[i] = (struct client){.id = &id, .rank = i};
        CHECK(pthread_create(&c[i].thread, NULL, run_rank, &c[i]) == 0, "thread");
    }
    for (int i = 0; i < 3; i++)
        pthread_join(c[i].thread, NULL);
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {
        {"forked", test_forked}, /* first: it forks, and the others start threads */
        {"set_and_get", test_set_and_get},
        {"timeout", test_timeout},
        {"bad_ids", test_bad_ids},
        {"all_addresses", test_all_addresses},
        {"next_address", test_next_address},
        {"unproven_connections", test_unproven_connections},
        {"many_clients", test_many_clients},
        {"group", test_group},
        {NULL, NULL},
    };
    return test_main(cases, argc, argv);
}
