/* exec.h - runs plans: a queue of collectives, each a state machine over its steps and slices. Never blocks.
 * Place in the map: running; between sched (what), codec (bytes) and boot's links (how). One thread at a
 * time. */
#ifndef SP_EXEC_H
#define SP_EXEC_H

#include "core/base/trace.h"
#include "core/format/codec.h"
#include "core/plan/sched.h"
#include "core/run/boot.h"

#include <stdatomic.h>

/* Collectives worked on at a time; later ones wait in the communicator's queue. More than one, so that
 * a collective that waits for a slow peer does not hold up the sends of the next. */
#define SP_EXEC_WINDOW 8

/* Calls that are remembered after they ended, so that a message that comes too late, of a peer that called
 * something else, is told from this rank's call of the same number and not from its latest. */
#define SP_EXEC_PAST 16

/* One collective, as the caller issued it. */
typedef struct sp_coll_args {
    sp_coll coll;
    const void *in;
    void *out;
    size_t n_elems;
    spccl_dtype dtype;
    spccl_redop redop;
    int root;
    sp_schedule schedule;
    size_t slice_elems;
    spccl_format format; /* AUTO or forced */
    int64_t timeout_ms;
} sp_coll_args;

/* What all ranks must agree on, of one collective: what an envelope says and error texts name. */
typedef struct sp_call {
    uint32_t seq;
    sp_coll coll;
    spccl_dtype dtype;
    spccl_redop redop;
    int root;
    uint64_t n_elems;
} sp_call;

typedef struct sp_op sp_op;
struct sp_op {
    sp_op *next; /* the owner's queue */
    void *owner; /* the request */
    sp_coll_args a;
    uint32_t seq;
    int64_t deadline_ns;
    size_t elem_bytes;
    bool non_temporal; /* output larger than the caches: bypass them */
    bool is_started;
    sp_plan *plan;
    uint32_t *next_slice; /* [n_steps] */
    uint32_t *dense_run;  /* [n_steps] slices in a row that went out dense */
    uint32_t *left[2];    /* [SP_N_QUEUES * world_size] messages still to send (0) and to receive (1) */
    uint64_t *
        sent_end; /* [SP_N_QUEUES * world_size] messages on each queue up to this op's last; 0: it sends none */
    int n_steps_left;
};

typedef struct sp_exec_stats {
    _Atomic uint64_t n_collectives, dense_bytes_sent, wire_bytes_sent, wire_bytes_received;
    _Atomic uint64_t n_frames_sent[SPCCL_N_FORMATS];
} sp_exec_stats;

typedef struct sp_exec {
    sp_links *links; /* borrowed */
    sp_codec *codec; /* owned; made for slice_elems_max elements */
    const sp_kernels *kernels;
    sp_trace *trace; /* borrowed */
    size_t slice_elems_max, slice_bytes_max;
    uint8_t *acc, *result; /* scratch of one slice: accumulator, and values of the dtype */
    sp_frame *frames;      /* [world_size] contributions to the slice at hand, by rank */
    uint64_t *n_sent;      /* [SP_N_QUEUES * world_size] messages committed on each queue, ever */
    sp_op *window[SP_EXEC_WINDOW];
    int n_ops;
    sp_call past[SP_EXEC_PAST]; /* a ring of ended calls; n_past were put in */
    uint32_t n_past;
    sp_exec_stats stats;
} sp_exec;

/* Scratch for slices of up to slice_bytes dense bytes. */
spccl_status sp_exec_init(sp_exec *x, sp_links *links, const sp_kernels *kernels, sp_trace *trace,
                          size_t slice_bytes);
void sp_exec_fini(sp_exec *x);
size_t sp_exec_memory_bytes(const sp_exec *x);

/* Plan one collective. The op borrows the buffers; freed with sp_op_destroy. */
spccl_status sp_op_create(const sp_coll_args *args, int rank, int world_size, sp_op **out);
void sp_op_destroy(sp_op *op);
/* One line: "all_reduce #12 (1048576 float32, sum)". */
void sp_op_describe(const sp_op *op, char *text, size_t cap);

/* Take an op into the window (there must be room: n_ops < SP_EXEC_WINDOW). Its deadline starts now if it has
 * none. */
void sp_exec_add(sp_exec *x, sp_op *op);
/* Do what can be done without waiting: at most one slice of each step of each op. *progressed tells whether
 * anything was. On failure the whole communicator is broken: PEER, FORMAT, FRAME, MISMATCH; the text names
 * op, peer, part and slice. */
spccl_status sp_exec_pass(sp_exec *x, bool *progressed);
/* Before sleeping: MISMATCH if a peer sent a message of a collective that this rank called otherwise. */
spccl_status sp_exec_check_heads(sp_exec *x);
/* *out = the oldest op if it is finished (removed from the window), else NULL. Ops finish in the order of
 * issue. MISMATCH if a peer sent more for it, or for an older one, than this rank's call takes. */
spccl_status sp_exec_retire(sp_exec *x, sp_op **out);
/* TIMEOUT, with what the oldest overdue op waits for, if a deadline has passed. */
spccl_status sp_exec_check_deadlines(sp_exec *x);
/* The nearest deadline of the window. */
int64_t sp_exec_deadline(const sp_exec *x);

#endif
