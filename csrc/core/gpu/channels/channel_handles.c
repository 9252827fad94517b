/* channel_handles.c - one-sided channels: the window, and the structs that kernels take. See channels.h. */
#include "core/gpu/channels/channels.h"

#include <inttypes.h>

spccl_status spccl_channels_window(const spccl_channels *c, void **device, void **host)
{
    if (c == NULL || device == NULL || host == NULL)
        return SP_FAIL(SPCCL_ERR_ARG, "spccl_channels_window: channels, device or host is NULL");
    SP_TRY(sp_comm_check(c->g->comm, "spccl_channels_window"));
    *device = c->memories[0].device;
    *host = c->memories[0].host;
    return SPCCL_OK;
}

/* A call for a handle. */
typedef struct wanted {
    const char *call;
    uint32_t kind;
    int peer;
    uint32_t index, peer_memory, own_memory;
} wanted;

static spccl_status check_handle(const spccl_channels *c, const wanted *w, bool has_out)
{
    const char *call = w->call;
    uint32_t index = w->index, most;
    int peer = w->peer;
    const spccl_comm *comm;
    if (c == NULL)
        return SP_FAIL(SPCCL_ERR_ARG, "%s: channels is NULL", call);
    comm = c->g->comm;
    SP_TRY(sp_comm_check(comm, call));
    if (c->kind != w->kind)
        return SP_FAIL(SPCCL_ERR_ARG, "rank %d: %s: the set has channels of kind %u, wanted %u", comm->rank,
                       call, c->kind, w->kind);
    if (peer < 0 || peer >= comm->world_size || peer == comm->rank)
        return SP_FAIL(SPCCL_ERR_ARG, "rank %d: %s: peer is %d, wanted another rank, 0 to %d", comm->rank,
                       call, peer, comm->world_size - 1);
    if (index >= c->n_per_peer)
        return SP_FAIL(
            SPCCL_ERR_ARG,
            "rank %d: %s: channel %u to rank %d, wanted 0 to %u (n_per_peer of spccl_channels_create)",
            comm->rank, call, index, peer, c->n_per_peer - 1);
    most = w->peer_memory > w->own_memory ? w->peer_memory : w->own_memory;
    if (most >= c->n_memories)
        return SP_FAIL(
            SPCCL_ERR_ARG,
            "rank %d: %s: memory %u of channel %u to rank %d, wanted 0 to %u: 0 is the window, the others "
            "are from spccl_channels_add_memory",
            comm->rank, call, most, index, peer, c->n_memories - 1);
    if (!has_out)
        return SP_FAIL(SPCCL_ERR_ARG, "rank %d: %s: out is NULL", comm->rank, call);
    return SPCCL_OK;
}

static spccl_channel_base make_base(const spccl_channels *c, const wanted *w, uint64_t number)
{
    sp_gpu_comm *g = c->g;
    int64_t timeout_ms = g->comm->timeout_ms;
    return (spccl_channel_base){
        .layout = SPCCL_CHANNEL_LAYOUT,
        .index = w->index,
        .rank = g->comm->rank,
        .peer = w->peer,
        .window = c->memories[w->own_memory].device,
        .window_bytes = c->memories[w->own_memory].bytes,
        .peer_bytes = c->memories[w->peer_memory].bytes,
        .timeout_ns =
            timeout_ms < INT64_MAX / 1000000 ? (uint64_t)timeout_ms * 1000000u : (uint64_t)INT64_MAX,
        .state = (spccl_channel_state *)(void *)(c->state_device + c->layout.states_off) + number,
        .signals =
            (uint64_t *)(void *)(c->signals_device + c->layout.signals_off + number * SP_CHANNELS_LINE),
        .claimed = (uint32_t *)(void *)(c->state_device + c->layout.claimed_off),
        .abort = &g->control_device->abort,
        .report = c->report_device};
}

/* Number of the channel among all of `rank`, which has it to `other`. */
static uint64_t number_of(const spccl_channels *c, int rank, int other, uint32_t index)
{
    uint32_t slot = sp_inbox_slot((uint32_t)rank, (uint32_t)other, (uint32_t)c->g->comm->world_size);
    return sp_channels_number(c, slot, index);
}

static spccl_status get_memory(const spccl_channels *c, const wanted *w, spccl_memory_channel *out)
{
    const sp_channels_memory *window;
    const spccl_comm *comm;
    uint8_t *memory;
    SP_TRY(check_handle(c, w, out != NULL));
    comm = c->g->comm;
    if (c->peers[w->peer] == NULL)
        return SP_FAIL(SPCCL_ERR_UNREACHABLE,
                       "rank %d: %s: rank %d is on another host, so its memory cannot be mapped here",
                       comm->rank, w->call, w->peer);
    memory = c->g->ops->memory_address(c->peers[w->peer]);
    window = &c->memories[w->peer_memory];
    *out = (spccl_memory_channel){
        .base = make_base(c, w, number_of(c, comm->rank, w->peer, w->index)),
        .peer_window = window->own != NULL ? c->g->ops->memory_address(window->peers[w->peer]) : memory,
        .peer_signals = (uint64_t *)(void *)(memory + c->layout.signals_off +
                                             number_of(c, w->peer, comm->rank, w->index) * SP_CHANNELS_LINE)};
    return SPCCL_OK;
}

static spccl_status get_port(const spccl_channels *c, const wanted *w, spccl_port_channel *out)
{
    uint64_t number;
    SP_TRY(check_handle(c, w, out != NULL));
    number = number_of(c, c->g->comm->rank, w->peer, w->index);
    *out = (spccl_port_channel){
        .base = make_base(c, w, number),
        .fifo = (spccl_trigger *)(void *)(c->signals_device + c->layout.fifos_off) + number * c->n_triggers,
        .posted = (uint64_t *)(void *)(c->signals_device + c->layout.posted_off + number * SP_CHANNELS_LINE),
        .done = (uint64_t *)(void *)(c->signals_device + c->layout.done_off + number * SP_CHANNELS_LINE),
        .fifo_triggers = c->n_triggers,
        .number = (uint32_t)number,
        .dst_memory = w->peer_memory,
        .src_memory = w->own_memory};
    return SPCCL_OK;
}

spccl_status spccl_channels_get_memory(const spccl_channels *c, int peer, uint32_t index,
                                       spccl_memory_channel *out)
{
    return get_memory(c, &(wanted){"spccl_channels_get_memory", SPCCL_CHANNEL_MEMORY, peer, index, 0, 0},
                      out);
}

spccl_status spccl_channels_get_port(const spccl_channels *c, int peer, uint32_t index,
                                     spccl_port_channel *out)
{
    return get_port(c, &(wanted){"spccl_channels_get_port", SPCCL_CHANNEL_PORT, peer, index, 0, 0}, out);
}

spccl_status spccl_channels_get_memory_at(const spccl_channels *c, int peer, uint32_t index,
                                          uint32_t peer_memory, uint32_t own_memory,
                                          spccl_memory_channel *out)
{
    return get_memory(
        c,
        &(wanted){"spccl_channels_get_memory_at", SPCCL_CHANNEL_MEMORY, peer, index, peer_memory, own_memory},
        out);
}

spccl_status spccl_channels_get_port_at(const spccl_channels *c, int peer, uint32_t index,
                                        uint32_t peer_memory, uint32_t own_memory, spccl_port_channel *out)
{
    return get_port(
        c, &(wanted){"spccl_channels_get_port_at", SPCCL_CHANNEL_PORT, peer, index, peer_memory, own_memory},
        out);
}
