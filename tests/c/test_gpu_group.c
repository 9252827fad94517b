/* test_gpu_group.c - GPU groups on fake GPUs, without the kernels: attaching, equal decisions on all ranks,
 * timeouts, aborts, dead peers, destroying. test_cuda_*.c run the kernels. */
#include "fake_gpu.h"

#include "core/gpu/gpu_comm.h"
#include "core/run/comm.h"
#include "ranks.h"

#include <signal.h>
#include <sys/wait.h>

#define N 1000u /* elements of every collective here */
static struct fake_stream streams[RANKS_CAP][2];
static atomic_int n_arrived; /* for wait_for_ranks */

static void reset(void)
{
    CHECK(fake.n_memories == 0, "the last test left %d memories", fake.n_memories);
    memset(streams, 0, sizeof streams);
    for (int r = 0; r < RANKS_CAP; r++)
        for (int i = 0; i < 2; i++)
            streams[r][i].id = (unsigned long long)(10 * r + i + 1);
    n_arrived = 0;
    fake.n_memories = fake.n_waits = fake.n_kernels = 0;
    fake.capture = 0;
}

static void wait_for_ranks(int n)
{
    int64_t deadline_ns = sp_deadline_in_ms(30000);
    n_arrived++;
    while (n_arrived < n && !sp_deadline_passed(deadline_ns))
        usleep(100);
}

static spccl_cuda_config config_of(int device)
{
    spccl_cuda_config c = SPCCL_CUDA_CONFIG_INIT;
    c.device = device;
    return c;
}

static spccl_status attach(struct rank_ctx *c)
{
    spccl_cuda_config config = config_of(c->rank % FAKE_GPUS);
    return spccl_cuda_attach(c->comm, &config);
}

static spccl_status reduce(struct rank_ctx *c, int stream)
{
    void *x = fake_memory[c->rank % FAKE_GPUS];
    return spccl_cuda_all_reduce(c->comm, x, x, N, SPCCL_FLOAT32, SPCCL_SUM, &streams[c->rank][stream]);
}

/* ---- without errors ---- */

static void works(struct rank_ctx *c)
{
    spccl_cuda_stats s = {.struct_bytes = sizeof s};
    void *x = fake_memory[c->rank % FAKE_GPUS], *out = fake_memory[c->rank % FAKE_GPUS] + 16384;
    void *stream = &streams[c->rank][0];
    CHECK_OK(attach(c));
    CHECK(attach(c) == SPCCL_ERR_STATE, "twice");
    for (int i = 0; i < 5; i++)
        CHECK_OK(reduce(c, 0));
    CHECK_OK(spccl_cuda_all_gather(c->comm, x, out, 100, SPCCL_INT8, stream));
    CHECK_OK(spccl_cuda_reduce_scatter(c->comm, x, out, 100, SPCCL_INT8, SPCCL_MAX, stream));
    CHECK_OK(spccl_cuda_broadcast(c->comm, x, 100, SPCCL_FLOAT64, c->n_ranks - 1, stream));
    CHECK_OK(spccl_cuda_broadcast(c->comm, NULL, 0, SPCCL_FLOAT64, 0, stream));
    CHECK_OK(spccl_cuda_wait(c->comm, stream, 20000));
    CHECK_OK(spccl_cuda_get_stats(c->comm, &s));
    CHECK(s.n_collectives == 8 && s.device == c->rank % FAKE_GPUS && s.wire_bytes_sent == 8 * 64 &&
              s.n_frames_sent[SPCCL_FORMAT_DENSE] == 8 && s.inbox_bytes > 0 && s.n_ctas > 0,
          "%llu collectives, %llu bytes", (unsigned long long)s.n_collectives,
          (unsigned long long)s.wire_bytes_sent);
    CHECK(s.pinned_bytes == 0 && s.n_proxies == 0 && s.n_remote == 0, "one host needs no proxies");
    for (int p = 0; p < c->n_ranks; p++) {
        const char *text = "",
                   *wanted = p == c->rank ? "itself" : "; GPU: writes to mapped memory of the peer (";
        CHECK_OK(spccl_comm_describe_link(c->comm, p, &text));
        CHECK(strstr(text, wanted) != NULL, "rank %d to %d: %s", c->rank, p, text);
    }
    CHECK_OK(spccl_comm_async_error(c->comm));
}

static void test_works(void)
{
    static const int sizes[] = {1, 2, 4, 7}; /* 7 ranks on 4 GPUs: some share one */
    struct rank_ctx ctx[RANKS_CAP];
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        reset();
        run_ranks(sizes[i], NULL, works, NULL, ctx);
        CHECK(fake.n_memories == 0, "%d ranks left %d memories", sizes[i], fake.n_memories);
        CHECK(fake.n_kernels == 8 * sizes[i], "%d launches", fake.n_kernels);
    }
}

/* The entry of spccl_info with the memory of groups of some sizes. */
static void test_memory_entry(void)
{
    static const struct {
        const char *inbox_bytes, *wanted;
    } cases[] = {{"256M", "8 x 8: 187M and 280M pinned"}, {"1M", "8 x 8: none fits"}};
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        spccl_info_entry e = {.struct_bytes = sizeof e};
        bool found = false;
        setenv("SPCCL_INBOX_BYTES", cases[k].inbox_bytes, 1);
        for (size_t i = 0; !found && spccl_info(i, &e) == SPCCL_OK; i++)
            found = strcmp(e.name, "GPU ring memory") == 0;
        CHECK(found && strstr(e.value, cases[k].wanted) != NULL, "\"%s\", wanted %s", e.value,
              cases[k].wanted);
    }
    unsetenv("SPCCL_INBOX_BYTES");
}

static void limits(struct rank_ctx *c)
{
    sp_gpu_comm *g;
    spccl_cuda_config config = config_of(c->rank % 2); /* two ranks per GPU */
    config.max_ctas = c->rank == 1 ? 3 : 0;
    config.inbox_bytes = (size_t)64 << 20;
    CHECK_OK(spccl_cuda_attach(c->comm, &config));
    g = atomic_load(&c->comm->gpu);
    CHECK(g->limits.n_sms == 4 && g->limits.max_ctas == 3 && g->shape.n_workers == 6 &&
              g->limits.inbox_bytes == (size_t)64 << 20,
          "%u SMs, %u CTAs, %u workers", g->limits.n_sms, g->limits.max_ctas, g->shape.n_workers);
    CHECK_OK(spccl_comm_async_error(c->comm));
}

static void test_limits(void)
{
    struct rank_ctx ctx[4];
    reset();
    run_ranks(4, NULL, limits, NULL, ctx);
}

/* ---- all ranks refuse, with the same text ---- */

struct refusal {
    spccl_status status;
    const char *word;
    bool declines, other_fallback, other_schedule; /* of rank 1 */
};

static void refused(struct rank_ctx *c)
{
    const struct refusal *r = c->arg;
    spccl_cuda_config config = config_of(c->rank == 1 && r->status == SPCCL_ERR_ARG ? 99 : c->rank);
    uint32_t one = 1, sum = 0;
    config.decline = c->rank == 1 && r->declines;
    config.fallback = c->rank == 1 && r->other_fallback ? 2 : 1;
    c->comm->schedule_forced = c->rank == 1 && r->other_schedule;
    spccl_status st = spccl_cuda_attach(c->comm, &config);
    c->comm->schedule_forced = false;
    CHECK(st == r->status && strstr(spccl_last_error(), r->word) != NULL,
          "rank %d: wanted %s with \"%s\", got %s: %s", c->rank, spccl_status_name(r->status), r->word,
          spccl_status_name(st), spccl_last_error());
    CHECK_OK(spccl_all_reduce(c->comm, &one, &sum, 1, SPCCL_INT32, SPCCL_SUM, NULL));
    CHECK(sum == (uint32_t)c->n_ranks, "collectives on host memory still work");
}

static void expect(struct refusal r)
{
    struct rank_ctx ctx[3];
    reset();
    run_ranks(3, NULL, refused, &r, ctx);
    CHECK(fake.n_memories == 0, "%s: %d memories are left", r.word, fake.n_memories);
}

static void expect_refusal(spccl_status status, const char *word)
{
    expect((struct refusal){status, word, false, false, false});
}

static void test_refusals(void)
{
    expect_refusal(SPCCL_ERR_ARG, "rank 1: GPU 99");
    fake.no_access[2][0] = true;
    expect_refusal(SPCCL_ERR_UNREACHABLE,
                   "no peer access between GPU 2 'Fake C' of rank 2 and GPU 0 'Fake A' of rank 0");
    fake.no_access[2][0] = false;
    fake.import_fails = true;
    expect_refusal(SPCCL_ERR_UNREACHABLE, "rank 0: GPU memory of rank ");
    fake.import_fails = false;
    fake.create_fails = true;
    expect_refusal(SPCCL_ERR_NOMEM, "rank 0: an inbox of");
    fake.create_fails = false;
    fake.free_bytes = 1000;
    expect_refusal(SPCCL_ERR_NOMEM, "has 1000 bytes free");
    fake.free_bytes = (size_t)1 << 40;
    fake.n_gpus = 0;
    expect_refusal(SPCCL_ERR_DEVICE, "no GPU");
    fake.n_gpus = FAKE_GPUS;
    setenv("SPCCL_INBOX_BYTES", "4096", 1);
    expect_refusal(SPCCL_ERR_SETTING, "SPCCL_INBOX_BYTES");
    unsetenv("SPCCL_INBOX_BYTES");
    setenv("SPCCL_DEBUG_NVLINK_HANDLES", "smoke", 1);
    expect_refusal(SPCCL_ERR_SETTING, "auto, fd or ipc");
    setenv("SPCCL_DEBUG_NVLINK_HANDLES", "fd", 1);
    fake.no_fd[1] = true;
    expect_refusal(SPCCL_ERR_SETTING, "GPU 1 'Fake B' of rank 1");
    fake.no_fd[1] = false;
    unsetenv("SPCCL_DEBUG_NVLINK_HANDLES");
    expect((struct refusal){SPCCL_ERR_UNREACHABLE, "rank 1: GPU collectives are turned off on this rank",
                            true, false, false});
    expect((struct refusal){SPCCL_ERR_MISMATCH, "SPCCL_CUDA_ROUTE alike", true, true, false});
    expect((struct refusal){SPCCL_ERR_MISMATCH, "SCHEDULE=auto, rank 1 direct", false, false, true});
}

static void shares_ipc(struct rank_ctx *c)
{
    CHECK_OK(attach(c));
    CHECK(strcmp(((sp_gpu_comm *)atomic_load(&c->comm->gpu))->handles, "ipc") == 0, "one GPU cannot do fd");
    CHECK_OK(reduce(c, 0));
    CHECK_OK(spccl_cuda_wait(c->comm, &streams[c->rank][0], 20000));
}

static void test_ipc(void)
{
    struct rank_ctx ctx[3];
    reset();
    fake.no_fd[2] = true;
    run_ranks(3, NULL, shares_ipc, NULL, ctx);
    fake.no_fd[2] = false;
    CHECK(fake.n_memories == 0, "%d memories are left", fake.n_memories);
}

/* ---- arguments ---- */

static void bad_arguments(struct rank_ctx *c)
{
    float host[4];
    uint8_t *mine = fake_memory[c->rank], *other = fake_memory[1 - c->rank];
    void *s = &streams[c->rank][0];
    CHECK_OK(attach(c));
    CHECK(spccl_cuda_all_reduce(c->comm, host, host, 4, SPCCL_FLOAT32, SPCCL_SUM, s) == SPCCL_ERR_ARG &&
              strstr(spccl_last_error(), "host memory") != NULL,
          "%s", spccl_last_error());
    CHECK(spccl_cuda_all_reduce(c->comm, mine, other, 4, SPCCL_FLOAT32, SPCCL_SUM, s) == SPCCL_ERR_ARG &&
              strstr(spccl_last_error(), "out (") != NULL,
          "%s", spccl_last_error());
    CHECK(spccl_cuda_all_reduce(c->comm, mine + 1, mine + 1, 4, SPCCL_FLOAT32, SPCCL_SUM, s) == SPCCL_ERR_ARG,
          "alignment");
    CHECK(spccl_cuda_all_reduce(c->comm, mine, mine + 8, 4, SPCCL_FLOAT32, SPCCL_SUM, s) == SPCCL_ERR_ALIAS,
          "overlap");
    CHECK(spccl_cuda_all_reduce(c->comm, mine, mine, 4, SPCCL_FLOAT8, SPCCL_SUM, s) == SPCCL_ERR_DTYPE,
          "dtype");
    CHECK(spccl_cuda_all_gather(c->comm, mine, mine, SIZE_MAX / 4, SPCCL_FLOAT32, s) == SPCCL_ERR_ARG,
          "overflow");
    CHECK(spccl_cuda_broadcast(c->comm, mine, 4, SPCCL_FLOAT32, 2, s) == SPCCL_ERR_ARG, "root");
    CHECK(spccl_cuda_broadcast(c->comm, NULL, 4, SPCCL_FLOAT32, 1, s) == SPCCL_ERR_ARG, "NULL");
    CHECK_OK(spccl_comm_async_error(c->comm)); /* the group is not broken */
    CHECK_OK(reduce(c, 0));
    CHECK_OK(spccl_cuda_wait(c->comm, s, 20000));
}

static void test_bad_arguments(void)
{
    struct rank_ctx ctx[2];
    reset();
    run_ranks(2, NULL, bad_arguments, NULL, ctx);
    CHECK(fake.n_kernels == 2, "%d launches", fake.n_kernels);
}

static void test_codec_arguments(void)
{
    uint8_t *g = fake_memory[0];
    uint32_t *status = (uint32_t *)(void *)(g + 65000);
    uint64_t *offsets = (uint64_t *)(void *)(g + 64000);
    spccl_encode_options o = SPCCL_ENCODE_OPTIONS_INIT;
    reset();
    CHECK(spccl_cuda_encode_scratch_bytes(4097, SPCCL_FLOAT32, 0) == 32, "two slices");
    CHECK_OK(spccl_cuda_encode(g, 100, SPCCL_FLOAT32, NULL, g + 1024, 1024, offsets, g + 4096, status, NULL));
    CHECK(*status == 4096, "default slices: %u", *status);
    CHECK_OK(
        spccl_cuda_decode(g + 1024, 1024, offsets, SPCCL_ADD, g, 100, SPCCL_FLOAT32, 2048, status, NULL));
    CHECK(*status == 2048, "slices: %u", *status);
    CHECK(spccl_cuda_encode(g, 0, SPCCL_FLOAT32, NULL, g + 1024, 1024, offsets, g + 4096, status, NULL) ==
              SPCCL_ERR_ARG,
          "nothing");
    CHECK(spccl_cuda_encode(g, 100, SPCCL_FLOAT32, NULL, g + 1025, 1024, offsets, g + 4096, status, NULL) ==
              SPCCL_ERR_ARG,
          "alignment");
    CHECK(spccl_cuda_encode(g, 100, SPCCL_FLOAT32, NULL, g + 16, 1024, offsets, g + 4096, status, NULL) ==
              SPCCL_ERR_ALIAS,
          "overlap");
    CHECK(spccl_cuda_encode(fake_memory[1], 100, SPCCL_FLOAT32, NULL, g + 1024, 1024, offsets, g + 4096,
                            status, NULL) == SPCCL_ERR_ARG &&
              strstr(spccl_last_error(), "x (") != NULL && strstr(spccl_last_error(), "GPU 1") != NULL,
          "%s", spccl_last_error());
    o.slice_elems = 65536;
    CHECK(spccl_cuda_encode(g, 100, SPCCL_FLOAT32, &o, g + 1024, 1024, offsets, g + 4096, status, NULL) ==
              SPCCL_ERR_UNSUPPORTED,
          "a slice that is too large");
    CHECK(spccl_cuda_decode(g + 1024, 1024, offsets, SPCCL_ADD, g, 100, SPCCL_FLOAT8, 0, status, NULL) ==
              SPCCL_ERR_UNSUPPORTED,
          "float8 cannot be added");
}

/* ---- errors ---- */

/* Rank 2 does not take part. The other ranks time out, and their errors say what they waited for. */
static void late(struct rank_ctx *c)
{
    spccl_status st = SPCCL_OK;
    CHECK_OK(attach(c));
    wait_for_ranks(3);
    CHECK_OK(spccl_comm_set_timeout(c->comm, 400));
    if (c->rank != 2) {
        CHECK_OK(reduce(c, 0));
        st = spccl_cuda_wait(c->comm, &streams[c->rank][0], 20000);
        CHECK(st == SPCCL_ERR_TIMEOUT || st == SPCCL_ERR_ABORTED, "rank %d: %s: %s", c->rank,
              spccl_status_name(st), spccl_last_error());
        CHECK(strstr(spccl_last_error(),
                     "all_reduce no. 0 (1000 float32): waited 0.4 s for inputs of rank 2 (worker 12, "
                     "slice 4") != NULL,
              "%s", spccl_last_error());
    } else {
        int64_t deadline_ns = sp_deadline_in_ms(20000);
        while ((st = spccl_comm_async_error(c->comm)) == SPCCL_OK && !sp_deadline_passed(deadline_ns))
            usleep(1000);
        CHECK(st == SPCCL_ERR_ABORTED && strstr(spccl_last_error(), "gave up") != NULL, "%s",
              spccl_last_error());
    }
    CHECK(reduce(c, 0) == st, "later calls return the same error: %s", spccl_last_error());
}

static void test_timeout(void)
{
    struct rank_ctx ctx[3];
    reset();
    run_ranks(3, NULL, late, NULL, ctx);
    CHECK(fake.n_memories == 0, "%d memories are left", fake.n_memories);
}

/* Rank 1 aborts while rank 0's kernel waits. */
static void aborts(struct rank_ctx *c)
{
    int64_t start_ns;
    CHECK_OK(attach(c));
    wait_for_ranks(2);
    start_ns = sp_now_ns();
    if (c->rank == 0) {
        spccl_status st;
        CHECK_OK(reduce(c, 0));
        st = spccl_cuda_wait(c->comm, &streams[0][0], 20000);
        CHECK(st == SPCCL_ERR_ABORTED && strstr(spccl_last_error(), "enough") != NULL, "%s: %s",
              spccl_status_name(st), spccl_last_error());
    } else {
        usleep(50000);
        CHECK_OK(spccl_comm_abort(c->comm, "enough"));
        CHECK(reduce(c, 0) == SPCCL_ERR_ABORTED, "after the abort");
    }
    CHECK(sp_now_ns() - start_ns < INT64_C(10000000000), "ended late");
}

static void test_abort(void)
{
    struct rank_ctx ctx[2];
    reset();
    run_ranks(2, NULL, aborts, NULL, ctx);
}

/* A launch that fails at rank 1 ends the wait of rank 0. */
static void launch_fails(struct rank_ctx *c)
{
    spccl_status st;
    CHECK_OK(attach(c));
    if (c->rank == 0) {
        CHECK_OK(reduce(c, 0));
        wait_for_ranks(2);
        st = spccl_cuda_wait(c->comm, &streams[0][0], 20000);
        CHECK(st == SPCCL_ERR_ABORTED && strstr(spccl_last_error(), "fakeLaunch") != NULL, "%s",
              spccl_last_error());
        return;
    }
    wait_for_ranks(2);
    fake.launch_fails = true;
    st = reduce(c, 0);
    fake.launch_fails = false;
    CHECK(st == SPCCL_ERR_DEVICE && strstr(spccl_last_error(), "fakeLaunch") != NULL, "%s",
          spccl_last_error());
    CHECK(spccl_comm_async_error(c->comm) == SPCCL_ERR_DEVICE, "broken");
}

static void test_launch_fails(void)
{
    struct rank_ctx ctx[2];
    reset();
    run_ranks(2, NULL, launch_fails, NULL, ctx);
}

/* The error of a broken frame says who sent it, where it is, and what is wrong with it. */
static void bad_frame(struct rank_ctx *c)
{
    spccl_status st;
    CHECK_OK(attach(c));
    CHECK_OK(reduce(c, 0));
    st = spccl_cuda_wait(c->comm, &streams[c->rank][0], 20000);
    if (c->rank == 0)
        CHECK(st == SPCCL_ERR_FORMAT && strstr(spccl_last_error(), c->arg) != NULL, "%s: %s",
              spccl_status_name(st), spccl_last_error());
    wait_for_ranks(2);
}

static void test_bad_frame(void)
{
    static char in_header[] =
        "a frame of rank 1 breaks rule 9 of docs/FORMAT.md 4 (inputs, worker 12, slice 4: got 999, "
        "wanted 1000)",
                in_list[] = "the list of elements in a frame of rank 1 is broken (inputs, worker 12, slice 4";
    struct rank_ctx ctx[2];
    for (int i = 0; i < 2; i++) {
        reset();
        fake.bad_rule = i == 0 ? 9 : SP_GPU_RULE_INDEX;
        run_ranks(2, NULL, bad_frame, i == 0 ? in_header : in_list, ctx);
        fake.bad_rule = 0;
    }
}

/* ---- processes, one of which is killed ---- */

/* Rank 0 serves the rendezvous, as this process forks and so should have no threads. */
struct shared_id {
    atomic_bool ready;
    spccl_unique_id id;
};

static int run_killed(struct shared_id *shared, int rank)
{
    struct rank_ctx c = {.rank = rank, .n_ranks = 3};
    spccl_config config = SPCCL_CONFIG_INIT;
    spccl_status st;
    config.timeout_ms = 60000;
    if (rank == 0) {
        CHECK_OK(spccl_get_unique_id(&shared->id));
        shared->ready = true;
    }
    while (!shared->ready)
        usleep(1000);
    CHECK_OK(spccl_comm_init_rank(&shared->id, rank, 3, &config, &c.comm));
    CHECK_OK(attach(&c));
    CHECK_OK(reduce(&c, 0));
    CHECK_OK(spccl_cuda_wait(c.comm, &streams[rank][0], 20000));
    if (rank == 1)
        raise(SIGKILL);
    CHECK_OK(reduce(&c, 0));
    st = spccl_cuda_wait(c.comm, &streams[rank][0], 20000);
    /* The rank that notices first tells the other. */
    CHECK((st == SPCCL_ERR_PEER || st == SPCCL_ERR_ABORTED) && strstr(spccl_last_error(), "rank 1") != NULL,
          "%s: %s", spccl_status_name(st), spccl_last_error());
    CHECK(spccl_comm_async_error(c.comm) == st, "%s", spccl_last_error());
    CHECK_OK(spccl_comm_destroy(c.comm));
    CHECK(fake.n_memories == 0, "%d memories are left", fake.n_memories);
    return test_n_failed != 0;
}

static void test_killed_peer(void)
{
    struct shared_id *shared =
        mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    pid_t pids[3];
    reset();
    for (int r = 0; r < 3; r++)
        if ((pids[r] = fork()) == 0)
            _exit(run_killed(shared, r));
    for (int r = 0; r < 3; r++) {
        int status = 0;
        waitpid(pids[r], &status, 0);
        CHECK(r == 1 ? WIFSIGNALED(status) : WIFEXITED(status) && WEXITSTATUS(status) == 0,
              "rank %d: status %d", r, status);
    }
    munmap(shared, sizeof *shared);
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {
        {"killed_peer", test_killed_peer}, /* first, as it forks and must have no threads yet */
        {"memory_entry", test_memory_entry},
        {"works", test_works},
        {"limits", test_limits},
        {"refusals", test_refusals},
        {"ipc", test_ipc},
        {"bad_arguments", test_bad_arguments},
        {"codec_arguments", test_codec_arguments},
        {"timeout", test_timeout},
        {"abort", test_abort},
        {"launch_fails", test_launch_fails},
        {"bad_frame", test_bad_frame},
        {NULL, NULL}};
    return test_main(cases, argc, argv);
}
