/* test_cuda_delta.c - spccl_cuda_delta_check, _apply, _undo and _checksum: the bits and the errors of the host's functions,
 * on lists of frames and boxes of every shape; frames that break a rule, also after they were checked; bad arguments. */
#include "core/base/delta_rule.h"
#include "cuda_test.h"
#include "records.h"

#define CAP_BYTES ((size_t)4 << 20)
enum { MOST_TARGETS = 6, MOST_PLACES = 4 };
#define MOST_BOX_BYTES (CAP_BYTES / (MOST_TARGETS * MOST_PLACES + 8))
#define KEY UINT64_C(0xfedcba9876543211)

/* The same bytes in host memory, on which the host's functions work, and on the GPU. */
struct memory {
    uint8_t *host, *gpu;
    size_t used;
};
static struct {
    struct memory frames, places, old, x;
    uint8_t *base, *back; /* host: an array and its base; what came back from the GPU */
    uint64_t *sum;        /* on the GPU */
    cudaStream_t on;
} g;
static uint64_t rng;

static void make_arrays(void)
{
    struct memory *all[] = {&g.frames, &g.places, &g.old, &g.x};
    for (int i = 0; i < 4; i++) {
        all[i]->host = pinned_alloc(CAP_BYTES);
        all[i]->gpu = device_alloc(CAP_BYTES);
    }
    g.base = pinned_alloc(CAP_BYTES);
    g.back = pinned_alloc(CAP_BYTES);
    g.sum = (uint64_t *)(void *)device_alloc(64);
    CUDA_OK(cudaStreamCreateWithFlags(&g.on, cudaStreamNonBlocking));
}

static void upload(const struct memory *m)
{
    CUDA_OK(cudaMemcpyAsync(m->gpu, m->host, CAP_BYTES, cudaMemcpyHostToDevice, g.on));
    sync_stream(g.on);
}
static void compare(const struct memory *m, const char *what)
{
    size_t at;
    CUDA_OK(cudaMemcpyAsync(g.back, m->gpu, CAP_BYTES, cudaMemcpyDeviceToHost, g.on));
    sync_stream(g.on);
    at = first_difference(g.back, m->host, CAP_BYTES);
    CHECK(at == CAP_BYTES, "%s: byte %zu", what, at);
}
/* `bytes` of m, at a multiple of `align`, and some bytes behind that nobody may touch. */
static size_t take(struct memory *m, size_t bytes, size_t align)
{
    size_t at = (m->used + align - 1) / align * align;
    m->used = at + bytes + 24;
    if (m->used > CAP_BYTES) {
        fprintf(stderr, "the test's arrays are too small\n");
        exit(1);
    }
    return at;
}

/* ---- lists of targets ---- */

static struct {
    spccl_delta_target host[MOST_TARGETS], gpu[MOST_TARGETS];
    spccl_delta_place host_places[MOST_TARGETS][MOST_PLACES], gpu_places[MOST_TARGETS][MOST_PLACES];
    size_t n;
} list;

static void clear(void)
{
    list.n = g.frames.used = g.places.used = 0;
    for (size_t i = 0; i < CAP_BYTES; i += 8) {
        uint64_t v = next_rand(&rng);
        memcpy(g.places.host + i, &v, 8);
    }
    memset(g.frames.host, POISON, CAP_BYTES);
    memset(g.old.host, POISON, CAP_BYTES);
}

/* A box of a tensor of n > 0 elements, in rows of any length, with memory of its own. */
static spccl_delta_place any_box(uint64_t n, size_t e)
{
    uint64_t row = 1 + next_rand(&rng) % (n < 300 || next_rand(&rng) % 2 ? n : 300), rows = n / row + 1;
    spccl_delta_place p = {
        .row_elems = row, .row_first = next_rand(&rng) % rows, .col_first = next_rand(&rng) % row};
    p.n_rows = 1 + next_rand(&rng) % (rows - p.row_first);
    p.n_cols = 1 + next_rand(&rng) % (row - p.col_first);
    p.dst_row_elems = p.n_cols + next_rand(&rng) % 3;
    if (next_rand(&rng) % 16 == 0)
        p.n_cols = 0;
    if (next_rand(&rng) % 3 == 0) { /* whole rows */
        p.col_first = 0;
        p.n_cols = p.dst_row_elems = row;
    }
    if (p.n_rows * (p.dst_row_elems + p.n_cols) * e > MOST_BOX_BYTES) /* the first elements */
        p = (spccl_delta_place){
            .row_elems = n, .n_rows = 1, .n_cols = n < MOST_BOX_BYTES / e ? n : MOST_BOX_BYTES / e};
    return p;
}

/* The base of the part from `first` on, in each box. */
static void fill_box(const spccl_delta_place *p, uint64_t first, uint64_t n, size_t e)
{
    uint64_t row = first / p->row_elems, col = first % p->row_elems;
    for (uint64_t i = 0; i < n; i++) {
        if (row - p->row_first < p->n_rows && col - p->col_first < p->n_cols)
            memcpy((uint8_t *)p->dst + ((row - p->row_first) * p->dst_row_elems + col - p->col_first) * e,
                   g.base + i * e, e);
        if (++col == p->row_elems)
            col = 0, row++;
    }
}

/* Base and x: about `density` of the elements differ, by a small step, or by any number if `wild`. */
static void fill_arrays(uint64_t n, size_t e, double density, bool wild)
{
    for (uint64_t i = 0; i < n; i++) {
        uint64_t v = next_rand(&rng), w = v;
        if ((double)(next_rand(&rng) >> 11) * 0x1p-53 < density)
            w += wild ? next_rand(&rng) : (next_rand(&rng) % 4 < 2 ? 1 : UINT64_MAX) * (1 + v % 3);
        memcpy(g.base + i * e, &v, e);
        memcpy(g.x.host + i * e, &w, e);
    }
}

/* A frame of n elements, part of a larger tensor, and boxes of it. */
static void add_target(spccl_dtype dtype, uint64_t n, double density, size_t n_places)
{
    const size_t e = spccl_dtype_bytes(dtype);
    uint64_t first = next_rand(&rng) % 3 == 0 ? next_rand(&rng) % 100000 : 0;
    spccl_delta_options o = {sizeof o, next_rand(&rng) % 2, NULL, 0};
    spccl_delta_source s = {g.x.host, g.base, n, first, dtype, dtype, KEY + list.n};
    size_t cap = spccl_delta_bound(n, dtype), at = take(&g.frames, cap, 8), bytes = 0;
    spccl_delta_frame f;
    fill_arrays(n, e, density, next_rand(&rng) % 3 == 0);
    CHECK_OK(spccl_delta_encode(&s, 1, &o, g.frames.host + at, cap, &f, &bytes));
    g.frames.used = at + bytes;
    for (size_t i = 0; i < n_places; i++) {
        spccl_delta_place p = any_box(first + n + 1 + next_rand(&rng) % 50, e);
        size_t to = take(&g.places, p.n_rows * (p.dst_row_elems + p.n_cols) * e, e);
        p.dst = g.places.host + to;
        list.host_places[list.n][i] = p;
        fill_box(&p, first, n, e);
        p.dst = g.places.gpu + to;
        list.gpu_places[list.n][i] = p;
    }
    list.host[list.n] = (spccl_delta_target){
        g.frames.host + at, bytes, n, first, list.host_places[list.n], n_places, KEY + list.n, dtype, 0};
    list.gpu[list.n] = list.host[list.n];
    list.gpu[list.n].frame = g.frames.gpu + at;
    list.gpu[list.n].places = list.gpu_places[list.n];
    list.n++;
}

static spccl_cuda_delta_plan *plan_of_list(size_t *old_bytes)
{
    spccl_cuda_delta_plan *plan = NULL;
    CHECK_OK(spccl_cuda_delta_plan_create(list.gpu, list.n, g.on, &plan, old_bytes));
    return plan;
}

/* Check, apply, undo, apply on both sides; all of memory is compared after each. */
static void same_as_host(void)
{
    uint64_t wanted[MOST_TARGETS], sums[MOST_TARGETS];
    size_t old_bytes = 0, wanted_bytes = 0;
    spccl_cuda_delta_plan *plan;
    upload(&g.frames), upload(&g.places), upload(&g.old);
    plan = plan_of_list(&old_bytes);
    if (plan == NULL)
        return;
    CHECK_OK(spccl_delta_check(list.host, list.n, g.old.host, CAP_BYTES, wanted, &wanted_bytes));
    CHECK(old_bytes == wanted_bytes, "%zu bytes of old values, wanted %zu", old_bytes, wanted_bytes);
    CHECK_OK(spccl_cuda_delta_check(plan, NULL, 0, NULL, g.on));
    CHECK_OK(spccl_cuda_delta_check(plan, g.old.gpu, CAP_BYTES, sums, g.on));
    for (size_t i = 0; i < list.n; i++)
        CHECK(sums[i] == wanted[i], "sum change of target %zu of %zu", i, list.n);
    compare(&g.old, "old values");
    compare(&g.places, "places after check");
    for (int turn = 0; turn < 2; turn++) {
        CHECK_OK(spccl_delta_apply(list.host, list.n));
        CHECK_OK(spccl_cuda_delta_apply(plan, g.on));
        compare(&g.places, "places after apply");
        CHECK_OK(spccl_delta_undo(list.host, list.n, g.old.host, old_bytes));
        CHECK_OK(spccl_cuda_delta_undo(plan, g.old.gpu, old_bytes, g.on));
        compare(&g.places, "places after undo");
    }
    spccl_cuda_delta_plan_destroy(plan);
}

static void test_same_bits(void)
{
    static const spccl_dtype dtypes[] = {SPCCL_BFLOAT16, SPCCL_INT8, SPCCL_FLOAT32, SPCCL_INT64};
    static const uint64_t lengths[] = {0, 1, 31, 257, 1000, 65535, 65536, 65537, 140000};
    static const double densities[] = {0, 0.0003, 0.01, 0.05, 0.26, 1};
    int rounds = is_small ? 6 : is_slow ? 30 : 150 * n_rounds;
    for (int round = 0; round < rounds; round++) {
        clear();
        for (size_t n = 1 + next_rand(&rng) % (round % 2 ? MOST_TARGETS : 2); n > 0; n--) {
            spccl_dtype dtype = dtypes[round % 3 ? (size_t)round % 4 : next_rand(&rng) % 4];
            uint64_t length = lengths[next_rand(&rng) % 9];
            double density = densities[next_rand(&rng) % 6];
            if (is_small && density * (double)length > 2000)
                length = 1000;
            if (spccl_dtype_bytes(dtype) * length * 3 > CAP_BYTES / MOST_TARGETS)
                length = 30000;
            add_target(dtype, length, density, length == 0 ? 1 : next_rand(&rng) % (MOST_PLACES + 1));
        }
        same_as_host();
    }
}

/* One whole place, the common case; and a row that is longer than 2^31 elements. */
static void test_whole_and_long_rows(void)
{
    for (int round = 0; round < (is_small ? 2 : 6); round++) {
        spccl_delta_place *p = list.host_places[0];
        clear();
        add_target(SPCCL_BFLOAT16, 100000, round % 2 ? 0.01 : 0.08, 1);
        *p = (spccl_delta_place){g.places.host + 48, 100000, 0, 1, 0, 100000, 0};
        if (round >= 2 || is_small) { /* of the second row only its first 20000 elements are in the frame */
            list.host[0].first = list.gpu[0].first = UINT64_C(0x100000000) - 80000;
            *p = (spccl_delta_place){g.places.host + 48, UINT64_C(0x100000000), 0, 2, 0, 10000, 10001};
            fill_box(p, list.host[0].first, 100000, 2);
        } else {
            list.host[0].first = list.gpu[0].first = 0;
            fill_box(p, 0, 100000, 2);
        }
        list.gpu_places[0][0] = *p;
        list.gpu_places[0][0].dst = g.places.gpu + 48;
        same_as_host();
    }
}

/* ---- frames that break a rule ---- */

/* Plan and check of the frame in g.frames. It gets the status that the host's functions give, and text[]. */
static char text[512];
static void refused_as_host(const char *name)
{
    spccl_status wanted = spccl_delta_check(list.host, 1, NULL, 0, NULL, NULL), st;
    spccl_cuda_delta_plan *plan = NULL;
    st = spccl_cuda_delta_plan_create(list.gpu, 1, g.on, &plan, NULL);
    if (st == SPCCL_OK)
        st = spccl_cuda_delta_check(plan, NULL, 0, NULL, g.on);
    snprintf(text, sizeof text, "%s", st != SPCCL_OK ? spccl_last_error() : "");
    /* Of a frame of another length either may be found. */
    CHECK(st == wanted || (st == SPCCL_ERR_FRAME && wanted == SPCCL_ERR_FORMAT) ||
              (st == SPCCL_ERR_FORMAT && wanted == SPCCL_ERR_FRAME),
          "%s: %s, wanted %s: %s", name, spccl_status_name(st), spccl_status_name(wanted), text);
    CHECK(st == SPCCL_OK || strstr(text, "targets[0]") != NULL, "%s: %s", name, text);
    if (plan != NULL && st != SPCCL_OK)
        CHECK_FAILS(spccl_cuda_delta_apply(plan, g.on), SPCCL_ERR_STATE, "has not accepted");
    spccl_cuda_delta_plan_destroy(plan);
}

/* The name of a record begins with the rule, as r07. */
static size_t n_bad, n_named;
static void check_bad(const struct record *r)
{
    bool is_u8 = r->bytes >= 16 && r->p[6] == SPCCL_UINT8;
    uint64_t n = 300;
    char rule[32];
    if (is_u8)
        memcpy(&n, r->p + 8, 8);
    clear();
    memcpy(g.frames.host, r->p, r->bytes);
    upload(&g.frames);
    list.host[0] = (spccl_delta_target){
        g.frames.host, r->bytes, n, 0, NULL, 0, KEY, is_u8 ? SPCCL_UINT8 : SPCCL_BFLOAT16, 0};
    list.gpu[0] = list.host[0];
    list.gpu[0].frame = g.frames.gpu;
    refused_as_host(r->name);
    snprintf(rule, sizeof rule, "(rule %d of", atoi(r->name + 1));
    n_named += strstr(text, rule) != NULL;
    CHECK(text[0] != '\0', "%s was accepted", r->name);
    n_bad++;
}
/* tests/ref/delta_ref.py wrote one or more for each rule. */
static void test_each_rule(void)
{
    each_record(SPCCL_TEST_SOURCE_DIR "/tests/golden/delta_bad.hex", check_bad);
    /* Others break a rule that is seen before, or are too short for the target. */
    CHECK(n_bad >= 40 && n_named >= n_bad - 5, "%zu bad frames, of %zu the rule", n_bad, n_named);
}

/* Any bit changed before the plan, or after the check: refused as by the host; or it is applied without an access
 * outside of the place. */
static void test_mutated(void)
{
    const uint64_t n = 66000;
    clear();
    add_target(SPCCL_BFLOAT16, n, 0.004, 0);
    size_t bytes = list.host[0].frame_bytes;
    list.host[0].first = list.gpu[0].first = 0;
    list.host[0].n_places = list.gpu[0].n_places = 1;
    list.host_places[0][0] = (spccl_delta_place){g.places.host + 64, n, 0, 1, 0, n, 0};
    list.gpu_places[0][0] = (spccl_delta_place){g.places.gpu + 64, n, 0, 1, 0, n, 0};
    for (int i = 0; i < (is_small ? 12 : is_slow ? 100 : 1000); i++) {
        size_t at = next_rand(&rng) % (i % 2 ? 48 : bytes);
        uint8_t bit = (uint8_t)(1u << next_rand(&rng) % 8);
        g.frames.host[at] ^= bit;
        upload(&g.frames);
        refused_as_host("a bit changed");
        g.frames.host[at] ^= bit;
    }
    for (int i = 0; i < (is_small ? 3 : 20); i++) {
        spccl_cuda_delta_plan *plan;
        size_t old_bytes = 0, outside;
        upload(&g.frames), upload(&g.places);
        plan = plan_of_list(&old_bytes);
        CHECK_OK(spccl_cuda_delta_check(plan, g.old.gpu, CAP_BYTES, NULL, g.on));
        for (size_t at = 0; at < bytes; at++)
            g.back[at] = i % 2 ? 0xff : (uint8_t)next_rand(&rng);
        CUDA_OK(cudaMemcpyAsync(g.frames.gpu, g.back, bytes, cudaMemcpyHostToDevice, g.on));
        CHECK_OK(spccl_cuda_delta_apply(plan, g.on));
        CHECK_OK(spccl_cuda_delta_undo(plan, g.old.gpu, old_bytes, g.on));
        CHECK(i % 3 != 0 ||
                  spccl_cuda_delta_check(plan, g.old.gpu, CAP_BYTES, NULL, g.on) == SPCCL_ERR_FORMAT,
              "check of a frame that was changed");
        CUDA_OK(cudaMemcpyAsync(g.back, g.places.gpu, CAP_BYTES, cudaMemcpyDeviceToHost, g.on));
        sync_stream(g.on);
        memcpy(g.back + 64, g.places.host + 64, n * 2);
        outside = first_difference(g.back, g.places.host, CAP_BYTES);
        CHECK(outside == CAP_BYTES, "byte %zu outside of the place", outside);
        spccl_cuda_delta_plan_destroy(plan);
    }
}

/* Places of one element that differ. */
static void test_two_places(void)
{
    spccl_cuda_delta_plan *plan;
    clear();
    add_target(SPCCL_INT32, 50, 1, 0);
    for (int p = 0; p < 2; p++)
        list.gpu_places[0][p] = (spccl_delta_place){g.places.gpu + 256 * p, 50, 0, 1, 0, 50, 0};
    list.gpu[0].first = 0;
    list.gpu[0].n_places = 2;
    memcpy(g.places.host + 256, g.places.host, 200);
    g.places.host[256 + 4 * 7]++;
    upload(&g.frames), upload(&g.places);
    plan = plan_of_list(NULL);
    CHECK_FAILS(spccl_cuda_delta_check(plan, NULL, 0, NULL, g.on), SPCCL_ERR_FRAME,
                "targets[0]: slice 0: an element has other bits in one place");
    CHECK_FAILS(spccl_cuda_delta_apply(plan, g.on), SPCCL_ERR_STATE, "has not accepted");
    g.places.host[256 + 4 * 7]--;
    upload(&g.places);
    CHECK_OK(spccl_cuda_delta_check(plan, NULL, 0, NULL, g.on));
    CHECK_OK(spccl_cuda_delta_apply(plan, g.on));
    sync_stream(g.on);
    spccl_cuda_delta_plan_destroy(plan);
}

/* ---- the rest ---- */

/* Apply and undo wait for nothing, so a graph holds them. The other calls wait, so they refuse. */
static void test_captured(void)
{
    spccl_cuda_delta_plan *plan, *other = NULL;
    size_t old_bytes = 0;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    clear();
    add_target(SPCCL_BFLOAT16, 5000, 0.1, 1);
    add_target(SPCCL_FLOAT32, 700, 0.5, 1);
    upload(&g.frames), upload(&g.places);
    plan = plan_of_list(&old_bytes);
    CHECK_OK(spccl_cuda_delta_check(plan, g.old.gpu, CAP_BYTES, NULL, g.on));
    CHECK_OK(spccl_delta_check(list.host, list.n, g.old.host, CAP_BYTES, NULL, NULL));
    CUDA_OK(cudaStreamBeginCapture(g.on, cudaStreamCaptureModeThreadLocal));
    CHECK_FAILS(spccl_cuda_delta_plan_create(list.gpu, list.n, g.on, &other, NULL), SPCCL_ERR_ARG,
                "is being captured");
    CHECK_FAILS(spccl_cuda_delta_check(plan, NULL, 0, NULL, g.on), SPCCL_ERR_ARG, "is being captured");
    CHECK_OK(spccl_cuda_delta_apply(plan, g.on));
    CHECK_OK(spccl_cuda_delta_undo(plan, g.old.gpu, old_bytes, g.on));
    CHECK_OK(spccl_cuda_delta_apply(plan, g.on));
    CUDA_OK(cudaStreamEndCapture(g.on, &graph));
    CUDA_OK(cudaGraphInstantiate(&exec, graph, 0));
    compare(&g.places, "places after the capture");
    CUDA_OK(cudaGraphLaunch(exec, g.on));
    CHECK_OK(spccl_delta_apply(list.host, list.n));
    compare(&g.places, "places after the graph");
    CUDA_OK(cudaGraphExecDestroy(exec));
    CUDA_OK(cudaGraphDestroy(graph));
    spccl_cuda_delta_plan_destroy(plan);
}

static void test_checksums(void)
{
    static const spccl_dtype dtypes[] = {SPCCL_UINT8, SPCCL_FLOAT16, SPCCL_INT32, SPCCL_FLOAT64};
    for (size_t i = 0; i < CAP_BYTES; i += 8) {
        uint64_t v = next_rand(&rng);
        memcpy(g.x.host + i, &v, 8);
    }
    upload(&g.x);
    for (int round = 0; round < (is_small ? 16 : is_slow ? 40 : 200); round++) {
        spccl_dtype dtype = dtypes[round % 4];
        size_t e = spccl_dtype_bytes(dtype), lead = next_rand(&rng) % 20 * e;
        uint64_t n = round < 8 ? (uint64_t)(round / 4 * 3) : next_rand(&rng) % (is_small ? 3000 : 100000);
        uint64_t first = next_rand(&rng), key = next_rand(&rng), wanted = 0, sum = 0;
        CHECK_OK(spccl_delta_checksum(g.x.host + lead, n, dtype, first, key, &wanted));
        CHECK_OK(spccl_cuda_delta_checksum(g.x.gpu + lead, n, dtype, first, key, g.sum, g.on));
        CUDA_OK(cudaMemcpyAsync(g.back, g.sum, 8, cudaMemcpyDeviceToHost, g.on));
        sync_stream(g.on);
        memcpy(&sum, g.back, 8);
        CHECK(sum == wanted, "checksum of %llu %s behind %zu bytes", (unsigned long long)n,
              spccl_dtype_name(dtype), lead);
    }
}

static void test_arguments(void)
{
    spccl_cuda_delta_plan *plan = NULL;
    spccl_delta_target *t = list.gpu;
    spccl_delta_place *p = list.gpu_places[1];
    size_t old_bytes = 0;
    clear();
    add_target(SPCCL_FLOAT32, 100, 1, 1);
    add_target(SPCCL_FLOAT32, 100, 1, 1);
    const spccl_delta_target good = t[1];
    p[0] = (spccl_delta_place){g.places.gpu + 1024, 1000000, 0, 1, 0, 1000000, 0};
    const spccl_delta_place good_place = p[0];
    upload(&g.frames);
#define REFUSED(status, text)                                                                                \
    CHECK_FAILS(spccl_cuda_delta_plan_create(t, 2, g.on, &plan, NULL), status,                               \
                "cuda_delta_plan_create: targets[1]" text);                                                  \
    t[1] = good, p[0] = good_place
    t[1].n_elems = 99;
    REFUSED(SPCCL_ERR_FRAME, ": it has another dtype or number of elements");
    t[1].n_elems = UINT64_C(1) << 41;
    REFUSED(SPCCL_ERR_FORMAT, "");
    t[1].frame_bytes += 8;
    REFUSED(SPCCL_ERR_FRAME, ": it is shorter");
    t[1].frame_bytes -= 8;
    REFUSED(SPCCL_ERR_FORMAT, ": delta: it is cut off (rule 10");
    t[1].frame = g.frames.host;
    REFUSED(SPCCL_ERR_ARG, ".frame");
    t[1].frame = (const uint8_t *)t[0].frame + 4;
    REFUSED(SPCCL_ERR_ARG, ".frame");
    p[0].dst = g.places.host;
    REFUSED(SPCCL_ERR_ARG, ": places[0].dst");
    p[0].dst = g.places.gpu + 2;
    REFUSED(SPCCL_ERR_ARG, ": places[0].dst");
    p[0].dst = (uint8_t *)(uintptr_t)good.frame, p[0].n_cols = 1;
    REFUSED(SPCCL_ERR_ALIAS, ": places[0]");
    t[1].dtype = (spccl_dtype)11;
    REFUSED(SPCCL_ERR_DTYPE, "");
    CHECK_FAILS(spccl_cuda_delta_plan_create(t, 2, g.on, NULL, NULL), SPCCL_ERR_ARG, "out is NULL");
    CHECK_FAILS(spccl_cuda_delta_plan_create(NULL, 2, g.on, &plan, NULL), SPCCL_ERR_ARG, "targets is NULL");
    CHECK_FAILS(spccl_cuda_delta_check(NULL, NULL, 0, NULL, g.on), SPCCL_ERR_ARG, "plan is NULL");
    CHECK_FAILS(spccl_cuda_delta_apply(NULL, g.on), SPCCL_ERR_ARG, "plan is NULL");
    CHECK(plan == NULL, "no plan was made");
    CHECK_OK(spccl_cuda_delta_plan_create(t, 2, g.on, &plan, &old_bytes));
    CHECK(old_bytes == 800, "%zu bytes of old values", old_bytes);
    CHECK_FAILS(spccl_cuda_delta_apply(plan, g.on), SPCCL_ERR_STATE, "has not accepted");
    CHECK_FAILS(spccl_cuda_delta_check(plan, g.old.gpu, 799, NULL, g.on), SPCCL_ERR_DST_SMALL,
                "old_cap 799, wanted 800");
    CHECK_FAILS(spccl_cuda_delta_check(plan, g.old.host, 800, NULL, g.on), SPCCL_ERR_ARG, "old (");
    CHECK_OK(spccl_cuda_delta_check(plan, g.old.gpu, 800, NULL, g.on));
    CHECK_FAILS(spccl_cuda_delta_undo(plan, g.old.gpu, 792, g.on), SPCCL_ERR_ARG,
                "old_bytes 792, wanted the 800");
    spccl_cuda_delta_plan_destroy(plan);
}

static void test_other_arguments(void)
{
    spccl_cuda_delta_plan *plan = NULL;
    size_t old_bytes = 1;
    CHECK_OK(spccl_cuda_delta_plan_create(NULL, 0, g.on, &plan, &old_bytes));
    CHECK_OK(spccl_cuda_delta_check(plan, NULL, 0, NULL, g.on));
    CHECK_OK(spccl_cuda_delta_apply(plan, g.on));
    CHECK(old_bytes == 0, "an empty list");
    spccl_cuda_delta_plan_destroy(plan);
    spccl_cuda_delta_plan_destroy(NULL);
    CHECK_FAILS(spccl_cuda_delta_checksum(g.x.gpu, 4, (spccl_dtype)0, 0, 0, g.sum, g.on), SPCCL_ERR_DTYPE,
                "");
    CHECK_FAILS(spccl_cuda_delta_checksum(g.x.host, 4, SPCCL_INT8, 0, 0, g.sum, g.on), SPCCL_ERR_ARG, "x (");
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {{"same_bits", test_same_bits},
                                             {"whole_and_long_rows", test_whole_and_long_rows},
                                             {"each_rule", test_each_rule},
                                             {"mutated", test_mutated},
                                             {"two_places", test_two_places},
                                             {"captured", test_captured},
                                             {"checksums", test_checksums},
                                             {"arguments", test_arguments},
                                             {"other_arguments", test_other_arguments},
                                             {NULL, NULL}};
    const char *seed = getenv("SPCCL_TEST_SEED");
    cuda_test_start(&argc, argv);
    rng = seed != NULL ? strtoull(seed, NULL, 0) : (uint64_t)time(NULL);
    make_arrays();
    return test_main(cases, argc, argv);
}
