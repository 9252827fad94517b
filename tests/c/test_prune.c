/* test_prune.c - spccl_prune: densities over many steps, loss scale, segments, samples, bad input. */
#include "core/base/prune_rule.h"
#include "prune_arrays.h"

static struct arrays before;

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

/* Calls whose gradient is inf, as GradScaler halves its scale: residual and velocity follow the scale, and change in
 * nothing else. */
static void test_skipped_steps(void)
{
    for (int kind = 0; kind < 8; kind++) {
        static const spccl_dtype dtypes[] = {SPCCL_FLOAT32, SPCCL_FLOAT16, SPCCL_BFLOAT16, SPCCL_FLOAT64};
        static uint8_t residual[MAX_N * 8], velocity[MAX_N * 8];
        spccl_dtype dtype = dtypes[kind % 4], st = state_dtype(dtype);
        size_t n = 3000, bytes = n * spccl_dtype_bytes(st);
        spccl_prune_options o = SPCCL_PRUNE_OPTIONS_INIT;
        float scale = 65536;
        struct run run = start(dtype, n, true, true);
        o.momentum = 0.5;
        o.loss_scale = &scale;
        o.residual_bf16 = kind >= 4 && dtype != SPCCL_FLOAT64;
        for (int step = 0; step < 12; step++) {
            bool skipped = step >= 2 && step < 10;
            for (size_t i = 0; i < n; i++)
                put(dtype, got.grad, i, skipped ? (double)INFINITY : normal() * 100);
            CHECK_OK(spccl_prune(run.plan, got.grad, &o));
            if (step == 1) {
                memcpy(residual, got.residual, bytes);
                memcpy(velocity, got.velocity, bytes);
            }
            scale *= skipped ? 0.5f : 1;
            if (step != 9)
                continue;
            for (size_t i = 0; i < n; i++) { /* the scale of the last skipped call is 65536 / 2^7 */
                spccl_dtype rt = o.residual_bf16 != 0 ? SPCCL_BFLOAT16 : st;
                CHECK(get(rt, got.residual, i) == get(rt, residual, i) / 128, "%s: residual %zu",
                      spccl_dtype_name(dtype), i);
                CHECK(get(st, got.velocity, i) == get(st, velocity, i) / 128, "%s: velocity %zu",
                      spccl_dtype_name(dtype), i);
            }
        }
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

/* A plan of several segments gives the bits of plans of one segment each: with sampled thresholds, short and long
 * segments, some of them whole, some without residual or velocity. */
static void test_together_and_alone(void)
{
    static const spccl_dtype dtypes[] = {SPCCL_FLOAT32, SPCCL_BFLOAT16, SPCCL_FLOAT64};
    static const size_t sizes[] = {1500, 7, 66000, 513, 1200, 700};
    static spccl_prune_state states[2][6];
    static struct arrays together;
    for (int round = 0; round < 6; round++) {
        spccl_dtype dtype = dtypes[round % 3];
        size_t e = spccl_dtype_bytes(dtype), state_bytes = spccl_dtype_bytes(state_dtype(dtype)), at = 0;
        spccl_prune_options o = SPCCL_PRUNE_OPTIONS_INIT;
        spccl_prune_segment s[6];
        spccl_prune_plan *plan = NULL;
        o.momentum = 0.9;
        o.residual_bf16 = dtype != SPCCL_FLOAT64 && round >= 3;
        memset(states, 0, sizeof states);
        for (size_t i = 0; i < 6; at += sizes[i++])
            s[i] = (spccl_prune_segment){.begin = at,
                                         .n_elems = sizes[i],
                                         .residual = i == 1 ? NULL : got.residual + at * state_bytes,
                                         .velocity = i == 4 ? NULL : got.velocity + at * state_bytes,
                                         .state = &states[0][i],
                                         .key = (uint32_t)i,
                                         .whole = i == 3};
        fill(&before, dtype, at, false);
        memset(before.residual, 0, sizeof before.residual);
        got = before;
        CHECK_OK(spccl_prune_plan_create(s, 6, at, dtype, -1, &plan));
        for (int step = 0; step < 3; step++)
            CHECK_OK(spccl_prune(plan, got.grad, &o));
        spccl_prune_plan_destroy(plan);
        together = got;
        got = before;
        for (size_t i = 0; i < 6; i++) {
            void *grad = got.grad + s[i].begin * e;
            s[i].begin = 0;
            s[i].state = &states[1][i];
            CHECK_OK(spccl_prune_plan_create(&s[i], 1, sizes[i], dtype, -1, &plan));
            for (int step = 0; step < 3; step++)
                CHECK_OK(spccl_prune(plan, grad, &o));
            spccl_prune_plan_destroy(plan);
        }
        CHECK(memcmp(&got, &together, sizeof got) == 0, "round %d: gradient or state", round);
        CHECK(memcmp(states[0], states[1], sizeof states[0]) == 0, "round %d: counts or thresholds", round);
    }
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
        CHECK(p.stride <= 2 || p.stride % 2 == 1, "stride %llu: few columns of a matrix",
              (unsigned long long)p.stride);
        CHECK(p.start + (p.n - 1) * p.stride < n, "the last sample of %llu elements", (unsigned long long)n);
        CHECK((double)p.n + 1 >= least / 2, "%llu samples, wanted %g", (unsigned long long)p.n, least / 2);
    }
}

/* What is sent in 16 bits lies beside the gradient, which stays: of several segments, of one with so many equal elements
 * that their number is bounded, and of one that is skipped. What is sent and kept adds up to what was there. */
static void test_sent_apart(void)
{
    enum { N = 3 * 1000 + 100000, SKIPPED = 2000, LONG = 3000, END = N };
    static float g[N], kept[N], earlier[N];
    static uint16_t sent[N + 1];
    static spccl_prune_state states[4];
    static const size_t begins[] = {0, 1000, SKIPPED, LONG, END};
    spccl_prune_segment s[4];
    spccl_prune_options o = SPCCL_PRUNE_OPTIONS_INIT;
    spccl_prune_plan *plan = NULL;
    for (size_t i = 0; i < 4; i++)
        s[i] = (spccl_prune_segment){.begin = begins[i],
                                     .n_elems = begins[i + 1] - begins[i],
                                     .residual = kept + begins[i],
                                     .state = &states[i],
                                     .key = (uint32_t)i,
                                     .whole = i == 1};
    o.density = 0.05;
    o.skip_zeros = 1;
    o.sent = sent + 1;
    o.sent_dtype = SPCCL_BFLOAT16;
    CHECK_OK(spccl_prune_plan_create(s, 4, N, SPCCL_FLOAT32, -1, &plan));
    for (int step = 0; step < 5; step++) {
        memset(sent, POISON, sizeof sent);
        for (size_t i = 0; i < N; i++)
            g[i] = i >= SKIPPED && i < LONG ? 0 : i >= LONG && i % 2 == 0 ? 3.001f : (float)normal();
        memcpy(earlier, kept, sizeof kept);
        CHECK_OK(spccl_prune(plan, g, &o));
        for (size_t i = 0; i < N; i++) {
            float value = sp_bf16_to_f32(sent[i + 1]);
            CHECK(kept[i] + value == earlier[i] + g[i] && (value == 0 || i < SKIPPED || i >= LONG),
                  "step %d, element %zu: %g is sent and %g kept of %g", step, i, (double)value,
                  (double)kept[i], (double)(earlier[i] + g[i]));
        }
    }
    CHECK(states[3].n_sent > 1000 && states[3].n_sent <= 5 * 5000, "%llu sent",
          (unsigned long long)states[3].n_sent);
    spccl_prune_plan_destroy(plan);
}

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
    o.residual_bf16 = 2;
    CHECK_FAILS(spccl_prune(plan, got.grad, &o), SPCCL_ERR_ARG, "options.residual_bf16 is 2, wanted 0 or 1");
    o = (spccl_prune_options)SPCCL_PRUNE_OPTIONS_INIT;
    o.sent = got.sent;
    o.sent_dtype = SPCCL_FLOAT32;
    CHECK_FAILS(spccl_prune(plan, got.grad, &o), SPCCL_ERR_ARG, "wanted float16 or bfloat16");
    o.sent_dtype = SPCCL_BFLOAT16;
    o.residual_bf16 = 1;
    CHECK_FAILS(spccl_prune(plan, got.grad, &o), SPCCL_ERR_ARG, "residual_bf16 1");
    CHECK_FAILS(spccl_cuda_prune(plan, got.grad, NULL, NULL), SPCCL_ERR_ARG, "host memory");
    spccl_prune_plan_destroy(plan);
    spccl_prune_plan_destroy(NULL);
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {{"density", test_density},
                                             {"schedule_and_scale", test_schedule_and_scale},
                                             {"skipped_steps", test_skipped_steps},
                                             {"segments", test_segments},
                                             {"together_and_alone", test_together_and_alone},
                                             {"skip_zeros", test_skip_zeros},
                                             {"samples", test_samples},
                                             {"sent_apart", test_sent_apart},
                                             {"bad_input", test_bad_input},
                                             {NULL, NULL}};
    return test_main(cases, argc, argv);
}
