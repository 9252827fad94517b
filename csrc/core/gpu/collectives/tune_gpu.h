/* tune_gpu.h - the choices for GPU collectives: workers, slice size, CTAs, one hop or two. Pure functions. */
#ifndef SP_TUNE_GPU_H
#define SP_TUNE_GPU_H

#include "core/contract/gpu.h"

/* Limits that are equal on all ranks of a group. */
typedef struct sp_gpu_limits {
    uint32_t world_size;
    uint32_t n_sms; /* the least over the ranks; ranks that share a GPU divide its SMs */
    /* [n_served - 1][op], where a feeder serves n_served workers; the least over the ranks. 0: feeders
     * cannot. */
    uint32_t workers_per_cta[SP_FUSED_SERVED_MAX][SP_FUSED_OPS];
    uint32_t max_ctas;  /* 0 = no limit; the least over the ranks */
    size_t inbox_bytes; /* the least over the ranks */
    uint32_t hops;      /* of an all-reduce: 1 or 2; 0 = by its size */
    uint32_t n_here;    /* in a group with relays: the ranks of each host; otherwise 0 */
    uint32_t n_remote;  /* on several hosts: the most peers on other hosts that a rank has; else 0 */
    uint32_t n_proxies; /* of a rank, in a group on several hosts; the least over the ranks */
} sp_gpu_limits;

/* The most pinned memory of a rank for peers on other hosts. */
#define SP_GPU_PINNED_MAX ((size_t)512 << 20)

/* Bytes of an inbox, and of a rank's pinned memory for peers on other hosts (at most). */
size_t sp_tune_gpu_inbox_bytes(const sp_gpu_limits *l, sp_inbox_shape s);
size_t sp_tune_gpu_pinned_bytes(const sp_gpu_limits *l, sp_inbox_shape s);

/* The shape of the largest inbox that fits the limits. Errors: SETTING if not even one worker fits; the text
 * has the bytes. */
spccl_status sp_tune_gpu_shape(const sp_gpu_limits *l, sp_inbox_shape *out);

/* The most CTAs that a collective uses. */
uint32_t sp_tune_gpu_ctas(const sp_gpu_limits *l, sp_inbox_shape shape);

/* Choose how to run the collective that *a describes: sets slice_elems, n_ctas, workers_per_cta and n_served, and op, as
 * ALL_REDUCE may become ALL_REDUCE_ONESHOT. The choice depends on the limits and on op, n_elems, n_shards, dtype, format and
 * shape of *a alone: it is equal on all ranks. */
void sp_tune_gpu_plan(const sp_gpu_limits *l, sp_fused_args *a);

#endif
