/* backend.hpp - spccl as a c10d::Backend for CPU tensors: the sparse four (all-gather, reduce-scatter,
 * all-reduce, broadcast) and sparse_coo all-reduce are ours, everything else is an inner Gloo's.
 *
 * Which call goes where is decided by reduction_taker (tensor.cpp) and by nothing else; docs/TORCH.md shows
 * the table. Knows no Python and no CUDA. May include: the headers above it in this folder. */
#pragma once

#include "sparse.hpp"
#include "work.hpp"

#include <atomic>
#include <memory>
#include <string>
#include <vector>

namespace spccl_torch
{

class Backend final : public c10d::Backend
{
  public:
    struct Options final : c10d::Backend::Options {
        explicit Options(milliseconds group_timeout) : c10d::Backend::Options("spccl", group_timeout)
        {
        }
    };

    /* Join the group: returns when every rank is there. Throws if that fails or takes too long.
     *   store     of this group alone; kept for the sparse lane
     *   gloo      the same ranks, for what is not ours */
    Backend(c10::intrusive_ptr<c10d::Store> store, c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size,
            const CommSettings &settings, std::vector<uint64_t> global_ranks);
    ~Backend() override;

    const std::string getBackendName() const override
    {
        return "spccl";
    }
    c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override;
    void setGroupUid(const std::string &uid);
    void setTimeout(milliseconds timeout) override;
    void setSequenceNumberForGroup() override;
    uint64_t getSequenceNumberForGroup() override;
    c10d::ErrorType getError() override;
    void abort() override;
    void shutdown() override;

    /* Ours. */
    c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor> &tensors,
                                             const c10d::BroadcastOptions &opts) override;
    c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor> &tensors,
                                             const c10d::AllreduceOptions &opts) override;
    c10::intrusive_ptr<c10d::Work> allreduce_sparse(std::vector<at::Tensor> &tensors,
                                                    const c10d::AllreduceOptions &opts) override;
    c10::intrusive_ptr<c10d::Work> allreduce_coalesced(std::vector<at::Tensor> &tensors,
                                                       const c10d::AllreduceCoalescedOptions &opts) override;
    c10::intrusive_ptr<c10d::Work> allgather(std::vector<std::vector<at::Tensor>> &outputs,
                                             std::vector<at::Tensor> &inputs,
                                             const c10d::AllgatherOptions &opts) override;
    c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor &output, at::Tensor &input,
                                                   const c10d::AllgatherOptions &opts) override;
    c10::intrusive_ptr<c10d::Work> allgather_coalesced(std::vector<std::vector<at::Tensor>> &outputs,
                                                       std::vector<at::Tensor> &inputs,
                                                       const c10d::AllgatherOptions &opts) override;
    c10::intrusive_ptr<c10d::Work>
    allgather_into_tensor_coalesced(std::vector<at::Tensor> &outputs, std::vector<at::Tensor> &inputs,
                                    const c10d::AllgatherOptions &opts) override;
    c10::intrusive_ptr<c10d::Work> reduce_scatter(std::vector<at::Tensor> &outputs,
                                                  std::vector<std::vector<at::Tensor>> &inputs,
                                                  const c10d::ReduceScatterOptions &opts) override;
    c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(at::Tensor &output, at::Tensor &input,
                                                        const c10d::ReduceScatterOptions &opts) override;
    c10::intrusive_ptr<c10d::Work>
    reduce_scatter_tensor_coalesced(std::vector<at::Tensor> &outputs, std::vector<at::Tensor> &inputs,
                                    const c10d::ReduceScatterOptions &opts) override;

    /* Gloo's (delegate.cpp). */
    c10::intrusive_ptr<c10d::Work> reduce(std::vector<at::Tensor> &tensors,
                                          const c10d::ReduceOptions &opts) override;
    c10::intrusive_ptr<c10d::Work> gather(std::vector<std::vector<at::Tensor>> &outputs,
                                          std::vector<at::Tensor> &inputs,
                                          const c10d::GatherOptions &opts) override;
    c10::intrusive_ptr<c10d::Work> scatter(std::vector<at::Tensor> &outputs,
                                           std::vector<std::vector<at::Tensor>> &inputs,
                                           const c10d::ScatterOptions &opts) override;
    c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor &output, at::Tensor &input,
                                                 std::vector<int64_t> &output_splits,
                                                 std::vector<int64_t> &input_splits,
                                                 const c10d::AllToAllOptions &opts) override;
    c10::intrusive_ptr<c10d::Work> alltoall(std::vector<at::Tensor> &outputs, std::vector<at::Tensor> &inputs,
                                            const c10d::AllToAllOptions &opts) override;
    c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor> &tensors, int peer, int tag) override;
    c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor> &tensors, int peer, int tag) override;
    c10::intrusive_ptr<c10d::Work> recvAnysource(std::vector<at::Tensor> &tensors, int tag) override;
    c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions &opts) override;
    void monitoredBarrier(const c10d::BarrierOptions &opts, bool wait_all_ranks) override;

    /* For spccl.backend.stats and describe_link. */
    spccl_stats stats();
    std::string describe_link(int peer);

  private:
    /* Gloo, for the call `op`. A group that is broken or shut down is so for Gloo's calls too: throws why. */
    c10d::Backend &gloo(const char *op);
    c10::intrusive_ptr<c10d::Work> start(Launch launch, bool async);
    c10::intrusive_ptr<c10d::Work> start_reduce_scatter(Launch launch, const at::Tensor &output,
                                                        const at::Tensor &input,
                                                        const c10d::ReduceScatterOptions &opts);
    /* Start `one(i)` for every i < n, all in flight at once, as one Work. */
    template <class One>
    c10::intrusive_ptr<c10d::Work> coalesced(size_t n, bool async, c10d::OpType type, One &&one);

    const c10::intrusive_ptr<c10d::Backend> gloo_;
    const std::shared_ptr<Comm> comm_;
    const std::shared_ptr<SerialThread> completer_;
    const std::shared_ptr<SparseLane> sparse_;
    const c10::intrusive_ptr<Options> options_;
    std::atomic<uint64_t> sequence_{0};
};

} // namespace spccl_torch
