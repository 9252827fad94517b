/* test_mean.c - compares the bits of AVG with the scalar kernels, which define it: combine in rank order,
 * then finish. 1 to 17 ranks, every dtype that can be reduced, sparse and dense parts in one array, in
 * place and not, on every kernel set. The inputs hold NaNs, infinities, -0.0, denormals and the extremes of
 * integers. */
#include "core/base/dtype.h"
#include "core/format/kernel_table.h"
#include "ranks.h"

#define N_ELEMS 12000 /* several slices; the density changes from each quarter to the next */

struct mean_case {
    spccl_dtype dtype;
    bool in_place, scatter;
    uint64_t seed;
};

static uint64_t mix(uint64_t z)
{
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* Special bits of each float dtype: -0.0, a denormal whose mean is zero, a larger denormal, infinities,
 * NaNs. */
#define N_SPECIAL 8
static const uint64_t special_f32[N_SPECIAL] = {0x80000000, 1,          0x00000123, 0x7f800000,
                                                0xff800000, 0x7fc00123, 0xff812345, 0x7f7fffff};
static const uint64_t special_f64[N_SPECIAL] = {0x8000000000000000, 1,
                                                0x0000000000000123, 0x7ff0000000000000,
                                                0xfff0000000000000, 0x7ff8000000000123,
                                                0xfff0000000012345, 0x7fefffffffffffff};
static const uint64_t special_f16[N_SPECIAL] = {0x8000, 1, 0x0123, 0x7c00, 0xfc00, 0x7e01, 0xfd23, 0x7bff};
static const uint64_t special_bf16[N_SPECIAL] = {0x8000, 1, 0x0013, 0x7f80, 0xff80, 0x7fc1, 0xff93, 0x7f7f};

/* The bits of element i of a rank's input. */
static uint64_t element(const struct mean_case *c, int rank, size_t i)
{
    static const unsigned per_1000[4] = {3, 30, 120, 900};
    static const uint64_t *const special[SP_N_DTYPES] = {[SPCCL_FLOAT32] = special_f32,
                                                         [SPCCL_FLOAT16] = special_f16,
                                                         [SPCCL_BFLOAT16] = special_bf16,
                                                         [SPCCL_FLOAT64] = special_f64};
    uint64_t h = mix(c->seed + (uint64_t)rank * 0x9e3779b97f4a7c15u + i * 0xd1342543de82ef95u), v = mix(h);
    size_t bits = 8 * sp_dtype_bytes(c->dtype);
    if (h % 1000 >= per_1000[i * 4 / N_ELEMS % 4])
        return 0;
    if (special[c->dtype] != NULL && v % 16 < N_SPECIAL && i % 3 == 0)
        return special[c->dtype][v % 16];
    if (c->dtype == SPCCL_FLOAT32)
        return sp_f32_to_bits((float)((double)(int64_t)v * 0x1p-60));
    if (c->dtype == SPCCL_FLOAT64) {
        double d = (double)(int64_t)v * 0x1p-60;
        memcpy(&v, &d, sizeof v);
        return v;
    }
    if (c->dtype == SPCCL_FLOAT16 || c->dtype == SPCCL_BFLOAT16) {
        float f = (float)((double)(int64_t)v * 0x1p-60);
        return c->dtype == SPCCL_FLOAT16 ? sp_f16_from_f32(f) : sp_bf16_from_f32(f);
    }
    return v >> (64 - bits);
}

static void fill(const struct mean_case *c, int rank, size_t n, uint8_t *x)
{
    size_t bytes = sp_dtype_bytes(c->dtype);
    for (size_t i = 0; i < n; i++) {
        uint64_t bits = element(c, rank, i);
        memcpy(x + i * bytes, &bits, bytes);
    }
}

/* What all ranks of a group share. The means are computed once, before the ranks start. */
struct group {
    uint64_t seed;
    uint8_t wanted[SP_N_DTYPES][N_ELEMS * 8]; /* by dtype: the mean of all elements over all ranks */
};

static struct mean_case case_of(const struct group *g, int dtype, bool in_place, bool scatter)
{
    return (struct mean_case){.dtype = (spccl_dtype)dtype,
                              .in_place = in_place,
                              .scatter = scatter,
                              .seed = g->seed + (uint64_t)dtype};
}

/* Compute the means with the scalar kernels. */
static void compute_wanted(struct group *g, int n_ranks)
{
    const sp_kernels *scalar = sp_kernels_at(0);
    static uint8_t acc[N_ELEMS * 8], x[N_ELEMS * 8];
    for (int t = SPCCL_FLOAT32; t <= SPCCL_UINT8; t++) {
        struct mean_case c = case_of(g, t, false, false);
        for (int r = 0; r < n_ranks && t != SPCCL_FLOAT8; r++) {
            fill(&c, r, N_ELEMS, x);
            scalar->combine(&(sp_combine_args){
                .acc = acc, .x = x, .n_elems = N_ELEMS, .dtype = c.dtype, .op = SPCCL_AVG, .first = r == 0});
        }
        if (t != SPCCL_FLOAT8)
            scalar->finish(&(sp_finish_args){.acc = acc,
                                             .dst = g->wanted[t],
                                             .n_elems = N_ELEMS,
                                             .dtype = c.dtype,
                                             .op = SPCCL_AVG,
                                             .world_size = n_ranks});
    }
}

static void run_case(const struct mean_case *c, struct rank_ctx *ctx)
{
    size_t bytes = sp_dtype_bytes(c->dtype), world = (size_t)ctx->n_ranks, block = N_ELEMS / world;
    size_t n_in = c->scatter ? block * world : N_ELEMS, n_out = c->scatter ? block : N_ELEMS, bad = n_out;
    uint8_t *in = malloc(n_in * bytes), *out = malloc(n_out * bytes);
    uint8_t *dst = !c->in_place ? out : c->scatter ? in + (size_t)ctx->rank * block * bytes : in;
    const uint8_t *all = ((const struct group *)ctx->arg)->wanted[c->dtype];
    const uint8_t *wanted = c->scatter ? all + (size_t)ctx->rank * block * bytes : all;
    fill(c, ctx->rank, n_in, in);
    if (c->scatter)
        CHECK_OK(spccl_reduce_scatter(ctx->comm, in, dst, block, c->dtype, SPCCL_AVG, NULL));
    else
        CHECK_OK(spccl_all_reduce(ctx->comm, in, dst, N_ELEMS, c->dtype, SPCCL_AVG, NULL));
    for (size_t i = n_out; i-- > 0;)
        if (memcmp(dst + i * bytes, wanted + i * bytes, bytes) != 0)
            bad = i;
    CHECK(bad == n_out, "%s of %s, %s, rank %d of %d, ISA %s: element %zu differs",
          c->scatter ? "reduce_scatter" : "all_reduce", sp_dtype_name(c->dtype),
          c->in_place ? "in place" : "out of place", ctx->rank, ctx->n_ranks, getenv("SPCCL_DEBUG_CPU_ISA"),
          bad);
    free(in);
    free(out);
}

static void every_dtype(struct rank_ctx *ctx)
{
    for (int t = SPCCL_FLOAT32; t <= SPCCL_UINT8; t++)
        for (int variant = 0; variant < 4 && t != SPCCL_FLOAT8; variant++) {
            struct mean_case c = case_of(ctx->arg, t, variant % 2 == 0, variant / 2 != 0);
            run_case(&c, ctx);
        }
}

static void run_on_sets(int n_min, int n_max, const char *schedule)
{
    const sp_kernels *set;
    static struct group group;
    setenv("SPCCL_DEBUG_SLICE_BYTES", "32768", 1);
    setenv("SPCCL_SCHEDULE", schedule, 1);
    for (size_t s = 0; (set = sp_kernels_at(s)) != NULL; s++) {
        setenv("SPCCL_DEBUG_CPU_ISA", set->name, 1);
        /* The fastest set runs with every number of ranks; with SPCCL_TEST_SHARE none does. */
        bool every_n = sp_kernels_at(s + 1) == NULL && test_share == 1;
        for (int n = n_min; n <= n_max; n += every_n || n < 4 ? 1 : 13) {
            struct rank_ctx ctx[RANKS_CAP];
            spccl_config config = SPCCL_CONFIG_INIT;
            config.transports = "inproc";
            config.timeout_ms = 60000;
            group.seed = test_rand();
            compute_wanted(&group, n);
            run_ranks(n, &config, every_dtype, &group, ctx);
            for (int r = 0; r < n; r++)
                CHECK(ctx[r].created == SPCCL_OK, "rank %d of %d: %s", r, n, ctx[r].error);
        }
    }
    unsetenv("SPCCL_DEBUG_CPU_ISA");
    unsetenv("SPCCL_SCHEDULE");
    unsetenv("SPCCL_DEBUG_SLICE_BYTES");
}

static void direct_1_to_17(void)
{
    run_on_sets(1, 17, "direct");
}

static void oneshot(void)
{
    run_on_sets(2, 5, "oneshot");
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {
        {"direct_1_to_17", direct_1_to_17}, {"oneshot", oneshot}, {NULL, NULL}};
    return test_main(cases, argc, argv);
}
