/* ringlink.c - see ringlink.h. */
#include "transport/local/ringlink.h"

#include "core/base/status.h"
#include "transport/common/transports.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

size_t sp_ring_block_bytes(int n_queues, size_t queue_bytes)
{
    return SP_RING_DATA_OFFSET + (size_t)n_queues * queue_bytes;
}

void sp_ring_link_init(sp_ring_link *link, int rank, int peer, int n_queues, size_t queue_bytes, void *out,
                       void *in, int wake_fd)
{
    memset(link, 0, sizeof *link);
    link->rank = rank;
    link->peer = peer;
    link->n_queues = n_queues;
    link->wake_fd = wake_fd;
    link->out = out;
    link->in = in;
    for (int i = 0; i < n_queues; i++) {
        size_t offset = SP_RING_DATA_OFFSET + (size_t)i * queue_bytes;
        link->tx[i] =
            (sp_spsc_tx){.ctl = &link->out->queues[i], .data = (uint8_t *)out + offset, .cap = queue_bytes};
        link->rx[i] =
            (sp_spsc_rx){.ctl = &link->in->queues[i], .data = (uint8_t *)in + offset, .cap = queue_bytes};
    }
    link->up = true;
}

static sp_ring_endpoint *self(sp_endpoint *ep)
{
    return (sp_ring_endpoint *)ep;
}

size_t sp_ring_message_max(sp_endpoint *ep)
{
    return sp_spsc_message_max(self(ep)->config->queue_bytes);
}

void sp_ring_link_set_gone(sp_ring_link *link, const char *text)
{
    if (link->gone)
        return;
    snprintf(link->gone_text, sizeof link->gone_text, "%s", text);
    link->gone = link->gone_is_new = true;
}

static spccl_status link_gone(const sp_ring_link *link)
{
    return SP_FAIL(SPCCL_ERR_PEER, "rank %d: rank %d %s", link->rank, link->peer, link->gone_text);
}

static spccl_status link_broken(sp_ring_link *link, int queue)
{
    link->broken = true;
    return SP_FAIL(
        SPCCL_ERR_FORMAT,
        "rank %d: the memory shared with rank %d (queue %d) holds an impossible length or position: "
        "memory of rank %d is damaged; start the job again",
        link->rank, link->peer, queue, link->peer);
}

spccl_status sp_ring_reserve(sp_endpoint *ep, int peer, int queue, size_t bytes, void **out)
{
    sp_ring_link *link = &self(ep)->links[peer];
    sp_spsc_tx *q = &link->tx[queue];
    spccl_status st;
    if (bytes == 0 || bytes > sp_spsc_message_max(q->cap))
        return SP_FAIL(SPCCL_ERR_BUG, "rank %d: message of %zu bytes to rank %d; wanted 1 to %zu", link->rank,
                       bytes, link->peer, sp_spsc_message_max(q->cap));
    if (link->broken)
        return link_broken(link, queue);
    if (link->gone)
        return link_gone(link);
    st = sp_spsc_reserve(q, bytes, out);
    if (st == SPCCL_ERR_FORMAT)
        return link_broken(link, queue);
    link->blocked &= ~(1u << queue);
    link->blocked |= (st == SPCCL_AGAIN ? 1u : 0u) << queue;
    return st;
}

spccl_status sp_ring_commit(sp_endpoint *ep, int peer, int queue, uint32_t call)
{
    sp_ring_link *link = &self(ep)->links[peer];
    (void)call; /* a queue has memory of its own: nothing competes */
    if (sp_spsc_commit(&link->tx[queue]) != SPCCL_OK)
        return SP_FAIL(SPCCL_ERR_BUG, "rank %d: commit to rank %d, queue %d, without reserve", link->rank,
                       link->peer, queue);
    /* The load comes first: an exchange at every message would take the cache line from the peer's core. */
    if (atomic_load(&link->out->consumer_sleeps) != 0 && atomic_exchange(&link->out->consumer_sleeps, 0) != 0)
        sp_wake_signal(link->wake_fd);
    return SPCCL_OK;
}

spccl_status sp_ring_peek(sp_endpoint *ep, int peer, int queue, const void **out, size_t *bytes)
{
    sp_ring_link *link = &self(ep)->links[peer];
    spccl_status st = link->broken ? SPCCL_ERR_FORMAT : sp_spsc_peek(&link->rx[queue], out, bytes);
    if (st == SPCCL_ERR_FORMAT)
        return link_broken(link, queue);
    /* `gone` was set before this look at an empty queue, so no earlier message can be missed. */
    return st == SPCCL_AGAIN && link->gone ? link_gone(link) : st;
}

spccl_status sp_ring_release(sp_endpoint *ep, int peer, int queue)
{
    sp_ring_link *link = &self(ep)->links[peer];
    if (sp_spsc_release(&link->rx[queue]) != SPCCL_OK)
        return SP_FAIL(SPCCL_ERR_BUG, "rank %d: release of rank %d, queue %d, without peek", link->rank,
                       link->peer, queue);
    if ((atomic_load(&link->in->producer_waits) & (1u << queue)) != 0 &&
        atomic_exchange(&link->in->producer_waits, 0) != 0)
        sp_wake_signal(link->wake_fd);
    return SPCCL_OK;
}

bool sp_ring_flushed(sp_endpoint *ep, int peer, int queue, uint64_t n)
{
    (void)ep; /* a committed message lies in memory that the peer reads */
    (void)peer;
    (void)queue;
    (void)n;
    return true;
}

int sp_ring_wait_fd(sp_endpoint *ep)
{
    return self(ep)->wait_fd;
}

static spccl_status arm_link(sp_ring_link *link)
{
    bool changed = link->gone_is_new || atomic_load(&link->in->signal) != 0;
    link->gone_is_new = false;
    atomic_store(&link->in->consumer_sleeps, 1);
    if (link->blocked != 0)
        atomic_store(&link->out->producer_waits, link->blocked);
    /* Report each change once. So armed_head keeps what was seen, and `blocked` is cleared where space was
     * found. Otherwise a message that stays in its queue, or space that is no longer needed, would keep this
     * rank awake. A message since the last arm counts as a change even if a peek has seen it: it may have
     * come after the pass that could have used it. A broken index counts too; the next peek or reserve
     * reports it. */
    for (int i = 0; i < link->n_queues; i++) {
        spccl_status in = sp_spsc_rx_look(&link->rx[i]), out = SPCCL_AGAIN;
        if ((link->blocked & (1u << i)) != 0)
            out = sp_spsc_tx_look(&link->tx[i]);
        if (out != SPCCL_AGAIN)
            link->blocked &= ~(1u << i);
        changed = changed || in == SPCCL_ERR_FORMAT || out != SPCCL_AGAIN ||
                  link->armed_head[i] != link->rx[i].head;
        link->armed_head[i] = link->rx[i].head;
        link->broken = link->broken || in == SPCCL_ERR_FORMAT || out == SPCCL_ERR_FORMAT;
    }
    return changed ? SPCCL_AGAIN : SPCCL_OK;
}

spccl_status sp_ring_arm(sp_endpoint *ep)
{
    spccl_status st = SPCCL_OK;
    for (int i = 0; i < self(ep)->config->world_size; i++)
        if (self(ep)->links[i].up && arm_link(&self(ep)->links[i]) != SPCCL_OK)
            st = SPCCL_AGAIN;
    if (st != SPCCL_OK)
        sp_ring_disarm(ep);
    return st;
}

void sp_ring_disarm(sp_endpoint *ep)
{
    for (int i = 0; i < self(ep)->config->world_size; i++) {
        sp_ring_link *link = &self(ep)->links[i];
        if (!link->up)
            continue;
        atomic_store_explicit(&link->in->consumer_sleeps, 0, memory_order_relaxed);
        atomic_store_explicit(&link->out->producer_waits, 0, memory_order_relaxed);
    }
    sp_wake_drain(self(ep)->wake_fd);
}

void sp_ring_signal(sp_ring_link *link)
{
    atomic_store(&link->out->signal, 1);
    sp_wake_signal(link->wake_fd);
}

bool sp_ring_take_signal(sp_ring_link *link)
{
    return atomic_load_explicit(&link->in->signal, memory_order_acquire) != 0 &&
           atomic_exchange(&link->in->signal, 0) != 0;
}

spccl_status sp_wake_open(int *out)
{
    int fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (fd < 0)
        return SP_FAIL_ERRNO(SPCCL_ERR_SYSTEM, "eventfd");
    *out = fd;
    return SPCCL_OK;
}

void sp_wake_signal(int wake_fd)
{
    uint64_t one = 1;
    ssize_t n;
    do
        n = write(wake_fd, &one, sizeof one);
    while (n < 0 && errno == EINTR); /* EAGAIN: the counter is full, so wake_fd is readable already */
}

void sp_wake_drain(int wake_fd)
{
    uint64_t n;
    while (read(wake_fd, &n, sizeof n) < 0 && errno == EINTR)
        continue;
}

double sp_local_ns_per_byte(sp_endpoint *ep, int peer)
{
    (void)ep;
    (void)peer;
    return SP_LOCAL_NS_PER_BYTE;
}
