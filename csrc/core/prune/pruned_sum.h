/* pruned_sum.h - spccl_cuda_prune_all_reduce: can a call use lists, and where do they lie? (pruned_sum.c) */
#ifndef SP_PRUNED_SUM_H
#define SP_PRUNED_SUM_H

#include "core/contract/pruned_lists.h"
#include "core/prune/prune_plan.h"

/* Room for entries that warps leave unused: a claim for each warp of 132 multiprocessors, two CTAs of 8 warps each. It
 * is a constant, as all ranks must decide the same, also with other GPUs. If it is too little, less is sent. */
#define SP_LISTS_UNUSED_MAX (UINT64_C(2112) * SP_LISTS_CLAIM)

/* Set where lists and entries lie in an area of `bytes`. False: there is no room for twice what a gradient of `plan`
 * wants to send at this density. */
bool sp_pruned_lists_fit(const spccl_prune_plan *plan, double density, uint64_t bytes,
                         sp_pruned_sum_args *out);

/* Check the arguments of a call that prunes on a GPU. Errors: ARG. (prune_plan.c) */
spccl_status sp_gpu_prune_args_get(spccl_prune_plan *plan, void *grad, const spccl_prune_options *options,
                                   const char *call, sp_gpu_prune_args *out);

#endif
