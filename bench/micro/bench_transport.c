/* bench_transport.c - latency and throughput of each transport between two processes; inproc has two threads.
 *   spccl_bench_transport [--csv FILE] [--transport NAME] [--megabytes N] [--untouched 1]
 *   latency     half of the round trip of a 64-byte message, in us: median and 99th percentile. The receiver
 *               polls (spin) or sleeps (sleep).
 *   throughput  one way, messages of 1 KiB to 256 KiB, in GB/s (1e9 bytes of payload per second): median of 5
 *               runs. The sender writes with memset, the receiver sums words; both work in place. With
 *               --untouched 1 neither touches the payload, as in ib_write_bw, and latency is not measured.
 * Ranks are not pinned to cores. With fewer than two free cores, ranks that poll delay each other. */
#include "core/base/clock.h"
#include "core/contract/transport.h"

#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define N_ROUNDS_MAX 200000
static size_t total_bytes = (size_t)64
                            << 20; /* of one run of throughput; latency takes rounds in proportion */
static bool untouched;             /* payload is neither written nor read */
#define N_RUNS 5
#define QUEUE_BYTES ((size_t)1 << 20)
#define NS_PER_S 1e9

struct shared {
    atomic_int n_published;
    struct {
        uint8_t bytes[SP_ADDRESS_BYTES_MAX];
        size_t n_bytes;
    } address[2];
    double latency_us[2][2]; /* [spin, sleep][median, p99] */
    double gbs[16];
};

struct side {
    const sp_transport *t;
    sp_endpoint *ep;
    struct shared *shared;
    int rank;
    uint64_t n_sent; /* messages on queue 0 */
};

static const size_t sizes[] = {1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10};
#define N_SIZES (sizeof sizes / sizeof *sizes)

static void must(spccl_status st, const char *what)
{
    if (st == SPCCL_OK)
        return;
    fprintf(stderr, "%s: %s: %s\n", what, spccl_status_name(st), spccl_last_error());
    exit(1);
}

static void step(struct side *s)
{
    int peer;
    char text[SP_ABORT_TEXT_CAP];
    must(s->t->progress(s->ep, &peer, text), "progress");
}

static void idle(struct side *s, bool asleep)
{
    step(s);
    if (!asleep) {
        sched_yield();
    } else if (s->t->arm(s->ep) == SPCCL_OK) {
        poll(&(struct pollfd){.fd = s->t->wait_fd(s->ep), .events = POLLIN}, 1, 1000);
        s->t->disarm(s->ep);
    }
}

static void send_message(struct side *s, size_t bytes, int fill, bool asleep)
{
    void *space = NULL;
    spccl_status st;
    while ((st = s->t->reserve(s->ep, 1 - s->rank, 0, bytes, &space)) == SPCCL_AGAIN)
        idle(s, asleep);
    must(st, "reserve");
    if (!untouched)
        memset(space, fill, bytes);
    must(s->t->commit(s->ep, 1 - s->rank, 0, 0), "commit");
    s->n_sent++;
}

static uint64_t take_message(struct side *s, bool asleep)
{
    const void *p = NULL;
    size_t bytes = 0;
    uint64_t sum = 0, word;
    spccl_status st;
    while ((st = s->t->peek(s->ep, 1 - s->rank, 0, &p, &bytes)) == SPCCL_AGAIN)
        idle(s, asleep);
    must(st, "peek");
    for (size_t i = 0; i + 8 <= bytes && !untouched; i += 8) {
        memcpy(&word, (const uint8_t *)p + i, 8);
        sum += word;
    }
    must(s->t->release(s->ep, 1 - s->rank, 0), "release");
    return sum;
}

static void flush(struct side *s)
{
    while (!s->t->flushed(s->ep, 1 - s->rank, 0, s->n_sent))
        idle(s, false);
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void measure_latency(struct side *s, bool asleep)
{
    static const int n_warm = 500;
    int n = (int)((asleep ? 20000 : 50000) * (total_bytes >> 20) / 64);
    double *us = malloc(N_ROUNDS_MAX * sizeof *us);
    for (int i = -n_warm; i < n; i++) {
        int64_t t0 = sp_now_ns();
        if (s->rank == 0)
            send_message(s, 64, i, asleep);
        (void)take_message(s, asleep);
        if (s->rank == 1)
            send_message(s, 64, i, asleep);
        if (i >= 0)
            us[i] = (double)(sp_now_ns() - t0) / 2e3;
    }
    flush(s);
    qsort(us, (size_t)n, sizeof *us, by_value);
    if (s->rank == 0) {
        s->shared->latency_us[asleep][0] = us[n / 2];
        s->shared->latency_us[asleep][1] = us[n - n / 100];
    }
    free(us);
}

/* The receiver answers when it has everything. The sender measures the time. */
static double one_way(struct side *s, size_t bytes, size_t total)
{
    int64_t t0 = sp_now_ns();
    size_t n = total / bytes;
    for (size_t i = 0; i < n; i++)
        if (s->rank == 0)
            send_message(s, bytes, (int)i, true);
        else
            (void)take_message(s, true);
    if (s->rank == 1)
        send_message(s, 64, 0, true);
    else
        (void)take_message(s, true);
    flush(s);
    return (double)(n * bytes) / NS_PER_S / ((double)(sp_now_ns() - t0) / NS_PER_S);
}

static void measure_throughput(struct side *s, int k)
{
    double gbs[N_RUNS];
    size_t total = total_bytes;
    (void)one_way(s, sizes[k], total / 4);
    for (int r = 0; r < N_RUNS; r++)
        gbs[r] = one_way(s, sizes[k], total);
    qsort(gbs, N_RUNS, sizeof *gbs, by_value);
    if (s->rank == 0)
        s->shared->gbs[k] = gbs[N_RUNS / 2];
}

static void *run_side(void *arg)
{
    struct side *s = arg;
    sp_endpoint_config c = {.rank = s->rank,
                            .world_size = 2,
                            .n_queues = 2,
                            .queue_bytes = QUEUE_BYTES,
                            .deadline_ns = sp_deadline_in_ms(10000)};
    spccl_status st;
    must(sp_host_identity(NULL, c.host), "the host's identity");
    must(s->t->open(&c, &s->ep), "open");
    must(s->t->address(s->ep, s->shared->address[s->rank].bytes, &s->shared->address[s->rank].n_bytes),
         "address");
    atomic_fetch_add(&s->shared->n_published, 1);
    while (atomic_load(&s->shared->n_published) < 2)
        usleep(100);
    must(s->t->add_peer(s->ep, 1 - s->rank, s->shared->address[1 - s->rank].bytes,
                        s->shared->address[1 - s->rank].n_bytes),
         "add_peer");
    while ((st = s->t->connect_step(s->ep)) == SPCCL_AGAIN)
        usleep(100);
    must(st, "connect");
    if (!untouched) {
        measure_latency(s, false);
        measure_latency(s, true);
    }
    for (int k = 0; k < (int)N_SIZES; k++)
        measure_throughput(s, k);
    s->t->close(s->ep);
    return NULL;
}

static void report(const char *name, const struct shared *r, FILE *csv)
{
    printf("%-7s ", name);
    if (!untouched)
        printf("spin %7.2f us (p99 %7.2f)  sleep %7.2f us (p99 %7.2f)  ", r->latency_us[0][0],
               r->latency_us[0][1], r->latency_us[1][0], r->latency_us[1][1]);
    printf("GB/s:");
    for (size_t k = 0; k < N_SIZES; k++)
        printf("  %zu KiB %6.3f", sizes[k] >> 10, r->gbs[k]);
    printf("\n");
    if (csv == NULL)
        return;
    for (int asleep = 0; asleep < 2 && !untouched; asleep++)
        fprintf(csv, "%s,%s,64,%.3f,%.3f,\n", name, asleep ? "sleep" : "spin", r->latency_us[asleep][0],
                r->latency_us[asleep][1]);
    for (size_t k = 0; k < N_SIZES; k++)
        fprintf(csv, "%s,one_way,%zu,,,%.3f\n", name, sizes[k], r->gbs[k]);
}

static int run_transport(const sp_transport *t, FILE *csv)
{
    struct shared *shared =
        mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    struct side s[2] = {{.t = t, .shared = shared, .rank = 0}, {.t = t, .shared = shared, .rank = 1}};
    int status = 0;
    if (strcmp(t->name, "inproc") == 0) {
        pthread_t thread;
        pthread_create(&thread, NULL, run_side, &s[1]);
        run_side(&s[0]);
        pthread_join(thread, NULL);
    } else {
        pid_t pid = fork();
        if (pid == 0) {
            run_side(&s[1]);
            _exit(0);
        }
        run_side(&s[0]);
        waitpid(pid, &status, 0);
    }
    report(t->name, shared, csv);
    munmap(shared, sizeof *shared);
    return status == 0 ? 0 : 1;
}

/* False, with a line, if the transport needs something that this host lacks: ib a device, ncclnet a plugin. */
static bool is_here(const sp_transport *t)
{
    const char *value = "", *why = "";
    if (t->inform == NULL)
        return true;
    t->inform(&value, &why);
    if (strcmp(value, "in") == 0 || strstr(value, "plugin usable") != NULL ||
        strstr(value, "devices usable") != NULL)
        return true;
    printf("%-7s %s: %s\n", t->name, value, why);
    return false;
}

int main(int argc, char **argv)
{
    const char *only = NULL;
    FILE *csv = NULL;
    int failed = 0;
    for (int i = 1; i + 1 < argc; i += 2) {
        if (strcmp(argv[i], "--transport") == 0)
            only = argv[i + 1];
        else if (strcmp(argv[i], "--csv") == 0)
            csv = fopen(argv[i + 1], "w");
        else if (strcmp(argv[i], "--megabytes") == 0)
            total_bytes = (size_t)(atoi(argv[i + 1]) < 1 ? 1 : atoi(argv[i + 1])) << 20;
        else if (strcmp(argv[i], "--untouched") == 0)
            untouched = atoi(argv[i + 1]) != 0;
    }
    if (only != NULL && sp_transport_find(only) == NULL) {
        fprintf(stderr, "no transport \"%s\"\n", only);
        return 2;
    }
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (csv != NULL)
        fprintf(csv, "transport,test,bytes,median_us,p99_us,gbs\n");
    for (int i = 0; sp_transports[i] != NULL; i++)
        if ((only == NULL || strcmp(only, sp_transports[i]->name) == 0) && is_here(sp_transports[i]))
            failed |= run_transport(sp_transports[i], csv);
    if (csv != NULL)
        fclose(csv);
    return failed;
}
