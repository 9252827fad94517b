/* gpu_comm.h - a communicator's GPU: its inbox, the peers' as mapped here, the order of its launches, and who
 * watches it. Place in the map: running. gpu_attach.c makes it, gpu_coll.c launches, gpu_watchdog.c watches,
 * gpu_comm.c waits, counts and ends it. */
#ifndef SP_GPU_COMM_H
#define SP_GPU_COMM_H

#include "core/gpu/tune_gpu.h"
#include "core/run/comm.h"
#include "core/run/gpu_part.h"

/* The last launches, for the texts of reports. */
#define SP_GPU_HISTORY 64u

typedef struct sp_gpu_launch {
    uint32_t seq;
    sp_coll coll;
    uint64_t n_elems;
    spccl_dtype dtype;
    uint64_t timeout_ns; /* of each of its waits */
} sp_gpu_launch;

typedef struct sp_gpu_comm {
    spccl_comm *comm; /* whose it is */
    const sp_gpu_ops *ops;
    sp_gpu_device device;
    sp_gpu_limits limits;
    sp_inbox_shape shape;
    const char *handles; /* "fd", "ipc" */
    sp_gpu_memory *own, *peers[SP_GPU_RANKS_MAX];
    uint8_t *inboxes[SP_GPU_RANKS_MAX]; /* by rank, addresses on this GPU */
    sp_gpu_control *control, *control_device;

    pthread_mutex_t mu;  /* guards what follows */
    void *event;         /* after the last launch outside captures */
    void *capture_event; /* after the last launch of the last capture */
    bool launched;       /* event has been recorded */
    unsigned long long last_stream, last_capture, last_capture_stream; /* ids; 0 = none */
    uint32_t n_launches;
    sp_gpu_launch history[SP_GPU_HISTORY]; /* by seq */

    /* gpu_watchdog.c */
    struct sp_gpu_comm *next;
    pthread_mutex_t look_mu; /* one look at the peers at a time */
    int64_t gone_since_ns;   /* a peer's connection ended; 0 = all are there */
} sp_gpu_comm;

/* The device calls in force; NULL in a build without CUDA. */
const sp_gpu_ops *sp_gpu_ops_here(void);

/* gpu_comm.c: frees what there is, waits for nothing; accepts NULL. ipc memory only once peers have closed
 * it. */
void sp_gpu_comm_free(sp_gpu_comm *g);
/* The communicator's GPU. Errors: ARG, STATE (none attached). */
spccl_status sp_gpu_comm_get(spccl_comm *comm, const char *call, sp_gpu_comm **out);

/* gpu_watchdog.c */
/* Watch it from now on. Errors: SYSTEM (no thread). */
spccl_status sp_gpu_watchdog_add(sp_gpu_comm *g);
/* And no longer; waits for a look under way. Accepts one that is not watched. */
void sp_gpu_watchdog_remove(sp_gpu_comm *g);
/* Look at the GPU's report, the peers and their aborts, and break the communicator if need be. Makes no
 * device call, so it disturbs no capture. Nothing without a GPU. Threads: any. */
void sp_gpu_comm_look(spccl_comm *comm);

#endif
