/* test_threads.c - the library's threads block the application's signals. The thread of a rendezvous ends
 * when its group has formed, or when no client has asked for some time. */
#include "fake_gpu.h"

#include "core/contract/rendezvous.h"
#include "ranks.h"

#include <dirent.h>
#include <signal.h>
#include <stdbool.h>

#define PATIENCE_MS 30000
static struct fake_stream streams[2];

/* ---- threads of this process, by name ---- */

static bool read_task(const char *id, const char *file, char *out, size_t cap)
{
    char path[300];
    size_t n;
    FILE *f;
    snprintf(path, sizeof path, "/proc/self/task/%s/%s", id, file);
    f = fopen(path, "r");
    if (f == NULL)
        return false; /* it has just ended */
    n = fread(out, 1, cap - 1, f);
    out[n] = '\0';
    fclose(f);
    return n != 0;
}

struct threads {
    int n;
    uint64_t blocked; /* signals that all n threads block */
};

static struct threads count_threads(const char *name)
{
    struct threads c = {.blocked = ~UINT64_C(0)};
    DIR *d = opendir("/proc/self/task");
    struct dirent *e;
    while (d != NULL && (e = readdir(d)) != NULL) {
        char comm[64], status[4096];
        const char *mask;
        if (!read_task(e->d_name, "comm", comm, sizeof comm) ||
            !read_task(e->d_name, "status", status, sizeof status))
            continue;
        comm[strcspn(comm, "\n")] = '\0';
        mask = strstr(status, "SigBlk:");
        if (strcmp(comm, name) != 0 || mask == NULL)
            continue;
        c.n++;
        c.blocked &= strtoull(mask + 7, NULL, 16);
    }
    if (d != NULL)
        closedir(d);
    return c;
}

static bool becomes(const char *name, int n)
{
    int64_t start = now_ms();
    while (count_threads(name).n != n && now_ms() - start < PATIENCE_MS)
        sleep_ms(5);
    return count_threads(name).n == n;
}

/* ---- signals ---- */

static uint64_t mask_of(const int *signals, size_t n)
{
    uint64_t mask = 0;
    for (size_t i = 0; i < n; i++)
        mask |= UINT64_C(1) << (signals[i] - 1);
    return mask;
}

static void check_mask(const char *name)
{
    static const int asynchronous[] = {SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2, SIGALRM, SIGCHLD, SIGPROF};
    static const int own_fault[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL}; /* so that crash handlers run */
    uint64_t wanted = mask_of(asynchronous, sizeof asynchronous / sizeof *asynchronous);
    uint64_t unwanted = mask_of(own_fault, sizeof own_fault / sizeof *own_fault);
    struct threads c = count_threads(name);
    /* A new thread blocks all signals for a moment. */
    for (int i = 0; i < 2000 && (c.n == 0 || (c.blocked & unwanted) != 0); i++) {
        sleep_ms(5);
        c = count_threads(name);
    }
    CHECK(c.n >= 1, "no thread \"%s\" runs", name);
    CHECK((c.blocked & wanted) == wanted, "a thread \"%s\" takes signals of the application: it blocks %llx",
          name, (unsigned long long)c.blocked);
    CHECK((c.blocked & unwanted) == 0, "threads \"%s\" block signals of their own faults: %llx", name,
          (unsigned long long)c.blocked);
}

static void start_all_threads(struct rank_ctx *c)
{
    spccl_cuda_config config = SPCCL_CUDA_CONFIG_INIT;
    spccl_request *req = NULL;
    float x = 1;
    config.device = c->rank;
    CHECK_OK(spccl_cuda_attach(c->comm, &config));
    CHECK_OK(spccl_all_reduce(c->comm, &x, &x, 1, SPCCL_FLOAT32, SPCCL_SUM, &req));
    CHECK_OK(spccl_request_wait(req, -1));
    spccl_request_free(req);
    if (c->rank == 0) {
        check_mask("spccl");
        check_mask("spccl-gpu");
    }
    CHECK_OK(spccl_all_reduce(c->comm, &x, &x, 1, SPCCL_FLOAT32, SPCCL_SUM, NULL));
}

static void test_signals(void)
{
    struct rank_ctx ctx[2];
    spccl_unique_id id;
    sigset_t before, after;
    pthread_sigmask(SIG_SETMASK, NULL, &before);
    for (int i = 0; i < 2; i++)
        streams[i].id = (unsigned long long)i + 1;
    run_ranks(2, NULL, start_all_threads, NULL, ctx);
    CHECK_OK(spccl_get_unique_id(&id));
    check_mask("spccl-rdv");
    pthread_sigmask(SIG_SETMASK, NULL, &after);
    CHECK(sigismember(&after, SIGINT) == sigismember(&before, SIGINT), "the caller's own mask has changed");
}

/* ---- a rendezvous ends ---- */

struct joiner {
    const spccl_unique_id *id;
    int rank, n_ranks;
    pthread_t thread;
};

static void *join_group(void *arg)
{
    const struct joiner *j = arg;
    spccl_comm *comm = NULL;
    spccl_config config = SPCCL_CONFIG_INIT;
    int one = 1;
    config.timeout_ms = PATIENCE_MS;
    CHECK_OK(spccl_comm_init_rank(j->id, j->rank, j->n_ranks, &config, &comm));
    if (comm == NULL)
        return NULL;
    CHECK_OK(spccl_all_reduce(comm, &one, &one, 1, SPCCL_INT32, SPCCL_SUM, NULL));
    CHECK(one == j->n_ranks, "%d", one);
    CHECK_OK(spccl_comm_destroy(comm));
    return NULL;
}

static void form_group(const spccl_unique_id *id, int n_ranks)
{
    struct joiner j[4];
    for (int i = 0; i < n_ranks; i++) {
        j[i] = (struct joiner){.id = id, .rank = i, .n_ranks = n_ranks};
        CHECK(pthread_create(&j[i].thread, NULL, join_group, &j[i]) == 0, "thread");
    }
    for (int i = 0; i < n_ranks; i++)
        pthread_join(j[i].thread, NULL);
}

static void test_rendezvous_ends(void)
{
    static const int sizes[] = {1, 2, 4};
    int n = count_threads("spccl-rdv").n;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        spccl_unique_id id;
        spccl_store store;
        uint8_t secret[SP_SECRET_BYTES];
        CHECK_OK(spccl_get_unique_id(&id));
        CHECK(count_threads("spccl-rdv").n == n + 1, "no rendezvous");
        form_group(&id, sizes[i]);
        CHECK(becomes("spccl-rdv", n), "the rendezvous of a group of %d goes on", sizes[i]);
        CHECK(sp_rendezvous_connect(&id, 5000, &store, secret) == SPCCL_ERR_PEER, "its port is still open");
    }
}

/* A rendezvous that no client uses ends, with its thread and its port. A connected client keeps it. */
static void test_rendezvous_idle(void)
{
    int n = count_threads("spccl-rdv").n;
    spccl_unique_id unused, used;
    spccl_store store;
    uint8_t secret[SP_SECRET_BYTES], value[8];
    size_t bytes = 0;
    setenv("SPCCL_TIMEOUT_MS", "1000", 1);
    CHECK_OK(spccl_get_unique_id(&unused));
    CHECK_OK(spccl_get_unique_id(&used));
    unsetenv("SPCCL_TIMEOUT_MS");
    CHECK_OK(sp_rendezvous_connect(&used, 5000, &store, secret));
    CHECK(becomes("spccl-rdv", n + 1), "%d rendezvous, wanted %d", count_threads("spccl-rdv").n, n + 1);
    CHECK_OK(store.set(store.ctx, "k", "v", 1));
    CHECK_OK(store.get(store.ctx, "k", value, sizeof value, 5000, &bytes));
    CHECK(bytes == 1 && value[0] == 'v', "%zu bytes", bytes);
    sp_rendezvous_disconnect(&store);
    CHECK(becomes("spccl-rdv", n), "the rendezvous goes on without a client");
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {{"rendezvous_ends", test_rendezvous_ends},
                                             {"rendezvous_idle", test_rendezvous_idle},
                                             {"signals", test_signals},
                                             {NULL, NULL}};
    return test_main(cases, argc, argv);
}
