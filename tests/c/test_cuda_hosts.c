/* test_cuda_hosts.c - collectives of GPUs on several hosts: ranks are threads, and their hosts have different names.
 * Between hosts proxies carry the rings over TCP on loopback. The results must have the same bits as the host's
 * collectives. Slow proxies, cut connections and wrong positions must end in the right result or in an error
 * that names a rank, in time. */
#include "cuda_cases.h"
#include "cuda_sums.h"

#include "core/gpu/proxy.h"
#include "transport/fault.h"

#include <dirent.h>

#define N_RANKS_MAX 8
/* Every collective must end this soon, also on a busy machine. */
#define SOON_MS 60000
/* A deadline that no test waits for. */
#define LONG_MS 120000

/* ---- right results ---- */

/* The next groups have so many proxies per rank: 1, 2, 3, 5, and again. */
static void next_proxies(void)
{
    static const char *const counts[] = {"1", "2", "3", "5"};
    static unsigned n;
    setenv("SPCCL_CUDA_PROXIES", counts[n++ % 4], 1);
}

static void run_hosts(int n_hosts, int n_per_host, struct group g)
{
    next_proxies();
    test_ranks_per_host = n_per_host;
    g.n_ranks = n_hosts * n_per_host;
    run_group(&g);
}

/* All collectives, dtypes and operations on 2 hosts of 2 ranks; on others random ones. Random sizes and zeros. */
static void test_shapes(void)
{
    static const int shapes[][2] = {{2, 2}, {2, 1}, {4, 1}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        struct group g = {.format = SPCCL_FORMAT_AUTO, .every_op = i == 0, .n_random = i == 0 ? 5 : 15};
        if (is_small) {
            g.every_op = false;
            g.n_random = 4;
        }
        if (!is_small || i == 1) /* there are 2 ranks */
            run_hosts(shapes[i][0], shapes[i][1], g);
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

static void test_proxies(void)
{
    struct rank_ctx ctx[RANKS_CAP];
    spccl_config config = SPCCL_CONFIG_INIT;
    config.transports = "tcp";
    test_ranks_per_host = 1;
    setenv("SPCCL_CUDA_PROXIES", "3", 1);
    run_ranks(2, &config, has_three_proxies, NULL, ctx);
    for (int r = 0; r < 2; r++)
        CHECK(ctx[r].created == SPCCL_OK, "rank %d: %s", r, ctx[r].error);
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
        struct group g = {.format = SPCCL_FORMAT_AUTO, .max_ctas = 1, .n_random = is_small ? 2 : 4};
        sp_fault = (sp_fault_plan){.inner = "tcp", .seed = test_rand(), .hold_one_in = hold};
        run_hosts(2, hold == 2 ? 1 : 2, g);
    }
    sp_fault = (sp_fault_plan){.inner = "tcp"};
    group_transports = "tcp";
}

/* Dense frames leave a quarter of a frame free at the end of each ring. Those bytes do not travel. */
static void sends_frames_alone(struct rank_ctx *c)
{
    const struct rank_buffer *m = &rank_buffers[c->rank];
    spccl_cuda_stats stats = {.struct_bytes = sizeof stats};
    const sp_proxies *r;
    uint64_t sent = 0;
    size_t n = total_bytes() / 4 / (size_t)c->n_ranks;
    if (!attach_gpu(c->comm, c->rank, 1))
        return;
    memset(m->in, 0x3f, n * 4); /* no zeros */
    CUDA_OK(cudaMemcpyAsync(m->in_d, m->in, n * 4, cudaMemcpyHostToDevice, m->on));
    CHECK_OK(spccl_cuda_all_gather(c->comm, m->in_d, m->out_d, n, SPCCL_FLOAT32, m->on));
    CHECK_OK(spccl_cuda_wait(c->comm, m->on, wait_ms()));
    CHECK_OK(spccl_cuda_get_stats(c->comm, &stats));
    (void)all_here(c->comm); /* all frames have come, so all were sent */
    r = ((sp_gpu_comm *)atomic_load(&c->comm->gpu))->proxies;
    for (uint32_t k = 0; k < r->n_proxies; k++)
        sent += r->proxies[k].n_bytes_sent;
    CHECK(sent >= stats.wire_bytes_sent && sent - stats.wire_bytes_sent < stats.wire_bytes_sent / 40,
          "rank %d: proxies sent %llu bytes for frames of %llu", c->rank, (unsigned long long)sent,
          (unsigned long long)stats.wire_bytes_sent);
}

static void test_skipped_bytes(void)
{
    struct rank_ctx ctx[RANKS_CAP];
    spccl_config config = SPCCL_CONFIG_INIT;
    next_proxies();
    config.transports = "tcp";
    test_ranks_per_host = 1;
    run_ranks(2, &config, sends_frames_alone, NULL, ctx);
    for (int r = 0; r < 2; r++)
        CHECK(ctx[r].created == SPCCL_OK, "rank %d: %s", r, ctx[r].error);
}

/* ---- errors ---- */

struct scene {
    size_t n;
    sp_fault_plan plan; /* of the proxies */
    int n_calls;
    bool may_work;
    _Atomic int n_here, n_attached, n_ended, n_errors;
};

static bool wait_for_ranks(const struct rank_ctx *c, _Atomic int *n)
{
    int64_t until = now_ms() + SOON_MS;
    ++*n;
    while (*n < c->n_ranks && now_ms() < until)
        sleep_ms(1);
    CHECK(*n == c->n_ranks, "rank %d: only %d of %d ranks have come", c->rank, *n, c->n_ranks);
    return *n == c->n_ranks;
}

/* Collectives until one fails. The kernel must end, and the GPU must be usable. */
static void fails(struct rank_ctx *c)
{
    struct scene *s = c->arg;
    const struct rank_buffer *m = &rank_buffers[c->rank];
    int64_t start = now_ms();
    spccl_status st = SPCCL_OK;
    if (!wait_for_ranks(c, &s->n_here))
        return;
    sp_fault = s->plan; /* all endpoints of the links are open, those of the proxies are not */
    if (!attach_gpu(c->comm, c->rank, 1) ||
        !wait_for_ranks(c, &s->n_attached)) /* a fault may end an attach too */
        return;
    load_input(c, s->n);
    for (int i = 0; st == SPCCL_OK && i < s->n_calls; i++) {
        st = sum(c, s->n, SPCCL_FLOAT32);
        if (st == SPCCL_OK)
            st = spccl_cuda_wait(c->comm, m->on, SOON_MS);
    }
    if (st != SPCCL_OK) {
        s->n_errors++;
        CHECK(strstr(spccl_last_error(), "rank") != NULL, "an error that names no rank: \"%s\"",
              spccl_last_error());
        CHECK(st != SPCCL_ERR_BUG, "\"%s\"", spccl_last_error());
    }
    sync_stream(m->on);
    CHECK(now_ms() - start < SOON_MS, "rank %d: ended after %lld ms", c->rank, (long long)(now_ms() - start));
    (void)wait_for_ranks(c, &s->n_ended); /* a rank that leaves earlier would be taken for dead */
}

static void run_failing(int n_hosts, int n_per_host, struct scene *s)
{
    struct rank_ctx ctx[RANKS_CAP];
    spccl_config config = SPCCL_CONFIG_INIT;
    next_proxies();
    test_ranks_per_host = n_per_host;
    config.transports = "fault";
    config.timeout_ms = 8000;
    sp_fault = (sp_fault_plan){.inner = "tcp"};
    run_ranks(n_hosts * n_per_host, &config, fails, s, ctx);
    for (int r = 0; r < n_hosts * n_per_host; r++)
        CHECK(ctx[r].created == SPCCL_OK, "rank %d: %s", r, ctx[r].error);
    CHECK(s->may_work || s->n_errors == n_hosts * n_per_host, "%d errors of %d ranks", s->n_errors,
          n_hosts * n_per_host);
    /* A new group of the same ranks must work. */
    sp_fault = (sp_fault_plan){.inner = "tcp"};
    run_ranks(n_hosts * n_per_host, &config, attach_and_check, NULL, ctx);
}

/* The proxy of one rank drops all its connections after some messages, as if the rank had died. */
static void test_cut(void)
{
    static const unsigned cut_after[] = {1, 2, 20};
    for (size_t i = 0; i < sizeof cut_after / sizeof *cut_after; i += is_small ? 3 : 1) {
        struct scene s = {.n = 60000, .n_calls = 1000};
        s.plan = (sp_fault_plan){.inner = "tcp", .cut_after = cut_after[i], .cut_rank = (int)i % 2};
        run_failing(2, i == 2 ? 2 : 1, &s);
    }
}

/* Bits of the positions of some messages are flipped. */
static void test_flipped(void)
{
    for (int i = 0; i < (is_small ? 1 : 3); i++) {
        struct scene s = {.n = 60000, .n_calls = 30, .may_work = true};
        unsigned before = sp_fault_n_flipped();
        s.plan = (sp_fault_plan){
            .inner = "tcp", .seed = test_rand(), .flip_one_in = 3, .flip_within = i % 2 == 0 ? 40 : 200};
        run_failing(2 + i / 2, 1, &s);
        CHECK(sp_fault_n_flipped() != before, "nothing was flipped");
    }
}

/* A rank does not come: the others' deadlines pass, also those of ranks on its host. */
static void stays_away(struct rank_ctx *c)
{
    struct scene *s = c->arg;
    spccl_status st = SPCCL_OK;
    int64_t until;
    if (!attach_gpu(c->comm, c->rank, 0))
        return;
    load_input(c, s->n);
    CHECK_OK(spccl_comm_set_timeout(c->comm, 1500));
    if (!wait_for_ranks(c, &s->n_here))
        return;
    until = now_ms() + SOON_MS;
    if (c->rank != 1) {
        CHECK_OK(sum(c, s->n, SPCCL_FLOAT32));
        st = spccl_cuda_wait(c->comm, rank_buffers[c->rank].on, SOON_MS);
        CHECK(strstr(spccl_last_error(), "rank 1") != NULL, "rank %d: \"%s\" does not name rank 1", c->rank,
              spccl_last_error());
    }
    while (c->rank == 1 && (st = spccl_comm_async_error(c->comm)) == SPCCL_OK && now_ms() < until)
        sleep_ms(1);
    CHECK(st == SPCCL_ERR_TIMEOUT || st == SPCCL_ERR_ABORTED, "rank %d: %s: %s", c->rank,
          spccl_status_name(st), spccl_last_error());
    (void)wait_for_ranks(c, &s->n_ended);
}

static void test_missing_rank(void)
{
    for (int i = 0; i < (is_small ? 1 : 2); i++) {
        struct rank_ctx ctx[RANKS_CAP];
        struct scene s = {.n = i == 0 ? FEW : 60000};
        spccl_config config = SPCCL_CONFIG_INIT;
        config.transports = "tcp";
        test_ranks_per_host = 1 + i;
        run_ranks(2 + 2 * i, &config, stays_away, &s, ctx);
    }
}

/* One call of the proxies' transport fails on rank 1 while the ranks attach their GPUs. */
static void attach_fails(struct rank_ctx *c)
{
    struct scene *s = c->arg;
    spccl_cuda_config config = SPCCL_CUDA_CONFIG_INIT;
    int64_t start;
    spccl_status st;
    if (!wait_for_ranks(c, &s->n_here))
        return;
    sp_fault = s->plan; /* all endpoints of the links are open, those of the proxies are not */
    if (!all_here(c->comm))
        return;
    start = now_ms();
    config.device = rank_buffers[c->rank].device;
    st = spccl_cuda_attach(c->comm, &config);
    CHECK(st == SPCCL_ERR_SYSTEM || st == SPCCL_ERR_UNREACHABLE, "%s, rank %d: %s: %s", s->plan.fails,
          c->rank, spccl_status_name(st), spccl_last_error());
    CHECK(strstr(spccl_last_error(), "rank 1") != NULL, "%s, rank %d: \"%s\" does not name rank 1",
          s->plan.fails, c->rank, spccl_last_error());
    CHECK(now_ms() - start < LONG_MS / 2, "%s, rank %d: attach failed only after %lld ms", s->plan.fails,
          c->rank, (long long)(now_ms() - start));
    if (!wait_for_ranks(c, &s->n_ended))
        return;
    sp_fault = (sp_fault_plan){.inner = "tcp"};
    if (all_here(c->comm) && attach_gpu(c->comm, c->rank, 0))
        check_works(c);
}

static void test_attach_fails(void)
{
    static const char *const calls[] = {"address", "add_peer", "connect_step"};
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        struct scene s = {.plan = {.inner = "tcp", .fails = calls[i], .fails_rank = 1}};
        struct rank_ctx ctx[RANKS_CAP];
        spccl_config config = SPCCL_CONFIG_INIT;
        int n = is_small ? 2 : 3;
        next_proxies();
        config.transports = "fault";
        config.timeout_ms = LONG_MS;
        test_ranks_per_host = 1;
        sp_fault = (sp_fault_plan){.inner = "tcp"};
        run_ranks(n, &config, attach_fails, &s, ctx);
        for (int r = 0; r < n; r++)
            CHECK(ctx[r].created == SPCCL_OK, "rank %d: %s", r, ctx[r].error);
    }
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
        struct rank_ctx ctx[RANKS_CAP];
        spccl_config config = SPCCL_CONFIG_INIT;
        next_proxies();
        config.transports = "tcp";
        test_ranks_per_host = 1 + i;
        run_ranks(2 + 2 * i, &config, replays, NULL, ctx);
        for (int r = 0; r < 2 + 2 * i; r++)
            CHECK(ctx[r].created == SPCCL_OK, "rank %d: %s", r, ctx[r].error);
    }
}

/* ---- the setting ---- */

static void is_refused(struct rank_ctx *c)
{
    spccl_cuda_config config = SPCCL_CUDA_CONFIG_INIT;
    spccl_status st;
    config.device = rank_buffers[c->rank].device;
    st = spccl_cuda_attach(c->comm, &config);
    CHECK(st == SPCCL_ERR_UNREACHABLE && strstr(spccl_last_error(), "SPCCL_CUDA_BETWEEN_HOSTS=0") != NULL,
          "rank %d: %s: %s", c->rank, spccl_status_name(st), spccl_last_error());
}

static void test_off_by_default(void)
{
    struct rank_ctx ctx[RANKS_CAP];
    test_ranks_per_host = 1;
    unsetenv("SPCCL_CUDA_BETWEEN_HOSTS");
    run_ranks(2, NULL, is_refused, NULL, ctx);
    setenv("SPCCL_CUDA_BETWEEN_HOSTS", "1", 1);
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {{"off_by_default", test_off_by_default},
                                             {"shapes", test_shapes},
                                             {"variants", test_variants},
                                             {"proxies", test_proxies},
                                             {"skips", test_skips},
                                             {"skipped_bytes", test_skipped_bytes},
                                             {"slow_proxies", test_slow_proxies},
                                             {"cut", test_cut},
                                             {"flipped", test_flipped},
                                             {"missing_rank", test_missing_rank},
                                             {"attach_fails", test_attach_fails},
                                             {"graphs", test_graphs},
                                             {NULL, NULL}};
    cuda_test_start(&argc, argv);
    setenv("SPCCL_CUDA_BETWEEN_HOSTS", "1", 1);
    setenv("SPCCL_SCHEDULE", "direct", 1); /* so that kernels wait in both hops */
    group_transports = "tcp";
    make_rank_buffers(is_small ? 2 : N_RANKS_MAX, total_bytes() + 4 * GUARD_BYTES);
    return test_main(cases, argc, argv);
}
