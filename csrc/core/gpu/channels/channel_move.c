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

/* The head of a message. */
typedef struct head {
    uint32_t op, index, memory;
    uint64_t off, bytes, signal;
} head;

/* Write the bytes of a put into this rank's memory. */
static spccl_status apply_put(const spccl_channels *c, const head *h, const uint8_t *data)
{
    uint32_t n_memories = __atomic_load_n(&c->n_memories, __ATOMIC_ACQUIRE);
    const sp_channels_memory *m = &c->memories[h->memory];
    if (h->memory >= n_memories)
        return SP_FAIL(SPCCL_ERR_FORMAT, "%" PRIu64 " bytes for memory %u (channel %u); wanted 0 to %u",
                       h->bytes, h->memory, h->index, n_memories - 1);
    if (h->bytes == 0 || !is_inside(h->off, h->bytes, m->bytes))
        return SP_FAIL(SPCCL_ERR_FORMAT,
                       "%" PRIu64 " bytes for offset %" PRIu64 " of a memory of %" PRIu64 " (channel %u)",
                       h->bytes, h->off, m->bytes, h->index);
    memcpy(m->host + h->off, data, h->bytes);
    return SPCCL_OK;
}

static spccl_status apply_signal(const sp_port_channel *ch, const head *h)
{
    if (h->signal != *ch->signals + 1)
        return SP_FAIL(SPCCL_ERR_FORMAT, "signal number %" PRIu64 " (channel %u); wanted number %" PRIu64,
                       h->signal, h->index, *ch->signals + 1);
    __atomic_store_n(ch->signals, h->signal, __ATOMIC_RELEASE);
    return SPCCL_OK;
}

static spccl_status apply(const sp_port *port, int peer, const uint8_t *message, size_t bytes)
{
    const spccl_channels *c = port->c;
    bool puts, signals;
    head h;
    if (bytes < SP_PORT_HEAD_BYTES || sp_load_le32(message) != MAGIC || sp_load_le64(message + 40) != 0)
        return SP_FAIL(SPCCL_ERR_FORMAT, "%zu bytes that are no message of a channel", bytes);
    h = (head){.op = sp_load_le32(message + 4),
               .index = sp_load_le32(message + 8),
               .memory = sp_load_le32(message + 12),
               .off = sp_load_le64(message + 16),
               .bytes = sp_load_le64(message + 24),
               .signal = sp_load_le64(message + 32)};
    if (h.index >= c->n_per_peer)
        return SP_FAIL(SPCCL_ERR_FORMAT, "a message for channel %u; wanted 0 to %u", h.index,
                       c->n_per_peer - 1);
    if (h.bytes != bytes - SP_PORT_HEAD_BYTES)
        return SP_FAIL(SPCCL_ERR_FORMAT,
                       "a message for channel %u with %zu bytes of data; its head says %" PRIu64, h.index,
                       bytes - SP_PORT_HEAD_BYTES, h.bytes);
    puts = h.op == SPCCL_TRIGGER_PUT || h.op == SPCCL_TRIGGER_PUT_SIGNAL;
    signals = h.op == SPCCL_TRIGGER_SIGNAL || h.op == SPCCL_TRIGGER_PUT_SIGNAL;
    if (!puts && !signals)
        return SP_FAIL(SPCCL_ERR_FORMAT, "a message of kind %u (channel %u); wanted 1 to 3", h.op, h.index);
    if ((!puts && (h.bytes != 0 || h.off != 0 || h.memory != 0)) || (!signals && h.signal != 0))
        return SP_FAIL(SPCCL_ERR_FORMAT,
                       "a message of kind %u (channel %u) with %" PRIu64
                       " bytes for memory %u, and signal %" PRIu64,
                       h.op, h.index, h.bytes, h.memory, h.signal);
    if (puts)
        SP_TRY(apply_put(c, &h, message + SP_PORT_HEAD_BYTES));
    return signals ? apply_signal(&port->peers[peer].channels[h.index], &h) : SPCCL_OK;
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

/* Is the range of a put inside both memories? */
static bool is_good_put(const spccl_channels *c, const spccl_trigger *t)
{
    uint32_t n = __atomic_load_n(&c->n_memories, __ATOMIC_ACQUIRE);
    return t->bytes != 0 && t->dst_memory < n && t->src_memory < n &&
           is_inside(t->dst_off, t->bytes, c->memories[t->dst_memory].bytes) &&
           is_inside(t->src_off, t->bytes, c->memories[t->src_memory].bytes);
}

static spccl_status check_trigger(const spccl_channels *c, int peer, uint32_t index, uint64_t n,
                                  const spccl_trigger *trigger)
{
    uint32_t slot =
        sp_inbox_slot((uint32_t)c->g->comm->rank, (uint32_t)peer, (uint32_t)c->g->comm->world_size);
    uint32_t number = sp_channels_number(c, slot, index);
    bool is_signal = trigger->op == SPCCL_TRIGGER_SIGNAL;
    if (trigger->op != SPCCL_TRIGGER_PUT && !is_signal && trigger->op != SPCCL_TRIGGER_PUT_SIGNAL)
        return SP_FAIL(SPCCL_ERR_ARG, "channel %u to rank %d: trigger %" PRIu64 " has op %u; wanted 1 to 3",
                       index, peer, n, trigger->op);
    if (trigger->number != number)
        return SP_FAIL(SPCCL_ERR_ARG,
                       "channel %u to rank %d: trigger %" PRIu64 " is of channel number %u; wanted %u", index,
                       peer, n, trigger->number, number);
    if (is_signal ? trigger->bytes == 0 && trigger->dst_off == 0 && trigger->src_off == 0
                  : is_good_put(c, trigger))
        return SPCCL_OK;
    return SP_FAIL(SPCCL_ERR_ARG,
                   "channel %u to rank %d: trigger %" PRIu64 " (op %u) has %" PRIu64
                   " bytes from offset %" PRIu64 " of memory %u to offset %" PRIu64
                   " of memory %u; that is outside, or a signal has bytes",
                   index, peer, n, trigger->op, trigger->bytes, trigger->src_off, trigger->src_memory,
                   trigger->dst_off, trigger->dst_memory);
}

/* The next message of a trigger of a channel: `part` bytes, of a put from ch->sent_bytes on. */
static void write_message(const spccl_channels *c, const sp_port_channel *ch, const spccl_trigger *t,
                          uint32_t index, uint64_t part, uint8_t *message)
{
    bool signals = t->op != SPCCL_TRIGGER_PUT && ch->sent_bytes + part == t->bytes;
    bool puts = t->op != SPCCL_TRIGGER_SIGNAL;
    sp_store_le32(message, MAGIC);
    sp_store_le32(message + 4, !puts     ? (uint32_t)SPCCL_TRIGGER_SIGNAL
                               : signals ? (uint32_t)SPCCL_TRIGGER_PUT_SIGNAL
                                         : (uint32_t)SPCCL_TRIGGER_PUT);
    sp_store_le32(message + 8, index);
    sp_store_le32(message + 12, puts ? t->dst_memory : 0);
    sp_store_le64(message + 16, puts ? t->dst_off + ch->sent_bytes : 0);
    sp_store_le64(message + 24, part);
    sp_store_le64(message + 32, signals ? ch->signals_sent + 1 : 0);
    sp_store_le64(message + 40, 0);
    if (puts)
        memcpy(message + SP_PORT_HEAD_BYTES, c->memories[t->src_memory].host + t->src_off + ch->sent_bytes,
               part);
}

/* Send the next message of a trigger. SPCCL_AGAIN: the transport has no space. */
static spccl_status send_part(sp_port *port, int peer, uint32_t index, const spccl_trigger *trigger)
{
    sp_port_channel *ch = &port->peers[peer].channels[index];
    sp_links *links = &port->thread.links;
    uint64_t left = trigger->bytes - ch->sent_bytes,
             part = left < SP_PORT_CHUNK_BYTES ? left : SP_PORT_CHUNK_BYTES;
    void *space = NULL;
    spccl_status st = sp_link_reserve(links, peer, 0, SP_PORT_HEAD_BYTES + part, &space);
    if (st == SPCCL_ERR_PEER)
        return SP_FAIL(
            SPCCL_ERR_PEER,
            "channel %u: rank %d has died or has destroyed its channels; a kernel here still sends to it",
            index, peer);
    SP_TRY(st);
    write_message(port->c, ch, trigger, index, part, space);
    SP_TRY(sp_link_commit(links, peer, 0, 0)); /* all messages of channels are equally urgent */
    ch->sent_bytes += part;
    ch->signals_sent += trigger->op != SPCCL_TRIGGER_PUT && ch->sent_bytes == trigger->bytes;
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
