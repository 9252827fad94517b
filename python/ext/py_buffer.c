/* py_buffer.c - see py_buffer.h. */
#include "py_buffer.h"

#include <string.h>

/* ---- DLPack, declared from its specification (dmlc.github.io/dlpack, versions 0.8 and 1.x) ---- */

enum { DL_CPU = 1, DL_CUDA = 2, DL_CUDA_HOST = 3, DL_ROCM = 10, DL_ROCM_HOST = 11 };
enum {
    DL_INT = 0,
    DL_UINT = 1,
    DL_FLOAT = 2,
    DL_OPAQUE_HANDLE = 3,
    DL_BFLOAT = 4,
    DL_COMPLEX = 5,
    DL_BOOL = 6,
    DL_FLOAT8_FIRST = 7,
    DL_FLOAT8_LAST = 14
};
#define DL_FLAG_READ_ONLY 1u

typedef struct dl_tensor {
    void *data;
    int32_t device_type, device_id;
    int32_t ndim;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} dl_tensor;

typedef struct dl_managed {
    dl_tensor tensor;
    void *ctx;
    void (*deleter)(struct dl_managed *self);
} dl_managed;

typedef struct dl_managed_versioned {
    uint32_t major, minor;
    void *ctx;
    void (*deleter)(struct dl_managed_versioned *self);
    uint64_t flags;
    dl_tensor tensor;
} dl_managed_versioned;

/* ---- dtypes ---- */

int ext_dtype_of_name(ext_state *state, const char *arg, const char *name, spccl_dtype *out)
{
    for (int t = SPCCL_FLOAT32; t <= SPCCL_UINT8; t++)
        if (strcmp(name, spccl_dtype_name((spccl_dtype)t)) == 0) {
            *out = (spccl_dtype)t;
            return 0;
        }
    ext_raise_text(
        state, SPCCL_ERR_DTYPE,
        "%s: dtype \"%s\" is not known; wanted float32, float16, bfloat16, float64, float8, int8, int16, "
        "int32, int64 or uint8",
        arg, name);
    return -1;
}

/* The dtype of a struct-module format with one native element, 0 if there is none. The width of 'l' differs
 * between platforms, so `itemsize` decides among the integers. */
static spccl_dtype dtype_of_format(const char *format, Py_ssize_t itemsize)
{
    if (format == NULL)
        return SPCCL_UINT8;
    if (*format == '@' || *format == '=' || *format == '<') /* little-endian hosts only: FORMAT.md 1 */
        format++;
    if (format[0] == '\0' || format[1] != '\0')
        return 0;
    if (strchr("bhilqn", format[0]) != NULL)
        return itemsize == 1   ? SPCCL_INT8
               : itemsize == 2 ? SPCCL_INT16
               : itemsize == 4 ? SPCCL_INT32
                               : SPCCL_INT64;
    switch (format[0]) {
    case 'B':
    case 'c':
        return SPCCL_UINT8;
    case 'e':
        return SPCCL_FLOAT16;
    case 'f':
        return SPCCL_FLOAT32;
    case 'd':
        return SPCCL_FLOAT64;
    default:
        return 0;
    }
}

static spccl_dtype dtype_of_dlpack(const dl_tensor *t)
{
    if (t->lanes != 1)
        return 0;
    if (t->code == DL_INT)
        return t->bits == 8    ? SPCCL_INT8
               : t->bits == 16 ? SPCCL_INT16
               : t->bits == 32 ? SPCCL_INT32
               : t->bits == 64 ? SPCCL_INT64
                               : 0;
    if (t->code == DL_FLOAT)
        return t->bits == 16   ? SPCCL_FLOAT16
               : t->bits == 32 ? SPCCL_FLOAT32
               : t->bits == 64 ? SPCCL_FLOAT64
                               : 0;
    if (t->code == DL_BFLOAT && t->bits == 16)
        return SPCCL_BFLOAT16;
    if (t->code == DL_UINT && t->bits == 8)
        return SPCCL_UINT8;
    if (t->code >= DL_FLOAT8_FIRST && t->code <= DL_FLOAT8_LAST && t->bits == 8)
        return SPCCL_FLOAT8;
    return 0;
}

/* Whether elements of this format hold references: Python objects ('O') or addresses (PEP 3118 'P', '&' and
 * 'X{}'; ctypes 'z' and 'Z' for strings). Looks into structs and skips field names, which stand between
 * colons. 'Z' before a float type is a complex number. */
static bool holds_references(const char *format)
{
    bool in_name = false;

    for (; format != NULL && *format != '\0'; format++) {
        if (*format == ':')
            in_name = !in_name;
        else if (in_name)
            continue;
        else if (strchr("OP&Xz", *format) != NULL)
            return true;
        else if (*format == 'Z' && (format[1] == '\0' || strchr("fdg", format[1]) == NULL))
            return true;
    }
    return false;
}

/* Raises for an array of references. No dtype makes such memory safe to read or write: a decoded value would
 * be taken for the address of an object. */
static int refuse_references(ext_state *state, const char *arg, const char *type_name)
{
    ext_raise_text(state, SPCCL_ERR_DTYPE,
                   "%s: the elements are references to objects or addresses (\"%s\"), not numbers; wanted an "
                   "array of numbers, such as %s.astype(\"float64\")",
                   arg, type_name, arg);
    return -1;
}

/* The type of the elements as the object describes it. */
typedef struct own_type {
    spccl_dtype dtype; /* 0 = spccl has no such dtype */
    const char *name;  /* for texts */
    size_t item_bytes;
    bool is_complex;
} own_type;

/* Raises for a type without a dtype in spccl. */
static void refuse_type(ext_state *state, const char *arg, const own_type *own)
{
    char advice[120] = "pass dtype= to read them as one of that size";
    if (own->is_complex)
        (void)PyOS_snprintf(advice, sizeof advice,
                            "pass real and imaginary parts: %s.view(\"float%zu\") in numpy, "
                            "torch.view_as_real(%s) in torch",
                            arg, own->item_bytes * 4, arg);
    else if (own->item_bytes > 8 || (own->item_bytes & (own->item_bytes - 1)) != 0)
        (void)PyOS_snprintf(advice, sizeof advice, "convert them, as with %s.astype(\"float64\")", arg);
    ext_raise_text(state, SPCCL_ERR_DTYPE,
                   "%s: elements of type \"%s\", %zu bytes each, have no dtype in spccl; %s", arg, own->name,
                   own->item_bytes, advice);
}

/* Set a->dtype and a->n_elems for `bytes` bytes of memory. `wanted` is a dtype name, or NULL for the object's
 * own dtype. */
static int settle(ext_state *state, ext_array *a, const own_type *own, size_t bytes, const char *wanted)
{
    if (wanted == NULL) {
        if (own->dtype == 0) {
            refuse_type(state, a->name, own);
            return -1;
        }
        a->dtype = own->dtype;
    } else if (ext_dtype_of_name(state, a->name, wanted, &a->dtype) < 0) {
        return -1;
    }
    size_t elem_bytes = spccl_dtype_bytes(a->dtype);
    if (own->item_bytes != elem_bytes && (own->item_bytes != 1 || bytes % elem_bytes != 0)) {
        ext_raise_text(
            state, SPCCL_ERR_DTYPE,
            "%s: %zu bytes in elements of %zu bytes (\"%s\") cannot be read as dtype \"%s\" with %zu "
            "bytes each; wanted elements of that size, or plain bytes in a multiple of it",
            a->name, bytes, own->item_bytes, own->name, spccl_dtype_name(a->dtype), elem_bytes);
        return -1;
    }
    a->n_elems = bytes / elem_bytes;
    return 0;
}

/* ---- buffer protocol ---- */

/* Asks the object for any layout and checks the layout itself: an error of the object would not name the
 * argument. */
static int acquire_view(ext_state *state, PyObject *obj, bool writable, const char *dtype_name, ext_array *a)
{
    if (PyObject_GetBuffer(obj, &a->view, PyBUF_FULL_RO) < 0)
        return -1;
    a->has_view = true;
    if (!PyBuffer_IsContiguous(&a->view, 'C')) {
        ext_raise_text(
            state, SPCCL_ERR_ARG,
            "%s: the array is not C-contiguous; pass numpy.ascontiguousarray(%s) (a destination must be "
            "contiguous itself)",
            a->name, a->name);
        return -1;
    }
    if (writable && a->view.readonly) {
        ext_raise_text(state, SPCCL_ERR_ARG,
                       "%s: the memory is read-only, but the result goes there; pass a writable "
                       "array",
                       a->name);
        return -1;
    }
    if (a->view.format != NULL && (a->view.format[0] == '>' || a->view.format[0] == '!')) {
        ext_raise_text(state, SPCCL_ERR_DTYPE,
                       "%s: the elements are big-endian (\"%s\"); wanted this machine's order", a->name,
                       a->view.format);
        return -1;
    }
    if (holds_references(a->view.format))
        return refuse_references(state, a->name, a->view.format);
    a->data = a->view.buf;
    const own_type own = {dtype_of_format(a->view.format, a->view.itemsize),
                          a->view.format != NULL ? a->view.format : "B", (size_t)a->view.itemsize,
                          a->view.format != NULL && strchr(a->view.format, 'Z') != NULL};
    return settle(state, a, &own, (size_t)a->view.len, dtype_name);
}

/* ---- DLPack ---- */

/* 0 if the tensor lies in host memory. */
static int check_device(ext_state *state, PyObject *obj, const char *name)
{
    PyObject *device = PyObject_CallMethod(obj, "__dlpack_device__", NULL);
    PyObject *first = device != NULL ? PySequence_GetItem(device, 0) : NULL;
    long type = first != NULL ? PyLong_AsLong(first) : -1;

    Py_XDECREF(device);
    Py_XDECREF(first);
    if (type == -1 && PyErr_Occurred())
        return -1;
    if (type == DL_CPU || type == DL_CUDA_HOST || type == DL_ROCM_HOST)
        return 0;
    ext_raise_text(
        state, SPCCL_ERR_UNSUPPORTED,
        "%s: the tensor is in the memory of %s device (DLPack device type %ld); wanted host memory: pass "
        "%s.cpu()",
        name,
        type == DL_CUDA   ? "a CUDA"
        : type == DL_ROCM ? "a ROCm"
                          : "an accelerator",
        type, name);
    return -1;
}

/* 1 if the attribute is true, 0 if it is false or not there, -1 with an exception. */
static int is_true(PyObject *obj, const char *attr)
{
    PyObject *value =
        PyObject_HasAttrString(obj, attr) ? PyObject_GetAttrString(obj, attr) : Py_NewRef(Py_False);
    int result = value != NULL ? PyObject_IsTrue(value) : -1;
    Py_XDECREF(value);
    return result;
}

/* The object that exports the tensor's memory, a new reference. torch exports no tensor that requires grad, as a
 * parameter does, but its detach(). A result of autograd is only read: the backward pass may need its values. */
static PyObject *without_gradient(PyObject *obj, bool writable)
{
    int requires_grad = is_true(obj, "requires_grad"), may_detach = 1;
    if (requires_grad == 1 && writable)
        may_detach = is_true(obj, "is_leaf");
    if (requires_grad < 0 || may_detach < 0)
        return NULL;
    return requires_grad == 1 && may_detach == 1 ? PyObject_CallMethod(obj, "detach", NULL) : Py_NewRef(obj);
}

/* Asks for a version 1 capsule, which says whether the memory is read-only. Older producers take no arguments
 * and raise a TypeError; they are asked again without. */
static PyObject *dlpack_capsule(PyObject *obj)
{
    PyObject *method = PyObject_GetAttrString(obj, "__dlpack__");
    PyObject *args = PyTuple_New(0);
    PyObject *kwargs = Py_BuildValue("{s(ii)}", "max_version", 1, 0);
    PyObject *capsule = NULL;

    if (method != NULL && args != NULL && kwargs != NULL) {
        capsule = PyObject_Call(method, args, kwargs);
        if (capsule == NULL && PyErr_ExceptionMatches(PyExc_TypeError)) {
            PyErr_Clear();
            capsule = PyObject_CallNoArgs(method);
        }
    }
    Py_XDECREF(method);
    Py_XDECREF(args);
    Py_XDECREF(kwargs);
    return capsule;
}

/* Takes ownership of the capsule's tensor. The specification asks to rename the capsule: then the capsule's
 * own destructor does not free the tensor. */
static const dl_tensor *open_capsule(ext_state *state, PyObject *capsule, ext_array *a, bool *read_only)
{
    const dl_tensor *tensor;

    *read_only = false;
    if (PyCapsule_IsValid(capsule, "dltensor_versioned")) {
        dl_managed_versioned *m = PyCapsule_GetPointer(capsule, "dltensor_versioned");
        if (m->major != 1) {
            ext_raise_text(state, SPCCL_ERR_UNSUPPORTED, "%s: DLPack version %u.%u; wanted 1.x", a->name,
                           m->major, m->minor);
            return NULL;
        }
        *read_only = (m->flags & DL_FLAG_READ_ONLY) != 0;
        tensor = &m->tensor;
        if (PyCapsule_SetName(capsule, "used_dltensor_versioned") < 0)
            return NULL;
    } else if (PyCapsule_IsValid(capsule, "dltensor")) {
        dl_managed *m = PyCapsule_GetPointer(capsule, "dltensor");
        tensor = &m->tensor;
        if (PyCapsule_SetName(capsule, "used_dltensor") < 0)
            return NULL;
    } else {
        ext_raise_text(state, SPCCL_ERR_ARG, "%s: __dlpack__() did not return a DLPack capsule", a->name);
        return NULL;
    }
    Py_INCREF(capsule);
    a->capsule = capsule;
    return tensor;
}

/* Number of elements of the tensor; SIZE_MAX if it is not C-contiguous. A dimension of 1 may have any
 * stride. */
static size_t contiguous_elems(const dl_tensor *t)
{
    size_t n = 1;
    bool contiguous = true;

    for (int i = t->ndim - 1; i >= 0; i--) {
        if (t->strides != NULL && t->shape[i] != 1 && t->strides[i] != (int64_t)n)
            contiguous = false;
        n *= (size_t)t->shape[i];
    }
    return contiguous || n == 0 ? n : SIZE_MAX;
}

static int acquire_dlpack(ext_state *state, PyObject *obj, bool writable, const char *dtype_name,
                          ext_array *a)
{
    const dl_tensor *t;
    PyObject *capsule = NULL;
    bool read_only;
    char own_name[64];

    if (check_device(state, obj, a->name) < 0)
        return -1;
    obj = without_gradient(obj, writable);
    if (obj != NULL)
        capsule = dlpack_capsule(obj);
    Py_XDECREF(obj);
    if (capsule == NULL)
        return -1;
    t = open_capsule(state, capsule, a, &read_only);
    Py_DECREF(capsule);
    if (t == NULL)
        return -1;
    if (writable && read_only) {
        ext_raise_text(state, SPCCL_ERR_ARG,
                       "%s: the memory is read-only, but the result goes there; pass a writable "
                       "array",
                       a->name);
        return -1;
    }
    if (t->code == DL_OPAQUE_HANDLE)
        return refuse_references(state, a->name, "DLPack opaque handle");
    size_t n = contiguous_elems(t), item_bytes = ((size_t)t->bits * t->lanes + 7) / 8;
    if (n == SIZE_MAX) {
        ext_raise_text(
            state, SPCCL_ERR_ARG,
            "%s: the tensor is not C-contiguous; pass %s.contiguous() (a destination must be contiguous "
            "itself)",
            a->name, a->name);
        return -1;
    }
    a->data = n != 0 ? (char *)t->data + t->byte_offset : NULL;
    (void)PyOS_snprintf(own_name, sizeof own_name, "DLPack code %u, %u bits", t->code, t->bits);
    const own_type own = {dtype_of_dlpack(t), own_name, item_bytes, t->code == DL_COMPLEX};
    return settle(state, a, &own, n * item_bytes, dtype_name);
}

/* ---- buffer protocol or DLPack ---- */

int ext_array_acquire(ext_state *state, PyObject *obj, const char *name, bool writable,
                      const char *dtype_name, ext_array *out)
{
    int result = -1;

    memset(out, 0, sizeof *out);
    out->name = name;
    if (PyObject_CheckBuffer(obj)) {
        result = acquire_view(state, obj, writable, dtype_name, out);
    } else if (PyObject_HasAttrString(obj, "__dlpack__") &&
               PyObject_HasAttrString(obj, "__dlpack_device__")) {
        result = acquire_dlpack(state, obj, writable, dtype_name, out);
    } else {
        PyObject *type = PyType_GetName(Py_TYPE(obj));
        const char *text = type != NULL ? PyUnicode_AsUTF8AndSize(type, NULL) : NULL;
        if (text != NULL)
            ext_raise_text(
                state, SPCCL_ERR_ARG,
                "%s: got a %s; wanted an object with the buffer protocol (numpy array, bytes, array.array) "
                "or DLPack (torch tensor)",
                name, text);
        Py_XDECREF(type);
    }
    if (result < 0)
        ext_array_release(out);
    return result;
}

int ext_bytes_acquire(ext_state *state, PyObject *obj, const char *name, ext_array *out)
{
    if (ext_array_acquire(state, obj, name, false, NULL, out) < 0)
        return -1;
    out->n_elems = ext_array_bytes(out);
    out->dtype = SPCCL_UINT8;
    return 0;
}

void ext_array_release(ext_array *array)
{
    if (array->has_view)
        PyBuffer_Release(&array->view);
    array->has_view = false;
    if (array->capsule != NULL) {
        if (PyCapsule_IsValid(array->capsule, "used_dltensor_versioned")) {
            dl_managed_versioned *m = PyCapsule_GetPointer(array->capsule, "used_dltensor_versioned");
            if (m->deleter != NULL)
                m->deleter(m);
        } else {
            dl_managed *m = PyCapsule_GetPointer(array->capsule, "used_dltensor");
            if (m->deleter != NULL)
                m->deleter(m);
        }
        Py_CLEAR(array->capsule);
    }
    array->data = NULL;
}

size_t ext_array_bytes(const ext_array *array)
{
    return array->n_elems * spccl_dtype_bytes(array->dtype);
}
