/* coll.c - the public collectives: check the arguments, choose the slice size, submit to the engine. The schedule is
 * chosen when the executor takes the collective: sp_exec_pass. */
#include "core/run/coll_check.h"

#include "core/base/dtype.h"
#include "core/plan/tune_coll.h"

static void take_schedule(const spccl_comm *comm, sp_coll_args *a)
{
    a->schedule = comm->schedule;
    if (comm->plans == NULL) {
        a->is_forced = comm->schedule_forced && sp_schedule_has(comm->schedule, a->coll);
        return;
    }
    a->written = sp_plan_set_find(comm->plans, a->coll, a->root);
    a->is_forced = a->written != NULL;
    a->plans = sp_plan_set_name(comm->plans);
}

/* Sums have the accumulator's dtype. A schedule of ours sends them if it does not add in rank order. */
static bool sends_sums(const sp_coll_args *a)
{
    if (a->written != NULL)
        return a->written->proof.sends_sums;
    return a->is_forced && !sp_schedule_adds_in_rank_order(a->schedule);
}

static spccl_status submit(spccl_comm *comm, sp_coll_args *a, spccl_request **req)
{
    sp_op *op = NULL;
    size_t total_bytes;
    spccl_dtype largest;
    spccl_status st;
    SP_TRY(sp_coll_check(comm, a, &total_bytes));
    a->hosts = comm->links.hosts;
    take_schedule(comm, a);
    a->format = comm->format;
    largest = sends_sums(a) ? sp_acc_dtype(a->dtype) : a->dtype;
    a->slice_elems =
        sp_tune_slice_elems(comm->slice_bytes, sp_dtype_bytes(largest), a->format, comm->links.message_max);
    if (comm->tunes_slices)
        a->slice_elems_max =
            (comm->links.any_forces & SP_BOOT_FORCES_FORMAT) != 0
                ? a->slice_elems
                : sp_tune_slice_elems_max(a->slice_elems, sp_dtype_bytes(a->dtype), comm->queue_bytes);
    if (a->timeout_ms == 0)
        a->timeout_ms = comm->timeout_ms;
    st = sp_op_create(a, comm->world_size, &op);
    if (st != SPCCL_OK)
        return sp_comm_call_failed(comm, a, st);
    return sp_comm_submit(comm, op, req);
}

spccl_status spccl_all_gather(spccl_comm *comm, const void *in, void *out, size_t n_elems, spccl_dtype dtype,
                              spccl_request **req)
{
    sp_coll_args a = {.coll = SP_ALL_GATHER, .in = in, .out = out, .n_elems = n_elems, .dtype = dtype};
    return submit(comm, &a, req);
}

spccl_status sp_comm_all_gather(spccl_comm *comm, const void *in, void *out, size_t bytes,
                                sp_time_limit limit, spccl_request **req)
{
    sp_coll_args a = {.coll = SP_ALL_GATHER,
                      .in = in,
                      .out = out,
                      .n_elems = bytes,
                      .dtype = SPCCL_UINT8,
                      .timeout_ms = limit.timeout_ms,
                      .deadline_ns = limit.deadline_ns};
    return submit(comm, &a, req);
}

spccl_status spccl_reduce_scatter(spccl_comm *comm, const void *in, void *out, size_t n_elems,
                                  spccl_dtype dtype, spccl_redop op, spccl_request **req)
{
    sp_coll_args a = sp_coll_sum(SP_REDUCE_SCATTER, in, out, n_elems, dtype, op);
    return submit(comm, &a, req);
}

spccl_status spccl_reduce_scatter_wide(spccl_comm *comm, const void *in, void *out, size_t n_elems,
                                       spccl_dtype dtype, spccl_redop op, spccl_request **req)
{
    sp_coll_args a = sp_coll_sum(SP_REDUCE_SCATTER, in, out, n_elems, dtype, op);
    a.wide = true;
    return submit(comm, &a, req);
}

spccl_status spccl_all_reduce(spccl_comm *comm, const void *in, void *out, size_t n_elems, spccl_dtype dtype,
                              spccl_redop op, spccl_request **req)
{
    sp_coll_args a = sp_coll_sum(SP_ALL_REDUCE, in, out, n_elems, dtype, op);
    return submit(comm, &a, req);
}

spccl_status spccl_broadcast(spccl_comm *comm, void *buf, size_t n_elems, spccl_dtype dtype, int root,
                             spccl_request **req)
{
    sp_coll_args a = {
        .coll = SP_BROADCAST, .in = buf, .out = buf, .n_elems = n_elems, .dtype = dtype, .root = root};
    return submit(comm, &a, req);
}
