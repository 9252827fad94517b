/* serial_thread.cpp - SerialThread: its signal mask, and its use in a child of fork.
 *
 * Exit code 0: all as wanted. */
#include "serial_thread.hpp"

#include <atomic>
#include <csignal>
#include <cstdio>
#include <future>
#include <thread>

#include <sys/wait.h>
#include <unistd.h>

namespace
{
using spccl_torch::SerialThread;
using namespace std::chrono_literals;

/* A signal of the application must interrupt a thread of the application. A fault must still reach ours. */
int signals()
{
    SerialThread thread;
    std::promise<sigset_t> inside;
    sigset_t before, after, found;
    pthread_sigmask(SIG_SETMASK, nullptr, &before);
    thread.post([&] {
        sigset_t mask;
        pthread_sigmask(SIG_SETMASK, nullptr, &mask);
        inside.set_value(mask);
    });
    pthread_sigmask(SIG_SETMASK, nullptr, &after);
    found = inside.get_future().get();
    int n_wrong = 0;
    for (int sig : {SIGINT, SIGTERM, SIGUSR1, SIGALRM, SIGCHLD})
        if (!sigismember(&found, sig) || sigismember(&before, sig) != sigismember(&after, sig)) {
            std::printf("signal %d: blocked in the thread: %d, wanted 1; in the caller before %d, after %d\n",
                        sig, sigismember(&found, sig), sigismember(&before, sig), sigismember(&after, sig));
            n_wrong++;
        }
    for (int sig : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT})
        if (sigismember(&found, sig)) {
            std::printf("signal %d: blocked in the thread, wanted not blocked\n", sig);
            n_wrong++;
        }
    return n_wrong;
}

/* A child of fork must be able to exit, and to make its own thread, while a thread of the parent makes and
 * destroys objects. */
int forks()
{
    std::atomic<bool> stop{false};
    std::thread busy([&] {
        while (!stop)
            SerialThread();
    });
    int n_wrong = 0;
    for (int i = 0; i < 300 && n_wrong == 0; i++) {
        const pid_t child = fork();
        if (child == 0) {
            alarm(20); /* ends a child that waits for ever */
            std::promise<int> ran;
            SerialThread mine;
            mine.post([&] { ran.set_value(0); });
            const int status = ran.get_future().get();
            SerialThread::prepare_exit(100ms);
            _exit(status);
        }
        int status = 0;
        if (waitpid(child, &status, 0) != child || status != 0) {
            std::printf("child %d: wait status %d (14: it waited for 20 s), wanted 0\n", i, status);
            n_wrong++;
        }
    }
    stop = true;
    busy.join();
    return n_wrong;
}
} // namespace

int main()
{
    const int n_wrong = signals() + forks();
    return n_wrong == 0 ? 0 : 1;
}
