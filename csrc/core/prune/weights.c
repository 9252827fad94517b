/* weights.c - spccl_weights_send and spccl_weights_receive on the host, and their arguments on both.
 * The rules are in weights_rule.h and chunk_rule.h. */
#include "core/base/chunk_rule.h"
#include "core/base/weights_rule.h"
#include "core/gpu/gpu_comm.h"
#include "core/prune/prune_plan.h"

/* Errors unless the plan's segments have weights of both kinds, and `buffer` is aligned. */
static spccl_status check(const spccl_prune_plan *plan, const void *buffer, const char *call)
{
    size_t align;
    if (plan == NULL || buffer == NULL)
        return SP_FAIL(SPCCL_ERR_ARG, "%s: %s is NULL", call, plan == NULL ? "plan" : "the buffer");
    align = sp_dtype_bytes(plan->dtype);
    if (plan->dtype != SPCCL_FLOAT32 && plan->dtype != SPCCL_FLOAT64)
        return SP_FAIL(SPCCL_ERR_DTYPE, "%s: a plan of %s, wanted float32 or float64", call,
                       sp_dtype_name(plan->dtype));
    if ((uintptr_t)buffer % align != 0)
        return SP_FAIL(SPCCL_ERR_ARG, "%s: the buffer is %p, wanted an address aligned to %zu bytes", call,
                       buffer, align);
    for (size_t i = 0; i < plan->n_segments; i++)
        if (plan->segments[i].residual == NULL || plan->segments[i].velocity == NULL)
            return SP_FAIL(
                SPCCL_ERR_ARG,
                "%s: the segment at element %zu has no %s, wanted own weights as residual and shared "
                "weights as velocity",
                call, plan->segments[i].begin, plan->segments[i].residual == NULL ? "residual" : "velocity");
    return SPCCL_OK;
}

static spccl_status check_options(const spccl_prune_options *o)
{
    const char *used = o->momentum != 0        ? "momentum"
                       : o->skip_zeros != 0    ? "skip_zeros"
                       : o->factor != NULL     ? "factor"
                       : o->norm != NULL       ? "norm"
                       : o->loss_scale != NULL ? "loss_scale"
                       : o->dense_steps != 0   ? "dense_steps"
                       : o->warmup_steps != 0  ? "warmup_steps"
                       : o->residual_bf16 != 0 ? "residual_bf16"
                                               : NULL;
    if (used != NULL)
        return SP_FAIL(SPCCL_ERR_ARG, "spccl_weights_send: options.%s is set, wanted 0: it is for gradients",
                       used);
    if (o->chunk != 0 &&
        (o->chunk < SP_CHUNK_LEAST || o->chunk > SP_CHUNK_MOST || (o->chunk & (o->chunk - 1)) != 0))
        return SP_FAIL(SPCCL_ERR_ARG,
                       "spccl_weights_send: options.chunk is %u, wanted 0 or a power of 2 from %u to %u",
                       o->chunk, SP_CHUNK_LEAST, SP_CHUNK_MOST);
    if (o->chunk != 0 && o->keep_thresholds != 0)
        return SP_FAIL(SPCCL_ERR_ARG,
                       "spccl_weights_send: options.chunk and options.keep_thresholds are set, "
                       "wanted one of them: chunks have no threshold");
    return o->levels == 0 || (o->levels == 2 && o->chunk != 0)
               ? SPCCL_OK
               : SP_FAIL(
                     SPCCL_ERR_ARG,
                     "spccl_weights_send: options.levels is %u with chunk %u, wanted 0, or 2 with a chunk",
                     o->levels, o->chunk);
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

static void send_segment(const spccl_prune_plan *plan, const spccl_prune_segment *s, void *out,
                         const spccl_prune_options *o)
{
    spccl_prune_segment bare = *s; /* the difference is pruned as a gradient without residual */
    bool wide = plan->dtype == SPCCL_FLOAT64;
    uint64_t n_nonfinite = wide ? subtract_f64(s->residual, s->velocity, out, s->n_elems)
                                : subtract_f32(s->residual, s->velocity, out, s->n_elems);
    spccl_prune_options prune = *o;
    bare.residual = bare.velocity = NULL;
    prune.leak = 1;
    prune.scale =
        1; /* keep_.. scales: to see what is sent it needs the difference, which scaling may round to 0 */
    sp_prune_segment_run(plan, &prune, &bare, out);
    s->state->n_nonfinite_all += n_nonfinite;
    if (wide)
        keep_f64(s->residual, s->velocity, out, s->n_elems, o->leak, o->scale);
    else
        keep_f32(s->residual, s->velocity, out, s->n_elems, (float)o->leak, (float)o->scale);
}

/* `buffer` must be memory of the plan's GPU. Then run `launch` with that GPU current. */
static spccl_status launch_on(const spccl_prune_plan *plan, sp_gpu_prune_args *a, const char *call,
                              spccl_status (*launch)(const sp_gpu_prune_args *a, void *stream), void *stream)
{
    const sp_gpu_ops *ops = sp_gpu_ops_here();
    int ordinal = -1, before;
    spccl_status st;
    SP_TRY(ops->device_of(a->grad, &ordinal));
    if (ordinal != plan->device)
        return SP_FAIL(SPCCL_ERR_ARG, "%s: the buffer (%p) is %s memory, the plan is for GPU %d", call,
                       a->grad, ordinal < 0 ? "host" : "another GPU's", plan->device);
    a->dtype = plan->dtype;
    a->table = plan->table;
    a->n_segments = (uint32_t)plan->n_segments;
    a->n_tiles = plan->n_tiles;
    SP_TRY(ops->enter(plan->device, &before));
    st = launch(a, stream);
    ops->leave(before);
    return st;
}

spccl_status spccl_weights_send(spccl_prune_plan *plan, void *out, const spccl_prune_options *options,
                                void *stream)
{
    sp_gpu_prune_args a = {.grad = out};
    SP_TRY(check(plan, out, "spccl_weights_send"));
    SP_TRY(sp_prune_options_get(options, plan->dtype, "spccl_weights_send", &a.options));
    SP_TRY(sp_prune_refuse_stage(&a.options, "spccl_weights_send"));
    SP_TRY(check_options(&a.options));
    if (plan->device >= 0)
        return launch_on(plan, &a, "spccl_weights_send", sp_gpu_ops_here()->weights_send, stream);
    for (size_t i = 0; i < plan->n_segments; i++) {
        const spccl_prune_segment *s = &plan->segments[i];
        void *at = (uint8_t *)out + s->begin * sp_dtype_bytes(plan->dtype);
        if (a.options.chunk != 0 && !sp_prune_factors_now(&a.options, s, false).whole)
            sp_weights_chunk_run(plan, &a.options, s, at);
        else
            send_segment(plan, s, at, &a.options);
    }
    return SPCCL_OK;
}

spccl_status spccl_weights_receive(spccl_prune_plan *plan, const void *change, void *stream)
{
    sp_gpu_prune_args a = {.grad = (void *)(uintptr_t)change};
    SP_TRY(check(plan, change, "spccl_weights_receive"));
    if (plan->device >= 0)
        return launch_on(plan, &a, "spccl_weights_receive", sp_gpu_ops_here()->weights_receive, stream);
    for (size_t i = 0; i < plan->n_segments; i++) {
        const spccl_prune_segment *s = &plan->segments[i];
        const uint8_t *at = (const uint8_t *)change + s->begin * sp_dtype_bytes(plan->dtype);
        if (plan->dtype == SPCCL_FLOAT64)
            receive_f64(s->residual, s->velocity, (const double *)at, s->n_elems);
        else
            receive_f32(s->residual, s->velocity, (const float *)at, s->n_elems);
    }
    return SPCCL_OK;
}
