/* sched_check.c - simulates the plans of all ranks. See sp_plan_check in sched.h.
 * Each message carries the set of ranks whose data it holds. A part that lacks a rank's data, or holds it twice,
 * is an error. A queue holds at most queue_cap messages, so plans that can deadlock stop here. */
#include "core/base/bits.h"
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

typedef struct turn {
    int step, block;
} turn;

typedef struct kept_slice {
    bool taken;
    message m;
} kept_slice;

typedef struct check {
    sp_plan *const *plans;
    int world_size, n_slices, queue_cap;
    sp_coll coll;
    size_t slice_elems;                 /* the longest step has n_slices slices */
    queue *queues;                      /* [from][to][queue] */
    int *next;                          /* [rank][step]: the step's next slice */
    turn *turns;                        /* [rank][turn] */
    kept_slice *kept;                   /* [rank][kept buffer] */
    int steps_cap, turns_cap, kept_cap; /* of the longest plan */
} check;

static int slices_of(const check *c, const sp_step *s)
{
    return (int)sp_ceil_div(s->n_elems, c->slice_elems);
}

static kept_slice *kept_at(const check *c, int rank, int k)
{
    return &c->kept[rank * c->kept_cap + k % c->plans[rank]->block_slices];
}

/* Pass the turn on to the next step with slices in the block. */
static void pass_turn(const check *c, int rank, int number)
{
    const sp_plan *plan = c->plans[rank];
    turn *t = &c->turns[rank * c->turns_cap + number];
    for (int wraps = 0; wraps < 2;) {
        if (++t->step == plan->n_steps) {
            t->step = -1;
            t->block++;
            wraps++;
        } else if (plan->steps[t->step].turn == number &&
                   t->block * plan->block_slices < slices_of(c, &plan->steps[t->step])) {
            return;
        }
    }
}

static bool is_turn_of(const check *c, int rank, const sp_step *s, int k)
{
    const turn *t = &c->turns[rank * c->turns_cap + s->turn];
    return t->step == (int)(s - c->plans[rank]->steps) && t->block == k / c->plans[rank]->block_slices;
}

static queue *queue_of(check *c, int from, int to, int queue_number)
{
    return &c->queues[(from * c->world_size + to) * SP_N_QUEUES + queue_number];
}

/* True if the step can run slice k now: step `after` has finished slice k, it is the step's turn, a kept buffer is free,
 * each input queue has a message, each output queue has space. */
static bool slice_ready(check *c, int rank, const sp_step *s, int k)
{
    const sp_plan *plan = c->plans[rank];
    if (s->after >= 0) {
        int done = c->next[rank * c->steps_cap + s->after];
        if (done <= k && done < slices_of(c, &plan->steps[s->after]))
            return false;
    }
    if ((s->turn != SP_NO_TURN && !is_turn_of(c, rank, s, k)) || (s->keeps && kept_at(c, rank, k)->taken))
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

/* Take the messages of slice k. *holds gets the ranks whose data they hold, and this rank if it adds its own. */
static spccl_status take_messages(check *c, int rank, const sp_step *s, int k, uint64_t *holds)
{
    const sp_plan *plan = c->plans[rank];
    *holds = s->kind == SP_STEP_RECV ? 0 : UINT64_C(1) << rank;
    for (int i = 0; i < s->n_from; i++) {
        int from = plan->ranks[s->from + i];
        queue *q = queue_of(c, from, rank, s->queue_in);
        message m = q->fifo[0];
        bool in_order = i == 0 || from > plan->ranks[s->from + i - 1];
        bool own_in_order = (i < s->own_before) == (from < rank);
        if (s->kind == SP_STEP_REDUCE && !s->adds_sums && !(in_order && own_in_order))
            return SP_FAIL(SPCCL_ERR_BUG, "plan %s, rank %d: contributions are not in rank order", plan->name,
                           rank);
        if (m.part != s->part || m.slice != k)
            return SP_FAIL(SPCCL_ERR_BUG,
                           "plan %s, rank %d: got part %d slice %d from rank %d, wanted part %d slice %d",
                           plan->name, rank, m.part, m.slice, from, s->part, k);
        if ((*holds & m.holds) != 0)
            return SP_FAIL(SPCCL_ERR_BUG, "plan %s, rank %d: part %d holds a rank's data twice", plan->name,
                           rank, s->part);
        *holds |= m.holds;
        memmove(q->fifo, q->fifo + 1, (size_t)--q->n * sizeof m);
    }
    return SPCCL_OK;
}

/* What a step sends that an earlier step of this rank has made. */
static spccl_status find_made(check *c, int rank, const sp_step *s, int k, uint64_t *holds)
{
    kept_slice *kept = kept_at(c, rank, k);
    if (s->source == SP_SOURCE_OUT) {
        *holds = UINT64_MAX >> (RANKS_MAX - c->world_size);
        return s->after >= 0 && c->plans[rank]->steps[s->after].part == s->part
                   ? SPCCL_OK
                   : SP_FAIL(SPCCL_ERR_BUG, "plan %s, rank %d: part %d is sent before it is in the output",
                             c->plans[rank]->name, rank, s->part);
    }
    if (!kept->taken || kept->m.part != s->part || kept->m.slice != k)
        return SP_FAIL(SPCCL_ERR_BUG, "plan %s, rank %d: part %d slice %d is sent, but not kept",
                       c->plans[rank]->name, rank, s->part, k);
    kept->taken = false;
    *holds = kept->m.holds;
    return SPCCL_OK;
}

/* Run slice k of a step that is ready. */
static spccl_status run_slice(check *c, int rank, const sp_step *s, int k)
{
    const sp_plan *plan = c->plans[rank];
    uint64_t holds = 0, all = UINT64_MAX >> (RANKS_MAX - c->world_size);
    bool is_result =
        (s->kind == SP_STEP_REDUCE && !s->gives_sum) || (s->kind == SP_STEP_RECV && c->coll == SP_ALL_REDUCE);
    if (s->source != SP_SOURCE_IN)
        SP_TRY(find_made(c, rank, s, k, &holds));
    else
        SP_TRY(take_messages(c, rank, s, k, &holds));
    if (is_result && holds != all)
        return SP_FAIL(SPCCL_ERR_BUG, "plan %s, rank %d: the result of part %d lacks the data of a rank",
                       plan->name, rank, s->part);
    if (s->keeps)
        *kept_at(c, rank, k) = (kept_slice){true, {s->part, k, holds}};
    for (int i = 0; i < s->n_to; i++) {
        queue *q = queue_of(c, rank, plan->ranks[s->to + i], s->queue_out);
        q->fifo[q->n++] = (message){s->part, k, holds};
    }
    if (s->turn != SP_NO_TURN && ((k + 1) % plan->block_slices == 0 || k + 1 == slices_of(c, s)))
        pass_turn(c, rank, s->turn);
    return SPCCL_OK;
}

static bool writes_output(const sp_step *s)
{
    return s->kind != SP_STEP_SEND && !s->gives_sum;
}

/* Exactly one step must write each element of the output. */
static spccl_status check_coverage(const check *c, int rank, size_t out_elems)
{
    const sp_plan *plan = c->plans[rank];
    size_t covered = 0;
    for (int i = 0; i < plan->n_steps; i++) {
        const sp_step *a = &plan->steps[i];
        if (!writes_output(a))
            continue;
        covered += a->n_elems;
        for (int j = 0; j < i; j++) {
            const sp_step *b = &plan->steps[j];
            if (writes_output(b) && a->dst_off < b->dst_off + b->n_elems &&
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
                if (*k >= slices_of(c, &c->plans[r]->steps[i]))
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
            if (c->next[r * c->steps_cap + i] < slices_of(c, &c->plans[r]->steps[i]))
                return SP_FAIL(SPCCL_ERR_BUG, "plan %s: deadlock: rank %d waits in step %d at slice %d",
                               c->plans[r]->name, r, i, c->next[r * c->steps_cap + i]);
    for (int i = 0; i < c->world_size * c->world_size * SP_N_QUEUES; i++)
        if (c->queues[i].n != 0)
            return SP_FAIL(SPCCL_ERR_BUG, "plan %s: a message from rank %d to rank %d is never read",
                           c->plans[0]->name, i / SP_N_QUEUES / c->world_size,
                           i / SP_N_QUEUES % c->world_size);
    for (int i = 0; i < c->world_size * c->kept_cap; i++)
        if (c->kept[i].taken)
            return SP_FAIL(SPCCL_ERR_BUG, "plan %s: rank %d keeps part %d and never sends it",
                           c->plans[0]->name, i / c->kept_cap, c->kept[i].m.part);
    return SPCCL_OK;
}

/* The bounds of the tables, and the slice size. */
static void measure(check *c)
{
    size_t longest = 1;
    for (int r = 0; r < c->world_size; r++) {
        const sp_plan *p = c->plans[r];
        c->steps_cap = p->n_steps > c->steps_cap ? p->n_steps : c->steps_cap;
        c->turns_cap = p->n_turns > c->turns_cap ? p->n_turns : c->turns_cap;
        c->kept_cap = p->block_slices > c->kept_cap ? p->block_slices : c->kept_cap;
        for (int i = 0; i < p->n_steps; i++)
            longest = sp_max_size(longest, p->steps[i].n_elems);
    }
    c->slice_elems = sp_ceil_div(longest, (size_t)c->n_slices);
}

spccl_status sp_plan_check(sp_plan *const *plans, int world_size, sp_coll coll, size_t n_elems, int root,
                           int n_slices, int queue_cap)
{
    check c = {
        .plans = plans, .world_size = world_size, .n_slices = n_slices, .queue_cap = queue_cap, .coll = coll};
    size_t n_ranks = (size_t)world_size, n_queues = n_ranks * n_ranks * SP_N_QUEUES;
    spccl_status st = SPCCL_OK;
    message *messages = NULL;
    if (world_size < 1 || world_size > RANKS_MAX)
        return SP_FAIL(SPCCL_ERR_ARG, "sp_plan_check: %d ranks, wanted 1 to %d", world_size, RANKS_MAX);
    measure(&c);
    c.queues = sp_calloc(n_queues, sizeof *c.queues);
    c.next = sp_calloc(n_ranks * (size_t)c.steps_cap, sizeof *c.next);
    c.turns = sp_calloc(n_ranks * (size_t)(c.turns_cap + 1), sizeof *c.turns);
    c.kept = sp_calloc(n_ranks * (size_t)c.kept_cap, sizeof *c.kept);
    messages = sp_calloc(n_queues * (size_t)queue_cap, sizeof *messages);
    if (c.queues == NULL || c.next == NULL || c.turns == NULL || c.kept == NULL || messages == NULL)
        st = SP_FAIL(SPCCL_ERR_NOMEM, "sp_plan_check of %d ranks", world_size);
    for (size_t i = 0; st == SPCCL_OK && i < n_queues; i++)
        c.queues[i].fifo = messages + i * (size_t)queue_cap;
    for (int r = 0; st == SPCCL_OK && r < world_size; r++) {
        size_t out_elems = coll == SP_ALL_GATHER ? n_elems * (size_t)world_size : n_elems;
        /* The root of a broadcast writes nothing. */
        st = check_coverage(&c, r, coll == SP_BROADCAST && r == root ? 0 : out_elems);
    }
    for (int r = 0; st == SPCCL_OK && r < world_size; r++)
        for (int i = 0; i < plans[r]->n_turns; i++) {
            c.turns[r * c.turns_cap + i].step = -1;
            pass_turn(&c, r, i);
        }
    if (st == SPCCL_OK)
        st = run_all(&c);
    sp_free(c.queues);
    sp_free(c.next);
    sp_free(c.turns);
    sp_free(c.kept);
    sp_free(messages);
    return st;
}
