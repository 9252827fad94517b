/* tune_gpu.c - see tune_gpu.h. */
#include "core/gpu/collectives/tune_gpu.h"

#include "core/base/dtype.h"
#include "core/format/format.h"

#include <inttypes.h>

/* An all-reduce takes one hop, in which every rank sends its whole array to every other rank, under two
 * conditions: a rank receives at most so many bytes from all its peers if the arrays are dense, and no worker
 * has more than one slice. One hop saves the second wait, 10 to 14 us on an H200 (spccl_bench_fused). It
 * costs P / 2 times the bytes (between two ranks: the same bytes). If the arrays are dense, the additional
 * bytes take 4 to 8 us on a link of 357 GB/s at 3 MiB. */
#define ONESHOT_BYTES ((uint64_t)3 << 20)
/* The smallest slices. Smaller ones would give more workers a slice, but headers and waits would cost more
 * than that gains. */
#define SLICE_ELEMS_MIN 1024u
#define SLICE_BYTES_MIN 4096u
/* Slices start at multiples of so many elements of the array, so that they are whole cache lines. */
#define SLICE_ELEMS_STEP 128u

static uint32_t ctas_allowed(const sp_gpu_limits *l)
{
    uint32_t n = l->max_ctas != 0 && l->max_ctas < l->n_sms ? l->max_ctas : l->n_sms;
    return n != 0 ? n : 1; /* 0: a GPU has fewer SMs than ranks */
}

size_t sp_tune_gpu_inbox_bytes(const sp_gpu_limits *l, sp_inbox_shape s)
{
    return l->n_remote == 0 ? sp_inbox_bytes(s) : sp_remote_inbox_bytes(s);
}

size_t sp_tune_gpu_pinned_bytes(const sp_gpu_limits *l, sp_inbox_shape s)
{
    return l->n_remote == 0 ? 0 : sp_remote_pinned_bytes(s, l->n_remote);
}

static bool fits(const sp_gpu_limits *l, sp_inbox_shape s)
{
    return sp_tune_gpu_inbox_bytes(l, s) <= l->inbox_bytes &&
           sp_tune_gpu_pinned_bytes(l, s) <= SP_GPU_PINNED_MAX;
}

spccl_status sp_tune_gpu_shape(const sp_gpu_limits *l, sp_inbox_shape *out)
{
    sp_inbox_shape s = {.world_size = l->world_size, .n_here = l->n_here};
    uint32_t n_ctas = ctas_allowed(l), most = 0;
    size_t least;
    for (int op = 0; op < SP_FUSED_OPS; op++)
        for (uint32_t served = 0; served < SP_FUSED_SERVED_MAX; served++)
            most = l->workers_per_cta[served][op] > most ? l->workers_per_cta[served][op] : most;
    /* If bytes are short: first shorter rings, then fewer workers per CTA, and only then fewer CTAs, as every
     * SM is needed to move memory. */
    for (uint32_t per_cta = most; per_cta > 0; per_cta--)
        for (s.ring_frames = SP_INBOX_RING_FRAMES_MAX; s.ring_frames >= SP_INBOX_RING_FRAMES_MIN;
             s.ring_frames--) {
            s.n_workers = n_ctas * per_cta;
            if (fits(l, s)) {
                *out = s;
                return SPCCL_OK;
            }
        }
    s.n_workers = 1;
    s.ring_frames = SP_INBOX_RING_FRAMES_MIN;
    least = sp_tune_gpu_inbox_bytes(l, s);
    if (!fits(l, s) || most == 0)
        return SP_FAIL(SPCCL_ERR_SETTING,
                       "an inbox of %zu bytes is too small for %u ranks: one worker needs %zu, one on each "
                       "of %u CTAs %zu (SPCCL_INBOX_BYTES)",
                       l->inbox_bytes, l->world_size, least, n_ctas, least * n_ctas);
    s.n_workers = (uint32_t)(l->inbox_bytes / least); /* an inbox's bytes are proportional to its workers */
    while (!fits(l, s))
        s.n_workers--;
    *out = s;
    return SPCCL_OK;
}

uint32_t sp_tune_gpu_ctas(const sp_gpu_limits *l, sp_inbox_shape shape)
{
    uint32_t n = ctas_allowed(l);
    return n < shape.n_workers ? n : shape.n_workers;
}

static bool reduces(sp_fused_op op)
{
    return op == SP_FUSED_REDUCE_SCATTER || op == SP_FUSED_ALL_REDUCE || op == SP_FUSED_ALL_REDUCE_ONESHOT;
}

/* Slices of a rank's shard; where there are no shards (one hop): of the array. */
static uint64_t slices_per_rank(const sp_fused_args *a, sp_fused_op op, uint32_t slice_elems)
{
    uint64_t n = sp_ceil_div(a->n_elems, slice_elems);
    return op == SP_FUSED_ALL_REDUCE || op == SP_FUSED_BROADCAST ? sp_ceil_div(n, a->n_shards) : n;
}

/* The most elements that a slice may have. A tile or coo frame must fit into the staging buffer. */
static uint32_t largest_slice(sp_fused_op op, spccl_dtype dtype, spccl_format format)
{
    bool is_staged = format == SPCCL_FORMAT_TILE || format == SPCCL_FORMAT_COO;
    size_t elem_bytes = sp_dtype_bytes(dtype),
           frame_max = is_staged ? SP_GPU_STAGE_BYTES : SP_INBOX_FRAME_BYTES;
    uint32_t elems = (uint32_t)(SP_INBOX_SLICE_BYTES / elem_bytes), least = is_staged ? 128 : 1024;
    if (reduces(op) && sp_acc_dtype(dtype) != dtype)
        elems /= 2; /* the accumulator is float32, twice as large */
    while (format != SPCCL_FORMAT_AUTO && elems > least &&
           sp_frame_bound_forced(format, elems, elem_bytes) > frame_max)
        elems /= 2;
    return elems;
}

static uint32_t workers_per_cta(const sp_gpu_limits *l, sp_inbox_shape shape, sp_fused_op op,
                                uint32_t n_served)
{
    return (uint32_t)sp_min_size(shape.n_workers / sp_tune_gpu_ctas(l, shape),
                                 l->workers_per_cta[n_served - 1][op]);
}

/* Set how many workers a feeder serves, and the elements of a slice.
 * - If no worker has more than one slice, the collective takes as long as one slice. Each worker then has its
 *   own feeder, if there are enough such workers, and slices are as short as possible.
 * - For a longer array, shared feeders allow more workers. That pays in an all-gather, and in reductions of
 *   16-bit floats. In reductions of other dtypes it made dense frames 8% slower (2 H200). */
static void pick_slices(const sp_gpu_limits *l, sp_fused_args *p)
{
    uint32_t n_ctas = sp_tune_gpu_ctas(l, p->shape), most = largest_slice(p->op, p->dtype, p->format);
    uint32_t least = (uint32_t)(SLICE_BYTES_MIN / sp_dtype_bytes(p->dtype));
    uint64_t alone = (uint64_t)n_ctas * workers_per_cta(l, p->shape, p->op, 1), wanted;
    uint64_t shared = (uint64_t)n_ctas * workers_per_cta(l, p->shape, p->op, SP_FUSED_SERVED_MAX);
    uint64_t n_slices = slices_per_rank(p, p->op, most);
    bool keep_shared = !reduces(p->op) || sp_acc_dtype(p->dtype) != p->dtype;
    p->n_served =
        n_slices > alone && shared > alone && (n_slices <= shared || keep_shared) ? SP_FUSED_SERVED_MAX : 1;
    p->slice_elems = most;
    if (n_slices > alone)
        return;
    if (least < SLICE_ELEMS_MIN)
        least = SLICE_ELEMS_MIN;
    wanted = sp_ceil_div(slices_per_rank(p, p->op, 1), alone);
    wanted = sp_ceil_div(wanted, SLICE_ELEMS_STEP) * SLICE_ELEMS_STEP;
    if (wanted < least)
        wanted = least;
    if (wanted < most)
        p->slice_elems = (uint32_t)wanted;
}

static bool one_hop(const sp_gpu_limits *l, const sp_fused_args *a)
{
    const sp_fused_op op = SP_FUSED_ALL_REDUCE_ONESHOT;
    if (l->world_size == 1 ||
        l->world_size > SP_GPU_HOST_RANKS_MAX) /* a feeder has links to 16 peers at a time */
        return false;
    if (l->hops != 0)
        return l->hops == 1;
    return a->n_elems <= ONESHOT_BYTES / (l->world_size - 1) / sp_dtype_bytes(a->dtype) &&
           slices_per_rank(a, op, largest_slice(op, a->dtype, a->format)) <=
               (uint64_t)sp_tune_gpu_ctas(l, a->shape) * workers_per_cta(l, a->shape, op, 1);
}

void sp_tune_gpu_plan(const sp_gpu_limits *l, sp_fused_args *a)
{
    uint32_t n_ctas = sp_tune_gpu_ctas(l, a->shape), per_cta;
    uint64_t n_slices, needed;
    if (a->op == SP_FUSED_ALL_REDUCE && one_hop(l, a))
        a->op = SP_FUSED_ALL_REDUCE_ONESHOT;
    pick_slices(l, a);
    n_slices = slices_per_rank(a, a->op, a->slice_elems);
    per_cta = workers_per_cta(l, a->shape, a->op, a->n_served);
    /* With few slices: no more workers per CTA than are needed, and no more CTAs than have a slice. */
    needed = sp_ceil_div(n_slices, n_ctas);
    if (needed < per_cta)
        per_cta = needed != 0 ? (uint32_t)needed : 1;
    needed = sp_ceil_div(n_slices, per_cta);
    if (needed < n_ctas)
        n_ctas = needed != 0 ? (uint32_t)needed : 1;
    a->n_ctas = n_ctas;
    a->workers_per_cta = per_cta;
}
