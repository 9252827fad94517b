/* abi.h - copies structs of spccl.h between a caller and a library that were built with different versions of
 * the header. docs/ARCHITECTURE.md has the rules for changing such a struct.
 *
 * Each of these structs begins with `size_t struct_bytes`, the sizeof of the caller's version. Fields are
 * only ever added at the end, so the shorter of two versions is a prefix of the longer one. */
#ifndef SP_ABI_H
#define SP_ABI_H

#include "core/base/status.h"

/* Copy the caller's options `given` into `out`, the library's version of the struct.
 *   name   "spccl_config": for the error text
 *   given  NULL: all options keep their defaults. If it is shorter than `out`, the fields that it lacks keep
 *          their defaults. If it is longer, the bytes that the library does not know must be zero.
 *   out    out_bytes, filled with the defaults by the caller of this function
 * Errors: ARG. */
spccl_status sp_options_copy(const char *name, const void *given, void *out, size_t out_bytes);

/* Fill the caller's struct `out` from `result`, the library's version of the struct. Fields that `out` is too
 * short for are left out. Bytes of `out` that the library does not know, and struct_bytes, stay as they are.
 * Errors: ARG; `out` is then unchanged. */
spccl_status sp_result_copy(const char *name, const void *result, size_t result_bytes, void *out);

#endif
