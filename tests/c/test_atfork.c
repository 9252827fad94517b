/* test_atfork.c - pthread_atfork fails: whatever needs a handler of fork fails with a text that says so. */
#include "fake_gpu.h"

#include "ranks.h"

#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <sys/wait.h>
#include <unistd.h>

#define CHILD_S 60 /* SIGALRM ends a child that hangs */

static atomic_int n_calls, failing_call = -1; /* of pthread_atfork; -1: none fails */

/* Takes the place of glibc's in this program. Registers nothing: no case forks after it made a group. */
int pthread_atfork(void (*prepare)(void), void (*parent)(void), void (*child)(void))
{
    (void)prepare;
    (void)parent;
    (void)child;
    return atomic_fetch_add(&n_calls, 1) == atomic_load(&failing_call) ? ENOMEM : 0;
}

static void attach_gpu(struct rank_ctx *c)
{
    spccl_cuda_config config = SPCCL_CUDA_CONFIG_INIT;
    config.device = c->rank;
    c->created = spccl_cuda_attach(c->comm, &config);
    if (c->created != SPCCL_OK)
        snprintf(c->error, sizeof c->error, "%s", spccl_last_error());
}

static void nothing(struct rank_ctx *c)
{
    (void)c;
}

/* The rank whose pthread_atfork fails gets NOMEM, and its peer the same, or PEER with that rank's reason. */
static spccl_status make_group(const char *transport, void (*fn)(struct rank_ctx *))
{
    struct rank_ctx ctx[2];
    spccl_config config = SPCCL_CONFIG_INIT;
    spccl_status st = SPCCL_OK;
    bool told = false;
    config.transports = transport;
    config.timeout_ms = CHILD_S * 500;
    run_ranks(2, &config, fn, NULL, ctx);
    for (int r = 0; r < 2; r++)
        if (ctx[r].created != SPCCL_OK) {
            bool peer = ctx[r].created == SPCCL_ERR_PEER && strstr(ctx[r].error, "cannot join") != NULL;
            CHECK((peer || ctx[r].created == SPCCL_ERR_NOMEM) &&
                      strstr(ctx[r].error, "pthread_atfork") != NULL &&
                      strstr(ctx[r].error, "start the process again") != NULL,
                  "rank %d: %s: %s", r, spccl_status_name(ctx[r].created), ctx[r].error);
            told = told || peer;
            st = st == SPCCL_ERR_NOMEM ? st : ctx[r].created;
        }
    CHECK(!told || st == SPCCL_ERR_NOMEM, "a rank was told of a failure that no rank had");
    return st;
}

static spccl_status make_inproc(void)
{
    return make_group("inproc", nothing);
}
static spccl_status make_shm(void)
{
    return make_group("shm", nothing);
}
static spccl_status make_tcp(void)
{
    return make_group("tcp", nothing);
}
static spccl_status make_gpu(void)
{
    return make_group("inproc", attach_gpu);
}
static spccl_status make_unique_id(void)
{
    spccl_unique_id id;
    spccl_status st = spccl_get_unique_id(&id);
    CHECK(st == SPCCL_OK || strstr(spccl_last_error(), "pthread_atfork") != NULL, "%s", spccl_last_error());
    return st;
}

/* Let each call of pthread_atfork fail in turn, each in a process of its own, until no call is left.
 * n_handlers: how many calls there are. */
static void each_fails(spccl_status (*make)(void), int n_handlers)
{
    for (int i = 0; i <= n_handlers; i++) {
        int status = 0;
        pid_t child;
        fflush(stdout);
        child = fork();
        if (child == 0) {
            bool failed;
            alarm(CHILD_S);
            atomic_store(&n_calls, 0);
            atomic_store(&failing_call, i);
            failed = make() != SPCCL_OK;
            CHECK(failed == (i < n_handlers), "call %d of %d: %s", i, atomic_load(&n_calls),
                  spccl_last_error());
            CHECK(failed || atomic_load(&n_calls) == n_handlers, "%d calls", atomic_load(&n_calls));
            _exit(test_n_failed != 0);
        }
        CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0,
              "call %d: %x", i, (unsigned)status);
    }
}

static void test_inproc(void)
{
    each_fails(make_inproc, 2);
}
static void test_shm(void)
{
    each_fails(make_shm, 2);
}
static void test_tcp(void)
{
    each_fails(make_tcp, 2);
}
static void test_gpu(void)
{
    each_fails(make_gpu, 3);
}
static void test_unique_id(void)
{
    each_fails(make_unique_id, 1);
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {
        {"inproc", test_inproc},       {"shm", test_shm}, {"tcp", test_tcp}, {"gpu", test_gpu},
        {"unique_id", test_unique_id}, {NULL, NULL}};
    setenv("SPCCL_LOG", "off", 1);
    return test_main(cases, argc, argv);
}
