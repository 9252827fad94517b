/* spccl_channel.h - one-sided channels: kernels of the caller write to another rank's memory and signal it, without
 * a call of the host. This header has the host's functions, and the structs that kernels take. The functions for
 * kernels are in spccl_device.cuh. Modelled on MSCCL++. docs/CHANNELS.md has examples and the order of memory accesses.
 * Channels are experimental: spccl_experimental.h says what that means.
 *
 * A set of channels gives each rank a window: memory into which the peers put data. Each pair of ranks has
 * `n_per_peer` channels, with numbers from 0. A channel has two directions, one for each rank.
 * - Memory channels: windows are GPU memory that the peers of the same host map. A put is a store of the kernel.
 * - Port channels: windows are pinned host memory. A kernel posts triggers, and a thread of the host, the proxy,
 *   carries them out over a transport, also to other hosts.
 *
 * The library allocates the windows. Those of memory channels may also be the caller's own GPU memory. */
#ifndef SPCCL_CHANNEL_H
#define SPCCL_CHANNEL_H

#include "spccl.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Changes with every struct below that kernels read. The library refuses a program whose kernels were compiled
 * with another one. */
#define SPCCL_CHANNEL_LAYOUT 2u

/* ---- what kernels take: plain structs, by value ---------------------------------------------------- */
/* Only spccl_device.cuh uses the members. An address marked "host" is pinned memory, as the GPU sees it. */

/* In the rank's GPU memory: what a channel has done. It survives from launch to launch, so that a captured graph
 * can be replayed. */
typedef struct spccl_channel_state {
    uint64_t signals_sent, signals_taken;    /* signals_sent: of memory channels */
    uint64_t triggers_posted, triggers_done; /* of port channels; triggers_done: as last seen */
    /* Of spccl_sync_blocks: how often all blocks have met; how many have come since. */
    uint64_t blocks_met;
    uint32_t blocks_here;
    uint32_t reserved[5];
} spccl_channel_state;

/* Why a kernel gave up. Host memory. Only the first failure of a rank is written. */
typedef enum spccl_channel_fault {
    SPCCL_CHANNEL_NO_FAULT = 0,
    SPCCL_CHANNEL_NO_SIGNAL,  /* waited for signal number `wanted`; `seen` have come */
    SPCCL_CHANNEL_NO_PROXY,   /* waited until the proxy has carried out `wanted` triggers; it has `seen` */
    SPCCL_CHANNEL_BAD_PUT,    /* bytes `wanted` to `seen` of a memory: outside, or no multiples of 16 */
    SPCCL_CHANNEL_BAD_THREAD, /* a put, a get or packets by thread `wanted` of `seen` */
    /* Of the library's own channels: this rank gave `wanted` elements, the peer `seen`. */
    SPCCL_CHANNEL_OTHER_CALL,
    SPCCL_CHANNEL_NO_PACKET, /* waited for a packet with flag `wanted` at byte `limit`; its flag is `seen` */
    SPCCL_CHANNEL_BAD_PACKETS, /* packets in bytes `wanted` to `seen` of a memory: outside, no multiples, or flag 0 */
    SPCCL_CHANNEL_NO_BLOCK /* waited for `wanted` blocks; `seen` have come */
} spccl_channel_fault;
typedef struct spccl_channel_report {
    uint32_t fault; /* spccl_channel_fault; once it is not NO_FAULT, all members are valid */
    int32_t peer;
    uint32_t index, reserved;
    uint64_t wanted, seen;
    uint64_t limit; /* of BAD_PUT and BAD_PACKETS: bytes of the memory */
} spccl_channel_report;

/* What both kinds of channels have. */
typedef struct spccl_channel_base {
    uint32_t layout; /* SPCCL_CHANNEL_LAYOUT */
    uint32_t index;  /* number of the channel, from 0 */
    int32_t rank, peer;
    uint8_t *window;            /* this rank's memory: its window, or one that was added */
    uint64_t window_bytes;      /* of that */
    uint64_t peer_bytes;        /* of the peer's memory, where puts go */
    uint64_t timeout_ns;        /* of each wait */
    spccl_channel_state *state; /* GPU */
    const uint64_t *signals;    /* how many signals the peer has sent */
    uint32_t *claimed;          /* GPU: 1 once a thread writes the report */
    uint32_t *abort;            /* host: 1 ends all waits */
    spccl_channel_report *report;
} spccl_channel_base;

typedef struct spccl_memory_channel {
    spccl_channel_base base;
    uint8_t *peer_window;   /* the peer's memory */
    uint64_t *peer_signals; /* in the peer's memory: what its base.signals reads */
} spccl_memory_channel;

/* Packets: data and flag in one store. The flag is never 0 and differs from that of the use before. 16 bytes hold 8 of
 * data, 8 hold 4: the formats LL16 and LL8 of MSCCL++. Little-endian, so flags are the upper halves of 8 bytes. */
typedef struct spccl_packet16 {
    uint32_t data1, flag1, data2, flag2;
} spccl_packet16;
typedef struct spccl_packet8 {
    uint32_t data, flag;
} spccl_packet8;

/* A request of a kernel to the proxy: a put, a signal, or both: a put and then the signal. */
typedef enum spccl_trigger_op {
    SPCCL_TRIGGER_PUT = 1,
    SPCCL_TRIGGER_SIGNAL = 2,
    SPCCL_TRIGGER_PUT_SIGNAL = 3
} spccl_trigger_op;
typedef struct spccl_trigger {
    uint16_t op;
    uint8_t dst_memory,
        src_memory;  /* of a put: numbers of memories of the peer and of this rank; 0: the window */
    uint32_t number; /* of the channel: spccl_port_channel.number */
    uint64_t dst_off, src_off, bytes; /* of a put; of a signal 0 */
} spccl_trigger;

typedef struct spccl_port_channel {
    spccl_channel_base base;
    spccl_trigger *fifo;             /* host, [fifo_triggers]: trigger n is at n modulo fifo_triggers */
    uint64_t *posted;                /* host: triggers that the kernels have written */
    const uint64_t *done;            /* host: triggers that the proxy has carried out */
    uint32_t fifo_triggers;          /* a power of two */
    uint32_t number;                 /* of the channel among all of this rank */
    uint32_t dst_memory, src_memory; /* numbers of the peer's memory and of this rank's */
} spccl_port_channel;

/* ---- the host --------------------------------------------------------------------------------------- */

typedef struct spccl_channels spccl_channels; /* one rank's part of a set of channels */

typedef enum spccl_channel_kind { SPCCL_CHANNEL_MEMORY = 1, SPCCL_CHANNEL_PORT = 2 } spccl_channel_kind;

/* All ranks give the same values. */
typedef struct spccl_channels_config {
    size_t struct_bytes;   /* sizeof(spccl_channels_config) */
    uint32_t layout;       /* SPCCL_CHANNEL_LAYOUT of the header with which the kernels were compiled */
    uint32_t kind;         /* spccl_channel_kind */
    uint64_t window_bytes; /* of each rank's window: a multiple of 16, above 0 */
    uint32_t n_per_peer;   /* channels of each pair: 1 to 1024 */
    uint32_t n_triggers;   /* port channels: most triggers in a FIFO, a power of two, 2 to 4096; 0 = 64 */
    /* Memory channels: this rank's window, window_bytes of the attached GPU's memory, from cudaMalloc or inside such an
     * allocation, a multiple of 16. It keeps its contents. The caller frees it after spccl_channels_destroy; if that
     * call warns that a rank is late, after spccl_comm_destroy. NULL: the library allocates the window. Either all ranks
     * give one, or none does. Port channels: NULL. */
    void *window;
} spccl_channels_config;
#define SPCCL_CHANNELS_CONFIG_INIT                                                                           \
    {                                                                                                        \
        sizeof(spccl_channels_config), SPCCL_CHANNEL_LAYOUT, SPCCL_CHANNEL_MEMORY, 0, 1, 0, 0                \
    }

/* Make a set of channels. All ranks call it, at the same place in their order of calls; it ends after the
 * communicator's timeout at the latest. Windows that the library allocates are zero. All ranks get the same status.
 *   comm  with a GPU attached (spccl_cuda_attach)
 *   out   destroy it before the communicator; spccl_comm_destroy destroys what is left
 * Errors: ARG, STATE (no GPU is attached), VERSION (another layout), MISMATCH, NOMEM, DEVICE, UNREACHABLE (a
 * peer's memory cannot be mapped, or config.window cannot be shared), PEER, TIMEOUT, or the error that broke the
 * communicator. */
SPCCL_API spccl_status spccl_channels_create(spccl_comm *comm, const spccl_channels_config *config,
                                             spccl_channels **out);
/* Free a set. All ranks call it, at the same place in their order of calls. It waits until the triggers of port channels
 * are carried out and the other ranks have called it, at most for the communicator's timeout. If a rank is still late
 * then, it logs a warning, the set's memory stays until spccl_comm_destroy, and the group goes on: later collectives
 * wait for the late rank. Before this call the caller must wait for its kernels that use the channels. Accepts NULL. */
SPCCL_API void spccl_channels_destroy(spccl_channels *channels);

/* This rank's window. *device: for kernels and CUDA copies. *host: for the host; NULL if it is GPU memory. */
SPCCL_API spccl_status spccl_channels_window(const spccl_channels *channels, void **device, void **host);

/* The channel number `index` to `peer`, for kernels on this rank's GPU: pass it by value. Its waits last for the
 * communicator's timeout (spccl_comm_set_timeout) at the time of this call.
 * A wait that fails breaks the communicator: spccl_cuda_wait returns the error, with rank, peer and channel.
 * Errors: ARG (no such peer or channel; a set of the other kind), UNREACHABLE (the peer is on another host). */
SPCCL_API spccl_status spccl_channels_get_memory(const spccl_channels *channels, int peer, uint32_t index,
                                                 spccl_memory_channel *out);
/* As spccl_channels_get_memory, for a set of port channels. Errors: ARG. */
SPCCL_API spccl_status spccl_channels_get_port(const spccl_channels *channels, int peer, uint32_t index,
                                               spccl_port_channel *out);

/* Add a memory of the caller to a set, beside the windows: as the source of puts of port channels, as the place where
 * peers put or get. All ranks call it, at the same place in their order of calls; it ends after the communicator's timeout
 * at the latest. All ranks get the same status. After a failure the set is as before.
 *   memory  `bytes`, a multiple of 16 as its address; the same number of bytes on all ranks. Of memory channels as
 *           config.window. Of port channels pinned memory: a host address from cudaHostAlloc or cudaHostRegister. It keeps
 *           its contents. The caller frees it when config.window may be freed
 *   number  of the memory in this set, the same on all ranks: from 1, as 0 is the window; at most 15
 * Errors: those of spccl_channels_create. */
SPCCL_API spccl_status spccl_channels_add_memory(spccl_channels *channels, void *memory, uint64_t bytes,
                                                 uint32_t *number);
/* The same channel as spccl_channels_get_memory and spccl_channels_get_port give, for other memories: it puts to and gets
 * from the peer's memory `peer_memory`; packets come, and puts of a port channel start, in this rank's `own_memory`. All
 * that is got for one channel number shares its counts of signals and triggers: a signal follows the puts to all its
 * memories. Errors: also ARG (no such memory). */
SPCCL_API spccl_status spccl_channels_get_memory_at(const spccl_channels *channels, int peer, uint32_t index,
                                                    uint32_t peer_memory, uint32_t own_memory,
                                                    spccl_memory_channel *out);
SPCCL_API spccl_status spccl_channels_get_port_at(const spccl_channels *channels, int peer, uint32_t index,
                                                  uint32_t peer_memory, uint32_t own_memory,
                                                  spccl_port_channel *out);

#ifdef __cplusplus
}
#endif
#endif
