/* sched.h - plans: the steps that one rank runs for one collective, as data.
 * A plan has ranks, parts and numbers of elements. It has no bytes, formats or transports. A step says which kind
 * of hop it is (density_rule.h); what that means for its format is decided when it runs. The functions depend on
 * their arguments alone.
 *
 * A step works on one part, which is a range of elements, slice by slice, in order. Slice k of a step is
 * ready when
 *   - a message from every rank in `from` is there
 *   - every queue to a rank in `to` has space
 *   - the step `after`, if there is one, has done slice k
 *   - it is the step's turn, if it takes turns with other steps
 *   - a step that keeps its slice has a free buffer
 *
 * Steps with the same number `turn` take turns: block_slices slices of the first such step, then of the next one,
 * and after the last one the next block_slices of the first. A rank keeps at most block_slices slices in each of its
 * slots; slice k lies in kept buffer k % block_slices of a slot from the step that keeps it until its last reader. */
#ifndef SP_SCHED_H
#define SP_SCHED_H

#include "core/base/status.h"
#include "core/format/density_rule.h"
#include "core/plan/hosts.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum sp_step_kind {
    SP_STEP_SEND,   /* `source` -> every rank in `to` */
    SP_STEP_RECV,   /* one rank in `from` -> out[dst_off ..]; relayed unchanged to every rank in `to` */
    SP_STEP_REDUCE, /* all of `from` and `source`, in order -> out[dst_off ..] and every rank in `to` */
    SP_STEP_COPY    /* in[src_off ..] -> out[dst_off ..] on this rank */
} sp_step_kind;

/* What a SEND sends. What a REDUCE adds of this rank: SP_SOURCE_IN, or SP_SOURCE_KEPT_SUM. */
typedef enum sp_source {
    SP_SOURCE_IN,          /* in[src_off ..] */
    SP_SOURCE_OUT,         /* out[dst_off ..] */
    SP_SOURCE_KEPT_SUM,    /* the sum that an earlier step keeps */
    SP_SOURCE_KEPT_MESSAGE /* the message that an earlier step keeps, unchanged */
} sp_source;

#define SP_NO_TURN (-1)

typedef struct sp_step {
    sp_step_kind kind;
    int part;      /* number of the part in envelopes and texts; unique per queue and pair of ranks */
    int chunk;     /* which elements of the array; without a plan from a file: `part` */
    int queue_in;  /* queue of the messages from `from` */
    int queue_out; /* queue of the messages to `to` */
    int after;     /* index of the step that must do slice k first; -1 = none */
    size_t src_off, dst_off, n_elems; /* in elements */
    int from, n_from;                 /* senders: plan->ranks[from .. from+n_from) */
    int to, n_to;                     /* receivers: plan->ranks[to .. to+n_to) */
    int turn;                         /* SP_NO_TURN, or the number that the steps which take turns share */
    int own_before; /* REDUCE: index in `from` before which `source` is added; -1: nothing of this rank is added */
    bool adds_sums;   /* REDUCE: messages may hold sums of several ranks, in the dtype of the accumulator */
    bool gives_sum;   /* REDUCE: the sum is not divided, rounded or written: it goes to `to`, or is kept */
    bool keeps;       /* REDUCE, RECV: keep the sum, or the message, for later steps */
    sp_source source; /* SEND, REDUCE */
    int source_slot;  /* of SP_SOURCE_KEPT_SUM and SP_SOURCE_KEPT_MESSAGE */
    int keep_slot;
    int n_readers; /* steps that read what this step keeps */
    sp_hop hop;    /* SEND */
} sp_step;

typedef struct sp_plan {
    const char *name; /* "direct" */
    int rank, world_size;
    int n_steps;
    int n_turns;      /* numbers of turns are 0 .. n_turns - 1 */
    int block_slices; /* see above */
    int n_slots;
    sp_step *steps;
    int *ranks; /* the ranks of all steps */
} sp_plan;

/* Whose turn it is among the steps that share a number. */
typedef struct sp_turn {
    int step; /* index in the plan; -1: before the first sp_turn_pass, and when all are done */
    uint32_t block;
} sp_turn;

/* The envelope before every frame says which message this is (docs/ALGORITHMS.md). Little-endian:
 *  0  u32  seq
 *  4  u8   coll
 *  5  u8   dtype
 *  6  u8   redop
 *  7  u8   queue, and 16 times the schedule
 *  8  u64  n_elems
 * 16  u32  slice
 * 20  u32  slice_elems
 * 24  u16  part
 * 26  u16  root
 * 28  u32  magic "SPEV"
 * 32  u40  result of an all-reduce: listed elements of the contributions that were sent for it; else 0
 * 37  u24  code of the sender's time of an earlier call (tuner.h); 0: none
 * 40  u32  largest time per byte of the sender's links inside its host, in 2^-16 ns
 * 44  u32  time per byte of its links to other hosts, in 2^-16 ns; 0: it has none
 * The last four are for the choice of the schedule (choose.h). */
#define SP_ENVELOPE_BYTES 48u

/* A receiver can take a message from the result queue at once. A message in the input queue may have to wait
 * for messages of other ranks. With two queues a result never waits behind a contribution, so the schedules
 * are free of deadlock although queues have a fixed capacity. */
#define SP_QUEUE_INPUT 0
#define SP_QUEUE_RESULT 1
#define SP_N_QUEUES 2

typedef enum sp_coll { SP_ALL_GATHER, SP_REDUCE_SCATTER, SP_ALL_REDUCE, SP_BROADCAST, SP_N_COLLS } sp_coll;
const char *sp_coll_name(sp_coll coll);

typedef enum sp_schedule {
    SP_SCHED_DIRECT,
    SP_SCHED_ONESHOT,
    SP_SCHED_RELAYED,
    SP_SCHED_RING,
    SP_SCHED_HIERARCHICAL,
    SP_N_SCHEDULES,
    SP_SCHED_FILE = SP_N_SCHEDULES /* a plan from a file (plan_file.h) */
} sp_schedule;
const char *sp_schedule_name(sp_schedule schedule);
/* True if the schedule has this collective. */
bool sp_schedule_has(sp_schedule schedule, sp_coll coll);
/* True if the schedule adds in rank order. Only such schedules are chosen unless another one is asked for. */
bool sp_schedule_adds_in_rank_order(sp_schedule schedule);
/* True if every rank learns the same densities from the messages of this collective: each goes to all ranks, or is a
 * contribution, whose number of listed elements is in the envelope of the result. */
bool sp_schedule_shows_density(sp_schedule schedule, sp_coll coll);
/* True if those messages carry a rank's input. Else they carry results. */
bool sp_schedule_sends_input_to_all(sp_schedule schedule, sp_coll coll);

typedef struct sp_plan_args {
    sp_coll coll;
    int rank, world_size, root;
    size_t n_elems; /* as in spccl.h: of one rank's block for all-gather and reduce-scatter, else in all */
    const sp_hosts *hosts; /* NULL: all ranks are on one host */
} sp_plan_args;

/* Make the plan of one rank; the caller frees it with sp_plan_destroy. A plan of 0 elements has no steps.
 * Errors: NOMEM, UNSUPPORTED (the schedule does not have this collective). */
spccl_status sp_plan_create(sp_schedule schedule, const sp_plan_args *args, sp_plan **out);
void sp_plan_destroy(sp_plan *plan);
/* Pass a turn on to the next step that has slices in the block; after the last step, the next block begins. */
void sp_turn_pass(const sp_plan *plan, size_t slice_elems, int number, sp_turn *t);
/* Is it the turn of slice k of a step? turns: [n_turns] of the plan. */
static inline bool sp_turn_is(const sp_plan *plan, const sp_turn *turns, int step, uint32_t k)
{
    int number = plan->steps[step].turn;
    return number == SP_NO_TURN ||
           (turns[number].step == step && turns[number].block == k / (uint32_t)plan->block_slices);
}

/* True if a step of this plan receives the part from that rank on that queue. If the oldest message of a queue
 * holds another part than a step wants, and another step takes it, then the first step has to wait. */
bool sp_plan_takes(const sp_plan *plan, int queue, int from, int part);

/* Range of part `part` when n_elems are cut into n_parts. Each part is a multiple of 64 elements, except the
 * last that is not empty. */
void sp_part_range(size_t n_elems, int n_parts, int part, size_t *off, size_t *len);

/* What sp_plan_check is told. */
typedef struct sp_check_args {
    sp_plan *const *plans; /* [world_size] made for n_elems and root */
    int world_size, root;
    sp_coll coll;
    size_t n_elems;
    int n_chunks;       /* all_gather, reduce_scatter: chunks of one block; sp_step.chunk counts them */
    int n_slices;       /* of the longest step; shorter ones have fewer */
    int queue_cap;      /* messages */
    bool fixed_order;   /* also check what only plans from files must keep (sched_order.c) */
    spccl_status fault; /* status of what is found */
} sp_check_args;

/* What the check learned. */
typedef struct sp_proof {
    bool rank_order;     /* every sum is 0 + rank 0 + rank 1 + ... */
    bool sends_sums;     /* some message, or kept slice, has the accumulator's dtype */
    int n_hops;          /* messages, one after the other, on the longest way */
    uint64_t n_messages; /* for each slice */
    int chunks_sent_max; /* of the rank that sends most */
} sp_proof;

/* Simulate the plans of all ranks, with queues of queue_cap messages. Checks that
 *   - each message arrives at the step that expects it, in order
 *   - no step waits for ever
 *   - no kept slice is overwritten before it is read, and each is read as often as its writer says
 *   - each output element is written once, from the data of every rank that it needs
 *   - the ranks of an all-reduce add in one order
 * out may be NULL. Errors: args.fault (the text names plan, rank and step), NOMEM, ARG. */
spccl_status sp_plan_check(const sp_check_args *args, sp_proof *out);

/* The part of the check that holds for plans from files (sched_order.c). First, without which the simulation could take
 * hours: steps that share a queue or a slot take turns, so one simulation stands for all runs. Errors: args.fault, NOMEM. */
spccl_status sp_plan_check_turns(const sp_check_args *args);
/* Then: a call may be in place. done [world_size][steps_cap]: a number for each step that rises along all waits. Errors:
 * args.fault, NOMEM. */
spccl_status sp_plan_check_in_place(const sp_check_args *args, const uint32_t *done, int steps_cap);

#endif
