/* test_tuner.c - the tuner (tuner.h) with times that the test makes up: all ranks choose the same whatever their windows
 * of calls under way and their clocks; it finds a better setting, keeps the model's where none is better, and spends little;
 * it takes what a profile has. test_profile.c has the rest of profiles, test_choose.c the tuner in groups that run. */
#include "core/run/comm.h"
#include "core/run/profile_file.h"
#include "ranks.h"

#include <math.h>
#include <stdbool.h>

#define N_ELEMS (1 << 20)
#define SLICE 32768
#define SLICE_MAX 61440
#define MACHINE "version=0 cpu=test"

/* The time of a call, in us. */
typedef double (*time_fn)(const sp_choice *c, uint64_t noise);

static uint64_t mix(uint64_t z)
{
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* A part of 1 up to `most`. */
static double part(uint64_t noise, double most)
{
    return (double)(noise % 1000) / 1000 * most;
}

static double large_slices_win(const sp_choice *c, uint64_t noise)
{
    return (c->tuned.slice_elems == SLICE_MAX ? 800
            : c->tuned.slice_elems == SLICE   ? 1000
                                              : 1300) *
           (1 + part(noise, 0.1));
}

static double oneshot_wins(const sp_choice *c, uint64_t noise)
{
    return (c->schedule == SP_SCHED_ONESHOT ? 700 : 1000) * (1 + part(noise, 0.1));
}

static double model_is_right(const sp_choice *c, uint64_t noise)
{
    return (c->tuned.slice_elems == SLICE && c->schedule == SP_SCHED_DIRECT ? 1000 : 1500) *
           (1 + part(noise, 0.1));
}

/* What the model expects least: everything else takes 20 times as long. */
static double all_else_is_slow(const sp_choice *c, uint64_t noise)
{
    return c->tuned.slice_elems == SLICE && c->schedule == SP_SCHED_DIRECT ? 1000 + part(noise, 10) : 20000;
}

static double all_equal(const sp_choice *c, uint64_t noise)
{
    (void)c;
    return 1000 * (1 + part(noise, 0.5)); /* and a tenth takes three times as long */
}

static double no_times(const sp_choice *c, uint64_t noise)
{
    (void)c;
    return 0 * part(noise, 1);
}

/* A rank of a simulated group. */
struct sim_rank {
    sp_chooser chooser;
    int window;   /* calls that are planned before the oldest of them ends: 1 to SP_CHOOSE_LAG */
    double clock; /* its second lasts so many */
    uint32_t n_ended;
    uint32_t codes[SP_TUNER_FLIGHTS];
};

struct sim {
    int n_ranks;
    time_fn time;
    int n_calls;
    const sp_profile *profile;
    /* results */
    double us; /* of all calls */
    sp_choice last;
    sp_profile learnt;
    uint64_t hash;
};

/* Plan call k on a rank, after it has ended call k - window. */
static sp_choice plan(struct sim_rank *r, int k, const sp_measured *measured)
{
    sp_cost_call call = {.coll = k % 3 == 2 ? SP_ALL_GATHER : SP_ALL_REDUCE,
                         .n_elems = N_ELEMS,
                         .elem_bytes = 4,
                         .slice_elems = SLICE,
                         .format = SPCCL_FORMAT_AUTO};
    const sp_choice *choice = NULL;
    while ((int)r->n_ended <= k - r->window)
        sp_chooser_end(&r->chooser, &measured[r->n_ended++]);
    CHECK_OK(sp_choose_tuned(&r->chooser, &call, SPCCL_FLOAT32, SLICE_MAX, &choice));
    return *choice;
}

static bool same_choice(const sp_choice *a, const sp_choice *b)
{
    return a->schedule == b->schedule && a->tuned.slice_elems == b->tuned.slice_elems &&
           a->tuned.is_trial == b->tuned.is_trial && a->carrier == b->carrier;
}

/* Run the calls of all ranks. What a call measured is known when it is planned, as no time is real. */
static void simulate(struct sim *s)
{
    struct sim_rank *ranks = calloc((size_t)s->n_ranks, sizeof *ranks);
    sp_measured *measured = calloc((size_t)s->n_calls, sizeof *measured);
    for (int r = 0; r < s->n_ranks; r++) {
        sp_chooser_init(&ranks[r].chooser, s->n_ranks, NULL);
        CHECK_OK(sp_chooser_tune(&ranks[r].chooser));
        ranks[r].chooser.profile = s->profile;
        ranks[r].window = 1 + r * 3 % SP_CHOOSE_LAG;
        ranks[r].clock = 1 + 0.1 * r; /* no two agree on the time of anything */
    }
    s->us = 0;
    for (int k = 0; k < s->n_calls; k++) {
        uint64_t noise = mix((uint64_t)k * 77 + test_rand());
        sp_choice first = {0};
        sp_measured m = {
            .coll = k % 3 == 2 ? SP_ALL_GATHER : SP_ALL_REDUCE, .dtype = SPCCL_FLOAT32, .n_elems = N_ELEMS};
        m.elems = m.sum_elems = 1000000;
        m.listed = 10000;
        m.sum_listed = (uint64_t)(sp_cost_sum_density(0.01, s->n_ranks) * 1e6);
        for (int r = 0; r < s->n_ranks; r++) {
            struct sim_rank *rank = &ranks[r];
            sp_choice c = plan(rank, k, measured);
            double us = s->time(&c, noise);
            uint32_t told =
                c.carrier > SP_TUNER_LAG ? rank->codes[(c.carrier - 1 - SP_TUNER_LAG) % SP_TUNER_FLIGHTS] : 0;
            if (r == 0)
                first = c;
            CHECK(same_choice(&c, &first), "call %d: rank %d takes %s, slices of %u; rank 0 %s, %u", k, r,
                  sp_schedule_name(c.schedule), c.tuned.slice_elems, sp_schedule_name(first.schedule),
                  first.tuned.slice_elems);
            /* A rank waits for others at random: its own time is longer then, and the largest holds. */
            us *= rank->clock * (s->time == all_equal && noise % 10 == 0 ? 3 : 1);
            rank->codes[(c.carrier - 1) % SP_TUNER_FLIGHTS] = sp_time_code((int64_t)(us * 1000));
            m.carrier = c.carrier;
            m.time_code = told > m.time_code ? told : m.time_code;
        }
        s->us += s->time(&first, noise);
        if (k % 3 != 2)
            s->last = first;
        measured[k] = m;
    }
    s->hash = ranks[0].chooser.choices_hash;
    for (int r = 0; r < s->n_ranks; r++)
        CHECK(ranks[r].chooser.choices_hash == s->hash, "rank %d has chosen otherwise than rank 0", r);
    s->learnt = (sp_profile){0};
    sp_chooser_save(&ranks[0].chooser, &s->learnt);
    for (int r = 0; r < s->n_ranks; r++)
        sp_chooser_fini(&ranks[r].chooser);
    free(measured);
    free(ranks);
}

static void test_finds_the_best(void)
{
    static const int sizes[] = {2, 3, 4, 8};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        struct sim s = {.n_ranks = sizes[i], .time = large_slices_win, .n_calls = 3000};
        simulate(&s);
        CHECK(s.last.tuned.state == SP_TUNE_SETTLED && s.last.tuned.slice_elems == SLICE_MAX,
              "%d ranks: state %d, slices of %u", s.n_ranks, (int)s.last.tuned.state,
              s.last.tuned.slice_elems);
        CHECK(s.last.tuned.ratio > 0.75 && s.last.tuned.ratio < 0.85, "ratio %g", s.last.tuned.ratio);
        CHECK(s.learnt.n == 2, "%d kinds of calls learnt", s.learnt.n);
    }
    struct sim s = {.n_ranks = 2, .time = oneshot_wins, .n_calls = 3000};
    simulate(&s);
    CHECK(s.last.tuned.state == SP_TUNE_SETTLED && s.last.schedule == SP_SCHED_ONESHOT, "state %d, %s",
          (int)s.last.tuned.state, sp_schedule_name(s.last.schedule));
}

/* Nothing is better: the model's choice stays, and 1000 calls take at most 5% longer. */
static void test_costs_little(void)
{
    static const time_fn times[] = {model_is_right, all_else_is_slow, all_equal, no_times};
    static const double usual[] = {1050, 1005, 1250, 0};
    for (size_t i = 0; i < sizeof times / sizeof times[0]; i++)
        for (int round = 0; round < 5; round++) {
            struct sim s = {.n_ranks = 4, .time = times[i], .n_calls = 1000};
            simulate(&s);
            CHECK(s.us <= 1.05 * 1000 * usual[i], "times %zu: %g us a call", i, s.us / 1000);
            CHECK(s.last.tuned.is_trial ||
                      (s.last.schedule == SP_SCHED_DIRECT && s.last.tuned.slice_elems == SLICE),
                  "times %zu: %s, slices of %u", i, sp_schedule_name(s.last.schedule),
                  s.last.tuned.slice_elems);
        }
}

/* ---- profiles ---- */

static size_t print(const sp_profile *p, char *text)
{
    return sp_profile_print(p, MACHINE, text, SP_PROFILE_BYTES_MAX);
}

static void test_profile(void)
{
    static char text[SP_PROFILE_BYTES_MAX], again[SP_PROFILE_BYTES_MAX];
    static sp_profile read, full;
    struct sim s = {.n_ranks = 4, .time = large_slices_win, .n_calls = 3000};
    struct sim with = {.n_ranks = 4, .time = large_slices_win, .n_calls = 60, .profile = &read};
    sp_profile_line l;
    simulate(&s);
    CHECK_OK(sp_profile_parse(text, print(&s.learnt, text), MACHINE, &read));
    CHECK(print(&read, again) == strlen(text) && strcmp(text, again) == 0, "%s\n%s", text, again);
    simulate(&with);
    CHECK(with.last.tuned.state == SP_TUNE_SETTLED && with.last.tuned.from_profile &&
              with.last.tuned.slice_elems == SLICE_MAX && with.learnt.n == 0,
          "state %d, slices of %u", (int)with.last.tuned.state, with.last.tuned.slice_elems);
    with.n_ranks = 3; /* the profile has nothing for it */
    simulate(&with);
    CHECK(!with.last.tuned.from_profile, "taken for another group");
    l = read.lines[0];
    l.key.n_elems = l.key.n_elems * 2;
    CHECK(sp_profile_find(&read, &l) == &read.lines[0], "twice the elements");
    l.key.n_elems++;
    CHECK(sp_profile_find(&read, &l) == NULL, "more than twice");
    for (int i = 0; i < SP_PROFILE_LINES + 10; i++) { /* the text of the longest profile fits */
        l.key.n_elems = UINT64_C(100000000000000000) + (uint64_t)i;
        l.n_ranks = l.n_hosts = l.per_host = 4096;
        l.key.density_class = SP_TUNER_CLASSES - 1;
        sp_profile_put(&full, &l);
    }
    CHECK(full.n == SP_PROFILE_LINES && full.lines[0].key.n_elems % 100 == 10, "%d lines", full.n);
    CHECK_OK(sp_profile_parse(text, print(&full, text), MACHINE, &read));
    CHECK(read.n == SP_PROFILE_LINES, "%d lines", read.n);
}

/* ---- bits ---- */

#define BITS_ELEMS 70000

struct bits {
    uint64_t seed;
    _Atomic int n_trials;
};

/* Sparse floats whose sums depend on the order of the additions, and -0.0. */
static float value(uint64_t seed, int rank, size_t i)
{
    uint64_t r = mix(seed + (uint64_t)rank * 1000003 + i * 0x9e3779b97f4a7c15u);
    return r % 97 == 0   ? -0.0f
           : r % 20 != 0 ? 0
                         : (float)((double)(r >> 11) * 0x1p-53 - 0.5) * (float)(1 + r % 1000);
}

/* Every call has the same input, whatever schedule and slice size it is run with. A rank is late now and then. */
static void same_bits(struct rank_ctx *c)
{
    struct bits *b = c->arg;
    float *in = malloc(BITS_ELEMS * sizeof *in), *out = malloc(BITS_ELEMS * sizeof *out);
    float *wanted = calloc(BITS_ELEMS, sizeof *wanted);
    int n_wrong = 0;
    for (size_t i = 0; i < BITS_ELEMS; i++) {
        for (int r = 0; r < c->n_ranks; r++)
            wanted[i] += value(b->seed, r, i);
        in[i] = value(b->seed, c->rank, i);
    }
    for (int k = 0; k < 250; k++) {
        CHECK_OK(spccl_all_reduce(c->comm, in, out, BITS_ELEMS, SPCCL_FLOAT32, SPCCL_SUM, NULL));
        n_wrong += memcmp(out, wanted, BITS_ELEMS * sizeof *out) != 0;
        if (k % 50 == 7 * c->rank)
            sleep_ms(2);
    }
    CHECK(n_wrong == 0, "rank %d: %d results with other bits", c->rank, n_wrong);
    for (int i = 0; i < SP_TUNER_CELLS && c->rank == 0; i++)
        b->n_trials += (int)c->comm->exec.chooser->tuner->cells[i].n_trials;
    free(in);
    free(out);
    free(wanted);
}

static void test_same_bits(void)
{
    struct rank_ctx ctx[RANKS_CAP];
    spccl_config config = SPCCL_CONFIG_INIT;
    config.timeout_ms = 60000;
    config.transports = "inproc";
    config.schedule = "tune";
    for (int n_ranks = 2; n_ranks <= 4; n_ranks += 2) {
        struct bits b = {.seed = test_rand()};
        run_ranks(n_ranks, &config, same_bits, &b, ctx);
        CHECK(b.n_trials >= 1, "%d trials", b.n_trials);
    }
}

static void test_time_codes(void)
{
    uint32_t last = 0;
    for (int64_t ns = 1; ns < INT64_C(1) << 50; ns += 1 + ns / 1000) {
        uint32_t code = sp_time_code(ns);
        CHECK(code >= last && code < 1u << SP_TIME_CODE_BITS &&
                  fabs(sp_time_of_code(code) - (double)ns) <= 2e-5 * (double)ns,
              "%lld ns: code %u is %g ns", (long long)ns, code, sp_time_of_code(code));
        last = code;
    }
    CHECK(sp_time_code(0) == 0 && sp_time_code(-5) == 0 && sp_time_of_code(0) == 0, "no time");
    CHECK(sp_time_of_code((1u << SP_TIME_CODE_BITS) - 1) == 0, "a code that no time has");
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {
        {"time_codes", test_time_codes},     {"finds_the_best", test_finds_the_best},
        {"costs_little", test_costs_little}, {"profile", test_profile},
        {"same_bits", test_same_bits},       {NULL, NULL},
    };
    return test_main(cases, argc, argv);
}
