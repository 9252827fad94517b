/* test_negative_zero.c - -0.0 in collectives. In contributions to a SUM or AVG of floats it does not travel: a
 * gradient that was multiplied by a mask costs what one with zeros of plus sign costs. Everything else keeps its bits:
 * results (an AVG can round to -0.0), MIN, PROD, all-gather, broadcast, spccl_encode. */
#include "core/base/dtype.h"
#include "core/format/kernel_table.h"
#include "ranks.h"

#define N_ELEMS 4500 /* of each rank; several slices of float64 */
#define N_RANKS_MAX 4

struct zero_case {
    spccl_dtype dtype;
    spccl_redop op;
    bool in_place, scatter;
};
static const spccl_dtype dtypes[] = {SPCCL_FLOAT32, SPCCL_FLOAT64, SPCCL_FLOAT16, SPCCL_BFLOAT16};
static const spccl_redop ops[] = {SPCCL_SUM, SPCCL_AVG, SPCCL_MIN, SPCCL_PROD};

#define N_CASES 64
static struct zero_case case_of(int k)
{
    return (struct zero_case){dtypes[k % 4], ops[k / 4 % 4], k / 16 % 2 != 0, k / 32 != 0};
}

/* What the ranks of a group share. */
struct group {
    bool plus;        /* the inputs have +0.0 where they otherwise have -0.0 */
    bool keeps_order; /* the schedule adds in rank order: MIN of +0.0 and -0.0 depends on it */
    uint64_t bytes[N_RANKS_MAX][2][N_CASES]; /* sent: [rank][plus][number of the case]; of SUM and AVG */
};

static void put(spccl_dtype dtype, uint8_t *x, size_t i, double v)
{
    size_t bytes = sp_dtype_bytes(dtype);
    float f = (float)v;
    uint64_t u = dtype == SPCCL_FLOAT16    ? sp_f16_from_f32(f)
                 : dtype == SPCCL_BFLOAT16 ? sp_bf16_from_f32(f)
                                           : sp_f32_to_bits(f);
    if (dtype == SPCCL_FLOAT64)
        memcpy(&u, &v, sizeof u);
    memcpy(x + i * bytes, &u, bytes);
}

/* One element in 50 is a small integer, half of the zeros are -0.0, and element 7 of every 100 is the smallest number
 * below zero on one rank: its AVG rounds to -0.0. All sums are exact. Some blocks of all ranks hold only -0.0. */
static void fill(const struct zero_case *c, int rank, int n_ranks, bool plus, uint8_t *x)
{
    const double smallest = c->dtype == SPCCL_FLOAT64    ? 0x1p-1074
                            : c->dtype == SPCCL_FLOAT32  ? 0x1p-149
                            : c->dtype == SPCCL_BFLOAT16 ? 0x1p-133
                                                         : 0x1p-24;
    for (size_t i = 0; i < N_ELEMS; i++) {
        uint64_t h = (i * 7919 + (uint64_t)rank * 104729) * UINT64_C(0x9e3779b97f4a7c15) >> 32;
        double zero = (h % 2 != 0 || i / 600 % 4 == 1) && !plus ? -0.0 : 0.0;
        double v = h % 50 == 0 && i / 600 % 4 != 1 ? (double)(h / 50 % 5) - 2 : zero;
        if (i % 100 == 7)
            v = rank == (int)(i / 100) % n_ranks ? -smallest : zero;
        put(c->dtype, x, i, v == 0 ? zero : v);
    }
}

/* By the scalar kernels, in rank order. */
static void compute_wanted(const struct zero_case *c, int n_ranks, uint8_t *wanted)
{
    const sp_kernels *scalar = sp_kernels_at(0);
    uint8_t *acc = calloc(N_ELEMS, 8), *x = malloc(N_ELEMS * 8);
    for (int r = 0; r < n_ranks; r++) {
        fill(c, r, n_ranks, false, x);
        scalar->combine(&(sp_combine_args){
            .acc = acc, .x = x, .n_elems = N_ELEMS, .dtype = c->dtype, .op = c->op, .first = r == 0});
    }
    scalar->finish(&(sp_finish_args){.acc = acc,
                                     .dst = wanted,
                                     .n_elems = N_ELEMS,
                                     .dtype = c->dtype,
                                     .op = c->op,
                                     .world_size = n_ranks});
    free(acc);
    free(x);
}

static uint64_t bytes_sent(spccl_comm *comm)
{
    spccl_stats stats = {.struct_bytes = sizeof stats};
    CHECK_OK(spccl_comm_stats(comm, &stats));
    return stats.wire_bytes_sent;
}

static void run_case(const struct zero_case *c, struct rank_ctx *ctx)
{
    const struct group *g = ctx->arg;
    size_t bytes = sp_dtype_bytes(c->dtype), block = N_ELEMS / (size_t)ctx->n_ranks, at = 0;
    size_t n_out = c->scatter ? block : N_ELEMS, bad = 0;
    uint8_t *in = malloc(N_ELEMS * 8), *out = malloc(N_ELEMS * 8), *wanted = malloc(N_ELEMS * 8), *dst = out;
    fill(c, ctx->rank, ctx->n_ranks, g->plus, in);
    compute_wanted(c, ctx->n_ranks, wanted);
    if (c->scatter)
        at = (size_t)ctx->rank * block * bytes;
    if (c->in_place)
        dst = in + at;
    if (c->scatter)
        CHECK_OK(spccl_reduce_scatter(ctx->comm, in, dst, block, c->dtype, c->op, NULL));
    else
        CHECK_OK(spccl_all_reduce(ctx->comm, in, dst, N_ELEMS, c->dtype, c->op, NULL));
    while (bad < n_out && memcmp(dst + bad * bytes, wanted + at + bad * bytes, bytes) == 0)
        bad++;
    CHECK(bad == n_out, "rank %d of %d: %s, op %d, in place %d, scatter %d: element %zu", ctx->rank,
          ctx->n_ranks, spccl_dtype_name(c->dtype), (int)c->op, c->in_place, c->scatter, bad);
    free(in);
    free(out);
    free(wanted);
}

static void reductions(struct rank_ctx *ctx)
{
    struct group *g = ctx->arg;
    for (int k = 0; k < N_CASES; k++) {
        struct zero_case c = case_of(k);
        uint64_t before = bytes_sent(ctx->comm);
        bool is_sum = c.op == SPCCL_SUM || c.op == SPCCL_AVG;
        if ((!g->keeps_order && c.op == SPCCL_MIN) || (g->plus && !is_sum))
            continue;
        run_case(&c, ctx);
        if (is_sum)
            g->bytes[ctx->rank][g->plus][k] = bytes_sent(ctx->comm) - before;
    }
}

/* The other collectives carry every bit. */
static void carried(struct rank_ctx *ctx)
{
    struct zero_case c = {.dtype = SPCCL_FLOAT32};
    size_t bytes = N_ELEMS * 4;
    uint8_t *in = malloc(bytes), *out = malloc(bytes * N_RANKS_MAX);
    fill(&c, ctx->rank, ctx->n_ranks, false, in);
    CHECK_OK(spccl_all_gather(ctx->comm, in, out, N_ELEMS, c.dtype, NULL));
    for (int r = 0; r < ctx->n_ranks; r++) {
        fill(&c, r, ctx->n_ranks, false, in);
        CHECK(memcmp(out + (size_t)r * bytes, in, bytes) == 0, "all-gather: block of rank %d", r);
    }
    fill(&c, 0, ctx->n_ranks, false, in);
    memcpy(out, in, ctx->rank == 0 ? bytes : 0);
    CHECK_OK(spccl_broadcast(ctx->comm, out, N_ELEMS, c.dtype, 0, NULL));
    CHECK(memcmp(out, in, bytes) == 0, "broadcast");
    free(in);
    free(out);
}

static void both(struct rank_ctx *ctx)
{
    reductions(ctx);
    carried(ctx);
}

/* One schedule in one format: the bits, and the bytes beside those of inputs without -0.0. */
static void run_group(struct group *g, const char *schedule, const char *format, int n_ranks)
{
    struct rank_ctx ctx[N_RANKS_MAX];
    memset(g->bytes, 0, sizeof g->bytes);
    for (int plus = 0; plus < 2; plus++) {
        g->plus = plus != 0;
        run_ranks(n_ranks, NULL, both, g, ctx);
        for (int r = 0; r < n_ranks; r++)
            CHECK(ctx[r].created == SPCCL_OK, "%s", ctx[r].error);
    }
    for (int r = 0; r < n_ranks; r++)
        for (int k = 0; k < N_CASES; k++) {
            struct zero_case c = case_of(k);
            const char *kind = c.scatter ? "reduce-scatter" : "all-reduce";
            CHECK(g->bytes[r][0][k] == g->bytes[r][1][k],
                  "%s, %s, rank %d of %d: %s of %s, op %d, in place %d: %llu bytes sent, %llu without -0.0",
                  schedule, format, r, n_ranks, kind, spccl_dtype_name(c.dtype), (int)c.op, c.in_place,
                  (unsigned long long)g->bytes[r][0][k], (unsigned long long)g->bytes[r][1][k]);
        }
}

static void run_schedules(const char *const *schedules, size_t n, bool keeps_order)
{
    static const char *const formats[] = {"auto", "tile", "pici", "coo", "dense"};
    static struct group g;
    g.keeps_order = keeps_order;
    setenv("SPCCL_DEBUG_SLICE_BYTES", "32768", 1);
    for (size_t s = 0; s < n; s++)
        for (size_t f = 0; f < 5; f++)
            for (int n_ranks = 1; n_ranks <= N_RANKS_MAX; n_ranks++) {
                if (((int)(s + f) + n_ranks) % test_share != 0)
                    continue;
                setenv("SPCCL_SCHEDULE", schedules[s], 1);
                setenv("SPCCL_FORMAT", formats[f], 1);
                run_group(&g, schedules[s], formats[f], n_ranks);
            }
    unsetenv("SPCCL_SCHEDULE");
    unsetenv("SPCCL_FORMAT");
    unsetenv("SPCCL_DEBUG_SLICE_BYTES");
}

static void in_rank_order(void)
{
    static const char *const schedules[] = {"direct", "oneshot"};
    run_schedules(schedules, 2, true);
}

/* The messages are also partial sums, or are relayed. Two hosts of two ranks, at most. */
static void between_hosts(void)
{
    static const char *const sums[] = {"ring", "hierarchical"}, *const relayed[] = {"relayed"};
    test_ranks_per_host = 2;
    run_schedules(sums, 2, false);
    run_schedules(relayed, 1, true);
    test_ranks_per_host = 0;
}

/* Half of a dense gradient is masked: each rank sends about half as much as without the mask. */
static void masked(struct rank_ctx *ctx)
{
    uint64_t sent[2];
    size_t n = 1 << 16;
    float *x = malloc(n * sizeof *x);
    for (int is_masked = 0; is_masked < 2; is_masked++) {
        uint64_t before = bytes_sent(ctx->comm);
        for (size_t i = 0; i < n; i++)
            x[i] = -1.5f * (is_masked != 0 && i % 64 != 0 ? 0.0f : 1.0f);
        CHECK_OK(spccl_all_reduce(ctx->comm, x, x, n, SPCCL_FLOAT32, SPCCL_AVG, NULL));
        sent[is_masked] = bytes_sent(ctx->comm) - before;
        CHECK(x[64] == -1.5f && sp_f32_to_bits(x[1]) == (is_masked != 0 ? 0 : sp_f32_to_bits(-1.5f)), "%a",
              (double)x[1]);
    }
    CHECK(sent[1] * 10 < sent[0], "rank %d: %llu bytes sent of a masked gradient, %llu of all", ctx->rank,
          (unsigned long long)sent[1], (unsigned long long)sent[0]);
    free(x);
}

static void bytes_of_a_mask(void)
{
    struct rank_ctx ctx[2];
    run_ranks(2, NULL, masked, NULL, ctx);
}

/* An encoded array keeps -0.0. */
static void encoded(void)
{
    float x[300], y[300];
    uint8_t frames[4096];
    size_t bytes = 0;
    for (int i = 0; i < 300; i++)
        x[i] = i % 3 == 0 ? -0.0f : 0.0f;
    CHECK_OK(spccl_encode(x, 300, SPCCL_FLOAT32, NULL, frames, sizeof frames, &bytes));
    CHECK_OK(spccl_decode(frames, bytes, SPCCL_SET, y, 300, SPCCL_FLOAT32));
    CHECK(memcmp(x, y, sizeof x) == 0, "not what went in");
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {{"in_rank_order", in_rank_order},
                                             {"between_hosts", between_hosts},
                                             {"bytes_of_a_mask", bytes_of_a_mask},
                                             {"encoded", encoded},
                                             {NULL, NULL}};
    return test_main(cases, argc, argv);
}
