/* test_cuda_net.c - collectives of GPUs on several hosts (cuda_hosts.h) whose proxies use transport ncclnet, over the
 * plugin of net_plugin/, or ib (TEST_ONLY_TRANSPORT): right results, dead peers, and calls of the plugin that fail or
 * hang. */
#include "cuda_hosts.h"

#include "spccl_channel.h"

/* In the virtual machine, without hardware support, GPUs in software take about 10 times as long. */
#if defined(TEST_ONLY_TRANSPORT)
#define NETWORK TEST_ONLY_TRANSPORT
#define IS_EMULATED true
#else
#define NETWORK "ncclnet"
#define IS_EMULATED false
#endif
/* A deadline for what must happen, also on a slow machine. */
#define SOON_MS 60000

static bool wait_for(const _Atomic int *n, int wanted)
{
    int64_t until = now_ms() + SOON_MS;
    while (*n < wanted && now_ms() < until)
        sleep_ms(1);
    CHECK(*n >= wanted, "only %d of %d have come", *n, wanted);
    return *n >= wanted;
}

static bool meet(_Atomic int *n, int wanted)
{
    ++*n;
    return wait_for(n, wanted);
}

static void check_created(const struct rank_ctx *ctx, int n_ranks)
{
    for (int r = 0; r < n_ranks; r++)
        CHECK(ctx[r].created == SPCCL_OK, "rank %d: %s", r, ctx[r].error);
}

/* ---- right results ---- */

static void test_shapes(void)
{
    static const struct {
        int n_hosts, n_per_host;
        const char *schedule;
    } shapes[] = {{2, 1, "direct"}, {2, 2, "relayed"}, {2, 2, "direct"}};
    group_transports = NETWORK;
    for (size_t i = 0; i < (IS_EMULATED ? 2 : sizeof shapes / sizeof *shapes); i++)
        run_hosts(shapes[i].n_hosts, shapes[i].n_per_host,
                  (struct group){.format = SPCCL_FORMAT_AUTO,
                                 .max_ctas = i == 1,
                                 .n_random = is_small ? 6 : 15,
                                 .schedule = shapes[i].schedule});
}

/* Proxies whose calls return AGAIN at random although they could go on. */
static void test_slow_proxies(void)
{
    group_transports = "fault";
    sp_fault = (sp_fault_plan){.inner = NETWORK, .seed = test_rand(), .hold_one_in = 3};
    run_hosts(
        2, 1,
        (struct group){.format = SPCCL_FORMAT_AUTO, .max_ctas = 1, .n_random = 4, .schedule = "relayed"});
    sp_fault = (sp_fault_plan){.inner = NETWORK};
}

/* `spccl info` says for each GPU and device whether the device could reach the GPU's memory. Software RoCE cannot. */
static void test_direct(void)
{
    spccl_info_entry e = {.struct_bytes = sizeof e};
    int n = 0;
    for (size_t i = 0; spccl_info(i, &e) == SPCCL_OK; i++) {
        if (strcmp(e.kind, "GPUDirect") != 0)
            continue;
        n++;
        CHECK(strstr(e.why, "(" NETWORK "): no: ") != NULL, "%s: %s", e.name, e.why);
        CHECK(strstr(e.why, "rxe0") == NULL ||
                  strstr(e.why,
                         "rxe0 (ib): no: its driver registers no dmabuf (Operation not supported), and "
                         "the kernel module nvidia_peermem is not loaded") != NULL,
              "%s: %s", e.name, e.why);
    }
    CHECK(n == n_gpus || n == 16, "entries of %d GPUs, wanted %d", n, n_gpus);
}

/* ---- the setting ---- */

/* By default a group whose hosts are connected by RDMA is left to the fallback. */
static void test_setting(void)
{
    struct rank_ctx ctx[RANKS_CAP];
    spccl_config config = SPCCL_CONFIG_INIT;
    char refused[] = "SPCCL_CUDA_ROUTE=auto and a link over RDMA";
    test_ranks_per_host = 1;
    config.transports = NETWORK;
    unsetenv("SPCCL_CUDA_ROUTE");
    run_ranks(2, &config, is_refused, refused, ctx);
    check_created(ctx, 2);
    setenv("SPCCL_CUDA_ROUTE", "spccl", 1);
}

/* ---- a peer dies ---- */

struct scene {
    sp_fault_plan plan; /* of the proxies */
    _Atomic int n_here, n_attached, n_ended, n_errors;
};

/* Collectives until one fails. The kernel must end, and the error must name a rank. */
static void sums_fail(struct rank_ctx *c, const char *word, _Atomic int *n_named)
{
    const struct rank_buffer *m = &rank_buffers[c->rank];
    int64_t until = now_ms() + SOON_MS;
    spccl_status st = SPCCL_OK;
    load_input(c, FEW * 20);
    while (st == SPCCL_OK && now_ms() < until) {
        st = sum(c, FEW * 20, SPCCL_FLOAT32);
        if (st == SPCCL_OK)
            st = spccl_cuda_wait(c->comm, m->on, SOON_MS);
    }
    CHECK(st == SPCCL_ERR_PEER || st == SPCCL_ERR_ABORTED, "rank %d: %s: %s", c->rank, spccl_status_name(st),
          spccl_last_error());
    CHECK(strstr(spccl_last_error(), "rank") != NULL, "\"%s\" names no rank", spccl_last_error());
    *n_named += strstr(spccl_last_error(), word) != NULL;
    sync_stream(m->on);
}

static void loses_peer(struct rank_ctx *c)
{
    struct scene *s = c->arg;
    if (!meet(&s->n_here, c->n_ranks))
        return;
    sp_fault = s->plan; /* all endpoints of the links are open, those of the proxies are not */
    if (!attach_gpu(c->comm, c->rank, 1) || !meet(&s->n_attached, c->n_ranks))
        return;
    sums_fail(c, "rank", &s->n_errors);
    (void)meet(&s->n_ended, c->n_ranks); /* a rank that leaves earlier would be taken for dead */
}

/* The proxy of one rank drops all its connections after some messages, as if the rank had died. Then a new group of the
 * same ranks must work. */
static void test_dead_peer(void)
{
    for (int n_per_host = 1; n_per_host <= (IS_EMULATED ? 1 : 2); n_per_host++) {
        struct rank_ctx ctx[RANKS_CAP];
        struct scene s = {.plan = {.inner = NETWORK, .cut_after = 20, .cut_rank = n_per_host - 1}};
        spccl_config config = SPCCL_CONFIG_INIT;
        int n_ranks = 2 * n_per_host;
        next_proxies();
        relay_results();
        test_ranks_per_host = n_per_host;
        config.transports = "fault";
        config.timeout_ms = SOON_MS;
        sp_fault = (sp_fault_plan){.inner = NETWORK};
        run_ranks(n_ranks, &config, loses_peer, &s, ctx);
        check_created(ctx, n_ranks);
        CHECK(s.n_errors == n_ranks, "%d errors of %d ranks", s.n_errors, n_ranks);
        sp_fault = (sp_fault_plan){.inner = NETWORK};
        config.transports = NETWORK;
        run_ranks(n_ranks, &config, attach_and_check, NULL, ctx);
        check_created(ctx, n_ranks);
    }
}

#if defined(NET_PLUGIN_FOLDER)
/* ---- calls of the plugin that fail or hang ---- */

/* Variables of the plugin. The first byte of `after` decides when calls fail: setenv would disturb other threads. */
static char fault[40], after[] = "TEST_NET_AFTER=999999999", times[40];

/* One call fails, or hangs, once start_fault was called. The plugin counts such calls of the whole process. */
static void plan_fault(const char *name, const char *call)
{
    static unsigned n_faults;
    snprintf(fault, sizeof fault, "%s=%s", name, call);
    snprintf(times, sizeof times, "TEST_NET_TIMES=%u", ++n_faults % 1000);
    after[strlen("TEST_NET_AFTER=")] = '9';
    putenv(fault);
    putenv(after);
    putenv(times);
}

static void start_fault(void)
{
    after[strlen("TEST_NET_AFTER=")] = '\0';
}

static void forget_faults(void)
{
    unsetenv("TEST_NET_FAIL");
    unsetenv("TEST_NET_HANG");
    unsetenv("TEST_NET_AFTER");
    unsetenv("TEST_NET_TIMES");
}

/* Two groups of the same GPUs, which take turns. A call of the plugin fails for the first; the other must go on.
 * If all ranks share a GPU, the other goes on only after the first was destroyed: destroying frees memory, which waits
 * for all kernels of the GPU, and a kernel ends only after the other rank has launched its own. */
struct two_groups {
    const char *word; /* in the error of the rank whose call failed */
    _Atomic int n_other_ready, n_attached, n_ended, n_destroyed, n_named;
};

static void fails_in_plugin(struct rank_ctx *c)
{
    struct two_groups *s = c->arg;
    if (!wait_for(&s->n_other_ready, 2) || !attach_gpu(c->comm, c->rank, 1))
        return;
    check_works(c);
    if (!meet(&s->n_attached, 2))
        return;
    if (c->rank == 0)
        start_fault();
    sums_fail(c, s->word, &s->n_named);
    (void)meet(&s->n_ended, 2);
}

static void goes_on(struct rank_ctx *c)
{
    struct two_groups *s = c->arg;
    if (!attach_gpu(c->comm, c->rank, 1))
        return;
    check_works(c);
    s->n_other_ready++;
    if (!wait_for(n_gpus > 1 ? &s->n_ended : &s->n_destroyed, 2))
        return;
    for (int i = 0; i < 5; i++)
        check_works(c);
}

struct other_group {
    struct rank_ctx ctx[RANKS_CAP];
    const spccl_config *config;
    struct two_groups *scene;
};

static void *run_other(void *arg)
{
    struct other_group *o = arg;
    run_ranks(2, o->config, goes_on, o->scene, o->ctx);
    return NULL;
}

static void run_two_groups(const char *word)
{
    struct two_groups s = {.word = word};
    spccl_config config = SPCCL_CONFIG_INIT;
    struct other_group other = {.config = &config, .scene = &s};
    struct rank_ctx ctx[RANKS_CAP];
    pthread_t thread;
    config.transports = "ncclnet";
    config.timeout_ms = SOON_MS;
    test_ranks_per_host = 1;
    next_proxies();
    relay_results();
    CHECK(pthread_create(&thread, NULL, run_other, &other) == 0, "a thread");
    run_ranks(2, &config, fails_in_plugin, &s, ctx);
    s.n_destroyed = 2;
    pthread_join(thread, NULL);
    check_created(ctx, 2);
    check_created(other.ctx, 2);
    CHECK(s.n_named >= 1, "no rank's error has \"%s\"", word);
    forget_faults();
    run_ranks(2, &config, attach_and_check, NULL, ctx);
    check_created(ctx, 2);
}

static void test_call_fails(void)
{
    static const char *const calls[] = {"isend", "test"};
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        plan_fault("TEST_NET_FAIL", calls[i]);
        run_two_groups(calls[i]);
    }
}

static void test_call_hangs(void)
{
    setenv("SPCCL_DEBUG_NET_PLUGIN_MS", "3000", 1);
    plan_fault("TEST_NET_HANG", "isend");
    run_two_groups("did not return");
    unsetenv("SPCCL_DEBUG_NET_PLUGIN_MS");
}

static void attaches_and_makes_channels(struct rank_ctx *c)
{
    spccl_channels_config config = SPCCL_CHANNELS_CONFIG_INIT;
    spccl_channels *channels = NULL;
    attach_and_check(c);
    config.kind = SPCCL_CHANNEL_PORT;
    config.window_bytes = 16;
    CHECK_OK(spccl_channels_create(c->comm, &config, &channels));
    spccl_channels_destroy(channels);
}

/* The plugin connects no pair: all messages take tcp, those of the proxies and of port channels too. Without tcp that
 * is an error. */
static void test_falls_back(void)
{
    struct rank_ctx ctx[RANKS_CAP];
    spccl_config config = SPCCL_CONFIG_INIT;
    test_ranks_per_host = 1;
    next_proxies();
    setenv("TEST_NET_FAIL", "connect", 1);
    config.transports = "ncclnet,tcp";
    run_ranks(2, &config, attaches_and_makes_channels, NULL, ctx);
    check_created(ctx, 2);
    config.transports = "ncclnet";
    run_ranks(2, &config, attach_and_check, NULL, ctx);
    for (int r = 0; r < 2; r++)
        CHECK(ctx[r].created == SPCCL_ERR_UNREACHABLE && strstr(ctx[r].error, "connect for rank") != NULL,
              "rank %d: %s", r, ctx[r].error);
    forget_faults();
}
#endif

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {
        {"direct", test_direct},
        {"setting", test_setting},
        {"shapes", test_shapes},
        {"slow_proxies", test_slow_proxies},
        {"dead_peer", test_dead_peer},
#if defined(NET_PLUGIN_FOLDER)
        {"call_fails", test_call_fails},
        {"call_hangs", test_call_hangs},
        {"falls_back", test_falls_back},
#endif
        {NULL, NULL}
    };
#if defined(NET_PLUGIN_FOLDER)
    setenv("SPCCL_NET_PLUGIN", NET_PLUGIN_FOLDER "/libnccl-net-test_all.so", 1);
#endif
    start_hosts(&argc, argv, 4);
    return test_main(cases, argc, argv);
}
