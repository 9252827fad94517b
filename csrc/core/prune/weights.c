/* weights.c - spccl_weights_send and spccl_weights_receive on the host, and their arguments on both.
 * The rules are in weights_rule.h and chunk_rule.h. */
#include "core/base/abi.h"
#include "core/base/chunk_rule.h"
#include "core/gpu/gpu_comm.h"
#include "core/prune/prune_plan.h"

static spccl_status check(const spccl_weights_plan *plan, const void *buffer, const char *call)
{
    if (plan == NULL || buffer == NULL)
        return SP_FAIL(SPCCL_ERR_ARG, "%s: %s is NULL", call, plan == NULL ? "plan" : "the buffer");
    return sp_gpu_check_memory(call, "the buffer", buffer, sp_dtype_bytes(plan->plan.dtype),
                               plan->plan.device, SP_PLAN_IS_FOR);
}

static spccl_status get_options(const spccl_weights_options *given, const char *call,
                                spccl_weights_options *o)
{
    *o = (spccl_weights_options)SPCCL_WEIGHTS_OPTIONS_INIT;
    SP_TRY(sp_options_copy("spccl_weights_options", given, o, sizeof *o));
    SP_TRY(sp_prune_check_shares(call, o->density, o->sample, o->leak, o->scale));
    if (o->chunk != 0 &&
        (o->chunk < SP_CHUNK_LEAST || o->chunk > SP_CHUNK_MOST || (o->chunk & (o->chunk - 1)) != 0))
        return SP_FAIL(SPCCL_ERR_ARG, "%s: options.chunk is %u, wanted 0 or a power of 2 from %u to %u", call,
                       o->chunk, SP_CHUNK_LEAST, SP_CHUNK_MOST);
    if (o->chunk != 0 && o->keep_thresholds != 0)
        return SP_FAIL(SPCCL_ERR_ARG,
                       "%s: options.chunk and options.keep_thresholds are set, wanted one of them: chunks "
                       "have no threshold",
                       call);
    if (o->levels != 0 && (o->levels != 2 || o->chunk == 0))
        return SP_FAIL(SPCCL_ERR_ARG, "%s: options.levels is %u with chunk %u, wanted 0, or 2 with a chunk",
                       call, o->levels, o->chunk);
    return SPCCL_OK;
}

/* The three steps on one segment: differences; pruning; own weights, and scaling what is sent. And receiving. w own
 * weights, z shared ones. Mostly zeros are sent: whole groups of GROUP are skipped. */
#define GROUP 16u
#define WEIGHTS(NAME, TYPE)                                                                                  \
    static bool any_##NAME(const TYPE *x, size_t n)                                                          \
    {                                                                                                        \
        int any = 0;                                                                                         \
        for (size_t i = 0; i < n; i++)                                                                       \
            any |= x[i] != 0;                                                                                \
        return any != 0;                                                                                     \
    }                                                                                                        \
    static uint64_t subtract_##NAME(TYPE *restrict w, const TYPE *restrict z, TYPE *restrict out, size_t n)  \
    {                                                                                                        \
        uint64_t n_nonfinite = 0;                                                                            \
        for (size_t i = 0; i < n; i++) {                                                                     \
            out[i] = w[i] - z[i];                                                                            \
            n_nonfinite += !sp_##NAME##_is_finite(out[i]);                                                   \
        }                                                                                                    \
        for (size_t i = 0; n_nonfinite != 0 && i < n; i++)                                                   \
            if (!sp_##NAME##_is_finite(out[i])) {                                                            \
                out[i] = 0;                                                                                  \
                w[i] = z[i];                                                                                 \
            }                                                                                                \
        return n_nonfinite;                                                                                  \
    }                                                                                                        \
    static void keep_##NAME(TYPE *restrict w, const TYPE *restrict z, TYPE *restrict out, size_t n,          \
                            TYPE leak, TYPE scale)                                                           \
    {                                                                                                        \
        for (size_t at = 0; at < n; at += GROUP) {                                                           \
            size_t end = sp_min_size(at + GROUP, n);                                                         \
            if (leak == 1 && !any_##NAME(out + at, end - at))                                                \
                continue;                                                                                    \
            for (size_t i = at; i < end; i++) {                                                              \
                TYPE d = w[i] - z[i];                                                                        \
                if (out[i] != 0)                                                                             \
                    w[i] = z[i];                                                                             \
                else if (leak != 1 && d != 0)                                                                \
                    w[i] = leak * d + z[i];                                                                  \
                out[i] *= scale;                                                                             \
            }                                                                                                \
        }                                                                                                    \
    }                                                                                                        \
    static void receive_##NAME(TYPE *restrict w, TYPE *restrict z, const TYPE *restrict change, size_t n)    \
    {                                                                                                        \
        for (size_t at = 0; at < n; at += GROUP) {                                                           \
            size_t end = sp_min_size(at + GROUP, n);                                                         \
            if (!any_##NAME(change + at, end - at))                                                          \
                continue;                                                                                    \
            for (size_t i = at; i < end; i++)                                                                \
                if (change[i] != 0) {                                                                        \
                    z[i] = z[i] + change[i];                                                                 \
                    w[i] = w[i] + change[i];                                                                 \
                }                                                                                            \
        }                                                                                                    \
    }
WEIGHTS(f32, float)
WEIGHTS(f64, double)

static void send_segment(const spccl_prune_plan *plan, const spccl_weights_segment *s, void *out,
                         const spccl_weights_options *o)
{
    /* The difference is pruned as a gradient without residual. keep_.. scales: to see what is sent it needs the
     * difference, which scaling may round to 0. */
    const spccl_prune_segment difference = {s->begin, s->n_elems, NULL, NULL, s->state, s->key, s->whole};
    spccl_prune_options prune = SPCCL_PRUNE_OPTIONS_INIT;
    bool wide = plan->dtype == SPCCL_FLOAT64;
    uint64_t n_nonfinite = wide ? subtract_f64(s->own, s->shared, out, s->n_elems)
                                : subtract_f32(s->own, s->shared, out, s->n_elems);
    prune.density = o->density;
    prune.sample = o->sample;
    prune.seed = o->seed;
    prune.keep_thresholds = o->keep_thresholds;
    sp_prune_segment_run(plan, &prune, &difference, out);
    s->state->n_nonfinite_all += n_nonfinite;
    if (wide)
        keep_f64(s->own, s->shared, out, s->n_elems, o->leak, o->scale);
    else
        keep_f32(s->own, s->shared, out, s->n_elems, (float)o->leak, (float)o->scale);
}

/* Fill in all of `a` but the buffer and the options, and run `launch` with the plan's GPU current. */
static spccl_status launch_on(const spccl_prune_plan *plan, sp_gpu_weights_args *a,
                              spccl_status (*launch)(const sp_gpu_weights_args *a, void *stream),
                              void *stream)
{
    int before;
    spccl_status st;
    a->dtype = plan->dtype;
    a->table = plan->table;
    a->n_segments = (uint32_t)plan->n_segments;
    a->n_tiles = plan->n_tiles;
    SP_TRY(sp_gpu_ops_here()->enter(plan->device, &before));
    st = launch(a, stream);
    sp_gpu_ops_here()->leave(before);
    return st;
}

spccl_status spccl_weights_send(spccl_weights_plan *plan, void *out, const spccl_weights_options *options,
                                void *stream)
{
    const char *call = "spccl_weights_send";
    sp_gpu_weights_args a = {.buffer = out};
    SP_TRY(check(plan, out, call));
    SP_TRY(get_options(options, call, &a.options));
    if (plan->plan.device >= 0)
        return launch_on(&plan->plan, &a, sp_gpu_ops_here()->weights_send, stream);
    for (size_t i = 0; i < plan->plan.n_segments; i++) {
        const spccl_weights_segment *s = &plan->plan.segments[i].weights;
        void *at = (uint8_t *)out + s->begin * sp_dtype_bytes(plan->plan.dtype);
        if (a.options.chunk != 0 && !sp_weights_whole(&a.options, s))
            sp_weights_chunk_run(plan->plan.dtype, &a.options, s, at);
        else
            send_segment(&plan->plan, s, at, &a.options);
    }
    return SPCCL_OK;
}

spccl_status spccl_weights_receive(spccl_weights_plan *plan, const void *change, void *stream)
{
    sp_gpu_weights_args a = {.buffer = (void *)(uintptr_t)change};
    SP_TRY(check(plan, change, "spccl_weights_receive"));
    if (plan->plan.device >= 0)
        return launch_on(&plan->plan, &a, sp_gpu_ops_here()->weights_receive, stream);
    for (size_t i = 0; i < plan->plan.n_segments; i++) {
        const spccl_weights_segment *s = &plan->plan.segments[i].weights;
        const uint8_t *at = (const uint8_t *)change + s->begin * sp_dtype_bytes(plan->plan.dtype);
        if (plan->plan.dtype == SPCCL_FLOAT64)
            receive_f64(s->own, s->shared, (const double *)at, s->n_elems);
        else
            receive_f32(s->own, s->shared, (const float *)at, s->n_elems);
    }
    return SPCCL_OK;
}
