/* float_bits.c - see float_bits.h. */
#include "core/base/float_bits.h"

#include "core/base/bits.h"

#define SIGN_32 (UINT32_C(1) << 31)
#define SIGN_64 (UINT64_C(1) << 63)
#define INF_32 UINT32_C(0x7f800000)
#define INF_64 (UINT64_C(0x7ff) << 52)
#define QUIET_32 UINT32_C(0x00400000)
#define QUIET_64 (UINT64_C(1) << 51)

static bool is_nan_32(uint32_t u)
{
    return (u & ~SIGN_32) > INF_32;
}

static bool is_nan_64(uint64_t u)
{
    return (u & ~SIGN_64) > INF_64;
}

static bool changed_by_zero_32(uint32_t u)
{
    return u == SIGN_32 || (is_nan_32(u) && (u & QUIET_32) == 0);
}

static bool changed_by_zero_64(uint64_t u)
{
    return u == SIGN_64 || (is_nan_64(u) && (u & QUIET_64) == 0);
}

/* The two loops below have no early exit, so that the compiler vectorizes them. */

bool sp_floats_any_nan(const uint8_t *values, size_t n, size_t elem_bytes)
{
    bool found = false;
    if (elem_bytes == 4)
        for (size_t i = 0; i < n; i++)
            found |= is_nan_32(sp_load_le32(values + 4 * i));
    else
        for (size_t i = 0; i < n; i++)
            found |= is_nan_64(sp_load_le64(values + 8 * i));
    return found;
}

bool sp_floats_any_changed_by_zero(const uint8_t *values, size_t n, size_t elem_bytes)
{
    bool found = false;
    if (elem_bytes == 4)
        for (size_t i = 0; i < n; i++)
            found |= changed_by_zero_32(sp_load_le32(values + 4 * i));
    else
        for (size_t i = 0; i < n; i++)
            found |= changed_by_zero_64(sp_load_le64(values + 8 * i));
    return found;
}

void sp_floats_add_zero(uint8_t *values, size_t n, size_t elem_bytes)
{
    for (size_t i = 0; i < n; i++) {
        uint8_t *v = values + i * elem_bytes;
        if (elem_bytes == 4 && changed_by_zero_32(sp_load_le32(v)))
            sp_store_le32(v, sp_load_le32(v) == SIGN_32 ? 0 : sp_load_le32(v) | QUIET_32);
        if (elem_bytes == 8 && changed_by_zero_64(sp_load_le64(v)))
            sp_store_le64(v, sp_load_le64(v) == SIGN_64 ? 0 : sp_load_le64(v) | QUIET_64);
    }
}
