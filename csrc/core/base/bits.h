/* bits.h - little-endian load and store, popcount, alignment. */
#ifndef SP_BITS_H
#define SP_BITS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "spccl needs a little-endian machine: frames are little-endian and are used in place"
#endif

/* Marks a function that host code and GPU code both compile. */
#ifdef __CUDACC__
#define SP_HD __host__ __device__
#else
#define SP_HD
#endif

/* Unaligned little-endian access. */
static inline uint16_t sp_load_le16(const void *p)
{
    uint16_t v;
    memcpy(&v, p, sizeof v);
    return v;
}
static inline uint32_t sp_load_le32(const void *p)
{
    uint32_t v;
    memcpy(&v, p, sizeof v);
    return v;
}
static inline uint64_t sp_load_le64(const void *p)
{
    uint64_t v;
    memcpy(&v, p, sizeof v);
    return v;
}
static inline void sp_store_le16(void *p, uint16_t v)
{
    memcpy(p, &v, sizeof v);
}
static inline void sp_store_le32(void *p, uint32_t v)
{
    memcpy(p, &v, sizeof v);
}
static inline void sp_store_le64(void *p, uint64_t v)
{
    memcpy(p, &v, sizeof v);
}

static inline unsigned sp_popcount64(uint64_t v)
{
    return (unsigned)__builtin_popcountll(v);
}
/* Index of the lowest set bit; v must not be 0. */
static inline unsigned sp_ctz64(uint64_t v)
{
    return (unsigned)__builtin_ctzll(v);
}

static inline size_t sp_ceil_div(size_t a, size_t b)
{
    return a / b + (a % b != 0);
}
/* Smallest multiple of `to` (a power of two) that is >= v. The caller makes sure that it fits. */
static inline size_t sp_align_up(size_t v, size_t to)
{
    return (v + to - 1) & ~(to - 1);
}
static inline size_t sp_max_size(size_t a, size_t b)
{
    return a > b ? a : b;
}
static inline size_t sp_min_size(size_t a, size_t b)
{
    return a < b ? a : b;
}

/* FNV-1a. */
static inline uint64_t sp_hash_text(const char *text)
{
    uint64_t h = 0xcbf29ce484222325u;
    for (; *text != '\0'; text++)
        h = (h ^ (uint8_t)*text) * 0x100000001b3u;
    return h;
}

#endif
