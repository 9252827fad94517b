/* test_cuda_ports.c - port channels (spccl_channel.h): the ring of examples/channels and an exchange of all pairs over
 * every transport of this machine, wrong triggers, wrong messages, lost peers. Ranks are threads. */
#include "channel_ranks.h"

#include "fault.h"

#define CAP ((size_t)3 << 20)

static uint32_t read_word(const struct rank_ctx *c, const void *device)
{
    const struct rank_buffer *m = &rank_buffers[c->rank];
    uint32_t word;
    CUDA_OK(cudaMemcpyAsync(m->plain, device, sizeof word, cudaMemcpyDeviceToHost, m->on));
    sync_stream(m->on);
    memcpy(&word, m->plain, sizeof word);
    return word;
}

/* ---- the ring of the example ---- */

static void run_ring(struct rank_ctx *c, spccl_channels *channels, size_t bytes, int round)
{
    const struct rank_buffer *m = &rank_buffers[c->rank];
    struct ring_job job = ring_job_of(c, bytes);
    int n = c->n_ranks;
    spccl_port_channel next = {0}, previous = {0};
    CHECK_OK(spccl_channels_get_port(channels, (c->rank + 1) % n, c->rank + 1 == n, &next));
    CHECK_OK(spccl_channels_get_port(channels, (c->rank + n - 1) % n, c->rank == 0, &previous));
    fill_block(m->in, bytes, c->rank, round);
    CUDA_OK(cudaMemcpyAsync(m->in_d, m->in, bytes, cudaMemcpyHostToDevice, m->on));
    CUDA_OK(cudaMemsetAsync(m->out_d, POISON, bytes * (size_t)n, m->on));
    CUDA_OK(ring_all_gather_port(next, previous, &job, m->on));
    CUDA_OK(cudaMemcpyAsync(m->got, m->out_d, bytes * (size_t)n, cudaMemcpyDeviceToHost, m->on));
    CHECK_OK(spccl_cuda_wait(c->comm, m->on, LONG_MS));
    check_blocks(c, bytes, round);
}

static void ring_rank(struct rank_ctx *c)
{
    static const size_t sizes[] = {16, 4080, 700000}; /* the last one takes several messages */
    spccl_channels *channels, *others;
    if (!attach_gpu(c->comm, c->rank, 0))
        return;
    for (int i = 0; i < (is_small ? 2 : 3); i++) {
        channels = make_channels(c, SPCCL_CHANNEL_PORT, RING_PORT_WINDOW_BYTES(sizes[i]), 2);
        if (channels == NULL)
            return;
        for (int round = 0; round < 3; round++)
            run_ring(c, channels, sizes[i], round);
        spccl_channels_destroy(channels);
    }
    /* Two sets at the same time, and collectives between. The communicator destroys them. */
    channels = make_channels(c, SPCCL_CHANNEL_PORT, RING_PORT_WINDOW_BYTES(sizes[1]), 2);
    others = make_channels(c, SPCCL_CHANNEL_PORT, RING_PORT_WINDOW_BYTES(sizes[0]), 2);
    if (channels == NULL || others == NULL)
        return;
    run_ring(c, channels, sizes[1], 7);
    check_works(c);
    run_ring(c, others, sizes[0], 8);
    CHECK_OK(spccl_comm_async_error(c->comm));
}

/* ---- all pairs at the same time, several channels each ---- */

static void exchange_pairs(struct rank_ctx *c)
{
    const struct rank_buffer *m = &rank_buffers[c->rank];
    struct port_item *items = (struct port_item *)(void *)m->in;
    uint64_t half = (uint64_t)c->n_ranks * PER_PEER * PIECE; /* the second half is sent from */
    spccl_channels *channels;
    unsigned n = 0;
    uint32_t n_wrong;
    if (!attach_gpu(c->comm, c->rank, 0) ||
        (channels = make_channels(c, SPCCL_CHANNEL_PORT, 2 * half, PER_PEER)) == NULL)
        return;
    for (int p = 0; p < c->n_ranks; p++)
        for (uint32_t i = 0; p != c->rank && i < PER_PEER; i++, n++) {
            CHECK_OK(spccl_channels_get_port(channels, p, i, &items[n].channel));
            items[n].in = NULL;
            items[n].one_trigger = i;
            items[n].dst_off = piece_off(c->rank, i);
            items[n].own_off = piece_off(p, i);
            items[n].src_off = half + piece_off(p, i);
            items[n].seed_out = seed_of(c->rank, p, i);
            items[n].seed_in = seed_of(p, c->rank, i);
        }
    CUDA_OK(cudaMemcpyAsync(m->in_d, m->in, n * sizeof *items, cudaMemcpyHostToDevice, m->on));
    CUDA_OK(port_exchange((const struct port_item *)(const void *)m->in_d, n, PIECE, is_small ? 2 : 8,
                          (uint32_t *)(void *)m->out_d, m->on));
    CHECK_OK(spccl_cuda_wait(c->comm, m->on, LONG_MS));
    n_wrong = read_word(c, m->out_d);
    CHECK(n_wrong == 0, "rank %d: %u wrong words", c->rank, n_wrong);
    spccl_channels_destroy(channels);
}

/* Memories of the rank beside the window: number 1 is `got`, where data comes, number 2 is `want`, the source. */
static bool add_memories(const struct rank_ctx *c, spccl_channels *channels)
{
    const struct rank_buffer *m = &rank_buffers[c->rank];
    uint32_t into = 0, from = 0;
    CHECK_OK(spccl_channels_add_memory(channels, m->got, CAP, &into));
    CHECK_OK(spccl_channels_add_memory(channels, m->want, CAP, &from));
    CHECK(into == 1 && from == 2, "numbers %u and %u", into, from);
    return from == 2;
}

/* Put and signal in one trigger, between memories of the rank. The longest put takes several messages: a signal that came
 * with the first one would show as wrong words. */
static void exchange_long(struct rank_ctx *c)
{
    static const uint64_t sizes[] = {16, 600000};
    const struct rank_buffer *m = &rank_buffers[c->rank];
    struct port_item item = {.seed_out = seed_of(c->rank, 1 - c->rank, 0),
                             .seed_in = seed_of(1 - c->rank, c->rank, 0)};
    spccl_channels *channels;
    spccl_port_channel plain;
    if (!attach_gpu(c->comm, c->rank, 0) ||
        (channels = make_channels(c, SPCCL_CHANNEL_PORT, 16, 2)) == NULL || !add_memories(c, channels))
        return;
    CHECK_OK(spccl_channels_get_port_at(channels, 1 - c->rank, 1, 1, 2, &item.channel));
    CHECK_OK(spccl_channels_get_port(channels, 1 - c->rank, 1, &plain));
    CHECK(plain.base.state == item.channel.base.state && plain.fifo == item.channel.fifo &&
              plain.base.window_bytes == 16 && item.channel.base.peer_bytes == CAP,
          "rank %d: one channel has two states", c->rank);
    item.in = m->got + 32;
    item.dst_off = 32;
    item.src_off = 64;
    for (int i = 0; i < 4; i++) {
        item.one_trigger = 1 + (uint32_t)(i % 2);
        memcpy(m->in, &item, sizeof item);
        CUDA_OK(cudaMemcpyAsync(m->in_d, m->in, sizeof item, cudaMemcpyHostToDevice, m->on));
        CUDA_OK(port_exchange((const struct port_item *)(const void *)m->in_d, 1, sizes[i / 2], 2,
                              (uint32_t *)(void *)m->out_d, m->on));
        CHECK_OK(spccl_cuda_wait(c->comm, m->on, LONG_MS));
        CHECK(read_word(c, m->out_d) == 0, "rank %d: wrong words, %zu bytes", c->rank, (size_t)sizes[i / 2]);
    }
    spccl_channels_destroy(channels);
}

/* More puts than the FIFO holds. */
static void fill_fifo(struct rank_ctx *c)
{
    const struct rank_buffer *m = &rank_buffers[c->rank];
    spccl_channels_config config = SPCCL_CHANNELS_CONFIG_INIT;
    spccl_channels *channels = NULL;
    spccl_port_channel channel;
    config.kind = SPCCL_CHANNEL_PORT;
    config.window_bytes = 16;
    config.n_triggers = 2;
    if (!attach_gpu(c->comm, c->rank, 0))
        return;
    CHECK_OK(spccl_channels_create(c->comm, &config, &channels));
    CHECK_OK(spccl_channels_get_port(channels, 1 - c->rank, 0, &channel));
    CUDA_OK(port_put_many(channel, 50, (uint32_t *)(void *)m->out_d, m->on));
    CHECK_OK(spccl_cuda_wait(c->comm, m->on, LONG_MS));
    CHECK(read_word(c, m->out_d) == 0, "rank %d: a put failed", c->rank);
    spccl_channels_destroy(channels);
}

/* Within a host, and between hosts: each rank alone, or two and two, whose pairs use two transports. */
static void with_hosts(int n_ranks, int per_host, const char *transports, void (*fn)(struct rank_ctx *))
{
    test_ranks_per_host = per_host;
    group_transports = transports;
    setenv("SPCCL_CUDA_ROUTE", "spccl", 1);
    run_group(n_ranks, fn, NULL);
    unsetenv("SPCCL_CUDA_ROUTE");
    test_ranks_per_host = 0;
    group_transports = NULL;
}

static void test_ring(void)
{
    run_group(2, ring_rank, NULL);
    with_hosts(2, 1, "tcp", ring_rank);
    if (!is_small)
        with_hosts(4, 2, NULL, ring_rank);
}

static void test_pairs(void)
{
    run_group(N_RANKS, exchange_pairs, NULL);
    with_hosts(is_small ? 2 : 4, is_small ? 1 : 2, NULL, exchange_pairs);
    run_group(2, exchange_long, NULL);
    with_hosts(2, 1, "tcp", exchange_long);
    run_group(2, fill_fifo, NULL);
}

/* ---- failures: the kernel ends, and the error says what happened ---- */

struct failure {
    int what; /* port_misuse */
    spccl_status wanted;
    const char *text;
    _Atomic int n_done, n_attached;
    sp_fault_plan plan; /* of the channels */
};

static void fail_rank(struct rank_ctx *c)
{
    struct failure *f = c->arg;
    const struct rank_buffer *m = &rank_buffers[c->rank];
    spccl_port_channel channel;
    spccl_channels *channels;
    spccl_status st;
    if (!attach_gpu(c->comm, c->rank, 0) ||
        (channels = make_channels(c, SPCCL_CHANNEL_PORT, 4096, 2)) == NULL)
        return;
    if (!wait_for_all(c, &f->n_attached)) /* a rank that fails earlier would end the creation on the others */
        return;
    if (c->rank == 0) {
        if (f->what == PORT_NO_SIGNAL)
            CHECK_OK(spccl_comm_set_timeout(c->comm, 1000)); /* the only wait that is meant to pass */
        CHECK_OK(spccl_channels_get_port(channels, 1, 1, &channel));
        CHECK_OK(spccl_comm_set_timeout(c->comm, LONG_MS));
        CUDA_OK(port_do_wrong(channel, (enum port_misuse)f->what, (uint32_t *)(void *)m->out_d, m->on));
        st = spccl_cuda_wait(c->comm, m->on, LONG_MS);
        CHECK(st == f->wanted && strstr(spccl_last_error(), f->text) != NULL, "%s: \"%s\", wanted \"%s\"",
              spccl_status_name(st), spccl_last_error(), f->text);
        sync_stream(m->on);
        CHECK(read_word(c, m->out_d) == 1, "the kernel did not see the failure");
    }
    (void)wait_for_all(c, &f->n_done); /* a rank that left would be taken for dead */
    spccl_channels_destroy(channels);
}

static void test_failures(void)
{
    struct failure all[] = {
        {.what = PORT_NO_SIGNAL,
         .wanted = SPCCL_ERR_TIMEOUT,
         .text = "channel 1 to rank 1: waited for signal number 1, 0 have come"},
        {.what = PORT_PAST_END, .wanted = SPCCL_ERR_ARG, .text = "a put or get at bytes 4080 to 4112"},
        {.what = PORT_SOURCE_PAST_END, .wanted = SPCCL_ERR_ARG, .text = "a put or get at bytes 4096 to 4112"},
        {.what = PORT_BAD_OP, .wanted = SPCCL_ERR_ARG, .text = "channel 1 to rank 1: trigger 0 has op 7"},
        {.what = PORT_BAD_NUMBER,
         .wanted = SPCCL_ERR_ARG,
         .text = "trigger 0 is of channel number 2; wanted 1"},
        {.what = PORT_BAD_RANGE,
         .wanted = SPCCL_ERR_ARG,
         .text = "has 16 bytes from offset 0 of memory 0 to offset 4096"},
        {.what = PORT_BAD_MEMORY,
         .wanted = SPCCL_ERR_ARG,
         .text = "from offset 0 of memory 3 to offset 0 of memory 0"},
        {.what = PORT_BAD_SIGNAL, .wanted = SPCCL_ERR_ARG, .text = "trigger 0 (op 2) has 16 bytes"},
        {.what = PORT_TOO_MANY,
         .wanted = SPCCL_ERR_ARG,
         .text = "a kernel posted 65 triggers; wanted 0 to 64"},
    };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (!is_small || i % 3 == 0)
            run_group(2, fail_rank, &all[i]);
    run_group(2, attach_and_check, NULL); /* the GPU is usable */
}

/* The transport of the channels changes or loses messages. Both ranks get an error that names a rank. */
static void fault_rank(struct rank_ctx *c)
{
    struct failure *f = c->arg;
    const struct rank_buffer *m = &rank_buffers[c->rank];
    struct ring_job job = ring_job_of(c, 4096);
    spccl_port_channel next, previous;
    spccl_channels *channels;
    spccl_status st = SPCCL_OK;
    if (!attach_gpu(c->comm, c->rank, 0) || !wait_for_all(c, &f->n_attached))
        return;
    sp_fault = f->plan; /* the links of the communicator are open, those of the channels are not */
    channels = make_channels(c, SPCCL_CHANNEL_PORT, RING_PORT_WINDOW_BYTES(4096), 2);
    if (channels == NULL)
        return;
    CHECK_OK(spccl_channels_get_port(channels, 1 - c->rank, c->rank == 1, &next));
    CHECK_OK(spccl_channels_get_port(channels, 1 - c->rank, c->rank == 0, &previous));
    for (int i = 0; st == SPCCL_OK && i < 50; i++) {
        CUDA_OK(ring_all_gather_port(next, previous, &job, m->on));
        st = spccl_cuda_wait(c->comm, m->on, LONG_MS);
    }
    CHECK(st != SPCCL_OK && st != SPCCL_ERR_BUG && strstr(spccl_last_error(), f->text) != NULL, "%s: \"%s\"",
          spccl_status_name(st), spccl_last_error());
    sync_stream(m->on);
    (void)wait_for_all(c, &f->n_done);
    spccl_channels_destroy(channels);
}

static void test_faults(void)
{
    struct failure flipped = {.text = "no message of a channel",
                              .plan = {.inner = "tcp", .seed = 5, .flip_one_in = 6, .flip_within = 4}};
    struct failure cut = {.text = "rank", .plan = {.inner = "tcp", .cut_after = 7, .cut_rank = 1}};
    sp_fault = (sp_fault_plan){.inner = "tcp"};
    with_hosts(2, 1, "tcp", ring_rank); /* what follows fails by the faults alone */
    test_ranks_per_host = 1;
    setenv("SPCCL_CUDA_ROUTE", "spccl", 1);
    group_transports = "fault";
    run_group(2, fault_rank, &flipped);
    sp_fault = (sp_fault_plan){.inner = "tcp"};
    run_group(2, fault_rank, &cut);
    unsetenv("SPCCL_CUDA_ROUTE");
    test_ranks_per_host = 0;
    group_transports = NULL;
}

/* ---- a peer dies between put and signal ---- */

struct death {
    spccl_channel_kind kind;
    _Atomic int n_made, n_started, n_done;
};

/* Rank 0 waits for the signal of rank 1, on any kind of channel. */
static void wait_for_signal(struct rank_ctx *c, struct death *d, const spccl_channels *channels)
{
    const struct rank_buffer *m = &rank_buffers[0];
    uint32_t *failed = (uint32_t *)(void *)m->out_d;
    spccl_memory_channel memory;
    spccl_port_channel port;
    spccl_status st;
    if (d->kind == SPCCL_CHANNEL_MEMORY) {
        CHECK_OK(spccl_channels_get_memory(channels, 1, 1, &memory));
        CUDA_OK(channel_do_wrong(memory, MISUSE_NO_SIGNAL, failed, m->on));
    } else {
        CHECK_OK(spccl_channels_get_port(channels, 1, 1, &port));
        CUDA_OK(port_do_wrong(port, PORT_NO_SIGNAL, failed, m->on));
    }
    d->n_started++;
    st = spccl_cuda_wait(c->comm, m->on, LONG_MS);
    CHECK(st == SPCCL_ERR_PEER && strstr(spccl_last_error(), "rank 0") != NULL &&
              strstr(spccl_last_error(), "rank 1") != NULL,
          "%s: \"%s\"", spccl_status_name(st), spccl_last_error());
    sync_stream(m->on);
    CHECK(read_word(c, m->out_d) == 1, "the kernel did not see that its peer died");
}

static void put_and_die(struct rank_ctx *c, struct death *d, const spccl_channels *channels)
{
    const struct rank_buffer *m = &rank_buffers[1];
    int64_t until = now_ms() + LONG_MS;
    spccl_memory_channel memory;
    spccl_port_channel port;
    spccl_status st = SPCCL_OK;
    uint8_t byte = 0;
    if (d->kind == SPCCL_CHANNEL_MEMORY) {
        CHECK_OK(spccl_channels_get_memory(channels, 0, 1, &memory));
        CUDA_OK(cudaMemcpyAsync(memory.peer_window, m->in_d, 16, cudaMemcpyDeviceToDevice, m->on));
    } else {
        CHECK_OK(spccl_channels_get_port(channels, 0, 1, &port));
        CUDA_OK(port_put_many(port, 1, (uint32_t *)(void *)m->out_d, m->on));
    }
    sync_stream(m->on);
    while (d->n_started == 0 && now_ms() < until)
        sleep_ms(1);
    sp_fault_cut(1);
    while (st == SPCCL_OK && now_ms() < until)
        st = spccl_broadcast(c->comm, &byte, 1, SPCCL_UINT8, 1, NULL);
    CHECK(st != SPCCL_OK, "the links of rank 1 did not end");
}

static void die_rank(struct rank_ctx *c)
{
    struct death *d = c->arg;
    spccl_channels *channels;
    if (!attach_gpu(c->comm, c->rank, 0) || (channels = make_channels(c, d->kind, 4096, 2)) == NULL ||
        !wait_for_all(c, &d->n_made))
        return;
    if (c->rank == 0)
        wait_for_signal(c, d, channels);
    else
        put_and_die(c, d, channels);
    (void)wait_for_all(c, &d->n_done);
}

static void test_peer_dies(void)
{
    struct death memory = {.kind = SPCCL_CHANNEL_MEMORY}, port = {.kind = SPCCL_CHANNEL_PORT};
    group_transports = "fault";
    sp_fault = (sp_fault_plan){.inner = "tcp"};
    run_group(2, die_rank, &memory);
    sp_fault_cut(-1);
    run_group(2, die_rank, &port);
    sp_fault_cut(-1);
    group_transports = NULL;
    sp_fault = (sp_fault_plan){.inner = "tcp"};
    run_group(2, attach_and_check, NULL); /* the GPU is usable */
}

/* ---- what a set leaves behind ---- */

struct leftovers {
    _Atomic int n_here[2], n_counted[2];
    int n_before, n_after;
};

/* Rank 0 counts while no rank makes or destroys a set. */
static void make_many_sets(struct rank_ctx *c)
{
    struct leftovers *l = c->arg;
    if (!attach_gpu(c->comm, c->rank, 0))
        return;
    for (int i = 0; i < 5; i++) {
        spccl_channels *channels = make_channels(c, SPCCL_CHANNEL_PORT, 64, 1);
        if (channels == NULL)
            return;
        spccl_channels_destroy(channels);
        if (i != 0 && i != 4)
            continue;
        if (!wait_for_all(c, &l->n_here[i == 4]))
            return;
        if (c->rank == 0)
            *(i == 0 ? &l->n_before : &l->n_after) = count_entries("/proc/self/fd");
        if (!wait_for_all(c, &l->n_counted[i == 4]))
            return;
    }
}

static void test_leftovers(void)
{
    struct leftovers l = {.n_before = 0};
    run_group(2, make_many_sets, &l);
    CHECK(l.n_before > 2 && l.n_after == l.n_before, "%d descriptors after 1 set, %d after 5", l.n_before,
          l.n_after);
}

/* ---- refused at the call ---- */

static void refuses(struct rank_ctx *c)
{
    spccl_channels *ports, *memory;
    spccl_port_channel port;
    spccl_memory_channel channel;
    void *device = NULL, *host = NULL;
    uint32_t number = 0;
    if (!attach_gpu(c->comm, c->rank, 0) || (ports = make_channels(c, SPCCL_CHANNEL_PORT, 64, 2)) == NULL ||
        (memory = make_channels(c, SPCCL_CHANNEL_MEMORY, 64, 2)) == NULL)
        return;
    want(SPCCL_ERR_ARG, spccl_channels_get_port(memory, 1 - c->rank, 0, &port), "kind 1, wanted 2");
    want(SPCCL_ERR_ARG, spccl_channels_get_memory(ports, 1 - c->rank, 0, &channel), "kind 2, wanted 1");
    want(SPCCL_ERR_ARG, spccl_channels_get_port(ports, c->rank, 0, &port), "wanted another rank");
    want(SPCCL_ERR_ARG, spccl_channels_get_port(ports, 1 - c->rank, 2, &port), "wanted 0 to 1");
    want(SPCCL_ERR_ARG, spccl_channels_get_port(ports, 1 - c->rank, 0, NULL), "out is NULL");
    want(SPCCL_ERR_ARG, spccl_channels_get_port_at(ports, 1 - c->rank, 0, 0, 1, &port),
         "memory 1 of channel 0");
    want(SPCCL_ERR_ARG, spccl_channels_add_memory(ports, rank_buffers[c->rank].spare_d, 64, &number),
         "are not pinned host memory");
    CHECK_OK(spccl_channels_window(ports, &device, &host));
    CHECK(device != NULL && host != NULL, "%p, %p", device, host);
    for (int i = 0; host != NULL && i < 64; i++)
        CHECK(((uint8_t *)host)[i] == 0, "byte %d of a new window is not 0", i);
    spccl_channels_destroy(ports);
    spccl_channels_destroy(memory);
}

static void test_refusals(void)
{
    run_group(2, refuses, NULL);
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {{"ring", test_ring},         {"pairs", test_pairs},
                                             {"failures", test_failures}, {"peer_dies", test_peer_dies},
                                             {"faults", test_faults},     {"leftovers", test_leftovers},
                                             {"refusals", test_refusals}, {NULL, NULL}};
    cuda_test_start(&argc, argv);
    make_rank_buffers(4, CAP);
    return test_main(cases, argc, argv);
}
