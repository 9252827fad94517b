/* test_cuda_hosts.c - collectives of GPUs on several hosts (cuda_hosts.h): the results must have the same bits as the
 * host's collectives. */
#include "cuda_hosts.h"

#include "core/gpu/proxy/proxy.h"

#include <dirent.h>

/* ---- right results ---- */

/* All collectives, dtypes and operations on 2 hosts of 2 ranks, with relays and without; on others random ones. Random
 * sizes and zeros. */
static void test_shapes(void)
{
    static const struct {
        int n_hosts, n_per_host;
        const char *schedule;
    } shapes[] = {{2, 2, "relayed"}, {2, 1, "direct"}, {2, 2, "direct"}, {4, 1, "relayed"}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        struct group g = {.format = SPCCL_FORMAT_AUTO,
                          .every_op = i == 0,
                          .n_random = i == 0 ? 5 : 15,
                          .schedule = shapes[i].schedule};
        if (is_small) {
            g.every_op = false;
            g.n_random = 4;
        }
        if (!is_small || i == 1) /* there are 2 ranks */
            run_hosts(shapes[i].n_hosts, shapes[i].n_per_host, g);
    }
}

/* 2 hosts of 4 ranks; one hop; few workers, whose rings fill; forced formats. */
static void test_variants(void)
{
    static const struct group one_hop = {0, SPCCL_FORMAT_AUTO, 0, false, 6, 0, "oneshot"};
    static const struct group few = {0, SPCCL_FORMAT_AUTO, 1, false, 8, 0, "auto"};
    static const struct group pici = {0, SPCCL_FORMAT_PICI, 2, false, 4, 0, NULL};
    static const struct group any = {0, SPCCL_FORMAT_AUTO, 0, false, 6, 0, "auto"};
    run_hosts(2, 1, few);
    if (is_small)
        return;
    run_hosts(2, 2, one_hop);
    run_hosts(4, 1, pici);
    run_hosts(3, 1, few);
    run_hosts(2, 4, any);
}

/* Threads of this process whose name is that of a proxy. */
static int count_proxies(void)
{
    int n = 0;
    DIR *tasks = opendir("/proc/self/task");
    const struct dirent *d;
    while (tasks != NULL && (d = readdir(tasks)) != NULL) {
        char path[300], name[32] = "";
        FILE *f;
        snprintf(path, sizeof path, "/proc/self/task/%s/comm", d->d_name);
        f = fopen(path, "re");
        n += f != NULL && fgets(name, sizeof name, f) != NULL && strcmp(name, "spccl-proxy\n") == 0;
        if (f != NULL)
            fclose(f);
    }
    if (tasks != NULL)
        closedir(tasks);
    return n;
}

static void has_three_proxies(struct rank_ctx *c)
{
    if (!attach_gpu(c->comm, c->rank, 0) || !all_here(c->comm))
        return;
    CHECK(count_proxies() == 3 * c->n_ranks, "%d proxies of %d ranks; wanted 3 each", count_proxies(),
          c->n_ranks);
    check_works(c);
    (void)all_here(c->comm);
}

/* Two hosts, joined by tcp. */
static void two_hosts(int per_host, spccl_format format, void (*fn)(struct rank_ctx *), void *arg)
{
    struct rank_ctx ctx[RANKS_CAP];
    spccl_config config = SPCCL_CONFIG_INIT;
    config.transports = "tcp";
    config.format = format;
    test_ranks_per_host = per_host;
    run_ranks(2 * per_host, &config, fn, arg, ctx);
    for (int r = 0; r < 2 * per_host; r++)
        CHECK(ctx[r].created == SPCCL_OK, "rank %d: %s", r, ctx[r].error);
}

static void test_proxies(void)
{
    setenv("SPCCL_DEBUG_CUDA_PROXIES", "3", 1);
    two_hosts(1, SPCCL_FORMAT_AUTO, has_three_proxies, NULL);
}

/* The figures of a group on 2 hosts of 2 ranks, and the way of each pair. */
static void has_figures(struct rank_ctx *c)
{
    spccl_cuda_stats s = {.struct_bytes = sizeof s};
    if (!attach_gpu(c->comm, c->rank, 0))
        return;
    CHECK_OK(spccl_cuda_get_stats(c->comm, &s));
    CHECK(s.n_proxies == 3 && s.n_remote == 2 && s.pinned_bytes > 0 && s.pinned_bytes <= (uint64_t)512 << 20,
          "%u proxies, %u peers on other hosts, %llu pinned bytes", s.n_proxies, s.n_remote,
          (unsigned long long)s.pinned_bytes);
    for (int p = 0; p < c->n_ranks; p++) {
        const char *text = "", *here = "; GPU: writes to mapped memory of the peer (";
        if (p == c->rank)
            continue;
        CHECK_OK(spccl_comm_describe_link(c->comm, p, &text));
        CHECK(
            strstr(text, p / 2 == c->rank / 2 ? here : "; GPU: 3 proxies over tcp, rings in pinned memory") !=
                NULL,
            "rank %d to %d: %s", c->rank, p, text);
    }
    check_works(c);
}

static void test_figures(void)
{
    setenv("SPCCL_DEBUG_CUDA_PROXIES", "3", 1);
    two_hosts(2, SPCCL_FORMAT_AUTO, has_figures, NULL);
}

/* A worker knows from the launch before how many bytes of the next frame to copy first. */
static void keeps_first_bytes(struct rank_ctx *c)
{
    sp_remote_state *states;
    sp_gpu_comm *g;
    sp_ring_area area;
    uint32_t most = 0;
    if (!attach_gpu(c->comm, c->rank, 1))
        return;
    g = atomic_load(&c->comm->gpu);
    area = sp_remote_inbox_area(g->shape);
    states = calloc(g->shape.n_workers, sizeof *states);
    check_works(c);
    load_input(c, 60000);
    CHECK_OK(sum(c, 60000, SPCCL_FLOAT32));
    CHECK_OK(spccl_cuda_wait(c->comm, rank_buffers[c->rank].on, 120000));
    CHECK_OK(g->ops->read(states, g->inboxes[c->rank] + sp_remote_state_off(&area, 0),
                          g->shape.n_workers * sizeof *states));
    for (uint32_t w = 0; w < g->shape.n_workers; w++)
        for (uint32_t i = 0; i < SP_REMOTE_LINKS_MAX; i++)
            most = states[w].first_bytes[i] > most ? states[w].first_bytes[i] : most;
    CHECK(most > 512, "rank %d: %u bytes, although frames were longer", c->rank, most);
    free(states);
}

static void test_first_bytes(void)
{
    two_hosts(2, SPCCL_FORMAT_DENSE, keeps_first_bytes, NULL);
}

/* All slices have 320 nonzeros of 2048: a frame has 64 + 16 + 320 + 1280 bytes. Behind 21 frames 48 bytes of a ring
 * are left, and no header fits there. The receiver gives credit for them before the sender has skipped them. */
static void skips(struct rank_ctx *c)
{
    const struct rank_buffer *m = &rank_buffers[c->rank];
    size_t n = is_small ? 65536 : 262144;
    float *x = (float *)(void *)m->in, wanted = (float)(c->n_ranks * (c->n_ranks + 1) / 2);
    const float *got = (const float *)(const void *)m->got;
    if (!attach_gpu(c->comm, c->rank, 1))
        return;
    for (size_t i = 0; i < n; i++)
        x[i] = i % 32 < 5 ? (float)(c->rank + 1) : 0;
    CUDA_OK(cudaMemcpyAsync(m->in_d, m->in, n * 4, cudaMemcpyHostToDevice, m->on));
    for (int k = 0; k < (is_small ? 4 : 20); k++) {
        size_t i = 0;
        CHECK_OK(sum(c, n, SPCCL_FLOAT32));
        CHECK_OK(spccl_cuda_wait(c->comm, m->on, wait_ms()));
        CUDA_OK(cudaMemcpyAsync(m->got, m->out_d, n * 4, cudaMemcpyDeviceToHost, m->on));
        sync_stream(m->on);
        while (i < n && got[i] == (i % 32 < 5 ? wanted : 0))
            i++;
        CHECK(i == n, "rank %d, call %d: element %zu of %zu", c->rank, k, i, n);
        if (i != n || spccl_comm_async_error(c->comm) != SPCCL_OK)
            return;
    }
}

static void test_skips(void)
{
    struct rank_ctx ctx[RANKS_CAP];
    spccl_config config = SPCCL_CONFIG_INIT;
    config.transports = "fault"; /* slow: receivers take all frames before the next one comes */
    config.timeout_ms = is_small || is_slow ? 60000 : 5000;
    sp_fault = (sp_fault_plan){.inner = "tcp", .seed = test_rand(), .hold_one_in = 2};
    test_ranks_per_host = 1;
    run_ranks(2, &config, skips, NULL, ctx);
    sp_fault = (sp_fault_plan){.inner = "tcp"};
    for (int r = 0; r < 2; r++)
        CHECK(ctx[r].created == SPCCL_OK, "rank %d: %s", r, ctx[r].error);
}

/* Proxies whose calls return AGAIN at random although they could go on. */
static void test_slow_proxies(void)
{
    group_transports = "fault";
    for (unsigned hold = 2; hold <= (is_small ? 2 : 8); hold *= 4) {
        struct group g = {
            .format = SPCCL_FORMAT_AUTO, .max_ctas = 1, .n_random = is_small ? 2 : 4, .schedule = "relayed"};
        sp_fault = (sp_fault_plan){.inner = "tcp", .seed = test_rand(), .hold_one_in = hold};
        run_hosts(2, hold == 2 ? 1 : 2, g);
    }
    sp_fault = (sp_fault_plan){.inner = "tcp"};
    group_transports = "tcp";
}

/* Proxies that poll for long let credits wait (sp_proxy_may_wait), as on machines with many cores. */
static void test_credits_wait(void)
{
    struct group g = {.format = SPCCL_FORMAT_AUTO, .n_random = is_small ? 4 : 12, .schedule = "direct"};
    setenv("SPCCL_DEBUG_SPIN_US", "1000", 1);
    run_hosts(2, 1, g);
    g.max_ctas = 1; /* the rings fill */
    run_hosts(2, 1, g);
    unsetenv("SPCCL_DEBUG_SPIN_US");
}

/* ---- graphs ---- */

static void replays(struct rank_ctx *c)
{
    const struct rank_buffer *m = &rank_buffers[c->rank];
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    if (!attach_gpu(c->comm, c->rank, 0))
        return;
    check_works(c);
    CUDA_OK(cudaStreamBeginCapture(m->on, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < 3; i++)
        CHECK_OK(sum(c, FEW * 20, SPCCL_FLOAT32));
    CUDA_OK(cudaStreamEndCapture(m->on, &graph));
    CUDA_OK(cudaGraphInstantiate(&exec, graph, 0));
    load_input(c, FEW * 20);
    for (int i = 0; i < 4 && all_here(c->comm); i++) {
        if (i == 3)
            sleep_ms(300); /* the proxies sleep by then; no call of the library wakes them */
        CUDA_OK(cudaGraphLaunch(exec, m->on));
        check_sums(c, FEW * 20);
    }
    CUDA_OK(cudaGraphExecDestroy(exec));
    CUDA_OK(cudaGraphDestroy(graph));
}

static void test_graphs(void)
{
    for (int i = 0; i < (is_small ? 1 : 2); i++) {
        next_proxies();
        relay_results();
        two_hosts(1 + i, SPCCL_FORMAT_AUTO, replays, NULL);
    }
}

/* ---- the setting ---- */

static void test_setting(void)
{
    char refused[] = "SPCCL_CUDA_ROUTE=one-host", declined[] = "SPCCL_CUDA_ROUTE=nccl or stage";
    setenv("SPCCL_CUDA_ROUTE", "one-host", 1);
    two_hosts(1, SPCCL_FORMAT_AUTO, is_refused, refused);
    setenv("SPCCL_CUDA_ROUTE", "stage", 1);
    two_hosts(1, SPCCL_FORMAT_AUTO, is_refused, declined);
    unsetenv("SPCCL_CUDA_ROUTE"); /* auto, and the transport is tcp */
    two_hosts(1, SPCCL_FORMAT_AUTO, attach_and_check, NULL);
    setenv("SPCCL_CUDA_ROUTE", "spccl", 1);
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {{"setting", test_setting},
                                             {"shapes", test_shapes},
                                             {"variants", test_variants},
                                             {"proxies", test_proxies},
                                             {"skips", test_skips},
                                             {"slow_proxies", test_slow_proxies},
                                             {"credits_wait", test_credits_wait},
                                             {"graphs", test_graphs},
                                             {"figures", test_figures},
                                             {"first_bytes", test_first_bytes},
                                             {NULL, NULL}};
    start_hosts(&argc, argv, 8);
    return test_main(cases, argc, argv);
}
