/* sched_oneshot.c - the oneshot schedule, for small arrays: each rank sends all its data to everyone, and
 * reduces all of it. That is one hop instead of two. Additions have the order of the direct schedule, so the
 * results have the same bits. See docs/ALGORITHMS.md. */
#include "core/plan/sched_build.h"

bool sp_sched_oneshot(sp_plan_builder *b, const sp_plan_args *a)
{
    sp_step *s;
    if (a->coll != SP_ALL_REDUCE && a->coll != SP_BROADCAST)
        return false;
    if (a->coll == SP_BROADCAST && a->rank != a->root) {
        s = sp_plan_add(b, SP_STEP_RECV, 0, 0, 0, a->n_elems);
        if (s != NULL)
            sp_step_from(b, s, SP_QUEUE_RESULT, a->root);
        return true;
    }
    if (a->world_size > 1) {
        s = sp_plan_add(b, SP_STEP_SEND, 0, 0, 0, a->n_elems);
        if (s != NULL)
            sp_step_to_all(b, s, a->coll == SP_BROADCAST ? SP_QUEUE_RESULT : SP_QUEUE_INPUT, -1);
    }
    if (a->coll == SP_BROADCAST)
        return true;
    s = sp_plan_add(b, SP_STEP_REDUCE, 0, 0, 0, a->n_elems);
    if (s != NULL) {
        sp_step_from_all(b, s, SP_QUEUE_INPUT);
        s->after = a->world_size > 1 ? 0 : -1; /* in place: send a slice before the result overwrites it */
    }
    return true;
}
