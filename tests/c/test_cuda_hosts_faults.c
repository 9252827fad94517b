/* test_cuda_hosts_faults.c - faults of GPU groups on several hosts (cuda_hosts.h): cut connections, wrong positions, ranks
 * that do not come and calls that fail must end in an error that names a rank, in time. */
#include "cuda_hosts.h"
#include "proxy_faults.h"

/* Every collective must end this soon, also on a busy machine. */
#define SOON_MS 60000
/* A deadline that no test waits for. */
#define LONG_MS 120000

struct scene {
    size_t n;
    sp_fault_plan plan; /* of the proxies */
    int n_calls;
    bool may_work;
    int absent, n_before;   /* rank `absent` does not come to call n_before */
    enum proxy_fault fault; /* of a proxy of rank 1 */
    const char *text;       /* that the errors have */
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
    config.timeout_ms = s->may_work ? 8000 : LONG_MS; /* after a flip ranks may wait for it */
    relay_results();
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
    static const unsigned cut_after[] = {1, 2, 20, 3, 60};
    for (size_t i = 0; i < sizeof cut_after / sizeof *cut_after; i += is_small ? 5 : 1) {
        struct scene s = {.n = 60000, .n_calls = 1000};
        s.plan = (sp_fault_plan){.inner = "tcp", .cut_after = cut_after[i], .cut_rank = (int)i % 2};
        run_failing(2, i >= 2 ? 2 : 1, &s);
    }
}

/* The same in a group of 32 ranks: those that exchange no results with the rank end too. */
static void test_cut_of_32(void)
{
    struct scene s = {.n = 60000, .n_calls = 1000};
    if (is_small)
        return;
    s.plan = (sp_fault_plan){.inner = "tcp", .cut_after = 40, .cut_rank = 13};
    run_failing(4, 8, &s);
}

/* Bits of the positions of some messages are flipped. */
static void test_flipped(void)
{
    for (int i = 0; i < (is_small ? 1 : 3); i++) {
        struct scene s = {.n = 60000, .n_calls = 30, .may_work = true};
        unsigned before = sp_fault_n_flipped();
        s.plan = (sp_fault_plan){
            .inner = "tcp", .seed = test_rand(), .flip_one_in = 3, .flip_within = i % 2 == 0 ? 40 : 200};
        run_failing(2 + i / 2, 1 + i % 2, &s);
        CHECK(sp_fault_n_flipped() != before, "nothing was flipped");
    }
}

/* A rank does not come to a call: the others' deadlines pass, also those of ranks on its host. */
static void stays_away(struct rank_ctx *c)
{
    struct scene *s = c->arg;
    cudaStream_t on = rank_buffers[c->rank].on;
    char name[16];
    spccl_status st = SPCCL_OK;
    int64_t until;
    snprintf(name, sizeof name, "rank %d", s->absent);
    if (!attach_gpu(c->comm, c->rank, 0))
        return;
    load_input(c, s->n);
    for (int i = 0; i < s->n_before; i++) {
        CHECK_OK(sum(c, s->n, SPCCL_FLOAT32));
        CHECK_OK(spccl_cuda_wait(c->comm, on, SOON_MS));
    }
    /* The rank that waits for the absent one must fail before those that wait for it: an eighth of the time-out. */
    CHECK_OK(spccl_comm_set_timeout(c->comm, 4000));
    if (!wait_for_ranks(c, &s->n_here))
        return;
    until = now_ms() + SOON_MS;
    if (c->rank != s->absent) {
        CHECK_OK(sum(c, s->n, SPCCL_FLOAT32));
        st = spccl_cuda_wait(c->comm, on, SOON_MS);
        CHECK(strstr(spccl_last_error(), name) != NULL, "rank %d: \"%s\" does not name %s", c->rank,
              spccl_last_error(), name);
    }
    while (c->rank == s->absent && (st = spccl_comm_async_error(c->comm)) == SPCCL_OK && now_ms() < until)
        sleep_ms(1);
    CHECK(st == SPCCL_ERR_TIMEOUT || st == SPCCL_ERR_ABORTED, "rank %d: %s: %s", c->rank,
          spccl_status_name(st), spccl_last_error());
    (void)wait_for_ranks(c, &s->n_ended);
}

static void test_missing_rank(void)
{
    static const struct {
        int n_per_host, absent, n_before;
    } cases[] = {{1, 1, 0}, {2, 1, 0}, {2, 3, 1}, {2, 2, 4}};
    for (size_t i = 0; i < (is_small ? 1 : sizeof cases / sizeof *cases); i++) {
        struct rank_ctx ctx[RANKS_CAP];
        struct scene s = {
            .n = i == 0 ? FEW : 60000, .absent = cases[i].absent, .n_before = cases[i].n_before};
        spccl_config config = SPCCL_CONFIG_INIT;
        config.transports = "tcp";
        test_ranks_per_host = cases[i].n_per_host;
        relay_results();
        run_ranks(2 * cases[i].n_per_host, &config, stays_away, &s, ctx);
    }
}

/* A second group of the same ranks. */
static void join_other(const struct rank_ctx *c, struct rank_ctx *other)
{
    spccl_store store = {
        .struct_bytes = sizeof store, .ctx = c->store, .set = mem_store_set, .get = mem_store_get};
    spccl_config config = *c->config;
    char host[24];
    snprintf(host, sizeof host, "host %d", c->rank);
    config.host_id = host;
    config.name = "other";
    *other = *c;
    other->comm = NULL;
    CHECK_OK(spccl_comm_create(&store, c->rank, c->n_ranks, &config, &other->comm));
}

/* A proxy of rank 1 dies. The group's next collective fails on all ranks; the other group goes on. */
static void proxy_dies(struct rank_ctx *c)
{
    struct scene *s = c->arg;
    struct rank_ctx other;
    spccl_status st = SPCCL_OK;
    join_other(c, &other);
    if (other.comm != NULL && attach_gpu(c->comm, c->rank, 1) && attach_gpu(other.comm, c->rank, 1)) {
        check_works(c);
        check_works(&other);
        (void)wait_for_ranks(c, &s->n_attached);
        proxy_fault.what = s->fault;
        load_input(c, s->n);
        for (int i = 0; st == SPCCL_OK && i < s->n_calls; i++) {
            st = sum(c, s->n, SPCCL_FLOAT32);
            if (st == SPCCL_OK)
                st = spccl_cuda_wait(c->comm, rank_buffers[c->rank].on, SOON_MS);
        }
        CHECK(st != SPCCL_OK && strstr(spccl_last_error(), "rank 1") != NULL &&
                  strstr(spccl_last_error(), s->text) != NULL,
              "rank %d: %s: \"%s\", wanted \"%s\"", c->rank, spccl_status_name(st), spccl_last_error(),
              s->text);
        sync_stream(rank_buffers[c->rank].on); /* the kernel has ended */
        (void)wait_for_ranks(c, &s->n_ended);
        check_works(&other);
    }
    spccl_comm_destroy(other.comm);
}

static void test_proxy_dies(void)
{
    struct scene all[] = {{.fault = PROXY_FAILS, .text = "the test makes this round fail"},
                          {.fault = PROXY_EXITS, .text = "was ended by pthread_exit"}};
    proxy_fault.rank = 1;
    proxy_fault.group = "world";
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        struct rank_ctx ctx[RANKS_CAP];
        spccl_config config = SPCCL_CONFIG_INIT;
        all[i].n = 60000;
        all[i].n_calls = 1000;
        next_proxies();
        config.transports = "tcp";
        config.timeout_ms = LONG_MS;
        test_ranks_per_host = 1;
        run_ranks(2, &config, proxy_dies, &all[i], ctx);
        proxy_fault.what = PROXY_WORKS;
        for (int r = 0; r < 2; r++)
            CHECK(ctx[r].created == SPCCL_OK, "rank %d: %s", r, ctx[r].error);
        run_ranks(2, &config, attach_and_check, NULL, ctx); /* the GPU is usable */
    }
}

/* One call of the proxies' transport fails on rank 1 while the ranks attach their GPUs. */
static void attach_fails(struct rank_ctx *c)
{
    struct scene *s = c->arg;
    spccl_cuda_config config = SPCCL_CUDA_CONFIG_INIT;
    spccl_status st;
    if (!wait_for_ranks(c, &s->n_here))
        return;
    sp_fault = s->plan; /* all endpoints of the links are open, those of the proxies are not */
    if (!all_here(c->comm))
        return;
    config.device = rank_buffers[c->rank].device;
    st = spccl_cuda_attach(c->comm, &config);
    /* TIMEOUT would mean that a rank waited for its deadline. */
    CHECK(st == SPCCL_ERR_SYSTEM || st == SPCCL_ERR_UNREACHABLE, "%s, rank %d: %s: %s", s->plan.fails,
          c->rank, spccl_status_name(st), spccl_last_error());
    CHECK(strstr(spccl_last_error(), "rank 1") != NULL, "%s, rank %d: \"%s\" does not name rank 1",
          s->plan.fails, c->rank, spccl_last_error());
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
        int n = is_small ? 2 : 3, n_fds;
        next_proxies();
        config.transports = "fault";
        config.timeout_ms = LONG_MS;
        test_ranks_per_host = 1;
        sp_fault = (sp_fault_plan){.inner = "tcp"};
        if (i == 0) /* the first group of a process opens descriptors that stay */
            run_ranks(n, &config, attach_and_check, NULL, ctx);
        n_fds = count_entries("/proc/self/fd");
        run_ranks(n, &config, attach_fails, &s, ctx);
        for (int r = 0; r < n; r++)
            CHECK(ctx[r].created == SPCCL_OK, "rank %d: %s", r, ctx[r].error);
        CHECK(count_entries("/proc/self/fd") == n_fds, "%s: %d descriptors before, %d after", calls[i], n_fds,
              count_entries("/proc/self/fd"));
    }
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {{"cut", test_cut},
                                             {"cut_of_32", test_cut_of_32},
                                             {"flipped", test_flipped},
                                             {"missing_rank", test_missing_rank},
                                             {"attach_fails", test_attach_fails},
                                             {"proxy_dies", test_proxy_dies},
                                             {NULL, NULL}};
    start_hosts(&argc, argv, 32);
    return test_main(cases, argc, argv);
}
