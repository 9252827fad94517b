/* test_tcp_window.c - the limit of the bytes in flight to other hosts (tcp_window.h): what it becomes for
 * links of several rates and round trips, and that the kernel keeps to it. */
#include "core/base/clock.h"
#include "core/base/status.h"
#include "test.h"
#include "transport/net/tcp/tcp_window.h"

#include <arpa/inet.h>
#include <errno.h>
#include <limits.h>
#include <linux/socket.h>
#include <linux/sockios.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#define N_SOCKETS 12u
#define SEGMENT_BYTES 1448 /* as on Ethernet: less than a limit */

/* Measure n times on a link that moves `link` bytes per ns with a round trip of rtt_ns: it moves as much as
 * the window allows, but at most `link`. `used`: the part of the sockets that have something to send. */
static size_t window_after(sp_tcp_window *w, int n, double link, int64_t rtt_ns, double used)
{
    int64_t now_ns = w->since_ns;
    for (int i = 0; i < n; i++) {
        double window = (double)w->socket_bytes * w->n_sockets * used;
        double rate = window / (double)rtt_ns < link ? window / (double)rtt_ns : link;
        now_ns += SP_TCP_WINDOW_SAMPLE_NS;
        w->n_bytes += (uint64_t)(rate * (double)SP_TCP_WINDOW_SAMPLE_NS);
        (void)sp_tcp_window_measure(w, now_ns, true, rtt_ns);
    }
    return w->socket_bytes * w->n_sockets;
}

static void test_links(void)
{
    static const struct {
        double link; /* bytes per ns */
        int64_t rtt_ns;
    } links[] = {{0.0125, 50000}, {0.125, 50000}, {1.25, 50000},
                 {12.5, 60000},   {50, 20000},    {1.25, 10000000}};
    for (size_t i = 0; i < sizeof links / sizeof *links; i++)
        for (int half = 0; half < 2; half++) {
            sp_tcp_window w;
            double link = links[i].link, used = half ? 0.5 : 1.0;
            double delay_ns = (double)(2 * links[i].rtt_ns);
            size_t got, least, most;
            sp_tcp_window_init(&w, N_SOCKETS, 1);
            delay_ns = delay_ns > (double)SP_TCP_WINDOW_DELAY_NS ? delay_ns : (double)SP_TCP_WINDOW_DELAY_NS;
            got = window_after(&w, 100, link, links[i].rtt_ns, used);
            least = (size_t)(link * (double)links[i].rtt_ns / used); /* less cannot keep the link busy */
            most = (size_t)(1.34 * ((double)SP_TCP_WINDOW_QUEUE_BYTES + 2 * link * delay_ns)) + N_SOCKETS;
            CHECK(got >= least && got <= most, "%g bytes/ns, %lld ns, used %g: window %zu, wanted %zu to %zu",
                  link, (long long)links[i].rtt_ns, used, got, least, most);
            CHECK(sp_tcp_window_ns_per_byte(&w) > 0.99 / link && sp_tcp_window_ns_per_byte(&w) < 1.01 / link,
                  "%g bytes/ns: %g ns per byte", link, sp_tcp_window_ns_per_byte(&w));
        }
}

static void test_idle_time_is_not_measured(void)
{
    sp_tcp_window w;
    sp_tcp_window_init(&w, N_SOCKETS, 1);
    (void)window_after(&w, 10, 1.0, 50000, 1.0);
    for (int i = 1; i < 50; i++) { /* nothing to send; then full again after a long sleep */
        int64_t now_ns = w.since_ns + i % 7 * 40 * SP_TCP_WINDOW_SAMPLE_NS;
        (void)sp_tcp_window_measure(&w, now_ns, i % 7 == 0, 0);
    }
    CHECK(w.rate > 0.99 && w.rate < 1.01, "rate %g", w.rate);
    for (int i = 0; i < 100; i++) { /* the link is slower now */
        w.n_bytes += (uint64_t)(0.25 * (double)SP_TCP_WINDOW_SAMPLE_NS);
        (void)sp_tcp_window_measure(&w, w.since_ns + SP_TCP_WINDOW_SAMPLE_NS, true, 0);
    }
    CHECK(w.rate > 0.24 && w.rate < 0.26, "rate %g after the link became slower", w.rate);
}

/* Ranks of one host share its link: together they start with one window, and end with one. */
static void test_sharing(void)
{
    for (uint32_t n = 1; n <= 8; n *= 2) {
        sp_tcp_window one, w;
        size_t got, want;
        sp_tcp_window_init(&one, N_SOCKETS, 1);
        sp_tcp_window_init(&w, N_SOCKETS, n);
        CHECK(w.socket_bytes * n <= one.socket_bytes + n * SP_TCP_WINDOW_SOCKET_MIN, "%u ranks: %zu", n,
              w.socket_bytes);
        want = window_after(&one, 100, 1.0, 50000, 1.0);
        got = n * window_after(&w, 100, 1.0 / n, 50000, 1.0);
        CHECK(got > want / 2 && got < 2 * want, "%u ranks: %zu, one rank: %zu", n, got, want);
    }
}

static void test_small_and_large(void)
{
    sp_tcp_window w;
    sp_tcp_window_init(&w, 1000, 1);
    CHECK(w.socket_bytes == SP_TCP_WINDOW_SOCKET_MIN, "%zu", w.socket_bytes);
    sp_tcp_window_init(&w, 1, 1);
    CHECK(sp_tcp_window_learn(&w, 1e9) && w.socket_bytes == INT_MAX, "%zu", w.socket_bytes);
    sp_tcp_window_init(&w, 0, 1);
    CHECK(!sp_tcp_window_due(&w, INT64_MAX), "no socket to another host: nothing to measure");
}

/* A connection over loopback: [0] sends, [1] does not read. segment_bytes: of its segments, at most; 0: 64 KiB. */
static int connect_pair(int fds[2], int segment_bytes)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t n = sizeof at;
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    fds[0] = socket(AF_INET, SOCK_STREAM, 0);
    if (listener < 0 || fds[0] < 0 ||
        (segment_bytes != 0 &&
         setsockopt(fds[0], IPPROTO_TCP, TCP_MAXSEG, &segment_bytes, sizeof segment_bytes) != 0) ||
        bind(listener, (struct sockaddr *)&at, n) != 0 || listen(listener, 1) != 0 ||
        getsockname(listener, (struct sockaddr *)&at, &n) != 0 ||
        connect(fds[0], (struct sockaddr *)&at, n) != 0 || (fds[1] = accept(listener, NULL, NULL)) < 0)
        return -1;
    close(listener);
    return 0;
}

/* Bytes that the kernel takes from a sender whose receiver does not read, without the bytes that it has
 * delivered. */
static size_t bytes_taken(int fd, int receiver)
{
    static uint8_t block[1 << 16];
    size_t sent = 0, refused = 0;
    int waiting = 0;
    while (refused < 50) { /* what is delivered makes space: go on until nothing moves for 50 ms */
        ssize_t n = send(fd, block, sizeof block, MSG_DONTWAIT);
        if (n > 0) {
            sent += (size_t)n;
            refused = 0;
        } else {
            refused++;
            sleep_ms(1);
        }
    }
    CHECK(ioctl(receiver, SIOCINQ, &waiting) == 0, "SIOCINQ: errno %d", errno);
    return sent - (size_t)waiting;
}

static void test_kernel_keeps_to_it(void)
{
    static const size_t limits[] = {8 << 10, 64 << 10, 256 << 10};
    for (size_t i = 0; i < sizeof limits / sizeof *limits; i++) {
        sp_tcp_window w;
        int fds[2];
        size_t taken;
        CHECK(connect_pair(fds, SEGMENT_BYTES) == 0, "loopback: errno %d", errno);
        w.socket_bytes = limits[i];
        sp_tcp_window_apply(&w, fds[0]);
        taken = bytes_taken(fds[0], fds[1]);
        /* A send that begins below the limit may end above it by a segment of 64 KiB. On a busy machine 142848 bytes
         * were taken at a limit of 65536. Without the limit the kernel takes megabytes. */
        CHECK(taken <= 2 * limits[i] + (128 << 10), "limit %zu: %zu bytes taken", limits[i], taken);
        CHECK(taken >= limits[i] / 16, "limit %zu: only %zu bytes taken", limits[i], taken);
        CHECK(sp_tcp_window_rtt(fds[0]) > 0, "no round trip");
        close(fds[0]);
        close(fds[1]);
    }
}

/* net.core.wmem_max: the kernel grants SO_SNDBUF up to twice this. */
static size_t wmem_max(void)
{
    size_t bytes = 0;
    FILE *f = fopen("/proc/sys/net/core/wmem_max", "r");
    CHECK(f != NULL && fscanf(f, "%zu", &bytes) == 1, "no /proc/sys/net/core/wmem_max");
    if (f != NULL)
        fclose(f);
    return bytes;
}

/* Many sockets that share a limit: each may have 4 segments in flight. Over loopback these have 64 KiB each, and with
 * less than one the sender waited 40 ms for each acknowledgement. */
static void test_segments(void)
{
    sp_tcp_window w;
    int fds[2], got = 0, segment = 0;
    socklen_t n = sizeof got, m = sizeof segment;
    CHECK(connect_pair(fds, 0) == 0, "loopback: errno %d", errno);
    sp_tcp_window_init(&w, 1, 32);
    sp_tcp_window_apply(&w, fds[0]);
    CHECK(getsockopt(fds[0], SOL_SOCKET, SO_SNDBUF, &got, &n) == 0 &&
              getsockopt(fds[0], IPPROTO_TCP, TCP_MAXSEG, &segment, &m) == 0,
          "errno %d", errno);
    CHECK(w.socket_bytes < (size_t)segment, "the limit is %zu bytes: nothing is tested", w.socket_bytes);
    CHECK(got >= 4 * segment - 1 || 2 * wmem_max() < 4 * (size_t)segment,
          "SO_SNDBUF %d; wanted 4 segments of %d bytes", got, segment);
    close(fds[0]);
    close(fds[1]);
}

/* A limit that the system does not allow leaves the kernel's own control on. */
static void test_more_than_allowed(void)
{
    sp_tcp_window w;
    int fds[2], locks = -1;
    socklen_t n = sizeof locks;
    CHECK(connect_pair(fds, SEGMENT_BYTES) == 0, "loopback: errno %d", errno);
    for (int i = 0; i < 2;
         i++) { /* far more than is allowed, and half as much again: a socket gets 2 * wmem_max */
        w.socket_bytes = i == 0 ? (size_t)1 << 30 : 3 * wmem_max();
        sp_tcp_window_apply(&w, fds[0]);
        n = sizeof locks;
        if (getsockopt(fds[0], SOL_SOCKET, SO_BUF_LOCK, &locks, &n) == 0)
            CHECK((locks & SOCK_SNDBUF_LOCK) == 0, "%zu bytes: locks %d", w.socket_bytes, locks);
    }
    w.socket_bytes = 64 << 10; /* and a smaller one holds again */
    sp_tcp_window_apply(&w, fds[0]);
    n = sizeof locks;
    CHECK(getsockopt(fds[0], SOL_SOCKET, SO_SNDBUF, &locks, &n) == 0 && locks == 64 << 10, "SO_SNDBUF %d",
          locks);
    close(fds[0]);
    close(fds[1]);
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {{"links", test_links},
                                             {"idle", test_idle_time_is_not_measured},
                                             {"sharing", test_sharing},
                                             {"small_and_large", test_small_and_large},
                                             {"kernel", test_kernel_keeps_to_it},
                                             {"segments", test_segments},
                                             {"more_than_allowed", test_more_than_allowed},
                                             {NULL, NULL}};
    return test_main(cases, argc, argv);
}
