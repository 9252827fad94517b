/* delegate.cpp - the Backend methods that Gloo or NCCL runs. Each collective counts in the group's sequence
 * number.
 *
 * On CPU, Gloo's calls need no order relative to spccl's: no device queue carries both. On a GPU, NCCL's
 * collectives are in the collective order (order.hpp). */
#include "backend.hpp"

#include <ATen/core/dispatch/Dispatcher.h>
#include <cinttypes>
#include <cstdio>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

namespace spccl_torch
{

/* ---- Staging ------------------------------------------------------------------------------------- */

at::Tensor Staging::written(const at::Tensor &t)
{
    if (no_copies_)
        return t;
    at::Tensor copy = t.cpu();
    copy_back_.emplace_back(t, copy);
    return copy;
}

void Staging::finish()
{
    at::NoGradGuard no_grad;
    for (const auto &[to, from] : copy_back_)
        to.copy_(from);
}

/* ---- making Gloo and NCCL -------------------------------------------------------------------------- */

c10::intrusive_ptr<c10d::Backend> add_inner_groups(const c10::intrusive_ptr<c10d::ProcessGroup> &bare,
                                                   const std::string &name,
                                                   const std::vector<int64_t> &global_ranks,
                                                   const GroupSettings &settings, const std::string &local_ip)
{
    using GroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;
    static const auto with_inner_groups = c10::Dispatcher::singleton()
                                              .findSchemaOrThrow("spccl::with_inner_groups", "")
                                              .typed<GroupPtr(const GroupPtr &, c10::string_view,
                                                              at::IntArrayRef, int64_t, c10::string_view)>();
    with_inner_groups.call(bare, name, global_ranks, settings.comm.timeout.count(), local_ip);
    return bare->getBackend(c10::DeviceType::CPU);
}

/* ---- Gloo or NCCL -------------------------------------------------------------------------------- */

namespace
{
std::vector<at::Tensor> joined(std::vector<at::Tensor> first,
                               const std::vector<std::vector<at::Tensor>> &lists)
{
    for (const auto &list : lists)
        first.insert(first.end(), list.begin(), list.end());
    return first;
}
} // namespace

c10::intrusive_ptr<c10d::Work> Backend::delegated(const Launch &launch, bool async, Delegate call)
{
    const uint64_t sequence = ++sequence_;
    const char *name = launch.op.name;
    const at::Tensor &where = launch.inputs[0];
    Staging no_copies(true);
    if (!where.is_cuda())
        return noted(call(gloo(name), no_copies, async));
    if (cuda_->bind(where.device(), name) != CudaRoute::stage && nccl_)
        return noted(cuda_->hand_over(launch, async, sequence,
                                      [&](c10d::Backend &nccl) { return call(nccl, no_copies, false); }));
    Staging staging(false);
    if (auto work = call(gloo(name), staging, true))
        work->wait();
    staging.finish();
    return noted(cuda_->finished(launch, async, sequence));
}

/* A send or receive does not count in the sequence number: ranks send and receive different numbers of times.
 * For the same reason it never binds a group to its GPU. */
c10::intrusive_ptr<c10d::Work> Backend::point_to_point(const char *name, c10d::OpType type,
                                                       std::vector<at::Tensor> &tensors, Delegate call)
{
    Staging no_copies(true);
    const at::Tensor &tensor = only(tensors, "tensor", name);
    if (!tensor.is_cuda())
        return noted(call(gloo(name), no_copies, true));
    if (nccl_ && !settings_.cuda.stage) {
        c10d::Backend &nccl = cuda_->nccl(name);
        if (!coalescing_)
            return call(nccl, no_copies, true);
        std::lock_guard<std::mutex> lock(coalesced_mutex_);
        if (!std::exchange(nccl_batch_, true))
            nccl.startCoalescing();
        return call(nccl, no_copies, true); /* endCoalescing() returns one Work for the batch */
    }
    Staging staging(false);
    if (auto work = call(gloo(name), staging, true))
        work->wait();
    staging.finish();
    auto done = c10::make_intrusive<MultiWork>(rank_, type, std::vector<c10::intrusive_ptr<c10d::Work>>());
    return noted(done);
}

/* ---- split --------------------------------------------------------------------------------------- */

bool Backend::supportsSplitting() const
{
    return static_cast<bool>(nccl_);
}

void Backend::eagerConnectSingleDevice(at::Device device)
{
    if (!device.is_cuda())
        return;
    const CudaRoute route = cuda_->bind(device, "eager_connect_single_device");
    if (nccl_ && route != CudaRoute::stage) {
        nccl_->setBoundDeviceId(device);
        nccl_->eagerConnectSingleDevice(device);
    }
}

/* A name that all ranks of the new group choose alike: that of the parent, the ranks, and how many splits into these
 * ranks there were. */
std::string Backend::name_of_split(const std::vector<int> &ranks)
{
    const size_t longest = 64; /* names are part of keys and of error texts */
    std::string name = settings_.comm.name + "/";
    for (int r : ranks)
        name += std::to_string(r) + (r == ranks.back() ? "#" : "+");
    name += std::to_string(++n_splits_[ranks]);
    if (name.size() <= longest)
        return name;
    uint64_t hash = UINT64_C(0xcbf29ce484222325); /* FNV-1a: the same in every process */
    for (char c : name)
        hash = (hash ^ static_cast<unsigned char>(c)) * UINT64_C(0x100000001b3);
    char text[32];
    std::snprintf(text, sizeof text, "split %016" PRIx64, hash);
    return text;
}

c10::intrusive_ptr<c10d::Backend> Backend::split(const c10::intrusive_ptr<c10d::Store> &store,
                                                 const std::vector<int> &ranks,
                                                 const c10::intrusive_ptr<c10d::Backend::Options> &opts)
{
    comm_->check_process("split");
    const auto mine = std::find(ranks.begin(), ranks.end(), rank_);
    if (mine == ranks.end())
        return nullptr;
    std::lock_guard<std::mutex> lock(split_mutex_);
    if (store == last_split_store_.lock()) /* torch makes one for each new group */
        if (auto same = last_split_.lock())
            return same;

    std::vector<int64_t> global_ranks;
    const auto &mine_globally = options_->global_ranks_in_group; /* empty for the default group */
    for (int r : ranks)
        global_ranks.push_back(
            mine_globally.empty() ? r : static_cast<int64_t>(mine_globally.at(static_cast<size_t>(r))));
    GroupSettings settings = settings_;
    /* torch's name of the group, and the prefix of its store, count the groups that this rank is in. Ranks that are in
     * different numbers of groups get different ones, and would wait for each other's keys for ever. */
    settings.comm.name = name_of_split(ranks);
    const auto meeting = c10::make_intrusive<c10d::PrefixStore>("split/" + settings.comm.name, store_);
    if (opts->timeout.count() > 0)
        settings.comm.timeout = opts->timeout;
    auto bare = c10::make_intrusive<c10d::ProcessGroup>(meeting, static_cast<int>(mine - ranks.begin()),
                                                        static_cast<int>(ranks.size()));
    auto child = c10::make_intrusive<Backend>(bare, settings, opts->group_name, global_ranks);
    last_split_store_ = c10::weak_intrusive_ptr<c10d::Store>(store);
    last_split_ = c10::weak_intrusive_ptr<c10d::Backend>(c10::intrusive_ptr<c10d::Backend>(child));
    return child;
}

/* ---- calls that Gloo or NCCL runs ---------------------------------------------------------------- */

c10::intrusive_ptr<c10d::Work> Backend::reduce(std::vector<at::Tensor> &tensors,
                                               const c10d::ReduceOptions &opts)
{
    only(tensors, "tensor", "reduce");
    return delegated(launch_of("reduce", "spccl:reduce", c10d::OpType::REDUCE, tensors), opts.asyncOp,
                     [&](c10d::Backend &backend, Staging &staging, bool async) {
                         std::vector<at::Tensor> list = staging.written(tensors);
                         return backend.reduce(list, with_async(opts, async));
                     });
}

c10::intrusive_ptr<c10d::Work> Backend::gather(std::vector<std::vector<at::Tensor>> &outputs,
                                               std::vector<at::Tensor> &inputs,
                                               const c10d::GatherOptions &opts)
{
    only(inputs, "tensor", "gather");
    return delegated(launch_of("gather", "spccl:gather", c10d::OpType::GATHER, joined(inputs, outputs)),
                     opts.asyncOp, [&](c10d::Backend &backend, Staging &staging, bool async) {
                         std::vector<std::vector<at::Tensor>> to = staging.written(outputs);
                         std::vector<at::Tensor> from = staging.read_only(inputs);
                         return backend.gather(to, from, with_async(opts, async));
                     });
}

c10::intrusive_ptr<c10d::Work> Backend::scatter(std::vector<at::Tensor> &outputs,
                                                std::vector<std::vector<at::Tensor>> &inputs,
                                                const c10d::ScatterOptions &opts)
{
    only(outputs, "tensor", "scatter");
    return delegated(launch_of("scatter", "spccl:scatter", c10d::OpType::SCATTER, joined(outputs, inputs)),
                     opts.asyncOp, [&](c10d::Backend &backend, Staging &staging, bool async) {
                         std::vector<at::Tensor> to = staging.written(outputs);
                         std::vector<std::vector<at::Tensor>> from = staging.read_only(inputs);
                         return backend.scatter(to, from, with_async(opts, async));
                     });
}

c10::intrusive_ptr<c10d::Work> Backend::alltoall_base(at::Tensor &output, at::Tensor &input,
                                                      std::vector<int64_t> &output_splits,
                                                      std::vector<int64_t> &input_splits,
                                                      const c10d::AllToAllOptions &opts)
{
    return delegated(
        launch_of("all_to_all_single", "spccl:all_to_all", c10d::OpType::ALLTOALL_BASE, {input, output}),
        opts.asyncOp, [&](c10d::Backend &backend, Staging &staging, bool async) {
            at::Tensor to = staging.written(output), from = staging.read_only(input);
            return backend.alltoall_base(to, from, output_splits, input_splits, with_async(opts, async));
        });
}

c10::intrusive_ptr<c10d::Work> Backend::alltoall(std::vector<at::Tensor> &outputs,
                                                 std::vector<at::Tensor> &inputs,
                                                 const c10d::AllToAllOptions &opts)
{
    TORCH_CHECK_VALUE(!inputs.empty(), "spccl: all_to_all: input_tensor_list is empty");
    return delegated(
        launch_of("all_to_all", "spccl:all_to_all", c10d::OpType::ALLTOALL, joined(inputs, {outputs})),
        opts.asyncOp, [&](c10d::Backend &backend, Staging &staging, bool async) {
            std::vector<at::Tensor> to = staging.written(outputs), from = staging.read_only(inputs);
            return backend.alltoall(to, from, with_async(opts, async));
        });
}

c10::intrusive_ptr<c10d::Work> Backend::send(std::vector<at::Tensor> &tensors, int peer, int tag)
{
    return point_to_point("send", c10d::OpType::SEND, tensors,
                          [&](c10d::Backend &backend, Staging &staging, bool) {
                              std::vector<at::Tensor> list = staging.read_only(tensors);
                              return backend.send(list, peer, tag);
                          });
}

c10::intrusive_ptr<c10d::Work> Backend::recv(std::vector<at::Tensor> &tensors, int peer, int tag)
{
    return point_to_point("recv", c10d::OpType::RECV, tensors,
                          [&](c10d::Backend &backend, Staging &staging, bool) {
                              std::vector<at::Tensor> list = staging.written(tensors);
                              return backend.recv(list, peer, tag);
                          });
}

c10::intrusive_ptr<c10d::Work> Backend::recvAnysource(std::vector<at::Tensor> &tensors, int tag)
{
    return point_to_point("recv", c10d::OpType::RECVANYSOURCE, tensors,
                          [&](c10d::Backend &backend, Staging &staging, bool) {
                              std::vector<at::Tensor> list = staging.written(tensors);
                              return backend.recvAnysource(list, tag);
                          });
}

/* The barrier runs on the GPU if the group is bound to one, or if the caller names one. Such a barrier also
 * waits for all earlier work on the current streams of all ranks. */
c10::intrusive_ptr<c10d::Work> Backend::barrier(const c10d::BarrierOptions &opts)
{
    CudaRoute route = cuda_->route();
    if (route == CudaRoute::unknown && nccl_ && !opts.device_ids.empty())
        route = cuda_->bind(
            c10::Device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(opts.device_ids[0])), "barrier");
    const uint64_t sequence = ++sequence_;
    if (route == CudaRoute::engine)
        return noted(cuda_->barrier(opts.asyncOp, opts.timeout, sequence));
    if (route == CudaRoute::nccl) {
        c10d::BarrierOptions theirs = opts;
        theirs.device_ids = {cuda_->device().index()};
        return noted(cuda_->nccl("barrier").barrier(theirs));
    }
    return noted(gloo("barrier").barrier(opts));
}

/* Works on a broken group too: it reports which ranks are missing. */
void Backend::monitoredBarrier(const c10d::BarrierOptions &opts, bool wait_all_ranks)
{
    ++sequence_;
    gloo_->monitoredBarrier(opts, wait_all_ranks);
}

} // namespace spccl_torch
