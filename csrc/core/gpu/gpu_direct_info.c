/* gpu_direct_info.c - the facts of this host's GPUs and network devices; see gpu_direct.h. They are gathered once. */
#include "core/gpu/gpu_direct.h"

#include "core/base/env.h"
#include "core/gpu/gpu_comm.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define GPUS_MAX 16

struct row {
    char name[16], value[64], why[2000];
};
static struct row rows[GPUS_MAX];
static size_t n_rows;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static bool has_peermem(void)
{
    static const char *const files[] = {"/sys/module/nvidia_peermem/version",
                                        "/sys/kernel/mm/memory_peers/nv_mem/version",
                                        "/sys/kernel/mm/memory_peers/nv_mem_nc/version"};
    for (size_t i = 0; i < sizeof files / sizeof *files; i++)
        if (access(files[i], F_OK) == 0)
            return true;
    return false;
}

static void find_pci_path(const char *pci, char *out, size_t cap)
{
    char link[64], *path;
    snprintf(link, sizeof link, "/sys/bus/pci/devices/%.20s", pci);
    path = realpath(link, NULL);
    snprintf(out, cap, "%s", path != NULL ? path : "");
    free(path);
}

spccl_status sp_gpu_direct_find_gpu(const sp_gpu_ops *ops, int ordinal, sp_gpu_direct_facts *f,
                                    char gpu_path[256])
{
    f->peermem = has_peermem();
    SP_TRY(ops->net_facts(ordinal, &f->gpu));
    find_pci_path(f->gpu.pci, gpu_path, 256);
    return SPCCL_OK;
}

void sp_gpu_direct_find_folder(const sp_gpu_ops *ops, int ordinal, char out[256])
{
    sp_gpu_direct_facts f;
    if (sp_gpu_direct_find_gpu(ops, ordinal, &f, out) != SPCCL_OK)
        out[0] = '\0';
}

/* Add "; NAME (ib): ..." for each device of a transport. */
static void add_devices(const sp_transport *t, sp_gpu_direct_facts *f, const char *gpu_path, struct row *row,
                        int counts[2])
{
    for (size_t i = 0; t->device != NULL && t->device(i, &f->device); i++) {
        sp_gpu_direct decision;
        size_t used = strlen(row->why);
        f->path = sp_pci_path_between(gpu_path, f->device.pci_path);
        sp_gpu_direct_decide(f, &decision);
        counts[0]++;
        counts[1] += decision.how != SP_DIRECT_NO;
        snprintf(row->why + used, sizeof row->why - used, "; %s (%s): %s", f->device.name, t->name,
                 decision.why);
    }
}

static void add_gpu(const sp_gpu_ops *ops, int ordinal)
{
    struct row *row = &rows[n_rows];
    sp_gpu_direct_facts f = {.path = SP_PCI_UNKNOWN};
    const char *setting = sp_env_text(SP_ENV_GPU_DIRECT);
    int counts[2] = {0, 0}; /* devices; those for which it is possible */
    char path[256] = "";
    snprintf(row->name, sizeof row->name, "GPU %d", ordinal);
    if (sp_gpu_direct_is_on())
        snprintf(
            row->why, sizeof row->why,
            "SPCCL_GPU_DIRECT=%s: rings between hosts over ib lie in GPU memory where all devices of both "
            "ranks can do that; a group logs its choice",
            setting);
    else
        snprintf(row->why, sizeof row->why, "rings between hosts lie in pinned memory: SPCCL_GPU_DIRECT=off");
    if (sp_gpu_direct_find_gpu(ops, ordinal, &f, path) != SPCCL_OK) {
        snprintf(row->value, sizeof row->value, "unknown");
        snprintf(row->why, sizeof row->why, "%s", spccl_last_error());
        n_rows++;
        return;
    }
    for (int t = 0; sp_transports[t] != NULL; t++)
        add_devices(sp_transports[t], &f, path, row, counts);
    snprintf(row->value, sizeof row->value, "%s, possible with %d of %d devices",
             sp_gpu_direct_is_on() ? setting : "not used", counts[1], counts[0]);
    n_rows += counts[0] != 0;
}

static void gather(void)
{
    const sp_gpu_ops *ops = sp_gpu_ops_here();
    int n = 0;
    if (ops == NULL || ops->device_count(&n) != SPCCL_OK)
        return;
    for (int i = 0; i < n && i < GPUS_MAX; i++)
        add_gpu(ops, i);
}

bool sp_gpu_direct_describe(size_t i, spccl_info_entry *out)
{
    pthread_once(&once, gather);
    if (i >= n_rows)
        return false;
    *out = (spccl_info_entry){
        .kind = "GPUDirect", .name = rows[i].name, .value = rows[i].value, .why = rows[i].why};
    return true;
}
