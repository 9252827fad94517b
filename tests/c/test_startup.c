/* test_startup.c - start-up of 16 ranks, all pairs connected, with the queue sizes of such a group: how long it takes, and
 * how much memory each rank registers with its cards. The time is printed; no test depends on it. */
#define PATIENCE_MS 120000 /* 16 processes, in a guest without hardware virtualization too */
#include "core/plan/tune_coll.h"
#include "endpoints.h"
#include "transport/net/ib/ib.h"
#include "transport/net/plugin/plugin.h"

#include <dlfcn.h>
#if defined(TEST_ONLY_TRANSPORT)
#include <infiniband/verbs.h>
#endif

#define N_RANKS 16
#define MIB ((size_t)1 << 20)

/* Of all ranks, in shared memory. */
static struct times {
    _Atomic int64_t first_ns, last_ns; /* the first began to open its endpoint; the last had connected */
} * times;

/* ---- registered memory ---- */

#if defined(TEST_ONLY_TRANSPORT)
static size_t bytes_of(const sp_ib_memory *m)
{
    return m->mr != NULL ? ((const struct ibv_mr *)m->mr)->length : 0;
}

/* What libibverbs has of this rank. */
static size_t registered_bytes(struct member *m)
{
    const struct sp_ib *ep = sp_ib_self(m->ep);
    size_t bytes = 0;
    for (int i = 0; i < m->n; i++)
        for (int k = 0; k < SP_QUEUES_MAX; k++)
            for (int q = 0; q < (int)SP_IB_QPS_MAX; q++)
                bytes += bytes_of(&ep->peers[i].tx[k].memory[q]) + bytes_of(&ep->peers[i].rx[k].memory[q]);
    return bytes;
}
#else
/* What the plugin has counted in this process. */
static size_t registered_bytes(struct member *m)
{
    void *plugin = dlopen(sp_plugin_self(m->ep)->found.path, RTLD_NOW | RTLD_NOLOAD);
    _Atomic size_t *count = plugin != NULL ? dlsym(plugin, "net_registered_bytes") : NULL;
    CHECK(count != NULL, "%s", dlerror());
    return count != NULL ? *count : 0;
}
#endif

/* ---- start-up ---- */

static void start(struct member *m)
{
    size_t wanted = (size_t)(m->n - 1) * 4 * m->config.queue_bytes, got;
    int64_t now_ns = sp_now_ns(), none = 0;
    (void)atomic_compare_exchange_strong(&times->first_ns, &none, now_ns);
    if (!join_group(m))
        return;
    now_ns = sp_now_ns();
    for (int64_t last = atomic_load(&times->last_ns);
         last < now_ns && !atomic_compare_exchange_weak(&times->last_ns, &last, now_ns);) {
    }
    got = registered_bytes(m);
    CHECK(got == wanted, "rank %d: %zu bytes are registered, wanted %zu", m->rank, got, wanted);
    barrier(m, 1);
    /* every pair carries a message */
    for (int i = 0; i < m->n; i++)
        if (i != m->rank)
            send_now(m, i, 0, 100, (uint64_t)(m->rank * m->n + i));
    for (int i = 0; i < m->n; i++)
        if (i != m->rank)
            CHECK_OK(take_now(m, i, 0, 100, (uint64_t)(i * m->n + m->rank)));
    for (int i = 0; i < m->n; i++)
        if (i != m->rank)
            flush_now(m, i);
    barrier(m, 2);
    leave_group(m);
}

static void test_ranks(void)
{
#if defined(TEST_ONLY_TRANSPORT)
    static const struct environment e = {TEST_ONLY_TRANSPORT, true};
#else
    static const struct environment e = {"ncclnet", true};
#endif
    struct member m = make_group(&e, N_RANKS, start);
    m.config.queue_bytes = sp_tune_queue_bytes(N_RANKS);
    times = mmap(NULL, sizeof *times, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    run_group(&e, &m);
    printf("start-up of %d ranks over %s: %.2f s; registered: %zu KiB per rank\n", N_RANKS, e.transport,
           (double)(times->last_ns - times->first_ns) / 1e9,
           (size_t)(N_RANKS - 1) * 4 * m.config.queue_bytes >> 10);
    munmap(times, sizeof *times);
}

/* The sizes that `spccl info` states, and that the case above found registered for one number of ranks. */
static void test_stated(void)
{
    size_t per_peer = 4 * sp_tune_queue_bytes(2), per_rank = 31 * 4 * sp_tune_queue_bytes(32);
    spccl_info_entry e = {.struct_bytes = sizeof e};
    char wanted[96];
    bool found = false;
    CHECK(per_peer <= 4 * MIB && per_rank <= 64 * MIB, "%zu bytes per peer, %zu per rank", per_peer,
          per_rank);
    snprintf(wanted, sizeof wanted, "%zuM per peer, %zuM per rank at 32 ranks", per_peer / MIB,
             per_rank / MIB);
    for (size_t i = 0; spccl_info(i, &e) == SPCCL_OK; i++)
        if (strcmp(e.name, "queue memory") == 0) {
            CHECK(strcmp(e.value, wanted) == 0, "\"%s\", wanted \"%s\"", e.value, wanted);
            found = true;
        }
    CHECK(found, "spccl_info does not state the memory of queues");
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {{"ranks", test_ranks}, {"stated", test_stated}, {NULL, NULL}};
    return test_main(cases, argc, argv);
}
