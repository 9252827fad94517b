/* order.cpp - see order.hpp. */
#include "order.hpp"

#include <map>

namespace spccl_torch
{

std::shared_ptr<StreamOrder> StreamOrder::of_device(c10::Device device)
{
    static std::mutex mutex;
    static auto *orders = new std::map<c10::DeviceIndex, std::shared_ptr<StreamOrder>>();
    std::lock_guard<std::mutex> lock(mutex);
    std::shared_ptr<StreamOrder> &order = (*orders)[device.index()];
    if (!order)
        order = std::make_shared<StreamOrder>(device);
    return order;
}

/* Captures use a stream of their own. It belongs to the capture until that ends, and collectives that other
 * threads issue meanwhile must not become part of the capture. */
StreamOrder::StreamOrder(c10::Device device)
    : device_(device), guard_(device.type()),
      eager_(guard_.getStreamFromGlobalPool(device, /*isHighPriority=*/true), device.type()),
      captured_(guard_.getStreamFromGlobalPool(device, /*isHighPriority=*/true), device.type())
{
}

/* Stream `on` runs the next collective: make it wait for the latest one, if that ran on another stream. */
void StreamOrder::append(Chain &chain, const c10::Stream &on)
{
    if (!chain.any || chain.last == on)
        return;
    /* The chain's own stream holds nothing else, so its end can be recorded as late as here. */
    if (chain.last == chain.stream)
        chain.tail.record(chain.stream);
    chain.tail.block(on);
}

c10::Stream StreamOrder::run(bool async, c10::Event *end, c10::function_ref<void(void *)> enqueue)
{
    std::lock_guard<std::mutex> lock(mutex_);
    const c10::Stream caller = guard_.getStream(device_);
    void *handle = native_handle(caller);
    const uint64_t capture = capture_id(handle);
    Chain &chain = capture == 0 ? eager_ : captured_;
    if (chain.capture != capture) { /* events of another capture mean nothing in this one */
        chain.capture = capture;
        chain.any = false;
    }
    const c10::Stream on = async ? chain.stream : caller;
    if (on != caller) {
        handle = native_handle(on);
        chain.fork.record(caller);
        chain.fork.block(on);
    }
    append(chain, on);

    const auto close = [&] {
        chain.any = true;
        chain.last = on;
        if (on != chain.stream)
            chain.tail.record(on);
        if (end != nullptr)
            end->record(on);
    };
    try {
        c10::OptionalStreamGuard guard; /* the caller's stream is current already */
        if (on != caller)
            guard.reset_stream(on);
        enqueue(handle);
    } catch (...) {
        close();
        if (capture != 0 && on != caller) {
            chain.tail.record(on);
            chain.tail.block(caller);
        }
        throw;
    }
    close();
    return on;
}

bool StreamOrder::capturing() const
{
    return capture_id(native_handle(current())) != 0;
}

void StreamOrder::keep_alive(const at::Tensor &t, const c10::Stream &stream) const
{
    if (t.is_sparse()) {
        keep_alive(t._indices(), stream);
        keep_alive(t._values(), stream);
    } else if (t.has_storage() && t.device() == device_) {
        guard_.recordDataPtrOnStream(t.storage().data_ptr(), stream);
    }
}

c10::Event StreamOrder::take_event()
{
    {
        std::lock_guard<std::mutex> lock(pool_mutex_);
        if (!pool_.empty()) {
            c10::Event event = std::move(pool_.back());
            pool_.pop_back();
            return event;
        }
    }
    return c10::Event(device_.type());
}

void StreamOrder::give_back(c10::Event event) noexcept
{
    std::lock_guard<std::mutex> lock(pool_mutex_);
    pool_.push_back(std::move(event));
}

} // namespace spccl_torch
