/* shm.c - transport "shm": ranks that are processes of one host. Queues lie in anonymous shared memory
 * (memfd), and wake-ups go over eventfds. The ranks pass each other both over a local socket (SCM_RIGHTS,
 * shm_connect.c). The socket stays open as the control connection. Its end shows that the peer is gone, and
 * it carries aborts: u32 "SPAB", text[SP_ABORT_TEXT_CAP]. Nothing has a name in the file system, so nothing
 * is left behind, however a process ends. */
#include "transport/local/shm.h"

#include "core/base/bits.h"
#include "core/base/clock.h"
#include "core/base/log.h"
#include "core/base/mem.h"
#include "core/base/status.h"
#include "transport/common/transports.h"

#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>

#define ABORT_MAGIC 0x42415053u /* "SPAB" */
/* While the ranks are busy, all sockets are read this often. They are also read after every sleep. */
#define LOOK_NS 2000000

/* Connected, and not gone. */
static bool is_up(const struct sp_shm *ep, int peer)
{
    return ep->base.links[peer].up && !ep->base.links[peer].gone;
}

static void close_in_child(void *owner)
{
    sp_local_close_descriptors(&((struct sp_shm *)owner)->listener);
}

/* Show the peers that this rank leaves. shutdown ends a connection even if a child of fork holds a copy of
 * its descriptor. */
static void hang_up(struct sp_shm *ep)
{
    for (int i = 0; ep->listener.peers != NULL && i < ep->config.world_size; i++) {
        int sock = ep->listener.peers[i].sock;
        if (sock < 0)
            continue; /* in a child of fork this holds for all peers: close_in_child closed the sockets */
        (void)shutdown(sock, SHUT_RDWR);
        if (is_up(ep, i))
            sp_ring_signal(&ep->base.links[i]); /* a busy peer then reads the socket at once */
    }
}

static void shm_close(sp_endpoint *opaque)
{
    struct sp_shm *ep = sp_shm_self(opaque);
    if (ep == NULL)
        return;
    hang_up(ep);
    sp_fork_unwatch(&ep->guard);
    for (int i = 0; ep->peers != NULL && i < ep->config.world_size; i++) {
        struct sp_shm_peer *p = &ep->peers[i];
        sp_sock_close(&p->out_fd);
        sp_sock_close(&p->wake_fd);
        if (p->out != NULL)
            munmap(p->out, sp_shm_block_bytes(ep));
        if (p->in != NULL)
            munmap(p->in, sp_shm_block_bytes(ep));
    }
    sp_local_close(&ep->listener);
    sp_sock_close(&ep->base.wake_fd);
    sp_sock_close(&ep->base.wait_fd);
    explicit_bzero(ep->config.secret, sizeof ep->config.secret);
    sp_free(ep->peers);
    sp_free(ep->base.links);
    sp_free(ep);
}

static spccl_status shm_open_endpoint(const sp_endpoint_config *config, sp_endpoint **out)
{
    spccl_status st;
    struct sp_shm *ep = sp_calloc(1, sizeof *ep);
    if (ep == NULL)
        return SP_FAIL(SPCCL_ERR_NOMEM, "shm: an endpoint of %zu bytes", sizeof *ep);
    ep->config = *config;
    ep->base.wake_fd = ep->base.wait_fd = ep->listener.acceptor.listen_fd = ep->abort_rank = -1;
    ep->base.config = &ep->config;
    ep->peers = sp_calloc((size_t)config->world_size, sizeof *ep->peers);
    ep->base.links = sp_calloc((size_t)config->world_size, sizeof *ep->base.links);
    for (int i = 0; ep->peers != NULL && i < config->world_size; i++)
        ep->peers[i].out_fd = ep->peers[i].wake_fd = -1;
    if (ep->peers == NULL || ep->base.links == NULL) {
        st = SP_FAIL(SPCCL_ERR_NOMEM, "shm: tables for %d ranks", config->world_size);
        goto fail;
    }
    SP_TRY_TO(fail, st, sp_wake_open(&ep->base.wake_fd));
    ep->base.wait_fd = epoll_create1(EPOLL_CLOEXEC);
    if (ep->base.wait_fd < 0) {
        st = SP_FAIL_ERRNO(SPCCL_ERR_SYSTEM, "rank %d: shm: epoll", config->rank);
        goto fail;
    }
    SP_TRY_TO(fail, st, sp_shm_watch(ep, ep->base.wake_fd));
    SP_TRY_TO(fail, st, sp_shm_listen(ep));
    SP_TRY_TO(fail, st, sp_fork_watch(&ep->guard, close_in_child, ep));
    *out = (sp_endpoint *)ep;
    return SPCCL_OK;
fail:
    shm_close((sp_endpoint *)ep);
    return st;
}

/* ---- progress, sleeping ---- */

/* Read the control connection: an abort, or its end. */
static void look_at_socket(struct sp_shm *ep, int rank)
{
    struct sp_shm_peer *p = &ep->peers[rank];
    spccl_status st =
        sp_sock_read(ep->listener.peers[rank].sock, p->abort_bytes, SP_SHM_ABORT_BYTES, &p->abort_done);
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
    sp_ring_link_set_gone(&ep->base.links[rank],
                          st == SPCCL_OK ? "sent something other than an abort over its local socket"
                                         : "is gone: its process ended or left the group; see its output");
    pthread_mutex_lock(&ep->guard.lock);
    sp_sock_close(&ep->listener.peers[rank].sock); /* this also removes it from the epoll set */
    pthread_mutex_unlock(&ep->guard.lock);
}

static spccl_status shm_progress(sp_endpoint *opaque, int *peer, char *text)
{
    struct sp_shm *ep = sp_shm_self(opaque);
    int64_t now_ns = sp_now_ns();
    bool look = ep->look_now || now_ns - ep->looked_ns > LOOK_NS;
    for (int i = 0; i < ep->config.world_size; i++)
        if (is_up(ep, i) && sp_ring_take_signal(&ep->base.links[i]))
            look_at_socket(ep, i);
    if (look) {
        ep->look_now = false;
        ep->looked_ns = now_ns;
        for (int i = 0; i < ep->config.world_size; i++)
            if (is_up(ep, i))
                look_at_socket(ep, i);
    }
    if (ep->abort_rank < 0)
        return SPCCL_OK;
    *peer = ep->abort_rank;
    memcpy(text, ep->abort_text, SP_ABORT_TEXT_CAP);
    return SP_FAIL(SPCCL_ERR_ABORTED, "rank %d: rank %d gave up: %s", ep->config.rank, ep->abort_rank,
                   ep->abort_text);
}

static spccl_status shm_arm(sp_endpoint *opaque)
{
    spccl_status st = sp_ring_arm(opaque);
    if (st == SPCCL_OK)
        sp_shm_self(opaque)->look_now = true; /* for the progress after the sleep */
    return st;
}

static void shm_abort_peers(sp_endpoint *opaque, const char *text)
{
    struct sp_shm *ep = sp_shm_self(opaque);
    uint8_t note[SP_SHM_ABORT_BYTES] = {0};
    sp_store_le32(note, ABORT_MAGIC);
    snprintf((char *)note + 4, SP_ABORT_TEXT_CAP, "%s", text);
    for (int i = 0; i < ep->config.world_size; i++) {
        size_t done = 0;
        if (!is_up(ep, i))
            continue;
        if (sp_sock_write(ep->listener.peers[i].sock, note, sizeof note, &done) != SPCCL_OK)
            sp_log(SP_LOG_INFO, ep->config.rank, "the abort could not be sent to rank %d", i);
        sp_ring_signal(&ep->base.links[i]);
    }
}

static size_t shm_memory_bytes(sp_endpoint *opaque)
{
    struct sp_shm *ep = sp_shm_self(opaque);
    size_t n = 0;
    for (int i = 0; i < ep->config.world_size; i++)
        n += ep->peers[i].out != NULL ? sp_shm_block_bytes(ep) : 0;
    return n;
}

const sp_transport sp_transport_shm = {
    .name = "shm",
    .open = shm_open_endpoint,
    .address = sp_shm_address,
    .can_reach = sp_shm_can_reach,
    .add_peer = sp_shm_add_peer,
    .connect_step = sp_shm_connect_step,
    .progress = shm_progress,
    .arm = shm_arm,
    .abort_peers = shm_abort_peers,
    .memory_bytes = shm_memory_bytes,
    .close = shm_close,
    SP_RING_FUNCTIONS,
};
