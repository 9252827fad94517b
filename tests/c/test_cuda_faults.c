/* test_cuda_faults.c - what GPU collectives do when ranks abort, stay away, come late or disagree, and what
 * they refuse before anything is launched: every wait ends in time with an error that names the rank, the GPU
 * stays usable and a new communicator works. Ranks are threads; dead processes: test_cuda_processes.c.
 * --small: for sanitizers. */
#include "cuda_ranks.h"

#define N_RANKS 3
#define FEW 1000u                            /* fits the rings: the kernel waits for inputs */
#define MANY (is_small ? 100000u : 4000000u) /* does not: it also waits for room */
#define CAP ((size_t)17 << 20)
/* Every end must come this soon; a sanitizer makes everything slower. */
#define SOON_MS (is_small ? 60000 : 5000)

struct scene {
    size_t n;
    bool by_peer;
    spccl_dtype dtype1; /* of rank 1, where the others have float32 */
    size_t n1;
    _Atomic int n_ended; /* ranks that have seen the end */
};

static spccl_status sum(struct rank_ctx *c, size_t n, spccl_dtype dtype)
{
    const struct rank_room *m = &rank_rooms[c->rank];
    return spccl_cuda_all_reduce(c->comm, m->in_d, m->out_d, n, dtype, SPCCL_SUM, m->on);
}

/* Every third element of rank r is r + 1: the sums are known. */
static void load_input(const struct rank_ctx *c, size_t n)
{
    const struct rank_room *m = &rank_rooms[c->rank];
    float *x = (float *)(void *)m->in;
    for (size_t i = 0; i < n; i++)
        x[i] = i % 3 == 0 ? (float)(c->rank + 1) : 0;
    CUDA_OK(cudaMemcpyAsync(m->in_d, m->in, n * 4, cudaMemcpyHostToDevice, m->on));
    CUDA_OK(cudaMemsetAsync(m->out_d, POISON, n * 4, m->on));
    sync_stream(m->on);
}

static void check_sums(const struct rank_ctx *c, size_t n)
{
    const struct rank_room *m = &rank_rooms[c->rank];
    const float *got = (const float *)(const void *)m->got;
    float wanted = (float)(c->n_ranks * (c->n_ranks + 1) / 2);
    size_t i = 0;
    CUDA_OK(cudaMemcpyAsync(m->got, m->out_d, n * 4, cudaMemcpyDeviceToHost, m->on));
    CHECK_OK(spccl_cuda_wait(c->comm, m->on, wait_ms()));
    while (i < n && got[i] == (i % 3 == 0 ? wanted : 0))
        i++;
    CHECK(i == n, "rank %d: element %zu of %zu is %g", c->rank, i, n, i < n ? (double)got[i] : 0);
}

/* A whole collective, on a communicator that is well. */
static void check_works(struct rank_ctx *c)
{
    load_input(c, FEW);
    CHECK_OK(sum(c, FEW, SPCCL_FLOAT32));
    check_sums(c, FEW);
    CHECK_OK(spccl_comm_async_error(c->comm));
}

/* The kernel has ended, and the GPU does other work. */
static void check_gpu_usable(const struct rank_ctx *c)
{
    const struct rank_room *m = &rank_rooms[c->rank];
    sync_stream(m->on);
    CUDA_OK(cudaMemsetAsync(m->spare_d, 0x37, 4096, m->on2));
    CUDA_OK(cudaMemcpyAsync(m->got, m->spare_d, 4096, cudaMemcpyDeviceToHost, m->on2));
    sync_stream(m->on2);
    for (int i = 0; i < 4096; i++)
        CHECK(m->got[i] == 0x37, "rank %d: byte %d of a copy is %#x", c->rank, i, m->got[i]);
    CUDA_OK(cudaGetLastError());
}

/* Until all ranks have seen the end: none destroys its communicator, so nobody is taken for dead. */
static void leave_together(struct rank_ctx *c)
{
    struct scene *s = c->arg;
    int64_t until = now_ms() + SOON_MS;
    s->n_ended++;
    while (s->n_ended < c->n_ranks && now_ms() < until)
        sleep_ms(1);
    CHECK(s->n_ended == c->n_ranks, "rank %d: only %d ranks have ended", c->rank, s->n_ended);
}

/* A rank that launches nothing waits for the communicator to break. */
static spccl_status await_broken(struct rank_ctx *c)
{
    int64_t until = now_ms() + SOON_MS;
    spccl_status st;
    while ((st = spccl_comm_async_error(c->comm)) == SPCCL_OK && now_ms() < until)
        sleep_ms(1);
    return st;
}

static void again(struct rank_ctx *c)
{
    if (attach_gpu(c->comm, c->rank, 0))
        check_works(c);
}

/* fn on n_ranks threads, and then a new communicator of the same ranks. */
static void run_scene(int n_ranks, void (*fn)(struct rank_ctx *), struct scene *s)
{
    struct rank_ctx ctx[RANKS_CAP];
    s->n_ended = 0;
    run_ranks(n_ranks, NULL, fn, s, ctx);
    for (int r = 0; r < n_ranks; r++)
        CHECK(ctx[r].created == SPCCL_OK, "rank %d: %s", r, ctx[r].error);
    run_ranks(n_ranks, NULL, again, s, ctx);
    for (int r = 0; r < n_ranks; r++)
        CHECK(ctx[r].created == SPCCL_OK, "rank %d, again: %s", r, ctx[r].error);
}

/* ---- aborts ---- */

/* Rank 0's kernel waits for the others; rank 0 (or, by_peer, rank 1) aborts. */
static void aborts(struct rank_ctx *c)
{
    const struct scene *s = c->arg;
    const struct rank_room *m = &rank_rooms[c->rank];
    int who = s->by_peer ? 1 : 0;
    char name[32];
    spccl_status st;
    int64_t start;
    if (!attach_gpu(c->comm, c->rank, 0))
        return;
    load_input(c, s->n);
    if (!all_here(c->comm))
        return;
    start = now_ms();
    if (c->rank == 0)
        CHECK_OK(sum(c, s->n, SPCCL_FLOAT32));
    sleep_ms(100);
    if (c->rank == 0 && !s->by_peer)
        CHECK(cudaStreamQuery(m->on) == cudaErrorNotReady, "the kernel waits for nobody");
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

/* Abort with several launches queued behind the one that waits: all end. */
static void aborts_queue(struct rank_ctx *c)
{
    const struct rank_room *m = &rank_rooms[c->rank];
    spccl_status st;
    if (!attach_gpu(c->comm, c->rank, 0) || !all_here(c->comm))
        return;
    for (int i = 0; i < 20 && c->rank == 0; i++)
        CHECK_OK(spccl_cuda_all_reduce(c->comm, m->in_d, m->out_d, FEW, SPCCL_FLOAT32, SPCCL_SUM,
                                       i % 2 == 0 ? m->on : m->on2));
    sleep_ms(50);
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
    const int timeout_ms = 1500;
    spccl_status st;
    int64_t start, took;
    if (!attach_gpu(c->comm, c->rank, 0))
        return;
    load_input(c, s->n);
    CHECK_OK(spccl_comm_set_timeout(c->comm, timeout_ms));
    if (!all_here(c->comm))
        return;
    start = now_ms();
    if (c->rank == 1) {
        st = await_broken(c);
        CHECK(st == SPCCL_ERR_ABORTED || st == SPCCL_ERR_TIMEOUT, "rank 1: %s: %s", spccl_status_name(st),
              spccl_last_error());
    } else {
        CHECK_OK(sum(c, s->n, SPCCL_FLOAT32));
        st = spccl_cuda_wait(c->comm, rank_rooms[c->rank].on, SOON_MS);
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

static void test_missing_rank(void)
{
    struct scene few = {.n = FEW}, many = {.n = MANY};
    run_scene(2, stays_away, &few);
    run_scene(N_RANKS, stays_away, &many);
}

/* Rank 1 is late but comes: the others' wait may give up before, the collective does not. */
static void comes_late(struct rank_ctx *c)
{
    const struct scene *s = c->arg;
    const struct rank_room *m = &rank_rooms[c->rank];
    if (!attach_gpu(c->comm, c->rank, 0))
        return;
    load_input(c, s->n);
    if (!all_here(c->comm))
        return;
    if (c->rank == 1)
        sleep_ms(400);
    CHECK_OK(sum(c, s->n, SPCCL_FLOAT32));
    if (c->rank == 0) {
        spccl_status st = spccl_cuda_wait(c->comm, m->on, 100);
        CHECK(st == SPCCL_ERR_TIMEOUT, "%s: %s", spccl_status_name(st), spccl_last_error());
        CHECK_OK(spccl_comm_async_error(c->comm));
    }
    check_sums(c, s->n);
    check_works(c);
}

static void test_late_rank(void)
{
    struct scene few = {.n = FEW}, many = {.n = MANY};
    run_scene(2, comes_late, &few);
    run_scene(N_RANKS, comes_late, &many);
}

/* Rank 1 calls another size or dtype: whoever sees it says so, all end, nothing outside of `out` is written
 * (guards), nobody hangs. */
static void disagrees(struct rank_ctx *c)
{
    const struct scene *s = c->arg;
    const struct rank_room *m = &rank_rooms[c->rank];
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
    if (!all_here(c->comm))
        return;
    CHECK_OK(sum(c, n, dtype));
    (void)spccl_cuda_wait(c->comm, m->on, SOON_MS); /* one of them may be content with what it got */
    st = await_broken(c);
    CHECK(st == SPCCL_ERR_FORMAT || st == SPCCL_ERR_TIMEOUT || st == SPCCL_ERR_ABORTED, "rank %d: %s: %s",
          c->rank, spccl_status_name(st), spccl_last_error());
    check_gpu_usable(c);
    CUDA_OK(cudaMemcpyAsync(m->got, m->out_d + bytes, GUARD_BYTES, cudaMemcpyDeviceToHost, m->on));
    sync_stream(m->on);
    for (size_t i = 0; i < GUARD_BYTES; i++)
        CHECK(m->got[i] == POISON, "rank %d: byte %zu behind out is %#x", c->rank, i, m->got[i]);
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

/* ---- refused at the call ---- */

static void want(spccl_status wanted, spccl_status got, const char *what)
{
    CHECK(got == wanted, "%s: %s: %s", what, spccl_status_name(got), spccl_last_error());
}

static uint64_t n_launched(spccl_comm *comm)
{
    spccl_cuda_stats s = {.struct_bytes = sizeof s};
    CHECK_OK(spccl_cuda_get_stats(comm, &s));
    return s.n_collectives;
}

static void refuses_pointers(struct rank_ctx *c)
{
    const struct rank_room *m = &rank_rooms[c->rank];
    uint8_t *in = m->in_d, *out = m->out_d;
    spccl_comm *comm = c->comm;
    float *plain = malloc(4096);
    void *s = m->on;
#define SUM(in, out, n, t) spccl_cuda_all_reduce(comm, in, out, n, t, SPCCL_SUM, s)
    want(SPCCL_ERR_ARG, SUM(plain, out, 9, SPCCL_FLOAT32), "in is host memory");
    CHECK(strstr(spccl_last_error(), "host memory") != NULL, "%s", spccl_last_error());
    want(SPCCL_ERR_ARG, SUM(in, plain, 9, SPCCL_FLOAT32), "out is host memory");
    want(SPCCL_ERR_ARG, SUM(NULL, out, 9, SPCCL_FLOAT32), "in is NULL");
    want(SPCCL_ERR_ARG, SUM(in, NULL, 9, SPCCL_FLOAT32), "out is NULL");
    want(SPCCL_ERR_ARG, SUM(in + 2, out, 9, SPCCL_FLOAT32), "in is misaligned");
    want(SPCCL_ERR_ARG, SUM(in, out + 1, 9, SPCCL_FLOAT16), "out is misaligned");
    want(SPCCL_ERR_ALIAS, SUM(in, in + 8, 9, SPCCL_FLOAT32), "in and out overlap");
    want(SPCCL_ERR_ARG, SUM(in, out, SIZE_MAX / 2, SPCCL_FLOAT32), "too many elements");
    want(SPCCL_ERR_DTYPE, SUM(in, out, 9, SPCCL_FLOAT8), "float8 is not reduced");
    want(SPCCL_ERR_DTYPE, SUM(in, out, 9, (spccl_dtype)11), "dtype 11");
    want(SPCCL_ERR_ARG, spccl_cuda_all_reduce(comm, in, out, 9, SPCCL_FLOAT32, (spccl_redop)5, s), "op 5");
    want(SPCCL_ERR_ALIAS, spccl_cuda_all_gather(comm, in, in + 4, 9, SPCCL_FLOAT32, s), "gather overlaps");
    want(SPCCL_ERR_ALIAS, spccl_cuda_reduce_scatter(comm, in, in + 4, 9, SPCCL_FLOAT32, SPCCL_SUM, s),
         "scatter overlaps");
    want(SPCCL_ERR_DTYPE, spccl_cuda_reduce_scatter(comm, in, out, 9, SPCCL_FLOAT8, SPCCL_SUM, s), "float8");
    want(SPCCL_ERR_ARG, spccl_cuda_broadcast(comm, in, 9, SPCCL_FLOAT32, c->n_ranks, s), "root");
    want(SPCCL_ERR_ARG, spccl_cuda_broadcast(comm, plain, 9, SPCCL_FLOAT32, 0, s), "buf is host memory");
    if (n_gpus > 1) {
        uint8_t *other = rank_rooms[(c->rank + 1) % c->n_ranks].out_d; /* of the next GPU */
        want(SPCCL_ERR_ARG, SUM(in, other, 9, SPCCL_FLOAT32), "out is of another GPU");
        CHECK(strstr(spccl_last_error(), "GPU") != NULL, "%s", spccl_last_error());
    }
#undef SUM
    free(plain);
}

static void refuses(struct rank_ctx *c)
{
    const struct rank_room *m = &rank_rooms[c->rank];
    spccl_cuda_config twice = SPCCL_CUDA_CONFIG_INIT;
    spccl_cuda_stats bad = {.struct_bytes = 1};
    uint64_t before;
    want(SPCCL_ERR_STATE, sum(c, 9, SPCCL_FLOAT32), "not attached");
    want(SPCCL_ERR_STATE, spccl_cuda_wait(c->comm, m->on, 10), "wait, not attached");
    if (!attach_gpu(c->comm, c->rank, 0))
        return;
    twice.device = m->device;
    want(SPCCL_ERR_STATE, spccl_cuda_attach(c->comm, &twice), "attached twice");
    want(SPCCL_ERR_ARG, spccl_cuda_get_stats(c->comm, &bad), "stats of another size");
    want(SPCCL_ERR_ARG, spccl_cuda_get_stats(c->comm, NULL), "stats NULL");
    check_works(c);
    before = n_launched(c->comm);
    refuses_pointers(c);
    CHECK_OK(spccl_cuda_all_reduce(c->comm, NULL, NULL, 0, SPCCL_FLOAT32, SPCCL_SUM, m->on)); /* nothing */
    CHECK(n_launched(c->comm) == before, "refused calls have launched something");
    CHECK_OK(spccl_comm_async_error(c->comm));
    check_works(c);
}

static void test_refusals(void)
{
    struct scene s = {.n = FEW};
    want(SPCCL_ERR_ARG, spccl_cuda_attach(NULL, NULL), "attach without a communicator");
    run_scene(2, refuses, &s);
}

/* ---- attaching ---- */

static void small_inbox(struct rank_ctx *c)
{
    spccl_cuda_config config = SPCCL_CUDA_CONFIG_INIT;
    config.device = rank_rooms[c->rank].device;
    config.inbox_bytes = c->rank == 1 ? 4096 : 0; /* the smallest counts, on all ranks */
    want(SPCCL_ERR_SETTING, spccl_cuda_attach(c->comm, &config), "inbox of 4 KiB");
    CHECK(strstr(spccl_last_error(), "SPCCL_INBOX_BYTES") != NULL, "%s", spccl_last_error());
    config.device = n_gpus;
    config.inbox_bytes = 0;
    want(SPCCL_ERR_ARG, spccl_cuda_attach(c->comm, &config), "a GPU that is not there");
    config.struct_bytes = 3;
    want(SPCCL_ERR_ARG, spccl_cuda_attach(c->comm, &config), "a config of another size");
    again(c); /* nothing is lost */
}

static void test_inbox(void)
{
    struct scene s = {.n = FEW};
    run_scene(2, small_inbox, &s);
}

/* The smallest inbox that works: one worker. */
static void one_worker(struct rank_ctx *c)
{
    spccl_cuda_config config = SPCCL_CUDA_CONFIG_INIT;
    spccl_cuda_stats s = {.struct_bytes = sizeof s};
    config.device = rank_rooms[c->rank].device;
    config.inbox_bytes = (size_t)1 << 20;
    CHECK_OK(spccl_cuda_attach(c->comm, &config));
    CHECK_OK(spccl_cuda_get_stats(c->comm, &s));
    CHECK(s.inbox_bytes <= (size_t)1 << 20 && s.inbox_bytes > 0 && s.n_ctas > 0, "%llu bytes, %u blocks",
          (unsigned long long)s.inbox_bytes, s.n_ctas);
    check_works(c);
}

static void test_one_worker(void)
{
    struct scene s = {.n = FEW};
    run_scene(2, one_worker, &s);
    run_scene(N_RANKS, one_worker, &s);
}

/* ---- counters ---- */

static uint64_t bytes_of_gather(struct rank_ctx *c, array_kind kind, size_t n, spccl_cuda_stats *after)
{
    const struct rank_room *m = &rank_rooms[c->rank];
    spccl_cuda_stats before = {.struct_bytes = sizeof before};
    uint64_t rng = 77u + (uint64_t)c->rank;
    fill_array(m->in, n, SPCCL_FLOAT32, kind, &rng);
    CUDA_OK(cudaMemcpyAsync(m->in_d, m->in, n * 4, cudaMemcpyHostToDevice, m->on));
    CHECK_OK(spccl_cuda_get_stats(c->comm, &before));
    if (!all_here(c->comm))
        return 0;
    CHECK_OK(spccl_cuda_all_gather(c->comm, m->in_d, m->out_d, n, SPCCL_FLOAT32, m->on));
    CHECK_OK(spccl_cuda_wait(c->comm, m->on, wait_ms()));
    *after = (spccl_cuda_stats){.struct_bytes = sizeof *after};
    CHECK_OK(spccl_cuda_get_stats(c->comm, after));
    CHECK(after->n_collectives == before.n_collectives + 1, "counted %llu",
          (unsigned long long)after->n_collectives);
    for (int f = 0; f < SPCCL_N_FORMATS; f++)
        after->n_frames_sent[f] -= before.n_frames_sent[f];
    return after->wire_bytes_sent - before.wire_bytes_sent;
}

static void counts(struct rank_ctx *c)
{
    size_t n = is_small ? 65536 : 1u << 20;
    uint64_t dense = n * 4 * (uint64_t)(c->n_ranks - 1), sent;
    spccl_cuda_stats s;
    if (!attach_gpu(c->comm, c->rank, 0))
        return;
    sent = bytes_of_gather(c, KIND_FULL, n, &s);
    CHECK(sent >= dense && sent < dense + dense / 8 && s.n_frames_sent[SPCCL_FORMAT_DENSE] > 0 &&
              s.n_frames_sent[SPCCL_FORMAT_TILE] + s.n_frames_sent[SPCCL_FORMAT_COO] +
                      s.n_frames_sent[SPCCL_FORMAT_PICI] ==
                  0,
          "dense: %llu bytes sent, %llu are dense", (unsigned long long)sent, (unsigned long long)dense);
    sent = bytes_of_gather(c, KIND_PERCENT_1, n, &s);
    CHECK(sent >= dense / 100 && sent < dense / 10 && s.n_frames_sent[SPCCL_FORMAT_DENSE] == 0,
          "1%%: %llu bytes sent, %llu are dense", (unsigned long long)sent, (unsigned long long)dense);
    sent = bytes_of_gather(c, KIND_ZERO, n, &s);
    CHECK(sent < dense / 20 && s.n_frames_sent[SPCCL_FORMAT_EMPTY] > 0, "zeros: %llu bytes sent",
          (unsigned long long)sent);
    CHECK(s.device == rank_rooms[c->rank].device, "GPU %d", s.device);
}

static void test_counters(void)
{
    struct scene s = {.n = FEW};
    run_scene(2, counts, &s);
    run_scene(N_RANKS, counts, &s);
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {
        {"refusals", test_refusals},         {"inbox", test_inbox},
        {"one_worker", test_one_worker},     {"counters", test_counters},
        {"late_rank", test_late_rank},       {"abort", test_abort},
        {"abort_queue", test_abort_queue},   {"missing_rank", test_missing_rank},
        {"disagreement", test_disagreement}, {NULL, NULL}};
    cuda_test_start(&argc, argv);
    make_rank_rooms(N_RANKS, CAP);
    return test_main(cases, argc, argv);
}
