/* proxy_thread.c - see proxy_thread.h. */
#include "core/gpu/proxy/proxy_thread.h"

#include "core/base/clock.h"
#include "core/base/cores.h"
#include "core/base/log.h"
#include "core/base/mem.h"
#include "core/base/thread.h"
#include "core/gpu/gpu_direct.h"
#include "core/run/boot_links.h"

#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <sys/eventfd.h>
#include <unistd.h>

#define CONNECT_STEP_NS 200000
/* An idle thread sleeps for 1 / IDLE_PER_SLEEP of the time that it has been idle: at least SLEEP_NS, at most
 * SP_PROXY_POLL_NS. So a kernel of a captured graph, which wakes nobody, waits for little of the gap before it. Once it was
 * idle for ASLEEP_NS and no kernel can need it, it sleeps until a wake, a message, or for ASLEEP_NS. A thread of port
 * channels never knows that: after SP_PROXY_QUIET_NS it sleeps for SP_PROXY_QUIET_POLL_NS. */
#define IDLE_PER_SLEEP 16
#define SLEEP_NS 20000
#define ASLEEP_NS (INT64_C(100) * 1000000)
/* Where each rank has this many cores, a thread polls for longer than SPCCL_DEBUG_SPIN_US before it sleeps: while a kernel
 * may need it, and otherwise for as long as a program may take from the end of one collective to the next call. Waking
 * a thread takes tens of microseconds. */
#define CORES_TO_SPIN 4u
#define BUSY_SPIN_NS INT64_C(2000000)
#define IDLE_SPIN_NS INT64_C(200000)

uint32_t sp_proxy_ranks_here(const spccl_comm *comm)
{
    const sp_hosts *hosts = comm != NULL ? comm->links.hosts : NULL;
    return hosts == NULL ? 1 : (uint32_t)sp_hosts_size(hosts, hosts->host_of[comm->rank]);
}

/* ---- start ---- */

spccl_status sp_proxy_thread_open(sp_proxy_thread *t, sp_gpu_comm *g)
{
    t->g = g;
    t->busy_spin_ns = t->idle_spin_ns = g->comm->spin_ns;
    if (sp_usable_cores() >= CORES_TO_SPIN * sp_proxy_ranks_here(g->comm)) {
        t->busy_spin_ns = t->busy_spin_ns < BUSY_SPIN_NS ? BUSY_SPIN_NS : t->busy_spin_ns;
        t->idle_spin_ns = t->idle_spin_ns < IDLE_SPIN_NS ? IDLE_SPIN_NS : t->idle_spin_ns;
    }
    t->links.rank = g->comm->rank;
    t->links.world_size = g->comm->world_size;
    t->links.tcp_too = g->comm->links.tcp_too;
    t->links.peers = sp_calloc((size_t)g->comm->world_size, sizeof *t->links.peers);
    t->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (t->links.peers == NULL)
        return SP_FAIL(SPCCL_ERR_NOMEM, "rank %d: links of a proxy", g->comm->rank);
    return t->wake_fd >= 0 ? SPCCL_OK : SP_FAIL_ERRNO(SPCCL_ERR_SYSTEM, "rank %d: eventfd", g->comm->rank);
}

/* The endpoint of a transport; NULL: it is not open. */
static sp_endpoint *find_endpoint(const sp_links *links, const sp_transport *t)
{
    for (int i = 0; i < links->n_endpoints; i++)
        if (links->transports[i] == t)
            return links->endpoints[i];
    return NULL;
}

spccl_status sp_proxy_thread_add(sp_proxy_thread *t, uint64_t peers, const sp_endpoint_config *config)
{
    const spccl_comm *comm = t->g->comm;
    sp_endpoint_config ec = *config;
    char gpu[256];
    spccl_status st = SPCCL_OK;
    t->peers = peers;
    ec.rank = comm->rank;
    ec.world_size = comm->world_size;
    ec.group_tag ^= comm->links.group_tag;
    ec.n_queues = 1;
    ec.rates_decide = comm->links.rates_decide;
    ec.gpu = gpu;
    ec.open_control = sp_links_open_tcp;
    ec.owner = &t->links;
    sp_gpu_direct_find_folder(t->g->ops, t->g->device.ordinal, gpu);
    memcpy(ec.secret, comm->links.secret, sizeof ec.secret);
    memcpy(ec.host, comm->links.host, sizeof ec.host);
    for (int p = 0; p < comm->world_size && st == SPCCL_OK; p++)
        if ((peers >> p & 1) != 0 && find_endpoint(&t->links, comm->links.peers[p].transport) == NULL)
            st = sp_links_add(&t->links, comm->links.peers[p].transport, &ec);
    if (st == SPCCL_OK && t->links.tcp != NULL && find_endpoint(&t->links, sp_transport_find("tcp")) == NULL)
        st = sp_links_add(&t->links, sp_transport_find("tcp"), &ec);
    explicit_bzero(&ec, sizeof ec);
    return st;
}

/* ---- connecting ---- */

/* What a rank tells the others of one endpoint. */
struct address {
    char transport[24]; /* "": none */
    uint32_t n_bytes, reserved;
    uint8_t bytes[SP_ADDRESS_BYTES_MAX];
};

/* mine [SP_TRANSPORTS_MAX] */
static spccl_status find_addresses(const sp_links *links, struct address *mine)
{
    for (int i = 0; i < links->n_endpoints; i++) {
        size_t n = 0;
        SP_TRY(links->transports[i]->address(links->endpoints[i], mine[i].bytes, &n));
        mine[i].n_bytes = (uint32_t)n;
        snprintf(mine[i].transport, sizeof mine[i].transport, "%s", links->transports[i]->name);
    }
    return SPCCL_OK;
}

/* its [SP_TRANSPORTS_MAX]: the addresses of the same thread of a peer. */
static sp_published_transport find_address(const struct address *its, const char *transport)
{
    for (int i = 0; i < SP_TRANSPORTS_MAX; i++)
        if (strncmp(its[i].transport, transport, sizeof its[i].transport) == 0 &&
            its[i].n_bytes <= SP_ADDRESS_BYTES_MAX)
            return (sp_published_transport){.address = its[i].bytes, .address_bytes = its[i].n_bytes};
    return (sp_published_transport){0};
}

static spccl_status add_peer(sp_proxy_thread *t, int peer, const struct address *its)
{
    const sp_transport *wanted = t->g->comm->links.peers[peer].transport;
    sp_published_transport control = find_address(its, "tcp"), at;
    char why[160] = "it has no endpoint of this transport";
    if ((t->peers >> peer & 1) == 0)
        return SPCCL_OK;
    at = find_address(its, wanted->name);
    for (int i = 0; i < t->links.n_endpoints && at.address != NULL; i++)
        if (t->links.transports[i] == wanted && sp_links_reach(&t->links, i, &at, &control, why, sizeof why))
            return sp_links_add_peer(&t->links, peer, i, &at, &control);
    return SP_FAIL(SPCCL_ERR_UNREACHABLE, "rank %d: %s rank %d over %s: %s", t->g->comm->rank, t->what, peer,
                   wanted->name, why);
}

spccl_status sp_proxy_threads_meet(sp_proxy_thread *const *threads, uint32_t n, int64_t deadline_ns)
{
    spccl_comm *comm = threads[0]->g->comm;
    uint32_t n_mine = n * SP_TRANSPORTS_MAX;
    struct address *mine = sp_calloc(((size_t)comm->world_size + 1) * n_mine, sizeof *mine), *all;
    spccl_status st = SPCCL_OK;
    if (mine == NULL)
        st = SP_FAIL(SPCCL_ERR_NOMEM, "rank %d ran out of memory: %u addresses of proxies of each rank",
                     comm->rank, n_mine);
    for (uint32_t k = 0; k < n && st == SPCCL_OK; k++)
        st = find_addresses(&threads[k]->links, mine + (size_t)k * SP_TRANSPORTS_MAX);
    SP_TRY_TO(out, st,
              sp_gpu_agree_by(comm, st, deadline_ns)); /* a rank that failed has nothing to exchange */
    all = mine + n_mine;
    st = sp_comm_all_gather(comm, mine, all, n_mine * sizeof *mine,
                            (sp_time_limit){.deadline_ns = deadline_ns}, NULL);
    for (int p = 0; p < comm->world_size; p++)
        for (uint32_t k = 0; k < n && st == SPCCL_OK; k++)
            st = add_peer(threads[k], p, all + ((size_t)p * n + k) * SP_TRANSPORTS_MAX);
out:
    sp_free(mine);
    return st;
}

/* All endpoints connect at the same time. AGAIN: some are not done. */
static spccl_status connect_step(sp_proxy_thread *const *threads, uint32_t n)
{
    spccl_status all = SPCCL_OK;
    for (uint32_t k = 0; k < n; k++) {
        spccl_status st = sp_links_connect_step(&threads[k]->links);
        if (st != SPCCL_OK && st != SPCCL_AGAIN)
            return st;
        all = st == SPCCL_OK ? all : SPCCL_AGAIN;
    }
    return all;
}

spccl_status sp_proxy_threads_connect(sp_proxy_thread *const *threads, uint32_t n, const char *what,
                                      int64_t deadline_ns)
{
    int64_t until_ns = sp_now_ns() + SP_PROXY_CONNECT_NS;
    for (;;) {
        spccl_status st = connect_step(threads, n);
        if (st != SPCCL_AGAIN)
            return st;
        if (sp_deadline_passed(deadline_ns))
            return SP_FAIL(SPCCL_ERR_TIMEOUT, "rank %d: %s did not connect before the deadline",
                           threads[0]->g->comm->rank, what);
        if (sp_now_ns() > until_ns)
            return SPCCL_AGAIN;
        nanosleep(&(struct timespec){.tv_nsec = CONNECT_STEP_NS}, NULL);
    }
}

/* ---- the thread ---- */

static void drain_wake_fd(const sp_proxy_thread *t)
{
    uint64_t count;
    if (read(t->wake_fd, &count, sizeof count) < 0 && errno != EAGAIN)
        sp_log(SP_LOG_ERROR, t->g->comm->rank, "%s: reading its eventfd failed: errno %d", t->name, errno);
}

static void write_wake_fd(const sp_proxy_thread *t)
{
    uint64_t one = 1;
    if (write(t->wake_fd, &one, sizeof one) < 0 && errno != EAGAIN)
        sp_log(SP_LOG_ERROR, t->g->comm->rank, "%s: writing its eventfd failed: errno %d", t->name, errno);
}

static bool is_idle(const sp_proxy_thread *t)
{
    return t->is_idle != NULL && t->is_idle(t->ctx);
}

int64_t sp_proxy_thread_sleep_ns(const sp_proxy_thread *t, int64_t idle_ns)
{
    if (t->is_idle == NULL && idle_ns >= SP_PROXY_QUIET_NS)
        return SP_PROXY_QUIET_POLL_NS;
    if (idle_ns >= ASLEEP_NS)
        return is_idle(t) ? ASLEEP_NS : SP_PROXY_POLL_NS;
    int64_t ns = idle_ns / IDLE_PER_SLEEP;
    return ns < SLEEP_NS ? SLEEP_NS : ns > SP_PROXY_POLL_NS ? SP_PROXY_POLL_NS : ns;
}

/* Sleep for ns, until a wake or until a message comes. */
static void sleep_for(sp_proxy_thread *t, int64_t ns)
{
    struct pollfd fds[SP_TRANSPORTS_MAX + 1] = {{.fd = t->wake_fd, .events = POLLIN}};
    const sp_links *l = &t->links;
    spccl_status st = sp_links_arm(&t->links);
    for (int i = 0; i < l->n_endpoints; i++)
        fds[i + 1] = (struct pollfd){.fd = l->transports[i]->wait_fd(l->endpoints[i]), .events = POLLIN};
    if (st == SPCCL_OK)
        (void)ppoll(fds, (nfds_t)l->n_endpoints + 1, &(struct timespec){.tv_nsec = ns}, NULL);
    else
        sched_yield();
    drain_wake_fd(t);
    if (st == SPCCL_OK)
        sp_links_disarm(&t->links);
}

/* Nothing moved in the last round: yield, or sleep. *active_ns = now if a wake came. */
static void rest(sp_proxy_thread *t, uint32_t *n_wakes, int64_t *active_ns)
{
    int64_t now_ns = sp_now_ns(), idle_ns = now_ns - *active_ns, ns = sp_proxy_thread_sleep_ns(t, idle_ns);
    uint32_t n;
    if (idle_ns < t->idle_spin_ns || (idle_ns < t->busy_spin_ns && !is_idle(t))) {
        sched_yield(); /* a peer's thread may need this core */
        return;
    }
    /* A wake counts first and reads `sleeping` then: either it wakes this thread, or this thread sees it. */
    atomic_store(&t->sleeping, true);
    n = atomic_load(&t->n_wakes);
    if (n != *n_wakes) {
        *n_wakes = n;
        *active_ns = now_ns;
    } else if (!atomic_load(&t->stop)) {
        sleep_for(t, ns);
    }
    atomic_store(&t->sleeping, false);
}

static void break_group(const sp_proxy_thread *t, spccl_status st)
{
    spccl_comm *comm = t->g->comm;
    char text[sizeof comm->error];
    snprintf(text, sizeof text, "rank %d, group \"%s\", GPU %d: %.700s", comm->rank, comm->name,
             t->g->device.ordinal, sp_without_rank(spccl_last_error(), comm->rank));
    if (sp_comm_break(comm, st, text))
        sp_log(SP_LOG_ERROR, comm->rank, "%s", text);
}

/* The thread moves nothing any more; wait for the end. */
static void wait_for_stop(sp_proxy_thread *t)
{
    struct pollfd fd = {.fd = t->wake_fd, .events = POLLIN};
    while (!atomic_load(&t->stop)) {
        atomic_store(&t->sleeping, true);
        if (poll(&fd, 1, (int)(ASLEEP_NS / 1000000)) > 0)
            drain_wake_fd(t);
    }
}

static bool is_aborted(const sp_proxy_thread *t)
{
    return __atomic_load_n(&t->g->control->abort, __ATOMIC_RELAXED) != 0;
}

/* The thread ends without having returned: code that it called, such as a net plugin, called pthread_exit. */
static void has_exited(void *arg)
{
    const sp_proxy_thread *t = arg;
    (void)SP_FAIL(SPCCL_ERR_SYSTEM, "the proxy thread \"%s\" was ended by pthread_exit or pthread_cancel",
                  t->name);
    break_group(t, SPCCL_ERR_SYSTEM);
}

static void serve(sp_proxy_thread *t)
{
    int64_t active_ns = sp_now_ns();
    uint32_t n_wakes = 0;
    spccl_status st = SPCCL_OK;
    while (st == SPCCL_OK && !atomic_load(&t->stop) && !is_aborted(t)) {
        bool moved = false;
        st = t->round(t->ctx, &moved);
        if (moved)
            active_ns = sp_now_ns();
        else if (st == SPCCL_OK)
            rest(t, &n_wakes, &active_ns);
    }
    if (st != SPCCL_OK)
        break_group(t, st);
    wait_for_stop(t);
}

static void *run(void *arg)
{
    pthread_cleanup_push(has_exited, arg);
    serve(arg);
    pthread_cleanup_pop(0);
    return NULL;
}

spccl_status sp_proxy_thread_start(sp_proxy_thread *t)
{
    spccl_status st = sp_thread_start(t->name, run, t, &t->thread);
    t->started = st == SPCCL_OK;
    if (t->started)
        return SPCCL_OK;
    return SP_FAIL(st, "rank %d, group \"%s\": a proxy cannot start: %s", t->g->comm->rank, t->g->comm->name,
                   spccl_last_error());
}

void sp_proxy_thread_wake(sp_proxy_thread *t)
{
    atomic_fetch_add(&t->n_wakes, 1);
    if (atomic_load(&t->sleeping))
        write_wake_fd(t);
}

/* ---- end ---- */

void sp_proxy_thread_stop(sp_proxy_thread *t)
{
    atomic_store(&t->stop, true);
    if (!t->started)
        return;
    write_wake_fd(t);
    (void)pthread_join(t->thread, NULL);
    t->started = false;
}

void sp_proxy_thread_close(sp_proxy_thread *t)
{
    sp_links_close(&t->links);
    if (t->g != NULL && t->wake_fd >= 0)
        close(t->wake_fd);
}
