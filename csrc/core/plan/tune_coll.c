/* tune_coll.c - see tune_coll.h. */
#include "core/plan/tune_coll.h"

#include "core/base/bits.h"
#include "core/format/format.h"

#include <string.h>

/* A slice and its scratch memory stay in an L2 cache of 1 MiB. A message fills about an eighth of a queue of
 * the default capacity. */
#define SLICE_BYTES ((size_t)128 << 10)
#define QUEUE_SLICES 8 /* of a queue's capacity */
/* All queues of a rank together. Between two ranks there are SP_N_QUEUES queues each way. */
#define QUEUES_BYTES ((size_t)48 << 20)
#define PROBE_ELEMS 64  /* elements that a probe looks at */
#define RESCAN_EVERY 16 /* of so many dense slices in a row, one is scanned */

spccl_status sp_tune_parse_schedule(const char *text, bool *forced, sp_schedule *out)
{
    *forced = strcmp(text, "auto") != 0 && strcmp(text, SP_TUNE_ON) != 0 &&
              (strncmp(text, SP_TUNE_PROFILE, strlen(SP_TUNE_PROFILE)) != 0 ||
               strlen(text) == strlen(SP_TUNE_PROFILE));
    if (!*forced)
        return SPCCL_OK;
    for (int i = 0; i < SP_N_SCHEDULES; i++)
        if (strcmp(text, sp_schedule_name((sp_schedule)i)) == 0) {
            *out = (sp_schedule)i;
            return SPCCL_OK;
        }
    if (strncmp(text, SP_TUNE_FILE, strlen(SP_TUNE_FILE)) == 0) {
        *out = SP_SCHED_FILE;
        return SPCCL_OK;
    }
    return SP_FAIL(
        SPCCL_ERR_SETTING,
        "schedule \"%s\" (SPCCL_SCHEDULE): wanted auto, tune, tune:PATH of a profile, direct, oneshot, "
        "relayed, ring, hierarchical, or file:PATH of a plan file",
        text);
}

size_t sp_tune_queue_bytes(int world_size)
{
    size_t bytes = QUEUE_SLICES * SLICE_BYTES, n_queues = 2 * SP_N_QUEUES * (size_t)world_size;
    while (bytes > QUEUE_SLICES * SP_SLICE_BYTES_MIN && bytes * n_queues > QUEUES_BYTES)
        bytes /= 2;
    return bytes;
}

size_t sp_tune_slice_bytes(size_t queue_bytes)
{
    size_t bytes = sp_min_size(SLICE_BYTES, queue_bytes / QUEUE_SLICES);
    return sp_max_size(bytes, SP_SLICE_BYTES_MIN);
}

size_t sp_tune_slice_elems(size_t slice_bytes, size_t elem_bytes, spccl_format forced, size_t message_max)
{
    size_t n = slice_bytes / elem_bytes;
    n -= n % SP_PICI_TILE_ELEMS; /* whole pici tiles */
    if (n < SP_PICI_TILE_ELEMS)
        n = SP_PICI_TILE_ELEMS;
    while (n > SP_PICI_TILE_ELEMS) {
        size_t bound = forced == SPCCL_FORMAT_AUTO ? sp_frame_bound(n, elem_bytes)
                                                   : sp_frame_bound_forced(forced, n, elem_bytes);
        if (SP_ENVELOPE_BYTES + bound <= message_max)
            break;
        n -= SP_PICI_TILE_ELEMS;
    }
    return n;
}

size_t sp_tune_slice_elems_max(size_t slice_elems, size_t elem_bytes, size_t queue_bytes)
{
    size_t n =
        sp_tune_slice_elems(2 * slice_elems * elem_bytes, elem_bytes, SPCCL_FORMAT_AUTO, queue_bytes / 4);
    return sp_max_size(n, slice_elems);
}

/* True if element i of x has a set bit; ignores_sign: another one than the highest. */
static bool is_nonzero(const uint8_t *x, size_t elem_bytes, bool ignores_sign, size_t i)
{
    unsigned bits = x[(i + 1) * elem_bytes - 1] & (ignores_sign ? 0x7fu : 0xffu);
    for (size_t b = 0; b + 1 < elem_bytes; b++)
        bits |= x[i * elem_bytes + b];
    return bits != 0;
}

bool sp_tune_skip_scan(const void *x, size_t n_elems, size_t elem_bytes, bool ignores_sign, uint32_t n_dense)
{
    if (n_dense == 0 || n_dense % RESCAN_EVERY == 0 || n_elems < PROBE_ELEMS)
        return false;
    for (size_t i = 0; i < PROBE_ELEMS; i++)
        if (!is_nonzero(x, elem_bytes, ignores_sign,
                        i * (n_elems / PROBE_ELEMS) + i % (n_elems / PROBE_ELEMS)))
            return false;
    return true;
}
