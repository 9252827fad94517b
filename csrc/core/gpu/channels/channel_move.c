/* channel_move.c - one round of the proxy of port channels; see channel_port.h. */
#include "core/gpu/channels/channel_port.h"

#include "core/base/bits.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#define MAGIC 0x54505053u /* "SPPT" */
/* Messages that are taken from one peer in a round. */
#define TAKE_MAX 16

static uint64_t load(const uint64_t *word)
{
    return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}

static bool is_inside(uint64_t off, uint64_t bytes, uint64_t window_bytes)
{
    return off <= window_bytes && bytes <= window_bytes - off;
}

/* ---- what peers send ---- */

static spccl_status apply(const sp_port *port, int peer, const uint8_t *message, size_t bytes)
{
    const spccl_channels *c = port->c;
    uint32_t op, index;
    uint64_t off, n;
    if (bytes < SP_PORT_HEAD_BYTES || sp_load_le32(message) != MAGIC || sp_load_le32(message + 12) != 0)
        return SP_FAIL(SPCCL_ERR_FORMAT, "%zu bytes that are no message of a channel", bytes);
    op = sp_load_le32(message + 4);
    index = sp_load_le32(message + 8);
    off = sp_load_le64(message + 16);
    n = sp_load_le64(message + 24);
    if (index >= c->n_per_peer)
        return SP_FAIL(SPCCL_ERR_FORMAT, "a message for channel %u; wanted 0 to %u", index,
                       c->n_per_peer - 1);
    if (n != bytes - SP_PORT_HEAD_BYTES)
        return SP_FAIL(SPCCL_ERR_FORMAT,
                       "a message for channel %u with %zu bytes of data; its head says %" PRIu64, index,
                       bytes - SP_PORT_HEAD_BYTES, n);
    if (op == SPCCL_TRIGGER_PUT) {
        if (!is_inside(off, n, c->window_bytes))
            return SP_FAIL(SPCCL_ERR_FORMAT,
                           "%" PRIu64 " bytes for offset %" PRIu64 " of a window of %" PRIu64 " (channel %u)",
                           n, off, c->window_bytes, index);
        memcpy(c->window_host + off, message + SP_PORT_HEAD_BYTES, n);
        return SPCCL_OK;
    }
    if (op == SPCCL_TRIGGER_SIGNAL) {
        uint64_t *signals = port->peers[peer].channels[index].signals;
        if (n != 0 || off != *signals + 1)
            return SP_FAIL(SPCCL_ERR_FORMAT,
                           "signal number %" PRIu64 " with %" PRIu64
                           " bytes (channel %u); wanted number %" PRIu64 " with 0",
                           off, n, index, *signals + 1);
        __atomic_store_n(signals, off, __ATOMIC_RELEASE);
        return SPCCL_OK;
    }
    return SP_FAIL(SPCCL_ERR_FORMAT, "a message of kind %u (channel %u); wanted 1 or 2", op, index);
}

static spccl_status take_messages(sp_port *port, int peer, bool *moved)
{
    sp_port_peer *p = &port->peers[peer];
    sp_links *links = &port->thread.links;
    for (int i = 0; i < TAKE_MAX && !p->gone; i++) {
        const void *message = NULL;
        size_t bytes = 0;
        spccl_status st = sp_link_peek(links, peer, 0, &message, &bytes);
        if (st == SPCCL_AGAIN)
            return SPCCL_OK;
        if (st == SPCCL_ERR_PEER) {
            p->gone = true; /* an error only if a kernel wants to send to it; the watchdog sees lost peers */
            return SPCCL_OK;
        }
        SP_TRY(st);
        st = apply(port, peer, message, bytes);
        if (st != SPCCL_OK)
            return SP_FAIL(st, "rank %d sent %s: do all ranks run the same version of spccl?", peer,
                           spccl_last_error());
        SP_TRY(sp_link_release(links, peer, 0));
        *moved = true;
    }
    return SPCCL_OK;
}

/* ---- the triggers of this rank's kernels ---- */

static spccl_status check_trigger(const spccl_channels *c, int peer, uint32_t index, uint64_t n,
                                  const spccl_trigger *trigger)
{
    uint32_t slot =
        sp_inbox_slot((uint32_t)c->g->comm->rank, (uint32_t)peer, (uint32_t)c->g->comm->world_size);
    uint32_t number = sp_channels_number(c, slot, index);
    bool is_put = trigger->op == SPCCL_TRIGGER_PUT;
    if (trigger->op != SPCCL_TRIGGER_PUT && trigger->op != SPCCL_TRIGGER_SIGNAL)
        return SP_FAIL(SPCCL_ERR_ARG, "channel %u to rank %d: trigger %" PRIu64 " has op %u; wanted 1 or 2",
                       index, peer, n, trigger->op);
    if (trigger->number != number)
        return SP_FAIL(SPCCL_ERR_ARG,
                       "channel %u to rank %d: trigger %" PRIu64 " is of channel number %u; wanted %u", index,
                       peer, n, trigger->number, number);
    if (is_put && trigger->bytes != 0 && is_inside(trigger->dst_off, trigger->bytes, c->window_bytes) &&
        is_inside(trigger->src_off, trigger->bytes, c->window_bytes))
        return SPCCL_OK;
    if (!is_put && trigger->bytes == 0 && trigger->dst_off == 0 && trigger->src_off == 0)
        return SPCCL_OK;
    return SP_FAIL(
        SPCCL_ERR_ARG,
        "channel %u to rank %d: trigger %" PRIu64 " (op %u) has %" PRIu64 " bytes from offset %" PRIu64
        " to offset %" PRIu64 "; windows have %" PRIu64 " bytes, and a signal has zeros",
        index, peer, n, trigger->op, trigger->bytes, trigger->src_off, trigger->dst_off, c->window_bytes);
}

/* Send the next message of a trigger. SPCCL_AGAIN: the transport has no space. */
static spccl_status send_part(sp_port *port, int peer, uint32_t index, const spccl_trigger *trigger)
{
    const sp_port_peer *p = &port->peers[peer];
    sp_port_channel *ch = &p->channels[index];
    sp_links *links = &port->thread.links;
    uint64_t left = trigger->bytes - ch->sent_bytes,
             part = left < SP_PORT_CHUNK_BYTES ? left : SP_PORT_CHUNK_BYTES;
    void *space = NULL;
    uint8_t *message;
    spccl_status st = sp_link_reserve(links, peer, 0, SP_PORT_HEAD_BYTES + part, &space);
    if (st == SPCCL_ERR_PEER)
        return SP_FAIL(
            SPCCL_ERR_PEER,
            "channel %u: rank %d has died or has destroyed its channels; a kernel here still sends to it",
            index, peer);
    SP_TRY(st);
    message = space;
    sp_store_le32(message, MAGIC);
    sp_store_le32(message + 4, trigger->op);
    sp_store_le32(message + 8, index);
    sp_store_le32(message + 12, 0);
    sp_store_le64(message + 16, trigger->op == SPCCL_TRIGGER_PUT ? trigger->dst_off + ch->sent_bytes
                                                                 : ch->signals_sent + 1);
    sp_store_le64(message + 24, part);
    memcpy(message + SP_PORT_HEAD_BYTES, port->c->window_host + trigger->src_off + ch->sent_bytes, part);
    SP_TRY(sp_link_commit(links, peer, 0, 0)); /* all messages of channels are equally urgent */
    ch->sent_bytes += part;
    ch->signals_sent += trigger->op == SPCCL_TRIGGER_SIGNAL;
    return SPCCL_OK;
}

/* Carry out the triggers of one channel: at most one put of SP_PORT_CHUNK_BYTES, so that no channel waits long. */
static spccl_status serve(sp_port *port, int peer, uint32_t index, bool *moved)
{
    const spccl_channels *c = port->c;
    sp_port_channel *ch = &port->peers[peer].channels[index];
    uint64_t posted = load(ch->posted), done = *ch->done, budget = SP_PORT_CHUNK_BYTES;
    if (posted < done || posted - done > c->n_triggers)
        return SP_FAIL(SPCCL_ERR_ARG,
                       "channel %u to rank %d: a kernel posted %" PRIu64 " triggers; wanted %" PRIu64
                       " to %" PRIu64 ", as the FIFO has %u",
                       index, peer, posted, done, done + c->n_triggers, c->n_triggers);
    while (done < posted && budget != 0) {
        spccl_trigger trigger = ch->fifo[done % c->n_triggers];
        uint64_t before = ch->sent_bytes;
        spccl_status st;
        SP_TRY(check_trigger(c, peer, index, done, &trigger));
        st = send_part(port, peer, index, &trigger);
        if (st == SPCCL_AGAIN)
            return SPCCL_OK;
        SP_TRY(st);
        *moved = true;
        budget -= ch->sent_bytes - before < budget ? ch->sent_bytes - before : budget;
        if (ch->sent_bytes != trigger.bytes)
            continue;
        ch->sent_bytes = 0;
        __atomic_store_n(ch->done, ++done, __ATOMIC_RELEASE);
    }
    return SPCCL_OK;
}

spccl_status sp_port_round(sp_port *port, bool *moved)
{
    const spccl_channels *c = port->c;
    SP_TRY(sp_links_progress(&port->thread.links));
    for (int peer = 0; peer < c->g->comm->world_size; peer++) {
        if (peer == c->g->comm->rank)
            continue;
        SP_TRY(take_messages(port, peer, moved));
        for (uint32_t index = 0; index < c->n_per_peer; index++)
            SP_TRY(serve(port, peer, index, moved));
    }
    return SPCCL_OK;
}

bool sp_port_is_done(const sp_port *port)
{
    const spccl_channels *c = port->c;
    for (int peer = 0; peer < c->g->comm->world_size; peer++)
        for (uint32_t index = 0; peer != c->g->comm->rank && index < c->n_per_peer; index++) {
            const sp_port_channel *ch = &port->peers[peer].channels[index];
            if (load(ch->posted) != load(ch->done))
                return false;
        }
    return true;
}
