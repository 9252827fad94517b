/* work.hpp - c10d::Work over an spccl_request, with the Future that torch users know.
 *
 * May include: spccl.h, torch_compat.hpp, serial_thread.hpp, comm.hpp. */
#pragma once

#include "comm.hpp"
#include "serial_thread.hpp"

#include <ATen/ThreadLocalState.h>
#include <ATen/record_function.h>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace spccl_torch
{

/* One collective, and all that it needs until it ends. */
struct Launch {
    OpText op;
    c10d::OpType type = c10d::OpType::UNKNOWN;
    const char *title = nullptr; /* name of the profiler event: "spccl:all_reduce" */
    milliseconds timeout = c10d::kUnsetTimeout;
    std::vector<at::Tensor> inputs;  /* the user's; the profiler shows them */
    std::vector<at::Tensor> outputs; /* returned by result() and the future */
    std::function<void()> copy_out;  /* copies scratch to the user's tensors; empty if there is no scratch */
    c10d::ReduceOp reduce_op;        /* as the user gave it; SUM if `in` was scaled */

    /* Set if spccl can run it. */
    at::Tensor in, out; /* plain tensors (tensor.hpp); broadcast: the same */
    size_t n_elems = 0; /* as spccl.h counts them for this call, in elements of `dtype` */
    spccl_dtype dtype = SPCCL_FLOAT32;
    bool wide = false; /* of a reduce-scatter: spccl_reduce_scatter_wide */
    /* Of an all-reduce in place on a GPU: prune first. NULL: do not. */
    spccl_prune_plan *prune_plan = nullptr;
    spccl_prune_options prune_options{};
};
/* A Launch of a call on `used`, which are its inputs and outputs. */
Launch launch_of(const char *name, const char *title, c10d::OpType type, std::vector<at::Tensor> used,
                 milliseconds timeout = c10d::kUnsetTimeout);

spccl_status call_host(const Launch &launch, spccl_comm *comm, spccl_request **req);
/*   stream   cudaStream_t. An empty collective is not launched. */
spccl_status call_cuda(const Launch &launch, spccl_comm *comm, void *stream);
/* The name of the collective in plan files. */
const char *planned_as(c10d::OpType type);

/* A future for a list of tensors.
 *   devices   where they are, if not on the CPU: without them the future orders no streams */
c10::intrusive_ptr<c10::ivalue::Future> make_tensor_list_future(std::vector<c10::Device> devices = {});

/* Profiler event of a call that returns no Work; it lasts as long as this object. */
class CallRecord
{
  public:
    CallRecord(const char *title, const std::vector<at::Tensor> &inputs);

  private:
    at::RecordFunction record_;
};
/* Runs launch.copy_out, if there is one, in the mode that the outputs need. */
void run_copy_out(const Launch &launch);

/* Run the collective to its end on the calling thread, which is fastest for small tensors. Throws its
 * error. */
void run_blocking(Comm &comm, Launch launch);

/* What our works have in common. Each overrides wait(), because Work::wait() calls synchronize() with its mutex locked. */
class OwnWork : public c10d::Work
{
  public:
    using c10d::Work::Work;
    /* As in torch: false only after a failure; true while under way. */
    bool isSuccess() const override
    {
        return exception() == nullptr;
    }
    void synchronize() override
    {
        wait(kNoTimeout);
    }
    void blockCurrentStream() /* virtual from 2.9 on; host memory has no stream */
    {
        synchronize();
    }
};

/* What the works of one collective share. */
class CollectiveWork : public OwnWork
{
  public:
    CollectiveWork(std::shared_ptr<Comm> comm, const Launch &launch, uint64_t sequence)
        : OwnWork(comm->rank(), launch.type, launch.title, launch.inputs), comm_(std::move(comm)),
          sequence_(sequence)
    {
    }
    void abort() override
    {
        comm_->abort("Work.abort()");
    }
    uint64_t getSequencenumber() const override
    {
        return sequence_;
    }

  protected:
    const std::shared_ptr<Comm> comm_;
    const uint64_t sequence_;
};

/* One collective under way. It keeps its tensors until spccl no longer uses them, even if the user drops
 * it. */
class RequestWork final : public CollectiveWork
{
  public:
    /* Issue the collective. `completer` runs the callbacks of futures, in the group's order of issue. Works
     * that a callback issues use a further thread, so that the callback may wait for them. */
    static c10::intrusive_ptr<RequestWork> issue(std::shared_ptr<Comm> comm,
                                                 const std::shared_ptr<SerialThread> &completer,
                                                 Launch launch, uint64_t sequence);

    RequestWork(std::shared_ptr<Comm> comm, std::shared_ptr<SerialThread> completer, Launch launch,
                uint64_t sequence);
    ~RequestWork() override;

    bool isCompleted() override;
    std::exception_ptr exception() const override;
    std::vector<at::Tensor> result() override;
    /* timeout 0 = until the collective's own deadline. A shorter one that passes throws DistBackendError; the
     * collective then goes on and may be waited for again. */
    bool wait(milliseconds timeout = kNoTimeout) override;
    c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

  private:
    static void on_done(void *ctx, spccl_status status);
    bool request_done() const;
    void settle();
    void complete_future();

    const std::shared_ptr<SerialThread> completer_;
    Launch launch_; /* in, out and copy_out are cleared when the request is settled */
    const bool profiled_;
    const bool copies_out_;
    spccl_request *request_ = nullptr;

    std::mutex settle_mutex_; /* held while copy_out runs: the work is not complete before the copy is */
    std::atomic<bool> settled_{false};

    std::mutex future_mutex_;
    c10::intrusive_ptr<c10::ivalue::Future> future_;
    at::ThreadLocalState future_tls_;
    bool callback_ran_ = false;
    bool future_completed_ = false;
};

/* Work that a SerialThread runs: several collectives, one after the other, on a second communicator. As for
 * RequestWork, `completer` completes the future. */
class TaskWork final : public OwnWork
{
  public:
    TaskWork(int rank, const OpText &op, const char *title, std::vector<at::Tensor> tensors,
             uint64_t sequence, const std::shared_ptr<SerialThread> &completer);

    /* Run `task` on the calling thread; this work completes when it ends. */
    void run(const std::function<void()> &task);

    std::vector<at::Tensor> result() override;
    bool wait(milliseconds timeout = kNoTimeout) override;
    void abort() override;
    c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
    uint64_t getSequencenumber() const override;

    std::function<void(const char *reason)> abort_task; /* set before run() */

  private:
    const HomeProcess home_;
    const OpText op_;
    const std::vector<at::Tensor> tensors_;
    const uint64_t sequence_;
    const std::shared_ptr<SerialThread> completer_;
    const c10::intrusive_ptr<c10::ivalue::Future> future_;
    const at::ThreadLocalState tls_;
};

/* Several works as one, for torch's coalesced calls. A part that is NULL is done already. */
class MultiWork final : public OwnWork
{
  public:
    MultiWork(int rank, c10d::OpType type, std::vector<c10::intrusive_ptr<c10d::Work>> parts);

    bool isCompleted() override;
    std::exception_ptr exception() const override;
    std::vector<at::Tensor> result() override;
    /* Waits for every part, also after one has failed; then throws the first failure. */
    bool wait(milliseconds timeout = kNoTimeout) override;
    void abort() override;
    c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

  private:
    const std::vector<c10::intrusive_ptr<c10d::Work>> parts_;
};

} // namespace spccl_torch
