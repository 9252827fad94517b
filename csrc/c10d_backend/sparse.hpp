/* sparse.hpp - all-reduce of torch.sparse_coo tensors, exact, in rank order.
 *
 * A sparse all-reduce is a chain of all-gathers, and each one's size is known only when the one before is
 * done. On the group's own communicator they would come between the calls that the user's thread issues, at
 * other places on every rank. So host tensors are reduced by a SparseRunner, which has a communicator and a
 * thread of its own; the first sparse call makes both. CUDA tensors are reduced in the caller's order
 * instead (sparse_all_reduce_cuda). May include: the headers above it. */
#pragma once

#include "work.hpp"

#include <c10/util/FunctionRef.h>

#include <memory>
#include <mutex>

namespace spccl_torch
{

/* SparseRunner::all_reduce for a CUDA tensor, on the calling thread and its current stream.
 *   tensor   sparse_coo; replaced by the result
 *   comm     carries the sizes, on the host
 *   gather   returns [n_ranks, ...] of every rank's tensor, in the group's own order
 * Waits for the GPU where torch must know a number of entries: in coalesce(), and for the union. Memory and
 * cost as below. Throws what is wrong with the arguments, on every rank if ranks disagree. */
void sparse_all_reduce_cuda(at::Tensor &tensor, c10d::ReduceOp::RedOpType redop, const OpText &op,
                            milliseconds timeout, Comm &comm,
                            c10::function_ref<at::Tensor(const at::Tensor &)> gather);

class SparseRunner : public std::enable_shared_from_this<SparseRunner>
{
  public:
    /* settings   as the group's; the name gets "/sparse" added
     * group      the group's own communicator: once it is broken, so is this one
     * completer  runs the callbacks of futures */
    SparseRunner(c10::intrusive_ptr<c10d::Store> store, int rank, int size, CommSettings settings,
                 std::shared_ptr<Comm> group, std::shared_ptr<SerialThread> completer);
    ~SparseRunner()
    {
        if (!group_->in_child()) /* a mutex may be locked for ever there */
            close();
    }

    /* tensor := the sum (or average) of every rank's `tensor`, coalesced, the same bits on every rank.
     *   tensor   sparse_coo, host memory; any nnz, 0 included, different on each rank; shape, dtype and
     *            sparse_dim equal on all ranks. An explicit zero stays listed
     *   op       SUM or AVG of floats and of integers up to int64; float16 and bfloat16 add in float32 and
     *            round once
     * Cost per rank: an all-gather of 6 int64; one of the indices (int32 where the sparse shape allows, else
     * int64); one of the values. Both are padded to the largest nnz of a rank with zeros, which spccl does
     * not send. Memory: world_size * largest nnz * (index + value) bytes, and the result. Time: O(total nnz *
     * log ranks). Throws what is wrong with the arguments; an error between ranks is in the Work. */
    c10::intrusive_ptr<TaskWork> all_reduce(at::Tensor &tensor, const c10d::AllreduceOptions &opts, OpText op,
                                            uint64_t sequence);

    void abort(const char *reason) noexcept;
    void set_timeout(milliseconds timeout);
    void close();
    /* Adds the counters of this runner's communicator, if one was made. */
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
