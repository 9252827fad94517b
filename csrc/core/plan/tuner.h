/* tuner.h - finds the best schedule and slice size of each kind of call from the times of earlier calls.
 * A kind is a collective, dtype, number of elements and range of densities. Candidates add in rank order, and a slice
 * size changes no bit of a result, so neither does what is chosen here.
 *
 * All ranks choose the same, as in choose.h: nothing here reads a clock. A rank's time of a call travels in the envelopes
 * of a later call, which all ranks receive, and all take the largest. Calls that can carry times are numbered (carriers):
 * all-reduces and all-gathers whose schedule is not forced. Carrier k has each rank's time of carrier
 * k - SP_TUNER_LAG, which has ended on every rank that plans k.
 *
 * Some calls are trials of another candidate. A trial's time is compared with the calls of its kind before and after it, which
 * took the usual choice; so the ratio does not depend on what changes slowly. Trials cost at most 1/SP_TUNER_COST of the
 * time of all calls, and what one of them takes that the model did not expect. docs/ALGORITHMS.md has the rules. */
#ifndef SP_TUNER_H
#define SP_TUNER_H

#include "core/plan/sched.h"

#define SP_TUNER_LAG 8      /* carriers; as SP_CHOOSE_LAG */
#define SP_TUNER_CELLS 64   /* kinds of calls that are remembered */
#define SP_TUNER_ARMS 9     /* candidates of a kind: three schedules, three slice sizes */
#define SP_TUNER_TRIALS 12  /* of each candidate that may be the best */
#define SP_TUNER_FLIGHTS 32 /* carriers whose times are not known yet: at most two lags and one */
#define SP_TUNER_COST 32
#define SP_TUNER_CLASSES 12 /* of densities: class c holds those above 2^-(c+1), the last one the rest */

/* What a call is run with. */
typedef struct sp_setting {
    sp_schedule schedule;
    uint32_t slice_elems;
} sp_setting;

typedef struct sp_tune_key {
    sp_coll coll;
    uint8_t dtype, density_class;
    uint64_t n_elems;
} sp_tune_key;

/* A candidate. */
typedef struct sp_tune_arm {
    sp_setting setting;
    double predicted; /* by the cost model: time over that of the first candidate */
    bool out;         /* not tried any more */
    uint8_t n, n_pending;
    /* Of the n trials whose times are known: time over that of the usual choice; and their median if n is not 0. */
    float ratios[SP_TUNER_TRIALS], median;
} sp_tune_arm;

typedef enum sp_tune_state {
    SP_TUNE_NONE,    /* this kind of call is not tuned */
    SP_TUNE_TRYING,  /* the model's choice is the usual one; the other candidates are tried */
    SP_TUNE_PROVING, /* the best one is the usual one; the model's choice is tried */
    SP_TUNE_SETTLED  /* no trials, for SP_TUNER_KEEP_CALLS calls of this kind */
} sp_tune_state;
#define SP_TUNER_KEEP_CALLS 4096

typedef struct sp_tune_cell {
    bool used, from_profile;
    bool changed; /* the state, since the last sp_tuner_take */
    sp_tune_key key;
    uint32_t last;  /* carrier: the last call of this kind */
    uint32_t phase; /* times of calls of earlier phases do not count */
    sp_tune_state state;
    int n_arms, usual; /* arms[0] is the model's choice */
    sp_tune_arm arms[SP_TUNER_ARMS];
    uint32_t n_calls, n_since_trial, n_trials, n_moves; /* n_moves: the model's choice has changed */
    double budget;                             /* what trials may cost: 1 is the time of a usual call */
    double usual_ns, trial_ns, trial_expected; /* the last times, until a pair is complete; 0: none */
    int trial_arm;
    double ratio; /* SETTLED: time over that of arms[0] */
} sp_tune_cell;

/* A carrier whose times are not known yet. */
typedef struct sp_tune_flight {
    int cell; /* -1: none */
    uint32_t phase;
    int arm;
    double expected; /* what the trial was expected to cost */
} sp_tune_flight;

typedef struct sp_tuner {
    uint32_t n_carriers;
    double all_ns, lost_ns; /* of all carriers; by trials */
    uint32_t n_settled;     /* kinds of calls, not from a profile */
    sp_tune_flight flights[SP_TUNER_FLIGHTS];
    sp_tune_cell cells[SP_TUNER_CELLS];
} sp_tuner;

uint8_t sp_tuner_class(double density);
/* The cell of a kind of call. *is_new: it has no candidates yet. The next function gives them. */
sp_tune_cell *sp_tuner_find(sp_tuner *t, const sp_tune_key *key, bool *is_new);
/* True if the candidates are to be listed again: there are none, the model's choice has changed, or they are old. */
bool sp_tuner_wants_arms(const sp_tune_cell *c, const sp_setting *model);
/* Begin with these candidates, the model's choice first. known >= 0: the best is known, from a profile. */
void sp_tuner_start(sp_tune_cell *c, const sp_tune_arm *arms, int n_arms, int known);
/* The setting of the next call of this kind. Returns the index of its candidate. */
int sp_tuner_take(sp_tuner *t, sp_tune_cell *c, bool *is_trial);
/* A carrier of no kind that is tuned. */
void sp_tuner_skip(sp_tuner *t);
/* Carrier number `carrier` has ended, with the largest time of carrier - SP_TUNER_LAG that a rank had: a code. */
void sp_tuner_learn(sp_tuner *t, uint32_t carrier, uint32_t time_code);

/* Times travel as 24 bits: the upper ones of a float32 of ns without its sign. A longer time has a larger code. 0: none. */
#define SP_TIME_CODE_BITS 24
uint32_t sp_time_code(int64_t ns);
double sp_time_of_code(uint32_t code);

#endif
