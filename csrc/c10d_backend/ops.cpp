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
    auto *backend = dynamic_cast<Backend *>(group->getBackend(c10::DeviceType::CPU).get());
    TORCH_CHECK_VALUE(backend != nullptr, "spccl: the group's CPU backend is ",
                      group->getBackend(c10::DeviceType::CPU)->getBackendName(),
                      ", wanted spccl (TORCH_DISTRIBUTED_DEBUG=DETAIL hides it behind a wrapper)");
    return *backend;
}

/* What this file was compiled for; backend.py compares it with what is running. */
std::string build_info()
{
    return std::string(TORCH_VERSION) + " " + SPCCL_VERSION_TEXT + " " + spccl_version();
}

/* numbers: timeout in ms, format, slice_bytes, n_sockets (op schemas know lists, but no structs) */
GroupPtr make_process_group(const GroupPtr &scratch, const std::string &name,
                            const std::vector<int64_t> &global_ranks, const std::vector<int64_t> &numbers,
                            const std::string &transports)
{
    TORCH_INTERNAL_ASSERT(numbers.size() == 4);
    CommSettings settings;
    settings.name = name;
    settings.timeout = milliseconds(numbers[0]);
    settings.format = static_cast<spccl_format>(numbers[1]);
    settings.slice_bytes = static_cast<uint32_t>(numbers[2]);
    settings.transports = transports;
    settings.n_sockets = static_cast<uint32_t>(numbers[3]);
    const int rank = scratch->getRank(), size = scratch->getSize();
    auto backend = c10::make_intrusive<Backend>(
        scratch->getStore(), scratch->getBackend(c10::DeviceType::CPU), rank, size, settings,
        std::vector<uint64_t>(global_ranks.begin(), global_ranks.end()));
    auto group = c10::make_intrusive<c10d::ProcessGroup>(rank, size);
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
    m.def("describe_link(__torch__.torch.classes.c10d.ProcessGroup group, int peer) -> str", describe_link);
    m.def("prepare_exit(int patience_ms) -> ()", prepare_exit);
}

} // namespace spccl_torch
