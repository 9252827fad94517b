/* test_signs.c - one bit per element on the host: rows, what both ends keep, all kernel sets, values that are not finite,
 * ragged sizes, bad input. What is wanted is computed here from docs/FORMAT.md, section 10, one element at a time. */
#include "core/format/kernel_table.h"
#include "prune_arrays.h"
#include "spccl_experimental.h"

#include <float.h>
#include <stdlib.h>

#define CHUNK SPCCL_SIGNS_CHUNK
#define ROW SPCCL_SIGNS_ROW_BYTES
#define MAX_PARTS 5u
#define MAX_CHUNKS 8u
#define N (MAX_CHUNKS * CHUNK)

static struct signs {
    float own[N + 1], shared[N], wanted[N + 1], out[N];
    _Alignas(4) uint8_t rows[MAX_CHUNKS * ROW + 4],
        wanted_rows[MAX_CHUNKS * ROW + 4], parts[MAX_PARTS][MAX_CHUNKS * ROW];
    spccl_prune_state states[3];
} a;

/* Differences of several kinds; w of `kind` against z. */
enum kind { NORMAL, WIDE, TINY, HUGE_SUMS, NOT_FINITE, ZEROS, N_KINDS };

static float value(enum kind kind)
{
    double sign = test_rand() % 2 != 0 ? 1 : -1;
    switch (kind) {
    case NORMAL:
        return (float)normal();
    case WIDE: /* sums of which the order matters */
        return (float)(sign * ldexp(1 + uniform(), (int)(test_rand() % 60) - 30));
    case TINY: /* denormals: their mean may round to 0 */
        return (float)(sign * ldexp((double)(test_rand() % 4), -149));
    case HUGE_SUMS: /* finite values, an infinite sum */
        return (float)(sign * (double)FLT_MAX * (0.5 + uniform() / 2));
    case NOT_FINITE:
        return test_rand() % 50 != 0  ? (float)normal()
               : test_rand() % 2 != 0 ? NAN
                                      : (float)(sign * (double)INFINITY);
    case ZEROS:
        return test_rand() % 20 == 0 ? (float)normal() : (float)(sign * 0.0);
    case N_KINDS:
        break;
    }
    return 0;
}

/* The specification: the row of v [n], of which values that are not finite become 0; v - what is sent stays. */
static uint64_t encode(float *v, uint32_t n, uint8_t *row)
{
    static float sums[CHUNK];
    uint64_t n_nonfinite = 0;
    float magnitude;
    memset(row, 0, ROW);
    for (uint32_t i = 0; i < CHUNK; i++) {
        if (i < n && !isfinite(v[i])) {
            v[i] = 0;
            n_nonfinite++;
        }
        sums[i] = i < n ? fabsf(v[i]) : 0;
    }
    for (uint32_t h = CHUNK / 2; h > 0; h /= 2)
        for (uint32_t i = 0; i < h; i++)
            sums[i] += sums[i + h];
    magnitude = fminf(sums[0] / (float)n, FLT_MAX);
    memcpy(row, &magnitude, 4);
    for (uint32_t i = 0; i < n; i++) {
        bool negative = signbit(v[i]) != 0;
        row[4 + i / 8] = (uint8_t)(row[4 + i / 8] | negative << i % 8);
        v[i] -= negative ? -magnitude : magnitude;
    }
    return n_nonfinite;
}

static float said(const uint8_t *row, uint32_t i)
{
    float magnitude;
    memcpy(&magnitude, row, 4);
    return (row[4 + i / 8] >> i % 8 & 1) != 0 ? -magnitude : magnitude;
}

static bool same(const float *x, const float *y, size_t n, size_t *at)
{
    for (*at = 0; *at < n && sp_f32_to_bits(x[*at]) == sp_f32_to_bits(y[*at]); ++*at)
        ;
    return *at == n;
}

/* ---- sending ---- */

static const uint32_t lengths[] = {2 * CHUNK, CHUNK - 1, 3, CHUNK + 33};

/* Three segments: each begins at the chunk after the one before. */
static spccl_weights_plan *make(enum kind kind, const uint32_t *n, size_t *n_chunks)
{
    spccl_weights_segment segments[3];
    spccl_weights_plan *plan = NULL;
    *n_chunks = 0;
    memset(a.states, 0, sizeof a.states);
    for (size_t i = 0; i < N; i++) {
        a.shared[i] = kind == NORMAL ? (float)normal() : 0;
        a.own[i] = kind == NORMAL ? a.shared[i] + (float)normal() : value(kind);
    }
    memcpy(a.wanted, a.own, sizeof a.own);
    memset(a.rows, POISON, sizeof a.rows);
    for (size_t i = 0; i < 3; i++) {
        size_t begin = *n_chunks * CHUNK;
        segments[i] = (spccl_weights_segment){.begin = begin,
                                              .n_elems = n[i],
                                              .own = a.own + begin,
                                              .shared = a.shared + begin,
                                              .state = &a.states[i]};
        *n_chunks += (n[i] + CHUNK - 1) / CHUNK;
    }
    CHECK_OK(spccl_weights_plan_create(segments, 3, N, SPCCL_FLOAT32, -1, &plan));
    return plan;
}

static void want_sent(const uint32_t *n, float leak, uint64_t n_nonfinite[3])
{
    static float v[CHUNK], kept[CHUNK];
    uint8_t *row = a.wanted_rows;
    size_t begin = 0;
    memset(a.wanted_rows, POISON, sizeof a.wanted_rows);
    for (size_t s = 0; s < 3; s++)
        for (uint32_t at = 0; at < n[s]; at += CHUNK, row += ROW, begin += CHUNK) {
            uint32_t here = n[s] - at < CHUNK ? n[s] - at : CHUNK;
            for (uint32_t i = 0; i < here; i++)
                v[i] = a.wanted[begin + i] - a.shared[begin + i];
            memcpy(kept, v, sizeof v);
            n_nonfinite[s] += encode(kept, here, row);
            for (uint32_t i = 0; i < here; i++)
                a.wanted[begin + i] = leak * kept[i] + a.shared[begin + i];
        }
}

static void check_sending(enum kind kind, float leak)
{
    const uint32_t n[3] = {lengths[test_rand() % 4], lengths[test_rand() % 4],
                           1 + (uint32_t)(test_rand() % (2 * CHUNK))};
    uint64_t n_nonfinite[3] = {0, 0, 0};
    size_t n_chunks, at;
    spccl_weights_plan *plan = make(kind, n, &n_chunks);
    for (int step = 0; step < 3; step++) {
        CHECK_OK(spccl_weights_send_signs(plan, a.rows, (double)leak, NULL));
        want_sent(n, leak, n_nonfinite);
        CHECK(same(a.own, a.wanted, N + 1, &at), "kind %d, step %d: own weight %zu is %g, wanted %g", kind,
              step, at, (double)a.own[at], (double)a.wanted[at]);
        CHECK(memcmp(a.rows, a.wanted_rows, sizeof a.rows) == 0, "kind %d, step %d: rows", kind, step);
    }
    for (size_t s = 0; s < 3; s++)
        CHECK(a.states[s].n_sent == n[s] && a.states[s].n_sent_all == 3 * n[s] && a.states[s].step == 3 &&
                  a.states[s].n_nonfinite_all == n_nonfinite[s],
              "segment %zu: the state's counts", s);
    spccl_weights_plan_destroy(plan);
}

/* ---- the owner ---- */

static void check_sum(enum kind kind, uint32_t n_parts, size_t n_chunks, bool ragged)
{
    static uint32_t n[MAX_CHUNKS];
    static _Alignas(4) uint8_t packed[MAX_PARTS * MAX_CHUNKS * ROW];
    spccl_signs_sum_options o = SPCCL_SIGNS_SUM_OPTIONS_INIT;
    size_t at;
    for (size_t i = 0; i < N; i++)
        a.own[i] = value(kind);
    for (size_t c = 0; c < n_chunks; c++)
        n[c] = ragged ? (uint32_t)(test_rand() % (CHUNK + 1)) * (test_rand() % 4 != 0) : CHUNK;
    for (uint32_t r = 0; r < n_parts; r++)
        for (size_t c = 0; c < n_chunks; c++) {
            for (uint32_t i = 0; i < CHUNK; i++)
                a.out[i] = value(kind == HUGE_SUMS && r % 2 == 0 ? NORMAL : kind);
            encode(a.out, CHUNK, packed + (r * n_chunks + c) * ROW);
        }
    if (kind == NOT_FINITE && n_parts > 0) /* a damaged row */
        memset(packed + 3, 0xff, 1);
    memcpy(a.wanted, a.own, sizeof a.own);
    memset(a.rows, POISON, sizeof a.rows);
    memset(a.wanted_rows, POISON, sizeof a.wanted_rows);
    for (size_t c = 0; c < n_chunks; c++) {
        float *v = a.wanted + c * CHUNK;
        for (uint32_t r = 0; r < n_parts; r++)
            for (uint32_t i = 0; i < n[c]; i++)
                v[i] += said(packed + (r * n_chunks + c) * ROW, i) * (1.0f / (float)n_parts);
        memset(a.wanted_rows + c * ROW, 0, ROW);
        if (n[c] > 0)
            encode(v, n[c], a.wanted_rows + c * ROW);
    }
    o.parts = n_parts > 0 ? packed : NULL;
    o.kept = a.own, o.rows = a.rows, o.lengths = ragged ? n : NULL;
    o.n_chunks = n_chunks, o.n_parts = n_parts;
    CHECK_OK(spccl_signs_sum(&o, NULL));
    CHECK(same(a.own, a.wanted, N + 1, &at), "kind %d, %u parts: kept %zu is %g, wanted %g", kind, n_parts,
          at, (double)a.own[at], (double)a.wanted[at]);
    CHECK(memcmp(a.rows, a.wanted_rows, sizeof a.rows) == 0, "kind %d, %u parts: rows", kind, n_parts);
    memset(a.out, POISON, sizeof a.out);
    CHECK_OK(spccl_signs_decode(a.rows, n_chunks, a.out, -1, NULL));
    for (size_t i = 0; i < n_chunks * CHUNK; i++)
        CHECK(sp_f32_to_bits(a.out[i]) == sp_f32_to_bits(said(a.rows + i / CHUNK * ROW, i % CHUNK)),
              "element %zu", i);
    CHECK(n_chunks == MAX_CHUNKS || sp_f32_to_bits(a.out[n_chunks * CHUNK]) == 0x01010101u * POISON,
          "past the end");
}

static void test_every_set_gives_the_bits_of_the_specification(void)
{
    const sp_kernels *k;
    for (size_t s = 0; (k = sp_kernels_at(s)) != NULL; s++) {
        setenv("SPCCL_DEBUG_CPU_ISA", k->name, 1);
        for (enum kind kind = 0; kind < N_KINDS; kind++)
            for (int round = 0; round < 4; round++) {
                check_sending(kind, round % 2 == 0 ? 1 : 0.75f);
                check_sum(kind, (uint32_t)test_rand() % (MAX_PARTS + 1), 1 + test_rand() % MAX_CHUNKS,
                          round % 2 == 0);
            }
    }
    unsetenv("SPCCL_DEBUG_CPU_ISA");
}

/* The example of docs/FORMAT.md, section 10. */
static void test_a_row_bit_by_bit(void)
{
    static const uint8_t wanted[8] = {0, 0, 0x80, 0x3f, 0x0a, 0, 0, 0};
    const uint32_t n[1] = {5};
    spccl_signs_sum_options o = SPCCL_SIGNS_SUM_OPTIONS_INIT;
    float kept[CHUNK] = {0.5f, -2, 0, -0.0f, 2.5f, 77};
    o.kept = kept, o.rows = a.rows, o.lengths = n, o.n_chunks = 1;
    CHECK_OK(spccl_signs_sum(&o, NULL));
    CHECK(memcmp(a.rows, wanted, sizeof wanted) == 0, "magnitude 1, elements 1 and 3 are negative");
    CHECK(kept[0] == -0.5f && kept[1] == -1 && kept[2] == -1 && kept[3] == 1 && kept[4] == 1.5f &&
              kept[5] == 77,
          "kept");
}

/* What both ends keep bounds the error: the sum of all results is the sum of all means, less what is kept. */
static void test_nothing_is_lost(void)
{
    const uint32_t n[3] = {CHUNK, CHUNK, CHUNK};
    static float sums[CHUNK], kept[CHUNK], start[CHUNK];
    spccl_signs_sum_options o = SPCCL_SIGNS_SUM_OPTIONS_INIT;
    size_t n_chunks;
    spccl_weights_plan *plan = make(NORMAL, n, &n_chunks);
    memcpy(start, a.own, sizeof start);
    memset(kept, 0, sizeof kept);
    memset(sums, 0, sizeof sums);
    o.parts = a.rows, o.kept = kept, o.rows = a.parts[0], o.n_chunks = 1, o.n_parts = 1;
    for (int step = 0; step < 50; step++) {
        CHECK_OK(spccl_weights_send_signs(plan, a.rows, 1, NULL));
        CHECK_OK(spccl_signs_sum(&o, NULL));
        CHECK_OK(spccl_signs_decode(a.parts[0], 1, a.out, -1, NULL));
        for (uint32_t i = 0; i < CHUNK; i++)
            sums[i] += a.out[i];
    }
    for (uint32_t i = 0; i < CHUNK; i++) {
        double unsent = (double)a.own[i] - (double)a.shared[i];
        double first = (double)start[i] - (double)a.shared[i];
        CHECK(fabs((double)sums[i] + (double)kept[i] + unsent - first) < 1e-4, "element %u", i);
    }
    spccl_weights_plan_destroy(plan);
}

static void test_bad_input(void)
{
    const char *sum = "spccl_signs_sum", *send = "spccl_weights_send_signs";
    double wide[8] = {0};
    uint32_t n[1] = {CHUNK + 1};
    spccl_signs_sum_options o = SPCCL_SIGNS_SUM_OPTIONS_INIT;
    spccl_weights_segment s = {.begin = 4, .n_elems = 4, .own = a.own, .shared = a.shared, .state = a.states};
    spccl_weights_plan *plan = NULL;
    CHECK_OK(spccl_weights_plan_create(&s, 1, 8, SPCCL_FLOAT32, -1, &plan));
    CHECK_FAILS(spccl_weights_send_signs(NULL, a.rows, 1, NULL), SPCCL_ERR_ARG, "plan is NULL");
    CHECK_FAILS(spccl_weights_send_signs(plan, NULL, 1, NULL), SPCCL_ERR_ARG, "rows is NULL");
    CHECK_FAILS(spccl_weights_send_signs(plan, a.rows, 0, NULL), SPCCL_ERR_ARG, send);
    CHECK_FAILS(spccl_weights_send_signs(plan, a.rows, 1, NULL), SPCCL_ERR_ARG,
                "the segment at element 4 does not begin at a multiple of 4096");
    spccl_weights_plan_destroy(plan);
    s.begin = 0, s.whole = 1;
    CHECK_OK(spccl_weights_plan_create(&s, 1, 8, SPCCL_FLOAT32, -1, &plan));
    CHECK_FAILS(spccl_weights_send_signs(plan, a.rows, 1, NULL), SPCCL_ERR_ARG, "is one to send whole");
    CHECK_FAILS(spccl_weights_send_signs(plan, a.rows + 1, 1, NULL), SPCCL_ERR_ARG, send);
    spccl_weights_plan_destroy(plan);
    s.own = s.shared = wide;
    CHECK_OK(spccl_weights_plan_create(&s, 1, 8, SPCCL_FLOAT64, -1, &plan));
    CHECK_FAILS(spccl_weights_send_signs(plan, a.rows, 1, NULL), SPCCL_ERR_DTYPE, "float64, wanted float32");
    spccl_weights_plan_destroy(plan);
    CHECK_FAILS(spccl_signs_sum(NULL, NULL), SPCCL_ERR_ARG, "options is NULL");
    CHECK_FAILS(spccl_signs_sum(&o, NULL), SPCCL_ERR_ARG, "options.kept is NULL");
    o.kept = a.own;
    CHECK_FAILS(spccl_signs_sum(&o, NULL), SPCCL_ERR_ARG, "options.rows is NULL");
    o.rows = a.rows, o.n_chunks = 1, o.n_parts = 1;
    CHECK_FAILS(spccl_signs_sum(&o, NULL), SPCCL_ERR_ARG, "options.parts is NULL");
    o.parts = a.parts, o.lengths = n;
    CHECK_FAILS(spccl_signs_sum(&o, NULL), SPCCL_ERR_ARG, "options.lengths[0] is 4097, wanted at most 4096");
    o.lengths = NULL, o.rows = a.rows + 1;
    CHECK_FAILS(spccl_signs_sum(&o, NULL), SPCCL_ERR_ARG, sum);
    CHECK_FAILS(spccl_signs_decode(NULL, 1, a.out, -1, NULL), SPCCL_ERR_ARG, "rows is NULL");
    CHECK_FAILS(spccl_signs_decode(a.rows, 1, NULL, -1, NULL), SPCCL_ERR_ARG, "out is NULL");
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {
        {"every_set_gives_the_bits_of_the_specification", test_every_set_gives_the_bits_of_the_specification},
        {"a_row_bit_by_bit", test_a_row_bit_by_bit},
        {"nothing_is_lost", test_nothing_is_lost},
        {"bad_input", test_bad_input},
        {NULL, NULL}};
    return test_main(cases, argc, argv);
}
