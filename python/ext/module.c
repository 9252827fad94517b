/* module.c - the module spccl._ext: multi-phase init, method table, info. */
#include "module.h"

#include <string.h>

ext_state *ext_state_of_type(PyTypeObject *type)
{
    return PyType_GetModuleState(type);
}

static PyObject *get_unique_id(PyObject *module, PyObject *unused)
{
    spccl_unique_id id;
    spccl_status st;

    (void)unused;
    Py_BEGIN_ALLOW_THREADS
    st = spccl_get_unique_id(&id);
    Py_END_ALLOW_THREADS
    if (st != SPCCL_OK)
        return ext_raise(PyModule_GetState(module), st);
    return PyBytes_FromStringAndSize(id.bytes, sizeof id.bytes);
}

static PyObject *get_host(PyObject *module, PyObject *unused)
{
    spccl_host host;
    spccl_status st = spccl_get_host(NULL, &host);

    (void)unused;
    if (st != SPCCL_OK)
        return ext_raise(PyModule_GetState(module), st);
    return PyBytes_FromStringAndSize(host.bytes, sizeof host.bytes);
}

static PyObject *info(PyObject *module, PyObject *unused)
{
    spccl_info_entry e = {.struct_bytes = sizeof e};
    PyObject *list = PyList_New(0);

    (void)module;
    (void)unused;
    for (size_t i = 0; list != NULL && spccl_info(i, &e) == SPCCL_OK; i++) {
        PyObject *entry = Py_BuildValue("(ssss)", e.kind, e.name, e.value, e.why);
        if (entry == NULL || PyList_Append(list, entry) < 0)
            Py_CLEAR(list);
        Py_XDECREF(entry);
    }
    return list;
}

static PyObject *version(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    return PyUnicode_FromString(spccl_version());
}

static PyMethodDef methods[] = {
    {"encode", EXT_KEYWORDS(ext_encode), METH_VARARGS | METH_KEYWORDS,
     "encode(x, *, base=None, format='auto', dtype=None, slice_elems=0) -> bytes"},
    {"decode", EXT_KEYWORDS(ext_decode), METH_VARARGS | METH_KEYWORDS,
     "decode(encoded, out, verb='set', dtype=None) -> None"},
    {"inspect", EXT_KEYWORDS(ext_inspect), METH_VARARGS | METH_KEYWORDS,
     "inspect(encoded, offset=0) -> dict: the frame that starts at that byte"},
    {"plan_check", ext_plan_check, METH_VARARGS,
     "plan_check(text, i) -> dict: check the i-th plan of a plan file, given as bytes"},
    {"simulate", EXT_KEYWORDS(ext_simulate), METH_VARARGS | METH_KEYWORDS,
     "simulate(**options) -> dict: what a collective would cost; the fields of spccl_simulate_options"},
    {"prune_plan", ext_prune_plan, METH_VARARGS,
     "prune_plan(segments, n_elems, dtype, device) -> (owner of the plan, its address): segments as bytes "
     "(spccl.prune.SEGMENT), device -1 = host"},
    {"prune", ext_prune, METH_VARARGS, "prune(plan, grad, options, on_gpu, stream) -> None: addresses"},
    {"weights_plan", ext_weights_plan, METH_VARARGS,
     "weights_plan: as prune_plan, of own and shared weights"},
    {"weights_send", ext_weights_send, METH_VARARGS,
     "weights_send(plan, out, density, sample, leak, scale, seed, chunk, levels, stream) -> None"},
    {"weights_receive", ext_weights_receive, METH_VARARGS, "weights_receive(plan, change, stream) -> None"},
    {"weights_send_signs", ext_weights_send_signs, METH_VARARGS,
     "weights_send_signs(plan, rows, leak, stream) -> None"},
    {"signs_sum", ext_signs_sum, METH_VARARGS,
     "signs_sum(parts, n_parts, kept, rows, lengths, n_chunks, device, stream) -> None: addresses, device -1 "
     "= host"},
    {"signs_decode", ext_signs_decode, METH_VARARGS,
     "signs_decode(rows, n_chunks, out, device, stream) -> None"},
    {"delta_bound", ext_delta_bound, METH_VARARGS, "delta_bound(n_elems, dtype) -> int"},
    {"delta_encode", ext_delta_encode, METH_VARARGS,
     "delta_encode(sources, raw, dst, dst_cap, on_gpu, stream) -> list of (offset, bytes, nnz, sum_change)"},
    {"delta_check", ext_delta_check, METH_VARARGS,
     "delta_check(targets, places, old, old_cap) -> list of sum changes"},
    {"delta_apply", ext_delta_apply, METH_VARARGS, "delta_apply(targets, places) -> None"},
    {"delta_undo", ext_delta_undo, METH_VARARGS, "delta_undo(targets, places, old, old_bytes) -> None"},
    {"delta_checksum", ext_delta_checksum, METH_VARARGS,
     "delta_checksum(x, n_elems, dtype, first, key) -> int"},
    {"delta_plan", ext_delta_plan, METH_VARARGS,
     "delta_plan(targets, places, stream) -> (address of a plan, bytes of old); on a GPU, as all of a plan"},
    {"delta_plan_destroy", ext_delta_plan_destroy, METH_VARARGS, "delta_plan_destroy(plan) -> None"},
    {"delta_plan_check", ext_delta_plan_check, METH_VARARGS,
     "delta_plan_check(plan, n_targets, old, old_cap, stream) -> list of sum changes"},
    {"delta_plan_apply", ext_delta_plan_apply, METH_VARARGS, "delta_plan_apply(plan, stream) -> None"},
    {"delta_plan_undo", ext_delta_plan_undo, METH_VARARGS,
     "delta_plan_undo(plan, old, old_bytes, stream) -> None"},
    {"delta_cuda_checksum", ext_delta_cuda_checksum, METH_VARARGS,
     "delta_cuda_checksum(x, n_elems, dtype, first, key, out, stream) -> None"},
    {"get_unique_id", get_unique_id, METH_NOARGS, "get_unique_id() -> bytes: 128 bytes, good for one group"},
    {"get_host", get_host, METH_NOARGS, "get_host() -> bytes: the same on all ranks of one host"},
    {"info", info, METH_NOARGS, "info() -> list of (kind, name, value, why)"},
    {"version", version, METH_NOARGS, "version() -> str: of the library loaded"},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject *add_type(PyObject *module, PyType_Spec *spec)
{
    PyTypeObject *type = (PyTypeObject *)PyType_FromModuleAndSpec(module, spec, NULL);
    if (type != NULL && PyModule_AddType(module, type) < 0)
        Py_CLEAR(type);
    return type;
}

static int exec(PyObject *module)
{
    ext_state *state = PyModule_GetState(module);

    if (ext_errors_add(module, state) < 0)
        return -1;
    if (strcmp(spccl_version(), SPCCL_VERSION_TEXT) != 0) {
        PyErr_Format(
            PyExc_ImportError,
            "spccl._ext was built for libspccl %s, but libspccl %s was loaded: two installations are "
            "mixed; reinstall spccl",
            SPCCL_VERSION_TEXT, spccl_version());
        return -1;
    }
    state->request_type = add_type(module, &ext_request_spec);
    if (state->request_type == NULL)
        return -1;
    state->comm_type = add_type(module, &ext_comm_spec);
    if (state->comm_type == NULL)
        return -1;
    state->channels_type = add_type(module, &ext_channels_spec);
    return state->channels_type != NULL ? 0 : -1;
}

static int traverse(PyObject *module, visitproc visit, void *arg)
{
    ext_state *state = PyModule_GetState(module);
    for (int i = 0; i < EXT_N_ERRORS; i++)
        Py_VISIT(state->errors[i]);
    Py_VISIT(state->comm_type);
    Py_VISIT(state->request_type);
    Py_VISIT(state->channels_type);
    return 0;
}

static int clear(PyObject *module)
{
    ext_state *state = PyModule_GetState(module);
    for (int i = 0; i < EXT_N_ERRORS; i++)
        Py_CLEAR(state->errors[i]);
    Py_CLEAR(state->comm_type);
    Py_CLEAR(state->request_type);
    Py_CLEAR(state->channels_type);
    return 0;
}

static void free_module(void *module)
{
    (void)clear(module);
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, (void *)exec},
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "spccl._ext",
    .m_doc = "libspccl for Python. Use the package spccl, which adds types and documentation.",
    .m_size = sizeof(ext_state),
    .m_methods = methods,
    .m_slots = slots,
    .m_traverse = traverse,
    .m_clear = clear,
    .m_free = free_module,
};

PyMODINIT_FUNC PyInit__ext(void); /* Python looks it up by name */
PyMODINIT_FUNC PyInit__ext(void)
{
    return PyModuleDef_Init(&definition);
}
