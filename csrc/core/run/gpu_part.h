/* gpu_part.h - what a communicator asks of its GPU. core/gpu implements it (gpu_comm.c), because core/run
 * must not include core/gpu. */
#ifndef SP_GPU_PART_H
#define SP_GPU_PART_H

#include "spccl.h"

typedef struct sp_gpu_part {
    /* Take note of errors that kernels reported and of peers that are gone; they break the communicator.
     * Does nothing without a GPU. Threads: any. */
    void (*look)(spccl_comm *comm);
    /* End the GPU part: wait for its work, agree with the peers, free. Does nothing without a GPU. */
    void (*detach)(spccl_comm *comm);
    /* The entry of spccl_info that describes CUDA in this build and the GPUs here. Its texts are valid until
     * this thread's next call. */
    void (*describe)(spccl_info_entry *out);
} sp_gpu_part;

/* Also there in a build without CUDA. */
extern const sp_gpu_part sp_gpu_part_here;

#endif
