/* py_error.c - the exception classes, and the function that turns a status into an exception. */
#include "module.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static const struct {
    const char *name, *doc;
    PyObject **also; /* the builtin exception that the class also derives from, besides spccl.Error */
    spccl_status statuses[4]; /* that raise it; the first one is an attribute of the class */
} classes[EXT_N_ERRORS] = {
    [EXT_ERROR] = {"spccl.Error",
                   "Any failure of spccl; `status` is its number (docs/ERRORS.md).",
                   &PyExc_RuntimeError,
                   {SPCCL_ERR_BUG}},
    [EXT_ARGUMENT_ERROR] = {"spccl.ArgumentError",
                            "An argument is out of range, of a wrong dtype or size, or overlaps.",
                            &PyExc_ValueError,
                            {SPCCL_ERR_ARG, SPCCL_ERR_DTYPE, SPCCL_ERR_DST_SMALL, SPCCL_ERR_ALIAS}},
    [EXT_FORMAT_ERROR] =
        {"spccl.FormatError",
         "Bytes that do not follow docs/FORMAT.md, or a frame of another dtype or size than wanted.",
         &PyExc_ValueError,
         {SPCCL_ERR_FORMAT, SPCCL_ERR_VERSION, SPCCL_ERR_FRAME}},
    [EXT_STATE_ERROR] = {"spccl.StateError",
                         "Used after close, or from two threads at once.",
                         NULL,
                         {SPCCL_ERR_STATE}},
    [EXT_UNSUPPORTED_ERROR] = {"spccl.UnsupportedError",
                               "The call is valid, but this build or this format cannot do it.",
                               &PyExc_NotImplementedError,
                               {SPCCL_ERR_UNSUPPORTED}},
    [EXT_SETTING_ERROR] = {"spccl.SettingError",
                           "A SPCCL_* variable or an option has a bad value.",
                           &PyExc_ValueError,
                           {SPCCL_ERR_SETTING}},
    [EXT_OUT_OF_MEMORY_ERROR] = {"spccl.OutOfMemoryError",
                                 "Out of memory.",
                                 &PyExc_MemoryError,
                                 {SPCCL_ERR_NOMEM}},
    [EXT_SYSTEM_CALL_ERROR] = {"spccl.SystemCallError",
                               "An operating-system call failed.",
                               &PyExc_OSError,
                               {SPCCL_ERR_SYSTEM}},
    [EXT_PEER_ERROR] = {"spccl.PeerError",
                        "A peer died or closed its connection.",
                        &PyExc_ConnectionError,
                        {SPCCL_ERR_PEER}},
    [EXT_TIMEOUT_ERROR] = {"spccl.TimeoutError",
                           "A deadline passed.",
                           &PyExc_TimeoutError,
                           {SPCCL_ERR_TIMEOUT}},
    [EXT_MISMATCH_ERROR] = {"spccl.MismatchError",
                            "Ranks called different operations, sizes or dtypes.",
                            &PyExc_ValueError,
                            {SPCCL_ERR_MISMATCH}},
    [EXT_ABORTED_ERROR] = {"spccl.AbortedError",
                           "The communicator was aborted, here or on a peer.",
                           NULL,
                           {SPCCL_ERR_ABORTED}},
    [EXT_AUTH_ERROR] = {"spccl.AuthError",
                        "A peer has another job secret.",
                        &PyExc_PermissionError,
                        {SPCCL_ERR_AUTH}},
    [EXT_UNREACHABLE_ERROR] = {"spccl.UnreachableError",
                               "No transport reaches a peer.",
                               &PyExc_ConnectionError,
                               {SPCCL_ERR_UNREACHABLE}},
    [EXT_DEVICE_ERROR] = {"spccl.DeviceError", "A device call failed.", NULL, {SPCCL_ERR_DEVICE}},
    [EXT_INTERNAL_ERROR] = {"spccl.InternalError",
                            "A bug in spccl: please report the text.",
                            NULL,
                            {SPCCL_ERR_BUG}},
};

static int class_of(spccl_status status)
{
    for (int kind = EXT_ERROR + 1; kind < EXT_N_ERRORS; kind++)
        for (int i = 0; i < 4; i++)
            if (classes[kind].statuses[i] == status && status != SPCCL_OK)
                return kind;
    return EXT_INTERNAL_ERROR;
}

static PyObject *new_class(ext_state *state, ext_error_class kind)
{
    PyObject *other = classes[kind].also != NULL ? *classes[kind].also : NULL, *bases, *dict, *result = NULL;

    if (kind == EXT_ERROR)
        bases = PyTuple_Pack(1, other);
    else if (other != NULL)
        bases = PyTuple_Pack(2, state->errors[EXT_ERROR], other);
    else
        bases = PyTuple_Pack(1, state->errors[EXT_ERROR]);
    dict = Py_BuildValue("{si}", "status", (int)classes[kind].statuses[0]);
    if (bases != NULL && dict != NULL)
        result = PyErr_NewExceptionWithDoc(classes[kind].name, classes[kind].doc, bases, dict);
    Py_XDECREF(bases);
    Py_XDECREF(dict);
    return result;
}

int ext_errors_add(PyObject *module, ext_state *state)
{
    for (int i = 0; i < EXT_N_ERRORS; i++) {
        state->errors[i] = new_class(state, (ext_error_class)i);
        if (state->errors[i] == NULL ||
            PyModule_AddObjectRef(module, strchr(classes[i].name, '.') + 1, state->errors[i]) < 0)
            return -1;
    }
    return 0;
}

PyObject *ext_error_new(ext_state *state, spccl_status status, const char *text)
{
    PyObject *number, *error;

    if (text == NULL || text[0] == '\0')
        text = spccl_status_name(status);
    /* "replace": a text may quote bytes from a peer or a setting that are not UTF-8. */
    PyObject *message = PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace");
    if (message == NULL)
        return NULL;
    error = PyObject_CallFunctionObjArgs(state->errors[class_of(status)], message, NULL);
    Py_DECREF(message);
    if (error == NULL)
        return NULL;
    number = PyLong_FromLong(status);
    if (number == NULL || PyObject_SetAttrString(error, "status", number) < 0)
        Py_CLEAR(error);
    Py_XDECREF(number);
    return error;
}

static PyObject *raise_with(ext_state *state, spccl_status status, const char *text)
{
    PyObject *error = ext_error_new(state, status, text);
    if (error != NULL) {
        PyErr_SetObject((PyObject *)Py_TYPE(error), error);
        Py_DECREF(error);
    }
    return NULL;
}

PyObject *ext_raise(ext_state *state, spccl_status status)
{
    return raise_with(state, status, spccl_last_error());
}

PyObject *ext_none_or_raise(ext_state *state, spccl_status status)
{
    return status == SPCCL_OK ? Py_NewRef(Py_None) : ext_raise(state, status);
}

PyObject *ext_raise_text(ext_state *state, spccl_status status, const char *fmt, ...)
{
    char text[1001];
    va_list args;

    va_start(args, fmt);
    (void)vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    return raise_with(state, status, text);
}
