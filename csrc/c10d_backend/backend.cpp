/* backend.cpp - see backend.hpp. Calls that Gloo or NCCL always runs are in delegate.cpp. */
#include "backend.hpp"

namespace spccl_torch
{

namespace
{
at::Tensor flat_like(const at::Tensor &t, int64_t numel)
{
    return at::empty({numel}, at::TensorOptions().dtype(t.scalar_type()).device(t.device()));
}

/* Set what spccl is called with. `in` and `out` are plain tensors (tensor.hpp). */
void set_call(Launch &launch, const at::Tensor &in, const at::Tensor &out, WireType wire)
{
    launch.in = in;
    launch.out = out;
    launch.n_elems = launch.op.n_elems * wire.per_elem;
    launch.dtype = wire.dtype;
}

/* `input` times the factor of ReduceOp.PREMUL_SUM, in the dtype of `input`. */
at::Tensor scaled(const at::Tensor &input, const c10d::ReduceOp &op, const OpText &text)
{
    const auto *factor = static_cast<const PremulFactor *>(op.supplement_.get());
    TORCH_CHECK_VALUE(factor != nullptr, "spccl: ", text.str(),
                      ": PREMUL_SUM without a factor; make it with "
                      "torch.distributed._make_nccl_premul_sum");
    at::NoGradGuard no_grad;
    if (!factor->tensor_factor.defined())
        return at::mul(input, factor->double_factor).contiguous();
    return at::mul(input, factor->tensor_factor.to(input.options())).contiguous();
}

void copy_parts(const std::vector<at::Tensor> &targets, const at::Tensor &flat, int64_t numel)
{
    for (size_t r = 0; r < targets.size(); r++)
        targets[r].copy_(flat.narrow(0, static_cast<int64_t>(r) * numel, numel).view(targets[r].sizes()));
}

/* The inner NCCL, or NULL if `group` holds none. */
c10::intrusive_ptr<c10d::Backend> nccl_of(c10d::ProcessGroup &group)
{
    for (const c10::Device &device : group.getDeviceTypes())
        if (device.is_cuda())
            return group.getBackend(c10::DeviceType::CUDA);
    return nullptr;
}
} // namespace

/* Gloo comes after `comm_`: it listens at the address through which spccl reached the peers. */
Backend::Backend(const c10::intrusive_ptr<c10d::ProcessGroup> &bare, GroupSettings settings,
                 const std::string &name, const std::vector<int64_t> &global_ranks)
    : c10d::Backend(bare->getRank(), bare->getSize()), store_(bare->getStore()),
      settings_(std::move(settings)), comm_(std::make_shared<Comm>(store_, rank_, size_, settings_.comm)),
      gloo_(add_inner_groups(bare, name, global_ranks, settings_, comm_->local_ip())), nccl_(nccl_of(*bare)),
      completer_(std::make_shared<SerialThread>()),
      sparse_(std::make_shared<SparseRunner>(store_, rank_, size_, settings_.comm, comm_, completer_)),
      cuda_(std::make_unique<CudaSide>(comm_, nccl_, settings_.cuda)),
      options_(c10::make_intrusive<Options>(settings_.comm.timeout)),
      last_split_store_(c10::intrusive_ptr<c10d::Store>()), last_split_(c10::intrusive_ptr<c10d::Backend>())
{
    init();
    options_->group_name = name;
    options_->global_ranks_in_group.assign(global_ranks.begin(), global_ranks.end());
}

Backend::~Backend()
{
    shutdown();
}

c10::intrusive_ptr<c10d::Backend::Options> Backend::getBackendOptions()
{
    return options_;
}

void Backend::setGroupUid(const std::string &uid)
{
    c10d::Backend::setGroupUid(uid);
    gloo_->setGroupUid(uid);
    if (nccl_)
        nccl_->setGroupUid(uid);
}

void Backend::setTimeout(milliseconds timeout)
{
    comm_->set_timeout(timeout);
    sparse_->set_timeout(timeout);
    gloo_->setTimeout(timeout);
    if (nccl_)
        nccl_->setTimeout(timeout);
    options_->timeout = timeout;
}

void Backend::setSequenceNumberForGroup()
{
} /* all ranks count from 0 and call in one order */

uint64_t Backend::getSequenceNumberForGroup()
{
    return sequence_;
}

c10d::ErrorType Backend::getError()
{
    switch (comm_->error(nullptr)) {
    case SPCCL_OK:
        return c10d::ErrorType::SUCCESS;
    case SPCCL_ERR_TIMEOUT:
        return c10d::ErrorType::TIMEOUT;
    case SPCCL_ERR_PEER:
        return c10d::ErrorType::REMOTE_ERROR;
    default:
        return c10d::ErrorType::COMM_ERROR;
    }
}

void Backend::abort()
{
    comm_->check_process("abort");
    comm_->abort("ProcessGroup.abort()");
    sparse_->abort("ProcessGroup.abort()");
    gloo_->abort();
    if (nccl_)
        nccl_->abort();
}

/* The order matters: closing the communicators ends all work, and the completer then completes it. The sparse
 * runner closes first, because it asks the group's communicator whether the group is broken. */
void Backend::shutdown()
{
    if (comm_->in_child()) {
        /* Freeing Gloo or NCCL would end the parent's connections, so the child never frees them. */
        new c10::intrusive_ptr<c10d::Backend>(gloo_);
        if (nccl_)
            new c10::intrusive_ptr<c10d::Backend>(nccl_);
        return;
    }
    const bool broken = comm_->error(nullptr) != SPCCL_OK;
    sparse_->close();
    comm_->close();
    completer_->stop();
    gloo_->shutdown();
    if (nccl_ && broken)
        nccl_->abort(); /* its communicators may wait for a rank that is gone */
    if (nccl_)
        nccl_->shutdown();
}

spccl_stats Backend::stats()
{
    spccl_stats sum = comm_->stats();
    sparse_->add_stats(sum);
    return sum;
}

spccl_cuda_stats Backend::cuda_stats()
{
    if (cuda_->route() == CudaRoute::engine)
        return comm_->cuda_stats();
    spccl_cuda_stats none{};
    none.device = cuda_->route() == CudaRoute::unknown ? -1 : cuda_->device().index();
    return none;
}

c10d::Backend &Backend::gloo(const char *op)
{
    comm_->check_usable(op);
    return *gloo_;
}

c10::intrusive_ptr<c10d::Work> Backend::start(Launch launch, bool async)
{
    if (launch.out.is_cuda())
        cuda_->bind(launch.out.device(), launch.op.name);
    const uint64_t sequence = ++sequence_;
    if (launch.out.is_cuda())
        return noted(cuda_->start(launch, async, sequence));
    if (async)
        return noted(RequestWork::issue(comm_, completer_, std::move(launch), sequence));
    run_blocking(*comm_, std::move(launch));
    return nullptr; /* torch: "the backend has synced at C++ level" */
}

/* ---- broadcast and all-gather -------------------------------------------------------------------- */

c10::intrusive_ptr<c10d::Work> Backend::broadcast(std::vector<at::Tensor> &tensors,
                                                  const c10d::BroadcastOptions &opts)
{
    const at::Tensor tensor = only(tensors, "tensor", "broadcast");
    const int root = static_cast<int>(opts.rootRank);
    TORCH_CHECK_VALUE(opts.rootRank >= 0 && opts.rootRank < size_, "spccl: broadcast: src is rank ",
                      std::to_string(opts.rootRank), ", wanted a rank of this group, 0 to ",
                      std::to_string(size_ - 1));
    if (root == rank_)
        check_dense(tensor, "tensor", "broadcast");
    else
        check_output(tensor, "tensor", "broadcast");

    Launch launch =
        launch_of("broadcast", "spccl:broadcast", c10d::OpType::BROADCAST, {tensor}, opts.timeout);
    launch.op.root = root;
    const WireType wire = wire_for_moving(tensor.scalar_type(), launch.op);
    const at::Tensor buf = as_contiguous(tensor);
    if (!is_plain(tensor) && root != rank_)
        launch.copy_out = [tensor, buf] { tensor.copy_(buf); };
    set_call(launch, buf, buf, wire);
    return start(std::move(launch), opts.asyncOp);
}

c10::intrusive_ptr<c10d::Work> Backend::_allgather_base(at::Tensor &output, at::Tensor &input,
                                                        const c10d::AllgatherOptions &opts)
{
    const char *name = "all_gather_into_tensor";
    check_dense(input, "input_tensor", name);
    check_output(output, "output_tensor", name);
    check_like(input, output, "output_tensor", name);
    check_numel(output, input.numel() * size_, "output_tensor", name,
                "the elements of input_tensor times the number of ranks");

    Launch launch =
        launch_of(name, "spccl:_all_gather_base", c10d::OpType::_ALLGATHER_BASE, {input}, opts.timeout);
    const WireType wire = wire_for_moving(input.scalar_type(), launch.op);
    const at::Tensor in = as_contiguous(input);
    const at::Tensor out = is_plain(output) ? output : flat_like(output, output.numel());
    launch.outputs = {output};
    if (!out.is_same(output))
        launch.copy_out = [target = output, out] { target.copy_(out.view(target.sizes())); };
    set_call(launch, in, out, wire);
    return start(std::move(launch), opts.asyncOp);
}

c10::intrusive_ptr<c10d::Work> Backend::allgather(std::vector<std::vector<at::Tensor>> &outputs,
                                                  std::vector<at::Tensor> &inputs,
                                                  const c10d::AllgatherOptions &opts)
{
    const char *name = "all_gather";
    const at::Tensor input = only(inputs, "tensor", name);
    TORCH_CHECK_VALUE(outputs.size() == 1, "spccl: all_gather: got ", std::to_string(outputs.size()),
                      " output lists, wanted 1");
    const std::vector<at::Tensor> &list = outputs[0];
    const int64_t numel = input.numel();
    check_dense(input, "tensor", name);
    check_list(list, size_, "tensor_list", name);
    for (const at::Tensor &t : list) {
        check_output(t, "tensor_list", name);
        check_like(input, t, "tensor_list", name);
        check_numel(t, numel, "a tensor of tensor_list", name,
                    "the elements of tensor: all ranks give the same number");
    }

    Launch launch = launch_of(name, "spccl:all_gather", c10d::OpType::ALLGATHER, {input}, opts.timeout);
    const WireType wire = wire_for_moving(input.scalar_type(), launch.op);
    const at::Tensor in = as_contiguous(input);
    launch.outputs = list;
    at::NoGradGuard no_grad;
    const bool adjacent = address_if_adjacent(list, numel) != nullptr;
    const at::Tensor out =
        adjacent ? list[0].as_strided({numel * size_}, {1}) : flat_like(input, numel * size_);
    if (!adjacent)
        launch.copy_out = [list, out, numel] { copy_parts(list, out, numel); };
    set_call(launch, in, out, wire);
    return start(std::move(launch), opts.asyncOp);
}

/* ---- reductions ---------------------------------------------------------------------------------- */

c10::intrusive_ptr<c10d::Work> Backend::all_reduce(std::vector<at::Tensor> &tensors,
                                                   const c10d::AllreduceOptions &opts, spccl_prune_plan *plan,
                                                   const spccl_prune_options *pruning)
{
    const char *name = "all_reduce";
    const at::Tensor tensor = only(tensors, "tensor", name);
    TORCH_CHECK_VALUE(tensor.defined(), "spccl: all_reduce: tensor is an undefined tensor");
    if (tensor.layout() == c10::Layout::Sparse)
        return allreduce_sparse(tensors, opts);
    check_output(tensor, "tensor", name);

    const c10d::ReduceOp::RedOpType redop = opts.reduceOp.op_;
    Launch launch = launch_of(name, "spccl:all_reduce", c10d::OpType::ALLREDUCE, {tensor}, opts.timeout);
    launch.op.reduction = redop_name(redop);
    launch.reduce_op = opts.reduceOp;
    if (inner_runs(tensor, redop, launch.op))
        return delegated(launch, opts.asyncOp, [&](c10d::Backend &backend, Staging &staging, bool async) {
            std::vector<at::Tensor> list = staging.written(tensors);
            return backend.allreduce(list, with_async(opts, async));
        });

    const at::Tensor out = as_contiguous(tensor);
    const bool premul = redop == c10d::ReduceOp::PREMUL_SUM;
    const at::Tensor in = premul ? scaled(out, opts.reduceOp, launch.op) : out;
    if (premul)
        launch.reduce_op = c10d::ReduceOp::SUM;
    if (!is_plain(tensor))
        launch.copy_out = [tensor, out] { tensor.copy_(out); };
    set_call(launch, in, out, {dtype_for_reducing(tensor.scalar_type()), 1});
    launch.prune_plan = plan;
    if (plan != nullptr)
        launch.prune_options = *pruning;
    return start(std::move(launch), opts.asyncOp);
}

c10::intrusive_ptr<c10d::Work> Backend::allreduce(std::vector<at::Tensor> &tensors,
                                                  const c10d::AllreduceOptions &opts)
{
    return all_reduce(tensors, opts, nullptr, nullptr);
}

c10::intrusive_ptr<c10d::Work> Backend::pruned_all_reduce(at::Tensor grad, spccl_prune_plan *plan,
                                                          const spccl_prune_options &options, void *stream)
{
    c10d::AllreduceOptions average;
    const OpText op{"pruned_all_reduce", static_cast<size_t>(grad.numel()), grad.scalar_type()};
    TORCH_CHECK_VALUE(grad.is_cuda() && is_plain(grad), "spccl: ", op.str(),
                      ": wanted a contiguous gradient in GPU memory");
    cuda_->bind(grad.device(), op.name);
    const bool by_engine = cuda_->route() == CudaRoute::engine &&
                           !(settings_.cuda.stage && !comm_->refused_plan(op, "all_reduce").empty());
    average.reduceOp = c10d::ReduceOp::AVG;
    average.asyncOp = true;
    comm_->issue(op, average.timeout, [&](spccl_comm *raw) {
        return by_engine ? spccl_cuda_prune_all_reduce_stage(raw, plan, grad.data_ptr(), SPCCL_AVG, &options,
                                                             1, stream)
                         : spccl_cuda_prune(plan, grad.data_ptr(), &options, stream);
    });
    std::vector<at::Tensor> one{std::move(grad)};
    return all_reduce(one, average, by_engine ? plan : nullptr, &options);
}

bool Backend::inner_runs(const at::Tensor &t, c10d::ReduceOp::RedOpType redop, const OpText &op)
{
    const Route route = reduction_route(t.scalar_type(), redop);
    if (route == Route::neither && !(t.is_cuda() && nccl_))
        refuse_reduction(op);
    if (t.is_cuda())
        cuda_->bind(t.device(), op.name);
    /* spccl runs PREMUL_SUM as a sum of scaled inputs on every CudaRoute. torch 2.11's NCCL gave wrong sums
     * for PREMUL_SUM (H200, tests/gpu, premul_sum). */
    if (route == Route::neither && cuda_->route() == CudaRoute::stage)
        refuse_reduction(op);
    return route == Route::gloo || route == Route::neither;
}

c10::intrusive_ptr<c10d::Work> Backend::allreduce_sparse(std::vector<at::Tensor> &tensors,
                                                         const c10d::AllreduceOptions &opts)
{
    at::Tensor &tensor = only(tensors, "tensor", "all_reduce");
    OpText op{"all_reduce", static_cast<size_t>(tensor.numel()), tensor.scalar_type(),
              redop_name(opts.reduceOp.op_), -1};
    if (tensor.is_cuda()) {
        const CudaRoute route = cuda_->bind(tensor.device(), op.name);
        TORCH_CHECK(route == CudaRoute::stage || !CollectiveOrder::of_device(tensor.device())->capturing(),
                    "spccl: ", op.str(),
                    ", sparse_coo: the number of entries of the result is known only while the call runs, so "
                    "the call cannot be captured into a CUDA graph; use tensor.to_dense()");
        const uint64_t sequence = ++sequence_;
        sparse_all_reduce_cuda(tensor, opts.reduceOp.op_, op, opts.timeout, *comm_,
                               [&](const at::Tensor &mine) { return gathered(mine, opts.timeout); });
        Launch launch = launch_of(op.name, "spccl:all_reduce_sparse", c10d::OpType::_ALLREDUCE_SPARSE,
                                  {tensor}, opts.timeout);
        return noted(cuda_->finished(launch, opts.asyncOp, sequence));
    }
    auto work = sparse_->all_reduce(tensor, opts, op, ++sequence_);
    if (opts.asyncOp)
        return work;
    work->wait();
    return nullptr;
}

at::Tensor Backend::gathered(const at::Tensor &mine, milliseconds timeout)
{
    std::vector<int64_t> shape{size_};
    shape.insert(shape.end(), mine.sizes().begin(), mine.sizes().end());
    at::Tensor all = at::empty(shape, mine.options()), input = mine;
    c10d::AllgatherOptions opts;
    opts.timeout = timeout;
    opts.asyncOp = false;
    _allgather_base(all, input, opts);
    return all;
}

/* The common end of both forms of reduce-scatter that spccl runs. The caller has checked the arguments.
 *   input    [size * n] in plain contiguous memory
 *   output   [n] of any layout */
c10::intrusive_ptr<c10d::Work> Backend::start_reduce_scatter(Launch launch, const at::Tensor &output,
                                                             const at::Tensor &input,
                                                             const c10d::ReduceScatterOptions &opts)
{
    const bool premul = opts.reduceOp.op_ == c10d::ReduceOp::PREMUL_SUM;
    const at::Tensor in = premul ? scaled(input, opts.reduceOp, launch.op) : input;
    const at::Tensor out = is_plain(output) ? output : flat_like(output, output.numel());
    launch.outputs = {output};
    launch.reduce_op = premul ? c10d::ReduceOp(c10d::ReduceOp::SUM) : opts.reduceOp;
    if (!out.is_same(output))
        launch.copy_out = [target = output, out] { target.copy_(out.view(target.sizes())); };
    set_call(launch, in, out, {dtype_for_reducing(input.scalar_type()), 1});
    return start(std::move(launch), opts.asyncOp);
}

c10::intrusive_ptr<c10d::Work> Backend::_reduce_scatter_base(at::Tensor &output, at::Tensor &input,
                                                             const c10d::ReduceScatterOptions &opts)
{
    const char *name = "reduce_scatter_tensor";
    check_dense(input, "input", name);
    check_output(output, "output", name);
    check_like(input, output, "output", name);
    check_numel(input, output.numel() * size_, "input", name,
                "the elements of output times the number of ranks");
    Launch launch = launch_of(name, "spccl:_reduce_scatter_base", c10d::OpType::_REDUCE_SCATTER_BASE,
                              {output, input}, opts.timeout);
    launch.op.reduction = redop_name(opts.reduceOp.op_);
    if (inner_runs(output, opts.reduceOp.op_, launch.op))
        return delegated(launch, opts.asyncOp, [&](c10d::Backend &backend, Staging &staging, bool async) {
            at::Tensor to = staging.written(output), from = staging.read_only(input);
            return backend._reduce_scatter_base(to, from, with_async(opts, async));
        });
    launch.inputs = {input};
    return start_reduce_scatter(std::move(launch), output, as_contiguous(input), opts);
}

c10::intrusive_ptr<c10d::Work> Backend::reduce_scatter_wide(at::Tensor output, at::Tensor input, bool mean)
{
    const char *name = "reduce_scatter_wide";
    const auto from = input.scalar_type();
    c10d::ReduceScatterOptions opts;
    opts.reduceOp = mean ? c10d::ReduceOp::AVG : c10d::ReduceOp::SUM;
    opts.asyncOp = true;
    TORCH_CHECK_VALUE(is_plain(input) && is_plain(output) && input.device() == output.device() &&
                          output.scalar_type() == at::kFloat && (from == at::kHalf || from == at::kBFloat16),
                      "spccl: ", name, ": got ", from, " and ", output.scalar_type(),
                      ", wanted contiguous float16 or bfloat16, and float32 on the same device");
    check_numel(input, output.numel() * size_, "input", name,
                "the elements of output times the number of ranks");
    if (output.is_cuda() && cuda_->bind(output.device(), name) == CudaRoute::nccl) {
        at::Tensor wide = input.to(at::kFloat);
        return _reduce_scatter_base(output, wide, opts);
    }
    Launch launch = launch_of(name, "spccl:reduce_scatter_wide", c10d::OpType::_REDUCE_SCATTER_BASE, {input});
    launch.op.reduction = redop_name(opts.reduceOp.op_);
    launch.outputs = {output};
    launch.reduce_op = opts.reduceOp;
    launch.wide = true;
    set_call(launch, input, output, {dtype_for_reducing(from), 1});
    launch.n_elems = static_cast<size_t>(output.numel());
    return start(std::move(launch), true);
}

c10::intrusive_ptr<c10d::Work> Backend::reduce_scatter(std::vector<at::Tensor> &outputs,
                                                       std::vector<std::vector<at::Tensor>> &inputs,
                                                       const c10d::ReduceScatterOptions &opts)
{
    const char *name = "reduce_scatter";
    at::Tensor &output = only(outputs, "output", name);
    TORCH_CHECK_VALUE(inputs.size() == 1, "spccl: reduce_scatter: got ", std::to_string(inputs.size()),
                      " input lists, wanted 1");
    const std::vector<at::Tensor> &list = inputs[0];
    const int64_t numel = output.numel();
    check_output(output, "output", name);
    check_list(list, size_, "input_list", name);
    for (const at::Tensor &t : list) {
        check_dense(t, "input_list", name);
        check_like(output, t, "input_list", name);
        check_numel(t, numel, "a tensor of input_list", name,
                    "the elements of output: all ranks take the same number");
    }
    Launch launch =
        launch_of(name, "spccl:reduce_scatter", c10d::OpType::REDUCE_SCATTER, {output}, opts.timeout);
    launch.op.reduction = redop_name(opts.reduceOp.op_);
    launch.inputs.insert(launch.inputs.end(), list.begin(), list.end());
    if (inner_runs(output, opts.reduceOp.op_, launch.op))
        return delegated(launch, opts.asyncOp, [&](c10d::Backend &backend, Staging &staging, bool async) {
            std::vector<at::Tensor> to = staging.written(outputs);
            std::vector<std::vector<at::Tensor>> from = staging.read_only(inputs);
            return backend.reduce_scatter(to, from, with_async(opts, async));
        });
    at::NoGradGuard no_grad;
    at::Tensor flat;
    if (address_if_adjacent(list, numel) != nullptr) {
        flat = list[0].as_strided({numel * size_}, {1});
    } else {
        flat = flat_like(output, numel * size_);
        for (size_t r = 0; r < list.size(); r++)
            flat.narrow(0, static_cast<int64_t>(r) * numel, numel).copy_(list[r].reshape({numel}));
    }
    launch.inputs = list;
    return start_reduce_scatter(std::move(launch), output, flat, opts);
}

} // namespace spccl_torch
