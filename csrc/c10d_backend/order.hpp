/* order.hpp - the one order in which collectives run on a GPU, kept with torch's generic streams and events.
 *
 * Kernels that wait for peers must start in the same order on every rank. Otherwise two of them can each hold
 * the multiprocessors that the other one needs on another GPU. So all collectives of a GPU, of all spccl
 * groups, spccl's and NCCL's, are in one collective order, and each waits for the one before it. An
 * asynchronous collective runs on a stream of the order, a synchronous one on the caller's stream.
 * Point-to-point calls are not in the order, because each rank makes them in another order.
 * Each CUDA graph capture has a collective order of its own.
 * Under torch libspccl orders nothing itself: groups attach their communicators with caller_orders
 * (docs/GPU.md). May include: torch_compat.hpp. */
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

class CollectiveOrder
{
  public:
    /* The order of `device` (CUDA, with an index) that all groups of this process share. It is never freed:
     * events cannot be freed once CUDA is being unloaded. */
    static std::shared_ptr<CollectiveOrder> of_device(c10::Device device);
    /* An order for one group alone, for programs whose threads issue on several groups without a common
     * order. */
    explicit CollectiveOrder(c10::Device device);
    CollectiveOrder(const CollectiveOrder &) = delete;
    CollectiveOrder &operator=(const CollectiveOrder &) = delete;

    c10::Device device() const
    {
        return device_;
    }

    /* An event from the pool. When its last owner releases it, it returns to the pool. */
    using EventPtr = std::shared_ptr<c10::Event>;

    /* One collective of the order. */
    struct Entry {
        c10::Stream stream; /* where it runs */
        void *handle;       /* the cudaStream_t of `stream` */
        bool captured;      /* into a CUDA graph */
        EventPtr end;       /* recorded after the collective */
        bool closed = false;

        /* Record `end` now, if that has not happened yet. */
        void close()
        {
            if (!std::exchange(closed, true))
                end->record(stream);
        }
    };

    /* Run `enqueue(entry)` as the next collective of the order. While `enqueue` runs, entry.stream is torch's
     * current stream. What `enqueue` puts there runs after all earlier collectives of the order. Then close
     * the entry, unless `enqueue` has closed it. Returns the entry. Never waits for the GPU.
     *   async   false: on the caller's current stream. true: on the order's own stream, after what is now on
     *           the caller's stream
     * If `enqueue` throws, run() closes the entry too. In a capture the caller's stream then waits for
     * entry.stream, because a capture must not end before all its streams are joined. Threads: any. */
    Entry run(bool async, c10::function_ref<void(Entry &entry)> enqueue);

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
    /* The collective order outside of captures, or the one of a capture. */
    struct Order {
        Order(c10::Stream own, c10::DeviceType type) : stream(own), last(own), fork(type)
        {
        }
        const c10::Stream stream; /* of asynchronous calls */
        c10::Stream last;         /* where the latest collective ran */
        EventPtr end;             /* recorded after the latest collective; NULL: there was none */
        uint64_t capture = 0;     /* id of the capture whose order this is; 0 = none */
        c10::Event fork;          /* on the caller's stream: an asynchronous call waits for it */
    };
    struct Pool {
        std::mutex mutex;
        std::vector<c10::Event> free;
    };

    const c10::Device device_;
    const c10::impl::VirtualGuardImpl guard_;
    std::mutex mutex_; /* held while a collective is enqueued */
    Order eager_, captured_;
    const std::shared_ptr<Pool> pool_ = std::make_shared<Pool>(); /* events may outlive this object */
};

} // namespace spccl_torch
