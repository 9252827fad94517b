/* test_gpu_channels.c - one-sided channels on fake GPUs, without kernels: memory that one rank cannot map.
 * test_cuda_channels.c and test_cuda_ports.c run kernels. */
#include "fake_gpu.h"

#include "ranks.h"
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

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {{"cannot_map", test_channels_that_cannot_be_mapped},
                                             {NULL, NULL}};
    return test_main(cases, argc, argv);
}
