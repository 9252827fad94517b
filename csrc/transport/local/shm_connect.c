/* shm_connect.c - start-up of transport shm: find out who can be reached, make the memory, pass it. See
 * shm.c.
 *
 * After the handshake on the local socket each end sends one message with two descriptors: the memfd of its
 * outgoing block, and its wake_fd. The bytes (little-endian):
 *   0 u32 "SPSH"  4 u32 zero  8 u64 bytes of the block */
#include "transport/local/shm.h"

#include "core/base/bits.h"
#include "core/base/clock.h"
#include "core/base/mem.h"
#include "core/base/status.h"
#include "transport/common/transports.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/stat.h>

#define ID_BYTES SP_HS_ID_BYTES
#define ADDRESS_BYTES (4u + ID_BYTES + SP_HOST_ID_BYTES + 4u)
#define MESSAGE_MAGIC 0x48535053u /* "SPSH" */
#define MESSAGE_BYTES 16u
static const char address_magic[4] = {'s', 'p', 'S', '1'};

/* ---- who can be reached: ranks of the same kernel, the same user, and the same network namespace, to which
 * abstract sockets belong ---- */

spccl_status sp_shm_address(sp_endpoint *opaque, uint8_t *out, size_t *bytes)
{
    memcpy(out, address_magic, 4);
    memcpy(out + 4, sp_shm_self(opaque)->listener.id, ID_BYTES);
    memcpy(out + 4 + ID_BYTES, sp_shm_self(opaque)->config.host, SP_HOST_ID_BYTES);
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
        no = "this endpoint has no address";
    else if (memcmp(mine + at, address + at, SP_HOST_ID_BYTES) != 0)
        no = "other host, or another network namespace of this one";
    else if (memcmp(mine + at + SP_HOST_ID_BYTES, address + at + SP_HOST_ID_BYTES, 4) != 0)
        no = "same host, other user";
    snprintf(why, why_cap, "%s", no != NULL ? no : "same host");
    return no == NULL;
}

/* ---- listening ---- */

spccl_status sp_shm_listen(struct sp_shm *ep)
{
    const sp_endpoint_config *c = &ep->config;
    sp_local_config lc = {.transport = "shm",
                          .what = "queues",
                          .kind = SP_HS_SHM,
                          .rank = c->rank,
                          .world_size = c->world_size,
                          .secret = c->secret,
                          .group_tag = c->group_tag,
                          .n_queues = (uint32_t)c->n_queues,
                          .queue_bytes = c->queue_bytes};
    return sp_local_listen(&ep->listener, &lc);
}

spccl_status sp_shm_watch(struct sp_shm *ep, int fd)
{
    struct epoll_event e = {.events = EPOLLIN, .data = {.fd = fd}};
    if (epoll_ctl(ep->base.wait_fd, EPOLL_CTL_ADD, fd, &e) != 0)
        return SP_FAIL_ERRNO(SPCCL_ERR_SYSTEM, "rank %d: shm: epoll_ctl", ep->config.rank);
    return SPCCL_OK;
}

/* Make the memory of this rank's queues to one peer. It is sealed, so that the peer can rely on its size. */
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
        ep->listener.peers[peer].state != SP_LOCAL_ABSENT || bytes != ADDRESS_BYTES)
        return SP_FAIL(SPCCL_ERR_BUG, "rank %d: shm: add_peer(%d, %zu bytes)", ep->config.rank, peer, bytes);
    p = &ep->peers[peer];
    memcpy(p->id, address + 4, ID_BYTES);
    SP_TRY(make_block(ep, p, peer));
    ep->listener.peers[peer].state = peer > ep->config.rank ? SP_LOCAL_CONNECT : SP_LOCAL_EXPECTED;
    return SPCCL_OK;
}

/* ---- connecting ---- */

/* Check the peer's block and map it. */
static spccl_status map_block(const struct sp_shm *ep, struct sp_shm_peer *p, sp_local_peer *from)
{
    size_t bytes = sp_shm_block_bytes(ep);
    struct stat s;
    int fd = from->received.n_fds == 2 ? from->received.fds[0] : -1;
    int seals = fcntl(fd, F_GET_SEALS);
    if (fd < 0 || sp_load_le32(from->message) != MESSAGE_MAGIC || sp_load_le64(from->message + 8) != bytes ||
        fstat(fd, &s) != 0 || s.st_size != (off_t)bytes || seals < 0 || (seals & F_SEAL_SHRINK) == 0)
        return SP_FAIL(SPCCL_ERR_PEER, "it passed something that is not its queues");
    p->in = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (p->in == MAP_FAILED) {
        p->in = NULL;
        return SP_FAIL_ERRNO(SPCCL_ERR_NOMEM, "mapping %zu bytes of its queues", bytes);
    }
    p->wake_fd = from->received.fds[1];
    from->received.n_fds = 1; /* wake_fd is taken over; the memory stays mapped without its descriptor */
    sp_local_message_close(&from->received);
    return SPCCL_OK;
}

static spccl_status connect_peer(void *ctx, int rank)
{
    struct sp_shm *ep = ctx;
    struct sp_shm_peer *p = &ep->peers[rank];
    sp_local_peer *from = &ep->listener.peers[rank];
    uint8_t message[MESSAGE_BYTES] = {0};
    sp_local_outgoing out = {
        .message = message, .bytes = sizeof message, .n_fds = 2, .fds = {p->out_fd, ep->base.wake_fd}};
    sp_store_le32(message, MESSAGE_MAGIC);
    sp_store_le64(message + 8, sp_shm_block_bytes(ep));
    if (from->state == SP_LOCAL_ABSENT || from->state == SP_LOCAL_DONE)
        return SPCCL_OK;
    SP_TRY(sp_local_exchange(&ep->listener, rank, p->id, &out, 2));
    sp_sock_close(&p->out_fd); /* the memory stays mapped, and the peer has a descriptor of its own */
    SP_TRY(map_block(ep, p, from));
    SP_TRY(sp_shm_watch(ep, from->sock));
    sp_ring_link_init(&ep->base.links[rank], ep->config.rank, rank, ep->config.n_queues,
                      ep->config.queue_bytes, p->out, p->in, p->wake_fd);
    return SPCCL_OK;
}

static spccl_status connect_all(struct sp_shm *ep)
{
    sp_rank_list missing = {0};
    const sp_acceptor_peers peers = {ep->config.world_size, ep, connect_peer, "connecting to", " over shm"};
    spccl_status st = sp_acceptor_step_peers(&ep->listener.acceptor, &peers, &missing);
    if (st == SPCCL_OK)
        sp_acceptor_close(&ep->listener.acceptor); /* all peers have connected */
    if (st == SPCCL_AGAIN && sp_deadline_passed(ep->config.deadline_ns))
        return SP_FAIL(SPCCL_ERR_TIMEOUT, "rank %d: no shm connection with rank %s before the deadline",
                       ep->config.rank, missing.text);
    return st;
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
