/* ib_open.c - this rank's end of transport ib: devices, queue pairs and rings. See ib.h. */
#include "transport/net/ib/ib.h"

#include <stdio.h>

/* Register the part of a queue's rings that a queue pair carries. */
static spccl_status register_part(struct sp_ib *ep, struct sp_ib_peer *p, uint32_t qp, int queue)
{
    struct sp_ib_tx *tx = &p->tx[queue];
    struct sp_ib_rx *rx = &p->rx[queue];
    sp_ib_context *context = ep->contexts[p->qps[qp].device];
    uint64_t first = sp_ib_qp_first(p->n_qps, qp), n = sp_ib_qp_first(p->n_qps, qp + 1) - first;
    size_t bytes = n * (ep->base.config.queue_bytes / SP_SEGMENTS);
    SP_TRY(sp_ib_memory_open(context, sp_segment_ring_segment(tx->ring, first), bytes, SP_IB_NO_WRITER,
                             &tx->memory[qp]));
    SP_TRY(sp_ib_memory_open(context, sp_segment_ring_segment(rx->ring, first), bytes, SP_IB_PEERS_WRITE,
                             &rx->memory[qp]));
    p->mine.rings[queue].rkey[qp] = rx->memory[qp].rkey;
    return SPCCL_OK;
}

static spccl_status open_rings(struct sp_ib *ep, int peer)
{
    struct sp_ib_peer *p = &ep->peers[peer];
    SP_TRY(sp_segments_open_rings(&ep->base, peer));
    for (int i = 0; i < ep->base.config.n_queues; i++) {
        p->tx[i].credit = p->rx[i].announced = SP_SEGMENTS;
        p->mine.rings[i].address = (uintptr_t)p->rx[i].ring->memory.data;
    }
    return SPCCL_OK;
}

static spccl_status open_qp(struct sp_ib *ep, int peer, uint32_t qp)
{
    struct sp_ib_peer *p = &ep->peers[peer];
    int device = p->qps[qp].device;
    if (ep->failures[device][0] != '\0')
        return SP_FAIL(SPCCL_ERR_UNREACHABLE, "%s", ep->failures[device]);
    SP_TRY(sp_ib_link_open(ep->contexts[device], sp_ib_n_writes(ep), sp_ib_n_receives(ep), &p->qps[qp].link,
                           &p->mine.ends[qp]));
    for (int i = 0; i < ep->base.config.n_queues; i++)
        SP_TRY(register_part(ep, p, qp, i));
    return sp_ib_link_receive(p->qps[qp].link, UINT64_C(1) << 63 | sp_ib_id(p, peer, qp),
                              sp_ib_n_receives(ep));
}

void sp_ib_open_peer(struct sp_ib *ep, int peer)
{
    struct sp_ib_peer *p = &ep->peers[peer];
    spccl_status st = p->round == 0 ? open_rings(ep, peer) : SPCCL_OK;
    p->mine.usable = 0;
    for (uint32_t q = 0; q < p->n_qps; q++) {
        for (int i = 0; i < ep->base.config.n_queues; i++)
            p->tx[i].order.next[q] = p->rx[i].order.next[q] = sp_ib_qp_first(p->n_qps, q);
        if (st == SPCCL_OK && open_qp(ep, peer, q) == SPCCL_OK)
            p->mine.usable |= 1u << q;
        else
            sp_segments_note_reason(p->base, sp_without_rank(spccl_last_error(), ep->base.config.rank));
    }
}

void sp_ib_close_qps(struct sp_ib_peer *p)
{
    for (uint32_t q = 0; q < p->n_qps; q++) {
        sp_ib_link_close(p->qps[q].link);
        p->qps[q].link = NULL;
        for (int i = 0; i < SP_QUEUES_MAX; i++) {
            sp_ib_memory_close(&p->tx[i].memory[q]);
            sp_ib_memory_close(&p->rx[i].memory[q]);
        }
    }
}

/* The most queue pairs that one peer has on a device. */
static int most_qps(const struct sp_ib *ep, int device)
{
    int most = 0;
    for (int i = 0; i < ep->base.config.world_size; i++) {
        int n = 0;
        for (uint32_t q = 0; q < ep->peers[i].n_qps; q++)
            n += ep->peers[i].qps[q].device == device;
        most = n > most ? n : most;
    }
    return most;
}

/* Errors: UNREACHABLE (another transport of this process uses the card). */
static spccl_status take_card(struct sp_ib *ep, int d)
{
    char device[SP_IB_NAME_CAP + 24];
    const char *holder;
    sp_nic_of_verbs(ep->devices[d].name, &ep->nics[d]);
    ep->taken[d] = sp_nic_take("ib", &ep->nics[d], &holder);
    if (ep->taken[d])
        return SPCCL_OK;
    sp_ib_device_text(&ep->devices[d], device, sizeof device);
    return SP_FAIL(SPCCL_ERR_UNREACHABLE, "%s: transport %s of this process uses this card", device, holder);
}

static spccl_status open_device(struct sp_ib *ep, int d)
{
    int n_peers = 0, per_qp = sp_ib_n_writes(ep) + sp_ib_n_receives(ep);
    for (int i = 0; i < ep->base.config.world_size; i++)
        n_peers += ep->base.peers[i].added;
    /* 2: what a flush posts at most */
    SP_TRY(sp_ib_context_open(&ep->devices[d], n_peers * most_qps(ep, d) * per_qp + 2, &ep->contexts[d]));
    SP_TRY(sp_segments_watch(&ep->base, sp_ib_context_fd(ep->contexts[d])));
    return sp_segments_watch(&ep->base, sp_ib_context_event_fd(ep->contexts[d]));
}

static void note_failure(struct sp_ib *ep, int d, spccl_status st)
{
    if (st != SPCCL_OK)
        snprintf(ep->failures[d], sizeof ep->failures[d], "%.*s", (int)sizeof ep->failures[d] - 1,
                 sp_without_rank(spccl_last_error(), ep->base.config.rank));
}

spccl_status sp_ib_prepare(sp_segments *base)
{
    struct sp_ib *ep = sp_ib_of(base);
    for (int d = 0; d < ep->n_devices; d++)
        note_failure(ep, d, take_card(ep, d));
    pthread_mutex_lock(&ep->guard.lock);
    for (int d = 0; d < ep->n_devices; d++)
        if (ep->taken[d])
            note_failure(ep, d, open_device(ep, d));
    pthread_mutex_unlock(&ep->guard.lock);
    for (int i = 0; i < ep->base.config.world_size; i++)
        if (ep->base.peers[i].added)
            sp_ib_open_peer(ep, i);
    return SPCCL_OK;
}
