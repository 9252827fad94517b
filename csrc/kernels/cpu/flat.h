/* flat.h - what the vector sets share: a chunk's listed elements as a flat list of u16 offsets, and plain
 * loops over that list. A format's vector code only turns its index sections into the list (or the mask into
 * both). Why a list: bit by bit, each word or block ends in a mispredicted branch (about 15 cycles, the time
 * to non_temporal 100 bytes); a list has one such branch per chunk. Included by the files of one instruction
 * set each. */
#ifndef SP_FLAT_H
#define SP_FLAT_H

#include "kernels/cpu/elem.h"
#include "kernels/cpu/kernels.h"

/* A chunk: 16 blocks of the tile format, one pici tile. Its offsets fit 16 bits and its elements fit the
 * L1/L2. */
#define SP_CHUNK_ELEMS 4096u
/* Room of an offset list: generators write whole vectors, up to 64 entries past the end. */
#define SP_OFFS_CAP (SP_CHUNK_ELEMS + 64u)
/* Below this many listed elements per 16, putting zeros back one by one is cheaper than clearing the chunk.
 */
#define SP_CLEAR_SIXTEENTHS 3u

/* From this many listed elements in a chunk on, the hardware prefetches dst by itself. */
#define SP_PREFETCH_BELOW 160u

/* values[j] = x[offs[j]]; dst[offs[j]] = values[j]; dst[offs[j]] = 0. Four at a time: loads run ahead of
 * stores. */
#define SP_FLAT_MOVE(NAME, T)                                                                                \
    static inline void flat_gather_##NAME(void *values, const void *x, const uint16_t *offs, size_t n)       \
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
    static inline void flat_scatter_##NAME(void *dst, const uint16_t *offs, const void *values, size_t n)    \
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
    static inline void flat_clear_##NAME(void *dst, const uint16_t *offs, size_t n)                          \
    {                                                                                                        \
        for (size_t j = 0; j < n; j++)                                                                       \
            sp_put_##NAME(dst, offs[j], 0);                                                                  \
    }
SP_FLAT_MOVE(u8, uint8_t)
SP_FLAT_MOVE(u16, uint16_t)
SP_FLAT_MOVE(u32, uint32_t)
SP_FLAT_MOVE(u64, uint64_t)

static inline void flat_gather(void *values, const void *x, const uint16_t *offs, size_t n, size_t elem_bytes)
{
    if (elem_bytes == 4)
        flat_gather_u32(values, x, offs, n);
    else if (elem_bytes == 2)
        flat_gather_u16(values, x, offs, n);
    else if (elem_bytes == 8)
        flat_gather_u64(values, x, offs, n);
    else
        flat_gather_u8(values, x, offs, n);
}
static inline void flat_scatter(void *dst, const uint16_t *offs, const void *values, size_t n,
                                size_t elem_bytes)
{
    if (elem_bytes == 4)
        flat_scatter_u32(dst, offs, values, n);
    else if (elem_bytes == 2)
        flat_scatter_u16(dst, offs, values, n);
    else if (elem_bytes == 8)
        flat_scatter_u64(dst, offs, values, n);
    else
        flat_scatter_u8(dst, offs, values, n);
}
/* Make a chunk of zeros again out of one that held the listed elements. */
static inline void flat_clear(void *dst, const uint16_t *offs, size_t n, size_t elem_bytes)
{
    if (n * 16 > SP_CHUNK_ELEMS * SP_CLEAR_SIXTEENTHS)
        memset(dst, 0, SP_CHUNK_ELEMS * elem_bytes);
    else if (elem_bytes == 4)
        flat_clear_u32(dst, offs, n);
    else if (elem_bytes == 2)
        flat_clear_u16(dst, offs, n);
    else if (elem_bytes == 8)
        flat_clear_u64(dst, offs, n);
    else
        flat_clear_u8(dst, offs, n);
}

/* dst[offs[j]] = f(dst[offs[j]], values[j]) by operation; dst starts at the chunk. Four at a time: no offset
 * comes twice, so loads may run ahead of stores, which the compiler cannot know. */
#define SP_FLAT_ONE(D, V, F, J) F(sp_get_##D(dst, offs[J]), sp_get_##V(values, J))
#define SP_FLAT_APPLY(NAME, V, D, F)                                                                         \
    static void flat_##NAME(void *dst, const uint16_t *offs, const void *values, size_t n)                   \
    {                                                                                                        \
        size_t j = 0;                                                                                        \
        for (; j + 4 <= n; j += 4) {                                                                         \
            sp_elem_##D r0 = SP_FLAT_ONE(D, V, F, j), r1 = SP_FLAT_ONE(D, V, F, j + 1);                      \
            sp_elem_##D r2 = SP_FLAT_ONE(D, V, F, j + 2), r3 = SP_FLAT_ONE(D, V, F, j + 3);                  \
            sp_put_##D(dst, offs[j], r0);                                                                    \
            sp_put_##D(dst, offs[j + 1], r1);                                                                \
            sp_put_##D(dst, offs[j + 2], r2);                                                                \
            sp_put_##D(dst, offs[j + 3], r3);                                                                \
        }                                                                                                    \
        for (; j < n; j++)                                                                                   \
            sp_put_##D(dst, offs[j], SP_FLAT_ONE(D, V, F, j));                                               \
    }
SP_APPLY_OPS(SP_FLAT_APPLY)
#define SP_FLAT_ENTRY(NAME, V, D, F) [SP_APPLY_##NAME] = flat_##NAME,
typedef void flat_apply_fn(void *dst, const uint16_t *offs, const void *values, size_t n);
static flat_apply_fn *const flat_apply[SP_N_APPLY_OPS] = {SP_APPLY_OPS(SP_FLAT_ENTRY)};

/* Where a decoder is in a frame: what is left of each section. */
struct flat_cursor {
    const uint8_t *index, *meta, *values;
    size_t chunk;   /* number of the chunk */
    size_t n_chunk; /* elements of the chunk */
    size_t n_left;  /* listed elements not yet taken */
};
/* Fill offs with the chunk's list, move index and meta on, return how many. */
typedef size_t flat_next_fn(struct flat_cursor *c, uint16_t *offs);

/* ADD and OVERWRITE of a whole frame. Lines of the next chunk are asked for first: sparse touches are too far
 * apart for the hardware's prefetcher, and an addition fills too much of the core's window to run far ahead
 * by itself. */
static inline void flat_decode_apply(const sp_decode_args *a, flat_next_fn *next, flat_apply_fn *apply)
{
    struct flat_cursor c = {a->index, a->meta, a->values, 0, 0, a->nnz};
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

/* SET of a whole frame, dst in cache: clear a chunk, then put its elements. */
static inline void flat_decode_set_cached(const sp_decode_args *a, flat_next_fn *next)
{
    struct flat_cursor c = {a->index, a->meta, a->values, 0, 0, a->nnz};
    size_t eb = sp_dtype_bytes(a->dtype);
    uint16_t offs[SP_OFFS_CAP];
    for (size_t i = 0; i < a->n_elems; i += SP_CHUNK_ELEMS, c.chunk++) {
        uint8_t *dst = (uint8_t *)a->dst + i * eb;
        c.n_chunk = sp_min_size(SP_CHUNK_ELEMS, a->n_elems - i);
        size_t n = next(&c, offs);
        memset(dst, 0, c.n_chunk * eb);
        flat_scatter(dst, offs, c.values, n, eb);
        c.values += n * eb;
        c.n_left -= n;
    }
}

/* SET of a whole frame past the cache: a chunk is made in a buffer that is otherwise zero, and stored past
 * the cache to dst one chunk later (its narrow stores have left the store queue by then: wide loads cannot be
 * forwarded from them). */
static inline void flat_decode_set_nt(const sp_decode_args *a, flat_next_fn *next, size_t eb)
{
    struct flat_cursor c = {a->index, a->meta, a->values, 0, 0, a->nnz};
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
            flat_scatter(bufs[i % 2], offs[i % 2], c.values, n[i % 2], eb);
            c.values += n[i % 2] * eb;
            c.n_left -= n[i % 2];
        }
        if (i > 0) {
            size_t at = (i - 1) * SP_CHUNK_ELEMS, b = (i - 1) % 2;
            simd_store_nt((uint8_t *)a->dst + at * eb, bufs[b],
                          sp_min_size(SP_CHUNK_ELEMS, a->n_elems - at) * eb);
            flat_clear(bufs[b], offs[b], n[b], eb);
        }
    }
    simd_nt_end();
}

static inline void flat_decode_set(const sp_decode_args *a, flat_next_fn *next)
{
    size_t eb = sp_dtype_bytes(a->dtype);
    if (!a->non_temporal)
        flat_decode_set_cached(a, next);
    else if (eb == 4) /* constants, so that the loops above are made for one width each */
        flat_decode_set_nt(a, next, 4);
    else if (eb == 2)
        flat_decode_set_nt(a, next, 2);
    else if (eb == 8)
        flat_decode_set_nt(a, next, 8);
    else
        flat_decode_set_nt(a, next, 1);
}

#endif
