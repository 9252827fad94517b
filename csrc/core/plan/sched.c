/* sched.c - makes and frees plans, and cuts arrays into parts. See sched.h. */
#include "core/plan/sched.h"

#include "core/base/bits.h"
#include "core/base/mem.h"
#include "core/plan/sched_build.h"

#define PART_ALIGN_ELEMS 64 /* elements of a word of the scan's mask; also keeps parts aligned to vectors */

const char *sp_coll_name(sp_coll coll)
{
    static const char *const names[SP_N_COLLS] = {"all_gather", "reduce_scatter", "all_reduce", "broadcast"};
    return (unsigned)coll < SP_N_COLLS ? names[coll] : "?";
}

typedef bool (*schedule_fn)(sp_plan_builder *b, const sp_plan_args *args);

#define BIT(coll) (1u << (coll))
#define ALL_COLLS (BIT(SP_N_COLLS) - 1)
#define MEASURED (ALL_COLLS & ~BIT(SP_REDUCE_SCATTER))

static const struct {
    const char *name;
    schedule_fn build;
    unsigned colls; /* BIT of each collective that the schedule has */
    bool rank_order;
    unsigned measured;     /* BIT of each collective that shows its density to all ranks */
    unsigned input_to_all; /* BIT of each collective that sends the input to all ranks */
} schedules[SP_N_SCHEDULES + 1] = {
    [SP_SCHED_DIRECT] = {"direct", sp_sched_direct, ALL_COLLS, true, MEASURED,
                         BIT(SP_ALL_GATHER) | BIT(SP_BROADCAST)},
    [SP_SCHED_ONESHOT] = {"oneshot", sp_sched_oneshot, BIT(SP_ALL_REDUCE) | BIT(SP_BROADCAST), true, MEASURED,
                          BIT(SP_ALL_REDUCE) | BIT(SP_BROADCAST)},
    [SP_SCHED_RELAYED] = {"relayed", sp_sched_relayed, ALL_COLLS, true, MEASURED,
                          BIT(SP_ALL_GATHER) | BIT(SP_BROADCAST)},
    [SP_SCHED_RING] = {"ring", sp_sched_ring, ALL_COLLS & ~BIT(SP_BROADCAST), false, 0, 0},
    [SP_SCHED_HIERARCHICAL] = {"hierarchical", sp_sched_hier, ALL_COLLS, false, 0, 0},
    [SP_SCHED_FILE] = {"file", NULL, 0, false, 0, 0},
};

bool sp_schedule_has(sp_schedule schedule, sp_coll coll)
{
    return (schedules[schedule].colls & BIT(coll)) != 0;
}

bool sp_schedule_adds_in_rank_order(sp_schedule schedule)
{
    return schedules[schedule].rank_order;
}

bool sp_schedule_shows_density(sp_schedule schedule, sp_coll coll)
{
    return (schedules[schedule].measured & BIT(coll)) != 0;
}

bool sp_schedule_sends_input_to_all(sp_schedule schedule, sp_coll coll)
{
    return (schedules[schedule].input_to_all & BIT(coll)) != 0;
}

const char *sp_schedule_name(sp_schedule schedule)
{
    return (unsigned)schedule <= SP_SCHED_FILE ? schedules[schedule].name : "?";
}

void sp_part_range(size_t n_elems, int n_parts, int part, size_t *off, size_t *len)
{
    size_t each = sp_ceil_div(n_elems, (size_t)n_parts);
    each = sp_align_up(each, PART_ALIGN_ELEMS);
    *off = sp_min_size((size_t)part * each, n_elems);
    *len = sp_min_size(each, n_elems - *off);
}

sp_step *sp_plan_add(sp_plan_builder *b, sp_step_kind kind, int part, size_t src_off, size_t dst_off,
                     size_t n_elems)
{
    sp_step *s;
    if (n_elems == 0 || b->plan->n_steps >= b->steps_cap)
        return NULL;
    s = &b->plan->steps[b->plan->n_steps++];
    *s = (sp_step){.kind = kind,
                   .part = part,
                   .chunk = part,
                   .queue_in = SP_QUEUE_INPUT,
                   .queue_out = SP_QUEUE_INPUT,
                   .after = -1,
                   .turn = SP_NO_TURN,
                   .own_before = b->plan->rank,
                   .n_readers = 1,
                   .src_off = src_off,
                   .dst_off = dst_off,
                   .n_elems = n_elems};
    return s;
}

static void push_rank(sp_plan_builder *b, int rank)
{
    if (b->n_ranks < b->ranks_cap)
        b->plan->ranks[b->n_ranks++] = rank;
}

void sp_step_from(sp_plan_builder *b, sp_step *step, int queue, int rank)
{
    if (step->n_from == 0)
        step->from = b->n_ranks;
    step->queue_in = queue;
    push_rank(b, rank);
    step->n_from++;
}

void sp_step_to(sp_plan_builder *b, sp_step *step, int queue, int rank)
{
    if (step->n_to == 0)
        step->to = b->n_ranks;
    step->queue_out = queue;
    push_rank(b, rank);
    step->n_to++;
}

void sp_step_from_all(sp_plan_builder *b, sp_step *step, int queue)
{
    for (int r = 0; r < b->plan->world_size; r++)
        if (r != b->plan->rank)
            sp_step_from(b, step, queue, r);
}

void sp_step_to_all(sp_plan_builder *b, sp_step *step, int queue, int except)
{
    int world_size = b->plan->world_size;
    for (int i = 1; i < world_size; i++) {
        int r = (b->plan->rank + i) % world_size;
        if (r != except)
            sp_step_to(b, step, queue, r);
    }
}

/* Entries of a plan's lists of ranks, at most. For each part a rank has at most five peers outside of its host, and a
 * relay passes the part on to the other ranks of its host. In the hierarchical schedule that relay also adds the
 * part's contributions of these ranks. */
static int ranks_max(sp_schedule schedule, const sp_plan_args *args)
{
    const sp_hosts *h = args->hosts;
    int others = h == NULL ? 0 : sp_hosts_size(h, h->host_of[args->rank]) - 1;
    return (args->world_size + 1) * (5 + (schedule == SP_SCHED_HIERARCHICAL ? 2 : 1) * others);
}

spccl_status sp_plan_create(sp_schedule schedule, const sp_plan_args *args, sp_plan **out)
{
    /* The ring has at most 4 * world_size - 3 steps, the others 2 * world_size. A plan of 2 ranks stays below 1 KiB, which
     * malloc keeps for the next call: larger blocks take it 500 instructions more. */
    int steps_cap = schedule == SP_SCHED_RING ? 4 * args->world_size : 2 * args->world_size + 2;
    int ranks_cap = ranks_max(schedule, args);
    sp_plan *plan =
        sp_calloc(1, sizeof *plan + (size_t)steps_cap * sizeof(sp_step) + (size_t)ranks_cap * sizeof(int));
    sp_plan_builder b = {.plan = plan, .steps_cap = steps_cap, .ranks_cap = ranks_cap};
    if (plan == NULL)
        return SP_FAIL(SPCCL_ERR_NOMEM, "plan of %s for %d ranks", sp_coll_name(args->coll),
                       args->world_size);
    plan->name = schedules[schedule].name;
    plan->rank = args->rank;
    plan->world_size = args->world_size;
    plan->block_slices = plan->n_slots = 1;
    plan->steps = (sp_step *)(plan + 1);
    plan->ranks = (int *)(plan->steps + steps_cap);
    if (!sp_schedule_has(schedule, args->coll) || !schedules[schedule].build(&b, args)) {
        sp_plan_destroy(plan);
        return SP_FAIL(SPCCL_ERR_UNSUPPORTED, "schedule %s has no %s", schedules[schedule].name,
                       sp_coll_name(args->coll));
    }
    if (plan->n_steps == steps_cap || b.n_ranks == ranks_cap) {
        sp_plan_destroy(plan);
        return SP_FAIL(SPCCL_ERR_BUG, "schedule %s: %s of %d ranks overflows its plan",
                       schedules[schedule].name, sp_coll_name(args->coll), args->world_size);
    }
    *out = plan;
    return SPCCL_OK;
}

bool sp_plan_takes(const sp_plan *plan, int queue, int from, int part)
{
    for (int i = 0; i < plan->n_steps; i++) {
        const sp_step *s = &plan->steps[i];
        for (int j = 0; s->part == part && s->queue_in == queue && j < s->n_from; j++)
            if (plan->ranks[s->from + j] == from)
                return true;
    }
    return false;
}

void sp_plan_destroy(sp_plan *plan)
{
    sp_free(plan);
}

void sp_turn_pass(const sp_plan *plan, size_t slice_elems, int number, sp_turn *t)
{
    for (int wraps = 0; wraps < 2;) {
        if (++t->step == plan->n_steps) {
            t->step = -1;
            t->block++;
            wraps++;
        } else if (plan->steps[t->step].turn == number &&
                   (size_t)t->block * (size_t)plan->block_slices * slice_elems <
                       plan->steps[t->step].n_elems) {
            return;
        }
    }
}
