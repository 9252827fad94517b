/* prune_plan.h - plans: the checked segments of a gradient (spccl_prune_plan) or of weights (spccl_weights_plan), and
 * what the files of this folder share. */
#ifndef SP_PRUNE_PLAN_H
#define SP_PRUNE_PLAN_H

#include "core/base/mem.h"
#include "core/contract/gpu.h"
#include "core/format/kernel_table.h"

/* Both kinds of segments have the same layout. */
typedef union sp_segment {
    spccl_prune_segment prune;
    spccl_weights_segment weights;
} sp_segment;
_Static_assert(sizeof(spccl_prune_segment) == sizeof(spccl_weights_segment), "one layout");

struct spccl_prune_plan {
    size_t n_elems, n_segments;
    spccl_dtype dtype;
    int device;                 /* -1: host memory */
    sp_segment *segments;       /* [n_segments], by begin */
    const sp_kernels *kernels;  /* host */
    uint64_t *magnitudes;       /* [SP_PRUNE_BLOCK_ELEMS] scratch of the host, of a sample or a block */
    sp_gpu_prune_table *table;  /* GPU memory: the table and rows; NULL on the host */
    size_t n_tiles, most_elems; /* on a GPU: tiles of all segments; elements of the largest */
    size_t n_covered, n_whole;  /* elements of all segments; of those that are sent whole */
    bool told;                  /* the log has why pruned_sum.c takes no lists */
};
struct spccl_weights_plan {
    spccl_prune_plan plan;
};

/* Elements that the host prunes at a time, so that gradient and state stay in the L2 cache. */
#define SP_PRUNE_BLOCK_ELEMS 65536u
_Static_assert(SP_PRUNE_SAMPLES_MAX <= SP_PRUNE_BLOCK_ELEMS, "the scratch holds a sample");

/* What texts say before the GPU of a plan. */
#define SP_PLAN_IS_FOR "the plan is for"

/* Errors unless the options that gradients and weights share are in range. */
spccl_status sp_prune_check_shares(const char *call, double density, double sample, double leak,
                                   double scale);
/* Check a call that prunes a gradient with `plan`, and copy its options; NULL = defaults. on_gpu: for which plans it
 * is. Errors: ARG. */
spccl_status sp_prune_options_get(const spccl_prune_plan *plan, const void *grad, bool on_gpu,
                                  const spccl_prune_options *given, const char *call,
                                  spccl_prune_options *out);
/* The same for a call on a GPU, and the arguments of its launch. */
spccl_status sp_prune_gpu_args_get(spccl_prune_plan *plan, void *grad, const spccl_prune_options *options,
                                   const char *call, sp_gpu_prune_args *out);
/* Prune one segment on the host. `grad` is that of the segment. */
void sp_prune_segment_run(const spccl_prune_plan *plan, const spccl_prune_options *o,
                          const spccl_prune_segment *s, void *grad);
/* Send the weights of one segment by chunks, on the host; `out` is that of the segment (weights_chunk.c). */
void sp_weights_chunk_run(spccl_dtype dtype, const spccl_weights_options *o, const spccl_weights_segment *s,
                          void *out);

#endif
