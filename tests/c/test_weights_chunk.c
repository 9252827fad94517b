/* test_weights_chunk.c - spccl_weights_send by chunks, on the host: exactly the largest k of each chunk, ties, the
 * two levels, weights that are not finite, bad input. What is wanted is computed here from sorted copies. */
#include "core/base/chunk_rule.h"
#include "prune_arrays.h"

#define N 9000u
#define N_WHOLE 300u
#define LEFT_OUT 5u /* elements of the buffer before the first segment */

static struct weights {
    double own[N + N_WHOLE], common[N + N_WHOLE], before[N + N_WHOLE], out[LEFT_OUT + N + N_WHOLE];
    spccl_prune_state states[2];
} a;

static void *at(spccl_dtype dtype, double *x, size_t i)
{
    return (uint8_t *)x + i * spccl_dtype_bytes(dtype);
}

/* How the differences are distributed. */
enum kind { NORMAL, SPARSE, EQUAL, WIDE, TINY, N_KINDS };

static double difference(enum kind kind, size_t i)
{
    double sign = test_rand() % 2 != 0 ? 1 : -1;
    switch (kind) {
    case NORMAL:
        return normal();
    case SPARSE:
        return i % 37 == 0 ? normal() : 0;
    case EQUAL: /* few magnitudes, each many times */
        return sign * (double)(1 + i % 3);
    case WIDE: /* magnitudes of all sizes */
        return sign * ldexp(1 + uniform(), (int)(test_rand() % 200) - 100);
    case TINY: /* denormals of float32 */
        return sign * ldexp((double)(test_rand() % 4096), -149);
    case N_KINDS:
        break;
    }
    return 0;
}

/* A segment that is pruned, and one that is sent whole. */
static spccl_weights_plan *make(spccl_dtype dtype, enum kind kind)
{
    spccl_weights_segment segments[2];
    spccl_weights_plan *plan = NULL;
    memset(&a, 0, sizeof a);
    for (size_t i = 0; i < N + N_WHOLE; i++) {
        double z = kind == NORMAL ? normal() : 0;
        put(dtype, a.common, i, z);
        put(dtype, a.own, i, z + difference(kind, i));
    }
    memcpy(a.before, a.own, sizeof a.own);
    for (size_t i = 0; i < LEFT_OUT + N + N_WHOLE; i++)
        put(dtype, a.out, i, 77);
    for (size_t i = 0; i < 2; i++)
        segments[i] = (spccl_weights_segment){.begin = LEFT_OUT + i * N,
                                              .n_elems = i == 0 ? N : N_WHOLE,
                                              .own = at(dtype, a.own, i * N),
                                              .shared = at(dtype, a.common, i * N),
                                              .state = &a.states[i],
                                              .whole = i == 1};
    CHECK_OK(spccl_weights_plan_create(segments, 2, LEFT_OUT + N + N_WHOLE, dtype, -1, &plan));
    return plan;
}

static double change_of(spccl_dtype dtype, size_t i)
{
    double w = get(dtype, a.before, i), z = get(dtype, a.common, i);
    return dtype == SPCCL_FLOAT64 ? w - z : (double)((float)w - (float)z);
}

static uint32_t rank_of(spccl_dtype dtype, size_t i)
{
    return sp_prune_magnitude(change_of(dtype, i), true);
}

static int falling(const void *x, const void *y)
{
    uint32_t a_bits = *(const uint32_t *)x, b_bits = *(const uint32_t *)y;
    return a_bits < b_bits ? 1 : a_bits > b_bits ? -1 : 0;
}

/* Which elements [from, from + n) are to be sent: those above the k-th largest, and the first ones equal to it. */
static size_t wanted_of(spccl_dtype dtype, size_t from, size_t n, size_t k, bool *out)
{
    static uint32_t sorted[SP_CHUNK_MOST];
    size_t n_ties = k, n_sent = 0;
    for (size_t i = 0; i < n; i++)
        sorted[i] = rank_of(dtype, from + i);
    qsort(sorted, n, sizeof *sorted, falling);
    for (size_t i = 0; i < n && sorted[i] > sorted[k - 1]; i++)
        n_ties--;
    for (size_t i = 0; i < n; i++) {
        uint32_t m = rank_of(dtype, from + i);
        out[i] = m > sorted[k - 1] || (m == sorted[k - 1] && n_ties > 0);
        n_ties -= out[i] && m == sorted[k - 1];
        out[i] = out[i] && m != 0;
        n_sent += out[i];
    }
    return n_sent;
}

static void check_kept(spccl_dtype dtype, size_t i, double s, double leak)
{
    double w = get(dtype, a.before, i), z = get(dtype, a.common, i), kept = get(dtype, a.own, i);
    double d = change_of(dtype, i);
    double wanted = dtype == SPCCL_FLOAT64 ? leak * (d - s) + z
                                           : (double)((float)leak * ((float)d - (float)s) + (float)z);
    if (s == 0 && leak == 1)
        wanted = w; /* without the rounding of d */
    CHECK(kept == wanted, "element %zu: own weight %g, wanted %g", i, kept, wanted);
    if (s == change_of(dtype, i) && s != 0)
        CHECK(kept == z, "element %zu was sent: %g is not the common weight %g", i, kept, z);
}

/* At most two magnitudes, both in bfloat16, that the sent elements are rounded to in their order. */
static void check_levels(spccl_dtype dtype, size_t from, size_t n, const bool *sent, double scale)
{
    double low = INFINITY, high = 0, sum_sent = 0, sum = 0, most = 0;
    for (size_t i = 0; i < n; i++)
        if (sent[i]) {
            double s = fabs(get(dtype, a.out, LEFT_OUT + from + i)) / scale,
                   d = fabs(change_of(dtype, from + i));
            low = fmin(low, s), high = fmax(high, s), sum_sent += s, sum += d, most = fmax(most, d);
        }
    for (size_t i = 0; i < n; i++)
        if (sent[i]) {
            double s = get(dtype, a.out, LEFT_OUT + from + i) / scale, d = change_of(dtype, from + i);
            CHECK(fabs(s) == low || fabs(s) == high, "element %zu: %g is neither %g nor %g", i, s, low, high);
            CHECK(s == 0 || (s < 0) == (d < 0), "element %zu: %g for %g", i, s, d);
        }
    CHECK(fabs(sum_sent - sum) <= sum / 250 + (most * 0x1p-23 + 0x1p-133) * (double)n,
          "sum of magnitudes %g, wanted %g", sum_sent, sum);
    CHECK(isinf(low) || (sp_f32_to_bits((float)low) % 65536 == 0 && sp_f32_to_bits((float)high) % 65536 == 0),
          "levels %g, %g are not bfloat16", low, high);
}

static void check_chunks(spccl_dtype dtype, const spccl_weights_options *o)
{
    static bool sent[SP_CHUNK_MOST];
    uint64_t n_sent = 0;
    for (size_t from = 0; from < N; from += o->chunk) {
        size_t n = N - from < o->chunk ? N - from : o->chunk;
        size_t k = (size_t)fmax(1, floor(o->density * (double)n + 0.5));
        size_t n_here = wanted_of(dtype, from, n, k, sent);
        CHECK(n_here <= k, "%zu of %zu", n_here, k);
        for (size_t i = 0; i < n; i++) {
            double s = get(dtype, a.out, LEFT_OUT + from + i), d = change_of(dtype, from + i);
            if (o->levels == 0)
                CHECK(s == (sent[i] ? d * o->scale : 0), "element %zu: sent %g of %g", from + i, s, d);
            CHECK(sent[i] || s == 0, "element %zu was sent", from + i);
            check_kept(dtype, from + i, s / o->scale, o->leak);
            n_sent += s != 0;
        }
        if (o->levels != 0)
            check_levels(dtype, from, n, sent, o->scale);
    }
    CHECK(a.states[0].n_sent == n_sent && a.states[0].step == 1, "%llu counted as sent, wanted %llu",
          (unsigned long long)a.states[0].n_sent, (unsigned long long)n_sent);
}

static void test_chunks(void)
{
    static const uint32_t chunks[] = {256, 1024, 4096};
    static const double densities[] = {0.0001, 0.01, 0.085, 0.5, 0.999};
    for (int round = 0; round < 180; round++) {
        spccl_dtype dtype = round % 2 != 0 ? SPCCL_FLOAT64 : SPCCL_FLOAT32;
        spccl_weights_options o = SPCCL_WEIGHTS_OPTIONS_INIT;
        spccl_weights_plan *plan = make(dtype, (enum kind)(round % N_KINDS));
        o.chunk = chunks[round % 3];
        o.density = densities[round / 2 % 5];
        o.levels = round % 4 < 2 ? 2 : 0;
        o.leak = round % 7 < 3 ? 1 : 0.75;
        o.scale = round % 9 < 7 || round % N_KINDS == TINY ? 1 : 0.25; /* denormals would be rounded */
        CHECK_OK(spccl_weights_send(plan, a.out, &o, NULL));
        check_chunks(dtype, &o);
        for (size_t i = N; i < N + N_WHOLE; i++)
            CHECK(get(dtype, a.out, LEFT_OUT + i) == change_of(dtype, i) * o.scale, "whole: element %zu", i);
        for (size_t i = 0; i < LEFT_OUT; i++)
            CHECK(get(dtype, a.out, i) == 77, "an element of no segment was written");
        spccl_weights_plan_destroy(plan);
    }
}

/* Density 1 sends everything as it is, also with levels. */
static void test_all(void)
{
    spccl_weights_options o = SPCCL_WEIGHTS_OPTIONS_INIT;
    spccl_weights_plan *plan = make(SPCCL_FLOAT32, NORMAL);
    o.chunk = 4096, o.levels = 2, o.density = 1;
    CHECK_OK(spccl_weights_send(plan, a.out, &o, NULL));
    for (size_t i = 0; i < N + N_WHOLE; i++)
        CHECK(get(SPCCL_FLOAT32, a.out, LEFT_OUT + i) == change_of(SPCCL_FLOAT32, i), "element %zu", i);
    spccl_weights_plan_destroy(plan);
}

static void test_nonfinite(void)
{
    for (int d = 0; d < 4; d++) {
        spccl_dtype dtype = d % 2 != 0 ? SPCCL_FLOAT64 : SPCCL_FLOAT32;
        spccl_weights_options o = SPCCL_WEIGHTS_OPTIONS_INIT;
        spccl_weights_plan *plan = make(dtype, NORMAL);
        static const size_t bad[] = {0, 255, 256, 8999};
        for (size_t i = 0; i < 4; i++)
            put(dtype, a.own, bad[i], i == 0 ? NAN : i % 2 != 0 ? INFINITY : -INFINITY);
        o.chunk = 256;
        o.levels = d < 2 ? 0 : 2;
        CHECK_OK(spccl_weights_send(plan, a.out, &o, NULL));
        for (size_t i = 0; i < 4; i++)
            CHECK(get(dtype, a.out, LEFT_OUT + bad[i]) == 0 &&
                      get(dtype, a.own, bad[i]) == get(dtype, a.common, bad[i]),
                  "element %zu: sent %g", bad[i], get(dtype, a.out, LEFT_OUT + bad[i]));
        CHECK(a.states[0].n_nonfinite_all == 4, "%llu not finite, wanted 4",
              (unsigned long long)a.states[0].n_nonfinite_all);
        CHECK(a.states[0].n_sent == 35 * 3 + 1, "%llu sent, wanted 3 of each 256 and 1 of the last 40",
              (unsigned long long)a.states[0].n_sent);
        spccl_weights_plan_destroy(plan);
    }
}

static void test_bad_input(void)
{
    spccl_weights_plan *plan = make(SPCCL_FLOAT32, NORMAL);
    static const uint32_t bad[] = {1, 128, 1000, 8192};
    spccl_weights_options o = SPCCL_WEIGHTS_OPTIONS_INIT;
    for (size_t i = 0; i < 4; i++) {
        o.chunk = bad[i];
        CHECK_FAILS(spccl_weights_send(plan, a.out, &o, NULL), SPCCL_ERR_ARG,
                    "a power of 2 from 256 to 4096");
    }
    o.chunk = 256, o.levels = 3;
    CHECK_FAILS(spccl_weights_send(plan, a.out, &o, NULL), SPCCL_ERR_ARG,
                "options.levels is 3 with chunk 256");
    o.levels = 0, o.keep_thresholds = 1;
    CHECK_FAILS(spccl_weights_send(plan, a.out, &o, NULL), SPCCL_ERR_ARG, "chunks have no threshold");
    o.keep_thresholds = 0;
    o.chunk = 0, o.levels = 2;
    CHECK_FAILS(spccl_weights_send(plan, a.out, &o, NULL), SPCCL_ERR_ARG, "options.levels is 2 with chunk 0");
    spccl_weights_plan_destroy(plan);
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {{"chunks", test_chunks},
                                             {"all", test_all},
                                             {"nonfinite", test_nonfinite},
                                             {"bad_input", test_bad_input},
                                             {NULL, NULL}};
    return test_main(cases, argc, argv);
}
