// bench_signs_cuda.cu - one bit per element against a plain copy on the same GPU.
//
//     spccl_bench_signs_cuda
//
// 256 Mi float32 in 80 segments; medians over 20 calls. Bytes moved: what is read and what is written, each once. Rates
// in GB/s (1e9 bytes); the last column is the rate over that of the copy, read plus written.
#include "bench_cuda.cuh"
#include "spccl_experimental.h"

constexpr size_t N_CHUNKS = N / SPCCL_SIGNS_CHUNK, ROWS = N_CHUNKS * SPCCL_SIGNS_ROW_BYTES;
constexpr int WARM = 3;
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

// Returns GB/s.
template <class F> static double measure(const char *name, double bytes, double copy, F run)
{
    double us = median_us(nullptr, WARM, [&](int, cudaEvent_t a, cudaEvent_t b) {
        CHECK(cudaEventRecord(a));
        run();
        CHECK(cudaEventRecord(b));
    });
    double rate = bytes / us / 1e3;
    printf("%-18s %7.3f ms  %7.1f GB/s", name, us / 1e3, rate);
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
