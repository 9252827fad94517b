/* segments.h - what networks that move segments share: InfiniBand and RoCE (ib.h), and NCCL net plugins (plugin.h). An
 * endpoint of such a network begins with a struct sp_segments, and the network is a table of functions, sp_segments_net.
 * segments.c: messages, sleeping, closing. segments_start.c: start-up. segments_end.c: how peers end.
 *
 * The control link to a peer (open_control in transport.h) belongs to the endpoint's owner. It proves the job secret,
 * carries notes on its queue 0 (what both must know to connect, and at the end a FIN) and aborts, and shows when the peer
 * is gone. The owner moves its bytes; here notes are only sent and taken.
 *
 * The end of a peer, in this order: its FIN over the control link says how many segments it has sent; the end of the link
 * makes it `gone`, and nothing is sent to it any more; it is `over` when those segments are here, or none has come for
 * 600 ms. Then peek returns the error. If the network fails first, the control link has 600 ms to say why. */
#ifndef SP_SEGMENTS_H
#define SP_SEGMENTS_H

#include "core/contract/transport.h"
#include "transport/common/transports.h"
#include "transport/net/segments/segment_ring.h"

#include <sys/types.h>

#define SP_NET_TEXT_CAP 200

/* A note of start-up: what came of a stage. u32 magic of the network   4 u32 value   8 why[SP_NET_TEXT_CAP] */
#define SP_SEGMENTS_RESULT_BYTES (8u + SP_NET_TEXT_CAP)
typedef struct sp_segments_result {
    uint32_t value;
    char why[SP_NET_TEXT_CAP];
} sp_segments_result;
void sp_segments_write_result(const sp_segments_result *r, uint32_t magic,
                              uint8_t out[SP_SEGMENTS_RESULT_BYTES]);
/* False: the bytes are not a result, or the value is above value_max. */
bool sp_segments_read_result(const uint8_t *bytes, size_t n, uint32_t magic, uint32_t value_max,
                             sp_segments_result *out);

/* The last note: how many segments were sent in all. 0 "spNF"   4 u32 n_queues   8 u64 n_segments[SP_QUEUES_MAX] */
#define SP_SEGMENTS_FIN_BYTES (8u + 8u * SP_QUEUES_MAX)
typedef struct sp_segments_fin {
    uint64_t n_segments[SP_QUEUES_MAX];
} sp_segments_fin;
void sp_segments_write_fin(const sp_segments_fin *f, int n_queues, uint8_t out[SP_SEGMENTS_FIN_BYTES]);
/* False: the bytes are not a FIN. */
bool sp_segments_read_fin(const uint8_t *bytes, size_t n, int n_queues, sp_segments_fin *out);

typedef struct sp_segments_peer {
    bool added;
    bool carried; /* start-up has ended, and the network carries the pair */
    sp_segment_ring tx[SP_QUEUES_MAX], rx[SP_QUEUES_MAX];
    /* start-up */
    char reason[SP_NET_TEXT_CAP]; /* why the network does not carry the pair: the first */
    bool none;                    /* it does not */
    bool tcp_faster;              /* because tcp has the higher rate */
    /* the peer's end */
    bool failed;                         /* the network failed for it */
    spccl_status failed_status;          /* FORMAT: it sent what it must not; else PEER */
    char failure[SP_NET_TEXT_CAP + 120]; /* "": none */
    bool gone, over;                     /* no more can be sent to it; nothing more will arrive */
    bool rx_ended;                       /* the network delivers nothing more from it */
    bool has_fin;
    sp_segments_fin fin;
    int64_t
        ended_ns; /* since when this rank knows that it is gone, or that the network failed; 0: it does not */
    uint64_t n_arrived; /* segments, at the last look */
    char gone_text[SP_NET_TEXT_CAP + 160];
} sp_segments_peer;

typedef struct sp_segments_net sp_segments_net;

typedef struct sp_segments {
    const sp_segments_net *net;
    sp_endpoint_config config;
    sp_endpoint *tcp; /* of the control links, borrowed; NULL: the network is not usable on this host */
    int epoll_fd;     /* the network adds its descriptors */
    sp_segments_peer *peers; /* [world_size] */
    pid_t pid;               /* of the process that opened it: a child of fork calls no library */
    bool prepared, up;       /* start-up */
    bool changed;            /* there is a change that arm has not reported yet */
    bool ending;             /* some peer ends */
} sp_segments;

/* What a network does. Each function gets the endpoint whose first member is the sp_segments. */
struct sp_segments_net {
    const char *name, *what; /* of the transport; in texts: "ib", "the plugin" */
    /* Write the address. Returns its bytes. */
    size_t (*write_address)(const sp_segments *s, uint8_t *out);
    /* Does the network reach a peer with this address? `why` says how, or why not. */
    bool (*reach)(const sp_segments *s, const uint8_t *address, size_t bytes, char *why, size_t why_cap);
    /* Use the network for a peer that it reaches. NULL: nothing to do. */
    void (*add_peer)(sp_segments *s, int peer, const uint8_t *address, size_t bytes);
    bool credits; /* `send` also sends what the peer may send: it is called in each progress */
    /* Before the first start_step: open or load what is needed for the added peers. Errors: SYSTEM. */
    spccl_status (*prepare)(sp_segments *s);
    /* Continue connecting, with notes over the control links. At the end a peer's `none` says that the network does not
     * carry it. Errors: AGAIN; else the group's. */
    spccl_status (*start_step)(sp_segments *s);
    /* That the network failed at start-up needs no warning. NULL: it does. */
    bool (*is_expected)(const sp_segments *s);
    void (*describe)(sp_segments *s, int peer, char *out, size_t cap);
    int64_t (*mbps)(const sp_segments *s, int peer); /* 0: unknown */
    /* The caller has allowed segments of a peer's send rings. */
    void (*send)(sp_segments *s, int peer);
    /* It has released a message; few: the network had few places left in the receive ring. */
    void (*released)(sp_segments *s, int peer, bool few);
    /* Take what has happened: segments sent and received, failures. */
    void (*poll)(sp_segments *s);
    /* Before a sleep. False: something changed. */
    bool (*arm)(sp_segments *s);
    /* After a sleep, or after an arm that led to none. */
    void (*disarm)(sp_segments *s, bool slept);
    /* Segments of a send ring that were sent, for the FIN. */
    uint64_t (*n_sent)(const sp_segments *s, int peer, int queue);
    /* Close all but what segments.c has opened. False: code of others hangs and may still use the rings and the endpoint. */
    bool (*close)(sp_segments *s);
};

static inline sp_segments *sp_segments_self(sp_endpoint *ep)
{
    return (sp_segments *)ep;
}

/* ---- segments.c: functions of sp_transport ---- */

/* Set the members of a zeroed endpoint. On failure call sp_segments_close. Errors: NOMEM. */
spccl_status sp_segments_open(sp_segments *s, const sp_segments_net *net, const sp_endpoint_config *config);
/* The network is usable on this host: get the endpoint of the control links. Errors: those of tcp; SYSTEM. */
spccl_status sp_segments_open_control(sp_segments *s);
/* Let the epoll set watch a descriptor of the network. */
spccl_status sp_segments_watch(const sp_segments *s, int fd);
size_t sp_segments_message_max(sp_endpoint *ep);

/* All of sp_transport but name, inform, device, open and rates. */
#define SP_SEGMENTS_FUNCTIONS                                                                                \
    .is_rdma = true, .has_control = sp_segments_has_control, .failed = sp_segments_failed,                   \
    .ns_per_byte = sp_segments_ns_per_byte, .describe = sp_segments_describe,                                \
    .address = sp_segments_address, .can_reach = sp_segments_can_reach, .add_peer = sp_segments_add_peer,    \
    .connect_step = sp_segments_connect_step, .message_max = sp_segments_message_max,                        \
    .reserve = sp_segments_reserve, .commit = sp_segments_commit, .peek = sp_segments_peek,                  \
    .release = sp_segments_release, .flushed = sp_segments_flushed, .progress = sp_segments_progress,        \
    .wait_fd = sp_segments_wait_fd, .arm = sp_segments_arm, .disarm = sp_segments_disarm,                    \
    .memory_bytes = sp_segments_memory_bytes, .leave = sp_segments_leave, .close = sp_segments_close
bool sp_segments_has_control(sp_endpoint *ep);
spccl_status sp_segments_address(sp_endpoint *ep, uint8_t *out, size_t *bytes);
bool sp_segments_can_reach(sp_endpoint *ep, const uint8_t *address, size_t bytes, char *why, size_t why_cap);
spccl_status sp_segments_add_peer(sp_endpoint *ep, int peer, const uint8_t *address, size_t bytes);
double sp_segments_ns_per_byte(sp_endpoint *ep, int peer);
void sp_segments_describe(sp_endpoint *ep, int peer, char *out, size_t cap);
spccl_status sp_segments_reserve(sp_endpoint *ep, int peer, int queue, size_t bytes, void **out);
spccl_status sp_segments_commit(sp_endpoint *ep, int peer, int queue, uint32_t call);
spccl_status sp_segments_peek(sp_endpoint *ep, int peer, int queue, const void **out, size_t *bytes);
spccl_status sp_segments_release(sp_endpoint *ep, int peer, int queue);
bool sp_segments_flushed(sp_endpoint *ep, int peer, int queue, uint64_t n);
spccl_status sp_segments_progress(sp_endpoint *ep, int *peer, char *text);
int sp_segments_wait_fd(sp_endpoint *ep);
spccl_status sp_segments_arm(sp_endpoint *ep);
void sp_segments_disarm(sp_endpoint *ep);
size_t sp_segments_memory_bytes(sp_endpoint *ep);
void sp_segments_leave(sp_endpoint *ep);
void sp_segments_close(sp_endpoint *ep);

/* ---- segments_start.c ---- */

/* As in transport.h. */
spccl_status sp_segments_connect_step(sp_endpoint *ep);
bool sp_segments_failed(sp_endpoint *ep, int peer, sp_pair_failure *out);
/* The network does not carry this peer, or not all that it could. The first reason stays. */
void sp_segments_note_reason(sp_segments_peer *p, const char *why);
/* Open the rings of a peer's queues. Errors: NOMEM. */
spccl_status sp_segments_open_rings(sp_segments *s, int peer);
/* Send a note over the control link. Errors: PEER. */
spccl_status sp_segments_say(sp_segments *s, int peer, const uint8_t *note, size_t bytes);
/* Get the next note of a peer; it stays until sp_segments_heard. AGAIN: none is here. Errors: PEER. */
spccl_status sp_segments_hear(sp_segments *s, int peer, const void **note, size_t *bytes);
spccl_status sp_segments_heard(sp_segments *s, int peer);
/* When a stage of start-up ends: half of the time that is left, so that notes come in time, but at most 60 s from now. */
int64_t sp_segments_stage_deadline(const sp_segments *s);
/* A note is not what it should be: "connect info". Returns FORMAT. */
spccl_status sp_segments_bad_note(const sp_segments *s, int peer, size_t bytes, const char *what);
/* Copy a text that ends within `cap` bytes. Bytes that are not printable ASCII become '?': the text goes to logs. False: it
 * does not end. */
bool sp_segments_read_text(const uint8_t *from, char *out, size_t cap);
void sp_segments_write_text(const char *text, uint8_t *out, size_t cap);

/* ---- segments_end.c ---- */

/* After start-up: the network failed for the peer because of `failure` and `failed_status`. */
void sp_segments_fail(sp_segments *s, int peer);
/* The network failed for good: the peer is over. text: a clause. */
void sp_segments_lose(sp_segments *s, int peer, const char *text);
/* failure and failed_status were set after the peer was gone: what the peer sent says more than that it left. */
void sp_segments_renew_text(sp_segments_peer *p);
/* The error of a peer that has failed, or is gone: FORMAT if it sent what it must not, else PEER. */
spccl_status sp_segments_lost(const sp_segments *s, int peer);
/* Read what the peer says over the control link after start-up: its FIN, then its end. */
void sp_segments_hear_end(sp_segments *s, int peer);
/* Decide whether the peer is gone, and whether more can arrive from it. */
void sp_segments_decide_end(sp_segments *s, int peer);

#endif
