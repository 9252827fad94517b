/* ncclnet_put.c - puts of transport ncclnet, on the caller's thread. See ncclnet.h. */
#include "core/base/bits.h"
#include "core/base/clock.h"
#include "core/base/mem.h"
#include "transport/common/transports.h"
#include "transport/net/ncclnet.h"

#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* The handle of a region, little-endian: u32 "SPNR", u32 zero, u64 bytes. A plugin needs no key of the peer. */
#define HANDLE_MAGIC 0x524e5053u
/* Puts of a peer that has gone may still come for so long. */
#define LEFT_NS INT64_C(2000000000)
/* A job makes at most two calls for each rank. What the thread does before it may take as long as one more call. */
#define JOB_CALLS(world_size) (2 * (int64_t)(world_size) + 1)
/* Between two calls the thread may wait so long for a core. */
#define BETWEEN_CALLS_NS INT64_C(1000000000)
/* The process may have been stopped (SIGSTOP) at a deadline: look again after so long. */
#define LOOK_AGAIN_NS INT64_C(100000000)

/* ---- devices ---- */

static bool put_device(sp_endpoint *opaque, size_t i, sp_net_device *out)
{
    const struct sp_ncclnet *ep = sp_nn_self(opaque);
    if (atomic_load(&ep->load) != SP_NN_LOAD_FINE || i >= (size_t)ep->n_used)
        return false;
    sp_nn_describe_device(&ep->plugin->devices[ep->used[i]], out);
    return true;
}

static bool put_reaches(sp_endpoint *opaque, int peer)
{
    const struct sp_nn_peer *p = &sp_nn_self(opaque)->peers[peer];
    return p->puts && p->route == SP_NN_BY_PLUGIN;
}

/* ---- regions ---- */

/* Give the thread up if it hangs in the plugin, or if a job takes longer than all its calls may. *deadline_ns moves on
 * once: two looks must find that it has passed. */
static void check_job(struct sp_ncclnet *ep, int64_t *deadline_ns, bool *has_passed)
{
    char text[SP_NN_TEXT_CAP];
    bool hangs = sp_nn_thread_hangs(ep, text, sizeof text);
    if (!hangs && !sp_deadline_passed(*deadline_ns))
        return;
    if (!hangs && !*has_passed) {
        *has_passed = true;
        *deadline_ns = sp_now_ns() + LOOK_AGAIN_NS;
        return;
    }
    if (!hangs)
        snprintf(text, sizeof text, "plugin %.60s: its thread did not register or give back memory in time",
                 ep->plugin->name);
    sp_nn_thread_abandon(ep, text);
    sp_nn_lose_peers(ep, text);
}

/* Let the thread do a job. If that fails it may have been given up; then it may still use the region. */
static spccl_status run_job(struct sp_ncclnet *ep, int job, struct sp_nn_region *r)
{
    int64_t deadline_ns =
        sp_now_ns() + JOB_CALLS(ep->config.world_size) * (ep->call_limit_ns + BETWEEN_CALLS_NS);
    bool has_passed = false;
    if (!ep->started) /* there is no peer over the plugin */
        return SPCCL_OK;
    ep->job_region = r;
    if (!ep->thread_lost) {
        ep->n_regions += job == SP_NN_JOB_OPEN;
        atomic_store(&ep->job, job);
    }
    sp_nn_thread_kick(ep);
    while (!ep->thread_lost && atomic_load(&ep->job) != SP_NN_JOB_DONE) {
        check_job(ep, &deadline_ns, &has_passed);
        nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
    }
    if (ep->thread_lost)
        return SP_FAIL(SPCCL_ERR_SYSTEM, "rank %d: ncclnet: %s", ep->config.rank, ep->lost_text);
    ep->n_regions -= job == SP_NN_JOB_CLOSE;
    atomic_store(&ep->job, SP_NN_JOB_NONE);
    return ep->job_fine ? SPCCL_OK
                        : SP_FAIL(SPCCL_ERR_SYSTEM, "rank %d: ncclnet: %s", ep->config.rank, ep->job_text);
}

/* In a child of fork the plugin is not called: the region belongs to the parent. */
static void put_close_region(sp_endpoint *opaque, sp_region *opaque_region)
{
    struct sp_ncclnet *ep = sp_nn_self(opaque);
    struct sp_nn_region *r = (struct sp_nn_region *)opaque_region;
    if (r == NULL)
        return;
    if (ep->inbox == r)
        ep->inbox = NULL;
    if (ep->pid == getpid() && r->mr != NULL)
        (void)run_job(ep, SP_NN_JOB_CLOSE, r);
    if (ep->pid == getpid() && ep->thread_lost)
        return; /* what the thread may use is left behind */
    sp_free(r->mr);
    sp_free(r);
}

static bool put_memory_in_use(sp_endpoint *opaque)
{
    const struct sp_ncclnet *ep = sp_nn_self(opaque);
    return ep->pid == getpid() && (atomic_load(&ep->memory_lost) || (ep->thread_lost && ep->n_regions != 0));
}

static spccl_status open_region(struct sp_ncclnet *ep, struct sp_nn_region *r)
{
    if (r->config.peers_write && ep->inbox != NULL)
        return SP_FAIL(SPCCL_ERR_BUG, "ncclnet: a second region that peers write");
    r->mr = sp_calloc((size_t)ep->config.world_size, sizeof *r->mr);
    if (r->mr == NULL)
        return SP_FAIL(SPCCL_ERR_NOMEM, "ncclnet: registrations of %d ranks", ep->config.world_size);
    SP_TRY(run_job(ep, SP_NN_JOB_OPEN, r));
    if (r->config.peers_write)
        ep->inbox = r;
    return SPCCL_OK;
}

static spccl_status put_open_region(sp_endpoint *opaque, const sp_region_config *config, sp_region **out,
                                    uint8_t *handle)
{
    struct sp_ncclnet *ep = sp_nn_self(opaque);
    struct sp_nn_region *r = sp_calloc(1, sizeof *r);
    spccl_status st;
    if (r == NULL)
        return SP_FAIL(SPCCL_ERR_NOMEM, "ncclnet: a region: %zu bytes", sizeof *r);
    r->config = *config;
    memset(handle, 0, SP_REGION_HANDLE_BYTES);
    sp_store_le32(handle, HANDLE_MAGIC);
    sp_store_le64(handle + 8, config->bytes);
    st = open_region(ep, r);
    if (st == SPCCL_OK) {
        r->config.dmabuf = -1; /* it was borrowed */
        *out = (sp_region *)r;
    } else {
        char why[500];
        snprintf(why, sizeof why, "%s", spccl_last_error());
        put_close_region(opaque, (sp_region *)r);
        sp_set_error(why);
    }
    return st;
}

/* ---- puts ---- */

static uint32_t n_under_way(const struct sp_nn_peer *p)
{
    const sp_nn_ring *count = &p->put_tx.q.ring;
    return (uint32_t)(atomic_load_explicit(&count->allowed, memory_order_relaxed) -
                      atomic_load_explicit(&count->done, memory_order_acquire)) +
           p->n_pending;
}

static uint32_t put_room(sp_endpoint *opaque, int peer)
{
    const struct sp_ncclnet *ep = sp_nn_self(opaque);
    return ep->config.n_puts - n_under_way(&ep->peers[peer]);
}

/* Is [off, off + bytes) within `size` bytes? */
static bool is_within(uint64_t off, uint64_t bytes, uint64_t size)
{
    return bytes <= size && off <= size - bytes;
}

/* Where the payload of the reserved message begins. */
static uint8_t *reserved_payload(const sp_nn_ring *r)
{
    return r->memory.data + (size_t)(r->reserved_at % r->memory.cap) + SP_NN_HEAD_BYTES;
}

/* Why the connection for puts failed. `failure` is written before the state. */
static const char *no_puts_text(struct sp_nn_peer *p)
{
    return atomic_load(&p->state) == SP_NN_FAILED
               ? p->failure
               : "a region was closed while puts or a flush were under way";
}

static spccl_status put_put(sp_endpoint *opaque, int peer, int queue, const sp_put *put)
{
    struct sp_ncclnet *ep = sp_nn_self(opaque);
    struct sp_nn_peer *p = &ep->peers[peer];
    const struct sp_nn_region *from = (const struct sp_nn_region *)put->from;
    uint64_t size = sp_load_le64(put->to + 8), n;
    if (p->gone || atomic_load(&p->state) == SP_NN_FAILED)
        return SP_FAIL(SPCCL_ERR_PEER, "rank %d: rank %d %s%s", ep->config.rank, peer,
                       p->gone ? "" : "cannot be reached any more: ", p->gone ? p->gone_text : p->failure);
    if (atomic_load(&p->put_tx.q.failed))
        return SP_FAIL(SPCCL_ERR_PEER, "rank %d: no puts to rank %d any more: %s", ep->config.rank, peer,
                       no_puts_text(p));
    if (sp_load_le32(put->to) != HANDLE_MAGIC)
        return SP_FAIL(SPCCL_ERR_FORMAT, "rank %d: rank %d sent something that is not the handle of a region",
                       ep->config.rank, peer);
    if (from->config.peers_write) /* it is registered with the connection that receives */
        return SP_FAIL(SPCCL_ERR_BUG, "rank %d: a put to rank %d from the region that peers write",
                       ep->config.rank, peer);
    if (p->tx[queue].ring.reserved == 0 || put_room(opaque, peer) == 0 || put->bytes == 0 ||
        put->bytes > INT32_MAX || !is_within(put->from_off, put->bytes, from->config.bytes) ||
        !is_within(put->to_off, put->bytes, size))
        return SP_FAIL(
            SPCCL_ERR_BUG,
            "rank %d: a put of %zu bytes to rank %d, from %zu of %zu to %zu of %llu; %u of %u under way, "
            "with%s message",
            ep->config.rank, put->bytes, peer, put->from_off, from->config.bytes, put->to_off,
            (unsigned long long)size, n_under_way(p), ep->config.n_puts,
            p->tx[queue].ring.reserved == 0 ? "out a" : " a");
    n = atomic_load_explicit(&p->put_tx.q.ring.allowed, memory_order_relaxed) + p->n_pending;
    p->put_tx.pieces[n % SP_PUTS_MAX] =
        (struct sp_nn_piece){.region = from, .off = put->from_off, .bytes = (uint32_t)put->bytes};
    p->targets[p->n_pending++] = (sp_nn_target){.off = put->to_off, .bytes = (uint32_t)put->bytes};
    return SPCCL_OK;
}

void sp_nn_commit_puts(struct sp_ncclnet *ep, int peer)
{
    struct sp_nn_peer *p = &ep->peers[peer];
    sp_nn_ring *ring = &p->tx[0].ring;
    size_t payload = ring->reserved - sp_nn_list_room(p);
    ring->reserved = sp_nn_write_targets(reserved_payload(ring), payload, p->targets, p->n_pending);
    (void)atomic_fetch_add_explicit(&p->put_tx.q.ring.allowed, p->n_pending, memory_order_release);
    p->n_pending = 0;
}

spccl_status sp_nn_take_puts(struct sp_ncclnet *ep, int peer, const void *message, size_t *bytes)
{
    struct sp_nn_peer *p = &ep->peers[peer];
    sp_nn_ring *count = &p->put_rx.q.ring;
    uint64_t allowed = atomic_load_explicit(&count->allowed, memory_order_relaxed);
    sp_nn_target targets[SP_PUTS_MAX];
    size_t payload = 0;
    char why[SP_NN_TEXT_CAP];
    /* If the peer failed, sp_nn_look_at_end ends it, with the reason. */
    bool was_closed = atomic_load(&p->put_rx.q.failed) && atomic_load(&p->state) != SP_NN_FAILED;
    int n = sp_nn_read_targets(message, *bytes, ep->inbox != NULL ? ep->inbox->config.bytes : 0, targets,
                               &payload, why);
    if (n < 0 && ep->inbox == NULL && was_closed)
        return SP_FAIL(SPCCL_ERR_PEER, "rank %d: no puts from rank %d any more: %s", ep->config.rank, peer,
                       no_puts_text(p));
    if (n < 0)
        return SP_FAIL(SPCCL_ERR_FORMAT, "rank %d: rank %d sent a message of %zu bytes: %s%s",
                       ep->config.rank, peer, *bytes, why,
                       ep->inbox != NULL ? ": do all ranks run the same version of spccl?" : "");
    if (!p->announced) {
        for (int i = 0; i < n; i++) /* all pieces before these are done, so there is space */
            p->put_rx.pieces[(allowed + (uint64_t)i) % SP_PUTS_MAX] =
                (struct sp_nn_piece){.region = ep->inbox, .off = targets[i].off, .bytes = targets[i].bytes};
        allowed += (uint64_t)n;
        atomic_store_explicit(&count->allowed, allowed, memory_order_release);
        p->announced = true;
        if (n != 0)
            sp_nn_thread_kick(ep);
    }
    if (atomic_load_explicit(&count->done, memory_order_acquire) == allowed) {
        *bytes = payload;
        return SPCCL_OK;
    }
    if (was_closed)
        return SP_FAIL(SPCCL_ERR_PEER, "rank %d: no puts from rank %d any more: %s", ep->config.rank, peer,
                       no_puts_text(p));
    /* Puts of a peer that has left may still come. */
    p->puts_due = !ep->thread_lost && !atomic_load(&p->put_rx.q.failed) &&
                  (p->ended_ns == 0 || sp_now_ns() - p->ended_ns < LEFT_NS);
    return SPCCL_AGAIN;
}

/* ---- flush ---- */

static spccl_status put_flush(sp_endpoint *opaque, int peer, int queue)
{
    struct sp_ncclnet *ep = sp_nn_self(opaque);
    struct sp_nn_peer *p = &ep->peers[peer];
    uint64_t message = p->rx[queue].ring.n_messages + 1; /* from 1 on */
    const void *unused;
    size_t bytes;
    SP_TRY(sp_transport_ncclnet.peek(opaque, peer, queue, &unused, &bytes));
    if (p->flush_ended == message)
        return SPCCL_OK;
    if (ep->thread_lost)
        return SP_FAIL(SPCCL_ERR_PEER, "rank %d: rank %d %s", ep->config.rank, peer, p->gone_text);
    if (atomic_load(&p->put_rx.q.failed))
        return SP_FAIL(SPCCL_ERR_PEER, "rank %d: no puts from rank %d any more: %s", ep->config.rank, peer,
                       no_puts_text(p));
    if (ep->inbox == NULL || !ep->inbox->config.flush)
        return SP_FAIL(SPCCL_ERR_BUG, "rank %d: ncclnet: a flush without a region", ep->config.rank);
    if (p->flush_asked != message) {
        p->flush_asked = message;
        atomic_store(&p->flush, SP_NN_FLUSH_ASKED);
        sp_nn_thread_kick(ep);
    } else if (atomic_load(&p->flush) == SP_NN_FLUSH_DONE) {
        p->flush_ended = message;
        return SPCCL_OK;
    }
    return SPCCL_AGAIN;
}

const sp_transport_puts sp_nn_puts = {
    .device = put_device,
    .reaches = put_reaches,
    .open_region = put_open_region,
    .close_region = put_close_region,
    .memory_in_use = put_memory_in_use,
    .room = put_room,
    .put = put_put,
    .flush = put_flush,
};
