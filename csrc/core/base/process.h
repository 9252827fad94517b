/* process.h - finds out whether an object was made by this process, or by a parent that forked it later. */
#ifndef SP_PROCESS_H
#define SP_PROCESS_H

#include "core/base/status.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

/* Number of forks between this process and the one that first called sp_process_count_forks. Read it with the
 * functions below. */
extern _Atomic uint32_t sp_n_forks;

/* Count the forks from now on. Call this before sp_process_stamp. Later calls do nothing. Errors: NOMEM. */
spccl_status sp_process_count_forks(void);
/* The result of a call of pthread_atfork, as a status with a text. error: what pthread_atfork returned. */
spccl_status sp_atfork_status(int error);
/* The stamp of this process, for an object that is made now. */
static inline uint32_t sp_process_stamp(void)
{
    return atomic_load_explicit(&sp_n_forks, memory_order_relaxed);
}
/* True if this process was forked after the object was stamped. It costs one load: for hot paths. */
static inline bool sp_process_forked(uint32_t stamp)
{
    return atomic_load_explicit(&sp_n_forks, memory_order_relaxed) != stamp;
}

#endif
