/* plan_cost.h - what a collective costs in each schedule: bytes, messages, time.
 * The functions depend on their arguments alone. Ranks that give the same arguments get the same bits, on any
 * CPU: the arithmetic is +, -, * and / of doubles, which IEEE 754 fixes, and no function of libm. */
#ifndef SP_PLAN_COST_H
#define SP_PLAN_COST_H

#include "core/plan/plan_bytes.h"
#include "core/plan/sched.h"

#define SP_COST_LOCAL_NS                                                                                     \
    0.1 /* time per byte inside a host until it is known: a ring of shared memory (transports.h) */

/* The hosts of a group and the rates of its links: the same on all its ranks. */
typedef struct sp_cost_group {
    const sp_hosts *hosts; /* borrowed; NULL: one host */
    int world_size, n_hosts;
    int host_ranks_min, host_ranks_max;
    double remote_share; /* of all ordered pairs of two ranks: those on different hosts */
    /* Time that a rank needs for one byte to ranks of its host, and to all other hosts together. Ranks of one
     * host share its link: with 8 of them each has an eighth of its rate. */
    double local_ns, remote_ns;
} sp_cost_group;

/* Fill in the hosts, and the rates that count until others are known. hosts NULL: one host. */
void sp_cost_group_init(sp_cost_group *g, int world_size, const sp_hosts *hosts);

typedef struct sp_cost_call {
    sp_coll coll;
    size_t n_elems; /* as in sp_plan_args */
    size_t elem_bytes, slice_elems;
    size_t sum_bytes;    /* of an element of a sum that is not finished; 0: elem_bytes */
    spccl_format format; /* AUTO or forced */
    double density;      /* of the contributions; of the data in an all-gather or broadcast */
    double sum_density;  /* of the results of a reduction */
} sp_cost_call;

/* Sums over all ranks, unless a comment says otherwise. Bytes are those of messages: envelope and frame. */
typedef struct sp_plan_cost {
    double local_bytes, remote_bytes;       /* inside hosts, and from one host to another */
    double local_messages, remote_messages; /* a message to k ranks counts k times */
    double host_bytes;                      /* out of the host that sends the most to other hosts */
    double ns;                              /* time until all ranks have the result */
} sp_plan_cost;

/* What a schedule sends at one stage. `n_parts` parts of n_elems elements in all, cut as sp_part_range does, go
 * to `local` ranks of the sender's host and to `remote` ranks of other hosts: means over the parts. */
typedef struct sp_cost_stage {
    size_t n_elems;
    int n_parts;
    double density;
    double local, remote;
    /* How often each part is encoded, if one message goes to several receivers: it has the format for the slowest
     * of their links. 0: once for each receiver. */
    double messages;
    double busiest; /* bytes to other hosts: those of the rank that sends the most, over the mean */
} sp_cost_stage;

/* Add a stage's bytes, messages and time on the links. */
void sp_cost_add(const sp_cost_group *g, const sp_cost_call *c, const sp_cost_stage *stage,
                 sp_plan_cost *out);

/* Add the results of an all-reduce: to all ranks, or, relayed, to one rank of each other host and from there on. */
void sp_cost_add_results(const sp_cost_group *g, const sp_cost_call *c, bool relayed, sp_plan_cost *out);
/* Add the time that does not depend on what is sent: hops, and dense bytes that a rank passes over. */
void sp_cost_add_fixed(const sp_cost_group *g, int n_hops, bool relayed, double pass_bytes,
                       sp_plan_cost *out);

/* The cost of a call. False if the schedule does not have this collective, or is never chosen: of those, the simulator
 * (core/simulate) has bytes and times. */
bool sp_plan_cost_of(sp_schedule schedule, const sp_cost_group *g, const sp_cost_call *c, sp_plan_cost *out);

#endif
