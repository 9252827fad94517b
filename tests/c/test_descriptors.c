/* test_descriptors.c - a process may not open enough file descriptors: the error text names the limit, and
 * how to raise it. A shortage that ends soon does not end a start-up. */
#include "ranks.h"
#include "transport/common/acceptor.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <stdbool.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

/* A rank that waits for a connection does not notice if its peer fails before it connects. */
#define TIMEOUT_MS 5000
#define MORE_MAX 64 /* descriptors that a group of two ranks never needs */

static void nothing(struct rank_ctx *c)
{
    (void)c;
}

/* Set the limit so that this process may open `more` descriptors more. */
static void allow(int more)
{
    struct rlimit limit;
    int at = 0;
    for (int n = 0; n <= more; at++)
        n += fcntl(at, F_GETFD) < 0;
    getrlimit(RLIMIT_NOFILE, &limit);
    limit.rlim_cur = (rlim_t)(at - 1);
    CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0, "setrlimit");
}

static bool explains(const char *text)
{
    return strstr(text, "open") != NULL && strstr(text, "ulimit -n") != NULL;
}

/* Make a group of two in a process that may open `more` descriptors. Exit status: 0 if the group works, 2 if
 * it fails with the reason in the text. */
static void try_group(const char *transport, int more)
{
    struct rank_ctx ctx[2];
    spccl_config config = SPCCL_CONFIG_INIT;
    bool failed = false, explained = false;
    test_n_failed = 0;
    allow(more);
    config.timeout_ms = TIMEOUT_MS;
    config.transports = transport;
    run_ranks(2, &config, nothing, NULL, ctx);
    for (int r = 0; r < 2; r++) {
        failed = failed || ctx[r].created != SPCCL_OK;
        explained = explained || explains(ctx[r].error);
    }
    CHECK(!failed || explained, "%s with %d descriptors: rank 0: %d \"%s\"; rank 1: %d \"%s\"", transport,
          more, (int)ctx[0].created, ctx[0].error, (int)ctx[1].created, ctx[1].error);
    _exit(test_n_failed != 0 ? 1 : failed ? 2 : 0);
}

static void every_limit(const char *transport)
{
    int n_failed = 0, status = 0, more = 0;
    for (; more < MORE_MAX; more++) {
        pid_t child;
        fflush(stdout);
        child = fork();
        if (child == 0)
            try_group(transport, more);
        CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) != 1,
              "%s with %d descriptors: %x", transport, more, (unsigned)status);
        if (WIFEXITED(status) && WEXITSTATUS(status) == 0)
            break;
        n_failed++;
    }
    CHECK(n_failed >= 3 && more < MORE_MAX, "%s: %d limits were too low", transport, n_failed);
}

static void test_inproc(void)
{
    every_limit("inproc");
}
static void test_shm(void)
{
    every_limit("shm");
}
static void test_tcp(void)
{
    every_limit("tcp");
}
static void test_all(void)
{
    every_limit("shm,tcp");
}

static void test_unique_id(void)
{
    struct rlimit limit;
    spccl_unique_id id;
    getrlimit(RLIMIT_NOFILE, &limit);
    allow(0);
    CHECK(spccl_get_unique_id(&id) == SPCCL_ERR_SYSTEM && explains(spccl_last_error()), "%s",
          spccl_last_error());
    CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0, "setrlimit");
}

static spccl_status no_connection(void *ctx, int fd, const sp_hs_hello *hello)
{
    (void)ctx;
    (void)hello;
    close(fd);
    return SPCCL_OK;
}

/* A connection comes while there is no descriptor for it. It is accepted once there is one. A shortage of 3 s is an
 * error, but silent connections have lost their descriptors: the rendezvous goes on after the error. A shortage ends when
 * there are descriptors again, also if no connection comes then. */
static void test_short_for_a_moment(void)
{
    static const uint8_t secret[SP_HS_SECRET_BYTES];
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t bytes = sizeof at;
    struct rlimit limit;
    sp_acceptor_config config = {.rank = 0, .secret = secret, .tcp = true, .ready = no_connection};
    sp_acceptor a;
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0), client = socket(AF_INET, SOCK_STREAM, 0);
    int second = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(bind(listener, (struct sockaddr *)&at, bytes) == 0 && listen(listener, 4) == 0 &&
              getsockname(listener, (struct sockaddr *)&at, &bytes) == 0 &&
              connect(client, (struct sockaddr *)&at, bytes) == 0,
          "errno %d", errno);
    CHECK_OK(sp_acceptor_init(&a, listener, &config));
    getrlimit(RLIMIT_NOFILE, &limit);
    allow(0);
    CHECK_OK(sp_acceptor_step(&a));
    CHECK(a.n_pending == 0 && explains(spccl_last_error()), "%d: %s", a.n_pending, spccl_last_error());
    CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0, "setrlimit");
    CHECK_OK(sp_acceptor_step(&a));
    CHECK(a.n_pending == 1, "%d connections", a.n_pending);
    a.short_since_ns = a.pending[0].since_ns = 1; /* both long ago */
    CHECK(connect(second, (struct sockaddr *)&at, bytes) == 0, "errno %d", errno);
    allow(0);
    CHECK(sp_acceptor_step(&a) == SPCCL_ERR_SYSTEM && explains(spccl_last_error()), "%s", spccl_last_error());
    CHECK(a.n_pending == 0, "the silent connection still holds a descriptor");
    CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0, "setrlimit");
    CHECK_OK(sp_acceptor_step(&a));
    CHECK(a.n_pending == 1, "%d connections", a.n_pending);
    allow(0);
    CHECK_OK(sp_acceptor_step(&a));
    a.short_since_ns -= 4 * INT64_C(1000000000); /* it began 4 s ago */
    CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0, "setrlimit");
    CHECK_OK(sp_acceptor_step(&a));
    allow(0);
    CHECK_OK(sp_acceptor_step(&a));
    CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0, "setrlimit");
    sp_acceptor_close(&a);
    close(client);
    close(second);
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {{"inproc", test_inproc},
                                             {"shm", test_shm},
                                             {"tcp", test_tcp},
                                             {"all", test_all},
                                             {"unique_id", test_unique_id},
                                             {"short_for_a_moment", test_short_for_a_moment},
                                             {NULL, NULL}};
    setenv("SPCCL_LOG", "off", 0);
    return test_main(cases, argc, argv);
}
