/* transport.h - the contract between core and transports: sp_transport, a table of functions.
 * csrc/transport implements it. A transport carries messages of any bytes between two ranks; it knows no
 * formats and no schedules.
 *
 * An endpoint is one rank's end of one communicator in one transport. Between two ranks there are
 * `n_queues` queues each way. A queue carries messages in order, reliably, and has a fixed capacity. A full
 * queue never delays another queue: schedules need that to be free of deadlock.
 *
 * The sender reserves space in the queue and writes the message there. The receiver reads the message in
 * place and releases it. No function blocks, with three exceptions. close and leave may wait until what was sent has
 * arrived. puts.open_region waits until memory is registered, puts.close_region until it is released. Each has a
 * deadline (docs/TRANSPORTS.md). Only one thread at a time may use an endpoint. */
#ifndef SP_TRANSPORT_H
#define SP_TRANSPORT_H

#include "core/base/host.h"

#include <stdbool.h>

#define SP_ADDRESS_BYTES_MAX 512u /* one endpoint's address, as published in the store */
#define SP_SECRET_BYTES 32u
#define SP_ABORT_TEXT_CAP 400u
#define SP_QUEUES_MAX 4
#define SP_PUTS_MAX 128u

/* Opaque: each transport casts it to its own struct. */
typedef struct sp_endpoint sp_endpoint;

typedef struct sp_endpoint_config {
    int rank, world_size;
    uint8_t secret[SP_SECRET_BYTES]; /* the job secret: both ends of every connection prove it */
    uint8_t host[SP_HOST_ID_BYTES];  /* this rank's host */
    uint64_t group_tag;              /* hash of the group's name: keeps groups of one job apart */
    int n_queues;                    /* per peer and direction, 1 .. SP_QUEUES_MAX */
    size_t queue_bytes;              /* capacity of one queue; a power of two */
    uint32_t n_sockets;              /* tcp: sockets per peer and queue, 1 .. 16 */
    const char *gpu; /* ib: folder in sysfs of the GPU whose data it carries; NULL or "": none, or unknown */
    uint32_t n_sharing;  /* endpoints of this rank and group that share the link; 0: 1 */
    bool rates_decide;   /* ncclnet: it fails for a pair for which tcp has the higher rate (link_rate.h) */
    uint32_t n_puts;     /* transports with `puts`: most of them under way to a peer, at most SP_PUTS_MAX */
    int64_t deadline_ns; /* for connecting to all peers (clock.h) */
    /* For transports with has_control: `open` calls it if the transport is usable on this host. *out: the endpoint of tcp
     * whose links are the control links. The owner of both endpoints opens it with the same config, adds the peers of this
     * endpoint to it before the first connect_step, sleeps on it too, and closes it after `leave`. */
    spccl_status (*open_control)(void *owner, const struct sp_endpoint_config *config, sp_endpoint **out);
    void *owner;
} sp_endpoint_config;

/* Why a transport does not carry a pair. Texts are valid until close. */
typedef struct sp_pair_failure {
    const char *why;
    const char *what; /* failed: "the plugin". NULL: tcp is faster, as `why` says */
    bool expected;    /* no warning is needed */
} sp_pair_failure;

/* A network device, and whether it could reach GPU memory (GPUDirect RDMA). */
typedef struct sp_net_device {
    char name[64];      /* "mlx5_0" */
    char pci_path[256]; /* its folder in sysfs; "": unknown */
    bool dmabuf;        /* it registers memory of other devices that is passed as a dmabuf */
    bool pointers;      /* it registers GPU pointers if the kernel module nvidia_peermem is there */
    char why[120];      /* why dmabuf is false */
} sp_net_device;

/* ---- puts: the network device reads this rank's memory and writes the peer's, without a copy in between ---- */

/* Memory that network devices read or write. */
typedef struct sp_region_config {
    uint8_t *address;
    size_t bytes;
    int dmabuf; /* a descriptor, borrowed until return; -1: the memory is registered by its address */
    uint64_t dmabuf_offset; /* where the memory begins in the dmabuf */
    bool peers_write;       /* peers may write it; else it is a source of puts alone */
    bool flush; /* with peers_write: `flush` is used for it. An endpoint has at most one such region */
} sp_region_config;

#define SP_REGION_HANDLE_BYTES 64u /* what a peer must know to write a region */
typedef struct sp_region sp_region;

typedef struct sp_put {
    const sp_region *from; /* one that peers do not write */
    const uint8_t *to;     /* the handle of the peer's region */
    size_t from_off, to_off, bytes;
} sp_put;

/* Used only after connect_step has returned OK. */
typedef struct sp_transport_puts {
    /* The i-th device that the endpoint uses. False: there is none. */
    bool (*device)(sp_endpoint *ep, size_t i, sp_net_device *out);
    /* Do puts reach the peer? Both ends get the same answer. */
    bool (*reaches)(sp_endpoint *ep, int peer);
    /* Register memory with all devices of the endpoint; handle[SP_REGION_HANDLE_BYTES]. Errors: SYSTEM, NOMEM. */
    spccl_status (*open_region)(sp_endpoint *ep, const sp_region_config *config, sp_region **out,
                                uint8_t *handle);
    /* Accepts NULL. Before close of the endpoint, and before the memory is freed. */
    void (*close_region)(sp_endpoint *ep, sp_region *r);
    /* So many puts to the peer are accepted now; at most sp_endpoint_config.n_puts. */
    uint32_t (*room)(sp_endpoint *ep, int peer);
    /* Write bytes of a region into a region of the peer. They have arrived when the peer's peek shows the message that
     * is reserved: between reserve and commit no other function of the endpoint is called but this one. The bytes must
     * not change until the peer has said that it has the message. Errors: PEER, FORMAT (`to` is no handle), BUG (no
     * room, or outside of one of the regions). */
    spccl_status (*put)(sp_endpoint *ep, int peer, int queue, const sp_put *put);
    /* Make what the peer put before the message that peek shows visible to the GPU to which the region belongs. AGAIN:
     * not yet; call it again later. Errors: PEER. */
    spccl_status (*flush)(sp_endpoint *ep, int peer, int queue);
} sp_transport_puts;

typedef struct sp_transport {
    const char *name; /* "shm" */
    /* Messages cross a network over which NCCL may move GPU memory without the host (GPUDirect RDMA). */
    bool is_rdma;
    /* Has this endpoint called open_control? Then each of its pairs has a control link, over which both ranks say how to
     * connect, and later when they leave or give up. NULL: no. */
    bool (*has_control)(sp_endpoint *ep);
    /* Time to move one byte to the peer, without encode and decode. The choice of format uses it. A transport may
     * learn it from what it sent: the answer may change, and need not be the same on both ends. */
    double (*ns_per_byte)(sp_endpoint *ep, int peer);

    /* Mbit/s of the network cards that this endpoint uses, 0 if unknown. NULL: unknown, or no network. */
    uint32_t (*rate_mbps)(sp_endpoint *ep);
    /* Mbit/s between this endpoint and the one at `address`, which can_reach accepts and whose rate_mbps is its_mbps. 0 if
     * one of both rates is unknown. Both ends get the same answer. NULL: the smaller one of both rates. */
    uint32_t (*pair_mbps)(sp_endpoint *ep, const uint8_t *address, size_t bytes, uint32_t its_mbps);

    /* What this transport found on this host, for `spccl info`: texts that stay valid. NULL: it looks for nothing. */
    void (*inform)(const char **value, const char **why);
    /* Its i-th usable device on this host, for `spccl info`. False: there is none. NULL: it has no devices. */
    bool (*device)(size_t i, sp_net_device *out);

    /* Make an endpoint. The caller sets *out to NULL before the call. `config` is not used after return. */
    spccl_status (*open)(const sp_endpoint_config *config, sp_endpoint **out);
    /* Write the address at which peers reach this endpoint. *bytes <= SP_ADDRESS_BYTES_MAX. */
    spccl_status (*address)(sp_endpoint *ep, uint8_t *out, size_t *bytes);
    /* True if this endpoint and the one at `address` can use this transport. Both ends must get the same
     * answer. `why` gets the reason in a few words, for true and for false: "same host", "other host". */
    bool (*can_reach)(sp_endpoint *ep, const uint8_t *address, size_t bytes, char *why, size_t why_cap);
    /* How this endpoint reaches a peer, in a few words; called once all peers are connected. `out` holds what can_reach
     * said. NULL: that holds. */
    void (*describe)(sp_endpoint *ep, int peer, char *out, size_t cap);
    /* Once connected: the IP address of this host on the connection to a peer of another host, as text. Empty: the peer
     * is reached over loopback. NULL: the transport has no IP network. */
    void (*local_ip)(sp_endpoint *ep, int peer, char *out, size_t cap);
    /* Use this transport between this rank and `peer`. Called before the first connect_step. */
    spccl_status (*add_peer)(sp_endpoint *ep, int peer, const uint8_t *address, size_t bytes);
    /* After connect_step has returned OK, for an added peer: true if this transport does not carry the pair. Both ends get
     * the same answer. NULL: it fails for all pairs or none. */
    bool (*failed)(sp_endpoint *ep, int peer, sp_pair_failure *out);
    /* tcp: the link to the added peer is a control link, which takes no share of what may be in flight. Or, after
     * connect_step has returned OK: it carries messages instead, which alone `flushed` counts. */
    void (*set_control)(sp_endpoint *ep, int peer, bool is_control);
    /* Continue connecting. Returns SPCCL_AGAIN until every added peer is connected in both directions.
     * A connection that does not prove the job secret (wrong secret, noise, silence) is closed and logged;
     * the others go on. Errors: TIMEOUT (the deadline passed; names the missing ranks), AUTH (a peer refused
     * our secret). */
    spccl_status (*connect_step)(sp_endpoint *ep);

    /* Largest message that reserve accepts. At least queue_bytes / 4. */
    size_t (*message_max)(sp_endpoint *ep);
    /* Reserve space for a message of exactly `bytes` (> 0) at the end of the queue to `peer`, aligned to 16
     * bytes. Returns SPCCL_AGAIN if there is no space now. Errors: PEER (the peer is gone).
     * A second reserve before commit replaces the first. It never fails if it asks for fewer bytes: a caller
     * may reserve the largest size first, and the exact size later. */
    spccl_status (*reserve)(sp_endpoint *ep, int peer, int queue, size_t bytes, void **out);
    /* Send the reserved message, which the caller has written. `call` is the number of its collective. Where
     * messages compete for a wire, those of earlier calls go first. Messages of one queue keep their order. */
    spccl_status (*commit)(sp_endpoint *ep, int peer, int queue, uint32_t call);
    /* Get the oldest message that is not released, aligned to 16 bytes. It stays valid until release.
     * Returns SPCCL_AGAIN if there is no message. Errors: PEER (no message, and the peer is gone). All that a
     * peer sent before it left is delivered first. */
    spccl_status (*peek)(sp_endpoint *ep, int peer, int queue, const void **out, size_t *bytes);
    /* Give back the space of the message that peek returned. */
    spccl_status (*release)(sp_endpoint *ep, int peer, int queue);
    /* True if the first n messages that were committed on this queue have left this process. They then reach
     * the peer even if this process exits now. Also true if the peer is gone. */
    bool (*flushed)(sp_endpoint *ep, int peer, int queue, uint64_t n);

    /* Move bytes, and notice peers that left. A peer that left is not an error of this function.
     * Errors: ABORTED (a peer sent an abort; its rank is in *peer, its text in text[SP_ABORT_TEXT_CAP]). */
    spccl_status (*progress)(sp_endpoint *ep, int *peer, char *text);
    /* The file descriptor to sleep on, for level-triggered epoll. Between a successful `arm` and `disarm` it
     * becomes readable when there is something for `progress` to do. */
    int (*wait_fd)(sp_endpoint *ep);
    /* Prepare to sleep on wait_fd. SPCCL_OK: the caller may sleep, and calls disarm afterwards. SPCCL_AGAIN:
     * something changed that peek, reserve, flushed and progress have not shown yet; do not sleep, do not
     * disarm. Each change is reported once. That messages have left, so that `flushed` may be true now, is such
     * a change: they can leave in the progress just before arm, and no event follows. New space in a queue ends
     * a sleep only if the last reserve on that queue returned SPCCL_AGAIN. */
    spccl_status (*arm)(sp_endpoint *ep);
    void (*disarm)(sp_endpoint *ep);
    /* Tell every peer that this rank gives up. Best effort; does not use the queues, which may be full. NULL: the control
     * links do that. */
    void (*abort_peers)(sp_endpoint *ep, const char *text);

    const sp_transport_puts *puts; /* NULL: it has no puts */

    /* Bytes of memory of the queues. The rank that made a shared segment counts it. */
    size_t (*memory_bytes)(sp_endpoint *ep);
    /* With has_control: send what is queued, and say so over the control links, which still are open. Then only close. */
    void (*leave)(sp_endpoint *ep);
    /* Close the endpoint. Accepts NULL, and an endpoint that is not connected to all peers yet. Leaves no
     * file, segment, socket or thread behind. */
    void (*close)(sp_endpoint *ep);
} sp_transport;

/* The transports of this build, in the order in which pairs of ranks try them; NULL-terminated.
 * Defined in registry.c. */
extern const sp_transport *const sp_transports[];
/* The transport of that name; NULL if there is none. */
const sp_transport *sp_transport_find(const char *name);
/* Parse a list with commas ("shm,tcp"; spaces are allowed) to transports in its order: out[*n], *n <= cap.
 * Errors: SETTING (an unknown name, a name twice, an empty list, more than cap). */
spccl_status sp_transport_parse_list(const char *text, const sp_transport **out, size_t cap, size_t *n);

#endif
