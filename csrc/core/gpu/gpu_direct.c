/* gpu_direct.c - the facts and the decision; see gpu_direct.h. */
#include "core/gpu/gpu_direct.h"

#include "core/base/env.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

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

static void refuse(sp_gpu_direct *out, const char *why)
{
    *out = (sp_gpu_direct){.how = SP_DIRECT_NO};
    snprintf(out->why, sizeof out->why, "no: %s", why);
}

/* Which way of registration is there? NO: none, and out->why says why. */
static void find_way(const sp_gpu_direct_facts *f, sp_gpu_direct *out)
{
    const sp_net_device *d = &f->device;
    char why[280];
    *out = (sp_gpu_direct){.how = SP_DIRECT_NO};
    if (d->dmabuf && f->gpu.dmabuf)
        out->how = SP_DIRECT_DMABUF;
    else if (d->pointers && f->peermem)
        out->how = SP_DIRECT_POINTERS;
    if (out->how != SP_DIRECT_NO)
        return;
    snprintf(why, sizeof why, "%s%s",
             !d->dmabuf ? d->why : "the GPU's driver passes no dmabuf (its open kernel modules do)",
             d->pointers ? ", and the kernel module nvidia_peermem is not loaded" : "");
    refuse(out, why);
}

/* The end of the reason why it is possible. */
static const char *flush_text(const sp_gpu_direct_facts *f)
{
    return f->gpu.writes_ordered ? "without a flush: the GPU sees writes in order"
                                 : "with a flush after each receive: the GPU may see writes out of order";
}

void sp_gpu_direct_decide(const sp_gpu_direct_facts *f, sp_gpu_direct *out)
{
    static const char *const far[] = {
        [SP_PCI_UNKNOWN] = "sysfs does not say where the two are on PCI",
        [SP_PCI_HOST_BRIDGE] = "a host bridge of the CPU is between the two",
        [SP_PCI_CPUS] = "several host bridges of the CPU are between the two",
    };
    find_way(f, out);
    if (out->how == SP_DIRECT_NO)
        return;
    if (f->path != SP_PCI_SWITCHES) {
        refuse(out, far[f->path]);
        return;
    }
    out->flush = !f->gpu.writes_ordered;
    snprintf(out->why, sizeof out->why, "possible by %s, %s",
             out->how == SP_DIRECT_DMABUF ? "dmabuf" : "GPU pointers (nvidia_peermem)", flush_text(f));
}

bool sp_gpu_direct_is_on(void)
{
    return strcmp(sp_env_text(SP_ENV_GPU_DIRECT), "off") != 0;
}

void sp_gpu_direct_choose(const char *setting, const sp_gpu_direct_facts *f, sp_gpu_direct *out)
{
    bool dmabuf = strcmp(setting, "dmabuf") == 0;
    if (strcmp(setting, "off") == 0) {
        refuse(out, "SPCCL_DEBUG_GPU_DIRECT is off");
        return;
    }
    sp_gpu_direct_decide(f, out);
    if (!dmabuf && strcmp(setting, "pointers") != 0)
        return;
    *out = (sp_gpu_direct){.how = dmabuf ? SP_DIRECT_DMABUF : SP_DIRECT_POINTERS,
                           .flush = !f->gpu.writes_ordered};
    snprintf(out->why, sizeof out->why, "SPCCL_DEBUG_GPU_DIRECT is %s, %s", setting, flush_text(f));
}
