/* prune_plan.c - prune plans, for host and GPU: checks the segments, copies them to the GPU of a plan that has one.
 * And spccl_cuda_prune. spccl_prune, on the host, is in prune.c. */
#include "core/gpu/gpu_comm.h"
#include "core/prune/pruned_sum.h"

#include "core/base/dtype.h"

#include <stdlib.h>

static int by_begin(const void *a, const void *b)
{
    const spccl_prune_segment *x = a, *y = b;
    return x->begin < y->begin ? -1 : x->begin > y->begin ? 1 : 0;
}

static size_t state_bytes(spccl_dtype dtype)
{
    return dtype == SPCCL_FLOAT64 ? 8 : 4;
}

/* Errors unless the segments, which are sorted, lie in the gradient and do not overlap. */
static spccl_status check_ranges(const spccl_prune_plan *p)
{
    size_t end = 0;
    for (size_t i = 0; i < p->n_segments; i++) {
        const spccl_prune_segment *s = &p->segments[i];
        if (s->n_elems == 0)
            return SP_FAIL(SPCCL_ERR_ARG, "spccl_prune_plan_create: the segment at element %zu is empty",
                           s->begin);
        if (s->begin > p->n_elems || s->n_elems > p->n_elems - s->begin)
            return SP_FAIL(
                SPCCL_ERR_ARG,
                "spccl_prune_plan_create: a segment of %zu elements at element %zu leaves the gradient, "
                "which has %zu",
                s->n_elems, s->begin, p->n_elems);
        if (s->begin < end)
            return SP_FAIL(
                SPCCL_ERR_ARG,
                "spccl_prune_plan_create: the segments before and at element %zu overlap by %zu elements",
                s->begin, end - s->begin);
        end = s->begin + s->n_elems;
    }
    return SPCCL_OK;
}

/* Errors unless p is memory of GPU `device`. `what` names it, `at` is the segment's first element. */
static spccl_status check_memory(const char *what, size_t at, const void *p, int device)
{
    int ordinal = -1;
    SP_TRY(sp_gpu_ops_here()->device_of(p, &ordinal));
    if (ordinal < 0)
        return SP_FAIL(
            SPCCL_ERR_ARG,
            "spccl_prune_plan_create: %s of the segment at element %zu (%p) is host memory, wanted "
            "memory of GPU %d",
            what, at, p, device);
    if (ordinal != device)
        return SP_FAIL(SPCCL_ERR_ARG,
                       "spccl_prune_plan_create: %s of the segment at element %zu (%p) is memory of GPU %d, "
                       "wanted GPU %d",
                       what, at, p, ordinal, device);
    return SPCCL_OK;
}

/* One pointer of a segment. On the host CUDA is not asked: that would start it on the first GPU. */
static spccl_status check_pointer(const spccl_prune_plan *p, size_t at, const char *what, const void *pointer,
                                  size_t align)
{
    if (pointer == NULL)
        return SPCCL_OK;
    if ((uintptr_t)pointer % align != 0)
        return SP_FAIL(SPCCL_ERR_ARG,
                       "spccl_prune_plan_create: %s of the segment at element %zu is %p, wanted an address "
                       "aligned to %zu bytes",
                       what, at, pointer, align);
    return p->device < 0 ? SPCCL_OK : check_memory(what, at, pointer, p->device);
}

static spccl_status check_pointers(const spccl_prune_plan *p)
{
    size_t align = p->device >= 0 ? 16 : state_bytes(p->dtype);
    for (size_t i = 0; i < p->n_segments; i++) {
        const spccl_prune_segment *s = &p->segments[i];
        if (s->state == NULL)
            return SP_FAIL(SPCCL_ERR_ARG, "spccl_prune_plan_create: the segment at element %zu has no state",
                           s->begin);
        SP_TRY(check_pointer(p, s->begin, "state", s->state, 8));
        SP_TRY(check_pointer(p, s->begin, "residual", s->residual, align));
        SP_TRY(check_pointer(p, s->begin, "velocity", s->velocity, align));
    }
    return SPCCL_OK;
}

/* Make the table and the rows that the kernels read, in GPU memory. */
static spccl_status upload(spccl_prune_plan *p)
{
    size_t bytes = sizeof(sp_gpu_prune_table) + p->n_segments * sizeof(sp_gpu_prune_row);
    sp_gpu_prune_table *table = sp_calloc(1, bytes);
    sp_gpu_prune_row *rows = (sp_gpu_prune_row *)(table + 1);
    spccl_status st;
    if (table == NULL)
        return SP_FAIL(SPCCL_ERR_NOMEM, "spccl_prune_plan_create: %zu bytes", bytes);
    for (size_t i = 0; i < p->n_segments; i++) {
        rows[i].segment = p->segments[i];
        rows[i].first_tile = p->n_tiles;
        p->most_elems = sp_max_size(p->most_elems, p->segments[i].n_elems);
        p->n_tiles += sp_ceil_div(p->segments[i].n_elems, SP_GPU_PRUNE_TILE(state_bytes(p->dtype)));
        rows[i].end_tile = p->n_tiles;
        p->n_covered += p->segments[i].n_elems;
        p->n_whole += p->segments[i].whole != 0 ? p->segments[i].n_elems : 0;
    }
    st = sp_gpu_ops_here()->upload(p->device, table, bytes, &p->table);
    sp_free(table);
    return st;
}

static spccl_status fill(spccl_prune_plan *p, const spccl_prune_segment *segments)
{
    p->segments = sp_calloc(p->n_segments, sizeof *p->segments);
    if (p->segments == NULL)
        return SP_FAIL(SPCCL_ERR_NOMEM, "spccl_prune_plan_create: %zu segments", p->n_segments);
    memcpy(p->segments, segments, p->n_segments * sizeof *segments);
    qsort(p->segments, p->n_segments, sizeof *p->segments, by_begin);
    SP_TRY(check_ranges(p));
    SP_TRY(check_pointers(p));
    if (p->device >= 0)
        return upload(p);
    p->magnitudes = sp_calloc(SP_PRUNE_BLOCK_ELEMS, sizeof *p->magnitudes);
    if (p->magnitudes == NULL)
        return SP_FAIL(SPCCL_ERR_NOMEM, "spccl_prune_plan_create: scratch of %u elements",
                       SP_PRUNE_BLOCK_ELEMS);
    return sp_kernels_pick(&p->kernels);
}

spccl_status spccl_prune_plan_create(const spccl_prune_segment *segments, size_t n_segments, size_t n_elems,
                                     spccl_dtype dtype, int device, spccl_prune_plan **out)
{
    const char *call = "spccl_prune_plan_create";
    spccl_prune_plan *p;
    spccl_status st;
    if (out == NULL || segments == NULL || n_segments == 0 || n_segments > UINT32_MAX)
        return SP_FAIL(SPCCL_ERR_ARG, "%s: %s", call,
                       out == NULL        ? "out is NULL"
                       : segments == NULL ? "segments is NULL"
                                          : "wanted 1 to 2^32 - 1 segments");
    if (dtype != SPCCL_FLOAT32 && dtype != SPCCL_FLOAT16 && dtype != SPCCL_BFLOAT16 && dtype != SPCCL_FLOAT64)
        return SP_FAIL(SPCCL_ERR_DTYPE, "%s: dtype %s, wanted float32, float16, bfloat16 or float64", call,
                       sp_dtype_name(dtype));
    if (device >= 0 && sp_gpu_ops_here() == NULL)
        return SP_FAIL(SPCCL_ERR_UNSUPPORTED, "%s: this build of spccl has no CUDA (`spccl info` says why)",
                       call);
    p = sp_calloc(1, sizeof *p);
    if (p == NULL)
        return SP_FAIL(SPCCL_ERR_NOMEM, "%s", call);
    p->n_elems = n_elems;
    p->n_segments = n_segments;
    p->dtype = dtype;
    p->device = device < 0 ? -1 : device;
    st = fill(p, segments);
    if (st != SPCCL_OK) {
        spccl_prune_plan_destroy(p);
        return st;
    }
    *out = p;
    return SPCCL_OK;
}

void spccl_prune_plan_destroy(spccl_prune_plan *plan)
{
    if (plan == NULL)
        return;
    if (plan->table != NULL)
        sp_gpu_ops_here()->unload(plan->device, plan->table);
    sp_free(plan->magnitudes);
    sp_free(plan->segments);
    sp_free(plan);
}

/* Errors unless p, an argument of `call`, is memory of GPU `device` and aligned. */
static spccl_status check_argument(const char *call, const char *what, const void *p, size_t align,
                                   int device)
{
    int ordinal = -1;
    if ((uintptr_t)p % align != 0)
        return SP_FAIL(SPCCL_ERR_ARG, "%s: %s is %p, wanted an address aligned to %zu bytes", call, what, p,
                       align);
    SP_TRY(sp_gpu_ops_here()->device_of(p, &ordinal));
    if (ordinal < 0)
        return SP_FAIL(SPCCL_ERR_ARG, "%s: %s (%p) is host memory, the plan is for GPU %d", call, what, p,
                       device);
    if (ordinal != device)
        return SP_FAIL(SPCCL_ERR_ARG, "%s: %s (%p) is memory of GPU %d, the plan is for GPU %d", call, what,
                       p, ordinal, device);
    return SPCCL_OK;
}

spccl_status sp_gpu_prune_args_get(spccl_prune_plan *plan, void *grad, const spccl_prune_options *options,
                                   const char *call, sp_gpu_prune_args *out)
{
    sp_gpu_prune_args *a = out;
    if (plan == NULL || grad == NULL)
        return SP_FAIL(SPCCL_ERR_ARG, "%s: %s is NULL", call, plan == NULL ? "plan" : "grad");
    if (plan->device < 0)
        return SP_FAIL(SPCCL_ERR_ARG, "%s: the plan is for host memory: use spccl_prune", call);
    *a = (sp_gpu_prune_args){.grad = grad,
                             .dtype = plan->dtype,
                             .table = plan->table,
                             .n_segments = (uint32_t)plan->n_segments,
                             .n_tiles = plan->n_tiles,
                             .most_elems = plan->most_elems};
    SP_TRY(sp_prune_options_get(options, plan->dtype, call, &a->options));
    SP_TRY(sp_prune_refuse_chunk(&a->options, call));
    SP_TRY(check_argument(call, "grad", grad, sp_dtype_bytes(plan->dtype), plan->device));
    if (a->options.factor != NULL)
        SP_TRY(check_argument(call, "options.factor", a->options.factor, sizeof(float), plan->device));
    if (a->options.loss_scale != NULL)
        SP_TRY(
            check_argument(call, "options.loss_scale", a->options.loss_scale, sizeof(float), plan->device));
    if (a->options.norm != NULL) {
        size_t norm_bytes = plan->dtype == SPCCL_FLOAT64 ? sizeof(double) : sizeof(float);
        SP_TRY(check_argument(call, "options.norm", a->options.norm, norm_bytes, plan->device));
        SP_TRY(check_argument(call, "options.squares", a->options.squares, sizeof(double), plan->device));
    }
    return SPCCL_OK;
}

spccl_status spccl_cuda_prune(spccl_prune_plan *plan, void *grad, const spccl_prune_options *options,
                              void *stream)
{
    const sp_gpu_ops *ops = sp_gpu_ops_here();
    sp_gpu_prune_args a;
    int before;
    spccl_status st;
    SP_TRY(sp_gpu_prune_args_get(plan, grad, options, "spccl_cuda_prune", &a));
    SP_TRY(ops->enter(plan->device, &before));
    st = ops->prune(&a, stream);
    ops->leave(before);
    return st;
}
