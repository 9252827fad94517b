/* backend.hpp - spccl as a c10d::Backend for CPU and CUDA tensors: the sparse four (all-gather,
 * reduce-scatter, all-reduce, broadcast) and sparse_coo all-reduce are ours, everything else is an inner
 * Gloo's or NCCL's.
 *
 * Which call goes where is decided by reduction_taker (tensor.cpp) and, on CUDA, by CudaSide; docs/TORCH.md
 * shows the table. Knows no Python and no CUDA library. May include: the headers above it in this folder. */
#pragma once

#include "cuda.hpp"
#include "sparse.hpp"
#include "work.hpp"

#include <atomic>
#include <memory>
#include <string>
#include <vector>

namespace spccl_torch
{

/* CUDA tensors as Gloo can take them: copies in host memory. Idle, it hands tensors through as they are. */
class Staging
{
  public:
    explicit Staging(bool idle) : idle_(idle)
    {
    }
    /* For tensors that are read only. */
    at::Tensor in(const at::Tensor &t)
    {
        return idle_ ? t : t.cpu();
    }
    /* For tensors that are written, too; finish() brings the copy back. */
    at::Tensor both(const at::Tensor &t);
    std::vector<at::Tensor> in(const std::vector<at::Tensor> &list);
    std::vector<at::Tensor> both(const std::vector<at::Tensor> &list);
    std::vector<std::vector<at::Tensor>> in(const std::vector<std::vector<at::Tensor>> &lists);
    std::vector<std::vector<at::Tensor>> both(const std::vector<std::vector<at::Tensor>> &lists);
    void finish();

  private:
    const bool idle_;
    std::vector<std::pair<at::Tensor, at::Tensor>> back_; /* to, from */
};

struct GroupSettings {
    CommSettings comm;
    CudaSettings cuda;
};

class Backend final : public c10d::Backend
{
  public:
    struct Options final : c10d::Backend::Options {
        explicit Options(milliseconds group_timeout) : c10d::Backend::Options("spccl", group_timeout)
        {
        }
    };

    /* Join the group: returns when every rank is there. Throws if that fails or takes too long.
     *   scratch   carries the Store, of this group alone; Gloo for CPU; NCCL for CUDA, where torch has one.
     *             The inner groups, over the same ranks, take what is not ours
     *   settings  timeout, name and so on */
    Backend(const c10::intrusive_ptr<c10d::ProcessGroup> &scratch, GroupSettings settings,
            std::vector<uint64_t> global_ranks);
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

    /* Both only where there is NCCL: a group of CPU tensors is as it always was for torch. */
    bool supportsSplitting() const;
    bool supportsCoalescing() const;
    /* A new group of some ranks of this one, NULL on the others. torch asks once per device type: those calls
     * get the same object. NCCL's own split is not used: it wants all ranks of the parent, and its fresh
     * communicators are lazy.
     *   ranks   of this group, ascending */
    c10::intrusive_ptr<c10d::Backend> split(const c10::intrusive_ptr<c10d::Store> &store,
                                            const std::vector<int> &ranks,
                                            const c10::intrusive_ptr<c10d::Backend::Options> &opts) override;
    /* Give the group its GPU now, and connect NCCL. */
    void eagerConnectSingleDevice(at::Device device) override;
    /* Between these two, point-to-point calls go to NCCL as one batch, and works are gathered. */
    void startCoalescing() override;
    c10::intrusive_ptr<c10d::Work> endCoalescing() override;

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

    /* Gloo's and NCCL's (delegate.cpp). */
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

    /* For spccl.backend.stats, cuda_stats and describe_link. */
    spccl_stats stats();
    CudaSide &cuda()
    {
        return *cuda_;
    }
    spccl_cuda_stats cuda_stats();
    std::string describe_link(int peer);

  private:
    /* Gloo, for the call `op`. A group that is broken or shut down is so for Gloo's calls too: throws why. */
    c10d::Backend &gloo(const char *op);
    c10::intrusive_ptr<c10d::Work> start(Launch launch, bool async);
    /* A reduction that is NCCL's: not ours, or scaled, which NCCL does on the way. */
    bool is_nccls(const at::Tensor &t, Taker taker, const char *op);
    /* A call of what is not ours, with the tensors that `Staging` gives. */
    using Delegate = c10::function_ref<c10::intrusive_ptr<c10d::Work>(c10d::Backend &backend,
                                                                      Staging &staging, bool async)>;
    /* A collective that is Gloo's, or NCCL's if launch.inputs[0] is a CUDA tensor. */
    c10::intrusive_ptr<c10d::Work> delegated(const Launch &launch, bool async, Delegate call);
    /* A send or receive: in no order but its own. */
    c10::intrusive_ptr<c10d::Work> point_to_point(const char *name, c10d::OpType type,
                                                  std::vector<at::Tensor> &tensors, Delegate call);
    /* `work`, remembered if torch is coalescing. */
    c10::intrusive_ptr<c10d::Work> noted(c10::intrusive_ptr<c10d::Work> work);
    /* Every rank's `mine`, [size, ...], on the current stream. */
    at::Tensor gathered(const at::Tensor &mine, milliseconds timeout);
    c10::intrusive_ptr<c10d::Work> start_reduce_scatter(Launch launch, const at::Tensor &output,
                                                        const at::Tensor &input,
                                                        const c10d::ReduceScatterOptions &opts);
    /* Start `one(i)` for every i < n, all in flight at once, as one Work. */
    c10::intrusive_ptr<c10d::Work> coalesced(size_t n, bool async, c10d::OpType type,
                                             c10::function_ref<c10::intrusive_ptr<c10d::Work>(size_t)> one);

    const c10::intrusive_ptr<c10d::Store> store_;
    const c10::intrusive_ptr<c10d::Backend> gloo_, nccl_;
    const GroupSettings settings_;
    const std::shared_ptr<Comm> comm_;
    const std::shared_ptr<SerialThread> completer_;
    const std::shared_ptr<SparseRunner> sparse_;
    const std::unique_ptr<CudaSide> cuda_;
    const c10::intrusive_ptr<Options> options_;
    std::atomic<uint64_t> sequence_{0};
    std::mutex split_mutex_;
    std::string last_split_name_; /* guarded by split_mutex_, as the next */
    c10::weak_intrusive_ptr<c10d::Backend> last_split_;
    std::atomic<bool> coalescing_{false};
    std::mutex coalesced_mutex_;
    bool nccl_batch_ = false; /* guarded by coalesced_mutex_, as the next: NCCL has been told to gather */
    std::vector<c10::intrusive_ptr<c10d::Work>> coalesced_;
};

/* What a call of Gloo's or NCCL's is called.
 *   used   its tensors: kept until it is done; the first says on which device the call is */
Launch described(const char *name, const char *title, c10d::OpType type, std::vector<at::Tensor> used);

} // namespace spccl_torch
