/* process.c - see process.h. */
#include "core/base/process.h"

#include <pthread.h>

_Atomic uint32_t sp_n_forks;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void in_child(void)
{
    atomic_fetch_add_explicit(&sp_n_forks, 1, memory_order_relaxed);
}

static void install(void)
{
    pthread_atfork(NULL, NULL, in_child);
}

uint32_t sp_process_stamp(void)
{
    pthread_once(&once, install);
    return atomic_load_explicit(&sp_n_forks, memory_order_relaxed);
}
