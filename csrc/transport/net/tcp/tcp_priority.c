/* tcp_priority.c - see tcp_priority.h. */
#include "transport/net/tcp/tcp_priority.h"

void sp_tcp_priority_begin(sp_tcp_priority *p, uint32_t call, int64_t now_ns)
{
    if (p->n_waiting++ == 0 || sp_tcp_call_before(call, p->earliest)) {
        p->earliest = call;
        p->n_earliest = 1;
        p->moved_ns = now_ns;
    } else if (call == p->earliest) {
        p->n_earliest++;
    }
}

void sp_tcp_priority_moved(sp_tcp_priority *p, uint32_t call, int64_t now_ns)
{
    if (p->n_waiting != 0 && call == p->earliest)
        p->moved_ns = now_ns;
}

bool sp_tcp_priority_end(sp_tcp_priority *p, uint32_t call)
{
    p->n_waiting--;
    if (call == p->earliest)
        p->n_earliest--;
    return p->n_waiting != 0 && p->n_earliest == 0;
}

void sp_tcp_priority_forget(sp_tcp_priority *p)
{
    p->n_waiting = p->n_earliest = 0;
}

bool sp_tcp_priority_may_send(const sp_tcp_priority *p, uint32_t call, int64_t now_ns)
{
    return p->n_waiting == 0 || !sp_tcp_call_before(p->earliest, call) ||
           now_ns - p->moved_ns >= p->hold_timeout_ns;
}
