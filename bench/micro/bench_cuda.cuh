// bench_cuda.cuh - what the benches of element-wise GPU kernels share: checks, a plain copy, the median of calls.
#ifndef SPCCL_BENCH_CUDA_CUH
#define SPCCL_BENCH_CUDA_CUH

#include "spccl.h"

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
            fprintf(stderr, "%s: %s: %s\n", __FILE__, #call, cudaGetErrorString(e));                         \
            exit(1);                                                                                         \
        }                                                                                                    \
    } while (0)
#define CHECK_SPCCL(call)                                                                                    \
    do {                                                                                                     \
        if ((call) != SPCCL_OK) {                                                                            \
            fprintf(stderr, "%s: %s\n", __FILE__, spccl_last_error());                                       \
            exit(1);                                                                                         \
        }                                                                                                    \
    } while (0)

constexpr size_t N = size_t(256) << 20; // elements
constexpr int ROUNDS = 20, N_SEGMENTS = 80;

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

// Of ROUNDS calls of each(i, a, b), which records the events a and b on the stream.
template <class F> static double median_us(cudaStream_t s, int warm, F each)
{
    cudaEvent_t a, b;
    std::vector<float> times;
    CHECK(cudaEventCreate(&a));
    CHECK(cudaEventCreate(&b));
    for (int i = -warm; i < ROUNDS; i++) {
        float ms;
        each(i, a, b);
        CHECK(cudaStreamSynchronize(s));
        CHECK(cudaEventElapsedTime(&ms, a, b));
        if (i >= 0)
            times.push_back(ms);
    }
    std::sort(times.begin(), times.end());
    return times[ROUNDS / 2] * 1e3;
}

#endif
