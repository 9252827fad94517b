/* coll_check.c - see coll_check.h. */
#include "core/run/coll_check.h"

#include "core/base/dtype.h"

static spccl_status check_buffer(const sp_coll_args *a, const char *name, const void *p, size_t bytes,
                                 spccl_dtype dtype)
{
    if (p == NULL && bytes != 0)
        return SP_FAIL(SPCCL_ERR_ARG, "%s: %s is NULL, wanted %zu bytes", sp_coll_name(a->coll), name, bytes);
    if ((uintptr_t)p % sp_dtype_bytes(dtype) != 0)
        return SP_FAIL(SPCCL_ERR_ARG, "%s: %s (%p) is not aligned to a %s", sp_coll_name(a->coll), name, p,
                       sp_dtype_name(dtype));
    return SPCCL_OK;
}

/* In place is allowed: in_place_in == in_place_out, which are the same block of input and output. With any
 * other overlap the collective would read what it has already written. */
static spccl_status check_alias(const sp_coll_args *a, size_t in_bytes, size_t out_bytes,
                                const void *in_place_in, const void *in_place_out)
{
    bool in_place = in_place_in == in_place_out && sp_coll_out_dtype(a) == a->dtype;
    if (in_place || !sp_overlap(a->in, in_bytes, a->out, out_bytes))
        return SPCCL_OK;
    return SP_FAIL(SPCCL_ERR_ALIAS, "%s: in [%p, +%zu) overlaps out [%p, +%zu), but the call is not in place",
                   sp_coll_name(a->coll), a->in, in_bytes, a->out, out_bytes);
}

/* Checks of all four collectives. Sets *total_bytes to the bytes of n_blocks blocks of n_elems elements. */
static spccl_status check_common(const spccl_comm *comm, const sp_coll_args *a, size_t n_blocks,
                                 size_t *block_bytes, size_t *total_bytes)
{
    bool reduces = a->coll == SP_ALL_REDUCE || a->coll == SP_REDUCE_SCATTER;
    if (!sp_dtype_ok(a->dtype))
        return SP_FAIL(SPCCL_ERR_DTYPE, "%s: dtype %d is unknown", sp_coll_name(a->coll), (int)a->dtype);
    if (reduces && !sp_dtype_can_reduce(a->dtype))
        return SP_FAIL(SPCCL_ERR_DTYPE, "%s: %s is carried as bytes and cannot be reduced",
                       sp_coll_name(a->coll), sp_dtype_name(a->dtype));
    if (reduces && ((int)a->redop < SPCCL_SUM || (int)a->redop > SPCCL_PROD))
        return SP_FAIL(SPCCL_ERR_ARG, "%s: reduce op %d is unknown", sp_coll_name(a->coll), (int)a->redop);
    if (!sp_mul_size(a->n_elems, sp_dtype_bytes(a->dtype), block_bytes) ||
        !sp_mul_size(*block_bytes, n_blocks, total_bytes) || *total_bytes > PTRDIFF_MAX)
        return SP_FAIL(SPCCL_ERR_ARG,
                       "%s: %zu elements of %s for %d ranks are more bytes than memory can have",
                       sp_coll_name(a->coll), a->n_elems, sp_dtype_name(a->dtype), comm->world_size);
    return SPCCL_OK;
}

spccl_status sp_coll_check(const spccl_comm *comm, const sp_coll_args *a, size_t *total_bytes)
{
    bool blocks = a->coll == SP_ALL_GATHER || a->coll == SP_REDUCE_SCATTER;
    size_t block, total, in_bytes, out_bytes;
    const uint8_t *in = a->in;
    uint8_t *out = a->out;
    SP_TRY(sp_comm_check(comm, sp_coll_name(a->coll)));
    SP_TRY(check_common(comm, a, blocks ? (size_t)comm->world_size : 1, &block, &total));
    if (a->coll == SP_BROADCAST && (a->root < 0 || a->root >= comm->world_size))
        return SP_FAIL(SPCCL_ERR_ARG, "broadcast: root %d, wanted 0 to %d", a->root, comm->world_size - 1);
    in_bytes = a->coll == SP_ALL_GATHER ? block : total;
    out_bytes = a->coll == SP_REDUCE_SCATTER ? block : total;
    out_bytes = out_bytes / sp_dtype_bytes(a->dtype) * sp_dtype_bytes(sp_coll_out_dtype(a));
    SP_TRY(check_buffer(a, a->coll == SP_BROADCAST ? "buf" : "in", in, in_bytes, a->dtype));
    SP_TRY(check_buffer(a, a->coll == SP_BROADCAST ? "buf" : "out", out, out_bytes, sp_coll_out_dtype(a)));
    *total_bytes = total;
    if (total == 0)
        return SPCCL_OK;
    if (a->coll == SP_ALL_GATHER)
        out += (size_t)comm->rank * block;
    if (a->coll == SP_REDUCE_SCATTER)
        in += (size_t)comm->rank * block;
    return check_alias(a, in_bytes, out_bytes, in, out);
}
