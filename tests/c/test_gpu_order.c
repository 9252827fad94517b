/* test_gpu_order.c - in which order the launches of a communicator reach its GPU, over fake GPUs: the
 * library's own order, and a caller who keeps the order (config.caller_orders). */
#include "fake_gpu.h"

#include "core/gpu/gpu_comm.h"
#include "ranks.h"

#define N 1000u /* elements of every collective here */
static struct fake_stream streams[2];
static int n_memories_held; /* while the kernel still ran */

static void reset(void)
{
    CHECK(fake.n_memories == 0, "%d memories are left of the last test", fake.n_memories);
    memset(streams, 0, sizeof streams);
    for (int i = 0; i < 2; i++)
        streams[i].id = (unsigned long long)i + 1;
    fake.n_memories = fake.n_waits = fake.n_kernels = fake.n_records = fake.n_asked = 0;
    fake.capture = 0;
    fake.hold = false;
}

static spccl_status attach(struct rank_ctx *c, uint32_t caller_orders)
{
    spccl_cuda_config config = SPCCL_CUDA_CONFIG_INIT;
    config.device = 0;
    config.caller_orders = caller_orders;
    return spccl_cuda_attach(c->comm, &config);
}

static spccl_status reduce(struct rank_ctx *c, int stream)
{
    void *x = fake_memory[0];
    return spccl_cuda_all_reduce(c->comm, x, x, N, SPCCL_FLOAT32, SPCCL_SUM, &streams[stream]);
}

static void run_one(void (*fn)(struct rank_ctx *))
{
    struct rank_ctx ctx[1];
    reset();
    run_ranks(1, NULL, fn, NULL, ctx);
    CHECK_OK(ctx[0].created);
}

/* ---- the library orders ---- */

static void ordered(struct rank_ctx *c)
{
    CHECK_OK(attach(c, 0));
    CHECK_OK(reduce(c, 0));
    CHECK_OK(reduce(c, 0)); /* same stream: in order anyway */
    CHECK(fake.n_waits == 0, "%d waits", fake.n_waits);
    CHECK_OK(reduce(c, 1));
    CHECK(fake.n_waits == 1, "another stream waits");
    fake.capture = 7;
    CHECK_OK(reduce(c, 0)); /* the first of a capture: nothing of that capture to wait for */
    CHECK(fake.n_waits == 1, "a capture does not wait for what is outside");
    CHECK_OK(reduce(c, 1));
    CHECK(fake.n_waits == 2, "inside a capture");
    fake.capture = 8;
    CHECK_OK(reduce(c, 0));
    CHECK(fake.n_waits == 2, "another capture");
    fake.capture = 0;
    CHECK_OK(reduce(c, 1));
    CHECK(fake.n_waits == 2, "stream 1 was the last outside of captures");
    CHECK_OK(reduce(c, 0));
    CHECK(fake.n_waits == 3, "and now stream 0");
    CHECK(fake.n_records == 8, "%d events for 8 launches", fake.n_records);
    CHECK(spccl_cuda_set_end_event(c->comm, &streams[0]) == SPCCL_ERR_ARG &&
              strstr(spccl_last_error(), "caller_orders") != NULL,
          "%s", spccl_last_error());
}

static void test_library_orders(void)
{
    run_one(ordered);
}

/* ---- a limit of thread blocks for some calls ---- */

static spccl_status limit(struct rank_ctx *c, uint64_t max_ctas)
{
    spccl_cuda_options options = SPCCL_CUDA_OPTIONS_INIT;
    options.max_ctas = max_ctas;
    return spccl_cuda_set_options(c->comm, &options);
}

/* The blocks of the next launch of enough elements to give work to all blocks. */
static uint32_t n_ctas_now(struct rank_ctx *c)
{
    void *x = fake_memory[0];
    CHECK_OK(spccl_cuda_all_gather(c->comm, x, x, FAKE_BYTES / 4, SPCCL_FLOAT32, &streams[0]));
    return fake.last.n_ctas;
}

static void limited(struct rank_ctx *c)
{
    spccl_cuda_config config = SPCCL_CUDA_CONFIG_INIT;
    CHECK(limit(c, 1) == SPCCL_ERR_STATE, "no GPU is attached: %s", spccl_last_error());
    config.device = 0;
    config.max_ctas = 5; /* of 8 */
    CHECK_OK(spccl_cuda_attach(c->comm, &config));
    CHECK(n_ctas_now(c) == 5, "%u blocks, wanted those of the group", fake.last.n_ctas);
    CHECK_OK(limit(c, 2));
    CHECK(n_ctas_now(c) == 2 && sp_tag_max_ctas(fake.last.tag) == 2, "%u blocks", fake.last.n_ctas);
    CHECK(limit(c, 6) == SPCCL_ERR_ARG &&
              strstr(spccl_last_error(), "max_ctas is 6, wanted at most 5") != NULL,
          "%s", spccl_last_error());
    CHECK(limit(c, UINT64_C(1) << 32) == SPCCL_ERR_ARG, "a number of more than 32 bits");
    CHECK(n_ctas_now(c) == 2, "a refused limit changes nothing: %u blocks", fake.last.n_ctas);
    CHECK_OK(limit(c, 5));
    CHECK(n_ctas_now(c) == 5 && sp_tag_max_ctas(fake.last.tag) == 0, "as many as the group has: no limit");
    CHECK_OK(limit(c, 1));
    CHECK_OK(spccl_cuda_set_options(c->comm, NULL));
    CHECK(n_ctas_now(c) == 5, "NULL: %u blocks", fake.last.n_ctas);
}

static void test_limited(void)
{
    run_one(limited);
}

/* ---- the caller orders ---- */

static void caller_orders(struct rank_ctx *c)
{
    void *event = NULL;
    CHECK_OK(attach(c, 1));
    CHECK_OK(fake_event_create(&event));
    CHECK(spccl_cuda_set_end_event(c->comm, NULL) == SPCCL_ERR_ARG, "NULL");
    CHECK_OK(reduce(c, 0));
    CHECK_OK(reduce(c, 1));
    fake.capture = 7;
    CHECK_OK(reduce(c, 0));
    fake.capture = 0;
    CHECK(fake.n_waits == 0 && fake.n_records == 0 && fake.n_asked == 0,
          "%d waits, %d events, %d questions: all that is the caller's", fake.n_waits, fake.n_records,
          fake.n_asked);
    CHECK(fake.n_kernels == 3, "%d launches", fake.n_kernels);
    CHECK_OK(fake_event_record(event, &streams[1]));
    CHECK_OK(spccl_cuda_set_end_event(c->comm, event));
    CHECK_OK(spccl_cuda_wait(c->comm, &streams[0], 5000));
    CHECK_OK(spccl_comm_destroy(c->comm));
    c->comm = NULL;
    free(event);
}

static void test_caller_orders(void)
{
    run_one(caller_orders);
}

/* Lets the kernel end. */
static void *let_go(void *unused)
{
    (void)unused;
    sleep_ms(200);
    n_memories_held = fake.n_memories;
    fake.hold = false;
    return NULL;
}

/* destroy frees memory that kernels use: it waits for the event named last. */
static void destroys(struct rank_ctx *c)
{
    void *event = NULL;
    pthread_t thread;
    CHECK_OK(attach(c, 1));
    CHECK_OK(fake_event_create(&event));
    fake.hold = true;
    CHECK_OK(reduce(c, 0));
    CHECK_OK(fake_event_record(event, &streams[0]));
    CHECK_OK(spccl_cuda_set_end_event(c->comm, event));
    CHECK(pthread_create(&thread, NULL, let_go, NULL) == 0, "thread");
    CHECK_OK(spccl_comm_destroy(c->comm));
    c->comm = NULL;
    CHECK(streams[0].n_done == 1, "destroy did not wait for the kernel");
    pthread_join(thread, NULL);
    CHECK(n_memories_held == 1, "the inbox was freed while the kernel ran");
    free(event);
}

static void test_destroy_waits(void)
{
    run_one(destroys);
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {{"library_orders", test_library_orders},
                                             {"limited", test_limited},
                                             {"caller_orders", test_caller_orders},
                                             {"destroy_waits", test_destroy_waits},
                                             {NULL, NULL}};
    return test_main(cases, argc, argv);
}
