/* sim_cost.c - what one slice of a step takes and sends in a simulation: its density, format and bytes by the model of bytes
 * (plan_bytes.h), and the work of the rank's core. exec_steps.c and exec_reduce.c do what is counted here. See sim.h. */
#include "core/simulate/sim.h"

#include "core/base/bits.h"
#include "core/plan/plan_cost.h"

uint32_t sim_slices(const sim *x, const sp_step *s)
{
    return (uint32_t)sp_ceil_div(s->n_elems, x->slice_elems);
}

sim_kept *sim_kept_of(const sim_rank *r, int slot, uint32_t k)
{
    uint32_t block = (uint32_t)r->plan->block_slices;
    return &r->kept[(uint32_t)slot * block + k % block];
}

/* Density of a sum of so many contributions. */
static double density_of(sim *x, int n_added)
{
    double *d = &x->densities[n_added];
    if (*d < 0)
        *d = sp_cost_partial_density(x->o->density, x->sum_density, x->n_ranks, n_added);
    return *d;
}

static double pass_ns(const sim *x, size_t bytes)
{
    return (double)bytes * x->o->pass_ns;
}

/* True if a threshold of the forced ring makes this slice dense: exec_format.c does the same. */
static bool is_dense_unseen(const sim *x, sim_rank *r, const sp_step *s, uint32_t k, double density)
{
    const size_t n = (size_t)1 << 24; /* elements: any large number */
    sp_thresholds t = sp_thresholds_of(x->format);
    if (s->hop == SP_HOP_PLAIN || x->format == SPCCL_FORMAT_DENSE)
        return false;
    if (sp_density_says_dense(&r->densities[k], s->hop, &t)) {
        sp_density_extrapolate(&r->densities[k]);
        return true;
    }
    sp_density_count(&r->densities[k], (size_t)(density * (double)n + 0.5), n);
    return false;
}

/* Encode what the step sends: format, bytes and work. */
static void encode(sim *x, sim_rank *r, sim_slice *out)
{
    const sp_step *s = out->step;
    sp_slice_kind kind = {out->elem_bytes, x->format, density_of(x, out->n_added), 0};
    for (int i = 0; i < s->n_to; i++) {
        const sim_flow *f = sim_flow_to(x, (int)(r - x->ranks), r->plan->ranks[s->to + i], s->queue_out);
        double ns = f->remote ? x->remote_ns : SP_COST_LOCAL_NS;
        kind.link_ns = ns > kind.link_ns ? ns : kind.link_ns;
    }
    if (is_dense_unseen(x, r, s, out->k, kind.density))
        kind.format = SPCCL_FORMAT_DENSE;
    out->frame = sp_slice_bytes_of(&kind, out->n);
    out->work_ns += out->frame.encode_ns * x->o->codec_factor;
    if (out->frame.format != SPCCL_FORMAT_DENSE) /* dense slices are mostly sent without a scan */
        out->work_ns += pass_ns(x, out->n * out->elem_bytes);
}

/* Take a message out of its queue, and decode it. */
static double receive_ns(const sim *x, const sim_flow *f, const sp_slice_bytes *frame)
{
    const spccl_simulate_options *o = x->o;
    return frame->decode_ns * o->codec_factor + (f->remote ? o->remote_message_ns : o->local_message_ns) +
           frame->bytes * (f->remote ? o->receive_ns : o->local_ns);
}

static void cost_of_reduce(sim *x, sim_rank *r, sim_slice *out)
{
    const sp_step *s = out->step;
    out->n_added = 0;
    out->work_ns = pass_ns(x, out->n * x->acc_bytes);
    for (int i = 0; i < s->n_from; i++) {
        const sim_flow *f = sim_flow_from(x, (int)(r - x->ranks), r->plan->ranks[s->from + i], s->queue_in);
        out->n_added += f->in->n_added;
        out->work_ns += receive_ns(x, f, &f->in->frame);
        if (f->in->frame.format == SPCCL_FORMAT_DENSE)
            out->work_ns += pass_ns(x, out->n * x->elem_bytes);
    }
    if (s->own_before >= 0) {
        bool kept = s->source == SP_SOURCE_KEPT_SUM;
        out->n_added += kept ? sim_kept_of(r, s->source_slot, out->k)->n_added : 1;
        out->work_ns += pass_ns(x, out->n * (kept ? x->acc_bytes : x->elem_bytes));
    }
    if (s->gives_sum)
        out->elem_bytes = x->acc_bytes;
    else
        out->work_ns += pass_ns(x, out->n * x->elem_bytes);
    if (s->n_to != 0)
        encode(x, r, out);
}

static void cost_of_receive(sim *x, const sim_rank *r, sim_slice *out)
{
    const sp_step *s = out->step;
    const sim_flow *f = sim_flow_from(x, (int)(r - x->ranks), r->plan->ranks[s->from], s->queue_in);
    out->frame = f->in->frame;
    out->n_added = f->in->n_added;
    out->work_ns = receive_ns(x, f, &out->frame) + pass_ns(x, out->n * x->elem_bytes);
    if (s->keeps)
        out->work_ns += pass_ns(x, (size_t)out->frame.bytes);
}

static void cost_of_send(sim *x, sim_rank *r, sim_slice *out)
{
    const sp_step *s = out->step;
    bool is_kept = s->source == SP_SOURCE_KEPT_SUM || s->source == SP_SOURCE_KEPT_MESSAGE;
    bool is_sum = x->coll == SP_ALL_REDUCE || x->coll == SP_REDUCE_SCATTER;
    out->n_added = is_kept                                ? sim_kept_of(r, s->source_slot, out->k)->n_added
                   : s->source == SP_SOURCE_OUT && is_sum ? x->n_ranks
                                                          : 1;
    if (s->source == SP_SOURCE_KEPT_SUM)
        out->elem_bytes = x->acc_bytes;
    if (s->source == SP_SOURCE_KEPT_MESSAGE)
        out->frame = sim_kept_of(r, s->source_slot, out->k)->frame;
    else
        encode(x, r, out);
}

void sim_slice_cost(sim *x, sim_rank *r, const sp_step *s, uint32_t k, sim_slice *out)
{
    size_t off = (size_t)k * x->slice_elems;
    *out = (sim_slice){
        .step = s, .k = k, .n = sp_min_size(x->slice_elems, s->n_elems - off), .elem_bytes = x->elem_bytes};
    switch (s->kind) {
    case SP_STEP_SEND:
        cost_of_send(x, r, out);
        break;
    case SP_STEP_RECV:
        cost_of_receive(x, r, out);
        break;
    case SP_STEP_REDUCE:
        cost_of_reduce(x, r, out);
        break;
    case SP_STEP_COPY:
        out->work_ns = pass_ns(x, out->n * x->elem_bytes);
        break;
    }
}

double sim_send_ns(const sim *x, const sim_flow *f, const sim_slice *s)
{
    const spccl_simulate_options *o = x->o;
    return (f->remote ? o->remote_message_ns : o->local_message_ns) +
           s->frame.bytes * (f->remote ? o->send_ns : o->local_ns);
}
