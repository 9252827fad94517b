/* prune_arrays.h - gradients and states for the tests of pruning on the host. */
#ifndef SP_TEST_PRUNE_ARRAYS_H
#define SP_TEST_PRUNE_ARRAYS_H

#include "core/base/dtype.h"
#include "spccl.h"
#include "test.h"

#include <math.h>
#include <stdbool.h>

#define MAX_N 70001u
#define GUARD 64u
#define POISON 0xa5

static inline double uniform(void)
{
    return (double)(test_rand() >> 11) * 0x1p-53;
}

/* About normal: a sum of uniforms. */
static inline double normal(void)
{
    double sum = -6;
    for (int i = 0; i < 12; i++)
        sum += uniform();
    return sum;
}

static inline void put(spccl_dtype dtype, void *x, size_t i, double v)
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

static inline double get(spccl_dtype dtype, const void *x, size_t i)
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

static inline spccl_dtype state_dtype(spccl_dtype dtype)
{
    return dtype == SPCCL_FLOAT64 ? SPCCL_FLOAT64 : SPCCL_FLOAT32;
}

/* Gradient, residual, velocity, and what is sent if it does not replace the gradient, of one case; with poison behind
 * each. */
struct arrays {
    uint8_t grad[MAX_N * 8 + GUARD], residual[MAX_N * 8 + GUARD], velocity[MAX_N * 8 + GUARD];
    uint8_t sent[MAX_N * 2 + GUARD];
};
static struct arrays got;

static inline double odd_value(void)
{
    static const double odd[] = {0.0,     -0.0,   1.0,     -1.0,    INFINITY, -INFINITY,
                                 NAN,     1e-40,  -1e-40,  65504.0, -65520.0, 3.0e38,
                                 -3.3e38, 1e-310, 1.0e-30, 6.0e-8f, 0.5,      -0.5};
    return odd[test_rand() % (sizeof odd / sizeof *odd)];
}

static inline void fill(struct arrays *a, spccl_dtype dtype, size_t n, bool odd)
{
    memset(a, POISON, sizeof *a);
    for (size_t i = 0; i < n; i++) {
        put(dtype, a->grad, i, odd && test_rand() % 4 == 0 ? odd_value() : normal());
        put(state_dtype(dtype), a->residual, i, odd && test_rand() % 8 == 0 ? odd_value() : normal());
        put(state_dtype(dtype), a->velocity, i, odd && test_rand() % 8 == 0 ? odd_value() : normal());
    }
}

/* ---- a plan of one segment ---- */

struct run {
    spccl_prune_plan *plan;
    spccl_prune_state state;
    spccl_dtype dtype;
    size_t n;
};

static inline struct run start(spccl_dtype dtype, size_t n, bool has_r, bool has_u)
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

static inline size_t count_nonzero(spccl_dtype dtype, const void *x, size_t n)
{
    size_t count = 0;
    for (size_t i = 0; i < n; i++)
        count += get(dtype, x, i) != 0;
    return count;
}

#endif
