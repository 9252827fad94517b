/* gpu_coll.c - the public collectives on GPU memory: check, plan, launch; waiting for streams. gpu_comm.c has the order
 * of launches. */
#include "core/gpu/proxy/proxy.h"
#include "core/run/coll_check.h"

#include "core/base/abi.h"
#include "core/base/clock.h"
#include "core/base/dtype.h"
#include "spccl_experimental.h"

#include <inttypes.h>
#include <stdio.h>

static const struct {
    const char *name;
    sp_fused_op op;
} calls[SP_N_COLLS] = {
    [SP_ALL_GATHER] = {"spccl_cuda_all_gather", SP_FUSED_ALL_GATHER},
    [SP_REDUCE_SCATTER] = {"spccl_cuda_reduce_scatter", SP_FUSED_REDUCE_SCATTER},
    [SP_ALL_REDUCE] = {"spccl_cuda_all_reduce", SP_FUSED_ALL_REDUCE},
    [SP_BROADCAST] = {"spccl_cuda_broadcast", SP_FUSED_BROADCAST},
};

/* Both buffers must be memory of the attached GPU. */
static spccl_status check_devices(const sp_gpu_comm *g, const sp_coll_args *a)
{
    static const char wanted[] = "wanted memory of";
    bool in_place = a->coll == SP_BROADCAST;
    const char *call = calls[a->coll].name;
    int gpu = g->device.ordinal;
    spccl_status st = sp_gpu_check_memory(call, in_place ? "buf" : "in", a->in, 1, gpu, wanted);
    if (st == SPCCL_OK && !in_place)
        st = sp_gpu_check_memory(call, "out", a->out, 1, gpu, wanted);
    return st == SPCCL_OK ? st : SP_FAIL(st, "rank %d: %s", g->comm->rank, spccl_last_error());
}

/* ---- plans from files ---- */

/* Take the plan that a file has for this call. Errors: UNSUPPORTED (the kernels cannot run it). */
static spccl_status take_plan(spccl_comm *comm, sp_coll_args *a)
{
    const sp_gpu_comm *g = atomic_load(&comm->gpu);
    const sp_owners *o;
    const char *why;
    if (comm->plans == NULL)
        return SPCCL_OK;
    a->written = sp_plan_set_find(comm->plans, a->coll, a->root);
    if (a->written == NULL)
        return SPCCL_OK;
    o = &a->written->owners;
    why = o->why_not;
    if (why[0] == '\0' && g != NULL && o->results != SP_RESULTS_NONE &&
        (o->results == SP_RESULTS_RELAYED) != (g->relays.n_hosts != 0))
        why = o->results == SP_RESULTS_RELAYED
                  ? "it relays results, and the GPUs of this group do not"
                  : "it sends results directly, and this group's GPUs relay them";
    if (why[0] == '\0')
        return SPCCL_OK;
    return SP_FAIL(SPCCL_ERR_UNSUPPORTED,
                   "rank %d: plan %s of %s cannot run on GPUs: %s (docs/SCHEDULES.md); in torch "
                   "SPCCL_CUDA_ROUTE=auto+stage runs it in host memory",
                   comm->rank, a->written->head.name, sp_plan_set_name(comm->plans), why);
}

spccl_status spccl_cuda_check_plan(spccl_comm *comm, const char *collective, int root)
{
    sp_coll_args a = {.coll = SP_ALL_GATHER, .root = root};
    SP_TRY(sp_comm_check(comm, "spccl_cuda_check_plan"));
    while (a.coll < SP_N_COLLS && (collective == NULL || strcmp(sp_coll_name(a.coll), collective) != 0))
        a.coll++;
    if (a.coll == SP_N_COLLS || root < 0 || root >= comm->world_size)
        return SP_FAIL(SPCCL_ERR_ARG, "spccl_cuda_check_plan: collective \"%s\", root %d",
                       collective != NULL ? collective : "NULL", root);
    return take_plan(comm, &a);
}

/* Does the plan say which rank owns which chunk? */
static const sp_owners *owners_of(const sp_coll_args *a)
{
    return a->written != NULL && a->written->owners.n_chunks != 0 ? &a->written->owners : NULL;
}

/* The shards of launch `round`: chunk number `round` of each owner. Without a plan rank r has shard r. */
static void set_shards(sp_fused_args *f, const sp_owners *o, int round)
{
    int seen[SP_GPU_RANKS_MAX] = {0};
    f->n_shards = o != NULL ? (uint32_t)o->n_chunks : (uint32_t)f->world_size;
    for (int r = 0; r < f->world_size; r++)
        f->shards[r] = (uint16_t)(o != NULL ? o->n_chunks : r);
    for (int c = 0; o != NULL && c < o->n_chunks; c++)
        if (seen[o->of[c]]++ == round)
            f->shards[o->of[c]] = (uint16_t)c;
}

/* ---- the call ---- */

static sp_fused_args make_args(sp_gpu_comm *g, const sp_coll_args *a)
{
    const spccl_comm *comm = g->comm;
    int64_t timeout_ms = comm->timeout_ms; /* read once: any thread may set it */
    sp_gpu_limits limits = g->limits;
    sp_fused_args f;
    if (g->max_ctas != 0)
        limits.max_ctas = g->max_ctas;
    if (a->written != NULL)
        limits.hops = a->written->owners.one_hop ? 1 : 2;
    f = (sp_fused_args){.op = calls[a->coll].op,
                        .dtype = a->dtype,
                        .redop = a->redop,
                        .wide = a->wide ? 1 : 0,
                        .format = comm->format,
                        .in = a->in,
                        .out = a->out,
                        .n_elems = a->n_elems,
                        .rank = comm->rank,
                        .world_size = comm->world_size,
                        .root = a->root,
                        .shape = g->shape,
                        .tag = sp_frame_tag((uint32_t)a->dtype, g->max_ctas),
                        .control = g->control_device,
                        .timeout_ns = timeout_ms < INT64_MAX / 1000000 ? (uint64_t)timeout_ms * 1000000u
                                                                       : (uint64_t)INT64_MAX,
                        .seq = g->n_launches};
    set_shards(&f, owners_of(a), 0);
    sp_tune_gpu_plan(&limits, &f);
    if (g->proxies == NULL) {
        memcpy(f.inboxes, g->inboxes, sizeof f.inboxes);
    } else {
        f.remote = g->proxies->area;
        memcpy(f.remote.inboxes, g->inboxes, sizeof f.remote.inboxes);
    }
    return f;
}

spccl_status spccl_cuda_set_options(spccl_comm *comm, const spccl_cuda_options *given)
{
    spccl_cuda_options options = SPCCL_CUDA_OPTIONS_INIT;
    sp_gpu_comm *g = NULL;
    uint32_t most;
    SP_TRY(sp_gpu_comm_get(comm, "spccl_cuda_set_options", &g));
    SP_TRY(sp_options_copy("spccl_cuda_options", given, &options, sizeof options));
    most = sp_tune_gpu_ctas(&g->limits, g->shape);
    if (options.max_ctas > most)
        return SP_FAIL(SPCCL_ERR_ARG,
                       "rank %d: spccl_cuda_set_options: max_ctas is %" PRIu64
                       ", wanted at most %u, which group \"%s\" has (spccl_cuda_attach, SPCCL_MAX_CTAS)",
                       comm->rank, options.max_ctas, most, comm->name);
    pthread_mutex_lock(&g->mu);
    g->max_ctas = options.max_ctas == most ? 0 : (uint32_t)options.max_ctas;
    pthread_mutex_unlock(&g->mu);
    return SPCCL_OK;
}

/* Launch f as the next of the communicator. */
static spccl_status launch_next(sp_gpu_comm *g, const sp_coll_args *a, sp_fused_args *f, void *stream,
                                bool captured)
{
    f->seq = g->n_launches;
    g->history[f->seq % SP_GPU_HISTORY] = (sp_gpu_launch){.seq = f->seq,
                                                          .coll = a->coll,
                                                          .n_elems = a->n_elems,
                                                          .dtype = a->dtype,
                                                          .timeout_ns = f->timeout_ns};
    sp_proxies_wake(g->proxies, captured);
    SP_TRY(g->ops->fused(f, stream));
    g->n_launches++;
    return SPCCL_OK;
}

/* The GPU is current, mu is held. *launching = true once a failure would let peers wait for this rank for
 * ever. A plan in which a rank owns several chunks takes that many launches. */
static spccl_status launch_locked(sp_gpu_comm *g, const sp_coll_args *a, void *stream, bool *launching)
{
    const sp_owners *owners = owners_of(a);
    sp_gpu_order order;
    unsigned long long capture;
    sp_fused_args f;
    SP_TRY(sp_gpu_order_begin(g, stream, &order));
    f = make_args(g, a);
    capture = order.capture;
    if (g->proxies != NULL && g->caller_orders)
        SP_TRY(g->ops->capture_id(stream, &capture));
    *launching = true;
    SP_TRY(launch_next(g, a, &f, stream, capture != 0));
    for (int round = 1; owners != NULL && round < sp_owners_most(owners); round++) {
        set_shards(&f, owners, round);
        SP_TRY(launch_next(g, a, &f, stream, capture != 0));
    }
    return sp_gpu_order_end(g, stream, &order);
}

static spccl_status submit(spccl_comm *comm, sp_coll_args *a, void *stream)
{
    sp_gpu_comm *g = NULL;
    size_t total_bytes;
    bool launching = false;
    spccl_status st;
    int before;
    SP_TRY(sp_coll_check(comm, a, &total_bytes));
    SP_TRY(sp_gpu_comm_get(comm, calls[a->coll].name, &g));
    SP_TRY(sp_gpu_refuse_broken(comm));
    SP_TRY(take_plan(comm, a));
    if (a->n_elems == 0)
        return SPCCL_OK;
    SP_TRY(check_devices(g, a));
    SP_TRY(g->ops->enter(g->device.ordinal, &before));
    pthread_mutex_lock(&g->mu);
    st = launch_locked(g, a, stream, &launching);
    pthread_mutex_unlock(&g->mu);
    g->ops->leave(before);
    if (st != SPCCL_OK && launching) {
        char what[80];
        snprintf(what, sizeof what, "%s of %zu %s", calls[a->coll].name, a->n_elems, sp_dtype_name(a->dtype));
        return sp_gpu_launch_failed(g, st, what);
    }
    return st;
}

spccl_status spccl_cuda_all_gather(spccl_comm *comm, const void *in, void *out, size_t n_elems,
                                   spccl_dtype dtype, void *stream)
{
    sp_coll_args a = {.coll = SP_ALL_GATHER, .in = in, .out = out, .n_elems = n_elems, .dtype = dtype};
    return submit(comm, &a, stream);
}

spccl_status spccl_cuda_reduce_scatter(spccl_comm *comm, const void *in, void *out, size_t n_elems,
                                       spccl_dtype dtype, spccl_redop op, void *stream)
{
    sp_coll_args a = sp_coll_sum(SP_REDUCE_SCATTER, in, out, n_elems, dtype, op);
    return submit(comm, &a, stream);
}

spccl_status spccl_cuda_reduce_scatter_wide(spccl_comm *comm, const void *in, void *out, size_t n_elems,
                                            spccl_dtype dtype, spccl_redop op, void *stream)
{
    sp_coll_args a = sp_coll_sum(SP_REDUCE_SCATTER, in, out, n_elems, dtype, op);
    a.wide = true;
    return submit(comm, &a, stream);
}

spccl_status spccl_cuda_all_reduce(spccl_comm *comm, const void *in, void *out, size_t n_elems,
                                   spccl_dtype dtype, spccl_redop op, void *stream)
{
    sp_coll_args a = sp_coll_sum(SP_ALL_REDUCE, in, out, n_elems, dtype, op);
    return submit(comm, &a, stream);
}

spccl_status spccl_cuda_broadcast(spccl_comm *comm, void *buf, size_t n_elems, spccl_dtype dtype, int root,
                                  void *stream)
{
    sp_coll_args a = {
        .coll = SP_BROADCAST, .in = buf, .out = buf, .n_elems = n_elems, .dtype = dtype, .root = root};
    return submit(comm, &a, stream);
}

spccl_status spccl_cuda_set_end_event(spccl_comm *comm, void *event)
{
    sp_gpu_comm *g = NULL;
    SP_TRY(sp_gpu_comm_get(comm, "spccl_cuda_set_end_event", &g));
    if (event == NULL || !g->caller_orders)
        return SP_FAIL(SPCCL_ERR_ARG, "spccl_cuda_set_end_event: %s",
                       event == NULL ? "event is NULL"
                                     : "config.caller_orders was 0: the library has events of its own");
    pthread_mutex_lock(&g->mu);
    g->end_event = event;
    pthread_mutex_unlock(&g->mu);
    return SPCCL_OK;
}

/* ---- waiting ---- */

/* The caller has made the GPU current. */
static spccl_status wait_stream(sp_gpu_comm *g, void *stream, int64_t timeout_ms)
{
    int64_t start_ns = sp_now_ns(), deadline_ns = sp_deadline_in_ms(timeout_ms);
    for (;;) {
        spccl_status st = g->ops->stream_query(stream);
        sp_gpu_comm_find_errors(g->comm); /* after success too: a kernel that gives up ends as well */
        SP_TRY(sp_comm_broken(g->comm));
        if (st != SPCCL_AGAIN)
            return st;
        if (sp_deadline_passed(deadline_ns))
            return SP_FAIL(SPCCL_ERR_TIMEOUT,
                           "rank %d, group \"%s\", GPU %d: the stream still had work after %lld ms",
                           g->comm->rank, g->comm->name, g->device.ordinal, (long long)timeout_ms);
        sp_gpu_pause(start_ns);
    }
}

spccl_status spccl_cuda_wait(spccl_comm *comm, void *stream, int64_t timeout_ms)
{
    sp_gpu_comm *g = NULL;
    spccl_status st;
    int before;
    SP_TRY(sp_gpu_comm_get(comm, "spccl_cuda_wait", &g));
    SP_TRY(g->ops->enter(g->device.ordinal, &before));
    st = wait_stream(g, stream, timeout_ms >= 0 ? timeout_ms : comm->timeout_ms);
    g->ops->leave(before);
    return st;
}
