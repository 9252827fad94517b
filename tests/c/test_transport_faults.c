/* test_transport_faults.c - ranks that die, abort or never come, and connections that are no rank's. Every
 * transport names the rank, delivers what was sent, connects in spite of unproven connections, and leaves no
 * file or socket behind. */
#include "endpoints.h"
#include "transport/common/auth.h"
#include "transport/net/ib/ib_wire.h"
#include "transport/net/plugin/plugin_wire.h"
#include "transport/net/tcp/tcp.h"

#include <errno.h>
#include <stddef.h>
#include <sys/un.h>

/* ---- death and leaving ---- */

enum { N_SENT = 60 };

/* Rank 1 sends, then leaves or is killed at once. Rank 0 has sent a message that rank 1 never reads; but not
 * if rank 1 is killed over tcp. Its kernel would then reset the connection, and drop what rank 0's kernel has
 * not acknowledged (docs/TRANSPORTS.md). */
static void die(struct member *m)
{
    void *space;
    if (!join_group(m))
        return;
    if (m->rank == 0 && (m->killed_rank < 0 || strcmp(m->t->name, "tcp") != 0))
        for (uint64_t i = 0; i < 3; i++)
            send_now(m, 1, 0, 2000, i);
    barrier(m, 1);
    if (m->rank == 1) {
        for (uint64_t i = 0; i < N_SENT; i++)
            send_now(m, 0, (int)(i % 2), 1 + i * 13, i);
        flush_now(m, 0);
        if (m->killed_rank == 1)
            kill(getpid(), SIGKILL);
        leave_group(m);
        return;
    }
    usleep(m->kind == 1 ? 100000 : 0);
    for (uint64_t i = 0; i < N_SENT; i++)
        CHECK_OK(take_now(m, 1, (int)(i % 2), 1 + i * 13, i));
    CHECK(take_now(m, 1, 0, 1, 0) == SPCCL_ERR_PEER, "%s: rank 1 is gone", m->t->name);
    CHECK(strstr(spccl_last_error(), "rank 1") != NULL, "\"%s\"", spccl_last_error());
    CHECK(m->t->reserve(m->ep, 1, 1, 10, &space) == SPCCL_ERR_PEER, "%s: reserve at a dead peer", m->t->name);
    CHECK(is_flushed(m, 1), "nothing can be pending for a dead peer");
    CHECK_OK(progress(m)); /* a peer that left is not an error of progress */
    leave_group(m);
}

static void test_die(void)
{
    for (size_t g = 0; g < N_ENVIRONMENTS; g++)
        for (int kind = 0; kind < 2; kind++) {
            struct member m = make_group(&environments[g], 2, die);
            m.kind = kind;
            run_group(&environments[g], &m);
            if (!environments[g].processes)
                continue;
            m.killed_rank = 1;
            run_group(&environments[g], &m);
        }
}

/* Rank 1 is killed while it sends. Rank 0 gets the first messages in order, then the error, also if it
 * sleeps. */
static void die_streaming(struct member *m)
{
    spccl_status st = SPCCL_OK;
    int64_t start_ns;
    uint64_t n = 0;
    if (!join_group(m))
        return;
    if (m->rank == 1) {
        for (uint64_t i = 0; i < 4000; i++)
            send_now(m, 0, 0, 7000, i);
        kill(getpid(), SIGKILL);
    }
    start_ns = sp_now_ns();
    while (st == SPCCL_OK || st == SPCCL_AGAIN) {
        st = try_take(m, 1, 0, 7000, n);
        n += st == SPCCL_OK;
        start_ns = st == SPCCL_OK ? sp_now_ns()
                                  : start_ns; /* of the last message: the time to send them is not counted */
        CHECK_OK(progress(m));
        if (st == SPCCL_AGAIN)
            CHECK(sleep_armed(m), "%s: asleep while rank 1 is dead", m->t->name);
    }
    CHECK(st == SPCCL_ERR_PEER, "%s: %s", m->t->name, spccl_last_error());
    CHECK(n > 3000, "%s: only %llu messages", m->t->name, (unsigned long long)n);
    CHECK(sp_now_ns() - start_ns < PATIENCE_MS * INT64_C(1000000) / 2, "too late");
    leave_group(m);
}

static void test_die_streaming(void)
{
    for (size_t g = 0; g < N_ENVIRONMENTS; g++)
        if (environments[g].processes) {
            struct member m = make_group(&environments[g], 2, die_streaming);
            m.killed_rank = 1;
            m.config.n_sockets = 3;
            run_group(&environments[g], &m);
        }
}

/* ---- aborts ---- */

static void abort_full(struct member *m)
{
    char text[SP_ABORT_TEXT_CAP] = "", why[600];
    int peer = -1;
    spccl_status st;
    if (!join_group(m))
        return;
    for (int queue = 0; queue < 2; queue++)
        for (int i = 0; i < 20000 && try_send(m, 1 - m->rank, queue, 9000, 1) == SPCCL_OK; i++)
            (void)progress(m);
    barrier(m, 1);
    memset(why, 'x', sizeof why);
    why[sizeof why - 1] = '\0'; /* longer than the text of an abort: it is cut */
    memcpy(why, "out of luck", 11);
    if (m->rank == 1) {
        sp_links_abort_peers(&m->links, why);
        barrier(m, 2);
        leave_group(m);
        return;
    }
    while ((st = progress_to(m, &peer, text)) == SPCCL_OK)
        CHECK(sleep_armed(m), "%s: the abort did not wake this rank", m->t->name);
    CHECK(st == SPCCL_ERR_ABORTED && peer == 1, "%s: %d from %d", m->t->name, (int)st, peer);
    CHECK(strncmp(text, "out of luckxxx", 14) == 0 && strlen(text) < SP_ABORT_TEXT_CAP, "\"%s\"", text);
    CHECK(strstr(spccl_last_error(), "rank 1") != NULL, "\"%s\"", spccl_last_error());
    barrier(m, 2);
    leave_group(m);
}

static void test_abort_full(void)
{
    for (size_t g = 0; g < N_ENVIRONMENTS; g++) {
        struct member m = make_group(&environments[g], 2, abort_full);
        run_group(&environments[g], &m);
    }
}

/* ---- unproven connections ---- */

static int connect_at(const struct sockaddr *to, socklen_t n)
{
    int fd = socket(to->sa_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK(fd >= 0 && connect(fd, to, n) == 0, "connect: errno %d", errno);
    return fd;
}

/* Connect to a rank's listener without the library. */
static int connect_raw(const struct member *m, int rank)
{
    const uint8_t *address = m->shared->address[rank].bytes;
    struct sockaddr_un un = {.sun_family = AF_UNIX};
    sp_tcp_address tcp;
    if (m->shared->control[rank].n_bytes != 0) {
        CHECK(sp_tcp_parse_address(m->shared->control[rank].bytes, m->shared->control[rank].n_bytes, &tcp),
              "no address");
        return connect_at((const struct sockaddr *)&tcp.ips.at[tcp.ips.n - 1].storage,
                          tcp.ips.at[tcp.ips.n - 1].bytes);
    }
    snprintf(un.sun_path + 1, sizeof un.sun_path - 1, "spccl-");
    for (size_t i = 0; i < 16; i++)
        snprintf(un.sun_path + 7 + 2 * i, 3, "%02x", address[4 + i]);
    return connect_at((const struct sockaddr *)&un,
                      (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 7 + 32));
}

/* Run the handshake with a wrong secret, up to the proof. */
static void send_wrong_proof(int fd, uint8_t secret_byte)
{
    uint8_t secret[SP_SECRET_BYTES];
    sp_hs_hello hello = {.kind = SP_HS_TCP_CONTROL, .world_size = 3};
    sp_hs hs;
    memset(secret, secret_byte, sizeof secret);
    CHECK_OK(sp_hs_connect(&hs, fd, &hello, secret));
    for (int i = 0; i < 20 && sp_hs_step(&hs) == SPCCL_AGAIN; i++)
        usleep(1000);
    (void)send(fd, secret, sizeof secret, MSG_NOSIGNAL); /* a wrong proof */
}

static void unproven_connections(struct member *m)
{
    enum { N = 24 };
    int fds[N];
    if (!open_member(m))
        return;
    await_atomic(&m->shared->n_published, m->n);
    for (int i = 0; i < N; i++) {
        fds[i] = connect_raw(m, m->n - 1);
        if (i % 4 == 1)
            CHECK(send(fds[i], "GET / HTTP/1.1\r\nHost: x\r\n\r\n", 27, MSG_NOSIGNAL) == 27, "noise");
        if (i % 4 == 2)
            shutdown(fds[i], SHUT_RDWR);
        if (i % 8 == 3)
            send_wrong_proof(fds[i], (uint8_t)i);
    }
    /* Each rank leaves 9 handshakes open, and a handshake may take 10 s. If one held up the next, the group's deadline
     * of PATIENCE_MS would pass. */
    CHECK_OK(connect_member(m));
    for (int i = 0; i < m->n; i++)
        if (i != m->rank)
            send_now(m, i, 0, 100, (uint64_t)m->rank);
    for (int i = 0; i < m->n; i++)
        if (i != m->rank)
            CHECK_OK(take_now(m, i, 0, 100, (uint64_t)i));
    for (int i = 0; i < N; i++)
        close(fds[i]);
    barrier(m, 1);
    leave_group(m);
}

static void test_unproven_connections(void)
{
    for (size_t g = 0; g < N_ENVIRONMENTS; g++)
        if (strcmp(environments[g].transport, "inproc") != 0) {
            struct member m = make_group(&environments[g], 3, unproven_connections);
            run_group(&environments[g], &m);
        }
}

/* ---- ranks with different configs ---- */

enum { WRONG_SECRET, OTHER_SETTINGS, OTHER_GROUP, N_MISFITS };

/* Rank 0 is told what is wrong with rank 1, and rank 1 tries to connect until then. Of another group a rank is told
 * nothing: both wait until the deadline. */
static void misfit(struct member *m)
{
    bool is_told = m->kind != OTHER_GROUP;
    spccl_status st;
    m->config.deadline_ns = sp_deadline_in_ms(is_told ? PATIENCE_MS : 1500);
    if (m->rank == 1 && m->kind == WRONG_SECRET)
        m->config.secret[31] ^= 1;
    if (m->rank == 1 && m->kind == OTHER_SETTINGS)
        m->config.queue_bytes *= 2;
    if (m->rank == 1 && m->kind == OTHER_GROUP)
        m->config.group_tag++;
    if (!open_member(m))
        return;
    st = add_peers(m);
    if (st == SPCCL_OK)
        while ((st = m->t->connect_step(m->ep)) == SPCCL_AGAIN &&
               !(is_told && m->rank == 1 && atomic_load(&m->shared->n_done) > 0))
            usleep(100);
    CHECK(st == SPCCL_ERR_AUTH || st == SPCCL_ERR_MISMATCH || st == SPCCL_ERR_TIMEOUT ||
              st == SPCCL_ERR_PEER || (is_told && m->rank == 1 && st == SPCCL_AGAIN),
          "%s: kind %d, rank %d: %d", m->t->name, m->kind, m->rank, (int)st);
    if (m->rank == 0 && m->kind == WRONG_SECRET)
        CHECK(st == SPCCL_ERR_AUTH && strstr(spccl_last_error(), "secret") != NULL, "%s: %d \"%s\"",
              m->t->name, (int)st, spccl_last_error());
    if (m->rank == 0 && m->kind == OTHER_SETTINGS)
        CHECK(st == SPCCL_ERR_MISMATCH && strstr(spccl_last_error(), "65536") != NULL, "%s: %d \"%s\"",
              m->t->name, (int)st, spccl_last_error());
    if (st != SPCCL_AGAIN)
        CHECK(strstr(spccl_last_error(), "rank") != NULL, "\"%s\"", spccl_last_error());
    atomic_fetch_add(&m->shared->n_done, 1);
    while (atomic_load(&m->shared->n_done) < 2)
        usleep(200);
    leave_group(m);
}

static void test_misfits(void)
{
    for (size_t g = 0; g < N_ENVIRONMENTS; g++)
        for (int kind = 0; kind < N_MISFITS; kind++) {
            struct member m = make_group(&environments[g], 2, misfit);
            m.kind = kind;
            run_group(&environments[g], &m);
        }
}

/* Ranks 1 and 3 open their endpoints, but connect only if kind is 1. */
static void missing(struct member *m)
{
    spccl_status st;
    if (!open_member(m))
        return;
    if (m->kind == 1) {
        CHECK_OK(connect_member(m));
    } else if (m->rank % 2 == 0) {
        st = connect_member(m);
        CHECK(st == SPCCL_ERR_TIMEOUT, "%s: %d", m->t->name, (int)st);
        CHECK(strstr(spccl_last_error(), "rank 1, 3") != NULL, "%s: \"%s\"", m->t->name, spccl_last_error());
    }
    atomic_fetch_add(&m->shared->n_done, 1);
    while (atomic_load(&m->shared->n_done) < m->n)
        usleep(200);
    leave_group(m);
}

static void test_missing(void)
{
    for (size_t g = 0; g < N_ENVIRONMENTS; g++) {
        struct member m = make_group(&environments[g], 4, missing);
        int64_t start_ns = sp_now_ns(), ms;
        m.kind = 1;
        run_group(&environments[g], &m);
        /* The deadline leaves five times what a whole group takes on this machine. */
        ms = (sp_now_ns() - start_ns) / 200000;
        m = make_group(&environments[g], 4, missing);
        /* run_group waits 2 * PATIENCE_MS. */
        m.config.deadline_ns = sp_deadline_in_ms(ms < 1000 ? 1000 : ms > PATIENCE_MS ? PATIENCE_MS : ms);
        run_group(&environments[g], &m);
    }
}

/* ---- a tcp peer with the right secret sends wrong bytes ---- */

enum { LENGTH_0, LENGTH_BIG, LENGTH_MAX_PLUS_1, SEQUENCE, QUEUE, MAGIC, CUT_SHORT, CONTROL_NOISE, N_EVILS };
#define WILD 0xffffffffu /* gives a queue number that is negative as an int */

/* Connect with the right secret, and claim socket `id / 1000` of queue `id % 1000`. Returns the result. */
static spccl_status connect_proven(const struct member *m, uint32_t kind, uint32_t id, int *fd)
{
    sp_hs_hello h = {.group_tag = m->config.group_tag,
                     .queue_bytes = m->config.queue_bytes,
                     .kind = kind,
                     .from = 0,
                     .to = 1,
                     .world_size = 2,
                     .queue = id == WILD ? 0x80000000u : id % 1000,
                     .socket_idx = id == WILD ? 0 : id / 1000,
                     .n_queues = 2,
                     .n_sockets = 1};
    sp_tcp_address to;
    sp_hs hs;
    spccl_status st;
    CHECK(sp_tcp_parse_address(m->shared->address[1].bytes, m->shared->address[1].n_bytes, &to), "address");
    *fd = connect_raw(m, 1);
    memcpy(h.to_id, to.id, sizeof h.to_id);
    CHECK_OK(sp_hs_connect(&hs, *fd, &h, m->config.secret));
    while ((st = sp_hs_step(&hs)) == SPCCL_AGAIN)
        usleep(100);
    return st;
}

/* A queue that is connected already, queues and sockets that do not exist, a second control connection. */
static void refused_connections(const struct member *m)
{
    static const uint32_t ids[] = {0, 2, 1001, WILD};
    int fd;
    for (size_t i = 0; i < sizeof ids / sizeof *ids; i++) {
        CHECK(connect_proven(m, SP_HS_TCP_QUEUE, ids[i], &fd) == SPCCL_ERR_PEER, "socket %u was accepted",
              ids[i]);
        close(fd);
    }
    CHECK(connect_proven(m, SP_HS_TCP_CONTROL, 0, &fd) == SPCCL_ERR_PEER, "a second control connection");
    close(fd);
}

static void send_evil(const struct member *m, const int fds[3])
{
    uint32_t max = (uint32_t)(m->config.queue_bytes / 4);
    uint32_t head[8] = {16, 0, 0, 0x534d5053u, 1, 2, 3, 4}; /* a good message of 16 bytes on queue 0 */
    size_t n = sizeof head;
    switch (m->kind) {
    case LENGTH_0:
        head[0] = 0;
        break;
    case LENGTH_BIG:
        head[0] = 0xffffffffu;
        break;
    case LENGTH_MAX_PLUS_1:
        head[0] = max + 1;
        break;
    case SEQUENCE:
        head[1] = 1;
        break;
    case QUEUE:
        head[2] = 1;
        break;
    case MAGIC:
        head[3] ^= 1;
        break;
    case CUT_SHORT:
        n = 20;
        break;
    default:
        break;
    }
    if (m->kind == CONTROL_NOISE) {
        uint8_t noise[SP_TCP_ABORT_BYTES] = {1, 2, 3};
        CHECK(send(fds[0], noise, sizeof noise, MSG_NOSIGNAL) == (ssize_t)sizeof noise, "control");
    } else {
        CHECK(send(fds[1], head, n, MSG_NOSIGNAL) == (ssize_t)n, "queue");
    }
}

static void evil(struct member *m)
{
    const void *p;
    size_t bytes;
    spccl_status st;
    int64_t deadline_ns = sp_deadline_in_ms(PATIENCE_MS);
    if (!open_member(m))
        return;
    if (m->rank == 0) {
        int fds[3];
        await_atomic(&m->shared->n_published, m->n);
        CHECK_OK(connect_proven(m, SP_HS_TCP_CONTROL, 0, &fds[0]));
        CHECK_OK(connect_proven(m, SP_HS_TCP_QUEUE, 0, &fds[1]));
        refused_connections(m);
        CHECK_OK(connect_proven(m, SP_HS_TCP_QUEUE, 1, &fds[2]));
        send_evil(m, fds);
        if (m->kind != CUT_SHORT)
            barrier(m, 1);
        for (int i = 0; i < 3; i++)
            close(fds[i]);
        leave_group(m);
        return;
    }
    CHECK_OK(connect_member(m));
    do {
        (void)progress(m);
        st = m->kind == CONTROL_NOISE ? m->t->reserve(m->ep, 0, 0, 10, (void **)&p)
                                      : m->t->peek(m->ep, 0, 0, &p, &bytes);
    } while ((st == SPCCL_AGAIN || (st == SPCCL_OK && m->kind == CONTROL_NOISE)) &&
             !sp_deadline_passed(deadline_ns));
    CHECK(st == (m->kind >= CUT_SHORT ? SPCCL_ERR_PEER : SPCCL_ERR_FORMAT), "kind %d: %d", m->kind, (int)st);
    CHECK(strstr(spccl_last_error(), "rank 0") != NULL, "\"%s\"", spccl_last_error());
    if (m->kind != CUT_SHORT)
        barrier(m, 1);
    leave_group(m);
}

static void test_evil(void)
{
    static const struct environment tcp = {"tcp", false};
    for (int kind = 0; kind < N_EVILS; kind++) {
        struct member m = make_group(&tcp, 2, evil);
        m.kind = kind;
        run_group(&tcp, &m);
    }
}

/* ---- addresses ---- */

static void test_tcp_addresses(void)
{
    struct environment tcp = {"tcp", false};
    struct member m = make_group(&tcp, 2, NULL);
    uint8_t address[SP_ADDRESS_BYTES_MAX];
    sp_tcp_address parsed;
    size_t n;
    sp_endpoint *ep = NULL;
    setenv("SPCCL_TCP_ADDR", "no-such-if0", 1);
    CHECK(m.t->open(&m.config, &ep) == SPCCL_ERR_SETTING, "an interface that is not there");
    CHECK(strstr(spccl_last_error(), "no-such-if0") != NULL && ep == NULL, "%s", spccl_last_error());
    setenv("SPCCL_TCP_ADDR", "203.0.113.77", 1);
    CHECK(m.t->open(&m.config, &ep) == SPCCL_ERR_SETTING, "an address of another host: %s",
          spccl_last_error());
    setenv("SPCCL_TCP_ADDR", "lo", 1);
    CHECK_OK(m.t->open(&m.config, &ep));
    CHECK_OK(m.t->address(ep, address, &n));
    CHECK(sp_tcp_parse_address(address, n, &parsed) && parsed.ips.n == 1 &&
              sp_ip_is_loopback(&parsed.ips.at[0]),
          "%d IP addresses", parsed.ips.n);
    for (size_t cut = 0; cut < n; cut++)
        CHECK(!sp_tcp_parse_address(address, cut, &parsed), "cut to %zu bytes", cut);
    m.t->close(ep);
    unsetenv("SPCCL_TCP_ADDR");
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {
        {"die", test_die},
        {"die_streaming", test_die_streaming},
        {"abort_full", test_abort_full},
        {"unproven_connections", test_unproven_connections},
        {"misfits", test_misfits},
        {"missing", test_missing},
        {"evil", test_evil},
        {"tcp_addresses", test_tcp_addresses},
        {NULL, NULL},
    };
    signal(SIGPIPE, SIG_DFL); /* writing to a dead peer must not raise it */
    return test_main(cases, argc, argv);
}
