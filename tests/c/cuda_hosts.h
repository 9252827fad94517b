/* cuda_hosts.h - for tests of GPU groups on several hosts: ranks are threads, and their hosts have different names.
 * Between hosts proxies carry the rings over TCP on loopback. */
#ifndef SP_CUDA_HOSTS_H
#define SP_CUDA_HOSTS_H

#include "cuda_cases.h"
#include "cuda_sums.h"

#include "fault.h"

/* The next groups have so many proxies per rank: 1, 2, 3, 5, and again. */
static inline void next_proxies(void)
{
    static const char *const counts[] = {"1", "2", "3", "5"};
    static unsigned n;
    setenv("SPCCL_DEBUG_CUDA_PROXIES", counts[n++ % 4], 1);
}

/* In the next groups all-reduces take two hops, and results are relayed if a host has two ranks. */
static inline void relay_results(void)
{
    setenv("SPCCL_SCHEDULE", "relayed", 1);
}

static inline void run_hosts(int n_hosts, int n_per_host, struct group g)
{
    next_proxies();
    test_ranks_per_host = n_per_host;
    g.n_ranks = n_hosts * n_per_host;
    run_group(&g);
}

/* A rank that is refused GPU collectives; c->arg: what the error says. */
static inline void is_refused(struct rank_ctx *c)
{
    spccl_cuda_config config = SPCCL_CUDA_CONFIG_INIT;
    const char *wanted = c->arg;
    spccl_status st;
    config.device = rank_buffers[c->rank].device;
    st = spccl_cuda_attach(c->comm, &config);
    CHECK(st == SPCCL_ERR_UNREACHABLE && strstr(spccl_last_error(), wanted) != NULL, "rank %d: %s: %s",
          c->rank, spccl_status_name(st), spccl_last_error());
}

/* The setting of all tests. Then allocate the buffers of n_ranks ranks. */
static inline void start_hosts(int *argc, char **argv, int n_ranks)
{
    cuda_test_start(argc, argv);
    setenv("SPCCL_CUDA_ROUTE", "spccl", 1);
    relay_results(); /* so that kernels wait in both hops */
    group_transports = "tcp";
    make_rank_buffers(is_small ? 4 : n_ranks, total_bytes() + 4 * GUARD_BYTES);
}

#endif
