/* all_pairs.c - an all-reduce of 16 KiB in one kernel (all_pairs_kernel.cu), with packets over one-sided channels. Ranks
 * are threads here, rank r on GPU r modulo the number of GPUs; processes work in the same way.
 *
 *   nvcc -o all_pairs all_pairs.c all_pairs_kernel.cu $(pkg-config --cflags --libs spccl) -lpthread && ./all_pairs 4
 *
 * Argument: the number of ranks, 2 to 8 (by default 2). */
#include "all_pairs_kernel.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#define N_ELEMS ((size_t)4096)
#define BYTES (N_ELEMS * sizeof(float))
#define N_LAUNCHES 5

struct rank {
    spccl_unique_id id;
    int rank, world_size, device;
    float *in, *out; /* pinned host memory: a copy to other memory may wait for kernels of other ranks */
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

static float value(int rank, size_t i, int launch)
{
    return (float)((size_t)(rank + 1) * (i % 100) + (size_t)launch);
}

/* One all-reduce, compared with the sum. All values are whole numbers, so float32 holds them exactly. */
static void reduce(struct rank *r, spccl_comm *comm, const spccl_memory_channel *channels,
                   const struct all_pairs_job *job, cudaStream_t stream, int launch)
{
    float *in = (float *)(uintptr_t)job->in;
    for (size_t i = 0; i < N_ELEMS; i++)
        r->in[i] = value(r->rank, i, launch);
    check_cuda(cudaMemcpyAsync(in, r->in, BYTES, cudaMemcpyHostToDevice, stream), r, "copy");
    check_cuda(all_pairs_all_reduce(channels, job, stream), r, "launch");
    check_cuda(cudaMemcpyAsync(r->out, job->out, BYTES, cudaMemcpyDeviceToHost, stream), r, "copy");
    check(spccl_cuda_wait(comm, stream, -1), r, "wait"); /* also fails if a wait of the kernel did */
    for (size_t i = 0; i < N_ELEMS; i++) {
        float sum = 0;
        for (int p = 0; p < r->world_size; p++)
            sum += value(p, i, launch);
        r->n_wrong += r->out[i] != sum;
    }
}

static void use_channels(struct rank *r, spccl_comm *comm)
{
    spccl_channels_config config = SPCCL_CHANNELS_CONFIG_INIT;
    spccl_channels *channels = NULL;
    spccl_memory_channel to[ALL_PAIRS_RANKS_MAX];
    struct all_pairs_job job = {NULL, NULL, N_ELEMS, r->rank, r->world_size, NULL};
    float *in = NULL;
    cudaStream_t stream;
    check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), r, "stream");
    check_cuda(cudaMalloc((void **)&in, BYTES), r, "memory");
    check_cuda(cudaMalloc((void **)&job.out, BYTES), r, "memory");
    check_cuda(cudaMalloc((void **)&job.uses, ALL_PAIRS_BLOCKS_MAX * sizeof *job.uses), r, "memory");
    check_cuda(cudaMemsetAsync(job.uses, 0, ALL_PAIRS_BLOCKS_MAX * sizeof *job.uses, stream), r, "memory");
    job.in = in;

    config.window_bytes = ALL_PAIRS_WINDOW_BYTES(N_ELEMS, (uint64_t)r->world_size);
    check(spccl_channels_create(comm, &config, &channels), r, "channels");
    for (int p = 0; p < r->world_size; p++)
        if (p != r->rank)
            check(spccl_channels_get_memory(channels, p, 0, &to[p]), r, "channel");
    for (int launch = 0; launch < N_LAUNCHES; launch++)
        reduce(r, comm, to, &job, stream, launch);
    spccl_channels_destroy(channels);
    check_cuda(cudaStreamDestroy(stream), r, "stream");
    check_cuda(cudaFree(in), r, "memory");
    check_cuda(cudaFree(job.out), r, "memory");
    check_cuda(cudaFree(job.uses), r, "memory");
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
    use_channels(r, comm);
    printf("rank %d: %zu wrong of %zu\n", r->rank, r->n_wrong, N_ELEMS * N_LAUNCHES);
    check(spccl_comm_destroy(comm), r, "destroy");
    return NULL;
}

int main(int argc, char **argv)
{
    static struct rank ranks[ALL_PAIRS_RANKS_MAX];
    pthread_t threads[ALL_PAIRS_RANKS_MAX];
    int n = argc > 1 ? atoi(argv[1]) : 2, n_gpus = spccl_cuda_device_count();
    size_t n_wrong = 0;
    spccl_unique_id id;
    if (n < 2 || n > ALL_PAIRS_RANKS_MAX || n_gpus == 0) {
        fprintf(stderr, n_gpus == 0 ? "no GPU\n" : "wanted 2 to 8 ranks\n");
        return n_gpus == 0 ? 77 : 1;
    }
    check(spccl_get_unique_id(&id), &ranks[0], "unique id");
    for (int r = 0; r < n; r++) {
        ranks[r].id = id;
        ranks[r].rank = r;
        ranks[r].world_size = n;
        ranks[r].device = r % n_gpus;
        check_cuda(cudaHostAlloc((void **)&ranks[r].in, BYTES, cudaHostAllocPortable), &ranks[r], "memory");
        check_cuda(cudaHostAlloc((void **)&ranks[r].out, BYTES, cudaHostAllocPortable), &ranks[r], "memory");
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
