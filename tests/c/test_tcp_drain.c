/* test_tcp_drain.c - the rate of a link, from what peers have acknowledged (tcp_drain.h): simulated links and calls,
 * and what the kernel says of a real socket. */
#include "test.h"
#include "transport/net/tcp/tcp_drain.h"
#include "transport/net/tcp/tcp_window.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

/* A link that moves `rate` bytes per ns, and acknowledges in steps. */
struct link {
    double rate;
    uint64_t step;
    uint64_t n_bytes, n_acked; /* taken by the kernel; acknowledged */
    int64_t now_ns;
    double sent;
};

static void wait_ns(struct link *l, int64_t ns)
{
    double most = (double)l->n_bytes;
    uint64_t acked;
    l->now_ns += ns;
    l->sent += l->rate * (double)ns;
    l->sent = l->sent < most ? l->sent : most;
    acked = l->sent < most ? (uint64_t)l->sent / l->step * l->step : l->n_bytes;
    l->n_acked = acked > l->n_acked ? acked : l->n_acked;
}

/* One call: the kernel takes `bytes` at once. Then look every look_ns until all is acknowledged. Returns the last rate
 * that a look showed; 0: none. */
static double run_call(struct link *l, sp_tcp_drain *d, uint64_t bytes, int64_t look_ns)
{
    double last = 0;
    l->n_bytes += bytes;
    for (int i = 0; i < 1000 && (i == 0 || l->n_acked < l->n_bytes); i++) {
        double rate = sp_tcp_drain_look(d, l->now_ns, l->n_bytes, l->n_bytes - l->n_acked);
        last = rate > 0 ? rate : last;
        wait_ns(l, look_ns);
    }
    return last;
}

static void test_slow_links_are_learnt(void)
{
    static const double rates[] = {0.0125, 0.03, 0.125, 0.25};
    static const uint64_t calls[] = {256 << 10, 700 << 10};
    for (size_t i = 0; i < sizeof rates / sizeof *rates; i++)
        for (size_t k = 0; k < sizeof calls / sizeof *calls; k++) {
            struct link l = {.rate = rates[i], .step = 8 << 10, .now_ns = 1000000000};
            sp_tcp_drain d = {0};
            double got = run_call(&l, &d, calls[k], SP_TCP_DRAIN_SAMPLE_NS);
            bool possible = rates[i] * (double)SP_TCP_DRAIN_SAMPLE_NS < 0.75 * (double)calls[k];
            CHECK(possible ? got > 0.75 * rates[i] && got < 1.25 * rates[i] : got == 0,
                  "%g bytes/ns, calls of %llu bytes: %g", rates[i], (unsigned long long)calls[k], got);
        }
}

/* Whatever does not show the link: it is faster than the looks, the call is tiny, nothing is sent, all waits. */
static void test_others_are_not(void)
{
    struct link l = {.rate = 1.25, .step = 64 << 10, .now_ns = 1000000000};
    sp_tcp_drain d = {0};
    double got = 0;
    for (int i = 0; i < 20; i++)
        got += run_call(&l, &d, 700 << 10, SP_TCP_DRAIN_SAMPLE_NS);
    CHECK(got == 0, "10 Gbit/s: %g", got);
    l.rate = 0.0125;
    for (int i = 0; i < 20; i++)
        got += run_call(&l, &d, SP_TCP_DRAIN_BYTES_MIN - 1, SP_TCP_DRAIN_SAMPLE_NS);
    CHECK(got == 0, "less than SP_TCP_DRAIN_BYTES_MIN: %g", got);
    for (int i = 0; i < 20; i++)
        got += sp_tcp_drain_look(&d, l.now_ns += SP_TCP_DRAIN_SAMPLE_NS, l.n_bytes, 0);
    CHECK(got == 0, "idle: %g", got);
    l.rate = 1e-6;
    got = run_call(&l, &d, 700 << 10, SP_TCP_DRAIN_SAMPLE_NS);
    CHECK(got == 0, "a link that stands still: %g", got);
}

/* An application that hands over little at a time does not make the link look slow: between two looks the peers
 * acknowledge all that the kernel held. */
static void test_slow_application(void)
{
    struct link l = {.rate = 5, .step = 8 << 10, .now_ns = 1000000000};
    sp_tcp_drain d = {0};
    double got = 0;
    for (int i = 0; i < 100; i++) {
        l.n_bytes += 150 << 10;
        got += sp_tcp_drain_look(&d, l.now_ns, l.n_bytes, l.n_bytes - l.n_acked);
        wait_ns(&l, SP_TCP_DRAIN_SAMPLE_NS);
    }
    CHECK(got == 0, "%g", got);
}

static void test_looks_become_rare(void)
{
    sp_tcp_drain d = {0};
    int64_t now_ns = 1000000000;
    for (uint32_t i = 0; i < 10 * SP_TCP_DRAIN_LOOKS; i++) /* idle looks do not count: they cost nothing */
        (void)sp_tcp_drain_look(&d, now_ns += SP_TCP_DRAIN_SAMPLE_NS, 0, 0);
    CHECK(!sp_tcp_drain_due(&d, now_ns + SP_TCP_DRAIN_SAMPLE_NS - 1), "a look is due too early");
    CHECK(sp_tcp_drain_due(&d, now_ns + SP_TCP_DRAIN_SAMPLE_NS), "no look is due");
    for (uint32_t i = 0; i < SP_TCP_DRAIN_LOOKS; i++)
        (void)sp_tcp_drain_look(&d, now_ns += SP_TCP_DRAIN_SAMPLE_NS, i * 1000, 1000);
    CHECK(!sp_tcp_drain_due(&d, now_ns + SP_TCP_DRAIN_SAMPLE_NS), "looks are as frequent as before");
}

static void test_facts(void)
{
    static const struct {
        sp_tcp_drain_facts facts;
        bool shows;
    } cases[] = {{{1000, false, 100000}, true},
                 {{0, false, 100000}, false},      /* all was sent: an acknowledgement may be delayed */
                 {{1000, true, 100000}, false},    /* a peer did not read */
                 {{1000, false, 10000000}, false}, /* too short for this round trip */
                 {{1000, false, 0}, true}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        sp_tcp_drain d = {.took_ns = 2000000};
        CHECK(sp_tcp_drain_shows_link(&d, &cases[i].facts) == cases[i].shows, "case %zu", i);
    }
}

/* A learnt rate is the cost of a byte until a long call shows more. */
static void test_window_takes_it(void)
{
    sp_tcp_window w;
    size_t before;
    sp_tcp_window_init(&w, 12, 1);
    before = w.socket_bytes;
    CHECK(sp_tcp_window_learn(&w, 0.125), "the limit of a socket has not changed");
    CHECK(w.socket_bytes < before, "%zu; wanted less than %zu", w.socket_bytes, before);
    CHECK(sp_tcp_window_ns_per_byte(&w) > 7.9 && sp_tcp_window_ns_per_byte(&w) < 8.1, "%g ns per byte",
          sp_tcp_window_ns_per_byte(&w));
    (void)sp_tcp_window_learn(&w, 0.3); /* after a pause a link may pass a burst at once */
    for (int i = 0; i < 40; i++)
        (void)sp_tcp_window_learn(&w, 0.125);
    CHECK(w.rate > 0.12 && w.rate < 0.13, "rate %g", w.rate);
    (void)sp_tcp_window_measure(&w, 990000000, true, 0);
    (void)sp_tcp_window_measure(&w, 1000000000, true, 0); /* the peers took nothing in these 10 ms */
    CHECK(w.rate > 0.12 && !w.measured, "rate %g after a measurement of 0", w.rate);
    w.n_bytes += 1000000; /* in 10 ms: 0.1 bytes per ns */
    (void)sp_tcp_window_measure(&w, 1010000000, true, 0);
    CHECK(w.rate > 0.099 && w.rate < 0.101, "rate %g; wanted the measured one", w.rate);
    CHECK(!sp_tcp_window_learn(&w, 5) && w.rate < 0.101, "rate %g after it was measured", w.rate);
}

/* A peer that does not read: the kernel holds bytes, and says that the peer is full. */
static void test_kernel_says(void)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t n = sizeof at;
    static uint8_t block[1 << 16];
    sp_tcp_drain_facts facts = {0};
    uint64_t peer_full_us = 0;
    int deadline_ms = 30000;
    int listener = socket(AF_INET, SOCK_STREAM, 0), to = socket(AF_INET, SOCK_STREAM, 0), from = -1;
    CHECK(bind(listener, (struct sockaddr *)&at, n) == 0 && listen(listener, 1) == 0 &&
              getsockname(listener, (struct sockaddr *)&at, &n) == 0 &&
              connect(to, (struct sockaddr *)&at, n) == 0 && (from = accept(listener, NULL, NULL)) >= 0,
          "loopback: errno %d", errno);
    CHECK(sp_tcp_drain_held(to) == 0, "%llu bytes before any was sent",
          (unsigned long long)sp_tcp_drain_held(to));
    for (int waited_ms = 0; waited_ms < deadline_ms && !facts.peer_full; waited_ms++) {
        while (send(to, block, sizeof block, MSG_DONTWAIT) > 0)
            ;
        sleep_ms(1);
        facts = (sp_tcp_drain_facts){0};
        sp_tcp_drain_add_facts(to, &peer_full_us, &facts);
    }
    CHECK(facts.peer_full && facts.unsent_bytes != 0 && facts.rtt_ns > 0,
          "full %d, unsent %llu, round trip %lld", facts.peer_full, (unsigned long long)facts.unsent_bytes,
          (long long)facts.rtt_ns);
    CHECK(sp_tcp_drain_held(to) >= facts.unsent_bytes, "%llu bytes held",
          (unsigned long long)sp_tcp_drain_held(to));
    close(listener);
    close(from);
    close(to);
    CHECK(sp_tcp_drain_held(to) == 0, "a closed socket holds bytes");
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {{"learnt", test_slow_links_are_learnt},
                                             {"others", test_others_are_not},
                                             {"slow_application", test_slow_application},
                                             {"rare", test_looks_become_rare},
                                             {"facts", test_facts},
                                             {"window", test_window_takes_it},
                                             {"kernel", test_kernel_says},
                                             {NULL, NULL}};
    return test_main(cases, argc, argv);
}
