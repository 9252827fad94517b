/* exec_choose.c - the schedule of an op: chosen by cost (choose.h), or forced; and the texts that say why. */
#include "core/run/exec_steps.h"

#include "core/base/dtype.h"
#include "core/base/log.h"

#include <stdio.h>

_Static_assert(SP_TRACE_VALUES >= 4 + SP_N_SCHEDULES, "a choice fits into the trace");

/* What a choice is in the values of an event of the trace. */
static void choice_pack(const sp_choice *c, double *values)
{
    values[0] = c->schedule;
    values[1] = c->measured;
    values[2] = c->density;
    values[3] = c->sum_density;
    for (int i = 0; i < SP_N_SCHEDULES; i++)
        values[4 + i] = c->ns[i];
}

static void describe_event(const sp_trace_event *e, char *text, size_t cap)
{
    sp_choice c = {.schedule = (sp_schedule)(int)e->values[0],
                   .measured = e->values[1] != 0,
                   .density = e->values[2],
                   .sum_density = e->values[3]};
    for (int i = 0; i < SP_N_SCHEDULES; i++)
        c.ns[i] = e->values[4 + i];
    sp_choice_describe(&c, text, cap);
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
    char text[SP_TRACE_TEXT_CAP];
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
    sp_trace_event *event;
    SP_TRY(sp_choose(x->chooser, &call, (uint8_t)op->a.dtype, &choice));
    if (!op->a.is_forced)
        op->a.schedule = choice->schedule;
    op->measured = (sp_measured){.coll = op->a.coll, .dtype = (uint8_t)op->a.dtype, .n_elems = op->a.n_elems};
    if (x->chooser->n_evaluated != n_evaluated)
        note_choice(x, op, choice);
    event = sp_trace_add(x->trace, op->seq, op->a.is_forced ? "forced " : "chosen ", sp_coll_name(op->a.coll),
                         op->a.n_elems);
    choice_pack(choice, event->values);
    event->values[0] = op->a.schedule;
    event->describe = describe_event;
    return SPCCL_OK;
}

bool sp_exec_describe_choice(sp_exec *x, size_t i, char *text, size_t cap)
{
    sp_chosen c = {.coll = SP_N_COLLS};
    char why[SP_TRACE_TEXT_CAP];
    pthread_mutex_lock(&x->choices_mu);
    if (i < x->n_choices && i < SP_EXEC_CHOICES)
        c = x->choices[i];
    pthread_mutex_unlock(&x->choices_mu);
    if (c.coll == SP_N_COLLS)
        return false;
    c.choice.schedule = c.schedule;
    sp_choice_describe(&c.choice, why, sizeof why);
    snprintf(text, cap, "%s of %llu %s: %s%s", sp_coll_name(c.coll), (unsigned long long)c.n_elems,
             sp_dtype_name(c.dtype), c.is_forced ? "forced " : "", why);
    return true;
}
