/* channels_end.c - one-sided channels: failures that kernels reported become the communicator's error; the end of a set,
 * by spccl_channels_destroy or with its communicator. See channels.h. */
#include "core/gpu/channels/channel_port.h"

#include "core/base/clock.h"
#include "core/base/log.h"
#include "core/base/mem.h"

#include <inttypes.h>
#include <stdio.h>

/* ---- failures that kernels reported ---- */

/* A wait of spccl_cuda_prune_all_reduce. */
static void describe_lists(const spccl_channels *c, const spccl_channel_report *r, char *text, size_t cap)
{
    const spccl_comm *comm = c->g->comm;
    snprintf(text, cap,
             "rank %d, group \"%s\", GPU %d: spccl_cuda_prune_all_reduce number %" PRIu64
             " waited for what rank %d sends; it has called %" PRIu64
             " times: rank %d died, is too slow, or did not make this call",
             comm->rank, comm->name, c->g->device.ordinal, r->wanted, r->peer, r->seen, r->peer);
}

/* A wait that ended without what it was for. where: the rank and the channel. */
static void describe_wait(const spccl_channel_report *r, const char *where, char *text, size_t cap)
{
    switch ((spccl_channel_fault)r->fault) {
    case SPCCL_CHANNEL_NO_PROXY:
        snprintf(text, cap,
                 "%s waited for the proxy to carry out %" PRIu64 " triggers, it has %" PRIu64
                 ": rank %d or the network is too slow",
                 where, r->wanted, r->seen, r->peer);
        return;
    case SPCCL_CHANNEL_NO_PACKET:
        snprintf(text, cap,
                 "%s waited for the packet at byte %" PRIu64 " with flag %" PRIu64 ", its flag is %" PRIu64
                 ": rank %d died, is too slow, or put it with another offset, size of packet or flag",
                 where, r->limit, r->wanted, r->seen, r->peer);
        return;
    case SPCCL_CHANNEL_NO_BLOCK:
        snprintf(text, cap,
                 "%s spccl_sync_blocks waited for %" PRIu64 " blocks, %" PRIu64
                 " have come: wanted a call by each block, and a GPU on which all fit at the same time",
                 where, r->wanted, r->seen);
        return;
    default:
        snprintf(text, cap,
                 "%s waited for signal number %" PRIu64 ", %" PRIu64
                 " have come: rank %d died, is too slow, or does not signal so often (a wait lasts for the "
                 "communicator's timeout when its channel was got)",
                 where, r->wanted, r->seen, r->peer);
    }
}

/* A call with wrong arguments. */
static void describe_misuse(const spccl_channel_report *r, const char *where, char *text, size_t cap)
{
    bool is_packets = r->fault == SPCCL_CHANNEL_BAD_PACKETS;
    char end[24];
    if (r->fault == SPCCL_CHANNEL_BAD_THREAD) {
        snprintf(text, cap,
                 "%s a put or get by thread %" PRIu64 " of %" PRIu64
                 ": wanted thread from 0 to n_threads - 1, and n_threads above 0",
                 where, r->wanted, r->seen);
        return;
    }
    snprintf(end, sizeof end, "%" PRIu64, r->seen);
    snprintf(
        text, cap,
        "%s %s at bytes %" PRIu64 " to %s of a memory of %" PRIu64 ": wanted %s, inside the memory", where,
        is_packets ? "packets" : "a put or get", r->wanted, r->seen == UINT64_MAX ? "beyond 2^64" : end,
        r->limit,
        is_packets
            ? "the offset in multiples of a packet (8 or 16), data in multiples of half a packet, a flag "
              "other than 0"
            : "offset, size and address in multiples of 16");
}

static spccl_status describe_report(const spccl_channels *c, const spccl_channel_report *r, char *text,
                                    size_t cap)
{
    const spccl_comm *comm = c->g->comm;
    char where[200];
    snprintf(where, sizeof where, "rank %d, group \"%s\", GPU %d: channel %u to rank %d:", comm->rank,
             comm->name, c->g->device.ordinal, r->index, r->peer);
    switch ((spccl_channel_fault)r->fault) {
    case SPCCL_CHANNEL_NO_SIGNAL:
    case SPCCL_CHANNEL_NO_PROXY:
    case SPCCL_CHANNEL_NO_PACKET:
    case SPCCL_CHANNEL_NO_BLOCK:
        if (c->for_lists)
            describe_lists(c, r, text, cap);
        else
            describe_wait(r, where, text, cap);
        return SPCCL_ERR_TIMEOUT;
    case SPCCL_CHANNEL_BAD_PUT:
    case SPCCL_CHANNEL_BAD_THREAD:
    case SPCCL_CHANNEL_BAD_PACKETS:
        describe_misuse(r, where, text, cap);
        return SPCCL_ERR_ARG;
    case SPCCL_CHANNEL_OTHER_CALL:
        snprintf(text, cap,
                 "rank %d, group \"%s\", GPU %d: spccl_cuda_prune_all_reduce of %" PRIu64
                 " elements, rank %d gave %" PRIu64
                 ": wanted the same segments, `whole` and operation on all ranks",
                 comm->rank, comm->name, c->g->device.ordinal, r->wanted, r->peer, r->seen);
        return SPCCL_ERR_MISMATCH;
    case SPCCL_CHANNEL_NO_FAULT:
        break;
    }
    snprintf(text, cap, "%s a report with the unknown fault %u", where, r->fault);
    return SPCCL_ERR_BUG;
}

void sp_channels_find_errors(sp_gpu_comm *g)
{
    spccl_comm *comm = g->comm;
    pthread_mutex_lock(&g->channels_mu);
    for (const spccl_channels *c = g->channels; c != NULL; c = c->next) {
        char text[sizeof comm->error];
        spccl_status st;
        if (__atomic_load_n(&c->report->fault, __ATOMIC_ACQUIRE) == SPCCL_CHANNEL_NO_FAULT)
            continue;
        if (atomic_load(&comm->abort_asked) || sp_comm_broken(comm) != SPCCL_OK)
            break; /* kernels ended because of the abort */
        st = describe_report(c, c->report, text, sizeof text);
        if (sp_comm_break(comm, st, text))
            sp_log(SP_LOG_ERROR, comm->rank, "%s", text);
    }
    pthread_mutex_unlock(&g->channels_mu);
}

/* ---- one set ---- */

static void unmap_memory(const sp_gpu_comm *g, sp_channels_memory *m)
{
    for (int r = 0; r < SP_GPU_RANKS_MAX; r++) {
        g->ops->memory_destroy(m->peers[r]);
        m->peers[r] = NULL;
    }
}

void sp_channels_drop_memory(const sp_gpu_comm *g, sp_channels_memory *m)
{
    unmap_memory(g, m);
    g->ops->memory_destroy(m->own);
    *m = (sp_channels_memory){.bytes = 0};
}

bool sp_channels_has_callers_memory(const spccl_channels *c)
{
    for (uint32_t i = 0; i < c->n_memories; i++)
        if (c->memories[i].own != NULL)
            return true;
    return false;
}

void sp_channels_unmap_set(spccl_channels *c)
{
    for (int r = 0; r < SP_GPU_RANKS_MAX; r++) {
        c->g->ops->memory_destroy(c->peers[r]);
        c->peers[r] = NULL;
    }
    for (uint32_t i = 0; i < c->n_memories; i++)
        unmap_memory(c->g, &c->memories[i]);
}

void sp_channels_free_set(spccl_channels *c, bool keep_memory)
{
    const sp_gpu_ops *ops = c->g->ops;
    sp_port_close(c->port); /* its thread must not outlive g */
    if (!keep_memory) {
        sp_channels_unmap_set(c);
        ops->memory_destroy(c->own);
        for (uint32_t i = 0; i < c->n_memories; i++)
            ops->memory_destroy(c->memories[i].own);
        if (c->kind == SPCCL_CHANNEL_PORT)
            ops->unload(c->g->device.ordinal, c->state_device);
        ops->pinned_destroy(c->pinned);
        ops->pinned_destroy(c->report);
    }
    sp_free(c->farewell);
    sp_free(c);
}

static void free_farewell(void *farewell, spccl_status status)
{
    (void)status;
    sp_free(farewell);
}

/* Wait until all ranks destroy the set: then no peer uses this rank's memory any more. False: a rank is late. The
 * all-gather has no deadline. So the group goes on, and a later collective waits for the late rank. A group that is
 * broken waits for nobody. */
static bool wait_for_all(spccl_channels *c, int64_t deadline_ns)
{
    spccl_comm *comm = c->g->comm;
    struct sp_channels_farewell *farewell = c->farewell;
    spccl_request *req = NULL;
    bool is_late;
    if (comm->world_size == 1 || sp_comm_broken(comm) != SPCCL_OK ||
        sp_comm_all_gather(comm, &farewell->mine, farewell->all, 1, (sp_time_limit){.deadline_ns = SP_NEVER},
                           &req) != SPCCL_OK)
        return true;
    c->farewell = NULL;
    (void)spccl_request_on_done(req, free_farewell, farewell);
    (void)spccl_request_wait(req, sp_deadline_left_ms(deadline_ns, INT32_MAX));
    is_late = spccl_request_test(req) == SPCCL_AGAIN;
    spccl_request_free(req);
    return !is_late;
}

static void warn_late(const spccl_channels *c, int64_t timeout_ms)
{
    const spccl_comm *comm = c->g->comm;
    sp_log(SP_LOG_WARN, comm->rank,
           "group \"%s\": spccl_channels_destroy: after %lld ms a rank has not called it: %" PRIu64
           " bytes of GPU memory and %" PRIu64 " of pinned memory stay until spccl_comm_destroy%s",
           comm->name, (long long)timeout_ms, c->layout.bytes, c->layout.pinned_bytes,
           c->memories[0].own != NULL ? "; free config.window, and memory that was added, only after that"
           : c->n_memories > 1        ? "; free memory that was added only after that"
                                      : "");
}

static void take_from_list(spccl_channels *c)
{
    sp_gpu_comm *g = c->g;
    pthread_mutex_lock(&g->channels_mu);
    for (spccl_channels **at = &g->channels; *at != NULL; at = &(*at)->next)
        if (*at == c) {
            *at = c->next;
            break;
        }
    pthread_mutex_unlock(&g->channels_mu);
}

void spccl_channels_destroy(spccl_channels *c)
{
    sp_gpu_comm *g;
    int64_t timeout_ms, deadline_ns;
    bool entered, by_ipc;
    int before;
    if (c == NULL || sp_process_forked(c->g->comm->process_stamp))
        return;
    g = c->g;
    timeout_ms = g->comm->timeout_ms; /* read once: any thread may set it */
    deadline_ns = sp_deadline_in_ms(timeout_ms);
    sp_port_drain(c->port, deadline_ns);
    entered = g->ops->enter(g->device.ordinal, &before) == SPCCL_OK;
    by_ipc = c->kind == SPCCL_CHANNEL_MEMORY &&
             (sp_channels_has_callers_memory(c) || strcmp(g->handles, "ipc") == 0);
    if (entered && by_ipc)
        sp_channels_unmap_set(c); /* peers may free memory that is shared by ipc only after that */
    if (wait_for_all(c, deadline_ns)) {
        if (by_ipc && sp_comm_broken(g->comm) != SPCCL_OK)
            sp_gpu_comm_wait_broken();
        take_from_list(c);
        sp_channels_free_set(c, !entered);
    } else {
        warn_late(c, timeout_ms);
    }
    if (entered)
        g->ops->leave(before);
}

/* ---- all sets of a communicator ---- */

bool sp_channels_use_ipc(const sp_gpu_comm *g)
{
    for (const spccl_channels *c = g->channels; c != NULL; c = c->next)
        if (sp_channels_has_callers_memory(c) && c->farewell != NULL)
            return true;
    return false;
}

void sp_channels_unmap(sp_gpu_comm *g)
{
    for (spccl_channels *c = g->channels; c != NULL; c = c->next)
        sp_channels_unmap_set(c);
}

void sp_channels_drain(sp_gpu_comm *g)
{
    int64_t deadline_ns = sp_deadline_in_ms(g->comm->timeout_ms);
    for (spccl_channels *c = g->channels; c != NULL; c = c->next)
        sp_port_drain(c->port, deadline_ns);
}

void sp_channels_stop(sp_gpu_comm *g)
{
    for (spccl_channels *c = g->channels; c != NULL; c = c->next) {
        sp_port_close(c->port);
        c->port = NULL;
    }
}

void sp_channels_free_all(sp_gpu_comm *g, bool keep_memory)
{
    while (g->channels != NULL) {
        spccl_channels *c = g->channels;
        g->channels = c->next;
        sp_channels_free_set(c, keep_memory);
    }
}
