/* cuda.hpp - collectives on CUDA tensors: by spccl's GPU engine where the GPUs reach each other, else by NCCL
 * or through host memory. All run in the one order of the device (order.hpp). Their c10d::Work waits on
 * streams.
 *
 * Links no CUDA library: streams and events are torch's generic ones. May include: the headers above it. */
#pragma once

#include "order.hpp"
#include "work.hpp"

#include <atomic>

namespace spccl_torch
{

struct CudaSettings {
    bool engine = true;           /* false: always the fallback */
    bool stage = false;           /* where GPUs do not reach each other: through host memory, not NCCL */
    bool order_per_group = false; /* SPCCL_ORDER=group: see StreamOrder */
    bool blocking_wait = false;   /* SPCCL_BLOCKING_WAIT: calls and wait() return when the GPU is done */
    uint32_t max_ctas = 0;        /* 0 = default; as in spccl_cuda_config */
    size_t inbox_bytes = 0;
};

/* What runs a group's collectives on CUDA tensors. Known after the first of them; the same on all ranks. */
enum class CudaPath { unknown, engine, nccl, stage };

/* Block until the order's current stream has completed. Throws if the group fails or time runs out first.
 *   path      of the group
 *   timeout   0 or kUnsetTimeout = the group's */
void wait_on_host(Comm &comm, StreamOrder &order, CudaPath path, const OpText &op, milliseconds timeout);

/* A collective that was issued to a stream. Holds its tensors until somebody waits for it. If it is dropped
 * before that, the allocator keeps their memory until the stream is past the collective. */
class CudaWork final : public c10d::Work
{
  public:
    /*   host_wait   wait() blocks the host too (a barrier, SPCCL_BLOCKING_WAIT) */
    CudaWork(std::shared_ptr<Comm> comm, std::shared_ptr<StreamOrder> order, const Launch &launch,
             uint64_t sequence, bool host_wait, CudaPath path);
    ~CudaWork() override;

    /* Tells the stream of the collective, on which `end` was recorded behind it. Called once. */
    void enqueued(const c10::Stream &stream, StreamOrder::EventPtr end);

    /* Whether the GPU is done. Must not be called while a graph is being captured. */
    bool isCompleted() override;
    bool isSuccess() const override;
    /* What broke the group; NULL if this work was seen complete before the group broke. */
    std::exception_ptr exception() const override;
    std::vector<at::Tensor> result() override;
    /* The caller's current stream waits; the host does not. Throws if the group is broken. */
    void synchronize() override;
    /* As synchronize(). With a timeout, or if the group's waits block, the host waits too. */
    bool wait(milliseconds timeout = kNoTimeout) override;
    void blockCurrentStream();
    void abort() override;
    /* Complete from the start, as NCCL's is: callbacks run at once, on a stream that waits for the tensors. */
    c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
    uint64_t getSequencenumber() const override;

  private:
    std::exception_ptr broken() const;
    void release();

    const std::shared_ptr<Comm> comm_;
    const std::shared_ptr<StreamOrder> order_;
    const OpText op_;
    const std::vector<at::Tensor> outputs_;
    const uint64_t sequence_;
    const bool host_wait_;
    const CudaPath path_;
    std::optional<c10::Stream> stream_;
    StreamOrder::EventPtr end_;     /* recorded behind the collective */
    std::atomic<bool> fine_{false}; /* seen complete while the group was not broken */
    std::mutex held_mutex_;
    std::vector<at::Tensor> held_; /* guarded by held_mutex_; empty once somebody has waited */
    std::mutex future_mutex_;
    c10::intrusive_ptr<c10::ivalue::Future> future_;
};

/* The CUDA side of one group. */
class CudaSide
{
  public:
    /*   nccl   over the same ranks, for what is not ours; NULL where torch has none */
    CudaSide(std::shared_ptr<Comm> comm, c10::intrusive_ptr<c10d::Backend> nccl,
             const CudaSettings &settings);

    bool has_nccl() const
    {
        return static_cast<bool>(nccl_);
    }
    /* Throws if there is none; `op` goes into the text. */
    c10d::Backend &nccl(const char *op);

    /* What runs collectives on tensors of `device`. The first call binds the group to that GPU, so all ranks
     * must make it at the same place in their order. Throws ValueError for another GPU than the group's, and
     * what attaching throws. */
    CudaPath attached_path(const c10::Device &device, const char *op);
    CudaPath known_path() const
    {
        return path_.load(std::memory_order_acquire);
    }
    const CudaSettings &settings() const
    {
        return settings_;
    }
    /* The group's GPU. Call only when the path is known, as why(): the reason for the path. */
    c10::Device device() const
    {
        return order_->device();
    }
    const std::string &why() const
    {
        return why_;
    }

    /* Issue a prepared collective of spccl's. attached_path() was called. Returns NULL if not `async`.
     *   by_nccl   run it by NCCL, whatever the path is */
    c10::intrusive_ptr<c10d::Work> start(const Launch &launch, bool async, uint64_t sequence,
                                         bool by_nccl = false);
    /* Run `call(nccl)` in the group's order, with asyncOp false. launch.inputs and launch.outputs are kept
     * until it is done. */
    c10::intrusive_ptr<c10d::Work>
    hand_over(const Launch &launch, bool async, uint64_t sequence,
              c10::function_ref<c10::intrusive_ptr<c10d::Work>(c10d::Backend &)> call);
    /* Completes when all ranks have called it and this GPU's current stream has completed. Waits on the host. */
    c10::intrusive_ptr<c10d::Work> barrier(bool async, milliseconds timeout, uint64_t sequence);
    /* A Work for what is on the current stream already. NULL if not `async`. */
    c10::intrusive_ptr<c10d::Work> finished(const Launch &launch, bool async, uint64_t sequence);

  private:
    using Enqueue = c10::function_ref<void(StreamOrder::Turn &turn)>;
    CudaPath attach(const c10::Device &device, const char *op);
    c10::intrusive_ptr<c10d::Work> in_order(const Launch &launch, bool async, uint64_t sequence,
                                            bool host_wait, Enqueue enqueue);
    c10::intrusive_ptr<c10d::Work> run_staged(Launch launch, bool async, uint64_t sequence);
    void call_ours(const Launch &launch, StreamOrder::Turn &turn);
    c10::intrusive_ptr<c10d::Work> call_nccl(const Launch &launch);

    const std::shared_ptr<Comm> comm_;
    const c10::intrusive_ptr<c10d::Backend> nccl_;
    const CudaSettings settings_;
    std::mutex attach_mutex_;
    std::atomic<CudaPath> path_{CudaPath::unknown}; /* set last: the rest is constant then */
    std::shared_ptr<StreamOrder> order_;
    std::string why_;
};

} // namespace spccl_torch
