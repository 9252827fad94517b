/* py_comm.h - the Communicator object, for its type (py_comm.c) and its collectives (py_coll.c). */
#ifndef EXT_PY_COMM_H
#define EXT_PY_COMM_H

#include "py_request.h"

typedef struct ext_comm {
    PyObject_HEAD spccl_comm *comm; /* NULL once closed */
    ext_strays strays;              /* collectives whose Request is gone */
    int n_inside; /* threads that use `comm` without the GIL; if there are any, close() raises StateError */
    bool issuing; /* a thread is starting a collective; a second thread must not */
} ext_comm;

ext_state *ext_comm_state(ext_comm *self);
/* Begin to use self->comm. `issue`: to start a collective. Returns 0, and the caller then calls
 * ext_comm_leave when it is done; or -1 with StateError. */
int ext_comm_enter(ext_comm *self, bool issue);
void ext_comm_leave(ext_comm *self, bool issue);

/* Methods, py_coll.c. */
PyObject *ext_comm_all_gather(PyObject *self, PyObject *args, PyObject *kwargs);
PyObject *ext_comm_reduce_scatter(PyObject *self, PyObject *args, PyObject *kwargs);
PyObject *ext_comm_all_reduce(PyObject *self, PyObject *args, PyObject *kwargs);
PyObject *ext_comm_broadcast(PyObject *self, PyObject *args, PyObject *kwargs);
/* Methods, py_channels.c. */
PyObject *ext_comm_attach_gpu(PyObject *self, PyObject *args);
PyObject *ext_comm_wait_gpu(PyObject *self, PyObject *args);

#endif
