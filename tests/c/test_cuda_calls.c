/* test_cuda_calls.c - calls of GPU collectives that are refused before anything is launched, after which the
 * group still works; inboxes of many sizes; the counters. Ranks are threads. --small: for sanitizers. */
#include "cuda_plans.h"
#include "cuda_sums.h"

#include "core/base/bits.h"
#include "core/contract/gpu.h"

#define N_RANKS 3
#define CAP ((size_t)17 << 20)

/* ---- refused at the call ---- */

static void want(spccl_status wanted, spccl_status got, const char *what)
{
    CHECK(got == wanted, "%s: %s: %s", what, spccl_status_name(got), spccl_last_error());
}

static uint64_t n_launched(spccl_comm *comm)
{
    spccl_cuda_stats s = {.struct_bytes = sizeof s};
    CHECK_OK(spccl_cuda_get_stats(comm, &s));
    return s.n_collectives;
}

static void refuses_pointers(struct rank_ctx *c)
{
    const struct rank_buffer *m = &rank_buffers[c->rank];
    uint8_t *in = m->in_d, *out = m->out_d;
    spccl_comm *comm = c->comm;
    float *plain = malloc(4096);
    void *s = m->on;
#define SUM(in, out, n, t) spccl_cuda_all_reduce(comm, in, out, n, t, SPCCL_SUM, s)
    want(SPCCL_ERR_ARG, SUM(plain, out, 9, SPCCL_FLOAT32), "in is host memory");
    CHECK(strstr(spccl_last_error(), "host memory") != NULL, "%s", spccl_last_error());
    want(SPCCL_ERR_ARG, SUM(in, plain, 9, SPCCL_FLOAT32), "out is host memory");
    want(SPCCL_ERR_ARG, SUM(NULL, out, 9, SPCCL_FLOAT32), "in is NULL");
    want(SPCCL_ERR_ARG, SUM(in, NULL, 9, SPCCL_FLOAT32), "out is NULL");
    want(SPCCL_ERR_ARG, SUM(in + 2, out, 9, SPCCL_FLOAT32), "in is misaligned");
    want(SPCCL_ERR_ARG, SUM(in, out + 1, 9, SPCCL_FLOAT16), "out is misaligned");
    want(SPCCL_ERR_ALIAS, SUM(in, in + 8, 9, SPCCL_FLOAT32), "in and out overlap");
    want(SPCCL_ERR_ARG, SUM(in, out, SIZE_MAX / 2, SPCCL_FLOAT32), "too many elements");
    want(SPCCL_ERR_DTYPE, SUM(in, out, 9, SPCCL_FLOAT8), "float8 is not reduced");
    want(SPCCL_ERR_DTYPE, SUM(in, out, 9, (spccl_dtype)11), "dtype 11");
    want(SPCCL_ERR_ARG, spccl_cuda_all_reduce(comm, in, out, 9, SPCCL_FLOAT32, (spccl_redop)5, s), "op 5");
    want(SPCCL_ERR_ALIAS, spccl_cuda_all_gather(comm, in, in + 4, 9, SPCCL_FLOAT32, s), "gather overlaps");
    want(SPCCL_ERR_ALIAS, spccl_cuda_reduce_scatter(comm, in, in + 4, 9, SPCCL_FLOAT32, SPCCL_SUM, s),
         "scatter overlaps");
    want(SPCCL_ERR_DTYPE, spccl_cuda_reduce_scatter(comm, in, out, 9, SPCCL_FLOAT8, SPCCL_SUM, s), "float8");
    want(SPCCL_ERR_ARG, spccl_cuda_broadcast(comm, in, 9, SPCCL_FLOAT32, c->n_ranks, s), "root");
    want(SPCCL_ERR_ARG, spccl_cuda_broadcast(comm, plain, 9, SPCCL_FLOAT32, 0, s), "buf is host memory");
    if (n_gpus > 1) {
        uint8_t *other = rank_buffers[(c->rank + 1) % c->n_ranks].out_d; /* of the next GPU */
        want(SPCCL_ERR_ARG, SUM(in, other, 9, SPCCL_FLOAT32), "out is of another GPU");
        CHECK(strstr(spccl_last_error(), "GPU") != NULL, "%s", spccl_last_error());
    }
#undef SUM
    free(plain);
}

static void refuses(struct rank_ctx *c)
{
    const struct rank_buffer *m = &rank_buffers[c->rank];
    spccl_cuda_config twice = SPCCL_CUDA_CONFIG_INIT;
    spccl_cuda_stats bad = {.struct_bytes = 1};
    uint64_t before;
    want(SPCCL_ERR_STATE, sum(c, 9, SPCCL_FLOAT32), "not attached");
    want(SPCCL_ERR_STATE, spccl_cuda_wait(c->comm, m->on, 10), "wait, not attached");
    if (!attach_gpu(c->comm, c->rank, 0))
        return;
    twice.device = m->device;
    want(SPCCL_ERR_STATE, spccl_cuda_attach(c->comm, &twice), "attached twice");
    want(SPCCL_ERR_ARG, spccl_cuda_get_stats(c->comm, &bad), "stats of another size");
    want(SPCCL_ERR_ARG, spccl_cuda_get_stats(c->comm, NULL), "stats NULL");
    check_works(c);
    before = n_launched(c->comm);
    refuses_pointers(c);
    /* Without elements nothing is launched. */
    CHECK_OK(spccl_cuda_all_reduce(c->comm, NULL, NULL, 0, SPCCL_FLOAT32, SPCCL_SUM, m->on));
    CHECK(n_launched(c->comm) == before, "a refused call has launched a kernel");
    CHECK_OK(spccl_comm_async_error(c->comm));
    check_works(c);
}

static void test_refusals(void)
{

    want(SPCCL_ERR_ARG, spccl_cuda_attach(NULL, NULL), "attach without a communicator");
    run_scene(2, refuses, NULL);
}

/* A plan that GPUs cannot run: refused by its step. Others of the file run as they say: the root of a broadcast owns
 * three chunks, which are three launches, and nobody else sends. */
static void refuses_plan(struct rank_ctx *c)
{
    const struct rank_buffer *m = &rank_buffers[c->rank];
    spccl_cuda_stats s = {.struct_bytes = sizeof s};
    static const char why[] = "rank 0, step 0: it does not add what all ranks have of chunk 0 in rank order";
    if (!attach_gpu(c->comm, c->rank, 0))
        return;
    CHECK_FAILS(sum(c, 9, SPCCL_FLOAT32), SPCCL_ERR_UNSUPPORTED, why);
    CHECK_FAILS(spccl_cuda_check_plan(c->comm, "all_reduce", 0), SPCCL_ERR_UNSUPPORTED, why);
    want(SPCCL_ERR_ARG, spccl_cuda_check_plan(c->comm, "reduce", 0), "a collective that spccl lacks");
    CHECK(n_launched(c->comm) == 0, "a refused call has launched a kernel");
    CHECK_OK(spccl_cuda_check_plan(c->comm, "broadcast", 0));
    CHECK_OK(spccl_cuda_broadcast(c->comm, m->out_d, 9000, SPCCL_FLOAT32, 0, m->on));
    CHECK_OK(spccl_cuda_wait(c->comm, m->on, wait_ms()));
    CHECK_OK(spccl_cuda_get_stats(c->comm, &s));
    CHECK(s.n_collectives == 3 && (s.wire_bytes_sent != 0) == (c->rank == 0), "%llu launches, %llu bytes",
          (unsigned long long)s.n_collectives, (unsigned long long)s.wire_bytes_sent);
}

static void test_plan(void)
{
    struct owned p = {.n_ranks = 2, .n_chunks = 3, .own_last = true};
    struct rank_ctx ctx[RANKS_CAP];
    setenv("SPCCL_SCHEDULE", write_owned(&p), 1);
    run_ranks(2, NULL, refuses_plan, NULL, ctx);
    unlink(getenv("SPCCL_SCHEDULE") + 5);
    unsetenv("SPCCL_SCHEDULE");
}

/* ---- attaching ---- */

static void small_inbox(struct rank_ctx *c)
{
    spccl_cuda_config config = SPCCL_CUDA_CONFIG_INIT;
    config.device = rank_buffers[c->rank].device;
    config.inbox_bytes = c->rank == 1 ? 4096 : 0; /* all ranks take the smallest of the sizes */
    want(SPCCL_ERR_SETTING, spccl_cuda_attach(c->comm, &config), "inbox of 4 KiB");
    CHECK(strstr(spccl_last_error(), "SPCCL_INBOX_BYTES") != NULL, "%s", spccl_last_error());
    config.device = n_gpus;
    config.inbox_bytes = 0;
    want(SPCCL_ERR_ARG, spccl_cuda_attach(c->comm, &config), "a GPU that does not exist");
    config.struct_bytes = 3;
    want(SPCCL_ERR_ARG, spccl_cuda_attach(c->comm, &config), "a config of another size");
    attach_and_check(c); /* the group still works */
}

static void test_inbox(void)
{

    run_scene(2, small_inbox, NULL);
}

/* The smallest inbox that works; it has one worker. */
static void one_worker(struct rank_ctx *c)
{
    spccl_cuda_config config = SPCCL_CUDA_CONFIG_INIT;
    spccl_cuda_stats s = {.struct_bytes = sizeof s};
    config.device = rank_buffers[c->rank].device;
    config.inbox_bytes = (size_t)1 << 20;
    CHECK_OK(spccl_cuda_attach(c->comm, &config));
    CHECK_OK(spccl_cuda_get_stats(c->comm, &s));
    CHECK(s.inbox_bytes <= (size_t)1 << 20 && s.inbox_bytes > 0 && s.n_ctas > 0, "%llu bytes, %u CTAs",
          (unsigned long long)s.inbox_bytes, s.n_ctas);
    check_works(c);
}

static void test_one_worker(void)
{

    run_scene(2, one_worker, NULL);
    run_scene(N_RANKS, one_worker, NULL);
}

/* ---- counters ---- */

static uint64_t bytes_of_gather(struct rank_ctx *c, array_kind kind, size_t n, spccl_cuda_stats *after)
{
    const struct rank_buffer *m = &rank_buffers[c->rank];
    spccl_cuda_stats before = {.struct_bytes = sizeof before};
    uint64_t rng = 77u + (uint64_t)c->rank;
    fill_array(m->in, n, SPCCL_FLOAT32, kind, &rng);
    CUDA_OK(cudaMemcpyAsync(m->in_d, m->in, n * 4, cudaMemcpyHostToDevice, m->on));
    CHECK_OK(spccl_cuda_get_stats(c->comm, &before));
    if (!all_here(c->comm))
        return 0;
    CHECK_OK(spccl_cuda_all_gather(c->comm, m->in_d, m->out_d, n, SPCCL_FLOAT32, m->on));
    CHECK_OK(spccl_cuda_wait(c->comm, m->on, wait_ms()));
    *after = (spccl_cuda_stats){.struct_bytes = sizeof *after};
    CHECK_OK(spccl_cuda_get_stats(c->comm, after));
    CHECK(after->n_collectives == before.n_collectives + 1, "counted %llu",
          (unsigned long long)after->n_collectives);
    for (int f = 0; f < SPCCL_N_FORMATS; f++)
        after->n_frames_sent[f] -= before.n_frames_sent[f];
    return after->wire_bytes_sent - before.wire_bytes_sent;
}

static void counts(struct rank_ctx *c)
{
    size_t n = is_small ? 65536 : 1u << 20;
    uint64_t dense = n * 4 * (uint64_t)(c->n_ranks - 1), sent;
    spccl_cuda_stats s = {.struct_bytes = sizeof s};
    if (!attach_gpu(c->comm, c->rank, 0))
        return;
    sent = bytes_of_gather(c, KIND_FULL, n, &s);
    CHECK(sent >= dense && sent < dense + dense / 8 && s.n_frames_sent[SPCCL_FORMAT_DENSE] > 0 &&
              s.n_frames_sent[SPCCL_FORMAT_TILE] + s.n_frames_sent[SPCCL_FORMAT_COO] +
                      s.n_frames_sent[SPCCL_FORMAT_PICI] ==
                  0,
          "dense: %llu bytes sent, the dense array has %llu", (unsigned long long)sent,
          (unsigned long long)dense);
    sent = bytes_of_gather(c, KIND_PERCENT_1, n, &s);
    CHECK(sent >= dense / 100 && sent < dense / 10 && s.n_frames_sent[SPCCL_FORMAT_DENSE] == 0,
          "1%%: %llu bytes sent, the dense array has %llu", (unsigned long long)sent,
          (unsigned long long)dense);
    sent = bytes_of_gather(c, KIND_ZERO, n, &s);
    CHECK(sent < dense / 20 && s.n_frames_sent[SPCCL_FORMAT_EMPTY] > 0, "zeros: %llu bytes sent",
          (unsigned long long)sent);
    CHECK(s.device == rank_buffers[c->rank].device, "GPU %d", s.device);
}

/* The default stream, of which each GPU has one: two ranks on one would wait for each other. */
static void on_default_stream(struct rank_ctx *c)
{
    void *own = rank_buffers[c->rank].on;
    if (!attach_gpu(c->comm, c->rank, 0))
        return;
    CHECK_OK(spccl_cuda_wait(c->comm, NULL, wait_ms())); /* nothing was launched on it */
    rank_buffers[c->rank].on = NULL;
    check_works(c);
    rank_buffers[c->rank].on = own;
}

static void test_default_stream(void)
{
    run_scene(n_gpus > 1 ? 2 : 1, on_default_stream, NULL);
}

static void test_counters(void)
{

    run_scene(2, counts, NULL);
    run_scene(N_RANKS, counts, NULL);
}

/* ---- handles of peers' memory ---- */

/* A CUDA IPC handle of another process (kernels/cuda/memory_cuda.c) that points outside of its allocation. */
static void test_handle_offset(void)
{
    static const uint64_t offsets[] = {4112, 1u << 30, UINT64_MAX - 15}; /* in an allocation of 8192 bytes */
    for (size_t i = 0; i < sizeof offsets / sizeof *offsets; i++) {
        uint8_t handle[SP_GPU_HANDLE_BYTES] = {2};
        sp_gpu_memory *m = NULL;
        spccl_status st;
        sp_store_le64(handle + 8, 4096);
        sp_store_le64(handle + 24, 1); /* the token of no process */
        sp_store_le64(handle + 96, offsets[i]);
        sp_store_le64(handle + 104, 8192);
        st = sp_gpu_ops_get(NULL)->memory_import(0, handle, -1, 4096, &m);
        CHECK(st == SPCCL_ERR_MISMATCH && m == NULL &&
                  strstr(spccl_last_error(), "4096 bytes at offset") != NULL,
              "%s: %s", spccl_status_name(st), spccl_last_error());
    }
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {{"refusals", test_refusals},
                                             {"plan", test_plan},
                                             {"inbox", test_inbox},
                                             {"one_worker", test_one_worker},
                                             {"default_stream", test_default_stream},
                                             {"counters", test_counters},
                                             {"handle_offset", test_handle_offset},
                                             {NULL, NULL}};
    cuda_test_start(&argc, argv);
    make_rank_buffers(N_RANKS, CAP);
    return test_main(cases, argc, argv);
}
