/* cuda_ranks.h - for tests of GPU collectives: memory of each rank, made before any kernel runs; ranks as
 * threads on GPU r % n_gpus, several on one if need be. */
#ifndef SP_CUDA_RANKS_H
#define SP_CUDA_RANKS_H

#include "cuda_test.h"
#include "ranks.h"

#define CUDA_RANKS_CAP 8

/* One rank's buffers; in and out: of `cap` bytes each, on its GPU, and pinned on the host. */
struct rank_room {
    int device;
    uint8_t *in_d, *out_d, *spare_d;
    uint8_t *in, *out, *got, *want, *plain;
    cudaStream_t on, on2;
};
static struct rank_room rank_rooms[CUDA_RANKS_CAP];

static inline void make_rank_rooms(int n_ranks, size_t cap)
{
    for (int r = 0; r < n_ranks; r++) {
        struct rank_room *m = &rank_rooms[r];
        m->device = r % n_gpus;
        CUDA_OK(cudaSetDevice(m->device));
        CUDA_OK(cudaMalloc((void **)&m->in_d, cap));
        CUDA_OK(cudaMalloc((void **)&m->out_d, cap));
        CUDA_OK(cudaMalloc((void **)&m->spare_d, cap));
        CUDA_OK(cudaStreamCreateWithFlags(&m->on, cudaStreamNonBlocking));
        CUDA_OK(cudaStreamCreateWithFlags(&m->on2, cudaStreamNonBlocking));
        m->in = pinned_room(cap), m->out = pinned_room(cap), m->got = pinned_room(cap);
        m->want = pinned_room(cap), m->plain = pinned_room(cap);
        CUDA_OK(cudaDeviceSynchronize());
    }
}

/* All ranks are here: a host collective. For what may not happen while a peer's kernel runs. */
static inline bool all_here(spccl_comm *comm)
{
    uint8_t mine = 1, all[RANKS_CAP];
    spccl_status st = spccl_all_gather(comm, &mine, all, 1, SPCCL_UINT8, NULL);
    CHECK(st == SPCCL_OK, "meeting: %s", spccl_last_error());
    return st == SPCCL_OK;
}

/* This thread's rank gets its GPU. */
static inline bool attach_gpu(spccl_comm *comm, int rank, uint32_t max_ctas)
{
    spccl_cuda_config config = SPCCL_CUDA_CONFIG_INIT;
    spccl_status st;
    CUDA_OK(cudaSetDevice(rank_rooms[rank].device));
    config.device = rank_rooms[rank].device;
    config.max_ctas = max_ctas;
    if (is_small)
        config.inbox_bytes = (size_t)16 << 20;
    st = spccl_cuda_attach(comm, &config);
    CHECK(st == SPCCL_OK, "rank %d: %s", rank, spccl_last_error());
    return st == SPCCL_OK;
}

/* ---- one collective, on the GPU and by the host's engine, which is the judge ---- */

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
};

static inline bool call_reduces(const struct call *c)
{
    return c->coll == REDUCE_SCATTER || c->coll == ALL_REDUCE;
}
/* Bytes of the block that n counts, and of the buffers. */
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
    return block_bytes(c) * (c->coll == ALL_GATHER ? (size_t)n_ranks : 1);
}

/* Broadcast: `out` is the buffer. */
static inline spccl_status gpu_call(spccl_comm *comm, const struct call *c, const void *in, void *out,
                                    cudaStream_t stream)
{
    switch (c->coll) {
    case ALL_GATHER:
        return spccl_cuda_all_gather(comm, in, out, c->n, c->dtype, stream);
    case REDUCE_SCATTER:
        return spccl_cuda_reduce_scatter(comm, in, out, c->n, c->dtype, c->op, stream);
    case ALL_REDUCE:
        return spccl_cuda_all_reduce(comm, in, out, c->n, c->dtype, c->op, stream);
    default:
        return spccl_cuda_broadcast(comm, out, c->n, c->dtype, c->root, stream);
    }
}

/* `in` is kept. */
static inline spccl_status host_call(spccl_comm *comm, const struct call *c, const void *in, void *out)
{
    switch (c->coll) {
    case ALL_GATHER:
        return spccl_all_gather(comm, in, out, c->n, c->dtype, NULL);
    case REDUCE_SCATTER:
        return spccl_reduce_scatter(comm, in, out, c->n, c->dtype, c->op, NULL);
    case ALL_REDUCE:
        return spccl_all_reduce(comm, in, out, c->n, c->dtype, c->op, NULL);
    default:
        memcpy(out, in, block_bytes(c));
        return spccl_broadcast(comm, out, c->n, c->dtype, c->root, NULL);
    }
}

#endif
