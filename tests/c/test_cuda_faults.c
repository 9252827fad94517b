/* test_cuda_faults.c - GPU collectives when ranks abort, stay away, come late or disagree. Every wait must
 * end in time, with an error that names the rank. Afterwards the GPU must be usable and a new communicator
 * must work. Ranks are threads; test_cuda_processes.c kills processes. --small: for sanitizers. */
#include "cuda_sums.h"

#define N_RANKS 3
#define MANY (is_small ? 100000u : is_slow ? 400000u : 4000000u) /* elements; more than the rings hold */
#define CAP ((size_t)17 << 20)
/* Every collective must end this soon; a sanitizer makes everything slower. */
#define SOON_MS (is_small || is_slow ? 60000 : 12000)

struct scene {
    size_t n;
    bool by_peer;
    spccl_dtype dtype1; /* of rank 1; the others have float32 */
    size_t n1;
    int owner_later_ms;                   /* how much later than the others rank 0 launches */
    _Atomic int n_here, n_going, n_ended; /* ranks that are ready, that have launched, that have ended */
};

static void check_bytes(const uint8_t *p, size_t n, uint8_t wanted, const char *what)
{
    size_t i = 0;
    while (i < n && p[i] == wanted)
        i++;
    CHECK(i == n, "byte %zu %s is %#x", i, what, i < n ? p[i] : 0);
}

/* Check that the kernel has ended and that the GPU does other work. */
static void check_gpu_usable(const struct rank_ctx *c)
{
    const struct rank_buffer *m = &rank_buffers[c->rank];
    sync_stream(m->on);
    CUDA_OK(cudaMemsetAsync(m->spare_d, 0x37, 4096, m->on2));
    CUDA_OK(cudaMemcpyAsync(m->got, m->spare_d, 4096, cudaMemcpyDeviceToHost, m->on2));
    sync_stream(m->on2);
    check_bytes(m->got, 4096, 0x37, "of a copy");
    CUDA_OK(cudaGetLastError());
}

/* Wait until all ranks have come here. The communicator cannot do it: it may break before the last rank
 * arrives. */
static bool wait_for_ranks(const struct rank_ctx *c, _Atomic int *n)
{
    int64_t until = now_ms() + SOON_MS;
    ++*n;
    while (*n < c->n_ranks && now_ms() < until)
        sleep_ms(1);
    CHECK(*n == c->n_ranks, "rank %d: only %d of %d ranks have come", c->rank, *n, c->n_ranks);
    return *n == c->n_ranks;
}

/* Wait until all ranks have attached. */
static bool start_together(struct rank_ctx *c)
{
    return wait_for_ranks(c, &((struct scene *)c->arg)->n_here);
}

/* Wait until all ranks have seen the end. A rank that destroyed its communicator earlier would be taken for
 * dead. */
static void leave_together(struct rank_ctx *c)
{
    (void)wait_for_ranks(c, &((struct scene *)c->arg)->n_ended);
}

/* A rank that launches nothing waits until the communicator breaks. */
static spccl_status await_broken(struct rank_ctx *c)
{
    int64_t until = now_ms() + SOON_MS;
    spccl_status st;
    while ((st = spccl_comm_async_error(c->comm)) == SPCCL_OK && now_ms() < until)
        sleep_ms(1);
    return st;
}

/* ---- aborts ---- */

/* Rank 0's kernel waits for the others. Then rank 0 aborts, or with by_peer rank 1. */
static void aborts(struct rank_ctx *c)
{
    struct scene *s = c->arg;
    const struct rank_buffer *m = &rank_buffers[c->rank];
    int who = s->by_peer ? 1 : 0;
    char name[32];
    spccl_status st;
    int64_t start;
    if (!attach_gpu(c->comm, c->rank, 0))
        return;
    load_input(c, s->n);
    if (!start_together(c))
        return;
    start = now_ms();
    if (c->rank == 0)
        CHECK_OK(sum(c, s->n, SPCCL_FLOAT32));
    (void)wait_for_ranks(c, &s->n_going);
    sleep_ms(100);
    if (c->rank == 0 && !s->by_peer)
        CHECK(cudaStreamQuery(m->on) == cudaErrorNotReady,
              "the kernel has ended, although the other ranks have not launched");
    if (c->rank == who) {
        CHECK_OK(spccl_comm_abort(c->comm, "enough of this"));
        CHECK_OK(spccl_comm_abort(c->comm, "twice"));
    }
    st = c->rank == 0 ? spccl_cuda_wait(c->comm, m->on, SOON_MS) : await_broken(c);
    snprintf(name, sizeof name, "rank %d", who);
    CHECK(st == SPCCL_ERR_ABORTED && strstr(spccl_last_error(), "enough of this") != NULL &&
              strstr(spccl_last_error(), name) != NULL,
          "rank %d: %s: %s", c->rank, spccl_status_name(st), spccl_last_error());
    CHECK(now_ms() - start < SOON_MS, "rank %d: ended after %lld ms", c->rank, (long long)(now_ms() - start));
    CHECK(sum(c, FEW, SPCCL_FLOAT32) == SPCCL_ERR_ABORTED, "a call after the abort: %s", spccl_last_error());
    check_gpu_usable(c);
    leave_together(c);
}

static void test_abort(void)
{
    for (int i = 0; i < 4; i++) {
        struct scene s = {.n = i % 2 == 0 ? FEW : MANY, .by_peer = i / 2 != 0};
        run_scene(i == 0 ? 2 : N_RANKS, aborts, &s);
    }
}

/* Abort while several launches are queued after the one that waits: all must end. */
static void aborts_queue(struct rank_ctx *c)
{
    struct scene *s = c->arg;
    const struct rank_buffer *m = &rank_buffers[c->rank];
    spccl_status st;
    if (!attach_gpu(c->comm, c->rank, 0) || !start_together(c))
        return;
    for (int i = 0; i < 20 && c->rank == 0; i++)
        CHECK_OK(spccl_cuda_all_reduce(c->comm, m->in_d, m->out_d, FEW, SPCCL_FLOAT32, SPCCL_SUM,
                                       i % 2 == 0 ? m->on : m->on2));
    (void)wait_for_ranks(c, &s->n_going);
    if (c->rank == 1)
        CHECK_OK(spccl_comm_abort(c->comm, "no more"));
    st = await_broken(c);
    CHECK(st == SPCCL_ERR_ABORTED, "rank %d: %s: %s", c->rank, spccl_status_name(st), spccl_last_error());
    sync_stream(m->on2);
    check_gpu_usable(c);
    leave_together(c);
}

static void test_abort_queue(void)
{
    struct scene s = {.n = FEW};
    run_scene(2, aborts_queue, &s);
}

/* ---- ranks that stay away, come late, or call something else ---- */

static void stays_away(struct rank_ctx *c)
{
    const struct scene *s = c->arg;
    /* Rank 2 waits an eighth longer than rank 0. */
    const int timeout_ms = s->owner_later_ms == 0 ? 1500 : 7000;
    spccl_status st;
    int64_t start, took;
    if (!attach_gpu(c->comm, c->rank, 0))
        return;
    load_input(c, s->n);
    CHECK_OK(spccl_comm_set_timeout(c->comm, timeout_ms));
    if (!start_together(c))
        return;
    start = now_ms();
    if (c->rank == 1) {
        st = await_broken(c);
        CHECK(st == SPCCL_ERR_ABORTED || st == SPCCL_ERR_TIMEOUT, "rank 1: %s: %s", spccl_status_name(st),
              spccl_last_error());
    } else {
        sleep_ms(c->rank == 0 ? s->owner_later_ms : 0);
        CHECK_OK(sum(c, s->n, SPCCL_FLOAT32));
        st = spccl_cuda_wait(c->comm, rank_buffers[c->rank].on, SOON_MS);
        took = now_ms() - start;
        CHECK(st == SPCCL_ERR_TIMEOUT || st == SPCCL_ERR_ABORTED, "rank %d: %s: %s", c->rank,
              spccl_status_name(st), spccl_last_error());
        CHECK(strstr(spccl_last_error(), "all_reduce") != NULL &&
                  strstr(spccl_last_error(), "float32") != NULL &&
                  strstr(spccl_last_error(), "rank 1") != NULL,
              "rank %d: \"%s\" does not say what it waited for", c->rank, spccl_last_error());
        CHECK(took >= timeout_ms / 2 && took < SOON_MS, "rank %d: ended after %lld ms", c->rank,
              (long long)took);
    }
    CHECK(spccl_comm_async_error(c->comm) == st && sum(c, FEW, SPCCL_FLOAT32) == st, "rank %d: later: %s",
          c->rank, spccl_last_error());
    check_gpu_usable(c);
    leave_together(c);
}

/* one_shard: so few elements that rank 0 owns all of them. There rank 2 waits only for rank 0's sums,
 * longer than rank 0 waits for rank 1. The error of rank 2 must still name rank 1, which is missing. */
static void test_missing_rank(void)
{
    struct scene few = {.n = FEW}, many = {.n = MANY}, one_shard = {.n = 64, .owner_later_ms = 100};
    run_scene(2, stays_away, &few);
    run_scene(N_RANKS, stays_away, &many);
    run_scene(N_RANKS, stays_away, &one_shard);
}

/* Rank 1 launches after a spccl_cuda_wait of rank 0 has timed out, but before the collective has. */
static void comes_late(struct rank_ctx *c)
{
    struct scene *s = c->arg;
    const struct rank_buffer *m = &rank_buffers[c->rank];
    if (!attach_gpu(c->comm, c->rank, 0))
        return;
    load_input(c, s->n);
    if (!start_together(c))
        return;
    if (c->rank != 1)
        CHECK_OK(sum(c, s->n, SPCCL_FLOAT32));
    if (c->rank == 0) {
        spccl_status st = spccl_cuda_wait(c->comm, m->on, 200);
        CHECK(st == SPCCL_ERR_TIMEOUT, "%s: %s", spccl_status_name(st), spccl_last_error());
        CHECK_OK(spccl_comm_async_error(c->comm));
    }
    (void)wait_for_ranks(c, &s->n_going);
    if (c->rank == 1)
        CHECK_OK(sum(c, s->n, SPCCL_FLOAT32));
    check_sums(c, s->n);
    check_works(c);
}

static void test_late_rank(void)
{
    struct scene few = {.n = FEW}, many = {.n = MANY};
    run_scene(2, comes_late, &few);
    run_scene(N_RANKS, comes_late, &many);
}

/* Rank 1 calls with another size or dtype. A rank that notices it reports it, no rank hangs, and nothing
 * outside `out` is written, as guards show. */
static void disagrees(struct rank_ctx *c)
{
    const struct scene *s = c->arg;
    const struct rank_buffer *m = &rank_buffers[c->rank];
    size_t n = c->rank == 1 ? s->n1 : s->n, bytes;
    spccl_dtype dtype = c->rank == 1 ? s->dtype1 : SPCCL_FLOAT32;
    spccl_status st;
    bytes = n * spccl_dtype_bytes(dtype);
    if (!attach_gpu(c->comm, c->rank, 0))
        return;
    load_input(c, s->n > s->n1 ? s->n : s->n1);
    CUDA_OK(cudaMemsetAsync(m->out_d + bytes, POISON, GUARD_BYTES, m->on));
    sync_stream(m->on);
    CHECK_OK(spccl_comm_set_timeout(c->comm, 2000));
    if (!start_together(c))
        return;
    CHECK_OK(sum(c, n, dtype));
    (void)spccl_cuda_wait(c->comm, m->on, SOON_MS); /* one of the ranks may not notice anything */
    st = await_broken(c);
    CHECK(st == SPCCL_ERR_FORMAT || st == SPCCL_ERR_TIMEOUT || st == SPCCL_ERR_ABORTED, "rank %d: %s: %s",
          c->rank, spccl_status_name(st), spccl_last_error());
    check_gpu_usable(c);
    CUDA_OK(cudaMemcpyAsync(m->got, m->out_d + bytes, GUARD_BYTES, cudaMemcpyDeviceToHost, m->on));
    sync_stream(m->on);
    check_bytes(m->got, GUARD_BYTES, POISON, "behind out");
    leave_together(c);
}

static void test_disagreement(void)
{
    static const struct {
        size_t n, n1;
        spccl_dtype dtype1;
    } cases[] = {{5000, 4000, SPCCL_FLOAT32},     {100000, 300000, SPCCL_FLOAT32}, {5000, 5000, SPCCL_INT32},
                 {200000, 200000, SPCCL_FLOAT16}, {200000, 200000, SPCCL_FLOAT64}, {70, 7000, SPCCL_UINT8}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i += is_small ? 5 : 1) {
        struct scene s = {.n = cases[i].n, .n1 = cases[i].n1, .dtype1 = cases[i].dtype1};
        run_scene(2 + (int)(i % 2), disagrees, &s);
    }
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {
        {"late_rank", test_late_rank},       {"abort", test_abort},
        {"abort_queue", test_abort_queue},   {"missing_rank", test_missing_rank},
        {"disagreement", test_disagreement}, {NULL, NULL}};
    cuda_test_start(&argc, argv);
    setenv("SPCCL_SCHEDULE", "direct", 1); /* so that kernels wait in both hops */
    make_rank_buffers(N_RANKS, CAP);
    return test_main(cases, argc, argv);
}
