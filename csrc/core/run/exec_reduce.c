/* exec_reduce.c - one slice of a REDUCE step: combines the contributions in the order of the step, and writes the
 * result to the output. In an all-reduce it also sends the result to all ranks. There are two ways, which give the
 * same bits: through an accumulator, or in the output itself (sparse sums in place). */
#include "core/run/exec_steps.h"

#include "core/base/dtype.h"
#include "core/base/float_bits.h"

/* Reducing in place is faster while the contributions touch few cache lines of the slice. It is done if at
 * most one element in this many is listed. */
#define IN_PLACE_SPARSITY 4
/* A mean in place writes its quotients from the frame to the output if at most one element in this many is
 * listed. Otherwise it divides the whole slice in the output. */
#define WRITE_BACK_SPARSITY 4

/* Combine one contribution, or the sum of several, with the accumulator. frame NULL: this rank's own values, or the
 * sum that it has kept. */
static spccl_status accumulate(sp_exec *x, const sp_slice *s, void *acc, const sp_frame *frame, bool *first)
{
    const sp_coll_args *a = &s->op->a;
    spccl_dtype acc_dtype = sp_acc_dtype(a->dtype);
    spccl_dtype dtype = frame != NULL ? frame->dtype : s->read != NULL ? acc_dtype : a->dtype;
    bool adds = a->redop == SPCCL_SUM || a->redop == SPCCL_AVG;
    const void *values = s->src;
    if (frame != NULL && adds && frame->format != SPCCL_FORMAT_DENSE) {
        if (*first) /* the sum starts at +0.0: adding an absent zero would not change a bit */
            x->kernels->zero(acc, s->n * sp_dtype_bytes(acc_dtype), false);
        *first = false;
        return sp_codec_apply(x->kernels, frame, SPCCL_ADD, acc, acc_dtype, false);
    }
    if (frame != NULL && frame->format == SPCCL_FORMAT_DENSE) {
        values = frame->values;
    } else if (frame != NULL) {
        SP_TRY(sp_codec_apply(x->kernels, frame, SPCCL_SET, x->result, dtype, false));
        values = x->result;
    }
    x->kernels->combine(&(sp_combine_args){
        .acc = acc, .x = values, .n_elems = s->n, .dtype = dtype, .op = a->redop, .first = *first});
    *first = false;
    return SPCCL_OK;
}

/* Combine all contributions, in the order of the step. */
static spccl_status accumulate_all(sp_exec *x, const sp_slice *s, void *acc)
{
    bool first = true;
    for (int i = 0; i <= s->step->n_from; i++) {
        if (i == s->step->own_before)
            SP_TRY(accumulate(x, s, acc, NULL, &first));
        if (i < s->step->n_from)
            SP_TRY(accumulate(x, s, acc, &x->frames[sp_slice_rank(s, s->step->from + i)], &first));
    }
    return SPCCL_OK;
}

static void finish(sp_exec *x, const sp_slice *s, const void *acc, void *dst, size_t n, bool non_temporal)
{
    x->kernels->finish(&(sp_finish_args){.acc = acc,
                                         .dst = dst,
                                         .n_elems = n,
                                         .dtype = sp_coll_out_dtype(&s->op->a),
                                         .op = s->op->a.redop,
                                         .world_size = x->links->world_size,
                                         .non_temporal = non_temporal});
}

/* True if a mean may be divided after encoding, in the frame: the quotient of an absent element must be
 * zero. The accumulator must have the dtype of the frame. Integers stay with the whole slice: most
 * quotients are zero, and the frame would list them. */
static bool divides_frame(const sp_coll_args *a)
{
    return a->redop == SPCCL_AVG && (a->dtype == SPCCL_FLOAT32 || a->dtype == SPCCL_FLOAT64);
}

/* Divide the listed sums of a frame by the world size. A quotient that rounds to zero stays listed. */
static void divide_frame(sp_exec *x, const sp_slice *s, const sp_encoded *e)
{
    uint8_t *values = e->message + SP_ENVELOPE_BYTES + e->layout.values_off;
    finish(x, s, values, values, e->nnz, false);
}

/* Reduce through the accumulator. Works for any op, dtype and density. */
static spccl_status reduce_dense(sp_exec *x, const sp_slice *s)
{
    const sp_coll_args *a = &s->op->a;
    /* In place, the lines of the output are in the cache as this rank's input: ordinary stores are faster. */
    bool non_temporal = s->op->non_temporal && s->dst != s->src;
    bool same_dtype = sp_acc_dtype(a->dtype) == a->dtype;
    sp_encoded e = {0};
    void *result = same_dtype ? x->acc : x->result;
    SP_TRY(accumulate_all(x, s, x->acc));
    if (s->step->n_to == 0 || divides_frame(a)) {
        finish(x, s, x->acc, s->dst, s->n, non_temporal);
    } else {
        if (!same_dtype || a->redop == SPCCL_AVG)
            finish(x, s, x->acc, result, s->n, false);
        x->kernels->copy(s->dst, result, s->n * s->op->elem_bytes, non_temporal);
    }
    if (s->step->n_to == 0)
        return SPCCL_OK;
    SP_TRY(sp_slice_encode(x, s, result, &e));
    if (divides_frame(a))
        divide_frame(x, s, &e);
    sp_measure_message(x, s, e.message, e.nnz);
    return sp_slice_commit(x, s, &e);
}

/* True if the contributions may be added directly to this rank's values in the output. The call must be in
 * place with few listed elements, and the sum must have the bits of a sum in rank order. On rank 0 the
 * others are added after its own values. On rank 1 one term comes before its own. Two terms may be
 * exchanged unless both are NaNs: then the sum keeps the payload of the left one. A pici frame lists
 * elements by columns of 64 x 64: adding it to memory outside the cache takes longer than the accumulator. */
static bool can_reduce_in_place(const sp_exec *x, const sp_slice *s)
{
    const sp_coll_args *a = &s->op->a;
    size_t nnz = 0;
    if (s->step->gives_sum || s->step->adds_sums || s->step->n_from != x->links->world_size - 1 ||
        s->read != NULL || s->dst != s->src || s->step->n_to == 0 || x->links->rank > 1 ||
        (a->redop != SPCCL_SUM && a->redop != SPCCL_AVG) ||
        (a->dtype != SPCCL_FLOAT32 && a->dtype != SPCCL_FLOAT64))
        return false;
    for (int r = 0; r < x->links->world_size; r++) {
        if (r == x->links->rank)
            continue;
        if (x->frames[r].format == SPCCL_FORMAT_DENSE || x->frames[r].format == SPCCL_FORMAT_PICI)
            return false;
        nnz += x->frames[r].nnz;
    }
    return nnz * IN_PLACE_SPARSITY <= s->n &&
           (x->links->rank == 0 ||
            !sp_floats_any_nan(x->frames[0].values, x->frames[0].nnz, s->op->elem_bytes));
}

/* Divide the listed sums by the world size: in the frame, and in the output. */
static spccl_status divide_in_place(sp_exec *x, const sp_slice *s, const sp_encoded *e)
{
    const uint8_t *p = e->message + SP_ENVELOPE_BYTES;
    sp_frame frame = {.format = e->format,
                      .dtype = s->op->a.dtype,
                      .n_elems = s->n,
                      .nnz = e->nnz,
                      .index = p + e->layout.index_off,
                      .meta = p + e->layout.meta_off,
                      .values = p + e->layout.values_off};
    divide_frame(x, s, e);
    if (e->nnz * WRITE_BACK_SPARSITY <= s->n)
        return sp_codec_apply(x->kernels, &frame, SPCCL_OVERWRITE, s->dst, s->op->a.dtype, false);
    finish(x, s, s->dst, s->dst, s->n, false);
    return SPCCL_OK;
}

/* Reduce in the output itself. Absent elements are not written, and only the scan reads them. */
static spccl_status reduce_in_place(sp_exec *x, const sp_slice *s)
{
    const sp_coll_args *a = &s->op->a;
    sp_encoded e = {0};
    for (int r = 0; r < x->links->world_size; r++)
        if (r != x->links->rank)
            SP_TRY(sp_codec_apply(x->kernels, &x->frames[r], SPCCL_ADD, s->dst, a->dtype, false));
    SP_TRY(sp_slice_encode(x, s, s->dst, &e));
    /* A sum starts at +0.0; here it started at this rank's value. The bits can differ where nothing or only
     * -0.0 was added. In that case add the +0.0 now. */
    if (sp_floats_any_changed_by_zero(e.message + SP_ENVELOPE_BYTES + e.layout.values_off, e.nnz,
                                      s->op->elem_bytes)) {
        sp_floats_add_zero(s->dst, s->n, s->op->elem_bytes);
        SP_TRY(sp_slice_encode(x, s, s->dst, &e));
    }
    if (a->redop == SPCCL_AVG)
        SP_TRY(divide_in_place(x, s, &e));
    sp_measure_message(x, s, e.message, e.nnz);
    return sp_slice_commit(x, s, &e);
}

/* Make a sum that this rank keeps, or sends on, or both. */
static spccl_status reduce_to_sum(sp_exec *x, const sp_slice *s)
{
    sp_encoded e = {0};
    void *sum = s->step->keeps ? s->kept->data : x->acc;
    SP_TRY(accumulate_all(x, s, sum));
    if (s->step->keeps)
        s->kept->n_readers = s->step->n_readers;
    if (s->step->n_to == 0)
        return SPCCL_OK;
    SP_TRY(sp_slice_encode(x, s, sum, &e));
    return sp_slice_commit(x, s, &e);
}

spccl_status sp_reduce_run(sp_exec *x, sp_slice *s)
{
    const uint8_t *msg = NULL;
    size_t bytes = 0;
    for (int i = 0; i < s->step->n_from; i++) /* has every rank sent? */
        SP_TRY(sp_slice_message(x, s, i, &msg, &bytes));
    SP_TRY(sp_slice_space(x, s, sp_slice_bound(s)));
    for (int i = 0; i < s->step->n_from; i++) { /* check all before anything is written */
        int peer = sp_slice_rank(s, s->step->from + i);
        SP_TRY(sp_slice_message(x, s, i, &msg, &bytes));
        SP_TRY(sp_slice_open(x, s, peer, msg, bytes, &x->frames[peer]));
        s->n_contributed += x->frames[peer].nnz;
    }
    SP_TRY(s->step->gives_sum          ? reduce_to_sum(x, s)
           : can_reduce_in_place(x, s) ? reduce_in_place(x, s)
                                       : reduce_dense(x, s));
    for (int i = 0; i < s->step->n_from; i++) {
        SP_TRY(sp_slice_message(x, s, i, &msg, &bytes));
        if (s->step->n_to == 0) /* oneshot */
            sp_measure_message(x, s, msg, x->frames[sp_slice_rank(s, s->step->from + i)].nnz);
        SP_TRY(sp_slice_release(x, s, i, bytes));
    }
    if (s->read != NULL)
        s->read->n_readers--;
    return SPCCL_OK;
}
