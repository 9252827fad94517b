/* sched_order.c - the part of sp_plan_check that only plans from files must pass.
 *
 * Steps that share a queue take turns, and so do steps that keep slices in one slot. Then each message, and each kept
 * slice, has one predecessor on its queue or slot, whatever the timing. A plan is a set of waits between slices of
 * steps, all of the form "x after y". It deadlocks if they have a circle, and then in every run: one simulation stands
 * for all. No wait is for a later block of slices, so a circle would lie inside one block: the simulation of a block is
 * enough. An empty chunk drops steps, and what was ordered through them stays ordered: queues and slots keep the order
 * of those that are left.
 *
 * Calls may be in place: the output of a chunk must be written after this rank has read its input. Only waits between
 * steps of one chunk prove that, because other chunks may be empty. */
#include "core/base/mem.h"
#include "core/plan/sched.h"

#include <stdlib.h>
#include <string.h>

#define READERS_MAX 64

static spccl_status fault(const sp_check_args *a, int rank, int step, const char *what, int other)
{
    return SP_FAIL(a->fault, "plan %s, rank %d, step %d: it %s as step %d, but does not take turns with it",
                   a->plans[rank]->name, rank, step, what, other);
}

static bool take_turns(const sp_step *a, const sp_step *b)
{
    return a->turn != SP_NO_TURN && a->turn == b->turn;
}

/* first [2 * SP_N_QUEUES * world_size]: the first step that uses each queue to or from each rank, plus 1. */
static spccl_status check_queues(const sp_check_args *a, int rank, int *first)
{
    const sp_plan *p = a->plans[rank];
    memset(first, 0, 2 * SP_N_QUEUES * (size_t)a->world_size * sizeof *first);
    for (int i = 0; i < p->n_steps; i++) {
        const sp_step *s = &p->steps[i];
        for (int j = 0; j < s->n_from + s->n_to; j++) {
            bool sends = j >= s->n_from;
            int peer = p->ranks[sends ? s->to + j - s->n_from : s->from + j];
            int queue = sends ? SP_N_QUEUES + s->queue_out : s->queue_in;
            int *seen = &first[queue * a->world_size + peer];
            if (*seen != 0 && !take_turns(s, &p->steps[*seen - 1]))
                return fault(a, rank, i, sends ? "sends on the same queue" : "receives on the same queue",
                             *seen - 1);
            *seen = *seen != 0 ? *seen : i + 1;
        }
    }
    return SPCCL_OK;
}

/* first [slots]: as above. */
static spccl_status check_slots(const sp_check_args *a, int rank, int *first)
{
    const sp_plan *p = a->plans[rank];
    memset(first, 0, (size_t)p->n_slots * sizeof *first);
    for (int i = 0; i < p->n_steps; i++) {
        const sp_step *s = &p->steps[i];
        if (s->after >= 0 && p->steps[s->after].chunk != s->chunk)
            return SP_FAIL(a->fault,
                           "plan %s, rank %d, step %d: step %d, which it comes after, has chunk %d, not %d",
                           p->name, rank, i, s->after, p->steps[s->after].chunk, s->chunk);
        if (!s->keeps)
            continue;
        if (first[s->keep_slot] != 0 && !take_turns(s, &p->steps[first[s->keep_slot] - 1]))
            return fault(a, rank, i, "keeps slices in the same slot", first[s->keep_slot] - 1);
        if (first[s->keep_slot] == 0)
            first[s->keep_slot] = i + 1;
    }
    return SPCCL_OK;
}

/* ---- in place ------------------------------------------------------------------------------------- */

typedef struct event {
    int chunk, rank, step;
    uint32_t done;
} event;

/* Which readers of one rank's input come before: sets of at most 64 of them. */
typedef struct reads {
    const sp_check_args *a;
    uint64_t *sent;   /* [from][to][queue]: of the message that is on its way */
    uint64_t *at;     /* [rank][step] */
    uint64_t *turned; /* [rank][turn]: of the last step of the chunk that had the turn */
    int steps_cap;
} reads;

static int by_chunk(const void *a, const void *b)
{
    const event *x = a, *y = b;
    if (x->chunk != y->chunk)
        return x->chunk < y->chunk ? -1 : 1;
    return x->done < y->done ? -1 : x->done > y->done;
}

static bool reads_input(const sp_step *s)
{
    return s->source == SP_SOURCE_IN &&
           (s->kind == SP_STEP_SEND || (s->kind == SP_STEP_REDUCE && s->own_before >= 0));
}

/* The readers that come before this step, and the step itself if `own` is its bit. Passes them on. */
static uint64_t pass(const reads *r, const event *e, uint64_t own)
{
    const sp_plan *p = r->a->plans[e->rank];
    const sp_step *s = &p->steps[e->step];
    int n = r->a->world_size;
    uint64_t set = own;
    if (s->after >= 0)
        set |= r->at[e->rank * r->steps_cap + s->after];
    if (s->turn != SP_NO_TURN)
        set |= r->turned[e->rank * r->steps_cap + s->turn];
    for (int i = 0; i < s->n_from; i++) /* queues hold one message: what is on its way is for this step */
        set |= r->sent[(p->ranks[s->from + i] * n + e->rank) * SP_N_QUEUES + s->queue_in];
    for (int i = 0; i < s->n_to; i++)
        r->sent[(e->rank * n + p->ranks[s->to + i]) * SP_N_QUEUES + s->queue_out] = set;
    if (s->turn != SP_NO_TURN)
        r->turned[e->rank * r->steps_cap + s->turn] = set;
    r->at[e->rank * r->steps_cap + e->step] = set;
    return set;
}

/* The events of one chunk, in the order of the simulation: does `rank` write its output after it has read its input? */
static spccl_status check_rank(const reads *r, const event *e, size_t n, int rank)
{
    const sp_plan *p = r->a->plans[rank];
    int n_readers = 0, seen = 0;
    bool writes = false;
    for (size_t i = 0; i < n; i++) {
        const sp_step *s = &r->a->plans[e[i].rank]->steps[e[i].step];
        if (s->turn != SP_NO_TURN)
            r->turned[e[i].rank * r->steps_cap + s->turn] = 0;
        if (e[i].rank != rank)
            continue;
        n_readers += reads_input(s);
        writes = writes || (s->kind != SP_STEP_SEND && !s->gives_sum);
    }
    if (!writes || n_readers == 0)
        return SPCCL_OK;
    if (n_readers > READERS_MAX)
        return SP_FAIL(r->a->fault,
                       "plan %s, rank %d: %d steps read the input of chunk %d, wanted at most %d", p->name,
                       rank, n_readers, e->chunk, READERS_MAX);
    for (size_t i = 0; i < n; i++) {
        const sp_step *s = &r->a->plans[e[i].rank]->steps[e[i].step];
        bool is_reader = e[i].rank == rank && reads_input(s);
        uint64_t set = pass(r, &e[i], is_reader ? UINT64_C(1) << seen++ : 0);
        if (e[i].rank == rank && s->kind != SP_STEP_SEND && !s->gives_sum &&
            set != UINT64_MAX >> (READERS_MAX - n_readers))
            return SP_FAIL(
                r->a->fault,
                "plan %s, rank %d, step %d: it may write the output of chunk %d before another step has "
                "read the input, which may be the same memory",
                p->name, rank, e[i].step, e->chunk);
    }
    return SPCCL_OK;
}

static spccl_status check_in_place(const reads *r, const uint32_t *done, event *events)
{
    size_t n = 0;
    for (int rank = 0; rank < r->a->world_size; rank++)
        for (int i = 0; i < r->a->plans[rank]->n_steps; i++)
            events[n++] = (event){r->a->plans[rank]->steps[i].chunk, rank, i, done[rank * r->steps_cap + i]};
    qsort(events, n, sizeof *events, by_chunk);
    for (size_t i = 0, end; i < n; i = end) {
        for (end = i; end < n && events[end].chunk == events[i].chunk; end++)
            continue;
        for (int rank = 0; rank < r->a->world_size; rank++)
            SP_TRY(check_rank(r, events + i, end - i, rank));
    }
    return SPCCL_OK;
}

spccl_status sp_plan_check_in_place(const sp_check_args *a, const uint32_t *done, int steps_cap)
{
    size_t n_ranks = (size_t)a->world_size, n_steps = n_ranks * (size_t)steps_cap;
    reads r = {.a = a, .steps_cap = steps_cap};
    event *events;
    spccl_status st;
    if (a->coll == SP_ALL_GATHER || a->coll == SP_BROADCAST)
        return SPCCL_OK;
    events = sp_calloc(n_steps, sizeof *events);
    r.sent = sp_calloc(n_ranks * n_ranks * SP_N_QUEUES, sizeof *r.sent);
    r.at = sp_calloc(n_steps, sizeof *r.at);
    r.turned = sp_calloc(n_steps, sizeof *r.turned); /* a plan has fewer turns than steps */
    if (events == NULL || r.sent == NULL || r.at == NULL || r.turned == NULL)
        st = SP_FAIL(SPCCL_ERR_NOMEM, "sp_plan_check_in_place of %d ranks", a->world_size);
    else
        st = check_in_place(&r, done, events);
    sp_free(events);
    sp_free(r.sent);
    sp_free(r.at);
    sp_free(r.turned);
    return st;
}

spccl_status sp_plan_check_turns(const sp_check_args *a)
{
    size_t n_first = 2 * SP_N_QUEUES * (size_t)a->world_size;
    int *first;
    spccl_status st = SPCCL_OK;
    for (int rank = 0; rank < a->world_size; rank++)
        if ((size_t)a->plans[rank]->n_slots > n_first)
            n_first = (size_t)a->plans[rank]->n_slots;
    first = sp_calloc(n_first, sizeof *first);
    if (first == NULL)
        return SP_FAIL(SPCCL_ERR_NOMEM, "sp_plan_check_turns of %d ranks", a->world_size);
    for (int rank = 0; rank < a->world_size && st == SPCCL_OK; rank++) {
        st = check_queues(a, rank, first);
        if (st == SPCCL_OK)
            st = check_slots(a, rank, first);
    }
    sp_free(first);
    return st;
}
