/* thread.c - see thread.h. */
#include "core/base/thread.h"

#include <errno.h>
#include <signal.h>

spccl_status sp_thread_start(const char *name, void *(*fn)(void *arg), void *arg, pthread_t *out)
{
    static const int faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT, SIGSYS};
    sigset_t blocked, before;
    pthread_t thread;
    int err;
    sigfillset(&blocked);
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++)
        sigdelset(&blocked, faults[i]);
    pthread_sigmask(SIG_SETMASK, &blocked, &before); /* a new thread inherits the mask */
    err = pthread_create(&thread, NULL, fn, arg);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (err != 0) {
        errno = err;
        return SP_FAIL_ERRNO(SPCCL_ERR_SYSTEM, "starting thread \"%s\"", name);
    }
    pthread_setname_np(thread, name);
    if (out != NULL)
        *out = thread;
    else
        pthread_detach(thread);
    return SPCCL_OK;
}
