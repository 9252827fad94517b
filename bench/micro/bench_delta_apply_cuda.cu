// bench_delta_apply_cuda.cu - deltas of weights in GPU memory: what the pause of a receiver is made of.
//
//     spccl_bench_delta_apply_cuda [PARTS]
//
// PARTS (default 105: 14.1 GB) tensors of 64 Mi bfloat16, of which 0.03, 1 and 4.5% change, at uniform places, by a small
// step; raw and coded frames. Medians over 20 calls. plan and check wait on the host, so they are timed there; apply, undo
// and checksum by events. GB/s (1e9 bytes) of apply and undo: the frames, and for each change a sector of 32 bytes that
// is read and written. Results are compared with the host's checksums.
#include "bench_cuda.cuh"

#include <chrono>
#include <cstring>

constexpr size_t PART = size_t(64) << 20; // elements
constexpr int WARM = 3;
constexpr uint64_t KEY = 12345;

static uint64_t next_random(uint64_t &state)
{
    uint64_t z = (state += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

// Of ROUNDS calls that wait on the host.
template <class F> static double host_median_us(F each)
{
    std::vector<double> times;
    for (int i = -WARM; i < ROUNDS; i++) {
        auto start = std::chrono::steady_clock::now();
        each();
        std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - start;
        if (i >= 0)
            times.push_back(took.count());
    }
    std::sort(times.begin(), times.end());
    return times[ROUNDS / 2];
}

struct receiver {
    size_t n_parts;
    std::vector<uint16_t> base, x; // of one part: all have the same
    uint16_t *model;
    uint64_t *sum; // on the GPU
    std::vector<uint8_t> frame;
    spccl_delta_frame info;

    explicit receiver(size_t parts)
        : n_parts(parts), base(PART), x(PART), frame(spccl_delta_bound(PART, SPCCL_BFLOAT16))
    {
        uint64_t state = 1;
        CHECK(cudaMalloc(&model, n_parts * PART * sizeof *model));
        CHECK(cudaMalloc(&sum, sizeof *sum));
        for (size_t i = 0; i < PART; i += 4) {
            uint64_t v = next_random(state);
            memcpy(&base[i], &v, sizeof v);
        }
        CHECK(cudaMemcpy(model, base.data(), PART * sizeof *model, cudaMemcpyHostToDevice));
        for (size_t p = 1; p < n_parts; p++)
            CHECK(cudaMemcpy(model + p * PART, model, PART * sizeof *model, cudaMemcpyDeviceToDevice));
    }
    void encode(double share, bool raw)
    {
        uint64_t state = 2, least = uint64_t(share * 0x1p64);
        size_t bytes;
        spccl_delta_options o = {sizeof o, raw, nullptr, 0};
        spccl_delta_source s = {x.data(), base.data(), PART, 0, SPCCL_BFLOAT16, SPCCL_BFLOAT16, KEY};
        for (size_t i = 0; i < PART; i++) {
            uint64_t v = next_random(state);
            x[i] = uint16_t(v < least ? base[i] + (v % 8 < 7 ? 1 - 2 * int(v >> 8 & 1) : 3) : base[i]);
        }
        CHECK_SPCCL(spccl_delta_encode(&s, 1, &o, frame.data(), frame.size(), &info, &bytes));
    }
    void expect(const std::vector<uint16_t> &wanted, const char *what)
    {
        uint64_t host, gpu;
        CHECK_SPCCL(spccl_delta_checksum(wanted.data(), PART, SPCCL_BFLOAT16, 0, KEY, &host));
        for (size_t p : {size_t(0), n_parts - 1}) {
            CHECK_SPCCL(
                spccl_cuda_delta_checksum(model + p * PART, PART, SPCCL_BFLOAT16, 0, KEY, sum, nullptr));
            CHECK(cudaMemcpy(&gpu, sum, sizeof gpu, cudaMemcpyDeviceToHost));
            if (gpu != host) {
                fprintf(stderr, "part %zu after %s: another checksum than the host's\n", p, what);
                exit(1);
            }
        }
    }
    // Each part has a frame of its own, as those of a model have.
    void measure(double share, bool raw)
    {
        std::vector<spccl_delta_target> targets;
        std::vector<spccl_delta_place> places(n_parts);
        spccl_cuda_delta_plan *plan = nullptr;
        uint8_t *frames, *old;
        size_t old_bytes;
        encode(share, raw);
        CHECK(cudaMalloc(&frames, n_parts * info.bytes));
        for (size_t p = 0; p < n_parts; p++) {
            CHECK(cudaMemcpy(frames + p * info.bytes, frame.data(), info.bytes, cudaMemcpyHostToDevice));
            places[p] = {model + p * PART, PART, 0, 1, 0, PART, 0};
            targets.push_back(
                {frames + p * info.bytes, info.bytes, PART, 0, &places[p], 1, KEY, SPCCL_BFLOAT16, 0});
        }
        auto make = [&] {
            CHECK_SPCCL(spccl_cuda_delta_plan_create(targets.data(), n_parts, nullptr, &plan, &old_bytes));
        };
        double plan_us = host_median_us([&] {
            spccl_cuda_delta_plan_destroy(plan);
            make();
        });
        CHECK(cudaMalloc(&old, old_bytes));
        std::vector<uint64_t> sums(n_parts);
        double check_us = host_median_us(
            [&] { CHECK_SPCCL(spccl_cuda_delta_check(plan, old, old_bytes, sums.data(), nullptr)); });
        if (sums[0] != info.sum_change || sums[n_parts - 1] != info.sum_change) {
            fprintf(stderr, "check: another sum change than the host's\n");
            exit(1);
        }
        CHECK_SPCCL(spccl_cuda_delta_apply(plan, nullptr));
        expect(x, "apply");
        CHECK_SPCCL(spccl_cuda_delta_undo(plan, old, old_bytes, nullptr));
        expect(base, "undo");
        double apply_us = median_us(nullptr, WARM, [&](int, cudaEvent_t a, cudaEvent_t b) {
            CHECK(cudaEventRecord(a));
            CHECK_SPCCL(spccl_cuda_delta_apply(plan, nullptr));
            CHECK(cudaEventRecord(b));
            CHECK_SPCCL(spccl_cuda_delta_undo(plan, old, old_bytes, nullptr));
        });
        double undo_us = median_us(nullptr, WARM, [&](int, cudaEvent_t a, cudaEvent_t b) {
            CHECK_SPCCL(spccl_cuda_delta_apply(plan, nullptr));
            CHECK(cudaEventRecord(a));
            CHECK_SPCCL(spccl_cuda_delta_undo(plan, old, old_bytes, nullptr));
            CHECK(cudaEventRecord(b));
        });
        expect(base, "all rounds");
        double changes = double(info.nnz) * n_parts, bytes = double(info.bytes) * n_parts;
        printf("%5.2f%% %-5s %4.2f bytes a change: plan %6.3f ms, check %6.3f ms, apply %6.3f ms %6.0f GB/s, "
               "undo "
               "%6.3f ms %6.0f GB/s\n",
               share * 100, raw ? "raw" : "coded", bytes / changes, plan_us / 1e3, check_us / 1e3,
               apply_us / 1e3, (bytes + 64 * changes) / apply_us / 1e3, undo_us / 1e3,
               (bytes + 64 * changes) / undo_us / 1e3);
        spccl_cuda_delta_plan_destroy(plan);
        CHECK(cudaFree(frames));
        CHECK(cudaFree(old));
    }
};

int main(int argc, char **argv)
{
    size_t n_parts = argc > 1 ? strtoull(argv[1], nullptr, 10) : 105;
    receiver r(n_parts != 0 ? n_parts : 1);
    size_t n = r.n_parts * PART;
    printf("%.1f GB of bfloat16 in %zu tensors\n", n * 2e-9, r.n_parts);
    for (double share : {0.0003, 0.01, 0.045})
        for (bool raw : {true, false})
            r.measure(share, raw);
    double us = median_us(nullptr, WARM, [&](int, cudaEvent_t a, cudaEvent_t b) {
        CHECK(cudaEventRecord(a));
        CHECK_SPCCL(spccl_cuda_delta_checksum(r.model, n, SPCCL_BFLOAT16, 0, KEY, r.sum, nullptr));
        CHECK(cudaEventRecord(b));
    });
    printf("checksum of all %6.3f ms %6.0f GB/s\n", us / 1e3, n * 2.0 / us / 1e3);
    return 0;
}
