/* cuda_ranks.h - for tests of GPU collectives whose ranks are threads. Rank r is on GPU r % n_gpus, so
 * several ranks may share a GPU. The memory of all ranks is allocated before any kernel runs. */
#ifndef SP_CUDA_RANKS_H
#define SP_CUDA_RANKS_H

#include "cuda_test.h"
#include "ranks.h"

#define CUDA_RANKS_CAP 64

/* One rank's buffers of `cap` bytes each. Those that end in _d are on its GPU, the others are pinned host
 * memory. */
struct rank_buffer {
    int device;
    uint8_t *in_d, *out_d, *spare_d;
    uint8_t *in, *out, *got, *want, *plain;
    cudaStream_t on, on2;
};
static struct rank_buffer rank_buffers[CUDA_RANKS_CAP];

static inline void make_rank_buffers(int n_ranks, size_t cap)
{
    for (int r = 0; r < n_ranks; r++) {
        struct rank_buffer *m = &rank_buffers[r];
        m->device = r % n_gpus;
        CUDA_OK(cudaSetDevice(m->device));
        CUDA_OK(cudaMalloc((void **)&m->in_d, cap));
        CUDA_OK(cudaMalloc((void **)&m->out_d, cap));
        CUDA_OK(cudaMalloc((void **)&m->spare_d, cap));
        CUDA_OK(cudaStreamCreateWithFlags(&m->on, cudaStreamNonBlocking));
        CUDA_OK(cudaStreamCreateWithFlags(&m->on2, cudaStreamNonBlocking));
        m->in = pinned_alloc(cap), m->out = pinned_alloc(cap), m->got = pinned_alloc(cap);
        m->want = pinned_alloc(cap), m->plain = pinned_alloc(cap);
        CUDA_OK(cudaDeviceSynchronize());
    }
}

/* Wait until all ranks have come here, by a host collective: before work that may not be done while a peer's
 * kernel runs. */
static inline bool all_here(spccl_comm *comm)
{
    uint8_t mine = 1, all[RANKS_CAP];
    spccl_status st = spccl_all_gather(comm, &mine, all, 1, SPCCL_UINT8, NULL);
    CHECK(st == SPCCL_OK, "host barrier: %s", spccl_last_error());
    return st == SPCCL_OK;
}

/* Attach the GPU of this thread's rank. */
static inline bool attach_gpu(spccl_comm *comm, int rank, uint32_t max_ctas)
{
    spccl_cuda_config config = SPCCL_CUDA_CONFIG_INIT;
    spccl_status st;
    CUDA_OK(cudaSetDevice(rank_buffers[rank].device));
    config.device = rank_buffers[rank].device;
    config.max_ctas = max_ctas;
    if ((is_small || spccl_comm_world_size(comm) > 8) && getenv("SPCCL_INBOX_BYTES") == NULL)
        config.inbox_bytes = (size_t)16 << 20;
    st = spccl_cuda_attach(comm, &config);
    CHECK(st == SPCCL_OK, "rank %d: %s", rank, spccl_last_error());
    return st == SPCCL_OK;
}

/* ---- one collective, on the GPU and on the host; the host's result is the reference ---- */

enum coll { ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, BROADCAST, N_COLLS };
static const char *const coll_names[N_COLLS] = {"all_gather", "reduce_scatter", "all_reduce", "broadcast"};
static const char *const op_names[] = {"sum", "avg", "min", "max", "prod"};
#define N_OPS 5

struct call {
    enum coll coll;
    spccl_dtype dtype;
    spccl_redop op;
    size_t n; /* as in spccl.h */
    int root;
    bool wide; /* reduce_scatter: spccl_reduce_scatter_wide */
};

static inline bool call_reduces(const struct call *c)
{
    return c->coll == REDUCE_SCATTER || c->coll == ALL_REDUCE;
}
/* Of an element of the output. */
static inline size_t out_elem_bytes(const struct call *c)
{
    size_t e = spccl_dtype_bytes(c->dtype);
    return c->wide && (c->dtype == SPCCL_FLOAT16 || c->dtype == SPCCL_BFLOAT16) ? 2 * e : e;
}
/* Bytes of n elements, of the input and of the output. */
static inline size_t block_bytes(const struct call *c)
{
    return c->n * spccl_dtype_bytes(c->dtype);
}
static inline size_t in_bytes(const struct call *c, int n_ranks)
{
    return block_bytes(c) * (c->coll == REDUCE_SCATTER ? (size_t)n_ranks : 1);
}
static inline size_t out_bytes(const struct call *c, int n_ranks)
{
    return c->n * out_elem_bytes(c) * (c->coll == ALL_GATHER ? (size_t)n_ranks : 1);
}

/* In a broadcast `out` is the buffer. */
static inline spccl_status gpu_call(spccl_comm *comm, const struct call *c, const void *in, void *out,
                                    cudaStream_t stream)
{
    switch (c->coll) {
    case ALL_GATHER:
        return spccl_cuda_all_gather(comm, in, out, c->n, c->dtype, stream);
    case REDUCE_SCATTER:
        return (c->wide ? spccl_cuda_reduce_scatter_wide
                        : spccl_cuda_reduce_scatter)(comm, in, out, c->n, c->dtype, c->op, stream);
    case ALL_REDUCE:
        return spccl_cuda_all_reduce(comm, in, out, c->n, c->dtype, c->op, stream);
    default:
        return spccl_cuda_broadcast(comm, out, c->n, c->dtype, c->root, stream);
    }
}

/* Does not change `in`, in a broadcast either. */
static inline spccl_status host_call(spccl_comm *comm, const struct call *c, const void *in, void *out)
{
    switch (c->coll) {
    case ALL_GATHER:
        return spccl_all_gather(comm, in, out, c->n, c->dtype, NULL);
    case REDUCE_SCATTER:
        return (c->wide ? spccl_reduce_scatter_wide : spccl_reduce_scatter)(comm, in, out, c->n, c->dtype,
                                                                            c->op, NULL);
    case ALL_REDUCE:
        return spccl_all_reduce(comm, in, out, c->n, c->dtype, c->op, NULL);
    default:
        memcpy(out, in, block_bytes(c));
        return spccl_broadcast(comm, out, c->n, c->dtype, c->root, NULL);
    }
}

#endif
