/* backend.cpp - see backend.hpp. What is not ours is in delegate.cpp. */
#include "backend.hpp"

namespace spccl_torch
{

namespace
{
at::Tensor flat_like(const at::Tensor &t, int64_t numel)
{
    return at::empty({numel}, at::TensorOptions().dtype(t.scalar_type()));
}

/* What is the same for all of ours. */
Launch launch_of(const char *name, const char *title, c10d::OpType type, const at::Tensor &t,
                 milliseconds timeout)
{
    Launch launch;
    launch.op.name = name;
    launch.op.n_elems = static_cast<size_t>(t.numel());
    launch.op.dtype = t.scalar_type();
    launch.type = type;
    launch.title = title;
    launch.timeout = timeout;
    return launch;
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

template <class List> void check_list(const List &list, int size, const char *arg, const char *op)
{
    TORCH_CHECK_VALUE(list.size() == static_cast<size_t>(size), "spccl: ", op, ": ", arg, " has ",
                      std::to_string(list.size()), " entries, wanted ", std::to_string(size),
                      ", one per rank");
}

void copy_parts(const std::vector<at::Tensor> &targets, const at::Tensor &flat, int64_t numel)
{
    for (size_t r = 0; r < targets.size(); r++)
        targets[r].copy_(flat.narrow(0, static_cast<int64_t>(r) * numel, numel).view(targets[r].sizes()));
}
} // namespace

Backend::Backend(c10::intrusive_ptr<c10d::Store> store, c10::intrusive_ptr<c10d::Backend> gloo, int rank,
                 int size, const CommSettings &settings, std::vector<uint64_t> global_ranks)
    : c10d::Backend(rank, size), gloo_(std::move(gloo)),
      comm_(std::make_shared<Comm>(store, rank, size, settings)),
      completer_(std::make_shared<SerialThread>()),
      sparse_(std::make_shared<SparseLane>(store, rank, size, settings, comm_, completer_)),
      options_(c10::make_intrusive<Options>(settings.timeout))
{
    init();
    options_->group_name = settings.name;
    options_->global_ranks_in_group = std::move(global_ranks);
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
}

void Backend::setTimeout(milliseconds timeout)
{
    comm_->set_timeout(timeout);
    sparse_->set_timeout(timeout);
    gloo_->setTimeout(timeout);
    options_->timeout = timeout;
}

void Backend::setSequenceNumberForGroup()
{
    /* All ranks count from 0 and call in one order: nothing to agree on. */
}

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
    comm_->abort("ProcessGroup.abort()");
    sparse_->abort("ProcessGroup.abort()");
    gloo_->abort();
}

/* First what ends the work under way, so that the completer has everything to complete; the lane before the
 * communicator that it asks whether the group is still whole. */
void Backend::shutdown()
{
    sparse_->close();
    comm_->close();
    completer_->stop();
    gloo_->shutdown();
}

spccl_stats Backend::stats()
{
    spccl_stats sum = comm_->stats();
    sparse_->add_stats(sum);
    return sum;
}

std::string Backend::describe_link(int peer)
{
    return comm_->describe_link(peer);
}

c10d::Backend &Backend::gloo(const char *op)
{
    comm_->check_usable(op);
    return *gloo_;
}

c10::intrusive_ptr<c10d::Work> Backend::start(Launch launch, bool async)
{
    const uint64_t sequence = ++sequence_;
    if (async)
        return RequestWork::issue(comm_, completer_, std::move(launch), sequence);
    run_blocking(*comm_, std::move(launch));
    return nullptr; /* torch: "the backend has synced at C++ level" */
}

template <class One>
c10::intrusive_ptr<c10d::Work> Backend::coalesced(size_t n, bool async, c10d::OpType type, One &&one)
{
    std::vector<c10::intrusive_ptr<c10d::Work>> parts;
    for (size_t i = 0; i < n; i++)
        parts.push_back(one(i));
    auto work = c10::make_intrusive<MultiWork>(rank_, type, std::move(parts));
    if (async)
        return work;
    work->wait();
    return nullptr;
}

/* ---- broadcast and all-gather: bits move --------------------------------------------------------- */

c10::intrusive_ptr<c10d::Work> Backend::broadcast(std::vector<at::Tensor> &tensors,
                                                  const c10d::BroadcastOptions &opts)
{
    const at::Tensor tensor = only(tensors, "tensor", "broadcast");
    const int root = static_cast<int>(opts.rootRank);
    TORCH_CHECK_VALUE(opts.rootRank >= 0 && opts.rootRank < size_, "spccl: broadcast: src is rank ",
                      std::to_string(opts.rootRank), " of a group of ", std::to_string(size_));
    if (root == rank_)
        check_dense_cpu(tensor, "tensor", "broadcast");
    else
        check_output(tensor, "tensor", "broadcast");

    Launch launch = launch_of("broadcast", "spccl:broadcast", c10d::OpType::BROADCAST, tensor, opts.timeout);
    launch.op.root = root;
    const WireType wire = wire_for_moving(tensor.scalar_type(), launch.op);
    const at::Tensor buf = as_contiguous(tensor);
    launch.inputs = launch.outputs = {tensor};
    launch.borrowed = {buf};
    if (!is_plain(tensor) && root != rank_)
        launch.copy_out = [tensor, buf] { tensor.copy_(buf); };
    launch.call = [p = address(buf), n = launch.op.n_elems * wire.per_elem, wire, root](spccl_comm *comm,
                                                                                        spccl_request **req) {
        return spccl_broadcast(comm, p, n, wire.dtype, root, req);
    };
    return start(std::move(launch), opts.asyncOp);
}

c10::intrusive_ptr<c10d::Work> Backend::_allgather_base(at::Tensor &output, at::Tensor &input,
                                                        const c10d::AllgatherOptions &opts)
{
    const char *name = "all_gather_into_tensor";
    check_dense_cpu(input, "input_tensor", name);
    check_output(output, "output_tensor", name);
    check_same_dtype(input, output, "output_tensor", name);
    check_numel(output, input.numel() * size_, "output_tensor", name,
                "those of input_tensor times the ranks");

    Launch launch =
        launch_of(name, "spccl:_all_gather_base", c10d::OpType::_ALLGATHER_BASE, input, opts.timeout);
    const WireType wire = wire_for_moving(input.scalar_type(), launch.op);
    const at::Tensor in = as_contiguous(input);
    const at::Tensor out = is_plain(output) ? output : flat_like(output, output.numel());
    launch.inputs = {input};
    launch.outputs = {output};
    launch.borrowed = {in, out};
    if (!out.is_same(output))
        launch.copy_out = [target = output, out] { target.copy_(out.view(target.sizes())); };
    launch.call = [src = address(in), dst = address(out), n = launch.op.n_elems * wire.per_elem,
                   wire](spccl_comm *comm, spccl_request **req) {
        return spccl_all_gather(comm, src, dst, n, wire.dtype, req);
    };
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
    check_dense_cpu(input, "tensor", name);
    check_list(list, size_, "tensor_list", name);
    for (const at::Tensor &t : list) {
        check_output(t, "tensor_list", name);
        check_same_dtype(input, t, "tensor_list", name);
        check_numel(t, numel, "a tensor of tensor_list", name, "those of tensor: all ranks give as many");
    }

    Launch launch = launch_of(name, "spccl:all_gather", c10d::OpType::ALLGATHER, input, opts.timeout);
    const WireType wire = wire_for_moving(input.scalar_type(), launch.op);
    const at::Tensor in = as_contiguous(input);
    launch.inputs = {input};
    launch.outputs = list;
    launch.borrowed = {in};
    void *dst = address_if_adjacent(list, numel);
    if (dst == nullptr) {
        const at::Tensor flat = flat_like(input, numel * size_);
        dst = address(flat);
        launch.borrowed.push_back(flat);
        launch.copy_out = [list, flat, numel] { copy_parts(list, flat, numel); };
    } else {
        launch.borrowed.push_back(list[0]);
    }
    launch.call = [src = address(in), dst, n = launch.op.n_elems * wire.per_elem, wire](spccl_comm *comm,
                                                                                        spccl_request **req) {
        return spccl_all_gather(comm, src, dst, n, wire.dtype, req);
    };
    return start(std::move(launch), opts.asyncOp);
}

/* ---- reductions ---------------------------------------------------------------------------------- */

c10::intrusive_ptr<c10d::Work> Backend::allreduce(std::vector<at::Tensor> &tensors,
                                                  const c10d::AllreduceOptions &opts)
{
    const char *name = "all_reduce";
    const at::Tensor tensor = only(tensors, "tensor", name);
    TORCH_CHECK_VALUE(tensor.defined(), "spccl: all_reduce: tensor is an undefined tensor");
    if (tensor.layout() == c10::Layout::Sparse)
        return allreduce_sparse(tensors, opts);
    check_output(tensor, "tensor", name);

    const c10d::ReduceOp::RedOpType redop = opts.reduceOp.op_;
    Launch launch = launch_of(name, "spccl:all_reduce", c10d::OpType::ALLREDUCE, tensor, opts.timeout);
    launch.op.reduction = redop_name(redop);
    const Taker taker = reduction_taker(tensor.scalar_type(), redop);
    if (taker == Taker::gloo) {
        ++sequence_;
        return gloo(name).allreduce(tensors, opts);
    }
    if (taker == Taker::nobody)
        refuse_reduction(launch.op);

    const at::Tensor out = as_contiguous(tensor);
    const at::Tensor in = taker == Taker::spccl_scaled ? scaled(out, opts.reduceOp, launch.op) : out;
    launch.inputs = launch.outputs = {tensor};
    launch.borrowed = {in, out};
    if (!is_plain(tensor))
        launch.copy_out = [tensor, out] { tensor.copy_(out); };
    launch.call = [src = address(in), dst = address(out), n = launch.op.n_elems,
                   dtype = dtype_for_reducing(tensor.scalar_type()),
                   op = redop_of(redop)](spccl_comm *comm, spccl_request **req) {
        return spccl_all_reduce(comm, src, dst, n, dtype, op, req);
    };
    return start(std::move(launch), opts.asyncOp);
}

c10::intrusive_ptr<c10d::Work> Backend::allreduce_sparse(std::vector<at::Tensor> &tensors,
                                                         const c10d::AllreduceOptions &opts)
{
    at::Tensor &tensor = only(tensors, "tensor", "all_reduce");
    OpText op{"all_reduce", static_cast<size_t>(tensor.numel()), tensor.scalar_type(),
              redop_name(opts.reduceOp.op_), -1};
    auto work = sparse_->all_reduce(tensor, opts, op, ++sequence_);
    if (opts.asyncOp)
        return work;
    work->wait();
    return nullptr;
}

/* Both forms of reduce-scatter that are ours, once their arguments are checked.
 *   input   [size * n] in plain contiguous memory;  output   [n] of any layout */
c10::intrusive_ptr<c10d::Work> Backend::start_reduce_scatter(Launch launch, const at::Tensor &output,
                                                             const at::Tensor &input,
                                                             const c10d::ReduceScatterOptions &opts)
{
    const c10d::ReduceOp::RedOpType redop = opts.reduceOp.op_;
    const Taker taker = reduction_taker(input.scalar_type(), redop);
    launch.op.reduction = redop_name(redop);
    if (taker == Taker::nobody)
        refuse_reduction(launch.op);

    const at::Tensor in = taker == Taker::spccl_scaled ? scaled(input, opts.reduceOp, launch.op) : input;
    const at::Tensor out = is_plain(output) ? output : flat_like(output, output.numel());
    launch.outputs = {output};
    launch.borrowed = {in, out};
    if (!out.is_same(output))
        launch.copy_out = [target = output, out] { target.copy_(out.view(target.sizes())); };
    launch.call = [src = address(in), dst = address(out), n = launch.op.n_elems,
                   dtype = dtype_for_reducing(input.scalar_type()),
                   op = redop_of(redop)](spccl_comm *comm, spccl_request **req) {
        return spccl_reduce_scatter(comm, src, dst, n, dtype, op, req);
    };
    return start(std::move(launch), opts.asyncOp);
}

c10::intrusive_ptr<c10d::Work> Backend::_reduce_scatter_base(at::Tensor &output, at::Tensor &input,
                                                             const c10d::ReduceScatterOptions &opts)
{
    const char *name = "reduce_scatter_tensor";
    check_dense_cpu(input, "input", name);
    check_output(output, "output", name);
    check_same_dtype(input, output, "output", name);
    check_numel(input, output.numel() * size_, "input", name, "those of output times the ranks");
    if (reduction_taker(output.scalar_type(), opts.reduceOp.op_) == Taker::gloo) {
        ++sequence_;
        return gloo(name)._reduce_scatter_base(output, input, opts);
    }
    Launch launch = launch_of(name, "spccl:_reduce_scatter_base", c10d::OpType::_REDUCE_SCATTER_BASE, output,
                              opts.timeout);
    launch.inputs = {input};
    return start_reduce_scatter(std::move(launch), output, as_contiguous(input), opts);
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
        check_dense_cpu(t, "input_list", name);
        check_same_dtype(output, t, "input_list", name);
        check_numel(t, numel, "a tensor of input_list", name, "those of output: all ranks take as many");
    }
    if (reduction_taker(output.scalar_type(), opts.reduceOp.op_) == Taker::gloo) {
        ++sequence_;
        return gloo(name).reduce_scatter(outputs, inputs, opts);
    }
    at::NoGradGuard no_grad;
    at::Tensor flat;
    if (address_if_adjacent(list, numel) != nullptr) {
        flat = list[0].as_strided({numel * size_}, {1});
    } else {
        flat = flat_like(output, numel * size_);
        for (size_t r = 0; r < list.size(); r++)
            flat.narrow(0, static_cast<int64_t>(r) * numel, numel).copy_(list[r].reshape({numel}));
    }
    Launch launch =
        launch_of(name, "spccl:reduce_scatter", c10d::OpType::REDUCE_SCATTER, output, opts.timeout);
    launch.inputs = list;
    return start_reduce_scatter(std::move(launch), output, flat, opts);
}

/* ---- several at once ----------------------------------------------------------------------------- */

c10::intrusive_ptr<c10d::Work> Backend::allreduce_coalesced(std::vector<at::Tensor> &tensors,
                                                            const c10d::AllreduceCoalescedOptions &opts)
{
    c10d::AllreduceOptions each = opts;
    each.asyncOp = true;
    return coalesced(tensors.size(), opts.asyncOp, c10d::OpType::ALLREDUCE_COALESCED, [&](size_t i) {
        std::vector<at::Tensor> one{tensors[i]};
        return allreduce(one, each);
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
    c10d::AllgatherOptions each = opts;
    each.asyncOp = true;
    return coalesced(inputs.size(), opts.asyncOp, c10d::OpType::ALLGATHER_COALESCED, [&](size_t i) {
        std::vector<std::vector<at::Tensor>> out(1);
        for (const auto &of_rank : outputs)
            out[0].push_back(of_rank[i]);
        std::vector<at::Tensor> in{inputs[i]};
        return allgather(out, in, each);
    });
}

c10::intrusive_ptr<c10d::Work> Backend::allgather_into_tensor_coalesced(std::vector<at::Tensor> &outputs,
                                                                        std::vector<at::Tensor> &inputs,
                                                                        const c10d::AllgatherOptions &opts)
{
    TORCH_CHECK_VALUE(outputs.size() == inputs.size(),
                      "spccl: all_gather_into_tensor_coalesced: ", std::to_string(outputs.size()),
                      " outputs for ", std::to_string(inputs.size()), " inputs");
    c10d::AllgatherOptions each = opts;
    each.asyncOp = true;
    return coalesced(inputs.size(), opts.asyncOp, c10d::OpType::COALESCED,
                     [&](size_t i) { return _allgather_base(outputs[i], inputs[i], each); });
}

c10::intrusive_ptr<c10d::Work>
Backend::reduce_scatter_tensor_coalesced(std::vector<at::Tensor> &outputs, std::vector<at::Tensor> &inputs,
                                         const c10d::ReduceScatterOptions &opts)
{
    TORCH_CHECK_VALUE(outputs.size() == inputs.size(),
                      "spccl: reduce_scatter_tensor_coalesced: ", std::to_string(outputs.size()),
                      " outputs for ", std::to_string(inputs.size()), " inputs");
    c10d::ReduceScatterOptions each = opts;
    each.asyncOp = true;
    return coalesced(inputs.size(), opts.asyncOp, c10d::OpType::COALESCED,
                     [&](size_t i) { return _reduce_scatter_base(outputs[i], inputs[i], each); });
}

} // namespace spccl_torch
