/* ib_verbs.h - what transport ib asks of libibverbs: devices, registered memory, one RC queue pair per peer.
 * ib_devices.c and ib_verbs.c are the only files that see <infiniband/verbs.h>. A build without that header has ib_none.c
 * in place of the transport. The library itself is opened at run time (ib_library.h). */
#ifndef SP_IB_VERBS_H
#define SP_IB_VERBS_H

#include "core/base/status.h"
#include "core/contract/transport.h"

#include <stddef.h>
#include <stdint.h>

#define SP_IB_GID_BYTES 16u
#define SP_IB_NAME_CAP 64u
#define SP_IB_DEVICES_MAX 32
#define SP_IB_RAILS_MAX 4 /* devices that carry one pair of ranks */
#define SP_IB_QPS_MAX 16  /* queue pairs of one pair of ranks */

#define SP_IB_GIDS_MAX 256
/* An entry of a port's table of GIDs. type: what sysfs says, "RoCE v2" or "IB/RoCE v1"; "": the entry is empty. */
typedef struct sp_ib_gid {
    uint8_t bytes[SP_IB_GID_BYTES];
    char type[16];
} sp_ib_gid;

/* A port that is active and can make an RC queue pair. */
typedef struct sp_ib_device {
    char name[SP_IB_NAME_CAP]; /* "mlx5_0" */
    uint8_t port, gid_index;
    bool ethernet; /* RoCE v2; else InfiniBand */
    uint16_t lid;  /* InfiniBand */
    uint8_t gid[SP_IB_GID_BYTES];
    uint32_t mtu_bytes;
    int speed_mbps; /* 0: unknown */
    bool near;      /* no device of the endpoint is closer to its GPU; without a GPU: true */
} sp_ib_device;

/* The devices of an endpoint. */
typedef struct sp_ib_choice {
    int n; /* 0: none is usable */
    sp_ib_device devices[SP_IB_RAILS_MAX];
    char why[600];     /* how they were chosen, or why there is none */
    char refused[500]; /* what SPCCL_IB_DEVICE names and cannot be used, or "" */
} sp_ib_choice;

/* Choose the devices of a rank: of those that SPCCL_IB_DEVICE names, or of all, the fastest; at most SPCCL_DEBUG_IB_RAILS.
 * gpu: the folder in sysfs of the GPU whose data they carry: those closest to it first (pci.h). "": those of this thread's
 * NUMA node first. */
void sp_ib_choose(int rank, const char *gpu, sp_ib_choice *out);
/* "; this process may lock 64 KiB of memory, raise it with ulimit -l" if that may be why a call failed with `error`, else
 * "". Returns out. */
const char *sp_ib_lock_text(int error, char *out, size_t cap);
/* "device mlx5_0 port 1" */
void sp_ib_device_text(const sp_ib_device *device, char *out, size_t cap);
/* "RoCE v2, 100 Gbit/s, MTU 4096, GID 10.0.0.1" */
void sp_ib_device_details(const sp_ib_device *device, char *out, size_t cap);
/* As sp_transport.inform. */
void sp_ib_inform(const char **value, const char **why);
/* As sp_transport.device. */
bool sp_ib_net_device(size_t i, sp_net_device *out);

/* ---- an open device: a protection domain and one completion queue ---- */

typedef struct sp_ib_context sp_ib_context;
/* n_completions: most that can be in the queue at once. Errors: SYSTEM, UNREACHABLE. */
spccl_status sp_ib_context_open(const sp_ib_device *device, int n_completions, sp_ib_context **out);
/* Accepts NULL. All links and memory of the device are closed before. */
void sp_ib_context_close(sp_ib_context *d);
/* Close the descriptors and free nothing: for a child of fork (forks.h). */
void sp_ib_context_close_descriptors(sp_ib_context *d);
/* Descriptors for epoll: completions, and events of the device. */
int sp_ib_context_fd(const sp_ib_context *d);
int sp_ib_context_event_fd(const sp_ib_context *d);
/* Log the events of the device: a port that goes down, a queue pair that failed. */
void sp_ib_context_log_events(sp_ib_context *d, int rank);
/* Ask for the next completion to make the descriptor readable, and forget earlier ones. Completions that came before
 * this call do not count: poll after it. Errors: SYSTEM. */
spccl_status sp_ib_context_notify(sp_ib_context *d);
/* Make the descriptor unreadable. */
void sp_ib_context_forget(sp_ib_context *d);

typedef struct sp_ib_completion {
    uint64_t id;
    const char *error; /* NULL: success; else the library's text */
    bool immediate;    /* a write with immediate arrived: the next two are valid */
    uint32_t imm, bytes;
} sp_ib_completion;
/* Number of completions, 0 .. cap; -1: the completion queue failed. */
int sp_ib_context_poll(sp_ib_context *d, sp_ib_completion *out, int cap);

/* ---- memory ---- */

typedef struct sp_ib_memory {
    void *mr; /* NULL: not registered */
    uint32_t lkey, rkey;
} sp_ib_memory;
/* Who writes to registered memory beside this process: nobody, the device for reads of this rank, or peers. */
enum sp_ib_writer { SP_IB_NO_WRITER, SP_IB_DEVICE_WRITES, SP_IB_PEERS_WRITE };
/* Register memory. Errors: SYSTEM. */
spccl_status sp_ib_memory_open(sp_ib_context *d, void *data, size_t bytes, enum sp_ib_writer writer,
                               sp_ib_memory *out);
/* Register a region (transport.h), so that this end may also read it over the network, for a flush. Errors: SYSTEM. */
spccl_status sp_ib_region_open(sp_ib_context *d, const sp_region_config *config, sp_ib_memory *out);
/* Accepts zeroed memory. */
void sp_ib_memory_close(sp_ib_memory *m);

/* ---- links ---- */

/* One end of a connection, as its peer must know it. */
typedef struct sp_ib_end {
    bool ethernet;
    uint16_t lid;
    uint32_t mtu_bytes, queue_pair, packet; /* packet: number of the first one that it sends */
    uint8_t gid[SP_IB_GID_BYTES];
} sp_ib_end;

typedef struct sp_ib_link sp_ib_link;
/* Make a queue pair for so many posted writes and receives. Errors: SYSTEM. */
spccl_status sp_ib_link_open(sp_ib_context *d, int n_writes, int n_receives, sp_ib_link **out,
                             sp_ib_end *mine);
/* Accepts NULL. */
void sp_ib_link_close(sp_ib_link *l);
/* Post n receives. Each takes one write with immediate. Errors: SYSTEM. */
spccl_status sp_ib_link_receive(sp_ib_link *l, uint64_t id, int n);
/* Connect to the peer's end. Errors: SYSTEM, SETTING. */
spccl_status sp_ib_link_connect(sp_ib_link *l, const sp_ib_end *mine, const sp_ib_end *theirs);

typedef struct sp_ib_write {
    const void *from;
    uint32_t bytes; /* may be 0 */
    uint32_t lkey, rkey, imm;
    bool is_put; /* without immediate: it takes no receive of the peer */
    uint64_t to, id;
    bool signal; /* its success makes a completion too */
} sp_ib_write;
/* Errors: SYSTEM. */
spccl_status sp_ib_link_write(sp_ib_link *l, const sp_ib_write *w);

/* A queue pair that is connected with itself. It reads memory of this rank: the device then has written everything that
 * came before to that memory. Errors: SYSTEM. */
spccl_status sp_ib_link_open_loop(sp_ib_context *d, sp_ib_link **out);
/* Read 1 byte at `from` into `to`. Errors: SYSTEM. */
spccl_status sp_ib_link_read(sp_ib_link *l, const void *from, uint32_t rkey, void *to, uint32_t lkey,
                             uint64_t id);

#endif
