/* py_prune.c - prune plans, pruning, sending and receiving weights. Memory is given by address: the caller,
 * spccl.prune or spccl.optim, keeps it alive. */
#include "module.h"

#include <stdlib.h>

#define PLAN_NAME "spccl._ext.PrunePlan"
#define OPTIONS_NAME "spccl._ext.PruneOptions"

static void free_plan(PyObject *capsule)
{
    spccl_prune_plan_destroy(PyCapsule_GetPointer(capsule, PLAN_NAME));
}

/* One (begin, n_elems, residual, velocity, state, key, whole). 0, or -1 with an exception set. */
static int parse_segment(PyObject *tuple, spccl_prune_segment *out)
{
    unsigned long long begin, n_elems, residual, velocity, state;
    unsigned int key;
    int whole;

    if (!PyTuple_Check(tuple)) {
        PyErr_SetString(PyExc_TypeError, "prune_plan: wanted segments as tuples");
        return -1;
    }
    if (!PyArg_ParseTuple(tuple, "KKKKKIp:prune_plan", &begin, &n_elems, &residual, &velocity, &state, &key,
                          &whole))
        return -1;
    *out = (spccl_prune_segment){.begin = (size_t)begin,
                                 .n_elems = (size_t)n_elems,
                                 .residual = (void *)(uintptr_t)residual,
                                 .velocity = (void *)(uintptr_t)velocity,
                                 .state = (spccl_prune_state *)(uintptr_t)state,
                                 .key = key,
                                 .whole = (uint32_t)whole};
    return 0;
}

PyObject *ext_prune_plan(PyObject *module, PyObject *args)
{
    PyObject *list, *capsule;
    const char *dtype_name;
    Py_ssize_t n_elems, n;
    int device;
    spccl_dtype dtype;
    spccl_prune_segment *segments;
    spccl_prune_plan *plan = NULL;
    spccl_status st;

    if (!PyArg_ParseTuple(args, "O!nsi:prune_plan", &PyList_Type, &list, &n_elems, &dtype_name, &device))
        return NULL;
    if (ext_dtype_of_name(PyModule_GetState(module), "prune_plan", dtype_name, &dtype) < 0)
        return NULL;
    n = PyList_Size(list);
    segments = calloc((size_t)n + 1, sizeof *segments);
    if (segments == NULL)
        return PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < n; i++)
        if (parse_segment(PyList_GetItem(list, i), &segments[i]) < 0) {
            free(segments);
            return NULL;
        }
    st = spccl_prune_plan_create(segments, (size_t)n, (size_t)n_elems, dtype, device, &plan);
    free(segments);
    if (st != SPCCL_OK)
        return ext_raise(PyModule_GetState(module), st);
    capsule = PyCapsule_New(plan, PLAN_NAME, free_plan);
    if (capsule == NULL)
        spccl_prune_plan_destroy(plan);
    return capsule;
}

/* The rule as a tuple, in the order of spccl.prune.Rule, then two addresses. 0, or -1 with an exception set. */
static int parse_rule(PyObject *tuple, spccl_prune_options *o)
{
    unsigned int dense_steps, warmup_steps, seed, stage;
    int skip_zeros;

    if (!PyArg_ParseTuple(tuple, "dddddIIIpI:prune", &o->density, &o->sample, &o->leak, &o->momentum,
                          &o->scale, &dense_steps, &warmup_steps, &seed, &skip_zeros, &stage))
        return -1;
    o->stage = stage;
    o->dense_steps = dense_steps;
    o->warmup_steps = warmup_steps;
    o->seed = seed;
    o->skip_zeros = (uint32_t)skip_zeros;
    return 0;
}

/* Parse (plan, grad, rule, factor, loss_scale, clipping, residual_bf16, on_gpu, stream). 0, or -1 with an exception
 * set. */
static int parse_prune(PyObject *args, spccl_prune_plan **plan, unsigned long long *grad, int *on_gpu,
                       unsigned long long *stream, spccl_prune_options *o)
{
    unsigned long long factor, loss_scale, norm, squares;
    PyObject *capsule, *rule;
    unsigned int n_squares, square;
    int residual_bf16;

    if (!PyArg_ParseTuple(args, "OKO!KK(KKIId)ppK:prune", &capsule, grad, &PyTuple_Type, &rule, &factor,
                          &loss_scale, &norm, &squares, &n_squares, &square, &o->max_norm, &residual_bf16,
                          on_gpu, stream))
        return -1;
    *plan = PyCapsule_GetPointer(capsule, PLAN_NAME);
    if (*plan == NULL || parse_rule(rule, o) < 0)
        return -1;
    o->factor = (const float *)(uintptr_t)factor;
    o->loss_scale = (const float *)(uintptr_t)loss_scale;
    o->norm = (const void *)(uintptr_t)norm;
    o->squares = (double *)(uintptr_t)squares;
    o->n_squares = n_squares;
    o->square = square;
    o->residual_bf16 = (uint32_t)residual_bf16;
    return 0;
}

PyObject *ext_prune(PyObject *module, PyObject *args)
{
    spccl_prune_options o = SPCCL_PRUNE_OPTIONS_INIT;
    unsigned long long grad, stream;
    int on_gpu;
    spccl_prune_plan *plan;
    spccl_status st;

    if (parse_prune(args, &plan, &grad, &on_gpu, &stream, &o) < 0)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    st = on_gpu ? spccl_cuda_prune(plan, (void *)(uintptr_t)grad, &o, (void *)(uintptr_t)stream)
                : spccl_prune(plan, (void *)(uintptr_t)grad, &o);
    Py_END_ALLOW_THREADS
    if (st != SPCCL_OK)
        return ext_raise(PyModule_GetState(module), st);
    Py_RETURN_NONE;
}

static void free_options(PyObject *capsule)
{
    free(PyCapsule_GetPointer(capsule, OPTIONS_NAME));
}

/* As ext_prune, but does nothing: (address of the plan, address of the options, capsule that owns the options). */
PyObject *ext_prune_options(PyObject *module, PyObject *args)
{
    const spccl_prune_options defaults = SPCCL_PRUNE_OPTIONS_INIT;
    spccl_prune_options *o = malloc(sizeof *o);
    unsigned long long grad, stream;
    int on_gpu;
    spccl_prune_plan *plan;
    PyObject *capsule;

    (void)module;
    if (o == NULL)
        return PyErr_NoMemory();
    *o = defaults;
    if (parse_prune(args, &plan, &grad, &on_gpu, &stream, o) < 0) {
        free(o);
        return NULL;
    }
    capsule = PyCapsule_New(o, OPTIONS_NAME, free_options);
    if (capsule == NULL) {
        free(o);
        return NULL;
    }
    return Py_BuildValue("KKN", (unsigned long long)(uintptr_t)plan, (unsigned long long)(uintptr_t)o,
                         capsule);
}

PyObject *ext_weights_send(PyObject *module, PyObject *args)
{
    spccl_prune_options o = SPCCL_PRUNE_OPTIONS_INIT;
    unsigned long long out, stream;
    unsigned int seed, chunk, levels;
    PyObject *capsule;
    spccl_prune_plan *plan;
    spccl_status st;

    if (!PyArg_ParseTuple(args, "OKddddIIIK:weights_send", &capsule, &out, &o.density, &o.sample, &o.leak,
                          &o.scale, &seed, &chunk, &levels, &stream))
        return NULL;
    plan = PyCapsule_GetPointer(capsule, PLAN_NAME);
    if (plan == NULL)
        return NULL;
    o.seed = seed;
    o.chunk = chunk;
    o.levels = levels;
    Py_BEGIN_ALLOW_THREADS
    st = spccl_weights_send(plan, (void *)(uintptr_t)out, &o, (void *)(uintptr_t)stream);
    Py_END_ALLOW_THREADS
    if (st != SPCCL_OK)
        return ext_raise(PyModule_GetState(module), st);
    Py_RETURN_NONE;
}

PyObject *ext_weights_receive(PyObject *module, PyObject *args)
{
    unsigned long long change, stream;
    PyObject *capsule;
    spccl_prune_plan *plan;
    spccl_status st;

    if (!PyArg_ParseTuple(args, "OKK:weights_receive", &capsule, &change, &stream))
        return NULL;
    plan = PyCapsule_GetPointer(capsule, PLAN_NAME);
    if (plan == NULL)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    st = spccl_weights_receive(plan, (const void *)(uintptr_t)change, (void *)(uintptr_t)stream);
    Py_END_ALLOW_THREADS
    if (st != SPCCL_OK)
        return ext_raise(PyModule_GetState(module), st);
    Py_RETURN_NONE;
}
