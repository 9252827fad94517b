/* test_cuda_direct.c - collectives of GPUs on several hosts with rings in GPU memory: the memory of a GPU in software is
 * host memory, so a device registers it by its address. With TEST_ONLY_TRANSPORT over transport ib: tools/softroce.py runs
 * it. Else over tcp, with puts that copy (copy_puts.h). */
#include "core/gpu/proxy/proxy.h"
#include "cuda_hosts.h"

#define SOON_MS 60000

#if defined(TEST_ONLY_TRANSPORT)
#define PLAN .inner = TEST_ONLY_TRANSPORT
#define TRANSPORT TEST_ONLY_TRANSPORT
#define NO_DMABUF "ibv_reg_dmabuf_mr"
#else
#include "copy_puts.h"
#define PLAN .inner = "tcp", .puts = &copy_puts
#define TRANSPORT "fault"
#define NO_DMABUF "copy0 registers no dmabuf"
#endif
#define NO_AUTO "registers no dmabuf"

/* What a rank must find in a group whose proxies use ib. */
struct wanted {
    struct group group;
    bool direct;     /* rings in GPU memory */
    const char *why; /* in the reason of rank 1 */
};

static const sp_proxies *proxies_of(const struct rank_ctx *c)
{
    return ((const sp_gpu_comm *)atomic_load(&c->comm->gpu))->proxies;
}

static void check_rings(const struct rank_ctx *c, const struct wanted *w)
{
    const sp_proxies *r = proxies_of(c);
    uint64_t put = 0, sent = 0;
    for (uint32_t k = 0; k < r->n_proxies; k++) {
        put += r->proxies[k].n_bytes_put;
        sent += r->proxies[k].n_bytes_sent;
    }
    CHECK(r->n_direct == (w->direct ? (uint32_t)r->n_peers : 0), "rank %d: %u of %d peers", c->rank,
          r->n_direct, r->n_peers);
    CHECK((r->gpu_outbox != NULL) == w->direct, "rank %d: an outbox in GPU memory: %d", c->rank,
          r->gpu_outbox != NULL);
    /* In random cases a rank may have little to send. */
    CHECK(w->direct ? put > sent || !w->group.every_op : put == 0, "rank %d: %llu bytes put, %llu sent",
          c->rank, (unsigned long long)put, (unsigned long long)sent);
    CHECK(c->rank != 1 || strstr(r->direct.why, w->why) != NULL, "\"%s\" has no \"%s\"", r->direct.why,
          w->why);
}

static void runs_cases(struct rank_ctx *c)
{
    const struct wanted *w = c->arg;
    struct rank_ctx inner = *c;
    inner.arg = (void *)(uintptr_t)&w->group;
    rank_fn(&inner);
    if (atomic_load(&c->comm->gpu) != NULL)
        check_rings(c, w);
}

/* Collectives with results compared bit by bit, then the check of the rings. */
static void run_wanted(int n_hosts, int n_per_host, struct wanted w)
{
    struct rank_ctx ctx[RANKS_CAP];
    spccl_config config = SPCCL_CONFIG_INIT;
    w.group.format = SPCCL_FORMAT_AUTO;
    w.group.seed = test_rand();
    w.group.n_ranks = n_hosts * n_per_host;
    setenv("SPCCL_SCHEDULE", n_per_host > 1 ? "relayed" : "direct", 1);
    next_proxies();
    test_ranks_per_host = n_per_host;
    config.timeout_ms = SOON_MS;
    config.transports = group_transports;
    run_ranks(w.group.n_ranks, &config, runs_cases, &w, ctx);
    for (int r = 0; r < w.group.n_ranks; r++)
        CHECK(ctx[r].created == SPCCL_OK, "rank %d: %s", r, ctx[r].error);
}

#if defined(TEST_ONLY_TRANSPORT)
/* `spccl info` has the setting, and what the devices could do. */
static void test_info(void)
{
    spccl_info_entry e = {.struct_bytes = sizeof e};
    int n = 0;
    for (size_t i = 0; spccl_info(i, &e) == SPCCL_OK; i++) {
        if (strcmp(e.kind, "GPUDirect") != 0)
            continue;
        n++;
        CHECK(strncmp(e.value, "pointers, possible with 0 of ", 29) == 0, "%s", e.value);
        CHECK(strstr(e.why, "SPCCL_DEBUG_GPU_DIRECT=pointers") != NULL &&
                  strstr(e.why, "; rxe0 (ib): no: ") != NULL,
              "%s", e.why);
    }
    CHECK(n == n_gpus || n == 16, "entries of %d GPUs, wanted %d", n, n_gpus);
}
#endif

static const char by_pointers[] = "SPCCL_DEBUG_GPU_DIRECT is pointers, with a flush";

/* Each collective, dtype and operation; then random ones with the setting off. */
static void test_every_op(void)
{
    struct wanted w = {.group = {.every_op = true}, .direct = true, .why = by_pointers};
    run_wanted(2, 1, w);
    setenv("SPCCL_DEBUG_GPU_DIRECT", "off", 1);
    run_wanted(2, 1, (struct wanted){.group = {.n_random = 6}, .direct = false, .why = ""});
    setenv("SPCCL_DEBUG_GPU_DIRECT", "pointers", 1);
}

/* Relayed results, with rings that are full most of the time. */
static void test_relays(void)
{
    run_wanted(2, 2,
               (struct wanted){.group = {.n_random = 5, .max_ctas = 1}, .direct = true, .why = by_pointers});
}

/* Proxies that at random find no space, no room for puts, and flushes that have not ended. */
static void test_slow(void)
{
    group_transports = "fault";
    sp_fault = (sp_fault_plan){PLAN, .seed = test_rand(), .hold_one_in = 3};
    run_wanted(2, 1,
               (struct wanted){.group = {.n_random = 4, .max_ctas = 1}, .direct = true, .why = by_pointers});
    sp_fault = (sp_fault_plan){PLAN};
    group_transports = TRANSPORT;
}

/* What no device can do, or one rank cannot: the rings of both ranks lie in pinned memory, for a reason that is named. */
static void test_refused(void)
{
    struct wanted w = {.group = {.n_random = 1}, .direct = false};
    setenv("SPCCL_DEBUG_GPU_DIRECT", "dmabuf", 1);
    w.why = NO_DMABUF;
    run_wanted(2, 1, w);
    setenv("SPCCL_DEBUG_GPU_DIRECT", "auto", 1);
    w.why = NO_AUTO;
    run_wanted(2, 1, w);
    setenv("SPCCL_DEBUG_GPU_DIRECT", "pointers", 1);
    group_transports = "fault";
    sp_fault = (sp_fault_plan){PLAN, .fails = "open_region", .fails_rank = 1};
    w.why = "open_region failed for a test";
    run_wanted(2, 1, w);
    group_transports = "tcp";
    w.why = "transport tcp has no way";
    run_wanted(2, 1, w);
    group_transports = TRANSPORT;
}

/* Bytes that are allocated on GPUs. */
static size_t allocated(void)
{
    size_t left = 0, total = 0;
    CUDA_OK(cudaMemGetInfo(&left, &total));
    return total - left;
}

/* All GPU memory is freed when a group ends: after the rings were registered, and after their registration failed. */
static void test_memory(void)
{
    struct wanted w = {.group = {.n_random = 1}};
    size_t before;
    group_transports = "fault";
    for (int fails = 0; fails < 2; fails++) {
        sp_fault = (sp_fault_plan){PLAN, .fails = fails ? "open_region" : NULL, .fails_rank = 1};
        w.direct = !fails;
        w.why = fails ? "open_region failed for a test" : by_pointers;
        before = allocated();
        run_wanted(2, 1, w);
        CHECK(allocated() == before, "fails %d: %zu bytes stay", fails, allocated() - before);
    }
    sp_fault = (sp_fault_plan){PLAN};
    group_transports = TRANSPORT;
}

/* ---- a peer dies, or sends wrong positions ---- */

static void loses_peer(struct rank_ctx *c)
{
    const struct rank_buffer *m = &rank_buffers[c->rank];
    _Atomic int *n_ended = c->arg;
    int64_t until = now_ms() + SOON_MS;
    spccl_status st = SPCCL_OK;
    if (!attach_gpu(c->comm, c->rank, 1))
        return;
    CHECK(proxies_of(c)->n_direct == 1, "rank %d: no rings in GPU memory", c->rank);
    load_input(c, FEW * 20);
    while (st == SPCCL_OK && now_ms() < until) {
        st = sum(c, FEW * 20, SPCCL_FLOAT32);
        if (st == SPCCL_OK)
            st = spccl_cuda_wait(c->comm, m->on, SOON_MS);
    }
    CHECK(st == SPCCL_ERR_PEER || st == SPCCL_ERR_ABORTED || st == SPCCL_ERR_FORMAT || st == SPCCL_ERR_FRAME,
          "rank %d: %s: %s", c->rank, spccl_status_name(st), spccl_last_error());
    CHECK(strstr(spccl_last_error(), "rank") != NULL, "\"%s\" names no rank", spccl_last_error());
    sync_stream(m->on);
    for (++*n_ended; *n_ended < c->n_ranks && now_ms() < until;)
        sleep_ms(1); /* a rank that leaves earlier would be taken for dead */
}

static void run_lost(void)
{
    struct rank_ctx ctx[RANKS_CAP];
    spccl_config config = SPCCL_CONFIG_INIT;
    _Atomic int n_ended = 0;
    setenv("SPCCL_DEBUG_CUDA_PROXIES", "2", 1);
    setenv("SPCCL_SCHEDULE", "relayed", 1);
    test_ranks_per_host = 1;
    config.timeout_ms = SOON_MS;
    config.transports = "fault";
    run_ranks(2, &config, loses_peer, &n_ended, ctx);
    CHECK(n_ended == 2, "%d ranks ended", n_ended);
    sp_fault = (sp_fault_plan){PLAN};
}

/* Both the links of the group and the proxies use the plan; the group alone sends fewer than 100 messages. */
static void test_dead_peer(void)
{
    sp_fault = (sp_fault_plan){PLAN, .cut_after = 100, .cut_rank = 1};
    run_lost();
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {
#if defined(TEST_ONLY_TRANSPORT)
        {"info", test_info},
#endif
        {"every_op", test_every_op},
        {"relays", test_relays},
        {"slow", test_slow},
        {"refused", test_refused},
        {"memory", test_memory},
        {"dead_peer", test_dead_peer},
        {NULL, NULL}
    };
    setenv("SPCCL_DEBUG_GPU_DIRECT", "pointers", 1);
    start_hosts(&argc, argv, 4);
    group_transports = TRANSPORT;
    sp_fault = (sp_fault_plan){PLAN};
    return test_main(cases, argc, argv);
}
