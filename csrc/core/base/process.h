/* process.h - tells whether this process is the one that made an object, or a child of fork of it.
 * Layer: core/base. */
#ifndef SP_PROCESS_H
#define SP_PROCESS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

/* Forks between this process and the one that first called sp_process_stamp. Read it through the functions
 * below. */
extern _Atomic uint32_t sp_n_forks;

/* The stamp of this process, for an object that is made now. */
uint32_t sp_process_stamp(void);
/* True in a child of fork of the process that stamped the object. One load: for hot paths. */
static inline bool sp_process_forked(uint32_t stamp)
{
    return atomic_load_explicit(&sp_n_forks, memory_order_relaxed) != stamp;
}

#endif
