/* ops.cpp - what Python can call in the glue: a few torch ops, so that the glue needs no Python header.
 *
 * A process group crosses as the script class c10d.ProcessGroup. `make_process_group` gets a group that holds
 * the Store alone, and returns one that holds our Backend. python/spccl/backend.py takes the Backend out of it. */
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

/* The torch and spccl that the glue was compiled for, and the libspccl that is loaded. _torch_glue.py
 * compares them with what is running. */
std::string build_info()
{
    return std::string(TORCH_VERSION) + " " + SPCCL_VERSION_TEXT + " " + spccl_version();
}

/* Removes option `name` from `options` and returns it. Throws if it is not there. */
int64_t take(c10::Dict<std::string, int64_t> &options, const std::string &name)
{
    TORCH_CHECK_VALUE(
        options.contains(name), "spccl: make_process_group: option ", name,
        " is missing: the Python package and the glue are of two spccl versions; reinstall spccl");
    const int64_t value = options.at(name);
    (void)options.erase(name);
    return value;
}

/* The settings of a group, from the dictionary that backend.py passes. It holds numbers by name, because op
 * schemas have no structs. Throws for a name that is missing or not known. */
GroupSettings settings_of(const std::string &name, const c10::Dict<std::string, int64_t> &given,
                          const std::string &transports)
{
    c10::Dict<std::string, int64_t> options = given.copy(); /* a Dict is shared with the caller */
    GroupSettings settings;
    settings.comm.name = name;
    settings.comm.timeout = milliseconds(take(options, "timeout_ms"));
    settings.comm.format = static_cast<spccl_format>(take(options, "format"));
    settings.comm.slice_bytes = static_cast<uint32_t>(take(options, "slice_bytes"));
    settings.comm.transports = transports;
    settings.comm.n_sockets = static_cast<uint32_t>(take(options, "n_sockets"));
    settings.cuda.stage = take(options, "stage") != 0;
    settings.cuda.order_per_group = take(options, "order_per_group") != 0;
    settings.cuda.blocking_wait = take(options, "blocking_wait") != 0;
    settings.cuda.max_ctas = static_cast<uint32_t>(take(options, "max_ctas"));
    settings.cuda.inbox_bytes = static_cast<size_t>(take(options, "inbox_bytes"));
    settings.cuda.engine = take(options, "cuda_engine") != 0;
    settings.cuda.between_hosts = static_cast<uint32_t>(take(options, "between_hosts"));
    TORCH_CHECK_VALUE(
        options.empty(), "spccl: make_process_group: option ", options.empty() ? "" : options.begin()->key(),
        " is not known: the Python package and the glue are of two spccl versions; reinstall spccl");
    return settings;
}

/* A group that holds our Backend. `bare` holds the Store, and gets the inner Gloo and NCCL. */
GroupPtr make_process_group(const GroupPtr &bare, const std::string &name,
                            const std::vector<int64_t> &global_ranks,
                            const c10::Dict<std::string, int64_t> &options, const std::string &transports)
{
    auto backend =
        c10::make_intrusive<Backend>(bare, settings_of(name, options, transports), name, global_ranks);
    auto group = c10::make_intrusive<c10d::ProcessGroup>(bare->getRank(), bare->getSize());
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
    for (size_t i = 0; i < SPCCL_N_FORMATS; i++)
        out.push_back(static_cast<int64_t>(s.n_frames_sent[i]));
    out.push_back(static_cast<int64_t>(s.buffer_bytes));
    return out;
}

/* The counters of spccl_cuda_stats in its order: device, 4 numbers, frames by format, 3 numbers. */
std::vector<int64_t> cuda_stats(const GroupPtr &group)
{
    const spccl_cuda_stats s = backend_of(group).cuda_stats();
    std::vector<int64_t> out{s.device, static_cast<int64_t>(s.n_ctas), static_cast<int64_t>(s.inbox_bytes),
                             static_cast<int64_t>(s.n_collectives), static_cast<int64_t>(s.wire_bytes_sent)};
    for (size_t i = 0; i < SPCCL_N_FORMATS; i++)
        out.push_back(static_cast<int64_t>(s.n_frames_sent[i]));
    out.push_back(static_cast<int64_t>(s.pinned_bytes));
    out.push_back(static_cast<int64_t>(s.n_proxies));
    out.push_back(static_cast<int64_t>(s.n_remote));
    return out;
}

/* "unknown", "engine", or "nccl: ..." and "stage: ..." with the reason. */
std::string cuda_route(const GroupPtr &group)
{
    CudaSide &cuda = backend_of(group).cuda();
    switch (cuda.route()) {
    case CudaRoute::unknown:
        return "unknown";
    case CudaRoute::engine:
        return "engine";
    case CudaRoute::nccl:
        return "nccl: " + cuda.why();
    case CudaRoute::stage:
        return "stage: " + cuda.why();
    }
    return "?";
}

/* As spccl_cuda_options.max_ctas, for the collectives from now on. Returns the number before. */
int64_t limit_ctas(const GroupPtr &group, int64_t max_ctas)
{
    TORCH_CHECK_VALUE(max_ctas >= 0, "spccl: limit_ctas: max_ctas is ", max_ctas, ", wanted 0 or more");
    return static_cast<int64_t>(backend_of(group).cuda().limit_ctas(static_cast<uint64_t>(max_ctas)));
}

/* Backend::pruned_all_reduce; plan and options are addresses. */
c10::intrusive_ptr<c10d::Work> pruned_all_reduce(const GroupPtr &group, const at::Tensor &grad, int64_t plan,
                                                 int64_t options, int64_t stream)
{
    return backend_of(group).pruned_all_reduce(grad, reinterpret_cast<spccl_prune_plan *>(plan),
                                               *reinterpret_cast<const spccl_prune_options *>(options),
                                               reinterpret_cast<void *>(stream));
}

c10::intrusive_ptr<c10d::Work> reduce_scatter_wide(const GroupPtr &group, const at::Tensor &output,
                                                   const at::Tensor &input, bool mean)
{
    return backend_of(group).reduce_scatter_wide(output, input, mean);
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
    m.def("make_process_group(__torch__.torch.classes.c10d.ProcessGroup bare, str name, "
          "int[] global_ranks, Dict(str, int) options, str transports) -> "
          "__torch__.torch.classes.c10d.ProcessGroup",
          make_process_group);
    m.def("stats(__torch__.torch.classes.c10d.ProcessGroup group) -> int[]", stats);
    m.def("cuda_stats(__torch__.torch.classes.c10d.ProcessGroup group) -> int[]", cuda_stats);
    m.def("cuda_route(__torch__.torch.classes.c10d.ProcessGroup group) -> str", cuda_route);
    m.def("describe_link(__torch__.torch.classes.c10d.ProcessGroup group, int peer) -> str", describe_link);
    m.def("limit_ctas(__torch__.torch.classes.c10d.ProcessGroup group, int max_ctas) -> int", limit_ctas);
    m.def("pruned_all_reduce(__torch__.torch.classes.c10d.ProcessGroup group, Tensor grad, int plan, "
          "int options, int stream) -> __torch__.torch.classes.c10d.Work",
          pruned_all_reduce);
    m.def("reduce_scatter_wide(__torch__.torch.classes.c10d.ProcessGroup group, Tensor output, "
          "Tensor input, bool mean) -> __torch__.torch.classes.c10d.Work",
          reduce_scatter_wide);
    m.def("prepare_exit(int patience_ms) -> ()", prepare_exit);
}

} // namespace spccl_torch
