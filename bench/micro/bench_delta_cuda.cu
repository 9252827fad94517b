// bench_delta_cuda.cu - deltas of a model's weights in GPU memory, against a plain read of the same bytes.
//
//     spccl_bench_delta_cuda [--gb GB] [--csv FILE]
//
// GB (default 14) of bfloat16 in 291 tensors with the shapes of a model of 7 billion parameters, scaled. Uniform places; a
// changed weight takes a neighbouring value. Times are those of whole calls, on the clock of the host: median, least and most
// of 9. Rates in GB/s (1e9 bytes): of encode what is read of x and base, each once. The last column is the rate over that of
// the read. Before it is timed, the host applies frames to a part of the base, and compares with x bit for bit. "base update"
// is what follows an encode once its frames are sent: a plan of them, check and apply. All of the base is then compared with x.
#include "bench_cuda.cuh"

#include <chrono>
#include <cstring>

constexpr int CALLS = 9, WARM = 2;
constexpr uint64_t KEY = 1;
constexpr double DENSITIES[] = {0.0003, 0.01, 0.045};
constexpr size_t VERIFIED_BYTES = size_t(512) << 20; // of x, in each case

struct weights {
    std::vector<size_t> first, n; // of each tensor, in elements
    size_t n_elems;               // of all, and of what lies between
    uint16_t *x, *base;
    float *masters; // nullptr: they do not fit
    uint8_t *dst;
    size_t dst_cap;
};

static __host__ __device__ uint64_t mixed(uint64_t z)
{
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}
__global__ void fill_kernel(uint16_t *x, uint16_t *base, float *masters, size_t n, double density)
{
    for (size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x; i < n;
         i += size_t(gridDim.x) * blockDim.x) {
        uint64_t r = mixed((i + 1) * 0x9e3779b97f4a7c15ull), which = mixed(r + 0x632be59bd9b4e019ull);
        uint16_t old = uint16_t(0x3c00 + (r & 0x3ff) + (r >> 63 << 15));
        uint16_t now = double(which >> 11) * 0x1p-53 < density ? uint16_t(old + 1 - 2 * (r >> 20 & 1)) : old;
        base[i] = old;
        x[i] = now;
        if (masters != nullptr) // rounds to `now`
            masters[i] = __uint_as_float(uint32_t(now) << 16 | uint32_t(r >> 24 & 0x7fff));
    }
}

// Reads n units of 16 bytes of each array.
__global__ void read_kernel(const uint4 *x, const uint4 *y, size_t n_x, size_t n_y, uint32_t *never)
{
    constexpr int UNROLL = 8;
    uint32_t any = 0;
    for (size_t i = size_t(blockIdx.x) * blockDim.x * UNROLL + threadIdx.x; i < n_x + n_y;
         i += size_t(gridDim.x) * blockDim.x * UNROLL) {
#pragma unroll
        for (int k = 0; k < UNROLL; k++) {
            size_t at = i + size_t(k) * blockDim.x;
            if (at < n_x + n_y) {
                uint4 v = at < n_x ? __ldcs(&x[at]) : __ldcs(&y[at - n_x]);
                any += v.x ^ v.y ^ v.z ^ v.w;
            }
        }
    }
    if (any == 0x12345678u) // keeps the compiler from dropping the loads
        *never = any;
}

static FILE *csv;

struct timing {
    double median_ms, least_ms, most_ms;
};
// Of CALLS calls of run(), which waits for the GPU.
template <class F> static timing time_calls(F run)
{
    std::vector<double> t;
    for (int i = -WARM; i < CALLS; i++) {
        CHECK(cudaDeviceSynchronize());
        auto start = std::chrono::steady_clock::now();
        run();
        if (i >= 0)
            t.push_back(
                std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count());
    }
    std::sort(t.begin(), t.end());
    return {t[CALLS / 2], t[0], t[CALLS - 1]};
}
// Returns GB/s. read: the rate to compare with, 0: none. bytes_per_change: 0: none.
static double tell(const char *what, double density, double bytes, timing t, double read,
                   double bytes_per_change)
{
    const double rate = bytes / t.median_ms / 1e6;
    printf("%-34s", what);
    if (density > 0)
        printf(" %5.2f%%", 100 * density);
    else
        printf("       ");
    printf("  %8.3f ms (%.3f to %.3f)  %7.1f GB/s", t.median_ms, t.least_ms, t.most_ms, rate);
    if (read > 0)
        printf("  %.2f of read", rate / read);
    if (bytes_per_change > 0)
        printf("  %.3f bytes per change", bytes_per_change);
    printf("\n");
    if (csv != nullptr)
        fprintf(csv, "%s,%g,%.0f,%.4f,%.4f,%.4f,%.1f,%.4f\n", what, density, bytes, t.median_ms, t.least_ms,
                t.most_ms, rate, bytes_per_change);
    return rate;
}

static void make(weights &w, double gb)
{
    constexpr size_t LAYERS = 32;
    const double scale = gb * 1e9 / 2 / 6738415616.0; // of rows
    auto add = [&](size_t rows, size_t columns) {
        size_t n = rows == 1 ? columns : std::max<size_t>(1, size_t(double(rows) * scale)) * columns;
        w.first.push_back(w.n_elems);
        w.n.push_back(n);
        w.n_elems += (n + 255) / 256 * 256;
    };
    size_t free_bytes = 0, total = 0;
    w = {};
    add(32000, 4096);
    for (size_t i = 0; i < LAYERS; i++) {
        add(1, 4096), add(1, 4096);
        for (int k = 0; k < 4; k++)
            add(4096, 4096);
        add(11008, 4096), add(11008, 4096), add(4096, 11008);
    }
    add(1, 4096), add(32000, 4096);
    w.dst_cap = w.n_elems / 2 / 16 * 16 + (64 << 20);
    CHECK(cudaMalloc(&w.x, 2 * w.n_elems));
    CHECK(cudaMalloc(&w.base, 2 * w.n_elems));
    CHECK(cudaMalloc(&w.dst, w.dst_cap));
    CHECK(cudaMemGetInfo(&free_bytes, &total));
    if (free_bytes > 4 * w.n_elems + (size_t(2) << 30))
        CHECK(cudaMalloc(&w.masters, 4 * w.n_elems));
}

static std::vector<spccl_delta_source> sources_of(const weights &w, bool of_masters)
{
    std::vector<spccl_delta_source> s;
    for (size_t i = 0; i < w.n.size(); i++) {
        const void *x =
            of_masters ? (const void *)(w.masters + w.first[i]) : (const void *)(w.x + w.first[i]);
        s.push_back({x, w.base + w.first[i], w.n[i], 0, of_masters ? SPCCL_FLOAT32 : SPCCL_BFLOAT16,
                     SPCCL_BFLOAT16, KEY + i});
    }
    return s;
}

// The host applies frames of about VERIFIED_BYTES of weights to the base, and compares with x.
static void verify(const weights &w, const std::vector<spccl_delta_frame> &frames)
{
    std::vector<uint16_t> now, want;
    std::vector<uint8_t> frame;
    size_t verified = 0, begin = frames.size() / 3;
    for (size_t k = 0; k < frames.size() && verified < VERIFIED_BYTES; k++) {
        const size_t i = (begin + k) % frames.size();
        uint64_t sum_change = 0;
        now.resize(w.n[i]), want.resize(w.n[i]), frame.resize(frames[i].bytes);
        CHECK(cudaMemcpy(now.data(), w.base + w.first[i], 2 * w.n[i], cudaMemcpyDeviceToHost));
        CHECK(cudaMemcpy(want.data(), w.x + w.first[i], 2 * w.n[i], cudaMemcpyDeviceToHost));
        CHECK(cudaMemcpy(frame.data(), w.dst + frames[i].offset, frame.size(), cudaMemcpyDeviceToHost));
        spccl_delta_place place = {now.data(), w.n[i], 0, 1, 0, w.n[i], w.n[i]};
        spccl_delta_target target = {frame.data(), frame.size(),   w.n[i], 0, &place, 1,
                                     KEY + i,      SPCCL_BFLOAT16, 0};
        CHECK_SPCCL(spccl_delta_check(&target, 1, nullptr, 0, &sum_change, nullptr));
        CHECK_SPCCL(spccl_delta_apply(&target, 1));
        if (now != want || sum_change != frames[i].sum_change) {
            fprintf(stderr, "tensor %zu: the delta does not lead from base to x\n", i);
            exit(1);
        }
        verified += 2 * w.n[i];
    }
}

__global__ void compare_kernel(const uint16_t *x, const uint16_t *y, size_t n,
                               unsigned long long *n_different)
{
    unsigned long long found = 0;
    for (size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += size_t(gridDim.x) * blockDim.x)
        found += x[i] != y[i] ? 1 : 0;
    if (found != 0)
        atomicAdd(n_different, found);
}
static void expect_base_is_x(const weights &w)
{
    unsigned long long *n_different, found = 0;
    CHECK(cudaMalloc(&n_different, sizeof found));
    CHECK(cudaMemset(n_different, 0, sizeof found));
    for (size_t i = 0; i < w.n.size(); i++)
        compare_kernel<<<1024, 256>>>(w.x + w.first[i], w.base + w.first[i], w.n[i], n_different);
    CHECK(cudaMemcpy(&found, n_different, sizeof found, cudaMemcpyDeviceToHost));
    CHECK(cudaFree(n_different));
    if (found != 0) {
        fprintf(stderr, "after the base update %llu elements differ from x\n", found);
        exit(1);
    }
}

// Advance the base by the frames at dst, and undo it, so that each call finds the same.
static void measure_update(const weights &w, double density, const std::vector<spccl_delta_frame> &frames)
{
    std::vector<spccl_delta_target> targets;
    std::vector<spccl_delta_place> places(frames.size());
    spccl_cuda_delta_plan *plan = nullptr;
    size_t old_bytes = 0;
    void *old = nullptr;
    std::vector<double> t;
    for (size_t i = 0; i < frames.size(); i++) {
        places[i] = {w.base + w.first[i], w.n[i], 0, 1, 0, w.n[i], w.n[i]};
        targets.push_back({w.dst + frames[i].offset, frames[i].bytes, w.n[i], 0, &places[i], 1, KEY + i,
                           SPCCL_BFLOAT16, 0});
    }
    for (int i = -WARM; i < CALLS; i++) {
        CHECK(cudaDeviceSynchronize());
        auto start = std::chrono::steady_clock::now();
        CHECK_SPCCL(spccl_cuda_delta_plan_create(targets.data(), targets.size(), nullptr, &plan, &old_bytes));
        if (old == nullptr)
            CHECK(cudaMalloc(&old, old_bytes + 8));
        CHECK_SPCCL(spccl_cuda_delta_check(plan, i == -WARM ? old : nullptr, i == -WARM ? old_bytes : 0,
                                           nullptr, nullptr));
        CHECK_SPCCL(spccl_cuda_delta_apply(plan, nullptr));
        CHECK(cudaDeviceSynchronize());
        if (i >= 0)
            t.push_back(
                std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count());
        if (i == -WARM)
            expect_base_is_x(w);
        CHECK_SPCCL(spccl_cuda_delta_undo(plan, old, old_bytes, nullptr));
        CHECK(cudaDeviceSynchronize());
        spccl_cuda_delta_plan_destroy(plan);
    }
    CHECK(cudaFree(old));
    std::sort(t.begin(), t.end());
    tell("base update", density, 2.0 * double(w.n_elems), {t[CALLS / 2], t[0], t[CALLS - 1]}, 0, 0);
}

// Encode, and advance the base in the same call. Undone afterwards, so that each call finds the same.
static void measure_advance(const weights &w, const char *what, double density, bool of_masters, double read)
{
    const std::vector<spccl_delta_source> s = sources_of(w, of_masters);
    std::vector<spccl_delta_frame> frames(s.size());
    std::vector<spccl_delta_place> places(s.size());
    std::vector<double> t;
    void *old = nullptr;
    const size_t old_cap = w.n_elems / 4;
    size_t bytes = 0;
    CHECK(cudaMalloc(&old, old_cap));
    const spccl_delta_options o = {sizeof o, 0, old, old_cap};
    for (int i = -WARM; i < CALLS; i++) {
        std::vector<spccl_delta_target> targets;
        spccl_cuda_delta_plan *plan = nullptr;
        size_t old_bytes = 0;
        CHECK(cudaDeviceSynchronize());
        auto start = std::chrono::steady_clock::now();
        CHECK_SPCCL(spccl_cuda_delta_encode(s.data(), s.size(), &o, w.dst, w.dst_cap, frames.data(), &bytes,
                                            nullptr));
        if (i >= 0)
            t.push_back(
                std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count());
        if (i == -WARM)
            expect_base_is_x(w);
        for (size_t k = 0; k < frames.size(); k++) {
            places[k] = {w.base + w.first[k], w.n[k], 0, 1, 0, w.n[k], w.n[k]};
            targets.push_back({w.dst + frames[k].offset, frames[k].bytes, w.n[k], 0, &places[k], 1, KEY + k,
                               SPCCL_BFLOAT16, 0});
        }
        CHECK_SPCCL(spccl_cuda_delta_plan_create(targets.data(), targets.size(), nullptr, &plan, &old_bytes));
        CHECK_SPCCL(spccl_cuda_delta_check(plan, nullptr, 0, nullptr, nullptr));
        CHECK_SPCCL(spccl_cuda_delta_undo(plan, old, old_bytes, nullptr));
        CHECK(cudaDeviceSynchronize());
        spccl_cuda_delta_plan_destroy(plan);
    }
    CHECK(cudaFree(old));
    std::sort(t.begin(), t.end());
    tell(what, density, (of_masters ? 6.0 : 4.0) * double(w.n_elems), {t[CALLS / 2], t[0], t[CALLS - 1]},
         read, 0);
}

static void measure_encode(const weights &w, const char *what, double density, bool of_masters, uint64_t raw,
                           double read)
{
    const std::vector<spccl_delta_source> s = sources_of(w, of_masters);
    std::vector<spccl_delta_frame> frames(s.size());
    const spccl_delta_options o = {sizeof o, raw, nullptr, 0};
    size_t bytes = 0, n = 0, nnz = 0;
    auto encode = [&] {
        CHECK_SPCCL(spccl_cuda_delta_encode(s.data(), s.size(), &o, w.dst, w.dst_cap, frames.data(), &bytes,
                                            nullptr));
    };
    encode();
    verify(w, frames);
    for (size_t i = 0; i < s.size(); i++) {
        n += w.n[i];
        nnz += frames[i].nnz;
    }
    tell(what, density, (of_masters ? 6.0 : 4.0) * double(n), time_calls(encode), read,
         double(bytes) / double(nnz));
    if (!of_masters && raw == 0)
        measure_update(w, density, frames);
}

// The best of several grids.
static double measure_read(const char *what, const void *x, size_t x_bytes, const void *y, size_t y_bytes)
{
    int n_sms = 0;
    timing best = {1e9, 0, 0};
    uint32_t *never;
    CHECK(cudaMalloc(&never, 4));
    CHECK(cudaDeviceGetAttribute(&n_sms, cudaDevAttrMultiProcessorCount, 0));
    for (int per_sm : {2, 4, 16}) {
        timing t = time_calls([&] {
            read_kernel<<<n_sms * per_sm, 512>>>((const uint4 *)x, (const uint4 *)y, x_bytes / 16,
                                                 y_bytes / 16, never);
            CHECK(cudaDeviceSynchronize());
        });
        if (t.median_ms < best.median_ms)
            best = t;
    }
    CHECK(cudaFree(never));
    return tell(what, 0, double(x_bytes + y_bytes), best, 0, 0);
}

int main(int argc, char **argv)
{
    double gb = 14, read, read_masters = 0;
    const char *commit = getenv("SPCCL_COMMIT");
    cudaDeviceProp p;
    weights w;
    for (int i = 1; i + 1 < argc; i += 2) {
        if (strcmp(argv[i], "--gb") == 0)
            gb = atof(argv[i + 1]);
        else if (strcmp(argv[i], "--csv") == 0 && (csv = fopen(argv[i + 1], "w")) == nullptr)
            return perror(argv[i + 1]), 1;
        else if (strcmp(argv[i], "--csv") != 0)
            gb = 0;
    }
    if (argc % 2 == 0 || gb <= 0)
        return fprintf(stderr, "usage: %s [--gb GB] [--csv FILE]\n", argv[0]), 2;
    CHECK(cudaGetDeviceProperties(&p, 0));
    make(w, gb);
    printf("%s: %.2f GB of bfloat16 in %zu tensors\n", p.name, 2e-9 * double(w.n_elems), w.n.size());
    if (csv != nullptr)
        fprintf(csv,
                "# gpu: %s, commit: %s\nwhat,density,bytes,median_ms,least_ms,most_ms,gbs,bytes_per_change\n",
                p.name, commit != nullptr ? commit : "unknown");
    CHECK(cudaMemset(w.dst, 0, w.dst_cap));
    fill_kernel<<<4096, 256>>>(w.x, w.base, w.masters, w.n_elems, 0.01);
    read = measure_read("read of x and base", w.x, 2 * w.n_elems, w.base, 2 * w.n_elems);
    if (w.masters != nullptr)
        read_masters =
            measure_read("read of float32 and base", w.masters, 4 * w.n_elems, w.base, 2 * w.n_elems);
    else
        printf("not measured for lack of memory: encode from float32\n");
    for (double density : DENSITIES) {
        fill_kernel<<<4096, 256>>>(w.x, w.base, w.masters, w.n_elems, density);
        measure_encode(w, "encode", density, false, 0, read);
        measure_advance(w, "encode, base advanced", density, false, read);
        measure_encode(w, "encode raw", density, false, 1, read);
        if (w.masters != nullptr) {
            measure_encode(w, "encode from float32", density, true, 0, read_masters);
            measure_advance(w, "encode from float32, base advanced", density, true, read_masters);
        }
    }
    return csv != nullptr && fclose(csv) != 0;
}
