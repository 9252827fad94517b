/* abi.c - see abi.h. */
#include "core/base/abi.h"

#include <string.h>

/* A larger number comes from a struct that was not initialised. */
#define STRUCT_BYTES_MAX 4096u

/* The structs hold a size_t, so every version of them has a multiple of its size. */
static spccl_status check_size(const char *name, size_t struct_bytes)
{
    if (struct_bytes >= sizeof(size_t) && struct_bytes <= STRUCT_BYTES_MAX &&
        struct_bytes % sizeof(size_t) == 0)
        return SPCCL_OK;
    return SP_FAIL(SPCCL_ERR_ARG,
                   "%s.struct_bytes is %zu, wanted sizeof(%s), a multiple of %zu from %zu to %u: initialise "
                   "the struct as spccl.h says",
                   name, struct_bytes, name, sizeof(size_t), sizeof(size_t), STRUCT_BYTES_MAX);
}

static size_t struct_bytes_of(const void *s)
{
    size_t bytes;
    memcpy(&bytes, s, sizeof bytes);
    return bytes;
}

spccl_status sp_options_copy(const char *name, const void *given, void *out, size_t out_bytes)
{
    const unsigned char *bytes = given;
    size_t given_bytes;
    if (given == NULL)
        return SPCCL_OK;
    given_bytes = struct_bytes_of(given);
    SP_TRY(check_size(name, given_bytes));
    for (size_t i = out_bytes; i < given_bytes; i++)
        if (bytes[i] != 0)
            return SP_FAIL(SPCCL_ERR_ARG,
                           "%s: got %zu bytes with byte %zu not zero, wanted zeros from byte %zu on: spccl "
                           "" SPCCL_VERSION_TEXT " does not know the option there; leave it zero, or load "
                           "the library that the header belongs to",
                           name, given_bytes, i, out_bytes);
    memcpy(out, given, given_bytes < out_bytes ? given_bytes : out_bytes);
    memcpy(out, &out_bytes, sizeof out_bytes);
    return SPCCL_OK;
}

spccl_status sp_result_copy(const char *name, const void *result, size_t result_bytes, void *out)
{
    const size_t skip = sizeof(size_t); /* struct_bytes */
    size_t bytes;
    if (out == NULL)
        return SP_FAIL(SPCCL_ERR_ARG, "%s: out is NULL", name);
    bytes = struct_bytes_of(out);
    SP_TRY(check_size(name, bytes));
    if (bytes > result_bytes)
        bytes = result_bytes;
    memcpy((char *)out + skip, (const char *)result + skip, bytes - skip);
    return SPCCL_OK;
}
