/* gpu_direct.h - could a network device read and write a GPU's memory (GPUDirect RDMA)? Decided from facts of the
 * GPU's driver, the kernel and the device, for `spccl info` and for rings in GPU memory (proxy_direct.c).
 *
 * By default the rings between hosts lie in pinned memory: a proxy, which is a thread of the CPU, copies frames from
 * the outbox into messages and back. No hardware has confirmed the decision, or run rings in GPU memory.
 * gpu_info.c has the entries of spccl_info. */
#ifndef SP_GPU_DIRECT_H
#define SP_GPU_DIRECT_H

#include "core/base/pci.h"
#include "core/contract/gpu.h"
#include "core/contract/transport.h"

typedef struct sp_gpu_direct_facts {
    sp_net_device device;
    sp_gpu_net_facts gpu;
    bool peermem; /* the kernel has a module that registers GPU pointers: nvidia_peermem, once nv_mem */
    sp_pci_path path;
} sp_gpu_direct_facts;

typedef enum sp_gpu_direct_how { SP_DIRECT_NO, SP_DIRECT_DMABUF, SP_DIRECT_POINTERS } sp_gpu_direct_how;

typedef struct sp_gpu_direct {
    sp_gpu_direct_how how; /* NO: through pinned memory */
    bool flush;            /* what arrived must be flushed before the GPU may read it */
    char why[320];
} sp_gpu_direct;

/* dmabuf first, then GPU pointers, and only without a host bridge of the CPU between the two: through it many CPUs
 * carry less than pinned memory does. */
void sp_gpu_direct_decide(const sp_gpu_direct_facts *f, sp_gpu_direct *out);

/* Is SPCCL_DEBUG_GPU_DIRECT anything but "off"? */
bool sp_gpu_direct_is_on(void);
/* The same under SPCCL_DEBUG_GPU_DIRECT=`setting`: off: NO. dmabuf, pointers: that way, whatever PCI and the kernel's modules
 * are; registration shows whether it is there. Everything else, that is auto: as decided. */
void sp_gpu_direct_choose(const char *setting, const sp_gpu_direct_facts *f, sp_gpu_direct *out);

/* Set all of *f but `device` and `path`, and the GPU's folder in sysfs ("": unknown). Errors: those of the driver. */
spccl_status sp_gpu_direct_find_gpu(const sp_gpu_ops *ops, int ordinal, sp_gpu_direct_facts *f,
                                    char gpu_path[256]);

/* The GPU's folder in sysfs; "": unknown, also if the driver does not say. */
void sp_gpu_direct_find_folder(const sp_gpu_ops *ops, int ordinal, char out[256]);

#endif
