/* choose.c - see choose.h. */
#include "core/plan/choose.h"

#include "core/base/mem.h"
#include "core/format/format.h"
#include "core/plan/tune_coll.h"

#include <stdio.h>
#include <string.h>

#define N_PROBES 4 /* entries in which a kind of call may be */
/* A measurement counts for a quarter of the density, so that one call out of line changes little. */
#define WEIGHT 0.25
/* Costs are computed again when a density or rate has changed by more than this part of itself. */
#define CHANGE_MIN 0.0625
/* Data may become dense at once, and the choice follows calls later. So this part of the dense cost counts too.
 * Without it a large all-reduce was oneshot for a gain of 11%, and took twice as long when its data became dense. */
#define DENSE_PART (1.0 / 32)

void sp_chooser_init(sp_chooser *c, int world_size, const sp_hosts *hosts)
{
    *c = (sp_chooser){0};
    sp_cost_group_init(&c->group, world_size, hosts);
}

spccl_status sp_chooser_tune(sp_chooser *c)
{
    c->tuner = sp_calloc(1, sizeof *c->tuner);
    return c->tuner != NULL ? SPCCL_OK : SP_FAIL(SPCCL_ERR_NOMEM, "tuner: %zu bytes", sizeof *c->tuner);
}

void sp_chooser_fini(sp_chooser *c)
{
    if (c == NULL)
        return;
    sp_free(c->tuner);
    c->tuner = NULL;
}

/* The entry of a kind of call. If there is none: the one to replace, which is free or was used least recently. */
static sp_choose_entry *find(sp_chooser *c, sp_coll coll, uint8_t dtype, uint64_t n_elems, bool *found)
{
    uint64_t hash = (n_elems * 4 + (uint64_t)coll + ((uint64_t)dtype << 32)) * 0x9e3779b97f4a7c15u;
    sp_choose_entry *oldest = NULL;
    for (size_t i = 0; i < N_PROBES; i++) {
        sp_choose_entry *e = &c->entries[((hash >> 32) + i) % SP_CHOOSE_KEYS];
        *found = e->used && e->coll == coll && e->dtype == dtype && e->n_elems == n_elems;
        if (*found)
            return e;
        if (oldest == NULL || (oldest->used && (!e->used || e->last < oldest->last)))
            oldest = e;
    }
    return oldest;
}

static double share(uint64_t part, uint64_t all)
{
    return part < all ? (double)part / (double)all : 1;
}

/* How much of the way from independent nonzeros to equal ones a sum is. */
static double overlap_of(double density, double sum_density, int n_ranks)
{
    double most = sp_cost_sum_density(density, n_ranks), overlap;
    if (most - density < 1e-6)
        return 0;
    overlap = (most - sum_density) / (most - density);
    return overlap < 0 ? 0 : overlap > 1 ? 1 : overlap;
}

static double sum_density_of(const sp_choose_entry *e, int n_ranks)
{
    double most = sp_cost_sum_density(e->density, n_ranks);
    return most - e->overlap * (most - e->density);
}

static bool changed(double now, double then)
{
    double by = now < then ? then - now : now - then;
    return by > CHANGE_MIN * then;
}

/* Take in what an ended call measured. */
static void learn(sp_chooser *c, const sp_measured *m)
{
    bool found;
    sp_choose_entry *e = find(c, m->coll, m->dtype, m->n_elems, &found);
    double density;
    if (m->local_ns != 0)
        c->group.local_ns = m->local_ns / SP_CHOOSE_NS_UNIT;
    if (m->remote_ns != 0)
        c->group.remote_ns = m->remote_ns / SP_CHOOSE_NS_UNIT;
    if (!found || m->elems == 0)
        return;
    density = share(m->listed, m->elems);
    e->density = e->has_density ? e->density + WEIGHT * (density - e->density) : density;
    e->density_class = sp_tuner_class(e->density);
    if (m->sum_elems != 0) {
        double overlap = overlap_of(density, share(m->sum_listed, m->sum_elems), c->group.world_size);
        e->overlap = e->has_overlap ? e->overlap + WEIGHT * (overlap - e->overlap) : overlap;
        e->has_overlap = true;
    }
    if (!e->has_density || changed(e->density, e->choice.density) ||
        changed(sum_density_of(e, c->group.world_size), e->choice.sum_density))
        e->stale = true;
    e->has_density = true;
}

/* The ranks and hosts of the group, and a kind of call: what a profile is searched for. */
static sp_profile_line kind_of(const sp_cost_group *g, const sp_tune_key *key)
{
    return (sp_profile_line){.key = *key,
                             .n_ranks = (uint16_t)g->world_size,
                             .n_hosts = (uint16_t)g->n_hosts,
                             .per_host = (uint16_t)g->host_ranks_max};
}

static bool is_candidate(const sp_cost_group *g, sp_schedule schedule, sp_coll coll)
{
    if (!sp_schedule_adds_in_rank_order(schedule) || !sp_schedule_has(schedule, coll))
        return false;
    return schedule != SP_SCHED_RELAYED || (g->n_hosts > 1 && g->n_hosts < g->world_size);
}

double sp_expected_ns(const sp_cost_group *g, sp_schedule schedule, const sp_cost_call *call)
{
    sp_cost_call dense = *call;
    sp_plan_cost now, then;
    dense.density = dense.sum_density = 1;
    if (!sp_plan_cost_of(schedule, g, call, &now) || !sp_plan_cost_of(schedule, g, &dense, &then))
        return 0;
    return now.ns + then.ns * DENSE_PART;
}

static void evaluate(const sp_cost_group *g, sp_choose_entry *e, const sp_cost_call *call)
{
    sp_cost_call with = *call;
    sp_choice choice = {.measured = e->has_density,
                        .density = 1,
                        .sum_density = 1,
                        .local_ns = g->local_ns,
                        .remote_ns = g->remote_ns};
    bool any = false;
    if (e->has_density) {
        choice.density = e->density;
        choice.sum_density = sum_density_of(e, g->world_size);
    }
    with.density = choice.density;
    with.sum_density = choice.sum_density;
    for (int i = 0; i < SP_N_SCHEDULES; i++) {
        sp_schedule schedule = (sp_schedule)i;
        double ns = is_candidate(g, schedule, call->coll) ? sp_expected_ns(g, schedule, &with) : 0;
        if (ns > 0 && (!any || ns < choice.ns[choice.schedule])) {
            choice.schedule = schedule;
            any = true;
        }
        choice.ns[i] = ns;
    }
    e->choice = choice;
    e->stale = false;
}

spccl_status sp_choose(sp_chooser *c, const sp_cost_call *call, uint8_t dtype, const sp_choice **out)
{
    uint32_t n = c->n_planned++;
    bool found;
    sp_choose_entry *e;
    if (n >= SP_CHOOSE_LAG) {
        if (c->n_ended - (n - SP_CHOOSE_LAG) > SP_CHOOSE_LAG || c->n_ended == n - SP_CHOOSE_LAG)
            return SP_FAIL(SPCCL_ERR_BUG, "call %u is planned when %u calls have ended", n, c->n_ended);
        learn(c, &c->ended[n % SP_CHOOSE_LAG]);
        if (c->ended[n % SP_CHOOSE_LAG].carrier != 0)
            sp_tuner_learn(c->tuner, c->ended[n % SP_CHOOSE_LAG].carrier - 1,
                           c->ended[n % SP_CHOOSE_LAG].time_code);
    }
    e = find(c, call->coll, dtype, call->n_elems, &found);
    if (!found)
        *e = (sp_choose_entry){
            .used = true, .coll = call->coll, .dtype = dtype, .n_elems = call->n_elems, .stale = true};
    e->last = n;
    if (e->stale || changed(c->group.local_ns, e->choice.local_ns) ||
        changed(c->group.remote_ns, e->choice.remote_ns)) {
        evaluate(&c->group, e, call);
        c->n_evaluated++;
    }
    c->entry = e;
    *out = &e->choice;
    return SPCCL_OK;
}

/* ---- corrected by times ---- */

/* Slice sizes that may be tried: the given one, half of it, and `most`; most 0: the given one only. Smaller ones than the elements of a part
 * only: one slice is one slice. Returns how many. */
static int slice_sizes(const sp_cost_group *g, sp_schedule schedule, const sp_cost_call *call, uint32_t most,
                       uint32_t out[3])
{
    bool is_cut = call->coll == SP_ALL_REDUCE && schedule != SP_SCHED_ONESHOT;
    size_t part = call->n_elems / (is_cut ? (size_t)g->world_size : 1);
    uint32_t given = (uint32_t)call->slice_elems, half = given / 2 - given / 2 % SP_PICI_TILE_ELEMS;
    int n = 0;
    out[n++] = given;
    if (most == 0)
        return n;
    if (half * call->elem_bytes >= SP_SLICE_BYTES_MIN && part > half)
        out[n++] = half;
    if (most > given && part > given)
        out[n++] = most;
    return n;
}

/* List the candidates: the model's choice, then those that the model expects to take at most twice its time. */
static int list_arms(const sp_chooser *c, const sp_choice *model, const sp_cost_call *call, uint32_t most,
                     sp_tune_arm arms[SP_TUNER_ARMS])
{
    sp_cost_call with = *call;
    int n = 1;
    with.density = model->density;
    with.sum_density = model->sum_density;
    arms[0] = (sp_tune_arm){.setting = {model->schedule, (uint32_t)call->slice_elems}, .predicted = 1};
    for (int i = 0; i < SP_N_SCHEDULES; i++) {
        uint32_t sizes[3];
        sp_schedule schedule = (sp_schedule)i;
        int n_sizes = is_candidate(&c->group, schedule, call->coll)
                          ? slice_sizes(&c->group, schedule, call, most, sizes)
                          : 0;
        for (int k = 0; k < n_sizes && n < SP_TUNER_ARMS; k++) {
            double ratio;
            with.slice_elems = sizes[k];
            ratio = sp_expected_ns(&c->group, schedule, &with) / model->ns[model->schedule];
            if (ratio > 2 || (schedule == model->schedule && k == 0))
                continue;
            arms[n++] = (sp_tune_arm){.setting = {schedule, sizes[k]}, .predicted = ratio};
        }
    }
    return n;
}

/* The candidate that the profile has for this kind of call. -1: none. */
static int known_arm(const sp_chooser *c, const sp_tune_key *key, const sp_tune_arm *arms, int n_arms)
{
    sp_profile_line like = kind_of(&c->group, key);
    const sp_profile_line *l = c->profile != NULL ? sp_profile_find(c->profile, &like) : NULL;
    for (int i = 0; l != NULL && i < n_arms; i++)
        if (arms[i].setting.schedule == l->best.schedule &&
            arms[i].setting.slice_elems == l->best.slice_elems)
            return i;
    return -1;
}

static double known_ratio(const sp_chooser *c, const sp_tune_key *key)
{
    sp_profile_line like = kind_of(&c->group, key);
    return sp_profile_find(c->profile, &like)->ratio;
}

/* The cell of this kind of call, with its candidates. NULL: it is not tuned. */
static sp_tune_cell *cell_of(sp_chooser *c, const sp_choice *model, const sp_cost_call *call, uint8_t dtype,
                             uint32_t most)
{
    sp_tune_key key = {.coll = call->coll, .dtype = dtype, .n_elems = call->n_elems};
    sp_setting first = {model->schedule, (uint32_t)call->slice_elems};
    sp_tune_arm arms[SP_TUNER_ARMS];
    sp_tune_cell *cell;
    bool is_new;
    int n, known;
    if (!model->measured || !(model->ns[model->schedule] > 0))
        return NULL;
    key.density_class = c->entry->density_class;
    cell = sp_tuner_find(c->tuner, &key, &is_new);
    if (!sp_tuner_wants_arms(cell, &first))
        return cell;
    n = list_arms(c, model, call, most, arms);
    known = is_new ? known_arm(c, &key, arms, n) : -1;
    sp_tuner_start(cell, arms, n, known);
    if (known >= 0)
        cell->ratio = known_ratio(c, &key);
    return cell;
}

/* Does each rank's time of an earlier call travel in such a call? */
static bool carries_times(const sp_chooser *c, const sp_cost_call *call)
{
    return c->tuner != NULL && c->group.world_size > 1 && call->n_elems != 0 &&
           (call->coll == SP_ALL_REDUCE || call->coll == SP_ALL_GATHER);
}

static void hash_choice(sp_chooser *c)
{
    uint64_t x = (uint64_t)c->now.schedule + ((uint64_t)c->now.tuned.slice_elems << 8) +
                 ((uint64_t)c->now.tuned.is_trial << 40);
    c->choices_hash = ((c->choices_hash ^ x) + 1) * 0x100000001b3u;
}

spccl_status sp_choose_tuned(sp_chooser *c, const sp_cost_call *call, uint8_t dtype, uint32_t slice_elems_max,
                             const sp_choice **out)
{
    const sp_choice *model;
    sp_tune_cell *cell;
    SP_TRY(sp_choose(c, call, dtype, &model));
    c->now = *model;
    c->now.tuned = (sp_tuned){.slice_elems = (uint32_t)call->slice_elems, .model = model->schedule};
    *out = &c->now;
    if (carries_times(c, call)) {
        cell = cell_of(c, model, call, dtype, slice_elems_max);
        c->now.carrier = c->tuner->n_carriers + 1;
        if (cell == NULL) {
            sp_tuner_skip(c->tuner);
        } else {
            sp_tuned *t = &c->now.tuned;
            c->n_evaluated += cell->changed;
            *t = (sp_tuned){.state = cell->state,
                            .from_profile = cell->from_profile,
                            .model = cell->arms[0].setting.schedule,
                            .n_trials = cell->n_trials,
                            .ratio = cell->ratio};
            sp_setting s = cell->arms[sp_tuner_take(c->tuner, cell, &t->is_trial)].setting;
            c->now.schedule = s.schedule;
            t->slice_elems = s.slice_elems;
        }
    }
    hash_choice(c);
    return SPCCL_OK;
}

void sp_chooser_save(const sp_chooser *c, sp_profile *p)
{
    for (int i = 0; i < SP_TUNER_CELLS; i++) {
        const sp_tune_cell *cell = &c->tuner->cells[i];
        sp_profile_line line = kind_of(&c->group, &cell->key);
        if (!cell->used || cell->state != SP_TUNE_SETTLED || cell->n_arms < 2 || cell->from_profile)
            continue;
        line.best = cell->arms[cell->usual].setting;
        line.ratio = cell->ratio;
        sp_profile_put(p, &line);
    }
}

void sp_chooser_end(sp_chooser *c, const sp_measured *m)
{
    c->ended[c->n_ended++ % SP_CHOOSE_LAG] = *m;
}

/* "; tuned: 0.91 of the time of direct, slices of 61440 elements, 96 trials" */
static void describe_tuned(const sp_choice *choice, char *text, size_t cap)
{
    const sp_tuned *t = &choice->tuned;
    char what[80];
    if (t->state == SP_TUNE_NONE || cap == 0)
        return;
    if (t->state == SP_TUNE_SETTLED)
        snprintf(what, sizeof what, "; tuned: %.2f of the time of %s", t->ratio, sp_schedule_name(t->model));
    else
        snprintf(what, sizeof what, "; tuning%s", t->is_trial ? ", a trial" : "");
    snprintf(text, cap, "%s, slices of %u elements%s", what, t->slice_elems,
             t->from_profile ? ", from the profile" : "");
}

void sp_choice_describe(const sp_choice *choice, char *text, size_t cap)
{
    size_t used;
    snprintf(text, cap, "%s (%s %.3g%% and %.3g%% nonzero", sp_schedule_name(choice->schedule),
             choice->measured ? "measured" : "assumed", 100 * choice->density, 100 * choice->sum_density);
    for (int i = 0; i < SP_N_SCHEDULES; i++) {
        used = strlen(text);
        if (choice->ns[i] > 0)
            snprintf(text + used, cap - used, "; %s %.4g us", sp_schedule_name((sp_schedule)i),
                     choice->ns[i] * 1e-3);
    }
    used = strlen(text);
    snprintf(text + used, cap - used, ")");
    describe_tuned(choice, text + used + 1, cap > used + 1 ? cap - used - 1 : 0);
}
