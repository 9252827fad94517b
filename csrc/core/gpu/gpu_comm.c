/* gpu_comm.c - what all of core/gpu uses of a communicator's GPU: the order of launches, agreement of all ranks, memory
 * that outlives it. See gpu_comm.h.
 *
 * Order: all launches of a communicator use the same inboxes. On any streams they must therefore run one
 * after the other, in the order of the calls. Outside of captures an event is recorded after each launch, and
 * the next launch on another stream waits for it. Inside a capture the same is done among the launches of
 * that capture. A replayed graph takes its place in the order of the stream on which it is launched.
 * With config.caller_orders the caller keeps the order, and nothing of this happens here. */
#include "core/gpu/gpu_comm.h"

#include "core/base/clock.h"
#include "core/base/env.h"
#include "core/base/mem.h"

#include <sched.h>
#include <stdio.h>

/* How long a broken communicator keeps ipc memory: peers may still use it, and cannot be asked. */
#define BROKEN_IPC_MS 1000
#define WAIT_SPIN_NS 50000

/* Tests link this table, a GPU made of host memory. In all other programs the symbol is absent. */
extern const sp_gpu_ops sp_gpu_ops_fake __attribute__((weak, visibility("hidden")));

const sp_gpu_ops *sp_gpu_ops_here(void)
{
    return &sp_gpu_ops_fake != NULL ? &sp_gpu_ops_fake : sp_gpu_ops_get(NULL);
}

int spccl_cuda_device_count(void)
{
    const sp_gpu_ops *ops = sp_gpu_ops_here();
    int n = 0;
    return ops != NULL && ops->device_count(&n) == SPCCL_OK ? n : 0;
}

spccl_status sp_gpu_check_memory(const char *call, const char *what, const void *p, size_t align, int device,
                                 const char *wanted)
{
    char where[32] = "host memory";
    int ordinal = -1;
    if (p == NULL || (uintptr_t)p % align != 0)
        return SP_FAIL(SPCCL_ERR_ARG, "%s: %s is %p, wanted an address aligned to %zu bytes", call, what, p,
                       align);
    if (device < 0) /* asking CUDA would start it on the first GPU */
        return SPCCL_OK;
    SP_TRY(sp_gpu_ops_here()->device_of(p, &ordinal));
    if (ordinal == device)
        return SPCCL_OK;
    if (ordinal >= 0)
        snprintf(where, sizeof where, "memory of GPU %d", ordinal);
    return SP_FAIL(SPCCL_ERR_ARG, "%s: %s (%p) is %s, %s GPU %d", call, what, p, where, wanted, device);
}

spccl_status sp_gpu_comm_get(spccl_comm *comm, const char *call, sp_gpu_comm **out)
{
    sp_gpu_comm *g = NULL;
    SP_TRY(sp_comm_check(comm, call));
    g = atomic_load(&comm->gpu);
    if (g == NULL)
        return SP_FAIL(SPCCL_ERR_STATE,
                       "%s: rank %d of group \"%s\" has no GPU: call spccl_cuda_attach first", call,
                       comm->rank, comm->name);
    *out = g;
    return SPCCL_OK;
}

spccl_status sp_gpu_refuse_broken(spccl_comm *comm)
{
    char why[sizeof comm->error];
    spccl_status st = sp_comm_broken(comm);
    if (st == SPCCL_OK)
        return SPCCL_OK;
    snprintf(why, sizeof why, "%.900s", sp_without_rank(spccl_last_error(), comm->rank));
    return SP_FAIL(st, "rank %d: group \"%s\" is broken since: %s", comm->rank, comm->name, why);
}

spccl_status sp_gpu_launch_failed(sp_gpu_comm *g, spccl_status st, const char *what)
{
    char text[sizeof g->comm->error];
    snprintf(text, sizeof text, "rank %d, group \"%s\", GPU %d: %s: %.600s", g->comm->rank, g->comm->name,
             g->device.ordinal, what, spccl_last_error());
    sp_comm_break(g->comm, st, text);
    sp_set_error(text);
    return st;
}

/* ---- the order of launches ---- */

/* Make `stream` wait for the last launch, if it was on another stream and may still run. */
static spccl_status wait_for_last(const sp_gpu_comm *g, void *stream, unsigned long long id,
                                  unsigned long long capture)
{
    if (capture == 0)
        return g->launched && g->last_stream != id ? g->ops->stream_wait(stream, g->event) : SPCCL_OK;
    if (capture == g->last_capture && g->last_capture_stream != id)
        return g->ops->stream_wait(stream, g->capture_event);
    return SPCCL_OK;
}

static spccl_status identify(const sp_gpu_comm *g, void *stream, unsigned long long *id,
                             unsigned long long *capture)
{
    SP_TRY(g->ops->capture_id(stream, capture));
    if (*capture == 0)
        return g->ops->stream_id(stream, id);
    /* A capturing stream has no id. Its handle is good enough: the stream lives until the capture ends. */
    *id = (unsigned long long)(uintptr_t)stream;
    return SPCCL_OK;
}

static spccl_status mark_last(sp_gpu_comm *g, void *stream, unsigned long long id, unsigned long long capture)
{
    if (capture == 0) {
        SP_TRY(g->ops->event_record(g->event, stream));
        g->launched = true;
        g->last_stream = id;
        return SPCCL_OK;
    }
    SP_TRY(g->ops->event_record(g->capture_event, stream));
    g->last_capture = capture;
    g->last_capture_stream = id;
    return SPCCL_OK;
}

spccl_status sp_gpu_order_begin(sp_gpu_comm *g, void *stream, sp_gpu_order *order)
{
    *order = (sp_gpu_order){0, 0};
    if (g->caller_orders)
        return SPCCL_OK;
    SP_TRY(identify(g, stream, &order->stream_id, &order->capture));
    return wait_for_last(g, stream, order->stream_id, order->capture);
}

spccl_status sp_gpu_order_end(sp_gpu_comm *g, void *stream, const sp_gpu_order *order)
{
    return g->caller_orders ? SPCCL_OK : mark_last(g, stream, order->stream_id, order->capture);
}

/* ---- one status for all ranks ---- */

struct rank_status {
    int32_t status;
    char text[508];
};

/* How much a rank's status explains. AGAIN: it is not done. A rank that timed out or lost a peer did so because another rank failed;
 * the status of that other rank explains more. */
static int weight(int32_t status)
{
    switch (status) {
    case SPCCL_OK:
        return 0;
    case SPCCL_AGAIN:
        return 1;
    case SPCCL_ERR_TIMEOUT:
    case SPCCL_ERR_PEER:
        return 2;
    default:
        return 3;
    }
}

/* Exchange each rank's status. All return the same: OK, or the status of greatest weight, of the lowest such
 * rank, whose error names a rank. */
spccl_status sp_gpu_agree_by(spccl_comm *comm, spccl_status st, int64_t deadline_ns)
{
    struct rank_status mine = {.status = st}, all[SP_GPU_RANKS_MAX];
    int worst = 0;
    if (st != SPCCL_OK)
        snprintf(mine.text, sizeof mine.text, "%s", spccl_last_error());
    SP_TRY(
        sp_comm_all_gather(comm, &mine, all, sizeof mine, (sp_time_limit){.deadline_ns = deadline_ns}, NULL));
    for (int r = 1; r < comm->world_size; r++)
        if (weight(all[r].status) > weight(all[worst].status))
            worst = r;
    if (all[worst].status == SPCCL_OK)
        return SPCCL_OK;
    all[worst].text[sizeof all[worst].text - 1] = '\0';
    if (strstr(all[worst].text, "rank ") != NULL)
        return SP_FAIL((spccl_status)all[worst].status, "%s", all[worst].text);
    return SP_FAIL((spccl_status)all[worst].status, "rank %d: %s", worst, all[worst].text);
}

spccl_status sp_gpu_agree(spccl_comm *comm, spccl_status st)
{
    return sp_gpu_agree_by(comm, st, sp_deadline_in_ms(comm->timeout_ms));
}

/* ---- memory that peers map ---- */

static spccl_status still_whole(void *ctx)
{
    spccl_comm *comm = ctx;
    SP_TRY(sp_comm_poll_peers(comm));
    return sp_comm_broken(comm);
}

spccl_status sp_gpu_share_begin(sp_gpu_comm *g, const char *call, const char *what, int64_t deadline_ns,
                                sp_gpu_share **share, uint8_t address[SP_GPU_SHARE_ADDRESS_BYTES])
{
    spccl_comm *comm = g->comm;
    sp_gpu_share_config sc = {.rank = comm->rank,
                              .world_size = comm->world_size,
                              .secret = comm->links.secret,
                              .host = comm->links.host,
                              .group_tag = comm->links.group_tag,
                              .call = call,
                              .what = what,
                              .ops = g->ops,
                              .ordinal = g->device.ordinal,
                              .deadline_ns = deadline_ns,
                              .still = still_whole,
                              .ctx = comm};
    SP_TRY(sp_gpu_share_open(&sc, share));
    return sp_gpu_share_address(*share, address);
}

/* ---- waiting ---- */

void sp_gpu_pause(int64_t since_ns)
{
    if (sp_now_ns() - since_ns < WAIT_SPIN_NS)
        sched_yield();
    else
        nanosleep(&(struct timespec){.tv_nsec = 50000}, NULL);
}

spccl_status sp_gpu_wait_stream(const char *call, int device, void *stream)
{
    int64_t start_ns = sp_now_ns(), timeout_ms, deadline_ns;
    spccl_status st;
    SP_TRY(sp_env_number(SP_ENV_TIMEOUT_MS, &timeout_ms));
    deadline_ns = sp_deadline_in_ms(timeout_ms);
    while ((st = sp_gpu_ops_here()->stream_query(stream)) == SPCCL_AGAIN) {
        if (sp_deadline_passed(deadline_ns))
            return SP_FAIL(SPCCL_ERR_TIMEOUT, "%s: GPU %d: the stream still had work after %lld ms", call,
                           device, (long long)timeout_ms);
        sp_gpu_pause(start_ns);
    }
    return st;
}

void sp_gpu_comm_wait_broken(void)
{
    nanosleep(&(struct timespec){.tv_sec = BROKEN_IPC_MS / 1000}, NULL);
}
