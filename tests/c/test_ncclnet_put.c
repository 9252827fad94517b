/* test_ncclnet_put.c - puts of transport ncclnet: they arrive before their message; plugins with habits; wrong puts and
 * lists. Failures: test_ncclnet_put_faults.c. */
#include "net_puts.h"

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

/* The region that peers write is no source of puts: it is registered with the other connection. */
static void bad_source(struct member *m)
{
    struct sides s;
    if (!open_sides(m, &s))
        return;
    if (m->rank == 0) {
        static uint8_t memory[65536];
        sp_region_config c = {.address = memory, .bytes = sizeof memory, .dmabuf = -1, .peers_write = true};
        uint8_t unused[SP_REGION_HANDLE_BYTES];
        sp_put put = {.to = s.handle, .bytes = 64};
        sp_region *inbox = NULL;
        void *space = NULL;
        CHECK_OK(m->t->puts->open_region(m->ep, &c, &inbox, unused));
        CHECK_OK(m->t->reserve(m->ep, 1, 0, 16, &space));
        put.from = inbox;
        CHECK(m->t->puts->put(m->ep, 1, 0, &put) == SPCCL_ERR_BUG &&
                  strstr(spccl_last_error(), "peers write") != NULL,
              "%s", spccl_last_error());
        fill_message(space, 16, 3);
        CHECK_OK(m->t->commit(m->ep, 1, 0, 0));
        m->t->puts->close_region(m->ep, inbox);
    } else {
        CHECK_OK(take_now(m, 0, 0, 16, 3));
    }
    barrier(m, 1);
    close_sides(m, &s);
}

static void test_bad_source(void)
{
    run_pair(bad_source);
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
                  strstr(spccl_last_error(), "a put of 64 bytes came from rank 0, wanted 128") != NULL &&
                  strstr(spccl_last_error(), "device sock0 port") != NULL,
              "%d: %s", (int)st, spccl_last_error());
    }
    close_sides(m, &s);
}

static void test_wrong_size(void)
{
    run_pair(wrong_size);
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

/* Rank 1 takes nothing for a while, so a put waits for a receive (kind 0), or a ring is full of messages (kind 1). Rank
 * 0's thread must not use its core until then. */
enum { PUT_WAITS, RING_FULL };

/* Send until both rings are full: nothing has left for 100 ms. */
static void fill_rings(struct member *m)
{
    int64_t last_ns = sp_now_ns();
    while (sp_now_ns() - last_ns < INT64_C(100000000)) {
        if (try_send(m, 1, 0, 1000, 3) == SPCCL_OK)
            last_ns = sp_now_ns();
        CHECK_OK(progress(m));
    }
    atomic_store(&m->shared->step, (int)m->n_sent[1][0]);
}

static void waiting(struct member *m)
{
    struct sides s;
    int64_t used_ms;
    if (!open_sides(m, &s))
        return;
    if (m->rank == 0) {
        if (m->kind == PUT_WAITS)
            put_one(m, &s);
        else
            fill_rings(m);
        nanosleep(&(struct timespec){.tv_nsec = 200000000}, NULL);
        used_ms = cpu_ms();
        nanosleep(&(struct timespec){.tv_nsec = 800000000}, NULL);
        used_ms = cpu_ms() - used_ms;
        CHECK(used_ms < 400, "%d ms of CPU time in 800 ms", (int)used_ms);
    }
    barrier(m, 1);
    if (m->rank == 1 && m->kind == PUT_WAITS) {
        CHECK(take_flushed(m) == SPCCL_OK, "%s", spccl_last_error());
        CHECK_OK(take_now(m, 0, 0, 16, 3));
    }
    for (int i = 0; m->rank == 1 && m->kind == RING_FULL && i < atomic_load(&m->shared->step); i++)
        CHECK_OK(take_now(m, 0, 0, 1000, 3));
    flush_now(m, 1 - m->rank);
    barrier(m, 2);
    close_sides(m, &s);
}

static void test_waiting(void)
{
    setenv("TEST_NET_CREDIT", "1", 1);
    for (int kind = PUT_WAITS; kind <= RING_FULL; kind++) {
        struct member m = make_puts(waiting);
        m.kind = kind;
        m.config.n_puts = 4;
        run_group(&processes, &m);
    }
    unsetenv("TEST_NET_CREDIT");
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {
        {"exchange", test_exchange},         {"habits", test_habits},         {"versions", test_versions},
        {"bad_put", test_bad_put},           {"bad_source", test_bad_source}, {"bad_list", test_bad_list},
        {"one_sided", test_one_sided},       {"refused", test_refused},       {"wrong_size", test_wrong_size},
        {"opened_again", test_opened_again}, {"waiting", test_waiting},       {NULL, NULL}};
    setenv("TEST_NET_POINTERS", "3", 1); /* host memory, and what stands for GPU memory */
    check_flushed = check_flush;
    return test_main(cases, argc, argv);
}
