/* py_comm.c - the Communicator type: one rank's membership of one group. Its collectives are in py_coll.c. */
#include "py_comm.h"
#include "py_store.h"

#include <string.h>

ext_state *ext_comm_state(ext_comm *self)
{
    return ext_state_of_type(Py_TYPE((PyObject *)self));
}

/* Whether this process is a child of fork of the process that made the communicator. If so, it sets
 * spccl_last_error. */
static bool in_child(ext_comm *self)
{
    const char *text;
    return spccl_comm_describe_link(self->comm, spccl_comm_rank(self->comm), &text) == SPCCL_ERR_STATE;
}

int ext_comm_enter(ext_comm *self, bool issue)
{
    if (self->comm == NULL) {
        ext_raise_text(ext_comm_state(self), SPCCL_ERR_STATE, "communicator: it is closed");
        return -1;
    }
    if (issue && self->issuing && in_child(self)) { /* a thread of the parent was issuing during the fork */
        ext_raise(ext_comm_state(self), SPCCL_ERR_STATE);
        return -1;
    }
    if (issue && self->issuing) {
        ext_raise_text(
            ext_comm_state(self), SPCCL_ERR_STATE,
            "communicator: another thread is starting a collective on it; start collectives from one thread, "
            "in the same order on every rank");
        return -1;
    }
    self->issuing |= issue;
    self->n_inside++;
    return 0;
}

void ext_comm_leave(ext_comm *self, bool issue)
{
    self->n_inside--;
    if (issue)
        self->issuing = false;
}

/* ---- create and close ---- */

typedef struct create_args {
    int rank, world_size;
    PyObject *store, *unique_id;
    const char *format;
    spccl_config config;
    const char *secret;
    Py_ssize_t secret_bytes;
} create_args;

static int parse_create(ext_state *state, PyObject *args, PyObject *kwargs, create_args *a)
{
    static char *names[] = {"rank",       "world_size", "store",       "unique_id",  "name",
                            "timeout_ms", "format",     "slice_bytes", "transports", "n_sockets",
                            "secret",     "schedule",   "host_id",     NULL};
    long long timeout_ms = 0, slice_bytes = 0, n_sockets = 0;
    const char *name = NULL, *transports = NULL, *schedule = NULL, *host_id = NULL;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "ii|$OOzLsLzLz#zz:Communicator", names, &a->rank,
                                     &a->world_size, &a->store, &a->unique_id, &name, &timeout_ms, &a->format,
                                     &slice_bytes, &transports, &n_sockets, &a->secret, &a->secret_bytes,
                                     &schedule, &host_id))
        return -1;
    if ((a->store == Py_None) == (a->unique_id == Py_None)) {
        ext_raise_text(state, SPCCL_ERR_ARG, "Communicator: pass either store= or unique_id=, got %s",
                       a->store == Py_None ? "neither" : "both");
        return -1;
    }
    if (timeout_ms < 0 || slice_bytes < 0 || slice_bytes > UINT32_MAX || n_sockets < 0 ||
        n_sockets > UINT32_MAX) {
        ext_raise_text(
            state, SPCCL_ERR_ARG,
            "Communicator: timeout_ms=%lld, slice_bytes=%lld, n_sockets=%lld; wanted 0 (the default) or "
            "above, the last two below 2^32",
            timeout_ms, slice_bytes, n_sockets);
        return -1;
    }
    if (a->secret != NULL && a->secret_bytes != 32) {
        ext_raise_text(state, SPCCL_ERR_ARG, "secret: got %zd bytes; wanted 32", a->secret_bytes);
        return -1;
    }
    a->config.name = name;
    a->config.timeout_ms = timeout_ms;
    a->config.slice_bytes = (uint32_t)slice_bytes;
    a->config.transports = transports;
    a->config.n_sockets = (uint32_t)n_sockets;
    a->config.secret = (const uint8_t *)a->secret;
    a->config.schedule = schedule;
    a->config.host_id = host_id;
    return ext_format_of_name(state, a->format, &a->config.format);
}

static int create_from_store(ext_comm *self, create_args *a)
{
    ext_store ctx = {.state = ext_comm_state(self), .object = a->store};
    spccl_store store = {
        .struct_bytes = sizeof store, .ctx = &ctx, .set = ext_store_set, .get = ext_store_get};
    spccl_status st;

    if (ext_store_check(ctx.state, a->store) < 0)
        return -1;
    ctx.save = PyEval_SaveThread();
    st = spccl_comm_create(&store, a->rank, a->world_size, &a->config, &self->comm);
    PyEval_RestoreThread(ctx.save);
    if (st != SPCCL_OK)
        ext_store_raise(&ctx, st);
    ext_store_fini(&ctx);
    return st == SPCCL_OK ? 0 : -1;
}

static int create_from_id(ext_comm *self, create_args *a)
{
    ext_state *state = ext_comm_state(self);
    spccl_unique_id id;
    spccl_status st;
    ext_array bytes;

    if (ext_bytes_acquire(state, a->unique_id, "unique_id", &bytes) < 0)
        return -1;
    if (bytes.n_elems != sizeof id.bytes) {
        ext_raise_text(state, SPCCL_ERR_ARG, "unique_id: got %zu bytes; wanted the %zu of get_unique_id()",
                       bytes.n_elems, sizeof id.bytes);
        ext_array_release(&bytes);
        return -1;
    }
    memcpy(id.bytes, bytes.data, sizeof id.bytes);
    ext_array_release(&bytes);
    Py_BEGIN_ALLOW_THREADS
    st = spccl_comm_init_rank(&id, a->rank, a->world_size, &a->config, &self->comm);
    Py_END_ALLOW_THREADS
    if (st == SPCCL_OK)
        return 0;
    ext_raise(state, st);
    return -1;
}

static PyObject *comm_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    create_args a = {.store = Py_None, .unique_id = Py_None, .format = "auto", .config = SPCCL_CONFIG_INIT};
    ext_comm *self;
    int failed;

    if (parse_create(ext_state_of_type(type), args, kwargs, &a) < 0)
        return NULL;
    self = (ext_comm *)PyType_GenericAlloc(type, 0); /* zeroed */
    if (self == NULL)
        return NULL;
    failed = a.store != Py_None ? create_from_store(self, &a) : create_from_id(self, &a);
    if (failed)
        Py_CLEAR(self);
    return (PyObject *)self;
}

/* Destroying ends every collective. After it the memory of stray flights can be released. */
static spccl_status destroy(ext_comm *self)
{
    spccl_comm *comm = self->comm;
    spccl_status st;

    self->comm = NULL;
    Py_BEGIN_ALLOW_THREADS
    st = spccl_comm_destroy(comm);
    Py_END_ALLOW_THREADS
    ext_strays_reap(&self->strays);
    return st;
}

static PyObject *comm_close(PyObject *obj, PyObject *unused)
{
    ext_comm *self = (ext_comm *)obj;
    spccl_status st;

    (void)unused;
    if (self->comm == NULL)
        Py_RETURN_NONE;
    if (self->n_inside != 0 && !in_child(self)) /* a child of fork has no thread of its parent */
        return ext_raise_text(
            ext_comm_state(self), SPCCL_ERR_STATE,
            "close: %d other thread(s) are using the communicator; join these threads first, or call abort()",
            self->n_inside);
    st = destroy(self);
    return ext_none_or_raise(ext_comm_state(self), st);
}

static void comm_dealloc(PyObject *obj)
{
    ext_comm *self = (ext_comm *)obj;
    PyTypeObject *type = Py_TYPE(obj);
    PyObject *exc_type, *exc_value, *exc_traceback;

    PyObject_GC_UnTrack(obj);
    PyErr_Fetch(&exc_type, &exc_value, &exc_traceback);
    if (self->comm != NULL) {
        if (PyErr_WarnEx(PyExc_ResourceWarning, "unclosed spccl.Communicator: call close() or use `with`",
                         1) < 0)
            PyErr_WriteUnraisable(NULL);
        (void)destroy(self);
    }
    PyErr_Restore(exc_type, exc_value, exc_traceback);
    PyObject_GC_Del(obj);
    Py_DECREF(type);
}

static int comm_traverse(PyObject *obj, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(obj));
    return 0;
}

/* ---- other methods ---- */

static PyObject *comm_abort(PyObject *obj, PyObject *args)
{
    ext_comm *self = (ext_comm *)obj;
    const char *reason = NULL;
    spccl_status st;

    if (!PyArg_ParseTuple(args, "|z:abort", &reason) || ext_comm_enter(self, false) < 0)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    st = spccl_comm_abort(self->comm, reason);
    Py_END_ALLOW_THREADS
    ext_comm_leave(self, false);
    return ext_none_or_raise(ext_comm_state(self), st);
}

static PyObject *comm_async_error(PyObject *obj, PyObject *unused)
{
    ext_comm *self = (ext_comm *)obj;
    spccl_status st;

    (void)unused;
    if (ext_comm_enter(self, false) < 0)
        return NULL;
    st = spccl_comm_async_error(self->comm);
    ext_comm_leave(self, false);
    if (st == SPCCL_OK)
        Py_RETURN_NONE;
    return ext_error_new(ext_comm_state(self), st, spccl_last_error());
}

static PyObject *comm_set_timeout(PyObject *obj, PyObject *args)
{
    ext_comm *self = (ext_comm *)obj;
    long long timeout_ms;
    spccl_status st;

    if (!PyArg_ParseTuple(args, "L:set_timeout", &timeout_ms) || ext_comm_enter(self, true) < 0)
        return NULL;
    st = spccl_comm_set_timeout(self->comm, timeout_ms);
    ext_comm_leave(self, true);
    return ext_none_or_raise(ext_comm_state(self), st);
}

static PyObject *comm_stats(PyObject *obj, PyObject *unused)
{
    ext_comm *self = (ext_comm *)obj;
    spccl_stats s = {.struct_bytes = sizeof s};
    PyObject *frames, *result = NULL;
    spccl_status st;

    (void)unused;
    if (ext_comm_enter(self, false) < 0)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    st = spccl_comm_stats(self->comm, &s);
    Py_END_ALLOW_THREADS
    ext_comm_leave(self, false);
    if (st != SPCCL_OK)
        return ext_raise(ext_comm_state(self), st);
    frames = PyDict_New();
    for (int f = 0; frames != NULL && f < SPCCL_N_FORMATS; f++) {
        PyObject *n = PyLong_FromUnsignedLongLong(s.n_frames_sent[f]);
        if (n == NULL || PyDict_SetItemString(frames, spccl_format_name((spccl_format)f), n) < 0)
            Py_CLEAR(frames);
        Py_XDECREF(n);
    }
    if (frames != NULL)
        result = Py_BuildValue("{sK sK sK sK sK sO}", "n_collectives", (unsigned long long)s.n_collectives,
                               "dense_bytes_sent", (unsigned long long)s.dense_bytes_sent, "wire_bytes_sent",
                               (unsigned long long)s.wire_bytes_sent, "wire_bytes_received",
                               (unsigned long long)s.wire_bytes_received, "buffer_bytes",
                               (unsigned long long)s.buffer_bytes, "n_frames_sent", frames);
    Py_XDECREF(frames);
    return result;
}

static PyObject *comm_describe_link(PyObject *obj, PyObject *args)
{
    ext_comm *self = (ext_comm *)obj;
    const char *text = NULL;
    PyObject *result;
    spccl_status st;
    int peer;

    if (!PyArg_ParseTuple(args, "i:describe_link", &peer) || ext_comm_enter(self, false) < 0)
        return NULL;
    st = spccl_comm_describe_link(self->comm, peer, &text);
    result = st == SPCCL_OK ? PyUnicode_FromString(text) : ext_raise(ext_comm_state(self), st);
    ext_comm_leave(self, false);
    return result;
}

static PyObject *comm_describe_schedules(PyObject *obj, PyObject *unused)
{
    ext_comm *self = (ext_comm *)obj;
    const char *text = NULL;
    PyObject *result;
    spccl_status st;

    (void)unused;
    if (ext_comm_enter(self, false) < 0)
        return NULL;
    result = PyList_New(0);
    for (size_t i = 0; result != NULL; i++) {
        PyObject *line;
        st = spccl_comm_describe_schedule(self->comm, i, &text);
        if (st == SPCCL_ERR_ARG) /* no more */
            break;
        line = st == SPCCL_OK ? PyUnicode_FromString(text) : ext_raise(ext_comm_state(self), st);
        if (line == NULL || PyList_Append(result, line) < 0)
            Py_CLEAR(result);
        Py_XDECREF(line);
    }
    ext_comm_leave(self, false);
    return result;
}

static PyObject *comm_rank(PyObject *obj, void *what)
{
    ext_comm *self = (ext_comm *)obj;
    int n;

    if (ext_comm_enter(self, false) < 0)
        return NULL;
    n = what == NULL ? spccl_comm_rank(self->comm) : spccl_comm_world_size(self->comm);
    ext_comm_leave(self, false);
    return PyLong_FromLong(n);
}

static PyObject *comm_closed(PyObject *obj, void *unused)
{
    (void)unused;
    return PyBool_FromLong(((ext_comm *)obj)->comm == NULL);
}

static PyMethodDef methods[] = {
    {"all_gather", EXT_KEYWORDS(ext_comm_all_gather), METH_VARARGS | METH_KEYWORDS,
     "all_gather(input, output, *, dtype=None, async_op=False)"},
    {"reduce_scatter", EXT_KEYWORDS(ext_comm_reduce_scatter), METH_VARARGS | METH_KEYWORDS,
     "reduce_scatter(input, output, op='sum', *, dtype=None, async_op=False)"},
    {"all_reduce", EXT_KEYWORDS(ext_comm_all_reduce), METH_VARARGS | METH_KEYWORDS,
     "all_reduce(input, output=None, op='sum', *, dtype=None, async_op=False)"},
    {"broadcast", EXT_KEYWORDS(ext_comm_broadcast), METH_VARARGS | METH_KEYWORDS,
     "broadcast(buffer, root=0, *, dtype=None, async_op=False)"},
    {"abort", comm_abort, METH_VARARGS, "abort(reason=None)"},
    {"async_error", comm_async_error, METH_NOARGS, "async_error() -> Error or None"},
    {"set_timeout", comm_set_timeout, METH_VARARGS, "set_timeout(timeout_ms)"},
    {"stats", comm_stats, METH_NOARGS, "stats() -> dict"},
    {"describe_link", comm_describe_link, METH_VARARGS, "describe_link(peer) -> str"},
    {"describe_schedules", comm_describe_schedules, METH_NOARGS, "describe_schedules() -> list of str"},
    {"attach_gpu", ext_comm_attach_gpu, METH_VARARGS, "attach_gpu(device)"},
    {"wait_gpu", ext_comm_wait_gpu, METH_VARARGS, "wait_gpu(stream, timeout_ms)"},
    {"close", comm_close, METH_NOARGS, "close()"},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef getset[] = {
    {"rank", comm_rank, NULL, "Number of this rank in the group.", NULL},
    {"world_size", comm_rank, NULL, "Number of ranks in the group.", (void *)getset},
    {"closed", comm_closed, NULL, "Whether close() was called.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "Communicator(rank, world_size, *, store=None, unique_id=None, name=None, timeout_ms=0, "
                "format='auto', slice_bytes=0, transports=None, n_sockets=0, secret=None, schedule=None, "
                "host_id=None)"},
    {Py_tp_new, (void *)comm_new},
    {Py_tp_dealloc, (void *)comm_dealloc},
    {Py_tp_traverse, (void *)comm_traverse},
    {Py_tp_methods, methods},
    {Py_tp_getset, getset},
    {0, NULL},
};

PyType_Spec ext_comm_spec = {
    .name = "spccl._ext.Communicator",
    .basicsize = sizeof(ext_comm),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = slots,
};
