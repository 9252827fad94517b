/* exec_measure.c - what a collective measures for the choice of later schedules: densities, rates, and each rank's time
 * of an earlier call (tuner.h). All of it is taken from messages that every rank sends or receives, so all ranks get the
 * same numbers. See choose.h. */
#include "core/run/exec_steps.h"

/* Bytes 32 to 39 of an envelope: listed elements below, the time's code above. */
#define LISTED_BITS (64 - SP_TIME_CODE_BITS)

static uint32_t rate_units(double ns_per_byte)
{
    double units = ns_per_byte * SP_CHOOSE_NS_UNIT + 0.5;
    return units < (double)UINT32_MAX ? (uint32_t)units : UINT32_MAX;
}

void sp_measure_write(uint8_t *envelope, sp_exec *x, const sp_slice *s)
{
    double remote_ns = x->remote_peer >= 0 ? sp_link_ns_per_byte(x->links, x->remote_peer) : 0;
    sp_store_le64(envelope + 32, s->n_contributed | (uint64_t)s->op->time_code << LISTED_BITS);
    sp_store_le32(envelope + 40, rate_units(x->local_ns));
    sp_store_le32(envelope + 44, rate_units(remote_ns));
}

void sp_measure_message(sp_exec *x, const sp_slice *s, const uint8_t *msg, size_t nnz)
{
    const sp_coll_args *a = &s->op->a;
    sp_measured *m = &x->active[s->op_idx]->measured;
    uint64_t first = sp_load_le64(msg + 32);
    uint32_t local_ns = sp_load_le32(msg + 40), remote_ns = sp_load_le32(msg + 44);
    uint32_t time_code = (uint32_t)(first >> LISTED_BITS);
    if (!sp_schedule_shows_density(a->schedule, a->coll))
        return;
    if (sp_schedule_sends_input_to_all(a->schedule, a->coll)) {
        m->listed += nnz;
        m->elems += s->n;
    } else {
        m->listed += first & ((UINT64_C(1) << LISTED_BITS) - 1);
        m->elems += s->n * (size_t)(x->links->world_size - 1);
        m->sum_listed += nnz;
        m->sum_elems += s->n;
    }
    m->time_code = time_code > m->time_code ? time_code : m->time_code;
    m->local_ns = local_ns > m->local_ns ? local_ns : m->local_ns;
    m->remote_ns = remote_ns > m->remote_ns ? remote_ns : m->remote_ns;
}

void sp_measure_sent(sp_exec *x, const sp_slice *s, const sp_encoded *e)
{
    const sp_coll_args *a = &s->op->a;
    /* A group of one rank sends nothing. */
    if (s->step->n_to != 0 && sp_schedule_sends_input_to_all(a->schedule, a->coll))
        sp_measure_message(x, s, e->message, e->nnz);
}

uint32_t sp_measure_told(const sp_exec *x, uint32_t carrier)
{
    return carrier > SP_TUNER_LAG ? x->time_codes[(carrier - 1 - SP_TUNER_LAG) % SP_TUNER_FLIGHTS] : 0;
}

void sp_measure_time(sp_exec *x, const sp_op *op, int64_t now_ns)
{
    int64_t began = x->ended_ns > op->submitted_ns ? x->ended_ns : op->submitted_ns;
    if (op->measured.carrier != 0)
        x->time_codes[(op->measured.carrier - 1) % SP_TUNER_FLIGHTS] = sp_time_code(now_ns - began);
    x->ended_ns = now_ns;
}
