/* channel_handles.c - one-sided channels: the window, and the structs that kernels take. See channels.h. */
#include "core/gpu/channels/channels.h"

#include <inttypes.h>

spccl_status spccl_channels_window(const spccl_channels *c, void **device, void **host)
{
    if (c == NULL || device == NULL || host == NULL)
        return SP_FAIL(SPCCL_ERR_ARG, "spccl_channels_window: channels, device or host is NULL");
    SP_TRY(sp_comm_check(c->g->comm, "spccl_channels_window"));
    *device = c->window_device;
    *host = c->window_host;
    return SPCCL_OK;
}

static spccl_status check_handle(const spccl_channels *c, const char *call, uint32_t kind, int peer,
                                 uint32_t index)
{
    const spccl_comm *comm;
    if (c == NULL)
        return SP_FAIL(SPCCL_ERR_ARG, "%s: channels is NULL", call);
    comm = c->g->comm;
    SP_TRY(sp_comm_check(comm, call));
    if (c->kind != kind)
        return SP_FAIL(SPCCL_ERR_ARG, "rank %d: %s: the set has channels of kind %u, wanted %u", comm->rank,
                       call, c->kind, kind);
    if (peer < 0 || peer >= comm->world_size || peer == comm->rank)
        return SP_FAIL(SPCCL_ERR_ARG, "rank %d: %s: peer is %d, wanted another rank, 0 to %d", comm->rank,
                       call, peer, comm->world_size - 1);
    if (index >= c->n_per_peer)
        return SP_FAIL(
            SPCCL_ERR_ARG,
            "rank %d: %s: channel %u to rank %d, wanted 0 to %u (n_per_peer of spccl_channels_create)",
            comm->rank, call, index, peer, c->n_per_peer - 1);
    return SPCCL_OK;
}

static spccl_channel_base make_base(const spccl_channels *c, int peer, uint32_t index)
{
    sp_gpu_comm *g = c->g;
    uint32_t slot = sp_inbox_slot((uint32_t)g->comm->rank, (uint32_t)peer, (uint32_t)g->comm->world_size);
    uint64_t number = sp_channels_number(c, slot, index);
    int64_t timeout_ms = g->comm->timeout_ms;
    return (spccl_channel_base){
        .layout = SPCCL_CHANNEL_LAYOUT,
        .index = index,
        .rank = g->comm->rank,
        .peer = peer,
        .window = c->window_device,
        .window_bytes = c->window_bytes,
        .peer_bytes = c->window_bytes,
        .timeout_ns =
            timeout_ms < INT64_MAX / 1000000 ? (uint64_t)timeout_ms * 1000000u : (uint64_t)INT64_MAX,
        .state = (spccl_channel_state *)(void *)(c->state_device + c->layout.states_off) + number,
        .signals =
            (uint64_t *)(void *)(c->signals_device + c->layout.signals_off + number * SP_CHANNELS_LINE),
        .claimed = (uint32_t *)(void *)(c->state_device + c->layout.claimed_off),
        .abort = &g->control_device->abort,
        .report = c->report_device};
}

spccl_status spccl_channels_get_memory(const spccl_channels *c, int peer, uint32_t index,
                                       spccl_memory_channel *out)
{
    const spccl_comm *comm;
    uint32_t slot_there;
    uint8_t *memory;
    SP_TRY(check_handle(c, "spccl_channels_get_memory", SPCCL_CHANNEL_MEMORY, peer, index));
    comm = c->g->comm;
    if (out == NULL)
        return SP_FAIL(SPCCL_ERR_ARG, "rank %d: spccl_channels_get_memory: out is NULL", comm->rank);
    if (c->peers[peer] == NULL)
        return SP_FAIL(
            SPCCL_ERR_UNREACHABLE,
            "rank %d: spccl_channels_get_memory: rank %d is on another host, so its memory cannot be "
            "mapped here",
            comm->rank, peer);
    slot_there = sp_inbox_slot((uint32_t)peer, (uint32_t)comm->rank, (uint32_t)comm->world_size);
    memory = c->g->ops->memory_address(c->peers[peer]);
    *out = (spccl_memory_channel){
        .base = make_base(c, peer, index),
        .peer_window =
            c->peer_windows[peer] != NULL ? c->g->ops->memory_address(c->peer_windows[peer]) : memory,
        .peer_signals =
            (uint64_t *)(void *)(memory + c->layout.signals_off +
                                 (uint64_t)sp_channels_number(c, slot_there, index) * SP_CHANNELS_LINE)};
    return SPCCL_OK;
}

spccl_status spccl_channels_get_port(const spccl_channels *c, int peer, uint32_t index,
                                     spccl_port_channel *out)
{
    uint64_t number;
    uint8_t *memory;
    SP_TRY(check_handle(c, "spccl_channels_get_port", SPCCL_CHANNEL_PORT, peer, index));
    if (out == NULL)
        return SP_FAIL(SPCCL_ERR_ARG, "rank %d: spccl_channels_get_port: out is NULL", c->g->comm->rank);
    number = sp_channels_number(
        c, sp_inbox_slot((uint32_t)c->g->comm->rank, (uint32_t)peer, (uint32_t)c->g->comm->world_size),
        index);
    memory = c->window_device;
    *out = (spccl_port_channel){
        .base = make_base(c, peer, index),
        .fifo = (spccl_trigger *)(void *)(memory + c->layout.fifos_off) + number * c->n_triggers,
        .posted = (uint64_t *)(void *)(memory + c->layout.posted_off + number * SP_CHANNELS_LINE),
        .done = (uint64_t *)(void *)(memory + c->layout.done_off + number * SP_CHANNELS_LINE),
        .fifo_triggers = c->n_triggers,
        .number = (uint32_t)number};
    return SPCCL_OK;
}
