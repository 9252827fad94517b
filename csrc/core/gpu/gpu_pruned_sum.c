/* gpu_pruned_sum.c - spccl_cuda_prune_all_reduce: prune a gradient, then sum what all ranks send. See pruned_lists.h.
 *
 * Where lists cannot be used, this prunes and calls the all-reduce. All ranks decide the same, as the decision depends
 * only on what is the same on all ranks: the group, its windows, the sizes of the segments, and options.density. */
#include "core/gpu/gpu_pruned_sum.h"

#include "core/base/env.h"
#include "core/base/log.h"
#include "core/gpu/channels.h"
#include "core/run/coll_check.h"

#include <stdio.h>

static const char call[] = "spccl_cuda_prune_all_reduce";

bool sp_pruned_lists_fit(const spccl_prune_plan *plan, double density, uint64_t bytes,
                         sp_pruned_sum_args *out)
{
    uint64_t n_lists = (uint64_t)plan->n_tiles * SP_LISTS_PER_TILE, room;
    uint64_t lists = sp_align_up(n_lists * sizeof(sp_pruned_list), 256);
    uint64_t wanted = (uint64_t)((double)(plan->n_covered - plan->n_whole) * density);
    uint64_t unused = sp_min_size(n_lists * SP_LISTS_CLAIM, SP_LISTS_UNUSED_MAX);
    if (plan->n_covered != plan->n_elems || lists >= bytes)
        return false;
    room = sp_min_size((bytes - lists) / sizeof(sp_pruned_entry), UINT32_MAX);
    if (plan->n_whole + 2 * wanted + unused > room)
        return false;
    out->area_bytes = bytes;
    out->entries_off = lists;
    out->n_whole = (uint32_t)plan->n_whole;
    out->n_entries = (uint32_t)room;
    return true;
}

/* Make the windows for lists, unless they are there. All ranks get the same answer. */
static bool have_lists(sp_gpu_comm *g, void *stream)
{
    spccl_channels_config config = SPCCL_CHANNELS_CONFIG_INIT;
    unsigned long long capture = 0;
    int64_t bytes = 0;
    spccl_status st;
    if (g->lists != NULL || g->no_lists)
        return g->lists != NULL;
    /* Memory cannot be allocated in a capture. */
    if (g->ops->capture_id(stream, &capture) != SPCCL_OK || capture != 0)
        return false;
    st = sp_env_number(SP_ENV_LIST_BYTES,
                       &bytes); /* a wrong value, or 0: the config is refused, on all ranks */
    config.window_bytes = st == SPCCL_OK ? (uint64_t)bytes / 512 * 512 : 0;
    if (spccl_channels_create(g->comm, &config, &g->lists) == SPCCL_OK)
        return true;
    g->lists = NULL;
    g->no_lists = true;
    if (sp_comm_broken(g->comm) == SPCCL_OK && bytes != 0)
        sp_log(SP_LOG_WARN, g->comm->rank, "%s: pruned gradients take the all-reduce: %s", call,
               spccl_last_error());
    return false;
}

/* Can this call use lists? Then fill in all of `out` but the pruning. */
static bool can_list(sp_gpu_comm *g, const spccl_prune_plan *plan, const sp_gpu_prune_args *prune,
                     spccl_redop op, void *stream, sp_pruned_sum_args *out)
{
    const spccl_prune_options *o = &prune->options;
    const spccl_comm *comm = g->comm;
    if (g->proxies != NULL || comm->world_size > SP_GPU_HOST_RANKS_MAX || plan->dtype != SPCCL_FLOAT32 ||
        (op != SPCCL_SUM && op != SPCCL_AVG) || o->scale != 1 || o->dense_steps != 0 || o->warmup_steps != 0)
        return false;
    if (!have_lists(g, stream) || !sp_pruned_lists_fit(plan, o->density, g->lists->window_bytes / 2, out))
        return false;
    out->rank = comm->rank;
    out->world_size = comm->world_size;
    out->average = op == SPCCL_AVG;
    for (int r = 0; r < comm->world_size; r++)
        if (r != comm->rank && spccl_channels_get_memory(g->lists, r, 0, &out->channels[r]) != SPCCL_OK)
            return false;
    return true;
}

/* The GPU is current. */
static spccl_status launch_lists(sp_gpu_comm *g, sp_pruned_sum_args *x, uint64_t n_elems, void *stream)
{
    sp_gpu_turn turn;
    bool launching = false;
    uint32_t n_ctas;
    spccl_status st;
    pthread_mutex_lock(&g->mu);
    n_ctas = sp_tune_gpu_ctas(&g->limits, g->shape);
    x->max_ctas = g->max_ctas != 0 ? g->max_ctas : n_ctas < g->device.n_sms ? n_ctas : 0;
    st = sp_gpu_turn_begin(g, stream, &turn);
    if (st == SPCCL_OK) {
        launching = true;
        st = g->ops->pruned_sum(x, stream);
    }
    if (st == SPCCL_OK) {
        g->history[g->n_launches % SP_GPU_HISTORY] = (sp_gpu_launch){
            .seq = g->n_launches, .coll = SP_ALL_REDUCE, .n_elems = n_elems, .dtype = SPCCL_FLOAT32};
        g->n_launches++;
        st = sp_gpu_turn_end(g, stream, &turn);
    }
    pthread_mutex_unlock(&g->mu);
    return st != SPCCL_OK && launching ? sp_gpu_launch_failed(g, st, call) : st;
}

static spccl_status check(spccl_comm *comm, spccl_prune_plan *plan, void *grad, spccl_redop op,
                          sp_gpu_comm **g)
{
    sp_coll_args a = {.coll = SP_ALL_REDUCE, .in = grad, .out = grad, .redop = op};
    size_t total_bytes;
    spccl_status st;
    if (plan == NULL || grad == NULL)
        return SP_FAIL(SPCCL_ERR_ARG, "%s: %s is NULL", call, plan == NULL ? "plan" : "grad");
    a.n_elems = plan->n_elems;
    a.dtype = plan->dtype;
    SP_TRY(sp_coll_check(comm, &a, &total_bytes));
    SP_TRY(sp_gpu_comm_get(comm, call, g));
    if (plan->device >= 0 && plan->device != (*g)->device.ordinal)
        return SP_FAIL(SPCCL_ERR_ARG, "rank %d: %s: the plan is for GPU %d, the group's GPU is %d",
                       comm->rank, call, plan->device, (*g)->device.ordinal);
    st = sp_comm_broken(comm);
    if (st != SPCCL_OK) {
        char why[sizeof comm->error];
        snprintf(why, sizeof why, "%.900s", spccl_last_error());
        return SP_FAIL(st, "rank %d: group \"%s\" is broken since: %s", comm->rank, comm->name, why);
    }
    return SPCCL_OK;
}

spccl_status spccl_cuda_prune_all_reduce(spccl_comm *comm, spccl_prune_plan *plan, void *grad, spccl_redop op,
                                         const spccl_prune_options *options, void *stream)
{
    sp_pruned_sum_args x = {.rank = 0};
    sp_gpu_comm *g = NULL;
    spccl_status st;
    int before;
    SP_TRY(check(comm, plan, grad, op, &g));
    SP_TRY(sp_gpu_prune_args_get(plan, grad, options, call, &x.prune));
    if (x.prune.options.stage == SP_PRUNE_STAGE_SAMPLE)
        return SP_FAIL(SPCCL_ERR_ARG, "rank %d: %s: options.stage is 1, wanted 0 or 2", comm->rank, call);
    SP_TRY(g->ops->enter(g->device.ordinal, &before));
    if (comm->world_size > 1 && can_list(g, plan, &x.prune, op, stream, &x)) {
        st = launch_lists(g, &x, plan->n_elems, stream);
    } else {
        st = g->ops->prune(&x.prune, stream);
        if (st == SPCCL_OK)
            st = spccl_cuda_all_reduce(comm, grad, grad, plan->n_elems, plan->dtype, op, stream);
    }
    g->ops->leave(before);
    return st;
}
