/* cuda.cpp - see cuda.hpp. */
#include "cuda.hpp"

namespace spccl_torch
{

void wait_on_host(Comm &comm, CollectiveOrder &order, CudaRoute route, const OpText &op, milliseconds timeout)
{
    if (route == CudaRoute::engine)
        return comm.wait_cuda(op, native_handle(order.current()), timeout);
    if (timeout.count() <= 0)
        timeout = comm.timeout();
    const auto deadline = std::chrono::steady_clock::now() + timeout;
    const CollectiveOrder::EventPtr reached = order.take_event();
    reached->record(order.current());
    for (int looks = 0; !reached->query(); looks++) {
        comm.check_usable(op.str());
        if (std::chrono::steady_clock::now() > deadline)
            std::rethrow_exception(make_error(SPCCL_ERR_TIMEOUT, comm.who() + ": " + op.str(),
                                              "the GPU was not done after " +
                                                  std::to_string(timeout.count()) +
                                                  " ms; it goes on and may be waited for again"));
        std::this_thread::sleep_for(std::chrono::microseconds(looks < 100 ? 20 : 500));
    }
}

/* ---- CudaWork ------------------------------------------------------------------------------------ */

CudaWork::CudaWork(std::shared_ptr<Comm> comm, std::shared_ptr<CollectiveOrder> order, const Launch &launch,
                   uint64_t sequence, bool host_wait, CudaRoute route)
    : CollectiveWork(std::move(comm), launch, sequence), order_(std::move(order)), op_(launch.op),
      outputs_(launch.outputs), host_wait_(host_wait), route_(route), held_(launch.inputs)
{
    held_.insert(held_.end(), launch.outputs.begin(), launch.outputs.end());
    for (const at::Tensor &t : {launch.in, launch.out})
        if (t.defined())
            held_.push_back(t);
}

CudaWork::~CudaWork()
{
    if (stream_ && !held_.empty() && !SerialThread::drop()) {
        try {
            for (const at::Tensor &t : held_)
                order_->keep_alive(t, *stream_);
        } catch (const std::exception &) { /* CUDA is being unloaded, so nobody reuses the memory */
        }
    }
}

void CudaWork::enqueued(const c10::Stream &stream, CollectiveOrder::EventPtr end)
{
    stream_ = stream;
    end_ = std::move(end);
    Work::finish(); /* ends the profiler event */
}

std::exception_ptr CudaWork::broken() const
{
    std::string text;
    const spccl_status status = comm_->error(&text);
    return status == SPCCL_OK ? nullptr : make_error(status, comm_->who() + ": " + op_.str(), text);
}

bool CudaWork::isCompleted()
{
    if (fine_)
        return true;
    if (!end_->query())
        return false;
    fine_ = broken() == nullptr;
    return true;
}

std::exception_ptr CudaWork::exception() const
{
    return fine_ ? nullptr : broken();
}

std::vector<at::Tensor> CudaWork::result()
{
    return outputs_;
}

void CudaWork::release()
{
    std::vector<at::Tensor> held;
    std::lock_guard<std::mutex> lock(held_mutex_);
    held.swap(held_);
}

void CudaWork::synchronize()
{
    end_->block(order_->current());
    if (std::exception_ptr error = exception())
        std::rethrow_exception(error);
    release();
}

bool CudaWork::wait(milliseconds timeout)
{
    const bool bounded = timeout != kNoTimeout && timeout != c10d::kUnsetTimeout;
    end_->block(order_->current());
    if ((host_wait_ || bounded) && !order_->capturing())
        wait_on_host(*comm_, *order_, route_, op_, bounded ? timeout : kNoTimeout);
    if (std::exception_ptr error = exception())
        std::rethrow_exception(error);
    release();
    return true;
}

c10::intrusive_ptr<c10::ivalue::Future> CudaWork::getFuture()
{
    std::lock_guard<std::mutex> lock(future_mutex_);
    if (future_)
        return future_;
    future_ = make_tensor_list_future({order_->device()});
    if (std::exception_ptr error = exception()) {
        future_->setError(error);
        return future_;
    }
    const c10::StreamGuard guard(*stream_); /* the future's value waits for the end of this stream */
    future_->markCompleted(c10::IValue(outputs_));
    return future_;
}

/* ---- which route --------------------------------------------------------------------------------- */

CudaSide::CudaSide(std::shared_ptr<Comm> comm, c10::intrusive_ptr<c10d::Backend> nccl,
                   const CudaSettings &settings)
    : comm_(std::move(comm)), nccl_(std::move(nccl)), settings_(settings)
{
}

c10d::Backend &CudaSide::nccl(const char *op)
{
    comm_->check_usable(op);
    TORCH_CHECK_NOT_IMPLEMENTED(nccl_, "spccl: ", comm_->who(), ": ", op,
                                " of CUDA tensors needs NCCL, and this torch has none; use tensor.cpu()");
    return *nccl_;
}

CudaRoute CudaSide::bind(const c10::Device &device, const char *op)
{
    const CudaRoute known = route();
    if (known == CudaRoute::unknown)
        return attach(device, op);
    TORCH_CHECK_VALUE(device == order_->device(), "spccl: ", comm_->who(), ": ", op, ": a tensor is on ",
                      device, ", this group's GPU is ", order_->device(),
                      " (that of its first CUDA collective): one GPU per rank and group; use tensor.to, or "
                      "torch.distributed.new_group for the other GPU");
    return known;
}

CudaRoute CudaSide::attach(const c10::Device &device, const char *op)
{
    std::lock_guard<std::mutex> lock(attach_mutex_);
    if (route() != CudaRoute::unknown)
        return route();
    auto order = settings_.order_per_group ? std::make_shared<CollectiveOrder>(device)
                                           : CollectiveOrder::of_device(device);
    TORCH_CHECK(
        !order->capturing(), "spccl: ", comm_->who(), ": ", op,
        ": the first CUDA collective of a group allocates memory and cannot be captured into a graph: run "
        "one before the capture, or give init_process_group a device_id");
    spccl_cuda_config config = SPCCL_CUDA_CONFIG_INIT;
    config.device = device.index();
    config.max_ctas = settings_.max_ctas;
    config.inbox_bytes = settings_.inbox_bytes;
    config.decline = settings_.engine ? 0 : 1;
    config.between_hosts = settings_.between_hosts;
    config.caller_orders = 1; /* order_ orders NCCL's collectives too */
    const CudaRoute fallback = nccl_ && !settings_.stage ? CudaRoute::nccl : CudaRoute::stage;
    config.fallback = static_cast<uint32_t>(fallback);
    const c10::DeviceGuard guard(device);
    std::string text;
    const spccl_status status = comm_->attach_cuda(config, c10d::kUnsetTimeout, &text);
    CudaRoute route = CudaRoute::engine;
    if (status == SPCCL_ERR_UNREACHABLE || status == SPCCL_ERR_UNSUPPORTED) {
        route = fallback;
        why_ = text;
        if (settings_.engine)
            TORCH_WARN("spccl: ", comm_->who(), ": CUDA collectives go ",
                       route == CudaRoute::nccl ? "to NCCL, dense" : "through host memory", ": ", text);
    } else if (status != SPCCL_OK) {
        std::rethrow_exception(make_error(status, comm_->who() + ": " + op, text));
    }
    order_ = std::move(order);
    route_.store(route, std::memory_order_release);
    return route;
}

/* ---- running ------------------------------------------------------------------------------------- */

c10::intrusive_ptr<c10d::Work> CudaSide::in_order(const Launch &launch, bool async, uint64_t sequence,
                                                  bool host_wait, Enqueue enqueue)
{
    host_wait = host_wait || settings_.blocking_wait;
    if (async) {
        auto work = c10::make_intrusive<CudaWork>(comm_, order_, launch, sequence, host_wait, route());
        const CollectiveOrder::Entry entry = order_->run(true, enqueue);
        work->enqueued(entry.stream, entry.end);
        return work;
    }
    const CallRecord record(launch.title, launch.inputs);
    order_->run(false, enqueue);
    if (host_wait && !order_->capturing())
        wait_on_host(*comm_, *order_, route(), launch.op, launch.timeout);
    return nullptr; /* torch takes a NULL Work as done */
}

c10::intrusive_ptr<c10d::Work> CudaSide::start(const Launch &launch, bool async, uint64_t sequence)
{
    if (route() == CudaRoute::stage)
        return run_staged(launch, async, sequence, why_);
    if (settings_.stage && route() == CudaRoute::engine)
        if (const std::string why = comm_->refused_plan(launch.op, planned_as(launch.type)); !why.empty())
            return run_staged(launch, async, sequence, why);
    const bool by_nccl = route() == CudaRoute::nccl;
    if (by_nccl)
        comm_->check_usable(launch.op.name);
    return in_order(launch, async, sequence, false, [&](CollectiveOrder::Entry &entry) {
        if (!by_nccl)
            return call_spccl(launch, entry);
        if (auto inner = call_nccl(launch))
            inner->synchronize();
        run_copy_out(launch);
    });
}

spccl_status CudaSide::apply_limit(spccl_comm *raw)
{
    spccl_cuda_options options = SPCCL_CUDA_OPTIONS_INIT;
    options.max_ctas = max_ctas_;
    if (options.max_ctas == applied_max_ctas_)
        return SPCCL_OK;
    const spccl_status status = spccl_cuda_set_options(raw, &options);
    if (status == SPCCL_OK)
        applied_max_ctas_ = options.max_ctas;
    return status;
}

/* Launch one of the four collectives of spccl, and give the communicator the event after it. Both happen
 * inside issue(), so that no other thread can close the communicator in between. Closing waits for that
 * event, and then frees memory that the kernel uses. */
void CudaSide::call_spccl(const Launch &launch, CollectiveOrder::Entry &entry)
{
    comm_->issue(launch.op, launch.timeout, [&](spccl_comm *raw) {
        std::exception_ptr failed;
        spccl_status status = apply_limit(raw);
        if (status == SPCCL_OK)
            status = call_cuda(launch, raw, entry.handle);
        if (status != SPCCL_OK)
            return status;
        try {
            run_copy_out(launch);
        } catch (...) {
            failed = std::current_exception();
        }
        entry.close();
        if (!entry.captured)
            status = comm_->set_end_event(entry.end, entry.end->eventId());
        if (failed)
            std::rethrow_exception(failed);
        return status;
    });
}

c10::intrusive_ptr<c10d::Work>
CudaSide::hand_over(const Launch &launch, bool async, uint64_t sequence,
                    c10::function_ref<c10::intrusive_ptr<c10d::Work>(c10d::Backend &)> call)
{
    c10d::Backend &backend = nccl(launch.op.name);
    return in_order(launch, async, sequence, false, [&](CollectiveOrder::Entry &) {
        if (auto inner = call(backend))
            inner->synchronize(); /* not wait(), which may block the host */
    });
}

/* Let NCCL run a prepared collective on the current stream. All-gather and broadcast send bytes, because NCCL
 * has fewer dtypes than spccl. */
c10::intrusive_ptr<c10d::Work> CudaSide::call_nccl(const Launch &launch)
{
    const auto bytes = [](const at::Tensor &t) { return t.view({-1}).view(at::kByte); };
    const auto with_timeout = [&](auto opts) {
        opts.timeout = launch.timeout;
        opts.asyncOp = false;
        return opts;
    };
    at::NoGradGuard no_grad;
    switch (launch.type) {
    case c10d::OpType::ALLGATHER:
    case c10d::OpType::_ALLGATHER_BASE: {
        at::Tensor in = bytes(launch.in), out = bytes(launch.out);
        return nccl_->_allgather_base(out, in, with_timeout(c10d::AllgatherOptions()));
    }
    case c10d::OpType::REDUCE_SCATTER:
    case c10d::OpType::_REDUCE_SCATTER_BASE: {
        auto opts = with_timeout(c10d::ReduceScatterOptions());
        opts.reduceOp = launch.reduce_op;
        at::Tensor in = launch.in.view({-1}), out = launch.out.view({-1});
        return nccl_->_reduce_scatter_base(out, in, opts);
    }
    case c10d::OpType::ALLREDUCE: {
        auto opts = with_timeout(c10d::AllreduceOptions());
        opts.reduceOp = launch.reduce_op;
        std::vector<at::Tensor> one{launch.out};
        if (!launch.in.is_same(launch.out))
            one[0].copy_(launch.in);
        return nccl_->allreduce(one, opts);
    }
    default: {
        auto opts = with_timeout(c10d::BroadcastOptions());
        opts.rootRank = launch.op.root;
        std::vector<at::Tensor> one{bytes(launch.out)};
        return nccl_->broadcast(one, opts);
    }
    }
}

/* Run a collective on copies in host memory, on the calling thread. */
c10::intrusive_ptr<c10d::Work> CudaSide::run_staged(const Launch &launch, bool async, uint64_t sequence,
                                                    const std::string &why)
{
    TORCH_CHECK(!order_->capturing(), "spccl: ", comm_->who(), ": ", launch.op.str(),
                ": goes through host memory here and cannot be captured into a graph (", why, ")");
    at::NoGradGuard no_grad;
    Launch host = launch;
    host.in = launch.in.cpu();
    host.out = launch.in.is_same(launch.out)
                   ? host.in
                   : at::empty_like(launch.out, launch.out.options().device(at::kCPU));
    comm_->issue(launch.op, launch.timeout, [&](spccl_comm *raw) { return call_host(host, raw, nullptr); });
    launch.out.copy_(host.out);
    run_copy_out(launch);
    return finished(launch, async, sequence);
}

c10::intrusive_ptr<c10d::Work> CudaSide::finished(const Launch &launch, bool async, uint64_t sequence)
{
    if (!async)
        return nullptr;
    auto work = c10::make_intrusive<CudaWork>(comm_, order_, launch, sequence, false, route());
    const c10::Stream current = order_->current();
    CollectiveOrder::EventPtr end = order_->take_event();
    end->record(current);
    work->enqueued(current, std::move(end));
    return work;
}

c10::intrusive_ptr<c10d::Work> CudaSide::barrier(bool async, milliseconds timeout, uint64_t sequence)
{
    const at::Tensor token = at::empty({1}, at::TensorOptions().dtype(at::kInt).device(device()));
    Launch launch = launch_of("barrier", "spccl:barrier", c10d::OpType::BARRIER, {token}, timeout);
    launch.inputs.clear();
    launch.outputs.clear();
    launch.in = launch.out = token; /* its value does not matter */
    launch.n_elems = 1;
    launch.dtype = SPCCL_INT32;
    if (const std::string why = comm_->refused_plan(launch.op, planned_as(launch.type)); !why.empty())
        return run_staged(launch, async, sequence, why); /* a barrier moves no data of the caller */
    return in_order(launch, async, sequence, /*host_wait=*/true,
                    [&](CollectiveOrder::Entry &entry) { call_spccl(launch, entry); });
}

} // namespace spccl_torch
