/* py_request.h - the Request type: one collective under way, and the memory that it uses.
 *
 * A "flight" is one collective with its memory, which stays acquired until the collective is done. A Request
 * that is dropped before that passes its flight to its communicator. Such a flight is called a "stray"; the
 * communicator frees it when it is done. Only Python's own threads call these functions. */
#ifndef EXT_PY_REQUEST_H
#define EXT_PY_REQUEST_H

#include "py_buffer.h"

/* One collective with its memory. All fields are guarded by the GIL; `req` may be used without it. */
typedef struct ext_flight {
    spccl_request *req;
    ext_array arrays[2]; /* in, out; unused ones stay zeroed */
    struct ext_flight *next;
} ext_flight;

/* Zeroed; NULL with MemoryError. */
ext_flight *ext_flight_new(void);
/* Free everything. Call it only when the collective is done, or was never started. */
void ext_flight_free(ext_flight *flight);

/* The list of stray flights of one communicator. */
typedef struct ext_strays {
    ext_flight *first;
} ext_strays;
void ext_strays_add(ext_strays *strays, ext_flight *flight);
/* Free the flights that are done. */
void ext_strays_reap(ext_strays *strays);

/* A Request that owns `flight`. On failure the flight becomes a stray.
 *   comm    kept alive by the Request, so that `strays` stays valid */
PyObject *ext_request_new(ext_state *state, PyObject *comm, ext_strays *strays, ext_flight *flight);
/* Wait on the calling thread without the GIL; signals are handled meanwhile.
 *   timeout_ms  < 0: until the collective's own deadline
 * Returns SPCCL_OK; a failure, whose text is in the request; or SPCCL_AGAIN: timeout_ms passed, or a signal
 * handler raised and a Python exception is set. */
spccl_status ext_flight_wait(ext_flight *flight, int64_t timeout_ms);

#endif
