/* pruned_sum.c - spccl_cuda_prune_all_reduce: prune a gradient, then sum what all ranks send. See pruned_lists.h.
 *
 * Where lists cannot be used, this prunes and calls the all-reduce. All ranks decide the same, as the decision depends
 * only on what is the same on all ranks: the group, its windows, the sizes of the segments, options.density, and, until
 * there are windows, whether the call is captured. The first call that is not makes the windows. */
#include "core/base/env.h"
#include "core/base/log.h"
#include "core/contract/pruned_lists.h"
#include "core/gpu/channels/channels.h"
#include "core/gpu/gpu_comm.h"
#include "core/prune/prune_plan.h"
#include "core/run/coll_check.h"

static const char call[] = "spccl_cuda_prune_all_reduce";

/* Room for entries that warps leave unused: a claim for each warp of 132 multiprocessors, two CTAs of 8 warps each. It
 * is a constant, as all ranks must decide the same, also with other GPUs. If it is too little, less is sent. */
#define UNUSED_MAX (UINT64_C(2112) * SP_LISTS_CLAIM)

/* Set where lists and entries lie in an area of `bytes`. False: there is no room for twice what a gradient of `plan`
 * wants to send at this density. */
static bool lists_fit(const spccl_prune_plan *plan, double density, uint64_t bytes, sp_pruned_sum_args *out)
{
    uint64_t n_lists = (uint64_t)plan->n_tiles * SP_LISTS_PER_TILE, room;
    uint64_t lists = SP_LISTS_OFF + sp_align_up(n_lists * sizeof(sp_pruned_list), 256);
    uint64_t wanted = (uint64_t)((double)(plan->n_covered - plan->n_whole) * density);
    uint64_t unused = sp_min_size(n_lists * SP_LISTS_CLAIM, UNUSED_MAX);
    if (lists >= bytes)
        return false;
    room = sp_min_size((bytes - lists) / sizeof(sp_pruned_entry), UINT32_MAX);
    if (plan->n_whole + 2 * wanted + unused > room)
        return false;
    out->n_elems = plan->n_elems;
    out->area_bytes = bytes;
    out->entries_off = lists;
    out->n_whole = (uint32_t)plan->n_whole;
    out->n_entries = (uint32_t)room;
    return true;
}

/* Make the windows for lists, unless they are there. All ranks get the same status. *why: there is no memory. */
static spccl_status need_lists(sp_gpu_comm *g, bool captured, const char **why)
{
    spccl_channels_config config = SPCCL_CHANNELS_CONFIG_INIT;
    int64_t bytes = 0;
    spccl_status st;
    if (g->lists == NULL && !g->no_lists && !captured) {
        st = sp_env_number(SP_ENV_LIST_BYTES,
                           &bytes); /* a wrong value, or 0: the config is refused, on all ranks */
        config.window_bytes = st == SPCCL_OK ? (uint64_t)bytes / 512 * 512 : 0;
        st = spccl_channels_create(g->comm, &config, &g->lists);
        if (st != SPCCL_OK && sp_comm_broken(g->comm) != SPCCL_OK)
            return st;
        g->no_lists = st != SPCCL_OK;
        if (st == SPCCL_OK) {
            pthread_mutex_lock(&g->channels_mu);
            g->lists->for_lists = true;
            pthread_mutex_unlock(&g->channels_mu);
        } else if (bytes != 0) {
            sp_log(SP_LOG_WARN, g->comm->rank, "%s: pruned gradients take the all-reduce: %s", call,
                   spccl_last_error());
        }
    }
    *why = g->no_lists ? "SPCCL_PRUNE_LIST_BYTES is 0 or differs between ranks, or memory for lists failed"
           : g->lists == NULL ? "a capture cannot allocate memory for lists: call once before"
                              : NULL;
    return SPCCL_OK;
}

/* Fill in all of `out` but the pruning. *why: this call cannot use lists. */
static spccl_status need_room(sp_gpu_comm *g, const spccl_prune_plan *plan, spccl_redop op, bool captured,
                              sp_pruned_sum_args *out, const char **why)
{
    const spccl_prune_options *o = &out->prune.options;
    const spccl_comm *comm = g->comm;
    *why = comm->world_size == 1                         ? "the group has one rank"
           : g->proxies != NULL                          ? "the group has ranks on several hosts"
           : comm->world_size > SP_GPU_HOST_RANKS_MAX    ? "the group has more than 16 ranks"
           : plan->dtype != SPCCL_FLOAT32                ? "the gradient is not float32"
           : op != SPCCL_SUM && op != SPCCL_AVG          ? "the operation is not SUM or AVG"
           : o->scale != 1                               ? "options.scale is not 1"
           : o->dense_steps != 0 || o->warmup_steps != 0 ? "the density may still fall"
           : plan->n_covered != plan->n_elems            ? "the segments leave gaps"
                                                         : NULL;
    if (*why == NULL)
        SP_TRY(need_lists(g, captured, why));
    if (*why == NULL && !lists_fit(plan, o->density, g->lists->memories[0].bytes / 2, out))
        *why = "lists of this gradient at this density need more memory than SPCCL_PRUNE_LIST_BYTES";
    if (*why != NULL)
        return SPCCL_OK;
    out->rank = comm->rank;
    out->world_size = comm->world_size;
    out->average = op == SPCCL_AVG;
    for (int r = 0; r < comm->world_size; r++)
        if (r != comm->rank)
            SP_TRY(spccl_channels_get_memory(g->lists, r, 0, &out->channels[r]));
    return SPCCL_OK;
}

/* The GPU is current. */
static spccl_status launch_lists(sp_gpu_comm *g, sp_pruned_sum_args *x, void *stream)
{
    sp_gpu_order order;
    bool launching = false;
    uint32_t n_ctas;
    spccl_status st;
    pthread_mutex_lock(&g->mu);
    n_ctas = sp_tune_gpu_ctas(&g->limits, g->shape);
    x->max_ctas = g->max_ctas != 0 ? g->max_ctas : n_ctas < g->device.n_sms ? n_ctas : 0;
    st = sp_gpu_order_begin(g, stream, &order);
    if (st == SPCCL_OK) {
        launching = true;
        st = g->ops->pruned_sum(x, stream);
    }
    if (st == SPCCL_OK) {
        g->n_launches++;
        g->n_by_lists++;
        st = sp_gpu_order_end(g, stream, &order);
    }
    pthread_mutex_unlock(&g->mu);
    return st != SPCCL_OK && launching ? sp_gpu_launch_failed(g, st, call) : st;
}

static spccl_status check(spccl_comm *comm, spccl_prune_plan *plan, void *grad, spccl_redop op,
                          sp_gpu_comm **g)
{
    sp_coll_args a = {.coll = SP_ALL_REDUCE, .in = grad, .out = grad, .redop = op};
    size_t total_bytes;
    if (plan == NULL)
        return SP_FAIL(SPCCL_ERR_ARG, "%s: plan is NULL", call);
    a.n_elems = plan->n_elems;
    a.dtype = plan->dtype;
    SP_TRY(sp_coll_check(comm, &a, &total_bytes));
    SP_TRY(sp_gpu_comm_get(comm, call, g));
    if (plan->device >= 0 && plan->device != (*g)->device.ordinal)
        return SP_FAIL(SPCCL_ERR_ARG, "rank %d: %s: the plan is for GPU %d, the group's GPU is %d",
                       comm->rank, call, plan->device, (*g)->device.ordinal);
    return sp_gpu_refuse_broken(comm);
}

/* One stage of a call, or both. The GPU is current. With lists, stage 1 finds the thresholds of a captured call: beside
 * the exchange of the gradient before. And those of a call that clips, whose factor depends on norms that the caller
 * changes on the stream of stage 1. */
static spccl_status run(sp_gpu_comm *g, spccl_prune_plan *plan, sp_pruned_sum_args *x, spccl_redop op,
                        uint32_t stage, void *stream)
{
    unsigned long long capture = 0;
    const char *why;
    SP_TRY(g->ops->capture_id(stream, &capture));
    SP_TRY(need_room(g, plan, op, capture != 0, x, &why));
    if (why == NULL) {
        bool parts = stage != SP_PRUNE_STAGE_BOTH && (capture != 0 || x->prune.options.norm != NULL);
        x->prune.stage = parts ? stage : SP_PRUNE_STAGE_BOTH;
        if (stage != SP_PRUNE_STAGE_SAMPLE)
            return launch_lists(g, x, stream);
        return parts ? g->ops->prune(&x->prune, stream) : SPCCL_OK;
    }
    if (!plan->told)
        sp_log(SP_LOG_INFO, g->comm->rank, "%s: %zu elements take the all-reduce: %s", call, plan->n_elems,
               why);
    plan->told = true;
    if (stage != SP_PRUNE_STAGE_PASS)
        SP_TRY(g->ops->prune(&x->prune, stream));
    if (stage == SP_PRUNE_STAGE_SAMPLE)
        return SPCCL_OK;
    return spccl_cuda_all_reduce(g->comm, x->prune.grad, x->prune.grad, plan->n_elems, plan->dtype, op,
                                 stream);
}

spccl_status spccl_cuda_prune_all_reduce_stage(spccl_comm *comm, spccl_prune_plan *plan, void *grad,
                                               spccl_redop op, const spccl_prune_options *options, int stage,
                                               void *stream)
{
    sp_pruned_sum_args x = {.rank = 0};
    sp_gpu_comm *g = NULL;
    spccl_status st;
    int before;
    SP_TRY(check(comm, plan, grad, op, &g));
    SP_TRY(sp_prune_gpu_args_get(plan, grad, options, call, &x.prune));
    if (stage < SP_PRUNE_STAGE_BOTH || stage > SP_PRUNE_STAGE_PASS)
        return SP_FAIL(SPCCL_ERR_ARG, "rank %d: %s: stage is %d, wanted 1 or 2, or 0 for both", comm->rank,
                       call, stage);
    if (x.prune.options.sent != NULL)
        return SP_FAIL(SPCCL_ERR_ARG, "rank %d: %s: options.sent is set, wanted NULL: grad is exchanged",
                       comm->rank, call);
    SP_TRY(g->ops->enter(g->device.ordinal, &before));
    st = run(g, plan, &x, op, (uint32_t)stage, stream);
    g->ops->leave(before);
    return st;
}

spccl_status spccl_cuda_prune_all_reduce(spccl_comm *comm, spccl_prune_plan *plan, void *grad, spccl_redop op,
                                         const spccl_prune_options *options, void *stream)
{
    return spccl_cuda_prune_all_reduce_stage(comm, plan, grad, op, options, SP_PRUNE_STAGE_BOTH, stream);
}
