/* work.cpp - see work.hpp. */
#include "work.hpp"

#include <c10/core/InferenceMode.h>

#include <algorithm>

namespace spccl_torch
{

namespace
{
/* While a WriteGuard exists, its thread may write to any of the user's tensors. torch refuses to write to
 * leaves that require a gradient, and, outside of inference mode, to tensors that were made in that mode. */
class WriteGuard
{
  public:
    explicit WriteGuard(const std::vector<at::Tensor> &targets)
        : mode_(std::any_of(targets.begin(), targets.end(), [](const auto &t) { return t.is_inference(); }))
    {
    }

  private:
    c10::InferenceMode mode_; /* InferenceMode(false) turns gradients on, so no_grad_ comes after it */
    at::NoGradGuard no_grad_;
};

[[noreturn]] void throw_wait_timeout(const std::string &who, const OpText &op, milliseconds timeout)
{
    std::rethrow_exception(
        make_error(SPCCL_ERR_TIMEOUT, who + ": " + op.str(),
                   "not done after the " + std::to_string(timeout.count()) +
                       " ms given to wait(); it is still under way and may be waited for again"));
}
} // namespace

Launch launch_of(const char *name, const char *title, c10d::OpType type, std::vector<at::Tensor> used,
                 milliseconds timeout)
{
    Launch launch;
    launch.op = OpText{name, static_cast<size_t>(used.at(0).numel()), used[0].scalar_type()};
    launch.type = type;
    launch.title = title;
    launch.timeout = timeout;
    launch.inputs = used;
    launch.outputs = std::move(used);
    return launch;
}

spccl_status call_host(const Launch &l, spccl_comm *comm, spccl_request **req)
{
    const void *in = address(l.in);
    void *out = address(l.out);
    switch (l.type) {
    case c10d::OpType::ALLGATHER:
    case c10d::OpType::_ALLGATHER_BASE:
        return spccl_all_gather(comm, in, out, l.n_elems, l.dtype, req);
    case c10d::OpType::REDUCE_SCATTER:
    case c10d::OpType::_REDUCE_SCATTER_BASE:
        return (l.wide ? spccl_reduce_scatter_wide : spccl_reduce_scatter)(comm, in, out, l.n_elems, l.dtype,
                                                                           redop_of(l.reduce_op.op_), req);
    case c10d::OpType::ALLREDUCE:
    case c10d::OpType::BARRIER:
        return spccl_all_reduce(comm, in, out, l.n_elems, l.dtype, redop_of(l.reduce_op.op_), req);
    case c10d::OpType::BROADCAST:
        return spccl_broadcast(comm, out, l.n_elems, l.dtype, l.op.root, req);
    default:
        return SPCCL_ERR_BUG;
    }
}

spccl_status call_cuda(const Launch &l, spccl_comm *comm, void *stream)
{
    const void *in = address(l.in);
    void *out = address(l.out);
    if (l.n_elems == 0)
        return spccl_comm_async_error(comm);
    switch (l.type) {
    case c10d::OpType::ALLGATHER:
    case c10d::OpType::_ALLGATHER_BASE:
        return spccl_cuda_all_gather(comm, in, out, l.n_elems, l.dtype, stream);
    case c10d::OpType::REDUCE_SCATTER:
    case c10d::OpType::_REDUCE_SCATTER_BASE:
        return (l.wide ? spccl_cuda_reduce_scatter_wide : spccl_cuda_reduce_scatter)(
            comm, in, out, l.n_elems, l.dtype, redop_of(l.reduce_op.op_), stream);
    case c10d::OpType::ALLREDUCE:
    case c10d::OpType::BARRIER:
        if (l.prune_plan != nullptr)
            return spccl_cuda_prune_all_reduce_stage(comm, l.prune_plan, out, redop_of(l.reduce_op.op_),
                                                     &l.prune_options, 2, stream);
        return spccl_cuda_all_reduce(comm, in, out, l.n_elems, l.dtype, redop_of(l.reduce_op.op_), stream);
    case c10d::OpType::BROADCAST:
        return spccl_cuda_broadcast(comm, out, l.n_elems, l.dtype, l.op.root, stream);
    default:
        return SPCCL_ERR_BUG;
    }
}

const char *planned_as(c10d::OpType type)
{
    switch (type) {
    case c10d::OpType::ALLGATHER:
    case c10d::OpType::_ALLGATHER_BASE:
        return "all_gather";
    case c10d::OpType::REDUCE_SCATTER:
    case c10d::OpType::_REDUCE_SCATTER_BASE:
        return "reduce_scatter";
    case c10d::OpType::BROADCAST:
        return "broadcast";
    default:
        return "all_reduce";
    }
}

c10::intrusive_ptr<c10::ivalue::Future> make_tensor_list_future(std::vector<c10::Device> devices)
{
    return c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                    std::move(devices));
}

CallRecord::CallRecord(const char *title, const std::vector<at::Tensor> &inputs)
    : record_(at::RecordScope::USER_SCOPE)
{
    if (!record_.isActive())
        return;
    const std::vector<c10::IValue> values(inputs.begin(), inputs.end());
    record_.before(title, c10::ArrayRef<const c10::IValue>(values.data(), values.size()));
}

void run_copy_out(const Launch &launch)
{
    if (!launch.copy_out)
        return;
    WriteGuard guard(launch.outputs);
    launch.copy_out();
}

void run_blocking(Comm &comm, Launch launch)
{
    const CallRecord record(launch.title, launch.inputs);
    comm.issue(launch.op, launch.timeout, [&](spccl_comm *raw) { return call_host(launch, raw, nullptr); });
    run_copy_out(launch);
}

/* ---- RequestWork ------------------------------------------------------------------------------- */

RequestWork::RequestWork(std::shared_ptr<Comm> comm, std::shared_ptr<SerialThread> completer, Launch launch,
                         uint64_t sequence)
    : CollectiveWork(std::move(comm), launch, sequence), completer_(std::move(completer)),
      launch_(std::move(launch)), profiled_(static_cast<bool>(recordFunctionEndCallback_)),
      copies_out_(static_cast<bool>(launch_.copy_out))
{
}

RequestWork::~RequestWork()
{
    spccl_request_free(request_);
}

c10::intrusive_ptr<RequestWork> RequestWork::issue(std::shared_ptr<Comm> comm,
                                                   const std::shared_ptr<SerialThread> &completer,
                                                   Launch launch, uint64_t sequence)
{
    comm->check_process(launch.op.str()); /* before awaitable(), which locks a mutex */
    auto work = c10::make_intrusive<RequestWork>(std::move(comm), SerialThread::awaitable(completer),
                                                 std::move(launch), sequence);
    work->comm_->issue(work->launch_.op, work->launch_.timeout, [&](spccl_comm *raw) {
        spccl_status status = call_host(work->launch_, raw, &work->request_);
        if (status != SPCCL_OK)
            return status;
        /* The callback owns a reference, so the tensors outlive the request whatever the user does. */
        auto owned = work;
        void *ctx = owned.release();
        status = spccl_request_on_done(work->request_, on_done, ctx);
        if (status != SPCCL_OK)
            c10::intrusive_ptr<RequestWork>::reclaim(static_cast<RequestWork *>(ctx));
        return status;
    });
    return work;
}

/* Runs on the thread that moves data. Posts everything that may take long, or take the GIL, to
 * `completer_`. */
void RequestWork::on_done(void *ctx, spccl_status)
{
    if (SerialThread::drop())
        return;
    auto work = c10::intrusive_ptr<RequestWork>::reclaim(static_cast<RequestWork *>(ctx));
    {
        std::lock_guard<std::mutex> lock(work->future_mutex_);
        work->callback_ran_ = true;
    }
    /* The task takes this reference. If it is the last one, dropping it here would destroy the communicator
     * on the thread that runs its collectives. */
    SerialThread &completer = *work->completer_;
    completer.post([work = std::move(work)] {
        work->settle();
        work->complete_future();
    });
}

bool RequestWork::request_done() const
{
    return settled_ || spccl_request_test(request_) != SPCCL_AGAIN;
}

/* Store the outcome of the request in this Work, once. The request is done. */
void RequestWork::settle()
{
    comm_->check_process(launch_.op.str());
    std::lock_guard<std::mutex> lock(settle_mutex_);
    if (settled_)
        return;
    std::exception_ptr error;
    const spccl_status status = spccl_request_test(request_);
    if (status == SPCCL_OK) {
        try {
            run_copy_out(launch_);
        } catch (...) {
            error = std::current_exception();
        }
    } else {
        error = make_error(status, comm_->who() + ": " + launch_.op.str(), spccl_request_error(request_));
    }
    launch_.in = launch_.out = at::Tensor();
    launch_.copy_out = nullptr;
    finish(error);
    settled_ = true;
}

bool RequestWork::isCompleted()
{
    if (!request_done())
        return false;
    settle();
    return true;
}

std::exception_ptr RequestWork::exception() const
{
    auto *self =
        const_cast<RequestWork *>(this); /* torch's signature; settling changes nothing that is visible */
    if (self->request_done())
        self->settle();
    return Work::exception();
}

std::vector<at::Tensor> RequestWork::result()
{
    TORCH_CHECK(isCompleted(), "spccl: ", comm_->who(), ": ", launch_.op.str(),
                ": result() before the work is done; "
                "call wait() first");
    return launch_.outputs;
}

bool RequestWork::wait(milliseconds timeout)
{
    comm_->check_process(launch_.op.str());
    if (!settled_) {
        const bool forever = timeout == kNoTimeout || timeout == c10d::kUnsetTimeout;
        (void)spccl_request_wait(request_, forever ? -1 : timeout.count());
        if (spccl_request_test(request_) == SPCCL_AGAIN)
            throw_wait_timeout(comm_->who(), launch_.op, timeout);
        settle();
    }
    if (std::exception_ptr error = Work::exception())
        std::rethrow_exception(error);
    return true;
}

c10::intrusive_ptr<c10::ivalue::Future> RequestWork::getFuture()
{
    bool late;
    c10::intrusive_ptr<c10::ivalue::Future> future;
    comm_->check_process(launch_.op.str());
    {
        std::lock_guard<std::mutex> lock(future_mutex_);
        if (!future_) {
            future_ = make_tensor_list_future();
            future_tls_ = at::ThreadLocalState();
        }
        late = callback_ran_;
        future = future_;
    }
    if (late) { /* the request ended before there was a future */
        settle();
        complete_future();
    }
    return future;
}

void RequestWork::complete_future()
{
    {
        std::lock_guard<std::mutex> lock(future_mutex_);
        if (!future_ || future_completed_)
            return;
        future_completed_ = true;
    }
    at::ThreadLocalStateGuard tls(future_tls_);
    if (std::exception_ptr error = Work::exception())
        future_->setError(error);
    else
        future_->markCompleted(c10::IValue(launch_.outputs));
}

/* ---- TaskWork ---------------------------------------------------------------------------------- */

TaskWork::TaskWork(int rank, const OpText &op, const char *title, std::vector<at::Tensor> tensors,
                   uint64_t sequence, const std::shared_ptr<SerialThread> &completer)
    : OwnWork(rank, c10d::OpType::_ALLREDUCE_SPARSE, title, tensors), op_(op), tensors_(std::move(tensors)),
      sequence_(sequence), completer_(SerialThread::awaitable(completer)), future_(make_tensor_list_future())
{
}

void TaskWork::run(const std::function<void()> &task)
{
    std::exception_ptr error;
    try {
        WriteGuard guard(tensors_);
        task();
    } catch (...) {
        error = std::current_exception();
    }
    finish(error);
    completer_->post([future = future_, tensors = tensors_, tls = tls_, error] {
        at::ThreadLocalStateGuard guard(tls);
        if (error)
            future->setError(error);
        else
            future->markCompleted(c10::IValue(tensors));
    });
}

std::vector<at::Tensor> TaskWork::result()
{
    TORCH_CHECK(isCompleted(), "spccl: ", op_.str(), ": result() before the work is done; call wait() first");
    return tensors_;
}

bool TaskWork::wait(milliseconds timeout)
{
    if (home_.in_child())
        std::rethrow_exception(
            make_error(SPCCL_ERR_STATE, "rank " + std::to_string(rank_) + ": " + op_.str(), home_.refusal()));
    const auto ended = [&] { return completed_; };
    std::unique_lock<std::mutex> lock(mutex_);
    if (timeout == kNoTimeout || timeout == c10d::kUnsetTimeout)
        cv_.wait(lock, ended); /* the collectives in the task have deadlines of their own */
    else if (!cv_.wait_for(lock, timeout, ended))
        throw_wait_timeout("rank " + std::to_string(rank_), op_, timeout);
    if (exception_)
        std::rethrow_exception(exception_);
    return true;
}

void TaskWork::abort()
{
    if (abort_task)
        abort_task("Work.abort()");
}

c10::intrusive_ptr<c10::ivalue::Future> TaskWork::getFuture()
{
    return future_;
}

uint64_t TaskWork::getSequencenumber() const
{
    return sequence_;
}

/* ---- MultiWork --------------------------------------------------------------------------------- */

namespace
{
std::vector<c10::intrusive_ptr<c10d::Work>> present(std::vector<c10::intrusive_ptr<c10d::Work>> parts)
{
    std::erase_if(parts, [](const auto &part) { return !part; });
    return parts;
}
} // namespace

MultiWork::MultiWork(int rank, c10d::OpType type, std::vector<c10::intrusive_ptr<c10d::Work>> parts)
    : OwnWork(rank, type), parts_(present(std::move(parts)))
{
}

bool MultiWork::isCompleted()
{
    return std::all_of(parts_.begin(), parts_.end(), [](const auto &part) { return part->isCompleted(); });
}

std::exception_ptr MultiWork::exception() const
{
    for (const auto &part : parts_)
        if (std::exception_ptr error = part->exception())
            return error;
    return nullptr;
}

std::vector<at::Tensor> MultiWork::result()
{
    std::vector<at::Tensor> all;
    for (const auto &part : parts_) {
        const std::vector<at::Tensor> some = part->result();
        all.insert(all.end(), some.begin(), some.end());
    }
    return all;
}

bool MultiWork::wait(milliseconds timeout)
{
    std::exception_ptr first;
    for (const auto &part : parts_) {
        try {
            part->wait(timeout);
        } catch (...) {
            if (!first)
                first = std::current_exception();
        }
    }
    if (first)
        std::rethrow_exception(first);
    return true;
}

void MultiWork::abort()
{
    for (const auto &part : parts_)
        part->abort();
}

c10::intrusive_ptr<c10::ivalue::Future> MultiWork::getFuture()
{
    struct Join {
        c10::intrusive_ptr<c10::ivalue::Future> all;
        std::vector<c10::intrusive_ptr<c10::ivalue::Future>> futures;
        std::vector<c10::intrusive_ptr<c10d::Work>> parts;
        std::atomic<size_t> open{0};
        std::atomic<bool> failed{false};
    };
    auto join = std::make_shared<Join>();
    std::vector<c10::Device> devices;
    for (const auto &part : parts_) {
        join->futures.push_back(part->getFuture());
        const auto &some = join->futures.back()->devices();
        devices.insert(devices.end(), some.begin(), some.end());
    }
    join->all = make_tensor_list_future(std::move(devices));
    join->parts = parts_;
    join->open = parts_.size();
    for (const auto &future : join->futures) {
        future->addCallback([join](c10::ivalue::Future &done) {
            if (done.hasError() && !join->failed.exchange(true))
                join->all->setError(done.exception_ptr());
            if (--join->open != 0 || join->failed)
                return;
            std::vector<at::Tensor> tensors;
            for (size_t i = 0; i < join->parts.size(); i++) {
                join->futures[i]->wait(); /* done; on a GPU it orders this callback's stream behind it */
                const std::vector<at::Tensor> some = join->parts[i]->result();
                tensors.insert(tensors.end(), some.begin(), some.end());
            }
            join->all->markCompleted(c10::IValue(std::move(tensors)));
        });
    }
    if (parts_.empty())
        join->all->markCompleted(c10::IValue(std::vector<at::Tensor>()));
    return join->all;
}

} // namespace spccl_torch
