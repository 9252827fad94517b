/* choose.h - chooses the schedule of each call of a group by its cost, from what earlier calls measured.
 * Candidates are the schedules that add in rank order, so the choice changes no bit of a result.
 *
 * All ranks must choose the same for call number n. The choice depends only on
 *   - the arguments of the call and the hosts of the group
 *   - what calls 0 .. n - SP_CHOOSE_LAG measured (sp_measured), taken in the order of the calls
 * A rank plans call n after it has ended call n - SP_CHOOSE_LAG, and sp_measured is the same on all ranks.
 * docs/ALGORITHMS.md says why. Nothing here reads a clock, or a rate that only this rank knows. */
#ifndef SP_CHOOSE_H
#define SP_CHOOSE_H

#include "core/plan/plan_cost.h"

#define SP_CHOOSE_LAG 8           /* the executor works on so many calls at a time (SP_EXEC_ACTIVE_MAX) */
#define SP_CHOOSE_KEYS 256        /* kinds of calls that are remembered: collective, dtype, elements */
#define SP_CHOOSE_NS_UNIT 65536.0 /* rates travel in units of 2^-16 ns per byte */

/* What the messages of one call say that every rank of the group receives or sends. */
typedef struct sp_measured {
    sp_coll coll;
    uint8_t dtype;
    uint64_t n_elems;               /* of the call: the key */
    uint64_t listed, elems;         /* of the contributions */
    uint64_t sum_listed, sum_elems; /* of the results of a reduction; 0 in a oneshot all-reduce */
    uint32_t local_ns, remote_ns;   /* largest of the senders, in SP_CHOOSE_NS_UNIT; 0: none sent any */
} sp_measured;

/* The choice for one kind of call, and why. */
typedef struct sp_choice {
    sp_schedule schedule;
    bool measured;               /* densities of earlier calls; false: the default, 1 */
    double density, sum_density; /* used */
    double local_ns, remote_ns;  /* used: time per byte */
    double ns[SP_N_SCHEDULES];   /* expected time of each candidate; 0: not a candidate */
} sp_choice;

typedef struct sp_choose_entry {
    bool used, has_density, has_overlap;
    uint8_t dtype;
    sp_coll coll;
    uint64_t n_elems;
    uint32_t last; /* number of the last call of this kind */
    double density;
    double overlap; /* of the contributions' nonzeros: 0 independent, 1 the same */
    bool stale;
    sp_choice choice;
} sp_choose_entry;

typedef struct sp_chooser {
    sp_cost_group group;
    uint32_t n_evaluated;             /* how often costs were computed */
    uint32_t n_planned, n_ended;      /* calls */
    sp_measured ended[SP_CHOOSE_LAG]; /* call n at n % SP_CHOOSE_LAG */
    sp_choose_entry entries[SP_CHOOSE_KEYS];
} sp_chooser;

void sp_chooser_init(sp_chooser *c, int world_size, const sp_hosts *hosts);
/* Plan the next call: take in what call n - SP_CHOOSE_LAG measured, and choose. The result is valid until the
 * next call of this function. Errors: BUG (call n - SP_CHOOSE_LAG has not ended). */
spccl_status sp_choose(sp_chooser *c, const sp_cost_call *call, uint8_t dtype, const sp_choice **out);
/* Calls end in the order in which they were planned. */
void sp_chooser_end(sp_chooser *c, const sp_measured *m);
/* "relayed (measured 1% and 27.5% nonzero; direct 1203 us; oneshot 5100 us; relayed 802 us)" */
void sp_choice_describe(const sp_choice *choice, char *text, size_t cap);

#endif
