/* cases.h - cases of collectives, each compared with plain scalar code: the inputs, the expected outputs, and running
 * them on ranks that are threads. */
#ifndef SP_TEST_CASES_H
#define SP_TEST_CASES_H

#include "core/base/dtype.h"
#include "ranks.h"

#include <math.h>

enum { ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, BROADCAST, N_COLLS };
static const char *const coll_names[] = {"all_gather", "reduce_scatter", "all_reduce", "broadcast"};

/* Where the nonzeros are, and what they are. */
enum {
    UNIFORM,
    SAME_PLACES, /* the nonzeros of all ranks coincide */
    ONE_RANK,    /* rank 1 alone has any */
    RUNS,        /* runs of 1000 elements, full or empty */
    CANCELLING,  /* sums of neighbouring ranks are 0, or what rounding left */
    EXTREMES,    /* infinities, NaNs, the largest and smallest numbers */
    N_PATTERNS
};

struct one_case {
    int coll, root;
    spccl_dtype dtype;
    spccl_redop op;
    size_t n;        /* as in spccl.h */
    int density_pct; /* 0..100 */
    bool in_place, async;
    bool wide; /* reduce_scatter: spccl_reduce_scatter_wide */
    int pattern;
    uint64_t seed;
};

static inline spccl_dtype out_dtype(const struct one_case *c)
{
    return c->wide ? sp_acc_dtype(c->dtype) : c->dtype;
}

/* What a case must give, of all ranks: the output (all_gather, all_reduce, broadcast), or the outputs of all
 * ranks one after the other (reduce_scatter). The first rank that checks the case makes it. */
struct expected {
    uint8_t *bytes;
    int n_checked; /* ranks that have compared */
    pthread_mutex_t mu;
};

struct plan_of_cases {
    const struct one_case *cases;
    int n_cases;
    struct expected *expected; /* of each case */
};

static inline uint64_t mix(uint64_t z)
{
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static inline uint64_t f64_to_bits(double d)
{
    uint64_t u;
    memcpy(&u, &d, sizeof u);
    return u;
}

/* A hash that decides whether element i of rank r is zero. */
static inline uint64_t place_hash(const struct one_case *c, int r, size_t i)
{
    uint64_t rank = c->pattern == SAME_PLACES || c->pattern == CANCELLING ? 0 : (uint64_t)r;
    size_t place = c->pattern == RUNS ? i / 1000 : i;
    return mix(c->seed + rank * 0x9e3779b97f4a7c15u + place * 0xd1342543de82ef95u);
}

static inline double float_value(const struct one_case *c, int r, uint64_t v)
{
    static const double extremes[] = {HUGE_VAL, -HUGE_VAL, NAN, 3e38, -3e38, 65504, 1e-40, -1e-45};
    if (c->pattern == EXTREMES)
        return extremes[v % 8];
    if (c->pattern == CANCELLING) /* v is the same on all ranks */
        return (double)(int64_t)v * 0x1p-60 * (r % 2 == 0 ? 1 : -1) + (v % 16 == 0 ? r * 1e-7 : 0);
    return (double)(int64_t)v * 0x1p-60;
}

/* The bits of element i of rank r's input. Every rank computes them without communication. */
static inline uint64_t element(const struct one_case *c, int r, size_t i)
{
    uint64_t h = place_hash(c, r, i), v;
    size_t bytes = sp_dtype_bytes(c->dtype);
    double x;
    if ((int)(h % 100) >= c->density_pct || (c->pattern == ONE_RANK && r != 1))
        return 0;
    v = mix(c->pattern == SAME_PLACES || c->pattern == RUNS ? h + (uint64_t)r * 77 + i : h);
    x = float_value(c, r, v);
    switch (c->dtype) {
    case SPCCL_FLOAT32:
        if (v % 97 == 0)
            return 0x80000000u; /* -0.0 */
        if (v % 89 == 0)
            return 0x00000001u; /* denormal */
        return sp_f32_to_bits((float)x);
    case SPCCL_FLOAT16:
        return sp_f16_from_f32((float)x);
    case SPCCL_BFLOAT16:
        return sp_bf16_from_f32((float)x);
    case SPCCL_FLOAT64:
        return f64_to_bits(x);
    default:
        return bytes == 8 ? v : v & ((UINT64_C(1) << (8 * bytes)) - 1);
    }
}

static inline void put(void *buf, size_t i, spccl_dtype t, uint64_t bits)
{
    memcpy((uint8_t *)buf + i * sp_dtype_bytes(t), &bits, sp_dtype_bytes(t));
}

static inline uint64_t get(const void *buf, size_t i, spccl_dtype t)
{
    uint64_t bits = 0;
    memcpy(&bits, (const uint8_t *)buf + i * sp_dtype_bytes(t), sp_dtype_bytes(t));
    return bits;
}

static inline float widen(spccl_dtype t, uint64_t bits)
{
    return t == SPCCL_FLOAT32   ? sp_f32_from_bits((uint32_t)bits)
           : t == SPCCL_FLOAT16 ? sp_f16_to_f32((uint16_t)bits)
                                : sp_bf16_to_f32((uint16_t)bits);
}

static inline float float_op(spccl_redop op, float acc, float x)
{
    if (op == SPCCL_MIN)
        return x < acc || x != x ? x : acc;
    if (op == SPCCL_MAX)
        return x > acc || x != x ? x : acc;
    return op == SPCCL_PROD ? acc * x : acc + x;
}

static inline double double_op(spccl_redop op, double acc, double x)
{
    if (op == SPCCL_MIN)
        return x < acc || x != x ? x : acc;
    if (op == SPCCL_MAX)
        return x > acc || x != x ? x : acc;
    return op == SPCCL_PROD ? acc * x : acc + x;
}

static inline int64_t sign_extend(uint64_t bits, spccl_dtype t)
{
    return t == SPCCL_INT8    ? (int8_t)bits
           : t == SPCCL_INT16 ? (int16_t)bits
           : t == SPCCL_INT32 ? (int32_t)bits
                              : (int64_t)bits; /* int64; uint8 is never negative */
}

/* In which order a reduction adds: groups of ranks one after the other, then the sums of the groups. */
struct sum_order {
    int n_groups, n_ranks;
    int end[RANKS_CAP]; /* group g is rank[end[g - 1]] .. rank[end[g] - 1] */
    int rank[RANKS_CAP];
};
/* The order for element i of the whole input. NULL: rank order, as spccl.h defines it. */
static void (*test_sum_order)(const struct one_case *c, int n_ranks, size_t i, struct sum_order *out);

static inline struct sum_order order_of(const struct one_case *c, int n_ranks, size_t i)
{
    struct sum_order o = {.n_groups = 1, .n_ranks = n_ranks, .end = {n_ranks}};
    for (int r = 0; r < n_ranks; r++)
        o.rank[r] = r;
    if (test_sum_order != NULL)
        test_sum_order(c, n_ranks, i, &o);
    return o;
}

static inline double f64_of(uint64_t bits)
{
    double x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* One step of a reduction: acc op x. The first step of a sum adds to +0.0. Of two NaNs the result is the left one, and
 * inf - inf is the NaN of dtype.h, on any CPU and with any compiler. */
static inline double f64_step(spccl_redop op, bool first, double acc, double x)
{
    bool sums = op == SPCCL_SUM || op == SPCCL_AVG;
    double y = first ? (sums ? 0 + x : x) : double_op(op, acc, x);
    if (first || !isnan(y) || op == SPCCL_MIN || op == SPCCL_MAX)
        return y;
    return isnan(acc) ? acc : isnan(x) ? x : f64_of(SP_NAN_F64);
}

static inline float f32_step(spccl_redop op, bool first, float acc, float x)
{
    bool sums = op == SPCCL_SUM || op == SPCCL_AVG;
    float y = first ? (sums ? 0 + x : x) : float_op(op, acc, x);
    if (first || !isnan(y) || op == SPCCL_MIN || op == SPCCL_MAX)
        return y;
    return isnan(acc) ? acc : isnan(x) ? x : sp_f32_from_bits(SP_NAN_F32);
}

static inline uint64_t int_step(const struct one_case *c, bool first, uint64_t acc, uint64_t x)
{
    size_t bytes = sp_dtype_bytes(c->dtype);
    uint64_t mask = bytes == 8 ? UINT64_MAX : (UINT64_C(1) << (8 * bytes)) - 1;
    int64_t a = sign_extend(acc, c->dtype), b = sign_extend(x, c->dtype);
    if (first)
        return x;
    if (c->op == SPCCL_MIN)
        return b < a ? x : acc;
    if (c->op == SPCCL_MAX)
        return b > a ? x : acc;
    return (c->op == SPCCL_PROD ? acc * x : acc + x) & mask;
}

static inline uint64_t reduced_f64(const struct one_case *c, const struct sum_order *o, size_t i)
{
    double all = 0;
    for (int g = 0, at = 0; g < o->n_groups; g++) {
        double acc = 0;
        for (bool first = true; at < o->end[g]; at++, first = false)
            acc = f64_step(c->op, first, acc, f64_of(element(c, o->rank[at], i)));
        all = f64_step(c->op, g == 0, all, acc);
    }
    return f64_to_bits(c->op == SPCCL_AVG ? all / o->n_ranks : all);
}

static inline uint64_t reduced_f32(const struct one_case *c, const struct sum_order *o, size_t i)
{
    float all = 0;
    for (int g = 0, at = 0; g < o->n_groups; g++) {
        float acc = 0;
        for (bool first = true; at < o->end[g]; at++, first = false)
            acc = f32_step(c->op, first, acc, widen(c->dtype, element(c, o->rank[at], i)));
        all = f32_step(c->op, g == 0, all, acc);
    }
    if (c->op == SPCCL_AVG)
        all /= (float)o->n_ranks;
    return out_dtype(c) == SPCCL_FLOAT32 ? sp_f32_to_bits(all)
           : c->dtype == SPCCL_FLOAT16   ? sp_f16_from_f32(all)
                                         : sp_bf16_from_f32(all);
}

/* The reduction of element i over all ranks, in the order that test_sum_order gives. */
static inline uint64_t reduced(const struct one_case *c, int n_ranks, size_t i)
{
    struct sum_order o = order_of(c, n_ranks, i);
    size_t bytes = sp_dtype_bytes(c->dtype);
    uint64_t mask = bytes == 8 ? UINT64_MAX : (UINT64_C(1) << (8 * bytes)) - 1, acc = 0;
    if (c->dtype == SPCCL_FLOAT64)
        return reduced_f64(c, &o, i);
    if (c->dtype == SPCCL_FLOAT32 || c->dtype == SPCCL_FLOAT16 || c->dtype == SPCCL_BFLOAT16)
        return reduced_f32(c, &o, i);
    for (int r = 0; r < n_ranks; r++) /* integers: all orders give the same */
        acc = int_step(c, r == 0, acc, element(c, r, i));
    return c->op == SPCCL_AVG ? (uint64_t)(sign_extend(acc, c->dtype) / n_ranks) & mask : acc;
}

static inline uint8_t *make_expected(const struct one_case *c, int n_ranks)
{
    size_t n = c->coll == ALL_REDUCE || c->coll == BROADCAST ? c->n : c->n * (size_t)n_ranks;
    uint8_t *bytes = malloc(n * sp_dtype_bytes(out_dtype(c)) + 1);
    for (size_t i = 0; i < n; i++)
        put(bytes, i, out_dtype(c),
            c->coll == ALL_GATHER  ? element(c, (int)(i / c->n), i % c->n)
            : c->coll == BROADCAST ? element(c, c->root, i)
                                   : reduced(c, n_ranks, i));
    return bytes;
}

/* Buffers of one case on one rank, of exactly the size needed: the address sanitizer then finds any access
 * outside. */
struct buffers {
    uint8_t *in, *out;
    size_t n_in, n_out;
    void *alloc_in, *alloc_out;
};

static inline struct buffers make_buffers(const struct one_case *c, const struct rank_ctx *ctx)
{
    struct buffers b = {0};
    size_t e = sp_dtype_bytes(c->dtype), e_out = sp_dtype_bytes(out_dtype(c));
    size_t n_ranks = (size_t)ctx->n_ranks, own = (size_t)ctx->rank * c->n;
    b.n_in = c->coll == REDUCE_SCATTER ? c->n * n_ranks : c->n;
    b.n_out = c->coll == ALL_GATHER ? c->n * n_ranks : c->n;
    b.alloc_out = malloc(b.n_out * e_out);
    b.alloc_in = malloc(b.n_in * e);
    b.in = b.alloc_in;
    b.out = b.alloc_out;
    memset(b.out, 0xa5, b.n_out * e_out);
    if (c->coll == BROADCAST) {
        if (ctx->rank == c->root)
            for (size_t i = 0; i < c->n; i++)
                put(b.out, i, c->dtype, element(c, c->root, i));
        return b;
    }
    if (c->in_place && c->coll == ALL_GATHER)
        b.in = b.out + own * e;
    if (c->in_place && c->coll == ALL_REDUCE)
        b.in = b.out;
    for (size_t i = 0; i < b.n_in; i++)
        put(b.in, i, c->dtype, element(c, ctx->rank, i));
    if (c->in_place && c->coll == REDUCE_SCATTER && e_out == e)
        b.out = b.in + own * e;
    return b;
}

static inline spccl_status issue(const struct one_case *c, spccl_comm *comm, const struct buffers *b,
                                 spccl_request **req)
{
    switch (c->coll) {
    case ALL_GATHER:
        return spccl_all_gather(comm, b->in, b->out, c->n, c->dtype, req);
    case REDUCE_SCATTER:
        return (c->wide ? spccl_reduce_scatter_wide : spccl_reduce_scatter)(comm, b->in, b->out, c->n,
                                                                            c->dtype, c->op, req);
    case ALL_REDUCE:
        return spccl_all_reduce(comm, b->in, b->out, c->n, c->dtype, c->op, req);
    default:
        return spccl_broadcast(comm, b->out, c->n, c->dtype, c->root, req);
    }
}

static inline void check_case(const struct one_case *c, struct rank_ctx *ctx, const struct buffers *b,
                              spccl_status st, struct expected *expected)
{
    spccl_dtype dtype = out_dtype(c);
    size_t bad = 0, at = 0, e = sp_dtype_bytes(dtype);
    const uint8_t *want;
    char error[1024];
    snprintf(error, sizeof error, "%s", st != SPCCL_OK ? spccl_last_error() : "");
    pthread_mutex_lock(&expected->mu);
    if (expected->bytes == NULL)
        expected->bytes = make_expected(c, ctx->n_ranks);
    want = expected->bytes + (c->coll == REDUCE_SCATTER ? (size_t)ctx->rank * c->n * e : 0);
    if (st == SPCCL_OK && memcmp(b->out, want, b->n_out * e) != 0)
        for (size_t i = b->n_out; i-- > 0;)
            if (get(b->out, i, dtype) != get(want, i, dtype)) {
                bad++;
                at = i;
            }
    CHECK(st == SPCCL_OK && bad == 0,
          "%s%s of %zu %s, op %d, root %d, density %d%%, %s%s, rank %d of %d: status %d %s; %zu wrong, first "
          "at %zu: got %llx, wanted %llx (seed %llu)",
          coll_names[c->coll], c->wide ? " (wide)" : "", c->n, sp_dtype_name(c->dtype), (int)c->op, c->root,
          c->density_pct, c->in_place ? "in place" : "out of place", c->async ? ", async" : "", ctx->rank,
          ctx->n_ranks, (int)st, error, bad, at, bad ? (unsigned long long)get(b->out, at, dtype) : 0,
          bad ? (unsigned long long)get(want, at, dtype) : 0, (unsigned long long)c->seed);
    if (++expected->n_checked == ctx->n_ranks) {
        free(expected->bytes);
        expected->bytes = NULL;
    }
    pthread_mutex_unlock(&expected->mu);
}

enum { IN_FLIGHT = 12 }; /* collectives at the same time */

static inline void run_cases(struct rank_ctx *ctx)
{
    struct plan_of_cases *plan = ctx->arg;
    struct buffers b[IN_FLIGHT];
    spccl_request *req[IN_FLIGHT];
    spccl_status st[IN_FLIGHT];
    for (int first = 0; first < plan->n_cases; first += IN_FLIGHT) {
        int n = plan->n_cases - first < IN_FLIGHT ? plan->n_cases - first : IN_FLIGHT;
        for (int i = 0; i < n; i++) {
            const struct one_case *c = &plan->cases[first + i];
            b[i] = make_buffers(c, ctx);
            req[i] = NULL;
            st[i] = issue(c, ctx->comm, &b[i], c->async ? &req[i] : NULL);
        }
        for (int i = n; i-- > 0;) { /* wait in the reverse of the order of the calls */
            if (req[i] != NULL)
                st[i] = spccl_request_wait(req[i], -1);
            check_case(&plan->cases[first + i], ctx, &b[i], st[i], &plan->expected[first + i]);
            spccl_request_free(req[i]);
            free(b[i].alloc_in);
            free(b[i].alloc_out);
        }
    }
}

static inline void run_plan(const struct one_case *cases, int n_cases, int n_ranks, const char *transports)
{
    struct plan_of_cases plan = {cases, n_cases, calloc((size_t)n_cases, sizeof *plan.expected)};
    struct rank_ctx ctx[RANKS_CAP];
    spccl_config config = SPCCL_CONFIG_INIT;
    config.timeout_ms = 60000;
    config.transports = transports;
    for (int i = 0; i < n_cases; i++)
        pthread_mutex_init(&plan.expected[i].mu, NULL);
    run_ranks(n_ranks, &config, run_cases, &plan, ctx);
    for (int r = 0; r < n_ranks; r++)
        CHECK(ctx[r].created == SPCCL_OK, "rank %d of %d over %s: %s", r, n_ranks, transports, ctx[r].error);
    for (int i = 0; i < n_cases; i++) {
        CHECK(plan.expected[i].n_checked == n_ranks, "case %d was checked by %d of %d ranks", i,
              plan.expected[i].n_checked, n_ranks);
        pthread_mutex_destroy(&plan.expected[i].mu);
    }
    free(plan.expected);
}

static const size_t sizes[] = {0, 1, 31, 32, 33, 63, 64, 65, 255, 256, 257, 4095, 4096, 4097, 3 * 4096 + 7};
#define N_SIZES (sizeof sizes / sizeof sizes[0])

static inline struct one_case random_case(int n_ranks, size_t n)
{
    static const int densities[] = {0, 1, 3, 10, 30, 50, 90, 99, 100};
    struct one_case c = {.coll = (int)(test_rand() % N_COLLS),
                         .root = (int)(test_rand() % (uint64_t)n_ranks),
                         .dtype = (spccl_dtype)(1 + test_rand() % 10),
                         .op = (spccl_redop)(test_rand() % 5),
                         .n = n,
                         .density_pct = densities[test_rand() % 9],
                         .in_place = test_rand() % 2,
                         .async = test_rand() % 2,
                         .seed = test_rand()};
    if (c.dtype == SPCCL_FLOAT8 && (c.coll == REDUCE_SCATTER || c.coll == ALL_REDUCE))
        c.dtype = SPCCL_FLOAT32;
    c.wide = c.coll == REDUCE_SCATTER && test_rand() % 2;
    return c;
}

static inline void random_plan(int n_ranks, int n_cases, size_t n_max, const char *transports)
{
    struct one_case cases[256];
    n_cases = share_of(n_cases, IN_FLIGHT);
    for (int i = 0; i < n_cases; i++)
        cases[i] = random_case(n_ranks, i % 3 == 0 ? test_rand() % n_max : sizes[test_rand() % N_SIZES]);
    run_plan(cases, n_cases, n_ranks, transports);
}

static inline void every_dtype_and_op(int n_ranks)
{
    struct one_case cases[256];
    int n = 0;
    for (int t = SPCCL_FLOAT32; t <= SPCCL_UINT8; t++)
        for (int op = SPCCL_SUM; op <= SPCCL_PROD; op++)
            for (int coll = REDUCE_SCATTER; coll <= ALL_REDUCE; coll++)
                if (t != SPCCL_FLOAT8) {
                    cases[n] = (struct one_case){.coll = coll,
                                                 .dtype = (spccl_dtype)t,
                                                 .op = (spccl_redop)op,
                                                 .n = 5000,
                                                 .density_pct = 1 + (int)(test_rand() % 60),
                                                 .seed = test_rand(),
                                                 .async = n % 2};
                    n++;
                }
    run_plan(cases, n, n_ranks, "inproc");
}

#endif
