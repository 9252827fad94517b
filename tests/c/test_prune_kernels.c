/* test_prune_kernels.c - the pruning kernels: every set against scalar; scalar against the rule, written
 * again here. */
#include "core/format/kernel_table.h"
#include "prune_arrays.h"

static const spccl_dtype dtypes[] = {SPCCL_FLOAT32, SPCCL_FLOAT16, SPCCL_BFLOAT16, SPCCL_FLOAT64};
static const size_t sizes[] = {0, 1, 7, 8, 31, 32, 33, 255, 511, 512, 513, 1027, 3 * 512 + 7};
static struct arrays before, want;

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

/* to: the dtype of what is sent: that of the gradient, or one of 16 bits for a float32 gradient. */
static void send_as(sp_prune_args *args, struct arrays *a, spccl_dtype to)
{
    args->sent = to != args->dtype ? a->sent : NULL;
    args->sent_dtype = to;
}

static spccl_dtype random_to(spccl_dtype dtype)
{
    return dtype == SPCCL_FLOAT32 ? dtypes[test_rand() % 3] : dtype;
}

static sp_prune_factors random_factors(void)
{
    static const double thresholds[] = {0, 0.5, 1, 2, 1e30, 1e-45};
    static const double rescales[] = {1, 0.5, 2, (double)0.3f, 0x1p-100, 0x1p100};
    sp_prune_factors f = {.momentum = test_rand() % 2 != 0 ? (double)0.9f : 0,
                          .leak = test_rand() % 2 != 0 ? 1 : (double)0.99f,
                          .rescale = rescales[test_rand() % 6],
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
        spccl_dtype dtype = dtypes[test_rand() % 4], to = random_to(dtype);
        size_t n = sizes[test_rand() % (sizeof sizes / sizeof *sizes)];
        bool has_r = test_rand() % 4 != 0, has_u = test_rand() % 2 != 0;
        sp_prune_factors f = random_factors();
        sp_prune_args w;
        fill(&before, dtype, n, round % 2 != 0);
        want = before;
        w = args_of(&want, dtype, n, has_r, has_u, &f);
        send_as(&w, &want, to);
        if (round % 3 == 0)
            w.most = test_rand() % (n + 1);
        sp_kernels_at(0)->prune(&w);
        for (size_t k = 0; sp_kernels_at(k) != NULL; k++) {
            sp_prune_args a = args_of(&got, dtype, n, has_r, has_u, &f);
            const char *name = sp_kernels_at(k)->name;
            got = before;
            a.most = w.most;
            send_as(&a, &got, to);
            for (size_t i = 0; i < 3 && round % 2 == 0; i++) { /* prefetching changes nothing */
                a.next[i] = (const uint8_t *)&got + test_rand() % 100;
                a.next_bytes[i] = test_rand() % 20000;
            }
            sp_kernels_at(k)->prune(&a);
            CHECK(a.n_sent == w.n_sent && a.n_nonfinite == w.n_nonfinite && a.n_done == w.n_done,
                  "%s: %llu sent of %zu, wanted %llu of %zu", name, (unsigned long long)a.n_sent, a.n_done,
                  (unsigned long long)w.n_sent, w.n_done);
            CHECK(a.n_sent - a.n_nonfinite <= a.most, "%s: more than the bound", name);
            CHECK(memcmp(&got, &want, sizeof got) == 0,
                  "%s: %s to %s, n %zu, residual %d, velocity %d, whole %d", name, spccl_dtype_name(dtype),
                  spccl_dtype_name(to), n, has_r, has_u, f.whole);
        }
    }
}

/* r or u of an element that is not finite: in the new loss scale, unless that is not finite. */
static double rescaled(bool wide, double kept, const sp_prune_factors *f)
{
    double now = wide ? kept * f->rescale : (double)((float)kept * (float)f->rescale);
    return isfinite(now) ? now : kept;
}

/* One element by the rule of spccl.h, in the arithmetic of the state. */
static void check_element(spccl_dtype dtype, spccl_dtype to, size_t i, bool has_r, bool has_u,
                          const sp_prune_factors *f)
{
    const void *sent = to != dtype ? got.sent : got.grad;
    double most = to == SPCCL_FLOAT16 ? 65504 : to == SPCCL_BFLOAT16 ? 0x1.fep127 : INFINITY;
    double step = to == SPCCL_FLOAT16 ? 0x1p-11 : to == SPCCL_BFLOAT16 ? 0x1p-8 : 0;
    spccl_dtype st = state_dtype(dtype);
    bool wide = st == SPCCL_FLOAT64;
    double g = get(dtype, before.grad, i), r = get(st, before.residual, i), u = get(st, before.velocity, i);
    double x = wide ? g * f->gradient : (double)((float)g * (float)f->gradient);
    double v, s = get(to, sent, i) / f->scale;
    if (has_u)
        x = wide ? f->momentum * u + x : (double)((float)f->momentum * (float)u + (float)x);
    v = x;
    if (has_r)
        v = wide ? f->leak * r + x : (double)((float)f->leak * (float)r + (float)x);
    if (to != dtype || !isfinite(g) || !isfinite(v))
        CHECK(memcmp(got.grad + i * spccl_dtype_bytes(dtype), before.grad + i * spccl_dtype_bytes(dtype),
                     spccl_dtype_bytes(dtype)) == 0,
              "an element that is not finite, or is sent elsewhere, stays");
    if (!isfinite(g) || !isfinite(v)) {
        double rounded = fmax(-most, fmin(most, g));
        CHECK(to == dtype || (isnan(g)   ? isnan(s)
                              : isinf(g) ? s == g
                                         : fabs(s - rounded) <= fabs(rounded) * step + 6e-8),
              "not finite: sent %g of %g", s, g);
        CHECK(!has_r || isnan(r) || get(st, got.residual, i) == rescaled(wide, r, f),
              "its residual: %g of %g", get(st, got.residual, i), r);
        CHECK(!has_u || isnan(u) || get(st, got.velocity, i) == rescaled(wide, u, f),
              "its velocity: %g of %g", get(st, got.velocity, i), u);
        return;
    }
    if (f->whole || fabs(v) >= f->threshold) {
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
        spccl_dtype dtype = dtypes[round % 4], to = random_to(dtype);
        bool has_r = test_rand() % 4 != 0, has_u = test_rand() % 2 != 0;
        sp_prune_factors f = random_factors();
        f.scale = 1; /* what it rounds off is not kept */
        sp_prune_args a = args_of(&got, dtype, 1027, has_r, has_u, &f);
        fill(&before, dtype, 1027, round % 3 == 0);
        got = before;
        send_as(&a, &got, to);
        sp_kernels_at(0)->prune(&a);
        for (size_t i = 0; i < 1027; i++)
            check_element(dtype, to, i, has_r, has_u, &f);
    }
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {
        {"sets_agree", test_sets_agree}, {"rule", test_rule}, {NULL, NULL}};
    return test_main(cases, argc, argv);
}
