/* test_no_memory.c - a collective on host memory that cannot start on one rank, for want of memory or of a thread. All
 * ranks get an error that names the rank, before the deadline; the next group works. */
#include "ranks.h"

#include "core/base/mem.h"
#include "core/base/thread.h"

#define N_RANKS 3
#define FAILING 1
#define TIMEOUT_MS 120000 /* no test waits for it */

void *__real_sp_calloc(size_t n, size_t elem_bytes);
void *__wrap_sp_calloc(size_t n, size_t elem_bytes);
spccl_status __real_sp_thread_start(const char *name, void *(*fn)(void *arg), void *arg, pthread_t *out);
spccl_status __wrap_sp_thread_start(const char *name, void *(*fn)(void *arg), void *arg, pthread_t *out);

static _Thread_local int fails_after = -1; /* sp_calloc of this thread fails once, after so many; -1: never */
static _Thread_local bool no_thread;       /* this thread cannot start another one */
static _Thread_local bool has_failed;

void *__wrap_sp_calloc(size_t n, size_t elem_bytes)
{
    if (fails_after >= 0 && fails_after-- == 0) {
        has_failed = true;
        return NULL;
    }
    return __real_sp_calloc(n, elem_bytes);
}

spccl_status __wrap_sp_thread_start(const char *name, void *(*fn)(void *arg), void *arg, pthread_t *out)
{
    if (!no_thread)
        return __real_sp_thread_start(name, fn, arg, out);
    has_failed = true;
    return SP_FAIL(SPCCL_ERR_SYSTEM, "the test starts no thread");
}

struct scene {
    bool waits_later; /* the calls return requests */
    bool no_thread;
    int fails_after;
    bool has_failed;
    int64_t most_ms; /* that a rank took */
    _Atomic int n_ready;
    pthread_mutex_t mu;
};

static spccl_status sum(const struct rank_ctx *c, bool waits_later)
{
    float x[100];
    spccl_request *req = NULL;
    spccl_status st;
    for (int i = 0; i < 100; i++)
        x[i] = (float)i;
    st = spccl_all_reduce(c->comm, x, x, 100, SPCCL_FLOAT32, SPCCL_SUM, waits_later ? &req : NULL);
    if (st == SPCCL_OK && waits_later) {
        st = spccl_request_wait(req, -1);
        if (st != SPCCL_OK)
            (void)spccl_comm_async_error(c->comm); /* its text */
        spccl_request_free(req);
    }
    CHECK(st != SPCCL_OK || x[99] == 99.0f * (float)c->n_ranks, "rank %d: %f", c->rank, (double)x[99]);
    return st;
}

static void fails(struct rank_ctx *c)
{
    struct scene *s = c->arg;
    bool mine = c->rank == FAILING;
    int64_t start = now_ms(), took;
    spccl_status st;
    if (!s->waits_later) { /* of requests the first call is tested: it starts the thread */
        CHECK_OK(sum(c, false));
        s->n_ready++;
        while (s->n_ready < N_RANKS &&
               now_ms() - start < TIMEOUT_MS) /* an abort may overtake the first sum */
            sleep_ms(1);
    }
    fails_after = mine && !s->no_thread ? s->fails_after : -1;
    no_thread = mine && s->no_thread;
    has_failed = false;
    st = sum(c, s->waits_later);
    fails_after = -1;
    no_thread = false;
    took = now_ms() - start;
    pthread_mutex_lock(&s->mu);
    s->has_failed = s->has_failed || has_failed;
    s->most_ms = took > s->most_ms ? took : s->most_ms;
    pthread_mutex_unlock(&s->mu);
    if (mine && !has_failed) /* that many allocations are not made */
        return;
    if (mine)
        CHECK(st == (s->no_thread ? SPCCL_ERR_SYSTEM : SPCCL_ERR_NOMEM), "%s: %s", spccl_status_name(st),
              spccl_last_error());
    if (st != SPCCL_OK) {
        CHECK(strstr(spccl_last_error(), mine ? "rank 1: all_reduce #" : "rank 1 gave up: all_reduce #") !=
                  NULL,
              "rank %d: \"%s\" names neither rank nor call", c->rank, spccl_last_error());
        CHECK(mine || st == SPCCL_ERR_ABORTED, "rank %d: %s: %s", c->rank, spccl_status_name(st),
              spccl_last_error());
        CHECK(spccl_comm_async_error(c->comm) == st && sum(c, false) == st, "rank %d: later: %s", c->rank,
              spccl_last_error());
    }
}

/* Returns whether something failed. */
static bool run(bool waits_later, bool no_thread_starts, int after)
{
    struct rank_ctx ctx[RANKS_CAP];
    struct scene s = {.waits_later = waits_later, .no_thread = no_thread_starts, .fails_after = after};
    spccl_config config = SPCCL_CONFIG_INIT;
    config.transports = "inproc";
    config.timeout_ms = TIMEOUT_MS;
    pthread_mutex_init(&s.mu, NULL);
    run_ranks(N_RANKS, &config, fails, &s, ctx);
    for (int r = 0; r < N_RANKS; r++)
        CHECK(ctx[r].created == SPCCL_OK, "rank %d: %s", r, ctx[r].error);
    CHECK(s.most_ms < TIMEOUT_MS, "after %d allocations: %lld ms: a rank waited for its deadline", after,
          (long long)s.most_ms);
    pthread_mutex_destroy(&s.mu);
    return s.has_failed;
}

/* Each allocation of a call in turn. */
static void test_memory(void)
{
    for (int waits_later = 0; waits_later < 2; waits_later++) {
        int n = 0;
        while (n < 100 && run(waits_later, false, n))
            n++;
        CHECK(n >= 2 && n < 100, "%d allocations failed, wanted the operation's and the request's at least",
              n);
    }
}

static void test_thread(void)
{
    CHECK(run(true, true, 0), "no thread was wanted");
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {{"memory", test_memory}, {"thread", test_thread}, {NULL, NULL}};
    return test_main(cases, argc, argv);
}
