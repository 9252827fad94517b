/* test_gpu_none.c - without a GPU, in builds with and without CUDA: GPU calls give clear errors, and groups
 * still work. */
#include "no_cuda_why.h"
#include "ranks.h"
#include "spccl_experimental.h"

static void no_gpu(struct rank_ctx *c)
{
    uint32_t mine = (uint32_t)c->rank, sum = 0;
    spccl_cuda_stats stats = {.struct_bytes = sizeof stats};
    spccl_cuda_config bad = SPCCL_CUDA_CONFIG_INIT;
    float x[4] = {0};
    spccl_status st = spccl_cuda_attach(c->comm, NULL);
    CHECK(st == SPCCL_ERR_UNSUPPORTED || st == SPCCL_ERR_DEVICE, "attach: %s", spccl_status_name(st));
    CHECK(strstr(spccl_last_error(), "rank 0: ") != NULL &&
              (strstr(spccl_last_error(), "no CUDA") != NULL || strstr(spccl_last_error(), "no GPU") != NULL),
          "%s", spccl_last_error());
    bad.struct_bytes = 1;
    CHECK(spccl_cuda_attach(c->comm, &bad) == SPCCL_ERR_ARG, "struct_bytes");
    CHECK(spccl_cuda_all_reduce(c->comm, x, x, 4, SPCCL_FLOAT32, SPCCL_SUM, NULL) == SPCCL_ERR_STATE, "%s",
          spccl_last_error());
    CHECK(strstr(spccl_last_error(), "spccl_cuda_attach") != NULL, "%s", spccl_last_error());
    CHECK(spccl_cuda_wait(c->comm, NULL, 0) == SPCCL_ERR_STATE, "wait");
    CHECK(spccl_cuda_get_stats(c->comm, &stats) == SPCCL_ERR_STATE, "stats");
    CHECK_OK(spccl_all_reduce(c->comm, &mine, &sum, 1, SPCCL_INT32, SPCCL_SUM, NULL));
    CHECK(sum == 3, "the group still works: %u", sum);
}

static void test_group(void)
{
    struct rank_ctx ctx[3];
    run_ranks(3, NULL, no_gpu, NULL, ctx);
}

static void test_single(void)
{
    CHECK(spccl_cuda_device_count() == 0, "no GPU is visible");
    CHECK(spccl_cuda_attach(NULL, NULL) == SPCCL_ERR_ARG, "comm NULL");
    CHECK(spccl_cuda_all_gather(NULL, NULL, NULL, 0, SPCCL_INT8, NULL) == SPCCL_ERR_ARG, "comm NULL");
}

static void test_codec(void)
{
    _Alignas(16) float x[4096] = {0};
    uint64_t offsets[3];
    uint32_t status = 0;
    spccl_status st;
    CHECK(spccl_cuda_slice_elems(SPCCL_FLOAT32, 0) == 4096, "16 KiB");
    CHECK(spccl_cuda_slice_elems(SPCCL_UINT8, 0) == 16384, "16 KiB");
    CHECK(spccl_cuda_slice_elems(SPCCL_FLOAT64, 2048) == 2048, "16 KiB");
    CHECK(spccl_cuda_slice_elems(SPCCL_FLOAT64, 4096) == 0, "too long");
    CHECK(spccl_cuda_slice_elems(SPCCL_FLOAT32, 1024) == 0, "no multiple of 2048");
    CHECK(spccl_cuda_slice_elems((spccl_dtype)77, 0) == 0, "dtype");
    st = spccl_cuda_encode(x, 1024, SPCCL_FLOAT32, NULL, x + 1024, 4096, offsets, x + 2048, &status, NULL);
    CHECK(st == SPCCL_ERR_UNSUPPORTED || st == SPCCL_ERR_DEVICE, "encode: %s %s", spccl_status_name(st),
          spccl_last_error());
    st = spccl_cuda_decode(x, 64, offsets, SPCCL_SET, x + 1024, 1024, SPCCL_FLOAT32, 0, &status, NULL);
    CHECK(st == SPCCL_ERR_UNSUPPORTED || st == SPCCL_ERR_DEVICE, "decode: %s %s", spccl_status_name(st),
          spccl_last_error());
}

static void test_deltas(void)
{
    _Alignas(16) static uint8_t x[64];
    spccl_cuda_delta_plan *plan = NULL;
    uint64_t sum;
    spccl_status st = spccl_cuda_delta_plan_create(NULL, 0, NULL, &plan, NULL);
    CHECK(st == SPCCL_ERR_UNSUPPORTED || st == SPCCL_ERR_DEVICE, "plan: %s %s", spccl_status_name(st),
          spccl_last_error());
    st = spccl_cuda_delta_checksum(x, 64, SPCCL_UINT8, 0, 0, &sum, NULL);
    CHECK(st == SPCCL_ERR_UNSUPPORTED || st == SPCCL_ERR_DEVICE, "checksum: %s %s", spccl_status_name(st),
          spccl_last_error());
    spccl_cuda_delta_plan_destroy(plan);
}

static void test_signs(void)
{
    _Alignas(16) static float out[4096];
    static uint32_t row[129];
    spccl_signs_sum_options o = SPCCL_SIGNS_SUM_OPTIONS_INIT;
    spccl_status st = spccl_signs_decode(row, 1, out, 0, NULL);
    CHECK(st == SPCCL_ERR_UNSUPPORTED || st == SPCCL_ERR_DEVICE, "decode: %s %s", spccl_status_name(st),
          spccl_last_error());
    o.kept = out, o.rows = row, o.n_chunks = 1, o.device = 0;
    st = spccl_signs_sum(&o, NULL);
    CHECK(st == SPCCL_ERR_UNSUPPORTED || st == SPCCL_ERR_DEVICE, "sum: %s %s", spccl_status_name(st),
          spccl_last_error());
}

/* On the host pruning works; a plan for a GPU fails with the reason. */
static void test_prune(void)
{
    static spccl_prune_state state;
    float grad[3] = {1, 2, 3};
    spccl_prune_segment s = {.n_elems = 3, .state = &state, .whole = 1};
    spccl_prune_plan *plan = NULL;
    spccl_status st = spccl_prune_plan_create(&s, 1, 3, SPCCL_FLOAT32, 0, &plan);
    CHECK(plan == NULL && (st == SPCCL_ERR_UNSUPPORTED || st == SPCCL_ERR_DEVICE), "plan for GPU 0: %s %s",
          spccl_status_name(st), spccl_last_error());
    CHECK_OK(spccl_prune_plan_create(&s, 1, 3, SPCCL_FLOAT32, -1, &plan));
    CHECK_OK(spccl_prune(plan, grad, NULL));
    CHECK(grad[2] == 3 && state.n_sent == 3, "%llu sent", (unsigned long long)state.n_sent);
    spccl_prune_plan_destroy(plan);
}

static void test_info(void)
{
    spccl_info_entry e = {.struct_bytes = sizeof e};
    int n = 0;
    for (size_t i = 0; spccl_info(i, &e) == SPCCL_OK; i++)
        if (strcmp(e.name, "cuda") == 0) {
            n++;
            CHECK(strcmp(e.value, SPCCL_TEST_HAS_CUDA ? "in" : "absent") == 0, "%s: %s", e.value, e.why);
            CHECK(strstr(e.why, SPCCL_TEST_HAS_CUDA ? "compiled for" : SPCCL_NO_CUDA_WHY) != NULL, "%s",
                  e.why);
        }
    CHECK(n == 1, "one entry, got %d", n);
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {
        {"single", test_single}, {"group", test_group}, {"codec", test_codec}, {"signs", test_signs},
        {"deltas", test_deltas}, {"prune", test_prune}, {"info", test_info},   {NULL, NULL}};
    setenv("CUDA_VISIBLE_DEVICES", "", 1); /* hides the GPUs of a machine that has some */
    return test_main(cases, argc, argv);
}
