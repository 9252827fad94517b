/* simulate.c - spccl_simulate: reads the options, makes the plans of all ranks, or of those that stand for the others, runs
 * the simulation, and adds up. See sim.h. */
#include "core/simulate/sim.h"

#include "core/base/abi.h"
#include "core/base/bits.h"
#include "core/base/dtype.h"
#include "core/base/mem.h"
#include "core/format/tune_format.h"
#include "core/plan/choose.h"
#include "core/plan/plan_file.h"
#include "core/plan/tune_coll.h"

#include <string.h>

#define RANKS_MAX 4096
#define ROUNDED_ABOVE                                                                                        \
    64 /* ranks: fewer are merged only if the number of elements stays, unless the option says so */
#define STEPS_MAX ((size_t)4 << 20)
#define MESSAGES_MAX ((size_t)4 << 20)
#define PART_ELEMS 64 /* parts are multiples of it: sp_part_range */
/* As tcp_window.h limits the bytes on the way to other hosts: of a host together, of one queue at least, and one write
 * that may go past the limit of its queue. */
#define WINDOW_BYTES (256.0 * 1024)
#define WINDOW_DELAY_NS 200000.0
#define WINDOW_MIN (8.0 * 1024)
#define WRITE_BYTES (64.0 * 1024)
#define SHM_HEAD_BYTES 16 /* of a record in a ring of shared memory: spsc.h */
#define LONG_AGO 1e18     /* ns: links have their bursts at the start */
#define SCRATCH_SLICES 3  /* of the executor: sp_exec_memory_bytes */

/* Of the machine that docs/SIMULATE.md names. */
static const spccl_simulate_options defaults = {.struct_bytes = sizeof defaults,
                                                .n_ranks = 2,
                                                .ranks_per_host = 1,
                                                .density = 1,
                                                .link_ns = 0.8,
                                                .pass_ns = 0.062,
                                                .codec_factor = 0.74,
                                                .send_ns = 0.28,
                                                .receive_ns = 0.34,
                                                .local_ns = 0.1,
                                                .local_message_ns = 600,
                                                .remote_message_ns = 4800,
                                                .wake_ns = 12400};

#define WANTED(ok, ...)                                                                                      \
    do {                                                                                                     \
        if (!(ok))                                                                                           \
            return SP_FAIL(SPCCL_ERR_ARG, "simulate: " __VA_ARGS__);                                         \
    } while (0)

static spccl_status check_rates(const spccl_simulate_options *o)
{
    const struct {
        const char *name;
        double value;
    } all[] = {{"link_ns", o->link_ns},
               {"burst_bytes", o->burst_bytes},
               {"latency_ns", o->latency_ns},
               {"pass_ns", o->pass_ns},
               {"codec_factor", o->codec_factor},
               {"send_ns", o->send_ns},
               {"receive_ns", o->receive_ns},
               {"local_ns", o->local_ns},
               {"local_message_ns", o->local_message_ns},
               {"remote_message_ns", o->remote_message_ns},
               {"wake_ns", o->wake_ns}};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        WANTED(all[i].value >= 0 && all[i].value <= 1e12, "%s is %g, wanted 0 to 1e12", all[i].name,
               all[i].value);
    return SPCCL_OK;
}

/* Zeros become the defaults. */
static void fill_rates(spccl_simulate_options *o)
{
    double *const to[] = {&o->link_ns,          &o->pass_ns,           &o->codec_factor,
                          &o->send_ns,          &o->receive_ns,        &o->local_ns,
                          &o->local_message_ns, &o->remote_message_ns, &o->wake_ns};
    const double from[] = {defaults.link_ns,          defaults.pass_ns,           defaults.codec_factor,
                           defaults.send_ns,          defaults.receive_ns,        defaults.local_ns,
                           defaults.local_message_ns, defaults.remote_message_ns, defaults.wake_ns};
    for (size_t i = 0; i < sizeof to / sizeof *to; i++)
        if (*to[i] <= 0)
            *to[i] = from[i];
}

static spccl_status check_options(const spccl_simulate_options *o)
{
    WANTED(o->n_ranks >= 2 && o->n_ranks <= RANKS_MAX, "%d ranks, wanted 2 to %d", o->n_ranks, RANKS_MAX);
    WANTED(o->ranks_per_host >= 1 && o->ranks_per_host <= o->n_ranks,
           "%d ranks per host, wanted 1 to %d, which is the number of ranks", o->ranks_per_host, o->n_ranks);
    WANTED(o->root >= 0 && o->root < o->n_ranks, "root is %d, wanted 0 to %d", o->root, o->n_ranks - 1);
    WANTED(sp_dtype_bytes(o->dtype) != 0, "dtype %d is not one", (int)o->dtype);
    WANTED(o->n_elems >= 1 && o->n_elems <= SIZE_MAX / 16 / RANKS_MAX, "%llu elements, wanted 1 to %zu",
           (unsigned long long)o->n_elems, SIZE_MAX / 16 / RANKS_MAX);
    WANTED(o->density >= 0 && o->density <= 1, "density is %g, wanted 0 to 1", o->density);
    WANTED(o->overlap >= 0 && o->overlap <= 1, "overlap is %g, wanted 0 to 1", o->overlap);
    WANTED(o->cores >= 0 && o->cores <= RANKS_MAX, "%d cores, wanted 0 to %d", o->cores, RANKS_MAX);
    WANTED(o->message_max >= 0, "message_max is %d, wanted 0 or more", o->message_max);
    WANTED((o->schedule != NULL) != (o->plan_text != NULL), "give a schedule or plan_text, and not both");
    return check_rates(o);
}

/* ---- plans ---- */

static spccl_status parse_coll(const char *name, sp_coll *out)
{
    for (int i = 0; i < SP_N_COLLS; i++)
        if (name != NULL && strcmp(name, sp_coll_name((sp_coll)i)) == 0) {
            *out = (sp_coll)i;
            return SPCCL_OK;
        }
    return SP_FAIL(SPCCL_ERR_ARG,
                   "simulate: collective \"%s\", wanted all_gather, reduce_scatter, all_reduce or broadcast",
                   name != NULL ? name : "(none)");
}

/* True if each host's ranks have the plans of host 0 but for the numbers of ranks. Then host 0 stands for all: see sim.h. The
 * ranks of one host are equal if they do not wait for cores. */
static bool can_merge(const sim *x)
{
    bool one_host = x->n_ranks == x->per_host;
    if (x->o->shared_cores != 0 || (one_host && x->o->cores != 0 && x->o->cores < x->n_ranks))
        return false;
    return x->n_ranks % x->per_host == 0 && x->coll != SP_BROADCAST;
}

static void merge(sim *x, sp_schedule schedule)
{
    int want = x->o->merge;
    size_t unit = (size_t)x->n_ranks * PART_ELEMS;
    bool rounds = x->coll == SP_ALL_REDUCE && x->n_elems % unit != 0;
    x->n_reps = x->n_ranks;
    if (want < 0 || (want == 0 && rounds && x->n_ranks <= ROUNDED_ABOVE) || !can_merge(x))
        return;
    x->n_reps = x->per_host == x->n_ranks ? 1 : x->per_host;
    x->turns_parts = schedule != SP_SCHED_ONESHOT;
    if (x->coll == SP_ALL_REDUCE) /* all parts are equal then */
        x->n_elems = sp_max_size((x->n_elems + unit / 2) / unit, 1) * unit;
}

static spccl_status make_plans(sim *x, sp_schedule schedule, const sp_hosts *hosts)
{
    size_t n_steps = 0;
    for (int i = 0; i < x->n_reps; i++) {
        sp_plan_args a = {.coll = x->coll,
                          .rank = i,
                          .world_size = x->n_ranks,
                          .root = x->o->root,
                          .n_elems = x->n_elems,
                          .hosts = hosts->n_hosts > 1 ? hosts : NULL};
        x->ranks[i].number = i;
        SP_TRY(sp_plan_create(schedule, &a, &x->ranks[i].plan));
        n_steps += (size_t)x->ranks[i].plan->n_steps;
        if (n_steps > STEPS_MAX || (size_t)x->n_reps * (size_t)x->n_ranks > STEPS_MAX)
            return SP_FAIL(
                SPCCL_ERR_UNSUPPORTED,
                "simulate: %s of %d ranks by schedule %s has more than %zu steps: its ranks are not "
                "equal, so each is simulated",
                sp_coll_name(x->coll), x->n_ranks, sp_schedule_name(schedule), STEPS_MAX);
    }
    return SPCCL_OK;
}

/* Read the plan of the text. *head, *proof: of it; x->ranks get the plans, which must be made for n_elems yet. */
static spccl_status read_plans(sim *x, sp_plan_head *head, sp_proof *proof)
{
    sp_plan *plans[SP_PLAN_RANKS_MAX];
    sp_plan_reader r;
    bool found = true;
    spccl_status st;
    SP_TRY(sp_plan_text_open(x->o->plan_text, x->o->plan_bytes, &r));
    for (size_t i = 0; i <= x->o->plan_index && found; i++)
        SP_TRY(sp_plan_text_next(&r, head, &found));
    WANTED(found, "the text has no plan %zu", x->o->plan_index);
    WANTED(head->n_ranks == x->n_ranks, "plan %s is for %d ranks, and there are %d", head->name,
           head->n_ranks, x->n_ranks);
    WANTED(head->n_hosts == 0 || (head->per_host == x->per_host && x->n_ranks % x->per_host == 0),
           "plan %s is for %d hosts of %d ranks, and there are %d ranks per host", head->name, head->n_hosts,
           head->per_host, x->per_host);
    SP_TRY(sp_plan_text_steps(&r, head, plans));
    st = sp_plan_check_written(head, plans, proof);
    for (int i = 0; i < head->n_ranks; i++) {
        x->ranks[i].number = i;
        if (st == SPCCL_OK)
            st = sp_plan_place(plans[i], head, x->n_elems, &x->ranks[i].plan);
        sp_plan_destroy(plans[i]);
    }
    return st;
}

/* ---- the parts of a simulation ---- */

static spccl_status make_flows(sim *x)
{
    size_t n = (size_t)x->n_reps * (size_t)x->n_ranks * SP_N_QUEUES;
    x->flows = sp_calloc(n, sizeof *x->flows);
    if (x->flows == NULL)
        return SP_FAIL(SPCCL_ERR_NOMEM, "simulation: %zu queues", n);
    for (int from = 0; from < x->n_reps; from++)
        for (int to = 0; to < x->n_ranks; to++)
            for (int q = 0; q < SP_N_QUEUES; q++) {
                sim_flow *f = sim_flow_to(x, from, to, q);
                f->from = from;
                f->to = to % x->n_reps;
                f->turned = to - f->to;
                f->seen_from = (from - f->turned + x->n_ranks) % x->n_ranks;
                f->queue = q;
                f->remote = from / x->per_host != to / x->per_host;
                f->waiters = SIM_NONE;
            }
    return SPCCL_OK;
}

static bool sends_to_other_hosts(const sim *x, const sim_rank *r)
{
    for (int i = 0; i < r->plan->n_steps; i++)
        for (int j = 0; j < r->plan->steps[i].n_to; j++)
            if (r->plan->ranks[r->plan->steps[i].to + j] / x->per_host != r->number / x->per_host)
                return true;
    return false;
}

/* What transport tcp would find: a rank's part of its host's link, and the bytes that one queue may have on the way. */
static void set_window(sim *x)
{
    int senders = 0, others = x->n_ranks - x->per_host;
    double n_queues = (others > 0 ? others : 1) * SP_N_QUEUES, delay = 2 * 2 * x->o->latency_ns;
    for (int i = 0; i < x->n_reps && i < x->per_host; i++)
        senders += sends_to_other_hosts(x, &x->ranks[i]);
    x->remote_ns = x->o->link_ns * (senders > 0 ? senders : 1);
    delay = delay > WINDOW_DELAY_NS ? delay : WINDOW_DELAY_NS;
    x->window_bytes = (WINDOW_BYTES / x->per_host + 2 * delay / x->remote_ns) / n_queues;
    x->window_bytes = x->window_bytes > WINDOW_MIN ? x->window_bytes : WINDOW_MIN;
    x->window_bytes += WRITE_BYTES;
    x->quantum_bytes = x->window_bytes / 2;
    x->burst_ns = x->o->burst_bytes * x->o->link_ns;
}

static spccl_status make_machine(sim *x)
{
    int cores = x->o->cores != 0 ? x->o->cores : x->per_host;
    x->n_hosts = (int)sp_ceil_div((size_t)x->n_reps, (size_t)x->per_host);
    x->n_core_groups = x->o->shared_cores != 0 ? 1 : x->n_hosts;
    x->links = sp_calloc((size_t)x->n_hosts, sizeof *x->links);
    x->cores = sp_calloc((size_t)x->n_core_groups, sizeof *x->cores);
    x->densities = sp_calloc((size_t)x->n_ranks + 1, sizeof *x->densities);
    if (x->links == NULL || x->cores == NULL || x->densities == NULL)
        return SP_FAIL(SPCCL_ERR_NOMEM, "simulation of %d hosts", x->n_hosts);
    for (int i = 0; i < x->n_hosts; i++)
        x->links[i] =
            (sim_link){.first = SIM_NONE, .last = SIM_NONE, .out_ns = -LONG_AGO, .in_ns = -LONG_AGO};
    for (int i = 0; i < x->n_core_groups; i++)
        x->cores[i] = (sim_cores){cores, SIM_NONE, SIM_NONE};
    for (int i = 0; i <= x->n_ranks; i++)
        x->densities[i] = -1;
    for (int i = 0; i < x->n_reps; i++)
        x->ranks[i].host = i / x->per_host;
    set_window(x);
    return make_flows(x);
}

/* sends_sums: some message has the accumulator's dtype. Slices are such that it fits. */
static void set_sizes(sim *x, bool sends_sums)
{
    size_t queue_bytes = sp_tune_queue_bytes(x->n_ranks), message_max = (size_t)x->o->message_max;
    double most = sp_cost_sum_density(x->o->density, x->n_ranks);
    if (message_max == 0) /* of shm: a record of up to half of the queue; of tcp a quarter */
        message_max = x->n_ranks == x->per_host ? queue_bytes / 2 - SHM_HEAD_BYTES : queue_bytes / 4;
    x->queue_bytes = (double)queue_bytes;
    x->elem_bytes = sp_dtype_bytes(x->o->dtype);
    x->acc_bytes = sp_dtype_bytes(sp_acc_dtype(x->o->dtype));
    x->slice_elems = sp_tune_slice_elems(sp_tune_slice_bytes(queue_bytes),
                                         sends_sums ? x->acc_bytes : x->elem_bytes, x->format, message_max);
    x->sum_density = most - x->o->overlap * (most - x->o->density);
}

static spccl_status check_work(const sim *x)
{
    size_t n = 0;
    for (int i = 0; i < x->n_reps; i++)
        for (int j = 0; j < x->ranks[i].plan->n_steps; j++) {
            const sp_step *s = &x->ranks[i].plan->steps[j];
            n += (size_t)s->n_to * sp_ceil_div(s->n_elems, x->slice_elems);
        }
    if (n > MESSAGES_MAX)
        return SP_FAIL(SPCCL_ERR_UNSUPPORTED,
                       "simulate: %s of %d ranks: %zu messages to simulate, wanted at most %zu",
                       sp_coll_name(x->coll), x->n_ranks, n, MESSAGES_MAX);
    return SPCCL_OK;
}

/* ---- running ---- */

static spccl_status run(sim *x)
{
    sim_event e;
    int unfinished = 0;
    for (int i = 0; i < x->n_reps; i++)
        SP_TRY(sim_rank_init(x, &x->ranks[i]));
    for (int i = 0; i < x->n_reps; i++)
        sim_rank_start(x, &x->ranks[i]);
    while (!x->failed && sim_next(x, &e)) {
        x->now = e.ns;
        x->out.n_events++;
        if (e.kind == SIM_DONE)
            x->out.time_ns = x->now;
        if (e.kind == SIM_WAKE || e.kind == SIM_DONE)
            sim_rank_event(x, &e);
        else
            sim_flow_event(x, &e);
    }
    if (x->failed)
        return SP_FAIL(SPCCL_ERR_NOMEM, "simulation: %zu events", x->n_events);
    for (int i = 0; i < x->n_reps; i++)
        unfinished += x->ranks[i].n_unfinished;
    if (unfinished != 0)
        return SP_FAIL(SPCCL_ERR_BUG, "simulation: %d steps of plan %s wait for ever", unfinished,
                       x->ranks[0].plan->name);
    return SPCCL_OK;
}

/* Memory of a rank: queues, the executor's scratch, the plan, and slices that it keeps. */
static void add_memory(sim *x, const sp_plan *plan)
{
    double message =
        SP_ENVELOPE_BYTES + (double)sp_frame_bound_forced(SPCCL_FORMAT_COO, x->slice_elems, x->elem_bytes);
    double slice = (double)(x->slice_elems * x->acc_bytes), kept = 0, all;
    /* Inside a host the two ranks share a queue; it counts for the receiver. */
    double n_queues = SP_N_QUEUES * (x->per_host - 1 + 2.0 * (x->n_ranks - x->per_host));
    for (int i = 0; i < plan->n_steps && kept <= 0; i++)
        if (plan->steps[i].keeps)
            kept = (message > slice ? message : slice) * plan->n_slots * plan->block_slices;
    all = kept + n_queues * x->queue_bytes + SCRATCH_SLICES * slice +
          plan->n_steps * (double)sizeof *plan->steps;
    x->out.kept_bytes = kept > x->out.kept_bytes ? kept : x->out.kept_bytes;
    x->out.memory_bytes = all > x->out.memory_bytes ? all : x->out.memory_bytes;
}

static void add_up(sim *x)
{
    spccl_simulated *out = &x->out;
    double copies = (double)x->n_ranks / x->n_reps;
    out->wire_bytes *= copies;
    out->remote_bytes *= copies;
    out->dense_bytes *= copies;
    out->n_messages = (uint64_t)((double)out->n_messages * copies + 0.5);
    for (int i = 0; i < SPCCL_N_FORMATS; i++)
        out->format_bytes[i] *= copies;
    for (int i = 0; i < x->n_reps; i++) {
        const sim_rank *r = &x->ranks[i];
        out->rank_bytes = r->sent_bytes > out->rank_bytes ? r->sent_bytes : out->rank_bytes;
        out->cpu_ns = r->busy_ns > out->cpu_ns ? r->busy_ns : out->cpu_ns;
        out->n_steps = r->plan->n_steps > out->n_steps ? r->plan->n_steps : out->n_steps;
        add_memory(x, r->plan);
    }
    for (int i = 0; i < x->n_hosts; i++) {
        double most =
            x->links[i].out_bytes > x->links[i].in_bytes ? x->links[i].out_bytes : x->links[i].in_bytes;
        out->link_bytes = most > out->link_bytes ? most : out->link_bytes;
    }
    out->n_simulated = x->n_reps;
    out->n_elems = x->n_elems;
}

/* What the choice of the schedule would expect, with these rates and densities. */
static void add_choice(sim *x, sp_schedule schedule, const sp_hosts *hosts)
{
    sp_cost_group g;
    sp_cost_call call = {.coll = x->coll,
                         .n_elems = x->n_elems,
                         .elem_bytes = x->elem_bytes,
                         .slice_elems = x->slice_elems,
                         .format = x->format,
                         .density = x->o->density,
                         .sum_density = x->sum_density};
    if (schedule >= SP_N_SCHEDULES)
        return;
    sp_cost_group_init(&g, x->n_ranks, hosts->n_hosts > 1 ? hosts : NULL);
    g.remote_ns = x->o->link_ns * x->per_host;
    x->out.chosen_ns = sp_expected_ns(&g, schedule, &call);
}

static void fini(sim *x)
{
    for (int i = 0; x->ranks != NULL && i < x->n_ranks; i++)
        sim_rank_fini(&x->ranks[i]);
    sp_free(x->ranks);
    sp_free(x->flows);
    sp_free(x->cores);
    sp_free(x->links);
    sp_free(x->densities);
    sim_event_fini(x);
}

static spccl_status simulate(sim *x, const sp_hosts *hosts)
{
    sp_schedule schedule = SP_SCHED_FILE;
    sp_plan_head head = {0};
    sp_proof proof = {0};
    bool forced = true;
    if (x->o->schedule != NULL) {
        SP_TRY(sp_tune_parse_schedule(x->o->schedule, &forced, &schedule));
        WANTED(forced && schedule != SP_SCHED_FILE, "schedule \"%s\", wanted the name of one",
               x->o->schedule);
    }
    x->ranks = sp_calloc((size_t)x->n_ranks, sizeof *x->ranks);
    if (x->ranks == NULL)
        return SP_FAIL(SPCCL_ERR_NOMEM, "simulation of %d ranks", x->n_ranks);
    if (schedule == SP_SCHED_FILE) {
        x->n_reps = x->n_ranks;
        WANTED(x->n_ranks <= SP_PLAN_RANKS_MAX, "plan files have at most %d ranks, and there are %d",
               SP_PLAN_RANKS_MAX, x->n_ranks);
        SP_TRY(read_plans(x, &head, &proof));
        x->coll = head.coll;
    } else {
        SP_TRY(parse_coll(x->o->collective, &x->coll));
        merge(x, schedule);
        SP_TRY(make_plans(x, schedule, hosts));
        proof.sends_sums = !sp_schedule_adds_in_rank_order(schedule);
    }
    set_sizes(x, proof.sends_sums);
    SP_TRY(check_work(x));
    SP_TRY(make_machine(x));
    SP_TRY(run(x));
    add_up(x);
    add_choice(x, schedule, hosts);
    return SPCCL_OK;
}

spccl_status spccl_simulate(const spccl_simulate_options *options, spccl_simulated *out)
{
    spccl_simulate_options o = defaults;
    sim x = {.o = &o};
    sp_hosts *hosts = NULL;
    int host_of[RANKS_MAX];
    spccl_status st;
    WANTED(options != NULL && out != NULL, "%s is NULL", options == NULL ? "options" : "out");
    SP_TRY(sp_options_copy("spccl_simulate_options", options, &o, sizeof o));
    SP_TRY(check_options(&o));
    fill_rates(&o);
    SP_TRY(sp_tune_parse_format(o.format != NULL ? o.format : "auto", &x.format));
    x.n_ranks = o.n_ranks;
    x.per_host = o.ranks_per_host;
    x.n_elems = o.n_elems;
    for (int r = 0; r < x.n_ranks; r++)
        host_of[r] = r / x.per_host;
    SP_TRY(sp_hosts_create(host_of, x.n_ranks, &hosts));
    st = simulate(&x, hosts);
    fini(&x);
    sp_free(hosts);
    return st != SPCCL_OK ? st : sp_result_copy("spccl_simulated", &x.out, sizeof x.out, out);
}
