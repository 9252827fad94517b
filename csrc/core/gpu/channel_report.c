/* channel_report.c - failures of channels that kernels reported become the communicator's error. See channels.h. */
#include "core/gpu/channels.h"

#include "core/base/log.h"

#include <inttypes.h>
#include <stdio.h>

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

static spccl_status describe(const spccl_channels *c, const spccl_channel_report *r, char *text, size_t cap)
{
    const spccl_comm *comm = c->g->comm;
    char where[200], end[24];
    snprintf(where, sizeof where, "rank %d, group \"%s\", GPU %d: channel %u to rank %d:", comm->rank,
             comm->name, c->g->device.ordinal, r->index, r->peer);
    switch ((spccl_channel_fault)r->fault) {
    case SPCCL_CHANNEL_NO_SIGNAL:
        if (c->for_lists) {
            describe_lists(c, r, text, cap);
            return SPCCL_ERR_TIMEOUT;
        }
        snprintf(text, cap,
                 "%s waited for signal number %" PRIu64 ", %" PRIu64
                 " have come: rank %d died, is too slow, or does not signal so often (a wait lasts for the "
                 "communicator's timeout when its channel was got)",
                 where, r->wanted, r->seen, r->peer);
        return SPCCL_ERR_TIMEOUT;
    case SPCCL_CHANNEL_NO_PROXY:
        snprintf(text, cap,
                 "%s waited for the proxy to carry out %" PRIu64 " triggers, it has %" PRIu64
                 ": rank %d or the network is too slow",
                 where, r->wanted, r->seen, r->peer);
        return SPCCL_ERR_TIMEOUT;
    case SPCCL_CHANNEL_BAD_PUT:
        snprintf(end, sizeof end, "%" PRIu64, r->seen);
        snprintf(text, cap,
                 "%s a put to or from bytes %" PRIu64 " to %s of a window of %" PRIu64
                 ": wanted offset, size and source in multiples of 16, inside the window",
                 where, r->wanted, r->seen == UINT64_MAX ? "beyond 2^64" : end, c->window_bytes);
        return SPCCL_ERR_ARG;
    case SPCCL_CHANNEL_BAD_THREAD:
        snprintf(text, cap,
                 "%s a put by thread %" PRIu64 " of %" PRIu64
                 ": wanted thread from 0 to n_threads - 1, and n_threads above 0",
                 where, r->wanted, r->seen);
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

void sp_channels_look(sp_gpu_comm *g)
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
        st = describe(c, c->report, text, sizeof text);
        if (sp_comm_break(comm, st, text))
            sp_log(SP_LOG_ERROR, comm->rank, "%s", text);
    }
    pthread_mutex_unlock(&g->channels_mu);
}
