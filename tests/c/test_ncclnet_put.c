/* test_ncclnet_put.c - puts of transport ncclnet: they arrive before their message; plugins with habits and failures; lists
 * that must not be. */
#include "puts.h"
#include "transport/net/ncclnet.h"

static const struct environment processes = {"ncclnet", true};

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
                                        "TEST_NET_DEVICES"};
    static const char *const values[][4] = {
        {"3", NULL, NULL, NULL}, {NULL, "1", "3", NULL}, {"4", "1", NULL, "3"}, {NULL, NULL, NULL, NULL}};
    for (size_t i = 0; i < sizeof values / sizeof *values; i++) {
        struct member m = make_puts(exchange);
        set_habits(names, values[i], 4);
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
    struct member m = make_puts(bad_list);
    m.config.n_puts = 4;
    run_group(&processes, &m);
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

/* A call for a put, or a flush, fails: the rank loses the peer, and names device, call and rank. */
static void fails(struct member *m)
{
    int64_t deadline_ns = sp_deadline_in_ms(PATIENCE_MS);
    struct sides s;
    const void *message = NULL;
    void *space = NULL;
    size_t bytes = 0;
    spccl_status st = SPCCL_OK;
    if (!open_sides(m, &s))
        return;
    if (m->rank == 0) {
        sp_put put = {.from = s.region, .to = s.handle, .bytes = 64};
        CHECK_OK(m->t->reserve(m->ep, 1, 0, 16, &space));
        fill_message(space, 16, 3);
        CHECK_OK(m->t->puts->put(m->ep, 1, 0, &put));
        CHECK_OK(m->t->commit(m->ep, 1, 0, 0));
    } else {
        wait_message(m, 0, &message, &bytes);
        while (((st = m->t->puts->flush(m->ep, 0, 0)) == SPCCL_AGAIN) && !sp_deadline_passed(deadline_ns))
            (void)progress(m);
        CHECK(st == SPCCL_ERR_PEER && strstr(spccl_last_error(), "device sock0") != NULL &&
                  strstr(spccl_last_error(), "iflush for rank 0") != NULL,
              "%d: %s", (int)st, spccl_last_error());
    }
    barrier(m, 1);
    close_sides(m, &s);
}

static void test_fails(void)
{
    struct member m = make_puts(fails);
    m.config.n_puts = 4;
    setenv("TEST_NET_FAIL", "iflush", 1);
    run_group(&processes, &m);
    unsetenv("TEST_NET_FAIL");
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
    barrier(m, 1);
    m->t->close(m->ep);
    _exit(test_n_failed != 0); /* a thread and its buffers are left: the checks for that do not apply */
}

static void test_hangs(void)
{
    struct member m = make_puts(hangs);
    m.config.n_puts = 4;
    setenv("SPCCL_NET_PLUGIN_MS", "1000", 1);
    setenv("TEST_NET_HANG", "regMr", 1);
    setenv("TEST_NET_AFTER", "2", 1); /* the rings of the queue come first */
    run_group(&processes, &m);
    unsetenv("TEST_NET_HANG");
    unsetenv("TEST_NET_AFTER");
    unsetenv("SPCCL_NET_PLUGIN_MS");
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {{"exchange", test_exchange}, {"habits", test_habits},
                                             {"versions", test_versions}, {"bad_put", test_bad_put},
                                             {"bad_list", test_bad_list}, {"one_sided", test_one_sided},
                                             {"refused", test_refused},   {"fails", test_fails},
                                             {"hangs", test_hangs},       {NULL, NULL}};
    setenv("TEST_NET_POINTERS", "3", 1); /* host memory, and what stands for GPU memory */
    check_flushed = check_flush;
    return test_main(cases, argc, argv);
}
