/* prune_plan.c - plans, for host and GPU: checks the segments, copies them to the GPU of a plan that has one. And
 * spccl_cuda_prune. spccl_prune, on the host, is in prune.c. */
#include "core/prune/prune_plan.h"

#include "core/base/dtype.h"
#include "core/gpu/gpu_comm.h"

#include <stdio.h>
#include <stdlib.h>

/* What the texts of errors call a plan's memory. */
struct kind {
    const char *call;
    bool is_weights;
};

static int by_begin(const void *a, const void *b)
{
    const sp_segment *x = a, *y = b;
    return x->prune.begin < y->prune.begin ? -1 : x->prune.begin > y->prune.begin ? 1 : 0;
}

static size_t state_bytes(spccl_dtype dtype)
{
    return dtype == SPCCL_FLOAT64 ? 8 : 4;
}

/* Errors unless the segments, which are sorted, lie in the gradient and do not overlap. */
static spccl_status check_ranges(const char *call, const spccl_prune_plan *p)
{
    size_t end = 0;
    for (size_t i = 0; i < p->n_segments; i++) {
        const spccl_prune_segment *s = &p->segments[i].prune;
        if (s->n_elems == 0)
            return SP_FAIL(SPCCL_ERR_ARG, "%s: the segment at element %zu is empty", call, s->begin);
        if (s->begin > p->n_elems || s->n_elems > p->n_elems - s->begin)
            return SP_FAIL(SPCCL_ERR_ARG,
                           "%s: a segment of %zu elements at element %zu leaves the gradient, which has %zu",
                           call, s->n_elems, s->begin, p->n_elems);
        if (s->begin < end)
            return SP_FAIL(SPCCL_ERR_ARG,
                           "%s: the segments before and at element %zu overlap by %zu elements", call,
                           s->begin, end - s->begin);
        end = s->begin + s->n_elems;
    }
    return SPCCL_OK;
}

/* The three pointers of a segment. */
static spccl_status check_segment(const struct kind *k, const spccl_prune_plan *p, const sp_segment *s)
{
    const struct {
        const char *name;
        const void *p;
        size_t align;
        bool needed;
    } all[] = {
        {"state", s->prune.state, 8, true},
        {k->is_weights ? "own weights" : "residual", s->prune.residual, state_bytes(p->dtype), k->is_weights},
        {k->is_weights ? "shared weights" : "velocity", s->prune.velocity, state_bytes(p->dtype),
         k->is_weights}};
    char what[80];
    for (int i = 0; i < 3; i++) {
        size_t align = p->device >= 0 && i > 0 ? 16 : all[i].align;
        if (all[i].p == NULL && all[i].needed)
            return SP_FAIL(SPCCL_ERR_ARG, "%s: the segment at element %zu has no %s", k->call, s->prune.begin,
                           all[i].name);
        if (all[i].p == NULL)
            continue;
        snprintf(what, sizeof what, "%s of the segment at element %zu", all[i].name, s->prune.begin);
        SP_TRY(sp_gpu_check_memory(k->call, what, all[i].p, align, p->device, SP_PLAN_IS_FOR));
    }
    return SPCCL_OK;
}

/* Make the table and the rows that the kernels read, in GPU memory. */
static spccl_status upload(const char *call, spccl_prune_plan *p)
{
    size_t bytes = sizeof(sp_gpu_prune_table) + p->n_segments * sizeof(sp_gpu_prune_row);
    sp_gpu_prune_table *table = sp_calloc(1, bytes);
    sp_gpu_prune_row *rows = (sp_gpu_prune_row *)(table + 1);
    void *on_gpu = NULL;
    spccl_status st;
    if (table == NULL)
        return SP_FAIL(SPCCL_ERR_NOMEM, "%s: %zu bytes", call, bytes);
    for (size_t i = 0; i < p->n_segments; i++) {
        size_t n_elems = p->segments[i].prune.n_elems;
        rows[i].segment = p->segments[i].prune;
        rows[i].first_tile = p->n_tiles;
        p->most_elems = sp_max_size(p->most_elems, n_elems);
        p->n_tiles += sp_ceil_div(n_elems, SP_GPU_PRUNE_TILE(state_bytes(p->dtype)));
        rows[i].end_tile = p->n_tiles;
        p->n_covered += n_elems;
        p->n_whole += p->segments[i].prune.whole != 0 ? n_elems : 0;
    }
    st = sp_gpu_ops_here()->upload(p->device, table, bytes, bytes, &on_gpu);
    p->table = on_gpu;
    sp_free(table);
    return st;
}

static spccl_status fill(const struct kind *k, spccl_prune_plan *p, const void *segments)
{
    p->segments = sp_calloc(p->n_segments, sizeof *p->segments);
    if (p->segments == NULL)
        return SP_FAIL(SPCCL_ERR_NOMEM, "%s: %zu segments", k->call, p->n_segments);
    memcpy(p->segments, segments, p->n_segments * sizeof *p->segments);
    qsort(p->segments, p->n_segments, sizeof *p->segments, by_begin);
    SP_TRY(check_ranges(k->call, p));
    for (size_t i = 0; i < p->n_segments; i++)
        SP_TRY(check_segment(k, p, &p->segments[i]));
    if (p->device >= 0)
        return upload(k->call, p);
    p->magnitudes = sp_calloc(SP_PRUNE_BLOCK_ELEMS, sizeof *p->magnitudes);
    if (p->magnitudes == NULL)
        return SP_FAIL(SPCCL_ERR_NOMEM, "%s: scratch of %u elements", k->call, SP_PRUNE_BLOCK_ELEMS);
    return sp_kernels_pick(&p->kernels);
}

/* `shape`: n_elems, n_segments, dtype and device of the plan. */
static spccl_status make(const struct kind *k, const void *segments, const spccl_prune_plan *shape,
                         spccl_prune_plan **out)
{
    bool wide = shape->dtype == SPCCL_FLOAT32 || shape->dtype == SPCCL_FLOAT64;
    bool narrow = shape->dtype == SPCCL_FLOAT16 || shape->dtype == SPCCL_BFLOAT16;
    spccl_prune_plan *p;
    spccl_status st;
    if (out == NULL || segments == NULL || shape->n_segments == 0 || shape->n_segments > UINT32_MAX)
        return SP_FAIL(SPCCL_ERR_ARG, "%s: %s", k->call,
                       out == NULL        ? "out is NULL"
                       : segments == NULL ? "segments is NULL"
                                          : "wanted 1 to 2^32 - 1 segments");
    if (!wide && (!narrow || k->is_weights))
        return SP_FAIL(SPCCL_ERR_DTYPE, "%s: dtype %s, wanted float32%s or float64", k->call,
                       sp_dtype_name(shape->dtype), k->is_weights ? "" : ", float16, bfloat16");
    if (shape->device >= 0 && sp_gpu_ops_here() == NULL)
        return SP_FAIL(SPCCL_ERR_UNSUPPORTED, "%s: this build of spccl has no CUDA (`spccl info` says why)",
                       k->call);
    p = sp_calloc(1, sizeof *p);
    if (p == NULL)
        return SP_FAIL(SPCCL_ERR_NOMEM, "%s", k->call);
    *p = *shape;
    st = fill(k, p, segments);
    if (st != SPCCL_OK) {
        spccl_prune_plan_destroy(p);
        return st;
    }
    *out = p;
    return SPCCL_OK;
}

spccl_status spccl_prune_plan_create(const spccl_prune_segment *segments, size_t n_segments, size_t n_elems,
                                     spccl_dtype dtype, int device, spccl_prune_plan **out)
{
    const spccl_prune_plan shape = {
        .n_elems = n_elems, .n_segments = n_segments, .dtype = dtype, .device = device < 0 ? -1 : device};
    return make(&(struct kind){"spccl_prune_plan_create", false}, segments, &shape, out);
}

spccl_status spccl_weights_plan_create(const spccl_weights_segment *segments, size_t n_segments,
                                       size_t n_elems, spccl_dtype dtype, int device,
                                       spccl_weights_plan **out)
{
    const spccl_prune_plan shape = {
        .n_elems = n_elems, .n_segments = n_segments, .dtype = dtype, .device = device < 0 ? -1 : device};
    spccl_prune_plan *plan = NULL;
    SP_TRY(make(&(struct kind){"spccl_weights_plan_create", true}, segments, &shape,
                out != NULL ? &plan : NULL));
    *out = (spccl_weights_plan *)plan;
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

void spccl_weights_plan_destroy(spccl_weights_plan *plan)
{
    spccl_prune_plan_destroy((spccl_prune_plan *)plan);
}

spccl_status sp_prune_gpu_args_get(spccl_prune_plan *plan, void *grad, const spccl_prune_options *options,
                                   const char *call, sp_gpu_prune_args *out)
{
    spccl_prune_options o;
    SP_TRY(sp_prune_options_get(plan, grad, true, options, call, &o));
    const struct {
        const char *name;
        const void *p;
        size_t align;
    } all[] = {{"options.factor", o.factor, sizeof(float)},
               {"options.loss_scale", o.loss_scale, sizeof(float)},
               {"options.norm", o.norm, state_bytes(plan->dtype)},
               {"options.squares", o.norm != NULL ? o.squares : NULL, sizeof(double)}};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        if (all[i].p != NULL)
            SP_TRY(
                sp_gpu_check_memory(call, all[i].name, all[i].p, all[i].align, plan->device, SP_PLAN_IS_FOR));
    *out = (sp_gpu_prune_args){.grad = grad,
                               .dtype = plan->dtype,
                               .table = plan->table,
                               .n_segments = (uint32_t)plan->n_segments,
                               .n_tiles = plan->n_tiles,
                               .most_elems = plan->most_elems,
                               .options = o};
    return SPCCL_OK;
}

spccl_status spccl_cuda_prune(spccl_prune_plan *plan, void *grad, const spccl_prune_options *options,
                              void *stream)
{
    const sp_gpu_ops *ops = sp_gpu_ops_here();
    sp_gpu_prune_args a;
    int before;
    spccl_status st;
    SP_TRY(sp_prune_gpu_args_get(plan, grad, options, "spccl_cuda_prune", &a));
    SP_TRY(ops->enter(plan->device, &before));
    st = ops->prune(&a, stream);
    ops->leave(before);
    return st;
}
