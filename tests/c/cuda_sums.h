/* cuda_sums.h - an all-reduce on the GPU with known sums, for tests that care about errors more than about
 * values. */
#ifndef SP_CUDA_SUMS_H
#define SP_CUDA_SUMS_H

#include "cuda_ranks.h"

#define FEW 1000u /* elements; their frames fit into the rings */

static inline spccl_status sum(struct rank_ctx *c, size_t n, spccl_dtype dtype)
{
    const struct rank_buffer *m = &rank_buffers[c->rank];
    return spccl_cuda_all_reduce(c->comm, m->in_d, m->out_d, n, dtype, SPCCL_SUM, m->on);
}

/* Every third element of rank r is r + 1, the others are 0. */
static inline void load_input(const struct rank_ctx *c, size_t n)
{
    const struct rank_buffer *m = &rank_buffers[c->rank];
    float *x = (float *)(void *)m->in;
    for (size_t i = 0; i < n; i++)
        x[i] = i % 3 == 0 ? (float)(c->rank + 1) : 0;
    CUDA_OK(cudaMemcpyAsync(m->in_d, m->in, n * 4, cudaMemcpyHostToDevice, m->on));
    CUDA_OK(cudaMemsetAsync(m->out_d, POISON, n * 4, m->on));
    sync_stream(m->on);
}

static inline void check_sums(const struct rank_ctx *c, size_t n)
{
    const struct rank_buffer *m = &rank_buffers[c->rank];
    const float *got = (const float *)(const void *)m->got;
    float wanted = (float)(c->n_ranks * (c->n_ranks + 1) / 2);
    size_t i = 0;
    CUDA_OK(cudaMemcpyAsync(m->got, m->out_d, n * 4, cudaMemcpyDeviceToHost, m->on));
    CHECK_OK(spccl_cuda_wait(c->comm, m->on, wait_ms()));
    while (i < n && got[i] == (i % 3 == 0 ? wanted : 0))
        i++;
    CHECK(i == n, "rank %d: element %zu of %zu is %g", c->rank, i, n, i < n ? (double)got[i] : 0);
}

/* Run a collective, which must succeed. */
static inline void check_works(struct rank_ctx *c)
{
    load_input(c, FEW);
    CHECK_OK(sum(c, FEW, SPCCL_FLOAT32));
    check_sums(c, FEW);
    CHECK_OK(spccl_comm_async_error(c->comm));
}

static inline void attach_and_check(struct rank_ctx *c)
{
    if (attach_gpu(c->comm, c->rank, 0))
        check_works(c);
}

/* Run fn on n_ranks threads. Afterwards a new communicator of the same ranks must work. */
static inline void run_scene(int n_ranks, void (*fn)(struct rank_ctx *), void *arg)
{
    struct rank_ctx ctx[RANKS_CAP];
    run_ranks(n_ranks, NULL, fn, arg, ctx);
    for (int r = 0; r < n_ranks; r++)
        CHECK(ctx[r].created == SPCCL_OK, "rank %d: %s", r, ctx[r].error);
    run_ranks(n_ranks, NULL, attach_and_check, NULL, ctx);
    for (int r = 0; r < n_ranks; r++)
        CHECK(ctx[r].created == SPCCL_OK, "rank %d, again: %s", r, ctx[r].error);
}

#endif
