/* exec.c - the active collectives, and which slice runs next. exec_steps.c runs the slices. See exec.h. */
#include "core/run/exec.h"

#include "core/base/dtype.h"
#include "core/run/exec_steps.h"

#include <inttypes.h>
#include <stdio.h>

/* Outputs of at least this size are written with non-temporal stores. Ordinary stores would evict what the
 * next slice needs, and would read each cache line first. A core usually has twice this much L3. */
#define NT_OUTPUT_BYTES_MIN ((size_t)4 << 20)

_Static_assert(SP_EXEC_ACTIVE_MAX == SP_CHOOSE_LAG,
               "when a call is planned, the one SP_CHOOSE_LAG before has ended");

/* Find what envelopes say of this rank's links. Links inside a host have constant rates. */
static void find_rates(sp_exec *x)
{
    const sp_links *l = x->links;
    x->remote_peer = -1;
    for (int r = 0; r < l->world_size; r++) {
        bool remote = l->hosts != NULL && l->hosts->host_of[r] != l->hosts->host_of[l->rank];
        double ns = r == l->rank || remote ? 0 : sp_link_ns_per_byte(l, r);
        if (remote)
            x->remote_peer = r;
        x->local_ns = ns > x->local_ns ? ns : x->local_ns;
    }
}

spccl_status sp_exec_init(sp_exec *x, sp_links *links, const sp_kernels *kernels, size_t slice_bytes)
{
    *x = (sp_exec){.links = links,
                   .kernels = kernels,
                   .slice_bytes_max = slice_bytes,
                   .slice_elems_max = slice_bytes}; /* one-byte elements */
    pthread_mutex_init(&x->choices_mu, NULL);
    SP_TRY(sp_codec_create(kernels, x->slice_elems_max, &x->codec));
    x->acc = sp_alloc64(2 * slice_bytes); /* 16-bit floats accumulate in twice the bytes */
    x->result = sp_alloc64(slice_bytes);
    x->frames = sp_calloc((size_t)links->world_size, sizeof *x->frames);
    x->n_sent = sp_calloc(SP_N_QUEUES * (size_t)links->world_size, sizeof *x->n_sent);
    x->chooser = sp_calloc(1, sizeof *x->chooser);
    x->choices = sp_calloc(SP_EXEC_CHOICES, sizeof *x->choices);
    if (x->acc == NULL || x->result == NULL || x->frames == NULL || x->n_sent == NULL || x->chooser == NULL ||
        x->choices == NULL)
        return SP_FAIL(SPCCL_ERR_NOMEM, "scratch for slices of %zu bytes", slice_bytes);
    sp_chooser_init(x->chooser, links->world_size, links->hosts);
    find_rates(x);
    return SPCCL_OK;
}

void sp_exec_fini(sp_exec *x)
{
    for (int i = 0; i < x->n_ops; i++)
        sp_op_destroy(x->active[i]);
    sp_codec_destroy(x->codec);
    sp_free(x->acc);
    sp_free(x->result);
    sp_free(x->frames);
    sp_free(x->n_sent);
    if (x->links != NULL) /* sp_exec_init was called */
        pthread_mutex_destroy(&x->choices_mu);
    sp_chooser_fini(x->chooser);
    sp_free(x->chooser);
    sp_free(x->choices);
    *x = (sp_exec){0};
}

size_t sp_exec_memory_bytes(const sp_exec *x)
{
    return 3 * x->slice_bytes_max + x->slice_elems_max / 64 * 9 + sizeof *x->chooser +
           (x->chooser->tuner != NULL ? sizeof *x->chooser->tuner : 0) +
           SP_EXEC_CHOICES * sizeof *x->choices; /* 9: the codec's */
}

/* Count the messages that the plan sends to each rank, and expects from it, on each queue. */
static void count_messages(sp_op *op)
{
    for (int i = 0; i < op->plan->n_steps; i++) {
        const sp_step *s = &op->plan->steps[i];
        uint32_t n_slices = (uint32_t)sp_ceil_div(s->n_elems, op->a.slice_elems);
        for (int j = 0; j < s->n_to; j++)
            op->left[0][s->queue_out * op->plan->world_size + op->plan->ranks[s->to + j]] += n_slices;
        for (int j = 0; j < s->n_from; j++)
            op->left[1][s->queue_in * op->plan->world_size + op->plan->ranks[s->from + j]] += n_slices;
    }
}

spccl_status sp_op_create(const sp_coll_args *args, int world_size, sp_op **out)
{
    size_t n_queues = (size_t)SP_N_QUEUES * (size_t)world_size;
    size_t bytes = sizeof(sp_op) + n_queues * (sizeof(uint64_t) + 2 * sizeof(uint32_t));
    sp_op *op = sp_calloc(1, bytes);
    if (op == NULL)
        return SP_FAIL(SPCCL_ERR_NOMEM, "operation: %zu bytes", bytes);
    op->a = *args;
    op->elem_bytes = sp_dtype_bytes(args->dtype);
    op->sent_end = (uint64_t *)(op + 1);
    op->left[0] = (uint32_t *)(op->sent_end + n_queues);
    op->left[1] = op->left[0] + n_queues;
    op->non_temporal =
        args->n_elems * op->elem_bytes * (args->coll == SP_ALL_GATHER ? (size_t)world_size : 1) >=
        NT_OUTPUT_BYTES_MIN;
    *out = op;
    return SPCCL_OK;
}

/* Choose the schedule of an op that has become active, and make its plan. */
static spccl_status plan_op(sp_exec *x, sp_op *op)
{
    sp_plan_args pa = {.coll = op->a.coll,
                       .rank = x->links->rank,
                       .world_size = x->links->world_size,
                       .root = op->a.root,
                       .n_elems = op->a.n_elems,
                       .hosts = op->a.hosts};
    sp_plan *plan = NULL;
    SP_TRY(sp_exec_choose(x, op));
    SP_TRY(op->a.written != NULL
               ? sp_plan_place(op->a.written->plan, &op->a.written->head, op->a.n_elems, &plan)
               : sp_plan_create(op->a.schedule, &pa, &plan));
    op->next_slice = sp_calloc(2 * (size_t)plan->n_steps + 1, sizeof *op->next_slice);
    if (op->next_slice == NULL) {
        int n_steps = plan->n_steps;
        sp_plan_destroy(plan);
        return SP_FAIL(SPCCL_ERR_NOMEM, "positions in %d steps", n_steps);
    }
    op->n_dense = op->next_slice + plan->n_steps;
    op->n_steps_left = plan->n_steps;
    op->plan = plan;
    count_messages(op);
    return sp_op_order_init(op);
}

void sp_op_destroy(sp_op *op)
{
    if (op == NULL)
        return;
    sp_plan_destroy(op->plan);
    sp_free(op->order_memory);
    sp_free(op->next_slice);
    sp_free(op);
}

void sp_call_describe(const sp_call *c, char *text, size_t cap)
{
    static const char *const redops[] = {"sum", "avg", "min", "max", "product"};
    int n = snprintf(text, cap, "%s #%" PRIu32 " (%" PRIu64 " %s", sp_coll_name(c->coll), c->seq, c->n_elems,
                     sp_dtype_name(c->dtype));
    size_t used = n > 0 ? (size_t)n : 0;
    if (used >= cap)
        return;
    if (c->coll == SP_ALL_REDUCE || c->coll == SP_REDUCE_SCATTER)
        snprintf(text + used, cap - used, ", %s)", (unsigned)c->redop < 5 ? redops[c->redop] : "?");
    else if (c->coll == SP_BROADCAST)
        snprintf(text + used, cap - used, ", root %d)", c->root);
    else
        snprintf(text + used, cap - used, ")");
}

spccl_status sp_call_error(int rank, const sp_coll_args *a, uint32_t seq, spccl_status st)
{
    sp_call call = {.seq = seq,
                    .coll = a->coll,
                    .dtype = a->dtype,
                    .redop = a->redop,
                    .root = a->root,
                    .n_elems = a->n_elems};
    char what[160], cause[600];
    sp_call_describe(&call, what, sizeof what);
    snprintf(cause, sizeof cause, "%s", sp_without_rank(spccl_last_error(), rank));
    return SP_FAIL(st, "rank %d: %s: %s%s", rank, what, st == SPCCL_ERR_NOMEM ? "out of memory: " : "",
                   cause);
}

sp_call sp_op_call(const sp_op *op)
{
    return (sp_call){.seq = op->seq,
                     .coll = op->a.coll,
                     .dtype = op->a.dtype,
                     .redop = op->a.redop,
                     .root = op->a.root,
                     .schedule = op->a.schedule,
                     .n_elems = op->a.n_elems};
}

void sp_op_describe(const sp_op *op, char *text, size_t cap)
{
    sp_call call = sp_op_call(op);
    sp_call_describe(&call, text, cap);
}

void sp_exec_add(sp_exec *x, sp_op *op)
{
    x->active[x->n_ops++] = op;
    atomic_fetch_add_explicit(&x->stats.n_collectives, 1, memory_order_relaxed);
}

bool sp_op_owns_queue(const sp_exec *x, int op_idx, int dir, int queue, int peer)
{
    int idx = queue * x->links->world_size + peer;
    for (int i = 0; i < op_idx; i++)
        if (x->active[i]->left[dir][idx] != 0)
            return false;
    return true;
}

spccl_status sp_exec_pass(sp_exec *x, bool *progressed)
{
    *progressed = false;
    for (int i = 0; i < x->n_ops; i++) {
        sp_op *op = x->active[i];
        if (op->plan == NULL) {
            spccl_status st = plan_op(x, op);
            if (st != SPCCL_OK)
                return sp_call_error(x->links->rank, &op->a, op->seq, st);
        }
        for (int s = 0; s < op->plan->n_steps; s++) {
            spccl_status st;
            if ((size_t)op->next_slice[s] * op->a.slice_elems >= op->plan->steps[s].n_elems ||
                !sp_step_is_due(op, s))
                continue;
            st = sp_step_run(x, i, s);
            if (st == SPCCL_AGAIN)
                continue;
            if (st != SPCCL_OK)
                return st;
            *progressed = true;
            if (!op->is_started) {
                op->is_started = true;
                sp_exec_note(x, op, "first slice", NULL);
            }
            if ((size_t)++op->next_slice[s] * op->a.slice_elems >= op->plan->steps[s].n_elems)
                op->n_steps_left--;
            sp_op_slice_done(op, s);
        }
    }
    return SPCCL_OK;
}

/* True if the transports have handed on all messages of this collective. Messages of later collectives may still
 * be in the same queues. */
static bool is_flushed(const sp_exec *x, const sp_op *op)
{
    for (int queue = 0; queue < SP_N_QUEUES; queue++)
        for (int peer = 0; peer < x->links->world_size; peer++) {
            uint64_t end = op->sent_end[queue * x->links->world_size + peer];
            if (end != 0 && !sp_link_flushed(x->links, peer, queue, end))
                return false;
        }
    return true;
}

spccl_status sp_exec_retire(sp_exec *x, sp_op **out)
{
    sp_op *op = x->n_ops != 0 ? x->active[0] : NULL;
    *out = NULL;
    if (op == NULL || op->plan == NULL || op->n_steps_left != 0 || !is_flushed(x, op))
        return SPCCL_OK;
    SP_TRY(sp_exec_check_surplus(x, op));
    sp_exec_note(x, op, "done", NULL);
    sp_measure_time(x, op, x->events[(x->n_events - 1) % SP_EXEC_EVENTS].time_ns);
    sp_chooser_end(x->chooser, &op->measured);
    x->past[x->n_past++ % SP_EXEC_PAST] = sp_op_call(op);
    x->n_ops--;
    for (int i = 0; i < x->n_ops; i++)
        x->active[i] = x->active[i + 1];
    *out = op;
    return SPCCL_OK;
}

/* The first op that waits to become active. NULL: the executor takes more. */
static const sp_op *first_waiting(const sp_exec *x, const sp_op *queue)
{
    return x->n_ops == SP_EXEC_ACTIVE_MAX ? queue : NULL;
}

int64_t sp_exec_deadline(const sp_exec *x, const sp_op *queue)
{
    int64_t nearest = SP_NEVER;
    for (int i = 0; i < x->n_ops; i++)
        if (x->active[i]->deadline_ns < nearest)
            nearest = x->active[i]->deadline_ns;
    for (const sp_op *op = first_waiting(x, queue); op != NULL; op = op->next)
        if (op->deadline_ns < nearest)
            nearest = op->deadline_ns;
    return nearest;
}

/* The unfinished step that a time-out names, of those that wait for a peer. A step that waits for contributions
 * comes first: only their sender can be late. Results and space may be late because of a third rank. -1: no such
 * step. */
static int step_to_blame(const sp_op *op)
{
    int found = -1;
    for (int s = 0; s < op->plan->n_steps; s++) {
        const sp_step *step = &op->plan->steps[s];
        if ((size_t)op->next_slice[s] * op->a.slice_elems >= step->n_elems || !sp_step_is_due(op, s))
            continue;
        if (step->n_from != 0 && step->queue_in == SP_QUEUE_INPUT)
            return s;
        if (found < 0)
            found = s;
    }
    return found;
}

/* `op` has run out of time because of an active op, which may be `op` itself. */
static spccl_status overdue(sp_exec *x, const sp_op *op, int op_idx)
{
    const sp_op *held_up_by = x->active[op_idx];
    char what[160], first[160], before[220] = "", wait[400];
    int step = step_to_blame(held_up_by);
    sp_op_describe(op, what, sizeof what);
    sp_op_describe(held_up_by, first, sizeof first);
    if (op != held_up_by)
        snprintf(before, sizeof before, "it comes after %s, which is ", first);
    snprintf(wait, sizeof wait, "waiting for the network to take the last bytes");
    if (step >= 0)
        sp_step_describe_wait(x, op_idx, step, wait, sizeof wait);
    return SP_FAIL(SPCCL_ERR_TIMEOUT,
                   "rank %d: %s timed out after %" PRId64
                   " ms: %s%s; see the output of the ranks named, or raise the "
                   "timeout if they are only slow",
                   x->links->rank, what, op->a.timeout_ms, before, wait);
}

spccl_status sp_exec_check_deadlines(sp_exec *x, const sp_op *queue)
{
    int64_t now = sp_now_ns();
    for (int i = 0; i < x->n_ops; i++)
        if (now >= x->active[i]->deadline_ns)
            return overdue(x, x->active[i], i);
    for (const sp_op *op = first_waiting(x, queue); op != NULL; op = op->next)
        if (now >= op->deadline_ns)
            return overdue(x, op, 0);
    return SPCCL_OK;
}
