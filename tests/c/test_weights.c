/* test_weights.c - spccl_weights_send and spccl_weights_receive on the host: the rule element by element,
 * thresholds, weights that are not finite, bad input. */
#include "core/base/weights_rule.h"
#include "prune_arrays.h"

#define N 5003u
#define N_SEGMENTS 3u
#define LEFT_OUT 7u /* elements of the buffer that belong to no segment */

static struct weights {
    double own[N], common[N], out[N + LEFT_OUT], own_before[N];
    spccl_prune_state states[N_SEGMENTS];
} a;

static void *at(spccl_dtype dtype, double *x, size_t i)
{
    return (uint8_t *)x + i * spccl_dtype_bytes(dtype);
}

/* Segments of 1000, 4000 (whole), 3 elements, the last one behind LEFT_OUT elements of the buffer. */
static spccl_weights_plan *make(spccl_dtype dtype)
{
    static const size_t lengths[N_SEGMENTS] = {1000, 4000, 3};
    spccl_weights_segment segments[N_SEGMENTS];
    spccl_weights_plan *plan = NULL;
    size_t first = 0;
    memset(&a, 0, sizeof a);
    for (size_t i = 0; i < N; i++) {
        put(dtype, a.common, i, normal());
        put(dtype, a.own, i, i % 5 == 0 ? get(dtype, a.common, i) : normal());
    }
    for (size_t i = 2000; i < 2002; i++) { /* half of the difference is 0 */
        put(dtype, a.common, i, 0);
        put(dtype, a.own, i, (i % 2 != 0 ? -1 : 1) * (dtype == SPCCL_FLOAT64 ? 0x1p-1074 : 0x1p-149));
    }
    memcpy(a.own_before, a.own, sizeof a.own);
    for (size_t i = 0; i < N + LEFT_OUT; i++)
        put(dtype, a.out, i, 77);
    for (size_t i = 0; i < N_SEGMENTS; i++) {
        segments[i] = (spccl_weights_segment){.begin = first + (i == 2 ? LEFT_OUT : 0),
                                              .n_elems = lengths[i],
                                              .own = at(dtype, a.own, first),
                                              .shared = at(dtype, a.common, first),
                                              .state = &a.states[i],
                                              .key = (uint32_t)i,
                                              .whole = i == 1};
        a.states[i].threshold = 0.75;
        first += lengths[i];
    }
    CHECK_OK(spccl_weights_plan_create(segments, N_SEGMENTS, N + LEFT_OUT, dtype, -1, &plan));
    return plan;
}

static void check_element(spccl_dtype dtype, size_t i, double leak)
{
    double w = get(dtype, a.own_before, i), z = get(dtype, a.common, i), s, kept, out;
    bool whole = i >= 1000 && i < 5000;
    if (dtype == SPCCL_FLOAT64) {
        sp_weights_f64 e = sp_weights_elem_f64(w, z, 0.75, leak, whole);
        s = e.s, kept = e.w, out = s * 0.5;
    } else {
        sp_weights_f32 e = sp_weights_elem_f32((float)w, (float)z, 0.75f, (float)leak, whole);
        s = (double)e.s, kept = (double)e.w, out = (double)(e.s * 0.5f);
    }
    CHECK(get(dtype, a.out, i < 5000 ? i : i + LEFT_OUT) == out, "element %zu: sent %g, wanted %g", i,
          get(dtype, a.out, i), out);
    CHECK(get(dtype, a.own, i) == kept, "element %zu: own weight %g, wanted %g", i, get(dtype, a.own, i),
          kept);
    if (s != 0)
        CHECK(kept == z, "element %zu was sent: %g is not the common weight %g", i, kept, z);
    if (s == 0 && leak == 1)
        CHECK(kept == w, "element %zu was not sent, and has changed", i);
}

static void test_rule(void)
{
    for (int round = 0; round < 4; round++) {
        spccl_dtype dtype = round % 2 != 0 ? SPCCL_FLOAT64 : SPCCL_FLOAT32;
        spccl_weights_options o = SPCCL_WEIGHTS_OPTIONS_INIT;
        spccl_weights_plan *plan = make(dtype);
        double own[2], common[2];
        o.keep_thresholds = 1;
        o.scale = 0.5;
        o.leak = round < 2 ? 1 : 0.9;
        CHECK_OK(spccl_weights_send(plan, a.out, &o, NULL));
        for (size_t i = 0; i < N; i++)
            check_element(dtype, i, o.leak);
        for (size_t i = 5000; i < 5000 + LEFT_OUT; i++)
            CHECK(get(dtype, a.out, i) == 77, "an element of no segment was written");
        put(dtype, a.out, 3, 0);
        put(dtype, a.out, 4, 0.25);
        own[0] = get(dtype, a.own, 3), common[0] = get(dtype, a.common, 3);
        own[1] = get(dtype, a.own, 4), common[1] = get(dtype, a.common, 4);
        CHECK_OK(spccl_weights_receive(plan, a.out, NULL));
        CHECK(get(dtype, a.own, 3) == own[0] && get(dtype, a.common, 3) == common[0], "0 changes nothing");
        if (dtype == SPCCL_FLOAT64)
            CHECK(a.own[4] == own[1] + 0.25 && a.common[4] == common[1] + 0.25, "%g, %g", a.own[4],
                  a.common[4]);
        else
            CHECK((float)get(dtype, a.own, 4) == (float)own[1] + 0.25f &&
                      (float)get(dtype, a.common, 4) == (float)common[1] + 0.25f,
                  "float32 sums");
        CHECK(a.states[0].step == 1 && a.states[1].n_sent == 4000, "%llu sent of the whole segment",
              (unsigned long long)a.states[1].n_sent);
        spccl_weights_plan_destroy(plan);
    }
}

static void test_sampled_threshold(void)
{
    spccl_weights_options o = SPCCL_WEIGHTS_OPTIONS_INIT;
    spccl_weights_plan *plan = make(SPCCL_FLOAT32);
    o.density = 0.05;
    o.sample = 1;
    CHECK_OK(spccl_weights_send(plan, a.out, &o, NULL));
    CHECK(a.states[0].n_sent == 50, "%llu sent of 1000, wanted 50", (unsigned long long)a.states[0].n_sent);
    CHECK(a.states[0].threshold > 0.75, "threshold %g", a.states[0].threshold);
    spccl_weights_plan_destroy(plan);
}

static void test_nonfinite(void)
{
    for (int d = 0; d < 2; d++) {
        spccl_dtype dtype = d != 0 ? SPCCL_FLOAT64 : SPCCL_FLOAT32;
        spccl_weights_plan *plan = make(dtype);
        static const size_t bad[] = {0, 999, 1000, 4999};
        for (size_t i = 0; i < 4; i++)
            put(dtype, a.own, bad[i], i % 2 != 0 ? INFINITY : NAN);
        CHECK_OK(spccl_weights_send(plan, a.out, NULL, NULL));
        for (size_t i = 0; i < 4; i++)
            CHECK(get(dtype, a.out, bad[i]) == 0 && get(dtype, a.own, bad[i]) == get(dtype, a.common, bad[i]),
                  "element %zu: sent %g, weight %g", bad[i], get(dtype, a.out, bad[i]),
                  get(dtype, a.own, bad[i]));
        CHECK(a.states[0].n_nonfinite_all == 2 && a.states[1].n_nonfinite_all == 2, "they are counted");
        spccl_weights_plan_destroy(plan);
    }
}

static void test_bad_input(void)
{
    spccl_weights_plan *plan = make(SPCCL_FLOAT32), *other = NULL;
    spccl_weights_segment s = {.n_elems = 10, .own = a.own, .state = a.states};
    spccl_weights_options o = SPCCL_WEIGHTS_OPTIONS_INIT;
    CHECK_FAILS(spccl_weights_send(NULL, a.out, NULL, NULL), SPCCL_ERR_ARG, "plan is NULL");
    CHECK_FAILS(spccl_weights_receive(plan, NULL, NULL), SPCCL_ERR_ARG, "the buffer is NULL");
    CHECK_FAILS(spccl_weights_send(plan, (uint8_t *)a.out + 2, NULL, NULL), SPCCL_ERR_ARG, "aligned to 4");
    o.density = 2;
    CHECK_FAILS(spccl_weights_send(plan, a.out, &o, NULL), SPCCL_ERR_ARG, "options.density");
    CHECK_FAILS(spccl_weights_plan_create(&s, 1, 10, SPCCL_FLOAT32, -1, &other), SPCCL_ERR_ARG,
                "has no shared weights");
    s.shared = a.common;
    CHECK_FAILS(spccl_weights_plan_create(&s, 1, 10, SPCCL_BFLOAT16, -1, &other), SPCCL_ERR_DTYPE,
                "wanted float32 or float64");
    CHECK_FAILS(spccl_weights_plan_create(&s, 1, 10, SPCCL_FLOAT32, -1, NULL), SPCCL_ERR_ARG, "out is NULL");
    CHECK(other == NULL, "a plan was made");
    spccl_weights_plan_destroy(plan);
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {{"rule", test_rule},
                                             {"sampled_threshold", test_sampled_threshold},
                                             {"nonfinite", test_nonfinite},
                                             {"bad_input", test_bad_input},
                                             {NULL, NULL}};
    return test_main(cases, argc, argv);
}
