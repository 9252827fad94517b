/* test_completion.c - when collectives end, what waiting for their end costs, and who prints that one failed.
 * A collective is done as soon as its own bytes have left this process, although later collectives still have
 * bytes to send, and although the rank sleeps when they leave. Only tcp is tested: over shm and inproc a message has
 * left as soon as it is committed, and sp_transport.flushed is always true. */
#include "captured_log.h"
#include "scene.h"

#include "core/base/clock.h"
#include "core/base/log.h"
#include "core/run/comm.h"

#include <sys/wait.h>

#define SLOW_S 60
#define FILL_MS 500
#define BIG ((size_t)64 << 20) /* bytes: far more than queues and sockets hold while nobody reads */

static atomic_bool first_done;

/* Rank 0 issues a small all-reduce and a large broadcast. Rank 1 takes part in the small one, and in the
 * large one only once rank 0 knows that the small one is done. */
static void two_in_flight(struct rank_ctx *c)
{
    uint8_t *big = calloc(BIG, 1);
    float x = (float)c->rank + 1;
    spccl_request *first = NULL, *second = NULL;
    memset(big, c->rank == 0 ? 0x5a : 0, BIG);
    if (c->rank == 0) {
        spccl_status st;
        CHECK_OK(spccl_all_reduce(c->comm, &x, &x, 1, SPCCL_FLOAT32, SPCCL_SUM, &first));
        CHECK_OK(spccl_broadcast(c->comm, big, BIG, SPCCL_UINT8, 0, &second));
        st = spccl_request_wait(first, SLOW_S * 1000 / 4);
        CHECK(st == SPCCL_OK, "%s: %s", spccl_status_name(st), spccl_last_error());
        CHECK(spccl_request_test(second) == SPCCL_AGAIN, "the second collective was not held up");
        atomic_store(&first_done, true);
        CHECK_OK(spccl_request_wait(second, -1));
        spccl_request_free(first);
        spccl_request_free(second);
    } else {
        for (int64_t start = now_ms();
             now_ms() - start < FILL_MS;) /* reads until this rank's buffers are full */
            CHECK_OK(spccl_comm_async_error(c->comm));
        CHECK_OK(spccl_all_reduce(c->comm, &x, &x, 1, SPCCL_FLOAT32, SPCCL_SUM, NULL));
        for (int i = 0; !atomic_load(&first_done) && i < SLOW_S * 100 / 2; i++)
            sleep_ms(10);
        CHECK_OK(spccl_broadcast(c->comm, big, BIG, SPCCL_UINT8, 0, NULL));
        CHECK(big[0] == 0x5a && big[BIG - 1] == 0x5a, "%x %x", big[0], big[BIG - 1]);
    }
    CHECK(x == 3, "rank %d: %f", c->rank, (double)x);
    free(big);
}

static void run_two(uint32_t n_sockets)
{
    struct rank_ctx ctx[2];
    spccl_config config = SPCCL_CONFIG_INIT;
    config.transports = "tcp";
    config.n_sockets = n_sockets;
    config.timeout_ms = SLOW_S * 1000;
    atomic_store(&first_done, false);
    run_ranks(2, &config, two_in_flight, NULL, ctx);
    for (int r = 0; r < 2; r++)
        CHECK(ctx[r].created == SPCCL_OK, "rank %d: %s", r, ctx[r].error);
}

#define LATE_MS 200  /* the receiver starts so late that the root waits for space and sleeps */
#define WOKEN_MS 500 /* a driver that misses the wake-up sleeps 1000 ms */
#define N_LATE 24    /* broadcasts of 0.5 to 12 MiB */
#define LATE_STEP ((size_t)512 << 10)

static _Atomic int64_t late_end_ms[2][N_LATE]; /* by rank */

static void late_receiver(struct rank_ctx *c)
{
    uint8_t *x = calloc(N_LATE, LATE_STEP), one = 0;
    for (size_t i = 0; i < N_LATE; i++) {
        size_t n = (i + 1) * LATE_STEP;
        CHECK_OK(spccl_all_reduce(c->comm, &one, &one, 1, SPCCL_UINT8, SPCCL_SUM, NULL));
        memset(x, c->rank == 0 ? (int)i + 1 : 0, n);
        if (c->rank == 1)
            sleep_ms(LATE_MS);
        CHECK_OK(spccl_broadcast(c->comm, x, n, SPCCL_UINT8, 0, NULL));
        atomic_store(&late_end_ms[c->rank][i], now_ms());
        CHECK(x[n - 1] == i + 1, "rank %d, %zu bytes: got %d", c->rank, n, x[n - 1]);
        /* The next collective would wake the root: rank 1 must not start it before the root is done. */
        for (int k = 0; c->rank == 1 && k < 2 * WOKEN_MS && atomic_load(&late_end_ms[0][i]) == 0; k++)
            sleep_ms(1);
    }
    free(x);
}

/* The root's last bytes leave while its driver waits. At which sizes that happens depends on the buffers of
 * the kernel, so the test runs many. */
static void test_last_bytes_wake(void)
{
    struct rank_ctx ctx[2];
    spccl_config config = SPCCL_CONFIG_INIT;
    config.transports = "tcp";
    config.timeout_ms = SLOW_S * 1000;
    run_ranks(2, &config, late_receiver, NULL, ctx);
    for (int r = 0; r < 2; r++)
        CHECK(ctx[r].created == SPCCL_OK, "rank %d: %s", r, ctx[r].error);
    for (size_t i = 0; i < N_LATE; i++) {
        int64_t after = atomic_load(&late_end_ms[0][i]) - atomic_load(&late_end_ms[1][i]);
        CHECK(after < WOKEN_MS, "%zu bytes: the root ended %lld ms after rank 1", (i + 1) * LATE_STEP,
              (long long)after);
    }
}

static void test_tcp(void)
{
    run_two(1);
    run_two(3);
}

/* ---- a thread that waits for a late rank sleeps ---- */

#define AWAY_MS 300
#define AWAKE_MS (AWAY_MS / 3) /* of CPU time. A thread that polls uses as much as it waits */

static int64_t cpu_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

static void wait_for_late_rank(struct rank_ctx *c)
{
    float x = 1;
    for (int i = 0; i < 2; i++) { /* the first wait, and one after messages have come */
        int64_t start = now_ms(), start_cpu = cpu_ms();
        if (c->rank == 1)
            sleep_ms(AWAY_MS);
        CHECK_OK(spccl_all_reduce(c->comm, &x, &x, 1, SPCCL_FLOAT32, SPCCL_SUM, NULL));
        CHECK(c->rank == 1 || cpu_ms() - start_cpu < AWAKE_MS, "%s: waited %lld ms and used %lld ms of CPU",
              c->config->transports, (long long)(now_ms() - start), (long long)(cpu_ms() - start_cpu));
    }
    CHECK(x == 4, "%f", (double)x);
}

static void test_waiting_sleeps(void)
{
    static const char *const all[] = {"inproc", "shm", "tcp", "ncclnet"};
    struct scene s = {.kind = 0};
    setenv("SPCCL_NET_PLUGIN", NET_PLUGIN_FOLDER "/libnccl-net-test_all.so", 1);
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        run_scene(2, SLOW_S * 1000, all[i], wait_for_late_rank, &s);
    unsetenv("SPCCL_NET_PLUGIN");
}

/* ---- every collective has its own deadline ---- */

#define SHORT_MS 100
#define N_BEFORE 10 /* more than run at a time: SP_EXEC_ACTIVE_MAX */

/* Rank 0 issues collectives with a long deadline. The next to last has a short one, and waits for its turn. */
static void queue_up(struct rank_ctx *c)
{
    struct scene *s = c->arg;
    spccl_request *req[N_BEFORE + 2] = {NULL};
    float x[N_BEFORE + 2] = {0};
    int64_t start;
    if (c->rank == 1) {
        while (atomic_load(&s->n_done) == 0)
            sleep_ms(1);
        return;
    }
    for (int i = 0; i < N_BEFORE + 2; i++) {
        CHECK_OK(spccl_comm_set_timeout(c->comm, i == N_BEFORE ? SHORT_MS : SLOW_S * 1000));
        CHECK_OK(spccl_all_reduce(c->comm, &x[i], &x[i], 1, SPCCL_FLOAT32, SPCCL_SUM, &req[i]));
    }
    start = now_ms();
    note(c, spccl_request_wait(req[N_BEFORE], -1), start);
    atomic_store(&s->n_done, 1);
    for (int i = 0; i < N_BEFORE + 2; i++) {
        CHECK(spccl_request_wait(req[i], -1) == SPCCL_ERR_TIMEOUT, "request %d", i);
        spccl_request_free(req[i]);
    }
}

static void test_deadline_in_queue(void)
{
    struct scene s = {.kind = 0};
    const struct outcome *o = &s.out[0];
    run_scene(2, SLOW_S * 1000, "inproc", queue_up, &s);
    CHECK(o->st == SPCCL_ERR_TIMEOUT && o->took_ms < SOON_MS, "%s after %lld ms: %s",
          spccl_status_name(o->st), (long long)o->took_ms, o->text);
    CHECK(has(o->text, "all_reduce #10 (1 float32, sum) timed out after 100 ms: it comes after all_reduce #0 "
                       "(1 float32, sum), which is waiting for rank 1 to send"),
          "\"%s\"", o->text);
}

/* A call inside the library may have less time than the communicator gives. The text says how much it had. */
static void end_soon(struct rank_ctx *c)
{
    struct scene *s = c->arg;
    uint8_t mine = 1, all[2];
    if (c->rank == 0) {
        int64_t start = now_ms();
        sp_time_limit limit = {.timeout_ms = SHORT_MS, .deadline_ns = sp_deadline_in_ms(SHORT_MS)};
        note(c, sp_comm_all_gather(c->comm, &mine, all, 1, limit, NULL), start);
        atomic_store(&s->n_done, 1);
    }
    while (atomic_load(&s->n_done) == 0)
        sleep_ms(1);
}

static void test_own_deadline(void)
{
    struct scene s = {.kind = 0};
    run_scene(2, SLOW_S * 1000, "inproc", end_soon, &s);
    CHECK(s.out[0].st == SPCCL_ERR_TIMEOUT &&
              has(s.out[0].text, "all_gather #0 (1 uint8) timed out after 100 ms: "),
          "%s after %lld ms: %s", spccl_status_name(s.out[0].st), (long long)s.out[0].took_ms, s.out[0].text);
}

/* ---- a failure is printed once ---- */

enum { WAITED_FOR, FREED }; /* what happens to the requests */

static void fails(struct rank_ctx *c)
{
    struct scene *s = c->arg;
    spccl_request *req[3] = {NULL};
    float x[4] = {0};
    if (c->rank == 1) {
        while (atomic_load(&s->n_done) == 0)
            sleep_ms(1);
        return;
    }
    CHECK_OK(spccl_comm_set_timeout(c->comm, SHORT_MS));
    for (int i = 0; i < 3; i++)
        CHECK_OK(spccl_all_reduce(c->comm, &x[i], &x[i], 1, SPCCL_FLOAT32, SPCCL_SUM, &req[i]));
    for (int i = 0; i < 3; i++) {
        if (s->kind == WAITED_FOR)
            CHECK(spccl_request_wait(req[i], -1) == SPCCL_ERR_TIMEOUT, "%s", spccl_last_error());
        spccl_request_free(req[i]);
    }
    while (spccl_comm_async_error(c->comm) == SPCCL_OK)
        sleep_ms(1);
    CHECK(spccl_all_reduce(c->comm, x, x, 1, SPCCL_FLOAT32, SPCCL_SUM, NULL) == SPCCL_ERR_TIMEOUT, "%s",
          spccl_last_error());
    atomic_store(&s->n_done, 1);
}

static int count_of(const char *text, const char *part)
{
    int n = 0;
    for (const char *at = strstr(text, part); at != NULL; at = strstr(at + 1, part))
        n++;
    return n;
}

/* What this process prints: the calls of rank 0 return the error, unless nobody asks. */
static void check_printed(bool at_info)
{
    for (int kind = WAITED_FOR; kind <= FREED; kind++) {
        struct scene s = {.kind = kind};
        char log[20000];
        int wanted = (kind == FREED) + at_info;
        begin_log();
        run_scene(2, SLOW_S * 1000, "inproc", fails, &s);
        end_log(log, sizeof log);
        CHECK(count_of(log, "rank 0: all_reduce #0 (1 float32, sum) timed out after 100 ms") == wanted &&
                  (count_of(log, "spccl[0] info: trace: ") > 0) == at_info &&
                  has(log, "spccl error: a request was freed") == (kind == FREED) &&
                  (at_info || !has(log, "is broken")),
              "%s, %s: \"%s\"", kind == FREED ? "freed" : "waited for", at_info ? "info" : "warn", log);
    }
}

static void test_printed_once(void)
{
    int status = 0;
    pid_t child = fork(); /* a process reads SPCCL_LOG once, so this case is the first */
    if (child == 0) {
        setenv("SPCCL_LOG", "info", 1);
        (void)sp_log_on(SP_LOG_INFO);
        check_printed(true);
        _exit(test_n_failed != 0);
    }
    CHECK(child > 0 && waitpid(child, &status, 0) == child && status == 0, "status %d", status);
    check_printed(false);
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {{"printed_once", test_printed_once},
                                             {"tcp", test_tcp},
                                             {"last_bytes_wake", test_last_bytes_wake},
                                             {"waiting_sleeps", test_waiting_sleeps},
                                             {"deadline_in_queue", test_deadline_in_queue},
                                             {"own_deadline", test_own_deadline},
                                             {NULL, NULL}};
    unsetenv("SPCCL_LOG");
    return test_main(cases, argc, argv);
}
