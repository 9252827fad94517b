/* gpu_delta.c - the public functions that receive deltas in GPU memory: a plan, check, apply, undo, checksum. The host's
 * are in delta_apply.c. */
#include "core/base/mem.h"
#include "core/contract/delta_gpu.h"
#include "core/format/delta.h"
#include "core/gpu/gpu_comm.h"

#include <stdio.h>

typedef unsigned long long ull;

struct spccl_cuda_delta_plan {
    int device;
    void *memory; /* of the GPU */
    sp_gpu_delta_args args;
    size_t old_bytes;
    bool is_checked; /* by spccl_cuda_delta_check, since the frames were opened */
};

static spccl_status need_cuda(const char *call)
{
    if (sp_gpu_ops_here() == NULL)
        return SP_FAIL(SPCCL_ERR_UNSUPPORTED, "%s: this build of spccl has no CUDA (`spccl info` says why)",
                       call);
    return SPCCL_OK;
}

/* ---- the memory of a plan ---- */

/* Where its parts begin, and its size. */
struct layout {
    size_t sums, rows, places, slices, bytes;
    uint64_t n_places, n_slices;
};

static bool add_part(size_t *at, size_t *end, size_t n, size_t bytes)
{
    size_t all;
    *at = *end;
    return sp_mul_size(n, bytes, &all) && sp_add_size(*end, all, end);
}

static spccl_status lay_out(const char *call, const spccl_delta_target *targets, size_t n, struct layout *l)
{
    *l = (struct layout){.bytes = sizeof(sp_gpu_delta_head)};
    for (size_t i = 0; i < n; i++) {
        l->n_places += targets[i].n_places;
        l->n_slices += sp_delta_n_slices(targets[i].n_elems);
    }
    if (!add_part(&l->sums, &l->bytes, n, sizeof(uint64_t)) ||
        !add_part(&l->rows, &l->bytes, n, sizeof(sp_gpu_delta_row)) ||
        !add_part(&l->places, &l->bytes, l->n_places, sizeof(spccl_delta_place)) ||
        !add_part(&l->slices, &l->bytes, l->n_slices, sizeof(sp_gpu_delta_slice)))
        return SP_FAIL(SPCCL_ERR_NOMEM, "%s: %zu targets in a plan", call, n);
    return SPCCL_OK;
}

static void fill(uint8_t *memory, const struct layout *l, const spccl_delta_target *targets, size_t n)
{
    sp_gpu_delta_row *rows = (sp_gpu_delta_row *)(void *)(memory + l->rows);
    spccl_delta_place *places = (spccl_delta_place *)(void *)(memory + l->places);
    uint64_t n_places = 0, n_slices = 0;
    for (size_t i = 0; i < n; i++) {
        const spccl_delta_target *t = &targets[i];
        rows[i] = (sp_gpu_delta_row){.frame = t->frame,
                                     .frame_bytes = t->frame_bytes,
                                     .n_elems = t->n_elems,
                                     .first = t->first,
                                     .key = t->key,
                                     .first_slice = n_slices,
                                     .first_place = n_places,
                                     .n_places = t->n_places,
                                     .dtype = (uint32_t)t->dtype,
                                     .elem_bytes = (uint32_t)sp_dtype_bytes(t->dtype)};
        if (t->n_places != 0)
            memcpy(places + n_places, t->places, t->n_places * sizeof *places);
        n_places += t->n_places;
        n_slices += sp_delta_n_slices(t->n_elems);
    }
}

static spccl_status upload(const char *call, const spccl_delta_target *targets, size_t n,
                           spccl_cuda_delta_plan *plan)
{
    struct layout l;
    uint8_t *memory, *p;
    spccl_status st;
    SP_TRY(lay_out(call, targets, n, &l));
    memory = sp_calloc(1, l.slices); /* `open` writes the slices */
    if (memory == NULL)
        return SP_FAIL(SPCCL_ERR_NOMEM, "%s: %zu bytes of host memory", call, l.slices);
    fill(memory, &l, targets, n);
    st = sp_gpu_ops_here()->upload(plan->device, memory, l.slices, l.bytes, &plan->memory);
    sp_free(memory);
    SP_TRY(st);
    p = plan->memory;
    plan->args = (sp_gpu_delta_args){.head = plan->memory,
                                     .sums = (uint64_t *)(void *)(p + l.sums),
                                     .rows = (sp_gpu_delta_row *)(void *)(p + l.rows),
                                     .places = (spccl_delta_place *)(void *)(p + l.places),
                                     .slices = (sp_gpu_delta_slice *)(void *)(p + l.slices),
                                     .n_slices = l.n_slices,
                                     .n_targets = (uint32_t)n};
    for (size_t i = 0; i < n; i++)
        plan->args.widths |= (uint32_t)sp_dtype_bytes(targets[i].dtype); /* bit i: 2^i bytes */
    return SPCCL_OK;
}

/* ---- what the kernels found ---- */

static const char *const rule_texts[] = {
    [1] = "the header is cut off",
    [2] = "the magic is not 53 50 43 46 (\"SPCF\")",
    [3] = "the version is not 2",
    [4] = "format is not 5",
    [5] = "dtype is unknown",
    [6] = "flags is not 1",
    [7] = "n_elems is above 2^40",
    [8] = "nnz is above n_elems",
    [9] = "frame_bytes is not a multiple of 8, is above 2^34 or less than header and table",
    [10] = "it is cut off",
    [11] = "a count is above the elements of the slice",
    [12] = "a code that the dtype does not have",
    [13] = "another bit of an entry is set",
    [14] = "the counts do not sum to nnz",
    [15] = "a slice does not start or end where the table says",
    [16] = "a padding byte after the last slice is not zero",
    [17] = "high does not have as many bits as the count",
    [18] = "a place is not greater than the one before it",
    [19] = "a place is not below the elements of the slice",
    [20] = "a padding bit of a section is set",
    [SP_DELTA_RULE_OTHER_BYTES] = "it is shorter than frame_bytes of the target",
    [SP_DELTA_RULE_OTHER_ARRAY] = "it has another dtype or number of elements than the target",
    [SP_DELTA_RULE_PLACES] = "an element has other bits in one place than in another: the receiver is not in "
                             "step with itself"};

static spccl_status fault_status(const char *call, uint64_t fault)
{
    const uint64_t n = UINT64_MAX - fault;
    const uint32_t rule = (uint32_t)(n & 0xff), target = (uint32_t)(n >> 32);
    const uint32_t slice = (uint32_t)(n >> 8 & SP_DELTA_NO_SLICE);
    char where[32] = "";
    spccl_status st;
    if (fault == 0)
        return SPCCL_OK;
    if (rule == 0 || rule >= sizeof rule_texts / sizeof *rule_texts || rule_texts[rule] == NULL)
        return SP_FAIL(SPCCL_ERR_BUG, "%s: fault %llx", call, (ull)fault);
    st = rule >= SP_DELTA_RULE_OTHER_BYTES ? SPCCL_ERR_FRAME
         : rule == 3                       ? SPCCL_ERR_VERSION
                                           : SPCCL_ERR_FORMAT;
    if (slice != SP_DELTA_NO_SLICE)
        snprintf(where, sizeof where, "slice %u: ", slice);
    if (st == SPCCL_ERR_FRAME)
        return SP_FAIL(st, "%s: targets[%u]: %s%s", call, target, where, rule_texts[rule]);
    return SP_FAIL(st, "%s: targets[%u]: delta: %s%s (rule %u of docs/FORMAT.md 11.3)", call, target, where,
                   rule_texts[rule], rule);
}

static spccl_status refuse_capture(const char *call, void *stream)
{
    unsigned long long id = 0;
    SP_TRY(sp_gpu_ops_here()->capture_id(stream, &id));
    if (id != 0)
        return SP_FAIL(SPCCL_ERR_ARG, "%s: the stream is being captured, and the call waits for it", call);
    return SPCCL_OK;
}

/* ---- plans ---- */

/* Arguments; and that the frame may hold a table for so many elements, so that these bound the plan's memory. */
static spccl_status check_target(const char *call, int device, size_t number, const spccl_delta_target *t)
{
    const size_t e = sp_dtype_bytes(t->dtype);
    char what[64];
    SP_TRY(sp_delta_check_target(call, number, t));
    if (t->n_elems > SP_DELTA_ELEMS_MAX ||
        t->frame_bytes < SP_DELTA_HEADER_BYTES + SP_DELTA_ENTRY_BYTES * sp_delta_n_slices(t->n_elems))
        return SP_FAIL(SPCCL_ERR_FORMAT,
                       "%s: targets[%zu]: delta: %zu bytes, wanted header and table of %llu elements", call,
                       number, t->frame_bytes, (ull)t->n_elems);
    snprintf(what, sizeof what, "targets[%zu].frame", number);
    SP_TRY(sp_gpu_check_memory(call, what, t->frame, SP_DELTA_ALIGN, device, "wanted memory of"));
    for (size_t p = 0; p < t->n_places; p++) {
        if (t->places[p].n_rows == 0 || t->places[p].n_cols == 0)
            continue;
        snprintf(what, sizeof what, "targets[%zu]: places[%zu].dst", number, p);
        SP_TRY(sp_gpu_check_memory(call, what, t->places[p].dst, e, device, "wanted memory of"));
    }
    return SPCCL_OK;
}

/* The plan's GPU is current. */
static spccl_status open_frames(const char *call, spccl_cuda_delta_plan *plan, void *stream)
{
    const sp_gpu_ops *ops = sp_gpu_ops_here();
    sp_gpu_delta_head head;
    if (plan->args.n_targets == 0)
        return SPCCL_OK;
    SP_TRY(ops->delta_open(&plan->args, stream));
    SP_TRY(sp_gpu_wait_stream(call, plan->device, stream));
    SP_TRY(ops->read(&head, plan->args.head, sizeof head));
    plan->old_bytes = head.old_bytes;
    return fault_status(call, head.fault);
}

spccl_status spccl_cuda_delta_plan_create(const spccl_delta_target *targets, size_t n_targets, void *stream,
                                          spccl_cuda_delta_plan **out, size_t *out_old_bytes)
{
    const char *call = "cuda_delta_plan_create";
    spccl_cuda_delta_plan *plan;
    spccl_status st;
    int device;
    if (out == NULL || (targets == NULL && n_targets != 0) || n_targets > UINT32_MAX)
        return SP_FAIL(SPCCL_ERR_ARG, "%s: %s", call,
                       out == NULL       ? "out is NULL"
                       : targets == NULL ? "targets is NULL"
                                         : "wanted at most 2^32 - 1 targets");
    SP_TRY(need_cuda(call));
    SP_TRY(sp_gpu_ops_here()->current_device(&device));
    SP_TRY(refuse_capture(call, stream));
    for (size_t i = 0; i < n_targets; i++)
        SP_TRY(check_target(call, device, i, &targets[i]));
    plan = sp_calloc(1, sizeof *plan);
    if (plan == NULL)
        return SP_FAIL(SPCCL_ERR_NOMEM, "%s", call);
    plan->device = device;
    st = upload(call, targets, n_targets, plan);
    if (st == SPCCL_OK)
        st = open_frames(call, plan, stream);
    if (st != SPCCL_OK) {
        if (st ==
            SPCCL_ERR_TIMEOUT) /* the kernels may still come to use it, and freeing it would wait for them */
            plan->memory = NULL;
        spccl_cuda_delta_plan_destroy(plan);
        return st;
    }
    *out = plan;
    if (out_old_bytes != NULL)
        *out_old_bytes = plan->old_bytes;
    return SPCCL_OK;
}

void spccl_cuda_delta_plan_destroy(spccl_cuda_delta_plan *plan)
{
    if (plan == NULL)
        return;
    if (plan->memory != NULL)
        sp_gpu_ops_here()->unload(plan->device, plan->memory);
    sp_free(plan);
}

/* ---- check, apply, undo ---- */

static spccl_status run(spccl_cuda_delta_plan *plan, int what, const void *old, void *stream)
{
    const sp_gpu_ops *ops = sp_gpu_ops_here();
    sp_gpu_delta_args a = plan->args;
    spccl_status st;
    int before;
    a.old = (uint8_t *)(uintptr_t)old; /* undo only reads it */
    if (a.n_targets == 0)
        return SPCCL_OK;
    SP_TRY(ops->enter(plan->device, &before));
    st = ops->delta_run(&a, what, stream);
    ops->leave(before);
    return st;
}

/* Wait, and read what the kernels found. */
static spccl_status read_check(const char *call, spccl_cuda_delta_plan *plan, uint64_t *sum_changes,
                               void *stream)
{
    const sp_gpu_ops *ops = sp_gpu_ops_here();
    const uint32_t n = plan->args.n_targets;
    sp_gpu_delta_head head;
    spccl_status st;
    int before;
    if (n == 0)
        return SPCCL_OK;
    SP_TRY(ops->enter(plan->device, &before));
    st = sp_gpu_wait_stream(call, plan->device, stream);
    if (st == SPCCL_OK)
        st = ops->read(&head, plan->args.head, sizeof head);
    if (st == SPCCL_OK && sum_changes != NULL)
        st = ops->read(sum_changes, plan->args.sums, n * sizeof *sum_changes);
    ops->leave(before);
    return st != SPCCL_OK ? st : fault_status(call, head.fault);
}

spccl_status spccl_cuda_delta_check(spccl_cuda_delta_plan *plan, void *old, size_t old_cap,
                                    uint64_t *sum_changes, void *stream)
{
    const char *call = "cuda_delta_check";
    if (plan == NULL)
        return SP_FAIL(SPCCL_ERR_ARG, "%s: plan is NULL", call);
    if (old != NULL && old_cap < plan->old_bytes)
        return SP_FAIL(SPCCL_ERR_DST_SMALL, "%s: old_cap %zu, wanted %zu", call, old_cap, plan->old_bytes);
    if (old != NULL && plan->old_bytes != 0)
        SP_TRY(sp_gpu_check_memory(call, "old", old, SP_DELTA_ALIGN, plan->device, "the plan is for"));
    SP_TRY(refuse_capture(call, stream));
    plan->is_checked = false;
    SP_TRY(run(plan, SP_DELTA_LOOK, old, stream));
    SP_TRY(read_check(call, plan, sum_changes, stream));
    plan->is_checked = true;
    return SPCCL_OK;
}

static spccl_status need_check(const char *call, const spccl_cuda_delta_plan *plan)
{
    if (plan == NULL)
        return SP_FAIL(SPCCL_ERR_ARG, "%s: plan is NULL", call);
    if (!plan->is_checked)
        return SP_FAIL(SPCCL_ERR_STATE, "%s: spccl_cuda_delta_check has not accepted the frames", call);
    return SPCCL_OK;
}

spccl_status spccl_cuda_delta_apply(spccl_cuda_delta_plan *plan, void *stream)
{
    SP_TRY(need_check("cuda_delta_apply", plan));
    return run(plan, SP_DELTA_APPLY, NULL, stream);
}

spccl_status spccl_cuda_delta_undo(spccl_cuda_delta_plan *plan, const void *old, size_t old_bytes,
                                   void *stream)
{
    const char *call = "cuda_delta_undo";
    SP_TRY(need_check(call, plan));
    if (old_bytes != plan->old_bytes || (old == NULL && old_bytes != 0))
        return SP_FAIL(SPCCL_ERR_ARG, "%s: old_bytes %zu%s, wanted the %zu of spccl_cuda_delta_plan_create",
                       call, old_bytes, old == NULL ? " at NULL" : "", plan->old_bytes);
    if (old_bytes == 0)
        return SPCCL_OK;
    SP_TRY(sp_gpu_check_memory(call, "old", old, SP_DELTA_ALIGN, plan->device, "the plan is for"));
    return run(plan, SP_DELTA_UNDO, old, stream);
}

/* ---- checksum ---- */

spccl_status spccl_cuda_delta_checksum(const void *x, uint64_t n_elems, spccl_dtype dtype, uint64_t first,
                                       uint64_t key, uint64_t *out, void *stream)
{
    const char *call = "cuda_delta_checksum";
    const sp_gpu_delta_sum_args a = {.x = x,
                                     .n_elems = n_elems,
                                     .first = first,
                                     .key = key,
                                     .elem_bytes = (uint32_t)sp_dtype_bytes(dtype),
                                     .out = out};
    size_t bytes;
    int device;
    if (!sp_dtype_ok(dtype))
        return SP_FAIL(SPCCL_ERR_DTYPE, "%s: dtype %d, wanted 1..%d", call, (int)dtype, SP_N_DTYPES - 1);
    SP_TRY(need_cuda(call));
    if (!sp_mul_size(n_elems, a.elem_bytes, &bytes) || bytes > PTRDIFF_MAX)
        return SP_FAIL(SPCCL_ERR_ARG, "%s: %llu elements, wanted at most PTRDIFF_MAX bytes", call,
                       (ull)n_elems);
    SP_TRY(sp_gpu_ops_here()->current_device(&device));
    SP_TRY(sp_gpu_check_memory(call, "out", out, sizeof *out, device, "wanted memory of"));
    if (n_elems != 0)
        SP_TRY(sp_gpu_check_memory(call, "x", x, a.elem_bytes, device, "wanted memory of"));
    return sp_gpu_ops_here()->delta_sum(&a, stream);
}
