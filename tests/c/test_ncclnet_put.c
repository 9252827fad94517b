/* test_ncclnet_put.c - puts of transport ncclnet: they arrive before their message; plugins with habits and failures; lists
 * that must not be. */
#include "puts.h"
#include "transport/net/ncclnet.h"

static const struct environment processes = {"ncclnet", true};

/* Two ranks, four puts at a time. */
static void run_pair(void (*fn)(struct member *))
{
    struct member m = make_puts(fn);
    m.config.n_puts = 4;
    run_group(&processes, &m);
}

static void check_flush(const struct member *m)
{
    CHECK(sp_nn_self(m->ep)->peers[0].flush_ended != 0, "no flush has ended");
}

/* The habits of a plugin: variables for the next group. */
static void set_habits(const char *const names[], const char *const values[], int n)
{
    for (int i = 0; i < n; i++)
        if (values[i] != NULL)
            setenv(names[i], values[i], 1);
        else
            unsetenv(names[i]);
}

static void test_habits(void)
{
    static const char *const names[] = {"TEST_NET_BUSY", "TEST_NET_CREDIT", "TEST_NET_SLOW",
                                        "TEST_NET_DEVICES", "TEST_NET_FLUSH_TESTS"};
    static const char *const values[][5] = {{"3", NULL, NULL, NULL, "2"},
                                            {NULL, "1", "3", NULL, NULL},
                                            {"4", "1", NULL, "3", "5"},
                                            {NULL, NULL, NULL, NULL, NULL}};
    for (size_t i = 0; i < sizeof values / sizeof *values; i++) {
        struct member m = make_puts(exchange);
        set_habits(names, values[i], 5);
        m.config.n_puts = 16;
        m.kind = 40;
        run_group(&processes, &m);
    }
}

/* Each version of the interface. */
static void test_versions(void)
{
    for (int version = 8; version <= 12; version++) {
        struct member m = make_puts(exchange);
        char path[400];
        snprintf(path, sizeof path, NET_PLUGIN_FOLDER "/libnccl-net-test_%d.so", version);
        setenv("SPCCL_NET_PLUGIN", path, 1);
        m.config.n_puts = 16;
        m.kind = 20;
        run_group(&processes, &m);
    }
    setenv("SPCCL_NET_PLUGIN", NET_PLUGIN_FOLDER "/libnccl-net-test_all.so", 1);
}

/* One rank without puts: neither has them, and messages go on. */
static void one_sided(struct member *m)
{
    m->config.n_puts = m->rank == 0 ? 16 : 0;
    if (!join_group(m))
        return;
    CHECK(!m->t->puts->reaches(m->ep, 1 - m->rank), "rank %d: puts reach the peer", m->rank);
    send_now(m, 1 - m->rank, 0, 3000, 5);
    CHECK_OK(take_now(m, 1 - m->rank, 0, 3000, 5));
    flush_now(m, 1 - m->rank);
    barrier(m, 1);
    leave_group(m);
}

static void test_one_sided(void)
{
    struct member m = make_puts(one_sided);
    run_group(&processes, &m);
}

/* Rank 0 says that a put goes behind rank 1's region. Rank 1 names it, and writes nothing. */
static void bad_list(struct member *m)
{
    int64_t deadline_ns = sp_deadline_in_ms(PATIENCE_MS);
    struct sides s;
    const void *message = NULL;
    void *space = NULL;
    size_t bytes = 0;
    spccl_status st;
    if (!open_sides(m, &s))
        return;
    if (m->rank == 0) {
        sp_put put = {.from = s.region, .to = s.handle, .bytes = 64};
        memset(s.memory, 0xee, REGION_BYTES);
        CHECK_OK(m->t->reserve(m->ep, 1, 0, 16, &space));
        fill_message(space, 16, 3);
        CHECK_OK(m->t->puts->put(m->ep, 1, 0, &put));
        sp_nn_self(m->ep)->peers[1].targets[0].off = REGION_BYTES - 63;
        CHECK_OK(m->t->commit(m->ep, 1, 0, 0));
        CHECK_OK(progress(m));
    } else {
        while ((st = m->t->peek(m->ep, 0, 0, &message, &bytes)) == SPCCL_AGAIN &&
               !sp_deadline_passed(deadline_ns))
            (void)progress(m);
        CHECK(st == SPCCL_ERR_FORMAT && strstr(spccl_last_error(), "rank 0") != NULL, "%d: %s", (int)st,
              spccl_last_error());
        for (size_t i = 0; i < REGION_BYTES; i++)
            if (s.memory[i] != 0) {
                CHECK(false, "byte %zu was written", i);
                break;
            }
    }
    barrier(m, 1);
    close_sides(m, &s);
}

static void test_bad_list(void)
{
    run_pair(bad_list);
}

/* Memory that the plugin does not register, or a plugin that fails: the reason names plugin, call and device. */
static void refused(struct member *m)
{
    static uint8_t memory[65536];
    sp_region_config c = {.address = memory, .bytes = sizeof memory, .dmabuf = m->kind == 1 ? 0 : -1};
    uint8_t handle[SP_REGION_HANDLE_BYTES];
    sp_region *region = NULL;
    spccl_status st;
    if (!join_group(m))
        return;
    st = m->t->puts->open_region(m->ep, &c, &region, handle);
    CHECK(st == SPCCL_ERR_SYSTEM && region == NULL && strstr(spccl_last_error(), "device sock0") != NULL &&
              strstr(spccl_last_error(), m->kind == 1 ? "regMrDmaBuf" : "regMr") != NULL,
          "%d: %s", (int)st, spccl_last_error());
    m->t->puts->close_region(m->ep, NULL);
    CHECK(!m->t->puts->memory_in_use(m->ep), "memory is in use");
    send_now(m, 1 - m->rank, 0, 100, 5); /* messages go on */
    CHECK_OK(take_now(m, 1 - m->rank, 0, 100, 5));
    flush_now(m, 1 - m->rank);
    barrier(m, 1);
    leave_group(m);
}

static void test_refused(void)
{
    for (int kind = 0; kind < 2; kind++) {
        struct member m = make_puts(refused);
        m.kind = kind;
        m.config.n_puts = 4;
        setenv("TEST_NET_POINTERS", kind == 0 ? "1" : "3", 1); /* host memory alone; no dmabuf */
        run_group(&processes, &m);
    }
    setenv("TEST_NET_POINTERS", "3", 1);
}

/* A call for a put, or for its flush, fails or does not return. */
struct fault {
    const char *how, *call; /* "TEST_NET_FAIL" or "TEST_NET_HANG" */
    int rank;               /* where */
    const char *after;      /* calls of that name before it: of the messages */
};
/* Before the put rank 1 has sent one, got one, and posted a receive for each segment. */
static const struct fault faults[] = {
    {"TEST_NET_FAIL", "isend", 0, "0"}, {"TEST_NET_FAIL", "irecv", 1, "16"},
    {"TEST_NET_FAIL", "test", 1, "2"},  {"TEST_NET_FAIL", "iflush", 1, "0"},
    {"TEST_NET_HANG", "isend", 0, "0"}, {"TEST_NET_HANG", "irecv", 1, "16"},
    {"TEST_NET_HANG", "test", 1, "2"},  {"TEST_NET_HANG", "iflush", 1, "0"},
};
_Static_assert(SP_NN_SEGMENTS == 16, "faults[] counts receives");

static void put_one(struct member *m, const struct sides *s)
{
    sp_put put = {.from = s->region, .to = s->handle, .bytes = 64};
    void *space = NULL;
    memset(s->memory, 0xee, 64);
    CHECK_OK(m->t->reserve(m->ep, 1, 0, 16, &space));
    fill_message(space, 16, 3);
    CHECK_OK(m->t->puts->put(m->ep, 1, 0, &put));
    CHECK_OK(m->t->commit(m->ep, 1, 0, 0));
}

/* Until the message is here and flushed, or the peer is lost. armed: sleep in between. A hang wakes nobody. */
static spccl_status await_flushed(struct member *m, bool armed)
{
    int64_t deadline_ns = sp_deadline_in_ms(PATIENCE_MS);
    const void *message = NULL;
    size_t bytes = 0;
    spccl_status st;
    do {
        (void)progress(m);
        st = m->t->peek(m->ep, 1 - m->rank, 0, &message, &bytes);
        if (st == SPCCL_OK)
            st = m->t->puts->flush(m->ep, 1 - m->rank, 0);
        if (st == SPCCL_AGAIN && armed)
            CHECK(sleep_armed(m), "rank %d: nothing woke it", m->rank);
        sched_yield();
    } while (st == SPCCL_AGAIN && !sp_deadline_passed(deadline_ns));
    return st;
}

static spccl_status take_flushed(struct member *m)
{
    return await_flushed(m, true);
}

/* The rank with the fault loses the peer, and names device, call and rank. The other one learns that it has left. No
 * message is shown whose put has not come. */
static void lose_peer(struct member *m)
{
    const struct fault *f = &faults[m->kind];
    bool mine = m->rank == f->rank, hangs = strcmp(f->how, "TEST_NET_HANG") == 0;
    char wanted[60];
    struct sides s;
    spccl_status st;
    if (mine) { /* before the plugin is loaded */
        setenv(f->how, f->call, 1);
        setenv("TEST_NET_AFTER", f->after, 1);
    }
    if (!open_sides(m, &s))
        return;
    if (m->rank == 0)
        put_one(m, &s);
    st = await_flushed(m, !hangs);
    snprintf(wanted, sizeof wanted, "%s for rank %d%s", f->call, 1 - m->rank,
             hangs ? " did not return" : ", puts");
    CHECK(st == SPCCL_ERR_PEER, "rank %d, %s %s: %d: %s", m->rank, f->how, f->call, (int)st,
          spccl_last_error());
    if (mine)
        CHECK(strstr(spccl_last_error(), "device sock0") != NULL &&
                  strstr(spccl_last_error(), wanted) != NULL && strstr(spccl_last_error(), "puts") != NULL,
              "wanted %s: %s", wanted, spccl_last_error());
    if (!mine || !hangs) {
        close_sides(m, &s);
        return;
    }
    m->t->puts->close_region(m->ep, s.region);
    CHECK(m->t->puts->memory_in_use(m->ep), "a plugin that hangs may use the memory");
    m->t->close(m->ep);
    _exit(test_n_failed != 0); /* a thread and its buffers are left: the checks for that do not apply */
}

static void test_lose_peer(void)
{
    setenv("SPCCL_NET_PLUGIN_MS", "1000", 1);
    for (int i = 0; i < (int)(sizeof faults / sizeof *faults); i++) {
        struct member m = make_puts(lose_peer);
        m.kind = i;
        m.config.n_puts = 4;
        run_group(&processes, &m);
    }
    unsetenv("SPCCL_NET_PLUGIN_MS");
}

/* Rank 0 announces a put of 128 bytes and sends 64. */
static void wrong_size(struct member *m)
{
    struct sides s;
    if (!open_sides(m, &s))
        return;
    if (m->rank == 0) {
        sp_put put = {.from = s.region, .to = s.handle, .bytes = 64};
        void *space = NULL;
        CHECK_OK(m->t->reserve(m->ep, 1, 0, 16, &space));
        fill_message(space, 16, 3);
        CHECK_OK(m->t->puts->put(m->ep, 1, 0, &put));
        sp_nn_self(m->ep)->peers[1].targets[0].bytes = 128;
        CHECK_OK(m->t->commit(m->ep, 1, 0, 0));
        CHECK(take_flushed(m) == SPCCL_ERR_PEER, "rank 1 leaves");
    } else {
        spccl_status st = take_flushed(m);
        CHECK(st == SPCCL_ERR_PEER &&
                  strstr(spccl_last_error(), "a put of 64 bytes came from rank 0, wanted 128"),
              "%d: %s", (int)st, spccl_last_error());
    }
    close_sides(m, &s);
}

static void test_wrong_size(void)
{
    run_pair(wrong_size);
}

/* Rank 1 closes its region while a flush is under way: the connection ends with it. Messages go on. */
static void closed_early(struct member *m)
{
    struct sides s;
    if (!open_sides(m, &s))
        return;
    if (m->rank == 0) {
        put_one(m, &s);
    } else {
        struct sp_nn_peer *p = &sp_nn_self(m->ep)->peers[0];
        sp_region_config c = {
            .address = s.memory, .bytes = REGION_BYTES, .dmabuf = -1, .peers_write = true, .flush = true};
        int64_t deadline_ns = sp_deadline_in_ms(PATIENCE_MS);
        const void *message = NULL;
        size_t bytes = 0;
        wait_message(m, 0, &message, &bytes);
        while (atomic_load(&p->flush) != SP_NN_FLUSH_RUNS && !sp_deadline_passed(deadline_ns)) {
            CHECK(m->t->puts->flush(m->ep, 0, 0) == SPCCL_AGAIN, "the flush ended");
            (void)progress(m);
        }
        CHECK(s.memory[0] == 0xee && s.memory[63] == 0xee, "the put is not here");
        CHECK_OK(m->t->release(m->ep, 0, 0));
        m->t->puts->close_region(m->ep, s.region);
        CHECK(p->put_rx.q.comm == NULL, "the plugin may still use the memory");
        CHECK_OK(m->t->puts->open_region(m->ep, &c, &s.region, s.handle));
    }
    send_now(m, 1 - m->rank, 0, 100, 7);
    if (m->rank == 1) {
        spccl_status st = take_flushed(m);
        CHECK(st == SPCCL_ERR_PEER &&
                  strstr(spccl_last_error(), "no puts from rank 0 any more: a region was") != NULL,
              "a flush in a region that peers cannot reach: %d: %s", (int)st, spccl_last_error());
    }
    CHECK_OK(take_now(m, 1 - m->rank, 0, 100, 7));
    flush_now(m, 1 - m->rank);
    barrier(m, 1);
    close_sides(m, &s);
}

static void test_closed_early(void)
{
    setenv("TEST_NET_FLUSH_TESTS", "1000000000", 1);
    run_pair(closed_early);
    unsetenv("TEST_NET_FLUSH_TESTS");
}

/* Rank 0 closes a region while a put from it waits for a receive, and then another one of the same connection. */
static void two_sources(struct member *m)
{
    struct sides s;
    spccl_status st;
    if (!open_sides(m, &s))
        return;
    if (m->rank == 0) {
        sp_region_config c = {.address = s.memory, .bytes = REGION_BYTES, .dmabuf = -1};
        sp_put put = {.from = s.region, .to = s.handle, .bytes = 64};
        uint8_t handle[SP_REGION_HANDLE_BYTES];
        sp_region *other = NULL;
        void *space = NULL;
        CHECK_OK(m->t->puts->open_region(m->ep, &c, &other, handle));
        put_one(m, &s);
        m->t->puts->close_region(m->ep, s.region);
        CHECK(sp_nn_self(m->ep)->peers[1].put_tx.q.comm == NULL, "the plugin may still read the memory");
        put.from = other;
        CHECK_OK(m->t->reserve(m->ep, 1, 0, 16, &space));
        CHECK(m->t->puts->put(m->ep, 1, 0, &put) == SPCCL_ERR_PEER &&
                  strstr(spccl_last_error(), "no puts to rank 1 any more: a region was closed") != NULL,
              "%s", spccl_last_error());
        s.region = other;
    }
    barrier(m, 1);
    st = await_flushed(m, m->rank == 1);
    CHECK(m->rank == 0 || (st == SPCCL_ERR_PEER && strstr(spccl_last_error(), "rank 0") != NULL), "%d: %s",
          (int)st, spccl_last_error());
    close_sides(m, &s);
}

static void test_two_sources(void)
{
    setenv("TEST_NET_CREDIT", "1", 1);
    run_pair(two_sources);
    unsetenv("TEST_NET_CREDIT");
}

/* A second region after the first: a flush before its first put is no flush of the old one's memory. */
static void opened_again(struct member *m)
{
    struct sides s;
    const void *message = NULL;
    size_t bytes = 0;
    if (!open_sides(m, &s))
        return;
    if (m->rank == 0) {
        put_one(m, &s);
        send_now(m, 1, 0, 32, 4);
    } else {
        sp_region_config c = {
            .address = s.memory, .bytes = REGION_BYTES, .dmabuf = -1, .peers_write = true, .flush = true};
        CHECK(take_flushed(m) == SPCCL_OK, "%s", spccl_last_error());
        CHECK_OK(take_now(m, 0, 0, 16, 3));
        m->t->puts->close_region(m->ep, s.region);
        CHECK_OK(m->t->puts->open_region(m->ep, &c, &s.region, s.handle));
        wait_message(m, 0, &message, &bytes);
        CHECK(take_flushed(m) == SPCCL_OK, "%s", spccl_last_error());
        CHECK_OK(take_now(m, 0, 0, 32, 4));
    }
    flush_now(m, 1 - m->rank);
    barrier(m, 1);
    close_sides(m, &s);
}

static void test_opened_again(void)
{
    run_pair(opened_again);
}

static int64_t cpu_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

/* Rank 1 posts no receive for a while. Rank 0's thread must not use its core until then. */
static void waiting(struct member *m)
{
    struct sides s;
    int64_t used_ms;
    if (!open_sides(m, &s))
        return;
    if (m->rank == 0) {
        put_one(m, &s);
        nanosleep(&(struct timespec){.tv_nsec = 200000000}, NULL);
        used_ms = cpu_ms();
        nanosleep(&(struct timespec){.tv_nsec = 800000000}, NULL);
        used_ms = cpu_ms() - used_ms;
        CHECK(used_ms < 400, "%d ms of CPU time in 800 ms", (int)used_ms);
    }
    barrier(m, 1);
    if (m->rank == 1) {
        CHECK(take_flushed(m) == SPCCL_OK, "%s", spccl_last_error());
        CHECK_OK(take_now(m, 0, 0, 16, 3));
    }
    flush_now(m, 1 - m->rank);
    barrier(m, 2);
    close_sides(m, &s);
}

static void test_waiting(void)
{
    setenv("TEST_NET_CREDIT", "1", 1);
    run_pair(waiting);
    unsetenv("TEST_NET_CREDIT");
}

/* The registration of a region does not return: the rank says which call, and goes on to close. */
static void hangs(struct member *m)
{
    static uint8_t memory[65536];
    sp_region_config c = {.address = memory, .bytes = sizeof memory, .dmabuf = -1};
    uint8_t handle[SP_REGION_HANDLE_BYTES];
    const void *message;
    size_t bytes;
    sp_region *region = NULL;
    spccl_status st;
    if (!join_group(m))
        return;
    st = m->t->puts->open_region(m->ep, &c, &region, handle);
    CHECK(st == SPCCL_ERR_SYSTEM && region == NULL && strstr(spccl_last_error(), "regMr for rank") != NULL &&
              strstr(spccl_last_error(), "did not return") != NULL,
          "%d: %s", (int)st, spccl_last_error());
    st = m->t->peek(m->ep, 1 - m->rank, 0, &message, &bytes);
    CHECK(st == SPCCL_ERR_PEER && strstr(spccl_last_error(), "regMr for rank") != NULL, "peek: %d: %s",
          (int)st, spccl_last_error());
    CHECK(m->t->puts->memory_in_use(m->ep),
          "a plugin that hangs may use memory of a region that it never opened");
    barrier(m, 1);
    m->t->close(m->ep);
    _exit(test_n_failed != 0); /* a thread and its buffers are left: the checks for that do not apply */
}

static void test_hangs(void)
{
    setenv("SPCCL_NET_PLUGIN_MS", "1000", 1);
    setenv("TEST_NET_HANG", "regMr", 1);
    setenv("TEST_NET_AFTER", "2", 1); /* the rings of the queue come first */
    run_pair(hangs);
    unsetenv("TEST_NET_HANG");
    unsetenv("TEST_NET_AFTER");
    unsetenv("SPCCL_NET_PLUGIN_MS");
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {{"exchange", test_exchange},
                                             {"habits", test_habits},
                                             {"versions", test_versions},
                                             {"bad_put", test_bad_put},
                                             {"bad_list", test_bad_list},
                                             {"one_sided", test_one_sided},
                                             {"refused", test_refused},
                                             {"lose_peer", test_lose_peer},
                                             {"wrong_size", test_wrong_size},
                                             {"closed_early", test_closed_early},
                                             {"opened_again", test_opened_again},
                                             {"two_sources", test_two_sources},
                                             {"waiting", test_waiting},
                                             {"hangs", test_hangs},
                                             {NULL, NULL}};
    setenv("TEST_NET_POINTERS", "3", 1); /* host memory, and what stands for GPU memory */
    check_flushed = check_flush;
    return test_main(cases, argc, argv);
}
