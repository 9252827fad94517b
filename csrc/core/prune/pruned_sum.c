/* pruned_sum.c - spccl_cuda_prune_all_reduce: prune a gradient, then sum what all ranks send. See pruned_lists.h.
 *
 * Where lists cannot be used, this prunes and calls the all-reduce. All ranks decide the same, as the decision depends
 * only on what is the same on all ranks: the group, its windows, the sizes of the segments, options.density, and, until
 * there are windows, whether the call is captured. The first call that is not makes the windows, also one that asks. */
#include "core/prune/pruned_sum.h"

#include "core/base/env.h"
#include "core/base/log.h"
#include "core/gpu/channels/channels.h"
#include "core/run/coll_check.h"

#include <stdio.h>

static const char call[] = "spccl_cuda_prune_all_reduce";
#define NO_MEMORY                                                                                            \
    "there is no memory for lists: SPCCL_PRUNE_LIST_BYTES is 0 or differs between ranks, or it failed"

bool sp_pruned_lists_fit(const spccl_prune_plan *plan, double density, uint64_t bytes,
                         sp_pruned_sum_args *out)
{
    uint64_t n_lists = (uint64_t)plan->n_tiles * SP_LISTS_PER_TILE, room;
    uint64_t lists = SP_LISTS_OFF + sp_align_up(n_lists * sizeof(sp_pruned_list), 256);
    uint64_t wanted = (uint64_t)((double)(plan->n_covered - plan->n_whole) * density);
    uint64_t unused = sp_min_size(n_lists * SP_LISTS_CLAIM, SP_LISTS_UNUSED_MAX);
    if (plan->n_covered != plan->n_elems || lists >= bytes)
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

/* Make the windows for lists, unless they are there. All ranks get the same status. */
static spccl_status need_lists(sp_gpu_comm *g, void *stream)
{
    spccl_channels_config config = SPCCL_CHANNELS_CONFIG_INIT;
    unsigned long long capture = 0;
    int64_t bytes = 0;
    spccl_status st;
    if (g->lists != NULL)
        return SPCCL_OK;
    if (g->no_lists)
        return SP_FAIL(SPCCL_ERR_UNSUPPORTED, NO_MEMORY);
    SP_TRY(g->ops->capture_id(stream, &capture));
    if (capture != 0)
        return SP_FAIL(SPCCL_ERR_UNSUPPORTED, "a capture cannot allocate memory for lists: call once before");
    st = sp_env_number(SP_ENV_LIST_BYTES,
                       &bytes); /* a wrong value, or 0: the config is refused, on all ranks */
    config.window_bytes = st == SPCCL_OK ? (uint64_t)bytes / 512 * 512 : 0;
    st = spccl_channels_create(g->comm, &config, &g->lists);
    if (st == SPCCL_OK) {
        pthread_mutex_lock(&g->channels_mu);
        g->lists->for_lists = true;
        pthread_mutex_unlock(&g->channels_mu);
        return SPCCL_OK;
    }
    g->lists = NULL;
    if (sp_comm_broken(g->comm) != SPCCL_OK)
        return st;
    g->no_lists = true;
    if (bytes != 0)
        sp_log(SP_LOG_WARN, g->comm->rank, "%s: pruned gradients take the all-reduce: %s", call,
               spccl_last_error());
    return SP_FAIL(SPCCL_ERR_UNSUPPORTED, NO_MEMORY);
}

/* Can this call use lists? Then fill in all of `out` but the pruning. Else UNSUPPORTED, with the reason, or why there is
 * no memory for lists. */
static spccl_status need_room(sp_gpu_comm *g, const spccl_prune_plan *plan, const spccl_prune_options *o,
                              spccl_redop op, void *stream, sp_pruned_sum_args *out)
{
    const spccl_comm *comm = g->comm;
    const char *why = comm->world_size == 1                         ? "the group has one rank"
                      : g->proxies != NULL                          ? "the group has ranks on several hosts"
                      : comm->world_size > SP_GPU_HOST_RANKS_MAX    ? "the group has more than 16 ranks"
                      : plan->dtype != SPCCL_FLOAT32                ? "the gradient is not float32"
                      : op != SPCCL_SUM && op != SPCCL_AVG          ? "the operation is not SUM or AVG"
                      : o->scale != 1                               ? "options.scale is not 1"
                      : o->dense_steps != 0 || o->warmup_steps != 0 ? "the density may still fall"
                      : plan->n_covered != plan->n_elems            ? "the segments leave gaps"
                                                                    : NULL;
    if (why != NULL)
        return SP_FAIL(SPCCL_ERR_UNSUPPORTED, "%s", why);
    SP_TRY(need_lists(g, stream));
    if (!sp_pruned_lists_fit(plan, o->density, g->lists->window_bytes / 2, out))
        return SP_FAIL(SPCCL_ERR_UNSUPPORTED,
                       "lists of %zu elements at density %g need more memory than there is "
                       "(SPCCL_PRUNE_LIST_BYTES)",
                       plan->n_elems, o->density);
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
    if (plan == NULL || grad == NULL)
        return SP_FAIL(SPCCL_ERR_ARG, "%s: %s", call,
                       plan == NULL ? "plan is NULL" : "the plan is for host memory");
    a.n_elems = plan->n_elems;
    a.dtype = plan->dtype;
    SP_TRY(sp_coll_check(comm, &a, &total_bytes));
    SP_TRY(sp_gpu_comm_get(comm, call, g));
    if (plan->device >= 0 && plan->device != (*g)->device.ordinal)
        return SP_FAIL(SPCCL_ERR_ARG, "rank %d: %s: the plan is for GPU %d, the group's GPU is %d",
                       comm->rank, call, plan->device, (*g)->device.ordinal);
    return sp_gpu_refuse_broken(comm);
}

/* The GPU is current. */
static spccl_status run(sp_gpu_comm *g, spccl_prune_plan *plan, sp_pruned_sum_args *x, bool only_asks,
                        spccl_redop op, void *stream)
{
    spccl_status can = need_room(g, plan, &x->prune.options, op, stream, x);
    if (can != SPCCL_OK && can != SPCCL_ERR_UNSUPPORTED)
        return can;
    if (only_asks && can != SPCCL_OK) {
        char why[400];
        snprintf(why, sizeof why, "%s", spccl_last_error());
        return SP_FAIL(SPCCL_ERR_UNSUPPORTED, "rank %d: %s takes the all-reduce: %s", g->comm->rank, call,
                       why);
    }
    if (only_asks)
        return SPCCL_OK;
    if (can == SPCCL_OK)
        return launch_lists(g, x, stream);
    SP_TRY(g->ops->prune(&x->prune, stream));
    return spccl_cuda_all_reduce(g->comm, x->prune.grad, x->prune.grad, plan->n_elems, plan->dtype, op,
                                 stream);
}

spccl_status spccl_cuda_prune_all_reduce(spccl_comm *comm, spccl_prune_plan *plan, void *grad, spccl_redop op,
                                         const spccl_prune_options *options, void *stream)
{
    sp_pruned_sum_args x = {.rank = 0};
    sp_gpu_comm *g = NULL;
    bool only_asks = grad == NULL;
    spccl_status st;
    int before;
    if (plan != NULL && only_asks)
        grad = plan->table; /* some memory of the GPU: it is checked, and not used */
    SP_TRY(check(comm, plan, grad, op, &g));
    SP_TRY(sp_gpu_prune_args_get(plan, grad, options, call, &x.prune));
    if (x.prune.options.stage == SP_PRUNE_STAGE_SAMPLE && !only_asks)
        return SP_FAIL(SPCCL_ERR_ARG, "rank %d: %s: options.stage is 1, wanted 0 or 2", comm->rank, call);
    SP_TRY(g->ops->enter(g->device.ordinal, &before));
    st = run(g, plan, &x, only_asks, op, stream);
    g->ops->leave(before);
    return st;
}
