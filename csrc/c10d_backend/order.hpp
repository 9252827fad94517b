/* order.hpp - the one order in which collectives run on a GPU, kept with torch's generic streams and events.
 *
 * Kernels that wait for peers must start in the same order on every rank. Otherwise two of them can each hold
 * the multiprocessors that the other one needs on another GPU. So all collectives of a GPU, of all spccl groups,
 * spccl's and NCCL's, are in one collective order, and each waits for the one before it. An asynchronous
 * collective runs on a stream of the order, a synchronous one on the caller's stream. Point-to-point calls are
 * not in the order, because ranks make them in different orders.
 * The collectives of a CUDA graph capture have an order of their own, in that capture alone.
 * This is the only order under torch: groups attach their communicators with caller_orders (docs/GPU.md).
 * May include: torch_compat.hpp. */
#pragma once

#include "torch_compat.hpp"

#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/FunctionRef.h>

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace spccl_torch
{

class StreamOrder
{
  public:
    /* The order of `device` (CUDA, with an index) that all groups of this process share. It is never freed:
     * events cannot be freed once CUDA is being unloaded. */
    static std::shared_ptr<StreamOrder> of_device(c10::Device device);
    /* An order for one group alone, for programs whose threads issue on several groups without a common
     * order. */
    explicit StreamOrder(c10::Device device);
    StreamOrder(const StreamOrder &) = delete;
    StreamOrder &operator=(const StreamOrder &) = delete;

    c10::Device device() const
    {
        return device_;
    }

    /* An event of this order; the last owner to let go gives it back, to be recorded again. */
    using EventPtr = std::shared_ptr<c10::Event>;

    /* The place of one collective in the order. */
    struct Turn {
        c10::Stream stream; /* where it runs */
        void *handle;       /* the cudaStream_t of `stream` */
        bool captured;      /* into a CUDA graph */
        EventPtr end;       /* recorded behind the collective */
        bool closed = false;

        /* Record `end` now, if that has not happened yet. */
        void close()
        {
            if (!std::exchange(closed, true))
                end->record(stream);
        }
    };

    /* Run `enqueue(turn)` as the next collective of the order. Meanwhile turn.stream is torch's current
     * stream, and what `enqueue` puts there runs after the collectives before it. Then close the turn, unless
     * `enqueue` has. Returns the turn. Never waits for the GPU.
     *   async   false: on the caller's current stream. true: on the order's own stream, after what is on the
     *           caller's now
     * If `enqueue` throws, the turn is closed all the same and, in a capture, its stream is joined again.
     * Threads: any. */
    Turn run(bool async, c10::function_ref<void(Turn &turn)> enqueue);

    /* torch's current stream of the device. */
    c10::Stream current() const
    {
        return guard_.getStream(device_);
    }
    /* Is the current stream being captured into a graph? */
    bool capturing() const;
    /* The allocator does not reuse the memory of `t` before `stream` has completed what is on it now. */
    void keep_alive(const at::Tensor &t, const c10::Stream &stream) const;

    /* Events are reused: making one costs as much as a launch. */
    EventPtr take_event();

  private:
    /* An order: that of the calls outside of captures, or that of one capture. */
    struct Chain {
        Chain(c10::Stream own, c10::DeviceType type) : stream(own), last(own), fork(type)
        {
        }
        const c10::Stream stream; /* of asynchronous calls */
        c10::Stream last;         /* where the latest collective ran */
        EventPtr end;             /* recorded behind the latest one; NULL: there was none */
        uint64_t capture = 0;     /* id of the capture whose order this is; 0 = none */
        c10::Event fork;          /* what an asynchronous call waits for on the caller's stream */
    };
    struct Pool {
        std::mutex mutex;
        std::vector<c10::Event> free;
    };

    const c10::Device device_;
    const c10::impl::VirtualGuardImpl guard_;
    std::mutex mutex_; /* held while a collective is enqueued */
    Chain eager_, captured_;
    const std::shared_ptr<Pool> pool_ = std::make_shared<Pool>(); /* events may outlive this object */
};

} // namespace spccl_torch
