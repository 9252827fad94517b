/* spccl.h - the public interface of libspccl: collectives for data that is mostly zeros.
 *
 * The only public header. C11 and C++, standard headers only. Everything that can fail returns
 * `spccl_status`; results go through the last parameters and are untouched on failure (a failed
 * collective may have written part of its output buffer). After a failure
 * `spccl_last_error()` gives, on the calling thread, one line that says who, where, got, wanted.
 *
 * "Zero" always means: all bits zero. -0.0, NaN payloads, infinities and denormals travel bit for
 * bit. Reductions add in rank order 0, 1, 2, ... starting from +0.0, float16 and bfloat16
 * accumulate in float32 and round once, so every rank and every run gets the same bits, whatever
 * format, schedule or transport was used. Source: DESIGN notes in docs/ALGORITHMS.md; the sparse
 * formats follow Hough et al., "Adaptive Space-efficient Collectives ..." (SpCCL), section III. */
#ifndef SPCCL_H
#define SPCCL_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(SPCCL_BUILDING) && defined(__GNUC__)
#define SPCCL_API __attribute__((visibility("default")))
#else
#define SPCCL_API
#endif

#define SPCCL_VERSION_MAJOR 0
#define SPCCL_VERSION_MINOR 1
#define SPCCL_VERSION_PATCH 0
#define SPCCL_VERSION_TEXT "0.1.0"

/* ---- status ---------------------------------------------------------------------------------- */

/* 0 succeeded, above 0 "not yet, call again", below 0 failed. The numbers never change; docs/ERRORS.md
 * says of each what happened and what to do. */
typedef enum spccl_status {
    SPCCL_OK = 0,
    SPCCL_AGAIN = 1,             /* not finished yet; not an error */
    SPCCL_ERR_ARG = -10,         /* an argument is out of range or NULL */
    SPCCL_ERR_DTYPE = -11,       /* dtype unknown, or not possible for this operation */
    SPCCL_ERR_DST_SMALL = -12,   /* destination has too little room */
    SPCCL_ERR_ALIAS = -13,       /* buffers overlap in a way the operation does not allow */
    SPCCL_ERR_STATE = -14,       /* handle used after destroy began, or in the wrong order */
    SPCCL_ERR_UNSUPPORTED = -15, /* valid, but this build or this format cannot do it */
    SPCCL_ERR_SETTING = -16,     /* an SPCCL_* variable or an option has a bad value */
    SPCCL_ERR_FORMAT = -20,      /* a frame breaks a rule of docs/FORMAT.md */
    SPCCL_ERR_VERSION = -21,     /* a frame of a version this library does not read */
    SPCCL_ERR_FRAME = -22,       /* a good frame, but of another dtype, length or kind than wanted */
    SPCCL_ERR_NOMEM = -30,       /* out of memory */
    SPCCL_ERR_SYSTEM = -31,      /* an operating-system call failed */
    SPCCL_ERR_PEER = -40,        /* a peer died or closed its connection */
    SPCCL_ERR_TIMEOUT = -41,     /* a deadline passed */
    SPCCL_ERR_MISMATCH = -42,    /* ranks called different operations, sizes or dtypes */
    SPCCL_ERR_ABORTED = -43,     /* spccl_comm_abort was called, here or on a peer */
    SPCCL_ERR_AUTH = -44,        /* wrong job secret */
    SPCCL_ERR_UNREACHABLE = -45, /* no transport reaches a peer */
    SPCCL_ERR_DEVICE = -50,      /* a device call failed */
    SPCCL_ERR_BUG = -90          /* a bug in spccl: please report the text */
} spccl_status;

/* "SPCCL_ERR_PEER" and the like; never NULL. Threads: any. */
SPCCL_API const char *spccl_status_name(spccl_status status);
/* One line about the last failure on this thread; "" if none. Valid until the next failing call. */
SPCCL_API const char *spccl_last_error(void);
/* "0.1.0" of the library loaded (compare with SPCCL_VERSION_TEXT of the header). */
SPCCL_API const char *spccl_version(void);

/* ---- types ------------------------------------------------------------------------------------ */

/* The numbers are those on the wire (docs/FORMAT.md, section 2). */
typedef enum spccl_dtype {
    SPCCL_FLOAT32 = 1,
    SPCCL_FLOAT16 = 2,
    SPCCL_BFLOAT16 = 3,
    SPCCL_FLOAT64 = 4,
    SPCCL_FLOAT8 = 5, /* any 8-bit float, carried as bytes: gather and broadcast, no arithmetic */
    SPCCL_INT8 = 6,
    SPCCL_INT16 = 7,
    SPCCL_INT32 = 8,
    SPCCL_INT64 = 9,
    SPCCL_UINT8 = 10
} spccl_dtype;

/* How one slice is laid out in bytes. AUTO picks by exact size and cost; the choice never changes
 * a bit of any result. */
typedef enum spccl_format {
    SPCCL_FORMAT_AUTO = -1,
    SPCCL_FORMAT_EMPTY = 0,
    SPCCL_FORMAT_TILE = 1,
    SPCCL_FORMAT_PICI = 2,
    SPCCL_FORMAT_COO = 3,
    SPCCL_FORMAT_DENSE = 4
} spccl_format;
#define SPCCL_N_FORMATS 5
#define SPCCL_N_FORMATS_MAX 16 /* length of arrays by format: later formats find their place there */

/* What decoding does with an element. Absent elements are those the frame does not list (in dense: those with
 * all bits zero), so the result does not depend on the format. */
typedef enum spccl_verb {
    SPCCL_SET = 0,      /* listed elements take their value, absent ones become zero */
    SPCCL_ADD = 1,      /* listed elements are added, absent ones stay */
    SPCCL_OVERWRITE = 2 /* listed elements take their value, absent ones stay */
} spccl_verb;

/* Absent elements count as zeros. AVG divides the sum by the world size (integers: toward zero).
 * MIN and MAX pass a NaN on, and of equal values keep the lowest rank's bits. */
typedef enum spccl_redop {
    SPCCL_SUM = 0,
    SPCCL_AVG = 1,
    SPCCL_MIN = 2,
    SPCCL_MAX = 3,
    SPCCL_PROD = 4
} spccl_redop;

/* Bytes per element; 0 for an unknown dtype. */
SPCCL_API size_t spccl_dtype_bytes(spccl_dtype dtype);
/* "float32" and the like; "?" for an unknown dtype. */
SPCCL_API const char *spccl_dtype_name(spccl_dtype dtype);
/* "tile" and the like; "?" for an unknown format. */
SPCCL_API const char *spccl_format_name(spccl_format format);

/* ---- codec: arrays to bytes and back ------------------------------------------------------------ */

/* An encoded array is one frame or several back to back (docs/FORMAT.md, section 1); each frame holds one
 * slice of the array and carries its own format. */

typedef struct spccl_encode_options {
    size_t struct_bytes;  /* sizeof(spccl_encode_options) */
    const void *base;     /* [n_elems] or NULL: then "nonzero" means "differs in any bit from base" */
    spccl_format format;  /* AUTO, or the format that every slice must take */
    uint32_t slice_elems; /* elements per frame, a multiple of 2048; 0 = default (65536) */
} spccl_encode_options;
#define SPCCL_ENCODE_OPTIONS_INIT                                                                            \
    {                                                                                                        \
        sizeof(spccl_encode_options), NULL, SPCCL_FORMAT_AUTO, 0                                             \
    }

/* Bytes that always suffice for spccl_encode of `n_elems`; 0 if the arguments are bad or overflow.
 *   options    NULL = defaults */
SPCCL_API size_t spccl_encode_bound(size_t n_elems, spccl_dtype dtype, const spccl_encode_options *options);

/* Encode `x` into `dst`.
 *   x          [n_elems] of `dtype`, host memory, borrowed until return; any alignment
 *   options    NULL = defaults
 *   dst        dst_cap bytes, not overlapping x; spccl_encode_bound() bytes always suffice
 *   out_bytes  bytes written
 * A forced TILE fails with SPCCL_ERR_UNSUPPORTED on a slice with 256 nonzeros in one block, a forced
 * EMPTY on a slice that is not.
 * Errors: ARG, DTYPE, DST_SMALL, ALIAS, UNSUPPORTED, NOMEM.  Threads: any.  Source: FORMAT.md. */
SPCCL_API spccl_status spccl_encode(const void *x, size_t n_elems, spccl_dtype dtype,
                                    const spccl_encode_options *options, void *dst, size_t dst_cap,
                                    size_t *out_bytes);

/* Apply an encoded array to `dst`. Every frame is checked before anything of it is applied; on a bad frame
 * the elements before it have been written and those from it on are untouched.
 *   encoded    encoded_bytes bytes, borrowed until return; may come from anywhere
 *   dst        [n_elems] of `dtype`; the encoded array must describe exactly n_elems elements
 * An array encoded with a base (a delta) is refused with SPCCL_SET.
 * Errors: ARG, DTYPE, ALIAS, FORMAT, VERSION, FRAME, UNSUPPORTED (ADD of float8).  Threads: any. */
SPCCL_API spccl_status spccl_decode(const void *encoded, size_t encoded_bytes, spccl_verb verb, void *dst,
                                    size_t n_elems, spccl_dtype dtype);

/* What one frame says of itself. Offsets count from the start of the frame; 0 = no such section. */
typedef struct spccl_frame_info {
    size_t struct_bytes; /* set by the caller: sizeof(spccl_frame_info) */
    uint32_t version;
    spccl_format format;
    spccl_dtype dtype;
    uint32_t is_delta; /* 1: encoded against a base */
    uint64_t n_elems;
    uint64_t nnz; /* elements listed */
    uint64_t frame_bytes;
    uint64_t index_off, meta_off, values_off;
} spccl_frame_info;

/* Check the frame at the start of `encoded` completely and describe it.
 * Errors: ARG, FORMAT, VERSION.  Threads: any. */
SPCCL_API spccl_status spccl_frame_inspect(const void *encoded, size_t encoded_bytes, spccl_frame_info *out);

/* ---- communicators ------------------------------------------------------------------------------ */

/* A child of fork cannot use its parent's handles: every call on one fails with SPCCL_ERR_STATE, except that
 * spccl_comm_destroy and spccl_request_free do nothing. The parent's group goes on. The child may make groups
 * of its own. */
typedef struct spccl_comm spccl_comm;       /* one rank's membership of one group */
typedef struct spccl_request spccl_request; /* one collective under way */

typedef struct spccl_config {
    size_t struct_bytes;    /* sizeof(spccl_config) */
    const char *name;       /* group name for texts and keys; borrowed until return; NULL = "world" */
    int64_t timeout_ms;     /* deadline of creation and of every collective; 0 = default (600000) */
    spccl_format format;    /* AUTO or forced for every slice (SPCCL_FORMAT wins) */
    uint32_t slice_bytes;   /* dense bytes per slice; 0 = default */
    const char *transports; /* comma list tried in order, for example "shm,tcp"; NULL = default */
    uint32_t n_sockets;     /* TCP sockets per peer and queue; 0 = default */
    const uint8_t *secret;  /* [32] job secret, or NULL: rank 0 makes one and passes it by the store */
} spccl_config;
#define SPCCL_CONFIG_INIT                                                                                    \
    {                                                                                                        \
        sizeof(spccl_config), NULL, 0, SPCCL_FORMAT_AUTO, 0, NULL, 0, NULL                                   \
    }

/* A key-value store shared by the ranks (torch's Store, or anything alike). `set` publishes; `get`
 * waits until the key is there or `timeout_ms` passed (then SPCCL_ERR_TIMEOUT) and copies at most
 * `cap` bytes, *out_bytes says how many. Called only inside spccl_comm_create, on the calling thread. */
typedef struct spccl_store {
    size_t struct_bytes; /* sizeof(spccl_store) */
    void *ctx;           /* given to both functions */
    spccl_status (*set)(void *ctx, const char *key, const void *data, size_t bytes);
    spccl_status (*get)(void *ctx, const char *key, void *buf, size_t cap, int64_t timeout_ms,
                        size_t *out_bytes);
} spccl_store;

/* Join a group; returns when every link of this rank is up.
 *   store      borrowed until return
 *   config     NULL = defaults; borrowed until return
 *   out        caller frees with spccl_comm_destroy
 * Errors: ARG, SETTING, NOMEM, SYSTEM, TIMEOUT, AUTH, UNREACHABLE, PEER, MISMATCH. */
SPCCL_API spccl_status spccl_comm_create(const spccl_store *store, int rank, int world_size,
                                         const spccl_config *config, spccl_comm **out);

/* Without a store, as in NCCL: one process makes an id, hands the 128 bytes to all ranks by any means, and each
 * calls spccl_comm_init_rank. The process serves the rendezvous, a thread and a port, until the group has formed,
 * or until no rank was connected for SPCCL_TIMEOUT_MS (10 minutes); then the id is good for nothing.
 * An id is good for one group. SPCCL_RENDEZVOUS_ADDR names the address to listen on (default
 * 127.0.0.1; set it to this host's address for more than one host). */
typedef struct spccl_unique_id {
    char bytes[128];
} spccl_unique_id;
SPCCL_API spccl_status spccl_get_unique_id(spccl_unique_id *out);
SPCCL_API spccl_status spccl_comm_init_rank(const spccl_unique_id *id, int rank, int world_size,
                                            const spccl_config *config, spccl_comm **out);

SPCCL_API int spccl_comm_rank(const spccl_comm *comm);
SPCCL_API int spccl_comm_world_size(const spccl_comm *comm);
/* Deadline of the collectives issued from now on. Errors: ARG (timeout_ms <= 0). */
SPCCL_API spccl_status spccl_comm_set_timeout(spccl_comm *comm, int64_t timeout_ms);
/* SPCCL_OK, or the first error that broke this communicator; its text is then spccl_last_error().
 * A broken communicator fails every call with that error. Threads: any. */
SPCCL_API spccl_status spccl_comm_async_error(spccl_comm *comm);
/* Break the communicator at once: every wait on it ends with SPCCL_ERR_ABORTED, peers are told.
 *   reason     one line for the error texts; may be NULL
 * Threads: any. Idempotent. */
SPCCL_API spccl_status spccl_comm_abort(spccl_comm *comm, const char *reason);
/* Free it. Collectives still under way are finished first (within their deadlines) unless the
 * communicator is broken. With a GPU attached the ranks meet here, for at most 10 s, and captured graphs that
 * hold its collectives must not be replayed any more. Accepts NULL. No other thread may use it; requests stay
 * valid. */
SPCCL_API spccl_status spccl_comm_destroy(spccl_comm *comm);

/* Counters since creation. */
typedef struct spccl_stats {
    size_t struct_bytes; /* set by the caller: sizeof(spccl_stats) */
    uint64_t n_collectives;
    uint64_t dense_bytes_sent; /* what the payloads would have been, dense */
    uint64_t wire_bytes_sent;  /* what was sent: frames and envelopes */
    uint64_t wire_bytes_received;
    uint64_t n_frames_sent[SPCCL_N_FORMATS_MAX]; /* by spccl_format */
    uint64_t buffer_bytes; /* memory the communicator holds now, shared rings included */
} spccl_stats;
SPCCL_API spccl_status spccl_comm_stats(spccl_comm *comm, spccl_stats *out);
/* Which transport carries the traffic to `peer`, and why: one line, valid until destroy. */
SPCCL_API spccl_status spccl_comm_describe_link(spccl_comm *comm, int peer, const char **out_text);

/* ---- collectives -------------------------------------------------------------------------------- */

/* All of them: buffers are host memory (GPUs: below), contiguous, aligned to the element, borrowed until the
 * request is done. With `req` NULL the call blocks until done; otherwise it returns at once and the
 * caller frees *req with spccl_request_free. Calls on one communicator must come in the same order
 * on every rank, from one thread at a time; several may be in flight. Any count, 0 included.
 * Errors at the call: ARG, DTYPE, ALIAS, STATE, NOMEM, or the error that broke the communicator.
 * Errors when waiting: PEER, TIMEOUT, MISMATCH, ABORTED, FORMAT. Then the communicator is broken. */

/* out[r * n_elems .. ] = rank r's `in`.
 *   in   [n_elems]; may be out + rank * n_elems exactly (in place), else must not overlap out
 *   out  [world_size * n_elems] */
SPCCL_API spccl_status spccl_all_gather(spccl_comm *comm, const void *in, void *out, size_t n_elems,
                                        spccl_dtype dtype, spccl_request **req);
/* out = the reduction of everyone's block `rank` of `in`.
 *   in   [world_size * n_elems]
 *   out  [n_elems]; may be in + rank * n_elems exactly (in place), else must not overlap in */
SPCCL_API spccl_status spccl_reduce_scatter(spccl_comm *comm, const void *in, void *out, size_t n_elems,
                                            spccl_dtype dtype, spccl_redop op, spccl_request **req);
/* out = the reduction of everyone's `in`.
 *   in, out  [n_elems]; equal (in place) or not overlapping */
SPCCL_API spccl_status spccl_all_reduce(spccl_comm *comm, const void *in, void *out, size_t n_elems,
                                        spccl_dtype dtype, spccl_redop op, spccl_request **req);
/* Every rank's `buf` becomes root's.
 *   buf  [n_elems] */
SPCCL_API spccl_status spccl_broadcast(spccl_comm *comm, void *buf, size_t n_elems, spccl_dtype dtype,
                                       int root, spccl_request **req);

/* SPCCL_AGAIN while under way, else how it ended. Never blocks. Threads: any. */
SPCCL_API spccl_status spccl_request_test(spccl_request *req);
/* Wait until done or until `timeout_ms` passed (SPCCL_ERR_TIMEOUT; the request goes on, the buffers
 * stay borrowed). timeout_ms < 0: until the collective's own deadline. Threads: any. */
SPCCL_API spccl_status spccl_request_wait(spccl_request *req, int64_t timeout_ms);
/* The error text of a failed request; "" otherwise. Valid until spccl_request_free. */
SPCCL_API const char *spccl_request_error(spccl_request *req);
/* Call `fn(ctx, status)` once when the request is done: from the progress thread (or the thread that
 * drives it), or at once if it is done already. Callbacks of one communicator run in the order in
 * which the collectives were issued. `fn` must not call back into the same communicator except to
 * issue collectives with a request. At most one callback per request. */
SPCCL_API spccl_status spccl_request_on_done(spccl_request *req, void (*fn)(void *ctx, spccl_status status),
                                             void *ctx);
/* Give the handle back; a collective still under way goes on without it. Accepts NULL. */
SPCCL_API void spccl_request_free(spccl_request *req);

/* ---- CUDA ------------------------------------------------------------------------------------------ */

/* Collectives on GPU memory between GPUs that can map each other's memory (NVLink, PCIe peer access): one
 * launch each, on the caller's stream, ordered like any other kernel there. No call waits for the GPU or
 * reads a size from it, so all of them can be captured into CUDA graphs and replayed. The bits are those of
 * the host collectives. `stream` is a cudaStream_t (NULL = the default stream) of the communicator's device.
 */
typedef struct spccl_cuda_config {
    size_t struct_bytes; /* sizeof(spccl_cuda_config) */
    int device;          /* CUDA ordinal of this rank's GPU; -1 = current on the calling thread */
    uint32_t max_ctas; /* most thread blocks (one per multiprocessor) of a collective; 0 = all. SPCCL_MAX_CTAS
                          wins */
    size_t inbox_bytes; /* most GPU memory for what peers send here; 0 = 256 MiB. SPCCL_INBOX_BYTES wins */
    int32_t decline;    /* 1: this rank keeps its GPU out. All ranks get UNREACHABLE, which names it */
    uint32_t fallback;  /* what the caller does instead after UNREACHABLE or UNSUPPORTED, as a number of its
                           own: MISMATCH unless all ranks give the same */
    uint32_t caller_orders; /* 1: the caller keeps the launches in order; see spccl_cuda_set_end_event */
    uint32_t reserved;      /* 0 */
} spccl_cuda_config;
#define SPCCL_CUDA_CONFIG_INIT                                                                               \
    {                                                                                                        \
        sizeof(spccl_cuda_config), -1, 0, 0, 0, 0, 0, 0                                                      \
    }

/* Number of GPUs this process can use: 0 without a GPU, a driver, or CUDA in this build. Never fails. */
SPCCL_API int spccl_cuda_device_count(void);

/* Give a communicator its GPU: allocates this rank's inbox and maps those of the peers. All ranks call it,
 * once, in the same place of their order of calls; returns when all inboxes are mapped. Errors: ARG, SETTING,
 * STATE (done already), UNSUPPORTED (no CUDA in this build), DEVICE, NOMEM (too little GPU memory: the text
 * says how much is needed and free), UNREACHABLE (a peer's GPU cannot be mapped: the text says which pair and
 * why; or a rank declined), MISMATCH, PEER, TIMEOUT. After UNREACHABLE, which all ranks get, the communicator
 * works on host memory as before. */
SPCCL_API spccl_status spccl_cuda_attach(spccl_comm *comm, const spccl_cuda_config *config);

/* As the functions without `cuda`, on memory of the communicator's GPU. Return once launched; a rank that
 * does not take part, dies or aborts ends the kernel within the communicator's timeout, breaks the
 * communicator (spccl_comm_async_error says who and where), and leaves the GPU usable. Errors at the call:
 * ARG (also memory of the host or of another GPU), DTYPE, ALIAS, STATE (not attached), DEVICE, or what broke
 * the communicator. */
SPCCL_API spccl_status spccl_cuda_all_gather(spccl_comm *comm, const void *in, void *out, size_t n_elems,
                                             spccl_dtype dtype, void *stream);
SPCCL_API spccl_status spccl_cuda_reduce_scatter(spccl_comm *comm, const void *in, void *out, size_t n_elems,
                                                 spccl_dtype dtype, spccl_redop op, void *stream);
SPCCL_API spccl_status spccl_cuda_all_reduce(spccl_comm *comm, const void *in, void *out, size_t n_elems,
                                             spccl_dtype dtype, spccl_redop op, void *stream);
SPCCL_API spccl_status spccl_cuda_broadcast(spccl_comm *comm, void *buf, size_t n_elems, spccl_dtype dtype,
                                            int root, void *stream);
/* Wait on the host until `stream` has done what is on it, or the communicator is broken, or `timeout_ms`
 * passed (SPCCL_ERR_TIMEOUT; < 0: the communicator's). Not while the stream is capturing. */
SPCCL_API spccl_status spccl_cuda_wait(spccl_comm *comm, void *stream, int64_t timeout_ms);

/* For a caller that attached with config.caller_orders. The launches of a communicator share buffers, so they
 * must run one after the other on the GPU, in the order of the calls. By default the library sees to that:
 * it asks each stream whether it is being captured, records an event after each launch and lets other streams
 * wait for it. A caller who does the same for work of others too (NCCL's) then pays for it once.
 * After each launch outside of captures such a caller records an event behind it and names it here:
 * spccl_comm_destroy waits for the event named last before it frees memory.
 *   event  cudaEvent_t, borrowed until another is named or spccl_comm_destroy has returned
 * Errors: ARG, STATE. */
SPCCL_API spccl_status spccl_cuda_set_end_event(spccl_comm *comm, void *event);

/* What the GPU part of a communicator holds and has done. Reads GPU memory: waits for a copy of a few KiB,
 * for no stream. */
typedef struct spccl_cuda_stats {
    size_t struct_bytes; /* set by the caller: sizeof(spccl_cuda_stats) */
    int device;
    uint32_t n_ctas;          /* most that a collective uses */
    uint64_t inbox_bytes;     /* GPU memory held for peers */
    uint64_t n_collectives;   /* launches and captures */
    uint64_t wire_bytes_sent; /* bytes of frames written to peers, by launches that have ended */
    uint64_t n_frames_sent[SPCCL_N_FORMATS_MAX]; /* by spccl_format */
} spccl_cuda_stats;
SPCCL_API spccl_status spccl_cuda_get_stats(spccl_comm *comm, spccl_cuda_stats *out);

/* The codec on GPU memory. Slices are shorter than the host's default, so that a block holds one on chip:
 * 16 KiB of the dtype. The bytes are those that spccl_encode writes with the same slice_elems. */

/* Elements per frame for `wanted` (0 = the default, 16 KiB; else a multiple of 2048 up to that); 0 if that is
 * not possible. */
SPCCL_API uint32_t spccl_cuda_slice_elems(spccl_dtype dtype, uint32_t wanted);
/* Bytes of scratch that spccl_cuda_encode wants. */
SPCCL_API size_t spccl_cuda_encode_scratch_bytes(size_t n_elems, spccl_dtype dtype, uint32_t slice_elems);

/* Encode `x` into `dst`, on the CUDA stream `stream`. All pointers are memory of the current device.
 *   x          [n_elems], n_elems > 0
 *   options    as for spccl_encode (base on the device too); NULL = defaults
 *   dst        dst_cap bytes, aligned to 16; spccl_encode_bound() bytes always suffice
 *   offsets    [n_slices + 1] u64: where each frame starts; the last one is the size of the encoded array
 *   scratch    spccl_cuda_encode_scratch_bytes() bytes, aligned to 16; free again when the work is done
 *   status     u32: 0, or minus the spccl_status that spccl_encode would have returned (DST_SMALL,
 *              UNSUPPORTED); then dst holds no encoded array
 * Errors at the call: ARG, DTYPE, UNSUPPORTED (no CUDA in this build; slice_elems), DEVICE. */
SPCCL_API spccl_status spccl_cuda_encode(const void *x, size_t n_elems, spccl_dtype dtype,
                                         const spccl_encode_options *options, void *dst, size_t dst_cap,
                                         uint64_t *offsets, void *scratch, uint32_t *status, void *stream);
/* Apply an encoded array to `dst` [n_elems], on the CUDA stream `stream`. Every frame is checked completely
 * before anything of it is applied; frames are applied independently, so if one is bad the good ones are
 * applied all the same.
 *   offsets      as spccl_cuda_encode wrote them; checked, not trusted
 *   slice_elems  of the encoded array (0 = default)
 *   status       u32: 0, or minus the spccl_status of a bad frame (FORMAT, VERSION, FRAME)
 * Errors at the call: as above. */
SPCCL_API spccl_status spccl_cuda_decode(const void *frames, size_t frames_bytes, const uint64_t *offsets,
                                         spccl_verb verb, void *dst, size_t n_elems, spccl_dtype dtype,
                                         uint32_t slice_elems, uint32_t *status, void *stream);

/* ---- this build ---------------------------------------------------------------------------------- */

/* Walk through "what is in this build, and why" and every SPCCL_* setting: fills the i-th entry and
 * returns SPCCL_OK, or SPCCL_ERR_ARG past the last. Texts are valid until this thread's next call. */
typedef struct spccl_info_entry {
    size_t struct_bytes; /* set by the caller: sizeof(spccl_info_entry) */
    const char *kind;    /* "kernels", "transport", "part" or "setting" */
    const char *name;    /* "tcp", "avx512", "SPCCL_FORMAT" */
    const char *value;   /* "in", "in, chosen", "absent"; for a setting its value now */
    const char *why;     /* reason, and how to get what is absent; for a setting its help */
} spccl_info_entry;
SPCCL_API spccl_status spccl_info(size_t i, spccl_info_entry *out);

#ifdef __cplusplus
}
#endif
#endif
