/* test_collectives_nan.c - sums of NaNs, infinities and -0.0: whatever the format, all ranks get the same bits. */
#include "ranks.h"

#include <stdbool.h>

static uint64_t mix(uint64_t z)
{
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* NaN payloads: all formats must give the bits that dense gives. Scalar C is no reference here: it does not
 * say which payload a sum keeps. */
#define N_NAN 20000

static void nan_sum(struct rank_ctx *ctx)
{
    uint32_t *out = (uint32_t *)ctx->arg + (size_t)ctx->rank * N_NAN;
    for (size_t i = 0; i < N_NAN; i++) {
        uint64_t h = mix((uint64_t)ctx->rank * 77777 + i / 3 * 1234567);
        bool is_nan = h % 3 == 0;
        out[i] = i % 23 > 2 ? 0
                 : is_nan   ? 0x7f800001u | (uint32_t)(h >> 32 & 0x807fffff)
                            : 0x3f800000u + (uint32_t)(h >> 50);
    }
    CHECK_OK(spccl_all_reduce(ctx->comm, out, out, N_NAN, SPCCL_FLOAT32, SPCCL_SUM, NULL));
}

static void test_nan_payloads(void)
{
    static const char *const formats[] = {"dense", "auto", "tile", "pici", "coo"};
    struct rank_ctx ctx[RANKS_CAP];
    spccl_config config = SPCCL_CONFIG_INIT;
    uint32_t *want = malloc(4 * N_NAN * sizeof *want), *got = malloc(4 * N_NAN * sizeof *got);
    for (int n_ranks = 2; n_ranks <= 4; n_ranks++)
        for (int f = 0; f < 5; f++) {
            setenv("SPCCL_FORMAT", formats[f], 1);
            run_ranks(n_ranks, &config, nan_sum, f == 0 ? want : got, ctx);
            for (int r = 1; r < n_ranks; r++)
                CHECK(memcmp(want, want + (size_t)r * N_NAN, N_NAN * sizeof *want) == 0,
                      "rank %d of %d has other bits", r, n_ranks);
            CHECK(f == 0 || memcmp(want, got, (size_t)n_ranks * N_NAN * sizeof *want) == 0,
                  "%d ranks: %s gives other bits than dense", n_ranks, formats[f]);
        }
    unsetenv("SPCCL_FORMAT");
    free(want);
    free(got);
}

/* Values that change when 0 is added: -0.0 and signalling NaNs. In place, a sum starts at this rank's own
 * value instead of 0. Each rank's own part is nearly full, its other part is zero, and the special values are
 * also at the end of each slice. */
static void odd_values(struct rank_ctx *ctx)
{
    static const uint32_t odd[] = {0x80000000u, 0x7f800001u, 0xffa00000u, 0x3f800000u};
    bool in_place = ctx->arg != NULL;
    uint32_t *x = calloc(N_NAN, sizeof *x), *out = in_place ? x : calloc(N_NAN, sizeof *x);
    for (size_t i = 0; i < N_NAN; i++)
        if (ctx->rank == (i < N_NAN / 2 ? 0 : 1))
            x[i] = i % 40 == 0 ? 0 : i % 8192 > 7000 || i % 911 == 0 ? odd[i % 4] : 0x3f800000u + (uint32_t)i;
    CHECK_OK(spccl_all_reduce(ctx->comm, x, out, N_NAN, SPCCL_FLOAT32, SPCCL_SUM, NULL));
    for (size_t i = 0; i < N_NAN; i++) {
        bool is_nan = (out[i] & 0x7fffffffu) > 0x7f800000u;
        CHECK(out[i] != 0x80000000u, "element %zu is -0.0 (in place %d)", i, in_place);
        CHECK(!is_nan || (out[i] & 0x00400000u) != 0, "element %zu is a signalling NaN (in place %d)", i,
              in_place);
    }
    if (!in_place)
        free(out);
    free(x);
}

static void test_odd_values(void)
{
    struct rank_ctx ctx[RANKS_CAP];
    spccl_config config = SPCCL_CONFIG_INIT;
    for (int n_ranks = 2; n_ranks <= 3; n_ranks++) {
        run_ranks(n_ranks, &config, odd_values, NULL, ctx);
        run_ranks(n_ranks, &config, odd_values, &config, ctx);
    }
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {
        {"nan_payloads", test_nan_payloads}, {"odd_values", test_odd_values}, {NULL, NULL}};
    return test_main(cases, argc, argv);
}
