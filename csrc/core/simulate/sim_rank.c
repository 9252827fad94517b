/* sim_rank.c - a rank of a simulation: which of its steps are ready, and what they do. It follows exec.c, exec_turns.c and
 * sched.h; the executor tries all steps in turn, here a step is tried again when something has changed that it waits for.
 * A rank runs one slice at a time, on a core of its host. See sim.h. */
#include "core/simulate/sim.h"

#include "core/base/bits.h"
#include "core/base/mem.h"
#include "core/format/format.h"

#define SPIN_NS 20000 /* a rank polls so long before it sleeps: comm.c */

static int index_of(const sim *x, const sim_rank *r)
{
    return (int)(r - x->ranks);
}

/* ---- cores ---- */

static void run_ranks(sim *x, sim_cores *c);

static sim_cores *cores_of(sim *x, const sim_rank *r)
{
    return &x->cores[x->n_core_groups == 1 ? 0 : r->host];
}

static void wait_for_core(sim *x, sim_rank *r)
{
    sim_cores *c = cores_of(x, r);
    int idx = index_of(x, r);
    r->state = SIM_READY;
    r->next_in_queue = SIM_NONE;
    if (c->first == SIM_NONE)
        c->first = idx;
    else
        x->ranks[c->last].next_in_queue = idx;
    c->last = idx;
}

/* ---- what may be ready ---- */

static void list_step(sim *x, sim_rank *r, int step)
{
    int n = r->plan->n_steps;
    sim_step *s = &r->steps[step];
    if (s->listed || s->next_slice >= sim_slices(x, &r->plan->steps[step]))
        return;
    s->listed = true;
    r->todo[(r->todo_at + r->n_todo++) % n] = step;
    if (r->state == SIM_IDLE) {
        double wait = x->now - r->idle_since > SPIN_NS ? x->o->wake_ns : 0;
        r->state = SIM_WAKING;
        sim_post(x, (sim_event){.ns = x->now + wait, .kind = SIM_WAKE, .who = index_of(x, r)});
    }
}

static uint64_t key_of(int queue, int from, int part)
{
    return ((uint64_t)(unsigned)from << 33 | (uint64_t)(unsigned)part << 1 | (unsigned)queue) + 1;
}

static size_t place_of(const sim_rank *r, uint64_t key)
{
    size_t i = (size_t)(key * 0x9e3779b97f4a7c15u >> 20) & r->table_mask;
    while (r->keys[i] != 0 && r->keys[i] != key)
        i = (i + 1) & r->table_mask;
    return i;
}

void sim_rank_message(sim *x, sim_flow *f)
{
    sim_rank *r = &x->ranks[f->to];
    size_t i = place_of(r, key_of(f->queue, f->seen_from, f->in->part));
    if (r->keys[i] != 0)
        list_step(x, r, r->takers[i]);
}

void sim_rank_wake_waiters(sim *x, sim_rank *r, int *first)
{
    int step = *first;
    *first = SIM_NONE;
    while (step != SIM_NONE) {
        int next = r->steps[step].next_waiter;
        r->steps[step].waits = false;
        list_step(x, r, step);
        step = next;
    }
}

static void wait_in(sim_rank *r, int step, int *first)
{
    sim_step *s = &r->steps[step];
    if (s->waits)
        return;
    s->waits = true;
    s->next_waiter = *first;
    *first = step;
}

static void pass_turn(sim *x, sim_rank *r, int number)
{
    sp_turn_pass(r->plan, x->slice_elems, number, &r->turns[number]);
    if (r->turns[number].step >= 0)
        list_step(x, r, r->turns[number].step);
}

static bool is_due(sim *x, sim_rank *r, int step)
{
    const sp_step *s = &r->plan->steps[step];
    uint32_t k = r->steps[step].next_slice;
    if (!sp_turn_is(r->plan, r->turns, step, k))
        return false;
    if (s->after >= 0 && r->steps[s->after].next_slice <= k &&
        r->steps[s->after].next_slice < sim_slices(x, &r->plan->steps[s->after]))
        return false;
    if (s->keeps && sim_kept_of(r, s->keep_slot, k)->n_readers != 0) {
        wait_in(r, step, &sim_kept_of(r, s->keep_slot, k)->waiters);
        return false;
    }
    return true;
}

static bool has_messages(sim *x, sim_rank *r, int step)
{
    const sp_step *s = &r->plan->steps[step];
    int *n_ok = &r->steps[step].n_ok;
    for (; *n_ok < s->n_from; ++*n_ok) {
        const sim_flow *f = sim_flow_from(x, index_of(x, r), r->plan->ranks[s->from + *n_ok], s->queue_in);
        if (f->in == NULL || f->in->part != s->part)
            return false;
    }
    return true;
}

/* The largest message that the slice may become; of one that is passed on, its bytes. */
static double bytes_wanted(sim *x, const sim_rank *r, const sp_step *s, uint32_t k)
{
    size_t n = sp_min_size(x->slice_elems, s->n_elems - (size_t)k * x->slice_elems),
           elem_bytes = x->elem_bytes;
    if (s->kind == SP_STEP_RECV)
        return sim_flow_from(x, index_of(x, r), r->plan->ranks[s->from], s->queue_in)->in->frame.bytes;
    if (s->kind == SP_STEP_SEND && s->source == SP_SOURCE_KEPT_MESSAGE)
        return sim_kept_of(r, s->source_slot, k)->frame.bytes;
    if (s->gives_sum || (s->kind == SP_STEP_SEND && s->source == SP_SOURCE_KEPT_SUM))
        elem_bytes = x->acc_bytes;
    return SP_ENVELOPE_BYTES + (double)(x->format == SPCCL_FORMAT_AUTO
                                            ? sp_frame_bound(n, elem_bytes)
                                            : sp_frame_bound_forced(x->format, n, elem_bytes));
}

static bool has_space(sim *x, sim_rank *r, int step)
{
    const sp_step *s = &r->plan->steps[step];
    double bytes = s->n_to != 0 ? bytes_wanted(x, r, s, r->steps[step].next_slice) : 0;
    for (int i = 0; i < s->n_to; i++) {
        sim_flow *f = sim_flow_to(x, index_of(x, r), r->plan->ranks[s->to + i], s->queue_out);
        if (sim_flow_has_space(x, f, bytes))
            continue;
        if (f->waiters == SIM_NONE || bytes < f->wait_bytes)
            f->wait_bytes = bytes;
        wait_in(r, step, &f->waiters);
        return false;
    }
    return true;
}

/* ---- running ---- */

/* Send the messages of a slice, one after the other. Returns when the last one is written. */
static double send_all(sim *x, sim_rank *r, const sim_slice *v, double at)
{
    const sp_step *s = v->step;
    for (int i = 0; i < s->n_to; i++) {
        sim_flow *f = sim_flow_to(x, index_of(x, r), r->plan->ranks[s->to + i], s->queue_out);
        sim_message *m = sim_message_new(x);
        if (m == NULL)
            return at;
        m->frame = v->frame;
        m->slice = v->k;
        m->n_added = v->n_added;
        m->part = x->turns_parts ? (s->part - f->turned + x->n_ranks) % x->n_ranks : s->part;
        f->out_used += v->frame.bytes;
        r->sent_bytes += v->frame.bytes;
        x->out.format_bytes[v->frame.format] += v->frame.bytes;
        x->out.wire_bytes += v->frame.bytes;
        x->out.remote_bytes += f->remote ? v->frame.bytes : 0;
        x->out.dense_bytes += (double)(v->n * v->elem_bytes);
        x->out.n_messages++;
        at += sim_send_ns(x, f, v);
        sim_post(x, (sim_event){.ns = at, .kind = SIM_COMMIT, .who = (int)(f - x->flows), .message = m});
    }
    return at;
}

/* Begin the slice: what it makes is known now, and takes effect at its end. */
static void begin(sim *x, sim_rank *r, int step)
{
    const sp_step *s = &r->plan->steps[step];
    uint32_t k = r->steps[step].next_slice;
    sim_slice v;
    double end;
    sim_slice_cost(x, r, s, k, &v);
    if (s->keeps) {
        sim_kept *kept = sim_kept_of(r, s->keep_slot, k);
        kept->n_readers = s->n_readers;
        kept->n_added = v.n_added;
        kept->frame = v.frame;
    }
    end = send_all(x, r, &v, x->now + v.work_ns);
    r->running = step;
    r->busy_ns += end - x->now;
    sim_post(x, (sim_event){.ns = end, .kind = SIM_DONE, .who = index_of(x, r)});
}

/* Find a step that is ready, and run a slice of it. False: there is none. */
static bool run_one(sim *x, sim_rank *r)
{
    while (r->n_todo != 0) {
        int step = r->todo[r->todo_at];
        r->todo_at = (r->todo_at + 1) % r->plan->n_steps;
        r->n_todo--;
        r->steps[step].listed = false;
        if (!is_due(x, r, step) || !has_messages(x, r, step) || !has_space(x, r, step))
            continue;
        begin(x, r, step);
        return true;
    }
    return false;
}

static void run_ranks(sim *x, sim_cores *c)
{
    while (c->n_free != 0 && c->first != SIM_NONE) {
        sim_rank *r = &x->ranks[c->first];
        c->first = r->next_in_queue;
        if (run_one(x, r)) {
            r->state = SIM_RUNNING;
            c->n_free--;
        } else {
            r->state = SIM_IDLE;
            r->idle_since = x->now;
        }
    }
}

/* What the step kept, or read, and the steps that come after it. */
static void end_slice(sim *x, sim_rank *r, int step)
{
    const sp_step *s = &r->plan->steps[step];
    uint32_t k = r->steps[step].next_slice++;
    bool is_last = k + 1 == sim_slices(x, s);
    r->n_unfinished -= is_last;
    for (int i = 0; i < s->n_from; i++)
        sim_flow_release(x, sim_flow_from(x, index_of(x, r), r->plan->ranks[s->from + i], s->queue_in));
    r->steps[step].n_ok = 0;
    if ((s->kind == SP_STEP_SEND || s->kind == SP_STEP_REDUCE) &&
        (s->source == SP_SOURCE_KEPT_SUM || s->source == SP_SOURCE_KEPT_MESSAGE)) {
        sim_kept *kept = sim_kept_of(r, s->source_slot, k);
        if (--kept->n_readers == 0)
            sim_rank_wake_waiters(x, r, &kept->waiters);
    }
    if (s->turn != SP_NO_TURN && ((k + 1) % (uint32_t)r->plan->block_slices == 0 || is_last))
        pass_turn(x, r, s->turn);
    for (int i = r->steps[step].first_dependent; i != SIM_NONE; i = r->steps[i].next_dependent)
        list_step(x, r, i);
    list_step(x, r, step);
}

void sim_rank_event(sim *x, const sim_event *e)
{
    sim_rank *r = &x->ranks[e->who];
    sim_cores *c = cores_of(x, r);
    if (e->kind == SIM_DONE) {
        end_slice(x, r, r->running);
        c->n_free++;
    }
    wait_for_core(x, r);
    run_ranks(x, c);
}

/* ---- start and end ---- */

static spccl_status make_table(sim_rank *r)
{
    const sp_plan *plan = r->plan;
    size_t n = 0;
    for (int i = 0; i < plan->n_steps; i++)
        n += (size_t)plan->steps[i].n_from;
    for (r->table_mask = 15; r->table_mask < 2 * n; r->table_mask = 2 * r->table_mask + 1)
        ;
    r->keys = sp_calloc(r->table_mask + 1, sizeof *r->keys);
    r->takers = sp_calloc(r->table_mask + 1, sizeof *r->takers);
    if (r->keys == NULL || r->takers == NULL)
        return SP_FAIL(SPCCL_ERR_NOMEM, "simulation: %zu messages of rank %d", n, r->number);
    for (int i = 0; i < plan->n_steps; i++)
        for (int j = 0; j < plan->steps[i].n_from; j++) {
            const sp_step *s = &plan->steps[i];
            uint64_t key = key_of(s->queue_in, plan->ranks[s->from + j], s->part);
            size_t at = place_of(r, key);
            r->keys[at] = key;
            r->takers[at] = i;
        }
    return SPCCL_OK;
}

spccl_status sim_rank_init(sim *x, sim_rank *r)
{
    size_t n_steps = (size_t)r->plan->n_steps, longest = 1;
    size_t n_kept = (size_t)r->plan->n_slots * (size_t)r->plan->block_slices;
    for (size_t i = 0; i < n_steps; i++)
        longest = sp_max_size(longest, sim_slices(x, &r->plan->steps[i]));
    r->steps = sp_calloc(n_steps + 1, sizeof *r->steps);
    r->todo = sp_calloc(n_steps + 1, sizeof *r->todo);
    r->turns = sp_calloc((size_t)r->plan->n_turns + 1, sizeof *r->turns);
    r->kept = sp_calloc(n_kept + 1, sizeof *r->kept);
    r->densities = sp_calloc(longest, sizeof *r->densities);
    if (r->steps == NULL || r->todo == NULL || r->turns == NULL || r->kept == NULL || r->densities == NULL)
        return SP_FAIL(SPCCL_ERR_NOMEM, "simulation: %zu steps of rank %d", n_steps, r->number);
    for (size_t i = 0; i < n_kept; i++)
        r->kept[i].waiters = SIM_NONE;
    for (size_t i = 0; i < n_steps; i++)
        r->steps[i].first_dependent = SIM_NONE;
    for (size_t i = 0; i < n_steps; i++) {
        int after = r->plan->steps[i].after;
        if (after < 0)
            continue;
        r->steps[i].next_dependent = r->steps[after].first_dependent;
        r->steps[after].first_dependent = (int)i;
    }
    r->n_unfinished = r->plan->n_steps;
    return make_table(r);
}

void sim_rank_start(sim *x, sim_rank *r)
{
    r->state = SIM_WAKING; /* so that list_step posts no event */
    for (int i = 0; i < r->plan->n_turns; i++) {
        r->turns[i].step = -1;
        pass_turn(x, r, i);
    }
    for (int i = 0; i < r->plan->n_steps; i++)
        list_step(x, r, i);
    sim_post(x, (sim_event){.ns = 0, .kind = SIM_WAKE, .who = index_of(x, r)});
}

void sim_rank_fini(sim_rank *r)
{
    sp_plan_destroy(r->plan);
    sp_free(r->steps);
    sp_free(r->todo);
    sp_free(r->turns);
    sp_free(r->kept);
    sp_free(r->densities);
    sp_free(r->keys);
    sp_free(r->takers);
}
