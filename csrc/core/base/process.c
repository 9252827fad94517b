/* process.c - see process.h. */
#include "core/base/process.h"

#include <pthread.h>
#include <string.h>

_Atomic uint32_t sp_n_forks;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static int install_error;

static void in_child(void)
{
    atomic_fetch_add_explicit(&sp_n_forks, 1, memory_order_relaxed);
}

static void install(void)
{
    install_error = pthread_atfork(NULL, NULL, in_child);
}

spccl_status sp_atfork_status(int error)
{
    if (error == 0)
        return SPCCL_OK;
    return SP_FAIL(
        SPCCL_ERR_NOMEM,
        "pthread_atfork: %s (errno %d): without it a child of fork can damage the groups of its parent, "
        "so this process cannot make a group: start the process again with more free memory",
        strerror(error), error);
}

spccl_status sp_process_count_forks(void)
{
    pthread_once(&once, install);
    return sp_atfork_status(install_error);
}
