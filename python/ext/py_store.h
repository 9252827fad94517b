/* py_store.h - a spccl_store whose callbacks call a Python store: torch's Store, or an object with the same
 * set, get and wait. */
#ifndef EXT_PY_STORE_H
#define EXT_PY_STORE_H

#include "module.h"

typedef struct ext_store {
    ext_state *state;
    PyObject *object;    /* borrowed */
    PyThreadState *save; /* of the thread inside spccl_comm_create, which runs without the GIL */
    PyObject *exc_type, *exc_value, *exc_traceback; /* the first exception of a store method */
} ext_store;

/* 0 if `object` has the three methods; else -1 with ArgumentError. */
int ext_store_check(ext_state *state, PyObject *object);
/* The two callbacks; `ctx` is an ext_store. */
spccl_status ext_store_set(void *ctx, const char *key, const void *data, size_t bytes);
spccl_status ext_store_get(void *ctx, const char *key, void *buf, size_t cap, int64_t timeout_ms,
                           size_t *out_bytes);
/* Raise the failure of creating a communicator. An exception of the store becomes its cause. Returns NULL. */
PyObject *ext_store_raise(ext_store *store, spccl_status status);
void ext_store_fini(ext_store *store);

#endif
