/* gpu_comm.h - a communicator's GPU: its inbox, the peers' inboxes as mapped here, the order of its launches.
 * Layer: core/gpu, below its parts: gpu_attach.c makes it, opens and closes its parts, and ends it. gpu_coll.c launches
 * collectives. gpu_watchdog.c looks for failures. */
#ifndef SP_GPU_COMM_H
#define SP_GPU_COMM_H

#include "core/contract/gpu_share.h"
#include "core/gpu/collectives/tune_gpu.h"
#include "core/run/comm.h"
#include "core/run/gpu_part.h"

/* How many of the last launches are kept, for the texts of reports. */
#define SP_GPU_HISTORY 64u

typedef struct sp_gpu_launch {
    uint32_t seq;
    sp_coll coll;
    uint64_t n_elems;
    spccl_dtype dtype;
    uint64_t timeout_ns; /* of each of its waits */
} sp_gpu_launch;

typedef struct sp_gpu_comm {
    spccl_comm *comm; /* the communicator that it belongs to */
    const sp_gpu_ops *ops;
    sp_gpu_device device;
    sp_gpu_limits limits;
    sp_inbox_shape shape;
    const char *handles; /* how inboxes are shared: "fd" or "ipc" */
    sp_gpu_memory *own, *peers[SP_GPU_RANKS_MAX];
    uint8_t *inboxes[SP_GPU_RANKS_MAX]; /* by rank, addresses on this GPU */
    sp_gpu_control *control, *control_device;
    bool is_remote[SP_GPU_RANKS_MAX]; /* by rank: is it on another host? */
    sp_fused_relays relays;           /* on several hosts: who relays results */
    struct sp_proxies *proxies;       /* the rings to these ranks, and their proxy (proxy.h); NULL: none */
    char links[SP_GPU_RANKS_MAX][SP_LINK_TEXT_CAP + 120]; /* by rank: how frames reach it (gpu_info.c) */

    pthread_mutex_t mu;  /* guards the members from here to `history` */
    bool caller_orders;  /* config.caller_orders: then only end_event and n_launches of these are used */
    void *end_event;     /* recorded by the caller after its last launch; borrowed; NULL: none yet */
    void *event;         /* recorded after the last launch outside of captures */
    void *capture_event; /* recorded after the last launch of the last capture */
    bool launched;       /* `event` has been recorded */
    unsigned long long last_stream, last_capture, last_capture_stream; /* ids; 0 = none */
    uint32_t max_ctas; /* of the calls from now on; 0: as many as the group has */
    uint32_t n_launches;
    uint64_t n_by_lists;                   /* of them, pruned all-reduces that exchange lists */
    sp_gpu_launch history[SP_GPU_HISTORY]; /* index: seq modulo SP_GPU_HISTORY */

    pthread_mutex_t channels_mu;     /* guards the list */
    struct spccl_channels *channels; /* the sets of channels (channels.h) */
    struct spccl_channels *lists;    /* that of spccl_cuda_prune_all_reduce; NULL: not made yet */
    bool no_lists;                   /* it could not be made */
    uint32_t n_channel_sets;         /* whose creation has begun on all ranks; the same on all ranks */

    /* used by gpu_watchdog.c */
    struct sp_gpu_comm *next;
    pthread_mutex_t poll_mu; /* only one thread at a time polls the peers */
    int64_t gone_since_ns;   /* when a peer's connection ended; 0: all peers are there */
} sp_gpu_comm;

/* The table of device calls that is in use; NULL in a build without CUDA. */
const sp_gpu_ops *sp_gpu_ops_here(void);

/* The place of a launch among those of its communicator. The GPU is current, and g->mu is held from
 * begin to end. begin makes `stream` wait for the launch before. */
typedef struct sp_gpu_order {
    unsigned long long stream_id, capture; /* ids; 0 = none */
} sp_gpu_order;
spccl_status sp_gpu_order_begin(sp_gpu_comm *g, void *stream, sp_gpu_order *order);
spccl_status sp_gpu_order_end(sp_gpu_comm *g, void *stream, const sp_gpu_order *order);
/* A launch has failed: break the communicator, as the peers wait for this rank. what: the call. Returns st, with its
 * text. */
spccl_status sp_gpu_launch_failed(sp_gpu_comm *g, spccl_status st, const char *what);

/* Is the communicator broken? Then the same status, with a text for a call that starts now. */
spccl_status sp_gpu_refuse_broken(spccl_comm *comm);

/* Errors unless p, the argument `what` of `call`, is aligned, and memory of GPU `device` (-1: not asked). wanted: what
 * the text says before that GPU. */
spccl_status sp_gpu_check_memory(const char *call, const char *what, const void *p, size_t align, int device,
                                 const char *wanted);

/* The communicator's GPU. Errors: ARG, STATE (no GPU is attached). */
spccl_status sp_gpu_comm_get(spccl_comm *comm, const char *call, sp_gpu_comm **out);

/* Exchange each rank's status. All ranks return the same: OK, or the status that explains most. */
spccl_status sp_gpu_agree(spccl_comm *comm, spccl_status st);
/* The same, with a deadline of its own. */
spccl_status sp_gpu_agree_by(spccl_comm *comm, spccl_status st, int64_t deadline_ns);
/* Listen for the peers of this host, which will map memory of this rank. call: the public one; what: is mapped; address:
 * of this rank's listener. The caller closes *share, after a failure too. Errors: SYSTEM, NOMEM. */
spccl_status sp_gpu_share_begin(sp_gpu_comm *g, const char *call, const char *what, int64_t deadline_ns,
                                sp_gpu_share **share, uint8_t address[SP_GPU_SHARE_ADDRESS_BYTES]);
/* The communicator is broken, so the peers cannot be asked whether they have closed their ipc mappings of this rank's
 * memory: give them 1 s. */
void sp_gpu_comm_wait_broken(void);
/* Between two looks of a wait that began at since_ns: yield, later sleep. */
void sp_gpu_pause(int64_t since_ns);
/* Wait until a stream of the current GPU is done, at most SPCCL_TIMEOUT_MS. Errors: TIMEOUT, DEVICE. */
spccl_status sp_gpu_wait_stream(const char *call, int device, void *stream);

/* Let the watchdog thread look at g from now on. Errors: SYSTEM (no thread). (gpu_watchdog.c) */
spccl_status sp_gpu_watchdog_add(sp_gpu_comm *g);
/* Stop it from looking at g, and wait if it is looking just now. g need not have been added. */
void sp_gpu_watchdog_remove(sp_gpu_comm *g);
/* Read the GPU's report and poll the peers, and break the communicator if there is an error. Makes no device
 * call, so it disturbs no capture. Does nothing without a GPU. Threads: any. */
void sp_gpu_comm_find_errors(spccl_comm *comm);

#endif
