/* sim_net.c - queues and links of a simulation. Inside a host a queue is memory: a message is there when it is written.
 * Between hosts the bytes of all queues take turns on the sender's link, in pieces. A piece then takes its time on the
 * receiver's link. A queue has at most a window of bytes on the way, as transport tcp limits them (tcp_window.h), and sends
 * a message only if the receiver's queue has space for it. A link passes its burst at once after a pause. See sim.h. */
#include "core/simulate/sim.h"

sim_flow *sim_flow_to(sim *x, int rep, int to, int queue)
{
    return &x->flows[((size_t)rep * (size_t)x->n_ranks + (size_t)to) * SP_N_QUEUES + (size_t)queue];
}

sim_flow *sim_flow_from(sim *x, int rep, int from, int queue)
{
    int sender = from % x->n_reps, to = rep - (from - sender);
    return sim_flow_to(x, sender, to < 0 ? to + x->n_ranks : to, queue);
}

bool sim_flow_has_space(const sim *x, const sim_flow *f, double bytes)
{
    return f->out_used + bytes <= x->queue_bytes;
}

static void wake_if_space(sim *x, sim_flow *f)
{
    if (f->waiters != SIM_NONE && sim_flow_has_space(x, f, f->wait_bytes))
        sim_rank_wake_waiters(x, &x->ranks[f->from], &f->waiters);
}

/* Bytes that the flow may put on its link now: a whole piece, or the end of a message, never less. */
static double sendable(const sim *x, const sim_flow *f)
{
    double bytes = x->quantum_bytes, window = x->window_bytes - f->in_flight + 1e-6;
    const sim_message *m = f->sending;
    if (m == NULL || (m->to_send >= m->frame.bytes && f->in_used + m->frame.bytes > x->queue_bytes))
        return 0;
    bytes = bytes < m->to_send ? bytes : m->to_send;
    return bytes <= window ? bytes : 0;
}

/* Begin to send the next piece, if the link of the host is free. */
static void send_next(sim *x, int host)
{
    sim_link *l = &x->links[host];
    while (!l->busy && l->first != SIM_NONE) {
        int idx = l->first;
        sim_flow *f = &x->flows[idx];
        double bytes = sendable(x, f), ns;
        l->first = f->next_active;
        f->active = false;
        if (bytes <= 0)
            continue; /* an acknowledgement, or a release, makes it active again */
        if (f->sending->to_send >= f->sending->frame.bytes)
            f->in_used += f->sending->frame.bytes;
        f->in_flight += bytes;
        f->out_used -= bytes;
        l->out_bytes += bytes;
        l->busy = true;
        ns = x->now - x->burst_ns;
        l->out_ns = (l->out_ns > ns ? l->out_ns : ns) + bytes * x->o->link_ns;
        ns = l->out_ns > x->now ? l->out_ns : x->now;
        sim_post(x, (sim_event){.ns = ns, .kind = SIM_LEFT, .who = idx, .bytes = bytes});
        wake_if_space(x, f);
    }
}

static void activate(sim *x, sim_flow *f)
{
    int host = x->ranks[f->from].host, idx = (int)(f - x->flows);
    sim_link *l = &x->links[host];
    if (!f->active && f->sending != NULL) {
        f->active = true;
        f->next_active = SIM_NONE;
        if (l->first == SIM_NONE)
            l->first = idx;
        else
            x->flows[l->last].next_active = idx;
        l->last = idx;
    }
    send_next(x, host);
}

static void arrive(sim *x, sim_flow *f, sim_message *m)
{
    bool is_oldest = f->in == NULL;
    m->next = NULL;
    if (is_oldest)
        f->in = m;
    else
        f->newest->next = m;
    f->newest = m;
    if (is_oldest)
        sim_rank_message(x, f);
}

void sim_flow_commit(sim *x, sim_flow *f, sim_message *m)
{
    if (!f->remote) {
        arrive(x, f, m);
        return;
    }
    m->to_send = m->to_arrive = m->frame.bytes;
    m->next = NULL;
    if (f->out == NULL)
        f->out = m;
    else
        f->last->next = m;
    f->last = m;
    if (f->sending == NULL)
        f->sending = m;
    activate(x, f);
}

void sim_flow_release(sim *x, sim_flow *f)
{
    sim_message *m = f->in;
    f->in = m->next;
    if (f->remote) {
        f->in_used -= m->frame.bytes;
        activate(x, f);
    } else {
        f->out_used -= m->frame.bytes;
        wake_if_space(x, f);
    }
    sim_message_free(x, m);
    if (f->in != NULL)
        sim_rank_message(x, f);
}

/* A piece has passed the sender's link. */
static void piece_left(sim *x, sim_flow *f, double bytes)
{
    sim_link *in = &x->links[x->ranks[f->to].host];
    double at = x->now + x->o->latency_ns, from = at - x->burst_ns;
    in->in_ns = (in->in_ns > from ? in->in_ns : from) + bytes * x->o->link_ns;
    in->in_bytes += bytes;
    sim_post(x, (sim_event){.ns = in->in_ns > at ? in->in_ns : at,
                            .kind = SIM_ARRIVED,
                            .who = (int)(f - x->flows),
                            .bytes = bytes});
    f->sending->to_send -= bytes;
    if (f->sending->to_send <= 1e-6) {
        f->sending->to_send = 0;
        f->sending = f->sending->next;
    }
    x->links[x->ranks[f->from].host].busy = false;
    activate(x, f);
}

static void piece_arrived(sim *x, sim_flow *f, double bytes)
{
    sim_message *m = f->out;
    sim_post(x, (sim_event){.ns = x->now + x->o->latency_ns,
                            .kind = SIM_ACKED,
                            .who = (int)(f - x->flows),
                            .bytes = bytes});
    m->to_arrive -= bytes;
    if (m->to_arrive > 1e-6)
        return;
    f->out = m->next;
    arrive(x, f, m);
}

void sim_flow_event(sim *x, const sim_event *e)
{
    sim_flow *f = &x->flows[e->who];
    if (e->kind == SIM_COMMIT) {
        sim_flow_commit(x, f, e->message);
    } else if (e->kind == SIM_LEFT) {
        piece_left(x, f, e->bytes);
    } else if (e->kind == SIM_ARRIVED) {
        piece_arrived(x, f, e->bytes);
    } else {
        f->in_flight -= e->bytes;
        activate(x, f);
    }
}
