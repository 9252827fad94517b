/* process.h - finds out whether an object was made by this process, or by a parent that forked it later. */
#ifndef SP_PROCESS_H
#define SP_PROCESS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

/* Number of forks between this process and the one that first called sp_process_stamp. Read it with the
 * functions below. */
extern _Atomic uint32_t sp_n_forks;

/* The stamp of this process, for an object that is made now. */
uint32_t sp_process_stamp(void);
/* True if this process was forked after the object was stamped. It costs one load: for hot paths. */
static inline bool sp_process_forked(uint32_t stamp)
{
    return atomic_load_explicit(&sp_n_forks, memory_order_relaxed) != stamp;
}

#endif
