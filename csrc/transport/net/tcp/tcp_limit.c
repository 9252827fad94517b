/* tcp_limit.c - applies the window (tcp_window.h) to all sockets to other hosts. See tcp.h. */
#include "transport/net/tcp/tcp.h"

#include <string.h>

#define HOLD_NS_MIN INT64_C(10000000)
#define HOLD_NS_MAX INT64_C(1000000000)

/* Call fn for every socket to another host that carries messages. */
static void for_remote_sockets(struct sp_tcp *ep,
                               void (*fn)(struct sp_tcp *ep, struct sp_tcp_socket *s, void *arg), void *arg)
{
    for (int i = 0; i < ep->config.world_size; i++) {
        struct sp_tcp_peer *p = &ep->peers[i];
        if (p->state == SP_TCP_UP && !p->same_host && !p->is_control)
            for (uint32_t k = 0; k < sp_tcp_n_sockets(ep, p); k++)
                fn(ep, &p->sockets[k], arg);
    }
}

static void count_socket(struct sp_tcp *ep, struct sp_tcp_socket *s, void *n)
{
    (void)ep;
    (void)s;
    ++*(uint32_t *)n;
}

static void apply_to_socket(struct sp_tcp *ep, struct sp_tcp_socket *s, void *arg)
{
    (void)arg;
    sp_tcp_window_apply(&ep->window, s->fd);
}

/* How long sockets of later calls are held although the earliest call does not move: the time in which the link
 * carries the window twice. If nothing moves for so long, it is not the link that delays the earliest call. */
static int64_t hold_timeout_ns(const sp_tcp_window *w)
{
    double ns = 2 * (double)w->socket_bytes * w->n_sockets * sp_tcp_window_ns_per_byte(w);
    if (ns < (double)HOLD_NS_MIN)
        return HOLD_NS_MIN;
    return ns > (double)HOLD_NS_MAX ? HOLD_NS_MAX : (int64_t)ns;
}

static void apply_window(struct sp_tcp *ep)
{
    for_remote_sockets(ep, apply_to_socket, NULL);
    ep->priority.hold_timeout_ns = hold_timeout_ns(&ep->window);
}

struct look {
    bool full;
    int64_t rtt_ns;
};

static void look_at_socket(struct sp_tcp *ep, struct sp_tcp_socket *s, void *arg)
{
    struct look *l = arg;
    int64_t rtt_ns;
    (void)ep;
    if (s->out.used == 0 || s->cut)
        return;
    l->full = true;
    rtt_ns = sp_tcp_window_rtt(s->fd);
    l->rtt_ns = rtt_ns > l->rtt_ns ? rtt_ns : l->rtt_ns;
}

/* Ranks that share this host's link. Only ranks of other hosts are peers here, so take the mean of their hosts. */
static uint32_t ranks_per_host(const struct sp_tcp *ep)
{
    uint32_t n_ranks = 0, n_hosts = 0;
    for (int i = 0; i < ep->config.world_size; i++) {
        const struct sp_tcp_peer *p = &ep->peers[i];
        int before = 0;
        if (p->state != SP_TCP_UP || p->same_host)
            continue;
        while (before < i && (ep->peers[before].state != SP_TCP_UP ||
                              memcmp(ep->peers[before].host, p->host, SP_HOST_ID_BYTES) != 0))
            before++;
        n_ranks++;
        n_hosts += before == i;
    }
    return n_hosts == 0 ? 1 : (n_ranks + n_hosts - 1) / n_hosts;
}

void sp_tcp_limit_window(struct sp_tcp *ep)
{
    uint32_t n = 0;
    for_remote_sockets(ep, count_socket, &n);
    sp_tcp_window_init(&ep->window, n,
                       ranks_per_host(ep) * (ep->config.n_sharing != 0 ? ep->config.n_sharing : 1));
    ep->drain = (sp_tcp_drain){.next_ns = n == 0 ? INT64_MAX : 0};
    apply_window(ep);
}

void sp_tcp_update_window(struct sp_tcp *ep, int64_t now_ns)
{
    struct look l = {0};
    for_remote_sockets(ep, look_at_socket, &l);
    if (sp_tcp_window_measure(&ep->window, now_ns, l.full, l.rtt_ns))
        apply_window(ep);
}

static void count_in_flight(struct sp_tcp *ep, struct sp_tcp_socket *s, void *held)
{
    uint64_t bytes;
    (void)ep;
    if (!s->in_flight || s->cut)
        return;
    bytes = sp_tcp_drain_held(s->fd);
    s->in_flight = bytes != 0;
    *(uint64_t *)held += bytes;
}

static void add_facts(struct sp_tcp *ep, struct sp_tcp_socket *s, void *facts)
{
    (void)ep;
    if (s->in_flight && !s->cut)
        sp_tcp_drain_add_facts(s->fd, &s->peer_full_us, facts);
}

void sp_tcp_learn_rate(struct sp_tcp *ep, int64_t now_ns)
{
    sp_tcp_drain_facts facts = {0};
    uint64_t held = 0;
    double rate;
    if (ep->window.measured) { /* long calls show more */
        ep->drain.next_ns = INT64_MAX;
        return;
    }
    for_remote_sockets(ep, count_in_flight, &held);
    rate = sp_tcp_drain_look(&ep->drain, now_ns, ep->window.n_bytes, held);
    if (rate == 0)
        return;
    for_remote_sockets(ep, add_facts, &facts);
    if (sp_tcp_drain_shows_link(&ep->drain, &facts) && sp_tcp_window_learn(&ep->window, rate))
        apply_window(ep);
}
