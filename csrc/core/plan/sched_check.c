/* sched_check.c - simulates the plans of all ranks. See sp_plan_check in sched.h.
 * Each message carries the set of ranks whose data it holds. A part that lacks a rank's data, or holds it twice,
 * is an error. A queue holds at most queue_cap messages, so plans that can deadlock stop here. */
#include "core/base/mem.h"
#include "core/plan/sched.h"

#include <string.h>

#define RANKS_MAX 64

typedef struct message {
    int part, slice;
    uint64_t holds; /* bit r: the message holds data of rank r */
} message;

typedef struct queue {
    message *fifo;
    int n;
} queue;

typedef struct check {
    sp_plan *const *plans;
    int world_size, n_slices, queue_cap;
    sp_coll coll;
    queue *queues; /* [from][to][queue] */
    int *next;     /* [rank][step]: the step's next slice */
    int steps_cap; /* steps of the longest plan */
} check;

static queue *queue_of(check *c, int from, int to, int queue_number)
{
    return &c->queues[(from * c->world_size + to) * SP_N_QUEUES + queue_number];
}

/* True if the step can run slice k now: step `after` has finished slice k, each input queue has a message, each
 * output queue has space. */
static bool slice_ready(check *c, int rank, const sp_step *s, int k)
{
    const sp_plan *plan = c->plans[rank];
    if (s->after >= 0 && c->next[rank * c->steps_cap + s->after] <= k)
        return false;
    for (int i = 0; i < s->n_from; i++) {
        int from = plan->ranks[s->from + i];
        const queue *q = queue_of(c, from, rank, s->queue_in);
        if (q->n == 0)
            return false;
        if (q->fifo[0].part != s->part && sp_plan_takes(plan, s->queue_in, from, q->fifo[0].part))
            return false; /* it is for another step */
    }
    for (int i = 0; i < s->n_to; i++)
        if (queue_of(c, rank, plan->ranks[s->to + i], s->queue_out)->n >= c->queue_cap)
            return false;
    return true;
}

/* Run slice k of a step that is ready. */
static spccl_status run_slice(check *c, int rank, const sp_step *s, int k)
{
    const sp_plan *plan = c->plans[rank];
    uint64_t holds = s->kind == SP_STEP_RECV ? 0 : UINT64_C(1) << rank;
    uint64_t all = c->world_size == RANKS_MAX ? UINT64_MAX : (UINT64_C(1) << c->world_size) - 1;
    for (int i = 0; i < s->n_from; i++) {
        int from = plan->ranks[s->from + i];
        queue *q = queue_of(c, from, rank, s->queue_in);
        message m = q->fifo[0];
        if (i > 0 && from <= plan->ranks[s->from + i - 1])
            return SP_FAIL(SPCCL_ERR_BUG, "plan %s, rank %d: senders are not in rank order", plan->name,
                           rank);
        if (m.part != s->part || m.slice != k)
            return SP_FAIL(SPCCL_ERR_BUG,
                           "plan %s, rank %d: got part %d slice %d from rank %d, wanted part %d slice %d",
                           plan->name, rank, m.part, m.slice, from, s->part, k);
        if ((holds & m.holds) != 0)
            return SP_FAIL(SPCCL_ERR_BUG, "plan %s, rank %d: part %d holds a rank's data twice", plan->name,
                           rank, s->part);
        holds |= m.holds;
        memmove(q->fifo, q->fifo + 1, (size_t)--q->n * sizeof m);
    }
    if (s->kind == SP_STEP_REDUCE && holds != all)
        return SP_FAIL(SPCCL_ERR_BUG, "plan %s, rank %d: the reduction of part %d lacks the data of a rank",
                       plan->name, rank, s->part);
    if (s->kind == SP_STEP_RECV && c->coll == SP_ALL_REDUCE && holds != all)
        return SP_FAIL(SPCCL_ERR_BUG, "plan %s, rank %d: the result of part %d lacks the data of a rank",
                       plan->name, rank, s->part);
    for (int i = 0; i < s->n_to; i++) {
        queue *q = queue_of(c, rank, plan->ranks[s->to + i], s->queue_out);
        q->fifo[q->n++] = (message){s->part, k, holds};
    }
    return SPCCL_OK;
}

/* Exactly one step must write each element of the output. */
static spccl_status check_coverage(const check *c, int rank, size_t out_elems)
{
    const sp_plan *plan = c->plans[rank];
    size_t covered = 0;
    for (int i = 0; i < plan->n_steps; i++) {
        const sp_step *a = &plan->steps[i];
        if (a->kind == SP_STEP_SEND)
            continue;
        covered += a->n_elems;
        for (int j = 0; j < i; j++) {
            const sp_step *b = &plan->steps[j];
            if (b->kind != SP_STEP_SEND && a->dst_off < b->dst_off + b->n_elems &&
                b->dst_off < a->dst_off + a->n_elems)
                return SP_FAIL(SPCCL_ERR_BUG, "plan %s, rank %d: steps %d and %d write the same elements",
                               plan->name, rank, j, i);
        }
    }
    if (covered != out_elems)
        return SP_FAIL(SPCCL_ERR_BUG, "plan %s, rank %d: the steps write %zu elements, wanted %zu",
                       plan->name, rank, covered, out_elems);
    return SPCCL_OK;
}

static spccl_status run_all(check *c)
{
    bool progressed = true, left = true;
    while (progressed) {
        progressed = left = false;
        for (int r = 0; r < c->world_size; r++)
            for (int i = 0; i < c->plans[r]->n_steps; i++) {
                int *k = &c->next[r * c->steps_cap + i];
                if (*k >= c->n_slices)
                    continue;
                left = true;
                if (!slice_ready(c, r, &c->plans[r]->steps[i], *k))
                    continue;
                SP_TRY(run_slice(c, r, &c->plans[r]->steps[i], *k));
                ++*k;
                progressed = true;
            }
    }
    for (int r = 0; r < c->world_size && left; r++)
        for (int i = 0; i < c->plans[r]->n_steps; i++)
            if (c->next[r * c->steps_cap + i] < c->n_slices)
                return SP_FAIL(SPCCL_ERR_BUG, "plan %s: deadlock: rank %d waits in step %d at slice %d",
                               c->plans[r]->name, r, i, c->next[r * c->steps_cap + i]);
    for (int i = 0; i < c->world_size * c->world_size * SP_N_QUEUES; i++)
        if (c->queues[i].n != 0)
            return SP_FAIL(SPCCL_ERR_BUG, "plan %s: a message from rank %d to rank %d is never read",
                           c->plans[0]->name, i / SP_N_QUEUES / c->world_size,
                           i / SP_N_QUEUES % c->world_size);
    return SPCCL_OK;
}

spccl_status sp_plan_check(sp_plan *const *plans, int world_size, sp_coll coll, size_t n_elems, int root,
                           int n_slices, int queue_cap)
{
    check c = {
        .plans = plans, .world_size = world_size, .n_slices = n_slices, .queue_cap = queue_cap, .coll = coll};
    size_t n_queues = (size_t)world_size * (size_t)world_size * SP_N_QUEUES;
    spccl_status st = SPCCL_OK;
    message *messages = NULL;
    if (world_size < 1 || world_size > RANKS_MAX)
        return SP_FAIL(SPCCL_ERR_ARG, "sp_plan_check: %d ranks, wanted 1 to %d", world_size, RANKS_MAX);
    for (int r = 0; r < world_size; r++)
        c.steps_cap = plans[r]->n_steps > c.steps_cap ? plans[r]->n_steps : c.steps_cap;
    c.queues = sp_calloc(n_queues, sizeof *c.queues);
    c.next = sp_calloc((size_t)world_size * (size_t)c.steps_cap, sizeof *c.next);
    messages = sp_calloc(n_queues * (size_t)queue_cap, sizeof *messages);
    if (c.queues == NULL || c.next == NULL || messages == NULL)
        st = SP_FAIL(SPCCL_ERR_NOMEM, "sp_plan_check of %d ranks", world_size);
    for (size_t i = 0; st == SPCCL_OK && i < n_queues; i++)
        c.queues[i].fifo = messages + i * (size_t)queue_cap;
    for (int r = 0; st == SPCCL_OK && r < world_size; r++) {
        size_t out_elems = coll == SP_ALL_GATHER ? n_elems * (size_t)world_size : n_elems;
        /* The root of a broadcast writes nothing. */
        st = check_coverage(&c, r, coll == SP_BROADCAST && r == root ? 0 : out_elems);
    }
    if (st == SPCCL_OK)
        st = run_all(&c);
    sp_free(c.queues);
    sp_free(c.next);
    sp_free(messages);
    return st;
}
