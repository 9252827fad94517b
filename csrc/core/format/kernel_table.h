/* kernel_table.h - the contract between core and a kernel set, which has one ISA: sp_kernels.
 * csrc/kernels/cpu implements it; core sees only a `const sp_kernels *`.
 *
 * Encoding passes over a slice twice. `scan` reads the slice and leaves a bit mask and counts in scratch
 * memory. Core then knows the exact size in each format, and chooses one. `encode` reads only the listed
 * elements; the slice is in the cache by then. Only `scan` reads the base.
 * Kernels do not check their arguments: sp_frame_validate has checked each frame before decoding. */
#ifndef SP_KERNEL_TABLE_H
#define SP_KERNEL_TABLE_H

#include "core/base/delta_rule.h"
#include "core/base/prune_rule.h"
#include "core/format/format.h"

/* Find the listed elements of x: those that differ in any bit from base. If base is NULL: those with any bit
 * set. With ignores_sign: those with any bit set but the highest, so that -0.0 of a float is not listed. */
typedef struct sp_scan_args {
    const void *x;    /* [n_elems], any alignment */
    const void *base; /* [n_elems] or NULL */
    size_t n_elems;
    size_t elem_bytes;  /* 1, 2, 4, 8 */
    bool ignores_sign;  /* only if base is NULL */
    uint64_t *mask;     /* out [ceil(n_elems/64)]: bit i of word w is element 64*w+i; bits past the end 0 */
    uint16_t *tile_nnz; /* out [ceil(n_elems/256)]: number of listed elements in each block of 256 */
    size_t nnz;         /* out */
    bool has_full_tile; /* out: in some block all 256 elements are listed */
} sp_scan_args;

/* Result of a scan. The choice of format depends on nothing else of the slice. */
typedef struct sp_slice_stats {
    size_t n_elems, elem_bytes, nnz;
    bool has_full_tile; /* the slice cannot take TILE */
} sp_slice_stats;

/* Write the sections of one frame. Pointers that the format does not use are NULL. */
typedef struct sp_encode_args {
    const void *x; /* [n_elems] */
    size_t n_elems, elem_bytes;
    const uint64_t *mask;     /* from scan; NULL for dense */
    const uint16_t *tile_nnz; /* from scan; NULL for dense */
    size_t nnz;
    uint8_t *index, *meta, *values; /* at multiples of 16 bytes from the frame's start. A kernel must not
                                       write past the end of a section */
} sp_encode_args;

/* Apply one validated frame to dst. In a dense frame a value with all bits zero is an absent element, which
 * ADD and OVERWRITE do not change. */
typedef struct sp_decode_args {
    const uint8_t *index, *meta, *values; /* any alignment */
    size_t n_elems, nnz;
    spccl_dtype dtype;     /* of the values */
    spccl_dtype dst_dtype; /* ADD: dtype, or FLOAT32 for 16-bit float values; otherwise == dtype */
    void *dst;             /* [n_elems] of dst_dtype */
    bool non_temporal;     /* dst is large and not read again soon: stores may bypass the cache */
} sp_decode_args;

/* acc[i] = acc[i] op x[i]. The caller makes one call per rank, in rank order. The dtype of acc is
 * sp_acc_dtype(dtype) (dtype.h). */
typedef struct sp_combine_args {
    void *acc;     /* [n_elems] of the accumulator dtype */
    const void *x; /* [n_elems] of dtype */
    size_t n_elems;
    spccl_dtype dtype;
    spccl_redop op; /* SUM and AVG add */
    bool first;     /* ignore what acc holds. SUM, AVG: acc = 0 + x, so -0.0 becomes +0.0; others: acc = x */
} sp_combine_args;

/* dst = round(acc); for AVG, dst = round(acc / world_size). */
typedef struct sp_finish_args {
    const void *acc; /* [n_elems] of the accumulator dtype */
    void *dst;       /* [n_elems] of dtype; may be acc when the dtypes are equal */
    size_t n_elems;
    spccl_dtype dtype;
    spccl_redop op;
    int world_size;
    bool non_temporal;
} sp_finish_args;

/* Prune elements of one segment (prune_rule.h). grad or `sent` becomes what is sent; residual and velocity keep the rest.
 * The kernel prunes SP_PRUNE_RUN elements at a time. It stops before those with which it would send more than
 * `most` elements, nonfinite ones not counted. */
#define SP_PRUNE_RUN 512u
typedef struct sp_prune_args {
    void *grad;         /* [n] of dtype, aligned to it */
    void *residual;     /* [n] float32 (float64 for float64 gradients), or NULL: what is not sent is lost */
    bool residual_bf16; /* it is bfloat16 instead; not with float64 gradients */
    void *
        sent; /* [n] of sent_dtype, FLOAT16 or BFLOAT16: what is sent, of a FLOAT32 gradient; NULL: grad is */
    spccl_dtype sent_dtype;
    void *velocity; /* [n], as residual, or NULL: no momentum */
    size_t n;
    spccl_dtype dtype; /* FLOAT32, FLOAT16, BFLOAT16 or FLOAT64 */
    const sp_prune_factors *factors;
    sp_prune_random random; /* with residual_bf16 */
    uint64_t first;         /* place of element 0 in its segment, likewise */
    uint64_t most;
    /* Gradient, residual and velocity that the caller reads next; NULL if none. A kernel may prefetch them to the
     * L2 cache: while it prunes, memory is not busy. */
    const void *next[3];
    size_t next_bytes[3];
    size_t n_done;        /* out: elements pruned, from the first on */
    uint64_t n_sent;      /* out: elements sent, nonfinite ones included */
    uint64_t n_nonfinite; /* out: elements whose g or v is not finite */
} sp_prune_args;

/* List what a scan of a slice of a delta found, and number the differences (delta_rule.h). */
#define SP_DELTA_LIST_SLACK 64u
#define SP_DELTA_PACK_SLACK 8u
typedef struct sp_delta_list_args {
    const void *x, *base; /* [n_elems], any alignment */
    uint32_t n_elems;     /* at most SP_DELTA_SLICE_ELEMS */
    uint32_t elem_bytes, nnz;
    const uint64_t *mask; /* from scan, and so are nnz and tile_nnz */
    const uint16_t *tile_nnz;
    uint64_t first, key; /* for sum_change */
    /* Out, of each listed element, in order: */
    uint16_t *place;  /* [nnz], and SP_DELTA_LIST_SLACK more may be written */
    uint16_t *number; /* [nnz] of the difference; SP_DELTA_CODE_MOST: that or more */
    void *values;     /* [nnz] elements of x */
    /* Out: */
    uint32_t escaped[SP_DELTA_N_CODES]; /* by code, from 1 on: the numbers that do not fit */
    uint64_t sum_change;
} sp_delta_list_args;

/* The owner's part of one chunk of one bit per element (signs_rule.h): kept + what the parts say becomes a row. */
typedef struct sp_signs_sum_args {
    float *kept;          /* [4096] */
    uint32_t n;           /* elements of the chunk, 1 to 4096 */
    uint32_t n_parts;     /* rows to add */
    const uint8_t *parts; /* the first one; the next ones lie part_bytes apart */
    size_t part_bytes;
    float share;  /* multiplies the magnitude of each part */
    uint8_t *row; /* out */
} sp_signs_sum_args;

/* Add the counts of the next run, unless more than a->most would then be sent. */
static inline bool sp_prune_goes_on(sp_prune_args *a, uint64_t n_sent, uint64_t n_nonfinite)
{
    if (a->n_sent - a->n_nonfinite + n_sent - n_nonfinite > a->most)
        return false;
    a->n_sent += n_sent;
    a->n_nonfinite += n_nonfinite;
    return true;
}

typedef struct sp_kernels {
    const char *name; /* "scalar", "avx2", "avx512" */
    void (*scan)(sp_scan_args *a);
    /* By spccl_format. The entry for EMPTY is NULL: an empty frame has no sections. */
    void (*encode[SPCCL_N_FORMATS])(const sp_encode_args *a);
    /* By spccl_format and spccl_verb. The entries for EMPTY are NULL: SET of an empty frame calls `zero`. The
     * codec refuses ADD of FLOAT8. */
    void (*decode[SPCCL_N_FORMATS][3])(const sp_decode_args *a);
    void (*combine)(const sp_combine_args *a);
    void (*finish)(const sp_finish_args *a);
    void (*copy)(void *dst, const void *src, size_t bytes, bool non_temporal);
    void (*zero)(void *dst, size_t bytes, bool non_temporal);
    void (*prune)(sp_prune_args *a);
    /* Send a chunk of n elements, 1 to 4096. Returns how many differences were not finite. */
    uint64_t (*signs_send)(float *own, const float *shared, uint32_t n, float leak, uint8_t *row);
    void (*signs_sum)(const sp_signs_sum_args *a);
    void (*signs_decode)(const uint8_t *row, float *out); /* out [4096] */
    void (*delta_list)(sp_delta_list_args *a);
    /* Pack n numbers, at most `most` each, of which the lower `bits` count, 1 to 16: a section of a delta. The bytes up
     * to SP_DELTA_PACK_SLACK behind it may be written too. */
    void (*delta_pack)(uint8_t *dst, const uint16_t *numbers, uint32_t n, uint32_t bits, uint16_t most);
    /* The checksum of n elements, the first of which is element `first` of its tensor. */
    uint64_t (*delta_sum)(const void *x, size_t n, size_t elem_bytes, uint64_t first, uint64_t key);
} sp_kernels;

/* ---- choosing a set (csrc/kernels/cpu/dispatch.c) ---- */

/* The set that SPCCL_DEBUG_CPU_ISA names; by default the fastest that this CPU can run.
 * Errors: SETTING (unknown name, or a set that this CPU or build lacks; the text lists the usable sets). */
spccl_status sp_kernels_pick(const sp_kernels **out);

/* One set of this build, usable or not. The pointers stay valid until the library is unloaded. */
typedef struct sp_kernels_info {
    const char *name; /* "scalar", "avx2", "avx512" */
    bool usable;      /* this CPU and OS can run it */
    const char *why;  /* one line: what the set is, or what is missing */
} sp_kernels_info;
/* Describe the i-th set, slowest first. If there is no such set, return false and leave *out as it is. */
bool sp_kernels_describe(size_t i, sp_kernels_info *out);
/* The i-th usable set, slowest first; NULL if there is none. Set 0 is scalar and always usable. */
const sp_kernels *sp_kernels_at(size_t i);

#endif
