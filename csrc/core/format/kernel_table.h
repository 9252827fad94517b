/* kernel_table.h - the contract between core and a kernel set (one ISA or device): sp_kernels.
 * Implemented in csrc/kernels; core sees only a `const sp_kernels *`.
 *
 * Encoding has two passes over one slice: `scan` reads the slice once and leaves a bit mask and counts
 * in scratch memory; the format is chosen from exact sizes; `encode` then touches only listed elements
 * (the slice is in cache by then). The base tensor matters to scan alone.
 * Kernels trust their arguments: frames were validated (format.h) before they get here. */
#ifndef SP_KERNEL_TABLE_H
#define SP_KERNEL_TABLE_H

#include "core/format/format.h"

/* Find the listed elements of x: those with any bit set, or that differ in any bit from base. */
typedef struct sp_scan_args {
    const void *x;    /* [n_elems], any alignment */
    const void *base; /* [n_elems] or NULL */
    size_t n_elems;
    size_t elem_bytes;  /* 1, 2, 4, 8 */
    uint64_t *mask;     /* out [ceil(n_elems/64)]: bit i of word w is element 64*w+i; bits past the end 0 */
    uint16_t *tile_nnz; /* out [ceil(n_elems/256)]: listed elements of each 256-block */
    size_t nnz;         /* out */
    bool has_full_tile; /* out: some block has all 256 listed */
} sp_scan_args;

/* What a scan found: all that a format choice may look at. */
typedef struct sp_slice_stats {
    size_t n_elems, elem_bytes, nnz;
    bool has_full_tile; /* forbids TILE */
} sp_slice_stats;

/* Write the sections of one frame. Only the pointers that the format uses are set. */
typedef struct sp_encode_args {
    const void *x; /* [n_elems] */
    size_t n_elems, elem_bytes;
    const uint64_t *mask;     /* from scan; NULL for dense */
    const uint16_t *tile_nnz; /* from scan; NULL for dense */
    size_t nnz;
    uint8_t *index, *meta, *values; /* sections, 16-byte aligned relative to the frame; exactly their size:
                                       a kernel must not write past the end of a section */
} sp_encode_args;

/* Apply one validated frame to dst. ADD and OVERWRITE of DENSE leave dst where a value has all bits zero. */
typedef struct sp_decode_args {
    const uint8_t *index, *meta, *values; /* any alignment */
    size_t n_elems, nnz;
    spccl_dtype dtype;     /* of the values */
    spccl_dtype dst_dtype; /* ADD: dtype, or FLOAT32 for 16-bit float values; otherwise == dtype */
    void *dst;             /* [n_elems] of dst_dtype */
    bool non_temporal;     /* dst is large and not read again soon: bypass the cache if that helps */
} sp_decode_args;
/* ADD of a dense frame: a value with all bits zero leaves dst as it is, as in the formats that do not list
 * it. */

/* acc[i] = acc[i] op x[i] in rank order.  Accumulator dtype: sp_acc_dtype(dtype) (dtype.h). */
typedef struct sp_combine_args {
    void *acc;     /* [n_elems] of the accumulator dtype */
    const void *x; /* [n_elems] of dtype */
    size_t n_elems;
    spccl_dtype dtype;
    spccl_redop op; /* SUM and AVG add */
    bool first;     /* acc holds nothing yet: SUM/AVG acc = 0 + x (so -0.0 becomes +0.0); others acc = x */
} sp_combine_args;

/* dst = round(acc), for AVG round(acc / world_size). */
typedef struct sp_finish_args {
    const void *acc; /* [n_elems] of the accumulator dtype */
    void *dst;       /* [n_elems] of dtype; may be acc when the dtypes are equal */
    size_t n_elems;
    spccl_dtype dtype;
    spccl_redop op;
    int world_size;
    bool non_temporal;
} sp_finish_args;

typedef struct sp_kernels {
    const char *name; /* "scalar", "avx2", "avx512" */
    void (*scan)(sp_scan_args *a);
    /* By spccl_format. EMPTY entries are NULL (there is nothing to encode; SET of an empty frame is `zero`).
     */
    void (*encode[SPCCL_N_FORMATS])(const sp_encode_args *a);
    /* By spccl_format and spccl_verb. EMPTY entries are NULL. ADD of FLOAT8 never gets here. */
    void (*decode[SPCCL_N_FORMATS][3])(const sp_decode_args *a);
    void (*combine)(const sp_combine_args *a);
    void (*finish)(const sp_finish_args *a);
    void (*copy)(void *dst, const void *src, size_t bytes, bool non_temporal);
    void (*zero)(void *dst, size_t bytes, bool non_temporal);
} sp_kernels;

/* ---- choosing a set: implemented in csrc/kernels/cpu/dispatch.c ---- */

/* The set to use on this CPU: the fastest usable, or the one that SPCCL_CPU_ISA names.
 * Errors: SETTING (unknown name, or a set that this CPU or build lacks; the text says which are usable). */
spccl_status sp_kernels_pick(const sp_kernels **out);

/* One set that this version knows, slowest first, usable or not. All pointers live as long as the library. */
typedef struct sp_kernels_info {
    const char *name; /* "scalar", "avx2", "avx512" */
    bool usable;      /* built in, and this CPU and OS can run it */
    const char *why;  /* one line: what it is, or what is missing */
} sp_kernels_info;
/* Describe the i-th set; false (and *out untouched) past the last. */
bool sp_kernels_describe(size_t i, sp_kernels_info *out);
/* The i-th usable set, slowest first; NULL past the last. 0 is scalar, always there. */
const sp_kernels *sp_kernels_at(size_t i);

#endif
