/* shm_connect.c - start-up of transport shm: who can be reached, the local socket, passing the memory. See
 * shm.c.
 *
 * Between two ranks the lower dials. After the handshake each end sends one message with two descriptors:
 *   0 u32 "SPSH"  4 u32 zero  8 u64 bytes of the block     + memfd of its outgoing block, its bell */
#include "transport/local/shm.h"

#include "core/base/bits.h"
#include "core/base/clock.h"
#include "core/base/mem.h"
#include "core/base/status.h"
#include "transport/common/auth.h"
#include "transport/common/host.h"
#include "transport/common/transports.h"

#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/un.h>

#define ID_BYTES SP_HS_ID_BYTES
#define ADDRESS_BYTES (4u + ID_BYTES + SP_HOST_ID_BYTES + 4u)
#define SWAP_MAGIC 0x48535053u /* "SPSH" */
#define SWAP_BYTES 16u
static const char address_magic[4] = {'s', 'p', 'S', '1'};

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

spccl_status sp_shm_address(sp_endpoint *opaque, uint8_t *out, size_t *bytes)
{
    memcpy(out, address_magic, 4);
    memcpy(out + 4, sp_shm_self(opaque)->id, ID_BYTES);
    SP_TRY(sp_host_identity(out + 4 + ID_BYTES));
    sp_store_le32(out + 4 + ID_BYTES + SP_HOST_ID_BYTES, (uint32_t)geteuid());
    *bytes = ADDRESS_BYTES;
    return SPCCL_OK;
}

bool sp_shm_can_reach(sp_endpoint *opaque, const uint8_t *address, size_t bytes, char *why, size_t why_cap)
{
    uint8_t mine[ADDRESS_BYTES];
    size_t at = 4 + ID_BYTES, n;
    const char *no = NULL;
    if (bytes != ADDRESS_BYTES || memcmp(address, address_magic, 4) != 0)
        no = "no shm address";
    else if (sp_shm_address(opaque, mine, &n) != SPCCL_OK)
        no = "this host's identity cannot be read";
    else if (memcmp(mine + at, address + at, SP_HOST_ID_BYTES) != 0)
        no = "other host, or another network namespace of this one";
    else if (memcmp(mine + at + SP_HOST_ID_BYTES, address + at + SP_HOST_ID_BYTES, 4) != 0)
        no = "same host, other user";
    snprintf(why, why_cap, "%s", no != NULL ? no : "same host");
    return no == NULL;
}

/* ---- listening ---- */

/* The acceptor's view of a proven dialler: is it a lower rank of this group that we expect? */
static spccl_status check_hello(void *ctx, const sp_hs_hello *h)
{
    struct sp_shm *ep = ctx;
    const sp_endpoint_config *c = &ep->config;
    if (h->kind != SP_HS_SHM || h->group_tag != c->group_tag || h->to != c->rank ||
        memcmp(h->to_id, ep->id, ID_BYTES) != 0)
        return SP_FAIL(SPCCL_ERR_PEER, "rank %d is not whom this connection is for", c->rank);
    if (h->world_size != c->world_size || (int)h->n_queues != c->n_queues || h->queue_bytes != c->queue_bytes)
        return SP_FAIL(
            SPCCL_ERR_MISMATCH,
            "rank %d has %d ranks, %u queues of %llu bytes, but rank %d has %d ranks, %d queues of %zu "
            "bytes: give every rank the same settings",
            h->from, h->world_size, h->n_queues, (unsigned long long)h->queue_bytes, c->rank, c->world_size,
            c->n_queues, c->queue_bytes);
    if (h->from < 0 || h->from >= c->rank || ep->peers[h->from].state != SP_SHM_EXPECTED)
        return SP_FAIL(SPCCL_ERR_PEER, "rank %d does not expect rank %d", c->rank, h->from);
    return SPCCL_OK;
}

static spccl_status take_connection(void *ctx, int fd, const sp_hs_hello *hello)
{
    struct sp_shm_peer *p = &((struct sp_shm *)ctx)->peers[hello->from];
    p->sock = fd;
    p->state = SP_SHM_SWAP;
    return SPCCL_OK;
}

spccl_status sp_shm_listen(struct sp_shm *ep)
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
        sp_shm_close_fd(&fd);
        return st;
    }
    return sp_acceptor_init(&ep->acceptor, fd, &ac);
}

spccl_status sp_shm_watch(struct sp_shm *ep, int fd)
{
    struct epoll_event e = {.events = EPOLLIN, .data = {.fd = fd}};
    if (epoll_ctl(ep->epoll_fd, EPOLL_CTL_ADD, fd, &e) != 0)
        return SP_FAIL_ERRNO(SPCCL_ERR_SYSTEM, "rank %d: shm: epoll_ctl", ep->config.rank);
    return SPCCL_OK;
}

/* The memory of this rank's queues to one peer: sealed, so that the peer can rely on its size. */
static spccl_status make_block(struct sp_shm *ep, struct sp_shm_peer *p, int rank)
{
    size_t bytes = sp_shm_block_bytes(ep);
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

spccl_status sp_shm_add_peer(sp_endpoint *opaque, int peer, const uint8_t *address, size_t bytes)
{
    struct sp_shm *ep = sp_shm_self(opaque);
    struct sp_shm_peer *p;
    if (peer < 0 || peer >= ep->config.world_size || peer == ep->config.rank ||
        ep->peers[peer].state != SP_SHM_ABSENT || bytes != ADDRESS_BYTES)
        return SP_FAIL(SPCCL_ERR_BUG, "rank %d: shm: add_peer(%d, %zu bytes)", ep->config.rank, peer, bytes);
    p = &ep->peers[peer];
    memcpy(p->id, address + 4, ID_BYTES);
    SP_TRY(make_block(ep, p, peer));
    p->state = peer > ep->config.rank ? SP_SHM_DIAL : SP_SHM_EXPECTED;
    return SPCCL_OK;
}

/* ---- connecting ---- */

static spccl_status dial(struct sp_shm *ep, struct sp_shm_peer *p, int rank)
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
    p->state = SP_SHM_CONNECT;
    return SPCCL_OK;
}

static spccl_status start_proof(struct sp_shm *ep, struct sp_shm_peer *p, int rank)
{
    const sp_endpoint_config *c = &ep->config;
    sp_hs_hello h = {.group_tag = c->group_tag,
                     .queue_bytes = c->queue_bytes,
                     .kind = SP_HS_SHM,
                     .from = c->rank,
                     .to = rank,
                     .world_size = c->world_size,
                     .n_queues = (uint32_t)c->n_queues};
    SP_TRY(sp_sock_connected(p->sock));
    memcpy(h.to_id, p->id, ID_BYTES);
    SP_TRY(sp_hs_dial(&p->hs, p->sock, &h, c->secret));
    p->state = SP_SHM_PROVE;
    return SPCCL_OK;
}

static spccl_status send_descriptors(struct sp_shm *ep, struct sp_shm_peer *p)
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
    sp_store_le64(head + 8, sp_shm_block_bytes(ep));
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(sizeof fds);
    memcpy(CMSG_DATA(c), fds, sizeof fds);
    if (sendmsg(p->sock, &m, MSG_DONTWAIT | MSG_NOSIGNAL) != (ssize_t)sizeof head)
        return errno == EAGAIN ? SPCCL_AGAIN : SP_FAIL_ERRNO(SPCCL_ERR_PEER, "passing shared memory");
    p->sent = true;
    sp_shm_close_fd(&p->out_fd); /* mapped here, and now the peer's too */
    return SPCCL_OK;
}

/* Map the peer's block if it is what it must be; takes over both descriptors. */
static spccl_status map_block(const struct sp_shm *ep, struct sp_shm_peer *p, const uint8_t *head, int fds[2])
{
    struct stat s;
    int seals = fcntl(fds[0], F_GET_SEALS);
    p->bell = fds[1];
    if (sp_load_le32(head) != SWAP_MAGIC || sp_load_le64(head + 8) != sp_shm_block_bytes(ep) ||
        fstat(fds[0], &s) != 0 || s.st_size != (off_t)sp_shm_block_bytes(ep) || seals < 0 ||
        (seals & F_SEAL_SHRINK) == 0) {
        sp_shm_close_fd(&fds[0]);
        return SP_FAIL(SPCCL_ERR_PEER, "it passed something that is not its queues");
    }
    p->in = mmap(NULL, sp_shm_block_bytes(ep), PROT_READ | PROT_WRITE, MAP_SHARED, fds[0], 0);
    sp_shm_close_fd(&fds[0]);
    if (p->in == MAP_FAILED) {
        p->in = NULL;
        return SP_FAIL_ERRNO(SPCCL_ERR_NOMEM, "mapping %zu bytes of its queues", sp_shm_block_bytes(ep));
    }
    return SPCCL_OK;
}

static spccl_status receive_descriptors(const struct sp_shm *ep, struct sp_shm_peer *p)
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
        sp_shm_close_fd(&fds[0]);
        sp_shm_close_fd(&fds[1]);
        return SP_FAIL(SPCCL_ERR_PEER,
                       n == 0 ? "the connection was closed" : "it passed something that is not its queues");
    }
    return map_block(ep, p, head, fds);
}

static spccl_status swap(struct sp_shm *ep, struct sp_shm_peer *p, int rank)
{
    if (!p->sent)
        SP_TRY(send_descriptors(ep, p));
    SP_TRY(receive_descriptors(ep, p));
    SP_TRY(sp_shm_watch(ep, p->sock));
    sp_ring_link_init(&p->link, ep->config.rank, rank, ep->config.n_queues, ep->config.queue_bytes, p->out,
                      p->in, p->bell);
    p->state = SP_SHM_UP;
    return SPCCL_OK;
}

static spccl_status connect_peer(struct sp_shm *ep, struct sp_shm_peer *p, int rank)
{
    if (p->state == SP_SHM_DIAL)
        SP_TRY(dial(ep, p, rank));
    if (p->state == SP_SHM_CONNECT)
        SP_TRY(start_proof(ep, p, rank));
    if (p->state == SP_SHM_PROVE) {
        SP_TRY(sp_hs_step(&p->hs));
        p->state = SP_SHM_SWAP;
    }
    if (p->state == SP_SHM_SWAP)
        SP_TRY(swap(ep, p, rank));
    return p->state == SP_SHM_EXPECTED ? SPCCL_AGAIN : SPCCL_OK;
}

static spccl_status connect_all(struct sp_shm *ep)
{
    sp_rank_list missing = {0};
    if (ep->acceptor.listen_fd >= 0)
        SP_TRY(sp_acceptor_step(&ep->acceptor));
    for (int i = 0; i < ep->config.world_size; i++) {
        struct sp_shm_peer *p = &ep->peers[i];
        char cause[300];
        spccl_status st;
        if (p->state == SP_SHM_ABSENT || p->state >= SP_SHM_UP)
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

spccl_status sp_shm_connect_step(sp_endpoint *opaque)
{
    struct sp_shm *ep = sp_shm_self(opaque);
    spccl_status st;
    pthread_mutex_lock(&ep->guard.lock);
    st = connect_all(ep);
    pthread_mutex_unlock(&ep->guard.lock);
    return st;
}
