/* ncclnet_put_thread.c - puts of transport ncclnet, on the thread that calls the plugin. See ncclnet.h. */
#include "core/base/log.h"
#include "transport/net/ncclnet_call.h"

#include <stdio.h>

/* ---- registrations ---- */

/* The connection over which the pieces of a region travel. */
static struct sp_nn_queue *queue_of(const struct sp_ncclnet *ep, const struct sp_nn_region *r, int peer)
{
    struct sp_nn_peer *p = &ep->peers[peer];
    return r->config.peers_write ? &p->put_rx.q : &p->put_tx.q;
}

static bool open_for(struct sp_ncclnet *ep, struct sp_nn_region *r, int peer)
{
    struct sp_nn_queue *q = queue_of(ep, r, peer);
    enum sp_nn_slot slot = r->config.dmabuf < 0 ? SP_NN_REG_MR : SP_NN_REG_MR_DMABUF;
    char device[80];
    int result = 0;
    if (r->mr[peer] != NULL || q->comm == NULL || atomic_load(&q->failed))
        return true;
    sp_nn_device_text(ep, q->device, device, sizeof device);
    if (ep->plugin->table->slots[slot] == NULL ||
        (r->config.flush && ep->plugin->table->slots[SP_NN_IFLUSH] == NULL)) {
        snprintf(ep->job_text, sizeof ep->job_text, "%s: plugin %s has no %s", device, ep->plugin->name,
                 sp_nn_slot_name(ep->plugin->table->slots[slot] == NULL ? slot : SP_NN_IFLUSH));
        return false;
    }
    SP_NN_CALL(ep, slot, peer, q, result, sp_nn_reg_gpu(ep->plugin, q->comm, &r->config, &r->mr[peer]));
    if (result != 0) {
        snprintf(ep->job_text, sizeof ep->job_text, "%s: plugin %s: %s for rank %d returned %d (%s)", device,
                 ep->plugin->name, sp_nn_slot_name(slot), peer, result, sp_nn_result_text(result));
        r->mr[peer] = NULL;
        return false;
    }
    if (r->mr[peer] == NULL)
        r->mr[peer] = r; /* plugins that need no registration give NULL; deregMr then gets NULL back */
    return true;
}

static bool is_flushing(struct sp_nn_peer *p)
{
    int state = atomic_load(&p->flush);
    return state == SP_NN_FLUSH_ASKED || state == SP_NN_FLUSH_RUNS;
}

/* If pieces or a flush are under way, the connection ends with the region: only so does the plugin leave the memory
 * alone. */
static void close_for(struct sp_ncclnet *ep, struct sp_nn_region *r, int peer)
{
    struct sp_nn_peer *p = &ep->peers[peer];
    struct sp_nn_queue *q = queue_of(ep, r, peer);
    bool in_use = atomic_load(&q->ring.allowed) != atomic_load(&q->ring.done) ||
                  (r->config.peers_write && is_flushing(p));
    int result;
    if (r->mr[peer] == NULL)
        return;
    if (r->config.peers_write)
        p->n_closed = atomic_load(&q->ring.done);
    result = 0;
    if (q->comm != NULL) /* else another region's end has closed it, and its registrations with it */
        SP_NN_CALL(ep, SP_NN_DEREG_MR, peer, q, result,
                   sp_nn_dereg(ep->plugin, q->comm, r->mr[peer] == r ? NULL : r->mr[peer]));
    if (result != 0)
        sp_log(SP_LOG_INFO, ep->config.rank, "plugin %s: deregMr for rank %d, puts, returned %d (%s)",
               ep->plugin->name, peer, result, sp_nn_result_text(result));
    r->mr[peer] = NULL;
    if (!in_use)
        return;
    atomic_store(&q->failed, true); /* further puts over it are errors: put_put, sp_nn_take_puts, put_flush */
    if (sp_nn_close_comm(ep, peer, q, r->config.peers_write ? SP_NN_CLOSE_RECV : SP_NN_CLOSE_SEND,
                         &q->comm) == 0)
        return;
    atomic_store(&ep->memory_lost, true);
    sp_log(
        SP_LOG_WARN, ep->config.rank,
        "ncclnet: plugin %s could not close the connection of puts with rank %d while some were under way: "
        "it may still use their memory",
        ep->plugin->name, peer);
}

bool sp_nn_do_job(struct sp_ncclnet *ep)
{
    int job = atomic_load_explicit(&ep->job, memory_order_acquire);
    if (job != SP_NN_JOB_OPEN && job != SP_NN_JOB_CLOSE)
        return false;
    ep->job_fine = true;
    for (int i = 0; i < ep->config.world_size; i++)
        if (job == SP_NN_JOB_CLOSE)
            close_for(ep, ep->job_region, i);
        else if (ep->peers[i].puts && ep->peers[i].connected)
            ep->job_fine = ep->job_fine && open_for(ep, ep->job_region, i);
    atomic_store_explicit(&ep->job, SP_NN_JOB_DONE, memory_order_release);
    return true;
}

/* ---- pieces ---- */

static const struct sp_nn_piece *piece_of(const struct sp_nn_puts *puts, uint64_t n)
{
    return &puts->pieces[n % SP_PUTS_MAX];
}

static sp_nn_transfer transfer_of(const struct sp_nn_puts *puts, int peer, uint64_t n)
{
    const struct sp_nn_piece *piece = piece_of(puts, n);
    void *mr = piece->region->mr[peer];
    return (sp_nn_transfer){.comm = puts->q.comm,
                            .data = piece->region->config.address + piece->off,
                            .mr = mr == piece->region ? NULL : mr,
                            .bytes = piece->bytes,
                            .tag = (int)puts->q.ring.queue};
}

/* Start what is allowed: at most SP_NN_SEGMENTS at once, as over the other connections. */
static bool start_pieces(struct sp_ncclnet *ep, int peer, struct sp_nn_puts *puts, enum sp_nn_slot slot)
{
    struct sp_nn_queue *q = &puts->q;
    uint64_t allowed = atomic_load_explicit(&q->ring.allowed, memory_order_acquire);
    uint64_t done = atomic_load_explicit(&q->ring.done, memory_order_relaxed);
    bool moved = q->n_seen != allowed; /* what is new is tried again soon, not after a long pause */
    int result = 0;
    q->n_seen = allowed;
    while (q->n_started < allowed && q->n_started - done < SP_NN_SEGMENTS && result == 0) {
        void **request = &q->requests[q->n_started % SP_NN_SEGMENTS];
        sp_nn_transfer t = transfer_of(puts, peer, q->n_started);
        SP_NN_CALL(ep, slot, peer, q, result,
                   slot == SP_NN_ISEND ? sp_nn_isend(ep->plugin, &t, request)
                                       : sp_nn_irecv(ep->plugin, &t, request));
        if (result == 0 && *request == NULL)
            break;
        q->n_started += result == 0;
        moved = true;
    }
    if (result != 0)
        sp_nn_fail_call(ep, peer, q, slot, result);
    return moved;
}

/* Ask whether the oldest piece is done. */
static bool end_piece(struct sp_ncclnet *ep, int peer, struct sp_nn_puts *puts, enum sp_nn_slot slot)
{
    struct sp_nn_queue *q = &puts->q;
    uint64_t done = atomic_load_explicit(&q->ring.done, memory_order_relaxed);
    char device[80], text[SP_NN_TEXT_CAP];
    bool is_done = false;
    int result, bytes = 0;
    if (done == q->n_started || atomic_load_explicit(&q->failed, memory_order_relaxed))
        return false;
    SP_NN_CALL(ep, SP_NN_TEST, peer, q, result,
               sp_nn_test(ep->plugin, q->requests[done % SP_NN_SEGMENTS], &is_done, &bytes));
    if (result != 0)
        sp_nn_fail_call(ep, peer, q, SP_NN_TEST, result);
    if (result != 0 || !is_done)
        return false;
    if (slot == SP_NN_IRECV && (uint32_t)bytes != piece_of(puts, done)->bytes) {
        sp_nn_device_text(ep, q->device, device, sizeof device);
        snprintf(text, sizeof text, "%s: plugin %s: a put of %d bytes came from rank %d, wanted %u", device,
                 ep->plugin->name, bytes, peer, piece_of(puts, done)->bytes);
        sp_nn_fail_peer(ep, peer, text);
        atomic_store(&q->failed, true);
        return false;
    }
    atomic_store_explicit(&q->ring.done, done + 1, memory_order_release);
    sp_nn_signal_caller(ep);
    return true;
}

/* ---- flush ---- */

static bool serve_flush(struct sp_ncclnet *ep, int peer)
{
    struct sp_nn_peer *p = &ep->peers[peer];
    struct sp_nn_queue *q = &p->put_rx.q;
    uint64_t done = atomic_load_explicit(&q->ring.done, memory_order_relaxed);
    int state = atomic_load_explicit(&p->flush, memory_order_acquire), result = 0, bytes;
    bool is_done = done == p->n_closed; /* nothing has come into the region that peers write now */
    if (state != SP_NN_FLUSH_ASKED && state != SP_NN_FLUSH_RUNS)
        return false;
    if (state == SP_NN_FLUSH_ASKED && !is_done) {
        sp_nn_transfer t = transfer_of(&p->put_rx, peer, done - 1);
        SP_NN_CALL(ep, SP_NN_IFLUSH, peer, q, result, sp_nn_iflush(ep->plugin, &t, &p->flush_request));
        is_done = result == 0 && p->flush_request == NULL;
        if (result == 0 && !is_done)
            atomic_store(&p->flush, SP_NN_FLUSH_RUNS);
    } else if (!is_done) {
        SP_NN_CALL(ep, SP_NN_TEST, peer, q, result,
                   sp_nn_test(ep->plugin, p->flush_request, &is_done, &bytes));
    }
    if (result != 0)
        sp_nn_fail_call(ep, peer, q, state == SP_NN_FLUSH_ASKED ? SP_NN_IFLUSH : SP_NN_TEST, result);
    if (result == 0 && is_done)
        atomic_store_explicit(&p->flush, SP_NN_FLUSH_DONE, memory_order_release);
    if (result != 0 || is_done)
        sp_nn_signal_caller(ep);
    return result == 0 && is_done;
}

static bool serve_side(struct sp_ncclnet *ep, int peer, struct sp_nn_puts *puts, enum sp_nn_slot slot)
{
    bool moved = false;
    if (!atomic_load_explicit(&puts->q.failed, memory_order_relaxed))
        moved = start_pieces(ep, peer, puts, slot);
    while (end_piece(ep, peer, puts, slot))
        moved = true;
    return moved;
}

bool sp_nn_serve_puts(struct sp_ncclnet *ep, int peer)
{
    struct sp_nn_peer *p = &ep->peers[peer];
    bool moved = serve_side(ep, peer, &p->put_tx, SP_NN_ISEND);
    moved = serve_side(ep, peer, &p->put_rx, SP_NN_IRECV) || moved;
    if (!atomic_load_explicit(&p->put_rx.q.failed, memory_order_relaxed))
        moved = serve_flush(ep, peer) || moved;
    return moved;
}

static bool is_new(struct sp_nn_queue *q)
{
    return atomic_load(&q->ring.allowed) != q->n_seen && !atomic_load(&q->failed);
}

bool sp_nn_puts_wait(struct sp_ncclnet *ep)
{
    int job = atomic_load(&ep->job);
    if (job == SP_NN_JOB_OPEN || job == SP_NN_JOB_CLOSE)
        return true;
    for (int i = 0; i < ep->config.world_size; i++) {
        struct sp_nn_peer *p = &ep->peers[i];
        if (p->connected && p->puts &&
            (is_new(&p->put_tx.q) || is_new(&p->put_rx.q) ||
             (atomic_load(&p->flush) == SP_NN_FLUSH_ASKED && !atomic_load(&p->put_rx.q.failed))))
            return true;
    }
    return false;
}
