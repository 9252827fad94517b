/* mem.h - allocation and arithmetic of sizes, with overflow checks. */
#ifndef SP_MEM_H
#define SP_MEM_H

#include "core/base/status.h"

#include <stdbool.h>

/* Zeroed memory for n elements of elem_bytes; NULL when out of memory or when the product overflows.
 * Freed with sp_free. n == 0 gives a valid pointer. */
void *sp_calloc(size_t n, size_t elem_bytes);
/* Uninitialised memory, aligned to 64 bytes: a cache line, or an AVX-512 vector. Freed with sp_free. */
void *sp_alloc64(size_t bytes);
void sp_free(void *p); /* accepts NULL */
/* Zero the stack below the caller's frame, 16 KiB of it. Functions that handled a secret may have left copies
 * there: the compiler spills registers, and the dynamic linker saves vector registers at a first call. */
void sp_wipe_stack(void);
/* *out = a * b; false (and *out untouched) on overflow. */
bool sp_mul_size(size_t a, size_t b, size_t *out);
bool sp_add_size(size_t a, size_t b, size_t *out);
/* True if [a, a+a_bytes) and [b, b+b_bytes) have a byte in common. */
bool sp_overlap(const void *a, size_t a_bytes, const void *b, size_t b_bytes);

#endif
