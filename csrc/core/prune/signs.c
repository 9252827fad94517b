/* signs.c - one bit per element: spccl_weights_send_signs, spccl_signs_sum and spccl_signs_decode on the host, and their
 * arguments on both. The rule is in signs_rule.h. */
#include "core/base/abi.h"
#include "core/base/signs_rule.h"
#include "core/gpu/gpu_comm.h"
#include "core/prune/prune_plan.h"

static spccl_status check_plan(const spccl_weights_plan *plan, const void *rows, double leak)
{
    const char *call = "spccl_weights_send_signs";
    if (plan == NULL || rows == NULL)
        return SP_FAIL(SPCCL_ERR_ARG, "%s: %s is NULL", call, plan == NULL ? "plan" : "rows");
    if (plan->plan.dtype != SPCCL_FLOAT32)
        return SP_FAIL(SPCCL_ERR_DTYPE, "%s: the plan is for %s, wanted float32", call,
                       sp_dtype_name(plan->plan.dtype));
    SP_TRY(sp_prune_check_shares(call, 1, 1, leak, 1));
    for (size_t i = 0; i < plan->plan.n_segments; i++) {
        const spccl_weights_segment *s = &plan->plan.segments[i].weights;
        if (s->begin % SPCCL_SIGNS_CHUNK != 0 || s->whole != 0)
            return SP_FAIL(SPCCL_ERR_ARG, "%s: the segment at element %zu %s", call, s->begin,
                           s->whole != 0 ? "is one to send whole; give a plan without such segments"
                                         : "does not begin at a multiple of 4096");
    }
    return sp_gpu_check_memory(call, "rows", rows, 4, plan->plan.device, SP_PLAN_IS_FOR);
}

static spccl_status launch_send(const spccl_prune_plan *plan, void *rows, double leak, void *stream)
{
    sp_gpu_weights_args a = {.buffer = rows,
                             .dtype = plan->dtype,
                             .table = plan->table,
                             .n_segments = (uint32_t)plan->n_segments,
                             .n_tiles = plan->n_tiles,
                             .options = {.leak = leak}};
    int before;
    spccl_status st;
    SP_TRY(sp_gpu_ops_here()->enter(plan->device, &before));
    st = sp_gpu_ops_here()->signs_send(&a, stream);
    sp_gpu_ops_here()->leave(before);
    return st;
}

spccl_status spccl_weights_send_signs(spccl_weights_plan *plan, void *rows, double leak, void *stream)
{
    SP_TRY(check_plan(plan, rows, leak));
    if (plan->plan.device >= 0)
        return launch_send(&plan->plan, rows, leak, stream);
    for (size_t i = 0; i < plan->plan.n_segments; i++) {
        const spccl_weights_segment *s = &plan->plan.segments[i].weights;
        uint8_t *row = (uint8_t *)rows + s->begin / SPCCL_SIGNS_CHUNK * SPCCL_SIGNS_ROW_BYTES;
        uint64_t n_nonfinite = 0;
        for (size_t at = 0; at < s->n_elems; at += SPCCL_SIGNS_CHUNK, row += SPCCL_SIGNS_ROW_BYTES) {
            uint32_t n = (uint32_t)sp_min_size(SPCCL_SIGNS_CHUNK, s->n_elems - at);
            n_nonfinite += plan->plan.kernels->signs_send((float *)s->own + at, (const float *)s->shared + at,
                                                          n, (float)leak, row);
        }
        sp_prune_count(s->state, s->n_elems, n_nonfinite);
    }
    return SPCCL_OK;
}

/* Errors unless this build has what memory of `device` needs. */
static spccl_status check_device(const char *call, int device)
{
    if (device >= 0 && sp_gpu_ops_here() == NULL)
        return SP_FAIL(SPCCL_ERR_UNSUPPORTED, "%s: this build of spccl has no CUDA (`spccl info` says why)",
                       call);
    return SPCCL_OK;
}

static spccl_status check_memory(const char *call, const char *what, const void *p, size_t align, int device)
{
    if (p == NULL)
        return SP_FAIL(SPCCL_ERR_ARG, "%s: %s is NULL", call, what);
    return sp_gpu_check_memory(call, what, p, device >= 0 ? align : 4, device, "the call is for");
}

/* The options of spccl_signs_sum, checked. */
static spccl_status get_options(const spccl_signs_sum_options *given, sp_gpu_signs_args *a)
{
    const char *call = "spccl_signs_sum";
    spccl_signs_sum_options o = SPCCL_SIGNS_SUM_OPTIONS_INIT;
    if (given == NULL)
        return SP_FAIL(SPCCL_ERR_ARG, "%s: options is NULL", call);
    SP_TRY(sp_options_copy("spccl_signs_sum_options", given, &o, sizeof o));
    SP_TRY(check_device(call, o.device));
    if (o.n_parts > 0)
        SP_TRY(check_memory(call, "options.parts", o.parts, 4, o.device));
    SP_TRY(check_memory(call, "options.kept", o.kept, 16, o.device));
    SP_TRY(check_memory(call, "options.rows", o.rows, 4, o.device));
    if (o.lengths != NULL)
        SP_TRY(check_memory(call, "options.lengths", o.lengths, 4, o.device));
    *a = (sp_gpu_signs_args){.parts = o.parts,
                             .values = o.kept,
                             .rows = o.rows,
                             .lengths = o.lengths,
                             .n_chunks = o.n_chunks,
                             .n_parts = o.n_parts,
                             .share = o.n_parts > 0 ? 1.0f / (float)o.n_parts : 0};
    return SPCCL_OK;
}

static spccl_status sum_on_host(const sp_gpu_signs_args *a)
{
    const sp_kernels *kernels;
    SP_TRY(sp_kernels_pick(&kernels));
    for (size_t i = 0; a->lengths != NULL && i < a->n_chunks; i++)
        if (a->lengths[i] > SPCCL_SIGNS_CHUNK)
            return SP_FAIL(SPCCL_ERR_ARG, "spccl_signs_sum: options.lengths[%zu] is %u, wanted at most %u", i,
                           a->lengths[i], SPCCL_SIGNS_CHUNK);
    for (size_t i = 0; i < a->n_chunks; i++) {
        sp_signs_sum_args one = {.kept = a->values + i * SPCCL_SIGNS_CHUNK,
                                 .n = a->lengths != NULL ? a->lengths[i] : SPCCL_SIGNS_CHUNK,
                                 .n_parts = a->n_parts,
                                 .parts = a->n_parts > 0 ? a->parts + i * SPCCL_SIGNS_ROW_BYTES : NULL,
                                 .part_bytes = a->n_chunks * SPCCL_SIGNS_ROW_BYTES,
                                 .share = a->share,
                                 .row = a->rows + i * SPCCL_SIGNS_ROW_BYTES};
        if (one.n == 0)
            memset(one.row, 0, SPCCL_SIGNS_ROW_BYTES);
        else
            kernels->signs_sum(&one);
    }
    return SPCCL_OK;
}

/* Run `launch` with GPU `device` current. */
static spccl_status launch_on(int device, const sp_gpu_signs_args *a,
                              spccl_status (*launch)(const sp_gpu_signs_args *a, void *stream), void *stream)
{
    int before;
    spccl_status st;
    SP_TRY(sp_gpu_ops_here()->enter(device, &before));
    st = launch(a, stream);
    sp_gpu_ops_here()->leave(before);
    return st;
}

spccl_status spccl_signs_sum(const spccl_signs_sum_options *options, void *stream)
{
    sp_gpu_signs_args a;
    SP_TRY(get_options(options, &a));
    if (a.n_chunks == 0)
        return SPCCL_OK;
    return options->device < 0 ? sum_on_host(&a)
                               : launch_on(options->device, &a, sp_gpu_ops_here()->signs_sum, stream);
}

spccl_status spccl_signs_decode(const void *rows, size_t n_chunks, float *out, int device, void *stream)
{
    const char *call = "spccl_signs_decode";
    sp_gpu_signs_args a = {.parts = rows, .values = out, .n_chunks = n_chunks};
    const sp_kernels *kernels;
    SP_TRY(check_device(call, device));
    SP_TRY(check_memory(call, "rows", rows, 4, device));
    SP_TRY(check_memory(call, "out", out, 16, device));
    if (n_chunks == 0)
        return SPCCL_OK;
    if (device >= 0)
        return launch_on(device, &a, sp_gpu_ops_here()->signs_decode, stream);
    SP_TRY(sp_kernels_pick(&kernels));
    for (size_t i = 0; i < n_chunks; i++)
        kernels->signs_decode(a.parts + i * SPCCL_SIGNS_ROW_BYTES, out + i * SPCCL_SIGNS_CHUNK);
    return SPCCL_OK;
}
