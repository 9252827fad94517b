/* py_store.c - see py_store.h. */
#include "py_store.h"

#include "py_buffer.h"

#include <string.h>

int ext_store_check(ext_state *state, PyObject *object)
{
    static const char *const wanted[] = {"set", "get", "wait"};
    for (int i = 0; i < 3; i++)
        if (!PyObject_HasAttrString(object, wanted[i])) {
            ext_raise_text(
                state, SPCCL_ERR_ARG,
                "store: the object has no method \"%s\"; wanted set(key, bytes), get(key) -> bytes and "
                "wait([key], timedelta), as torch.distributed.Store has them",
                wanted[i]);
            return -1;
        }
    return 0;
}

/* Keep the current exception for ext_store_raise. Returns the status for the library: time-out or not. */
static spccl_status keep_exception(ext_store *s, bool waiting)
{
    /* torch raises DistStoreError, a RuntimeError, for a time-out, so every failed wait counts as a
     * time-out. */
    bool plain = PyErr_ExceptionMatches(PyExc_Exception) != 0;
    if (s->exc_type == NULL)
        PyErr_Fetch(&s->exc_type, &s->exc_value, &s->exc_traceback);
    else
        PyErr_Clear();
    return waiting && plain ? SPCCL_ERR_TIMEOUT : SPCCL_ERR_SYSTEM;
}

static PyObject *milliseconds(int64_t ms)
{
    PyObject *datetime = PyImport_ImportModule("datetime"), *delta = NULL;
    if (datetime != NULL) /* timedelta(days, seconds, microseconds, milliseconds) */
        delta = PyObject_CallMethod(datetime, "timedelta", "iiiL", 0, 0, 0, (long long)ms);
    Py_XDECREF(datetime);
    return delta;
}

spccl_status ext_store_set(void *ctx, const char *key, const void *data, size_t bytes)
{
    ext_store *s = ctx;
    spccl_status st = SPCCL_OK;
    PyObject *done;

    PyEval_RestoreThread(s->save);
    done = PyObject_CallMethod(s->object, "set", "sy#", key, (const char *)data, (Py_ssize_t)bytes);
    if (done == NULL)
        st = keep_exception(s, false);
    Py_XDECREF(done);
    s->save = PyEval_SaveThread();
    return st;
}

static spccl_status wait_and_get(ext_store *s, const char *key, void *buf, size_t cap, int64_t timeout_ms,
                                 size_t *out)
{
    PyObject *delta = milliseconds(timeout_ms), *done = NULL, *value;
    ext_array bytes;

    if (delta != NULL)
        done = PyObject_CallMethod(s->object, "wait", "[s]O", key, delta);
    Py_XDECREF(delta);
    if (done == NULL)
        return keep_exception(s, true);
    Py_DECREF(done);
    value = PyObject_CallMethod(s->object, "get", "s", key);
    if (value == NULL || ext_bytes_acquire(s->state, value, "store.get's result", &bytes) < 0) {
        Py_XDECREF(value);
        return keep_exception(s, false);
    }
    *out = bytes.n_elems < cap ? bytes.n_elems : cap;
    if (*out != 0)
        memcpy(buf, bytes.data, *out);
    ext_array_release(&bytes);
    Py_DECREF(value);
    return SPCCL_OK;
}

spccl_status ext_store_get(void *ctx, const char *key, void *buf, size_t cap, int64_t timeout_ms,
                           size_t *out_bytes)
{
    ext_store *s = ctx;
    spccl_status st;

    PyEval_RestoreThread(s->save);
    st = wait_and_get(s, key, buf, cap, timeout_ms, out_bytes);
    s->save = PyEval_SaveThread();
    return st;
}

PyObject *ext_store_raise(ext_store *s, spccl_status status)
{
    PyObject *cause, *type, *value, *traceback;

    if (s->exc_type == NULL)
        return ext_raise(s->state, status);
    PyErr_NormalizeException(&s->exc_type, &s->exc_value, &s->exc_traceback);
    if (s->exc_traceback != NULL)
        (void)PyException_SetTraceback(s->exc_value, s->exc_traceback);
    if (!PyErr_GivenExceptionMatches(s->exc_value,
                                     PyExc_Exception)) { /* KeyboardInterrupt and the like stay as they are */
        PyErr_SetObject((PyObject *)Py_TYPE(s->exc_value), s->exc_value);
        return NULL;
    }
    if (status == SPCCL_ERR_TIMEOUT) {
        ext_raise(s->state, status);
    } else {
        PyObject *text = PyObject_Str(s->exc_value);
        const char *utf8 = text != NULL ? PyUnicode_AsUTF8AndSize(text, NULL) : NULL;
        ext_raise_text(s->state, status, "store: a method of the store object failed: %s",
                       utf8 != NULL ? utf8 : "?");
        Py_XDECREF(text);
    }
    cause = Py_NewRef(s->exc_value);
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    PyException_SetCause(value, cause); /* takes ownership of cause */
    PyErr_Restore(type, value, traceback);
    return NULL;
}

void ext_store_fini(ext_store *s)
{
    Py_CLEAR(s->exc_type);
    Py_CLEAR(s->exc_value);
    Py_CLEAR(s->exc_traceback);
}
