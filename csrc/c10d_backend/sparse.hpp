/* sparse.hpp - all-reduce of torch.sparse_coo tensors, exact, in rank order.
 *
 * Runs on a communicator and a thread of its own (the sparse lane), because it is a chain of all-gathers
 * whose sizes are known only on the way: on the group's communicator they would slip between the calls that
 * the user's thread issues, in another order on every rank. Both are made by the first sparse call.
 * May include: spccl.h, torch_compat.hpp, serial_thread.hpp, comm.hpp, work.hpp. */
#pragma once

#include "work.hpp"

#include <memory>
#include <mutex>

namespace spccl_torch
{

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
     *   tensor   sparse_coo, CPU; any nnz, 0 included, different on each rank; shape, dtype and sparse_dim
     *            equal on all ranks. An explicit zero stays listed.
     *   op       SUM or AVG; floats and int8 ... int64; float16 and bfloat16 add in float32 and round once
     * Cost per rank: an all-gather of 6 int64, then of max-nnz indices (int32 where the sparse shape allows,
     * else int64) and of max-nnz values. Shorter lists are padded with zeros, which spccl does not send.
     * Memory: world_size * max-nnz * (index + value) bytes, and the result. Time: O(total nnz * log ranks).
     * Throws what is wrong with the arguments; what goes wrong between ranks is in the Work. */
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
