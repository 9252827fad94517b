/* inproc.c - transport "inproc": ranks that are threads of one process. Queues lie in the process's memory,
 * and wake-ups go over eventfds. An address holds a random id, and a registry maps ids to endpoints.
 * The part of an endpoint that peers use (struct node) is freed when its last peer closes too. So what a rank
 * sent before it closed is still read. */
#include "transport/common/transports.h"

#include "core/base/clock.h"
#include "core/base/log.h"
#include "core/base/mem.h"
#include "core/base/process.h"
#include "core/base/status.h"
#include "transport/common/auth.h"
#include "transport/common/forks.h"
#include "transport/local/ringlink.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define ID_BYTES 16u
#define ADDRESS_BYTES (4u + 2 * ID_BYTES)
static const char address_magic[4] = {'s', 'p', 'I', '1'};

/* The part of an endpoint that its peers use. */
struct node {
    struct node *next; /* in the registry */
    atomic_int n_refs;
    uint8_t id[ID_BYTES];
    sp_endpoint_config config;
    int wake_fd;           /* this rank's */
    _Atomic(void *) *out;  /* [world_size] block of the queues to each peer; NULL until add_peer */
    atomic_bool *attached; /* [world_size] true: that peer holds a reference to this node */
    atomic_bool closed;
    pthread_mutex_t lock; /* guards abort_rank and abort_text, which are written once */
    atomic_bool aborted;
    int abort_rank;
    char abort_text[SP_ABORT_TEXT_CAP];
};

struct inproc_endpoint {
    sp_ring_endpoint base;
    struct node *node;
    struct node **peers; /* [world_size] each is a reference; NULL: not added */
};

static sp_fork_guard registry_guard = {.lock = PTHREAD_MUTEX_INITIALIZER};
static struct node *registry;
static uint8_t process_id[ID_BYTES]; /* random; a child of fork draws a new one */
static bool process_id_drawn;
static uint32_t process_stamp; /* of the process that drew it */

static spccl_status process_id_get(uint8_t out[ID_BYTES])
{
    spccl_status st = SPCCL_OK;
    pthread_mutex_lock(&registry_guard.lock);
    if (!process_id_drawn || sp_process_forked(process_stamp)) {
        st = sp_random_bytes(process_id, ID_BYTES);
        process_id_drawn = st == SPCCL_OK;
        process_stamp = sp_process_stamp();
    }
    memcpy(out, process_id, ID_BYTES);
    pthread_mutex_unlock(&registry_guard.lock);
    return st;
}

static void registry_add(struct node *n)
{
    pthread_mutex_lock(&registry_guard.lock);
    n->next = registry;
    registry = n;
    pthread_mutex_unlock(&registry_guard.lock);
}

static void registry_remove(const struct node *n)
{
    pthread_mutex_lock(&registry_guard.lock);
    for (struct node **at = &registry; *at != NULL; at = &(*at)->next)
        if (*at == n) {
            *at = n->next;
            break;
        }
    pthread_mutex_unlock(&registry_guard.lock);
}

/* The endpoint with this id, with a reference for the caller. NULL if there is none. */
static struct node *registry_find(const uint8_t id[ID_BYTES])
{
    struct node *n;
    pthread_mutex_lock(&registry_guard.lock);
    for (n = registry; n != NULL; n = n->next)
        if (memcmp(n->id, id, ID_BYTES) == 0) {
            atomic_fetch_add(&n->n_refs, 1);
            break;
        }
    pthread_mutex_unlock(&registry_guard.lock);
    return n;
}

static size_t node_block_bytes(const struct node *n)
{
    return sp_ring_block_bytes(n->config.n_queues, n->config.queue_bytes);
}

static void node_unref(struct node *n)
{
    if (n == NULL || atomic_fetch_sub(&n->n_refs, 1) != 1)
        return;
    for (int i = 0; n->out != NULL && i < n->config.world_size; i++) {
        void *block = atomic_load(&n->out[i]);
        if (block != NULL)
            munmap(block, node_block_bytes(n));
    }
    if (n->wake_fd >= 0)
        close(n->wake_fd);
    pthread_mutex_destroy(&n->lock);
    explicit_bzero(n->config.secret, sizeof n->config.secret);
    sp_free(n->out);
    sp_free(n->attached);
    sp_free(n);
}

static spccl_status node_new(const sp_endpoint_config *config, struct node **out)
{
    spccl_status st = SPCCL_OK;
    size_t world = (size_t)config->world_size;
    struct node *n = sp_calloc(1, sizeof *n);
    if (n == NULL)
        return SP_FAIL(SPCCL_ERR_NOMEM, "inproc: an endpoint of %zu bytes", sizeof *n);
    pthread_mutex_init(&n->lock, NULL);
    atomic_store(&n->n_refs, 1);
    n->wake_fd = -1;
    n->config = *config;
    n->out = sp_calloc(world, sizeof *n->out);
    n->attached = sp_calloc(world, sizeof *n->attached);
    if (n->out == NULL || n->attached == NULL) {
        st = SP_FAIL(SPCCL_ERR_NOMEM, "inproc: tables for %zu ranks", world);
        goto fail;
    }
    SP_TRY_TO(fail, st, sp_random_bytes(n->id, sizeof n->id));
    SP_TRY_TO(fail, st, sp_wake_open(&n->wake_fd));
    *out = n;
    return SPCCL_OK;
fail:
    node_unref(n);
    return st;
}

static void inproc_close(sp_endpoint *opaque)
{
    struct inproc_endpoint *ep = (struct inproc_endpoint *)opaque;
    if (ep == NULL)
        return;
    if (ep->node != NULL) {
        registry_remove(ep->node);
        atomic_store(&ep->node->closed, true);
        for (int i = 0; ep->peers != NULL && i < ep->node->config.world_size; i++)
            if (ep->peers[i] != NULL) {
                if (ep->base.links[i].up)
                    sp_ring_signal(&ep->base.links[i]);
                else
                    sp_wake_signal(ep->peers[i]->wake_fd);
                node_unref(ep->peers[i]);
            }
        node_unref(ep->node);
    }
    sp_free(ep->peers);
    sp_free(ep->base.links);
    sp_free(ep);
}

static spccl_status inproc_open(const sp_endpoint_config *config, sp_endpoint **out)
{
    spccl_status st;
    struct inproc_endpoint *ep = sp_calloc(1, sizeof *ep);
    if (ep == NULL)
        return SP_FAIL(SPCCL_ERR_NOMEM, "inproc: an endpoint of %zu bytes", sizeof *ep);
    SP_TRY_TO(fail, st, sp_process_count_forks());
    SP_TRY_TO(fail, st, sp_fork_watch_static(&registry_guard, NULL, NULL));
    SP_TRY_TO(fail, st, node_new(config, &ep->node));
    ep->peers = sp_calloc((size_t)config->world_size, sizeof(struct node *));
    ep->base.links = sp_calloc((size_t)config->world_size, sizeof *ep->base.links);
    if (ep->peers == NULL || ep->base.links == NULL) {
        st = SP_FAIL(SPCCL_ERR_NOMEM, "inproc: tables for %d ranks", config->world_size);
        goto fail;
    }
    ep->base.config = &ep->node->config;
    ep->base.wake_fd = ep->base.wait_fd = ep->node->wake_fd;
    registry_add(ep->node);
    *out = (sp_endpoint *)ep;
    return SPCCL_OK;
fail:
    inproc_close((sp_endpoint *)ep);
    return st;
}

static spccl_status inproc_address(sp_endpoint *opaque, uint8_t *out, size_t *bytes)
{
    struct inproc_endpoint *ep = (struct inproc_endpoint *)opaque;
    memcpy(out, address_magic, 4);
    SP_TRY(process_id_get(out + 4));
    memcpy(out + 4 + ID_BYTES, ep->node->id, ID_BYTES);
    *bytes = ADDRESS_BYTES;
    return SPCCL_OK;
}

static bool inproc_can_reach(sp_endpoint *opaque, const uint8_t *address, size_t bytes, char *why,
                             size_t why_cap)
{
    uint8_t mine[ID_BYTES];
    bool same;
    (void)opaque;
    if (bytes != ADDRESS_BYTES || memcmp(address, address_magic, 4) != 0) {
        snprintf(why, why_cap, "no inproc address");
        return false;
    }
    same = process_id_get(mine) == SPCCL_OK && memcmp(mine, address + 4, ID_BYTES) == 0;
    snprintf(why, why_cap, same ? "same process" : "other process");
    return same;
}

static spccl_status inproc_check_peer(const struct node *me, const struct node *peer, int rank)
{
    const sp_endpoint_config *a = &me->config, *b = &peer->config;
    if (!sp_equal_secret(a->secret, b->secret, SP_SECRET_BYTES))
        return SP_FAIL(SPCCL_ERR_AUTH,
                       "rank %d: rank %d has another job secret: give every rank of a group the same secret",
                       a->rank, rank);
    if (a->group_tag != b->group_tag || b->rank != rank)
        return SP_FAIL(SPCCL_ERR_MISMATCH, "rank %d: the address of rank %d belongs to rank %d of %s group",
                       a->rank, rank, b->rank, a->group_tag == b->group_tag ? "this" : "another");
    if (a->world_size != b->world_size || a->n_queues != b->n_queues || a->queue_bytes != b->queue_bytes)
        return SP_FAIL(SPCCL_ERR_MISMATCH,
                       "rank %d has %d ranks, %d queues of %zu bytes, but rank %d has %d ranks, %d queues of "
                       "%zu bytes: give every rank the same settings",
                       a->rank, a->world_size, a->n_queues, a->queue_bytes, rank, b->world_size, b->n_queues,
                       b->queue_bytes);
    return SPCCL_OK;
}

static spccl_status inproc_add_peer(sp_endpoint *opaque, int peer, const uint8_t *address, size_t bytes)
{
    struct inproc_endpoint *ep = (struct inproc_endpoint *)opaque;
    struct node *node = ep->node, *other;
    void *block;
    if (peer < 0 || peer >= node->config.world_size || peer == node->config.rank || ep->peers[peer] != NULL ||
        bytes != ADDRESS_BYTES)
        return SP_FAIL(SPCCL_ERR_BUG, "rank %d: add_peer(%d, %zu bytes)", node->config.rank, peer, bytes);
    other = registry_find(address + 4 + ID_BYTES);
    if (other == NULL)
        return SP_FAIL(SPCCL_ERR_PEER, "rank %d: rank %d closed its endpoint before the group was up",
                       node->config.rank, peer);
    ep->peers[peer] = other;
    SP_TRY(inproc_check_peer(node, other, peer));
    /* mmap instead of malloc: memory is aligned to pages and zeroed, and an unused page costs nothing. */
    block = mmap(NULL, node_block_bytes(node), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (block == MAP_FAILED)
        return SP_FAIL_ERRNO(SPCCL_ERR_NOMEM, "rank %d: %zu bytes of queues for rank %d", node->config.rank,
                             node_block_bytes(node), peer);
    atomic_store(&node->out[peer], block);
    atomic_store(&other->attached[node->config.rank], true);
    sp_wake_signal(other->wake_fd);
    return SPCCL_OK;
}

/* Set the link up if both ends hold a reference to the other's node. A peer that closes after that frees none
 * of the memory that the link uses. */
static bool inproc_try_up(struct inproc_endpoint *ep, int peer)
{
    struct node *node = ep->node, *other = ep->peers[peer];
    void *in = atomic_load(&other->out[node->config.rank]);
    if (in == NULL || !atomic_load(&node->attached[peer]))
        return false;
    sp_ring_link_init(&ep->base.links[peer], node->config.rank, peer, node->config.n_queues,
                      node->config.queue_bytes, atomic_load(&node->out[peer]), in, other->wake_fd);
    return true;
}

static spccl_status inproc_connect_step(sp_endpoint *opaque)
{
    struct inproc_endpoint *ep = (struct inproc_endpoint *)opaque;
    const sp_endpoint_config *config = &ep->node->config;
    sp_rank_list missing = {0};
    sp_wake_drain(ep->node->wake_fd);
    for (int i = 0; i < config->world_size; i++) {
        /* `closed` is read first: if the peer set its link up and then closed, inproc_try_up finds its
         * memory. */
        bool closed = ep->peers[i] != NULL && atomic_load(&ep->peers[i]->closed);
        if (ep->peers[i] == NULL || ep->base.links[i].up || inproc_try_up(ep, i))
            continue;
        if (closed)
            return SP_FAIL(SPCCL_ERR_PEER, "rank %d: rank %d closed its endpoint before the group was up",
                           config->rank, i);
        sp_rank_list_add(&missing, i);
    }
    if (missing.n == 0)
        return SPCCL_OK;
    if (sp_deadline_passed(config->deadline_ns))
        return SP_FAIL(SPCCL_ERR_TIMEOUT, "rank %d: no inproc connection from rank %s before the deadline",
                       config->rank, missing.text);
    return SPCCL_AGAIN;
}

static spccl_status inproc_progress(sp_endpoint *opaque, int *peer, char *text)
{
    struct inproc_endpoint *ep = (struct inproc_endpoint *)opaque;
    struct node *node = ep->node;
    for (int i = 0; i < node->config.world_size; i++) {
        sp_ring_link *link = &ep->base.links[i];
        if (!link->up)
            continue;
        if (sp_ring_take_signal(link) && atomic_load(&ep->peers[i]->closed))
            sp_ring_link_set_gone(link, "closed its endpoint");
    }
    if (!atomic_load_explicit(&node->aborted, memory_order_acquire))
        return SPCCL_OK;
    *peer = node->abort_rank;
    memcpy(text, node->abort_text, SP_ABORT_TEXT_CAP);
    return SP_FAIL(SPCCL_ERR_ABORTED, "rank %d: rank %d gave up: %s", node->config.rank, node->abort_rank,
                   node->abort_text);
}

static void inproc_abort_peers(sp_endpoint *opaque, const char *text)
{
    struct inproc_endpoint *ep = (struct inproc_endpoint *)opaque;
    for (int i = 0; i < ep->node->config.world_size; i++) {
        struct node *other = ep->peers[i];
        if (other == NULL)
            continue;
        pthread_mutex_lock(&other->lock);
        if (!atomic_load(&other->aborted)) {
            other->abort_rank = ep->node->config.rank;
            snprintf(other->abort_text, sizeof other->abort_text, "%s", text);
            atomic_store(&other->aborted, true);
        }
        pthread_mutex_unlock(&other->lock);
        sp_wake_signal(other->wake_fd);
    }
}

static size_t inproc_memory_bytes(sp_endpoint *opaque)
{
    struct inproc_endpoint *ep = (struct inproc_endpoint *)opaque;
    size_t n = 0;
    for (int i = 0; i < ep->node->config.world_size; i++)
        n += atomic_load(&ep->node->out[i]) != NULL ? node_block_bytes(ep->node) : 0;
    return n;
}

const sp_transport sp_transport_inproc = {
    .name = "inproc",
    .open = inproc_open,
    .address = inproc_address,
    .can_reach = inproc_can_reach,
    .add_peer = inproc_add_peer,
    .connect_step = inproc_connect_step,
    .progress = inproc_progress,
    .arm = sp_ring_arm,
    .abort_peers = inproc_abort_peers,
    .memory_bytes = inproc_memory_bytes,
    .close = inproc_close,
    SP_RING_FUNCTIONS,
};
