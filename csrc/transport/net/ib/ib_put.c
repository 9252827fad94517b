/* ib_put.c - puts of transport ib: plain RDMA writes into a region of the peer. See ib.h.
 *
 * RDMA promises an order only within a queue pair, and only up to a write with immediate. So the puts of a message take
 * the queue pair of the segment in which the message begins, and are posted before that segment. The receiver passes the
 * message on when this segment is here. */
#include "core/base/bits.h"
#include "core/base/mem.h"
#include "transport/net/ib/ib.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* The handle of a region, little-endian: u32 "SPIR", u32 zero, u64 address, u64 bytes, u32 rkey by device, zeros. */
#define HANDLE_MAGIC 0x52495053u
#define RKEYS_AT 24u
_Static_assert(RKEYS_AT + SP_IB_RAILS_MAX * 4 <= SP_REGION_HANDLE_BYTES, "the keys fit");

static struct sp_ib_region *self(sp_region *r)
{
    return (struct sp_ib_region *)r;
}

static bool put_device(sp_endpoint *opaque, size_t i, sp_net_device *out)
{
    const struct sp_ib *ep = sp_ib_self(opaque);
    if (i >= (size_t)ep->n_devices)
        return false;
    for (size_t k = 0; sp_ib_net_device(k, out); k++)
        if (strcmp(out->name, ep->devices[i].name) == 0)
            return true;
    return false;
}

static bool put_reaches(sp_endpoint *opaque, int peer)
{
    const struct sp_ib *ep = sp_ib_self(opaque);
    return ep->base.config.n_puts != 0 && ep->base.peers[peer].carried;
}

/* ---- regions ---- */

static void close_flush(struct sp_ib *ep)
{
    for (int d = 0; d < SP_IB_RAILS_MAX; d++) {
        sp_ib_link_close(ep->flush.links[d]);
        sp_ib_memory_close(&ep->flush.memory[d]);
    }
    ep->flush = (struct sp_ib_flush){.region = NULL};
}

/* In a child of fork the library is not called: the region belongs to the parent. */
static void put_close_region(sp_endpoint *opaque, sp_region *opaque_region)
{
    struct sp_ib *ep = sp_ib_self(opaque);
    struct sp_ib_region *r = self(opaque_region);
    if (r == NULL)
        return;
    if (ep->base.pid == getpid()) {
        if (ep->flush.region == r)
            close_flush(ep);
        for (int d = 0; d < SP_IB_RAILS_MAX; d++)
            sp_ib_memory_close(&r->memory[d]);
    }
    sp_free(r);
}

/* Does some pair of ranks use the device? Rails that failed at start-up are left out. */
static bool is_used(const struct sp_ib *ep, int device)
{
    for (int i = 0; i < ep->base.config.world_size; i++)
        for (uint32_t q = 0; ep->base.peers[i].carried && q < ep->peers[i].n_qps; q++)
            if (ep->peers[i].qps[q].device == device)
                return true;
    return false;
}

static spccl_status open_flush(struct sp_ib *ep, struct sp_ib_region *r)
{
    struct sp_ib_flush *f = &ep->flush;
    if (f->region != NULL)
        return SP_FAIL(SPCCL_ERR_BUG, "ib: a second region with flushes");
    f->region = r;
    for (int d = 0; d < ep->n_devices; d++) {
        if (!is_used(ep, d))
            continue;
        SP_TRY(
            sp_ib_memory_open(ep->contexts[d], &f->word, sizeof f->word, SP_IB_DEVICE_WRITES, &f->memory[d]));
        SP_TRY(sp_ib_link_open_loop(ep->contexts[d], &f->links[d]));
    }
    return SPCCL_OK;
}

static spccl_status register_region(struct sp_ib *ep, struct sp_ib_region *r, uint8_t *handle)
{
    memset(handle, 0, SP_REGION_HANDLE_BYTES);
    sp_store_le32(handle, HANDLE_MAGIC);
    sp_store_le64(handle + 8, (uintptr_t)r->config.address);
    sp_store_le64(handle + 16, r->config.bytes);
    for (int d = 0; d < ep->n_devices; d++) {
        if (!is_used(ep, d))
            continue;
        SP_TRY(sp_ib_region_open(ep->contexts[d], &r->config, &r->memory[d]));
        sp_store_le32(handle + RKEYS_AT + 4 * (size_t)d, r->memory[d].rkey);
    }
    return r->config.peers_write && r->config.flush ? open_flush(ep, r) : SPCCL_OK;
}

static spccl_status put_open_region(sp_endpoint *opaque, const sp_region_config *config, sp_region **out,
                                    uint8_t *handle)
{
    struct sp_ib_region *r = sp_calloc(1, sizeof *r);
    spccl_status st;
    if (r == NULL)
        return SP_FAIL(SPCCL_ERR_NOMEM, "ib: a region: %zu bytes", sizeof *r);
    r->config = *config;
    st = register_region(sp_ib_self(opaque), r, handle);
    if (st == SPCCL_OK)
        *out = (sp_region *)r;
    else
        put_close_region(opaque, (sp_region *)r);
    return st;
}

/* ---- puts ---- */

static uint32_t put_room(sp_endpoint *opaque, int peer)
{
    const struct sp_ib *ep = sp_ib_self(opaque);
    const struct sp_ib_peer *p = &ep->peers[peer];
    uint32_t room = ep->base.config.n_puts;
    for (uint32_t q = 0; q < p->n_qps; q++)
        if (ep->base.config.n_puts - p->qps[q].n_puts < room)
            room = ep->base.config.n_puts - p->qps[q].n_puts;
    return room;
}

/* Is [off, off + bytes) within `size` bytes? */
static bool is_within(uint64_t off, uint64_t bytes, uint64_t size)
{
    return bytes <= size && off <= size - bytes;
}

static spccl_status put_put(sp_endpoint *opaque, int peer, int queue, const sp_put *put)
{
    struct sp_ib *ep = sp_ib_self(opaque);
    struct sp_ib_peer *p = &ep->peers[peer];
    const sp_segment_ring *ring = p->tx[queue].ring;
    const struct sp_ib_region *from = (const struct sp_ib_region *)put->from;
    uint32_t q = sp_ib_qp_of(p->n_qps, ring->at / ring->segment_bytes);
    uint64_t size = sp_load_le64(put->to + 16);
    sp_ib_write w = {.is_put = true, .bytes = (uint32_t)put->bytes};
    spccl_status st;
    if (p->base->gone || p->base->failed)
        return sp_segments_lost(&ep->base, peer);
    if (sp_load_le32(put->to) != HANDLE_MAGIC)
        return SP_FAIL(SPCCL_ERR_FORMAT, "rank %d: rank %d sent something that is not the handle of a region",
                       ep->base.config.rank, peer);
    if (ring->reserved == 0 || p->qps[q].n_puts >= ep->base.config.n_puts ||
        !is_within(put->from_off, put->bytes, from->config.bytes) ||
        !is_within(put->to_off, put->bytes, size))
        return SP_FAIL(
            SPCCL_ERR_BUG,
            "rank %d: a put of %zu bytes to rank %d, from %zu of %zu to %zu of %llu; %u of %u under "
            "way, with%s message",
            ep->base.config.rank, put->bytes, peer, put->from_off, from->config.bytes, put->to_off,
            (unsigned long long)size, p->qps[q].n_puts, ep->base.config.n_puts,
            ring->reserved == 0 ? "out a" : " a");
    w.from = from->config.address + put->from_off;
    w.lkey = from->memory[p->qps[q].device].lkey;
    w.rkey = sp_load_le32(put->to + RKEYS_AT + 4 * (size_t)p->qps[q].their_device);
    w.to = sp_load_le64(put->to + 8) + put->to_off;
    st = sp_ib_post(ep, peer, q, &w, SP_IB_OWNER_PUT);
    if (st == SPCCL_AGAIN) /* cannot be: sp_ib_n_writes has room for n_puts puts */
        return SP_FAIL(SPCCL_ERR_BUG, "rank %d: a put to rank %d: %u writes are under way, of at most %d",
                       ep->base.config.rank, peer, p->qps[q].n_writes - p->qps[q].n_completed,
                       sp_ib_n_writes(ep));
    if (st != SPCCL_OK)
        return sp_segments_lost(&ep->base, peer);
    p->qps[q].n_puts++;
    return SPCCL_OK;
}

/* ---- flush ---- */

/* A read failed, so nothing will be flushed any more: put_flush says why. The first failure counts. */
static void fail_flush(struct sp_ib *ep, int device, const char *error)
{
    struct sp_ib_flush *f = &ep->flush;
    char name[SP_IB_NAME_CAP + 24], text[SP_NET_TEXT_CAP];
    sp_ib_device_text(&ep->devices[device], name, sizeof name);
    snprintf(text, sizeof text, "a flush of GPU memory failed: %.160s", error);
    if (f->failure[0] == '\0')
        snprintf(f->failure, sizeof f->failure, "%s: %s", name, text);
    sp_ib_fail_device(ep, device, text);
}

static void start_flush(struct sp_ib *ep)
{
    struct sp_ib_flush *f = &ep->flush;
    for (int i = 0; i < ep->base.config.world_size; i++)
        for (int k = 0; k < ep->base.config.n_queues; k++) {
            struct sp_ib_rx *rx = &ep->peers[i].rx[k];
            rx->flushing = atomic_load_explicit(&rx->ring->done, memory_order_relaxed);
        }
    for (int d = 0; d < ep->n_devices; d++) {
        uint64_t id = (uint64_t)(uint32_t)d << 59 | (uint64_t)SP_IB_FLUSH_PEER << 32;
        if (f->links[d] == NULL)
            continue;
        f->reading |= 1u << d;
        if (sp_ib_link_read(f->links[d], f->region->config.address, f->region->memory[d].rkey, &f->word,
                            f->memory[d].lkey, id) != SPCCL_OK)
            fail_flush(ep, d, spccl_last_error());
    }
}

void sp_ib_flush_ended(struct sp_ib *ep, uint32_t device, const char *error)
{
    ep->base.changed = true;
    if (ep->flush.region == NULL)
        return; /* it was closed since */
    if (error != NULL) {
        fail_flush(ep, (int)device, error);
        return;
    }
    ep->flush.reading &= ~(1u << device);
    for (int i = 0; ep->flush.reading == 0 && i < ep->base.config.world_size; i++)
        for (int k = 0; k < ep->base.config.n_queues; k++)
            ep->peers[i].rx[k].flushed = ep->peers[i].rx[k].flushing;
}

static spccl_status put_flush(sp_endpoint *opaque, int peer, int queue)
{
    struct sp_ib *ep = sp_ib_self(opaque);
    struct sp_ib_peer *p = &ep->peers[peer];
    const sp_segment_ring *ring = p->rx[queue].ring;
    const void *message;
    size_t bytes;
    uint64_t end;
    SP_TRY(sp_segment_ring_peek(ring, ep->base.config.queue_bytes / 4, &message, &bytes));
    end = ring->at + sp_record_bytes(bytes);
    if (p->rx[queue].flushed * ring->segment_bytes >= end)
        return SPCCL_OK;
    if (p->base->failed)
        return sp_segments_lost(&ep->base, peer);
    if (ep->flush.failure[0] != '\0')
        return SP_FAIL(SPCCL_ERR_PEER, "rank %d: what rank %d put cannot be seen by the GPU: %s",
                       ep->base.config.rank, peer, ep->flush.failure);
    if (ep->flush.region == NULL)
        return SP_FAIL(SPCCL_ERR_BUG, "rank %d: ib: a flush without a region", ep->base.config.rank);
    if (ep->flush.reading == 0)
        start_flush(ep);
    return SPCCL_AGAIN;
}

const sp_transport_puts sp_ib_puts = {
    .device = put_device,
    .reaches = put_reaches,
    .open_region = put_open_region,
    .close_region = put_close_region,
    .room = put_room,
    .put = put_put,
    .flush = put_flush,
};
