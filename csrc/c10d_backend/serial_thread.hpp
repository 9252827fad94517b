/* serial_thread.hpp - one thread that runs tasks in the order in which they were posted.
 *
 * A group has two: one completes futures (so that user callbacks, which may want the GIL, never run on the
 * thread that moves data), one runs sparse_coo reductions. May include: nothing of ours. */
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

namespace spccl_torch
{

class SerialThread
{
  public:
    SerialThread() : queue_(std::make_shared<Queue>())
    {
    }
    SerialThread(const SerialThread &) = delete;
    SerialThread &operator=(const SerialThread &) = delete;
    ~SerialThread()
    {
        stop();
    }

    /* Run `task` after all tasks posted before it. The thread starts with the first task. After stop() the
     * task runs at once, on the calling thread. Tasks must not throw. Threads: any. */
    void post(std::function<void()> task)
    {
        {
            std::lock_guard<std::mutex> lock(queue_->mutex);
            if (!queue_->stopping) {
                queue_->tasks.push_back(std::move(task));
                if (!thread_.joinable())
                    thread_ = std::thread(&SerialThread::loop, queue_);
                queue_->wake.notify_one();
                return;
            }
        }
        task();
    }

    /* Run what has been posted, then end the thread. Idempotent; not from two threads at once. */
    void stop()
    {
        {
            std::lock_guard<std::mutex> lock(queue_->mutex);
            queue_->stopping = true;
            queue_->wake.notify_one();
        }
        if (!thread_.joinable())
            return;
        if (thread_.get_id() == std::this_thread::get_id())
            thread_.detach(); /* the last owner was a task: the loop ends by itself and owns its queue */
        else
            thread_.join();
    }

  private:
    struct Queue {
        std::mutex mutex;
        std::condition_variable wake;
        std::deque<std::function<void()>> tasks;
        bool stopping = false;
    };

    static void loop(std::shared_ptr<Queue> queue)
    {
        std::unique_lock<std::mutex> lock(queue->mutex);
        for (;;) {
            queue->wake.wait(lock, [&] { return queue->stopping || !queue->tasks.empty(); });
            if (queue->tasks.empty())
                return;
            std::function<void()> task = std::move(queue->tasks.front());
            queue->tasks.pop_front();
            lock.unlock();
            task();
            task = nullptr; /* may free tensors: not under the lock */
            lock.lock();
        }
    }

    std::shared_ptr<Queue> queue_;
    std::thread thread_;
};

} // namespace spccl_torch
