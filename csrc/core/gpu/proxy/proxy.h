/* proxy.h - the proxies: threads that move frames, tails and credits between this rank and peers on other hosts.
 *
 * The proxies of a rank divide the workers: all 8 workers of a change counter have the same proxy, and the counters go
 * to the proxies in turn. Each proxy has links of its own, and exchanges messages with the proxy of the same
 * number of each remote peer. All ranks have the same number of proxies.
 *
 * contract/remote.h says where the rings lie. A proxy reads the outbox, and sends what kernels wrote there over a
 * transport. It writes what the peers' proxies send into the host inbox. It announces only tails that the sender's
 * kernel announced: a frame is whole when the receiver's kernel sees it. A proxy makes no call of CUDA. Such a call
 * may wait for another thread's call, and that one for a kernel that waits for a proxy.
 * docs/ALGORITHMS.md, "GPUs of several hosts", has the rest.
 * proxy.c: start and end. proxy_move.c: what a proxy does in each round. proxy_thread.c: its thread.
 *
 * With some peers the rings may lie in GPU memory (SPCCL_DEBUG_GPU_DIRECT; proxy_direct.c). Kernels then write frames for the
 * peer to rings in this GPU's memory, and the proxy puts them (transport.h) into the peer's inbox. The message has the
 * positions alone, and the copy warp of the peer copies no frames. */
#ifndef SP_PROXY_H
#define SP_PROXY_H

#include "core/gpu/gpu_direct.h"
#include "core/gpu/proxy/proxy_thread.h"
#include "core/gpu/proxy/proxy_wire.h"

#define SP_PROXIES_MAX 16u

/* A remote peer, as one proxy sees it. */
typedef struct sp_proxy_peer {
    int rank;
    uint32_t link[SP_INBOX_QUEUES]; /* by queue: number of its link in the pinned areas */
    sp_proxy_positions at;
    uint64_t *memory; /* owned: of `at` */
    /* In the outbox, by queue: what kernels of this rank announced, [n_workers] each. Only of queues that it has. */
    const uint64_t *tails[SP_INBOX_QUEUES], *credits[SP_INBOX_QUEUES];
    uint8_t handle[SP_REGION_HANDLE_BYTES]; /* with at.direct: of its inbox */
    uint32_t link_there[SP_INBOX_QUEUES];   /* with at.direct, by queue: number of the link in its inbox */
    uint32_t next;            /* number of the ring at which the next message starts: queue * n_workers + k */
    uint64_t n_messages;      /* sent */
    int64_t waiting_since_ns; /* credits wait for frames (sp_proxy_may_wait); 0: none does */
    int64_t gone_since_ns;    /* 0: it is there */
} sp_proxy_peer;

struct sp_proxies;

typedef struct sp_proxy {
    struct sp_proxies *r;
    sp_proxy_thread thread;
    sp_endpoint *ep; /* of sp_proxies.transport */
    sp_proxy_peer peers[SP_GPU_RANKS_MAX];
    uint32_t *workers;                       /* [n_workers] the workers that it serves */
    uint32_t n_workers;                      /* so many */
    sp_proxy_entry *entries;                 /* [4 * n_workers] scratch: those of one message */
    uint64_t n_bytes_sent;                   /* of messages; for tests and logs */
    uint64_t n_bytes_put;                    /* of puts; for tests */
    sp_region *outbox_region, *inbox_region; /* rings in GPU memory; NULL: none */
} sp_proxy;

typedef struct sp_proxies {
    sp_gpu_comm *g;
    const sp_transport *transport; /* of the links to remote peers; of several the one with puts */
    uint8_t *outbox, *host_inbox;
    uint8_t *outbox_device; /* for sp_fused_args.inboxes */
    sp_fused_remote area;   /* for sp_fused_args.remote */
    int n_peers;            /* on other hosts */
    uint32_t n_proxies;
    sp_proxy proxies[SP_PROXIES_MAX];
    sp_gpu_memory *gpu_outbox; /* rings in GPU memory for the peers of `direct`; NULL: there are none */
    sp_gpu_direct direct;      /* what this rank decided */
    uint32_t n_direct;         /* peers whose rings lie in GPU memory */
    atomic_bool leaving;
    atomic_bool captured;   /* a launch was captured: a graph may launch more, without a call */
    atomic_uint n_launches; /* launches so far */
} sp_proxies;

/* ---- proxy.c ---- */

/* How many proxies a rank would like to have: SPCCL_DEBUG_CUDA_PROXIES, or by the cores that this process may use. comm
 * NULL: if it is the only rank of its host. Errors: SETTING. */
spccl_status sp_proxies_count(const spccl_comm *comm, uint32_t *out);
/* Allocate pinned memory and open the endpoints of g->limits.n_proxies proxies. g's GPU is current. g->proxies is set at once; the caller calls
 * sp_proxies_close, after a failure too. Errors: NOMEM, DEVICE, SYSTEM, and those of the transport. */
spccl_status sp_proxies_open(sp_gpu_comm *g);
/* All ranks call it together: exchange the endpoints' addresses and note those of the remote peers. Errors:
 * UNREACHABLE (names the pair), and those of the transport. */
spccl_status sp_proxies_meet(sp_proxies *r);
/* Connect for at most SP_PROXY_CONNECT_NS. AGAIN: some peers are not connected yet; call it again. Errors: TIMEOUT
 * (deadline_ns has passed), PEER, AUTH, SYSTEM. */
spccl_status sp_proxies_connect(sp_proxies *r, int64_t deadline_ns);
/* All ranks call it together, after they have connected: decide with which peers the rings lie in GPU memory. A rank that
 * cannot do it is no error. Errors: those of spccl_all_gather. (proxy_direct.c) */
spccl_status sp_proxies_agree_direct(sp_proxies *r);
/* Set r->area.rings, after g->inboxes. (proxy_direct.c) */
void sp_proxies_find_rings(sp_proxies *r);
/* Close the regions of a proxy. (proxy_direct.c) */
void sp_proxy_close_regions(sp_proxy *x);
/* Put n spans into the inbox of a peer, for the message that is reserved. Errors: PEER, FORMAT, BUG. (proxy_direct.c) */
spccl_status sp_proxy_put_spans(sp_proxy *x, const sp_proxy_peer *p, const sp_proxy_entry *spans, uint32_t n);
/* Start the threads; all ranks have connected. Errors: SYSTEM. */
spccl_status sp_proxies_start(sp_proxies *r);
/* Call before each launch: no proxy may sleep. Accepts NULL. */
void sp_proxies_wake(sp_proxies *r, bool captured);
/* From now on a peer that is gone is no error: all kernels have ended, and peers may leave. Accepts NULL. */
void sp_proxies_leave(sp_proxies *r);
/* Stop the proxies and free everything. No kernel may run any more, or keep_memory: the pinned memory stays, as a kernel
 * that does not end may still write there. Accepts NULL. */
void sp_proxies_close(sp_proxies *r, bool keep_memory);

/* ---- proxy_move.c ---- */

/* Bytes of the largest message. */
size_t sp_proxies_message_max(const sp_proxies *r);
/* Prepare the peer number i of a proxy, whose workers and peers[i].at are set. */
void sp_proxy_find_words(sp_proxy *x, int i);

/* One round: take messages, and send what the kernels wrote. *moved = true if anything moved. Errors: PEER, FORMAT (a
 * peer sent wrong positions; names it), BUG. */
spccl_status sp_proxy_round(sp_proxy *x, bool *moved);

#endif
