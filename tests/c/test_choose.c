/* test_choose.c - all ranks choose the same schedules and slice sizes, from the same densities and times. Calls are asynchronous, with 8 and
 * more in flight; ranks and messages are late at random; sizes and collectives take turns, densities change,
 * and groups share ranks. A wrong choice shows as a mismatch error, or as memories that differ. */
#include "core/run/comm.h"
#include "fault.h"
#include "ranks.h"

#include <stdbool.h>

#define N_CALLS 128
#define IN_FLIGHT_MAX 24
#define ELEMS_MAX 12000

struct scene {
    int n_ranks, ranks_per_host, in_flight;
    int n_calls, period; /* of sparse calls, and then as many dense ones */
    size_t elems;        /* of the largest calls */
    bool pairs;          /* and groups of ranks 2k and 2k + 1, whose calls take turns with those of all */
    uint64_t seed;
    sp_chooser *memory; /* [n_ranks] what each rank remembers at the end */
    sp_chooser *pair_memory;
    uint32_t n_trials;     /* of the tuner, on rank 0 */
    _Atomic int n_changes; /* of the schedule of an all-reduce of s->elems elements, on rank 0 */
};

/* One collective of the sequence, as all ranks call it. */
struct call {
    sp_coll coll;
    size_t n;
    int root, one_in; /* one element in so many is not zero */
};

static uint64_t mix(uint64_t z)
{
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* Every second call is an all-reduce of s->elems elements. `period` calls are sparse, then as many are dense, and so on. */
static struct call call_number(const struct scene *s, int k, int n_ranks)
{
    const size_t sizes[] = {s->elems, 1000, 3000};
    uint64_t r = mix(s->seed + (uint64_t)k * 77);
    struct call c = {.coll = k % 2 == 0 ? SP_ALL_REDUCE : (sp_coll)(r / 2 % SP_N_COLLS),
                     .n = sizes[k % 2 == 0 ? 0 : r / 16 % 3],
                     .root = (int)(r / 64 % (unsigned)n_ranks),
                     .one_in = k / s->period % 2 == 0 ? 1000 : 1};
    if (c.coll == SP_ALL_GATHER || c.coll == SP_REDUCE_SCATTER)
        c.n /= (size_t)n_ranks;
    return c;
}

static float input(const struct scene *s, const struct call *c, int k, int rank, size_t i)
{
    uint64_t r = mix(s->seed + (uint64_t)k * 1000003 + (uint64_t)rank * 1009 + i * 0x9e3779b97f4a7c15u);
    return r % (unsigned)c->one_in == 0 ? (float)(r / 1024 % 16) + 1 : 0; /* small integers: exact sums */
}

static float sum(const struct scene *s, const struct call *c, int k, int n_ranks, size_t i)
{
    float x = 0;
    for (int r = 0; r < n_ranks; r++)
        x += input(s, c, k, r, i);
    return x;
}

static float wanted(const struct scene *s, const struct call *c, int k, const struct rank_ctx *ctx, size_t i)
{
    switch (c->coll) {
    case SP_ALL_GATHER:
        return input(s, c, k, (int)(i / c->n), i % c->n);
    case SP_REDUCE_SCATTER:
        return sum(s, c, k, ctx->n_ranks, (size_t)ctx->rank * c->n + i);
    case SP_ALL_REDUCE:
        return sum(s, c, k, ctx->n_ranks, i);
    case SP_BROADCAST:
        return input(s, c, k, c->root, i);
    case SP_N_COLLS:
        break;
    }
    return 0;
}

/* A call in flight. */
struct flight {
    struct call c;
    int k;
    float *in, *out;
    spccl_request *req;
};

static void start(const struct scene *s, const struct rank_ctx *ctx, int k, struct flight *f)
{
    struct call c = call_number(s, k, ctx->n_ranks);
    size_t n_in = c.coll == SP_REDUCE_SCATTER ? c.n * (size_t)ctx->n_ranks : c.n;
    f->c = c;
    f->k = k;
    for (size_t i = 0; i < n_in; i++)
        (c.coll == SP_BROADCAST ? f->out : f->in)[i] = input(s, &c, k, ctx->rank, i);
    switch (c.coll) {
    case SP_ALL_GATHER:
        CHECK_OK(spccl_all_gather(ctx->comm, f->in, f->out, c.n, SPCCL_FLOAT32, &f->req));
        return;
    case SP_REDUCE_SCATTER:
        CHECK_OK(spccl_reduce_scatter(ctx->comm, f->in, f->out, c.n, SPCCL_FLOAT32, SPCCL_SUM, &f->req));
        return;
    case SP_ALL_REDUCE:
        CHECK_OK(spccl_all_reduce(ctx->comm, f->in, f->out, c.n, SPCCL_FLOAT32, SPCCL_SUM, &f->req));
        return;
    case SP_BROADCAST:
        CHECK_OK(spccl_broadcast(ctx->comm, f->out, c.n, SPCCL_FLOAT32, c.root, &f->req));
        return;
    case SP_N_COLLS:
        break;
    }
}

static void finish(const struct scene *s, const struct rank_ctx *ctx, struct flight *f)
{
    size_t n_out = f->c.coll == SP_ALL_GATHER ? f->c.n * (size_t)ctx->n_ranks : f->c.n, n_wrong = 0;
    if (f->req == NULL)
        return;
    CHECK_OK(spccl_request_wait(f->req, -1));
    spccl_request_free(f->req);
    f->req = NULL;
    for (size_t i = 0; i < n_out; i++)
        n_wrong += f->out[i] != wanted(s, &f->c, f->k, ctx, i);
    CHECK(n_wrong == 0, "rank %d: call %d, %s: %zu wrong elements", ctx->rank, f->k, sp_coll_name(f->c.coll),
          n_wrong);
}

/* Note whether the schedule of the largest all-reduce has changed. */
static void watch(struct scene *s, const struct rank_ctx *ctx, sp_schedule *last)
{
    const sp_chooser *c = ctx->comm->exec.chooser; /* no call is in flight: no thread uses it */
    for (int i = 0; i < SP_CHOOSE_KEYS; i++)
        if (c->entries[i].used && c->entries[i].coll == SP_ALL_REDUCE && c->entries[i].n_elems == s->elems) {
            s->n_changes += *last != SP_N_SCHEDULES && *last != c->entries[i].choice.schedule;
            *last = c->entries[i].choice.schedule;
        }
}

/* What the group remembers. It has no call under way, and will have none. */
static void take_memory(spccl_comm *comm, sp_chooser *out)
{
    *out = *comm->exec.chooser;
    comm->exec.chooser->tuner = NULL;
}

static void join_pair(const struct rank_ctx *c, struct rank_ctx *pair)
{
    spccl_store store = {
        .struct_bytes = sizeof store, .ctx = c->store, .set = mem_store_set, .get = mem_store_get};
    spccl_config config = *c->config;
    char name[24];
    snprintf(name, sizeof name, "pair %d", c->rank / 2);
    config.name = name;
    *pair = (struct rank_ctx){.rank = c->rank % 2, .n_ranks = 2};
    CHECK_OK(spccl_comm_create(&store, pair->rank, 2, &config, &pair->comm));
}

static void sequence(struct rank_ctx *c)
{
    struct scene *s = c->arg;
    struct rank_ctx pair = {0};
    struct flight flights[2][IN_FLIGHT_MAX] = {{{.req = NULL}}};
    uint64_t rng = mix(s->seed + (uint64_t)c->rank + 12345);
    sp_schedule last = SP_N_SCHEDULES;
    if (s->pairs)
        join_pair(c, &pair);
    for (int g = 0; g < 2; g++)
        for (int i = 0; i < s->in_flight; i++) {
            flights[g][i].in = malloc(s->elems * sizeof(float));
            flights[g][i].out = malloc(s->elems * sizeof(float));
        }
    for (int k = 0; k < s->n_calls; k++) {
        struct flight *f = &flights[0][k % s->in_flight], *p = &flights[1][k % s->in_flight];
        finish(s, c, f);
        start(s, c, k, f);
        if (s->pairs) {
            finish(s, &pair, p);
            start(s, &pair, k, p);
        }
        rng = mix(rng + 1);
        if (rng % 4 == 0)
            sleep_ms((int)(rng / 16 % 4));
        if ((k + 1) % s->in_flight == 0) {
            for (int i = 0; i < s->in_flight; i++)
                finish(s, c, &flights[0][i]);
            if (c->rank == 0)
                watch(s, c, &last);
        }
    }
    for (int i = 0; i < s->in_flight; i++) {
        finish(s, c, &flights[0][i]);
        if (s->pairs)
            finish(s, &pair, &flights[1][i]);
    }
    take_memory(c->comm, &s->memory[c->rank]);
    if (s->pairs)
        take_memory(pair.comm, &s->pair_memory[c->rank]);
    for (int g = 0; g < 2; g++)
        for (int i = 0; i < s->in_flight; i++) {
            free(flights[g][i].in);
            free(flights[g][i].out);
        }
    spccl_comm_destroy(pair.comm);
}

static bool same_choice(const sp_choice *a, const sp_choice *b)
{
    bool same = a->schedule == b->schedule && a->density == b->density && a->sum_density == b->sum_density &&
                a->local_ns == b->local_ns && a->remote_ns == b->remote_ns;
    for (int i = 0; i < SP_N_SCHEDULES; i++)
        same = same && a->ns[i] == b->ns[i];
    return same;
}

/* Compare what the tuners of two ranks have learnt, bit for bit. */
static void same_tuner(const sp_tuner *a, const sp_tuner *b, int rank)
{
    CHECK(a->n_carriers == b->n_carriers && a->all_ns == b->all_ns && a->lost_ns == b->lost_ns,
          "rank %d: %g ns, %g lost; rank 0: %g, %g", rank, b->all_ns, b->lost_ns, a->all_ns, a->lost_ns);
    for (int i = 0; i < SP_TUNER_CELLS; i++) {
        const sp_tune_cell *c = &a->cells[i], *d = &b->cells[i];
        bool same = c->used == d->used && c->key.n_elems == d->key.n_elems && c->phase == d->phase &&
                    c->state == d->state && c->usual == d->usual && c->n_arms == d->n_arms &&
                    c->n_trials == d->n_trials && c->budget == d->budget && c->usual_ns == d->usual_ns;
        for (int k = 0; same && k < c->n_arms; k++)
            same = c->arms[k].n == d->arms[k].n && c->arms[k].out == d->arms[k].out &&
                   memcmp(c->arms[k].ratios, d->arms[k].ratios, c->arms[k].n * sizeof(float)) == 0;
        CHECK(same, "rank %d has learnt other times of %s of %llu elements", rank, sp_coll_name(c->key.coll),
              (unsigned long long)c->key.n_elems);
    }
}

/* Compare what two ranks remember, bit for bit. */
static void same_memory(const struct scene *s, const sp_chooser *a, const sp_chooser *b, int rank)
{
    CHECK(a->n_planned == b->n_planned && a->n_ended == b->n_ended && a->n_ended == (uint32_t)s->n_calls,
          "rank %d planned %u and ended %u calls", rank, b->n_planned, b->n_ended);
    CHECK(a->choices_hash == b->choices_hash, "rank %d has chosen otherwise than rank 0", rank);
    CHECK((a->tuner == NULL) == (b->tuner == NULL), "rank %d: %p, rank 0: %p", rank, (void *)b->tuner,
          (void *)a->tuner);
    if (a->tuner != NULL && b->tuner != NULL)
        same_tuner(a->tuner, b->tuner, rank);
    for (int i = 0; i < SP_CHOOSE_LAG; i++) {
        const sp_measured *m = &a->ended[i], *n = &b->ended[i];
        CHECK(m->listed == n->listed && m->elems == n->elems && m->sum_listed == n->sum_listed &&
                  m->sum_elems == n->sum_elems && m->local_ns == n->local_ns && m->remote_ns == n->remote_ns,
              "rank %d measured %llu of %llu and %llu of %llu, rank 0 %llu of %llu and %llu of %llu", rank,
              (unsigned long long)n->listed, (unsigned long long)n->elems, (unsigned long long)n->sum_listed,
              (unsigned long long)n->sum_elems, (unsigned long long)m->listed, (unsigned long long)m->elems,
              (unsigned long long)m->sum_listed, (unsigned long long)m->sum_elems);
    }
    for (int i = 0; i < SP_CHOOSE_KEYS; i++) {
        const sp_choose_entry *e = &a->entries[i], *f = &b->entries[i];
        CHECK(e->used == f->used && e->n_elems == f->n_elems && e->coll == f->coll &&
                  e->density == f->density && e->overlap == f->overlap && same_choice(&e->choice, &f->choice),
              "rank %d remembers other densities of %s of %llu elements", rank, sp_coll_name(e->coll),
              (unsigned long long)e->n_elems);
    }
}

static void run_sequence(struct scene *s, const char *transports)
{
    struct rank_ctx ctx[RANKS_CAP];
    spccl_config config = SPCCL_CONFIG_INIT;
    config.timeout_ms = 120000;
    config.transports = transports;
    config.schedule = s->n_calls != 0 ? "tune" : "auto";
    s->seed = test_rand();
    s->elems = s->elems != 0 ? s->elems : ELEMS_MAX;
    s->n_calls = s->n_calls != 0 ? s->n_calls : N_CALLS;
    s->period = s->period != 0 ? s->period : 32;
    s->memory = calloc((size_t)s->n_ranks, sizeof *s->memory);
    s->pair_memory = calloc((size_t)s->n_ranks, sizeof *s->memory);
    test_ranks_per_host = s->ranks_per_host;
    run_ranks(s->n_ranks, &config, sequence, s, ctx);
    test_ranks_per_host = 0;
    for (int r = 0; r < s->n_ranks; r++) {
        CHECK(ctx[r].created == SPCCL_OK, "rank %d: %s", r, ctx[r].error);
        same_memory(s, &s->memory[0], &s->memory[r], r);
        if (s->pairs)
            same_memory(s, &s->pair_memory[r / 2 * 2], &s->pair_memory[r], r);
    }
    s->n_trials = 0;
    for (int i = 0; s->memory[0].tuner != NULL && i < SP_TUNER_CELLS; i++)
        s->n_trials += s->memory[0].tuner->cells[i].n_trials;
    for (int r = 0; r < s->n_ranks; r++) {
        sp_chooser_fini(&s->memory[r]);
        sp_chooser_fini(&s->pair_memory[r]);
    }
    free(s->memory);
    free(s->pair_memory);
}

static void test_same_choice(void)
{
    uint32_t n_trials = 0;
    static const struct scene scenes[] = {
        {.n_ranks = 4, .in_flight = 8},
        {.n_ranks = 4, .in_flight = 24}, /* more than the executor works on */
        {.n_ranks = 4, .in_flight = 1},
        {.n_ranks = 6, .ranks_per_host = 2, .in_flight = 8, .pairs = true},
        /* the tuner: long enough for trials; with several slices their size is tuned */
        {.n_ranks = 2, .in_flight = 24, .n_calls = 400, .period = 300, .elems = 70000},
        {.n_ranks = 3, .in_flight = 16, .n_calls = 400, .period = 300, .elems = 100000},
        {.n_ranks = 8, .ranks_per_host = 4, .in_flight = 24, .n_calls = 400, .period = 300},
    };
    for (size_t i = 0; i < sizeof scenes / sizeof scenes[0]; i++) {
        struct scene s = scenes[i];
        sp_fault = (sp_fault_plan){.inner = "inproc", .seed = test_rand(), .hold_one_in = 3};
        run_sequence(&s, "fault");
        if (s.ranks_per_host == 0 && s.in_flight <= 8 && s.n_calls == N_CALLS)
            CHECK(s.n_changes >= 2, "the schedule changed %d times: densities are not used", s.n_changes);
        n_trials += s.n_trials;
    }
    /* On a busy machine a trial may seem to cost much, and then there are few. */
    CHECK(n_trials >= 3, "%u trials in all scenes", n_trials);
}

static void test_same_choice_networks(void)
{
    struct scene over_shm = {.n_ranks = 3, .in_flight = 8};
    struct scene over_both = {.n_ranks = 4, .ranks_per_host = 2, .in_flight = 8};
    run_sequence(&over_shm, "shm");
    run_sequence(&over_both, "shm,tcp");
    sp_fault = (sp_fault_plan){.inner = "tcp", .seed = test_rand(), .hold_one_in = 4};
    over_both = (struct scene){.n_ranks = 4, .ranks_per_host = 2, .in_flight = 8};
    run_sequence(&over_both, "fault");
}

/* ---- a rank that chooses otherwise ---- */

struct outcome {
    spccl_status st[4];
    char text[4][1024];
};

static void disagree(struct rank_ctx *c)
{
    struct outcome *o = c->arg;
    float *buf = calloc(ELEMS_MAX, sizeof *buf);
    if (c->rank == 1) /* as if this rank had measured another rate */
        c->comm->exec.chooser->group.local_ns = 1000;
    o->st[c->rank] = spccl_all_reduce(c->comm, buf, buf, 2000, SPCCL_FLOAT32, SPCCL_SUM, NULL);
    snprintf(o->text[c->rank], sizeof o->text[0], "%s", spccl_last_error());
    free(buf);
}

/* As if this rank had learnt nothing: the first trial of the others shows it. */
static void stop_learning(struct rank_ctx *c)
{
    struct outcome *o = c->arg;
    float *buf = calloc(ELEMS_MAX, sizeof *buf);
    if (c->rank == 1)
        sp_chooser_fini(c->comm->exec.chooser);
    for (int i = 0; i < 200 && o->st[c->rank] == SPCCL_OK; i++)
        o->st[c->rank] = spccl_all_reduce(c->comm, buf, buf, 2000, SPCCL_FLOAT32, SPCCL_SUM, NULL);
    snprintf(o->text[c->rank], sizeof o->text[0], "%s", spccl_last_error());
    free(buf);
}

/* ---- what is said of a choice ---- */

static void describe(struct rank_ctx *c)
{
    float *buf = calloc(4000, sizeof *buf);
    const char *text = NULL;
    bool measured = false;
    CHECK(spccl_comm_describe_schedule(c->comm, 0, &text) == SPCCL_ERR_ARG, "there was no call yet");
    for (int i = 0; i <= SP_CHOOSE_LAG; i++) { /* the last of them knows what the first measured */
        buf[0] = 1;
        CHECK_OK(spccl_all_reduce(c->comm, buf, buf, 4000, SPCCL_FLOAT32, SPCCL_SUM, NULL));
        CHECK_OK(spccl_comm_describe_schedule(c->comm, 0, &text));
        CHECK(strstr(text, "all_reduce of 4000 float32: ") == text && strstr(text, "direct ") != NULL &&
                  strstr(text, "oneshot ") != NULL,
              "call %d: \"%s\"", i, text);
        measured = strstr(text, "measured 0.025%") != NULL;
        CHECK(measured == (i == SP_CHOOSE_LAG), "call %d: \"%s\"", i, text);
    }
    CHECK(spccl_comm_describe_schedule(c->comm, 1, &text) == SPCCL_ERR_ARG, "there is one kind of call");
    c->comm->schedule_forced = true; /* as SPCCL_SCHEDULE does */
    c->comm->schedule = SP_SCHED_RELAYED;
    CHECK_OK(spccl_all_reduce(c->comm, buf, buf, 3000, SPCCL_FLOAT32, SPCCL_SUM, NULL));
    CHECK_OK(spccl_comm_describe_schedule(c->comm, 1, &text));
    CHECK(strstr(text, "all_reduce of 3000 float32: forced relayed") == text, "\"%s\"", text);
    free(buf);
}

static void test_described(void)
{
    struct rank_ctx ctx[RANKS_CAP];
    spccl_config config = SPCCL_CONFIG_INIT;
    config.timeout_ms = 60000;
    config.transports = "inproc";
    run_ranks(2, &config, describe, NULL, ctx);
}

static void test_disagree(void (*fn)(struct rank_ctx *))
{
    struct rank_ctx ctx[RANKS_CAP];
    struct outcome o = {0};
    spccl_config config = SPCCL_CONFIG_INIT;
    int n_named = 0;
    config.timeout_ms = 60000;
    config.transports = "inproc";
    config.schedule = "tune";
    run_ranks(4, &config, fn, &o, ctx);
    for (int r = 0; r < 4; r++) {
        CHECK(o.st[r] != SPCCL_OK, "rank %d did not notice", r);
        n_named +=
            strstr(o.text[r], "direct at rank") != NULL && strstr(o.text[r], "oneshot at rank") != NULL;
    }
    CHECK(n_named >= 1, "no text names both schedules: \"%s\"", o.text[0]);
}

static void test_other_choice(void)
{
    test_disagree(disagree);
    test_disagree(stop_learning);
}

/* ---- data that become dense at once ---- */

/* What a large all-reduce over 4 hosts would measure whose nonzeros are independent. */
static sp_measured measured(size_t n_elems, double density)
{
    sp_measured m = {.coll = SP_ALL_REDUCE, .dtype = SPCCL_FLOAT32, .n_elems = n_elems};
    m.elems = m.sum_elems = 1000000;
    m.listed = (uint64_t)(density * 1e6);
    m.sum_listed = (uint64_t)(sp_cost_sum_density(density, 4) * 1e6);
    m.remote_ns = (uint32_t)(8.35 * SP_CHOOSE_NS_UNIT); /* 1 Gbit/s */
    return m;
}

/* Calls of 64 MiB at 0.1%, 1%, 10% follow each other, then a dense one. It may not be oneshot: that sends twice
 * the bytes of direct. */
static void test_dense_at_once(void)
{
    static const double densities[] = {0.001, 0.01, 0.1};
    static const int host_of[] = {0, 1, 2, 3};
    static sp_chooser c;
    sp_cost_call call = {.coll = SP_ALL_REDUCE,
                         .n_elems = 16 << 20,
                         .elem_bytes = 4,
                         .slice_elems = 32768,
                         .format = SPCCL_FORMAT_AUTO};
    const sp_choice *choice;
    sp_hosts *hosts = NULL;
    CHECK_OK(sp_hosts_create(host_of, 4, &hosts));
    sp_chooser_init(&c, 4, hosts);
    for (int i = 0; i < 24; i++)
        for (int k = 0; k < 3; k++) {
            sp_measured m = measured(call.n_elems, densities[i / 8]);
            CHECK_OK(sp_choose(&c, &call, SPCCL_FLOAT32, &choice));
            CHECK(choice->schedule != SP_SCHED_ONESHOT, "call %d at %g%%: oneshot %g ns, direct %g ns",
                  3 * i + k, 100 * densities[i / 8], choice->ns[SP_SCHED_ONESHOT],
                  choice->ns[SP_SCHED_DIRECT]);
            sp_chooser_end(&c, &m);
        }
    call.n_elems = 256; /* a small one is oneshot: a hop costs more than its bytes */
    CHECK_OK(sp_choose(&c, &call, SPCCL_FLOAT32, &choice));
    CHECK(choice->schedule == SP_SCHED_ONESHOT, "direct %g ns, oneshot %g ns", choice->ns[SP_SCHED_DIRECT],
          choice->ns[SP_SCHED_ONESHOT]);
    free(hosts);
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {
        {"same_choice", test_same_choice},   {"same_choice_networks", test_same_choice_networks},
        {"other_choice", test_other_choice}, {"dense_at_once", test_dense_at_once},
        {"described", test_described},       {NULL, NULL},
    };
    setenv("SPCCL_LOG", "off", 0); /* one test makes a group break */
    return test_main(cases, argc, argv);
}
