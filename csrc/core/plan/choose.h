/* choose.h - chooses the schedule of each call of a group by its cost, from what earlier calls measured.
 * Candidates are the schedules that add in rank order, so the choice changes no bit of a result.
 *
 * All ranks must choose the same for call number n. The choice depends only on
 *   - the arguments of the call and the hosts of the group
 *   - what calls 0 .. n - SP_CHOOSE_LAG measured (sp_measured), taken in the order of the calls
 * With SPCCL_SCHEDULE=tune times of earlier calls correct that choice (tuner.h), under the same rule.
 * A rank plans call n after it has ended call n - SP_CHOOSE_LAG, and sp_measured is the same on all ranks.
 * docs/ALGORITHMS.md says why. Nothing here reads a clock, or a rate that only this rank knows. */
#ifndef SP_CHOOSE_H
#define SP_CHOOSE_H

#include "core/plan/plan_cost.h"
#include "core/plan/profile.h"
#include "core/plan/tuner.h"

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
    uint32_t carrier;               /* 1 + its number (tuner.h); 0: the call carries no times */
    uint32_t time_code;             /* largest of the senders: of an earlier carrier */
} sp_measured;

/* What the tuner says of a kind of call. */
typedef struct sp_tuned {
    sp_tune_state state;
    bool is_trial, from_profile;
    sp_schedule model; /* that the costs alone would give */
    uint32_t slice_elems, n_trials;
    double ratio; /* SETTLED: time over that of the model's choice */
} sp_tuned;

/* The choice for one kind of call, and why. */
typedef struct sp_choice {
    sp_schedule schedule;
    bool measured;               /* densities of earlier calls; false: the default, 1 */
    double density, sum_density; /* used */
    double local_ns, remote_ns;  /* used: time per byte */
    double ns[SP_N_SCHEDULES];   /* expected time of each candidate; 0: not a candidate */
    uint32_t carrier;            /* as in sp_measured */
    sp_tuned tuned;
} sp_choice;

typedef struct sp_choose_entry {
    bool used, has_density, has_overlap;
    uint8_t dtype, density_class; /* sp_tuner_class of `density` */
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
    sp_choose_entry *entry;           /* of the last planned call */
    sp_measured ended[SP_CHOOSE_LAG]; /* call n at n % SP_CHOOSE_LAG */
    sp_choose_entry entries[SP_CHOOSE_KEYS];
    sp_tuner *tuner;           /* owned; NULL: off. It has 49 KB, most groups do not tune */
    const sp_profile *profile; /* borrowed; NULL: none */
    sp_choice now;             /* of sp_choose_tuned */
    uint64_t choices_hash;     /* of what sp_choose_tuned chose in all calls */
} sp_chooser;

/* What the choice compares: the expected time of a call, or 0 if the schedule does not have this collective. */
double sp_expected_ns(const sp_cost_group *g, sp_schedule schedule, const sp_cost_call *call);
void sp_chooser_init(sp_chooser *c, int world_size, const sp_hosts *hosts);
/* Begin to tune. Errors: NOMEM. */
spccl_status sp_chooser_tune(sp_chooser *c);
/* NULL, all zero: allowed. */
void sp_chooser_fini(sp_chooser *c);
/* Plan the next call: take in what call n - SP_CHOOSE_LAG measured, and choose. The result is valid until the
 * next call of this function. Errors: BUG (call n - SP_CHOOSE_LAG has not ended). */
spccl_status sp_choose(sp_chooser *c, const sp_cost_call *call, uint8_t dtype, const sp_choice **out);
/* The same, corrected by the times of earlier calls: *out also has the slice size. slice_elems_max: the largest that
 * may be tried; 0: only the given one. Only after sp_chooser_tune. */
spccl_status sp_choose_tuned(sp_chooser *c, const sp_cost_call *call, uint8_t dtype, uint32_t slice_elems_max,
                             const sp_choice **out);
/* Keep what was learnt in `p`, in place of what it had of the same kinds of calls. */
void sp_chooser_save(const sp_chooser *c, sp_profile *p);
/* Calls end in the order in which they were planned. */
void sp_chooser_end(sp_chooser *c, const sp_measured *m);
/* "relayed (measured 1% and 27.5% nonzero; direct 1203 us; oneshot 5100 us; relayed 802 us)" */
void sp_choice_describe(const sp_choice *choice, char *text, size_t cap);

#endif
