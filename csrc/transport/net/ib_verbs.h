/* ib_verbs.h - what transport ib asks of libibverbs: cards, registered memory, one RC queue pair per peer.
 * ib_cards.c and ib_verbs.c are the only files that see <infiniband/verbs.h>. ib_none.c takes their place in a build
 * without that header. The library itself is opened at run time (ib_library.h). */
#ifndef SP_IB_VERBS_H
#define SP_IB_VERBS_H

#include "core/base/status.h"

#include <stddef.h>
#include <stdint.h>

#define SP_IB_GID_BYTES 16u
#define SP_IB_NAME_CAP 64u
#define SP_IB_CARDS_MAX 32

/* A port that is active and can make an RC queue pair. */
typedef struct sp_ib_card {
    char name[SP_IB_NAME_CAP]; /* "mlx5_0" */
    uint8_t port, gid_index;
    bool ethernet; /* RoCE v2; else InfiniBand */
    uint16_t lid;  /* InfiniBand */
    uint8_t gid[SP_IB_GID_BYTES];
    uint32_t mtu_bytes;
    int speed_mbps; /* 0: unknown */
} sp_ib_card;

/* Choose the card of a rank: SPCCL_IB_CARD, else one of the fastest, by rank. False: none is usable. `why` says in both
 * cases what was looked at. */
bool sp_ib_choose(int rank, sp_ib_card *out, char *why, size_t why_cap);
/* "card mlx5_0 port 1" */
void sp_ib_card_text(const sp_ib_card *card, char *out, size_t cap);
/* "RoCE v2, 100 Gbit/s, MTU 4096, GID 10.0.0.1" */
void sp_ib_card_details(const sp_ib_card *card, char *out, size_t cap);
/* As sp_transport.inform. */
void sp_ib_inform(const char **value, const char **why);

/* ---- an open card: a protection domain and one completion queue ---- */

typedef struct sp_ib_device sp_ib_device;
/* n_completions: most that can be in the queue at once. Errors: SYSTEM, UNREACHABLE. */
spccl_status sp_ib_device_open(const sp_ib_card *card, int n_completions, sp_ib_device **out);
/* Accepts NULL. All links and memory of the device are closed before. */
void sp_ib_device_close(sp_ib_device *d);
/* Close the descriptors and free nothing: for a child of fork (forks.h). */
void sp_ib_device_close_descriptors(sp_ib_device *d);
/* Descriptors for epoll: completions, and events of the card. */
int sp_ib_device_fd(const sp_ib_device *d);
int sp_ib_device_event_fd(const sp_ib_device *d);
/* Log the events of the card: a port that goes down, a queue pair that failed. */
void sp_ib_device_log_events(sp_ib_device *d, int rank);
/* Ask for the next completion to make the descriptor readable, and forget earlier ones. Completions that came before
 * this call do not count: poll after it. Errors: SYSTEM. */
spccl_status sp_ib_device_notify(sp_ib_device *d);
/* Make the descriptor unreadable. */
void sp_ib_device_forget(sp_ib_device *d);

typedef struct sp_ib_completion {
    uint64_t id;
    const char *error; /* NULL: success; else the library's text */
    bool immediate;    /* a write with immediate arrived: the next two are valid */
    uint32_t imm, bytes;
} sp_ib_completion;
/* Number of completions, 0 .. cap; -1: the completion queue failed. */
int sp_ib_device_poll(sp_ib_device *d, sp_ib_completion *out, int cap);

/* ---- memory ---- */

typedef struct sp_ib_memory {
    void *mr; /* NULL: not registered */
    uint32_t lkey, rkey;
} sp_ib_memory;
/* Register memory that peers may write to. Errors: SYSTEM. */
spccl_status sp_ib_memory_open(sp_ib_device *d, void *data, size_t bytes, sp_ib_memory *out);
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
spccl_status sp_ib_link_open(sp_ib_device *d, int n_writes, int n_receives, sp_ib_link **out,
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
    uint64_t to, id;
    bool signal; /* its success makes a completion too */
} sp_ib_write;
/* Errors: SYSTEM. */
spccl_status sp_ib_link_write(sp_ib_link *l, const sp_ib_write *w);

#endif
