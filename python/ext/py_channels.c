/* py_channels.c - the Channels type: a set of one-sided channels; and the communicator's GPU. All memory is given and
 * returned as addresses. channels.py has the checks of types and the layout of what `get` returns. */
#include "py_comm.h"

#include <spccl_channel.h>

typedef struct ext_channels {
    PyObject_HEAD ext_comm *comm; /* owned */
    spccl_channels *channels;     /* NULL once closed; gone with the communicator */
    uint32_t kind;
} ext_channels;

/* ---- the communicator's GPU ---- */

PyObject *ext_comm_attach_gpu(PyObject *obj, PyObject *args)
{
    ext_comm *self = (ext_comm *)obj;
    spccl_cuda_config config = SPCCL_CUDA_CONFIG_INIT;
    spccl_status st;

    if (!PyArg_ParseTuple(args, "i:attach_gpu", &config.device) || ext_comm_enter(self, true) < 0)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    st = spccl_cuda_attach(self->comm, &config);
    Py_END_ALLOW_THREADS
    ext_comm_leave(self, true);
    return ext_none_or_raise(ext_comm_state(self), st);
}

PyObject *ext_comm_wait_gpu(PyObject *obj, PyObject *args)
{
    ext_comm *self = (ext_comm *)obj;
    unsigned long long stream;
    long long timeout_ms;
    spccl_status st;

    if (!PyArg_ParseTuple(args, "KL:wait_gpu", &stream, &timeout_ms) || ext_comm_enter(self, false) < 0)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    st = spccl_cuda_wait(self->comm, (void *)(uintptr_t)stream, timeout_ms);
    Py_END_ALLOW_THREADS
    ext_comm_leave(self, false);
    return ext_none_or_raise(ext_comm_state(self), st);
}

/* ---- a set of channels ---- */

static ext_state *state_of(ext_channels *self)
{
    return ext_state_of_type(Py_TYPE((PyObject *)self));
}

/* Begin to use the set. Returns 0, and the caller then calls ext_comm_leave; or -1 with StateError. */
static int enter(ext_channels *self, bool issue)
{
    if (self->channels == NULL) {
        ext_raise_text(state_of(self), SPCCL_ERR_STATE, "channels: they are closed");
        return -1;
    }
    return ext_comm_enter(self->comm, issue);
}

static PyObject *channels_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    ext_state *state = ext_state_of_type(type);
    spccl_channels_config config = SPCCL_CHANNELS_CONFIG_INIT;
    unsigned long long window_bytes, window;
    spccl_channels *made = NULL;
    PyObject *comm;
    ext_channels *self;
    spccl_status st;

    if (kwargs != NULL && PyDict_Size(kwargs) != 0) {
        ext_raise_text(state, SPCCL_ERR_ARG, "Channels: it has no named arguments");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "O!IKIIK:Channels", state->comm_type, &comm, &config.kind, &window_bytes,
                          &config.n_per_peer, &config.n_triggers, &window) ||
        ext_comm_enter((ext_comm *)comm, true) < 0)
        return NULL;
    config.window_bytes = window_bytes;
    config.window = (void *)(uintptr_t)window;
    Py_BEGIN_ALLOW_THREADS
    st = spccl_channels_create(((ext_comm *)comm)->comm, &config, &made);
    Py_END_ALLOW_THREADS
    ext_comm_leave((ext_comm *)comm, true);
    if (st != SPCCL_OK)
        return ext_raise(state, st);
    self = (ext_channels *)PyType_GenericAlloc(type, 0); /* zeroed */
    if (self == NULL)
        return NULL; /* the set is destroyed with its communicator */
    Py_INCREF(comm);
    self->comm = (ext_comm *)comm;
    self->channels = made;
    self->kind = config.kind;
    return (PyObject *)self;
}

static PyObject *channels_close(PyObject *obj, PyObject *unused)
{
    ext_channels *self = (ext_channels *)obj;
    spccl_channels *channels = self->channels;

    (void)unused;
    if (channels == NULL || self->comm->comm == NULL) { /* a closed communicator has destroyed its sets */
        self->channels = NULL;
        Py_RETURN_NONE;
    }
    if (ext_comm_enter(self->comm, true) < 0)
        return NULL;
    self->channels = NULL;
    Py_BEGIN_ALLOW_THREADS
    spccl_channels_destroy(channels);
    Py_END_ALLOW_THREADS
    ext_comm_leave(self->comm, true);
    Py_RETURN_NONE;
}

static PyObject *channels_window(PyObject *obj, PyObject *unused)
{
    ext_channels *self = (ext_channels *)obj;
    void *device = NULL, *host = NULL;
    spccl_status st;

    (void)unused;
    if (enter(self, false) < 0)
        return NULL;
    st = spccl_channels_window(self->channels, &device, &host);
    ext_comm_leave(self->comm, false);
    if (st != SPCCL_OK)
        return ext_raise(state_of(self), st);
    return Py_BuildValue("(KK)", (unsigned long long)(uintptr_t)device, (unsigned long long)(uintptr_t)host);
}

static PyObject *channels_add_memory(PyObject *obj, PyObject *args)
{
    ext_channels *self = (ext_channels *)obj;
    unsigned long long memory, bytes;
    uint32_t number = 0;
    spccl_status st;

    if (!PyArg_ParseTuple(args, "KK:add_memory", &memory, &bytes) || enter(self, true) < 0)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    st = spccl_channels_add_memory(self->channels, (void *)(uintptr_t)memory, bytes, &number);
    Py_END_ALLOW_THREADS
    ext_comm_leave(self->comm, true);
    if (st != SPCCL_OK)
        return ext_raise(state_of(self), st);
    return PyLong_FromUnsignedLong(number);
}

static PyObject *channels_get(PyObject *obj, PyObject *args)
{
    ext_channels *self = (ext_channels *)obj;
    union {
        spccl_memory_channel memory;
        spccl_port_channel port;
    } out;
    unsigned index, peer_memory, own_memory;
    bool is_port = self->kind == SPCCL_CHANNEL_PORT;
    spccl_status st;
    int peer;

    if (!PyArg_ParseTuple(args, "iIII:get", &peer, &index, &peer_memory, &own_memory) ||
        enter(self, false) < 0)
        return NULL;
    st = is_port ? spccl_channels_get_port_at(self->channels, peer, index, peer_memory, own_memory, &out.port)
                 : spccl_channels_get_memory_at(self->channels, peer, index, peer_memory, own_memory,
                                                &out.memory);
    ext_comm_leave(self->comm, false);
    if (st != SPCCL_OK)
        return ext_raise(state_of(self), st);
    return PyBytes_FromStringAndSize((const char *)&out,
                                     is_port ? (Py_ssize_t)sizeof out.port : (Py_ssize_t)sizeof out.memory);
}

static PyObject *channels_closed(PyObject *obj, void *unused)
{
    ext_channels *self = (ext_channels *)obj;

    (void)unused;
    return PyBool_FromLong(self->channels == NULL || self->comm->comm == NULL);
}

/* The set stays until its communicator is closed: destroying it would wait for the other ranks. */
static void channels_dealloc(PyObject *obj)
{
    ext_channels *self = (ext_channels *)obj;
    PyTypeObject *type = Py_TYPE(obj);

    PyObject_GC_UnTrack(obj);
    Py_XDECREF((PyObject *)self->comm);
    PyObject_GC_Del(obj);
    Py_DECREF(type);
}

static int channels_traverse(PyObject *obj, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(obj));
    Py_VISIT((PyObject *)((ext_channels *)obj)->comm);
    return 0;
}

static PyMethodDef methods[] = {
    {"window", channels_window, METH_NOARGS, "window() -> (address on the GPU, address on the host or 0)"},
    {"add_memory", channels_add_memory, METH_VARARGS, "add_memory(address, bytes) -> number"},
    {"get", channels_get, METH_VARARGS,
     "get(peer, index, peer_memory, own_memory) -> bytes: spccl_memory_channel or spccl_port_channel"},
    {"close", channels_close, METH_NOARGS, "close()"},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef getset[] = {
    {"closed", channels_closed, NULL, "Whether close() was called, of this or of the communicator.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "Channels(comm, kind, window_bytes, n_per_peer, n_triggers, window)"},
    {Py_tp_new, (void *)channels_new},
    {Py_tp_dealloc, (void *)channels_dealloc},
    {Py_tp_traverse, (void *)channels_traverse},
    {Py_tp_methods, methods},
    {Py_tp_getset, getset},
    {0, NULL},
};

PyType_Spec ext_channels_spec = {
    .name = "spccl._ext.Channels",
    .basicsize = sizeof(ext_channels),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = slots,
};
