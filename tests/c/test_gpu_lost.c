/* test_gpu_lost.c - what one rank lacks while GPUs are attached, channels are made and all of it is freed: host memory,
 * pinned memory, a proxy's thread, the GPU itself. On fake GPUs, without kernels. All ranks get an error at once that
 * names the rank; the next group works. */
#include "fake_gpu.h"
#include "proxy_faults.h"
#include "ranks.h"

#include "core/base/mem.h"

#define N_RANKS 2
#define FAILING 1
#define CREATE_MS 120000 /* the time-out; no test waits for it */

/* ---- memory of the library ---- */

void *__real_sp_calloc(size_t n, size_t elem_bytes);
void *__wrap_sp_calloc(size_t n, size_t elem_bytes);
spccl_status __real_spccl_all_gather(spccl_comm *comm, const void *in, void *out, size_t n, spccl_dtype dtype,
                                     spccl_request **request);
spccl_status __wrap_spccl_all_gather(spccl_comm *comm, const void *in, void *out, size_t n, spccl_dtype dtype,
                                     spccl_request **request);
spccl_status __real_sp_comm_all_gather(spccl_comm *comm, const void *in, void *out, size_t bytes,
                                       sp_time_limit limit, spccl_request **request);
spccl_status __wrap_sp_comm_all_gather(spccl_comm *comm, const void *in, void *out, size_t bytes,
                                       sp_time_limit limit, spccl_request **request);
void *__real_sp_alloc64(size_t bytes);
void *__wrap_sp_alloc64(size_t bytes);
void __real_sp_free(void *p);
void __wrap_sp_free(void *p);

static atomic_int n_live;                  /* allocations that are not freed */
static _Thread_local int fails_after = -1; /* sp_calloc of this thread fails once, after so many; -1: never */
static _Thread_local bool has_failed;

void *__wrap_sp_calloc(size_t n, size_t elem_bytes)
{
    void *p;
    if (fails_after >= 0 && fails_after-- == 0) {
        has_failed = true;
        return NULL;
    }
    p = __real_sp_calloc(n, elem_bytes);
    n_live += p != NULL;
    return p;
}

/* The calls under test exchange data by these two. No allocation of a host collective fails here. */
spccl_status __wrap_spccl_all_gather(spccl_comm *comm, const void *in, void *out, size_t n, spccl_dtype dtype,
                                     spccl_request **request)
{
    int before = fails_after;
    spccl_status st;
    fails_after = -1;
    st = __real_spccl_all_gather(comm, in, out, n, dtype, request);
    fails_after = before;
    return st;
}

spccl_status __wrap_sp_comm_all_gather(spccl_comm *comm, const void *in, void *out, size_t bytes,
                                       sp_time_limit limit, spccl_request **request)
{
    int before = fails_after;
    spccl_status st;
    fails_after = -1;
    st = __real_sp_comm_all_gather(comm, in, out, bytes, limit, request);
    fails_after = before;
    return st;
}

void *__wrap_sp_alloc64(size_t bytes)
{
    void *p = __real_sp_alloc64(bytes);
    n_live += p != NULL;
    return p;
}

void __wrap_sp_free(void *p)
{
    n_live -= p != NULL;
    __real_sp_free(p);
}

/* ---- groups ---- */

static void meet(const struct rank_ctx *c)
{
    uint32_t one = 1, sum = 0;
    CHECK_OK(spccl_all_reduce(c->comm, &one, &sum, 1, SPCCL_INT32, SPCCL_SUM, NULL));
    CHECK(sum == (uint32_t)c->n_ranks, "%u", sum);
}

static spccl_status attach(const struct rank_ctx *c)
{
    spccl_cuda_config gpu = SPCCL_CUDA_CONFIG_INIT;
    gpu.device = c->rank;
    return spccl_cuda_attach(c->comm, &gpu);
}

static spccl_status make_channels(const struct rank_ctx *c, spccl_channel_kind kind, spccl_channels **out)
{
    spccl_channels_config config = SPCCL_CHANNELS_CONFIG_INIT;
    config.kind = kind;
    config.window_bytes = 4096;
    return spccl_channels_create(c->comm, &config, out);
}

static void run_group(int per_host, void (*fn)(struct rank_ctx *), void *arg)
{
    struct rank_ctx ctx[N_RANKS];
    spccl_config config = SPCCL_CONFIG_INIT;
    config.timeout_ms = CREATE_MS;
    test_ranks_per_host = per_host;
    run_ranks(N_RANKS, &config, fn, arg, ctx);
    for (int r = 0; r < N_RANKS; r++)
        CHECK(ctx[r].created == SPCCL_OK, "rank %d: %s", r, ctx[r].error);
}

/* A call that fails on all ranks because of rank FAILING, well before its time-out. */
static void check_failure(const struct rank_ctx *c, spccl_status st, spccl_status wanted, const char *text,
                          int64_t start_ms)
{
    char name[16];
    snprintf(name, sizeof name, "rank %d", FAILING);
    CHECK(st == wanted && strstr(spccl_last_error(), name) != NULL &&
              strstr(spccl_last_error(), text) != NULL,
          "rank %d: %s: \"%s\", wanted \"%s\"", c->rank, spccl_status_name(st), spccl_last_error(), text);
    CHECK(now_ms() - start_ms < CREATE_MS / 2, "rank %d: failed after %lld ms", c->rank,
          (long long)(now_ms() - start_ms));
}

static void check_works(const struct rank_ctx *c)
{
    spccl_channels *channels = NULL;
    CHECK_OK(make_channels(c, SPCCL_CHANNEL_PORT, &channels));
    CHECK_OK(spccl_comm_async_error(c->comm));
    spccl_channels_destroy(channels);
}

/* ---- host memory: every allocation of the calling thread fails in turn ---- */

struct sweep {
    bool of_attach;
    spccl_channel_kind kind;
    int nth;
    _Atomic bool ended;
};

static spccl_status call(const struct rank_ctx *c, const struct sweep *s, spccl_channels **out)
{
    return s->of_attach ? attach(c) : make_channels(c, s->kind, out);
}

static void out_of_memory(struct rank_ctx *c)
{
    struct sweep *s = c->arg;
    spccl_channels *channels = NULL;
    int64_t start_ms = now_ms();
    spccl_status st;
    if (!s->of_attach)
        CHECK_OK(attach(c));
    has_failed = false;
    fails_after = c->rank == FAILING ? s->nth : -1;
    st = call(c, s, &channels);
    fails_after = -1;
    if (c->rank == FAILING)
        s->ended = !has_failed;
    meet(c);
    if (st != SPCCL_OK)
        check_failure(c, st, SPCCL_ERR_NOMEM, "", start_ms);
    CHECK((st == SPCCL_OK) == s->ended, "rank %d: allocation %d failed, and the call is %s", c->rank, s->nth,
          spccl_status_name(st));
    if (st != SPCCL_OK)
        CHECK_OK(call(c, s, &channels));
    spccl_channels_destroy(channels);
    meet(c);
}

static void test_out_of_memory(void)
{
    struct sweep all[] = {{.of_attach = true}, {.kind = SPCCL_CHANNEL_MEMORY}, {.kind = SPCCL_CHANNEL_PORT}};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        for (int nth = 0; nth < 100 && !all[i].ended; nth++) {
            all[i].nth = nth;
            run_group(1, out_of_memory, &all[i]);
            if (test_n_failed != 0)
                return;
        }
        CHECK(all[i].ended, "there is no end");
    }
}

/* ---- pinned memory ---- */

static void no_pinned_memory(struct rank_ctx *c)
{
    spccl_channels *channels = NULL;
    int64_t start_ms = now_ms();
    /* Of attach, rank FAILING allocates pinned memory only for peers on other hosts. */
    fake.pinned_fails_at[FAILING] = true;
    check_failure(c, attach(c), SPCCL_ERR_NOMEM, "bytes of pinned memory and a proxy", start_ms);
    meet(c);
    fake.pinned_fails_at[FAILING] = false;
    meet(c);
    CHECK_OK(attach(c));
    meet(c);
    fake.pinned_fails_at[FAILING] = true;
    meet(c);
    start_ms = now_ms();
    check_failure(c, make_channels(c, SPCCL_CHANNEL_PORT, &channels), SPCCL_ERR_NOMEM,
                  "bytes of pinned memory for GPU 1", start_ms);
    meet(c);
    fake.pinned_fails_at[FAILING] = false;
    meet(c);
    check_works(c);
}

static void test_pinned_memory(void)
{
    run_group(1, no_pinned_memory, NULL);
}

/* ---- the GPU: lost while channels are made, and before they are destroyed ---- */

static void lost_in_creation(struct rank_ctx *c)
{
    spccl_channels *channels = NULL;
    int64_t start_ms;
    CHECK_OK(attach(c));
    meet(c);
    if (c->rank == FAILING)
        fake.import_loses_at[FAILING] = true;
    meet(c);
    start_ms = now_ms();
    check_failure(c, make_channels(c, SPCCL_CHANNEL_MEMORY, &channels), SPCCL_ERR_UNREACHABLE, "", start_ms);
    meet(c); /* the ranks agree on the order of their calls */
}

static void lost_before_the_end(struct rank_ctx *c)
{
    spccl_channels *memory = NULL, *port = NULL, *left = NULL;
    CHECK_OK(attach(c));
    CHECK_OK(make_channels(c, SPCCL_CHANNEL_MEMORY, &memory));
    CHECK_OK(make_channels(c, SPCCL_CHANNEL_PORT, &port));
    CHECK_OK(make_channels(c, SPCCL_CHANNEL_PORT, &left)); /* the communicator destroys it */
    meet(c);
    if (c->rank == FAILING)
        fake.enter_fails_at[FAILING] = true;
    spccl_channels_destroy(memory);
    spccl_channels_destroy(port);
    meet(c);
}

/* Memory that the library has not freed, besides what a process keeps: found by a first run without a fault. */
static void attach_and_leave(struct rank_ctx *c)
{
    CHECK_OK(attach(c));
    check_works(c);
}

static void test_lost_gpu(void)
{
    static void (*const all[])(struct rank_ctx *) = {lost_in_creation, lost_before_the_end};
    int n_before;
    run_group(2, attach_and_leave, NULL);
    n_before = n_live;
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        run_group(2, all[i], NULL);
        CHECK(n_live == n_before, "case %zu: %d allocations are left", i, n_live - n_before);
        fake.import_loses_at[FAILING] = false;
        fake.enter_fails_at[FAILING] = false;
        fake_free_lost();
    }
    run_group(2, attach_and_leave, NULL);
}

/* ---- the thread of a proxy ---- */

static void no_thread(struct rank_ctx *c)
{
    spccl_channels *channels = NULL;
    int64_t start_ms = now_ms();
    check_failure(c, attach(c), SPCCL_ERR_SYSTEM, "a proxy cannot start: starting thread \"spccl-proxy\"",
                  start_ms);
    meet(c);
    if (c->rank == FAILING)
        proxy_fault.what = PROXY_WORKS;
    meet(c);
    CHECK_OK(attach(c));
    meet(c);
    if (c->rank == FAILING)
        proxy_fault.what = PROXY_NO_THREAD;
    meet(c);
    start_ms = now_ms();
    check_failure(c, make_channels(c, SPCCL_CHANNEL_PORT, &channels), SPCCL_ERR_SYSTEM,
                  "a proxy cannot start: starting thread \"spccl-channels\"", start_ms);
    meet(c);
    if (c->rank == FAILING)
        proxy_fault.what = PROXY_WORKS;
    meet(c);
    check_works(c);
}

static void test_no_thread(void)
{
    int n_before, n_fds;
    run_group(1, attach_and_leave, NULL);
    n_before = n_live, n_fds = count_entries("/proc/self/fd");
    proxy_fault.rank = FAILING;
    proxy_fault.what = PROXY_NO_THREAD;
    run_group(1, no_thread, NULL);
    CHECK(n_live == n_before, "%d allocations are left", n_live - n_before);
    CHECK(count_entries("/proc/self/fd") == n_fds, "%d descriptors before, %d after", n_fds,
          count_entries("/proc/self/fd"));
}

/* ---- how long an idle proxy sleeps ---- */

static bool none_needs_it(const void *ctx)
{
    return *(const bool *)ctx;
}

static void test_sleep(void)
{
    bool idle = true;
    sp_proxy_thread port = {.is_idle = NULL}, rings = {.is_idle = none_needs_it, .ctx = &idle};
    const int64_t ms = 1000000;
    CHECK(sp_proxy_thread_sleep_ns(&port, 0) == ms / 50, "%lld",
          (long long)sp_proxy_thread_sleep_ns(&port, 0));
    CHECK(sp_proxy_thread_sleep_ns(&port, ms) == ms / 16, "a share of the idle time");
    CHECK(sp_proxy_thread_sleep_ns(&port, 999 * ms) == ms, "port channels, below 1 s");
    CHECK(sp_proxy_thread_sleep_ns(&port, 1000 * ms) == 10 * ms, "port channels, after 1 s");
    CHECK(sp_proxy_thread_sleep_ns(&rings, 1000 * ms) == 100 * ms, "collectives, asleep");
    idle = false;
    CHECK(sp_proxy_thread_sleep_ns(&rings, 1000 * ms) == ms, "collectives, a kernel runs");
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {{"out_of_memory", test_out_of_memory},
                                             {"pinned_memory", test_pinned_memory},
                                             {"lost_gpu", test_lost_gpu},
                                             {"no_thread", test_no_thread},
                                             {"sleep", test_sleep},
                                             {NULL, NULL}};
    setenv("SPCCL_CUDA_ROUTE", "spccl", 1);
    setenv("SPCCL_INBOX_BYTES", "4M", 1);
    return test_main(cases, argc, argv);
}
