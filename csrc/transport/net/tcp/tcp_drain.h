/* tcp_drain.h - learns the rate of a slow link from short collectives.
 *
 * tcp_window.h measures the rate while the kernel refuses bytes. A short collective fits into the kernel's buffers,
 * so the rate stays unknown there. This file compares how many bytes the peers have acknowledged at two moments. If
 * that is at most 3/4 of what the kernel held at the first moment, the kernel had bytes to send all the time. Then the
 * link decided how many were acknowledged, and not this process. A fast link empties the kernel's buffers between two
 * moments: nothing is learnt, and a byte counts as at SP_TCP_WINDOW_START_RATE.
 *
 * This file knows no ranks and no clock: the caller gives the time. */
#ifndef SP_TCP_DRAIN_H
#define SP_TCP_DRAIN_H

#include <stdbool.h>
#include <stdint.h>

#define SP_TCP_DRAIN_SAMPLE_NS INT64_C(500000)
#define SP_TCP_DRAIN_NS_MAX INT64_C(50000000) /* longer: the peers did not read, or the link was down */
/* Less in the kernel at the beginning is not measured: acknowledgements come for many segments at once. */
#define SP_TCP_DRAIN_BYTES_MIN (INT64_C(64) << 10)
#define SP_TCP_DRAIN_RTTS 8 /* a shorter time may show how TCP starts, and not the link */
/* So nothing is learnt from links with a round trip above 6.25 ms. */
/* After so many looks at busy sockets, look every SP_TCP_DRAIN_SLOW_NS: a look costs a system call for each. */
#define SP_TCP_DRAIN_LOOKS 2000u
#define SP_TCP_DRAIN_SLOW_NS INT64_C(10000000)

typedef struct sp_tcp_drain {
    int64_t next_ns; /* when to look again */
    uint32_t n_looks;
    /* the present measurement; since_held 0: none */
    int64_t since_ns, since_acked, since_held;
    int64_t took_ns; /* of the last one that ended */
} sp_tcp_drain;

/* What the kernel says of the sockets that have bytes in flight, together. */
typedef struct sp_tcp_drain_facts {
    uint64_t unsent_bytes; /* not sent even once */
    bool peer_full;        /* a peer's receive buffer was full since the last look at these facts */
    int64_t rtt_ns;        /* the largest of the smallest round trips */
} sp_tcp_drain_facts;

/* True if it is time to call sp_tcp_drain_look. */
static inline bool sp_tcp_drain_due(const sp_tcp_drain *d, int64_t now_ns)
{
    return now_ns >= d->next_ns;
}
/* Look at all sockets to other hosts.
 *   n_bytes   taken by the kernel, ever
 *   held      of these, not acknowledged yet
 * Returns the rate in bytes per ns; 0: this look does not show it. */
double sp_tcp_drain_look(sp_tcp_drain *d, int64_t now_ns, uint64_t n_bytes, uint64_t held);
/* True if the rate that sp_tcp_drain_look has just returned is the link's. If everything was sent, the kernel may wait
 * for a delayed acknowledgement. */
bool sp_tcp_drain_shows_link(const sp_tcp_drain *d, const sp_tcp_drain_facts *facts);
/* Bytes that the kernel has taken and the peer has not acknowledged; 0 if the socket has ended. */
uint64_t sp_tcp_drain_held(int fd);
/* Add what the kernel says of one socket. *peer_full_us: kept for the next call for this socket, 0 at first. */
void sp_tcp_drain_add_facts(int fd, uint64_t *peer_full_us, sp_tcp_drain_facts *facts);

#endif
