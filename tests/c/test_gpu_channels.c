/* test_gpu_channels.c - one-sided channels on fake GPUs, without kernels: memory that one rank cannot map, a rank that is
 * slow to create a set or late to destroy one. test_cuda_channels.c and test_cuda_ports.c run kernels. */
#include "fake_gpu.h"

#include "captured_log.h"
#include "core/run/comm.h"
#include "scene.h"
#include "spccl_channel.h"

#define CREATE_MS 120000 /* the time-out; no test waits for it */

static void meet(const struct rank_ctx *c)
{
    uint32_t one = 1, sum = 0;
    CHECK_OK(spccl_all_reduce(c->comm, &one, &sum, 1, SPCCL_INT32, SPCCL_SUM, NULL));
}

static spccl_status make_channels(const struct rank_ctx *c, spccl_channels **out)
{
    spccl_channels_config config = SPCCL_CHANNELS_CONFIG_INIT;
    config.window = fake_memory[c->rank];
    config.window_bytes = 4096;
    return spccl_channels_create(c->comm, &config, out);
}

/* The other ranks must not wait for this rank's window until their time-out. */
static void cannot_map(struct rank_ctx *c)
{
    int failing = *(int *)c->arg;
    spccl_channels *channels = NULL;
    int64_t start_ms = now_ms();
    char name[16];
    spccl_status st;
    spccl_cuda_config gpu = SPCCL_CUDA_CONFIG_INIT;
    snprintf(name, sizeof name, "rank %d:", failing);
    gpu.device = c->rank;
    CHECK_OK(spccl_cuda_attach(c->comm, &gpu));
    meet(c);
    if (c->rank == failing)
        fake.import_fails_at[failing] = true;
    meet(c);
    st = make_channels(c, &channels);
    CHECK(st == SPCCL_ERR_UNREACHABLE && strstr(spccl_last_error(), name) != NULL, "rank %d: %s: %s", c->rank,
          spccl_status_name(st), spccl_last_error());
    CHECK(now_ms() - start_ms < CREATE_MS / 2, "rank %d: failed after %lld ms", c->rank,
          (long long)(now_ms() - start_ms));
    meet(c);
    if (c->rank == failing)
        fake.import_fails_at[failing] = false;
    meet(c);
    CHECK_OK(make_channels(c, &channels));
    spccl_channels_destroy(channels);
}

static void test_channels_that_cannot_be_mapped(void)
{
    struct rank_ctx ctx[3];
    spccl_config config = SPCCL_CONFIG_INIT;
    config.timeout_ms = CREATE_MS;
    for (int failing = 0; failing < 3; failing++) {
        run_ranks(3, &config, cannot_map, &failing, ctx);
        CHECK(fake.n_memories == 0, "%d memories are left", fake.n_memories);
    }
}

/* A memory that one rank cannot map is added on no rank, and the set goes on. */
static void cannot_map_added(struct rank_ctx *c)
{
    int failing = *(int *)c->arg;
    spccl_channels *channels = NULL;
    uint32_t number = 9;
    spccl_cuda_config gpu = SPCCL_CUDA_CONFIG_INIT;
    spccl_status st;
    char name[16];
    snprintf(name, sizeof name, "rank %d:", failing);
    gpu.device = c->rank;
    CHECK_OK(spccl_cuda_attach(c->comm, &gpu));
    CHECK_OK(make_channels(c, &channels));
    meet(c);
    if (c->rank == failing)
        fake.import_fails_at[failing] = true;
    meet(c);
    st = spccl_channels_add_memory(channels, fake_memory[c->rank] + 64, 128, &number);
    CHECK(st == SPCCL_ERR_UNREACHABLE && strstr(spccl_last_error(), name) != NULL && number == 9,
          "rank %d: %s: %s", c->rank, spccl_status_name(st), spccl_last_error());
    meet(c);
    if (c->rank == failing)
        fake.import_fails_at[failing] = false;
    meet(c);
    CHECK_OK(spccl_channels_add_memory(channels, fake_memory[c->rank] + 64, 128, &number));
    CHECK(number == 1, "number %u", number);
    spccl_channels_destroy(channels);
}

static void test_memories_that_cannot_be_mapped(void)
{
    struct rank_ctx ctx[3];
    spccl_config config = SPCCL_CONFIG_INIT;
    int failing = 1;
    config.timeout_ms = CREATE_MS;
    run_ranks(3, &config, cannot_map_added, &failing, ctx);
    CHECK(fake.n_memories == 0, "%d memories are left", fake.n_memories);
}

/* ---- a late rank ---- */

static spccl_status make_set(const struct rank_ctx *c, spccl_channel_kind kind, spccl_channels **out)
{
    spccl_channels_config config = SPCCL_CHANNELS_CONFIG_INIT;
    if (kind == SPCCL_CHANNEL_MEMORY)
        return make_channels(c, out);
    config.kind = kind;
    config.window_bytes = 4096;
    return spccl_channels_create(c->comm, &config, out);
}

static void attach(const struct rank_ctx *c)
{
    spccl_cuda_config gpu = SPCCL_CUDA_CONFIG_INIT;
    gpu.device = c->rank;
    CHECK_OK(spccl_cuda_attach(c->comm, &gpu));
}

#define SHORT_MS 200

/* Rank 1 destroys the set once rank 0 has given up waiting for it. */
static void late_to_destroy(struct rank_ctx *c)
{
    struct scene *s = c->arg;
    spccl_channels *channels = NULL;
    attach(c);
    CHECK_OK(make_set(c, (spccl_channel_kind)s->kind, &channels));
    if (c->rank == 0)
        CHECK_OK(spccl_comm_set_timeout(c->comm, SHORT_MS));
    while (c->rank == 1 && atomic_load(&s->n_done) == 0)
        sleep_ms(1);
    spccl_channels_destroy(channels);
    channels = NULL;
    CHECK_OK(spccl_comm_set_timeout(c->comm, CREATE_MS));
    atomic_store(&s->n_done, 1);
    meet(c);
    CHECK_OK(make_set(c, (spccl_channel_kind)s->kind, &channels));
    spccl_channels_destroy(channels);
    meet(c);
}

static void test_late_to_destroy(void)
{
    for (int kind = SPCCL_CHANNEL_MEMORY; kind <= SPCCL_CHANNEL_PORT; kind++) {
        struct scene s = {.kind = kind};
        char log[4000];
        const char *warning;
        begin_log();
        run_scene(2, CREATE_MS, NULL, late_to_destroy, &s);
        end_log(log, sizeof log);
        warning = strstr(log, "spccl_channels_destroy: after 200 ms a rank has not called it");
        CHECK(warning != NULL && has(warning, "stay until spccl_comm_destroy") &&
                  has(warning, "config.window") == (kind == SPCCL_CHANNEL_MEMORY) && !has(log, "error"),
              "\"%s\"", log);
        CHECK(fake.n_memories == 0, "%d memories are left", fake.n_memories);
    }
}

static spccl_comm *_Atomic waiting; /* rank 0's */

static bool is_waiting(spccl_comm *comm)
{
    bool yes;
    pthread_mutex_lock(&comm->mu);
    yes = comm->n_under_way != 0;
    pthread_mutex_unlock(&comm->mu);
    return yes;
}

/* Another thread sets rank 0's timeout while that rank waits. */
static void set_timeout_meanwhile(struct rank_ctx *c)
{
    spccl_channels *channels = NULL;
    attach(c);
    CHECK_OK(make_set(c, SPCCL_CHANNEL_MEMORY, &channels));
    if (c->rank == 0) {
        atomic_store(&waiting, c->comm);
    } else {
        while (atomic_load(&waiting) == NULL || !is_waiting(atomic_load(&waiting)))
            sleep_ms(1);
        CHECK_OK(spccl_comm_set_timeout(atomic_load(&waiting), CREATE_MS + 1));
    }
    spccl_channels_destroy(channels);
    CHECK(c->comm->timeout_ms == CREATE_MS + (c->rank == 0), "rank %d: %lld ms", c->rank,
          (long long)c->comm->timeout_ms);
    meet(c);
}

static void test_timeout_set_meanwhile(void)
{
    struct scene s = {.kind = 0};
    run_scene(2, CREATE_MS, NULL, set_timeout_meanwhile, &s);
}

/* Each step of rank 1 takes less than the timeout, all of them take more. */
static void slow_to_create(struct rank_ctx *c)
{
    spccl_channels *channels = NULL;
    int64_t start;
    attach(c);
    meet(c);
    if (c->rank == 1)
        fake.slow_ms_at[1] = 7 * SHORT_MS / 2; /* make_memory is twice as slow */
    CHECK_OK(spccl_comm_set_timeout(c->comm, 10 * SHORT_MS));
    meet(c);
    start = now_ms();
    note(c, make_set(c, SPCCL_CHANNEL_PORT, &channels), start);
}

static void test_slow_to_create(void)
{
    struct scene s = {.kind = 0};
    setenv("SPCCL_TCP_ADDR", "127.0.0.1", 1);
    test_ranks_per_host = 1;
    run_scene(2, CREATE_MS, "tcp", slow_to_create, &s);
    test_ranks_per_host = 0;
    unsetenv("SPCCL_TCP_ADDR");
    fake.slow_ms_at[1] = 0;
    CHECK(s.out[0].st != SPCCL_OK && has(s.out[0].text, "timed out after 2000 ms"), "%s after %lld ms: %s",
          spccl_status_name(s.out[0].st), (long long)s.out[0].took_ms, s.out[0].text);
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {{"cannot_map", test_channels_that_cannot_be_mapped},
                                             {"cannot_map_added", test_memories_that_cannot_be_mapped},
                                             {"late_to_destroy", test_late_to_destroy},
                                             {"timeout_set_meanwhile", test_timeout_set_meanwhile},
                                             {"slow_to_create", test_slow_to_create},
                                             {NULL, NULL}};
    return test_main(cases, argc, argv);
}
