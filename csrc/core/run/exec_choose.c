/* exec_choose.c - the schedule of an op: chosen by cost (choose.h), or forced; and the texts that say why. */
#include "core/run/exec_steps.h"

#include "core/base/dtype.h"
#include "core/base/log.h"

#include <stdio.h>

#define TEXT_CAP 400
#define GPUS_CAP 230

void sp_exec_note(sp_exec *x, const sp_op *op, const char *what, const sp_choice *choice)
{
    sp_event *e = &x->events[x->n_events++ % SP_EXEC_EVENTS];
    *e = (sp_event){.time_ns = sp_now_ns(),
                    .what = what,
                    .seq = op->seq,
                    .coll = op->a.coll,
                    .n_elems = op->a.n_elems,
                    .has_choice = choice != NULL};
    if (choice != NULL)
        e->choice = *choice;
    e->choice.schedule = op->a.schedule;
}

void sp_exec_log_events(const sp_exec *x)
{
    int64_t now = sp_now_ns();
    for (uint64_t i = x->n_events - sp_min_size(x->n_events, SP_EXEC_EVENTS); i < x->n_events; i++) {
        const sp_event *e = &x->events[i % SP_EXEC_EVENTS];
        char text[TEXT_CAP] = "";
        if (e->has_choice)
            sp_choice_describe(&e->choice, text, sizeof text);
        sp_log(SP_LOG_INFO, x->links->rank, "trace: %9.3f ms ago  #%u %s of %llu elements: %s%s",
               (double)(now - e->time_ns) * 1e-6, e->seq, sp_coll_name(e->coll),
               (unsigned long long)e->n_elems, e->what, text);
    }
}

static bool is_kind(const sp_chosen *c, const sp_op *op)
{
    return c->coll == op->a.coll && c->dtype == op->a.dtype && c->n_elems == op->a.n_elems;
}

/* Keep the choice for sp_exec_describe_choice. Called when costs were computed, which is seldom. */
static void note_choice(sp_exec *x, const sp_op *op, const sp_choice *choice)
{
    uint32_t i = 0, n;
    bool is_new, other;
    sp_chosen *c;
    char text[TEXT_CAP + GPUS_CAP];
    pthread_mutex_lock(&x->choices_mu);
    n = x->n_choices < SP_EXEC_CHOICES ? x->n_choices : SP_EXEC_CHOICES;
    while (i < n && !is_kind(&x->choices[i], op))
        i++;
    is_new = i == n;
    if (is_new)
        i = x->n_choices++ % SP_EXEC_CHOICES;
    c = &x->choices[i];
    other = is_new || c->schedule != op->a.schedule;
    *c = (sp_chosen){.coll = op->a.coll,
                     .dtype = op->a.dtype,
                     .n_elems = op->a.n_elems,
                     .is_forced = op->a.is_forced,
                     .schedule = op->a.schedule,
                     .plans = op->a.plans,
                     .written = op->a.written,
                     .choice = *choice};
    pthread_mutex_unlock(&x->choices_mu);
    if (other && sp_exec_describe_choice(x, i, text, sizeof text))
        sp_log(SP_LOG_INFO, x->links->rank, "%s", text);
}

spccl_status sp_exec_choose(sp_exec *x, sp_op *op)
{
    sp_cost_call call = {.coll = op->a.coll,
                         .n_elems = op->a.n_elems,
                         .elem_bytes = op->elem_bytes,
                         .slice_elems = op->a.slice_elems,
                         .format = SPCCL_FORMAT_AUTO}; /* not op->a.format: ranks may force different ones */
    uint32_t n_evaluated = x->chooser->n_evaluated;
    const sp_choice *choice;
    if (x->chooser->tuner != NULL && !op->a.is_forced)
        SP_TRY(sp_choose_tuned(x->chooser, &call, (uint8_t)op->a.dtype, (uint32_t)op->a.slice_elems_max,
                               &choice));
    else
        SP_TRY(sp_choose(x->chooser, &call, (uint8_t)op->a.dtype, &choice));
    if (!op->a.is_forced)
        op->a.schedule = choice->schedule;
    if (choice->tuned.slice_elems != 0)
        op->a.slice_elems = choice->tuned.slice_elems;
    op->measured = (sp_measured){.coll = op->a.coll,
                                 .dtype = (uint8_t)op->a.dtype,
                                 .n_elems = op->a.n_elems,
                                 .carrier = choice->carrier};
    op->time_code = sp_measure_told(x, choice->carrier);
    if (x->chooser->n_evaluated != n_evaluated)
        note_choice(x, op, choice);
    sp_exec_note(x, op, op->a.is_forced ? "forced " : choice->tuned.is_trial ? "tried " : "chosen ", choice);
    return SPCCL_OK;
}

bool sp_exec_describe_choice(sp_exec *x, size_t i, char *text, size_t cap)
{
    sp_chosen c = {.coll = SP_N_COLLS};
    char why[TEXT_CAP], from[120] = "", gpus[GPUS_CAP] = "";
    pthread_mutex_lock(&x->choices_mu);
    if (i < x->n_choices && i < SP_EXEC_CHOICES)
        c = x->choices[i];
    pthread_mutex_unlock(&x->choices_mu);
    if (c.coll == SP_N_COLLS)
        return false;
    c.choice.schedule = c.schedule;
    sp_choice_describe(&c.choice, why, sizeof why);
    if (c.written != NULL) {
        bool on_gpus = c.written->owners.why_not[0] == '\0';
        snprintf(from, sizeof from, "plan %s of %s, ", c.written->head.name, c.plans);
        snprintf(gpus, sizeof gpus, "%s%s",
                 on_gpus ? "; on GPUs too" : "; not on GPUs: ", c.written->owners.why_not);
    } else if (c.plans != NULL) {
        snprintf(from, sizeof from, "%s has no plan for it, ", c.plans);
    }
    snprintf(text, cap, "%s of %llu %s: %s%s%s%s", sp_coll_name(c.coll), (unsigned long long)c.n_elems,
             sp_dtype_name(c.dtype), from, c.is_forced ? "forced " : "", why, gpus);
    return true;
}
