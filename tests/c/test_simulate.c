/* test_simulate.c - the simulator: merged ranks give what all ranks give, plans from files what the same plan of the library
 * gives, times obey the link and the cores, and what cannot be simulated is refused by a sentence. Its bytes are compared
 * with collectives that run in test_plan_cost.c. */
#include "spccl_experimental.h"
#include "test.h"

#include <string.h>

#define N_64 ((uint64_t)64 * 64 * 24) /* elements that 64 ranks share equally */

static const spccl_simulate_options start = {.struct_bytes = sizeof start,
                                             .collective = "all_reduce",
                                             .schedule = "direct",
                                             .n_elems = N_64,
                                             .dtype = SPCCL_FLOAT32,
                                             .n_ranks = 64,
                                             .ranks_per_host = 8,
                                             .density = 0.01,
                                             .link_ns = 0.32,
                                             .latency_ns = 10000};

static spccl_simulated run(const spccl_simulate_options *o)
{
    spccl_simulated out = {.struct_bytes = sizeof out};
    CHECK_OK(spccl_simulate(o, &out));
    return out;
}

static void same(const spccl_simulate_options *o, double a, double b, const char *what)
{
    CHECK(a <= 1.01 * b && b <= 1.01 * a,
          "%s %s, %d ranks, %d per host, density %g: %s is %g merged, %g for all ranks", o->schedule,
          o->collective, o->n_ranks, o->ranks_per_host, o->density, what, a, b);
}

/* Merged and unmerged differ by less than 1%, for every schedule, collective and shape that can be merged. */
static void test_merged(void)
{
    static const char *const schedules[] = {"direct", "relayed", "ring", "hierarchical", "oneshot"};
    static const char *const colls[] = {"all_reduce", "all_gather", "reduce_scatter"};
    static const int shapes[][3] = {
        {64, 8, 2}, {16, 1, 0}, {24, 4, 3}, {32, 32, 0}}; /* ranks, per host, cores */
    for (int i = 0; i < 5 * 3 * 4; i++) {
        spccl_simulate_options o = start;
        spccl_simulated merged, all;
        o.schedule = schedules[i / 12];
        o.collective = colls[i / 4 % 3];
        o.n_ranks = shapes[i % 4][0];
        o.ranks_per_host = shapes[i % 4][1];
        o.cores = shapes[i % 4][2];
        o.density = i % 3 == 0 ? 0.4 : 0.01;
        o.n_elems = i / 4 % 3 == 0 ? N_64 * 3 : N_64 * 3 / (uint64_t)o.n_ranks;
        if (strcmp(o.schedule, "oneshot") == 0) {
            if (strcmp(o.collective, "all_reduce") != 0)
                continue;
            o.n_elems = 300 * 64;
        }
        o.merge = 1;
        merged = run(&o);
        o.merge = -1;
        o.n_elems = merged.n_elems;
        all = run(&o);
        CHECK(merged.n_simulated < o.n_ranks && all.n_simulated == o.n_ranks, "%s: %d and %d ranks simulated",
              o.schedule, merged.n_simulated, all.n_simulated);
        same(&o, merged.time_ns, all.time_ns, "time");
        same(&o, merged.wire_bytes, all.wire_bytes, "bytes");
        same(&o, merged.link_bytes, all.link_bytes, "bytes of a link");
        same(&o, merged.memory_bytes, all.memory_bytes, "memory");
    }
}

/* 4096 ranks are 8: the work is bounded, whatever the machine. */
static void test_many_ranks(void)
{
    static const char *const schedules[] = {"direct", "relayed", "ring", "hierarchical"};
    for (int i = 0; i < 4; i++) {
        spccl_simulate_options o = start;
        spccl_simulated out;
        o.schedule = schedules[i];
        o.n_ranks = 4096;
        o.n_elems = 16 << 20;
        out = run(&o);
        CHECK(out.n_simulated == 8 && out.n_events < 6000000 && out.n_elems == o.n_elems,
              "%s: %d ranks simulated, %llu events", o.schedule, out.n_simulated,
              (unsigned long long)out.n_events);
        CHECK(out.time_ns >= out.link_bytes * o.link_ns, "%s: %g ns for %g bytes of a link", o.schedule,
              out.time_ns, out.link_bytes);
    }
}

/* A plan from a file gives what the library's own plan gives: here direct of two ranks. */
static void test_plan_text(void)
{
    static const char text[] =
        "spccl-plan 1\nplan all_reduce pairs ranks=2 hosts=any chunks=2 block=1 slots=0\n"
        "rank 0\nrecv chunk=1 from=1@result out\n"
        "reduce chunk=0 from=1@input own=in at=0 out to=1@result\n"
        "send chunk=1 src=in to=1@input\n"
        "rank 1\nrecv chunk=0 from=0@result out\n"
        "reduce chunk=1 from=0@input own=in at=1 out to=0@result\n"
        "send chunk=0 src=in to=0@input\nend\n";
    spccl_simulate_options o = start;
    spccl_simulated direct, written;
    spccl_simulated out = {.struct_bytes = sizeof out};
    o.n_ranks = 2;
    o.ranks_per_host = 1;
    direct = run(&o);
    o.schedule = NULL;
    o.plan_text = text;
    o.plan_bytes = sizeof text - 1;
    written = run(&o);
    CHECK(written.wire_bytes == direct.wire_bytes && written.time_ns == direct.time_ns,
          "%g bytes and %g ns, wanted %g and %g", written.wire_bytes, written.time_ns, direct.wire_bytes,
          direct.time_ns);
    o.plan_index = 1;
    CHECK_FAILS(spccl_simulate(&o, &out), SPCCL_ERR_ARG, "the text has no plan 1");
    o.plan_index = 0;
    o.n_ranks = 3;
    CHECK_FAILS(spccl_simulate(&o, &out), SPCCL_ERR_ARG, "plan pairs is for 2 ranks, and there are 3");
    o.n_ranks = 2;
    o.plan_bytes = 120;
    CHECK_FAILS(spccl_simulate(&o, &out), SPCCL_ERR_SETTING, "line");
}

/* Where one thing is slow, the time is that of this thing. Only this test sees that the hierarchical schedule lets all
 * hosts send at once: results are right in any order of turns. */
static void test_times(void)
{
    static const char *const schedules[] = {"hierarchical", "direct"};
    spccl_simulate_options o = start;
    spccl_simulated slow, shared, alone;
    o.density = 1;
    o.n_ranks = 8;
    o.ranks_per_host = 2;
    o.n_elems = 1 << 20;
    o.link_ns = 80; /* 100 Mbit/s: no other work counts */
    for (int i = 0; i < 2; i++) {
        o.schedule = schedules[i];
        slow = run(&o);
        CHECK(slow.time_ns >= slow.link_bytes * o.link_ns &&
                  slow.time_ns < 1.15 * slow.link_bytes * o.link_ns,
              "%s: %g ns, the link needs %g", o.schedule, slow.time_ns, slow.link_bytes * o.link_ns);
    }
    o.burst_bytes = slow.link_bytes; /* everything passes at once */
    CHECK(run(&o).time_ns < slow.time_ns / 4, "a burst of all bytes takes %g ns", run(&o).time_ns);
    o.burst_bytes = 0;
    o.link_ns = 1e-6;
    alone = run(&o);
    o.cores = 2;
    o.shared_cores = 1; /* 2 cores for 8 ranks */
    shared = run(&o);
    CHECK(shared.time_ns >= 4 * shared.cpu_ns * 0.99 && shared.time_ns > 2 * alone.time_ns,
          "8 ranks on 2 cores take %g ns, each works %g ns; with a core each %g", shared.time_ns,
          shared.cpu_ns, alone.time_ns);
}

/* Nonzeros at the same places make sums sparser. */
static void test_overlap(void)
{
    spccl_simulate_options o = start;
    double apart = run(&o).wire_bytes;
    o.overlap = 1;
    CHECK(run(&o).wire_bytes < 0.3 * apart, "%g bytes with equal supports, %g without", run(&o).wire_bytes,
          apart);
}

static void test_refused(void)
{
    static const struct {
        int n_ranks, per_host;
        double density, overlap, pass_ns;
        const char *schedule, *collective, *text;
    } bad[] = {
        {1, 1, 0.1, 0, 0, "direct", "all_reduce", "1 ranks, wanted 2 to 4096"},
        {8192, 8, 0.1, 0, 0, "direct", "all_reduce", "8192 ranks, wanted 2 to 4096"},
        {4, 8, 0.1, 0, 0, "direct", "all_reduce", "8 ranks per host, wanted 1 to 4"},
        {4, 2, 1.5, 0, 0, "direct", "all_reduce", "density is 1.5"},
        {4, 2, 0.1, -1, 0, "direct", "all_reduce", "overlap is -1"},
        {4, 2, 0.1, 0, -3, "direct", "all_reduce", "pass_ns is -3"},
        {4, 2, 0.1, 0, 0, "rings", "all_reduce", "schedule \"rings\""},
        {4, 2, 0.1, 0, 0, "auto", "all_reduce", "wanted the name of one"},
        {4, 2, 0.1, 0, 0, "direct", "all_sum", "collective \"all_sum\""},
        {4, 2, 0.1, 0, 0, "oneshot", "all_gather", "schedule oneshot has no all_gather"},
        {4, 2, 0.1, 0, 0, NULL, "all_reduce", "give a schedule or plan_text"},
        {4096, 8, 0.1, 0, 0, "direct", "broadcast", "its ranks are not equal"},
    };
    spccl_simulated out = {.struct_bytes = sizeof out};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        spccl_simulate_options o = start;
        o.n_ranks = bad[i].n_ranks;
        o.ranks_per_host = bad[i].per_host;
        o.density = bad[i].density;
        o.overlap = bad[i].overlap;
        o.pass_ns = bad[i].pass_ns;
        o.schedule = bad[i].schedule;
        o.collective = bad[i].collective;
        CHECK(spccl_simulate(&o, &out) != SPCCL_OK && strstr(spccl_last_error(), bad[i].text) != NULL,
              "case %zu: \"%s\", wanted \"%s\"", i, spccl_last_error(), bad[i].text);
    }
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {
        {"merged", test_merged},
        {"many_ranks", test_many_ranks},
        {"plan_text", test_plan_text},
        {"times", test_times},
        {"overlap", test_overlap},
        {"refused", test_refused},
        {NULL, NULL},
    };
    return test_main(cases, argc, argv);
}
