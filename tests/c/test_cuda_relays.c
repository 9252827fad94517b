/* test_cuda_relays.c - GPUs on several hosts (cuda_hosts.h) whose results cross to each host once: they must have the same
 * bits as the host's collectives, and no more bytes may cross than needed. */
#include "cuda_hosts.h"
#include "cuda_plans.h"

#include "core/gpu/proxy/proxy.h"

/* Results are relayed on 2 to 4 hosts of 2 to 8 ranks: all formats, one worker on each GPU, whose rings fill, or many. */
static void test_relays(void)
{
    static const struct {
        int n_hosts, n_per_host;
        struct group g;
    } groups[] = {{2, 2, {0, SPCCL_FORMAT_AUTO, 1, false, 12, 0, "relayed"}},
                  {3, 2, {0, SPCCL_FORMAT_AUTO, 0, false, 10, 0, "relayed"}},
                  {2, 3, {0, SPCCL_FORMAT_PICI, 1, false, 8, 0, "relayed"}},
                  {4, 4, {0, SPCCL_FORMAT_AUTO, 1, false, 5, 0, "auto"}},
                  {2, 8, {0, SPCCL_FORMAT_AUTO, 2, false, 5, 0, "relayed"}}};
    for (size_t i = 0; i < (is_small ? 1 : sizeof groups / sizeof *groups); i++)
        run_hosts(groups[i].n_hosts, groups[i].n_per_host, groups[i].g);
}

/* Rings hold two frames and all frames are large: gatherers wait for space to relay. */
static void test_full_relays(void)
{
    struct group g = {0, SPCCL_FORMAT_DENSE, 1, false, 10, 0, "relayed"};
    setenv("SPCCL_INBOX_BYTES", "300000", 1); /* one worker of 8 ranks */
    run_hosts(is_small ? 2 : 4, 2, g);
    unsetenv("SPCCL_INBOX_BYTES");
}

static const char *const two_hosts[] = {"even", "odd"};
static void alternate_hosts(const struct rank_ctx *c, spccl_config *config)
{
    config->host_id = two_hosts[c->rank % 2];
}

/* Hosts of 2, 2 and 1 ranks, which cannot relay; 2 hosts to which the ranks belong in turn. */
static void test_uneven_hosts(void)
{
    struct group g = {5, SPCCL_FORMAT_AUTO, 1, false, 8, 0, "relayed"};
    if (is_small)
        return;
    next_proxies();
    test_ranks_per_host = 2;
    run_group(&g);
    test_rank_config = alternate_hosts;
    g.n_ranks = 6;
    run_group(&g);
    test_rank_config = NULL;
}

/* Bytes that this rank's proxies sent for an all-gather without zeros. */
struct traffic {
    uint64_t proxies[CUDA_RANKS_CAP], frames[CUDA_RANKS_CAP]; /* frames: on NVLink too */
};

static void gathers_dense(struct rank_ctx *c)
{
    const struct rank_buffer *m = &rank_buffers[c->rank];
    struct traffic *bytes = c->arg;
    spccl_cuda_stats stats = {.struct_bytes = sizeof stats};
    const sp_proxies *r;
    size_t n = total_bytes() / 4 / (size_t)c->n_ranks;
    if (!attach_gpu(c->comm, c->rank, 1))
        return;
    memset(m->in, 0x3f, n * 4);
    CUDA_OK(cudaMemcpyAsync(m->in_d, m->in, n * 4, cudaMemcpyHostToDevice, m->on));
    CHECK_OK(spccl_cuda_all_gather(c->comm, m->in_d, m->out_d, n, SPCCL_FLOAT32, m->on));
    CHECK_OK(spccl_cuda_wait(c->comm, m->on, wait_ms()));
    CHECK_OK(spccl_cuda_get_stats(c->comm, &stats));
    (void)all_here(c->comm); /* all frames have come, so all were sent */
    bytes->frames[c->rank] = stats.wire_bytes_sent;
    r = ((sp_gpu_comm *)atomic_load(&c->comm->gpu))->proxies;
    for (uint32_t k = 0; k < r->n_proxies; k++)
        bytes->proxies[c->rank] += r->proxies[k].n_bytes_sent;
}

static struct traffic gather_traffic(int n_hosts, int n_per_host, const char *schedule)
{
    struct traffic bytes = {0};
    struct rank_ctx ctx[RANKS_CAP];
    spccl_config config = SPCCL_CONFIG_INIT;
    next_proxies();
    config.transports = "tcp";
    test_ranks_per_host = n_per_host;
    setenv("SPCCL_SCHEDULE", schedule, 1);
    run_ranks(n_hosts * n_per_host, &config, gathers_dense, &bytes, ctx);
    for (int r = 0; r < n_hosts * n_per_host; r++)
        CHECK(ctx[r].created == SPCCL_OK, "rank %d: %s", r, ctx[r].error);
    return bytes;
}

/* Dense frames leave a quarter of a frame free at the end of each ring. Those bytes do not travel. */
static void test_skipped_bytes(void)
{
    struct traffic bytes = gather_traffic(2, 1, "direct");
    for (int r = 0; r < 2; r++)
        CHECK(bytes.proxies[r] >= bytes.frames[r] &&
                  bytes.proxies[r] - bytes.frames[r] < bytes.frames[r] / 40,
              "rank %d: proxies sent %llu bytes for frames of %llu", r, (unsigned long long)bytes.proxies[r],
              (unsigned long long)bytes.frames[r]);
}

/* With relays a rank's block crosses to each other host once, otherwise to each of its ranks. */
static void test_relayed_bytes(void)
{
    static const int shapes[][2] = {{2, 2}, {3, 2}, {2, 4}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes && !is_small; i++) {
        int n_here = shapes[i][1];
        struct traffic direct = gather_traffic(shapes[i][0], n_here, "direct");
        struct traffic relayed = gather_traffic(shapes[i][0], n_here, "relayed");
        for (int r = 0; r < shapes[i][0] * n_here; r++) {
            double ratio = (double)direct.proxies[r] / (double)relayed.proxies[r];
            CHECK(ratio > 0.95 * n_here && ratio < 1.05 * n_here,
                  "%d hosts of %d, rank %d: %llu bytes without relays, %llu with", shapes[i][0], n_here, r,
                  (unsigned long long)direct.proxies[r], (unsigned long long)relayed.proxies[r]);
            CHECK(relayed.frames[r] == direct.frames[r], "rank %d: %llu bytes of frames, %llu without relays",
                  r, (unsigned long long)relayed.frames[r], (unsigned long long)direct.frames[r]);
        }
    }
}

/* Plans from files: relayed; and direct, which turns relays off. */
static void test_plans(void)
{
    static const struct owned plans[] = {{.n_ranks = 4, .per_host = 2, .n_chunks = 6},
                                         {.n_ranks = 4, .n_chunks = 5},
                                         {.n_ranks = 6, .per_host = 3, .n_chunks = 4}};
    for (size_t i = 0; i < (is_small ? 1 : sizeof plans / sizeof *plans); i++) {
        next_proxies();
        run_owned(2, plans[i], (struct group){.format = SPCCL_FORMAT_AUTO, .max_ctas = 2, .n_random = 10});
    }
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {{"relays", test_relays},
                                             {"full_relays", test_full_relays},
                                             {"uneven_hosts", test_uneven_hosts},
                                             {"skipped_bytes", test_skipped_bytes},
                                             {"relayed_bytes", test_relayed_bytes},
                                             {"plans", test_plans},
                                             {NULL, NULL}};
    start_hosts(&argc, argv, 16);
    return test_main(cases, argc, argv);
}
