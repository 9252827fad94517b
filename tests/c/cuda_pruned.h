/* cuda_pruned.h - what the tests of spccl_cuda_prune_all_reduce share: a gradient, its segments and their state on two
 * sides, one pruned and summed by lists, the other by spccl_cuda_prune and spccl_cuda_all_reduce. */
#ifndef CUDA_PRUNED_H
#define CUDA_PRUNED_H

#include "cuda_sums.h"

#include <math.h>

#define N_STATES 16
#define N_SQUARES 3
#define CLIP_AT 2048 /* in the first 4096 bytes of a side, behind the states */
#define LIST_BYTES "16M"
#define MANY (is_small || is_slow ? 50000u : 1000000u) /* elements */
#define CAP ((size_t)4 * 1100000 * 6)

/* What a rank keeps for one way of calling: addresses on its GPU. */
struct side {
    float *grad;
    uint8_t *residual, *velocity;
    spccl_prune_state *states;
    float *norm, *factor, *loss_scale; /* [1], for scenes that clip */
    double *squares;                   /* [N_SQUARES] */
    spccl_prune_plan *plan;
};

enum route { ANY_ROUTE, BY_LISTS, BY_FRAMES };

struct scene {
    uint64_t seed;
    size_t n, n_segments;
    bool odd, staged, no_residual; /* staged: two calls */
    bool clips;                    /* with the norms of N_SQUARES buckets, a factor and a loss scale */
    enum route route;              /* wanted */
    spccl_redop op;
    int n_steps;
    spccl_prune_options options;
};

static inline size_t round_up(size_t n)
{
    return (n + 15) / 16 * 16;
}

/* Where the two sides lie: gradients in in_d and out_d, the rest in spare_d. */
static inline struct side side_of(const struct rank_ctx *c, const struct scene *s, int which)
{
    const struct rank_buffer *m = &rank_buffers[c->rank];
    size_t state_bytes = round_up((s->n + 16 * N_STATES) * 4), each = 2 * state_bytes + 4096;
    uint8_t *base = m->spare_d + (size_t)which * each;
    return (struct side){.grad = (float *)(void *)(which == 0 ? m->in_d : m->out_d),
                         .residual = base + 4096,
                         .velocity = base + 4096 + state_bytes,
                         .states = (spccl_prune_state *)(void *)base,
                         .norm = (float *)(void *)(base + CLIP_AT),
                         .factor = (float *)(void *)(base + CLIP_AT + 16),
                         .loss_scale = (float *)(void *)(base + CLIP_AT + 32),
                         .squares = (double *)(void *)(base + CLIP_AT + 48)};
}

/* The same segments on all ranks and both sides. */
static inline void make_plan(const struct rank_ctx *c, const struct scene *s, struct side *side)
{
    spccl_prune_segment segments[N_STATES];
    uint64_t rng = s->seed;
    size_t at = 0;
    for (size_t i = 0; i < s->n_segments; i++) {
        size_t left = s->n - at, n = left;
        size_t offset = round_up(at * 4 + 32 * i);
        bool has_r = next_rand(&rng) % 4 != 0 && !s->no_residual, has_u = next_rand(&rng) % 2 != 0;
        if (i + 1 != s->n_segments) {
            n = 1 + next_rand(&rng) % (2 * left / (s->n_segments - i));
            n = n > left - (s->n_segments - i - 1) ? left - (s->n_segments - i - 1) : n;
        }
        segments[i] = (spccl_prune_segment){
            .begin = at,
            .n_elems = n,
            .residual = has_r || (!s->odd && !s->no_residual) ? side->residual + offset : NULL,
            .velocity = has_u && s->odd ? side->velocity + offset : NULL,
            .state = side->states + i,
            .key = (uint32_t)i,
            .whole = next_rand(&rng) % 5 == 0 && s->odd};
        at += n;
    }
    CHECK_OK(spccl_prune_plan_create(segments, s->n_segments, s->n, SPCCL_FLOAT32,
                                     rank_buffers[c->rank].device, &side->plan));
}

static inline float random_value(uint64_t *rng, bool odd)
{
    uint32_t bits = (uint32_t)next_rand(rng);
    float f;
    if (odd && next_rand(rng) % 300 == 0) { /* NaN with a payload, inf, -0, denormal */
        static const uint32_t special[] = {0x7f800001u, 0xffc12345u, 0x7f800000u,
                                           0xff800000u, 0x80000000u, 3u};
        bits = special[bits % 6];
        memcpy(&f, &bits, 4);
        return f;
    }
    return ldexpf((float)(int32_t)bits, -30 - (int)(next_rand(rng) % 4));
}

/* Other norms, factors and loss scales on each rank and in each step; sometimes a norm that is not finite. */
static inline void load_clip(const struct rank_ctx *c, uint64_t *rng, int step, struct side *sides)
{
    const struct rank_buffer *m = &rank_buffers[c->rank];
    float values[3] = {(float)(1 + next_rand(rng) % 1000), 0.5f, (float)(1 << step)};
    if (next_rand(rng) % 4 == 0)
        values[0] = INFINITY;
    for (int k = 0; k < 2; k++) {
        float *const to[3] = {sides[k].norm, sides[k].factor, sides[k].loss_scale};
        for (int i = 0; i < 3; i++)
            CUDA_OK(cudaMemcpyAsync(to[i], &values[i], sizeof(float), cudaMemcpyHostToDevice, m->on));
    }
    sync_stream(m->on);
}

/* The options of a call on a side. */
static inline spccl_prune_options options_of(const struct scene *s, const struct side *side)
{
    spccl_prune_options o = s->options;
    if (!s->clips)
        return o;
    o.norm = side->norm;
    o.factor = side->factor;
    o.loss_scale = side->loss_scale;
    o.squares = side->squares;
    o.n_squares = N_SQUARES;
    o.square = (uint32_t)(s->seed % N_SQUARES);
    o.max_norm = 300;
    return o;
}

/* Fill a gradient on the host with what rank and step determine, and copy it to both sides. */
static inline void load_gradient(const struct rank_ctx *c, const struct scene *s, int step,
                                 struct side *sides)
{
    const struct rank_buffer *m = &rank_buffers[c->rank];
    uint64_t rng = s->seed + 1000003u * (uint64_t)c->rank + 7919u * (uint64_t)step;
    float *x = (float *)(void *)m->in;
    bool zeros = next_rand(&rng) % 4 == 0;
    for (size_t i = 0; i < s->n; i++)
        x[i] = zeros && i < s->n / 2 ? 0 : random_value(&rng, s->odd);
    for (int k = 0; k < 2; k++)
        CUDA_OK(cudaMemcpyAsync(sides[k].grad, x, s->n * 4, cudaMemcpyHostToDevice, m->on));
    sync_stream(m->on);
    if (s->clips)
        load_clip(c, &rng, step, sides);
}

static inline void clear_state(const struct rank_ctx *c, const struct scene *s, struct side *side)
{
    const struct rank_buffer *m = &rank_buffers[c->rank];
    spccl_prune_state *states = (spccl_prune_state *)(void *)m->plain;
    uint64_t rng = s->seed + 5;
    size_t bytes = (s->n + 16 * N_STATES) * 4;
    memset(states, 0, N_STATES * sizeof *states);
    for (size_t i = 0; i < s->n_segments; i++)
        states[i].threshold = (double)(float)((double)(next_rand(&rng) % 6) * 0.4);
    CUDA_OK(cudaMemcpyAsync(side->states, states, N_STATES * sizeof *states, cudaMemcpyHostToDevice, m->on));
    CUDA_OK(cudaMemsetAsync(side->squares, 0, N_SQUARES * sizeof *side->squares, m->on));
    CUDA_OK(cudaMemsetAsync(side->residual, 0, bytes, m->on));
    CUDA_OK(cudaMemsetAsync(side->velocity, 0, bytes, m->on));
    sync_stream(m->on);
}

static inline void check_bytes(const struct rank_ctx *c, const struct scene *s, const char *what,
                               const void *a, const void *b, size_t bytes)
{
    const struct rank_buffer *m = &rank_buffers[c->rank];
    size_t at;
    CUDA_OK(cudaMemcpyAsync(m->got, a, bytes, cudaMemcpyDeviceToHost, m->on));
    CUDA_OK(cudaMemcpyAsync(m->want, b, bytes, cudaMemcpyDeviceToHost, m->on));
    CHECK_OK(spccl_cuda_wait(c->comm, m->on, wait_ms()));
    at = first_difference(m->got, m->want, bytes);
    CHECK(at == bytes, "rank %d of %d: %s differs at byte %zu of %zu (seed %llu)", c->rank, c->n_ranks, what,
          at, bytes, (unsigned long long)s->seed);
}

static inline void compare_sides(const struct rank_ctx *c, const struct scene *s, const struct side *sides)
{
    size_t bytes = (s->n + 16 * N_STATES) * 4;
    check_bytes(c, s, "the sum", sides[0].grad, sides[1].grad, s->n * 4);
    check_bytes(c, s, "the residual", sides[0].residual, sides[1].residual, bytes);
    check_bytes(c, s, "the velocity", sides[0].velocity, sides[1].velocity, bytes);
    check_bytes(c, s, "the states", sides[0].states, sides[1].states,
                s->n_segments * sizeof *sides[0].states);
    check_bytes(c, s, "the squares", sides[0].squares, sides[1].squares, N_SQUARES * sizeof(double));
}

static inline spccl_status call_lists(const struct rank_ctx *c, const struct scene *s,
                                      const struct side *side)
{
    cudaStream_t on = rank_buffers[c->rank].on;
    spccl_prune_options o = options_of(s, side);
    for (int stage = 1; s->staged && stage <= 2; stage++) {
        spccl_status st =
            spccl_cuda_prune_all_reduce_stage(c->comm, side->plan, side->grad, s->op, &o, stage, on);
        if (st != SPCCL_OK || stage == 2)
            return st;
    }
    return spccl_cuda_prune_all_reduce(c->comm, side->plan, side->grad, s->op, &o, on);
}
static inline spccl_status call_both(const struct rank_ctx *c, const struct scene *s, const struct side *side)
{
    cudaStream_t on = rank_buffers[c->rank].on;
    spccl_prune_options o = options_of(s, side);
    spccl_status st = spccl_cuda_prune(side->plan, side->grad, &o, on);
    return st != SPCCL_OK
               ? st
               : spccl_cuda_all_reduce(c->comm, side->grad, side->grad, s->n, SPCCL_FLOAT32, s->op, on);
}

/* What this rank has done, after all its calls. */
static inline spccl_cuda_stats stats_now(const struct rank_ctx *c)
{
    spccl_cuda_stats stats = {.struct_bytes = sizeof stats};
    CHECK_OK(spccl_cuda_wait(c->comm, rank_buffers[c->rank].on, wait_ms()));
    CHECK_OK(spccl_cuda_get_stats(c->comm, &stats));
    return stats;
}
/* The call since stats_now gave `before` has taken the route. `is_new`: it was not captured before. */
static inline void check_route(const struct rank_ctx *c, enum route route, const spccl_cuda_stats *before,
                               bool is_new)
{
    spccl_cuda_stats now = stats_now(c);
    uint64_t n = now.wire_bytes_sent - before->wire_bytes_sent;
    CHECK(route != BY_LISTS || n == 0, "rank %d: %llu bytes of frames were sent in place of lists", c->rank,
          (unsigned long long)n);
    CHECK(route != BY_FRAMES || n != 0, "rank %d: no frames were sent", c->rank);
    n = now.n_pruned_by_lists - before->n_pruned_by_lists;
    CHECK(route == ANY_ROUTE || !is_new || n == (route == BY_LISTS), "rank %d: %llu calls by lists", c->rank,
          (unsigned long long)n);
}

static inline void begin(struct rank_ctx *c, const struct scene *s, struct side *sides)
{
    for (int k = 0; k < 2; k++) {
        sides[k] = side_of(c, s, k);
        make_plan(c, s, &sides[k]);
        clear_state(c, s, &sides[k]);
    }
    (void)all_here(c->comm); /* plans allocate: see cuda_ranks.h */
}
static inline void end(struct rank_ctx *c, struct side *sides)
{
    (void)all_here(c->comm);
    for (int k = 0; k < 2; k++)
        spccl_prune_plan_destroy(sides[k].plan);
}

static inline void one_scene(struct rank_ctx *c, const struct scene *s)
{
    struct side sides[2];
    begin(c, s, sides);
    for (int step = 0; step < s->n_steps; step++) {
        spccl_cuda_stats before = stats_now(c);
        load_gradient(c, s, step, sides);
        CHECK_OK(call_lists(c, s, &sides[0]));
        check_route(c, s->route, &before, true);
        CHECK_OK(call_both(c, s, &sides[1]));
        compare_sides(c, s, sides);
    }
    end(c, sides);
}

#endif
