/* test_disagree.c - ranks call different collectives: all of them fail soon, and an error text has both
 * calls. Ranks that are ahead of others do not count as different, also where the numbers of calls wrap around. */
#include "core/run/comm.h"
#include "scene.h"

enum { SIZES, DTYPES, OPS, COLLS, ROOTS, SCHEDULES, N_DISAGREEMENTS };

static void disagree(struct rank_ctx *c)
{
    const struct scene *s = c->arg;
    int odd = c->rank == 1;
    size_t n = s->kind == SIZES && odd ? 2000 : 1000;
    spccl_dtype t = s->kind == DTYPES && odd ? SPCCL_INT32 : SPCCL_FLOAT32;
    spccl_redop op = s->kind == OPS && odd ? SPCCL_MAX : SPCCL_SUM;
    float *in = calloc(3000, sizeof *in), *out = calloc(3 * 3000, sizeof *out);
    int64_t start = now_ms();
    spccl_status st = SPCCL_OK;
    for (size_t i = 0; i < 3000; i++)
        in[i] = (float)i;
    if (s->kind == SCHEDULES) {
        c->comm->schedule_forced = true; /* as SPCCL_SCHEDULE does */
        c->comm->schedule = odd ? SP_SCHED_RELAYED : SP_SCHED_DIRECT;
    }
    if (s->kind == ROOTS)
        st = spccl_broadcast(c->comm, in, n, t, c->rank == 1 ? 1 : 0, NULL);
    if (s->kind == ROOTS && st == SPCCL_OK) /* a root does not wait for peers: the next collective fails */
        st = spccl_all_reduce(c->comm, in, out, n, t, op, NULL);
    if (s->kind == COLLS && odd)
        st = spccl_all_gather(c->comm, in, out, n, t, NULL);
    else if (s->kind != ROOTS)
        st = spccl_all_reduce(c->comm, in, out, n, t, op, NULL);
    note(c, st, start);
    free(in);
    free(out);
}

static void test_disagreement(void)
{
    static const char *const wanted[N_DISAGREEMENTS][2] = {{"1000 float32", "2000 float32"},
                                                           {"1000 float32", "1000 int32"},
                                                           {"sum", "max"},
                                                           {"all_reduce", "all_gather"},
                                                           {"root 0", "root 1"},
                                                           {"direct at rank", "relayed at rank"}};
    for (int kind = 0; kind < N_DISAGREEMENTS; kind++) {
        struct scene s = {.kind = kind};
        int n_named = 0;
        run_scene(3, 20000, "inproc", disagree, &s);
        for (int r = 0; r < 3; r++) {
            bool named = has(s.out[r].text, wanted[kind][0]) && has(s.out[r].text, wanted[kind][1]);
            CHECK(s.out[r].st != SPCCL_OK, "kind %d: rank %d did not notice", kind, r);
            CHECK(s.out[r].took_ms < SOON_MS, "kind %d: rank %d took %lld ms", kind, r,
                  (long long)s.out[r].took_ms);
            n_named += named;
        }
        CHECK(n_named >= 1, "kind %d: no text names both calls: \"%s\" | \"%s\" | \"%s\"", kind,
              s.out[0].text, s.out[1].text, s.out[2].text);
    }
}

/* ---- every pair of schedules ---- */

struct schedules {
    struct scene scene; /* first: note() takes it */
    sp_schedule most, odd;
    int odd_rank, call;
    size_t n;
};

static void other_schedule(struct rank_ctx *c)
{
    const struct schedules *s = c->arg;
    size_t n = s->n, all = n * (size_t)c->n_ranks;
    float *in = calloc(all, sizeof *in), *out = calloc(all, sizeof *out);
    int64_t start = now_ms();
    spccl_status st;
    for (size_t i = 0; i < all; i += 3)
        in[i] = 1.0f;
    c->comm->schedule_forced = true; /* as SPCCL_SCHEDULE does */
    c->comm->schedule = c->rank == s->odd_rank ? s->odd : s->most;
    if (s->call == 0)
        st = spccl_all_reduce(c->comm, in, out, n, SPCCL_FLOAT32, SPCCL_SUM, NULL);
    else if (s->call == 1)
        st = spccl_reduce_scatter(c->comm, in, out, n, SPCCL_FLOAT32, SPCCL_SUM, NULL);
    else
        st = spccl_all_gather(c->comm, in, out, n, SPCCL_FLOAT32, NULL);
    if (st == SPCCL_OK) /* a rank that needs nothing more of the others learns it in its next call */
        st = spccl_all_reduce(c->comm, in, out, n, SPCCL_FLOAT32, SPCCL_SUM, NULL);
    note(c, st, start);
    free(in);
    free(out);
}

static void check_schedules(struct schedules *s)
{
    run_scene(3, 20000, "inproc", other_schedule, &s->scene);
    for (int r = 0; r < 3; r++) {
        const struct outcome *o = &s->scene.out[r];
        CHECK(o->st == SPCCL_ERR_MISMATCH || o->st == SPCCL_ERR_ABORTED,
              "%s, %s on rank %d, call %d of %zu: rank %d got %d \"%s\"", sp_schedule_name(s->most),
              sp_schedule_name(s->odd), s->odd_rank, s->call, s->n, r, (int)o->st, o->text);
        CHECK(has(o->text, "disagree on the schedule") && has(o->text, sp_schedule_name(s->most)) &&
                  has(o->text, sp_schedule_name(s->odd)),
              "%s, %s on rank %d, call %d of %zu: rank %d: \"%s\"", sp_schedule_name(s->most),
              sp_schedule_name(s->odd), s->odd_rank, s->call, s->n, r, o->text);
        CHECK(o->took_ms < SOON_MS, "rank %d took %lld ms", r, (long long)o->took_ms);
    }
}

/* All ranks get an error that names both schedules: MISMATCH where it is seen, ABORTED on the others. */
static void test_schedules(void)
{
    static const size_t sizes[] = {1, 1000, 100000};
    for (int most = 0; most < SP_N_SCHEDULES; most++)
        for (int odd = 0; odd < SP_N_SCHEDULES; odd++)
            for (int i = 0; i < 9 && most != odd; i++) {
                struct schedules s = {.most = (sp_schedule)most,
                                      .odd = (sp_schedule)odd,
                                      .odd_rank = i % 3,
                                      .call = i / 3,
                                      .n = sizes[(i + most) % 3]};
                /* The last rank of a ring that owns nothing sends only what it receives. SPCCL_SCHEDULE is compared when
                 * the group is made: test_settings_differ. */
                if (s.n == 1 && (s.most == SP_SCHED_RING || s.odd == SP_SCHED_RING))
                    continue;
                if (s.call != 0 && (!sp_schedule_has(s.most, SP_REDUCE_SCATTER) ||
                                    !sp_schedule_has(s.odd, SP_REDUCE_SCATTER)))
                    continue; /* without the collective the setting does not count */
                check_schedules(&s);
            }
}

static int odd_rank;

static void odd_config(const struct rank_ctx *c, spccl_config *config)
{
    config->schedule = c->rank == odd_rank ? "ring" : odd_rank == 2 ? "direct" : NULL;
}

static void nothing(struct rank_ctx *c)
{
    (void)c;
}

/* A rank that asks for another schedule: no rank gets a group, and each names both schedules. */
static void test_settings_differ(void)
{
    struct rank_ctx ctx[3];
    spccl_config config = SPCCL_CONFIG_INIT;
    config.timeout_ms = 20000;
    test_rank_config = odd_config;
    for (odd_rank = 0; odd_rank < 3; odd_rank++) {
        int64_t start = now_ms();
        run_ranks(3, &config, nothing, NULL, ctx);
        for (int r = 0; r < 3; r++)
            CHECK(ctx[r].created == SPCCL_ERR_MISMATCH && has(ctx[r].error, "ring") &&
                      has(ctx[r].error, odd_rank == 2 ? "direct" : "auto"),
                  "rank %d of 3, odd %d: %d \"%s\"", r, odd_rank, (int)ctx[r].created, ctx[r].error);
        CHECK(now_ms() - start < SOON_MS, "took %lld ms", (long long)(now_ms() - start));
    }
    test_rank_config = NULL;
}

/* ---- a rank finds the mismatch only after its own call has returned ---- */

/* Rank 0 calls a broadcast with another root than rank 1. On a busy machine, rank 0 may send after rank 1's
 * call has returned, and may not read rank 1's messages. This function makes that order happen. */
static void send_late(struct rank_ctx *c, sp_coll coll, float *buf, size_t n, uint32_t seq)
{
    sp_coll_args a = {.coll = coll,
                      .in = buf,
                      .out = buf,
                      .n_elems = n,
                      .dtype = SPCCL_FLOAT32,
                      .is_forced = true,
                      .schedule = SP_SCHED_ONESHOT,
                      .slice_elems = c->comm->slice_bytes / sizeof(float),
                      .timeout_ms = 20000};
    bool progressed;
    sp_op *op = NULL;
    CHECK_OK(sp_op_create(&a, c->n_ranks, &op));
    op->seq = seq;
    sp_exec_add(&c->comm->exec, op); /* no thread drives the executor while no collective runs */
    CHECK_OK(sp_exec_pass(&c->comm->exec, &progressed));
    CHECK(progressed, "nothing was sent");
}

static void late(struct rank_ctx *c)
{
    struct scene *s = c->arg;
    float buf[1000] = {0};
    spccl_status st;
    int64_t start = now_ms();
    if (c->rank == 0) {
        while (atomic_load(&s->n_done) == 0)
            sleep_ms(1);
        send_late(c, SP_BROADCAST, buf, 1000, c->comm->next_seq);
        while (atomic_load(&s->n_done) == 1)
            sleep_ms(1);
        return;
    }
    for (int i = 0; i < s->kind; i++)
        CHECK_OK(spccl_broadcast(c->comm, buf, 1000, SPCCL_FLOAT32, 1, NULL)); /* a root does not wait */
    atomic_store(&s->n_done, 1);
    st = spccl_all_reduce(c->comm, buf, buf, 1000, SPCCL_FLOAT32, SPCCL_SUM, NULL);
    note(c, st, start);
    atomic_store(&s->n_done, 2);
}

/* Rank 1 makes n_calls calls, and the first does not match rank 0's. The text names that call if it is one of
 * the last SP_EXEC_PAST. */
static void test_late_message(void)
{
    static const int n_calls[] = {1, SP_EXEC_PAST, SP_EXEC_PAST + 1, 40};
    for (int i = 0; i < 4; i++) {
        struct scene s = {.kind = n_calls[i]};
        const char *text = s.out[1].text;
        char ours[80];
        run_scene(2, 20000, "inproc", late, &s);
        if (n_calls[i] <= SP_EXEC_PAST)
            snprintf(ours, sizeof ours, "rank 1 called broadcast #0 (1000 float32, root 1)");
        else
            snprintf(ours, sizeof ours, "rank 1 called all_reduce #%d (1000 float32, sum)", n_calls[i]);
        CHECK(s.out[1].st == SPCCL_ERR_MISMATCH, "%d calls: %d \"%s\"", n_calls[i], (int)s.out[1].st, text);
        CHECK(has(text, "rank 0 called broadcast #0 (1000 float32, root 0)"), "%d calls: \"%s\"", n_calls[i],
              text);
        CHECK(has(text, ours), "%d calls: \"%s\"", n_calls[i], text);
    }
}

/* ---- the numbers of calls wrap around ---- */

#define N_AHEAD 6

static void start_at(struct rank_ctx *c, uint32_t seq)
{
    pthread_mutex_lock(&c->comm->mu);
    c->comm->next_seq = seq;
    pthread_mutex_unlock(&c->comm->mu);
}

/* Rank 0 has made all its calls before rank 1 makes its first. Rank 2 is late each time, so that rank 1 looks at what
 * rank 0 sent for later calls while it waits, and again when each of its calls ends. */
static void ahead(struct rank_ctx *c)
{
    struct scene *s = c->arg;
    uint8_t all[N_AHEAD][3], mine = (uint8_t)c->rank;
    spccl_request *req[N_AHEAD] = {NULL};
    start_at(c, UINT32_MAX - N_AHEAD / 2);
    for (int i = 0; c->rank != 0 && i < 20000 && atomic_load(&s->n_done) == 0; i++)
        sleep_ms(1);
    for (int i = 0; i < N_AHEAD; i++) {
        if (c->rank == 2)
            sleep_ms(20);
        CHECK_OK(spccl_all_gather(c->comm, &mine, all[i], 1, SPCCL_UINT8, c->rank == 0 ? &req[i] : NULL));
    }
    atomic_store(&s->n_done, 1);
    for (int i = 0; c->rank == 0 && i < N_AHEAD; i++) {
        CHECK_OK(spccl_request_wait(req[i], -1));
        spccl_request_free(req[i]);
    }
    for (int i = 0; i < N_AHEAD; i++)
        CHECK(all[i][c->n_ranks - 1] == c->n_ranks - 1, "rank %d, call %d: %u", c->rank, i,
              all[i][c->n_ranks - 1]);
}

/* Rank 0 sends a message of a call that has ended, and whose number is the last before 0. */
static void sends_again(struct rank_ctx *c)
{
    struct scene *s = c->arg;
    float x = 1;
    int64_t start = now_ms();
    c->comm->schedule_forced = true;
    c->comm->schedule = SP_SCHED_ONESHOT;
    start_at(c, UINT32_MAX);
    CHECK_OK(spccl_all_reduce(c->comm, &x, &x, 1, SPCCL_FLOAT32, SPCCL_SUM, NULL));
    atomic_fetch_add(&s->n_done, 1);
    while (atomic_load(&s->n_done) < 2 + (c->rank == 1)) /* rank 0 sends once both calls have ended */
        sleep_ms(1);
    if (c->rank == 0) {
        send_late(c, SP_ALL_REDUCE, &x, 1, UINT32_MAX);
        atomic_store(&s->n_done, 3);
        while (atomic_load(&s->n_done) < 4)
            sleep_ms(1);
        return;
    }
    note(c, spccl_all_reduce(c->comm, &x, &x, 1, SPCCL_FLOAT32, SPCCL_SUM, NULL), start);
    atomic_store(&s->n_done, 4);
}

static void test_numbers_wrap(void)
{
    struct scene s = {.kind = 0};
    for (int n = 2; n <= 3; n++) {
        atomic_store(&s.n_done, 0);
        run_scene(n, 20000, "inproc", ahead, &s);
    }
    atomic_store(&s.n_done, 0);
    run_scene(2, 20000, "inproc", sends_again, &s);
    CHECK(s.out[1].st == SPCCL_ERR_MISMATCH &&
              has(s.out[1].text, "rank 0 sent more messages of all_reduce #4294967295"),
          "%d \"%s\"", (int)s.out[1].st, s.out[1].text);
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {
        {"disagreement", test_disagreement},       {"schedules", test_schedules},
        {"settings_differ", test_settings_differ}, {"late_message", test_late_message},
        {"numbers_wrap", test_numbers_wrap},       {NULL, NULL},
    };
    setenv("SPCCL_LOG", "off", 1); /* the tests cause these failures */
    return test_main(cases, argc, argv);
}
