/* sched.h - a schedule is data: sp_plan, the steps one rank runs for one collective.
 * Planning part of the map: pure functions, no I/O, no clock. A schedule knows ranks, parts and element
 * counts; it knows no bytes, no formats and no transports.
 *
 * A step works on one part (a range of elements) slice by slice, in order. Slice k of a step is ready when
 * a message is there from every rank in `from`, there is room towards every rank in `to`, and the step
 * `after` (if any) has done slice k. Real sizes travel in the messages. */
#ifndef SP_SCHED_H
#define SP_SCHED_H

#include "core/base/status.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum sp_step_kind {
    SP_STEP_SEND,   /* in[src_off ..] -> every rank in `to` */
    SP_STEP_RECV,   /* one rank in `from` -> out[dst_off ..]; relayed unchanged to every rank in `to` */
    SP_STEP_REDUCE, /* all of `from` and in[src_off ..], in rank order -> out[dst_off ..] and every rank in
                       `to` */
    SP_STEP_COPY    /* in[src_off ..] -> out[dst_off ..] on this rank */
} sp_step_kind;

typedef struct sp_step {
    sp_step_kind kind;
    int part;      /* name of the part in envelopes and texts; unique per (queue, pair of ranks) */
    int queue_in;  /* of `from` */
    int queue_out; /* of `to` */
    int after;     /* index of the step that must have done slice k before; -1 = none */
    size_t src_off, dst_off, n_elems; /* in elements */
    int from, n_from;                 /* plan->ranks[from .. from+n_from), rising */
    int to, n_to;                     /* plan->ranks[to .. to+n_to) */
} sp_step;

typedef struct sp_plan {
    const char *name; /* "direct" */
    int rank, world_size;
    int n_steps;
    sp_step *steps;
    int *ranks; /* shared by the steps */
} sp_plan;

/* The envelope in front of every frame on the wire says which message this is. 32 bytes, little-endian
 * (docs/ALGORITHMS.md):
 *  0 u32 seq   4 u8 coll  5 u8 dtype  6 u8 redop  7 u8 queue   8 u64 n_elems  16 u32 slice  20 u32
 * slice_elems 24 u16 part  26 u16 root  28 u32 magic "SPEV" */
#define SP_ENVELOPE_BYTES 32u

/* Queues: a message on queue 1 can always be consumed at once; one on queue 0 may wait for others. Keeping
 * them apart is what makes the schedules free of deadlock with bounded queues. */
#define SP_QUEUE_INPUT 0  /* contributions */
#define SP_QUEUE_RESULT 1 /* results: consumed unconditionally */
#define SP_N_QUEUES 2

typedef enum sp_coll { SP_ALL_GATHER, SP_REDUCE_SCATTER, SP_ALL_REDUCE, SP_BROADCAST, SP_N_COLLS } sp_coll;
const char *sp_coll_name(sp_coll coll);

typedef enum sp_schedule { SP_SCHED_DIRECT, SP_SCHED_ONESHOT, SP_N_SCHEDULES } sp_schedule;
const char *sp_schedule_name(sp_schedule schedule);

typedef struct sp_plan_args {
    sp_coll coll;
    int rank, world_size, root;
    size_t n_elems; /* as in spccl.h: all-gather per rank, reduce-scatter of the output, else the whole */
} sp_plan_args;

/* The plan of one rank; caller frees with sp_plan_destroy.  Errors: NOMEM, UNSUPPORTED (no such schedule for
 * this collective). A plan of zero elements has no steps. */
spccl_status sp_plan_create(sp_schedule schedule, const sp_plan_args *args, sp_plan **out);
void sp_plan_destroy(sp_plan *plan);

/* Range of part `part` when n_elems are cut into n_parts: whole multiples of 64 elements but for the last. */
void sp_part_range(size_t n_elems, int n_parts, int part, size_t *off, size_t *len);

/* Run the plans of all ranks on paper, with `n_slices` per non-empty step and room for `queue_cap` messages
 * per queue: does every message meet the step that wants it, in order, does no step wait for ever, is every
 * output part written once and built from every input that it needs?  plans [world_size], all made for
 * n_elems and root.  Errors: BUG with the rank and step. For tests and for new schedules. */
spccl_status sp_plan_check(sp_plan *const *plans, int world_size, sp_coll coll, size_t n_elems, int root,
                           int n_slices, int queue_cap);

#endif
