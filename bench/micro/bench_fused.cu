// bench_fused.cu - the kernels of the GPU collectives, timed on one GPU: its peers' inboxes lie in its own
// memory.
//
//     spccl_bench_fused [--mib N] [--ranks P] [--ctas C] [--dtype float32|bfloat16] [--redop sum|avg]
//                       [--iters N] [--sparsity 0.999,0.99,...] [--check 0|1]
//                       [--only all_gather,reduce_scatter,all_reduce,in_place,one_hop]
//
// The inboxes of all ranks are the same memory. Only rank 0 is launched; the frames that it sends to its
// peers arrive in its own inbox as if the peers had sent them. No link is used, so this is the time of the
// kernels alone. While frames are short, it is within 10% of the time on 4 GPUs. A profiler sees one launch
// of one process. Each result is compared with a result computed on the host before it is timed, unless
// --check is 0. Defaults: 512 MiB for the larger buffer, 4 ranks, all SMs, float32, sums, 15 launches. The
// times are medians.
extern "C" {
#include "core/gpu/collectives/tune_gpu.h"
#include "kernels/cuda/kernels_cuda.h"
}

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cuda_runtime.h>
#include <string>
#include <vector>

#define CHECK(call)                                                                                          \
    do {                                                                                                     \
        cudaError_t e = (call);                                                                              \
        if (e != cudaSuccess) {                                                                              \
            fprintf(stderr, "spccl_bench_fused: %s: %s\n", #call, cudaGetErrorString(e));                    \
            exit(1);                                                                                         \
        }                                                                                                    \
    } while (0)
#define TRY(call)                                                                                            \
    do {                                                                                                     \
        if ((call) != SPCCL_OK) {                                                                            \
            fprintf(stderr, "spccl_bench_fused: %s: %s\n", #call, spccl_last_error());                       \
            exit(1);                                                                                         \
        }                                                                                                    \
    } while (0)

struct options {
    size_t mib = 512;
    unsigned ranks = 4, ctas = 0;
    int iters = 15;
    spccl_dtype dtype = SPCCL_FLOAT32;
    spccl_redop redop = SPCCL_SUM;
    bool check = true;
    std::vector<double> sparsity = {0.999, 0.99, 0.9, 0.5, 0.0};
    std::vector<std::string> only = {"all_gather", "reduce_scatter", "all_reduce", "in_place", "one_hop"};
};

static std::vector<std::string> split(const std::string &text)
{
    std::vector<std::string> words;
    for (size_t at = 0; at <= text.size();) {
        size_t end = std::min(text.find(',', at), text.size());
        words.push_back(text.substr(at, end - at));
        at = end + 1;
    }
    return words;
}

static options read_options(int argc, char **argv)
{
    options o;
    for (int i = 1; i < argc; i += 2) {
        std::string name = argv[i], value = i + 1 < argc ? argv[i + 1] : "";
        if (name == "--mib")
            o.mib = strtoul(value.c_str(), nullptr, 10);
        else if (name == "--ranks")
            o.ranks = (unsigned)strtoul(value.c_str(), nullptr, 10);
        else if (name == "--ctas")
            o.ctas = (unsigned)strtoul(value.c_str(), nullptr, 10);
        else if (name == "--iters")
            o.iters = atoi(value.c_str());
        else if (name == "--dtype" && (value == "float32" || value == "bfloat16"))
            o.dtype = value == "float32" ? SPCCL_FLOAT32 : SPCCL_BFLOAT16;
        else if (name == "--redop" && (value == "sum" || value == "avg"))
            o.redop = value == "sum" ? SPCCL_SUM : SPCCL_AVG;
        else if (name == "--check" && (value == "0" || value == "1"))
            o.check = value == "1";
        else if (name == "--only") {
            std::vector<std::string> known = o.only;
            o.only = split(value);
            for (const std::string &word : o.only)
                if (std::find(known.begin(), known.end(), word) == known.end())
                    value = "";
        } else if (name == "--sparsity") {
            o.sparsity.clear();
            for (const std::string &word : split(value))
                o.sparsity.push_back(atof(word.c_str()));
        } else
            name = "";
        if (name.empty() || value.empty()) {
            fprintf(stderr,
                    "spccl_bench_fused: %s %s: unknown option or value: see the head of "
                    "bench/micro/bench_fused.cu\n",
                    argv[i], i + 1 < argc ? argv[i + 1] : "");
            exit(2);
        }
    }
    if (o.mib == 0 || o.ranks < 2 || o.ranks > SP_GPU_HOST_RANKS_MAX || o.iters < 1) {
        fprintf(stderr, "spccl_bench_fused: wanted --mib and --iters of 1 or more, --ranks 2 to %d\n",
                SP_GPU_HOST_RANKS_MAX);
        exit(2);
    }
    return o;
}

// ---- elements: where a hash is below the density, +-1.x as float32, or as bfloat16 its upper half ----

__host__ __device__ static uint32_t element_bits(uint64_t i, uint64_t below, int elem_bytes)
{
    uint64_t z = (i + 1) * 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    z ^= z >> 31;
    if ((z & 0xffffffff) >= below)
        return 0;
    uint32_t bits = 0x3f800000u | (uint32_t)(z >> 41) | (uint32_t)(z >> 32 & 1) << 31;
    return elem_bytes == 4 ? bits : bits >> 16;
}

__global__ void fill_kernel(uint8_t *x, uint64_t n, uint64_t below, int elem_bytes)
{
    for (uint64_t i = blockIdx.x * (uint64_t)blockDim.x + threadIdx.x; i < n;
         i += (uint64_t)gridDim.x * blockDim.x) {
        uint32_t bits = element_bits(i, below, elem_bytes);
        if (elem_bytes == 4)
            ((uint32_t *)x)[i] = bits;
        else
            ((uint16_t *)x)[i] = (uint16_t)bits;
    }
}

static float as_float(uint32_t bits, int elem_bytes)
{
    float f;
    bits = elem_bytes == 4 ? bits : bits << 16;
    memcpy(&f, &bits, sizeof f);
    return f;
}

static uint32_t as_bits(float f, int elem_bytes)
{
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    // Rounds to nearest, ties to even.
    return elem_bytes == 4 ? bits : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

// ---- one collective ----

struct machine {
    options o;
    sp_gpu_limits limits;
    sp_inbox_shape shape;
    uint8_t *in, *out, *inbox;
    sp_gpu_control *control, *control_device;
    int elem_bytes;
    uint64_t n; // elements of the larger of input and output
};

static machine open_machine(const options &o)
{
    machine m = {};
    size_t bytes;
    m.o = o;
    m.elem_bytes = o.dtype == SPCCL_FLOAT32 ? 4 : 2;
    m.n = (o.mib << 20) / m.elem_bytes / o.ranks * o.ranks;
    bytes = m.n * m.elem_bytes;
    CHECK(cudaSetDevice(0));
    cudaDeviceProp about;
    CHECK(cudaGetDeviceProperties(&about, 0));
    m.limits.world_size = o.ranks;
    m.limits.n_sms = (uint32_t)about.multiProcessorCount;
    m.limits.max_ctas = o.ctas;
    m.limits.inbox_bytes = (size_t)256 << 20;
    for (uint32_t served = 1; served <= SP_FUSED_SERVED_MAX; served++)
        TRY(sp_fused_cuda_workers_per_cta(0, o.ranks, served, false, m.limits.workers_per_cta[served - 1]));
    TRY(sp_tune_gpu_shape(&m.limits, &m.shape));
    CHECK(cudaMalloc(&m.in, bytes));
    CHECK(cudaMalloc(&m.out, bytes));
    CHECK(cudaMalloc(&m.inbox, sp_inbox_bytes(m.shape)));
    CHECK(cudaMemset(m.inbox, 0, sp_inbox_bytes(m.shape)));
    CHECK(cudaHostAlloc(&m.control, sizeof *m.control, cudaHostAllocMapped));
    memset(m.control, 0, sizeof *m.control);
    CHECK(cudaHostGetDevicePointer(&m.control_device, m.control, 0));
    printf("%s, %u ranks, inbox %zu bytes\n", about.name, o.ranks, sp_inbox_bytes(m.shape));
    return m;
}

static sp_fused_args args_of(const machine &m, const std::string &what)
{
    sp_fused_args a = {};
    sp_fused_op op = what == "all_gather"       ? SP_FUSED_ALL_GATHER
                     : what == "reduce_scatter" ? SP_FUSED_REDUCE_SCATTER
                     : what == "one_hop"        ? SP_FUSED_ALL_REDUCE_ONESHOT
                                                : SP_FUSED_ALL_REDUCE;
    a.op = op;
    a.n_elems = what == "all_gather" || what == "reduce_scatter" ? m.n / m.o.ranks : m.n;
    a.dtype = m.o.dtype;
    a.redop = m.o.redop;
    a.format = SPCCL_FORMAT_AUTO;
    a.in = m.in;
    // The input of an all-gather is block 0 of its output.
    a.out = what == "in_place" || what == "all_gather" ? m.in : m.out;
    a.world_size = (int)m.o.ranks;
    a.shape = m.shape;
    sp_gpu_limits limits = m.limits;
    limits.hops = 2; // so that all_reduce and in_place of any size take two hops
    sp_tune_gpu_plan(&limits, &a);
    // All shards must have the same length, as the rank receives its own frames.
    if (op == SP_FUSED_ALL_REDUCE)
        a.n_elems -= a.n_elems % ((uint64_t)a.slice_elems * m.o.ranks);
    for (unsigned r = 0; r < m.o.ranks; r++)
        a.inboxes[r] = m.inbox;
    a.control = m.control_device;
    a.timeout_ns = 2000000000ull;
    a.seq = 1;
    return a;
}

static void fill(const machine &m, uint64_t below)
{
    fill_kernel<<<1024, 256>>>(m.in, m.n, below, m.elem_bytes);
    CHECK(cudaMemset(m.out, 0x5a, m.n * m.elem_bytes));
}

static float launch(const machine &m, const sp_fused_args &a)
{
    cudaEvent_t before, after;
    float ms = 0;
    CHECK(cudaEventCreate(&before));
    CHECK(cudaEventCreate(&after));
    CHECK(cudaEventRecord(before));
    TRY(sp_fused_cuda(&a, nullptr));
    CHECK(cudaEventRecord(after));
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaEventElapsedTime(&ms, before, after));
    CHECK(cudaEventDestroy(before));
    CHECK(cudaEventDestroy(after));
    if (m.control->report.fault != 0) {
        fprintf(stderr, "spccl_bench_fused: the kernel gave up: fault %u, worker %u, slice %u\n",
                m.control->report.fault, m.control->report.worker, m.control->report.slice);
        exit(1);
    }
    return ms;
}

// Elements from one shard to the next, as sp_fused_cuda computes them.
static uint64_t stride_of(const machine &m, const sp_fused_args &a)
{
    uint64_t slices = (a.n_elems + a.slice_elems - 1) / a.slice_elems;
    return a.op == SP_FUSED_ALL_REDUCE ? (slices + m.o.ranks - 1) / m.o.ranks * a.slice_elems : a.n_elems;
}

// The expected element i of a shard. What seems to come from rank r > 0 is what rank 0 sent to the peer in
// the opposite slot: block P - r, or in one hop the whole array.
static uint32_t wanted(const machine &m, const sp_fused_args &a, uint64_t i, uint64_t below)
{
    uint64_t stride = stride_of(m, a);
    float sum = 0;
    if (a.op == SP_FUSED_ALL_GATHER)
        return element_bits(i, below, m.elem_bytes);
    for (uint64_t r = 0; r < m.o.ranks; r++) {
        uint64_t at = (r == 0 || a.op == SP_FUSED_ALL_REDUCE_ONESHOT ? 0 : m.o.ranks - r) * stride + i;
        sum += at < m.n ? as_float(element_bits(at, below, m.elem_bytes), m.elem_bytes) : 0;
    }
    return as_bits(a.redop == SPCCL_AVG ? sum / (float)m.o.ranks : sum, m.elem_bytes);
}

// Compare a sample of the output's elements with the expected ones.
static void compare(const machine &m, const sp_fused_args &a, const std::string &what, uint64_t below)
{
    uint64_t block = a.op == SP_FUSED_ALL_GATHER ? m.n : a.n_elems, wrong = 0;
    std::vector<uint8_t> got(block * m.elem_bytes);
    uint64_t stride = stride_of(m, a), step = std::max<uint64_t>(1, block / 4000000);
    CHECK(cudaMemcpy(got.data(), a.out, got.size(), cudaMemcpyDeviceToHost));
    for (uint64_t i = 0; i < block; i += step) {
        uint32_t bits = 0;
        memcpy(&bits, &got[i * m.elem_bytes], m.elem_bytes);
        wrong += bits != wanted(m, a, i % stride, below);
    }
    if (wrong != 0) {
        fprintf(stderr, "spccl_bench_fused: %s: %llu elements of a sample are wrong\n", what.c_str(),
                (unsigned long long)wrong);
        exit(1);
    }
}

int main(int argc, char **argv)
{
    machine m = open_machine(read_options(argc, argv));
    for (const std::string &what : m.o.only)
        for (double sparsity : m.o.sparsity) {
            uint64_t below = (uint64_t)llround((1 - sparsity) * 4294967296.0);
            sp_fused_args a = args_of(m, what);
            std::vector<float> ms;
            fill(m, below);
            launch(m, a);
            if (m.o.check)
                compare(m, a, what, below);
            for (int i = 0; i < m.o.iters; i++) {
                fill(m, below);
                ms.push_back(launch(m, a));
            }
            std::sort(ms.begin(), ms.end());
            printf("%-14s %s %5.1f%% zeros: %8.4f ms   (%u CTAs of %u workers, slices of %u)\n", what.c_str(),
                   m.o.redop == SPCCL_SUM ? "sum" : "avg", 100 * sparsity, ms[ms.size() / 2], a.n_ctas,
                   a.workers_per_cta, a.slice_elems);
            fflush(stdout);
        }
    return 0;
}
