/* fault.h - test builds only: a transport "fault" that wraps another one and makes trouble on purpose. A
 * program that links fault.c has it in its list of transports (registry.c); libspccl never has. */
#ifndef SP_FAULT_H
#define SP_FAULT_H

#include "core/contract/transport.h"

#include <stdbool.h>

/* What to do, for endpoints opened from now on; set it while none is open. 0 = never. */
typedef struct sp_fault_plan {
    const char *inner; /* name of the wrapped transport */
    uint64_t seed;     /* the same seed, rank and calls: the same trouble */
    unsigned
        hold_one_in; /* one reserve or peek in so many says SPCCL_AGAIN though there is room or a message */
    unsigned flip_one_in; /* one message in so many leaves with a flipped bit */
    unsigned flip_within; /* in its first so many bytes; 0 = anywhere */
    unsigned cut_after;   /* this many messages after it opened, `cut_rank` drops its connections */
    int cut_rank;
} sp_fault_plan;

extern sp_fault_plan sp_fault;
extern const sp_transport sp_transport_fault;
/* Messages flipped since the program started. */
unsigned sp_fault_n_flipped(void);

#endif
