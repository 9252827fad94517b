/* delta_loops.h - deltas (delta_rule.h): the loops over elements and changes, in plain C, which the compiler vectorizes for
 * the instruction set that includes this file. delta_scalar.c and delta.inc use them. */
#ifndef SP_DELTA_LOOPS_H
#define SP_DELTA_LOOPS_H

#include "kernels/cpu/elem.h"
#include "kernels/cpu/kernels.h"

/* Changes that are worked on at a time: their old values fit in the L1 cache, counts of them in 16 bits. */
#define SP_DELTA_RUN 512u

/* sp_delta_hash for bits below 2^32 (u8 to u32): the same number, by multiplications of 32 bits, which vectors have. `at` is
 * (i + 1) * 0x9e3779b97f4a7c15 + key. */
static inline uint64_t delta_times(uint32_t a, uint64_t by)
{
    return (uint64_t)a * (uint32_t)by + (((uint64_t)a * (uint32_t)(by >> 32)) << 32);
}
static inline uint64_t delta_finish(uint64_t x)
{
    x = (x ^ x >> 32) * SP_DELTA_MIX;
    return x ^ x >> 32;
}
static inline uint64_t delta_hash_u32(uint64_t at, uint32_t bits)
{
    return delta_finish(at ^ delta_times(bits, SP_DELTA_MIX));
}
static inline uint64_t delta_hash_u16(uint64_t at, uint16_t bits)
{
    return delta_hash_u32(at, bits);
}
static inline uint64_t delta_hash_u8(uint64_t at, uint8_t bits)
{
    return delta_hash_u32(at, bits);
}
static inline uint64_t delta_hash_u64(uint64_t at, uint64_t bits)
{
    return delta_finish(at ^ bits * SP_DELTA_MIX);
}

/* Of changes j to j + n, whose values are in a->values, and whose old ones in `old`: number the differences, and add the
 * changes of the hash. The difference t, less 1 if it is above 0, is numbered by zigzag: 0, -1, 1, ... are 0, 1, 2, ... */
#define SP_DELTA_FITS(Z) (uint16_t)(Z)
#define SP_DELTA_CLAMP(Z) (uint16_t)((Z) < SP_DELTA_CODE_MOST ? (Z) : SP_DELTA_CODE_MOST)
#define SP_DELTA_CHANGES(NAME, T, SIGNED, U16)                                                               \
    static inline void delta_changes_##NAME(sp_delta_list_args *a, uint32_t j, uint32_t n, const void *old)  \
    {                                                                                                        \
        const uint8_t *values = (const uint8_t *)a->values + j * sizeof(T);                                  \
        const uint16_t *place = a->place + j;                                                                \
        uint16_t *number = a->number + j;                                                                    \
        uint64_t sum = 0, start = (a->first + 1) * SP_DELTA_STEP + a->key;                                   \
        for (uint32_t i = 0; i < n; i++) {                                                                   \
            T d = (T)(sp_get_##NAME(values, i) - sp_get_##NAME(old, i));                                     \
            T t = (T)(d - (T)((SIGNED)d > 0));                                                               \
            T z = (T)((T)(t << 1) ^ (T)((SIGNED)t >> (8 * sizeof(T) - 1)));                                  \
            number[i] = U16(z);                                                                              \
        }                                                                                                    \
        for (uint32_t i = 0; i < n; i++) {                                                                   \
            uint64_t at = start + delta_times(place[i], SP_DELTA_STEP);                                      \
            sum += delta_hash_##NAME(at, sp_get_##NAME(values, i)) -                                         \
                   delta_hash_##NAME(at, sp_get_##NAME(old, i));                                             \
        }                                                                                                    \
        a->sum_change += sum;                                                                                \
    }
SP_DELTA_CHANGES(u8, uint8_t, int8_t, SP_DELTA_FITS)
SP_DELTA_CHANGES(u16, uint16_t, int16_t, SP_DELTA_FITS)
SP_DELTA_CHANGES(u32, uint32_t, int32_t, SP_DELTA_CLAMP)
SP_DELTA_CHANGES(u64, uint64_t, int64_t, SP_DELTA_CLAMP)

/* Count what each code escapes of n <= SP_DELTA_RUN numbers. */
static inline void delta_count(const uint16_t *number, uint32_t n, uint32_t escaped[SP_DELTA_N_CODES])
{
    uint16_t count[SP_DELTA_N_CODES] = {0};
    for (uint32_t i = 0; i < n; i++) {
        count[1] = (uint16_t)(count[1] + (number[i] >= 3));
        count[2] = (uint16_t)(count[2] + (number[i] >= 15));
        count[3] = (uint16_t)(count[3] + (number[i] >= 255));
        count[4] = (uint16_t)(count[4] + (number[i] == SP_DELTA_CODE_MOST));
    }
    for (uint32_t code = 1; code < SP_DELTA_N_CODES; code++)
        escaped[code] += count[code];
}

/* The checksum of n elements. */
#define SP_DELTA_SUM(NAME)                                                                                   \
    static inline void delta_sum_##NAME(const void *x, size_t n, uint64_t first, uint64_t key,               \
                                        uint64_t *out)                                                       \
    {                                                                                                        \
        uint64_t sum = 0, at = (first + 1) * SP_DELTA_STEP + key;                                            \
        for (size_t i = 0; i < n; i++)                                                                       \
            sum += delta_hash_##NAME(at + i * SP_DELTA_STEP, sp_get_##NAME(x, i));                           \
        *out = sum;                                                                                          \
    }
SP_DELTA_SUM(u8)
SP_DELTA_SUM(u16)
SP_DELTA_SUM(u32)
SP_DELTA_SUM(u64)

#endif
