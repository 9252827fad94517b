/* gpu.h - what core knows of a GPU: a table of calls, which kernels/ fills in when the build has CUDA.
 * A contract. No CUDA type appears: streams, events and device addresses are plain pointers. When CUDA
 * refuses a call, the call returns SPCCL_ERR_DEVICE; its text has the name of CUDA's error. */
#ifndef SP_GPU_H
#define SP_GPU_H

#include "core/base/status.h"
#include "core/base/weights_rule.h"
#include "core/contract/remote.h"

#include <stdbool.h>

/* One GPU, as seen by this process. */
typedef struct sp_gpu_device {
    char name[64];
    int ordinal;
    uint32_t n_sms; /* multiprocessors */
    uint8_t uuid[16];
    bool can_share_fd; /* VMM memory can be exported as a file descriptor */
} sp_gpu_device;

/* What the driver of a GPU says about network devices that read and write its memory. */
typedef struct sp_gpu_net_facts {
    char pci[16];        /* "0000:17:00.0" */
    bool dmabuf;         /* its memory can be passed to another device as a dmabuf */
    bool writes_ordered; /* the GPU sees writes of other devices in the order in which they were made */
} sp_gpu_net_facts;

/* ---- the fused collectives: a whole collective in one launch over mapped inboxes ---- */

typedef enum sp_fused_op {
    SP_FUSED_ALL_GATHER,
    SP_FUSED_REDUCE_SCATTER,
    SP_FUSED_ALL_REDUCE,         /* reduce-scatter, then all-gather of the result, in one pass */
    SP_FUSED_ALL_REDUCE_ONESHOT, /* everyone sends everything to everyone: one hop, for small arrays */
    SP_FUSED_BROADCAST,
    SP_FUSED_OPS
} sp_fused_op;

/* A worker has one warp per role. One feeder may serve up to this many workers. */
#define SP_FUSED_SERVED_MAX 2u

/* Why a kernel gave up: what a wait saw last, or what was wrong with a frame. Only the first worker that
 * fails writes a report. */
typedef enum sp_gpu_fault {
    SP_GPU_NO_FAULT = 0,
    SP_GPU_NO_DATA,   /* waited for a frame of `peer` at position `wanted`; the tail is `seen` */
    SP_GPU_NO_SPACE,  /* waited until `peer` takes frames: wanted a credit of `wanted`; it is `seen` */
    SP_GPU_BAD_FRAME, /* a frame of `peer` breaks rule `detail` of docs/FORMAT.md 4: a field or count is `seen`
                         and should be `wanted` */
    SP_GPU_OTHER_LIMIT /* `peer` called with max_ctas `seen`, this rank with `wanted`; 0: without a limit */
} sp_gpu_fault;

/* How long a wait lasts. A contribution depends on its sender alone. A result or free space may be late
 * because of a third rank, and that rank should be the one that the error names. Waits for results and for
 * space therefore last an eighth longer, but at most one second longer. Relayed results may be late because the relay
 * waits for a result: they get twice that time. */
static inline SP_HD uint64_t sp_gpu_wait_ns(uint64_t timeout_ns, sp_gpu_fault fault, uint32_t queue)
{
    uint64_t more = timeout_ns / 8 < 1000000000u ? timeout_ns / 8 : 1000000000u;
    return timeout_ns +
           (fault == SP_GPU_NO_DATA && queue == SP_INBOX_INPUT ? 0 : more << (queue == SP_INBOX_RELAYED));
}

/* `detail` of BAD_FRAME when one of the rules 20 to 27 of docs/FORMAT.md 4 is broken. `wanted` and `seen` are
 * then 0. */
#define SP_GPU_RULE_INDEX 20u

typedef struct sp_gpu_report {
    uint32_t claimed; /* 0, or 1 + the worker that writes the report */
    uint32_t fault;   /* sp_gpu_fault; once it is not NO_FAULT, all members are valid */
    uint32_t worker, peer, queue, detail;
    uint32_t seq;   /* sp_fused_args.seq of the launch */
    uint32_t slice; /* number of the slice among the worker's slices in this launch, from 0 */
    uint64_t wanted, seen;
} sp_gpu_report;

/* Lies in host memory that the GPU can read and write. */
typedef struct sp_gpu_control {
    uint32_t abort; /* the host sets 1: every wait ends, and every later launch returns at once */
    uint32_t pad[15];
    sp_gpu_report report;
} sp_gpu_control;

/* Arguments of one launch. They are the same on all ranks, but for rank, in, out and device addresses. */
typedef struct sp_fused_args {
    sp_fused_op op;
    spccl_dtype dtype;
    spccl_redop redop;
    spccl_format format; /* AUTO, or the format of every slice that can take it */
    const void *in;      /* as in spccl.h; in a broadcast in = out = buf */
    void *out;
    uint64_t n_elems;      /* as in spccl.h: of a block in all-gather and reduce-scatter, else of the array */
    uint32_t slice_elems;  /* elements per slice: a multiple of 128 */
    uint64_t shard_slices; /* of the longest shard; `fused` sets it */
    uint64_t shard_stride; /* elements from one shard to the next in the whole buffer; `fused` sets it */
    /* Whole slices of n_elems, and elements after them; `fused` sets both. */
    uint32_t whole_slices, rest_elems;
    int rank, world_size, root;
    uint32_t wide; /* 1, of a reduce-scatter: `out` has the accumulator's dtype */
    sp_inbox_shape shape;
    uint32_t n_ctas, workers_per_cta;        /* n_ctas * workers_per_cta <= shape.n_workers */
    uint32_t n_served;                       /* workers that a feeder serves: 1 to SP_FUSED_SERVED_MAX */
    uint32_t tag;                            /* what the header of each frame holds: sp_frame_tag */
    uint8_t *inboxes[SP_GPU_HOST_RANKS_MAX]; /* on one host: by rank, addresses on this device */
    sp_gpu_control *control;                 /* device address */
    uint64_t timeout_ns;                     /* of each wait */
    uint32_t seq;                            /* number of the launch, for reports */
    sp_fused_remote remote;                  /* of peers on other hosts */
    /* The shard of each rank. All-reduce, broadcast: any of n_shards, or n_shards: the rank owns none. Else its number.
     * Placed before `remote` they doubled the spills of the kernels for several hosts (nvcc 13.0, sm_90). */
    uint16_t shards[SP_GPU_RANKS_MAX];
    uint32_t n_shards;
} sp_fused_args;

/* ---- the codec on GPU memory ---- */

typedef struct sp_gpu_encode_args {
    const void *x, *base; /* [n_elems]; base NULL = none */
    uint64_t n_elems;
    spccl_dtype dtype;
    spccl_format format;
    uint32_t slice_elems;
    uint8_t *dst; /* aligned to 16 */
    uint64_t dst_cap;
    uint64_t *offsets; /* [n_slices + 1]: where each frame starts; last: bytes of the encoded array */
    void *scratch;     /* scratch_bytes(n_slices) */
    /* In device memory: 0, or -spccl_status (DST_SMALL, UNSUPPORTED) of the first error. */
    uint32_t *status;
} sp_gpu_encode_args;

typedef struct sp_gpu_decode_args {
    const uint8_t *encoded; /* frames back to back, aligned to 16 */
    uint64_t encoded_bytes;
    const uint64_t *offsets; /* [n_slices + 1] as encode wrote them */
    uint64_t n_elems;
    spccl_dtype dtype;
    spccl_verb verb;
    uint32_t slice_elems; /* elements of every frame but the last */
    void *dst;
    uint32_t *status; /* in device memory: 0, or -spccl_status (FORMAT, VERSION, FRAME) of the first error */
} sp_gpu_decode_args;

/* ---- pruning and weights on GPU memory ---- */

/* A segment, in GPU memory. A call leaves its factors and counts here. */
typedef struct sp_gpu_prune_row {
    union {
        spccl_prune_segment segment;
        spccl_weights_segment weights;
    };
    uint64_t first_tile, end_tile; /* its tiles, of those of all segments */
    sp_prune_factors factors;      /* of this call: the sampling kernel of gradients writes them */
    uint64_t n_sent, n_nonfinite;  /* in this call so far; 0 between calls */
    uint64_t has_nonzero;          /* with skip_zeros: some g of this call is not zero; 0 between calls */
} sp_gpu_prune_row;

/* What lies before the rows. */
typedef struct sp_gpu_prune_table {
    uint64_t n_ctas_done; /* of this call; 0 between calls */
    uint64_t n_taken;     /* tiles that CTAs have taken beyond their first ones; 0 between calls */
    /* Of spccl_cuda_prune_all_reduce: entries given to lists, of segments sent whole and of others; 0 between calls. */
    uint64_t n_listed_whole, n_listed;
    uint64_t lost_nonfinite; /* an element that is inf or nan found no room */
} sp_gpu_prune_table;

/* What a launch does: all, only find thresholds, or only prune with them. */
enum { SP_PRUNE_STAGE_BOTH, SP_PRUNE_STAGE_SAMPLE, SP_PRUNE_STAGE_PASS };

/* Elements that a CTA prunes at a time; state_bytes: of an element of the residual. */
#define SP_GPU_PRUNE_TILE(state_bytes) (16384u / (uint32_t)(state_bytes))

typedef struct sp_gpu_prune_args {
    void *grad;
    spccl_dtype dtype;
    sp_gpu_prune_table *table; /* in GPU memory: the table, then rows [n_segments] sorted by begin */
    uint32_t n_segments;
    uint64_t n_tiles, most_elems; /* most_elems: of the largest segment */
    uint32_t stage;
    spccl_prune_options options;
} sp_gpu_prune_args;

typedef struct sp_gpu_weights_args {
    void *buffer; /* what is sent, or the change that is received */
    spccl_dtype dtype;
    sp_gpu_prune_table *table; /* as of sp_gpu_prune_args */
    uint32_t n_segments;
    uint64_t n_tiles;
    spccl_weights_options options; /* of sending */
} sp_gpu_weights_args;

/* One bit per element: of summing and of decoding (spccl_signs_sum_options, spccl_signs_decode). */
typedef struct sp_gpu_signs_args {
    const uint8_t *parts; /* decoding: the rows */
    float *values;        /* kept; decoding: out */
    uint8_t *rows;
    const uint32_t *lengths;
    uint64_t n_chunks;
    uint32_t n_parts;
    float share; /* multiplies the magnitude of each part */
} sp_gpu_signs_args;

/* ---- deltas on GPU memory: docs/FORMAT.md 11 ---- */

/* delta_gpu.h */
struct sp_gpu_delta_args;
struct sp_gpu_delta_sum_args;
struct sp_gpu_delta_encode_args;

struct sp_pruned_sum_args; /* pruned_lists.h */

/* A handle by which a peer can map GPU memory. With it travels a file descriptor, or -1. */
#define SP_GPU_HANDLE_BYTES 128
typedef struct sp_gpu_memory sp_gpu_memory; /* an inbox: this rank's own, or mapped from a peer */

typedef struct sp_gpu_ops {
    const char *name;  /* "cuda" */
    const char *about; /* "CUDA 13.0, compiled for 80-real 90-real 100-real 120" */

    /* ---- devices ---- */
    spccl_status (*device_count)(int *out); /* 0 without a driver: not an error */
    spccl_status (*current_device)(int *out);
    spccl_status (*describe)(int ordinal, sp_gpu_device *out);
    spccl_status (*net_facts)(int ordinal, sp_gpu_net_facts *out);
    /* Make `ordinal` current on this thread. *before = what was current, for `leave`. Makes no context on any
     * other GPU. */
    spccl_status (*enter)(int ordinal, int *before);
    void (*leave)(int before);
    /* Which device an address belongs to: *ordinal = -1 for host memory. */
    spccl_status (*device_of)(const void *p, int *ordinal);
    spccl_status (*can_access)(int ordinal, int peer_ordinal, bool *out);
    spccl_status (*memory_free)(size_t *out_bytes); /* of the current device */

    /* ---- memory that peers map ---- */
    /* `bytes` of zeros on GPU `ordinal`. handles: "fd" (VMM) or "ipc". for_network: network devices may read and write
     * it, if the GPU can do that. */
    spccl_status (*memory_create)(int ordinal, size_t bytes, const char *handles, bool for_network,
                                  sp_gpu_memory **out);
    /* A dmabuf with the first `bytes` of the memory, for network devices: *fd is a descriptor, which the caller closes,
     * and the memory begins at *offset in it. Errors: DEVICE. */
    spccl_status (*memory_dmabuf)(const sp_gpu_memory *m, size_t bytes, int *fd, uint64_t *offset);
    /* Memory of GPU `ordinal` that the caller allocated with cudaMalloc, or a part of it. memory_destroy frees none of
     * it. Errors: ARG (no such memory), UNREACHABLE (memory of another kind, which cannot be shared). */
    spccl_status (*memory_borrow)(int ordinal, void *p, size_t bytes, sp_gpu_memory **out);
    /* Write a handle for the peers. *fd: with "fd" a descriptor, which the caller closes; else -1. */
    spccl_status (*memory_export)(sp_gpu_memory *m, uint8_t *handle, int *fd);
    /* Map a peer's memory on GPU `ordinal`; fd is borrowed. */
    spccl_status (*memory_import)(int ordinal, const uint8_t *handle, int fd, size_t bytes,
                                  sp_gpu_memory **out);
    void *(*memory_address)(const sp_gpu_memory *m);
    void (*memory_destroy)(sp_gpu_memory *m);
    /* *device = the address that the GPU uses for *host. All bytes are zero. */
    spccl_status (*control_create)(sp_gpu_control **host, sp_gpu_control **device);
    void (*control_destroy)(sp_gpu_control *host);
    /* As control_create, but `bytes` of any use; *device = the address for this thread's GPU. */
    spccl_status (*pinned_create)(size_t bytes, void **host, void **device);
    void (*pinned_destroy)(void *host); /* accepts NULL */
    /* Pinned memory of the caller; *device = the address for this thread's GPU. Errors: ARG (it is not pinned). */
    spccl_status (*pinned_find)(void *host, size_t bytes, void **device);
    /* Waits for no stream of the caller: it copies on a stream of its own. */
    spccl_status (*read)(void *host, const void *device, size_t bytes);

    /* ---- streams and events ---- */
    spccl_status (*event_create)(void **out);
    spccl_status (*event_record)(void *event, void *stream);
    spccl_status (*event_query)(void *event); /* SPCCL_AGAIN: not yet */
    spccl_status (*stream_wait)(void *stream, void *event);
    void (*event_destroy)(void *event);
    spccl_status (*stream_query)(void *stream); /* SPCCL_AGAIN: busy */
    /* *id = the capture that the stream is part of, 0 if none. */
    spccl_status (*capture_id)(void *stream, unsigned long long *id);
    /* Unlike a stream's handle, an id is never used again. */
    spccl_status (*stream_id)(void *stream, unsigned long long *id);

    /* ---- work ---- */
    /* out[op] = the workers that one CTA can hold on the device when a feeder serves n_served of them, 1 to
     * 255. 0, only with n_served > 1: feeders of this operation cannot serve so many. remote: the group has peers on
     * other hosts. Loads the kernels that the group will launch. */
    spccl_status (*fused_workers_per_cta)(int ordinal, uint32_t world_size, uint32_t n_served, bool remote,
                                          uint32_t out[SP_FUSED_OPS]);
    spccl_status (*fused)(const sp_fused_args *a, void *stream);
    size_t (*encode_scratch_bytes)(uint64_t n_slices);
    spccl_status (*encode)(const sp_gpu_encode_args *a, void *stream);
    spccl_status (*decode)(const sp_gpu_decode_args *a, void *stream);
    spccl_status (*prune)(const sp_gpu_prune_args *a, void *stream);
    /* Prune, then sum what the ranks of one host send. */
    spccl_status (*pruned_sum)(const struct sp_pruned_sum_args *a, void *stream);
    spccl_status (*weights_send)(const sp_gpu_weights_args *a, void *stream);
    spccl_status (*weights_receive)(const sp_gpu_weights_args *a, void *stream);
    /* Send one bit per element: `buffer` are the rows; of the options only leak is used. */
    spccl_status (*signs_send)(const sp_gpu_weights_args *a, void *stream);
    spccl_status (*signs_sum)(const sp_gpu_signs_args *a, void *stream);
    spccl_status (*signs_decode)(const sp_gpu_signs_args *a, void *stream);
    /* Check headers and tables of frames, and fill in what a plan keeps of them. */
    spccl_status (*delta_open)(const struct sp_gpu_delta_args *a, void *stream);
    /* Look at, apply or undo the changes of frames that delta_open has accepted: SP_DELTA_LOOK... Looking checks all other
     * rules. Applying checks none, but accesses no memory outside of frames, places and `old`, whatever a frame holds. */
    spccl_status (*delta_run)(const struct sp_gpu_delta_args *a, int what, void *stream);
    spccl_status (*delta_sum)(const struct sp_gpu_delta_sum_args *a, void *stream);
    /* Encode a list of arrays against their bases, and wait for it. Errors: DST_SMALL, UNSUPPORTED, NOMEM, DEVICE,
     * TIMEOUT. */
    spccl_status (*delta_encode)(const struct sp_gpu_delta_encode_args *a, void *stream);
    /* Allocate `capacity` bytes of a GPU and copy `bytes` <= capacity of `host` to their start. The rest is
     * uninitialised. Waits for the copy. Free the memory with unload. */
    spccl_status (*upload)(int ordinal, const void *host, size_t bytes, size_t capacity, void **out);
    void (*unload)(int ordinal, void *device);
} sp_gpu_ops;

/* The table, or NULL in a build without CUDA. *why_none = the reason if the table is NULL, else NULL.
 * why_none may be NULL. */
const sp_gpu_ops *sp_gpu_ops_get(const char **why_none);

#endif
