/* py_plan.c - the check of plan files, and the simulator. */
#include "module.h"

#include "spccl_experimental.h"

PyObject *ext_plan_check(PyObject *module, PyObject *args)
{
    spccl_plan_info info = {.struct_bytes = sizeof info};
    const char *text;
    Py_ssize_t bytes, i;
    spccl_status st;

    if (!PyArg_ParseTuple(args, "y#n:plan_check", &text, &bytes, &i))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    st = spccl_plan_check(text, (size_t)bytes, (size_t)i, &info);
    Py_END_ALLOW_THREADS
    if (st != SPCCL_OK)
        return ext_raise(PyModule_GetState(module), st);
    return Py_BuildValue(
        "{s:s,s:s,s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:K,s:K,s:K,s:s,s:s}", "name", info.name,
        "collective", info.collective, "n_ranks", info.n_ranks, "n_hosts", info.n_hosts, "root", info.root,
        "n_chunks", info.n_chunks, "rank_order", info.rank_order, "sends_sums", info.sends_sums, "n_steps",
        info.n_steps, "n_hops", info.n_hops, "kept_slices", info.kept_slices, "chunks_sent", info.chunks_sent,
        "n_messages", (unsigned long long)info.n_messages, "line", (unsigned long long)info.line, "hash",
        (unsigned long long)info.hash, "no_gpus", info.no_gpus, "gpu_results", info.gpu_results);
}

static PyObject *formats_of(const double *bytes)
{
    PyObject *dict = PyDict_New();
    for (int i = 0; dict != NULL && i < SPCCL_N_FORMATS; i++) {
        PyObject *value = PyFloat_FromDouble(bytes[i]);
        if (value == NULL || PyDict_SetItemString(dict, spccl_format_name((spccl_format)i), value) != 0)
            Py_CLEAR(dict);
        Py_XDECREF(value);
    }
    return dict;
}

static PyObject *simulated_dict(const spccl_simulated *s)
{
    PyObject *formats = formats_of(s->format_bytes);
    if (formats == NULL)
        return NULL;
    return Py_BuildValue("{s:d,s:d,s:d,s:d,s:d,s:d,s:d,s:d,s:d,s:d,s:K,s:K,s:K,s:i,s:i,s:N}", "time_ns",
                         s->time_ns, "wire_bytes", s->wire_bytes, "remote_bytes", s->remote_bytes,
                         "rank_bytes", s->rank_bytes, "link_bytes", s->link_bytes, "memory_bytes",
                         s->memory_bytes, "kept_bytes", s->kept_bytes, "cpu_ns", s->cpu_ns, "chosen_ns",
                         s->chosen_ns, "dense_bytes", s->dense_bytes, "n_messages",
                         (unsigned long long)s->n_messages, "n_elems", (unsigned long long)s->n_elems,
                         "n_events", (unsigned long long)s->n_events, "n_steps", s->n_steps, "n_simulated",
                         s->n_simulated, "format_bytes", formats);
}

PyObject *ext_simulate(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"collective",
                            "schedule",
                            "format",
                            "plan_text",
                            "plan_index",
                            "n_elems",
                            "dtype",
                            "n_ranks",
                            "per_host",
                            "root",
                            "merge",
                            "cores",
                            "shared",
                            "message_max",
                            "density",
                            "overlap",
                            "link_ns",
                            "burst_bytes",
                            "latency_ns",
                            "pass_ns",
                            "codec_factor",
                            "send_ns",
                            "receive_ns",
                            "local_ns",
                            "local_message_ns",
                            "remote_message_ns",
                            "wake_ns",
                            NULL};
    spccl_simulate_options o = {.struct_bytes = sizeof o, .n_ranks = 2, .ranks_per_host = 1, .density = 1};
    spccl_simulated out = {.struct_bytes = sizeof out};
    const char *text = NULL;
    Py_ssize_t text_bytes = 0, plan_index = 0;
    unsigned long long n_elems = 0;
    const char *dtype = "float32";
    spccl_status st;

    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "|zzzz#nKsiiiiiiiddddddddddddd:simulate", names, &o.collective, &o.schedule,
            &o.format, &text, &text_bytes, &plan_index, &n_elems, &dtype, &o.n_ranks, &o.ranks_per_host,
            &o.root, &o.merge, &o.cores, &o.shared_cores, &o.message_max, &o.density, &o.overlap, &o.link_ns,
            &o.burst_bytes, &o.latency_ns, &o.pass_ns, &o.codec_factor, &o.send_ns, &o.receive_ns,
            &o.local_ns, &o.local_message_ns, &o.remote_message_ns, &o.wake_ns))
        return NULL;
    if (ext_dtype_of_name(PyModule_GetState(module), "dtype", dtype, &o.dtype) != 0)
        return NULL;
    o.plan_text = text;
    o.plan_bytes = (size_t)text_bytes;
    o.plan_index = plan_index < 0 ? SIZE_MAX : (size_t)plan_index;
    o.n_elems = n_elems;
    Py_BEGIN_ALLOW_THREADS
    st = spccl_simulate(&o, &out);
    Py_END_ALLOW_THREADS
    return st == SPCCL_OK ? simulated_dict(&out) : ext_raise(PyModule_GetState(module), st);
}
