/* channel_port.c - start, end and thread of the proxy of port channels; see channel_port.h. */
#include "core/gpu/channel_port.h"

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

/* Capacity of the queue to a peer. A transport takes messages of a quarter of it. */
#define QUEUE_BYTES ((size_t)2 << 20)
_Static_assert(SP_PORT_HEAD_BYTES + SP_PORT_CHUNK_BYTES <= QUEUE_BYTES / 4, "the largest message");
/* After so long all ranks compare their status, so that the failure of one ends the creation on all. */
#define CONNECT_NS (INT64_C(50) * 1000000)
#define CONNECT_STEP_NS 200000
/* An idle proxy polls for SPCCL_SPIN_US, then it sleeps for half as long as it has been idle: at most POLL_NS. No call
 * tells it of a kernel that posts triggers, so POLL_NS is what the first of them may wait. */
#define SLEEP_NS 20000
#define POLL_NS 1000000
#define DRAIN_STEP_NS 100000

/* ---- opening ---- */

static spccl_status open_endpoint(const sp_port *port, sp_port_endpoint *e)
{
    const spccl_comm *comm = port->c->g->comm;
    sp_endpoint_config ec = {.rank = comm->rank,
                             .world_size = comm->world_size,
                             .group_tag = comm->links.group_tag ^
                                          (UINT64_C(0x53504348414e4e00) + port->c->g->n_channel_sets),
                             .n_queues = 1,
                             .queue_bytes = QUEUE_BYTES,
                             .deadline_ns = sp_deadline_in_ms(comm->timeout_ms)};
    spccl_status st;
    memcpy(ec.secret, comm->links.secret, sizeof ec.secret);
    memcpy(ec.host, comm->links.host, sizeof ec.host);
    st = e->transport->open(&ec, &e->ep);
    explicit_bzero(&ec, sizeof ec);
    return st;
}

static void find_words(sp_port *port, int peer)
{
    const spccl_channels *c = port->c;
    const spccl_comm *comm = c->g->comm;
    uint32_t slot = sp_inbox_slot((uint32_t)comm->rank, (uint32_t)peer, (uint32_t)comm->world_size);
    uint8_t *memory = c->window_host;
    port->peers[peer].channels = port->channels + (size_t)slot * c->n_per_peer;
    for (uint32_t i = 0; i < c->n_per_peer; i++) {
        uint64_t number = sp_channels_number(c, slot, i), line = number * SP_CHANNELS_LINE;
        port->peers[peer].channels[i] = (sp_port_channel){
            .posted = (uint64_t *)(void *)(memory + c->layout.posted_off + line),
            .done = (uint64_t *)(void *)(memory + c->layout.done_off + line),
            .signals = (uint64_t *)(void *)(memory + c->layout.signals_off + line),
            .fifo = (spccl_trigger *)(void *)(memory + c->layout.fifos_off) + number * c->n_triggers};
    }
}

spccl_status sp_port_open(spccl_channels *c)
{
    const spccl_comm *comm = c->g->comm;
    size_t n = (size_t)(comm->world_size - 1) * c->n_per_peer;
    sp_port *port = sp_calloc(1, sizeof *port);
    c->g->n_channel_sets++; /* after a failure too: the number is the same on all ranks */
    if (port == NULL)
        return SP_FAIL(SPCCL_ERR_NOMEM, "the proxy of a set of channels: %zu bytes", sizeof *port);
    c->port = port;
    port->c = c;
    port->stop_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (port->stop_fd < 0)
        return SP_FAIL_ERRNO(SPCCL_ERR_SYSTEM, "rank %d: eventfd", comm->rank);
    port->channels = sp_calloc(n != 0 ? n : 1, sizeof *port->channels);
    if (port->channels == NULL)
        return SP_FAIL(SPCCL_ERR_NOMEM, "the proxy of %zu channels", n);
    for (int i = 0; i < comm->links.n_endpoints; i++) {
        port->endpoints[i].transport = comm->links.transports[i];
        port->n_endpoints = i + 1;
        SP_TRY(open_endpoint(port, &port->endpoints[i]));
    }
    for (int p = 0; p < comm->world_size; p++)
        for (int i = 0; p != comm->rank && i < port->n_endpoints; i++)
            if (port->endpoints[i].transport == comm->links.peers[p].transport) {
                port->peers[p].over = &port->endpoints[i];
                find_words(port, p);
            }
    return SPCCL_OK;
}

/* ---- connecting ---- */

/* What a rank tells the others of one endpoint. */
struct address {
    char transport[24]; /* "": none */
    uint32_t n_bytes, reserved;
    uint8_t bytes[SP_ADDRESS_BYTES_MAX];
};

static spccl_status find_addresses(const sp_port *port, struct address *mine)
{
    for (int i = 0; i < port->n_endpoints; i++) {
        const sp_port_endpoint *e = &port->endpoints[i];
        size_t n = 0;
        SP_TRY(e->transport->address(e->ep, mine[i].bytes, &n));
        mine[i].n_bytes = (uint32_t)n;
        snprintf(mine[i].transport, sizeof mine[i].transport, "%s", e->transport->name);
    }
    return SPCCL_OK;
}

/* its [SP_TRANSPORTS_MAX]: the addresses of this peer. */
static spccl_status add_peer(const sp_port *port, int peer, const struct address *its)
{
    const sp_port_endpoint *e = port->peers[peer].over;
    const sp_transport *t = e->transport;
    char why[160] = "it has no endpoint of this transport";
    for (int i = 0; i < SP_TRANSPORTS_MAX; i++)
        if (strncmp(its[i].transport, t->name, sizeof its[i].transport) == 0 &&
            its[i].n_bytes <= SP_ADDRESS_BYTES_MAX &&
            t->can_reach(e->ep, its[i].bytes, its[i].n_bytes, why, sizeof why))
            return t->add_peer(e->ep, peer, its[i].bytes, its[i].n_bytes);
    return SP_FAIL(SPCCL_ERR_UNREACHABLE, "rank %d: channels to rank %d over %s: %s", port->c->g->comm->rank,
                   peer, t->name, why);
}

/* All ranks exchange the addresses of their endpoints. */
static spccl_status meet(const sp_port *port)
{
    spccl_comm *comm = port->c->g->comm;
    size_t bytes = SP_TRANSPORTS_MAX * sizeof(struct address);
    struct address *mine = sp_calloc((size_t)comm->world_size + 1, bytes), *all = NULL;
    spccl_status st = mine == NULL ? SP_FAIL(SPCCL_ERR_NOMEM, "%zu bytes for addresses", bytes)
                                   : find_addresses(port, mine);
    SP_TRY_TO(out, st, sp_gpu_agree(comm, st));
    all = mine + SP_TRANSPORTS_MAX;
    st = spccl_all_gather(comm, mine, all, bytes, SPCCL_UINT8, NULL);
    for (int p = 0; st == SPCCL_OK && p < comm->world_size; p++)
        if (port->peers[p].over != NULL)
            st = add_peer(port, p, all + (size_t)p * SP_TRANSPORTS_MAX);
    st = sp_gpu_agree(comm, st);
out:
    sp_free(mine);
    return st;
}

/* All endpoints connect at the same time. AGAIN: some are not done. */
static spccl_status connect_step(sp_port *port)
{
    spccl_status all = SPCCL_OK;
    for (int i = 0; i < port->n_endpoints; i++) {
        sp_port_endpoint *e = &port->endpoints[i];
        spccl_status st = e->connected ? SPCCL_OK : e->transport->connect_step(e->ep);
        if (st != SPCCL_OK && st != SPCCL_AGAIN)
            return st;
        e->connected = st == SPCCL_OK;
        all = e->connected ? all : SPCCL_AGAIN;
    }
    return all;
}

static spccl_status connect_for_a_while(sp_port *port, int64_t deadline_ns)
{
    int64_t until_ns = sp_now_ns() + CONNECT_NS;
    for (;;) {
        spccl_status st = connect_step(port);
        if (st != SPCCL_AGAIN)
            return st;
        if (sp_deadline_passed(deadline_ns))
            return SP_FAIL(SPCCL_ERR_TIMEOUT, "rank %d: the channels did not connect before the deadline",
                           port->c->g->comm->rank);
        if (sp_now_ns() > until_ns)
            return SPCCL_AGAIN;
        nanosleep(&(struct timespec){.tv_nsec = CONNECT_STEP_NS}, NULL);
    }
}

/* ---- the thread ---- */

/* Nothing moved for idle_ns: yield or sleep. */
static void rest(sp_port *port, int64_t idle_ns)
{
    struct pollfd fds[SP_TRANSPORTS_MAX + 1] = {{.fd = port->stop_fd, .events = POLLIN}};
    int64_t ns = idle_ns / 2 < SLEEP_NS ? SLEEP_NS : idle_ns / 2 > POLL_NS ? POLL_NS : idle_ns / 2;
    int n = 0;
    if (idle_ns < port->c->g->comm->spin_ns) {
        sched_yield();
        return;
    }
    for (; n < port->n_endpoints; n++) {
        const sp_port_endpoint *e = &port->endpoints[n];
        if (e->transport->arm(e->ep) != SPCCL_OK)
            break;
        fds[n + 1] = (struct pollfd){.fd = e->transport->wait_fd(e->ep), .events = POLLIN};
    }
    if (n == port->n_endpoints)
        (void)ppoll(fds, (nfds_t)n + 1, &(struct timespec){.tv_nsec = ns}, NULL);
    while (n-- > 0)
        port->endpoints[n].transport->disarm(port->endpoints[n].ep);
}

static bool is_aborted(const sp_port *port)
{
    return __atomic_load_n(&port->c->g->control->abort, __ATOMIC_RELAXED) != 0;
}

static void break_group(const sp_port *port, spccl_status st)
{
    const sp_gpu_comm *g = port->c->g;
    char text[sizeof g->comm->error];
    snprintf(text, sizeof text, "rank %d, group \"%s\", GPU %d: %.700s", g->comm->rank, g->comm->name,
             g->device.ordinal, sp_without_rank(spccl_last_error(), g->comm->rank));
    if (sp_comm_break(g->comm, st, text))
        sp_log(SP_LOG_ERROR, g->comm->rank, "%s", text);
}

static void *proxy(void *arg)
{
    sp_port *port = arg;
    int64_t active_ns = sp_now_ns();
    spccl_status st = SPCCL_OK;
    while (st == SPCCL_OK && !atomic_load(&port->stop) && !is_aborted(port)) {
        bool moved = false;
        st = sp_port_round(port, &moved);
        if (moved)
            active_ns = sp_now_ns();
        else if (st == SPCCL_OK)
            rest(port, sp_now_ns() - active_ns);
    }
    if (st != SPCCL_OK)
        break_group(port, st);
    return NULL;
}

spccl_status sp_port_start(spccl_channels *c, spccl_status opened)
{
    spccl_comm *comm = c->g->comm;
    sp_port *port = c->port;
    int64_t deadline_ns = sp_deadline_in_ms(comm->timeout_ms);
    spccl_status st;
    SP_TRY(sp_gpu_agree(comm, opened));
    SP_TRY(meet(port));
    do
        st = sp_gpu_agree(comm, connect_for_a_while(port, deadline_ns));
    while (st == SPCCL_AGAIN);
    SP_TRY(st);
    st = sp_thread_start("spccl-channels", proxy, port, &port->thread);
    port->started = st == SPCCL_OK;
    return sp_gpu_agree(comm, st);
}

/* ---- the end ---- */

void sp_port_drain(sp_port *port)
{
    int64_t deadline_ns;
    if (port == NULL)
        return;
    deadline_ns = sp_deadline_in_ms(port->c->g->comm->timeout_ms);
    while (!sp_port_is_done(port) && sp_comm_broken(port->c->g->comm) == SPCCL_OK &&
           !sp_deadline_passed(deadline_ns))
        nanosleep(&(struct timespec){.tv_nsec = DRAIN_STEP_NS}, NULL);
}

void sp_port_close(sp_port *port)
{
    uint64_t one = 1;
    if (port == NULL)
        return;
    atomic_store(&port->stop, true);
    if (port->started) {
        if (write(port->stop_fd, &one, sizeof one) < 0 && errno != EAGAIN)
            sp_log(SP_LOG_ERROR, port->c->g->comm->rank, "channels: writing an eventfd failed: errno %d",
                   errno);
        (void)pthread_join(port->thread, NULL);
    }
    for (int i = 0; i < port->n_endpoints; i++)
        if (port->endpoints[i].ep != NULL)
            port->endpoints[i].transport->close(port->endpoints[i].ep);
    if (port->stop_fd >= 0)
        close(port->stop_fd);
    sp_free(port->channels);
    sp_free(port);
}
