/* test_ncclnet_put_faults.c - puts of transport ncclnet: calls into the plugin that fail or do not return, and regions
 * that are closed while puts are under way. */
#include "net_puts.h"

/* The first call for a put, or for its flush, fails or does not return. */
struct fault {
    const char *how, *call; /* "TEST_NET_FAIL" or "TEST_NET_HANG" */
    int rank;               /* where */
};
static const struct fault faults[] = {
    {"TEST_NET_FAIL", "isend", 0},  {"TEST_NET_FAIL", "irecv", 1},  {"TEST_NET_FAIL", "test", 1},
    {"TEST_NET_FAIL", "iflush", 1}, {"TEST_NET_HANG", "isend", 0},  {"TEST_NET_HANG", "irecv", 1},
    {"TEST_NET_HANG", "test", 1},   {"TEST_NET_HANG", "iflush", 1},
};

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
        setenv("TEST_NET_TAG", "1", 1); /* the connection for puts: queue 0 has tag 0 */
        if (hangs)
            setenv("SPCCL_NET_PLUGIN_MS", "3000", 1);
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
    for (int i = 0; i < (int)(sizeof faults / sizeof *faults); i++) {
        struct member m = make_puts(lose_peer);
        m.kind = i;
        m.config.n_puts = 4;
        run_group(&processes, &m);
    }
}

/* Rank 1: the message is here, with its put, and a flush of it is under way. */
static void await_flush_runs(struct member *m, const struct sides *s)
{
    struct sp_nn_peer *p = &sp_nn_self(m->ep)->peers[0];
    int64_t deadline_ns = sp_deadline_in_ms(PATIENCE_MS);
    const void *message = NULL;
    size_t bytes = 0;
    wait_message(m, 0, &message, &bytes);
    while (atomic_load(&p->flush) != SP_NN_FLUSH_RUNS && !sp_deadline_passed(deadline_ns)) {
        CHECK(m->t->puts->flush(m->ep, 0, 0) == SPCCL_AGAIN, "the flush ended");
        (void)progress(m);
    }
    CHECK(s->memory[0] == 0xee && s->memory[63] == 0xee, "the put is not here");
    CHECK_OK(m->t->release(m->ep, 0, 0));
}

/* Rank 1: messages of a peer whose puts cannot come any more. The one without puts is taken. */
static void take_without_puts(struct member *m)
{
    const char *const text = "no puts from rank 0 any more: a region was closed";
    const void *message = NULL;
    int64_t deadline_ns = sp_deadline_in_ms(PATIENCE_MS);
    size_t bytes = 0;
    spccl_status st = take_flushed(m);
    CHECK(st == SPCCL_ERR_PEER && strstr(spccl_last_error(), text) != NULL,
          "a flush in a region that peers cannot reach: %d: %s", (int)st, spccl_last_error());
    CHECK_OK(take_now(m, 0, 0, 100, 7));
    while ((st = m->t->peek(m->ep, 0, 0, &message, &bytes)) == SPCCL_AGAIN &&
           !sp_deadline_passed(deadline_ns))
        (void)progress(m);
    CHECK(st == SPCCL_ERR_PEER && strstr(spccl_last_error(), text) != NULL, "a message after a put: %d: %s",
          (int)st, spccl_last_error());
}

/* Rank 1 closes its region while a flush is under way: the connection ends with it. Messages without puts go on. */
static void closed_early(struct member *m)
{
    struct sides s;
    if (!open_sides(m, &s))
        return;
    if (m->rank == 0) {
        put_one(m, &s);
    } else {
        sp_region_config c = {
            .address = s.memory, .bytes = REGION_BYTES, .dmabuf = -1, .peers_write = true, .flush = true};
        await_flush_runs(m, &s);
        m->t->puts->close_region(m->ep, s.region);
        CHECK(sp_nn_self(m->ep)->peers[0].put_rx.q.comm == NULL, "the plugin may still use the memory");
        CHECK_OK(m->t->puts->open_region(m->ep, &c, &s.region, s.handle));
    }
    barrier(m, 1);
    send_now(m, 1 - m->rank, 0, 100, 7);
    if (m->rank == 0) {
        put_one(m, &s); /* its own connection does not know yet */
        CHECK_OK(take_now(m, 1, 0, 100, 7));
    } else {
        take_without_puts(m);
    }
    barrier(m, 2);
    close_sides(m, &s);
}

/* The same, but the plugin fails to close the connection: it may still use the memory. */
static void not_closed(struct member *m)
{
    struct sides s;
    if (m->rank == 1)
        setenv("TEST_NET_FAIL", "closeRecv", 1);
    if (!open_sides(m, &s))
        return;
    if (m->rank == 0) {
        put_one(m, &s);
        barrier(m, 1);
        close_sides(m, &s);
        return;
    }
    await_flush_runs(m, &s);
    CHECK(!m->t->puts->memory_in_use(m->ep), "memory of an open region is not yet an obstacle");
    m->t->puts->close_region(m->ep, s.region);
    CHECK(m->t->puts->memory_in_use(m->ep), "a connection that could not be closed may use the memory");
    barrier(m, 1);
    m->t->close(m->ep);
    _exit(test_n_failed != 0); /* the plugin has left sockets open */
}

static void with_long_flush(void (*fn)(struct member *))
{
    setenv("TEST_NET_FLUSH_TESTS", "1000000000", 1);
    run_pair(fn);
    unsetenv("TEST_NET_FLUSH_TESTS");
}

static void test_closed_early(void)
{
    with_long_flush(closed_early);
}

static void test_not_closed(void)
{
    with_long_flush(not_closed);
}

/* Rank 0 has two regions. It closes the first while a put from it waits for a receive: the connection ends, and with it
 * the registration of the second. Puts from the second are refused, and closing it calls the plugin no more. */
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
    setenv("SPCCL_NET_PLUGIN_MS", "3000", 1);
    setenv("TEST_NET_HANG", "regMr", 1);
    setenv("TEST_NET_AFTER", "2", 1); /* the rings of the queue come first */
    run_pair(hangs);
    unsetenv("TEST_NET_HANG");
    unsetenv("TEST_NET_AFTER");
    unsetenv("SPCCL_NET_PLUGIN_MS");
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {
        {"lose_peer", test_lose_peer},   {"closed_early", test_closed_early},
        {"not_closed", test_not_closed}, {"two_sources", test_two_sources},
        {"hangs", test_hangs},           {NULL, NULL}};
    setenv("TEST_NET_POINTERS", "3", 1); /* host memory, and what stands for GPU memory */
    check_flushed = check_flush;
    return test_main(cases, argc, argv);
}
