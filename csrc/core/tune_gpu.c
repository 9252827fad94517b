/* tune_gpu.c - see tune_gpu.h. */
#include "tune_gpu.h"

#include "dtype.h"
#include "format.h"

#include <inttypes.h>

/* An all-reduce of at most this many bytes goes in one hop: everybody sends everything, so a second wait for
 * results is saved at the price of more bytes. With two ranks the bytes are the same either way. */
#define ONESHOT_BYTES 65536u
/* Slices are not cut below these to give every worker one: headers and waits would cost more than they gain.
 */
#define SLICE_ELEMS_MIN 1024u
#define SLICE_BYTES_MIN 4096u

static uint32_t ctas_allowed(const sp_gpu_limits *l)
{
    uint32_t n = l->max_ctas != 0 && l->max_ctas < l->n_sms ? l->max_ctas : l->n_sms;
    return n != 0 ? n : 1; /* more ranks than multiprocessors on one GPU */
}

spccl_status sp_tune_gpu_shape(const sp_gpu_limits *l, sp_inbox_shape *out)
{
    sp_inbox_shape s = {.world_size = l->world_size};
    uint32_t n_ctas = ctas_allowed(l), most = 0;
    size_t least;
    for (int op = 0; op < SP_FUSED_OPS; op++)
        most = l->workers_per_cta[op] > most ? l->workers_per_cta[op] : most;
    /* Shorter rings before fewer workers, and these before fewer blocks: every multiprocessor takes part in
     * moving memory. */
    for (uint32_t per_cta = most; per_cta > 0; per_cta--)
        for (s.ring_frames = SP_INBOX_RING_FRAMES_MAX; s.ring_frames >= SP_INBOX_RING_FRAMES_MIN;
             s.ring_frames--) {
            s.n_workers = n_ctas * per_cta;
            if (sp_inbox_bytes(s) <= l->inbox_bytes) {
                *out = s;
                return SPCCL_OK;
            }
        }
    s.n_workers = 1;
    s.ring_frames = SP_INBOX_RING_FRAMES_MIN;
    least = sp_inbox_bytes(s);
    if (least > l->inbox_bytes || most == 0)
        return SP_FAIL(SPCCL_ERR_SETTING,
                       "an inbox of %zu bytes is too small for %u ranks: one worker needs %zu, all %u "
                       "blocks %zu (SPCCL_INBOX_BYTES)",
                       l->inbox_bytes, l->world_size, least, n_ctas, least * n_ctas);
    s.n_workers = (uint32_t)(l->inbox_bytes / least); /* bytes are proportional to workers */
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

/* Slices of the part that one rank owns (or, in one hop, of everything). */
static uint64_t slices_per_rank(const sp_gpu_limits *l, sp_fused_op op, uint64_t n_elems,
                                uint32_t slice_elems)
{
    uint64_t n = n_elems / slice_elems + (n_elems % slice_elems != 0);
    if (op == SP_FUSED_ALL_REDUCE || op == SP_FUSED_BROADCAST)
        n = n / l->world_size + (n % l->world_size != 0);
    return n;
}

static uint32_t pick_slice_elems(const sp_gpu_limits *l, sp_inbox_shape shape, sp_fused_op op,
                                 uint64_t n_elems, spccl_dtype dtype, spccl_format format)
{
    size_t elem_bytes = sp_dtype_bytes(dtype);
    uint32_t n_workers =
        (uint32_t)sp_min_size(shape.n_workers, sp_tune_gpu_ctas(l, shape) * l->workers_per_cta[op]);
    uint32_t elems = (uint32_t)(SP_INBOX_SLICE_BYTES / elem_bytes);
    uint32_t least = (uint32_t)(SLICE_BYTES_MIN / elem_bytes);
    if (least < SLICE_ELEMS_MIN)
        least = SLICE_ELEMS_MIN;
    if (reduces(op) && sp_acc_dtype(dtype) != dtype)
        elems /= 2; /* accumulated in float32: twice the room */
    if (format == SPCCL_FORMAT_TILE || format == SPCCL_FORMAT_COO) /* put together on chip */
        while (elems > 128 && sp_frame_bound_forced(format, elems, elem_bytes) > SP_GPU_STAGE_BYTES)
            elems /= 2;
    else if (format != SPCCL_FORMAT_AUTO)
        while (elems > 1024 && sp_frame_bound_forced(format, elems, elem_bytes) > SP_INBOX_FRAME_BYTES)
            elems /= 2;
    while (elems / 2 >= least && slices_per_rank(l, op, n_elems, elems) < n_workers)
        elems /= 2;
    return elems;
}

void sp_tune_gpu_plan(const sp_gpu_limits *l, sp_inbox_shape shape, sp_fused_op op, uint64_t n_elems,
                      spccl_dtype dtype, spccl_format format, sp_gpu_plan *out)
{
    uint32_t n_ctas = sp_tune_gpu_ctas(l, shape), per_cta;
    uint64_t n_slices, needed;
    if (op == SP_FUSED_ALL_REDUCE && l->world_size > 1 &&
        n_elems <= (uint64_t)ONESHOT_BYTES * (l->world_size == 2 ? 4 : 1) / sp_dtype_bytes(dtype))
        op = SP_FUSED_ALL_REDUCE_ONESHOT;
    out->op = op;
    out->slice_elems = pick_slice_elems(l, shape, op, n_elems, dtype, format);
    n_slices = slices_per_rank(l, op, n_elems, out->slice_elems);
    per_cta = shape.n_workers / n_ctas;
    if (per_cta > l->workers_per_cta[op])
        per_cta = l->workers_per_cta[op];
    /* Few slices: first one worker on each multiprocessor, and no more blocks than have something to do. */
    needed = n_slices / n_ctas + (n_slices % n_ctas != 0);
    if (needed < per_cta)
        per_cta = needed != 0 ? (uint32_t)needed : 1;
    needed = n_slices / per_cta + (n_slices % per_cta != 0);
    if (needed < n_ctas)
        n_ctas = needed != 0 ? (uint32_t)needed : 1;
    out->n_ctas = n_ctas;
    out->workers_per_cta = per_cta;
}
