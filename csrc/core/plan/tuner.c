/* tuner.c - see tuner.h. The arithmetic is that of choose.c: the same bits on any CPU. */
#include "core/plan/tuner.h"

#include <string.h>

#define N_PROBES 4     /* cells in which a kind of call may be */
#define TRIAL_EVERY 4  /* calls from one trial to the next: each needs a usual call before and after it */
#define BUDGET_MAX 4.0 /* calls' times that may be saved up for a trial */
#define COST_MIN 0.02  /* of a trial: noise costs too */
#define GAIN_MIN 0.97  /* a candidate must take less than this part of the usual time */
#define WINS_MIN 11    /* of SP_TUNER_TRIALS. By chance: 0.3% */
/* If the model goes to and fro between two schedules, its first choice stays the usual one. */
#define MOVES_MAX 4
#define PROVED_WINS_MIN 9 /* of those with the parts exchanged */

/* A candidate is given up after so many trials if its median is above. */
static const struct {
    uint8_t n;
    float median;
} give_up[] = {{2, 1.25f}, {4, 1.05f}, {6, 0.98f}};

uint32_t sp_time_code(int64_t ns)
{
    float f = ns > 0 ? (float)ns : 0;
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    return bits >> (31 - SP_TIME_CODE_BITS);
}

double sp_time_of_code(uint32_t code)
{
    uint32_t bits = code << (31 - SP_TIME_CODE_BITS);
    float f;
    memcpy(&f, &bits, sizeof f);
    return f == f && f < 1e18f ? f : 0; /* of a time that never was */
}

uint8_t sp_tuner_class(double density)
{
    uint8_t c = 0;
    for (double least = 0.5; density <= least && c < SP_TUNER_CLASSES - 1; least /= 2)
        c++;
    return c;
}

static bool same_key(const sp_tune_key *a, const sp_tune_key *b)
{
    return a->coll == b->coll && a->dtype == b->dtype && a->density_class == b->density_class &&
           a->n_elems == b->n_elems;
}

sp_tune_cell *sp_tuner_find(sp_tuner *t, const sp_tune_key *key, bool *is_new)
{
    uint64_t hash = (key->n_elems * 4 + (uint64_t)key->coll + ((uint64_t)key->dtype << 32) +
                     ((uint64_t)key->density_class << 48)) *
                    0x9e3779b97f4a7c15u;
    sp_tune_cell *oldest = NULL;
    *is_new = false;
    for (size_t i = 0; i < N_PROBES; i++) {
        sp_tune_cell *c = &t->cells[((hash >> 32) + i) % SP_TUNER_CELLS];
        if (c->used && same_key(&c->key, key))
            return c;
        if (oldest == NULL || (oldest->used && (!c->used || c->last < oldest->last)))
            oldest = c;
    }
    *oldest = (sp_tune_cell){.used = true, .key = *key, .phase = oldest->phase + 1};
    *is_new = true;
    return oldest;
}

static bool same_setting(const sp_setting *a, const sp_setting *b)
{
    return a->schedule == b->schedule && a->slice_elems == b->slice_elems;
}

bool sp_tuner_wants_arms(const sp_tune_cell *c, const sp_setting *model)
{
    if (c->state == SP_TUNE_NONE || (c->state == SP_TUNE_SETTLED && c->n_calls >= SP_TUNER_KEEP_CALLS))
        return true;
    if (same_setting(&c->arms[0].setting, model))
        return false;
    if (c->n_moves < MOVES_MAX && c->usual == 0)
        return true;
    for (int i = 1; i < c->n_arms; i++)
        if (same_setting(&c->arms[i].setting, model))
            return false;
    return true;
}

/* Times of calls that are under way do not count any more. */
static void begin_phase(sp_tune_cell *c, sp_tune_state state, int usual)
{
    c->phase++;
    c->state = state;
    c->usual = usual;
    c->changed = true;
    c->n_since_trial = 0;
    c->usual_ns = c->trial_ns = 0;
    for (int i = 0; i < c->n_arms; i++)
        c->arms[i].n_pending = 0;
}

void sp_tuner_start(sp_tune_cell *c, const sp_tune_arm *arms, int n_arms, int known)
{
    bool is_old = c->state == SP_TUNE_SETTLED && c->n_calls >= SP_TUNER_KEEP_CALLS;
    c->n_moves = is_old ? 0 : c->n_moves + (c->state != SP_TUNE_NONE);
    c->n_arms = n_arms;
    for (int i = 0; i < n_arms; i++)
        c->arms[i] = arms[i];
    c->n_calls = c->n_trials = 0;
    c->ratio = 1;
    c->budget = 0;
    c->from_profile = known >= 0;
    begin_phase(c, known >= 0 || n_arms < 2 ? SP_TUNE_SETTLED : SP_TUNE_TRYING, known > 0 ? known : 0);
}

static float median_of(const sp_tune_arm *a)
{
    float sorted[SP_TUNER_TRIALS];
    for (int i = 0; i < a->n; i++) {
        int at = i;
        for (; at > 0 && sorted[at - 1] > a->ratios[i]; at--)
            sorted[at] = sorted[at - 1];
        sorted[at] = a->ratios[i];
    }
    return sorted[(a->n - 1) / 2];
}

/* What a trial will cost more than a usual call: 1 is the time of one. One trial that took long may be noise, so it is
 * believed up to twice the time: else the candidate would never be tried again. */
static double expected_cost(const sp_tune_cell *c, const sp_tune_arm *a)
{
    double ratio = a->predicted;
    if (a->n != 0)
        ratio = (double)a->median;
    else if (c->state == SP_TUNE_PROVING)
        ratio = 1 / GAIN_MIN;
    if (a->n == 1 && ratio > 2)
        ratio = 2;
    return ratio - 1 > COST_MIN ? ratio - 1 : COST_MIN;
}

/* Is a candidate being tried for the first time? What that costs is not known before its time is. */
static bool is_surprise_due(const sp_tune_cell *c)
{
    for (int i = 0; i < c->n_arms; i++)
        if (c->arms[i].n == 0 && c->arms[i].n_pending != 0)
            return true;
    return false;
}

/* The candidate to try next: the one with the fewest trials that the budget allows. -1: none. */
static int next_trial(const sp_tune_cell *c)
{
    int best = -1, least = SP_TUNER_TRIALS;
    bool waits;
    if (c->n_since_trial < TRIAL_EVERY || c->budget < COST_MIN ||
        (c->state != SP_TUNE_TRYING && c->state != SP_TUNE_PROVING))
        return -1;
    waits = is_surprise_due(c);
    for (int i = 0; i < c->n_arms; i++) {
        const sp_tune_arm *a = &c->arms[i];
        int n = a->n + a->n_pending;
        if (i == c->usual || a->out || (a->n == 0 && waits) || n >= least ||
            (c->state == SP_TUNE_PROVING && i != 0) || expected_cost(c, a) > c->budget)
            continue;
        best = i;
        least = n;
    }
    return best;
}

static sp_tune_flight *next_flight(sp_tuner *t)
{
    return &t->flights[t->n_carriers++ % SP_TUNER_FLIGHTS];
}

void sp_tuner_skip(sp_tuner *t)
{
    *next_flight(t) = (sp_tune_flight){.cell = -1};
}

int sp_tuner_take(sp_tuner *t, sp_tune_cell *c, bool *is_trial)
{
    bool may = !c->changed && t->lost_ns * SP_TUNER_COST <= t->all_ns;
    int trial = may ? next_trial(c) : -1;
    sp_tune_flight f = {.cell = (int)(c - t->cells), .phase = c->phase, .arm = c->usual};
    c->changed = false;
    c->last = t->n_carriers;
    c->n_calls++;
    c->n_since_trial++;
    c->budget = c->budget < BUDGET_MAX ? c->budget + 1.0 / SP_TUNER_COST : c->budget;
    *is_trial = trial >= 0;
    if (trial >= 0) {
        f.arm = trial;
        f.expected = expected_cost(c, &c->arms[trial]);
        c->budget -= f.expected;
        c->arms[trial].n_pending++;
        c->n_since_trial = 0;
        c->n_trials++;
    }
    *next_flight(t) = f;
    return f.arm;
}

static int wins_of(const sp_tune_arm *a, bool of_usual)
{
    int n = 0;
    for (int i = 0; i < a->n; i++)
        n += of_usual ? a->ratios[i] > 1 : a->ratios[i] < 1;
    return n;
}

static void settle(sp_tuner *t, sp_tune_cell *c, int arm, double ratio)
{
    c->ratio = ratio;
    c->n_calls = 0;
    t->n_settled++;
    begin_phase(c, SP_TUNE_SETTLED, arm);
}

/* All candidates have been tried, or given up: take the best if it wins clearly. */
static void end_trying(sp_tuner *t, sp_tune_cell *c)
{
    int best = 0;
    float least = (float)GAIN_MIN;
    for (int i = 1; i < c->n_arms; i++) {
        const sp_tune_arm *a = &c->arms[i];
        if (a->out)
            continue;
        if (a->n < SP_TUNER_TRIALS)
            return;
        if (a->median < least && wins_of(a, false) >= WINS_MIN) {
            least = a->median;
            best = i;
        }
    }
    if (best == 0) {
        settle(t, c, 0, 1);
        return;
    }
    c->arms[0].n = 0;
    begin_phase(c, SP_TUNE_PROVING, best);
}

/* The model's choice has been tried against the best candidate. */
static void end_proving(sp_tuner *t, sp_tune_cell *c)
{
    const sp_tune_arm *model = &c->arms[0];
    double median = (double)model->median;
    if (model->n >= 4 && median < GAIN_MIN) {
        settle(t, c, 0, 1);
    } else if (model->n == SP_TUNER_TRIALS) {
        bool proved = median > 1 / GAIN_MIN && wins_of(model, true) >= PROVED_WINS_MIN;
        settle(t, c, proved ? c->usual : 0, proved ? 1 / median : 1);
    }
}

static void add_ratio(sp_tuner *t, sp_tune_cell *c, double ratio)
{
    sp_tune_arm *a = &c->arms[c->trial_arm];
    double cost = ratio > 1 ? ratio - 1 : 0;
    c->budget -= cost - c->trial_expected;
    t->lost_ns += cost * c->usual_ns;
    a->ratios[a->n++] = (float)ratio;
    a->median = median_of(a);
    if (c->state == SP_TUNE_PROVING) {
        end_proving(t, c);
        return;
    }
    for (size_t i = 0; i < sizeof give_up / sizeof give_up[0]; i++)
        a->out = a->out || (a->n >= give_up[i].n && a->median > give_up[i].median);
    end_trying(t, c);
}

/* A trial whose pair stays incomplete. */
static void drop_trial(sp_tune_cell *c)
{
    if (c->trial_ns > 0)
        c->arms[c->trial_arm].n_pending--;
    c->trial_ns = 0;
}

/* The time of a call of this kind is known. ns 0: no rank had one. */
static void add_time(sp_tuner *t, sp_tune_cell *c, const sp_tune_flight *f, double ns)
{
    if (f->arm != c->usual) {
        drop_trial(c);
        if (ns > 0 && c->usual_ns > 0) {
            c->trial_ns = ns;
            c->trial_arm = f->arm;
            c->trial_expected = f->expected;
        } else {
            c->arms[f->arm].n_pending--;
        }
    } else if (ns > 0 && c->trial_ns > 0) {
        double ratio = 2 * c->trial_ns / (c->usual_ns + ns);
        drop_trial(c);
        c->usual_ns = ns;
        add_ratio(t, c, ratio);
    } else {
        drop_trial(c);
        c->usual_ns = ns;
    }
}

void sp_tuner_learn(sp_tuner *t, uint32_t carrier, uint32_t time_code)
{
    const sp_tune_flight *f;
    if (carrier < SP_TUNER_LAG)
        return;
    f = &t->flights[(carrier - SP_TUNER_LAG) % SP_TUNER_FLIGHTS];
    t->all_ns += sp_time_of_code(time_code);
    if (f->cell < 0 || t->cells[f->cell].phase != f->phase)
        return;
    add_time(t, &t->cells[f->cell], f, sp_time_of_code(time_code));
}
