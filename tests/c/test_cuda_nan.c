/* test_cuda_nan.c - all-reduces whose sums and products are NaNs: GPU and host must give the bits of
 * nan_cases.h, whether the array is dense or sparse. Ranks are threads. --small: dense arrays only, for
 * sanitizers. */
#include "cuda_ranks.h"
#include "nan_cases.h"

#define N_ELEMS ((size_t)20000)

/* Every step-th element of the input is this rank's operand, the others are 0. */
static void fill(uint8_t *x, const struct nan_case *c, int rank, size_t step)
{
    size_t e = spccl_dtype_bytes(c->dtype);
    memset(x, 0, N_ELEMS * e);
    for (size_t i = 0; i < N_ELEMS; i += step)
        memcpy(x + i * e, rank == 0 ? &c->left : &c->right, e);
}

static void check(const uint8_t *x, const struct nan_case *c, size_t step, const char *where)
{
    size_t e = spccl_dtype_bytes(c->dtype);
    for (size_t i = 0; i < N_ELEMS; i++) {
        uint64_t got = 0, wanted = i % step == 0 ? c->wanted : 0;
        memcpy(&got, x + i * e, e);
        if (got != wanted) {
            CHECK(got == wanted, "%s, %s, %s, every %zu: element %zu: %#llx, %#llx: got %#llx, wanted %#llx",
                  where, spccl_dtype_name(c->dtype), op_names[c->op], step, i, (unsigned long long)c->left,
                  (unsigned long long)c->right, (unsigned long long)got, (unsigned long long)wanted);
            return;
        }
    }
}

/* In place, so that the sparse arrays are patched. False: the communicator is broken. */
static bool run_case(const struct rank_ctx *ctx, const struct nan_case *c, size_t step)
{
    struct rank_buffer *m = &rank_buffers[ctx->rank];
    struct call call = {.coll = ALL_REDUCE, .dtype = c->dtype, .op = c->op, .n = N_ELEMS};
    spccl_status st;
    fill(m->in, c, ctx->rank, step);
    st = host_call(ctx->comm, &call, m->in, m->want);
    CHECK(st == SPCCL_OK, "rank %d: the host: %s", ctx->rank, spccl_last_error());
    if (st != SPCCL_OK)
        return false;
    check(m->want, c, step, "host");
    CUDA_OK(cudaMemcpyAsync(m->out_d, m->in, block_bytes(&call), cudaMemcpyHostToDevice, m->on));
    st = gpu_call(ctx->comm, &call, m->out_d, m->out_d, m->on);
    if (st == SPCCL_OK)
        st = spccl_cuda_wait(ctx->comm, m->on, wait_ms());
    CHECK(st == SPCCL_OK, "rank %d: %s", ctx->rank, spccl_last_error());
    if (st != SPCCL_OK)
        return false;
    CUDA_OK(cudaMemcpyAsync(m->got, m->out_d, block_bytes(&call), cudaMemcpyDeviceToHost, m->on));
    sync_stream(m->on);
    check(m->got, c, step, "GPU");
    return true;
}

static void rank_fn(struct rank_ctx *ctx)
{
    static const size_t steps[] = {1, 3, 1000};
    bool ok = attach_gpu(ctx->comm, ctx->rank, 0);
    for (size_t i = 0; i < N_NAN_CASES; i++)
        for (size_t k = 0; ok && k < (is_small ? 1 : sizeof steps / sizeof *steps); k++)
            ok = run_case(ctx, &nan_cases[i], steps[k]);
}

static void run_schedule(const char *schedule)
{
    struct rank_ctx ctx[RANKS_CAP];
    spccl_config config = SPCCL_CONFIG_INIT;
    setenv("SPCCL_SCHEDULE", schedule, 1);
    config.timeout_ms = wait_ms();
    run_ranks(2, &config, rank_fn, NULL, ctx);
    for (int r = 0; r < 2; r++)
        CHECK(ctx[r].created == SPCCL_OK, "rank %d: %s", r, ctx[r].error);
}

static void test_direct(void)
{
    run_schedule("direct");
}
static void test_oneshot(void)
{
    run_schedule("oneshot");
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {
        {"direct", test_direct}, {"oneshot", test_oneshot}, {NULL, NULL}};
    cuda_test_start(&argc, argv);
    make_rank_buffers(2, N_ELEMS * 8);
    return test_main(cases, argc, argv);
}
