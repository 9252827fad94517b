/* mem.c - see mem.h. */
#include "core/base/mem.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

void *sp_calloc(size_t n, size_t elem_bytes)
{
    return calloc(n != 0 ? n : 1, elem_bytes != 0 ? elem_bytes : 1);
}

void *sp_alloc64(size_t bytes)
{
    void *p = NULL;
    if (bytes > SIZE_MAX - 64 || posix_memalign(&p, 64, bytes != 0 ? bytes : 1) != 0)
        return NULL;
    return p;
}

void sp_free(void *p)
{
    free(p);
}

__attribute__((noinline)) void sp_wipe_stack(void)
{
    uint8_t below[16384];
    explicit_bzero(below, sizeof below);
}

bool sp_mul_size(size_t a, size_t b, size_t *out)
{
    if (b != 0 && a > SIZE_MAX / b)
        return false;
    *out = a * b;
    return true;
}

bool sp_add_size(size_t a, size_t b, size_t *out)
{
    if (a > SIZE_MAX - b)
        return false;
    *out = a + b;
    return true;
}

bool sp_overlap(const void *a, size_t a_bytes, const void *b, size_t b_bytes)
{
    uintptr_t a0 = (uintptr_t)a, b0 = (uintptr_t)b;
    return a_bytes != 0 && b_bytes != 0 && a0 < b0 + b_bytes && b0 < a0 + a_bytes;
}
