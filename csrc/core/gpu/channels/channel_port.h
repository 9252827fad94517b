/* channel_port.h - the proxy of a set of port channels: a thread that carries out the triggers of kernels over the
 * transports of the communicator's links, and writes what peers send into this rank's window.
 *
 * A kernel writes triggers into the FIFO of a channel and adds to `posted`. The proxy checks each trigger, sends it,
 * and adds 1 to `done`: the source has then been read. It may divide a put into several messages. It makes no call of
 * CUDA, because such a call may wait for a kernel that waits for the proxy.
 *
 * A message (little-endian): u32 "SPPT", u32 spccl_trigger_op, u32 index of the channel, u32 number of the receiver's
 * memory, u64 offset in it, u64 bytes, u64 number of the signal, from 1 (of a put: 0), u64 zero; then the bytes. A signal
 * alone has no memory, offset and bytes. A put with a signal is a signal after its last message only.
 *
 * channel_port.c: start and end. channel_move.c: one round. proxy_thread.c: its thread, as of the collectives. */
#ifndef SP_CHANNEL_PORT_H
#define SP_CHANNEL_PORT_H

#include "core/gpu/channels/channels.h"
#include "core/gpu/proxy/proxy_thread.h"

#define SP_PORT_HEAD_BYTES 48u
/* Most bytes of a put in one message. */
#define SP_PORT_CHUNK_BYTES (256u << 10)

/* One channel to a peer. Pointers to pinned memory. */
typedef struct sp_port_channel {
    const uint64_t *posted;
    uint64_t *done, *signals;
    const spccl_trigger *fifo;
    uint64_t sent_bytes;   /* of trigger number *done, a put that is under way */
    uint64_t signals_sent; /* to the peer */
} sp_port_channel;

typedef struct sp_port_peer {
    bool gone;                 /* it has left, and all that it sent has been taken */
    sp_port_channel *channels; /* [n_per_peer] */
} sp_port_peer;

typedef struct sp_port {
    spccl_channels *c;
    sp_proxy_thread thread;
    sp_port_peer peers[SP_GPU_RANKS_MAX]; /* by rank; this rank's is empty */
    sp_port_channel *channels;            /* owned: of all peers */
} sp_port;

/* ---- channel_port.c ---- */

/* Open the endpoints; c's pinned memory exists. c->port is set at once; the caller calls sp_port_close, after a
 * failure too. Errors: NOMEM, SYSTEM, and those of the transports. */
spccl_status sp_port_open(spccl_channels *c, const sp_channels_deadlines *d);
/* All ranks call it together, each with the status of its sp_port_open: exchange addresses, connect, start the
 * thread. All ranks return the same. */
spccl_status sp_port_start(spccl_channels *c, spccl_status opened, const sp_channels_deadlines *d);
/* Wait until all triggers have been carried out, at most until the deadline, unless the communicator is broken. Accepts
 * NULL. */
void sp_port_drain(sp_port *port, int64_t deadline_ns);
/* Stop the thread and free everything. Accepts NULL. */
void sp_port_close(sp_port *port);

/* ---- channel_move.c ---- */

/* One round: take messages, carry out triggers. *moved = true if anything moved. Errors: ARG (a kernel wrote a wrong
 * trigger), FORMAT (a peer sent a wrong message), PEER, and those of the transports. */
spccl_status sp_port_round(sp_port *port, bool *moved);
/* Has every trigger been carried out that the kernels posted? */
bool sp_port_is_done(const sp_port *port);

#endif
