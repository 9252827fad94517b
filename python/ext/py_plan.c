/* py_plan.c - the check of plan files. */
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
    return Py_BuildValue("{s:s,s:s,s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:K,s:K,s:K}", "name", info.name,
                         "collective", info.collective, "n_ranks", info.n_ranks, "n_hosts", info.n_hosts,
                         "root", info.root, "n_chunks", info.n_chunks, "rank_order", info.rank_order,
                         "sends_sums", info.sends_sums, "n_steps", info.n_steps, "n_hops", info.n_hops,
                         "kept_slices", info.kept_slices, "chunks_sent", info.chunks_sent, "n_messages",
                         (unsigned long long)info.n_messages, "line", (unsigned long long)info.line, "hash",
                         (unsigned long long)info.hash);
}
