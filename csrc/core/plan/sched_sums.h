/* sched_sums.h - which contributions a message holds, and in which order they were added. sched_check.c gives each
 * value of a plan a number here. Two values have the same number only if they are the same additions in the same
 * order, so equal numbers mean equal bits.
 *
 * Number r below n_ranks is the contribution of rank r. Number n_ranks is the empty sum, +0.0. Every other number is a
 * sum and a term that was added to it. Adding a sum to the empty sum gives that sum: it started at +0.0 itself. */
#ifndef SP_SCHED_SUMS_H
#define SP_SCHED_SUMS_H

#include "core/base/status.h"

#include <stddef.h>
#include <stdint.h>

#define SP_SUMS_RANKS_MAX 64

typedef struct sp_sum {
    int left, term;
    uint64_t holds; /* bit r: data of rank r */
} sp_sum;

typedef struct sp_sums {
    int n_ranks, n, cap;
    sp_sum *of;   /* [cap] */
    int *table;   /* [2 * cap + 1] numbers + 1 by hash; 0: free */
    int in_order; /* the sum 0 + rank 0 + rank 1 + ... */
} sp_sums;

/* Errors: NOMEM. Free it with sp_sums_fini, on failure too. */
spccl_status sp_sums_init(sp_sums *s, int n_ranks);
void sp_sums_fini(sp_sums *s);
static inline uint64_t sp_sums_holds(const sp_sums *s, int value)
{
    return s->of[value].holds;
}
/* The sum `left` + `term`. Errors: NOMEM. */
spccl_status sp_sums_add(sp_sums *s, int left, int term, int *out);

#endif
