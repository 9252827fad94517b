/* test_prune.c - pruning on the host: every kernel set against scalar; scalar against the rule, written again
 * here; densities over many steps; the bound on what is sent; samples; bad input. */
#include "core/format/kernel_table.h"
#include "test.h"

#include <math.h>

#define MAX_N 70001u
#define GUARD 64u
#define POISON 0xa5

static const spccl_dtype dtypes[] = {SPCCL_FLOAT32, SPCCL_FLOAT16, SPCCL_BFLOAT16, SPCCL_FLOAT64};
static const size_t sizes[] = {0, 1, 7, 8, 31, 32, 33, 255, 511, 512, 513, 1027, 3 * 512 + 7};

static double uniform(void)
{
    return (double)(test_rand() >> 11) * 0x1p-53;
}

/* About normal: a sum of uniforms. */
static double normal(void)
{
    double sum = -6;
    for (int i = 0; i < 12; i++)
        sum += uniform();
    return sum;
}

static void put(spccl_dtype dtype, void *x, size_t i, double v)
{
    float f = (float)v;
    uint16_t h = dtype == SPCCL_FLOAT16 ? sp_f16_from_f32(f) : sp_bf16_from_f32(f);
    if (dtype == SPCCL_FLOAT64)
        memcpy((uint8_t *)x + i * 8, &v, 8);
    else if (dtype == SPCCL_FLOAT32)
        memcpy((uint8_t *)x + i * 4, &f, 4);
    else
        memcpy((uint8_t *)x + i * 2, &h, 2);
}

static double get(spccl_dtype dtype, const void *x, size_t i)
{
    double d;
    float f;
    uint16_t h;
    if (dtype == SPCCL_FLOAT64) {
        memcpy(&d, (const uint8_t *)x + i * 8, 8);
        return d;
    }
    if (dtype == SPCCL_FLOAT32) {
        memcpy(&f, (const uint8_t *)x + i * 4, 4);
        return (double)f;
    }
    memcpy(&h, (const uint8_t *)x + i * 2, 2);
    return (double)(dtype == SPCCL_FLOAT16 ? sp_f16_to_f32(h) : sp_bf16_to_f32(h));
}

static spccl_dtype state_dtype(spccl_dtype dtype)
{
    return dtype == SPCCL_FLOAT64 ? SPCCL_FLOAT64 : SPCCL_FLOAT32;
}

/* Gradient, residual and velocity of one case, with poison behind each. */
struct arrays {
    uint8_t grad[MAX_N * 8 + GUARD], residual[MAX_N * 8 + GUARD], velocity[MAX_N * 8 + GUARD];
};
static struct arrays before, want, got;

static double odd_value(void)
{
    static const double odd[] = {0.0,     -0.0,   1.0,     -1.0,    INFINITY, -INFINITY,
                                 NAN,     1e-40,  -1e-40,  65504.0, -65520.0, 3.0e38,
                                 -3.3e38, 1e-310, 1.0e-30, 6.0e-8f, 0.5,      -0.5};
    return odd[test_rand() % (sizeof odd / sizeof *odd)];
}

static void fill(struct arrays *a, spccl_dtype dtype, size_t n, bool odd)
{
    memset(a, POISON, sizeof *a);
    for (size_t i = 0; i < n; i++) {
        put(dtype, a->grad, i, odd && test_rand() % 4 == 0 ? odd_value() : normal());
        put(state_dtype(dtype), a->residual, i, odd && test_rand() % 8 == 0 ? odd_value() : normal());
        put(state_dtype(dtype), a->velocity, i, odd && test_rand() % 8 == 0 ? odd_value() : normal());
    }
}

static sp_prune_args args_of(struct arrays *a, spccl_dtype dtype, size_t n, bool has_r, bool has_u,
                             const sp_prune_factors *f)
{
    return (sp_prune_args){.grad = a->grad,
                           .residual = has_r ? a->residual : NULL,
                           .velocity = has_u ? a->velocity : NULL,
                           .n = n,
                           .dtype = dtype,
                           .factors = f,
                           .most = UINT64_MAX};
}

static sp_prune_factors random_factors(void)
{
    static const double thresholds[] = {0, 0.5, 1, 2, 1e30, 1e-45};
    sp_prune_factors f = {.momentum = test_rand() % 2 != 0 ? (double)0.9f : 0,
                          .leak = test_rand() % 2 != 0 ? 1 : (double)0.99f,
                          .gradient = test_rand() % 2 != 0 ? 1 : (double)0.37f,
                          .scale = test_rand() % 2 != 0 ? 1 : 0.25,
                          .threshold = thresholds[test_rand() % 6],
                          .whole = test_rand() % 8 == 0};
    return f;
}

/* The vector sets give the bits of scalar. */
static void test_sets_agree(void)
{
    for (int round = 0; round < 400; round++) {
        spccl_dtype dtype = dtypes[test_rand() % 4];
        size_t n = sizes[test_rand() % (sizeof sizes / sizeof *sizes)];
        bool has_r = test_rand() % 4 != 0, has_u = test_rand() % 2 != 0;
        sp_prune_factors f = random_factors();
        sp_prune_args w;
        fill(&before, dtype, n, round % 2 != 0);
        want = before;
        w = args_of(&want, dtype, n, has_r, has_u, &f);
        if (round % 3 == 0)
            w.most = test_rand() % (n + 1);
        sp_kernels_at(0)->prune(&w);
        for (size_t k = 0; sp_kernels_at(k) != NULL; k++) {
            sp_prune_args a = args_of(&got, dtype, n, has_r, has_u, &f);
            const char *name = sp_kernels_at(k)->name;
            got = before;
            a.most = w.most;
            sp_kernels_at(k)->prune(&a);
            CHECK(a.n_sent == w.n_sent && a.n_nonfinite == w.n_nonfinite && a.n_done == w.n_done,
                  "%s: %llu sent of %zu, wanted %llu of %zu", name, (unsigned long long)a.n_sent, a.n_done,
                  (unsigned long long)w.n_sent, w.n_done);
            CHECK(a.n_sent - a.n_nonfinite <= a.most, "%s: more than the bound", name);
            CHECK(memcmp(&got, &want, sizeof got) == 0, "%s: %s, n %zu, residual %d, velocity %d, whole %d",
                  name, spccl_dtype_name(dtype), n, has_r, has_u, f.whole);
        }
    }
}

/* One element by the rule of spccl.h, in the arithmetic of the state. */
static void check_element(spccl_dtype dtype, size_t i, bool has_r, bool has_u, const sp_prune_factors *f)
{
    spccl_dtype st = state_dtype(dtype);
    bool wide = st == SPCCL_FLOAT64;
    double g = get(dtype, before.grad, i), r = get(st, before.residual, i), u = get(st, before.velocity, i);
    double x = wide ? g * f->gradient : (double)((float)g * (float)f->gradient);
    double v, s = get(dtype, got.grad, i) / f->scale;
    if (has_u)
        x = wide ? f->momentum * u + x : (double)((float)f->momentum * (float)u + (float)x);
    v = x;
    if (has_r)
        v = wide ? f->leak * r + x : (double)((float)f->leak * (float)r + (float)x);
    if (!isfinite(g) || !isfinite(v)) {
        CHECK(memcmp(got.grad + i * spccl_dtype_bytes(dtype), before.grad + i * spccl_dtype_bytes(dtype),
                     spccl_dtype_bytes(dtype)) == 0,
              "an element that is not finite goes out as it is");
        CHECK(get(st, got.residual, i) == r || isnan(r), "and leaves the residual");
        return;
    }
    if (f->whole || fabs(v) >= f->threshold) {
        double most = dtype == SPCCL_FLOAT16 ? 65504 : dtype == SPCCL_BFLOAT16 ? 0x1.fep127 : INFINITY;
        double step = dtype == SPCCL_FLOAT16 ? 0x1p-11 : dtype == SPCCL_BFLOAT16 ? 0x1p-8 : 0;
        double wanted = fmax(-most, fmin(most, v));
        CHECK(fabs(s - wanted) <= fabs(wanted) * step + 6e-8, "sent %g of %g", s, wanted);
        CHECK(!has_u || f->whole || v == 0 || get(st, got.velocity, i) == 0,
              "the velocity of a sent element");
    } else {
        CHECK(s == 0, "below the threshold, but %g is sent", s);
    }
    CHECK(!has_r || get(st, got.residual, i) + s == v, "%g sent and %g kept of %g", s,
          get(st, got.residual, i), v);
    CHECK(!has_u || !f->whole || get(st, got.velocity, i) == x, "a velocity that is sent whole stays");
}

static void test_rule(void)
{
    for (int round = 0; round < 60; round++) {
        spccl_dtype dtype = dtypes[round % 4];
        bool has_r = test_rand() % 4 != 0, has_u = test_rand() % 2 != 0;
        sp_prune_factors f = random_factors();
        f.scale = 1; /* what it rounds off is not kept */
        sp_prune_args a = args_of(&got, dtype, 1027, has_r, has_u, &f);
        fill(&before, dtype, 1027, round % 3 == 0);
        got = before;
        sp_kernels_at(0)->prune(&a);
        for (size_t i = 0; i < 1027; i++)
            check_element(dtype, i, has_r, has_u, &f);
    }
}

/* ---- spccl_prune ---- */

struct run {
    spccl_prune_plan *plan;
    spccl_prune_state state;
    spccl_dtype dtype;
    size_t n;
};

static struct run start(spccl_dtype dtype, size_t n, bool has_r, bool has_u)
{
    static spccl_prune_state state;
    struct run run = {.dtype = dtype, .n = n};
    spccl_prune_segment s = {.begin = 0,
                             .n_elems = n,
                             .residual = has_r ? got.residual : NULL,
                             .velocity = has_u ? got.velocity : NULL,
                             .state = &state,
                             .key = 7};
    memset(&state, 0, sizeof state);
    memset(got.residual, 0, sizeof got.residual);
    memset(got.velocity, 0, sizeof got.velocity);
    CHECK_OK(spccl_prune_plan_create(&s, 1, n, dtype, -1, &run.plan));
    return run;
}

static size_t count_nonzero(spccl_dtype dtype, const void *x, size_t n)
{
    size_t count = 0;
    for (size_t i = 0; i < n; i++)
        count += get(dtype, x, i) != 0;
    return count;
}

static double make_normal(size_t i)
{
    (void)i;
    return normal();
}
static double make_heavy_tail(size_t i)
{
    (void)i;
    return normal() / pow(uniform() + 1e-4, 1.5);
}
static double make_rows(size_t i)
{
    return i < MAX_N / 20 ? normal() : 0;
}
static double make_zero(size_t i)
{
    (void)i;
    return 0;
}

static void check_density(const char *name, double (*make)(size_t), const spccl_prune_options *o,
                          double wanted, bool has_r)
{
    struct run run = start(SPCCL_FLOAT32, MAX_N, has_r, o->momentum != 0);
    double sum = 0;
    for (int step = 0; step < 30; step++) {
        size_t n;
        for (size_t i = 0; i < MAX_N; i++)
            put(SPCCL_FLOAT32, got.grad, i, make(i));
        CHECK_OK(spccl_prune(run.plan, got.grad, o));
        n = count_nonzero(SPCCL_FLOAT32, got.grad, MAX_N);
        CHECK((double)n <= 5 * o->density * MAX_N, "%s, step %d: %zu sent, more than the bound", name, step,
              n);
        sum += step >= 10 ? (double)n / MAX_N : 0;
    }
    CHECK(sum / 20 >= 0.7 * wanted && sum / 20 <= 1.4 * wanted, "%s: density %g, wanted %g", name, sum / 20,
          wanted);
    spccl_prune_plan_destroy(run.plan);
}

static void test_density(void)
{
    spccl_prune_options o = SPCCL_PRUNE_OPTIONS_INIT;
    check_density("normal", make_normal, &o, 0.01, true);
    check_density("heavy tail", make_heavy_tail, &o, 0.01, true);
    check_density("rows", make_rows, &o, 0.01, true);
    check_density("no residual", make_normal, &o, 0.01, false);
    o.momentum = 0.9;
    check_density("momentum", make_normal, &o, 0.01, true);
    o.momentum = 0;
    o.density = 0.1;
    check_density("10%", make_normal, &o, 0.1, true);
    check_density("zeros", make_zero, &o, 0, true);
}

/* 1 / 3 is no float32: a threshold in float32 must not lie above equal float64 elements. */
static void test_ties_are_cut(void)
{
    for (int round = 0; round < 4; round++) {
        spccl_dtype dtype = round % 2 != 0 ? SPCCL_FLOAT64 : SPCCL_FLOAT32;
        spccl_prune_options o = SPCCL_PRUNE_OPTIONS_INIT;
        struct run run = start(dtype, MAX_N, round >= 2, false);
        for (int step = 0; step < 10; step++) {
            size_t n;
            for (size_t i = 0; i < MAX_N; i++)
                put(dtype, got.grad, i, 1.0 / 3);
            CHECK_OK(spccl_prune(run.plan, got.grad, &o));
            n = count_nonzero(dtype, got.grad, MAX_N);
            CHECK(n > 0 && (double)n <= 5 * o.density * MAX_N, "%zu of equal elements sent", n);
        }
        spccl_prune_plan_destroy(run.plan);
    }
}

/* Dense steps, then the warm-up. A change of loss scale changes the units of the state and nothing else. */
static void test_schedule_and_scale(void)
{
    spccl_prune_options o = SPCCL_PRUNE_OPTIONS_INIT;
    static uint8_t plain[MAX_N * 4];
    float scale = 1024;
    struct run run;
    o.dense_steps = 2;
    o.warmup_steps = 3;
    run = start(SPCCL_FLOAT32, 20000, true, true);
    for (int step = 0; step < 8; step++) {
        double wanted = step < 2 ? 1 : pow(0.01, fmin(1, (step - 1) / 4.0)), n;
        for (size_t i = 0; i < 20000; i++)
            put(SPCCL_FLOAT32, got.grad, i, normal());
        CHECK_OK(spccl_prune(run.plan, got.grad, &o));
        n = (double)count_nonzero(SPCCL_FLOAT32, got.grad, 20000) / 20000;
        CHECK(n > 0.5 * wanted && n < 2 * wanted, "step %d: density %g, wanted %g", step, n, wanted);
    }
    spccl_prune_plan_destroy(run.plan);
    for (int scaled = 0; scaled < 2; scaled++) {
        uint64_t seed = test_rng_state;
        o = (spccl_prune_options)SPCCL_PRUNE_OPTIONS_INIT;
        o.momentum = 0.5;
        o.loss_scale = scaled != 0 ? &scale : NULL;
        run = start(SPCCL_FLOAT32, 20000, true, true);
        test_rng_state = 99;
        for (int step = 0; step < 6; step++) {
            scale = step < 2 ? 1024 : step < 4 ? 64 : 4096;
            for (size_t i = 0; i < 20000; i++)
                put(SPCCL_FLOAT32, got.grad, i, normal() * (scaled != 0 ? (double)scale : 1));
            CHECK_OK(spccl_prune(run.plan, got.grad, &o));
        }
        if (scaled == 0)
            memcpy(plain, got.residual, 20000 * 4);
        else
            for (size_t i = 0; i < 20000; i++)
                CHECK(get(SPCCL_FLOAT32, got.residual, i) == 4096 * get(SPCCL_FLOAT32, plain, i),
                      "element %zu", i);
        test_rng_state = seed;
        spccl_prune_plan_destroy(run.plan);
    }
}

/* Several segments: sent whole, without residual, without velocity. Elements of no segment stay. */
static void test_segments(void)
{
    static spccl_prune_state states[3];
    spccl_prune_segment s[3] = {
        {.begin = 5000, .n_elems = 3000, .residual = got.residual, .state = &states[0], .key = 1},
        {.begin = 10, .n_elems = 100, .state = &states[1], .key = 2, .whole = 1},
        {.begin = 200, .n_elems = 4801 - 1, .velocity = got.velocity, .state = &states[2], .key = 3}};
    spccl_prune_options o = SPCCL_PRUNE_OPTIONS_INIT;
    spccl_prune_plan *plan = NULL;
    memset(states, 0, sizeof states);
    fill(&before, SPCCL_BFLOAT16, 9000, false);
    got = before;
    memset(got.residual, 0, sizeof got.residual);
    memset(got.velocity, 0, sizeof got.velocity);
    CHECK_OK(spccl_prune_plan_create(s, 3, 9000, SPCCL_BFLOAT16, -1, &plan));
    CHECK_OK(spccl_prune(plan, got.grad, &o));
    CHECK(memcmp(got.grad, before.grad, 200 * 2) == 0, "the whole segment, and what lies around it");
    CHECK(memcmp(got.grad + 8000 * 2, before.grad + 8000 * 2, 1000 * 2) == 0, "behind the last segment");
    CHECK(states[0].n_sent == count_nonzero(SPCCL_BFLOAT16, got.grad + 5000 * 2, 3000), "counts");
    CHECK(states[2].n_sent == count_nonzero(SPCCL_BFLOAT16, got.grad + 200 * 2, 4800), "counts");
    CHECK(states[0].step == 1 && states[1].step == 1 && states[2].threshold > 0, "states");
    spccl_prune_plan_destroy(plan);
}

/* With skip_zeros, a segment of zeros keeps residual and velocity and counts a step; others are pruned. */
static void test_skip_zeros(void)
{
    static spccl_prune_state states[2];
    spccl_prune_segment s[2] = {
        {.n_elems = 5000, .residual = got.residual, .velocity = got.velocity, .state = &states[0]},
        {.begin = 5000, .n_elems = 5001, .residual = got.residual + 5000 * 4, .state = &states[1]}};
    spccl_prune_options o = SPCCL_PRUNE_OPTIONS_INIT;
    for (int skip = 0; skip < 2; skip++) {
        spccl_prune_plan *plan = NULL;
        memset(states, 0, sizeof states);
        fill(&before, SPCCL_FLOAT32, 10001, false);
        for (size_t i = 0; i < 5000; i++)
            put(SPCCL_FLOAT32, before.grad, i, i % 2 != 0 ? -0.0 : 0.0);
        memset(before.grad + 5000 * 4, 0, 5000 * 4); /* the last element of the other segment is not zero */
        got = before;
        o.skip_zeros = (uint32_t)skip;
        o.momentum = 0.5;
        CHECK_OK(spccl_prune_plan_create(s, 2, 10001, SPCCL_FLOAT32, -1, &plan));
        CHECK_OK(spccl_prune(plan, got.grad, &o));
        CHECK((memcmp(got.velocity, before.velocity, 5000 * 4) == 0) == (skip != 0) &&
                  (memcmp(got.residual, before.residual, 5000 * 4) == 0) == (skip != 0),
              "state of the segment of zeros");
        CHECK((states[0].n_sent == 0) == (skip != 0) && states[0].step == 1, "%llu sent",
              (unsigned long long)states[0].n_sent);
        CHECK(states[1].n_sent > 0 && states[1].step == 1, "the other segment");
        spccl_prune_plan_destroy(plan);
    }
}

/* Elements that are not finite do not count towards the bound. */
static void test_bound_without_nonfinite(void)
{
    spccl_prune_options o = SPCCL_PRUNE_OPTIONS_INIT;
    struct run run = start(SPCCL_FLOAT32, MAX_N, true, false);
    size_t n = 0;
    for (size_t i = 0; i < MAX_N; i++)
        put(SPCCL_FLOAT32, got.grad, i, i < 65536 ? NAN : 1);
    CHECK_OK(spccl_prune(run.plan, got.grad, &o));
    for (size_t i = 65536; i < MAX_N; i++)
        n += get(SPCCL_FLOAT32, got.grad, i) != 0;
    CHECK(n > 2700 && n < 2900, "%zu finite elements sent, wanted 4 times 1%%", n);
    spccl_prune_plan_destroy(run.plan);
}

/* Every sample lies in its segment, and holds enough elements but not too many. */
static void test_samples(void)
{
    for (int round = 0; round < 20000; round++) {
        uint64_t n = 1 + test_rand() % (UINT64_C(1) << (1 + test_rand() % 36));
        float density = (float)pow(10, -8 * uniform());
        sp_prune_sample p = sp_prune_sample_of(n, density, pow(10, -6 * uniform()), (uint32_t)test_rand(),
                                               (uint32_t)test_rand(), test_rand() % 100000);
        double least = fmin((double)n, fmin(32 / (double)density, SP_PRUNE_SAMPLES_MAX));
        CHECK(p.n >= 1 && p.n <= SP_PRUNE_SAMPLES_MAX && p.stride >= 1, "%llu samples",
              (unsigned long long)p.n);
        CHECK(p.start + (p.n - 1) * p.stride < n, "the last sample of %llu elements", (unsigned long long)n);
        CHECK((double)p.n + 1 >= least / 2, "%llu samples, wanted %g", (unsigned long long)p.n, least / 2);
    }
}

#define CHECK_FAILS(x, status, text)                                                                         \
    do {                                                                                                     \
        spccl_status got_ = (x);                                                                             \
        CHECK(got_ == (status) && strstr(spccl_last_error(), (text)) != NULL, "%s: %s",                      \
              spccl_status_name(got_), spccl_last_error());                                                  \
    } while (0)

static void test_bad_input(void)
{
    static spccl_prune_state state;
    spccl_prune_segment s[2] = {{.begin = 0, .n_elems = 10, .state = &state},
                                {.begin = 9, .n_elems = 5, .state = &state}};
    spccl_prune_options o = SPCCL_PRUNE_OPTIONS_INIT;
    spccl_prune_plan *plan = NULL;
    CHECK_FAILS(spccl_prune_plan_create(s, 2, 20, SPCCL_FLOAT32, -1, &plan), SPCCL_ERR_ARG, "overlap by 1");
    s[1].begin = 16;
    CHECK_FAILS(spccl_prune_plan_create(s, 2, 20, SPCCL_FLOAT32, -1, &plan), SPCCL_ERR_ARG,
                "leaves the gradient");
    s[1].n_elems = 0;
    CHECK_FAILS(spccl_prune_plan_create(s, 2, 20, SPCCL_FLOAT32, -1, &plan), SPCCL_ERR_ARG, "is empty");
    s[1].n_elems = 4;
    s[1].state = NULL;
    CHECK_FAILS(spccl_prune_plan_create(s, 2, 20, SPCCL_FLOAT32, -1, &plan), SPCCL_ERR_ARG, "has no state");
    s[1].state = &state;
    s[1].residual = got.residual + 2;
    CHECK_FAILS(spccl_prune_plan_create(s, 2, 20, SPCCL_FLOAT32, -1, &plan), SPCCL_ERR_ARG, "aligned to 4");
    s[1].residual = NULL;
    CHECK_FAILS(spccl_prune_plan_create(s, 2, 20, SPCCL_INT32, -1, &plan), SPCCL_ERR_DTYPE, "int32");
    CHECK_FAILS(spccl_prune_plan_create(NULL, 2, 20, SPCCL_FLOAT32, -1, &plan), SPCCL_ERR_ARG,
                "segments is NULL");
    CHECK(plan == NULL, "after a failure out is unchanged");
    CHECK_OK(spccl_prune_plan_create(s, 2, 20, SPCCL_FLOAT32, -1, &plan));
    CHECK_FAILS(spccl_prune(plan, NULL, &o), SPCCL_ERR_ARG, "grad is NULL");
    CHECK_FAILS(spccl_prune(NULL, got.grad, &o), SPCCL_ERR_ARG, "plan is NULL");
    o.density = 0;
    CHECK_FAILS(spccl_prune(plan, got.grad, &o), SPCCL_ERR_ARG, "density is 0");
    o.density = NAN;
    CHECK_FAILS(spccl_prune(plan, got.grad, &o), SPCCL_ERR_ARG, "density");
    o.density = 1;
    o.momentum = 1;
    CHECK_FAILS(spccl_prune(plan, got.grad, &o), SPCCL_ERR_ARG, "momentum is 1");
    o.momentum = 0;
    o.scale = 1e39;
    CHECK_FAILS(spccl_prune(plan, got.grad, &o), SPCCL_ERR_ARG, "scale is 1e+39");
    o.scale = -1;
    CHECK_FAILS(spccl_prune(plan, got.grad, &o), SPCCL_ERR_ARG, "scale is -1, wanted a number above 0");
    o.scale = 0;
    CHECK_FAILS(spccl_prune(plan, got.grad, &o), SPCCL_ERR_ARG, "scale is 0");
    o.reserved = 1;
    CHECK_FAILS(spccl_prune(plan, got.grad, &o), SPCCL_ERR_ARG, "options.reserved is 1, wanted 0");
    CHECK_FAILS(spccl_cuda_prune(plan, got.grad, NULL, NULL), SPCCL_ERR_ARG, "host memory");
    spccl_prune_plan_destroy(plan);
    spccl_prune_plan_destroy(NULL);
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {{"sets_agree", test_sets_agree},
                                             {"rule", test_rule},
                                             {"density", test_density},
                                             {"ties_are_cut", test_ties_are_cut},
                                             {"schedule_and_scale", test_schedule_and_scale},
                                             {"segments", test_segments},
                                             {"skip_zeros", test_skip_zeros},
                                             {"bound_without_nonfinite", test_bound_without_nonfinite},
                                             {"samples", test_samples},
                                             {"bad_input", test_bad_input},
                                             {NULL, NULL}};
    return test_main(cases, argc, argv);
}
