/* order.cpp - see order.hpp. */
#include "order.hpp"

#include <map>

namespace spccl_torch
{

std::shared_ptr<CollectiveOrder> CollectiveOrder::of_device(c10::Device device)
{
    static std::mutex mutex;
    static auto *orders = new std::map<c10::DeviceIndex, std::shared_ptr<CollectiveOrder>>();
    std::lock_guard<std::mutex> lock(mutex);
    std::shared_ptr<CollectiveOrder> &order = (*orders)[device.index()];
    if (!order)
        order = std::make_shared<CollectiveOrder>(device);
    return order;
}

/* Captures use a second stream. A stream belongs to a capture until the capture ends, and collectives that
 * other threads issue meanwhile must not become part of it. */
CollectiveOrder::CollectiveOrder(c10::Device device)
    : device_(device), guard_(device.type()),
      eager_(guard_.getStreamFromGlobalPool(device, /*isHighPriority=*/true), device.type()),
      captured_(guard_.getStreamFromGlobalPool(device, /*isHighPriority=*/true), device.type())
{
}

CollectiveOrder::Entry CollectiveOrder::run(bool async, c10::function_ref<void(Entry &)> enqueue)
{
    std::lock_guard<std::mutex> lock(mutex_);
    const c10::Stream caller = guard_.getStream(device_);
    void *const caller_handle = native_handle(caller);
    const uint64_t capture = capture_id(caller_handle);
    Order &order = capture == 0 ? eager_ : captured_;
    if (order.capture != capture) { /* events of another capture mean nothing in this one */
        order.capture = capture;
        order.end.reset();
    }
    const c10::Stream on = async ? order.stream : caller;
    Entry entry{on, on == caller ? caller_handle : native_handle(on), capture != 0, take_event()};
    if (on != caller) {
        order.fork.record(caller);
        order.fork.block(on);
    }
    if (order.end && order.last != on)
        order.end->block(on);

    const auto close = [&] {
        entry.close();
        order.end = entry.end;
        order.last = on;
    };
    try {
        c10::OptionalStreamGuard guard; /* the caller's stream is current already */
        if (on != caller)
            guard.reset_stream(on);
        enqueue(entry);
    } catch (...) {
        close();
        if (capture != 0 && on != caller)
            entry.end->block(caller);
        throw;
    }
    close();
    return entry;
}

bool CollectiveOrder::capturing() const
{
    return capture_id(native_handle(current())) != 0;
}

void CollectiveOrder::keep_alive(const at::Tensor &t, const c10::Stream &stream) const
{
    if (t.is_sparse()) {
        keep_alive(t._indices(), stream);
        keep_alive(t._values(), stream);
    } else if (t.has_storage() && t.device() == device_) {
        guard_.recordDataPtrOnStream(t.storage().data_ptr(), stream);
    }
}

CollectiveOrder::EventPtr CollectiveOrder::take_event()
{
    auto event = std::make_unique<c10::Event>(device_.type());
    {
        std::lock_guard<std::mutex> lock(pool_->mutex);
        if (!pool_->free.empty()) {
            *event = std::move(pool_->free.back());
            pool_->free.pop_back();
        }
    }
    return EventPtr(event.release(), [pool = pool_](c10::Event *used) {
        {
            std::lock_guard<std::mutex> lock(pool->mutex);
            pool->free.push_back(std::move(*used));
        }
        delete used;
    });
}

} // namespace spccl_torch
