/* spccl_experimental.h - what is not settled yet: weights, wide sums, signs, pruned all-reduces in two stages. The promise:
 * what is here, in spccl_channel.h and in spccl_device.cuh works and is tested as everything else is, but any version, also
 * 0.N.x, may change or remove it; CHANGELOG.md then says so. A program that uses it is compiled again for each version.
 *
 * spccl.h includes this header until 0.3; include it by its name. */
#ifndef SPCCL_EXPERIMENTAL_H
#define SPCCL_EXPERIMENTAL_H

#include "spccl.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- weights: exchanges of changes ---------------------------------------------------------------- */
/* Each rank has own weights w, and all ranks have the same shared weights z. Per element, with threshold t:
 *     send     d = w - z;   out = scale d unless |d| < t, else 0;   w = z where d is sent, else leak d + z
 *     receive  z += change;   w += change
 * The change is the sum of what all ranks sent. w - z is always what is still to be sent. A d that is not finite is
 * dropped, and w = z. t is a quantile of a sample of |d|. More: docs/KERNELS.md. All memory is the caller's. */
typedef struct spccl_weights_segment { /* one parameter's part */
    size_t begin;                      /* its first element in the buffers; segments do not overlap */
    size_t n_elems;
    void *own;                /* [n_elems] w, of the plan's dtype; on a GPU aligned to 16 bytes */
    void *shared;             /* [n_elems] z, likewise */
    spccl_prune_state *state; /* of this segment alone; its loss_scale is not used */
    uint32_t key;             /* any number, always the same for a parameter; moves what is sampled */
    uint32_t whole;           /* 1: every call sends all elements */
} spccl_weights_segment;
typedef struct spccl_weights_options {
    size_t struct_bytes;      /* sizeof(spccl_weights_options) */
    double density;           /* fraction of a segment to send: above 0, at most 1 */
    double sample;            /* fraction to sample, in (0, 1]: 32 / density to 24576 elements */
    double leak;              /* above 0, at most 1 */
    double scale;             /* above 0 */
    uint32_t seed;            /* any number, the same in all calls; moves samples */
    uint32_t keep_thresholds; /* 1: t is the state's threshold; nothing is sampled */
    uint32_t
        chunk; /* 0, or a power of 2 from 256 to 4096: no threshold; each chunk sends its largest elements */
    uint32_t levels; /* with a chunk: 0, or 2: each chunk sends two magnitudes */
} spccl_weights_options;
#define SPCCL_WEIGHTS_OPTIONS_INIT                                                                           \
    {                                                                                                        \
        sizeof(spccl_weights_options), 0.01, 0.001, 1, 1, 0, 0, 0, 0                                         \
    }
typedef struct spccl_weights_plan spccl_weights_plan;
/* Check and copy the segments of buffers [n_elems] of float32 or float64 on `device` (CUDA ordinal; -1 = host). A plan
 * runs one call at a time. Destroy it after its GPU work. Errors: ARG, DTYPE, UNSUPPORTED, NOMEM, DEVICE. */
SPCCL_API spccl_status spccl_weights_plan_create(const spccl_weights_segment *segments, size_t n_segments,
                                                 size_t n_elems, spccl_dtype dtype, int device,
                                                 spccl_weights_plan **out);
SPCCL_API void spccl_weights_plan_destroy(spccl_weights_plan *plan); /* accepts NULL */
/* `out` and `change` lie on the plan's device. `stream`: a cudaStream_t for a plan on a GPU, else NULL. On the host at
 * most 5 times the wanted number of a segment is sent. Errors: ARG, DEVICE. */
SPCCL_API spccl_status spccl_weights_send(spccl_weights_plan *plan, void *out,
                                          const spccl_weights_options *options, void *stream);
SPCCL_API spccl_status spccl_weights_receive(spccl_weights_plan *plan, const void *change, void *stream);

/* ---- sums that are not rounded ------------------------------------------------------------------- */
/* spccl_reduce_scatter, but `out` has float32 where `dtype` is float16 or bfloat16, which travel: the sum, or the mean,
 * before it is rounded. Then it is not in place. Ranks that call spccl_reduce_scatter with the same arguments take part. */
SPCCL_API spccl_status spccl_reduce_scatter_wide(spccl_comm *comm, const void *in, void *out, size_t n_elems,
                                                 spccl_dtype dtype, spccl_redop op, spccl_request **req);
SPCCL_API spccl_status spccl_cuda_reduce_scatter_wide(spccl_comm *comm, const void *in, void *out,
                                                      size_t n_elems, spccl_dtype dtype, spccl_redop op,
                                                      void *stream);

/* ---- one bit per element -------------------------------------------------------------------------- */
/* Nothing is pruned: each chunk of 4096 elements sends the sign of each element and one magnitude, in a row of 516 bytes
 * (docs/FORMAT.md, section 10). Both ends keep what that changed: a sender in its weights, the owner of a chunk, who adds
 * up what the ranks have sent, in `kept`. An element that is not finite counts as 0. Host and GPU give the same bits.
 * All memory is the caller's; rows are aligned to 4 bytes. `stream`: a cudaStream_t for GPU memory, else NULL. */
#define SPCCL_SIGNS_CHUNK 4096u
#define SPCCL_SIGNS_ROW_BYTES 516u
/* Send: write a row for each chunk of each segment of a plan of float32, and leave what it changed in the own weights:
 *     d = w - z;   out = m or -m with the sign of d, where m is the mean of |d| in the chunk;   w = z + leak (d - out)
 * Segments begin at multiples of 4096 and none is whole. The row of element i of the buffers is the (i / 4096)-th of
 * `rows`. leak: above 0, at most 1. Errors: ARG, DTYPE, DEVICE. */
SPCCL_API spccl_status spccl_weights_send_signs(spccl_weights_plan *plan, void *rows, double leak,
                                                void *stream);
/* `lengths`: a chunk has at most 4096 elements; the row of one without elements is zeros. */
typedef struct spccl_signs_sum_options {
    size_t struct_bytes;     /* sizeof(spccl_signs_sum_options) */
    const void *parts;       /* [n_parts][n_chunks] rows, in the order of the ranks that sent them */
    float *kept;             /* [n_chunks * 4096]; on a GPU aligned to 16 bytes */
    void *rows;              /* [n_chunks], not in parts: out */
    const uint32_t *lengths; /* [n_chunks] elements of each chunk; NULL: 4096 each */
    size_t n_chunks;
    uint32_t n_parts; /* 0: `parts` is not read */
    int32_t device;   /* of all memory: a CUDA ordinal; -1: host */
} spccl_signs_sum_options;
#define SPCCL_SIGNS_SUM_OPTIONS_INIT                                                                         \
    {                                                                                                        \
        sizeof(spccl_signs_sum_options), 0, 0, 0, 0, 0, 0, -1                                                \
    }
/* The owner: v = kept + the mean of the parts; write the rows of v; kept = v - what they say. Errors: ARG, UNSUPPORTED,
 * DEVICE. */
SPCCL_API spccl_status spccl_signs_sum(const spccl_signs_sum_options *options, void *stream);
/* out [n_chunks * 4096] = what the rows say. `out` is aligned as `kept` above. Errors: ARG, UNSUPPORTED, DEVICE. */
SPCCL_API spccl_status spccl_signs_decode(const void *rows, size_t n_chunks, float *out, int device,
                                          void *stream);

/* ---- plan files: schedules that users write ------------------------------------------------------- */
/* docs/SCHEDULES.md has the text, and what the check refuses. */
typedef struct spccl_plan_info {
    size_t struct_bytes;    /* sizeof(spccl_plan_info) */
    char name[32];          /* as in the file */
    const char *collective; /* "all_reduce"; static */
    int32_t n_ranks;
    int32_t n_hosts;  /* 0: any hosts */
    int32_t root;     /* of a broadcast; -1: of none */
    int32_t n_chunks; /* of the array, or of one rank's block in all_gather and reduce_scatter */
    int32_t
        rank_order; /* 1: adds in rank order from +0.0, so results have the bits of the automatic choice */
    int32_t sends_sums;  /* 1: sums of 16-bit floats travel as float32 */
    int32_t n_steps;     /* of the rank that has most */
    int32_t n_hops;      /* messages on the longest way, one after the other */
    int32_t kept_slices; /* slices that a rank keeps: its scratch memory */
    int32_t chunks_sent; /* of the rank that sends most */
    uint64_t n_messages; /* of all ranks, for each slice */
    uint64_t line;       /* of the plan in the text */
    uint64_t hash;       /* of the text: ranks of a group compare it */
    char no_gpus[200];   /* "": the GPU kernels run it; else which step they cannot do */
    /* How they send results: "none", "direct", "relayed". A group with a plan of its file that relays runs no direct one */
    char gpu_results[16];
} spccl_plan_info;
/* Check the i-th plan of a text, as a group that loads it does. Errors: SETTING (the text of the error names plan, rank,
 * step and reason), ARG (no i-th plan), NOMEM. */
SPCCL_API spccl_status spccl_plan_check(const void *text, size_t bytes, size_t i, spccl_plan_info *out);
/* Whether the GPU kernels run what the communicator's plan file has for a collective ("all_reduce", ...; root: of a
 * broadcast). Errors: UNSUPPORTED (the text names plan, rank, step and reason; so does the call itself), ARG. */
SPCCL_API spccl_status spccl_cuda_check_plan(spccl_comm *comm, const char *collective, int root);

/* ---- the simulator: what a collective would cost on hosts that are not there ----------------------- */
/* It runs the plans of all ranks, slice by slice, on a model of hosts, links and CPUs (docs/SIMULATE.md). */
typedef struct spccl_simulate_options {
    size_t struct_bytes;    /* sizeof(spccl_simulate_options) */
    const char *collective; /* "all_reduce"; with plan_text it may be NULL */
    const char
        *schedule; /* "direct", "oneshot", "relayed", "ring", "hierarchical"; NULL: the plan of plan_text */
    const char *format;    /* as SPCCL_FORMAT; NULL: "auto" */
    const void *plan_text; /* a plan file, of which plan number plan_index is taken */
    size_t plan_bytes, plan_index;
    uint64_t n_elems; /* as in the calls: of one rank's block in all_gather and reduce_scatter */
    spccl_dtype dtype;
    int32_t n_ranks;        /* 2 to 4096 */
    int32_t ranks_per_host; /* rank r is on host r / ranks_per_host */
    int32_t root;           /* of a broadcast */
    int32_t merge;          /* equal ranks: 0 if they are more than 64 or n_elems stays, 1 always, -1 never */
    int32_t cores;          /* of a host; 0: one for each rank */
    int32_t shared_cores;   /* 1: all hosts together have these cores, as emulated hosts do */
    int32_t message_max; /* bytes of the largest message; 0: that of shm on one host, of tcp between hosts */
    double density;      /* of a contribution: fraction of elements that are not zero */
    double overlap;      /* of the ranks' nonzeros: 0 independent, 1 at the same places */
    double link_ns;      /* time of a byte on a host's link, each way */
    double burst_bytes;  /* what a link passes at once after a pause */
    double latency_ns;   /* of a link, one way */
    /* Rates of this CPU, in ns. 0: those of the machine that docs/SIMULATE.md names. */
    double pass_ns;           /* a dense byte that a rank scans, clears, adds or writes */
    double codec_factor;      /* encode and decode, over the constants of core/format/tune_format.c */
    double send_ns;           /* a byte to another host, for the sender */
    double receive_ns;        /* and for the receiver */
    double local_ns;          /* a byte to a rank of the same host, for both */
    double local_message_ns;  /* a message inside a host, for sender and receiver each */
    double remote_message_ns; /* a message to another host */
    double wake_ns;           /* a rank that waited starts again */
} spccl_simulate_options;

typedef struct spccl_simulated {
    size_t struct_bytes; /* sizeof(spccl_simulated) */
    double time_ns;      /* until the last rank is done */
    double wire_bytes;   /* of all messages: envelopes and frames */
    double remote_bytes; /* of these, to other hosts */
    double rank_bytes;   /* sent by the rank that sends most */
    double link_bytes;   /* out of the host that sends most, or into the one that gets most */
    double memory_bytes; /* of a rank: queues, scratch, plan */
    double kept_bytes;   /* of these, for slices that the plan keeps */
    double cpu_ns;       /* work of the busiest rank */
    double chosen_ns;   /* what the library expects when it chooses (plan_cost.h); 0: it never chooses this */
    double dense_bytes; /* of the messages, if they were dense */
    uint64_t n_messages;
    uint64_t n_elems;                         /* as simulated: rounded where ranks are merged */
    uint64_t n_events;                        /* the work of the simulator */
    int32_t n_steps;                          /* of the rank that has most */
    int32_t n_simulated;                      /* ranks; the others are equal to one of them */
    double format_bytes[SPCCL_N_FORMATS_MAX]; /* wire_bytes by format */
} spccl_simulated;
/* Errors: ARG (the text says which option, and what was wanted), SETTING (plan_text), UNSUPPORTED (too large to simulate),
 * NOMEM. */
SPCCL_API spccl_status spccl_simulate(const spccl_simulate_options *options, spccl_simulated *out);

/* ---- pruned all-reduces in two stages ------------------------------------------------------------- */
/* spccl_cuda_prune_all_reduce in two calls with the same arguments. Stage 1 does on its `stream` what need not wait for
 * earlier all-reduces: all pruning, or with lists at most the thresholds. Stage 2 does the rest, on the stream of the
 * collectives, which the caller lets wait for the first. */
SPCCL_API spccl_status spccl_cuda_prune_all_reduce_stage(spccl_comm *comm, spccl_prune_plan *plan, void *grad,
                                                         spccl_redop op, const spccl_prune_options *options,
                                                         int stage, void *stream);

#ifdef __cplusplus
}
#endif
#endif
