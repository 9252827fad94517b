// runtime.cpp - the part of the CUDA runtime that concerns streams, events, graphs and launches, for GPUs in
// software. One device thread runs the tasks of all streams of all devices. devices.cpp has devices and
// memory.
#include "runtime.h"
#include "warps.h"

#include <cuda_runtime_api.h>

#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <malloc.h>
#include <map>
#include <mutex>
#include <thread>
#include <time.h>
#include <vector>

#include "gpusim_device.h"

namespace
{

struct moment { // the position in a stream at which an event was recorded
    bool passed = false;
};
struct task {
    enum { CALL, KERNEL, RECORD, WAIT } kind;
    std::function<void()> call; // of KERNEL: what one thread of the kernel does
    gpusim_grid_size size;
    std::shared_ptr<moment> when;
    std::shared_ptr<gpusim_kernel> kernel;
};

// Never destroyed, as the device thread runs on while the program exits.
std::mutex &mu = *new std::mutex;
std::condition_variable &changed = *new std::condition_variable;
std::vector<gpusim_stream *> &streams = *new std::vector<gpusim_stream *>;
unsigned long long last_id;
bool added; // a task was added since the device thread looked last
} // namespace

struct gpusim_graph {
    unsigned long long id;
    std::vector<task> tasks; // in an order that all dependences allow
};
struct gpusim_graph_exec {
    std::vector<task> tasks;
};
struct gpusim_event {
    std::shared_ptr<moment> when;       // null: never recorded
    unsigned long long recorded_in = 0; // id of the capture; 0: none
};
struct gpusim_stream {
    unsigned long long id;
    int device;
    std::deque<task> tasks;
    unsigned long long n_added = 0, n_done = 0; // tasks
    std::condition_variable emptied;            // `tasks` has become empty
    gpusim_graph *capture = nullptr;
};

namespace
{

// Run or start the first task of a stream, without waiting. True: something was done.
bool advance(gpusim_stream &s, std::unique_lock<std::mutex> &lock)
{
    task &t = s.tasks.front(); // stays where it is while others add tasks
    switch (t.kind) {
    case task::CALL:
        lock.unlock(); // a large copy must not keep the host from adding tasks and from asking what is done
        t.call();
        lock.lock();
        break;
    case task::RECORD:
        t.when->passed = true;
        break;
    case task::WAIT:
        if (!t.when->passed)
            return false;
        break;
    case task::KERNEL:
        if (t.kernel == nullptr) {
            t.kernel = gpusim_kernel_start(t.call, t.size);
            return true;
        }
        if (!gpusim_kernel_done(*t.kernel))
            return false;
    }
    s.tasks.pop_front();
    s.n_done++;
    if (s.tasks.empty())
        s.emptied.notify_all();
    return true;
}

[[noreturn]] void run_device()
{
    mallopt(M_MMAP_THRESHOLD, 64 << 20); // CTAs are allocated and freed often: keep their pages
    mallopt(M_TRIM_THRESHOLD, 256 << 20);
    std::unique_lock<std::mutex> lock(mu);
    for (;;) {
        bool moved = false, running = true, worked = false;
        for (size_t i = 0; i < streams.size(); i++) // an index, as `advance` lets others change the list
            for (gpusim_stream *s = streams[i]; !s->tasks.empty() && advance(*s, lock);)
                moved = true;
        if (moved)
            changed.notify_all();
        lock.unlock();
        for (int i = 0; i < 256 && running; i++) {
            gpusim_turn turn = gpusim_run_some();
            running = turn != GPUSIM_NO_KERNEL;
            worked |= turn == GPUSIM_WORKED;
        }
        if (running && !worked) // the warps wait for threads of the host: leave the core to those
            std::this_thread::sleep_for(std::chrono::microseconds(50));
        lock.lock();
        if (!running && !moved && !added)
            changed.wait_for(lock, std::chrono::milliseconds(20));
        added = false;
    }
}

// mu is held.
gpusim_stream *new_stream()
{
    gpusim_stream *s = new gpusim_stream;
    s->id = ++last_id;
    cudaGetDevice(&s->device);
    streams.push_back(s);
    return s;
}

// NULL is the default stream of the current device. Here other streams do not wait for it, as those of
// cudaStreamNonBlocking do not. mu is held.
gpusim_stream *get(cudaStream_t s)
{
    static std::map<int, gpusim_stream *> defaults;
    int device;
    if (s != nullptr)
        return s;
    cudaGetDevice(&device);
    if (defaults[device] == nullptr)
        defaults[device] = new_stream();
    return defaults[device];
}

// mu is held.
void add(cudaStream_t stream, task t)
{
    static bool started;
    gpusim_stream *s = get(stream);
    if (s->capture != nullptr) {
        s->capture->tasks.push_back(std::move(t));
        return;
    }
    if (!started) {
        std::thread(run_device).detach();
        started = true;
    }
    s->tasks.push_back(std::move(t));
    s->n_added++;
    added = true;
    changed.notify_all();
}

bool is_captured(cudaStream_t s)
{
    std::lock_guard<std::mutex> lock(mu);
    return get(s)->capture != nullptr;
}

cudaError_t add_call(cudaStream_t s, std::function<void()> call)
{
    std::lock_guard<std::mutex> lock(mu);
    add(s, {task::CALL, std::move(call), {}, nullptr, nullptr});
    return cudaSuccess;
}

// The tasks of a device that were added so far are done. mu is held.
bool is_done(const std::vector<std::pair<unsigned long long, unsigned long long>> &wanted)
{
    for (auto [id, n] : wanted)
        for (const gpusim_stream *s : streams)
            if (s->id == id && s->n_done < n)
                return false;
    return true;
}

} // namespace

void gpusim_wait_for_device(int device)
{
    std::unique_lock<std::mutex> lock(mu);
    std::vector<std::pair<unsigned long long, unsigned long long>> wanted; // stream, tasks
    for (const gpusim_stream *s : streams)
        if (s->device == device)
            wanted.emplace_back(s->id, s->n_added);
    changed.wait(lock, [&] { return is_done(wanted); });
}

cudaError_t gpusim_launch(std::function<void()> thread, dim3 grid, dim3 block, size_t shared, cudaStream_t s)
{
    if (grid.x == 0 || block.x == 0 || block.x % 32 != 0 || block.x > 1024 || shared > GPUSIM_SHARED_BYTES)
        return gpusim_fail(cudaErrorInvalidValue);
    std::lock_guard<std::mutex> lock(mu);
    add(s, {task::KERNEL, std::move(thread), {grid.x, block.x, shared}, nullptr, nullptr});
    return cudaSuccess;
}

extern "C" {

// ---- streams and events ----

cudaError_t cudaDeviceSynchronize(void)
{
    std::unique_lock<std::mutex> lock(mu);
    changed.wait(lock, [] {
        for (gpusim_stream *s : streams)
            if (!s->tasks.empty())
                return false;
        return true;
    });
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, unsigned)
{
    std::lock_guard<std::mutex> lock(mu);
    *out = new_stream();
    return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t s)
{
    std::unique_lock<std::mutex> lock(mu);
    changed.wait(lock, [s = get(s)] { return s->tasks.empty(); });
    return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t s)
{
    cudaStreamSynchronize(s);
    std::lock_guard<std::mutex> lock(mu);
    for (size_t i = 0; i < streams.size(); i++)
        if (streams[i] == s)
            streams.erase(streams.begin() + (ptrdiff_t)i);
    delete s;
    return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t s)
{
    // Callers poll; leave the core to the device thread.
    std::unique_lock<std::mutex> lock(mu);
    s = get(s);
    bool done = s->emptied.wait_for(lock, std::chrono::milliseconds(2), [s] { return s->tasks.empty(); });
    return done ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaStreamGetId(cudaStream_t s, unsigned long long *id)
{
    std::lock_guard<std::mutex> lock(mu);
    *id = get(s)->id;
    return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out, unsigned)
{
    *out = new gpusim_event;
    return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t e)
{
    delete e;
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s)
{
    std::lock_guard<std::mutex> lock(mu);
    s = get(s);
    e->recorded_in = s->capture != nullptr ? s->capture->id : 0;
    if (s->capture != nullptr) // the tasks of a graph run in the order of its list
        return cudaSuccess;
    e->when = std::make_shared<moment>();
    add(s, {task::RECORD, nullptr, {}, e->when, nullptr});
    return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned)
{
    std::lock_guard<std::mutex> lock(mu);
    if (e->recorded_in != 0) { // the stream joins the capture
        for (gpusim_stream *other : streams)
            if (other->capture != nullptr && other->capture->id == e->recorded_in) {
                get(s)->capture = other->capture;
                return cudaSuccess;
            }
        return gpusim_fail(cudaErrorInvalidValue); // that capture has ended
    }
    if (e->when != nullptr)
        add(s, {task::WAIT, nullptr, {}, e->when, nullptr});
    return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t e)
{
    std::lock_guard<std::mutex> lock(mu);
    return e->when == nullptr || e->when->passed ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind,
                            cudaStream_t s)
{
    struct cudaPointerAttributes of;
    cudaPointerGetAttributes(&of, from);
    if (bytes != 0 && kind == cudaMemcpyHostToDevice && of.type == cudaMemoryTypeUnregistered &&
        !is_captured(s)) {
        // Pageable memory: the call has read it when it returns.
        auto staged = std::make_shared<std::vector<char>>((const char *)from, (const char *)from + bytes);
        return add_call(s, [=] { memcpy(to, staged->data(), bytes); });
    }
    return add_call(s, [=] { memmove(to, from, bytes); });
}
cudaError_t cudaMemsetAsync(void *p, int value, size_t bytes, cudaStream_t s)
{
    return add_call(s, [=] { memset(p, value, bytes); });
}

// ---- graphs ----

cudaError_t cudaStreamBeginCapture(cudaStream_t s, enum cudaStreamCaptureMode)
{
    std::lock_guard<std::mutex> lock(mu);
    if (s == nullptr)
        return gpusim_fail(cudaErrorInvalidValue); // as on GPUs, the default stream cannot be captured
    s->capture = new gpusim_graph;
    s->capture->id = ++last_id;
    return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *out)
{
    std::lock_guard<std::mutex> lock(mu);
    *out = s->capture;
    for (gpusim_stream *other : streams)
        if (other->capture == *out)
            other->capture = nullptr;
    return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, enum cudaStreamCaptureStatus *status,
                                     unsigned long long *id, void *, void *, void *, void *)
{
    std::lock_guard<std::mutex> lock(mu);
    s = get(s);
    *status = s->capture != nullptr ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    *id = s->capture != nullptr ? s->capture->id : 0;
    return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *out, cudaGraph_t graph, unsigned long long)
{
    *out = new gpusim_graph_exec{graph->tasks};
    return cudaSuccess;
}
cudaError_t cudaGraphUpload(cudaGraphExec_t, cudaStream_t)
{
    return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t s)
{
    std::lock_guard<std::mutex> lock(mu);
    for (const task &t : exec->tasks)
        add(s, t);
    return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph)
{
    delete graph;
    return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec)
{
    delete exec;
    return cudaSuccess;
}
}

uint64_t gpusim_clock_ns()
{
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}
