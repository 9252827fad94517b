/* shm.c - transport "shm": ranks that are processes of one host. Queues lie in anonymous shared memory
 * (memfd), bells are eventfds; both are passed over a local socket (SCM_RIGHTS), which then stays open: its
 * end is the sign that the peer is gone, and aborts travel over it. Nothing has a name in the file system, so
 * nothing is left behind, whatever way a process ends.
 *
 * Between two ranks the lower dials. After the handshake each end sends one message with two descriptors:
 *   0 u32 "SPSH"  4 u32 zero  8 u64 bytes of the block     + memfd of its outgoing block, its bell
 * From then on the socket carries nothing but aborts: u32 "SPAB", text[SP_ABORT_TEXT_CAP]. */
#include "transports.h"

#include "acceptor.h"
#include "auth.h"
#include "bits.h"
#include "clock.h"
#include "log.h"
#include "mem.h"
#include "ringlink.h"
#include "status.h"

#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#define ID_BYTES SP_HS_ID_BYTES
#define BOOT_ID_BYTES 36u
#define ADDRESS_BYTES (4u + ID_BYTES + BOOT_ID_BYTES + 8u + 4u)
#define SWAP_MAGIC 0x48535053u  /* "SPSH" */
#define ABORT_MAGIC 0x42415053u /* "SPAB" */
#define SWAP_BYTES 16u
#define ABORT_BYTES (4u + SP_ABORT_TEXT_CAP)
#define LOOK_NS 2000000 /* sockets are looked at this often while the ranks are busy, and after every sleep  \
                         */
static const char address_magic[4] = {'s', 'p', 'S', '1'};

enum peer_state {
    PEER_ABSENT,   /* not added */
    PEER_DIAL,     /* to be dialled */
    PEER_CONNECT,  /* connect() under way */
    PEER_PROVE,    /* handshake under way */
    PEER_EXPECTED, /* it dials */
    PEER_SWAP,     /* proven; descriptors travel */
    PEER_UP,
    PEER_GONE
};

struct peer {
    enum peer_state state;
    uint8_t id[ID_BYTES];
    int sock, out_fd, bell; /* bell: the peer's; -1: none */
    bool sent;
    void *out, *in;
    size_t abort_done;
    uint8_t abort_bytes[ABORT_BYTES];
    sp_hs hs;
    sp_ring_link link;
};

struct shm_endpoint {
    sp_endpoint_config config;
    uint8_t id[ID_BYTES];
    int bell, epoll_fd;
    sp_acceptor acceptor;
    struct peer *peers; /* [world_size] */
    int64_t looked_ns;
    bool look_now;
    int abort_rank; /* -1: none */
    char abort_text[SP_ABORT_TEXT_CAP];
    pid_t pid;
};

static struct shm_endpoint *self(sp_endpoint *ep)
{
    return (struct shm_endpoint *)ep;
}

static size_t block_bytes(const struct shm_endpoint *ep)
{
    return sp_ring_block_bytes(ep->config.n_lanes, ep->config.lane_bytes);
}

/* ---- who can be reached: the same kernel, the same network namespace (abstract sockets live there), the
 * same user ---- */

static void local_socket_name(const uint8_t id[ID_BYTES], sp_sock_address *out)
{
    struct sockaddr_un un = {.sun_family = AF_UNIX};
    size_t n = 1; /* a leading zero byte: an abstract name */
    n += (size_t)snprintf(un.sun_path + 1, sizeof un.sun_path - 1, "spccl-");
    for (size_t i = 0; i < ID_BYTES; i++)
        n += (size_t)snprintf(un.sun_path + n, sizeof un.sun_path - n, "%02x", id[i]);
    memset(out, 0, sizeof *out);
    memcpy(&out->storage, &un, sizeof un);
    out->bytes = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + n);
}

static spccl_status host_identity(uint8_t boot_id[BOOT_ID_BYTES], uint64_t *netns)
{
    struct stat s;
    int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    ssize_t n = fd >= 0 ? read(fd, boot_id, BOOT_ID_BYTES) : -1;
    if (fd >= 0)
        close(fd);
    if (n != (ssize_t)BOOT_ID_BYTES)
        return SP_FAIL(SPCCL_ERR_SYSTEM, "shm: cannot read /proc/sys/kernel/random/boot_id");
    if (stat("/proc/self/ns/net", &s) != 0)
        return SP_FAIL_ERRNO(SPCCL_ERR_SYSTEM, "shm: /proc/self/ns/net");
    *netns = (uint64_t)s.st_ino;
    return SPCCL_OK;
}

static spccl_status shm_address(sp_endpoint *opaque, uint8_t *out, size_t *bytes)
{
    uint64_t netns = 0;
    memcpy(out, address_magic, 4);
    memcpy(out + 4, self(opaque)->id, ID_BYTES);
    SP_TRY(host_identity(out + 4 + ID_BYTES, &netns));
    sp_store_le64(out + 4 + ID_BYTES + BOOT_ID_BYTES, netns);
    sp_store_le32(out + 4 + ID_BYTES + BOOT_ID_BYTES + 8, (uint32_t)geteuid());
    *bytes = ADDRESS_BYTES;
    return SPCCL_OK;
}

static bool shm_can_reach(sp_endpoint *opaque, const uint8_t *address, size_t bytes, char *why,
                          size_t why_cap)
{
    uint8_t mine[ADDRESS_BYTES];
    size_t at = 4 + ID_BYTES, n;
    const char *no = NULL;
    if (bytes != ADDRESS_BYTES || memcmp(address, address_magic, 4) != 0)
        no = "no shm address";
    else if (shm_address(opaque, mine, &n) != SPCCL_OK)
        no = "this host's identity cannot be read";
    else if (memcmp(mine + at, address + at, BOOT_ID_BYTES) != 0)
        no = "other host";
    else if (memcmp(mine + at + BOOT_ID_BYTES, address + at + BOOT_ID_BYTES, 8) != 0)
        no = "same host, other network namespace";
    else if (memcmp(mine + at + BOOT_ID_BYTES + 8, address + at + BOOT_ID_BYTES + 8, 4) != 0)
        no = "same host, other user";
    snprintf(why, why_cap, "%s", no != NULL ? no : "same host");
    return no == NULL;
}

/* ---- opening and closing ---- */

static void close_fd(int *fd)
{
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
}

static void shm_close(sp_endpoint *opaque)
{
    struct shm_endpoint *ep = self(opaque);
    if (ep == NULL)
        return;
    for (int i = 0; ep->peers != NULL && i < ep->config.world_size; i++) {
        struct peer *p = &ep->peers[i];
        if (p->state == PEER_UP && ep->pid == getpid())
            sp_ring_tell_news(&p->link); /* a busy peer looks at the socket at once */
        close_fd(&p->sock);
        close_fd(&p->out_fd);
        close_fd(&p->bell);
        if (p->out != NULL)
            munmap(p->out, block_bytes(ep));
        if (p->in != NULL)
            munmap(p->in, block_bytes(ep));
    }
    sp_acceptor_close(&ep->acceptor);
    close_fd(&ep->bell);
    close_fd(&ep->epoll_fd);
    explicit_bzero(ep->config.secret, sizeof ep->config.secret);
    sp_free(ep->peers);
    sp_free(ep);
}

/* The acceptor's view of a proven dialler: is it a lower rank of this group that we expect? */
static spccl_status check_hello(void *ctx, const sp_hs_hello *h)
{
    struct shm_endpoint *ep = ctx;
    const sp_endpoint_config *c = &ep->config;
    if (h->kind != SP_HS_SHM || h->group_tag != c->group_tag || h->to != c->rank ||
        memcmp(h->to_id, ep->id, ID_BYTES) != 0)
        return SP_FAIL(SPCCL_ERR_PEER, "rank %d is not whom this connection is for", c->rank);
    if (h->world_size != c->world_size || (int)h->n_lanes != c->n_lanes || h->lane_bytes != c->lane_bytes)
        return SP_FAIL(
            SPCCL_ERR_MISMATCH,
            "rank %d has %d ranks, %u lanes of %llu bytes, but rank %d has %d ranks, %d lanes of %zu "
            "bytes: give every rank the same settings",
            h->from, h->world_size, h->n_lanes, (unsigned long long)h->lane_bytes, c->rank, c->world_size,
            c->n_lanes, c->lane_bytes);
    if (h->from < 0 || h->from >= c->rank || ep->peers[h->from].state != PEER_EXPECTED)
        return SP_FAIL(SPCCL_ERR_PEER, "rank %d does not expect rank %d", c->rank, h->from);
    return SPCCL_OK;
}

static spccl_status take_connection(void *ctx, int fd, const sp_hs_hello *hello)
{
    struct peer *p = &((struct shm_endpoint *)ctx)->peers[hello->from];
    p->sock = fd;
    p->state = PEER_SWAP;
    return SPCCL_OK;
}

static spccl_status open_listener(struct shm_endpoint *ep)
{
    sp_acceptor_config ac = {.rank = ep->config.rank,
                             .secret = ep->config.secret,
                             .ctx = ep,
                             .check = check_hello,
                             .ready = take_connection};
    sp_sock_address name;
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    local_socket_name(ep->id, &name);
    if (fd < 0 || bind(fd, (const struct sockaddr *)&name.storage, name.bytes) != 0 || listen(fd, 128) != 0) {
        spccl_status st =
            SP_FAIL_ERRNO(SPCCL_ERR_SYSTEM, "rank %d: shm: listening on a local socket", ep->config.rank);
        close_fd(&fd);
        return st;
    }
    return sp_acceptor_init(&ep->acceptor, fd, &ac);
}

static spccl_status watch(struct shm_endpoint *ep, int fd)
{
    struct epoll_event e = {.events = EPOLLIN, .data = {.fd = fd}};
    if (epoll_ctl(ep->epoll_fd, EPOLL_CTL_ADD, fd, &e) != 0)
        return SP_FAIL_ERRNO(SPCCL_ERR_SYSTEM, "rank %d: shm: epoll_ctl", ep->config.rank);
    return SPCCL_OK;
}

static spccl_status shm_open_endpoint(const sp_endpoint_config *config, sp_endpoint **out)
{
    spccl_status st;
    struct shm_endpoint *ep = sp_calloc(1, sizeof *ep);
    if (ep == NULL)
        return SP_FAIL(SPCCL_ERR_NOMEM, "shm: an endpoint of %zu bytes", sizeof *ep);
    ep->config = *config;
    ep->pid = getpid();
    ep->bell = ep->epoll_fd = ep->acceptor.listen_fd = ep->abort_rank = -1;
    ep->peers = sp_calloc((size_t)config->world_size, sizeof *ep->peers);
    if (ep->peers == NULL) {
        st = SP_FAIL(SPCCL_ERR_NOMEM, "shm: tables for %d ranks", config->world_size);
        goto fail;
    }
    for (int i = 0; i < config->world_size; i++)
        ep->peers[i].sock = ep->peers[i].out_fd = ep->peers[i].bell = -1;
    SP_TRY_TO(fail, st, sp_random_bytes(ep->id, sizeof ep->id));
    SP_TRY_TO(fail, st, sp_bell_open(&ep->bell));
    ep->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    if (ep->epoll_fd < 0) {
        st = SP_FAIL_ERRNO(SPCCL_ERR_SYSTEM, "rank %d: shm: epoll", config->rank);
        goto fail;
    }
    SP_TRY_TO(fail, st, watch(ep, ep->bell));
    SP_TRY_TO(fail, st, open_listener(ep));
    *out = (sp_endpoint *)ep;
    return SPCCL_OK;
fail:
    shm_close((sp_endpoint *)ep);
    return st;
}

/* The memory of this rank's queues to one peer: sealed, so that the peer can rely on its size. */
static spccl_status make_block(struct shm_endpoint *ep, struct peer *p, int rank)
{
    size_t bytes = block_bytes(ep);
    p->out_fd = memfd_create("spccl", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (p->out_fd < 0 || ftruncate(p->out_fd, (off_t)bytes) != 0 ||
        fcntl(p->out_fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)
        return SP_FAIL_ERRNO(SPCCL_ERR_NOMEM, "rank %d: shm: %zu bytes of queues for rank %d",
                             ep->config.rank, bytes, rank);
    p->out = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, p->out_fd, 0);
    if (p->out == MAP_FAILED) {
        p->out = NULL;
        return SP_FAIL_ERRNO(SPCCL_ERR_NOMEM, "rank %d: shm: mapping %zu bytes of queues for rank %d",
                             ep->config.rank, bytes, rank);
    }
    return SPCCL_OK;
}

static spccl_status shm_add_peer(sp_endpoint *opaque, int peer, const uint8_t *address, size_t bytes)
{
    struct shm_endpoint *ep = self(opaque);
    struct peer *p;
    if (peer < 0 || peer >= ep->config.world_size || peer == ep->config.rank ||
        ep->peers[peer].state != PEER_ABSENT || bytes != ADDRESS_BYTES)
        return SP_FAIL(SPCCL_ERR_BUG, "rank %d: shm: add_peer(%d, %zu bytes)", ep->config.rank, peer, bytes);
    p = &ep->peers[peer];
    memcpy(p->id, address + 4, ID_BYTES);
    SP_TRY(make_block(ep, p, peer));
    p->state = peer > ep->config.rank ? PEER_DIAL : PEER_EXPECTED;
    return SPCCL_OK;
}

/* ---- connecting ---- */

static spccl_status dial(struct shm_endpoint *ep, struct peer *p, int rank)
{
    sp_sock_address name;
    spccl_status st;
    local_socket_name(p->id, &name);
    st = sp_sock_dial(&name, &p->sock);
    if (st != SPCCL_OK && errno == EAGAIN)
        return SPCCL_AGAIN; /* its queue of connections is full */
    if (st != SPCCL_OK)
        return SP_FAIL(SPCCL_ERR_PEER, "rank %d: rank %d closed its endpoint before the group was up",
                       ep->config.rank, rank);
    p->state = PEER_CONNECT;
    return SPCCL_OK;
}

static spccl_status start_proof(struct shm_endpoint *ep, struct peer *p, int rank)
{
    const sp_endpoint_config *c = &ep->config;
    sp_hs_hello h = {.group_tag = c->group_tag,
                     .lane_bytes = c->lane_bytes,
                     .kind = SP_HS_SHM,
                     .from = c->rank,
                     .to = rank,
                     .world_size = c->world_size,
                     .n_lanes = (uint32_t)c->n_lanes};
    SP_TRY(sp_sock_connected(p->sock));
    memcpy(h.to_id, p->id, ID_BYTES);
    SP_TRY(sp_hs_dial(&p->hs, p->sock, &h, c->secret));
    p->state = PEER_PROVE;
    return SPCCL_OK;
}

static spccl_status send_descriptors(struct shm_endpoint *ep, struct peer *p)
{
    uint8_t head[SWAP_BYTES] = {0};
    int fds[2] = {p->out_fd, ep->bell};
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof fds)];
    } control = {.bytes = {0}};
    struct iovec iov = {.iov_base = head, .iov_len = sizeof head};
    struct msghdr m = {
        .msg_iov = &iov, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    struct cmsghdr *c = CMSG_FIRSTHDR(&m);
    sp_store_le32(head, SWAP_MAGIC);
    sp_store_le64(head + 8, block_bytes(ep));
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(sizeof fds);
    memcpy(CMSG_DATA(c), fds, sizeof fds);
    if (sendmsg(p->sock, &m, MSG_DONTWAIT | MSG_NOSIGNAL) != (ssize_t)sizeof head)
        return errno == EAGAIN ? SPCCL_AGAIN : SP_FAIL_ERRNO(SPCCL_ERR_PEER, "passing shared memory");
    p->sent = true;
    close_fd(&p->out_fd); /* mapped here, and now the peer's too */
    return SPCCL_OK;
}

/* Map the peer's block if it is what it must be; takes over both descriptors. */
static spccl_status map_block(const struct shm_endpoint *ep, struct peer *p, const uint8_t *head, int fds[2])
{
    struct stat s;
    int seals = fcntl(fds[0], F_GET_SEALS);
    p->bell = fds[1];
    if (sp_load_le32(head) != SWAP_MAGIC || sp_load_le64(head + 8) != block_bytes(ep) ||
        fstat(fds[0], &s) != 0 || s.st_size != (off_t)block_bytes(ep) || seals < 0 ||
        (seals & F_SEAL_SHRINK) == 0) {
        close_fd(&fds[0]);
        return SP_FAIL(SPCCL_ERR_PEER, "it passed something that is not its queues");
    }
    p->in = mmap(NULL, block_bytes(ep), PROT_READ | PROT_WRITE, MAP_SHARED, fds[0], 0);
    close_fd(&fds[0]);
    if (p->in == MAP_FAILED) {
        p->in = NULL;
        return SP_FAIL_ERRNO(SPCCL_ERR_NOMEM, "mapping %zu bytes of its queues", block_bytes(ep));
    }
    return SPCCL_OK;
}

static spccl_status receive_descriptors(const struct shm_endpoint *ep, struct peer *p)
{
    uint8_t head[SWAP_BYTES];
    int fds[2] = {-1, -1};
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof fds)];
    } control;
    struct iovec iov = {.iov_base = head, .iov_len = sizeof head};
    struct msghdr m = {
        .msg_iov = &iov, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    struct cmsghdr *c;
    ssize_t n = recvmsg(p->sock, &m, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (n < 0)
        return errno == EAGAIN || errno == EINTR ? SPCCL_AGAIN
                                                 : SP_FAIL_ERRNO(SPCCL_ERR_PEER, "the connection broke");
    c = CMSG_FIRSTHDR(&m);
    if (c != NULL && c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS &&
        c->cmsg_len == CMSG_LEN(sizeof fds))
        memcpy(fds, CMSG_DATA(c), sizeof fds);
    if (n != (ssize_t)sizeof head || fds[0] < 0 || (m.msg_flags & MSG_CTRUNC) != 0) {
        close_fd(&fds[0]);
        close_fd(&fds[1]);
        return SP_FAIL(SPCCL_ERR_PEER,
                       n == 0 ? "the connection was closed" : "it passed something that is not its queues");
    }
    return map_block(ep, p, head, fds);
}

static spccl_status swap(struct shm_endpoint *ep, struct peer *p, int rank)
{
    if (!p->sent)
        SP_TRY(send_descriptors(ep, p));
    SP_TRY(receive_descriptors(ep, p));
    SP_TRY(watch(ep, p->sock));
    sp_ring_link_init(&p->link, ep->config.rank, rank, ep->config.n_lanes, ep->config.lane_bytes, p->out,
                      p->in, p->bell);
    p->state = PEER_UP;
    return SPCCL_OK;
}

static spccl_status connect_peer(struct shm_endpoint *ep, struct peer *p, int rank)
{
    if (p->state == PEER_DIAL)
        SP_TRY(dial(ep, p, rank));
    if (p->state == PEER_CONNECT)
        SP_TRY(start_proof(ep, p, rank));
    if (p->state == PEER_PROVE) {
        SP_TRY(sp_hs_step(&p->hs));
        p->state = PEER_SWAP;
    }
    if (p->state == PEER_SWAP)
        SP_TRY(swap(ep, p, rank));
    return p->state == PEER_EXPECTED ? SPCCL_AGAIN : SPCCL_OK;
}

static spccl_status shm_connect_step(sp_endpoint *opaque)
{
    struct shm_endpoint *ep = self(opaque);
    sp_rank_list missing = {0};
    if (ep->acceptor.listen_fd >= 0)
        SP_TRY(sp_acceptor_step(&ep->acceptor));
    for (int i = 0; i < ep->config.world_size; i++) {
        struct peer *p = &ep->peers[i];
        char cause[300];
        spccl_status st;
        if (p->state == PEER_ABSENT || p->state >= PEER_UP)
            continue;
        st = connect_peer(ep, p, i);
        if (st == SPCCL_AGAIN)
            sp_rank_list_add(&missing, i);
        if (st == SPCCL_AGAIN || st == SPCCL_OK)
            continue;
        snprintf(cause, sizeof cause, "%s", spccl_last_error());
        return SP_FAIL(st, "rank %d: connecting to rank %d over shm: %s", ep->config.rank, i, cause);
    }
    if (missing.n == 0) {
        sp_acceptor_close(&ep->acceptor); /* everybody is here: no more callers */
        return SPCCL_OK;
    }
    if (sp_deadline_passed(ep->config.deadline_ns))
        return SP_FAIL(SPCCL_ERR_TIMEOUT, "rank %d: no shm connection with rank %s before the deadline",
                       ep->config.rank, missing.text);
    return SPCCL_AGAIN;
}

/* ---- moving messages ---- */

static size_t shm_message_max(sp_endpoint *opaque)
{
    return sp_spsc_message_max(self(opaque)->config.lane_bytes);
}
static spccl_status shm_reserve(sp_endpoint *opaque, int peer, int lane, size_t bytes, void **out)
{
    return sp_ring_reserve(&self(opaque)->peers[peer].link, lane, bytes, out);
}
static spccl_status shm_commit(sp_endpoint *opaque, int peer, int lane)
{
    return sp_ring_commit(&self(opaque)->peers[peer].link, lane);
}
static spccl_status shm_peek(sp_endpoint *opaque, int peer, int lane, const void **out, size_t *bytes)
{
    return sp_ring_peek(&self(opaque)->peers[peer].link, lane, out, bytes);
}
static spccl_status shm_release(sp_endpoint *opaque, int peer, int lane)
{
    return sp_ring_release(&self(opaque)->peers[peer].link, lane);
}
static bool shm_flushed(sp_endpoint *opaque, int peer)
{
    (void)opaque; /* committed is in the peer's hands */
    (void)peer;
    return true;
}

/* Read what came over the socket: an abort, or its end. */
static void look_at_socket(struct shm_endpoint *ep, int rank)
{
    struct peer *p = &ep->peers[rank];
    spccl_status st = sp_sock_read(p->sock, p->abort_bytes, ABORT_BYTES, &p->abort_done);
    if (st == SPCCL_AGAIN)
        return;
    if (st == SPCCL_OK && sp_load_le32(p->abort_bytes) == ABORT_MAGIC) {
        if (ep->abort_rank < 0) {
            ep->abort_rank = rank;
            memcpy(ep->abort_text, p->abort_bytes + 4, SP_ABORT_TEXT_CAP);
            ep->abort_text[SP_ABORT_TEXT_CAP - 1] = '\0';
        }
        p->abort_done = 0;
        return;
    }
    sp_ring_link_set_gone(&p->link, st == SPCCL_OK ? "sent noise over its local socket"
                                                   : "is gone: its process ended or left the group");
    p->state = PEER_GONE;
    close_fd(&p->sock); /* also takes it out of the epoll set */
}

static spccl_status shm_progress(sp_endpoint *opaque, int *peer, char *text)
{
    struct shm_endpoint *ep = self(opaque);
    int64_t now_ns = sp_now_ns();
    bool look = ep->look_now || now_ns - ep->looked_ns > LOOK_NS;
    for (int i = 0; i < ep->config.world_size; i++)
        if (ep->peers[i].state == PEER_UP && sp_ring_take_news(&ep->peers[i].link))
            look_at_socket(ep, i);
    if (look) {
        ep->look_now = false;
        ep->looked_ns = now_ns;
        for (int i = 0; i < ep->config.world_size; i++)
            if (ep->peers[i].state == PEER_UP)
                look_at_socket(ep, i);
    }
    if (ep->abort_rank < 0)
        return SPCCL_OK;
    *peer = ep->abort_rank;
    memcpy(text, ep->abort_text, SP_ABORT_TEXT_CAP);
    return SP_FAIL(SPCCL_ERR_ABORTED, "rank %d: rank %d gave up: %s", ep->config.rank, ep->abort_rank,
                   ep->abort_text);
}

static int shm_wait_fd(sp_endpoint *opaque)
{
    return self(opaque)->epoll_fd;
}

static void shm_disarm(sp_endpoint *opaque)
{
    struct shm_endpoint *ep = self(opaque);
    for (int i = 0; i < ep->config.world_size; i++)
        if (ep->peers[i].state >= PEER_UP)
            sp_ring_disarm(&ep->peers[i].link);
    sp_bell_drain(ep->bell);
}

static spccl_status shm_arm(sp_endpoint *opaque)
{
    struct shm_endpoint *ep = self(opaque);
    spccl_status st = SPCCL_OK;
    for (int i = 0; i < ep->config.world_size; i++)
        if (ep->peers[i].state >= PEER_UP && sp_ring_arm(&ep->peers[i].link) != SPCCL_OK)
            st = SPCCL_AGAIN;
    if (st != SPCCL_OK)
        shm_disarm(opaque);
    else
        ep->look_now = true; /* after the sleep */
    return st;
}

static void shm_abort_peers(sp_endpoint *opaque, const char *text)
{
    struct shm_endpoint *ep = self(opaque);
    uint8_t note[ABORT_BYTES] = {0};
    sp_store_le32(note, ABORT_MAGIC);
    snprintf((char *)note + 4, SP_ABORT_TEXT_CAP, "%s", text);
    for (int i = 0; i < ep->config.world_size; i++) {
        struct peer *p = &ep->peers[i];
        size_t done = 0;
        if (p->state != PEER_UP)
            continue;
        if (sp_sock_write(p->sock, note, sizeof note, &done) != SPCCL_OK)
            sp_log(SP_LOG_INFO, ep->config.rank, "rank %d could not be told of the abort", i);
        sp_ring_tell_news(&p->link);
    }
}

static size_t shm_memory_bytes(sp_endpoint *opaque)
{
    struct shm_endpoint *ep = self(opaque);
    size_t n = 0;
    for (int i = 0; i < ep->config.world_size; i++)
        n += ep->peers[i].out != NULL ? block_bytes(ep) : 0;
    return n;
}

const sp_transport sp_transport_shm = {
    .name = "shm",
    .open = shm_open_endpoint,
    .address = shm_address,
    .can_reach = shm_can_reach,
    .add_peer = shm_add_peer,
    .connect_step = shm_connect_step,
    .message_max = shm_message_max,
    .reserve = shm_reserve,
    .commit = shm_commit,
    .peek = shm_peek,
    .release = shm_release,
    .flushed = shm_flushed,
    .progress = shm_progress,
    .wait_fd = shm_wait_fd,
    .arm = shm_arm,
    .disarm = shm_disarm,
    .abort_peers = shm_abort_peers,
    .memory_bytes = shm_memory_bytes,
    .close = shm_close,
};
