/* offset_list.h - offset lists: the u16 offsets of a chunk's listed elements, and plain loops over such a
 * list. The AVX2 and AVX-512 kernels use it. A format's encoder makes the list from the scan's mask, and its
 * decoder makes the list from the index section.
 * A list is faster than a loop over bits. Bit by bit, each word or block ends in a mispredicted branch: about
 * 15 cycles, the time to write 100 bytes. A list has one such branch per chunk.
 * The .inc files include this file, so it is compiled once per instruction set. */
#ifndef SP_OFFSET_LIST_H
#define SP_OFFSET_LIST_H

#include "kernels/cpu/elem.h"
#include "kernels/cpu/kernels.h"

/* A chunk is 16 blocks of the tile format, or one pici tile. Its offsets fit in 16 bits, and its elements fit
 * in the L1 or L2 cache. */
#define SP_CHUNK_ELEMS 4096u
/* Capacity of an offset list. simd_*_to_offs write whole vectors: up to 64 entries past the end. */
#define SP_OFFS_CAP (SP_CHUNK_ELEMS + 64u)
/* Up to this many listed elements per 16, storing single zeros is cheaper than clearing the whole chunk. */
#define SP_CLEAR_SIXTEENTHS 3u

/* With fewer listed elements in a chunk, the code prefetches dst. With more, the hardware does it. */
#define SP_PREFETCH_BELOW 160u

/* gather: values[j] = x[offs[j]]; scatter: dst[offs[j]] = values[j]; clear: dst[offs[j]] = 0.
 * Gather and scatter take four elements at a time, so that four loads come before the first store. */
#define SP_LIST_MOVE(NAME, T)                                                                                \
    static inline void list_gather_##NAME(void *values, const void *x, const uint16_t *offs, size_t n)       \
    {                                                                                                        \
        size_t j = 0;                                                                                        \
        for (; j + 4 <= n; j += 4) {                                                                         \
            T v0 = sp_get_##NAME(x, offs[j]), v1 = sp_get_##NAME(x, offs[j + 1]);                            \
            T v2 = sp_get_##NAME(x, offs[j + 2]), v3 = sp_get_##NAME(x, offs[j + 3]);                        \
            sp_put_##NAME(values, j, v0);                                                                    \
            sp_put_##NAME(values, j + 1, v1);                                                                \
            sp_put_##NAME(values, j + 2, v2);                                                                \
            sp_put_##NAME(values, j + 3, v3);                                                                \
        }                                                                                                    \
        for (; j < n; j++)                                                                                   \
            sp_put_##NAME(values, j, sp_get_##NAME(x, offs[j]));                                             \
    }                                                                                                        \
    static inline void list_scatter_##NAME(void *dst, const uint16_t *offs, const void *values, size_t n)    \
    {                                                                                                        \
        size_t j = 0;                                                                                        \
        for (; j + 4 <= n; j += 4) {                                                                         \
            T v0 = sp_get_##NAME(values, j), v1 = sp_get_##NAME(values, j + 1);                              \
            T v2 = sp_get_##NAME(values, j + 2), v3 = sp_get_##NAME(values, j + 3);                          \
            sp_put_##NAME(dst, offs[j], v0);                                                                 \
            sp_put_##NAME(dst, offs[j + 1], v1);                                                             \
            sp_put_##NAME(dst, offs[j + 2], v2);                                                             \
            sp_put_##NAME(dst, offs[j + 3], v3);                                                             \
        }                                                                                                    \
        for (; j < n; j++)                                                                                   \
            sp_put_##NAME(dst, offs[j], sp_get_##NAME(values, j));                                           \
    }                                                                                                        \
    static inline void list_clear_##NAME(void *dst, const uint16_t *offs, size_t n)                          \
    {                                                                                                        \
        for (size_t j = 0; j < n; j++)                                                                       \
            sp_put_##NAME(dst, offs[j], 0);                                                                  \
    }
SP_LIST_MOVE(u8, uint8_t)
SP_LIST_MOVE(u16, uint16_t)
SP_LIST_MOVE(u32, uint32_t)
SP_LIST_MOVE(u64, uint64_t)

static inline void list_gather(void *values, const void *x, const uint16_t *offs, size_t n, size_t elem_bytes)
{
    SP_BY_WIDTH(elem_bytes, list_gather, values, x, offs, n);
}
static inline void list_scatter(void *dst, const uint16_t *offs, const void *values, size_t n,
                                size_t elem_bytes)
{
    SP_BY_WIDTH(elem_bytes, list_scatter, dst, offs, values, n);
}
/* Set the listed elements of a chunk back to zero: the whole chunk is zero again. */
static inline void list_clear(void *dst, const uint16_t *offs, size_t n, size_t elem_bytes)
{
    if (n * 16 > SP_CHUNK_ELEMS * SP_CLEAR_SIXTEENTHS)
        memset(dst, 0, SP_CHUNK_ELEMS * elem_bytes);
    else
        SP_BY_WIDTH(elem_bytes, list_clear, dst, offs, n);
}

/* dst[offs[j]] = f(dst[offs[j]], values[j]), one function per operation. dst points to the chunk.
 * Four elements at a time: no offset occurs twice, so four loads may come before the first store. The
 * compiler cannot know that. */
#define SP_LIST_ONE(D, V, F, J) F(sp_get_##D(dst, offs[J]), sp_get_##V(values, J))
#define SP_LIST_APPLY(NAME, V, D, F)                                                                         \
    static void list_##NAME(void *dst, const uint16_t *offs, const void *values, size_t n)                   \
    {                                                                                                        \
        size_t j = 0;                                                                                        \
        for (; j + 4 <= n; j += 4) {                                                                         \
            sp_elem_##D r0 = SP_LIST_ONE(D, V, F, j), r1 = SP_LIST_ONE(D, V, F, j + 1);                      \
            sp_elem_##D r2 = SP_LIST_ONE(D, V, F, j + 2), r3 = SP_LIST_ONE(D, V, F, j + 3);                  \
            sp_put_##D(dst, offs[j], r0);                                                                    \
            sp_put_##D(dst, offs[j + 1], r1);                                                                \
            sp_put_##D(dst, offs[j + 2], r2);                                                                \
            sp_put_##D(dst, offs[j + 3], r3);                                                                \
        }                                                                                                    \
        for (; j < n; j++)                                                                                   \
            sp_put_##D(dst, offs[j], SP_LIST_ONE(D, V, F, j));                                               \
    }
SP_APPLY_OPS(SP_LIST_APPLY)
#define SP_LIST_ENTRY(NAME, V, D, F) [SP_APPLY_##NAME] = list_##NAME,
typedef void list_apply_fn(void *dst, const uint16_t *offs, const void *values, size_t n);
static list_apply_fn *const list_apply[SP_N_APPLY_OPS] = {SP_APPLY_OPS(SP_LIST_ENTRY)};

/* Position of a decoder in a frame. The pointers are at the part of each section that is not read yet. */
struct list_cursor {
    const uint8_t *index, *meta, *values;
    size_t chunk;   /* number of the chunk */
    size_t n_chunk; /* elements of the chunk */
    size_t n_left;  /* listed elements not yet decoded */
};
/* Write the chunk's list to offs, advance index and meta, and return the number of listed elements. */
typedef size_t list_next_fn(struct list_cursor *c, uint16_t *offs);

/* ADD and OVERWRITE of a whole frame. Cache lines of the next chunk are prefetched before a chunk is applied.
 * The listed elements are too far apart for the hardware prefetcher. Additions fill the core's out-of-order
 * window, so its own loads do not run far enough ahead. */
static inline void list_decode_apply(const sp_decode_args *a, list_next_fn *next, list_apply_fn *apply)
{
    struct list_cursor c = {a->index, a->meta, a->values, 0, 0, a->nnz};
    size_t value_bytes = sp_dtype_bytes(a->dtype), dst_bytes = sp_dtype_bytes(a->dst_dtype);
    const uint8_t *values = a->values;
    uint8_t *dst = a->dst;
    uint16_t offs[2][SP_OFFS_CAP];
    size_t n[2] = {0, 0}, n_chunks = sp_ceil_div(a->n_elems, SP_CHUNK_ELEMS),
           chunk_bytes = SP_CHUNK_ELEMS * dst_bytes;
    for (size_t i = 0; i <= n_chunks; i++) {
        if (i < n_chunks) {
            c.chunk = i;
            c.n_chunk = sp_min_size(SP_CHUNK_ELEMS, a->n_elems - i * SP_CHUNK_ELEMS);
            n[i % 2] = next(&c, offs[i % 2]);
            c.n_left -= n[i % 2];
            if (n[i % 2] < SP_PREFETCH_BELOW)
                for (size_t j = 0; j < n[i % 2]; j++)
                    __builtin_prefetch(dst + i * chunk_bytes + offs[i % 2][j] * dst_bytes, 1, 3);
        }
        if (i > 0) {
            size_t last = (i - 1) % 2;
            apply(dst + (i - 1) * chunk_bytes, offs[last], values, n[last]);
            values += n[last] * value_bytes;
        }
    }
}

/* SET of a whole frame with ordinary stores: clear a chunk, then store its listed elements. */
static inline void list_decode_set_cached(const sp_decode_args *a, list_next_fn *next)
{
    struct list_cursor c = {a->index, a->meta, a->values, 0, 0, a->nnz};
    size_t eb = sp_dtype_bytes(a->dtype);
    uint16_t offs[SP_OFFS_CAP];
    for (size_t i = 0; i < a->n_elems; i += SP_CHUNK_ELEMS, c.chunk++) {
        uint8_t *dst = (uint8_t *)a->dst + i * eb;
        c.n_chunk = sp_min_size(SP_CHUNK_ELEMS, a->n_elems - i);
        size_t n = next(&c, offs);
        memset(dst, 0, c.n_chunk * eb);
        list_scatter(dst, offs, c.values, n, eb);
        c.values += n * eb;
        c.n_left -= n;
    }
}

/* SET of a whole frame with non-temporal stores. A chunk is put together in a buffer of zeros, and copied to
 * dst one chunk later. By then its narrow stores have left the store queue: the CPU cannot forward narrow
 * stores to wide loads. */
static inline void list_decode_set_nt(const sp_decode_args *a, list_next_fn *next, size_t eb)
{
    struct list_cursor c = {a->index, a->meta, a->values, 0, 0, a->nnz};
    _Alignas(64) uint8_t bufs[2][SP_CHUNK_ELEMS * 8];
    uint16_t offs[2][SP_OFFS_CAP];
    size_t n[2] = {0, 0}, n_chunks = sp_ceil_div(a->n_elems, SP_CHUNK_ELEMS);
    for (size_t i = 0; i < sp_min_size(n_chunks, 2); i++)
        memset(bufs[i], 0, SP_CHUNK_ELEMS * eb);
    for (size_t i = 0; i <= n_chunks; i++) {
        if (i < n_chunks) {
            c.chunk = i;
            c.n_chunk = sp_min_size(SP_CHUNK_ELEMS, a->n_elems - i * SP_CHUNK_ELEMS);
            n[i % 2] = next(&c, offs[i % 2]);
            list_scatter(bufs[i % 2], offs[i % 2], c.values, n[i % 2], eb);
            c.values += n[i % 2] * eb;
            c.n_left -= n[i % 2];
        }
        if (i > 0) {
            size_t at = (i - 1) * SP_CHUNK_ELEMS, b = (i - 1) % 2;
            simd_store_nt((uint8_t *)a->dst + at * eb, bufs[b],
                          sp_min_size(SP_CHUNK_ELEMS, a->n_elems - at) * eb);
            list_clear(bufs[b], offs[b], n[b], eb);
        }
    }
    simd_nt_end();
}

static inline void list_decode_set(const sp_decode_args *a, list_next_fn *next)
{
    size_t eb = sp_dtype_bytes(a->dtype);
    if (!a->non_temporal)
        list_decode_set_cached(a, next);
    else if (eb == 4) /* constants: the compiler makes one copy of the loop per width */
        list_decode_set_nt(a, next, 4);
    else if (eb == 2)
        list_decode_set_nt(a, next, 2);
    else if (eb == 8)
        list_decode_set_nt(a, next, 8);
    else
        list_decode_set_nt(a, next, 1);
}

#endif
