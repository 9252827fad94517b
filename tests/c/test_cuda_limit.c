/* test_cuda_limit.c - a limit of thread blocks for some GPU collectives of a group (spccl_cuda_set_options): the
 * results, ranks that give different limits, and captured graphs, which keep theirs. Ranks are threads.
 * --small: for sanitizers. */
#include "cuda_sums.h"

#define N_RANKS 3
#define MANY (is_small || is_slow ? 60000u : 3000000u) /* elements */
#define CAP ((size_t)17 << 20)
#define GROUP_CTAS 6 /* wanted; a GPU in software has fewer */
#define N_LIMITS 6

struct scene {
    size_t n;
    uint64_t limits[N_RANKS];
    _Atomic int n_here, n_ended;
};

static void limit(struct rank_ctx *c, uint64_t max_ctas)
{
    spccl_cuda_options options = SPCCL_CUDA_OPTIONS_INIT;
    options.max_ctas = max_ctas;
    CHECK_OK(spccl_cuda_set_options(c->comm, &options));
}

static void check_call(struct rank_ctx *c, size_t n)
{
    load_input(c, n);
    CHECK_OK(sum(c, n, SPCCL_FLOAT32));
    check_sums(c, n);
}

/* A sum of arrays in which one element in 301 is not zero. */
static void check_sparse(struct rank_ctx *c, size_t n)
{
    const struct rank_buffer *m = &rank_buffers[c->rank];
    const float *got = (const float *)(const void *)m->got;
    float *x = (float *)(void *)m->in, wanted = (float)(c->n_ranks * (c->n_ranks + 1) / 2);
    size_t i = 0;
    memset(x, 0, n * 4);
    for (size_t k = 0; k < n; k += 301)
        x[k] = (float)(c->rank + 1);
    CUDA_OK(cudaMemcpyAsync(m->in_d, m->in, n * 4, cudaMemcpyHostToDevice, m->on));
    CHECK_OK(sum(c, n, SPCCL_FLOAT32));
    CUDA_OK(cudaMemcpyAsync(m->got, m->out_d, n * 4, cudaMemcpyDeviceToHost, m->on));
    CHECK_OK(spccl_cuda_wait(c->comm, m->on, wait_ms()));
    while (i < n && got[i] == (i % 301 == 0 ? wanted : 0))
        i++;
    CHECK(i == n, "rank %d: element %zu of %zu is %g", c->rank, i, n, i < n ? (double)got[i] : 0);
}

/* ---- results ---- */

/* Calls with other limits follow one another on the stream without a wait in between. A rank may then be ahead of
 * its peers by several calls. */
static void changes(struct rank_ctx *c)
{
    const struct rank_buffer *m = &rank_buffers[c->rank];
    spccl_cuda_stats s = {.struct_bytes = sizeof s};
    if (!attach_gpu(c->comm, c->rank, GROUP_CTAS))
        return;
    CHECK_OK(spccl_cuda_get_stats(c->comm, &s));
    CHECK(s.n_ctas >= 2 && s.n_ctas <= GROUP_CTAS, "%u blocks", s.n_ctas);
    const uint64_t limits[] = {1, 0, 2, s.n_ctas, 1, s.n_ctas - 1};
    for (size_t i = 0; i < N_LIMITS; i++) {
        limit(c, limits[i]);
        check_call(c, FEW);
        check_call(c, MANY);
        check_sparse(c, MANY);
    }
    load_input(c, MANY);
    for (size_t i = 0; i < 6 * N_LIMITS; i++) {
        limit(c, limits[i % N_LIMITS]);
        CHECK_OK(spccl_cuda_broadcast(c->comm, m->spare_d, i % 3 == 0 ? 20000 : 700, SPCCL_INT32, 1, m->on));
        CHECK_OK(sum(c, i % 2 == 0 ? FEW : MANY, SPCCL_FLOAT32));
    }
    CHECK_OK(sum(c, MANY, SPCCL_FLOAT32));
    check_sums(c, MANY);
}

static void test_changes(void)
{
    run_scene(2, changes, NULL);
    run_scene(N_RANKS, changes, NULL);
}

/* ---- ranks that disagree ---- */

static spccl_status await_broken(struct rank_ctx *c)
{
    int64_t until = now_ms() + wait_ms();
    spccl_status st;
    while ((st = spccl_comm_async_error(c->comm)) == SPCCL_OK && now_ms() < until)
        sleep_ms(1);
    return st;
}

static void meet(_Atomic int *n, int n_ranks)
{
    int64_t until = now_ms() + wait_ms();
    ++*n;
    while (*n < n_ranks && now_ms() < until)
        sleep_ms(1);
    CHECK(*n == n_ranks, "%d of %d ranks have come", *n, n_ranks);
}

static void disagrees(struct rank_ctx *c)
{
    struct scene *s = c->arg;
    const struct rank_buffer *m = &rank_buffers[c->rank];
    char mine[64], theirs[64];
    spccl_status st;
    int other;
    if (!attach_gpu(c->comm, c->rank, GROUP_CTAS))
        return;
    check_works(c);
    load_input(c, s->n);
    meet(&s->n_here, c->n_ranks);
    limit(c, s->limits[c->rank]);
    CHECK_OK(sum(c, s->n, SPCCL_FLOAT32));
    (void)spccl_cuda_wait(c->comm, m->on, wait_ms());
    st = await_broken(c);
    /* The first rank that sees it tells the others, who then fail with its text. */
    CHECK(st == SPCCL_ERR_MISMATCH ||
              (st == SPCCL_ERR_ABORTED && strstr(spccl_last_error(), "disagree") != NULL),
          "rank %d: %s: %s", c->rank, spccl_status_name(st), spccl_last_error());
    if (st == SPCCL_ERR_MISMATCH) {
        snprintf(mine, sizeof mine, "rank %d with max_ctas %d", c->rank, (int)s->limits[c->rank]);
        other = s->limits[c->rank] == s->limits[0] ? 1 : 0;
        snprintf(theirs, sizeof theirs, "called it with max_ctas %d", (int)s->limits[other]);
        CHECK(strstr(spccl_last_error(), mine) != NULL && strstr(spccl_last_error(), theirs) != NULL &&
                  strstr(spccl_last_error(), "spccl_cuda_set_options") != NULL,
              "rank %d: %s", c->rank, spccl_last_error());
    }
    sync_stream(m->on);
    meet(&s->n_ended, c->n_ranks); /* a rank that leaves earlier would be taken for dead */
}

static void test_disagreement(void)
{
    static const uint64_t others[] = {0, 1};
    for (int i = 0; i < (is_small ? 2 : 4); i++) {
        struct scene s = {.n = i % 2 == 0 ? FEW : MANY, .limits = {2, others[i / 2], 2}};
        run_scene(i == 0 ? 2 : N_RANKS, disagrees, &s);
    }
}

/* ---- captured graphs ---- */

static void captured(struct rank_ctx *c)
{
    const struct rank_buffer *m = &rank_buffers[c->rank];
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    if (!attach_gpu(c->comm, c->rank, GROUP_CTAS))
        return;
    check_works(c);
    limit(c, 2);
    CUDA_OK(cudaStreamBeginCapture(m->on, cudaStreamCaptureModeThreadLocal));
    CHECK_OK(sum(c, MANY, SPCCL_FLOAT32));
    CUDA_OK(cudaStreamEndCapture(m->on, &graph));
    CUDA_OK(cudaGraphInstantiate(&exec, graph, 0));
    for (uint64_t i = 0; i < 4; i++) {
        limit(c, i % 3);
        check_call(c, FEW);
        /* Now each rank has another limit. The graph has the one of its capture, so the ranks agree. */
        limit(c, (i + (uint64_t)c->rank) % 3);
        load_input(c, MANY);
        CUDA_OK(cudaGraphLaunch(exec, m->on));
        check_sums(c, MANY);
    }
    CHECK_OK(spccl_comm_async_error(c->comm));
    (void)all_here(c->comm);
    CUDA_OK(cudaGraphExecDestroy(exec));
    CUDA_OK(cudaGraphDestroy(graph));
}

static void test_graph(void)
{
    run_scene(2, captured, NULL);
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {
        {"changes", test_changes}, {"disagreement", test_disagreement}, {"graph", test_graph}, {NULL, NULL}};
    cuda_test_start(&argc, argv);
    make_rank_buffers(N_RANKS, CAP);
    return test_main(cases, argc, argv);
}
