// bench_prune_cuda.cu - spccl_cuda_prune against a plain copy on the same GPU.
//
//     spccl_bench_prune_cuda
//
// 256 Mi elements in 80 segments, 1% sent after 30 steps; medians over 20 calls. Bytes moved: gradient and
// state, read and written. Rates in GB/s (1e9 bytes).
#include "bench_cuda.cuh"

constexpr int WARM = 30;

// About normal, other numbers in each step.
template <class T> __global__ void fill_kernel(T *x, uint64_t seed)
{
    for (size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x; i < N;
         i += size_t(gridDim.x) * blockDim.x) {
        uint64_t z = (i + seed * N) * 0x9e3779b97f4a7c15ull;
        float sum = -2;
        for (int k = 0; k < 4; k++) {
            z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
            z ^= z >> 27;
            sum += float(z >> 40) * 0x1p-24f;
        }
        if (sizeof(T) == 4)
            x[i] = T(__float_as_uint(sum));
        else
            x[i] = T(__float_as_uint(sum) >> 16);
    }
}

template <class T>
static void run(const char *name, spccl_dtype dtype, bool momentum, size_t skew, cudaStream_t s,
                double copy_gbs)
{
    T *grad;
    float *residual, *velocity = nullptr;
    spccl_prune_state *states, host[N_SEGMENTS];
    std::vector<spccl_prune_segment> segments;
    spccl_prune_options o = SPCCL_PRUNE_OPTIONS_INIT;
    spccl_prune_plan *plan = nullptr;
    CHECK(cudaMalloc(&grad, (N + 16) * sizeof(T)));
    CHECK(cudaMalloc(&residual, N * 4));
    CHECK(cudaMemset(residual, 0, N * 4));
    if (momentum) {
        CHECK(cudaMalloc(&velocity, N * 4));
        CHECK(cudaMemset(velocity, 0, N * 4));
    }
    CHECK(cudaMalloc(&states, sizeof host));
    CHECK(cudaMemset(states, 0, sizeof host));
    for (uint32_t i = 0; i < N_SEGMENTS; i++) {
        size_t from = N / N_SEGMENTS * i / 4 * 4,
               to = i + 1 == N_SEGMENTS ? N : N / N_SEGMENTS * (i + 1) / 4 * 4;
        spccl_prune_segment g = {};
        g.begin = from;
        g.n_elems = to - from;
        g.residual = residual + from;
        g.velocity = momentum ? velocity + from : nullptr;
        g.state = states + i;
        g.key = i;
        segments.push_back(g);
    }
    o.momentum = momentum ? 0.9 : 0;
    CHECK_SPCCL(spccl_prune_plan_create(segments.data(), segments.size(), N, dtype, 0, &plan));
    double us = median_us(s, WARM, [&](int i, cudaEvent_t a, cudaEvent_t b) {
        fill_kernel<<<2048, 256, 0, s>>>(grad + skew, uint64_t(i + WARM));
        CHECK(cudaEventRecord(a, s));
        CHECK_SPCCL(spccl_cuda_prune(plan, grad + skew, &o, s));
        CHECK(cudaEventRecord(b, s));
    });
    CHECK(cudaMemcpy(host, states, sizeof host, cudaMemcpyDeviceToHost));
    double sent = 0, bytes = 2.0 * N * (sizeof(T) + 4 + (momentum ? 4 : 0));
    for (const spccl_prune_state &st : host)
        sent += double(st.n_sent);
    printf("%-40s %9.1f us  %7.1f GB/s  %.3f of copy  density %.4f\n", name, us, bytes / us / 1e3,
           bytes / us / 1e3 / copy_gbs, sent / N);
    spccl_prune_plan_destroy(plan);
    CHECK(cudaFree(grad));
    CHECK(cudaFree(residual));
    CHECK(cudaFree(velocity));
    CHECK(cudaFree(states));
}

int main()
{
    cudaStream_t s;
    cudaDeviceProp p;
    uint4 *x, *y;
    double copy = 1e9;
    CHECK(cudaGetDeviceProperties(&p, 0));
    CHECK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    CHECK(cudaMalloc(&x, N * 4));
    CHECK(cudaMalloc(&y, N * 4));
    CHECK(cudaMemset(x, 1, N * 4));
    for (int per_sm : {1, 2, 4, 16})
        copy = std::min(copy, median_us(s, 3, [&](int, cudaEvent_t a, cudaEvent_t b) {
                            CHECK(cudaEventRecord(a, s));
                            copy_kernel<<<p.multiProcessorCount * per_sm, 512, 0, s>>>(x, y, N / 4);
                            CHECK(cudaEventRecord(b, s));
                        }));
    CHECK(cudaFree(x));
    CHECK(cudaFree(y));
    double gbs = 2.0 * N * 4 / copy / 1e3;
    printf("%s\n%-40s %9.1f us  %7.1f GB/s\n", p.name, "copy, read plus written", copy, gbs);
    run<uint32_t>("float32, residual", SPCCL_FLOAT32, false, 0, s, gbs);
    run<uint32_t>("float32, residual, gradient misaligned", SPCCL_FLOAT32, false, 1, s, gbs);
    run<uint32_t>("float32, residual and velocity", SPCCL_FLOAT32, true, 0, s, gbs);
    run<uint16_t>("bfloat16, residual", SPCCL_BFLOAT16, false, 0, s, gbs);
    run<uint16_t>("bfloat16, residual and velocity", SPCCL_BFLOAT16, true, 0, s, gbs);
    return 0;
}
