/* ring.c - ranks gather each other's blocks around a ring, with one-sided channels in a kernel of their own
 * (ring_kernel.cu). Ranks are threads here, rank r on GPU r modulo the number of GPUs; processes work in the same way.
 *
 *   nvcc -o ring ring.c ring_kernel.cu $(pkg-config --cflags --libs spccl) -lpthread && ./ring 4
 *
 * Arguments: the number of ranks, 2 to 8 (by default 2); "port" for port channels instead of memory channels. */
#include "ring_kernel.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define RANKS_MAX 8
#define BLOCK_BYTES ((size_t)64 << 10)

struct rank {
    spccl_unique_id id;
    int rank, world_size, device, is_port;
    uint8_t *block, *all; /* host memory: this rank's block, the blocks of all ranks */
    size_t n_wrong;
};

static void check(spccl_status st, const struct rank *r, const char *what)
{
    if (st == SPCCL_OK)
        return;
    fprintf(stderr, "rank %d: %s: %s: %s\n", r->rank, what, spccl_status_name(st), spccl_last_error());
    exit(1);
}

static void check_cuda(cudaError_t e, const struct rank *r, const char *what)
{
    if (e == cudaSuccess)
        return;
    fprintf(stderr, "rank %d: %s: %s\n", r->rank, what, cudaGetErrorName(e));
    exit(1);
}

static uint8_t value(int rank, size_t i)
{
    return (uint8_t)((size_t)rank * 50 + i % 40 + 1);
}

/* Get the channels to both neighbours and launch the kernel. The link from the last rank to rank 0 has the number 1,
 * all others 0. */
static void launch(const struct rank *r, const spccl_channels *channels, const struct ring_job *job,
                   cudaStream_t stream)
{
    int n = r->world_size, next = (r->rank + 1) % n, previous = (r->rank + n - 1) % n;
    uint32_t to_next = r->rank + 1 == n, to_previous = r->rank == 0;
    cudaError_t e;
    if (r->is_port) {
        spccl_port_channel a, b;
        check(spccl_channels_get_port(channels, next, to_next, &a), r, "next");
        check(spccl_channels_get_port(channels, previous, to_previous, &b), r, "previous");
        e = ring_all_gather_port(a, b, job, stream);
    } else {
        spccl_memory_channel a, b;
        check(spccl_channels_get_memory(channels, next, to_next, &a), r, "next");
        check(spccl_channels_get_memory(channels, previous, to_previous, &b), r, "previous");
        e = ring_all_gather_memory(a, b, job, stream);
    }
    check_cuda(e, r, "launch");
}

static void gather(struct rank *r, spccl_comm *comm)
{
    spccl_channels_config config = SPCCL_CHANNELS_CONFIG_INIT;
    spccl_channels *channels = NULL;
    struct ring_job job = {NULL, NULL, BLOCK_BYTES, r->world_size};
    uint8_t *block_d = NULL;
    cudaStream_t stream;
    size_t bytes = BLOCK_BYTES * (size_t)r->world_size;
    check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), r, "stream");
    check_cuda(cudaMalloc((void **)&block_d, BLOCK_BYTES), r, "memory");
    check_cuda(cudaMalloc(&job.out, bytes), r, "memory");

    config.kind = r->is_port ? SPCCL_CHANNEL_PORT : SPCCL_CHANNEL_MEMORY;
    config.window_bytes = r->is_port ? RING_PORT_WINDOW_BYTES(BLOCK_BYTES) : RING_WINDOW_BYTES(BLOCK_BYTES);
    config.n_per_peer = 2;
    check(spccl_channels_create(comm, &config, &channels), r, "channels");

    check_cuda(cudaMemcpyAsync(block_d, r->block, BLOCK_BYTES, cudaMemcpyHostToDevice, stream), r, "copy");
    job.block = block_d;
    launch(r, channels, &job, stream);
    check_cuda(cudaMemcpyAsync(r->all, job.out, bytes, cudaMemcpyDeviceToHost, stream), r, "copy");
    check(spccl_cuda_wait(comm, stream, -1), r, "wait"); /* also fails if a wait of the kernel did */
    spccl_channels_destroy(channels);
    check_cuda(cudaStreamDestroy(stream), r, "stream");
    check_cuda(cudaFree(block_d), r, "memory");
    check_cuda(cudaFree(job.out), r, "memory");
}

static void *run(void *arg)
{
    struct rank *r = (struct rank *)arg;
    spccl_config config = SPCCL_CONFIG_INIT;
    spccl_cuda_config gpu = SPCCL_CUDA_CONFIG_INIT;
    spccl_comm *comm = NULL;
    config.timeout_ms = 60000;
    gpu.device = r->device;
    check_cuda(cudaSetDevice(r->device), r, "device");
    check(spccl_comm_init_rank(&r->id, r->rank, r->world_size, &config, &comm), r, "init");
    check(spccl_cuda_attach(comm, &gpu), r, "attach");
    gather(r, comm);
    for (int p = 0; p < r->world_size; p++)
        for (size_t i = 0; i < BLOCK_BYTES; i++)
            r->n_wrong += r->all[(size_t)p * BLOCK_BYTES + i] != value(p, i);
    printf("rank %d: %zu wrong of %zu\n", r->rank, r->n_wrong, BLOCK_BYTES * (size_t)r->world_size);
    check(spccl_comm_destroy(comm), r, "destroy");
    return NULL;
}

int main(int argc, char **argv)
{
    static struct rank ranks[RANKS_MAX];
    pthread_t threads[RANKS_MAX];
    int n = argc > 1 ? atoi(argv[1]) : 2, n_gpus = spccl_cuda_device_count();
    size_t n_wrong = 0;
    spccl_unique_id id;
    if (n < 2 || n > RANKS_MAX || n_gpus == 0) {
        fprintf(stderr, n_gpus == 0 ? "no GPU\n" : "wanted 2 to 8 ranks\n");
        return n_gpus == 0 ? 77 : 1;
    }
    check(spccl_get_unique_id(&id), &ranks[0], "unique id");
    for (int r = 0; r < n; r++) {
        ranks[r].id = id;
        ranks[r].rank = r;
        ranks[r].world_size = n;
        ranks[r].device = r % n_gpus;
        ranks[r].is_port = argc > 2 && strcmp(argv[2], "port") == 0;
        /* Pinned: a copy to or from other memory may wait for kernels of other ranks that are threads. */
        check_cuda(cudaHostAlloc((void **)&ranks[r].block, BLOCK_BYTES, cudaHostAllocPortable), &ranks[r],
                   "memory");
        check_cuda(cudaHostAlloc((void **)&ranks[r].all, BLOCK_BYTES * (size_t)n, cudaHostAllocPortable),
                   &ranks[r], "memory");
        for (size_t i = 0; i < BLOCK_BYTES; i++)
            ranks[r].block[i] = value(r, i);
    }
    for (int r = 0; r < n; r++)
        if (pthread_create(&threads[r], NULL, run, &ranks[r]) != 0)
            return 1;
    for (int r = 0; r < n; r++) {
        pthread_join(threads[r], NULL);
        n_wrong += ranks[r].n_wrong;
    }
    return n_wrong != 0;
}
