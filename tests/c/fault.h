/* fault.h - transport "fault", for tests: it wraps another transport and injects faults. Programs that link
 * fault.c have it in their list of transports (registry.c). libspccl does not have it. */
#ifndef SP_FAULT_H
#define SP_FAULT_H

#include "core/contract/transport.h"

#include <stdbool.h>

/* The faults of endpoints that are opened from now on. Change it only while no endpoint is open. 0 turns a
 * fault off. */
typedef struct sp_fault_plan {
    const char *inner;             /* name of the wrapped transport */
    const sp_transport_puts *puts; /* in place of the wrapped transport's; NULL: those */
    uint64_t seed;                 /* the same seed, rank and calls give the same faults */
    /* One reserve or peek in this many returns SPCCL_AGAIN although there is space, or a message. */
    unsigned hold_one_in;
    unsigned flip_one_in; /* one message in this many is sent with a flipped bit */
    unsigned flip_within; /* flip a bit of the first flip_within bytes only; 0: of any byte */
    unsigned cut_after;   /* `cut_rank` drops its connections after it has sent this many messages */
    int cut_rank;
    /* "address", "add_peer", "connect_step", "open_region": this call fails on rank fails_rank. "pair": the pairs of rank
     * fails_rank that have a next transport fail at start-up. NULL: nothing fails. */
    const char *fails;
    int fails_rank; /* -1: every rank */
} sp_fault_plan;

extern sp_fault_plan sp_fault;
extern const sp_transport sp_transport_fault;
/* From now on an endpoint of this rank drops its connections after its next message. -1: of no rank. Any time. */
void sp_fault_cut(int rank);
/* Messages with a flipped bit since the program started. */
unsigned sp_fault_n_flipped(void);

#endif
