// bench_hbm.cu - the rates of a GPU's memory and links that plain kernels reach. Floors are computed from
// them.
//
//     spccl_bench_hbm [--csv FILE]
//
// Medians over 20 launches on arrays of 2 GiB. On GPU 0: reading, writing, and copying, which counts bytes
// read plus bytes written. Over links: writing to one peer, and all GPUs writing to all others at once. The
// latter counts the bytes that leave one GPU and the time of the slowest GPU.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cuda_runtime.h>
#include <vector>

#define CHECK(call)                                                                                          \
    do {                                                                                                     \
        cudaError_t e = (call);                                                                              \
        if (e != cudaSuccess) {                                                                              \
            fprintf(stderr, "spccl_bench_hbm: %s: %s\n", #call, cudaGetErrorString(e));                      \
            exit(1);                                                                                         \
        }                                                                                                    \
    } while (0)

constexpr size_t BYTES = size_t(2) << 30;
constexpr size_t UNITS = BYTES / sizeof(uint4);
constexpr int ITERS = 20, THREADS = 512, UNROLL = 8, GPUS_MAX = 16;

// A thread handles UNROLL units of 16 bytes at a time. Neighbouring threads handle neighbouring units.
__device__ size_t first_unit(void)
{
    return size_t(blockIdx.x) * THREADS * UNROLL + threadIdx.x;
}

__global__ void read_kernel(const uint4 *x, uint32_t *never)
{
    uint32_t any = 0;
    for (size_t i = first_unit(); i < UNITS; i += size_t(gridDim.x) * THREADS * UNROLL) {
#pragma unroll
        for (int k = 0; k < UNROLL; k++) {
            uint4 v = __ldcs(&x[i + size_t(k) * THREADS]);
            any |= v.x | v.y | v.z | v.w;
        }
    }
    if (any != 0) // never true, as the array is zeros; it keeps the compiler from dropping the loads
        *never = any;
}

__global__ void write_kernel(uint4 *x, uint32_t value)
{
    uint4 v = make_uint4(value, value, value, value);
    for (size_t i = first_unit(); i < UNITS; i += size_t(gridDim.x) * THREADS * UNROLL)
#pragma unroll
        for (int k = 0; k < UNROLL; k++)
            __stcs(&x[i + size_t(k) * THREADS], v);
}

__global__ void copy_kernel(const uint4 *x, uint4 *y)
{
    for (size_t i = first_unit(); i < UNITS; i += size_t(gridDim.x) * THREADS * UNROLL) {
        uint4 v[UNROLL];
#pragma unroll
        for (int k = 0; k < UNROLL; k++)
            v[k] = __ldcs(&x[i + size_t(k) * THREADS]);
#pragma unroll
        for (int k = 0; k < UNROLL; k++)
            __stcs(&y[i + size_t(k) * THREADS], v[k]);
    }
}

// CTA b writes to peer b % n_peers, so that all links are in use all the time.
struct peers {
    uint4 *at[GPUS_MAX];
    unsigned n;
};
__host__ __device__ constexpr size_t units_per_peer(unsigned n_peers)
{
    return UNITS / n_peers / (THREADS * UNROLL) * (THREADS * UNROLL);
}

__global__ void scatter_kernel(peers to, uint32_t value)
{
    const unsigned mine = blockIdx.x / to.n, n_blocks = gridDim.x / to.n;
    uint4 v = make_uint4(value, value, value, value), *x = to.at[blockIdx.x % to.n];
    const size_t n = units_per_peer(to.n);
    for (size_t i = size_t(mine) * THREADS * UNROLL + threadIdx.x; i < n;
         i += size_t(n_blocks) * THREADS * UNROLL)
#pragma unroll
        for (int k = 0; k < UNROLL; k++)
            x[i + size_t(k) * THREADS] = v;
}

struct gpu {
    uint4 *x, *y;
    uint32_t *never;
    cudaEvent_t start, end;
    int n_sms;
};

static void open_gpu(int ordinal, gpu *g)
{
    CHECK(cudaSetDevice(ordinal));
    CHECK(cudaMalloc(&g->x, BYTES));
    CHECK(cudaMalloc(&g->y, BYTES));
    CHECK(cudaMalloc(&g->never, sizeof *g->never));
    CHECK(cudaMemset(g->x, 0, BYTES));
    CHECK(cudaEventCreate(&g->start));
    CHECK(cudaEventCreate(&g->end));
    CHECK(cudaDeviceGetAttribute(&g->n_sms, cudaDevAttrMultiProcessorCount, ordinal));
    CHECK(cudaDeviceSynchronize());
}

// Median over ITERS launches, in seconds, of the slowest GPU's time, after two untimed launches.
template <typename launch_fn> static double median_s(std::vector<gpu> &gpus, launch_fn launch)
{
    std::vector<double> times;
    for (int i = -2; i < ITERS; i++) {
        double slowest = 0;
        for (size_t d = 0; d < gpus.size(); d++) {
            CHECK(cudaSetDevice(int(d)));
            CHECK(cudaEventRecord(gpus[d].start));
            launch(int(d), gpus[d]);
            CHECK(cudaGetLastError());
            CHECK(cudaEventRecord(gpus[d].end));
        }
        for (size_t d = 0; d < gpus.size(); d++) {
            float ms;
            CHECK(cudaEventSynchronize(gpus[d].end));
            CHECK(cudaEventElapsedTime(&ms, gpus[d].start, gpus[d].end));
            slowest = std::max(slowest, double(ms) / 1e3);
        }
        if (i >= 0)
            times.push_back(slowest);
    }
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
}

static void tell(FILE *csv, const char *what, double bytes, double seconds)
{
    printf("%-36s %8.1f us %8.1f GB/s\n", what, 1e6 * seconds, bytes / seconds / 1e9);
    if (csv != nullptr)
        fprintf(csv, "%s,%.0f,%.3f,%.1f\n", what, bytes, 1e6 * seconds, bytes / seconds / 1e9);
}

// Measure with several numbers of CTAs per SM and take the best.
template <typename launch_fn>
static void best_of_grids(FILE *csv, const char *what, double bytes, std::vector<gpu> &gpus, launch_fn launch)
{
    double best = 1e9;
    for (int per_sm : {1, 2, 4, 16})
        best = std::min(best, median_s(gpus, [&](int d, gpu &g) { launch(d, g, g.n_sms * per_sm); }));
    tell(csv, what, bytes, best);
}

static void measure_links(FILE *csv, std::vector<gpu> &gpus, int n_gpus)
{
    for (int d = 1; d < n_gpus; d++) {
        gpus.emplace_back();
        open_gpu(d, &gpus.back());
    }
    for (int d = 0; d < n_gpus; d++)
        for (int p = 0; p < n_gpus; p++) {
            CHECK(cudaSetDevice(d));
            if (d != p)
                CHECK(cudaDeviceEnablePeerAccess(p, 0));
        }
    std::vector<gpu> first(gpus.begin(), gpus.begin() + 1);
    best_of_grids(csv, "write to one peer", double(BYTES), first,
                  [&](int, gpu &, int n_blocks) { write_kernel<<<n_blocks, THREADS>>>(gpus[1].y, 1); });
    const unsigned n_peers = unsigned(n_gpus) - 1;
    const double out = double(units_per_peer(n_peers) * n_peers * sizeof(uint4));
    best_of_grids(csv, "all write to all others, out of one", out, gpus, [&](int d, gpu &, int n_blocks) {
        peers to = {};
        for (int p = 1; p < n_gpus; p++)
            to.at[to.n++] = gpus[size_t((d + p) % n_gpus)].y;
        scatter_kernel<<<n_blocks / int(to.n) * int(to.n), THREADS>>>(to, 1);
    });
}

int main(int argc, char **argv)
{
    FILE *csv = nullptr;
    int n_gpus = 0;
    cudaDeviceProp p;
    std::vector<gpu> gpus(1);
    if (argc == 3 && strcmp(argv[1], "--csv") == 0) {
        csv = fopen(argv[2], "w");
        if (csv == nullptr) {
            perror(argv[2]);
            return 1;
        }
    } else if (argc != 1) {
        fprintf(stderr, "usage: %s [--csv FILE]\n", argv[0]);
        return 2;
    }
    CHECK(cudaGetDeviceCount(&n_gpus));
    n_gpus = std::min(n_gpus, GPUS_MAX);
    CHECK(cudaGetDeviceProperties(&p, 0));
    printf("%d x %s\n", n_gpus, p.name);
    if (csv != nullptr)
        fprintf(csv, "# gpu: %d x %s\nwhat,bytes,time_us,gbs\n", n_gpus, p.name);
    open_gpu(0, &gpus[0]);
    best_of_grids(csv, "read", double(BYTES), gpus,
                  [](int, gpu &g, int n_blocks) { read_kernel<<<n_blocks, THREADS>>>(g.x, g.never); });
    best_of_grids(csv, "write", double(BYTES), gpus,
                  [](int, gpu &g, int n_blocks) { write_kernel<<<n_blocks, THREADS>>>(g.y, 1); });
    best_of_grids(csv, "copy, read plus written", 2.0 * double(BYTES), gpus,
                  [](int, gpu &g, int n_blocks) { copy_kernel<<<n_blocks, THREADS>>>(g.x, g.y); });
    if (n_gpus > 1)
        measure_links(csv, gpus, n_gpus);
    return csv != nullptr && fclose(csv) != 0;
}
