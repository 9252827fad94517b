/* py_prune.c - plans, pruning, sending and receiving weights, one bit per element. Memory, plans and options are given by address: the
 * caller, spccl.prune or spccl.optim, keeps them alive. */
#include "module.h"

static void free_plan(PyObject *capsule)
{
    spccl_prune_plan_destroy(PyCapsule_GetPointer(capsule, NULL));
}

static void free_weights_plan(PyObject *capsule)
{
    spccl_weights_plan_destroy(PyCapsule_GetPointer(capsule, NULL));
}

_Static_assert(sizeof(spccl_prune_segment) == 48 && sizeof(spccl_weights_segment) == 48,
               "spccl.prune.SEGMENT");

/* (segments as bytes, n_elems, dtype, device) -> (capsule that owns the plan, its address). */
static PyObject *make_plan(PyObject *module, PyObject *args, bool is_weights)
{
    PyObject *capsule;
    const char *segments, *dtype_name;
    Py_ssize_t n_bytes, n_elems;
    int device;
    spccl_dtype dtype;
    spccl_prune_plan *plan = NULL;
    spccl_weights_plan *weights = NULL;
    spccl_status st;

    if (!PyArg_ParseTuple(args, "y#nsi", &segments, &n_bytes, &n_elems, &dtype_name, &device))
        return NULL;
    if (ext_dtype_of_name(PyModule_GetState(module), "prune_plan", dtype_name, &dtype) < 0)
        return NULL;
    st = is_weights ? spccl_weights_plan_create((const void *)segments, (size_t)n_bytes / 48, (size_t)n_elems,
                                                dtype, device, &weights)
                    : spccl_prune_plan_create((const void *)segments, (size_t)n_bytes / 48, (size_t)n_elems,
                                              dtype, device, &plan);
    if (st != SPCCL_OK)
        return ext_raise(PyModule_GetState(module), st);
    capsule =
        is_weights ? PyCapsule_New(weights, NULL, free_weights_plan) : PyCapsule_New(plan, NULL, free_plan);
    if (capsule == NULL) {
        spccl_prune_plan_destroy(plan);
        spccl_weights_plan_destroy(weights);
        return NULL;
    }
    return Py_BuildValue("NK", capsule, (unsigned long long)(uintptr_t)PyCapsule_GetPointer(capsule, NULL));
}

PyObject *ext_prune_plan(PyObject *module, PyObject *args)
{
    return make_plan(module, args, false);
}

PyObject *ext_weights_plan(PyObject *module, PyObject *args)
{
    return make_plan(module, args, true);
}

PyObject *ext_prune(PyObject *module, PyObject *args)
{
    unsigned long long plan, grad, options, stream;
    int on_gpu;
    spccl_status st;

    if (!PyArg_ParseTuple(args, "KKKpK:prune", &plan, &grad, &options, &on_gpu, &stream))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    st = on_gpu ? spccl_cuda_prune((spccl_prune_plan *)(uintptr_t)plan, (void *)(uintptr_t)grad,
                                   (const spccl_prune_options *)(uintptr_t)options, (void *)(uintptr_t)stream)
                : spccl_prune((spccl_prune_plan *)(uintptr_t)plan, (void *)(uintptr_t)grad,
                              (const spccl_prune_options *)(uintptr_t)options);
    Py_END_ALLOW_THREADS
    return ext_none_or_raise(PyModule_GetState(module), st);
}

PyObject *ext_weights_send(PyObject *module, PyObject *args)
{
    spccl_weights_options o = SPCCL_WEIGHTS_OPTIONS_INIT;
    unsigned long long plan, out, stream;
    unsigned int seed, chunk, levels;
    spccl_status st;

    if (!PyArg_ParseTuple(args, "KKddddIIIK:weights_send", &plan, &out, &o.density, &o.sample, &o.leak,
                          &o.scale, &seed, &chunk, &levels, &stream))
        return NULL;
    o.seed = seed;
    o.chunk = chunk;
    o.levels = levels;
    Py_BEGIN_ALLOW_THREADS
    st = spccl_weights_send((spccl_weights_plan *)(uintptr_t)plan, (void *)(uintptr_t)out, &o,
                            (void *)(uintptr_t)stream);
    Py_END_ALLOW_THREADS
    return ext_none_or_raise(PyModule_GetState(module), st);
}

PyObject *ext_weights_receive(PyObject *module, PyObject *args)
{
    unsigned long long plan, change, stream;
    spccl_status st;

    if (!PyArg_ParseTuple(args, "KKK:weights_receive", &plan, &change, &stream))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    st = spccl_weights_receive((spccl_weights_plan *)(uintptr_t)plan, (const void *)(uintptr_t)change,
                               (void *)(uintptr_t)stream);
    Py_END_ALLOW_THREADS
    return ext_none_or_raise(PyModule_GetState(module), st);
}

PyObject *ext_weights_send_signs(PyObject *module, PyObject *args)
{
    unsigned long long plan, rows, stream;
    double leak;
    spccl_status st;

    if (!PyArg_ParseTuple(args, "KKdK:weights_send_signs", &plan, &rows, &leak, &stream))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    st = spccl_weights_send_signs((spccl_weights_plan *)(uintptr_t)plan, (void *)(uintptr_t)rows, leak,
                                  (void *)(uintptr_t)stream);
    Py_END_ALLOW_THREADS
    return ext_none_or_raise(PyModule_GetState(module), st);
}

PyObject *ext_signs_sum(PyObject *module, PyObject *args)
{
    spccl_signs_sum_options o = SPCCL_SIGNS_SUM_OPTIONS_INIT;
    unsigned long long parts, kept, rows, lengths, stream;
    Py_ssize_t n_chunks;
    unsigned int n_parts;
    int device;
    spccl_status st;

    if (!PyArg_ParseTuple(args, "KIKKKniK:signs_sum", &parts, &n_parts, &kept, &rows, &lengths, &n_chunks,
                          &device, &stream))
        return NULL;
    o.parts = (const void *)(uintptr_t)parts;
    o.kept = (float *)(uintptr_t)kept;
    o.rows = (void *)(uintptr_t)rows;
    o.lengths = (const uint32_t *)(uintptr_t)lengths;
    o.n_chunks = (size_t)n_chunks;
    o.n_parts = n_parts;
    o.device = device;
    Py_BEGIN_ALLOW_THREADS
    st = spccl_signs_sum(&o, (void *)(uintptr_t)stream);
    Py_END_ALLOW_THREADS
    return ext_none_or_raise(PyModule_GetState(module), st);
}

PyObject *ext_signs_decode(PyObject *module, PyObject *args)
{
    unsigned long long rows, out, stream;
    Py_ssize_t n_chunks;
    int device;
    spccl_status st;

    if (!PyArg_ParseTuple(args, "KnKiK:signs_decode", &rows, &n_chunks, &out, &device, &stream))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    st = spccl_signs_decode((const void *)(uintptr_t)rows, (size_t)n_chunks, (float *)(uintptr_t)out, device,
                            (void *)(uintptr_t)stream);
    Py_END_ALLOW_THREADS
    return ext_none_or_raise(PyModule_GetState(module), st);
}
