/* py_frame.c - encode, decode and inspect on Python buffers; names of formats, verbs and operations. */
#include "py_buffer.h"

#include <stdlib.h>
#include <string.h>

/* ---- names ---- */

/* The index of `name` among n names; -1 with an exception if it is not there. */
static int index_of_name(ext_state *state, const char *what, const char *name, const char *const *names,
                         int n, const char *wanted)
{
    for (int i = 0; i < n; i++)
        if (strcmp(name, names[i]) == 0)
            return i;
    ext_raise_text(state, SPCCL_ERR_ARG, "%s: got \"%s\"; wanted %s", what, name, wanted);
    return -1;
}

int ext_format_of_name(ext_state *state, const char *name, spccl_format *out)
{
    const char *names[1 + SPCCL_N_FORMATS] = {"auto"};
    int i;
    for (int f = 0; f < SPCCL_N_FORMATS; f++)
        names[1 + f] = spccl_format_name((spccl_format)f);
    i = index_of_name(state, "format", name, names, 1 + SPCCL_N_FORMATS,
                      "auto, empty, tile, pici, coo or dense");
    *out = (spccl_format)(i - 1); /* SPCCL_FORMAT_AUTO is -1 */
    return i < 0 ? -1 : 0;
}

int ext_verb_of_name(ext_state *state, const char *name, spccl_verb *out)
{
    static const char *const names[] = {
        [SPCCL_SET] = "set", [SPCCL_ADD] = "add", [SPCCL_OVERWRITE] = "overwrite"};
    int i = index_of_name(state, "verb", name, names, 3, "set, add or overwrite");
    *out = (spccl_verb)i;
    return i < 0 ? -1 : 0;
}

int ext_redop_of_name(ext_state *state, const char *name, spccl_redop *out)
{
    static const char *const names[] = {[SPCCL_SUM] = "sum",
                                        [SPCCL_AVG] = "avg",
                                        [SPCCL_MIN] = "min",
                                        [SPCCL_MAX] = "max",
                                        [SPCCL_PROD] = "prod"};
    int i = index_of_name(state, "op", name, names, 5, "sum, avg, min, max or prod");
    *out = (spccl_redop)i;
    return i < 0 ? -1 : 0;
}

/* ---- encode ---- */

/* Views the base, which must have x's dtype and number of elements. */
static int acquire_base(ext_state *state, PyObject *obj, const ext_array *x, const char *dtype_name,
                        ext_array *out)
{
    if (ext_array_acquire(state, obj, "base", false, dtype_name, out) < 0)
        return -1;
    if (out->dtype == x->dtype && out->n_elems == x->n_elems)
        return 0;
    ext_raise_text(state, SPCCL_ERR_ARG, "base: got %zu elements of %s; wanted %zu of %s, as x has",
                   out->n_elems, spccl_dtype_name(out->dtype), x->n_elems, spccl_dtype_name(x->dtype));
    ext_array_release(out);
    return -1;
}

static PyObject *encode_array(ext_state *state, const ext_array *x, const spccl_encode_options *options)
{
    size_t cap = spccl_encode_bound(x->n_elems, x->dtype, options), bytes = 0;
    PyThreadState *save = NULL;
    PyObject *result;
    spccl_status st;
    void *dst;

    if (cap == 0)
        return ext_raise(state, SPCCL_ERR_ARG);
    /* malloc: most pages of `dst` stay untouched and cost no memory. A bytes object of `cap` bytes would keep
     * its size, because the limited API cannot shrink it. */
    dst = malloc(cap);
    if (dst == NULL)
        return ext_raise_text(state, SPCCL_ERR_NOMEM, "encode: %zu bytes for %zu elements of %s", cap,
                              x->n_elems, spccl_dtype_name(x->dtype));
    if (ext_array_bytes(x) > EXT_GIL_BYTES)
        save = PyEval_SaveThread();
    st = spccl_encode(x->data, x->n_elems, x->dtype, options, dst, cap, &bytes);
    if (save != NULL)
        PyEval_RestoreThread(save);
    result = st == SPCCL_OK ? PyBytes_FromStringAndSize(dst, (Py_ssize_t)bytes) : ext_raise(state, st);
    free(dst);
    return result;
}

static void raise_slice_elems(ext_state *state, PyObject *number)
{
    PyObject *text = PyObject_Str(number);
    const char *digits = text != NULL ? PyUnicode_AsUTF8AndSize(text, NULL) : NULL;
    if (digits != NULL)
        ext_raise_text(state, SPCCL_ERR_ARG, "slice_elems: got %.40s; wanted a multiple of 2048, at most %u",
                       digits, SPCCL_SLICE_ELEMS_MAX);
    Py_XDECREF(text);
}

/* Refuses an int that is too large or negative before it is cut to 32 bits. */
static int parse_slice_elems(ext_state *state, PyObject *number, uint32_t *out)
{
    PyObject *index = PyNumber_Index(number);
    unsigned long long n;

    if (index == NULL)
        return -1;
    n = PyLong_AsUnsignedLongLong(index); /* ULLONG_MAX for an int that does not fit */
    if (n > SPCCL_SLICE_ELEMS_MAX) {
        PyErr_Clear();
        raise_slice_elems(state, index);
        Py_DECREF(index);
        return -1;
    }
    *out = (uint32_t)n;
    Py_DECREF(index);
    return 0;
}

PyObject *ext_encode(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"x", "base", "format", "dtype", "slice_elems", NULL};
    ext_state *state = PyModule_GetState(module);
    spccl_encode_options options = SPCCL_ENCODE_OPTIONS_INIT;
    PyObject *x_obj, *base_obj = Py_None, *slice_elems = NULL, *result = NULL;
    const char *format = "auto", *dtype = NULL;
    ext_array x, base;

    memset(&base, 0, sizeof base);
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|$OszO:encode", names, &x_obj, &base_obj, &format,
                                     &dtype, &slice_elems))
        return NULL;
    if (ext_format_of_name(state, format, &options.format) < 0)
        return NULL;
    if (slice_elems != NULL && parse_slice_elems(state, slice_elems, &options.slice_elems) < 0)
        return NULL;
    if (ext_array_acquire(state, x_obj, "x", false, dtype, &x) < 0)
        return NULL;
    if (base_obj == Py_None || acquire_base(state, base_obj, &x, dtype, &base) == 0) {
        options.base = base_obj == Py_None ? NULL : base.data;
        result = encode_array(state, &x, &options);
    }
    ext_array_release(&base);
    ext_array_release(&x);
    return result;
}

/* ---- decode ---- */

PyObject *ext_decode(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"encoded", "out", "verb", "dtype", NULL};
    ext_state *state = PyModule_GetState(module);
    PyObject *encoded_obj, *out_obj;
    const char *verb_name = "set", *dtype = NULL;
    PyThreadState *save = NULL;
    ext_array encoded, out;
    spccl_status st;
    spccl_verb verb;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO|sz:decode", names, &encoded_obj, &out_obj, &verb_name,
                                     &dtype))
        return NULL;
    if (ext_verb_of_name(state, verb_name, &verb) < 0 ||
        ext_bytes_acquire(state, encoded_obj, "encoded", &encoded) < 0)
        return NULL;
    if (ext_array_acquire(state, out_obj, "out", true, dtype, &out) < 0) {
        ext_array_release(&encoded);
        return NULL;
    }
    if (ext_array_bytes(&out) > EXT_GIL_BYTES || encoded.n_elems > EXT_GIL_BYTES)
        save = PyEval_SaveThread();
    st = spccl_decode(encoded.data, encoded.n_elems, verb, out.data, out.n_elems, out.dtype);
    if (save != NULL)
        PyEval_RestoreThread(save);
    ext_array_release(&out);
    ext_array_release(&encoded);
    return ext_none_or_raise(state, st);
}

/* ---- inspect ---- */

static PyObject *describe(const spccl_frame_info *info, Py_ssize_t offset)
{
    return Py_BuildValue("{sn sI ss ss sO sK sK sK sK sK sK}", "offset", offset, "version",
                         (unsigned)info->version, "format", spccl_format_name(info->format), "dtype",
                         spccl_dtype_name(info->dtype), "is_delta", info->is_delta ? Py_True : Py_False,
                         "n_elems", (unsigned long long)info->n_elems, "nnz", (unsigned long long)info->nnz,
                         "frame_bytes", (unsigned long long)info->frame_bytes, "index_off",
                         (unsigned long long)info->index_off, "meta_off", (unsigned long long)info->meta_off,
                         "values_off", (unsigned long long)info->values_off);
}

PyObject *ext_inspect(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"encoded", "offset", NULL};
    ext_state *state = PyModule_GetState(module);
    spccl_frame_info info = {.struct_bytes = sizeof info};
    PyObject *encoded_obj, *result = NULL;
    Py_ssize_t offset = 0;
    ext_array encoded;
    spccl_status st;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|n:inspect", names, &encoded_obj, &offset))
        return NULL;
    if (ext_bytes_acquire(state, encoded_obj, "encoded", &encoded) < 0)
        return NULL;
    if (offset < 0 || (size_t)offset > encoded.n_elems) {
        ext_raise_text(state, SPCCL_ERR_ARG,
                       "offset: got %zd; wanted 0 to %zu, the bytes of the encoded array", offset,
                       encoded.n_elems);
    } else {
        PyThreadState *save = encoded.n_elems > EXT_GIL_BYTES ? PyEval_SaveThread() : NULL;
        st =
            spccl_frame_inspect((const char *)encoded.data + offset, encoded.n_elems - (size_t)offset, &info);
        if (save != NULL)
            PyEval_RestoreThread(save);
        if (st == SPCCL_OK)
            result = describe(&info, offset);
        else
            ext_raise_text(state, st, "frame at byte %zd: %s", offset, spccl_last_error());
    }
    ext_array_release(&encoded);
    return result;
}
