/* stream_order.cpp - runs CollectiveOrder (csrc/c10d_backend/order.cpp) without a GPU, and prints its calls.
 *
 * Stands in for torch's CUDA guard and for the driver's function that reports captures. It prints a line for
 * each call of run(): "?" = the driver is asked, "R<event>@<stream>" = an event is recorded,
 * "W<event>@<stream>" = a stream waits for an event, "K@<stream>" = the collective. Streams 100 and 101 are
 * the order's own: outside of captures, and in captures. test_stream_order.py compiles this file and reads
 * the lines. */
#include <cstdio>
#include <string>

#include "order.cpp"

namespace
{
c10::StreamId current_id = 0;
unsigned long long capture_of_9 = 0;
std::string printed;

struct Recorder final : c10::impl::DeviceGuardImplInterface {
    static inline c10::StreamId next_stream = 100;
    static inline size_t next_event = 1;

    c10::DeviceType type() const override
    {
        return c10::DeviceType::CUDA;
    }
    c10::Device exchangeDevice(c10::Device d) const override
    {
        return d;
    }
    c10::Device getDevice() const override
    {
        return {c10::DeviceType::CUDA, 0};
    }
    void setDevice(c10::Device) const override
    {
    }
    void uncheckedSetDevice(c10::Device) const noexcept override
    {
    }
    c10::Stream getStream(c10::Device d) const override
    {
        return c10::Stream(c10::Stream::UNSAFE, d, current_id);
    }
    c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override
    {
        return c10::Stream(c10::Stream::UNSAFE, d, next_stream++);
    }
    c10::Stream exchangeStream(c10::Stream s) const override
    {
        const c10::Stream before = getStream(s.device());
        current_id = s.id();
        return before;
    }
    void *getStreamNativeHandle(const c10::Stream s) const
    {
        return reinterpret_cast<void *>(static_cast<size_t>(s.id()));
    }
    c10::DeviceIndex deviceCount() const noexcept override
    {
        return 1;
    }
    void record(void **event, const c10::Stream &s, const c10::DeviceIndex,
                const c10::EventFlag) const override
    {
        if (*event == nullptr)
            *event = reinterpret_cast<void *>(next_event++);
        printed +=
            "R" + std::to_string(reinterpret_cast<size_t>(*event)) + "@" + std::to_string(s.id()) + " ";
    }
    void block(void *event, const c10::Stream &s) const override
    {
        printed += "W" + std::to_string(reinterpret_cast<size_t>(event)) + "@" + std::to_string(s.id()) + " ";
    }
};
C10_REGISTER_GUARD_IMPL(CUDA, Recorder);

void call(spccl_torch::CollectiveOrder &order, bool async, c10::StreamId on, bool fails = false,
          bool closes = false)
{
    printed.clear();
    current_id = on;
    try {
        order.run(async, [&](spccl_torch::CollectiveOrder::Entry &entry) {
            const size_t stream = reinterpret_cast<size_t>(entry.handle);
            printed += "K@" + std::to_string(stream) + " ";
            if (current_id != static_cast<c10::StreamId>(stream))
                printed += "(not current) ";
            if (entry.captured != (capture_of_9 != 0))
                printed += "(captured?) ";
            if (closes) {
                entry.close();
                printed += "closed ";
            }
            if (fails)
                throw 1;
        });
    } catch (int) {
        printed += "threw ";
    }
    std::printf("%s%s\n", printed.c_str(), current_id == on ? "" : "(stream not restored)");
}
} // namespace

/* As cuda.h declares it. The library that holds it is called libcuda.so.1. */
extern "C" __attribute__((visibility("default"))) int
cuStreamGetCaptureInfo_v2(void *stream, int *status, unsigned long long *id, void **, const void **, size_t *)
{
    printed += "? ";
    *id = reinterpret_cast<size_t>(stream) == 9 ? capture_of_9 : 0;
    *status = *id != 0;
    return 0;
}

extern "C" __attribute__((visibility("default"))) void play()
{
    spccl_torch::CollectiveOrder order(c10::Device(c10::DeviceType::CUDA, 0));
    call(order, false, 0);
    call(order, false, 0);
    call(order, true, 0);
    call(order, true, 7);
    call(order, false, 7);
    call(order, false, 0);
    call(order, true, 0, true);
    capture_of_9 = 5;
    call(order, false, 9);
    call(order, true, 9);
    call(order, false, 9);
    call(order, true, 9, true);
    capture_of_9 = 6;
    call(order, true, 9);
    capture_of_9 = 0;
    call(order, false, 9);
    call(order, true, 0);
    call(order, true, 0, false, true);
    call(order, false, 7, true, true);
    std::fflush(stdout);
}
