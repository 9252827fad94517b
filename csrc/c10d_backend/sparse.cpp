/* sparse.cpp - see sparse.hpp. */
#include "sparse.hpp"

#include "arithmetic.hpp"

#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>

#include <algorithm>
#include <limits>
#include <queue>

namespace spccl_torch
{

namespace
{
/* Describes one rank's tensor to the others. All-gathered before the entries are sent. */
struct Header {
    int64_t nnz;
    int64_t sparse_dim;
    int64_t dense_dim;
    int64_t sizes_hash;
    int64_t dtype;
    int64_t redop;
};
constexpr size_t header_words = sizeof(Header) / sizeof(int64_t);

/* FNV-1a hash of the sizes. Ranks compare it to find out whether their shapes differ. */
int64_t hash_of(c10::IntArrayRef sizes)
{
    uint64_t hash = UINT64_C(14695981039346656037);
    for (int64_t size : sizes)
        for (int byte = 0; byte < 8; byte++)
            hash = (hash ^ (static_cast<uint64_t>(size) >> (8 * byte) & 0xff)) * UINT64_C(1099511628211);
    return static_cast<int64_t>(hash);
}

void check_headers(const std::vector<Header> &headers, int rank, int64_t n_positions, const std::string &who,
                   const OpText &op)
{
    const Header &mine = headers[static_cast<size_t>(rank)];
    for (size_t r = 0; r < headers.size(); r++) {
        const Header &other = headers[r];
        const char *what = other.sizes_hash != mine.sizes_hash   ? "shape"
                           : other.dtype != mine.dtype           ? "dtype"
                           : other.redop != mine.redop           ? "reduction"
                           : other.sparse_dim != mine.sparse_dim ? "number of sparse dimensions"
                           : other.dense_dim != mine.dense_dim   ? "number of dense dimensions"
                                                                 : nullptr;
        if (what != nullptr)
            std::rethrow_exception(make_error(SPCCL_ERR_MISMATCH, who + ": " + op.str() + ", sparse_coo",
                                              std::string("rank ") + std::to_string(r) +
                                                  " gave a tensor of another " + what +
                                                  "; all ranks must give the same"));
        if (other.nnz < 0 || other.nnz > n_positions)
            std::rethrow_exception(make_error(SPCCL_ERR_FORMAT, who + ": " + op.str() + ", sparse_coo",
                                              "rank " + std::to_string(r) + " says it has " +
                                                  std::to_string(other.nnz) + " entries, wanted 0 to " +
                                                  std::to_string(n_positions)));
    }
}

/* Row-major position of every entry among the sparse dimensions.
 *   indices   [sparse_dim, nnz] int64;  returns [nnz] int64 */
at::Tensor linear_indices(const at::Tensor &indices, c10::IntArrayRef sizes)
{
    at::Tensor linear = at::zeros({indices.size(1)}, indices.options());
    for (int64_t d = 0; d < indices.size(0); d++)
        linear.mul_(sizes[static_cast<size_t>(d)]).add_(indices.select(0, d));
    return linear;
}

/* The inverse of linear_indices: [nnz] -> [sparse_dim, nnz]. */
at::Tensor full_indices(at::Tensor linear, c10::IntArrayRef sizes, int64_t sparse_dim)
{
    at::Tensor indices = at::empty({sparse_dim, linear.numel()}, linear.options());
    for (int64_t d = sparse_dim - 1; d >= 0; d--) {
        const int64_t size = std::max<int64_t>(sizes[static_cast<size_t>(d)], 1);
        indices.select(0, d).copy_(linear.remainder(size));
        linear = linear.div(size, "floor");
    }
    return indices;
}

/* One rank's entries, in order of position. */
struct Run {
    const int64_t *positions;
    size_t n;
};

/* Call visit(position, rank, entry) for every entry, by position, then by rank. Sums add in this order. */
template <class Visit> void merge(const std::vector<Run> &runs, Visit &&visit)
{
    struct Head {
        int64_t position;
        size_t rank, entry;
        bool operator<(const Head &other) const
        {
            return position != other.position ? position > other.position : rank > other.rank;
        }
    };
    std::priority_queue<Head> heads;
    for (size_t r = 0; r < runs.size(); r++)
        if (runs[r].n > 0)
            heads.push({runs[r].positions[0], r, 0});
    while (!heads.empty()) {
        const Head head = heads.top();
        heads.pop();
        visit(head.position, head.rank, head.entry);
        if (head.entry + 1 < runs[head.rank].n)
            heads.push({runs[head.rank].positions[head.entry + 1], head.rank, head.entry + 1});
    }
}

/* out[u, :] = the sum, from +0.0 in rank order, of all ranks' rows at the u-th position of the union. 16-bit
 * floats add in float32.
 *   gathered   [n_ranks, max_nnz, width];  returns [n_union, width] of the same dtype */
template <class T>
at::Tensor sum_rows(const std::vector<Run> &runs, const at::Tensor &gathered, int64_t n_union, bool average)
{
    using Acc = at::opmath_type<T>;
    const int n_ranks = static_cast<int>(runs.size());
    const int64_t max_nnz = gathered.size(1), width = gathered.size(2);
    at::Tensor out = at::empty({n_union, width}, gathered.options());
    const T *in = gathered.const_data_ptr<T>();
    T *row = out.mutable_data_ptr<T>();
    std::vector<Acc> acc(static_cast<size_t>(width));
    bool open = false;
    int64_t at_position = 0;

    const auto close_row = [&] {
        for (size_t i = 0; i < acc.size(); i++)
            *row++ = static_cast<T>(average ? average_of<Acc>(acc[i], n_ranks) : acc[i]);
    };
    merge(runs, [&](int64_t position, size_t rank, size_t entry) {
        if (!open || position != at_position) {
            if (open)
                close_row();
            std::fill(acc.begin(), acc.end(), Acc(0));
            open = true;
            at_position = position;
        }
        const T *from = in + (static_cast<int64_t>(rank) * max_nnz + static_cast<int64_t>(entry)) * width;
        for (size_t i = 0; i < acc.size(); i++)
            acc[i] = sum_of<Acc>(acc[i], static_cast<Acc>(from[i]));
    });
    if (open)
        close_row();
    return out;
}

/* All ranks' `mine` in rank order: [n_ranks, ...]. */
at::Tensor gather(Comm &comm, const at::Tensor &mine, const OpText &op, milliseconds timeout)
{
    std::vector<int64_t> shape{comm.size()};
    shape.insert(shape.end(), mine.sizes().begin(), mine.sizes().end());
    at::Tensor all = at::empty(shape, mine.options());
    const WireType wire = wire_for_moving(mine.scalar_type(), op);
    comm.issue(op, timeout, [&](spccl_comm *raw) {
        return spccl_all_gather(raw, address(mine), address(all),
                                static_cast<size_t>(mine.numel()) * wire.per_elem, wire.dtype, nullptr);
    });
    return all;
}

/* A contiguous copy of `t`, padded with zero rows to `n` rows. */
at::Tensor padded(const at::Tensor &t, int64_t n)
{
    if (t.size(0) == n)
        return t.contiguous();
    std::vector<int64_t> shape = t.sizes().vec();
    shape[0] = n;
    at::Tensor out = at::zeros(shape, t.options());
    out.narrow(0, 0, t.size(0)).copy_(t);
    return out;
}

/* Throws unless each rank's positions ascend and lie within the shape. Peers sent them, and they become
 * indices of the user's result. */
void check_positions(const std::vector<Run> &runs, int64_t n_positions, const std::string &who,
                     const OpText &op)
{
    for (size_t r = 0; r < runs.size(); r++)
        for (size_t i = 0; i < runs[r].n; i++)
            if (runs[r].positions[i] < 0 || runs[r].positions[i] >= n_positions ||
                (i > 0 && runs[r].positions[i] <= runs[r].positions[i - 1]))
                std::rethrow_exception(
                    make_error(SPCCL_ERR_FORMAT, who + ": " + op.str() + ", sparse_coo",
                               "rank " + std::to_string(r) + " sent index " +
                                   std::to_string(runs[r].positions[i]) + " at entry " + std::to_string(i) +
                                   ", wanted ascending indices below " + std::to_string(n_positions)));
}

/* The entries of every rank.
 *   positions   [n_ranks, max_nnz] int64, borrowed as long as the runs are used */
std::vector<Run> runs_of(const at::Tensor &positions, const std::vector<Header> &headers)
{
    std::vector<Run> runs;
    const int64_t *row = positions.const_data_ptr<int64_t>();
    for (const Header &h : headers) {
        runs.push_back({row, static_cast<size_t>(h.nnz)});
        row += positions.size(1);
    }
    return runs;
}

void check_arguments(const at::Tensor &tensor, c10d::ReduceOp::RedOpType redop, const OpText &op)
{
    TORCH_CHECK_VALUE(tensor.layout() == c10::Layout::Sparse, "spccl: ", op.str(), ": tensors has layout ",
                      tensor.layout(),
                      ": torch.sparse_coo is the only sparse layout that spccl takes; use "
                      "tensor.to_sparse_coo()");
    TORCH_CHECK_VALUE(redop == c10d::ReduceOp::SUM || redop == c10d::ReduceOp::AVG, "spccl: ", op.str(),
                      ": a sparse_coo tensor can be reduced by sum or avg only; use tensor.to_dense()");
    if (reduction_route(tensor.scalar_type(), redop) != Route::spccl)
        refuse_reduction(op);
}

/* n_positions: product of the sparse sizes. width: elements of one entry, the product of the dense sizes. */
struct Extent {
    int64_t n_positions = 1, width = 1;
};

Extent extent_of(const at::Tensor &t)
{
    Extent extent;
    for (int64_t d = 0; d < t.dim(); d++)
        (d < t.sparse_dim() ? extent.n_positions : extent.width) *= t.size(d);
    return extent;
}

/* Exchanges and checks the headers of all ranks' coalesced tensors. */
std::vector<Header> exchange_headers(Comm &comm, const at::Tensor &mine, c10d::ReduceOp::RedOpType redop,
                                     const OpText &op, milliseconds timeout)
{
    const Header header{mine._nnz(),
                        mine.sparse_dim(),
                        mine.dense_dim(),
                        hash_of(mine.sizes()),
                        static_cast<int64_t>(mine.scalar_type()),
                        static_cast<int64_t>(redop)};
    std::vector<Header> headers(static_cast<size_t>(comm.size()));
    comm.issue(op, timeout, [&](spccl_comm *raw) {
        return spccl_all_gather(raw, &header, headers.data(), header_words, SPCCL_INT64, nullptr);
    });
    check_headers(headers, comm.rank(), extent_of(mine).n_positions, comm.who(), op);
    return headers;
}

int64_t largest_nnz(const std::vector<Header> &headers)
{
    int64_t most = 0;
    for (const Header &h : headers)
        most = std::max(most, h.nnz);
    return most;
}

/* Replace `tensor` by a coalesced tensor of the same shape with these entries.
 *   united   [n_union] int64, ascending;  sum   [n_union, width] */
void replace(at::Tensor &tensor, const at::Tensor &united, const at::Tensor &sum, int64_t sparse_dim)
{
    const c10::IntArrayRef sizes = tensor.sizes();
    std::vector<int64_t> value_shape{united.numel()};
    value_shape.insert(value_shape.end(), sizes.begin() + sparse_dim, sizes.end());
    const at::Tensor result = at::_sparse_coo_tensor_unsafe(
        full_indices(united, sizes, sparse_dim), sum.reshape(value_shape), sizes, tensor.options());
    result._coalesced_(true);
    tensor.copy_(result);
}

/* Every position that some rank has: [n_union] int64, ascending. */
at::Tensor unite(const std::vector<Run> &runs)
{
    int64_t total = 0;
    for (const Run &run : runs)
        total += static_cast<int64_t>(run.n);
    at::Tensor all = at::empty({total}, at::kLong);
    int64_t *first = all.mutable_data_ptr<int64_t>(), *last = first;
    merge(runs, [&](int64_t position, size_t, size_t) {
        if (last == first || last[-1] != position)
            *last++ = position;
    });
    return all.narrow(0, 0, last - first).clone();
}
} // namespace

/* ---- CUDA ---------------------------------------------------------------------------------------- */

namespace
{
/* sum_rows on the GPU. Ranks are added one after the other. A rank has each position once, so no two
 * additions of one rank go to the same row.
 *   positions   [n_ranks][nnz of the rank] int64
 *   values      [n_ranks, max_nnz, width]
 *   united      every position that some rank has: [n_union] int64, ascending */
at::Tensor sum_rows_cuda(const std::vector<at::Tensor> &positions, const at::Tensor &values,
                         const at::Tensor &united, bool average)
{
    const at::ScalarType dtype = values.scalar_type();
    const bool half = dtype == at::kHalf || dtype == at::kBFloat16;
    at::Tensor acc =
        at::zeros({united.numel(), values.size(2)}, values.options().dtype(half ? at::kFloat : dtype));
    for (size_t r = 0; r < positions.size(); r++) {
        const int64_t nnz = positions[r].numel();
        const at::Tensor rows = at::searchsorted(united, positions[r]);
        const at::Tensor mine =
            values.select(0, static_cast<int64_t>(r)).narrow(0, 0, nnz).to(acc.scalar_type());
        acc.index_copy_(0, rows, acc.index_select(0, rows).add_(mine));
    }
    const auto n_ranks = static_cast<int64_t>(positions.size());
    if (average && at::isFloatingType(dtype))
        acc.div_(n_ranks);
    else if (average) /* Divide in int64: in int8 the divisor 256 would wrap to 0. */
        acc = acc.to(at::kLong).div_(n_ranks, "trunc");
    return acc.to(dtype);
}
} // namespace

void sparse_all_reduce_cuda(at::Tensor &tensor, c10d::ReduceOp::RedOpType redop, const OpText &op,
                            milliseconds timeout, Comm &comm,
                            c10::function_ref<at::Tensor(const at::Tensor &)> gather)
{
    check_arguments(tensor, redop, op);
    at::NoGradGuard no_grad;
    const at::Tensor mine = tensor.coalesce();
    const auto [n_positions, width] = extent_of(mine);
    const std::vector<Header> headers = exchange_headers(comm, mine, redop, op, timeout);
    const int64_t max_nnz = largest_nnz(headers);
    if (max_nnz == 0)
        return replace(tensor, mine._indices().new_empty({0}), mine._values().new_empty({0, width}),
                       mine.sparse_dim());
    const bool narrow = n_positions <= std::numeric_limits<int32_t>::max();
    at::Tensor all = linear_indices(mine._indices(), mine.sizes()).to(narrow ? at::kInt : at::kLong);
    all = gather(padded(all, max_nnz)).to(at::kLong);
    const at::Tensor values = gather(padded(mine._values().reshape({mine._nnz(), width}), max_nnz));

    std::vector<at::Tensor> positions;
    for (int r = 0; r < comm.size(); r++)
        positions.push_back(all.select(0, r).narrow(0, 0, headers[static_cast<size_t>(r)].nnz));
    const at::Tensor united = std::get<0>(at::_unique2(at::cat(positions), /*sorted=*/true));
    const int64_t first = united[0].item<int64_t>(), last = united[-1].item<int64_t>();
    if (first < 0 || last >= n_positions)
        std::rethrow_exception(make_error(SPCCL_ERR_FORMAT, comm.who() + ": " + op.str() + ", sparse_coo",
                                          "a rank sent index " + std::to_string(first < 0 ? first : last) +
                                              ", wanted indices below " + std::to_string(n_positions)));
    replace(tensor, united, sum_rows_cuda(positions, values, united, redop == c10d::ReduceOp::AVG),
            mine.sparse_dim());
}

/* ---- SparseRunner -------------------------------------------------------------------------------- */

SparseRunner::SparseRunner(c10::intrusive_ptr<c10d::Store> store, int rank, int size, CommSettings settings,
                           std::shared_ptr<Comm> group, std::shared_ptr<SerialThread> completer)
    : store_(std::move(store)), rank_(rank), size_(size), settings_(std::move(settings)),
      group_(std::move(group)), completer_(std::move(completer))
{
    settings_.name += "/sparse";
}

c10::intrusive_ptr<TaskWork> SparseRunner::all_reduce(at::Tensor &tensor, const c10d::AllreduceOptions &opts,
                                                      OpText op, uint64_t sequence)
{
    const c10d::ReduceOp::RedOpType redop = opts.reduceOp.op_;
    check_arguments(tensor, redop, op);
    group_->check_process(op.str());

    auto work = c10::make_intrusive<TaskWork>(rank_, op, "spccl:all_reduce_sparse",
                                              std::vector<at::Tensor>{tensor}, sequence, completer_);
    work->abort_task = [runner = weak_from_this()](const char *reason) {
        if (auto alive = runner.lock())
            alive->abort(reason);
    };
    thread_.post([this, work, tensor, redop, op, timeout = opts.timeout] {
        work->run([&] { run(tensor, redop, op, timeout); });
    });
    return work;
}

/* Why joining the communicator should stop, or "" if it should go on. */
std::string SparseRunner::why_stop()
{
    std::string text;
    if (group_->error(&text) != SPCCL_OK)
        return text;
    std::lock_guard<std::mutex> lock(mutex_);
    return aborted_ ? "the group was aborted" : "";
}

/* Throws the cause if the group is broken. Then it also aborts the runner's own communicator, so that peers
 * that wait on it learn of the failure. */
void SparseRunner::check_group(const OpText &op)
{
    try {
        group_->check_usable(op.str());
    } catch (...) {
        abort("the group is broken");
        throw;
    }
}

std::shared_ptr<Comm> SparseRunner::comm()
{
    CommSettings settings;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        if (comm_)
            return comm_;
        settings = settings_;
    }
    auto made = std::make_shared<Comm>(independent_store(store_), rank_, size_, settings,
                                       [this] { return why_stop(); });
    std::lock_guard<std::mutex> lock(mutex_);
    comm_ = made;
    if (aborted_)
        comm_->abort("the group was aborted");
    return comm_;
}

void SparseRunner::run(at::Tensor tensor, c10d::ReduceOp::RedOpType redop, const OpText &op,
                       milliseconds timeout)
{
    check_group(op);
    const std::shared_ptr<Comm> group = comm();
    const at::Tensor mine = tensor.coalesce();
    const auto [n_positions, width] = extent_of(mine);
    const std::vector<Header> headers = exchange_headers(*group, mine, redop, op, timeout);
    const int64_t max_nnz = largest_nnz(headers);

    const bool narrow = n_positions <= std::numeric_limits<int32_t>::max();
    at::Tensor positions = linear_indices(mine._indices(), mine.sizes()).to(narrow ? at::kInt : at::kLong);
    positions = gather(*group, padded(positions, max_nnz), op, timeout).to(at::kLong);
    const at::Tensor values =
        gather(*group, padded(mine._values().reshape({mine._nnz(), width}), max_nnz), op, timeout)
            .reshape({size_, max_nnz, width});

    const std::vector<Run> runs = runs_of(positions, headers);
    check_positions(runs, n_positions, group->who(), op);
    const at::Tensor united = unite(runs);
    at::Tensor sum;
    AT_DISPATCH_ALL_TYPES_AND2(at::kHalf, at::kBFloat16, mine.scalar_type(), "spccl_sparse_all_reduce", [&] {
        sum = sum_rows<scalar_t>(runs, values, united.numel(), redop == c10d::ReduceOp::AVG);
    });
    replace(tensor, united, sum, mine.sparse_dim());
}

void SparseRunner::abort(const char *reason) noexcept
{
    std::shared_ptr<Comm> group;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        aborted_ = true;
        group = comm_;
    }
    if (group)
        group->abort(reason);
}

void SparseRunner::set_timeout(milliseconds timeout)
{
    std::shared_ptr<Comm> group;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        settings_.timeout = timeout;
        group = comm_;
    }
    if (group)
        group->set_timeout(timeout);
}

void SparseRunner::close()
{
    thread_.stop();
    std::lock_guard<std::mutex> lock(mutex_);
    if (comm_)
        comm_->close();
}

void SparseRunner::add_stats(spccl_stats &sum)
{
    std::shared_ptr<Comm> group;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        group = comm_;
    }
    if (!group)
        return;
    const spccl_stats mine = group->stats();
    sum.n_collectives += mine.n_collectives;
    sum.dense_bytes_sent += mine.dense_bytes_sent;
    sum.wire_bytes_sent += mine.wire_bytes_sent;
    sum.wire_bytes_received += mine.wire_bytes_received;
    sum.buffer_bytes += mine.buffer_bytes;
    for (size_t i = 0; i < SPCCL_N_FORMATS_MAX; i++)
        sum.n_frames_sent[i] += mine.n_frames_sent[i];
}

} // namespace spccl_torch
