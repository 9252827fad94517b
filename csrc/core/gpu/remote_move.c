/* remote_move.c - one round of the proxy; see remote.h. */
#include "core/gpu/remote.h"

#include "core/base/clock.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* A message waits while earlier ones are still in this process, unless it has so many bytes of frames. */
#define BATCH_BYTES 65536u
/* A message takes no further ring beyond so many bytes of frames. */
#define MESSAGE_BYTES ((size_t)256 << 10)
/* Messages of one peer that are taken in a round. */
#define TAKEN_MAX 16
/* A lost peer may have sent all that it had to send. What it sent is delivered first. */
#define GRACE_NS (INT64_C(200) * 1000000)

size_t sp_remote_message_max(const sp_remote *r)
{
    return sp_remote_data_off(2 * SP_INBOX_QUEUES * r->g->shape.n_workers) + MESSAGE_BYTES +
           sp_remote_run_max(sp_inbox_ring_bytes(r->g->shape));
}

static uint64_t load(const uint8_t *memory, size_t off)
{
    return __atomic_load_n((const uint64_t *)(const void *)(memory + off), __ATOMIC_ACQUIRE);
}

static void store(uint8_t *memory, size_t off, uint64_t v)
{
    __atomic_store_n((uint64_t *)(void *)(memory + off), v, __ATOMIC_RELEASE);
}

/* The peer's connection ended. Not an error for a moment, and not while the ranks leave. */
static spccl_status note_gone(sp_remote *r, sp_remote_peer *p)
{
    if (atomic_load(&r->leaving))
        return SPCCL_OK;
    if (p->gone_since_ns == 0)
        p->gone_since_ns = sp_now_ns();
    return sp_now_ns() - p->gone_since_ns < GRACE_NS ? SPCCL_OK : SPCCL_ERR_PEER;
}

/* ---- receiving ---- */

/* Copy a run into the mirror of its ring. */
static void write_run(const sp_remote *r, const sp_remote_peer *p, const sp_remote_entry *e,
                      const uint8_t *data)
{
    uint8_t *ring = r->mirror + sp_inbox_ring_off(r->g->shape, e->queue, p->slot, e->worker);
    size_t off = e->position % p->at.ring_bytes, first = p->at.ring_bytes - off;
    first = first < e->bytes ? first : e->bytes;
    memcpy(ring + off, data, first);
    memcpy(ring, data + first, e->bytes - first);
}

/* Tell the couriers that a position of this worker changed. */
static void ring_bell(const sp_remote *r, uint32_t worker)
{
    uint32_t *bells = (uint32_t *)(void *)(r->mirror + sp_remote_bells_off(r->g->shape));
    uint32_t *bell = &bells[worker / SP_REMOTE_BELL_WORKERS];
    __atomic_store_n(bell, *bell + 1, __ATOMIC_RELEASE); /* only this thread writes it */
}

static spccl_status apply_message(sp_remote *r, sp_remote_peer *p, const void *message, size_t bytes)
{
    sp_inbox_shape s = r->g->shape;
    sp_remote_reader reader;
    sp_remote_entry e;
    const uint8_t *data = NULL;
    spccl_status st;
    SP_TRY(sp_remote_open_message(&reader, message, bytes));
    while ((st = sp_remote_next_entry(&reader, &p->at, &e, &data)) == SPCCL_OK) {
        uint32_t ring = e.queue * p->at.n_workers + e.worker;
        if (e.is_run) {
            write_run(r, p, &e, data);
            p->at.arrived[ring] += e.bytes;
            store(r->mirror, sp_inbox_tail_off(s, e.queue, p->slot, e.worker), p->at.arrived[ring]);
        } else {
            p->at.free_to[ring] = e.position;
            store(r->mirror, sp_inbox_credit_off(s, e.queue, p->slot, e.worker), e.position);
        }
        ring_bell(r, e.worker);
    }
    return st == SPCCL_AGAIN ? SPCCL_OK : st;
}

static spccl_status take_messages(sp_remote *r, sp_remote_peer *p, bool *moved)
{
    for (int i = 0; i < TAKEN_MAX; i++) {
        const void *message = NULL;
        size_t bytes = 0;
        spccl_status st = r->transport->peek(r->ep, p->rank, 0, &message, &bytes);
        if (st == SPCCL_ERR_PEER)
            return note_gone(r, p);
        if (st != SPCCL_OK)
            return st == SPCCL_AGAIN ? SPCCL_OK : st;
        st = apply_message(r, p, message, bytes);
        if (st != SPCCL_OK) {
            char why[300];
            snprintf(why, sizeof why, "%s", spccl_last_error());
            return SP_FAIL(st, "rank %d sent %s: do all ranks run the same version of spccl?", p->rank, why);
        }
        SP_TRY(r->transport->release(r->ep, p->rank, 0));
        *moved = true;
    }
    return SPCCL_OK;
}

/* ---- sending ---- */

/* The entries of the next message, in r->entries: credits, then runs. */
struct batch {
    uint32_t n_credits, n_runs;
    size_t data_bytes;
};

/* A position that a kernel of this rank wrote into the outbox, and the bounds that it was checked against. */
struct position {
    const char *what;
    uint32_t queue, worker;
    uint64_t got, least, most;
};

static spccl_status check_here(const sp_remote_peer *p, const struct position *x)
{
    if (x->got >= x->least && x->got <= x->most)
        return SPCCL_OK;
    return SP_FAIL(SPCCL_ERR_BUG,
                   "a kernel of this rank wrote the %s %" PRIu64
                   " for rank %d (%s of worker %u); wanted %" PRIu64 " to %" PRIu64,
                   x->what, x->got, p->rank, sp_remote_queue_name(x->queue), x->worker, x->least, x->most);
}

static spccl_status collect_credits(sp_remote *r, const sp_remote_peer *p, struct batch *b)
{
    uint32_t n = p->at.n_workers;
    for (uint32_t ring = 0; ring < SP_INBOX_QUEUES * n; ring++) {
        uint32_t queue = ring / n, worker = ring % n;
        uint64_t now = load(r->outbox, sp_inbox_credit_off(r->g->shape, queue, p->slot_there, worker));
        if (now == p->at.freed[ring])
            continue;
        SP_TRY(check_here(
            p, &(struct position){.what = "credit",
                                  .queue = queue,
                                  .worker = worker,
                                  .got = now,
                                  .least = p->at.freed[ring],
                                  .most = sp_remote_credit_max(p->at.arrived[ring], p->at.ring_bytes)}));
        r->entries[b->n_credits++] = (sp_remote_entry){.queue = queue, .worker = worker, .position = now};
    }
    return SPCCL_OK;
}

static spccl_status collect_runs(sp_remote *r, const sp_remote_peer *p, struct batch *b)
{
    uint32_t n = p->at.n_workers;
    for (uint32_t i = 0; i < SP_INBOX_QUEUES * n && b->data_bytes < MESSAGE_BYTES; i++) {
        uint32_t ring = p->next + i < SP_INBOX_QUEUES * n ? p->next + i : p->next + i - SP_INBOX_QUEUES * n;
        uint32_t queue = ring / n, worker = ring % n;
        uint64_t sent = p->at.sent[ring], tail;
        tail = load(r->outbox, sp_inbox_tail_off(r->g->shape, queue, p->slot_there, worker));
        if (tail == sent)
            continue;
        SP_TRY(
            check_here(p, &(struct position){.what = "tail",
                                             .queue = queue,
                                             .worker = worker,
                                             .got = tail,
                                             .least = sent > p->at.free_to[ring] ? sent : p->at.free_to[ring],
                                             .most = p->at.free_to[ring] + p->at.ring_bytes}));
        r->entries[b->n_credits + b->n_runs++] = (sp_remote_entry){
            .is_run = true, .queue = queue, .worker = worker, .position = sent, .bytes = tail - sent};
        b->data_bytes += tail - sent;
    }
    return SPCCL_OK;
}

/* Copy the bytes of a run out of its ring. */
static void read_run(const sp_remote *r, const sp_remote_peer *p, const sp_remote_entry *e, uint8_t *to)
{
    const uint8_t *ring = r->outbox + sp_inbox_ring_off(r->g->shape, e->queue, p->slot_there, e->worker);
    size_t off = e->position % p->at.ring_bytes, first = p->at.ring_bytes - off;
    first = first < e->bytes ? first : e->bytes;
    memcpy(to, ring + off, first);
    memcpy(to + first, ring, e->bytes - first);
}

static void write_message(const sp_remote *r, sp_remote_peer *p, const struct batch *b, uint8_t *message)
{
    uint32_t n_entries = b->n_credits + b->n_runs;
    size_t at = SP_REMOTE_HEAD_BYTES + (size_t)n_entries * SP_REMOTE_ENTRY_BYTES;
    memset(message + at, 0, sp_remote_data_off(n_entries) - at);
    at = sp_remote_data_off(n_entries);
    sp_remote_put_head(message, b->n_credits, b->n_runs);
    for (uint32_t i = 0; i < n_entries; i++) {
        const sp_remote_entry *e = &r->entries[i];
        uint32_t ring = e->queue * p->at.n_workers + e->worker;
        sp_remote_put_entry(message, i, e);
        if (e->is_run) {
            read_run(r, p, e, message + at);
            at += e->bytes;
            p->at.sent[ring] += e->bytes;
            p->next = ring + 1 < SP_INBOX_QUEUES * p->at.n_workers ? ring + 1 : 0;
        } else {
            p->at.freed[ring] = e->position;
        }
    }
}

static spccl_status send_messages(sp_remote *r, sp_remote_peer *p, bool *moved)
{
    struct batch b = {0};
    void *message = NULL;
    size_t bytes;
    spccl_status st;
    SP_TRY(collect_credits(r, p, &b));
    SP_TRY(collect_runs(r, p, &b));
    if (b.n_credits + b.n_runs == 0 || p->gone_since_ns != 0)
        return SPCCL_OK;
    if (b.data_bytes < BATCH_BYTES && !r->transport->flushed(r->ep, p->rank, 0, p->n_messages))
        return SPCCL_OK;
    bytes = sp_remote_data_off(b.n_credits + b.n_runs) + b.data_bytes;
    st = r->transport->reserve(r->ep, p->rank, 0, bytes, &message);
    if (st == SPCCL_ERR_PEER)
        return note_gone(r, p);
    if (st != SPCCL_OK)
        return st == SPCCL_AGAIN ? SPCCL_OK : st;
    write_message(r, p, &b, message);
    SP_TRY(r->transport->commit(r->ep, p->rank, 0, 0)); /* all messages of proxies are equally urgent */
    p->n_messages++;
    r->n_bytes_sent += bytes;
    *moved = true;
    return SPCCL_OK;
}

spccl_status sp_remote_round(sp_remote *r, bool *moved)
{
    char text[SP_ABORT_TEXT_CAP];
    int from = -1;
    SP_TRY(r->transport->progress(r->ep, &from, text));
    for (int i = 0; i < r->n_peers; i++) {
        SP_TRY(take_messages(r, &r->peers[i], moved));
        SP_TRY(send_messages(r, &r->peers[i], moved));
    }
    return SPCCL_OK;
}
