/* sched_build.h - how a schedule file (sched_<name>.c) writes its steps. Planning part of the map. */
#ifndef SP_SCHED_BUILD_H
#define SP_SCHED_BUILD_H

#include "core/plan/sched.h"

/* Appends to a plan that has room for steps_cap steps and ranks_cap ranks (set by sp_plan_create). */
typedef struct sp_plan_builder {
    sp_plan *plan;
    int steps_cap, ranks_cap, n_ranks;
} sp_plan_builder;

/* Append a step of that kind over n_elems; no ranks, no `after`, both queues SP_QUEUE_INPUT. NULL if n_elems
 * is 0. */
sp_step *sp_plan_add(sp_plan_builder *b, sp_step_kind kind, int part, size_t src_off, size_t dst_off,
                     size_t n_elems);
/* Set the step's ranks: one rank, or all but this one and `except` (-1: nobody else): `from` rising, `to`
 * starting behind this rank, so that the ranks do not all send to the same peer first. */
void sp_step_from(sp_plan_builder *b, sp_step *step, int queue, int rank);
void sp_step_from_all(sp_plan_builder *b, sp_step *step, int queue);
void sp_step_to(sp_plan_builder *b, sp_step *step, int queue, int rank);
void sp_step_to_all(sp_plan_builder *b, sp_step *step, int queue, int except);

/* One entry per schedule file. False: this schedule does not do that collective. */
bool sp_sched_direct(sp_plan_builder *b, const sp_plan_args *args);
bool sp_sched_oneshot(sp_plan_builder *b, const sp_plan_args *args);

#endif
