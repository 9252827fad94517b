/* test_tune_gpu.c - the choices for GPU collectives: inboxes, slices, CTAs. Needs no GPU. */
#include "core/gpu/collectives/tune_gpu.h"

#include "core/base/dtype.h"
#include "core/format/format.h"
#include "test.h"

static const sp_gpu_limits h200 = {.world_size = 4,
                                   .n_sms = 132,
                                   .workers_per_cta = {{7, 7, 5, 7, 7}, {10}},
                                   .inbox_bytes = (size_t)256 << 20};

static sp_inbox_shape shape_of(const sp_gpu_limits *l)
{
    sp_inbox_shape s = {0};
    CHECK_OK(sp_tune_gpu_shape(l, &s));
    return s;
}

static void test_shape(void)
{
    sp_gpu_limits l = h200;
    sp_inbox_shape s = shape_of(&l);
    CHECK(s.n_workers == 132 * 10 && s.world_size == 4, "%u workers of %u ranks", s.n_workers, s.world_size);
    l.max_ctas = 32;
    CHECK(shape_of(&l).n_workers == 32 * 10, "max_ctas");
    l.max_ctas = 1000;
    CHECK(shape_of(&l).n_workers == 132 * 10, "max_ctas above the number of SMs");
    l = h200;
    l.n_sms = 0; /* 200 ranks on one GPU of 132 SMs */
    CHECK(shape_of(&l).n_workers == 10, "one block at least");
    for (uint32_t world_size = 1; world_size <= SP_GPU_HOST_RANKS_MAX; world_size++)
        for (size_t bytes = (size_t)8 << 20; bytes <= (size_t)1 << 30; bytes *= 2) {
            l = h200;
            l.world_size = world_size;
            l.inbox_bytes = bytes;
            s = shape_of(&l);
            CHECK(sp_inbox_bytes(s) <= bytes, "%u ranks: %zu of %zu bytes", world_size, sp_inbox_bytes(s),
                  bytes);
            CHECK(s.n_workers <= 132 * 10 && (s.n_workers % 132 == 0 || s.n_workers < 132),
                  "%u ranks, %zu bytes: %u workers leave SMs idle", world_size, bytes, s.n_workers);
            CHECK(s.ring_frames >= SP_INBOX_RING_FRAMES_MIN && s.ring_frames <= SP_INBOX_RING_FRAMES_MAX,
                  "rings of %u frames", s.ring_frames);
            if (s.ring_frames < SP_INBOX_RING_FRAMES_MAX) {
                sp_inbox_shape longer = s;
                longer.ring_frames++;
                CHECK(sp_inbox_bytes(longer) > bytes, "%u ranks, %zu bytes: longer rings would fit",
                      world_size, bytes);
            }
            if (s.n_workers < 132 * 10) { /* as many as fit */
                s.n_workers += s.n_workers >= 132 ? 132 : 1;
                s.ring_frames = SP_INBOX_RING_FRAMES_MIN;
                CHECK(sp_inbox_bytes(s) > bytes, "%u ranks, %zu bytes: more workers would fit", world_size,
                      bytes);
            }
        }
}

static void test_shape_too_small(void)
{
    sp_gpu_limits l = h200;
    sp_inbox_shape s = {.world_size = 4, .n_workers = 1, .ring_frames = SP_INBOX_RING_FRAMES_MIN};
    l.inbox_bytes = sp_inbox_bytes(s);
    CHECK(shape_of(&l).n_workers == 1, "one worker fits exactly");
    l.inbox_bytes--;
    CHECK(sp_tune_gpu_shape(&l, &s) == SPCCL_ERR_SETTING, "one byte less");
    CHECK(strstr(spccl_last_error(), "SPCCL_INBOX_BYTES") != NULL, "%s", spccl_last_error());
}

/* On several hosts: as many workers as fit into the inbox and into pinned memory. */
static void test_shape_of_hosts(void)
{
    static const struct {
        uint32_t n_hosts, n_here, workers;
    } groups[] = {{8, 8, 132}, {4, 8, 264}, {8, 4, 264}, {2, 8, 396}, {16, 1, 396}, {2, 1, 1320}};
    for (size_t i = 0; i < sizeof groups / sizeof *groups; i++) {
        uint32_t n_here = groups[i].n_here;
        sp_gpu_limits l = h200;
        sp_inbox_shape s;
        l.world_size = groups[i].n_hosts * n_here;
        l.n_here = n_here >= 2 ? n_here : 0;
        l.n_remote = l.world_size - n_here;
        s = shape_of(&l);
        CHECK(s.n_workers == groups[i].workers, "%u x %u ranks: %u workers, rings of %u frames",
              groups[i].n_hosts, n_here, s.n_workers, s.ring_frames);
        CHECK(sp_tune_gpu_inbox_bytes(&l, s) <= l.inbox_bytes &&
                  sp_tune_gpu_pinned_bytes(&l, s) <= SP_GPU_PINNED_MAX,
              "%u x %u ranks: inbox of %zu bytes, %zu pinned", groups[i].n_hosts, n_here,
              sp_tune_gpu_inbox_bytes(&l, s), sp_tune_gpu_pinned_bytes(&l, s));
        printf("%u x %u ranks: %u workers, rings of %u frames, inbox %zu MiB, pinned %zu MiB\n",
               groups[i].n_hosts, n_here, s.n_workers, s.ring_frames, sp_tune_gpu_inbox_bytes(&l, s) >> 20,
               sp_tune_gpu_pinned_bytes(&l, s) >> 20);
    }
}

static const spccl_format formats[] = {SPCCL_FORMAT_AUTO, SPCCL_FORMAT_TILE, SPCCL_FORMAT_PICI,
                                       SPCCL_FORMAT_COO, SPCCL_FORMAT_DENSE};
static const uint64_t sizes[] = {
    1,       2047,    2048,    2049,    100000,    1 << 20,          (1 << 20) + 1,
    1310720, 1700001, 4 << 20, 5000000, 134217728, UINT64_C(1) << 40};

static sp_fused_args plan_of(const sp_gpu_limits *l, sp_inbox_shape s, sp_fused_op op, uint64_t n,
                             spccl_dtype dtype, spccl_format format)
{
    sp_fused_args a = {.op = op, .n_elems = n, .dtype = dtype, .format = format, .shape = s};
    a.n_shards = l->world_size;
    sp_tune_gpu_plan(l, &a);
    return a;
}

static void check_plan(const sp_gpu_limits *l, sp_fused_op op, uint64_t n, spccl_dtype dtype,
                       spccl_format format)
{
    sp_inbox_shape s = shape_of(l);
    size_t elem_bytes = sp_dtype_bytes(dtype), frame;
    sp_fused_args p;
    uint64_t n_slices;
    p = plan_of(l, s, op, n, dtype, format);
    frame = format == SPCCL_FORMAT_AUTO ? sp_frame_bound(p.slice_elems, elem_bytes)
                                        : sp_frame_bound_forced(format, p.slice_elems, elem_bytes);
    CHECK(frame <= (format == SPCCL_FORMAT_TILE || format == SPCCL_FORMAT_COO ? SP_GPU_STAGE_BYTES
                                                                              : SP_INBOX_FRAME_BYTES),
          "%s %s: a frame of %zu bytes", spccl_dtype_name(dtype), spccl_format_name(format), frame);
    CHECK(p.slice_elems >= 128 && p.slice_elems % 128 == 0 &&
              p.slice_elems * elem_bytes <= SP_INBOX_SLICE_BYTES,
          "slices of %u elements", p.slice_elems);
    CHECK(op == SP_FUSED_ALL_GATHER || op == SP_FUSED_BROADCAST || sp_acc_dtype(dtype) == dtype ||
              p.slice_elems * sizeof(float) <= SP_INBOX_SLICE_BYTES,
          "%s: %u accumulators", spccl_dtype_name(dtype), p.slice_elems);
    CHECK(p.n_served == 1 || p.n_served == 2, "feeders of %u workers", p.n_served);
    CHECK(p.n_ctas >= 1 && p.workers_per_cta >= 1 &&
              p.workers_per_cta <= l->workers_per_cta[p.n_served - 1][p.op] &&
              p.n_ctas * p.workers_per_cta <= s.n_workers && (l->max_ctas == 0 || p.n_ctas <= l->max_ctas),
          "%u CTAs of %u workers, %u in all", p.n_ctas, p.workers_per_cta, s.n_workers);
    n_slices = (n + p.slice_elems - 1) / p.slice_elems;
    if (p.op == SP_FUSED_ALL_REDUCE || p.op == SP_FUSED_BROADCAST)
        n_slices = (n_slices + l->world_size - 1) / l->world_size;
    CHECK(p.n_ctas <= n_slices && (uint64_t)(p.n_ctas - 1) * p.workers_per_cta < n_slices,
          "%u CTAs of %u workers for %llu slices", p.n_ctas, p.workers_per_cta, (unsigned long long)n_slices);
    /* A slice size that is no power of two was chosen so that each worker has one slice. */
    CHECK(n_slices <= (uint64_t)p.n_ctas * p.workers_per_cta || (p.slice_elems & (p.slice_elems - 1)) == 0,
          "%llu slices of %u for %u workers", (unsigned long long)n_slices, p.slice_elems,
          p.n_ctas * p.workers_per_cta);
    CHECK(p.op == op || (op == SP_FUSED_ALL_REDUCE && p.op == SP_FUSED_ALL_REDUCE_ONESHOT), "op %d -> %d",
          (int)op, (int)p.op);
}

static void test_plan(void)
{
    for (int i = 0; i < 4; i++) {
        sp_gpu_limits l = h200;
        l.world_size = i == 0 ? 1 : i == 1 ? 2 : i == 2 ? 4 : 8;
        l.max_ctas = i == 2 ? 7 : 0;
        l.hops = (uint32_t)i % 3;
        if (l.world_size == 2) /* then feeders of a reduction may serve two workers */
            memcpy(l.workers_per_cta[1], (uint32_t[SP_FUSED_OPS]){10, 9, 6, 9, 0},
                   sizeof l.workers_per_cta[1]);
        for (sp_fused_op op = SP_FUSED_ALL_GATHER; op <= SP_FUSED_BROADCAST; op++)
            for (size_t n = 0; n < sizeof sizes / sizeof *sizes; n++)
                for (int dtype = SPCCL_FLOAT32; dtype <= SPCCL_UINT8; dtype++)
                    for (size_t f = 0; f < sizeof formats / sizeof *formats; f++)
                        check_plan(&l, op, sizes[n], (spccl_dtype)dtype, formats[f]);
    }
}

static void test_known_plans(void)
{
    sp_gpu_limits l = h200;
    sp_inbox_shape s = shape_of(&l);
    sp_fused_args p;
    p = plan_of(&l, s, SP_FUSED_ALL_GATHER, 1 << 27, SPCCL_FLOAT32, SPCCL_FORMAT_AUTO);
    CHECK(p.slice_elems == 2048 && p.n_ctas == 132 && p.workers_per_cta == 10 && p.n_served == 2,
          "512 MiB: %u, %u x %u", p.slice_elems, p.n_ctas, p.workers_per_cta);
    p = plan_of(&l, s, SP_FUSED_ALL_REDUCE, 1 << 28, SPCCL_BFLOAT16, SPCCL_FORMAT_AUTO);
    CHECK(p.slice_elems == 2048 && p.op == SP_FUSED_ALL_REDUCE, "bfloat16: %u", p.slice_elems);
    p = plan_of(&l, s, SP_FUSED_ALL_GATHER, 132 * 1024, SPCCL_FLOAT32, SPCCL_FORMAT_AUTO);
    CHECK(p.slice_elems == 1024 && p.n_ctas == 132 && p.workers_per_cta == 1 && p.n_served == 1,
          "one slice each: %u, %u x %u", p.slice_elems, p.n_ctas, p.workers_per_cta);
    p = plan_of(&l, s, SP_FUSED_ALL_REDUCE, 4 << 20, SPCCL_FLOAT32, SPCCL_FORMAT_AUTO);
    CHECK(p.slice_elems == 1664 && p.n_ctas * p.workers_per_cta == 635,
          "16 MiB, a slice for each worker: %u, %u x %u", p.slice_elems, p.n_ctas, p.workers_per_cta);
    p = plan_of(&l, s, SP_FUSED_ALL_GATHER, 132 * 7 * 2048, SPCCL_FLOAT32, SPCCL_FORMAT_AUTO);
    CHECK(p.slice_elems == 2048 && p.workers_per_cta == 7 && p.n_served == 1, "as long as possible: %u x %u",
          p.slice_elems, p.workers_per_cta);
    p = plan_of(&l, s, SP_FUSED_ALL_GATHER, 132 * 7 * 2048 + 1, SPCCL_FLOAT32, SPCCL_FORMAT_AUTO);
    CHECK(p.slice_elems == 2048 && p.n_served == 2, "one more: %u, feeders of %u", p.slice_elems, p.n_served);
    l.workers_per_cta[1][SP_FUSED_REDUCE_SCATTER] = 9; /* as between two ranks */
    p = plan_of(&l, s, SP_FUSED_REDUCE_SCATTER, 132 * 9 * 2048, SPCCL_FLOAT32, SPCCL_FORMAT_AUTO);
    CHECK(p.n_served == 2 && p.workers_per_cta == 9, "one slice each: feeders of %u", p.n_served);
    p = plan_of(&l, s, SP_FUSED_REDUCE_SCATTER, 132 * 9 * 2048 + 1, SPCCL_FLOAT32, SPCCL_FORMAT_AUTO);
    CHECK(p.n_served == 1 && p.workers_per_cta == 7, "more: feeders of %u", p.n_served);
    p = plan_of(&l, s, SP_FUSED_REDUCE_SCATTER, 1 << 28, SPCCL_BFLOAT16, SPCCL_FORMAT_AUTO);
    CHECK(p.n_served == 2 && p.workers_per_cta == 9, "bfloat16: feeders of %u", p.n_served);
    p = plan_of(&l, s, SP_FUSED_ALL_REDUCE, 1 << 18, SPCCL_FLOAT32, SPCCL_FORMAT_AUTO);
    CHECK(p.op == SP_FUSED_ALL_REDUCE_ONESHOT, "1 MiB: one hop");
    p = plan_of(&l, s, SP_FUSED_ALL_REDUCE, (1 << 18) + 1, SPCCL_FLOAT32, SPCCL_FORMAT_AUTO);
    CHECK(p.op == SP_FUSED_ALL_REDUCE, "more: two");
    l.hops = 1;
    p = plan_of(&l, s, SP_FUSED_ALL_REDUCE, 1 << 28, SPCCL_FLOAT32, SPCCL_FORMAT_AUTO);
    CHECK(p.op == SP_FUSED_ALL_REDUCE_ONESHOT, "one hop is forced");
    l.hops = 2;
    p = plan_of(&l, s, SP_FUSED_ALL_REDUCE, 1, SPCCL_FLOAT32, SPCCL_FORMAT_AUTO);
    CHECK(p.op == SP_FUSED_ALL_REDUCE, "two hops are forced");
    l.hops = 0;
    l.world_size = 2;
    p = plan_of(&l, shape_of(&l), SP_FUSED_ALL_REDUCE, 3 << 18, SPCCL_FLOAT32, SPCCL_FORMAT_AUTO);
    CHECK(p.op == SP_FUSED_ALL_REDUCE_ONESHOT, "3 MiB, two ranks: one hop");
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {{"shape", test_shape},
                                             {"shape_too_small", test_shape_too_small},
                                             {"shape_of_hosts", test_shape_of_hosts},
                                             {"plan", test_plan},
                                             {"known_plans", test_known_plans},
                                             {NULL, NULL}};
    return test_main(cases, argc, argv);
}
