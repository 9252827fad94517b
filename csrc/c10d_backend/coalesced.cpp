/* coalesced.cpp - several collectives as one: torch's coalesced calls, and its batches of point-to-point
 * calls. */
#include "backend.hpp"

namespace spccl_torch
{

c10::intrusive_ptr<c10d::Work>
Backend::coalesced(const std::vector<at::Tensor> &tensors, bool async, c10d::OpType type,
                   c10::function_ref<c10::intrusive_ptr<c10d::Work>(size_t, bool)> one)
{
    if (!async && tensors.empty())
        return nullptr;
    std::vector<c10::intrusive_ptr<c10d::Work>> parts;
    for (size_t i = 0; i < tensors.size(); i++)
        parts.push_back(one(i, async || !tensors[0].is_cuda()));
    auto work = c10::make_intrusive<MultiWork>(rank_, type, std::move(parts));
    if (async)
        return work;
    work->wait();
    return nullptr;
}

c10::intrusive_ptr<c10d::Work> Backend::allreduce_coalesced(std::vector<at::Tensor> &tensors,
                                                            const c10d::AllreduceCoalescedOptions &opts)
{
    return coalesced(tensors, opts.asyncOp, c10d::OpType::ALLREDUCE_COALESCED, [&](size_t i, bool async) {
        std::vector<at::Tensor> one{tensors[i]};
        return allreduce(one, with_async<c10d::AllreduceOptions>(opts, async));
    });
}

c10::intrusive_ptr<c10d::Work> Backend::allgather_coalesced(std::vector<std::vector<at::Tensor>> &outputs,
                                                            std::vector<at::Tensor> &inputs,
                                                            const c10d::AllgatherOptions &opts)
{
    const char *name = "all_gather_coalesced";
    check_list(outputs, size_, "output_tensor_lists", name);
    for (const auto &list : outputs)
        TORCH_CHECK_VALUE(list.size() == inputs.size(), "spccl: ", name,
                          ": a list of output_tensor_lists has ", std::to_string(list.size()),
                          " tensors, wanted ", std::to_string(inputs.size()), ", one per input tensor");
    return coalesced(inputs, opts.asyncOp, c10d::OpType::ALLGATHER_COALESCED, [&](size_t i, bool async) {
        std::vector<std::vector<at::Tensor>> out(1);
        for (const auto &of_rank : outputs)
            out[0].push_back(of_rank[i]);
        std::vector<at::Tensor> in{inputs[i]};
        return allgather(out, in, with_async(opts, async));
    });
}

static void check_pairs(const std::vector<at::Tensor> &outputs, const std::vector<at::Tensor> &inputs,
                        const char *name)
{
    TORCH_CHECK_VALUE(outputs.size() == inputs.size(), "spccl: ", name, ": ", std::to_string(outputs.size()),
                      " outputs for ", std::to_string(inputs.size()), " inputs");
}

c10::intrusive_ptr<c10d::Work> Backend::allgather_into_tensor_coalesced(std::vector<at::Tensor> &outputs,
                                                                        std::vector<at::Tensor> &inputs,
                                                                        const c10d::AllgatherOptions &opts)
{
    check_pairs(outputs, inputs, "all_gather_into_tensor_coalesced");
    return coalesced(inputs, opts.asyncOp, c10d::OpType::COALESCED, [&](size_t i, bool async) {
        return _allgather_base(outputs[i], inputs[i], with_async(opts, async));
    });
}

c10::intrusive_ptr<c10d::Work>
Backend::reduce_scatter_tensor_coalesced(std::vector<at::Tensor> &outputs, std::vector<at::Tensor> &inputs,
                                         const c10d::ReduceScatterOptions &opts)
{
    check_pairs(outputs, inputs, "reduce_scatter_tensor_coalesced");
    return coalesced(inputs, opts.asyncOp, c10d::OpType::COALESCED, [&](size_t i, bool async) {
        return _reduce_scatter_base(outputs[i], inputs[i], with_async(opts, async));
    });
}

/* ---- batches ------------------------------------------------------------------------------------- */

c10::intrusive_ptr<c10d::Work> Backend::noted(c10::intrusive_ptr<c10d::Work> work)
{
    if (coalescing_ && work) {
        std::lock_guard<std::mutex> lock(coalesced_mutex_);
        coalesced_.push_back(work);
    }
    return work;
}

bool Backend::supportsCoalescing() const
{
    return static_cast<bool>(nccl_);
}

void Backend::startCoalescing()
{
    comm_->check_process("a batch of calls");
    std::lock_guard<std::mutex> lock(coalesced_mutex_);
    coalesced_.clear(); /* of a batch that an exception left open: torch does not end such a batch */
    if (std::exchange(nccl_batch_, false))
        nccl_->endCoalescing();
    coalescing_ = true;
}

c10::intrusive_ptr<c10d::Work> Backend::endCoalescing()
{
    comm_->check_process("a batch of calls");
    std::lock_guard<std::mutex> lock(coalesced_mutex_);
    coalescing_ = false;
    std::vector<c10::intrusive_ptr<c10d::Work>> parts = std::exchange(coalesced_, {});
    if (std::exchange(nccl_batch_, false))
        parts.push_back(nccl_->endCoalescing());
    if (parts.size() == 1)
        return parts[0];
    return c10::make_intrusive<MultiWork>(rank_, c10d::OpType::COALESCED, std::move(parts));
}

} // namespace spccl_torch
