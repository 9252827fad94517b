/* py_request.c - see py_request.h. */
#include "py_request.h"

#include <stddef.h>
#include <stdlib.h>
#include <time.h>

/* A wait checks for signals (Ctrl-C) this often. */
#define SIGNAL_MS 100

/* ---- flights ---- */

ext_flight *ext_flight_new(void)
{
    ext_flight *flight = calloc(1, sizeof *flight);
    if (flight == NULL)
        PyErr_NoMemory();
    return flight;
}

void ext_flight_free(ext_flight *flight)
{
    if (flight == NULL)
        return;
    spccl_request_free(flight->req);
    for (int i = 0; i < 2; i++)
        ext_array_release(&flight->arrays[i]);
    free(flight);
}

void ext_strays_add(ext_strays *strays, ext_flight *flight)
{
    flight->next = strays->first;
    strays->first = flight;
}

void ext_strays_reap(ext_strays *strays)
{
    ext_flight *done = NULL, **link = &strays->first;

    /* Unlink all finished flights before freeing one: releasing memory may run any Python code, also this
     * function. */
    while (*link != NULL) {
        ext_flight *flight = *link;
        if (spccl_request_test(flight->req) == SPCCL_AGAIN) {
            link = &flight->next;
        } else {
            *link = flight->next;
            flight->next = done;
            done = flight;
        }
    }
    while (done != NULL) {
        ext_flight *next = done->next;
        ext_flight_free(done);
        done = next;
    }
}

static int64_t now_ms(void)
{
    struct timespec t;
    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

spccl_status ext_flight_wait(ext_flight *flight, int64_t timeout_ms)
{
    int64_t end = timeout_ms < 0 ? INT64_MAX : now_ms() + timeout_ms;

    for (;;) {
        int64_t left = end == INT64_MAX ? SIGNAL_MS : end - now_ms();
        spccl_status st;

        left = left < 0 ? 0 : left > SIGNAL_MS ? SIGNAL_MS : left;
        Py_BEGIN_ALLOW_THREADS
        st = spccl_request_wait(flight->req, left);
        Py_END_ALLOW_THREADS
        /* SPCCL_ERR_TIMEOUT: either this short wait is over, or the collective itself has timed out. */
        if (st == SPCCL_ERR_TIMEOUT)
            st = spccl_request_test(flight->req);
        if (st != SPCCL_AGAIN)
            return st;
        if (PyErr_CheckSignals() < 0 || (end != INT64_MAX && now_ms() >= end))
            return SPCCL_AGAIN;
    }
}

/* ---- the type ---- */

typedef struct request {
    PyObject_HEAD PyObject *comm;
    ext_strays *strays; /* of comm */
    ext_flight *flight;
} request;

PyObject *ext_request_new(ext_state *state, PyObject *comm, ext_strays *strays, ext_flight *flight)
{
    request *self = PyObject_GC_New(request, state->request_type);
    if (self == NULL) {
        ext_strays_add(strays, flight);
        return NULL;
    }
    self->comm = Py_NewRef(comm);
    self->strays = strays;
    self->flight = flight;
    PyObject_GC_Track((PyObject *)self);
    return (PyObject *)self;
}

/* Release the memory of a collective that is done, before this object is freed. */
static void release_arrays(request *self)
{
    for (int i = 0; i < 2; i++)
        ext_array_release(&self->flight->arrays[i]);
}

static PyObject *raise_failure(request *self, spccl_status st)
{
    return ext_raise_text(ext_state_of_type(Py_TYPE((PyObject *)self)), st, "%s",
                          spccl_request_error(self->flight->req));
}

static PyObject *request_done(PyObject *obj, PyObject *unused)
{
    request *self = (request *)obj;

    (void)unused;
    if (spccl_request_test(self->flight->req) == SPCCL_AGAIN)
        Py_RETURN_FALSE;
    release_arrays(self);
    Py_RETURN_TRUE;
}

static PyObject *request_wait(PyObject *obj, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"timeout_ms", NULL};
    request *self = (request *)obj;
    long long timeout_ms = -1;
    spccl_status st;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|L:wait", names, &timeout_ms))
        return NULL;
    st = ext_flight_wait(self->flight, timeout_ms);
    if (st == SPCCL_AGAIN && PyErr_Occurred())
        return NULL;
    if (st == SPCCL_AGAIN)
        return ext_raise_text(
            ext_state_of_type(Py_TYPE((PyObject *)self)), SPCCL_ERR_TIMEOUT,
            "wait: the collective is still under way after %lld ms; it goes on and keeps its buffers",
            timeout_ms);
    release_arrays(self);
    if (st != SPCCL_OK)
        return raise_failure(self, st);
    Py_RETURN_NONE;
}

static PyObject *request_error(PyObject *obj, void *unused)
{
    request *self = (request *)obj;
    spccl_status st = spccl_request_test(self->flight->req);

    (void)unused;
    if (st == SPCCL_OK || st == SPCCL_AGAIN)
        Py_RETURN_NONE;
    return ext_error_new(ext_state_of_type(Py_TYPE((PyObject *)self)), st,
                         spccl_request_error(self->flight->req));
}

static int request_traverse(PyObject *obj, visitproc visit, void *arg)
{
    Py_VISIT(((request *)obj)->comm);
    Py_VISIT(Py_TYPE(obj));
    return 0;
}

/* No tp_clear: the garbage collector must not release memory that a collective still uses. */
static void request_dealloc(PyObject *obj)
{
    request *self = (request *)obj;
    PyTypeObject *type = Py_TYPE(obj);

    PyObject_GC_UnTrack(obj);
    if (spccl_request_test(self->flight->req) == SPCCL_AGAIN)
        ext_strays_add(self->strays, self->flight);
    else
        ext_flight_free(self->flight);
    Py_CLEAR(self->comm);
    PyObject_GC_Del(obj);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"done", request_done, METH_NOARGS,
     "done() -> bool: whether the collective has ended, with success or not. Never blocks."},
    {"wait", EXT_KEYWORDS(request_wait), METH_VARARGS | METH_KEYWORDS,
     "wait(timeout_ms=-1) -> None: wait until the collective is done. Raises its failure, or TimeoutError "
     "after "
     "timeout_ms (the collective then goes on)."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef getset[] = {
    {"error", request_error, NULL,
     "The exception that the collective ended with; None while it is under way and after success.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "One collective under way."},
    {Py_tp_dealloc, (void *)request_dealloc},
    {Py_tp_traverse, (void *)request_traverse},
    {Py_tp_methods, methods},
    {Py_tp_getset, getset},
    {0, NULL},
};

PyType_Spec ext_request_spec = {
    .name = "spccl._ext.Request",
    .basicsize = sizeof(request),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION |
             Py_TPFLAGS_IMMUTABLETYPE,
    .slots = slots,
};
