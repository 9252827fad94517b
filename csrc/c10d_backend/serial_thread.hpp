/* serial_thread.hpp - one thread that runs tasks in the order in which they were posted.
 *
 * A group has two. One completes futures: user callbacks may take the GIL, so they never run on the thread
 * that moves data. The other one runs sparse_coo reductions. A callback that itself waits for a future gets a
 * further thread (`awaitable`). May include: process.hpp. */
#pragma once

#include "process.hpp"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <system_error>
#include <thread>
#include <utility>

#include <csignal>

#include <pthread.h>

namespace spccl_torch
{

/* Blocks the application's signals in the calling thread until the end of the scope. A thread made meanwhile
 * inherits the mask. Signals of faults stay as they are. */
class SignalsBlocked
{
  public:
    SignalsBlocked()
    {
        sigset_t blocked;
        sigfillset(&blocked);
        for (int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT, SIGSYS})
            sigdelset(&blocked, fault);
        pthread_sigmask(SIG_BLOCK, &blocked, &before_);
    }
    ~SignalsBlocked()
    {
        pthread_sigmask(SIG_SETMASK, &before_, nullptr);
    }
    SignalsBlocked(const SignalsBlocked &) = delete;
    SignalsBlocked &operator=(const SignalsBlocked &) = delete;

  private:
    sigset_t before_;
};

class SerialThread
{
  public:
    SerialThread() : queue_(std::make_shared<Queue>())
    {
        watch_forks();
        std::lock_guard<std::mutex> lock(living_mutex_);
        living_.insert(queue_);
    }
    SerialThread(const SerialThread &) = delete;
    SerialThread &operator=(const SerialThread &) = delete;
    ~SerialThread()
    {
        if (home_.in_child()) { /* the child has no such thread; a lock may be held for ever */
            new std::thread(std::move(thread_)); /* on purpose never freed */
            return;
        }
        stop();
        std::lock_guard<std::mutex> lock(living_mutex_);
        living_.erase(queue_);
    }

    /* Called before the process ends: wait, at most `patience` in all, until every thread of this kind has
     * run its tasks. From then on drop() returns true. Python ends a thread that takes the GIL while Python
     * itself ends; in the middle of a C++ frame that terminates the process. */
    static void prepare_exit(std::chrono::milliseconds patience)
    {
        const auto deadline = std::chrono::steady_clock::now() + patience;
        std::set<std::shared_ptr<Queue>> queues;
        {
            std::lock_guard<std::mutex> lock(living_mutex_);
            queues = living_;
        }
        bool all_idle = false;
        while (!all_idle && std::chrono::steady_clock::now() < deadline) {
            all_idle = true; /* one round is not enough: a task may post to a queue that was idle before */
            for (const std::shared_ptr<Queue> &queue : queues) {
                if (queue->home.in_child())
                    continue;
                std::unique_lock<std::mutex> lock(queue->mutex);
                all_idle = all_idle && queue->is_idle();
                queue->idle.wait_until(lock, deadline, [&] { return queue->is_idle(); });
            }
        }
        dropping_ = true;
    }
    /* Whether callbacks and tensors must be leaked, because Python is ending. */
    static bool drop()
    {
        return dropping_;
    }

    /* The thread to post a task to for which the calling thread may wait. It is `first`, unless the caller is
     * itself a task of `first` or of a further thread: then it is the next further thread, made on demand. (A
     * task that waited for another task of its own thread would deadlock.) Threads: any. */
    static std::shared_ptr<SerialThread> awaitable(const std::shared_ptr<SerialThread> &first)
    {
        for (auto thread = first; thread; thread = thread->further(false))
            if (running_here_ == thread->queue_.get())
                return thread->further(true);
        return first;
    }

    /* Run `task` after all tasks posted before it. The thread starts with the first task. After stop() the
     * task runs at once, on the calling thread. Tasks must not throw. Threads: any. */
    void post(std::function<void()> task)
    {
        if (drop()) {
            new std::function<void()>(std::move(task)); /* never freed, on purpose */
            return;
        }
        {
            std::lock_guard<std::mutex> lock(queue_->mutex);
            if (!queue_->stopping) {
                queue_->tasks.push_back(std::move(task));
                if (!thread_.joinable()) {
                    SignalsBlocked blocked;
                    thread_ = std::thread(&SerialThread::loop, queue_);
                }
                queue_->wake.notify_one();
                return;
            }
        }
        task();
    }

    /* Run what has been posted, then end the thread, and the further ones. Idempotent; not from two threads
     * at once. */
    void stop()
    {
        if (home_.in_child())
            return;
        end_loop();
        if (auto next = further(false))
            next->stop();
    }

  private:
    struct Queue {
        const HomeProcess home;
        std::mutex mutex;
        std::condition_variable wake, idle;
        std::deque<std::function<void()>> tasks;
        bool stopping = false;
        bool running = false; /* the thread runs a task, which is no longer in `tasks` */

        bool is_idle() const
        {
            return tasks.empty() && !running;
        }
    };

    /* Hold living_mutex_ during a fork: a child that made its own group must be able to lock it. */
    static void watch_forks()
    {
        static const int status = pthread_atfork([] { living_mutex_.lock(); }, unlock_living, unlock_living);
        if (status != 0)
            throw std::system_error(status, std::generic_category(), "spccl: pthread_atfork");
    }
    static void unlock_living()
    {
        living_mutex_.unlock();
    }

    std::shared_ptr<SerialThread> further(bool make)
    {
        std::lock_guard<std::mutex> lock(queue_->mutex);
        if (!further_ && make)
            further_ = std::make_shared<SerialThread>();
        return further_;
    }

    void end_loop()
    {
        {
            std::lock_guard<std::mutex> lock(queue_->mutex);
            queue_->stopping = true;
            queue_->wake.notify_one();
        }
        if (!thread_.joinable())
            return;
        if (thread_.get_id() == std::this_thread::get_id())
            thread_.detach(); /* a task was the last owner: the loop owns its queue and ends by itself */
        else
            thread_.join();
    }

    static void loop(std::shared_ptr<Queue> queue)
    {
        running_here_ = queue.get();
        std::unique_lock<std::mutex> lock(queue->mutex);
        for (;;) {
            queue->wake.wait(lock, [&] { return queue->stopping || !queue->tasks.empty(); });
            if (queue->tasks.empty())
                return;
            std::function<void()> task = std::move(queue->tasks.front());
            queue->tasks.pop_front();
            queue->running = true;
            lock.unlock();
            task();
            task = nullptr; /* without the lock: it may free tensors */
            lock.lock();
            queue->running = false;
            queue->idle.notify_all();
        }
    }

    static inline std::mutex living_mutex_;
    static inline std::set<std::shared_ptr<Queue>> living_;
    static inline std::atomic<bool> dropping_{false};
    static inline thread_local const Queue *running_here_ = nullptr;

    const HomeProcess home_;
    const std::shared_ptr<Queue> queue_;
    std::thread thread_;                    /* guarded by queue_->mutex until stop() */
    std::shared_ptr<SerialThread> further_; /* guarded by queue_->mutex */
};

} // namespace spccl_torch
