/* prune_plan.h - spccl_prune_plan: the checked segments of one gradient. prune_plan.c creates plans and
 * runs them on a GPU; prune.c runs them on the host. */
#ifndef SP_PRUNE_PLAN_H
#define SP_PRUNE_PLAN_H

#include "core/base/mem.h"
#include "core/base/prune_rule.h"
#include "core/format/kernel_table.h"

struct spccl_prune_plan {
    size_t n_elems, n_segments;
    spccl_dtype dtype;
    int device;                    /* -1: host memory */
    spccl_prune_segment *segments; /* [n_segments], by begin */
    const sp_kernels *kernels;     /* host */
    uint64_t *magnitudes;          /* [SP_PRUNE_BLOCK_ELEMS] scratch of the host, of a sample or a block */
    void *table;                   /* GPU memory: sp_gpu_prune_table and rows; NULL on the host */
    size_t n_tiles, most_elems;    /* on a GPU: tiles of all segments; elements of the largest */
    size_t n_covered, n_whole;     /* elements of all segments; of those that are sent whole */
};

/* Elements that the host prunes at a time, so that gradient and state stay in the L2 cache. */
#define SP_PRUNE_BLOCK_ELEMS 65536u
_Static_assert(SP_PRUNE_SAMPLES_MAX <= SP_PRUNE_BLOCK_ELEMS, "the scratch holds a sample");

/* Copy and check the caller's options for gradients of `dtype`; NULL = defaults. `call` is for the texts of
 * errors. Errors: ARG. */
spccl_status sp_prune_options_get(const spccl_prune_options *given, spccl_dtype dtype, const char *call,
                                  spccl_prune_options *out);
/* Errors if the options choose by chunks, which `call` does not do. */
spccl_status sp_prune_refuse_chunk(const spccl_prune_options *o, const char *call);
/* Errors if the options ask for a stage, which `call` does not know. */
spccl_status sp_prune_refuse_stage(const spccl_prune_options *o, const char *call);
/* Prune one segment on the host. `grad` is that of the segment. */
void sp_prune_segment_run(const spccl_prune_plan *plan, const spccl_prune_options *o,
                          const spccl_prune_segment *s, void *grad);
/* Send the weights of one segment by chunks, on the host; `out` is that of the segment (weights_chunk.c). */
void sp_weights_chunk_run(const spccl_prune_plan *plan, const spccl_prune_options *o,
                          const spccl_prune_segment *s, void *out);

#endif
