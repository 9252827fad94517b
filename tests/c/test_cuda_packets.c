/* test_cuda_packets.c - packets, gets and barriers of blocks (spccl_device.cuh) in kernels of a user, and the all-reduce
 * of examples/channels. Ranks are threads.
 *
 * What only this test catches: a packet of 16 bytes of which one half was there (the software GPU stores halves apart); a
 * flag or place that is used again too early; a barrier that passes on one thread's stores only, or works once; bounds of
 * packets, which are twice their data. */
#include "channel_ranks.h"

#include "all_pairs_kernel.h"
#include "packet_kernels.h"

#define CAP ((size_t)1 << 20)

static uint32_t read_word(const struct rank_ctx *c, const void *device)
{
    const struct rank_buffer *m = &rank_buffers[c->rank];
    uint32_t word;
    CUDA_OK(cudaMemcpyAsync(m->plain, device, sizeof word, cudaMemcpyDeviceToHost, m->on));
    CHECK_OK(spccl_cuda_wait(c->comm, m->on, LONG_MS));
    memcpy(&word, m->plain, sizeof word);
    return word;
}

/* ---- all pairs exchange packets and get, over several channels each ---- */

/* Jobs of all channels of this rank, on the GPU. Each has a place of 4 * bytes in a window. */
static unsigned make_jobs(const struct rank_ctx *c, const spccl_channels *channels, uint64_t bytes,
                          uint32_t memory)
{
    const struct rank_buffer *m = &rank_buffers[c->rank];
    struct packet_job *jobs = (struct packet_job *)(void *)m->in;
    unsigned n = 0;
    for (int p = 0; p < c->n_ranks; p++)
        for (uint32_t i = 0; p != c->rank && i < PER_PEER; i++, n++) {
            CHECK_OK(spccl_channels_get_memory_at(channels, p, i, memory, memory, &jobs[n].channel));
            jobs[n].bytes = bytes;
            jobs[n].out_off = ((uint64_t)c->rank * PER_PEER + i) * 4 * bytes;
            jobs[n].in_off = ((uint64_t)p * PER_PEER + i) * 4 * bytes;
            jobs[n].seed_out = seed_of(c->rank, p, i);
            jobs[n].seed_in = seed_of(p, c->rank, i);
            jobs[n].scratch = m->spare_d + n * 2 * bytes;
        }
    CUDA_OK(cudaMemcpyAsync(m->in_d, m->in, n * sizeof *jobs, cudaMemcpyHostToDevice, m->on));
    return n;
}

static void check_wrong(const struct rank_ctx *c, const char *what, uint64_t bytes)
{
    uint32_t n_wrong = read_word(c, rank_buffers[c->rank].out_d);
    CHECK(n_wrong == 0, "rank %d: %s of %zu bytes: %u wrong words", c->rank, what, (size_t)bytes, n_wrong);
}

/* In the window, or in an added memory: the window is then too short. */
static void exchange(struct rank_ctx *c, uint64_t bytes, bool adds)
{
    const struct rank_buffer *m = &rank_buffers[c->rank];
    const struct packet_job *jobs = (const struct packet_job *)(const void *)m->in_d;
    uint32_t *n_wrong = (uint32_t *)(void *)m->out_d;
    struct packet_rounds rounds = {0, is_small ? 3 : 9};
    uint64_t window = ((uint64_t)c->n_ranks * PER_PEER * 4 * bytes + 15) / 16 * 16;
    spccl_channels *channels = make_channels(c, SPCCL_CHANNEL_MEMORY, adds ? 16 : window, PER_PEER);
    uint32_t memory = 0;
    unsigned n;
    if (channels == NULL)
        return;
    if (adds) {
        CUDA_OK(cudaMemsetAsync(m->spare_d + CAP / 2, 0, window, m->on)); /* no flags of earlier packets */
        sync_stream(m->on);
        CHECK_OK(spccl_channels_add_memory(channels, m->spare_d + CAP / 2, window, &memory));
        CHECK(memory == 1, "number %u", memory);
    }
    n = make_jobs(c, channels, bytes, memory);
    CUDA_OK(packet_exchange(jobs, n, 8, rounds, n_wrong, m->on));
    check_wrong(c, "packets of 8 bytes", bytes);
    rounds.first = rounds.n; /* the places go on taking turns */
    if (bytes % 8 == 0) {
        CUDA_OK(packet_exchange(jobs, n, 16, rounds, n_wrong, m->on));
        check_wrong(c, "packets of 16 bytes", bytes);
    }
    if (!all_here(c->comm)) /* all have read their packets */
        return;
    if (bytes % 16 == 0) {
        CUDA_OK(get_exchange(jobs, n, rounds, n_wrong, m->on));
        check_wrong(c, "gets", bytes);
    }
    spccl_channels_destroy(channels);
}

static void exchange_rank(struct rank_ctx *c)
{
    static const uint64_t sizes[] = {16, 1040, 4, 8, 776};
    if (!attach_gpu(c->comm, c->rank, 0))
        return;
    for (int i = 0; i < (is_small ? 2 : 5); i++)
        exchange(c, sizes[i], i == 1);
}

static void test_exchange(void)
{
    run_group(2, exchange_rank, NULL);
    run_group(is_small ? N_RANKS : 4, exchange_rank, NULL);
}

/* ---- blocks of one kernel ---- */

static void blocks_rank(struct rank_ctx *c)
{
    static const unsigned n_blocks[] = {5, 1, 2,
                                        8}; /* one channel, so each number must leave it ready for the next */
    const struct rank_buffer *m = &rank_buffers[c->rank];
    spccl_memory_channel channel;
    spccl_channels *channels;
    if (!attach_gpu(c->comm, c->rank, 0) ||
        (channels = make_channels(c, SPCCL_CHANNEL_MEMORY, 64, 1)) == NULL)
        return;
    CHECK_OK(spccl_channels_get_memory(channels, 1 - c->rank, 0, &channel));
    for (int i = 0; i < 4; i++) {
        CUDA_OK(blocks_meet(channel, n_blocks[i], is_small ? 4 : 20, m->spare_d, (uint32_t *)(void *)m->out_d,
                            m->on));
        check_wrong(c, "blocks", n_blocks[i]);
    }
    spccl_channels_destroy(channels);
}

static void test_blocks(void)
{
    run_group(2, blocks_rank, NULL);
}

/* ---- the all-reduce of the example, called and as a captured graph ---- */

static float element(int rank, size_t i, int round)
{
    return (float)(i % 13) * 0.1f + (float)rank * 1e-3f + (float)round; /* sums depend on their order */
}

static void load_elements(const struct rank_ctx *c, size_t n, int round)
{
    const struct rank_buffer *m = &rank_buffers[c->rank];
    for (size_t i = 0; i < n; i++)
        ((float *)(void *)m->in)[i] = element(c->rank, i, round);
    CUDA_OK(cudaMemcpyAsync(m->in_d, m->in, n * 4, cudaMemcpyHostToDevice, m->on));
    CUDA_OK(cudaMemsetAsync(m->out_d, POISON, n * 4, m->on));
}

static void check_elements(const struct rank_ctx *c, const struct all_pairs_job *job, int round)
{
    const struct rank_buffer *m = &rank_buffers[c->rank];
    const float *got = (const float *)(const void *)m->got;
    size_t n = job->n_elems, i = 0;
    CUDA_OK(cudaMemcpyAsync(m->got, m->out_d, n * 4, cudaMemcpyDeviceToHost, m->on));
    CHECK_OK(spccl_cuda_wait(c->comm, m->on, LONG_MS));
    for (; i < n; i++) {
        float sum = 0;
        for (int r = 0; r < c->n_ranks; r++)
            sum += element(r, i, round);
        if (memcmp(&sum, &got[i], sizeof sum) != 0)
            break;
    }
    CHECK(i == n, "rank %d of %d, round %d: element %zu of %zu is %a", c->rank, c->n_ranks, round, i, n,
          i < n ? (double)got[i] : 0);
}

static void replay(struct rank_ctx *c, const spccl_memory_channel *to, const struct all_pairs_job *job)
{
    const struct rank_buffer *m = &rank_buffers[c->rank];
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    CUDA_OK(cudaStreamBeginCapture(m->on, cudaStreamCaptureModeThreadLocal));
    CUDA_OK(all_pairs_all_reduce(to, job, m->on));
    CUDA_OK(cudaStreamEndCapture(m->on, &graph));
    CUDA_OK(cudaGraphInstantiate(&exec, graph, 0));
    for (int round = 10; round < 13; round++) {
        load_elements(c, job->n_elems, round);
        CUDA_OK(cudaGraphLaunch(exec, m->on));
        check_elements(c, job, round);
    }
    CUDA_OK(cudaGraphExecDestroy(exec));
    CUDA_OK(cudaGraphDestroy(graph));
}

/* uses: at first. Windows are zero then, so no flag of an earlier use is in them. */
static void all_pairs(struct rank_ctx *c, size_t n_elems, uint32_t uses)
{
    const struct rank_buffer *m = &rank_buffers[c->rank];
    struct all_pairs_job job = {.in = (const float *)(const void *)m->in_d,
                                .out = (float *)(void *)m->out_d,
                                .n_elems = n_elems,
                                .rank = c->rank,
                                .world_size = c->n_ranks,
                                .uses = (uint32_t *)(void *)m->spare_d};
    spccl_channels *channels =
        make_channels(c, SPCCL_CHANNEL_MEMORY, ALL_PAIRS_WINDOW_BYTES(n_elems, (uint64_t)c->n_ranks), 1);
    spccl_memory_channel to[ALL_PAIRS_RANKS_MAX];
    if (channels == NULL)
        return;
    for (int p = 0; p < c->n_ranks; p++)
        if (p != c->rank)
            CHECK_OK(spccl_channels_get_memory(channels, p, 0, &to[p]));
    for (int i = 0; i < ALL_PAIRS_BLOCKS_MAX; i++)
        ((uint32_t *)(void *)m->plain)[i] = uses;
    CUDA_OK(cudaMemcpyAsync(job.uses, m->plain, ALL_PAIRS_BLOCKS_MAX * sizeof uses, cudaMemcpyHostToDevice,
                            m->on));
    for (int round = 0; round < 5; round++) {
        load_elements(c, n_elems, round);
        CUDA_OK(all_pairs_all_reduce(to, &job, m->on));
        check_elements(c, &job, round);
    }
    replay(c, to, &job);
    spccl_channels_destroy(channels);
}

static void all_pairs_rank(struct rank_ctx *c)
{
    if (!attach_gpu(c->comm, c->rank, 0))
        return;
    all_pairs(c, 4096, 0);           /* 16 KiB, a packet for each thread */
    all_pairs(c, 2, 0);              /* one thread has a packet */
    all_pairs(c, 1030, 0xfffffffbu); /* the last block has few; the count begins again */
    if (c->n_ranks == 2)
        all_pairs(c, 16450, 0); /* some threads have two; slow in software with more ranks */
}

static void test_all_pairs(void)
{
    run_group(2, all_pairs_rank, NULL);
    run_group(is_small ? N_RANKS : 5, all_pairs_rank, NULL);
}

/* ---- memories that are refused ---- */

/* Rank `rank` calls with what is wrong; -1: all ranks. */
struct wrong_memory {
    int rank;
    void *memory;
    uint64_t bytes;
};

static void refuse(const struct rank_ctx *c, spccl_channels *channels, struct wrong_memory w,
                   spccl_status status, const char *text)
{
    const struct rank_buffer *m = &rank_buffers[c->rank];
    bool wrong = w.rank < 0 || w.rank == c->rank;
    uint32_t number = 77;
    want(status,
         spccl_channels_add_memory(channels, wrong ? w.memory : m->spare_d, wrong ? w.bytes : 64, &number),
         text);
    CHECK(number == 77, "a refused call changed its result");
}

static void refusals_rank(struct rank_ctx *c)
{
    const struct rank_buffer *m = &rank_buffers[c->rank];
    spccl_memory_channel channel;
    spccl_channels *channels, *second;
    uint32_t number = 0;
    if (!attach_gpu(c->comm, c->rank, 0) ||
        (channels = make_channels(c, SPCCL_CHANNEL_MEMORY, 64, 1)) == NULL ||
        (second = make_channels(c, SPCCL_CHANNEL_MEMORY, 64, 1)) == NULL)
        return;
    want(SPCCL_ERR_ARG, spccl_channels_add_memory(NULL, m->spare_d, 64, &number), "channels is NULL");
    refuse(c, channels, (struct wrong_memory){1, NULL, 64}, SPCCL_ERR_ARG,
           "rank 1: spccl_channels_add_memory: memory is");
    refuse(c, channels, (struct wrong_memory){0, m->spare_d + 8, 64}, SPCCL_ERR_ARG,
           "rank 0: spccl_channels_add_memory: memory is");
    refuse(c, channels, (struct wrong_memory){1, m->spare_d, 40}, SPCCL_ERR_ARG,
           "bytes is 40, wanted a multiple of 16");
    refuse(c, channels, (struct wrong_memory){1, m->spare_d, 128}, SPCCL_ERR_MISMATCH,
           "with 128 bytes, for memory 1 of set 1; rank 0 with 64");
    refuse(c, c->rank == 1 ? second : channels, (struct wrong_memory){-1, m->spare_d, 64}, SPCCL_ERR_MISMATCH,
           "for memory 1 of set 2; rank 0 with 64, for memory 1 of set 1");
    refuse(c, channels, (struct wrong_memory){1, m->in, 64}, SPCCL_ERR_ARG, "is not memory of GPU");
    refuse(c, channels, (struct wrong_memory){-1, m->spare_d + CAP - 32, 64}, SPCCL_ERR_ARG,
           "the allocation has 32 bytes from there");
    for (uint32_t i = 1; i < 16; i++) {
        CHECK_OK(spccl_channels_add_memory(channels, m->spare_d + 64 * i, 64, &number));
        CHECK(number == i, "number %u, wanted %u", number, i);
    }
    refuse(c, channels, (struct wrong_memory){-1, m->spare_d, 64}, SPCCL_ERR_ARG, "the set has 16 memories");
    CHECK_OK(spccl_channels_get_memory_at(channels, 1 - c->rank, 0, 15, 3, &channel));
    CHECK(channel.base.window == m->spare_d + 192 &&
              channel.peer_window == rank_buffers[1 - c->rank].spare_d + 960,
          "%p, %p", (void *)channel.base.window, (void *)channel.peer_window);
    want(SPCCL_ERR_ARG, spccl_channels_get_memory_at(channels, 1 - c->rank, 0, 16, 0, &channel),
         "wanted 0 to 15");
    spccl_channels_destroy(channels);
    spccl_channels_destroy(second);
    if (all_here(c->comm))
        check_works(c);
}

static void test_refusals(void)
{
    run_group(2, refusals_rank, NULL);
}

/* ---- failures: the kernel ends, and the error says what happened ---- */

struct failure {
    enum packet_misuse what;
    spccl_status wanted;
    const char *text;
    bool aborts; /* rank 1 aborts instead */
    _Atomic int n_made, n_started, n_done;
};

static void fail_alone(struct rank_ctx *c, struct failure *f, const spccl_channels *channels)
{
    const struct rank_buffer *m = &rank_buffers[0];
    uint32_t *failed = (uint32_t *)(void *)m->out_d, word = 0;
    spccl_memory_channel channel;
    spccl_status st;
    if (f->wanted == SPCCL_ERR_TIMEOUT)
        CHECK_OK(spccl_comm_set_timeout(c->comm, 1000)); /* the only wait that is meant to pass */
    CHECK_OK(spccl_channels_get_memory(channels, 1, 1, &channel));
    CHECK_OK(spccl_comm_set_timeout(c->comm, LONG_MS));
    CUDA_OK(packet_do_wrong(channel, f->what, failed, m->on));
    f->n_started++;
    st = spccl_cuda_wait(c->comm, m->on, LONG_MS);
    CHECK(st == f->wanted && strstr(spccl_last_error(), f->text) != NULL, "%s: \"%s\", wanted \"%s\"",
          spccl_status_name(st), spccl_last_error(), f->text);
    sync_stream(m->on);
    CUDA_OK(cudaMemcpyAsync(m->got, failed, sizeof word, cudaMemcpyDeviceToHost, m->on));
    sync_stream(m->on);
    memcpy(&word, m->got, sizeof word);
    CHECK(word == 1, "the kernel did not see the failure");
}

static void fail_rank(struct rank_ctx *c)
{
    struct failure *f = c->arg;
    int64_t until = now_ms() + LONG_MS;
    spccl_channels *channels;
    if (!attach_gpu(c->comm, c->rank, 0) ||
        (channels = make_channels(c, SPCCL_CHANNEL_MEMORY, 4096, 2)) == NULL ||
        !wait_for_all(c, &f->n_made)) /* a rank that fails earlier would end the creation on the others */
        return;
    if (c->rank == 0)
        fail_alone(c, f, channels);
    while (f->n_started == 0 && now_ms() < until)
        sleep_ms(1);
    if (c->rank == 1 && f->aborts)
        CHECK_OK(spccl_comm_abort(c->comm, "the test aborts"));
    (void)wait_for_all(c, &f->n_done); /* a rank that left would be taken for dead */
}

static void test_failures(void)
{
    struct failure all[] = {
        {.what = PACKET_LATE,
         .wanted = SPCCL_ERR_TIMEOUT,
         .text = "channel 1 to rank 1: waited for the packet at byte "},
        {.what = PACKET_PAST_END,
         .wanted = SPCCL_ERR_ARG,
         .text = "packets at bytes 4064 to 4112 of a memory of 4096"},
        {.what = BLOCKS_MISSING,
         .wanted = SPCCL_ERR_TIMEOUT,
         .text = "spccl_sync_blocks waited for 3 blocks, 2 have come"},
        {.what = PACKET_LATE, .wanted = SPCCL_ERR_ABORTED, .text = "the test aborts", .aborts = true},
        {.what = BLOCKS_MISSING, .wanted = SPCCL_ERR_ABORTED, .text = "the test aborts", .aborts = true},
        {.what = PACKET_HALF, .wanted = SPCCL_ERR_TIMEOUT, .text = "at byte 32 with flag 5, its flag is 0"},
        {.what = PACKET_ODD_OFFSET, .wanted = SPCCL_ERR_ARG, .text = "packets at bytes 8 to 24"},
        {.what = PACKET_ODD_DATA, .wanted = SPCCL_ERR_ARG, .text = "packets at bytes 0 to 24"},
        {.what = PACKET_NO_FLAG, .wanted = SPCCL_ERR_ARG, .text = "a flag other than 0"},
        {.what = PACKET_GET_OUTSIDE, .wanted = SPCCL_ERR_ARG, .text = "to beyond 2^64 of"},
        {.what = GET_PAST_END, .wanted = SPCCL_ERR_ARG, .text = "a put or get at bytes 4080 to 4112"},
        {.what = GET_ODD_ADDRESS, .wanted = SPCCL_ERR_ARG, .text = "multiples of 16"},
    };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (!is_small || i < 4)
            run_group(2, fail_rank, &all[i]);
    run_group(2, attach_and_check, NULL); /* the GPU is usable */
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {{"exchange", test_exchange},   {"blocks", test_blocks},
                                             {"all_pairs", test_all_pairs}, {"refusals", test_refusals},
                                             {"failures", test_failures},   {NULL, NULL}};
    cuda_test_start(&argc, argv);
    make_rank_buffers(5, CAP);
    return test_main(cases, argc, argv);
}
