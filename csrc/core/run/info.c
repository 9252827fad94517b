/* info.c - spccl_info, spccl_version: what is in this build and why, and every setting. */
#include "core/base/env.h"
#include "core/contract/transport.h"
#include "core/format/kernel_table.h"
#include "core/gpu/gpu_comm.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

/* Parts that this version does not have: said, rather than left to be guessed. */
static const spccl_info_entry absent_parts[] = {
    {"part", "ib", "absent",
     "InfiniBand/RoCE is not part of version " SPCCL_VERSION_TEXT ": pairs on different hosts use tcp"},
};

static const spccl_info_entry transport_why[] = {
    {"transport", "inproc", "in", "ranks that are threads of one process"},
    {"transport", "shm", "in",
     "processes of one host: shared memory without names, so nothing can be left behind"},
    {"transport", "tcp", "in", "everything else; SPCCL_TCP_ADDR picks the interface"},
};

/* The GPU engine: what it was built with and what it finds here. Valid until this thread's next call. */
static void cuda_entry(spccl_info_entry *out)
{
    static _Thread_local char why[400];
    const sp_gpu_ops *ops = sp_gpu_ops_here();
    const char *why_none = NULL;
    int n = 0;
    if (ops == NULL) {
        (void)sp_gpu_ops_get(&why_none);
        snprintf(why, sizeof why, "not in this build: %s", why_none);
        *out = (spccl_info_entry){"part", "cuda", "absent", why};
        return;
    }
    if (ops->device_count(&n) != SPCCL_OK)
        snprintf(why, sizeof why, "%s; no GPU can be used: %.200s", ops->about, spccl_last_error());
    else
        snprintf(why, sizeof why, "%s; %d GPU%s here; at most %s bytes of GPU memory of each group for peers",
                 ops->about, n, n == 1 ? "" : "s", sp_env_text(SP_ENV_INBOX_BYTES));
    *out = (spccl_info_entry){"part", "cuda", "in", why};
}

static bool kernel_entry(size_t i, spccl_info_entry *out)
{
    const sp_kernels *chosen = NULL;
    sp_kernels_info k;
    if (!sp_kernels_describe(i, &k))
        return false;
    *out = (spccl_info_entry){"kernels", k.name, k.usable ? "in" : "absent", k.why};
    if (sp_kernels_pick(&chosen) == SPCCL_OK && k.usable && chosen->name == k.name)
        out->value = "in, chosen";
    return true;
}

static bool transport_entry(size_t i, spccl_info_entry *out)
{
    for (size_t j = 0; j <= i; j++)
        if (sp_transports[j] == NULL)
            return false;
    *out = (spccl_info_entry){"transport", sp_transports[i]->name, "in", ""};
    for (size_t j = 0; j < sizeof transport_why / sizeof transport_why[0]; j++)
        if (strcmp(transport_why[j].name, out->name) == 0)
            *out = transport_why[j];
    return true;
}

spccl_status spccl_info(size_t i, spccl_info_entry *out)
{
    size_t n_kernels = 0, n_transports = 0, n_absent = sizeof absent_parts / sizeof absent_parts[0];
    spccl_info_entry e;
    if (out == NULL)
        return SP_FAIL(SPCCL_ERR_ARG, "spccl_info: out is NULL");
    while (kernel_entry(n_kernels, &e))
        n_kernels++;
    while (transport_entry(n_transports, &e))
        n_transports++;
    if (i < n_kernels) {
        kernel_entry(i, out);
        return SPCCL_OK;
    }
    i -= n_kernels;
    if (i < n_transports) {
        transport_entry(i, out);
        return SPCCL_OK;
    }
    i -= n_transports;
    if (i-- == 0) {
        cuda_entry(out);
        return SPCCL_OK;
    }
    if (i < n_absent) {
        *out = absent_parts[i];
        return SPCCL_OK;
    }
    i -= n_absent;
    if (i < SP_N_ENV) {
        const sp_env_var *v = sp_env_describe((sp_env_id)i);
        *out = (spccl_info_entry){"setting", v->name, sp_env_text((sp_env_id)i), v->help};
        return SPCCL_OK;
    }
    return SP_FAIL(SPCCL_ERR_ARG, "spccl_info: no entry past the last");
}

const char *spccl_version(void)
{
    return SPCCL_VERSION_TEXT;
}
