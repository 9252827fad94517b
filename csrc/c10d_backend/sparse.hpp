/* sparse.hpp - all-reduce of torch.sparse_coo tensors, exact, in rank order.
 *
 * A sparse all-reduce is three all-gathers. The first gives the sizes of the other two, so it must end before
 * they are issued. On the group's own communicator those two could come between different calls of the user's
 * thread on each rank. So a SparseRunner, with a communicator and a thread of its own, reduces host tensors;
 * the first sparse call makes both. CUDA tensors are reduced on the calling thread instead, in its order of
 * calls (sparse_all_reduce_cuda). May include: the headers above it. */
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
 *   gather   returns every rank's tensor as [n_ranks, ...]; a collective of the group itself
 * Waits for the GPU where torch must know a number of entries: in coalesce(), and for the union. Memory and
 * cost: see SparseRunner::all_reduce. Throws what is wrong with the arguments, on every rank if ranks
 * disagree. */
void sparse_all_reduce_cuda(at::Tensor &tensor, c10d::ReduceOp::RedOpType redop, const OpText &op,
                            milliseconds timeout, Comm &comm,
                            c10::function_ref<at::Tensor(const at::Tensor &)> gather);

class SparseRunner : public std::enable_shared_from_this<SparseRunner>
{
  public:
    /* settings   those of the group; "/sparse" is added to the name
     * group      the group's own communicator; a runner of a broken group throws the cause
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
     * Cost per rank: an all-gather of 6 int64; one of the indices (int32 if the sparse shape allows, else
     * int64); one of the values. Indices and values are padded with zeros to the largest nnz of a rank; spccl
     * does not send the zeros. Memory: world_size * largest nnz * (index + value) bytes, and the result.
     * Time: O(total nnz * log ranks). Throws what is wrong with the arguments; the Work holds an error
     * between ranks. */
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
