/* backend.hpp - spccl as a c10d::Backend for CPU and CUDA tensors. spccl runs all-gather, reduce-scatter,
 * all-reduce (of sparse_coo tensors too) and broadcast. An inner Gloo or NCCL runs everything else.
 *
 * reduction_route (tensor.cpp) and, for CUDA tensors, CudaSide (cuda.hpp) decide which library runs a call.
 * docs/TORCH.md shows the table. This file knows no Python and no CUDA library. May include: the headers
 * above it in this folder. */
#pragma once

#include "cuda.hpp"
#include "sparse.hpp"
#include "work.hpp"

#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace spccl_torch
{

/* Copies CUDA tensors to host memory, where Gloo can take them. With no_copies it returns the tensors
 * themselves. */
class Staging
{
  public:
    explicit Staging(bool no_copies) : no_copies_(no_copies)
    {
    }
    /* For tensors that the call reads. */
    at::Tensor read_only(const at::Tensor &t)
    {
        return no_copies_ ? t : t.cpu();
    }
    /* For tensors that the call writes; finish() copies the result back to them. */
    at::Tensor written(const at::Tensor &t);
    /* Of lists of tensors, and of lists of lists. */
    template <class T> std::vector<T> read_only(const std::vector<T> &list)
    {
        std::vector<T> copies;
        for (const T &t : list)
            copies.push_back(read_only(t));
        return copies;
    }
    template <class T> std::vector<T> written(const std::vector<T> &list)
    {
        std::vector<T> copies;
        for (const T &t : list)
            copies.push_back(written(t));
        return copies;
    }
    void finish();

  private:
    const bool no_copies_;
    std::vector<std::pair<at::Tensor, at::Tensor>> copy_back_; /* to, from */
};

/* torch's options of a call, for the inner Gloo or NCCL. */
template <class Options> Options with_async(Options opts, bool async)
{
    opts.asyncOp = async;
    return opts;
}

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

    /* Join the group: returns when every rank has joined. Throws if that fails or takes too long.
     *   bare      a group of the same ranks that holds a Store of this group alone; gets the inner Gloo (CPU), and
     *             the inner NCCL (CUDA) where torch has one
     *   settings  timeout and so on; its name is the key of the group in the store
     *   name      torch's of the group */
    Backend(const c10::intrusive_ptr<c10d::ProcessGroup> &bare, GroupSettings settings,
            const std::string &name, const std::vector<int64_t> &global_ranks);
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

    /* Both are true only if there is an inner NCCL: torch asks for them only for GPUs. */
    bool supportsSplitting() const;
    bool supportsCoalescing() const;
    /* A new group of some ranks of this one; NULL on the other ranks. torch asks once per device type, and
     * gets the same object each time. ncclCommSplit is not used: it needs all ranks of the parent, and the
     * parent's communicator may not be connected yet. The new group meets in the parent's store, under a name that
     * its ranks choose alike: the prefix of `store` and the name in `opts` may differ between ranks. All ranks of the
     * new group must split into these ranks equally often, counting splits that fail.
     *   ranks   of this group, ascending
     *   store   tells calls for the same group apart from calls for the next one */
    c10::intrusive_ptr<c10d::Backend> split(const c10::intrusive_ptr<c10d::Store> &store,
                                            const std::vector<int> &ranks,
                                            const c10::intrusive_ptr<c10d::Backend::Options> &opts) override;
    /* Bind the group to its GPU now, and connect NCCL. */
    void eagerConnectSingleDevice(at::Device device) override;
    /* Point-to-point calls between these two go to NCCL as one batch. endCoalescing returns a Work for
     * all. */
    void startCoalescing() override;
    c10::intrusive_ptr<c10d::Work> endCoalescing() override;

    /* Run by spccl. */
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

    /* Prune `grad`, in GPU memory, and average it in place. `stream` is the current one, a cudaStream_t: what need not
     * wait for earlier collectives runs there. The plan lives until the Work is complete; the options are copied. */
    c10::intrusive_ptr<c10d::Work> pruned_all_reduce(at::Tensor grad, spccl_prune_plan *plan,
                                                     const spccl_prune_options &options, void *stream);

    /* The sum, or the mean, of 16-bit floats before it is rounded. NCCL gets float32.
     *   output   [n] float32
     *   input    [size * n] float16 or bfloat16, beside the output; both plain */
    c10::intrusive_ptr<c10d::Work> reduce_scatter_wide(at::Tensor output, at::Tensor input, bool mean);

    /* Run by Gloo or NCCL (delegate.cpp). */
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
    std::string describe_link(int peer)
    {
        return comm_->describe_link(peer);
    }

  private:
    /* Gloo, for the call `op`. Throws if the group is broken or shut down. */
    c10d::Backend &gloo(const char *op);
    c10::intrusive_ptr<c10d::Work> start(Launch launch, bool async);
    std::string name_of_split(const std::vector<int> &ranks); /* split_mutex_ is held */
    /* `plan` and `pruning`: of stage 2 of a pruned all-reduce, else NULL. */
    c10::intrusive_ptr<c10d::Work> all_reduce(std::vector<at::Tensor> &tensors,
                                              const c10d::AllreduceOptions &opts, spccl_prune_plan *plan,
                                              const spccl_prune_options *pruning);
    /* Whether Gloo or NCCL runs this reduction of `t`, not spccl. Refuses one that none of them runs. Then binds the
     * group to the GPU of `t`, if it has one. */
    bool inner_runs(const at::Tensor &t, c10d::ReduceOp::RedOpType redop, const OpText &op);
    /* Calls Gloo or NCCL with the tensors that `Staging` returns. */
    using Delegate = c10::function_ref<c10::intrusive_ptr<c10d::Work>(c10d::Backend &backend,
                                                                      Staging &staging, bool async)>;
    /* A collective run by Gloo, or by NCCL if launch.inputs[0] is a CUDA tensor. */
    c10::intrusive_ptr<c10d::Work> delegated(const Launch &launch, bool async, Delegate call);
    /* Run a send or receive. It is not in the collective order. */
    c10::intrusive_ptr<c10d::Work> point_to_point(const char *name, c10d::OpType type,
                                                  std::vector<at::Tensor> &tensors, Delegate call);
    /* Returns `work`, and keeps it for endCoalescing() if torch is coalescing. */
    c10::intrusive_ptr<c10d::Work> noted(c10::intrusive_ptr<c10d::Work> work);
    /* Every rank's `mine`, [size, ...], on the current stream. */
    at::Tensor gathered(const at::Tensor &mine, milliseconds timeout);
    c10::intrusive_ptr<c10d::Work> start_reduce_scatter(Launch launch, const at::Tensor &output,
                                                        const at::Tensor &input,
                                                        const c10d::ReduceScatterOptions &opts);
    /* Start one(i, whether it returns a Work) for every tensor without waiting in between; returns one Work for all. */
    c10::intrusive_ptr<c10d::Work>
    coalesced(const std::vector<at::Tensor> &tensors, bool async, c10d::OpType type,
              c10::function_ref<c10::intrusive_ptr<c10d::Work>(size_t, bool)> one);

    const c10::intrusive_ptr<c10d::Store> store_;
    const GroupSettings settings_;
    const std::shared_ptr<Comm> comm_;
    const c10::intrusive_ptr<c10d::Backend> gloo_, nccl_;
    const std::shared_ptr<SerialThread> completer_;
    const std::shared_ptr<SparseRunner> sparse_;
    const std::unique_ptr<CudaSide> cuda_;
    const c10::intrusive_ptr<Options> options_;
    std::atomic<uint64_t> sequence_{0};
    std::mutex split_mutex_;
    std::map<std::vector<int>, uint64_t> n_splits_; /* by ranks; split_mutex_ guards this and the next two */
    c10::weak_intrusive_ptr<c10d::Store> last_split_store_;
    c10::weak_intrusive_ptr<c10d::Backend> last_split_;
    std::atomic<bool> coalescing_{false};
    std::mutex coalesced_mutex_;
    bool nccl_batch_ = false; /* NCCL collects a batch; coalesced_mutex_ guards this and the next */
    std::vector<c10::intrusive_ptr<c10d::Work>> coalesced_;
};

/* Let _torch_inner.py add the inner Gloo and NCCL to `bare`. Returns Gloo, which listens at `local_ip`. */
c10::intrusive_ptr<c10d::Backend> add_inner_groups(const c10::intrusive_ptr<c10d::ProcessGroup> &bare,
                                                   const std::string &name,
                                                   const std::vector<int64_t> &global_ranks,
                                                   const GroupSettings &settings,
                                                   const std::string &local_ip);

} // namespace spccl_torch
