/* bench_host.h - what benches of one thread on the host share: medians of ROUNDS runs as rates. */
#ifndef SPCCL_BENCH_HOST_H
#define SPCCL_BENCH_HOST_H

#include "core/base/clock.h"
#include "spccl.h"

#include <stdio.h>
#include <stdlib.h>

#define ROUNDS 9

static inline int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* v [ROUNDS]; it is sorted. */
static inline double median(double *v)
{
    qsort(v, ROUNDS, sizeof *v, by_value);
    return v[ROUNDS / 2];
}

static inline void ok(spccl_status st)
{
    if (st != SPCCL_OK)
        exit((fprintf(stderr, "%s\n", spccl_last_error()), 1));
}

/* Print and return the rate of `run`, which moves so many bytes, in GB/s. read: the rate of a plain read; 0: not known. */
static inline double measure(const char *name, double bytes, double read, void (*run)(void))
{
    double t[ROUNDS], ns, rate;
    for (int i = -2; i < ROUNDS; i++) {
        int64_t start = sp_now_ns();
        run();
        if (i >= 0)
            t[i] = (double)(sp_now_ns() - start);
    }
    ns = median(t);
    rate = bytes / ns;
    printf("  %-26s %8.2f ms  %7.2f GB/s", name, ns / 1e6, rate);
    printf(read > 0 ? "  %5.2f of read\n" : "\n", rate / read);
    return rate;
}

#endif
