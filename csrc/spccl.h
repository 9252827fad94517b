/* spccl.h - collectives for data that is mostly zeros: the interface of libspccl. What may change with each version is
 * in spccl_experimental.h. C11 and C++, standard headers only. The words are those of docs/GLOSSARY.md.
 *
 * Errors. A function that can fail returns `spccl_status`. Its results go through its last parameters and are
 * unchanged after a failure, but a failed collective may have written part of its output buffer. After a failure
 * spccl_last_error() gives one line for the calling thread: who, where, got, wanted, what to do.
 *
 * Bits. "Zero" always means that all bits are zero. -0.0, NaN payloads, infinities and denormals arrive bit for bit.
 * Reductions add in rank order 0, 1, 2, ... starting from +0.0, so a -0.0 of an input changes no SUM or AVG and need
 * not be sent. float16 and bfloat16 are added in float32 and rounded once. All ranks and all runs get the same bits,
 * whatever the format, transport and schedule. Schedules ring and hierarchical, and plans of users, run only when asked
 * for: they may add in other orders, the same on all ranks and in all runs (docs/ALGORITHMS.md, docs/SCHEDULES.md). Format pici is that of Hough et al.
 *
 * Structs. A struct that begins with `struct_bytes` may get more fields at its end in a later version. Initialise
 * options with their INIT macro, and results with { .struct_bytes = sizeof(the struct) }. Then a program works with
 * an older and with a newer library. The rules are in docs/ARCHITECTURE.md, "How the C interface grows". */
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
#define SPCCL_VERSION_MINOR 2
#define SPCCL_VERSION_PATCH 0
#define SPCCL_VERSION_TEXT "0.2.0"

/* ---- status ---------------------------------------------------------------------------------- */
/* 0: the call succeeded; above 0: not yet, call again; below 0: it failed. The numbers never change.
 * docs/ERRORS.md says for each what happened and what to do. */
typedef enum spccl_status {
    SPCCL_OK = 0,
    SPCCL_AGAIN = 1,             /* not finished yet; not an error */
    SPCCL_ERR_ARG = -10,         /* an argument is out of range or NULL */
    SPCCL_ERR_DTYPE = -11,       /* dtype unknown, or not possible for this operation */
    SPCCL_ERR_DST_SMALL = -12,   /* the destination is too small */
    SPCCL_ERR_ALIAS = -13,       /* buffers overlap, and the operation does not allow it */
    SPCCL_ERR_STATE = -14,       /* handle used after destroy began, or in the wrong order */
    SPCCL_ERR_UNSUPPORTED = -15, /* valid, but this build or this format cannot do it */
    SPCCL_ERR_SETTING = -16,     /* an SPCCL_* variable or an option has a bad value */
    SPCCL_ERR_FORMAT = -20,      /* a frame breaks a rule of docs/FORMAT.md */
    SPCCL_ERR_VERSION = -21,     /* a frame, or kernels that use channels, are of another version */
    SPCCL_ERR_FRAME = -22,       /* a valid frame of another dtype, length or kind than wanted */
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
/* "0.2.0": the version of the loaded library. SPCCL_VERSION_TEXT is that of the header. */
SPCCL_API const char *spccl_version(void);

/* ---- types ------------------------------------------------------------------------------------ */
/* Frames hold these numbers too (docs/FORMAT.md, section 2). */
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

/* How a frame lays out its slice. AUTO chooses by size and cost. The choice changes no bit of a result. */
typedef enum spccl_format {
    SPCCL_FORMAT_AUTO = -1,
    SPCCL_FORMAT_EMPTY = 0,
    SPCCL_FORMAT_TILE = 1,
    SPCCL_FORMAT_PICI = 2,
    SPCCL_FORMAT_COO = 3,
    SPCCL_FORMAT_DENSE = 4,
    SPCCL_FORMAT_DELTA = 5 /* of frames of version 2 only: spccl_delta_encode; no choice for a slice */
} spccl_format;
#define SPCCL_N_FORMATS 5      /* of slices: 0 to 4 */
#define SPCCL_N_FORMATS_MAX 16 /* length of arrays by format; leaves space for later formats */

/* What decoding does with each element of the destination. A frame lists some elements and their values;
 * the others are absent. In a dense frame the elements whose bits are all zero count as absent, so the
 * result does not depend on the format. */
typedef enum spccl_verb {
    SPCCL_SET = 0,      /* listed elements take their value, absent ones become zero */
    SPCCL_ADD = 1,      /* listed elements are added, absent ones stay */
    SPCCL_OVERWRITE = 2 /* listed elements take their value, absent ones stay */
} spccl_verb;

/* Absent elements are reduced as zeros. AVG divides the sum by the world size; integers round toward zero. If
 * a rank has a NaN, MIN and MAX give a NaN. Of equal values they give the bits of the lowest rank. */
typedef enum spccl_redop {
    SPCCL_SUM = 0,
    SPCCL_AVG = 1,
    SPCCL_MIN = 2,
    SPCCL_MAX = 3,
    SPCCL_PROD = 4
} spccl_redop;

/* Bytes per element; 0 for an unknown dtype. */
SPCCL_API size_t spccl_dtype_bytes(spccl_dtype dtype);
/* "float32", "tile" and the like; "?" for an unknown number. */
SPCCL_API const char *spccl_dtype_name(spccl_dtype dtype);
SPCCL_API const char *spccl_format_name(spccl_format format);

/* ---- codec: arrays to bytes and back ------------------------------------------------------------ */
/* An encoded array is one or more frames back to back (docs/FORMAT.md, section 1). Each holds one slice. */
#define SPCCL_SLICE_ELEMS_MAX 0x80000000u /* the largest slice_elems */
typedef struct spccl_encode_options {
    size_t struct_bytes;  /* sizeof(spccl_encode_options) */
    const void *base;     /* [n_elems] or NULL; frames list the elements that differ from it in any bit */
    spccl_format format;  /* AUTO, or the format that every slice must have */
    uint32_t slice_elems; /* per frame: a multiple of 2048, at most SPCCL_SLICE_ELEMS_MAX; 0 = 65536 */
} spccl_encode_options;
#define SPCCL_ENCODE_OPTIONS_INIT                                                                            \
    {                                                                                                        \
        sizeof(spccl_encode_options), NULL, SPCCL_FORMAT_AUTO, 0                                             \
    }

/* Bytes that always suffice for spccl_encode with these arguments; 0 if one is bad or the size overflows. */
SPCCL_API size_t spccl_encode_bound(size_t n_elems, spccl_dtype dtype, const spccl_encode_options *options);
/* Encode `x` into `dst`.
 *   x          [n_elems] of `dtype`, host memory, borrowed until return; any alignment
 *   options    NULL = defaults
 *   dst        dst_cap bytes, not overlapping x; spccl_encode_bound() bytes always suffice
 *   out_bytes  bytes written
 * A forced TILE fails with SPCCL_ERR_UNSUPPORTED if all 256 elements of a block are listed, a forced EMPTY if
 * any element is listed.
 * Errors: ARG, DTYPE, DST_SMALL, ALIAS, UNSUPPORTED, NOMEM.  Threads: any.  Source: FORMAT.md. */
SPCCL_API spccl_status spccl_encode(const void *x, size_t n_elems, spccl_dtype dtype,
                                    const spccl_encode_options *options, void *dst, size_t dst_cap,
                                    size_t *out_bytes);

/* Apply an encoded array to `dst`, frame by frame. A frame is checked completely before it is applied.
 * After a bad frame the elements before it have been written; its own and all later ones are unchanged.
 *   encoded    encoded_bytes bytes, borrowed until return; any bytes are safe, as all are checked
 *   dst        [n_elems] of `dtype`; the encoded array must describe exactly n_elems elements
 * SPCCL_SET refuses an array that was encoded with a base (a delta).
 * Errors: ARG, DTYPE, ALIAS, FORMAT, VERSION, FRAME, UNSUPPORTED (ADD of float8).  Threads: any. */
SPCCL_API spccl_status spccl_decode(const void *encoded, size_t encoded_bytes, spccl_verb verb, void *dst,
                                    size_t n_elems, spccl_dtype dtype);

/* What the header of a frame says. Offsets count from the start of the frame; 0: there is no such section. */
typedef struct spccl_frame_info {
    size_t struct_bytes; /* set by the caller: sizeof(spccl_frame_info) */
    uint32_t version;
    spccl_format format;
    spccl_dtype dtype;
    uint32_t is_delta; /* 1: encoded against a base */
    uint64_t n_elems;
    uint64_t nnz; /* elements listed */
    uint64_t frame_bytes;
    uint64_t index_off, meta_off, values_off; /* of a delta of version 2: table, 0, 0 */
} spccl_frame_info;

/* Check the frame at the start of `encoded`, and describe it. Errors: ARG, FORMAT, VERSION.  Threads: any. */
SPCCL_API spccl_status spccl_frame_inspect(const void *encoded, size_t encoded_bytes, spccl_frame_info *out);

/* ---- deltas: what changed in weights, for receivers that have the old ones -------------------------- */
/* A delta is a frame of version 2 (docs/FORMAT.md, section 11): which elements of an array differ from its base in any
 * bit, and their new bits, or how far they are from the old ones. The functions take lists, one entry per array. All
 * memory is host memory, borrowed until return; arrays have any alignment. A text names the entry: "sources[3]".
 *
 * Checksums. Of a tensor: the sum, mod 2^64, over its elements of a hash of key, place in the tensor and bits. The sum
 * change of a delta is the checksum afterwards less the one before, so it follows from the changed elements alone. Both
 * add up over parts of a tensor, and hence over ranks that have a part each. */
typedef struct spccl_delta_source { /* one array, or a part of a tensor; never changes */
    const void *x;                  /* [n_elems] of x_dtype: what the array is now */
    const void *base;               /* [n_elems] of dtype: what receivers have; written with options->old */
    uint64_t n_elems;               /* at most 2^40 */
    uint64_t first;                 /* place of element 0 in its tensor, for the sum change */
    spccl_dtype x_dtype; /* dtype; or FLOAT32 where that is BFLOAT16 or FLOAT16: x is rounded to nearest,
                                       ties to even, before it is compared; a NaN keeps sign and upper bits */
    spccl_dtype dtype;
    uint64_t key; /* of the sum change; any number */
} spccl_delta_source;
typedef struct spccl_delta_frame { /* result, per source; never changes */
    uint64_t offset, bytes;        /* where the frame lies in dst: a multiple of 8 */
    uint64_t nnz;                  /* elements that changed */
    uint64_t sum_change;
} spccl_delta_frame;
typedef struct spccl_delta_options {
    size_t struct_bytes; /* sizeof(spccl_delta_options) */
    uint64_t
        raw; /* 1: all values as they are. 0: as differences to the base where that is smaller; such a frame
                     must be applied once, to exactly that base */
    void *
        old; /* NULL: bases stay. Else, when all frames are written, each base becomes what x is, and `old` gets
                     what it was, as of spccl_delta_check: of each source its changed elements in order, up to a
                     multiple of 8 bytes. spccl_delta_undo of the frames puts it back, if they cannot be sent */
    size_t old_cap; /* bytes of old */
} spccl_delta_options;
#define SPCCL_DELTA_OPTIONS_INIT                                                                             \
    {                                                                                                        \
        sizeof(spccl_delta_options), 0, NULL, 0                                                              \
    }
/* Bytes that always suffice for the frame of one source; 0 if n_elems or dtype is bad. */
SPCCL_API size_t spccl_delta_bound(uint64_t n_elems, spccl_dtype dtype);
/* Encode each source against its base, frames back to back. The bytes follow from the sources and `raw` alone. Without
 * options->old the base is not written: spccl_delta_apply of the frame advances it. With it no base may overlap another base
 * or an x.
 *   options    NULL = defaults
 *   dst        dst_cap bytes, overlapping no source; the sum of all spccl_delta_bound() suffices
 *   frames     [n_sources]
 *   out_bytes  bytes written
 * After a failure dst, frames and old hold any values, and bases are as before.
 * Errors: ARG, DTYPE, DST_SMALL, ALIAS, NOMEM, UNSUPPORTED (a frame above 16 GiB).  Threads: any. */
SPCCL_API spccl_status spccl_delta_encode(const spccl_delta_source *sources, size_t n_sources,
                                          const spccl_delta_options *options, void *dst, size_t dst_cap,
                                          spccl_delta_frame *frames, size_t *out_bytes);

/* Where a box of the tensor lies. Element i of the tensor is in row i / row_elems, column i % row_elems. Those in the box
 * lie (row - row_first) * dst_row_elems + column - col_first elements behind dst. */
typedef struct spccl_delta_place { /* never changes */
    void *dst;
    uint64_t row_elems;
    uint64_t row_first, n_rows;
    uint64_t col_first, n_cols; /* col_first + n_cols <= row_elems */
    uint64_t dst_row_elems;     /* at least n_cols */
} spccl_delta_place;
typedef struct spccl_delta_target { /* one frame and where its elements lie; never changes */
    const void *frame;              /* frame_bytes bytes, exactly one frame */
    size_t frame_bytes;
    uint64_t n_elems, first; /* as the frame was encoded */
    /* [n_places]: boxes of the tensor, which may overlap; their memory does not. Elements in no box are passed over. */
    const spccl_delta_place *places;
    size_t n_places;
    uint64_t key;
    spccl_dtype dtype;
    uint32_t reserved; /* zero */
} spccl_delta_target;
/* Check all frames completely, any bytes are safe, and look at what lies at the places now. Writes no place. An element
 * of several boxes counts once, and must have the same bits in all of them (else FRAME).
 *   old            old_cap bytes: gets the old values, for spccl_delta_undo; NULL: they are not kept
 *   sum_changes    [n_targets] of the elements in boxes; or NULL
 *   out_old_bytes  bytes that `old` needs: per target its nnz elements, up to a multiple of 8; or NULL
 * After a failure `old` and sum_changes hold any values.
 * Errors: ARG, DTYPE, FORMAT, VERSION, FRAME (a frame of another dtype or length), DST_SMALL, NOMEM.  Threads: any. */
SPCCL_API spccl_status spccl_delta_check(const spccl_delta_target *targets, size_t n_targets, void *old,
                                         size_t old_cap, uint64_t *sum_changes, size_t *out_old_bytes);
/* Write the new values to the places. It cannot fail on frames that spccl_delta_check accepted and nobody changed since.
 * Headers and tables of all frames are checked before the first write, each slice of 65536 elements before it is written;
 * so after a FORMAT part of the places may be new. Errors: as for spccl_delta_check.  Threads: any. */
SPCCL_API spccl_status spccl_delta_apply(const spccl_delta_target *targets, size_t n_targets);
/* Put back what spccl_delta_check stored in `old`, for the same targets, whether all, some or none had been applied.
 * Errors: as for spccl_delta_check, and ARG: old_bytes is not what it said.  Threads: any. */
SPCCL_API spccl_status spccl_delta_undo(const spccl_delta_target *targets, size_t n_targets, const void *old,
                                        size_t old_bytes);
/* Checksum of x [n_elems] of dtype, a tensor or its part from element `first` on. Errors: ARG, DTYPE.  Threads: any. */
SPCCL_API spccl_status spccl_delta_checksum(const void *x, uint64_t n_elems, spccl_dtype dtype,
                                            uint64_t first, uint64_t key, uint64_t *out);

/* ---- communicators ------------------------------------------------------------------------------ */
/* A child of fork cannot use its parent's handles: calls on them fail with SPCCL_ERR_STATE, but
 * spccl_comm_destroy and spccl_request_free do nothing. The child may make groups of its own. */
typedef struct spccl_comm spccl_comm;       /* one rank's membership of one group */
typedef struct spccl_request spccl_request; /* one collective under way */

typedef struct spccl_config {
    size_t struct_bytes;    /* sizeof(spccl_config) */
    const char *name;       /* group name for texts and keys; borrowed until return; NULL = "world" */
    int64_t timeout_ms;     /* deadline of creation and of every collective; 0 = default (600000) */
    spccl_format format;    /* AUTO, or the format of every slice; the setting SPCCL_FORMAT wins */
    uint32_t slice_bytes;   /* dense bytes per slice; 0 = default */
    const char *transports; /* comma list tried in order, for example "shm,tcp"; NULL = default */
    uint32_t n_sockets;     /* TCP sockets per peer and queue; 0 = default */
    const uint8_t *secret;  /* [32] job secret; NULL: rank 0 draws one and puts it into the store */
    const char *host_id;    /* ranks of different names are on different hosts; NULL: the kernel's id */
    const char *schedule;   /* one of SPCCL_SCHEDULE, which wins; the same on all ranks; NULL: auto */
} spccl_config;
#define SPCCL_CONFIG_INIT                                                                                    \
    {                                                                                                        \
        sizeof(spccl_config), NULL, 0, SPCCL_FORMAT_AUTO, 0, NULL, 0, NULL, NULL, NULL                       \
    }

/* A key-value store that all ranks reach: torch's Store, or another. `set` publishes a value. `get` waits
 * until the key has a value, for at most `timeout_ms` (then SPCCL_ERR_TIMEOUT). It copies at most `cap` bytes
 * and puts their number into *out_bytes. Only spccl_comm_create calls them, on its thread. */
typedef struct spccl_store {
    size_t struct_bytes; /* sizeof(spccl_store) */
    void *ctx;           /* the first argument of both functions */
    spccl_status (*set)(void *ctx, const char *key, const void *data, size_t bytes);
    spccl_status (*get)(void *ctx, const char *key, void *buf, size_t cap, int64_t timeout_ms,
                        size_t *out_bytes);
} spccl_store;

/* Join a group. Returns when this rank is connected to all others.
 *   store, config  borrowed until return; config NULL = defaults
 *   out            caller frees with spccl_comm_destroy
 * Errors: ARG, SETTING, NOMEM, SYSTEM, TIMEOUT, AUTH, UNREACHABLE, PEER, MISMATCH. */
SPCCL_API spccl_status spccl_comm_create(const spccl_store *store, int rank, int world_size,
                                         const spccl_config *config, spccl_comm **out);

/* Groups without a store, as in NCCL: all ranks pass one id to spccl_comm_init_rank. The process that made it serves the
 * rendezvous until the group has formed, or no rank was connected for SPCCL_TIMEOUT_MS: on every address of its host, or
 * where SPCCL_RENDEZVOUS_ADDR says. The id is good for one group. Its secret keeps other programs out. */
typedef struct spccl_unique_id {
    char bytes[128];
} spccl_unique_id;
SPCCL_API spccl_status spccl_get_unique_id(spccl_unique_id *out);
SPCCL_API spccl_status spccl_comm_init_rank(const spccl_unique_id *id, int rank, int world_size,
                                            const spccl_config *config, spccl_comm **out);

/* The host of this process, as communicators see it: ranks with the same bytes are on one host. `host_id`: as in
 * spccl_config. Threads: any. Errors: ARG (out is NULL), SYSTEM. */
typedef struct spccl_host {
    char bytes[44];
} spccl_host;
SPCCL_API spccl_status spccl_get_host(const char *host_id, spccl_host *out);

SPCCL_API int spccl_comm_rank(const spccl_comm *comm);
SPCCL_API int spccl_comm_world_size(const spccl_comm *comm);
/* Deadline of the collectives issued from now on. Errors: ARG (timeout_ms <= 0). */
SPCCL_API spccl_status spccl_comm_set_timeout(spccl_comm *comm, int64_t timeout_ms);
/* SPCCL_OK, or the first error that broke this communicator; its text is then spccl_last_error().
 * A broken communicator fails every call with that error. Threads: any. */
SPCCL_API spccl_status spccl_comm_async_error(spccl_comm *comm);
/* Break the communicator at once, here and on the peers: every wait ends with SPCCL_ERR_ABORTED. `reason` is
 * one line for the error texts, or NULL. Threads: any. Idempotent. */
SPCCL_API spccl_status spccl_comm_abort(spccl_comm *comm, const char *reason);
/* Free a communicator, after its collectives under way unless it is broken. With a GPU attached, destroy also
 * waits for the other ranks to call it, for at most 10 s; captured graphs with its collectives must not be
 * replayed any more. Requests stay valid. Accepts NULL. No other thread may use the communicator. */
SPCCL_API spccl_status spccl_comm_destroy(spccl_comm *comm);

typedef struct spccl_stats { /* what a communicator has done since it was created */
    size_t struct_bytes;     /* set by the caller: sizeof(spccl_stats) */
    uint64_t n_collectives;
    uint64_t dense_bytes_sent; /* what the same data would have been without compression */
    uint64_t wire_bytes_sent;  /* what was sent instead: frames and envelopes */
    uint64_t wire_bytes_received;
    uint64_t n_frames_sent[SPCCL_N_FORMATS_MAX]; /* by spccl_format */
    uint64_t buffer_bytes; /* memory that the communicator holds now, with shared rings */
} spccl_stats;
SPCCL_API spccl_status spccl_comm_stats(spccl_comm *comm, spccl_stats *out);
/* One line: which transport connects this rank to `peer`, and why; with a GPU, how frames go. Valid until destroy. */
SPCCL_API spccl_status spccl_comm_describe_link(spccl_comm *comm, int peer, const char **out_text);
/* This host's IP address on connections to other hosts; "127.0.0.1" if all ranks are here. Valid until the next call. */
SPCCL_API spccl_status spccl_comm_local_ip(spccl_comm *comm, const char **out_text);
/* One line: which schedule the i-th kind of call takes, why, and what the tuner does with it. Valid until the next call. ARG: no i-th. */
SPCCL_API spccl_status spccl_comm_describe_schedule(spccl_comm *comm, size_t i, const char **out_text);

/* ---- collectives -------------------------------------------------------------------------------- */
/* All collectives:
 *   Buffers are host memory (for GPU memory see below), contiguous, aligned to the element. They are borrowed
 *   until the request is done. n_elems may be 0.
 *   With `req` NULL the call blocks until the collective is done. Otherwise it returns at once, and the
 *   caller frees *req with spccl_request_free. Several collectives may be under way.
 *   All ranks must make the same calls on a communicator, in the same order. One thread at a time may call.
 * Errors of the call: ARG, DTYPE, ALIAS, STATE; NOMEM and SYSTEM, which break the communicator; what broke it before.
 * Errors of waiting: PEER, TIMEOUT, MISMATCH, ABORTED, FORMAT, NOMEM. They break the communicator. */

/* out[r * n_elems .. ] = rank r's `in`.
 *   in   [n_elems]; may be out + rank * n_elems exactly (in place), else must not overlap out
 *   out  [world_size * n_elems] */
SPCCL_API spccl_status spccl_all_gather(spccl_comm *comm, const void *in, void *out, size_t n_elems,
                                        spccl_dtype dtype, spccl_request **req);
/* out = the reduction over all ranks of block `rank` of their `in`. A block has n_elems elements.
 *   in   [world_size * n_elems]
 *   out  [n_elems]; may be in + rank * n_elems exactly (in place), else must not overlap in */
SPCCL_API spccl_status spccl_reduce_scatter(spccl_comm *comm, const void *in, void *out, size_t n_elems,
                                            spccl_dtype dtype, spccl_redop op, spccl_request **req);
/* out = the reduction over all ranks of `in`. Both [n_elems], and equal (in place) or not overlapping. */
SPCCL_API spccl_status spccl_all_reduce(spccl_comm *comm, const void *in, void *out, size_t n_elems,
                                        spccl_dtype dtype, spccl_redop op, spccl_request **req);
/* Every rank's `buf` [n_elems] gets the contents of `buf` of rank `root`. */
SPCCL_API spccl_status spccl_broadcast(spccl_comm *comm, void *buf, size_t n_elems, spccl_dtype dtype,
                                       int root, spccl_request **req);

/* SPCCL_AGAIN while the collective is under way, else its status. Never blocks. Threads: any. */
SPCCL_API spccl_status spccl_request_test(spccl_request *req);
/* Wait until the collective is done and return its status. After `timeout_ms` return SPCCL_ERR_TIMEOUT; the
 * collective goes on. timeout_ms < 0: until the collective's own deadline. Threads: any. */
SPCCL_API spccl_status spccl_request_wait(spccl_request *req, int64_t timeout_ms);
/* The error text of a failed request; "" otherwise. Valid until spccl_request_free. */
SPCCL_API const char *spccl_request_error(spccl_request *req);
/* Call `fn(ctx, status)` once: at once if the collective is done, else when it is, on the thread that makes progress
 * (the progress thread, or one in a blocking call). Callbacks of a communicator run in the order of its calls. `fn`
 * may call no function of it but collectives with a request. A request takes one callback. */
SPCCL_API spccl_status spccl_request_on_done(spccl_request *req, void (*fn)(void *ctx, spccl_status status),
                                             void *ctx);
/* Free the handle. A collective that is under way goes on without it. Accepts NULL. */
SPCCL_API void spccl_request_free(spccl_request *req);

/* ---- CUDA ------------------------------------------------------------------------------------------ */
/* Collectives on GPU memory, between GPUs that map each other's memory over NVLink or PCIe. Each is one launch on the
 * caller's stream; some plans of files take several. No call waits for the GPU or reads sizes from it: CUDA graphs can
 * hold all. The results have the same bits as those of the host collectives. `stream` is a cudaStream_t of the
 * communicator's GPU; NULL is the default stream. */
/* The settings SPCCL_MAX_CTAS, SPCCL_INBOX_BYTES and SPCCL_CUDA_ROUTE win over the program's. `fallback` says what the
 * caller does after UNREACHABLE or UNSUPPORTED. All ranks give the same number; else: MISMATCH. */
typedef struct spccl_cuda_config {
    size_t struct_bytes;    /* sizeof(spccl_cuda_config) */
    int device;             /* CUDA ordinal of this rank's GPU; -1 = the current one of the calling thread */
    int32_t decline;        /* 1: this rank wants no GPU collectives, so all ranks get UNREACHABLE */
    uint32_t max_ctas;      /* most thread blocks of a collective, one per multiprocessor; 0 = all */
    uint32_t between_hosts; /* 0, 1, 2: as SPCCL_CUDA_ROUTE=auto, spccl, one-host */
    size_t inbox_bytes;     /* most GPU memory for what peers send here; 0 = 256 MiB */
    uint32_t fallback;      /* any number, the same on all ranks */
    uint32_t caller_orders; /* 1: the caller keeps the launches in order; see spccl_cuda_set_end_event */
} spccl_cuda_config;
#define SPCCL_CUDA_CONFIG_INIT                                                                               \
    {                                                                                                        \
        sizeof(spccl_cuda_config), -1, 0, 0, 0, 0, 0, 0                                                      \
    }
/* Number of GPUs that this process can use: 0 without a GPU, a driver, or CUDA in this build. Never fails. */
SPCCL_API int spccl_cuda_device_count(void);
/* Give a communicator its GPU: allocate this rank's inbox, and map those of the peers. All ranks call it,
 * once, at the same place in their order of calls. Returns when all inboxes are mapped.
 * Errors: ARG, SETTING, DEVICE, MISMATCH, PEER, TIMEOUT, STATE (called before), UNSUPPORTED (no CUDA here), and
 *   NOMEM        too little GPU memory; the text says how much is needed and how much is free
 *   UNREACHABLE  a peer's GPU cannot be mapped, or a rank declined; the text says which and why. All ranks
 *                get this, and the communicator goes on with host memory */
SPCCL_API spccl_status spccl_cuda_attach(spccl_comm *comm, const spccl_cuda_config *config);
/* They return once the kernel is launched. If a rank does not take part, dies or aborts, the kernel ends within the
 * communicator's timeout. The communicator is then broken, spccl_comm_async_error says who was missing, and the GPU
 * stays usable. Errors of the call: ARG (also for host memory or another GPU's), DTYPE, ALIAS, STATE (no GPU is
 * attached), UNSUPPORTED (a plan that GPUs cannot run), DEVICE, or the error that broke the communicator. */
SPCCL_API spccl_status spccl_cuda_all_gather(spccl_comm *comm, const void *in, void *out, size_t n_elems,
                                             spccl_dtype dtype, void *stream);
SPCCL_API spccl_status spccl_cuda_reduce_scatter(spccl_comm *comm, const void *in, void *out, size_t n_elems,
                                                 spccl_dtype dtype, spccl_redop op, void *stream);
SPCCL_API spccl_status spccl_cuda_all_reduce(spccl_comm *comm, const void *in, void *out, size_t n_elems,
                                             spccl_dtype dtype, spccl_redop op, void *stream);
SPCCL_API spccl_status spccl_cuda_broadcast(spccl_comm *comm, void *buf, size_t n_elems, spccl_dtype dtype,
                                            int root, void *stream);
/* Wait on the host until `stream` is done, or the communicator is broken. TIMEOUT after `timeout_ms`; < 0: the
 * communicator's timeout. Not for a stream that is being captured. */
SPCCL_API spccl_status spccl_cuda_wait(spccl_comm *comm, void *stream, int64_t timeout_ms);
/* Options of the collectives on GPU memory that are called from now on. Those on host memory have none. */
typedef struct spccl_cuda_options {
    size_t struct_bytes; /* sizeof(spccl_cuda_options) */
    uint64_t max_ctas;   /* most thread blocks, at most spccl_cuda_stats.n_ctas; 0 = that many. All ranks give
                            the same, else MISMATCH breaks the communicator */
} spccl_cuda_options;
#define SPCCL_CUDA_OPTIONS_INIT                                                                              \
    {                                                                                                        \
        sizeof(spccl_cuda_options), 0                                                                        \
    }
/* options NULL: the defaults. Captured collectives keep theirs. Errors: ARG, STATE (no GPU is attached). */
SPCCL_API spccl_status spccl_cuda_set_options(spccl_comm *comm, const spccl_cuda_options *options);
/* For callers that attach with config.caller_orders. All launches of a communicator use the same buffers, so they
 * must run on the GPU one after the other, in the order of the calls. By default the library orders them with events.
 * With caller_orders the caller does, for other work too (such as NCCL's collectives). After each launch outside of
 * captures the caller records an event behind it and calls this function: spccl_comm_destroy waits for the last such
 * event before it frees memory.
 *   event  cudaEvent_t, borrowed until the next call or until spccl_comm_destroy returns
 * Errors: ARG (NULL, or attached without caller_orders), STATE (no GPU is attached). */
SPCCL_API spccl_status spccl_cuda_set_end_event(spccl_comm *comm, void *event);
/* What a communicator's GPU holds and has done. Reading waits for a copy of a few KiB, but for no stream. */
typedef struct spccl_cuda_stats {
    size_t struct_bytes; /* set by the caller: sizeof(spccl_cuda_stats) */
    int device;
    uint32_t n_ctas;            /* most thread blocks that a collective uses */
    uint64_t inbox_bytes;       /* GPU memory held for peers */
    uint64_t n_collectives;     /* launched or captured */
    uint64_t n_pruned_by_lists; /* of them, those of spccl_cuda_prune_all_reduce that exchange lists */
    uint64_t wire_bytes_sent;   /* bytes of frames that ended launches have written to peers */
    uint64_t n_frames_sent[SPCCL_N_FORMATS_MAX]; /* by spccl_format */
    uint64_t pinned_bytes;                       /* pinned memory held for peers on other hosts */
    uint32_t n_proxies, n_remote;                /* proxy threads of this rank; peers on other hosts */
} spccl_cuda_stats;
SPCCL_API spccl_status spccl_cuda_get_stats(spccl_comm *comm, spccl_cuda_stats *out);
/* The codec on GPU memory. A slice fits into a thread block's shared memory: 16 KiB of elements by default.
 * spccl_encode writes the same bytes with the same slice_elems. */
/* Elements per frame: `wanted` if it is a multiple of 2048 of at most 16 KiB; 16 KiB if it is 0; else 0. */
SPCCL_API uint32_t spccl_cuda_slice_elems(spccl_dtype dtype, uint32_t wanted);
/* Bytes of scratch memory that spccl_cuda_encode needs. */
SPCCL_API size_t spccl_cuda_encode_scratch_bytes(size_t n_elems, spccl_dtype dtype, uint32_t slice_elems);

/* Encode `x` into `dst`, on `stream`. All pointers are memory of the current GPU.
 *   x          [n_elems], n_elems > 0
 *   options    as for spccl_encode, but `base` is GPU memory too; NULL = defaults
 *   dst        dst_cap bytes, aligned to 16; spccl_encode_bound() bytes always suffice
 *   offsets    [n_slices + 1] u64: where each frame starts, and last the size of the encoded array
 *   scratch    spccl_cuda_encode_scratch_bytes() bytes, aligned to 16; in use until `stream` is done
 *   status     u32: 0, or minus the spccl_status that spccl_encode would have returned (DST_SMALL,
 *              UNSUPPORTED); then dst holds no encoded array
 * Errors at the call: ARG, DTYPE, UNSUPPORTED (no CUDA in this build; slice_elems), DEVICE. */
SPCCL_API spccl_status spccl_cuda_encode(const void *x, size_t n_elems, spccl_dtype dtype,
                                         const spccl_encode_options *options, void *dst, size_t dst_cap,
                                         uint64_t *offsets, void *scratch, uint32_t *status, void *stream);
/* Apply an encoded array to `dst` [n_elems], on `stream`. Each frame is checked; bad ones are left out.
 *   offsets      as spccl_cuda_encode wrote them; wrong ones are found
 *   slice_elems  of the encoded array (0 = default)
 *   status       u32: 0, or minus the spccl_status of a bad frame (FORMAT, VERSION, FRAME)
 * Errors at the call: as above. */
SPCCL_API spccl_status spccl_cuda_decode(const void *frames, size_t frames_bytes, const uint64_t *offsets,
                                         spccl_verb verb, void *dst, size_t n_elems, spccl_dtype dtype,
                                         uint32_t slice_elems, uint32_t *status, void *stream);

/* spccl_delta_encode on the current GPU, on `stream`: the same bytes and results, also after a failure. It waits until they
 * are there, so it cannot be captured. x, base, dst and old are memory of that GPU, arrays aligned to their elements, dst
 * and old to 8 bytes; sources, options, frames and out_bytes are in host memory. x and base are read once, where dst_cap is
 * at least twice what is written and few elements change; else twice. dst [out_bytes, dst_cap) holds any values afterwards.
 * options->old advances bases in the same pass; spccl_cuda_delta_check and _apply of the frames take longer.
 * Errors: those of spccl_delta_encode; UNSUPPORTED (no CUDA in this build); DEVICE (bases may hold part of the change);
 * TIMEOUT (SPCCL_TIMEOUT_MS; the GPU may come to write dst, old and bases later; memory of the call is then lost).
 * Threads: any. */
SPCCL_API spccl_status spccl_cuda_delta_encode(const spccl_delta_source *sources, size_t n_sources,
                                               const spccl_delta_options *options, void *dst, size_t dst_cap,
                                               spccl_delta_frame *frames, size_t *out_bytes, void *stream);
/* Deltas in GPU memory: the receiving side, as spccl_delta_check, spccl_delta_apply and spccl_delta_undo on the host, with
 * the same results. A plan copies the targets to the GPU, and keeps header and table of their frames there, 16 bytes for
 * each 65536 elements. So the list takes a few launches, and applying waits for nothing. A plan runs one call at a time.
 * From spccl_cuda_delta_plan_create on, nobody changes the frames: check reads what lies there then, and apply checks
 * nothing again. Whatever a frame holds, no call accesses memory outside of frames, places and `old`. */
typedef struct spccl_cuda_delta_plan spccl_cuda_delta_plan;
/* Make a plan, and check headers and tables of the frames. Waits for `stream`.
 *   targets        frames are memory of the current GPU, aligned to 8 bytes; places are memory of it, aligned to an
 *                  element; both are borrowed until spccl_cuda_delta_plan_destroy, the list until return
 *   out_old_bytes  bytes that `old` needs, as of spccl_delta_check; or NULL
 * Errors: those of spccl_delta_check; DEVICE, UNSUPPORTED (no CUDA in this build), TIMEOUT (SPCCL_TIMEOUT_MS; memory of
 * the plan is then lost). Text and status name the first target that is wrong; a frame of another length gets FRAME
 * or FORMAT. */
SPCCL_API spccl_status spccl_cuda_delta_plan_create(const spccl_delta_target *targets, size_t n_targets,
                                                    void *stream, spccl_cuda_delta_plan **out,
                                                    size_t *out_old_bytes);
/* Call it after the plan's GPU work: it frees GPU memory. Accepts NULL. */
SPCCL_API void spccl_cuda_delta_plan_destroy(spccl_cuda_delta_plan *plan);
/* Check all that is left of the frames, and look at what lies at the places now, as spccl_delta_check. Waits for `stream`.
 *   old          old_cap bytes of the plan's GPU, aligned to 8 bytes, or NULL
 *   sum_changes  [n_targets] in host memory, or NULL
 * Errors: ARG, FORMAT, FRAME, DST_SMALL, DEVICE, TIMEOUT. */
SPCCL_API spccl_status spccl_cuda_delta_check(spccl_cuda_delta_plan *plan, void *old, size_t old_cap,
                                              uint64_t *sum_changes, void *stream);
/* Queue the writing of the new values on `stream`, also in a capture. If spccl_cuda_delta_check has not accepted the frames:
 * STATE, and nothing is written. Errors: ARG, STATE, DEVICE. */
SPCCL_API spccl_status spccl_cuda_delta_apply(spccl_cuda_delta_plan *plan, void *stream);
/* Queue the writing of the old values, likewise. old: what the last spccl_cuda_delta_check stored.
 * Errors: ARG, STATE, DEVICE. */
SPCCL_API spccl_status spccl_cuda_delta_undo(spccl_cuda_delta_plan *plan, const void *old, size_t old_bytes,
                                             void *stream);
/* Queue a checksum as of spccl_delta_checksum. All pointers are memory of the current GPU; out: one u64, aligned to 8
 * bytes. Errors: ARG, DTYPE, UNSUPPORTED, DEVICE. */
SPCCL_API spccl_status spccl_cuda_delta_checksum(const void *x, uint64_t n_elems, spccl_dtype dtype,
                                                 uint64_t first, uint64_t key, uint64_t *out, void *stream);

/* ---- pruning: what of a gradient is sent now, and what is kept for later ------------------------- */
/* With gradient g, residual r, velocity u and threshold t, one call computes for each element
 *     u = momentum u + g;   v = leak r + u;   s = v unless |v| < t, else 0;   r = v - s;   u = 0 where sent
 * and writes s over g. s is v rounded to the dtype and clamped to its finite range. If g or v is not finite,
 * g is sent as it is, and r and u stay, in the new loss scale. t is a quantile of a sample of |v|. More: docs/KERNELS.md.
 * All memory is the caller's and lies where g lies. On a GPU r and u are aligned to 16 bytes. */
typedef struct spccl_prune_state { /* of one segment; zeros before the first call */
    double threshold;              /* t of the last call */
    double loss_scale;             /* GradScaler's scale in the last call; 0: not known */
    uint64_t step;                 /* calls so far */
    uint64_t n_sent;               /* elements that the last call sent */
    uint64_t n_sent_all;           /* elements that all calls sent */
    uint64_t n_nonfinite_all;      /* those of them that were sent because g or v was not finite */
} spccl_prune_state;
typedef struct spccl_prune_segment { /* one parameter's part of the gradient */
    size_t begin;                    /* its first element; segments do not overlap */
    size_t n_elems;
    void *residual; /* [n_elems] float32 or see residual_bf16; float64 if g is; NULL: v - s is lost */
    void *velocity; /* [n_elems] float32, or float64 if g is; NULL: u = g */
    spccl_prune_state *state; /* of this segment alone */
    uint32_t key;             /* any number, always the same for a parameter; moves what is sampled */
    uint32_t whole;           /* 1: every call sends all elements, and keeps u */
} spccl_prune_segment;
typedef struct spccl_prune_options {
    size_t struct_bytes; /* sizeof(spccl_prune_options) */
    double density;      /* fraction of a segment to send: above 0, at most 1 */
    double sample;       /* fraction to sample, in (0, 1]: 32 / density to 24576 elements */
    double momentum;     /* at least 0, below 1 */
    double leak;         /* above 0, at most 1 */
    double scale;        /* above 0: what is sent is multiplied by it; what is kept is not */
    double max_norm;     /* above 0: g times min(1, max_norm / root of the sum of squares) */
    const void *norm;    /* [1] float32 (float64 if g is) or NULL: norm of g, to clip a gradient of parts */
    double *squares;     /* [n_squares] squared norms of all parts; the call stores its own, if finite */
    const float *factor; /* [1] or NULL: factor on g */
    const float *loss_scale;    /* [1] or NULL: GradScaler's scale now; r and u follow its changes */
    uint32_t n_squares, square; /* length of squares; this part's entry */
    uint32_t dense_steps;       /* this many first calls of a segment send all elements, and keep u */
    uint32_t warmup_steps;      /* in this many calls after them the density falls to `density` */
    uint32_t seed;            /* any number, the same in all calls; moves samples, and rounding to bfloat16 */
    uint32_t keep_thresholds; /* 1: t is the state's threshold; nothing is sampled */
    uint32_t skip_zeros;      /* 1: a segment whose g is all zero sends nothing, and keeps r and u */
    uint32_t residual_bf16;   /* 1: residuals are bfloat16, rounded by `seed` (KERNELS.md); not of float64 */
    void *sent;               /* [n_elems] of sent_dtype, or NULL: s goes here, and g stays; g is float32 */
    uint64_t sent_dtype; /* FLOAT16 or BFLOAT16: s is rounded to it; inf and nan stay. Gaps of `sent` stay */
} spccl_prune_options;
#define SPCCL_PRUNE_OPTIONS_INIT                                                                             \
    {                                                                                                        \
        sizeof(spccl_prune_options), 0.01, 0.001, 0, 1, 1, 0, NULL, NULL, NULL, NULL, 0, 0, 0, 0, 0, 0, 0,   \
            0, NULL, 0                                                                                       \
    }
typedef struct spccl_prune_plan spccl_prune_plan;
/* Check and copy the segments of a gradient [n_elems] of floats on `device` (CUDA ordinal; -1 = host). A plan
 * runs one call at a time. Destroy it after its GPU work. Errors: ARG, DTYPE, UNSUPPORTED, NOMEM, DEVICE. */
SPCCL_API spccl_status spccl_prune_plan_create(const spccl_prune_segment *segments, size_t n_segments,
                                               size_t n_elems, spccl_dtype dtype, int device,
                                               spccl_prune_plan **out);
SPCCL_API void spccl_prune_plan_destroy(spccl_prune_plan *plan); /* accepts NULL */
/* Prune `grad` in place, on the host. Of a segment at most 5 times the wanted number is sent. Errors: ARG. */
SPCCL_API spccl_status spccl_prune(spccl_prune_plan *plan, void *grad, const spccl_prune_options *options);
/* The same on a GPU, without that bound: queued on `stream`, also in a capture. Errors: ARG, DEVICE. */
SPCCL_API spccl_status spccl_cuda_prune(spccl_prune_plan *plan, void *grad,
                                        const spccl_prune_options *options, void *stream);
/* spccl_cuda_prune and spccl_cuda_all_reduce of `grad` in place. On one host it exchanges lists in place of frames, which
 * is faster, where docs/KERNELS.md says; spccl_cuda_stats.n_pruned_by_lists counts that. All ranks give the same sizes
 * and density. The first call outside of captures makes the memory for lists. Errors: those of both. */
SPCCL_API spccl_status spccl_cuda_prune_all_reduce(spccl_comm *comm, spccl_prune_plan *plan, void *grad,
                                                   spccl_redop op, const spccl_prune_options *options,
                                                   void *stream);

/* ---- this build ---------------------------------------------------------------------------------- */
/* Fill the i-th entry of a list: what is in this build, what is not and why, and every SPCCL_* setting.
 * Returns SPCCL_ERR_ARG past the last entry. The texts are valid until this thread calls spccl_info again. */
typedef struct spccl_info_entry {
    size_t struct_bytes; /* set by the caller: sizeof(spccl_info_entry) */
    const char *kind;    /* "kernels", "transport", "schedule", "part", "GPUDirect", "setting", "debug" */
    const char *name;    /* "tcp", "avx512", "SPCCL_FORMAT" */
    const char *value;   /* "in", "in, chosen", "absent"; for a setting its value now */
    const char *why;     /* the reason, and how to get what is absent; for a setting what it means */
} spccl_info_entry;
SPCCL_API spccl_status spccl_info(size_t i, spccl_info_entry *out);

#ifdef __cplusplus
}
#endif
#include "spccl_experimental.h" /* until 0.3 */
#endif
