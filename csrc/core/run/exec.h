/* exec.h - the executor. It runs the plans of up to eight collectives in turn. Each collective is a state
 * machine over its steps and slices. No function blocks, and only one thread at a time may call them.
 * The plan (sched.h) says what to do, the codec makes and reads frames, sp_links (boot.h) moves messages. */
#ifndef SP_EXEC_H
#define SP_EXEC_H

#include "core/base/clock.h"
#include "core/base/dtype.h"
#include "core/base/mem.h"
#include "core/format/codec.h"
#include "core/format/density_rule.h"
#include "core/plan/choose.h"
#include "core/plan/plan_file.h"
#include "core/run/boot.h"

#include <pthread.h>
#include <stdatomic.h>

/* Collectives that the executor works on. Later ones wait in the communicator. With more than one, a
 * collective that waits for a slow peer does not delay the sends of the next. */
#define SP_EXEC_ACTIVE_MAX 8

/* The executor remembers this many calls after they ended. If a message arrives late from a peer that called
 * something else, the error text then names this rank's call of the same number. */
#define SP_EXEC_PAST 16

/* One collective, as the caller issued it. */
typedef struct sp_coll_args {
    sp_coll coll;
    const void *in;
    void *out;
    size_t n_elems;
    spccl_dtype dtype;
    spccl_redop redop;
    bool wide; /* of a reduce-scatter: `out` has the accumulator's dtype */
    int root;
    bool is_forced; /* the schedule: else the executor chooses it */
    sp_schedule schedule;
    const sp_written_plan *written;      /* borrowed; of SP_SCHED_FILE, else NULL */
    const char *plans;                   /* borrowed; name of the plan file; NULL: none */
    const sp_hosts *hosts;               /* borrowed; NULL: one host */
    size_t slice_elems, slice_elems_max; /* the largest that the tuner may try; 0: no other */
    spccl_format format;                 /* AUTO or forced */
    int64_t timeout_ms;                  /* 0: the communicator's */
    int64_t deadline_ns;                 /* 0: timeout_ms after the call */
} sp_coll_args;

/* Of a reduce-scatter or an all-reduce. */
static inline sp_coll_args sp_coll_sum(sp_coll coll, const void *in, void *out, size_t n_elems,
                                       spccl_dtype dtype, spccl_redop op)
{
    return (sp_coll_args){
        .coll = coll, .in = in, .out = out, .n_elems = n_elems, .dtype = dtype, .redop = op};
}

/* The dtype of `out`. */
static inline spccl_dtype sp_coll_out_dtype(const sp_coll_args *a)
{
    return a->wide ? sp_acc_dtype(a->dtype) : a->dtype;
}

/* What all ranks must give alike for one collective. Envelopes carry it, and error texts name it. */
typedef struct sp_call {
    uint32_t seq;
    sp_coll coll;
    spccl_dtype dtype;
    spccl_redop redop;
    int root;
    sp_schedule schedule;
    uint64_t n_elems;
} sp_call;

/* A kept buffer: it holds a slice that one step keeps and later ones send or add. */
typedef struct sp_kept {
    uint8_t *data; /* a sum in the accumulator's dtype, or a message */
    int n_readers; /* steps that have not read it yet; 0: the buffer is free */
    size_t bytes;  /* of the message */
    spccl_format format;
} sp_kept;

typedef struct sp_op sp_op;
struct sp_op {
    sp_op *next; /* in the communicator's queue */
    void *owner; /* spccl_request of the call */
    sp_coll_args a;
    uint32_t seq;
    int64_t submitted_ns, deadline_ns;
    size_t elem_bytes;
    bool non_temporal; /* the output is larger than the caches: use non-temporal stores */
    bool is_started;
    sp_plan *plan;        /* NULL until the op is active: the schedule depends on earlier calls */
    uint32_t *next_slice; /* [n_steps] */
    uint32_t *n_dense;    /* [n_steps] how many slices in a row were sent dense */
    uint32_t *left[2];    /* [SP_N_QUEUES * world_size] messages still to send (0) and to receive (1) */
    /* [SP_N_QUEUES * world_size] sp_exec.n_sent after this op's last message; 0: this op sent none */
    uint64_t *sent_end;
    int n_steps_left;
    sp_turn *turns;          /* [n_turns] */
    sp_densities *densities; /* [slices of the longest step]; NULL: no hop has a threshold */
    sp_kept *kept;           /* [n_slots][block_slices]; NULL: no step keeps a slice */
    size_t kept_bytes;       /* capacity of the buffer of each */
    void *order_memory;      /* the three above */
    sp_measured measured;
    uint32_t time_code; /* in its envelopes (tuner.h) */
};

/* The last choice for one kind of call, for texts. */
#define SP_EXEC_CHOICES 64
typedef struct sp_chosen {
    sp_coll coll;
    spccl_dtype dtype;
    uint64_t n_elems;
    bool is_forced;
    sp_schedule schedule; /* that was taken: the chosen or the forced one */
    const char *plans;    /* as in sp_coll_args */
    const sp_written_plan *written;
    sp_choice choice;
} sp_chosen;

/* What happened to a call. The last ones are logged when the communicator breaks. */
#define SP_EXEC_EVENTS 64
typedef struct sp_event {
    int64_t time_ns;
    const char *what; /* static text: "first slice", "done" */
    uint32_t seq;
    sp_coll coll;
    uint64_t n_elems;
    bool has_choice;
    sp_choice choice; /* of the schedule */
} sp_event;

typedef struct sp_exec_stats {
    _Atomic uint64_t n_collectives, dense_bytes_sent, wire_bytes_sent, wire_bytes_received;
    _Atomic uint64_t n_frames_sent[SPCCL_N_FORMATS];
} sp_exec_stats;

typedef struct sp_exec {
    sp_links *links; /* borrowed */
    sp_codec *codec; /* owned; made for slice_elems_max elements */
    const sp_kernels *kernels;
    size_t slice_elems_max, slice_bytes_max;
    uint8_t *acc, *result; /* scratch of one slice: accumulator, and values of the dtype */
    sp_frame *frames;      /* [world_size] contributions to the current slice, by rank */
    uint64_t *n_sent;      /* [SP_N_QUEUES * world_size] messages ever committed on each queue */
    sp_op *active[SP_EXEC_ACTIVE_MAX];
    int n_ops;
    sp_call past[SP_EXEC_PAST];      /* the last ended calls: call number i is at i % SP_EXEC_PAST */
    uint32_t n_past;                 /* calls ended, ever */
    sp_chooser *chooser;             /* owned */
    pthread_mutex_t choices_mu;      /* guards the next two, which any thread may read */
    sp_chosen *choices;              /* [SP_EXEC_CHOICES] owned */
    uint32_t n_choices;              /* kinds of calls, ever: number i is at i % SP_EXEC_CHOICES */
    sp_event events[SP_EXEC_EVENTS]; /* event number i is at i % SP_EXEC_EVENTS */
    uint64_t n_events;
    /* Of envelopes: the slowest link inside this rank's host, and a rank of another host; -1 = none. */
    double local_ns;
    int remote_peer;
    uint32_t time_codes[SP_TUNER_FLIGHTS]; /* of carrier k (tuner.h) at k % SP_TUNER_FLIGHTS */
    int64_t ended_ns;                      /* when the last call ended */
    sp_exec_stats stats;
} sp_exec;

/* Allocate scratch for slices of up to slice_bytes (dense). On failure too, the caller calls sp_exec_fini.
 * Errors: NOMEM. */
spccl_status sp_exec_init(sp_exec *x, sp_links *links, const sp_kernels *kernels, size_t slice_bytes);
void sp_exec_fini(sp_exec *x);
size_t sp_exec_memory_bytes(const sp_exec *x);

/* Make an op, which sp_exec_pass plans. It borrows the buffers of `args`. Free it with sp_op_destroy. */
spccl_status sp_op_create(const sp_coll_args *args, int world_size, sp_op **out);
void sp_op_destroy(sp_op *op);
/* "all_reduce #12 (1048576 float32, sum)" */
void sp_op_describe(const sp_op *op, char *text, size_t cap);

/* Make an op active. The caller has checked that n_ops < SP_EXEC_ACTIVE_MAX. */
void sp_exec_add(sp_exec *x, sp_op *op);
/* Plan new ops, then try one slice of each step of each op. *progressed = true if any slice was done.
 * Errors: NOMEM, PEER, FORMAT, FRAME, MISMATCH. They break the whole communicator. The text names op, peer, part and
 * slice. */
spccl_status sp_exec_pass(sp_exec *x, bool *progressed);
/* Call before sleeping. Errors: MISMATCH (the oldest message of some queue belongs to a collective that this
 * rank called otherwise). */
spccl_status sp_exec_check_heads(sp_exec *x);
/* If the oldest op is finished, remove it from the active ones: *out = that op, else NULL. Ops finish in the order
 * of the calls. Errors: MISMATCH (a peer sent more messages for this op, or for an older one, than the call
 * of this rank takes). */
spccl_status sp_exec_retire(sp_exec *x, sp_op **out);
/* queue: the ops that wait to become active, in order; they have deadlines too. NULL: none.
 * Errors: TIMEOUT (a deadline has passed; the text says what the oldest overdue op waits for). */
spccl_status sp_exec_check_deadlines(sp_exec *x, const sp_op *queue);
/* Log the events that are kept, oldest first, one line of level "info" each. */
void sp_exec_log_events(const sp_exec *x);
/* Write one line on the i-th kind of call: its schedule, and why. False if there is no i-th. Threads: any. */
bool sp_exec_describe_choice(sp_exec *x, size_t i, char *text, size_t cap);
/* The nearest deadline of the active ops and the queue. */
int64_t sp_exec_deadline(const sp_exec *x, const sp_op *queue);

#endif
