/* py_coll.c - the collectives of the Communicator type: check the arrays, start, wait or return a Request. */
#include "py_comm.h"

enum collective { ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, BROADCAST };

/* The arguments of a collective; `out` is NULL for broadcast. */
typedef struct call {
    enum collective what;
    PyObject *in, *out;
    const char *dtype, *op_name;
    int async_op, root;
    spccl_redop op;
} call;

static spccl_status issue(spccl_comm *comm, const call *c, const ext_array *in, const ext_array *out,
                          spccl_request **req)
{
    switch (c->what) {
    case ALL_GATHER:
        return spccl_all_gather(comm, in->data, out->data, in->n_elems, in->dtype, req);
    case REDUCE_SCATTER:
        return spccl_reduce_scatter(comm, in->data, out->data, out->n_elems, in->dtype, c->op, req);
    case ALL_REDUCE:
        return spccl_all_reduce(comm, in->data, out->data, in->n_elems, in->dtype, c->op, req);
    case BROADCAST:
        break;
    }
    return spccl_broadcast(comm, in->data, in->n_elems, in->dtype, c->root, req);
}

/* Start the collective; then wait for it, or return a Request. Takes ownership of `flight`. */
static PyObject *run(ext_comm *self, const call *c, ext_flight *flight)
{
    ext_state *state = ext_comm_state(self);
    spccl_status st;

    if (ext_comm_enter(self, true) < 0) {
        ext_flight_free(flight);
        return NULL;
    }
    ext_strays_reap(&self->strays);
    Py_BEGIN_ALLOW_THREADS
    st = issue(self->comm, c, &flight->arrays[0], &flight->arrays[1], &flight->req);
    Py_END_ALLOW_THREADS
    ext_comm_leave(self, true);
    if (st != SPCCL_OK) {
        ext_raise(state, st);
        ext_flight_free(flight);
        return NULL;
    }
    if (c->async_op)
        return ext_request_new(state, (PyObject *)self, &self->strays, flight);
    st = ext_flight_wait(flight, -1);
    if (st == SPCCL_AGAIN) { /* a signal handler has raised; the collective still uses the memory */
        ext_strays_add(&self->strays, flight);
        return NULL;
    }
    if (st != SPCCL_OK)
        ext_raise_text(state, st, "%s", spccl_request_error(flight->req));
    ext_flight_free(flight);
    return st == SPCCL_OK ? Py_NewRef(Py_None) : NULL;
}

static int check_shapes(ext_state *state, const ext_array *in, const ext_array *out, enum collective what,
                        size_t world)
{
    const ext_array *large = what == REDUCE_SCATTER ? in : out, *small = what == REDUCE_SCATTER ? out : in;
    size_t times = what == ALL_REDUCE ? 1 : world;

    if (in->dtype != out->dtype) {
        ext_raise_text(state, SPCCL_ERR_DTYPE, "output: got dtype %s; wanted %s, as input has",
                       spccl_dtype_name(out->dtype), spccl_dtype_name(in->dtype));
        return -1;
    }
    if (large->n_elems / times == small->n_elems && large->n_elems % times == 0)
        return 0;
    ext_raise_text(state, SPCCL_ERR_ARG, "%s: got %zu elements; wanted %zu times the %zu of %s%s",
                   large->name, large->n_elems, times, small->n_elems, small->name,
                   what == ALL_REDUCE ? "" : ", a block for each rank");
    return -1;
}

/* View both arrays and check that they fit together. NULL with an exception set on failure. */
static ext_flight *acquire(ext_comm *self, const call *c)
{
    ext_state *state = ext_comm_state(self);
    ext_flight *flight = ext_flight_new();

    if (flight == NULL)
        return NULL;
    if (ext_array_acquire(state, c->in, "input", false, c->dtype, &flight->arrays[0]) < 0 ||
        ext_array_acquire(state, c->out, "output", true, c->dtype, &flight->arrays[1]) < 0 ||
        check_shapes(state, &flight->arrays[0], &flight->arrays[1], c->what,
                     (size_t)spccl_comm_world_size(self->comm)) < 0) {
        ext_flight_free(flight);
        return NULL;
    }
    return flight;
}

static PyObject *two_buffers(ext_comm *self, call *c)
{
    ext_flight *flight;

    if (self->comm == NULL) {
        (void)ext_comm_enter(self, false);
        return NULL;
    }
    if (c->op_name != NULL && ext_redop_of_name(ext_comm_state(self), c->op_name, &c->op) < 0)
        return NULL;
    flight = acquire(self, c);
    return flight != NULL ? run(self, c, flight) : NULL;
}

PyObject *ext_comm_all_gather(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"input", "output", "dtype", "async_op", NULL};
    call c = {.what = ALL_GATHER};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO|$zp:all_gather", names, &c.in, &c.out, &c.dtype,
                                     &c.async_op))
        return NULL;
    return two_buffers((ext_comm *)self, &c);
}

PyObject *ext_comm_reduce_scatter(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"input", "output", "op", "dtype", "async_op", NULL};
    call c = {.what = REDUCE_SCATTER, .op_name = "sum"};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO|s$zp:reduce_scatter", names, &c.in, &c.out, &c.op_name,
                                     &c.dtype, &c.async_op))
        return NULL;
    return two_buffers((ext_comm *)self, &c);
}

PyObject *ext_comm_all_reduce(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"input", "output", "op", "dtype", "async_op", NULL};
    call c = {.what = ALL_REDUCE, .op_name = "sum", .out = Py_None};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|Os$zp:all_reduce", names, &c.in, &c.out, &c.op_name,
                                     &c.dtype, &c.async_op))
        return NULL;
    if (c.out == Py_None) /* in place; acquiring it as output checks that it is writable */
        c.out = c.in;
    return two_buffers((ext_comm *)self, &c);
}

PyObject *ext_comm_broadcast(PyObject *obj, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"buffer", "root", "dtype", "async_op", NULL};
    ext_comm *self = (ext_comm *)obj;
    call c = {.what = BROADCAST};
    ext_flight *flight;
    bool writable;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|i$zp:broadcast", names, &c.in, &c.root, &c.dtype,
                                     &c.async_op))
        return NULL;
    if (self->comm == NULL) {
        (void)ext_comm_enter(self, false);
        return NULL;
    }
    writable = spccl_comm_rank(self->comm) != c.root;
    flight = ext_flight_new();
    if (flight == NULL)
        return NULL;
    if (ext_array_acquire(ext_comm_state(self), c.in, "buffer", writable, c.dtype, &flight->arrays[0]) < 0) {
        ext_flight_free(flight);
        return NULL;
    }
    return run(self, &c, flight);
}
