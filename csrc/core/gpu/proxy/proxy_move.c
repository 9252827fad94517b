/* proxy_move.c - one round of a proxy; see proxy.h. */
#include "core/gpu/proxy/proxy.h"

#include "core/base/clock.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* A message waits while earlier ones are still in this process, unless it has so many bytes of frames. */
#define BATCH_BYTES 65536u
/* A message takes no further ring beyond so many bytes of frames. */
#define MESSAGE_BYTES ((size_t)256 << 10)
/* Of each span so many bytes are read ahead. */
#define PREFETCH_BYTES 512u
/* The places of so many spans are fetched before they are written. */
#define PREFETCH_ENTRIES 12u
/* Messages of one peer that are taken in a round. */
#define TAKEN_MAX 16
/* A lost peer may have sent all that it had to send. What it sent is delivered first. */
#define GRACE_NS (INT64_C(200) * 1000000)

size_t sp_proxies_message_max(const sp_proxies *r)
{
    return sp_proxy_data_off(2 * SP_INBOX_QUEUES * r->g->shape.n_workers) + MESSAGE_BYTES +
           sp_proxy_span_max(sp_inbox_ring_bytes(r->g->shape));
}

void sp_proxy_find_words(sp_proxy *x, int i)
{
    sp_proxy_peer *p = &x->peers[i];
    const sp_ring_area *area = &x->r->area.pinned;
    const uint8_t *outbox = x->r->outbox;
    for (uint32_t q = 0; q < p->at.n_queues; q++) {
        p->tails[q] = (const uint64_t *)(const void *)(outbox + sp_area_tail_off(area, p->link[q], 0));
        p->credits[q] = (const uint64_t *)(const void *)(outbox + sp_area_credit_off(area, p->link[q], 0));
    }
}

static void store(uint8_t *memory, size_t off, uint64_t v)
{
    __atomic_store_n((uint64_t *)(void *)(memory + off), v, __ATOMIC_RELEASE);
}

/* The peer's connection ended. Not an error for a moment, and not while the ranks leave. */
static spccl_status note_gone(const sp_proxies *r, sp_proxy_peer *p)
{
    if (atomic_load(&r->leaving))
        return SPCCL_OK;
    if (p->gone_since_ns == 0)
        p->gone_since_ns = sp_now_ns();
    return sp_now_ns() - p->gone_since_ns < GRACE_NS ? SPCCL_OK : SPCCL_ERR_PEER;
}

/* ---- receiving ---- */

/* Tell the copy warps that a tail or credit of this worker changed. */
static void count_arrival(const sp_proxies *r, uint32_t worker)
{
    uint32_t *counters = (uint32_t *)(void *)(r->host_inbox + sp_remote_counters_off(&r->area.pinned));
    uint32_t *counter = &counters[worker / SP_REMOTE_COUNTER_WORKERS];
    __atomic_store_n(counter, *counter + 1, __ATOMIC_RELEASE); /* only its proxy writes it */
}

/* Start to fetch for writing what entry number i of a message will change: the first bytes of its span and its tail.
 * The entry is not checked yet. */
static void prefetch_entry(const sp_proxies *r, const sp_proxy_peer *p, const sp_proxy_reader *from,
                           uint32_t i)
{
    sp_proxy_entry e;
    size_t off;
    const uint8_t *ring;
    if (!sp_proxy_peek_entry(from, &p->at, i, &e) || !e.is_span)
        return;
    off = e.position % p->at.ring_bytes;
    ring = r->host_inbox + sp_area_ring_off(&r->area.pinned, p->link[e.queue], e.worker);
    for (size_t k = 0; k < e.bytes && k < PREFETCH_BYTES && off + k < p->at.ring_bytes; k += 64)
        __builtin_prefetch(ring + off + k, 1);
}

/* AGAIN: the frames are not visible to the GPU yet. */
static spccl_status apply_message(const sp_proxy *x, sp_proxy_peer *p, const void *message, size_t bytes)
{
    const sp_proxies *r = x->r;
    const sp_ring_area *area = &r->area.pinned;
    sp_proxy_reader reader;
    sp_proxy_entry e;
    const uint8_t *data = NULL;
    spccl_status st;
    SP_TRY(sp_proxy_open_message(&reader, message, bytes));
    if (p->at.direct && x->r->direct.flush && reader.n_entries > reader.n_credits)
        SP_TRY(r->transport->puts->flush(x->ep, p->rank, 0));
    for (uint32_t i = 0; !p->at.direct && i < PREFETCH_ENTRIES; i++)
        prefetch_entry(r, p, &reader, reader.n_credits + i);
    while ((st = sp_proxy_next_entry(&reader, &p->at, &e, &data)) == SPCCL_OK) {
        uint32_t ring = e.queue * p->at.n_workers + e.worker;
        if (e.is_span) {
            if (!p->at.direct) {
                prefetch_entry(r, p, &reader, reader.next + PREFETCH_ENTRIES - 1);
                sp_proxy_write_span(r->host_inbox + sp_area_ring_off(area, p->link[e.queue], e.worker),
                                    p->at.ring_bytes, &e, data);
            }
            p->at.arrived[ring] += e.bytes;
            store(r->host_inbox, sp_host_tail_off(area, p->link[e.queue], e.worker), p->at.arrived[ring]);
        } else {
            p->at.free_to[ring] = e.position;
            store(r->host_inbox, sp_host_credit_off(area, p->link[e.queue], e.worker), e.position);
        }
        count_arrival(r, e.worker);
    }
    return st == SPCCL_AGAIN ? SPCCL_OK : st;
}

static spccl_status take_messages(sp_proxy *x, sp_proxy_peer *p, bool *moved)
{
    sp_links *links = &x->thread.links;
    for (int i = 0; i < TAKEN_MAX; i++) {
        const void *message = NULL;
        size_t bytes = 0;
        spccl_status st = sp_link_peek(links, p->rank, 0, &message, &bytes);
        if (st == SPCCL_ERR_PEER)
            return note_gone(x->r, p);
        if (st != SPCCL_OK)
            return st == SPCCL_AGAIN ? SPCCL_OK : st;
        st = apply_message(x, p, message, bytes);
        if (st == SPCCL_AGAIN)
            return SPCCL_OK;
        if (st == SPCCL_ERR_PEER)
            return note_gone(x->r, p);
        if (st != SPCCL_OK)
            return SP_FAIL(st, "rank %d sent %s: do all ranks run the same version of spccl?", p->rank,
                           spccl_last_error());
        SP_TRY(sp_link_release(links, p->rank, 0));
        *moved = true;
    }
    return SPCCL_OK;
}

/* ---- sending ---- */

/* The entries of the next message, in x->entries: credits, then spans. */
struct batch {
    uint32_t n_credits, n_spans;
    uint64_t credit_bytes; /* the most that a credit frees */
    size_t data_bytes;
    uint32_t next; /* with spans: the ring behind the last one */
};

/* A position that a kernel of this rank wrote into the outbox, and the bounds that it was checked against. */
struct position {
    const char *what;
    uint32_t queue, worker;
    uint64_t got, least, most;
};

static spccl_status check_here(const sp_proxy_peer *p, const struct position *x)
{
    if (x->got >= x->least && x->got <= x->most)
        return SPCCL_OK;
    return SP_FAIL(SPCCL_ERR_BUG,
                   "a kernel of this rank wrote the %s %" PRIu64
                   " for rank %d (%s of worker %u); wanted %" PRIu64 " to %" PRIu64,
                   x->what, x->got, p->rank, sp_proxy_queue_name(x->queue), x->worker, x->least, x->most);
}

/* Has any of the words that kernels write for a block of workers changed? */
static bool block_changed(const uint64_t *words, const uint64_t *known)
{
    uint64_t changed = 0;
    for (uint32_t i = 0; i < SP_REMOTE_COUNTER_WORKERS; i++)
        changed |= __atomic_load_n(&words[i], __ATOMIC_RELAXED) ^ known[i];
    return changed != 0;
}

/* Number, in the proxy's list, of the next worker from k on whose word differs from the known one; `end` if there is
 * none. The list is made of blocks of consecutive workers (sp_proxy_of). Most rounds find nothing, and this is what they
 * cost, so a block is one step. words, known [n_workers of the group] */
static uint32_t next_changed(const sp_proxy *x, const uint64_t *words, const uint64_t *known, uint32_t k,
                             uint32_t end)
{
    while (k < end) {
        uint32_t worker = x->workers[k];
        bool starts_block = worker % SP_REMOTE_COUNTER_WORKERS == 0 && k + SP_REMOTE_COUNTER_WORKERS <= end;
        if (starts_block && !block_changed(words + worker, known + worker))
            k += SP_REMOTE_COUNTER_WORKERS;
        else if (__atomic_load_n(&words[worker], __ATOMIC_RELAXED) == known[worker])
            k++;
        else
            break;
    }
    return k;
}

static spccl_status collect_credits(sp_proxy *x, const sp_proxy_peer *p, struct batch *b)
{
    for (uint32_t queue = 0; queue < p->at.n_queues; queue++) {
        const uint64_t *words = p->credits[queue], *known = p->at.freed + (size_t)queue * p->at.n_workers;
        uint32_t n = x->n_workers;
        for (uint32_t k = next_changed(x, words, known, 0, n); k < n;
             k = next_changed(x, words, known, k + 1, n)) {
            uint32_t worker = x->workers[k], ring = queue * p->at.n_workers + worker;
            uint64_t now = __atomic_load_n(&words[worker], __ATOMIC_ACQUIRE);
            SP_TRY(check_here(
                p, &(struct position){.what = "credit",
                                      .queue = queue,
                                      .worker = worker,
                                      .got = now,
                                      .least = p->at.freed[ring],
                                      .most = sp_proxy_credit_max(p->at.arrived[ring], p->at.ring_bytes)}));
            if (now - p->at.freed[ring] > b->credit_bytes)
                b->credit_bytes = now - p->at.freed[ring];
            x->entries[b->n_credits++] = (sp_proxy_entry){.queue = queue, .worker = worker, .position = now};
        }
    }
    return SPCCL_OK;
}

/* Most spans that the next message can have: each takes at most two puts, as it may go past the end of its ring. */
static uint32_t runs_max(const sp_proxy *x, const sp_proxy_peer *p)
{
    return p->at.direct ? x->r->transport->puts->room(x->ep, p->rank) / 2 : UINT32_MAX;
}

static const uint8_t *ring_of(const sp_proxies *r, const sp_proxy_peer *p, const sp_proxy_entry *e)
{
    return r->outbox + sp_area_ring_off(&r->area.pinned, p->link[e->queue], e->worker);
}

/* Start to read the first bytes of a span into the cache: sp_proxy_read_span needs them soon. */
static void prefetch_run(const sp_proxies *r, const sp_proxy_peer *p, const sp_proxy_entry *e)
{
    const uint8_t *ring = ring_of(r, p, e);
    size_t off = e->position % p->at.ring_bytes;
    for (size_t i = 0; i < e->bytes && i < PREFETCH_BYTES && off + i < p->at.ring_bytes; i += 64)
        __builtin_prefetch(ring + off + i);
}

/* The span of worker number k of the proxy's list, whose tail has moved. */
static spccl_status collect_run(sp_proxy *x, const sp_proxy_peer *p, uint32_t queue, uint32_t k,
                                struct batch *b)
{
    uint32_t worker = x->workers[k], ring = queue * p->at.n_workers + worker,
             next = queue * x->n_workers + k + 1;
    uint64_t sent = p->at.sent[ring], free_to = p->at.free_to[ring];
    uint64_t tail = __atomic_load_n(&p->tails[queue][worker], __ATOMIC_ACQUIRE);
    sp_proxy_entry *e = &x->entries[b->n_credits + b->n_spans];
    SP_TRY(check_here(p, &(struct position){.what = "tail",
                                            .queue = queue,
                                            .worker = worker,
                                            .got = tail,
                                            .least = sent > free_to ? sent : free_to,
                                            .most = free_to + p->at.ring_bytes}));
    *e = (sp_proxy_entry){.is_span = true,
                          .queue = queue,
                          .worker = worker,
                          .position = sent,
                          .bytes = (uint32_t)(tail - sent)};
    if (!p->at.direct && !sp_proxy_find_skip(ring_of(x->r, p, e), p->at.ring_bytes, e, &e->skipped))
        return SP_FAIL(SPCCL_ERR_BUG,
                       "a kernel of this rank wrote no frames for rank %d (%s of worker %u) from position "
                       "%" PRIu64 " to %" PRIu64,
                       p->rank, sp_proxy_queue_name(queue), worker, sent, tail);
    if (!p->at.direct)
        prefetch_run(x->r, p, e);
    b->n_spans++;
    b->data_bytes += e->bytes - e->skipped;
    b->next = next < p->at.n_queues * x->n_workers ? next : 0;
    return SPCCL_OK;
}

/* From ring p->next on, once round all rings of this proxy's workers. */
static spccl_status collect_runs(sp_proxy *x, const sp_proxy_peer *p, struct batch *b)
{
    uint32_t n = x->n_workers, most = runs_max(x, p);
    uint32_t first = n != 0 ? p->next / n : 0, start = n != 0 ? p->next % n : 0;
    for (uint32_t i = 0; i <= p->at.n_queues; i++) {
        uint32_t queue = (first + i) % p->at.n_queues, from = i == 0 ? start : 0;
        uint32_t end = i == p->at.n_queues ? start : n;
        const uint64_t *words = p->tails[queue], *known = p->at.sent + (size_t)queue * p->at.n_workers;
        for (uint32_t k = next_changed(x, words, known, from, end); k < end;
             k = next_changed(x, words, known, k + 1, end)) {
            if (b->n_spans == most || b->data_bytes >= MESSAGE_BYTES)
                return SPCCL_OK;
            SP_TRY(collect_run(x, p, queue, k, b));
        }
    }
    return SPCCL_OK;
}

static void write_message(const sp_proxy *x, sp_proxy_peer *p, const struct batch *b, uint8_t *message)
{
    uint32_t n_entries = b->n_credits + b->n_spans;
    size_t at = SP_PROXY_HEAD_BYTES + (size_t)n_entries * SP_PROXY_ENTRY_BYTES;
    memset(message + at, 0, sp_proxy_data_off(n_entries) - at);
    at = sp_proxy_data_off(n_entries);
    sp_proxy_put_head(message, b->n_credits, b->n_spans);
    for (uint32_t i = 0; i < n_entries; i++) {
        const sp_proxy_entry *e = &x->entries[i];
        uint32_t ring = e->queue * p->at.n_workers + e->worker;
        sp_proxy_put_entry(message, i, e);
        if (e->is_span && !p->at.direct) {
            sp_proxy_read_span(message + at, ring_of(x->r, p, e), p->at.ring_bytes, e);
            at += e->bytes - e->skipped;
        }
        if (e->is_span)
            p->at.sent[ring] += e->bytes;
        else
            p->at.freed[ring] = e->position;
    }
    if (b->n_spans != 0)
        p->next = b->next;
}

/* A message with credits alone delays the frames that follow it: sending it takes microseconds, and so does the copy
 * warp that fetches it. A thread that sleeps soon would be late, so its credits do not wait. */
static bool may_wait(const sp_proxy *x, sp_proxy_peer *p, const struct batch *b, bool *moved)
{
    int64_t now_ns;
    if (b->n_spans != 0 || x->thread.idle_spin_ns < SP_PROXY_CREDIT_WAIT_NS)
        return false;
    now_ns = sp_now_ns();
    if (p->waiting_since_ns == 0) {
        p->waiting_since_ns = now_ns;
        *moved = true; /* the thread does not sleep before the credits are sent */
    }
    return sp_proxy_may_wait(b->credit_bytes, p->at.ring_bytes, now_ns - p->waiting_since_ns);
}

static spccl_status send_messages(sp_proxy *x, sp_proxy_peer *p, bool *moved)
{
    sp_links *links = &x->thread.links;
    struct batch b = {0};
    void *message = NULL;
    size_t bytes;
    spccl_status st;
    SP_TRY(collect_credits(x, p, &b));
    SP_TRY(collect_runs(x, p, &b));
    if (b.n_credits + b.n_spans == 0 || p->gone_since_ns != 0)
        return SPCCL_OK;
    if (may_wait(x, p, &b, moved))
        return SPCCL_OK;
    if (b.data_bytes < BATCH_BYTES && !sp_link_flushed(links, p->rank, 0, p->n_messages))
        return SPCCL_OK;
    bytes = sp_proxy_data_off(b.n_credits + b.n_spans) + (p->at.direct ? 0 : b.data_bytes);
    st = sp_link_reserve(links, p->rank, 0, bytes, &message);
    if (st == SPCCL_OK && p->at.direct)
        st = sp_proxy_put_spans(x, p, x->entries + b.n_credits, b.n_spans);
    if (st == SPCCL_ERR_PEER)
        return note_gone(x->r, p);
    if (st != SPCCL_OK)
        return st == SPCCL_AGAIN ? SPCCL_OK : st;
    write_message(x, p, &b, message);
    SP_TRY(sp_link_commit(links, p->rank, 0, 0)); /* all messages of proxies are equally urgent */
    p->n_messages++;
    p->waiting_since_ns = 0;
    x->n_bytes_sent += bytes;
    *moved = true;
    return SPCCL_OK;
}

spccl_status sp_proxy_round(sp_proxy *x, bool *moved)
{
    SP_TRY(sp_links_progress(&x->thread.links));
    for (int i = 0; i < x->r->n_peers; i++) {
        SP_TRY(take_messages(x, &x->peers[i], moved));
        SP_TRY(send_messages(x, &x->peers[i], moved));
    }
    return SPCCL_OK;
}
