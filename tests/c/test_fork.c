/* test_fork.c - a child of fork cannot use its parent's groups. Every call in the child fails at once, and
 * its text names the fork. No call changes anything in the parent or its peers. No call hangs, whatever the
 * parent's threads were doing at the fork. */
#include "fake_gpu.h"

#include "ranks.h"

#include <signal.h>
#include <stdbool.h>
#include <sys/wait.h>

#define CHILD_S 60 /* SIGALRM ends a child that hangs */
#define N 1000u

static const char *const transports[] = {"inproc", "shm", "tcp"};
static struct fake_stream streams[RANKS_CAP];

/* Shared by the ranks of one group. */
struct shared {
    const char *transport;
    atomic_bool forked; /* the child of rank 0 has ended */
    atomic_bool stop;   /* rank 0 has forked often enough */
};

/* ---- in the child ---- */

static void expect_refused(const char *call, spccl_status st)
{
    CHECK(st == SPCCL_ERR_STATE && strstr(spccl_last_error(), "child of fork") != NULL, "%s: %s: %s", call,
          spccl_status_name(st), spccl_last_error());
}
#define REFUSED(call) expect_refused(#call, call)

static void on_done(void *ctx, spccl_status st)
{
    (void)ctx;
    (void)st;
}

static void use_group(spccl_comm *comm)
{
    float in[4] = {100, 100, 100, 100}, out[4 * RANKS_CAP];
    spccl_stats stats = {.struct_bytes = sizeof stats};
    spccl_request *req = NULL;
    const char *text = NULL;
    REFUSED(spccl_all_reduce(comm, in, in, 1, SPCCL_FLOAT32, SPCCL_SUM, NULL));
    REFUSED(spccl_all_reduce(comm, in, in, 1, SPCCL_FLOAT32, SPCCL_SUM, &req));
    REFUSED(spccl_all_gather(comm, in, out, 4, SPCCL_FLOAT32, NULL));
    REFUSED(spccl_reduce_scatter(comm, out, in, 1, SPCCL_FLOAT32, SPCCL_SUM, NULL));
    REFUSED(spccl_broadcast(comm, in, 4, SPCCL_FLOAT32, 0, NULL));
    REFUSED(spccl_broadcast(comm, in, 0, SPCCL_FLOAT32, 0, NULL));
    REFUSED(spccl_comm_stats(comm, &stats));
    REFUSED(spccl_comm_describe_link(comm, 1, &text));
    REFUSED(spccl_comm_set_timeout(comm, 1000));
    REFUSED(spccl_comm_async_error(comm));
    REFUSED(spccl_comm_abort(comm, "the child says so"));
}

static void use_gpu(spccl_comm *comm)
{
    spccl_cuda_stats stats = {.struct_bytes = sizeof stats};
    void *x = fake_memory[0], *stream = &streams[0];
    REFUSED(spccl_cuda_attach(comm, NULL));
    REFUSED(spccl_cuda_all_reduce(comm, x, x, 4, SPCCL_FLOAT32, SPCCL_SUM, stream));
    REFUSED(spccl_cuda_all_gather(comm, x, fake_memory[0] + 16384, 4, SPCCL_FLOAT32, stream));
    REFUSED(spccl_cuda_reduce_scatter(comm, fake_memory[0] + 16384, x, 4, SPCCL_FLOAT32, SPCCL_SUM, stream));
    REFUSED(spccl_cuda_broadcast(comm, x, 4, SPCCL_FLOAT32, 0, stream));
    REFUSED(spccl_cuda_wait(comm, stream, 1000));
    REFUSED(spccl_cuda_get_stats(comm, &stats));
}

static void use_request(spccl_request *req)
{
    REFUSED(spccl_request_test(req));
    REFUSED(spccl_request_wait(req, -1));
    REFUSED(spccl_request_wait(req, 10));
    REFUSED(spccl_request_on_done(req, on_done, NULL));
    CHECK(strstr(spccl_request_error(req), "child of fork") != NULL, "\"%s\"", spccl_request_error(req));
    spccl_request_free(req);
}

/* In a child of fork, may malloc be called if other threads of the parent were in malloc? glibc's malloc
 * and that of the thread sanitizer allow it: fork takes their locks. That of the address sanitizer (gcc 12)
 * does not. If another thread holds one of its locks at the fork, the child waits for that lock for ever.
 * gdb showed this in both children that hung in 31 runs: calloc, SizeClassAllocator64::GetFromAllocator,
 * Mutex::Lock, FutexWait. */
#ifdef __SANITIZE_ADDRESS__
#define MALLOC_SURVIVES_FORK false
#else
#define MALLOC_SURVIVES_FORK true
#endif
static bool child_makes_group = true;

/* A child can make groups of its own. */
static void make_own_group(void)
{
    spccl_comm *comm = NULL;
    float x = 3;
    CHECK_OK(spccl_comm_create(NULL, 0, 1, NULL, &comm));
    CHECK_OK(spccl_all_reduce(comm, &x, &x, 1, SPCCL_FLOAT32, SPCCL_SUM, NULL));
    CHECK(x == 3, "%f", (double)x);
    CHECK_OK(spccl_comm_destroy(comm));
}

static void be_child(spccl_comm *comm, spccl_request *pending)
{
    alarm(CHILD_S);
    test_n_failed = 0;
    use_group(comm);
    use_gpu(comm);
    if (pending != NULL)
        use_request(pending);
    if (child_makes_group)
        make_own_group();
    CHECK_OK(spccl_comm_destroy(comm));
    _exit(test_n_failed != 0);
}

static void fork_and_use(spccl_comm *comm, spccl_request *pending, const char *transport)
{
    int status = 0;
    pid_t child = fork();
    if (child == 0)
        be_child(comm, pending);
    CHECK(child > 0 && waitpid(child, &status, 0) == child, "fork");
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "%s: the child %s (%x)", transport,
          WIFSIGNALED(status) && WTERMSIG(status) == SIGALRM ? "hangs" : "failed", (unsigned)status);
}

/* ---- in the parent ---- */

static void sum_is_right(struct rank_ctx *c)
{
    float x[N];
    for (size_t i = 0; i < N; i++)
        x[i] = (float)c->rank + 1;
    CHECK_OK(spccl_all_reduce(c->comm, x, x, N, SPCCL_FLOAT32, SPCCL_SUM, NULL));
    for (size_t i = 0; i < N; i++)
        if (x[i] != 3) {
            CHECK(x[i] == 3, "rank %d: element %zu is %f", c->rank, i, (double)x[i]);
            return;
        }
}

static void idle_group(struct rank_ctx *c)
{
    sum_is_right(c);
    if (c->rank == 0)
        fork_and_use(c->comm, NULL, ((struct shared *)c->arg)->transport);
    for (int i = 0; i < 3; i++)
        sum_is_right(c);
}

/* Rank 0 forks while one of its collectives waits for rank 1. */
static void pending_request(struct rank_ctx *c)
{
    struct shared *s = c->arg;
    spccl_request *req = NULL;
    float x = (float)c->rank + 1;
    if (c->rank == 0) {
        CHECK_OK(spccl_all_reduce(c->comm, &x, &x, 1, SPCCL_FLOAT32, SPCCL_SUM, &req));
        fork_and_use(c->comm, req, s->transport);
        atomic_store(&s->forked, true);
        CHECK_OK(spccl_request_wait(req, -1));
        spccl_request_free(req);
    } else {
        for (int i = 0; !atomic_load(&s->forked) && i < 2 * CHILD_S * 100; i++)
            sleep_ms(10);
        CHECK_OK(spccl_all_reduce(c->comm, &x, &x, 1, SPCCL_FLOAT32, SPCCL_SUM, NULL));
    }
    CHECK(x == 3, "rank %d: %f", c->rank, (double)x);
    sum_is_right(c);
}

/* A thread that takes and releases locks all the time. */
static void *ask_all_the_time(void *arg)
{
    struct rank_ctx *c = arg;
    struct shared *s = c->arg;
    spccl_stats stats = {.struct_bytes = sizeof stats};
    while (!atomic_load(&s->stop)) {
        CHECK_OK(spccl_comm_async_error(c->comm));
        CHECK_OK(spccl_comm_stats(c->comm, &stats));
    }
    return NULL;
}

static void *fork_often(void *arg)
{
    struct rank_ctx *c = arg;
    struct shared *s = c->arg;
    for (int i = 0; i < 30; i++)
        fork_and_use(c->comm, NULL, s->transport);
    atomic_store(&s->stop, true);
    return NULL;
}

/* Rank 0 forks during collectives and during calls that hold locks. */
static void busy_group(struct rank_ctx *c)
{
    struct shared *s = c->arg;
    pthread_t asks, forks;
    if (c->rank == 0) {
        CHECK(pthread_create(&asks, NULL, ask_all_the_time, c) == 0, "thread");
        CHECK(pthread_create(&forks, NULL, fork_often, c) == 0, "thread");
    }
    for (int goes_on = 1; goes_on != 0;) {
        int mine = c->rank == 0 && !atomic_load(&s->stop);
        spccl_request *req = NULL;
        CHECK_OK(spccl_all_reduce(c->comm, &mine, &mine, 1, SPCCL_INT32, SPCCL_SUM, &req));
        CHECK_OK(spccl_request_wait(req, -1));
        spccl_request_free(req);
        goes_on = mine;
        sum_is_right(c);
    }
    if (c->rank == 0) {
        pthread_join(asks, NULL);
        pthread_join(forks, NULL);
    }
}

static void gpu_group(struct rank_ctx *c)
{
    spccl_cuda_config config = SPCCL_CUDA_CONFIG_INIT;
    void *x = fake_memory[c->rank];
    config.device = c->rank;
    CHECK_OK(spccl_cuda_attach(c->comm, &config));
    CHECK_OK(spccl_cuda_all_reduce(c->comm, x, x, N, SPCCL_FLOAT32, SPCCL_SUM, &streams[c->rank]));
    CHECK_OK(spccl_cuda_wait(c->comm, &streams[c->rank], -1));
    if (c->rank == 0)
        fork_and_use(c->comm, NULL, "gpu");
    CHECK_OK(spccl_cuda_all_reduce(c->comm, x, x, N, SPCCL_FLOAT32, SPCCL_SUM, &streams[c->rank]));
    CHECK_OK(spccl_cuda_wait(c->comm, &streams[c->rank], -1));
    sum_is_right(c);
}

static void on_each(void (*fn)(struct rank_ctx *))
{
    for (size_t i = 0; i < sizeof transports / sizeof *transports; i++) {
        struct rank_ctx ctx[2];
        spccl_config config = SPCCL_CONFIG_INIT;
        struct shared shared = {.transport = transports[i]};
        config.transports = transports[i];
        config.timeout_ms = 4 * CHILD_S * 1000;
        run_ranks(2, &config, fn, &shared, ctx);
        for (int r = 0; r < 2; r++)
            CHECK(ctx[r].created == SPCCL_OK, "%s: rank %d: %s", transports[i], r, ctx[r].error);
    }
}

static void test_idle(void)
{
    on_each(idle_group);
}
static void test_pending(void)
{
    on_each(pending_request);
}
static void test_busy(void)
{
    child_makes_group = MALLOC_SURVIVES_FORK;
    on_each(busy_group);
    child_makes_group = true;
}
static void test_gpu(void)
{
    struct rank_ctx ctx[2];
    for (int i = 0; i < RANKS_CAP; i++)
        streams[i].id = (unsigned long long)i + 1;
    run_ranks(2, NULL, gpu_group, NULL, ctx);
    CHECK(fake.n_memories == 0, "%d memories are left", fake.n_memories);
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {
        {"idle", test_idle}, {"pending", test_pending}, {"busy", test_busy}, {"gpu", test_gpu}, {NULL, NULL}};
    setenv("SPCCL_LOG", "off", 1);
    return test_main(cases, argc, argv);
}
