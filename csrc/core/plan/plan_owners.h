/* plan_owners.h - has a plan the form that the fused GPU kernels carry out? In that form each chunk has one owner. All
 * ranks send it their input; it adds in rank order, and its result goes to all ranks, directly or over relays. The owner
 * of an all_gather's chunk is the rank that has it, and that of a broadcast's chunk gets it from the root. */
#ifndef SP_PLAN_OWNERS_H
#define SP_PLAN_OWNERS_H

#include "core/plan/plan_text.h"

typedef enum sp_results {
    SP_RESULTS_NONE,   /* no rank sends results: reduce_scatter, one hop, one rank */
    SP_RESULTS_DIRECT, /* from the owner to all ranks */
    SP_RESULTS_RELAYED /* from the owner to its host, and to the rank of its place on each other host, which relays */
} sp_results;

typedef struct sp_owners {
    char why_not[200]; /* "": the plan has the form; else rank, step and reason, and the rest is not set */
    sp_results results;
    bool one_hop; /* all_reduce: every rank adds every chunk, and no rank sends results */
    int n_chunks; /* all_reduce of two hops, broadcast: length of `of`; else 0, as blocks have their owners */
    uint8_t of[SP_PLAN_CHUNKS_MAX]; /* owner of each chunk */
} sp_owners;

/* plans [head->n_ranks]: read and checked. hosts NULL: one host. */
void sp_plan_find_owners(const sp_plan_head *head, sp_plan *const *plans, const sp_hosts *hosts,
                         sp_owners *out);
/* The most chunks that one rank owns; at least 1. */
int sp_owners_most(const sp_owners *o);

#endif
