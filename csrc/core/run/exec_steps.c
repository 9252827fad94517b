/* exec_steps.c - see exec_steps.h. A slice is encoded in the memory of the queue, and a received frame is
 * decoded from there: each payload is written once and read once. */
#include "core/run/exec_steps.h"

#include "core/base/dtype.h"

#include <stdio.h>

#define SCHEDULE_SHIFT 4 /* in byte 7 of the envelope */
#define QUEUE_MASK 15u
#define ENVELOPE_MAGIC 0x56455053u /* "SPEV" */

static void envelope_write(uint8_t *e, sp_exec *x, const sp_slice *s)
{
    const sp_coll_args *a = &s->op->a;
    sp_store_le32(e, s->op->seq);
    e[4] = (uint8_t)a->coll;
    e[5] = (uint8_t)a->dtype;
    e[6] = (uint8_t)a->redop;
    e[7] = (uint8_t)((unsigned)s->step->queue_out | (unsigned)a->schedule << SCHEDULE_SHIFT);
    sp_store_le64(e + 8, a->n_elems);
    sp_store_le32(e + 16, s->k);
    sp_store_le32(e + 20, (uint32_t)a->slice_elems);
    sp_store_le16(e + 24, (uint16_t)s->step->part);
    sp_store_le16(e + 26, (uint16_t)a->root);
    sp_store_le32(e + 28, ENVELOPE_MAGIC);
    sp_measure_write(e, x, s);
}

static sp_call envelope_call(const uint8_t *e)
{
    return (sp_call){.seq = sp_load_le32(e),
                     .coll = (sp_coll)e[4],
                     .dtype = (spccl_dtype)e[5],
                     .redop = (spccl_redop)e[6],
                     .root = sp_load_le16(e + 26),
                     .schedule = (sp_schedule)(e[7] >> SCHEDULE_SHIFT),
                     .n_elems = sp_load_le64(e + 8)};
}

/* Is call number a earlier than b? The numbers wrap around, and both are of calls that are not far apart. */
static bool is_earlier(uint32_t a, uint32_t b)
{
    return (int32_t)(a - b) < 0;
}

static bool same_call(const sp_call *a, const sp_call *b)
{
    return a->seq == b->seq && a->coll == b->coll && a->dtype == b->dtype && a->redop == b->redop &&
           (uint16_t)a->root == (uint16_t)b->root && a->n_elems == b->n_elems && a->schedule == b->schedule;
}

/* Find this rank's call number `seq`. False if it is neither under way nor remembered. */
static bool own_call(const sp_exec *x, uint32_t seq, sp_call *out)
{
    for (int i = 0; i < x->n_ops; i++)
        if (x->active[i]->seq == seq) {
            *out = sp_op_call(x->active[i]);
            return true;
        }
    for (uint32_t i = 0; i < SP_EXEC_PAST && i < x->n_past; i++)
        if (x->past[i].seq == seq) {
            *out = x->past[i];
            return true;
        }
    return false;
}

static spccl_status surplus(const sp_exec *x, sp_coll coll, uint32_t seq, int peer)
{
    return SP_FAIL(
        SPCCL_ERR_MISMATCH,
        "rank %d: rank %d sent more messages of %s #%u than this rank takes: is SPCCL_SCHEDULE the same on "
        "all ranks?",
        x->links->rank, peer, sp_coll_name(coll), seq);
}

/* Check that the message belongs to this collective. If it does not, the ranks called different collectives.
 * This rank may have finished its call of the message's number: the root of a broadcast waits for nobody. If
 * that call differs from the message, the text names that call in place of the current one. */
static spccl_status same_collective(const sp_exec *x, const sp_op *op, int peer, const uint8_t *e)
{
    sp_call ours = sp_op_call(op), theirs = envelope_call(e), then;
    char here[160], there[160];
    if (same_call(&ours, &theirs))
        return SPCCL_OK;
    if (own_call(x, theirs.seq, &then)) {
        bool same = same_call(&then, &theirs);
        if (same && is_earlier(then.seq, ours.seq))
            return surplus(x, theirs.coll, theirs.seq, peer);
        ours = same ? ours : then;
    }
    sp_call_describe(&ours, here, sizeof here);
    sp_call_describe(&theirs, there, sizeof there);
    then = theirs;
    then.schedule = ours.schedule;
    if (same_call(&ours, &then)) /* only the schedule differs */
        return SP_FAIL(SPCCL_ERR_MISMATCH,
                       "ranks disagree on the schedule of %s: %s at rank %d, %s at rank %d: set the same "
                       "SPCCL_SCHEDULE on all ranks, or none",
                       here, sp_schedule_name(ours.schedule), x->links->rank,
                       sp_schedule_name(theirs.schedule), peer);
    return SP_FAIL(SPCCL_ERR_MISMATCH,
                   "ranks disagree: rank %d called %s, rank %d called %s: all ranks must call the same "
                   "collectives in the same order with the same sizes and dtypes",
                   x->links->rank, here, peer, there);
}

static spccl_status check_magic(const sp_exec *x, int peer, const uint8_t *e, size_t bytes)
{
    if (bytes >= SP_ENVELOPE_BYTES + SP_FRAME_HEADER_BYTES && sp_load_le32(e + 28) == ENVELOPE_MAGIC)
        return SPCCL_OK;
    return SP_FAIL(SPCCL_ERR_FORMAT, "rank %d: rank %d sent %zu bytes that are not an spccl message",
                   x->links->rank, peer, bytes);
}

/* Check that this is the message that the slice wants from `peer`. */
static spccl_status envelope_check(const sp_exec *x, const sp_slice *s, int peer, const uint8_t *e,
                                   size_t bytes)
{
    const sp_coll_args *a = &s->op->a;
    char here[160];
    SP_TRY(check_magic(x, peer, e, bytes));
    SP_TRY(same_collective(x, s->op, peer, e));
    if ((e[7] & QUEUE_MASK) == (unsigned)s->step->queue_in && sp_load_le32(e + 16) == s->k &&
        sp_load_le16(e + 24) == (uint16_t)s->step->part && sp_load_le32(e + 20) == (uint32_t)a->slice_elems)
        return SPCCL_OK;
    sp_op_describe(s->op, here, sizeof here);
    return SP_FAIL(
        SPCCL_ERR_MISMATCH,
        "rank %d: %s: rank %d sent slice %u of shard %u (%u elements a slice), wanted slice %u of "
        "shard %d (%zu): are SPCCL_SCHEDULE, SPCCL_FORMAT and SPCCL_DEBUG_SLICE_BYTES the same on all "
        "ranks?",
        x->links->rank, here, peer, sp_load_le32(e + 16), sp_load_le16(e + 24), sp_load_le32(e + 20), s->k,
        s->step->part, a->slice_elems);
}

/* The oldest message of a queue. False if there is none. */
static bool head_of(const sp_exec *x, int peer, int queue, const uint8_t **e, size_t *bytes)
{
    const void *p = NULL;
    if (x->links->peers[peer].ep == NULL || sp_link_peek(x->links, peer, queue, &p, bytes) != SPCCL_OK)
        return false;
    *e = p;
    return true;
}

/* Check the oldest message of one queue. If the peer called something else, it may have sent on a queue from
 * which no step of this rank reads. Without this check, this rank would wait until its time-out. */
static spccl_status check_head(const sp_exec *x, int peer, int queue)
{
    const uint8_t *e;
    size_t bytes;
    if (!head_of(x, peer, queue, &e, &bytes))
        return SPCCL_OK;
    SP_TRY(check_magic(x, peer, e, bytes));
    for (int i = 0; i < x->n_ops; i++)
        if (!is_earlier(x->active[i]->seq, sp_load_le32(e)))
            return same_collective(x, x->active[i], peer, e);
    return SPCCL_OK; /* the peer is ahead: the message is for a later call */
}

spccl_status sp_exec_check_surplus(sp_exec *x, const sp_op *op)
{
    const uint8_t *e;
    size_t bytes;
    for (int peer = 0; peer < x->links->world_size; peer++)
        for (int queue = 0; queue < SP_N_QUEUES; queue++) {
            if (!head_of(x, peer, queue, &e, &bytes))
                continue;
            SP_TRY(check_magic(x, peer, e, bytes));
            if (is_earlier(op->seq, sp_load_le32(e)))
                continue;
            SP_TRY(same_collective(x, op, peer, e));
            return surplus(x, op->a.coll, op->seq, peer);
        }
    return SPCCL_OK;
}

spccl_status sp_exec_check_heads(sp_exec *x)
{
    for (int peer = 0; peer < x->links->world_size && x->n_ops > 0; peer++)
        for (int queue = 0; queue < SP_N_QUEUES; queue++)
            SP_TRY(check_head(x, peer, queue));
    return SPCCL_OK;
}

/* Put the collective, shard and slice in front of the text of a failed transport or decoder call. */
static spccl_status in_context(const sp_exec *x, const sp_slice *s, int peer, spccl_status st)
{
    char what[160], cause[600], name[24];
    if (st == SPCCL_OK || st == SPCCL_AGAIN || st == SPCCL_ERR_MISMATCH)
        return st;
    sp_op_describe(s->op, what, sizeof what);
    snprintf(cause, sizeof cause, "%s", sp_without_rank(spccl_last_error(), x->links->rank));
    snprintf(name, sizeof name, "rank %d ", peer);
    if (strncmp(cause, name, strlen(name)) == 0) /* the text names the peer already */
        return SP_FAIL(st, "rank %d: %s, shard %d, slice %u: %s", x->links->rank, what, s->step->part, s->k,
                       cause);
    return SP_FAIL(st, "rank %d: %s, shard %d, slice %u: rank %d: %s", x->links->rank, what, s->step->part,
                   s->k, peer, cause);
}

static sp_slice slice_of(const sp_exec *x, int op_idx, int step_idx)
{
    const sp_op *op = x->active[op_idx];
    sp_slice s = {.op = op,
                  .step = &op->plan->steps[step_idx],
                  .op_idx = op_idx,
                  .step_idx = step_idx,
                  .k = op->next_slice[step_idx]};
    s.off = (size_t)s.k * op->a.slice_elems;
    s.n = sp_min_size(op->a.slice_elems, s.step->n_elems - s.off);
    if (s.step->keeps)
        s.kept = sp_op_kept(op, s.step->keep_slot, s.k);
    if (s.step->source == SP_SOURCE_KEPT_SUM || s.step->source == SP_SOURCE_KEPT_MESSAGE)
        s.read = sp_op_kept(op, s.step->source_slot, s.k);
    s.out_dtype = s.step->gives_sum || (s.step->kind == SP_STEP_SEND && s.step->source == SP_SOURCE_KEPT_SUM)
                      ? sp_acc_dtype(op->a.dtype)
                      : op->a.dtype;
    if (op->a.in != NULL)
        s.src = (const uint8_t *)op->a.in + (s.step->src_off + s.off) * op->elem_bytes;
    if (op->a.out != NULL)
        s.dst = (uint8_t *)op->a.out + (s.step->dst_off + s.off) * sp_dtype_bytes(sp_coll_out_dtype(&op->a));
    if (s.step->source == SP_SOURCE_OUT)
        s.src = s.dst;
    else if (s.read != NULL)
        s.src = s.read->data;
    return s;
}

int sp_slice_rank(const sp_slice *s, int i)
{
    return s->op->plan->ranks[i];
}

size_t sp_slice_bound(const sp_slice *s)
{
    spccl_format format = s->op->a.format;
    size_t elem_bytes = sp_dtype_bytes(s->out_dtype);
    return SP_ENVELOPE_BYTES + (format == SPCCL_FORMAT_AUTO
                                    ? sp_frame_bound(s->n, elem_bytes)
                                    : sp_frame_bound_forced(format, s->n, elem_bytes));
}

spccl_status sp_slice_space(sp_exec *x, const sp_slice *s, size_t bytes)
{
    for (int i = 0; i < s->step->n_to; i++) {
        int peer = sp_slice_rank(s, s->step->to + i);
        void *space;
        spccl_status st;
        if (!sp_op_owns_queue(x, s->op_idx, 0, s->step->queue_out, peer))
            return SPCCL_AGAIN;
        st = sp_link_reserve(x->links, peer, s->step->queue_out, bytes, &space);
        if (st != SPCCL_OK)
            return in_context(x, s, peer, st);
    }
    return SPCCL_OK;
}

/* True if the message is a part that another step of this plan receives: a relay sends several parts over one
 * queue, in any order. */
static bool is_for_other_step(const sp_slice *s, int peer, const uint8_t *e, size_t bytes)
{
    int part;
    if (bytes < SP_ENVELOPE_BYTES || sp_load_le32(e) != s->op->seq)
        return false;
    part = sp_load_le16(e + 24);
    return part != s->step->part && sp_plan_takes(s->op->plan, s->step->queue_in, peer, part);
}

spccl_status sp_slice_message(sp_exec *x, const sp_slice *s, int i, const uint8_t **msg, size_t *bytes)
{
    int peer = sp_slice_rank(s, s->step->from + i);
    const void *p = NULL;
    spccl_status st;
    if (!sp_op_owns_queue(x, s->op_idx, 1, s->step->queue_in, peer))
        return SPCCL_AGAIN;
    st = sp_link_peek(x->links, peer, s->step->queue_in, &p, bytes);
    if (st != SPCCL_OK)
        return in_context(x, s, peer, st);
    *msg = p;
    return is_for_other_step(s, peer, p, *bytes) ? SPCCL_AGAIN : SPCCL_OK;
}

/* Sums have the accumulator's dtype. The first message of a ring, and of a host with one rank, is a contribution. */
static bool is_wanted_dtype(const sp_slice *s, spccl_dtype dtype)
{
    spccl_dtype own = s->op->a.dtype;
    return dtype == own || (s->step->adds_sums && dtype == sp_acc_dtype(own));
}

spccl_status sp_slice_open(const sp_exec *x, const sp_slice *s, int peer, const uint8_t *msg, size_t bytes,
                           sp_frame *frame)
{
    SP_TRY(envelope_check(x, s, peer, msg, bytes));
    SP_TRY(
        in_context(x, s, peer, sp_frame_validate(msg + SP_ENVELOPE_BYTES, bytes - SP_ENVELOPE_BYTES, frame)));
    if (!is_wanted_dtype(s, frame->dtype) || frame->n_elems != s->n || frame->is_delta)
        return in_context(x, s, peer,
                          SP_FAIL(SPCCL_ERR_FRAME, "its frame holds %zu %s%s, wanted %zu %s", frame->n_elems,
                                  sp_dtype_name(frame->dtype), frame->is_delta ? " as a delta" : "", s->n,
                                  sp_dtype_name(s->op->a.dtype)));
    return SPCCL_OK;
}

spccl_status sp_slice_release(sp_exec *x, const sp_slice *s, int i, size_t bytes)
{
    int peer = sp_slice_rank(s, s->step->from + i);
    x->active[s->op_idx]->left[1][s->step->queue_in * x->links->world_size + peer]--;
    atomic_fetch_add_explicit(&x->stats.wire_bytes_received, bytes, memory_order_relaxed);
    return in_context(x, s, peer, sp_link_release(x->links, peer, s->step->queue_in));
}

/* Send the reserved message, and count it. The counts also say when the next op may use the queue. */
static spccl_status commit_to(sp_exec *x, const sp_slice *s, int peer, size_t bytes, spccl_format format)
{
    int idx = s->step->queue_out * x->links->world_size + peer;
    x->active[s->op_idx]->left[0][idx]--;
    x->active[s->op_idx]->sent_end[idx] = ++x->n_sent[idx];
    atomic_fetch_add_explicit(&x->stats.wire_bytes_sent, bytes, memory_order_relaxed);
    atomic_fetch_add_explicit(&x->stats.dense_bytes_sent, s->n * sp_dtype_bytes(s->out_dtype),
                              memory_order_relaxed);
    atomic_fetch_add_explicit(&x->stats.n_frames_sent[format], 1, memory_order_relaxed);
    return in_context(x, s, peer, sp_link_commit(x->links, peer, s->step->queue_out, s->op->seq));
}

/* Reserve space for a message in the queue to the i-th receiver. */
static spccl_status reserve_message(sp_exec *x, const sp_slice *s, int i, size_t bytes, uint8_t **out)
{
    int peer = sp_slice_rank(s, s->step->to + i);
    void *space = NULL;
    SP_TRY(in_context(x, s, peer, sp_link_reserve(x->links, peer, s->step->queue_out, bytes, &space)));
    *out = space;
    return SPCCL_OK;
}

spccl_status sp_slice_encode(sp_exec *x, const sp_slice *s, const void *data, sp_encoded *out)
{
    size_t nnz = 0;
    SP_TRY(sp_slice_choose_format(x, s, data, &out->format, &nnz));
    sp_frame_layout_of(out->format, s->n, nnz, sp_dtype_bytes(s->out_dtype), &out->layout);
    out->nnz = out->format == SPCCL_FORMAT_DENSE ? s->n : nnz; /* values in the frame */
    out->bytes = SP_ENVELOPE_BYTES + out->layout.frame_bytes;
    if (s->step->n_to == 0)
        return SPCCL_OK;
    SP_TRY(reserve_message(x, s, 0, out->bytes, &out->message));
    envelope_write(out->message, x, s);
    sp_codec_write(x->codec, data, s->n, s->out_dtype, out->format, false, nnz,
                   out->message + SP_ENVELOPE_BYTES);
    return SPCCL_OK;
}

spccl_status sp_slice_commit(sp_exec *x, const sp_slice *s, const sp_encoded *e)
{
    for (int i = 1; i < s->step->n_to; i++) {
        uint8_t *copy = NULL;
        SP_TRY(reserve_message(x, s, i, e->bytes, &copy));
        memcpy(copy, e->message, e->bytes);
    }
    for (int i = 0; i < s->step->n_to; i++)
        SP_TRY(commit_to(x, s, sp_slice_rank(s, s->step->to + i), e->bytes, e->format));
    return SPCCL_OK;
}

/* Send a message to every receiver, unchanged but for the queue, which byte 7 of the envelope has. The caller has
 * checked for space. */
static spccl_status pass_on(sp_exec *x, const sp_slice *s, const uint8_t *msg, size_t bytes,
                            spccl_format format)
{
    for (int i = 0; i < s->step->n_to; i++) {
        uint8_t *space = NULL;
        SP_TRY(reserve_message(x, s, i, bytes, &space));
        memcpy(space, msg, bytes);
        space[7] = (uint8_t)((msg[7] & ~QUEUE_MASK) | (unsigned)s->step->queue_out);
        SP_TRY(commit_to(x, s, sp_slice_rank(s, s->step->to + i), bytes, format));
    }
    return SPCCL_OK;
}

static spccl_status run_send(sp_exec *x, const sp_slice *s)
{
    sp_encoded e = {0};
    bool is_message = s->step->source == SP_SOURCE_KEPT_MESSAGE;
    SP_TRY(sp_slice_space(x, s, is_message ? s->read->bytes : sp_slice_bound(s)));
    if (is_message) {
        SP_TRY(pass_on(x, s, s->read->data, s->read->bytes, s->read->format));
    } else {
        SP_TRY(sp_slice_encode(x, s, s->src, &e));
        sp_measure_sent(x, s, &e);
        SP_TRY(sp_slice_commit(x, s, &e));
    }
    if (s->read != NULL)
        s->read->n_readers--;
    return SPCCL_OK;
}

static spccl_status keep_message(const sp_exec *x, const sp_slice *s, const uint8_t *msg, size_t bytes,
                                 spccl_format format)
{
    int peer = sp_slice_rank(s, s->step->from);
    if (bytes > s->op->kept_bytes)
        return in_context(x, s, peer,
                          SP_FAIL(SPCCL_ERR_FRAME, "its message has %zu bytes, wanted at most %zu", bytes,
                                  s->op->kept_bytes));
    memcpy(s->kept->data, msg, bytes);
    s->kept->n_readers = s->step->n_readers;
    s->kept->bytes = bytes;
    s->kept->format = format;
    return SPCCL_OK;
}

static spccl_status run_recv(sp_exec *x, const sp_slice *s)
{
    const uint8_t *msg = NULL;
    size_t bytes = 0;
    sp_frame frame;
    SP_TRY(sp_slice_message(x, s, 0, &msg, &bytes));
    SP_TRY(sp_slice_space(x, s, bytes));
    SP_TRY(sp_slice_open(x, s, sp_slice_rank(s, s->step->from), msg, bytes, &frame));
    SP_TRY(pass_on(x, s, msg, bytes, frame.format));
    if (s->step->keeps)
        SP_TRY(keep_message(x, s, msg, bytes, frame.format));
    SP_TRY(sp_codec_apply(x->kernels, &frame, SPCCL_SET, s->dst, s->op->a.dtype, s->op->non_temporal));
    sp_measure_message(x, s, msg, frame.nnz);
    return sp_slice_release(x, s, 0, bytes);
}

spccl_status sp_step_run(sp_exec *x, int op_idx, int step_idx)
{
    sp_slice s = slice_of(x, op_idx, step_idx);
    switch (s.step->kind) {
    case SP_STEP_SEND:
        return run_send(x, &s);
    case SP_STEP_RECV:
        return run_recv(x, &s);
    case SP_STEP_REDUCE:
        return sp_reduce_run(x, &s);
    case SP_STEP_COPY:
        if (s.dst != s.src)
            x->kernels->copy(s.dst, s.src, s.n * s.op->elem_bytes, s.op->non_temporal);
        return SPCCL_OK;
    }
    return SP_FAIL(SPCCL_ERR_BUG, "step %d of plan %s has kind %d", step_idx, s.op->plan->name,
                   (int)s.step->kind);
}

void sp_step_describe_wait(sp_exec *x, int op_idx, int step_idx, char *text, size_t cap)
{
    sp_slice s = slice_of(x, op_idx, step_idx);
    size_t n_slices = sp_ceil_div(s.step->n_elems, s.op->a.slice_elems);
    char ranks[120] = "";
    bool receiving = false;
    for (int i = 0; i < s.step->n_from; i++) {
        const uint8_t *msg;
        size_t bytes, used = strlen(ranks);
        if (sp_slice_message(x, &s, i, &msg, &bytes) == SPCCL_OK)
            continue;
        receiving = true;
        snprintf(ranks + used, sizeof ranks - used, "%s%d", used != 0 ? ", " : "",
                 sp_slice_rank(&s, s.step->from + i));
    }
    if (receiving) {
        snprintf(text, cap, "waiting for rank %s to send slice %u of %zu of shard %d (%zu elements)", ranks,
                 s.k, n_slices, s.step->part, s.step->n_elems);
        return;
    }
    for (int i = 0; i < s.step->n_to; i++) {
        int peer = sp_slice_rank(&s, s.step->to + i);
        void *space;
        size_t used = strlen(ranks);
        if (sp_link_reserve(x->links, peer, s.step->queue_out, sp_slice_bound(&s), &space) != SPCCL_OK)
            snprintf(ranks + used, sizeof ranks - used, "%s%d", used != 0 ? ", " : "", peer);
    }
    snprintf(text, cap, "waiting for rank %s to take slice %u of %zu of shard %d (%zu elements)",
             ranks[0] != '\0' ? ranks : "(none)", s.k, n_slices, s.step->part, s.step->n_elems);
}
