/* exec_turns.c - which steps of an op may run next as far as its other steps go, and the slices that a rank keeps
 * between two steps. See exec_steps.h and sched.h. */
#include "core/run/exec_steps.h"

#include "core/base/dtype.h"

static bool has_slice(const sp_op *op, int step_idx, uint32_t k)
{
    return (size_t)k * op->a.slice_elems < op->plan->steps[step_idx].n_elems;
}

/* Number of density records to allocate: one for each slice of the longest step that has a threshold. */
static size_t n_density_records(const sp_op *op)
{
    size_t longest = 0;
    for (int i = 0; i < op->plan->n_steps; i++)
        if (op->plan->steps[i].hop != SP_HOP_PLAIN && op->plan->steps[i].n_elems > longest)
            longest = op->plan->steps[i].n_elems;
    return sp_ceil_div(longest, op->a.slice_elems);
}

/* Bytes of a kept buffer: a sum of one slice, or its largest message. COO has the largest frames. */
static size_t kept_bytes_of(const sp_op *op)
{
    size_t n = op->a.slice_elems;
    size_t message = SP_ENVELOPE_BYTES + sp_frame_bound_forced(SPCCL_FORMAT_COO, n, op->elem_bytes);
    return sp_align_up(sp_max_size(message, n * sp_dtype_bytes(sp_acc_dtype(op->a.dtype))), 64);
}

static bool plan_keeps(const sp_plan *plan)
{
    for (int i = 0; i < plan->n_steps; i++)
        if (plan->steps[i].keeps)
            return true;
    return false;
}

spccl_status sp_op_order_init(sp_op *op)
{
    const sp_plan *plan = op->plan;
    size_t n_densities = n_density_records(op);
    size_t n_kept = plan_keeps(plan) ? (size_t)plan->n_slots * (size_t)plan->block_slices : 0;
    size_t table_bytes;
    uint8_t *p;
    op->kept_bytes = kept_bytes_of(op);
    table_bytes = sp_align_up((size_t)plan->n_turns * sizeof(sp_turn) + n_kept * sizeof(sp_kept) +
                                  n_densities * sizeof(sp_densities),
                              64);
    if (table_bytes == 0)
        return SPCCL_OK;
    p = sp_alloc64(table_bytes + n_kept * op->kept_bytes);
    if (p == NULL)
        return SP_FAIL(SPCCL_ERR_NOMEM, "%s: %zu slices kept, %zu bytes each", sp_coll_name(op->a.coll),
                       n_kept, op->kept_bytes);
    memset(p, 0, table_bytes);
    op->order_memory = p;
    op->kept = n_kept != 0 ? (sp_kept *)(void *)p : NULL;
    op->turns = (sp_turn *)(void *)(p + n_kept * sizeof(sp_kept));
    op->densities = n_densities != 0 ? (sp_densities *)(void *)(op->turns + plan->n_turns) : NULL;
    for (size_t i = 0; i < n_kept; i++)
        op->kept[i] = (sp_kept){.data = p + table_bytes + i * op->kept_bytes};
    for (int i = 0; i < plan->n_turns; i++) {
        op->turns[i].step = -1;
        sp_turn_pass(plan, op->a.slice_elems, i, &op->turns[i]);
    }
    return SPCCL_OK;
}

sp_kept *sp_op_kept(const sp_op *op, int slot, uint32_t k)
{
    uint32_t block = (uint32_t)op->plan->block_slices;
    return &op->kept[(uint32_t)slot * block + k % block];
}

bool sp_step_is_due(const sp_op *op, int step_idx)
{
    const sp_step *s = &op->plan->steps[step_idx];
    uint32_t k = op->next_slice[step_idx];
    if (!sp_turn_is(op->plan, op->turns, step_idx, k))
        return false;
    if (s->after >= 0 && op->next_slice[s->after] <= k && has_slice(op, s->after, op->next_slice[s->after]))
        return false;
    return !s->keeps || sp_op_kept(op, s->keep_slot, k)->n_readers == 0;
}

void sp_op_slice_done(sp_op *op, int step_idx)
{
    const sp_step *s = &op->plan->steps[step_idx];
    uint32_t k = op->next_slice[step_idx];
    if (s->turn != SP_NO_TURN && (k % (uint32_t)op->plan->block_slices == 0 || !has_slice(op, step_idx, k)))
        sp_turn_pass(op->plan, op->a.slice_elems, s->turn, &op->turns[s->turn]);
}
