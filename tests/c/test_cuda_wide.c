/* test_cuda_wide.c - GPU groups of 17 to 64 ranks on several hosts (cuda_hosts.h): results must have the same bits as the
 * host's collectives. Groups that are larger, or whose hosts do not allow relays, are refused. */
#include "cuda_hosts.h"

/* The fewer bytes, the fewer workers on each GPU: one worker of 64 ranks needs 1.5 MB. */
static void run_wide(int n_hosts, int n_per_host, const char *inbox_bytes, struct group g)
{
    setenv("SPCCL_INBOX_BYTES", inbox_bytes, 1);
    test_ranks_per_host = n_per_host;
    g.n_ranks = n_hosts * n_per_host;
    run_group(&g);
    unsetenv("SPCCL_INBOX_BYTES");
}

/* 18 ranks, over TCP: an owner takes the contributions of 8, 8 and 1 ranks. */
static void test_18(void)
{
    struct group g = {0, SPCCL_FORMAT_AUTO, 1, false, is_small ? 1 : 6, 0, "relayed"};
    group_transports = "tcp";
    run_wide(3, 6, "2M", g);
    group_transports = "inproc";
}

/* One worker, whose rings fill; then several. */
static void test_32(void)
{
    struct group dense = {0, SPCCL_FORMAT_DENSE, 1, false, 3, 0, "relayed"};
    struct group any = {0, SPCCL_FORMAT_AUTO, 1, false, 5, 0, "auto"};
    if (is_small)
        return;
    run_wide(4, 8, "1M", dense);
    run_wide(8, 4, "3M", any);
}

static void test_64(void)
{
    struct group g = {0, SPCCL_FORMAT_AUTO, 1, false, 4, 0, "relayed"};
    if (!is_small)
        run_wide(8, 8, "3500000", g);
}

/* ---- groups that are refused ---- */

struct refusal {
    int n_ranks, n_per_host;
    const char *schedule, *text;
};

static void is_too_wide(struct rank_ctx *c)
{
    const struct refusal *wanted = c->arg;
    spccl_cuda_config config = SPCCL_CUDA_CONFIG_INIT;
    spccl_status st;
    config.device = c->rank % n_gpus;
    st = spccl_cuda_attach(c->comm, &config);
    CHECK(st == SPCCL_ERR_UNSUPPORTED && strstr(spccl_last_error(), wanted->text) != NULL,
          "%d ranks, rank %d: %s: \"%s\"; wanted \"%s\"", c->n_ranks, c->rank, spccl_status_name(st),
          spccl_last_error(), wanted->text);
    CHECK_OK(spccl_comm_async_error(c->comm)); /* collectives on the host go on */
    (void)all_here(c->comm);
}

static void test_refused(void)
{
    static struct refusal refusals[] = {
        {65, 8, "auto", "has 65 ranks, GPU collectives take at most 64"},
        {17, 17, "auto", "has 17 ranks on one host, GPU collectives take at most 16 there"},
        {18, 9, "auto", "has 18 ranks on 2 hosts, 9 to 9 on each"},
        {18, 2, "auto", "has 18 ranks on 9 hosts, 2 to 2 on each"},
        {17, 6, "auto", "has 17 ranks on 3 hosts, 5 to 6 on each"},
        {18, 6, "direct", "which schedule direct (SPCCL_SCHEDULE) forbids"},
        {18, 6, "oneshot", "which schedule oneshot (SPCCL_SCHEDULE) forbids"}};
    for (size_t i = 0; i < sizeof refusals / sizeof *refusals; i++) {
        struct rank_ctx ctx[RANKS_CAP];
        spccl_config config = SPCCL_CONFIG_INIT;
        config.transports = "inproc";
        setenv("SPCCL_SCHEDULE", refusals[i].schedule, 1);
        test_ranks_per_host = refusals[i].n_per_host;
        run_ranks(refusals[i].n_ranks, &config, is_too_wide, &refusals[i], ctx);
        for (int r = 0; r < refusals[i].n_ranks; r++)
            CHECK(ctx[r].created == SPCCL_OK, "rank %d: %s", r, ctx[r].error);
    }
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {
        {"18", test_18}, {"32", test_32}, {"64", test_64}, {"refused", test_refused}, {NULL, NULL}};
    cuda_test_start(&argc, argv);
    is_slow = true; /* small arrays on GPUs too: 64 ranks share them */
    setenv("SPCCL_CUDA_ROUTE", "spccl", 1);
    setenv("SPCCL_DEBUG_CUDA_PROXIES", "1", 1);
    make_rank_buffers(is_small ? 18 : CUDA_RANKS_CAP, total_bytes() + 4 * GUARD_BYTES);
    group_transports = "inproc";
    waits_asleep = true;
    return test_main(cases, argc, argv);
}
