/* remote.c - start and end of the proxy, and its thread; see remote.h. */
#include "core/gpu/remote.h"

#include "core/base/clock.h"
#include "core/base/log.h"
#include "core/base/mem.h"
#include "core/base/thread.h"

#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <sys/eventfd.h>
#include <unistd.h>

/* Capacity of the queue to a peer, at least. */
#define QUEUE_BYTES ((size_t)2 << 20)
#define CONNECT_STEP_NS 200000
#define STILL_NS (20 * 1000000)
/* An idle proxy sleeps half as long as it has been idle: at least SLEEP_NS, at most POLL_NS. Once it was idle for
 * ASLEEP_NS and no kernel of the group can be running, it sleeps until a launch, a message, or for ASLEEP_NS. A graph
 * may be replayed without a call of this library, so a group that was captured is polled every POLL_NS. */
#define SLEEP_NS 20000
#define POLL_NS 1000000
#define ASLEEP_NS (INT64_C(100) * 1000000)

spccl_status sp_remote_transport(const sp_gpu_comm *g, const sp_transport **out)
{
    const sp_transport *t = NULL;
    for (int p = 0; p < g->comm->world_size; p++) {
        const sp_transport *its = g->is_remote[p] ? g->comm->links.peers[p].transport : NULL;
        if (its != NULL && t != NULL && its != t)
            return SP_FAIL(
                SPCCL_ERR_UNSUPPORTED,
                "rank %d reaches other hosts over %s and %s: GPU collectives between hosts need one "
                "transport (SPCCL_TRANSPORTS)",
                g->comm->rank, t->name, its->name);
        t = its != NULL ? its : t;
    }
    *out = t;
    return SPCCL_OK;
}

/* ---- opening ---- */

static spccl_status make_peer(sp_remote *r, int rank)
{
    const spccl_comm *comm = r->g->comm;
    sp_remote_peer *p = &r->peers[r->n_peers];
    uint32_t world_size = (uint32_t)comm->world_size, n = SP_INBOX_QUEUES * r->g->shape.n_workers;
    p->memory = sp_calloc(4 * (size_t)n, sizeof *p->memory);
    if (p->memory == NULL)
        return SP_FAIL(SPCCL_ERR_NOMEM, "positions of %u rings", n);
    r->n_peers++;
    p->rank = rank;
    p->slot = sp_inbox_slot((uint32_t)comm->rank, (uint32_t)rank, world_size);
    r->area.slots |= 1u << p->slot;
    p->slot_there = sp_inbox_slot((uint32_t)rank, (uint32_t)comm->rank, world_size);
    p->at = (sp_remote_positions){.sent = p->memory,
                                  .free_to = p->memory + n,
                                  .arrived = p->memory + 2 * (size_t)n,
                                  .freed = p->memory + 3 * (size_t)n,
                                  .n_workers = r->g->shape.n_workers,
                                  .ring_bytes = sp_inbox_ring_bytes(r->g->shape)};
    return SPCCL_OK;
}

static spccl_status open_endpoint(sp_remote *r)
{
    const spccl_comm *comm = r->g->comm;
    sp_endpoint_config ec = {.rank = comm->rank,
                             .world_size = comm->world_size,
                             .group_tag = comm->links.group_tag ^ UINT64_C(0x5350525847505573),
                             .n_queues = 1,
                             .queue_bytes = QUEUE_BYTES,
                             .n_sockets = 0, /* the transport's default */
                             .deadline_ns = sp_deadline_in_ms(comm->timeout_ms)};
    spccl_status st;
    while (ec.queue_bytes / 4 <
           sp_remote_message_max(r)) /* a transport takes messages of a quarter of a queue */
        ec.queue_bytes *= 2;
    memcpy(ec.secret, comm->links.secret, sizeof ec.secret);
    memcpy(ec.host, comm->links.host, sizeof ec.host);
    st = r->transport->open(&ec, &r->ep);
    explicit_bzero(&ec, sizeof ec);
    SP_TRY(st);
    r->transport_fd = r->transport->wait_fd(r->ep);
    r->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    return r->wake_fd >= 0 ? SPCCL_OK : SP_FAIL_ERRNO(SPCCL_ERR_SYSTEM, "rank %d: eventfd", comm->rank);
}

static spccl_status open_memory(sp_remote *r)
{
    sp_gpu_comm *g = r->g;
    size_t heard_bytes = ((size_t)sp_remote_n_bells(g->shape) + 1) * sizeof *r->area.heard;
    void *host = NULL, *device = NULL, *zeros = NULL;
    spccl_status st;
    SP_TRY(g->ops->pinned_create(sp_inbox_bytes(g->shape), &host, &device));
    r->outbox = host;
    r->outbox_device = device;
    SP_TRY(g->ops->pinned_create(sp_remote_mirror_bytes(g->shape), &host, &device));
    r->mirror = host;
    r->area.mirror = device;
    r->area.n_bells = sp_remote_n_bells(g->shape);
    r->area.bells = (const uint32_t *)(const void *)(r->area.mirror + sp_remote_bells_off(g->shape));
    r->area.ended = (uint32_t *)(void *)((uint8_t *)device + sp_remote_ended_off(g->shape));
    zeros = sp_calloc(1, heard_bytes);
    if (zeros == NULL)
        return SP_FAIL(SPCCL_ERR_NOMEM, "%zu bytes", heard_bytes);
    st = g->ops->upload(g->device.ordinal, zeros, heard_bytes, &device);
    sp_free(zeros);
    if (st == SPCCL_OK)
        r->area.heard = device;
    return st;
}

spccl_status sp_remote_open(sp_gpu_comm *g)
{
    sp_remote *r = sp_calloc(1, sizeof *r);
    if (r == NULL)
        return SP_FAIL(SPCCL_ERR_NOMEM, "the proxy: %zu bytes", sizeof *r);
    g->remote = r;
    r->g = g;
    r->wake_fd = -1;
    SP_TRY(sp_remote_transport(g, &r->transport));
    r->entries = sp_calloc(2 * SP_INBOX_QUEUES * (size_t)g->shape.n_workers, sizeof *r->entries);
    if (r->entries == NULL)
        return SP_FAIL(SPCCL_ERR_NOMEM, "the proxy: entries for %u workers", g->shape.n_workers);
    for (int p = 0; p < g->comm->world_size; p++)
        if (g->is_remote[p])
            SP_TRY(make_peer(r, p));
    SP_TRY(open_memory(r));
    return open_endpoint(r);
}

/* ---- connecting ---- */

/* What a rank tells the others. */
struct address {
    int32_t status; /* not SPCCL_OK: the endpoint has no address */
    uint32_t n_bytes;
    uint8_t bytes[SP_ADDRESS_BYTES_MAX];
};

static spccl_status swap_addresses(sp_remote *r, struct address *all)
{
    struct address mine = {0};
    size_t n = 0;
    mine.status = (int32_t)r->transport->address(r->ep, mine.bytes, &n);
    mine.n_bytes = (uint32_t)n;
    return spccl_all_gather(r->g->comm, &mine, all, sizeof mine, SPCCL_UINT8, NULL);
}

static spccl_status add_peers(sp_remote *r, const struct address *all)
{
    for (int i = 0; i < r->n_peers; i++) {
        int p = r->peers[i].rank;
        char why[160] = "its endpoint has no address";
        if (all[p].status != SPCCL_OK || all[p].n_bytes > SP_ADDRESS_BYTES_MAX ||
            !r->transport->can_reach(r->ep, all[p].bytes, all[p].n_bytes, why, sizeof why))
            return SP_FAIL(SPCCL_ERR_UNREACHABLE, "rank %d: the proxy of rank %d over %s: %s",
                           r->g->comm->rank, p, r->transport->name, why);
        SP_TRY(r->transport->add_peer(r->ep, p, all[p].bytes, all[p].n_bytes));
    }
    return SPCCL_OK;
}

static spccl_status connect_peers(sp_remote *r, int64_t deadline_ns)
{
    int64_t asked_ns = sp_now_ns();
    for (;;) {
        spccl_status st = r->transport->connect_step(r->ep);
        if (st != SPCCL_AGAIN)
            return st;
        if (sp_deadline_passed(deadline_ns))
            return SP_FAIL(SPCCL_ERR_TIMEOUT, "rank %d: proxies did not connect before the deadline",
                           r->g->comm->rank);
        if (sp_now_ns() - asked_ns > STILL_NS) {
            SP_TRY(sp_comm_poll_peers(r->g->comm));
            SP_TRY(sp_comm_broken(r->g->comm));
            asked_ns = sp_now_ns();
        }
        nanosleep(&(struct timespec){.tv_nsec = CONNECT_STEP_NS}, NULL);
    }
}

/* ---- the thread ---- */

static void drain_wake_fd(const sp_remote *r)
{
    uint64_t count;
    if (read(r->wake_fd, &count, sizeof count) < 0 && errno != EAGAIN)
        sp_log(SP_LOG_ERROR, r->g->comm->rank, "proxy: reading its eventfd failed: errno %d", errno);
}

/* Can a kernel of the group be running? The last launch tells the mirror its end. */
static bool is_idle(const sp_remote *r)
{
    const uint32_t *ended = (const uint32_t *)(const void *)(r->mirror + sp_remote_ended_off(r->g->shape));
    return !atomic_load(&r->captured) &&
           __atomic_load_n(ended, __ATOMIC_ACQUIRE) == atomic_load(&r->n_launches);
}

/* How long a proxy may sleep that has been idle for so long. */
static int64_t sleep_ns(const sp_remote *r, int64_t idle_ns)
{
    if (idle_ns >= ASLEEP_NS)
        return is_idle(r) ? ASLEEP_NS : POLL_NS;
    return idle_ns / 2 < SLEEP_NS ? SLEEP_NS : idle_ns / 2 > POLL_NS ? POLL_NS : idle_ns / 2;
}

/* Nothing moved in the last round: yield, or sleep. *active_ns = now if a launch came. */
static void rest(sp_remote *r, uint32_t *n_launches, int64_t *active_ns)
{
    int64_t now_ns = sp_now_ns(), ns = sleep_ns(r, now_ns - *active_ns);
    struct pollfd fds[2] = {{.fd = r->transport_fd, .events = POLLIN}, {.fd = r->wake_fd, .events = POLLIN}};
    uint32_t n;
    if (now_ns - *active_ns < r->g->comm->spin_ns) {
        sched_yield(); /* a peer's proxy may need this core */
        return;
    }
    /* A launch counts first and reads `sleeping` then: either it wakes this thread, or this thread sees it. */
    atomic_store(&r->sleeping, true);
    n = atomic_load(&r->n_launches);
    if (n != *n_launches) {
        *n_launches = n;
        *active_ns = now_ns;
    } else if (!atomic_load(&r->stop)) {
        if (r->transport->arm(r->ep) == SPCCL_OK) {
            (void)ppoll(fds, 2, &(struct timespec){.tv_nsec = ns}, NULL);
            r->transport->disarm(r->ep);
            drain_wake_fd(r);
        } else {
            sched_yield();
        }
    }
    atomic_store(&r->sleeping, false);
}

static void break_group(sp_remote *r, spccl_status st)
{
    spccl_comm *comm = r->g->comm;
    char text[sizeof comm->error];
    snprintf(text, sizeof text, "rank %d, group \"%s\", GPU %d: %.700s", comm->rank, comm->name,
             r->g->device.ordinal, sp_without_rank(spccl_last_error(), comm->rank));
    if (sp_comm_break(comm, st, text))
        sp_log(SP_LOG_ERROR, comm->rank, "%s", text);
}

/* Nothing is carried any more; wait for the end. */
static void wait_for_stop(sp_remote *r)
{
    struct pollfd fd = {.fd = r->wake_fd, .events = POLLIN};
    while (!atomic_load(&r->stop)) {
        atomic_store(&r->sleeping, true);
        if (poll(&fd, 1, (int)(ASLEEP_NS / 1000000)) > 0)
            drain_wake_fd(r);
    }
}

static bool is_aborted(const sp_remote *r)
{
    return __atomic_load_n(&r->g->control->abort, __ATOMIC_RELAXED) != 0;
}

static void *proxy(void *arg)
{
    sp_remote *r = arg;
    int64_t active_ns = sp_now_ns();
    uint32_t n_launches = 0;
    spccl_status st = SPCCL_OK;
    while (st == SPCCL_OK && !atomic_load(&r->stop) && !is_aborted(r)) {
        bool moved = false;
        st = sp_remote_round(r, &moved);
        if (moved)
            active_ns = sp_now_ns();
        else if (st == SPCCL_OK)
            rest(r, &n_launches, &active_ns);
    }
    if (st != SPCCL_OK)
        break_group(r, st);
    wait_for_stop(r);
    return NULL;
}

spccl_status sp_remote_start(sp_remote *r, int64_t deadline_ns)
{
    struct address all[SP_GPU_RANKS_MAX];
    SP_TRY(swap_addresses(r, all));
    SP_TRY(add_peers(r, all));
    SP_TRY(connect_peers(r, deadline_ns));
    SP_TRY(sp_thread_start("spccl-proxy", proxy, r, &r->thread));
    r->started = true;
    sp_log(SP_LOG_INFO, r->g->comm->rank,
           "group \"%s\": a proxy thread carries the rings of %d ranks on other hosts over %s; %zu bytes of "
           "pinned memory",
           r->g->comm->name, r->n_peers, r->transport->name,
           sp_inbox_bytes(r->g->shape) + sp_remote_mirror_bytes(r->g->shape));
    return SPCCL_OK;
}

static void write_wake_fd(const sp_remote *r)
{
    uint64_t one = 1;
    if (write(r->wake_fd, &one, sizeof one) < 0 && errno != EAGAIN)
        sp_log(SP_LOG_ERROR, r->g->comm->rank, "proxy: writing its eventfd failed: errno %d", errno);
}

void sp_remote_wake(sp_remote *r, bool captured)
{
    if (r == NULL)
        return;
    if (captured)
        atomic_store(&r->captured, true);
    atomic_fetch_add(&r->n_launches, 1);
    if (atomic_load(&r->sleeping))
        write_wake_fd(r);
}

void sp_remote_leave(sp_remote *r)
{
    if (r != NULL)
        atomic_store(&r->leaving, true);
}

/* ---- the end ---- */

static void stop_thread(sp_remote *r)
{
    if (!r->started)
        return;
    atomic_store(&r->stop, true);
    write_wake_fd(r);
    (void)pthread_join(r->thread, NULL);
    r->started = false;
}

static void close_all(sp_remote *r, bool keep_memory)
{
    const sp_gpu_ops *ops = r->g->ops;
    stop_thread(r);
    if (r->ep != NULL)
        r->transport->close(r->ep);
    if (r->wake_fd >= 0)
        close(r->wake_fd);
    if (!keep_memory) {
        ops->unload(r->g->device.ordinal, r->area.heard);
        ops->pinned_destroy(r->outbox);
        ops->pinned_destroy(r->mirror);
    }
    for (int i = 0; i < r->n_peers; i++)
        sp_free(r->peers[i].memory);
    sp_free(r->entries);
    sp_free(r);
}

void sp_remote_close(sp_remote *r)
{
    if (r != NULL)
        close_all(r, false);
}

void sp_remote_abandon(sp_remote *r)
{
    if (r != NULL)
        close_all(r, true);
}
