/* cuda.hpp - collectives on CUDA tensors. spccl's GPU engine runs them if the GPUs reach each other; if not,
 * NCCL runs them, or they go through host memory. All are in the collective order of the device (order.hpp).
 * Waiting for their c10d::Work makes a stream wait, not the host.
 *
 * Links no CUDA library: streams and events are torch's generic ones. May include: the headers above it. */
#pragma once

#include "order.hpp"
#include "work.hpp"

#include <atomic>

namespace spccl_torch
{

struct CudaSettings {
    bool engine = true;           /* false: always take the fallback */
    bool stage = false;           /* the fallback is host memory, not NCCL */
    uint32_t between_hosts = 0;   /* as in spccl_cuda_config */
    bool order_per_group = false; /* SPCCL_ORDER=group: a CollectiveOrder for this group alone */
    bool blocking_wait = false;   /* SPCCL_BLOCKING_WAIT: calls and wait() return when the GPU is done */
    uint32_t max_ctas = 0;        /* 0 = default; as in spccl_cuda_config */
    size_t inbox_bytes = 0;
};

/* What runs a group's collectives on CUDA tensors: spccl's GPU engine, NCCL, or ("stage") spccl's host
 * collectives on copies in host memory. Known after the first CUDA collective; the same on all ranks. */
enum class CudaRoute { unknown, engine, nccl, stage };

/* Block until torch's current stream of order.device() has completed. Throws if the group fails or time runs
 * out first.
 *   route     of the group
 *   timeout   0 or kUnsetTimeout = the group's */
void wait_on_host(Comm &comm, CollectiveOrder &order, CudaRoute route, const OpText &op,
                  milliseconds timeout);

/* A collective that was issued to a stream. A CudaWork holds its tensors until somebody waits for it. If the
 * CudaWork is dropped before, the allocator keeps the memory of the tensors until the stream has completed
 * the collective. */
class CudaWork final : public CollectiveWork
{
  public:
    /*   host_wait   wait() blocks the host too (a barrier, SPCCL_BLOCKING_WAIT) */
    CudaWork(std::shared_ptr<Comm> comm, std::shared_ptr<CollectiveOrder> order, const Launch &launch,
             uint64_t sequence, bool host_wait, CudaRoute route);
    ~CudaWork() override;

    /* Sets the stream of the collective, and the event that was recorded there after it. Call once. */
    void enqueued(const c10::Stream &stream, CollectiveOrder::EventPtr end);

    /* Whether the GPU is done. Must not be called while a graph is being captured. */
    bool isCompleted() override;
    /* What broke the group; NULL if this work was seen complete before the group broke. */
    std::exception_ptr exception() const override;
    std::vector<at::Tensor> result() override;
    /* The caller's current stream waits; the host does not. Throws if the group is broken. */
    void synchronize() override;
    /* As synchronize(). With a timeout, or if the group's waits block, the host waits too. */
    bool wait(milliseconds timeout = kNoTimeout) override;
    /* The future is complete at once, as NCCL's is. Its callbacks run on a stream that waits for the
     * tensors. */
    c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

  private:
    std::exception_ptr broken() const;
    void release();

    const std::shared_ptr<CollectiveOrder> order_;
    const OpText op_;
    const std::vector<at::Tensor> outputs_;
    const bool host_wait_;
    const CudaRoute route_;
    std::optional<c10::Stream> stream_;
    CollectiveOrder::EventPtr end_; /* recorded after the collective */
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
    /*   nccl   has the same ranks, runs what spccl does not; NULL if this torch has no NCCL */
    CudaSide(std::shared_ptr<Comm> comm, c10::intrusive_ptr<c10d::Backend> nccl,
             const CudaSettings &settings);

    bool has_nccl() const
    {
        return static_cast<bool>(nccl_);
    }
    /* The inner NCCL. Throws if there is none; `op` goes into the text. */
    c10d::Backend &nccl(const char *op);

    /* Bind the group to this GPU, if that has not happened, and return its route. All ranks must make the first
     * call at the same point of their sequence of calls. Throws ValueError for another GPU than the group's, and
     * what Comm::attach_cuda throws. */
    CudaRoute bind(const c10::Device &device, const char *op);
    /* What runs collectives on CUDA tensors. Asking binds nothing. */
    CudaRoute route() const
    {
        return route_.load(std::memory_order_acquire);
    }
    const CudaSettings &settings() const
    {
        return settings_;
    }
    /* The group's GPU. Call device() and why() only when the group is bound. */
    c10::Device device() const
    {
        return order_->device();
    }
    /* The reason for the route `nccl` or `stage`. */
    const std::string &why() const
    {
        return why_;
    }

    /* Most thread blocks of the collectives of spccl's GPU engine that are issued from now on; 0 = all of the
     * group's. Returns the number before. A number above the group's fails at the next collective. */
    uint64_t limit_ctas(uint64_t max_ctas)
    {
        return max_ctas_.exchange(max_ctas);
    }

    /* Issue a prepared collective. The caller has called bind(). Returns NULL if not `async`. */
    c10::intrusive_ptr<c10d::Work> start(const Launch &launch, bool async, uint64_t sequence);
    /* Run `call(nccl)` as the next of the collective order; `call` sets asyncOp to false. launch.inputs and
     * launch.outputs are kept until NCCL's collective is done. */
    c10::intrusive_ptr<c10d::Work>
    hand_over(const Launch &launch, bool async, uint64_t sequence,
              c10::function_ref<c10::intrusive_ptr<c10d::Work>(c10d::Backend &)> call);
    /* Complete when all ranks have called barrier() and this GPU's current stream has completed. The host
     * waits too. */
    c10::intrusive_ptr<c10d::Work> barrier(bool async, milliseconds timeout, uint64_t sequence);
    /* A Work that is complete when the current stream has completed what is on it now. NULL if not
     * `async`. */
    c10::intrusive_ptr<c10d::Work> finished(const Launch &launch, bool async, uint64_t sequence);

  private:
    using Enqueue = c10::function_ref<void(CollectiveOrder::Entry &entry)>;
    CudaRoute attach(const c10::Device &device, const char *op);
    c10::intrusive_ptr<c10d::Work> in_order(const Launch &launch, bool async, uint64_t sequence,
                                            bool host_wait, Enqueue enqueue);
    /* why: the reason for it */
    c10::intrusive_ptr<c10d::Work> run_staged(const Launch &launch, bool async, uint64_t sequence,
                                              const std::string &why);
    void call_spccl(const Launch &launch, CollectiveOrder::Entry &entry);
    c10::intrusive_ptr<c10d::Work> call_nccl(const Launch &launch);

    const std::shared_ptr<Comm> comm_;
    const c10::intrusive_ptr<c10d::Backend> nccl_;
    const CudaSettings settings_;
    spccl_status apply_limit(spccl_comm *raw);

    std::atomic<uint64_t> max_ctas_{0};
    uint64_t applied_max_ctas_ = 0; /* what the communicator has; used inside Comm::issue alone */
    std::mutex attach_mutex_;
    std::atomic<CudaRoute> route_{CudaRoute::unknown}; /* set last: order_ and why_ are constant then */
    std::shared_ptr<CollectiveOrder> order_;
    std::string why_;
};

} // namespace spccl_torch
