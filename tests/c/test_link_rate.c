/* test_link_rate.c - when rates change the order of transports: as a table, and in groups over the test plugin, whose
 * devices have a rate below or above that of an interface of tcp. */
#include "core/contract/link_rate.h"
#include "spccl.h"
#include "test.h"

#include <errno.h>
#include <sched.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

static void test_table(void)
{
    static const struct {
        uint32_t mbps[4];
        int n, want;
        const char *what;
    } cases[] = {{{0, 0, 0}, 3, 0, "all unknown"},
                 {{0, 100000}, 2, 0, "the first unknown"},
                 {{10000, 0}, 2, 0, "the second unknown"},
                 {{10000, 100000}, 2, 1, "tcp of 100 Gbit/s, plugin of 10"},
                 {{10000, 20000}, 2, 0, "twice"},
                 {{10000, 20001}, 2, 1, "more than twice"},
                 {{100000, 10000}, 2, 0, "slower"},
                 {{10000, 0, 100000}, 3, 2, "past one that is unknown"},
                 {{10000, 30000, 50000}, 3, 1, "the third is not twice the second"},
                 {{10000, 30000, 70000}, 3, 2, "each more than twice the one before"},
                 {{0, 10000, 40000}, 3, 0, "unknown stays first"},
                 {{3000000000u, 4000000000u}, 2, 0, "no overflow"},
                 {{1, 4000000000u}, 2, 1, "the highest"},
                 {{5}, 1, 0, "one"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int got = sp_rate_choose(cases[i].mbps, cases[i].n, true);
        CHECK(got == cases[i].want, "%s: got %d, wanted %d", cases[i].what, got, cases[i].want);
        CHECK(sp_rate_choose(cases[i].mbps, cases[i].n, false) == 0, "%s: rates must not decide",
              cases[i].what);
    }
    CHECK(sp_rate_of_pair(0, 5) == 0 && sp_rate_of_pair(5, 0) == 0 && sp_rate_of_pair(7, 5) == 5,
          "the rate of a pair");
}

/* ---- groups: the interface of tcp is one end of a virtual cable, whose driver says 10 Gbit/s ---- */

static const struct scenario {
    const char *speed;          /* of the plugin's device, in Mbit/s */
    const char *transports[2];  /* of each rank; NULL: the default */
    const char *start, *within; /* of the link's text, at both ranks */
} scenarios[] = {
    {"1000", {NULL}, "tcp: 10.0 Gbit/s", "plugin Test Sockets has 1.0"},
    {"5000", {NULL}, "ncclnet: plugin Test Sockets", "sock0"},
    {"4999", {NULL}, "tcp: 10.0 Gbit/s", "has 5.0"},
    {"40000", {NULL}, "ncclnet: plugin Test Sockets", "sock0"},
    {"0", {NULL}, "ncclnet: plugin Test Sockets", "sock0"},
    {"1000", {"ncclnet,tcp", "ncclnet,tcp"}, "ncclnet: plugin Test Sockets", "sock0"},
    {"1000", {NULL, "ncclnet,tcp"}, "ncclnet: plugin Test Sockets", "sock0"},
    {"1000", {"ncclnet"}, "ncclnet: plugin Test Sockets", "sock0"},
};
#define N_SCENARIOS (sizeof scenarios / sizeof *scenarios)

/* Rank 0 makes the id, as that starts a thread: this process, which forks the ranks, has none. */
struct shared {
    spccl_unique_id id;
    atomic_bool made;
};

static void join(const struct scenario *s, struct shared *shared, int rank)
{
    float in[1000], out[1000];
    const char *text = "";
    spccl_comm *comm = NULL;
    setenv("SPCCL_HOST_ID", rank == 0 ? "a" : "b", 1);
    setenv("TEST_NET_SPEED", s->speed, 1);
    if (s->transports[rank] != NULL)
        setenv("SPCCL_TRANSPORTS", s->transports[rank], 1);
    if (rank == 0) {
        CHECK_OK(spccl_get_unique_id(&shared->id));
        atomic_store(&shared->made, true);
    }
    for (int64_t start_ms = now_ms(); !atomic_load(&shared->made) && now_ms() - start_ms < 30000;)
        sleep_ms(1);
    CHECK(atomic_load(&shared->made), "rank 0 made no id within 30 s");
    CHECK_OK(spccl_comm_init_rank(&shared->id, rank, 2, NULL, &comm));
    if (comm == NULL)
        return;
    CHECK_OK(spccl_comm_describe_link(comm, 1 - rank, &text));
    CHECK(strncmp(text, s->start, strlen(s->start)) == 0 && strstr(text, s->within) != NULL,
          "speed %s, rank %d: \"%s\"", s->speed, rank, text);
    for (int i = 0; i < 1000; i++)
        in[i] = i % 7 == 0 ? (float)(i + rank) : 0.0f;
    CHECK_OK(spccl_all_reduce(comm, in, out, 1000, SPCCL_FLOAT32, SPCCL_SUM, NULL));
    for (int i = 0; i < 1000; i++)
        CHECK(out[i] == (i % 7 == 0 ? (float)(2 * i + 1) : 0.0f), "element %d: %g", i, (double)out[i]);
    CHECK_OK(spccl_comm_destroy(comm));
}

static void run_scenario(const struct scenario *s)
{
    struct shared *shared =
        mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    pid_t pids[2];
    fflush(stdout);
    for (int rank = 0; rank < 2; rank++)
        if ((pids[rank] = fork()) == 0) {
            test_n_failed = 0;
            join(s, shared, rank);
            exit(test_n_failed != 0);
        }
    for (int rank = 0; rank < 2; rank++) {
        int status = -1;
        CHECK(waitpid(pids[rank], &status, 0) == pids[rank] && WIFEXITED(status) && WEXITSTATUS(status) == 0,
              "speed %s: rank %d failed (%x)", s->speed, rank, status);
    }
    munmap(shared, sizeof *shared);
}

/* This process moves to a network of its own. False: it may not. */
static bool enter_network(void)
{
    return (unshare(CLONE_NEWNET) == 0 || unshare(CLONE_NEWUSER | CLONE_NEWNET) == 0) &&
           system("{ ip link set lo up && ip link add ra type veth peer name rb &&"
                  " ip addr add 10.99.0.1/24 dev ra && ip link set ra up && ip link set rb up; }"
                  " 2>/dev/null && i=0 && until ip link show ra | grep -q 'state UP'; do"
                  " sleep 0.05; i=$((i + 1)); [ $i -lt 600 ] || exit 1; done") == 0;
}

static void test_groups(void)
{
    if (!enter_network()) {
        printf("groups: skipped, as this process cannot make a network: errno %d\n", errno);
        return;
    }
    setenv("SPCCL_NET_PLUGIN", NET_PLUGIN_FOLDER "/libnccl-net-test_all.so", 1);
    setenv("SPCCL_TCP_ADDR", "ra", 1);
    for (size_t i = 0; i < N_SCENARIOS; i++)
        run_scenario(&scenarios[i]);
}

int main(int argc, char **argv)
{
    static const struct test_case cases[] = {{"table", test_table}, {"groups", test_groups}, {NULL, NULL}};
    return test_main(cases, argc, argv);
}
