/* tcp_drain.c - see tcp_drain.h. */
#include "transport/net/tcp/tcp_drain.h"

#include <linux/sockios.h>
#include <linux/tcp.h> /* not netinet/tcp.h: its tcp_info ends before tcpi_min_rtt */
#include <netinet/in.h>
#include <stddef.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

static void begin(sp_tcp_drain *d, int64_t now_ns, int64_t acked, int64_t held)
{
    d->since_ns = now_ns;
    d->since_acked = acked;
    d->since_held = held >= SP_TCP_DRAIN_BYTES_MIN ? held : 0;
}

double sp_tcp_drain_look(sp_tcp_drain *d, int64_t now_ns, uint64_t n_bytes, uint64_t held_bytes)
{
    int64_t held = (int64_t)held_bytes;
    /* Bytes of the start-up may be in flight too. So these numbers may be below 0 for a moment. */
    int64_t acked = (int64_t)n_bytes - held, n = acked - d->since_acked;
    double rate = 0;
    d->took_ns = now_ns - d->since_ns;
    d->n_looks += held != 0 && d->n_looks < SP_TCP_DRAIN_LOOKS;
    d->next_ns = now_ns + (d->n_looks < SP_TCP_DRAIN_LOOKS ? SP_TCP_DRAIN_SAMPLE_NS : SP_TCP_DRAIN_SLOW_NS);
    if (d->since_held != 0 && d->took_ns <= SP_TCP_DRAIN_NS_MAX) {
        if (n < d->since_held / 4)
            return 0; /* too few yet: acknowledgements come in large steps */
        if (n <= d->since_held - d->since_held / 4 && d->took_ns > 0)
            rate = (double)n / (double)d->took_ns;
    }
    begin(d, now_ns, acked, held);
    return rate;
}

bool sp_tcp_drain_shows_link(const sp_tcp_drain *d, const sp_tcp_drain_facts *facts)
{
    return facts->unsent_bytes != 0 && !facts->peer_full && d->took_ns >= SP_TCP_DRAIN_RTTS * facts->rtt_ns;
}

uint64_t sp_tcp_drain_held(int fd)
{
    int bytes = 0;
    return ioctl(fd, SIOCOUTQ, &bytes) == 0 && bytes > 0 ? (uint64_t)bytes : 0;
}

void sp_tcp_drain_add_facts(int fd, uint64_t *peer_full_us, sp_tcp_drain_facts *facts)
{
    struct tcp_info info;
    socklen_t n = sizeof info;
    int64_t rtt_ns;
    /* An older kernel gives a shorter struct: then nothing is learnt from this look. */
    if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &n) != 0 ||
        n < offsetof(struct tcp_info, tcpi_rwnd_limited) + sizeof info.tcpi_rwnd_limited) {
        facts->peer_full = true;
        return;
    }
    rtt_ns = info.tcpi_min_rtt == UINT32_MAX ? 0 : (int64_t)info.tcpi_min_rtt * 1000;
    facts->unsent_bytes += info.tcpi_notsent_bytes;
    facts->peer_full = facts->peer_full || info.tcpi_rwnd_limited != *peer_full_us;
    facts->rtt_ns = rtt_ns > facts->rtt_ns ? rtt_ns : facts->rtt_ns;
    *peer_full_us = info.tcpi_rwnd_limited;
}
