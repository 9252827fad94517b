/* choose.c - see choose.h. */
#include "core/plan/choose.h"

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

static bool is_candidate(const sp_cost_group *g, sp_schedule schedule, sp_coll coll)
{
    if (!sp_schedule_adds_in_rank_order(schedule) || !sp_schedule_has(schedule, coll))
        return false;
    return schedule != SP_SCHED_RELAYED || (g->n_hosts > 1 && g->n_hosts < g->world_size);
}

/* The expected time of a call, or 0 if the schedule does not have this collective. */
static double expected_ns(const sp_cost_group *g, sp_schedule schedule, const sp_cost_call *call)
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
        double ns = is_candidate(g, schedule, call->coll) ? expected_ns(g, schedule, &with) : 0;
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
    *out = &e->choice;
    return SPCCL_OK;
}

void sp_chooser_end(sp_chooser *c, const sp_measured *m)
{
    c->ended[c->n_ended++ % SP_CHOOSE_LAG] = *m;
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
}
