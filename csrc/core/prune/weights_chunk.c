/* weights_chunk.c - spccl_weights_send by chunks, on the host (chunk_rule.h). */
#include "core/base/bits.h"
#include "core/base/chunk_rule.h"
#include "core/prune/prune_plan.h"

#define N_BINS 2048u /* by the upper 11 of 31 bits */

struct chunk {
    uint32_t n, wanted, levels;
    double leak, scale;
    uint64_t n_sent, n_nonfinite; /* so far, in the segment */
    uint32_t magnitudes[SP_CHUNK_MOST], units[SP_CHUNK_MOST];
};

static uint32_t count_from(const uint32_t *x, uint32_t n, uint32_t least)
{
    uint32_t found = 0;
    for (uint32_t i = 0; i < n; i++)
        found += x[i] >= least;
    return found;
}

/* The rank-th largest of x [n], 1 = the largest: the largest value that at least `rank` of x reach. */
static uint32_t kth_magnitude(const uint32_t *x, uint32_t n, uint32_t rank)
{
    uint16_t bins[N_BINS] = {0};
    uint32_t some[SP_CHUNK_MOST], bin = N_BINS, n_some = 0, found;
    for (uint32_t i = 0; i < n; i++)
        bins[x[i] >> 20]++;
    while (bins[--bin] < rank)
        rank -= bins[bin];
    for (uint32_t i = 0; i < n; i++) {
        some[n_some] = x[i];
        n_some += x[i] >> 20 == bin;
    }
    found = bin << 20;
    for (uint32_t bit = 1u << 19; bit != 0; bit >>= 1)
        if (count_from(some, n_some, found | bit) >= rank)
            found |= bit;
    return found;
}

static sp_chunk_pick pick(const struct chunk *c)
{
    const uint32_t *x = c->magnitudes;
    sp_chunk_pick p = {.least = kth_magnitude(x, c->n, c->wanted), .cut = c->n};
    uint32_t n_above = count_from(x, c->n, p.least + 1), n_ties = c->wanted - n_above;
    if (p.least == 0 || count_from(x, c->n, p.least) == c->wanted)
        return p;
    for (p.cut = 0; n_ties > 0; p.cut++)
        n_ties -= x[p.cut] == p.least;
    return p;
}

/* The two levels of what is sent: its magnitudes are turned into units, those of all others into 0. Returns how
 * many units the upper level begins at. */
static uint32_t find_levels(struct chunk *c, sp_chunk_pick p, float levels[2])
{
    uint64_t units = 0, above = 0;
    uint32_t n = 0, n_above = 0, top = 1, middle;
    for (uint32_t i = 0; i < c->n; i++)
        if (sp_chunk_is_sent(c->magnitudes[i], i, p)) {
            uint32_t e = sp_chunk_exponent(c->magnitudes[i]);
            top = e > top ? e : top;
            n++;
        }
    if (n == 0)
        return 0;
    for (uint32_t i = 0; i < c->n; i++) {
        c->units[i] = sp_chunk_is_sent(c->magnitudes[i], i, p) ? sp_chunk_units(c->magnitudes[i], top) : 0;
        units += c->units[i];
    }
    middle = sp_chunk_middle(units, n);
    for (uint32_t i = 0; i < c->n; i++)
        if (c->units[i] >= middle && sp_chunk_is_sent(c->magnitudes[i], i, p)) {
            above += c->units[i];
            n_above++;
        }
    levels[0] = sp_chunk_level(units - above, n - n_above, top);
    levels[1] = sp_chunk_level(above, n_above, top);
    return middle;
}

/* One chunk of own weights w, shared weights z, and where to write. */
#define CHUNK(NAME, TYPE)                                                                                    \
    static void measure_##NAME(struct chunk *c, TYPE *restrict w, const TYPE *restrict z)                    \
    {                                                                                                        \
        for (uint32_t i = 0; i < c->n; i++) {                                                                \
            TYPE d = w[i] - z[i];                                                                            \
            bool finite = sp_##NAME##_is_finite(d);                                                          \
            c->magnitudes[i] = magnitude_##NAME(d, finite);                                                  \
            c->n_nonfinite += !finite;                                                                       \
            w[i] = finite ? w[i] : z[i];                                                                     \
        }                                                                                                    \
    }                                                                                                        \
    static void send_##NAME(struct chunk *c, TYPE *restrict w, const TYPE *restrict z, TYPE *restrict out)   \
    {                                                                                                        \
        float levels[2] = {0, 0};                                                                            \
        sp_chunk_pick p;                                                                                     \
        uint32_t middle;                                                                                     \
        measure_##NAME(c, w, z);                                                                             \
        p = pick(c);                                                                                         \
        middle = c->levels != 0 ? find_levels(c, p, levels) : 0;                                             \
        for (uint32_t i = 0; i < c->n; i++) {                                                                \
            TYPE d = w[i] - z[i], s = sp_chunk_is_sent(c->magnitudes[i], i, p) ? d : 0;                      \
            if (c->levels != 0 && s != 0) {                                                                  \
                TYPE level = (TYPE)levels[c->units[i] >= middle];                                            \
                s = d < 0 ? -level : level;                                                                  \
            }                                                                                                \
            c->n_sent += s != 0;                                                                             \
            out[i] = s != 0 ? s * (TYPE)c->scale : 0;                                                        \
            w[i] = sp_chunk_keep_##NAME(w[i], z[i], s, (TYPE)c->leak);                                       \
        }                                                                                                    \
    }

static uint32_t magnitude_f32(float d, bool finite)
{
    return (sp_f32_to_bits(d) & 0x7fffffffu) & (0 - (uint32_t)finite);
}
static uint32_t magnitude_f64(double d, bool finite)
{
    return sp_prune_magnitude(d, finite);
}
CHUNK(f32, float)
CHUNK(f64, double)

void sp_weights_chunk_run(spccl_dtype dtype, const spccl_weights_options *o, const spccl_weights_segment *s,
                          void *out)
{
    struct chunk c = {.levels = o->levels, .leak = o->leak, .scale = o->scale};
    float *out32 = out, *w32 = s->own;
    double *out64 = out, *w64 = s->own;
    const float *z32 = s->shared;
    const double *z64 = s->shared;
    for (size_t at = 0; at < s->n_elems; at += c.n) {
        c.n = (uint32_t)sp_min_size(o->chunk, s->n_elems - at);
        c.wanted = (uint32_t)sp_prune_rank(c.n, o->density);
        if (dtype == SPCCL_FLOAT64)
            send_f64(&c, w64 + at, z64 + at, out64 + at);
        else
            send_f32(&c, w32 + at, z32 + at, out32 + at);
    }
    sp_prune_count(s->state, c.n_sent, c.n_nonfinite);
}
