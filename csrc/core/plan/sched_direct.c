/* sched_direct.c - the direct schedule. Each rank sends its contribution to a part straight to the part's
 * owner. The owner adds in rank order, encodes the result once and sends it to everyone. docs/ALGORITHMS.md
 * has the steps and bytes.
 * In this schedule contributions travel once, at the density d of the input. In a ring they would be encoded
 * again at each step, and step k carries the density 1-(1-d)^k. Hough et al. (SpCCL, section IV.C) use
 * thresholds against this fill-in. */
#include "core/plan/sched_build.h"

/* Send the own block to everyone, receive the block of each peer, copy the own block. */
static void all_gather(sp_plan_builder *b, const sp_plan_args *a)
{
    sp_step *s;
    for (int i = 1; i < a->world_size; i++) {
        int peer = (a->rank + i) % a->world_size;
        s = sp_plan_add(b, SP_STEP_RECV, peer, 0, (size_t)peer * a->n_elems, a->n_elems);
        sp_step_from(b, s, SP_QUEUE_RESULT, peer);
    }
    s = sp_plan_add(b, SP_STEP_SEND, a->rank, 0, 0, a->n_elems);
    sp_step_to_all(b, s, SP_QUEUE_RESULT, -1);
    sp_plan_add(b, SP_STEP_COPY, a->rank, 0, (size_t)a->rank * a->n_elems, a->n_elems);
}

/* The parts are blocks of n_elems for a reduce-scatter, and the parts of sp_part_range for an all-reduce. */
sp_step *sp_direct_contributions(sp_plan_builder *b, const sp_plan_args *a, bool is_all_reduce)
{
    size_t off = (size_t)a->rank * a->n_elems, len = a->n_elems;
    sp_step *s, *reduce;
    if (is_all_reduce)
        sp_part_range(a->n_elems, a->world_size, a->rank, &off, &len);
    reduce = sp_plan_add(b, SP_STEP_REDUCE, a->rank, off, is_all_reduce ? off : 0, len);
    if (reduce != NULL)
        sp_step_from_all(b, reduce, SP_QUEUE_INPUT);
    for (int i = 1; i < a->world_size; i++) {
        int peer = (a->rank + i) % a->world_size;
        off = (size_t)peer * a->n_elems;
        if (is_all_reduce)
            sp_part_range(a->n_elems, a->world_size, peer, &off, &len);
        s = sp_plan_add(b, SP_STEP_SEND, peer, off, 0, len);
        if (s != NULL)
            sp_step_to(b, s, SP_QUEUE_INPUT, peer);
    }
    return reduce;
}

/* In place is safe: the result of a slice can arrive only after this rank sent its contribution. */
static void all_reduce(sp_plan_builder *b, const sp_plan_args *a)
{
    sp_step *reduce;
    for (int i = 1; i < a->world_size; i++) {
        int peer = (a->rank + i) % a->world_size;
        size_t off, len;
        sp_step *s;
        sp_part_range(a->n_elems, a->world_size, peer, &off, &len);
        s = sp_plan_add(b, SP_STEP_RECV, peer, 0, off, len);
        if (s != NULL)
            sp_step_from(b, s, SP_QUEUE_RESULT, peer);
    }
    reduce = sp_direct_contributions(b, a, true);
    if (reduce != NULL)
        sp_step_to_all(b, reduce, SP_QUEUE_RESULT, -1);
}

/* The root sends one part to each other rank, which relays it to the rest. So the root sends the data once
 * instead of world_size-1 times. This is van de Geijn's scatter and all-gather, without encoding again. */
static void broadcast(sp_plan_builder *b, const sp_plan_args *a)
{
    int n_parts = a->world_size - 1;
    for (int i = 1; i < a->world_size; i++) {
        int owner = (a->root + i) % a->world_size;
        size_t off, len;
        sp_step *s;
        sp_part_range(a->n_elems, n_parts, i - 1, &off, &len);
        s = sp_plan_add(b, a->rank == a->root ? SP_STEP_SEND : SP_STEP_RECV, i - 1, off, off, len);
        if (s == NULL)
            continue;
        if (a->rank == a->root) {
            sp_step_to(b, s, SP_QUEUE_INPUT, owner);
        } else if (a->rank == owner) {
            sp_step_from(b, s, SP_QUEUE_INPUT, a->root);
            sp_step_to_all(b, s, SP_QUEUE_RESULT, a->root);
        } else {
            sp_step_from(b, s, SP_QUEUE_RESULT, owner);
        }
    }
}

bool sp_sched_direct(sp_plan_builder *b, const sp_plan_args *a)
{
    if (a->n_elems == 0)
        return true;
    switch (a->coll) {
    case SP_ALL_GATHER:
        all_gather(b, a);
        return true;
    case SP_REDUCE_SCATTER:
        sp_direct_contributions(b, a, false);
        return true;
    case SP_ALL_REDUCE:
        all_reduce(b, a);
        return true;
    case SP_BROADCAST:
        broadcast(b, a);
        return true;
    case SP_N_COLLS:
        break;
    }
    return false;
}
