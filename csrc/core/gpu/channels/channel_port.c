/* channel_port.c - start and end of the proxy of port channels; see channel_port.h. */
#include "core/gpu/channels/channel_port.h"

#include "core/base/clock.h"
#include "core/base/mem.h"

#include <stdio.h>

/* Capacity of the queue to a peer. A transport takes messages of a quarter of it. */
#define QUEUE_BYTES ((size_t)2 << 20)
_Static_assert(SP_PORT_HEAD_BYTES + SP_PORT_CHUNK_BYTES <= QUEUE_BYTES / 4, "the largest message");
#define DRAIN_STEP_NS 100000

/* ---- opening ---- */

static void find_words(sp_port *port, int peer)
{
    const spccl_channels *c = port->c;
    const spccl_comm *comm = c->g->comm;
    uint32_t slot = sp_inbox_slot((uint32_t)comm->rank, (uint32_t)peer, (uint32_t)comm->world_size);
    uint8_t *memory = c->pinned;
    port->peers[peer].channels = port->channels + (size_t)slot * c->n_per_peer;
    for (uint32_t i = 0; i < c->n_per_peer; i++) {
        uint64_t number = sp_channels_number(c, slot, i), line = number * SP_CHANNELS_LINE;
        port->peers[peer].channels[i] = (sp_port_channel){
            .posted = (uint64_t *)(void *)(memory + c->layout.posted_off + line),
            .done = (uint64_t *)(void *)(memory + c->layout.done_off + line),
            .signals = (uint64_t *)(void *)(memory + c->layout.signals_off + line),
            .fifo = (spccl_trigger *)(void *)(memory + c->layout.fifos_off) + number * c->n_triggers};
    }
}

spccl_status sp_port_open(spccl_channels *c, const sp_channels_deadlines *d)
{
    const spccl_comm *comm = c->g->comm;
    size_t n = (size_t)(comm->world_size - 1) * c->n_per_peer;
    sp_port *port = sp_calloc(1, sizeof *port);
    sp_endpoint_config ec = {.group_tag = UINT64_C(0x53504348414e4e00) + c->number,
                             .queue_bytes = QUEUE_BYTES,
                             .deadline_ns = d->step_ns};
    if (port == NULL)
        return SP_FAIL(SPCCL_ERR_NOMEM, "rank %d: the proxy of a set of channels: %zu bytes", comm->rank,
                       sizeof *port);
    c->port = port;
    port->c = c;
    snprintf(port->thread.what, sizeof port->thread.what, "channels to");
    SP_TRY(sp_proxy_thread_open(&port->thread, c->g));
    port->channels = sp_calloc(n != 0 ? n : 1, sizeof *port->channels);
    if (port->channels == NULL)
        return SP_FAIL(SPCCL_ERR_NOMEM, "rank %d: the proxy of %zu channels", comm->rank, n);
    for (int p = 0; p < comm->world_size; p++)
        if (p != comm->rank)
            find_words(port, p);
    return sp_proxy_thread_add(&port->thread, ~(UINT64_C(1) << comm->rank), &ec);
}

/* ---- the thread ---- */

static spccl_status round_of(void *ctx, bool *moved)
{
    return sp_port_round(ctx, moved);
}

spccl_status sp_port_start(spccl_channels *c, spccl_status opened, const sp_channels_deadlines *d)
{
    spccl_comm *comm = c->g->comm;
    sp_port *port = c->port;
    sp_proxy_thread *thread;
    spccl_status st;
    SP_TRY(sp_gpu_agree_by(comm, opened, d->call_ns));
    thread = &port->thread; /* without an error there is a port */
    SP_TRY(sp_gpu_agree_by(comm, sp_proxy_threads_meet(&thread, 1, d->call_ns), d->call_ns));
    do
        st = sp_gpu_agree_by(comm, sp_proxy_threads_connect(&thread, 1, "the channels", d->step_ns),
                             d->call_ns);
    while (st == SPCCL_AGAIN);
    SP_TRY(st);
    thread->name = "spccl-channels";
    thread->ctx = port;
    thread->round =
        round_of; /* is_idle stays NULL: no call says that a kernel with channels starts or ends */
    return sp_gpu_agree_by(comm, sp_proxy_thread_start(thread), d->call_ns);
}

/* ---- the end ---- */

void sp_port_drain(sp_port *port, int64_t deadline_ns)
{
    if (port == NULL)
        return;
    while (!sp_port_is_done(port) && sp_comm_broken(port->c->g->comm) == SPCCL_OK &&
           !sp_deadline_passed(deadline_ns))
        nanosleep(&(struct timespec){.tv_nsec = DRAIN_STEP_NS}, NULL);
}

void sp_port_close(sp_port *port)
{
    if (port == NULL)
        return;
    sp_proxy_thread_stop(&port->thread);
    sp_proxy_thread_close(&port->thread);
    sp_free(port->channels);
    sp_free(port);
}
