/* module.h - state of the extension module spccl._ext: types and exceptions. C globals hold no state.
 *
 * python/ext is the only C of the project that includes Python.h. Of our own headers it includes spccl.h and
 * its own. It is built against the limited API, which free-threaded Pythons do not have. */
#ifndef EXT_MODULE_H
#define EXT_MODULE_H

#include <pyconfig.h>

#ifdef Py_GIL_DISABLED
#error "spccl._ext needs a Python with the GIL: build it with another than a free-threaded one (3.13t, 3.14t)"
#endif

#include <Python.h>

#include <spccl.h>

#include <stdbool.h>

/* The GIL is held through work on fewer bytes than this: releasing and taking it again would cost more. */
#define EXT_GIL_BYTES (16u * 1024u)

/* Indices into ext_state.errors. py_error.c lists the names and base classes. */
typedef enum ext_error_class {
    EXT_ERROR, /* the base of all others */
    EXT_ARGUMENT_ERROR,
    EXT_FORMAT_ERROR,
    EXT_STATE_ERROR,
    EXT_UNSUPPORTED_ERROR,
    EXT_SETTING_ERROR,
    EXT_OUT_OF_MEMORY_ERROR,
    EXT_SYSTEM_CALL_ERROR,
    EXT_PEER_ERROR,
    EXT_TIMEOUT_ERROR,
    EXT_MISMATCH_ERROR,
    EXT_ABORTED_ERROR,
    EXT_AUTH_ERROR,
    EXT_UNREACHABLE_ERROR,
    EXT_DEVICE_ERROR,
    EXT_INTERNAL_ERROR,
    EXT_N_ERRORS
} ext_error_class;

typedef struct ext_state {
    PyObject *errors[EXT_N_ERRORS];
    PyTypeObject *comm_type, *request_type, *channels_type;
} ext_state;

/* State of the module that `type` belongs to. `type` is a type of this module. */
ext_state *ext_state_of_type(PyTypeObject *type);

/* ---- py_error.c ---- */

/* Make the exception classes and add them to the module. 0, or -1 with an exception set. */
int ext_errors_add(PyObject *module, ext_state *state);
/* A new exception object for a failed call. `status` decides its class and becomes its attribute `status`.
 * Returns NULL with an exception set if that fails. */
PyObject *ext_error_new(ext_state *state, spccl_status status, const char *text);
/* Raise the Python exception for `status`, with spccl_last_error() as text. Always returns NULL. */
PyObject *ext_raise(ext_state *state, spccl_status status);
/* None, or as ext_raise. */
PyObject *ext_none_or_raise(ext_state *state, spccl_status status);
/* As ext_raise, but with the text of `fmt` (printf-like, at most 1000 bytes). */
PyObject *ext_raise_text(ext_state *state, spccl_status status, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

/* ---- names <-> numbers (py_frame.c); 0, or -1 with ArgumentError set ---- */

/* `arg` names the argument in the text (py_buffer.c). */
int ext_dtype_of_name(ext_state *state, const char *arg, const char *name, spccl_dtype *out);
int ext_format_of_name(ext_state *state, const char *name, spccl_format *out);
int ext_verb_of_name(ext_state *state, const char *name, spccl_verb *out);
int ext_redop_of_name(ext_state *state, const char *name, spccl_redop *out);

/* ---- functions and types that module.c puts together ---- */

PyObject *ext_encode(PyObject *module, PyObject *args, PyObject *kwargs);
PyObject *ext_decode(PyObject *module, PyObject *args, PyObject *kwargs);
PyObject *ext_inspect(PyObject *module, PyObject *args, PyObject *kwargs);
PyObject *ext_plan_check(PyObject *module, PyObject *args);
PyObject *ext_simulate(PyObject *module, PyObject *args, PyObject *kwargs);
PyObject *ext_prune_plan(PyObject *module, PyObject *args);
PyObject *ext_prune(PyObject *module, PyObject *args);
PyObject *ext_weights_plan(PyObject *module, PyObject *args);
PyObject *ext_weights_send(PyObject *module, PyObject *args);
PyObject *ext_weights_send_signs(PyObject *module, PyObject *args);
PyObject *ext_signs_sum(PyObject *module, PyObject *args);
PyObject *ext_signs_decode(PyObject *module, PyObject *args);
PyObject *ext_weights_receive(PyObject *module, PyObject *args);
PyObject *ext_delta_bound(PyObject *module, PyObject *args);
PyObject *ext_delta_encode(PyObject *module, PyObject *args);
PyObject *ext_delta_check(PyObject *module, PyObject *args);
PyObject *ext_delta_apply(PyObject *module, PyObject *args);
PyObject *ext_delta_undo(PyObject *module, PyObject *args);
PyObject *ext_delta_checksum(PyObject *module, PyObject *args);
PyObject *ext_delta_plan(PyObject *module, PyObject *args);
PyObject *ext_delta_plan_destroy(PyObject *module, PyObject *args);
PyObject *ext_delta_plan_check(PyObject *module, PyObject *args);
PyObject *ext_delta_plan_apply(PyObject *module, PyObject *args);
PyObject *ext_delta_plan_undo(PyObject *module, PyObject *args);
PyObject *ext_delta_cuda_checksum(PyObject *module, PyObject *args);
extern PyType_Spec ext_comm_spec;
extern PyType_Spec ext_channels_spec;
extern PyType_Spec ext_request_spec;

/* Casts a METH_KEYWORDS function, which has three parameters, to the type of the method table. */
#define EXT_KEYWORDS(fn) ((PyCFunction)(void (*)(void))(fn))

#endif
