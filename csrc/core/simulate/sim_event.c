/* sim_event.c - the events of a simulation in the order of time, and the memory of messages. See sim.h. */
#include "core/simulate/sim.h"

#include "core/base/mem.h"

#include <stdlib.h>

#define CHUNK 1024 /* messages that are allocated together */

static bool before(const sim_event *a, const sim_event *b)
{
    if (a->ns < b->ns || a->ns > b->ns)
        return a->ns < b->ns;
    return a->tie != b->tie ? a->tie < b->tie : a->number < b->number;
}

/* Hosts that are equal must stay so: events of one time come in an order that each host sees alike. So ranks count from
 * the first of their host, and flows have the numbers that they have where ranks are merged. */
static uint64_t tie_of(const sim *x, const sim_event *e)
{
    uint64_t who;
    if (e->kind == SIM_WAKE || e->kind == SIM_DONE) {
        who = (uint64_t)(x->ranks[e->who].number % x->per_host);
    } else {
        int queue = e->who % SP_N_QUEUES, to = e->who / SP_N_QUEUES % x->n_ranks;
        int from = e->who / SP_N_QUEUES / x->n_ranks, place = from % x->per_host;
        int turned = (to - (from - place) + x->n_ranks) % x->n_ranks;
        who = ((uint64_t)place * (uint64_t)x->n_ranks + (uint64_t)turned) * SP_N_QUEUES + (uint64_t)queue;
    }
    return (uint64_t)e->kind << 40 | who;
}

void sim_post(sim *x, sim_event e)
{
    size_t i = x->n_events;
    e.number = x->n_posted++;
    e.tie = tie_of(x, &e);
    if (i == x->events_cap) {
        size_t cap = i == 0 ? CHUNK : 2 * i;
        sim_event *more = realloc(x->events, cap * sizeof *more);
        if (more == NULL) {
            x->failed = true;
            return;
        }
        x->events = more;
        x->events_cap = cap;
    }
    x->n_events++;
    while (i != 0 && before(&e, &x->events[(i - 1) / 2])) {
        x->events[i] = x->events[(i - 1) / 2];
        i = (i - 1) / 2;
    }
    x->events[i] = e;
}

bool sim_next(sim *x, sim_event *out)
{
    size_t i = 0;
    sim_event last;
    if (x->n_events == 0)
        return false;
    *out = x->events[0];
    last = x->events[--x->n_events];
    for (;;) {
        size_t child = 2 * i + 1;
        if (child >= x->n_events)
            break;
        if (child + 1 < x->n_events && before(&x->events[child + 1], &x->events[child]))
            child++;
        if (!before(&x->events[child], &last))
            break;
        x->events[i] = x->events[child];
        i = child;
    }
    x->events[i] = last;
    return true;
}

sim_message *sim_message_new(sim *x)
{
    sim_message *m = x->free_messages;
    if (m == NULL) {
        sim_message **chunks = x->chunks;
        if (x->n_chunks == x->chunks_cap) {
            x->chunks_cap = 2 * x->chunks_cap + 16;
            chunks = realloc(x->chunks, x->chunks_cap * sizeof *chunks);
        }
        m = chunks != NULL ? sp_calloc(CHUNK, sizeof *m) : NULL;
        x->chunks = chunks != NULL ? chunks : x->chunks;
        if (m == NULL) {
            x->failed = true;
            return NULL;
        }
        x->chunks[x->n_chunks++] = m;
        for (int i = 0; i < CHUNK; i++)
            sim_message_free(x, &m[i]);
        m = x->free_messages;
    }
    x->free_messages = m->next;
    *m = (sim_message){0};
    return m;
}

void sim_message_free(sim *x, sim_message *m)
{
    m->next = x->free_messages;
    x->free_messages = m;
}

void sim_event_fini(sim *x)
{
    for (size_t i = 0; i < x->n_chunks; i++)
        sp_free(x->chunks[i]);
    free(x->chunks);
    free(x->events);
}
