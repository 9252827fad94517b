/* sparse.hpp - all-reduce of torch.sparse_coo tensors, exact, in rank order.
 *
 * Runs on a communicator and a thread of its own (the sparse lane), because it is a chain of all-gathers
 * whose sizes are known only on the way: on the group's communicator they would slip between the calls that
 * the user's thread issues, in another order on every rank. Both are made by the first sparse call.
 * For CUDA tensors the same exchange runs in the caller's order instead (sparse_all_reduce_cuda).
 * May include: the headers above it. */
#pragma once

#include "work.hpp"

#include <c10/util/FunctionRef.h>

#include <memory>
#include <mutex>

namespace spccl_torch
{

/* The same for a CUDA tensor, on the calling thread and its current stream, through `gather`, which makes
 * [n_ranks, ...] of every rank's tensor in the group's own order. Waits for the GPU where torch has to know
 * how many entries there are: coalescing, and the union. The sizes travel over `comm`'s host side. tensor
 * sparse_coo; replaced by the result Memory and cost as below. Throws what is wrong with the arguments, on
 * every rank if ranks disagree. */
void sparse_all_reduce_cuda(at::Tensor &tensor, c10d::ReduceOp::RedOpType redop, const OpText &op,
                            milliseconds timeout, Comm &comm,
                            c10::function_ref<at::Tensor(const at::Tensor &)> gather);

class SparseLane : public std::enable_shared_from_this<SparseLane>
{
  public:
    /* settings   as the group's; the name gets "/sparse" added
     * group      what everything else of the group runs on: once it is broken, so is this
     * completer  runs the callbacks of futures */
    SparseLane(c10::intrusive_ptr<c10d::Store> store, int rank, int size, CommSettings settings,
               std::shared_ptr<Comm> group, std::shared_ptr<SerialThread> completer);
    ~SparseLane();

    /* tensor := the sum (or average) of every rank's `tensor`, coalesced, the same bits on every rank.
     *   tensor   sparse_coo, host memory; any nnz, 0 included, different on each rank; shape, dtype and
     * sparse_dim equal on all ranks. An explicit zero stays listed. op       SUM or AVG; floats and int8 ...
     * int64; float16 and bfloat16 add in float32 and round once Cost per rank: an all-gather of 6 int64, then
     * of max-nnz indices (int32 where the sparse shape allows, else int64) and of max-nnz values. Shorter
     * lists are padded with zeros, which spccl does not send. Memory: world_size * max-nnz * (index + value)
     * bytes, and the result. Time: O(total nnz * log ranks). Throws what is wrong with the arguments; what
     * goes wrong between ranks is in the Work. */
    c10::intrusive_ptr<TaskWork> all_reduce(at::Tensor &tensor, const c10d::AllreduceOptions &opts, OpText op,
                                            uint64_t sequence);

    void abort(const char *reason) noexcept;
    void set_timeout(milliseconds timeout);
    void close();
    /* Adds this lane's counters, if it was ever used. */
    void add_stats(spccl_stats &sum);

  private:
    std::shared_ptr<Comm> comm();
    std::string why_stop();
    void check_group(const OpText &op);
    void run(at::Tensor tensor, c10d::ReduceOp::RedOpType redop, const OpText &op, milliseconds timeout);

    const c10::intrusive_ptr<c10d::Store> store_;
    const int rank_;
    const int size_;
    CommSettings settings_;
    const std::shared_ptr<Comm> group_;
    const std::shared_ptr<SerialThread> completer_;
    SerialThread thread_;
    std::mutex mutex_; /* guards comm_, aborted_, settings_.timeout; not held while joining */
    std::shared_ptr<Comm> comm_;
    bool aborted_ = false;
};

} // namespace spccl_torch
