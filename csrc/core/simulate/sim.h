/* sim.h - the state of a simulation (docs/SIMULATE.md): ranks that run the steps of their plans, the queues between them,
 * links, and events in the order of time. simulate.c makes it, sim_rank.c runs steps, sim_cost.c says how long they take,
 * sim_net.c moves messages, sim_event.c keeps the events. Nothing else of the library uses this folder.
 *
 * Ranks that are equal are simulated once. If all hosts have equally many ranks, then the plans are the same on every
 * host but for the numbers of ranks: turn all numbers by one host, and the plans are those of the next host. So the ranks
 * of host 0 are enough (n_reps), or rank 0 if there is one host. A message from rank a of host 0 to rank b on host h is
 * then also the one that rank b - h hosts gets from rank a - h hosts. Without merging, n_reps is the number of ranks, and
 * nothing is turned. */
#ifndef SP_SIM_H
#define SP_SIM_H

#include "core/plan/plan_bytes.h"
#include "core/plan/sched.h"
#include "spccl_experimental.h"

#define SIM_NONE (-1)

typedef struct sim_message {
    struct sim_message *next;
    sp_slice_bytes frame;
    double to_send, to_arrive; /* bytes that have not left the sender's host, and that have not arrived */
    int part;                  /* as the receiver calls it */
    uint32_t slice;
    int n_added; /* contributions in it */
} sim_message;

/* One direction of a queue between two ranks. */
typedef struct sim_flow {
    int from, to;          /* simulated ranks */
    int seen_from, turned; /* the sender's number as the receiver has it; ranks by which numbers are turned */
    int queue;
    bool remote, active;      /* active: in its host's list of flows that may send */
    double out_used;          /* bytes in the sender's queue; inside a host, in the only one */
    double in_used;           /* remote: bytes of the receiver's queue that are taken, or will be */
    double in_flight;         /* sent and not acknowledged */
    double wait_bytes;        /* the smallest message that a step in `waiters` wants to send */
    sim_message *out, *last;  /* messages that have not arrived completely, oldest first */
    sim_message *sending;     /* of these, the first that has not left completely */
    sim_message *in, *newest; /* messages that have arrived, oldest first */
    int waiters;              /* first step that waits for space (sim_step.next_waiter) */
    int next_active;
} sim_flow;

typedef struct sim_step {
    uint32_t next_slice;
    int n_ok;        /* senders from the first on whose message for this slice is known to be there */
    int next_waiter; /* in a list of waiting steps */
    int first_dependent, next_dependent; /* steps that come `after` this one; the next of such a list */
    bool listed, waits;
} sim_step;

typedef struct sim_kept {
    int n_readers, n_added;
    sp_slice_bytes frame; /* of a message */
    int waiters;
} sim_kept;

typedef enum sim_state { SIM_IDLE, SIM_WAKING, SIM_READY, SIM_RUNNING } sim_state;

typedef struct sim_rank {
    int number; /* of the group */
    int host;   /* of the simulation */
    sp_plan *plan;
    sim_step *steps;
    int *todo; /* ring of n_steps: steps that may be ready */
    int n_todo, todo_at;
    sp_turn *turns;
    sim_kept *kept;
    sp_densities *densities;
    uint64_t *keys; /* table of the steps that receive: queue, sender, part; key + 1, 0 is free */
    int *takers;
    size_t table_mask;
    int n_unfinished; /* steps */
    sim_state state;
    int running;       /* step */
    int next_in_queue; /* ranks that wait for a core */
    double idle_since;
    double busy_ns;
    double sent_bytes;
} sim_rank;

typedef struct sim_cores {
    int n_free, first, last; /* ranks that wait */
} sim_cores;

/* The link of a host, each way. */
typedef struct sim_link {
    double out_ns, in_ns; /* when the bytes so far have passed, at the link's rate */
    double out_bytes, in_bytes;
    int first, last; /* flows that may send */
    bool busy;
} sim_link;

typedef enum sim_event_kind {
    SIM_WAKE,
    SIM_DONE,
    SIM_COMMIT,
    SIM_LEFT,
    SIM_ARRIVED,
    SIM_ACKED
} sim_event_kind;

typedef struct sim_event {
    double ns;
    uint64_t tie,
        number; /* order of events of one time: by what the ranks of each host have in common, see sim_event.c */
    sim_event_kind kind;
    int who;      /* rank, or flow */
    double bytes; /* of LEFT, ARRIVED and ACKED */
    sim_message *message;
} sim_event;

typedef struct sim {
    const spccl_simulate_options *o;
    sp_coll coll;
    spccl_format format;
    size_t elem_bytes, acc_bytes, slice_elems;
    int n_ranks, n_reps, per_host, n_hosts; /* n_hosts: of the simulation */
    bool turns_parts; /* where ranks are merged: the number of a part is that of its owner */
    size_t n_elems;
    double queue_bytes, window_bytes, quantum_bytes, burst_ns;
    double remote_ns;               /* time per byte that a rank sees to other hosts */
    double sum_density, *densities; /* [n_ranks + 1] of a sum of so many; < 0: not known yet */
    sim_rank *ranks;
    sim_flow *flows; /* [n_reps][n_ranks][SP_N_QUEUES] */
    sim_cores *cores;
    int n_core_groups;
    sim_link *links; /* [n_hosts] */
    sim_event *events;
    size_t n_events, events_cap;
    uint64_t n_posted;
    sim_message *free_messages, **chunks;
    size_t n_chunks, chunks_cap;
    double now;
    bool failed; /* NOMEM */
    spccl_simulated out;
} sim;

/* ---- sim_event.c ---- */
void sim_post(sim *x, sim_event e);
bool sim_next(sim *x, sim_event *out);
sim_message *sim_message_new(sim *x); /* NULL: no memory; x->failed is set */
void sim_message_free(sim *x, sim_message *m);
void sim_event_fini(sim *x);

/* ---- sim_net.c ---- */
sim_flow *sim_flow_to(sim *x, int rep, int to, int queue);
/* The flow on which simulated rank `rep` receives from rank number `from`. */
sim_flow *sim_flow_from(sim *x, int rep, int from, int queue);
bool sim_flow_has_space(const sim *x, const sim_flow *f, double bytes);
/* A message is complete in the sender's queue. Its space was taken before. */
void sim_flow_commit(sim *x, sim_flow *f, sim_message *m);
void sim_flow_release(sim *x, sim_flow *f); /* of the oldest message that has arrived */
void sim_flow_event(sim *x, const sim_event *e);

/* ---- sim_rank.c ---- */
spccl_status sim_rank_init(sim *x, sim_rank *r);
void sim_rank_fini(sim_rank *r);
void sim_rank_start(sim *x, sim_rank *r);
void sim_rank_event(sim *x, const sim_event *e);
/* The oldest message of a flow has changed. */
void sim_rank_message(sim *x, sim_flow *f);
/* Steps that waited for space, or for a kept buffer, may be ready. *first becomes SIM_NONE. */
void sim_rank_wake_waiters(sim *x, sim_rank *r, int *first);

/* ---- sim_cost.c ---- */
uint32_t sim_slices(const sim *x, const sp_step *s);
/* The kept buffer of slice k in a slot. */
sim_kept *sim_kept_of(const sim_rank *r, int slot, uint32_t k);
/* One slice of a step. */
typedef struct sim_slice {
    const sp_step *step;
    uint32_t k;
    size_t n;             /* elements */
    size_t elem_bytes;    /* of what is sent */
    int n_added;          /* contributions in what the step makes */
    sp_slice_bytes frame; /* what is sent */
    double work_ns;       /* before the first message leaves */
} sim_slice;
void sim_slice_cost(sim *x, sim_rank *r, const sp_step *s, uint32_t k, sim_slice *out);
/* Work for one message to a receiver. */
double sim_send_ns(const sim *x, const sim_flow *f, const sim_slice *s);

#endif
