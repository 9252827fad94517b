/* prune.c - spccl_prune: pruning on the host. Takes thresholds from samples, prunes block by block through the
 * kernel table, and bounds what is sent. The rule is in prune_rule.h. */
#include "core/base/abi.h"
#include "core/gpu/gpu_comm.h"
#include "core/prune/prune_plan.h"

#include <float.h>
#include <math.h>

/* When this many times the wanted number of a segment has been sent, each further block sends no more than
 * `density` of its elements. Many elements lie above a threshold if they are equal, or if the gradient has
 * changed abruptly. */
#define MAX_OVERSHOOT 4.0

/* One segment in one call. */
struct job {
    const spccl_prune_plan *plan;
    const spccl_prune_options *o;
    const spccl_prune_segment *segment;
    const spccl_prune_segment *next; /* the next one that is sampled; NULL: none */
    uint8_t *grad;                   /* of the segment */
    size_t elem_bytes, state_bytes, residual_bytes;
    sp_prune_factors f;
    float density;                /* wanted */
    uint64_t n_sent, n_nonfinite; /* so far */
};

static spccl_status check_range(const char *call, const char *name, double value, bool ok, const char *wanted)
{
    return ok ? SPCCL_OK
              : SP_FAIL(SPCCL_ERR_ARG, "%s: options.%s is %g, wanted %s", call, name, value, wanted);
}

spccl_status sp_prune_check_shares(const char *call, double density, double sample, double leak, double scale)
{
    SP_TRY(check_range(call, "density", density, density > 0 && density <= 1, "a number in (0, 1]"));
    SP_TRY(check_range(call, "sample", sample, sample > 0 && sample <= 1, "a number in (0, 1]"));
    SP_TRY(check_range(call, "leak", leak, leak > 0 && leak <= 1, "a number in (0, 1]"));
    /* A negative scale would write -0 where nothing is sent. A scale of 0 would lose what is sent. */
    return check_range(call, "scale", scale, scale >= (double)FLT_MIN && scale <= (double)FLT_MAX,
                       "a number above 0 that float32 holds");
}

static spccl_status check_sent(const spccl_prune_plan *plan, const spccl_prune_options *o, const char *call)
{
    bool has_dtype = o->sent_dtype == SPCCL_FLOAT16 || o->sent_dtype == SPCCL_BFLOAT16;
    if (o->sent == NULL)
        return SPCCL_OK;
    if (plan->dtype != SPCCL_FLOAT32 || o->residual_bf16 != 0 || !has_dtype)
        return SP_FAIL(SPCCL_ERR_ARG,
                       "%s: options.sent is set with sent_dtype %llu, a gradient of %s and residual_bf16 %u, "
                       "wanted float16 or bfloat16, a gradient of float32, and 0",
                       call, (unsigned long long)o->sent_dtype, sp_dtype_name(plan->dtype),
                       (unsigned)o->residual_bf16);
    return sp_gpu_check_memory(call, "options.sent", o->sent, 2, plan->device, SP_PLAN_IS_FOR);
}

spccl_status sp_prune_options_get(const spccl_prune_plan *plan, const void *grad, bool on_gpu,
                                  const spccl_prune_options *given, const char *call, spccl_prune_options *o)
{
    if (plan == NULL || grad == NULL)
        return SP_FAIL(SPCCL_ERR_ARG, "%s: %s is NULL", call, plan == NULL ? "plan" : "grad");
    if (on_gpu && plan->device < 0)
        return SP_FAIL(SPCCL_ERR_ARG, "%s: the plan is for host memory: use spccl_prune", call);
    if (!on_gpu && plan->device >= 0)
        return SP_FAIL(SPCCL_ERR_ARG, "%s: the plan is for GPU %d: use spccl_cuda_prune", call, plan->device);
    *o = (spccl_prune_options)SPCCL_PRUNE_OPTIONS_INIT;
    SP_TRY(sp_options_copy("spccl_prune_options", given, o, sizeof *o));
    SP_TRY(check_range(call, "residual_bf16", (double)o->residual_bf16, o->residual_bf16 <= 1, "0 or 1"));
    SP_TRY(check_range(call, "residual_bf16", (double)o->residual_bf16,
                       o->residual_bf16 == 0 || plan->dtype != SPCCL_FLOAT64, "0 with float64 gradients"));
    SP_TRY(check_range(call, "momentum", o->momentum, o->momentum >= 0 && o->momentum < 1,
                       "a number in [0, 1)"));
    if (o->norm != NULL) {
        if (o->squares == NULL || o->square >= o->n_squares)
            return SP_FAIL(SPCCL_ERR_ARG,
                           "%s: options.norm is set, squares is %p with %u entries and square is %u, "
                           "wanted squares with an entry for this call",
                           call, (void *)o->squares, (unsigned)o->n_squares, (unsigned)o->square);
        SP_TRY(check_range(call, "max_norm", o->max_norm, o->max_norm > 0, "a number above 0"));
    }
    SP_TRY(sp_prune_check_shares(call, o->density, o->sample, o->leak, o->scale));
    SP_TRY(check_sent(plan, o, call));
    return sp_gpu_check_memory(call, "grad", grad, sp_dtype_bytes(plan->dtype), plan->device, SP_PLAN_IS_FOR);
}

/* Residual or velocity from element i of the segment on; NULL stays NULL. */
static void *residual_at(const struct job *j, size_t i)
{
    uint8_t *r = j->segment->residual;
    return r != NULL ? r + i * j->residual_bytes : NULL;
}
static void *velocity_at(const struct job *j, size_t i)
{
    uint8_t *u = j->segment->velocity;
    return u != NULL ? u + i * j->state_bytes : NULL;
}

/* Where what is sent goes, from element i of the segment on; NULL: it replaces the gradient. */
static void *sent_at(const struct job *j, size_t i)
{
    uint16_t *sent = j->o->sent;
    return sent != NULL ? sent + j->segment->begin + i : NULL;
}

static double value_of(spccl_dtype dtype, const uint8_t *p)
{
    float f;
    double d;
    switch (dtype) {
    case SPCCL_FLOAT16:
        return (double)sp_f16_to_f32(sp_load_le16(p));
    case SPCCL_BFLOAT16:
        return (double)sp_bf16_to_f32(sp_load_le16(p));
    case SPCCL_FLOAT64:
        memcpy(&d, p, sizeof d);
        return d;
    default:
        memcpy(&f, p, sizeof f);
        return (double)f;
    }
}

/* |v| of element i of the segment, as the bits of a double. These integers sort like the magnitudes. 0 if g or v
 * is not finite. */
static uint64_t magnitude(const struct job *j, size_t i)
{
    const uint8_t *r = residual_at(j, i), *u = velocity_at(j, i);
    spccl_dtype wide = j->plan->dtype == SPCCL_FLOAT64 ? SPCCL_FLOAT64 : SPCCL_FLOAT32;
    double g_now = value_of(j->plan->dtype, j->grad + i * j->elem_bytes), v;
    double r_now = r == NULL ? 0 : value_of(j->o->residual_bf16 != 0 ? SPCCL_BFLOAT16 : wide, r);
    double u_now = u == NULL ? 0 : value_of(wide, u);
    uint64_t bits;
    if (wide == SPCCL_FLOAT64) {
        sp_prune_factors_f64 f = sp_prune_factors_of_f64(&j->f);
        sp_prune_f64 e = sp_prune_elem_f64(g_now, r_now, u_now, r != NULL, u != NULL, &f);
        v = e.finite ? fabs(e.v) : 0;
    } else {
        sp_prune_factors_f32 f = sp_prune_factors_of_f32(&j->f);
        sp_prune_f32 e =
            sp_prune_elem_f32((float)g_now, (float)r_now, (float)u_now, r != NULL, u != NULL, &f);
        v = e.finite ? (double)fabsf(e.v) : 0;
    }
    memcpy(&bits, &v, sizeof bits);
    return bits;
}

static double value_from_bits(uint64_t bits)
{
    double v;
    memcpy(&v, &bits, sizeof v);
    return v;
}

/* The k-th largest value of x [n]; k = 1: the largest. Reorders x: the first k - 1 values are then not smaller. */
static uint64_t select_largest(uint64_t *x, size_t n, size_t k)
{
    size_t low = 0, high = n - 1, want = k - 1;
    while (low < high) {
        uint64_t pivot = x[low + (high - low) / 2];
        size_t i = low, j = high;
        for (;;) {
            while (x[i] > pivot)
                i++;
            while (x[j] < pivot)
                j--;
            if (i >= j)
                break;
            uint64_t swap = x[i];
            x[i++] = x[j];
            x[j--] = swap;
        }
        if (want <= j)
            high = j;
        else
            low = j + 1;
    }
    return x[want];
}

/* Elements of a sample whose magnitudes are computed at a time. */
#define CHUNK 256u

/* Floats of `dtype` from x, `stride` elements apart; zeros if x is NULL. */
static void gather(float *restrict out, spccl_dtype dtype, const void *x, size_t stride, size_t n)
{
    const float *f = x;
    const uint16_t *h = x;
    if (x == NULL)
        memset(out, 0, n * sizeof *out);
    else if (dtype == SPCCL_FLOAT32)
        for (size_t i = 0; i < n; i++)
            out[i] = f[i * stride];
    else if (dtype == SPCCL_BFLOAT16)
        for (size_t i = 0; i < n; i++)
            out[i] = sp_bf16_to_f32(h[i * stride]);
    else
        for (size_t i = 0; i < n; i++)
            out[i] = sp_f16_to_f32(h[i * stride]);
}

/* Magnitudes [n <= CHUNK] of elements first, first + stride, ... of the segment, as sp_prune_magnitude gives them. */
static void sample_chunk(const struct job *j, size_t first, size_t stride, size_t n, uint32_t *restrict out)
{
    spccl_dtype dtype = j->plan->dtype;
    float g[CHUNK], r[CHUNK], u[CHUNK];
    const sp_prune_factors_f32 f = sp_prune_factors_of_f32(&j->f);
    if (dtype == SPCCL_FLOAT64) {
        for (size_t i = 0; i < n; i++)
            out[i] = sp_prune_magnitude(value_from_bits(magnitude(j, first + i * stride)), true);
        return;
    }
    gather(g, dtype, j->grad + first * j->elem_bytes, stride, n);
    gather(r, j->o->residual_bf16 != 0 ? SPCCL_BFLOAT16 : SPCCL_FLOAT32, residual_at(j, first), stride, n);
    gather(u, SPCCL_FLOAT32, velocity_at(j, first), stride, n);
    for (size_t i = 0; i < n; i++) { /* without residual or velocity: with one of zeros, |v| is the same */
        const uint32_t infinite = 0x7f800000u, magnitude_bits = 0x7fffffffu;
        float v_now = sp_prune_elem_f32(g[i], r[i], u[i], true, true, &f).v;
        uint32_t g_bits = sp_f32_to_bits(g[i]) & magnitude_bits, v = sp_f32_to_bits(v_now) & magnitude_bits;
        uint32_t finite = (uint32_t)(g_bits < infinite) & (uint32_t)(v < infinite);
        out[i] = v & (0 - finite); /* integers, so that the compiler makes vectors of them */
    }
}

/* The samples of at least `least`, in x: returns how many there are. */
static size_t sample_above(const struct job *j, const sp_prune_sample *p, uint32_t least, uint64_t *x)
{
    uint32_t chunk[CHUNK];
    size_t n_found = 0;
    for (size_t at = 0; at < p->n; at += CHUNK) {
        size_t n = sp_min_size(CHUNK, (size_t)p->n - at);
        sample_chunk(j, (size_t)(p->start + at * p->stride), (size_t)p->stride, n, chunk);
        for (size_t i = 0; i < n; i++) {
            x[n_found] = chunk[i];
            n_found += chunk[i] >= least;
        }
    }
    return n_found;
}

/* The threshold: about `density` of the sampled entries have this magnitude or more. Most samples lie far below
 * it, and selecting among all of them takes as long as the rest of the pruning. So we look first at those above
 * three quarters of the last threshold. If these are too few, we look at all. Both give the same result. */
static double sampled_threshold(const struct job *j)
{
    uint64_t *x = j->plan->magnitudes;
    sp_prune_sample p = sp_prune_sample_of(j->segment->n_elems, j->density, j->o->sample, j->o->seed,
                                           j->segment->key, j->segment->state->step);
    uint64_t rank = sp_prune_rank(p.n, (double)j->density);
    uint32_t least = sp_prune_magnitude(j->segment->state->threshold * 0.75, true);
    size_t n = sample_above(j, &p, least, x);
    if (n < rank)
        n = sample_above(j, &p, 0, x);
    return (double)sp_f32_from_bits((uint32_t)select_largest(x, n, (size_t)rank));
}

static sp_prune_args run_of(const struct job *j, size_t from, size_t n)
{
    const spccl_prune_segment *s = j->segment;
    return (sp_prune_args){.grad = j->grad + from * j->elem_bytes,
                           .residual = residual_at(j, from),
                           .residual_bf16 = j->o->residual_bf16 != 0,
                           .sent = sent_at(j, from),
                           .sent_dtype = (spccl_dtype)j->o->sent_dtype,
                           .velocity = velocity_at(j, from),
                           .n = n,
                           .dtype = j->plan->dtype,
                           .factors = &j->f,
                           .random = sp_prune_random_of(j->o->seed, s->key, s->state->step),
                           .first = from};
}

static void count(struct job *j, sp_prune_args a)
{
    j->n_sent += a.n_sent;
    j->n_nonfinite += a.n_nonfinite;
}

/* Let the kernel prefetch the next segment. Its sample will touch most cache lines of a short segment. That takes
 * longer than pruning it, if they are not in the cache. A long segment does not fit into the L2 cache, and its sample
 * touches few lines of it. */
static void prefetch_next_segment(const struct job *j, sp_prune_args *a)
{
    const spccl_prune_segment *next = j->next, *now = j->segment;
    if (next == NULL || next->n_elems > SP_PRUNE_BLOCK_ELEMS)
        return;
    a->next[0] = j->grad + (next->begin - now->begin) * j->elem_bytes;
    a->next_bytes[0] = next->n_elems * j->elem_bytes;
    a->next[1] = next->residual;
    a->next_bytes[1] = next->residual != NULL ? next->n_elems * j->residual_bytes : 0;
    a->next[2] = next->velocity;
    a->next_bytes[2] = next->velocity != NULL ? next->n_elems * j->state_bytes : 0;
}

static double next_larger(const struct job *j, double threshold)
{
    return j->state_bytes == sizeof(double) ? nextafter(threshold, INFINITY)
                                            : (double)nextafterf((float)threshold, INFINITY);
}

/* Prune elements [from, from + n) of the segment with another threshold and no bound. */
static sp_prune_args prune_with(struct job *j, size_t from, size_t n, double threshold)
{
    double before = j->f.threshold;
    sp_prune_args a = run_of(j, from, n);
    j->f.threshold = threshold;
    a.most = UINT64_MAX;
    j->plan->kernels->prune(&a);
    j->f.threshold = before;
    return a;
}

/* Prune [from, from + n). More than `most` elements reach the threshold: send the `most` largest. Among equal
 * elements the first ones are sent. */
static void prune_largest(struct job *j, size_t from, size_t n, size_t most)
{
    uint64_t *x = j->plan->magnitudes, least;
    size_t n_ties = most; /* elements equal to `least` that may still be sent */
    size_t cut = 0;       /* end of the range in which they are sent */
    if (most == 0) {
        count(j, prune_with(j, from, n, INFINITY));
        return;
    }
    for (size_t i = 0; i < n; i++)
        x[i] = magnitude(j, from + i);
    least = select_largest(x, n, most);
    for (size_t i = 0; i < n; i++)
        n_ties -= x[i] > least;
    for (; cut < n && n_ties > 0; cut++)
        n_ties -= magnitude(j, from + cut) == least;
    count(j, prune_with(j, from, cut, value_from_bits(least)));
    count(j, prune_with(j, from + cut, n - cut, next_larger(j, value_from_bits(least))));
}

/* Whether all elements of the segment are 0 or -0. */
static bool gradient_is_zero(const struct job *j)
{
    size_t n = j->segment->n_elems;
    for (size_t i = 0; i < n; i++)
        if (value_of(j->plan->dtype, j->grad + i * j->elem_bytes) != 0)
            return false;
    return true;
}

static void prune_segment(struct job *j)
{
    size_t n_elems = j->segment->n_elems;
    double density = (double)j->density, n_wanted = fmax(1, density * (double)n_elems);
    bool samples = !j->f.whole && j->o->keep_thresholds == 0;
    if (samples)
        j->segment->state->threshold = j->f.threshold = sampled_threshold(j);
    for (size_t at = 0; at < n_elems; at += SP_PRUNE_BLOCK_ELEMS) {
        size_t n = sp_min_size(SP_PRUNE_BLOCK_ELEMS, n_elems - at);
        double left = ceil(MAX_OVERSHOOT * n_wanted) - (double)(j->n_sent - j->n_nonfinite);
        double share = ceil(density * (double)(at + n)) - ceil(density * (double)at);
        double most = fmax(left, share); /* the shares of all blocks add up to the wanted number */
        sp_prune_args a = run_of(j, at, n);
        a.most = samples && most < (double)n ? (uint64_t)most : UINT64_MAX;
        if (samples && at + n == n_elems)
            prefetch_next_segment(j, &a);
        j->plan->kernels->prune(&a);
        count(j, a);
        if (a.n_done < n)
            prune_largest(j, at + a.n_done, n - a.n_done, (size_t)(a.most - (a.n_sent - a.n_nonfinite)));
    }
    sp_prune_advance(j->o, j->segment->state, j->n_sent, j->n_nonfinite);
}

static void prune_one(const spccl_prune_plan *plan, const spccl_prune_options *o,
                      const spccl_prune_segment *s, const spccl_prune_segment *next, void *grad)
{
    struct job j = {.plan = plan,
                    .o = o,
                    .segment = s,
                    .next = next,
                    .grad = grad,
                    .elem_bytes = sp_dtype_bytes(plan->dtype),
                    .state_bytes = plan->dtype == SPCCL_FLOAT64 ? 8 : 4,
                    .residual_bytes = o->residual_bf16 != 0          ? 2
                                      : plan->dtype == SPCCL_FLOAT64 ? 8
                                                                     : 4,
                    .f = sp_prune_factors_now(o, s, plan->dtype == SPCCL_FLOAT64),
                    .density = sp_prune_density(o, s->state->step)};
    if (o->skip_zeros == 0 || !gradient_is_zero(&j)) {
        prune_segment(&j);
        return;
    }
    if (o->sent != NULL)
        memset(sent_at(&j, 0), 0, s->n_elems * sizeof(uint16_t));
    sp_prune_advance_skipped(s->state);
}

void sp_prune_segment_run(const spccl_prune_plan *plan, const spccl_prune_options *o,
                          const spccl_prune_segment *s, void *grad)
{
    prune_one(plan, o, s, NULL, grad);
}

spccl_status spccl_prune(spccl_prune_plan *plan, void *grad, const spccl_prune_options *options)
{
    spccl_prune_options o;
    SP_TRY(sp_prune_options_get(plan, grad, false, options, "spccl_prune", &o));
    if (o.norm != NULL)
        o.squares[o.square] = sp_prune_square_now(&o, plan->dtype == SPCCL_FLOAT64);
    for (size_t i = 0; i < plan->n_segments; i++) {
        const spccl_prune_segment *s = &plan->segments[i].prune;
        size_t k = i + 1; /* the next segment that is sampled */
        while (k < plan->n_segments && plan->segments[k].prune.whole != 0)
            k++;
        prune_one(plan, &o, s, k < plan->n_segments ? &plan->segments[k].prune : NULL,
                  (uint8_t *)grad + s->begin * sp_dtype_bytes(plan->dtype));
    }
    return SPCCL_OK;
}
