/* cuda_cases.h - random cases of GPU collectives, for groups of ranks that are threads. The result of each case must
 * have the same bits as the host's, on every rank, and only the output may be written. */
#ifndef SP_CUDA_CASES_H
#define SP_CUDA_CASES_H

#include "cuda_ranks.h"

/* Transports of the next groups; NULL: the default. */
static const char *group_transports;

/* Bytes of the larger of input and output. */
static inline size_t total_bytes(void)
{
    return is_small ? (size_t)256 << 10 : is_slow ? (size_t)1 << 20 : (size_t)30 << 20;
}

struct one_case {
    struct call call;
    array_kind kinds[CUDA_RANKS_CAP]; /* by rank */
    bool in_place;
    size_t lead_in, lead_out; /* bytes before the buffers: guard and skew */
    uint64_t seed;
};

/* One group under test. */
struct group {
    int n_ranks;
    spccl_format format;
    uint32_t max_ctas;
    bool every_op; /* test each collective, dtype and operation; else only random cases */
    int n_random;
    uint64_t seed;
    const char *schedule; /* of all-reduces; NULL: direct (by size nearly all would take one hop) */
};

static inline const char *case_text(const struct one_case *c, const struct rank_ctx *ctx)
{
    static _Thread_local char text[320];
    const struct group *g = ctx->arg;
    snprintf(text, sizeof text,
             "rank %d of %d: %s%s of %zu %s, %s, root %d, own input %s, format %s, max_ctas %u%s, skews %zu "
             "and %zu, case "
             "%llu",
             ctx->rank, ctx->n_ranks, coll_names[c->call.coll], c->call.wide ? " (wide)" : "", c->call.n,
             spccl_dtype_name(c->call.dtype), op_names[c->call.op], c->call.root,
             kind_names[c->kinds[ctx->rank]], spccl_format_name(g->format), g->max_ctas,
             c->in_place ? ", in place" : "", c->lead_in - GUARD_BYTES, c->lead_out - GUARD_BYTES,
             (unsigned long long)c->seed);
    return text;
}

/* ---- drawing a case: all ranks draw the same ---- */

static inline size_t draw_n(const struct call *c, int n_ranks, bool large, uint64_t *rng)
{
    size_t e = spccl_dtype_bytes(c->dtype), slice = 16384 / e;
    /* The longest all-reduce that takes one hop. */
    size_t one_hop = (3u << 20) / (n_ranks > 1 ? (size_t)n_ranks - 1 : 1);
    const size_t sizes[] = {0,
                            1,
                            7,
                            2047,
                            2048,
                            2049,
                            slice / 4 - 1, /* a slice has 8 KiB, or 4 KiB where 16-bit floats are added */
                            slice / 4 + 1,
                            slice / 2 - 1,
                            slice / 2,
                            slice / 2 + 1,
                            slice - 1,
                            slice,
                            slice + 1,
                            2 * slice,
                            3 * slice + 7,
                            9 * slice - 31,
                            (1u << 20) / e,
                            one_hop / e,
                            one_hop / e + 1};
    size_t most = total_bytes() / out_elem_bytes(c) /
                  (c->coll == ALL_GATHER || c->coll == REDUCE_SCATTER ? (size_t)n_ranks : 1);
    size_t n = sizes[rand_below(rng, sizeof sizes / sizeof *sizes)];
    if (large)
        return most - rand_below(rng, 1000);
    if (rand_below(rng, 4) == 0)
        n = rand_below(rng, (uint32_t)(300000 / e));
    return n < most ? n : most;
}

static inline void draw_rest(struct one_case *c, int n_ranks, bool large, uint64_t *rng)
{
    size_t e = spccl_dtype_bytes(c->call.dtype), e_out;
    array_kind common = (array_kind)rand_below(rng, N_KINDS);
    bool alike = rand_below(rng, 2) == 0;
    c->call.wide = c->call.coll == REDUCE_SCATTER && rand_below(rng, 2) == 0;
    e_out = out_elem_bytes(&c->call);
    c->call.n = draw_n(&c->call, n_ranks, large, rng);
    c->call.root = (int)rand_below(rng, (uint32_t)n_ranks);
    c->in_place = c->call.coll == BROADCAST || (rand_below(rng, 3) == 0 && e_out == e);
    c->lead_in = GUARD_BYTES + e * rand_below(rng, 3);
    c->lead_out = GUARD_BYTES + e_out * rand_below(rng, 3);
    for (int r = 0; r < n_ranks; r++)
        c->kinds[r] = alike ? common : (array_kind)rand_below(rng, N_KINDS);
    if (rand_below(rng, 4) == 0)
        c->kinds[rand_below(rng, (uint32_t)n_ranks)] = KIND_ZERO;
    c->seed = next_rand(rng);
}

static inline void draw_call(struct call *c, uint64_t *rng)
{
    *c = (struct call){.coll = (enum coll)rand_below(rng, N_COLLS),
                       .dtype = (spccl_dtype)(1 + rand_below(rng, N_DTYPES))};
    if (call_reduces(c) && c->dtype == SPCCL_FLOAT8)
        c->dtype = SPCCL_BFLOAT16;
    if (call_reduces(c))
        c->op = (spccl_redop)rand_below(rng, N_OPS);
}

/* ---- running a case, on each rank ---- */

/* Fill the rank's buffers. m->want = what `out` must hold after the call. */
static inline bool prepare(const struct one_case *c, const struct rank_ctx *ctx)
{
    struct rank_buffer *m = &rank_buffers[ctx->rank];
    const struct call *call = &c->call;
    size_t own = (size_t)ctx->rank * block_bytes(call), in = in_bytes(call, ctx->n_ranks);
    size_t out = out_bytes(call, ctx->n_ranks), all_out = c->lead_out + (in > out ? in : out) + GUARD_BYTES;
    uint64_t rng = c->seed + (uint64_t)ctx->rank * 77;
    uint8_t *result;
    spccl_status st;
    fill_array(m->plain, in / spccl_dtype_bytes(call->dtype), call->dtype, c->kinds[ctx->rank], &rng);
    memset(m->out, POISON, all_out);
    memset(m->in, POISON, c->lead_in + in + GUARD_BYTES);
    memcpy(m->in + c->lead_in, m->plain, in);
    if (c->in_place)
        memcpy(m->out + c->lead_out + (call->coll == ALL_GATHER ? own : 0), m->plain, in);
    memcpy(m->want, m->out, all_out);
    result = m->want + c->lead_out + (c->in_place && call->coll == REDUCE_SCATTER ? own : 0);
    st = host_call(ctx->comm, call, m->plain, result);
    CHECK(st == SPCCL_OK, "%s: the host: %s", case_text(c, ctx), spccl_last_error());
    CUDA_OK(cudaMemcpyAsync(m->in_d, m->in, c->lead_in + in + GUARD_BYTES, cudaMemcpyHostToDevice, m->on));
    CUDA_OK(cudaMemcpyAsync(m->out_d, m->out, all_out, cudaMemcpyHostToDevice, m->on));
    return st == SPCCL_OK;
}

static inline void compare(const struct one_case *c, const struct rank_ctx *ctx, const uint8_t *want,
                           const uint8_t *got_d, size_t lead, size_t all)
{
    struct rank_buffer *m = &rank_buffers[ctx->rank];
    size_t e = out_elem_bytes(&c->call), at;
    uint64_t w = 0, v = 0;
    CUDA_OK(cudaMemcpyAsync(m->got, got_d, all, cudaMemcpyDeviceToHost, m->on));
    sync_stream(m->on);
    at = first_difference(want, m->got, all);
    if (at < all && at >= lead) {
        memcpy(&w, want + lead + (at - lead) / e * e, e);
        memcpy(&v, m->got + lead + (at - lead) / e * e, e);
    }
    CHECK(at == all, "%s: %s differs at byte %td (element %td): %#llx, wanted %#llx", case_text(c, ctx),
          want == m->in ? "in" : "out", (ptrdiff_t)at - (ptrdiff_t)lead,
          ((ptrdiff_t)at - (ptrdiff_t)lead) / (ptrdiff_t)e, (unsigned long long)v, (unsigned long long)w);
}

/* spccl_cuda_wait polls, which would leave little time for the work of many ranks on few cores. */
static bool waits_asleep;
static inline void wait_asleep(cudaStream_t on)
{
    int64_t until = now_ms() + wait_ms();
    while (waits_asleep && cudaStreamQuery(on) == cudaErrorNotReady && now_ms() < until)
        sleep_ms(2);
}

/* Run and compare. False: the communicator is broken. */
static inline bool run_case(const struct one_case *c, const struct rank_ctx *ctx)
{
    struct rank_buffer *m = &rank_buffers[ctx->rank];
    const struct call *call = &c->call;
    size_t own = (size_t)ctx->rank * block_bytes(call), in = in_bytes(call, ctx->n_ranks);
    size_t out = out_bytes(call, ctx->n_ranks);
    uint8_t *from = m->in_d + c->lead_in, *to = m->out_d + c->lead_out;
    spccl_status st;
    if (!prepare(c, ctx))
        return false;
    if (c->in_place) {
        from = to + (call->coll == ALL_GATHER ? own : 0);
        to += call->coll == REDUCE_SCATTER ? own : 0;
    }
    st = gpu_call(ctx->comm, call, from, to, m->on);
    CHECK(st == SPCCL_OK, "%s: %s", case_text(c, ctx), spccl_last_error());
    if (st == SPCCL_OK) {
        wait_asleep(m->on);
        st = spccl_cuda_wait(ctx->comm, m->on, wait_ms());
        CHECK(st == SPCCL_OK, "%s: waiting: %s", case_text(c, ctx), spccl_last_error());
    }
    if (st != SPCCL_OK)
        return false;
    compare(c, ctx, m->want, m->out_d, c->lead_out, c->lead_out + (in > out ? in : out) + GUARD_BYTES);
    compare(c, ctx, m->in, m->in_d, c->lead_in, c->lead_in + in + GUARD_BYTES);
    return true;
}

static inline bool run_every_op(const struct rank_ctx *ctx, uint64_t *rng)
{
    for (int coll = 0; coll < N_COLLS; coll++)
        for (int d = 1; d <= N_DTYPES; d++)
            for (int op = 0; op < N_OPS; op++) {
                struct one_case c = {
                    .call = {.coll = (enum coll)coll, .dtype = (spccl_dtype)d, .op = (spccl_redop)op}};
                if (call_reduces(&c.call) ? d == SPCCL_FLOAT8 : op != 0)
                    continue;
                draw_rest(&c, ctx->n_ranks, false, rng);
                if (!run_case(&c, ctx))
                    return false;
            }
    return true;
}

/* The counters must be plausible. */
static inline void check_stats(const struct rank_ctx *ctx)
{
    const struct group *g = ctx->arg;
    spccl_cuda_stats s = {.struct_bytes = sizeof s};
    uint64_t n_frames = 0;
    CHECK_OK(spccl_cuda_get_stats(ctx->comm, &s));
    for (int f = 0; f < SPCCL_N_FORMATS; f++)
        n_frames += s.n_frames_sent[f];
    CHECK(s.device == rank_buffers[ctx->rank].device, "device %d", s.device);
    CHECK(s.n_ctas >= 1 && (g->max_ctas == 0 || s.n_ctas <= g->max_ctas), "%u blocks", s.n_ctas);
    CHECK(s.n_collectives != 0, "no collectives");
    CHECK((n_frames != 0) == (ctx->n_ranks > 1), "%llu frames", (unsigned long long)n_frames);
    CHECK(s.wire_bytes_sent >= 64 * n_frames, "%llu bytes in %llu frames",
          (unsigned long long)s.wire_bytes_sent, (unsigned long long)n_frames);
}

static inline void rank_fn(struct rank_ctx *ctx)
{
    const struct group *g = ctx->arg;
    uint64_t rng = g->seed;
    bool ok = attach_gpu(ctx->comm, ctx->rank, g->max_ctas);
    if (ok && g->every_op)
        ok = run_every_op(ctx, &rng);
    for (int i = 0; ok && i < g->n_random; i++) {
        struct one_case c;
        draw_call(&c.call, &rng);
        draw_rest(&c, ctx->n_ranks, i % 10 == 9, &rng);
        ok = run_case(&c, ctx);
    }
    /* In a few random cases, as broadcasts, a rank may have nothing to send. */
    if (ok && all_here(ctx->comm) && (g->every_op || g->n_random >= 8))
        check_stats(ctx);
}

static inline void run_group(const struct group *given)
{
    struct rank_ctx ctx[RANKS_CAP];
    struct group g = *given;
    spccl_config config = SPCCL_CONFIG_INIT;
    setenv("SPCCL_SCHEDULE", g.schedule != NULL ? g.schedule : "direct", 1);
    g.seed = test_rand();
    g.n_random *= n_rounds;
    config.timeout_ms = is_small || is_slow ? 60000 : 5000;
    config.format = g.format;
    config.transports = group_transports;
    run_ranks(g.n_ranks, &config, rank_fn, &g, ctx);
    for (int r = 0; r < g.n_ranks; r++)
        CHECK(ctx[r].created == SPCCL_OK, "rank %d: %s", r, ctx[r].error);
}

#endif
