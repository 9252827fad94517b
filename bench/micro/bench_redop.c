/* bench_redop.c - all-reduce in place with SUM and with AVG, in turns, between processes of one host over shm.
 *
 *   spccl_bench_redop [RANKS [DENSITY [CALLS]]]      default: 2 0.01 31
 *
 * Prints the CPU time that all ranks together take for a call of 64 MiB of float32. CPU time, unlike wall-clock
 * time, says something on a machine that does other work too. */
#include "spccl.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define N_ELEMS ((size_t)16 << 20)
#define CALLS_CAP 1000
#define RANKS_CAP 16
#define N_WARM_UP 2

static const char *const names[2] = {"sum", "avg"};

/* In memory that the processes share: milliseconds by rank, operation and call. */
typedef double times[RANKS_CAP][2][CALLS_CAP];

static double cpu_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

static void check(spccl_status st)
{
    if (st == SPCCL_OK)
        return;
    fprintf(stderr, "%s: %s\n", spccl_status_name(st), spccl_last_error());
    exit(1);
}

/* Returns when all ranks have called it. */
static void barrier(spccl_comm *comm)
{
    float one = 1;
    check(spccl_all_reduce(comm, &one, &one, 1, SPCCL_FLOAT32, SPCCL_SUM, NULL));
}

static void run_rank(const spccl_unique_id *id, int rank, int n_ranks, double density, int n_calls,
                     times *out)
{
    spccl_config config = SPCCL_CONFIG_INIT;
    float *x = malloc(N_ELEMS * 4), *y = malloc(N_ELEMS * 4);
    spccl_comm *comm = NULL;
    unsigned long long rng = (unsigned long long)rank * 77 + 1;
    if (x == NULL || y == NULL)
        exit(1);
    for (size_t i = 0; i < N_ELEMS; i++) {
        rng = rng * 6364136223846793005u + 1442695040888963407u;
        x[i] = (double)(rng >> 33) < density * 0x1p31 ? 1.0f + (float)(rng >> 50) : 0;
    }
    config.transports = "shm";
    check(spccl_comm_init_rank(id, rank, n_ranks, &config, &comm));
    for (int call = -N_WARM_UP; call < n_calls; call++)
        for (int op = 0; op < 2; op++) {
            double began;
            memcpy(y, x, N_ELEMS * 4);
            barrier(comm);
            began = cpu_ms();
            check(
                spccl_all_reduce(comm, y, y, N_ELEMS, SPCCL_FLOAT32, op == 0 ? SPCCL_SUM : SPCCL_AVG, NULL));
            barrier(comm);
            if (call >= 0)
                (*out)[rank][op][call] = cpu_ms() - began;
        }
    barrier(comm);
    check(spccl_comm_destroy(comm));
    free(x);
    free(y);
}

static int by_size(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static void print(times *t, int n_ranks, double density, int n_calls)
{
    double medians[2];
    for (int op = 0; op < 2; op++) {
        double *all = (*t)[0][op];
        for (int call = 0; call < n_calls; call++)
            for (int r = 1; r < n_ranks; r++)
                all[call] += (*t)[r][op][call];
        qsort(all, (size_t)n_calls, sizeof *all, by_size);
        medians[op] = all[n_calls / 2];
        printf("%d ranks, density %g, %s: %.2f ms of CPU, quartiles %.2f to %.2f\n", n_ranks, density,
               names[op], medians[op], all[n_calls / 4], all[3 * n_calls / 4]);
    }
    printf("avg / sum: %.3f\n", medians[1] / medians[0]);
}

int main(int argc, char **argv)
{
    int n_ranks = argc > 1 ? atoi(argv[1]) : 2, n_calls = argc > 3 ? atoi(argv[3]) : 31, rank = 0, failed = 0;
    double density = argc > 2 ? atof(argv[2]) : 0.01;
    times *t = mmap(NULL, sizeof *t, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    spccl_unique_id id;
    if (n_ranks < 1 || n_ranks > RANKS_CAP || n_calls < 1 || n_calls > CALLS_CAP || t == MAP_FAILED) {
        fprintf(stderr, "usage: %s [RANKS 1..%d [DENSITY [CALLS 1..%d]]]\n", argv[0], RANKS_CAP, CALLS_CAP);
        return 2;
    }
    check(spccl_get_unique_id(&id));
    for (int r = 1; r < n_ranks && rank == 0; r++)
        rank = fork() == 0 ? r : 0;
    run_rank(&id, rank, n_ranks, density, n_calls, t);
    if (rank != 0)
        _exit(0);
    for (int status; wait(&status) > 0;)
        failed |= status;
    if (failed == 0)
        print(t, n_ranks, density, n_calls);
    return failed != 0;
}
