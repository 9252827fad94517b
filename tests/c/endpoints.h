/* endpoints.h - groups for the tests of transports. Each rank has an endpoint, and runs in a thread or a
 * process of its own. The ranks exchange their addresses in shared memory. */
#ifndef SP_TEST_ENDPOINTS_H
#define SP_TEST_ENDPOINTS_H

#include "core/base/clock.h"
#include "core/base/mem.h"
#include "core/run/boot_links.h"
#include "test.h"

#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define MEMBERS_CAP 16
#ifndef PATIENCE_MS
#define PATIENCE_MS 30000 /* deadline for what must happen, also on a slow machine */
#endif

/* TEST_ONLY_TRANSPORT: tests of transport ib, in a guest without hardware virtualization. */
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__) || defined(TEST_ONLY_TRANSPORT)
#define SLOWDOWN 10
#else
#define SLOWDOWN 1
#endif

/* A transport, and whether the members of a group are processes or threads. */
struct environment {
    const char *transport;
    bool processes;
};
static const struct environment environments[] = {
#if defined(TEST_ONLY_TRANSPORT)
    {TEST_ONLY_TRANSPORT, true}};
#else
#if defined(NET_PLUGIN_FOLDER)
    {"ncclnet", true}, /* not as threads: this process, which forks the others, must not load the plugin */
#endif
    {"inproc", false}, {"shm", true}, {"tcp", true}, {"shm", false}, {"tcp", false}};
#endif
#define N_ENVIRONMENTS (sizeof environments / sizeof *environments)

/* Shared by all members. */
struct shared {
    atomic_int n_published, n_done, step;
    struct {
        uint8_t bytes[SP_ADDRESS_BYTES_MAX];
        size_t n_bytes;
    } address[MEMBERS_CAP], control[MEMBERS_CAP]; /* control: of tcp, for control links */
};

struct member {
    const sp_transport *t;
    sp_links links;
    sp_endpoint *ep; /* of t, in links */
    int rank, n;
    bool tcp_too; /* tcp is among the transports */
    sp_endpoint_config config;
    struct shared *shared;
    uint64_t seed;
    int kind; /* each test gives it a meaning of its own */
    void (*fn)(struct member *);
    uint64_t n_sent[MEMBERS_CAP][SP_QUEUES_MAX]; /* messages that try_send sent */
    int killed_rank;                             /* the test kills this rank with SIGKILL; -1: none */
    pthread_t thread;
    pid_t pid;
};

static inline uint64_t mix(uint64_t x)
{
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

/* A group of n members. A test may change the config before it runs the members. */
static inline struct member make_group(const struct environment *g, int n, void (*fn)(struct member *))
{
#if defined(NET_PLUGIN_FOLDER)
    setenv("SPCCL_NET_PLUGIN", NET_PLUGIN_FOLDER "/libnccl-net-test_all.so", 0);
#endif
    struct member m = {
        .t = sp_transport_find(g->transport), .n = n, .fn = fn, .seed = test_rand(), .killed_rank = -1};
    m.config = (sp_endpoint_config){.world_size = n,
                                    .group_tag = 7,
                                    .n_queues = 2,
                                    .queue_bytes = 1 << 16,
                                    .deadline_ns = sp_deadline_in_ms(PATIENCE_MS)};
    CHECK_OK(sp_host_identity(NULL, m.config.host));
    for (size_t i = 0; i < SP_SECRET_BYTES; i++)
        m.config.secret[i] = (uint8_t)mix(m.seed + i);
    return m;
}

/* Open the endpoint and publish its address. */
static inline bool open_member(struct member *m)
{
    const sp_transport *tcp = sp_transport_find("tcp");
    spccl_status st;
    m->config.rank = m->rank;
    m->config.open_control = sp_links_open_tcp;
    m->config.owner = &m->links;
    m->links = (sp_links){.rank = m->rank, .world_size = m->n, .tcp_too = m->tcp_too};
    m->links.peers = sp_calloc((size_t)m->n, sizeof *m->links.peers);
    st = sp_links_add(&m->links, m->t, &m->config);
    if (st == SPCCL_OK && m->links.tcp != NULL && m->t != tcp)
        st = sp_links_add(&m->links, tcp, &m->config);
    CHECK(st == SPCCL_OK, "%s: open: %s", m->t->name, spccl_last_error());
    if (st != SPCCL_OK)
        return false;
    m->ep = m->links.endpoints[0];
    CHECK_OK(m->t->address(m->ep, m->shared->address[m->rank].bytes, &m->shared->address[m->rank].n_bytes));
    if (m->links.tcp != NULL)
        CHECK_OK(tcp->address(m->links.tcp, m->shared->control[m->rank].bytes,
                              &m->shared->control[m->rank].n_bytes));
    atomic_fetch_add(&m->shared->n_published, 1);
    return true;
}

/* Wait until *value is at least `wanted`. */
static inline void await_atomic(atomic_int *value, int wanted)
{
    int64_t deadline_ns = sp_deadline_in_ms(PATIENCE_MS);
    while (atomic_load(value) < wanted && !sp_deadline_passed(deadline_ns))
        usleep(100);
    CHECK(atomic_load(value) >= wanted, "waited for %d, got %d", wanted, atomic_load(value));
}

/* Wait for the addresses of all members and add them. Returns the status of add_peer. */
static inline spccl_status add_peers(struct member *m)
{
    spccl_status st = SPCCL_OK;
    await_atomic(&m->shared->n_published, m->n);
    for (int i = 0; i < m->n && st == SPCCL_OK; i++) {
        const sp_published_transport its = {.address = m->shared->address[i].bytes,
                                            .address_bytes = m->shared->address[i].n_bytes},
                                     control = {.address = m->shared->control[i].bytes,
                                                .address_bytes = m->shared->control[i].n_bytes};
        char why[96] = "";
        if (i == m->rank)
            continue;
        CHECK(sp_links_reach(&m->links, 0, &its, &control, why, sizeof why), "%s: %s", m->t->name, why);
        st = sp_links_add_peer(&m->links, i, 0, &its, &control);
    }
    return st;
}

/* Connect to all members. Returns the status of add_peer or connect_step. */
static inline spccl_status connect_member(struct member *m)
{
    spccl_status st = add_peers(m);
    if (st != SPCCL_OK)
        return st;
    while ((st = sp_links_connect_step(&m->links)) == SPCCL_AGAIN)
        usleep(100);
    return st;
}

/* How the peer is reached. */
static inline void describe_peer(struct member *m, int peer, char *out, size_t cap)
{
    snprintf(out, cap, "%s", m->links.peers[peer].text);
    if (m->links.peers[peer].transport == m->t)
        m->t->describe(m->ep, peer, out, cap);
}

static inline bool join_group(struct member *m)
{
    spccl_status st;
    if (!open_member(m))
        return false;
    st = connect_member(m);
    CHECK(st == SPCCL_OK, "%s: rank %d of %d: %s", m->t->name, m->rank, m->n, spccl_last_error());
    return st == SPCCL_OK;
}

static inline void leave_group(struct member *m)
{
    sp_links_close(&m->links);
    m->ep = NULL;
}

static inline void *member_thread(void *arg)
{
    struct member *m = arg;
    m->fn(m);
    return NULL;
}

static inline void *tell_id(void *id)
{
    *(pid_t *)id = gettid();
    return NULL;
}

/* The first thread of a process may start a thread of a sanitizer too, which stays. Returns when the first thread is
 * not listed any more: one that was joined may be listed a moment longer. */
static inline void start_first_thread(void)
{
    int64_t deadline_ns = sp_deadline_in_ms(PATIENCE_MS);
    char entry[64];
    pthread_t first;
    pid_t id = 0;
    CHECK(pthread_create(&first, NULL, tell_id, &id) == 0 && pthread_join(first, NULL) == 0, "thread");
    snprintf(entry, sizeof entry, "/proc/self/task/%d", (int)id);
    while (access(entry, F_OK) == 0 && !sp_deadline_passed(deadline_ns))
        usleep(100);
}

/* True if at most so many threads are left. One that was joined may be listed a moment longer. */
static inline bool has_threads(int n)
{
    int64_t deadline_ns = sp_deadline_in_ms(PATIENCE_MS);
    while (count_entries("/proc/self/task") > n && !sp_deadline_passed(deadline_ns))
        usleep(1000);
    return count_entries("/proc/self/task") <= n;
}

static inline void member_process(struct member *m)
{
    int n_fds = count_entries("/proc/self/fd"), n_threads;
    start_first_thread();
    n_threads = count_entries("/proc/self/task");
    test_n_failed = 0;
    m->fn(m);
    CHECK(count_entries("/proc/self/fd") == n_fds, "%s: descriptors were left open", m->t->name);
    CHECK(has_threads(n_threads), "%s: threads were left", m->t->name);
    exit(test_n_failed != 0);
}

static inline void wait_for_process(const struct member *m)
{
    int status = 0;
    int64_t deadline_ns = sp_deadline_in_ms(20 * PATIENCE_MS); /* each of its waits has PATIENCE_MS */
    pid_t got;
    while ((got = waitpid(m->pid, &status, WNOHANG)) == 0 && !sp_deadline_passed(deadline_ns))
        usleep(500);
    CHECK(got == m->pid, "%s: rank %d hangs", m->t->name, m->rank);
    if (got == 0) {
        kill(m->pid, SIGKILL);
        waitpid(m->pid, &status, 0);
    }
    if (m->rank == m->killed_rank)
        CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL, "rank %d was not killed: %x", m->rank,
              status);
    else
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "%s: rank %d failed (%x)", m->t->name, m->rank,
              status);
}

/* Run the members of a group made by make_group, and wait until all have ended. */
static inline void run_group(const struct environment *g, const struct member *model)
{
    struct member m[MEMBERS_CAP];
    struct shared *shared =
        mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    int n_fds = count_entries("/proc/self/fd");
    fflush(stdout);
    for (int i = 0; i < model->n; i++) {
        m[i] = *model;
        m[i].rank = i;
        m[i].shared = shared;
        if (!g->processes) {
            CHECK(pthread_create(&m[i].thread, NULL, member_thread, &m[i]) == 0, "thread");
        } else if ((m[i].pid = fork()) == 0) {
            member_process(&m[i]);
        }
    }
    for (int i = 0; i < model->n; i++)
        if (g->processes)
            wait_for_process(&m[i]);
        else
            pthread_join(m[i].thread, NULL);
    CHECK(count_entries("/proc/self/fd") == n_fds, "%s: descriptors were left open", g->transport);
    munmap(shared, sizeof *shared);
}

/* ---- messages ---- */

static inline void fill_message(uint8_t *p, size_t n, uint64_t seed)
{
    for (size_t i = 0; i < n; i++)
        p[i] = (uint8_t)(seed + i * 7 + (i >> 8) * 13);
}

static inline bool is_message(const uint8_t *p, size_t n, uint64_t seed)
{
    for (size_t i = 0; i < n; i++)
        if (p[i] != (uint8_t)(seed + i * 7 + (i >> 8) * 13))
            return false;
    return true;
}

/* AGAIN if the queue has no space now. */
static inline spccl_status try_send(struct member *m, int peer, int queue, size_t n, uint64_t seed)
{
    void *space = NULL;
    spccl_status st = sp_link_reserve(&m->links, peer, queue, n, &space);
    if (st != SPCCL_OK)
        return st;
    CHECK((uintptr_t)space % 16 == 0, "reserve: %p", space);
    fill_message(space, n, seed);
    m->n_sent[peer][queue]++;
    return sp_link_commit(&m->links, peer, queue, 0);
}

/* Take the next message, and check that it is this one. AGAIN if no message is there. */
static inline spccl_status try_take(struct member *m, int peer, int queue, size_t n, uint64_t seed)
{
    const void *p = NULL;
    size_t bytes = 0;
    spccl_status st = sp_link_peek(&m->links, peer, queue, &p, &bytes);
    if (st != SPCCL_OK)
        return st;
    CHECK((uintptr_t)p % 16 == 0, "peek: %p", p);
    CHECK(bytes == n && is_message(p, bytes, seed),
          "%s: rank %d from %d, queue %d: %zu bytes, wanted %zu, or another content", m->t->name, m->rank,
          peer, queue, bytes, n);
    return sp_link_release(&m->links, peer, queue);
}

/* An abort sets *peer and text[SP_ABORT_TEXT_CAP]. */
static inline spccl_status progress_to(struct member *m, int *peer, char *text)
{
    spccl_status st = SPCCL_OK;
    for (int i = 0; i < m->links.n_endpoints && st == SPCCL_OK; i++)
        st = m->links.transports[i]->progress(m->links.endpoints[i], peer, text);
    return st;
}

static inline spccl_status progress(struct member *m)
{
    return sp_links_progress(&m->links);
}

/* Sleep until the endpoint wakes this rank. False if it does not within PATIENCE_MS. */
static inline bool sleep_armed(struct member *m)
{
    struct pollfd p[SP_TRANSPORTS_MAX];
    int n;
    if (sp_links_arm(&m->links) != SPCCL_OK)
        return true;
    for (int i = 0; i < m->links.n_endpoints; i++)
        p[i] =
            (struct pollfd){.fd = m->links.transports[i]->wait_fd(m->links.endpoints[i]), .events = POLLIN};
    n = poll(p, (nfds_t)m->links.n_endpoints, PATIENCE_MS);
    sp_links_disarm(&m->links);
    return n > 0;
}

static inline void send_now(struct member *m, int peer, int queue, size_t n, uint64_t seed)
{
    int64_t deadline_ns = sp_deadline_in_ms(PATIENCE_MS);
    spccl_status st;
    while ((st = try_send(m, peer, queue, n, seed)) == SPCCL_AGAIN && !sp_deadline_passed(deadline_ns)) {
        CHECK_OK(progress(m));
        sched_yield();
    }
    CHECK(st == SPCCL_OK, "%s: rank %d to %d: %d", m->t->name, m->rank, peer, (int)st);
}

/* Wait for the next message and take it. Returns the last status of try_take. */
static inline spccl_status take_now(struct member *m, int peer, int queue, size_t n, uint64_t seed)
{
    int64_t deadline_ns = sp_deadline_in_ms(PATIENCE_MS);
    spccl_status st;
    while ((st = try_take(m, peer, queue, n, seed)) == SPCCL_AGAIN && !sp_deadline_passed(deadline_ns)) {
        (void)progress(m);
        sched_yield();
    }
    return st;
}

/* True if all that try_send sent to this peer has left this process. */
static inline bool is_flushed(struct member *m, int peer)
{
    for (int queue = 0; queue < m->config.n_queues; queue++)
        if (!sp_link_flushed(&m->links, peer, queue, m->n_sent[peer][queue]))
            return false;
    return true;
}

static inline void flush_now(struct member *m, int peer)
{
    int64_t deadline_ns = sp_deadline_in_ms(PATIENCE_MS);
    while (!is_flushed(m, peer) && !sp_deadline_passed(deadline_ns)) {
        CHECK_OK(progress(m));
        sched_yield();
    }
    CHECK(is_flushed(m, peer), "%s: never flushed", m->t->name);
}

/* Wait until all members called barrier(m, step). Steps count from 1. */
static inline void barrier(struct member *m, int step)
{
    int64_t deadline_ns = sp_deadline_in_ms(PATIENCE_MS);
    atomic_fetch_add(&m->shared->n_done, 1);
    while (atomic_load(&m->shared->n_done) < step * m->n && !sp_deadline_passed(deadline_ns)) {
        if (m->ep != NULL)
            (void)progress(m);
        usleep(200);
    }
    CHECK(atomic_load(&m->shared->n_done) >= step * m->n, "rank %d: some rank did not come to barrier %d",
          m->rank, step);
}

#endif
