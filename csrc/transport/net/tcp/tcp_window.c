/* tcp_window.c - see tcp_window.h. */
#include "transport/net/tcp/tcp_window.h"

#include "core/base/bits.h"

#include <limits.h>
#include <linux/tcp.h> /* not netinet/tcp.h: its tcp_info ends before tcpi_min_rtt */
#include <netinet/in.h>
#include <stddef.h>
#include <sys/socket.h>

#define MEASURE_NS_MAX                                                                                       \
    (5 * SP_TCP_WINDOW_SAMPLE_NS) /* this thread slept: it does not know whether the link was busy */
#define SEGMENTS_MIN 4            /* of the largest size, in a socket's buffer */
#define CHANGE_MIN 4              /* new limits that differ by less than 1/4 are not applied */

#ifndef SO_BUF_LOCK /* Linux 5.14; older headers do not have it */
#define SO_BUF_LOCK 72
#endif

/* The limit of one socket for the present rate and round trip. */
static size_t socket_limit(const sp_tcp_window *w)
{
    double rate = w->rate > 0 ? w->rate : SP_TCP_WINDOW_START_RATE / w->n_sharing;
    double delay_ns = (double)(2 * w->rtt_ns);
    double bytes;
    if (delay_ns < (double)SP_TCP_WINDOW_DELAY_NS)
        delay_ns = (double)SP_TCP_WINDOW_DELAY_NS;
    bytes = ((double)SP_TCP_WINDOW_QUEUE_BYTES / w->n_sharing + 2 * rate * delay_ns) / w->n_sockets;
    return bytes > (double)INT_MAX ? (size_t)INT_MAX : sp_max_size((size_t)bytes, SP_TCP_WINDOW_SOCKET_MIN);
}

void sp_tcp_window_init(sp_tcp_window *w, uint32_t n_sockets, uint32_t n_sharing)
{
    *w = (sp_tcp_window){.n_sockets = n_sockets, .n_sharing = n_sharing};
    if (n_sockets != 0)
        w->socket_bytes = socket_limit(w);
}

/* The rate rises at once, and falls slowly: a peer that is late for a while does not make the link slower. */
static double next_rate(double rate, double measured)
{
    return measured > rate ? measured : rate + (measured - rate) / 8;
}

/* Make socket_bytes fit the rate and the round trip. True if it has changed. */
static bool update_limit(sp_tcp_window *w)
{
    size_t limit = socket_limit(w);
    if (limit - limit / CHANGE_MIN <= w->socket_bytes && w->socket_bytes <= limit + limit / CHANGE_MIN)
        return false;
    w->socket_bytes = limit;
    return true;
}

bool sp_tcp_window_measure(sp_tcp_window *w, int64_t now_ns, bool full, int64_t rtt_ns)
{
    int64_t took_ns = now_ns - w->since_ns;
    if (full && w->since_full && took_ns <= MEASURE_NS_MAX) {
        double rate = (double)(w->n_bytes - w->since_bytes) / (double)took_ns;
        if (rate > 0 || w->measured) { /* else a rate that was learnt stays */
            w->rate = next_rate(w->measured ? w->rate : 0, rate);
            w->measured = true;
        }
    }
    if (rtt_ns != 0)
        w->rtt_ns = rtt_ns > w->rtt_ns ? rtt_ns : w->rtt_ns + (rtt_ns - w->rtt_ns) / 8;
    w->since_ns = now_ns;
    w->since_bytes = w->n_bytes;
    w->since_full = full;
    return update_limit(w);
}

bool sp_tcp_window_learn(sp_tcp_window *w, double rate)
{
    if (w->measured)
        return false;
    w->rate = next_rate(w->rate, rate);
    return update_limit(w);
}

/* The least for this socket. Where a buffer holds few segments, the last one waits for a delayed acknowledgement,
 * 40 ms. Over loopback a segment has 64 KiB. */
static size_t segments_min(int fd)
{
    int bytes = 0;
    socklen_t n = sizeof bytes;
    if (getsockopt(fd, IPPROTO_TCP, TCP_MAXSEG, &bytes, &n) != 0 || bytes < 0)
        return 0;
    return SEGMENTS_MIN * (size_t)bytes;
}

void sp_tcp_window_apply(const sp_tcp_window *w, int fd)
{
    size_t bytes = sp_max_size(w->socket_bytes, segments_min(fd));
    /* The kernel doubles the number, and counts its own tables in it. Tables take much less than half. */
    int half = (int)(bytes / 2), got = 0, no_locks = 0;
    socklen_t n = sizeof got;
    if (setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &half, sizeof half) != 0 ||
        getsockopt(fd, SOL_SOCKET, SO_SNDBUF, &got, &n) != 0 || (int64_t)got >= 2 * (int64_t)half)
        return;
    (void)setsockopt(fd, SOL_SOCKET, SO_BUF_LOCK, &no_locks, sizeof no_locks);
}

int64_t sp_tcp_window_rtt(int fd)
{
    struct tcp_info info;
    socklen_t n = sizeof info;
    /* An older kernel gives a shorter struct. */
    if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &n) != 0 ||
        n < offsetof(struct tcp_info, tcpi_min_rtt) + sizeof info.tcpi_min_rtt)
        return 0;
    return info.tcpi_min_rtt == UINT32_MAX ? 0 : (int64_t)info.tcpi_min_rtt * 1000;
}

double sp_tcp_window_ns_per_byte(const sp_tcp_window *w)
{
    return 1 / (w->rate > 0 ? w->rate : SP_TCP_WINDOW_START_RATE / w->n_sharing);
}
