/* py_buffer.h - a Python object seen as a flat array: buffer protocol first, else DLPack (CPU memory). */
#ifndef EXT_PY_BUFFER_H
#define EXT_PY_BUFFER_H

#include "module.h"

typedef struct ext_array {
    const char *name; /* of the argument, for texts; a string literal */
    void *data;       /* NULL only if n_elems == 0 */
    size_t n_elems;
    spccl_dtype dtype;
    /* `view` or `capsule` keeps the memory alive; after ext_array_release neither does. */
    Py_buffer view;
    bool has_view;
    PyObject *capsule; /* DLPack, consumed */
} ext_array;

/* View `obj`, a C-contiguous array of any shape, as a flat array.
 *   name        the argument's name for error texts; a string literal
 *   writable    refuse read-only memory
 *   dtype_name  NULL: the object's own dtype.
 *               Else the dtype to read the memory as: the object's elements must have that size, or be single
 *               bytes. (Callers pass bfloat16 and float8 as integers in this way.)
 *   out         zeroed by this call; on success the caller gives it to ext_array_release
 * Elements that hold references (Python objects, addresses) are refused whatever dtype_name is.
 * Returns 0, or -1 with ArgumentError or the exception that the object raised. */
int ext_array_acquire(ext_state *state, PyObject *obj, const char *name, bool writable,
                      const char *dtype_name, ext_array *out);
/* Raw bytes of `obj` (any contiguous buffer), dtype uint8. */
int ext_bytes_acquire(ext_state *state, PyObject *obj, const char *name, ext_array *out);
/* Release the memory. Needs the GIL. Accepts a zeroed or released array. */
void ext_array_release(ext_array *array);
/* Size of the array in bytes. */
size_t ext_array_bytes(const ext_array *array);

#endif
