/* test_cuda_pruned_faults.c - spccl_cuda_prune_all_reduce. Lists without room: what is not sent stays in the residual, and a
 * nan reaches all ranks. Calls that cannot use lists send frames. Wrong calls, ranks with other calls, a peer that does
 * not call. Ranks are threads. --small: for sanitizers. */
#include "cuda_pruned.h"

/* ---- no room ---- */

/* Where the gradient and the residual lie, and what becomes of entries that find no room. */
struct tight {
    bool unaligned, residual_bf16, no_residual;
};
#define TIGHT_ELEMS ((size_t)400000)
/* Small integers, exact in bfloat16 too. They add up exactly. */
static float tight_value(size_t i, int rank)
{
    return (float)(i % 200 + (size_t)rank + 1);
}

#define FIRST_PART ((size_t)1001)
/* Where the residual of the second part lies: aligned to 16 bytes. */
static size_t second_residual(const struct tight *t)
{
    return round_up(FIRST_PART * (t->residual_bf16 ? 2 : 4));
}

static void make_tight_plan(const struct rank_ctx *c, const struct tight *t, struct side *side)
{
    size_t n_segments = t->unaligned ? 2 : 1;
    spccl_prune_segment segments[2];
    for (size_t k = 0; k < n_segments; k++) {
        size_t begin = k == 0 ? 0 : FIRST_PART;
        segments[k] =
            (spccl_prune_segment){.begin = begin,
                                  .n_elems = (k + 1 == n_segments ? TIGHT_ELEMS : FIRST_PART) - begin,
                                  .residual = side->residual + (k == 0 ? 0 : second_residual(t)),
                                  .state = side->states + k,
                                  .key = (uint32_t)k};
        if (t->no_residual)
            segments[k].residual = NULL;
    }
    CHECK_OK(spccl_prune_plan_create(segments, n_segments, TIGHT_ELEMS, SPCCL_FLOAT32,
                                     rank_buffers[c->rank].device, &side->plan));
}

/* The residual as float32, on the host. */
static void read_residual(const struct rank_ctx *c, const struct tight *t, const struct side *side,
                          float *out)
{
    const struct rank_buffer *m = &rank_buffers[c->rank];
    size_t elem_bytes = t->residual_bf16 ? 2 : 4, first = t->unaligned ? FIRST_PART : 0;
    uint8_t *to = t->residual_bf16 ? m->plain : (uint8_t *)out;
    CUDA_OK(cudaMemcpyAsync(to, side->residual, first * elem_bytes, cudaMemcpyDeviceToHost, m->on));
    CUDA_OK(cudaMemcpyAsync(to + first * elem_bytes, side->residual + (first != 0 ? second_residual(t) : 0),
                            (TIGHT_ELEMS - first) * elem_bytes, cudaMemcpyDeviceToHost, m->on));
    CHECK_OK(spccl_cuda_wait(c->comm, m->on, wait_ms()));
    for (size_t i = 0; t->residual_bf16 && i < TIGHT_ELEMS; i++) {
        uint32_t bits = (uint32_t)((const uint16_t *)(const void *)to)[i] << 16;
        memcpy(&out[i], &bits, 4);
    }
}

/* Each rank's entry is in the sum or in the residuals; without residuals it is in the sum or lost. */
static void check_tight_sum(const struct rank_ctx *c, const struct tight *t, const float *sum,
                            const float *residuals)
{
    size_t i, n_missing = 0;
    for (i = 0; i < TIGHT_ELEMS; i++) {
        float all = 0, lost;
        bool found = false;
        for (int r = 0; r < c->n_ranks; r++)
            all += tight_value(i, r);
        lost = all - sum[i];
        n_missing += lost != 0;
        for (int some = 0; some < 1 << c->n_ranks && t->no_residual && !found; some++) {
            float part = 0;
            for (int r = 0; r < c->n_ranks; r++)
                part += (some >> r & 1) != 0 ? tight_value(i, r) : 0;
            found = part == lost;
        }
        if (t->no_residual ? !found : lost != residuals[i])
            break;
    }
    CHECK(i == TIGHT_ELEMS, "rank %d: element %zu: sum %g, residuals %g", c->rank, i,
          i < TIGHT_ELEMS ? (double)sum[i] : 0, i < TIGHT_ELEMS ? (double)residuals[i] : 0);
    CHECK(n_missing > 0 && n_missing < TIGHT_ELEMS, "rank %d: %zu of %zu are incomplete", c->rank, n_missing,
          TIGHT_ELEMS);
}

/* Thresholds of 0 send everything, more than there is room for. */
static void one_tight(struct rank_ctx *c, const struct tight *t)
{
    const struct rank_buffer *m = &rank_buffers[c->rank];
    struct scene s = {.seed = 3, .n = TIGHT_ELEMS, .n_segments = 1, .op = SPCCL_SUM};
    struct side side = side_of(c, &s, 0);
    float *x = (float *)(void *)m->in, *sum = (float *)(void *)m->got, *residual = (float *)(void *)m->want;
    float *first = (float *)(void *)m->plain;
    size_t at;
    s.options = (spccl_prune_options)SPCCL_PRUNE_OPTIONS_INIT;
    s.options.keep_thresholds = 1;
    s.options.residual_bf16 = t->residual_bf16;
    make_tight_plan(c, t, &side);
    clear_state(c, &s, &side);
    CUDA_OK(cudaMemsetAsync(side.states, 0, 2 * sizeof *side.states, m->on));
    (void)all_here(c->comm); /* plans allocate: see cuda_ranks.h */
    for (size_t i = 0; i < s.n; i++)
        x[i] = tight_value(i, c->rank);
    CUDA_OK(cudaMemcpyAsync(side.grad, x, s.n * 4, cudaMemcpyHostToDevice, m->on));
    CHECK_OK(call_lists(c, &s, &side));
    CUDA_OK(cudaMemcpyAsync(sum, side.grad, s.n * 4, cudaMemcpyDeviceToHost, m->on));
    CHECK_OK(spccl_cuda_wait(c->comm, m->on, wait_ms()));
    read_residual(c, t, &side, residual);
    CHECK_OK(spccl_all_reduce(c->comm, residual, residual, s.n, SPCCL_FLOAT32, SPCCL_SUM, NULL));
    memcpy(first, sum, s.n * 4);
    CHECK_OK(spccl_broadcast(c->comm, first, s.n, SPCCL_FLOAT32, 0, NULL));
    at = first_difference((uint8_t *)first, (uint8_t *)sum, s.n * 4);
    CHECK(at == s.n * 4, "rank %d has another sum than rank 0 at byte %zu", c->rank, at);
    check_tight_sum(c, t, sum, residual);
    for (size_t i = 0; i < s.n; i++)
        x[i] = c->rank == 2 ? NAN : 1;
    CUDA_OK(cudaMemcpyAsync(side.grad, x, s.n * 4, cudaMemcpyHostToDevice, m->on));
    CHECK_OK(call_lists(c, &s, &side));
    CUDA_OK(cudaMemcpyAsync(sum, side.grad, 4, cudaMemcpyDeviceToHost, m->on));
    CHECK_OK(spccl_cuda_wait(c->comm, m->on, wait_ms()));
    CHECK(sum[0] != sum[0], "rank %d: no nan came, but %g", c->rank, (double)sum[0]);
    (void)all_here(c->comm);
    spccl_prune_plan_destroy(side.plan);
}

static void no_room(struct rank_ctx *c)
{
    static const struct tight kinds[] = {{.unaligned = false},
                                         {.residual_bf16 = true, .unaligned = true},
                                         {.unaligned = true},
                                         {.no_residual = true}};
    if (!attach_gpu(c->comm, c->rank, 0))
        return;
    for (size_t k = 0; k < (is_small ? 2 : 4); k++)
        one_tight(c, &kinds[k]);
}

static void test_no_room(void)
{
    setenv("SPCCL_PRUNE_LIST_BYTES", "4M", 1);
    run_scene(3, no_room, NULL);
    setenv("SPCCL_PRUNE_LIST_BYTES", LIST_BYTES, 1);
}

/* ---- calls that take the all-reduce, and wrong calls ---- */

/* c->arg: is there memory for lists of a density of 1? */
static void without_lists(struct rank_ctx *c)
{
    bool has_room = *(const bool *)c->arg;
    struct side sides[2];
    struct scene s = {.seed = 21, .n = 12345, .n_segments = 4, .op = SPCCL_SUM, .n_steps = 2};
    if (!attach_gpu(c->comm, c->rank, 0))
        return;
    for (int i = 0; i < 4; i++) {
        s.options = (spccl_prune_options)SPCCL_PRUNE_OPTIONS_INIT;
        s.options.scale = i == 0 ? 0.5 : 1;
        s.options.warmup_steps = i == 1 ? 3 : 0;
        s.options.dense_steps = i == 2 ? 1 : 0;
        s.options.density = i == 3 ? 1 : 0.1;
        s.route = i == 3 && has_room ? BY_LISTS : BY_FRAMES;
        s.staged = i % 2 == 1;
        one_scene(c, &s);
    }
    begin(c, &s, sides);
    CHECK(spccl_cuda_prune_all_reduce(c->comm, sides[0].plan, NULL, s.op, NULL, NULL) == SPCCL_ERR_ARG, "%s",
          spccl_last_error());
    CHECK(spccl_cuda_prune_all_reduce(c->comm, NULL, sides[0].grad, SPCCL_SUM, NULL, NULL) == SPCCL_ERR_ARG &&
              strstr(spccl_last_error(), "plan is NULL") != NULL,
          "%s", spccl_last_error());
    CHECK(spccl_cuda_prune_all_reduce(c->comm, sides[0].plan, rank_buffers[c->rank].in, SPCCL_SUM, NULL,
                                      NULL) == SPCCL_ERR_ARG &&
              strstr(spccl_last_error(), "host memory") != NULL,
          "%s", spccl_last_error());
    CHECK(spccl_cuda_prune_all_reduce_stage(c->comm, sides[0].plan, sides[0].grad, SPCCL_SUM, NULL, 3,
                                            NULL) == SPCCL_ERR_ARG &&
              strstr(spccl_last_error(), "stage is 3") != NULL,
          "%s", spccl_last_error());
    end(c, sides);
}

static void test_without_lists(void)
{
    static const char *const bytes[] = {LIST_BYTES, "64K", "0"}; /* 64K: too little */
    for (int i = 0; i < 3; i++) {
        bool has_room = i == 0;
        setenv("SPCCL_PRUNE_LIST_BYTES", bytes[i], 1);
        run_scene(i == 0 ? 3 : 2, without_lists, &has_room);
    }
    setenv("SPCCL_PRUNE_LIST_BYTES", LIST_BYTES, 1);
}

/* Attach and make one call. False: there is no GPU. */
static bool first_call(struct rank_ctx *c, struct scene *s, struct side *sides)
{
    if (!attach_gpu(c->comm, c->rank, 0))
        return false;
    s->options = (spccl_prune_options)SPCCL_PRUNE_OPTIONS_INIT;
    begin(c, s, sides);
    load_gradient(c, s, 0, sides);
    CHECK_OK(call_lists(c, s, &sides[0]));
    return true;
}

/* Rank 1 does not call: the others get an error that names it. */
static void one_missing(struct rank_ctx *c)
{
    struct side sides[2];
    struct scene s = {.seed = 21, .n = 12345, .n_segments = 4, .op = SPCCL_SUM};
    if (!first_call(c, &s, sides))
        return;
    CHECK_OK(spccl_cuda_wait(c->comm, rank_buffers[c->rank].on, wait_ms()));
    CHECK_OK(spccl_comm_set_timeout(c->comm, 1500));
    if (c->rank != 1) {
        spccl_status st;
        CHECK_OK(call_lists(c, &s, &sides[0]));
        st = spccl_cuda_wait(c->comm, rank_buffers[c->rank].on, wait_ms());
        CHECK(st != SPCCL_OK && strstr(spccl_last_error(),
                                       "prune_all_reduce number 2 waited for what rank 1 sends") != NULL,
              "rank %d: %s", c->rank, st != SPCCL_OK ? spccl_last_error() : "no error");
    } else {
        while (spccl_comm_async_error(c->comm) == SPCCL_OK)
            sleep_ms(1);
    }
    sync_stream(rank_buffers[c->rank].on);
    for (int k = 0; k < 2; k++)
        spccl_prune_plan_destroy(sides[k].plan);
}

/* Rank 1 gives a gradient of another size: MISMATCH on the ranks that find out first, an error on all. */
static void other_sizes(struct rank_ctx *c)
{
    struct side sides[2];
    struct scene s = {.seed = 21, .n = c->rank == 1 ? 12000 : 12345, .n_segments = 1, .op = SPCCL_SUM};
    spccl_status st;
    if (!first_call(c, &s, sides))
        return;
    st = spccl_cuda_wait(c->comm, rank_buffers[c->rank].on, wait_ms());
    CHECK(st != SPCCL_OK && strstr(spccl_last_error(), "wanted the same segments") != NULL, "rank %d: %s",
          c->rank, st != SPCCL_OK ? spccl_last_error() : "no error");
    CHECK(st == SPCCL_ERR_MISMATCH || strstr(spccl_last_error(), "gave up") != NULL, "rank %d: status %d",
          c->rank, (int)st);
    sync_stream(rank_buffers[c->rank].on);
    for (int k = 0; k < 2; k++)
        spccl_prune_plan_destroy(sides[k].plan);
}

static void test_other_sizes(void)
{
    run_scene(2, other_sizes, NULL);
}

static void test_one_missing(void)
{
    run_scene(3, one_missing, NULL);
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {{"no_room", test_no_room},
                                             {"without_lists", test_without_lists},
                                             {"one_missing", test_one_missing},
                                             {"other_sizes", test_other_sizes},
                                             {NULL, NULL}};
    cuda_test_start(&argc, argv);
    setenv("SPCCL_PRUNE_LIST_BYTES", LIST_BYTES, 1);
    make_rank_buffers(3, CAP);
    return test_main(cases, argc, argv);
}
