/* sched_check.c - simulates the plans of all ranks. See sp_plan_check in sched.h.
 * Each message carries the number of its value: which contributions it holds, and how they were added (sched_sums.h).
 * A queue holds at most queue_cap messages, so plans that can deadlock stop here. */
#include "core/base/bits.h"
#include "core/base/mem.h"
#include "core/plan/sched.h"
#include "core/plan/sched_sums.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

typedef struct message {
    int part, chunk, slice;
    int value;     /* of sched_sums.h */
    bool finished; /* the result of an all-reduce */
    int hops;
} message;

typedef struct queue {
    message *fifo;
    int n;
} queue;

typedef struct kept_slice {
    int n_readers, writer;
    message m;
} kept_slice;

typedef struct check {
    const sp_check_args *a;
    sp_plan *const *plans;
    int world_size;
    size_t slice_elems; /* the longest step has n_slices slices */
    queue *queues;      /* [from][to][queue] */
    int *next;          /* [rank][step]: the step's next slice */
    int *n_slices;      /* [rank][step] */
    int *open;          /* [rank][..]: the steps without a turn that are not done, n_open of each rank */
    int *n_open;        /* [rank] */
    uint32_t *done;     /* [rank][step]: when the step did slice 0 */
    int *hops;          /* [rank][step]: messages before what the step made */
    sp_turn *turns;     /* [rank][turn] */
    kept_slice *kept;   /* [rank][kept buffer] */
    bool *dirty;        /* [rank]: a step of the rank may be ready */
    int *results;       /* [chunk]: value of the output + 1; 0: not known yet */
    int steps_cap, turns_cap, kept_cap; /* of the longest plan */
    int chunks_cap;
    uint32_t n_done;
    sp_sums sums;
    sp_proof proof;
} check;

static spccl_status fault(const check *c, int rank, const sp_step *s, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));

static spccl_status fault(const check *c, int rank, const sp_step *s, const char *fmt, ...)
{
    char text[300];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    return SP_FAIL(c->a->fault, "plan %s, rank %d, step %d: %s", c->plans[rank]->name, rank,
                   (int)(s - c->plans[rank]->steps), text);
}

static int slices_of(const check *c, int rank, const sp_step *s)
{
    return c->n_slices[rank * c->steps_cap + (int)(s - c->plans[rank]->steps)];
}

static kept_slice *kept_at(const check *c, int rank, int slot, int k)
{
    int block = c->plans[rank]->block_slices;
    return &c->kept[rank * c->kept_cap + slot * block + k % block];
}

static sp_turn *turns_of(const check *c, int rank)
{
    return &c->turns[rank * c->turns_cap];
}

static void pass_turn(const check *c, int rank, int number)
{
    sp_turn_pass(c->plans[rank], c->slice_elems, number, &turns_of(c, rank)[number]);
}

static queue *queue_of(const check *c, int from, int to, int queue_number)
{
    return &c->queues[(from * c->world_size + to) * SP_N_QUEUES + queue_number];
}

/* True if the step can run slice k now: step `after` has finished slice k, it is the step's turn, a kept buffer is free,
 * each input queue has a message, each output queue has space. */
static bool slice_ready(const check *c, int rank, const sp_step *s, int k)
{
    const sp_plan *plan = c->plans[rank];
    if (s->after >= 0) {
        int done = c->next[rank * c->steps_cap + s->after];
        if (done <= k && done < slices_of(c, rank, &plan->steps[s->after]))
            return false;
    }
    if (!sp_turn_is(plan, turns_of(c, rank), (int)(s - plan->steps), (uint32_t)k) ||
        (s->keeps && kept_at(c, rank, s->keep_slot, k)->n_readers != 0))
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
        if (queue_of(c, rank, plan->ranks[s->to + i], s->queue_out)->n >= c->a->queue_cap)
            return false;
    return true;
}

/* What a step sends or adds of what this rank has: its input, a kept slice, or its output. */
static spccl_status find_own(const check *c, int rank, const sp_step *s, int k, message *out)
{
    kept_slice *kept;
    *out = (message){.part = s->part, .chunk = s->chunk, .slice = k, .value = rank};
    if (s->source == SP_SOURCE_IN)
        return SPCCL_OK;
    if (s->source == SP_SOURCE_OUT) {
        const sp_step *writer = s->after >= 0 ? &c->plans[rank]->steps[s->after] : NULL;
        if (writer == NULL || writer->chunk != s->chunk || writer->kind == SP_STEP_SEND || writer->gives_sum)
            return fault(c, rank, s, "chunk %d is sent before it is in the output", s->chunk);
        out->finished = true;
        out->hops = c->hops[rank * c->steps_cap + s->after];
        if (c->results[s->chunk] != 0)
            out->value = c->results[s->chunk] - 1;
        return SPCCL_OK;
    }
    kept = kept_at(c, rank, s->source_slot, k);
    if (kept->n_readers == 0 || kept->writer != s->after || kept->m.chunk != s->chunk || kept->m.slice != k)
        return fault(c, rank, s, "slice %d of chunk %d is read from slot %d, where no step keeps it", k,
                     s->chunk, s->source_slot);
    if (s->source == SP_SOURCE_KEPT_MESSAGE && kept->m.part != s->part)
        return fault(c, rank, s, "a kept message has number %d, not %d", kept->m.part, s->part);
    kept->n_readers--;
    *out = kept->m;
    out->part = s->part;
    return SPCCL_OK;
}

/* Take the message of the i-th sender. */
static spccl_status take(const check *c, int rank, const sp_step *s, int i, int k, message *out)
{
    int from = c->plans[rank]->ranks[s->from + i];
    queue *q = queue_of(c, from, rank, s->queue_in);
    *out = q->fifo[0];
    if (out->part != s->part || out->slice != k || out->chunk != s->chunk)
        return fault(c, rank, s,
                     "rank %d sent slice %d of message %d (chunk %d), wanted slice %d of %d (chunk %d)", from,
                     out->slice, out->part, out->chunk, k, s->part, s->chunk);
    memmove(q->fifo, q->fifo + 1, (size_t)--q->n * sizeof *out);
    c->dirty[from] = true;
    return SPCCL_OK;
}

static spccl_status add(check *c, int rank, const sp_step *s, const message *term, message *sum)
{
    if (term->finished)
        return fault(c, rank, s, "a finished result of chunk %d is added to a sum", s->chunk);
    if ((sp_sums_holds(&c->sums, term->value) & sp_sums_holds(&c->sums, sum->value)) != 0)
        return fault(c, rank, s, "the sum of chunk %d holds a rank's data twice", s->chunk);
    if (term->hops > sum->hops)
        sum->hops = term->hops;
    return sp_sums_add(&c->sums, sum->value, term->value, &sum->value);
}

static spccl_status reduce(check *c, int rank, const sp_step *s, int k, message *out)
{
    const int *from = &c->plans[rank]->ranks[s->from];
    *out = (message){.part = s->part, .chunk = s->chunk, .slice = k, .value = c->world_size};
    for (int i = 0; i <= s->n_from; i++) {
        message m;
        if (i == s->own_before) {
            SP_TRY(find_own(c, rank, s, k, &m));
            SP_TRY(add(c, rank, s, &m, out));
        }
        if (i == s->n_from)
            break;
        if (!s->adds_sums && ((i > 0 && from[i] < from[i - 1]) || (i < s->own_before) != (from[i] < rank)))
            return fault(c, rank, s, "contributions are not in rank order");
        SP_TRY(take(c, rank, s, i, k, &m));
        SP_TRY(add(c, rank, s, &m, out));
    }
    if (s->gives_sum)
        c->proof.sends_sums = true;
    out->finished = !s->gives_sum;
    return SPCCL_OK;
}

/* The message is what the step writes to the output: does it hold what belongs there? */
static spccl_status check_output(check *c, int rank, const sp_step *s, const message *m)
{
    uint64_t all = UINT64_MAX >> (SP_SUMS_RANKS_MAX - c->world_size),
             holds = sp_sums_holds(&c->sums, m->value);
    int source = c->a->coll == SP_BROADCAST ? c->a->root : s->chunk / c->a->n_chunks;
    int *result = &c->results[s->chunk];
    if (c->a->coll == SP_ALL_GATHER || c->a->coll == SP_BROADCAST) {
        *result = source + 1;
        return m->value == source
                   ? SPCCL_OK
                   : fault(c, rank, s, "the output of chunk %d is not the data of rank %d", s->chunk, source);
    }
    if (holds != all)
        return fault(c, rank, s, "the result of chunk %d lacks the data of rank %u", s->chunk,
                     sp_ctz64(all & ~holds));
    if (!m->finished)
        return fault(c, rank, s, "a sum of chunk %d that is not finished is written to the output", s->chunk);
    if (m->value != c->sums.in_order)
        c->proof.rank_order = false;
    if (*result != 0 && *result != m->value + 1)
        return fault(c, rank, s, "chunk %d is added in another order than on another rank", s->chunk);
    *result = m->value + 1;
    return SPCCL_OK;
}

static bool writes_output(const sp_step *s)
{
    return s->kind != SP_STEP_SEND && !s->gives_sum;
}

/* Run slice k of a step that is ready. */
static spccl_status run_slice(check *c, int rank, const sp_step *s, int k)
{
    const sp_plan *plan = c->plans[rank];
    message m;
    if (s->kind == SP_STEP_REDUCE)
        SP_TRY(reduce(c, rank, s, k, &m));
    else if (s->kind == SP_STEP_RECV)
        SP_TRY(take(c, rank, s, 0, k, &m));
    else
        SP_TRY(find_own(c, rank, s, k, &m));
    if (writes_output(s))
        SP_TRY(check_output(c, rank, s, &m));
    if (s->keeps) {
        kept_slice *kept = kept_at(c, rank, s->keep_slot, k);
        *kept = (kept_slice){s->n_readers, (int)(s - plan->steps), m};
    }
    c->hops[rank * c->steps_cap + (int)(s - plan->steps)] = m.hops;
    if (s->n_to != 0)
        m.hops++;
    if (m.hops > c->proof.n_hops)
        c->proof.n_hops = m.hops;
    for (int i = 0; i < s->n_to; i++) {
        queue *q = queue_of(c, rank, plan->ranks[s->to + i], s->queue_out);
        q->fifo[q->n++] = m;
        c->dirty[plan->ranks[s->to + i]] = true;
    }
    if (s->turn != SP_NO_TURN && ((k + 1) % plan->block_slices == 0 || k + 1 == slices_of(c, rank, s)))
        pass_turn(c, rank, s->turn);
    if (k == 0)
        c->done[rank * c->steps_cap + (int)(s - plan->steps)] = c->n_done++;
    return SPCCL_OK;
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
                return fault(c, rank, a, "step %d writes the same elements", j);
        }
    }
    if (covered != out_elems)
        return SP_FAIL(c->a->fault, "plan %s, rank %d: its steps write %zu of %zu elements of the output",
                       plan->name, rank, covered, out_elems);
    return SPCCL_OK;
}

/* Run the next slice of a step, if it is ready. */
static spccl_status run_step(check *c, int r, int i)
{
    const sp_step *s = &c->plans[r]->steps[i];
    int *k = &c->next[r * c->steps_cap + i];
    if (*k >= slices_of(c, r, s) || !slice_ready(c, r, s, *k))
        return SPCCL_OK;
    SP_TRY(run_slice(c, r, s, *k));
    ++*k;
    c->dirty[r] = true;
    return SPCCL_OK;
}

/* Run every step of a rank that is ready. Of the steps that take turns, only one can be. */
static spccl_status run_rank(check *c, int r)
{
    const sp_plan *plan = c->plans[r];
    int *open = &c->open[r * c->steps_cap], n = c->n_open[r];
    c->dirty[r] = false;
    c->n_open[r] = 0;
    for (int i = 0; i < n; i++) {
        SP_TRY(run_step(c, r, open[i]));
        if (c->next[r * c->steps_cap + open[i]] < slices_of(c, r, &plan->steps[open[i]]))
            open[c->n_open[r]++] = open[i];
    }
    for (int i = 0; i < plan->n_turns; i++) {
        int step = turns_of(c, r)[i].step;
        if (step >= 0)
            SP_TRY(run_step(c, r, step));
    }
    return SPCCL_OK;
}

/* Nothing can run any more: is everything done? */
static spccl_status check_end(const check *c)
{
    for (int r = 0; r < c->world_size; r++)
        for (int i = 0; i < c->plans[r]->n_steps; i++) {
            const sp_step *s = &c->plans[r]->steps[i];
            int k = c->next[r * c->steps_cap + i];
            if (k < slices_of(c, r, s))
                return fault(c, r, s,
                             "deadlock: with space for %d message per queue it waits for ever at slice %d",
                             c->a->queue_cap, k);
        }
    for (int i = 0; i < c->world_size * c->world_size * SP_N_QUEUES; i++)
        if (c->queues[i].n != 0)
            return SP_FAIL(c->a->fault, "plan %s: message %d from rank %d to rank %d is never read",
                           c->plans[0]->name, c->queues[i].fifo[0].part, i / SP_N_QUEUES / c->world_size,
                           i / SP_N_QUEUES % c->world_size);
    for (int i = 0; i < c->world_size * c->kept_cap; i++)
        if (c->kept[i].n_readers != 0)
            return SP_FAIL(c->a->fault, "plan %s, rank %d, step %d: it keeps chunk %d, and no step reads it",
                           c->plans[0]->name, i / c->kept_cap, c->kept[i].writer, c->kept[i].m.chunk);
    return SPCCL_OK;
}

static spccl_status run_all(check *c)
{
    bool any = true;
    for (int r = 0; r < c->world_size; r++) {
        c->dirty[r] = true;
        for (int i = 0; i < c->plans[r]->n_steps; i++)
            if (c->plans[r]->steps[i].turn == SP_NO_TURN)
                c->open[r * c->steps_cap + c->n_open[r]++] = i;
        for (int i = 0; i < c->plans[r]->n_turns; i++) {
            turns_of(c, r)[i].step = -1;
            pass_turn(c, r, i);
        }
    }
    while (any) {
        any = false;
        for (int r = 0; r < c->world_size; r++)
            if (c->dirty[r]) {
                SP_TRY(run_rank(c, r));
                any = true;
            }
    }
    return check_end(c);
}

/* The bounds of the tables, the slice size, and what is sent. */
static void measure(check *c)
{
    size_t longest = 1;
    for (int r = 0; r < c->world_size; r++) {
        const sp_plan *p = c->plans[r];
        int n_sent = 0, n_kept = p->n_slots * p->block_slices;
        c->steps_cap = p->n_steps > c->steps_cap ? p->n_steps : c->steps_cap;
        c->turns_cap = p->n_turns > c->turns_cap ? p->n_turns : c->turns_cap;
        c->kept_cap = n_kept > c->kept_cap ? n_kept : c->kept_cap;
        for (int i = 0; i < p->n_steps; i++) {
            longest = sp_max_size(longest, p->steps[i].n_elems);
            n_sent += p->steps[i].n_to;
            c->chunks_cap = p->steps[i].chunk >= c->chunks_cap ? p->steps[i].chunk + 1 : c->chunks_cap;
        }
        c->proof.n_messages += (uint64_t)n_sent;
        c->proof.chunks_sent_max = n_sent > c->proof.chunks_sent_max ? n_sent : c->proof.chunks_sent_max;
    }
    c->slice_elems = sp_ceil_div(longest, (size_t)c->a->n_slices);
}

static spccl_status allocate(check *c, message **messages)
{
    size_t n_ranks = (size_t)c->world_size, n_queues = n_ranks * n_ranks * SP_N_QUEUES;
    c->queues = sp_calloc(n_queues, sizeof *c->queues);
    c->next = sp_calloc(n_ranks * (size_t)c->steps_cap, sizeof *c->next);
    c->n_slices = sp_calloc(n_ranks * (size_t)c->steps_cap, sizeof *c->n_slices);
    c->open = sp_calloc(n_ranks * (size_t)c->steps_cap, sizeof *c->open);
    c->n_open = sp_calloc(n_ranks, sizeof *c->n_open);
    c->done = sp_calloc(n_ranks * (size_t)c->steps_cap, sizeof *c->done);
    c->hops = sp_calloc(n_ranks * (size_t)c->steps_cap, sizeof *c->hops);
    c->turns = sp_calloc(n_ranks * (size_t)(c->turns_cap + 1), sizeof *c->turns);
    c->kept = sp_calloc(n_ranks * (size_t)c->kept_cap, sizeof *c->kept);
    c->dirty = sp_calloc(n_ranks, sizeof *c->dirty);
    c->results = sp_calloc((size_t)c->chunks_cap, sizeof *c->results);
    *messages = sp_calloc(n_queues * (size_t)c->a->queue_cap, sizeof **messages);
    if (c->queues == NULL || c->next == NULL || c->n_slices == NULL || c->open == NULL || c->n_open == NULL ||
        c->done == NULL || c->hops == NULL || c->turns == NULL || c->kept == NULL || c->dirty == NULL ||
        c->results == NULL || *messages == NULL)
        return SP_FAIL(SPCCL_ERR_NOMEM, "sp_plan_check of %d ranks", c->world_size);
    for (size_t i = 0; i < n_queues; i++)
        c->queues[i].fifo = *messages + i * (size_t)c->a->queue_cap;
    for (int r = 0; r < c->world_size; r++)
        for (int i = 0; i < c->plans[r]->n_steps; i++)
            c->n_slices[r * c->steps_cap + i] =
                (int)sp_ceil_div(c->plans[r]->steps[i].n_elems, c->slice_elems);
    return sp_sums_init(&c->sums, c->world_size);
}

static spccl_status check_all(check *c)
{
    const sp_check_args *a = c->a;
    size_t out_elems = a->coll == SP_ALL_GATHER ? a->n_elems * (size_t)a->world_size : a->n_elems;
    for (int r = 0; r < c->world_size; r++) /* the root of a broadcast writes nothing */
        SP_TRY(check_coverage(c, r, a->coll == SP_BROADCAST && r == a->root ? 0 : out_elems));
    if (a->fixed_order)
        SP_TRY(sp_plan_check_turns(a));
    SP_TRY(run_all(c));
    return a->fixed_order ? sp_plan_check_in_place(a, c->done, c->steps_cap) : SPCCL_OK;
}

spccl_status sp_plan_check(const sp_check_args *a, sp_proof *out)
{
    check c = {.a = a, .plans = a->plans, .world_size = a->world_size, .proof.rank_order = true};
    message *messages = NULL;
    spccl_status st;
    if (a->world_size < 1 || a->world_size > SP_SUMS_RANKS_MAX)
        return SP_FAIL(SPCCL_ERR_ARG, "sp_plan_check: %d ranks, wanted 1 to %d", a->world_size,
                       SP_SUMS_RANKS_MAX);
    measure(&c);
    st = allocate(&c, &messages);
    if (st == SPCCL_OK)
        st = check_all(&c);
    if (st == SPCCL_OK && out != NULL)
        *out = c.proof;
    sp_sums_fini(&c.sums);
    sp_free(c.queues);
    sp_free(c.next);
    sp_free(c.n_slices);
    sp_free(c.open);
    sp_free(c.n_open);
    sp_free(c.done);
    sp_free(c.hops);
    sp_free(c.turns);
    sp_free(c.kept);
    sp_free(c.dirty);
    sp_free(c.results);
    sp_free(messages);
    return st;
}
