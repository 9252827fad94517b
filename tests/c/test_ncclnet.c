/* test_ncclnet.c - transport ncclnet over the plugin of net_plugin/: every version, every habit of real plugins that
 * the plugin can take on, and every way to fail. Each case runs two ranks as processes. */
#include "captured_log.h"
#include "endpoints.h"
#include "transport/net/plugin/plugin.h"
#include "transport/net/tcp/tcp.h"

#define N_MESSAGES 60

enum outcome {
    WORKS,   /* messages go over the plugin */
    REFUSED, /* the plugin does not carry the pair: an error, or tcp if that is allowed */
    LOST     /* the pair breaks after start-up, with an error at both ranks */
};

static const struct scenario {
    const char *file; /* libnccl-net-test_FILE.so */
    enum outcome outcome;
    int rank;             /* whose environment gets `vars`; -1: both */
    const char *vars[4];  /* "NAME=VALUE" */
    const char *words[2]; /* in the error of that rank */
    bool hangs;           /* a thread is left behind */
} scenarios[] = {
    /* versions */
    {"8", WORKS, -1, {NULL}, {"v8"}, false},
    {"9", WORKS, -1, {NULL}, {"v9"}, false},
    {"10", WORKS, -1, {NULL}, {"v10"}, false},
    {"11", WORKS, -1, {NULL}, {"v11"}, false},
    {"12", WORKS, -1, {NULL}, {"v12"}, false},
    {"all", WORKS, -1, {NULL}, {"v12"}, false},
    {"7",
     REFUSED,
     0,
     {NULL},
     {"plugin libnccl-net-test_7.so: it exports none of ncclNetPlugin_v8", "too old"},
     false},
    /* habits */
    {"all", WORKS, -1, {"TEST_NET_BUSY=2"}, {NULL}, false},
    {"8", WORKS, -1, {"TEST_NET_BUSY=3", "TEST_NET_CREDIT=1"}, {NULL}, false},
    {"all", WORKS, -1, {"TEST_NET_SLOW=7"}, {NULL}, false},
    {"all", WORKS, -1, {"TEST_NET_CREDIT=1"}, {NULL}, false},
    {"all", WORKS, -1, {"TEST_NET_LOG=1"}, {NULL}, false},
    {"all", WORKS, -1, {"TEST_NET_ENV=1"}, {NULL}, false},
    {"all", WORKS, -1, {"TEST_NET_DEVICES=4", "TEST_NET_SPEED=1000"}, {"sock1"}, false},
    {"9", WORKS, -1, {"TEST_NET_DEVICES=64"}, {NULL}, false},
    {"all", WORKS, 0, {"TEST_NET_DEVICES=3"}, {NULL}, false},
    {"all", WORKS, -1, {"TEST_NET_FAIL=deregMr"}, {NULL}, false},
    {"all", WORKS, -1, {"TEST_NET_FAIL=closeListen"}, {NULL}, false},
    {"all", WORKS, -1, {"TEST_NET_HANG=closeSend"}, {NULL}, true},
    /* not usable */
    {"all", REFUSED, 0, {"TEST_NET_DEVICES=0"}, {"no device"}, false},
    {"12", REFUSED, 0, {"TEST_NET_DEVICES=-3"}, {"no device"}, false},
    {"all", REFUSED, 1, {"TEST_NET_COMMS=3"}, {"3 connections", "4"}, false},
    {"all", REFUSED, 0, {"TEST_NET_NAME=Another"}, {"Another", "Test Sockets"}, false},
    {"all", REFUSED, 0, {"TEST_NET_FAIL=init"}, {"init returned 2", "no link on any port"}, false},
    {"all", REFUSED, 0, {"TEST_NET_FAIL=devices"}, {"devices returned 2", "system error"}, false},
    {"all", REFUSED, 1, {"TEST_NET_FAIL=getProperties"}, {"getProperties returned 2"}, false},
    {"all", REFUSED, 0, {"TEST_NET_CRASH=init"}, {"crashed in init", "signal 11"}, false},
    {"all", REFUSED, 1, {"TEST_NET_CRASH=devices"}, {"crashed in devices"}, false},
    {"all", REFUSED, 0, {"TEST_NET_HANG=init"}, {"init did not return"}, false},
    {"all", REFUSED, 0, {"TEST_NET_FAIL=listen"}, {"device sock0", "listen for rank 1"}, false},
    {"all", REFUSED, 0, {"TEST_NET_FAIL=connect"}, {"device sock0", "connect for rank 1"}, false},
    {"all", REFUSED, 1, {"TEST_NET_FAIL=accept"}, {"device sock0", "accept for rank 0"}, false},
    {"all",
     REFUSED,
     0,
     {"TEST_NET_FAIL=regMr", "TEST_NET_AFTER=2"},
     {"device sock0", "regMr for rank 1"},
     false},
    {"all", REFUSED, 0, {"TEST_NET_HANG=connect"}, {"connect for rank 1 did not return"}, true},
    {"all", REFUSED, 1, {"TEST_NET_HANG=regMr"}, {"regMr for rank 0 did not return"}, true},
    {"all",
     REFUSED,
     0,
     {"TEST_NET_SLOW=100000000"},
     {"device sock0", "no connection with rank 1 in time"},
     false},
    /* in the process that loads it, after the child has said that it works */
    {"all",
     REFUSED,
     0,
     {"TEST_NET_HANG=init", "TEST_NET_PID=self"},
     {"did not load, or did not listen, in time"},
     true},
    {"all",
     REFUSED,
     1,
     {"TEST_NET_DELAY=3500", "TEST_NET_FAIL=init", "TEST_NET_PID=self"},
     {"did not load, or did not listen, in time"},
     true},
    /* after start-up */
    {"all",
     LOST,
     0,
     {"TEST_NET_FAIL=isend", "TEST_NET_AFTER=5"},
     {"device sock0", "isend for rank 1"},
     false},
    {"8", LOST, 1, {"TEST_NET_FAIL=irecv", "TEST_NET_AFTER=40"}, {"device sock0", "irecv for rank 0"}, false},
    {"all", LOST, 0, {"TEST_NET_FAIL=test", "TEST_NET_AFTER=50"}, {"test for rank 1", "remote error"}, false},
    {"all", LOST, 0, {"TEST_NET_SIZE=0"}, {"a segment of 0 bytes"}, false},
    {"all", LOST, 0, {"TEST_NET_SIZE=24"}, {"a segment of 24 bytes"}, false},
    {"all", LOST, 0, {"TEST_NET_SIZE=1048576"}, {"a segment of 1048576 bytes"}, false},
    {"all", LOST, 1, {"TEST_NET_HANG=test", "TEST_NET_AFTER=50"}, {"test for rank 0 did not return"}, true},
    {"all", LOST, 0, {"TEST_NET_HANG=isend", "TEST_NET_AFTER=5"}, {"isend for rank 1 did not return"}, true},
};
#define N_SCENARIOS (sizeof scenarios / sizeof *scenarios)

/* A plugin of SPCCL_TEST_PLUGINS: any name, any version. */
#define REAL (-1)
static const struct scenario real_plugin = {"", WORKS, -1, {NULL}, {NULL}, false};

static void set_variables(const struct scenario *s, int rank)
{
    char text[128];
    setenv("TEST_NET_KEPT", "kept", 1);
    for (int i = 0; i < 4 && s->vars[i] != NULL && (s->rank < 0 || s->rank == rank); i++) {
        snprintf(text, sizeof text, "%s", s->vars[i]);
        text[strcspn(text, "=")] = '\0';
        setenv(text, s->vars[i] + strlen(text) + 1, 1);
        if (strcmp(text, "TEST_NET_PID") == 0) {
            snprintf(text, sizeof text, "%d", (int)getpid());
            setenv("TEST_NET_PID", text, 1);
        }
    }
}

/* True if the case ends by a deadline. */
static bool takes_time(const struct scenario *s)
{
    return s->vars[0] != NULL && (strstr(s->vars[0], "HANG") != NULL || strstr(s->vars[0], "SLOW") != NULL ||
                                  strstr(s->vars[0], "DELAY") != NULL);
}

static void check_words(const struct scenario *s, const char *text)
{
    for (int i = 0; i < 2 && s->words[i] != NULL; i++)
        CHECK(strstr(text, s->words[i]) != NULL, "\"%s\" is not in: %s", s->words[i], text);
}

static size_t size_of(const struct member *m, uint64_t i)
{
    return i % 9 == 0 ? m->t->message_max(m->ep) - i : 1 + (i * 977) % 3000;
}

/* Messages both ways on both queues. */
static void exchange(struct member *m)
{
    int peer = 1 - m->rank, n_sent = 0, n_taken = 0;
    int64_t deadline_ns = sp_deadline_in_ms(PATIENCE_MS);
    while ((n_sent < N_MESSAGES || n_taken < N_MESSAGES) && !sp_deadline_passed(deadline_ns)) {
        uint64_t out = (uint64_t)n_sent, in = (uint64_t)n_taken;
        n_sent += n_sent < N_MESSAGES && try_send(m, peer, n_sent % 2, size_of(m, out), out) == SPCCL_OK;
        n_taken += n_taken < N_MESSAGES && try_take(m, peer, n_taken % 2, size_of(m, in), in) == SPCCL_OK;
        CHECK_OK(progress(m));
        sched_yield();
    }
    CHECK(n_sent == N_MESSAGES && n_taken == N_MESSAGES, "%d sent, %d taken", n_sent, n_taken);
    flush_now(m, peer);
}

/* Send and take until the pair breaks. Returns the status. */
static spccl_status exchange_until_lost(struct member *m)
{
    int64_t deadline_ns = sp_deadline_in_ms(PATIENCE_MS);
    int peer = 1 - m->rank;
    spccl_status st = SPCCL_OK;
    while ((st == SPCCL_OK || st == SPCCL_AGAIN) && !sp_deadline_passed(deadline_ns)) {
        const void *p;
        size_t bytes;
        st = try_send(m, peer, 0, 4000, 1);
        if (st != SPCCL_OK && st != SPCCL_AGAIN)
            break; /* before another call replaces the text */
        CHECK_OK(progress(m));
        st = m->t->peek(m->ep, peer, 0, &p, &bytes);
        if (st == SPCCL_OK)
            st = m->t->release(m->ep, peer, 0);
        if (st == SPCCL_AGAIN) /* a call that hangs takes a second */
            usleep(200);
    }
    return st;
}

static void check_route(struct member *m, const struct scenario *s, const char *start)
{
    char text[400];
    describe_peer(m, 1 - m->rank, text, sizeof text);
    CHECK(strncmp(text, start, strlen(start)) == 0, "%s", text);
    if (s->outcome == WORKS)
        check_words(s, text);
}

static void play_lost(struct member *m, const struct scenario *s)
{
    char text[800];
    spccl_status st = exchange_until_lost(m);
    snprintf(text, sizeof text, "%s", spccl_last_error());
    CHECK(st == SPCCL_ERR_PEER && strstr(text, m->rank == 0 ? "rank 1" : "rank 0") != NULL, "%d: %s", (int)st,
          text);
    if (m->rank == s->rank)
        check_words(s, text);
}

/* Transport ib of this process may use the card of a plugin's device. */
static void check_card_is_free(const char *name)
{
    const char *holder = NULL;
    sp_nic card;
    memset(&card, 0, sizeof card);
    snprintf(card.names[0], sizeof card.names[0], "%s", name);
    CHECK(sp_nic_take("ib", &card, &holder), "%s kept %s", holder, name);
    sp_nic_give_back("ib", &card);
}

static void play(struct member *m)
{
    const struct scenario *s = m->kind == REAL ? &real_plugin : &scenarios[m->kind];
    const char *fine = m->kind == REAL ? "ncclnet: plugin" : "ncclnet: plugin Test Sockets";
    int64_t start_ns;
    spccl_status st;
    set_variables(s, m->rank);
    m->config.deadline_ns = sp_deadline_in_ms(takes_time(s) && s->outcome == REFUSED ? 5000 : PATIENCE_MS);
    if (takes_time(s) && s->outcome != WORKS)
        setenv("SPCCL_DEBUG_NET_PLUGIN_MS", "1000", 1);
    if (!open_member(m))
        return;
    st = connect_member(m);
    CHECK(getenv("TEST_NET_ADDED") == NULL && getenv("NCCL_PROTO") == NULL && getenv("TEST_NET_KEPT") != NULL,
          "the plugin's changes of the environment stayed");
    if (s->outcome == REFUSED && !m->tcp_too) {
        CHECK(st == SPCCL_ERR_UNREACHABLE && strstr(spccl_last_error(), "tcp is not among") != NULL, "%d: %s",
              (int)st, spccl_last_error());
        if (m->rank == s->rank)
            check_words(s, spccl_last_error());
    } else {
        CHECK(st == SPCCL_OK, "case %d: rank %d: %s", m->kind, m->rank, spccl_last_error());
        if (st == SPCCL_OK) {
            check_route(m, s, s->outcome == REFUSED ? "tcp, as the plugin failed" : fine);
            if (s->outcome == LOST)
                play_lost(m, s);
            else
                exchange(m);
        }
    }
    start_ns = sp_now_ns();
    leave_group(m);
    CHECK(sp_now_ns() - start_ns < PATIENCE_MS * INT64_C(1000000), "close took too long");
    if (getenv("TEST_NET_DELAY") != NULL)
        sleep_ms(1500); /* the thread goes on, and must touch nothing that the caller may */
    if (s->hangs) {     /* a thread and its buffers are left: the checks for that do not apply */
        check_card_is_free("sock0");
        _exit(test_n_failed != 0);
    }
}

static void run_scenario(int i, bool tcp_too)
{
    static const struct environment processes = {"ncclnet", true};
    struct member m;
    char path[400];
    snprintf(path, sizeof path, "%s/libnccl-net-test_%s.so", NET_PLUGIN_FOLDER, scenarios[i].file);
    setenv("SPCCL_NET_PLUGIN", path, 1);
    m = make_group(&processes, 2, play);
    m.kind = i;
    m.tcp_too = tcp_too;
    run_group(&processes, &m);
}

static void run_all(enum outcome outcome)
{
    for (int i = 0; i < (int)N_SCENARIOS; i++)
        if (scenarios[i].outcome == outcome) {
            int before = test_n_failed;
            run_scenario(i, true);
            if (outcome == REFUSED && !takes_time(&scenarios[i]))
                run_scenario(i, false);
            CHECK(test_n_failed == before, "case %d: %s %s", i, scenarios[i].file,
                  scenarios[i].vars[0] != NULL ? scenarios[i].vars[0] : "");
        }
}

static void test_works(void)
{
    run_all(WORKS);
}
static void test_refused(void)
{
    run_all(REFUSED);
}
static void test_lost(void)
{
    run_all(LOST);
}

/* The thread may write to the eventfd after an arm that returned AGAIN. One later sleep ends at once then, not all. */
static void play_late_write(struct member *m)
{
    uint64_t one = 1;
    int n_woken = 0;
    if (!join_group(m))
        return;
    barrier(m, 1);
    CHECK(write(sp_plugin_self(m->ep)->event_fd, &one, sizeof one) == sizeof one, "eventfd");
    for (int n_slept = 0; n_slept < 10;) {
        struct pollfd p = {.fd = m->t->wait_fd(m->ep), .events = POLLIN};
        CHECK_OK(progress(m));
        if (m->t->arm(m->ep) != SPCCL_OK)
            continue;
        n_slept++;
        n_woken += poll(&p, 1, 20) != 0;
        m->t->disarm(m->ep);
    }
    CHECK(n_woken <= 5, "rank %d: 10 sleeps, %d ended at once", m->rank, n_woken);
    barrier(m, 2);
    leave_group(m);
}

static void test_late_write(void)
{
    static const struct environment processes = {"ncclnet", true};
    struct member m;
    setenv("SPCCL_NET_PLUGIN", NET_PLUGIN_FOLDER "/libnccl-net-test_all.so", 1);
    m = make_group(&processes, 2, play_late_write);
    run_group(&processes, &m);
}

/* Transport ib of rank 0's process uses the card of one device, or of all. Then the plugin uses the others, or tcp carries
 * the pair. When ib has given the cards back, the plugin has them. */
static void play_card_in_use(struct member *m)
{
    sp_nic cards[2];
    const char *holder;
    char text[400];
    memset(cards, 0, sizeof cards);
    setenv("TEST_NET_DEVICES", "4", 1); /* two of them are fast */
    setenv("TEST_NET_SPEED", "1000", 1);
    for (int i = 0; i < m->kind && m->rank == 0; i++) {
        snprintf(cards[i].names[2], sizeof cards[i].names[2], "sock%d", i);
        CHECK(sp_nic_take("ib", &cards[i], &holder), "%s has sock%d", holder, i);
    }
    if (!join_group(m))
        return;
    describe_peer(m, 1 - m->rank, text, sizeof text);
    if (m->kind == 2)
        CHECK(strstr(text, "tcp, as the plugin failed") != NULL && strstr(text, "device sock1") != NULL &&
                  strstr(text, "transport ib of this process uses this card") != NULL,
              "rank %d: %s", m->rank, text);
    else
        CHECK(strstr(text, "ncclnet: plugin") != NULL &&
                  (m->kind == 0 || m->rank == 1 || strstr(text, "sock1") != NULL),
              "rank %d, kind %d: %s", m->rank, m->kind, text);
    exchange(m);
    CHECK(m->kind != 0 || !sp_nic_take("ib", &sp_plugin_self(m->ep)->plugin->devices[0].nic, &holder),
          "the plugin uses sock0");
    barrier(m, 1);
    leave_group(m);
    for (int i = 0; i < m->kind && m->rank == 0; i++)
        sp_nic_give_back("ib", &cards[i]);
    check_card_is_free("sock0");
}

static void test_card_in_use(void)
{
    static const struct environment processes = {"ncclnet", true};
    setenv("SPCCL_NET_PLUGIN", NET_PLUGIN_FOLDER "/libnccl-net-test_all.so", 1);
    for (int kind = 0; kind <= 2; kind++) {
        struct member m = make_group(&processes, 2, play_card_in_use);
        m.kind = kind;
        m.tcp_too = true;
        run_group(&processes, &m);
    }
}

/* ---- messages and notes over one endpoint of tcp ---- */

/* Rank 2 cannot use its plugin: its control links carry its messages, while those of ranks 0 and 1 carry notes, and take no
 * share of what tcp may have in flight. Each rank sees the ends of the ranks above it. */
static void play_mixed(struct member *m)
{
    int n_by_tcp = m->rank == 2 ? 2 : 1;
    CHECK_OK(sp_host_identity(m->rank == 0 ? "a" : m->rank == 1 ? "b" : "c", m->config.host));
    m->config.n_sockets = 1;
    if (m->rank == 2)
        setenv("TEST_NET_FAIL", "init", 1);
    if (!join_group(m))
        return;
    CHECK(sp_tcp_self(m->links.tcp)->window.n_sockets == (uint32_t)(n_by_tcp * m->config.n_queues),
          "rank %d: %u sockets share the window", m->rank, sp_tcp_self(m->links.tcp)->window.n_sockets);
    for (uint64_t i = 0; i < N_MESSAGES; i++) {
        for (int peer = 0; peer < m->n; peer++)
            if (peer != m->rank)
                send_now(m, peer, i % 2, size_of(m, i), i);
        for (int peer = 0; peer < m->n; peer++)
            while (peer != m->rank && try_take(m, peer, i % 2, size_of(m, i), i) == SPCCL_AGAIN) {
                CHECK(sleep_armed(m), "rank %d: nothing woke it for message %d of rank %d", m->rank, (int)i,
                      peer);
                CHECK_OK(progress(m));
            }
    }
    for (int peer = 0; peer < m->n; peer++) {
        const char *want = m->rank == 2 || peer == 2 ? "tcp, as the plugin failed" : "ncclnet: plugin";
        char text[400];
        if (peer == m->rank)
            continue;
        flush_now(m, peer);
        describe_peer(m, peer, text, sizeof text);
        CHECK(strncmp(text, want, strlen(want)) == 0, "rank %d to %d: %s", m->rank, peer, text);
    }
    barrier(m, 1);
    for (int peer = m->n - 1; peer > m->rank; peer--)
        CHECK(take_now(m, peer, 0, 1, 0) == SPCCL_ERR_PEER, "rank %d: rank %d has left", m->rank, peer);
    leave_group(m);
}

static void test_mixed(void)
{
    static const struct environment processes = {"ncclnet", true};
    struct member m;
    setenv("SPCCL_NET_PLUGIN", NET_PLUGIN_FOLDER "/libnccl-net-test_all.so", 1);
    setenv("SPCCL_TCP_ADDR", "127.0.0.1", 1); /* hosts that differ by name alone may have no other */
    m = make_group(&processes, 3, play_mixed);
    m.tcp_too = true;
    run_group(&processes, &m);
    unsetenv("SPCCL_TCP_ADDR");
}

/* ---- the wall clock is set while a thread ends ---- */

int __real_clock_gettime(clockid_t clock, struct timespec *out);
int __wrap_clock_gettime(clockid_t clock, struct timespec *out);
static int wall_clock_off_s;

int __wrap_clock_gettime(clockid_t clock, struct timespec *out)
{
    int result = __real_clock_gettime(clock, out);
    if (clock == CLOCK_REALTIME)
        out->tv_sec += wall_clock_off_s;
    return result;
}

/* An administrator sets it forward by an hour after this rank has read it. */
static void play_clock_set(struct member *m)
{
    char log[1000];
    setenv("TEST_NET_END", "100", 1);
    begin_log(); /* before there is a thread that calls the plugin: the plugin reads the environment */
    if (join_group(m)) {
        exchange(m);
        barrier(m, 1);
        wall_clock_off_s = -3600;
    }
    leave_group(m);
    end_log(log, sizeof log);
    CHECK(log[0] == '\0', "%s", log);
}

static void test_clock_set(void)
{
    static const struct environment processes = {"ncclnet", true};
    struct member m;
    setenv("SPCCL_NET_PLUGIN", NET_PLUGIN_FOLDER "/libnccl-net-test_all.so", 1);
    m = make_group(&processes, 2, play_clock_set);
    run_group(&processes, &m);
}

/* Real plugins: the paths in SPCCL_TEST_PLUGINS, with colons; without it the one of the tests. */
static void test_real(void)
{
    static const struct environment processes = {"ncclnet", true};
    const char *paths = getenv("SPCCL_TEST_PLUGINS");
    if (paths == NULL || paths[0] == '\0')
        paths = NET_PLUGIN_FOLDER "/libnccl-net-test_all.so";
    for (const char *at = paths; *at != '\0';) {
        size_t n = strcspn(at, ":");
        char path[400];
        struct member m;
        snprintf(path, sizeof path, "%.*s", (int)n, at);
        setenv("SPCCL_NET_PLUGIN", path, 1);
        m = make_group(&processes, 2, play);
        m.kind = REAL;
        run_group(&processes, &m);
        printf("ran over %s\n", path);
        at += n + (at[n] == ':');
    }
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {{"works", test_works},
                                             {"refused", test_refused},
                                             {"lost", test_lost},
                                             {"late_write", test_late_write},
                                             {"card_in_use", test_card_in_use},
                                             {"mixed", test_mixed},
                                             {"clock_set", test_clock_set},
                                             {"real", test_real},
                                             {NULL, NULL}};
    return test_main(cases, argc, argv);
}
