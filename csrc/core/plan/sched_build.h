/* sched_build.h - functions with which a schedule file (sched_<name>.c) writes the steps of a plan. */
#ifndef SP_SCHED_BUILD_H
#define SP_SCHED_BUILD_H

#include "core/plan/sched.h"

/* A plan under construction. sp_plan_create allocates it for steps_cap steps and ranks_cap ranks. */
typedef struct sp_plan_builder {
    sp_plan *plan;
    int steps_cap, ranks_cap, n_ranks;
} sp_plan_builder;

/* Append a step without ranks, `after` and turn; both queues are SP_QUEUE_INPUT. A REDUCE then adds in rank
 * order, if its senders are all peers. NULL if n_elems is 0. */
sp_step *sp_plan_add(sp_plan_builder *b, sp_step_kind kind, int part, size_t src_off, size_t dst_off,
                     size_t n_elems);
/* Add a sender (from) or a receiver (to) to a step, or all peers; `except` is a peer to leave out, -1 = none. All of one
 * kind of a step are added before any other rank, and have one queue. Senders are in rank order. sp_step_to_all starts
 * with the rank after this one, so that the ranks do not all send to the same peer first. */
void sp_step_from(sp_plan_builder *b, sp_step *step, int queue, int rank);
void sp_step_to(sp_plan_builder *b, sp_step *step, int queue, int rank);
void sp_step_from_all(sp_plan_builder *b, sp_step *step, int queue);
void sp_step_to_all(sp_plan_builder *b, sp_step *step, int queue, int except);

/* The steps of the direct schedule in which contributions go straight to their owners, who reduce. Returns the
 * reduction of this rank's own part, without receivers; NULL if that part is empty. */
sp_step *sp_direct_contributions(sp_plan_builder *b, const sp_plan_args *a, bool is_all_reduce);

/* The rank that relays the results of `owner` on `host`, which is not the owner's: the one with the owner's place
 * among the ranks of its host. `except`: a rank that needs no results; -1 = none. Returns -1 if `except` is the only
 * rank of that host. */
int sp_relay_of(const sp_hosts *h, int owner, int host, int except);
/* The steps of an all-reduce in which this rank receives the results of others, and relays some. */
void sp_relayed_results(sp_plan_builder *b, const sp_plan_args *a);
/* Send the shard that this rank owns: to one rank of each other host, then to its own host. */
void sp_relayed_to_everyone(sp_plan_builder *b, const sp_plan_args *a, sp_step *s, int except);

/* One function per schedule file. Returns false if the schedule does not have that collective. */
bool sp_sched_direct(sp_plan_builder *b, const sp_plan_args *args);
bool sp_sched_oneshot(sp_plan_builder *b, const sp_plan_args *args);
bool sp_sched_relayed(sp_plan_builder *b, const sp_plan_args *args);
bool sp_sched_ring(sp_plan_builder *b, const sp_plan_args *args);
bool sp_sched_hier(sp_plan_builder *b, const sp_plan_args *args);

#endif
