/* gpu_part.h - the functions of core/gpu that core/run calls. They are in a table, because core/run must not
 * include core/gpu. gpu_info.c fills the table. */
#ifndef SP_GPU_PART_H
#define SP_GPU_PART_H

#include "spccl.h"

#include <stdbool.h>

typedef struct sp_gpu_part {
    /* Look for errors that kernels reported and for peers that are gone. Both break the communicator.
     * Does nothing without a GPU. Threads: any. */
    void (*find_errors)(spccl_comm *comm);
    /* Detach the GPU: wait for its kernels, then for the peers, then free its memory. Does nothing without a
     * GPU. */
    void (*detach)(spccl_comm *comm);
    /* The entry of spccl_info that describes CUDA in this build and the GPUs here. Its texts are valid until
     * this thread's next call. */
    void (*describe)(spccl_info_entry *out);
    /* The entry with the GPU memory and pinned memory of groups of some sizes; its text as above. */
    void (*describe_memory)(spccl_info_entry *out);
    /* How this rank's messages and frames reach `peer`; NULL: no GPU is attached. Valid until detach. */
    const char *(*describe_link)(spccl_comm *comm, int peer);
    /* The i-th entry of spccl_info about GPUs and network devices. False: there is none. */
    bool (*describe_direct)(size_t i, spccl_info_entry *out);
} sp_gpu_part;

/* Builds without CUDA have it too. */
extern const sp_gpu_part sp_gpu_part_here;

#endif
