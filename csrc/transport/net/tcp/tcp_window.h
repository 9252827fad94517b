/* tcp_window.h - how many bytes this rank may have in flight to other hosts, and what a byte to them costs.
 *
 * In every schedule several ranks send to one receiver at once. Without a limit TCP fills the queue of the
 * receiver's switch port until it overflows. A lost tail then waits 200 ms for the retransmission timer. On
 * an emulated network of 4 hosts (1 Gbit/s each, queue of 880 KiB) a dense all-reduce of 64 MiB had 10,000
 * lost segments. So the sender limits itself, with SO_SNDBUF. All sockets to other hosts together get
 *     SP_TCP_WINDOW_QUEUE_BYTES + 2 * rate * max(2 * round trip, SP_TCP_WINDOW_DELAY_NS)
 * The first term fits into the queue of a small switch. The second keeps the link busy. `rate` is measured
 * while there is more to send than the kernel takes. A window of 4 times rate * round trip lets the rate double from one
 * measurement to the next until the link limits it, even if half of the sockets have nothing to send.
 * While a socket is below its limit, the kernel takes all of one write, up to 64 KiB. Shorter writes were slower
 * (bench/notes/transports.md).
 *
 * This file knows no ranks and no messages. */
#ifndef SP_TCP_WINDOW_H
#define SP_TCP_WINDOW_H

#include "spccl.h"

#include <stdbool.h>

#define SP_TCP_WINDOW_QUEUE_BYTES ((size_t)256 << 10)
#define SP_TCP_WINDOW_DELAY_NS                                                                               \
    INT64_C(200000) /* time until the kernel and this thread see an acknowledgement */
#define SP_TCP_WINDOW_SOCKET_MIN ((size_t)8 << 10) /* a socket gets as much even if its part is less */
#define SP_TCP_WINDOW_START_RATE 1.25              /* bytes per ns until one is measured: 10 Gbit/s */
#define SP_TCP_WINDOW_SAMPLE_NS INT64_C(10000000)

typedef struct sp_tcp_window {
    uint32_t n_sockets;  /* sockets to other hosts */
    uint32_t n_sharing;  /* ranks of this host, which share its link */
    size_t socket_bytes; /* limit of each */
    double rate;         /* bytes per ns to all other hosts together; 0: not known yet */
    bool measured;       /* by sp_tcp_window_measure; else `rate` is of sp_tcp_window_learn */
    int64_t rtt_ns;      /* round trip, without queues */
    uint64_t n_bytes;    /* taken by the kernel, ever: the caller adds to it */
    /* the present measurement */
    int64_t since_ns;
    uint64_t since_bytes;
    bool since_full;
} sp_tcp_window;

/* n_sockets: sockets to other hosts; with 0 the window is never due. A peer that is lost later breaks the group,
 * so its share is not given to the others. n_sharing: ranks of this host, at least 1. Each takes its part of
 * SP_TCP_WINDOW_QUEUE_BYTES, and of the rate until one is measured. */
void sp_tcp_window_init(sp_tcp_window *w, uint32_t n_sockets, uint32_t n_sharing);
/* True if it is time to call sp_tcp_window_measure. */
static inline bool sp_tcp_window_due(const sp_tcp_window *w, int64_t now_ns)
{
    return w->n_sockets != 0 && now_ns - w->since_ns >= SP_TCP_WINDOW_SAMPLE_NS;
}
/* End one measurement and begin the next.
 *   full     a socket has bytes that the kernel does not take
 *   rtt_ns   the largest, over the sockets that wait, of the kernel's smallest round trip; 0: unknown
 * Returns true if socket_bytes has changed: the caller then calls sp_tcp_window_apply for every socket. */
bool sp_tcp_window_measure(sp_tcp_window *w, int64_t now_ns, bool full, int64_t rtt_ns);
/* Take over a rate that tcp_drain.h has found. Has no effect once sp_tcp_window_measure has found one. Returns true as
 * sp_tcp_window_measure does. */
bool sp_tcp_window_learn(sp_tcp_window *w, double rate);
/* Limit the bytes in flight of one socket to socket_bytes. A socket may have 4 segments of its connection in any case:
 * with fewer, acknowledgements are delayed by 40 ms. If the system does not allow so much (net.core.wmem_max), the
 * kernel's own control of the buffer is switched on again. Before Linux 5.14 the largest allowed limit stays instead. */
void sp_tcp_window_apply(const sp_tcp_window *w, int fd);
/* The kernel's estimate of the smallest round trip of a socket, in ns; 0: unknown. */
int64_t sp_tcp_window_rtt(int fd);
/* Time to move one byte to another host, in ns. */
double sp_tcp_window_ns_per_byte(const sp_tcp_window *w);

#endif
