/* prune_rule.h - what pruning does with one element, and where its thresholds come from. The C code here
 * defines the result: every kernel, on CPU and GPU, gives the same bits for given thresholds.
 *
 * Symbols: g gradient, r residual, u velocity, m momentum, l leak, t threshold. One step is
 *     u = m u + g;   v = l r + u;   send s = v unless |v| < t, else s = 0;   r = v - s;   u = 0 where sent
 * Without momentum u is g. Without a residual v is u, and what is not sent is dropped.
 *
 * Sources: Lin et al. 2018, "Deep Gradient Compression", sections 3.1 (error feedback), 3.2 (momentum
 * correction, momentum factor masking) and 5 (threshold from a sample); Hough et al., "SpCCL", section VI.B.
 * The threshold comes from a fresh sample in each step. A threshold that is carried along and corrected by
 * how much was sent swings: with error feedback the residual piles up below it, and a small change of the
 * threshold changes the density many times as much (simulated: densities from 0 to 7 times the wanted one).
 */
#ifndef SP_PRUNE_RULE_H
#define SP_PRUNE_RULE_H

#include "core/base/dtype.h"

#include <float.h>
#include <math.h>

/* Elements of a sample that should lie above the threshold. With 32, the number that is sent of one segment
 * varies by 18% (one standard deviation) from step to step, and the sum over a model by a few percent. */
#define SP_PRUNE_SAMPLE_HITS 32u
/* Most samples of a segment. The sampling kernel keeps them in the shared memory of a CTA, 4 bytes each. Every
 * supported GPU has 99 KiB of it. Below a density of 1 / 24576 a sample finds no threshold that is high enough,
 * and more than the wanted density is sent. */
#define SP_PRUNE_SAMPLES_MAX 24576u

/* Factors of one step, the same for all elements of a segment. Kernels of a float32 state round them to float32.
 */
typedef struct sp_prune_factors {
    double momentum, leak; /* a change of loss scale is part of both */
    double rescale;        /* that change alone: the new loss scale / the one that r and u contain */
    double gradient;       /* multiplies g first (clipping) */
    double scale;          /* multiplies what is sent, and nothing that is kept */
    double threshold;
    bool whole; /* everything is sent, and the velocity is kept where it was sent */
} sp_prune_factors;

/* sp_prune_elem_NAME: one element, before v is rounded to the gradient's dtype. TYPE is the dtype of the state:
 * float (gradients of float32, float16 and bfloat16) or double. r is used only if has_r, u only if has_u. */
#define SP_PRUNE_ELEM(NAME, TYPE, IS_FINITE, ABS)                                                            \
    typedef struct sp_prune_##NAME {                                                                         \
        TYPE v, u;                                                                                           \
        bool sent;   /* false: s = +0 and r = v */                                                           \
        bool finite; /* false: g is sent as it is, and r and u are rescaled */                               \
    } sp_prune_##NAME;                                                                                       \
    /* r or u where g or v is not finite. What would not be finite in the new loss scale stays. */           \
    static inline SP_HD TYPE sp_prune_rescaled_##NAME(TYPE kept, const sp_prune_factors_##NAME *f)           \
    {                                                                                                        \
        TYPE now = kept * f->rescale;                                                                        \
        return IS_FINITE(now) ? now : kept;                                                                  \
    }                                                                                                        \
    static inline SP_HD sp_prune_##NAME sp_prune_elem_##NAME(TYPE g, TYPE r, TYPE u, bool has_r, bool has_u, \
                                                             const sp_prune_factors_##NAME *f)               \
    {                                                                                                        \
        sp_prune_##NAME e;                                                                                   \
        TYPE x = g * f->gradient;                                                                            \
        TYPE velocity = has_u ? f->momentum * u + x : x;                                                     \
        e.v = has_r ? f->leak * r + velocity : velocity;                                                     \
        e.finite = IS_FINITE(g) && IS_FINITE(e.v);                                                           \
        e.sent = f->whole || (!(ABS(e.v) < f->threshold) && e.v != 0);                                       \
        e.u = e.sent && !f->whole ? 0 : velocity;                                                            \
        return e;                                                                                            \
    }

#define SP_PRUNE_FACTORS(NAME, TYPE)                                                                         \
    typedef struct sp_prune_factors_##NAME {                                                                 \
        TYPE momentum, leak, rescale, gradient, scale, threshold;                                            \
        bool whole;                                                                                          \
    } sp_prune_factors_##NAME;                                                                               \
    static inline SP_HD sp_prune_factors_##NAME sp_prune_factors_of_##NAME(const sp_prune_factors *f)        \
    {                                                                                                        \
        sp_prune_factors_##NAME t;                                                                           \
        t.momentum = (TYPE)f->momentum;                                                                      \
        t.leak = (TYPE)f->leak;                                                                              \
        t.rescale = (TYPE)f->rescale;                                                                        \
        t.gradient = (TYPE)f->gradient;                                                                      \
        t.scale = (TYPE)f->scale;                                                                            \
        t.threshold = (TYPE)f->threshold;                                                                    \
        t.whole = f->whole;                                                                                  \
        return t;                                                                                            \
    }

static inline SP_HD bool sp_f32_is_finite(float x)
{
    return fabsf(x) <= 0x1.fffffep127f;
}
static inline SP_HD bool sp_f64_is_finite(double x)
{
    return fabs(x) <= 0x1.fffffffffffffp1023;
}
SP_PRUNE_FACTORS(f32, float)
SP_PRUNE_FACTORS(f64, double)
SP_PRUNE_ELEM(f32, float, sp_f32_is_finite, fabsf)
SP_PRUNE_ELEM(f64, double, sp_f64_is_finite, fabs)

/* Largest finite value of a 16-bit dtype: what is sent is clamped to it, the rest stays in the residual. */
#define SP_F16_MAX 65504.0f
#define SP_BF16_MAX 0x1.fep127f

/* v rounded to a 16-bit dtype and clamped to its finite range. */
static inline SP_HD uint16_t sp_prune_to_f16(float v)
{
    return sp_f16_from_f32(v > SP_F16_MAX ? SP_F16_MAX : v < -SP_F16_MAX ? -SP_F16_MAX : v);
}
static inline SP_HD uint16_t sp_prune_to_bf16(float v)
{
    return sp_bf16_from_f32(v > SP_BF16_MAX ? SP_BF16_MAX : v < -SP_BF16_MAX ? -SP_BF16_MAX : v);
}
/* A float32 g that is sent as it is in a 16-bit dtype (options.sent): inf and nan stay what they are. */
static inline SP_HD uint16_t sp_prune_as_is_f16(float g)
{
    return sp_f32_is_finite(g) ? sp_prune_to_f16(g) : sp_f16_from_f32(g);
}
static inline SP_HD uint16_t sp_prune_as_is_bf16(float g)
{
    return sp_f32_is_finite(g) ? sp_prune_to_bf16(g) : sp_bf16_from_f32(g);
}

/* ---- a residual of bfloat16 ---- */

/* Decides how the residual of a segment is rounded in one step. */
typedef struct sp_prune_random {
    uint32_t first, second;
} sp_prune_random;

/* All bits of x change all bits of the result (the finalizer of MurmurHash3, Appleby 2011). */
static inline SP_HD uint32_t sp_mix32(uint32_t x)
{
    x = (x ^ x >> 16) * 0x85ebca6bu;
    x = (x ^ x >> 13) * 0xc2b2ae35u;
    return x ^ x >> 16;
}
static inline SP_HD sp_prune_random sp_prune_random_of(uint32_t seed, uint32_t key, uint64_t step)
{
    sp_prune_random k;
    k.first = sp_mix32(sp_mix32(seed + 0x9e3779b9u) ^ key);
    k.first = sp_mix32(sp_mix32(k.first ^ (uint32_t)step) ^ (uint32_t)(step >> 32));
    k.second = sp_mix32(k.first + 0x9e3779b9u);
    return k;
}
/* 16 random bits for element `index` of the segment. */
static inline SP_HD uint32_t sp_prune_random_bits(sp_prune_random k, uint64_t index)
{
    uint32_t x = (uint32_t)index + (uint32_t)(index >> 32) * 0x9e3779b9u + k.first;
    x = (x ^ x >> 16) * 0x85ebca6bu;
    x = (x ^ x >> 13 ^ k.second) * 0xc2b2ae35u;
    return x >> 16;
}
/* v, rounded to one of its two neighbours in bfloat16, to the nearer one more often: of the 65536 possible random
 * bits as many round away from zero as the value of v's low 16 bits, so the mean is v. What bfloat16 holds stays.
 * A v whose neighbour is infinity becomes the largest finite number. */
static inline SP_HD uint16_t sp_bf16_round_randomly(float v, uint32_t random_bits)
{
    uint32_t u = sp_f32_to_bits(v), r = (u + random_bits) >> 16;
    uint32_t overflows = (u & 0x7fffffffu) < 0x7f800000u && (r & 0x7fffu) == 0x7f80u ? 1u : 0u;
    return (uint16_t)(r - overflows);
}

/* ---- samples ---- */

/* Elements start, start + stride, ... of a segment, n of them. */
typedef struct sp_prune_sample {
    uint64_t start, stride, n;
} sp_prune_sample;

/* Most samples of a segment at a density. In the warm-up the density is larger, so the sample is not. */
static inline SP_HD uint64_t sp_prune_samples_most(uint64_t n_elems, float density, double fraction)
{
    double hits = ceil((double)SP_PRUNE_SAMPLE_HITS / (double)density);
    double wanted = ceil(fraction * (double)n_elems);
    if (wanted < hits)
        wanted = hits;
    if (wanted > (double)SP_PRUNE_SAMPLES_MAX)
        wanted = (double)SP_PRUNE_SAMPLES_MAX;
    return wanted < (double)n_elems ? (uint64_t)wanted : n_elems;
}

/* The sample of a segment [n_elems > 0] in a step: never more than SP_PRUNE_SAMPLES_MAX elements. A long stride
 * is 32 i + 1, so that the sample does not follow one column of a matrix. The start depends on seed, key and
 * step alone, so a resumed run samples the same elements. */
static inline SP_HD sp_prune_sample sp_prune_sample_of(uint64_t n_elems, float density, double fraction,
                                                       uint32_t seed, uint32_t key, uint64_t step)
{
    sp_prune_sample p;
    uint64_t n = sp_prune_samples_most(n_elems, density, fraction), mixed;
    p.stride = (n_elems + n - 1) / n;
    if (p.stride > 32)
        p.stride = (p.stride + 30) / 32 * 32 + 1; /* upward, so that there are at most n samples */
    else if (p.stride > 2 && p.stride % 2 == 0)
        p.stride++; /* 16 would sample 8 columns of 128. (3 in place of 2 would be too few samples.) */
    mixed = (uint64_t)(key ^ seed) * 2654435761u + step * 0x9e3779b1u;
    p.start = (mixed & 0xffffffffu) / 128 % p.stride;
    p.n = (n_elems - p.start + p.stride - 1) / p.stride;
    return p;
}

/* |v| of a sample as the bits of a float32, rounded down; 0 if g or v is not finite. Bits are in the order of
 * the magnitudes. Rounding down keeps a float64 gradient of equal elements from having a threshold above them. */
static inline SP_HD uint32_t sp_prune_magnitude(double v, bool finite)
{
    double most = (double)0x1.fffffep127f, a = fabs(v);
    float f = (float)(a < most ? a : most);
    return !finite ? 0 : sp_f32_to_bits(f) - ((double)f > a ? 1u : 0u);
}

/* The threshold is the rank-th largest of n samples, 1 = the largest. */
static inline SP_HD uint64_t sp_prune_rank(uint64_t n, double fraction)
{
    double rank = floor(fraction * (double)n + 0.5);
    return rank < 1 ? 1 : rank > (double)n ? n : (uint64_t)rank;
}

/* ---- one call ---- */

/* Density wanted in a step: 1 in the dense steps, then it falls geometrically during the warm-up. */
static inline SP_HD float sp_prune_density(const spccl_prune_options *o, uint64_t step)
{
    float done;
    if (step < o->dense_steps)
        return 1.0f;
    done = (float)(step - o->dense_steps + 1) / ((float)o->warmup_steps + 1.0f);
    return done >= 1.0f ? (float)o->density : powf((float)o->density, done);
}

/* ---- clipping ---- */

/* The squared norm of this call's part of the gradient, without loss scale. If the part has inf or nan, it is that of
 * the last call whose part had none. norm_is_f64: options.norm is a double. */
static inline SP_HD double sp_prune_square_now(const spccl_prune_options *o, bool norm_is_f64)
{
    double norm = norm_is_f64 ? *(const double *)o->norm : (double)*(const float *)o->norm;
    if (o->loss_scale != NULL && *o->loss_scale != 0)
        norm /= (double)*o->loss_scale;
    norm *= norm;
    return norm <= DBL_MAX ? norm : o->squares[o->square]; /* nan, too, is not <= */
}

/* The factor that bounds the norm of all parts by max_norm. Reads the squares of the other parts in order. Of its own
 * part it reads the stored square only if nothing will be stored, so a thread may store meanwhile. */
static inline SP_HD double sp_prune_clip_factor(const spccl_prune_options *o, bool norm_is_f64)
{
    double sum = 0, factor;
    for (uint32_t i = 0; i < o->n_squares; i++)
        sum += i == o->square ? sp_prune_square_now(o, norm_is_f64) : o->squares[i];
    factor = o->max_norm / sqrt(sum);
    return factor < 1 ? (double)(float)factor : 1; /* rounded as options.factor is */
}

/* The factors of a segment in this call, with the threshold of its state. norm_is_f64: options.norm is a double. */
static inline SP_HD sp_prune_factors sp_prune_factors_now(const spccl_prune_options *o,
                                                          const spccl_prune_segment *s, bool norm_is_f64)
{
    double stored = s->state->loss_scale, now = o->loss_scale != NULL ? (double)*o->loss_scale : 0;
    double ratio = now != 0 && stored != 0 ? now / stored : 1;
    sp_prune_factors f;
    f.momentum = o->momentum * ratio;
    f.leak = o->leak * ratio;
    f.rescale = ratio;
    f.gradient = o->factor != NULL ? (double)*o->factor : 1;
    if (o->norm != NULL)
        f.gradient *= sp_prune_clip_factor(o, norm_is_f64);
    f.scale = o->scale;
    f.threshold = s->state->threshold;
    f.whole = s->whole != 0 || sp_prune_density(o, s->state->step) >= 1;
    return f;
}

/* Update the state after a call. The caller has set the threshold before. */
static inline SP_HD void sp_prune_count(spccl_prune_state *st, uint64_t n_sent, uint64_t n_nonfinite)
{
    st->n_sent = n_sent;
    st->n_sent_all += n_sent;
    st->n_nonfinite_all += n_nonfinite;
    st->step++;
}
static inline SP_HD void sp_prune_advance(const spccl_prune_options *o, spccl_prune_state *st,
                                          uint64_t n_sent, uint64_t n_nonfinite)
{
    if (o->loss_scale != NULL && *o->loss_scale != 0)
        st->loss_scale = (double)*o->loss_scale;
    sp_prune_count(st, n_sent, n_nonfinite);
}

/* Update the state after a call that left the segment alone. */
static inline SP_HD void sp_prune_advance_skipped(spccl_prune_state *st)
{
    st->n_sent = 0;
    st->step++;
}

#endif
