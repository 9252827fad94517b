/* channels.h - a rank's part of a set of one-sided channels (spccl_channel.h), and what the rest of core/gpu calls.
 * channels.c: create. channel_memories.c: memories that are added. channel_handles.c: what kernels take.
 * channels_end.c: failures that kernels report, and the end. */
#ifndef SP_CHANNELS_H
#define SP_CHANNELS_H

#include "core/gpu/gpu_comm.h"
#include "spccl_channel.h"

#define SP_CHANNELS_PER_PEER_MAX 1024u
#define SP_CHANNELS_TRIGGERS 64u
#define SP_CHANNELS_TRIGGERS_MAX 4096u
#define SP_CHANNELS_WINDOW_MAX (UINT64_C(1) << 40)
/* Memories of a set: the window has the number 0, then come those of spccl_channels_add_memory. */
#define SP_CHANNELS_MEMORIES_MAX 16u
/* Each word that another rank or the host writes has a cache line of its own. */
#define SP_CHANNELS_LINE 64u

/* The memory of a rank has these parts, in this order:
 * - the window, unless it is the caller's;
 * - for each channel a line with the count of the peer's signals;
 * - the states of the channels;
 * - a line with the word `claimed`.
 * Of memory channels all is GPU memory, which the peers map. Of port channels the first two parts are pinned memory.
 * After them that memory has for each channel a line with the count of triggers posted, a line with the count of those
 * done, and its FIFO. */
typedef struct sp_channels_layout {
    uint64_t signals_off;                                   /* after the window, if that is the library's */
    uint64_t posted_off, done_off, fifos_off, pinned_bytes; /* of port channels, in pinned memory */
    uint64_t states_off, claimed_off, bytes;                /* in GPU memory */
} sp_channels_layout;

/* A memory that the ranks have added to a set, or the window. */
typedef struct sp_channels_memory {
    uint64_t bytes;  /* the same on all ranks */
    uint8_t *device; /* address on the GPU */
    uint8_t *host;   /* of port channels: what the proxy reads and writes; else NULL */
    sp_gpu_memory *own, *peers[SP_GPU_RANKS_MAX]; /* of memory channels, if it is the caller's; else NULL */
} sp_channels_memory;

struct spccl_channels {
    sp_gpu_comm *g;
    struct spccl_channels *next; /* of the same communicator */
    uint32_t number;             /* among the sets of the communicator, from 1; the same on all ranks */
    uint32_t kind, n_per_peer, n_triggers;
    bool for_lists; /* the library's own, of spccl_cuda_prune_all_reduce; guarded by channels_mu */
    sp_channels_layout layout;
    /* Addresses on the GPU: what signals_off and so on count from; the same for states and `claimed`. */
    uint8_t *signals_device, *state_device;
    /* Of memory channels; peers: by rank, NULL on other hosts. */
    sp_gpu_memory *own, *peers[SP_GPU_RANKS_MAX];
    uint8_t *pinned; /* of port channels; `state_device` was allocated by ops->upload */
    /* [0]: the window. Of memory channels, if the library allocated it, it lies in `own` and `peers`. n_memories grows
     * atomically, as the proxy reads it. */
    sp_channels_memory memories[SP_CHANNELS_MEMORIES_MAX];
    uint32_t n_memories;
    struct sp_port *port;                         /* of port channels: the proxy (channel_port.h) */
    spccl_channel_report *report, *report_device; /* pinned */
    struct sp_channels_farewell *farewell;        /* owned until the end of the set begins; then NULL */
};

/* Buffers of the all-gather that ends a set. A rank that stops waiting for it leaves them to the request. */
struct sp_channels_farewell {
    uint8_t mine, all[SP_GPU_RANKS_MAX];
};

/* Until when a creation may take, on this rank. Steps end before the call: after them all ranks compare their status. */
typedef struct sp_channels_deadlines {
    int64_t call_ns, step_ns;
} sp_channels_deadlines;
sp_channels_deadlines sp_channels_find_deadlines(const spccl_comm *comm);

/* Number of a channel among all of a rank: that of a peer in `slot`. */
static inline uint32_t sp_channels_number(const spccl_channels *c, uint32_t slot, uint32_t index)
{
    return slot * c->n_per_peer + index;
}

/* Does the caller own memory that the peers map by CUDA IPC? */
bool sp_channels_has_callers_memory(const spccl_channels *c);
/* Unmap the peers' memory, and forget this rank's; the caller keeps that. The GPU is current. */
void sp_channels_drop_memory(const sp_gpu_comm *g, sp_channels_memory *m);

/* Break the communicator if a kernel has reported a failure of a channel. Threads: any. */
void sp_channels_find_errors(sp_gpu_comm *g);
/* Has any set of g windows that are the callers' memory? They are mapped by CUDA IPC. Not of sets that this rank has
 * destroyed: all ranks unmap those before they destroy them. */
bool sp_channels_use_ipc(const sp_gpu_comm *g);
/* Unmap the peers' memory of a set. */
void sp_channels_unmap_set(spccl_channels *c);
/* Free a set that is in no list, without waiting for anything. Its GPU is current, or keep_memory: it cannot be entered,
 * and GPU memory and pinned memory stay. */
void sp_channels_free_set(spccl_channels *c, bool keep_memory);
/* Unmap the peers' memory of all sets of g. */
void sp_channels_unmap(sp_gpu_comm *g);
/* Wait until the proxies of all sets of g have carried out what was posted, at most for the communicator's timeout. */
void sp_channels_drain(sp_gpu_comm *g);
/* Stop the proxies of all sets of g. A kernel may still use the memory. */
void sp_channels_stop(sp_gpu_comm *g);
/* The same as sp_channels_free_set, for all sets of g. */
void sp_channels_free_all(sp_gpu_comm *g, bool keep_memory);

#endif
