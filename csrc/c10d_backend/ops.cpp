/* ops.cpp - the glue's face to Python: a few torch ops, so that no Python header is needed.
 *
 * A group crosses as the script class c10d.ProcessGroup. `make_process_group` gets a scratch one that carries
 * the Store and Gloo, and returns one that carries our Backend; python/spccl/backend.py takes it out. */
#include "backend.hpp"

#include <torch/library.h>

namespace spccl_torch
{

namespace
{
using GroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

Backend &backend_of(const GroupPtr &group)
{
    std::string others;
    for (const c10::Device &device : group->getDeviceTypes()) {
        const auto candidate = group->getBackend(device.type());
        if (auto *backend = dynamic_cast<Backend *>(candidate.get()))
            return *backend; /* the group keeps it */
        others += (others.empty() ? "" : ", ") + candidate->getBackendName();
    }
    TORCH_CHECK_VALUE(false, "spccl: the backends of this group are ", others,
                      ", wanted spccl (TORCH_DISTRIBUTED_DEBUG=DETAIL hides it behind a wrapper)");
}

/* What this file was compiled for; backend.py compares it with what is running. */
std::string build_info()
{
    return std::string(TORCH_VERSION) + " " + SPCCL_VERSION_TEXT + " " + spccl_version();
}

/* numbers: timeout in ms, format, slice_bytes, n_sockets, stage, order_per_group, blocking_wait, max_ctas,
 * inbox_bytes, engine (op schemas know lists, but no structs) */
GroupPtr make_process_group(const GroupPtr &scratch, const std::string &name,
                            const std::vector<int64_t> &global_ranks, const std::vector<int64_t> &numbers,
                            const std::string &transports)
{
    TORCH_INTERNAL_ASSERT(numbers.size() == 10);
    GroupSettings settings;
    settings.comm.name = name;
    settings.comm.timeout = milliseconds(numbers[0]);
    settings.comm.format = static_cast<spccl_format>(numbers[1]);
    settings.comm.slice_bytes = static_cast<uint32_t>(numbers[2]);
    settings.comm.transports = transports;
    settings.comm.n_sockets = static_cast<uint32_t>(numbers[3]);
    settings.cuda.stage = numbers[4] != 0;
    settings.cuda.order_per_group = numbers[5] != 0;
    settings.cuda.blocking_wait = numbers[6] != 0;
    settings.cuda.max_ctas = static_cast<uint32_t>(numbers[7]);
    settings.cuda.inbox_bytes = static_cast<size_t>(numbers[8]);
    settings.cuda.engine = numbers[9] != 0;
    auto backend = c10::make_intrusive<Backend>(
        scratch, settings, std::vector<uint64_t>(global_ranks.begin(), global_ranks.end()));
    auto group = c10::make_intrusive<c10d::ProcessGroup>(scratch->getRank(), scratch->getSize());
    group->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::CUSTOM,
                      c10::intrusive_ptr<c10d::Backend>(backend));
    return group;
}

/* The counters of spccl_stats in its order: 4 numbers, frames by format, buffer bytes. */
std::vector<int64_t> stats(const GroupPtr &group)
{
    const spccl_stats s = backend_of(group).stats();
    std::vector<int64_t> out{static_cast<int64_t>(s.n_collectives), static_cast<int64_t>(s.dense_bytes_sent),
                             static_cast<int64_t>(s.wire_bytes_sent),
                             static_cast<int64_t>(s.wire_bytes_received)};
    for (uint64_t n : s.n_frames_sent)
        out.push_back(static_cast<int64_t>(n));
    out.push_back(static_cast<int64_t>(s.buffer_bytes));
    return out;
}

/* The counters of spccl_cuda_stats in its order: device, 4 numbers, frames by format. */
std::vector<int64_t> cuda_stats(const GroupPtr &group)
{
    const spccl_cuda_stats s = backend_of(group).cuda_stats();
    std::vector<int64_t> out{s.device, static_cast<int64_t>(s.n_ctas), static_cast<int64_t>(s.inbox_bytes),
                             static_cast<int64_t>(s.n_collectives), static_cast<int64_t>(s.wire_bytes_sent)};
    for (uint64_t n : s.n_frames_sent)
        out.push_back(static_cast<int64_t>(n));
    return out;
}

/* "unknown", "engine", or "nccl: ..." and "stage: ..." with the reason. */
std::string cuda_path(const GroupPtr &group)
{
    CudaSide &cuda = backend_of(group).cuda();
    switch (cuda.known_path()) {
    case CudaPath::unknown:
        return "unknown";
    case CudaPath::engine:
        return "engine";
    case CudaPath::nccl:
        return "nccl: " + cuda.why();
    case CudaPath::stage:
        return "stage: " + cuda.why();
    }
    return "?";
}

std::string describe_link(const GroupPtr &group, int64_t peer)
{
    return backend_of(group).describe_link(static_cast<int>(peer));
}

void prepare_exit(int64_t patience_ms)
{
    SerialThread::prepare_exit(milliseconds(patience_ms));
}
} // namespace

TORCH_LIBRARY_FRAGMENT(spccl, m)
{
    m.def("build_info() -> str", build_info);
    m.def("make_process_group(__torch__.torch.classes.c10d.ProcessGroup scratch, str name, "
          "int[] global_ranks, int[] numbers, str transports) -> "
          "__torch__.torch.classes.c10d.ProcessGroup",
          make_process_group);
    m.def("stats(__torch__.torch.classes.c10d.ProcessGroup group) -> int[]", stats);
    m.def("cuda_stats(__torch__.torch.classes.c10d.ProcessGroup group) -> int[]", cuda_stats);
    m.def("cuda_path(__torch__.torch.classes.c10d.ProcessGroup group) -> str", cuda_path);
    m.def("describe_link(__torch__.torch.classes.c10d.ProcessGroup group, int peer) -> str", describe_link);
    m.def("prepare_exit(int patience_ms) -> ()", prepare_exit);
}

} // namespace spccl_torch
