/* test_tcp_priority.c - messages of earlier calls leave first (tcp_priority.h): the rule alone with times that
 * the test gives, and sockets between two hosts that differ by name. The cases with two ranks take a queue as full
 * when the kernel has taken no byte for 100 ms. */
#include "endpoints.h"
#include "transport/net/tcp/tcp.h"

#include <sys/socket.h>

#define MESSAGE ((size_t)16 << 10)
#define EARLIER 7u
#define LATER 8u
#define FOR_EVER_NS INT64_C(3600000000000)

static void test_rule(void)
{
    sp_tcp_priority p = {.hold_timeout_ns = 100};
    CHECK(sp_tcp_priority_may_send(&p, 5, 0), "nobody waits");
    sp_tcp_priority_begin(&p, 5, 1000);
    sp_tcp_priority_begin(&p, 6, 1001);
    sp_tcp_priority_begin(&p, 5, 1002);
    CHECK(sp_tcp_priority_may_send(&p, 5, 1003) && sp_tcp_priority_may_send(&p, 4, 1003), "the earliest");
    CHECK(!sp_tcp_priority_may_send(&p, 6, 1099), "a later call, within hold_timeout_ns");
    CHECK(sp_tcp_priority_may_send(&p, 6, 1100), "a later call, after hold_timeout_ns");
    sp_tcp_priority_moved(&p, 6, 1100);
    CHECK(sp_tcp_priority_may_send(&p, 6, 1100), "only the earliest call's bytes count");
    sp_tcp_priority_moved(&p, 5, 1100);
    CHECK(!sp_tcp_priority_may_send(&p, 6, 1199), "the earliest moved");
    CHECK(!sp_tcp_priority_end(&p, 5), "another socket has call 5");
    CHECK(sp_tcp_priority_end(&p, 5), "call 6 waits, and none with call 5");
    sp_tcp_priority_forget(&p);
    sp_tcp_priority_begin(&p, 6, 1200);
    CHECK(sp_tcp_priority_may_send(&p, 6, 1200), "call 6 is the earliest now");
    sp_tcp_priority_begin(&p, 3, 1300);
    CHECK(!sp_tcp_priority_may_send(&p, 6, 1300), "an earlier call came");
    CHECK(sp_tcp_priority_end(&p, 3) && !sp_tcp_priority_end(&p, 6), "the last socket needs no look");
}

static void test_numbers_wrap_around(void)
{
    sp_tcp_priority p = {.hold_timeout_ns = 100};
    sp_tcp_priority_begin(&p, UINT32_MAX, 0);
    CHECK(!sp_tcp_priority_may_send(&p, 0, 1), "call 0 comes after call 2^32 - 1");
    CHECK(sp_tcp_priority_may_send(&p, UINT32_MAX - 1, 1), "and that one after 2^32 - 2");
}

static void test_ranges_of_calls(void)
{
    sp_tcp_socket s = {.fd = -1};
    CHECK_OK(sp_mirror_open(&s.out, 1 << 16));
    for (uint32_t i = 0; i < 2 * SP_TCP_CALL_RANGES; i++) { /* more calls than are told apart */
        void *space = sp_tcp_socket_reserve(&s, 64);
        CHECK(space != NULL, "no space");
        memset(space, 0, 64);
        sp_tcp_socket_commit(&s, 0, i, 64, 100 + i);
    }
    CHECK(sp_tcp_socket_call(&s) == 100 && s.n_ranges == SP_TCP_CALL_RANGES, "%u, %d ranges",
          sp_tcp_socket_call(&s), s.n_ranges);
    CHECK(s.ranges[SP_TCP_CALL_RANGES - 1].end == 2 * (uint64_t)SP_TCP_CALL_RANGES,
          "a message belongs to no range");
    sp_mirror_close(&s.out);
}

static void commit_message(struct sp_tcp *ep, int peer, uint32_t call)
{
    const sp_transport *t = sp_transport_find("tcp");
    void *space = NULL;
    CHECK_OK(t->reserve((sp_endpoint *)ep, peer, 0, 64, &space));
    memset(space, 0, 64);
    CHECK_OK(t->commit((sp_endpoint *)ep, peer, 0, call));
}

/* Two sockets wait, none is held, and the earlier call's message leaves: the next `arm` must report that. */
static void test_departure_is_reported(void)
{
    struct sp_tcp_socket sockets[2];
    struct sp_tcp_peer peers[2] = {{.state = SP_TCP_UP, .n_sockets = 1, .sockets = &sockets[0]},
                                   {.state = SP_TCP_UP, .n_sockets = 1, .sockets = &sockets[1]}};
    struct sp_tcp ep = {.config = {.world_size = 2, .n_queues = 1, .queue_bytes = 1 << 16}, .peers = peers};
    const sp_transport *t = sp_transport_find("tcp");
    int ends[2][2];
    ep.priority.hold_timeout_ns = FOR_EVER_NS;
    for (int i = 0; i < 2; i++) {
        CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, ends[i]) == 0, "socketpair");
        CHECK_OK(sp_tcp_socket_open(&sockets[i], ends[i][0], 1 << 16));
    }
    sockets[1].writable = false; /* as if its kernel buffer were full */
    commit_message(&ep, 1, LATER);
    CHECK(ep.n_held == 0 && t->arm((sp_endpoint *)&ep) == SPCCL_OK, "nothing has left yet");
    commit_message(&ep, 0, EARLIER);
    CHECK(t->flushed((sp_endpoint *)&ep, 0, 0, 1) && ep.n_held == 0, "the earlier one left");
    CHECK(ep.priority.n_waiting == 1, "the later one waits: %u", ep.priority.n_waiting);
    CHECK(t->arm((sp_endpoint *)&ep) == SPCCL_AGAIN, "arm forgot that a message left");
    for (int i = 0; i < 2; i++) {
        sp_tcp_socket_close(&sockets[i]);
        close(ends[i][1]);
    }
}

/* Fill queue 1 with messages of the earlier call until the socket takes no more. Returns their number. */
static int fill_queue(struct member *m)
{
    int n = 0, refused = 0;
    while (refused < 100) { /* what is delivered makes space: go on until nothing moves for 100 ms */
        void *space = NULL;
        CHECK_OK(progress(m));
        if (m->t->reserve(m->ep, 1, 1, MESSAGE, &space) != SPCCL_OK) {
            refused++;
            usleep(1000);
            continue;
        }
        fill_message(space, MESSAGE, (uint64_t)n++);
        CHECK_OK(m->t->commit(m->ep, 1, 1, EARLIER));
        refused = 0;
    }
    return n;
}

static void send_later(struct member *m)
{
    void *space = NULL;
    CHECK_OK(m->t->reserve(m->ep, 1, 0, MESSAGE, &space));
    fill_message(space, MESSAGE, 1000);
    CHECK_OK(m->t->commit(m->ep, 1, 0, LATER));
}

static bool later_left(struct member *m)
{
    return m->t->flushed(m->ep, 1, 0, 1);
}

enum { PEER_READS, HOLD_TIMES_OUT };

static void sender(struct member *m)
{
    struct sp_tcp *ep = sp_tcp_self(m->ep);
    int n_earlier;
    ep->window.n_sockets = 0; /* no new window: it would set another hold_timeout_ns */
    ep->priority.hold_timeout_ns = FOR_EVER_NS;
    n_earlier = fill_queue(m);
    send_later(m);
    for (int i = 0; i < 20; i++) {
        CHECK_OK(progress(m));
        usleep(1000);
    }
    CHECK(ep->n_held == 1 && !later_left(m), "the later call's message left first");
    atomic_store(&m->shared->step, n_earlier);
    if (m->kind == HOLD_TIMES_OUT) {
        ep->priority.hold_timeout_ns = 0;
        ep->resend = true;
        CHECK_OK(progress(m));
        CHECK(later_left(m), "held although hold_timeout_ns has passed");
    } else {
        while (!later_left(m)) { /* rank 1 reads the earlier messages: the end of the hold wakes this rank */
            CHECK(sleep_armed(m), "never woken");
            CHECK_OK(progress(m));
            if (test_n_failed != 0)
                break;
        }
        CHECK(ep->n_held == 0 && m->t->flushed(m->ep, 1, 1, (uint64_t)n_earlier),
              "the later message left before the earlier ones");
    }
    atomic_store(&m->shared->n_done, 1);
}

static void receiver(struct member *m)
{
    int n_earlier;
    while ((n_earlier = atomic_load(&m->shared->step)) == 0)
        usleep(1000);
    while (m->kind == HOLD_TIMES_OUT && atomic_load(&m->shared->n_done) == 0)
        usleep(1000);
    for (int i = 0; i < n_earlier; i++)
        CHECK_OK(take_now(m, 0, 1, MESSAGE, (uint64_t)i));
    CHECK_OK(take_now(m, 0, 0, MESSAGE, 1000));
    while (atomic_load(&m->shared->n_done) == 0)
        usleep(1000);
}

static void rank_main(struct member *m)
{
    m->config.host[SP_HOST_ID_BYTES - 1] ^= (uint8_t)m->rank; /* another host, by name */
    if (!join_group(m))
        return;
    if (m->rank == 0)
        sender(m);
    else
        receiver(m);
    leave_group(m);
}

static void run(int kind)
{
    const struct environment tcp = {"tcp", false};
    struct member m;
    setenv("SPCCL_TCP_ADDR", "127.0.0.1", 1);
    m = make_group(&tcp, 2, rank_main);
    m.kind = kind;
    m.config.n_sockets = 1;
    run_group(&tcp, &m);
    unsetenv("SPCCL_TCP_ADDR");
}

static void test_order_on_the_wire(void)
{
    run(PEER_READS);
}

static void test_hold_timeout(void)
{
    run(HOLD_TIMES_OUT);
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {{"rule", test_rule},
                                             {"wrap", test_numbers_wrap_around},
                                             {"ranges", test_ranges_of_calls},
                                             {"departure", test_departure_is_reported},
                                             {"order", test_order_on_the_wire},
                                             {"hold_timeout", test_hold_timeout},
                                             {NULL, NULL}};
    return test_main(cases, argc, argv);
}
