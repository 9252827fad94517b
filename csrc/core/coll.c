/* coll.c - the public collectives: check the arguments, choose, plan, hand to the engine. No other logic. */
#include "comm.h"

#include "dtype.h"
#include "tune_coll.h"

#include <inttypes.h>

static spccl_status check_buffer(const sp_coll_args *a, const char *name, const void *p, size_t bytes)
{
    if (p == NULL && bytes != 0)
        return SP_FAIL(SPCCL_ERR_ARG, "%s: %s is NULL, wanted %zu bytes", sp_coll_name(a->coll), name, bytes);
    if ((uintptr_t)p % sp_dtype_bytes(a->dtype) != 0)
        return SP_FAIL(SPCCL_ERR_ARG, "%s: %s (%p) is not aligned to a %s", sp_coll_name(a->coll), name, p,
                       sp_dtype_name(a->dtype));
    return SPCCL_OK;
}

/* Equal at `shift` bytes is in place; any other overlap would read what was already written. */
static spccl_status check_alias(const sp_coll_args *a, size_t in_bytes, size_t out_bytes,
                                const void *in_place_in, const void *in_place_out)
{
    if (in_place_in == in_place_out || !sp_overlap(a->in, in_bytes, a->out, out_bytes))
        return SPCCL_OK;
    return SP_FAIL(SPCCL_ERR_ALIAS, "%s: in [%p, +%zu) overlaps out [%p, +%zu) but is not exactly in place",
                   sp_coll_name(a->coll), a->in, in_bytes, a->out, out_bytes);
}

/* What all four check; total_bytes = bytes of n_elems * blocks. */
static spccl_status check_common(const spccl_comm *comm, const sp_coll_args *a, size_t n_blocks,
                                 size_t *block_bytes, size_t *total_bytes)
{
    bool reduces = a->coll == SP_ALL_REDUCE || a->coll == SP_REDUCE_SCATTER;
    if (comm == NULL)
        return SP_FAIL(SPCCL_ERR_ARG, "%s: comm is NULL", sp_coll_name(a->coll));
    if (!sp_dtype_ok(a->dtype))
        return SP_FAIL(SPCCL_ERR_DTYPE, "%s: dtype %d is unknown", sp_coll_name(a->coll), (int)a->dtype);
    if (reduces && !sp_dtype_can_reduce(a->dtype))
        return SP_FAIL(SPCCL_ERR_DTYPE, "%s: %s is carried as bytes and cannot be reduced",
                       sp_coll_name(a->coll), sp_dtype_name(a->dtype));
    if (reduces && ((int)a->redop < SPCCL_SUM || (int)a->redop > SPCCL_PROD))
        return SP_FAIL(SPCCL_ERR_ARG, "%s: reduce op %d is unknown", sp_coll_name(a->coll), (int)a->redop);
    if (!sp_mul_size(a->n_elems, sp_dtype_bytes(a->dtype), block_bytes) ||
        !sp_mul_size(*block_bytes, n_blocks, total_bytes) || *total_bytes > PTRDIFF_MAX)
        return SP_FAIL(SPCCL_ERR_ARG, "%s: %zu elements of %s for %d ranks overflow memory",
                       sp_coll_name(a->coll), a->n_elems, sp_dtype_name(a->dtype), comm->world_size);
    return SPCCL_OK;
}

static spccl_status submit(spccl_comm *comm, sp_coll_args *a, size_t total_bytes, spccl_request **req)
{
    sp_op *op = NULL;
    a->schedule = comm->schedule_forced && (a->coll == SP_ALL_REDUCE || a->coll == SP_BROADCAST)
                      ? comm->schedule
                      : sp_tune_schedule(a->coll, total_bytes, comm->world_size);
    a->format = comm->format;
    a->slice_elems =
        sp_tune_slice_elems(comm->slice_bytes, sp_dtype_bytes(a->dtype), a->format, comm->links.message_max);
    a->timeout_ms = comm->timeout_ms;
    SP_TRY(sp_op_create(a, comm->rank, comm->world_size, &op));
    return sp_comm_submit(comm, op, req);
}

spccl_status spccl_all_gather(spccl_comm *comm, const void *in, void *out, size_t n_elems, spccl_dtype dtype,
                              spccl_request **req)
{
    sp_coll_args a = {.coll = SP_ALL_GATHER, .in = in, .out = out, .n_elems = n_elems, .dtype = dtype};
    size_t block, total;
    SP_TRY(check_common(comm, &a, comm != NULL ? (size_t)comm->world_size : 1, &block, &total));
    SP_TRY(check_buffer(&a, "in", in, block));
    SP_TRY(check_buffer(&a, "out", out, total));
    SP_TRY(check_alias(&a, block, total, in, (uint8_t *)out + (size_t)comm->rank * block));
    return submit(comm, &a, total, req);
}

spccl_status spccl_reduce_scatter(spccl_comm *comm, const void *in, void *out, size_t n_elems,
                                  spccl_dtype dtype, spccl_redop op, spccl_request **req)
{
    sp_coll_args a = {
        .coll = SP_REDUCE_SCATTER, .in = in, .out = out, .n_elems = n_elems, .dtype = dtype, .redop = op};
    size_t block, total;
    SP_TRY(check_common(comm, &a, comm != NULL ? (size_t)comm->world_size : 1, &block, &total));
    SP_TRY(check_buffer(&a, "in", in, total));
    SP_TRY(check_buffer(&a, "out", out, block));
    SP_TRY(check_alias(&a, total, block, (const uint8_t *)in + (size_t)comm->rank * block, out));
    return submit(comm, &a, total, req);
}

spccl_status spccl_all_reduce(spccl_comm *comm, const void *in, void *out, size_t n_elems, spccl_dtype dtype,
                              spccl_redop op, spccl_request **req)
{
    sp_coll_args a = {
        .coll = SP_ALL_REDUCE, .in = in, .out = out, .n_elems = n_elems, .dtype = dtype, .redop = op};
    size_t block, total;
    SP_TRY(check_common(comm, &a, 1, &block, &total));
    SP_TRY(check_buffer(&a, "in", in, total));
    SP_TRY(check_buffer(&a, "out", out, total));
    SP_TRY(check_alias(&a, total, total, in, out));
    return submit(comm, &a, total, req);
}

spccl_status spccl_broadcast(spccl_comm *comm, void *buf, size_t n_elems, spccl_dtype dtype, int root,
                             spccl_request **req)
{
    sp_coll_args a = {
        .coll = SP_BROADCAST, .in = buf, .out = buf, .n_elems = n_elems, .dtype = dtype, .root = root};
    size_t block, total;
    SP_TRY(check_common(comm, &a, 1, &block, &total));
    if (root < 0 || root >= comm->world_size)
        return SP_FAIL(SPCCL_ERR_ARG, "broadcast: root %d, wanted 0 to %d", root, comm->world_size - 1);
    SP_TRY(check_buffer(&a, "buf", buf, total));
    return submit(comm, &a, total, req);
}
