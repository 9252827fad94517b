/* test_cuda_channels.c - one-sided channels (spccl_channel.h) in kernels of a user: the ring of examples/channels, an
 * exchange of all pairs, and what is refused or fails. Ranks are threads. */
#include "channel_ranks.h"

#define CAP ((size_t)1 << 20)

/* ---- the ring of the example ---- */

struct ring {
    spccl_memory_channel next, previous;
};

/* The link from the last rank to rank 0 has the number 1, all others 0. */
static struct ring get_ring(const struct rank_ctx *c, const spccl_channels *channels)
{
    int n = c->n_ranks;
    struct ring ring = {0};
    CHECK_OK(spccl_channels_get_memory(channels, (c->rank + 1) % n, c->rank + 1 == n, &ring.next));
    CHECK_OK(spccl_channels_get_memory(channels, (c->rank + n - 1) % n, c->rank == 0, &ring.previous));
    return ring;
}

static void run_ring(struct rank_ctx *c, spccl_channels *channels, size_t bytes, int round)
{
    const struct rank_buffer *m = &rank_buffers[c->rank];
    struct ring ring = get_ring(c, channels);
    struct ring_job job = ring_job_of(c, bytes);
    fill_block(m->in, bytes, c->rank, round);
    CUDA_OK(cudaMemcpyAsync(m->in_d, m->in, bytes, cudaMemcpyHostToDevice, m->on));
    CUDA_OK(cudaMemsetAsync(m->out_d, POISON, bytes * (size_t)c->n_ranks, m->on));
    CUDA_OK(ring_all_gather_memory(ring.next, ring.previous, &job, m->on));
    CUDA_OK(cudaMemcpyAsync(m->got, m->out_d, bytes * (size_t)c->n_ranks, cudaMemcpyDeviceToHost, m->on));
    CHECK_OK(spccl_cuda_wait(c->comm, m->on, LONG_MS));
    check_blocks(c, bytes, round);
}

static void ring_rank(struct rank_ctx *c)
{
    static const size_t sizes[] = {16, 20464, 65536};
    spccl_channels *channels, *others;
    if (!attach_gpu(c->comm, c->rank, 0))
        return;
    for (int i = 0; i < (is_small ? 2 : 3); i++) {
        channels = make_channels(c, SPCCL_CHANNEL_MEMORY, RING_WINDOW_BYTES(sizes[i]), 2);
        if (channels == NULL)
            return;
        for (int round = 0; round < 3; round++)
            run_ring(c, channels, sizes[i], round);
        spccl_channels_destroy(channels);
    }
    /* Two sets at the same time, and collectives between. The communicator destroys them. */
    channels = make_channels(c, SPCCL_CHANNEL_MEMORY, RING_WINDOW_BYTES(sizes[1]), 2);
    others = make_channels(c, SPCCL_CHANNEL_MEMORY, RING_WINDOW_BYTES(sizes[0]), 2);
    if (channels == NULL || others == NULL)
        return;
    run_ring(c, channels, sizes[1], 7);
    check_works(c);
    run_ring(c, others, sizes[0], 8);
    CHECK_OK(spccl_comm_async_error(c->comm));
}

static void test_ring(void)
{
    run_group(2, ring_rank, NULL);
    run_group(N_RANKS, ring_rank, NULL);
    if (!is_small)
        run_group(5, ring_rank, NULL);
}

/* ---- windows that are the caller's memory ---- */

#define OWN_OFF 4112u /* inside an allocation; the ring's result is at its start */
#define OWN_BLOCK 20464u
#define FILL 0x5c

static void check_fill(const struct rank_ctx *c, size_t off, size_t bytes)
{
    const struct rank_buffer *m = &rank_buffers[c->rank];
    size_t i = 0;
    CUDA_OK(cudaMemcpyAsync(m->plain, m->spare_d + off, bytes, cudaMemcpyDeviceToHost, m->on));
    sync_stream(m->on);
    while (i < bytes && m->plain[i] == FILL)
        i++;
    CHECK(i == bytes, "rank %d: byte %zu of the caller's memory has changed", c->rank, off + i);
}

static void own_window_rank(struct rank_ctx *c)
{
    const struct rank_buffer *m = &rank_buffers[c->rank];
    spccl_channels_config config = SPCCL_CHANNELS_CONFIG_INIT;
    spccl_channels *channels = NULL;
    void *device = NULL, *host = &device;
    size_t bytes = RING_WINDOW_BYTES(OWN_BLOCK);
    if (!attach_gpu(c->comm, c->rank, 0))
        return;
    CUDA_OK(cudaMemsetAsync(m->spare_d, FILL, CAP, m->on));
    sync_stream(m->on);
    config.window_bytes = bytes;
    config.n_per_peer = 2;
    config.window = m->spare_d + OWN_OFF;
    for (int round = 0; round < 2; round++) {
        CHECK_OK(spccl_channels_create(c->comm, &config, &channels));
        if (channels == NULL)
            return;
        CHECK_OK(spccl_channels_window(channels, &device, &host));
        CHECK(device == config.window && host == NULL, "%p, %p, wanted %p", device, host, config.window);
        if (round == 0)
            check_fill(c, OWN_OFF, bytes);
        all_here(c->comm); /* before peers put */
        run_ring(c, channels, OWN_BLOCK, 2 * round);
        run_ring(c, channels, OWN_BLOCK, 2 * round + 1);
        check_fill(c, OWN_OFF / 2, OWN_OFF - OWN_OFF / 2);
        check_fill(c, OWN_OFF + bytes, CAP - OWN_OFF - bytes);
        if (round == 0) /* the communicator destroys the other one */
            spccl_channels_destroy(channels);
    }
    check_works(c);
}

static void test_own_window(void)
{
    run_group(2, own_window_rank, NULL);
    run_group(N_RANKS, own_window_rank, NULL);
}

/* A captured kernel can be replayed. */
static void replay(struct rank_ctx *c)
{
    const struct rank_buffer *m = &rank_buffers[c->rank];
    size_t bytes = 4096;
    struct ring_job job = ring_job_of(c, bytes);
    spccl_channels *channels;
    struct ring ring;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    if (!attach_gpu(c->comm, c->rank, 0))
        return;
    channels = make_channels(c, SPCCL_CHANNEL_MEMORY, RING_WINDOW_BYTES(bytes), 2);
    if (channels == NULL)
        return;
    ring = get_ring(c, channels);
    CUDA_OK(cudaStreamBeginCapture(m->on, cudaStreamCaptureModeThreadLocal));
    CUDA_OK(ring_all_gather_memory(ring.next, ring.previous, &job, m->on));
    CUDA_OK(cudaStreamEndCapture(m->on, &graph));
    CUDA_OK(cudaGraphInstantiate(&exec, graph, 0));
    for (int round = 0; round < 3; round++) {
        fill_block(m->in, bytes, c->rank, round);
        CUDA_OK(cudaMemcpyAsync(m->in_d, m->in, bytes, cudaMemcpyHostToDevice, m->on));
        CUDA_OK(cudaGraphLaunch(exec, m->on));
        CUDA_OK(cudaMemcpyAsync(m->got, m->out_d, bytes * (size_t)c->n_ranks, cudaMemcpyDeviceToHost, m->on));
        CHECK_OK(spccl_cuda_wait(c->comm, m->on, LONG_MS));
        check_blocks(c, bytes, round);
    }
    CUDA_OK(cudaGraphExecDestroy(exec));
    CUDA_OK(cudaGraphDestroy(graph));
    spccl_channels_destroy(channels);
}

static void test_replay(void)
{
    run_group(N_RANKS, replay, NULL);
}

/* ---- all pairs at the same time, several channels each ---- */

static void exchange_pairs(struct rank_ctx *c)
{
    const struct rank_buffer *m = &rank_buffers[c->rank];
    struct exchange_item *items = (struct exchange_item *)(void *)m->in;
    spccl_channels *channels;
    unsigned n = 0;
    uint32_t n_wrong = 1;
    if (!attach_gpu(c->comm, c->rank, 0))
        return;
    channels = make_channels(c, SPCCL_CHANNEL_MEMORY, (uint64_t)c->n_ranks * PER_PEER * PIECE, PER_PEER);
    if (channels == NULL)
        return;
    for (int p = 0; p < c->n_ranks; p++)
        for (uint32_t i = 0; p != c->rank && i < PER_PEER; i++, n++) {
            CHECK_OK(spccl_channels_get_memory(channels, p, i, &items[n].channel));
            items[n].dst_off = piece_off(c->rank, i);
            items[n].own_off = piece_off(p, i);
            items[n].seed_out = seed_of(c->rank, p, i);
            items[n].seed_in = seed_of(p, c->rank, i);
            items[n].source = m->spare_d + n * PIECE;
        }
    CUDA_OK(cudaMemcpyAsync(m->in_d, m->in, n * sizeof *items, cudaMemcpyHostToDevice, m->on));
    CUDA_OK(channel_exchange((const struct exchange_item *)(const void *)m->in_d, n, PIECE, is_small ? 3 : 20,
                             (uint32_t *)(void *)m->out_d, m->on));
    CUDA_OK(cudaMemcpyAsync(m->got, m->out_d, sizeof n_wrong, cudaMemcpyDeviceToHost, m->on));
    CHECK_OK(spccl_cuda_wait(c->comm, m->on, LONG_MS));
    memcpy(&n_wrong, m->got, sizeof n_wrong);
    CHECK(n_wrong == 0, "rank %d: %u wrong words", c->rank, n_wrong);
    spccl_channels_destroy(channels);
}

static void test_pairs(void)
{
    run_group(2, exchange_pairs, NULL);
    run_group(is_small ? N_RANKS : 4, exchange_pairs, NULL);
}

/* ---- failures: the kernel ends, and the error says what happened ---- */

struct failure {
    enum channel_misuse what;
    spccl_status wanted;
    const char *text;
    bool aborts; /* rank 1 aborts instead */
    _Atomic int n_made, n_started, n_done;
};

/* Rank 0 does the wrong thing. */
static void fail_alone(struct rank_ctx *c, struct failure *f, const spccl_channels *channels)
{
    const struct rank_buffer *m = &rank_buffers[0];
    spccl_memory_channel channel;
    uint32_t failed = 0;
    spccl_status st;
    if (f->what == MISUSE_NO_SIGNAL && !f->aborts)
        CHECK_OK(spccl_comm_set_timeout(c->comm, 1000)); /* the only wait that is meant to pass */
    CHECK_OK(spccl_channels_get_memory(channels, 1, 1, &channel));
    CHECK_OK(spccl_comm_set_timeout(c->comm, LONG_MS));
    CUDA_OK(channel_do_wrong(channel, f->what, (uint32_t *)(void *)m->out_d, m->on));
    f->n_started++;
    st = spccl_cuda_wait(c->comm, m->on, LONG_MS);
    CHECK(st == f->wanted && strstr(spccl_last_error(), f->text) != NULL, "%s: \"%s\", wanted \"%s\"",
          spccl_status_name(st), spccl_last_error(), f->text);
    sync_stream(m->on);
    CUDA_OK(cudaMemcpyAsync(m->got, m->out_d, sizeof failed, cudaMemcpyDeviceToHost, m->on));
    sync_stream(m->on);
    memcpy(&failed, m->got, sizeof failed);
    CHECK(failed == 1, "the kernel did not see the failure");
}

static void fail_rank(struct rank_ctx *c)
{
    struct failure *f = c->arg;
    spccl_channels *channels;
    int64_t until = now_ms() + LONG_MS;
    if (!attach_gpu(c->comm, c->rank, 0))
        return;
    channels = make_channels(c, SPCCL_CHANNEL_MEMORY, 4096, 2);
    if (channels == NULL)
        return;
    if (!wait_for_all(c, &f->n_made)) /* a rank that fails earlier would end the creation on the others */
        return;
    if (c->rank == 0)
        fail_alone(c, f, channels);
    while (f->n_started == 0 && now_ms() < until)
        sleep_ms(1);
    if (c->rank == 1 && f->aborts)
        CHECK_OK(spccl_comm_abort(c->comm, "the test aborts"));
    (void)wait_for_all(c, &f->n_done); /* a rank that left would be taken for dead */
    if (f->what == MISUSE_PAST_END)    /* else the communicator does it; it takes 1 s once more */
        spccl_channels_destroy(channels);
}

static void test_failures(void)
{
    struct failure all[] = {
        {.what = MISUSE_NO_SIGNAL,
         .wanted = SPCCL_ERR_TIMEOUT,
         .text = "channel 1 to rank 1: waited for signal number 1, 0 have come"},
        {.what = MISUSE_PAST_END,
         .wanted = SPCCL_ERR_ARG,
         .text = "a put or get at bytes 4080 to 4112 of a memory of 4096"},
        {.what = MISUSE_FAR_OFFSET,
         .wanted = SPCCL_ERR_ARG,
         .text = "a put or get at bytes 18446744073709551600 to beyond 2^64 of"},
        {.what = MISUSE_ODD_SIZE, .wanted = SPCCL_ERR_ARG, .text = "a put or get at bytes 0 to 24"},
        {.what = MISUSE_ODD_SOURCE, .wanted = SPCCL_ERR_ARG, .text = "multiples of 16"},
        {.what = MISUSE_NO_THREADS, .wanted = SPCCL_ERR_ARG, .text = "of 0: wanted thread from 0"},
        {.what = MISUSE_FAR_THREAD, .wanted = SPCCL_ERR_ARG, .text = "a put or get by thread"},
        {.what = MISUSE_NO_SIGNAL, .wanted = SPCCL_ERR_ABORTED, .text = "the test aborts", .aborts = true},
    };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (!is_small || i < 2 || all[i].aborts)
            run_group(2, fail_rank, &all[i]);
    run_group(2, attach_and_check, NULL); /* the GPU is usable */
}

/* ---- refused at the call ---- */

/* All ranks get the same error; the rank that calls wrongly is `rank`, or all of them if it is -1. */
static void refuse(struct rank_ctx *c, int rank, spccl_channels_config wrong, spccl_status status,
                   const char *text)
{
    spccl_channels_config right = SPCCL_CHANNELS_CONFIG_INIT;
    spccl_channels *channels = NULL;
    right.window_bytes = 64;
    want(status, spccl_channels_create(c->comm, rank < 0 || rank == c->rank ? &wrong : &right, &channels),
         text);
    CHECK(channels == NULL, "a refused call changed its result");
}

/* A refused call frees what it had allocated. If ranks share a GPU, that waits for the kernels of the other rank. So no
 * rank may launch before all have freed. */
static void refused_works(struct rank_ctx *c)
{
    if (all_here(c->comm))
        check_works(c);
}

static void refuses_creation(struct rank_ctx *c)
{
    spccl_channels_config config = SPCCL_CHANNELS_CONFIG_INIT, x;
    spccl_channels *channels = NULL;
    config.window_bytes = 64;
    want(SPCCL_ERR_STATE, spccl_channels_create(c->comm, &config, &channels), "spccl_cuda_attach");
    if (!attach_gpu(c->comm, c->rank, 0))
        return;
    want(SPCCL_ERR_ARG, spccl_channels_create(NULL, &config, &channels), "comm is NULL");
    want(SPCCL_ERR_ARG, spccl_channels_create(c->comm, &config, c->rank == 1 ? NULL : &channels),
         "rank 1: spccl_channels_create: out is NULL"); /* on all ranks */
    want(SPCCL_ERR_ARG, spccl_channels_create(c->comm, &config, NULL), "out is NULL");
    x = config, x.layout = SPCCL_CHANNEL_LAYOUT + 1;
    refuse(c, 1, x, SPCCL_ERR_VERSION,
           "rank 1: spccl_channels_create: config.layout is 3, this library has 2");
    x = config, x.kind = 9;
    refuse(c, -1, x, SPCCL_ERR_ARG, "config.kind is 9");
    x = config, x.window_bytes = 0;
    refuse(c, 0, x, SPCCL_ERR_ARG, "config.window_bytes is 0");
    x.window_bytes = 40;
    refuse(c, 0, x, SPCCL_ERR_ARG, "config.window_bytes is 40");
    x = config, x.window_bytes = 128;
    refuse(c, 1, x, SPCCL_ERR_MISMATCH, "rank 1 called spccl_channels_create with kind 1, window_bytes 128");
    x = config, x.n_per_peer = 0;
    refuse(c, -1, x, SPCCL_ERR_ARG, "config.n_per_peer is 0, wanted 1 to 1024");
    x = config, x.n_per_peer = 2;
    refuse(c, 1, x, SPCCL_ERR_MISMATCH, "n_per_peer 2");
    x = config, x.n_triggers = 3;
    refuse(c, 0, x, SPCCL_ERR_ARG, "config.n_triggers is 3, wanted 0 or a power of two, 2 to 4096");
    x = config, x.struct_bytes = 4;
    refuse(c, 1, x, SPCCL_ERR_ARG, "spccl_channels_config");
    x = config, x.window_bytes = (uint64_t)1 << 40;
    refuse(c, -1, x, SPCCL_ERR_NOMEM, "for window and counts");
    refused_works(c);
}

static void refuses_windows(struct rank_ctx *c)
{
    const struct rank_buffer *m = &rank_buffers[c->rank];
    spccl_channels_config config = SPCCL_CHANNELS_CONFIG_INIT, x;
    void *pooled = NULL;
    if (!attach_gpu(c->comm, c->rank, 0))
        return;
    config.window_bytes = 64;
    x = config, x.window = m->spare_d;
    refuse(c, 1, x, SPCCL_ERR_MISMATCH,
           "rank 1 called spccl_channels_create with config.window, rank 0 without");
    x.kind = SPCCL_CHANNEL_PORT;
    refuse(c, -1, x, SPCCL_ERR_ARG, "wanted NULL: the library allocates the pinned windows");
    x = config, x.window = m->spare_d + 8;
    refuse(c, -1, x, SPCCL_ERR_ARG, "wanted a multiple of 16");
    x.window = m->in;
    refuse(c, -1, x, SPCCL_ERR_ARG, "is not memory of GPU");
    x.window = m->spare_d + CAP - 32;
    refuse(c, -1, x, SPCCL_ERR_ARG, "the allocation has 32 bytes from there");
    CUDA_OK(cudaMallocAsync(&pooled, 64, m->on));
    sync_stream(m->on);
    x.window = pooled;
    refuse(c, -1, x, SPCCL_ERR_UNREACHABLE,
           "cannot be shared with other processes: wanted memory from cudaMalloc");
    CUDA_OK(cudaFree(pooled));
    refused_works(c);
}

static void refuses_handles(struct rank_ctx *c)
{
    spccl_channels *channels;
    spccl_memory_channel channel;
    void *device = NULL, *host = &device;
    if (!attach_gpu(c->comm, c->rank, 0) ||
        (channels = make_channels(c, SPCCL_CHANNEL_MEMORY, 64, 2)) == NULL)
        return;
    want(SPCCL_ERR_ARG, spccl_channels_get_memory(NULL, 0, 0, &channel), "channels is NULL");
    want(SPCCL_ERR_ARG, spccl_channels_get_memory(channels, c->rank, 0, &channel), "wanted another rank");
    want(SPCCL_ERR_ARG, spccl_channels_get_memory(channels, 2, 0, &channel), "peer is 2");
    want(SPCCL_ERR_ARG, spccl_channels_get_memory(channels, -1, 0, &channel), "peer is -1");
    want(SPCCL_ERR_ARG, spccl_channels_get_memory(channels, 1 - c->rank, 2, &channel), "wanted 0 to 1");
    want(SPCCL_ERR_ARG, spccl_channels_get_memory(channels, 1 - c->rank, 0, NULL), "out is NULL");
    want(SPCCL_ERR_ARG, spccl_channels_window(channels, &device, NULL), "NULL");
    CHECK_OK(spccl_channels_window(channels, &device, &host));
    CHECK_OK(spccl_channels_get_memory(channels, 1 - c->rank, 0, &channel));
    CHECK(device == channel.base.window && host == NULL, "%p, %p, %p", device, (void *)channel.base.window,
          host);
    spccl_channels_destroy(channels);
    spccl_channels_destroy(NULL);
}

static void other_host(struct rank_ctx *c)
{
    spccl_channels *channels;
    spccl_memory_channel channel;
    if (!attach_gpu(c->comm, c->rank, 0) ||
        (channels = make_channels(c, SPCCL_CHANNEL_MEMORY, 64, 1)) == NULL)
        return;
    want(SPCCL_ERR_UNREACHABLE, spccl_channels_get_memory(channels, 1 - c->rank, 0, &channel),
         "another host");
    spccl_channels_destroy(channels);
}

static void test_refusals(void)
{
    run_group(2, refuses_creation, NULL);
    run_group(2, refuses_windows, NULL);
    run_group(2, refuses_handles, NULL);
    test_ranks_per_host = 1;
    setenv("SPCCL_CUDA_ROUTE", "spccl", 1);
    run_group(2, other_host, NULL);
    unsetenv("SPCCL_CUDA_ROUTE");
    test_ranks_per_host = 0;
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {
        {"ring", test_ring},   {"own_window", test_own_window}, {"replay", test_replay},
        {"pairs", test_pairs}, {"failures", test_failures},     {"refusals", test_refusals},
        {NULL, NULL}};
    cuda_test_start(&argc, argv);
    make_rank_buffers(5, CAP);
    return test_main(cases, argc, argv);
}
