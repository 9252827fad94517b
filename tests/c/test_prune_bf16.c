/* test_prune_bf16.c - residuals of bfloat16: every kernel set against scalar; the mean of the rounding; what is sent
 * and kept against the exact sum; a resumed run; bad input. */
#include "core/format/kernel_table.h"
#include "test.h"

#include <math.h>

#define N 4099u

static float grad[N], velocity[N];
static uint16_t half_grad[N], residual[N + 32];

static float normal(void)
{
    double sum = -6;
    for (int i = 0; i < 12; i++)
        sum += (double)(test_rand() >> 11) * 0x1p-53;
    return (float)sum;
}

/* Finite and not, tiny and huge; some as float32 alone holds them. */
static float odd_value(void)
{
    static const float odd[] = {0.0f,   -0.0f,  1.0f,    -1.0f,       INFINITY,         -INFINITY,
                                NAN,    1e-40f, -1e-40f, 0x1.fep127f, -0x1.fffffep127f, 0x1.01p127f,
                                1e-30f, 3e38f};
    return odd[test_rand() % (sizeof odd / sizeof *odd)];
}

/* ---- kernels ---- */

struct outcome {
    uint8_t grad[N * 4];
    uint16_t residual[N + 32];
    float velocity[N];
    uint64_t n_sent, n_nonfinite;
};

static void fill(spccl_dtype dtype, uint8_t *to, bool odd)
{
    memset(residual, 0xa5, sizeof residual);
    for (size_t i = 0; i < N; i++) {
        float g = odd && test_rand() % 4 == 0 ? odd_value() : normal();
        float r = odd && test_rand() % 8 == 0 ? odd_value() : normal();
        uint16_t h = dtype == SPCCL_FLOAT16 ? sp_f16_from_f32(g) : sp_bf16_from_f32(g);
        if (dtype == SPCCL_FLOAT32)
            memcpy(to + i * 4, &g, 4);
        else
            memcpy(to + i * 2, &h, 2);
        residual[i] = sp_bf16_from_f32(r);
        velocity[i] = normal();
    }
}

static void run(const sp_kernels *k, sp_prune_args a, const uint8_t *from, struct outcome *out)
{
    memcpy(out->grad, from, sizeof out->grad);
    memcpy(out->residual, residual, sizeof residual);
    memcpy(out->velocity, velocity, sizeof velocity);
    a.grad = out->grad;
    a.residual = out->residual;
    a.velocity = a.velocity != NULL ? out->velocity : NULL;
    k->prune(&a);
    CHECK(a.n_done == a.n, "%s: %zu of %zu done", k->name, a.n_done, a.n);
    out->n_sent = a.n_sent;
    out->n_nonfinite = a.n_nonfinite;
}

/* The vector sets give the bits of scalar, also where places in the segment pass 2^32. */
static void test_sets_agree(void)
{
    static const spccl_dtype dtypes[] = {SPCCL_FLOAT32, SPCCL_FLOAT16, SPCCL_BFLOAT16};
    static const size_t sizes[] = {0, 1, 7, 31, 33, 511, 512, 513, 1027, N};
    static struct outcome want, got;
    static uint8_t from[N * 4];
    for (int round = 0; round < 200; round++) {
        sp_prune_factors f = {.momentum = 0.9,
                              .leak = round % 3 != 0 ? 1 : 0.99,
                              .rescale = round % 7 < 4   ? 1
                                         : round % 7 < 6 ? 0.5
                                                         : 0.3,
                              .gradient = 1,
                              .scale = round % 5 != 0 ? 1 : 0.25,
                              .threshold = round % 4,
                              .whole = round % 16 == 7};
        sp_prune_args a = {.residual_bf16 = true,
                           .velocity = round % 2 != 0 ? velocity : NULL,
                           .n = sizes[test_rand() % (sizeof sizes / sizeof *sizes)],
                           .dtype = dtypes[round % 3],
                           .factors = &f,
                           .random = sp_prune_random_of((uint32_t)test_rand(), 5, test_rand()),
                           .first = round % 4 == 0 ? UINT32_MAX - test_rand() % 1500 : test_rand() % 100000,
                           .most = UINT64_MAX};
        fill(a.dtype, from, round % 2 == 0);
        run(sp_kernels_at(0), a, from, &want);
        for (size_t k = 1; sp_kernels_at(k) != NULL; k++) {
            run(sp_kernels_at(k), a, from, &got);
            CHECK(memcmp(&got, &want, sizeof got) == 0, "%s: %s, n %zu, first %llu", sp_kernels_at(k)->name,
                  spccl_dtype_name(a.dtype), a.n, (unsigned long long)a.first);
        }
    }
}

/* ---- rounding ---- */

/* One of the two neighbours, and v itself where bfloat16 holds it. */
static void test_neighbours(void)
{
    for (int round = 0; round < 100000; round++) {
        float v = round % 3 == 0 ? odd_value() : normal() * powf(2, (float)(test_rand() % 200) - 100);
        uint32_t u = sp_f32_to_bits(v), down = u & 0xffff0000u;
        uint32_t got = (uint32_t)sp_bf16_round_randomly(v, (uint32_t)(test_rand() & 0xffff)) << 16;
        uint32_t up = (u & 0xffffu) == 0 || v != v ? down : down + 0x10000u;
        if (isfinite(v) && (up & 0x7fffffffu) == 0x7f800000u)
            up = down; /* infinity is never the result */
        CHECK(got == down || got == up || v != v, "%a became %a", (double)v, (double)sp_f32_from_bits(got));
    }
}

/* The mean over `n` steps is v, to within 6 standard deviations. A rounding is a yes or no with the probability p,
 * so its standard deviation is gap * sqrt(p (1 - p)), at most gap / 2. By chance 1 run in 5e8 fails. The sums over
 * elements of one step and over steps of one element must both hold. */
static void check_mean(const char *what, bool over_steps, uint32_t seed)
{
    enum { n = 20000 };
    float v = 1.0f + 0x1p-7f * (float)(0.05 + 0.9 * (double)(test_rand() % 1000) / 1000); /* a gap is 2^-7 */
    double sum = 0, gap = 0x1p-7, bound = 6 * gap / 2 / sqrt((double)n);
    for (uint32_t i = 0; i < n; i++) {
        sp_prune_random k = sp_prune_random_of(seed, 77, over_steps ? i : 3);
        sum += (double)sp_bf16_to_f32(sp_bf16_round_randomly(v, sp_prune_random_bits(k, over_steps ? 9 : i)));
    }
    CHECK(fabs(sum / n - (double)v) < bound, "%s: mean %.9g of %.9g, wanted to within %.2g, seed %u", what,
          sum / n, (double)v, bound, seed);
}

static void test_mean(void)
{
    for (int round = 0; round < 20; round++) {
        uint32_t seed = (uint32_t)test_rand();
        check_mean("over steps", true, seed);
        check_mean("over elements", false, seed);
    }
}

/* Roundings of neighbouring elements, steps and segments are independent: their correlation is 0 to within 6
 * standard deviations (1 / sqrt(n) each). */
static void test_independence(void)
{
    enum { n = 20000 };
    for (int what = 0; what < 3; what++) {
        uint32_t seed = (uint32_t)test_rand();
        double sum = 0;
        for (uint32_t i = 0; i < n; i++) {
            uint32_t next = what == 0 ? i + 1 : i;
            sp_prune_random k = sp_prune_random_of(seed, 1, 5);
            sp_prune_random other = sp_prune_random_of(seed, what == 2 ? 2 : 1, what == 1 ? 6 : 5);
            double x = (double)sp_prune_random_bits(k, i) - 32767.5;
            double y = (double)sp_prune_random_bits(other, next) - 32767.5;
            sum += x * y / (65536.0 * 65536.0 / 12);
        }
        CHECK(fabs(sum / n) < 6 / sqrt((double)n), "%s: correlation %g, seed %u",
              what == 0   ? "elements"
              : what == 1 ? "steps"
                          : "segments",
              sum / n, seed);
    }
}

/* ---- spccl_prune ---- */

static spccl_prune_state state;

static spccl_prune_plan *start(spccl_dtype dtype)
{
    spccl_prune_plan *plan = NULL;
    spccl_prune_segment s = {.n_elems = N, .residual = residual, .state = &state, .key = 7};
    memset(&state, 0, sizeof state);
    memset(residual, 0, sizeof residual);
    CHECK_OK(spccl_prune_plan_create(&s, 1, N, dtype, -1, &plan));
    return plan;
}

static double sum_of_residual(void)
{
    double sum = 0;
    for (size_t i = 0; i < N; i++)
        sum += (double)sp_bf16_to_f32(residual[i]);
    return sum;
}

/* What was sent and what is kept add up to the gradients: not exactly, but without drift. Each step rounds each
 * element once, by less than one gap of bfloat16, 2^-7 |r|; |r| < 8 here. So the standard deviation of the sum is
 * below 2^-7 * 8 / 2 * sqrt(N * steps); the bound is 6 of them. Rounding to nearest fails: each gradient is less
 * than half a gap of the residual that it is added to, and would be lost. */
static void test_adds_up(void)
{
    enum { n_steps = 400 };
    spccl_prune_options o = SPCCL_PRUNE_OPTIONS_INIT;
    spccl_prune_plan *plan = start(SPCCL_FLOAT32);
    double given = 0, sent = 0, bound = 6 * 0x1p-7 * 8 / 2 * sqrt((double)N * n_steps);
    o.residual_bf16 = 1;
    o.keep_thresholds = 1;
    o.seed = (uint32_t)test_rand();
    state.threshold = 5;
    for (int step = 0; step < n_steps; step++) {
        for (size_t i = 0; i < N; i++) {
            grad[i] = step == 0 ? 4 : 0.005f; /* half a gap of 4 is 0.0156 */
            given += (double)grad[i];
        }
        CHECK_OK(spccl_prune(plan, grad, &o));
        for (size_t i = 0; i < N; i++)
            sent += (double)grad[i];
    }
    CHECK(fabs(sent + sum_of_residual() - given) < bound,
          "%g sent and kept of %g, wanted to within %g, seed %u", sent + sum_of_residual(), given, bound,
          o.seed);
    CHECK(bound < 0.2 * 0.005 * N * n_steps, "the bound finds a rounding to nearest");
    spccl_prune_plan_destroy(plan);
}

/* Steps 0 to 7, against steps 0 to 3, then 4 to 7 with a plan of its own and a saved state. */
static void test_resume(void)
{
    static uint16_t whole[N], saved[N];
    spccl_prune_options o = SPCCL_PRUNE_OPTIONS_INIT;
    spccl_prune_state saved_state = {0};
    o.residual_bf16 = 1;
    o.seed = 11;
    for (int resumed = 0; resumed < 2; resumed++) {
        spccl_prune_plan *plan = start(SPCCL_BFLOAT16);
        test_rng_state = 5;
        for (int step = 0; step < 8; step++) {
            if (resumed != 0 && step == 4) {
                memcpy(saved, residual, sizeof saved);
                saved_state = state;
                spccl_prune_plan_destroy(plan);
                plan = start(SPCCL_BFLOAT16);
                memcpy(residual, saved, sizeof saved);
                state = saved_state;
            }
            for (size_t i = 0; i < N; i++)
                half_grad[i] = sp_bf16_from_f32(normal());
            CHECK_OK(spccl_prune(plan, half_grad, &o));
        }
        if (resumed == 0)
            memcpy(whole, residual, sizeof whole);
        CHECK(state.step == 8, "%llu steps", (unsigned long long)state.step);
        spccl_prune_plan_destroy(plan);
    }
    CHECK(memcmp(whole, residual, sizeof whole) == 0, "the resumed run has the same residual");
}

static void test_bad_input(void)
{
    static double wide[N];
    spccl_prune_options o = SPCCL_PRUNE_OPTIONS_INIT;
    spccl_prune_plan *plan = start(SPCCL_FLOAT64);
    o.residual_bf16 = 1;
    CHECK(spccl_prune(plan, wide, &o) == SPCCL_ERR_ARG &&
              strstr(spccl_last_error(), "residual_bf16 is 1, wanted 0 with float64 gradients") != NULL,
          "%s", spccl_last_error());
    spccl_prune_plan_destroy(plan);
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {{"sets_agree", test_sets_agree},
                                             {"neighbours", test_neighbours},
                                             {"mean", test_mean},
                                             {"independence", test_independence},
                                             {"adds_up", test_adds_up},
                                             {"resume", test_resume},
                                             {"bad_input", test_bad_input},
                                             {NULL, NULL}};
    return test_main(cases, argc, argv);
}
