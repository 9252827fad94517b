/* exec_format.c - chooses the format of one slice: forced, by the densities of earlier steps, by a probe of a few elements, or by a scan
 * and the cost of each format. See exec_steps.h. */
#include "core/run/exec_steps.h"

#include "core/base/dtype.h"
#include "core/format/tune_format.h"
#include "core/plan/tune_coll.h"

/* Time per byte on the slowest of the links to the receivers. */
static double link_ns_per_byte(const sp_exec *x, const sp_slice *s)
{
    double most = 0;
    for (int i = 0; i < s->step->n_to; i++) {
        double cost = sp_link_ns_per_byte(x->links, sp_slice_rank(s, s->step->to + i));
        most = cost > most ? cost : most;
    }
    return most;
}

/* True if the slice goes into a sum of floats. Sums start at +0.0, and -0.0 adds nothing to them, so it need not be
 * sent. What is sent of a sum or a result has every set bit: an average can round to -0.0. */
static bool is_contribution(const sp_slice *s)
{
    const sp_coll_args *a = &s->op->a;
    return s->step->kind == SP_STEP_SEND && s->step->source == SP_SOURCE_IN &&
           (a->coll == SP_ALL_REDUCE || a->coll == SP_REDUCE_SCATTER) &&
           (a->redop == SPCCL_SUM || a->redop == SPCCL_AVG) && sp_dtype_is_float(a->dtype);
}

/* True if the slice is sent dense without a scan. */
static bool is_dense_unseen(const sp_slice *s, const void *data, uint32_t n_dense)
{
    spccl_format format = s->op->a.format;
    sp_thresholds t = sp_thresholds_of(format);
    if (format == SPCCL_FORMAT_DENSE)
        return true;
    if (s->step->hop == SP_HOP_PLAIN)
        return format == SPCCL_FORMAT_AUTO &&
               sp_tune_skip_scan(data, s->n, sp_dtype_bytes(s->out_dtype), is_contribution(s), n_dense);
    if (!sp_density_says_dense(&s->op->densities[s->k], s->step->hop, &t))
        return false;
    sp_density_extrapolate(&s->op->densities[s->k]);
    return true;
}

spccl_status sp_slice_choose_format(sp_exec *x, const sp_slice *s, const void *data, spccl_format *format,
                                    size_t *nnz)
{
    const sp_coll_args *a = &s->op->a;
    uint32_t *n_dense = &x->active[s->op_idx]->n_dense[s->step_idx];
    sp_slice_stats stats;
    *nnz = s->n;
    if (is_dense_unseen(s, data, *n_dense)) {
        *format = SPCCL_FORMAT_DENSE;
        ++*n_dense;
        return SPCCL_OK;
    }
    if (is_contribution(s))
        sp_codec_scan_contribution(x->codec, data, s->n, s->out_dtype, &stats);
    else
        sp_codec_scan(x->codec, data, NULL, s->n, s->out_dtype, &stats);
    *nnz = stats.nnz;
    if (s->step->hop != SP_HOP_PLAIN)
        sp_density_count(&s->op->densities[s->k], stats.nnz, s->n);
    *format = a->format;
    if (a->format == SPCCL_FORMAT_AUTO)
        *format = sp_tune_format(&stats, false, link_ns_per_byte(x, s));
    else if (stats.nnz == 0)
        *format = SPCCL_FORMAT_EMPTY;
    else if (!sp_codec_allows(&stats, a->format, false))
        *format = SPCCL_FORMAT_DENSE; /* tile cannot hold a full block: FORMAT.md 3.2 */
    *n_dense = *format == SPCCL_FORMAT_DENSE ? *n_dense + 1 : 0;
    return SPCCL_OK;
}
