// bench_signs_cuda.cu - one bit per element against a plain copy on the same GPU.
//
//     spccl_bench_signs_cuda
//
// 256 Mi float32 in 80 segments; medians over 20 calls. Bytes moved: what is read and what is written, each once. Rates
// in GB/s (1e9 bytes); the last column is the rate over that of the copy, read plus written.
#include "spccl_experimental.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cuda_runtime.h>
#include <vector>

#define CHECK(call)                                                                                          \
    do {                                                                                                     \
        cudaError_t e = (call);                                                                              \
        if (e != cudaSuccess) {                                                                              \
            fprintf(stderr, "spccl_bench_signs_cuda: %s: %s\n", #call, cudaGetErrorString(e));               \
            exit(1);                                                                                         \
        }                                                                                                    \
    } while (0)
#define CHECK_SPCCL(call)                                                                                    \
    do {                                                                                                     \
        if ((call) != SPCCL_OK) {                                                                            \
            fprintf(stderr, "spccl_bench_signs_cuda: %s\n", spccl_last_error());                             \
            exit(1);                                                                                         \
        }                                                                                                    \
    } while (0)

constexpr size_t N = size_t(256) << 20, N_CHUNKS = N / SPCCL_SIGNS_CHUNK,
                 ROWS = N_CHUNKS * SPCCL_SIGNS_ROW_BYTES;
constexpr int ROUNDS = 20, WARM = 3, N_SEGMENTS = 80;
constexpr uint32_t MOST_PARTS = 16;

__global__ void fill_kernel(float *x)
{
    for (size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x; i < N;
         i += size_t(gridDim.x) * blockDim.x) {
        uint64_t z = i * 0x9e3779b97f4a7c15ull;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
        x[i] = float(z >> 40) * 0x1p-24f - 0.5f;
    }
}

__global__ void copy_kernel(const uint4 *x, uint4 *y, size_t n)
{
    constexpr int UNROLL = 8;
    for (size_t i = size_t(blockIdx.x) * blockDim.x * UNROLL + threadIdx.x; i < n;
         i += size_t(gridDim.x) * blockDim.x * UNROLL) {
        uint4 v[UNROLL];
#pragma unroll
        for (int k = 0; k < UNROLL; k++)
            v[k] = __ldcs(&x[i + size_t(k) * blockDim.x]);
#pragma unroll
        for (int k = 0; k < UNROLL; k++)
            __stcs(&y[i + size_t(k) * blockDim.x], v[k]);
    }
}

// Returns GB/s.
template <class F> static double measure(const char *name, double bytes, double copy, F run)
{
    cudaEvent_t a, b;
    std::vector<float> times;
    CHECK(cudaEventCreate(&a));
    CHECK(cudaEventCreate(&b));
    for (int i = -WARM; i < ROUNDS; i++) {
        float ms;
        CHECK(cudaEventRecord(a));
        run();
        CHECK(cudaEventRecord(b));
        CHECK(cudaDeviceSynchronize());
        CHECK(cudaEventElapsedTime(&ms, a, b));
        if (i >= 0)
            times.push_back(ms);
    }
    std::sort(times.begin(), times.end());
    double ms = times[ROUNDS / 2], rate = bytes / ms / 1e6;
    printf("%-18s %7.3f ms  %7.1f GB/s", name, ms, rate);
    if (copy > 0)
        printf("  %5.2f of copy", rate / copy);
    printf("\n");
    return rate;
}

int main()
{
    float *own, *shared;
    uint8_t *parts, *rows;
    spccl_prune_state *states;
    std::vector<spccl_weights_segment> segments;
    spccl_weights_plan *plan = nullptr;
    CHECK(cudaMalloc(&own, N * 4));
    CHECK(cudaMalloc(&shared, N * 4));
    CHECK(cudaMalloc(&parts, MOST_PARTS * ROWS));
    CHECK(cudaMalloc(&rows, ROWS));
    CHECK(cudaMalloc(&states, N_SEGMENTS * sizeof *states));
    CHECK(cudaMemset(states, 0, N_SEGMENTS * sizeof *states));
    CHECK(cudaMemset(shared, 0, N * 4));
    fill_kernel<<<1024, 256>>>(own);
    for (size_t i = 0; i < N_SEGMENTS; i++) {
        size_t from = N_CHUNKS * i / N_SEGMENTS * SPCCL_SIGNS_CHUNK,
               to = N_CHUNKS * (i + 1) / N_SEGMENTS * SPCCL_SIGNS_CHUNK;
        spccl_weights_segment s = {};
        s.begin = from;
        s.n_elems = to - from;
        s.own = own + from;
        s.shared = shared + from;
        s.state = states + i;
        segments.push_back(s);
    }
    CHECK_SPCCL(spccl_weights_plan_create(segments.data(), segments.size(), N, SPCCL_FLOAT32, 0, &plan));
    double copy = measure("copy", 8.0 * N, 0,
                          [&] { copy_kernel<<<132 * 8, 256>>>((const uint4 *)own, (uint4 *)shared, N / 4); });
    CHECK(cudaMemset(shared, 0, N * 4));
    measure("send", 12.0 * N + ROWS, copy,
            [&] { CHECK_SPCCL(spccl_weights_send_signs(plan, rows, 1, nullptr)); });
    for (uint32_t r = 0; r < MOST_PARTS; r++)
        CHECK(cudaMemcpy(parts + r * ROWS, rows, ROWS, cudaMemcpyDeviceToDevice));
    for (uint32_t n_parts : {1u, 4u, MOST_PARTS}) {
        const spccl_signs_sum_options o = {sizeof o, parts, own, rows, nullptr, N_CHUNKS, n_parts, 0};
        char name[32];
        snprintf(name, sizeof name, "sum of %u parts", n_parts);
        measure(name, 8.0 * N + (n_parts + 1.0) * ROWS, copy,
                [&] { CHECK_SPCCL(spccl_signs_sum(&o, nullptr)); });
    }
    measure("decode", 4.0 * N + ROWS, copy,
            [&] { CHECK_SPCCL(spccl_signs_decode(rows, N_CHUNKS, own, 0, nullptr)); });
    spccl_weights_plan_destroy(plan);
    return 0;
}
