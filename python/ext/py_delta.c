/* py_delta.c - deltas of lists of arrays. Sources, targets and places come as the bytes of the structs of spccl.h, with
 * addresses in them: the caller, spccl.sync.delta, checks and keeps alive what they point to. */
#include "module.h"

#include <stdlib.h>
#include <string.h>

_Static_assert(sizeof(spccl_delta_source) == 48 && sizeof(spccl_delta_target) == 64 &&
                   sizeof(spccl_delta_place) == 56 && sizeof(spccl_delta_frame) == 32,
               "spccl.sync.delta has these as struct formats");

/* A copy of `bytes` bytes that a str of Python holds: its address need not be aligned. NULL with an exception. */
static void *copy_of(ext_state *state, const char *data, Py_ssize_t bytes)
{
    void *copy = malloc(bytes > 0 ? (size_t)bytes : 1);
    if (copy == NULL)
        return ext_raise_text(state, SPCCL_ERR_NOMEM, "delta: %zd bytes of arguments", bytes);
    memcpy(copy, data, (size_t)bytes);
    return copy;
}

PyObject *ext_delta_bound(PyObject *module, PyObject *args)
{
    unsigned long long n_elems;
    unsigned int dtype;
    size_t bytes;

    if (!PyArg_ParseTuple(args, "KI:delta_bound", &n_elems, &dtype))
        return NULL;
    bytes = spccl_delta_bound(n_elems, (spccl_dtype)dtype);
    return bytes != 0 ? PyLong_FromSize_t(bytes) : ext_raise(PyModule_GetState(module), SPCCL_ERR_ARG);
}

/* (sources, raw, address of dst, its bytes, on_gpu, stream) -> [(offset, bytes, nnz, sum_change)] */
PyObject *ext_delta_encode(PyObject *module, PyObject *args)
{
    ext_state *state = PyModule_GetState(module);
    spccl_delta_options options = SPCCL_DELTA_OPTIONS_INIT;
    spccl_delta_source *sources;
    spccl_delta_frame *frames;
    unsigned long long dst, dst_cap, stream;
    PyObject *result = NULL;
    const char *data;
    Py_ssize_t bytes, n;
    size_t out_bytes;
    spccl_status st;
    int raw, on_gpu;

    if (!PyArg_ParseTuple(args, "y#pKKpK:delta_encode", &data, &bytes, &raw, &dst, &dst_cap, &on_gpu,
                          &stream))
        return NULL;
    n = bytes / (Py_ssize_t)sizeof *sources;
    options.raw = (uint64_t)raw;
    sources = copy_of(state, data, bytes);
    if (sources == NULL)
        return NULL;
    frames = calloc((size_t)n + 1, sizeof *frames);
    if (frames == NULL) {
        free(sources);
        return ext_raise_text(state, SPCCL_ERR_NOMEM, "delta_encode: %zd frames", n);
    }
    Py_BEGIN_ALLOW_THREADS
    st = on_gpu ? spccl_cuda_delta_encode(sources, (size_t)n, &options, (void *)(uintptr_t)dst,
                                          (size_t)dst_cap, frames, &out_bytes, (void *)(uintptr_t)stream)
                : spccl_delta_encode(sources, (size_t)n, &options, (void *)(uintptr_t)dst, (size_t)dst_cap,
                                     frames, &out_bytes);
    Py_END_ALLOW_THREADS
    if (st != SPCCL_OK)
        (void)ext_raise(state, st);
    else
        result = PyList_New(n);
    for (Py_ssize_t i = 0; result != NULL && i < n; i++) {
        PyObject *frame =
            Py_BuildValue("(KKKK)", (unsigned long long)frames[i].offset, (unsigned long long)frames[i].bytes,
                          (unsigned long long)frames[i].nnz, (unsigned long long)frames[i].sum_change);
        if (frame == NULL || PyList_SetItem(result, i, frame) < 0)
            Py_CLEAR(result);
    }
    free(frames);
    free(sources);
    return result;
}

/* Targets and their places. In the bytes from Python a target's `places` is the number of its first place. */
struct targets {
    spccl_delta_target *targets;
    spccl_delta_place *places;
    size_t n;
};

static void free_targets(struct targets *t)
{
    free(t->targets);
    free(t->places);
}

/* 0, or -1 with an exception; the caller frees *out either way. */
static int get_targets(ext_state *state, const char *targets, Py_ssize_t target_bytes, const char *places,
                       Py_ssize_t place_bytes, struct targets *out)
{
    const size_t n_places = (size_t)place_bytes / sizeof *out->places;
    size_t first = 0;

    out->n = (size_t)target_bytes / sizeof *out->targets;
    out->places = copy_of(state, places, place_bytes);
    out->targets = out->places != NULL ? copy_of(state, targets, target_bytes) : NULL;
    if (out->targets == NULL)
        return -1;
    for (size_t i = 0; i < out->n; i++) {
        if (out->targets[i].n_places > n_places - first) {
            ext_raise_text(state, SPCCL_ERR_BUG, "delta: targets[%zu] has %zu places of %zu left", i,
                           out->targets[i].n_places, n_places - first);
            return -1;
        }
        out->targets[i].places = out->places + first;
        first += out->targets[i].n_places;
    }
    return 0;
}

/* A list of n sums, or NULL with an exception: that of st if it is not OK. */
static PyObject *list_of_sums(ext_state *state, spccl_status st, const uint64_t *sums, size_t n)
{
    PyObject *result = st == SPCCL_OK ? PyList_New((Py_ssize_t)n) : ext_raise(state, st);
    for (size_t i = 0; result != NULL && i < n; i++) {
        PyObject *sum = PyLong_FromUnsignedLongLong(sums[i]);
        if (sum == NULL || PyList_SetItem(result, (Py_ssize_t)i, sum) < 0)
            Py_CLEAR(result);
    }
    return result;
}

/* (targets, places, address of old or 0, its bytes) -> [sum change] */
PyObject *ext_delta_check(PyObject *module, PyObject *args)
{
    ext_state *state = PyModule_GetState(module);
    struct targets t = {NULL, NULL, 0};
    unsigned long long old, old_cap;
    uint64_t *sums = NULL;
    PyObject *result = NULL;
    const char *targets, *places;
    Py_ssize_t target_bytes, place_bytes;
    spccl_status st;

    if (!PyArg_ParseTuple(args, "y#y#KK:delta_check", &targets, &target_bytes, &places, &place_bytes, &old,
                          &old_cap))
        return NULL;
    if (get_targets(state, targets, target_bytes, places, place_bytes, &t) < 0)
        goto done;
    sums = calloc(t.n + 1, sizeof *sums);
    if (sums == NULL) {
        ext_raise_text(state, SPCCL_ERR_NOMEM, "delta_check: %zu sums", t.n);
        goto done;
    }
    Py_BEGIN_ALLOW_THREADS
    st = spccl_delta_check(t.targets, t.n, (void *)(uintptr_t)old, (size_t)old_cap, sums, NULL);
    Py_END_ALLOW_THREADS
    result = list_of_sums(state, st, sums, t.n);
done:
    free(sums);
    free_targets(&t);
    return result;
}

/* (targets, places): apply; (targets, places, address of old, its bytes): undo. */
static PyObject *write_targets(PyObject *module, PyObject *args, bool is_undo)
{
    ext_state *state = PyModule_GetState(module);
    struct targets t = {NULL, NULL, 0};
    unsigned long long old = 0, old_bytes = 0;
    PyObject *result = NULL;
    const char *targets, *places;
    Py_ssize_t target_bytes, place_bytes;
    spccl_status st;

    if (!(is_undo
              ? PyArg_ParseTuple(args, "y#y#KK:delta_undo", &targets, &target_bytes, &places, &place_bytes,
                                 &old, &old_bytes)
              : PyArg_ParseTuple(args, "y#y#:delta_apply", &targets, &target_bytes, &places, &place_bytes)))
        return NULL;
    if (get_targets(state, targets, target_bytes, places, place_bytes, &t) == 0) {
        Py_BEGIN_ALLOW_THREADS
        st = is_undo ? spccl_delta_undo(t.targets, t.n, (const void *)(uintptr_t)old, (size_t)old_bytes)
                     : spccl_delta_apply(t.targets, t.n);
        Py_END_ALLOW_THREADS
        result = ext_none_or_raise(state, st);
    }
    free_targets(&t);
    return result;
}

PyObject *ext_delta_apply(PyObject *module, PyObject *args)
{
    return write_targets(module, args, false);
}

PyObject *ext_delta_undo(PyObject *module, PyObject *args)
{
    return write_targets(module, args, true);
}

/* (address, n_elems, dtype, first, key) -> checksum */
PyObject *ext_delta_checksum(PyObject *module, PyObject *args)
{
    unsigned long long x, n_elems, first, key;
    unsigned int dtype;
    uint64_t sum = 0;
    spccl_status st;

    if (!PyArg_ParseTuple(args, "KKIKK:delta_checksum", &x, &n_elems, &dtype, &first, &key))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    st = spccl_delta_checksum((const void *)(uintptr_t)x, n_elems, (spccl_dtype)dtype, first, key, &sum);
    Py_END_ALLOW_THREADS
    if (st != SPCCL_OK)
        return ext_raise(PyModule_GetState(module), st);
    return PyLong_FromUnsignedLongLong(sum);
}

/* ---- on a GPU ---- */

/* (targets, places, stream) -> (address of the plan, bytes that old needs) */
PyObject *ext_delta_plan(PyObject *module, PyObject *args)
{
    ext_state *state = PyModule_GetState(module);
    struct targets t = {NULL, NULL, 0};
    spccl_cuda_delta_plan *plan = NULL;
    unsigned long long stream;
    PyObject *result = NULL;
    const char *targets, *places;
    Py_ssize_t target_bytes, place_bytes;
    size_t old_bytes = 0;
    spccl_status st;

    if (!PyArg_ParseTuple(args, "y#y#K:delta_plan", &targets, &target_bytes, &places, &place_bytes, &stream))
        return NULL;
    if (get_targets(state, targets, target_bytes, places, place_bytes, &t) == 0) {
        Py_BEGIN_ALLOW_THREADS
        st = spccl_cuda_delta_plan_create(t.targets, t.n, (void *)(uintptr_t)stream, &plan, &old_bytes);
        Py_END_ALLOW_THREADS
        result = st == SPCCL_OK ? Py_BuildValue("(KK)", (unsigned long long)(uintptr_t)plan,
                                                (unsigned long long)old_bytes)
                                : ext_raise(state, st);
    }
    free_targets(&t);
    return result;
}

/* (plan): free it. */
PyObject *ext_delta_plan_destroy(PyObject *module, PyObject *args)
{
    unsigned long long plan;

    (void)module;
    if (!PyArg_ParseTuple(args, "K:delta_plan_destroy", &plan))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    spccl_cuda_delta_plan_destroy((spccl_cuda_delta_plan *)(uintptr_t)plan);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* (plan, number of its targets, address of old or 0, its bytes, stream) -> [sum change] */
PyObject *ext_delta_plan_check(PyObject *module, PyObject *args)
{
    ext_state *state = PyModule_GetState(module);
    unsigned long long plan, old, old_cap, stream;
    PyObject *result;
    uint64_t *sums;
    Py_ssize_t n;
    spccl_status st;

    if (!PyArg_ParseTuple(args, "KnKKK:delta_plan_check", &plan, &n, &old, &old_cap, &stream))
        return NULL;
    sums = calloc((size_t)n + 1, sizeof *sums);
    if (sums == NULL)
        return ext_raise_text(state, SPCCL_ERR_NOMEM, "delta_check: %zd sums", n);
    Py_BEGIN_ALLOW_THREADS
    st = spccl_cuda_delta_check((spccl_cuda_delta_plan *)(uintptr_t)plan, (void *)(uintptr_t)old,
                                (size_t)old_cap, sums, (void *)(uintptr_t)stream);
    Py_END_ALLOW_THREADS
    result = list_of_sums(state, st, sums, (size_t)n);
    free(sums);
    return result;
}

/* (plan, stream): queue the new values. */
PyObject *ext_delta_plan_apply(PyObject *module, PyObject *args)
{
    unsigned long long plan, stream;
    spccl_status st;

    if (!PyArg_ParseTuple(args, "KK:delta_plan_apply", &plan, &stream))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    st = spccl_cuda_delta_apply((spccl_cuda_delta_plan *)(uintptr_t)plan, (void *)(uintptr_t)stream);
    Py_END_ALLOW_THREADS
    return ext_none_or_raise(PyModule_GetState(module), st);
}

/* (plan, address of old, its bytes, stream): queue the old values. */
PyObject *ext_delta_plan_undo(PyObject *module, PyObject *args)
{
    unsigned long long plan, old, old_bytes, stream;
    spccl_status st;

    if (!PyArg_ParseTuple(args, "KKKK:delta_plan_undo", &plan, &old, &old_bytes, &stream))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    st = spccl_cuda_delta_undo((spccl_cuda_delta_plan *)(uintptr_t)plan, (const void *)(uintptr_t)old,
                               (size_t)old_bytes, (void *)(uintptr_t)stream);
    Py_END_ALLOW_THREADS
    return ext_none_or_raise(PyModule_GetState(module), st);
}

/* (address, n_elems, dtype, first, key, address of the sum, stream): queue a checksum. */
PyObject *ext_delta_cuda_checksum(PyObject *module, PyObject *args)
{
    unsigned long long x, n_elems, first, key, out, stream;
    unsigned int dtype;
    spccl_status st;

    if (!PyArg_ParseTuple(args, "KKIKKKK:delta_cuda_checksum", &x, &n_elems, &dtype, &first, &key, &out,
                          &stream))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    st = spccl_cuda_delta_checksum((const void *)(uintptr_t)x, n_elems, (spccl_dtype)dtype, first, key,
                                   (uint64_t *)(uintptr_t)out, (void *)(uintptr_t)stream);
    Py_END_ALLOW_THREADS
    return ext_none_or_raise(PyModule_GetState(module), st);
}
