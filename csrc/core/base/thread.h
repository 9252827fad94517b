/* thread.h - starts the library's threads. */
#ifndef SP_THREAD_H
#define SP_THREAD_H

#include "core/base/status.h"

#include <pthread.h>

/* Start fn(arg) on a thread that blocks the application's signals. Signals of a thread's own faults, such as
 * SIGSEGV, stay unblocked, so that crash handlers run.
 *   name   at most 15 characters, shown by ps and debuggers
 *   out    NULL: the thread is detached
 * Errors: SYSTEM. */
spccl_status sp_thread_start(const char *name, void *(*fn)(void *arg), void *arg, pthread_t *out);

#endif
