// bench_channels.cu - latency and bandwidth of one-sided channels between two GPUs, measured in a kernel.
//
//     spccl_bench_channels [--kind memory|port|both] [--transports shm,tcp,...] [--ctas C] [--threads T]
//                          [--mib N] [--rounds N] [--launches N]
//
// Two ranks are threads of this program: rank r is on GPU r modulo the number of GPUs. Transports are those of port
// channels. A round of rank 0: put, signal, wait for the peer's signal. A round of rank 1: wait, then
//   - "both ways": put as much back, and signal. The time is half a round: one message, from put to the end of wait.
//   - "one way": only signal. The time is a whole round, for the rate of long puts.
// Each launch has 8 rounds that are not counted, then `rounds` that are. Lines have the median of the launches, and the
// least and the greatest. Data is compared after the first launch of each line. Defaults: both kinds, all default
// transports, 32 CTAs of 512 threads for one-way puts (1 CTA for all else), 64 MiB, 200 rounds, 9 launches.
#include "spccl_device.cuh"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <string>
#include <vector>

#define CUDA(call)                                                                                           \
    do {                                                                                                     \
        cudaError_t e = (call);                                                                              \
        if (e != cudaSuccess) {                                                                              \
            fprintf(stderr, "spccl_bench_channels: %s: %s\n", #call, cudaGetErrorName(e));                   \
            exit(1);                                                                                         \
        }                                                                                                    \
    } while (0)
#define TRY(call)                                                                                            \
    do {                                                                                                     \
        if ((call) != SPCCL_OK) {                                                                            \
            fprintf(stderr, "spccl_bench_channels: %s: %s\n", #call, spccl_last_error());                    \
            exit(1);                                                                                         \
        }                                                                                                    \
    } while (0)

// ---- the kernel ----

// What a CTA does: a part of each put, over a channel of its own.
template <class CHANNEL> struct job {
    const CHANNEL *channels; // [gridDim.x]
    uint8_t *source; // this rank's, [bytes of all CTAs]; of port channels in the window, at source_off
    uint64_t source_off;
    uint64_t bytes;  // of a put of one CTA; 0: only signals
    uint64_t *times; // [2 * gridDim.x] when each CTA started and ended to count
    uint32_t *n_failed;
    int rounds, both_ways, rank;
};

constexpr int WARM_UP = 8;

__device__ static bool put(const spccl_memory_channel &c, const job<spccl_memory_channel> &a)
{
    uint64_t off = blockIdx.x * a.bytes;
    return spccl_put(c, off, a.source + off, a.bytes, threadIdx.x, blockDim.x);
}

__device__ static bool put(const spccl_port_channel &c, const job<spccl_port_channel> &a)
{
    uint64_t off = blockIdx.x * a.bytes;
    return threadIdx.x != 0 || spccl_put(c, off, a.source_off + off, a.bytes);
}

template <class CHANNEL> __device__ static bool send(const CHANNEL &c, const job<CHANNEL> &a, bool puts)
{
    bool ok = !puts || a.bytes == 0 || put(c, a);
    ok = __syncthreads_and(ok);
    return ok && __syncthreads_and(threadIdx.x != 0 || spccl_signal(c));
}

template <class CHANNEL> __device__ static bool receive(const CHANNEL &c)
{
    return __syncthreads_and(threadIdx.x != 0 || spccl_wait(c));
}

template <class CHANNEL> __global__ static void exchange(const __grid_constant__ job<CHANNEL> a)
{
    const CHANNEL c = a.channels[blockIdx.x];
    bool ok = true;
    for (int i = -WARM_UP; ok && i < a.rounds; i++) {
        if (i == 0 && threadIdx.x == 0)
            a.times[2 * blockIdx.x] = spccl_detail::sp_clock_ns();
        if (a.rank == 0)
            ok = send(c, a, true) && receive(c);
        else
            ok = receive(c) && send(c, a, a.both_ways);
    }
    if (threadIdx.x == 0)
        a.times[2 * blockIdx.x + 1] = spccl_detail::sp_clock_ns();
    if (!ok && threadIdx.x == 0)
        atomicAdd(a.n_failed, 1u);
}

// ---- the host ----

struct options {
    bool memory = true, port = true;
    std::string transports;
    unsigned ctas = 32, threads = 512;
    size_t mib = 64;
    int rounds = 200, launches = 9;
};

static options o;

static void usage(const char *arg)
{
    fprintf(stderr,
            "spccl_bench_channels: %s: unknown or without a value; see the top of bench_channels.cu\n", arg);
    exit(2);
}

static void read_options(int argc, char **argv)
{
    for (int i = 1; i < argc; i += 2) {
        std::string name = argv[i], value = i + 1 < argc ? argv[i + 1] : "";
        int number = atoi(value.c_str());
        if (name == "--kind" && (value == "memory" || value == "port" || value == "both")) {
            o.memory = value != "port";
            o.port = value != "memory";
        } else if (name == "--transports" && !value.empty())
            o.transports = value;
        else if (name == "--ctas" && number > 0 && number <= 1024)
            o.ctas = (unsigned)number;
        else if (name == "--threads" && number > 0 && number <= 1024)
            o.threads = (unsigned)number;
        else if (name == "--mib" && number > 0)
            o.mib = (size_t)number;
        else if (name == "--rounds" && number > 0)
            o.rounds = number;
        else if (name == "--launches" && number > 0)
            o.launches = number;
        else
            usage(argv[i]);
    }
}

struct rank {
    spccl_unique_id id;
    int number, device;
    spccl_comm *comm;
    cudaStream_t stream;
};

template <class CHANNEL> struct set_up {
    spccl_channels *channels;
    CHANNEL *on_gpu;                        // [o.ctas]
    uint8_t *window, *window_host, *source; // window_host: of port channels
    uint64_t *times;                        // pinned, [2 * o.ctas]
    uint32_t *n_failed;
};

static void get(const spccl_channels *c, int peer, uint32_t index, spccl_memory_channel *out)
{
    TRY(spccl_channels_get_memory(c, peer, index, out));
}
static void get(const spccl_channels *c, int peer, uint32_t index, spccl_port_channel *out)
{
    TRY(spccl_channels_get_port(c, peer, index, out));
}

static uint8_t value(int rank, size_t i)
{
    return (uint8_t)(i * 7 + i / 251 + (size_t)rank * 31 + 1);
}

// Fill memory of the GPU with what fill writes. Through pinned memory: other copies may wait for the other rank's kernels.
template <class FILL> static void to_gpu(const rank *r, void *to, size_t bytes, FILL fill)
{
    void *pinned = nullptr;
    CUDA(cudaHostAlloc(&pinned, bytes, cudaHostAllocPortable));
    fill((uint8_t *)pinned);
    CUDA(cudaMemcpyAsync(to, pinned, bytes, cudaMemcpyHostToDevice, r->stream));
    CUDA(cudaStreamSynchronize(r->stream));
    CUDA(cudaFreeHost(pinned));
}

template <class CHANNEL> static set_up<CHANNEL> open_channels(const rank *r, bool is_port)
{
    set_up<CHANNEL> s = {};
    spccl_channels_config config = SPCCL_CHANNELS_CONFIG_INIT;
    size_t bytes = o.mib << 20;
    std::vector<CHANNEL> all(o.ctas);
    void *window = nullptr, *host = nullptr, *pinned = nullptr;
    config.kind = is_port ? SPCCL_CHANNEL_PORT : SPCCL_CHANNEL_MEMORY;
    config.window_bytes = is_port ? 2 * bytes : bytes;
    config.n_per_peer = o.ctas;
    TRY(spccl_channels_create(r->comm, &config, &s.channels));
    TRY(spccl_channels_window(s.channels, &window, &host));
    s.window = (uint8_t *)window;
    s.window_host = (uint8_t *)host;
    for (uint32_t i = 0; i < o.ctas; i++)
        get(s.channels, 1 - r->number, i, &all[i]);
    CUDA(cudaMalloc((void **)&s.on_gpu, o.ctas * sizeof(CHANNEL)));
    CUDA(cudaMalloc((void **)&s.source, bytes));
    CUDA(cudaHostAlloc(&pinned, (2 * o.ctas + 2) * sizeof(uint64_t), cudaHostAllocPortable));
    s.times = (uint64_t *)pinned;
    s.n_failed = (uint32_t *)(s.times + 2 * o.ctas);
    *s.n_failed = 0;
    to_gpu(r, s.on_gpu, o.ctas * sizeof(CHANNEL),
           [&](uint8_t *x) { memcpy(x, all.data(), o.ctas * sizeof(CHANNEL)); });
    auto fill = [&](uint8_t *x) {
        for (size_t i = 0; i < bytes; i++)
            x[i] = value(r->number, i);
    };
    if (is_port)
        fill(s.window_host + bytes);
    else
        to_gpu(r, s.source, bytes, fill);
    return s;
}

template <class CHANNEL> static void close_channels(set_up<CHANNEL> *s)
{
    spccl_channels_destroy(s->channels);
    CUDA(cudaFree(s->on_gpu));
    CUDA(cudaFree(s->source));
    CUDA(cudaFreeHost(s->times));
}

// Compare the first `bytes` of the window with what the peer put.
template <class CHANNEL> static void compare(const rank *r, const set_up<CHANNEL> &s, size_t bytes)
{
    void *got = nullptr;
    if (bytes == 0)
        return;
    CUDA(cudaHostAlloc(&got, bytes, cudaHostAllocPortable));
    if (s.window_host != nullptr) {
        memcpy(got, s.window_host, bytes);
    } else {
        CUDA(cudaMemcpyAsync(got, s.window, bytes, cudaMemcpyDeviceToHost, r->stream));
        CUDA(cudaStreamSynchronize(r->stream));
    }
    for (size_t i = 0; i < bytes; i++)
        if (((const uint8_t *)got)[i] != value(1 - r->number, i)) {
            fprintf(stderr, "spccl_bench_channels: rank %d: byte %zu of %zu is wrong\n", r->number, i, bytes);
            exit(1);
        }
    CUDA(cudaFreeHost(got));
}

struct line {
    const char *name;
    uint64_t bytes; // of a message, over all CTAs
    unsigned ctas;
    bool both_ways;
    int rounds;
};

template <class CHANNEL>
static void measure(const rank *r, const set_up<CHANNEL> &s, const char *kind, const line &l)
{
    job<CHANNEL> a = {s.on_gpu,   s.source, o.mib << 20, l.bytes / l.ctas, s.times,
                      s.n_failed, l.rounds, l.both_ways, r->number};
    void *params[] = {&a};
    std::vector<double> us;
    for (int i = 0; i < o.launches; i++) {
        CUDA(cudaLaunchKernel(exchange<CHANNEL>, dim3(l.ctas), dim3(o.threads), params, 0, r->stream));
        TRY(spccl_cuda_wait(r->comm, r->stream, -1));
        if (*s.n_failed != 0) {
            fprintf(stderr, "spccl_bench_channels: rank %d: %u CTAs failed\n", r->number, *s.n_failed);
            exit(1);
        }
        if (i == 0 && (l.both_ways || r->number == 1))
            compare(r, s, l.bytes);
        uint64_t start = s.times[0], end = 0;
        for (unsigned c = 0; c < l.ctas; c++) {
            start = std::min(start, s.times[2 * c]);
            end = std::max(end, s.times[2 * c + 1]);
        }
        us.push_back((double)(end - start) / 1000 / l.rounds / (l.both_ways ? 2 : 1));
    }
    if (r->number != 0)
        return;
    std::sort(us.begin(), us.end());
    double median = us[us.size() / 2];
    printf("%-6s %-9s %10llu B  %4u CTAs  %10.2f us (%.2f to %.2f)", kind, l.name,
           (unsigned long long)l.bytes, l.ctas, median, us.front(), us.back());
    if (l.bytes != 0)
        printf("  %8.3f GB/s", (double)l.bytes / median / 1000);
    printf("\n");
    fflush(stdout);
}

template <class CHANNEL> static void measure_all(const rank *r, const char *kind)
{
    bool is_port = strcmp(kind, "port") == 0;
    set_up<CHANNEL> s = open_channels<CHANNEL>(r, is_port);
    uint64_t largest = (uint64_t)o.mib << 20;
    int few = std::max(1, o.rounds / 10);
    for (uint64_t bytes : {0, 16, 4096, 65536})
        measure(r, s, kind, {"both ways", bytes, 1, true, o.rounds});
    for (uint64_t bytes = 1 << 20; bytes <= largest; bytes *= 8)
        measure(r, s, kind, {"one way", bytes, is_port ? 1 : o.ctas, false, few});
    if (largest > 1 << 20)
        measure(r, s, kind, {"one way", largest, is_port ? 1 : o.ctas, false, few});
    close_channels(&s);
}

static void *run(void *arg)
{
    rank *r = (rank *)arg;
    spccl_config config = SPCCL_CONFIG_INIT;
    spccl_cuda_config gpu = SPCCL_CUDA_CONFIG_INIT;
    config.transports = o.transports.empty() ? nullptr : o.transports.c_str();
    gpu.device = r->device;
    CUDA(cudaSetDevice(r->device));
    CUDA(cudaStreamCreateWithFlags(&r->stream, cudaStreamNonBlocking));
    TRY(spccl_comm_init_rank(&r->id, r->number, 2, &config, &r->comm));
    TRY(spccl_cuda_attach(r->comm, &gpu));
    if (o.memory)
        measure_all<spccl_memory_channel>(r, "memory");
    if (o.port)
        measure_all<spccl_port_channel>(r, "port");
    TRY(spccl_comm_destroy(r->comm));
    CUDA(cudaStreamDestroy(r->stream));
    return nullptr;
}

int main(int argc, char **argv)
{
    rank ranks[2] = {};
    pthread_t threads[2];
    // Ranks are threads: no kernel may be loaded while another waits, and each stream needs its own hardware queue.
    setenv("CUDA_MODULE_LOADING", "EAGER", 1);
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
    read_options(argc, argv);
    int n_gpus = spccl_cuda_device_count();
    if (n_gpus == 0) {
        fprintf(stderr, "spccl_bench_channels: no GPU\n");
        return 77;
    }
    printf("# %d GPUs in use; transports: %s; median of %d launches (least to greatest)\n",
           n_gpus < 2 ? 1 : 2, o.transports.empty() ? "the default" : o.transports.c_str(), o.launches);
    TRY(spccl_get_unique_id(&ranks[0].id));
    for (int i = 0; i < 2; i++) {
        ranks[i].id = ranks[0].id;
        ranks[i].number = i;
        ranks[i].device = i % n_gpus;
        if (pthread_create(&threads[i], nullptr, run, &ranks[i]) != 0)
            return 1;
    }
    for (pthread_t thread : threads)
        pthread_join(thread, nullptr);
    return 0;
}
