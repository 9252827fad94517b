/* order.hpp - the one order in which collectives run on a GPU, kept with torch's generic streams and events.
 *
 * Kernels of two collectives that wait for peers must reach the hardware in the same order on every rank, or
 * each may hold the multiprocessors that the other one needs somewhere else. So all collectives of a device,
 * of all spccl groups, ours and those handed to NCCL, form one chain: an asynchronous one runs on the chain's
 * own stream, a synchronous one on the caller's, and each waits for the one before it. Point-to-point calls
 * are not in the chain: their order differs between ranks.
 * Inside a CUDA graph capture the chain is one of its own, of that capture alone.
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

    /* Run `enqueue(cudaStream_t)` as the next of the chain; the stream is torch's current one meanwhile, and
     * what `enqueue` puts there runs after all that came before. Returns the stream. Never waits for the GPU.
     *   async   false: on the caller's current stream. true: on the chain's own stream, after what is on the
     *           caller's now
     *   end     recorded behind it; may be NULL
     * If `enqueue` throws, the chain goes on and, in a capture, its stream is joined again. Threads: any. */
    c10::Stream run(bool async, c10::Event *end, c10::function_ref<void(void *stream)> enqueue);

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
    c10::Event take_event();
    void give_back(c10::Event event) noexcept;

  private:
    struct Chain {
        Chain(c10::Stream own, c10::DeviceType type) : stream(own), last(own), fork(type), tail(type)
        {
        }
        const c10::Stream stream; /* of asynchronous calls */
        c10::Stream last;         /* where the latest one ran */
        bool any = false;         /* whether there was a call yet */
        uint64_t capture = 0;     /* id of the capture that this chain belongs to; 0 = none */
        c10::Event fork;          /* what an asynchronous call waits for on the caller's stream */
        c10::Event tail;          /* recorded behind the latest call, unless that ran on `stream` */
    };
    void append(Chain &chain, const c10::Stream &on);

    const c10::Device device_;
    const c10::impl::VirtualGuardImpl guard_;
    std::mutex mutex_; /* held while a collective is enqueued */
    Chain eager_, captured_;
    std::mutex pool_mutex_;
    std::vector<c10::Event> pool_;
};

} // namespace spccl_torch
