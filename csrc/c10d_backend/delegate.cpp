/* delegate.cpp - the Backend methods that are Gloo's: called through, and counted as calls of the group.
 *
 * On CPU nothing has to order Gloo's work against ours: they share no device queue, and both run while the
 * caller does something else. */
#include "backend.hpp"

namespace spccl_torch
{

c10::intrusive_ptr<c10d::Work> Backend::reduce(std::vector<at::Tensor> &tensors,
                                               const c10d::ReduceOptions &opts)
{
    ++sequence_;
    return gloo("reduce").reduce(tensors, opts);
}

c10::intrusive_ptr<c10d::Work> Backend::gather(std::vector<std::vector<at::Tensor>> &outputs,
                                               std::vector<at::Tensor> &inputs,
                                               const c10d::GatherOptions &opts)
{
    ++sequence_;
    return gloo("gather").gather(outputs, inputs, opts);
}

c10::intrusive_ptr<c10d::Work> Backend::scatter(std::vector<at::Tensor> &outputs,
                                                std::vector<std::vector<at::Tensor>> &inputs,
                                                const c10d::ScatterOptions &opts)
{
    ++sequence_;
    return gloo("scatter").scatter(outputs, inputs, opts);
}

c10::intrusive_ptr<c10d::Work> Backend::alltoall_base(at::Tensor &output, at::Tensor &input,
                                                      std::vector<int64_t> &output_splits,
                                                      std::vector<int64_t> &input_splits,
                                                      const c10d::AllToAllOptions &opts)
{
    ++sequence_;
    return gloo("all_to_all_single").alltoall_base(output, input, output_splits, input_splits, opts);
}

c10::intrusive_ptr<c10d::Work> Backend::alltoall(std::vector<at::Tensor> &outputs,
                                                 std::vector<at::Tensor> &inputs,
                                                 const c10d::AllToAllOptions &opts)
{
    ++sequence_;
    return gloo("all_to_all").alltoall(outputs, inputs, opts);
}

/* Point-to-point calls are not counted: their number differs from rank to rank. */

c10::intrusive_ptr<c10d::Work> Backend::send(std::vector<at::Tensor> &tensors, int peer, int tag)
{
    return gloo("send").send(tensors, peer, tag);
}

c10::intrusive_ptr<c10d::Work> Backend::recv(std::vector<at::Tensor> &tensors, int peer, int tag)
{
    return gloo("recv").recv(tensors, peer, tag);
}

c10::intrusive_ptr<c10d::Work> Backend::recvAnysource(std::vector<at::Tensor> &tensors, int tag)
{
    return gloo("recv").recvAnysource(tensors, tag);
}

c10::intrusive_ptr<c10d::Work> Backend::barrier(const c10d::BarrierOptions &opts)
{
    ++sequence_;
    return gloo("barrier").barrier(opts);
}

/* Asks which rank is missing: of use on a broken group as well. */
void Backend::monitoredBarrier(const c10d::BarrierOptions &opts, bool wait_all_ranks)
{
    ++sequence_;
    gloo_->monitoredBarrier(opts, wait_all_ranks);
}

} // namespace spccl_torch
