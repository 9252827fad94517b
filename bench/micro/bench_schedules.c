/* bench_schedules.c - all-reduces of several sizes in each schedule, in turns, between processes of one host over
 * shm. What it prints checks the constants of csrc/core/plan/plan_cost.c, and that the choice costs nothing.
 *
 *   spccl_bench_schedules [RANKS [DENSITY [KIB ...]]]      default: 2 0.01 4 16 64 256 1024
 *
 * For each size and schedule: the least and the median time of a call, and the CPU time that all ranks together
 * take for it. CPU time, unlike wall-clock time, says something on a machine that does other work too. */
#include "spccl.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define RANKS_CAP 16
#define SIZES_CAP 12
#define N_ROUNDS 5
#define N_CALLS_MAX 2000

enum { DIRECT, ONESHOT, AUTO, TUNE, N_SCHEDULES }; /* TUNE: auto, corrected by times */
static const char *const names[N_SCHEDULES] = {"direct", "oneshot", "auto", "tune"};

/* In memory that the processes share: of each rank, size and schedule. */
typedef struct results {
    double cpu_us[RANKS_CAP][SIZES_CAP][N_SCHEDULES];
    double least_us[SIZES_CAP][N_SCHEDULES], median_us[SIZES_CAP][N_SCHEDULES]; /* of rank 0 */
} results;

static double seconds(clockid_t clock)
{
    struct timespec t;
    clock_gettime(clock, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void check(spccl_status st)
{
    if (st == SPCCL_OK)
        return;
    fprintf(stderr, "%s: %s\n", spccl_status_name(st), spccl_last_error());
    exit(1);
}

static int by_size(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

/* What to measure. */
struct plan {
    int n_ranks, n_sizes;
    double density;
    size_t n_elems[SIZES_CAP];
    results *out;
};

/* Call all-reduces of one size, out of place, and record them. */
static void time_calls(spccl_comm *comm, const float *x, float *y, const struct plan *p, int size,
                       int schedule)
{
    results *out = p->out;
    size_t n = p->n_elems[size];
    static double times[N_CALLS_MAX];
    int n_calls = n > (64 << 10) ? N_CALLS_MAX / 20 : N_CALLS_MAX, rank = spccl_comm_rank(comm);
    double cpu;
    for (int i = 0; i < 20; i++) /* warm up; then the densities of earlier calls are known */
        check(spccl_all_reduce(comm, x, y, n, SPCCL_FLOAT32, SPCCL_SUM, NULL));
    cpu = seconds(CLOCK_PROCESS_CPUTIME_ID);
    for (int i = 0; i < n_calls; i++) {
        double began = seconds(CLOCK_MONOTONIC);
        check(spccl_all_reduce(comm, x, y, n, SPCCL_FLOAT32, SPCCL_SUM, NULL));
        times[i] = (seconds(CLOCK_MONOTONIC) - began) * 1e6;
    }
    cpu = (seconds(CLOCK_PROCESS_CPUTIME_ID) - cpu) * 1e6 / n_calls;
    if (out->cpu_us[rank][size][schedule] == 0 || cpu < out->cpu_us[rank][size][schedule])
        out->cpu_us[rank][size][schedule] = cpu; /* the least of the rounds */
    if (rank != 0)
        return;
    qsort(times, (size_t)n_calls, sizeof *times, by_size);
    if (out->least_us[size][schedule] == 0 || times[n_calls / 100] < out->least_us[size][schedule])
        out->least_us[size][schedule] = times[n_calls / 100];
    if (out->median_us[size][schedule] == 0 || times[n_calls / 2] < out->median_us[size][schedule])
        out->median_us[size][schedule] = times[n_calls / 2];
}

static void run_rank(const spccl_unique_id *ids, int rank, const struct plan *p)
{
    spccl_comm *comms[N_SCHEDULES];
    size_t n_max = 0;
    float *x, *y;
    unsigned long long rng = (unsigned long long)rank * 77 + 1;
    for (int i = 0; i < p->n_sizes; i++)
        n_max = p->n_elems[i] > n_max ? p->n_elems[i] : n_max;
    x = malloc(n_max * sizeof *x);
    y = malloc(n_max * sizeof *y);
    if (x == NULL || y == NULL) {
        fprintf(stderr, "rank %d: no memory for 2 x %zu elements\n", rank, n_max);
        exit(1);
    }
    for (size_t i = 0; i < n_max; i++) {
        rng = rng * 6364136223846793005u + 1442695040888963407u;
        x[i] = (double)(rng >> 33) < p->density * 0x1p31 ? 1.0f + (float)(rng >> 50) : 0;
    }
    for (int s = 0; s < N_SCHEDULES; s++) {
        spccl_config config = SPCCL_CONFIG_INIT;
        config.transports = "shm";
        setenv("SPCCL_SCHEDULE", names[s], 1);
        check(spccl_comm_init_rank(&ids[s], rank, p->n_ranks, &config, &comms[s]));
    }
    for (int round = 0; round < N_ROUNDS; round++)
        for (int i = 0; i < p->n_sizes; i++)
            for (int s = 0; s < N_SCHEDULES; s++)
                time_calls(comms[s], x, y, p, i, s);
    for (int s = 0; s < N_SCHEDULES; s++)
        check(spccl_comm_destroy(comms[s]));
    free(x);
    free(y);
}

static void print(const struct plan *p)
{
    for (int i = 0; i < p->n_sizes; i++)
        for (int s = 0; s < N_SCHEDULES; s++) {
            double cpu = 0;
            for (int r = 0; r < p->n_ranks; r++)
                cpu += p->out->cpu_us[r][i][s];
            printf(
                "%d ranks, density %g, %g KiB, %s: least %.1f us, median %.1f us, CPU of all ranks %.2f us\n",
                p->n_ranks, p->density, (double)p->n_elems[i] / 256, names[s], p->out->least_us[i][s],
                p->out->median_us[i][s], cpu);
        }
}

int main(int argc, char **argv)
{
    struct plan p = {.n_ranks = argc > 1 ? atoi(argv[1]) : 2,
                     .n_sizes = argc > 3 ? argc - 3 : 5,
                     .density = argc > 2 ? atof(argv[2]) : 0.01,
                     .n_elems = {1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10}};
    int rank = 0, failed = 0;
    pid_t pids[RANKS_CAP];
    spccl_unique_id ids[N_SCHEDULES];
    p.out = mmap(NULL, sizeof *p.out, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (p.n_ranks < 1 || p.n_ranks > RANKS_CAP || p.n_sizes > SIZES_CAP || p.out == MAP_FAILED) {
        fprintf(stderr, "usage: %s [RANKS 1..%d [DENSITY [KIB ...]]]\n", argv[0], RANKS_CAP);
        return 2;
    }
    for (int i = 0; argc > 3 && i < p.n_sizes; i++)
        p.n_elems[i] = (size_t)(atof(argv[3 + i]) * 256);
    for (int s = 0; s < N_SCHEDULES; s++)
        check(spccl_get_unique_id(&ids[s]));
    for (int r = 1; r < p.n_ranks && rank == 0; r++) {
        pids[r] = fork();
        if (pids[r] < 0) {
            perror("fork");
            for (int i = 1; i < r; i++)
                kill(pids[i], SIGKILL); /* else they wait for the missing ranks */
            exit(1);
        }
        rank = pids[r] == 0 ? r : 0;
    }
    run_rank(ids, rank, &p);
    if (rank != 0)
        _exit(0);
    for (int status; wait(&status) > 0;)
        failed |= status;
    if (failed == 0)
        print(&p);
    return failed != 0;
}
